//! Questions to Dynamo's indexes that threads share.

use std::sync::Arc;

use dynamo_kv_router::protocols::{LocalBlockHash, OverlapScores};

use super::router_event::scores;
use super::{Ask, Keys};
use crate::workload::questions::Question;

/// An index that is asked by content hashes, without early exit.
pub trait Search {
    /// Who holds how much.
    fn search(&self, locals: &[LocalBlockHash]) -> OverlapScores;
}

/// Asks an index that others may write or ask meanwhile.
pub struct SharedAsker<T> {
    index: Arc<T>,
    posed: Vec<LocalBlockHash>,
    found: OverlapScores,
}

impl<T> SharedAsker<T> {
    /// Without a question yet.
    pub fn new(index: Arc<T>) -> Self {
        Self { index, posed: Vec::new(), found: OverlapScores::new() }
    }

    /// The index that is asked.
    pub fn index(&self) -> &Arc<T> {
        &self.index
    }
}

impl<T: Search> Ask for SharedAsker<T> {
    fn pose(&mut self, question: &Question, _: Keys) {
        self.posed.clear();
        self.posed.extend(question.locals.iter().map(|&local| LocalBlockHash(local)));
    }

    fn ask(&mut self) {
        self.found = self.index.search(&self.posed);
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        scores(&self.found, into);
    }
}

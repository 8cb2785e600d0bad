//! Dynamo's `PositionalIndexer`: a map by position and content.

use std::sync::Arc;

use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::indexer::positional::{LevelIndex, PositionalIndexer, SearchMode};
use dynamo_kv_router::protocols::{LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank};
use rustc_hash::FxHashMap;

use super::router_asker::{Search, SharedAsker};
use super::router_event::router_event;
use super::{Ask, Contender, HasAsker, Nanos};
use crate::cpu;
use crate::workload::blocks::{Blocks, Event};

/// What its own documentation suggests.
const JUMP: usize = 32;

/// `dynamo_kv_router::PositionalIndexer`.
pub struct Positional {
    name: &'static str,
    blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
    queue: Vec<RouterEvent>,
    asker: SharedAsker<PositionalIndexer>,
}

impl Positional {
    /// Searching by jumps of 32.
    pub fn jump() -> Self {
        Self::new("Dynamo Positional", SearchMode::Strided)
    }

    /// Searching by bisection.
    pub fn binary() -> Self {
        Self::new("Dynamo Positional (binary)", SearchMode::Binary)
    }

    fn new(name: &'static str, mode: SearchMode) -> Self {
        let index = Arc::new(PositionalIndexer::new_with_mode(JUMP, mode));
        Self { name, blocks: FxHashMap::default(), queue: Vec::new(), asker: SharedAsker::new(index) }
    }
}

impl Contender for Positional {
    fn name(&self) -> &'static str {
        self.name
    }

    fn load(&mut self, blocks: &Blocks, events: &[Event]) {
        self.queue.extend(events.iter().map(|event| router_event(blocks, event)));
    }

    fn apply(&mut self) -> Nanos {
        let queue = std::mem::take(&mut self.queue);
        cpu::spent(|| {
            for event in queue {
                // A refusal shows as a wrong answer.
                let _ = self.asker.index().apply_event(&mut self.blocks, event, None);
            }
        })
    }

    fn reader(&self) -> Option<Box<dyn Ask + Send>> {
        Some(Box::new(SharedAsker::new(Arc::clone(self.asker.index()))))
    }
}

impl HasAsker for Positional {
    type Asker = SharedAsker<PositionalIndexer>;

    fn asker(&self) -> &Self::Asker {
        &self.asker
    }

    fn asker_mut(&mut self) -> &mut Self::Asker {
        &mut self.asker
    }
}

impl Search for PositionalIndexer {
    fn search(&self, locals: &[LocalBlockHash]) -> OverlapScores {
        self.find_matches(locals, false)
    }
}

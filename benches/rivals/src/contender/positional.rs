//! Dynamo's `PositionalIndexer`: a map by position and content.

use std::sync::Arc;

use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::indexer::positional::{LevelIndex, PositionalIndexer, SearchMode};
use dynamo_kv_router::protocols::{LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank};
use rustc_hash::FxHashMap;

use super::router_event::{router_event, scores};
use super::{Ask, Contender, Keys, Nanos};
use crate::cpu;
use crate::workload::blocks::{Blocks, Event};
use crate::workload::questions::Question;

/// What its own documentation suggests.
const JUMP: usize = 32;

/// `dynamo_kv_router::PositionalIndexer`.
pub struct Positional {
    name: &'static str,
    blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
    queue: Vec<RouterEvent>,
    asker: Asker,
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
        Self { name, blocks: FxHashMap::default(), queue: Vec::new(), asker: Asker::new(index) }
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
                let _ = self.asker.index.apply_event(&mut self.blocks, event, None);
            }
        })
    }

    fn reader(&self) -> Option<Box<dyn Ask + Send>> {
        Some(Box::new(Asker::new(Arc::clone(&self.asker.index))))
    }
}

impl Ask for Positional {
    fn pose(&mut self, question: &Question, keys: Keys) {
        self.asker.pose(question, keys);
    }

    fn ask(&mut self) {
        self.asker.ask();
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        self.asker.answer(into);
    }
}

struct Asker {
    index: Arc<PositionalIndexer>,
    posed: Vec<LocalBlockHash>,
    found: OverlapScores,
}

impl Asker {
    fn new(index: Arc<PositionalIndexer>) -> Self {
        Self { index, posed: Vec::new(), found: OverlapScores::new() }
    }
}

impl Ask for Asker {
    fn pose(&mut self, question: &Question, _: Keys) {
        self.posed.clear();
        self.posed.extend(question.locals.iter().map(|&local| LocalBlockHash(local)));
    }

    fn ask(&mut self) {
        self.found = self.index.find_matches(&self.posed, false);
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        scores(&self.found, into);
    }
}

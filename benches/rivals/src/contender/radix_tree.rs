//! Dynamo's `RadixTree`: one thread, path-compressed.

use dynamo_kv_router::protocols::{LocalBlockHash, OverlapScores, RouterEvent};

use super::router_event::{router_event, scores};
use super::{Ask, Contender, DumpCost, Keys, Nanos};
use crate::cpu;
use crate::workload::blocks::{Blocks, Event};
use crate::workload::questions::Question;

/// `dynamo_kv_router::RadixTree`.
pub struct RadixTree {
    tree: dynamo_kv_router::RadixTree,
    queue: Vec<RouterEvent>,
    posed: Vec<LocalBlockHash>,
    found: OverlapScores,
}

impl RadixTree {
    /// An empty tree.
    pub fn new() -> Self {
        Self {
            tree: dynamo_kv_router::RadixTree::new(),
            queue: Vec::new(),
            posed: Vec::new(),
            found: OverlapScores::new(),
        }
    }
}

impl Default for RadixTree {
    fn default() -> Self {
        Self::new()
    }
}

impl Contender for RadixTree {
    fn name(&self) -> &'static str {
        "Dynamo RadixTree"
    }

    fn load(&mut self, blocks: &Blocks, events: &[Event]) {
        self.queue.extend(events.iter().map(|event| router_event(blocks, event)));
    }

    fn apply(&mut self) -> Nanos {
        let queue = std::mem::take(&mut self.queue);
        cpu::spent(|| {
            for event in queue {
                // A refusal shows as a wrong answer.
                let _ = self.tree.apply_event(event);
            }
        })
    }

    fn dump_and_rebuild(&mut self) -> Option<DumpCost> {
        let mut events = Vec::new();
        let dump = cpu::spent(|| events = self.tree.dump_tree_as_events());
        let mut tree = dynamo_kv_router::RadixTree::new();
        let rebuild = cpu::spent(|| {
            for event in events {
                let _ = tree.apply_event(event);
            }
        });
        self.tree = tree;
        Some(DumpCost { dump, rebuild })
    }
}

impl Ask for RadixTree {
    fn pose(&mut self, question: &Question, _: Keys) {
        self.posed.clear();
        self.posed.extend(question.locals.iter().map(|&local| LocalBlockHash(local)));
    }

    fn ask(&mut self) {
        // The tree takes the hashes by value: the caller that has them gives them away.
        let posed = std::mem::take(&mut self.posed);
        self.found = self.tree.find_matches(posed, false);
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        scores(&self.found, into);
    }
}

//! `radix_trie` used naively: a key per block, which is the path to it, and the ranks that hold it.

use radix_trie::Trie;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Ask, Contender, Keys, Nanos};
use crate::cpu;
use crate::workload::blocks::{BlockId, Blocks, Event};
use crate::workload::questions::Question;

/// A `radix_trie::Trie` by paths of content hashes.
pub struct Naive {
    trie: Trie<Vec<u8>, FxHashSet<u32>>,
    /// Where a rank's names are, since removals say no more.
    names: FxHashMap<(u32, u64), Vec<u8>>,
    queue: Vec<Queued>,
    posed: Vec<u8>,
    found: Vec<(u32, u32)>,
}

enum Queued {
    Store { rank: u32, parent: Option<u64>, blocks: Vec<(u64, u64)> },
    Remove { rank: u32, names: Vec<u64> },
    Clear { rank: u32 },
}

impl Naive {
    /// An empty trie.
    pub fn new() -> Self {
        Self {
            trie: Trie::new(),
            names: FxHashMap::default(),
            queue: Vec::new(),
            posed: Vec::new(),
            found: Vec::new(),
        }
    }

    fn store(&mut self, rank: u32, parent: Option<u64>, blocks: &[(u64, u64)]) {
        let mut key = match parent {
            None => Vec::new(),
            Some(parent) => match self.names.get(&(rank, parent)) {
                Some(key) => key.clone(),
                None => return,
            },
        };
        for &(name, local) in blocks {
            key.extend_from_slice(&local.to_le_bytes());
            self.names.insert((rank, name), key.clone());
            match self.trie.get_mut(&key) {
                Some(ranks) => {
                    ranks.insert(rank);
                }
                None => {
                    self.trie.insert(key.clone(), FxHashSet::from_iter([rank]));
                }
            }
        }
    }

    fn remove(&mut self, rank: u32, name: u64) {
        let Some(key) = self.names.remove(&(rank, name)) else { return };
        let Some(ranks) = self.trie.get_mut(&key) else { return };
        ranks.remove(&rank);
        if ranks.is_empty() {
            self.trie.remove(&key);
        }
    }
}

impl Default for Naive {
    fn default() -> Self {
        Self::new()
    }
}

impl Contender for Naive {
    fn name(&self) -> &'static str {
        "radix_trie"
    }

    fn load(&mut self, blocks: &Blocks, events: &[Event]) {
        let name = |rank: u32, block: &BlockId| blocks.name(rank, *block);
        self.queue.extend(events.iter().map(|event| match event {
            Event::Stored { rank, parent, blocks: stored } => Queued::Store {
                rank: *rank,
                parent: parent.as_ref().map(|parent| name(*rank, parent)),
                blocks: stored.iter().map(|block| (name(*rank, block), blocks.local(*block))).collect(),
            },
            Event::Removed { rank, blocks } => {
                Queued::Remove { rank: *rank, names: blocks.iter().map(|block| name(*rank, block)).collect() }
            }
            Event::Cleared { rank } => Queued::Clear { rank: *rank },
        }));
    }

    fn apply(&mut self) -> Nanos {
        let queue = std::mem::take(&mut self.queue);
        cpu::spent(|| {
            for event in &queue {
                match event {
                    Queued::Store { rank, parent, blocks } => self.store(*rank, *parent, blocks),
                    Queued::Remove { rank, names } => {
                        names.iter().for_each(|&name| self.remove(*rank, name));
                    }
                    Queued::Clear { rank } => {
                        let of_rank = self.names.keys().filter(|(of, _)| of == rank);
                        let names: Vec<u64> = of_rank.map(|&(_, name)| name).collect();
                        names.into_iter().for_each(|name| self.remove(*rank, name));
                    }
                }
            }
        })
    }
}

impl Ask for Naive {
    fn pose(&mut self, question: &Question, _: Keys) {
        self.posed.clear();
        self.posed.extend(question.locals.iter().flat_map(|local| local.to_le_bytes()));
    }

    fn ask(&mut self) {
        self.found.clear();
        let mut alive: Option<FxHashSet<u32>> = None;
        let mut depth = 0;
        for end in (8..=self.posed.len()).step_by(8) {
            let key = self.posed[..end].to_vec();
            let Some(holders) = self.trie.get(&key) else { break };
            match &mut alive {
                None => alive = Some(holders.clone()),
                Some(alive) => {
                    let found = &mut self.found;
                    alive.retain(|rank| {
                        let stays = holders.contains(rank);
                        if !stays {
                            found.push((*rank, depth));
                        }
                        stays
                    });
                }
            }
            depth += 1;
        }
        self.found.extend(alive.unwrap_or_default().into_iter().map(|rank| (rank, depth)));
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        into.clear();
        into.extend_from_slice(&self.found);
    }
}

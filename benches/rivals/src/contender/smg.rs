//! SMG's `kv-index`: the run-compressed tree with a block map per worker.

use std::ops::Range;
use std::sync::Arc;

use kv_index::{ChainBlockMap, ChainIndex, SequenceHash, StoredBlock};

use super::{Ask, Contender, HasAsker, Keys, Nanos};
use crate::cpu;
use crate::workload::blocks::{Blocks, Event};
use crate::workload::questions::Question;

/// `kv_index::ChainIndex`.
pub struct Smg {
    index: Arc<ChainIndex>,
    workers: Vec<u32>,
    maps: Vec<ChainBlockMap>,
    asker: Asker,
    queue: Queue,
}

#[derive(Default)]
struct Queue {
    events: Vec<Queued>,
    blocks: Vec<StoredBlock>,
    hashes: Vec<SequenceHash>,
}

enum Queued {
    Store { rank: usize, parent: Option<SequenceHash>, blocks: Range<usize> },
    Remove { rank: usize, hashes: Range<usize> },
    Clear { rank: usize },
}

impl Smg {
    /// An empty index with these ranks as workers.
    pub fn new(ranks: u32) -> Self {
        let index = Arc::new(ChainIndex::with_max_workers(ranks as usize));
        // As many workers as the index was made for.
        #[allow(clippy::expect_used)]
        let workers =
            (0..ranks).map(|rank| index.intern_worker(&format!("w{rank}")).expect("room")).collect();
        Self {
            workers,
            maps: (0..ranks).map(|_| ChainBlockMap::new()).collect(),
            asker: Asker { index: Arc::clone(&index), locals: Vec::new(), answer: Vec::new() },
            index,
            queue: Queue::default(),
        }
    }
}

impl Contender for Smg {
    fn name(&self) -> &'static str {
        "SMG ChainIndex"
    }

    fn load(&mut self, blocks: &Blocks, events: &[Event]) {
        let Queue { events: queued, blocks: stored, hashes } = &mut self.queue;
        for event in events {
            match event {
                Event::Stored { rank, parent, blocks: ids } => {
                    let start = stored.len();
                    stored.extend(ids.iter().map(|&block| StoredBlock {
                        seq_hash: SequenceHash(blocks.name(*rank, block)),
                        content_hash: kv_index::ContentHash(blocks.local(block)),
                    }));
                    let parent = parent.map(|parent| SequenceHash(blocks.name(*rank, parent)));
                    queued.push(Queued::Store { rank: *rank as usize, parent, blocks: start..stored.len() });
                }
                Event::Removed { rank, blocks: ids } => {
                    let start = hashes.len();
                    hashes.extend(ids.iter().map(|&block| SequenceHash(blocks.name(*rank, block))));
                    queued.push(Queued::Remove { rank: *rank as usize, hashes: start..hashes.len() });
                }
                Event::Cleared { rank } => queued.push(Queued::Clear { rank: *rank as usize }),
            }
        }
    }

    fn apply(&mut self) -> Nanos {
        let queue = std::mem::take(&mut self.queue);
        let Self { index, workers, maps, .. } = self;
        cpu::spent(|| {
            for event in &queue.events {
                match event {
                    Queued::Store { rank, parent, blocks } => {
                        let (worker, map) = (workers[*rank], &mut maps[*rank]);
                        // A refusal shows as a wrong answer.
                        let _ = index.apply_stored(worker, &queue.blocks[blocks.clone()], *parent, map);
                    }
                    Queued::Remove { rank, hashes } => {
                        let (worker, map) = (workers[*rank], &mut maps[*rank]);
                        index.apply_removed(worker, &queue.hashes[hashes.clone()], map);
                    }
                    Queued::Clear { rank } => index.apply_cleared(workers[*rank], &mut maps[*rank]),
                }
            }
        })
    }

    fn reader(&self) -> Option<Box<dyn Ask + Send>> {
        Some(Box::new(Asker { index: Arc::clone(&self.index), locals: Vec::new(), answer: Vec::new() }))
    }
}

impl HasAsker for Smg {
    type Asker = Asker;

    fn asker(&self) -> &Self::Asker {
        &self.asker
    }

    fn asker_mut(&mut self) -> &mut Self::Asker {
        &mut self.asker
    }
}

/// Asks by the call that allocates nothing.
pub struct Asker {
    index: Arc<ChainIndex>,
    locals: Vec<u64>,
    answer: Vec<(u32, u32)>,
}

impl Ask for Asker {
    fn pose(&mut self, question: &Question, _: Keys) {
        self.locals.clear();
        self.locals.extend_from_slice(&question.locals);
    }

    fn ask(&mut self) {
        let Self { index, locals, answer } = self;
        answer.clear();
        index.score_into(locals, |&local| local, false, |worker, score| answer.push((worker, score)));
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        into.clear();
        // Workers were interned in the order of the ranks.
        into.extend_from_slice(&self.answer);
    }
}

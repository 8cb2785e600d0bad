//! The index of this repository.

use std::ops::Range;

use rankwise::block::{Announcements, BlockHash, BlockSize, Isolation, LocalBlockHash, SequenceHash, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, GroupTag, HybridRule, IndexQuery, Leads, PrefixIndex, Reader, Scratch, StoreRequest, StoreTokens,
};

use super::{Ask, Contender, DumpCost, HasAsker, Keys, Nanos};
use crate::cpu;
use crate::workload::blocks::{BLOCK_SIZE, Blocks, Event};
use crate::workload::questions::Question;

/// Events under one write section. A pump applies what is queued; one section per event would be the
/// opposite end.
const EVENTS_PER_SECTION: usize = 16;

/// Sections after which an index at rest has given back what it retired: a second of an idle pump's ticks.
const SETTLING_SECTIONS: usize = 200;

/// `rankwise::index`.
#[derive(Debug)]
pub struct Rankwise {
    index: PrefixIndex,
    ranks: Vec<RankSlot>,
    asker: Asker,
    queue: Queue,
}

#[derive(Default, Debug)]
struct Queue {
    events: Vec<Queued>,
    names: Vec<BlockHash>,
    /// Content hashes, as the peers get them: hashing is measured on the way from the wire.
    locals: Vec<LocalBlockHash>,
}

#[derive(Debug)]
enum Queued {
    Store { rank: usize, parent: Option<BlockHash>, names: Range<usize> },
    Remove { rank: usize, names: Range<usize> },
    Clear { rank: usize },
}

impl Queued {
    /// The names by which the event finds its place.
    fn leads<'a>(&'a self, names: &'a [BlockHash]) -> Leads<'a> {
        match self {
            Self::Store { parent, names: of, .. } => {
                Leads { parent: parent.as_ref(), names: &names[of.clone()] }
            }
            Self::Remove { names: of, .. } => Leads { parent: None, names: &names[of.clone()] },
            Self::Clear { .. } => Leads::default(),
        }
    }
}

impl Rankwise {
    /// An empty index with these ranks.
    pub fn new(ranks: u32) -> Self {
        // 16 is not zero.
        #[allow(clippy::expect_used)]
        let block_size = BlockSize::new(BLOCK_SIZE).expect("16");
        let (mut index, reader) = index::new(block_size);
        let mut section = index.write();
        let ranks = (0..ranks).map(|_| section.add_rank(Announcements::Counted)).collect();
        drop(section);
        Self { index, ranks, asker: Asker::new(reader), queue: Queue::default() }
    }
}

impl Contender for Rankwise {
    fn name(&self) -> &'static str {
        "rankwise"
    }

    fn load(&mut self, blocks: &Blocks, events: &[Event]) {
        let Queue { events: queued, names, locals } = &mut self.queue;
        for event in events {
            let start = names.len();
            match event {
                Event::Stored { rank, parent, blocks: stored } => {
                    names.extend(stored.iter().map(|&block| BlockHash::Int(blocks.name(*rank, block))));
                    locals.extend(stored.iter().map(|&block| LocalBlockHash(blocks.local(block))));
                    let parent = parent.map(|parent| BlockHash::Int(blocks.name(*rank, parent)));
                    queued.push(Queued::Store { rank: *rank as usize, parent, names: start..names.len() });
                }
                Event::Removed { rank, blocks: removed } => {
                    names.extend(removed.iter().map(|&block| BlockHash::Int(blocks.name(*rank, block))));
                    // Removals have no content; the gap keeps both arrays in step.
                    locals.resize(names.len(), LocalBlockHash(0));
                    queued.push(Queued::Remove { rank: *rank as usize, names: start..names.len() });
                }
                Event::Cleared { rank } => queued.push(Queued::Clear { rank: *rank as usize }),
            }
        }
    }

    fn apply(&mut self) -> Nanos {
        let queue = std::mem::take(&mut self.queue);
        let Self { index, ranks, .. } = self;
        cpu::spent(|| {
            for events in queue.events.chunks(EVENTS_PER_SECTION) {
                let mut section = index.write();
                section.apply_each(
                    events,
                    |event| event.leads(&queue.names),
                    |section, event| match event {
                        Queued::Store { rank, parent, names } => {
                            let request = StoreRequest {
                                tier: Tier::Device,
                                group: GroupTag::default(),
                                names: &queue.names[names.clone()],
                                parent: parent.as_ref(),
                                tokens: StoreTokens::Locals(&queue.locals[names.clone()]),
                                block_size: BLOCK_SIZE,
                                isolation: Isolation::default(),
                                keys: &[],
                                history_complete: true,
                            };
                            // A refusal shows as a wrong answer.
                            let _ = section.store(ranks[*rank], &request);
                        }
                        Queued::Remove { rank, names } => {
                            section.remove(ranks[*rank], Tier::Device, None, &queue.names[names.clone()]);
                        }
                        Queued::Clear { rank } => {
                            section.clear_rank(ranks[*rank]);
                        }
                    },
                );
            }
        })
    }

    fn reader(&self) -> Option<Box<dyn Ask + Send>> {
        Some(Box::new(Asker::new(self.asker.reader.clone())))
    }

    fn settle(&mut self) -> Nanos {
        // Memory that readers might still look at is given back by later sections.
        cpu::spent(|| (0..SETTLING_SECTIONS).for_each(|_| drop(self.index.write())))
    }

    fn dump_and_rebuild(&mut self) -> Option<DumpCost> {
        let mut content = None;
        let dump = cpu::spent(|| content = Some(self.asker.reader.dump()));
        let content = content?;
        let mut rebuilt = None;
        let rebuild = cpu::spent(|| rebuilt = Some(index::of_dump(content)));
        let (index, reader) = rebuilt?;
        self.index = index;
        self.asker = Asker::new(reader);
        Some(DumpCost { dump, rebuild })
    }

    fn uses_sequences(&self) -> bool {
        true
    }
}

impl HasAsker for Rankwise {
    type Asker = Asker;

    fn asker(&self) -> &Self::Asker {
        &self.asker
    }

    fn asker_mut(&mut self) -> &mut Self::Asker {
        &mut self.asker
    }
}

/// Asks by content, and by sequence hashes where the question has them.
#[derive(Debug)]
pub struct Asker {
    reader: Reader,
    scratch: Scratch,
    locals: Vec<LocalBlockHash>,
    sequences: Vec<SequenceHash>,
}

impl Asker {
    fn new(reader: Reader) -> Self {
        Self { reader, scratch: Scratch::default(), locals: Vec::new(), sequences: Vec::new() }
    }
}

impl Ask for Asker {
    fn pose(&mut self, question: &Question, keys: Keys) {
        self.locals.clear();
        self.locals.extend(question.locals.iter().map(|&local| LocalBlockHash(local)));
        self.sequences.clear();
        if keys == Keys::Sequence {
            self.sequences.extend(question.sequences.iter().map(|&sequence| SequenceHash(sequence)));
        }
    }

    fn ask(&mut self) {
        let query =
            IndexQuery { locals: &self.locals, sequences: &self.sequences, hybrid: HybridRule::Joint };
        self.reader.overlap(&query, &mut self.scratch);
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        into.clear();
        into.extend(self.scratch.overlaps().iter().map(|overlap| (overlap.slot.index, overlap.device)));
    }
}

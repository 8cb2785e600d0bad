//! The whole content of an index as one value, and an index made of it.
//!
//! One record per run, parents first: blocks once, holders as intervals. A dump costs one pass over the runs
//! and its size is about the index's; making an index of it costs about a third of what applying the events
//! did.

use super::core::{Core, RankEntry};
use super::coverage::Interval;
use super::forms::TokenForms;
use super::published::{Pin, pin};
use super::rank::Rank;
use super::roster::RankView;
use super::run::ChunkHold;
use super::tree::{Layer, Place, RunId, Tree};
use crate::block::{BlockHash, BlockSize, Isolation};
use crate::ids::RankSlot;

/// The content of an index: what every rank holds and what it calls it.
#[derive(Debug)]
pub struct Dump {
    block_size: BlockSize,
    runs: Vec<DumpedRun>,
    ranks: Vec<(u32, Option<Rank>)>,
    forms: TokenForms,
}

impl Dump {
    /// Records: one per run.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Nothing is held.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// A run; places in it name runs by their number in the dump.
#[derive(Debug)]
pub(super) struct DumpedRun {
    pub(super) parent: Option<Place>,
    pub(super) isolation: Isolation,
    pub(super) locals: Vec<u64>,
    pub(super) names: DumpedNames,
    pub(super) holders: Vec<(Layer, Vec<Interval>)>,
    pub(super) chunks: Vec<ChunkHold>,
}

/// Names of a run's blocks.
#[derive(Debug)]
pub(super) enum DumpedNames {
    /// All blocks have numbers of their own.
    Regular(Vec<u64>),
    /// Any names; `None` where a block has none that leads to it.
    Any { bytes: bool, names: Vec<Option<BlockHash>> },
}

impl Core {
    pub(super) fn dump(&self) -> Dump {
        let pin = pin();
        let (order, numbers) = self.tree.parents_first();
        let renamed = |place: Place| Place { run: numbers[place.run.0 as usize], offset: place.offset };
        let runs = order.iter().map(|&id| self.tree.dump_run(id, renamed, &pin)).collect();
        let ranks = self.entries().iter().map(|entry| {
            let rank = entry.rank.as_ref().map(|rank| rank.carried_over(renamed));
            (entry.generation, rank)
        });
        Dump { block_size: self.block_size(), runs, ranks: ranks.collect(), forms: self.roster.forms.get() }
    }

    pub(super) fn of_dump(dump: Dump) -> Self {
        let mut core = Self::new(dump.block_size);
        core.roster.forms.set(dump.forms);
        let pin = pin();
        let blocks = dump.runs.iter().map(|run| run.locals.len()).sum();
        core.tree.expect_names(blocks, &pin);
        let mut ids: Vec<RunId> = Vec::with_capacity(dump.runs.len());
        for mut run in dump.runs {
            let renamed = |place: Place| Place { run: ids[place.run.0 as usize], offset: place.offset };
            run.parent = run.parent.map(renamed);
            let id = core.tree.restore_run(run, &pin);
            ids.push(id);
        }
        core.tree.close(&pin);
        let renamed = |place: Place| Place { run: ids[place.run.0 as usize], offset: place.offset };
        for (index, (generation, rank)) in (0..).zip(dump.ranks) {
            let rank = rank.map(|rank| rank.carried_over(renamed));
            core.restore_rank(RankSlot { index, generation }, rank, &pin);
        }
        core.note_retired(&pin);
        core
    }

    fn restore_rank(&mut self, slot: RankSlot, rank: Option<Rank>, pin: &Pin) {
        let view = rank.as_ref().map(|rank| RankView::new(slot, rank));
        for place in rank.iter().flat_map(Rank::kept) {
            self.tree.keep(place);
        }
        self.entries_mut().push(RankEntry { generation: slot.generation, rank });
        self.publish(slot.index, view, pin);
        if self.note_layers(slot.index, pin) {
            self.roster.version.close();
        }
    }
}

impl Tree {
    /// Live runs so that each comes behind its parent, and each one's number in that order.
    fn parents_first(&self) -> (Vec<RunId>, Vec<RunId>) {
        /// Not in the order yet; there are fewer runs.
        const NONE: RunId = RunId(u32::MAX);
        let mut order = Vec::with_capacity(self.run_count());
        let mut numbers = vec![NONE; self.id_count()];
        let mut waiting = Vec::new();
        for id in self.ids() {
            let mut next = Some(id);
            while let Some(id) = next.filter(|id| numbers[id.0 as usize] == NONE) {
                waiting.push(id);
                next = self.parent(id).map(|parent| parent.run);
            }
            while let Some(id) = waiting.pop() {
                // Ids are 32 bits.
                #[allow(clippy::cast_possible_truncation)]
                let number = RunId(order.len() as u32);
                numbers[id.0 as usize] = number;
                order.push(id);
            }
        }
        (order, numbers)
    }

    fn dump_run(&self, id: RunId, renamed: impl Fn(Place) -> Place, pin: &Pin) -> DumpedRun {
        let run = self.run(id);
        let names = match self.regular_names(id, pin) {
            Some(words) => DumpedNames::Regular(words.to_vec()),
            None => DumpedNames::Any {
                bytes: run.has_byte_names(),
                names: (0..run.len()).map(|offset| self.canonical(Place { run: id, offset }, pin)).collect(),
            },
        };
        let mut holders = vec![(Layer::HOT, run.holders(pin))];
        for (layer, coverage) in run.ext(pin).into_iter().flat_map(|ext| &ext.cold) {
            holders.push((*layer, coverage.holders(run.len())));
        }
        DumpedRun {
            parent: self.parent(id).map(renamed),
            isolation: self.isolation(id),
            locals: run.hashes(pin).locals().to_vec(),
            names,
            holders,
            chunks: run.chunks(pin).to_vec(),
        }
    }
}

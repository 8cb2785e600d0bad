//! The writer's side: what is done to the index, one event at a time.

use std::sync::Arc;

use super::announcer::Announcer;
use super::plan::Plan;
use super::published::{Limbo, Pin, SoleWriter, pin};
use super::rank::{Named, Rank, Said, Shape};
use super::remembered::DEFAULT_BOUND;
use super::roster::{RankView, Roster};
use super::tree::{Layer, Place, Tree};
use super::{LayerContents, RankSettings, Removed, ScoredTiers, StoreRefusal, StoreRequest, Stored};
use crate::block::{BlockHash, BlockSize, LocalHasher, Tier};
use crate::ids::RankSlot;

/// Blocks and names that one rank may hold. At 16 tokens a block this is 268 million tokens, ten times the
/// largest host caches in use; beyond it a peer is broken or hostile.
const MAX_HELD_PER_RANK: u64 = 1 << 24;

/// The tree and what each rank calls its blocks.
#[derive(Debug)]
pub(super) struct Core {
    block_size: BlockSize,
    pub(super) tree: Tree,
    pub(super) roster: Arc<Roster>,
    ranks: Vec<RankEntry>,
    hasher: LocalHasher,
    locals: Vec<u64>,
    limbo: Limbo,
    /// Pieces of memory retired since the last collection.
    retired: usize,
    /// Sections since then.
    sections: u32,
    /// Bytes of the runs' buffers.
    word_bytes: usize,
}

#[derive(Debug)]
pub(super) struct RankEntry {
    pub(super) generation: u32,
    pub(super) rank: Option<Rank>,
}

impl Core {
    pub(super) fn new(block_size: BlockSize) -> Self {
        Self {
            block_size,
            tree: Tree::new(SoleWriter::for_new_index()),
            roster: Arc::default(),
            ranks: Vec::new(),
            hasher: LocalHasher::default(),
            locals: Vec::new(),
            limbo: Limbo::default(),
            retired: 0,
            sections: 0,
            word_bytes: 0,
        }
    }

    pub(super) fn block_size(&self) -> BlockSize {
        self.block_size
    }

    // === ranks ===

    pub(super) fn entries(&self) -> &[RankEntry] {
        &self.ranks
    }

    pub(super) fn entries_mut(&mut self) -> &mut Vec<RankEntry> {
        &mut self.ranks
    }

    pub(super) fn add_rank(&mut self, settings: RankSettings) -> RankSlot {
        let free = self.ranks.iter().position(|entry| entry.rank.is_none());
        let index = free.unwrap_or(self.ranks.len());
        if free.is_none() {
            self.ranks.push(RankEntry { generation: 0, rank: None });
        }
        let entry = &mut self.ranks[index];
        entry.generation += 1;
        let rank = Rank::new(entry.generation, settings);
        // A pool has at most a few thousand ranks.
        #[allow(clippy::cast_possible_truncation)]
        let slot = RankSlot { index: index as u32, generation: entry.generation };
        let view = RankView::new(slot, &rank);
        entry.rank = Some(rank);
        self.publish(slot.index, Some(view), &pin());
        slot
    }

    pub(super) fn remove_rank(&mut self, slot: RankSlot) -> bool {
        let known = self.clear_rank(slot);
        if known {
            self.ranks[slot.index as usize].rank = None;
            self.publish(slot.index, None, &pin());
        }
        known
    }

    pub(super) fn publish(&self, index: u32, view: Option<RankView>, pin: &Pin) {
        self.roster.version.open();
        self.roster.put(index, view, pin);
        self.roster.version.close();
    }

    /// Forgets all blocks of the rank, on all tiers. Readers see it at once, however much it held; then its
    /// own runs are swept.
    pub(super) fn clear_rank(&mut self, slot: RankSlot) -> bool {
        let Some(rank) = rank_mut(&mut self.ranks, slot) else { return false };
        let runs = std::mem::take(&mut rank.runs);
        let kept: Vec<Place> = rank.kept().collect();
        rank.forget();
        self.roster.hide(Some(slot.index));
        let pin = pin();
        for run in runs {
            self.tree.release_run(run, slot.index, &pin);
            // The rank is hidden, so half of the sweep shows nothing that the whole of it would not.
            self.tree.close(&pin);
        }
        for place in kept {
            self.tree.let_go(place, &pin);
            self.tree.close(&pin);
        }
        self.note_layers(slot.index, &pin);
        self.roster.hide(None);
        self.note_retired(&pin);
        true
    }

    /// Forgets all blocks of the rank on one tier, as readers see at once.
    pub(super) fn clear_tier(&mut self, slot: RankSlot, tier: Tier) -> bool {
        let Some(rank) = rank_mut(&mut self.ranks, slot) else { return false };
        if tier == Tier::Device && !rank.is_layered() && rank.explicit.is_empty() {
            return self.clear_rank(slot);
        }
        let pin = pin();
        let mut kept: Vec<Place> = Vec::new();
        if tier == Tier::Device {
            kept.extend(rank.remembered.drain());
        }
        rank.forget_tier(tier, &mut kept);
        let runs: Vec<_> = rank.runs.iter().copied().collect();
        self.hide_tier(slot.index, Some(tier), &pin);
        let mut gone = 0;
        for run in runs {
            gone += self.tree.release_tier(run, slot.index, tier, &pin);
            let is_left = self.tree.is_there(run) && self.tree.covers_any(slot.index, run, &pin);
            if !is_left && let Some(rank) = rank_mut(&mut self.ranks, slot) {
                rank.runs.remove(&run);
            }
            self.tree.close(&pin);
        }
        for place in kept {
            self.tree.let_go(place, &pin);
            self.tree.close(&pin);
        }
        if let Some(rank) = rank_mut(&mut self.ranks, slot) {
            rank.cold_blocks = rank.cold_blocks.saturating_sub(gone);
        }
        self.hide_tier(slot.index, None, &pin);
        if let Some(rank) = self.rank(slot) {
            rank.gauge.note_orphans(rank.orphans.len() as u64);
        }
        self.note_retired(&pin);
        true
    }

    /// Hides a tier of a rank from queries, at once; `None` hides none.
    fn hide_tier(&mut self, index: u32, hidden: Option<Tier>, pin: &Pin) {
        let Some(rank) = self.ranks[index as usize].rank.as_mut() else { return };
        let Some(view) = self.roster.ranks(pin).and_then(|ranks| ranks.at(index)) else { return };
        // A tier is hidden by the rule for layers.
        let layered = hidden.is_some() || rank.is_layered();
        rank.shown_layered = layered;
        let layers = layered.then(|| Arc::new(rank.groups.clone()));
        let view = RankView { layers, hidden, ..view.clone() };
        self.publish(index, Some(view), pin);
    }

    /// Says which lower tiers of the rank count in overlaps.
    pub(super) fn score_tiers(&mut self, slot: RankSlot, scored: ScoredTiers) -> bool {
        let Some(rank) = rank_mut(&mut self.ranks, slot) else { return false };
        rank.settings.scored = scored;
        let pin = pin();
        let Some(view) = self.roster.ranks(&pin).and_then(|ranks| ranks.get(slot)) else { return false };
        let view = RankView { scored, ..view.clone() };
        self.publish(slot.index, Some(view), &pin);
        true
    }

    /// Names and blocks that a tier of the rank took in since it was empty, if it never gave any back.
    pub(super) fn kept_all(&self, slot: RankSlot, tier: Tier) -> Option<u64> {
        let intake = self.rank(slot)?.intake[tier as usize];
        (!intake.gave_back).then_some(intake.names)
    }

    pub(super) fn rank(&self, slot: RankSlot) -> Option<&Rank> {
        let entry = self.ranks.get(slot.index as usize)?;
        entry.rank.as_ref().filter(|rank| rank.generation == slot.generation)
    }

    /// All ranks that have a slot.
    pub(super) fn ranks(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter_map(|entry| entry.rank.as_ref())
    }

    // === events ===

    pub(super) fn store(
        &mut self,
        slot: RankSlot,
        request: &StoreRequest<'_>,
    ) -> Result<Stored, StoreRefusal> {
        let pin = pin();
        let Self { block_size, tree, ranks, hasher, locals, .. } = self;
        let rank = rank_mut(ranks, slot).ok_or(StoreRefusal::UnknownRank)?;
        if rank.held().saturating_add(request.names.len() as u64) > MAX_HELD_PER_RANK {
            return Err(StoreRefusal::RankFull);
        }
        let plan = Plan::of(request, rank, *block_size)?;
        // A rank that offloads is one whose removed names may be asked for.
        if plan.is_lower() && !rank.remembered.is_on() {
            rank.remembered.turn_on(rank.settings.remembered_names.unwrap_or(DEFAULT_BOUND));
        }
        let block_size = *block_size;
        let index = slot.index;
        let mut writer = Announcer { tree, rank, index, hasher, block_size, locals, pin: &pin };
        let stored = writer.store(request, &plan);
        self.roster.forms.note(&request.tokens, block_size);
        self.end_event(index, &pin);
        Ok(stored)
    }

    pub(super) fn remove(
        &mut self,
        slot: RankSlot,
        tier: Tier,
        group_idx: Option<u32>,
        names: &[BlockHash],
    ) -> Removed {
        let pin = pin();
        let Self { block_size, tree, ranks, hasher, locals, .. } = self;
        let unknown = Removed { unknown: names.len() as u64 };
        let Some(rank) = rank_mut(ranks, slot) else { return unknown };
        let Some(group) = rank.groups.slot_of(group_idx.unwrap_or(0)) else { return unknown };
        let layer = Layer { tier, slot: group };
        let block_size = *block_size;
        let index = slot.index;
        let mut writer = Announcer { tree, rank, index, hasher, block_size, locals, pin: &pin };
        let unknown = writer.retract_all(layer, names);
        if tier != Tier::Device && unknown < names.len() as u64 {
            writer.rank.intake[tier as usize].gave_back = true;
        }
        self.end_event(index, &pin);
        Removed { unknown }
    }

    /// Readers see all of the event from here on. What is said of the rank's layers must change together with
    /// the blocks, so its version opens before theirs close.
    fn end_event(&mut self, index: u32, pin: &Pin) {
        let noted = self.note_layers(index, pin);
        self.tree.close(pin);
        if noted {
            self.roster.version.close();
        }
        if let Some(rank) = &self.ranks[index as usize].rank {
            rank.gauge.note_orphans(rank.orphans.len() as u64);
        }
        self.note_retired(pin);
    }

    pub(super) fn note_retired(&mut self, pin: &Pin) {
        self.retired += pin.retired();
        self.word_bytes = self.word_bytes.saturating_add_signed(pin.take_grown());
        self.limbo.take_in(pin);
    }

    /// Lets readers see how large the index is.
    pub(super) fn publish_sizes(&self) {
        let bytes = self.word_bytes + self.tree.bytes_beside_words(&pin());
        self.roster.sizes.set(self.tree.run_count() + 1, self.tree.blocks(), bytes);
    }

    /// Ends a write section: how many collections it is worth. One takes some five hundred pieces, and none is
    /// free before two more pins have come after it.
    pub(super) fn end_section(&mut self) -> usize {
        /// Handing on fewer pieces than a bag of the collector holds costs as much as handing on a full one;
        /// what little there is waits for so many sections.
        const ENOUGH: usize = 64;
        const SECTIONS: u32 = 64;
        self.publish_sizes();
        self.limbo.free();
        self.sections += 1;
        if self.retired < ENOUGH && self.sections < SECTIONS {
            return 0;
        }
        self.sections = 0;
        self.limbo.close_batch(&pin());
        1 + std::mem::take(&mut self.retired) / 256
    }

    /// Tells readers of the rank's groups once it holds more than device blocks of one; whether that opened
    /// the roster's version.
    pub(super) fn note_layers(&mut self, index: u32, pin: &Pin) -> bool {
        let Some(rank) = self.ranks[index as usize].rank.as_ref() else { return false };
        let layered = rank.is_layered();
        if !layered && !rank.shown_layered {
            return false;
        }
        let Some(view) = self.roster.ranks(pin).and_then(|ranks| ranks.at(index)) else { return false };
        if view.layers.as_deref() == layered.then_some(&rank.groups) {
            return false;
        }
        let view = RankView { layers: layered.then(|| Arc::new(rank.groups.clone())), ..view.clone() };
        if let Some(rank) = self.ranks[index as usize].rank.as_mut() {
            rank.shown_layered = layered;
        }
        let opened = self.roster.version.open();
        self.roster.put(index, Some(view), pin);
        opened
    }

    // === questions to the writer's side ===

    /// How many of these names follow each other in a prompt that the rank holds on the device, from its beginning
    /// on, or from the first name on if that only continues what was looked at.
    pub(super) fn overlap_by_names(&self, slot: RankSlot, names: &[BlockHash], continues: bool) -> u32 {
        let Some(rank) = self.rank(slot) else { return 0 };
        let pin = pin();
        let mut before = None;
        let mut reach = 0;
        for name in names {
            let is_hot = |said: &&Said| said.layer == Layer::HOT && said.shape == Shape::Block;
            let said = rank.named(name).and_then(|named| named.said.iter().rfind(is_hot));
            let place = match said {
                Some(said) => said.place,
                None => self.tree.named(name, &pin).filter(|place| {
                    self.tree.covers(Layer::HOT, slot.index, *place, &pin)
                        && !rank.pinned.contains_key(&(Layer::HOT, *place))
                }),
            };
            match place {
                Some(place) if (continues && reach == 0) || self.tree.before(place) == before => {
                    before = Some(place);
                }
                _ => break,
            }
            reach += 1;
        }
        reach
    }

    /// Every name that the rank holds, by tier and group, with its copies.
    pub(super) fn contents(&self, slot: RankSlot) -> Vec<LayerContents> {
        let Some(rank) = self.rank(slot) else { return Vec::new() };
        let pin = pin();
        let mut layers: Vec<(Layer, Vec<(BlockHash, u64)>)> = Vec::new();
        let mut push =
            |layer: Layer, name: BlockHash, copies: u64| match layers.iter_mut().find(|(of, _)| *of == layer)
            {
                Some((_, names)) => names.push((name, copies)),
                None => layers.push((layer, vec![(name, copies)])),
            };
        for &run in &rank.runs {
            for layer in self.tree.layers_of(slot.index, run, &pin) {
                for offset in 0..self.tree.run(run).len() {
                    let place = Place { run, offset };
                    if self.tree.covers(layer, slot.index, place, &pin)
                        && !rank.pinned.contains_key(&(layer, place))
                        && let Some(name) = self.tree.canonical(place, &pin)
                    {
                        push(layer, name, 1);
                    }
                }
            }
        }
        for (name, Named { said, .. }) in &rank.explicit {
            for (at, Said { layer, .. }) in said.iter().enumerate() {
                if said[..at].iter().any(|before| before.layer == *layer) {
                    continue;
                }
                let of_layer = said.iter().filter(|said| said.layer == *layer);
                push(*layer, name.clone(), of_layer.map(|said| u64::from(said.count)).sum());
            }
        }
        layers.sort_unstable_by_key(|(layer, _)| *layer);
        layers
            .into_iter()
            .map(|(layer, mut names)| {
                names.sort_unstable();
                let group_idx = rank.groups.of_slot(layer.slot).idx;
                LayerContents { tier: layer.tier, group_idx, names }
            })
            .collect()
    }
}

fn rank_mut(ranks: &mut [RankEntry], slot: RankSlot) -> Option<&mut Rank> {
    let rank = ranks.get_mut(slot.index as usize)?.rank.as_mut()?;
    (rank.generation == slot.generation).then_some(rank)
}

//! What readers see of the ranks: who has which slot, and what each one's groups are.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::forms::FormsSeen;
use super::groups::Groups;
use super::published::{Pin, Published};
use super::rank::Rank;
use super::version::Version;
use super::{ScoredTiers, TierSize};
use crate::block::Tier;
use crate::ids::RankSlot;

/// Numbers of one rank that change without the roster.
#[derive(Default, Debug)]
pub(super) struct Gauge {
    blocks: AtomicU64,
    /// Blocks of the first full-attention group in the lower tiers; the device's are above.
    lower: [AtomicU64; Tier::ALL.len()],
    /// Names without a block, by tier.
    nameless: [AtomicU64; Tier::ALL.len()],
    orphans: AtomicU64,
}

impl Gauge {
    /// Blocks held in the hot layer.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.load(Relaxed)
    }

    /// One thread writes, so this need not be one step.
    pub(super) fn add(&self, blocks: i64) {
        self.blocks.store(self.blocks().saturating_add_signed(blocks), Relaxed);
    }

    /// Blocks kept aside because their parent is not known.
    pub(super) fn orphans(&self) -> u64 {
        self.orphans.load(Relaxed)
    }

    pub(super) fn note_orphans(&self, orphans: u64) {
        self.orphans.store(orphans, Relaxed);
    }

    pub(super) fn reset(&self) {
        self.orphans.store(0, Relaxed);
        self.blocks.store(0, Relaxed);
        self.lower.iter().chain(&self.nameless).for_each(|count| count.store(0, Relaxed));
    }

    pub(super) fn reset_tier(&self, tier: Tier) {
        if tier == Tier::Device {
            self.blocks.store(0, Relaxed);
        }
        self.lower[tier as usize].store(0, Relaxed);
        self.nameless[tier as usize].store(0, Relaxed);
    }

    /// The same for a tier below the device.
    pub(super) fn add_lower(&self, tier: Tier, blocks: i64) {
        change(&self.lower[tier as usize], blocks);
    }

    pub(super) fn add_nameless(&self, tier: Tier, names: i64) {
        change(&self.nameless[tier as usize], names);
    }

    pub(super) fn size(&self, tier: Tier) -> TierSize {
        let blocks = match tier {
            Tier::Device => self.blocks(),
            lower => self.lower[lower as usize].load(Relaxed),
        };
        TierSize { blocks, nameless: self.nameless[tier as usize].load(Relaxed) }
    }

    pub(super) fn copied(&self) -> Self {
        let copy = |count: &AtomicU64| AtomicU64::new(count.load(Relaxed));
        Self {
            blocks: copy(&self.blocks),
            orphans: copy(&self.orphans),
            lower: std::array::from_fn(|at| copy(&self.lower[at])),
            nameless: std::array::from_fn(|at| copy(&self.nameless[at])),
        }
    }
}

// One thread writes.
fn change(count: &AtomicU64, by: i64) {
    count.store(count.load(Relaxed).saturating_add_signed(by), Relaxed);
}

/// How large the index is, as of the last write section's end.
#[derive(Default, Debug)]
pub(super) struct Sizes {
    nodes: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
}

impl Sizes {
    pub(super) fn set(&self, nodes: usize, blocks: u64, bytes: usize) {
        self.nodes.store(nodes as u64, Relaxed);
        self.blocks.store(blocks, Relaxed);
        self.bytes.store(bytes as u64, Relaxed);
    }

    /// Nodes, distinct blocks and bytes.
    // Counts that were lengths.
    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn get(&self) -> (usize, u64, usize) {
        let [nodes, blocks, bytes] = [&self.nodes, &self.blocks, &self.bytes].map(|size| size.load(Relaxed));
        (nodes as usize, blocks, bytes as usize)
    }
}

/// A rank as readers see it.
#[derive(Clone, Debug)]
pub(super) struct RankView {
    pub(super) slot: RankSlot,
    pub(super) gauge: Arc<Gauge>,
    /// Its groups, if it holds more than device blocks of one group.
    pub(super) layers: Option<Arc<Groups>>,
    pub(super) scored: ScoredTiers,
    /// A tier that is being cleared: the rank holds nothing there, whatever the runs still say.
    pub(super) hidden: Option<Tier>,
}

impl RankView {
    pub(super) fn new(slot: RankSlot, rank: &Rank) -> Self {
        let gauge = Arc::clone(&rank.gauge);
        Self { slot, gauge, layers: None, scored: rank.settings.scored, hidden: None }
    }
}

/// Ranks by the index of their slot.
#[derive(Clone, Default, Debug)]
pub(super) struct Ranks {
    by_index: Vec<Option<RankView>>,
    /// Generations by index, 0 where no rank is: what an answer needs of each rank, close together. As many as
    /// `plain` has bits. Shared with the answers.
    generations: Arc<[u32]>,
    /// The set of ranks without layers.
    plain: Vec<u64>,
    /// Those with layers.
    layered: Vec<u32>,
}

impl Ranks {
    /// The set of ranks without layers, by words of 64.
    pub(super) fn plain(&self) -> &[u64] {
        &self.plain
    }

    /// Generations by index, as many as the set has bits.
    pub(super) fn generations(&self) -> &Arc<[u32]> {
        &self.generations
    }

    pub(super) fn at(&self, index: u32) -> Option<&RankView> {
        self.by_index.get(index as usize)?.as_ref()
    }

    /// The rank with this slot, unless the slot is its predecessor's.
    pub(super) fn get(&self, slot: RankSlot) -> Option<&RankView> {
        self.at(slot.index).filter(|rank| rank.slot == slot)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Option<&RankView>> {
        self.by_index.iter().map(Option::as_ref)
    }

    pub(super) fn layered(&self) -> &[u32] {
        &self.layered
    }
}

/// All ranks of an index, guarded by a version.
#[derive(Default, Debug)]
pub(super) struct Roster {
    pub(super) version: Version,
    pub(super) sizes: Sizes,
    ranks: Published<Ranks>,
    /// One more than the index of the rank that is being cleared: it holds nothing, whatever the runs still
    /// say. There is one writer, so there is one such rank at most.
    hidden: AtomicU64,
    pub(super) forms: FormsSeen,
}

impl Roster {
    pub(super) fn ranks<'p>(&self, pin: &'p Pin) -> Option<&'p Ranks> {
        self.ranks.load(pin)
    }

    pub(super) fn hidden(&self) -> Option<u32> {
        self.hidden.load(Relaxed).checked_sub(1).and_then(|index| u32::try_from(index).ok())
    }

    /// Hides a rank from queries, at once; `None` hides none.
    pub(super) fn hide(&self, index: Option<u32>) {
        self.version.open();
        self.hidden.store(index.map_or(0, |index| u64::from(index) + 1), Relaxed);
        self.version.close();
    }

    /// Puts a rank in its place or takes it away. The writer's; the version must be open.
    pub(super) fn put(&self, index: u32, rank: Option<RankView>, pin: &Pin) {
        let mut ranks = self.ranks(pin).cloned().unwrap_or_default();
        let at = index as usize;
        if ranks.by_index.len() <= at {
            ranks.by_index.resize(at + 1, None);
            ranks.plain.resize(at / 64 + 1, 0);
        }
        ranks.layered.retain(|of| *of != index);
        if rank.as_ref().is_some_and(|rank| rank.layers.is_some()) {
            ranks.layered.push(index);
        }
        let generation = rank.as_ref().map_or(0, |rank| rank.slot.generation);
        if ranks.generations.get(at) != Some(&generation) {
            let mut generations = ranks.generations.to_vec();
            generations.resize(ranks.plain.len() * 64, 0);
            generations[at] = generation;
            ranks.generations = generations.into();
        }
        let (word, bit) = (&mut ranks.plain[at / 64], 1 << (at % 64));
        *word = *word & !bit | if rank.as_ref().is_some_and(|rank| rank.layers.is_none()) { bit } else { 0 };
        ranks.by_index[at] = rank;
        self.ranks.replace(Some(ranks), pin);
    }
}

//! The tiers of one rank: what a clear empties, and which of them never give anything back.

use crate::block::Tier;
use crate::fleet::{ClearScope, WorkerSpec};
use crate::ids::RankSlot;
use crate::index::{RankSettings, ScoredTiers, WriteSection};

/// A cache's worth of blocks where the rank's capacity is not known: a million tokens at 16 a block.
const ASSUMED_CAPACITY: u64 = 1 << 16;

/// How the worker's settings treat the tiers, and what was seen of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiers {
    clear_scope: ClearScope,
    /// Blocks on the device.
    capacity: u64,
    without_removals: TierSet,
}

/// A set of tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierSet(u8);

impl TierSet {
    /// Adds a tier.
    pub fn insert(&mut self, tier: Tier) {
        self.0 |= 1 << tier as u8;
    }

    /// Takes a tier out.
    pub fn remove(&mut self, tier: Tier) {
        self.0 &= !(1 << tier as u8);
    }

    /// Whether the tier is in it.
    pub fn contains(self, tier: Tier) -> bool {
        self.0 & 1 << tier as u8 != 0
    }

    /// Whether none is.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The tiers in it, nearest first.
    pub fn iter(self) -> impl Iterator<Item = Tier> {
        Tier::ALL.into_iter().filter(move |tier| self.contains(*tier))
    }
}

impl Tiers {
    pub(super) fn new(spec: &WorkerSpec, capacity: Option<u64>) -> Self {
        Self {
            clear_scope: spec.clear_scope,
            capacity: capacity.unwrap_or(ASSUMED_CAPACITY),
            without_removals: TierSet::default(),
        }
    }

    /// The worker is declared with other settings; what was seen stays.
    pub(super) fn follow(&mut self, spec: &WorkerSpec, capacity: Option<u64>) {
        *self = Self { without_removals: self.without_removals, ..Self::new(spec, capacity) };
    }

    /// How a rank of this worker is to be read.
    pub(super) fn settings(spec: &WorkerSpec, capacity: Option<u64>) -> RankSettings {
        RankSettings {
            announcements: spec.announcements,
            host_chunk_blocks: spec.host_chunk_blocks,
            scored: Self::scored(spec),
            remembered_names: capacity.and_then(|blocks| usize::try_from(blocks).ok()),
        }
    }

    pub(super) fn scored(spec: &WorkerSpec) -> ScoredTiers {
        ScoredTiers { host: spec.score_tiers.host, disk: spec.score_tiers.disk }
    }

    /// Empties what a clear means; `true` if it named no medium and the rank is empty now.
    pub(super) fn clear(
        &mut self,
        medium: Option<Tier>,
        slot: RankSlot,
        section: &mut WriteSection<'_>,
    ) -> bool {
        let tier = match (medium, self.clear_scope) {
            (None, ClearScope::All) => None,
            (None, ClearScope::Device) => Some(Tier::Device),
            (Some(tier), _) => Some(tier),
        };
        match tier {
            None => section.clear_rank(slot),
            Some(tier) => section.clear_tier(slot, tier),
        };
        tier.inspect(|tier| self.without_removals.remove(*tier));
        medium.is_none() && section.is_empty(slot)
    }

    /// The rank is empty.
    pub(super) fn emptied(&mut self) {
        self.without_removals = TierSet::default();
    }

    /// A store in this tier was applied; `true` if that made a cache's worth of which nothing was removed.
    pub(super) fn took_in(&mut self, tier: Tier, slot: RankSlot, section: &WriteSection<'_>) -> bool {
        let is_full = section.kept_all(slot, tier).is_some_and(|names| names >= self.capacity);
        let is_new = is_full && !self.without_removals.contains(tier);
        if is_full {
            self.without_removals.insert(tier);
        }
        is_new
    }

    /// Something was removed from a tier; `true` if that leaves none without removals.
    pub(super) fn gave_back(&mut self, tier: Tier) -> bool {
        let was_in = self.without_removals.contains(tier);
        self.without_removals.remove(tier);
        was_in && self.without_removals.is_empty()
    }

    /// Lower tiers that took in a cache's worth and never announced a removal.
    pub(super) fn without_removals(&self) -> TierSet {
        self.without_removals
    }
}

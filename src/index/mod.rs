//! The prefix index: a radix tree of content that knows which ranks hold which blocks.
//!
//! # What it costs
//!
//! About 35 bytes per distinct block: its local hash, its name, an eighth of a sequence hash, 12 to 16 bytes of
//! table, and its share of a run's 200 bytes; per further rank that holds a run, a bit or an interval. A query
//! walks the runs on its path: two dependent memory accesses per run, with a comparison of memory beside them. Ranks
//! whose engines hash the same tokens differently pay for their own names: about 100 bytes a block, since the
//! shared table cannot serve them. So do tiers and further attention groups: each change of a run's copies the
//! list of its layers.
//!
//! Readers take no lock. A query that meets an event in the middle is asked again; after 64 attempts it waits
//! for the writer's section. Questions to the writer's side ([`Reader::contents`], [`Reader::stats`],
//! [`Reader::dump`], [`Reader::overlap_by_names`]) wait for it always.
//!
//! # What it promises
//!
//! 1. A rank's overlap is the number of leading blocks of the prompt that it holds without a hole, at every
//!    moment: after removals in the middle, duplicates, clears, re-used names, parents that come late.
//! 2. A block is its content and everything before it; engine hashes are names within one rank.
//! 3. Nothing recurses over depth, and what is removed gives its memory back.
//! 4. An answer was true at one moment during the query: events are seen whole or not at all.

mod ahead;
mod announcer;
mod answer;
mod bulk;
mod core;
mod coverage;
mod dump;
mod forms;
mod groups;
mod intervals;
mod name_table;
mod plan;
mod published;
mod query;
mod rank;
mod remembered;
mod roster;
mod run;
mod said;
mod sight;
mod sync;
mod table;
mod tail;
mod tree;
mod version;
mod waiting;

use std::num::NonZeroU32;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockWriteGuard};

pub use self::ahead::Leads;
pub use self::answer::RankOverlaps;
use self::core::Core;
pub use self::dump::Dump;
pub use self::forms::TokenForms;
use self::published::{Pin, pin};
use self::query::Attempt;
pub use self::query::Scratch;
use self::roster::Roster;
use self::tree::Tables;
pub use crate::block::Announcements;
use crate::block::{
    AttentionKind, BlockHash, BlockSize, ContentKeys, Isolation, LocalBlockHash, SequenceHash, Tier,
};
use crate::ids::RankSlot;

/// How a rank's events are to be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankSettings {
    /// How announcements of one name add up.
    pub announcements: Announcements,
    /// Blocks of one chunk in the lower tiers, where a connector announces a chunk under names of which only the
    /// last can be loaded; `None`: every name is a block of its own.
    pub host_chunk_blocks: Option<NonZeroU32>,
    /// The lower tiers that count in overlaps.
    pub scored: ScoredTiers,
    /// Removed names whose content is remembered for placeholders, once the rank stores anything in a lower
    /// tier: as many as its cache has blocks. `None`: 65,536.
    pub remembered_names: Option<usize>,
}

impl From<Announcements> for RankSettings {
    fn from(announcements: Announcements) -> Self {
        Self { announcements, ..Self::default() }
    }
}

/// Which lower tiers count in overlaps; the device always does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScoredTiers {
    /// Host memory.
    pub host: bool,
    /// Disk and beyond.
    pub disk: bool,
}

impl Default for ScoredTiers {
    fn default() -> Self {
        Self { host: true, disk: true }
    }
}

/// What a rank holds in one tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TierSize {
    /// Blocks of the first full-attention group. Distinct ones, but for chunks: each counts with all its blocks.
    pub blocks: u64,
    /// Names of all groups whose content is not known.
    pub nameless: u64,
}

/// Which attention group an event speaks of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GroupTag {
    /// The group's number; `None` is group 0.
    pub idx: Option<u32>,
    /// Its kind, when the event says.
    pub kind: Option<AttentionKind>,
}

/// Blocks that a rank announced.
#[derive(Clone, Debug)]
pub struct StoreRequest<'a> {
    /// Where they lie.
    pub tier: Tier,
    /// Which group caches them.
    pub group: GroupTag,
    /// Their names, first to last; each one's parent is the one before it.
    pub names: &'a [BlockHash],
    /// The name of the block before the first; `None` starts a prompt.
    pub parent: Option<&'a BlockHash>,
    /// The tokens that the names stand for.
    pub tokens: StoreTokens<'a>,
    /// Tokens per block, as the engine says.
    pub block_size: u32,
    /// The namespace, if this starts a prompt; a continuation inherits its parent's.
    pub isolation: Isolation,
    /// Content keys per name, sorted; may be shorter than `names`, the rest has none.
    pub keys: &'a [ContentKeys],
    /// Everything that the rank announced since it was empty was applied. Where it was not, a store in a lower
    /// tier without a parent need not be a prompt's beginning.
    pub history_complete: bool,
}

/// The tokens of a store.
#[derive(Clone, Copy, Debug)]
pub enum StoreTokens<'a> {
    /// Token ids; none at all is a placeholder that names blocks and says nothing of their content.
    Ids(&'a [u32]),
    /// Blocks whose names cover more than their own tokens (EAGLE drafters): the block at `n` is the `len` tokens
    /// from `n * stride` on. Blocks of the pool's size only.
    Windows {
        /// The tokens of all blocks.
        tokens: &'a [u32],
        /// Tokens of one block, those behind it included.
        len: usize,
        /// From one block's first token to the next one's.
        stride: usize,
    },
    /// Local hashes of the blocks, one per name, where the caller has them; blocks of the pool's size only.
    Locals(&'a [LocalBlockHash]),
    /// There are tokens, but not in a form that can be placed.
    Unusable,
}

/// What became of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stored {
    /// Blocks whose parent is not known: kept aside, no overlap until the parent comes.
    pub orphans: u64,
    /// Orphans of which only the name could be kept, for want of room.
    pub orphans_dropped: u64,
    /// Names without tokens that the rank does not know: they are names and nothing more.
    pub nameless: u64,
    /// Names that the rank holds as another block than this store says. What they mean is not changed by it,
    /// unless only a lower tier had said it and this is the device's store.
    pub contradicted: u64,
    /// Those of them of which two stores of the device say different things.
    pub device_contradicted: u64,
}

/// Why a store was refused whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreRefusal {
    /// The rank is gone, or its slot belongs to a successor.
    #[error("the rank is gone")]
    UnknownRank,
    /// Hashes and tokens do not line up.
    #[error("the number of tokens is not hashes times block size")]
    TokenMismatch,
    /// The full-attention group's block size is not the pool's.
    #[error("the block size is not the declared one")]
    BlockSizeMismatch,
    /// A block names itself as its parent.
    #[error("a block names itself as its parent")]
    SelfParent,
    /// The rank announces more groups than any engine has.
    #[error("too many attention groups")]
    TooManyGroups,
    /// The rank holds more blocks than any engine can.
    #[error("the rank holds too many blocks")]
    RankFull,
}

/// What became of a removal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Removed {
    /// Names that the rank does not hold there. Normal after a gap, never on a complete stream.
    pub unknown: u64,
}

/// How models with several attention groups are credited.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum HybridRule {
    /// What the engine would really reuse: full groups hold everything, windowed groups their window.
    #[default]
    Joint,
    /// Only full-attention groups count.
    FullAttention,
}

/// A prompt by its hashes.
#[derive(Clone, Copy, Debug, Default)]
pub struct IndexQuery<'a> {
    /// Local hashes of the prompt's full blocks. May be empty if `sequences` is given.
    pub locals: &'a [LocalBlockHash],
    /// Sequence hashes of the same blocks, if the caller has them: they make deep matches cheaper. Fewer than
    /// `locals` are not used.
    pub sequences: &'a [SequenceHash],
    /// How hybrid models are credited.
    pub hybrid: HybridRule,
}

/// How far one rank's blocks reach into a prompt, in blocks of the pool's size. Tiers are cumulative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankOverlap {
    /// The rank.
    pub slot: RankSlot,
    /// Usable on the device.
    pub device: u32,
    /// Usable on device and host together.
    pub host: u32,
    /// Usable on device, host and disk together.
    pub disk: u32,
    /// Some attention group's rule is not known and was left out.
    pub left_out: bool,
}

/// The names that a rank holds in one tier and group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerContents {
    /// The tier.
    pub tier: Tier,
    /// The group's number; `None` if the rank never stored in its first full-attention group.
    pub group_idx: Option<u32>,
    /// Name and number of copies, sorted.
    pub names: Vec<(BlockHash, u64)>,
}

/// Size of the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct IndexStats {
    /// Tree nodes with the root: one per run of blocks.
    pub nodes: usize,
    /// Distinct blocks, whoever holds them.
    pub distinct_blocks: u64,
    /// Device blocks of the first full-attention group, summed over ranks.
    pub total_blocks: u64,
    /// Blocks kept aside because their parent is not known.
    pub orphans: u64,
    /// Live bytes, estimated from buffer sizes.
    pub bytes: usize,
}

/// Makes an empty index for blocks of this size: the writer's handle and a reader's.
pub fn new(block_size: BlockSize) -> (PrefixIndex, Reader) {
    handles(Core::new(block_size))
}

/// Makes an index of another's content. Ranks have the slots that they had there.
pub fn of_dump(dump: Dump) -> (PrefixIndex, Reader) {
    handles(Core::of_dump(dump))
}

fn handles(core: Core) -> (PrefixIndex, Reader) {
    let block_size = core.block_size();
    core.publish_sizes();
    let (tables, roster) = (Arc::clone(&core.tree.tables), Arc::clone(&core.roster));
    let core = Arc::new(RwLock::new(core));
    (PrefixIndex { core: Arc::clone(&core), block_size }, Reader { tables, roster, block_size, core })
}

/// The writer's handle. There is one per index.
#[derive(Debug)]
pub struct PrefixIndex {
    core: Arc<RwLock<Core>>,
    block_size: BlockSize,
}

impl PrefixIndex {
    /// The size of the index's blocks.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Opens a write section: apply many batches under one. Queries go on beside it and see each event whole
    /// or not at all.
    pub fn write(&mut self) -> WriteSection<'_> {
        WriteSection { core: self.core.write(), pin: Some(pin()) }
    }
}

/// The right to change the index, for a few batches.
#[derive(Debug)]
pub struct WriteSection<'a> {
    core: RwLockWriteGuard<'a, Core>,
    /// Makes the pins of single events cheap.
    pin: Option<Pin>,
}

impl WriteSection<'_> {
    /// Gives a new rank its slot.
    pub fn add_rank(&mut self, settings: impl Into<RankSettings>) -> RankSlot {
        self.core.add_rank(settings.into())
    }

    /// Forgets a rank and frees its slot; `false` if it is gone already.
    pub fn remove_rank(&mut self, slot: RankSlot) -> bool {
        self.core.remove_rank(slot)
    }

    /// Forgets all blocks of a rank, on all tiers; `false` if the rank is gone.
    ///
    /// Queries see it within a microsecond, however much the rank held; the call itself then sweeps the rank's
    /// own runs.
    pub fn clear_rank(&mut self, slot: RankSlot) -> bool {
        self.core.clear_rank(slot)
    }

    /// Forgets all blocks of a rank on one tier; `false` if the rank is gone.
    ///
    /// Queries see it at once, as for a whole rank.
    pub fn clear_tier(&mut self, slot: RankSlot, tier: Tier) -> bool {
        self.core.clear_tier(slot, tier)
    }

    /// Whether the rank holds nothing, not even a name, on any tier.
    pub fn is_empty(&self, slot: RankSlot) -> bool {
        self.core.rank(slot).is_none_or(rank::Rank::is_empty)
    }

    /// Says which lower tiers of a rank count in overlaps from now on; `false` if the rank is gone.
    pub fn score_tiers(&mut self, slot: RankSlot, scored: ScoredTiers) -> bool {
        self.core.score_tiers(slot, scored)
    }

    /// How many names and blocks a lower tier of a rank took in since it was empty; `None` if anything was
    /// removed from it since.
    pub fn kept_all(&self, slot: RankSlot, tier: Tier) -> Option<u64> {
        self.core.kept_all(slot, tier)
    }

    /// Applies an announcement.
    ///
    /// # Errors
    ///
    /// A [`StoreRefusal`] when nothing of it can be used; the index is then unchanged.
    pub fn store(&mut self, slot: RankSlot, request: &StoreRequest<'_>) -> Result<Stored, StoreRefusal> {
        self.core.store(slot, request)
    }

    /// Applies a removal, name by name; unknown names are counted and do not stop the rest.
    pub fn remove(
        &mut self,
        slot: RankSlot,
        tier: Tier,
        group_idx: Option<u32>,
        names: &[BlockHash],
    ) -> Removed {
        self.core.remove(slot, tier, group_idx, names)
    }
}

impl Drop for WriteSection<'_> {
    fn drop(&mut self) {
        drop(self.pin.take());
        // Whoever waits for the section's end goes first: a busy writer's next section would be quicker.
        RwLockWriteGuard::bump(&mut self.core);
        for _ in 0..self.core.end_section() {
            pin().collect();
        }
    }
}

/// Attempts of a query before it waits for the writer's section to end. Each fails only if an event touched the
/// very runs that it read. With the pauses between them, which grow, this many take some 50 microseconds: longer
/// than any event that an engine sends, so the writer's thread was taken off its core in the middle of one.
const ATTEMPTS: u32 = 64;

/// A reader's handle: cheap to clone, one per thread or shared.
#[derive(Clone, Debug)]
pub struct Reader {
    tables: Arc<Tables>,
    roster: Arc<Roster>,
    block_size: BlockSize,
    core: Arc<RwLock<Core>>,
}

impl Reader {
    /// Finds every rank that holds a prefix of the prompt; the answer is in `scratch`.
    ///
    /// The answer was true at one moment during the call. Takes no lock and allocates nothing once `scratch`
    /// is warm. If events keep changing what the prompt leads through, it is asked again, and after 64 attempts
    /// behind the writer's section.
    pub fn overlap(&self, query: &IndexQuery<'_>, scratch: &mut Scratch) {
        let pin = pin();
        let attempt =
            Attempt { tables: &self.tables, roster: &self.roster, block_size: self.block_size, pin: &pin };
        for attempts in 1..=ATTEMPTS {
            if attempt.answer(query, scratch) {
                return;
            }
            (0..attempts).for_each(|_| std::hint::spin_loop());
        }
        let writer_waits = self.core.read();
        attempt.answer(query, scratch);
        drop(writer_waits);
    }

    /// In which forms blocks have been stored. Costs one load.
    pub fn token_forms(&self) -> TokenForms {
        self.roster.forms.get()
    }

    /// How many of these names the rank holds on the device from the first on, by its own names. Waits for the
    /// writer's section, and keeps the writer waiting for a moment at a time only: what is said of each thousand
    /// names was true at one moment.
    pub fn overlap_by_names(&self, slot: RankSlot, names: &[BlockHash]) -> u32 {
        /// Looked at under one lock: a name takes some 100 ns.
        const PIECE: usize = 1_024;
        let mut reach = self.core.read().overlap_by_names(slot, &names[..names.len().min(PIECE)], false);
        let mut looked = PIECE;
        // Each further piece begins with the name before it, whose place may be another by now.
        while reach as usize == looked && looked < names.len() {
            let piece = &names[looked - 1..names.len().min(looked + PIECE)];
            reach += self.core.read().overlap_by_names(slot, piece, true).saturating_sub(1);
            looked += PIECE;
        }
        reach
    }

    /// Distinct blocks that the rank holds on the device in its first full-attention group.
    pub fn tree_size(&self, slot: RankSlot) -> Option<u64> {
        let pin = pin();
        self.roster.ranks(&pin)?.get(slot).map(|rank| rank.gauge.blocks())
    }

    /// Whether the rank has announced blocks of several attention groups: a hybrid model's engine.
    pub fn has_several_groups(&self, slot: RankSlot) -> bool {
        let pin = pin();
        let rank = self.roster.ranks(&pin).and_then(|ranks| ranks.get(slot));
        rank.and_then(|rank| rank.layers.as_deref()).is_some_and(|groups| groups.bind() > 1)
    }

    /// What the rank holds in a tier. Reads two counters.
    pub fn tier_size(&self, slot: RankSlot, tier: Tier) -> Option<TierSize> {
        let pin = pin();
        self.roster.ranks(&pin)?.get(slot).map(|rank| rank.gauge.size(tier))
    }

    /// [`Self::tree_size`] of all ranks, by the index of their slots; 0 where no rank is.
    pub fn tree_sizes(&self, sizes: &mut Vec<u64>) {
        let pin = pin();
        sizes.clear();
        let Some(ranks) = self.roster.ranks(&pin) else { return };
        sizes.extend(ranks.iter().map(|rank| rank.map_or(0, |rank| rank.gauge.blocks())));
    }

    /// Every name that the rank holds, by tier and group. Costs the rank's blocks and waits for the writer's
    /// section; for checks and dumps.
    pub fn contents(&self, slot: RankSlot) -> Vec<LayerContents> {
        self.core.read().contents(slot)
    }

    /// The whole content, as of one moment. Costs one pass over the runs and as much memory again, and waits for
    /// the writer's section.
    pub fn dump(&self) -> Dump {
        self.core.read().dump()
    }

    /// Size of the index as of the end of the last write section. Takes no lock and looks at no run, only at a
    /// counter of each rank. What layers beside the device's first group take is not in `bytes`.
    pub fn sizes(&self) -> IndexStats {
        let (nodes, distinct_blocks, bytes) = self.roster.sizes.get();
        let pin = pin();
        let ranks = || self.roster.ranks(&pin).into_iter().flat_map(|ranks| ranks.iter().flatten());
        let total_blocks = ranks().map(|rank| rank.gauge.blocks()).sum();
        let orphans = ranks().map(|rank| rank.gauge.orphans()).sum();
        IndexStats { nodes, distinct_blocks, total_blocks, orphans, bytes }
    }

    /// Size of the index. Costs one look at every run and waits for the writer's section.
    pub fn stats(&self) -> IndexStats {
        let core = self.core.read();
        IndexStats {
            nodes: core.tree.run_count() + 1,
            distinct_blocks: core.tree.blocks(),
            total_blocks: core.ranks().map(|rank| rank.gauge.blocks()).sum(),
            orphans: core.ranks().map(|rank| rank.orphans.len() as u64).sum(),
            bytes: core.tree.bytes(&pin()),
        }
    }
}

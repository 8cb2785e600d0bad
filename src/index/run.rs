//! What readers see of a run: its hashes and who holds it, in two cache lines and a buffer.
//!
//! All of it is atomics, guarded by the run's [`Version`]. Functions that change something are the writer's
//! and expect the version to be open.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use smallvec::SmallVec;

use super::coverage::{Coverage, Interval, Melted, around, bits_of, melt, not_in, without};
use super::intervals::{INLINE_RANKS, INLINE_WORDS, Intervals, Partial};
use super::published::{Blocks, BlocksView, HEADER, Pin, Published, SoleWriter, prefetch};
use super::tree::Layer;
use super::version::Version;
use crate::block::{LocalBlockHash, SequenceHash, Tier};

/// Blocks of one run: 18 bits of a table entry say where in its run a block lies. Two million tokens at 16 a
/// block; longer prompts go on in a second run.
pub(super) const MAX_RUN: u32 = 1 << 17;

/// Every eighth block's sequence hash is kept, the others follow from it: at most seven steps of 5 ns where a
/// prompt leaves a run in its middle, for one byte a block instead of eight.
const CHECKPOINT: usize = 8;

/// Says in a run's word of branch offsets that its names are byte strings.
const BYTE_NAMES: u64 = 1 << 63;

/// Branching points whose sequence hashes the header keeps: a prompt that leaves the run there needs no
/// checkpoint, which would be a miss of its own. System prompts have one or two that nearly all traffic takes.
pub(super) const BRANCHES: usize = 2;

/// Bits of a branch's offset in its word, one more than a run's length needs: 0 is none.
const BRANCH_BITS: u32 = 18;
const BRANCH_MASK: u64 = (1 << BRANCH_BITS) - 1;

/// Parts of a run that few have: holds of ranks past the header's bits, and of other tiers and groups.
#[derive(Clone, Default, Debug)]
pub(super) struct Ext {
    /// Full holds of ranks from 256 on.
    wide: Vec<u64>,
    pub(super) cold: Vec<(Layer, Coverage)>,
    pub(super) chunks: Vec<ChunkHold>,
}

/// A rank's hold on a chunk that ends in the run: several blocks that are usable together or not at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ChunkHold {
    pub(super) layer: Layer,
    pub(super) rank: u32,
    /// The chunk's last block.
    pub(super) offset: u32,
    /// Blocks of the chunk; those before the run's first lie in the runs before it.
    pub(super) len: u32,
}

/// Consecutive blocks and who holds them.
///
/// The first line is what a walk needs, the second says who holds the run.
#[derive(Default, Debug)]
#[repr(C, align(128))]
pub(super) struct Run {
    pub(super) version: Version,
    blocks: Blocks,
    len: AtomicU32,
    /// Blocks that fit in the buffer, as it says itself: the writer need not wait for its memory.
    capacity: AtomicU32,
    first: AtomicU64,
    last: AtomicU64,
    /// Offsets of the branches, each plus one; the highest bit says that names are byte strings.
    branch_offsets: AtomicU64,
    branches: [AtomicU64; BRANCHES],
    full: [AtomicU64; INLINE_WORDS],
    intervals: Intervals,
    ext: Published<Ext>,
}

const _: () = assert!(size_of::<Run>() == 128, "a run's header has two lines");

impl Run {
    /// A run whose versions go on from `version`.
    pub(super) fn starting_at(version: u64) -> Self {
        Self { version: Version::starting_at(version), ..Self::default() }
    }

    // === content ===

    pub(super) fn len(&self) -> u32 {
        self.len.load(Relaxed)
    }

    /// The sequence hash of the first block.
    pub(super) fn first(&self) -> SequenceHash {
        SequenceHash(self.first.load(Relaxed))
    }

    /// The sequence hash of the last block.
    pub(super) fn last(&self) -> SequenceHash {
        SequenceHash(self.last.load(Relaxed))
    }

    pub(super) fn hashes<'p>(&self, pin: &'p Pin) -> Hashes<'p> {
        Hashes { view: self.blocks.load(pin), len: self.len() as usize }
    }

    /// Whether the blocks' names are byte strings, which lie elsewhere.
    pub(super) fn has_byte_names(&self) -> bool {
        self.branch_offsets.load(Relaxed) & BYTE_NAMES != 0
    }

    pub(super) fn set_byte_names(&self, are: bool) {
        self.branch_offsets.store(if are { BYTE_NAMES } else { 0 }, Relaxed);
    }

    /// The sequence hash of the block at `offset`, if the header keeps it.
    pub(super) fn branch(&self, offset: u32) -> Option<SequenceHash> {
        let offsets = self.branch_offsets.load(Relaxed);
        let is = |nth: u32| offsets >> (nth * BRANCH_BITS) & BRANCH_MASK == u64::from(offset) + 1;
        let nth = (0..BRANCHES as u32).find(|nth| is(*nth))?;
        Some(SequenceHash(self.branches[nth as usize].load(Relaxed)))
    }

    /// The branches that the header keeps: the number of blocks up to each, 0 for none, and its sequence hash.
    pub(super) fn kept_branches(&self) -> [(usize, SequenceHash); BRANCHES] {
        let offsets = self.branch_offsets.load(Relaxed);
        std::array::from_fn(|nth| {
            // 18 bits.
            #[allow(clippy::cast_possible_truncation)]
            let behind = (offsets >> (nth as u32 * BRANCH_BITS) & BRANCH_MASK) as usize;
            (behind, SequenceHash(self.branches[nth].load(Relaxed)))
        })
    }

    /// Keeps the sequence hash of a block that something hangs behind, if there is room.
    pub(super) fn keep_branch(&self, offset: u32, sequence: SequenceHash) {
        let offsets = self.branch_offsets.load(Relaxed);
        if let Some(nth) = self.free_branch() {
            self.branches[nth as usize].store(sequence.0, Relaxed);
            self.branch_offsets.store(offsets | (u64::from(offset) + 1) << (nth * BRANCH_BITS), Relaxed);
        }
    }

    /// Whether [`Self::keep_branch`] would change anything.
    pub(super) fn lacks_branch(&self, offset: u32) -> bool {
        self.free_branch().is_some() && self.branch(offset).is_none()
    }

    fn free_branch(&self) -> Option<u32> {
        let offsets = self.branch_offsets.load(Relaxed);
        (0..BRANCHES as u32).find(|nth| offsets >> (nth * BRANCH_BITS) & BRANCH_MASK == 0)
    }

    /// Forgets what was kept of blocks from `len` on.
    fn forget_branches(&self, len: u32) {
        let mut offsets = self.branch_offsets.load(Relaxed);
        for nth in 0..BRANCHES as u32 {
            if offsets >> (nth * BRANCH_BITS) & BRANCH_MASK > u64::from(len) {
                offsets &= !(BRANCH_MASK << (nth * BRANCH_BITS));
            }
        }
        self.branch_offsets.store(offsets, Relaxed);
    }

    pub(super) fn name_word(&self, offset: u32, pin: &Pin) -> u64 {
        self.blocks.load(pin).beside(offset as usize)
    }

    pub(super) fn set_name_words(
        &self,
        from: u32,
        words: impl IntoIterator<Item = u64>,
        writer: &mut SoleWriter,
        pin: &Pin,
    ) {
        self.blocks.load(pin).set_beside(from as usize, words, writer);
    }

    /// Names of all blocks, if they are numbers.
    pub(super) fn name_words<'w>(&self, writer: &'w SoleWriter, pin: &'w Pin) -> &'w [u64] {
        self.name_words_from(0, self.len() as usize, writer, pin)
    }

    /// Names of blocks that are or will be, if they are numbers.
    pub(super) fn name_words_from<'w>(
        &self,
        from: u32,
        count: usize,
        writer: &'w SoleWriter,
        pin: &'w Pin,
    ) -> &'w [u64] {
        &self.blocks.load(pin).all_beside(writer)[from as usize..from as usize + count]
    }

    /// Makes room for `more` blocks; their names may then be written. Readers see the same blocks before and after,
    /// so this needs no open version.
    pub(super) fn reserve(&self, more: usize, writer: &SoleWriter, pin: &Pin) {
        let old = self.blocks.load(pin);
        let len = self.len() as usize;
        let needed = len + more;
        // Hashes past the run's end were cut off, and a reader may still be comparing them.
        if needed <= old.capacity() && old.count() == len {
            return;
        }
        let grown = if len == 0 { needed } else { needed.max(old.capacity() + old.capacity() / 4) };
        self.rebuild(grown, writer, pin);
    }

    fn rebuild(&self, capacity: usize, writer: &SoleWriter, pin: &Pin) {
        let old = self.blocks.load(pin);
        let len = self.len() as usize;
        let capacity = capacity.next_multiple_of(CHECKPOINT);
        // Bounded by MAX_RUN and a quarter.
        #[allow(clippy::cast_possible_truncation)]
        self.capacity.store(capacity as u32, Relaxed);
        let checks = len.div_ceil(CHECKPOINT);
        let (hashes, old_beside) = (old.settled(), old.all_beside(writer));
        let kept = match len {
            0 => [(0, &[][..]); 3],
            _ => [
                (0, &hashes[..len]),
                (capacity, &old_beside[..len]),
                (2 * capacity, &old_beside[old.capacity()..old.capacity() + checks]),
            ],
        };
        self.blocks.replace(capacity, capacity + capacity / CHECKPOINT, len, &kept, pin);
    }

    /// Writes blocks for which there is room behind the run's last: readers stop at the run's length, so this
    /// needs no open version, and [`Self::show`] is quick. `parent` is the sequence hash before the first block
    /// of an empty run.
    pub(super) fn append_unseen(
        &self,
        parent: Option<SequenceHash>,
        locals: &[u64],
        writer: &mut SoleWriter,
        pin: &Pin,
    ) -> Unseen {
        let view = self.blocks.load(pin);
        let len = self.len() as usize;
        let mut sequence = if len == 0 { parent } else { Some(self.last()) };
        let mut first = None;
        for (at, &local) in (len..).zip(locals) {
            let next = SequenceHash::extend(sequence, LocalBlockHash(local));
            if at == 0 {
                first = Some(next);
            }
            if at % CHECKPOINT == 0 {
                view.set_beside(view.capacity() + at / CHECKPOINT, [next.0], writer);
            }
            sequence = Some(next);
        }
        view.append(locals, writer);
        // Bounded by MAX_RUN.
        #[allow(clippy::cast_possible_truncation)]
        let len = (len + locals.len()) as u32;
        Unseen { first, last: sequence, len }
    }

    /// Makes blocks part of the run.
    pub(super) fn show(&self, unseen: &Unseen) {
        if let Some(SequenceHash(first)) = unseen.first {
            self.first.store(first, Relaxed);
        }
        if let Some(SequenceHash(last)) = unseen.last {
            self.last.store(last, Relaxed);
        }
        self.len.store(unseen.len, Relaxed);
    }

    /// Cuts the run to `len` blocks, beyond which nobody holds anything, and gives room back.
    pub(super) fn truncate(&self, len: u32, writer: &SoleWriter, pin: &Pin) {
        self.forget_branches(len);
        if len == 0 {
            self.len.store(0, Relaxed);
            self.blocks.release(pin);
            return;
        }
        let last = self.hashes(pin).sequence(len as usize - 1);
        self.len.store(len, Relaxed);
        self.last.store(last.0, Relaxed);
        self.shrink_holders(len, pin);
        let capacity = self.blocks.load(pin).capacity();
        if capacity > 2 * CHECKPOINT && (len as usize) < capacity / 2 {
            self.rebuild(len as usize, writer, pin);
        }
    }

    // === holders in the hot layer ===

    /// Asks for both lines.
    pub(super) fn prefetch(&self) {
        prefetch(self);
        prefetch(&self.full);
    }

    /// Asks for the memory of the block at `offset` and of the one behind it, without waiting for any.
    pub(super) fn prefetch_block(&self, offset: u32, pin: &Pin) {
        let (capacity, next) = (self.capacity.load(Relaxed) as usize, offset as usize + 1);
        let beside = |at: usize| HEADER + capacity + at;
        let of = [0, HEADER + next, beside(next), beside(capacity + next / CHECKPOINT)];
        self.blocks.prefetch(of, pin);
    }

    /// Asks for the local hashes of the first `len` blocks and for the intervals that the header has no room for.
    #[inline]
    pub(super) fn prefetch_buffers(&self, len: usize, pin: &Pin) {
        /// Lines until the hardware has seen a stream, and no more than a core can wait for at once.
        const LINES: usize = 16;
        self.blocks.prefetch((0..HEADER + len).step_by(8).take(LINES), pin);
        self.intervals.prefetch(pin);
    }

    /// Word `at` of the set of ranks that hold the whole run.
    pub(super) fn full_word(&self, at: usize, pin: &Pin) -> u64 {
        match self.full.get(at) {
            Some(word) => word.load(Relaxed),
            None => {
                self.ext(pin).and_then(|ext| ext.wide.get(at - INLINE_WORDS)).copied().unwrap_or_default()
            }
        }
    }

    /// Whether the rank holds the whole run.
    pub(super) fn is_full(&self, rank: u32, pin: &Pin) -> bool {
        self.full_word((rank / 64) as usize, pin) >> (rank % 64) & 1 == 1
    }

    fn set_full(&self, rank: u32, full: bool, pin: &Pin) {
        let bit = 1 << (rank % 64);
        if rank < INLINE_RANKS {
            let word = &self.full[(rank / 64) as usize];
            let bits = word.load(Relaxed);
            word.store(if full { bits | bit } else { bits & !bit }, Relaxed);
            return;
        }
        let at = ((rank - INLINE_RANKS) / 64) as usize;
        self.change_ext(pin, |ext| {
            if ext.wide.len() <= at {
                ext.wide.resize(at + 1, 0);
            }
            if full { ext.wide[at] |= bit } else { ext.wide[at] &= !bit }
        });
    }

    fn wide_words<'p>(&self, pin: &'p Pin) -> &'p [u64] {
        self.ext(pin).map_or(&[], |ext| &ext.wide)
    }

    fn nobody_is_full(&self, pin: &Pin) -> bool {
        self.full.iter().all(|word| word.load(Relaxed) == 0)
            && self.wide_words(pin).iter().all(|word| *word == 0)
    }

    fn full_ranks(&self, pin: &Pin) -> SmallVec<[u32; 8]> {
        let words = INLINE_WORDS + self.wide_words(pin).len();
        let mut ranks = SmallVec::new();
        for (at, base) in (0..words).zip((0_u32..).step_by(64)) {
            ranks.extend(bits_of(self.full_word(at, pin)).map(|bit| base + bit));
        }
        ranks
    }

    /// What each rank holds of the run.
    pub(super) fn holders(&self, pin: &Pin) -> Vec<Interval> {
        let whole = |rank| Interval { rank, from: 0, to: self.len() };
        self.full_ranks(pin).into_iter().map(whole).chain(self.partial(pin).iter()).collect()
    }

    /// Whether the rank and no other holds the whole run.
    pub(super) fn is_only_full(&self, rank: u32, pin: &Pin) -> bool {
        let (its, bit) = ((rank / 64) as usize, 1 << (rank % 64));
        let only = |(at, word): (usize, u64)| word == if at == its { bit } else { 0 };
        let inline = self.full.iter().map(|word| word.load(Relaxed));
        let wide = self.wide_words(pin);
        its < INLINE_WORDS + wide.len() && inline.chain(wide.iter().copied()).enumerate().all(only)
    }

    /// Whether the rank holds the whole run, and nobody else anything of it in any layer.
    pub(super) fn has_no_other_holder(&self, rank: u32, pin: &Pin) -> bool {
        self.intervals.is_empty(pin) && !self.has_cold(pin) && self.is_only_full(rank, pin)
    }

    /// Intervals of all ranks that hold part of the run, by rank.
    pub(super) fn partial<'p>(&'p self, pin: &'p Pin) -> Partial<'p> {
        self.intervals.load(pin)
    }

    /// Whether the rank holds this block.
    pub(super) fn holds(&self, rank: u32, offset: u32, pin: &Pin) -> bool {
        self.is_full(rank, pin)
            || self.partial(pin).of(rank).any(|held| held.from <= offset && offset < held.to)
    }

    /// Whether the rank holds any block.
    pub(super) fn holds_any(&self, rank: u32, pin: &Pin) -> bool {
        self.is_full(rank, pin) || self.partial(pin).of(rank).next().is_some()
    }

    /// How many of the blocks `from..to` the rank does not hold, counted until the first that it does.
    pub(super) fn not_held(&self, rank: u32, from: u32, to: u32, pin: &Pin) -> u32 {
        if self.is_full(rank, pin) {
            return 0;
        }
        not_in(self.partial(pin).of(rank), from, to)
    }

    /// The blocks that the rank holds in this layer without a hole around `offset`, if it holds that one.
    pub(super) fn held_around(&self, layer: Layer, rank: u32, offset: u32, pin: &Pin) -> Option<(u32, u32)> {
        if layer != Layer::HOT {
            return self.cold(layer, pin)?.held_around(rank, offset, self.len());
        }
        if self.is_full(rank, pin) {
            Some((0, self.len()))
        } else {
            around(self.partial(pin).of(rank), offset)
        }
    }

    /// One past the last block that anyone holds.
    pub(super) fn reach(&self, pin: &Pin) -> u32 {
        if !self.nobody_is_full(pin) {
            return self.len();
        }
        self.partial(pin).iter().map(|held| held.to).max().unwrap_or_default()
    }

    /// Adds `from..to` to what the rank holds; returns how many blocks are new to it.
    pub(super) fn hold(&self, rank: u32, from: u32, to: u32, pin: &Pin) -> u32 {
        if from >= to || self.is_full(rank, pin) {
            return 0;
        }
        // Mostly it goes on where it ended.
        if to < self.len() && self.intervals.grow_end(rank, from, to, pin) {
            return to - from;
        }
        let (start, held) = self.partial(pin).range_of(rank);
        let Melted { first, touching, whole, new } = melt(&held, rank, from, to);
        if whole.from == 0 && whole.to == self.len() {
            self.intervals.splice(start, held.len(), &[], rank, pin);
            self.set_full(rank, true, pin);
        } else {
            self.intervals.splice(start + first, touching, &[whole], rank, pin);
        }
        new
    }

    /// Takes `from..to` away; returns how many blocks the rank had of it.
    pub(super) fn release(&self, rank: u32, from: u32, to: u32, pin: &Pin) -> u32 {
        // Mostly it is the end of what the rank holds.
        if from > 0 && to == self.len() && self.is_full(rank, pin) {
            self.set_full(rank, false, pin);
            self.intervals.put_first(Interval { rank, from: 0, to: from }, pin);
            return to - from;
        }
        if self.intervals.cut_end(rank, from, to, pin) {
            return to - from;
        }
        let (start, mut held) = self.partial(pin).range_of(rank);
        let count = held.len();
        if self.is_full(rank, pin) {
            self.set_full(rank, false, pin);
            held.push(Interval { rank, from: 0, to: self.len() });
        }
        let (left, gone) = without(&held, from, to);
        self.intervals.splice(start, count, &left, rank, pin);
        gone
    }

    /// Forgets the rank; returns how many blocks it had.
    pub(super) fn release_rank(&self, rank: u32, pin: &Pin) -> u32 {
        self.release(rank, 0, self.len(), pin)
    }

    /// The run will grow from `old` blocks by some that `by` alone holds (if anyone): all others that held
    /// all of it hold a part from now on.
    pub(super) fn grow_past(&self, old: u32, by: Option<u32>, pin: &Pin) {
        for rank in self.full_ranks(pin).into_iter().filter(|rank| Some(*rank) != by) {
            self.set_full(rank, false, pin);
            let (start, _) = self.partial(pin).range_of(rank);
            self.intervals.splice(start, 0, &[Interval { rank, from: 0, to: old }], rank, pin);
        }
    }

    fn shrink_holders(&self, len: u32, pin: &Pin) {
        let whole: SmallVec<[Interval; 8]> =
            self.partial(pin).iter().filter(|held| held.from == 0 && held.to == len).collect();
        for held in whole {
            let (start, _) = self.partial(pin).range_of(held.rank);
            self.intervals.splice(start, 1, &[], held.rank, pin);
            self.set_full(held.rank, true, pin);
        }
        self.change_cold(pin, |coverage| coverage.shrink(len));
    }

    // === other layers ===

    pub(super) fn ext<'p>(&self, pin: &'p Pin) -> Option<&'p Ext> {
        self.ext.load(pin)
    }

    /// Whether anything is held in a layer other than the hot one.
    pub(super) fn has_cold(&self, pin: &Pin) -> bool {
        self.ext(pin).is_some_and(|ext| !ext.cold.is_empty())
    }

    /// Who holds what in a layer other than the hot one.
    pub(super) fn cold<'p>(&self, layer: Layer, pin: &'p Pin) -> Option<&'p Coverage> {
        let cold = &self.ext(pin)?.cold;
        cold.iter().find(|(of, _)| *of == layer).map(|(_, coverage)| coverage)
    }

    /// Changes a layer's coverage, made if it is new and dropped if it is empty afterwards.
    pub(super) fn change_layer<T>(
        &self,
        layer: Layer,
        pin: &Pin,
        change: impl FnOnce(&mut Coverage) -> T,
    ) -> T {
        let mut ext = self.ext(pin).cloned().unwrap_or_default();
        let at = ext.cold.iter().position(|(of, _)| *of == layer).unwrap_or_else(|| {
            ext.cold.push((layer, Coverage::default()));
            ext.cold.len() - 1
        });
        let changed = change(&mut ext.cold[at].1);
        self.put_ext(ext, pin);
        changed
    }

    /// Changes the coverage of every layer but the hot one.
    pub(super) fn change_cold(&self, pin: &Pin, change: impl FnMut(&mut Coverage)) {
        if !self.has_cold(pin) {
            return;
        }
        let mut change = change;
        self.change_ext(pin, |ext| ext.cold.iter_mut().for_each(|(_, coverage)| change(coverage)));
    }

    /// The run grew from `old` to `new` blocks, which in each layer the rank given by `by` holds.
    pub(super) fn grow_cold(&self, old: u32, new: u32, by: impl Fn(Layer) -> Option<u32>, pin: &Pin) {
        self.change_ext(pin, |ext| {
            ext.cold.iter_mut().for_each(|(layer, coverage)| coverage.grow(old, new, by(*layer)));
        });
    }

    /// Chunks that end in the run.
    pub(super) fn chunks<'p>(&self, pin: &'p Pin) -> &'p [ChunkHold] {
        self.ext(pin).map_or(&[], |ext| &ext.chunks)
    }

    pub(super) fn add_chunk(&self, chunk: ChunkHold, pin: &Pin) {
        self.change_ext(pin, |ext| ext.chunks.push(chunk));
    }

    pub(super) fn remove_chunk(&self, chunk: ChunkHold, pin: &Pin) {
        self.change_ext(pin, |ext| {
            if let Some(at) = ext.chunks.iter().position(|of| *of == chunk) {
                ext.chunks.swap_remove(at);
            }
        });
    }

    /// Takes the rank out of a tier's layers other than the hot one, or of all of them; returns how many blocks
    /// it had, those of chunks included.
    pub(super) fn release_cold(&self, rank: u32, tier: Option<Tier>, pin: &Pin) -> u64 {
        if self.ext(pin).is_none() {
            return 0;
        }
        let (len, mut gone) = (self.len(), 0);
        let is_meant = |layer: Layer| tier.is_none_or(|tier| layer.tier == tier);
        self.change_ext(pin, |ext| {
            for (_, coverage) in ext.cold.iter_mut().filter(|(layer, _)| is_meant(*layer)) {
                gone += u64::from(coverage.remove_rank(rank, len));
            }
            ext.chunks.retain(|chunk| {
                let goes = chunk.rank == rank && is_meant(chunk.layer);
                gone += if goes { u64::from(chunk.len) } else { 0 };
                !goes
            });
        });
        gone
    }

    fn change_ext(&self, pin: &Pin, change: impl FnOnce(&mut Ext)) {
        let mut ext = self.ext(pin).cloned().unwrap_or_default();
        change(&mut ext);
        self.put_ext(ext, pin);
    }

    /// Layers and words that nobody holds anything in take no room.
    fn put_ext(&self, mut ext: Ext, pin: &Pin) {
        ext.cold.retain(|(_, coverage)| !coverage.is_empty());
        while ext.wide.last() == Some(&0) {
            ext.wide.pop();
        }
        let needed = !ext.cold.is_empty() || !ext.wide.is_empty() || !ext.chunks.is_empty();
        self.ext.replace(needed.then_some(ext), pin);
    }

    /// Live bytes of the buffers, without the header.
    pub(super) fn bytes(&self, pin: &Pin) -> usize {
        let ext = self.ext(pin).map_or(0, |ext| {
            size_of::<Ext>()
                + ext.wide.len() * 8
                + ext.cold.len() * size_of::<(Layer, Coverage)>()
                + ext.chunks.len() * size_of::<ChunkHold>()
        });
        self.blocks.load(pin).bytes() + self.intervals.bytes(pin) + ext
    }
}

/// What becomes true of a run with blocks that are written but not part of it yet.
#[derive(Debug)]
pub(super) struct Unseen {
    first: Option<SequenceHash>,
    last: Option<SequenceHash>,
    len: u32,
}

/// The hashes of a run at one moment.
#[derive(Clone, Copy)]
pub(super) struct Hashes<'p> {
    view: BlocksView<'p>,
    len: usize,
}

impl<'p> Hashes<'p> {
    /// The local hashes.
    pub(super) fn locals(self) -> &'p [u64] {
        let settled = self.view.settled();
        &settled[..self.len.min(settled.len())]
    }

    /// The sequence hash of the block at `offset`.
    pub(super) fn sequence(self, offset: usize) -> SequenceHash {
        let base = offset / CHECKPOINT * CHECKPOINT;
        let start = SequenceHash(self.checkpoint(offset / CHECKPOINT));
        let inner = &self.view.settled()[base + 1..=offset];
        inner.iter().fold(start, |before, &local| SequenceHash::extend(Some(before), LocalBlockHash(local)))
    }

    fn checkpoint(self, nth: usize) -> u64 {
        self.view.beside(self.view.capacity() + nth)
    }

    /// How many of these sequence hashes are the run's, by bisection: equality at a depth means equality
    /// before it.
    pub(super) fn common_sequences(self, wanted: &[u64]) -> usize {
        let len = wanted.len().min(self.locals().len());
        let (mut low, mut high) = (0, len.div_ceil(CHECKPOINT));
        while low < high {
            let middle = low.midpoint(high);
            if self.checkpoint(middle) == wanted[middle * CHECKPOINT] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        let Some(base) = low.checked_sub(1).map(|nth| nth * CHECKPOINT) else { return 0 };
        let mut sequence = SequenceHash(wanted[base]);
        let mut at = base + 1;
        while at < len.min(base + CHECKPOINT) {
            sequence = SequenceHash::extend(Some(sequence), LocalBlockHash(self.locals()[at]));
            if sequence.0 != wanted[at] {
                break;
            }
            at += 1;
        }
        at
    }
}

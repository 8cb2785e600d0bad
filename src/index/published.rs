//! Memory that readers look at while the writer changes it: the only `unsafe` of the project.
//!
//! # Why it is needed
//!
//! A query compares up to thousands of hashes with a run's. As plain memory that is a `memcmp`, which reads
//! as fast as the cache delivers; element by element through atomics it takes two to four times as long, and
//! behind a lock readers wait for the writer (p99 of 270 µs instead of 2 µs beside a saturating writer).
//!
//! # The argument
//!
//! *Reclamation.* Whatever a [`Published`] or a [`PublishedWords`] ever pointed to is retired through
//! `crossbeam-epoch`'s default collector: it is destroyed only after every thread that was pinned when the
//! pointer was replaced has unpinned. References handed out here borrow from a [`Pin`], which is such a pin
//! of that very collector (the type can be made by [`pin`] alone), so they never outlive what they show. Words
//! are kept in a [`Limbo`] for as long: a function deferred after they were unlinked says that they are due. An
//! index's limbo goes with its core, which every reader holds.
//!
//! *No data race.* All words are atomics. The hashes of a run's buffer are written by [`BlocksView::append`] alone.
//! Word 0 counts the settled ones. `append` writes hash `i` with `i` = the count, then raises the count with
//! release order; the count never falls, so a hash below it is never written again in that buffer. `settled`
//! loads the count with acquire order, so the writes of what it shows as plain memory happened before. Two
//! appends do not overlap: they take the index's [`SoleWriter`] by `&mut`, and a buffer belongs to one index.
//!
//! *Words beside the hashes* are written by `set_beside` under the same `&mut`, so the writer may see them as
//! plain memory while it holds its right by `&`; readers see them as atomics alone.
//!
//! Everything else is safe code over atomics, and its consistency (not its safety) is the business of
//! [`Version`](super::version::Version).
#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use crossbeam_epoch::{self as epoch, Atomic, Guard, Owned, Pointer, Shared};
use smallvec::SmallVec;

use crate::block::{LocalBlockHash, SequenceHash};

/// Buffers retired under one pin: an event replaces a few at most.
type RetiredWords = SmallVec<[Owned<Words>; 4]>;

/// Keeps what it showed alive. Short-lived: nothing retired is freed while a thread stays pinned.
pub(super) struct Pin {
    guard: Guard,
    retired: Cell<usize>,
    /// Bytes of words that came under this pin, less those that went.
    grown: Cell<isize>,
    /// Behind one pointer, which a query's pin leaves null: it is made and dropped for each.
    words: Cell<Option<Box<RetiredWords>>>,
}

impl Drop for Pin {
    #[inline]
    fn drop(&mut self) {
        if let Some(words) = self.words.take() {
            self.leave_to_collector(words);
        }
    }
}

impl std::fmt::Debug for Pin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pin")
    }
}

/// Pins this thread: about 10 ns, and next to nothing within another pin of the same thread.
#[inline]
pub(super) fn pin() -> Pin {
    Pin { guard: epoch::pin(), retired: Cell::new(0), grown: Cell::new(0), words: Cell::new(None) }
}

impl Pin {
    /// What no limbo took over goes with the collector. Out of the way of queries, which retire nothing.
    #[cold]
    fn leave_to_collector(&self, words: Box<RetiredWords>) {
        self.guard.defer(move || drop(words));
    }

    /// Hands this thread's retired memory on and frees what no reader can see any more.
    pub(super) fn collect(&self) {
        self.guard.flush();
    }

    /// Pieces of memory that were retired under this pin.
    pub(super) fn retired(&self) -> usize {
        self.retired.get()
    }

    /// By how many bytes the words of the index grew under this pin since this was asked last.
    pub(super) fn take_grown(&self) -> isize {
        self.grown.take()
    }

    /// So many words came, or went where it is negative.
    fn note_words(&self, words: isize) {
        self.grown.set(self.grown.get() + words * size_of::<AtomicU64>() as isize);
    }

    fn note_retired(&self) {
        self.retired.set(self.retired.get() + 1);
    }
}

/// Buffers that no reader can come to any more, but some may still look at. The collector has whoever pins free
/// what is due, which cost one query in a thousand 60 µs; here it only says what is due, and the writer frees.
#[derive(Debug, Default)]
pub(super) struct Limbo {
    fresh: Vec<Owned<Words>>,
    /// Batches by number, the oldest first.
    waiting: VecDeque<(u64, Vec<Owned<Words>>)>,
    last: u64,
    /// The newest batch that nobody looks at any more; nor then at older ones, whose readers were waited for too.
    due: Arc<AtomicU64>,
}

impl Limbo {
    /// Takes over what was retired under a pin.
    #[inline]
    pub(super) fn take_in(&mut self, pin: &Pin) {
        if let Some(words) = pin.words.take() {
            self.fresh.extend(*words);
        }
    }

    /// Closes a batch: it is due when all that are pinned now have unpinned.
    pub(super) fn close_batch(&mut self, pin: &Pin) {
        if self.fresh.is_empty() {
            return;
        }
        self.last += 1;
        let (number, due) = (self.last, Arc::clone(&self.due));
        pin.guard.defer(move || due.fetch_max(number, Release));
        self.waiting.push_back((number, std::mem::take(&mut self.fresh)));
    }

    /// Frees what is due.
    pub(super) fn free(&mut self) {
        let due = self.due.load(Acquire);
        while self.waiting.front().is_some_and(|(number, _)| *number <= due) {
            self.waiting.pop_front();
        }
    }
}

/// The right to append to the buffers of one index. Neither `Clone` nor `Copy`: `index::new` makes one.
#[derive(Debug)]
pub(super) struct SoleWriter(());

impl SoleWriter {
    /// For a new index; a second one for the same index would let two threads append to one buffer.
    pub(super) fn for_new_index() -> Self {
        Self(())
    }
}

/// A value that readers follow and the writer replaces; may be absent.
pub(super) struct Published<T>(Atomic<T>);

impl<T> Default for Published<T> {
    fn default() -> Self {
        Self(Atomic::null())
    }
}

impl<T: Send + Sync + 'static> Published<T> {
    pub(super) fn load<'p>(&self, pin: &'p Pin) -> Option<&'p T> {
        let shared = self.0.load(Acquire, &pin.guard);
        // SAFETY: null or from `replace`, and retired through the collector that `pin` pins (module docs).
        unsafe { shared.as_ref() }
    }

    /// Puts `value` in place; what was there is retired.
    pub(super) fn replace(&self, value: Option<T>, pin: &Pin) {
        let new = value.map_or_else(Shared::null, |value| Owned::new(value).into_shared(&pin.guard));
        let old = self.0.swap(new, AcqRel, &pin.guard);
        if !old.is_null() {
            // SAFETY: the swap took the only pointer to `old`; pinned readers are waited for.
            unsafe { pin.guard.defer_destroy(old) };
            pin.note_retired();
        }
    }
}

impl<T> Drop for Published<T> {
    fn drop(&mut self) {
        let own = std::mem::replace(&mut self.0, Atomic::null());
        // SAFETY: `&mut self`: nobody else can load the pointer, and earlier loads borrow from `self`'s owner
        // through a pin whose retirement this value was part of.
        drop(unsafe { own.try_into_owned() });
    }
}

impl<T> std::fmt::Debug for Published<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Published")
    }
}

type Words = [MaybeUninit<AtomicU64>];

/// Words that readers follow and the writer replaces, behind one pointer: a [`Published`] vector has two, and
/// each is a miss. May be absent.
#[derive(Default)]
pub(super) struct PublishedWords(Atomic<Words>);

impl PublishedWords {
    pub(super) fn load<'p>(&self, pin: &'p Pin) -> Option<&'p [AtomicU64]> {
        let shared = self.0.load(Acquire, &pin.guard);
        // SAFETY: null or from `replace`, and retired through the collector that `pin` pins (module docs).
        let words = unsafe { shared.as_ref() }?;
        // SAFETY: `replace` writes every word, from the first to the last, before it publishes the buffer.
        Some(unsafe { &*(std::ptr::from_ref(words) as *const [AtomicU64]) })
    }

    /// Puts `len` new words in place and retires what was there: these pieces, each behind the one before it,
    /// and zeros where there is none.
    pub(super) fn replace<'w>(
        &self,
        len: usize,
        pieces: impl IntoIterator<Item = (usize, &'w [u64])>,
        pin: &Pin,
    ) {
        let mut owned = Owned::<Words>::init(len);
        let mut rest = &mut owned[..];
        let mut write = |count: usize, values: &[u64]| {
            let (zeros, behind) = std::mem::take(&mut rest).split_at_mut(count);
            zeros.iter_mut().for_each(|word| _ = word.write(AtomicU64::new(0)));
            let (words, behind) = behind.split_at_mut(values.len());
            words.iter_mut().zip(values).for_each(|(word, value)| _ = word.write(AtomicU64::new(*value)));
            rest = behind;
            count + values.len()
        };
        let mut written = 0;
        for (at, words) in pieces {
            written += write(at - written, words);
        }
        write(len - written, &[]);
        pin.note_words(len as isize);
        self.put(owned.into_shared(&pin.guard), pin);
    }

    /// Retires the words.
    pub(super) fn release(&self, pin: &Pin) {
        self.put(Shared::null(), pin);
    }

    fn put(&self, new: Shared<'_, Words>, pin: &Pin) {
        let old = self.0.swap(new, AcqRel, &pin.guard);
        if !old.is_null() {
            // SAFETY: the swap took the only pointer to `old`. The value is kept, not looked at, until readers that
            // were pinned meanwhile have unpinned: by `Limbo`, or by the pin's own drop.
            let old = unsafe { old.into_owned() };
            pin.note_words(-(old.len() as isize));
            let mut words = pin.words.take().unwrap_or_default();
            words.push(old);
            pin.words.set(Some(words));
            pin.note_retired();
        }
    }

    /// Asks for some of the words without waiting for any; they need not exist.
    #[inline]
    pub(super) fn prefetch(&self, words: impl IntoIterator<Item = usize>, pin: &Pin) {
        /// The collector keeps a buffer's length before its words.
        const LENGTH: usize = size_of::<usize>();
        let start = self.0.load(Relaxed, &pin.guard).into_usize();
        for word in words {
            prefetch_address(start.wrapping_add(LENGTH + word * size_of::<AtomicU64>()));
        }
    }
}

impl Drop for PublishedWords {
    fn drop(&mut self) {
        let own = std::mem::replace(&mut self.0, Atomic::null());
        // SAFETY: as in `Published::drop`.
        drop(unsafe { own.try_into_owned() });
    }
}

impl std::fmt::Debug for PublishedWords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PublishedWords")
    }
}

/// Words before the hashes.
pub(super) const HEADER: usize = 2;

/// The hashes of a run: a growing array that readers see as plain memory, and words beside it. Word 0 counts
/// the settled ones, word 1 says how many fit, then they come, then words that are only ever seen as atomics.
#[derive(Default, Debug)]
pub(super) struct Blocks(PublishedWords);

impl Blocks {
    pub(super) fn load<'p>(&self, pin: &'p Pin) -> BlocksView<'p> {
        BlocksView { words: self.0.load(pin).unwrap_or(&[]) }
    }

    /// Asks for some of the buffer's words, which need not exist.
    #[inline]
    pub(super) fn prefetch(&self, words: impl IntoIterator<Item = usize>, pin: &Pin) {
        self.0.prefetch(words, pin);
    }

    /// Puts a new buffer for `hashes` hashes and `beside` other words in place and retires the old one.
    ///
    /// It starts with `settled` hashes, and with the words in `kept`, each piece at its distance from the first
    /// hash and in that order; all others are zero.
    pub(super) fn replace(
        &self,
        hashes: usize,
        beside: usize,
        settled: usize,
        kept: &[(usize, &[u64])],
        pin: &Pin,
    ) {
        let header = [settled.min(hashes) as u64, hashes as u64];
        let kept = kept.iter().map(|&(at, words)| (HEADER + at, words));
        let pieces = std::iter::once((0, &header[..])).chain(kept);
        self.0.replace(HEADER + hashes + beside, pieces, pin);
    }

    /// Retires the buffer.
    pub(super) fn release(&self, pin: &Pin) {
        self.0.release(pin);
    }
}

/// A buffer of [`Blocks`], for as long as the pin lasts.
#[derive(Clone, Copy)]
pub(super) struct BlocksView<'p> {
    words: &'p [AtomicU64],
}

impl<'p> BlocksView<'p> {
    /// Hashes that fit.
    pub(super) fn capacity(self) -> usize {
        self.words.get(1).map_or(0, |capacity| to_usize(capacity.load(Relaxed)))
    }

    /// Bytes of the buffer.
    pub(super) fn bytes(self) -> usize {
        size_of_val(self.words)
    }

    /// Hashes appended so far, whether or not they still belong to the run.
    pub(super) fn count(self) -> usize {
        self.words.first().map_or(0, |count| to_usize(count.load(Relaxed)))
    }

    /// The settled hashes: they never change in this buffer.
    pub(super) fn settled(self) -> &'p [u64] {
        let Some(count) = self.words.first() else { return &[] };
        let settled = to_usize(count.load(Acquire));
        let words = &self.words[HEADER..HEADER + settled];
        // SAFETY: `AtomicU64` has the layout of `u64`; words below the count are not written again, and the
        // acquire load ordered the writes that were (module docs).
        unsafe { &*(std::ptr::from_ref(words) as *const [u64]) }
    }

    /// Appends hashes, which must fit: the slice's bounds check says so otherwise.
    pub(super) fn append(self, hashes: &[u64], _writer: &mut SoleWriter) {
        let (count, capacity) = (self.count(), self.capacity());
        let room = &self.words[HEADER..HEADER + capacity];
        for (word, &hash) in room[count..count + hashes.len()].iter().zip(hashes) {
            word.store(hash, Relaxed);
        }
        self.words[0].store((count + hashes.len()) as u64, Release);
    }

    /// A word beside the hashes.
    pub(super) fn beside(self, at: usize) -> u64 {
        self.words[HEADER + self.capacity() + at].load(Relaxed)
    }

    /// Writes words beside the hashes.
    pub(super) fn set_beside(
        self,
        at: usize,
        values: impl IntoIterator<Item = u64>,
        _writer: &mut SoleWriter,
    ) {
        let words = &self.words[HEADER + self.capacity() + at..];
        words.iter().zip(values).for_each(|(word, value)| word.store(value, Relaxed));
    }

    /// The words beside the hashes, for as long as the writer writes nothing.
    pub(super) fn all_beside<'w>(self, _writer: &'w SoleWriter) -> &'w [u64]
    where
        'p: 'w,
    {
        let words = self.words.get(HEADER + self.capacity()..).unwrap_or(&[]);
        // SAFETY: these words are written by `set_beside` alone, which takes the index's only writer by `&mut`;
        // it is borrowed for as long as the slice lives, and `'p` keeps the buffer.
        unsafe { &*(std::ptr::from_ref(words) as *const [u64]) }
    }
}

/// Memory from which huge pages are asked for: two of them, so that small indexes stay small.
const HUGE: usize = 4 << 20;

/// An empty vector with this capacity, on huge pages if it is large and the system has them: one miss of the
/// translation buffer per 2 MiB instead of one per 4 KiB, which is a quarter of what filling a table costs.
pub(super) fn with_huge_capacity<T>(capacity: usize) -> Vec<T> {
    let memory = Vec::<T>::with_capacity(capacity);
    #[cfg(target_os = "linux")]
    if capacity * size_of::<T>() >= HUGE {
        // The system takes whole pages only; 4 KiB divides every page size in use.
        const PAGE: usize = 4096;
        let start = memory.as_ptr().addr().next_multiple_of(PAGE);
        let end = (memory.as_ptr().addr() + capacity * size_of::<T>()) / PAGE * PAGE;
        let inside = memory.as_ptr().with_addr(start).cast_mut().cast();
        // SAFETY: the range lies inside the allocation, and the advice changes no content. Where it is refused,
        // pages stay small.
        unsafe { libc::madvise(inside, end - start, libc::MADV_HUGEPAGE) };
    }
    memory
}

/// Counts are kept as words; they began as lengths.
#[allow(clippy::cast_possible_truncation)]
fn to_usize(count: u64) -> usize {
    count as usize
}

/// Asks for a line of memory ahead of its use.
#[inline]
pub(super) fn prefetch<T>(of: &T) {
    prefetch_address(std::ptr::from_ref(of).addr());
}

#[inline]
fn prefetch_address(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is allowed: it reads nothing that the program could see.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::without_provenance(address));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Local hashes as words.
pub(super) fn local_words(hashes: &[LocalBlockHash]) -> &[u64] {
    // SAFETY: `LocalBlockHash` is a transparent `u64`.
    unsafe { &*(std::ptr::from_ref(hashes) as *const [u64]) }
}

/// Sequence hashes as words.
pub(super) fn sequence_words(hashes: &[SequenceHash]) -> &[u64] {
    // SAFETY: `SequenceHash` is a transparent `u64`.
    unsafe { &*(std::ptr::from_ref(hashes) as *const [u64]) }
}

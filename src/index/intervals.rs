//! Ranks that hold a part of a run: two intervals in the run's header, more in a buffer.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use super::coverage::Interval;
use super::published::{Pin, PublishedWords};

/// Ranks of which a run's header and a spill's summary have a bit each, and the words that these take.
pub(super) const INLINE_RANKS: u32 = 256;
pub(super) const INLINE_WORDS: usize = 4;

/// Intervals in the header; more are spilled.
const INLINE: usize = 2;

/// Words of a spill before its intervals: which ranks have some, the lowest end of those from 0, whether these
/// two say it all, and how many intervals there are. With the length that the collector keeps, a line.
const SPILL_HEADER: usize = INLINE_WORDS + 3;
const FLOOR: usize = INLINE_WORDS;
const VAGUE: usize = INLINE_WORDS + 1;
const COUNT: usize = INLINE_WORDS + 2;

/// Intervals of all ranks, by rank. Guarded by the run's version; what changes them is the writer's.
#[derive(Default, Debug)]
#[repr(C)]
pub(super) struct Intervals {
    inline: [AtomicU64; INLINE],
    spill: PublishedWords,
}

impl Intervals {
    /// All of them, at this moment.
    #[inline]
    pub(super) fn load<'p>(&'p self, pin: &'p Pin) -> Partial<'p> {
        match self.spill.load(pin) {
            Some(spill) => {
                let words = &spill[SPILL_HEADER..];
                Partial { words: &words[..count_of(spill).min(words.len())], spill: Some(spill) }
            }
            None => {
                // No interval is packed as 0.
                let count = self.inline.iter().take_while(|word| word.load(Relaxed) != 0).count();
                Partial { words: &self.inline[..count], spill: None }
            }
        }
    }

    /// Whether no rank holds a part of the run.
    pub(super) fn is_empty(&self, pin: &Pin) -> bool {
        self.load(pin).words.is_empty()
    }

    /// Asks for those that the header has no room for.
    #[inline]
    pub(super) fn prefetch(&self, pin: &Pin) {
        /// Lines asked for; what lies behind them is a stream that hardware follows.
        const LINES: usize = 8;
        self.spill.prefetch((0..LINES).map(|line| line * 8), pin);
    }

    /// Replaces `count` intervals at `start`, all of them `rank`'s, by others of that rank.
    pub(super) fn splice(&self, start: usize, count: usize, with: &[Interval], rank: u32, pin: &Pin) {
        let partial = self.load(pin);
        let old = partial.words.len();
        let new = old - count + with.len();
        let mut spill = partial.spill;
        if new == 0 && spill.is_some() {
            // What spilled had no room here, so nothing is left over.
            return self.spill.release(pin);
        }
        if new > spill.map_or(INLINE, |spill| spill.len() - SPILL_HEADER) {
            self.spill_over(new + new / 2, pin);
            spill = self.spill.load(pin);
        }
        let words = spill.map_or(&self.inline[..], |spill| &spill[SPILL_HEADER..]);
        let tail = start + count..old;
        if with.len() > count {
            let by = with.len() - count;
            tail.rev().for_each(|at| words[at + by].store(words[at].load(Relaxed), Relaxed));
        } else if with.len() < count {
            let by = count - with.len();
            tail.for_each(|at| words[at - by].store(words[at].load(Relaxed), Relaxed));
        }
        for (word, interval) in words[start..].iter().zip(with) {
            word.store(packed(*interval), Relaxed);
        }
        let Some(spill) = spill else {
            return self.inline[new..].iter().for_each(|word| word.store(0, Relaxed));
        };
        spill[COUNT].store(new as u64, Relaxed);
        if spill.len() - SPILL_HEADER > 4 * new + 2 * INLINE {
            self.shrink(pin);
        } else {
            summarise(spill, rank, with, self.load(pin).of(rank).next().is_some());
        }
    }

    /// Puts in an interval of a rank that has none.
    pub(super) fn put_first(&self, held: Interval, pin: &Pin) {
        self.splice(self.load(pin).start_of(held.rank), 0, &[held], held.rank, pin);
    }

    /// Adds `from..to` to the end of the rank's only interval; `false`, and nothing done, if it has others or does
    /// not end there.
    pub(super) fn grow_end(&self, rank: u32, from: u32, to: u32, pin: &Pin) -> bool {
        self.move_end(rank, pin, |held, is_only| (held.to == from && is_only).then_some(to))
    }

    /// Takes `from..to` off the end of the rank's first interval; `false`, and nothing done, if that is not where
    /// it lies or all that there is.
    pub(super) fn cut_end(&self, rank: u32, from: u32, to: u32, pin: &Pin) -> bool {
        self.move_end(rank, pin, |held, _| (held.to == to && held.from < from && from < to).then_some(from))
    }

    /// Moves the end of the rank's first interval where `end` says, which is told whether it is the only one.
    fn move_end(&self, rank: u32, pin: &Pin, end: impl FnOnce(Interval, bool) -> Option<u32>) -> bool {
        let partial = self.load(pin);
        let start = partial.start_of(rank);
        let its = |at: usize| {
            let word = partial.words.get(at)?;
            Some((word, unpacked(word.load(Relaxed)))).filter(|(_, held)| held.rank == rank)
        };
        let Some((word, held)) = its(start) else { return false };
        let Some(to) = end(held, its(start + 1).is_none()) else { return false };
        let moved = Interval { to, ..held };
        word.store(packed(moved), Relaxed);
        if let Some(spill) = partial.spill {
            summarise(spill, rank, &[moved], true);
        }
        true
    }

    /// Churn must not leave behind the buffers of its peaks.
    fn shrink(&self, pin: &Pin) {
        let partial = self.load(pin);
        if partial.words.len() > INLINE {
            return self.spill_over(partial.words.len() * 2, pin);
        }
        for (at, inline) in self.inline.iter().enumerate() {
            inline.store(partial.words.get(at).map_or(0, |word| word.load(Relaxed)), Relaxed);
        }
        self.spill.release(pin);
    }

    fn spill_over(&self, room: usize, pin: &Pin) {
        let partial = self.load(pin);
        let mut header = [0; SPILL_HEADER];
        header[FLOOR] = u64::MAX;
        header[COUNT] = partial.words.len() as u64;
        let kept: SmallVec<[u64; 16]> = partial.words.iter().map(|word| word.load(Relaxed)).collect();
        self.spill.replace(SPILL_HEADER + room, [(0, &header[..]), (SPILL_HEADER, &kept[..])], pin);
        self.inline.iter().for_each(|word| word.store(0, Relaxed));
        let Some(spill) = self.spill.load(pin) else { return };
        self.load(pin).iter().for_each(|held| summarise(spill, held.rank, &[held], true));
    }

    /// Live bytes of the buffer.
    pub(super) fn bytes(&self, pin: &Pin) -> usize {
        self.spill.load(pin).map_or(0, size_of_val)
    }
}

// A count that was a length.
#[allow(clippy::cast_possible_truncation)]
fn count_of(spill: &[AtomicU64]) -> usize {
    spill[COUNT].load(Relaxed) as usize
}

/// Intervals of a run at one moment, by rank.
#[derive(Clone, Copy)]
pub(super) struct Partial<'p> {
    words: &'p [AtomicU64],
    spill: Option<&'p [AtomicU64]>,
}

impl<'p> Partial<'p> {
    pub(super) fn iter(self) -> impl Iterator<Item = Interval> + 'p {
        self.words.iter().map(|word| unpacked(word.load(Relaxed)))
    }

    /// The rank's intervals, in order.
    pub(super) fn of(self, rank: u32) -> impl Iterator<Item = Interval> + 'p {
        let start = self.start_of(rank);
        self.words
            .get(start..)
            .unwrap_or(&[])
            .iter()
            .map(|word| unpacked(word.load(Relaxed)))
            .take_while(move |held| held.rank == rank)
    }

    fn start_of(self, rank: u32) -> usize {
        let from = packed(Interval { rank, from: 0, to: 0 });
        if self.words.len() <= 2 * INLINE {
            return self.words.iter().take_while(|word| word.load(Relaxed) < from).count();
        }
        self.words.partition_point(|word| word.load(Relaxed) < from)
    }

    /// Where the rank's intervals begin, and they.
    pub(super) fn range_of(self, rank: u32) -> (usize, SmallVec<[Interval; 4]>) {
        (self.start_of(rank), self.of(rank).collect())
    }

    /// How far ranks get from the run's first block on, asked by words of a set of ranks in ascending order.
    #[inline]
    pub(super) fn reaches(self) -> Reaches<'p> {
        Reaches { rest: self.words, spill: self.spill }
    }
}

/// [`Partial::reaches`].
pub(super) struct Reaches<'p> {
    rest: &'p [AtomicU64],
    spill: Option<&'p [AtomicU64]>,
}

/// Of the ranks that were asked for, those that hold a run's beginning but not all of it, as a word of a set.
#[derive(Clone, Copy, Default)]
pub(super) struct Reached {
    /// They hold all that was asked for.
    pub(super) through: u64,
    /// They hold less.
    pub(super) ended: u64,
}

impl Reaches<'_> {
    /// Of the ranks `64 * nth..` in `wanted`, those that hold the run's first `len` blocks and those that hold
    /// some of them; how many the latter hold is written to `ends`, where they lie in the word.
    #[inline]
    pub(super) fn of_word(&mut self, nth: usize, wanted: u64, len: u32, ends: &mut [u32; 64]) -> Reached {
        if self.rest.is_empty() {
            return Reached::default();
        }
        let mut wanted = wanted;
        if let Some(spill) = self.spill {
            wanted &= spill[nth % INLINE_WORDS].load(Relaxed);
            // All intervals begin at 0 and reach that far, and the word names their ranks exactly.
            if spill[VAGUE].load(Relaxed) == 0 && spill[FLOOR].load(Relaxed) >= u64::from(len) {
                return Reached { through: wanted, ended: 0 };
            }
        }
        let mut reached = Reached::default();
        let mut seen = 0;
        for word in self.rest {
            let Interval { rank, from, to } = unpacked(word.load(Relaxed));
            // By rank, and the words before this one are done with.
            if (rank / 64) as usize > nth {
                break;
            }
            seen += 1;
            if from > 0 {
                continue;
            }
            // No branch: half of all ranks end here and half do not, in no order.
            let bit = 1 << (rank % 64) & wanted;
            let through = if to >= len { bit } else { 0 };
            reached.through |= through;
            reached.ended |= bit ^ through;
            ends[(rank % 64) as usize] = to;
        }
        self.rest = &self.rest[seen..];
        // Of a run that is being changed a rank may be seen twice; it must not be answered twice.
        reached.ended &= !reached.through;
        reached
    }
}

/// Keeps a spill's summary true after a rank's intervals changed. What is lost in precision (a floor that
/// could rise, a hole that was filled) comes back with the next spill.
fn summarise(spill: &[AtomicU64], rank: u32, with: &[Interval], any_left: bool) {
    let word = &spill[(rank / 64) as usize % INLINE_WORDS];
    let bit = 1 << (rank % 64);
    let vague = rank >= INLINE_RANKS || with.iter().any(|held| held.from > 0);
    if vague {
        spill[VAGUE].store(1, Relaxed);
    }
    if any_left {
        word.store(word.load(Relaxed) | bit, Relaxed);
    } else if spill[VAGUE].load(Relaxed) == 0 {
        word.store(word.load(Relaxed) & !bit, Relaxed);
    }
    for held in with.iter().filter(|held| held.from == 0) {
        spill[FLOOR].store(spill[FLOOR].load(Relaxed).min(u64::from(held.to)), Relaxed);
    }
}

/// Rank, beginning and end of an interval in one word; ordered as they are. 20 bits hold a million ranks, 22
/// a run of any length. Never 0, since no interval is empty.
fn packed(held: Interval) -> u64 {
    debug_assert!(held.rank < 1 << 20 && held.to < 1 << 22);
    u64::from(held.rank) << 44 | u64::from(held.from) << 22 | u64::from(held.to)
}

// The masks leave what fits.
#[allow(clippy::cast_possible_truncation)]
fn unpacked(word: u64) -> Interval {
    let part = |shift: u32| (word >> shift & 0x3f_ffff) as u32;
    Interval { rank: (word >> 44) as u32, from: part(22), to: part(0) }
}

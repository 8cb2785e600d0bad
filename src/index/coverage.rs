//! Which ranks hold which part of a run.

use smallvec::SmallVec;

/// A set of rank indices.
///
/// Two words inline hold 128 ranks; a pool with more spills to the heap. Trailing zero words are dropped, so
/// that equal sets are equal values.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) struct RankSet {
    words: SmallVec<[u64; 2]>,
}

impl RankSet {
    pub(super) fn insert(&mut self, rank: u32) {
        let (word, bit) = position(rank);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= bit;
    }

    pub(super) fn remove(&mut self, rank: u32) -> bool {
        let (word, bit) = position(rank);
        let Some(bits) = self.words.get_mut(word) else { return false };
        let had = *bits & bit != 0;
        *bits &= !bit;
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        had
    }

    pub(super) fn contains(&self, rank: u32) -> bool {
        let (word, bit) = position(rank);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    pub(super) fn is_only(&self, rank: u32) -> bool {
        self.contains(rank) && self.words.iter().map(|bits| bits.count_ones()).sum::<u32>() == 1
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().zip(0_u32..).flat_map(|(&bits, word)| bits_of(bits).map(move |bit| word * 64 + bit))
    }
}

fn position(rank: u32) -> (usize, u64) {
    ((rank / 64) as usize, 1 << (rank % 64))
}

/// The numbers of the bits that are set.
pub(super) fn bits_of(mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        (bits != 0).then(|| {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            bit
        })
    })
}

/// A rank's hold on part of a run: blocks `from..to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Interval {
    pub(super) rank: u32,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// Who holds a run: ranks that hold all of it, and intervals of those that hold part.
///
/// An interval that does not begin at 0 is held behind a hole: it counts once the hole is filled. A rank is
/// in `full` or has intervals, never both; its intervals are disjoint, not adjacent, and sorted. The run's
/// length is the caller's, and passed in.
#[derive(Clone, Default, Debug)]
pub(super) struct Coverage {
    pub(super) full: RankSet,
    partial: Vec<Interval>,
}

impl Coverage {
    pub(super) fn is_empty(&self) -> bool {
        self.full.is_empty() && self.partial.is_empty()
    }

    pub(super) fn contains(&self, rank: u32, offset: u32) -> bool {
        self.full.contains(rank) || self.of(rank).iter().any(|held| held.from <= offset && offset < held.to)
    }

    pub(super) fn contains_any(&self, rank: u32) -> bool {
        self.full.contains(rank) || !self.of(rank).is_empty()
    }

    /// The rank's intervals, in order; empty for a rank that holds all or nothing.
    pub(super) fn of(&self, rank: u32) -> &[Interval] {
        if self.partial.is_empty() {
            return &[];
        }
        let start = self.partial.partition_point(|held| held.rank < rank);
        let len = self.partial[start..].iter().take_while(|held| held.rank == rank).count();
        &self.partial[start..start + len]
    }

    /// How many of the blocks `from..to` the rank does not hold, counted until the first that it does.
    pub(super) fn not_held(&self, rank: u32, from: u32, to: u32) -> u32 {
        if self.full.contains(rank) { 0 } else { not_in(self.of(rank).iter().copied(), from, to) }
    }

    /// The blocks of a run of `len` that the rank holds without a hole around `offset`, if it holds that one.
    pub(super) fn held_around(&self, rank: u32, offset: u32, len: u32) -> Option<(u32, u32)> {
        if self.full.contains(rank) { Some((0, len)) } else { around(self.of(rank).iter().copied(), offset) }
    }

    /// What each rank holds of a run of `len` blocks.
    pub(super) fn holders(&self, len: u32) -> Vec<Interval> {
        let whole = self.full.iter().map(|rank| Interval { rank, from: 0, to: len });
        whole.chain(self.partial.iter().copied()).collect()
    }

    /// Adds `from..to` of a run of `len` blocks; returns how many blocks are new to the rank.
    pub(super) fn add(&mut self, rank: u32, from: u32, to: u32, len: u32) -> u32 {
        if self.full.contains(rank) || from >= to {
            return 0;
        }
        let start = self.partial.partition_point(|held| held.rank < rank);
        let held = self.of(rank);
        let Melted { first, touching, whole: Interval { from, to, .. }, new } = melt(held, rank, from, to);
        if from == 0 && to == len {
            let count = held.len();
            self.partial.drain(start..start + count);
            self.full.insert(rank);
            return new;
        }
        let at = start + first;
        self.partial.splice(at..at + touching, [Interval { rank, from, to }]);
        new
    }

    /// Takes `from..to` away; returns how many blocks the rank had of it.
    pub(super) fn remove(&mut self, rank: u32, from: u32, to: u32, len: u32) -> u32 {
        if self.full.remove(rank) {
            let start = self.partial.partition_point(|held| held.rank < rank);
            let left = [Interval { rank, from: 0, to: from }, Interval { rank, from: to, to: len }];
            self.partial.splice(start..start, left.into_iter().filter(|held| held.from < held.to));
            return to - from;
        }
        let start = self.partial.partition_point(|held| held.rank < rank);
        let count = self.of(rank).len();
        let (left, gone) = without(&self.partial[start..start + count], from, to);
        self.partial.splice(start..start + count, left);
        self.release_spare();
        gone
    }

    /// Forgets the rank; returns how many blocks it had.
    pub(super) fn remove_rank(&mut self, rank: u32, len: u32) -> u32 {
        if self.full.remove(rank) {
            return len;
        }
        let start = self.partial.partition_point(|held| held.rank < rank);
        let count = self.of(rank).len();
        let gone = self.partial.drain(start..start + count).map(|held| held.to - held.from).sum();
        self.release_spare();
        gone
    }

    /// The run grew from `old` to `new` blocks, all of the new ones held by `by` alone (if by anyone).
    pub(super) fn grow(&mut self, old: u32, new: u32, by: Option<u32>) {
        let held = by.is_some_and(|rank| self.full.contains(rank));
        if held && self.full.is_only(by.unwrap_or_default()) {
            return;
        }
        for rank in std::mem::take(&mut self.full).iter() {
            if held && by == Some(rank) {
                self.full.insert(rank);
            } else {
                let start = self.partial.partition_point(|held| held.rank < rank);
                self.partial.insert(start, Interval { rank, from: 0, to: old });
            }
        }
        debug_assert!(old < new);
    }

    /// The run was cut to `len` blocks, beyond which nobody held anything.
    pub(super) fn shrink(&mut self, len: u32) {
        let full = &mut self.full;
        self.partial.retain(|held| {
            let whole = held.from == 0 && held.to == len;
            if whole {
                full.insert(held.rank);
            }
            !whole
        });
        self.release_spare();
    }

    /// One past the last block that anyone holds.
    pub(super) fn reach(&self, len: u32) -> u32 {
        if !self.full.is_empty() {
            return len;
        }
        self.partial.iter().map(|held| held.to).max().unwrap_or_default()
    }

    /// Churn must not leave behind the buffers of its peaks.
    fn release_spare(&mut self) {
        if self.partial.is_empty() && self.partial.capacity() > 0 {
            self.partial = Vec::new();
        }
    }
}

/// What becomes of a rank's intervals when `from..to` is added to them.
pub(super) struct Melted {
    /// The first that touches the new interval, and how many do: they melt into one.
    pub(super) first: usize,
    pub(super) touching: usize,
    pub(super) whole: Interval,
    /// Blocks that the rank did not hold before.
    pub(super) new: u32,
}

/// Adds `from..to` to one rank's intervals.
pub(super) fn melt(held: &[Interval], rank: u32, from: u32, to: u32) -> Melted {
    let first = held.iter().take_while(|held| held.to < from).count();
    let touching = held[first..].iter().take_while(|held| held.from <= to).count();
    let melted = &held[first..first + touching];
    let from = melted.first().map_or(from, |held| held.from.min(from));
    let to = melted.last().map_or(to, |held| held.to.max(to));
    let before: u32 = melted.iter().map(|held| held.to - held.from).sum();
    Melted { first, touching, whole: Interval { rank, from, to }, new: to - from - before }
}

/// What is left of one rank's intervals without `from..to`, and how many blocks went.
pub(super) fn without(held: &[Interval], from: u32, to: u32) -> (SmallVec<[Interval; 4]>, u32) {
    let mut gone = 0;
    let mut left = SmallVec::new();
    for held in held {
        let (cut_from, cut_to) = (held.from.max(from), held.to.min(to));
        if cut_from >= cut_to {
            left.push(*held);
            continue;
        }
        gone += cut_to - cut_from;
        let around = [Interval { to: cut_from, ..*held }, Interval { from: cut_to, ..*held }];
        left.extend(around.into_iter().filter(|held| held.from < held.to));
    }
    (left, gone)
}

/// How many of `from..to` lie before the first of one rank's intervals that reaches into it.
pub(super) fn not_in(mut held: impl Iterator<Item = Interval>, from: u32, to: u32) -> u32 {
    held.find(|held| held.to > from).map_or(to, |held| held.from.clamp(from, to)) - from
}

/// The one of a rank's intervals that `offset` lies in.
pub(super) fn around(mut held: impl Iterator<Item = Interval>, offset: u32) -> Option<(u32, u32)> {
    held.find(|held| held.from <= offset && offset < held.to).map(|held| (held.from, held.to))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sets_are_equal_when_their_members_are() {
        let mut set = RankSet::default();
        set.insert(300);
        assert!(set.remove(300) && !set.remove(300));
        assert_eq!(set, RankSet::default());
        set.insert(3);
        set.insert(200);
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 200]);
    }

    proptest! {
        /// I1, I7: intervals of several ranks under adds, removals and growth equal literal sets of blocks.
        #[test]
        fn intervals_equal_literal_sets(
            steps in prop::collection::vec((0_u8..4, 0_u32..3, 0_u32..12, 0_u32..12), 1..60)
        ) {
            let mut len = 12_u32;
            let mut coverage = Coverage::default();
            let mut literal: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); 3];
            for (kind, rank, a, b) in steps {
                let (from, to) = (a.min(b), a.max(b) + 1);
                let held = &mut literal[rank as usize];
                match kind {
                    0 | 1 => {
                        let before = held.len();
                        held.extend(from..to);
                        prop_assert_eq!(coverage.add(rank, from, to, len) as usize, held.len() - before);
                    }
                    2 => {
                        let before = held.len();
                        held.retain(|block| !(from..to).contains(block));
                        prop_assert_eq!(coverage.remove(rank, from, to, len) as usize, before - held.len());
                    }
                    _ => {
                        let all = held.len() == len as usize;
                        if all {
                            held.insert(len);
                        }
                        coverage.grow(len, len + 1, all.then_some(rank));
                        len += 1;
                    }
                }
                for (rank, held) in (0_u32..).zip(&literal) {
                    for block in 0..len {
                        prop_assert_eq!(coverage.contains(rank, block), held.contains(&block));
                    }
                    prop_assert_eq!(coverage.full.contains(rank), held.len() == len as usize);
                }
                let reach = literal.iter().filter_map(|held| held.last()).max().map_or(0, |last| last + 1);
                prop_assert_eq!(coverage.reach(len), reach);
            }
        }
    }
}

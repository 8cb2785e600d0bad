//! The answer of a query: a word for each rank that holds device blocks alone, which are nearly all, and a
//! record for each of the others. At 256 ranks that is 2 KiB a query instead of 6.

use std::sync::Arc;

use super::RankOverlap;
use super::coverage::bits_of;
use super::roster::Ranks;
use crate::ids::RankSlot;

/// Ranks and how far their blocks reach.
#[derive(Default, Debug)]
pub(super) struct Answer {
    /// The roster's, of the last query that found anything.
    generations: Arc<[u32]>,
    /// Reach and index; the first `count` are the answer.
    plain: Vec<u64>,
    count: usize,
    layered: Vec<RankOverlap>,
}

impl Answer {
    pub(super) fn clear(&mut self) {
        self.count = 0;
        self.layered.clear();
    }

    /// Makes room for all ranks of the roster, each of which may be put in once.
    pub(super) fn make_room(&mut self, ranks: &Ranks) {
        if !Arc::ptr_eq(&self.generations, ranks.generations()) {
            self.generations = Arc::clone(ranks.generations());
            self.plain.resize(self.generations.len(), 0);
        }
    }

    /// Puts in ranks of a word of a set, all with this reach.
    #[inline]
    pub(super) fn put_all(&mut self, base: u32, ranks: u64, reach: u32) {
        bits_of(ranks).for_each(|bit| self.put(base + bit, reach));
    }

    /// Puts in ranks of a word of a set that reach further than `start`, each for itself.
    #[inline]
    pub(super) fn put_ends(&mut self, base: u32, ranks: u64, start: u32, ends: &[u32; 64]) {
        bits_of(ranks).for_each(|bit| self.put(base + bit, start + ends[(bit % 64) as usize]));
    }

    #[inline]
    fn put(&mut self, index: u32, reach: u32) {
        self.plain[self.count] = u64::from(reach) << 32 | u64::from(index);
        self.count += 1;
    }

    pub(super) fn put_layered(&mut self, overlap: RankOverlap) {
        self.layered.push(overlap);
    }

    // A word is a reach and an index.
    #[allow(clippy::cast_possible_truncation)]
    fn unpacked(&self, word: u64) -> RankOverlap {
        let (index, device) = (word as u32, (word >> 32) as u32);
        let generation = self.generations.get(index as usize).copied().unwrap_or_default();
        let slot = RankSlot { index, generation };
        RankOverlap { slot, device, host: device, disk: device, left_out: false }
    }
}

/// The ranks that hold a prefix of a prompt on any tier, in no particular order.
#[derive(Clone, Copy, Debug)]
pub struct RankOverlaps<'s> {
    pub(super) answer: &'s Answer,
}

impl<'s> RankOverlaps<'s> {
    /// How many ranks these are.
    pub fn len(self) -> usize {
        self.answer.count + self.answer.layered.len()
    }

    /// Whether no rank holds any of it.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// One after the other.
    pub fn iter(self) -> impl Iterator<Item = RankOverlap> + 's {
        let answer = self.answer;
        let plain = answer.plain[..answer.count].iter().map(|word| answer.unpacked(*word));
        plain.chain(answer.layered.iter().copied())
    }
}

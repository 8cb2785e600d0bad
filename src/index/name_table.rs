//! The hash table that leads from names to places: the writer's alone, so it is plain memory.
//!
//! A line of memory holds nine entries of six bytes, a byte of each one's hash, and the number of entries that
//! found it full and went on to the next. One comparison of eight bytes at once says which entries to look at.
//! Keys are not kept: an entry leads to its key.

use super::published::{prefetch, with_huge_capacity};

/// Entries of one line.
const SLOTS: usize = 9;

/// Bits of a payload; two more bits of the hash stand above them.
const PAYLOAD: u32 = 46;
const MASK: u64 = (1 << PAYLOAD) - 1;

#[derive(Clone, Default, Debug)]
#[repr(C, align(64))]
struct Line {
    /// A byte of each hash, never 0; 0 where there is no entry. The first eight, then the ninth.
    tags: u64,
    last_tag: u8,
    /// Entries whose search passes this line. What reaches 255 stays there until the table is made anew.
    passed: u8,
    /// The upper 16 bits of each entry, then the lower 32.
    high: [u16; SLOTS],
    low: [u32; SLOTS],
}

impl Line {
    /// A bit for each slot that has this tag.
    #[inline]
    fn hits(&self, tag: u8) -> u32 {
        const ONES: u64 = 0x0101_0101_0101_0101;
        /// Brings the lowest bit of each byte together in the highest byte.
        const GATHER: u64 = 0x0102_0408_1020_4080;
        const LOW: u64 = 0x7f * ONES;
        let differing = self.tags ^ (u64::from(tag) * ONES);
        // The highest bit of each byte that is 0: no carry leaves its byte.
        let equal = !(((differing & LOW) + LOW) | differing | LOW);
        // The highest byte of the product.
        #[allow(clippy::cast_possible_truncation)]
        let first = ((equal >> 7).wrapping_mul(GATHER) >> 56) as u32;
        first | u32::from(self.last_tag == tag) << 8
    }

    #[inline]
    fn entry(&self, slot: usize) -> u64 {
        u64::from(self.high[slot]) << 32 | u64::from(self.low[slot])
    }

    // Each half takes its part.
    #[allow(clippy::cast_possible_truncation)]
    #[inline]
    fn put(&mut self, slot: usize, tag: u8, entry: u64) {
        self.high[slot] = (entry >> 32) as u16;
        self.low[slot] = entry as u32;
        self.set_tag(slot, tag);
    }

    #[inline]
    fn set_tag(&mut self, slot: usize, tag: u8) {
        if slot == SLOTS - 1 {
            self.last_tag = tag;
        } else {
            self.tags = self.tags & !(0xff << (slot * 8)) | u64::from(tag) << (slot * 8);
        }
    }

    /// A slot without an entry.
    #[inline]
    fn free(&self) -> Option<usize> {
        let free = self.hits(0);
        (free != 0).then_some(free.trailing_zeros() as usize)
    }
}

/// A table of payloads of 46 bits.
#[derive(Default, Debug)]
pub(super) struct NameTable {
    lines: Box<[Line]>,
}

impl NameTable {
    /// An empty table with room for this many entries.
    pub(super) fn with_room_for(entries: usize) -> Self {
        // 7 of 10 slots in use: one line in ten is passed by an entry that found it full.
        let lines = (entries * 10).div_ceil(SLOTS * 7).max(1);
        let mut memory = with_huge_capacity(lines);
        memory.resize(lines, Line::default());
        Self { lines: memory.into_boxed_slice() }
    }

    /// Entries that fit without long searches.
    pub(super) fn room(&self) -> usize {
        self.lines.len() * SLOTS * 7 / 10
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// The payload with this hash that leads to the key.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut leads_to_key: impl FnMut(u64) -> bool) -> Option<u64> {
        self.search(hash, |payload, _, _| leads_to_key(payload)).map(|(payload, ..)| payload)
    }

    /// The payload, and where it is, for which `is_it` says so.
    #[inline]
    fn search(
        &self,
        hash: u64,
        mut is_it: impl FnMut(u64, usize, usize) -> bool,
    ) -> Option<(u64, usize, usize)> {
        let (tag, marked) = (tag(hash), entry(hash, 0));
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            let mut hits = line.hits(tag);
            while hits != 0 {
                let slot = hits.trailing_zeros() as usize;
                hits &= hits - 1;
                let payload = line.entry(slot) ^ marked;
                if payload <= MASK && is_it(payload, at, slot) {
                    return Some((payload, at, slot));
                }
            }
            if line.passed == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Puts an entry in; the caller keeps the number of entries below [`Self::room`].
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, payload: u64) {
        debug_assert!(payload <= MASK);
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let after = self.after(at);
            let line = &mut self.lines[at];
            if let Some(slot) = line.free() {
                line.put(slot, tag(hash), entry(hash, payload));
                return;
            }
            line.passed = line.passed.saturating_add(1);
            at = after;
        }
        debug_assert!(false, "the table is full");
    }

    /// Puts an entry in unless one with this hash leads to its key; `false` if there is one. As
    /// [`Self::insert`].
    #[inline]
    pub(super) fn insert_new(
        &mut self,
        hash: u64,
        payload: u64,
        leads_to_key: impl FnMut(u64) -> bool,
    ) -> bool {
        let new = self.find(hash, leads_to_key).is_none();
        if new {
            self.insert(hash, payload);
        }
        new
    }

    /// Takes an entry out; `false` if it is not there.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, payload: u64) -> bool {
        let Some((_, at, slot)) = self.search(hash, |of, _, _| of == payload) else { return false };
        self.lines[at].set_tag(slot, 0);
        let mut passed = self.home(hash);
        while passed != at {
            let count = &mut self.lines[passed].passed;
            // How many a full count stands for is not known.
            *count -= u8::from(*count < u8::MAX);
            passed = self.after(passed);
        }
        true
    }

    /// A payload that a search for this hash may find, from the line where it begins.
    #[inline]
    pub(super) fn guess(&self, hash: u64) -> Option<u64> {
        let line = self.lines.get(self.home(hash))?;
        let hits = line.hits(tag(hash));
        let payload = line.entry(hits.trailing_zeros() as usize % SLOTS) ^ entry(hash, 0);
        (hits != 0 && payload <= MASK).then_some(payload)
    }

    /// Asks for the line where a search for this hash begins.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        if let Some(line) = self.lines.get(self.home(hash)) {
            prefetch(line);
        }
    }

    /// The high bits choose the line, the low ones are kept.
    // The product of a 64-bit fraction and a length is below that length.
    #[allow(clippy::cast_possible_truncation)]
    #[inline]
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.lines.len() as u128) >> 64) as usize
    }

    #[inline]
    fn after(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() { 0 } else { at + 1 }
    }
}

/// The byte of a hash that a line keeps.
#[inline]
fn tag(hash: u64) -> u8 {
    hash.to_le_bytes()[0].max(1)
}

/// A payload below two further bits of its hash.
#[inline]
fn entry(hash: u64, payload: u64) -> u64 {
    (hash >> 8 & 3) << PAYLOAD | payload
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// I7, I8: a table with few lines and colliding hashes equals a map, and comes back to empty.
        #[test]
        fn a_table_equals_a_map(steps in prop::collection::vec((any::<bool>(), 0_u64..60), 1..300)) {
            let mut table = NameTable::with_room_for(60);
            let hash = |key: u64| (key % 7) << 61 | key;
            let mut map = HashMap::new();
            for (insert, key) in steps {
                if insert {
                    let new = table.insert_new(hash(key), key << 40, |payload| payload == key << 40);
                    prop_assert_eq!(new, map.insert(key, key << 40).is_none());
                } else {
                    prop_assert_eq!(table.remove(hash(key), key << 40), map.remove(&key).is_some());
                }
                for key in 0..60 {
                    let found = table.find(hash(key), |payload| payload == key << 40);
                    prop_assert_eq!(found, map.get(&key).copied());
                }
            }
            for (key, payload) in map {
                prop_assert!(table.remove(hash(key), payload));
            }
            prop_assert!(table.lines.iter().all(|line| line.passed == 0 && line.tags == 0 && line.last_tag == 0));
        }
    }

    /// I7: a line passed by more entries than it can count still leads to all of them.
    #[test]
    fn a_count_that_is_full_stays_full() {
        let mut table = NameTable::with_room_for(2_000);
        let hash = |key: u64| key << 8 & 0xff00 | key << 20;
        (0..600).for_each(|key| table.insert(hash(key), key));
        assert!((0..600).all(|key| table.find(hash(key), |payload| payload == key) == Some(key)));
        assert!((0..599).all(|key| table.remove(hash(key), key)));
        assert_eq!(table.find(hash(599), |payload| payload == 599), Some(599));
    }
}

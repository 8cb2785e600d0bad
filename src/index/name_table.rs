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
    /// The highest bit of each byte of the first eight tags that is this one.
    #[inline(always)]
    fn equal(&self, tag: u8) -> u64 {
        const ONES: u64 = 0x0101_0101_0101_0101;
        const LOW: u64 = 0x7f * ONES;
        let differing = self.tags ^ (u64::from(tag) * ONES);
        // No carry leaves its byte.
        !(((differing & LOW) + LOW) | differing | LOW)
    }

    /// The slot with this tag for which `is_it` says so of the payload.
    #[inline(always)]
    fn search(&self, hash: u64, mut is_it: impl FnMut(u64) -> bool) -> Option<(usize, u64)> {
        let (tag, marked) = (tag(hash), entry(hash, 0));
        let mut try_slot = |slot: usize| {
            let payload = self.entry(slot) ^ marked;
            (payload <= MASK && is_it(payload)).then_some((slot, payload))
        };
        let mut equal = self.equal(tag);
        while equal != 0 {
            let found = try_slot(equal.trailing_zeros() as usize / 8);
            if found.is_some() {
                return found;
            }
            equal &= equal - 1;
        }
        if self.last_tag == tag { try_slot(SLOTS - 1) } else { None }
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

    /// Puts an entry in, if there is a slot for it.
    #[inline(always)]
    fn try_put(&mut self, hash: u64, payload: u64) -> bool {
        let free = self.equal(0);
        if free != 0 {
            self.put(free.trailing_zeros() as usize / 8, tag(hash), entry(hash, payload));
            return true;
        }
        let is_free = self.last_tag == 0;
        if is_free {
            self.put(SLOTS - 1, tag(hash), entry(hash, payload));
        }
        is_free
    }
}

/// Where in a table the search for a hash begins. Of that table alone, as long as it is not made anew.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Spot {
    hash: u64,
    home: usize,
}

/// A table of payloads of 46 bits.
#[derive(Default, Debug)]
pub(super) struct NameTable {
    lines: Box<[Line]>,
}

impl NameTable {
    /// An empty table with room for this many entries.
    pub(super) fn with_room_for(entries: usize) -> Self {
        // 6 of 10 slots in use: one line in twenty is passed by an entry that found it full. At 7 it is one in ten,
        // and each is a miss more.
        let lines = (entries * 10).div_ceil(SLOTS * 6).max(1);
        let mut memory = with_huge_capacity(lines);
        memory.resize(lines, Line::default());
        Self { lines: memory.into_boxed_slice() }
    }

    /// Entries that fit without long searches.
    pub(super) fn room(&self) -> usize {
        self.lines.len() * SLOTS * 6 / 10
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Where the search for a hash begins: the high bits choose the line, the low ones are kept there.
    // The product of a 64-bit fraction and a length is below that length.
    #[allow(clippy::cast_possible_truncation)]
    #[inline]
    pub(super) fn spot(&self, hash: u64) -> Spot {
        Spot { hash, home: ((u128::from(hash) * self.lines.len() as u128) >> 64) as usize }
    }

    /// The same, asking for its memory.
    #[inline]
    pub(super) fn ask(&self, hash: u64) -> Spot {
        let spot = self.spot(hash);
        if let Some(line) = self.lines.get(spot.home) {
            prefetch(line);
        }
        spot
    }

    /// Asks for the line behind that one, if a search goes on there. Waits for the first.
    #[inline]
    pub(super) fn ask_behind(&self, spot: Spot) {
        if self.lines.get(spot.home).is_some_and(|line| line.passed > 0) {
            prefetch(&self.lines[self.after(spot.home)]);
        }
    }

    /// The payload with this hash that leads to the key.
    #[inline]
    pub(super) fn find(&self, spot: Spot, mut leads_to_key: impl FnMut(u64) -> bool) -> Option<u64> {
        let line = self.lines.get(spot.home)?;
        match line.search(spot.hash, &mut leads_to_key) {
            Some((_, payload)) => Some(payload),
            None if line.passed == 0 => None,
            None => self.search_behind(spot, leads_to_key).map(|(_, _, payload)| payload),
        }
    }

    /// Goes on behind a line that entries passed; where, and what was found there.
    #[cold]
    fn search_behind(&self, spot: Spot, mut is_it: impl FnMut(u64) -> bool) -> Option<(usize, usize, u64)> {
        let mut at = spot.home;
        for _ in 1..self.lines.len() {
            at = self.after(at);
            let line = &self.lines[at];
            if let Some((slot, payload)) = line.search(spot.hash, &mut is_it) {
                return Some((at, slot, payload));
            }
            if line.passed == 0 {
                return None;
            }
        }
        None
    }

    /// Puts an entry in; the caller keeps the number of entries below [`Self::room`].
    #[inline]
    pub(super) fn insert(&mut self, spot: Spot, payload: u64) {
        debug_assert!(payload <= MASK);
        if !self.lines[spot.home].try_put(spot.hash, payload) {
            self.insert_behind(spot, payload);
        }
    }

    #[cold]
    fn insert_behind(&mut self, spot: Spot, payload: u64) {
        let mut at = spot.home;
        for _ in 1..self.lines.len() {
            let full = &mut self.lines[at].passed;
            *full = full.saturating_add(1);
            at = self.after(at);
            if self.lines[at].try_put(spot.hash, payload) {
                return;
            }
        }
        debug_assert!(false, "the table is full");
    }

    /// Puts an entry in unless one with this hash leads to its key; `false` if there is one. As
    /// [`Self::insert`].
    #[inline(always)]
    pub(super) fn insert_new(
        &mut self,
        spot: Spot,
        payload: u64,
        mut leads_to_key: impl FnMut(u64) -> bool,
    ) -> bool {
        let line = &mut self.lines[spot.home];
        if line.search(spot.hash, &mut leads_to_key).is_some()
            || line.passed > 0 && self.search_behind(spot, leads_to_key).is_some()
        {
            return false;
        }
        self.insert(spot, payload);
        true
    }

    /// Takes an entry out; `false` if it is not there.
    #[inline]
    pub(super) fn remove(&mut self, spot: Spot, payload: u64) -> bool {
        let Some(line) = self.lines.get_mut(spot.home) else { return false };
        if let Some((slot, _)) = line.search(spot.hash, |of| of == payload) {
            line.set_tag(slot, 0);
            return true;
        }
        line.passed > 0 && self.remove_behind(spot, payload)
    }

    #[cold]
    fn remove_behind(&mut self, spot: Spot, payload: u64) -> bool {
        let found = self.search_behind(spot, |of| of == payload);
        let Some((until, slot, _)) = found else { return false };
        self.lines[until].set_tag(slot, 0);
        let mut at = spot.home;
        while at != until {
            let passed = &mut self.lines[at].passed;
            // How many a full count stands for is not known.
            *passed -= u8::from(*passed < u8::MAX);
            at = self.after(at);
        }
        true
    }

    /// A payload that a search may find, from the line where it begins.
    #[inline]
    pub(super) fn guess(&self, spot: Spot) -> Option<u64> {
        let line = self.lines.get(spot.home)?;
        line.search(spot.hash, |_| true).map(|(_, payload)| payload)
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
                    let new = table.insert_new(table.spot(hash(key)), key << 40, |payload| payload == key << 40);
                    prop_assert_eq!(new, map.insert(key, key << 40).is_none());
                } else {
                    prop_assert_eq!(table.remove(table.spot(hash(key)), key << 40), map.remove(&key).is_some());
                }
                for key in 0..60 {
                    let found = table.find(table.spot(hash(key)), |payload| payload == key << 40);
                    prop_assert_eq!(found, map.get(&key).copied());
                }
            }
            for (key, payload) in map {
                prop_assert!(table.remove(table.spot(hash(key)), payload));
            }
            prop_assert!(table.lines.iter().all(|line| line.passed == 0 && line.tags == 0 && line.last_tag == 0));
        }
    }

    /// I7: a line passed by more entries than it can count still leads to all of them.
    #[test]
    fn a_count_that_is_full_stays_full() {
        let mut table = NameTable::with_room_for(2_000);
        let hash = |key: u64| key << 8 & 0xff00 | key << 20;
        (0..600).for_each(|key| table.insert(table.spot(hash(key)), key));
        assert!((0..600).all(|key| table.find(table.spot(hash(key)), |payload| payload == key) == Some(key)));
        assert!((0..599).all(|key| table.remove(table.spot(hash(key)), key)));
        assert_eq!(table.find(table.spot(hash(599)), |payload| payload == 599), Some(599));
    }
}

//! A hash table of 64-bit words that one thread writes and any number read.
//!
//! A line of memory holds seven entries and counts those that found it full and went on to the next. An entry
//! never moves while it is in the table, so a reader misses none; a table that is full is replaced by a
//! larger one. Keys are not kept: an entry has a tag of its key's hash and a payload that leads to the key.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::published::{prefetch, with_huge_capacity};

/// Entries of one line.
const SLOTS: usize = 7;

#[repr(align(64))]
#[derive(Default, Debug)]
struct Line {
    slots: [AtomicU64; SLOTS],
    /// Entries whose search passes this line.
    passed: AtomicU64,
}

/// Bits of a payload, which is never 0.
const PAYLOAD: u32 = 28;
const MASK: u64 = (1 << PAYLOAD) - 1;

/// A table of payloads of 28 bits.
#[derive(Debug)]
pub(super) struct LineTable {
    lines: Box<[Line]>,
}

impl LineTable {
    /// An empty table with room for this many entries.
    pub(super) fn with_room_for(entries: usize) -> Self {
        // 7 of 8 slots in use on average leave searches at 1.1 lines.
        let lines = entries.div_ceil(SLOTS).max(1) * 8 / 7 + 1;
        let mut memory = with_huge_capacity(lines);
        memory.resize_with(lines, Line::default);
        Self { lines: memory.into_boxed_slice() }
    }

    /// Entries that fit without long searches.
    pub(super) fn room(&self) -> usize {
        self.lines.len() * SLOTS * 7 / 8
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// The payload with this hash that leads to the key.
    #[inline]
    pub(super) fn find(&self, hash: u64, mut leads_to_key: impl FnMut(u64) -> bool) -> Option<u64> {
        let tag = Self::word(hash, 0);
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            for slot in &line.slots {
                // Of an entry with this tag, only the payload is left.
                let payload = slot.load(Acquire) ^ tag;
                if payload <= MASK && payload != 0 && leads_to_key(payload) {
                    return Some(payload);
                }
            }
            if line.passed.load(Acquire) == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Puts an entry in. The writer's; the caller keeps the number of entries below [`Self::room`].
    #[inline]
    pub(super) fn insert(&self, hash: u64, payload: u64) {
        debug_assert!(payload != 0 && payload <= MASK);
        let mut at = self.home(hash);
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            if let Some(slot) = line.slots.iter().find(|slot| slot.load(Relaxed) == 0) {
                slot.store(Self::word(hash, payload), Release);
                return;
            }
            line.passed.store(line.passed.load(Relaxed) + 1, Release);
            at = self.after(at);
        }
        debug_assert!(false, "the table is full");
    }

    /// Takes an entry out; `false` if it is not there. The writer's.
    pub(super) fn remove(&self, hash: u64, payload: u64) -> bool {
        let wanted = Self::word(hash, payload);
        let home = self.home(hash);
        let mut at = home;
        for _ in 0..self.lines.len() {
            let line = &self.lines[at];
            if let Some(slot) = line.slots.iter().find(|slot| slot.load(Relaxed) == wanted) {
                slot.store(0, Release);
                self.unpass(home, at);
                return true;
            }
            if line.passed.load(Relaxed) == 0 {
                return false;
            }
            at = self.after(at);
        }
        false
    }

    /// A payload that a search for this hash may find, from the line where it begins.
    #[inline]
    pub(super) fn guess(&self, hash: u64) -> Option<u64> {
        let tag = Self::word(hash, 0);
        let slots = self.lines[self.home(hash)].slots.iter();
        slots.map(|slot| slot.load(Relaxed) ^ tag).find(|payload| *payload <= MASK && *payload != 0)
    }

    /// Asks for the line where a search for this hash begins.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&self.lines[self.home(hash)]);
    }

    /// All payloads.
    pub(super) fn payloads(&self) -> impl Iterator<Item = u64> + '_ {
        self.lines
            .iter()
            .flat_map(|line| &line.slots)
            .map(|slot| slot.load(Relaxed) & MASK)
            .filter(|payload| *payload != 0)
    }

    fn unpass(&self, home: usize, until: usize) {
        let mut at = home;
        while at != until {
            let passed = &self.lines[at].passed;
            passed.store(passed.load(Relaxed).saturating_sub(1), Release);
            at = self.after(at);
        }
    }

    fn word(hash: u64, payload: u64) -> u64 {
        hash << PAYLOAD | payload
    }

    /// The high bits choose the line, the low ones are the tag.
    // The product of a 64-bit fraction and a length is below that length.
    #[allow(clippy::cast_possible_truncation)]
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.lines.len() as u128) >> 64) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.lines.len() { 0 } else { at + 1 }
    }
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
            let table = LineTable::with_room_for(60);
            let hash = |key: u64| (key % 7) << 61 | key;
            let mut map = HashMap::new();
            for (insert, key) in steps {
                if insert {
                    if map.insert(key, key + 1).is_none() {
                        table.insert(hash(key), key + 1);
                    }
                } else {
                    prop_assert_eq!(table.remove(hash(key), key + 1), map.remove(&key).is_some());
                }
                for key in 0..60 {
                    prop_assert_eq!(table.find(hash(key), |payload| payload == key + 1), map.get(&key).copied());
                }
            }
            for (key, payload) in map {
                prop_assert!(table.remove(hash(key), payload));
            }
            prop_assert_eq!(table.payloads().count(), 0);
            prop_assert!(table.lines.iter().all(|line| line.passed.load(Relaxed) == 0));
        }
    }
}

//! One rank's cache, as vLLM keeps it: pinned by running requests, released tail first, evicted oldest first.

use rustc_hash::FxHashMap;

use super::blocks::BlockId;

/// "No slot": ends the list of the blocks that may be evicted.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Slot {
    block: BlockId,
    pins: u32,
    before: u32,
    after: u32,
}

/// A cache of a fixed number of blocks.
#[derive(Debug)]
pub struct Pool {
    capacity: usize,
    slots: Vec<Slot>,
    spare: Vec<u32>,
    places: FxHashMap<BlockId, u32>,
    /// The list of unpinned blocks, in the order in which they will be evicted.
    oldest: u32,
    newest: u32,
    unpinned: usize,
}

impl Pool {
    /// An empty cache.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            slots: Vec::new(),
            spare: Vec::new(),
            places: FxHashMap::default(),
            oldest: NONE,
            newest: NONE,
            unpinned: 0,
        }
    }

    /// Blocks held.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether the block is held.
    pub fn holds(&self, block: BlockId) -> bool {
        self.places.contains_key(&block)
    }

    /// Every block held, in no order.
    pub fn held(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.places.keys().copied()
    }

    /// Pins the block if it is held.
    pub fn pin(&mut self, block: BlockId) -> bool {
        let Some(&place) = self.places.get(&block) else { return false };
        if self.slots[place as usize].pins == 0 {
            self.unlink(place);
        }
        self.slots[place as usize].pins += 1;
        true
    }

    /// Makes room for `count` blocks by evicting the oldest; `false`, and nothing done, if too much is pinned.
    pub fn make_room(&mut self, count: usize, evicted: &mut Vec<BlockId>) -> bool {
        let missing = (self.len() + count).saturating_sub(self.capacity);
        missing <= self.unpinned && self.evict(missing, evicted) == missing
    }

    /// Evicts up to `count` of the oldest blocks; how many it was.
    pub fn evict(&mut self, count: usize, evicted: &mut Vec<BlockId>) -> usize {
        for done in 0..count {
            let place = self.oldest;
            if place == NONE {
                return done;
            }
            self.unlink(place);
            let block = self.slots[place as usize].block;
            self.places.remove(&block);
            self.spare.push(place);
            evicted.push(block);
        }
        count
    }

    /// Puts in a block that is not held, pinned once. Room must have been made.
    pub fn insert(&mut self, block: BlockId) {
        let slot = Slot { block, pins: 1, before: NONE, after: NONE };
        let place = if let Some(place) = self.spare.pop() {
            self.slots[place as usize] = slot;
            place
        } else {
            self.slots.push(slot);
            self.slots.len() as u32 - 1
        };
        self.places.insert(block, place);
    }

    /// Takes back one pin; the last one makes the block the newest of those that may be evicted.
    pub fn release(&mut self, block: BlockId) {
        let Some(&place) = self.places.get(&block) else { return };
        let slot = &mut self.slots[place as usize];
        slot.pins -= 1;
        if slot.pins > 0 {
            return;
        }
        slot.before = self.newest;
        slot.after = NONE;
        match self.newest {
            NONE => self.oldest = place,
            newest => self.slots[newest as usize].after = place,
        }
        self.newest = place;
        self.unpinned += 1;
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Self::new(self.capacity);
    }

    fn unlink(&mut self, place: u32) {
        let Slot { before, after, .. } = self.slots[place as usize];
        match before {
            NONE => self.oldest = after,
            before => self.slots[before as usize].after = after,
        }
        match after {
            NONE => self.newest = before,
            after => self.slots[after as usize].before = before,
        }
        self.unpinned -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_goes_first_and_nothing_that_is_pinned() {
        let mut pool = Pool::new(3);
        let blocks = [BlockId(0), BlockId(1), BlockId(2)];
        blocks.iter().for_each(|&block| pool.insert(block));
        let mut evicted = Vec::new();
        assert!(!pool.make_room(1, &mut evicted));
        blocks.iter().rev().for_each(|&block| pool.release(block));
        assert!(pool.pin(BlockId(2)));
        assert!(pool.make_room(2, &mut evicted));
        assert_eq!(evicted, [BlockId(1), BlockId(0)]);
        assert!(pool.holds(BlockId(2)) && !pool.holds(BlockId(1)));
        assert!(!pool.pin(BlockId(1)));
    }
}

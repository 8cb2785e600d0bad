//! Names that the rank held and holds no more, and what they stood for: an offload is often announced after
//! the device block went.

use std::collections::VecDeque;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use smallvec::SmallVec;

use super::tree::Place;
use crate::block::BlockHash;

/// Names kept where the rank's capacity is not known: a cache of a million tokens at 16 a block.
pub(super) const DEFAULT_BOUND: usize = 1 << 16;

/// A bounded store of removed names, oldest out. The places are kept alive in the tree by whoever puts them in.
#[derive(Clone, Default, Debug)]
pub(super) struct Remembered {
    /// Names to keep; 0 until the rank stores anything in a lower tier, since nobody else asks for them.
    bound: usize,
    places: HashMap<BlockHash, (Place, u64), RandomState>,
    /// Names in the order in which they went. A name that went again is in it twice, and its last turn counts.
    order: VecDeque<(BlockHash, u64)>,
    turn: u64,
}

impl Remembered {
    pub(super) fn is_on(&self) -> bool {
        self.bound > 0
    }

    pub(super) fn turn_on(&mut self, bound: usize) {
        self.bound = bound.max(1);
    }

    pub(super) fn get(&self, name: &BlockHash) -> Option<Place> {
        self.places.get(name).map(|(place, _)| *place)
    }

    /// Keeps a name; the places that need not be kept alive any more.
    pub(super) fn insert(&mut self, name: &BlockHash, place: Place) -> SmallVec<[Place; 2]> {
        let mut out = SmallVec::new();
        self.turn += 1;
        if let Some((before, _)) = self.places.insert(name.clone(), (place, self.turn)) {
            out.push(before);
        }
        self.order.push_back((name.clone(), self.turn));
        while self.places.len() > self.bound {
            let Some((name, turn)) = self.order.pop_front() else { break };
            if self.is_last(&name, turn)
                && let Some((place, _)) = self.places.remove(&name)
            {
                out.push(place);
            }
        }
        // Turns of names that went again later; half of it at least goes.
        if self.order.len() > 2 * self.bound + 16 {
            let mut order = std::mem::take(&mut self.order);
            order.retain(|(name, turn)| self.is_last(name, *turn));
            self.order = order;
        }
        out
    }

    fn is_last(&self, name: &BlockHash, turn: u64) -> bool {
        self.places.get(name).is_some_and(|(_, last)| *last == turn)
    }

    /// Forgets all names; their places need not be kept alive any more.
    pub(super) fn drain(&mut self) -> Vec<Place> {
        self.order = VecDeque::new();
        std::mem::take(&mut self.places).into_values().map(|(place, _)| place).collect()
    }

    /// Without its names; it goes on to take some in if it did.
    pub(super) fn emptied(&self) -> Self {
        Self { bound: self.bound, ..Self::default() }
    }

    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        self.places.values().map(|(place, _)| *place)
    }

    /// The same in an index whose runs have other numbers.
    pub(super) fn renamed(&self, renamed: impl Fn(Place) -> Place) -> Self {
        let mut copy = self.clone();
        copy.places.values_mut().for_each(|(place, _)| *place = renamed(*place));
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::tree::RunId;

    /// I9: as many as the bound, oldest out, and what goes again counts as new.
    #[test]
    fn the_oldest_name_goes() {
        let place = |offset| Place { run: RunId(0), offset };
        let mut names = Remembered::default();
        names.turn_on(2);
        assert!(names.insert(&BlockHash::Int(1), place(1)).is_empty());
        assert!(names.insert(&BlockHash::Int(2), place(2)).is_empty());
        assert_eq!(names.insert(&BlockHash::Int(1), place(3)).as_slice(), [place(1)]);
        assert_eq!(names.insert(&BlockHash::Int(4), place(4)).as_slice(), [place(2)]);
        assert_eq!((names.get(&BlockHash::Int(1)), names.get(&BlockHash::Int(2))), (Some(place(3)), None));
        for _ in 0..100 {
            names.insert(&BlockHash::Int(4), place(4));
        }
        assert!(names.order.len() <= 20);
        assert_eq!(names.drain().len(), 2);
    }
}

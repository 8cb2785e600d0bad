//! Names: the table that leads from an engine's name to a block's place, for all ranks.
//!
//! The names themselves lie with the runs, numbers beside the hashes and byte strings apart.

use std::hash::BuildHasher;

use smallvec::SmallVec;

use super::{NameTable, Place, RunId, Tree};
use crate::block::BlockHash;
use crate::index::shared::Pin;

/// Lines asked for ahead: as many misses as a core keeps in flight.
const AHEAD: usize = 16;

impl Tree {
    #[inline]
    fn name_is(&self, place: Place, name: &BlockHash, pin: &Pin) -> bool {
        let own = self.own(place.run);
        match (&own.byte_names, name) {
            (None, BlockHash::Int(name)) => self.run(place.run).name_word(place.offset, pin) == *name,
            (Some(names), BlockHash::Bytes(name)) => names.get(place.offset as usize) == Some(name),
            _ => false,
        }
    }

    fn name_at(&self, place: Place, pin: &Pin) -> BlockHash {
        match &self.own(place.run).byte_names {
            None => BlockHash::Int(self.run(place.run).name_word(place.offset, pin)),
            Some(names) => BlockHash::Bytes(names.get(place.offset as usize).cloned().unwrap_or_default()),
        }
    }

    /// Writes a name where one was reserved.
    pub(in crate::index) fn set_name(&mut self, place: Place, name: &BlockHash, pin: &Pin) {
        match name {
            BlockHash::Int(word) => self.run(place.run).set_name_word(place.offset, *word, pin),
            BlockHash::Bytes(bytes) => {
                let Some(names) = &mut self.own_mut(place.run).byte_names else { return };
                let at = place.offset as usize;
                if names.len() <= at {
                    names.resize(at + 1, Box::default());
                }
                names[at].clone_from(bytes);
            }
        }
    }

    /// The place that a name leads to. Ranks that use other names for a content keep them themselves.
    #[inline]
    pub(in crate::index) fn named(&self, name: &BlockHash, pin: &Pin) -> Option<Place> {
        let found = self
            .names
            .find(self.name_hash(name), |payload| self.name_is(Place::unpacked(payload), name, pin))?;
        Some(Place::unpacked(found))
    }

    /// Asks for the memory where a name will be looked up.
    #[inline]
    pub(in crate::index) fn prefetch_name(&self, name: &BlockHash) {
        self.names.prefetch(self.name_hash(name));
    }

    /// Whether `name` is the tree's own name for the block at `place`.
    pub(in crate::index) fn is_canonical(&self, place: Place, name: &BlockHash, pin: &Pin) -> bool {
        self.name_is(place, name, pin)
            && (!self.own(place.run).irregular || self.named(name, pin) == Some(place))
    }

    /// The tree's own name for the block at `place`, if it has one.
    pub(in crate::index) fn canonical(&self, place: Place, pin: &Pin) -> Option<BlockHash> {
        let name = self.name_at(place, pin);
        (!self.own(place.run).irregular || self.named(&name, pin) == Some(place)).then_some(name)
    }

    /// Gives a block that has no name of its own this one, if the name is free.
    pub(in crate::index) fn adopt_name(&mut self, place: Place, name: &BlockHash, pin: &Pin) -> bool {
        let own = self.own(place.run);
        if !own.irregular
            || !own.suits(Some(name))
            || self.canonical(place, pin).is_some()
            || self.named(name, pin).is_some()
        {
            return false;
        }
        self.set_name(place, name, pin);
        self.lead_name(place, Some(name), pin);
        true
    }

    /// Has the name lead to the block that bears it, unless it leads elsewhere already.
    pub(in crate::index) fn lead_name(&mut self, place: Place, name: Option<&BlockHash>, pin: &Pin) -> bool {
        let leads = name.is_some_and(|name| self.lead_new_name(place, name, pin));
        if !leads {
            self.own_mut(place.run).irregular = true;
        }
        leads
    }

    /// As [`Self::lead_name`], for a block that may be given up if the name is not free.
    pub(in crate::index) fn lead_new_name(&mut self, place: Place, name: &BlockHash, pin: &Pin) -> bool {
        let hash = self.name_hash(name);
        let taken = self.names.find(hash, |payload| {
            let other = Place::unpacked(payload);
            other != place && self.name_is(other, name, pin)
        });
        if taken.is_some() {
            return false;
        }
        self.name_count += 1;
        if self.names.room() < self.name_count {
            self.resize_names(self.name_count + self.name_count / 2, pin);
        }
        self.names.insert(hash, place.packed());
        true
    }

    fn resize_names(&mut self, room: usize, pin: &Pin) {
        let names = NameTable::with_room_for(room);
        for payload in self.names.payloads() {
            names.insert(self.hash_at(Place::unpacked(payload), pin), payload);
        }
        self.names = names;
    }

    fn name_hash(&self, name: &BlockHash) -> u64 {
        match name {
            BlockHash::Int(name) => self.tables.hasher.hash_one(name),
            BlockHash::Bytes(name) => self.tables.hasher.hash_one(&**name),
        }
    }

    fn hash_at(&self, place: Place, pin: &Pin) -> u64 {
        match &self.own(place.run).byte_names {
            None => self.tables.hasher.hash_one(self.run(place.run).name_word(place.offset, pin)),
            Some(names) => {
                names.get(place.offset as usize).map_or(0, |name| self.tables.hasher.hash_one(&**name))
            }
        }
    }

    /// Names new blocks of a run from `from` on, which have room but are not there yet, as far as the names are
    /// free; returns how many that were.
    pub(in crate::index) fn lead_names(
        &mut self,
        run: RunId,
        from: u32,
        names: &[BlockHash],
        pin: &Pin,
    ) -> u32 {
        let mut offset = from;
        for group in names.chunks(AHEAD) {
            group.iter().for_each(|name| self.prefetch_name(name));
            for name in group {
                let place = Place { run, offset };
                if !self.own(run).suits(Some(name)) {
                    return offset - from;
                }
                self.set_name(place, name, pin);
                if !self.lead_new_name(place, name, pin) {
                    return offset - from;
                }
                offset += 1;
            }
        }
        offset - from
    }

    pub(super) fn forget_names(&mut self, id: RunId, from: u32, to: u32, pin: &Pin) {
        let mut start = from;
        while start < to {
            let end = to.min(start + AHEAD as u32);
            let hashes: SmallVec<[u64; AHEAD]> =
                (start..end).map(|offset| self.hash_at(Place { run: id, offset }, pin)).collect();
            hashes.iter().for_each(|&hash| self.names.prefetch(hash));
            for (offset, &hash) in (start..end).zip(&hashes) {
                let led = self.names.remove(hash, Place { run: id, offset }.packed());
                self.name_count -= usize::from(led);
            }
            start = end;
        }
        if self.names.room() > 64 && self.name_count < self.names.room() / 3 {
            self.resize_names(self.name_count + self.name_count / 2, pin);
        }
    }
}

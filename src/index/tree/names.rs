//! Names: the table that leads from an engine's name to a block's place, for all ranks.
//!
//! The names themselves lie with the runs, numbers beside the hashes and byte strings apart.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;

use super::{Place, RunId, Tree, run_at, run_in};
use crate::block::BlockHash;
use crate::index::dump::DumpedNames;
use crate::index::name_table::{NameTable, Spot};
use crate::index::published::{Pin, prefetch};

/// Lines asked for ahead: as many misses as a core keeps in flight.
const AHEAD: usize = 16;

impl Tree {
    #[inline]
    fn name_is(&self, place: Place, name: &BlockHash, pin: &Pin) -> bool {
        match name {
            BlockHash::Int(word) => self.word_is(place, *word, pin),
            BlockHash::Bytes(name) => {
                let names = self.own(place.run).byte_names.as_ref();
                names.is_some_and(|names| names.get(place.offset as usize) == Some(name))
            }
        }
    }

    #[inline]
    fn word_is(&self, place: Place, word: u64, pin: &Pin) -> bool {
        let run = self.run(place.run);
        run.name_word(place.offset, pin) == word && !run.has_byte_names()
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
            BlockHash::Int(word) => {
                let run = run_in(&self.chunks, place.run);
                run.set_name_words(place.offset, [*word], &mut self.writer, pin);
            }
            BlockHash::Bytes(bytes) => {
                let Some(names) = &mut self.own_mut(place.run).byte_names else { return };
                let at = place.offset as usize;
                let more = (at + 1).saturating_sub(names.len());
                if more > 0 {
                    names.resize(at + 1, Box::default());
                }
                let before = names[at].len();
                names[at].clone_from(bytes);
                self.name_bytes = self.name_bytes + bytes.len() + more * super::name_bytes(&[]) - before;
            }
        }
    }

    /// The place that a name leads to. Ranks that use other names for a content keep them themselves.
    #[inline]
    pub(in crate::index) fn named(&self, name: &BlockHash, pin: &Pin) -> Option<Place> {
        let found = self.names.find(self.names.spot(self.name_hash(name)), |payload| {
            self.name_is(Place::unpacked(payload), name, pin)
        })?;
        Some(Place::unpacked(found))
    }

    /// Asks for the line of the table where this name's search begins; the name's hash.
    #[inline]
    pub(in crate::index) fn ask_for_name(&self, name: &BlockHash) -> u64 {
        let hash = self.name_hash(name);
        self.names.ask(hash);
        hash
    }

    /// Asks for the run that a name with this hash probably leads to; the place.
    #[inline]
    pub(in crate::index) fn ask_for_run(&self, hash: u64) -> Option<Place> {
        // The table may have been made anew since its line was asked for.
        let spot = self.names.spot(hash);
        self.names.ask_behind(spot);
        let place = self.names.guess(spot).map(Place::unpacked)?;
        self.run(place.run).prefetch();
        prefetch(&self.own[place.run.0 as usize]);
        Some(place)
    }

    /// Asks for the block at a place, which need not be there any more, and for the one behind it.
    #[inline]
    pub(in crate::index) fn ask_for_blocks(&self, place: Place, pin: &Pin) {
        if let Some(run) = run_at(&self.chunks, place.run) {
            run.prefetch_block(place.offset, pin);
        }
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
        self.make_names_room(1, pin);
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

    /// Changes the table by what the rest of the tree says.
    #[inline]
    fn with_names<T>(&mut self, change: impl FnOnce(&Self, &mut NameTable) -> T) -> T {
        let mut names = std::mem::take(&mut self.names);
        let changed = change(self, &mut names);
        self.names = names;
        changed
    }

    /// As [`Self::lead_name`]; the table has room.
    pub(super) fn lead_new_name(&mut self, place: Place, name: &BlockHash, pin: &Pin) -> bool {
        let led = self.with_names(|tree, names| {
            names.insert_new(names.spot(tree.name_hash(name)), place.packed(), |payload| {
                let other = Place::unpacked(payload);
                other != place && tree.name_is(other, name, pin)
            })
        });
        self.name_count += usize::from(led);
        led
    }

    /// Makes the table larger if it must be. Takes every block of a regular run for one that its name leads to,
    /// so it must not come between a block and its name.
    pub(super) fn make_names_room(&mut self, more: usize, pin: &Pin) {
        let count = self.name_count + more;
        if self.names.room() < count {
            self.resize_names(count + count / 3, pin);
        }
    }

    /// Runs lie in memory as they are named, so the names are taken from there and not from the old table.
    fn resize_names(&mut self, room: usize, pin: &Pin) {
        let mut names = NameTable::with_room_for(room);
        for (id, own) in (0..).map(RunId).zip(&self.own) {
            let Some(own) = own else { continue };
            match self.regular_names(id, pin) {
                Some(words) => self.add_regular(&mut names, id, words),
                None => self.add_irregular(&mut names, id, own.irregular, pin),
            }
        }
        self.names = names;
    }

    /// Makes room for this many names at once.
    pub(in crate::index) fn expect_names(&mut self, count: usize, pin: &Pin) {
        self.make_names_room(count, pin);
    }

    /// Has the names of a run that was just made lead to its blocks.
    pub(super) fn restore_names(&mut self, run: RunId, names: DumpedNames, pin: &Pin) {
        match names {
            DumpedNames::Regular(words) => {
                self.with_names(|tree, names| tree.add_regular(names, run, &words));
                self.name_count += words.len();
            }
            DumpedNames::Any { names, .. } => {
                for (offset, name) in (0..).zip(names) {
                    let place = Place { run, offset };
                    if let Some(name) = &name {
                        self.set_name(place, name, pin);
                    }
                    self.lead_name(place, name.as_ref(), pin);
                }
            }
        }
    }

    fn add_regular(&self, names: &mut NameTable, run: RunId, words: &[u64]) {
        let mut place = Place { run, offset: 0 };
        for_each_ahead(names, words, &self.tables.hasher, |names, spot, _| {
            names.insert(spot, place.packed());
            place.offset += 1;
            true
        });
    }

    fn add_irregular(&self, names: &mut NameTable, run: RunId, irregular: bool, pin: &Pin) {
        for offset in 0..self.run(run).len() {
            let place = Place { run, offset };
            let hash = self.hash_at(place, pin);
            let leads = || self.names.find(self.names.spot(hash), |of| of == place.packed()).is_some();
            if !irregular || leads() {
                names.insert(names.spot(hash), place.packed());
            }
        }
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
        // No larger table may be made while names lead to blocks that are not there yet.
        self.make_names_room(names.len(), pin);
        let bytes = self.run(run).has_byte_names();
        let suits = |name: &&BlockHash| matches!(name, BlockHash::Bytes(_)) == bytes;
        let names = &names[..names.iter().take_while(suits).count()];
        self.set_names(run, from, names, pin);
        if bytes {
            let places = (from..).map(|offset| Place { run, offset });
            let led =
                places.zip(names).take_while(|(place, name)| self.lead_new_name(*place, name, pin)).count();
            // Bounded by MAX_RUN.
            #[allow(clippy::cast_possible_truncation)]
            return led as u32;
        }
        let mut place = Place { run, offset: from };
        self.with_names(|tree, table| {
            let words = tree.run(run).name_words_from(from, names.len(), &tree.writer, pin);
            for_each_ahead(table, words, &tree.tables.hasher, |table, spot, word| {
                let is_other = |of| tree.word_is(Place::unpacked(of), word, pin);
                let new = table.insert_new(spot, place.packed(), is_other);
                place.offset += u32::from(new);
                new
            });
        });
        self.name_count += (place.offset - from) as usize;
        place.offset - from
    }

    fn set_names(&mut self, run: RunId, from: u32, names: &[BlockHash], pin: &Pin) {
        if self.run(run).has_byte_names() {
            let places = (from..).map(|offset| Place { run, offset });
            return places.zip(names).for_each(|(place, name)| self.set_name(place, name, pin));
        }
        let words = names.iter().map(|name| match name {
            BlockHash::Int(word) => *word,
            BlockHash::Bytes(_) => 0,
        });
        run_in(&self.chunks, run).set_name_words(from, words, &mut self.writer, pin);
    }

    /// Has the names of a run's blocks `from..to` lead nowhere.
    pub(super) fn forget_names(&mut self, id: RunId, from: u32, to: u32, pin: &Pin) {
        let mut place = Place { run: id, offset: from };
        let mut led = 0;
        self.with_names(|tree, names| {
            if let Some(words) = tree.regular_names(id, pin) {
                let words = &words[from as usize..to as usize];
                for_each_ahead(names, words, &tree.tables.hasher, |names, spot, _| {
                    led += usize::from(names.remove(spot, place.packed()));
                    place.offset += 1;
                    true
                });
                return;
            }
            while place.offset < to {
                let spot = names.spot(tree.hash_at(place, pin));
                led += usize::from(names.remove(spot, place.packed()));
                place.offset += 1;
            }
        });
        self.name_count -= led;
        self.names_are_few |= self.has_few_names();
    }

    /// Gives back what the table no longer needs; between events, when every run is whole.
    pub(in crate::index) fn shrink_names(&mut self, pin: &Pin) {
        if std::mem::take(&mut self.names_are_few) && self.has_few_names() {
            self.resize_names(self.name_count + self.name_count / 4, pin);
        }
    }

    /// Whether a smaller table would do: one that a small table's churn does not make again and again.
    fn has_few_names(&self) -> bool {
        self.names.room() > 64 && self.name_count < self.names.room() / 20 * 11
    }
}

/// Does something with each name where it belongs while the lines of the next names are on their way; stops where it
/// says `false`.
#[inline]
fn for_each_ahead(
    table: &mut NameTable,
    words: &[u64],
    hasher: &RandomState,
    mut each: impl FnMut(&mut NameTable, Spot, u64) -> bool,
) {
    if let [word] = *words {
        each(table, table.spot(hasher.hash_one(word)), word);
        return;
    }
    let ask = |table: &NameTable, group: &[u64], spots: &mut [Spot; AHEAD]| {
        for (spot, word) in spots.iter_mut().zip(group) {
            *spot = table.ask(hasher.hash_one(word));
        }
    };
    let (mut spots, mut next) = ([Spot::default(); AHEAD], [Spot::default(); AHEAD]);
    let mut groups = words.chunks(AHEAD).peekable();
    if let Some(first) = groups.peek() {
        ask(table, first, &mut spots);
    }
    while let Some(group) = groups.next() {
        if let Some(behind) = groups.peek() {
            ask(table, behind, &mut next);
        }
        // One in twenty goes on to a second line: its miss passes while the others are seen to.
        spots.iter().take(group.len()).for_each(|spot| table.ask_behind(*spot));
        if !group.iter().zip(&spots).all(|(word, spot)| each(table, *spot, *word)) {
            return;
        }
        std::mem::swap(&mut spots, &mut next);
    }
}

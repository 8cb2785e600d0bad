//! The plain case, in bulk: a rank without anything explicit stores and removes blocks under the tree's own
//! names. Whatever is not plain is left to the general rules of [`Announcer`], name by name.

use super::announcer::Announcer;
use super::run::MAX_RUN;
use super::tree::{Layer, Place, RunId};
use crate::block::{BlockHash, Isolation, LocalBlockHash, SequenceHash};

/// Blocks `from..to` of a run.
#[derive(Clone, Copy)]
struct Stretch {
    run: RunId,
    from: u32,
    to: u32,
}

impl Announcer<'_> {
    /// Has the rank hold blocks with this content behind `parent`; returns how many could be held in bulk and
    /// the place of the last.
    pub(super) fn hold_bulk(
        &mut self,
        layer: Layer,
        isolation: Isolation,
        parent: Option<Place>,
        names: &[BlockHash],
        locals: &[u64],
    ) -> (usize, Option<Place>) {
        let (mut done, mut at) = (0, parent);
        let len = names.len().min(locals.len());
        while done < len {
            let (names, locals) = (&names[done..len], &locals[done..len]);
            let step = match self.known(at, locals) {
                Some(known) => self.hold_known(layer, known, names),
                None => self.hold_new(layer, isolation, at, names, locals),
            };
            let Some(Stretch { run, from, to }) = step else { break };
            done += (to - from) as usize;
            at = Some(Place { run, offset: to - 1 });
        }
        (done, at)
    }

    /// The blocks behind `parent` that have this content.
    fn known(&self, parent: Option<Place>, locals: &[u64]) -> Option<Stretch> {
        let first = *locals.first()?;
        if let Some(Place { run, offset }) = parent {
            let from = offset + 1;
            let behind = self.tree.run(run).hashes(self.pin).locals().get(from as usize..).unwrap_or(&[]);
            if behind.first() == Some(&first) {
                return Some(Stretch { run, from, to: from + common(behind, locals) });
            }
        }
        if parent.is_some_and(|place| !self.tree.has_runs_behind(place)) {
            return None;
        }
        let before = parent.map(|place| self.tree.sequence(place, self.pin));
        let sequence = SequenceHash::extend(before, LocalBlockHash(first));
        let (run, of) = self.tree.tables.head(sequence, self.pin)?;
        Some(Stretch { run, from: 0, to: common(of.hashes(self.pin).locals(), locals) })
    }

    /// Holds known blocks as far as their names are the tree's and the rank does not hold them yet.
    fn hold_known(&mut self, layer: Layer, known: Stretch, names: &[BlockHash]) -> Option<Stretch> {
        let Stretch { run, from, to } = known;
        let names = &names[..(to - from) as usize];
        let named = match self.tree.regular_names(run, self.pin) {
            Some(words) => {
                let pairs = words[from as usize..].iter().zip(names);
                pairs.take_while(|(word, name)| matches!(name, BlockHash::Int(name) if name == *word)).count()
            }
            None => {
                let places = (from..).map(|offset| Place { run, offset });
                let is_canonical =
                    |(place, name): &(Place, &BlockHash)| self.tree.is_canonical(*place, name, self.pin);
                places.zip(names).take_while(is_canonical).count()
            }
        };
        // Bounded by MAX_RUN.
        #[allow(clippy::cast_possible_truncation)]
        let to = from + named as u32;
        let to = from + self.not_held(layer, run, from, to);
        if from == to {
            return None;
        }
        self.cover(layer, run, from, to);
        Some(Stretch { run, from, to })
    }

    fn not_held(&self, layer: Layer, run: RunId, from: u32, to: u32) -> u32 {
        let of = self.tree.run(run);
        if layer == Layer::HOT {
            return of.not_held(self.index, from, to, self.pin);
        }
        match of.cold(layer, self.pin) {
            Some(coverage) => coverage.not_held(self.index, from, to),
            None => to - from,
        }
    }

    /// Makes blocks that the tree does not know, as far as their names are free.
    fn hold_new(
        &mut self,
        layer: Layer,
        isolation: Isolation,
        parent: Option<Place>,
        names: &[BlockHash],
        locals: &[u64],
    ) -> Option<Stretch> {
        let appendable = parent.filter(|parent| {
            self.tree.may_append(*parent, layer, self.index, self.pin)
                && names.first().is_some_and(|name| self.tree.suits(parent.run, name))
        });
        let from = appendable.map_or(0, |parent| parent.offset + 1);
        let room = names.len().min((MAX_RUN - from) as usize);
        let (names, locals) = (&names[..room], &locals[..room]);
        let before = parent.map(|place| self.tree.sequence(place, self.pin));
        let run = match appendable {
            Some(parent) => {
                self.tree.make_room(parent.run, room, self.pin);
                parent.run
            }
            None => self.tree.new_run(parent, isolation, names.first(), room, self.pin),
        };
        let made = self.tree.lead_names(run, from, names, self.pin);
        let to = from + made;
        let locals = &locals[..made as usize];
        match appendable {
            _ if made == 0 && appendable.is_some() => return None,
            _ if made == 0 => {
                self.tree.drop_run(run, self.pin);
                return None;
            }
            Some(_) => {
                self.tree.append(run, before, locals, layer, self.index, self.pin);
                self.count(layer, i64::from(made));
            }
            None => {
                self.tree.begin_run(run, before, locals, self.pin);
                self.cover(layer, run, 0, to);
            }
        }
        Some(Stretch { run, from, to })
    }

    /// Removes names; returns how many the rank did not hold.
    pub(super) fn retract_all(&mut self, layer: Layer, names: &[BlockHash]) -> u64 {
        let mut unknown = 0;
        let mut rest = names;
        while let Some((name, behind)) = rest.split_first() {
            rest = behind;
            if !self.is_plain() || self.rank.remembered.is_on() {
                unknown += u64::from(!self.retract(layer, name));
                continue;
            }
            let place = self.tree.named(name, self.pin);
            let held = place.and_then(|Place { run, offset }| {
                self.tree.run(run).held_around(layer, self.index, offset, self.pin)
            });
            let (Some(Place { run, offset }), Some(held)) = (place, held) else {
                unknown += 1;
                continue;
            };
            let (from, to) = self.stretch(run, offset, held, &mut rest);
            if !self.cut_tail(layer, run, from, to) {
                self.uncover(layer, run, from, to);
            }
        }
        unknown
    }

    /// The blocks around the one at `offset` that the next names mean, as far as the rank holds them; those
    /// names are taken off. Engines remove leaves first, so mostly each name is the block before.
    fn stretch(&self, run: RunId, offset: u32, held: (u32, u32), names: &mut &[BlockHash]) -> (u32, u32) {
        let (mut from, mut to) = (offset, offset + 1);
        let Some(words) = self.tree.regular_names(run, self.pin) else { return (from, to) };
        let (before, behind) = (&words[held.0 as usize..from as usize], &words[to as usize..held.1 as usize]);
        from -= take_common(before.iter().rev(), names);
        if from == offset {
            to += take_common(behind.iter(), names);
        }
        (from, to)
    }
}

/// Takes off the leading names that these words are; returns how many.
fn take_common<'w>(words: impl Iterator<Item = &'w u64>, names: &mut &[BlockHash]) -> u32 {
    let is = |(word, name): &(&u64, &BlockHash)| matches!(name, BlockHash::Int(name) if name == *word);
    let count = words.zip(names.iter()).take_while(is).count();
    *names = &names[count..];
    // Bounded by MAX_RUN.
    #[allow(clippy::cast_possible_truncation)]
    let count = count as u32;
    count
}

/// How many leading words are equal: at most a run's length.
#[allow(clippy::cast_possible_truncation)]
fn common(a: &[u64], b: &[u64]) -> u32 {
    super::query::common_prefix(a, b) as u32
}

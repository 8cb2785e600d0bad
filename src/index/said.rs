//! What a rank's names mean, one announcement more, and one less.

use smallvec::SmallVec;

use super::Announcements;
use super::announcer::Announcer;
use super::rank::{Named, Said, Shape};
use super::tree::{Layer, Place};
use crate::block::{BlockHash, Tier};

impl Announcer<'_> {
    // === meaning ===

    /// The block that the rank means by a name while it holds it, whatever layer it was announced in.
    pub(super) fn meaning(&self, name: &BlockHash) -> Option<Place> {
        self.rank
            .named(name)
            .and_then(Named::block)
            .or_else(|| self.tree.named(name, self.pin).filter(|place| self.is_plain_anywhere(*place)))
    }

    /// The same, or the last block of the chunk that the name means.
    pub(super) fn lead(&self, name: &BlockHash) -> Option<Place> {
        self.meaning(name).or_else(|| self.rank.named(name).and_then(Named::chunk))
    }

    /// Whether the rank holds the block by the tree's own name in any layer.
    fn is_plain_anywhere(&self, place: Place) -> bool {
        if self.rank.pinned.is_empty() {
            return self.tree.covers_anywhere(self.index, place, self.pin);
        }
        self.holds_plainly(Layer::HOT, place) || self.plain_layers(place).next().is_some()
    }

    /// The layers other than the hot one in which that is so.
    fn plain_layers(&self, place: Place) -> impl Iterator<Item = Layer> + '_ {
        let cold = self.tree.run(place.run).ext(self.pin).into_iter().flat_map(|ext| &ext.cold);
        cold.map(|(layer, _)| *layer).filter(move |layer| self.holds_plainly(*layer, place))
    }

    /// The place of a name that is held plainly in this layer.
    fn plain_in(&self, layer: Layer, name: &BlockHash) -> Option<Place> {
        self.tree.named(name, self.pin).filter(|place| self.holds_plainly(layer, *place))
    }

    /// Whether a store of the device tier said the name.
    pub(super) fn is_of_device(&self, name: &BlockHash) -> bool {
        let is_block = |said: &Said| {
            said.layer.tier == Tier::Device && said.shape == Shape::Block && said.place.is_some()
        };
        let plainly = |place: Place| {
            self.holds_plainly(Layer::HOT, place)
                || self.plain_layers(place).any(|layer| layer.tier == Tier::Device)
        };
        self.rank.named(name).is_some_and(|named| named.said.iter().any(is_block))
            || self.tree.named(name, self.pin).is_some_and(plainly)
    }

    // === one more ===

    /// One more announcement of `place` as `name`.
    pub(super) fn announce(&mut self, layer: Layer, name: &BlockHash, shape: Shape, place: Place) {
        if shape == Shape::Block && !self.rank.is_said(layer, name) {
            let canonical =
                self.tree.is_canonical(place, name, self.pin) || self.tree.adopt_name(place, name, self.pin);
            if canonical && !self.covers(layer, place) {
                return self.cover(layer, place.run, place.offset, place.offset + 1);
            }
        }
        self.push(layer, name, shape, Some(place));
    }

    /// One more announcement, written down. What waited under this name is settled before.
    pub(super) fn push(&mut self, layer: Layer, name: &BlockHash, shape: Shape, place: Option<Place>) {
        let set = self.rank.settings.announcements == Announcements::Set;
        // The name may be held plainly already, and the block by the tree's own name for it.
        if let Some(of) = self.plain_in(layer, name) {
            if set && shape == Shape::Block {
                return;
            }
            self.make_explicit(layer, of);
        }
        if let (Shape::Block, Some(place)) = (shape, place)
            && self.holds_plainly(layer, place)
        {
            self.make_explicit(layer, place);
        }
        let named = self.rank.explicit.entry(name.clone()).or_default();
        if let Some(said) = named.said.iter_mut().find(|said| said.layer == layer && said.shape == shape) {
            if set {
                return;
            }
            said.count = said.count.saturating_add(1);
            if let (Shape::Block, Some(place)) = (shape, said.place) {
                *self.rank.pinned.entry((layer, place)).or_default() += 1;
            }
            return;
        }
        named.said.push(Said { layer, shape, place, count: 1 });
        match place {
            Some(place) => self.hold_said(layer, shape, place, 1),
            None => {
                self.rank.waiting += 1;
                self.rank.gauge.add_nameless(layer.tier, 1);
                self.note_intake(layer, 1);
            }
        }
    }

    /// Has the rank hold what was said so often.
    pub(super) fn hold_said(&mut self, layer: Layer, shape: Shape, place: Place, count: u32) {
        if shape == Shape::Block {
            *self.rank.pinned.entry((layer, place)).or_default() += count;
            self.cover(layer, place.run, place.offset, place.offset + 1);
        } else {
            self.tree.keep(place);
        }
    }

    /// Writes down what coverage alone said: the block is held once, under the tree's own name.
    pub(super) fn make_explicit(&mut self, layer: Layer, place: Place) {
        let Some(name) = self.tree.canonical(place, self.pin) else { return };
        let said = Said { layer, shape: Shape::Block, place: Some(place), count: 1 };
        self.rank.explicit.entry(name).or_default().said.push(said);
        self.rank.pinned.insert((layer, place), 1);
    }

    /// The opposite, when coverage alone says it all again.
    pub(super) fn make_plain(&mut self, layer: Layer, place: Place) {
        if self.rank.pinned.get(&(layer, place)) != Some(&1) {
            return;
        }
        let Some(name) = self.tree.canonical(place, self.pin) else { return };
        let Some(named) = self.rank.explicit.get_mut(&name) else { return };
        let alone = Said { layer, shape: Shape::Block, place: Some(place), count: 1 };
        let mut of_layer = named.said.iter().filter(|said| said.layer == layer);
        if of_layer.next() != Some(&alone) || of_layer.next().is_some() {
            return;
        }
        named.said.retain(|said| said.layer != layer);
        if named.said.is_empty() {
            self.rank.explicit.remove(&name);
        }
        self.rank.pinned.remove(&(layer, place));
    }

    // === one less ===

    /// One announcement less; `false` if the rank does not hold the name.
    pub(super) fn retract(&mut self, layer: Layer, name: &BlockHash) -> bool {
        let named = self.rank.explicit.get_mut(name);
        let at = named.as_ref().and_then(|named| named.said.iter().rposition(|said| said.layer == layer));
        let (Some(named), Some(at)) = (named, at) else {
            let plain = self.plain_in(layer, name);
            if let Some(place) = plain {
                self.forget_name(name, Some(place), |this| {
                    this.uncover(layer, place.run, place.offset, place.offset + 1);
                });
            }
            return plain.is_some();
        };
        let said = &mut named.said[at];
        said.count -= 1;
        let Said { shape, place, count, .. } = *said;
        if count > 0 {
            if let (Shape::Block, Some(place)) = (shape, place) {
                self.unpin(layer, place, 1);
            }
            return true;
        }
        named.said.remove(at);
        if shape != Shape::Block {
            self.drop_chunks(layer, shape, name);
        }
        self.drop_empty(name);
        self.forget_name(name, place, |this| match (shape, place) {
            (Shape::Block, Some(place)) => this.unpin(layer, place, 1),
            (_, Some(place)) => this.tree.let_go(place, this.pin),
            (_, None) => this.stop_waiting(layer, name),
        });
        true
    }

    /// Drops what is kept of a name of which nothing is said.
    pub(super) fn drop_empty(&mut self, name: &BlockHash) {
        if self.rank.explicit.get(name).is_some_and(|named| named.said.is_empty()) {
            self.rank.explicit.remove(name);
        }
    }

    /// Takes back what holds a name's block; the block is remembered if nothing else holds the name.
    fn forget_name(&mut self, name: &BlockHash, place: Option<Place>, take_back: impl FnOnce(&mut Self)) {
        let place = place.filter(|_| self.rank.remembered.is_on());
        // Kept first, since the tree might drop the block.
        place.inspect(|place| self.tree.keep(*place));
        take_back(self);
        let Some(place) = place else { return };
        let out = if self.lead(name).is_some() {
            SmallVec::from_elem(place, 1)
        } else {
            self.rank.remembered.insert(name, place)
        };
        out.into_iter().for_each(|place| self.tree.let_go(place, self.pin));
    }

    /// So many announcements fewer hold the block.
    fn unpin(&mut self, layer: Layer, place: Place, by: u32) {
        let Some(count) = self.rank.pinned.get_mut(&(layer, place)) else { return };
        *count = count.saturating_sub(by);
        if *count == 0 {
            self.rank.pinned.remove(&(layer, place));
            self.uncover(layer, place.run, place.offset, place.offset + 1);
        } else {
            self.make_plain(layer, place);
        }
    }

    // === otherwise ===

    /// The device says that a name means another block than a lower tier had said.
    pub(super) fn re_place(&mut self, name: &BlockHash, old: Place, new: Place) {
        if self.tree.named(name, self.pin) == Some(old) {
            let plain: SmallVec<[Layer; 4]> = self.plain_layers(old).collect();
            plain.into_iter().for_each(|layer| self.make_explicit(layer, old));
        }
        let Some(named) = self.rank.explicit.get_mut(name) else { return };
        let is_meant = |said: &&mut Said| said.shape != Shape::Chunk && said.place == Some(old);
        let mut moved: SmallVec<[Said; 4]> = SmallVec::new();
        for said in named.said.iter_mut().filter(is_meant) {
            moved.push(*said);
            said.place = Some(new);
        }
        for Said { layer, shape, count, .. } in moved {
            if shape == Shape::Block && self.holds_plainly(layer, new) {
                self.make_explicit(layer, new);
            }
            self.hold_said(layer, shape, new, count);
            if shape == Shape::Block {
                self.unpin(layer, old, count);
                self.make_plain(layer, new);
            } else {
                self.end_chunks_at(layer, shape, name, new);
                self.tree.let_go(old, self.pin);
            }
        }
    }

    /// A group's blocks go from one slot to another.
    pub(super) fn move_group(&mut self, from: u8, to: u8) {
        let intake = self.rank.intake;
        let there = |layer: Layer| if layer.slot == from { Layer { slot: to, ..layer } } else { layer };
        let pinned = std::mem::take(&mut self.rank.pinned);
        self.rank.pinned =
            pinned.into_iter().map(|((layer, place), count)| ((there(layer), place), count)).collect();
        for named in self.rank.explicit.values_mut() {
            named.said.iter_mut().for_each(|said| said.layer = there(said.layer));
        }
        self.move_chunks(there);
        for run in self.rank.runs.iter().copied().collect::<Vec<_>>() {
            for layer in self.tree.layers_of(self.index, run, self.pin) {
                if layer.slot != from {
                    continue;
                }
                let mut at = 0;
                while at < self.tree.run(run).len() {
                    let held = self.tree.run(run).held_around(layer, self.index, at, self.pin);
                    if let Some((first, end)) = held {
                        self.cover(there(layer), run, first, end);
                        self.uncover(layer, run, first, end);
                        at = end;
                    } else {
                        at += 1;
                    }
                }
            }
        }
        self.rank.intake = intake;
    }
}

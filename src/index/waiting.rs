//! Names without a place, and chunks.

use smallvec::SmallVec;

use super::announcer::Announcer;
use super::plan::{NameContent, Placing, Plan};
use super::rank::{Chunk, ChunkId, Orphan, OrphanContent, Said, Shape};
use super::run::ChunkHold;
use super::tree::{Layer, Place};
use crate::block::{BlockHash, ContentKeys};

impl Announcer<'_> {
    /// Keeps what a name without a place may turn out to mean; `false` if only its name can be kept.
    pub(super) fn keep_orphan(
        &mut self,
        name: &BlockHash,
        parent: Option<&BlockHash>,
        content: NameContent<'_>,
        keys: &ContentKeys,
    ) -> bool {
        // Behind no name nothing can come: another store has to place the name.
        let Some(parent) = parent else { return true };
        let content = match content {
            NameContent::Tokens(tokens) => OrphanContent::Tokens(tokens.into()),
            NameContent::Window(tokens) => OrphanContent::Window(tokens.into()),
            NameContent::Local(local) => OrphanContent::Local(local),
        };
        let orphans = &mut self.rank.orphans;
        let kept = orphans.find(name, parent, &content, keys).or_else(|| {
            let (name, parent, keys) = (name.clone(), parent.clone(), keys.clone());
            orphans.insert(Orphan { name, parent, content, keys })
        });
        kept.is_some()
    }

    /// `name` has come to mean `place`: what waited under it is placed, and what waited for that.
    pub(super) fn settle(&mut self, name: &BlockHash, place: Place) {
        self.place_waiting(name, place);
        let mut settled = vec![(name.clone(), place)];
        while let Some((name, place)) = settled.pop() {
            while let Some(id) = self.rank.orphans.next_child(&name) {
                let Some(orphan) = self.rank.orphans.remove(id) else { break };
                let child = self.join(&orphan, place);
                self.place_waiting(&orphan.name, child);
                settled.push((orphan.name, child));
            }
        }
    }

    /// The block of an orphan whose parent is there.
    fn join(&mut self, orphan: &Orphan, parent: Place) -> Place {
        let isolation = self.tree.isolation(parent.run);
        let content = match &orphan.content {
            OrphanContent::Tokens(tokens) => NameContent::Tokens(tokens),
            OrphanContent::Window(tokens) => NameContent::Window(tokens),
            OrphanContent::Local(local) => NameContent::Local(*local),
        };
        let (name, keys) = (&orphan.name, &orphan.keys);
        self.extend(isolation, Some(parent), Layer::HOT, name, content, keys, false).place()
    }

    /// Everything that was said of the name and had no place has this one.
    fn place_waiting(&mut self, name: &BlockHash, place: Place) {
        self.rank.orphans.drop_named(name);
        let Some(named) = self.rank.explicit.get_mut(name) else { return };
        let mut placed: SmallVec<[Said; 4]> = SmallVec::new();
        for said in named.said.iter_mut().filter(|said| said.place.is_none()) {
            said.place = Some(place);
            placed.push(*said);
        }
        for Said { layer, shape, count, .. } in placed {
            self.rank.waiting -= 1;
            self.rank.gauge.add_nameless(layer.tier, -1);
            if shape == Shape::Block && self.holds_plainly(layer, place) {
                self.make_explicit(layer, place);
            }
            self.hold_said(layer, shape, place, count);
            if shape == Shape::Block {
                self.make_plain(layer, place);
            } else {
                self.end_chunks_at(layer, shape, name, place);
            }
        }
    }

    /// A name is held there no more that never had a place.
    pub(super) fn stop_waiting(&mut self, layer: Layer, name: &BlockHash) {
        self.rank.waiting -= 1;
        self.rank.gauge.add_nameless(layer.tier, -1);
        if self.rank.named(name).is_none_or(|named| !named.waits()) {
            self.rank.orphans.drop_named(name);
        }
    }

    // === chunks ===

    /// Makes chunks of the names of a store that were just announced.
    pub(super) fn form_chunks(&mut self, names: &[BlockHash], plan: &Plan) {
        let is_placeholder = matches!(plan.placing, Placing::Name);
        let of_each = plan.shape == Shape::Chunk
            || is_placeholder && (names.len() == 1 || self.are_ends_of_chunks(names));
        let names_per_chunk = if of_each { 1 } else { plan.chunk_len as usize };
        for of_chunk in names.chunks(names_per_chunk) {
            // No more names than a store may have.
            #[allow(clippy::cast_possible_truncation)]
            let len = if of_each { plan.chunk_len } else { of_chunk.len() as u32 };
            self.form_chunk(plan.layer, plan.shape, of_chunk, len);
        }
    }

    /// Whether names of one event are known to be apart: then each is the end of a chunk of its own.
    fn are_ends_of_chunks(&self, names: &[BlockHash]) -> bool {
        let [first, second, ..] = names else { return false };
        match (self.lead(first), self.lead(second)) {
            (Some(first), Some(second)) => self.tree.before(second) != Some(first),
            _ => false,
        }
    }

    fn form_chunk(&mut self, layer: Layer, shape: Shape, names: &[BlockHash], len: u32) {
        let Some(last) = names.last() else { return };
        let Some(named) = self.rank.explicit.get(last) else { return };
        let is_same = |id: &ChunkId| {
            let chunk = self.rank.chunks.get(*id);
            chunk.is_some_and(|chunk| {
                (chunk.layer, chunk.shape) == (layer, shape) && chunk.names.as_slice() == names
            })
        };
        if named.chunks.iter().any(is_same) {
            return;
        }
        let of_chunk = |said: &&Said| (said.layer, said.shape) == (layer, shape);
        let end = named.said.iter().find(of_chunk).and_then(|said| said.place);
        let id = self.rank.chunks.insert(Chunk { layer, shape, names: names.into(), len, end: None });
        for name in names {
            self.rank.explicit.entry(name.clone()).or_default().chunks.push(id);
        }
        if let Some(end) = end {
            self.end_chunk_at(id, end);
        }
    }

    /// The chunks that end with this name, said in this shape, end there.
    pub(super) fn end_chunks_at(&mut self, layer: Layer, shape: Shape, name: &BlockHash, place: Place) {
        let Some(named) = self.rank.explicit.get(name) else { return };
        for id in named.chunks.clone() {
            let is_meant = |chunk: &Chunk| {
                (chunk.layer, chunk.shape) == (layer, shape) && chunk.names.last() == Some(name)
            };
            if self.rank.chunks.get(id).is_some_and(is_meant) {
                self.end_chunk_at(id, place);
            }
        }
    }

    fn end_chunk_at(&mut self, id: ChunkId, place: Place) {
        self.release_chunk(id);
        let Some(chunk) = self.rank.chunks.get_mut(id) else { return };
        chunk.end = Some(place);
        let (layer, len) = (chunk.layer, self.tree.blocks_up_to(place, chunk.len));
        if !self.tree.covers_any(self.index, place.run, self.pin) {
            self.rank.runs.insert(place.run);
        }
        let hold = ChunkHold { layer, rank: self.index, offset: place.offset, len };
        self.tree.hold_chunk(place.run, hold, self.pin);
        self.count_cold(layer, i64::from(len));
    }

    /// Readers see the chunk no more.
    fn release_chunk(&mut self, id: ChunkId) {
        let Some(chunk) = self.rank.chunks.get_mut(id) else { return };
        let Some(place) = chunk.end.take() else { return };
        let (layer, len) = (chunk.layer, self.tree.blocks_up_to(place, chunk.len));
        let hold = ChunkHold { layer, rank: self.index, offset: place.offset, len };
        self.tree.release_chunk(place.run, hold, self.pin);
        if !self.tree.covers_any(self.index, place.run, self.pin) {
            self.rank.runs.remove(&place.run);
        }
        self.count_cold(layer, -i64::from(len));
    }

    /// The name is said there in this shape no more, and each chunk of it is gone with that.
    pub(super) fn drop_chunks(&mut self, layer: Layer, shape: Shape, name: &BlockHash) {
        let Some(named) = self.rank.explicit.get(name) else { return };
        for id in named.chunks.clone() {
            if self.rank.chunks.get(id).is_none_or(|chunk| (chunk.layer, chunk.shape) != (layer, shape)) {
                continue;
            }
            self.release_chunk(id);
            for name in self.rank.chunks.remove(id).into_iter().flat_map(|chunk| chunk.names) {
                if let Some(named) = self.rank.explicit.get_mut(&name) {
                    named.chunks.retain(|of| *of != id);
                }
            }
        }
    }

    /// Chunks change their layers, with those who hold them.
    pub(super) fn move_chunks(&mut self, there: impl Fn(Layer) -> Layer) {
        for id in self.rank.chunks.ids() {
            let end = self.rank.chunks.get(id).and_then(|chunk| chunk.end);
            self.release_chunk(id);
            if let Some(chunk) = self.rank.chunks.get_mut(id) {
                chunk.layer = there(chunk.layer);
            }
            if let Some(end) = end {
                self.end_chunk_at(id, end);
            }
        }
    }
}

//! Announcements and removals of one rank, name by name: the general rules that every case obeys.

use smallvec::SmallVec;

use super::published::{Pin, local_words};
use super::rank::{Announced, Content, NameKey, NameRef, Orphan, OrphanContent, OrphanId, Rank};
use super::tree::{Extended, Layer, Place, RunId, Tree};
use super::{Announcements, StoreRefusal, StoreRequest, StoreTokens, Stored};
use crate::block::{
    AttentionKind, BlockHash, BlockSize, ContentKeys, Isolation, LocalBlockHash, LocalHasher,
};

/// How a store's names find their content.
pub(super) struct Plan {
    layer: Layer,
    placing: Placing,
}

enum Placing {
    /// The tokens say it: so many per name.
    ByTokens { tokens_per_name: usize },
    /// A name that the rank knows says it, else the tokens.
    ByNameThenTokens { tokens_per_name: usize },
    /// Only a name that the rank knows can say it.
    ByName,
    /// Nothing can: the names are kept as names.
    Nameless,
}

impl Plan {
    pub(super) fn of(
        request: &StoreRequest<'_>,
        rank: &mut Rank,
        block_size: BlockSize,
    ) -> Result<Self, StoreRefusal> {
        check_parents(request)?;
        let slot = rank.slot_for_store(request.group).ok_or(StoreRefusal::TooManyGroups)?;
        let layer = Layer { tier: request.tier, slot };
        let group = &mut rank.groups[usize::from(slot)];
        let size = BlockSize::new(request.block_size);
        let names = request.names.len();
        let lines_up = match request.tokens {
            StoreTokens::Unusable | StoreTokens::Ids([]) => {
                return Ok(Self { layer, placing: Placing::Nameless });
            }
            StoreTokens::Ids(tokens) => {
                size.is_some_and(|size| names.checked_mul(size.as_usize()) == Some(tokens.len()))
            }
            StoreTokens::Windows { tokens, len, stride } => {
                let last = names.checked_sub(1).and_then(|last| last.checked_mul(stride));
                let covers = len >= block_size.as_usize() && stride > 0;
                covers
                    && size == Some(block_size)
                    && last.and_then(|last| last.checked_add(len)) == Some(tokens.len())
            }
            // A hash is of one block of ours, so it says nothing of another size.
            StoreTokens::Locals(locals) => locals.len() == names && size == Some(block_size),
        };
        let kind = group.kind;
        if kind == AttentionKind::Full {
            if size.is_some_and(|size| size != block_size) {
                return Err(StoreRefusal::BlockSizeMismatch);
            }
            if !lines_up {
                return Err(StoreRefusal::TokenMismatch);
            }
            group.block_size = size;
            return Ok(Self { layer, placing: Placing::ByTokens { tokens_per_name: block_size.as_usize() } });
        }
        let windowed = matches!(kind, AttentionKind::SlidingWindow { .. });
        if !lines_up && !windowed {
            return Err(StoreRefusal::TokenMismatch);
        }
        group.block_size = size.or(group.block_size);
        let multiple = size.is_some_and(|size| size.get() % block_size.get() == 0);
        // Keys are located within the group's block; a larger block's cannot be split.
        let splittable = size == Some(block_size) || request.keys.iter().all(SmallVec::is_empty);
        let placing = if lines_up && multiple && splittable {
            Placing::ByNameThenTokens { tokens_per_name: request.block_size as usize }
        } else {
            Placing::ByName
        };
        Ok(Self { layer, placing })
    }
}

/// A block that names itself as its parent would hang behind itself.
fn check_parents(request: &StoreRequest<'_>) -> Result<(), StoreRefusal> {
    let own = request.parent.is_some() && request.parent == request.names.first();
    let behind = request.names.get(1..).unwrap_or(&[]);
    let next = request.names.iter().zip(behind).any(|pair| match pair {
        (BlockHash::Int(a), BlockHash::Int(b)) => a == b,
        (a, b) => a == b,
    });
    if own || next { Err(StoreRefusal::SelfParent) } else { Ok(()) }
}

/// Blocks of one run that the rank is about to hold; applied together.
#[derive(Clone, Copy)]
struct Pending {
    run: RunId,
    from: u32,
    to: u32,
}

/// Where the next block of a store hangs.
enum Cursor {
    Root,
    At(Place),
    Missing(BlockHash),
}

/// What a name of a store stands for.
#[derive(Clone, Copy)]
enum NameContent<'a> {
    Tokens(&'a [u32]),
    /// One block's, and those behind it that the name covers too.
    Window(&'a [u32]),
    Local(LocalBlockHash),
}

impl<'a> NameContent<'a> {
    /// The content of the name at `at`.
    fn of(tokens: StoreTokens<'a>, tokens_per_name: usize, at: usize) -> Option<Self> {
        match tokens {
            StoreTokens::Ids(tokens) => {
                tokens.get(at * tokens_per_name..(at + 1) * tokens_per_name).map(Self::Tokens)
            }
            StoreTokens::Windows { tokens, len, stride } => {
                tokens.get(at * stride..at * stride + len).map(Self::Window)
            }
            StoreTokens::Locals(locals) => locals.get(at).copied().map(Self::Local),
            StoreTokens::Unusable => None,
        }
    }
}

/// Applies announcements of one rank.
pub(super) struct Announcer<'a> {
    pub(super) tree: &'a mut Tree,
    pub(super) rank: &'a mut Rank,
    pub(super) index: u32,
    pub(super) hasher: &'a mut LocalHasher,
    pub(super) block_size: BlockSize,
    /// Local hashes of the store at hand.
    pub(super) locals: &'a mut Vec<u64>,
    pub(super) pin: &'a Pin,
}

impl Announcer<'_> {
    /// Whether coverage alone says all that the rank holds, and nothing waits for a block to come.
    pub(super) fn is_plain(&self) -> bool {
        self.rank.explicit.is_empty() && self.rank.orphans.is_empty() && self.rank.nameless == 0
    }

    pub(super) fn store(&mut self, request: &StoreRequest<'_>, plan: &Plan) -> Stored {
        let layer = plan.layer;
        match plan.placing {
            Placing::Nameless => {
                request.names.iter().for_each(|name| self.push_explicit(layer, name, Content::Nameless));
                Stored::default()
            }
            Placing::ByName => {
                request.names.iter().for_each(|name| self.store_by_name(layer, name));
                Stored::default()
            }
            Placing::ByTokens { .. } if self.append_to_tail(request, layer) => Stored::default(),
            Placing::ByTokens { tokens_per_name } => self.store_chain(request, layer, tokens_per_name, false),
            Placing::ByNameThenTokens { tokens_per_name } => {
                self.store_chain(request, layer, tokens_per_name, true)
            }
        }
    }

    fn store_by_name(&mut self, layer: Layer, name: &BlockHash) {
        match self.resolve(name) {
            Some(place) => self.announce(layer, name, place),
            None => self.push_explicit(layer, name, Content::Nameless),
        }
    }

    fn store_chain(
        &mut self,
        request: &StoreRequest<'_>,
        layer: Layer,
        tokens_per_name: usize,
        names_first: bool,
    ) -> Stored {
        let mut stored = Stored::default();
        let mut pending = None;
        let mut cursor = match request.parent {
            None => Cursor::Root,
            Some(parent) => self.resolve(parent).map_or_else(|| Cursor::Missing(parent.clone()), Cursor::At),
        };
        let done =
            if names_first { 0 } else { self.store_bulk(request, layer, tokens_per_name, &mut cursor) };
        let no_keys = ContentKeys::new();
        for (at, name) in request.names.iter().enumerate().skip(done) {
            let Some(content) = NameContent::of(request.tokens, tokens_per_name, at) else { break };
            let keys = request.keys.get(at).unwrap_or(&no_keys);
            if names_first && let Some(place) = self.resolve(name) {
                self.flush(layer, &mut pending);
                self.announce(layer, name, place);
                cursor = Cursor::At(place);
                continue;
            }
            let parent = match cursor {
                Cursor::Root => None,
                Cursor::At(place) => Some(place),
                Cursor::Missing(parent) => {
                    stored.orphans += 1;
                    let kept = self.keep_orphan(layer, name, &parent, content, keys);
                    stored.orphans_dropped += u64::from(!kept);
                    cursor = Cursor::Missing(name.clone());
                    continue;
                }
            };
            let place = self.place(request.isolation, parent, layer, name, content, keys, &mut pending);
            cursor = Cursor::At(place);
        }
        self.flush(layer, &mut pending);
        stored
    }

    /// The beginning of a store that is a plain one, in bulk; returns how many names that were.
    fn store_bulk(
        &mut self,
        request: &StoreRequest<'_>,
        layer: Layer,
        tokens_per_name: usize,
        cursor: &mut Cursor,
    ) -> usize {
        let parent = match cursor {
            Cursor::Root => None,
            Cursor::At(place) => Some(*place),
            Cursor::Missing(_) => return 0,
        };
        if !self.is_plain() {
            return 0;
        }
        let isolation = parent.map_or(request.isolation, |place| self.tree.isolation(place.run));
        let (done, reached) = match request.tokens {
            StoreTokens::Unusable => return 0,
            StoreTokens::Locals(locals) => {
                self.hold_bulk(layer, isolation, parent, request.names, local_words(locals))
            }
            StoreTokens::Ids(tokens) | StoreTokens::Windows { tokens, .. } => {
                let (len, stride) = match request.tokens {
                    StoreTokens::Windows { len, stride, .. } => (len, stride),
                    _ => (tokens_per_name, tokens_per_name),
                };
                let mut locals = std::mem::take(self.locals);
                locals.clear();
                let blocks = tokens.windows(len).step_by(stride).enumerate();
                locals.extend(blocks.map(|(at, block)| {
                    let keys = request.keys.get(at).map_or(&[][..], |keys| keys);
                    self.hasher.hash(isolation, block, keys).0
                }));
                let done = self.hold_bulk(layer, isolation, parent, request.names, &locals);
                *self.locals = locals;
                done
            }
        };
        if let Some(place) = reached {
            *cursor = Cursor::At(place);
        }
        done
    }

    /// Finds or makes the block and has the rank hold it.
    #[allow(clippy::too_many_arguments)]
    fn place(
        &mut self,
        isolation: Isolation,
        parent: Option<Place>,
        layer: Layer,
        name: &BlockHash,
        content: NameContent<'_>,
        keys: &ContentKeys,
        pending: &mut Option<Pending>,
    ) -> Place {
        let place = match self.extend(isolation, parent, layer, name, content, keys) {
            Extended::Appended(place) => {
                self.count(layer, 1);
                place
            }
            Extended::NewRun(place) => {
                self.flush(layer, pending);
                // Held at once, so that the next block may be appended.
                self.announce(layer, name, place);
                place
            }
            Extended::Known(place) => {
                if self.is_plain_hold(layer, name, place) {
                    self.hold_soon(layer, place, pending);
                } else {
                    self.flush(layer, pending);
                    self.announce(layer, name, place);
                }
                place
            }
        };
        if !self.rank.orphans.is_empty() || self.rank.nameless > 0 {
            self.flush(layer, pending);
            self.settle(name, place);
        }
        place
    }

    /// Walks or makes the blocks of one name: several where the group's blocks are larger than ours, all but
    /// the last of them implied.
    fn extend(
        &mut self,
        isolation: Isolation,
        mut parent: Option<Place>,
        layer: Layer,
        name: &BlockHash,
        content: NameContent<'_>,
        keys: &ContentKeys,
    ) -> Extended {
        let isolation = parent.map_or(isolation, |place| self.tree.isolation(place.run));
        let local = match content {
            NameContent::Local(local) => local,
            NameContent::Window(tokens) => self.hasher.hash(isolation, tokens, keys),
            NameContent::Tokens(tokens) => {
                let last = tokens.len() - self.block_size.as_usize();
                for implied in tokens[..last].chunks_exact(self.block_size.as_usize()) {
                    let local = self.hasher.hash(isolation, implied, &[]);
                    let (Extended::Known(place) | Extended::NewRun(place) | Extended::Appended(place)) =
                        self.tree.extend(parent, isolation, local, None, None, self.pin);
                    parent = Some(place);
                }
                self.hasher.hash(isolation, &tokens[last..], keys)
            }
        };
        // An appended block is held by the run's growth, so its name must be a plain one.
        let plain = self.rank.announced(layer, name).is_none();
        let appender = plain.then_some((layer, self.index));
        self.tree.extend(parent, isolation, local, Some(name), appender, self.pin)
    }

    /// Whether holding `place` as `name` is said by coverage alone: the tree's own name, nothing explicit
    /// about name or block, and not held yet.
    fn is_plain_hold(&self, layer: Layer, name: &BlockHash, place: Place) -> bool {
        self.rank.announced(layer, name).is_none()
            && self.tree.is_canonical(place, name, self.pin)
            && !self.covers(layer, place)
    }

    fn covers(&self, layer: Layer, place: Place) -> bool {
        self.tree.covers(layer, self.index, place, self.pin)
    }

    /// Held, and by the tree's own name alone.
    fn holds_plainly(&self, layer: Layer, place: Place) -> bool {
        self.covers(layer, place) && !self.rank.pinned.contains_key(&(layer, place))
    }

    fn hold_soon(&mut self, layer: Layer, place: Place, pending: &mut Option<Pending>) {
        match pending {
            Some(held) if held.run == place.run && held.to == place.offset => held.to += 1,
            _ => {
                self.flush(layer, pending);
                *pending = Some(Pending { run: place.run, from: place.offset, to: place.offset + 1 });
            }
        }
    }

    fn flush(&mut self, layer: Layer, pending: &mut Option<Pending>) {
        if let Some(Pending { run, from, to }) = pending.take() {
            self.cover(layer, run, from, to);
        }
    }

    pub(super) fn cover(&mut self, layer: Layer, run: RunId, from: u32, to: u32) {
        if !self.tree.covers_any(self.index, run, self.pin) {
            self.rank.runs.insert(run);
        }
        let added = self.tree.hold(layer, self.index, run, from, to, self.pin);
        self.count(layer, i64::from(added));
    }

    pub(super) fn uncover(&mut self, layer: Layer, run: RunId, from: u32, to: u32) {
        let len = self.tree.run(run).len();
        let gone = self.tree.release(layer, self.index, run, from, to, self.pin);
        if !self.tree.covers_any(self.index, run, self.pin) {
            self.rank.runs.remove(&run);
        }
        // The run ends where someone holds its last block or something hangs behind it.
        if to == len {
            self.tree.trim(run, self.pin);
        }
        self.count(layer, -i64::from(gone));
    }

    pub(super) fn count(&mut self, layer: Layer, blocks: i64) {
        if layer == Layer::HOT {
            self.rank.gauge.add(blocks);
        } else {
            self.rank.cold_blocks = self.rank.cold_blocks.saturating_add_signed(blocks);
        }
    }

    // === announcements ===

    /// One more announcement of `place` as `name`.
    fn announce(&mut self, layer: Layer, name: &BlockHash, place: Place) {
        if self.rank.announced(layer, name).is_none() {
            let canonical =
                self.tree.is_canonical(place, name, self.pin) || self.tree.adopt_name(place, name, self.pin);
            if canonical && !self.covers(layer, place) {
                return self.cover(layer, place.run, place.offset, place.offset + 1);
            }
        }
        self.push_explicit(layer, name, Content::Placed(place));
    }

    fn push_explicit(&mut self, layer: Layer, name: &BlockHash, content: Content) {
        // The name may be held plainly, for this content (a second announcement) or for another one.
        if self.rank.announced(layer, name).is_none()
            && let Some(of) = self.tree.named(name, self.pin).filter(|of| self.holds_plainly(layer, *of))
        {
            self.make_explicit(layer, of);
        }
        if let Content::Placed(place) = content
            && self.holds_plainly(layer, place)
        {
            self.make_explicit(layer, place);
        }
        let key = NameKey { layer, name: name.clone() };
        let announced = self.rank.explicit.entry(key).or_default();
        if self.rank.announcements == Announcements::Set && announced.iter().any(|(of, _)| *of == content) {
            if let Content::Placed(place) = content {
                self.make_plain(layer, place);
            }
            return;
        }
        match announced.last_mut() {
            Some((of, count)) if *of == content => *count = count.saturating_add(1),
            _ => announced.push((content, 1)),
        }
        match content {
            Content::Placed(place) => {
                *self.rank.pinned.entry((layer, place)).or_default() += 1;
                self.cover(layer, place.run, place.offset, place.offset + 1);
            }
            Content::Orphan(id) => self.note_orphan_hold(layer, id),
            Content::Nameless => self.rank.nameless += 1,
        }
    }

    fn note_orphan_hold(&mut self, layer: Layer, id: OrphanId) {
        let Some(orphan) = self.rank.orphans.get_mut(id) else { return };
        match orphan.holds.iter_mut().find(|(of, _)| *of == layer) {
            Some((_, count)) => *count += 1,
            None => orphan.holds.push((layer, 1)),
        }
    }

    /// Writes down what coverage alone said: the block is held once, under the tree's own name.
    fn make_explicit(&mut self, layer: Layer, place: Place) {
        let Some(name) = self.tree.canonical(place, self.pin) else { return };
        let announced = Announced::from_elem((Content::Placed(place), 1), 1);
        self.rank.explicit.insert(NameKey { layer, name }, announced);
        self.rank.pinned.insert((layer, place), 1);
    }

    /// The opposite, when coverage alone says it all again.
    fn make_plain(&mut self, layer: Layer, place: Place) {
        if self.rank.pinned.get(&(layer, place)) != Some(&1) {
            return;
        }
        let Some(name) = self.tree.canonical(place, self.pin) else { return };
        let key = NameRef { layer, name: &name };
        if self.rank.explicit.get(&key).is_some_and(|held| held[..] == [(Content::Placed(place), 1)]) {
            self.rank.explicit.remove(&key);
            self.rank.pinned.remove(&(layer, place));
        }
    }

    /// One announcement less; `false` if the rank does not hold the name.
    pub(super) fn retract(&mut self, layer: Layer, name: &BlockHash) -> bool {
        let known = self.take_back(layer, name);
        // Without its last content the name may mean an older one again, which others wait for.
        if known
            && self.rank.orphans.next_child(name).is_some()
            && let Some(place) = self.resolve(name)
        {
            self.settle(name, place);
        }
        known
    }

    fn take_back(&mut self, layer: Layer, name: &BlockHash) -> bool {
        let key = NameRef { layer, name };
        let Some(announced) = self.rank.explicit.get_mut(&key) else {
            let plain = self.tree.named(name, self.pin).filter(|place| self.holds_plainly(layer, *place));
            if let Some(place) = plain {
                self.uncover(layer, place.run, place.offset, place.offset + 1);
            }
            return plain.is_some();
        };
        let Some((content, count)) = announced.last_mut() else { return false };
        let content = *content;
        *count -= 1;
        if *count == 0 {
            announced.pop();
            if announced.is_empty() {
                self.rank.explicit.remove(&key);
            }
        }
        match content {
            Content::Placed(place) => self.unpin(layer, place),
            Content::Orphan(id) => self.release_orphan(layer, id),
            Content::Nameless => self.rank.nameless = self.rank.nameless.saturating_sub(1),
        }
        true
    }

    fn unpin(&mut self, layer: Layer, place: Place) {
        let Some(count) = self.rank.pinned.get_mut(&(layer, place)) else { return };
        *count -= 1;
        if *count == 0 {
            self.rank.pinned.remove(&(layer, place));
            self.uncover(layer, place.run, place.offset, place.offset + 1);
        } else {
            self.make_plain(layer, place);
        }
    }

    fn release_orphan(&mut self, layer: Layer, id: OrphanId) {
        let Some(orphan) = self.rank.orphans.get_mut(id) else { return };
        if let Some((_, count)) = orphan.holds.iter_mut().find(|(of, _)| *of == layer) {
            *count -= 1;
        }
        orphan.holds.retain(|(_, count)| *count > 0);
        if orphan.holds.is_empty() {
            self.rank.orphans.remove(id);
        }
    }

    // === names and orphans ===

    /// The content that the rank means by a name, whatever layer it was announced in.
    fn resolve(&self, name: &BlockHash) -> Option<Place> {
        let named = self.tree.named(name, self.pin);
        if self.rank.explicit.is_empty() {
            return named.filter(|place| self.tree.covers_anywhere(self.index, *place, self.pin));
        }
        self.rank.layers().find_map(|layer| match self.rank.announced(layer, name) {
            Some(announced) => match announced.last() {
                Some((Content::Placed(place), _)) => Some(*place),
                _ => None,
            },
            None => named.filter(|place| self.holds_plainly(layer, *place)),
        })
    }

    /// Keeps a block whose parent is not known; `false` if only its name could be kept.
    fn keep_orphan(
        &mut self,
        layer: Layer,
        name: &BlockHash,
        parent: &BlockHash,
        content: NameContent<'_>,
        keys: &ContentKeys,
    ) -> bool {
        let content = match content {
            NameContent::Tokens(tokens) => OrphanContent::Tokens(tokens.into()),
            NameContent::Window(tokens) => OrphanContent::Window(tokens.into()),
            NameContent::Local(local) => OrphanContent::Local(local),
        };
        let kept = self.rank.orphans.find(name, parent, &content, keys).or_else(|| {
            self.rank.orphans.insert(Orphan {
                name: name.clone(),
                parent: parent.clone(),
                content,
                keys: keys.clone(),
                holds: SmallVec::new(),
            })
        });
        self.push_explicit(layer, name, kept.map_or(Content::Nameless, Content::Orphan));
        kept.is_some()
    }

    /// `name` has come to mean `place`: whatever waited for that is placed, and what waited for those.
    fn settle(&mut self, name: &BlockHash, place: Place) {
        let mut settled = vec![(name.clone(), place)];
        while let Some((name, place)) = settled.pop() {
            self.place_nameless(&name, place);
            while let Some(id) = self.rank.orphans.next_child(&name) {
                let Some(orphan) = self.rank.orphans.remove(id) else { break };
                let child = self.join(id, &orphan, place);
                settled.push((orphan.name, child));
            }
        }
    }

    /// Hangs an orphan behind its parent in every layer in which it was announced.
    fn join(&mut self, id: OrphanId, orphan: &Orphan, parent: Place) -> Place {
        let first = orphan.holds.first().map_or(Layer::HOT, |(layer, _)| *layer);
        let isolation = self.tree.isolation(parent.run);
        let content = match &orphan.content {
            OrphanContent::Tokens(tokens) => NameContent::Tokens(tokens),
            OrphanContent::Window(tokens) => NameContent::Window(tokens),
            OrphanContent::Local(local) => NameContent::Local(*local),
        };
        let extended = self.extend(isolation, Some(parent), first, &orphan.name, content, &orphan.keys);
        let (Extended::Known(place) | Extended::NewRun(place) | Extended::Appended(place)) = extended;
        for &(layer, count) in &orphan.holds {
            self.replace(layer, &orphan.name, Content::Orphan(id), place, count);
        }
        place
    }

    /// Names of windowed groups whose content was not known find it in the full-attention group's store.
    fn place_nameless(&mut self, name: &BlockHash, place: Place) {
        if self.rank.nameless == 0 {
            return;
        }
        for layer in self.rank.layers() {
            let group = self.rank.groups[usize::from(layer.slot)];
            if !matches!(group.kind, AttentionKind::SlidingWindow { .. }) {
                continue;
            }
            let Some(announced) = self.rank.announced(layer, name) else { continue };
            let count =
                announced.iter().filter(|(of, _)| *of == Content::Nameless).map(|(_, count)| *count).sum();
            if count > 0 {
                self.rank.nameless = self.rank.nameless.saturating_sub(u64::from(count));
                self.replace(layer, name, Content::Nameless, place, count);
            }
        }
    }

    /// What was announced as `of` under this name turns out to be the block at `place`.
    fn replace(&mut self, layer: Layer, name: &BlockHash, of: Content, place: Place, count: u32) {
        if self.holds_plainly(layer, place) {
            self.make_explicit(layer, place);
        }
        let key = NameRef { layer, name };
        let Some(announced) = self.rank.explicit.get_mut(&key) else { return };
        for (content, _) in announced.iter_mut().filter(|(content, _)| *content == of) {
            *content = Content::Placed(place);
        }
        *self.rank.pinned.entry((layer, place)).or_default() += count;
        self.cover(layer, place.run, place.offset, place.offset + 1);
        self.make_plain(layer, place);
    }
}

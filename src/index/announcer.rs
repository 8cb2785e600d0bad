//! Stores of one rank, name by name: the general rules that every case obeys.
//!
//! A name says the prefix that ends at it. So what a store says of a name that the rank holds placed already is
//! an announcement and nothing more, whatever parent or tokens it brings. The device's word is the stronger one.

use super::plan::{NameContent, Placing, Plan};
use super::published::{Pin, local_words};
use super::rank::{Rank, Shape};
use super::tree::{Extended, Layer, Place, RunId, Tree};
use super::{StoreRequest, StoreTokens, Stored};
use crate::block::{AttentionKind, BlockHash, BlockSize, ContentKeys, Isolation, LocalHasher, Tier};

/// Blocks of one run that the rank is about to hold; applied together.
#[derive(Clone, Copy)]
pub(super) struct Pending {
    pub(super) run: RunId,
    pub(super) from: u32,
    pub(super) to: u32,
}

impl Pending {
    fn contains(self, place: Place) -> bool {
        place.run == self.run && (self.from..self.to).contains(&place.offset)
    }
}

/// Where the next block of a store hangs.
enum Cursor {
    Root,
    At(Place),
    /// Behind a name without a place; `None`: at a root that cannot be trusted to be one.
    Missing(Option<BlockHash>),
}

/// One name of a store and what comes with it.
#[derive(Clone, Copy)]
struct Entry<'a> {
    name: &'a BlockHash,
    content: NameContent<'a>,
    keys: &'a ContentKeys,
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
        self.rank.explicit.is_empty()
    }

    pub(super) fn store(&mut self, request: &StoreRequest<'_>, plan: &Plan) -> Stored {
        for (from, to) in &plan.moves {
            self.move_group(*from, *to);
        }
        let mut stored = Stored::default();
        match plan.placing {
            Placing::Name => stored.nameless = self.store_by_name(request.names, plan),
            Placing::Tokens { .. } if self.append_to_tail(request, plan.layer) => return stored,
            Placing::Tokens { tokens_per_name } => {
                self.store_chain(request, plan, tokens_per_name, false, &mut stored);
            }
            Placing::NameThenTokens { tokens_per_name } => {
                self.store_chain(request, plan, tokens_per_name, true, &mut stored);
            }
        }
        if plan.shape != Shape::Block {
            self.form_chunks(request.names, plan);
        }
        // Nothing rests on a group that is left out, so nothing is missed with it.
        if self.rank.groups.of_slot(plan.layer.slot).kind == AttentionKind::Unknown {
            (stored.nameless, stored.orphans_dropped) = (0, 0);
        }
        stored
    }

    /// Names whose content only a name that the rank knows can say; returns how many it does not know.
    fn store_by_name(&mut self, names: &[BlockHash], plan: &Plan) -> u64 {
        let mut nameless = 0;
        for name in names {
            match self.lead(name).or_else(|| self.rank.remembered.get(name)) {
                Some(place) => self.announce(plan.layer, name, plan.shape, place),
                None => {
                    nameless += 1;
                    self.push(plan.layer, name, plan.shape, None);
                }
            }
        }
        nameless
    }

    fn store_chain(
        &mut self,
        request: &StoreRequest<'_>,
        plan: &Plan,
        tokens_per_name: usize,
        names_first: bool,
        stored: &mut Stored,
    ) {
        let mut pending = None;
        let mut cursor = match request.parent {
            None if plan.is_lower() && !request.history_complete => Cursor::Missing(None),
            None => Cursor::Root,
            Some(parent) => {
                self.lead(parent).map_or_else(|| Cursor::Missing(Some(parent.clone())), Cursor::At)
            }
        };
        let is_remembered = |name: &BlockHash| self.rank.remembered.get(name).is_some();
        let by_rule = names_first
            || plan.shape != Shape::Block
            || plan.is_lower() && request.names.iter().any(is_remembered);
        let done =
            if by_rule { 0 } else { self.store_bulk(request, plan.layer, tokens_per_name, &mut cursor) };
        let no_keys = ContentKeys::new();
        for (at, name) in request.names.iter().enumerate().skip(done) {
            let Some(content) = NameContent::of(request.tokens, tokens_per_name, at) else { break };
            let entry = Entry { name, content, keys: request.keys.get(at).unwrap_or(&no_keys) };
            let known = self.known_place(name, plan, names_first, &cursor, pending);
            cursor = match (known, cursor) {
                (Some(place), cursor) => {
                    self.flush(plan.layer, &mut pending);
                    let compared = !names_first && plan.shape != Shape::Chunk;
                    let place = if compared {
                        self.heed(request.isolation, plan, entry, place, &cursor, stored)
                    } else {
                        place
                    };
                    self.announce(plan.layer, name, plan.shape, place);
                    Cursor::At(place)
                }
                (None, Cursor::Missing(parent)) => {
                    stored.orphans += 1;
                    let kept = self.keep_orphan(entry.name, parent.as_ref(), entry.content, entry.keys);
                    stored.orphans_dropped += u64::from(!kept);
                    self.push(plan.layer, name, plan.shape, None);
                    Cursor::Missing(Some(name.clone()))
                }
                (None, Cursor::Root) => {
                    Cursor::At(self.place(request.isolation, None, plan, entry, &mut pending))
                }
                (None, Cursor::At(parent)) => {
                    Cursor::At(self.place(request.isolation, Some(parent), plan, entry, &mut pending))
                }
            };
        }
        self.flush(plan.layer, &mut pending);
    }

    /// The place that the rank knows the name by already, if that is what the name means here too.
    fn known_place(
        &self,
        name: &BlockHash,
        plan: &Plan,
        names_first: bool,
        cursor: &Cursor,
        pending: Option<Pending>,
    ) -> Option<Place> {
        let about_to = |place: &Place| pending.is_some_and(|pending| pending.contains(*place));
        let block = || {
            self.meaning(name)
                .or_else(|| self.tree.named(name, self.pin).filter(about_to))
                .or_else(|| self.rank.remembered.get(name).filter(|_| plan.is_lower()))
        };
        let chunk = || self.rank.named(name).and_then(|named| named.chunk());
        match plan.shape {
            _ if names_first => block().or_else(chunk),
            // Of another size than the blocks of this name, so it may mean something else.
            // Behind a parent that is not known nothing else says where it hangs.
            Shape::Chunk if matches!(cursor, Cursor::Missing(_)) => chunk().or_else(block),
            Shape::Chunk => chunk(),
            _ if matches!(cursor, Cursor::Missing(_)) => block().or_else(chunk),
            Shape::Block | Shape::Part => block(),
        }
    }

    /// What a store says of a name whose place is known counts where it is the device's and the place is not.
    fn heed(
        &mut self,
        isolation: Isolation,
        plan: &Plan,
        entry: Entry<'_>,
        known: Place,
        cursor: &Cursor,
        stored: &mut Stored,
    ) -> Place {
        if !self.differs(isolation, entry, known, cursor) {
            return known;
        }
        stored.contradicted += 1;
        if plan.is_lower() {
            return known;
        }
        if self.is_of_device(entry.name) {
            stored.device_contradicted += 1;
            return known;
        }
        let parent = match cursor {
            Cursor::Root => None,
            Cursor::At(place) => Some(*place),
            Cursor::Missing(_) => return known,
        };
        let place = self.extend(isolation, parent, plan.layer, entry.name, entry.content, entry.keys, false);
        let place = place.place();
        self.re_place(entry.name, known, place);
        // What waits under the name means this block, too.
        self.settle(entry.name, place);
        place
    }

    /// Whether a store's parent and content are others than those of the block that the name means.
    fn differs(&mut self, isolation: Isolation, entry: Entry<'_>, known: Place, cursor: &Cursor) -> bool {
        let own = self.tree.isolation(known.run);
        let elsewhere = match cursor {
            Cursor::Root => self.tree.before(known).is_some() || own != isolation,
            Cursor::At(parent) => self.tree.before(known) != Some(*parent),
            Cursor::Missing(_) => false,
        };
        elsewhere || {
            let local = match entry.content {
                NameContent::Local(local) => local,
                NameContent::Tokens(tokens) | NameContent::Window(tokens) => {
                    self.hasher.hash(own, tokens, entry.keys)
                }
            };
            self.tree.local(known, self.pin) != Some(local.0)
        }
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
    fn place(
        &mut self,
        isolation: Isolation,
        parent: Option<Place>,
        plan: &Plan,
        entry: Entry<'_>,
        pending: &mut Option<Pending>,
    ) -> Place {
        let Entry { name, content, keys } = entry;
        let layer = plan.layer;
        let is_block = plan.shape == Shape::Block;
        let extended = self.extend(isolation, parent, layer, name, content, keys, is_block);
        let place = extended.place();
        if self.rank.waiting > 0 {
            self.flush(layer, pending);
            self.settle(name, place);
        }
        match extended {
            Extended::Appended(_) => self.count(layer, 1),
            // Held at once, so that the next block may be appended.
            Extended::NewRun(_) => {
                self.flush(layer, pending);
                self.announce(layer, name, plan.shape, place);
            }
            Extended::Known(_) if is_block && self.is_plain_hold(layer, name, place) => {
                self.hold_soon(layer, place, pending);
            }
            Extended::Known(_) => {
                self.flush(layer, pending);
                self.announce(layer, name, plan.shape, place);
            }
        }
        place
    }

    /// Walks or makes the blocks of one name: several where the group's blocks are larger than ours, all but
    /// the last of them implied. With `append`, a new block may be held by its run's growth.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn extend(
        &mut self,
        isolation: Isolation,
        mut parent: Option<Place>,
        layer: Layer,
        name: &BlockHash,
        content: NameContent<'_>,
        keys: &ContentKeys,
        append: bool,
    ) -> Extended {
        let isolation = parent.map_or(isolation, |place| self.tree.isolation(place.run));
        let local = match content {
            NameContent::Local(local) => local,
            NameContent::Window(tokens) => self.hasher.hash(isolation, tokens, keys),
            NameContent::Tokens(tokens) => {
                let last = tokens.len() - self.block_size.as_usize();
                for implied in tokens[..last].chunks_exact(self.block_size.as_usize()) {
                    let local = self.hasher.hash(isolation, implied, &[]);
                    let extended = self.tree.extend(parent, isolation, local, None, None, self.pin);
                    parent = Some(extended.place());
                }
                self.hasher.hash(isolation, &tokens[last..], keys)
            }
        };
        // An appended block is held by the run's growth, so its name must be a plain one.
        let plain = append && !self.rank.is_said(layer, name);
        let appender = plain.then_some((layer, self.index));
        self.tree.extend(parent, isolation, local, Some(name), appender, self.pin)
    }

    // === what is covered ===

    /// Whether holding `place` as `name` is said by coverage alone: the tree's own name, nothing explicit
    /// about name or block, and not held yet.
    fn is_plain_hold(&self, layer: Layer, name: &BlockHash, place: Place) -> bool {
        !self.rank.is_said(layer, name)
            && self.tree.is_canonical(place, name, self.pin)
            && !self.covers(layer, place)
    }

    pub(super) fn covers(&self, layer: Layer, place: Place) -> bool {
        self.tree.covers(layer, self.index, place, self.pin)
    }

    /// Held, and by the tree's own name alone.
    pub(super) fn holds_plainly(&self, layer: Layer, place: Place) -> bool {
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
            self.count_cold(layer, blocks);
        }
    }

    pub(super) fn count_cold(&mut self, layer: Layer, blocks: i64) {
        let rank = &mut *self.rank;
        rank.cold_blocks = rank.cold_blocks.saturating_add_signed(blocks);
        if layer.tier != Tier::Device {
            self.note_intake(layer, u64::try_from(blocks).unwrap_or_default());
            if layer.slot == 0 {
                self.rank.gauge.add_lower(layer.tier, blocks);
            }
        }
    }

    /// So many names or blocks are new to a tier.
    pub(super) fn note_intake(&mut self, layer: Layer, names: u64) {
        self.rank.intake[layer.tier as usize].names += names;
    }
}

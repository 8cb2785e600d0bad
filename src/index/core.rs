//! The writer's side: announcements and removals of one rank, applied to the tree.

use smallvec::SmallVec;

use super::coverage::RankSet;
use super::rank::{Announced, Content, NameKey, NameRef, Orphan, OrphanId, Rank};
use super::tree::{Extended, Layer, Place, RunId, Tree};
use super::{Announcements, LayerContents, Removed, StoreRefusal, StoreRequest, StoreTokens, Stored};
use crate::block::{AttentionKind, BlockHash, BlockSize, ContentKeys, Isolation, LocalHasher, Tier};
use crate::ids::RankSlot;

/// Blocks and names that one rank may hold. At 16 tokens a block this is 268 million tokens, ten times the
/// largest host caches in use; beyond it a peer is broken or hostile.
const MAX_HELD_PER_RANK: u64 = 1 << 24;

/// The tree and what each rank calls its blocks.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) block_size: BlockSize,
    pub(super) tree: Tree,
    ranks: Vec<RankEntry>,
    /// Ranks that hold more than device blocks of one group.
    pub(super) layered: RankSet,
    hasher: LocalHasher,
}

#[derive(Debug)]
struct RankEntry {
    generation: u32,
    rank: Option<Rank>,
}

impl Core {
    pub(super) fn new(block_size: BlockSize) -> Self {
        Self {
            block_size,
            tree: Tree::default(),
            ranks: Vec::new(),
            layered: RankSet::default(),
            hasher: LocalHasher::default(),
        }
    }

    pub(super) fn add_rank(&mut self, announcements: Announcements) -> RankSlot {
        let free = self.ranks.iter().position(|entry| entry.rank.is_none());
        let index = free.unwrap_or(self.ranks.len());
        if free.is_none() {
            self.ranks.push(RankEntry { generation: 0, rank: None });
        }
        let entry = &mut self.ranks[index];
        entry.generation += 1;
        entry.rank = Some(Rank::new(entry.generation, announcements));
        // A pool has at most a few thousand ranks.
        #[allow(clippy::cast_possible_truncation)]
        RankSlot { index: index as u32, generation: entry.generation }
    }

    pub(super) fn remove_rank(&mut self, slot: RankSlot) -> bool {
        let known = self.clear_rank(slot);
        if known {
            self.ranks[slot.index as usize].rank = None;
        }
        known
    }

    /// Forgets all blocks of the rank, on all tiers. Costs the rank's own runs.
    pub(super) fn clear_rank(&mut self, slot: RankSlot) -> bool {
        let Some((tree, rank)) = self.parts(slot) else { return false };
        let runs = std::mem::take(&mut rank.runs);
        rank.forget();
        for run in runs {
            release_run(tree, run, slot.index);
        }
        self.layered.remove(slot.index);
        true
    }

    pub(super) fn rank(&self, slot: RankSlot) -> Option<&Rank> {
        let entry = self.ranks.get(slot.index as usize)?;
        entry.rank.as_ref().filter(|rank| rank.generation == slot.generation)
    }

    /// The rank that has this index now.
    pub(super) fn rank_at(&self, index: u32) -> Option<(RankSlot, &Rank)> {
        let rank = self.ranks.get(index as usize)?.rank.as_ref()?;
        Some((RankSlot { index, generation: rank.generation }, rank))
    }

    /// Device blocks by slot index; 0 where no rank is.
    pub(super) fn tree_sizes(&self) -> impl Iterator<Item = u64> {
        self.ranks.iter().map(|entry| entry.rank.as_ref().map_or(0, |rank| rank.tree_size))
    }

    /// All ranks that have a slot.
    pub(super) fn ranks(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().filter_map(|entry| entry.rank.as_ref())
    }

    fn parts(&mut self, slot: RankSlot) -> Option<(&mut Tree, &mut Rank)> {
        let rank = self.ranks.get_mut(slot.index as usize)?.rank.as_mut()?;
        (rank.generation == slot.generation).then_some((&mut self.tree, rank))
    }

    pub(super) fn store(
        &mut self,
        slot: RankSlot,
        request: &StoreRequest<'_>,
    ) -> Result<Stored, StoreRefusal> {
        let Self { block_size, tree, ranks, hasher, .. } = self;
        let rank = ranks
            .get_mut(slot.index as usize)
            .and_then(|entry| entry.rank.as_mut())
            .filter(|rank| rank.generation == slot.generation)
            .ok_or(StoreRefusal::UnknownRank)?;
        if rank.held().saturating_add(request.names.len() as u64) > MAX_HELD_PER_RANK {
            return Err(StoreRefusal::RankFull);
        }
        let plan = Plan::of(request, rank, *block_size)?;
        let mut writer = Announcer { tree, rank, index: slot.index, hasher, block_size: *block_size };
        let stored = writer.store(request, &plan);
        self.note_layers(slot.index);
        Ok(stored)
    }

    pub(super) fn remove(
        &mut self,
        slot: RankSlot,
        tier: Tier,
        group_idx: Option<u32>,
        names: &[BlockHash],
    ) -> Removed {
        let block_size = self.block_size;
        let Self { tree, ranks, hasher, .. } = self;
        let rank = ranks
            .get_mut(slot.index as usize)
            .and_then(|entry| entry.rank.as_mut())
            .filter(|rank| rank.generation == slot.generation);
        let unknown = |count: usize| Removed { unknown: count as u64 };
        let Some(rank) = rank else { return unknown(names.len()) };
        let Some(group) = rank.slot_of(group_idx.unwrap_or(0)) else { return unknown(names.len()) };
        let layer = Layer { tier, slot: group };
        let mut writer = Announcer { tree, rank, index: slot.index, hasher, block_size };
        let missed = names.iter().filter(|name| !writer.retract(layer, name)).count();
        self.note_layers(slot.index);
        unknown(missed)
    }

    fn note_layers(&mut self, index: u32) {
        let layered = self.ranks[index as usize].rank.as_ref().is_some_and(|rank| rank.is_layered());
        if layered {
            self.layered.insert(index);
        } else {
            self.layered.remove(index);
        }
    }

    /// How many of these names form a prompt's beginning that the rank holds on the device.
    pub(super) fn overlap_by_names(&self, slot: RankSlot, names: &[BlockHash]) -> u32 {
        let Some(rank) = self.rank(slot) else { return 0 };
        let mut before = None;
        let mut reach = 0;
        for name in names {
            let place = match rank.announced(Layer::HOT, name).and_then(|announced| announced.last()) {
                Some((Content::Placed(place), _)) => Some(*place),
                Some(_) => None,
                None => self.tree.named(name).filter(|place| {
                    self.tree.run(place.run).covers(Layer::HOT, slot.index, place.offset)
                        && !rank.pinned.contains_key(&(Layer::HOT, *place))
                }),
            };
            match place {
                Some(place) if self.tree.before(place) == before => before = Some(place),
                _ => break,
            }
            reach += 1;
        }
        reach
    }

    /// Every name that the rank holds, by tier and group, with its copies.
    pub(super) fn contents(&self, slot: RankSlot) -> Vec<LayerContents> {
        let Some(rank) = self.rank(slot) else { return Vec::new() };
        let mut layers: Vec<(Layer, Vec<(BlockHash, u64)>)> = Vec::new();
        let mut push =
            |layer: Layer, name: BlockHash, copies: u64| match layers.iter_mut().find(|(of, _)| *of == layer)
            {
                Some((_, names)) => names.push((name, copies)),
                None => layers.push((layer, vec![(name, copies)])),
            };
        for &id in &rank.runs {
            let run = self.tree.run(id);
            for (layer, coverage) in run.layers_of(slot.index) {
                for offset in (0..run.len()).filter(|&offset| coverage.contains(slot.index, offset)) {
                    let place = Place { run: id, offset };
                    if !rank.pinned.contains_key(&(layer, place))
                        && let Some(name) = self.tree.canonical(place)
                    {
                        push(layer, name, 1);
                    }
                }
            }
        }
        for (key, announced) in &rank.explicit {
            push(key.layer, key.name.clone(), announced.iter().map(|(_, count)| u64::from(*count)).sum());
        }
        layers
            .into_iter()
            .map(|(layer, mut names)| {
                names.sort_unstable();
                let group_idx = rank.groups.get(usize::from(layer.slot)).and_then(|group| group.idx);
                LayerContents { tier: layer.tier, group_idx, names }
            })
            .collect()
    }
}

/// How a store's names find their content.
struct Plan {
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
    fn of(request: &StoreRequest<'_>, rank: &mut Rank, block_size: BlockSize) -> Result<Self, StoreRefusal> {
        check_parents(request)?;
        let slot = rank.slot_for_store(request.group).ok_or(StoreRefusal::TooManyGroups)?;
        let layer = Layer { tier: request.tier, slot };
        let group = &mut rank.groups[usize::from(slot)];
        let StoreTokens::Ids(tokens) = request.tokens else {
            return Ok(Self { layer, placing: Placing::Nameless });
        };
        if tokens.is_empty() {
            return Ok(Self { layer, placing: Placing::Nameless });
        }
        let size = BlockSize::new(request.block_size);
        let lines_up =
            size.is_some_and(|size| request.names.len().checked_mul(size.as_usize()) == Some(tokens.len()));
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
    let next = request.names.windows(2).any(|pair| pair[0] == pair[1]);
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

/// Applies announcements of one rank.
struct Announcer<'a> {
    tree: &'a mut Tree,
    rank: &'a mut Rank,
    index: u32,
    hasher: &'a mut LocalHasher,
    block_size: BlockSize,
}

impl Announcer<'_> {
    fn store(&mut self, request: &StoreRequest<'_>, plan: &Plan) -> Stored {
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
        let StoreTokens::Ids(tokens) = request.tokens else { return Stored::default() };
        let mut stored = Stored::default();
        let mut pending = None;
        let mut cursor = match request.parent {
            None => Cursor::Root,
            Some(parent) => self.resolve(parent).map_or_else(|| Cursor::Missing(parent.clone()), Cursor::At),
        };
        let no_keys = ContentKeys::new();
        for (at, (name, block)) in request.names.iter().zip(tokens.chunks_exact(tokens_per_name)).enumerate()
        {
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
                    stored.orphans_dropped += u64::from(!self.keep_orphan(layer, name, &parent, block, keys));
                    cursor = Cursor::Missing(name.clone());
                    continue;
                }
            };
            let place = self.place(request.isolation, parent, layer, name, block, keys, &mut pending);
            cursor = Cursor::At(place);
        }
        self.flush(layer, &mut pending);
        stored
    }

    /// Finds or makes the block and has the rank hold it.
    #[allow(clippy::too_many_arguments)]
    fn place(
        &mut self,
        isolation: Isolation,
        parent: Option<Place>,
        layer: Layer,
        name: &BlockHash,
        tokens: &[u32],
        keys: &ContentKeys,
        pending: &mut Option<Pending>,
    ) -> Place {
        let place = match self.extend(isolation, parent, layer, name, tokens, keys) {
            Extended::Appended(place) => {
                self.count(layer, 1);
                place
            }
            Extended::Known(place) | Extended::NewRun(place) => {
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
        tokens: &[u32],
        keys: &ContentKeys,
    ) -> Extended {
        let isolation = parent.map_or(isolation, |place| self.tree.run(place.run).isolation);
        let last = tokens.len() - self.block_size.as_usize();
        for implied in tokens[..last].chunks_exact(self.block_size.as_usize()) {
            let local = self.hasher.hash(isolation, implied, &[]);
            let (Extended::Known(place) | Extended::NewRun(place) | Extended::Appended(place)) =
                self.tree.extend(parent, isolation, local, None, None);
            parent = Some(place);
        }
        let local = self.hasher.hash(isolation, &tokens[last..], keys);
        // An appended block is held by the run's growth, so its name must be a plain one.
        let plain = self.rank.announced(layer, name).is_none();
        self.tree.extend(parent, isolation, local, Some(name), plain.then_some((layer, self.index)))
    }

    /// Whether holding `place` as `name` is said by coverage alone: the tree's own name, nothing explicit
    /// about name or block, and not held yet.
    fn is_plain_hold(&self, layer: Layer, name: &BlockHash, place: Place) -> bool {
        self.rank.announced(layer, name).is_none()
            && self.tree.is_canonical(place, name)
            && !self.covers(layer, place)
    }

    fn covers(&self, layer: Layer, place: Place) -> bool {
        self.tree.run(place.run).covers(layer, self.index, place.offset)
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

    fn cover(&mut self, layer: Layer, run: RunId, from: u32, to: u32) {
        let target = self.tree.run_mut(run);
        let len = target.len();
        let added = target.coverage_mut(layer).add(self.index, from, to, len);
        self.rank.runs.insert(run);
        self.count(layer, i64::from(added));
    }

    fn uncover(&mut self, layer: Layer, place: Place) {
        let run = self.tree.run_mut(place.run);
        let len = run.len();
        let gone = run.coverage_mut(layer).remove(self.index, place.offset, place.offset + 1, len);
        run.drop_empty_layers();
        if !run.covers_any(self.index) {
            self.rank.runs.remove(&place.run);
        }
        self.tree.trim(place.run);
        self.count(layer, -i64::from(gone));
    }

    fn count(&mut self, layer: Layer, blocks: i64) {
        let total = if layer == Layer::HOT { &mut self.rank.tree_size } else { &mut self.rank.cold_blocks };
        *total = total.saturating_add_signed(blocks);
    }

    // === announcements ===

    /// One more announcement of `place` as `name`.
    fn announce(&mut self, layer: Layer, name: &BlockHash, place: Place) {
        if self.rank.announced(layer, name).is_none() {
            let canonical = self.tree.is_canonical(place, name) || self.tree.adopt_name(place, name);
            if canonical && !self.covers(layer, place) {
                return self.cover(layer, place.run, place.offset, place.offset + 1);
            }
        }
        self.push_explicit(layer, name, Content::Placed(place));
    }

    fn push_explicit(&mut self, layer: Layer, name: &BlockHash, content: Content) {
        // The name may be held plainly, for this content (a second announcement) or for another one.
        if self.rank.announced(layer, name).is_none()
            && let Some(of) = self.tree.named(name).filter(|of| self.holds_plainly(layer, *of))
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
        let Some(name) = self.tree.canonical(place) else { return };
        let announced = Announced::from_elem((Content::Placed(place), 1), 1);
        self.rank.explicit.insert(NameKey { layer, name }, announced);
        self.rank.pinned.insert((layer, place), 1);
    }

    /// The opposite, when coverage alone says it all again.
    fn make_plain(&mut self, layer: Layer, place: Place) {
        if self.rank.pinned.get(&(layer, place)) != Some(&1) {
            return;
        }
        let Some(name) = self.tree.canonical(place) else { return };
        let key = NameRef { layer, name: &name };
        if self.rank.explicit.get(&key).is_some_and(|held| held[..] == [(Content::Placed(place), 1)]) {
            self.rank.explicit.remove(&key);
            self.rank.pinned.remove(&(layer, place));
        }
    }

    /// One announcement less; `false` if the rank does not hold the name.
    fn retract(&mut self, layer: Layer, name: &BlockHash) -> bool {
        let key = NameRef { layer, name };
        let Some(announced) = self.rank.explicit.get_mut(&key) else {
            let plain = self.tree.named(name).filter(|place| self.holds_plainly(layer, *place));
            if let Some(place) = plain {
                self.uncover(layer, place);
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
            self.uncover(layer, place);
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
        let named = self.tree.named(name);
        if self.rank.explicit.is_empty() {
            let place = named?;
            let mut layers = self.tree.run(place.run).layers_of(self.index);
            return layers.any(|(_, coverage)| coverage.contains(self.index, place.offset)).then_some(place);
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
        tokens: &[u32],
        keys: &ContentKeys,
    ) -> bool {
        let kept = self.rank.orphans.find(name, parent, tokens, keys).or_else(|| {
            self.rank.orphans.insert(Orphan {
                name: name.clone(),
                parent: parent.clone(),
                tokens: tokens.into(),
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
        let isolation = self.tree.run(parent.run).isolation;
        let extended =
            self.extend(isolation, Some(parent), first, &orphan.name, &orphan.tokens, &orphan.keys);
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

/// Takes the rank out of a run, in all layers.
fn release_run(tree: &mut Tree, id: RunId, index: u32) {
    let run = tree.run_mut(id);
    let len = run.len();
    run.hot.remove_rank(index, len);
    for (_, coverage) in &mut run.cold {
        coverage.remove_rank(index, len);
    }
    run.drop_empty_layers();
    tree.trim(id);
}

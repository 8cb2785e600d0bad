//! What one rank called its blocks, beyond what the tree's own names say.
//!
//! Normally a rank holds a block under the tree's own name for it, announced once: then the tree's coverage
//! says all there is to say and this file holds nothing. Everything else is *explicit*: other names for a
//! content, one name for several contents, several announcements, blocks whose place is not known.

use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::{Equivalent, HashMap, HashSet};
use smallvec::SmallVec;

use super::roster::Gauge;
use super::tree::{Layer, Place, RunId};
use super::{Announcements, GroupTag};
use crate::block::{AttentionKind, BlockHash, BlockSize, ContentKey, ContentKeys, LocalBlockHash, Tier};

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Content {
    /// A block of the tree.
    Placed(Place),
    /// A block whose parent is not known yet.
    Orphan(OrphanId),
    /// Nothing but a name: a placeholder, or tokens that cannot be placed.
    Nameless,
}

/// Contents that were announced under one name and not removed, oldest first. A removal takes the last.
pub(super) type Announced = SmallVec<[(Content, u32); 1]>;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct NameKey {
    pub(super) layer: Layer,
    pub(super) name: BlockHash,
}

/// [`NameKey`] by reference.
#[derive(PartialEq, Eq, Hash)]
pub(super) struct NameRef<'a> {
    pub(super) layer: Layer,
    pub(super) name: &'a BlockHash,
}

impl Equivalent<NameKey> for NameRef<'_> {
    fn equivalent(&self, key: &NameKey) -> bool {
        self.layer == key.layer && *self.name == key.name
    }
}

/// An attention group of a rank. Slot 0 is reserved for the first full-attention group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Group {
    pub(super) idx: Option<u32>,
    pub(super) kind: AttentionKind,
    /// Tokens per block; `None` until a store said so.
    pub(super) block_size: Option<BlockSize>,
}

/// Groups of one rank. vLLM's largest hybrid models have fewer than ten; the slot must fit a layer.
const MAX_GROUPS: usize = 32;

/// Runs, announcements, groups and orphans of one rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) generation: u32,
    pub(super) announcements: Announcements,
    pub(super) groups: SmallVec<[Group; 1]>,
    /// Runs of which the rank holds anything, so that a clear costs the rank's own blocks.
    pub(super) runs: HashSet<RunId, RandomState>,
    pub(super) explicit: HashMap<NameKey, Announced, RandomState>,
    /// Places that are held through explicit names alone, and how many announcements hold them.
    pub(super) pinned: HashMap<(Layer, Place), u32, RandomState>,
    pub(super) orphans: Orphans,
    /// What readers see of the rank beside its blocks.
    pub(super) gauge: Arc<Gauge>,
    /// Readers were told of the rank's groups.
    pub(super) shown_layered: bool,
    /// Blocks held in all other layers.
    pub(super) cold_blocks: u64,
    /// Names without a block in a windowed group, which a later store of the same name may place.
    pub(super) nameless: u64,
}

impl Rank {
    pub(super) fn new(generation: u32, announcements: Announcements) -> Self {
        Self {
            generation,
            announcements,
            groups: SmallVec::from_elem(Group { idx: None, kind: AttentionKind::Full, block_size: None }, 1),
            runs: HashSet::default(),
            explicit: HashMap::default(),
            pinned: HashMap::default(),
            orphans: Orphans::default(),
            gauge: Arc::default(),
            shown_layered: false,
            cold_blocks: 0,
            nameless: 0,
        }
    }

    /// The same rank in an index whose runs have other numbers.
    pub(super) fn carried_over(&self, renamed: impl Fn(Place) -> Place) -> Self {
        let run = |id: &RunId| renamed(Place { run: *id, offset: 0 }).run;
        let content = |content: Content| match content {
            Content::Placed(place) => Content::Placed(renamed(place)),
            other => other,
        };
        let announced = |announced: &Announced| -> Announced {
            announced.iter().map(|(of, count)| (content(*of), *count)).collect()
        };
        let gauge = Arc::new(Gauge::default());
        gauge.add(i64::try_from(self.gauge.blocks()).unwrap_or(i64::MAX));
        Self {
            generation: self.generation,
            announcements: self.announcements,
            groups: self.groups.clone(),
            runs: self.runs.iter().map(run).collect(),
            explicit: self.explicit.iter().map(|(key, of)| (key.clone(), announced(of))).collect(),
            pinned: self.pinned.iter().map(|((layer, of), count)| ((*layer, renamed(*of)), *count)).collect(),
            orphans: self.orphans.clone(),
            gauge,
            shown_layered: false,
            cold_blocks: self.cold_blocks,
            nameless: self.nameless,
        }
    }

    /// Blocks and names that the rank holds, for the bound on hostile growth.
    pub(super) fn held(&self) -> u64 {
        self.gauge.blocks() + self.cold_blocks + self.explicit.len() as u64
    }

    /// Whether anything but device blocks of one full-attention group is held.
    pub(super) fn is_layered(&self) -> bool {
        self.cold_blocks > 0 || self.groups.len() > 1
    }

    /// The slot of the group that a store names, made if it is new; `None` past the limit on groups.
    ///
    /// Where no kind is given, group 0 or no group is full attention and others are left out.
    pub(super) fn slot_for_store(&mut self, tag: GroupTag) -> Option<u8> {
        let idx = tag.idx.unwrap_or(0);
        if let Some(slot) = self.slot_of(idx) {
            let group = &mut self.groups[usize::from(slot)];
            // The first kind stays for slot 0: its layer is what queries ask about first.
            if slot > 0
                && let Some(kind) = tag.kind
            {
                group.kind = kind;
            }
            return Some(slot);
        }
        let assumed = if idx == 0 { AttentionKind::Full } else { AttentionKind::Unknown };
        let group = Group { idx: Some(idx), kind: tag.kind.unwrap_or(assumed), block_size: None };
        if group.kind == AttentionKind::Full && self.groups[0].idx.is_none() {
            self.groups[0] = group;
            return Some(0);
        }
        if self.groups.len() >= MAX_GROUPS {
            return None;
        }
        self.groups.push(group);
        u8::try_from(self.groups.len() - 1).ok()
    }

    /// The slot of a group that has stored something; removals carry only the number.
    pub(super) fn slot_of(&self, idx: u32) -> Option<u8> {
        let at = self.groups.iter().position(|group| group.idx == Some(idx))?;
        u8::try_from(at).ok()
    }

    /// What the name stands for in this layer, if it is explicit.
    pub(super) fn announced(&self, layer: Layer, name: &BlockHash) -> Option<&Announced> {
        if self.explicit.is_empty() {
            return None;
        }
        self.explicit.get(&NameRef { layer, name })
    }

    /// All layers that the rank may hold something in.
    pub(super) fn layers(&self) -> impl Iterator<Item = Layer> + use<> {
        // At most MAX_GROUPS slots, so the count fits.
        #[allow(clippy::cast_possible_truncation)]
        let slots = self.groups.len() as u8;
        Tier::ALL.into_iter().flat_map(move |tier| (0..slots).map(move |slot| Layer { tier, slot }))
    }

    /// Forgets everything but what the rank's engine is: its groups and the way it announces.
    pub(super) fn forget(&mut self) {
        self.runs = HashSet::default();
        self.explicit = HashMap::default();
        self.pinned = HashMap::default();
        self.orphans = Orphans::default();
        self.gauge.reset();
        self.cold_blocks = 0;
        self.nameless = 0;
    }
}

/// Names one orphan of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct OrphanId(u32);

/// What an orphan stands for: its tokens, since the namespace that its hash needs belongs to the chain; or the
/// hash, where the announcer knew it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum OrphanContent {
    Tokens(Box<[u32]>),
    /// A block with tokens behind it that its name covers too.
    Window(Box<[u32]>),
    Local(LocalBlockHash),
}

/// A block whose parent is not known.
#[derive(Clone, Debug)]
pub(super) struct Orphan {
    pub(super) name: BlockHash,
    pub(super) parent: BlockHash,
    pub(super) content: OrphanContent,
    pub(super) keys: ContentKeys,
    /// Announcements per layer.
    pub(super) holds: SmallVec<[(Layer, u32); 1]>,
}

impl Orphan {
    /// A rough size: tokens, keys, names and table entries.
    fn bytes(&self) -> usize {
        let tokens = match &self.content {
            OrphanContent::Tokens(tokens) | OrphanContent::Window(tokens) => tokens.len(),
            OrphanContent::Local(_) => 0,
        };
        tokens * 4 + self.keys.iter().map(ContentKey::bytes).sum::<usize>() + 192
    }
}

/// The orphans of one rank, by the parent that they wait for.
#[derive(Clone, Default, Debug)]
pub(super) struct Orphans {
    slots: Vec<Option<Orphan>>,
    free: Vec<OrphanId>,
    waiting: HashMap<BlockHash, SmallVec<[OrphanId; 1]>, RandomState>,
    bytes: usize,
}

/// Orphans kept per rank. A complete stream has none or a few; 4 MiB is 50,000 blocks of 16 tokens, more
/// than an engine stores between a lost batch and its replay.
const MAX_ORPHAN_BYTES: usize = 4 << 20;

impl Orphans {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn get(&self, id: OrphanId) -> Option<&Orphan> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: OrphanId) -> Option<&mut Orphan> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// The orphan with this name, parent and content, if it is kept.
    pub(super) fn find(
        &self,
        name: &BlockHash,
        parent: &BlockHash,
        content: &OrphanContent,
        keys: &ContentKeys,
    ) -> Option<OrphanId> {
        let same =
            |orphan: &Orphan| orphan.name == *name && orphan.content == *content && orphan.keys == *keys;
        self.waiting.get(parent)?.iter().copied().find(|&id| self.get(id).is_some_and(same))
    }

    /// Keeps an orphan; `None` when the rank keeps too many already.
    pub(super) fn insert(&mut self, orphan: Orphan) -> Option<OrphanId> {
        if self.bytes + orphan.bytes() > MAX_ORPHAN_BYTES {
            return None;
        }
        self.bytes += orphan.bytes();
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                self.slots.push(None);
                OrphanId(u32::try_from(self.slots.len() - 1).ok()?)
            }
        };
        self.waiting.entry(orphan.parent.clone()).or_default().push(id);
        self.slots[id.0 as usize] = Some(orphan);
        Some(id)
    }

    pub(super) fn remove(&mut self, id: OrphanId) -> Option<Orphan> {
        let orphan = self.slots.get_mut(id.0 as usize)?.take()?;
        self.bytes -= orphan.bytes();
        self.free.push(id);
        if let Some(waiting) = self.waiting.get_mut(&orphan.parent) {
            waiting.retain(|of| *of != id);
            if waiting.is_empty() {
                self.waiting.remove(&orphan.parent);
            }
        }
        if self.waiting.is_empty() {
            *self = Self::default();
        }
        Some(orphan)
    }

    /// One orphan that waits for this parent.
    pub(super) fn next_child(&self, parent: &BlockHash) -> Option<OrphanId> {
        self.waiting.get(parent)?.first().copied()
    }
}

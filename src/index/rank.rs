//! What one rank called its blocks, beyond what the tree's own names say.
//!
//! Normally a rank holds a block under the tree's own name for it, announced once: then the tree's coverage
//! says all there is to say and this file holds nothing. Everything else is *explicit*: other names for a
//! content, several announcements, parts of chunks, blocks whose place is not known.
//!
//! A name says the prefix that ends at it: while a rank holds a placed name, that name has one place, in all
//! layers.

use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;

use super::RankSettings;
use super::groups::Groups;
use super::remembered::Remembered;
use super::roster::Gauge;
use super::tree::{Layer, Place, RunId};
use crate::block::{BlockHash, ContentKey, ContentKeys, LocalBlockHash, Tier};

/// What a name's announcement is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shape {
    /// A block that is usable by itself.
    Block,
    /// A block that is usable only with the rest of its chunk.
    Part,
    /// A chunk of several blocks under one name: that of the prefix that ends with it.
    Chunk,
}

/// Announcements of one name in one layer and shape that were not removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Said {
    pub(super) layer: Layer,
    pub(super) shape: Shape,
    /// The block, or a chunk's last one; `None` while it is not known.
    pub(super) place: Option<Place>,
    pub(super) count: u32,
}

/// All that was said of one name, oldest first. A removal takes the last of its layer.
#[derive(Clone, Default, Debug)]
pub(super) struct Named {
    pub(super) said: SmallVec<[Said; 1]>,
    /// Chunks that are there for as long as this name is.
    pub(super) chunks: SmallVec<[ChunkId; 1]>,
}

impl Named {
    /// The block that the name means.
    pub(super) fn block(&self) -> Option<Place> {
        self.said.iter().filter(|said| said.shape != Shape::Chunk).find_map(|said| said.place)
    }

    /// The last block of the chunk that the name means.
    pub(super) fn chunk(&self) -> Option<Place> {
        self.said.iter().filter(|said| said.shape == Shape::Chunk).find_map(|said| said.place)
    }

    pub(super) fn is_in(&self, layer: Layer) -> bool {
        self.said.iter().any(|said| said.layer == layer)
    }

    pub(super) fn waits(&self) -> bool {
        self.said.iter().any(|said| said.place.is_none())
    }
}

/// Names one chunk of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct ChunkId(u32);

/// Several blocks that are usable together or not at all. It is there while all its names are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Chunk {
    pub(super) layer: Layer,
    /// How its names were said. A name may be said in both shapes of one layer, and then ends a chunk in each.
    pub(super) shape: Shape,
    pub(super) names: SmallVec<[BlockHash; 1]>,
    /// Blocks that it has, as far as the prompt goes back so far.
    pub(super) len: u32,
    /// Its last block, once that is placed.
    pub(super) end: Option<Place>,
}

/// The chunks of one rank.
#[derive(Clone, Default, Debug)]
pub(super) struct Chunks {
    slots: Vec<Option<Chunk>>,
    free: Vec<ChunkId>,
}

impl Chunks {
    pub(super) fn get(&self, id: ChunkId) -> Option<&Chunk> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: ChunkId) -> Option<&mut Chunk> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// Keeps a chunk. A rank has fewer than it has names, which are bounded.
    pub(super) fn insert(&mut self, chunk: Chunk) -> ChunkId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            // Bounded by the names of a rank.
            #[allow(clippy::cast_possible_truncation)]
            ChunkId(self.slots.len() as u32 - 1)
        });
        self.slots[id.0 as usize] = Some(chunk);
        id
    }

    pub(super) fn remove(&mut self, id: ChunkId) -> Option<Chunk> {
        let chunk = self.slots.get_mut(id.0 as usize)?.take()?;
        self.free.push(id);
        if self.free.len() == self.slots.len() {
            *self = Self::default();
        }
        Some(chunk)
    }

    pub(super) fn ids(&self) -> Vec<ChunkId> {
        (0..).map(ChunkId).zip(&self.slots).filter(|(_, chunk)| chunk.is_some()).map(|(id, _)| id).collect()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Chunk> {
        self.slots.iter_mut().flatten()
    }
}

/// What a lower tier took in since it was empty.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Intake {
    /// Names and blocks that were new to it.
    pub(super) names: u64,
    /// Something was removed from it.
    pub(super) gave_back: bool,
}

/// Runs, announcements, groups and orphans of one rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) generation: u32,
    pub(super) settings: RankSettings,
    pub(super) groups: Groups,
    /// Runs of which the rank holds anything, so that a clear costs the rank's own blocks.
    pub(super) runs: HashSet<RunId, RandomState>,
    pub(super) explicit: HashMap<BlockHash, Named, RandomState>,
    /// Places that are held through explicit names alone, and how many announcements hold them.
    pub(super) pinned: HashMap<(Layer, Place), u32, RandomState>,
    pub(super) chunks: Chunks,
    pub(super) orphans: Orphans,
    pub(super) remembered: Remembered,
    pub(super) intake: [Intake; Tier::ALL.len()],
    /// What readers see of the rank beside its blocks.
    pub(super) gauge: Arc<Gauge>,
    /// Readers were told of the rank's groups.
    pub(super) shown_layered: bool,
    /// Blocks held in all other layers.
    pub(super) cold_blocks: u64,
    /// Announcements by shape and layer that have no place yet.
    pub(super) waiting: u64,
}

impl Rank {
    pub(super) fn new(generation: u32, settings: RankSettings) -> Self {
        Self {
            generation,
            settings,
            groups: Groups::default(),
            runs: HashSet::default(),
            explicit: HashMap::default(),
            pinned: HashMap::default(),
            chunks: Chunks::default(),
            orphans: Orphans::default(),
            remembered: Remembered::default(),
            intake: Default::default(),
            gauge: Arc::default(),
            shown_layered: false,
            cold_blocks: 0,
            waiting: 0,
        }
    }

    /// The same rank in an index whose runs have other numbers.
    pub(super) fn carried_over(&self, renamed: impl Fn(Place) -> Place) -> Self {
        let run = |id: &RunId| renamed(Place { run: *id, offset: 0 }).run;
        let mut explicit = self.explicit.clone();
        for said in explicit.values_mut().flat_map(|named| &mut named.said) {
            said.place = said.place.map(&renamed);
        }
        let mut chunks = self.chunks.clone();
        chunks.iter_mut().for_each(|chunk| chunk.end = chunk.end.map(&renamed));
        Self {
            generation: self.generation,
            settings: self.settings,
            groups: self.groups.clone(),
            runs: self.runs.iter().map(run).collect(),
            explicit,
            pinned: self.pinned.iter().map(|((layer, of), count)| ((*layer, renamed(*of)), *count)).collect(),
            chunks,
            orphans: self.orphans.clone(),
            remembered: self.remembered.renamed(&renamed),
            intake: self.intake,
            gauge: Arc::new(self.gauge.copied()),
            shown_layered: false,
            cold_blocks: self.cold_blocks,
            waiting: self.waiting,
        }
    }

    /// Blocks and names that the rank holds, for the bound on hostile growth.
    pub(super) fn held(&self) -> u64 {
        self.gauge.blocks() + self.cold_blocks + self.explicit.len() as u64
    }

    /// Whether anything but device blocks of one full-attention group is held.
    pub(super) fn is_layered(&self) -> bool {
        self.cold_blocks > 0 || self.groups.slots() > 1
    }

    /// Whether the rank holds nothing at all, not even a name.
    pub(super) fn is_empty(&self) -> bool {
        self.explicit.is_empty() && self.gauge.blocks() == 0 && self.cold_blocks == 0
    }

    /// What was said of the name, if it is explicit.
    pub(super) fn named(&self, name: &BlockHash) -> Option<&Named> {
        if self.explicit.is_empty() {
            return None;
        }
        self.explicit.get(name)
    }

    /// Whether the name is explicit in this layer.
    pub(super) fn is_said(&self, layer: Layer, name: &BlockHash) -> bool {
        self.named(name).is_some_and(|named| named.is_in(layer))
    }

    /// Places that are kept alive for the rank beside what it covers.
    pub(super) fn kept(&self) -> impl Iterator<Item = Place> {
        let said = self.explicit.values().flat_map(|named| &named.said);
        let parts = said.filter(|said| said.shape != Shape::Block).filter_map(|said| said.place);
        parts.chain(self.remembered.places())
    }

    /// Forgets what was said of one tier. Places that were kept alive for it are added to `kept`; what the rank
    /// covers there is the caller's.
    pub(super) fn forget_tier(&mut self, tier: Tier, kept: &mut Vec<Place>) {
        self.pinned.retain(|(layer, _), _| layer.tier != tier);
        for id in self.chunks.ids() {
            if self.chunks.get(id).is_none_or(|chunk| chunk.layer.tier != tier) {
                continue;
            }
            for name in self.chunks.remove(id).into_iter().flat_map(|chunk| chunk.names) {
                if let Some(named) = self.explicit.get_mut(&name) {
                    named.chunks.retain(|of| *of != id);
                }
            }
        }
        let (waiting, orphans) = (&mut self.waiting, &mut self.orphans);
        self.explicit.retain(|name, named| {
            let waited = named.waits();
            named.said.retain(|said| {
                let goes = said.layer.tier == tier;
                if goes && said.place.is_none() {
                    *waiting -= 1;
                }
                if goes && said.shape != Shape::Block {
                    kept.extend(said.place);
                }
                !goes
            });
            if waited && !named.waits() {
                orphans.drop_named(name);
            }
            !named.said.is_empty()
        });
        self.intake[tier as usize] = Intake::default();
        self.gauge.reset_tier(tier);
    }

    /// Forgets everything but how the rank is set up: a process that restarted has no groups yet either.
    pub(super) fn forget(&mut self) {
        let gauge = Arc::clone(&self.gauge);
        gauge.reset();
        let remembered = self.remembered.emptied();
        let shown_layered = self.shown_layered;
        *self = Self { gauge, remembered, shown_layered, ..Self::new(self.generation, self.settings) };
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

/// What a name may turn out to mean: a block whose parent is not known.
#[derive(Clone, Debug)]
pub(super) struct Orphan {
    pub(super) name: BlockHash,
    pub(super) parent: BlockHash,
    pub(super) content: OrphanContent,
    pub(super) keys: ContentKeys,
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
    by_name: HashMap<BlockHash, SmallVec<[OrphanId; 1]>, RandomState>,
    bytes: usize,
}

/// Orphans kept per rank. A complete stream has none or a few; 4 MiB is 50,000 blocks of 16 tokens, more
/// than an engine stores between a lost batch and its replay.
const MAX_ORPHAN_BYTES: usize = 4 << 20;

impl Orphans {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn get(&self, id: OrphanId) -> Option<&Orphan> {
        self.slots.get(id.0 as usize)?.as_ref()
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
        self.by_name.entry(orphan.name.clone()).or_default().push(id);
        self.slots[id.0 as usize] = Some(orphan);
        Some(id)
    }

    pub(super) fn remove(&mut self, id: OrphanId) -> Option<Orphan> {
        let orphan = self.slots.get_mut(id.0 as usize)?.take()?;
        self.bytes -= orphan.bytes();
        self.free.push(id);
        for (ids, key) in [(&mut self.waiting, &orphan.parent), (&mut self.by_name, &orphan.name)] {
            if let Some(of_key) = ids.get_mut(key) {
                of_key.retain(|of| *of != id);
                if of_key.is_empty() {
                    ids.remove(key);
                }
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

    /// Drops all that this name might have meant.
    pub(super) fn drop_named(&mut self, name: &BlockHash) {
        for id in self.by_name.get(name).cloned().unwrap_or_default() {
            self.remove(id);
        }
    }
}

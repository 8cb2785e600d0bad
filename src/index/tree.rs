//! The radix tree of content: runs of blocks, what hangs behind what, and which name leads where.
//!
//! A run is a stretch of consecutive blocks that lie contiguously. A branch hangs at (run, offset), so it
//! splits nothing, and a block's place never changes while anyone holds it. Runs are cut where nobody
//! reaches any more, and go when they are empty; both without recursion.

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use smallvec::SmallVec;
use std::hash::BuildHasher;

use super::coverage::Coverage;
use crate::block::{BlockHash, Isolation, LocalBlockHash, SequenceHash, Tier};

/// A run's number, reused after the run is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct RunId(pub(super) u32);

/// A block's place: fixed for as long as anyone holds the block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Place {
    pub(super) run: RunId,
    pub(super) offset: u32,
}

/// Where copies of blocks are counted apart: a tier, and an attention group by its slot within the rank
/// (slot 0 is the first full-attention group).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(super) struct Layer {
    pub(super) tier: Tier,
    pub(super) slot: u8,
}

impl Layer {
    /// The layer that queries ask about first; the others cost nothing where they are absent.
    pub(super) const HOT: Self = Self { tier: Tier::Device, slot: 0 };
}

/// Names of a run's blocks, as the rank gave them that stored each block first.
///
/// A block that was only ever implied (the inner part of a larger group's block) has the empty name: 0 with
/// [`Run::irregular`] set, or no bytes.
#[derive(Clone, Debug)]
enum Names {
    Ints(Vec<u64>),
    Bytes(Vec<Box<[u8]>>),
}

impl Names {
    fn of_kind(name: Option<&BlockHash>) -> Self {
        match name {
            Some(BlockHash::Bytes(_)) => Self::Bytes(Vec::new()),
            _ => Self::Ints(Vec::new()),
        }
    }

    fn suits(&self, name: Option<&BlockHash>) -> bool {
        matches!(
            (self, name),
            (_, None)
                | (Self::Ints(_), Some(BlockHash::Int(_)))
                | (Self::Bytes(_), Some(BlockHash::Bytes(_)))
        )
    }

    fn push(&mut self, name: Option<&BlockHash>) {
        match (self, name) {
            (Self::Ints(names), Some(BlockHash::Int(name))) => names.push(*name),
            (Self::Bytes(names), Some(BlockHash::Bytes(name))) => names.push(name.clone()),
            (Self::Ints(names), _) => names.push(0),
            (Self::Bytes(names), _) => names.push(Box::default()),
        }
    }

    fn set(&mut self, offset: u32, name: &BlockHash) {
        match (self, name) {
            (Self::Ints(names), BlockHash::Int(name)) => names[offset as usize] = *name,
            (Self::Bytes(names), BlockHash::Bytes(name)) => names[offset as usize].clone_from(name),
            _ => {}
        }
    }

    fn is(&self, offset: u32, name: &BlockHash) -> bool {
        match (self, name) {
            (Self::Ints(names), BlockHash::Int(name)) => names.get(offset as usize) == Some(name),
            (Self::Bytes(names), BlockHash::Bytes(name)) => names.get(offset as usize) == Some(name),
            _ => false,
        }
    }

    fn get(&self, offset: u32) -> BlockHash {
        match self {
            Self::Ints(names) => BlockHash::Int(names[offset as usize]),
            Self::Bytes(names) => BlockHash::Bytes(names[offset as usize].clone()),
        }
    }

    fn truncate(&mut self, len: usize) {
        match self {
            Self::Ints(names) => give_back(names, len),
            Self::Bytes(names) => give_back(names, len),
        }
    }
}

/// Consecutive blocks and who holds them.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// The block before the first; `None` at the root.
    pub(super) parent: Option<Place>,
    pub(super) isolation: Isolation,
    pub(super) locals: Vec<LocalBlockHash>,
    pub(super) sequences: Vec<SequenceHash>,
    names: Names,
    /// Some block's name leads elsewhere (another content has it) or nowhere.
    irregular: bool,
    pub(super) hot: Coverage,
    pub(super) cold: Vec<(Layer, Coverage)>,
    /// How many other runs hang behind which offset, by offset.
    children: SmallVec<[(u32, u32); 2]>,
}

impl Run {
    // A run is built from events of bounded length and cut long before 2^32 blocks.
    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn len(&self) -> u32 {
        self.locals.len() as u32
    }

    pub(super) fn coverage(&self, layer: Layer) -> Option<&Coverage> {
        if layer == Layer::HOT {
            return Some(&self.hot);
        }
        self.cold.iter().find(|(of, _)| *of == layer).map(|(_, coverage)| coverage)
    }

    pub(super) fn coverage_mut(&mut self, layer: Layer) -> &mut Coverage {
        if layer == Layer::HOT {
            return &mut self.hot;
        }
        let at = match self.cold.iter().position(|(of, _)| *of == layer) {
            Some(at) => at,
            None => {
                self.cold.push((layer, Coverage::default()));
                self.cold.len() - 1
            }
        };
        &mut self.cold[at].1
    }

    pub(super) fn covers(&self, layer: Layer, rank: u32, offset: u32) -> bool {
        self.coverage(layer).is_some_and(|coverage| coverage.contains(rank, offset))
    }

    pub(super) fn covers_any(&self, rank: u32) -> bool {
        self.hot.contains_any(rank) || self.cold.iter().any(|(_, coverage)| coverage.contains_any(rank))
    }

    /// Layers that nobody holds anything in take no room.
    pub(super) fn drop_empty_layers(&mut self) {
        self.cold.retain(|(_, coverage)| !coverage.is_empty());
        if self.cold.is_empty() && self.cold.capacity() > 0 {
            self.cold = Vec::new();
        }
    }

    /// The layers in which the rank holds something of this run.
    pub(super) fn layers_of(&self, rank: u32) -> impl Iterator<Item = (Layer, &Coverage)> {
        std::iter::once((Layer::HOT, &self.hot))
            .chain(self.cold.iter().map(|(layer, coverage)| (*layer, coverage)))
            .filter(move |(_, coverage)| coverage.contains_any(rank))
    }

    fn needed(&self) -> u32 {
        let len = self.len();
        let held = self.cold.iter().map(|(_, coverage)| coverage.reach(len)).max().unwrap_or_default();
        let behind = self.children.last().map_or(0, |(offset, _)| offset + 1);
        held.max(self.hot.reach(len)).max(behind)
    }

    fn add_child(&mut self, offset: u32) {
        match self.children.binary_search_by_key(&offset, |(at, _)| *at) {
            Ok(at) => self.children[at].1 += 1,
            Err(at) => self.children.insert(at, (offset, 1)),
        }
    }

    fn remove_child(&mut self, offset: u32) {
        if let Ok(at) = self.children.binary_search_by_key(&offset, |(at, _)| *at) {
            self.children[at].1 -= 1;
            if self.children[at].1 == 0 {
                self.children.remove(at);
            }
        }
    }
}

/// Whether a block was already in the tree, and if not, how it came in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Extended {
    /// The content was known.
    Known(Place),
    /// The content is new and lies in a new run, held by nobody yet.
    NewRun(Place),
    /// The content is new and was appended to a run that the storing rank holds whole in this layer: it is
    /// held already.
    Appended(Place),
}

/// The tree and its two tables.
#[derive(Default, Debug)]
pub(super) struct Tree {
    runs: Vec<Option<Run>>,
    free: Vec<RunId>,
    /// First block's sequence hash to run.
    heads: HashTable<RunId>,
    /// Name to place, for all ranks; the names themselves lie in the runs.
    names: HashTable<Place>,
    /// Seeded per process: engine hashes come from peers.
    hasher: RandomState,
    blocks: u64,
}

impl Tree {
    pub(super) fn run(&self, id: RunId) -> &Run {
        match &self.runs[id.0 as usize] {
            Some(run) => run,
            // Ids are handed out by this tree and dropped by their owners before the run goes.
            None => unreachable!("run {} is gone", id.0),
        }
    }

    pub(super) fn run_mut(&mut self, id: RunId) -> &mut Run {
        match &mut self.runs[id.0 as usize] {
            Some(run) => run,
            // As in `run`.
            None => unreachable!("run {} is gone", id.0),
        }
    }

    /// Distinct blocks in the tree.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Runs in the tree.
    pub(super) fn run_count(&self) -> usize {
        self.runs.len() - self.free.len()
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().flatten()
    }

    /// The place behind `parent` with this content, if it is in the tree.
    pub(super) fn child(&self, parent: Option<Place>, local: LocalBlockHash) -> Option<Place> {
        if let Some(parent) = parent {
            let next = parent.offset + 1;
            if self.run(parent.run).locals.get(next as usize) == Some(&local) {
                return Some(Place { run: parent.run, offset: next });
            }
        }
        let sequence = SequenceHash::extend(parent.map(|place| self.sequence(place)), local);
        self.head(sequence).map(|run| Place { run, offset: 0 })
    }

    /// The run that begins with this content.
    pub(super) fn head(&self, sequence: SequenceHash) -> Option<RunId> {
        let hash = self.hasher.hash_one(sequence.0);
        self.heads.find(hash, |&run| self.run(run).sequences[0] == sequence).copied()
    }

    /// The block before this one; `None` for a prompt's first.
    pub(super) fn before(&self, place: Place) -> Option<Place> {
        match place.offset.checked_sub(1) {
            Some(offset) => Some(Place { run: place.run, offset }),
            None => self.run(place.run).parent,
        }
    }

    pub(super) fn sequence(&self, place: Place) -> SequenceHash {
        self.run(place.run).sequences[place.offset as usize]
    }

    /// Finds or makes the block with this content behind `parent`, named `name` (`None`: implied, not
    /// named). With `appender`, a block that is new may be appended to a run that this rank alone holds
    /// whole in this layer; it is then held by the run's growth.
    pub(super) fn extend(
        &mut self,
        parent: Option<Place>,
        isolation: Isolation,
        local: LocalBlockHash,
        name: Option<&BlockHash>,
        appender: Option<(Layer, u32)>,
    ) -> Extended {
        if let Some(known) = self.child(parent, local) {
            return Extended::Known(known);
        }
        let sequence = SequenceHash::extend(parent.map(|place| self.sequence(place)), local);
        if let (Some(parent), Some(name), Some((layer, rank))) = (parent, name, appender)
            && self.may_append(parent, name, layer, rank)
        {
            return Extended::Appended(self.append(parent.run, local, sequence, name, layer, rank));
        }
        Extended::NewRun(self.new_run(parent, isolation, local, sequence, name))
    }

    /// Appending keeps a conversation in one run; a run that others hold whole would turn them all into
    /// partial holders, so it branches instead. A name that leads elsewhere would not be a plain hold.
    fn may_append(&self, parent: Place, name: &BlockHash, layer: Layer, rank: u32) -> bool {
        let run = self.run(parent.run);
        parent.offset + 1 == run.len()
            && run.names.suits(Some(name))
            && run.coverage(layer).is_some_and(|coverage| coverage.full.is_only(rank))
            && run.children.last().is_none_or(|(offset, _)| *offset < parent.offset)
            && self.named(name).is_none()
    }

    fn append(
        &mut self,
        id: RunId,
        local: LocalBlockHash,
        sequence: SequenceHash,
        name: &BlockHash,
        layer: Layer,
        rank: u32,
    ) -> Place {
        let run = self.run_mut(id);
        let offset = run.len();
        run.locals.push(local);
        run.sequences.push(sequence);
        run.names.push(Some(name));
        run.hot.grow(offset, offset + 1, (layer == Layer::HOT).then_some(rank));
        for (of, coverage) in &mut run.cold {
            coverage.grow(offset, offset + 1, (layer == *of).then_some(rank));
        }
        self.blocks += 1;
        let place = Place { run: id, offset };
        self.lead_name(place, Some(name));
        place
    }

    fn new_run(
        &mut self,
        parent: Option<Place>,
        isolation: Isolation,
        local: LocalBlockHash,
        sequence: SequenceHash,
        name: Option<&BlockHash>,
    ) -> Place {
        let mut names = Names::of_kind(name);
        names.push(name);
        let run = Run {
            parent,
            isolation,
            locals: vec![local],
            sequences: vec![sequence],
            names,
            irregular: false,
            hot: Coverage::default(),
            cold: Vec::new(),
            children: SmallVec::new(),
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.runs[id.0 as usize] = Some(run);
                id
            }
            None => {
                // 2^32 runs would be 400 GB of headers.
                #[allow(clippy::cast_possible_truncation)]
                let id = RunId(self.runs.len() as u32);
                self.runs.push(Some(run));
                id
            }
        };
        if let Some(parent) = parent {
            self.run_mut(parent.run).add_child(parent.offset);
        }
        let Self { heads, runs, hasher, .. } = self;
        heads.insert_unique(hasher.hash_one(sequence.0), id, |&run| {
            hasher.hash_one(runs[run.0 as usize].as_ref().map_or(0, |run| run.sequences[0].0))
        });
        self.blocks += 1;
        let place = Place { run: id, offset: 0 };
        self.lead_name(place, name);
        place
    }

    // === names ===

    /// The place that a name leads to. Ranks that use other names for a content keep them themselves.
    pub(super) fn named(&self, name: &BlockHash) -> Option<Place> {
        let hash = self.name_hash(name);
        self.names.find(hash, |&place| self.run(place.run).names.is(place.offset, name)).copied()
    }

    /// Whether `name` is the tree's own name for the block at `place`.
    pub(super) fn is_canonical(&self, place: Place, name: &BlockHash) -> bool {
        let run = self.run(place.run);
        run.names.is(place.offset, name) && (!run.irregular || self.named(name) == Some(place))
    }

    /// The tree's own name for the block at `place`, if it has one.
    pub(super) fn canonical(&self, place: Place) -> Option<BlockHash> {
        let run = self.run(place.run);
        let name = run.names.get(place.offset);
        (!run.irregular || self.named(&name) == Some(place)).then_some(name)
    }

    /// Gives a block that has no name of its own this one, if the name is free.
    pub(super) fn adopt_name(&mut self, place: Place, name: &BlockHash) -> bool {
        let run = self.run(place.run);
        if !run.irregular
            || !run.names.suits(Some(name))
            || self.canonical(place).is_some()
            || self.named(name).is_some()
        {
            return false;
        }
        self.run_mut(place.run).names.set(place.offset, name);
        self.lead_name(place, Some(name));
        true
    }

    fn lead_name(&mut self, place: Place, name: Option<&BlockHash>) {
        let Some(name) = name.filter(|name| self.named(name).is_none()) else {
            self.run_mut(place.run).irregular = true;
            return;
        };
        let hash = self.name_hash(name);
        let Self { names, runs, hasher, .. } = self;
        names.insert_unique(hash, place, |&place| match &runs[place.run.0 as usize] {
            Some(run) => hash_name(hasher, &run.names, place.offset),
            None => 0,
        });
    }

    fn name_hash(&self, name: &BlockHash) -> u64 {
        match name {
            BlockHash::Int(name) => self.hasher.hash_one(name),
            BlockHash::Bytes(name) => self.hasher.hash_one(&**name),
        }
    }

    // === giving back ===

    /// Cuts the run where nobody reaches, and frees it and what it kept alive once it is empty.
    pub(super) fn trim(&mut self, id: RunId) {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let run = self.run(id);
            let (len, needed) = (run.len(), run.needed());
            if needed == len {
                return;
            }
            self.forget_names(id, needed, len);
            self.blocks -= u64::from(len - needed);
            if needed == 0 {
                next = self.free_run(id);
                continue;
            }
            let run = self.run_mut(id);
            give_back(&mut run.locals, needed as usize);
            give_back(&mut run.sequences, needed as usize);
            run.names.truncate(needed as usize);
            run.hot.shrink(needed);
            for (_, coverage) in &mut run.cold {
                coverage.shrink(needed);
            }
        }
    }

    fn forget_names(&mut self, id: RunId, from: u32, to: u32) {
        for offset in from..to {
            let place = Place { run: id, offset };
            let Self { names, runs, hasher, .. } = self;
            let Some(run) = &runs[id.0 as usize] else { return };
            let hash = hash_name(hasher, &run.names, offset);
            if let Ok(entry) = names.find_entry(hash, |&of| of == place) {
                entry.remove();
            }
        }
        let Self { names, runs, hasher, .. } = self;
        shrink_table(names, |&place| match &runs[place.run.0 as usize] {
            Some(run) => hash_name(hasher, &run.names, place.offset),
            None => 0,
        });
    }

    /// Frees an empty run; the parent's run is to be trimmed next.
    fn free_run(&mut self, id: RunId) -> Option<RunId> {
        let sequence = self.run(id).sequences[0];
        let hash = self.hasher.hash_one(sequence.0);
        if let Ok(entry) = self.heads.find_entry(hash, |&run| run == id) {
            entry.remove();
        }
        let run = self.runs[id.0 as usize].take()?;
        self.free.push(id);
        let Self { heads, runs, hasher, .. } = self;
        shrink_table(heads, |&run| {
            hasher.hash_one(runs[run.0 as usize].as_ref().map_or(0, |run| run.sequences[0].0))
        });
        if self.free.len() == self.runs.len() {
            self.runs = Vec::new();
            self.free = Vec::new();
        }
        let parent = run.parent?;
        self.run_mut(parent.run).remove_child(parent.offset);
        Some(parent.run)
    }

    /// Live bytes of runs and tables, estimated from capacities.
    pub(super) fn bytes(&self) -> usize {
        let runs: usize = self
            .runs()
            .map(|run| {
                let names = match &run.names {
                    Names::Ints(names) => names.capacity() * 8,
                    Names::Bytes(names) => names.iter().map(|name| 16 + name.len()).sum(),
                };
                let partial = size_of_val(run.hot.partial());
                names + partial + (run.locals.capacity() + run.sequences.capacity()) * 8
            })
            .sum();
        runs + self.runs.capacity() * size_of::<Option<Run>>()
            + self.names.capacity() * (size_of::<Place>() + 1)
            + self.heads.capacity() * (size_of::<RunId>() + 1)
    }
}

fn hash_name(hasher: &RandomState, names: &Names, offset: u32) -> u64 {
    match names {
        Names::Ints(names) => hasher.hash_one(names[offset as usize]),
        Names::Bytes(names) => hasher.hash_one(&*names[offset as usize]),
    }
}

/// A vector that shrank to under a quarter of its buffer gives the rest back.
fn give_back<T>(items: &mut Vec<T>, len: usize) {
    items.truncate(len);
    if items.capacity() > 8 && len < items.capacity() / 4 {
        items.shrink_to(len * 2);
    }
}

fn shrink_table<T>(table: &mut HashTable<T>, hash: impl Fn(&T) -> u64) {
    if table.capacity() > 64 && table.len() < table.capacity() / 8 {
        table.shrink_to(table.len() * 2, hash);
    }
}

//! The radix tree of content: runs of blocks, what hangs behind what, and which name leads where.
//!
//! A run is a stretch of consecutive blocks that lie contiguously. A branch hangs at (run, offset), so it
//! splits nothing, and a block's place never changes while anyone holds it. Runs are cut where nobody
//! reaches any more, and go when they are empty; both without recursion.

mod chunks;
mod names;

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

use super::coverage::Interval;
use super::dump::{DumpedNames, DumpedRun};
use super::name_table::NameTable;
use super::published::{Pin, Published, SoleWriter};
use super::run::{MAX_RUN, Run};
use super::table::LineTable;
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

/// Bits of an offset in a packed place; [`MAX_RUN`] fits.
const OFFSET_BITS: u32 = 18;

/// Runs that a packed place can tell apart: 28 bits less the one that stands for none. At 200 bytes a run
/// that is 50 GB of runs.
const MAX_RUNS: usize = (1 << 28) - 1;

impl Place {
    /// Never 0.
    fn packed(self) -> u64 {
        (u64::from(self.run.0) + 1) << OFFSET_BITS | u64::from(self.offset)
    }

    // 28 and 18 bits.
    #[allow(clippy::cast_possible_truncation)]
    fn unpacked(word: u64) -> Self {
        let run = RunId((word >> OFFSET_BITS) as u32 - 1);
        Self { run, offset: (word & ((1 << OFFSET_BITS) - 1)) as u32 }
    }
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

/// Runs per chunk: 64 KiB of headers, so that a small index stays small.
const CHUNK: usize = 512;

/// First blocks of runs: sequence hash to run.
pub(super) type Heads = LineTable;

/// What readers follow.
#[derive(Default, Debug)]
pub(super) struct Tables {
    chunks: Published<Vec<Arc<[Run]>>>,
    heads: Published<Heads>,
    /// Seeded per process: hashes come from peers.
    pub(super) hasher: RandomState,
}

impl Tables {
    /// The run with this number; `None` once its chunk is gone.
    #[inline]
    pub(super) fn run<'p>(&self, id: RunId, pin: &'p Pin) -> Option<&'p Run> {
        run_at(self.chunks(pin)?, id)
    }

    pub(super) fn chunks<'p>(&self, pin: &'p Pin) -> Option<&'p [Arc<[Run]>]> {
        self.chunks.load(pin).map(Vec::as_slice)
    }

    pub(super) fn heads<'p>(&self, pin: &'p Pin) -> Option<&'p Heads> {
        self.heads.load(pin)
    }

    #[inline]
    pub(super) fn head_hash(&self, sequence: SequenceHash) -> u64 {
        self.hasher.hash_one(sequence.0)
    }

    /// A run that begins with this content, at this moment.
    #[inline]
    pub(super) fn head<'p>(&self, sequence: SequenceHash, pin: &'p Pin) -> Option<(RunId, &'p Run)> {
        let mut found = None;
        self.heads(pin)?.find(self.head_hash(sequence), |payload| {
            let id = run_of(payload);
            found = self.run(id, pin).filter(|run| run.first() == sequence).map(|run| (id, run));
            found.is_some()
        });
        found
    }
}

/// The run with this number; `None` once its chunk is gone, or before it is there.
#[inline]
pub(super) fn run_at(chunks: &[Arc<[Run]>], id: RunId) -> Option<&Run> {
    chunks.get(id.0 as usize / CHUNK)?.get(id.0 as usize % CHUNK)
}

fn run_in(chunks: &[Arc<[Run]>], id: RunId) -> &Run {
    &chunks[id.0 as usize / CHUNK][id.0 as usize % CHUNK]
}

// A payload of heads has 28 bits.
#[allow(clippy::cast_possible_truncation)]
pub(super) fn run_of(payload: u64) -> RunId {
    RunId(payload as u32 - 1)
}

/// The part of a run that only the writer needs. Names that are numbers lie beside the run's hashes.
#[derive(Debug)]
struct Own {
    /// The block before the first; `None` at the root.
    parent: Option<Place>,
    isolation: Isolation,
    /// Names of blocks whose engine uses byte strings. The empty name is that of a block that was only ever
    /// implied (the inner part of a larger group's block).
    // One word in every run instead of three, since most have none.
    #[allow(clippy::box_collection)]
    byte_names: Option<Box<Vec<Box<[u8]>>>>,
    /// Some block's name leads elsewhere (another content has it) or nowhere.
    irregular: bool,
    /// How many other runs hang behind which offset, by offset.
    children: SmallVec<[(u32, u32); 2]>,
}

impl Own {
    fn suits(&self, name: Option<&BlockHash>) -> bool {
        match name {
            None => true,
            Some(BlockHash::Int(_)) => self.byte_names.is_none(),
            Some(BlockHash::Bytes(_)) => self.byte_names.is_some(),
        }
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

/// What a name that is a byte string takes: a pointer and a length, and the bytes.
fn name_bytes(name: &[u8]) -> usize {
    size_of::<Box<[u8]>>() + name.len()
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

impl Extended {
    pub(super) fn place(self) -> Place {
        match self {
            Self::Known(place) | Self::NewRun(place) | Self::Appended(place) => place,
        }
    }
}

/// The writer's side of the tree.
#[derive(Debug)]
pub(super) struct Tree {
    pub(super) tables: Arc<Tables>,
    writer: SoleWriter,
    chunks: Vec<Arc<[Run]>>,
    own: Vec<Option<Own>>,
    free: Vec<RunId>,
    names: NameTable,
    name_count: usize,
    /// The table of names is to be made smaller.
    names_are_few: bool,
    head_count: usize,
    blocks: u64,
    /// Bytes of the names that are byte strings.
    name_bytes: usize,
    /// Runs whose versions are open.
    open: Vec<RunId>,
    /// Where the versions of the next chunk begin, above all that were before.
    next_version: u64,
}

impl Tree {
    pub(super) fn new(writer: SoleWriter) -> Self {
        Self {
            tables: Arc::default(),
            writer,
            chunks: Vec::new(),
            own: Vec::new(),
            free: Vec::new(),
            names: NameTable::with_room_for(0),
            name_count: 0,
            names_are_few: false,
            head_count: 0,
            blocks: 0,
            name_bytes: 0,
            open: Vec::new(),
            next_version: 0,
        }
    }

    pub(super) fn run(&self, id: RunId) -> &Run {
        run_in(&self.chunks, id)
    }

    /// The run, to be changed: its version is open until the event ends.
    pub(super) fn change(&mut self, id: RunId) -> &Run {
        let run = run_in(&self.chunks, id);
        if run.version.open() {
            self.open.push(id);
        }
        run
    }

    /// Whether the rank holds this block in this layer.
    pub(super) fn covers(&self, layer: Layer, rank: u32, place: Place, pin: &Pin) -> bool {
        let run = self.run(place.run);
        if layer == Layer::HOT {
            return run.holds(rank, place.offset, pin);
        }
        run.cold(layer, pin).is_some_and(|coverage| coverage.contains(rank, place.offset))
    }

    /// Whether the rank holds this block in any layer.
    pub(super) fn covers_anywhere(&self, rank: u32, place: Place, pin: &Pin) -> bool {
        let run = self.run(place.run);
        let cold = || run.ext(pin).into_iter().flat_map(|ext| &ext.cold);
        run.holds(rank, place.offset, pin)
            || cold().any(|(_, coverage)| coverage.contains(rank, place.offset))
    }

    /// Whether the rank holds anything of the run in any layer.
    pub(super) fn covers_any(&self, rank: u32, id: RunId, pin: &Pin) -> bool {
        let run = self.run(id);
        let cold = || run.ext(pin).into_iter().flat_map(|ext| &ext.cold);
        run.holds_any(rank, pin)
            || cold().any(|(_, coverage)| coverage.contains_any(rank))
            || run.chunks(pin).iter().any(|chunk| chunk.rank == rank)
    }

    /// The layers in which the rank holds something of the run.
    pub(super) fn layers_of(&self, rank: u32, id: RunId, pin: &Pin) -> SmallVec<[Layer; 4]> {
        let run = self.run(id);
        let cold = run.ext(pin).into_iter().flat_map(|ext| &ext.cold);
        let cold = cold.filter(|(_, coverage)| coverage.contains_any(rank)).map(|(layer, _)| *layer);
        run.holds_any(rank, pin).then_some(Layer::HOT).into_iter().chain(cold).collect()
    }

    /// Adds `from..to` to what the rank holds in this layer; returns how many blocks are new to it.
    pub(super) fn hold(&mut self, layer: Layer, rank: u32, id: RunId, from: u32, to: u32, pin: &Pin) -> u32 {
        let run = self.change(id);
        if layer == Layer::HOT {
            return run.hold(rank, from, to, pin);
        }
        let len = run.len();
        run.change_layer(layer, pin, |coverage| coverage.add(rank, from, to, len))
    }

    /// Takes `from..to` away in this layer; returns how many blocks the rank had of it. The caller trims.
    pub(super) fn release(
        &mut self,
        layer: Layer,
        rank: u32,
        id: RunId,
        from: u32,
        to: u32,
        pin: &Pin,
    ) -> u32 {
        let run = self.change(id);
        if layer == Layer::HOT {
            return run.release(rank, from, to, pin);
        }
        let len = run.len();
        run.change_layer(layer, pin, |coverage| coverage.remove(rank, from, to, len))
    }

    /// Ends an event: readers see all of it from now on.
    pub(super) fn close(&mut self, pin: &Pin) {
        self.close_versions();
        self.shrink_names(pin);
    }

    fn close_versions(&mut self) {
        while let Some(id) = self.open.pop() {
            if let Some(run) = run_at(&self.chunks, id) {
                run.version.close();
            }
        }
    }

    fn own(&self, id: RunId) -> &Own {
        match &self.own[id.0 as usize] {
            Some(own) => own,
            // Ids are handed out by this tree and dropped by their owners before the run goes.
            None => unreachable!("run {} is gone", id.0),
        }
    }

    fn own_mut(&mut self, id: RunId) -> &mut Own {
        match &mut self.own[id.0 as usize] {
            Some(own) => own,
            // As in `own`.
            None => unreachable!("run {} is gone", id.0),
        }
    }

    pub(super) fn isolation(&self, id: RunId) -> Isolation {
        self.own(id).isolation
    }

    pub(super) fn suits(&self, id: RunId, name: &BlockHash) -> bool {
        matches!(name, BlockHash::Bytes(_)) == self.run(id).has_byte_names()
    }

    /// The names of a run whose blocks all have numbers of their own.
    pub(super) fn regular_names<'w>(&'w self, id: RunId, pin: &'w Pin) -> Option<&'w [u64]> {
        self.is_regular(id).then(|| self.run(id).name_words(&self.writer, pin))
    }

    pub(super) fn is_regular(&self, id: RunId) -> bool {
        let own = self.own(id);
        !own.irregular && own.byte_names.is_none()
    }

    /// Distinct blocks in the tree.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Runs in the tree.
    pub(super) fn run_count(&self) -> usize {
        self.own.len() - self.free.len()
    }

    /// Numbers handed out, those of gone runs included.
    pub(super) fn id_count(&self) -> usize {
        self.own.len()
    }

    /// The runs in the tree.
    pub(super) fn ids(&self) -> impl Iterator<Item = RunId> {
        (0..).map(RunId).zip(&self.own).filter_map(|(id, own)| own.as_ref().map(|_| id))
    }

    pub(super) fn parent(&self, id: RunId) -> Option<Place> {
        self.own(id).parent
    }

    /// Makes a run as it was dumped, its parent renamed. The runs' versions stay open.
    pub(super) fn restore_run(&mut self, dumped: DumpedRun, pin: &Pin) -> RunId {
        let DumpedRun { parent, isolation, locals, names, holders, chunks } = dumped;
        let before = parent.map(|place| self.sequence(place, pin));
        let bytes = BlockHash::Bytes(Box::default());
        let kind = matches!(names, DumpedNames::Any { bytes: true, .. }).then_some(&bytes);
        let id = self.new_run(parent, isolation, kind, locals.len(), pin);
        if let DumpedNames::Regular(words) = &names {
            run_in(&self.chunks, id).set_name_words(0, words.iter().copied(), &mut self.writer, pin);
        }
        self.begin_run(id, before, &locals, pin);
        self.restore_names(id, names, pin);
        let len = self.run(id).len();
        for (layer, held) in holders {
            for Interval { rank, from, to } in held {
                self.hold(layer, rank, id, from, to.min(len), pin);
            }
        }
        chunks.into_iter().for_each(|chunk| self.hold_chunk(id, chunk, pin));
        id
    }

    fn live(&self) -> impl Iterator<Item = (&Run, &Own)> {
        let runs = self.chunks.iter().flat_map(|chunk| chunk.iter());
        runs.zip(&self.own).filter_map(|(run, own)| own.as_ref().map(|own| (run, own)))
    }

    /// The place behind `parent` with this content, if it is in the tree.
    pub(super) fn child(&self, parent: Option<Place>, local: LocalBlockHash, pin: &Pin) -> Option<Place> {
        let before = match parent {
            Some(Place { run, offset }) => {
                let next = offset + 1;
                if self.run(run).hashes(pin).locals().get(next as usize) == Some(&local.0) {
                    return Some(Place { run, offset: next });
                }
                Some(self.sequence(Place { run, offset }, pin))
            }
            None => None,
        };
        let (run, _) = self.tables.head(SequenceHash::extend(before, local), pin)?;
        Some(Place { run, offset: 0 })
    }

    /// The block before this one; `None` for a prompt's first.
    pub(super) fn before(&self, place: Place) -> Option<Place> {
        match place.offset.checked_sub(1) {
            Some(offset) => Some(Place { run: place.run, offset }),
            None => self.own(place.run).parent,
        }
    }

    pub(super) fn sequence(&self, place: Place, pin: &Pin) -> SequenceHash {
        let run = self.run(place.run);
        if place.offset + 1 == run.len() {
            run.last()
        } else {
            run.hashes(pin).sequence(place.offset as usize)
        }
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
        pin: &Pin,
    ) -> Extended {
        if let Some(known) = self.child(parent, local, pin) {
            return Extended::Known(known);
        }
        if let (Some(parent), Some(name), Some((layer, rank))) = (parent, name, appender)
            && self.may_append(parent, layer, rank, pin)
            && self.push(parent, name, local, layer, rank, pin)
        {
            return Extended::Appended(Place { run: parent.run, offset: parent.offset + 1 });
        }
        self.make_names_room(1, pin);
        let before = parent.map(|place| self.sequence(place, pin));
        let id = self.new_run(parent, isolation, name, 1, pin);
        let place = Place { run: id, offset: 0 };
        if let Some(name) = name {
            self.set_name(place, name, pin);
        }
        self.begin_run(id, before, &[local.0], pin);
        self.lead_name(place, name, pin);
        Extended::NewRun(place)
    }

    /// Appending keeps a conversation in one run; a run that others hold whole would turn them all into
    /// partial holders, so it branches instead.
    pub(super) fn may_append(&self, parent: Place, layer: Layer, rank: u32, pin: &Pin) -> bool {
        let run = self.run(parent.run);
        let alone = if layer == Layer::HOT {
            run.is_only_full(rank, pin)
        } else {
            run.cold(layer, pin).is_some_and(|coverage| coverage.full.is_only(rank))
        };
        alone
            && parent.offset + 1 == run.len()
            && run.len() < MAX_RUN
            && self.own(parent.run).children.last().is_none_or(|(offset, _)| *offset < parent.offset)
    }

    /// Whether a run hangs behind this block.
    pub(super) fn has_runs_behind(&self, place: Place) -> bool {
        self.own(place.run).children.binary_search_by_key(&place.offset, |(at, _)| *at).is_ok()
    }

    /// Appends a block where that may be done; `false`, and nothing done, if its name leads elsewhere already or is
    /// not of the run's kind.
    pub(super) fn push(
        &mut self,
        tail: Place,
        name: &BlockHash,
        local: LocalBlockHash,
        layer: Layer,
        rank: u32,
        pin: &Pin,
    ) -> bool {
        let place = Place { run: tail.run, offset: tail.offset + 1 };
        // No larger table may be made while names lead to blocks that are not there yet.
        self.make_names_room(1, pin);
        if !self.suits(tail.run, name) || !self.lead_new_name(place, name, pin) {
            return false;
        }
        self.make_room(tail.run, 1, pin);
        self.set_name(place, name, pin);
        self.append(tail.run, None, &[local.0], layer, rank, pin);
        true
    }

    /// Cuts `from..to` off a run, if that is its tail, not all of it, held by the rank alone, and nothing hangs
    /// behind it; says whether it did.
    pub(super) fn cut_tail(&mut self, id: RunId, from: u32, to: u32, rank: u32, pin: &Pin) -> bool {
        let (run, own) = (self.run(id), self.own(id));
        let is_free = from > 0
            && to == run.len()
            && own.byte_names.is_none()
            && own.children.last().is_none_or(|(offset, _)| *offset < from)
            && run.has_no_other_holder(rank, pin);
        if is_free {
            self.forget_names(id, from, to, pin);
            self.blocks -= u64::from(to - from);
            self.change(id);
            run_in(&self.chunks, id).truncate(from, &self.writer, pin);
        }
        is_free
    }

    /// Makes room for `more` blocks behind the run's last.
    pub(super) fn make_room(&mut self, id: RunId, more: usize, pin: &Pin) {
        run_in(&self.chunks, id).reserve(more, &self.writer, pin);
    }

    /// Appends blocks whose names are set, held by `rank` alone in `layer`.
    pub(super) fn append(
        &mut self,
        id: RunId,
        parent: Option<SequenceHash>,
        locals: &[u64],
        layer: Layer,
        rank: u32,
        pin: &Pin,
    ) {
        let run = run_in(&self.chunks, id);
        let old = run.len();
        let unseen = run.append_unseen(parent, locals, &mut self.writer, pin);
        let run = self.change(id);
        run.show(&unseen);
        if layer != Layer::HOT {
            run.grow_past(old, None, pin);
        }
        if run.has_cold(pin) {
            let by = |of: Layer| (of == layer).then_some(rank);
            run.grow_cold(old, run.len(), by, pin);
        }
        self.blocks += locals.len() as u64;
    }

    /// A run without blocks, with room for some; [`Self::begin_run`] or [`Self::drop_run`] must follow.
    pub(super) fn new_run(
        &mut self,
        parent: Option<Place>,
        isolation: Isolation,
        name: Option<&BlockHash>,
        room: usize,
        pin: &Pin,
    ) -> RunId {
        let byte_names = matches!(name, Some(BlockHash::Bytes(_))).then(Box::default);
        let own = Own { parent, isolation, byte_names, irregular: false, children: SmallVec::new() };
        let id = match self.free.pop() {
            Some(id) => {
                self.own[id.0 as usize] = Some(own);
                id
            }
            None => {
                assert!(
                    self.own.len() < MAX_RUNS,
                    "ranks hold at most 2^24 blocks each, 50 GB of runs are not reached"
                );
                // Below MAX_RUNS.
                #[allow(clippy::cast_possible_truncation)]
                let id = RunId(self.own.len() as u32);
                self.own.push(Some(own));
                self.add_chunks(pin);
                id
            }
        };
        self.make_room(id, room, pin);
        self.run(id).set_byte_names(matches!(name, Some(BlockHash::Bytes(_))));
        id
    }

    fn add_chunks(&mut self, pin: &Pin) {
        if self.own.len() <= self.chunks.len() * CHUNK {
            return;
        }
        let version = self.next_version;
        self.chunks.push((0..CHUNK).map(|_| Run::starting_at(version)).collect());
        self.tables.chunks.replace(Some(self.chunks.clone()), pin);
    }

    /// Gives a new run its first blocks, whose names are set, and hangs it behind its parent.
    pub(super) fn begin_run(&mut self, id: RunId, before: Option<SequenceHash>, locals: &[u64], pin: &Pin) {
        let unseen = run_in(&self.chunks, id).append_unseen(before, locals, &mut self.writer, pin);
        let run = self.change(id);
        run.show(&unseen);
        let first = run.first();
        if let (Some(parent), Some(before)) = (self.own(id).parent, before) {
            self.own_mut(parent.run).add_child(parent.offset);
            // Only a change opens the version: much hangs behind a system prompt, and all traffic reads it.
            if self.run(parent.run).lacks_branch(parent.offset) {
                self.change(parent.run).keep_branch(parent.offset, before);
            }
        }
        self.blocks += locals.len() as u64;
        self.add_head(id, first, pin);
    }

    fn add_head(&mut self, id: RunId, first: SequenceHash, pin: &Pin) {
        self.head_count += 1;
        if self.tables.heads(pin).is_none_or(|heads| heads.room() < self.head_count) {
            self.resize_heads(self.head_count + self.head_count / 2, pin);
        }
        if let Some(heads) = self.tables.heads(pin) {
            heads.insert(self.tables.head_hash(first), u64::from(id.0) + 1);
        }
    }

    fn resize_heads(&self, room: usize, pin: &Pin) {
        let heads = Heads::with_room_for(room);
        for payload in self.tables.heads(pin).into_iter().flat_map(LineTable::payloads) {
            heads.insert(self.tables.head_hash(self.run(run_of(payload)).first()), payload);
        }
        self.tables.heads.replace(Some(heads), pin);
    }

    /// Takes back a new run that got no blocks.
    pub(super) fn drop_run(&mut self, id: RunId, pin: &Pin) {
        self.change(id);
        let run = run_in(&self.chunks, id);
        run.truncate(0, &self.writer, pin);
        if let Some(names) = self.own[id.0 as usize].take().and_then(|own| own.byte_names) {
            let gone: usize = names.iter().map(|name| name_bytes(name)).sum();
            self.name_bytes = self.name_bytes.saturating_sub(gone);
        }
        self.free.push(id);
    }

    // === giving back ===

    fn needed(&self, id: RunId, pin: &Pin) -> u32 {
        let (run, own) = (self.run(id), self.own(id));
        let len = run.len();
        let cold =
            run.ext(pin).into_iter().flat_map(|ext| &ext.cold).map(|(_, coverage)| coverage.reach(len));
        let behind = own.children.last().map_or(0, |(offset, _)| offset + 1);
        cold.max().unwrap_or_default().max(run.reach(pin)).max(behind)
    }

    /// Cuts the run where nobody reaches, and frees it and what it kept alive once it is empty.
    pub(super) fn trim(&mut self, id: RunId, pin: &Pin) {
        let mut next = Some(id);
        while let Some(id) = next.take() {
            let (len, needed) = (self.run(id).len(), self.needed(id, pin));
            if needed == len {
                return;
            }
            self.forget_names(id, needed, len, pin);
            self.blocks -= u64::from(len - needed);
            if needed == 0 {
                next = self.free_run(id, pin);
                continue;
            }
            self.change(id);
            let run = run_in(&self.chunks, id);
            run.truncate(needed, &self.writer, pin);
            if let Some(names) = &mut self.own_mut(id).byte_names {
                let cut: usize = names.drain(needed as usize..).map(|name| name_bytes(&name)).sum();
                self.name_bytes = self.name_bytes.saturating_sub(cut);
            }
        }
    }

    /// Frees an empty run; the parent's run is to be trimmed next.
    fn free_run(&mut self, id: RunId, pin: &Pin) -> Option<RunId> {
        let first = self.run(id).first();
        let parent = self.own(id).parent;
        // That nothing lies behind a block is guarded by the version of the block's run.
        if let Some(parent) = parent {
            self.change(parent.run);
        }
        if let Some(heads) = self.tables.heads(pin)
            && heads.remove(self.tables.head_hash(first), u64::from(id.0) + 1)
        {
            self.head_count -= 1;
            if heads.room() > 64 && self.head_count < heads.room() / 3 {
                self.resize_heads(self.head_count + self.head_count / 2, pin);
            }
        }
        self.drop_run(id, pin);
        if self.free.len() == self.own.len() {
            self.drop_everything(pin);
        }
        let parent = parent?;
        self.own_mut(parent.run).remove_child(parent.offset);
        Some(parent.run)
    }

    /// The last run is gone, and with it all that runs needed.
    fn drop_everything(&mut self, pin: &Pin) {
        self.close_versions();
        let versions = self.chunks.iter().flat_map(|chunk| chunk.iter()).map(|run| run.version.now());
        self.next_version = versions.max().unwrap_or_default().max(self.next_version) + 2;
        self.tables.chunks.replace(None, pin);
        self.tables.heads.replace(None, pin);
        self.chunks = Vec::new();
        self.own = Vec::new();
        self.free = Vec::new();
    }

    /// Live bytes of runs and tables. Looks at every run.
    pub(super) fn bytes(&self, pin: &Pin) -> usize {
        let runs: usize = self.live().map(|(run, _)| run.bytes(pin)).sum();
        runs + self.bytes_beside_words(pin)
    }

    /// Live bytes but those of the runs' buffers. Looks at no run.
    pub(super) fn bytes_beside_words(&self, pin: &Pin) -> usize {
        self.name_bytes
            + self.chunks.len() * CHUNK * size_of::<Run>()
            + self.own.capacity() * size_of::<Option<Own>>()
            + self.names.bytes()
            + self.tables.heads(pin).map_or(0, LineTable::bytes)
    }
}

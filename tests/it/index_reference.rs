//! The index against a literal reference: every announcement kept in a list, every content a path in a
//! `radix_trie`. Random histories of several ranks must give equal overlaps, contents and sizes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use proptest::prelude::*;
use radix_trie::Trie;
use rankwise::block::{BlockHash, BlockSize, Isolation, LocalBlockHash, LocalHasher, SequenceHash, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, Announcements, GroupTag, HybridRule, IndexQuery, PrefixIndex, RankSettings, Reader, Scratch,
    StoreRefusal, StoreRequest, StoreTokens, TierSize,
};

const RANKS: usize = 4;
const BLOCK_SIZE: u32 = 2;
const TIERS: [Tier; 4] = Tier::ALL;

/// A content: the symbols of its blocks from the root on.
type Path = Vec<u8>;

/// What a name is announced as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shape {
    Block,
    /// Usable only with the rest of its chunk.
    Part,
    /// Several blocks under one name.
    Chunk,
}

/// Announcements of a name in one tier and shape. A name of which the content is not known has no path.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Said {
    tier: Tier,
    name: u64,
    shape: Shape,
    path: Option<Path>,
    count: u64,
}

/// What a name without a path may turn out to mean.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Orphan {
    name: u64,
    parent: u64,
    symbols: Vec<u8>,
}

/// Blocks that are usable together, for as long as all names are announced.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Chunk {
    tier: Tier,
    shape: Shape,
    names: Vec<u64>,
    len: usize,
}

/// A store as the index gets it.
#[derive(Clone, Debug)]
struct LiteralStore {
    tier: Tier,
    names: Vec<u64>,
    parent: Option<u64>,
    /// Symbols of each name; none in a placeholder.
    symbols: Option<Vec<Vec<u8>>>,
    complete: bool,
}

/// Removed names that a rank remembers.
const REMEMBERED: usize = 6;

/// One rank, literally: what was said and not taken back, oldest first.
#[derive(Clone, Default, Debug)]
struct LiteralRank {
    said: Vec<Said>,
    orphans: Vec<Orphan>,
    chunks: Vec<Chunk>,
    remembered: Vec<(u64, Path)>,
    remembers: bool,
    set: bool,
    chunk_blocks: Option<u32>,
    /// Names that the last store contradicted, and those of them that the device had said.
    contradicted: (u64, u64),
}

impl LiteralRank {
    fn block(&self, name: u64) -> Option<Path> {
        let mut of_name = self.said.iter().filter(|said| said.name == name && said.shape != Shape::Chunk);
        of_name.find_map(|said| said.path.clone())
    }

    fn chunk(&self, name: u64) -> Option<Path> {
        let mut of_name = self.said.iter().filter(|said| said.name == name && said.shape == Shape::Chunk);
        of_name.find_map(|said| said.path.clone())
    }

    fn lead(&self, name: u64) -> Option<Path> {
        self.block(name).or_else(|| self.chunk(name))
    }

    fn memory(&self, name: u64) -> Option<Path> {
        self.remembered.iter().find(|(of, _)| *of == name).map(|(_, path)| path.clone())
    }

    fn store(&mut self, store: &LiteralStore) {
        self.contradicted = (0, 0);
        let LiteralStore { tier, names, .. } = store;
        let lower = *tier != Tier::Device;
        self.remembers |= lower;
        let per_name = store.symbols.as_ref().and_then(|of| of.first()).map_or(1, Vec::len);
        let shape = match self.chunk_blocks {
            _ if lower && per_name > 1 => Shape::Chunk,
            Some(_) if lower => Shape::Part,
            _ => Shape::Block,
        };
        match &store.symbols {
            None => {
                for &name in names {
                    let path = self.lead(name).or_else(|| self.memory(name));
                    self.push(*tier, name, shape, path);
                }
            }
            Some(symbols) => self.store_tokens(store, symbols, shape),
        }
        if shape != Shape::Block {
            self.form_chunks(store, shape, per_name);
        }
    }

    fn store_tokens(&mut self, store: &LiteralStore, symbols: &[Vec<u8>], shape: Shape) {
        let lower = store.tier != Tier::Device;
        // Where the next block hangs; an error names what is missing.
        let mut cursor: Result<Path, Option<u64>> = match store.parent {
            None if lower && !store.complete => Err(None),
            None => Ok(Path::new()),
            Some(parent) => self.lead(parent).ok_or(Some(parent)),
        };
        for (&name, symbols) in store.names.iter().zip(symbols) {
            let block = self.block(name).or_else(|| self.memory(name).filter(|_| lower));
            let known = match shape {
                Shape::Chunk if cursor.is_err() => self.chunk(name).or(block),
                Shape::Chunk => self.chunk(name),
                _ if cursor.is_err() => block.or_else(|| self.chunk(name)),
                _ => block,
            };
            let here = cursor.clone().ok().map(|path| [path, symbols.clone()].concat());
            let path = match (known, here) {
                (Some(known), here) => Some(self.heed(store.tier, name, shape, known, here, symbols)),
                (None, Some(here)) => {
                    self.settle(name, &here);
                    Some(here)
                }
                (None, None) => {
                    if let Err(Some(parent)) = cursor {
                        let orphan = Orphan { name, parent, symbols: symbols.clone() };
                        if !self.orphans.contains(&orphan) {
                            self.orphans.push(orphan);
                        }
                    }
                    None
                }
            };
            self.push(store.tier, name, shape, path.clone());
            cursor = path.ok_or(Some(name));
        }
    }

    /// What a further store of a name that is known says of it.
    fn heed(
        &mut self,
        tier: Tier,
        name: u64,
        shape: Shape,
        known: Path,
        here: Option<Path>,
        symbols: &[u8],
    ) -> Path {
        let differs = match &here {
            Some(here) => *here != known,
            None => !known.ends_with(symbols),
        };
        if shape == Shape::Chunk || !differs {
            return known;
        }
        self.contradicted.0 += 1;
        if tier != Tier::Device {
            return known;
        }
        let by_device = |of: &Said| of.name == name && of.tier == Tier::Device && of.path.is_some();
        if self.said.iter().any(by_device) {
            self.contradicted.1 += 1;
            return known;
        }
        let Some(here) = here else { return known };
        let is_meant = |of: &&mut Said| of.name == name && of.shape != Shape::Chunk && of.path.is_some();
        for of in self.said.iter_mut().filter(is_meant) {
            of.path = Some(here.clone());
        }
        self.settle(name, &here);
        here
    }

    fn push(&mut self, tier: Tier, name: u64, shape: Shape, path: Option<Path>) {
        let same = |of: &&mut Said| of.tier == tier && of.name == name && of.shape == shape;
        match self.said.iter_mut().find(same) {
            Some(_) if self.set => {}
            Some(said) => said.count += 1,
            None => self.said.push(Said { tier, name, shape, path, count: 1 }),
        }
    }

    fn settle(&mut self, name: u64, path: &Path) {
        self.place(name, path);
        let mut settled = vec![(name, path.clone())];
        while let Some((name, path)) = settled.pop() {
            while let Some(at) = self.orphans.iter().position(|of| of.parent == name) {
                let orphan = self.orphans.remove(at);
                let child = [path.clone(), orphan.symbols].concat();
                self.place(orphan.name, &child);
                settled.push((orphan.name, child));
            }
        }
    }

    fn place(&mut self, name: u64, path: &Path) {
        self.orphans.retain(|of| of.name != name);
        for of in self.said.iter_mut().filter(|of| of.name == name && of.path.is_none()) {
            of.path = Some(path.clone());
        }
    }

    fn form_chunks(&mut self, store: &LiteralStore, shape: Shape, per_name: usize) {
        let declared = self.chunk_blocks.map_or(1, |blocks| blocks as usize);
        let names = &store.names;
        let apart = || match (self.lead(names[0]), self.lead(names[1])) {
            (Some(first), Some(second)) => second[..second.len() - 1] != first,
            _ => false,
        };
        let of_each = shape == Shape::Chunk || store.symbols.is_none() && (names.len() == 1 || apart());
        for of_chunk in names.chunks(if of_each { 1 } else { declared }) {
            let len = match shape {
                Shape::Chunk => per_name,
                _ if of_each => declared,
                _ => of_chunk.len(),
            };
            let same = |of: &Chunk| (of.tier, of.shape) == (store.tier, shape) && of.names == of_chunk;
            if !self.chunks.iter().any(same) {
                self.chunks.push(Chunk { tier: store.tier, shape, names: of_chunk.to_vec(), len });
            }
        }
    }

    fn remove(&mut self, tier: Tier, name: u64) -> bool {
        let Some(at) = self.said.iter().rposition(|of| of.tier == tier && of.name == name) else {
            return false;
        };
        self.said[at].count -= 1;
        if self.said[at].count > 0 {
            return true;
        }
        let gone = self.said.remove(at);
        self.drop_what_nothing_says(name);
        if self.remembers
            && let Some(path) = gone.path
            && self.lead(name).is_none()
        {
            self.remembered.retain(|(of, _)| *of != name);
            self.remembered.push((name, path));
            if self.remembered.len() > REMEMBERED {
                self.remembered.remove(0);
            }
        }
        true
    }

    fn drop_what_nothing_says(&mut self, name: u64) {
        let said = &self.said;
        if !said.iter().any(|of| of.name == name && of.path.is_none()) {
            self.orphans.retain(|of| of.name != name);
        }
        let is_there = |chunk: &Chunk, name: u64| {
            said.iter().any(|of| (of.tier, of.shape, of.name) == (chunk.tier, chunk.shape, name))
        };
        self.chunks.retain(|chunk| chunk.names.iter().all(|name| is_there(chunk, *name)));
    }

    fn clear(&mut self, tier: Option<Tier>) {
        let gone: Vec<Said> =
            self.said.iter().filter(|of| tier.is_none_or(|tier| of.tier == tier)).cloned().collect();
        self.said.retain(|of| !gone.contains(of));
        gone.iter().for_each(|of| self.drop_what_nothing_says(of.name));
        if tier.is_none_or(|tier| tier == Tier::Device) {
            self.remembered.clear();
        }
    }

    /// Where a chunk ends: the path of its last name, in the shape that made it.
    fn end(&self, chunk: &Chunk) -> Option<Path> {
        let last = chunk.names.last()?;
        let of_chunk = |of: &&Said| (of.tier, of.shape, of.name) == (chunk.tier, chunk.shape, *last);
        self.said.iter().find(of_chunk)?.path.clone()
    }

    fn blocks(&self, tier: Tier) -> BTreeSet<&Path> {
        let held = self.said.iter().filter(|of| of.tier == tier && of.shape == Shape::Block);
        held.filter_map(|of| of.path.as_ref()).collect()
    }

    fn tier_size(&self, tier: Tier) -> TierSize {
        let chunks = self.chunks.iter().filter(|chunk| chunk.tier == tier);
        let in_chunks: usize = chunks.filter_map(|chunk| Some(self.end(chunk)?.len().min(chunk.len))).sum();
        let nameless = self.said.iter().filter(|of| of.tier == tier && of.path.is_none()).count();
        TierSize { blocks: (self.blocks(tier).len() + in_chunks) as u64, nameless: nameless as u64 }
    }

    fn contents(&self) -> BTreeMap<(Tier, BlockHash), u64> {
        let mut contents = BTreeMap::new();
        for of in &self.said {
            *contents.entry((of.tier, BlockHash::Int(of.name))).or_default() += of.count;
        }
        contents
    }

    /// The largest reach before which everything is held: alone, or in a chunk that ends before it.
    fn reach(&self, trie: &Holders, rank: usize, tiers: &[Tier], prompt: &[u8]) -> u32 {
        let ends: Vec<(usize, usize)> = self
            .chunks
            .iter()
            .filter(|chunk| tiers.contains(&chunk.tier))
            .filter_map(|chunk| Some((self.end(chunk)?, chunk.len)))
            .filter(|(end, _)| prompt.starts_with(end))
            .map(|(end, len)| (end.len() - len.min(end.len()), end.len()))
            .collect();
        let alone = |at: usize| {
            trie.get(&prompt[..=at].to_vec())
                .is_some_and(|holders| tiers.iter().any(|tier| holders.contains(&(rank, *tier))))
        };
        let usable = |at: usize, reach: usize| {
            alone(at) || ends.iter().any(|(from, to)| (*from..*to).contains(&at) && *to <= reach)
        };
        (0..=prompt.len()).rfind(|reach| (0..*reach).all(|at| usable(at, *reach))).unwrap_or_default() as u32
    }
}

type Holders = Trie<Path, BTreeSet<(usize, Tier)>>;

/// All ranks' contents as one radix trie: path to the (rank, tier) pairs that hold it.
fn literal_index(ranks: &[LiteralRank]) -> Holders {
    let mut trie: Holders = Trie::new();
    for (rank, literal) in ranks.iter().enumerate() {
        for of in literal.said.iter().filter(|of| of.shape == Shape::Block) {
            if let Some(path) = &of.path {
                match trie.get_mut(path) {
                    Some(holders) => {
                        holders.insert((rank, of.tier));
                    }
                    None => {
                        trie.insert(path.clone(), BTreeSet::from([(rank, of.tier)]));
                    }
                }
            }
        }
    }
    trie
}

/// One step of a history. Numbers are reduced to what exists.
#[derive(Clone, Debug)]
enum Step {
    Store {
        rank: usize,
        tier: usize,
        base: Path,
        symbols: Vec<u8>,
        wrong_parent: Option<u64>,
        /// Blocks per name, in a lower tier.
        per_name: usize,
        /// No parent is given, and the history has a hole.
        rootless: bool,
    },
    Placeholder {
        rank: usize,
        tier: usize,
        paths: Vec<Path>,
    },
    Remove {
        rank: usize,
        tier: usize,
        picks: Vec<usize>,
        stray: Option<u64>,
    },
    Clear {
        rank: usize,
        tier: Option<usize>,
    },
    Replace {
        rank: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Mostly the device: the other tiers are there to be kept apart.
    let tier = prop_oneof![6 => Just(0_usize), 3 => Just(1_usize), 1 => Just(2_usize), 1 => Just(3_usize)];
    let path = |len| prop::collection::vec(0_u8..2, len);
    let store =
        (
            (0..RANKS, tier.clone()),
            path(0..6),
            path(1..5),
            prop::option::weighted(0.1, 0_u64..40),
            prop_oneof![4 => Just(1_usize), 1 => Just(2_usize), 1 => Just(3_usize)],
            prop::bool::weighted(0.05),
        )
            .prop_map(|((rank, tier), base, symbols, wrong_parent, per_name, rootless)| {
                Step::Store { rank, tier, base, symbols, wrong_parent, per_name, rootless }
            });
    let placeholder = (0..RANKS, tier.clone(), prop::collection::vec(path(1..7), 1..4))
        .prop_map(|(rank, tier, paths)| Step::Placeholder { rank, tier, paths });
    let remove =
        (0..RANKS, tier, prop::collection::vec(0_usize..64, 1..5), prop::option::weighted(0.1, 0_u64..40))
            .prop_map(|(rank, tier, picks, stray)| Step::Remove { rank, tier, picks, stray });
    let clear = (0..RANKS, prop::option::weighted(0.7, 0..TIERS.len()))
        .prop_map(|(rank, tier)| Step::Clear { rank, tier });
    let step = prop_oneof![
        12 => store,
        3 => placeholder,
        8 => remove,
        1 => clear,
        1 => (0..RANKS).prop_map(|rank| Step::Replace { rank }),
    ];
    prop::collection::vec(step, 1..50)
}

/// The name that a rank's engine gives a content. Ranks 0 and 1 agree, rank 2 has a seed of its own, and
/// rank 3's names collide: it calls different contents by one name, as engines with unchained hashes do.
fn name_of(rank: usize, path: &[u8]) -> u64 {
    let sum = path.iter().fold(1_u64, |sum, &symbol| sum * 3 + u64::from(symbol));
    match rank {
        0 | 1 => sum,
        2 => sum.wrapping_mul(0x9E37_79B9_7F4A_7C15),
        _ => sum % 7,
    }
}

fn tokens_of(symbols: &[u8]) -> Vec<u32> {
    symbols.iter().flat_map(|&symbol| [u32::from(symbol), 7]).collect()
}

struct World {
    index: PrefixIndex,
    reader: Reader,
    slots: Vec<RankSlot>,
    literal: Vec<LiteralRank>,
    hasher: LocalHasher,
    scratch: Scratch,
}

impl World {
    fn new(set: [bool; RANKS]) -> Self {
        Self::with_chunks(set, [None; RANKS])
    }

    fn with_chunks(set: [bool; RANKS], chunk_blocks: [Option<u32>; RANKS]) -> Self {
        let (mut index, reader) = index::new(BlockSize::new(BLOCK_SIZE).unwrap());
        let literal: Vec<LiteralRank> = set
            .into_iter()
            .zip(chunk_blocks)
            .map(|(set, chunk_blocks)| LiteralRank { set, chunk_blocks, ..LiteralRank::default() })
            .collect();
        let slots = literal.iter().map(|rank| index.write().add_rank(settings(rank))).collect();
        Self { index, reader, slots, literal, hasher: LocalHasher::default(), scratch: Scratch::default() }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Store { rank, tier, base, symbols, wrong_parent, per_name, rootless } => {
                self.store_as(*rank, TIERS[*tier], base, symbols, *wrong_parent, *per_name, *rootless);
            }
            Step::Placeholder { rank, tier, paths } => self.name_only(*rank, TIERS[*tier], paths),
            Step::Remove { rank, tier, picks, stray } => self.remove(*rank, TIERS[*tier], picks, *stray),
            Step::Clear { rank, tier } => {
                let slot = self.slots[*rank];
                let tier = tier.map(|tier| TIERS[tier]);
                let known = match tier {
                    Some(tier) => self.index.write().clear_tier(slot, tier),
                    None => self.index.write().clear_rank(slot),
                };
                assert!(known);
                self.literal[*rank].clear(tier);
                assert_eq!(self.index.write().is_empty(slot), self.literal[*rank].said.is_empty());
            }
            Step::Replace { rank } => {
                let gone = self.slots[*rank];
                let mut section = self.index.write();
                assert!(section.remove_rank(gone));
                let old = &self.literal[*rank];
                self.slots[*rank] = section.add_rank(settings(old));
                // A late batch of the rank that is gone must not land in its successor.
                let late = section.remove(gone, Tier::Device, None, &[BlockHash::Int(1)]);
                assert_eq!(late.unknown, 1);
                drop(section);
                let (set, chunk_blocks) = (old.set, old.chunk_blocks);
                self.literal[*rank] = LiteralRank { set, chunk_blocks, ..LiteralRank::default() };
            }
        }
    }

    fn store(&mut self, rank: usize, tier: Tier, base: &[u8], symbols: &[u8], wrong_parent: Option<u64>) {
        self.store_as(rank, tier, base, symbols, wrong_parent, 1, false);
    }

    #[allow(clippy::too_many_arguments)]
    fn store_as(
        &mut self,
        rank: usize,
        tier: Tier,
        base: &[u8],
        symbols: &[u8],
        wrong_parent: Option<u64>,
        per_name: usize,
        rootless: bool,
    ) {
        let per_name = if tier == Tier::Device { 1 } else { per_name };
        let symbols = &symbols[..symbols.len() / per_name * per_name];
        if symbols.is_empty() {
            return;
        }
        let mut path = base.to_vec();
        let mut names = Vec::new();
        for symbols in symbols.chunks(per_name) {
            path.extend(symbols);
            names.push(name_of(rank, &path));
        }
        let parent = wrong_parent.or_else(|| (!base.is_empty()).then(|| name_of(rank, base)));
        self.apply(
            rank,
            &LiteralStore {
                tier,
                names,
                parent: parent.filter(|_| !rootless),
                symbols: Some(symbols.chunks(per_name).map(<[u8]>::to_vec).collect()),
                complete: !rootless,
            },
        );
    }

    fn name_only(&mut self, rank: usize, tier: Tier, paths: &[Path]) {
        let names = paths.iter().map(|path| name_of(rank, path)).collect();
        self.apply(rank, &LiteralStore { tier, names, parent: None, symbols: None, complete: true });
    }

    fn apply(&mut self, rank: usize, store: &LiteralStore) {
        let LiteralStore { tier, names, parent, symbols, complete } = store;
        let wire: Vec<BlockHash> = names.iter().map(|name| BlockHash::Int(*name)).collect();
        let per_name = symbols.as_ref().map_or(0, |symbols| symbols[0].len() as u32);
        let result = self.index.write().store(
            self.slots[rank],
            &StoreRequest {
                tier: *tier,
                group: GroupTag::default(),
                names: &wire,
                parent: parent.map(BlockHash::Int).as_ref(),
                tokens: StoreTokens::Ids(&tokens_of(
                    &symbols.iter().flatten().flatten().copied().collect::<Path>(),
                )),
                block_size: BLOCK_SIZE * per_name,
                isolation: Isolation::default(),
                keys: &[],
                history_complete: *complete,
            },
        );
        let loops = *parent == names.first().copied() || names.windows(2).any(|pair| pair[0] == pair[1]);
        if loops {
            assert_eq!(result, Err(StoreRefusal::SelfParent));
        } else {
            let stored = result.unwrap();
            self.literal[rank].store(store);
            let told = (stored.contradicted, stored.device_contradicted);
            assert_eq!(told, self.literal[rank].contradicted, "contradictions of rank {rank} by {store:?}");
        }
    }

    fn remove(&mut self, rank: usize, tier: Tier, picks: &[usize], stray: Option<u64>) {
        let mut held: Vec<u64> =
            self.literal[rank].said.iter().filter(|of| of.tier == tier).map(|of| of.name).collect();
        held.dedup();
        let mut names: Vec<u64> = stray.into_iter().collect();
        if !held.is_empty() {
            names.extend(picks.iter().map(|pick| held[pick % held.len()]));
        }
        let wire: Vec<BlockHash> = names.iter().map(|name| BlockHash::Int(*name)).collect();
        let known_group = !self.literal_group_unknown(rank);
        let removed = self.index.write().remove(self.slots[rank], tier, None, &wire);
        let unknown = names.iter().filter(|name| !self.literal[rank].remove(tier, **name)).count();
        assert!(known_group || unknown == names.len());
        assert_eq!(removed.unknown, unknown as u64);
    }

    fn literal_group_unknown(&self, rank: usize) -> bool {
        self.reader.contents(self.slots[rank]).is_empty() && self.literal[rank].said.is_empty()
    }

    fn locals(&mut self, prompt: &[u8]) -> Vec<LocalBlockHash> {
        let (size, mut locals) = (BlockSize::new(BLOCK_SIZE).unwrap(), Vec::new());
        self.hasher.hash_prompt(Isolation::default(), &tokens_of(prompt), size, &mut locals);
        locals
    }

    fn check(&mut self, prompts: &[Path]) {
        let trie = literal_index(&self.literal);
        for prompt in prompts {
            let locals = self.locals(prompt);
            let sequences: Vec<SequenceHash> = SequenceHash::chain(&locals).collect();
            self.check_prompt(&trie, prompt, &locals, &[]);
            self.check_prompt(&trie, prompt, &locals, &sequences);
            self.check_prompt(&trie, prompt, &[], &sequences);
            // Sequence hashes of a part of the blocks are no answer about the rest.
            self.check_prompt(&trie, prompt, &locals, &sequences[..sequences.len() / 2]);
        }
        let mut total = 0;
        for (rank, slot) in self.slots.iter().enumerate() {
            let literal = &self.literal[rank];
            let device = literal.blocks(Tier::Device);
            assert_eq!(self.reader.tree_size(*slot), Some(device.len() as u64), "tree size of rank {rank}");
            for tier in TIERS {
                let told = self.reader.tier_size(*slot, tier).unwrap();
                assert_eq!(told, literal.tier_size(tier), "{tier:?} of rank {rank}");
            }
            total += device.len() as u64;
            let contents: BTreeMap<(Tier, BlockHash), u64> = self
                .reader
                .contents(*slot)
                .into_iter()
                .flat_map(|layer| layer.names.into_iter().map(move |(name, n)| ((layer.tier, name), n)))
                .collect();
            assert_eq!(contents, self.literal[rank].contents(), "contents of rank {rank}");
        }
        let (counted, kept) = (self.reader.stats(), self.reader.sizes());
        assert_eq!(counted.total_blocks, total);
        assert_eq!(
            (kept.nodes, kept.distinct_blocks, kept.total_blocks, kept.orphans),
            (counted.nodes, counted.distinct_blocks, counted.total_blocks, counted.orphans)
        );
        assert!(kept.bytes <= counted.bytes, "{kept:?} {counted:?}");
    }

    fn check_prompt(
        &mut self,
        trie: &Holders,
        prompt: &[u8],
        locals: &[LocalBlockHash],
        sequences: &[SequenceHash],
    ) {
        let query = IndexQuery { locals, sequences, hybrid: HybridRule::Joint };
        self.reader.overlap(&query, &mut self.scratch);
        for (rank, slot) in self.slots.iter().enumerate() {
            let told = self.scratch.overlap(*slot);
            let told = told.map_or([0; 3], |told| [told.device, told.host, told.disk]);
            let wanted = [1, 2, 3].map(|tiers| self.literal[rank].reach(trie, rank, &TIERS[..tiers], prompt));
            assert_eq!(told, wanted, "overlap of rank {rank} with {prompt:?}");
        }
    }
}

fn settings(rank: &LiteralRank) -> RankSettings {
    RankSettings {
        announcements: if rank.set { Announcements::Set } else { Announcements::Counted },
        host_chunk_blocks: rank.chunk_blocks.and_then(NonZeroU32::new),
        remembered_names: Some(REMEMBERED),
        ..RankSettings::default()
    }
}

/// All prompts of up to seven blocks would be 254; these are the deep ones, whose prefixes cover the rest.
fn prompts() -> Vec<Path> {
    (0_u8..64).map(|bits| (0..6).map(|bit| bits >> bit & 1).chain([0, 1, 0]).collect()).collect()
}

fn histories() -> u32 {
    std::env::var("RANKWISE_HISTORIES").ok().and_then(|count| count.parse().ok()).unwrap_or(2_000)
}

/// I1, I5: a block that waits for a name is placed when the name means a block again because what hid that is
/// gone. Names are unique here, so what the engine holds has one reading: all six blocks.
#[test]
fn what_waits_for_a_hidden_name_is_placed_when_it_shows_again() {
    let mut world = World::new([false; RANKS]);
    let path: Path = vec![1, 0, 0, 0, 0, 0];
    let store = |world: &mut World, from: usize, to: usize| {
        world.store(0, Tier::Device, &path[..from], &path[from..to], None);
    };
    let remove = |world: &mut World, depth: usize| {
        let name = BlockHash::Int(name_of(0, &[1, 0, 0, 0, 0, 0][..depth]));
        let removed = world.index.write().remove(world.slots[0], Tier::Device, None, &[name]);
        assert_eq!(removed.unknown, 0);
    };
    store(&mut world, 0, 3);
    remove(&mut world, 1);
    store(&mut world, 1, 6);
    remove(&mut world, 2);
    store(&mut world, 0, 1);
    let locals = world.locals(&path);
    let query = IndexQuery { locals: &locals, sequences: &[], hybrid: HybridRule::Joint };
    world.reader.overlap(&query, &mut world.scratch);
    assert_eq!(world.scratch.overlap(world.slots[0]).map(|told| told.device), Some(6));
}

/// I1, I5: a removal of a name that the rank does not hold there places nothing, though the name may mean a block
/// by another tier and others wait for it.
#[test]
fn a_removal_of_nothing_places_nothing() {
    let store = |tier, base: &[u8], symbols: &[u8], wrong_parent| {
        let (base, symbols) = (base.to_vec(), symbols.to_vec());
        Step::Store { rank: 3, tier, base, symbols, wrong_parent, per_name: 1, rootless: false }
    };
    let remove = |tier, pick, stray| Step::Remove { rank: 3, tier, picks: vec![pick], stray };
    let mut world = World::new([false; RANKS]);
    for step in [
        store(2, &[], &[1, 0, 1], None),
        store(3, &[0], &[0, 1], None),
        remove(0, 0, Some(2)),
        store(0, &[1, 0], &[1, 1, 1], Some(6)),
        store(0, &[], &[0], Some(6)),
        remove(2, 44, None),
        remove(0, 21, None),
    ] {
        world.step(&step);
        world.check(&prompts());
    }
}

/// I10: the device's word for a name that a lower tier had said otherwise places what waits under it, too.
#[test]
fn what_waits_for_a_name_goes_where_the_device_says() {
    // Rank 3 gives these one name each: 3 to [0], 4 to [1], 5 to [1, 0] and to what comes last, 6 to [1, 1].
    let store = |tier, base: &[u8], symbols: &[u8]| Step::Store {
        rank: 3,
        tier,
        base: base.to_vec(),
        symbols: symbols.to_vec(),
        wrong_parent: None,
        per_name: 1,
        rootless: false,
    };
    let mut world = World::new([false; RANKS]);
    for step in [
        store(0, &[], &[1, 0]),
        store(1, &[], &[0]),
        Step::Remove { rank: 3, tier: 0, picks: vec![6, 1], stray: None },
        store(0, &[1, 0, 0, 0], &[0, 0]),
        store(0, &[1, 1, 0, 1, 0], &[0]),
        Step::Placeholder { rank: 3, tier: 1, paths: vec![vec![1, 1, 1]] },
        store(0, &[1, 1], &[1]),
    ] {
        world.step(&step);
        world.check(&prompts());
    }
}

/// I9: one name said of a part and of a larger block in one tier ends a chunk of each size, where each was said to
/// end, and each goes with its own announcement.
#[test]
fn a_part_and_a_larger_block_of_one_name_end_chunks_of_their_own() {
    // Rank 3 calls both [0] and [0, 1] by one name.
    let store = |symbols: &[u8], per_name| {
        let (base, symbols) = (Vec::new(), symbols.to_vec());
        Step::Store { rank: 3, tier: 2, base, symbols, wrong_parent: None, per_name, rootless: false }
    };
    let mut world = World::with_chunks([false; RANKS], [None, None, None, Some(2)]);
    let remove = Step::Remove { rank: 3, tier: 2, picks: vec![0], stray: None };
    for (step, part, larger) in [
        (store(&[0], 1), 1, 1),
        (store(&[0, 1], 2), 1, 2),
        (Step::Placeholder { rank: 3, tier: 2, paths: vec![vec![0]] }, 1, 2),
        (remove.clone(), 1, 1),
        (remove.clone(), 1, 1),
        (remove, 0, 0),
    ] {
        world.step(&step);
        world.check(&prompts());
        let disk = [[0, 0], [0, 1]].map(|prompt| {
            let locals = world.locals(&prompt);
            let query = IndexQuery { locals: &locals, sequences: &[], hybrid: HybridRule::Joint };
            world.reader.overlap(&query, &mut world.scratch);
            world.scratch.overlap(world.slots[3]).map_or(0, |told| told.disk)
        });
        assert_eq!(disk, [part, larger], "after {step:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: histories(), failure_persistence: None, ..ProptestConfig::default() })]

    /// I1, I2, I4, I5, I6, I7, I9, I10: overlap, contents and sizes equal the literal reference after every step, and
    /// nothing is left when everything is cleared.
    #[test]
    fn random_histories_equal_the_literal_reference(
        history in steps(),
        set in any::<[bool; RANKS]>(),
        chunk_blocks in prop::array::uniform4(prop::option::weighted(0.2, 2_u32..4)),
    ) {
        // Set semantics on a quarter of the ranks or so; counting is the default.
        let set = set.map(|bit| bit && history.len() % 4 == 0);
        let mut world = World::with_chunks(set, chunk_blocks);
        let prompts = prompts();
        for (nth, step) in history.iter().enumerate() {
            world.step(step);
            let window = nth % 16 * 4;
            world.check(&prompts[window..window + 4]);
        }
        world.check(&prompts);
        for rank in 0..RANKS {
            world.step(&Step::Clear { rank, tier: None });
        }
        let stats = world.reader.stats();
        prop_assert_eq!((stats.nodes, stats.distinct_blocks, stats.orphans), (1, 0, 0));
    }
}

//! The index against a literal reference: every announcement kept in a list, every content a path in a
//! `radix_trie`. Random histories of several ranks must give equal overlaps, contents and sizes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use radix_trie::Trie;
use rankwise::block::{BlockHash, BlockSize, Isolation, LocalBlockHash, LocalHasher, SequenceHash, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, Announcements, GroupTag, HybridRule, IndexQuery, PrefixIndex, Reader, Scratch, StoreRefusal,
    StoreRequest, StoreTokens,
};

const RANKS: usize = 4;
const BLOCK_SIZE: u32 = 2;
const TIERS: [Tier; 4] = Tier::ALL;

/// A content: the symbols of its blocks from the root on.
type Path = Vec<u8>;

/// What an announcement said.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Said {
    Placed(Path),
    /// Behind a parent that was not known.
    Pending {
        parent: u64,
        symbol: u8,
    },
}

#[derive(Clone, Debug)]
struct Announcement {
    tier: Tier,
    name: u64,
    said: Said,
    /// When this block began to wait: where names collide, what waits for one name is placed in this order.
    born: usize,
}

/// One rank, literally: its announcements that were not removed, oldest first.
#[derive(Clone, Default, Debug)]
struct LiteralRank {
    announcements: Vec<Announcement>,
    set: bool,
    clock: usize,
}

impl LiteralRank {
    fn resolve(&self, name: u64) -> Option<Path> {
        TIERS.iter().find_map(|tier| {
            let last = self.announcements.iter().rfind(|of| of.tier == *tier && of.name == name)?;
            match &last.said {
                Said::Placed(path) => Some(path.clone()),
                Said::Pending { .. } => None,
            }
        })
    }

    fn store(&mut self, tier: Tier, names: &[u64], parent: Option<u64>, symbols: &[u8]) {
        let mut cursor = match parent {
            None => Ok(Path::new()),
            Some(parent) => self.resolve(parent).ok_or(parent),
        };
        for (&name, &symbol) in names.iter().zip(symbols) {
            match cursor {
                Ok(mut path) => {
                    path.push(symbol);
                    self.push(tier, name, Said::Placed(path.clone()));
                    self.settle(name, &path);
                    cursor = Ok(path);
                }
                Err(parent) => {
                    self.push(tier, name, Said::Pending { parent, symbol });
                    cursor = Err(name);
                }
            }
        }
    }

    fn push(&mut self, tier: Tier, name: u64, said: Said) {
        let same = |of: &Announcement| of.tier == tier && of.name == name && of.said == said;
        if !(self.set && self.announcements.iter().any(same)) {
            self.clock += 1;
            let waits = |of: &&Announcement| of.name == name && of.said == said;
            let born = self.announcements.iter().find(waits).map_or(self.clock, |of| of.born);
            self.announcements.push(Announcement { tier, name, said, born });
        }
    }

    fn settle(&mut self, name: u64, path: &Path) {
        let mut settled = vec![(name, path.clone())];
        while let Some((name, path)) = settled.pop() {
            let waits =
                |of: &&mut Announcement| matches!(of.said, Said::Pending { parent, .. } if parent == name);
            let mut waiting: Vec<&mut Announcement> = self.announcements.iter_mut().filter(waits).collect();
            waiting.sort_by_key(|of| of.born);
            for of in waiting {
                let Said::Pending { symbol, .. } = of.said else { continue };
                let mut child = path.clone();
                child.push(symbol);
                // The same block announced twice is one block that waits.
                if !settled.contains(&(of.name, child.clone())) {
                    settled.push((of.name, child.clone()));
                }
                of.said = Said::Placed(child);
            }
        }
    }

    fn remove(&mut self, tier: Tier, name: u64) -> bool {
        match self.announcements.iter().rposition(|of| of.tier == tier && of.name == name) {
            Some(at) => {
                self.announcements.remove(at);
                // Without its last content the name may mean an older one again, which others wait for.
                if let Some(path) = self.resolve(name) {
                    self.settle(name, &path);
                }
                true
            }
            None => false,
        }
    }

    fn contents(&self) -> BTreeMap<(Tier, BlockHash), u64> {
        let mut contents = BTreeMap::new();
        for of in &self.announcements {
            *contents.entry((of.tier, BlockHash::Int(of.name))).or_default() += 1;
        }
        contents
    }
}

/// All ranks' contents as one radix trie: path to the (rank, tier) pairs that hold it.
fn literal_index(ranks: &[LiteralRank]) -> Trie<Path, BTreeSet<(usize, Tier)>> {
    let mut trie: Trie<Path, BTreeSet<(usize, Tier)>> = Trie::new();
    for (rank, literal) in ranks.iter().enumerate() {
        for of in &literal.announcements {
            if let Said::Placed(path) = &of.said {
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

fn literal_reach(
    trie: &Trie<Path, BTreeSet<(usize, Tier)>>,
    rank: usize,
    tiers: &[Tier],
    prompt: &[u8],
) -> u32 {
    let held = |depth: &usize| {
        trie.get(&prompt[..*depth].to_vec())
            .is_some_and(|holders| tiers.iter().any(|tier| holders.contains(&(rank, *tier))))
    };
    (1..=prompt.len()).take_while(held).count() as u32
}

/// One step of a history. Numbers are reduced to what exists.
#[derive(Clone, Debug)]
enum Step {
    Store { rank: usize, tier: usize, base: Path, symbols: Vec<u8>, wrong_parent: Option<u64> },
    Remove { rank: usize, tier: usize, picks: Vec<usize>, stray: Option<u64> },
    Clear { rank: usize },
    Replace { rank: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Mostly the device: the other tiers are there to be kept apart.
    let tier = prop_oneof![6 => Just(0_usize), 2 => Just(1_usize), 1 => Just(2_usize), 1 => Just(3_usize)];
    let store = (
        0..RANKS,
        tier.clone(),
        prop::collection::vec(0_u8..2, 0..6),
        prop::collection::vec(0_u8..2, 1..5),
        prop::option::weighted(0.1, 0_u64..40),
    )
        .prop_map(|(rank, tier, base, symbols, wrong_parent)| Step::Store {
            rank,
            tier,
            base,
            symbols,
            wrong_parent,
        });
    let remove =
        (0..RANKS, tier, prop::collection::vec(0_usize..64, 1..5), prop::option::weighted(0.1, 0_u64..40))
            .prop_map(|(rank, tier, picks, stray)| Step::Remove { rank, tier, picks, stray });
    let step = prop_oneof![
        12 => store,
        8 => remove,
        1 => (0..RANKS).prop_map(|rank| Step::Clear { rank }),
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
        let (mut index, reader) = index::new(BlockSize::new(BLOCK_SIZE).unwrap());
        let slots = set.iter().map(|&set| index.write().add_rank(announcements(set))).collect();
        let literal = set.iter().map(|&set| LiteralRank { set, ..LiteralRank::default() }).collect();
        Self { index, reader, slots, literal, hasher: LocalHasher::default(), scratch: Scratch::default() }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Store { rank, tier, base, symbols, wrong_parent } => {
                self.store(*rank, TIERS[*tier], base, symbols, *wrong_parent);
            }
            Step::Remove { rank, tier, picks, stray } => self.remove(*rank, TIERS[*tier], picks, *stray),
            Step::Clear { rank } => {
                assert!(self.index.write().clear_rank(self.slots[*rank]));
                self.literal[*rank].announcements.clear();
            }
            Step::Replace { rank } => {
                let gone = self.slots[*rank];
                let mut section = self.index.write();
                assert!(section.remove_rank(gone));
                self.slots[*rank] = section.add_rank(announcements(self.literal[*rank].set));
                // A late batch of the rank that is gone must not land in its successor.
                let late = section.remove(gone, Tier::Device, None, &[BlockHash::Int(1)]);
                assert_eq!(late.unknown, 1);
                drop(section);
                self.literal[*rank].announcements.clear();
            }
        }
    }

    fn store(&mut self, rank: usize, tier: Tier, base: &[u8], symbols: &[u8], wrong_parent: Option<u64>) {
        let mut path = base.to_vec();
        let mut names = Vec::new();
        for &symbol in symbols {
            path.push(symbol);
            names.push(name_of(rank, &path));
        }
        let parent = wrong_parent.or_else(|| (!base.is_empty()).then(|| name_of(rank, base)));
        let wire: Vec<BlockHash> = names.iter().map(|name| BlockHash::Int(*name)).collect();
        let result = self.index.write().store(
            self.slots[rank],
            &StoreRequest {
                tier,
                group: GroupTag::default(),
                names: &wire,
                parent: parent.map(BlockHash::Int).as_ref(),
                tokens: StoreTokens::Ids(&tokens_of(symbols)),
                block_size: BLOCK_SIZE,
                isolation: Isolation::default(),
                keys: &[],
            },
        );
        let loops = parent == names.first().copied() || names.windows(2).any(|pair| pair[0] == pair[1]);
        if loops {
            assert_eq!(result, Err(StoreRefusal::SelfParent));
        } else {
            result.unwrap();
            self.literal[rank].store(tier, &names, parent, symbols);
        }
    }

    fn remove(&mut self, rank: usize, tier: Tier, picks: &[usize], stray: Option<u64>) {
        let mut held: Vec<u64> =
            self.literal[rank].announcements.iter().filter(|of| of.tier == tier).map(|of| of.name).collect();
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
        self.reader.contents(self.slots[rank]).is_empty() && self.literal[rank].announcements.is_empty()
    }

    fn check(&mut self, prompts: &[Path]) {
        let trie = literal_index(&self.literal);
        for prompt in prompts {
            let mut locals = Vec::new();
            self.hasher.hash_prompt(
                Isolation::default(),
                &tokens_of(prompt),
                BlockSize::new(BLOCK_SIZE).unwrap(),
                &mut locals,
            );
            let sequences: Vec<SequenceHash> = SequenceHash::chain(&locals).collect();
            self.check_prompt(&trie, prompt, &locals, &[]);
            self.check_prompt(&trie, prompt, &locals, &sequences);
            self.check_prompt(&trie, prompt, &[], &sequences);
        }
        let mut total = 0;
        for (rank, slot) in self.slots.iter().enumerate() {
            let device: BTreeSet<&Path> = self.literal[rank]
                .announcements
                .iter()
                .filter(|of| of.tier == Tier::Device)
                .filter_map(|of| match &of.said {
                    Said::Placed(path) => Some(path),
                    Said::Pending { .. } => None,
                })
                .collect();
            assert_eq!(self.reader.tree_size(*slot), Some(device.len() as u64), "tree size of rank {rank}");
            total += device.len() as u64;
            let contents: BTreeMap<(Tier, BlockHash), u64> = self
                .reader
                .contents(*slot)
                .into_iter()
                .flat_map(|layer| layer.names.into_iter().map(move |(name, n)| ((layer.tier, name), n)))
                .collect();
            assert_eq!(contents, self.literal[rank].contents(), "contents of rank {rank}");
        }
        assert_eq!(self.reader.stats().total_blocks, total);
    }

    fn check_prompt(
        &mut self,
        trie: &Trie<Path, BTreeSet<(usize, Tier)>>,
        prompt: &[u8],
        locals: &[LocalBlockHash],
        sequences: &[SequenceHash],
    ) {
        let query = IndexQuery { locals, sequences, hybrid: HybridRule::Joint };
        self.reader.overlap(&query, &mut self.scratch);
        for (rank, slot) in self.slots.iter().enumerate() {
            let told = self.scratch.overlap(*slot);
            let told = told.map_or([0; 3], |told| [told.device, told.host, told.disk]);
            let wanted = [1, 2, 3].map(|tiers| literal_reach(trie, rank, &TIERS[..tiers], prompt));
            assert_eq!(told, wanted, "overlap of rank {rank} with {prompt:?}");
        }
    }
}

fn announcements(set: bool) -> Announcements {
    if set { Announcements::Set } else { Announcements::Counted }
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
    let size = BlockSize::new(BLOCK_SIZE).unwrap();
    let mut locals = Vec::new();
    world.hasher.hash_prompt(Isolation::default(), &tokens_of(&path), size, &mut locals);
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
        Step::Store { rank: 3, tier, base, symbols, wrong_parent }
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

proptest! {
    #![proptest_config(ProptestConfig { cases: histories(), failure_persistence: None, ..ProptestConfig::default() })]

    /// I1, I2, I4, I5, I6, I7: overlap, contents and sizes equal the literal reference after every step, and
    /// nothing is left when everything is cleared.
    #[test]
    fn random_histories_equal_the_literal_reference(history in steps(), set in any::<[bool; RANKS]>()) {
        // Set semantics on a quarter of the ranks or so; counting is the default.
        let set = set.map(|bit| bit && history.len() % 4 == 0);
        let mut world = World::new(set);
        let prompts = prompts();
        for (nth, step) in history.iter().enumerate() {
            world.step(step);
            let window = nth % 16 * 4;
            world.check(&prompts[window..window + 4]);
        }
        world.check(&prompts);
        for rank in 0..RANKS {
            world.step(&Step::Clear { rank });
        }
        let stats = world.reader.stats();
        prop_assert_eq!((stats.nodes, stats.distinct_blocks, stats.orphans), (1, 0, 0));
    }
}

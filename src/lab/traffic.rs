//! Made-up serving traffic: conversations over shared system prompts, and the paged caches that serve them.
//!
//! Each rank is a pool of blocks as vLLM keeps it: running requests hold their blocks, finished ones give them
//! back tail first, and what is needed is taken from the block that was given back longest ago. So a
//! prefix is never evicted before what hangs behind it. Prefill announces its new blocks, decoding announces
//! each block as it fills, and evictions come in the same batch before the store that needed them.
//!
//! Conversations stay mostly with one rank, as a router would have it, and some move. The same seed gives the
//! same traffic. No engine is imitated in time: a step is a batch, and when it is sent is the caller's.

use std::collections::{HashMap, VecDeque};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::block::{BlockSize, Isolation, LocalBlockHash, LocalHasher};

/// Size of the traffic.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TrafficConfig {
    /// Ranks, all of one pool.
    pub ranks: u32,
    /// Blocks that each rank's cache has.
    pub blocks_per_rank: u32,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Requests that a rank runs at once.
    pub running: u32,
    /// Whether all ranks name equal content alike (one hash seed for the fleet) or each in its own way, as
    /// vLLM does unless it is told a seed.
    pub shared_names: bool,
    /// Of everything that is left to chance.
    pub seed: u64,
}

impl TrafficConfig {
    /// Traffic of this size, with eight requests running and a hash seed for the whole fleet.
    pub fn new(ranks: u32, blocks_per_rank: u32, block_size: BlockSize) -> Self {
        Self { ranks, blocks_per_rank, block_size, running: 8, shared_names: true, seed: 1 }
    }
}

/// One block of a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// What is in it: tokens follow from this number, see [`Traffic::tokens`].
    pub content: u64,
    /// Its name on an engine that hashes with the fleet's seed.
    name: u64,
}

/// What an engine announces. Names are the rank's own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PoolEvent {
    /// Blocks were cached, each behind the one before.
    Stored {
        /// The name of the block before the first; `None` starts a prompt.
        parent: Option<u64>,
        /// Their names.
        names: Vec<u64>,
        /// Their contents.
        contents: Vec<u64>,
    },
    /// Blocks were evicted.
    Removed {
        /// Their names.
        names: Vec<u64>,
    },
}

impl PoolEvent {
    /// Blocks that it speaks of.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Stored { names, .. } | Self::Removed { names } => names.len(),
        }
    }
}

/// What one engine step of one rank announces.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PoolBatch {
    /// The rank's number.
    pub rank: u32,
    /// In their order; never empty.
    pub events: Vec<PoolEvent>,
    /// The running request that the batch is of.
    pub conversation: usize,
}

impl PoolBatch {
    /// Blocks that it speaks of.
    pub fn blocks(&self) -> usize {
        self.events.iter().map(PoolEvent::blocks).sum()
    }
}

#[derive(Clone, Debug, Default)]
struct Conversation {
    blocks: Vec<Block>,
    home: u32,
    running: bool,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    conversation: usize,
    /// Blocks still to be decoded.
    left: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    users: u32,
    /// When it was given back; an entry of the free list with another stamp is out of date.
    freed: u64,
}

/// One rank's cache.
#[derive(Debug)]
struct Pool {
    capacity: usize,
    held: HashMap<u64, Held, foldhash::fast::RandomState>,
    free: VecDeque<(u64, u64)>,
    clock: u64,
    salt: u64,
    running: Vec<Option<Running>>,
}

/// Conversations and the ranks that serve them.
#[derive(Debug)]
pub struct Traffic {
    config: TrafficConfig,
    chance: StdRng,
    systems: Vec<Vec<Block>>,
    conversations: Vec<Conversation>,
    pools: Vec<Pool>,
    next_content: u64,
    longest: usize,
}

/// Base system prompts, and variants of each: a product's prompt with its tenants' additions.
const BASES: usize = 16;
const VARIANTS: usize = 8;

/// One conversation lives for so many blocks of all caches.
const BLOCKS_PER_CONVERSATION: usize = 300;

/// Most blocks of one event: an engine's prefill chunk.
const CHUNK: usize = 512;

/// Longest conversation: 37,000 tokens in blocks of 16.
const LONGEST: usize = 2_300;

impl Traffic {
    /// Traffic from the beginning, with empty caches.
    pub fn new(config: TrafficConfig) -> Self {
        let mut chance = StdRng::seed_from_u64(config.seed);
        let running = config.running.max(1);
        let capacity = config.blocks_per_rank.max(running * 8) as usize;
        // Whatever runs at once must fit, with a place for the next block of each.
        let longest = (capacity / (running as usize + 1)).clamp(4, LONGEST);
        let pools = (0..config.ranks).map(|rank| Pool {
            capacity,
            held: HashMap::default(),
            free: VecDeque::new(),
            clock: 0,
            salt: if config.shared_names { 0 } else { mix(config.seed ^ (u64::from(rank) << 32)) | 1 },
            running: vec![None; running as usize],
        });
        let pools = pools.collect();
        let (systems, next_content) = systems(&mut chance, longest / 3);
        Self { config, chance, systems, conversations: Vec::new(), pools, next_content, longest }
    }

    /// What it was made with.
    pub fn config(&self) -> &TrafficConfig {
        &self.config
    }

    /// Whether every cache has been full.
    pub fn is_warm(&self) -> bool {
        self.pools.iter().all(|pool| pool.held.len() * 100 >= pool.capacity * 98)
    }

    /// Blocks that a rank holds.
    pub fn held(&self, rank: u32) -> usize {
        self.pools[rank as usize].held.len()
    }

    /// The next batch of a rank: of a request that it runs, or of one that it begins.
    pub fn step(&mut self, rank: u32) -> PoolBatch {
        let slot = self.chance.random_range(0..self.config.running.max(1) as usize);
        match self.pools[rank as usize].running[slot] {
            Some(Running { conversation, left: 0 }) => {
                self.finish(rank, slot, conversation);
                self.begin(rank, slot)
            }
            Some(Running { conversation, left }) => {
                let next = Running { conversation, left: left - 1 };
                self.pools[rank as usize].running[slot] = Some(next);
                self.extend(conversation, 1);
                self.cache(rank, conversation, 1)
            }
            None => self.begin(rank, slot),
        }
    }

    fn finish(&mut self, rank: u32, slot: usize, conversation: usize) {
        let pool = &mut self.pools[rank as usize];
        for block in self.conversations[conversation].blocks.iter().rev() {
            pool.give_back(block.name);
        }
        pool.running[slot] = None;
        self.conversations[conversation].running = false;
    }

    fn begin(&mut self, rank: u32, slot: usize) -> PoolBatch {
        let conversation = self.pick(rank);
        let turn = self.chance.random_range(2..=32_usize);
        let decode = self.chance.random_range(4..=32_u32);
        self.extend(conversation, turn);
        self.conversations[conversation].running = true;
        self.pools[rank as usize].running[slot] = Some(Running { conversation, left: decode });
        let all = self.conversations[conversation].blocks.len();
        self.cache(rank, conversation, all)
    }

    /// One that lives at this rank in most cases, one from elsewhere in some, a new one in others.
    fn pick(&mut self, rank: u32) -> usize {
        let wanted = (self.config.ranks as usize * self.pools[0].capacity / BLOCKS_PER_CONVERSATION)
            .max(self.config.ranks as usize * 2 * self.config.running.max(1) as usize);
        let moves = self.chance.random_bool(0.15);
        if self.conversations.len() >= wanted && !self.chance.random_bool(0.22) {
            // A few looks are enough: where nothing suits, a conversation is opened.
            for _ in 0..64 {
                let at = self.chance.random_range(0..self.conversations.len());
                let of = &mut self.conversations[at];
                let room = of.blocks.len() + 64 < self.longest;
                if !of.running && room && (moves || of.home == rank) {
                    of.home = rank;
                    return at;
                }
            }
        }
        let opened = self.opened(rank);
        if self.conversations.len() < wanted {
            self.conversations.push(opened);
            return self.conversations.len() - 1;
        }
        // One that has ended makes room. At most half of them run, so a free one is found soon.
        for _ in 0..1_000 {
            let at = self.chance.random_range(0..self.conversations.len());
            if !self.conversations[at].running {
                self.conversations[at] = opened;
                return at;
            }
        }
        self.conversations.push(opened);
        self.conversations.len() - 1
    }

    fn opened(&mut self, home: u32) -> Conversation {
        // Some system prompts are in far more use than others.
        let skew = self.chance.random::<f64>().powi(3);
        let system = &self.systems[(skew * self.systems.len() as f64) as usize];
        let mut of = Conversation { blocks: system.clone(), home, running: false };
        let body = match self.chance.random_range(0..100) {
            0..6 => self.chance.random_range(1_024..1_900),
            6..25 => self.chance.random_range(256..800),
            _ => self.chance.random_range(4..96),
        };
        let room = self.longest.saturating_sub(of.blocks.len() + 64).max(1);
        for _ in 0..body.min(room) {
            push(&mut of.blocks, &mut self.next_content);
        }
        of
    }

    /// Adds blocks that nobody has seen to a conversation, up to the longest.
    fn extend(&mut self, conversation: usize, blocks: usize) {
        let of = &mut self.conversations[conversation].blocks;
        for _ in 0..blocks {
            push(of, &mut self.next_content);
        }
    }

    /// Caches the conversation's last `last` blocks on a rank, where it does not hold them.
    fn cache(&mut self, rank: u32, conversation: usize, last: usize) -> PoolBatch {
        let blocks = &self.conversations[conversation].blocks;
        let pool = &mut self.pools[rank as usize];
        let from = blocks.len() - last;
        let known = blocks[from..].iter().take_while(|block| pool.take(block.name)).count();
        let start = from + known;
        let mut events = Vec::new();
        let evicted = pool.make_room(blocks.len() - start);
        if !evicted.is_empty() {
            events.push(PoolEvent::Removed { names: evicted.iter().map(|name| pool.own(*name)).collect() });
        }
        let mut parent = start.checked_sub(1).map(|at| pool.own(blocks[at].name));
        for chunk in blocks[start..].chunks(CHUNK) {
            chunk.iter().for_each(|block| pool.insert(block.name));
            let names: Vec<u64> = chunk.iter().map(|block| pool.own(block.name)).collect();
            let next = names.last().copied();
            let contents = chunk.iter().map(|block| block.content).collect();
            events.push(PoolEvent::Stored { parent, names, contents });
            parent = next;
        }
        PoolBatch { rank, events, conversation }
    }

    // === prompts ===

    /// The blocks of a conversation as they stand.
    pub fn conversation(&self, at: usize) -> &[Block] {
        &self.conversations[at].blocks
    }

    /// The names of blocks on a rank.
    pub fn names(&self, rank: u32, blocks: &[Block]) -> Vec<u64> {
        let pool = &self.pools[rank as usize];
        blocks.iter().map(|block| pool.own(block.name)).collect()
    }

    /// How many leading blocks of these a rank holds.
    pub fn overlap(&self, rank: u32, blocks: &[Block]) -> usize {
        let held = &self.pools[rank as usize].held;
        blocks.iter().take_while(|block| held.contains_key(&block.name)).count()
    }

    /// The contents of a prompt as it may come next: in most cases a live conversation with a new turn, else
    /// a new conversation on a known system prompt.
    pub fn prompt(&mut self) -> Vec<Block> {
        let mut blocks = if self.conversations.is_empty() || self.chance.random_bool(0.22) {
            let home = self.chance.random_range(0..self.config.ranks.max(1));
            self.opened(home).blocks
        } else {
            let at = self.chance.random_range(0..self.conversations.len());
            self.conversations[at].blocks.clone()
        };
        for _ in 0..self.chance.random_range(2..=32) {
            push(&mut blocks, &mut self.next_content);
        }
        blocks
    }

    /// The first `depth` blocks of a live conversation that has so many.
    pub fn live_prefix(&mut self, depth: usize) -> Option<Vec<Block>> {
        let long: Vec<usize> = (0..self.conversations.len())
            .filter(|at| self.conversations[*at].blocks.len() >= depth)
            .collect();
        let at = *long.choose(&mut self.chance)?;
        Some(self.conversations[at].blocks[..depth].to_vec())
    }

    /// A known system prompt with `unknown` blocks behind it that nobody holds.
    pub fn system_then_unknown(&mut self, unknown: usize) -> Vec<Block> {
        let mut blocks = self.systems.choose(&mut self.chance).cloned().unwrap_or_default();
        for _ in 0..unknown {
            push(&mut blocks, &mut self.next_content);
        }
        blocks
    }

    /// Blocks that nobody holds.
    pub fn unknown(&mut self, blocks: usize) -> Vec<Block> {
        let mut unknown = Vec::new();
        (0..blocks).for_each(|_| push(&mut unknown, &mut self.next_content));
        unknown
    }

    /// The tokens of contents, appended to `tokens`.
    pub fn tokens(&self, contents: impl IntoIterator<Item = u64>, tokens: &mut Vec<u32>) {
        tokens_of(contents, self.config.block_size, tokens);
    }

    /// The local hashes of blocks, as a query carries them.
    pub fn locals(&self, blocks: &[Block]) -> Vec<LocalBlockHash> {
        let mut tokens = Vec::new();
        self.tokens(blocks.iter().map(|block| block.content), &mut tokens);
        let (mut hasher, mut locals) = (LocalHasher::default(), Vec::new());
        hasher.hash_prompt(Isolation::default(), &tokens, self.config.block_size, &mut locals);
        locals
    }
}

/// The tokens of contents in blocks of this size, appended to `tokens`.
pub fn tokens_of(contents: impl IntoIterator<Item = u64>, size: BlockSize, tokens: &mut Vec<u32>) {
    /// As many as a current tokenizer knows.
    const VOCABULARY: u64 = 128_000;
    for content in contents {
        let of = |nth: u32| (mix(content.rotate_left(17) ^ u64::from(nth)) % VOCABULARY) as u32;
        tokens.extend((0..size.get()).map(of));
    }
}

impl Pool {
    fn own(&self, name: u64) -> u64 {
        if self.salt == 0 { name } else { mix(name ^ self.salt) }
    }

    /// Takes a block into use, if it is held.
    fn take(&mut self, name: u64) -> bool {
        self.held.get_mut(&name).is_some_and(|held| {
            held.users += 1;
            true
        })
    }

    fn insert(&mut self, name: u64) {
        self.held.entry(name).or_default().users += 1;
    }

    fn give_back(&mut self, name: u64) {
        let Some(held) = self.held.get_mut(&name) else { return };
        held.users = held.users.saturating_sub(1);
        if held.users == 0 {
            self.clock += 1;
            held.freed = self.clock;
            self.free.push_back((self.clock, name));
        }
    }

    /// Evicts until `blocks` more fit: first what was given back first.
    fn make_room(&mut self, blocks: usize) -> Vec<u64> {
        let mut evicted = Vec::new();
        while self.held.len() + blocks > self.capacity {
            let Some((stamp, name)) = self.free.pop_front() else { break };
            if self.held.get(&name).is_some_and(|held| held.users == 0 && held.freed == stamp) {
                self.held.remove(&name);
                evicted.push(name);
            }
        }
        evicted
    }
}

fn systems(chance: &mut StdRng, longest: usize) -> (Vec<Vec<Block>>, u64) {
    let mut next_content = mix(chance.random());
    let mut systems = Vec::new();
    let longest = longest.max(2);
    for _ in 0..BASES {
        let mut base = Vec::new();
        let len = chance.random_range(16..=128_usize).min(longest / 2);
        (0..len.max(1)).for_each(|_| push(&mut base, &mut next_content));
        for _ in 0..VARIANTS {
            let mut variant = base.clone();
            let len = chance.random_range(8..=256_usize).min(longest / 2);
            (0..len.max(1)).for_each(|_| push(&mut variant, &mut next_content));
            systems.push(variant);
        }
    }
    (systems, next_content)
}

/// Adds a block that has never been before.
fn push(blocks: &mut Vec<Block>, next_content: &mut u64) {
    *next_content = next_content.wrapping_add(1);
    let content = *next_content;
    let parent = blocks.last().map_or(0, |block| block.name);
    blocks.push(Block { content, name: mix(parent ^ mix(content)) });
}

/// Spreads bits: the finaliser of SplitMix64.
fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashSet;

    use super::*;

    fn config(ranks: u32, blocks: u32) -> TrafficConfig {
        TrafficConfig::new(ranks, blocks, BlockSize::new(4).unwrap())
    }

    /// What a rank holds by its own announcements: nothing is stored twice, behind what is not there, or
    /// removed before it was stored.
    fn follow(held: &mut HashSet<u64>, batch: &PoolBatch) {
        assert!(!batch.events.is_empty());
        for event in &batch.events {
            match event {
                PoolEvent::Stored { parent, names, contents } => {
                    assert!(!names.is_empty() && names.len() == contents.len());
                    assert!(parent.is_none_or(|parent| held.contains(&parent)));
                    assert!(names.iter().all(|name| held.insert(*name)));
                }
                PoolEvent::Removed { names } => assert!(names.iter().all(|name| held.remove(name))),
            }
        }
    }

    #[test]
    fn announcements_are_those_of_a_bounded_cache() {
        for shared_names in [true, false] {
            let mut traffic = Traffic::new(TrafficConfig { shared_names, ..config(3, 600) });
            let mut held = vec![HashSet::new(); 3];
            for step in 0..20_000 {
                let batch = traffic.step(step % 3);
                let rank = batch.rank as usize;
                follow(&mut held[rank], &batch);
                assert_eq!(held[rank].len(), traffic.held(batch.rank));
                assert!(held[rank].len() <= 600);
                let blocks = traffic.conversation(batch.conversation);
                assert_eq!(traffic.overlap(batch.rank, blocks), blocks.len(), "what runs is held");
            }
            assert!(traffic.is_warm());
            let common = held[0].intersection(&held[1]).count();
            assert_eq!(common > 0, shared_names, "{common}");
        }
    }

    #[test]
    fn most_batches_are_a_decoded_block_and_prompts_find_something() {
        let mut traffic = Traffic::new(config(2, 4_000));
        let singles = (0..10_000).filter(|step| {
            let batch = traffic.step(step % 2);
            let stored = batch.events.iter().filter_map(|event| match event {
                PoolEvent::Stored { names, .. } => Some(names.len()),
                PoolEvent::Removed { .. } => None,
            });
            stored.sum::<usize>() == 1
        });
        assert!(singles.count() > 8_000);
        let found = (0..200).filter(|_| {
            let prompt = traffic.prompt();
            (0..2).any(|rank| traffic.overlap(rank, &prompt) > 0)
        });
        assert!(found.count() > 100);
        let unknown = traffic.unknown(5);
        assert_eq!((traffic.overlap(0, &unknown), unknown.len()), (0, 5));
    }

    #[test]
    fn the_same_seed_is_the_same_traffic() {
        let of = |seed| {
            let mut traffic = Traffic::new(TrafficConfig { seed, ..config(2, 500) });
            (0..500).map(|step| traffic.step(step % 2)).collect::<Vec<_>>()
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn tokens_follow_from_the_content() {
        let traffic = Traffic::new(config(1, 100));
        let (mut once, mut twice) = (Vec::new(), Vec::new());
        traffic.tokens([1, 2], &mut once);
        traffic.tokens([1], &mut twice);
        traffic.tokens([2], &mut twice);
        assert_eq!((once.len(), &once), (8, &twice));
        assert_ne!(once[..4], once[4..]);
    }
}

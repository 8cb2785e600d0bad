//! The index against mock engines' truth: ten simulated minutes of conversations on eight ranks whose pools
//! are too small, so that blocks are evicted all the time. The engines' own bytes go through the one door,
//! and what is indexed of each rank must be what the rank holds, name by name and copy by copy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rankwise::block::{BlockHash, BlockSize, Isolation, LocalHasher, Tier};
use rankwise::fleet::{PoolKey, Ranks, WorkerSpec};
use rankwise::ids::{DpRank, Moment, RankKey, SourceId};
use rankwise::index::{IndexQuery, Scratch};
use rankwise::indexer::{Config, Indexer, Input, RankReport, View};
use rankwise::mock::{
    Encoding, Engine, EngineConfig, Generation, HashKind, HashSeed, Output, RequestId, Shape, Timing, Truth,
};
use rankwise::trust::Trust;

const RANKS: u32 = 8;
const CONVERSATIONS: usize = 40;
const TEN_MINUTES: Moment = Moment::from_millis(600_000);

/// Steps between two comparisons of one rank: the whole content is copied each time.
const STEPS_PER_LOOK: u64 = 40;

/// Blocks of a rank on all tiers: name and copies.
type Held = BTreeMap<(Tier, BlockHash), u64>;

/// A user: asks, reads, asks on.
struct Conversation {
    rank: usize,
    history: Vec<u32>,
    /// When the next turn comes; `None` while an answer is under way.
    next: Option<Moment>,
}

struct World {
    rng: StdRng,
    engines: Vec<Engine>,
    sequence: Vec<u64>,
    steps: Vec<u64>,
    conversations: Vec<Conversation>,
    /// Whose request this is; its number is its place.
    asked: Vec<usize>,
    indexer: Indexer,
    view: View,
    sources: Vec<SourceId>,
    now: Moment,
    /// Every batch with this number is lost on its way.
    lost: Option<u64>,
    looks: u64,
    predictions: u64,
    cached_tokens: u64,
    differences: Vec<String>,
}

impl World {
    fn new(config: EngineConfig, seed: u64) -> Self {
        let (mut indexer, view) = Indexer::new(Config::default());
        let ranks = Ranks::range(0, RANKS).unwrap();
        let worker = WorkerSpec::new("mock", PoolKey::new("m", None), config.block_size, ranks);
        let mut actions = Vec::new();
        indexer.declare_worker(Moment::default(), worker, &mut actions).unwrap();
        let sources: Vec<_> =
            (0..RANKS).map(|rank| indexer.source(&RankKey::new("mock", rank)).unwrap()).collect();
        for source in &sources {
            indexer.handle(Moment::default(), Input::Connected { source: *source }, &mut actions);
        }
        let mut rng = StdRng::seed_from_u64(seed);
        let conversations = (0..CONVERSATIONS)
            .map(|at| Conversation {
                rank: at % RANKS as usize,
                history: Vec::new(),
                next: Some(Moment::from_millis(rng.random_range(0..5_000))),
            })
            .collect();
        Self {
            rng,
            engines: (0..RANKS).map(|rank| Engine::new(config, DpRank(rank))).collect(),
            sequence: vec![0; RANKS as usize],
            steps: vec![0; RANKS as usize],
            conversations,
            asked: Vec::new(),
            indexer,
            view,
            sources,
            now: Moment::default(),
            lost: None,
            looks: 0,
            predictions: 0,
            cached_tokens: 0,
            differences: Vec::new(),
        }
    }

    fn run(&mut self, until: Moment) {
        while let Some(next) = self.next_moment().filter(|next| *next <= until) {
            self.now = next;
            for at in 0..CONVERSATIONS {
                if self.conversations[at].next.is_some_and(|next| next <= self.now) {
                    self.ask(at);
                }
            }
            for rank in 0..self.engines.len() {
                if self.engines[rank].next_deadline().is_some_and(|due| due <= self.now) {
                    self.advance(rank);
                }
            }
        }
    }

    fn next_moment(&self) -> Option<Moment> {
        let turns = self.conversations.iter().filter_map(|conversation| conversation.next);
        turns.chain(self.engines.iter().filter_map(Engine::next_deadline)).min()
    }

    /// The next turn, mostly on the rank of the last one.
    fn ask(&mut self, at: usize) {
        let rng = &mut self.rng;
        let conversation = &mut self.conversations[at];
        if rng.random_ratio(1, 4) {
            conversation.rank = rng.random_range(0..RANKS as usize);
        }
        if conversation.history.len() > 900 || conversation.history.is_empty() {
            let system = rng.random_range(1_u32..5);
            conversation.history = (0..150 + system * 7).map(|token| system * 10_000 + token).collect();
        }
        let words = rng.random_range(10..90);
        conversation.history.extend((0..words).map(|_| rng.random_range(0_u32..30_000)));
        conversation.next = None;
        let request = Generation {
            id: RequestId(self.asked.len() as u64),
            prompt: conversation.history.clone(),
            max_tokens: rng.random_range(5..60),
        };
        self.asked.push(at);
        let rank = conversation.rank;
        if self.asked.len().is_multiple_of(16) {
            self.predict(&request.prompt);
        }
        self.engines[rank].submit(self.now, request).unwrap();
    }

    fn advance(&mut self, rank: usize) {
        let mut out = Vec::new();
        self.engines[rank].advance(self.now, &mut out);
        for output in out {
            match output {
                Output::Batch { payload, .. } => self.deliver(rank, payload),
                Output::Token { id, token, .. } => {
                    self.conversations[self.asked[id.0 as usize]].history.push(token);
                }
                Output::Finished { id, usage, .. } => {
                    self.cached_tokens += u64::from(usage.cached_tokens);
                    let pause = Duration::from_millis(self.rng.random_range(100..4_000));
                    self.conversations[self.asked[id.0 as usize]].next = Some(self.now + pause);
                }
                Output::Failed { id, .. } => {
                    self.conversations[self.asked[id.0 as usize]].next =
                        Some(self.now + Duration::from_secs(1));
                }
            }
        }
        self.steps[rank] += 1;
        if self.steps[rank].is_multiple_of(STEPS_PER_LOOK) {
            self.compare(rank);
        }
    }

    fn deliver(&mut self, rank: usize, payload: Vec<u8>) {
        let number = self.sequence[rank];
        self.sequence[rank] += 1;
        if self.lost == Some(number) {
            return;
        }
        let frames = [Bytes::new(), Bytes::from(number.to_be_bytes().to_vec()), Bytes::from(payload)];
        let source = self.sources[rank];
        self.indexer.handle(self.now, Input::Frames { source, frames: &frames }, &mut Vec::new());
    }

    /// The process ends, its connection with it, and a new one begins.
    fn restart(&mut self, rank: usize) {
        let mut out = Vec::new();
        self.engines[rank].restart(self.now, &mut out);
        for output in out {
            let Output::Failed { id, .. } = output else { panic!("{output:?}") };
            self.conversations[self.asked[id.0 as usize]].next = Some(self.now + Duration::from_secs(1));
        }
        self.sequence[rank] = 0;
        let source = self.sources[rank];
        for input in [Input::Disconnected { source }, Input::Connected { source }] {
            self.indexer.handle(self.now, input, &mut Vec::new());
        }
    }

    /// What is indexed of a rank against what it holds.
    fn compare(&mut self, rank: usize) {
        self.looks += 1;
        let (indexed, real) = (self.indexed(rank), held(&self.engines[rank].truth()));
        if indexed != real {
            let here = |of: &Held, other: &Held| {
                of.iter().filter(|(key, count)| other.get(key) != Some(count)).count()
            };
            self.differences.push(format!(
                "rank {rank} at {:?}: {} too many, {} missing of {}",
                self.now,
                here(&indexed, &real),
                here(&real, &indexed),
                real.len()
            ));
        }
    }

    fn indexed(&self, rank: usize) -> Held {
        let fleet = self.view.fleet();
        let pool = fleet.only_pool().unwrap();
        let slot = pool.ranks().nth(rank).unwrap().1.slot;
        let mut held = Held::new();
        for layer in pool.index.contents(slot) {
            assert!(matches!(layer.group_idx, None | Some(0)));
            for (name, copies) in layer.names {
                assert_eq!(held.insert((layer.tier, name), copies), None);
            }
        }
        held
    }

    /// What a query promises of each rank's device against the rank's own look-up. The engine keeps the last
    /// token to be computed, so it never counts a block that the prompt ends with.
    fn predict(&mut self, prompt: &[u32]) {
        let fleet = self.view.fleet();
        let pool = fleet.only_pool().unwrap();
        let block = pool.block_size.get();
        let mut locals = Vec::new();
        LocalHasher::default().hash_prompt(Isolation::default(), prompt, pool.block_size, &mut locals);
        let mut scratch = Scratch::default();
        pool.index.overlap(&IndexQuery { locals: &locals, ..IndexQuery::default() }, &mut scratch);
        for (at, (engine, (_, rank))) in self.engines.iter().zip(pool.ranks()).enumerate() {
            // A new process that has not spoken yet cannot be told from the old one: there is no history to ask.
            if self.sequence[at] == 0 {
                continue;
            }
            let found = scratch.overlap(rank.slot).map_or(0, |overlap| overlap.device);
            let usable = found.min((prompt.len() as u32 - 1) / block) * block;
            let (real, _) = engine.cached_tokens(prompt);
            if usable != real {
                self.differences.push(format!("{}: {usable} tokens promised, {real} held", engine.dp_rank()));
            }
            self.predictions += 1;
        }
    }

    fn reports(&self) -> RankReport {
        let fleet = self.view.fleet();
        let mut sum = RankReport::default();
        for (_, rank) in fleet.only_pool().unwrap().ranks() {
            sum.add(&rank.status.report());
        }
        sum
    }

    fn trusts(&self) -> Vec<Trust> {
        let fleet = self.view.fleet();
        fleet.only_pool().unwrap().ranks().map(|(_, rank)| rank.status.trust()).collect()
    }
}

fn held(truth: &Truth) -> Held {
    let tier = |tier, blocks: &[rankwise::mock::HeldBlock]| -> Held {
        blocks.iter().map(|block| ((tier, block.hash.clone()), u64::from(block.copies))).collect()
    };
    let mut held = tier(Tier::Device, &truth.device);
    held.extend(tier(Tier::Host, &truth.host));
    held
}

fn config(shape: Shape, host_blocks: u32) -> EngineConfig {
    EngineConfig {
        shape,
        host_blocks,
        block_size: BlockSize::new(16).unwrap(),
        // A conversation fills 60 blocks, and each rank has five of them.
        blocks: 100,
        max_batched_tokens: 512,
        max_running: 8,
        timing: Timing { decode_step: Duration::from_millis(40), ..Timing::default() },
        ..EngineConfig::default()
    }
}

/// Ten minutes, a restart of one rank in the middle, then everything is looked at once more.
fn ten_minutes(config: EngineConfig, seed: u64) {
    let mut world = World::new(config, seed);
    world.run(Moment::from_millis(300_000));
    world.restart(3);
    world.run(TEN_MINUTES);
    (0..RANKS as usize).for_each(|rank| world.compare(rank));
    assert!(world.differences.is_empty(), "{:#?}", &world.differences[..world.differences.len().min(10)]);
    assert!(world.looks > 500 && world.predictions > 1_000, "{} {}", world.looks, world.predictions);
    assert_eq!(world.trusts(), [Trust::Live; RANKS as usize]);
    let report = world.reports();
    let content = report.content;
    assert!(content.removed_blocks > 10_000, "too few evictions: {content:?}");
    assert!(world.cached_tokens > 10_000, "nothing is ever found again");
    assert_eq!((content.unknown_removals, content.malformed_messages, content.skipped.total()), (0, 0, 0));
    assert_eq!((content.rank_mismatch, content.orphans_dropped, report.stream.restarts()), (0, 0, 1));
}

/// I1: counted announcements of physical copies, evicted one by one; names differ from rank to rank.
#[test]
fn vllm_ranks_are_indexed_exactly() {
    let seed = HashSeed::PerProcess(11);
    ten_minutes(EngineConfig { hash_seed: seed, ..config(Shape::Vllm, 0) }, 1);
}

/// I1, I6: the same in the array form with names of bytes, and a host tier whose blocks come child first.
#[test]
fn vllm_ranks_with_a_host_tier_are_indexed_exactly() {
    let forms = EngineConfig { encoding: Encoding::Array, hash: HashKind::Bytes, ..config(Shape::Vllm, 150) };
    ten_minutes(forms, 2);
}

/// I1: signed names, merged events, leaves only.
#[test]
fn sglang_ranks_are_indexed_exactly() {
    ten_minutes(config(Shape::Sglang, 0), 3);
}

/// I1, I6: a second tier that is written through and loaded back.
#[test]
fn sglang_ranks_with_a_host_tier_are_indexed_exactly() {
    ten_minutes(EngineConfig { encoding: Encoding::Array, ..config(Shape::Sglang, 150) }, 4);
}

/// The comparison can fail: one batch of each rank is lost and cannot be had again.
#[test]
fn a_lost_batch_shows() {
    let mut world = World::new(config(Shape::Vllm, 0), 5);
    world.lost = Some(40);
    world.run(Moment::from_millis(60_000));
    assert!(!world.differences.is_empty());
    assert!(world.trusts().iter().all(|trust| matches!(trust, Trust::Partial(_))), "{:?}", world.trusts());
}

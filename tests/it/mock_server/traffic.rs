//! Long traffic at high speed: the index against the engines' own truth.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rankwise::block::BlockSize;
use rankwise::mock::server::{FleetConfig, RankHandle};
use rankwise::mock::{Completion, EngineConfig, HashKind, HashSeed, Shape, Timing};
use tokio::task::JoinSet;

use super::watched::Watched;

/// How many times faster than real time.
const SPEED: f64 = 150.0;

/// Conversations that go on at once on each rank.
const TALKS: u32 = 3;

/// I1, I4, I6: ten minutes' worth of conversations over 8 ranks with caches so small that they evict all the time;
/// then the index holds of every rank exactly what the rank itself holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_equals_truth_after_ten_minutes_of_vllm_traffic() {
    let engine = EngineConfig { shape: Shape::Vllm, hash: HashKind::Bytes, host_blocks: 64, ..small() };
    run(engine).await;
}

/// I1, I4: the same with SGLang's shape.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn index_equals_truth_after_ten_minutes_of_sglang_traffic() {
    run(EngineConfig { shape: Shape::Sglang, ..small() }).await;
}

fn small() -> EngineConfig {
    EngineConfig {
        hash_seed: HashSeed::PerProcess(5),
        block_size: BlockSize::new(16).unwrap(),
        blocks: 160,
        timing: Timing { speed: SPEED, ..Timing::default() },
        ..EngineConfig::default()
    }
}

async fn run(engine: EngineConfig) {
    let config = FleetConfig { engine, workers: 2, ranks: 4, ..FleetConfig::default() };
    let watched = Watched::start(config).await;
    let seconds = 600.0 / SPEED;
    let end = tokio::time::Instant::now() + std::time::Duration::from_secs_f64(seconds);
    let mut talks = JoinSet::new();
    for (number, (_, rank)) in (0_u64..).zip(watched.fleet.ranks()) {
        for talk in 0..u64::from(TALKS) {
            let rank = rank.clone();
            talks.spawn(async move {
                let mut chance = StdRng::seed_from_u64(number * 100 + talk);
                while tokio::time::Instant::now() < end {
                    converse(&rank, &mut chance).await;
                }
            });
        }
    }
    talks.join_all().await;
    let blocks = watched.index_equals_truth().await;
    let mut evicted = 0;
    let mut finished = 0;
    for (_, rank) in watched.fleet.ranks() {
        finished += rank.load().await.unwrap().unwrap().engine.finished;
    }
    for rank in 0..4 {
        evicted += watched.report(rank).content.removed_blocks;
    }
    assert!(blocks > 8 * 100 && evicted > 1_000 && finished > 400, "{blocks}, {evicted}, {finished}");
}

/// A conversation of a few turns behind one of a few system prompts.
async fn converse(rank: &RankHandle, chance: &mut StdRng) {
    let system: u32 = chance.random_range(0..6);
    let mut prompt: Vec<u32> = (0..40 + system * 8).map(|token| 100_000 + system * 1_000 + token).collect();
    for _ in 0..chance.random_range(1..5) {
        let asked = chance.random_range(5..60);
        prompt.extend((0..asked).map(|_| chance.random_range(0..50_000)));
        let length = chance.random_range(1..40);
        let answer = rank.generate(prompt.clone(), length).await.unwrap();
        let (tokens, usage) = answer.whole().await.unwrap();
        assert_eq!(tokens, Completion::of(&prompt).tokens(length).collect::<Vec<_>>());
        assert_eq!(usage.prompt_tokens as usize, prompt.len());
        prompt.extend(tokens);
    }
}

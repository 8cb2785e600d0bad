//! T1, T2: ranks, not only workers, are told apart; end to end, as processes of their own over real ports.
//!
//! Mock engines on one side, the service on the other. Different prefixes are warmed on different ranks by pinned
//! generations. Unpinned queries must then pick exactly the rank that holds the prefix, the overlap that is
//! reported must be the engine's own, and the generation that is sent there must find as many tokens cached as were
//! predicted. The same scenario runs under controls, and must fail under each for the reason that the control is
//! made of: a scenario that passes under a control proves nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod site;

use std::time::Instant;

use serde_json::{Value, json};

use self::site::{Loads, Rank, Site, series};

// === T1 ===

/// T1, R4: one worker with two ranks; vLLM's shape, events as maps, names that differ between the ranks.
#[tokio::test]
async fn t1_one_vllm_worker_of_two_ranks() {
    let case = Case { loads: Loads::Grpc, ..Case::new("vllm", ONE_OF_TWO) };
    case.run().await.unwrap();
}

/// T1: two workers with one rank each, which have the same number; names are byte strings, events arrays.
#[tokio::test]
async fn t1_two_vllm_workers_of_one_rank() {
    let mock = &["--hash", "bytes", "--encoding", "array"];
    let case = Case { mock, ..Case::new("vllm", TWO_OF_ONE) };
    case.run().await.unwrap();
}

/// T1, R4: SGLang's shape on the global ranks 4 and 5: what is sent is the local rank. Names are equal on both.
#[tokio::test]
async fn t1_one_sglang_worker_of_two_ranks() {
    let mock = &["--dp-start-rank", "4"];
    let case = Case { mock, ..Case::new("sglang", ONE_OF_TWO) };
    case.run().await.unwrap();
}

/// T1, S3: two SGLang workers with one rank each, of whose load nothing is known.
#[tokio::test]
async fn t1_two_sglang_workers_of_one_rank() {
    let mock = &["--encoding", "array"];
    let case = Case { mock, loads: Loads::Nowhere, ..Case::new("sglang", TWO_OF_ONE) };
    case.run().await.unwrap();
}

// === T2 ===

/// T2: if a cached prefix is worth nothing, the picks do not follow it.
#[tokio::test]
async fn t2_overlap_weight_0_must_fail() {
    for (shape, topology) in ALL {
        let case = Case { scoring: "overlap_weight = 0.0", ..Case::new(shape, topology) };
        assert_picks_by_chance(case.run().await);
    }
}

/// T2: if the choice is drawn from nearly equal chances, it does not follow the prefix.
#[tokio::test]
async fn t2_a_huge_temperature_must_fail() {
    for (shape, topology) in ALL {
        let case = Case { scoring: "temperature = 1000.0", ..Case::new(shape, topology) };
        assert_picks_by_chance(case.run().await);
    }
}

/// T2, R5: a worker of one rank has no rank 1: neither the engine nor the service puts another in its place.
#[tokio::test]
async fn t2_rank_1_of_a_worker_of_one_rank_is_refused() {
    for shape in ["vllm", "sglang"] {
        for (pinned, by) in [(Pinned::Generations, "the engine"), (Pinned::Queries, "the service")] {
            let ended = Case { pinned, ..Case::new(shape, ONE_OF_ONE) }.run().await;
            match ended {
                Err(Failure::Refused { by: who, status: 400, why }) if who == by => {
                    assert!(why.contains("rank"), "{why}");
                }
                other => panic!("{shape}, {pinned:?}: {other:?}"),
            }
        }
    }
}

const ALL: [(&str, Topology); 4] =
    [("vllm", ONE_OF_TWO), ("vllm", TWO_OF_ONE), ("sglang", ONE_OF_TWO), ("sglang", TWO_OF_ONE)];

/// The control counts if not all picks match, out of enough that chance cannot do it.
fn assert_picks_by_chance(ended: Result<(), Failure>) {
    match ended {
        Err(Failure::Picks { matched, of }) => assert!(matched < of && of >= 32, "{matched} of {of}"),
        other => panic!("the scenario must fail by its picks under this control: {other:?}"),
    }
}

// === the scenario ===

/// Workers, and ranks of each.
type Topology = (u32, u32);

const ONE_OF_TWO: Topology = (1, 2);
const TWO_OF_ONE: Topology = (2, 1);
const ONE_OF_ONE: Topology = (1, 1);

/// One way to run the scenario.
struct Case {
    shape: &'static str,
    topology: Topology,
    loads: Loads,
    /// More arguments for the engines.
    mock: &'static [&'static str],
    /// A line below `[scoring]`.
    scoring: &'static str,
    pinned: Pinned,
}

/// What is pinned to rank 1 whether there is one or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pinned {
    Nothing,
    Generations,
    Queries,
}

/// Why the scenario failed.
#[derive(Debug)]
#[expect(dead_code, reason = "shown when a test fails")]
enum Failure {
    /// A request was refused.
    Refused { by: &'static str, status: u16, why: String },
    /// Not every pick was the rank that holds the prefix.
    Picks { matched: usize, of: usize },
    /// A rank's overlap is not what it holds.
    Overlap { rank: Rank, reported: Value, held: u64 },
    /// The engine found another number of tokens cached than was predicted, or another rank served.
    Served { expected: Value, answer: Value },
    /// Not every event was accepted.
    Events { rank: Rank, what: String },
}

/// Prompts that are warmed on each rank.
const PROMPTS: u32 = 6;

/// How often each prompt is asked for: 36 picks among two ranks, which chance gets right once in 2^36.
const ROUNDS: usize = 3;

/// Leading blocks that every second prompt has in common with those of the other ranks.
const SHARED_BLOCKS: u32 = 2;

/// A prompt, and the place of its rank among the site's.
struct Warm {
    home: usize,
    number: u32,
    tokens: Vec<u32>,
}

impl Case {
    fn new(shape: &'static str, topology: Topology) -> Self {
        Self { shape, topology, loads: Loads::Http, mock: &[], scoring: "", pinned: Pinned::Nothing }
    }

    async fn run(&self) -> Result<(), Failure> {
        let site = self.start().await;
        let warm = self.warm(&site).await?;
        site.until_indexed().await;
        self.check_events(&site).await?;
        self.rest(&site, Instant::now()).await;
        self.check_picks(&site, &warm).await?;
        self.check_generations(&site, &warm).await?;
        self.check_events(&site).await?;
        site.index_equals_truth().await;
        site.stop().await;
        Ok(())
    }

    /// A process per worker, and the service.
    async fn start(&self) -> Site {
        let (workers, ranks) = self.topology;
        let mock = |worker: u32| -> Vec<String> {
            let name = format!("w{worker}");
            let ranks = ranks.to_string();
            let args = ["--shape", self.shape, "--name", &name, "--ranks", &ranks, "--speed", "20"];
            args.into_iter().chain(self.mock.iter().copied()).map(ToOwned::to_owned).collect()
        };
        let mocks: Vec<_> = (0..workers).map(mock).collect();
        let settings = format!("[scoring]\nseed = 7\n{}", self.scoring);
        Site::start(&mocks, self.loads, &settings).await
    }

    /// Generates each rank's own prompts there, pinned.
    async fn warm(&self, site: &Site) -> Result<Vec<Warm>, Failure> {
        let mut warm = Vec::new();
        for number in 0..PROMPTS {
            for (home, rank) in site.ranks.iter().enumerate() {
                let local = if self.pinned == Pinned::Generations { 1 } else { rank.local };
                let tokens = prompt(site.block_size, home, number);
                let (status, answer) = site
                    .generate(&rank.url, &tokens, |request, body| match self.shape {
                        "vllm" => request.header("X-data-parallel-rank", local),
                        _ => {
                            body["routed_dp_rank"] = local.into();
                            request
                        }
                    })
                    .await;
                if status != 200 {
                    return Err(Failure::Refused { by: "the engine", status, why: answer.to_string() });
                }
                // Its own earlier prompts have left it what they have in common.
                let cached = if number > 0 { shared_blocks(number) } else { 0 };
                served(&answer, rank, cached * site.block_size)?;
                warm.push(Warm { home, number, tokens });
            }
        }
        Ok(warm)
    }

    /// Every batch that was published was applied, and nothing of it skipped, lost or mistaken.
    async fn check_events(&self, site: &Site) -> Result<(), Failure> {
        site.until_indexed().await;
        let metrics = site.metrics().await;
        for rank in &site.ranks {
            let wrong = |what: String| Failure::Events { rank: rank.clone(), what };
            let truth = site.truth(rank).await;
            let value = |name: &str| series(&metrics, &format!("rankwise_{name}"), rank, "");
            let expected = [
                ("applied_batches_total", truth.next_seq as f64),
                ("gaps_total", 0.0),
                ("lost_batches_total", 0.0),
                ("malformed_messages_total", 0.0),
                ("rank_mismatch_batches_total", 0.0),
                ("orphan_blocks_total", 0.0),
                ("unknown_removals_total", 0.0),
                ("block_size_mismatches_total", 0.0),
                ("connected", 1.0),
            ];
            for (name, expected) in expected {
                if value(name) != Some(expected) {
                    return Err(wrong(format!("{name} is {:?} and not {expected}", value(name))));
                }
            }
            let skipped: f64 = metrics
                .lines()
                .filter(|line| line.starts_with("rankwise_skipped_events_total"))
                .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
                .sum();
            if skipped != 0.0 || truth.next_seq == 0 {
                return Err(wrong(format!("{skipped} events skipped of {} batches", truth.next_seq)));
            }
        }
        Ok(())
    }

    /// Waits until nothing runs, where that can be known: what is picked then follows from the caches alone.
    async fn rest(&self, site: &Site, since: Instant) {
        if self.loads != Loads::Nowhere {
            site.until_idle(since).await;
        }
    }

    /// Asks for every prompt, unpinned, several times.
    async fn check_picks(&self, site: &Site, warm: &[Warm]) -> Result<(), Failure> {
        let mut matched = 0;
        for round in 0..ROUNDS {
            for at in 0..warm.len() {
                // Another order in each round, and the ranks by turns in none.
                let prompt = &warm[(at * 5 + round) % warm.len()];
                let answer = self.select(site, &prompt.tokens).await?;
                check_overlaps(site, prompt, &answer).await?;
                matched += usize::from(is_pick(&answer, &site.ranks[prompt.home]));
            }
        }
        let of = warm.len() * ROUNDS;
        if matched == of { Ok(()) } else { Err(Failure::Picks { matched, of }) }
    }

    async fn select(&self, site: &Site, tokens: &[u32]) -> Result<Value, Failure> {
        let mut body = json!({ "token_ids": tokens, "model_name": "mock", "candidates": "all" });
        if self.pinned == Pinned::Queries {
            body["pinned_worker"] = json!({ "worker_id": site.ranks[0].worker, "dp_rank": 1 });
        }
        let (status, answer) = site.ask("/select", &body).await;
        match status {
            200 => Ok(answer),
            _ => Err(Failure::Refused { by: "the service", status, why: answer.to_string() }),
        }
    }

    /// Sends every prompt where it is picked for; the engine's own count of cached tokens is the overlap.
    async fn check_generations(&self, site: &Site, warm: &[Warm]) -> Result<(), Failure> {
        for prompt in warm {
            let home = &site.ranks[prompt.home];
            let answer = self.select(site, &prompt.tokens).await?;
            if !is_pick(&answer, home) {
                return Err(Failure::Picks { matched: 0, of: 1 });
            }
            let predicted = candidate(&answer, home)["device_blocks"].as_u64().unwrap_or(0);
            let (status, done) = site
                .generate(answer["endpoint"].as_str().unwrap(), &prompt.tokens, |request, body| {
                    dispatched(&answer, request, body)
                })
                .await;
            if status != 200 {
                return Err(Failure::Refused { by: "the engine", status, why: done.to_string() });
            }
            served(&done, home, u32::try_from(predicted).unwrap() * site.block_size)?;
            self.rest(site, Instant::now()).await;
        }
        Ok(())
    }
}

/// Puts into a request what the answer says that the engine needs to run it on the rank.
fn dispatched(answer: &Value, request: reqwest::RequestBuilder, body: &mut Value) -> reqwest::RequestBuilder {
    let dispatch = &answer["dispatch"];
    for field in dispatch["body_fields"].as_array().unwrap() {
        body[field.as_str().unwrap()] = dispatch["local_rank"].clone();
    }
    match dispatch["header"].as_str() {
        Some(header) => request.header(header, dispatch["local_rank"].as_u64().unwrap()),
        None => request,
    }
}

fn is_pick(answer: &Value, rank: &Rank) -> bool {
    answer["worker_id"] == *rank.worker && answer["dp_rank"] == rank.dp_rank
}

fn candidate<'a>(answer: &'a Value, rank: &Rank) -> &'a Value {
    let candidates = answer["candidates"].as_array().unwrap();
    candidates.iter().find(|candidate| is_pick(candidate, rank)).unwrap_or(&Value::Null)
}

/// Every rank's overlap is what it holds: all full blocks at home, what is shared elsewhere. `/query` says the same.
async fn check_overlaps(site: &Site, prompt: &Warm, answer: &Value) -> Result<(), Failure> {
    let reach = site.reach(&prompt.tokens).await;
    for (place, rank) in site.ranks.iter().enumerate() {
        let full = prompt.tokens.len() as u64 / u64::from(site.block_size);
        let held = if place == prompt.home { full } else { shared_blocks(prompt.number).into() };
        let reported = candidate(answer, rank);
        let tokens = reach[&(rank.worker.clone(), rank.dp_rank)];
        if reported["device_blocks"] != held
            || reported["trust"] != "live"
            || tokens != held * u64::from(site.block_size)
        {
            let mut reported = reported.clone();
            reported["query_tokens"] = tokens.into();
            return Err(Failure::Overlap { rank: rank.clone(), reported, held });
        }
    }
    Ok(())
}

/// The rank itself has served, and found as many tokens cached.
fn served(answer: &Value, rank: &Rank, cached_tokens: u32) -> Result<(), Failure> {
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    if answer["dp_rank"] == rank.dp_rank && *cached == cached_tokens {
        return Ok(());
    }
    let expected = json!({ "dp_rank": rank.dp_rank, "cached_tokens": cached_tokens });
    Err(Failure::Served { expected, answer: answer.clone() })
}

/// Blocks at the start of a rank's prompt of this number that every rank has.
fn shared_blocks(number: u32) -> u32 {
    if number.is_multiple_of(2) { SHARED_BLOCKS } else { 0 }
}

/// A prompt of its own for each place and number, with a partial last block: engines compute the last token of an
/// exact multiple anew. Those of one number are equally long, so no rank holds more than another.
fn prompt(block_size: u32, place: usize, number: u32) -> Vec<u32> {
    let shared = shared_blocks(number) * block_size;
    let length = block_size * (3 + number) + 1 + (number * 5) % (block_size - 1);
    let place = u32::try_from(place).unwrap();
    // No two of these stretches meet: each is far shorter than the distance between them.
    let own = 100_000 + (place * PROMPTS + number) * 1_000;
    (0..shared).chain(own..own + length - shared).collect()
}

//! Each rule of the caches and of the scheduler by itself, then all of them under random histories, with
//! the events read by our own decoder into a literal list and compared with the engine's truth.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::block::{BlockHash, BlockSize, Tier};
use crate::events::{KvEvent, Limits, decode_batch};
use crate::ids::{DpRank, Moment};

/// What the events of one rank say that it holds.
#[derive(Default)]
struct Follower {
    held: BTreeMap<(Tier, BlockHash), u32>,
    batches: usize,
    clears: usize,
}

impl Follower {
    fn follow(&mut self, outputs: &[Output]) {
        for output in outputs {
            if let Output::Batch { payload, at } = output {
                self.read(payload, *at);
            }
        }
    }

    fn read(&mut self, payload: &[u8], at: Moment) {
        let batch = decode_batch(payload, &Limits::default()).unwrap();
        assert_eq!(batch.skipped.total(), 0);
        assert_eq!(batch.ts, Some(at.as_micros() as f64 / 1e6));
        self.batches += 1;
        for event in batch.events {
            match event {
                KvEvent::Stored(stored) => {
                    for hash in stored.block_hashes {
                        *self.held.entry((stored.tier, hash)).or_default() += 1;
                    }
                }
                KvEvent::Removed(removed) => {
                    for hash in removed.block_hashes {
                        let key = (removed.tier, hash);
                        let copies = self.held.get_mut(&key).expect("removed what was never stored");
                        *copies -= 1;
                        if *copies == 0 {
                            self.held.remove(&key);
                        }
                    }
                }
                KvEvent::Cleared(_) => {
                    self.held.clear();
                    self.clears += 1;
                }
            }
        }
    }

    fn compare(&self, engine: &Engine) {
        let truth = engine.truth();
        let tier = |tier, held: &[HeldBlock]| -> Vec<_> {
            held.iter().map(|block| ((tier, block.hash.clone()), block.copies)).collect()
        };
        let mut real: BTreeMap<_, _> = tier(Tier::Device, &truth.device).into_iter().collect();
        real.extend(tier(Tier::Host, &truth.host));
        assert_eq!(self.held, real);
    }
}

/// One engine, driven to its deadlines.
struct Bench {
    engine: Engine,
    follower: Follower,
    now: Moment,
    next: u64,
    outputs: Vec<Output>,
}

impl Bench {
    fn new(config: EngineConfig) -> Self {
        let engine = Engine::new(config, DpRank(0));
        Self { engine, follower: Follower::default(), now: Moment::default(), next: 0, outputs: Vec::new() }
    }

    fn submit(&mut self, prompt: &[u32], max_tokens: u32) -> RequestId {
        let id = RequestId(self.next);
        self.next += 1;
        self.engine.submit(self.now, Generation { id, prompt: prompt.to_vec(), max_tokens }).unwrap();
        id
    }

    /// One advance at the next deadline; false when there is none.
    fn step(&mut self) -> bool {
        let Some(next) = self.engine.next_deadline() else { return false };
        self.now = self.now.max(next);
        self.advance();
        true
    }

    fn advance(&mut self) {
        let mut out = Vec::new();
        self.engine.advance(self.now, &mut out);
        self.follower.follow(&out);
        if !self.engine.has_unpublished() {
            self.follower.compare(&self.engine);
        }
        self.outputs.extend(out);
    }

    fn run(&mut self) {
        while self.step() {}
        assert_eq!(self.engine.load().used_blocks, 0, "blocks have leaked");
    }

    /// Runs one request to its end.
    fn ask(&mut self, prompt: &[u32], max_tokens: u32) -> Usage {
        let id = self.submit(prompt, max_tokens);
        self.run();
        self.usage(id).unwrap()
    }

    fn usage(&self, id: RequestId) -> Option<Usage> {
        self.outputs.iter().find_map(|output| match output {
            Output::Finished { id: of, usage, .. } if *of == id => Some(*usage),
            _ => None,
        })
    }

    fn answer(&self, id: RequestId) -> Vec<(u32, Moment)> {
        let tokens = self.outputs.iter().filter_map(|output| match output {
            Output::Token { id: of, index, token, at } if *of == id => Some((*index, *token, *at)),
            _ => None,
        });
        tokens
            .enumerate()
            .map(|(nth, (index, token, at))| {
                assert_eq!(nth as u32, index);
                (token, at)
            })
            .collect()
    }
}

fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| seed * 1_000 + at).collect()
}

fn vllm() -> EngineConfig {
    let timing = Timing {
        prefill_tokens_per_second: 1_000.0,
        decode_step: Duration::from_millis(10),
        step_overhead: Duration::ZERO,
        speed: 1.0,
    };
    EngineConfig { blocks: 64, timing, ..EngineConfig::default() }
}

fn sglang() -> EngineConfig {
    EngineConfig { shape: Shape::Sglang, ..vllm() }
}

#[test]
fn the_last_token_is_always_computed() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(config);
        assert_eq!(bench.ask(&prompt(1, 64), 1).cached_tokens, 0);
        // 64 tokens are four full blocks, and one token more than three blocks can be a hit.
        assert_eq!(bench.engine.cached_tokens(&prompt(1, 64)), (48, 48));
        assert_eq!(bench.ask(&prompt(1, 64), 1).cached_tokens, 48);
        assert_eq!(bench.ask(&prompt(1, 65), 1).cached_tokens, 64);
        assert_eq!(bench.ask(&prompt(1, 63), 1).cached_tokens, 48);
        assert_eq!(bench.ask(&prompt(2, 63), 1).cached_tokens, 0);
    }
}

#[test]
fn the_answer_is_cached_too_but_for_its_last_token() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(config);
        let first = prompt(1, 20);
        bench.ask(&first, 12);
        let mut turn = first.clone();
        turn.extend(Completion::of(&first).tokens(12));
        turn.extend([1, 2, 3]);
        // 31 tokens were computed: one full block; with one more token it would be two.
        assert_eq!(bench.ask(&turn, 1).cached_tokens, 16);
        let mut bench = Bench::new(config);
        bench.ask(&first, 13);
        turn.truncate(32);
        turn.extend(Completion::of(&first).tokens(13).skip(12));
        assert_eq!(bench.ask(&turn, 1).cached_tokens, 32);
    }
}

/// Two full blocks: the second request recomputes the last one, because of its last token.
#[test]
fn vllm_announces_each_copy_and_sglang_each_content() {
    for (config, copies) in [(vllm(), [1, 2]), (sglang(), [1, 1])] {
        let mut bench = Bench::new(config);
        bench.submit(&prompt(1, 32), 1);
        bench.submit(&prompt(1, 32), 1);
        bench.run();
        let mut held: Vec<_> =
            bench.engine.truth().device.iter().map(|block| (block.depth, block.copies)).collect();
        held.sort_unstable();
        assert_eq!(held, [(0, copies[0]), (1, copies[1])]);
    }
}

#[test]
fn a_prompt_is_computed_in_chunks_and_an_answer_token_by_token() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(EngineConfig { max_batched_tokens: 32, ..config });
        let id = bench.submit(&prompt(1, 100), 3);
        let mut cached = vec![];
        while bench.step() {
            cached.push(bench.engine.truth().device.len());
        }
        // Four prefill steps and two decode steps; vLLM says what a step will fill when it begins.
        let expected = match config.shape {
            Shape::Vllm => [2, 4, 6, 6, 6, 6, 6],
            Shape::Sglang => [0, 2, 4, 6, 6, 6, 6],
        };
        assert_eq!(cached, expected);
        let answer = bench.answer(id);
        let tokens: Vec<u32> = answer.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, Completion::of(&prompt(1, 100)).tokens(3).collect::<Vec<_>>());
        assert_eq!(
            answer.iter().map(|(_, at)| at.as_micros()).collect::<Vec<_>>(),
            [100_000, 110_000, 120_000]
        );
    }
}

#[test]
fn decoding_goes_before_prefill_and_both_share_a_step() {
    let mut bench = Bench::new(EngineConfig { max_batched_tokens: 16, ..vllm() });
    let first = bench.submit(&prompt(1, 16), 4);
    bench.step();
    let second = bench.submit(&prompt(2, 30), 1);
    bench.run();
    // The first decodes at once beside 15 tokens of the second's prompt: 10 + 15 ms a step.
    let times = |id| bench.answer(id).iter().map(|(_, at)| at.as_micros() / 1_000).collect::<Vec<_>>();
    assert_eq!(times(first), [16, 41, 66, 76]);
    assert_eq!(times(second), [66]);
}

#[test]
fn no_more_run_than_may_and_the_rest_waits_in_order() {
    let mut bench = Bench::new(EngineConfig { max_running: 2, ..vllm() });
    let ids: Vec<_> = (0..5).map(|seed| bench.submit(&prompt(seed, 20), 2)).collect();
    bench.step();
    let load = bench.engine.load();
    assert_eq!((load.running, load.waiting, load.used_blocks, load.used_tokens), (2, 3, 4, 64));
    assert_eq!((load.waiting_uncached_tokens, load.prefill_tokens, load.batched_tokens), (60, 40, 40));
    bench.run();
    let firsts: Vec<_> = ids.iter().map(|id| bench.answer(*id)[0].1).collect();
    assert!(firsts.is_sorted() && firsts[1] < firsts[2], "{firsts:?}");
    let load = bench.engine.load();
    assert_eq!((load.finished, load.generated_tokens, load.prompt_tokens), (5, 10, 100));
}

#[test]
fn a_full_pool_makes_requests_wait() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(EngineConfig { blocks: 4, ..config });
        bench.submit(&prompt(1, 48), 1);
        bench.submit(&prompt(2, 32), 1);
        bench.step();
        let load = bench.engine.load();
        assert_eq!((load.running, load.waiting, load.used_blocks), (1, 1, 3));
        bench.run();
        assert_eq!(bench.engine.load().preemptions, 0);
    }
}

#[test]
fn the_newest_gives_up_its_blocks_and_answers_all_the_same() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(EngineConfig { blocks: 6, ..config });
        let ids = [bench.submit(&prompt(1, 40), 40), bench.submit(&prompt(2, 40), 40)];
        bench.run();
        assert!(bench.engine.load().preemptions > 0);
        for (id, seed) in ids.into_iter().zip([1, 2]) {
            let tokens: Vec<u32> = bench.answer(id).iter().map(|(token, _)| *token).collect();
            assert_eq!(tokens, Completion::of(&prompt(seed, 40)).tokens(40).collect::<Vec<_>>());
            assert_eq!(bench.usage(id).unwrap().cached_tokens, 0);
        }
    }
}

#[test]
fn old_content_makes_room_tail_first() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(EngineConfig { blocks: 8, ..config });
        bench.ask(&prompt(1, 64), 1);
        bench.ask(&prompt(2, 64), 1);
        bench.ask(&prompt(1, 64), 1);
        bench.ask(&prompt(3, 32), 1);
        // The second was not used since; its tail is gone and its head still there.
        assert_eq!(bench.engine.cached_tokens(&prompt(1, 65)).0, 64);
        let second = bench.engine.cached_tokens(&prompt(2, 65)).0;
        assert!((16..64).contains(&second), "{second}");
    }
}

#[test]
fn a_reset_is_refused_while_blocks_are_held() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(EngineConfig { host_blocks: 8, ..config });
        bench.submit(&prompt(1, 40), 5);
        bench.step();
        let mut out = Vec::new();
        assert!(!bench.engine.reset_prefix_cache(bench.now, &mut out) && out.is_empty());
        bench.run();
        let clears = bench.follower.clears;
        assert!(bench.engine.reset_prefix_cache(bench.now, &mut out));
        bench.follower.follow(&out);
        assert_eq!(bench.engine.truth(), Truth::default());
        let at_once = config.shape == Shape::Sglang;
        assert_eq!(
            (bench.follower.clears - clears, bench.engine.has_unpublished()),
            (at_once.into(), !at_once)
        );
        assert_eq!(bench.ask(&prompt(1, 40), 1).cached_tokens, 0);
        assert_eq!(bench.follower.clears - clears, 1);
        bench.follower.compare(&bench.engine);
    }
}

#[test]
fn sglang_begins_with_a_clear_and_vllm_does_not() {
    for (config, clears) in [(vllm(), 0), (sglang(), 1)] {
        let mut bench = Bench::new(config);
        bench.ask(&prompt(1, 40), 1);
        assert_eq!(bench.follower.clears, clears);
    }
}

#[test]
fn a_restart_fails_what_runs_and_forgets_everything() {
    for (seed, same) in [(HashSeed::Fixed(3), true), (HashSeed::PerProcess(3), false)] {
        let mut bench = Bench::new(EngineConfig { hash_seed: seed, max_running: 1, ..vllm() });
        let ids = [bench.submit(&prompt(1, 40), 9), bench.submit(&prompt(2, 40), 9)];
        bench.step();
        let before = bench.engine.truth();
        bench.engine.wedge();
        let mut out = Vec::new();
        bench.engine.restart(bench.now, &mut out);
        let at = bench.now;
        let failed = |id| Output::Failed { id, reason: Failure::Restarted, at };
        assert_eq!(out, ids.map(failed));
        assert_eq!((bench.engine.truth(), bench.engine.next_deadline()), (Truth::default(), None));
        bench.follower = Follower::default();
        bench.ask(&prompt(1, 40), 1);
        assert_eq!(bench.engine.truth().device[0].hash == before.device[0].hash, same);
    }
}

#[test]
fn what_left_the_device_comes_back_from_the_host() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(EngineConfig { blocks: 8, host_blocks: 32, ..config });
        for seed in 1..4 {
            bench.ask(&prompt(seed, 64), 1);
        }
        let (device, host) = bench.engine.cached_tokens(&prompt(1, 65));
        assert_eq!((device, host), (0, 64));
        assert_eq!(bench.ask(&prompt(1, 65), 1).cached_tokens, 64);
        assert_eq!(bench.engine.cached_tokens(&prompt(1, 65)), (64, 64));
        let load = bench.engine.load();
        assert!(load.host_blocks >= 12 && load.host_blocks <= load.total_host_blocks);
    }
}

#[test]
fn a_stalled_engine_does_nothing_and_then_goes_on() {
    let mut bench = Bench::new(vllm());
    let id = bench.submit(&prompt(1, 20), 2);
    bench.step();
    bench.engine.stall(Moment::from_millis(500));
    bench.run();
    assert_eq!(bench.answer(id).iter().map(|(_, at)| at.as_micros()).collect::<Vec<_>>(), [500_000, 510_000]);
    bench.engine.wedge();
    let id = bench.submit(&prompt(2, 20), 1);
    assert_eq!(bench.engine.next_deadline(), None);
    bench.now = Moment::from_millis(10_000);
    bench.advance();
    assert_eq!(bench.answer(id), []);
    bench.engine.unwedge(bench.now);
    bench.run();
    assert_eq!(bench.answer(id)[0].1, Moment::from_millis(10_020));
}

#[test]
fn what_can_never_be_answered_is_refused() {
    let mut engine = Engine::new(EngineConfig { blocks: 4, max_waiting: 1, ..vllm() }, DpRank(0));
    let mut ask = |id, prompt: Vec<u32>, max_tokens| {
        engine.submit(Moment::default(), Generation { id: RequestId(id), prompt, max_tokens })
    };
    assert_eq!(ask(0, vec![], 1), Err(Refusal::EmptyPrompt));
    assert_eq!(ask(0, vec![1], 0), Err(Refusal::NothingToGenerate));
    assert_eq!(ask(0, prompt(1, 60), 5), Err(Refusal::TooLong { tokens: 65, limit: 64 }));
    assert_eq!(ask(0, prompt(1, 60), 4), Ok(()));
    assert_eq!(ask(1, prompt(1, 6), 4), Err(Refusal::QueueFull { limit: 1 }));
    let mut out = Vec::new();
    engine.advance(Moment::default(), &mut out);
    let twice = Generation { id: RequestId(0), prompt: vec![1], max_tokens: 1 };
    assert_eq!(engine.submit(Moment::default(), twice), Err(Refusal::Taken(RequestId(0))));
}

#[test]
fn an_aborted_request_frees_its_blocks() {
    for config in [vllm(), sglang()] {
        let mut bench = Bench::new(config);
        let id = bench.submit(&prompt(1, 40), 9);
        let waiting = bench.submit(&prompt(2, 40), 9);
        bench.step();
        assert!(bench.engine.abort(id) && bench.engine.abort(waiting) && !bench.engine.abort(id));
        bench.run();
        assert_eq!((bench.answer(id), bench.answer(waiting)), (vec![], vec![]));
    }
}

#[derive(Clone, Debug)]
enum Deed {
    /// A prompt of one of a few families, this long, so that prefixes are shared.
    Submit {
        family: u32,
        tokens: u32,
        max_tokens: u32,
    },
    /// The next turn of the conversation that finished last.
    Continue {
        tokens: u32,
        max_tokens: u32,
    },
    Steps(u8),
    /// Comes late: many steps are due at once.
    Late(u16),
    Abort,
    Reset,
    Restart,
    Stall(u16),
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let submit = (0_u32..6, 1_u32..150, 1_u32..40).prop_map(|(family, tokens, max_tokens)| Deed::Submit {
        family,
        tokens,
        max_tokens,
    });
    let next = (1_u32..20, 1_u32..40).prop_map(|(tokens, max_tokens)| Deed::Continue { tokens, max_tokens });
    let deed = prop_oneof![
        10 => submit,
        6 => next,
        8 => (1_u8..20).prop_map(Deed::Steps),
        2 => (1_u16..2_000).prop_map(Deed::Late),
        1 => Just(Deed::Abort),
        1 => Just(Deed::Reset),
        1 => (1_u16..2_000).prop_map(Deed::Stall),
        1 => Just(Deed::Restart),
    ];
    proptest::collection::vec(deed, 1..60)
}

fn configs() -> impl Strategy<Value = EngineConfig> {
    let numbers = (1_u32..24, 2_u32..40, prop_oneof![Just(0_u32), 1_u32..60], 1_u32..8, 1_u32..128);
    let forms = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (numbers, forms).prop_map(
        |((block_size, blocks, host_blocks, max_running, max_batched_tokens), forms)| {
            let (sglang, array, bytes, drawn) = forms;
            EngineConfig {
                shape: if sglang { Shape::Sglang } else { Shape::Vllm },
                encoding: if array { Encoding::Array } else { Encoding::Map },
                hash: if bytes { HashKind::Bytes } else { HashKind::Int },
                hash_seed: if drawn { HashSeed::PerProcess(5) } else { HashSeed::Fixed(5) },
                block_size: BlockSize::new(block_size).unwrap(),
                blocks,
                host_blocks,
                max_running,
                max_batched_tokens,
                ..vllm()
            }
        },
    )
}

/// A random history on one engine. What a request is told to be spared is looked up at the very moment when
/// it is admitted, in what the events have said.
fn play(config: EngineConfig, deeds: &[Deed]) -> Vec<Output> {
    let mut bench = Bench::new(config);
    let mut prompts: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut last: Vec<u32> = vec![1];
    for deed in deeds {
        match deed {
            Deed::Submit { family, tokens, max_tokens } => {
                try_submit(&mut bench, &mut prompts, prompt(*family, *tokens), *max_tokens);
            }
            Deed::Continue { tokens, max_tokens } => {
                let mut turn = last.clone();
                turn.extend(Completion::of(&last).tokens(*max_tokens));
                turn.extend(prompt(9, *tokens));
                try_submit(&mut bench, &mut prompts, turn.clone(), *max_tokens);
                last = if turn.len() > 400 { vec![*tokens] } else { turn };
            }
            Deed::Steps(steps) => (0..*steps).for_each(|_| {
                bench.step();
            }),
            Deed::Late(millis) => {
                bench.now = bench.now + Duration::from_millis(u64::from(*millis));
                bench.advance();
            }
            Deed::Abort => {
                bench.engine.abort(RequestId(bench.next.saturating_sub(1)));
            }
            Deed::Reset => {
                let mut out = Vec::new();
                if bench.engine.reset_prefix_cache(bench.now, &mut out) {
                    assert_eq!(bench.engine.truth(), Truth::default());
                }
                bench.follower.follow(&out);
                bench.outputs.extend(out);
            }
            Deed::Restart => {
                bench.engine.restart(bench.now, &mut bench.outputs);
                bench.follower = Follower::default();
            }
            Deed::Stall(millis) => bench.engine.stall(bench.now + Duration::from_millis(u64::from(*millis))),
        }
        check_invariants(&bench.engine);
    }
    bench.run();
    for output in &bench.outputs {
        if let Output::Finished { id, usage, .. } = output {
            let answer: Vec<u32> = bench.answer(*id).iter().map(|(token, _)| *token).collect();
            let expected = Completion::of(&prompts[id]).tokens(usage.completion_tokens);
            assert_eq!(answer, expected.collect::<Vec<_>>());
            assert_eq!(usage.prompt_tokens as usize, prompts[id].len());
            assert_eq!(usage.cached_tokens % config.block_size.get(), 0);
            assert!(usage.cached_tokens < usage.prompt_tokens);
        }
    }
    bench.outputs
}

fn try_submit(
    bench: &mut Bench,
    prompts: &mut HashMap<RequestId, Vec<u32>>,
    prompt: Vec<u32>,
    max_tokens: u32,
) {
    let id = RequestId(bench.next);
    bench.next += 1;
    let idle = bench.engine.load().running + bench.engine.load().waiting == 0;
    // vLLM's shape copies to the host tier when the next step begins, so what the tier has is not known yet.
    let settled =
        idle && (bench.engine.config().shape == Shape::Sglang || bench.engine.config().host_blocks == 0);
    let (_, spared) = bench.engine.cached_tokens(&prompt);
    prompts.insert(id, prompt.clone());
    let taken = bench.engine.submit(bench.now, Generation { id, prompt, max_tokens });
    // Admitted at once, a request is spared exactly what the caches held of it.
    if taken.is_ok() && settled && bench.now.as_micros().is_multiple_of(2) {
        bench.run();
        assert_eq!(bench.usage(id).unwrap().cached_tokens, spared);
    }
}

fn check_invariants(engine: &Engine) {
    let load = engine.load();
    assert!(load.used_blocks <= load.total_blocks && load.cached_blocks <= load.total_blocks);
    assert!(load.running <= load.max_running && load.host_blocks <= load.total_host_blocks);
    let truth = engine.truth();
    let copies: u32 = truth.device.iter().map(|block| block.copies).sum();
    assert_eq!(copies, load.cached_blocks);
    if engine.config().shape == Shape::Sglang {
        // Only leaves leave a tree, and it holds nothing twice.
        for block in &truth.device {
            let parent_held = block
                .parent
                .as_ref()
                .is_none_or(|parent| truth.device.iter().any(|held| held.hash == *parent));
            assert!(parent_held && block.copies == 1, "{block:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// After every step the published events, read by our own decoder, say exactly what the caches hold; no
    /// block leaks; and the same history gives the same outputs.
    #[test]
    fn events_tell_the_truth_under_any_history(config in configs(), deeds in deeds()) {
        let outputs = play(config, &deeds);
        prop_assert_eq!(play(config, &deeds), outputs);
    }
}

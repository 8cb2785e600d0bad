//! Load in Prometheus' text format: the last resort.
//!
//! The library reads single lines, and only those of a metric that we know: one malformed line of a scrape of
//! thousands spoils itself, and histograms cost nothing.

use std::collections::{BTreeMap, BTreeSet};

use prom_text_format_parser::Scrape;

use crate::load::answer::MAX_ENTRIES;
use crate::load::{LoadAnswer, LoadEntry, NotOffered, Outcome, RawNumber, RawRankLoad, SleepState, TryAgain};

/// Longest line that is looked at: a name, a dozen labels, a number.
const MAX_LINE: usize = 16 << 10;

/// A figure that a metric stands for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Figure {
    Running,
    Waiting,
    Usage,
    /// The older of two names for the usage; the newer one wins.
    UsageOnce,
    UsedTokens,
    MaxTokens,
    /// Tokens that the KV cache holds, from the labels.
    CacheTokens,
    /// Blocks that the KV cache holds, from the labels: the sum over the engines of one front-end, repeated
    /// for each.
    CacheBlocks,
    /// 1 while the engine is awake.
    Awake,
    /// 1 while its weights are offloaded, and its cache is gone with them.
    WeightsOffloaded,
    /// 1 while it has discarded everything.
    DiscardedAll,
}

fn figure(metric: &str) -> Option<Figure> {
    // SGLang wrote a colon up to 0.5.3, and an underscore since.
    if let Some(name) = metric.strip_prefix("sglang:").or_else(|| metric.strip_prefix("sglang_")) {
        return Some(match name {
            "num_running_reqs" => Figure::Running,
            "num_queue_reqs" => Figure::Waiting,
            "token_usage" => Figure::Usage,
            "num_used_tokens" => Figure::UsedTokens,
            "max_total_num_tokens" => Figure::MaxTokens,
            _ => return None,
        });
    }
    Some(match metric.strip_prefix("vllm:")? {
        "num_requests_running" => Figure::Running,
        "num_requests_waiting" => Figure::Waiting,
        "kv_cache_usage_perc" => Figure::Usage,
        "gpu_cache_usage_perc" => Figure::UsageOnce,
        "cache_config_info" => Figure::CacheTokens,
        "engine_sleep_state" => Figure::Awake,
        _ => return None,
    })
}

/// The figures of one engine; `None` is the series that name no engine.
type Series = BTreeMap<Option<u32>, BTreeMap<Figure, RawNumber>>;

/// Reads a scrape.
///
/// Series become ranks' load if every one names its engine by a number, and the numbers are those of `owned`,
/// the ranks that are declared at this URL: one side must hold the other whole, or the numbers count something
/// else. Otherwise all of it is one aggregate, which is no rank's. Two series for one figure of one engine
/// contradict each other, and spoil its entry, unless they are equal: then several parts of the engine say the
/// same.
///
/// # Errors
/// No metric that we know is another schema; none that can be read is empty.
pub fn read(body: &str, owned: &BTreeSet<u32>) -> Result<LoadAnswer, Outcome> {
    let mut known = false;
    let mut series = Series::new();
    for line in body.lines() {
        let name = line.split(['{', ' ', '\t']).next().unwrap_or_default();
        let Some(figure) = figure(name) else { continue };
        known = true;
        if line.len() > MAX_LINE {
            continue;
        }
        for (engine, figure, value) in samples(line, figure) {
            if series.len() >= MAX_ENTRIES && !series.contains_key(&engine) {
                continue;
            }
            let again = |known: &mut RawNumber| {
                if *known != value {
                    *known = RawNumber::Unreadable;
                }
            };
            series.entry(engine).or_default().entry(figure).and_modify(again).or_insert(value);
        }
    }
    // Some versions describe their cache once, for no engine in particular.
    let size = |figure: &Figure| matches!(figure, Figure::CacheTokens | Figure::CacheBlocks);
    if series.len() > 1 && series.get(&None).is_some_and(|all| all.keys().all(size)) {
        series.remove(&None);
    }
    match (known, series.is_empty()) {
        _ if body.trim_ascii().is_empty() => Err(Outcome::TryAgain(TryAgain::Empty)),
        (false, _) => Err(Outcome::NotOffered(NotOffered::OtherSchema)),
        (true, true) => Err(Outcome::TryAgain(TryAgain::Empty)),
        (true, false) => Ok(answer(&series, owned)),
    }
}

/// The engine that a line is about, and what it says of it.
fn samples(line: &str, figure: Figure) -> Vec<(Option<u32>, Figure, RawNumber)> {
    let Ok(scrape) = Scrape::parse(line.trim_end()) else { return Vec::new() };
    let Some(sample) = scrape.metrics.first().and_then(|metric| metric.samples.first()) else {
        return Vec::new();
    };
    let label = |key: &str| sample.labels.iter().find(|label| label.key == key).map(|label| &*label.value);
    // vLLM's label, then SGLang's.
    let engine = label("engine").or_else(|| label("dp_rank")).and_then(|engine| engine.parse().ok());
    let value = sample.value.value.parse().map_or(RawNumber::Unreadable, RawNumber::Value);
    match figure {
        Figure::CacheTokens => {
            // Before it has profiled, an engine writes `None`.
            let size = |key| label(key).and_then(|size| size.parse::<f64>().ok()).map(RawNumber::Value);
            let tokens = size("kv_cache_size_tokens").map(|tokens| (engine, Figure::CacheTokens, tokens));
            let blocks = size("num_gpu_blocks").map(|blocks| (engine, Figure::CacheBlocks, blocks));
            tokens.into_iter().chain(blocks).collect()
        }
        Figure::Awake => {
            let state = match label("sleep_state") {
                Some("awake") => Figure::Awake,
                Some("weights_offloaded") => Figure::WeightsOffloaded,
                Some("discard_all") => Figure::DiscardedAll,
                _ => return Vec::new(),
            };
            vec![(engine, state, value)]
        }
        figure => vec![(engine, figure, value)],
    }
}

fn answer(series: &Series, owned: &BTreeSet<u32>) -> LoadAnswer {
    let engines: Option<BTreeSet<u32>> = series.keys().copied().collect();
    match engines {
        Some(engines) if engines.is_subset(owned) || owned.is_subset(&engines) => {
            let entries = engines.iter().zip(series.values());
            let entry = |(&rank, figures)| LoadEntry::new(rank, sized(load(figures), figures, series));
            LoadAnswer::of_ranks(entries.map(entry).collect())
        }
        _ => LoadAnswer { aggregate: Some(together(series)), ..LoadAnswer::default() },
    }
}

fn load(figures: &BTreeMap<Figure, RawNumber>) -> RawRankLoad {
    let get = |figure| figures.get(&figure).copied().unwrap_or_default();
    let either = |first, second| match get(first) {
        RawNumber::Absent => get(second),
        found => found,
    };
    RawRankLoad {
        num_running_reqs: get(Figure::Running),
        num_waiting_reqs: get(Figure::Waiting),
        num_used_tokens: get(Figure::UsedTokens),
        max_total_num_tokens: either(Figure::MaxTokens, Figure::CacheTokens),
        token_usage: either(Figure::Usage, Figure::UsageOnce),
        sleep: sleep(figures),
        ..RawRankLoad::default()
    }
}

/// A number of blocks is the sum over all engines whose labels repeat it. It is not multiplied by the block
/// size beside it: under context parallelism that is another one than the engine schedules by.
fn sized(load: RawRankLoad, figures: &BTreeMap<Figure, RawNumber>, series: &Series) -> RawRankLoad {
    let Some(RawNumber::Value(sum)) = figures.get(&Figure::CacheBlocks).copied() else { return load };
    let same = |other: &&BTreeMap<Figure, RawNumber>| {
        other.get(&Figure::CacheBlocks) == Some(&RawNumber::Value(sum))
    };
    let engines = series.values().filter(same).count().max(1);
    let total_is_divided = engines > 1;
    RawRankLoad { kv_total_blocks: (sum / engines as f64).floor().into(), total_is_divided, ..load }
}

/// Both kinds of sleep that vLLM has take the cache; one that is neither has only stopped to serve.
fn sleep(figures: &BTreeMap<Figure, RawNumber>) -> Option<SleepState> {
    let is = |figure, number: f64| figures.get(&figure) == Some(&RawNumber::Value(number));
    let cache_gone = is(Figure::WeightsOffloaded, 1.0) || is(Figure::DiscardedAll, 1.0);
    match () {
        () if is(Figure::Awake, 0.0) => Some(SleepState::Asleep { cache_gone }),
        () if is(Figure::Awake, 1.0) => Some(SleepState::Awake),
        () => None,
    }
}

/// The counters of all series, summed where every one has them. Shares have no sum.
fn together(series: &Series) -> RawRankLoad {
    let loads: Vec<_> = series.values().map(load).collect();
    if let [only] = loads[..] {
        return only;
    }
    let sum = |of: fn(&RawRankLoad) -> RawNumber| {
        let mut total = 0.0;
        for load in &loads {
            match of(load) {
                RawNumber::Value(value) => total += value,
                other => return other,
            }
        }
        RawNumber::Value(total)
    };
    let sleep = loads[0].sleep.filter(|state| loads.iter().all(|load| load.sleep == Some(*state)));
    RawRankLoad {
        sleep,
        num_running_reqs: sum(|load| load.num_running_reqs),
        num_waiting_reqs: sum(|load| load.num_waiting_reqs),
        num_used_tokens: sum(|load| load.num_used_tokens),
        max_total_num_tokens: sum(|load| load.max_total_num_tokens),
        ..RawRankLoad::default()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn owned(ranks: std::ops::Range<u32>) -> BTreeSet<u32> {
        ranks.collect()
    }

    const VLLM: &str = r#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="4",model_name="a, b={c}"} 3.0
vllm:num_requests_running{engine="5",model_name="a"} 0.0
vllm:num_requests_waiting{engine="4",model_name="a"} 1
vllm:kv_cache_usage_perc{engine="4",model_name="a"} 0.25
vllm:gpu_cache_usage_perc{engine="4",model_name="a"} 0.9
vllm:gpu_cache_usage_perc{engine="5",model_name="a"} 0.5
vllm:cache_config_info{block_size="16",engine="4",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="5",num_gpu_blocks="None"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="4",le="0.3"} 7
this line is broken {
"#;

    proptest::proptest! {
        /// Whatever follows a name that we know is read or passed over.
        #[test]
        fn no_line_is_fatal(rest in "[\\PC{}=,\"\\\\ \t+.eE0-9-]{0,40}", cut in 0_usize..80) {
            for name in ["vllm:num_requests_running", "sglang_token_usage", "vllm:cache_config_info{"] {
                let _ = read(&format!("{name}{rest}\n{name}{{engine=\"0\"}} {rest}"), &owned(0..2));
            }
            let cut = VLLM.char_indices().nth(cut * VLLM.len() / 80).map_or(0, |(at, _)| at);
            let _ = read(&VLLM[..cut], &owned(4..6));
        }
    }

    /// L10: per rank where the engine's number is a global rank; old and new names. L5: the profiled size.
    #[test]
    fn vllm_per_rank() {
        for owned in [owned(4..6), owned(4..8), owned(5..6)] {
            let answer = read(VLLM, &owned).unwrap();
            assert_eq!(answer.aggregate, None);
            let ranks: Vec<_> = answer.entries.iter().map(|entry| entry.dp_rank).collect();
            assert_eq!(ranks, [Some(4), Some(5)]);
            let (four, five) =
                (answer.entries[0].load.check().unwrap().0, answer.entries[1].load.check().unwrap().0);
            assert_eq!((four.num_running_reqs, four.num_waiting_reqs), (Some(3), Some(1)));
            assert_eq!((four.token_usage, four.max_total_num_tokens), (Some(0.25), None));
            assert_eq!((four.kv_total_blocks, four.total_is_divided), (Some(100), false));
            assert_eq!((five.num_running_reqs, five.num_waiting_reqs), (Some(0), None));
            assert_eq!((five.token_usage, five.kv_total_blocks), (Some(0.5), None));
        }
    }

    /// L17, D11: blocks of a front-end's engines are shared out; the profiled tokens are each engine's own.
    #[test]
    fn a_sum_over_engines_is_shared_out() {
        let config = |engine: u32, more: &str| {
            format!(
                "vllm:cache_config_info{{block_size=\"16\",engine=\"{engine}\",num_gpu_blocks=\"2001\"{more}}} 1.0\n"
            )
        };
        let of = |text: &str| read(text, &owned(0..2)).unwrap().entries[0].load.check().unwrap().0;
        let shared = of(&(config(0, "") + &config(1, "")));
        assert_eq!((shared.kv_total_blocks, shared.total_is_divided), (Some(1000), true));
        let alone = of(&config(0, ""));
        assert_eq!((alone.kv_total_blocks, alone.total_is_divided), (Some(2001), false));
        let profiled = of(&(config(0, ",kv_cache_size_tokens=\"16000\"") + &config(1, "")));
        assert_eq!(profiled.max_total_num_tokens, Some(16_000));
    }

    /// D10, L18: equal series of several TP ranks are one report, different ones contradict each other.
    #[test]
    fn equal_series_are_one_report() {
        let text = |second: f64| {
            format!(
                "sglang_num_running_reqs{{dp_rank=\"0\",tp_rank=\"0\"}} 5.0\n\
                 sglang_num_running_reqs{{dp_rank=\"0\",tp_rank=\"1\"}} {second}\n\
                 sglang_num_running_reqs{{dp_rank=\"1\",tp_rank=\"2\"}} 7\n"
            )
        };
        let running = |second| {
            let answer = read(&text(second), &owned(0..2)).unwrap();
            let read = |entry: &LoadEntry| entry.load.check().ok()?.0.num_running_reqs;
            answer.entries.iter().map(read).collect::<Vec<_>>()
        };
        assert_eq!(running(5.0), [Some(5), Some(7)]);
        assert_eq!(running(6.0), [None, Some(7)]);
    }

    /// S5: both kinds of vLLM's sleep take the cache; an engine that says nothing is not asleep.
    #[test]
    fn sleep_is_read_per_engine() {
        let state = |engine: u32, state: &str, value: u8| {
            format!("vllm:engine_sleep_state{{engine=\"{engine}\",sleep_state=\"{state}\"}} {value}.0\n")
        };
        let text = [
            state(0, "awake", 1),
            state(1, "awake", 0),
            state(1, "weights_offloaded", 1),
            state(2, "awake", 0),
            state(2, "discard_all", 1),
            state(3, "awake", 0),
            state(3, "discard_all", 0),
            "vllm:num_requests_running{engine=\"4\"} 1\n".into(),
        ]
        .concat();
        let answer = read(&text, &owned(0..5)).unwrap();
        let states: Vec<_> = answer.entries.iter().map(|entry| entry.load.sleep).collect();
        let asleep = |cache_gone| Some(SleepState::Asleep { cache_gone });
        assert_eq!(states, [Some(SleepState::Awake), asleep(true), asleep(true), asleep(false), None]);
        let aggregate = |text: &str| read(text, &owned(7..9)).unwrap().aggregate.unwrap().sleep;
        assert_eq!(aggregate(&text), None);
        assert_eq!(aggregate(&(state(0, "awake", 0) + &state(1, "awake", 0))), asleep(false));
    }

    /// L10: a cache that is described for no engine in particular takes nothing from the others.
    #[test]
    fn a_cache_of_no_engine_is_passed_over() {
        let text = format!("{VLLM}vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"7\"}} 1.0\n");
        let answer = read(&text, &owned(4..6)).unwrap();
        assert_eq!((answer.entries.len(), answer.aggregate), (2, None));
    }

    /// L10: numbers that count something else than global ranks make one aggregate, and no rank's load.
    #[test]
    fn engines_that_are_no_ranks_are_an_aggregate() {
        for owned in [owned(0..4), owned(5..8)] {
            let answer = read(VLLM, &owned).unwrap();
            assert!(answer.entries.is_empty());
            let all = answer.aggregate.unwrap();
            assert_eq!((all.num_running_reqs, all.token_usage), (RawNumber::Value(3.0), RawNumber::Absent));
            assert_eq!(all.num_waiting_reqs, RawNumber::Absent);
        }
    }

    /// L10: SGLang's names, old and new, without a rank and with one.
    #[test]
    fn sglang_old_and_new() {
        for prefix in ["sglang:", "sglang_"] {
            let text = format!(
                "{prefix}num_running_reqs{{model_name=\"m\"}} 2.0\n{prefix}num_queue_reqs 1\n{prefix}token_usage 5e-1\n{prefix}gen_throughput 9.0\n"
            );
            let answer = read(&text, &owned(0..1)).unwrap();
            assert!(answer.entries.is_empty());
            let all = answer.aggregate.unwrap().check().unwrap().0;
            assert_eq!(
                (all.num_running_reqs, all.num_waiting_reqs, all.token_usage),
                (Some(2), Some(1), Some(0.5))
            );
            let text = format!("{prefix}num_running_reqs{{dp_rank=\"1\"}} 2.0\n");
            assert_eq!(read(&text, &owned(0..2)).unwrap().entries[0].dp_rank, Some(1));
        }
    }

    /// L4: what cannot be spoils its engine's entry; L9: other metrics are another schema.
    #[test]
    fn bad_values_spoil_their_engine() {
        let text = "vllm:num_requests_running{engine=\"0\"} NaN\nvllm:num_requests_running{engine=\"1\"} -1\n\
                    vllm:num_requests_running{engine=\"2\"} +Inf\nvllm:num_requests_running{engine=\"3\"} 1e300\n\
                    vllm:num_requests_running{engine=\"4\"} 1\nvllm:num_requests_running{engine=\"4\"} 2\n\
                    vllm:num_requests_running{engine=\"5\"} 2 1700000000000\nvllm:num_requests_running{engine=\"6\"";
        let answer = read(text, &owned(0..8)).unwrap();
        let ranks: Vec<_> = answer.believable().iter().map(|entry| entry.dp_rank.unwrap()).collect();
        assert_eq!((answer.entries.len(), ranks), (6, vec![5]));
        let other = Err(Outcome::NotOffered(NotOffered::OtherSchema));
        assert_eq!(read("go_goroutines 7\n", &owned(0..1)), other);
        assert_eq!(read("<html>", &owned(0..1)), other);
        assert_eq!(read("\n", &owned(0..1)), Err(Outcome::TryAgain(TryAgain::Empty)));
        let broken = read("vllm:num_requests_running{engine=", &owned(0..1));
        assert_eq!(broken, Err(Outcome::TryAgain(TryAgain::Empty)));
    }
}

//! Load in Prometheus' text format: the last resort.
//!
//! The library reads single lines, and only those of a metric that we know: one malformed line of a scrape of
//! thousands spoils itself, and histograms cost nothing.

use std::collections::{BTreeMap, BTreeSet};

use prom_text_format_parser::Scrape;

use crate::load::answer::MAX_ENTRIES;
use crate::load::{LoadAnswer, LoadEntry, NotOffered, Outcome, RawNumber, RawRankLoad, TryAgain};

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
    /// The size stands in the labels.
    CacheConfig,
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
        "cache_config_info" => Figure::CacheConfig,
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
/// contradict each other, and spoil its entry.
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
        if let Some((engine, value)) = sample(line, figure)
            && (series.len() < MAX_ENTRIES || series.contains_key(&engine))
        {
            let twice = |known: &mut RawNumber| *known = RawNumber::Unreadable;
            series.entry(engine).or_default().entry(figure).and_modify(twice).or_insert(value);
        }
    }
    // Some versions describe their cache once, for no engine in particular.
    if series.len() > 1 && series.get(&None).is_some_and(|all| all.keys().eq([&Figure::CacheConfig])) {
        series.remove(&None);
    }
    match (known, series.is_empty()) {
        _ if body.trim_ascii().is_empty() => Err(Outcome::TryAgain(TryAgain::Empty)),
        (false, _) => Err(Outcome::NotOffered(NotOffered::OtherSchema)),
        (true, true) => Err(Outcome::TryAgain(TryAgain::Empty)),
        (true, false) => Ok(answer(&series, owned)),
    }
}

/// The engine that a line is about, and its value.
fn sample(line: &str, figure: Figure) -> Option<(Option<u32>, RawNumber)> {
    let scrape = Scrape::parse(line.trim_end()).ok()?;
    let sample = scrape.metrics.first()?.samples.first()?;
    let label = |key: &str| sample.labels.iter().find(|label| label.key == key).map(|label| &*label.value);
    // vLLM's label, then SGLang's.
    let engine = label("engine").or_else(|| label("dp_rank")).and_then(|engine| engine.parse().ok());
    let value = match figure {
        Figure::CacheConfig => {
            let size = |key| label(key).and_then(|size| size.parse::<f64>().ok());
            // Before it has profiled, an engine writes `None`.
            RawNumber::Value(size("block_size")? * size("num_gpu_blocks")?)
        }
        _ => sample.value.value.parse().map_or(RawNumber::Unreadable, RawNumber::Value),
    };
    Some((engine, value))
}

fn answer(series: &Series, owned: &BTreeSet<u32>) -> LoadAnswer {
    let engines: Option<BTreeSet<u32>> = series.keys().copied().collect();
    match engines {
        Some(engines) if engines.is_subset(owned) || owned.is_subset(&engines) => {
            let entries = engines.iter().zip(series.values());
            LoadAnswer::of_ranks(
                entries.map(|(&rank, figures)| LoadEntry::new(rank, load(figures))).collect(),
            )
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
        max_total_num_tokens: either(Figure::MaxTokens, Figure::CacheConfig),
        token_usage: either(Figure::Usage, Figure::UsageOnce),
        ..RawRankLoad::default()
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
    RawRankLoad {
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
            assert_eq!((four.token_usage, four.max_total_num_tokens), (Some(0.25), Some(1600)));
            assert_eq!((five.num_running_reqs, five.num_waiting_reqs), (Some(0), None));
            assert_eq!((five.token_usage, five.max_total_num_tokens), (Some(0.5), None));
        }
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

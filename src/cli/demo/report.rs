//! What came of it, in figures.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use rankwise::ids::RankKey;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::output::table;
use super::drive::RoutingPolicy;

/// Counts what is answered, from many tasks.
#[derive(Debug)]
pub struct Tally {
    counts: Mutex<Counts>,
}

/// What has been answered.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Per rank, in the order of the targets.
    pub ranks: Vec<RankCounts>,
    pub failed: u64,
    /// The first failure.
    pub why: Option<String>,
    /// Tokens that the service expected to be cached; `None` where it was not asked.
    predicted: Option<u64>,
    /// Microseconds to the first token, one per request.
    first_token: Vec<u64>,
}

/// One rank's part.
#[derive(Clone, Debug)]
pub struct RankCounts {
    pub rank: RankKey,
    /// Requests answered, each of which was a pick.
    pub picks: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
}

impl Tally {
    pub fn new(ranks: impl Iterator<Item = RankKey>) -> Self {
        let ranks = ranks.map(|rank| RankCounts { rank, picks: 0, prompt_tokens: 0, cached_tokens: 0 });
        Self { counts: Mutex::new(Counts { ranks: ranks.collect(), ..Counts::default() }) }
    }

    /// A request was answered: as the engine says in its usage.
    pub fn answered(&self, target: usize, first: Duration, prompt: u64, cached: u64, predicted: Option<u64>) {
        self.with(|counts| {
            let rank = &mut counts.ranks[target];
            rank.picks += 1;
            rank.prompt_tokens += prompt;
            rank.cached_tokens += cached;
            counts.first_token.push(u64::try_from(first.as_micros()).unwrap_or(u64::MAX));
            if let Some(predicted) = predicted {
                *counts.predicted.get_or_insert(0) += predicted;
            }
        });
    }

    /// A request failed.
    pub fn failed(&self, why: &anyhow::Error) {
        self.with(|counts| {
            counts.failed += 1;
            counts.why.get_or_insert_with(|| format!("{why:#}"));
        });
    }

    /// Everything so far.
    pub fn counts(&self) -> Counts {
        self.with(|counts| counts.clone())
    }

    /// Everything so far, in figures.
    pub fn figures(&self) -> Figures {
        self.counts().figures()
    }

    fn with<T>(&self, look: impl FnOnce(&mut Counts) -> T) -> T {
        // Nothing that is done under the lock can leave it half done.
        look(&mut self.counts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Counts {
    pub fn figures(mut self) -> Figures {
        self.first_token.sort_unstable();
        let sum = |of: fn(&RankCounts) -> u64| self.ranks.iter().map(of).sum::<u64>();
        let (prompt_tokens, cached_tokens) = (sum(|rank| rank.prompt_tokens), sum(|rank| rank.cached_tokens));
        Figures {
            hit_rate: share(cached_tokens, prompt_tokens),
            ttft_p50: quantile(&self.first_token, 0.50),
            ttft_p99: quantile(&self.first_token, 0.99),
            requests: sum(|rank| rank.picks),
            failed: self.failed,
            why_failed: self.why,
            prompt_tokens,
            cached_tokens,
            predicted_tokens: self.predicted,
            picks: self.ranks.iter().map(|rank| (rank.rank.to_string(), rank.picks)).collect(),
        }
    }
}

/// A policy's figures.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Figures {
    /// Share of prompt tokens that the engines found cached; `None` without any.
    pub hit_rate: Option<f64>,
    /// Milliseconds from the moment when a request could be routed to its first token.
    pub ttft_p50: Option<f64>,
    pub ttft_p99: Option<f64>,
    pub requests: u64,
    pub failed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_failed: Option<String>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_tokens: Option<u64>,
    pub picks: BTreeMap<String, u64>,
}

/// All policies' figures.
#[derive(Debug)]
pub struct Report {
    setting: Value,
    policies: Vec<(RoutingPolicy, Figures)>,
}

impl Report {
    pub fn new(seed: u64, seconds: u64, workers: u32, ranks: u32) -> Self {
        let setting = json!({ "seed": seed, "seconds": seconds, "workers": workers, "ranks": ranks });
        Self { setting, policies: Vec::new() }
    }

    pub fn add(&mut self, policy: RoutingPolicy, figures: Figures) {
        self.policies.push((policy, figures));
    }

    /// Every request was answered, and no other policy found more cached than the KV-aware one.
    pub fn is_ok(&self) -> bool {
        let rate = |wanted| {
            let found = self.policies.iter().find(|(policy, _)| *policy == wanted);
            found.and_then(|(_, figures)| figures.hit_rate)
        };
        let Some(aware) = rate(RoutingPolicy::KvAware) else { return false };
        let failed: u64 = self.policies.iter().map(|(_, figures)| figures.failed).sum();
        let best = [RoutingPolicy::RoundRobin, RoutingPolicy::LeastLoad].into_iter().filter_map(rate);
        failed == 0 && best.fold(0.0, f64::max) <= aware
    }

    /// As JSON, with `more` beside the figures.
    pub fn json(&self, more: Value) -> Value {
        let mut all = serde_json::Map::new();
        all.insert("ok".to_owned(), self.is_ok().into());
        all.insert("ttft_unit".to_owned(), "ms".into());
        for part in [&self.setting, &more] {
            all.extend(part.as_object().cloned().unwrap_or_default());
        }
        all.extend(self.policies.iter().map(|(policy, figures)| (policy.name().to_owned(), json!(figures))));
        Value::Object(all)
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut lines = table(
            ["policy", "requests", "hit rate", "TTFT p50", "TTFT p99", "picks by rank (fewest to most)"],
            1,
        );
        for (policy, figures) in &self.policies {
            let (fewest, most) = (figures.picks.values().min(), figures.picks.values().max());
            lines.add_row([
                policy.name().to_owned(),
                figures.requests.to_string(),
                percent(figures.hit_rate),
                millis(figures.ttft_p50),
                millis(figures.ttft_p99),
                format!("{} to {}", fewest.unwrap_or(&0), most.unwrap_or(&0)),
            ]);
        }
        let mut text = format!("\n{lines}\n\nThe same conversations each time, on engines that start empty.");
        for (policy, figures) in &self.policies {
            if let Some(predicted) = figures.predicted_tokens {
                text.push_str(&format!(
                    " {} expected {predicted} prompt tokens to be cached; the engines found {}.",
                    policy.name(),
                    figures.cached_tokens
                ));
            }
            if let Some(why) = &figures.why_failed {
                text.push_str(&format!(
                    "\n{}: {} requests FAILED, first: {why}",
                    policy.name(),
                    figures.failed
                ));
            }
        }
        text
    }
}

/// A share; `None` of nothing.
pub fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

pub fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1} %", share * 100.0))
}

fn millis(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.1} ms"))
}

/// The smallest of the sorted microseconds that at least `share` of them do not exceed, in milliseconds.
fn quantile(sorted: &[u64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).map(|micros| *micros as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(hit_rate: f64) -> Figures {
        let mut figures = Counts::default().figures();
        figures.hit_rate = Some(hit_rate);
        figures
    }

    #[test]
    fn quantiles_are_values_that_occurred() {
        assert_eq!(quantile(&[], 0.5), None);
        assert_eq!(quantile(&[7_000], 0.99), Some(7.0));
        let hundred: Vec<u64> = (1..=100).map(|at| at * 1_000).collect();
        assert_eq!((quantile(&hundred, 0.5), quantile(&hundred, 0.99)), (Some(50.0), Some(99.0)));
    }

    #[test]
    fn the_hit_rate_is_over_tokens_and_nothing_is_not_zero() {
        let tally = Tally::new((0..2).map(|rank| RankKey::new("w", rank)));
        assert_eq!(tally.figures().hit_rate, None);
        tally.answered(0, Duration::from_millis(5), 100, 0, Some(10));
        tally.answered(1, Duration::from_millis(9), 300, 200, None);
        let figures = tally.figures();
        assert_eq!((figures.hit_rate, figures.requests), (Some(0.5), 2));
        assert_eq!((figures.ttft_p50, figures.ttft_p99), (Some(5.0), Some(9.0)));
        assert_eq!(figures.predicted_tokens, Some(10));
        assert_eq!(figures.picks["w:1"], 1);
    }

    #[test]
    fn a_failure_or_a_better_policy_is_not_ok() {
        let report = |aware: Figures, other: f64| {
            let mut report = Report::new(1, 1, 1, 1);
            report.add(RoutingPolicy::RoundRobin, figures(other));
            report.add(RoutingPolicy::KvAware, aware);
            report
        };
        assert!(report(figures(0.5), 0.4).is_ok() && report(figures(0.5), 0.5).is_ok());
        assert!(!report(figures(0.5), 0.6).is_ok());
        assert!(!report(Figures { failed: 1, ..figures(0.5) }, 0.4).is_ok());
        let json = report(figures(0.5), 0.4).json(json!({ "address": "x" }));
        assert_eq!((&json["kv_aware"]["hit_rate"], &json["ok"]), (&json!(0.5), &json!(true)));
    }
}

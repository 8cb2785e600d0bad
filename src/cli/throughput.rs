//! How fast a capture goes from frames to the index.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rankwise::capture::{Feed, Outcome};
use serde::Serialize;

/// Measures feeds of one capture, each into a fresh index.
///
/// What is timed is [`Feed::step`]: one message through the indexer's one door and the answers to what it
/// asks for. Reading the file is not in it. Reading the clock once per message is, at some 25 ns.
pub struct Stopwatch {
    runs: Vec<Duration>,
    /// Nanoseconds per message, over all runs.
    steps: Histogram<u64>,
    messages: u64,
}

/// A message that takes longer counts as this long: nothing real takes a minute.
const LONGEST_STEP_NS: u64 = 60_000_000_000;

impl Stopwatch {
    /// Nothing measured yet.
    pub fn new() -> anyhow::Result<Self> {
        // Three digits are more than two runs have in common.
        let steps = Histogram::new_with_bounds(1, LONGEST_STEP_NS, 3)?;
        Ok(Self { runs: Vec::new(), steps, messages: 0 })
    }

    /// Feeds everything that is left in `feed` to its index.
    pub fn run(&mut self, feed: &mut Feed<'_>) {
        let start = Instant::now();
        let mut before = start;
        while feed.step() {
            let now = Instant::now();
            let nanos = u64::try_from((now - before).as_nanos()).unwrap_or(u64::MAX);
            self.steps.saturating_record(nanos.max(1));
            before = now;
        }
        self.runs.push(before - start);
        self.messages = feed.fed() as u64;
    }

    /// What was measured, for the blocks that one run moved.
    pub fn throughput(&self, outcome: &Outcome) -> Throughput {
        let count = |name: &str| outcome.counters.get(name).copied().unwrap_or(0);
        let blocks = count("stored_blocks") + count("removed_blocks");
        let seconds = median(&self.runs).as_secs_f64();
        let micros = |quantile| self.steps.value_at_quantile(quantile) as f64 / 1e3;
        Throughput {
            repeats: self.runs.len(),
            messages: self.messages,
            blocks,
            seconds,
            messages_per_s: per_second(self.messages, seconds),
            blocks_per_s: per_second(blocks, seconds),
            message_us: MessageTimes { p50: micros(0.5), p99: micros(0.99), max: micros(1.0) },
        }
    }
}

/// Frames to index, measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Throughput {
    /// How often the capture was fed.
    pub repeats: usize,
    /// Messages of one feed.
    pub messages: u64,
    /// Blocks announced and removed in one feed, replays included.
    pub blocks: u64,
    /// The time of one feed: the median.
    pub seconds: f64,
    /// At that time. Unknown where nothing took measurable time.
    pub messages_per_s: Option<f64>,
    /// At that time.
    pub blocks_per_s: Option<f64>,
    /// Microseconds per message, over all feeds.
    pub message_us: MessageTimes,
}

/// Microseconds per message.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct MessageTimes {
    /// Half took no longer.
    pub p50: f64,
    /// 99 of 100 took no longer.
    pub p99: f64,
    /// None took longer.
    pub max: f64,
}

fn per_second(count: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| count as f64 / seconds)
}

/// The middle one; the mean of both where there are two.
fn median(runs: &[Duration]) -> Duration {
    let mut runs = runs.to_vec();
    runs.sort_unstable();
    match runs.len() {
        0 => Duration::ZERO,
        count if count % 2 == 1 => runs[count / 2],
        count => (runs[count / 2 - 1] + runs[count / 2]) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_not_moved_by_one_slow_run() {
        let ms = Duration::from_millis;
        assert_eq!(median(&[]), Duration::ZERO);
        assert_eq!(median(&[ms(9), ms(1), ms(500)]), ms(9));
        assert_eq!(median(&[ms(3), ms(1)]), ms(2));
    }

    #[test]
    fn no_time_gives_no_rate() {
        assert_eq!(per_second(5, 0.0), None);
        assert_eq!(per_second(5, 0.5), Some(10.0));
    }
}

//! Recorded of one point: measured into an HDR histogram, kept and sent as its buckets.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency that is told apart; what takes longer counts as this long. Waits end long before.
const LONGEST: u64 = 3_600_000_000;

/// Significant digits: the buckets' error is 0.1 %, well below what two runs differ by.
const DIGITS: u8 = 3;

/// Buckets in one histogram. One of three digits up to an hour has some 24,000.
const MAX_BUCKETS: usize = 32_768;

/// Where latencies are recorded. Costs about 200 KiB; one is made per kind and point, and dropped after it.
#[derive(Debug)]
pub struct Recorder(Histogram<u64>);

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// An empty one.
    #[allow(clippy::expect_used)]
    pub fn new() -> Self {
        // Bounds and digits are constants that the library accepts; a test makes one.
        Self(Histogram::new_with_bounds(1, LONGEST, DIGITS).expect("sound bounds"))
    }

    /// Records one latency.
    pub fn record(&mut self, latency: Duration) {
        self.record_micros(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX), 1);
    }

    fn record_micros(&mut self, micros: u64, count: u64) {
        self.0.saturating_record_n(micros.clamp(1, LONGEST), count);
    }

    /// What was recorded.
    pub fn recorded(&self) -> Recorded {
        Recorded(
            self.0
                .iter_recorded()
                .map(|at| (at.value_iterated_to(), at.count_since_last_iteration()))
                .collect(),
        )
    }
}

/// Recorded latencies: `(microseconds, how many)`, ascending. A few hundred bytes per point in practice.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct Recorded(Vec<(u64, u64)>);

impl Recorded {
    /// Those of all of `parts` together.
    pub fn merged<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Recorder::new();
        for part in parts {
            for &(micros, count) in &part.0 {
                all.record_micros(micros, count);
            }
        }
        all.recorded()
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|(_, count)| count).sum()
    }

    /// The latency that the share `quantile` does not exceed; `None` if there are none.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let count = self.count();
        // Rounded up, and at least the first: the median of one is that one. Counts lie far below 2^52.
        let wanted = ((quantile.clamp(0.0, 1.0) * count as f64).ceil() as u64).max(1);
        let mut seen = 0;
        self.0.iter().find_map(|(micros, here)| {
            seen += here;
            (seen >= wanted).then(|| Duration::from_micros(*micros))
        })
    }

    /// The longest; `None` if there are none.
    pub fn longest(&self) -> Option<Duration> {
        self.0.last().map(|(micros, _)| Duration::from_micros(*micros))
    }

    /// The mean; `None` if there are none.
    pub fn mean(&self) -> Option<Duration> {
        let total: u128 = self.0.iter().map(|(micros, count)| u128::from(*micros) * u128::from(*count)).sum();
        let mean = total.checked_div(self.count().into())?;
        Some(Duration::from_micros(u64::try_from(mean).unwrap_or(u64::MAX)))
    }

    /// `(microseconds, how many)`, ascending.
    pub fn buckets(&self) -> &[(u64, u64)] {
        &self.0
    }
}

impl From<Recorded> for Vec<(u64, u64)> {
    fn from(latencies: Recorded) -> Self {
        latencies.0
    }
}

impl TryFrom<Vec<(u64, u64)>> for Recorded {
    type Error = &'static str;

    fn try_from(buckets: Vec<(u64, u64)>) -> Result<Self, Self::Error> {
        if buckets.len() > MAX_BUCKETS {
            return Err("a histogram with too many buckets");
        }
        if !buckets.is_sorted_by(|one, next| one.0 < next.0) {
            return Err("a histogram whose buckets do not ascend");
        }
        let total = buckets.iter().try_fold(0_u32, |total, (_, count)| {
            // A point has thousands of samples; past 32 bits, sums and ranks of them could overflow.
            u32::try_from(*count).ok().filter(|count| *count > 0).and_then(|count| total.checked_add(count))
        });
        if total.is_none() {
            return Err("a histogram whose counts are none or too many");
        }
        Ok(Self(buckets))
    }
}

/// What one rank measured at one point.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Measured {
    /// From sending a request to its first token.
    pub ttft: Recorded,
    /// Between two tokens of one request.
    pub itl: Recorded,
    /// From sending a request to its last token.
    pub e2e: Recorded,
    /// Tokens generated in all.
    pub output_tokens: u64,
    /// From the first request to the last answer, in microseconds.
    pub elapsed_us: u64,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn recorded(micros: impl IntoIterator<Item = u64>) -> Recorded {
        let mut recorder = Recorder::new();
        micros.into_iter().for_each(|micros| recorder.record(Duration::from_micros(micros)));
        recorder.recorded()
    }

    #[test]
    fn quantiles_are_the_histograms_own() {
        let latencies = recorded(1..=1_000);
        assert_eq!(latencies.count(), 1_000);
        for (quantile, micros) in [(0.0, 1), (0.5, 500), (0.99, 990), (1.0, 1_000)] {
            assert_eq!(latencies.quantile(quantile), Some(Duration::from_micros(micros)));
        }
        assert_eq!(latencies.mean(), Some(Duration::from_micros(500)));
        let none = Recorded::default();
        assert_eq!((none.quantile(0.5), none.longest(), none.mean()), (None, None, None));
        // Beyond the ends.
        assert_eq!(recorded([0, u64::MAX]).count(), 2);
    }

    /// B4: histograms of ranks add up, and come through the wire's JSON unchanged.
    #[test]
    fn b4_histograms_merge_and_travel() {
        let parts = [recorded([5, 70_000, 70_001]), recorded([5, 3_000_000]), Recorded::default()];
        let merged = Recorded::merged(&parts);
        assert_eq!(merged.count(), 5);
        assert_eq!(merged, recorded([5, 5, 70_000, 70_001, 3_000_000]));
        let text = serde_json::to_string(&merged).unwrap();
        assert_eq!(serde_json::from_str::<Recorded>(&text).unwrap(), merged);
        for bad in ["[[2,1],[1,1]]", "[[1,0]]", "[[1,4294967295],[2,1]]", "[[1,1],[1,1]]", "[1]"] {
            assert!(serde_json::from_str::<Recorded>(bad).is_err(), "{bad}");
        }
    }
}

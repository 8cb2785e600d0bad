//! Latencies by percentile, and the text form that other tools read.

use std::fmt::Write;
use std::time::Duration;

use hdrhistogram::Histogram;

/// Nothing that is measured here takes longer and is still of interest: ten minutes.
const LONGEST_NS: u64 = 600_000_000_000;

/// Steps of the percentile's distance to 100 % per halving, as other tools write the file.
const TICKS_PER_HALF: u32 = 5;

/// Latencies in nanoseconds, to three digits: 260 KiB, about 4 ns to add one.
#[derive(Clone, Debug)]
pub struct Latencies {
    histogram: Histogram<u64>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

impl Latencies {
    /// None yet.
    #[allow(clippy::expect_used, reason = "the bounds are constants that are known to be good")]
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3);
        // Constants, known to be good bounds.
        Self { histogram: histogram.expect("the bounds are constants that are known to be good") }
    }

    /// Adds one. Longer than ten minutes counts as ten minutes, less than a nanosecond as one.
    pub fn record(&mut self, latency: Duration) {
        self.record_ns(u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds one, in nanoseconds.
    pub fn record_ns(&mut self, nanos: u64) {
        self.histogram.saturating_record(nanos.max(1));
    }

    /// Adds the same latency several times: what one call took, shared by all that it did.
    pub fn record_many_ns(&mut self, nanos: u64, times: u64) {
        self.histogram.saturating_record_n(nanos.max(1), times);
    }

    /// Adds all of another's.
    pub fn add(&mut self, other: &Self) {
        // Of equal bounds, so nothing can be out of range.
        let _ = self.histogram.add(&other.histogram);
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Nanoseconds that the share `quantile` (0 to 1) does not exceed. `None` where nothing was measured.
    pub fn at(&self, quantile: f64) -> Option<u64> {
        (!self.histogram.is_empty()).then(|| self.histogram.value_at_quantile(quantile))
    }

    /// How many took `nanos` or less, to the histogram's three digits.
    pub fn count_up_to(&self, nanos: u64) -> u64 {
        self.histogram.count_between(0, nanos)
    }

    /// Mean nanoseconds. `None` where nothing was measured.
    pub fn mean(&self) -> Option<f64> {
        (!self.histogram.is_empty()).then(|| self.histogram.mean())
    }

    /// Points of the percentile curve: the share, and the nanoseconds that it does not exceed.
    pub fn curve(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        self.histogram
            .iter_quantiles(TICKS_PER_HALF)
            .map(|step| (step.quantile_iterated_to(), step.value_iterated_to()))
    }

    /// The text form of HdrHistogram's percentile distribution, in milliseconds: what its plotting tools read.
    pub fn percentile_text(&self) -> String {
        const NS_PER_MS: f64 = 1e6;
        let mut text = format!(
            "{:>12} {:>14} {:>10} {:>14}\n\n",
            "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
        );
        // Writing to a string cannot fail.
        let mut seen = 0;
        for step in self.histogram.iter_quantiles(TICKS_PER_HALF) {
            seen += step.count_since_last_iteration();
            let (value, share) = (step.value_iterated_to() as f64 / NS_PER_MS, step.quantile_iterated_to());
            let _ = write!(text, "{value:>12.6} {share:>14.12} {seen:>10}");
            let _ = match share < 1.0 {
                true => writeln!(text, " {:>14.2}", 1.0 / (1.0 - share)),
                false => writeln!(text),
            };
        }
        let (mean, deviation) = (self.histogram.mean() / NS_PER_MS, self.histogram.stdev() / NS_PER_MS);
        let (max, count) = (self.histogram.max() as f64 / NS_PER_MS, self.histogram.len());
        let _ = writeln!(text, "#[Mean    = {mean:>12.6}, StdDeviation   = {deviation:>12.6}]");
        let _ = writeln!(text, "#[Max     = {max:>12.6}, Total count    = {count:>12}]");
        let (buckets, sub_buckets) = (self.histogram.buckets(), SUB_BUCKETS);
        let _ = writeln!(text, "#[Buckets = {buckets:>12}, SubBuckets     = {sub_buckets:>12}]");
        text
    }
}

/// Of a histogram of three digits.
const SUB_BUCKETS: u32 = 2048;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn some() -> Latencies {
        let mut latencies = Latencies::new();
        (1..=1_000).for_each(|nth| latencies.record(Duration::from_micros(nth)));
        latencies
    }

    #[test]
    fn percentiles_are_those_of_what_was_recorded() {
        let latencies = some();
        let near = |quantile: f64, micros: u64| {
            let found = latencies.at(quantile).unwrap();
            assert!(found.abs_diff(micros * 1_000) <= micros, "{quantile}: {found}");
        };
        near(0.5, 500);
        near(0.99, 990);
        near(1.0, 1_000);
        assert_eq!(latencies.count(), 1_000);
        assert!(latencies.count_up_to(500_000).abs_diff(500) <= 1);
        assert_eq!(Latencies::new().at(0.5), None);
        assert_eq!(Latencies::new().mean(), None);
    }

    #[test]
    fn the_text_ends_at_all_of_them_and_grows() {
        let text = some().percentile_text();
        let rows: Vec<Vec<f64>> = text
            .lines()
            .skip(2)
            .take_while(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().map(|cell| cell.parse().unwrap()).collect())
            .collect();
        assert!(rows.len() > 20, "{text}");
        assert!(rows.windows(2).all(|two| two[0][0] <= two[1][0] && two[0][1] <= two[1][1]));
        let last = rows.last().unwrap();
        assert_eq!((last[1], last[2], last.len()), (1.0, 1_000.0, 3));
        assert!(text.contains("Total count    =         1000]"), "{text}");
        assert!(text.contains("SubBuckets     =         2048]"), "{text}");
    }
}

//! Measured latencies as the benches print them.

use anyhow::{Context, Result};
use rankwise::lab::plot::duration_label;
use rankwise::lab::{Latencies, Report};
use serde::Serialize;
use std::path::Path;

/// Percentiles in microseconds; unknown where nothing was measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Figures {
    /// Latencies.
    pub count: u64,
    /// Their mean.
    pub mean_us: Option<f64>,
    /// Half took no longer.
    pub p50_us: Option<f64>,
    /// 90 of 100 took no longer.
    pub p90_us: Option<f64>,
    /// 99 of 100 took no longer.
    pub p99_us: Option<f64>,
    /// 999 of 1,000 took no longer.
    pub p999_us: Option<f64>,
    /// None took longer.
    pub max_us: Option<f64>,
}

impl Figures {
    /// What a table shows above [`Figures::cells`].
    pub const HEAD: [&'static str; 6] = ["count", "p50", "p90", "p99", "p99.9", "max"];

    /// Those of `latencies`.
    pub fn of(latencies: &Latencies) -> Self {
        let at = |quantile| latencies.at(quantile).map(|nanos| nanos as f64 / 1e3);
        Self {
            count: latencies.count(),
            mean_us: latencies.mean().map(|nanos| nanos / 1e3),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: at(1.0),
        }
    }

    /// In words.
    pub fn cells(&self) -> [String; 6] {
        let word = |micros: Option<f64>| micros.map_or_else(|| "-".to_owned(), |us| duration_label(us * 1e3));
        let [p50, p90, p99, p999, max] =
            [self.p50_us, self.p90_us, self.p99_us, self.p999_us, self.max_us].map(word);
        [self.count.to_string(), p50, p90, p99, p999, max]
    }
}

/// Cores that this process may use, for the report.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Writes a report's page.
///
/// # Errors
/// When the file cannot be written.
pub fn write_report(path: &Path, report: &Report) -> Result<()> {
    std::fs::write(path, report.html()).with_context(|| format!("cannot write {}", path.display()))
}

/// A spread in nanoseconds; unknown where nothing was measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct PerBlock {
    /// Blocks, or messages.
    pub count: u64,
    /// Half took no longer.
    pub p50_ns: Option<u64>,
    /// 90 of 100 took no longer.
    pub p90_ns: Option<u64>,
    /// 99 of 100 took no longer.
    pub p99_ns: Option<u64>,
    /// 999 of 1,000 took no longer.
    pub p999_ns: Option<u64>,
    /// None took longer.
    pub max_ns: Option<u64>,
}

impl PerBlock {
    /// Those of `latencies`.
    pub fn of(latencies: &Latencies) -> Self {
        let at = |quantile| latencies.at(quantile);
        let (p50_ns, p90_ns, p99_ns) = (at(0.5), at(0.9), at(0.99));
        Self { count: latencies.count(), p50_ns, p90_ns, p99_ns, p999_ns: at(0.999), max_ns: at(1.0) }
    }
}

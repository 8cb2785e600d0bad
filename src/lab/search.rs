//! The search for the highest rate that a service keeps up with.

/// What share of the scheduled requests must be answered in time for a rate to be kept up.
pub const KEPT_UP: f64 = 0.99;

/// One rate, tried.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Trial {
    /// Requests per second, as scheduled.
    pub rate: f64,
    /// Requests that were due.
    pub scheduled: u64,
    /// Those that were answered, rightly and within the limit, counted from when they were due.
    pub in_time: u64,
}

impl Trial {
    /// The share that was answered in time. Nothing scheduled is nothing kept.
    pub fn share(&self) -> f64 {
        if self.scheduled == 0 { 0.0 } else { self.in_time as f64 / self.scheduled as f64 }
    }

    /// Whether the service kept up: then its 99th percentile is within the limit, with what was never answered
    /// counted as late.
    pub fn kept_up(&self) -> bool {
        self.share() >= KEPT_UP
    }
}

/// Where and how finely to search.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SearchConfig {
    /// The first rate, per second.
    pub start: f64,
    /// No rate above this is tried.
    pub max: f64,
    /// The search ends when the lowest rate that failed is above the highest that was kept up by no more than
    /// this share.
    pub resolution: f64,
    /// Times that a rate must fail in a row before that is believed: on a shared machine a neighbour can spoil
    /// a trial, and cannot help one.
    pub attempts: u32,
}

impl Default for SearchConfig {
    fn default() -> Self {
        Self { start: 200.0, max: 1e6, resolution: 0.05, attempts: 2 }
    }
}

/// Doubles the rate until the service fails, or halves it until it does not; then bisects.
///
/// ```
/// use rankwise::lab::search::{RateSearch, SearchConfig};
/// let mut search = RateSearch::new(SearchConfig::default());
/// while let Some(rate) = search.next_rate() {
///     search.told(rate <= 3_000.0);
/// }
/// assert!((2_850.0..=3_000.0).contains(&search.best().unwrap()));
/// ```
#[derive(Clone, PartialEq, Debug)]
pub struct RateSearch {
    config: SearchConfig,
    next: Option<f64>,
    failures: u32,
    kept: Option<f64>,
    failed: Option<f64>,
}

/// Below a request in ten seconds there is nothing to find.
const MIN_RATE: f64 = 0.1;

impl RateSearch {
    /// Begins at the first rate.
    pub fn new(config: SearchConfig) -> Self {
        let next = Some(config.start.clamp(MIN_RATE, config.max.max(MIN_RATE)));
        Self { config, next, failures: 0, kept: None, failed: None }
    }

    /// The rate to try next; `None` when the search is over.
    pub fn next_rate(&self) -> Option<f64> {
        self.next
    }

    /// Says whether the rate that was to be tried was kept up.
    pub fn told(&mut self, kept_up: bool) {
        let Some(rate) = self.next else { return };
        if kept_up {
            self.kept = Some(rate);
        } else {
            self.failures += 1;
            if self.failures < self.config.attempts {
                return;
            }
            self.failed = Some(rate);
        }
        self.failures = 0;
        self.next = self.following();
    }

    fn following(&self) -> Option<f64> {
        match (self.kept, self.failed) {
            (Some(kept), None) => (kept < self.config.max).then(|| (kept * 2.0).min(self.config.max)),
            (None, Some(failed)) => (failed / 2.0 >= MIN_RATE).then_some(failed / 2.0),
            (Some(kept), Some(failed)) => {
                let open = failed - kept > kept * self.config.resolution.max(1e-3);
                open.then_some((kept + failed) / 2.0)
            }
            (None, None) => None,
        }
    }

    /// The highest rate that was kept up so far.
    pub fn best(&self) -> Option<f64> {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn search(config: SearchConfig, mut keeps: impl FnMut(f64) -> bool) -> (Option<f64>, Vec<f64>) {
        let (mut search, mut tried) = (RateSearch::new(config), Vec::new());
        while let Some(rate) = search.next_rate() {
            tried.push(rate);
            assert!(tried.len() < 200, "{tried:?}");
            search.told(keeps(rate));
        }
        (search.best(), tried)
    }

    #[test]
    fn any_ceiling_is_found_within_the_resolution() {
        for ceiling in [0.5, 30.0, 200.0, 201.0, 7_777.0, 123_456.0] {
            let (best, tried) = search(SearchConfig::default(), |rate| rate <= ceiling);
            let best = best.unwrap();
            assert!(best <= ceiling && best * 1.051 >= ceiling, "{ceiling}: {best} after {tried:?}");
            assert!(tried.iter().all(|rate| *rate <= ceiling.max(200.0) * 2.0), "{tried:?}");
        }
    }

    #[test]
    fn a_spoilt_trial_is_repeated_and_an_end_is_reached_without_one() {
        let mut spoilt = true;
        let (best, tried) = search(SearchConfig::default(), |rate| {
            !(rate == 400.0 && std::mem::take(&mut spoilt)) && rate <= 900.0
        });
        assert!(best.unwrap() > 850.0);
        assert_eq!(tried[..4], [200.0, 400.0, 400.0, 800.0]);
        let (best, tried) = search(SearchConfig { max: 1_000.0, ..SearchConfig::default() }, |_| true);
        assert_eq!((best, tried), (Some(1_000.0), vec![200.0, 400.0, 800.0, 1_000.0]));
        let (best, _) = search(SearchConfig::default(), |_| false);
        assert_eq!(best, None);
    }

    #[test]
    fn nothing_scheduled_is_not_kept_up() {
        assert!(!Trial { rate: 1.0, scheduled: 0, in_time: 0 }.kept_up());
        assert!(Trial { rate: 1.0, scheduled: 100, in_time: 99 }.kept_up());
        assert!(!Trial { rate: 1.0, scheduled: 100, in_time: 98 }.kept_up());
    }
}

//! How long to wait before the next attempt: capped, doubling, jittered. Pure: returns delays, sleeps never.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The shape of a [`Backoff`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BackoffConfig {
    /// The first delay. Anything below a millisecond is taken as one, so that nothing can spin.
    pub min: Duration,
    /// The longest delay.
    pub max: Duration,
    /// The share of each delay that is left to chance, 0 to 1: a delay of `d` becomes one between
    /// `d * (1 - jitter)` and `d`, so that the ranks of a restarted engine do not all dial at one instant.
    pub jitter: f64,
}

impl Default for BackoffConfig {
    fn default() -> Self {
        Self {
            min: Duration::from_millis(50),
            // A rank that returns is heard within about a second; 128 dead ranks cost 128 dials a second.
            max: Duration::from_secs(1),
            jitter: 0.5,
        }
    }
}

/// A row of delays: doubling from `min`, never above `max`.
#[derive(Debug)]
pub struct Backoff {
    config: BackoffConfig,
    next: Duration,
    rng: StdRng,
}

impl Backoff {
    /// A row that starts at the shortest delay. Equal seeds give equal rows.
    pub fn new(config: BackoffConfig, seed: u64) -> Self {
        let min = config.min.max(Duration::from_millis(1));
        let config = BackoffConfig { min, max: config.max.max(min), jitter: config.jitter.clamp(0.0, 1.0) };
        Self { config, next: min, rng: StdRng::seed_from_u64(seed) }
    }

    /// How long to wait before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let full = self.next;
        self.next = full.saturating_mul(2).min(self.config.max);
        full.mul_f64(1.0 - self.config.jitter * self.rng.random::<f64>())
    }

    /// The last attempt proved good: start at the shortest delay again.
    pub fn reset(&mut self) {
        self.next = self.config.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(jitter: f64) -> BackoffConfig {
        BackoffConfig { min: Duration::from_millis(50), max: Duration::from_secs(1), jitter }
    }

    #[test]
    fn doubles_to_the_cap_and_stays_there() {
        let mut backoff = Backoff::new(config(0.0), 1);
        let delays: Vec<u128> = (0..7).map(|_| backoff.next_delay().as_millis()).collect();
        assert_eq!(delays, [50, 100, 200, 400, 800, 1000, 1000]);
    }

    #[test]
    fn starts_over_after_a_reset() {
        let mut backoff = Backoff::new(config(0.0), 1);
        for _ in 0..5 {
            backoff.next_delay();
        }
        backoff.reset();
        assert_eq!(backoff.next_delay(), Duration::from_millis(50));
    }

    #[test]
    fn jitter_only_shortens_and_never_below_its_share() {
        let mut plain = Backoff::new(config(0.0), 7);
        let mut jittered = Backoff::new(config(0.5), 7);
        let mut differs = false;
        for _ in 0..200 {
            let (full, delay) = (plain.next_delay(), jittered.next_delay());
            assert!(delay <= full && delay >= full.mul_f64(0.5), "{delay:?} of {full:?}");
            differs |= delay != full;
        }
        assert!(differs);
    }

    #[test]
    fn equal_seeds_give_equal_rows_and_others_do_not() {
        let row = |seed| {
            let mut backoff = Backoff::new(config(0.5), seed);
            (0..20).map(|_| backoff.next_delay()).collect::<Vec<_>>()
        };
        assert_eq!(row(3), row(3));
        assert_ne!(row(3), row(4));
    }

    /// Nonsense from a configuration file must neither spin nor panic.
    #[test]
    fn nonsense_is_tamed() {
        let nonsense = BackoffConfig { min: Duration::ZERO, max: Duration::ZERO, jitter: 9.0 };
        let mut backoff = Backoff::new(nonsense, 1);
        for _ in 0..50 {
            assert!(backoff.next_delay() <= Duration::from_millis(1));
        }
        let mut still = Backoff::new(BackoffConfig { jitter: -1.0, ..nonsense }, 1);
        assert_eq!(still.next_delay(), Duration::from_millis(1));
    }
}

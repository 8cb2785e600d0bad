//! When requests are due.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How arrivals are spread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrivals {
    /// At equal distances.
    Even,
    /// Independent of each other, as users are: distances are exponential. The same seed, the same arrivals.
    Poisson {
        /// The seed.
        seed: u64,
    },
}

/// Moments at which requests are due, from the start of a run on. They depend on nothing that is measured.
#[derive(Clone, Debug)]
pub struct Schedule {
    rate: f64,
    end: f64,
    nth: u64,
    at: f64,
    chance: Option<StdRng>,
}

impl Schedule {
    /// About `rate` per second for so long. A rate that is no number above 0 is no arrival.
    pub fn new(rate: f64, during: Duration, arrivals: Arrivals) -> Self {
        let chance = match arrivals {
            Arrivals::Even => None,
            Arrivals::Poisson { seed } => Some(StdRng::seed_from_u64(seed)),
        };
        let end = if rate > 0.0 && rate.is_finite() { during.as_secs_f64() } else { 0.0 };
        Self { rate, end, nth: 0, at: 0.0, chance }
    }
}

impl Iterator for Schedule {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.at = match &mut self.chance {
            // Multiplied, not added up: a long run must not drift.
            None => self.nth as f64 / self.rate,
            Some(chance) => self.at - (1.0 - chance.random::<f64>()).ln() / self.rate,
        };
        self.nth += 1;
        (self.at < self.end).then(|| Duration::from_secs_f64(self.at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Duration = Duration::from_secs(10);

    #[test]
    fn even_arrivals_keep_their_distance() {
        let due: Vec<Duration> = Schedule::new(100.0, TEN, Arrivals::Even).collect();
        assert_eq!(due.len(), 1_000);
        assert_eq!((due[0], due[999]), (Duration::ZERO, Duration::from_millis(9_990)));
    }

    #[test]
    fn arrivals_by_chance_come_at_the_rate_and_repeat() {
        let of = |seed| Schedule::new(1_000.0, TEN, Arrivals::Poisson { seed }).collect::<Vec<_>>();
        let due = of(7);
        assert!((9_600..10_400).contains(&due.len()), "{}", due.len());
        assert!(due.is_sorted());
        let close = due.windows(2).filter(|two| two[1] - two[0] < Duration::from_micros(105)).count();
        // One in ten distances is shorter than a tenth of the mean; evenly spread, none would be.
        assert!((800..1_200).contains(&close), "{close}");
        assert_eq!(due, of(7));
        assert_ne!(due, of(8));
    }

    #[test]
    fn a_rate_that_is_none_ends_at_once() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(Schedule::new(rate, TEN, Arrivals::Even).next(), None);
        }
    }
}

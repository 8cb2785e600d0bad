//! How long an engine's step takes.

use std::time::Duration;

/// The time model: a step takes its overhead, the prefill of its prompt tokens one after the other, and one
/// decode step however many requests decode in it. Everything is divided by [`Timing::speed`].
///
/// Decoding is bound by memory and hardly slower for more requests; prefill is bound by arithmetic and grows
/// with its tokens. That is what makes a cached prefix worth having and a long queue worth avoiding, and it
/// is all that is modelled.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Timing {
    /// Prompt tokens computed per second; what is not above zero counts as infinitely fast.
    pub prefill_tokens_per_second: f64,
    /// What one decoded token of every running request takes together.
    pub decode_step: Duration,
    /// What every step takes besides.
    pub step_overhead: Duration,
    /// How many times faster than that time passes; 1 is real time. What is not above zero counts as 1.
    pub speed: f64,
}

impl Default for Timing {
    /// A mid-sized model on one accelerator: 8,000 prompt tokens per second, 20 ms per decode step.
    fn default() -> Self {
        Self {
            prefill_tokens_per_second: 8_000.0,
            decode_step: Duration::from_millis(20),
            step_overhead: Duration::from_millis(2),
            speed: 1.0,
        }
    }
}

impl Timing {
    /// How long a step takes that computes `prefill_tokens` of prompts and, if it `decodes`, one token of each
    /// running request. At least a microsecond, so that time always passes; at most an hour.
    pub fn step(&self, prefill_tokens: usize, decodes: bool) -> Duration {
        const LONGEST: f64 = 3_600e6;
        let mut micros = self.step_overhead.as_secs_f64() * 1e6;
        if self.prefill_tokens_per_second > 0.0 {
            micros += prefill_tokens as f64 / self.prefill_tokens_per_second * 1e6;
        }
        if decodes {
            micros += self.decode_step.as_secs_f64() * 1e6;
        }
        if self.speed > 0.0 {
            micros /= self.speed;
        }
        // What is no number is not below the longest either.
        let micros = if micros < LONGEST { micros.max(1.0) } else { LONGEST };
        Duration::from_micros(micros as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_adds_up_and_is_divided_by_the_speed() {
        let timing = Timing {
            prefill_tokens_per_second: 1_000.0,
            decode_step: Duration::from_millis(20),
            step_overhead: Duration::from_millis(2),
            speed: 2.0,
        };
        assert_eq!(timing.step(0, false), Duration::from_millis(1));
        assert_eq!(timing.step(0, true), Duration::from_millis(11));
        assert_eq!(timing.step(100, true), Duration::from_millis(61));
    }

    #[test]
    fn time_passes_whatever_the_numbers() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
            for speed in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
                let timing = Timing { prefill_tokens_per_second: rate, speed, ..Timing::default() };
                let step = timing.step(10, true);
                assert!((Duration::from_micros(1)..=Duration::from_secs(3_600)).contains(&step), "{step:?}");
            }
        }
    }
}

//! How a rank runs a point: the door for every engine, and a time model that needs none.

use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use thiserror::Error;

use super::envelope::Envelope;
use super::grid::{Phase, Point};
use super::measured::{Measured, Recorder};

/// Runs points. A run that is dropped must stop what it has begun.
pub trait PointRunner: Send {
    /// Why a point could not be run; it is told to all ranks.
    type Error: Display;

    /// Makes the engine ready: whatever it does only once is done before anything is measured.
    ///
    /// # Errors
    /// When the engine cannot do it.
    fn warm_up(&mut self, point: &Point) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Runs a point and measures it.
    ///
    /// # Errors
    /// When the engine cannot do it: a point is measured whole or not at all.
    fn run(&mut self, point: &Point) -> impl Future<Output = Result<Measured, Self::Error>> + Send;
}

/// Latencies that are computed, not measured: for trying the bench out and for testing it, in no time.
///
/// A step takes its overhead and the prefill of its tokens; prompts are prefilled in their order, a step's
/// budget at a time; then all requests decode together, a step per token. Nothing waits for anything else.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TimeModel {
    envelope: Envelope,
    /// Prompt tokens per second.
    pub prefill_tokens_per_second: f64,
    /// What a decode step takes, however many requests are in it.
    pub decode_step: Duration,
    /// What every step takes besides.
    pub step_overhead: Duration,
}

/// A point that the rank's own envelope has no room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{point} is beyond what this rank can take: {envelope}")]
pub struct Beyond {
    point: Point,
    envelope: Envelope,
}

impl TimeModel {
    /// The model of a rank with this envelope: 8,000 prompt tokens per second, 20 ms per token, 2 ms per step.
    pub fn new(envelope: Envelope) -> Self {
        Self {
            envelope,
            prefill_tokens_per_second: 8_000.0,
            decode_step: Duration::from_millis(20),
            step_overhead: Duration::from_millis(2),
        }
    }

    /// What a point would measure. Costs time by the point's width.
    ///
    /// # Errors
    /// A point that does not fit into this rank's envelope: then the common envelope is not what it says.
    pub fn compute(&self, point: &Point) -> Result<Measured, Beyond> {
        let Self { envelope, .. } = *self;
        let tokens = u64::from(point.prompt_tokens) + u64::from(point.output_tokens);
        let blocks = tokens.div_ceil(u64::from(envelope.block_size().get())) * u64::from(point.width);
        let decodes_at_once = match point.phase {
            Phase::Prefill => 0,
            Phase::Decode => point.width,
        };
        if tokens > u64::from(envelope.max_model_len())
            || blocks > u64::from(envelope.kv_blocks())
            || point.width > envelope.max_num_running_reqs()
            || decodes_at_once > envelope.max_num_scheduled_tokens()
        {
            return Err(Beyond { point: *point, envelope });
        }
        let (mut ttft, mut itl, mut e2e) = (Recorder::new(), Recorder::new(), Recorder::new());
        let step = self.step_overhead + self.decode_step;
        let later = point.output_tokens.saturating_sub(1);
        let prefilled = self.prefilled(point, point.width);
        let whole = prefilled + step * later;
        for _ in 0..point.rounds() {
            for nth in 1..=point.width {
                let first = self.prefilled(point, nth);
                ttft.record(first);
                e2e.record(whole);
                for gap in 0..later {
                    // Who was prefilled early waits for the others before its second token.
                    itl.record(if gap == 0 { step + prefilled - first } else { step });
                }
            }
        }
        let elapsed = whole * point.rounds();
        Ok(Measured {
            ttft: ttft.recorded(),
            itl: itl.recorded(),
            e2e: e2e.recorded(),
            output_tokens: u64::from(point.requests) * u64::from(point.output_tokens),
            elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
        })
    }

    /// When the first `requests` prompts of a round are prefilled: at the end of the step that takes the last
    /// of their tokens.
    fn prefilled(&self, point: &Point, requests: u32) -> Duration {
        let wanted = u64::from(point.prompt_tokens) * u64::from(requests);
        let all = u64::from(point.prompt_tokens) * u64::from(point.width);
        let budget = u64::from(self.envelope.max_num_scheduled_tokens());
        let steps = wanted.div_ceil(budget);
        let tokens = (steps * budget).min(all);
        // At most 2^27 tokens times 2^16 requests: some weeks.
        let seconds = tokens as f64 / self.prefill_tokens_per_second.max(1.0);
        Duration::from_secs_f64(seconds) + self.step_overhead.mul_f64(steps as f64)
    }
}

impl PointRunner for TimeModel {
    type Error = Beyond;

    async fn warm_up(&mut self, _: &Point) -> Result<(), Beyond> {
        Ok(())
    }

    async fn run(&mut self, point: &Point) -> Result<Measured, Beyond> {
        self.compute(point)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::choice::Choice;
    use super::super::envelope::Stated;
    use super::super::grid::Grid;
    use super::*;

    fn envelope(max_num_scheduled_tokens: u64) -> Envelope {
        let (max_model_len, max_num_running_reqs, kv_blocks, block_size) = (1_024, 8, 256, 16);
        let stated =
            Stated { max_model_len, max_num_running_reqs, max_num_scheduled_tokens, kv_blocks, block_size };
        stated.check().unwrap()
    }

    #[test]
    fn the_model_follows_its_own_rules() {
        let model = TimeModel::new(envelope(512));
        let point =
            Point { phase: Phase::Prefill, prompt_tokens: 512, width: 1, output_tokens: 1, requests: 8 };
        let measured = model.compute(&point).unwrap();
        // 512 tokens at 8,000 a second, and one step's overhead.
        assert_eq!(measured.ttft.count(), 8);
        assert_eq!(measured.ttft.longest().unwrap().as_millis(), 66);
        assert_eq!((measured.itl.count(), measured.output_tokens), (0, 8));
        let point =
            Point { phase: Phase::Decode, prompt_tokens: 100, width: 4, output_tokens: 32, requests: 4 };
        let measured = model.compute(&point).unwrap();
        assert_eq!((measured.itl.count(), measured.output_tokens), (4 * 31, 4 * 32));
        assert_eq!(measured.itl.quantile(0.5).unwrap().as_millis(), 22);
        let wide = Point { width: 9, requests: 9, ..point };
        assert_eq!(model.compute(&wide), Err(Beyond { point: wide, envelope: envelope(512) }));
    }

    /// B2: every point of the common envelope's grid fits every rank.
    #[test]
    fn b2_a_larger_rank_takes_a_smaller_ones_grid() {
        let grid = Grid::derive(&envelope(256), &Choice::default()).unwrap();
        for scheduled in [256, 300, 512] {
            let model = TimeModel::new(envelope(scheduled));
            for point in grid.points() {
                let measured = model.compute(point).unwrap();
                assert_eq!(measured.ttft.count(), u64::from(point.requests));
            }
        }
        let larger = Grid::derive(&envelope(1_024), &Choice::default()).unwrap();
        let own = TimeModel::new(Stated { max_model_len: 512, ..envelope(256).stated() }.check().unwrap());
        assert!(larger.points().iter().any(|point| own.compute(point).is_err()));
    }
}

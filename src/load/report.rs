//! Load reports: as received, and what of them can be believed.

use std::sync::Arc;
use std::time::Duration;

/// A number as a report carries it.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub enum RawNumber {
    /// The field is missing or null: unknown.
    #[default]
    Absent,
    /// A number, whatever its value.
    Value(f64),
    /// Something that is no number (text, a list, …).
    Unreadable,
}

impl From<f64> for RawNumber {
    fn from(value: f64) -> Self {
        Self::Value(value)
    }
}

impl From<Option<f64>> for RawNumber {
    fn from(value: Option<f64>) -> Self {
        value.map_or(Self::Absent, Self::Value)
    }
}

/// One rank's load as received.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RawRankLoad {
    /// Requests being served.
    pub num_running_reqs: RawNumber,
    /// Requests waiting, those that the scheduler skipped included.
    pub num_waiting_reqs: RawNumber,
    /// Tokens in the KV cache.
    pub num_used_tokens: RawNumber,
    /// Tokens that the KV cache holds.
    pub max_total_num_tokens: RawNumber,
    /// Share of the KV cache in use, 0 to 1.
    pub token_usage: RawNumber,
    /// Blocks of the KV cache in use.
    pub kv_used_blocks: RawNumber,
    /// Prompt tokens still to be computed for requests that were sent.
    pub prefill_tokens: RawNumber,
    /// Uncached prompt tokens of waiting requests.
    pub queued_uncached_tokens: RawNumber,
    /// Blocks of active requests.
    pub decode_blocks: RawNumber,
    /// How old the figures were when the report was made, in milliseconds; absent is fresh.
    pub age_ms: RawNumber,
    /// Blocks that the KV cache holds, of the size that the engine schedules by.
    pub kv_total_blocks: RawNumber,
    /// Whether those blocks are this rank's share of a sum over several engines.
    pub total_is_divided: bool,
    /// Requests that the rank runs at once, as its engine says.
    pub max_running_requests: RawNumber,
    /// Whether the engine sleeps, where it says so.
    pub sleep: Option<SleepState>,
}

/// Whether an engine sleeps: it is there and serves nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SleepState {
    /// It serves.
    Awake,
    /// It sleeps.
    Asleep {
        /// Whether its sleep has taken the KV cache from the device.
        cache_gone: bool,
    },
}

/// One entry of a report.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoadEntry {
    /// The **global** rank; `None` if what stood there is no whole number of at least 0.
    pub dp_rank: Option<u64>,
    /// Its load.
    pub load: RawRankLoad,
}

impl LoadEntry {
    /// The load of the rank `dp_rank`.
    pub fn new(dp_rank: u32, load: RawRankLoad) -> Self {
        Self { dp_rank: Some(dp_rank.into()), load }
    }
}

/// One worker's report as received.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadReport {
    /// Who says so: `engine`, `router`, …
    pub source: Arc<str>,
    /// Its ranks, in the order and number in which they came.
    pub entries: Vec<LoadEntry>,
    /// Figures for the worker as a whole. They never become a rank's.
    pub aggregate: Option<RawRankLoad>,
}

impl LoadReport {
    /// The source of a report that names none.
    pub const ENGINE: &str = "engine";
    /// The source of what a load socket says.
    pub const LOAD_STAT: &str = "load_stat";

    /// An engine's report on these ranks.
    pub fn new(entries: Vec<LoadEntry>) -> Self {
        Self { source: Self::ENGINE.into(), entries, aggregate: None }
    }
}

/// One rank's load that can be believed: every field is in its range, or unknown.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RankLoad {
    /// Requests being served.
    pub num_running_reqs: Option<u64>,
    /// Requests waiting.
    pub num_waiting_reqs: Option<u64>,
    /// Tokens in the KV cache.
    pub num_used_tokens: Option<u64>,
    /// Tokens that the KV cache holds.
    pub max_total_num_tokens: Option<u64>,
    /// Share of the KV cache in use, 0 to 1.
    pub token_usage: Option<f64>,
    /// Blocks of the KV cache in use.
    pub kv_used_blocks: Option<u64>,
    /// Prompt tokens still to be computed.
    pub prefill_tokens: Option<u64>,
    /// Uncached prompt tokens of waiting requests.
    pub queued_uncached_tokens: Option<u64>,
    /// Blocks of active requests; may be a fraction where outputs are expected to decay.
    pub decode_blocks: Option<f64>,
    /// Blocks that the KV cache holds, of the size that the engine schedules by.
    pub kv_total_blocks: Option<u64>,
    /// Whether those blocks are this rank's share of a sum over several engines.
    pub total_is_divided: bool,
    /// Requests that the rank runs at once.
    pub max_running_requests: Option<u64>,
    /// Whether the engine sleeps, where it says so.
    pub sleep: Option<SleepState>,
}

/// Why an entry was refused: what one of its fields is. One bad field makes the whole entry unbelievable.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Refused {
    /// No number.
    NotANumber,
    /// Not finite.
    NotFinite,
    /// Below 0.
    Negative,
    /// A share above 1, or a count above 2^53.
    TooLarge,
    /// A count with a fraction.
    Fraction,
}

/// Largest count that is taken: above it, doubles skip whole numbers.
const MAX_COUNT: f64 = 9_007_199_254_740_992.0;

impl RawRankLoad {
    /// The load, and how old it was when it was reported.
    ///
    /// # Errors
    /// The first field that cannot be.
    pub fn check(&self) -> Result<(RankLoad, Duration), Refused> {
        let load = RankLoad {
            num_running_reqs: count(self.num_running_reqs)?,
            num_waiting_reqs: count(self.num_waiting_reqs)?,
            num_used_tokens: count(self.num_used_tokens)?,
            max_total_num_tokens: count(self.max_total_num_tokens)?,
            token_usage: amount(self.token_usage, 1.0)?,
            kv_used_blocks: count(self.kv_used_blocks)?,
            prefill_tokens: count(self.prefill_tokens)?,
            queued_uncached_tokens: count(self.queued_uncached_tokens)?,
            decode_blocks: amount(self.decode_blocks, MAX_COUNT)?,
            kv_total_blocks: count(self.kv_total_blocks)?,
            total_is_divided: self.total_is_divided,
            max_running_requests: count(self.max_running_requests)?,
            sleep: self.sleep,
        };
        let age_ms = amount(self.age_ms, MAX_COUNT)?.unwrap_or(0.0);
        // In range for a duration: at most 2^53 ms.
        Ok((load, Duration::from_micros((age_ms * 1_000.0) as u64)))
    }
}

impl RankLoad {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn amount(raw: RawNumber, max: f64) -> Result<Option<f64>, Refused> {
    match raw {
        RawNumber::Absent => Ok(None),
        RawNumber::Unreadable => Err(Refused::NotANumber),
        RawNumber::Value(value) if !value.is_finite() => Err(Refused::NotFinite),
        RawNumber::Value(value) if value < 0.0 => Err(Refused::Negative),
        RawNumber::Value(value) if value > max => Err(Refused::TooLarge),
        RawNumber::Value(value) => Ok(Some(value)),
    }
}

fn count(raw: RawNumber) -> Result<Option<u64>, Refused> {
    match amount(raw, MAX_COUNT)? {
        Some(value) if value.fract() != 0.0 => Err(Refused::Fraction),
        // Whole, not negative and at most 2^53: exact.
        value => Ok(value.map(|value| value as u64)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn decode(decode_blocks: impl Into<RawNumber>) -> RawRankLoad {
        RawRankLoad { decode_blocks: decode_blocks.into(), ..RawRankLoad::default() }
    }

    /// L4, C37
    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(decode(-1.0).check(), Err(Refused::Negative));
        assert_eq!(decode(f64::NAN).check(), Err(Refused::NotFinite));
        assert_eq!(decode(f64::INFINITY).check(), Err(Refused::NotFinite));
        assert_eq!(decode(f64::NEG_INFINITY).check(), Err(Refused::NotFinite));
        assert_eq!(decode(RawNumber::Unreadable).check(), Err(Refused::NotANumber));
        let with = |set: fn(&mut RawRankLoad)| {
            let mut load = decode(4.0);
            set(&mut load);
            load.check()
        };
        assert_eq!(with(|load| load.token_usage = 1.01.into()), Err(Refused::TooLarge));
        assert_eq!(with(|load| load.num_running_reqs = 1.5.into()), Err(Refused::Fraction));
        assert_eq!(with(|load| load.num_waiting_reqs = 1e300.into()), Err(Refused::TooLarge));
        assert_eq!(with(|load| load.age_ms = (-1.0).into()), Err(Refused::Negative));
    }

    /// L4: a missing field is unknown, not zero.
    #[test]
    fn what_is_missing_stays_unknown() {
        let (load, age) = RawRankLoad::default().check().unwrap();
        assert!(load.is_empty());
        assert_eq!(age, Duration::ZERO);
        let (load, _) = decode(0.0).check().unwrap();
        assert_eq!((load.decode_blocks, load.num_running_reqs), (Some(0.0), None));
        assert!(!load.is_empty());
    }

    #[test]
    fn what_can_be_is_taken_exactly() {
        let mut raw = decode(12.5);
        raw.num_used_tokens = MAX_COUNT.into();
        raw.token_usage = 1.0.into();
        raw.age_ms = 1.5.into();
        let (load, age) = raw.check().unwrap();
        assert_eq!(load.num_used_tokens, Some(1 << 53));
        assert_eq!((load.decode_blocks, load.token_usage), (Some(12.5), Some(1.0)));
        assert_eq!(age, Duration::from_micros(1500));
        // Minus zero is zero.
        assert_eq!(decode(-0.0).check().unwrap().0.decode_blocks, Some(0.0));
    }
}

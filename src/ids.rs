//! Names of things: workers, ranks, streams, positions in a stream, moments.
//!
//! Every number that means something is a type of its own, so that a local rank cannot be passed for a
//! global one and a block count cannot be passed for a token count.

use std::borrow::Borrow;
use std::fmt;
use std::ops::{Add, Sub};
use std::sync::Arc;
use std::time::Duration;

/// A worker: one engine deployment that manages a contiguous range of global data-parallel ranks.
///
/// A string inside; a client's integer `n` is its decimal form (`interfaces` decision of ours). Cloning
/// costs one reference count.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(Arc<str>);

impl WorkerId {
    /// A worker id from its textual form.
    pub fn new(id: impl AsRef<str>) -> Self {
        Self(Arc::from(id.as_ref()))
    }

    /// The textual form.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for WorkerId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl From<&str> for WorkerId {
    fn from(id: &str) -> Self {
        Self::new(id)
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// A **global** data-parallel rank. The rank within its worker is a [`LocalRank`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DpRank(pub u32);

impl fmt::Display for DpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A rank counted from the start of its worker's range: what an engine's dispatch header wants.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LocalRank(pub u32);

/// A rank of the fleet: `(worker, dp_rank)`. Shown as `worker:rank`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankKey {
    /// The worker that manages the rank.
    pub worker: WorkerId,
    /// The global rank.
    pub dp_rank: DpRank,
}

impl RankKey {
    /// The rank `dp_rank` of `worker`.
    pub fn new(worker: impl Into<WorkerId>, dp_rank: u32) -> Self {
        Self { worker: worker.into(), dp_rank: DpRank(dp_rank) }
    }
}

impl fmt::Display for RankKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.worker, self.dp_rank)
    }
}

impl fmt::Debug for RankKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A batch's number in its publisher's stream: from 0, one up per message, one counter per rank.
///
/// `u64::MAX` is the end mark of a replay and never data ([`EventSeq::END_MARK`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EventSeq(pub u64);

impl EventSeq {
    /// The first number of every publisher process.
    pub const ZERO: Self = Self(0);
    /// What a replay's end carries instead of a number.
    pub const END_MARK: Self = Self(u64::MAX);

    /// The number after this one. Saturates below the end mark.
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1).min(u64::MAX - 1))
    }
}

impl fmt::Display for EventSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A stream of KV events: one connection to one rank's publisher.
///
/// Never reused within a process, so that a late message of a closed stream finds nobody.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SourceId(pub u64);

/// A rank's place in its pool's tables: a small dense index and a generation, so that a late batch of a
/// rank that is gone cannot land in its successor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RankSlot {
    /// Dense index, reused after the rank is gone.
    pub index: u32,
    /// How many ranks had this index before.
    pub generation: u32,
}

/// A moment on the caller's clock, in microseconds since an origin of the caller's choice.
///
/// The state machines of this crate never read a clock: live drivers pass elapsed time since start,
/// captures pass their recorded `t_us`, simulations pass what they like.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Moment(pub u64);

impl Moment {
    /// The moment `micros` after the origin.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// The moment `millis` after the origin.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000))
    }

    /// Microseconds since the origin.
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment, zero if it lies in the future.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, rhs: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(rhs.as_micros()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for Moment {
    type Output = Self;

    fn sub(self, rhs: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(rhs.as_micros()).unwrap_or(u64::MAX)))
    }
}

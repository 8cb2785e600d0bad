//! What the scoring stage is given: a request, and every rank that might serve it.

use std::sync::Arc;
use std::time::Duration;

use crate::block::BlockSize;
pub use crate::fleet::{Balance, EngineStyle, Role};
use crate::ids::{DpRank, LocalRank, RankKey, WorkerId};
use crate::trust::{Reasons, Trust};

/// Labels of a rank's worker, as its operator wrote them.
pub type Taints = Arc<[Box<str>]>;

/// A declared rank with all that is known about it at the moment of the request.
#[derive(Clone, PartialEq, Debug)]
pub struct Candidate {
    /// The rank.
    pub rank: RankKey,
    /// The rank counted from the start of its worker's range; `None` where nobody said where that starts.
    pub local: Option<LocalRank>,
    /// What the worker is for.
    pub role: Role,
    /// Who picks the rank within the worker.
    pub balance: Balance,
    /// How the worker's engine is told which rank to use.
    pub engine: EngineStyle,
    /// Whether the rank can be chosen now.
    pub standing: Standing,
    /// Labels that a request may require or prefer.
    pub taints: Taints,
    /// The request's leading blocks that the rank holds.
    pub overlap: Overlap,
    /// How far `overlap` and `tree_size` can be believed.
    pub trust: Trust,
    /// Why it cannot be believed further; shown, and `trust` alone counts.
    pub reasons: Reasons,
    /// Time since the rank's view last changed or was confirmed; `None` if it never was.
    pub view_age: Option<Duration>,
    /// Distinct blocks that the rank holds on the device now.
    pub tree_size: u64,
    /// KV blocks that the rank can hold, if known; shown, and `standing` alone counts.
    pub total_blocks: Option<u64>,
    /// How busy the rank is.
    pub load: CandidateLoad,
    /// The request's full blocks that are not active on the rank: what decoding it would add there.
    pub new_blocks: u64,
    /// The request's leading blocks that requests which were just sent there hold, or will hold once they are
    /// prefilled; 0 where that is not to count. They cannot be evicted while those requests run.
    pub expected_blocks: u32,
    /// The prefill work for those of them that are not computed yet. It is the request's own as well, so it
    /// must not be held against it.
    pub shared_prefill_tokens: u64,
}

impl Candidate {
    /// The rank with an empty, live view and an unknown load; set what is known of it.
    pub fn new(rank: RankKey, local: impl Into<Option<LocalRank>>) -> Self {
        Self {
            rank,
            local: local.into(),
            role: Role::default(),
            balance: Balance::default(),
            engine: EngineStyle::default(),
            standing: Standing::default(),
            taints: Taints::default(),
            overlap: Overlap::default(),
            trust: Trust::Live,
            reasons: Reasons::NONE,
            view_age: None,
            tree_size: 0,
            total_blocks: None,
            load: CandidateLoad::Unknown,
            new_blocks: 0,
            expected_blocks: 0,
            shared_prefill_tokens: 0,
        }
    }

    /// What the request would find on the rank: what the rank holds, and what was just sent there.
    pub fn reach(&self) -> Overlap {
        Overlap { device: self.overlap.device.max(self.expected_blocks), ..self.overlap }
    }

    /// Blocks that count as cached on the device only because requests which hold them were just sent there.
    pub fn booked_blocks(&self) -> u32 {
        self.expected_blocks.saturating_sub(self.overlap.device)
    }

    /// Prompt tokens that the rank has to prefill before the request's own, if known.
    pub fn prefill_ahead(&self) -> Option<u64> {
        let active = self.load.active_prefill_tokens()?;
        Some(active.saturating_sub(self.shared_prefill_tokens))
    }
}

/// The request's leading full blocks that a rank holds without a hole, in blocks, **cumulative** by tier.
///
/// A reach that is shorter than a nearer tier's is read as the nearer tier's.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Overlap {
    /// Reach on the device alone.
    pub device: u32,
    /// Reach over device and host together.
    pub host: u32,
    /// Reach over device, host and disk together.
    pub disk: u32,
}

impl Overlap {
    /// A reach of `blocks` on the device, and no further anywhere.
    pub const fn device(blocks: u32) -> Self {
        Self { device: blocks, host: blocks, disk: blocks }
    }

    /// Blocks that the host adds beyond the device.
    pub fn beyond_device(self) -> u32 {
        self.host.saturating_sub(self.device)
    }

    /// Blocks that the disk adds beyond device and host.
    pub fn beyond_host(self) -> u32 {
        self.disk.saturating_sub(self.host.max(self.device))
    }
}

/// How busy a rank is. Unknown is not idle.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CandidateLoad {
    /// A fresh report, with what was booked here since.
    Known {
        /// Blocks active on the rank; a share where the report gives a usage.
        decode_blocks: f64,
        /// Prompt tokens that the rank has still to prefill; `None` if the report does not say, and then
        /// left out of the sum.
        active_prefill_tokens: Option<u64>,
        /// Requests active on the rank; `None` if the report does not say, and then without a term.
        active_requests: Option<u64>,
        /// Age of the report; `None` where a ledger alone makes the rank known.
        age: Option<Duration>,
    },
    /// No fresh report.
    Unknown,
}

impl CandidateLoad {
    /// Prompt tokens that the rank has still to prefill, if known.
    pub fn active_prefill_tokens(self) -> Option<u64> {
        match self {
            Self::Known { active_prefill_tokens, .. } => active_prefill_tokens,
            Self::Unknown => None,
        }
    }
}

/// Whether a rank can be chosen now.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Standing {
    /// It can.
    #[default]
    Ready,
    /// It is over its limit.
    Overloaded,
    /// Its engine sleeps.
    Asleep,
    /// It holds fewer blocks than the request needs.
    TooSmall,
    /// Its worker has no address to send a request to, where one is needed.
    NoEndpoint,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Prompt tokens.
    pub isl_tokens: u64,
    /// Tokens per block of the pool.
    pub block_size: BlockSize,
    /// Who may serve it.
    pub constraints: Constraints<'a>,
}

impl Request<'_> {
    /// A request of `isl_tokens` prompt tokens that any rank may serve.
    pub fn new(isl_tokens: u64, block_size: BlockSize) -> Self {
        Self { isl_tokens, block_size, constraints: Constraints::default() }
    }

    /// Blocks of the prompt, a partial last one included.
    pub fn blocks(&self) -> u64 {
        self.isl_tokens.div_ceil(u64::from(self.block_size.get()))
    }

    /// Full blocks of the prompt.
    pub fn full_blocks(&self) -> u64 {
        self.isl_tokens / u64::from(self.block_size.get())
    }
}

/// Who may serve a request. The default lets everybody.
#[derive(Clone, Copy, Default, Debug)]
pub struct Constraints<'a> {
    /// What the worker must be good for; `None` does not ask.
    pub role: Option<Role>,
    /// Workers that may serve it; `None` is all of them, an empty list none.
    pub allowed: Option<&'a AllowList>,
    /// The worker, or the rank, that must serve it.
    pub pin: Option<&'a Pin>,
    /// Whether the pin also holds on a rank that is silent or asleep.
    pub force_pin: bool,
    /// Ranks that must not serve it.
    pub left_out: Option<&'a RankList>,
    /// Labels that a worker must all have.
    pub required_taints: &'a [Box<str>],
}

/// A request's wish for one worker or one rank. Rank 0 is a rank; `None` is any rank of the worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pin {
    /// The worker.
    pub worker: WorkerId,
    /// The global rank, if one is named.
    pub dp_rank: Option<DpRank>,
}

/// The workers that may serve a request, sorted: a long list against a large fleet stays cheap.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct AllowList(Vec<WorkerId>);

impl AllowList {
    /// Whether `worker` is on the list; logarithmic in its length.
    pub fn contains(&self, worker: &WorkerId) -> bool {
        self.0.binary_search(worker).is_ok()
    }
}

impl FromIterator<WorkerId> for AllowList {
    fn from_iter<I: IntoIterator<Item = WorkerId>>(workers: I) -> Self {
        let mut sorted: Vec<_> = workers.into_iter().collect();
        sorted.sort_unstable();
        sorted.dedup();
        Self(sorted)
    }
}

/// Ranks that a request does not want, sorted: a long list against a large fleet stays cheap.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct RankList(Vec<RankKey>);

impl RankList {
    /// Whether `rank` is on the list; logarithmic in its length.
    pub fn contains(&self, rank: &RankKey) -> bool {
        self.0.binary_search(rank).is_ok()
    }
}

impl FromIterator<RankKey> for RankList {
    fn from_iter<I: IntoIterator<Item = RankKey>>(ranks: I) -> Self {
        let mut sorted: Vec<_> = ranks.into_iter().collect();
        sorted.sort_unstable();
        sorted.dedup();
        Self(sorted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I6: reaches are cumulative, and a shorter far reach adds nothing.
    #[test]
    fn farther_tiers_count_only_beyond_the_nearer() {
        let parts = |device, host, disk| {
            let overlap = Overlap { device, host, disk };
            (overlap.device, overlap.beyond_device(), overlap.beyond_host())
        };
        assert_eq!(parts(2, 5, 9), (2, 3, 4));
        assert_eq!(parts(5, 0, 0), (5, 0, 0));
        assert_eq!(parts(5, 0, 7), (5, 0, 2));
    }
}

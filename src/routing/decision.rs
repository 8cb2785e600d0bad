//! The decision as a value that explains itself, and the refusal that says why there is none.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::candidate::{Balance, Candidate, CandidateLoad, Request, Role};
use super::choice::are_equal;
use super::cost::Terms;
use super::dispatch::Dispatch;
use super::filter::{Excluded, Obstacle};
use super::policy::Policy;
use crate::block::BlockSize;
use crate::ids::{DpRank, LocalRank, RankKey, WorkerId};

/// A candidate with what it would cost.
#[derive(Clone, PartialEq, Debug)]
pub struct Scored {
    /// What was known about it.
    pub candidate: Candidate,
    /// What that costs.
    pub terms: Terms,
}

/// One line: the rank, its cost with all terms, its overlap per tier, trust and ages.
impl fmt::Display for Scored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}; {}", self.candidate.rank, self.terms.formula(), Basis(&self.candidate))
    }
}

/// Where a request goes, why, and what that rests on.
///
/// Borrows the scorer's table; [`Decision::into_owned`] copies it for keeping.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision<'s> {
    /// Where the request goes.
    pub pick: Pick,
    /// What decided.
    pub reason: Reason,
    /// Prompt tokens of the request.
    pub isl_tokens: u64,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Temperature of the choice.
    pub temperature: f64,
    /// Ranks that were not scored, by what kept them out.
    pub excluded: Excluded,
    /// Nothing is heard of any rank that could serve the request: the choice was made among them all the same.
    pub all_silent: bool,
    left_out: Cow<'s, [LeftOut]>,
    candidates: Cow<'s, [Scored]>,
    /// Always an index into `candidates`.
    chosen: usize,
}

/// A rank that its own state kept out, and by what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeftOut {
    /// The rank.
    pub rank: RankKey,
    /// What kept it out.
    pub obstacle: Obstacle,
}

impl LeftOut {
    /// Most of them that a decision names: enough to see which workers are gone, and an answer stays small. All of
    /// them are counted.
    pub const MAX: usize = 32;
}

/// Everybody who was not scored.
pub(super) struct KeptOut<'s> {
    pub(super) all_silent: bool,
    pub(super) counts: Excluded,
    pub(super) ranks: &'s [LeftOut],
}

impl<'s> Decision<'s> {
    /// `chosen` must be an index into `scored`.
    pub(super) fn new(
        policy: &Policy,
        request: &Request<'_>,
        scored: &'s [Scored],
        (chosen, reason): (usize, Reason),
        kept_out: KeptOut<'s>,
    ) -> Self {
        let KeptOut { all_silent, counts, ranks } = kept_out;
        let reason = if all_silent { Reason::AllSilent } else { reason };
        let candidate = &scored[chosen].candidate;
        let pinned = request.constraints.pin.is_some_and(|pin| pin.dp_rank.is_some());
        // A caller who pins a rank has picked it, also where the engine would pick otherwise.
        let (pick, reason) = match candidate.balance {
            _ if pinned => (Pick::rank(candidate), Reason::Pinned),
            Balance::Internal => {
                (Pick::Engine { worker: candidate.rank.worker.clone() }, Reason::EngineBalances)
            }
            Balance::Hybrid | Balance::External => (Pick::rank(candidate), reason),
        };
        Self {
            pick,
            reason,
            isl_tokens: request.isl_tokens,
            block_size: request.block_size,
            temperature: policy.temperature,
            excluded: counts,
            all_silent,
            left_out: Cow::Borrowed(ranks),
            candidates: Cow::Borrowed(scored),
            chosen,
        }
    }

    /// Every candidate that was scored, in the order in which they were offered.
    pub fn candidates(&self) -> &[Scored] {
        &self.candidates
    }

    /// Ranks that their own state kept out, the first [`LeftOut::MAX`] of them.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// The candidates in the order in which they would be chosen, the one that won first. Costs a sort: for what is
    /// shown.
    pub fn ranked(&self) -> Vec<&Scored> {
        let key = |scored: &Scored| (scored.terms.logit.is_none(), scored.terms.order());
        let mut others: Vec<_> = (0..self.candidates.len())
            .filter(|&at| at != self.chosen)
            .map(|at| &self.candidates[at])
            .collect();
        others.sort_by(|a, b| {
            let ((a_unknown, a_cost), (b_unknown, b_cost)) = (key(a), key(b));
            a_unknown.cmp(&b_unknown).then(a_cost.total_cmp(&b_cost))
        });
        others.insert(0, self.chosen());
        others
    }

    /// How the choice fell among candidates of equal cost; `None` where the one that won had no equal, or was drawn.
    pub fn tie(&self) -> Option<Tie<'_>> {
        let won = self.chosen();
        let equal = |other: &Scored| {
            other.terms.logit.is_some() == won.terms.logit.is_some()
                && are_equal(other.terms.order(), won.terms.order())
        };
        let ranks = self.candidates.iter().filter(|other| equal(other)).count();
        (ranks > 1 && self.reason != Reason::Temperature).then_some(Tie { decision: self, ranks })
    }

    /// The candidate that won. Where the engine picks, the best known rank of the chosen worker.
    pub fn chosen(&self) -> &Scored {
        &self.candidates[self.chosen]
    }

    /// What to send so that the engine runs the request on the picked rank; `None` where it picks itself.
    pub fn dispatch(&self) -> Option<Dispatch> {
        Dispatch::of(self.chosen().candidate.engine, &self.pick)
    }

    /// How many candidates have no logit because their load is not known.
    pub fn unknown_loads(&self) -> usize {
        self.candidates.iter().filter(|scored| scored.terms.logit.is_none()).count()
    }

    /// The same decision with a table of its own.
    pub fn into_owned(self) -> Decision<'static> {
        Decision {
            candidates: Cow::Owned(self.candidates.into_owned()),
            left_out: Cow::Owned(self.left_out.into_owned()),
            ..self
        }
    }
}

/// The log line.
impl fmt::Display for Decision<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scored { candidate, terms } = self.chosen();
        write!(f, "{} by {}", self.pick, self.reason)?;
        if self.reason == Reason::Temperature {
            write!(f, " {:?}", self.temperature)?;
        }
        write!(f, ": {}", terms.formula())?;
        if matches!(self.pick, Pick::Engine { .. }) {
            write!(f, " on its best known rank {}", candidate.rank)?;
        }
        write!(f, "; {}; {} candidates", Basis(candidate), self.candidates.len())?;
        match self.unknown_loads() {
            0 => {}
            unknown => write!(f, ", {unknown} of unknown load")?,
        }
        match self.excluded.total() {
            0 => Ok(()),
            excluded => write!(f, ", {excluded} ranks excluded"),
        }
    }
}

/// Displays how a tie fell.
#[derive(Clone, Copy, Debug)]
pub struct Tie<'d> {
    decision: &'d Decision<'d>,
    /// Candidates of equal cost.
    pub ranks: usize,
}

impl fmt::Display for Tie<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Scored { candidate, terms } = self.decision.chosen();
        let cost = terms.order();
        write!(f, "tie of {} candidates at {cost:.3}: {} ", self.ranks, candidate.rank)?;
        match self.decision.reason {
            Reason::SmallerTree => write!(f, "has the smallest tree, {} blocks", candidate.tree_size),
            _ => f.write_str("was chosen by chance"),
        }
    }
}

/// Where a request goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Pick {
    /// To this rank.
    Rank {
        /// The rank, global.
        rank: RankKey,
        /// The same rank, counted within its worker: what dispatch wants. `None` where nobody said at which rank
        /// the worker starts.
        local: Option<LocalRank>,
    },
    /// To this worker; its engine picks the rank.
    Engine {
        /// The worker.
        worker: WorkerId,
    },
}

impl Pick {
    /// The worker that gets the request.
    pub fn worker(&self) -> &WorkerId {
        match self {
            Self::Rank { rank, .. } => &rank.worker,
            Self::Engine { worker } => worker,
        }
    }

    /// The global rank that gets the request; `None` where the engine picks it.
    pub fn dp_rank(&self) -> Option<DpRank> {
        match self {
            Self::Rank { rank, .. } => Some(rank.dp_rank),
            Self::Engine { .. } => None,
        }
    }

    /// The rank within its worker; `None` where the engine picks it, or where the worker's start is not known.
    pub fn local(&self) -> Option<LocalRank> {
        match self {
            Self::Rank { local, .. } => *local,
            Self::Engine { .. } => None,
        }
    }

    /// Why no rank is named, in words; `None` if one is.
    pub fn why_no_rank(&self) -> Option<&'static str> {
        match self {
            Self::Rank { .. } => None,
            Self::Engine { .. } => Some("load balancing is internal: the engine picks the rank"),
        }
    }

    fn rank(candidate: &Candidate) -> Self {
        Self::Rank { rank: candidate.rank.clone(), local: candidate.local }
    }
}

impl fmt::Display for Pick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rank { rank, local: Some(local) } => write!(f, "{rank} (local rank {})", local.0),
            Self::Rank { rank, local: None } => write!(f, "{rank} (local rank unknown)"),
            Self::Engine { worker } => {
                write!(f, "{worker} ({})", self.why_no_rank().unwrap_or_default())
            }
        }
    }
}

/// What decided between the candidates.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// There was only one.
    OnlyCandidate,
    /// Its cost was the lowest.
    LowestLogit,
    /// Among equal costs its tree was the smallest, and all their sizes are known.
    SmallerTree,
    /// Among equal costs, and trees that are equal or not all known, chance.
    Chance,
    /// Drawn in proportion to the costs.
    Temperature,
    /// No candidate's load is known: the least prefill work, then the smaller tree, then chance.
    LoadUnknown,
    /// Nothing is heard of any rank that could serve the request; chosen among them as among others.
    AllSilent,
    /// The request named the rank.
    Pinned,
    /// The worker's engine picks the rank; the worker was chosen by its best known rank.
    EngineBalances,
}

impl Reason {
    /// All reasons, for metrics that count picks by reason.
    pub const ALL: [Self; 9] = [
        Self::OnlyCandidate,
        Self::LowestLogit,
        Self::SmallerTree,
        Self::Chance,
        Self::Temperature,
        Self::LoadUnknown,
        Self::AllSilent,
        Self::Pinned,
        Self::EngineBalances,
    ];

    /// The reason's name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnlyCandidate => "only_candidate",
            Self::LowestLogit => "lowest_logit",
            Self::SmallerTree => "smaller_tree",
            Self::Chance => "chance",
            Self::Temperature => "temperature",
            Self::LoadUnknown => "load_unknown",
            Self::AllSilent => "all_silent",
            Self::Pinned => "pinned",
            Self::EngineBalances => "engine_balances",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a request cannot be placed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The pool has no declared rank.
    #[error("no worker is declared")]
    NoWorker,
    /// The pinned worker is not declared.
    #[error("worker {worker} is not declared")]
    UnknownWorker {
        /// The pinned worker.
        worker: WorkerId,
    },
    /// The pinned rank is outside its worker's range.
    #[error("rank {rank} does not exist: the worker manages ranks {first} to {last}")]
    NoSuchRank {
        /// The pinned rank.
        rank: RankKey,
        /// The worker's first rank.
        first: DpRank,
        /// The worker's last rank.
        last: DpRank,
    },
    /// The pinned worker is not on the request's own allow-list.
    #[error("worker {worker} is pinned, but the request does not allow it")]
    NotAllowed {
        /// The pinned worker.
        worker: WorkerId,
    },
    /// None of the allowed workers is declared.
    #[error("none of the allowed workers is declared")]
    NoneAllowed,
    /// No worker of the wanted role.
    #[error("no worker serves the role {}", role.name())]
    NoneInRole {
        /// The wanted role.
        role: Role,
    },
    /// No rank has all required labels.
    #[error("no rank has all the required taints")]
    TaintsUnmet,
    /// No rank's worker has an address to send a request to.
    #[error("no rank's worker has an endpoint")]
    NoEndpoint,
    /// It needs more blocks than any rank that could serve it holds, by figures that are exact.
    #[error("the request needs more KV blocks than any rank that could serve it holds ({ranks})")]
    TooLarge {
        /// How many ranks could serve it otherwise.
        ranks: u32,
    },
    /// The request leaves out every rank that could serve it.
    #[error("the request leaves out every rank that could serve it ({ranks})")]
    AllLeftOut {
        /// How many ranks could serve it otherwise.
        ranks: u32,
    },
    /// Every rank that could serve it sleeps.
    #[error("every rank that could serve it is asleep ({ranks})")]
    Asleep {
        /// How many ranks could serve it otherwise.
        ranks: u32,
    },
    /// Nothing is heard of the pinned rank.
    #[error(
        "nothing is heard of the pinned rank, it may be gone ({ranks} silent); \
         pinned_worker.force sends the request there all the same"
    )]
    Silent {
        /// How many ranks could serve it otherwise.
        ranks: u32,
    },
    /// Every rank that could serve it is over its limit.
    #[error("every rank that could serve it is overloaded ({ranks})")]
    Overloaded {
        /// How many ranks could serve it otherwise.
        ranks: u32,
    },
}

impl Refusal {
    /// The refusal's name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoWorker => "no_worker",
            Self::UnknownWorker { .. } => "unknown_worker",
            Self::NoSuchRank { .. } => "no_such_rank",
            Self::NotAllowed { .. } => "not_allowed",
            Self::NoneAllowed => "none_allowed",
            Self::NoneInRole { .. } => "none_in_role",
            Self::TaintsUnmet => "taints_unmet",
            Self::NoEndpoint => "no_endpoint",
            Self::AllLeftOut { .. } => "all_left_out",
            Self::Asleep { .. } => "asleep",
            Self::Silent { .. } => "silent",
            Self::TooLarge { .. } => "too_large",
            Self::Overloaded { .. } => "overloaded",
        }
    }

    /// What a caller can do about it.
    pub fn kind(&self) -> RefusalKind {
        match self {
            Self::NoSuchRank { .. } | Self::NotAllowed { .. } | Self::TooLarge { .. } => {
                RefusalKind::BadRequest
            }
            Self::UnknownWorker { .. } => RefusalKind::NotFound,
            Self::Overloaded { .. } => RefusalKind::Overloaded,
            Self::NoWorker
            | Self::NoneAllowed
            | Self::NoneInRole { .. }
            | Self::TaintsUnmet
            | Self::AllLeftOut { .. }
            | Self::Asleep { .. }
            | Self::Silent { .. }
            | Self::NoEndpoint => RefusalKind::Unavailable,
        }
    }

    /// The part of the request that is at odds with the fleet, if one is.
    pub fn field(&self) -> Option<&'static str> {
        match self {
            Self::UnknownWorker { .. }
            | Self::NoSuchRank { .. }
            | Self::NotAllowed { .. }
            | Self::Silent { .. } => Some("pinned_worker"),
            Self::AllLeftOut { .. } => Some("exclude_ranks"),
            Self::NoneAllowed => Some("allowed_worker_ids"),
            Self::NoneInRole { .. } => Some("role"),
            Self::TaintsUnmet => Some("required_taints"),
            Self::NoWorker
            | Self::NoEndpoint
            | Self::Asleep { .. }
            | Self::TooLarge { .. }
            | Self::Overloaded { .. } => None,
        }
    }
}

/// What a caller can do about a refusal; the HTTP and gRPC sides turn it into a status.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RefusalKind {
    /// Ask something else: 400.
    BadRequest,
    /// Name a worker that exists: 404.
    NotFound,
    /// Ask again when load has gone down: 429.
    Overloaded,
    /// Ask again when the fleet has changed: 503.
    Unavailable,
}

/// What a score rests on: overlap, trust and ages.
struct Basis<'c>(&'c Candidate);

impl fmt::Display for Basis<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(candidate) = self;
        let overlap = candidate.overlap;
        write!(f, "overlap {} device, {} host, {} disk", overlap.device, overlap.host, overlap.disk)?;
        match candidate.booked_blocks() {
            0 => {}
            booked => write!(f, ", {booked} booked")?,
        }
        write!(f, ", tree {}", candidate.tree_size)?;
        match candidate.total_blocks {
            Some(total) => write!(f, ", total blocks {total}")?,
            None => f.write_str(", total blocks unknown")?,
        }
        write!(f, ", view {}", candidate.trust)?;
        for why in candidate.trust.may_err().iter().copied().chain(candidate.reasons.names()) {
            write!(f, " {why}")?;
        }
        write!(f, " ({})", Age(candidate.view_age))?;
        match candidate.load {
            CandidateLoad::Known { age, .. } => write!(f, ", load known ({})", Age(age)),
            CandidateLoad::Unknown => f.write_str(", load unknown"),
        }
    }
}

struct Age(Option<Duration>);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(age) => write!(f, "{} ms old", age.as_millis()),
            None => f.write_str("no age"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names go to metrics and clients: each once.
    #[test]
    fn reasons_have_names_of_their_own() {
        let names: std::collections::HashSet<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
    }
}

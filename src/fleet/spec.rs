//! Everything that a worker can declare.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use super::capacity::{CapacitySpec, DpMode};
use super::endpoint::{Endpoint, Endpoints};
use super::error::DeclareError;
use super::pool::PoolKey;
use super::ranks::Ranks;
use super::roster::RankPlan;
use crate::block::{Announcements, BlockSize};
use crate::ids::{DpRank, WorkerId};

/// A worker's declaration.
///
/// [`WorkerSpec::new`] gives the field's defaults; set what differs.
#[derive(Clone, PartialEq, Debug)]
pub struct WorkerSpec {
    /// The worker.
    pub worker: WorkerId,
    /// The JSON type in which its id was given, and in which it is answered.
    pub id_form: IdForm,
    /// The pool that it serves.
    pub pool: PoolKey,
    /// Tokens per block of its full-attention group.
    pub block_size: BlockSize,
    /// Its global ranks.
    pub ranks: Ranks,
    /// Where its events come from.
    pub events: EventsFrom,
    /// How its announcements are to be counted.
    pub announcements: Announcements,
    /// What it may be selected for.
    pub role: Role,
    /// Who picks its rank.
    pub balance: Balance,
    /// How a rank is named to it when a request is sent.
    pub engine: EngineStyle,
    /// Where requests go; `None` if it was declared without.
    pub http_endpoint: Option<String>,
    /// Where its load can be asked for, as a URL; `None` is nowhere.
    pub loads: Option<String>,
    /// Where its ranks publish their load.
    pub load_stat: Option<Endpoints>,
    /// KV capacity in blocks; `None` is unknown.
    pub capacity: Option<CapacitySpec>,
    /// What kind of data parallelism its ranks are.
    pub dp_mode: DpMode,
    /// Requests that it runs at once, as configured on the engine; `None` is unknown.
    pub max_running_requests: Option<u64>,
    /// Tokens that a rank schedules in one step, as configured on the engine; `None` is unknown.
    pub max_num_batched_tokens: Option<u64>,
    /// Marks that a request must tolerate or may prefer.
    pub taints: BTreeSet<String>,
    /// Adapters that it serves: their names may be asked as models (requirement A3).
    pub adapters: BTreeSet<String>,
    /// Whether its events carry token pairs (SGLang EAGLE/MTP); `None` leaves it to the stream, which says so
    /// itself. A declaration that differs is a named reason (requirement I11).
    pub is_eagle: Option<bool>,
    /// Blocks of one host chunk, where a connector announces a chunk under names of which only the last can be
    /// loaded (requirement I9). `None`: every name is a block of its own.
    pub host_chunk_blocks: Option<NonZeroU32>,
    /// What a clear that names no medium empties.
    pub clear_scope: ClearScope,
    /// The lower tiers that are scored; the device always is.
    pub score_tiers: ScoreTiers,
}

impl WorkerSpec {
    /// A worker of both roles whose events are handed in by the caller; nothing else is known of it.
    pub fn new(worker: impl Into<WorkerId>, pool: PoolKey, block_size: BlockSize, ranks: Ranks) -> Self {
        Self {
            worker: worker.into(),
            id_form: IdForm::default(),
            pool,
            block_size,
            ranks,
            events: EventsFrom::default(),
            announcements: Announcements::default(),
            role: Role::default(),
            balance: Balance::default(),
            engine: EngineStyle::default(),
            http_endpoint: None,
            loads: None,
            load_stat: None,
            capacity: None,
            dp_mode: DpMode::default(),
            max_running_requests: None,
            max_num_batched_tokens: None,
            taints: BTreeSet::new(),
            adapters: BTreeSet::new(),
            is_eagle: None,
            host_chunk_blocks: None,
            clear_scope: ClearScope::default(),
            score_tiers: ScoreTiers::default(),
        }
    }

    /// The same worker with its events from there.
    pub fn events(mut self, events: EventsFrom) -> Self {
        self.events = events;
        self
    }

    /// The same worker in this role.
    pub fn role(mut self, role: Role) -> Self {
        self.role = role;
        self
    }

    /// The same worker with its rank picked there.
    pub fn balance(mut self, balance: Balance) -> Self {
        self.balance = balance;
        self
    }

    /// The same worker with this capacity.
    pub fn capacity(mut self, capacity: CapacitySpec) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Makes a capacity that was given with one rank that rank's own, whatever ranks are added later.
    pub fn own_figures(&mut self) {
        if let (1, Some(capacity)) = (self.ranks.len(), &mut self.capacity) {
            capacity.own(self.ranks.start());
        }
    }

    /// Takes over what `added` says of its own ranks, and where to ask for load if nothing was said of that.
    pub(crate) fn absorb(&mut self, added: &Self) {
        self.loads = self.loads.take().or_else(|| added.loads.clone());
        match (&mut self.load_stat, &added.load_stat) {
            (Some(has), Some(more)) => has.per_rank.extend(more.per_rank.clone()),
            (has @ None, more) => has.clone_from(more),
            (Some(_), None) => {}
        }
        match (&mut self.capacity, &added.capacity) {
            (Some(has), Some(more)) => has.absorb(more),
            (has @ None, more) => has.clone_from(more),
            (Some(_), None) => {}
        }
    }

    /// Whether a rank of `self` that is a rank of `other` too can keep what is known of it, as far as the
    /// worker's settings go.
    pub(crate) fn counts_like(&self, other: &Self) -> bool {
        self.announcements == other.announcements && self.host_chunk_blocks == other.host_chunk_blocks
    }
}

/// What a clear that names no medium empties (requirement I6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ClearScope {
    /// Every tier.
    #[default]
    All,
    /// The device tier: for engines whose reset leaves a connector's tiers as they are.
    Device,
}

/// Which lower tiers are scored. One that never announces removals had better not be (requirement I6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ScoreTiers {
    /// Blocks in host memory.
    pub host: bool,
    /// Blocks on disk and beyond.
    pub disk: bool,
}

impl Default for ScoreTiers {
    fn default() -> Self {
        Self { host: true, disk: true }
    }
}

/// The JSON type of a worker id at the boundary.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum IdForm {
    /// A string.
    #[default]
    Text,
    /// A number: the id is its decimal form.
    Integer,
}

/// Where a worker's KV events come from.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum EventsFrom {
    /// The worker publishes none: what it holds is unknown, which is not the same as silent.
    None,
    /// Its frames are handed in by whoever drives the index: a capture, a simulation, an embedding router's
    /// own sockets.
    #[default]
    Fed,
    /// It publishes them over ZMQ.
    Zmq {
        /// One publisher per rank.
        endpoints: Endpoints,
        /// Where a rank's history can be asked for; a rank without one has none.
        replay: Option<Endpoints>,
        /// Prefix of the topics that are subscribed to; empty is all.
        topic: String,
    },
}

impl EventsFrom {
    /// ZMQ from a base endpoint, without replay, all topics.
    pub fn zmq(base: impl Into<String>) -> Self {
        Self::Zmq { endpoints: Endpoints::base(base), replay: None, topic: String::new() }
    }

    /// ZMQ from a base endpoint, with replay from another.
    pub fn zmq_with_replay(base: impl Into<String>, replay: impl Into<String>) -> Self {
        Self::Zmq {
            endpoints: Endpoints::base(base),
            replay: Some(Endpoints::base(replay)),
            topic: String::new(),
        }
    }

    /// Whether there are events at all.
    pub fn publishes(&self) -> bool {
        !matches!(self, Self::None)
    }

    /// Takes over the ranks of `added`. From then on every rank's address is its own (`plans` has those of all
    /// ranks, old and new): the old ranks' base says nothing about the new ones, and must not give them a
    /// replay endpoint that nobody declared.
    pub(crate) fn absorb<'a>(
        &mut self,
        worker: &WorkerId,
        added: &Self,
        plans: impl Iterator<Item = &'a RankPlan>,
    ) -> Result<(), DeclareError> {
        match (&*self, added) {
            (Self::None, Self::None) | (Self::Fed, Self::Fed) => return Ok(()),
            (Self::Zmq { topic, .. }, Self::Zmq { topic: other, .. }) if topic == other => {}
            _ => return Err(DeclareError::OtherEvents { worker: worker.clone() }),
        }
        if let Self::Zmq { endpoints, replay, .. } = self {
            let (mut events_at, mut replay_at) = (Endpoints::default(), Endpoints::default());
            let put = |to: &mut Endpoints, rank, at: &Option<Endpoint>| {
                to.per_rank.extend(at.iter().map(|at| (rank, at.address().to_owned())));
            };
            for plan in plans {
                put(&mut events_at, plan.rank.dp_rank, &plan.events);
                put(&mut replay_at, plan.rank.dp_rank, &plan.replay);
            }
            *endpoints = events_at;
            *replay = (!replay_at.per_rank.is_empty()).then_some(replay_at);
        }
        Ok(())
    }

    /// Forgets the address of one rank.
    pub(crate) fn forget(&mut self, rank: DpRank) {
        if let Self::Zmq { endpoints, replay, .. } = self {
            endpoints.per_rank.remove(&rank);
            if let Some(replay) = replay {
                replay.per_rank.remove(&rank);
            }
        }
    }
}

/// What a worker may be selected for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Role {
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
    /// Either.
    #[default]
    Both,
}

impl Role {
    /// Whether a worker of this role can serve a selection for `wanted`; no wish is served by any.
    pub fn serves(self, wanted: Option<Self>) -> bool {
        match wanted {
            None | Some(Self::Both) => true,
            Some(wanted) => self == Self::Both || self == wanted,
        }
    }

    /// The role's name at the boundary.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Who picks the rank within a worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Balance {
    /// The engine: a pick names the worker and no rank.
    Internal,
    /// The router, among ranks behind one front per node.
    Hybrid,
    /// The router.
    #[default]
    External,
}

impl Balance {
    /// Whether a pick names a rank.
    pub fn picks_rank(self) -> bool {
        !matches!(self, Self::Internal)
    }

    /// The mode's name at the boundary.
    pub fn name(self) -> &'static str {
        match self {
            Self::Internal => "internal",
            Self::Hybrid => "hybrid",
            Self::External => "external",
        }
    }
}

/// Which engine a request is sent to, as far as naming the rank goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum EngineStyle {
    /// Not declared: the pick names the local rank and not how to say it.
    #[default]
    Unknown,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R9
    #[test]
    fn a_role_serves_its_own_and_both_serves_all() {
        assert!(Role::Both.serves(Some(Role::Prefill)));
        assert!(Role::Both.serves(Some(Role::Decode)));
        assert!(Role::Prefill.serves(None));
        assert!(Role::Prefill.serves(Some(Role::Prefill)));
        assert!(!Role::Prefill.serves(Some(Role::Decode)));
        assert!(!Role::Decode.serves(Some(Role::Prefill)));
    }

    /// R6
    #[test]
    fn only_internal_balancing_leaves_the_rank_open() {
        assert!(!Balance::Internal.picks_rank());
        assert!(Balance::Hybrid.picks_rank());
        assert!(Balance::External.picks_rank());
        assert_eq!(Balance::default(), Balance::External);
    }
}

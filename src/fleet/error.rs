//! Why a declaration or a pin was refused.

use super::endpoint::EndpointError;
use super::pool::PoolKey;
use super::ranks::Ranks;
use crate::block::BlockSize;
use crate::ids::{DpRank, RankKey, WorkerId};

/// What a refusal means to a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorKind {
    /// The declaration makes no sense on its own; the same one will always be refused. HTTP 400.
    Invalid,
    /// It contradicts what is declared already. HTTP 409.
    Conflict,
}

/// Why a declaration was refused. A refused declaration changes nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeclareError {
    /// The worker has no name.
    #[error("the worker id is empty: name the worker")]
    EmptyWorker,
    /// The model has no name.
    #[error("the model name is empty: name the model that the worker serves")]
    EmptyModel,
    /// A size of 0.
    #[error("a worker needs at least one rank: give a size of 1 or more, or withdraw the worker")]
    NoRanks,
    /// `start + size` past `u32`.
    #[error("ranks {start} to {start}+{size} end past 2^32-1: lower the start or the size")]
    RangePastEnd {
        /// First global rank.
        start: u32,
        /// Number of ranks.
        size: u32,
    },
    /// A single rank that no range can hold.
    #[error(
        "rank {rank} is past the last possible rank: ranks are global and start + size is at most 2^32-1"
    )]
    RankPastEnd {
        /// The rank.
        rank: DpRank,
    },
    /// More ranks than a worker may have.
    #[error("{size} ranks are more than the {max} of one worker: declare several workers", max = Ranks::MAX)]
    TooManyRanks {
        /// Number of ranks asked for.
        size: u32,
    },
    /// More ranks than the fleet may have.
    #[error("the fleet would have {ranks} ranks, more than {max}: withdraw workers that are gone", max = super::Fleet::MAX_RANKS)]
    FleetFull {
        /// Ranks that the fleet would have.
        ranks: usize,
    },
    /// An endpoint that cannot be used.
    #[error("{field} `{endpoint}`: {why}")]
    BadEndpoint {
        /// Which field.
        field: &'static str,
        /// The endpoint as given, shortened if it is very long.
        endpoint: String,
        /// What is wrong with it.
        why: EndpointError,
    },
    /// The base port plus the global rank is no port.
    #[error(
        "{field} `{endpoint}`: base port {port} plus global rank {rank} is past port 65535: use a lower base port or give rank {rank} its own endpoint"
    )]
    PortPastEnd {
        /// Which field.
        field: &'static str,
        /// The base endpoint.
        endpoint: String,
        /// Its port.
        port: u16,
        /// The first rank without a port.
        rank: DpRank,
    },
    /// An explicit endpoint for a rank that the worker does not declare.
    #[error(
        "{field} names rank {rank}, which the worker does not declare: ranks are global, not counted from the worker's start"
    )]
    UndeclaredRank {
        /// Which field.
        field: &'static str,
        /// The rank.
        rank: DpRank,
    },
    /// A rank without an event endpoint.
    #[error(
        "rank {rank} has no event endpoint: give a base endpoint, one for this rank, or declare `events = none`"
    )]
    NoEndpoint {
        /// The rank.
        rank: DpRank,
    },
    /// Two uses of one endpoint within one declaration.
    #[error(
        "{field} of rank {rank} is `{endpoint}`, which is the {other_field} of rank {other} too: every rank needs its own, and event and replay ports must not meet"
    )]
    EndpointRepeated {
        /// Which field.
        field: &'static str,
        /// The endpoint.
        endpoint: String,
        /// The rank that came second.
        rank: DpRank,
        /// The rank that has it already.
        other: DpRank,
        /// What that rank has it for.
        other_field: &'static str,
    },
    /// An endpoint that a declared rank has already.
    #[error(
        "{field} `{endpoint}` is taken: it is the {other_field} of {by}; give this rank another or withdraw that one"
    )]
    EndpointTaken {
        /// Which field.
        field: &'static str,
        /// The endpoint.
        endpoint: String,
        /// The rank that has it.
        by: RankKey,
        /// What that rank has it for.
        other_field: &'static str,
    },
    /// The pool has another block size.
    #[error("pool {pool} has blocks of {is} tokens, not {asked}: all workers of a pool share one block size")]
    OtherBlockSize {
        /// The pool.
        pool: PoolKey,
        /// Its block size.
        is: BlockSize,
        /// What was declared.
        asked: BlockSize,
    },
    /// The worker is in another pool already.
    #[error("worker {worker} is declared under {is}: withdraw it there first")]
    OtherPool {
        /// The worker.
        worker: WorkerId,
        /// Where it is.
        is: PoolKey,
    },
    /// The rank is there already.
    #[error("rank {rank} is registered already: unregister it first, or declare the whole worker anew")]
    RankExists {
        /// The rank.
        rank: RankKey,
    },
    /// A rank is added whose events come another way than those of its worker's other ranks.
    #[error(
        "the ranks of worker {worker} get their events another way or under another topic: declare the whole worker anew"
    )]
    OtherEvents {
        /// The worker.
        worker: WorkerId,
    },
    /// A capacity list that does not fit the ranks.
    #[error(
        "the capacity list has {entries} entries for {ranks} ranks: give one per rank, in the order of the ranks"
    )]
    CapacityList {
        /// Length of the list.
        entries: usize,
        /// Number of ranks.
        ranks: u32,
    },
}

impl DeclareError {
    /// The offending field: `worker_id`, `model_name`, `size`, `dp_rank`, `endpoint`, `replay_endpoint`,
    /// `block_size` or `capacity`. A boundary that calls the field otherwise translates.
    pub fn field(&self) -> &'static str {
        match self {
            Self::EmptyWorker => "worker_id",
            Self::EmptyModel | Self::OtherPool { .. } => "model_name",
            Self::NoRanks
            | Self::RangePastEnd { .. }
            | Self::TooManyRanks { .. }
            | Self::FleetFull { .. } => "size",
            Self::RankPastEnd { .. } | Self::RankExists { .. } => "dp_rank",
            Self::BadEndpoint { field, .. }
            | Self::PortPastEnd { field, .. }
            | Self::UndeclaredRank { field, .. }
            | Self::EndpointRepeated { field, .. }
            | Self::EndpointTaken { field, .. } => field,
            Self::NoEndpoint { .. } | Self::OtherEvents { .. } => "endpoint",
            Self::OtherBlockSize { .. } => "block_size",
            Self::CapacityList { .. } => "capacity",
        }
    }

    /// Whether the declaration is wrong in itself or contradicts another.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::FleetFull { .. }
            | Self::EndpointTaken { .. }
            | Self::OtherBlockSize { .. }
            | Self::OtherPool { .. }
            | Self::RankExists { .. }
            | Self::OtherEvents { .. } => ErrorKind::Conflict,
            _ => ErrorKind::Invalid,
        }
    }
}

/// Why a pinned request cannot be served. It is refused and never moved to another rank.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PinError {
    /// The pool has no such worker. HTTP 404.
    #[error("worker {worker} is not in pool {pool}")]
    UnknownWorker {
        /// The worker.
        worker: WorkerId,
        /// The pool that was asked.
        pool: PoolKey,
    },
    /// The worker has no such rank. HTTP 400.
    #[error("worker {} has no rank {}: ranks are global and it has {count} from {start} on", rank.worker, rank.dp_rank)]
    NoSuchRank {
        /// The rank that was asked for.
        rank: RankKey,
        /// The worker's first rank.
        start: DpRank,
        /// How many it has.
        count: u32,
    },
}

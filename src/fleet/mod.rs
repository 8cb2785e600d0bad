//! The fleet: pools, workers, their declared ranks and endpoints.
//!
//! Knows no socket, no clock and not the index. A declaration goes in, a [`Change`] comes out; whoever keeps
//! something per rank (blocks, cursors, sockets, load, series) follows the change and nothing else, so that
//! what is cleaned up is always the real range.
//!
//! - [`ranks`]: a worker's global ranks.
//! - [`endpoint`]: one address per rank, and when two are the same.
//! - [`spec`]: everything that a worker can declare.
//! - [`capacity`]: blocks and request limits per rank, with where the number comes from.
//! - [`roster`]: the [`Fleet`] itself.
//! - [`names`]: longest-prefix resolution of model, adapter and topic names.

pub mod capacity;
pub mod endpoint;
pub mod error;
pub mod names;
pub mod pool;
pub mod ranks;
pub mod roster;
pub mod spec;

pub use crate::block::Announcements;
pub use capacity::{Capacity, CapacitySpec, DpMode, Provenance};
pub use endpoint::{Endpoint, EndpointError, Endpoints};
pub use error::{DeclareError, ErrorKind, PinError};
pub use names::NameTable;
pub use pool::{Pool, PoolKey};
pub use ranks::Ranks;
pub use roster::{Change, Fleet, Pin, RankPlan};
pub use spec::{Balance, ClearScope, EngineStyle, EventsFrom, IdForm, Role, ScoreTiers, WorkerSpec};

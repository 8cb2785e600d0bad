//! The ZMQ shell: one supervised subscriber task per rank, a fresh connection per request for history, load
//! sockets; and, from [`wire`](crate::wire), a publisher of our own for replaying captures.
//!
//! With `wire` the only part that names `zeromq`. It knows nothing of batches, order or trust: it moves frames, says when
//! connections come and go, and leaves every decision to the indexing core behind [`Sink`].
//!
//! # What to know about `zeromq` 0.7
//! It has no encryption, no heartbeat, no frame limit and no receive queue in user space. A peer can make it
//! reserve the memory of a frame that never comes, so engines belong on a private network. Its own reconnect
//! can stall for ever; here a socket lives for one connection and is then replaced.

mod backoff;
mod dial;
mod driver;
mod frames;
mod load_stat;
mod node;
mod replay;
mod subscriber;

use std::future::Future;

pub use backoff::{Backoff, BackoffConfig};
pub use dial::DialConfig;
pub use driver::{Clock, DriverConfig, DriverParts, LiveSurroundings, PumpSink, drive, prepare};
pub use load_stat::{
    LoadStatBinding, LoadStatConfig, LoadStatCounts, LoadStatFeed, LoadStatSink, LoadTableSink,
    spawn_load_stat,
};
pub use node::{Node, NodeConfig, NodeControl};
pub use replay::{ReplayConfig, ReplayHandle, spawn_replay};
pub use subscriber::{SubscriberConfig, SubscriberHandle, SubscriberStats, spawn_subscriber};

use crate::ids::SourceId;
pub use crate::pump::{ReplayFailure, StreamEvent};
pub use crate::wire::endpoint::{BadEndpoint, Target};
pub use crate::wire::publisher::{PublishError, Publisher, PublisherConfig, ReplayFraming};

/// The receiver is gone; the task that delivers ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the receiver of the stream's events is gone")]
pub struct Closed;

/// Where the events of all streams go.
///
/// `deliver` must wait while the receiver has no room: the task then stops reading its socket, TCP holds the
/// publisher back, and what the publisher drops in the end is seen as a gap and repaired as a gap.
pub trait Sink: Clone + Send + Sync + 'static {
    /// Hands over one event of `source`. Events of one task arrive in the order of their delivery.
    fn deliver(
        &self,
        source: SourceId,
        event: StreamEvent,
    ) -> impl Future<Output = Result<(), Closed>> + Send;
}

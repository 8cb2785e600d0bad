//! The ZMQ shell: one supervised subscriber task per rank, a fresh connection per request for history, and a
//! publisher of our own for replaying captures.
//!
//! The only part that names `zeromq`. It knows nothing of batches, order or trust: it moves frames, says when
//! connections come and go, and leaves every decision to the indexing core behind [`Sink`].
//!
//! # What to know about `zeromq` 0.7
//! It has no encryption, no heartbeat, no frame limit and no receive queue in user space. A peer can make it
//! reserve the memory of a frame that never comes, so engines belong on a private network. Its own reconnect
//! can stall for ever; here a socket lives for one connection and is then replaced.

mod backoff;
mod dial;
mod endpoint;
mod frames;
mod publisher;
mod replay;
mod subscriber;

use std::future::Future;

use bytes::Bytes;

pub use backoff::{Backoff, BackoffConfig};
pub use dial::DialConfig;
pub use endpoint::{BadEndpoint, Target};
pub use publisher::{PublishError, Publisher, PublisherConfig, ReplayFraming};
pub use replay::{ReplayConfig, ReplayHandle, spawn_replay};
pub use subscriber::{SubscriberConfig, SubscriberHandle, SubscriberStats, spawn_subscriber};

use crate::events::order::ReplayId;
use crate::ids::SourceId;

/// What a stream's tasks tell the indexing thread.
///
/// Frames are copied off the socket's read buffer: keeping one keeps its message's bytes alive, not the
/// buffer's 64 KiB.
#[derive(Clone, PartialEq, Debug)]
pub enum StreamEvent {
    /// A publisher is connected and our subscription is on its way to it. What it published before is not
    /// coming by this connection.
    Connected,
    /// The connection that was announced last is gone.
    Disconnected,
    /// Nobody listens at the endpoint. Said for each attempt, about once a second.
    Refused,
    /// The frames of a live message, as received.
    Message(Vec<Bytes>),
    /// The request has had its turn and was sent; until now it has waited for one of the few places, and
    /// no time limit on its answers should have run.
    ReplayAsked {
        /// The request.
        request: ReplayId,
    },
    /// One answer to a request for history, the end mark included, without the empty delimiter in front.
    ReplayMessage {
        /// The request that is answered.
        request: ReplayId,
        /// The frames, to be read from the back: payload, number, perhaps a topic.
        frames: Vec<Bytes>,
    },
    /// No more answers will come to the request, and no end mark was seen.
    ReplayFailed {
        /// The request that failed.
        request: ReplayId,
        /// How.
        why: ReplayFailure,
    },
}

/// Why a request for history ended without an end mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReplayFailure {
    /// Nobody listens at the replay endpoint.
    Refused,
    /// Somebody listens and does not speak ZMTP with us in time, or the host cannot be reached.
    Unreachable,
    /// The publisher closed the connection, or sent what is not ZMTP.
    Closed,
    /// Nothing came for the idle limit: the end mark was dropped, or the publisher is stuck.
    Idle,
    /// Answers came for longer, or were more, than is allowed for one request.
    TooLong,
}

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

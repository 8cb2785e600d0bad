//! The order of one rank's stream: duplicates, gaps, replays, restarts, losses.

use std::time::Duration;

use bytes::Bytes;

use crate::ids::{EventSeq, Moment};
use crate::trust::Trust;

/// One numbered batch as it came off the wire, not decoded.
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    /// Its number.
    pub seq: EventSeq,
    /// The engine's time of the batch, if it can be read.
    pub ts: Option<f64>,
    /// The msgpack payload.
    pub payload: Bytes,
}

/// Names one request for history. A late answer to an older request is recognised by it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub struct ReplayId(pub u64);

/// What the owner of the stream must do, in the order given.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Decode the batch and apply it to the rank.
    Apply(Batch),
    /// Forget all blocks of the rank.
    Clear,
    /// Ask the publisher for its batches from a number on, on a fresh connection.
    AskReplay {
        /// To be given back with each answer.
        request: ReplayId,
        /// First number wanted.
        from: EventSeq,
    },
    /// The request is given up: close its connection.
    CancelReplay {
        /// The request.
        request: ReplayId,
    },
}

/// How one stream is to be treated. All bounds are per rank.
#[derive(Clone, Debug)]
pub struct SequencerConfig {
    /// Whether the publisher has a replay endpoint.
    pub has_replay: bool,
    /// What becomes of the blocks from before an unfillable hole.
    pub on_loss: OnLoss,
    /// Live batches held while a replay is outstanding; one more is dropped and becomes a gap.
    pub max_held_batches: usize,
    /// Bytes of payload held, likewise.
    pub max_held_bytes: usize,
    /// A replay that brings nothing for this long has failed.
    pub replay_timeout: Duration,
    /// Requests in a row that may fail or bring nothing new before the hole is declared lost.
    pub max_replay_attempts: u32,
    /// A declared rank that is not heard for this long is silent.
    pub silence_grace: Duration,
}

/// What becomes of the blocks from before an unfillable hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnLoss {
    /// Keep them and say that the view may over-credit.
    #[default]
    Keep,
    /// Forget them: the view then only misses.
    Clear,
}

/// Placeholder until the state machine lands.
#[derive(Debug)]
pub struct Sequencer {
    trust: Trust,
}

impl Sequencer {
    /// What may be believed about the view that the applied steps have built.
    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// A stream that was declared `now` and is not connected yet.
    pub fn new(_config: SequencerConfig, _now: Moment) -> Self {
        Self { trust: Trust::Joining }
    }
}

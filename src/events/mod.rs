//! Events of engines: frames to typed events, and the order of each rank's stream.
//!
//! Knows no socket, no clock and not the index.

pub mod cursor;
pub mod decode;
pub mod event;
pub mod frame;
mod layout;
mod limits;
mod lists;
pub mod order;
mod scalar;

pub use cursor::{decode_batch_fast, peek_ts};
pub use decode::decode_batch;
pub use event::{BlockRemoved, BlockStored, EventBatch, EventTokens, ExtraKey, KvEvent, LEFT_OUT};
pub use frame::{
    FrameError, LiveMessage, ReplayMessage, is_replay_end, parse_live, parse_replay, replay_request,
};
pub use limits::{DecodeError, Limits};
pub use order::{
    Arrival, Batch, Fingerprint, OnLoss, ReplayId, RestartRule, Sequencer, SequencerConfig, Step,
    StreamCounters,
};

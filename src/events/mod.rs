//! Events of engines: frames to typed events, and the order of each rank's stream.
//!
//! Knows no socket, no clock and not the index.

pub mod event;
pub mod order;

pub use event::{
    BlockRemoved, BlockStored, EventBatch, EventTokens, ExtraKey, KvEvent, SkipCounts, SkipReason,
};
pub use order::{
    Arrival, Batch, Fingerprint, OnLoss, ReplayId, RestartRule, Sequencer, SequencerConfig, Step,
    StreamCounters,
};

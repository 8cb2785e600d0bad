//! Captures: recorded event streams of real engines, and the engines' own truth beside them.
//!
//! A capture is a text file (`*.kvcap`, or `*.kvcap.gz`) of JSON lines: a header, then every message of
//! every rank's publisher as it was received, byte for byte. The truth (`STEM.truth.json[.gz]`) was read
//! from the engines after the stream had ended. Feeding the first and comparing with the second is how
//! this crate proves that it is exact.
//!
//! | file | what it owns |
//! |---|---|
//! | [`mod@format`] | the lines, as types |
//! | [`reader`], [`writer`] | files to lines and back |
//! | [`truth`] | what the engines held, and what their own lookup found |
//! | [`script`] | a capture as input: live messages in their order, recorded replay answers, the plan for sending it all out again |
//! | [`run`] | a capture through the indexer, by its one door |
//! | [`mod@check`] | a replayed index against the truth |
//!
//! **Cost.** A [`CaptureScript`] keeps the whole decoded capture in memory, because a hole is filled by
//! answers that were recorded after it. [`CaptureReader`] streams and keeps one line.
//!
//! Knows no socket and no clock.

pub mod check;
mod error;
pub mod format;
pub mod reader;
pub mod run;
pub mod script;
pub mod truth;
pub mod writer;

pub use check::{
    CheckReport, CheckRun, Contents, ExceptionBook, Exceptions, Outcome, RankOutcome, check,
    check_without_truth,
};
pub use error::{CaptureError, LineProblem};
pub use format::{CaptureHeader, CaptureLine, Direction, HeaderFields, LineBody, ReplaySocket};
pub use reader::{CaptureReader, Progress, is_capture, stem};
pub use run::{Feed, FeedError};
pub use script::{CaptureScript, LiveMessage, PublishPlan, PublishStep, RankPlan, ReplayBook, ReplayDesk};
pub use truth::{Probe, ProbeQuery, Truth};
pub use writer::CaptureWriter;

//! How busy and how full each rank is, as far as it is known.
//!
//! Knows neither where a report came from nor the index; `now` comes in, nothing waits. A rank without a
//! fresh, usable report is **unknown**, which is neither idle nor busy.
//!
//! - [`report`]: a report as received, and what of it can be believed.
//! - [`table`]: the newest report of every declared rank, its age, and what follows from it.
//! - [`busy`]: when a rank is overloaded.
//! - [`answer`]: what a source of load says, in one shape; [`json`] and [`stat`] read two of its forms.
//! - [`projection`]: whose part of an answer is whose.
//! - [`probe`]: which route of a base URL to ask next, and when.

pub mod answer;
pub mod busy;
pub mod json;
pub mod probe;
pub mod projection;
pub mod report;
pub mod stat;
pub mod table;

pub use answer::{LoadAnswer, RollupEntry};
pub use busy::BusyThreshold;
pub use probe::{NotOffered, Outcome, Probe, ProbeConfig, Route, Step, TryAgain};
pub use projection::{BadWorkerUrl, Tenant, Transport, Unavailable, WorkerUrl, project, share_out};
pub use report::{LoadEntry, LoadReport, RankLoad, RawNumber, RawRankLoad, Refused};
pub use stat::{LoadStat, LoadStatError};
pub use table::{AggregateView, LoadBasis, LoadConfig, LoadCounts, LoadTable, LoadUnknown, RankLoadView};

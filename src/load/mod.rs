//! How busy and how full each rank is, as far as it is known.
//!
//! Knows neither where a report came from nor the index; `now` comes in, nothing waits. A rank without a
//! fresh, usable report is **unknown**, which is neither idle nor busy.
//!
//! - [`report`]: a report as received, and what of it can be believed.
//! - [`table`]: the newest report of every declared rank, its age, and what follows from it.
//! - [`ledger`]: what was just sent to each rank, and how that is reconciled with reports.
//! - [`busy`]: when a rank is overloaded.
//! - `place`: what is kept of one rank, and which report counts.
//! - [`answer`]: what a source of load says, in one shape; [`json`] and [`stat`] read two of its forms.
//! - [`timestamp`]: the moment that an answer says it was made at.
//! - [`projection`]: whose part of an answer is whose.
//! - [`probe`]: which route of a base URL to ask next, and when.
//! - [`debounce`]: when a rank's changes are announced.

pub mod answer;
pub mod busy;
pub mod debounce;
pub mod json;
pub mod ledger;
mod place;
pub mod probe;
pub mod projection;
pub mod report;
pub mod stat;
pub mod table;
pub mod timestamp;

pub use answer::{LoadAnswer, RollupEntry};
pub use busy::{Admission, BusyThreshold};
pub use debounce::{Debounce, DebounceConfig};
pub use ledger::{
    Booked, Claim, ClaimedBlocks, Ledger, LedgerConfig, LedgerCounts, ReservationId, ReserveError, Shared,
    Ticket,
};
pub use place::ReportedCapacity;
pub use probe::{NotOffered, Outcome, Probe, ProbeConfig, Route, Step, TryAgain};
pub use projection::{BadWorkerUrl, Tenant, Transport, Unavailable, WorkerUrl, project, share_out};
pub use report::{LoadEntry, LoadReport, RankLoad, RawNumber, RawRankLoad, Refused, SleepState};
pub use stat::{LoadStat, LoadStatError};
pub use table::{
    AggregateView, LoadBasis, LoadConfig, LoadCounts, LoadMode, LoadTable, LoadUnknown, RankGauges,
    RankLoadView, SavedLoad,
};

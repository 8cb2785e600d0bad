//! The latency lab: what the benches share that has no socket and reads no clock, and, in [`ranks`], the bench
//! that ranks run together.
//!
//! `rankwise bench` measures; this part says when a request is due, which rate to try next, what traffic
//! looks like, and how the figures are shown. Everything here takes moments and numbers and returns values, so
//! a search for the highest rate is tested against a made-up service in made-up time.
//!
//! Latencies are nanoseconds in [`Latencies`], counted from the moment at which a request was *due*: a service
//! that stalls then pays for everyone who would have asked meanwhile, not only for who was being answered.

pub mod hdr;
pub mod plot;
pub mod ranks;
pub mod report;
pub mod schedule;
pub mod search;
pub mod traffic;
pub mod wire;

pub use self::hdr::Latencies;
pub use self::report::{Report, Table};
pub use self::schedule::{Arrivals, Schedule};

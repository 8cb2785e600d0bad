//! Asks engines and gateways for their load, over HTTP and gRPC.
//!
//! One supervised task per base URL fetches for all ranks and workers that live there, and reports to the
//! [load table](crate::load::LoadTable). None of it is required: where nothing answers, the ranks' load is
//! unknown, and nothing else changes. What to ask next and whose part of an answer is whose is decided by
//! [`load`](crate::load); this part moves bytes.
//!
//! - [`exposition`]: load in Prometheus' text format.
//! - [`fetch`]: one question and what came of it.
//! - [`feed`]: the tasks.
//! - [`serve`]: the same question, asked of us.
//!
//! The messages of `GetLoads` are in [`wire`](crate::wire::get_loads), since engines of our own speak them too.
//! LoadStat messages come over ZMQ and so by `ingest`.
//!
//! # Limits
//! No TLS, and so no `https://`. Redirects are not followed, and no proxy is used.

pub mod exposition;
pub mod feed;
pub mod fetch;
pub mod serve;

pub use crate::wire::get_loads as wire;
pub use feed::{Binding, FeedConfig, FeedStatus, Feeds};
pub use fetch::{FetchConfig, Fetcher};

//! Asks engines and gateways for their load, over HTTP and gRPC.
//!
//! One supervised task per base URL fetches for all ranks and workers that live there, and reports to the
//! [load table](crate::load::LoadTable). None of it is required: where nothing answers, the ranks' load is
//! unknown, and nothing else changes. What to ask next and whose part of an answer is whose is decided by
//! [`load`](crate::load); this part moves bytes.
//!
//! - [`wire`]: the messages of `GetLoads` and its codec; `loads.proto` beside it shows them as a service.
//! - [`exposition`]: load in Prometheus' text format.
//! - [`fetch`]: one question and what came of it.
//! - [`feed`]: the tasks.
//! - [`serve`]: the same question, asked of us.
//!
//! LoadStat messages come over ZMQ and so by `ingest`.
//!
//! # Limits
//! No TLS, and so no `https://`. Redirects are not followed, and no proxy is used.

pub mod exposition;
pub mod feed;
pub mod fetch;
pub mod serve;
pub mod wire;

pub use feed::{Binding, FeedConfig, FeedStatus, Feeds};
pub use fetch::{FetchConfig, Fetcher};

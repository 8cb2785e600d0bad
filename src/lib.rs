//! rankwise tells a router which data-parallel rank already holds a request's KV-cache prefix.

pub mod block;
pub mod events;
pub mod fleet;
pub mod ids;
#[cfg(feature = "io")]
pub mod ingest;
pub mod trust;

//! rankwise tells a router which data-parallel rank already holds a request's KV-cache prefix.

pub mod block;
pub mod capture;
pub mod events;
pub mod fleet;
pub mod ids;
pub mod index;
pub mod indexer;
pub mod load;
pub mod routing;
#[cfg(feature = "io")]
pub mod service;
pub mod trust;

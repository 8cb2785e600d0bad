//! Sources of load over real sockets: HTTP, gRPC and ZMQ, well-behaved and bad.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod harness;
mod program;
mod servers;
mod sockets;
mod tests;

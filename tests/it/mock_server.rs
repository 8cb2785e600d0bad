//! Mock engines on real ports: their sockets and HTTP, their faults, and the index against their own truth.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod faults;
mod http;
mod time;
mod traffic;
mod watched;

//! The HTTP service on a real port: against the recordings of Dynamo 1.6.1, and route by route.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod boundary;
mod connections;
mod fleet_load;
mod fleet_sim;
mod harness;
mod metrics;
mod recordings;
mod reservations;
mod routes;

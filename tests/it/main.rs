//! One integration binary, so that it links once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod dynamo_costs;
mod dynamo_hashes;
mod routing_properties;

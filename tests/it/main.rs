//! One integration binary, so that it links once.

mod capture_format;
mod capture_reference;
mod captures;
mod dynamo_costs;
mod dynamo_hashes;
#[cfg(feature = "io")]
mod http;
mod index_reference;
mod routing_properties;
mod wire;

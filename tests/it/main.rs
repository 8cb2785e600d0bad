//! One integration binary, so that it links once.

mod capture_format;
mod capture_reference;
mod captures;
mod dynamo_costs;
mod dynamo_hashes;
mod index_reference;
mod order_sim;
mod routing_properties;
mod wire;

//! One integration binary, so that it links once.

mod capture_format;
mod capture_reference;
mod captures;
mod dynamo_costs;
mod dynamo_hashes;
mod index_reference;
mod routing_properties;
mod wire;
#[cfg(feature = "io")]
mod interop;
#[cfg(feature = "io")]
mod peer;
#[cfg(feature = "io")]
mod recorder;
#[cfg(feature = "io")]
mod sockets;
#[cfg(feature = "io")]
mod zmtp;
mod order_sim;

//! One integration binary, so that it links once.

#[cfg(feature = "io")]
mod bench_ranks;
#[cfg(feature = "io")]
mod bench_serve;
mod capture_format;
mod capture_reference;
mod captures;
#[cfg(feature = "io")]
mod cli;
mod dynamo_costs;
mod dynamo_hashes;
mod field_cases;
mod house;
#[cfg(feature = "io")]
mod http;
mod hybrid_reference;
mod index_dump;
mod index_reference;
mod index_stress;
#[cfg(feature = "io")]
mod interop;
#[cfg(feature = "io")]
mod live;
#[cfg(feature = "io")]
mod live_cases;
#[cfg(feature = "io")]
mod mock_server;
mod mock_truth;
mod order_sim;
#[cfg(feature = "io")]
mod peer;
#[cfg(feature = "io")]
mod rank_aware;
#[cfg(feature = "io")]
mod recorder;
mod restore;
mod routing_properties;
#[cfg(feature = "io")]
mod serving;
#[cfg(feature = "io")]
mod sockets;
#[cfg(feature = "io")]
mod telemetry;
mod tiers;
mod wire;
#[cfg(feature = "io")]
mod zmtp;

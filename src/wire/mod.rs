//! What more than one shell says on the wire: endpoints, an engine's publisher, `GetLoads`.
//!
//! Shells do not import each other. `ingest` and `mock` both bind and dial endpoints, `telemetry` asks for loads
//! that `mock` answers: what they share lies below them, here. This part has sockets and no purpose of its
//! own; it knows no fleet, no index and no engine.
//!
//! - [`endpoint`]: endpoint texts.
//! - [`publisher`]: the engine's side of the event and replay ports.
//! - [`listener`]: connections, and how many of them.
//! - [`get_loads`]: the messages of `GetLoads`, its codec and a server for it; `loads.proto` beside it shows them
//!   as a service.

pub mod endpoint;
pub mod get_loads;
pub mod listener;
pub mod publisher;

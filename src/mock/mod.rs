//! Engines without a GPU: what an engine does with its KV cache and its time, and nothing of a model.
//!
//! An [`Engine`] is one data-parallel rank: a paged pool with prefix caching, continuous batching, and a
//! simple clock. It is pure: `now` comes in, [`Output`]s come out, equal inputs give equal outputs. What it
//! publishes has the bytes of vLLM's or SGLang's event payloads, and [`Engine::truth`] says at any time what
//! its caches hold, so that whoever follows the events can be compared with it. The core knows neither the
//! index nor routing, or it would prove them by themselves.
//!
//! - [`config`]: what an engine is made with; [`timing`]: how long a step takes.
//! - [`request`]: what is asked of it and what it answers.
//! - [`engine`]: the scheduler, step by step.
//! - [`pool`], [`host`]: the device's paged pool and the host tier; [`page`]: a full block and its name.
//! - [`shape`]: what happened to the caches, as bytes.
//! - `server` (feature `io`): the same on real ports.
//!
//! **Where it is simpler than an engine.** No adapters, salts or images; one attention group; every token
//! that is generated counts, none ends a text; a preempted request computes again; a copy between the tiers
//! takes no time.

pub mod config;
pub mod engine;
pub mod host;
pub mod page;
pub mod pool;
pub mod request;
mod sequence;
#[cfg(feature = "io")]
pub mod server;
pub mod shape;
mod step;
pub mod timing;

pub use config::{Encoding, EngineConfig, HashKind, HashSeed, Shape};
pub use engine::{Engine, LoadNow};
pub use page::{HeldBlock, Truth};
pub use request::{Completion, Failure, Generation, Output, Refusal, RequestId, Usage, VOCABULARY};
pub use timing::Timing;

#[cfg(test)]
mod tests;

//! rankwise tells a router which data-parallel rank already holds a request's KV-cache prefix.
//!
//! Inference engines publish what enters and leaves their KV caches, one stream per rank. rankwise reads
//! these streams, keeps for each rank `(worker, dp_rank)` exactly the blocks that it holds, and scores the
//! ranks for a request by the work that it would leave them. The answer names the rank, every candidate's
//! terms, and how far the view of each can be believed.
//!
//! # Trade-offs
//!
//! - **Exact costs memory.** Each distinct block costs 24 bytes of hashes and its tables, each rank that
//!   holds it a bit or an interval more, and ranks whose engines name the same content differently about 100
//!   bytes per block. An approximate index is smaller, and wrong after evictions.
//! - **One writer.** Events are applied in batches by one thread. Readers take no lock: a query that meets an
//!   event in the middle is asked again, and after 64 attempts it waits for the section that is being written,
//!   never for a socket or for another reader.
//! - **The driver is yours.** State machines take the moment and return actions. Nothing happens between two
//!   calls: who embeds the library must carry out each [`Action`](indexer::Action) and come back at
//!   [`next_deadline`](indexer::Indexer::next_deadline). The feature `io` brings a driver.
//! - **Unknown is a value.** A rank without a fresh load report has no logit; a rank whose history is lost is
//!   [`Partial`](trust::Trust::Partial). Callers must say what they want done with that.
//! - **Order matters per rank.** The inputs of one rank must be handed in as they were received; those of
//!   different ranks may interleave in any way.
//!
//! # Layout
//!
//! In the order in which bytes meet it:
//!
//! - `ingest` (feature `io`): the ZMQ sockets, one supervised task per rank, and requests for history.
//! - [`pump`]: the indexing thread and its queue, which credits bound, for drivers that want one.
//! - [`events`]: frames to typed events, and the order of each rank's stream: gaps, history, restarts.
//! - [`index`]: the prefix radix tree, who holds which block on which tier.
//! - [`indexer`]: the one door, from inputs to the index and out as actions.
//! - [`fleet`]: who is there: pools, workers, their ranks and endpoints.
//! - [`load`]: how busy and how full each rank is, as far as it is known.
//! - [`routing`]: a request against all three, and the choice with its reason.
//! - `telemetry` (feature `io`): asks engines for their load, one task per base URL.
//! - `service` (feature `io`): the same over HTTP, with metrics.
//! - `wire` (feature `io`): endpoints, publishers and messages that more than one of these speaks.
//! - [`capture`]: recorded streams through the same door, and the check against the engines' truth.
//! - `lab` (feature `io`): what the benches share: schedules, the search for the highest rate, plots; and the
//!   bench that ranks run together, with sockets of its own.
//! - [`ids`], [`block`], [`trust`]: the vocabulary of all of them.
//!
//! # What is not in here
//!
//! - `events`, `index`, `fleet` and `load` do not know each other; [`indexer`] and [`routing`] join them.
//! - None of these modules but `ingest`, `telemetry`, `service`, `mock`, `wire` and `lab` opens a socket or reads a clock, none but [`pump`]
//!   starts a thread, and none holds global state; elsewhere time is an argument. Without the default feature `io` the crate builds without
//!   tokio and without zeromq.
//! - Inner types are not serialisable. What crosses a boundary has its own shape there, so that the inside
//!   can change.
//! - `unsafe` is denied but for one file, `index/published.rs`, which has its argument. No function recurses over
//!   what a peer sends.
//!
//! A test reads the sources and holds them to this.
//!
//! # Use
//!
//! The README has an example from the first declaration to a decision; it is compiled and run as a test, and as a
//! crate of its own.

pub mod block;
pub mod capture;
pub mod events;
pub mod fleet;
pub mod ids;
pub mod index;
pub mod indexer;
#[cfg(feature = "io")]
pub mod ingest;
#[cfg(feature = "io")]
pub mod lab;
pub mod load;
pub mod mock;
pub mod pump;
pub mod routing;
#[cfg(feature = "io")]
pub mod service;
#[cfg(feature = "io")]
pub mod telemetry;
pub mod trust;
#[cfg(feature = "io")]
pub mod wire;

/// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

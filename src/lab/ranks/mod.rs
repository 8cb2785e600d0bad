//! The bench that the ranks of one deployment run together.
//!
//! Ranks of a data-parallel deployment wait for each other in every step, so a rank's latency means something
//! only when all of them do the same thing at the same time. Here each rank states what it can take (its
//! **envelope**), the smallest of each number is what all can take, and from that alone each rank makes the same
//! **grid** of points. Digest and counts of the grids are compared before anything runs. Then the ranks walk the
//! grid in **lockstep**: a point begins when the one before it has ended everywhere.
//!
//! # Parts
//! - [`envelope`], [`grid`], [`measured`], [`message`]: what is said.
//! - [`lockstep`]: two state machines, the coordinator's and a rank's. They take the moment and a message and
//!   return actions; every wait has a limit, and what ends a bench names the ranks and their values.
//! - [`runner`], [`completions`]: how a rank runs a point: a time model, or an engine's HTTP endpoint.
//! - [`engine`]: an envelope from what an engine says about itself.
//! - [`socket`]: both state machines on ZMQ sockets, DEALER to ROUTER; one rank alone needs none.
//! - [`drill`]: faults on demand.
//! - [`report`]: the results as JSON and as a page.
//!
//! # Limits
//! The coordinator's port speaks plain ZMQ: no encryption, and no limit on what a peer may claim that a frame
//! will hold. Bind it to loopback or to a private network.

pub mod choice;
pub mod completions;
pub mod drill;
pub mod engine;
pub mod envelope;
pub mod grid;
pub mod lockstep;
pub mod measured;
pub mod message;
pub mod report;
pub mod runner;
pub mod socket;

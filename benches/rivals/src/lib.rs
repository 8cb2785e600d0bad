//! Rankwise's index beside its peers', on one workload, in one process.
//!
//! Contenders take turns, so that a busy neighbour hits everyone; ratios are what to trust. Every answer is
//! compared with what the simulated engines really hold.

#![allow(clippy::cast_possible_truncation)]

pub mod contender;
pub mod cpu;
pub mod dice;
pub mod measure;
pub mod plan;
pub mod report;
pub mod samples;
pub mod workload;

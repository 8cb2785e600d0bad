//! `rankwise bench`: the latency lab.
//!
//! Each bench is a module with its arguments (`Args`) and what it does (`Args::run`); adding one is a module,
//! a variant of [`What`] and a line in its match.

mod cpu;
mod figures;
mod fleet;
mod index;
mod load;
mod ranks;
mod serve;
mod serve_report;
mod target;
mod visible;

use anyhow::Result;
use clap::Subcommand;

use super::Verdict;

/// Measure: the service under load, events until they are visible, the index, the ranks of engines
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Index(Box<index::Args>),
    Ranks(Box<ranks::Args>),
    Serve(Box<serve::Args>),
}

impl Args {
    /// Measures and reports.
    ///
    /// # Errors
    /// Those of the bench.
    pub fn run(self) -> Result<Verdict> {
        match self.what {
            What::Index(args) => args.run(),
            What::Ranks(args) => args.run(),
            What::Serve(args) => args.run(),
        }
    }
}

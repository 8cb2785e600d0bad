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
#[command(after_help = "\
Examples:
  rankwise bench index --html index.html                 the index alone: blocks in, look-ups, both at once
  rankwise bench serve --what select                     the highest rate that a service keeps up
  rankwise bench serve --event-to-visible --ranks 128    from a publisher's send to the first query that sees it
  rankwise bench ranks --ranks 8 --uneven                ranks that agree on one grid and walk it together")]
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

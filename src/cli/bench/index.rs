//! `rankwise bench index`.

use anyhow::{Result, bail};

use crate::cli::Verdict;

/// Not yet built
#[derive(Debug, clap::Args)]
pub struct Args {}

impl Args {
    /// Measures and reports.
    ///
    /// # Errors
    /// Always, so far.
    pub fn run(self) -> Result<Verdict> {
        bail!("not yet built")
    }
}

//! The command line: arguments in, exit code out.
//!
//! Every command is a module with its arguments (`Args`) and what it does (`Args::run`); adding one is a
//! module, a variant of [`Command`] and a line in each of its matches.

mod inputs;
mod output;
mod replay;
mod throughput;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

/// Tells a router which data-parallel rank already holds a request's KV-cache prefix.
///
/// Exit codes: 0 done, 1 the check failed, 2 wrong usage or unreadable input. Logs go to stderr; RUST_LOG
/// says how much (RUST_LOG=rankwise=debug).
#[derive(Debug, Parser)]
#[command(name = "rankwise", version, arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Feed captures into an index, check them against the engines' truth, or publish them again
    Replay(Box<replay::Args>),
}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// Wrong usage or unreadable input, in words for the person at the terminal.
    pub fn run(self) -> Result<Verdict> {
        match self {
            Self::Replay(args) => args.run(),
        }
    }

    /// How much is logged unless `RUST_LOG` says otherwise: a one-shot command answers on stdout, and its log
    /// is for what went wrong.
    pub fn log_level(&self) -> LevelFilter {
        match self {
            Self::Replay(_) => LevelFilter::WARN,
        }
    }
}

/// How a command ended that could do its work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Done, and what was checked is as it should be.
    Ok,
    /// What was checked is not as it should be.
    Failed,
}

impl Verdict {
    /// The verdict of a check.
    pub fn of(ok: bool) -> Self {
        if ok { Self::Ok } else { Self::Failed }
    }
}

/// The process's exit code; an error is told on stderr.
pub fn exit_code(ended: Result<Verdict>) -> ExitCode {
    match ended {
        Ok(Verdict::Ok) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::from(1),
        Err(error) if output::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Not `eprintln`: a closed stderr must not turn 2 into a panic's 101.
            let _ = std::io::Write::write_fmt(
                &mut std::io::stderr(),
                format_args!("rankwise: {}\n", output::error_line(&error)),
            );
            ExitCode::from(2)
        }
    }
}

/// Sends the log to stderr, from `default` up or as `RUST_LOG` says.
pub fn start_log(default: LevelFilter) {
    let filter = EnvFilter::builder().with_default_directive(default.into()).from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

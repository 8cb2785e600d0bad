//! The command line: arguments in, exit code out.
//!
//! Every command is a module with its arguments (`Args`) and what it does (`Args::run`); adding one is a
//! module, a variant of [`Command`] and a line in each of its matches.

mod bench;
mod capture;
mod config;
mod demo;
mod descriptors;
mod inputs;
mod mock;
mod output;
mod publish;
mod recording;
mod replay;
mod republish;
mod running;
mod serve;
mod throughput;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::{Context, Result};
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

/// The commands. What each is for stands at its arguments, where clap finds it.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[allow(missing_docs)]
    Bench(Box<bench::Args>),
    #[allow(missing_docs)]
    Capture(Box<capture::Args>),
    #[allow(missing_docs)]
    Demo(Box<demo::Args>),
    #[allow(missing_docs)]
    Mock(Box<mock::Args>),
    #[allow(missing_docs)]
    Replay(Box<replay::Args>),
    #[allow(missing_docs)]
    Serve(Box<serve::Args>),
}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// Wrong usage or unreadable input, in words for the person at the terminal.
    pub fn run(self) -> Result<Verdict> {
        match self {
            Self::Bench(args) => args.run(),
            Self::Capture(args) => args.run(),
            Self::Demo(args) => args.run(),
            Self::Mock(args) => args.run(),
            Self::Replay(args) => args.run(),
            Self::Serve(args) => args.run(),
        }
    }

    /// How much is logged unless `RUST_LOG` says otherwise: a one-shot command answers on stdout, and its log
    /// is for what went wrong.
    pub fn log_level(&self) -> LevelFilter {
        match self {
            Self::Bench(_) | Self::Capture(_) | Self::Demo(_) | Self::Replay(_) => LevelFilter::WARN,
            Self::Mock(_) | Self::Serve(_) => LevelFilter::INFO,
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

/// The runtime of the commands that open sockets. Two threads: one cannot starve the other's sockets, and
/// more would only take cores from what is being measured beside us.
///
/// # Errors
/// When the system gives no threads.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    runtime_of(2)
}

/// A runtime of so many threads; one at least.
///
/// # Errors
/// When the system gives no threads.
pub fn runtime_of(threads: usize) -> Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.worker_threads(threads.max(1)).enable_all().build();
    runtime.context("cannot start the runtime")
}

/// Waits for Ctrl-C or SIGTERM.
pub async fn asked_to_stop() {
    Signals::watch().next().await;
}

/// Ctrl-C and SIGTERM, none of them missed from the moment that this is made.
pub struct Signals {
    #[cfg(unix)]
    streams: Option<[tokio::signal::unix::Signal; 2]>,
}

impl Signals {
    /// Begins to watch. From now on they no longer end the process by themselves.
    pub fn watch() -> Self {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let of = |kind| signal(kind).ok();
            let streams = of(SignalKind::interrupt()).zip(of(SignalKind::terminate()));
            Self { streams: streams.map(|(interrupt, terminate)| [interrupt, terminate]) }
        }
        #[cfg(not(unix))]
        Self {}
    }

    /// The next one.
    pub async fn next(&mut self) {
        #[cfg(unix)]
        if let Some([interrupt, terminate]) = &mut self.streams {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            return;
        }
        let _ = tokio::signal::ctrl_c().await;
    }
}

/// Sends the log to stderr, from `default` up or as `RUST_LOG` says.
pub fn start_log(default: LevelFilter) {
    let builder = EnvFilter::builder().with_default_directive(default.into());
    let filter = match std::env::var(EnvFilter::DEFAULT_ENV) {
        Ok(wanted) => builder.parse_lossy(wanted),
        // The socket library announces reconnects of its own that never happen: its sockets are ours to drop.
        // A filter with directives of its own has no default, so that is said too.
        Err(_) => builder.parse_lossy(format!("{default},zeromq=warn")),
    };
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// Names that clash and conflicts with what does not exist show here and not at a user's.
    #[test]
    fn the_arguments_are_sound() {
        Cli::command().debug_assert();
    }
}

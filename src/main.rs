//! The `rankwise` program.

mod cli;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    // Ends the process with 2 and a message of its own when the arguments are wrong.
    let cli = cli::Cli::parse();
    cli::start_log(cli.command.log_level());
    cli::exit_code(cli.command.run())
}

//! What commands print: results on stdout, everything else on stderr.

use std::io::{self, ErrorKind, Write};

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Prints one line of text, or several. That the reader has gone, as `head` does when it has seen enough, is no
/// failure: what the command found stands, and its exit code says it.
///
/// # Errors
/// When stdout cannot be written.
pub fn print_text(text: impl std::fmt::Display) -> Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}

/// Prints a value as one line of JSON.
///
/// # Errors
/// When stdout cannot be written.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).context("cannot write the result as JSON")?;
    print_text(text)
}

/// An error and its causes on one line. Causes that an error has told already are not told again. Only what is
/// wrong in a TOML file keeps its lines: one of them points at the place in another.
pub fn error_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if line.is_empty() {
            line = cause;
        } else if !line.contains(&cause) {
            let pointing = cause.contains('\n') && has_caret(error);
            line = format!("{line}:{}{cause}", if pointing { '\n' } else { ' ' });
        }
    }
    if has_caret(error) { line.trim_end().to_owned() } else { line.replace(['\n', '\r'], " ") }
}

fn has_caret(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<toml::de::Error>())
}

/// A table without lines between its cells; the columns from `numbers_from` on hold numbers.
pub fn table<T: Into<comfy_table::Row>>(head: T, numbers_from: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(head);
    for column in table.column_iter_mut().skip(numbers_from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// A progress bar over `bytes`; shows itself on stderr if that is a terminal.
pub fn byte_bar(bytes: u64) -> ProgressBar {
    let bar = ProgressBar::new(bytes);
    if let Ok(style) =
        ProgressStyle::with_template("{wide_msg} [{bar:30}] {bytes:>10} of {total_bytes} {eta:>4}")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// A bar over `messages`, or a count where their number is not known; on stderr if that is a terminal.
pub fn message_bar(messages: Option<u64>) -> ProgressBar {
    let (bar, template) = match messages {
        Some(count) => (ProgressBar::new(count), "{msg} [{bar:30}] {pos} of {len} messages {elapsed:>4}"),
        None => (ProgressBar::new_spinner(), "{msg} {pos} messages, {per_sec}, {elapsed:>4}"),
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// A number with its unit's prefix, as in `1.23 M`.
pub fn short(number: f64) -> String {
    match number.abs() {
        size if size >= 1e9 => format!("{:.2} G", number / 1e9),
        size if size >= 1e6 => format!("{:.2} M", number / 1e6),
        size if size >= 1e3 => format!("{:.1} k", number / 1e3),
        _ => format!("{number:.0}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let cause = io::Error::new(ErrorKind::NotFound, "no such file");
        let error = anyhow::Error::new(cause).context("x.kvcap: no such file").context("line one\nline two");
        assert_eq!(error_line(&error), "line one line two: x.kvcap: no such file");
    }

    /// The caret stands below the place that it points at.
    #[test]
    fn an_error_in_toml_keeps_its_caret() {
        let wrong = toml::from_str::<toml::Table>("a = 1\nbc = = 2").unwrap_err();
        let line = error_line(&anyhow::Error::new(wrong).context("in the configuration x.toml"));
        let lines: Vec<&str> = line.lines().collect();
        assert_eq!(lines[0], "in the configuration x.toml:");
        let caret = lines.iter().position(|line| line.contains('^')).unwrap();
        assert_eq!(lines[caret].find('^').unwrap(), lines[caret - 1].rfind('=').unwrap(), "{line}");
    }

    #[test]
    fn numbers_are_shortened() {
        assert_eq!([short(0.0), short(999.0), short(1_500.0), short(2.5e6)], ["0", "999", "1.5 k", "2.50 M"]);
    }
}

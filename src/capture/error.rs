//! What can be wrong with a capture or the files beside it, and what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A capture, truth or exceptions file could not be read or written. Says where and what to do.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// A line of a capture is not what it should be.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The capture.
        path: PathBuf,
        /// The line, counted from 1; in a compressed file, of its text.
        line: u64,
        /// What is wrong with it.
        problem: LineProblem,
    },
    /// The decoded messages would take more memory than the caller allows.
    #[error(
        "{}:{line}: more than {limit} bytes of messages; split the capture, or raise the limit",
        path.display()
    )]
    TooLarge {
        /// The capture.
        path: PathBuf,
        /// The line with which it became too much.
        line: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// No truth lies beside a capture that is to be checked.
    #[error(
        "{}: no truth beside it (looked for {})",
        capture.display(),
        tried.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" and ")
    )]
    TruthMissing {
        /// The capture.
        capture: PathBuf,
        /// The files that would have been taken.
        tried: Vec<PathBuf>,
    },
    /// A truth or exceptions file is not the JSON that it should be.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column.
        source: serde_json::Error,
    },
    /// A truth file contradicts itself.
    #[error("{}: {reason}", path.display())]
    Contradiction {
        /// The file.
        path: PathBuf,
        /// How.
        reason: String,
    },
}

impl CaptureError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn json(path: &Path, source: serde_json::Error) -> Self {
        Self::Json { path: path.to_owned(), source }
    }

    /// The line that is wrong, where one is.
    pub fn line(&self) -> Option<u64> {
        match self {
            Self::Line { line, .. } | Self::TooLarge { line, .. } => Some(*line),
            Self::Json { source, .. } => u64::try_from(source.line()).ok().filter(|&line| line > 0),
            _ => None,
        }
    }
}

/// What is wrong with one line of a capture.
#[derive(Debug)]
#[non_exhaustive]
pub enum LineProblem {
    /// There is no first line.
    Empty,
    /// The first line is not a capture's header.
    NotAHeader(serde_json::Error),
    /// The header names a version that this program does not read.
    Version(u64),
    /// The line is not one of the format's lines.
    NotALine(serde_json::Error),
    /// The last line ends in the middle: the recording was stopped or the copy was cut off.
    CutOff,
    /// The line is longer than a reader will hold.
    TooLong {
        /// Bytes allowed.
        limit: usize,
    },
    /// The compressed data is damaged.
    Damaged(io::Error),
    /// The compressed data ends too early.
    Truncated,
}

impl fmt::Display for LineProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the file is empty; a capture begins with a header line"),
            Self::NotAHeader(error) => {
                write!(f, "not a capture's header: {error}; the first line must be {{\"kvcap\":1,…}}")
            }
            Self::Version(version) => {
                write!(f, "version {version} of the format; this program reads version 1, use a newer one")
            }
            Self::NotALine(error) => write!(f, "not a line of a capture: {error}; remove or repair the line"),
            Self::CutOff => f.write_str(
                "the file ends in the middle of this line; remove the line, or copy the file again",
            ),
            Self::TooLong { limit } => {
                write!(f, "longer than {limit} bytes; no engine sends such a message, is this a capture?")
            }
            Self::Damaged(error) => write!(f, "cannot be decompressed here: {error}; copy the file again"),
            Self::Truncated => f.write_str("the compressed data ends too early; copy the file again"),
        }
    }
}

//! Captures from files, line by line.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::MultiGzDecoder;

use super::error::{CaptureError, LineProblem};
use super::format::{CaptureHeader, CaptureLine, VERSION};

/// Longest line that is read. A batch that stores a million one-token blocks under 32-byte hashes takes 40 MB
/// and twice that in hex; nothing that an engine sends comes near.
pub const MAX_LINE_BYTES: usize = 128 << 20;

/// Whether a file's name is that of a capture: `*.kvcap` or `*.kvcap.gz`.
pub fn is_capture(path: &Path) -> bool {
    path.file_name().is_some_and(|name| {
        let name = name.to_string_lossy();
        name.ends_with(".kvcap") || name.ends_with(".kvcap.gz")
    })
}

/// A capture's name without its directory and endings; its worker's name.
pub fn stem(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    name.strip_suffix(".kvcap").unwrap_or(name).to_owned()
}

/// How much of a file has been read, in bytes as it lies on the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Bytes read so far; runs ahead of the lines by a buffer.
    pub read: u64,
    /// The file's size when it was opened; 0 where it has none (a pipe).
    pub total: u64,
}

/// A capture being read: its header, then its lines as an iterator.
///
/// Keeps one line in memory. Ends after the first error.
pub struct CaptureReader {
    path: PathBuf,
    input: Box<dyn BufRead + Send>,
    position: Arc<AtomicU64>,
    total: u64,
    header: CaptureHeader,
    line: u64,
    buffer: Vec<u8>,
    ended: bool,
}

impl CaptureReader {
    /// Opens a capture and reads its header. Names ending in `.gz` are decompressed.
    ///
    /// # Errors
    /// When the file cannot be read or does not begin with a header of [`VERSION`].
    pub fn open(path: &Path) -> Result<Self, CaptureError> {
        let io = |error| CaptureError::io(path, error);
        let file = File::open(path).map_err(io)?;
        let total = file.metadata().map_err(io)?.len();
        let position = Arc::new(AtomicU64::new(0));
        let counted = BufReader::new(Counted { inner: file, read: Arc::clone(&position) });
        let input: Box<dyn BufRead + Send> = match path.extension() {
            Some(end) if end == "gz" => Box::new(BufReader::new(MultiGzDecoder::new(counted))),
            _ => Box::new(counted),
        };
        Self::start(path, input, position, total)
    }

    fn start(
        path: &Path,
        mut input: Box<dyn BufRead + Send>,
        position: Arc<AtomicU64>,
        total: u64,
    ) -> Result<Self, CaptureError> {
        let fail = |problem| CaptureError::Line { path: path.to_owned(), line: 1, problem };
        let mut buffer = Vec::new();
        if !read_line(&mut *input, &mut buffer).map_err(|problem| refine(path, 1, problem))? {
            return Err(fail(LineProblem::Empty));
        }
        let header = parse_header(&buffer).map_err(fail)?;
        Ok(Self { path: path.to_owned(), input, position, total, header, line: 1, buffer, ended: false })
    }

    /// The capture's first line.
    pub fn header(&self) -> &CaptureHeader {
        &self.header
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of the line that was given last; the header's is 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// How far the file has been read.
    pub fn progress(&self) -> Progress {
        Progress { read: self.position.load(Ordering::Relaxed), total: self.total }
    }

    fn read_next(&mut self) -> Result<Option<CaptureLine>, CaptureError> {
        loop {
            self.line += 1;
            let fail = |problem| refine(&self.path, self.line, problem);
            if !read_line(&mut *self.input, &mut self.buffer).map_err(fail)? {
                return Ok(None);
            }
            let text = self.buffer.trim_ascii();
            if text.is_empty() {
                continue;
            }
            return match CaptureLine::parse(text) {
                Ok(line) => Ok(Some(line)),
                // Without an end of line it was the last one, and half of it may be missing.
                Err(error) if error.is_eof() && !self.buffer.ends_with(b"\n") => {
                    Err(fail(LineProblem::CutOff.into()))
                }
                Err(error) => Err(fail(LineProblem::NotALine(error).into())),
            };
        }
    }
}

impl Iterator for CaptureReader {
    type Item = Result<CaptureLine, CaptureError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let next = self.read_next().transpose();
        self.ended = !matches!(next, Some(Ok(_)));
        next
    }
}

impl std::fmt::Debug for CaptureReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CaptureReader").field("path", &self.path).field("line", &self.line).finish()
    }
}

fn parse_header(line: &[u8]) -> Result<CaptureHeader, LineProblem> {
    use serde::de::Error as _;

    let text = std::str::from_utf8(line.trim_ascii())
        .map_err(|error| LineProblem::NotAHeader(serde_json::Error::custom(error)))?;
    let header = CaptureHeader::parse(text).map_err(LineProblem::NotAHeader)?;
    match header.fields().kvcap {
        VERSION => Ok(header),
        version => Err(LineProblem::Version(version)),
    }
}

/// Why a line could not be had.
enum ReadFailure {
    Io(io::Error),
    Problem(LineProblem),
}

impl From<LineProblem> for ReadFailure {
    fn from(problem: LineProblem) -> Self {
        Self::Problem(problem)
    }
}

/// What a failure means: the decompressor reports damage as an I/O error of certain kinds.
fn refine(path: &Path, line: u64, failure: ReadFailure) -> CaptureError {
    let problem = match failure {
        ReadFailure::Problem(problem) => problem,
        ReadFailure::Io(error) => match error.kind() {
            io::ErrorKind::UnexpectedEof => LineProblem::Truncated,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => LineProblem::Damaged(error),
            _ => return CaptureError::io(path, error),
        },
    };
    CaptureError::Line { path: path.to_owned(), line, problem }
}

/// Reads a line with its end into `buffer`; false at the end of the input.
fn read_line(input: &mut dyn BufRead, buffer: &mut Vec<u8>) -> Result<bool, ReadFailure> {
    buffer.clear();
    let read = input.take(MAX_LINE_BYTES as u64 + 1).read_until(b'\n', buffer).map_err(ReadFailure::Io)?;
    if buffer.len() > MAX_LINE_BYTES {
        return Err(LineProblem::TooLong { limit: MAX_LINE_BYTES }.into());
    }
    Ok(read > 0)
}

/// Counts the bytes that pass.
struct Counted {
    inner: File,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captures_are_known_by_their_names() {
        for (name, is) in [
            ("a/b.kvcap", true),
            ("b.kvcap.gz", true),
            ("b.truth.json", false),
            ("b.kvcap.bak", false),
            ("check.json", false),
            ("b.gz", false),
        ] {
            assert_eq!(is_capture(Path::new(name)), is, "{name}");
        }
        assert_eq!(stem(Path::new("x/vllm-0.33.0-reset.kvcap")), "vllm-0.33.0-reset");
        assert_eq!(stem(Path::new("vllm-0.33.0-bs1.kvcap.gz")), "vllm-0.33.0-bs1");
    }
}

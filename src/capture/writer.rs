//! Captures to files: the recorder of `rankwise capture`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;

use super::error::CaptureError;
use super::format::{CaptureHeader, CaptureLine, LineBody};
use crate::ids::{DpRank, Moment};

/// Writes a capture. Names ending in `.gz` are compressed.
///
/// A recording that ends without [`CaptureWriter::finish`] can still be read up to the last
/// [`CaptureWriter::flush`]; a compressed one then ends with an error that says so.
pub struct CaptureWriter {
    path: PathBuf,
    output: Output,
    lines: u64,
}

enum Output {
    Plain(BufWriter<File>),
    Compressed(GzEncoder<BufWriter<File>>),
}

impl CaptureWriter {
    /// Makes a new file and writes the header. An existing file is never overwritten: a recording cannot be
    /// had again.
    ///
    /// # Errors
    /// When the file exists or cannot be written.
    pub fn create(path: &Path, header: &CaptureHeader) -> Result<Self, CaptureError> {
        Self::begin(path, Self::reserve(path)?, header)
    }

    /// Makes a new, empty file, for whoever has to wait for what stands in the header.
    ///
    /// # Errors
    /// When the file exists or cannot be made.
    pub fn reserve(path: &Path) -> Result<File, CaptureError> {
        File::create_new(path).map_err(|error| CaptureError::io(path, error))
    }

    /// Writes the header to a file that was reserved at `path`.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn begin(path: &Path, file: File, header: &CaptureHeader) -> Result<Self, CaptureError> {
        let file = BufWriter::new(file);
        let output = match path.extension() {
            Some(end) if end == "gz" => Output::Compressed(GzEncoder::new(file, Compression::default())),
            _ => Output::Plain(file),
        };
        let mut writer = Self { path: path.to_owned(), output, lines: 0 };
        writer.write_text(header.as_line().as_bytes())?;
        Ok(writer)
    }

    /// Writes one line.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&mut self, line: &CaptureLine) -> Result<(), CaptureError> {
        let text = serde_json::to_vec(line).map_err(|error| CaptureError::json(&self.path, error))?;
        self.write_text(&text)
    }

    /// Records a message of a rank's publisher.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn publication(
        &mut self,
        at: Moment,
        rank: DpRank,
        frames: impl IntoIterator<Item = Bytes>,
    ) -> Result<(), CaptureError> {
        let body = LineBody::Pub { frames: frames.into_iter().collect() };
        self.write(&CaptureLine { at, rank, body })
    }

    /// Records what is being done.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn mark(&mut self, at: Moment, rank: DpRank, note: impl Into<String>) -> Result<(), CaptureError> {
        self.write(&CaptureLine { at, rank, body: LineBody::Mark { note: note.into() } })
    }

    /// Lines written so far, the header among them.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// Hands everything written so far to the operating system. Often, it costs compression.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn flush(&mut self) -> Result<(), CaptureError> {
        self.output.as_write().flush().map_err(|error| CaptureError::io(&self.path, error))
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn finish(self) -> Result<(), CaptureError> {
        let Self { path, output, .. } = self;
        let ended = match output {
            Output::Plain(file) => Ok(file),
            Output::Compressed(encoder) => encoder.finish(),
        };
        ended.and_then(|mut file| file.flush()).map_err(|error| CaptureError::io(&path, error))
    }

    fn write_text(&mut self, text: &[u8]) -> Result<(), CaptureError> {
        let output = self.output.as_write();
        let written = output.write_all(text).and_then(|()| output.write_all(b"\n"));
        self.lines += 1;
        written.map_err(|error: io::Error| CaptureError::io(&self.path, error))
    }
}

impl Output {
    fn as_write(&mut self) -> &mut dyn Write {
        match self {
            Self::Plain(file) => file,
            Self::Compressed(encoder) => encoder,
        }
    }
}

//! Which captures the arguments name, and reading them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use rankwise::capture::{CaptureScript, is_capture};

use super::output::byte_bar;

/// The captures among `paths`, in their order: files by their names, and of a directory the captures that lie
/// in it, sorted. Other files are left out, so that a shell's `*` can be given.
///
/// # Errors
/// A directory that cannot be read, or no capture at all.
pub fn captures(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            found.extend(captures_in(path)?);
        } else if is_capture(path) {
            found.push(path.clone());
        }
    }
    if found.is_empty() {
        let given = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" ");
        bail!(
            "no capture among the arguments ({}): give files named *.kvcap or *.kvcap.gz, or a directory \
             with such files",
            shorten(&given),
        );
    }
    Ok(found)
}

fn captures_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let unreadable = || format!("cannot read the directory {}", directory.display());
    let entries = std::fs::read_dir(directory).with_context(unreadable)?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.with_context(unreadable)?.path();
        if is_capture(&path) && !path.is_dir() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The beginning of a long list, so that the rest of the message is seen.
fn shorten(text: &str) -> String {
    const SHOWN: usize = 200;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Reads captures one after the other under one progress bar.
pub struct Loading {
    bar: ProgressBar,
    read: u64,
}

impl Loading {
    /// Begins; the bar runs over the sizes of all `captures`.
    pub fn new(captures: &[PathBuf]) -> Self {
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |data| data.len());
        Self { bar: byte_bar(captures.iter().map(size).sum()), read: 0 }
    }

    /// Reads one.
    ///
    /// # Errors
    /// When it cannot be read or is no capture.
    pub fn load(&mut self, path: &Path) -> Result<CaptureScript> {
        let name = path.file_name().unwrap_or(OsStr::new("capture")).to_string_lossy();
        self.bar.set_message(name.into_owned());
        let before = self.read;
        let script = CaptureScript::load(path, |progress| {
            self.read = before + progress.read;
            self.bar.set_position(self.read);
        })?;
        Ok(script)
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

//! Captures of real engines against the engines' own truth.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::PathBuf;

use rankwise::block::Announcements;
use rankwise::capture::{CaptureScript, ExceptionBook, Feed, Truth, check, is_capture, stem};
use rankwise::indexer::Config;

fn directory() -> PathBuf {
    std::env::var_os("RANKWISE_CAPTURES")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures"), PathBuf::from)
}

/// I1, I2, I4, I6, I9, E1, E2, E3, E5: contents, copies, trust and every probe equal the engines' truth, for
/// every capture in `fixtures/captures` or in `RANKWISE_CAPTURES`.
#[test]
fn captures_equal_the_engines_truth() {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| is_capture(path));
    paths.sort();
    assert!(!paths.is_empty(), "no captures in {}", directory().display());
    let mut failed = Vec::new();
    for path in &paths {
        let truth = Truth::beside(path).unwrap();
        let exceptions = ExceptionBook::beside(path).unwrap().of(&stem(path));
        let announcements =
            if exceptions.announcements_are_a_set() { Announcements::Set } else { Announcements::Counted };
        let script = CaptureScript::load(path, |_| {}).unwrap();
        let mut feed = Feed::new(&script, &stem(path), announcements, Config::default()).unwrap();
        feed.run();
        let file = path.file_name().unwrap().to_string_lossy();
        let report = check(feed.outcome(&file, Some(&truth)), &truth, &exceptions);
        println!("{report}");
        if !report.ok {
            failed.push(file.into_owned());
        }
    }
    assert!(failed.is_empty(), "{} of {} captures differ: {failed:?}", failed.len(), paths.len());
}

//! The field cases: small inputs with one right answer each, run against the product itself.
//!
//! `RANKWISE_CASES=DIR` runs the cases of another directory. One line per case: `ID pass`, `ID fail: why`, or
//! `ID not runnable: op` when a case asks for something that this runner, or the product as yet, does not
//! have. No step is ever left out: what the runner does not understand ends the case.
//!
//! Frames, requests for history and the clock are ours; everything between is the product's: `Indexer`,
//! `Router`, `Scorer`, load table and fleet.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod declare;
mod expect;
mod history;
#[cfg(feature = "io")]
mod http;
mod more;
mod query;
mod reading;
mod score;
mod stage;
mod stream;
mod tests;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::Value;

use self::reading::{Fields, Run, Stop};
use self::stage::Stage;

/// What the first issue promises: these kinds must run, and pass.
const MAIN_JOB: [&str; 8] =
    ["decode", "subscribe", "gap/replay", "index apply", "remove/evict", "clear", "query/hash", "scoring"];

/// R1 to R5, R8, I1 to I9, E1 to E5, L4, L11, L12, L15, S1, S3: as far as each case goes.
#[test]
fn field_cases() {
    let given = std::env::var_os("RANKWISE_CASES").map(PathBuf::from);
    let files = given.as_deref().map_or_else(our_files, case_files);
    assert!(!files.is_empty(), "no case files in {given:?}");
    let mut counts = [0_usize; 3];
    let mut wrong = Vec::new();
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let fallback = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (id, kind, outcome) = match serde_json::from_str::<Value>(&text) {
            Ok(case) => {
                let named = |key: &str| case.get(key).and_then(Value::as_str).map(str::to_owned);
                (named("id").unwrap_or(fallback), named("kind").unwrap_or_default(), run_case(&case))
            }
            Err(why) => (fallback, String::new(), Outcome::Fail(format!("no JSON: {why}"))),
        };
        println!("{id} {outcome}");
        counts[outcome.index()] += 1;
        let late = given.is_none() && MAIN_JOB.contains(&kind.as_str()) && outcome.index() == 2;
        if outcome.index() == 1 || late {
            wrong.push(format!("{id} {outcome}"));
        }
    }
    let [passed, failed, idle] = counts;
    println!("{passed} passed, {failed} failed, {idle} not runnable");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What became of a case.
#[derive(Debug)]
enum Outcome {
    Pass,
    Fail(String),
    NotRunnable(String),
}

impl Outcome {
    fn index(&self) -> usize {
        match self {
            Self::Pass => 0,
            Self::Fail(_) => 1,
            Self::NotRunnable(_) => 2,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("pass"),
            // One line per case, whatever the reason looks like.
            Self::Fail(why) => write!(f, "fail: {}", why.replace('\n', " ")),
            Self::NotRunnable(op) => write!(f, "not runnable: {op}"),
        }
    }
}

/// The cases that stand beside each other in the field's public reports, and those of running clients.
fn our_files() -> Vec<PathBuf> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures");
    ["cases", "cases-live"].iter().flat_map(|directory| case_files(&fixtures.join(directory))).collect()
}

fn case_files(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap_or_else(|why| panic!("{}: {why}", directory.display()));
    let mut files: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .collect();
    files.sort();
    files
}

/// Runs one case; a panic of the product is a failure like any other.
fn run_case(case: &Value) -> Outcome {
    match catch_unwind(AssertUnwindSafe(|| run_steps(case))) {
        Ok(Ok(())) => Outcome::Pass,
        Ok(Err(Stop::Fail(why))) => Outcome::Fail(why),
        Ok(Err(Stop::NotRunnable(op))) => Outcome::NotRunnable(op),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Outcome::Fail(format!("panicked: {}", text.unwrap_or("without a message")))
        }
    }
}

fn run_steps(case: &Value) -> Run {
    let top = Fields::of("case", case)?;
    let steps = top.list("steps")?;
    let mut stage = Stage::set(top.need("config")?, steps)?;
    for (at, step) in steps.iter().enumerate() {
        let here = |stop| match stop {
            Stop::Fail(why) => {
                let op = step.get("op").and_then(Value::as_str).unwrap_or("?");
                Stop::Fail(format!("step {} ({op}): {why}", at + 1))
            }
            other => other,
        };
        stage.step(step).map_err(here)?;
        // A scripted answer may stand behind the step whose request it answers.
        let script_follows = steps.get(at + 1).is_some_and(|next| next["op"] == "replay_serves");
        if !script_follows {
            stage.settle().map_err(here)?;
        }
    }
    stage.nothing_is_left_over()
}

//! The program from outside: arguments, exit codes, what is printed, and a capture out over sockets and back.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rankwise::capture::{CaptureReader, CaptureScript, Direction, LineBody, PublishStep, is_capture, stem};
use rankwise::events::{ReplayMessage, parse_replay};
use rankwise::ids::{DpRank, EventSeq};
use serde_json::Value;
use tempfile::TempDir;

/// Nothing here takes a tenth of it; beyond, something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

fn own_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures")
}

/// The captures' directory: `RANKWISE_CAPTURES`, by default the repository's own.
fn directory() -> PathBuf {
    std::env::var_os("RANKWISE_CAPTURES").map_or_else(own_directory, PathBuf::from)
}

fn own(name: &str) -> PathBuf {
    own_directory().join(name)
}

fn rankwise<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rankwise"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn run<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Output {
    rankwise(args).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(output)))
}

/// The error is one line that begins with the program's name.
fn error_line(output: &Output) -> String {
    let text = stderr(output);
    assert!(text.starts_with("rankwise: ") && text.lines().count() == 1, "{text}");
    text
}

/// Copies a capture and what lies beside it into a directory of its own.
fn copy_of(name: &str) -> (TempDir, PathBuf) {
    let scratch = tempfile::tempdir().unwrap();
    let stem = stem(Path::new(name));
    for entry in fs::read_dir(own_directory()).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        if file.starts_with(&format!("{stem}.")) || file == "check.json" {
            fs::copy(&path, scratch.path().join(file)).unwrap();
        }
    }
    let copy = scratch.path().join(name);
    assert!(copy.exists());
    (scratch, copy)
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn is_count(value: &Value) -> bool {
    value.is_u64()
}

/// I1, I2, I4, I6, I9, E1, E2, E3, E5: every file of the captures' directory is given, as a shell would, and
/// the program's own verdict has the documented form.
#[test]
fn check_prints_the_documented_json_and_passes() {
    let mut files: Vec<PathBuf> =
        fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let captures: Vec<String> =
        files.iter().filter(|path| is_capture(path)).map(|path| path.display().to_string()).collect();
    let args = ["replay", "--check", "--json"].map(PathBuf::from);
    let output = run(args.into_iter().chain(files));
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let run = json(&output);
    assert_eq!(keys(&run), ["captures", "ok"]);
    assert_eq!(run["ok"], true);
    let reports = run["captures"].as_array().unwrap();
    assert_eq!(reports.iter().map(|report| report["file"].as_str().unwrap()).collect::<Vec<_>>(), captures);
    for report in reports {
        check_form(report);
    }
}

fn check_form(report: &Value) {
    let fields = ["counters", "engine", "engine_version", "exceptions", "file", "ok", "probes", "ranks"];
    assert_eq!(keys(report), fields);
    assert_eq!(report["ok"], true, "{report}");
    assert!(report["exceptions"].is_object());
    assert!(report["engine"].is_string() && report["engine_version"].is_string());
    for rank in report["ranks"].as_array().unwrap() {
        assert_eq!(keys(rank), ["blocks", "contents_equal", "dp_rank", "trust", "worker"]);
        assert_eq!(rank["worker"], stem(Path::new(report["file"].as_str().unwrap())).as_str());
        assert!(is_count(&rank["dp_rank"]) && rank["trust"].is_string());
        assert!(rank["contents_equal"].is_boolean());
        assert_eq!(keys(&rank["blocks"]), ["device", "disk", "host", "other"]);
        assert!(rank["blocks"].as_object().unwrap().values().all(is_count));
    }
    assert_eq!(keys(&report["probes"]), ["equal", "total", "unknowable"]);
    assert!(report["probes"].as_object().unwrap().values().all(is_count));
    let counters = report["counters"].as_object().unwrap();
    assert!(counters.values().all(is_count));
    for name in ["gaps", "lost_batches", "duplicate_batches", "malformed_messages", "orphan_blocks"] {
        assert!(counters.contains_key(name), "{name}");
    }
}

/// A directory stands for the captures in it.
#[test]
fn a_directory_is_taken_for_its_captures() {
    let (scratch, _) = copy_of("vllm-0.33.0-report-full.kvcap");
    let output = run(["replay".as_ref(), "--check".as_ref(), scratch.path().as_os_str()]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert!(stdout(&output).contains("1 of 1 captures equal the engines' truth"));
}

/// A check that cannot fail proves nothing: one block more in the truth, and one block less.
#[test]
fn a_truth_that_differs_exits_with_1() {
    for tamper in [
        (|hashes: &mut Vec<Value>| hashes.push(serde_json::json!([12345, 1]))) as fn(&mut Vec<Value>),
        |hashes| drop(hashes.pop()),
    ] {
        let (scratch, capture) = copy_of("vllm-0.33.0-reset.kvcap");
        let path = scratch.path().join("vllm-0.33.0-reset.truth.json");
        let mut truth: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        tamper(truth["ranks"][1]["groups"][0]["hashes"].as_array_mut().unwrap());
        fs::write(&path, truth.to_string()).unwrap();

        let output = run(["replay".as_ref(), "--check".as_ref(), "--json".as_ref(), capture.as_os_str()]);
        assert_eq!(code(&output), 1);
        let run_of = json(&output);
        assert_eq!((&run_of["ok"], &run_of["captures"][0]["ok"]), (&false.into(), &false.into()));
        let ranks = &run_of["captures"][0]["ranks"];
        assert_eq!((&ranks[0]["contents_equal"], &ranks[1]["contents_equal"]), (&true.into(), &false.into()));
        let output = run(["replay".as_ref(), "--check".as_ref(), capture.as_os_str()]);
        assert_eq!(code(&output), 1);
        assert!(stdout(&output).contains("FAIL"));
    }
}

/// Exceptions are read from where they are said to be, and count.
#[test]
fn expectations_come_from_the_given_file() {
    let (scratch, capture) = copy_of("vllm-0.33.0-gap-lost.kvcap");
    let other = scratch.path().join("other.json");
    fs::write(&other, "{}").unwrap();
    let expect = ["replay".as_ref(), "--check".as_ref(), "--expect".as_ref(), other.as_os_str()];
    assert_eq!(code(&run(expect.into_iter().chain([capture.as_os_str()]))), 1);
    let beside = ["replay".as_ref(), "--check".as_ref(), capture.as_os_str()];
    assert_eq!(code(&run(beside)), 0);
}

/// E8: without a truth, what was recorded is still checked for having been decoded, ordered and applied whole.
#[test]
fn a_capture_without_a_truth_is_checked_for_its_trust() {
    for (name, exit) in [("vllm-0.33.0-reset", 0), ("vllm-0.33.0-gap-lost", 1)] {
        let (scratch, capture) = copy_of(&format!("{name}.kvcap"));
        fs::remove_file(scratch.path().join(format!("{name}.truth.json"))).unwrap();
        // Losses that are expected are listed there.
        let _ = fs::remove_file(scratch.path().join("check.json"));
        let output = run(["replay".as_ref(), "--check".as_ref(), capture.as_os_str()]);
        assert_eq!(code(&output), exit, "{name}");
        assert!(stdout(&output).contains("no truth beside it"), "{}", stdout(&output));
    }
}

#[test]
fn unreadable_input_exits_with_2_and_one_line() {
    let (scratch, capture) = copy_of("vllm-0.33.0-reset.kvcap");
    let output = run(["replay".as_ref(), "Cargo.toml".as_ref(), scratch.path().join("none").as_os_str()]);
    assert_eq!(code(&output), 2);
    assert!(error_line(&output).contains("*.kvcap"));

    fs::write(&capture, "{\"kvcap\":1,\"engine\":\"vllm\",\"block_size\":16}\n{\"t_us\":1}\n").unwrap();
    let output = run(["replay".as_ref(), capture.as_os_str()]);
    assert_eq!(code(&output), 2);
    assert!(error_line(&output).contains("reset.kvcap:2:"));

    let output = run(["replay", "absent.kvcap"]);
    assert_eq!(code(&output), 2);
    let line = error_line(&output);
    assert_eq!(line.matches("absent.kvcap").count(), 1, "{line}");
}

/// What was found stands when nobody reads it any more, as behind `head`.
#[test]
fn a_closed_pipe_does_not_change_the_verdict() {
    let (scratch, capture) = copy_of("vllm-0.33.0-gap-lost.kvcap");
    let none = scratch.path().join("none.json");
    fs::write(&none, "{}").unwrap();
    for (expect, code) in [(scratch.path().join("check.json"), 0), (none, 1)] {
        let args = ["replay", "--check", "--expect"].map(PathBuf::from);
        let mut running = Running::start(args.into_iter().chain([expect, capture.clone()]));
        drop(running.0.stdout.take());
        assert_eq!(running.end(), code);
    }
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [
        &[][..],
        &["replay"],
        &["no-such-command"],
        &["replay", "--speed", "2", "x.kvcap"],
        &["replay", "--publish", "--check", "x.kvcap"],
        &["replay", "--publish", "--speed", "0", "x.kvcap"],
        &["capture", "--endpoint", "tcp://127.0.0.1:5557"],
        &["capture", "--endpoint", "tcp://127.0.0.1:5557", "--out", "x.txt"],
        &["capture", "--endpoint", "tcp://127.0.0.1", "--out", "x.kvcap"],
        &["capture", "--endpoint", "tcp://127.0.0.1:65535", "--ranks", "0-1", "--out", "x.kvcap"],
    ] {
        assert_eq!(code(&run(args)), 2, "{args:?}");
    }
}

/// Every command teaches: what it is for, and examples.
#[test]
fn help_of_every_command_shows_examples() {
    let top = run(["--help"]);
    assert_eq!(code(&top), 0);
    let text = stdout(&top);
    let commands = text.split("Commands:").nth(1).unwrap().split("Options:").next().unwrap();
    let names: Vec<&str> = commands
        .lines()
        // What a command is for may go on in further lines, which are indented more.
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    assert!(names.contains(&"replay") && names.contains(&"capture"), "{names:?}");
    for name in names {
        let help = run([name, "--help"]);
        assert_eq!(code(&help), 0, "{name}");
        let text = stdout(&help);
        let examples = text.split("Examples:").nth(1).unwrap_or_else(|| panic!("{name} has no examples"));
        assert!(examples.matches(&format!("rankwise {name}")).count() >= 2, "{name}");
    }
}

/// Without `--check`: what each rank holds, and how fast it went.
#[test]
fn plain_replay_reports_ranks_and_throughput() {
    let capture = own("vllm-0.33.0-chat-evict-dp2.kvcap");
    let args = ["replay", "--json", "--repeat", "3"].map(PathBuf::from);
    let output = run(args.into_iter().chain([capture.clone()]));
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report = &json(&output)["captures"][0];
    let fields = ["announcements", "counters", "engine", "engine_version", "file", "ranks", "throughput"];
    assert_eq!(keys(report), fields);
    assert_eq!(report["throughput"]["repeats"], 3);
    assert_eq!(report["throughput"]["messages"], 89);
    let count = |name: &str| report["counters"][name].as_u64().unwrap();
    assert_eq!(report["throughput"]["blocks"], count("stored_blocks") + count("removed_blocks"));
    assert!(report["throughput"]["message_us"]["p99"].is_f64());
    assert_eq!(report["ranks"].as_array().unwrap().len(), 2);
    assert_eq!(code(&run(["replay".as_ref(), capture.as_os_str()])), 0);
}

/// A running program that does not outlive its test.
struct Running(Child);

impl Running {
    fn start<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Self {
        Self(rankwise(args).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap())
    }

    fn lines(&mut self) -> std::io::Lines<BufReader<ChildStdout>> {
        BufReader::new(self.0.stdout.take().unwrap()).lines()
    }

    /// Waits for the end; its exit code.
    fn end(&mut self) -> i32 {
        let start = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code().unwrap();
            }
            assert!(start.elapsed() < PATIENCE, "the program does not end");
            sleep(Duration::from_millis(10));
        }
    }

    /// Asks it to end, as a supervisor does.
    fn terminate(&self) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What `--publish --json` says first.
struct Publishing {
    process: Running,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    ranks: Vec<Value>,
}

impl Publishing {
    fn start(capture: &Path, more: &[&str]) -> Self {
        let args = ["replay", "--publish", "--fast", "--json", "--wait-seconds", "60"];
        let args = args.iter().chain(more).map(PathBuf::from).chain([capture.to_owned()]);
        let mut process = Running::start(args);
        let mut lines = process.lines();
        let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let ranks = first["publishing"][0]["ranks"].as_array().unwrap().clone();
        Self { process, lines, ranks }
    }

    /// An argument per rank with its endpoint of a kind.
    fn arguments(&self, flag: &str, kind: &str) -> Vec<String> {
        let endpoint = |rank: &Value| rank[kind].as_str().unwrap().to_owned();
        self.ranks.iter().flat_map(|rank| [flag.to_owned(), endpoint(rank)]).collect()
    }

    /// Waits for the end; messages sent.
    fn end(mut self) -> u64 {
        let last: Value = serde_json::from_str(&self.lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(self.process.end(), 0);
        last["published"]["messages"].as_u64().unwrap()
    }
}

fn frames_of(script: &CaptureScript, rank: DpRank) -> Vec<&Vec<Bytes>> {
    script.live().iter().filter(|message| message.rank == rank).map(|message| &message.frames).collect()
}

/// R3, R4, E2: a published capture is recorded again through sockets, with the publishing arguments `more`: the
/// recorder hears what was recorded, frame by frame, and an index that is fed with the new recording equals the
/// engine's truth again.
fn publish_and_record(name: &str, more: &[&str]) {
    let (beside, original) = copy_of(name);
    let script = CaptureScript::load(&original, |_| {}).unwrap();
    let publishing = Publishing::start(&original, more);
    let recorded = beside.path().join("again").join(name);
    fs::create_dir(beside.path().join("again")).unwrap();
    let count = script.live().len().to_string();
    let mut args: Vec<String> =
        ["capture", "--json", "--with-history", "--seconds", "60", "--engine", script.header().engine()]
            .map(ToOwned::to_owned)
            .into();
    args.extend(["--messages".to_owned(), count, "--out".to_owned(), recorded.display().to_string()]);
    args.extend(publishing.arguments("--endpoint", "events"));
    args.extend(publishing.arguments("--replay-endpoint", "replay"));
    let output = run(&args);
    assert_eq!(code(&output), 0, "{name}: {}", stderr(&output));
    assert_eq!(publishing.end(), script.live().len() as u64);

    let again = CaptureScript::load(&recorded, |_| {}).unwrap();
    assert_eq!(again.header().block_size(), script.header().block_size(), "learned from the stream");
    for &rank in script.ranks() {
        assert_eq!(frames_of(&again, rank), frames_of(&script, rank), "{name} rank {rank}");
    }
    let truth = format!("{}.truth.json", stem(&recorded));
    for file in [truth.as_str(), "check.json"] {
        fs::copy(beside.path().join(file), recorded.with_file_name(file)).unwrap();
    }
    let output = run(["replay".as_ref(), "--check".as_ref(), recorded.as_os_str()]);
    assert_eq!(code(&output), 0, "{}", stdout(&output));
}

#[test]
fn published_ranks_with_evictions_are_recorded_frame_by_frame() {
    publish_and_record("vllm-0.33.0-chat-evict-dp2.kvcap", &[]);
    publish_and_record("sglang-0.5.9-chat-evict-dp2.kvcap", &[]);
}

/// E2: the publisher restarts on the same port; both lives are in the new recording.
#[test]
fn a_published_restart_is_recorded_frame_by_frame() {
    publish_and_record("vllm-0.33.0-restart.kvcap", &[]);
}

/// E3: a hole shows in the new recording too, with what the replay endpoint had of it, and no more.
#[test]
fn a_published_hole_is_recorded_with_its_answers() {
    publish_and_record("vllm-0.33.0-gap-lost.kvcap", &["--linger", "3"]);
    publish_and_record("vllm-0.33.0-gap-replay.kvcap", &["--linger", "3"]);
}

/// E3: whoever comes late gets what was sent, with the recorded answers for the holes that were passed; and a
/// recording that is ended from outside is complete.
#[test]
fn history_is_served_and_recorded_until_the_recorder_is_told_to_stop() {
    let original = own("vllm-0.33.0-gap-replay.kvcap");
    let script = CaptureScript::load(&original, |_| {}).unwrap();
    let publishing = Publishing::start(&original, &["--wait-subscribers", "0", "--linger", "100"]);
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("late.kvcap");
    let mut args: Vec<String> = ["capture", "--with-history", "--out"].map(ToOwned::to_owned).into();
    args.push(out.display().to_string());
    args.extend(publishing.arguments("--endpoint", "events"));
    args.extend(publishing.arguments("--replay-endpoint", "replay"));
    let mut recorder = Running::start(&args);
    let end_marks = || fs::read_to_string(&out).unwrap_or_default().matches("\"ffffffffffffffff\"").count();
    let start = Instant::now();
    while end_marks() < script.ranks().len() {
        assert!(start.elapsed() < PATIENCE, "no end of the history");
        sleep(Duration::from_millis(20));
    }
    recorder.terminate();
    assert_eq!(recorder.end(), 0);

    for plan in script.publish_plan().ranks {
        let expected: Vec<(EventSeq, Bytes)> = plan.servable(plan.steps.len()).into_iter().collect();
        let holes = plan.steps.iter().filter(|step| matches!(step, PublishStep::Publish { .. })).count();
        assert!(expected.len() >= holes);
        assert_eq!(answers(&out, plan.rank), expected, "rank {}", plan.rank);
    }
}

/// The batches that a recording has of a rank's replays.
fn answers(capture: &Path, rank: DpRank) -> Vec<(EventSeq, Bytes)> {
    let lines = CaptureReader::open(capture).unwrap().map(Result::unwrap);
    let received = lines.filter(|line| line.rank == rank).filter_map(|line| match line.body {
        LineBody::Replay { dir: Direction::Rx, frames, .. } => Some(frames),
        _ => None,
    });
    received
        .filter_map(|frames| match parse_replay(&frames).unwrap() {
            ReplayMessage::Batch { seq, payload, .. } => Some((seq, payload)),
            _ => None,
        })
        .collect()
}

/// S1, S2: without any set-up, mock engines, the service and traffic run over real ports; the KV-aware policy is
/// measured by the engines' answers, beside two others on the same traffic.
#[test]
fn the_demo_compares_policies_by_what_engines_answer() {
    let output = run(["demo", "--once", "--json", "--seconds", "3"]);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let shown = json(&output);
    let policy = |name: &str| {
        let figures = &shown[name];
        let number = |field: &str| figures[field].as_f64().unwrap();
        assert_eq!(number("failed"), 0.0, "{shown}");
        assert!(number("ttft_p50") > 0.0 && number("ttft_p50") <= number("ttft_p99"), "{shown}");
        let picks = figures["picks"].as_object().unwrap();
        assert_eq!(picks.len(), 8, "{shown}");
        let sum: u64 = picks.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(sum as f64, number("requests"), "{shown}");
        (number("hit_rate"), number("requests"), number("prompt_tokens"))
    };
    let (aware, requests, tokens) = policy("kv_aware");
    for other in ["round_robin", "least_load"] {
        let (hit_rate, of, prompt_tokens) = policy(other);
        assert_eq!((of, prompt_tokens), (requests, tokens), "the same traffic: {shown}");
        assert!(hit_rate < aware, "{shown}");
    }
    assert!(aware < 1.0 && requests > 30.0, "{shown}");
}

/// R1, I1, S2: captured streams of real engines run on real ports through the whole service, and every answer
/// equals the engines' own look-up.
#[test]
fn the_demo_of_captures_agrees_with_the_engines() {
    let output = run(["demo", "--captures", "--once", "--json"]);
    assert_eq!(code(&output), 0, "{}{}", stdout(&output), stderr(&output));
    let shown = json(&output);
    assert_eq!(shown["ok"], true);
    let rows = shown["rows"].as_array().unwrap();
    assert!(rows.len() > 40, "{} prompts", rows.len());
    let repaired = rows.iter().filter(|row| row["capture"] == "vllm-0.33.0-gap-replay").count();
    assert!(repaired > 0, "a gap is repaired on the way");
    assert!(rows.iter().all(|row| row["ranks"].as_array().is_some_and(|ranks| !ranks.is_empty())));
}

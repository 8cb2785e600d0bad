//! The live cases of `tests/live/`: scripts that play engines on real ports against the program as users run it.
//! What each one does and why is said in its head and in `tests/live/README.md`; here stands what it proves.
//!
//! Those that take longer are ignored here and run by `scripts/test-long.sh`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rankwise::trust::Reason;

/// Most scripts at once. They wait more than they work, but each has a service and some have floods.
const AT_ONCE: usize = 3;

/// Far longer than any script takes that works, also beside others on two cores.
const LIMIT: Duration = Duration::from_secs(120);

/// The same for those that take minutes.
const LONG_LIMIT: Duration = Duration::from_secs(600);

/// I6: a clear that names a medium empties that medium alone.
#[test]
fn d01_clear_of_one_medium() {
    case_file("d01_clear_of_one_medium.json");
}

/// I6: other names of host memory and storage.
#[test]
fn d02_other_names_of_the_host_tier() {
    case_file("d02_other_names_of_the_host_tier.json");
}

/// I9: a chunk of several blocks under one name is one unit.
#[test]
fn d04_chunk_is_one_unit() {
    case_file("d04_chunk_is_one_unit.json");
}

/// I10: a wrong parent does not move a block that has its place.
#[test]
fn d05_wrong_parents_from_a_connector() {
    case_file("d05_wrong_parents_from_a_connector.json");
}

/// I11, I3: streams of token pairs.
#[test]
fn d06_eagle_pairs() {
    script("d06_eagle_pairs.py");
}

/// E8, I4: what was skipped shows until a clear.
#[test]
fn d08_unknown_kind_takes_away() {
    script("d08_unknown_kind_takes_away.py");
}

/// L18: equal series of one rank are one report, different ones contradict each other.
#[test]
fn d10_tp_ranks_of_one_dp_rank() {
    script("d10_tp_ranks_of_one_dp_rank.py");
}

/// L17: the cache's size in the engine's own units.
#[test]
fn d11_cache_size_in_other_blocks() {
    script("d11_cache_size_in_other_blocks.py");
}

/// R3, R7, S4: the same declaration again changes nothing.
#[test]
fn d12_registered_again() {
    script("d12_registered_again.py");
}

/// S1, S3: equal idle ranks share traffic, whether or not they have a replay socket.
#[test]
fn d15_one_request_at_a_time() {
    script("d15_one_request_at_a_time.py");
}

/// S4: what was just placed counts at once.
#[test]
fn d16_many_at_the_same_moment() {
    script("d16_many_at_the_same_moment.py");
}

/// E4, E8: mistakes of deployment are said by name.
#[test]
fn d20_mistakes_that_look_like_a_cold_cache() {
    script("d20_mistakes_that_look_like_a_cold_cache.py");
}

/// E1, E8: image digests among the tokens cost their own blocks.
#[test]
fn d21_digests_among_the_tokens() {
    case_file("d21_digests_among_the_tokens.json");
}

/// A1: fields that narrow a question narrow it or are refused.
#[test]
fn d24_mooncake_clients() {
    script("d24_mooncake_clients.py");
}

/// E8, E4: every reason is raised by a message on a socket, said everywhere, and lifted as it promises.
#[test]
fn reasons() {
    let names: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
    run(&["reasons.py", "--all", &names.join(",")], LIMIT);
}

/// E10, E3: a replay is over when it is complete.
#[test]
fn lossy_replay() {
    script("lossy_replay.py");
}

/// E10: the same with libzmq's own losses.
#[test]
fn lossy_replay_natural() {
    script("lossy_replay_natural.py");
}

/// E10, L18: a lossy replay behind a lost connection; a report without usable fields.
#[test]
fn lossy_reconnect() {
    script("lossy_reconnect.py");
}

/// E4, E9, S5: the dead are silent, whatever the cause, and get nothing.
#[test]
fn dead_engine() {
    script("dead_engine.py");
}

/// E8, I4: limits above what engines send; what is lost is said.
#[test]
fn lost_content() {
    script("lost_content.py");
}

/// I9, I10: attention groups over restarts.
#[test]
fn group_kind() {
    script("group_kind.py");
}

/// E8, R4: topics are compared whole; a local rank is never guessed.
#[test]
fn topic_and_block_size() {
    script("topic_and_block_size.py");
}

/// E9: mute replay endpoints delay no other.
#[test]
fn replay_slots() {
    script("replay_slots.py");
}

/// L18: a report is as old as its measurement.
#[test]
fn slow_load_answer() {
    script("slow_load_answer.py");
}

/// R2, E4: more ranks than file descriptors.
#[test]
#[ignore = "a minute: scripts/test-long.sh"]
fn many_ranks() {
    long_script("many_ranks.py");
}

/// E7, E2: one bound for what waits, over all ranks.
#[test]
fn holdback_memory() {
    script("holdback_memory.py");
}

/// A2, S4: ids in their type, selections that stay, a quiet log.
#[test]
fn small_things() {
    script("small_things.py");
}

/// E7: SIGTERM ends the process beside connections of every kind; slow heads are closed.
#[test]
#[ignore = "a minute: scripts/test-long.sh"]
fn shutdown() {
    long_script("shutdown.py");
}

/// E3, E5, E10: connections that break again and again.
#[test]
#[ignore = "a minute: scripts/test-long.sh"]
fn broken_connections() {
    long_script("broken_connections.py");
}

/// E9, E7: no stream goes deaf beside a flood.
#[test]
#[ignore = "minutes: scripts/test-long.sh"]
fn credit_leak() {
    long_script("credit_leak.py");
}

/// I8: nobody waits for a write section or for a scrape.
#[test]
#[ignore = "a minute of a machine's whole power: scripts/test-long.sh"]
fn http_stall() {
    long_script("http_stall.py");
}

/// Every script and case file below `tests/live/` is run by a test here, or named as something else.
#[test]
fn none_is_forgotten() {
    const OTHERS: &[&str] = &["harness.py", "run_case.py", "proxy.py", "flood.py", "engine_process.py"];
    let tests =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/live_cases.rs")).unwrap();
    let mut forgotten = Vec::new();
    for entry in fs::read_dir(folder()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let runs = name.ends_with(".py") || name.ends_with(".json");
        let measures = name.starts_with("measure_");
        if runs && !measures && !OTHERS.contains(&name.as_str()) && !tests.contains(&format!("\"{name}\"")) {
            forgotten.push(name);
        }
    }
    assert!(forgotten.is_empty(), "no test runs {forgotten:?}");
}

// === the runner ===

fn case_file(name: &str) {
    run(&["run_case.py", name], LIMIT);
}

fn script(name: &str) {
    run(&[name], LIMIT);
}

fn long_script(name: &str) {
    run(&[name], LONG_LIMIT);
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/live")
}

/// Runs a script and fails with all that it said.
fn run(words: &[&str], limit: Duration) {
    // The rule of `peer::Peer::start`.
    let Some(python) = std::env::var_os("RANKWISE_PYTHON") else {
        assert!(
            std::env::var_os("CI").is_none(),
            "RANKWISE_PYTHON must name a Python with pyzmq and msgpack (scripts/test.sh makes one)"
        );
        eprintln!("SKIPPED: RANKWISE_PYTHON is not set; scripts/test.sh sets it");
        return;
    };
    let _turn = Turn::take();
    let said = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("live-{}.log", words[..words.len().min(2)].join("-")));
    let output = File::create(&said).unwrap();
    let started = Instant::now();
    let mut child = Command::new(&python)
        .args(words)
        .current_dir(folder())
        .env("RANKWISE", env!("CARGO_BIN_EXE_rankwise"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("PYTHONUNBUFFERED", "1")
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap_or_else(|error| panic!("RANKWISE_PYTHON={python:?} does not start: {error}"));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if started.elapsed() > limit {
            // The script's own children end with it.
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        thread::sleep(Duration::from_millis(50));
    };
    let text = fs::read_to_string(&said).unwrap_or_default();
    match status {
        Some(status) if status.success() => println!("{text}"),
        Some(status) => panic!("{words:?} ended with {status}:\n{text}"),
        None => panic!("{words:?} is not done after {limit:?}:\n{text}"),
    }
}

static RUNNING: Mutex<usize> = Mutex::new(0);
static ENDED: Condvar = Condvar::new();

/// One of the places to run in; dropping it, also in a panic, gives it back.
struct Turn;

impl Turn {
    fn take() -> Self {
        let mut running = RUNNING.lock();
        while *running == AT_ONCE {
            ENDED.wait(&mut running);
        }
        *running += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.lock() -= 1;
        ENDED.notify_one();
    }
}

//! `rankwise bench serve` and `bench index`: the search against a service with a known ceiling in made-up time,
//! and the program on real ports at small rates. What a machine measures is not asserted, only that it is
//! measured and adds up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rankwise::lab::search::{RateSearch, SearchConfig, Trial};
use rankwise::lab::{Arrivals, Latencies, Schedule};
use serde_json::Value;
use tempfile::TempDir;

// === the search, in made-up time ===

/// One server that takes a fixed time for each request, and answers in the order of arrival.
fn trial(rate: f64, ceiling: f64, limit: Duration, arrivals: Arrivals) -> Trial {
    let takes = Duration::from_secs_f64(1.0 / ceiling);
    let (mut free, mut scheduled, mut in_time) = (Duration::ZERO, 0, 0);
    for due in Schedule::new(rate, Duration::from_secs(20), arrivals) {
        free = free.max(due) + takes;
        scheduled += 1;
        in_time += u64::from(free - due <= limit);
    }
    Trial { rate, scheduled, in_time }
}

fn highest(ceiling: f64, limit: Duration, arrivals: Arrivals) -> (Option<f64>, usize) {
    let mut search = RateSearch::new(SearchConfig::default());
    let mut trials = 0;
    while let Some(rate) = search.next_rate() {
        trials += 1;
        assert!(trials < 100, "the search does not end");
        search.told(trial(rate, ceiling, limit, arrivals).kept_up());
    }
    (search.best(), trials)
}

#[test]
fn the_search_finds_a_known_ceiling() {
    for ceiling in [40.0, 900.0, 7_000.0] {
        // Twenty requests' time: at chance arrivals a queue of that length is rare until shortly below the ceiling,
        // and above it twenty seconds are long enough for one.
        let limit = Duration::from_secs_f64(20.0 / ceiling);
        for arrivals in [Arrivals::Even, Arrivals::Poisson { seed: 3 }] {
            let (found, trials) = highest(ceiling, limit, arrivals);
            let found = found.unwrap();
            assert!(
                found >= 0.75 * ceiling && found <= 1.06 * ceiling,
                "{found} of {ceiling} ({arrivals:?})"
            );
            assert!(trials < 30, "{trials}");
        }
    }
}

#[test]
fn a_limit_that_no_answer_keeps_finds_nothing() {
    let (found, _) = highest(100.0, Duration::from_millis(5), Arrivals::Even);
    assert_eq!(found, None, "each answer takes 10 ms");
}

// === the program ===

struct Bench {
    folder: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, args: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rankwise"));
        let here = self.folder.path().display().to_string();
        command.arg("bench").args(args.split_whitespace().map(|arg| arg.replace("DIR", &here)));
        command.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap()
    }

    /// Runs with `--json` and expects 0.
    fn json(&self, args: &str) -> Value {
        let output = self.run(&format!("{args} --json"));
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{told}");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {told}"))
    }
}

fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no number at {path} in {value}"))
}

/// Everything that was due is accounted for, and percentiles do not fall.
fn adds_up(run: &Value) {
    let of = |path: &str| number(run, path);
    assert_eq!(of("/scheduled"), of("/answered") + of("/failed") + of("/abandoned"), "{run}");
    assert_eq!(of("/scheduled"), of("/latency/count"), "{run}");
    assert!(of("/in_time") <= of("/answered"), "{run}");
    let of = |name: &str| run["latency"][name].as_f64().unwrap_or_else(|| panic!("{name} in {run}"));
    let rising = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"].map(of);
    assert!(rising.is_sorted() && rising[0] > 0.0, "{run}");
    assert!(run["latency"]["p50_us"].as_f64() >= run["service"]["p50_us"].as_f64(), "{run}");
}

const SMALL: &str = "--ranks 3 --blocks 300 --block-size 4";

#[test]
fn a_fixed_rate_is_measured_and_written() {
    let bench = Bench::new();
    for (what, form) in [("query", "tokens"), ("query", "hashes"), ("select", "tokens"), ("select", "hashes")]
    {
        let files = "--hdr DIR/of.hgrm --html DIR/of.html";
        let load =
            format!("serve --what {what} --form {form} --qps 40 --seconds 1 --rate 20 {SMALL} {files}");
        let json = bench.json(&load);
        assert_eq!((&json["what"], &json["form"]), (&what.into(), &form.into()));
        assert_eq!((&json["ranks"], &json["highest_rate"]), (&3.into(), &Value::Null));
        adds_up(&json["run"]);
        assert_eq!(number(&json, "/run/failed"), 0);
        assert!(number(&json, "/messages_published") > 0, "{json}");
        assert!(number(&json, "/run/mean_answer_bytes") > 100, "{json}");
        let hdr = std::fs::read_to_string(bench.file("of.hgrm")).unwrap();
        let total = format!("Total count    = {:>12}]", number(&json, "/run/latency/count"));
        assert!(hdr.trim_start().starts_with("Value") && hdr.contains(&total), "{hdr}");
        let page = std::fs::read_to_string(bench.file("of.html")).unwrap();
        assert!(page.contains("<svg") && page.contains("99 %") && page.contains(what), "{page}");
    }
}

#[test]
fn the_highest_rate_is_one_that_was_kept_up() {
    let bench = Bench::new();
    let json = bench.json(&format!(
        "serve --what select --start-qps 50 --seconds 0.2 --p99-limit 1s {SMALL} --html DIR/of.html"
    ));
    let trials = json["trials"].as_array().unwrap();
    trials.iter().for_each(adds_up);
    let kept =
        trials.iter().filter(|trial| trial["kept_up"] == true).filter_map(|trial| trial["rate"].as_f64());
    assert_eq!(json["highest_rate"].as_f64(), kept.reduce(f64::max), "{json}");
    assert_eq!(json["run"]["rate"].as_f64(), json["highest_rate"].as_f64().map(|rate| rate / 2.0));
    assert_eq!(trials[0]["rate"], 50.0);
    assert!(std::fs::read_to_string(bench.file("of.html")).unwrap().contains("Latency over rate"));
}

#[test]
fn events_are_seen_in_process_and_over_http() {
    let bench = Bench::new();
    let json =
        bench.json(&format!("serve --event-to-visible --rate 40 --seconds 1 {SMALL} --html DIR/of.html"));
    assert_eq!((&json["bench"], &json["unseen"]), (&"event_to_visible".into(), &0.into()));
    assert!(number(&json, "/messages") > 50, "{json}");
    assert!(number(&json, "/in_process/count") > 50 && number(&json, "/http/count") > 5, "{json}");
    assert!(json["in_process"]["p50_us"].as_f64() > Some(0.0), "{json}");
    assert!(std::fs::read_to_string(bench.file("of.html")).unwrap().contains("<svg"));
}

struct Service {
    child: Child,
    url: String,
}

impl Service {
    fn start() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rankwise"))
            .args(["serve", "--listen", "127.0.0.1:0", "--json"])
            .env("RUST_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap();
        Self { child, url: format!("http://{}", started["address"].as_str().unwrap()) }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn a_running_service_is_loaded_and_left_as_it_was() {
    let service = Service::start();
    let bench = Bench::new();
    let url = &service.url;
    let json = bench.json(&format!("serve --url {url} --what query --qps 40 --seconds 1 {SMALL}"));
    adds_up(&json["run"]);
    assert_eq!((number(&json, "/run/failed"), &json["service"]), (0, &url.as_str().into()));
    let json = bench.json(&format!("serve --url {url} --event-to-visible --rate 30 --seconds 1 {SMALL}"));
    assert_eq!((number(&json, "/in_process/count"), &json["unseen"]), (0, &0.into()));
    assert!(number(&json, "/http/count") > 5, "{json}");
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let left: Value = client.get(format!("{url}/workers")).send().await.unwrap().json().await.unwrap();
    assert_eq!(left, serde_json::json!([]), "the made-up workers are withdrawn");
}

/// A service that stops for half a second in the middle, once. Answers everything with an empty object.
fn stalling_service() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut served = 0;
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut buffer = [0; 4_096];
            while stream.read(&mut buffer).is_ok_and(|read| read > 0) {
                served += 1;
                if served == 60 {
                    std::thread::sleep(Duration::from_millis(500));
                }
                if stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").is_err() {
                    break;
                }
            }
        }
    });
    format!("http://{address}")
}

/// A stall is paid by everyone who would have asked meanwhile, not by the one who was being answered.
#[test]
fn a_stall_counts_for_all_who_were_due() {
    let url = stalling_service();
    let bench = Bench::new();
    let load = format!("serve --url {url} --what health --even --qps 100 --seconds 2 --connections 1");
    let json = bench.json(&load);
    adds_up(&json["run"]);
    let micros = |of: &str, at: &str| json["run"][of][at].as_f64().unwrap();
    assert!(micros("latency", "max_us") >= 450_000.0 && micros("service", "max_us") >= 450_000.0, "{json}");
    // Of 200 requests some 50 were due during the stall, so a tenth of all were over a quarter second late.
    assert!(micros("latency", "p90_us") >= 250_000.0, "{json}");
}

#[test]
fn wrong_usage_is_told() {
    let bench = Bench::new();
    for args in [
        "",
        "serve --qps 0",
        "serve --qps nan",
        "serve --p99-limit 5",
        "serve --ranks 0",
        "serve --event-to-visible --what query",
        "serve --url http://127.0.0.1:1 --seconds 1",
        "index no-such-directory/nothing.txt",
    ] {
        let output = bench.run(args);
        assert_eq!(output.status.code(), Some(2), "{args}");
        assert!(!output.stderr.is_empty(), "{args}");
    }
}

// === the index ===

/// I1, I8: what is looked up under made-up traffic equals what the ranks hold, also after a reader and a
/// writer have worked at once.
#[test]
fn the_index_bench_checks_its_answers() {
    let bench = Bench::new();
    for names in ["", "--own-names"] {
        let small = "--ranks 4 --blocks 1500 --block-size 4 --churn 3000 --queries 50";
        let json = bench.json(&format!("index {small} {names} --html DIR/of.html --hdr DIR/of.hgrm"));
        assert_eq!(json["wrong_answers"], 0);
        assert!(number(&json, "/answers_checked") >= 400, "{json}");
        assert!(number(&json, "/index/held_blocks") > 5_000, "{json}");
        let phases: Vec<&str> =
            json["ingest"].as_array().unwrap().iter().filter_map(|of| of["phase"].as_str()).collect();
        assert_eq!(phases, ["fill", "churn", "with a reader beside"]);
        for phase in json["ingest"].as_array().unwrap() {
            assert_eq!(number(phase, "/spread/count"), number(phase, "/blocks"), "{phase}");
            assert!(phase["mean_ns_per_block"].as_f64() > Some(0.0), "{phase}");
        }
        assert!(json["queries"].as_array().unwrap().len() >= 9, "{json}");
        assert!(std::fs::read_to_string(bench.file("of.html")).unwrap().contains("99.9 %"));
        assert!(std::fs::read_to_string(bench.file("of.hgrm")).unwrap().contains("#[Max"));
    }
}

#[test]
fn captures_are_benched_too() {
    let bench = Bench::new();
    let capture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures/vllm-0.33.0-chat-evict-dp2.kvcap");
    let json = bench.json(&format!("index {} --repeats 2 --html DIR/of.html", capture.display()));
    assert_eq!(json["ingest"][0]["phase"], "vllm-0.33.0-chat-evict-dp2");
    assert!(number(&json, "/ingest/0/blocks") > 0 && number(&json, "/ingest/0/batches") > 0, "{json}");
    let looked_up: Vec<u64> =
        json["queries"].as_array().unwrap().iter().map(|of| number(of, "/latency/count")).collect();
    assert!(looked_up.len() == 2 && looked_up[0] > 0 && looked_up[0] == looked_up[1], "{json}");
}

/// What the figures are made of.
#[test]
fn latencies_add_up() {
    let (mut all, mut some) = (Latencies::new(), Latencies::new());
    some.record_many_ns(1_000, 3);
    all.record(Duration::from_millis(1));
    all.add(&some);
    assert_eq!((all.count(), all.count_up_to(1_000), all.at(0.5)), (4, 3, Some(1_000)));
}

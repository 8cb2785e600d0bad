//! `rankwise serve` as a process: how it ends, and what it does with the descriptors it is given.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(unix)]

use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Nothing here takes a tenth of it; beyond, something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

struct Served {
    process: Child,
    address: String,
}

impl Served {
    async fn start(before: &str, args: &str) -> Self {
        let program = env!("CARGO_BIN_EXE_rankwise");
        let line = format!("{before} exec '{program}' serve --json --listen 127.0.0.1:0 {args}");
        let mut process = Command::new("sh")
            .args(["-c", &line])
            .env_remove("RUST_LOG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).await.unwrap();
        let bound: Value = serde_json::from_str(&line).unwrap();
        Self { process, address: bound["address"].as_str().unwrap().to_owned() }
    }

    async fn connect(&self, send: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        stream.write_all(send.as_bytes()).await.unwrap();
        stream
    }

    fn terminate(&self) {
        let pid = self.process.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }

    /// How it ended, how long that took from now on, and what it logged.
    async fn end(mut self) -> (ExitStatus, Duration, String) {
        let began = Instant::now();
        let status = timeout(PATIENCE, self.process.wait()).await.expect("it does not end").unwrap();
        let took = began.elapsed();
        let mut log = String::new();
        self.process.stderr.take().unwrap().read_to_string(&mut log).await.unwrap();
        (status, took, log)
    }
}

/// A request whose body does not come.
const HALF: &str =
    "POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{";

/// I8: SIGTERM ends watches, and does not wait for idle connections and half heads.
#[tokio::test]
async fn sigterm_ends_watchers_and_half_heads_at_once() {
    let served = Served::start("", "").await;
    let mut watch = served.connect("GET /loads/watch HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let _head = served.connect("POST /query HT").await;
    let _idle = served.connect("").await;
    watch.read_exact(&mut [0; 15]).await.unwrap();
    served.terminate();
    let (status, took, log) = served.end().await;
    assert!(status.success() && log.contains("every answer was given"), "{status} {log}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// I8: who asks twice does not wait for answers.
#[tokio::test]
async fn a_second_signal_ends_the_process_at_once() {
    let served = Served::start("", "").await;
    let _half = served.connect(HALF).await;
    let mut known = served.connect("GET /health HTTP/1.1\r\nHost: x\r\n\r\n").await;
    known.read_exact(&mut [0; 15]).await.unwrap();
    served.terminate();
    tokio::time::sleep(Duration::from_millis(700)).await;
    let mut served = served;
    assert_eq!(served.process.try_wait().unwrap(), None, "an answer that has begun is waited for");
    served.terminate();
    let (status, took, log) = served.end().await;
    assert!(status.code() == Some(1) && log.contains("asked again"), "{status} {log}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

/// I8: the soft limit of descriptors is raised to the hard one, and some are kept for HTTP.
#[tokio::test]
async fn descriptors_are_raised_and_shared_out() {
    let served = Served::start("ulimit -S -n 100; ulimit -H -n 400;", "").await;
    served.terminate();
    let (_, _, log) = served.end().await;
    assert!(log.contains("limit=400 engines=300 http=36"), "{log}");
}

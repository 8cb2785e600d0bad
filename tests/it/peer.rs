//! Drives `tests/interop/peer.py`: a libzmq peer in a process of its own. Its commands are described there.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Longer than any command takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running peer; dropping it kills the process.
pub struct Peer {
    _child: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts a peer with the Python that `RANKWISE_PYTHON` names, which must have pyzmq.
    ///
    /// Without the variable: `None`, and it is said aloud. Where `CI` is set that is a failure.
    pub fn start() -> Option<Self> {
        let Some(python) = std::env::var_os("RANKWISE_PYTHON") else {
            assert!(
                std::env::var_os("CI").is_none(),
                "RANKWISE_PYTHON must name a Python with pyzmq and msgpack (scripts/test.sh makes one)"
            );
            eprintln!("SKIPPED: RANKWISE_PYTHON is not set; scripts/test.sh sets it");
            return None;
        };
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/peer.py");
        let mut child = Command::new(&python)
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap_or_else(|error| panic!("RANKWISE_PYTHON={python:?} does not start: {error}"));
        let commands = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Some(Self { _child: child, commands, answers })
    }

    /// Does a command and returns its answer; a failed command fails the test.
    pub async fn call(&mut self, command: Value) -> Value {
        let mut line = command.to_string();
        line.push('\n');
        self.commands.write_all(line.as_bytes()).await.expect("the peer has died");
        let answer = tokio::time::timeout(PATIENCE, self.answers.next_line())
            .await
            .unwrap_or_else(|_| panic!("no answer to {command}"))
            .unwrap()
            .unwrap_or_else(|| panic!("the peer has died at {command}"));
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["ok"], json!(true), "{command}: {answer}");
        answer
    }

    /// Opens a publisher with `settings` and returns its endpoints for events and replays.
    pub async fn open(&mut self, mut settings: Value) -> (String, String) {
        settings["op"] = json!("open");
        let answer = self.call(settings).await;
        let text = |key: &str| answer[key].as_str().unwrap_or_default().to_owned();
        (text("events"), text("replay"))
    }

    /// Publishes `count` generated batches, once `subscriptions` have come.
    pub async fn publish_to(&mut self, subscriptions: u64, count: u64) {
        self.call(json!({"op": "wait_subscribed", "count": subscriptions})).await;
        self.call(json!({"op": "publish_many", "count": count})).await;
    }
}

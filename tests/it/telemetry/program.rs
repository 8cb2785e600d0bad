//! The program: a configuration that names a source, and `GET /loads`.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use super::servers::{Reply, WebServer};

/// L9: `serve` asks the URL that its configuration names, and shows what it was told: 0 is 0, and unknown is
/// null.
#[tokio::test]
async fn serve_shows_what_it_has_fetched() {
    let body = json!({"loads": [{"dp_rank": 4, "num_running_reqs": 3, "num_used_tokens": 640},
        {"dp_rank": 5, "num_running_reqs": 0, "num_used_tokens": 0}, {"dp_rank": 6, "num_running_reqs": -1}]});
    let engine = WebServer::start(&[("/v1/loads", Reply::ok(body.to_string()))]).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rankwise.toml");
    let url = engine.url();
    let config = format!(
        "[telemetry]\ninterval_ms = 20\n[[workers]]\nid = \"w\"\nmodel = \"m\"\nblock_size = 16\nstart = 4\n\
         size = 4\nno_events = true\nloads = \"{url}\"\n"
    );
    std::fs::write(&path, config).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_rankwise"))
        .args(["serve", "--json", "--listen", "127.0.0.1:0", "--config"])
        .arg(&path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).await.unwrap();
    let address: Value = serde_json::from_str(&line).unwrap();
    let loads = format!("http://{}/loads", address["address"].as_str().unwrap());
    let ranks = loop {
        let pools: Value = reqwest::get(&loads).await.unwrap().json().await.unwrap();
        let ranks = pools[0]["loads"].as_array().unwrap().clone();
        if ranks[0]["state"] == "known" {
            break ranks;
        }
    };
    let of = |field: &str| ranks.iter().map(|rank| rank[field].clone()).collect::<Vec<_>>();
    assert_eq!(of("decode_blocks"), [json!(40.0), json!(0.0), Value::Null, Value::Null]);
    assert_eq!(of("active_requests"), [json!(3), json!(0), Value::Null, Value::Null]);
    program.kill().await.unwrap();
}

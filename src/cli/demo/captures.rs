//! `rankwise demo --captures`: captured streams of real engines on real ports, through the whole service.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rankwise::capture::{CaptureScript, Probe, Truth, stem};
use rankwise::ids::{EventSeq, WorkerId};
use rankwise::indexer::RankView;
use rankwise::ingest::NodeConfig;
use rankwise::routing::RouterConfig;
use rankwise::service::ServiceConfig;
use rankwise::trust::Trust;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::super::inputs::{Loading, captures};
use super::super::output::{message_bar, print_json, print_text, table};
use super::super::publish::{Pace, PublishOptions, Published, ReplayRanks, publish_capture};
use super::super::running::Running;
use super::super::{Verdict, asked_to_stop, runtime};
use super::Args;

/// What is shown unless captures are named: both engines, evictions, a model with two attention groups, and a
/// gap that has to be repaired on the way.
const SHOWN: [&str; 4] = [
    "vllm-0.33.0-chat-evict-dp2.kvcap",
    "sglang-0.5.23-chat-evict-dp2.kvcap",
    "vllm-0.33.0-hybrid-swa.kvcap",
    "vllm-0.33.0-gap-replay.kvcap",
];

/// Blocks that every rank is said to be decoding, so that the prefix alone decides.
const LOAD: f64 = 8.0;

/// Streams of this size arrive within a second; a loaded machine may take a while.
const PATIENCE: Duration = Duration::from_secs(60);

/// Captured event streams of real engines are published on real ZMQ ports, one per rank. The service subscribes,
/// asks for history, fills its index and answers over HTTP, all in this process. Then the prompts for which the
/// engines recorded their own look-up are asked, and the answers are laid beside theirs.
///
/// # Errors
/// Captures that cannot be read, ports that cannot be bound, a stream that does not arrive.
pub fn run(paths: &[PathBuf], args: &Args) -> Result<Verdict> {
    let acts = acts(paths)?;
    runtime()?.block_on(show(args, acts))
}

fn acts(paths: &[PathBuf]) -> Result<Vec<Act>> {
    let paths = if paths.is_empty() { shown()? } else { captures(paths)? };
    let mut loading = Loading::new(&paths);
    paths.iter().map(|path| Act::load(path, &mut loading)).collect()
}

async fn show(args: &Args, acts: Vec<Act>) -> Result<Verdict> {
    let service = ServiceConfig { seed: Some(1), ..ServiceConfig::default() };
    let (node, router) = (NodeConfig::default(), RouterConfig::default());
    let running = Running::start(&args.listen, node, router, service).await?;
    let mut stage = Stage { client: Client::new(running.address())?, running, published: Vec::new() };
    let mut rows = Vec::new();
    for act in &acts {
        rows.extend(stage.play(act).await?);
    }
    let ok = rows.iter().all(|row| row.agrees);
    let address = stage.running.address();
    match args.json {
        true => print_json(&json!({ "ok": ok, "address": address.to_string(), "rows": rows }))?,
        false => print_text(render(&rows, ok))?,
    }
    if !args.once {
        if !args.json {
            print_text(format!(
                "\nStill up: http://{address} (try GET /workers, /metrics, POST /select). Ctrl-C ends it."
            ))?;
        }
        asked_to_stop().await;
    }
    stage.close().await?;
    Ok(Verdict::of(ok))
}

/// The captures in the working directory's `fixtures`, else those beside the sources that were built.
fn shown() -> Result<Vec<PathBuf>> {
    let here = Path::new("fixtures/captures");
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join(here);
    let Some(folder) = [here.to_owned(), built].into_iter().find(|folder| folder.is_dir()) else {
        bail!("no fixtures/captures here; run it in the repository, or name captures behind --captures");
    };
    Ok(SHOWN.iter().map(|name| folder.join(name)).collect())
}

/// One capture with the engines' own answers.
struct Act {
    name: String,
    script: CaptureScript,
    truth: Truth,
}

impl Act {
    fn load(path: &Path, loading: &mut Loading) -> Result<Self> {
        let script = loading.load(path)?;
        Ok(Self { name: stem(path), script, truth: Truth::beside(path)? })
    }

    /// The engine's number of leading blocks per rank, ascending by rank.
    fn engine_blocks(probe: &Probe) -> Vec<(u32, u32)> {
        let mut found: Vec<_> =
            probe.by_rank.iter().map(|answer| (answer.rank, answer.matched_blocks)).collect();
        found.sort_unstable();
        found
    }
}

/// Everything that runs.
struct Stage {
    running: Running,
    client: Client,
    published: Vec<Published>,
}

impl Stage {
    /// Publishes one capture, waits until it has arrived, and asks its probes.
    async fn play(&mut self, act: &Act) -> Result<Vec<Row>> {
        let options = PublishOptions {
            host: "127.0.0.1".to_owned(),
            base_port: None,
            replay_base_port: None,
            replay: ReplayRanks::All,
            pace: Pace::Fast,
            subscribers: 1,
            patience: PATIENCE,
        };
        let mut published = publish_capture(&act.script, &options).await?;
        let block_size = act.script.header().block_size().context("the capture names no block size")?;
        for endpoints in published.endpoints() {
            let body = json!({
                "instance_id": act.name, "model_name": act.name, "block_size": block_size.get(),
                "dp_rank": endpoints.dp_rank.0, "endpoint": endpoints.events,
                "replay_endpoint": endpoints.replay,
            });
            self.client.post("/register", &body).await?;
        }
        published.finished().await?;
        self.published.push(published);
        self.wait_for(act).await?;
        let ranks: serde_json::Map<String, Value> = act
            .script
            .ranks()
            .iter()
            .map(|rank| (rank.to_string(), json!({ "decode_blocks": LOAD })))
            .collect();
        let report = json!({ "model_name": act.name, "worker_id": act.name, "ranks": ranks });
        self.client.post("/loads", &report).await?;
        let mut rows = Vec::new();
        for (nth, probe) in act.truth.probes.iter().enumerate() {
            rows.push(self.ask(act, nth, probe).await?);
        }
        Ok(rows)
    }

    /// Waits until every rank has applied its last batch and nothing is outstanding.
    async fn wait_for(&self, act: &Act) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        let worker = WorkerId::new(&act.name);
        let bar = message_bar(Some(act.script.live().len() as u64));
        bar.set_message(format!("{}: its streams arrive", act.name));
        loop {
            let fleet = self.running.view().fleet();
            let pool = fleet.pool_of(&worker).context("the worker is gone")?;
            let ranks = pool.ranks().filter(|(of, _)| of.spec.worker == worker);
            let waiting: Vec<String> = ranks
                .filter(|(_, rank)| {
                    let last = act.truth.rank(rank.plan.rank.dp_rank).and_then(|rank| rank.last_seq());
                    let trust = rank.status.trust();
                    let outstanding = matches!(trust, Trust::Joining | Trust::Repairing);
                    rank.status.report().watermark < Some(last.unwrap_or(EventSeq::ZERO)) || outstanding
                })
                .map(|(_, rank)| format!("{} ({})", rank.plan.rank, rank.status.trust()))
                .collect();
            let applied = |rank: &RankView| rank.status.report().stream.applied_batches;
            bar.set_position(pool.ranks().map(|(_, rank)| applied(rank)).sum());
            if waiting.is_empty() {
                bar.finish_and_clear();
                return Ok(());
            }
            if Instant::now() > end {
                bail!("the streams of {} have not arrived after {PATIENCE:?}", waiting.join(", "));
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn ask(&self, act: &Act, nth: usize, probe: &Probe) -> Result<Row> {
        let query = probe.query();
        let mut body = json!({
            "model_name": act.name, "token_ids": query.tokens, "lora_name": query.lora_name,
            "cache_salt": query.cache_salt, "mm": query.mm,
        });
        let found = self.client.post("/query", &body).await?;
        body["candidates"] = json!("all");
        let picked = self.client.post("/select", &body).await?;
        Row::new(act, nth, probe, &found, &picked)
    }

    async fn close(self) -> Result<()> {
        for published in self.published {
            published.close().await;
        }
        self.running.stop().await
    }
}

/// One prompt: what we say and what the engines say.
#[derive(Debug, Serialize)]
struct Row {
    capture: String,
    probe: usize,
    tokens: usize,
    ranks: Vec<RankCell>,
    picked: Option<u64>,
    reason: String,
    agrees: bool,
}

#[derive(Debug, Serialize)]
struct RankCell {
    dp_rank: u32,
    overlap_blocks: u64,
    engine_blocks: u32,
    logit: Option<f64>,
    trust: String,
}

impl Row {
    fn new(act: &Act, nth: usize, probe: &Probe, found: &Value, picked: &Value) -> Result<Self> {
        let block_size = found["block_size"].as_u64().context("/query names no block size")?;
        let of = |list: &Value, rank: u32| -> Value {
            let entries = list.as_array().into_iter().flatten();
            entries.clone().find(|entry| entry["dp_rank"] == rank).cloned().unwrap_or_default()
        };
        let engine = Act::engine_blocks(probe);
        let ranks: Vec<RankCell> = engine
            .iter()
            .map(|&(dp_rank, engine_blocks)| {
                let rank = of(&found["ranks"], dp_rank);
                RankCell {
                    dp_rank,
                    overlap_blocks: rank["device"].as_u64().unwrap_or_default() / block_size.max(1),
                    engine_blocks,
                    logit: of(&picked["candidates"], dp_rank)["logit"].as_f64(),
                    trust: rank["trust"].as_str().unwrap_or("?").to_owned(),
                }
            })
            .collect();
        let best = engine.iter().map(|(_, blocks)| *blocks).max();
        let pick = picked["dp_rank"].as_u64();
        // Every rank is as busy as the others, so the rank with the longest prefix has to win.
        let right =
            engine.iter().any(|(rank, blocks)| pick == Some(u64::from(*rank)) && Some(*blocks) == best);
        let equal = ranks.iter().all(|rank| rank.overlap_blocks == u64::from(rank.engine_blocks));
        Ok(Self {
            capture: act.name.clone(),
            probe: nth,
            tokens: probe.tokens.len(),
            ranks,
            picked: pick,
            reason: picked["reason"].as_str().unwrap_or("?").to_owned(),
            agrees: right && equal,
        })
    }
}

fn render(rows: &[Row], ok: bool) -> String {
    let mut text = String::new();
    let mut names: Vec<&str> = rows.iter().map(|row| row.capture.as_str()).collect();
    names.dedup();
    for name in names {
        let of: Vec<&Row> = rows.iter().filter(|row| row.capture == name).collect();
        let mut head = vec!["prompt".to_owned(), "tokens".to_owned()];
        for rank in of.iter().flat_map(|row| &row.ranks).take(of[0].ranks.len()) {
            head.push(format!("rank {}: blocks (engine) logit", rank.dp_rank));
        }
        head.extend(["pick", "reason", "agrees"].map(str::to_owned));
        let mut lines = table(head, 1);
        for row in of {
            let mut cells = vec![format!("#{}", row.probe), row.tokens.to_string()];
            cells.extend(row.ranks.iter().map(|rank| {
                let logit = rank.logit.map_or_else(|| "unknown".to_owned(), |logit| format!("{logit:.3}"));
                format!("{} ({}) {logit}", rank.overlap_blocks, rank.engine_blocks)
            }));
            cells.push(row.picked.map_or_else(|| "-".to_owned(), |rank| rank.to_string()));
            cells.push(row.reason.clone());
            cells.push(if row.agrees { "yes" } else { "NO" }.to_owned());
            lines.add_row(cells);
        }
        text.push_str(&format!("\n{name}\n{lines}\n"));
    }
    let agreeing = rows.iter().filter(|row| row.agrees).count();
    text.push_str(&format!(
        "\n{agreeing} of {} prompts: every rank's overlap equals the engine's own look-up, and the pick is the \
         rank with the longest prefix{}",
        rows.len(),
        if ok { "." } else { " — SOME DO NOT AGREE." }
    ));
    text
}

/// The service as a client sees it.
struct Client {
    http: reqwest::Client,
    base: String,
}

impl Client {
    fn new(address: SocketAddr) -> Result<Self> {
        // The address is ours; a proxy in the environment must not come between.
        let http = reqwest::Client::builder()
            .tcp_nodelay(true)
            .no_proxy()
            .build()
            .context("cannot make an HTTP client")?;
        Ok(Self { http, base: format!("http://{address}") })
    }

    async fn post(&self, route: &str, body: &Value) -> Result<Value> {
        let answer = self.http.post(format!("{}{route}", self.base)).json(body).send().await;
        let answer = answer.with_context(|| format!("cannot reach {route}"))?;
        let status = answer.status();
        let body: Value = answer.json().await.with_context(|| format!("{route} answered no JSON"))?;
        if !status.is_success() {
            bail!("{route} answered {status}: {}", body["detail"].as_str().unwrap_or("no detail"));
        }
        Ok(body)
    }
}

//! Mock engines and the service as processes of their own, joined by nothing but ports.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Stdio;
use std::time::{Duration, Instant};

use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::sleep;

/// Longer than anything here takes on a loaded machine; nothing waits for it to pass.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running program that says in one line of JSON when it is ready. It does not outlive its test.
pub struct Program {
    child: Child,
    pub ready: Value,
    /// Kept open, so that the program can go on printing.
    _lines: Lines<BufReader<ChildStdout>>,
}

impl Program {
    pub async fn start<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rankwise"))
            .args(args)
            .env("RUST_LOG", "warn")
            .env_remove("RANKWISE_LISTEN")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next_line().await.unwrap().expect("the program ends before it is ready");
        Self { child, ready: serde_json::from_str(&line).unwrap(), _lines: lines }
    }

    /// Asks it to end, as a supervisor does; its exit code.
    pub async fn terminate(mut self) -> Option<i32> {
        let pid = self.child.id().unwrap().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().await.unwrap().success());
        self.child.wait().await.unwrap().code()
    }
}

/// Where the service learns the engines' load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loads {
    Http,
    Grpc,
    LoadStat,
    /// Nowhere: every rank's load is unknown.
    Nowhere,
}

/// One rank, and how it is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rank {
    pub worker: String,
    pub dp_rank: u32,
    pub local: u32,
    /// The worker's.
    pub url: String,
}

/// Engines, and a service that listens to them.
pub struct Site {
    mocks: Vec<Program>,
    serve: Program,
    _folder: TempDir,
    client: Client,
    pub base: String,
    pub block_size: u32,
    pub ranks: Vec<Rank>,
}

impl Site {
    /// A `rankwise mock` for each list of arguments, and a `rankwise serve` with these lines of configuration above
    /// the workers.
    pub async fn start(mocks: &[Vec<String>], loads: Loads, settings: &str) -> Self {
        let mut started = Vec::new();
        for args in mocks {
            let args = ["mock"].into_iter().chain(args.iter().map(String::as_str));
            started.push(Program::start(args).await);
        }
        let workers: Vec<&Value> =
            started.iter().flat_map(|mock| mock.ready["workers"].as_array().unwrap()).collect();
        let tables: String = workers.iter().map(|worker| worker_table(worker, loads)).collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rankwise.toml");
        std::fs::write(
            &path,
            format!("{settings}\n[telemetry]\ninterval_ms = 10\nretry_max_ms = 50\n{tables}"),
        )
        .unwrap();
        let config = path.to_str().unwrap();
        let serve = Program::start(["serve", "--json", "--listen", "127.0.0.1:0", "--config", config]).await;
        let ranks = workers.iter().flat_map(|worker| ranks_of(worker)).collect();
        let block_size = u32::try_from(workers[0]["block_size"].as_u64().unwrap()).unwrap();
        let base = format!("http://{}", serve.ready["address"].as_str().unwrap());
        let client = Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
        Self { mocks: started, serve, _folder: folder, client, base, block_size, ranks }
    }

    /// Both kinds of program end with 0 when they are asked to.
    pub async fn stop(self) {
        assert_eq!(self.serve.terminate().await, Some(0));
        for mock in self.mocks {
            assert_eq!(mock.terminate().await, Some(0));
        }
    }

    /// Asks the service.
    pub async fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        answered(self.client.post(format!("{}{path}", self.base)).json(body)).await
    }

    pub async fn get(&self, url: &str) -> (u16, Value) {
        answered(self.client.get(url)).await
    }

    /// A completion by the worker, on the rank that `dispatch` adds to the request.
    pub async fn generate(
        &self,
        url: &str,
        prompt: &[u32],
        dispatch: impl FnOnce(RequestBuilder, &mut Value) -> RequestBuilder,
    ) -> (u16, Value) {
        let mut body = json!({"prompt": prompt, "max_tokens": 2});
        let request = dispatch(self.client.post(format!("{url}/v1/completions")), &mut body);
        answered(request.json(&body)).await
    }

    pub async fn fault(&self, rank: &Rank, mut fault: Value) {
        fault["dp_rank"] = rank.dp_rank.into();
        let asked = self.client.post(format!("{}/debug/fault", rank.url)).json(&fault);
        let (status, answer) = answered(asked).await;
        assert_eq!(status, 200, "{answer}");
    }

    /// What the engine says that its caches hold.
    pub async fn truth(&self, rank: &Rank) -> Truth {
        let (status, body) = self.get(&format!("{}/debug/blocks?dp_rank={}", rank.url, rank.dp_rank)).await;
        assert_eq!(status, 200, "{body}");
        Truth::read(&body)
    }

    pub async fn metrics(&self) -> String {
        self.client.get(format!("{}/metrics", self.base)).send().await.unwrap().text().await.unwrap()
    }

    /// Polls until `holds` says nothing; fails the test with the last that it said.
    pub async fn until<F: Future<Output = Result<(), String>>>(
        &self,
        what: &str,
        mut holds: impl FnMut() -> F,
    ) {
        let end = Instant::now() + PATIENCE;
        while let Err(why) = holds().await {
            assert!(Instant::now() < end, "waited in vain until {what}: {why}");
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until the service has applied every batch of every rank, and believes each one's view.
    pub async fn until_indexed(&self) {
        self.until("everything is indexed", async || self.indexed().await).await;
    }

    async fn indexed(&self) -> Result<(), String> {
        for rank in &self.ranks {
            let truth = self.truth(rank).await;
            let metrics = self.metrics().await;
            let value = |name: &str, more: &str| series(&metrics, name, rank, more);
            let applied = value("rankwise_last_sequence", "").map_or(0.0, |last| last + 1.0);
            if applied != truth.next_seq as f64 {
                return Err(format!("{rank:?} is at {applied} of {}", truth.next_seq));
            }
            if value("rankwise_trust", "state=\"live\"") != Some(1.0) && truth.next_seq > 0 {
                return Err(format!("{rank:?} is not live"));
            }
        }
        Ok(())
    }

    /// Waits until every rank's load is known, from a report younger than `since`, and nothing runs anywhere.
    pub async fn until_idle(&self, since: Instant) {
        self.until("all ranks are idle", async || self.idle(since).await).await;
    }

    async fn idle(&self, since: Instant) -> Result<(), String> {
        let (_, pools) = self.get(&format!("{}/loads", self.base)).await;
        let loads = pools[0]["loads"].as_array().cloned().unwrap_or_default();
        let is_idle = |load: &Value| {
            let young =
                load["age_ms"].as_u64().is_some_and(|age| u128::from(age) < since.elapsed().as_millis());
            young && load["decode_blocks"] == 0.0 && load["num_running_reqs"] == 0
        };
        match loads.len() == self.ranks.len() && loads.iter().all(is_idle) {
            true => Ok(()),
            false => Err(pools.to_string()),
        }
    }

    /// Device tokens of the prompt on each rank, as `/query` tells them.
    pub async fn reach(&self, prompt: &[u32]) -> BTreeMap<(String, u32), u64> {
        let (status, answer) =
            self.ask("/query", &json!({ "token_ids": prompt, "model_name": "mock" })).await;
        assert_eq!(status, 200, "{answer}");
        let of = |rank: &Rank| {
            let tokens = answer["instances"][&rank.worker]["dp"][rank.dp_rank.to_string()].as_u64();
            ((rank.worker.clone(), rank.dp_rank), tokens.unwrap_or(0))
        };
        self.ranks.iter().map(of).collect()
    }

    /// Waits until everything is indexed, and compares the index with each engine's own list: as many blocks, and
    /// each chain reaches as far as the engine's blocks do without a hole.
    pub async fn index_equals_truth(&self) {
        self.until_indexed().await;
        let metrics = self.metrics().await;
        for rank in &self.ranks {
            let truth = self.truth(rank).await;
            let blocks = series(&metrics, "rankwise_blocks", rank, "tier=\"device\"");
            assert_eq!(blocks, Some(truth.blocks.len() as f64), "{rank:?}");
            for chain in truth.chains() {
                let reach = self.reach(&chain).await[&(rank.worker.clone(), rank.dp_rank)];
                assert_eq!(reach, chain.len() as u64, "{rank:?}: {chain:?}");
            }
        }
    }
}

/// An engine's list of what it holds on the device.
pub struct Truth {
    pub next_seq: u64,
    /// By name: the parent, the tokens.
    pub blocks: BTreeMap<String, (Option<String>, Vec<u32>)>,
}

impl Truth {
    fn read(body: &Value) -> Self {
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let block = |block: &Value| {
            let tokens = serde_json::from_value(block["tokens"].clone()).unwrap();
            (text(&block["hash"]).unwrap(), (text(&block["parent"]), tokens))
        };
        Self {
            next_seq: body["next_seq"].as_u64().unwrap(),
            blocks: body["device"].as_array().unwrap().iter().map(block).collect(),
        }
    }

    /// The tokens of every chain that is held from its beginning, the longest ones only.
    pub fn chains(&self) -> Vec<Vec<u32>> {
        let parents: BTreeSet<&String> =
            self.blocks.values().filter_map(|(parent, _)| parent.as_ref()).collect();
        let leaves = self.blocks.keys().filter(|name| !parents.contains(name));
        leaves.filter_map(|leaf| self.chain(leaf)).collect()
    }

    /// `None` if a block before it is not held.
    fn chain(&self, leaf: &str) -> Option<Vec<u32>> {
        let mut blocks = Vec::new();
        let mut at = Some(leaf);
        while let Some(name) = at {
            let (parent, tokens) = self.blocks.get(name)?;
            blocks.push(tokens);
            at = parent.as_deref();
        }
        Some(blocks.into_iter().rev().flatten().copied().collect())
    }
}

/// The value of a rank's series in the service's metrics.
pub fn series(metrics: &str, name: &str, rank: &Rank, more: &str) -> Option<f64> {
    let worker = format!("worker=\"{}\"", rank.worker);
    let dp_rank = format!("dp_rank=\"{}\"", rank.dp_rank);
    let line = metrics.lines().find(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))
            && [&worker, &dp_rank, more].iter().all(|label| line.contains(*label))
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

async fn answered(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

fn ranks_of(worker: &Value) -> Vec<Rank> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let ranks = (0..).zip(worker["ranks"].as_array().unwrap());
    ranks
        .map(|(local, rank)| Rank {
            worker: text(&worker["worker"]),
            dp_rank: u32::try_from(rank["dp_rank"].as_u64().unwrap()).unwrap(),
            local,
            url: text(&worker["url"]),
        })
        .collect()
}

/// The worker in the service's configuration: every rank's endpoints by name.
fn worker_table(worker: &Value, loads: Loads) -> String {
    let text = |field: &str| worker[field].as_str().unwrap();
    let ranks = worker["ranks"].as_array().unwrap();
    let per_rank = |field: &str| -> String {
        let line = |rank: &Value| format!("{} = {}\n", rank["dp_rank"], rank[field]);
        ranks.iter().filter(|rank| rank[field].is_string()).map(line).collect()
    };
    let source = match loads {
        Loads::Http => format!("loads = \"{}\"\n", text("url")),
        Loads::Grpc => format!("loads = \"{}\"\n", text("grpc").replacen("http", "grpc", 1)),
        Loads::LoadStat | Loads::Nowhere => String::new(),
    };
    let mut table = format!(
        "[[workers]]\nid = \"{}\"\nmodel = \"{}\"\nblock_size = {}\nstart = {}\nsize = {}\nengine = \"{}\"\n\
         http_endpoint = \"{}\"\n{source}[workers.events_per_rank]\n{}[workers.replay_per_rank]\n{}",
        text("worker"),
        text("model"),
        worker["block_size"],
        ranks[0]["dp_rank"],
        ranks.len(),
        text("shape"),
        text("url"),
        per_rank("events"),
        per_rank("replay"),
    );
    if loads == Loads::LoadStat {
        table.push_str(&format!("[workers.load_stat_per_rank]\n{}", per_rank("load_stat")));
    }
    table
}

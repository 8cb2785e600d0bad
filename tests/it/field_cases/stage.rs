//! One case's product, with the clock, the connections and the publishers around it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rankwise::events::order::ReplayId;
use rankwise::ids::{Moment, RankKey, SourceId};
use rankwise::index::HybridRule;
use rankwise::indexer::{Action, Config, Indexer, Input, PoolView, RankStatus, View};
use rankwise::load::{BusyThreshold, LoadConfig};
use rankwise::routing::{Policy, Router, RouterConfig, RouterScratch};
use serde_json::Value;

use super::history::Request;
use super::reading::{Fields, Run, fail, not_runnable, text};
use super::stream::Publisher;

/// More turns than any settled state needs: a product that asks without end must not hang the runner.
const MOST_TURNS: usize = 100_000;

pub struct Stage {
    pub now: Moment,
    pub settings: Settings,
    pub indexer: Indexer,
    pub view: View,
    pub router: Router,
    pub scratch: RouterScratch,
    pub publishers: BTreeMap<RankKey, Publisher>,
    /// What the product listens to.
    pub links: BTreeMap<RankKey, SourceId>,
    /// Requests for history that nobody has answered yet.
    pub requests: VecDeque<Request>,
    pub cancelled: BTreeSet<(SourceId, ReplayId)>,
    /// All streams that ever were, so that what they counted does not go with them.
    pub statuses: BTreeMap<SourceId, Arc<RankStatus>>,
    actions: Vec<Action>,
}

/// The topic of each worker's events.
#[derive(Default)]
pub struct Topics {
    all: String,
    own: BTreeMap<String, String>,
}

impl Topics {
    /// `config.topic`: one for all workers, or a map by worker name; a worker that is not named has none.
    fn read(config: &Fields<'_>) -> Run<Self> {
        let mut topics = Self::default();
        match config.get("topic") {
            Some(Value::Object(own)) => {
                for (worker, topic) in own {
                    topics.own.insert(worker.clone(), text("topic", topic)?.to_owned());
                }
            }
            _ => topics.all = config.text("topic")?.unwrap_or_default().to_owned(),
        }
        Ok(topics)
    }

    pub fn of(&self, worker: &str) -> &str {
        self.own.get(worker).unwrap_or(&self.all)
    }
}

/// What a case's `config` says about all of its workers.
pub struct Settings {
    pub block_size: u64,
    pub replay: bool,
    pub topics: Topics,
    pub capacity_blocks: Option<u64>,
    pub engine: Option<String>,
}

impl Stage {
    /// Declares the workers of `config`; `steps` say who is not there from the beginning.
    pub fn set(config: &Value, steps: &[Value]) -> Run<Self> {
        let known = [
            "block_size",
            "overlap_weight",
            "workers",
            "replay",
            "topic",
            "capacity_blocks",
            "busy_threshold",
            "load_ttl_ms",
            "silence_grace_ms",
            "engine",
            "hybrid",
        ];
        let config = Fields::only("config", config, &known)?;
        let (indexer, view) = Indexer::new(product_config(&config)?);
        let mut stage = Self {
            now: Moment::default(),
            settings: Settings::read(&config)?,
            router: Router::new(view.clone(), router_config(&config)?),
            indexer,
            view,
            scratch: RouterScratch::seeded(1),
            publishers: BTreeMap::new(),
            links: BTreeMap::new(),
            requests: VecDeque::new(),
            cancelled: BTreeSet::new(),
            statuses: BTreeMap::new(),
            actions: Vec::new(),
        };
        let prelude = |op: &Value| *op == "replay_serves" || *op == "endpoint_down";
        for step in steps.iter().take_while(|step| prelude(&step["op"])) {
            if step["op"] == "endpoint_down" {
                stage.publisher(&Fields::of("endpoint_down", step)?.rank()?).up = false;
            }
        }
        for (worker, range) in config.object("workers")?.iter().flat_map(Fields::entries) {
            stage.declare_configured(worker, range)?;
        }
        let scripted =
            steps.iter().take_while(|step| prelude(&step["op"])).any(|step| step["op"] == "replay_serves");
        if !scripted {
            stage.settle()?;
        }
        Ok(stage)
    }

    /// Carries out one step.
    pub fn step(&mut self, step: &Value) -> Run {
        let op = Fields::of("step", step)?.need_text("op")?;
        match op {
            "declare" => self.declare(step),
            "withdraw" => self.withdraw(step),
            "event" => self.event(step),
            "batch" => self.batch(step),
            "raw" => self.raw(step),
            "publisher_restart" => self.publisher_restart(step),
            "endpoint_down" => self.endpoint_down(step),
            "endpoint_up" => self.endpoint_up(step),
            "replay_serves" => self.replay_serves(step),
            "raw_replay" => self.raw_replay(step),
            "advance" => self.advance(step),
            "load" => self.load(step),
            "churn" => self.churn(step),
            "query" => self.query(step),
            "score" => self.score(step),
            "score_many" => self.score_many(step),
            "score_live" => self.score_live(step),
            "admit" => self.admit(step),
            "expect_index" => self.expect_index(step),
            "expect_load" => self.expect_load(step),
            "expect_counters" => self.expect_counters(step),
            "expect_replay_requests" => self.expect_replay_requests(step),
            "expect_connection" => self.expect_connection(step),
            "expect_status" => self.expect_status(step),
            "expect_workers" => self.expect_workers(step),
            #[cfg(feature = "io")]
            "http" => self.http(step),
            #[cfg(feature = "io")]
            "expect_metrics" => self.expect_metrics(step),
            "dispatch_rejected" => self.dispatch_rejected(step),
            "deep_chain" => self.deep_chain(step),
            other => not_runnable(other),
        }
    }

    /// Until nothing is asked any more and nothing is due at this moment.
    pub fn settle(&mut self) -> Run {
        for _ in 0..MOST_TURNS {
            if let Some(request) = self.requests.pop_front() {
                self.serve(&request)?;
                continue;
            }
            if self.indexer.next_deadline().is_none_or(|at| at > self.now) {
                return Ok(());
            }
            self.feed(Input::Tick)?;
        }
        fail("the product does not come to rest")
    }

    fn advance(&mut self, step: &Value) -> Run {
        let ms = Fields::only("advance", step, &["ms"])?.need_count("ms")?;
        let until = self.now + Duration::from_millis(ms);
        for _ in 0..MOST_TURNS {
            self.settle()?;
            match self.indexer.next_deadline().filter(|at| *at <= until) {
                Some(at) => self.now = at,
                None => {
                    self.now = until;
                    return self.refuse_again();
                }
            }
        }
        fail("the product's deadlines do not end")
    }

    /// The product's only door.
    pub fn feed(&mut self, input: Input<'_>) -> Run {
        self.indexer.handle(self.now, input, &mut self.actions);
        self.obey(false)
    }

    /// The same for an answer to what was asked at a connect.
    pub fn feed_at_connect(&mut self, input: Input<'_>) -> Run {
        self.indexer.handle(self.now, input, &mut self.actions);
        self.obey(true)
    }

    /// The same for a connection that has come about; what it asks for is asked at the connect.
    pub fn connect(&mut self, source: SourceId) -> Run {
        self.indexer.handle(self.now, Input::Connected { source }, &mut self.actions);
        self.obey(true)
    }

    /// The product's list of things to do, for declarations.
    pub fn with_actions<T>(&mut self, call: impl FnOnce(&mut Indexer, Moment, &mut Vec<Action>) -> T) -> T {
        call(&mut self.indexer, self.now, &mut self.actions)
    }

    /// Does what the product asks to be done.
    pub fn obey(&mut self, at_connect: bool) -> Run {
        let (mut fresh, mut answers) = (Vec::new(), Vec::new());
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Subscribe { source, rank, .. } => {
                    if self.links.insert(rank.clone(), source).is_some() {
                        return fail(format!("a second connection to {rank}"));
                    }
                    fresh.push((source, rank));
                }
                Action::Unsubscribe { source } => self.hang_up(source)?,
                Action::AskReplay { source, request, from, .. } => {
                    let Some(rank) = self.rank_of(source) else { return fail("history of nobody is asked") };
                    self.requests.push_back(Request { source, rank, id: request, from: from.0, at_connect });
                }
                Action::CancelReplay { source, request } => {
                    self.cancelled.insert((source, request));
                    self.requests.retain(|asked| (asked.source, asked.id) != (source, request));
                }
                // Whoever is there takes a second connection.
                Action::TryConnection { source, request, .. } => answers.push((source, Some(request))),
                Action::Reconnect { source } => answers.push((source, None)),
                _ => return fail(format!("an action that the runner cannot carry out: {action:?}")),
            }
        }
        self.note_statuses();
        for (source, rank) in fresh {
            if self.publisher(&rank).up {
                self.connect(source)?;
                self.publisher(&rank).met = true;
            }
        }
        for (source, tried) in answers {
            let Some(rank) = self.rank_of(source) else { continue };
            let reached = self.publisher(&rank).up;
            if let Some(request) = tried {
                self.feed(Input::Tried { source, request, reached })?;
                continue;
            }
            self.feed(Input::Disconnected { source })?;
            if reached {
                self.connect(source)?;
            }
        }
        Ok(())
    }

    fn hang_up(&mut self, source: SourceId) -> Run {
        let Some(rank) = self.rank_of(source) else { return fail("a stream is ended that never was") };
        self.links.remove(&rank);
        self.requests.retain(|asked| asked.source != source);
        let publisher = self.publisher(&rank);
        // Whoever is declared in its place is another publisher, and is met for the first time.
        publisher.sent.clear();
        publisher.met = false;
        Ok(())
    }

    fn note_statuses(&mut self) {
        for pool in self.view.fleet().pools() {
            for (_, rank) in pool.ranks() {
                self.statuses.entry(rank.source).or_insert_with(|| Arc::clone(&rank.status));
            }
        }
    }

    fn rank_of(&self, source: SourceId) -> Option<RankKey> {
        self.links.iter().find(|(_, linked)| **linked == source).map(|(rank, _)| rank.clone())
    }

    pub fn publisher(&mut self, rank: &RankKey) -> &mut Publisher {
        self.publishers.entry(rank.clone()).or_default()
    }

    /// The case's pool; there is none while no worker is declared.
    pub fn pool(&self) -> Option<Arc<PoolView>> {
        self.view.fleet().only_pool().cloned()
    }
}

impl Settings {
    fn read(config: &Fields<'_>) -> Run<Self> {
        let engine = config.text("engine")?;
        if let Some(engine) = engine.filter(|engine| !["vllm", "sglang", "trtllm"].contains(engine)) {
            return not_runnable(format!("config with engine {engine}"));
        }
        Ok(Self {
            block_size: config.need_count("block_size")?,
            replay: config.flag("replay")?.unwrap_or(false),
            topics: Topics::read(config)?,
            capacity_blocks: config.count("capacity_blocks")?,
            engine: engine.map(str::to_owned),
        })
    }
}

fn product_config(config: &Fields<'_>) -> Run<Config> {
    let mut product = Config::default();
    if let Some(ms) = config.count("load_ttl_ms")? {
        product.load = LoadConfig { ttl: Duration::from_millis(ms), ..LoadConfig::default() };
    }
    if let Some(ms) = config.count("silence_grace_ms")? {
        product.silence_grace = Duration::from_millis(ms);
    }
    Ok(product)
}

fn router_config(config: &Fields<'_>) -> Run<RouterConfig> {
    let busy_threshold = match config.number("busy_threshold")? {
        Some(share) => match BusyThreshold::new(share) {
            Some(threshold) => Some(threshold),
            None => return fail(format!("no threshold: {share}")),
        },
        None => None,
    };
    let hybrid = match config.text("hybrid")? {
        None | Some("joint") => HybridRule::Joint,
        Some("full_attention") => HybridRule::FullAttention,
        Some(other) => return not_runnable(format!("config with hybrid {other}")),
    };
    let policy = policy(config.number("overlap_weight")?);
    Ok(RouterConfig { policy, busy_threshold, hybrid, ..RouterConfig::default() })
}

/// The cases' formula: the request's own blocks are not counted, and overlap is what lies on the device.
pub fn policy(overlap_weight: Option<f64>) -> Policy {
    Policy {
        overlap_weight: overlap_weight.unwrap_or(1.0),
        decode_counts_request: false,
        host_cache_hit_weight: 0.0,
        disk_cache_hit_weight: 0.0,
        ..Policy::default()
    }
}

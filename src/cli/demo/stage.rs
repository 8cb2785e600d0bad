//! A mock fleet and the service that listens to it, over real ports.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rankwise::block::BlockSize;
use rankwise::fleet::{Endpoints, EngineStyle, EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::{DpRank, RankKey};
use rankwise::indexer::{PoolView, RankView};
use rankwise::ingest::NodeConfig;
use rankwise::load::{RankLoadView, WorkerUrl};
use rankwise::mock::server::{Fleet, FleetConfig, WorkerAddress};
use rankwise::mock::{EngineConfig, HashSeed, Timing};
use rankwise::routing::RouterConfig;
use rankwise::service::ServiceConfig;
use rankwise::telemetry::Binding;
use rankwise::trust::Trust;
use tokio::time::{Instant, sleep};

use super::super::running::{Running, Telemetry};

/// The model that everybody serves.
pub const MODEL: &str = "mock";

/// How long a fleet may take to be known to the service.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often engines are asked for their load. Requests here last tenths of a second, so the usual second would
/// miss most of them; what was reserved since the last answer is counted by the service itself.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// What a stage is made of.
#[derive(Clone, Copy, Debug)]
pub struct StageConfig<'a> {
    pub workers: u32,
    pub ranks: u32,
    pub seed: u64,
    pub listen: &'a str,
}

/// A rank, and where its worker takes requests.
#[derive(Clone, Debug)]
pub struct Target {
    pub rank: RankKey,
    /// Its number within its worker, which the engine wants to hear.
    pub local: u32,
    pub url: String,
}

/// Engines and service.
pub struct Stage {
    fleet: Fleet,
    running: Running,
    pub targets: Vec<Target>,
}

/// What the service knows of one rank.
#[derive(Clone, Debug)]
pub struct RankNow {
    pub trust: Trust,
    /// Blocks on its device, as indexed.
    pub blocks: u64,
    pub load: RankLoadView,
}

impl Stage {
    /// Starts both, and waits until the service has every rank's history and load.
    ///
    /// # Errors
    /// Ports that cannot be bound, and ranks that do not get ready.
    pub async fn start(config: &StageConfig<'_>) -> Result<Self> {
        let fleet = Fleet::start(fleet_config(config)).await.context("cannot start the mock engines")?;
        let service = ServiceConfig { seed: Some(config.seed), ..ServiceConfig::default() };
        let node = NodeConfig::default();
        let mut running = Running::start(config.listen, node, RouterConfig::default(), service).await?;
        let mut telemetry = Telemetry::default();
        telemetry.config.probe.interval = ASK_EVERY;
        let mut targets = Vec::new();
        for worker in fleet.workers() {
            running.declare(spec(worker)?).await?;
            let url = WorkerUrl::parse(&worker.url).context("the mock worker's own URL")?;
            telemetry.asked.push(Binding { worker: worker.worker.as_str().into(), url });
            targets.extend((0..).zip(&worker.ranks).map(|(local, rank)| Target {
                rank: RankKey::new(worker.worker.as_str(), rank.dp_rank),
                local,
                url: worker.url.clone(),
            }));
        }
        running.watch_loads(telemetry)?;
        let stage = Self { fleet, running, targets };
        stage.ready().await?;
        Ok(stage)
    }

    /// Where the service is asked.
    pub fn address(&self) -> SocketAddr {
        self.running.address()
    }

    /// What the service knows of each target, in their order; `None` if it is not declared.
    pub fn ranks_now(&self) -> Vec<Option<RankNow>> {
        let now = self.running.control().now();
        let fleet = self.running.view().fleet();
        let look = |target: &Target| {
            let pool = fleet.pool_of(&target.rank.worker)?;
            let rank = rank_view(pool, &target.rank)?;
            let loads = self.running.view().loads().lock();
            Some(RankNow {
                trust: rank.status.trust(),
                blocks: pool.index.tree_size(rank.slot).unwrap_or_default(),
                load: loads.load(now, &target.rank, pool.block_size, None),
            })
        };
        self.targets.iter().map(look).collect()
    }

    async fn ready(&self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        loop {
            let ranks = self.ranks_now();
            let is_ready = |now: &Option<RankNow>| {
                now.as_ref().is_some_and(|now| now.trust == Trust::Live && now.load.decode_blocks().is_some())
            };
            if ranks.iter().all(is_ready) {
                return Ok(());
            }
            if Instant::now() > end {
                let waiting = self.targets.iter().zip(&ranks).filter(|(_, now)| !is_ready(now));
                let names: Vec<String> = waiting.map(|(target, _)| target.rank.to_string()).collect();
                bail!("the service does not know {} after {PATIENCE:?}", names.join(", "));
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Ends both.
    ///
    /// # Errors
    /// Those of the service's HTTP.
    pub async fn close(self) -> Result<()> {
        let stopped = self.running.stop().await;
        self.fleet.shutdown().await;
        stopped
    }
}

fn rank_view<'p>(pool: &'p Arc<PoolView>, rank: &RankKey) -> Option<&'p RankView> {
    pool.ranks().map(|(_, view)| view).find(|view| view.plan.rank == *rank)
}

/// Engines that hold some seven conversations each, a quarter of those that the default traffic keeps open: a
/// conversation that goes everywhere is soon nowhere.
fn fleet_config(config: &StageConfig<'_>) -> FleetConfig {
    let engine = EngineConfig {
        blocks: 512,
        max_running: 32,
        max_model_len: 4_096,
        hash_seed: HashSeed::PerProcess(config.seed),
        timing: Timing {
            prefill_tokens_per_second: 8_000.0,
            decode_step: Duration::from_millis(5),
            step_overhead: Duration::from_millis(1),
            speed: 1.0,
        },
        ..EngineConfig::default()
    };
    FleetConfig {
        engine,
        model: MODEL.to_owned(),
        workers: config.workers,
        ranks: config.ranks,
        ..FleetConfig::default()
    }
}

fn spec(worker: &WorkerAddress) -> Result<WorkerSpec> {
    let block_size = BlockSize::new(worker.block_size).context("the mock worker has no block size")?;
    let start = worker.ranks.first().context("the mock worker has no ranks")?.dp_rank;
    let ranks = Ranks::range(start, u32::try_from(worker.ranks.len())?)?;
    let at = |of: fn(&rankwise::mock::server::RankAddress) -> &String| {
        Endpoints::per_rank(worker.ranks.iter().map(|rank| (DpRank(rank.dp_rank), of(rank).clone())))
    };
    let events = EventsFrom::Zmq {
        endpoints: at(|rank| &rank.events),
        replay: Some(at(|rank| &rank.replay)),
        topic: String::new(),
    };
    let pool = PoolKey::new(MODEL, None);
    let mut spec = WorkerSpec::new(worker.worker.as_str(), pool, block_size, ranks).events(events);
    spec.http_endpoint = Some(worker.url.clone());
    spec.engine = EngineStyle::Vllm;
    Ok(spec)
}

//! A mock fleet and a node that listens to it, in this process, joined by nothing but ports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rankwise::block::{BlockHash, BlockSize};
use rankwise::fleet::{Endpoints, EngineStyle, EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::DpRank;
use rankwise::indexer::{Config, PoolView, RankReport, RankView};
use rankwise::ingest::{DriverConfig, Node, NodeConfig};
use rankwise::mock::server::{Blocks, Fleet, FleetConfig, RankHandle, WorkerAddress};
use rankwise::mock::{EngineConfig, HeldBlock, Shape, Timing};
use rankwise::routing::{Overlaps, Prompt};
use rankwise::trust::Trust;

/// Longer than anything here takes on a loaded machine; nothing waits for it to pass.
const PATIENCE: Duration = Duration::from_secs(60);

/// Engines so fast that nobody waits for them.
pub fn fast(shape: Shape) -> EngineConfig {
    EngineConfig { shape, timing: Timing { speed: 100.0, ..Timing::default() }, ..EngineConfig::default() }
}

/// A fleet and who listens to it.
pub struct Watched {
    pub fleet: Fleet,
    node: Node,
}

impl Watched {
    pub async fn start(config: FleetConfig) -> Self {
        let indexer = Config { replay_timeout: Duration::from_millis(500), ..Config::default() };
        let fleet = Fleet::start(config).await.unwrap();
        let node = Node::start(NodeConfig { indexer, driver: DriverConfig::default() }).unwrap();
        for worker in fleet.workers() {
            node.control().declare(spec(worker)).await.unwrap().unwrap();
        }
        Self { fleet, node }
    }

    fn pool(&self) -> Arc<PoolView> {
        self.node.view().fleet().only_pool().unwrap().clone()
    }

    /// Every rank: how it is asked, and what the index knows of it.
    fn each<'p>(&self, pool: &'p PoolView) -> Vec<(RankHandle, &'p RankView)> {
        let view = |worker: &WorkerAddress, rank: &RankHandle| {
            let worker = pool.worker(&worker.worker.as_str().into()).unwrap();
            worker.ranks.iter().find(|view| view.plan.rank.dp_rank == rank.dp_rank()).unwrap()
        };
        self.fleet.ranks().map(|(worker, rank)| (rank.clone(), view(worker, rank))).collect()
    }

    pub fn rank(&self, dp_rank: u32) -> &RankHandle {
        self.fleet.rank(0, DpRank(dp_rank)).unwrap()
    }

    pub fn trust(&self, dp_rank: u32) -> Trust {
        self.view(dp_rank, |view| view.status.trust())
    }

    pub fn report(&self, dp_rank: u32) -> RankReport {
        self.view(dp_rank, |view| view.status.report())
    }

    fn view<T>(&self, dp_rank: u32, of: impl FnOnce(&RankView) -> T) -> T {
        let pool = self.pool();
        of(pool.workers[0].ranks.iter().find(|rank| rank.plan.rank.dp_rank.0 == dp_rank).unwrap())
    }

    /// Device blocks of a prompt on a rank of the first worker.
    pub fn reach(&self, dp_rank: u32, prompt: &[u32]) -> u32 {
        let pool = self.pool();
        let slot = self.view(dp_rank, |view| view.slot);
        let mut overlaps = Overlaps::default();
        overlaps.find(&pool, &Prompt::tokens(prompt), Default::default());
        overlaps.of(slot).map_or(0, |found| found.device)
    }

    /// Polls until `holds`; fails the test with the ranks' states.
    pub async fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !holds(self) {
            let pool = self.pool();
            let states: Vec<_> = self
                .each(&pool)
                .iter()
                .map(|(_, view)| (view.status.trust(), view.status.report()))
                .collect();
            assert!(Instant::now() < end, "waited in vain until {what}: {states:#?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Generates at `rank`, to the end.
    pub async fn generate(&self, rank: u32, prompt: &[u32], max_tokens: u32) {
        let answer = self.rank(rank).generate(prompt.to_vec(), max_tokens).await.unwrap();
        answer.whole().await.unwrap();
    }

    /// Waits until each rank's last batch is applied.
    pub async fn until_indexed(&self) {
        let pool = self.pool();
        for (rank, view) in self.each(&pool) {
            let next = rank.blocks().await.unwrap().next_seq;
            self.until(&format!("rank {} is at {next}", rank.dp_rank()), |_| {
                view.status.report().watermark.map_or(0, |last| last.0 + 1) == next.0
            })
            .await;
        }
    }

    /// Waits until everything is indexed; then the index holds of every rank what the rank itself says that it
    /// holds: as many blocks, and every chain of them as far as it has no hole. Blocks in all.
    pub async fn index_equals_truth(&self) -> usize {
        self.until_indexed().await;
        let pool = self.pool();
        let mut overlaps = Overlaps::default();
        let mut all = 0;
        for (rank, view) in self.each(&pool) {
            let Blocks { truth, .. } = rank.blocks().await.unwrap();
            let indexed = pool.index.tree_size(view.slot).unwrap();
            assert_eq!(indexed, truth.device.len() as u64, "blocks on {:?}", view.plan.rank);
            for chain in chains(&truth.device) {
                overlaps.find(&pool, &Prompt::tokens(&chain), Default::default());
                let reach = overlaps.of(view.slot).map_or(0, |found| found.device);
                let blocks = chain.len() / pool.block_size.as_usize();
                assert_eq!(reach as usize, blocks, "{:?}: {chain:?}", view.plan.rank);
            }
            all += truth.device.len();
        }
        all
    }
}

/// The tokens of every chain that is held from its beginning up to a block that none follows.
fn chains(held: &[HeldBlock]) -> Vec<Vec<u32>> {
    let by_name: BTreeMap<&BlockHash, &HeldBlock> = held.iter().map(|block| (&block.hash, block)).collect();
    let parents: BTreeSet<&BlockHash> = held.iter().filter_map(|block| block.parent.as_ref()).collect();
    let chain = |leaf: &&HeldBlock| {
        let mut blocks = vec![&leaf.tokens];
        let mut parent = leaf.parent.as_ref();
        while let Some(name) = parent {
            let block = by_name.get(name)?;
            blocks.push(&block.tokens);
            parent = block.parent.as_ref();
        }
        Some(blocks.into_iter().rev().flat_map(|tokens| tokens.iter().copied()).collect())
    };
    let leaves: Vec<&HeldBlock> = held.iter().filter(|block| !parents.contains(&block.hash)).collect();
    leaves.iter().filter_map(chain).collect()
}

/// The worker as an operator would declare it.
fn spec(worker: &WorkerAddress) -> WorkerSpec {
    let endpoints = |of: fn(&rankwise::mock::server::RankAddress) -> &String| {
        Endpoints::per_rank(worker.ranks.iter().map(|rank| (DpRank(rank.dp_rank), of(rank).clone())))
    };
    let events = EventsFrom::Zmq {
        endpoints: endpoints(|rank| &rank.events),
        replay: Some(endpoints(|rank| &rank.replay)),
        topic: String::new(),
    };
    let size = u32::try_from(worker.ranks.len()).unwrap();
    let ranks = Ranks::range(worker.ranks[0].dp_rank, size).unwrap();
    let block_size = BlockSize::new(worker.block_size).unwrap();
    let spec = WorkerSpec::new(worker.worker.as_str(), PoolKey::new(&worker.model, None), block_size, ranks);
    let engine = if worker.shape == "vllm" { EngineStyle::Vllm } else { EngineStyle::Sglang };
    WorkerSpec { engine, ..spec.events(events) }
}

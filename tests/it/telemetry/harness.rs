//! A node with declared ranks, and what its load table says of them.

use std::sync::Arc;
use std::time::Duration;

use rankwise::block::BlockSize;
use rankwise::fleet::{EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::RankKey;
use rankwise::ingest::{Node, NodeConfig};
use rankwise::load::{LoadCounts, ProbeConfig, RankLoad, WorkerUrl};
use rankwise::telemetry::{Binding, FeedConfig, FeedStatus, Feeds, FetchConfig};
use tokio::runtime::Handle;

/// Nothing in a test may wait for a second question: a source that is asked again says so.
pub const NEVER: Duration = Duration::from_secs(3600);

/// Asks often, gives up soon, and remembers for longer than a test lasts.
pub fn quick() -> FeedConfig {
    let millis = Duration::from_millis;
    FeedConfig {
        probe: ProbeConfig {
            interval: millis(20),
            retry_min: millis(10),
            retry_max: millis(40),
            remember: NEVER,
        },
        fetch: FetchConfig { timeout: millis(300), ..FetchConfig::default() },
        fleet_check: millis(10),
    }
}

/// A node and what asks for its load.
pub struct Site {
    pub node: Node,
    pub feeds: Option<Feeds>,
}

impl Site {
    /// A node with these workers, `(id, first rank, ranks)`, which nobody feeds yet.
    pub async fn of(workers: &[(&str, u32, u32)]) -> Self {
        let site = Self { node: Node::start(NodeConfig::default()).unwrap(), feeds: None };
        for &(id, start, size) in workers {
            site.declare(id, start, size).await;
        }
        site
    }

    pub async fn declare(&self, id: &str, start: u32, size: u32) {
        self.declare_with(id, start, size, |_| ()).await;
    }

    pub async fn declare_with(&self, id: &str, start: u32, size: u32, more: impl FnOnce(&mut WorkerSpec)) {
        let ranks = Ranks::range(start, size).unwrap();
        let block_size = BlockSize::new(16).unwrap();
        let mut spec =
            WorkerSpec::new(id, PoolKey::new("m", None), block_size, ranks).events(EventsFrom::None);
        more(&mut spec);
        self.node.control().declare(spec).await.unwrap().unwrap();
    }

    pub async fn withdraw(&self, id: &str) {
        self.node.control().withdraw(id.into()).await.unwrap().unwrap();
    }

    /// The same with these workers asked at these URLs.
    pub fn asking(mut self, urls: &[(&str, String)], config: &FeedConfig) -> Self {
        let bindings = urls
            .iter()
            .map(|(worker, url)| Binding { worker: (*worker).into(), url: WorkerUrl::parse(url).unwrap() });
        let control = self.node.control();
        let now = move || control.now();
        let feeds = Feeds::start(&Handle::current(), self.node.view(), now, bindings, config, |_| ());
        self.feeds = Some(feeds.unwrap());
        self
    }

    /// The newest figures of a rank.
    pub fn load(&self, worker: &str, rank: u32) -> Option<RankLoad> {
        let now = self.node.control().now();
        self.node.view().loads().lock().newest(now, &RankKey::new(worker, rank)).map(|(load, _)| *load)
    }

    /// Running requests by rank.
    pub fn running(&self, worker: &str, ranks: impl IntoIterator<Item = u32>) -> Vec<Option<u64>> {
        ranks.into_iter().map(|rank| self.load(worker, rank).and_then(|load| load.num_running_reqs)).collect()
    }

    /// A worker's own figures.
    pub fn aggregate(&self, worker: &str) -> Option<RankLoad> {
        let now = self.node.control().now();
        self.node.view().loads().lock().aggregate(now, &worker.into()).map(|view| view.load)
    }

    pub fn counts(&self) -> LoadCounts {
        self.node.view().loads().lock().counts()
    }

    /// The status of the only base URL.
    pub fn status(&self) -> FeedStatus {
        let mut all = self.feeds.as_ref().unwrap().status();
        assert_eq!(all.len(), 1);
        all.remove(0)
    }

    /// How many fetches have come to `outcome`.
    pub fn outcomes(&self, outcome: &str) -> u64 {
        self.status().outcomes.get(outcome).copied().unwrap_or(0)
    }
}

/// A shared text, for conditions that outlive their test's borrow.
pub type Shared<T> = Arc<parking_lot::Mutex<T>>;

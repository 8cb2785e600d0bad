//! Made-up ranks on real ports: each publishes its own stream, as an engine's rank does.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use futures::future::{join_all, try_join_all};
use rankwise::ids::EventSeq;
use rankwise::ingest::{Publisher, PublisherConfig};
use rankwise::lab::traffic::{Block, PoolBatch, Traffic, TrafficConfig};
use rankwise::lab::wire::payload;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use super::target::Target;

/// The model that all made-up ranks serve, so that they never mix with a running service's own.
pub const MODEL: &str = "rankwise-bench";

/// Ranks of one worker, as in a node of eight GPUs.
const RANKS_PER_WORKER: u32 = 8;

/// A subscriber comes within a second or two; a loaded machine may take a while.
const PATIENCE: Duration = Duration::from_secs(60);

/// Publishers and the traffic that they announce.
pub struct Fleet {
    traffic: Traffic,
    publishers: Vec<Publisher>,
    next_seq: Vec<u64>,
    /// The conversation of each rank's last batch.
    last: Vec<Option<usize>>,
}

/// A batch on its way.
pub struct Outgoing {
    /// What it says.
    pub batch: PoolBatch,
    seq: EventSeq,
    payload: Bytes,
}

impl Fleet {
    /// Binds one port per rank, chosen by the system, on the runtime that it is called on.
    ///
    /// # Errors
    /// Ports that cannot be bound.
    pub async fn bind(config: TrafficConfig, host: &str) -> Result<Self> {
        // No replay endpoint: these streams begin at 0 and lose nothing, so there is no history to ask for.
        let publisher = PublisherConfig { buffer: 0, ..PublisherConfig::default() };
        let endpoint = format!("tcp://{host}:0");
        let binding = (0..config.ranks).map(|_| Publisher::bind(&endpoint, None, publisher.clone()));
        let publishers = try_join_all(binding).await.context("cannot publish the made-up ranks")?;
        let ranks = publishers.len();
        let traffic = Traffic::new(config);
        Ok(Self { traffic, publishers, next_seq: vec![0; ranks], last: vec![None; ranks] })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.traffic.config().ranks
    }

    /// What the ranks hold.
    pub fn traffic(&mut self) -> &mut Traffic {
        &mut self.traffic
    }

    /// The worker of a rank.
    pub fn worker(rank: u32) -> String {
        format!("{MODEL}-{}", rank / RANKS_PER_WORKER)
    }

    fn workers(&self) -> impl Iterator<Item = (String, std::ops::Range<u32>)> + use<> {
        let ranks = self.ranks();
        (0..ranks)
            .step_by(RANKS_PER_WORKER as usize)
            .map(move |first| (Self::worker(first), first..(first + RANKS_PER_WORKER).min(ranks)))
    }

    /// Declares every rank at the service and waits until it listens to all of them.
    ///
    /// # Errors
    /// A refusal, or a service that does not come.
    pub async fn register(&self, service: &Target) -> Result<()> {
        let config = self.traffic.config();
        for (worker, ranks) in self.workers() {
            let endpoints: BTreeMap<u32, &str> =
                ranks.clone().map(|rank| (rank, self.publishers[rank as usize].events_endpoint())).collect();
            let body = json!({
                "worker_id": worker, "model_name": MODEL, "block_size": config.block_size.get(),
                "data_parallel_start_rank": ranks.start, "data_parallel_size": ranks.len(),
                "kv_events_endpoints": endpoints, "endpoint": "http://127.0.0.1:9", "engine": "vllm",
                "capacity": { "scope": "per_rank", "blocks": config.blocks_per_rank },
            });
            service.post::<Value>("/workers", &body).await?;
        }
        let subscribed = join_all(self.publishers.iter().map(|publisher| publisher.subscribed(1)));
        if timeout(PATIENCE, subscribed).await.is_err() {
            bail!(
                "the service has not subscribed to every rank within {PATIENCE:?}: can it reach this host?"
            );
        }
        Ok(())
    }

    /// Publishes until every cache has been full, as fast as it is taken.
    ///
    /// # Errors
    /// A publisher that has ended.
    pub async fn fill(&mut self) -> Result<()> {
        while !self.traffic.is_warm() {
            for rank in 0..self.ranks() {
                let outgoing = self.next_batch(rank);
                self.publish(&outgoing).await?;
            }
        }
        Ok(())
    }

    /// The next batch of a rank.
    pub fn next_batch(&mut self, rank: u32) -> Outgoing {
        let batch = self.traffic.step(rank);
        let place = rank as usize;
        self.last[place] = Some(batch.conversation);
        let seq = EventSeq(self.next_seq[place]);
        self.next_seq[place] += 1;
        let payload = Bytes::from(payload(&batch, self.traffic.config().block_size, seq.0 as f64));
        Outgoing { batch, seq, payload }
    }

    /// Sends it.
    ///
    /// # Errors
    /// A publisher that has ended.
    pub async fn publish(&self, outgoing: &Outgoing) -> Result<()> {
        let publisher = &self.publishers[outgoing.batch.rank as usize];
        publisher.publish(outgoing.seq, outgoing.payload.clone()).await?;
        Ok(())
    }

    /// Waits until the service shows each rank's newest blocks.
    ///
    /// # Errors
    /// When they do not come.
    pub async fn settled(&self, service: &Target) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        for rank in 0..self.ranks() {
            let Some(conversation) = self.last[rank as usize] else { continue };
            let blocks = self.traffic.conversation(conversation);
            while self.shown(service, rank, blocks).await? < blocks.len() as u64 {
                if Instant::now() > end {
                    bail!("the service does not show the newest blocks of rank {rank} after {PATIENCE:?}");
                }
                sleep(Duration::from_millis(20)).await;
            }
        }
        Ok(())
    }

    /// How many of these blocks the service says that a rank holds.
    async fn shown(&self, service: &Target, rank: u32, blocks: &[Block]) -> Result<u64> {
        #[derive(Deserialize)]
        struct Shown {
            ranks: Vec<ShownRank>,
        }
        #[derive(Deserialize)]
        struct ShownRank {
            device: u64,
        }
        let body = json!({
            "worker": Self::worker(rank), "dp_rank": rank, "block_hashes": self.traffic.names(rank, blocks),
        });
        let shown: Shown = service.post("/query_by_hash", &body).await?;
        let tokens = shown.ranks.first().map_or(0, |rank| rank.device);
        Ok(tokens / u64::from(self.traffic.config().block_size.get()))
    }

    /// Reports a load for every rank: uneven ones, so that a choice has something to weigh.
    ///
    /// # Errors
    /// A service that refuses.
    pub async fn report_loads(&self, service: &Target) -> Result<()> {
        for body in self.load_reports() {
            service.post::<Value>("/loads", &body).await?;
        }
        Ok(())
    }

    /// The bodies of these reports, for whoever repeats them.
    pub fn load_reports(&self) -> Vec<Value> {
        let report = |(worker, ranks): (String, std::ops::Range<u32>)| {
            let of = ranks.map(|rank| (rank.to_string(), json!({ "decode_blocks": 40 + rank % 7 * 10 })));
            json!({ "model_name": MODEL, "worker_id": worker, "ranks": of.collect::<serde_json::Map<_, _>>() })
        };
        self.workers().map(report).collect()
    }

    /// Withdraws the ranks from the service and closes their ports.
    pub async fn close(self, service: &Target) {
        for (worker, _) in self.workers() {
            // A service that has gone has forgotten them too.
            let _ = service.delete(&format!("/workers/{worker}")).await;
        }
    }
}

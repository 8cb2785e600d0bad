//! A running node against libzmq publishers: sockets, order, index and trust together.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use rankwise::block::BlockSize;
use rankwise::fleet::{Endpoints, EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::DpRank;
use rankwise::indexer::{Config, PoolView, RankReport};
use rankwise::ingest::{DriverConfig, Node, NodeConfig, ReplayConfig};
use rankwise::routing::{Overlaps, Prompt};
use rankwise::trust::{MayErr, Trust};
use serde_json::{Value, json};

use crate::peer::Peer;

macro_rules! peer_or_skip {
    () => {
        match Peer::start() {
            Some(peer) => peer,
            None => return,
        }
    };
}

/// Long enough for a loaded machine; every wait ends as soon as what it waits for is there.
const PATIENCE: Duration = Duration::from_secs(60);

struct Watched {
    node: Node,
    ranks: u32,
}

impl Watched {
    /// A node that listens to one worker `w1` with a rank per pair of endpoints (events, replay or empty).
    async fn of(endpoints: &[(String, String)]) -> Self {
        let indexer = Config {
            replay_timeout: Duration::from_millis(1_500),
            silence_grace: Duration::from_secs(2),
            ..Config::default()
        };
        let replay = ReplayConfig { idle_timeout: Duration::from_secs(20), ..ReplayConfig::default() };
        let driver = DriverConfig { replay, ..DriverConfig::default() };
        let node = Node::start(NodeConfig { indexer, driver }).unwrap();
        let ranks = u32::try_from(endpoints.len()).unwrap();
        let of = |pick: fn(&(String, String)) -> &String| {
            let given = (0..).zip(endpoints).filter(move |(_, pair)| !pick(pair).is_empty());
            Endpoints::per_rank(given.map(move |(rank, pair)| (DpRank(rank), pick(pair).clone())))
        };
        let replay = of(|pair| &pair.1);
        let events = EventsFrom::Zmq {
            endpoints: of(|pair| &pair.0),
            replay: (!replay.per_rank.is_empty()).then_some(replay),
            topic: String::new(),
        };
        let spec = WorkerSpec::new(
            "w1",
            PoolKey::new("m", None),
            BlockSize::new(4).unwrap(),
            Ranks::range(0, ranks).unwrap(),
        )
        .events(events);
        node.control().declare(spec).await.unwrap().unwrap();
        Self { node, ranks }
    }

    fn pool(&self) -> Arc<PoolView> {
        self.node.view().fleet().only_pool().unwrap().clone()
    }

    fn trust(&self, rank: usize) -> Trust {
        self.pool().workers[0].ranks[rank].status.trust()
    }

    fn report(&self, rank: usize) -> RankReport {
        self.pool().workers[0].ranks[rank].status.report()
    }

    /// Device blocks of a prompt that each rank holds.
    fn overlap(&self, blocks: &[u32]) -> Vec<u32> {
        let pool = self.pool();
        let tokens = tokens(blocks);
        let mut overlaps = Overlaps::default();
        overlaps.find(&pool, &Prompt::tokens(&tokens), Default::default());
        let ranks = &pool.workers[0].ranks;
        assert_eq!(ranks.len(), self.ranks as usize);
        ranks.iter().map(|rank| overlaps.of(rank.slot).map_or(0, |found| found.device)).collect()
    }

    async fn until(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !holds(self) {
            let states: Vec<_> =
                (0..self.ranks as usize).map(|rank| (self.trust(rank), self.report(rank))).collect();
            assert!(Instant::now() < end, "waited in vain until {what}: {states:#?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Block `n` has four tokens of its own; its hash is `n` behind the parent's.
fn tokens(blocks: &[u32]) -> Vec<u32> {
    blocks.iter().flat_map(|block| (0..4).map(move |token| block * 10 + token)).collect()
}

/// A store of the last of these blocks behind the others; engines' hashes are the block's number here.
fn store(chain: &[u32]) -> Value {
    let (last, before) = chain.split_last().unwrap();
    json!({"type": "BlockStored", "block_hashes": [last], "parent_block_hash": before.last(),
           "token_ids": tokens(&[*last]), "block_size": 4, "medium": "GPU", "lora_id": null, "lora_name": null})
}

fn remove(block: u32) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"})
}

async fn batch(peer: &mut Peer, events: Value, live: bool) {
    peer.call(json!({"op": "batch", "events": events, "live": live})).await;
}

/// E1, E2, E3: live stream, a lost batch that the replay brings, and nothing twice.
#[tokio::test]
async fn a_gap_is_repaired_from_the_engine() {
    let mut peer = peer_or_skip!();
    let endpoints = peer.open(json!({})).await;
    let watched = Watched::of(&[endpoints]).await;
    peer.call(json!({"op": "wait_subscribed"})).await;
    batch(&mut peer, json!([store(&[1])]), true).await;
    watched.until("the first block is there", |w| w.overlap(&[1, 2, 3]) == [1]).await;
    batch(&mut peer, json!([store(&[1, 2])]), false).await;
    batch(&mut peer, json!([store(&[1, 2, 3])]), true).await;
    watched.until("the gap is repaired", |w| w.overlap(&[1, 2, 3]) == [3]).await;
    watched.until("the rank is live", |w| w.trust(0) == Trust::Live).await;
    let report = watched.report(0);
    assert_eq!((report.stream.gaps, report.stream.lost_batches), (1, 0));
    assert_eq!(report.content.stored_blocks, 3);
}

/// E3: a subscriber that comes late gets the whole history, although the replay socket loses answers.
#[tokio::test]
async fn history_is_complete_although_the_replay_is_lossy() {
    let mut peer = peer_or_skip!();
    let endpoints = peer.open(json!({"router_hwm": 100})).await;
    for block in 1..=300_u32 {
        let chain: Vec<u32> = (1..=block).collect();
        batch(&mut peer, json!([store(&chain)]), true).await;
    }
    peer.call(json!({"op": "answers", "drop": [7, 8, 250]})).await;
    let watched = Watched::of(&[endpoints]).await;
    watched.until("history is asked for", |w| w.report(0).stream.replays_asked > 0).await;
    watched.until("what comes is held behind the hole", |w| w.overlap(&[1, 2, 3]) == [3]).await;
    peer.call(json!({"op": "answers"})).await;
    batch(&mut peer, json!([remove(300)]), true).await;
    let all: Vec<u32> = (1..=300).collect();
    watched.until("all is there", |w| w.overlap(&all) == [299] && w.trust(0) == Trust::Live).await;
    assert_eq!(watched.report(0).stream.lost_batches, 0);
}

/// E5: a restarted engine counts from 0 again; its old blocks go, those of another rank stay.
#[tokio::test]
async fn a_restarted_engine_is_cleared_and_its_neighbour_is_not() {
    let mut peer = peer_or_skip!();
    let first = peer.open(json!({"name": "main"})).await;
    let second = peer.open(json!({"name": "other"})).await;
    let watched = Watched::of(&[first, second]).await;
    for name in ["main", "other"] {
        peer.call(json!({"op": "wait_subscribed", "name": name})).await;
        let events = json!([store(&[1]), store(&[1, 2])]);
        peer.call(json!({"op": "batch", "name": name, "events": events})).await;
    }
    watched.until("both hold two", |w| w.overlap(&[1, 2]) == [2, 2]).await;
    peer.call(json!({"op": "restart", "down_ms": 300})).await;
    peer.call(json!({"op": "wait_subscribed"})).await;
    batch(&mut peer, json!([store(&[1])]), true).await;
    watched.until("the old blocks are gone", |w| w.overlap(&[1, 2]) == [1, 2]).await;
    watched.until("it is live again", |w| w.trust(0) == Trust::Live).await;
    assert_eq!(watched.report(0).stream.restarts(), 1);
    assert_eq!(watched.report(1).stream.restarts(), 0);
}

/// E3, E5: a connection that is lost for a moment is not a restart: nothing is cleared, and what was missed
/// meanwhile is asked for.
#[tokio::test]
async fn a_short_loss_of_connection_clears_nothing() {
    let mut peer = peer_or_skip!();
    let endpoints = peer.open(json!({})).await;
    let watched = Watched::of(&[endpoints]).await;
    peer.call(json!({"op": "wait_subscribed"})).await;
    batch(&mut peer, json!([store(&[1]), store(&[1, 2])]), true).await;
    watched.until("two blocks are there", |w| w.overlap(&[1, 2, 3]) == [2]).await;
    peer.call(json!({"op": "interrupt", "down_ms": 200})).await;
    peer.call(json!({"op": "wait_subscribed"})).await;
    batch(&mut peer, json!([store(&[1, 2, 3])]), true).await;
    watched.until("it goes on", |w| w.overlap(&[1, 2, 3]) == [3] && w.trust(0) == Trust::Live).await;
    let report = watched.report(0);
    assert_eq!((report.stream.restarts(), report.stream.lost_batches), (0, 0));
    assert_eq!(report.content.stored_blocks, 3);
}

/// E3, E4: without a replay endpoint a lost batch is lost, and the rank says so until the next clear.
#[tokio::test]
async fn what_cannot_be_had_is_said() {
    let mut peer = peer_or_skip!();
    let (events, _) = peer.open(json!({"replay": null})).await;
    let watched = Watched::of(&[(events, String::new())]).await;
    peer.call(json!({"op": "wait_subscribed"})).await;
    batch(&mut peer, json!([store(&[1])]), true).await;
    watched.until("it is live", |w| w.trust(0) == Trust::Live).await;
    batch(&mut peer, json!([store(&[1, 2])]), false).await;
    batch(&mut peer, json!([store(&[5])]), true).await;
    watched.until("the loss is said", |w| w.trust(0) == Trust::Partial(MayErr::Overcredit)).await;
    assert_eq!(watched.report(0).stream.lost_batches, 1);
    assert_eq!(watched.overlap(&[1, 2]), [1]);
    batch(&mut peer, json!([{"type": "AllBlocksCleared"}]), true).await;
    watched.until("a clear heals it", |w| w.trust(0) == Trust::Live && w.overlap(&[1]) == [0]).await;
}

/// C08, C47, E4: a publisher that is absent at the start holds nobody back, is silent after its grace, and is
/// indexed when it comes; mute and resetting peers on its port do it no harm.
#[tokio::test]
async fn a_publisher_that_comes_late_after_nuisances() {
    let mut peer = peer_or_skip!();
    let here = peer.open(json!({"name": "here"})).await;
    let late = peer.open(json!({"name": "late"})).await;
    peer.call(json!({"op": "close", "name": "late"})).await;
    let watched = Watched::of(&[here, late.clone()]).await;
    peer.call(json!({"op": "wait_subscribed", "name": "here"})).await;
    peer.call(json!({"op": "batch", "name": "here", "events": [store(&[1])]})).await;
    watched.until("the other goes on", |w| w.overlap(&[1]) == [1, 0]).await;
    watched.until("the absent one is silent", |w| w.trust(1) == Trust::Silent).await;
    let port: u16 = late.0.rsplit(':').next().unwrap().parse().unwrap();
    for mode in ["reset_after_handshake", "mute", "http"] {
        let raw = json!({"op": "raw", "name": "raw", "mode": mode, "port": port});
        peer.call(raw).await;
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        peer.call(json!({"op": "raw_close", "name": "raw"})).await;
    }
    peer.call(json!({"op": "reopen", "name": "late"})).await;
    peer.call(json!({"op": "wait_subscribed", "name": "late"})).await;
    peer.call(json!({"op": "batch", "name": "late", "events": [store(&[1]), store(&[1, 2])]})).await;
    watched.until("it is indexed", |w| w.overlap(&[1, 2]) == [1, 2]).await;
    watched.until("it is live", |w| w.trust(1) == Trust::Live).await;
}

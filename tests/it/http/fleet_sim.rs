//! Ten minutes of a fleet of 64 ranks that join, leave, go silent and come back, in simulated time.

use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rankwise::indexer::Config;
use rankwise::routing::{Policy, RouterConfig};
use rankwise::service::ServiceConfig;
use serde_json::{Value, json};

use super::harness::Service;

const WORKERS: u32 = 16;
const RANKS: u32 = 4;
/// The limit on a report's age, in seconds of the simulation.
const TTL: u64 = 15;

fn worker(nth: u32) -> Value {
    let start = nth * RANKS;
    let endpoints: Value = (start..start + RANKS)
        .map(|rank| (rank.to_string(), json!(format!("tcp://10.0.0.1:{}", 7_000 + rank))))
        .collect();
    json!({
        "worker_id": format!("w{nth}"), "model_name": "m", "block_size": 16,
        "data_parallel_start_rank": start, "data_parallel_size": RANKS,
        "endpoint": "http://10.0.0.1:8000", "kv_events_endpoints": endpoints,
    })
}

#[derive(Default)]
struct Fleet {
    /// Declared workers.
    there: BTreeSet<u32>,
    /// Workers that report nothing although they are there.
    mute: BTreeSet<u32>,
    /// When each declared rank reported last.
    reported: BTreeMap<u32, u64>,
}

impl Fleet {
    /// Joins, leaves, goes silent or comes back, each now and then.
    async fn change(&mut self, service: &Service, nth: u32, chance: u32) {
        let id = format!("w{nth}");
        match chance {
            0..=1 if self.there.remove(&nth) => {
                service.call("DELETE", &format!("/workers/{id}"), None).await.expect(200);
                self.reported.retain(|rank, _| rank / RANKS != nth);
            }
            0..=3 if self.there.insert(nth) => {
                service.post("/workers", worker(nth)).await.expect(201);
            }
            4..=5 => {
                self.mute.insert(nth);
            }
            6..=7 => {
                self.mute.remove(&nth);
            }
            _ => {}
        }
    }

    async fn report(&mut self, service: &Service, nth: u32, now: u64, rng: &mut StdRng) {
        if !self.there.contains(&nth) || self.mute.contains(&nth) {
            return;
        }
        let mut ranks = serde_json::Map::new();
        for rank in nth * RANKS..(nth + 1) * RANKS {
            // Some ranks of a report are unreadable: that renews nothing.
            let readable = rng.random_bool(0.8);
            let blocks = if readable { rng.random_range(0..500) } else { -1 };
            ranks.insert(rank.to_string(), json!({ "decode_blocks": blocks }));
            if readable {
                self.reported.insert(rank, now);
            }
        }
        service.post("/loads", json!({ "worker_id": format!("w{nth}"), "ranks": ranks })).await.expect(200);
    }
}

/// L15, S3, R7: at every step no rank is chosen on a report older than the limit, a rank of unknown load never
/// beats a known one, and no metric series exists for a rank that is gone.
#[tokio::test]
async fn ten_minutes_of_ranks_that_come_and_go() {
    // Most of these ranks never speak; who is counted here is who is declared.
    let policy = Policy { exclude_silent: false, ..Policy::default() };
    let router = RouterConfig { policy, ..RouterConfig::default() };
    let service = Service::start_with(Config::default(), router, ServiceConfig::default()).await;
    let mut rng = StdRng::seed_from_u64(64);
    let mut fleet = Fleet::default();
    let (mut known_picks, mut unknown_picks, mut gone_seen) = (0, 0, 0);
    for second in 0..600_u64 {
        service.engines.advance_millis(1_000);
        let nth = rng.random_range(0..WORKERS);
        let chance = rng.random_range(0..12);
        fleet.change(&service, nth, chance).await;
        // A minute in which nobody reports at all.
        if !(300..360).contains(&second) {
            let nth = rng.random_range(0..WORKERS);
            fleet.report(&service, nth, second, &mut rng).await;
        }
        let body = json!({ "model_name": "m", "token_ids": [1, 2, 3], "candidates": "all" });
        let answer = service.post("/select", body).await;
        if fleet.there.is_empty() {
            assert!([404, 503].contains(&answer.status.as_u16()), "{}", answer.text);
            continue;
        }
        let picked = answer.expect(200);
        let fresh = |rank: u32| fleet.reported.get(&rank).is_some_and(|at| second - at <= TTL);
        let candidates = picked["candidates"].as_array().unwrap();
        assert_eq!(candidates.len(), fleet.there.len() * RANKS as usize);
        for candidate in candidates {
            let rank = candidate["dp_rank"].as_u64().unwrap() as u32;
            assert_eq!(candidate["logit"].is_number(), fresh(rank), "rank {rank} at {second} s");
        }
        let chosen = picked["dp_rank"].as_u64().unwrap() as u32;
        let any_fresh = fleet.there.iter().flat_map(|nth| nth * RANKS..(nth + 1) * RANKS).any(fresh);
        assert_eq!(fresh(chosen), any_fresh, "rank {chosen} at {second} s");
        if any_fresh {
            known_picks += 1
        } else {
            unknown_picks += 1
        }
        if second % 10 == 0 {
            let metrics = service.get("/metrics").await.text;
            for nth in 0..WORKERS {
                let listed = metrics.contains(&format!("worker=\"w{nth}\""));
                assert_eq!(listed, fleet.there.contains(&nth), "w{nth} at {second} s");
                gone_seen += u32::from(!listed);
            }
        }
    }
    assert!(known_picks > 100 && unknown_picks > 20 && gone_seen > 20, "the history is too tame");
    service.stop().await;
}

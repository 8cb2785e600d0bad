//! What goes wrong on demand, and what the index makes of it.

use std::time::Duration;

use rankwise::mock::Shape;
use rankwise::mock::server::{BrokenOff, FalseLoad, Fault, FleetConfig};
use rankwise::trust::{MayErr, Trust};
use serde_json::json;
use zeromq::{Socket, SubSocket};

use super::watched::{Watched, fast};
use crate::rank_aware::site::{Loads, Site};

async fn watched() -> Watched {
    Watched::start(FleetConfig { engine: fast(Shape::Vllm), ..FleetConfig::default() }).await
}

fn prompt(number: u32) -> Vec<u32> {
    (number * 1_000..number * 1_000 + 70).collect()
}

/// E2, E3: batches that were not sent are had from history, and the other rank does not notice.
#[tokio::test]
async fn dropped_batches_are_repaired() {
    let watched = watched().await;
    for rank in [0, 1] {
        watched.generate(rank, &prompt(rank), 20).await;
    }
    watched.index_equals_truth().await;
    watched.rank(0).inject(Fault::DropBatches(2)).await.unwrap();
    for number in 2..6 {
        watched.generate(0, &prompt(number), 40).await;
    }
    watched.index_equals_truth().await;
    watched.until("it is live again", |w| w.trust(0) == Trust::Live).await;
    let stream = watched.report(0).stream;
    assert!(stream.gaps > 0 && stream.replays_answered > 1, "{stream:?}");
    assert_eq!((stream.lost_batches, stream.restarts()), (0, 0));
    assert_eq!(watched.report(1).stream.gaps, 0);
}

/// E3, E4: what history does not have either is lost, and the rank says so.
#[tokio::test]
async fn lost_batches_are_said_to_be_lost() {
    let watched = watched().await;
    watched.generate(0, &prompt(1), 20).await;
    watched.until_indexed().await;
    watched.rank(0).inject(Fault::LoseBatches(1)).await.unwrap();
    for number in 2..4 {
        watched.generate(0, &prompt(number), 40).await;
    }
    let partial = Trust::Partial(MayErr::Overcredit);
    watched.until("the loss is said", |w| w.trust(0) == partial).await;
    assert_eq!(watched.report(0).stream.lost_batches, 1);
    watched.generate(1, &prompt(9), 1).await;
    watched.until("its neighbour is well", |w| w.trust(1) == Trust::Live).await;
}

/// E5: a restarted rank is emptied and filled again, whether its connection was lost or only its numbers fell; its
/// neighbour keeps everything, and answers that were under way break off.
#[tokio::test]
async fn a_restart_empties_and_refills_one_rank() {
    for (reconnect, down) in [(true, 0), (true, 300), (false, 0)] {
        for shape in [Shape::Vllm, Shape::Sglang] {
            let watched = Watched::start(FleetConfig { engine: fast(shape), ..FleetConfig::default() }).await;
            for rank in [0, 1] {
                watched.generate(rank, &prompt(rank), 20).await;
            }
            watched
                .until("both are indexed", |w| w.reach(0, &prompt(0)) == 4 && w.reach(1, &prompt(1)) == 4)
                .await;
            watched.index_equals_truth().await;
            watched.rank(0).inject(Fault::Wedge).await.unwrap();
            let answer = watched.rank(0).generate(prompt(3), 5).await.unwrap();
            let down = Duration::from_millis(down);
            watched.rank(0).inject(Fault::Restart { reconnect, down }).await.unwrap();
            assert_eq!(answer.whole().await.unwrap_err(), BrokenOff::Restarted);
            watched.generate(0, &prompt(4), 20).await;
            watched
                .until("it is emptied", |w| w.reach(0, &prompt(0)) == 0 && w.reach(0, &prompt(4)) == 4)
                .await;
            watched.index_equals_truth().await;
            watched.until("it is live", |w| w.trust(0) == Trust::Live).await;
            assert_eq!(watched.report(0).stream.restarts(), 1, "{shape:?}, {reconnect}, {down:?}");
            assert_eq!(watched.report(1).stream.restarts(), 0);
            assert_eq!(watched.reach(1, &prompt(1)), 4);
            watched.fleet.shutdown().await;
        }
    }
}

/// A stalled rank goes on by itself, a wedged one when it is told to; both say nothing of their load meanwhile.
#[tokio::test]
async fn a_wedged_rank_says_nothing_and_answers_later() {
    let watched = watched().await;
    let rank = watched.rank(0);
    rank.inject(Fault::Wedge).await.unwrap();
    let answer = rank.generate(prompt(1), 3).await.unwrap();
    assert_eq!(rank.load().await.unwrap(), None);
    assert!(watched.rank(1).load().await.unwrap().is_some());
    watched.generate(1, &prompt(2), 3).await;
    rank.inject(Fault::Unwedge).await.unwrap();
    assert_eq!(answer.whole().await.unwrap().0.len(), 3);
    assert!(rank.load().await.unwrap().is_some());
    rank.inject(Fault::Stall(Duration::from_millis(50))).await.unwrap();
    assert_eq!(rank.load().await.unwrap(), None);
    watched.generate(0, &prompt(3), 3).await;
    assert!(rank.load().await.unwrap().is_some());
    watched.index_equals_truth().await;
}

/// E7: a subscriber that does not read holds up neither the engine nor, once it is gone, anybody's view.
#[tokio::test]
async fn a_subscriber_that_does_not_read_holds_nobody_up() {
    let mut engine = fast(Shape::Vllm);
    engine.timing.speed = 10_000.0;
    let watched = Watched::start(FleetConfig { engine, ranks: 1, ..FleetConfig::default() }).await;
    watched.generate(0, &prompt(1), 1).await;
    watched.until_indexed().await;
    let mut idle = SubSocket::new();
    idle.subscribe("").await.unwrap();
    idle.connect(&watched.fleet.workers()[0].ranks[0].events).await.unwrap();
    // More than the system keeps for a connection; a batch that cannot be sent waits a second, and only the first.
    for number in 0..2_000 {
        let prompt: Vec<u32> = (0..2_000).map(|token| 1_000_000 + number * 2_000 + token).collect();
        watched.generate(0, &prompt, 1).await;
    }
    drop(idle);
    watched.generate(0, &prompt(2), 1).await;
    watched.index_equals_truth().await;
    let stream = watched.report(0).stream;
    assert!(stream.gaps > 0 && stream.lost_batches == 0, "it was never held up: {stream:?}");
}

/// What nobody waits for is not computed.
#[tokio::test]
async fn an_answer_that_is_dropped_is_aborted() {
    let watched = watched().await;
    let rank = watched.rank(0);
    rank.inject(Fault::Wedge).await.unwrap();
    let answers = [rank.generate(prompt(1), 3).await.unwrap(), rank.generate(prompt(2), 3).await.unwrap()];
    drop(answers);
    rank.inject(Fault::Unwedge).await.unwrap();
    watched.generate(0, &prompt(3), 3).await;
    let load = rank.load().await.unwrap().unwrap();
    assert_eq!((load.engine.finished, load.engine.running, load.engine.waiting), (1, 0, 0));
}

/// A lie is told until the truth is asked for.
#[tokio::test]
async fn a_lie_is_told_in_every_form() {
    let watched = watched().await;
    let lie = FalseLoad { num_running_reqs: Some(-7.0), ..FalseLoad::default() };
    watched.rank(0).inject(Fault::Lie(lie)).await.unwrap();
    let told = watched.rank(0).load().await.unwrap().unwrap();
    assert_eq!((told.num_running_reqs, told.num_waiting_reqs), (-7.0, 0.0));
    let url = &watched.fleet.workers()[0].url;
    let get = async |path: &str| reqwest::get(format!("{url}{path}")).await.unwrap().text().await.unwrap();
    assert!(get("/v1/loads?dp_rank=0").await.contains("\"num_running_reqs\":-7"));
    assert!(get("/metrics").await.contains("vllm:num_requests_running{model_name=\"mock\",engine=\"0\"} -7"));
    watched.rank(0).inject(Fault::Truth).await.unwrap();
    assert_eq!(watched.rank(0).load().await.unwrap().unwrap().num_running_reqs, 0.0);
}

/// L1, L4, L6: the service reads each source of a worker's load, believes what can be, and knows nothing of a rank
/// that is wedged or lies badly: as processes of their own.
#[tokio::test]
async fn the_service_reads_every_source_of_load() {
    for (shape, loads) in [
        ("vllm", Loads::Http),
        ("sglang", Loads::Http),
        ("vllm", Loads::Grpc),
        ("sglang", Loads::Grpc),
        ("sglang", Loads::LoadStat),
    ] {
        // An idle scheduler speaks once a second; who is asked answers at once.
        let settings =
            if loads == Loads::LoadStat { "[load]\nttl_ms = 2000" } else { "[load]\nttl_ms = 400" };
        let args = ["--shape", shape, "--dp-start-rank", "2"].map(ToOwned::to_owned).to_vec();
        let site = Site::start(&[args], loads, settings).await;
        let known = async |rank: usize| {
            let (_, pools) = site.get(&format!("{}/loads", site.base)).await;
            let load = &pools[0]["loads"][rank];
            (load["state"].as_str().unwrap().to_owned(), load["decode_blocks"].as_f64())
        };
        let until = async |what: &str, rank: usize, state: &str, blocks: Option<f64>| {
            site.until(what, async || match known(rank).await {
                (is, of) if is == state && of == blocks => Ok(()),
                other => Err(format!("{shape}, {loads:?}: {other:?}")),
            })
            .await;
        };
        until("the first is idle", 0, "known", Some(0.0)).await;
        until("the second is idle", 1, "known", Some(0.0)).await;
        let (zero, one) = (&site.ranks[0], &site.ranks[1]);
        assert_eq!((zero.dp_rank, one.dp_rank), (2, 3));
        site.fault(one, json!({"kind": "lie", "load": {"num_used_tokens": 640}})).await;
        until("the lie is believed", 1, "known", Some(40.0)).await;
        site.fault(one, json!({"kind": "lie", "load": {"num_used_tokens": -640}})).await;
        until("what cannot be is not", 1, "unknown", None).await;
        site.fault(one, json!({"kind": "truth"})).await;
        until("the truth is told again", 1, "known", Some(0.0)).await;
        site.fault(zero, json!({"kind": "wedge"})).await;
        until("of a wedged rank nothing is known", 0, "unknown", None).await;
        until("of its neighbour it is", 1, "known", Some(0.0)).await;
        site.fault(zero, json!({"kind": "unwedge"})).await;
        until("it goes on", 0, "known", Some(0.0)).await;
        site.stop().await;
    }
}

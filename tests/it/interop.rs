//! The socket tasks against libzmq, as engines use it (by pyzmq, in a process of its own).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;
use std::time::Duration;

use rankwise::events::order::ReplayId;
use rankwise::ids::{EventSeq, SourceId};
use rankwise::ingest::{
    BackoffConfig, ReplayConfig, ReplayFailure, StreamEvent, SubscriberConfig, SubscriberHandle,
    spawn_replay, spawn_subscriber,
};
use serde_json::json;
use tokio::runtime::Handle;

use crate::peer::Peer;
use crate::recorder::{Recorder, until};

const SOURCE: SourceId = SourceId(1);

/// The peer, or the end of the test where there is none.
macro_rules! peer_or_skip {
    () => {
        match Peer::start() {
            Some(peer) => peer,
            None => return,
        }
    };
}

fn config() -> SubscriberConfig {
    let backoff =
        BackoffConfig { min: Duration::from_millis(5), max: Duration::from_millis(100), jitter: 0.5 };
    SubscriberConfig { backoff, seed: Some(1), ..SubscriberConfig::default() }
}

fn subscribe(endpoint: &str, binds: bool, sink: &Recorder) -> SubscriberHandle {
    spawn_subscriber(&Handle::current(), SOURCE, endpoint, binds, "", sink.clone(), config()).unwrap()
}

/// Asks for history and returns the numbers of the answers, the end mark as `u64::MAX`, and the failure.
async fn replay(
    endpoint: &str,
    request: u64,
    from: u64,
    sink: &Recorder,
) -> (Vec<u64>, Option<ReplayFailure>) {
    let limits = ReplayConfig { idle_timeout: Duration::from_millis(1_500), ..ReplayConfig::default() };
    let (handle, request) = (Handle::current(), ReplayId(request));
    let running =
        spawn_replay(&handle, SOURCE, endpoint, request, EventSeq(from), sink.clone(), &limits).unwrap();
    until("the replay ends", || running.is_finished()).await;
    (sink.answers(SOURCE, request), sink.failure(SOURCE, request))
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

fn with_end(range: std::ops::Range<u64>) -> Vec<u64> {
    range.chain([u64::MAX]).collect()
}

#[tokio::test]
async fn live_stream() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let (events, _) = peer.open(json!({"topic": "kv-events"})).await;
    let _subscriber = subscribe(&events, false, &sink);
    peer.publish_to(1, 2_000).await;
    until("all is there", || sink.live(SOURCE).len() == 2_000).await;
    assert_eq!(sink.live(SOURCE), numbers(0..2_000));
    let StreamEvent::Message(frames) = &sink.events_of(SOURCE)[1] else { panic!("not a message") };
    assert_eq!((&frames[0][..], &frames[2][..]), (&b"kv-events"[..], &b"batch 0 "[..]));
}

/// E3: a lost message is a hole in the numbers, and the replay fills it; both framings.
#[tokio::test]
async fn a_gap_is_filled_by_replay() {
    let mut peer = peer_or_skip!();
    for (request, framing) in [(1, "topic"), (2, "bare")] {
        let sink = Recorder::default();
        let (events, replays) = peer.open(json!({"framing": framing})).await;
        let _subscriber = subscribe(&events, false, &sink);
        peer.publish_to(1, 2).await;
        peer.call(json!({"op": "publish_many", "count": 3, "live": false})).await;
        peer.call(json!({"op": "publish_many", "count": 2})).await;
        until("the rest is there", || sink.live(SOURCE) == [0, 1, 5, 6]).await;
        let (answers, failure) = replay(&replays, request, 2, &sink).await;
        assert_eq!((answers, failure), (with_end(2..7), None), "{framing}");
        let (past_the_end, _) = replay(&replays, request + 10, 7, &sink).await;
        assert_eq!(past_the_end, [u64::MAX]);
    }
}

/// A ROUTER with libzmq's default limit drops answers, perhaps the end mark, and says nothing. Asking again from
/// the first hole completes the history.
#[tokio::test]
async fn a_lossy_replay_is_completed_by_asking_again() {
    let mut peer = peer_or_skip!();
    let (_, replays) = peer.open(json!({})).await;
    const BATCHES: u64 = 10_000;
    peer.call(json!({"op": "publish_many", "count": BATCHES, "size": 3_000, "live": false})).await;

    // A receiver without room makes sure of the loss.
    let slow = Recorder::with_credits(1);
    let running = spawn_replay(
        &Handle::current(),
        SOURCE,
        &replays,
        ReplayId(0),
        EventSeq(0),
        slow.clone(),
        &ReplayConfig { idle_timeout: Duration::from_millis(1_500), ..ReplayConfig::default() },
    )
    .unwrap();
    loop {
        let asked = peer.call(json!({"op": "requests"})).await;
        if asked["requests"][0]["sent"] == json!(BATCHES) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    slow.add_credits(20_000);
    until("the first round ends", || running.is_finished()).await;
    let mut have: BTreeSet<u64> = slow.answers(SOURCE, ReplayId(0)).into_iter().collect();
    have.remove(&u64::MAX);
    assert!((1..BATCHES).contains(&(have.len() as u64)), "the first round was lossy: {}", have.len());

    let sink = Recorder::default();
    let mut rounds = 0;
    while let Some(hole) = (0..BATCHES).find(|seq| !have.contains(seq)) {
        rounds += 1;
        assert!(rounds < 50, "it does not converge: first hole at {hole}");
        let (answers, _) = replay(&replays, rounds, hole, &sink).await;
        have.extend(answers.into_iter().filter(|seq| *seq != u64::MAX));
    }
    assert_eq!(have.len() as u64, BATCHES);
}

/// E3: an end mark that never comes, no answer at all, answers without end.
#[tokio::test]
async fn replays_that_do_not_end_are_given_up() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let (_, replays) = peer.open(json!({})).await;
    peer.call(json!({"op": "publish_many", "count": 3})).await;
    peer.call(json!({"op": "answers", "mode": "no_end", "drop": [1]})).await;
    let (answers, failure) = replay(&replays, 1, 0, &sink).await;
    assert_eq!((answers, failure), (vec![0, 2], Some(ReplayFailure::Idle)));
    peer.call(json!({"op": "answers", "mode": "silent"})).await;
    assert_eq!(replay(&replays, 2, 0, &sink).await, (vec![], Some(ReplayFailure::Idle)));
}

#[tokio::test]
async fn publisher_absent_at_start_and_back_later() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let (events, _) = peer.open(json!({"replay": null})).await;
    peer.call(json!({"op": "close"})).await;
    let _subscriber = subscribe(&events, false, &sink);
    until("it is refused", || sink.count(SOURCE, &StreamEvent::Refused) >= 3).await;
    peer.call(json!({"op": "reopen"})).await;
    peer.publish_to(1, 5).await;
    until("it is heard", || sink.live(SOURCE) == numbers(0..5)).await;
}

/// Frames only: what a restart and a short loss mean is decided behind the sink.
#[tokio::test]
async fn restart_from_zero_and_short_loss_are_new_connections() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let (events, replays) = peer.open(json!({})).await;
    let _subscriber = subscribe(&events, false, &sink);
    peer.publish_to(1, 3).await;
    until("the first are heard", || sink.live(SOURCE).len() == 3).await;
    peer.call(json!({"op": "interrupt", "down_ms": 100})).await;
    peer.publish_to(1, 2).await;
    until("it goes on", || sink.live(SOURCE) == numbers(0..5)).await;
    assert_eq!(replay(&replays, 1, 4, &sink).await, (with_end(4..5), None), "the last one is the same");
    peer.call(json!({"op": "restart", "down_ms": 100})).await;
    peer.publish_to(1, 2).await;
    until("it starts again", || sink.live(SOURCE) == [0, 1, 2, 3, 4, 0, 1]).await;
    assert_eq!(replay(&replays, 2, 4, &sink).await, (vec![u64::MAX], None), "nothing there any more");
    assert_eq!(sink.count(SOURCE, &StreamEvent::Connected), 3);
    assert_eq!(sink.count(SOURCE, &StreamEvent::Disconnected), 2);
}

#[tokio::test]
async fn raw_nuisances_then_a_good_publisher_on_the_same_port() {
    let mut peer = peer_or_skip!();
    for mode in ["reset_after_handshake", "reset_after_subscription", "mute", "half_greeted", "http", "ping"]
    {
        let sink = Recorder::default();
        let raw = peer.call(json!({"op": "raw", "mode": mode})).await;
        let endpoint = raw["endpoint"].as_str().unwrap().to_owned();
        let _subscriber = subscribe(&endpoint, false, &sink);
        // A mute peer costs the whole connect timeout each time.
        let attempts = if mode.contains("reset") { 20 } else { 2 };
        while peer.call(json!({"op": "raw_stats"})).await["accepted"].as_u64().unwrap() < attempts {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        peer.call(json!({"op": "raw_close"})).await;
        peer.open(json!({"name": "main", "events": endpoint, "replay": null})).await;
        peer.publish_to(1, 5).await;
        until("it is heard", || sink.live(SOURCE) == numbers(0..5)).await;
        peer.call(json!({"op": "close"})).await;
    }
}

/// The library cannot answer a PING and drops the connection; each time we come back, and replays fill the holes.
#[tokio::test]
async fn heartbeats_cost_connections_and_no_events() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let (events, replays) = peer.open(json!({"heartbeat_ms": 150})).await;
    let _subscriber = subscribe(&events, false, &sink);
    let mut published = 0;
    while sink.count(SOURCE, &StreamEvent::Connected) < 4 || sink.live(SOURCE).is_empty() {
        peer.call(json!({"op": "publish_many", "count": 1})).await;
        published += 1;
        assert!(published < 3_000, "{:?}", sink.events_of(SOURCE).last());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (answers, _) = replay(&replays, 1, 0, &sink).await;
    assert_eq!(answers, with_end(0..published));
    let live = sink.live(SOURCE);
    assert!(live.windows(2).all(|pair| pair[0] < pair[1]), "in order, nothing twice: {live:?}");
}

/// Sizes that this machine survives: the library reserves what a frame's head declares. 2^40 aborts a process,
/// and so does 2^34 where there is less memory than that.
#[tokio::test]
async fn length_bombs_of_survivable_size() {
    let mut peer = peer_or_skip!();
    let sizes = [1_u64 << 20, 1 << 28, 1 << 34];
    for size in sizes.into_iter().filter(|size| *size <= memory() / 2 || *size <= 1 << 28) {
        let sink = Recorder::default();
        let bomb = json!({"op": "raw", "mode": "bomb", "size": size, "linger_ms": 50});
        let endpoint = peer.call(bomb).await["endpoint"].as_str().unwrap().to_owned();
        let subscriber = subscribe(&endpoint, false, &sink);
        until("three bombs", || subscriber.stats().losses >= 3).await;
        peer.call(json!({"op": "raw_close"})).await;
        peer.open(json!({"events": endpoint, "replay": null})).await;
        peer.publish_to(1, 5).await;
        until("it is heard", || sink.live(SOURCE) == numbers(0..5)).await;
        peer.call(json!({"op": "close"})).await;
    }
}

/// Bytes of memory and swap.
fn memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let of = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_whitespace().nth(1)).and_then(|kib| kib.parse().ok()).unwrap_or(0_u64)
    };
    (of("MemTotal:") + of("SwapTotal:")) * 1024
}

/// A frozen publisher is not a lost one.
#[tokio::test]
async fn a_stopped_world_goes_on() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let (events, _) = peer.open(json!({})).await;
    let _subscriber = subscribe(&events, false, &sink);
    peer.publish_to(1, 5).await;
    peer.call(json!({"op": "stop_world", "ms": 1_500})).await;
    peer.publish_to(1, 5).await;
    until("it goes on", || sink.live(SOURCE) == numbers(0..10)).await;
    assert_eq!(sink.count(SOURCE, &StreamEvent::Disconnected), 0);
}

/// vLLM connects when its endpoint has no wildcard: then we bind. libzmq keeps trying when it is turned away, so a
/// second engine on our port takes over when the first has gone.
#[tokio::test]
async fn engines_that_connect_to_us() {
    let mut peer = peer_or_skip!();
    let sink = Recorder::default();
    let subscriber = subscribe("tcp://127.0.0.1:0", true, &sink);
    let mut bound = subscriber.bound_endpoint();
    let endpoint = bound.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    peer.open(json!({"connect": true, "events": endpoint, "replay": null})).await;
    peer.publish_to(1, 5).await;
    until("the first is heard", || sink.live(SOURCE) == numbers(0..5)).await;
    peer.open(json!({"name": "second", "connect": true, "events": endpoint, "replay": null})).await;
    until("the second is turned away", || subscriber.stats().second_peers >= 2).await;
    peer.call(json!({"op": "publish_many", "name": "second", "count": 1})).await;
    peer.publish_to(1, 1).await;
    until("the first is still heard", || sink.live(SOURCE).len() == 6).await;
    peer.call(json!({"op": "close"})).await;
    peer.call(json!({"op": "wait_subscribed", "name": "second"})).await;
    peer.call(json!({"op": "publish_many", "name": "second", "count": 2})).await;
    until("the second is heard", || sink.live(SOURCE).len() == 8).await;
    assert_eq!(sink.live(SOURCE), [0, 1, 2, 3, 4, 5, 1, 2]);
}

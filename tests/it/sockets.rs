//! The socket tasks against our own publisher, raw TCP peers, and peers of the library's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use bytes::Bytes;
use rankwise::events::order::ReplayId;
use rankwise::ids::{EventSeq, SourceId};
use rankwise::ingest::{
    BackoffConfig, BadEndpoint, DialConfig, PublishError, Publisher, PublisherConfig, ReplayConfig,
    ReplayFailure, ReplayFraming, ReplayHandle, StreamEvent, SubscriberConfig, SubscriberHandle,
    spawn_replay, spawn_subscriber,
};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use zeromq::{DealerSocket, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::recorder::{Recorder, until};
use crate::zmtp::{Manner, RawPeer};

const SOURCE: SourceId = SourceId(7);
const REQUEST: ReplayId = ReplayId(3);

/// Short waits between attempts: the tests wait for what happens, not for time to pass.
fn config() -> SubscriberConfig {
    let backoff =
        BackoffConfig { min: Duration::from_millis(5), max: Duration::from_millis(50), jitter: 0.5 };
    let dial = DialConfig {
        connect_timeout: Duration::from_millis(500),
        check_refusal_after: Duration::from_millis(20),
    };
    SubscriberConfig { dial, backoff, seed: Some(1), ..SubscriberConfig::default() }
}

fn replay_config() -> ReplayConfig {
    ReplayConfig {
        dial: DialConfig { connect_timeout: Duration::from_millis(500), ..config().dial },
        ..ReplayConfig::default()
    }
}

fn subscribe(endpoint: &str, sink: &Recorder) -> SubscriberHandle {
    subscribe_as(SOURCE, endpoint, sink)
}

fn subscribe_as(source: SourceId, endpoint: &str, sink: &Recorder) -> SubscriberHandle {
    spawn_subscriber(&Handle::current(), source, endpoint, false, "", sink.clone(), config()).unwrap()
}

fn replay(endpoint: &str, from: u64, sink: &Recorder, config: &ReplayConfig) -> ReplayHandle {
    let handle = Handle::current();
    spawn_replay(&handle, SOURCE, endpoint, REQUEST, EventSeq(from), sink.clone(), config).unwrap()
}

async fn publisher() -> Publisher {
    publisher_at("tcp://127.0.0.1:0").await
}

async fn publisher_at(endpoint: &str) -> Publisher {
    Publisher::bind(endpoint, None, PublisherConfig::default()).await.unwrap()
}

async fn publish(publisher: &Publisher, numbers: std::ops::Range<u64>) {
    for seq in numbers {
        publisher.publish(EventSeq(seq), payload(seq)).await.unwrap();
    }
}

fn payload(seq: u64) -> Bytes {
    Bytes::from(format!("batch {seq}"))
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

fn endpoint_of(listener: &TcpListener) -> String {
    format!("tcp://{}", listener.local_addr().unwrap())
}

/// A port where nobody listens.
async fn dead_endpoint() -> String {
    endpoint_of(&TcpListener::bind("127.0.0.1:0").await.unwrap())
}

/// A publisher appears at `endpoint`, and its events arrive at `sink`.
async fn expect_flow(endpoint: &str, sink: &Recorder) -> Publisher {
    let publisher = publisher_at(endpoint).await;
    publisher.subscribed(1).await.unwrap();
    let before = sink.live(SOURCE).len();
    publish(&publisher, 0..20).await;
    until("events flow", || sink.live(SOURCE).len() >= before + 20).await;
    assert_eq!(sink.live(SOURCE)[before..], numbers(0..20));
    publisher
}

#[tokio::test]
async fn live_frames_arrive_as_published() {
    let sink = Recorder::default();
    let config_with_topic = PublisherConfig { topic: "kv".to_owned(), ..PublisherConfig::default() };
    let publisher = Publisher::bind("tcp://*:0", None, config_with_topic).await.unwrap();
    let _subscriber = subscribe(publisher.events_endpoint(), &sink);
    publisher.subscribed(1).await.unwrap();
    publish(&publisher, 0..500).await;
    until("all is there", || sink.live(SOURCE).len() == 500).await;
    let events = sink.events_of(SOURCE);
    assert_eq!(events[0], StreamEvent::Connected);
    let frames = [Bytes::from_static(b"kv"), Bytes::from_static(&[0; 8]), payload(0)];
    assert_eq!(events[1], StreamEvent::Message(frames.to_vec()));
    assert_eq!(sink.live(SOURCE), numbers(0..500));
}

/// A topic is a prefix, as ZMQ has it: exactness is the decoder's business.
#[tokio::test]
async fn topic_filters_by_prefix() {
    let sink = Recorder::default();
    let mut publishers = Vec::new();
    let mut subscribers = Vec::new();
    for (source, topic) in [(1, "kv"), (2, "kv2"), (3, "load")] {
        let with_topic = PublisherConfig { topic: topic.to_owned(), ..PublisherConfig::default() };
        let publisher = Publisher::bind("tcp://127.0.0.1:0", None, with_topic).await.unwrap();
        let endpoint = publisher.events_endpoint();
        let handle = Handle::current();
        let subscriber =
            spawn_subscriber(&handle, SourceId(source), endpoint, false, "kv", sink.clone(), config());
        subscribers.push(subscriber.unwrap());
        publisher.subscribed(1).await.unwrap();
        publish(&publisher, 0..3).await;
        publishers.push(publisher);
    }
    until("both kv topics arrive", || {
        [1, 2].iter().all(|source| sink.live(SourceId(*source)) == numbers(0..3))
    })
    .await;
    for publisher in publishers {
        publisher.close().await;
    }
    // The end of the connection comes after everything that was sent on it.
    until("the third is gone", || sink.count(SourceId(3), &StreamEvent::Disconnected) == 1).await;
    assert!(sink.live(SourceId(3)).is_empty());
}

/// C08: an unreachable rank is known to be unreachable, holds nobody back, and is heard when it comes.
#[tokio::test]
async fn one_dead_endpoint_does_not_hold_back_the_others() {
    let sink = Recorder::default();
    let dead = dead_endpoint().await;
    let (first, third) = (publisher().await, publisher().await);
    let _subscribers = [
        subscribe_as(SourceId(1), first.events_endpoint(), &sink),
        subscribe(&dead, &sink),
        subscribe_as(SourceId(3), third.events_endpoint(), &sink),
    ];
    for publisher in [&first, &third] {
        publisher.subscribed(1).await.unwrap();
        publish(publisher, 0..5).await;
    }
    until("the dead rank has refused several times", || sink.count(SOURCE, &StreamEvent::Refused) >= 3).await;
    until("the others are heard", || {
        [1, 3].iter().all(|source| sink.live(SourceId(*source)) == numbers(0..5))
    })
    .await;
    assert_eq!(sink.count(SOURCE, &StreamEvent::Connected), 0);
    let _back = expect_flow(&dead, &sink).await;
}

#[tokio::test]
async fn a_restarted_publisher_is_heard_on_the_same_port() {
    let sink = Recorder::default();
    let first = publisher().await;
    let endpoint = first.events_endpoint().to_owned();
    let subscriber = subscribe(&endpoint, &sink);
    first.subscribed(1).await.unwrap();
    publish(&first, 0..50).await;
    first.close().await;
    until("the end is seen", || sink.count(SOURCE, &StreamEvent::Disconnected) == 1).await;
    assert_eq!(sink.live(SOURCE), numbers(0..50), "nothing that was published before the end is lost");
    until("its absence is seen", || sink.count(SOURCE, &StreamEvent::Refused) >= 1).await;
    let _second = expect_flow(&endpoint, &sink).await;
    assert_eq!(sink.count(SOURCE, &StreamEvent::Connected), 2);
    assert_eq!((subscriber.stats().connects, subscriber.stats().losses), (2, 1));
}

/// The library's own reconnect is deaf for ever after this.
#[tokio::test]
async fn twenty_resets_right_after_the_handshake_then_a_good_peer() {
    for manner in [Manner::ResetAfterHandshake, Manner::ResetAfterSubscription] {
        let sink = Recorder::default();
        let peer = RawPeer::start(manner, "PUB").await;
        let endpoint = peer.endpoint.clone();
        let _subscriber = subscribe(&endpoint, &sink);
        until("20 connections were reset", || peer.accepted() >= 20).await;
        peer.stop().await;
        let _good = expect_flow(&endpoint, &sink).await;
    }
}

#[tokio::test]
async fn a_mute_peer_costs_one_attempt_at_a_time() {
    for manner in [Manner::Mute, Manner::HalfGreeted] {
        let sink = Recorder::default();
        let peer = RawPeer::start(manner, "PUB").await;
        let endpoint = peer.endpoint.clone();
        let subscriber = subscribe(&endpoint, &sink);
        until("two attempts have failed", || subscriber.stats().failures >= 2).await;
        let told = sink.events_of(SOURCE);
        assert!(told.iter().all(|event| matches!(event, StreamEvent::Unreachable { .. })), "{told:?}");
        peer.stop().await;
        let _good = expect_flow(&endpoint, &sink).await;
    }
}

#[tokio::test]
async fn no_attempt_leaves_a_connection_open() {
    for manner in [Manner::Mute, Manner::HalfGreeted] {
        let sink = Recorder::default();
        let peer = RawPeer::start(manner, "PUB").await;
        let subscriber = subscribe(&peer.endpoint, &sink);
        until("two attempts have failed", || subscriber.stats().failures >= 2).await;
        drop(subscriber);
        let replay = replay(&peer.endpoint, 0, &sink, &replay_config());
        until("the replay has failed", || replay.is_finished()).await;
        until("all are closed", || peer.ended() == peer.accepted()).await;
    }
}

#[tokio::test]
async fn dropping_a_publisher_closes_its_connections_and_frees_its_port() {
    let sink = Recorder::default();
    let dropped = publisher().await;
    let endpoint = dropped.events_endpoint().to_owned();
    let _subscriber = subscribe(&endpoint, &sink);
    dropped.subscribed(1).await.unwrap();
    drop(dropped);
    until("the end is seen", || sink.count(SOURCE, &StreamEvent::Disconnected) == 1).await;
    until("nobody listens any more", || sink.count(SOURCE, &StreamEvent::Refused) >= 1).await;
    let _next = expect_flow(&endpoint, &sink).await;
}

/// E1: hostile bytes cost a counter. The length bombs are the sizes that an ordinary machine survives.
#[tokio::test]
async fn peers_that_speak_nonsense_are_left_for_a_good_one() {
    for manner in [
        Manner::Http,
        Manner::WrongType,
        Manner::UnknownCommand,
        Manner::LengthBomb(1 << 20),
        Manner::LengthBomb(1 << 30),
        Manner::LengthBomb(u64::MAX),
    ] {
        let sink = Recorder::default();
        let peer = RawPeer::start(manner, "PUB").await;
        let endpoint = peer.endpoint.clone();
        let subscriber = subscribe(&endpoint, &sink);
        until("it was tried three times", || {
            let stats = subscriber.stats();
            stats.failures + stats.losses >= 3
        })
        .await;
        peer.stop().await;
        assert!(sink.live(SOURCE).is_empty(), "{manner:?}");
        let _good = expect_flow(&endpoint, &sink).await;
    }
}

#[tokio::test]
async fn an_oversized_message_is_counted_and_left_out() {
    let sink = Recorder::default();
    let publisher = publisher().await;
    let small = SubscriberConfig { max_message_bytes: 100, ..config() };
    let endpoint = publisher.events_endpoint();
    let subscriber =
        spawn_subscriber(&Handle::current(), SOURCE, endpoint, false, "", sink.clone(), small).unwrap();
    publisher.subscribed(1).await.unwrap();
    publish(&publisher, 0..1).await;
    publisher.publish(EventSeq(1), Bytes::from(vec![0; 101])).await.unwrap();
    publish(&publisher, 2..3).await;
    until("the rest arrives", || sink.live(SOURCE) == [0, 2]).await;
    assert_eq!((subscriber.stats().messages, subscriber.stats().oversized), (3, 1));
}

/// E7: a receiver without room stops the reading; nothing piles up on our side and nothing is lost on the way.
#[tokio::test]
async fn a_slow_sink_holds_the_publisher_back() {
    const BATCH: usize = 64 << 10;
    let sink = Recorder::with_credits(3);
    let publisher = publisher().await;
    let _subscriber = subscribe(publisher.events_endpoint(), &sink);
    publisher.subscribed(1).await.unwrap();
    let large = Bytes::from(vec![7; BATCH]);
    let mut published = 0;
    let patience = Duration::from_millis(500);
    while tokio::time::timeout(patience, publisher.publish(EventSeq(published), large.clone())).await.is_ok()
    {
        published += 1;
        assert!(published < 1_000, "64 MiB were taken although nobody reads");
    }
    assert_eq!(sink.live(SOURCE), [0, 1], "the credits were for one connection and two batches");
    sink.add_credits(2_000);
    // The batch that did not fit was kept for replays and not sent, or sent late: both are allowed.
    until("what was published arrives", || sink.live(SOURCE).len() as u64 >= published).await;
    assert_eq!(sink.live(SOURCE)[..published as usize], numbers(0..published));
}

#[tokio::test]
async fn dropping_the_handle_closes_the_connection() {
    let sink = Recorder::default();
    let (listener, mut publisher) = pub_socket().await;
    let mut monitor = publisher.monitor();
    publisher.bind_listener(listener).await.unwrap();
    let endpoint = publisher.binds().keys().next().unwrap().to_string();
    let subscriber = subscribe(&endpoint, &sink);
    until("connected", || sink.count(SOURCE, &StreamEvent::Connected) == 1).await;
    drop(subscriber);
    until("the publisher sees it leave", || {
        matches!(monitor.try_recv(), Ok(zeromq::SocketEvent::Disconnected(_)))
    })
    .await;
    let len = sink.len();
    publisher.send(ZmqMessage::from("late")).await.unwrap();
    assert_eq!(sink.len(), len);
}

#[tokio::test]
async fn stopping_says_goodbye_and_a_closed_sink_ends_the_task() {
    let sink = Recorder::default();
    let publisher = publisher().await;
    let subscriber = subscribe(publisher.events_endpoint(), &sink);
    publisher.subscribed(1).await.unwrap();
    subscriber.stop().await;
    assert_eq!(sink.events_of(SOURCE), [StreamEvent::Connected, StreamEvent::Disconnected]);

    let gone = Recorder::with_credits(0);
    gone.close();
    let subscriber = subscribe(publisher.events_endpoint(), &gone);
    until("the task ends", || subscriber.is_finished()).await;

    // Between two attempts, too.
    let waiting = subscribe(&dead_endpoint().await, &sink);
    until("it waits", || waiting.stats().refusals >= 1).await;
    waiting.stop().await;
}

#[tokio::test]
async fn redialling_makes_a_new_connection() {
    let sink = Recorder::default();
    let publisher = publisher().await;
    let subscriber = subscribe(publisher.events_endpoint(), &sink);
    publisher.subscribed(1).await.unwrap();
    subscriber.redial();
    publisher.subscribed(2).await.unwrap();
    publish(&publisher, 0..3).await;
    until("events flow", || sink.live(SOURCE) == numbers(0..3)).await;
    assert_eq!(sink.count(SOURCE, &StreamEvent::Disconnected), 1);
}

#[tokio::test]
async fn bad_endpoints_are_refused_when_spawned() {
    let handle = Handle::current();
    for (endpoint, binds, error) in [
        ("tcp://nowhere", false, BadEndpoint::HostPort("tcp://nowhere".to_owned())),
        ("udp://h:1", false, BadEndpoint::Transport("udp://h:1".to_owned())),
        ("ipc:///x", true, BadEndpoint::BindTransport("ipc:///x".to_owned())),
    ] {
        let spawned = spawn_subscriber(&handle, SOURCE, endpoint, binds, "", Recorder::default(), config());
        assert_eq!(spawned.unwrap_err(), error);
    }
}

#[tokio::test]
async fn ipc_endpoints_work_and_a_missing_socket_is_a_refusal() {
    let folder = tempfile::tempdir().unwrap();
    let endpoint = format!("ipc://{}", folder.path().join("kv_dp1").display());
    let sink = Recorder::default();
    let _subscriber = subscribe(&endpoint, &sink);
    until("refused", || sink.count(SOURCE, &StreamEvent::Refused) >= 1).await;
    let _publisher = expect_flow(&endpoint, &sink).await;
}

async fn pub_socket() -> (std::net::TcpListener, PubSocket) {
    (std::net::TcpListener::bind("127.0.0.1:0").unwrap(), PubSocket::new())
}

/// Engines whose endpoint has no wildcard connect to us. One is heard, a second is turned away and counted,
/// and takes over when the first has gone.
#[tokio::test]
async fn a_bound_subscriber_hears_one_publisher_at_a_time() {
    let sink = Recorder::default();
    let handle = Handle::current();
    let subscriber =
        spawn_subscriber(&handle, SOURCE, "tcp://*:0", true, "", sink.clone(), config()).unwrap();
    let mut bound = subscriber.bound_endpoint();
    let bound = bound.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    let endpoint = bound.replace("0.0.0.0", "127.0.0.1");

    let mut first = PubSocket::new();
    first.connect(&endpoint).await.unwrap();
    until("the first is connected", || sink.count(SOURCE, &StreamEvent::Connected) == 1).await;
    let refused = PubSocket::new().connect(&endpoint).await;
    assert!(refused.is_err(), "a second publisher gets no handshake");
    until("the second is counted", || subscriber.stats().second_peers >= 1).await;
    // The subscription may still be on its way: the library's PUB drops until it is there.
    until_heard(&mut first, &sink, 1).await;

    drop(first);
    until("the first has gone", || sink.count(SOURCE, &StreamEvent::Disconnected) == 1).await;
    let mut second = PubSocket::new();
    while second.connect(&endpoint).await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    until_heard(&mut second, &sink, 2).await;
    assert_eq!(sink.count(SOURCE, &StreamEvent::Connected), 2);
    subscriber.stop().await;
    let _free = TcpListener::bind(endpoint.strip_prefix("tcp://").unwrap()).await.unwrap();
}

/// Sends the message numbered `seq` until one of them has arrived.
async fn until_heard(publisher: &mut PubSocket, sink: &Recorder, seq: u64) {
    for _ in 0..3_000 {
        let mut message = ZmqMessage::from(Bytes::new());
        message.push_back(Bytes::copy_from_slice(&seq.to_be_bytes()));
        message.push_back(payload(seq));
        publisher.send(message).await.unwrap();
        if sink.live(SOURCE).contains(&seq) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("message {seq} was never heard");
}

/// The hole of the dialling side exists here, too: a publisher that resets right after its handshake must not
/// be taken for one that is there.
#[tokio::test]
async fn a_bound_subscriber_survives_publishers_that_reset() {
    let sink = Recorder::default();
    let handle = Handle::current();
    let subscriber =
        spawn_subscriber(&handle, SOURCE, "tcp://127.0.0.1:0", true, "", sink.clone(), config()).unwrap();
    let mut bound = subscriber.bound_endpoint();
    let endpoint = bound.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    for round in 1..=20 {
        crate::zmtp::connect_and_reset(&endpoint, "PUB").await;
        until("the reset is seen", || {
            let stats = subscriber.stats();
            stats.losses + stats.failures + stats.second_peers >= round
        })
        .await;
    }
    let mut good = PubSocket::new();
    while good.connect(&endpoint).await.is_err() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    until_heard(&mut good, &sink, 9).await;
}

/// E3: both framings.
#[tokio::test]
async fn history_is_replayed_in_both_framings() {
    for framing in [ReplayFraming::WithTopic, ReplayFraming::WithoutTopic] {
        let sink = Recorder::default();
        let config = PublisherConfig { framing, topic: "kv".to_owned(), buffer: 80, ..Default::default() };
        let publisher =
            Publisher::bind("tcp://127.0.0.1:0", Some("tcp://127.0.0.1:0"), config).await.unwrap();
        publish(&publisher, 0..100).await;
        let replay = replay(publisher.replay_endpoint().unwrap(), 10, &sink, &replay_config());
        until("the replay ends", || replay.is_finished()).await;
        let mut expected = numbers(20..100);
        expected.push(u64::MAX);
        assert_eq!(sink.answers(SOURCE, REQUEST), expected, "{framing:?}: the oldest 20 are gone");
        let events = sink.events_of(SOURCE);
        assert_eq!(events[0], StreamEvent::ReplayAsked { request: REQUEST });
        let StreamEvent::ReplayMessage { frames, .. } = &events[1] else { panic!("{:?}", events[1]) };
        let with_topic = usize::from(framing == ReplayFraming::WithTopic);
        assert_eq!(frames.len(), 3 + with_topic, "{framing:?}: as received");
        assert_eq!(sink.failure(SOURCE, REQUEST), None);
    }
}

/// What was lost on the way can be had from the replay: `remember` is how a test loses a batch.
#[tokio::test]
async fn a_batch_that_was_never_published_is_in_the_replay() {
    let sink = Recorder::default();
    let publisher =
        Publisher::bind("tcp://127.0.0.1:0", Some("tcp://127.0.0.1:0"), PublisherConfig::default())
            .await
            .unwrap();
    let _subscriber = subscribe(publisher.events_endpoint(), &sink);
    publisher.subscribed(1).await.unwrap();
    publish(&publisher, 0..2).await;
    publisher.remember(EventSeq(2), payload(2));
    publish(&publisher, 3..5).await;
    until("the rest is heard", || sink.live(SOURCE) == [0, 1, 3, 4]).await;
    let replay = replay(publisher.replay_endpoint().unwrap(), 2, &sink, &replay_config());
    until("the replay ends", || replay.is_finished()).await;
    assert_eq!(sink.answers(SOURCE, REQUEST), [2, 3, 4, u64::MAX]);
}

/// A ROUTER that we script by hand.
struct Router {
    socket: RouterSocket,
    endpoint: String,
    identity: Bytes,
}

impl Router {
    async fn bind() -> Self {
        let mut socket = RouterSocket::new();
        let endpoint = socket.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        Self { socket, endpoint, identity: Bytes::new() }
    }

    /// Waits for a request and returns the number asked for.
    async fn request(&mut self) -> u64 {
        let frames = self.socket.recv().await.unwrap().into_vec();
        assert!(frames[1].is_empty(), "the delimiter is there");
        self.identity = frames[0].clone();
        u64::from_be_bytes(frames[2][..].try_into().unwrap())
    }

    async fn answer(&mut self, frames: &[&[u8]]) {
        let mut message = ZmqMessage::from(self.identity.clone());
        for frame in frames {
            message.push_back(Bytes::copy_from_slice(frame));
        }
        self.socket.send(message).await.unwrap();
    }

    async fn batch(&mut self, seq: u64) {
        self.answer(&[b"", &seq.to_be_bytes(), b"batch"]).await;
    }
}

/// E3: holes are for the receiver to see; the end mark `[""]` ends it as well.
#[tokio::test]
async fn a_lossy_replay_is_passed_on_as_it_is() {
    let sink = Recorder::default();
    let mut router = Router::bind().await;
    let replay = replay(&router.endpoint, 4, &sink, &replay_config());
    assert_eq!(router.request().await, 4);
    for seq in [4, 5, 9, 7] {
        router.batch(seq).await;
    }
    router.answer(&[b"", b""]).await;
    until("the replay ends", || replay.is_finished()).await;
    assert_eq!(sink.answers(SOURCE, REQUEST), [4, 5, 9, 7, u64::MAX]);
    assert_eq!(sink.failure(SOURCE, REQUEST), None);
}

/// E3: an end mark that never comes.
#[tokio::test]
async fn a_replay_without_an_end_fails_when_idle() {
    let sink = Recorder::default();
    let mut router = Router::bind().await;
    let impatient = ReplayConfig { idle_timeout: Duration::from_millis(300), ..replay_config() };
    let replay = replay(&router.endpoint, 0, &sink, &impatient);
    router.request().await;
    router.batch(0).await;
    until("it has failed", || sink.failure(SOURCE, REQUEST) == Some(ReplayFailure::Idle)).await;
    assert_eq!(sink.answers(SOURCE, REQUEST), [0]);
    until("the task has ended", || replay.is_finished()).await;
}

#[tokio::test]
async fn a_replay_that_trickles_for_ever_is_ended() {
    let sink = Recorder::default();
    let mut router = Router::bind().await;
    let limited = ReplayConfig { total_timeout: Duration::from_millis(400), ..replay_config() };
    let _replay = replay(&router.endpoint, 0, &sink, &limited);
    router.request().await;
    for seq in 0_u64.. {
        if sink.failure(SOURCE, REQUEST).is_some() {
            break;
        }
        assert!(seq < 3_000, "it goes on and on");
        let mut message = ZmqMessage::from(router.identity.clone());
        message.push_back(Bytes::new());
        message.push_back(Bytes::copy_from_slice(&seq.to_be_bytes()));
        message.push_back(Bytes::from_static(b"batch"));
        let _ = router.socket.send(message).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(sink.failure(SOURCE, REQUEST), Some(ReplayFailure::TooLong));
}

#[tokio::test]
async fn a_replay_that_floods_is_ended() {
    let sink = Recorder::default();
    let mut router = Router::bind().await;
    let _replay = replay(&router.endpoint, 0, &sink, &ReplayConfig { max_answers: 50, ..replay_config() });
    router.request().await;
    for _ in 0..50 {
        router.batch(0).await;
    }
    until("it has failed", || sink.failure(SOURCE, REQUEST) == Some(ReplayFailure::TooLong)).await;
    assert_eq!(sink.answers(SOURCE, REQUEST).len(), 50);
}

#[tokio::test]
async fn each_way_to_get_no_answer_has_its_name() {
    let sink = Recorder::default();
    let _refused = replay(&dead_endpoint().await, 0, &sink, &replay_config());
    until("refused", || sink.failure(SOURCE, REQUEST) == Some(ReplayFailure::Refused)).await;

    for (manner, why) in [
        (Manner::Mute, ReplayFailure::Unreachable),
        (Manner::Http, ReplayFailure::Unreachable),
        (Manner::WrongType, ReplayFailure::Unreachable),
        (Manner::ResetAfterSubscription, ReplayFailure::Closed),
        (Manner::UnknownCommand, ReplayFailure::Closed),
        (Manner::LengthBomb(1 << 30), ReplayFailure::Closed),
    ] {
        let sink = Recorder::default();
        let peer = RawPeer::start(manner, "ROUTER").await;
        let _replay = replay(&peer.endpoint, 0, &sink, &replay_config());
        until("it has failed", || sink.failure(SOURCE, REQUEST).is_some()).await;
        assert_eq!(sink.failure(SOURCE, REQUEST), Some(why), "{manner:?}");
    }
}

#[tokio::test]
async fn dropping_a_replay_cancels_it_without_a_word() {
    let sink = Recorder::default();
    let mut router = Router::bind().await;
    let mut monitor = router.socket.monitor();
    let replay = replay(&router.endpoint, 0, &sink, &replay_config());
    router.request().await;
    router.batch(0).await;
    until("one answer is there", || sink.answers(SOURCE, REQUEST) == [0]).await;
    drop(replay);
    let hung_up = async {
        while !matches!(monitor.try_recv(), Ok(zeromq::SocketEvent::Disconnected(_))) {
            // The library notices the end of a connection only while it is read.
            let _ = tokio::time::timeout(Duration::from_millis(5), router.socket.recv()).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), hung_up).await.unwrap();
    assert_eq!(sink.failure(SOURCE, REQUEST), None);
}

/// E9: an endpoint that does not answer takes no place from others; answers take turns.
#[tokio::test]
async fn answers_take_turns_and_mute_endpoints_delay_nobody() {
    let sink = Recorder::default();
    let one_at_a_time = ReplayConfig { dial: config().dial, ..ReplayConfig::with_slots(1) };
    let patient = ReplayConfig { idle_timeout: Duration::from_secs(60), ..one_at_a_time };
    let (mut mute, mut busy, mut next) = (Router::bind().await, Router::bind().await, Router::bind().await);
    let ask = |endpoint: &str, request| {
        spawn_replay(&Handle::current(), SOURCE, endpoint, request, EventSeq(1), sink.clone(), &patient)
            .unwrap()
    };
    let _mute = ask(&mute.endpoint, ReplayId(4));
    mute.request().await;
    let first = ask(&busy.endpoint, ReplayId(5));
    busy.request().await;
    busy.batch(1).await;
    until("the first is answered", || sink.answers(SOURCE, ReplayId(5)) == [1]).await;

    let _second = ask(&next.endpoint, ReplayId(6));
    next.request().await;
    next.batch(1).await;
    let asked = StreamEvent::ReplayAsked { request: ReplayId(6) };
    until("the second says that it waits", || sink.count(SOURCE, &asked) >= 2).await;
    assert!(sink.answers(SOURCE, ReplayId(6)).is_empty(), "there is one place only");
    drop(first);
    until("the second has its turn", || sink.answers(SOURCE, ReplayId(6)) == [1]).await;
}

/// A publisher that is closed has handed over everything first, live and replayed; its ports are free.
#[tokio::test]
async fn closing_a_publisher_loses_nothing_and_frees_its_ports() {
    let sink = Recorder::default();
    let config = PublisherConfig { linger: Duration::from_secs(30), ..PublisherConfig::default() };
    let publisher = Publisher::bind("tcp://127.0.0.1:0", Some("tcp://127.0.0.1:0"), config).await.unwrap();
    let events = publisher.events_endpoint().to_owned();
    let replays = publisher.replay_endpoint().unwrap().to_owned();
    let _subscriber = subscribe(&events, &sink);
    publisher.subscribed(1).await.unwrap();
    for seq in 0..5_000 {
        publisher.publish(EventSeq(seq), Bytes::from(vec![0; 3_000])).await.unwrap();
    }
    let _replay = replay(&replays, 0, &sink, &replay_config());
    until("the replay has begun", || !sink.answers(SOURCE, REQUEST).is_empty()).await;
    publisher.close().await;
    until("all live batches are there", || sink.live(SOURCE).len() == 5_000).await;
    until("the whole replay is there", || sink.answers(SOURCE, REQUEST).len() == 5_001).await;
    let again = Publisher::bind(&events, Some(&replays), PublisherConfig::default()).await.unwrap();
    assert_eq!((again.events_endpoint(), again.replay_endpoint()), (&*events, Some(&*replays)));
    let taken = Publisher::bind(&events, None, PublisherConfig::default()).await;
    assert!(matches!(taken, Err(PublishError::Bind { .. })));
}

/// Engines drop a request without the empty frame; so does ours.
#[tokio::test]
async fn a_request_without_delimiter_gets_no_answer() {
    let publisher =
        Publisher::bind("tcp://127.0.0.1:0", Some("tcp://127.0.0.1:0"), PublisherConfig::default())
            .await
            .unwrap();
    publish(&publisher, 0..1).await;
    let mut dealer = DealerSocket::new();
    dealer.connect(publisher.replay_endpoint().unwrap()).await.unwrap();
    dealer.send(ZmqMessage::from(Bytes::from_static(&[0; 8]))).await.unwrap();
    let mut proper = ZmqMessage::from(Bytes::new());
    proper.push_back(Bytes::from_static(&[0]));
    dealer.send(proper).await.unwrap();
    let (batch, end) = (dealer.recv().await.unwrap(), dealer.recv().await.unwrap());
    assert_eq!(batch.into_vec()[3], payload(0));
    let end = end.into_vec();
    assert_eq!(end[2][..], [0xff; 8]);
    assert!(end[0].is_empty() && end[1].is_empty() && end[3].is_empty());
}

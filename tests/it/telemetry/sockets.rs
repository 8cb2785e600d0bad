//! LoadStat over ZMQ: publishers per rank, good and bad.

use std::time::Duration;

use bytes::Bytes;
use rankwise::fleet::Endpoints;
use rankwise::ids::{DpRank, EventSeq};
use rankwise::ingest::{
    BackoffConfig, LoadStatBinding, LoadStatConfig, LoadStatFeed, LoadTableSink, Publisher, PublisherConfig,
    SubscriberConfig,
};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::harness::Site;
use crate::recorder::until;

async fn publisher(endpoint: &str, topic: &str) -> Publisher {
    let config = PublisherConfig { topic: topic.to_owned(), ..PublisherConfig::default() };
    Publisher::bind(endpoint, None, config).await.unwrap()
}

async fn say(publisher: &Publisher, seq: u64, payload: Value) {
    publisher.publish(EventSeq(seq), rmp_serde::to_vec(&payload).unwrap().into()).await.unwrap();
}

fn follow(site: &Site, endpoints: Endpoints) -> (LoadStatFeed, LoadTableSink) {
    let backoff =
        BackoffConfig { min: Duration::from_millis(5), max: Duration::from_millis(50), jitter: 0.5 };
    let config = LoadStatConfig {
        subscriber: SubscriberConfig { backoff, seed: Some(1), ..SubscriberConfig::default() },
        fleet_check: Duration::from_millis(10),
        ..LoadStatConfig::default()
    };
    let control = site.node.control();
    let sink = LoadTableSink::new(site.node.view().clone(), move || control.now());
    let bindings = vec![LoadStatBinding { worker: "w".into(), endpoints }];
    let view = site.node.view().clone();
    (LoadStatFeed::start(&Handle::current(), view, bindings, sink.clone(), config), sink)
}

fn at(publishers: &[&Publisher], first: u32) -> Endpoints {
    let ranks = (first..).map(DpRank);
    Endpoints::per_rank(ranks.zip(publishers.iter().map(|publisher| publisher.events_endpoint().to_owned())))
}

/// Waits until everybody was subscribed to `times` times: what is said from then on is heard.
async fn heard(publishers: &[&Publisher], times: usize) {
    for publisher in publishers {
        publisher.subscribed(times).await.unwrap();
    }
}

/// L1, L4, L5: each connection's messages are its own rank's, bad ones by themselves, whatever rank they name.
#[tokio::test]
async fn load_messages_belong_to_their_connection() {
    let four = publisher("tcp://127.0.0.1:0", "load").await;
    let five = publisher("tcp://127.0.0.1:0", "load").await;
    let site = Site::of(&[("w", 4, 3)]).await;
    let (_feed, sink) = follow(&site, at(&[&four, &five], 4));
    heard(&[&four, &five], 1).await;
    // The global rank, and the local one: either is right.
    say(&four, 0, json!(["LoadStat", 3, 1, 640, 8192, 4])).await;
    say(&five, 0, json!(["LoadStat", 0, 0, 0, 8192, 1])).await;
    until("both are known", || site.running("w", 4..7) == [Some(3), Some(0), None]).await;
    let load = site.load("w", 4).unwrap();
    assert_eq!((load.num_waiting_reqs, load.num_used_tokens), (Some(1), Some(640)));
    assert_eq!((load.max_total_num_tokens, sink.counts().rank_mismatch), (Some(8192), 0));
    for bad in [json!(["LoadStat", -1, 0, 0, 1, 4]), json!(["LoadStat", 1e300, 0, 0, 1, 4])] {
        say(&four, 1, bad).await;
    }
    say(&four, 3, json!(["Other"])).await;
    say(&four, 4, json!(["LoadStat", 9])).await;
    four.publish_frames(vec![Bytes::from_static(b"loads"), Bytes::from_static(&[0; 8]), Bytes::new()])
        .await
        .unwrap();
    four.publish_frames(vec![Bytes::from_static(b"load"), Bytes::from_static(b"x")]).await.unwrap();
    say(&four, 5, json!(["LoadStat", 7, 0, 0, 8192, 6, "later"])).await;
    until("the last is in", || site.running("w", 4..7) == [Some(7), Some(0), None]).await;
    let counts = sink.counts();
    assert_eq!((counts.messages, counts.malformed), (5, 2));
    assert_eq!((counts.other_kind, counts.rank_mismatch), (2, 1));
    assert_eq!(site.counts().refused_entries, 2);
}

/// L16: every rank is listened to again, after its publisher came back and after the worker did.
#[tokio::test]
async fn what_comes_back_is_heard_again() {
    let (zero, one) =
        (publisher("tcp://127.0.0.1:0", "load").await, publisher("tcp://127.0.0.1:0", "load").await);
    let site = Site::of(&[("w", 0, 2)]).await;
    let (_feed, _sink) = follow(&site, at(&[&zero, &one], 0));
    heard(&[&zero, &one], 1).await;
    site.withdraw("w").await;
    site.declare("w", 0, 2).await;
    heard(&[&zero, &one], 2).await;
    for publisher in [&zero, &one] {
        say(publisher, 0, json!(["LoadStat", 5, 0, 0, 1, null])).await;
    }
    until("both are known", || site.running("w", 0..2) == [Some(5), Some(5)]).await;
    let endpoint = one.events_endpoint().to_owned();
    one.close().await;
    let back = publisher(&endpoint, "load").await;
    heard(&[&back], 1).await;
    say(&back, 0, json!(["LoadStat", 6, 0, 0, 1, null])).await;
    until("it is heard", || site.running("w", 0..2) == [Some(5), Some(6)]).await;
}

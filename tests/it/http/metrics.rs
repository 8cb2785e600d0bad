//! `/metrics`: series come and go with their ranks.

use serde_json::json;

use super::harness::{Service, batch};

/// The value of one series, by its name and whatever its labels must contain.
fn value(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let series = text.lines().find(|line| {
        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label))
    })?;
    series.rsplit(' ').next()?.parse().ok()
}

/// R7, C39, C47, section "metric habits": every promised series is there per rank, and goes with its rank.
#[tokio::test]
async fn series_come_and_go_with_their_ranks() {
    let service = Service::start().await;
    let empty = service.get("/metrics").await;
    assert!(empty.content_type.starts_with("application/openmetrics-text"), "{}", empty.content_type);
    assert!(!empty.text.contains("worker="), "{}", empty.text);

    let worker = json!({
        "worker_id": "w2", "endpoint": "http://x", "block_size": 4, "model_name": "a \"quoted\"\nmodel",
        "data_parallel_start_rank": 4, "data_parallel_size": 2,
        "kv_events_base_endpoint": "tcp://10.0.0.2:5557",
    });
    service.post("/workers", worker).await.expect(201);
    let store = |hash: u64, block_size: u64| {
        batch(json!([["BlockStored", [hash], null, [1, 2, 3, 4], block_size, null, "GPU"]]))
    };
    service.engines.send("w2", 4, 0, store(1, 4));
    service.engines.send("w2", 4, 1, store(2, 8));
    service
        .post("/loads", json!({ "worker_id": "w2", "ranks": { "4": { "decode_blocks": 1 } } }))
        .await
        .expect(200);
    service.post("/query", json!({ "token_ids": [1, 2, 3, 4] })).await.expect(200);
    service.post("/select", json!({ "token_ids": [1, 2, 3, 4] })).await.expect(200);
    service.engines.advance_millis(60_000);

    let text = service.get("/metrics").await.text;
    let four = ["dp_rank=\"4\"", "worker=\"w2\"", "model=\"a \\\"quoted\\\"\\nmodel\""];
    let of = |name: &str, more: &str| value(&text, name, &[&four[..], &[more]].concat());
    assert_eq!(of("rankwise_last_sequence", ""), Some(1.0));
    assert_eq!(of("rankwise_applied_batches_total", ""), Some(2.0));
    assert_eq!(of("rankwise_blocks", "tier=\"device\""), Some(1.0));
    assert_eq!(of("rankwise_connected", ""), Some(1.0));
    assert_eq!(of("rankwise_event_age_seconds", ""), Some(60.0));
    assert_eq!(of("rankwise_load_report_age_seconds", ""), Some(60.0));
    assert_eq!(of("rankwise_block_size_mismatches_total", ""), Some(1.0));
    assert_eq!(of("rankwise_skipped_events_total", "reason=\"block_size_mismatch\""), Some(1.0));
    // E8: the store of another block size is not in the view.
    assert_eq!(of("rankwise_trust", "state=\"partial\""), Some(1.0));
    assert_eq!(of("rankwise_trust_reason", "reason=\"block_size_mismatch\""), Some(1.0));
    assert_eq!(of("rankwise_trust", "state=\"silent\""), Some(0.0));
    for counter in [
        "gaps",
        "lost_batches",
        "duplicate_batches",
        "replays_asked",
        "replays_answered",
        "replays_failed",
        "orphan_blocks",
        "unknown_removals",
        "malformed_messages",
    ] {
        assert_eq!(of(&format!("rankwise_{counter}_total"), ""), Some(0.0), "{counter}");
    }
    assert_eq!(of("rankwise_skipped_events_total", "reason=\"self_parent\""), None, "no series of zeros");
    // The test's batches all say rank 0.
    assert_eq!(of("rankwise_rank_mismatch_batches_total", ""), Some(2.0));
    assert_eq!(of("rankwise_restarts_total", "rule=\"newer\""), Some(0.0));
    assert_eq!(of("rankwise_held_batches", ""), Some(0.0));

    // E4: rank 5 is connected, has no history and was never heard within the grace.
    assert_eq!(value(&text, "rankwise_trust", &["dp_rank=\"5\"", "state=\"partial\""]), Some(1.0));
    assert_eq!(
        value(&text, "rankwise_trust_reason", &["dp_rank=\"5\"", "reason=\"never_heard\""]),
        Some(1.0)
    );
    assert_eq!(value(&text, "rankwise_never_heard_ranks", &[]), Some(1.0));
    assert_eq!(value(&text, "rankwise_silent_ranks", &[]), Some(0.0));
    assert_eq!(value(&text, "rankwise_last_sequence", &["dp_rank=\"5\""]), None, "nothing is not 0");
    assert_eq!(value(&text, "rankwise_picks_total", &["reason=\"lowest_logit\""]), Some(1.0), "{text}");
    assert_eq!(value(&text, "rankwise_query_duration_seconds_count", &[]), Some(1.0));
    assert_eq!(value(&text, "rankwise_decision_duration_seconds_count", &[]), Some(1.0));
    assert_eq!(value(&text, "rankwise_index_distinct_blocks", &[]), Some(1.0));
    assert!(value(&text, "rankwise_index_bytes", &[]).unwrap() > 0.0);
    assert!(value(&text, "rankwise_index_nodes", &[]).unwrap() >= 2.0);
    assert_eq!(value(&text, "rankwise_load_entries_total", &["result=\"accepted\""]), Some(1.0));

    service.post("/unregister", json!({ "instance_id": "w2", "dp_rank": 4 })).await.expect(200);
    let text = service.get("/metrics").await.text;
    assert!(!text.contains("dp_rank=\"4\"") && text.contains("dp_rank=\"5\""), "{text}");
    service.call("DELETE", "/workers/w2", None).await.expect(200);
    let text = service.get("/metrics").await.text;
    assert!(!text.contains("w2") && !text.contains("quoted"), "{text}");
    assert_eq!(value(&text, "rankwise_silent_ranks", &[]), Some(0.0));
    assert!(text.ends_with("# EOF\n"));
    service.stop().await;
}

/// E8, I8, L17, L19, section "metric habits": reasons that stand and that were given, and the load and capacity of
/// every rank, without a series of zeros; and all of them go with their rank.
#[tokio::test]
async fn reasons_load_and_capacity_are_shown_per_rank() {
    let service = Service::start().await;
    let worker = json!({
        "worker_id": "w", "endpoint": "http://x", "block_size": 4, "model_name": "m", "data_parallel_size": 2,
        "kv_events_base_endpoint": "tcp://10.0.0.2:5557", "capacity": { "scope": "per_rank", "blocks": 100 },
    });
    service.post("/workers", worker).await.expect(201);
    service.engines.send("w", 0, 0, b"\xc1".to_vec());
    service.engines.send("w", 0, 1, b"\xc1".to_vec());
    let reports = json!({ "worker_id": "w", "ranks": {
        "0": { "num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 41 } } });
    service.post("/loads", reports).await.expect(200);

    let text = service.get("/metrics").await.text;
    let of = |rank: u32, name: &str, more: &str| {
        value(&text, name, &["worker=\"w\"", "model=\"m\"", &format!("dp_rank=\"{rank}\""), more])
    };
    let undecodable = "reason=\"undecodable\"";
    assert_eq!(of(0, "rankwise_trust_reason", undecodable), Some(1.0), "{text}");
    assert_eq!(of(0, "rankwise_reasons_given_total", undecodable), Some(2.0));
    assert_eq!(of(1, "rankwise_trust_reason", undecodable), None);
    assert_eq!(of(1, "rankwise_reasons_given_total", undecodable), None);
    assert_eq!(of(0, "rankwise_running_requests", ""), Some(3.0));
    assert_eq!(of(0, "rankwise_waiting_requests", ""), Some(2.0));
    assert_eq!(of(0, "rankwise_used_blocks", ""), Some(11.0));
    assert_eq!(of(1, "rankwise_running_requests", ""), None, "unknown is not 0");
    assert_eq!(of(1, "rankwise_capacity_blocks", "provenance=\"exact\""), Some(100.0), "{text}");
    assert_eq!(value(&text, "rankwise_held_total_bytes", &[]), Some(0.0));
    assert_eq!(value(&text, "rankwise_never_heard_ranks", &[]), Some(0.0));

    // What stands is lifted by a clear; that it was given stays.
    let clear = batch(json!([["AllBlocksCleared"]]));
    service.engines.send("w", 0, 2, clear);
    let text = service.get("/metrics").await.text;
    assert_eq!(value(&text, "rankwise_trust_reason", &[undecodable]), None, "{text}");
    assert_eq!(value(&text, "rankwise_reasons_given_total", &[undecodable]), Some(2.0));
    service.call("DELETE", "/workers/w", None).await.expect(200);
    let text = service.get("/metrics").await.text;
    assert!(!text.contains("worker="), "{text}");
    service.stop().await;
}

/// I8: while the writer is in the middle of a section, everything that routers and operators ask for is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_waits_for_a_long_section() {
    let service = Service::start().await;
    let worker = json!({
        "worker_id": "w", "endpoint": "http://x", "block_size": 4, "model_name": "m",
        "kv_events_base_endpoint": "tcp://10.0.0.2:5557",
    });
    service.post("/workers", worker).await.expect(201);
    let store = batch(json!([["BlockStored", [1], null, [1, 2, 3, 4], 4, null, "GPU"]]));
    service.engines.send("w", 0, 0, store.clone());
    let (engines, stop) = (service.engines.clone(), std::sync::Arc::new(std::sync::Barrier::new(2)));
    let (waits, held) = (stop.clone(), std::sync::Arc::new(std::sync::Barrier::new(2)));
    let begun = held.clone();
    // One section for all of these; it stands still in the middle of them until it is let go.
    let writer = std::thread::spawn(move || {
        engines.send_all("w", 0, 1, store, move |nth| {
            if nth == 1 {
                begun.wait();
                waits.wait();
            }
        });
    });
    tokio::task::spawn_blocking(move || held.wait()).await.unwrap();
    let patience = std::time::Duration::from_secs(30);
    let asked = async {
        for path in ["/health", "/metrics", "/workers", "/ready", "/loads", "/capacity"] {
            service.get(path).await.expect(200);
        }
        let found = service.post("/query", json!({ "token_ids": [1, 2, 3, 4] })).await.expect(200);
        assert_eq!(found["scores"]["w"]["0"], 4, "{found}");
        service.post("/select", json!({ "token_ids": [1, 2, 3, 4] })).await.expect(200);
    };
    let answered = tokio::time::timeout(patience, asked).await;
    tokio::task::spawn_blocking(move || stop.wait()).await.unwrap();
    writer.join().unwrap();
    answered.expect("something waits for the writer");
    service.stop().await;
}

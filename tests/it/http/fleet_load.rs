//! What the service says of load and capacity: `/v1/loads`, `/capacity`, the drain question.

use serde_json::{Value, json};

use super::harness::Service;

async fn declare(service: &Service, id: &str, start: u32, more: Value) {
    let ranks = start..start + 2;
    let endpoints: Value =
        ranks.map(|rank| (rank.to_string(), json!(format!("tcp://10.0.0.1:{}", 6_000 + rank)))).collect();
    let mut body = json!({
        "worker_id": id, "model_name": "m", "block_size": 16, "data_parallel_start_rank": start,
        "data_parallel_size": 2, "endpoint": "http://10.0.0.1:8000", "kv_events_endpoints": endpoints,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    service.post("/workers", body).await.expect(201);
}

async fn report(service: &Service, id: &str, ranks: Value) {
    service.post("/loads", json!({ "worker_id": id, "ranks": ranks })).await.expect(200);
}

fn ranks_of(answer: &Value) -> Vec<(String, u64)> {
    let entries = answer["loads"].as_array().unwrap();
    assert_eq!(answer["dp_rank_count"], entries.len());
    let of =
        |entry: &Value| (entry["worker"].as_str().unwrap().to_owned(), entry["dp_rank"].as_u64().unwrap());
    entries.iter().map(of).collect()
}

/// L1, L2, L3, L4, L6: an entry per rank with a readable report, filtered by presence.
#[tokio::test]
async fn loads_list_what_is_known_and_nothing_else() {
    let service = Service::start().await;
    declare(&service, "a", 0, json!({})).await;
    declare(&service, "b", 2, json!({})).await;
    let empty = service.get("/v1/loads").await.expect(200);
    assert_eq!((ranks_of(&empty).len(), &empty["available"]), (0, &json!(false)));

    report(&service, "a", json!({ "0": { "num_running_reqs": 3, "num_waiting_reqs": 1 }, "1": {} })).await;
    report(&service, "b", json!({ "3": { "num_used_tokens": 320 }, "2": { "num_running_reqs": -1 } })).await;
    let all = service.get("/v1/loads").await.expect(200);
    assert_eq!(ranks_of(&all), [("a".to_owned(), 0), ("b".to_owned(), 3)]);
    assert_eq!(all["loads"][0]["num_total_reqs"], 4);
    assert_eq!(all["loads"][1].get("num_running_reqs"), None, "what was not reported is not there");

    let of = |path: &'static str| service.get(path);
    assert_eq!(ranks_of(&of("/v1/loads?dp_rank=0").await.expect(200)), [("a".to_owned(), 0)]);
    assert!(ranks_of(&of("/v1/loads?dp_rank=1").await.expect(200)).is_empty());
    of("/v1/loads?dp_rank=9").await.problem(400, Some("dp_rank"));
    of("/v1/loads?dp_rank=0&worker=b").await.problem(400, Some("dp_rank"));
    of("/v1/loads?dp_rank=-1").await.problem(400, Some("dp_rank"));
    of("/v1/loads?format=xml").await.problem(400, Some("format"));
    assert_eq!(ranks_of(&of("/v1/loads?worker=b").await.expect(200)), [("b".to_owned(), 3)]);
    service.engines.advance_millis(20_000);
    assert!(ranks_of(&of("/v1/loads").await.expect(200)).is_empty(), "too old to be believed");
    service.stop().await;
}

/// L11, L12: capacities with their unit and provenance; what is shared is never copied to each rank.
#[tokio::test]
async fn capacities_say_what_they_are() {
    let service = Service::start().await;
    declare(&service, "a", 0, json!({ "capacity": { "scope": "aggregate", "blocks": 1_001 } })).await;
    declare(&service, "b", 2, json!({ "capacity": { "scope": "worker_shared", "blocks": 700 } })).await;
    let workers = service.get("/capacity").await.expect(200);
    let divided = &workers[0]["ranks"]["1"];
    assert_eq!((&divided["blocks"], &divided["tokens"]), (&json!(500), &json!(8_000)));
    assert_eq!(divided["provenance"], "divided");
    assert_eq!(workers[1]["ranks"]["2"]["blocks"], Value::Null);
    assert_eq!(workers[1]["worker_shared"]["blocks"], 700);
    service.stop().await;
}

/// L13: yes, no, or that it cannot be told and why.
#[tokio::test]
async fn the_drain_question_is_answered_from_exact_figures() {
    let service = Service::start().await;
    let exact = json!({ "capacity": { "scope": "per_rank", "blocks": 100 } });
    declare(&service, "a", 0, exact.clone()).await;
    declare(&service, "b", 2, exact).await;
    let ask = || service.get("/workers/a/drain-check");
    assert_eq!(ask().await.expect(200)["drain"], "cannot_tell");
    let used = |blocks: u64| json!({ "kv_used_blocks": blocks });
    report(&service, "a", json!({ "0": used(40), "1": used(40) })).await;
    report(&service, "b", json!({ "2": used(60), "3": used(60) })).await;
    let yes = ask().await.expect(200);
    assert_eq!((&yes["drain"], &yes["needed_blocks"]), (&json!("yes"), &json!(80.0)));
    report(&service, "b", json!({ "2": used(90), "3": used(60) })).await;
    assert_eq!(ask().await.expect(200)["drain"], "no");
    service.get("/workers/nobody/drain-check").await.problem(404, None);
    service.stop().await;
}

/// L17: what engines report of themselves acts where nothing was declared, and binds where it is smaller; a
/// declared limit of requests excludes, an estimate never does, and the last worker is never drained.
#[tokio::test]
async fn reported_capacity_acts() {
    let service = Service::start().await;
    declare(&service, "a", 0, json!({ "max_running_requests": 2 })).await;
    declare(&service, "b", 2, json!({ "capacity": { "scope": "per_rank", "blocks": 3 }, "estimated": true }))
        .await;
    let idle = |tokens: u64| {
        json!({ "num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": 16, "max_total_num_tokens": tokens,
                "max_running_requests": 7 })
    };
    report(&service, "a", json!({ "0": idle(160), "1": idle(64) })).await;
    report(&service, "b", json!({ "2": { "decode_blocks": 90 } })).await;
    let workers = service.get("/capacity").await.expect(200);
    assert_eq!(workers[0]["ranks"]["0"], json!({ "blocks": 10, "tokens": 160, "provenance": "exact" }));
    assert_eq!(workers[0]["smallest"]["blocks"], 4);
    assert_eq!(workers[0]["reported"]["0"], json!({ "blocks": 10, "divided": false, "request_limit": 7 }));
    assert_eq!(workers[0]["request_limit"]["0"], 2, "a declared limit is the one that binds");
    assert_eq!(workers[1]["ranks"]["2"]["provenance"], "estimated");
    // Six blocks: too large for rank 1; rank 0 takes one more request, and is full then.
    let six: Vec<u32> = (0..96).collect();
    let select = |id: &str| {
        let body = json!({ "token_ids": six, "allowed_worker_ids": ["a"], "selection_id": id });
        service.post("/select_and_reserve", body)
    };
    assert_eq!(select("one").await.expect(200)["dp_rank"], 0);
    select("two").await.expect(429);
    // What b declared is an estimate: it neither excludes b nor lets a be drained.
    let b =
        service.post("/select", json!({ "token_ids": six, "allowed_worker_ids": ["b"] })).await.expect(200);
    assert_eq!(b["dp_rank"], 2);
    assert_eq!(service.get("/workers/a/drain-check").await.expect(200)["drain"], "cannot_tell");
    service.call("DELETE", "/workers/b", None).await.expect(200);
    let last = service.get("/workers/a/drain-check").await.expect(200);
    assert_eq!(last["drain"], "no", "{last}");
    service.stop().await;
}

/// L19: equal rank numbers of two workers are never merged; aggregates can be read, and are no rank's.
#[tokio::test]
async fn equal_ranks_of_two_workers_are_told_apart() {
    let service = Service::start().await;
    declare(&service, "a", 0, json!({})).await;
    let at = json!({ "0": "tcp://10.0.0.2:6000", "1": "tcp://10.0.0.2:6001" });
    declare(&service, "b", 0, json!({ "kv_events_endpoints": at })).await;
    report(&service, "a", json!({ "0": { "num_running_reqs": 3 } })).await;
    let body = json!({ "worker_id": "b", "ranks": { "0": { "num_running_reqs": 4 } }, "aggregate": { "num_running_reqs": 9 } });
    service.post("/loads", body).await.expect(200);
    let all = service.get("/v1/loads").await.expect(200);
    assert_eq!(ranks_of(&all), [("a".to_owned(), 0), ("b".to_owned(), 0)]);
    assert_eq!(
        (&all["aggregates"][0]["worker"], &all["aggregates"][0]["num_running_reqs"]),
        (&json!("b"), &json!(9))
    );
    service.get("/v1/loads?dp_rank=0").await.problem(400, Some("dp_rank"));
    let one = service.get("/v1/loads?dp_rank=0&worker=b").await.expect(200);
    assert_eq!(
        (ranks_of(&one), &one["loads"][0]["num_running_reqs"]),
        (vec![("b".to_owned(), 0)], &json!(4))
    );
    service.stop().await;
}

/// S1, R1: two workers of four ranks each, idle, and a request of 12.25 blocks: eight times 24.250, and 12.250
/// for the rank that holds the prefix when it comes again.
#[tokio::test]
async fn eight_formula_lines_to_the_digit() {
    let service = Service::start().await;
    for (id, start) in [("w1", 0), ("w2", 4)] {
        let endpoints: Value = (start..start + 4)
            .map(|rank| (rank.to_string(), json!(format!("tcp://10.0.0.{}:{}", start + 1, 6_000 + rank))))
            .collect();
        let body = json!({
            "worker_id": id, "model_name": "m", "block_size": 16, "data_parallel_start_rank": start,
            "data_parallel_size": 4, "endpoint": "http://10.0.0.1:8000", "kv_events_endpoints": endpoints,
        });
        service.post("/workers", body).await.expect(201);
        let idle: Value = (start..start + 4)
            .map(|rank| (rank.to_string(), json!({ "decode_blocks": 0, "prefill_tokens": 0 })))
            .collect();
        report(&service, id, idle).await;
    }
    let tokens: Vec<u32> = (0..196).collect();
    let select = || service.post("/select", json!({ "token_ids": tokens, "candidates": "all" }));
    let first = select().await.expect(200);
    let candidates = first["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 8);
    for candidate in candidates {
        let line = "24.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 12.250 + 12.000";
        assert_eq!(candidate["formula"], line);
    }

    let hashes: Vec<u32> = (1..=12).collect();
    let stored = json!([{
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": null,
        "token_ids": &tokens[..192], "block_size": 16,
    }]);
    service.engines.send("w2", 6, 0, super::harness::batch(stored));
    let repeat = select().await.expect(200);
    assert_eq!((&repeat["worker_id"], &repeat["dp_rank"]), (&json!("w2"), &json!(6)));
    assert_eq!(repeat["local_rank"], 2);
    assert_eq!(repeat["formula"], "12.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 12.000");
    service.stop().await;
}

/// L14: changes come debounced per rank: the last of a burst, once, and each rank for itself.
#[tokio::test]
async fn changes_of_load_are_watched_debounced() {
    let service = Service::start().await;
    declare(&service, "a", 0, json!({})).await;
    let mut watching = service.client.get(format!("{}/loads/watch", service.base)).send().await.unwrap();
    assert_eq!(watching.status(), 200);
    let mut text = String::new();
    // Rank 0 changes ten times in a row, 20 ms apart on the service's clock; rank 1 once.
    report(&service, "a", json!({ "1": { "num_running_reqs": 5 } })).await;
    for running in 0..10 {
        report(&service, "a", json!({ "0": { "num_running_reqs": running } })).await;
        service.engines.advance_millis(20);
        tokio::time::sleep(std::time::Duration::from_millis(60)).await;
    }
    service.engines.advance_millis(1_000);
    let both = |text: &str| {
        text.matches("\"num_running_reqs\":9").count() == 1
            && text.matches("\"num_running_reqs\":5").count() == 1
    };
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !both(&text) {
        assert!(std::time::Instant::now() < end, "the changes are not told: {text}");
        let wait = std::time::Duration::from_millis(200);
        match tokio::time::timeout(wait, watching.chunk()).await {
            Ok(chunk) => text.push_str(&String::from_utf8_lossy(&chunk.unwrap().expect("the watch goes on"))),
            // The watcher may have looked late; its quiet time runs on the service's clock.
            Err(_) => service.engines.advance_millis(200),
        }
    }
    // Without debouncing there would be ten events of rank 0; 200 ms are at most its longest wait.
    let told = text.matches("\"dp_rank\":0").count();
    assert!((1..=4).contains(&told), "{told} events of rank 0: {text}");
    drop(watching);
    service.stop().await;
}

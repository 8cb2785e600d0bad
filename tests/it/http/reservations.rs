//! Reservations over HTTP: statuses, what the loads show, and what ends them.

use std::time::Duration;

use rankwise::indexer::Config;
use rankwise::load::{LedgerConfig, LoadConfig, LoadMode};
use rankwise::routing::RouterConfig;
use rankwise::service::ServiceConfig;
use serde_json::{Value, json};

use super::harness::Service;

async fn service(mode: LoadMode) -> Service {
    let ledger = LedgerConfig { lease: Duration::from_secs(60), ..LedgerConfig::default() };
    let load = LoadConfig { mode, ledger, ..LoadConfig::default() };
    let config = Config { load, ..Config::default() };
    let service = Service::start_with(config, RouterConfig::default(), ServiceConfig::default()).await;
    for (worker, start) in [("a", 0), ("b", 4)] {
        let body = json!({
            "worker_id": worker, "endpoint": "http://127.0.0.1:9000", "model_name": "m", "block_size": 4,
            "data_parallel_start_rank": start, "data_parallel_size": 2, "events": "none",
        });
        service.post("/workers", body).await.expect(201);
    }
    service
}

/// What is reserved, over all ranks: requests, prefill tokens, blocks.
async fn reserved(service: &Service) -> (u64, u64, f64) {
    let loads = service.get("/loads").await.expect(200);
    let ranks = loads[0]["loads"].as_array().unwrap();
    let sum = |field: &str| ranks.iter().map(|rank| rank["reserved"][field].as_f64().unwrap()).sum::<f64>();
    (sum("requests") as u64, sum("prefill_tokens") as u64, sum("decode_blocks"))
}

/// S4: chosen and booked in one step; the id is the caller's or ours; twice is 409 and books nothing more.
#[tokio::test]
async fn select_and_reserve_books_once() {
    let service = service(LoadMode::Ledger).await;
    let body = json!({ "token_ids": (0..18).collect::<Vec<_>>(), "selection_id": "r1" });
    let first = service.post("/select_and_reserve", body.clone()).await.expect(200);
    assert_eq!((&first["selection_id"], &first["track_prefill_tokens"]), (&json!("r1"), &json!(true)));
    assert_eq!(first["sequence_hashes"].as_array().unwrap().len(), 4);
    assert_eq!(reserved(&service).await, (1, 18, 4.0));
    service.post("/select_and_reserve", body.clone()).await.problem(409, Some("selection_id"));
    assert_eq!(reserved(&service).await, (1, 18, 4.0));
    // The same prompt finds its blocks where they were sent, and books what is left to do.
    let unnamed = json!({ "token_ids": body["token_ids"] });
    let second = service.post("/select_and_reserve", unnamed).await.expect(200);
    assert_eq!((&second["worker_id"], &second["dp_rank"]), (&first["worker_id"], &first["dp_rank"]));
    assert_eq!(reserved(&service).await, (2, 20, 4.0));
    let made = second["selection_id"].as_str().unwrap();
    service.call("DELETE", &format!("/reservations/{made}"), None).await.expect(200);
    let long = json!({ "token_ids": [1], "selection_id": "x".repeat(257) });
    service.post("/select_and_reserve", long).await.problem(422, Some("selection_id"));

    service.call("POST", "/reservations/r1/prefill_complete", None).await.expect(200);
    service.call("POST", "/reservations/r1/prefill_complete", None).await.expect(200);
    service.post("/reservations/r1/output_block", json!({ "decay_fraction": 0.5 })).await.expect(200);
    assert_eq!(reserved(&service).await, (1, 0, 4.5));
    let bad = json!({ "decay_fraction": 1.5 });
    service.post("/reservations/r1/output_block", bad).await.problem(400, Some("decay_fraction"));
    service.call("POST", "/reservations/r1/output_block", None).await.problem(415, None);
    let text = service.get("/metrics").await.text;
    for line in [
        "rankwise_reservations{} 1",
        "rankwise_reserve_total{result=\"id_in_use\"} 1",
        "rankwise_reserved_blocks{",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
    service.call("DELETE", "/reservations/r1", None).await.expect(200);
    service.call("DELETE", "/reservations/r1", None).await.problem(404, None);
    service.call("POST", "/reservations/r1/prefill_complete", None).await.problem(404, None);
    assert_eq!(reserved(&service).await, (0, 0, 0.0));
    service.stop().await;
}

/// S4, R5: a selection is booked by its id, once; an explicit booking names its rank.
#[tokio::test]
async fn reservations_are_booked_by_id_or_by_rank() {
    let service = service(LoadMode::Ledger).await;
    let book = |body: Value| service.post("/reservations", body);
    let select = json!({ "token_ids": (0..8).collect::<Vec<_>>(), "selection_id": "s1" });
    service.post("/select", select).await.expect(200);
    assert_eq!(reserved(&service).await, (0, 0, 0.0));
    let booked = book(json!({ "selection_id": "s1" })).await.expect(201);
    assert!(booked["worker_id"].is_string() && booked["dp_rank"].is_u64(), "{booked}");
    assert_eq!(reserved(&service).await, (1, 8, 2.0));
    book(json!({ "selection_id": "s1" })).await.problem(404, Some("selection_id"));
    let explicit = |worker: &str, rank: Value, tokens: u64| {
        json!({
            "selection_id": "e1", "worker_id": worker, "dp_rank": rank, "token_ids": [1, 2, 3, 4, 5],
            "effective_prefill_tokens": tokens,
        })
    };
    book(explicit("b", Value::Null, 5)).await.problem(400, Some("dp_rank"));
    book(explicit("b", json!(0), 5)).await.problem(404, Some("dp_rank"));
    book(explicit("z", json!(0), 5)).await.problem(404, Some("worker_id"));
    book(explicit("b", json!(4), 6)).await.problem(400, Some("effective_prefill_tokens"));
    assert_eq!(reserved(&service).await, (1, 8, 2.0));
    assert_eq!(book(explicit("b", json!(4), 5)).await.expect(201)["dp_rank"], 4);
    book(explicit("b", json!(5), 5)).await.problem(409, Some("selection_id"));
    assert_eq!(reserved(&service).await, (2, 13, 3.0));
    book(json!({ "worker_id": "b", "dp_rank": 4 })).await.problem(422, Some("selection_id"));
    service.stop().await;
}

/// R7, S4: a booking goes with its worker, and with its lease.
#[tokio::test]
async fn bookings_go_with_their_worker_and_their_lease() {
    let service = service(LoadMode::Reports).await;
    for (id, worker) in [("one", "a"), ("two", "b")] {
        let body = json!({ "token_ids": [1, 2, 3, 4], "selection_id": id, "allowed_worker_ids": [worker] });
        service.post("/select_and_reserve", body).await.expect(200);
    }
    assert_eq!(reserved(&service).await, (2, 8, 2.0));
    service.call("DELETE", "/workers/b", None).await.expect(200);
    service.call("DELETE", "/reservations/two", None).await.problem(404, None);
    assert_eq!(reserved(&service).await, (1, 4, 1.0));
    // L15: what is reserved makes no rank known by itself.
    let loads = service.get("/loads").await.expect(200);
    let ranks = loads[0]["loads"].as_array().unwrap();
    assert!(ranks.iter().all(|rank| rank["state"] == "unknown"), "{loads}");
    service.engines.advance_millis(60_000);
    assert_eq!(reserved(&service).await, (0, 0, 0.0));
    service.call("DELETE", "/reservations/one", None).await.problem(404, None);
    service.stop().await;
}

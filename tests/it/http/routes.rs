//! Route by route: what the recordings do not show.

use std::time::Duration;

use rankwise::indexer::Config;
use rankwise::load::BusyThreshold;
use rankwise::routing::RouterConfig;
use rankwise::service::ServiceConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::harness::{Service, batch};

fn register(id: Value, port: u16, model: &str) -> Value {
    json!({ "instance_id": id, "endpoint": format!("tcp://10.0.0.1:{port}"), "model_name": model, "block_size": 4 })
}

/// `w2` with the ranks 4 to 7.
fn w2() -> Value {
    json!({
        "worker_id": "w2", "endpoint": "http://10.0.0.2:8000", "block_size": 4, "model_name": "m",
        "data_parallel_start_rank": 4, "data_parallel_size": 4,
        "kv_events_base_endpoint": "tcp://10.0.0.2:5557", "engine": "vllm",
        "capacity": { "scope": "per_rank", "blocks": 100 },
    })
}

fn store(hashes: Value, tokens: Value) -> Vec<u8> {
    batch(json!([["BlockStored", hashes, null, tokens, 4, null, "GPU"]]))
}

// === pins and choice ===

/// R4, R5, C44: a pin outside the range is refused, never moved; rank 0 is a rank; the pick names the local rank.
#[tokio::test]
async fn pins_are_answered_or_refused() {
    let router = RouterConfig { busy_threshold: BusyThreshold::new(0.9), ..RouterConfig::default() };
    let service = Service::start_with(Config::default(), router, ServiceConfig::default()).await;
    service.post("/workers", w2()).await.expect(201);
    let load = |blocks: u64| json!({ "kv_used_blocks": blocks, "decode_blocks": blocks });
    let ranks = json!({ "4": load(10), "5": load(95), "6": load(10), "7": load(10) });
    service.post("/loads", json!({ "worker_id": "w2", "ranks": ranks })).await.expect(200);
    let pin =
        |pin: Value| service.post("/select", json!({ "token_ids": [1, 2, 3, 4], "pinned_worker": pin }));

    for outside in [2, 0, 8] {
        pin(json!({ "worker_id": "w2", "dp_rank": outside })).await.problem(400, Some("pinned_worker"));
    }
    pin(json!({ "worker_id": "w9", "dp_rank": 4 })).await.problem(404, Some("pinned_worker"));
    pin(json!({ "worker_id": "w2", "dp_rank": 5 })).await.problem(429, None);

    let picked = pin(json!({ "worker_id": "w2", "dp_rank": 6 })).await.expect(200);
    assert_eq!((&picked["dp_rank"], &picked["local_rank"]), (&json!(6), &json!(2)));
    let dispatch = json!({ "local_rank": 2, "header": "X-data-parallel-rank", "body_fields": [] });
    assert_eq!((&picked["dispatch"], &picked["reason"]), (&dispatch, &json!("pinned")));

    let any = pin(json!({ "worker_id": "w2", "dp_rank": null })).await.expect(200);
    assert!([4, 6, 7].contains(&any["dp_rank"].as_u64().unwrap()), "{any}");
    let overloaded = json!([{ "worker_id": "w2", "dp_rank": 5, "reason": "overloaded" }]);
    assert_eq!((&any["excluded"], &any["excluded_counts"]), (&overloaded, &json!({ "overloaded": 1 })));
    service.stop().await;
}

/// S2, S3: every candidate's terms, the reason, the formula, trust; without a report the order is by prefill.
#[tokio::test]
async fn a_selection_explains_itself() {
    let service = Service::start().await;
    service.post("/workers", w2()).await.expect(201);
    service.engines.send("w2", 6, 0, store(json!([1, 2]), json!([1, 2, 3, 4, 5, 6, 7, 8])));
    let body = json!({ "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "selection_id": "s", "candidates": "all" });
    let unknown = service.post("/select", body.clone()).await.expect(200);
    assert_eq!((&unknown["dp_rank"], &unknown["reason"]), (&json!(6), &json!("load_unknown")));
    assert_eq!((&unknown["logit"], &unknown["potential_decode_blocks"]), (&Value::Null, &Value::Null));
    assert_eq!(unknown["selection_id"], "s");

    let ranks = json!({ "4": { "decode_blocks": 0 }, "6": { "decode_blocks": 1, "prefill_tokens": 0 } });
    service.post("/loads", json!({ "worker_id": "w2", "ranks": ranks })).await.expect(200);
    let known = service.post("/select", body.clone()).await.expect(200);
    assert_eq!((&known["dp_rank"], &known["reason"]), (&json!(6), &json!("lowest_logit")));
    assert_eq!(known["formula"], "3.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 3.000");
    assert_eq!(
        (&known["trust"], &known["may_err"], &known["age_ms"]),
        (&json!("live"), &json!([]), &json!(0))
    );
    let candidates = known["candidates"].as_array().unwrap();
    assert_eq!(candidates.len(), 4);
    let of = |rank: u64| candidates.iter().find(|one| one["dp_rank"] == rank).unwrap();
    assert_eq!((&of(4)["logit"], &of(4)["load"]), (&json!(4.25), &json!("known")));
    assert_eq!((&of(5)["logit"], &of(5)["load"]), (&Value::Null, &json!("unknown")));
    assert_eq!((&of(6)["device_blocks"], &of(6)["tree_size"]), (&json!(2), &json!(2)));

    // Overrides are applied: with a weight of 0 the cache counts for nothing.
    let mut cold = body.clone();
    cold["router_config_override"] = json!({ "overlap_weight": 0.0 });
    assert_eq!(service.post("/select", cold).await.expect(200)["dp_rank"], 4);
    let mut bad = body;
    bad["router_config_override"] = json!({ "router_temperature": -1 });
    service.post("/select", bad).await.problem(422, Some("router_config_override.temperature"));
    service.stop().await;
}

/// R6: where the engine balances, the pick names no rank and says why.
#[tokio::test]
async fn an_engine_that_balances_gets_no_rank() {
    let service = Service::start().await;
    let mut worker = w2();
    worker["balance"] = json!("internal");
    service.post("/workers", worker).await.expect(201);
    let picked = service.post("/select", json!({ "token_ids": [1] })).await.expect(200);
    assert_eq!((&picked["worker_id"], &picked["dp_rank"]), (&json!("w2"), &Value::Null));
    assert_eq!((&picked["dispatch"], &picked["reason"]), (&Value::Null, &json!("engine_balances")));
    assert!(picked["why_no_rank"].as_str().unwrap().contains("engine picks"));
    service.stop().await;
}

/// R9: a selection names the role that it is for; 503 while nobody has it.
#[tokio::test]
async fn roles_are_asked_for() {
    let service = Service::start().await;
    let mut worker = w2();
    worker["role"] = json!("decode");
    service.post("/workers", worker).await.expect(201);
    let ask = |role: &str| service.post("/select", json!({ "token_ids": [1], "role": role }));
    ask("decode").await.expect(200);
    ask("prefill").await.problem(503, Some("role"));
    ask("other").await.problem(422, Some("role"));
    service.stop().await;
}

/// S1: ties by chance repeat with the seed.
#[tokio::test]
async fn chance_is_seeded() {
    let mut runs = Vec::new();
    for _ in 0..2 {
        let seeded = ServiceConfig { seed: Some(7), ..ServiceConfig::default() };
        let service = Service::start_with(Config::default(), RouterConfig::default(), seeded).await;
        service.post("/workers", w2()).await.expect(201);
        let mut picks = Vec::new();
        for _ in 0..16 {
            let picked = service.post("/select", json!({ "token_ids": [1] })).await.expect(200);
            picks.push(picked["dp_rank"].as_u64().unwrap());
        }
        runs.push(picks);
        service.stop().await;
    }
    assert_eq!(runs[0], runs[1]);
    assert!(runs[0].iter().any(|pick| *pick != runs[0][0]), "16 ties fell alike: {runs:?}");
}

// === names and shapes ===

/// R1: a text id and a number are one worker; answers use the type of the registration.
#[tokio::test]
async fn ids_are_answered_as_registered() {
    let service = Service::start().await;
    service.post("/register", register(json!("engine-01"), 6001, "m")).await.expect(201);
    service.post("/register", register(json!(7), 6002, "m")).await.expect(201);
    let workers = service.get("/workers").await.expect(200);
    let ids: Vec<_> =
        workers.as_array().unwrap().iter().map(|worker| worker["instance_id"].clone()).collect();
    assert_eq!(ids, [json!(7), json!("engine-01")]);
    let pin = json!({ "token_ids": [1], "pinned_worker": { "worker_id": "7" } });
    assert_eq!(service.post("/select", pin).await.expect(200)["worker_id"], json!(7));
    for bad in [json!(-1), json!(1.5), json!(1e30), json!(null), json!([])] {
        service.post("/register", register(bad, 6003, "m")).await.problem(422, Some("instance_id"));
    }
    service.post("/unregister", json!({ "instance_id": "7", "model_name": "m" })).await.expect(200);
    service
        .post("/unregister", json!({ "instance_id": 7, "model_name": "m" }))
        .await
        .problem(404, Some("instance_id"));
    service.stop().await;
}

/// Mooncake's words are answered in Mooncake's shape; a pool need not be named while it is the only one.
#[tokio::test]
async fn the_shape_follows_the_words() {
    let service = Service::start().await;
    let mooncake = json!({
        "instance_id": "e1", "endpoint": "tcp://10.0.0.1:6001", "modelname": "m", "tenant_id": "t",
        "block_size": 4, "type": "vLLM", "additionalsalt": "",
    });
    service.post("/register", mooncake).await.expect(201);
    service.engines.send("e1", 0, 0, store(json!([1]), json!([1, 2, 3, 4])));
    let ask = |mut names: Value| {
        names["token_ids"] = json!([1, 2, 3, 4, 5]);
        service.post("/query", names)
    };
    let answer = ask(json!({ "model": "m", "tenant_id": "t" })).await.expect(200);
    let e1 = &answer["t"]["e1"];
    assert_eq!(
        (&e1["GPU"], &e1["DP"], &e1["CPU"], &e1["DISK"]),
        (&json!(4), &json!({ "0": 4 }), &json!(4), &json!(4))
    );
    assert_eq!((&e1["longest_matched"], &e1["ranks"]["0"]["trust"]), (&json!(4), &json!("live")));

    let dynamo = ask(json!({})).await.expect(200);
    assert_eq!(dynamo["scores"], json!({ "e1": { "0": 4 } }));
    ask(json!({ "model_name": "m" })).await.problem(404, Some("model_name"));
    // A1: beside `model_name`, `tenant_id` is no group, so it must be the same one.
    ask(json!({ "model_name": "m", "tenant_id": "t" })).await.problem(400, Some("tenant_id"));
    ask(json!({ "model_name": "m", "tenant_id": "default" })).await.problem(404, Some("model_name"));
    let both = json!({ "model_name": "m", "tenant_id": "t", "routing_group": "t" });
    assert_eq!(ask(both).await.expect(200)["scores"], dynamo["scores"]);
    ask(json!({ "model": "m", "tenant_id": "t", "routing_group": "u" }))
        .await
        .problem(400, Some("tenant_id"));
    ask(json!({ "model": "m", "modelname": "n", "tenant_id": "t" })).await.problem(400, Some("modelname"));
    assert_eq!(
        ask(json!({ "model_name": "m", "routing_group": "t" })).await.expect(200)["scores"],
        dynamo["scores"]
    );

    service.post("/register", register(json!(2), 6002, "other")).await.expect(201);
    ask(json!({})).await.problem(422, Some("model_name"));
    service.stop().await;
}

/// E4, I6: what each rank's answer rests on stands beside it.
#[tokio::test]
async fn answers_say_what_they_rest_on() {
    let service = Service::start().await;
    service.post("/register", register(json!(1), 6001, "m")).await.expect(201);
    service.engines.send("1", 0, 0, store(json!([1]), json!([1, 2, 3, 4])));
    let events = json!([["BlockStored", [2], 1, [5, 6, 7, 8], 4, null, "CPU"]]);
    // The numbers 1 to 8 never come, and there is no replay endpoint.
    service.engines.send("1", 0, 9, batch(events));
    service.engines.advance_millis(250);
    let body = json!({ "token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "model_name": "m" });
    let answer = service.post("/query", body.clone()).await.expect(200);
    let expected = json!([{
        "worker_id": 1, "dp_rank": 0, "device": 4, "host": 8, "disk": 8, "trust": "partial",
        "may_err": ["may_miss", "may_overcredit"], "age_ms": 250, "groups_left_out": false,
        "reasons": ["lost_batches"],
    }]);
    assert_eq!(answer["ranks"], expected);
    assert_eq!(answer["scores"], json!({ "1": { "0": 4 } }));
    let mut any = body;
    any["tier"] = json!("any");
    assert_eq!(service.post("/query", any).await.expect(200)["scores"], json!({ "1": { "0": 8 } }));
    service.stop().await;
}

/// I2: images and other keys are part of the content.
#[tokio::test]
async fn queries_carry_images_and_keys() {
    let service = Service::start().await;
    service.post("/register", register(json!(1), 6001, "m")).await.expect(201);
    let image = "ab".repeat(32);
    let event = json!([[
        "BlockStored",
        [1, 2],
        null,
        [1, 2, 9, 9, 9, 9, 7, 8],
        4,
        null,
        "GPU",
        null,
        [[[image, 2]], [[image, -2]]]
    ]]);
    service.engines.send("1", 0, 0, batch(event));
    let ask = |field: &str, value: Value| {
        let mut body = json!({ "token_ids": [1, 2, 9, 9, 9, 9, 7, 8], "model_name": "m" });
        body[field] = value;
        service.post("/query", body)
    };
    let scores = json!({ "1": { "0": 8 } });
    let mm = json!([{ "identifier": image, "offset": 2, "length": 4 }]);
    assert_eq!(ask("mm", mm).await.expect(200)["scores"], scores);
    let elsewhere = json!([{ "identifier": image, "offset": 3, "length": 3 }]);
    assert_eq!(ask("mm", elsewhere).await.expect(200)["scores"], json!({}));
    assert_eq!(ask("mm", json!([])).await.expect(200)["scores"], json!({}));
    let keys = json!([[[image, 2]], [[image, -2]]]);
    assert_eq!(ask("extra_keys", keys).await.expect(200)["scores"], scores);
    // As in events, the last bare text of the first block is the salt, whatever stands beside it.
    let salted = json!([[[image, 2], "tenant-1"], [[image, -2]]]);
    assert_eq!(ask("extra_keys", salted).await.expect(200)["scores"], json!({}));
    ask("extra_keys", json!([["0x123"]])).await.problem(400, Some("extra_keys[0]"));
    service.stop().await;
}

// === hashes ===

/// C48: 64-bit hashes survive JSON in all three spellings; a double is refused.
#[tokio::test]
async fn hashes_survive_json() {
    let service = Service::start().await;
    service.post("/register", register(json!("w1"), 6001, "m")).await.expect(201);
    let names = json!([14_681_692_605_194_770_420_u64, 4_876_245_085_811_370_259_u64]);
    service.engines.send("w1", 0, 0, store(names, json!([1, 2, 3, 4, 5, 6, 7, 8])));
    let by_names = |hashes: &str| {
        let body = format!("{{\"worker\":\"w1\",\"dp_rank\":0,\"block_hashes\":{hashes}}}");
        service.raw("POST", "/query_by_hash", Some("application/json"), Some(body.into_bytes()))
    };
    let text = by_names("[\"14681692605194770420\",\"0x43abe711f187e913\"]").await.expect(200);
    assert_eq!(text["scores"], json!({ "w1": { "0": 8 } }));
    assert_eq!(by_names("[14681692605194770420]").await.expect(200)["scores"], json!({ "w1": { "0": 4 } }));
    assert_eq!(by_names("[-3765051468514781196]").await.expect(200)["scores"], json!({ "w1": { "0": 4 } }));
    for bad in [
        "[1.4681692605194770e19]",
        "[1.0]",
        "[1e3]",
        "[\"x\"]",
        "[\"\"]",
        "[\"+1\"]",
        "[18446744073709551616]",
    ] {
        by_names(bad).await.problem(400, Some("block_hashes[0]"));
    }
    by_names("[true]").await.problem(422, Some("block_hashes[0]"));

    let body = json!({ "token_ids": [1, 2, 3, 4], "model_name": "m" });
    assert!(service.post("/query", body.clone()).await.expect(200).get("sequence_hashes").is_none());
    let answer = service.post("/query?hashes=string", body.clone()).await.expect(200);
    // The first block's sequence hash is its local hash; in `hashes.json` the same four tokens are these.
    assert_eq!(answer["sequence_hashes"], json!(["14643705804678351452"]));
    let number = service.post("/query?hashes=number", body.clone()).await.expect(200);
    assert_eq!(number["block_hashes"], json!([-3_803_038_269_031_200_164_i64]));
    let select = service.post("/select?hashes=string", body.clone()).await.expect(200);
    assert_eq!(select["sequence_hashes"], answer["sequence_hashes"]);
    let url = format!("{}/query", service.base);
    let header =
        service.client.post(url).header("x-rankwise-hashes", "string").json(&body).send().await.unwrap();
    assert_eq!(header.json::<Value>().await.unwrap()["block_hashes"], answer["block_hashes"]);
    service.post("/query?hashes=hex", body).await.problem(400, Some("hashes"));
    service.stop().await;
}

/// Engine names mean something on one rank only, and sequence hashes are enough alone.
#[tokio::test]
async fn hash_queries_name_what_is_wrong() {
    let service = Service::start().await;
    service.post("/register", register(json!(1), 6001, "m")).await.expect(201);
    service.engines.send("1", 0, 0, store(json!([1]), json!([1, 2, 3, 4])));
    let ask = |body: Value| service.post("/query_by_hash", body);
    ask(json!({ "worker": 1, "block_hashes": [1] })).await.problem(422, Some("dp_rank"));
    ask(json!({ "worker": 1, "dp_rank": 3, "block_hashes": [1] })).await.problem(400, Some("dp_rank"));
    ask(json!({ "worker": 2, "dp_rank": 0, "block_hashes": [1] })).await.problem(404, Some("worker"));
    ask(json!({ "model_name": "m" })).await.problem(422, Some("block_hashes"));
    let lengths = json!({ "model_name": "m", "block_hashes": [1, 2], "seq_hashes": [1] });
    ask(lengths).await.problem(400, Some("seq_hashes"));
    let sequence = json!({ "model_name": "m", "seq_hashes": ["14643705804678351452"] });
    assert_eq!(ask(sequence).await.expect(200)["scores"], json!({ "1": { "0": 4 } }));
    service.stop().await;
}

// === loads ===

/// C36, C37, C43, L4, L6: bad entries are refused one by one, and unknown is null.
#[tokio::test]
async fn load_reports_are_taken_entry_by_entry() {
    let service = Service::start().await;
    let mut worker = w2();
    worker["data_parallel_start_rank"] = json!(0);
    service.post("/workers", worker).await.expect(201);
    let entries = json!([
        { "dp_rank": 0, "decode_blocks": 4 }, { "dp_rank": 1, "decode_blocks": -1 },
        { "dp_rank": 2, "decode_blocks": 7 }, { "dp_rank": 2, "decode_blocks": 9 },
        { "dp_rank": 3, "decode_blocks": "NaN" }, { "dp_rank": 9, "decode_blocks": 1 },
    ]);
    let counts = service.post("/loads", json!({ "worker_id": "w2", "entries": entries })).await.expect(200);
    let of = |field: &str| counts[field].as_u64().unwrap();
    assert_eq!((of("accepted"), of("refused_entries"), of("out_of_range")), (1, 4, 1));
    let twice = "{\"worker_id\":\"w2\",\"ranks\":{\"1\":{\"decode_blocks\":1},\"1\":{\"decode_blocks\":2},\"2\":[5],\"x\":{\"decode_blocks\":1}},\"aggregate\":{\"decode_blocks\":9}}";
    let counts =
        service.raw("POST", "/loads", Some("application/json"), Some(twice.into())).await.expect(200);
    assert_eq!((&counts["accepted"], &counts["refused_entries"]), (&json!(0), &json!(4)), "{counts}");

    let loads = service.get("/loads").await.expect(200);
    let ranks = loads[0]["loads"].as_array().unwrap();
    assert_eq!((&ranks[0]["state"], &ranks[0]["decode_blocks"]), (&json!("known"), &json!(4.0)));
    assert_eq!(
        (&ranks[0]["potential_prefill_tokens"], &ranks[0]["basis"]),
        (&Value::Null, &json!("decode_blocks"))
    );
    for unknown in &ranks[1..] {
        assert_eq!(
            (&unknown["state"], &unknown["potential_decode_blocks"]),
            (&json!("unknown"), &Value::Null)
        );
        assert_eq!(unknown["basis"], "never_reported");
    }
    // A prompt as long as a number can say does not overflow what is added to it.
    let endless = json!({ "block_hashes": [], "sequence_hashes": [], "isl_tokens": u64::MAX });
    let potential = service.post("/potential_loads", endless.clone()).await.expect(200);
    assert_eq!(potential[0]["load"], "known");
    let refused = service.post("/select", endless).await.problem(400, None);
    assert_eq!(refused["type"], "urn:rankwise:problem:too_large");
    service.post("/loads", json!({ "worker_id": "w9", "ranks": {} })).await.problem(404, Some("worker_id"));
    service.post("/loads", json!({ "worker_id": "w2", "ranks": [] })).await.problem(422, Some("ranks"));
    let source = "s".repeat(65);
    service.post("/loads", json!({ "worker_id": "w2", "source": source })).await.problem(422, Some("source"));
    service.engines.advance_millis(60_000);
    assert_eq!(service.get("/loads").await.expect(200)[0]["loads"][0]["basis"], "too_old");
    service.stop().await;
}

// === workers ===

/// R2, C45: pieces become a worker when they are complete; what can never be is refused and changes nothing.
#[tokio::test]
async fn workers_are_declared_in_pieces() {
    let service = Service::start().await;
    assert_eq!(service.get("/ready").await.expect(503)["schedulable_workers"], 0);
    let incomplete =
        service.post("/workers", json!({ "worker_id": 1, "endpoint": "http://x" })).await.expect(201);
    assert_eq!(incomplete["lifecycle"], "incomplete");
    service.get("/ready").await.expect(503);
    let patch = |body: Value| service.call("PATCH", "/workers/1", Some(body));
    patch(json!({ "block_size": 4 })).await.expect(200);
    let complete = patch(json!({ "kv_events_endpoint": "tcp://10.0.0.1:6001" })).await.expect(200);
    assert_eq!(
        (&complete["lifecycle"], &complete["endpoints"]),
        (&json!("schedulable"), &json!({ "0": "tcp://10.0.0.1:6001" }))
    );
    let ready = json!({ "ready": true, "schedulable_workers": 1 });
    assert_eq!(service.get("/ready").await.expect(200), ready);
    assert_eq!(service.get("/ready?verbose").await.expect(200)["workers"][0]["lifecycle"], "schedulable");
    service.engines.send("1", 0, 0, store(json!([1]), json!([1, 2, 3, 4])));

    patch(json!({ "data_parallel_size": 0 })).await.problem(400, Some("data_parallel_size"));
    patch(json!({ "data_parallel_size": 4097 })).await.problem(400, Some("data_parallel_size"));
    let past = json!({ "data_parallel_start_rank": u32::MAX, "data_parallel_size": 2 });
    patch(past).await.problem(400, Some("data_parallel_size"));
    patch(json!({ "kv_events_endpoint": "tcp://10.0.0.1:0" })).await.problem(400, Some("kv_events_endpoint"));
    patch(json!({ "total_kv_blocks": "x" })).await.problem(422, Some("total_kv_blocks"));
    patch(json!({ "taints": vec!["t"; 1], "model_name": "x".repeat(600) }))
        .await
        .problem(400, Some("model_name"));
    let query = json!({ "token_ids": [1, 2, 3, 4] });
    assert_eq!(service.post("/query", query.clone()).await.expect(200)["scores"], json!({ "1": { "0": 4 } }));

    // Registered rank by rank: there is no record that a patch could be laid upon.
    service.post("/register", register(json!(2), 6002, "m")).await.expect(201);
    service.call("PATCH", "/workers/2", Some(json!({}))).await.problem(409, None);
    service.call("DELETE", "/workers/1", None).await.expect(200);
    service.call("DELETE", "/workers/1", None).await.problem(404, Some("worker_id"));
    assert_eq!(service.post("/query", query).await.expect(200)["scores"], json!({}));
    let mut other = register(json!(3), 6003, "m");
    other["type"] = json!("TensorRT-LLM");
    service.post("/register", other).await.expect(201);
    // A parser quotes what it was given; an answer does not carry it back whole.
    let long = service.post("/query", json!({ "token_ids": "x".repeat(1 << 20) })).await;
    assert!(long.text.len() < 5_000, "{} bytes", long.text.len());
    long.problem(422, Some("token_ids"));
    service.stop().await;
}

/// R3, C46: a range in one registration, ports by the global rank, and collisions refused by field.
#[tokio::test]
async fn a_range_registers_at_once() {
    let service = Service::start().await;
    let mut range = register(json!("w2"), 5557, "m");
    range["dp_rank"] = json!(4);
    range["data_parallel_size"] = json!(2);
    service.post("/register", range.clone()).await.expect(201);
    let workers = service.get("/workers").await.expect(200);
    let endpoints = json!({ "4": "tcp://10.0.0.1:5561", "5": "tcp://10.0.0.1:5562" });
    assert_eq!(workers[0]["endpoints"], endpoints);
    service.post("/register", range).await.problem(409, Some("dp_rank"));
    service.post("/register", register(json!("w3"), 5562, "m")).await.problem(409, Some("endpoint"));
    let mut other = register(json!("w3"), 5570, "m");
    other["block_size"] = json!(16);
    service.post("/register", other).await.problem(409, Some("block_size"));
    let one = json!({ "instance_id": "w2", "model_name": "m", "dp_rank": 4 });
    service.post("/unregister", one.clone()).await.expect(200);
    service.post("/unregister", one).await.problem(404, Some("dp_rank"));
    assert_eq!(
        service.get("/workers").await.expect(200)[0]["endpoints"],
        json!({ "5": "tcp://10.0.0.1:5562" })
    );
    service.stop().await;
}

// === the edge ===

/// Every refusal is a problem that names its cause, whatever layer it comes from.
#[tokio::test]
async fn what_is_no_request_is_a_problem_too() {
    let small = ServiceConfig { max_prompt_body: 64, max_body: 32, ..ServiceConfig::default() };
    let service = Service::start_with(Config::default(), RouterConfig::default(), small).await;
    let long = json!({ "token_ids": vec![0; 100] });
    service.post("/query", long.clone()).await.problem(413, None);
    service.post("/select", long).await.problem(413, None);
    service.post("/loads", json!({ "worker_id": "w".repeat(40) })).await.problem(413, None);
    let json = Some("application/json");
    service.raw("POST", "/query", None, Some(b"{}".to_vec())).await.problem(415, None);
    service.raw("POST", "/query", json, Some(b"{".to_vec())).await.problem(400, None);
    service.raw("POST", "/query", json, Some(b"[]".to_vec())).await.problem(422, None);
    service.raw("POST", "/query", json, Some("[".repeat(60).into())).await.problem(400, None);
    service.post("/query", json!({ "token_ids": [-1] })).await.problem(422, Some("token_ids[0]"));
    service.post("/query", json!({})).await.problem(422, Some("token_ids"));
    service.get("/nope").await.problem(404, None);
    for later in ["/dump", "/peers"] {
        service.get(later).await.problem(404, None);
    }
    let method = service.get("/query").await;
    assert_eq!(method.allow, "POST");
    method.problem(405, None);
    assert_eq!(service.get("/health").await.expect(200), json!({ "status": "ok" }));
    service.stop().await;
}

/// A body that never comes ends with its time, and does not keep the places of others.
#[tokio::test]
async fn a_stalled_body_is_let_go() {
    let hasty = ServiceConfig {
        request_timeout: Duration::from_millis(200),
        max_in_flight: 1,
        ..ServiceConfig::default()
    };
    let service = Service::start_with(Config::default(), RouterConfig::default(), hasty).await;
    let mut stalled = TcpStream::connect(service.base.strip_prefix("http://").unwrap()).await.unwrap();
    let head =
        "POST /query HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{";
    stalled.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let read = stalled.read(&mut answer).await.unwrap();
    let text = String::from_utf8_lossy(&answer[..read]);
    assert!(text.starts_with("HTTP/1.1 503") && text.contains("urn:rankwise:problem:timeout"), "{text}");
    drop(stalled);
    service.post("/query", json!({ "token_ids": [1] })).await.problem(422, Some("model_name"));
    service.stop().await;
}

//! The boundary, route by route: what is misspelt, unknown, repeated, badly encoded or too large.

use std::collections::BTreeSet;
use std::time::Duration;

use rankwise::indexer::Config;
use rankwise::routing::RouterConfig;
use rankwise::service::ServiceConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::harness::{Answer, Service, batch};

/// One route: a body that it takes, and in it a known field under a name with two wrong letters.
struct Route {
    method: &'static str,
    /// As `GET /` lists it, and as it is asked.
    listed: &'static str,
    path: &'static str,
    body: Option<Value>,
    /// The field, and how it is misspelt.
    misspelt: &'static [(&'static str, &'static str)],
    /// A field that must not be passed over, and that this route does not have.
    cannot_narrow: Option<&'static str>,
    /// A value of the wrong type.
    wrong: Option<(&'static str, Value)>,
}

fn route(method: &'static str, listed: &'static str, path: &'static str) -> Route {
    Route { method, listed, path, body: None, misspelt: &[], cannot_narrow: None, wrong: None }
}

fn routes() -> Vec<Route> {
    let tokens = || json!([1, 2, 3, 4, 5]);
    let asks = |path, body: Value| Route {
        body: Some(body),
        misspelt: &[("model_name", "modle_name"), ("lora_name", "lora_nmae")],
        cannot_narrow: Some("data_parallel_rank"),
        wrong: Some(("block_size", json!("four"))),
        ..route("POST", path, path)
    };
    vec![
        asks("/query", json!({ "token_ids": tokens(), "model_name": "m" })),
        asks("/query_by_hash", json!({ "block_hashes": [1], "model_name": "m" })),
        Route {
            misspelt: &[
                ("pinned_worker", "pinnedworker"),
                ("temperature", "temprature"),
                ("token_ids", "token_id"),
            ],
            ..asks("/select", json!({ "token_ids": tokens(), "model_name": "m" }))
        },
        asks("/select_and_reserve", json!({ "token_ids": tokens(), "model_name": "m" })),
        asks("/potential_loads", json!({ "token_ids": tokens(), "model_name": "m" })),
        asks("/overlap_scores", json!({ "token_ids": tokens(), "model_name": "m" })),
        Route {
            misspelt: &[("selection_id", "selecton_id")],
            ..asks("/reservations", json!({ "selection_id": "none", "model_name": "m" }))
        },
        Route {
            body: Some(json!({})),
            misspelt: &[("decay_fraction", "decay_fractoin")],
            wrong: Some(("decay_fraction", json!("x"))),
            ..route("POST", "/reservations/{id}/output_block", "/reservations/none/output_block")
        },
        Route {
            body: Some(json!({ "instance_id": 7, "endpoint": "tcp://10.0.0.7:6007", "block_size": 4,
                "model_name": "m" })),
            misspelt: &[
                ("replay_endpoint", "replay_endpiont"),
                ("dp_rank", "dp_rnak"),
                ("tenant_id", "tennant_id"),
            ],
            wrong: Some(("dp_rank", json!("0"))),
            ..route("POST", "/register", "/register")
        },
        Route {
            body: Some(json!({ "instance_id": 8, "model_name": "m" })),
            misspelt: &[("dp_rank", "dprank"), ("routing_group", "routing_gruop")],
            wrong: Some(("dp_rank", json!(-1))),
            ..route("POST", "/unregister", "/unregister")
        },
        Route {
            body: Some(
                json!({ "worker_id": "w9", "model_name": "m", "block_size": 4, "endpoint": "http://h:1",
                "events": "none" }),
            ),
            misspelt: &[
                ("data_parallel_size", "data_parallel_siez"),
                ("kv_events_endpoints", "kv_event_endpoints"),
                ("max_num_batched_tokens", "max_num_batched_token"),
            ],
            wrong: Some(("data_parallel_size", json!([2]))),
            ..route("POST", "/workers", "/workers")
        },
        Route {
            body: Some(json!({ "taints": ["slow"] })),
            misspelt: &[("data_parallel_size", "data_parallel_sizes"), ("taints", "taint")],
            wrong: Some(("taints", json!(3))),
            ..route("PATCH", "/workers/{id}", "/workers/w1")
        },
        Route {
            body: Some(json!({ "worker_id": "w1", "ranks": {} })),
            misspelt: &[("worker_id", "wroker_id"), ("aggregate", "agregate")],
            wrong: Some(("source", json!(1))),
            ..route("POST", "/loads", "/loads")
        },
        Route {
            body: Some(json!({ "worker_id": "w1", "dp_rank": 0 })),
            misspelt: &[("worker_id", "workerid"), ("dp_rank", "dp_ranks")],
            wrong: Some(("dp_rank", json!("0"))),
            ..route("POST", "/dispatch_rejected", "/dispatch_rejected")
        },
        route("GET", "/workers", "/workers"),
        route("GET", "/loads", "/loads"),
        route("GET", "/capacity", "/capacity"),
        route("GET", "/v1/loads", "/v1/loads"),
        route("GET", "/workers/{id}/drain-check", "/workers/w1/drain-check"),
        route("POST", "/reservations/{id}/prefill_complete", "/reservations/none/prefill_complete"),
        route("DELETE", "/reservations/{id}", "/reservations/none"),
        // Last: it takes the worker away.
        route("DELETE", "/workers/{id}", "/workers/w1"),
    ]
}

/// Routes without a body of a request's own and without parameters that mean anything; `/ready` and
/// `/loads/watch` have tests of their own.
const PLAIN: [&str; 4] = ["GET /health", "GET /metrics", "GET /ready", "GET /loads/watch"];

async fn service(config: ServiceConfig) -> Service {
    let service = Service::start_with(Config::default(), RouterConfig::default(), config).await;
    for worker in ["w1", "w2"] {
        let body = json!({
            "worker_id": worker, "endpoint": "http://h:1", "model_name": "m", "block_size": 4, "events": "none",
        });
        service.post("/workers", body).await.expect(201);
    }
    service
}

async fn ask(service: &Service, route: &Route, more: &[(&str, Value)], query: &str) -> Answer {
    let body = route.body.clone().map(|mut body| {
        let fields = body.as_object_mut().unwrap();
        fields.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        body
    });
    service.call(route.method, &format!("{}{query}", route.path), body).await
}

/// What a problem is about.
fn about(answer: Answer, statuses: &[u16]) -> Value {
    let status = answer.status.as_u16();
    assert!(statuses.contains(&status), "{status}: {}", answer.text);
    let field = answer.json["field"].as_str().map(str::to_owned);
    answer.problem(status, field.as_deref())
}

/// A1: at every route a near name is refused with the one that was meant, a foreign one is accepted and named,
/// and one that would narrow the question is refused.
#[tokio::test]
async fn unknown_fields_are_met_on_every_route() {
    let service = service(ServiceConfig::default()).await;
    let listed: BTreeSet<String> = service.get("/").await.expect(200)["routes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|route| route.as_str().unwrap().to_owned())
        .collect();
    let walked = routes().into_iter().map(|route| format!("{} {}", route.method, route.listed));
    let walked: BTreeSet<String> = walked.chain(PLAIN.map(str::to_owned)).collect();
    assert_eq!(listed.difference(&walked).collect::<Vec<_>>(), Vec::<&String>::new(), "not walked");

    let mut ignored = 0;
    for route in routes() {
        let name = format!("{} {}", route.method, route.path);
        for (meant, misspelt) in route.misspelt {
            let problem =
                ask(&service, &route, &[(misspelt, json!(1))], "").await.problem(422, Some(misspelt));
            assert_eq!(problem["meant"], *meant, "{name}");
            assert!(problem["detail"].as_str().unwrap().contains(meant), "{name}: {problem}");
        }
        if let Some(field) = route.cannot_narrow {
            ask(&service, &route, &[(field, json!(0))], "").await.problem(422, Some(field));
        }
        let lists = route.method == "GET" && !route.listed.contains("{id}");
        // A list knows the parameter, and other routes must not pass it over.
        let parameter = if lists { "dp_rnak" } else { "dp_rank" };
        ask(&service, &route, &[], &format!("?{parameter}=0")).await.problem(422, Some(parameter));
        let before = ask(&service, &route, &[], "").await;
        let with = ask(&service, &route, &[("future", json!({ "x": 1 }))], "?later=1").await;
        if route.method != "DELETE" && route.path != "/register" && route.path != "/select_and_reserve" {
            assert_eq!(with.status, before.status, "{name}: {}", with.text);
        }
        let expected = match route.body {
            Some(_) => json!(["later", "future"]),
            None => json!(["later"]),
        };
        if with.json.is_object() {
            assert_eq!(with.json["ignored"], expected, "{name}: {}", with.text);
        }
        assert_eq!(before.json.get("ignored"), None, "{name}");
        ignored += expected.as_array().unwrap().len();
    }
    let metrics = service.get("/metrics").await.text;
    assert!(metrics.contains(&format!("rankwise_ignored_fields_total {ignored}")), "{ignored}: {metrics}");
    service.stop().await;
}

/// A1: inside of what a body holds, too.
#[tokio::test]
async fn unknown_fields_are_met_at_every_depth() {
    let service = service(ServiceConfig::default()).await;
    let select = |more: (&'static str, Value)| {
        service.post("/select", json!({ "token_ids": [1, 2, 3, 4], "model_name": "m", more.0: more.1 }))
    };
    for (field, meant, body) in [
        ("pinned_worker.dp_rnak", "dp_rank", ("pinned_worker", json!({ "worker_id": "w1", "dp_rnak": 0 }))),
        (
            "routing_constraints.required_taint",
            "required_taints",
            ("routing_constraints", json!({ "required_taint": ["x"] })),
        ),
        (
            "router_config_override.temprature",
            "temperature",
            ("router_config_override", json!({ "temprature": 0.5 })),
        ),
        ("mm.ofset", "offset", ("mm", json!([{ "identifier": "x", "ofset": 0, "offset": 0, "length": 1 }]))),
    ] {
        let problem = select(body).await.problem(422, Some(field));
        assert_eq!(problem["meant"], meant);
    }
    let loads = |ranks: Value| service.post("/loads", json!({ "worker_id": "w1", "ranks": ranks }));
    let problem =
        loads(json!({ "0": { "num_runing_reqs": 3 } })).await.problem(422, Some("ranks.num_runing_reqs"));
    assert_eq!(problem["meant"], "num_running_reqs");
    let known = service.get("/loads").await.expect(200)[0]["loads"][0]["state"].clone();
    assert_eq!(known, "unknown", "a report that was refused changes nothing");
    let accepted =
        loads(json!({ "0": { "num_running_reqs": 3, "decode_blocks": 1, "gpu": 7 } })).await.expect(200);
    assert_eq!((&accepted["accepted"], &accepted["ignored"]), (&json!(1), &json!(["ranks.gpu"])));
    let entries = json!({ "worker_id": "w1", "entries": [{ "dp_rank": 0, "token_usge": 0.5 }] });
    service.post("/loads", entries).await.problem(422, Some("entries.token_usge"));
    service.stop().await;
}

/// A1: `[http] strict` refuses what is only foreign.
#[tokio::test]
async fn a_strict_service_refuses_foreign_fields() {
    let service = service(ServiceConfig { strict: true, ..ServiceConfig::default() }).await;
    for route in routes().iter().filter(|route| route.body.is_some()) {
        ask(&service, route, &[("future", json!(1))], "").await.problem(422, Some("future"));
    }
    service.get("/workers?later=1").await.problem(422, Some("later"));
    service.get("/workers").await.expect(200);
    service.stop().await;
}

/// A2: whatever is wrong with a request, the answer is a problem.
#[tokio::test]
async fn every_error_is_a_problem() {
    let service = service(ServiceConfig::default()).await;
    let json_kind = Some("application/json");
    for route in routes() {
        let raw = |kind, body: &[u8]| service.raw(route.method, route.path, kind, Some(body.to_vec()));
        if let Some(body) = &route.body {
            let text = body.to_string();
            for kind in [
                None,
                Some("text/plain"),
                Some("application/msgpack"),
                Some("application/json; charset=utf-16"),
            ] {
                about(raw(kind, text.as_bytes()).await, &[415]);
            }
            for body in
                [&b""[..], b"{", b"{\"a\":1}}", b"nonsense", b"{\"a\":\"\xff\"}", b"\xff\xfe{\x00}\x00"]
            {
                about(raw(json_kind, body).await, &[400, 422]);
            }
            for body in [&b"[]"[..], b"null", b"7", b"\"x\""] {
                about(raw(json_kind, body).await, &[422]);
            }
            let (field, value) = route.wrong.clone().unwrap();
            let problem = about(ask(&service, &route, &[(field, value)], "").await, &[422]);
            assert_eq!(problem["field"], field, "{} {}", route.method, route.path);
        }
        for (query, field) in [
            ("?later=1&later=2", Some("later")),
            ("?later=%ff", Some("later")),
            ("?later=%zz", Some("later")),
            ("?%ff=1", Some("%ff")),
        ] {
            ask(&service, &route, &[], query).await.problem(400, field);
        }
        // Nobody has a route with this method.
        let path = route.path;
        service.raw("PUT", path, json_kind, Some(b"{}".to_vec())).await.problem(405, None);
        if route.listed.contains("{id}") {
            let bad = route.listed.replace("{id}", "%ff%fe");
            let body = route.body.clone();
            about(service.call(route.method, &bad, body).await, &[400]);
        }
    }
    service.get("/workers?worker_id=w1&instance_id=w2").await.problem(400, Some("instance_id"));
    service.get("/loads?dp_rank=x").await.problem(400, Some("dp_rank"));
    service.get("/no/such/route?x=%ff").await.problem(404, None);
    service.get("/workers/").await.problem(404, None);
    service.stop().await;
}

/// A1: a question for one worker or rank is answered for no other, on each route that has ranks in its answer.
#[tokio::test]
async fn narrowed_questions_are_answered_narrowly() {
    let service = Service::start().await;
    for (id, port) in [("e1", 6001), ("e2", 6002)] {
        let body = json!({ "instance_id": id, "endpoint": format!("tcp://10.0.0.1:{port}"), "model_name": "m",
            "block_size": 4 });
        service.post("/register", body).await.expect(201);
    }
    let tokens = json!([1, 2, 3, 4]);
    let store = |lora: Value| batch(json!([["BlockStored", [1], null, [1, 2, 3, 4], 4, lora]]));
    service.engines.send("e1", 0, 0, store(json!(null)));
    service.engines.send("e2", 0, 0, store(json!(12)));
    let ask = |route: &'static str, more: Value| {
        let mut body = json!({ "token_ids": tokens, "model_name": "m" });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        service.post(route, body)
    };
    let ranks = |answer: &Value| -> Vec<(String, u64)> {
        let list = answer["ranks"].as_array().or_else(|| answer["workers"].as_array()).or(answer.as_array());
        let of = |rank: &Value| {
            let reach = rank["device"].as_u64().or_else(|| rank["device_blocks"].as_u64());
            (rank["worker_id"].as_str().unwrap().to_owned(), reach.unwrap_or_default())
        };
        list.unwrap().iter().map(of).collect()
    };
    let is =
        |list: &[(&str, u64)]| list.iter().map(|(id, reach)| ((*id).to_owned(), *reach)).collect::<Vec<_>>();
    let all = ask("/query", json!({})).await.expect(200);
    assert_eq!(ranks(&all), is(&[("e1", 4), ("e2", 0)]));
    for narrow in ["instance_id", "worker_id"] {
        assert_eq!(ranks(&ask("/query", json!({ narrow: "e2" })).await.expect(200)), is(&[("e2", 0)]));
        assert_eq!(
            ranks(&ask("/overlap_scores", json!({ narrow: "e1" })).await.expect(200)),
            is(&[("e1", 1)])
        );
        assert_eq!(
            ranks(&ask("/potential_loads", json!({ narrow: "e2" })).await.expect(200)),
            is(&[("e2", 0)])
        );
        assert_eq!(ask("/select", json!({ narrow: "e2" })).await.expect(200)["worker_id"], "e2");
        ask("/query", json!({ narrow: "nobody" })).await.problem(404, Some("worker_id"));
        let by_hash = json!({ "block_hashes": [1], "model_name": "m", narrow: "e2" });
        assert_eq!(ranks(&service.post("/query_by_hash", by_hash).await.expect(200)), is(&[("e2", 0)]));
        let list = service.get(&format!("/workers?{narrow}=e1")).await.expect(200);
        assert_eq!(list.as_array().unwrap().len(), 1);
        let list = service.get(&format!("/loads?{narrow}=e1&dp_rank=0")).await.expect(200);
        assert_eq!(list[0]["loads"].as_array().unwrap().len(), 1);
    }
    ask("/query", json!({ "dp_rank": 3 })).await.problem(400, Some("dp_rank"));
    ask("/select", json!({ "dp_rank": 0 })).await.problem(400, Some("dp_rank"));
    ask("/select", json!({ "worker_id": "e2", "pinned_worker": { "worker_id": "e1" } }))
        .await
        .problem(400, Some("worker_id"));
    // An adapter by number: its own blocks, and never the base model's. Below 0 is none.
    assert_eq!(
        ranks(&ask("/query", json!({ "lora_id": 12 })).await.expect(200)),
        is(&[("e1", 0), ("e2", 4)])
    );
    assert_eq!(
        ranks(&ask("/query", json!({ "lora_id": 13 })).await.expect(200)),
        is(&[("e1", 0), ("e2", 0)])
    );
    assert_eq!(
        ranks(&ask("/query", json!({ "lora_id": -1 })).await.expect(200)),
        is(&[("e1", 4), ("e2", 0)])
    );
    let mooncake = json!({ "token_ids": tokens, "model": "m", "instance_id": "e1", "stream": true });
    let answer = service.post("/query", mooncake).await.expect(200);
    assert_eq!(answer.as_object().unwrap().keys().collect::<Vec<_>>(), ["default"], "keys are tenants");
    service.stop().await;
}

/// A2: ids come back as they were registered, in the stream of loads as well.
#[tokio::test]
async fn watched_loads_name_workers_as_they_were_registered() {
    let service = Service::start().await;
    let body =
        json!({ "instance_id": 42, "endpoint": "tcp://10.0.0.1:6001", "model_name": "m", "block_size": 4 });
    service.post("/register", body).await.expect(201);
    service
        .post("/loads", json!({ "worker_id": "42", "ranks": { "0": { "num_used_tokens": 8 } } }))
        .await
        .expect(200);
    let mut watch = TcpStream::connect(service.base.strip_prefix("http://").unwrap()).await.unwrap();
    watch.write_all(b"GET /loads/watch HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut text = String::new();
    while !text.contains("data: {") {
        service.engines.advance_millis(1_000);
        let mut part = [0; 4096];
        let read =
            tokio::time::timeout(Duration::from_secs(20), watch.read(&mut part)).await.unwrap().unwrap();
        assert!(read > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&part[..read]));
    }
    assert!(text.contains("\"worker_id\":42,") || text.contains("\"worker_id\":42}"), "{text}");
    drop(watch);
    service.get("/loads/watch?dp_rank=0").await.problem(422, Some("dp_rank"));
    service.stop().await;
}

/// A2: a selection that could not be booked can be booked still; an empty id is none.
#[tokio::test]
async fn a_failed_booking_leaves_the_selection() {
    let service = service(ServiceConfig::default()).await;
    let select = json!({ "token_ids": [1, 2, 3, 4], "model_name": "m", "selection_id": "p1" });
    let picked = service.post("/select", select).await.expect(200);
    for wrong in [
        json!({ "selection_id": "p1", "model_name": "other" }),
        json!({ "selection_id": "p1", "model_name": "m", "routing_group": "g" }),
        json!({ "selection_id": "p1", "dp_rank": 9 }),
    ] {
        let answer = service.post("/reservations", wrong).await;
        about(answer, &[404]);
    }
    let booked =
        service.post("/reservations", json!({ "selection_id": "p1", "model_name": "m" })).await.expect(201);
    assert_eq!(booked["worker_id"], picked["worker_id"]);
    service.post("/reservations", json!({ "selection_id": "p1" })).await.problem(404, Some("selection_id"));
    for route in ["/select", "/select_and_reserve", "/reservations"] {
        let empty = json!({ "token_ids": [1], "model_name": "m", "selection_id": "" });
        service.post(route, empty).await.problem(422, Some("selection_id"));
    }
    service.stop().await;
}

/// A3: an adapter may be asked for as a model: one that a worker declares, and one that its events name.
#[tokio::test]
async fn an_adapter_may_be_asked_for_as_a_model() {
    let service = Service::start().await;
    for (id, port, model) in [(1, 6001, "base"), (2, 6002, "other")] {
        let body = json!({ "instance_id": id, "endpoint": format!("tcp://10.0.0.1:{port}"), "model_name": model,
            "block_size": 4 });
        service.post("/register", body).await.expect(201);
    }
    let store = |name: u64, lora: &str| {
        batch(json!([["BlockStored", [name], null, [1, 2, 3, 4], 4, 7, "GPU", lora]]))
    };
    let query = |more: Value| {
        let mut body = json!({ "token_ids": [1, 2, 3, 4] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        service.post("/query", body)
    };
    query(json!({ "model_name": "sql" })).await.problem(404, Some("model_name"));
    service.engines.send("1", 0, 0, store(1, "sql"));
    let learnt = query(json!({ "model_name": "sql" })).await.expect(200);
    assert_eq!((&learnt["model_name"], &learnt["scores"]), (&json!("base"), &json!({ "1": { "0": 4 } })));
    assert_eq!(query(json!({ "model_name": "base" })).await.expect(200)["scores"], json!({}));
    let same = query(json!({ "model_name": "sql", "lora_name": "sql" })).await.expect(200);
    assert_eq!(same["scores"], learnt["scores"]);
    query(json!({ "model_name": "sql", "lora_name": "law" })).await.problem(400, Some("lora_name"));
    query(json!({ "model_name": "sql", "routing_group": "g" })).await.problem(404, Some("model_name"));
    let select = json!({ "token_ids": [1, 2, 3, 4, 5], "model_name": "sql", "selection_id": "s" });
    let picked = service.post("/select", select).await.expect(200);
    assert_eq!((&picked["model_name"], &picked["worker_id"]), (&json!("base"), &json!(1)));
    assert_eq!(picked["overlap"]["gpu"], 4);
    service.post("/reservations", json!({ "selection_id": "s", "model_name": "sql" })).await.expect(201);

    // The same name on two base models says nothing; a pool of that very name wins.
    service.engines.send("2", 0, 0, store(1, "sql"));
    let problem = query(json!({ "model_name": "sql" })).await.problem(400, Some("model_name"));
    assert!(problem["detail"].as_str().unwrap().contains("lora_name"), "{problem}");
    let own =
        json!({ "instance_id": 3, "endpoint": "tcp://10.0.0.1:6003", "model_name": "sql", "block_size": 4 });
    service.post("/register", own).await.expect(201);
    assert_eq!(query(json!({ "model_name": "sql" })).await.expect(200)["model_name"], "sql");
    service.stop().await;
}

/// L15: a rank that turned a request away gets nothing until it reports again.
#[tokio::test]
async fn a_rank_that_turned_a_request_away_gets_nothing() {
    let service = service(ServiceConfig::default()).await;
    let select = || service.post("/select", json!({ "token_ids": [1, 2, 3, 4], "model_name": "m" }));
    let reject = |worker: &str, dp_rank: u32| {
        service.post("/dispatch_rejected", json!({ "worker_id": worker, "dp_rank": dp_rank }))
    };
    reject("w1", 0).await.expect(200);
    for _ in 0..8 {
        assert_eq!(select().await.expect(200)["worker_id"], "w2");
    }
    reject("w2", 0).await.expect(200);
    select().await.expect(429);
    service.engines.advance_millis(1);
    service
        .post("/loads", json!({ "worker_id": "w1", "ranks": { "0": { "decode_blocks": 900 } } }))
        .await
        .expect(200);
    assert_eq!(select().await.expect(200)["worker_id"], "w1");
    reject("w1", 7).await.problem(404, Some("dp_rank"));
    reject("nobody", 0).await.problem(404, Some("dp_rank"));
    service.stop().await;
}

/// A4: a prompt of 2^21 tokens of seven digits passes; what is longer is refused with the limit and the setting.
#[tokio::test]
async fn long_prompts_pass_and_longer_ones_are_told_the_limit() {
    let service = service(ServiceConfig::default()).await;
    let ids = "1234567, ".repeat((1 << 21) - 1);
    let body = format!("{{\"model_name\": \"m\", \"token_ids\": [{ids}1234567]}}");
    let kind = Some("application/json");
    let answer = service.raw("POST", "/query", kind, Some(body.clone().into_bytes())).await.expect(200);
    assert_eq!(answer["block_size"], 4);
    service.raw("POST", "/select", kind, Some(body.into_bytes())).await.expect(200);
    let long = format!("{{\"model_name\": \"{}\"}}", "m".repeat(20 << 20));
    let problem = service.raw("POST", "/query", kind, Some(long.into_bytes())).await.problem(413, None);
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("20971520") && detail.contains("max_prompt_body_bytes"), "{detail}");
    service.stop().await;
}

/// A4: bodies share one room, so that many long ones at once wait for each other and all are answered.
#[tokio::test]
async fn bodies_share_their_room() {
    let config = ServiceConfig {
        max_prompt_body: 64 << 10,
        max_body: 64 << 10,
        max_body_bytes_in_flight: 64 << 10,
        ..ServiceConfig::default()
    };
    let service = service(config).await;
    let body = json!({ "token_ids": vec![1_234_567; 7_000], "model_name": "m" });
    let asked = (0..16).map(|_| service.post("/query", body.clone()));
    for answer in futures::future::join_all(asked).await {
        answer.expect(200);
    }
    // A body that stalls holds its room until its time is up, and others of its size wait.
    service.get("/workers").await.expect(200);
    service.stop().await;
}

//! Sockets and HTTP, as clients see them.

use bytes::Bytes;
use prost::Message;
use rankwise::events::order::ReplayId;
use rankwise::ids::{DpRank, EventSeq, SourceId};
use rankwise::ingest::{ReplayConfig, SubscriberConfig, spawn_replay, spawn_subscriber};
use rankwise::mock::Shape;
use rankwise::mock::server::{Fault, Fleet, FleetConfig};
use rankwise::telemetry::exposition;
use rankwise::wire::get_loads::{BytesCodec, GetLoadsRequest, GetLoadsResponse, SchedulerLoad, Servicer};
use reqwest::{Client, RequestBuilder};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use super::watched::fast;
use crate::recorder::{Recorder, until};

struct Mock {
    fleet: Fleet,
    client: Client,
    url: String,
}

impl Mock {
    async fn start(config: FleetConfig) -> Self {
        let fleet = Fleet::start(config).await.unwrap();
        let url = fleet.workers()[0].url.clone();
        Self { fleet, client: Client::builder().no_proxy().build().unwrap(), url }
    }

    async fn of(shape: Shape) -> Self {
        Self::start(FleetConfig { engine: fast(shape), ..FleetConfig::default() }).await
    }

    fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).json(body)
    }

    async fn complete(&self, body: Value) -> (u16, Value) {
        answered(self.post("/v1/completions", &body)).await
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        answered(self.client.get(format!("{}{path}", self.url))).await
    }
}

async fn answered(request: RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

/// E1, E3: our own subscriber hears every batch, numbered from 0; the replay port has them all, and an end.
#[tokio::test]
async fn the_sockets_speak_what_our_own_read() {
    for shape in [Shape::Vllm, Shape::Sglang] {
        let mock = Mock::of(shape).await;
        let sink = Recorder::default();
        let ranks = &mock.fleet.workers()[0].ranks;
        let mut subscribers = Vec::new();
        for rank in ranks {
            let source = SourceId(rank.dp_rank.into());
            let config = SubscriberConfig::default();
            let handle = Handle::current();
            subscribers.push(
                spawn_subscriber(&handle, source, &rank.events, false, "", sink.clone(), config).unwrap(),
            );
        }
        // Whoever subscribes late misses the first batches; the history does not.
        for number in 0..40 {
            mock.complete(json!({"prompt": tokens(number * 100, 40), "max_tokens": 3})).await;
        }
        for rank in ranks {
            let source = SourceId(rank.dp_rank.into());
            let handle = mock.fleet.rank(0, DpRank(rank.dp_rank)).unwrap();
            let next = handle.blocks().await.unwrap().next_seq.0;
            assert!(next >= 20, "{next} batches on rank {}", rank.dp_rank);
            until("the last batch is heard", || sink.live(source).last() == Some(&(next - 1))).await;
            let live = sink.live(source);
            assert!(live.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{live:?}");
            let (sink, asked) = (sink.clone(), ReplayId(9));
            let config = ReplayConfig::default();
            let from = EventSeq::ZERO;
            let _replay =
                spawn_replay(&Handle::current(), source, &rank.replay, asked, from, sink.clone(), &config)
                    .unwrap();
            let all: Vec<u64> = (0..next).chain([u64::MAX]).collect();
            until("the history is there", || sink.answers(source, asked) == all).await;
        }
    }
}

/// A replay buffer of a given size keeps the newest.
#[tokio::test]
async fn the_replay_buffer_has_its_size() {
    let config =
        FleetConfig { engine: fast(Shape::Vllm), ranks: 1, replay_buffer: 4, ..FleetConfig::default() };
    let mock = Mock::start(config).await;
    for number in 0..10 {
        mock.complete(json!({"prompt": tokens(number * 100, 40), "max_tokens": 1})).await;
    }
    let rank = &mock.fleet.workers()[0].ranks[0];
    let next = mock.fleet.ranks().next().unwrap().1.blocks().await.unwrap().next_seq.0;
    let (sink, asked, source) = (Recorder::default(), ReplayId(1), SourceId(0));
    let (from, config) = (EventSeq::ZERO, ReplayConfig::default());
    let _replay =
        spawn_replay(&Handle::current(), source, &rank.replay, asked, from, sink.clone(), &config).unwrap();
    let kept: Vec<u64> = (next - 4..next).chain([u64::MAX]).collect();
    until("what is kept is there", || sink.answers(source, asked) == kept).await;
}

/// R5: a rank that is not there is refused, however it is named; and so is what names two.
#[tokio::test]
async fn a_rank_out_of_range_is_refused() {
    let mock =
        Mock::start(FleetConfig { engine: fast(Shape::Vllm), dp_start_rank: 4, ..FleetConfig::default() })
            .await;
    let body = json!({"prompt": tokens(0, 40), "max_tokens": 1});
    for header in ["2", "4", "-1", "x", "", "99999999999999999999"] {
        let request = mock.post("/v1/completions", &body).header("X-data-parallel-rank", header);
        let (status, answer) = answered(request).await;
        assert_eq!(status, 400, "{header}: {answer}");
        assert_eq!(answer["error"]["code"], 400);
    }
    for (field, rank) in [("routed_dp_rank", 2), ("data_parallel_rank", 2), ("routed_dp_rank", -1)] {
        let mut body = body.clone();
        body[field] = rank.into();
        assert_eq!(mock.complete(body).await.0, 400, "{field} {rank}");
    }
    let both = json!({"prompt": "a", "routed_dp_rank": 1});
    let request = mock.post("/v1/completions", &both).header("X-data-parallel-rank", "0");
    assert_eq!(answered(request).await.0, 400);
    for local in [0, 1] {
        let response =
            mock.post("/v1/completions", &body).header("X-data-parallel-rank", local).send().await.unwrap();
        assert_eq!(response.headers()["x-data-parallel-rank"], local.to_string().as_str());
        let answer: Value = response.json().await.unwrap();
        assert_eq!(
            answer["dp_rank"],
            4 + local,
            "what is sent is the local rank, what is told the global one"
        );
    }
    for path in ["/v1/loads?dp_rank=0", "/debug/blocks?dp_rank=6", "/debug/blocks?dp_rank=x"] {
        assert_eq!(mock.get(path).await.0, 400, "{path}");
    }
    let fault = json!({"dp_rank": 0, "kind": "wedge"});
    assert_eq!(answered(mock.post("/debug/fault", &fault)).await.0, 400);
}

/// Without a wish, the ranks take turns; the same prompt on the same rank again is cached but for its partial block.
#[tokio::test]
async fn ranks_take_turns_and_report_what_was_cached() {
    for shape in [Shape::Vllm, Shape::Sglang] {
        let mock = Mock::of(shape).await;
        let body = json!({"prompt": tokens(0, 70), "max_tokens": 4, "return_token_ids": true});
        let mut seen = Vec::new();
        for _ in 0..4 {
            let (status, answer) = mock.complete(body.clone()).await;
            assert_eq!(status, 200, "{answer}");
            let usage = &answer["usage"];
            assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(70), &json!(4)));
            assert_eq!(usage["total_tokens"], 74);
            assert_eq!(answer["choices"][0]["token_ids"].as_array().unwrap().len(), 4);
            seen.push((answer["dp_rank"].clone(), usage["prompt_tokens_details"]["cached_tokens"].clone()));
        }
        let expected = [(0, 0), (1, 0), (0, 64), (1, 64)].map(|(rank, cached)| (json!(rank), json!(cached)));
        assert_eq!(seen, expected, "{shape:?}");
    }
}

#[tokio::test]
async fn what_cannot_be_answered_is_refused() {
    let mut engine = fast(Shape::Vllm);
    engine.max_model_len = 100;
    let mock = Mock::start(FleetConfig { engine, ..FleetConfig::default() }).await;
    for (body, expected) in [
        (json!({"prompt": []}), 400),
        (json!({"prompt": "  "}), 400),
        (json!({"prompt": [[1], [2]]}), 400),
        (json!({"prompt": tokens(0, 99)}), 400),
        (json!({"prompt": "a", "max_tokens": 0}), 400),
        (json!({"prompt": "a", "max_tokens": -1}), 400),
        (json!({"prompt": "a", "model": "another"}), 404),
        (json!({"prompt": "a", "model": "mock", "temperature": 0.5, "stop": null}), 200),
        (json!({"messages": []}), 400),
    ] {
        let (status, answer) = mock.complete(body.clone()).await;
        assert_eq!(status, expected, "{body}: {answer}");
    }
    let long = Bytes::from(format!("{{\"prompt\": \"{}\"}}", "a ".repeat(3 << 20)));
    let request = mock.client.post(format!("{}/v1/completions", mock.url)).body(long);
    assert_eq!(answered(request).await.0, 413);
    let request = mock.client.post(format!("{}/v1/completions", mock.url)).body("no json");
    assert_eq!(answered(request).await.0, 400);
    assert_eq!(mock.get("/nowhere").await.0, 404);
    assert_eq!(mock.get("/v1/completions").await.0, 405);
    for fault in [
        json!({"dp_rank": 0, "kind": "drop_batches"}),
        json!({"dp_rank": 0, "kind": "burn"}),
        json!({"dp_rank": 0, "kind": "lie", "load": {"heat": 3}}),
    ] {
        assert_eq!(answered(mock.post("/debug/fault", &fault)).await.0, 400, "{fault}");
    }
}

/// A stream says what the whole answer says, token by token, then what it took, then that it is over.
#[tokio::test]
async fn streams_say_what_whole_answers_say() {
    let mock = Mock::of(Shape::Vllm).await;
    let messages =
        json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is that so"}]);
    for (path, mut body) in [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "why is that so"})),
    ] {
        body["max_tokens"] = 5.into();
        let (_, whole) = answered(mock.post(path, &body)).await;
        let choice = &whole["choices"][0];
        let text = choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap().to_owned();
        assert_eq!(choice["finish_reason"], "length");
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let response = mock.post(path, &body).send().await.unwrap();
        assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
        assert!(response.headers().contains_key("x-data-parallel-rank"));
        let body = response.text().await.unwrap();
        let mut events: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(events.pop(), Some("[DONE]"));
        let events: Vec<Value> =
            events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let (usage, chunks) = events.split_last().unwrap();
        assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(5)));
        assert_eq!(chunks.len(), 6, "five tokens and an end");
        let piece = |chunk: &Value| {
            let choice = &chunk["choices"][0];
            choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap().to_owned()
        };
        assert_eq!(chunks.iter().map(piece).collect::<String>(), text);
        assert_eq!(chunks[5]["choices"][0]["finish_reason"], "length");
    }
}

/// A conversation that goes on finds all of it cached that fills blocks, the answer included.
#[tokio::test]
async fn a_conversation_that_goes_on_is_cached() {
    let mock =
        Mock::start(FleetConfig { engine: fast(Shape::Vllm), ranks: 1, ..FleetConfig::default() }).await;
    let question = "a question of many words ".repeat(20);
    let mut messages = json!([{"role": "user", "content": question}]);
    let (_, first) =
        answered(mock.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 50}))).await;
    let turn = first["choices"][0]["message"].clone();
    messages.as_array_mut().unwrap().extend([turn, json!({"role": "user", "content": "and then?"})]);
    let (_, second) =
        answered(mock.post("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 5}))).await;
    let total = first["usage"]["total_tokens"].as_u64().unwrap();
    // The last token of the answer was generated and never computed.
    let cached = (total - 1) / 16 * 16;
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], cached);
}

#[tokio::test]
async fn workers_say_what_they_are() {
    for shape in [Shape::Vllm, Shape::Sglang] {
        let config = FleetConfig {
            engine: fast(shape),
            workers: 2,
            dp_start_rank: 3,
            model: "m".into(),
            ..FleetConfig::default()
        };
        let mock = Mock::start(config).await;
        let workers = mock.fleet.workers();
        assert_eq!((workers[0].worker.as_str(), workers[1].worker.as_str()), ("mock-0", "mock-1"));
        let printed = serde_json::to_value(workers).unwrap();
        assert_eq!(printed[1]["ranks"][1]["dp_rank"], 4);
        assert_eq!(printed[0]["ranks"][0]["load_stat"].is_string(), shape == Shape::Sglang);
        assert_eq!(mock.get("/health").await.0, 200);
        assert_eq!(mock.get("/v1/models").await.1["data"][0]["id"], "m");
        let (_, sources) = mock.get("/kv_event_sources").await;
        assert_eq!(sources.as_array().unwrap().len(), 2);
        assert_eq!(sources[0]["data_parallel_rank"], 3);
        assert_eq!(sources[1]["endpoint"], workers[0].ranks[1].events);
        let (_, info) = mock.get("/server_info").await;
        let port = workers[0].ranks[0].events.rsplit(':').next().unwrap();
        let base = &info["kv_events"]["endpoint_port_base"];
        assert!(base.is_null() || base.as_u64() == port.parse().ok(), "{info}");
        assert_eq!(info["kv_events"]["dp_size"], 2);
        let (_, loads) = mock.get("/v1/loads").await;
        assert_eq!((&loads["dp_rank_count"], &loads["loads"][1]["dp_rank"]), (&json!(2), &json!(4)));
        let (_, one) = mock.get("/v1/loads?dp_rank=3").await;
        assert_eq!((&one["dp_rank_count"], &one["loads"][0]["dp_rank"]), (&json!(1), &json!(3)));
        assert_eq!(mock.get("/get_load").await.1.as_array().unwrap().len(), 2);
        let (_, blocks) = mock.get("/debug/blocks").await;
        assert_eq!(blocks.as_array().unwrap().iter().map(|of| &of["dp_rank"]).collect::<Vec<_>>(), [3, 4]);
        mock.fleet.shutdown().await;
    }
}

/// L10: where nothing else is offered, our own reader finds each rank's load in the metrics.
#[tokio::test]
async fn our_own_reader_reads_the_metrics() {
    for shape in [Shape::Vllm, Shape::Sglang] {
        let config = FleetConfig { engine: fast(shape), dp_start_rank: 4, ..FleetConfig::default() };
        let mock = Mock::start(config).await;
        let answer = mock.fleet.ranks().next().unwrap().1.generate(tokens(0, 70), 2).await.unwrap();
        answer.whole().await.unwrap();
        let (status, text) = mock.get("/metrics").await;
        assert_eq!(status, 200);
        let answer = exposition::read(text.as_str().unwrap(), &(4..6).collect()).unwrap();
        assert_eq!(answer.aggregate, None, "{shape:?}");
        for (entry, rank) in answer.entries.iter().zip(4..) {
            let load = entry.load.check().unwrap().0;
            assert_eq!((entry.dp_rank, load.num_running_reqs), (Some(rank), Some(0)));
            assert_eq!((load.num_waiting_reqs, load.token_usage), (Some(0), Some(0.0)));
            assert_eq!(load.max_total_num_tokens, Some(2_048 * 16));
        }
        assert_eq!(answer.entries.len(), 2);
        let queries = match shape {
            Shape::Vllm => "vllm:prefix_cache_queries_total{model_name=\"mock\",engine=\"4\"} 70",
            Shape::Sglang => "sglang_prompt_tokens_total{model_name=\"mock\",dp_rank=\"4\"} 70",
        };
        assert!(text.as_str().unwrap().contains(queries), "{text}");
    }
}

/// L2, L3: over gRPC the filter works by presence; a rank that is not managed is an invalid argument, and one that
/// says nothing is missing. The other engine's method is not there.
#[tokio::test]
async fn grpc_answers_by_rank() {
    for (shape, own, other) in
        [(Shape::Vllm, Servicer::Vllm, Servicer::Sglang), (Shape::Sglang, Servicer::Sglang, Servicer::Vllm)]
    {
        let mock = Mock::of(shape).await;
        let endpoint = tonic::transport::Endpoint::from_shared(mock.fleet.workers()[0].grpc.clone()).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let ask = async |servicer: Servicer, dp_rank: Option<i32>| {
            let mut client = tonic::client::Grpc::new(channel.clone());
            client.ready().await.unwrap();
            let question = GetLoadsRequest { dp_rank, ..GetLoadsRequest::default() };
            let request = tonic::Request::new(Bytes::from(question.encode_to_vec()));
            let path = servicer.path().parse().unwrap();
            let answer = client.unary(request, path, BytesCodec).await.map_err(|status| status.code())?;
            let answer = GetLoadsResponse::decode(answer.into_inner()).unwrap();
            let ranks =
                answer.loads.iter().map(|load| SchedulerLoad::decode(&**load).unwrap().dp_rank.unwrap());
            assert_eq!(answer.dp_rank_count as usize, answer.loads.len());
            Ok::<Vec<i64>, tonic::Code>(ranks.collect())
        };
        assert_eq!(ask(own, None).await, Ok(vec![0, 1]));
        assert_eq!(ask(own, Some(0)).await, Ok(vec![0]));
        assert_eq!(ask(own, Some(2)).await, Err(tonic::Code::InvalidArgument));
        assert_eq!(ask(own, Some(-1)).await, Err(tonic::Code::InvalidArgument));
        assert_eq!(ask(other, None).await, Err(tonic::Code::Unimplemented));
        mock.fleet.rank(0, DpRank(1)).unwrap().inject(Fault::Wedge).await.unwrap();
        assert_eq!(ask(own, None).await, Ok(vec![0]));
        assert_eq!(ask(own, Some(1)).await, Ok(vec![]));
    }
}

/// A cache that is in use is not emptied; one that is not, is.
#[tokio::test]
async fn caches_are_emptied_on_demand() {
    let mock = Mock::of(Shape::Vllm).await;
    let rank = mock.fleet.ranks().next().unwrap().1;
    rank.generate(tokens(0, 70), 2).await.unwrap().whole().await.unwrap();
    assert_eq!(rank.blocks().await.unwrap().truth.device.len(), 4);
    assert_eq!(answered(mock.post("/reset_prefix_cache?dp_rank=0", &json!({}))).await.0, 200);
    assert_eq!(rank.blocks().await.unwrap().truth.device.len(), 0);
    assert_eq!(answered(mock.post("/reset_prefix_cache?dp_rank=7", &json!({}))).await.0, 400);
}

/// Ports that are given are those that are bound; those that are taken are an error, and so are those past the last.
#[tokio::test]
async fn ports_follow_from_their_base() {
    // A range that was free a moment ago; another test may take it, and then another is looked for.
    for _ in 0..20 {
        let probe = Fleet::start(FleetConfig { ranks: 4, ..FleetConfig::default() }).await.unwrap();
        let port = |endpoint: &str| endpoint.rsplit(':').next().unwrap().parse::<u16>().unwrap();
        let (events, replay) =
            (port(&probe.workers()[0].ranks[0].events), port(&probe.workers()[0].ranks[0].replay));
        probe.shutdown().await;
        let config =
            FleetConfig { workers: 2, event_port: events, replay_port: replay, ..FleetConfig::default() };
        let Ok(fleet) = Fleet::start(config.clone()).await else { continue };
        let bound: Vec<u16> =
            fleet.workers().iter().flat_map(|worker| &worker.ranks).map(|rank| port(&rank.events)).collect();
        assert_eq!(bound, [events, events + 1, events + 2, events + 3]);
        assert!(Fleet::start(config).await.is_err(), "they are taken");
        let config = FleetConfig { event_port: 65_535, replay_port: 1, ..FleetConfig::default() };
        let error = Fleet::start(config).await.unwrap_err().to_string();
        assert!(error.contains("past 65535"), "{error}");
        return;
    }
    panic!("no range of ports stays free");
}

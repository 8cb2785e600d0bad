//! What is believed of HTTP and gRPC servers.

use bytes::Bytes;
use prost::Message;
use rankwise::load::{LoadEntry, LoadReport, Outcome, RawRankLoad, Route};
use rankwise::telemetry::serve::serve_loads;
use rankwise::telemetry::wire::{BytesCodec, GetLoadsRequest, GetLoadsResponse, SchedulerLoad, Servicer};
use serde_json::json;
use tonic::Code;

use super::harness::{NEVER, Site, quick};
use super::servers::{Call, GrpcServer, Reply, WebServer, rank};
use crate::recorder::until;

const V1_LOADS: &str = "/v1/loads";
const ROLLUP: &str = "/loads";
const METRICS: &str = "/metrics";

/// An answer that has these ranks running as many requests as their number plus ten.
fn loads(ranks: impl IntoIterator<Item = u32>) -> String {
    let loads: Vec<_> = ranks
        .into_iter()
        .map(|rank| json!({"dp_rank": rank, "num_running_reqs": rank + 10, "num_used_tokens": 16}))
        .collect();
    json!({"dp_rank_count": loads.len(), "loads": loads, "aggregate": {"total_running_reqs": 99}}).to_string()
}

fn vllm(engines: std::ops::Range<u32>) -> String {
    engines
        .map(|engine| format!("vllm:num_requests_running{{engine=\"{engine}\"}} {}.0\n", engine + 10))
        .collect()
}

/// L1, L4, L15: entry by entry. What cannot be, is missing or is named twice is unknown; foreign ranks are
/// dropped and counted; the aggregate is nobody's.
#[tokio::test]
async fn http_entries_stand_alone() {
    let body = r#"{"dp_rank_count": 9, "aggregate": {"total_running_reqs": 50}, "loads": [
        {"dp_rank": 0, "num_running_reqs": 3}, {"dp_rank": 1, "num_running_reqs": -1},
        {"dp_rank": 2, "num_running_reqs": NaN}, {"dp_rank": 3, "num_running_reqs": 1e300},
        {"dp_rank": 5, "num_running_reqs": 1}, {"dp_rank": 5, "num_running_reqs": 2},
        {"dp_rank": 9, "num_running_reqs": 4}, {"dp_rank": 7, "num_running_reqs": 0}]}"#;
    let server = WebServer::start(&[(V1_LOADS, Reply::ok(body))]).await;
    let mut config = quick();
    config.probe.interval = NEVER;
    let site = Site::of(&[("w", 0, 8)]).await.asking(&[("w", server.url())], &config);
    until("the answer is in", || site.outcomes("answered") == 1).await;
    let expected = [Some(3), None, None, None, None, None, None, Some(0)];
    assert_eq!(site.running("w", 0..8), expected);
    let counts = site.counts();
    assert_eq!((counts.accepted, counts.out_of_range, counts.refused_entries), (2, 1, 5));
    assert_eq!(site.aggregate("w").unwrap().num_running_reqs, Some(50));
}

/// L6: an empty answer renews nothing and is asked again; it is not idle and not another schema.
#[tokio::test]
async fn empty_is_unavailable() {
    for empty in ["", r#"{"loads": []}"#, r#"{"loads": [], "aggregate": {"total_running_reqs": 0}}"#] {
        let server =
            WebServer::start(&[(V1_LOADS, Reply::ok(empty)), (METRICS, Reply::ok(vllm(0..2)))]).await;
        let site = Site::of(&[("w", 0, 2)]).await.asking(&[("w", server.url())], &quick());
        until("it was asked again", || site.outcomes("empty") > 2).await;
        assert_eq!((site.running("w", 0..2), site.aggregate("w")), (vec![None, None], None));
        server.set(V1_LOADS, Reply::ok(loads(0..2)));
        until("the ranks are known", || site.running("w", 0..2) == [Some(10), Some(11)]).await;
        assert_eq!(server.asked(METRICS), 0);
    }
}

/// L9: 404, 405, 501 and a 200 of another schema are not offered: the next route is asked, and the first one
/// left alone from then on. L10: Prometheus comes last.
#[tokio::test]
async fn not_offered_is_remembered() {
    for reply in [
        Reply::Status(404, String::new()),
        Reply::Status(405, String::new()),
        Reply::Status(501, String::new()),
        Reply::ok(r#"{"status": "ok"}"#),
        Reply::ok("<html>"),
        Reply::ok("[]"),
    ] {
        let metrics = Reply::ok(vllm(0..2));
        let server =
            WebServer::start(&[(V1_LOADS, reply.clone()), (ROLLUP, reply), (METRICS, metrics)]).await;
        let site = Site::of(&[("w", 0, 2)]).await.asking(&[("w", server.url())], &quick());
        until("it was asked again", || site.outcomes("answered") > 3).await;
        assert_eq!(site.running("w", 0..2), [Some(10), Some(11)]);
        assert_eq!((server.asked(V1_LOADS), server.asked(ROLLUP)), (1, 1));
        assert_eq!(site.status().route, Some(Route::Prometheus));
    }
}

/// L9: whatever may pass is asked again on the same route, and no lower one is asked instead.
#[tokio::test]
async fn try_again_keeps_the_route() {
    for (reply, outcome) in [
        (Reply::Status(500, String::new()), "server_error"),
        (Reply::Status(503, "{}".into()), "server_error"),
        (Reply::Status(401, String::new()), "auth"),
        (Reply::Status(403, String::new()), "auth"),
        (Reply::Status(302, String::new()), "other_status"),
        (Reply::Silence, "timeout"),
        (Reply::HangUp, "unreachable"),
        (Reply::Half(loads(0..2)), "cut_short"),
        (Reply::ok(&loads(0..2)[..40]), "cut_short"),
    ] {
        let server = WebServer::start(&[(V1_LOADS, reply), (METRICS, Reply::ok(vllm(0..2)))]).await;
        let site = Site::of(&[("w", 0, 2)]).await.asking(&[("w", server.url())], &quick());
        until(outcome, || site.outcomes(outcome) > 1).await;
        assert_eq!(site.running("w", 0..2), [None, None], "{outcome}");
        server.set(V1_LOADS, Reply::ok(loads(0..2)));
        until("it has recovered", || site.running("w", 0..2) == [Some(10), Some(11)]).await;
        assert_eq!((server.asked(METRICS), server.asked(ROLLUP)), (0, 0), "{outcome}");
        assert!(matches!(site.status().last, Some(Outcome::Answered | Outcome::TryAgain(_))));
    }
}

/// L9: an answer without an end costs what is read of it, and no more.
#[tokio::test]
async fn endless_answers_are_cut() {
    let server = WebServer::start(&[(V1_LOADS, Reply::ok(" ".repeat(100_000)))]).await;
    let mut config = quick();
    config.fetch.max_bytes = 10_000;
    let site = Site::of(&[("w", 0, 1)]).await.asking(&[("w", server.url())], &config);
    until("it was cut", || site.outcomes("too_long") > 1).await;
}

/// L9: one fetch serves every rank and worker of a base URL, and no rank is part of what is dialled.
#[tokio::test]
async fn one_fetch_serves_all_ranks() {
    let server = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..9)))]).await;
    let mut config = quick();
    config.probe.interval = NEVER;
    let site = Site::of(&[("w1", 0, 4), ("w2", 4, 3), ("v7", 7, 1)]).await;
    let url = server.url();
    let site =
        site.asking(&[("w1", url.clone()), ("w2", format!("{url}/")), ("v7", format!("{url}@7"))], &config);
    until("the answer is in", || site.outcomes("answered") == 1).await;
    assert_eq!(site.running("w1", 0..4), [10, 11, 12, 13].map(Some));
    assert_eq!(site.running("w2", 4..7), [14, 15, 16].map(Some));
    assert_eq!(site.running("v7", 7..8), [Some(17)]);
    let requests = server.requests();
    let loads = requests.iter().filter(|request| request.contains(V1_LOADS)).count();
    assert_eq!(loads, 1, "{requests:?}");
    assert!(!requests.iter().any(|request| request.contains('@')));
    // Rank 8 is nobody's and was counted once; the aggregate is over all three and so nobody's either.
    assert_eq!(site.counts().out_of_range, 1);
    assert_eq!(["w1", "w2", "v7"].map(|worker| site.aggregate(worker)), [None; 3]);
}

/// L7: a virtual worker sees its rank alone and no aggregate, over HTTP and gRPC alike; a rank that is not
/// there is unavailable.
#[tokio::test]
async fn virtual_workers_see_their_rank() {
    let web = WebServer::start(&[(V1_LOADS, Reply::ok(loads(4..6)))]).await;
    let grpc = GrpcServer::start(Servicer::Sglang, Call::loads([rank(4, 14), rank(5, 15)])).await;
    for url in [web.url(), grpc.url()] {
        let site = Site::of(&[("v5", 5, 1), ("v9", 9, 1)]).await;
        let site = site.asking(&[("v5", format!("{url}@5")), ("v9", format!("{url}@9"))], &quick());
        until("the rank is known", || site.running("v5", 5..6) == [Some(15)]).await;
        until("the other is not there", || site.status().unavailable > 0).await;
        assert_eq!(site.running("v9", 9..10), [None]);
        assert_eq!((site.aggregate("v5"), site.aggregate("v9")), (None, None));
        assert_eq!(site.counts().out_of_range, 0);
    }
    assert!(grpc.asked().iter().all(|question| question.dp_rank.is_none()));
}

/// L8: a gateway's rollup is kept whole and apart, and is no rank's load, whatever ranks it names.
#[tokio::test]
async fn a_rollup_feeds_nobody() {
    let rollup = json!({"loads": [
        {"worker": "http://a", "worker_type": "decode", "dp_rank": 0, "num_running_reqs": 7},
        {"worker": "w", "worker_type": "prefill", "dp_rank": 1, "num_running_reqs": 8}]});
    let server = WebServer::start(&[(ROLLUP, Reply::ok(rollup.to_string()))]).await;
    let site = Site::of(&[("w", 0, 2)]).await.asking(&[("w", server.url())], &quick());
    until("the rollup is in", || site.outcomes("answered") > 1).await;
    let (_, kept) = site.status().rollup.unwrap();
    assert_eq!((kept.rollup.len(), kept.entries.len()), (2, 0));
    assert_eq!(kept.rollup[1].worker.as_deref(), Some("w"));
    assert_eq!((site.running("w", 0..2), site.aggregate("w")), (vec![None, None], None));
    assert_eq!((server.asked(V1_LOADS), server.asked(METRICS)), (1, 0));
    assert_eq!(site.counts(), Default::default());
}

/// L10: series of engines that are no global ranks are one aggregate of the worker.
#[tokio::test]
async fn metrics_that_name_no_rank_are_an_aggregate() {
    let nameless = "sglang_num_running_reqs{model_name=\"m\"} 21.0\nsglang_num_queue_reqs 2.0\n".to_owned();
    for text in [vllm(0..2), nameless] {
        let server = WebServer::start(&[(METRICS, Reply::ok(text))]).await;
        let site = Site::of(&[("w", 4, 2)]).await.asking(&[("w", server.url())], &quick());
        until("the aggregate is in", || site.aggregate("w").is_some()).await;
        assert_eq!(site.aggregate("w").unwrap().num_running_reqs, Some(21));
        assert_eq!(site.running("w", 4..6), [None, None]);
        assert_eq!(site.running("w", 0..2), [None, None]);
    }
}

/// L1, L4, L5: gRPC of both servicers: global ranks, profiled capacity, and bad entries by themselves.
#[tokio::test]
async fn grpc_of_both_servicers() {
    for servicer in [Servicer::Sglang, Servicer::Vllm] {
        let unread = SchedulerLoad { dp_rank: Some(6), ..SchedulerLoad::default() };
        let call =
            Call::loads([rank(4, 14), rank(5, -1), unread, rank(7, 0), rank(8, 1), rank(9, 1), rank(9, 1)]);
        let server = GrpcServer::start(servicer, call).await;
        let mut config = quick();
        config.probe.interval = NEVER;
        let site = Site::of(&[("w", 4, 4)]).await.asking(&[("w", server.url())], &config);
        until("the answer is in", || site.outcomes("answered") == 1).await;
        assert_eq!(site.running("w", 4..8), [Some(14), None, None, Some(0)]);
        let four = site.load("w", 4).unwrap();
        assert_eq!((four.max_total_num_tokens, four.num_waiting_reqs), (Some(8192), Some(2)));
        let expected = if servicer == Servicer::Sglang { Route::GrpcSglang } else { Route::GrpcVllm };
        assert_eq!(site.status().route, Some(expected));
        assert_eq!(site.counts().out_of_range, 3);
    }
}

/// L9: gRPC's failures are told apart like those of HTTP.
#[tokio::test]
async fn grpc_failures_are_told_apart() {
    for (call, outcome) in [
        (Call::Fails(Code::Unavailable), "unreachable"),
        (Call::Fails(Code::Internal), "server_error"),
        (Call::Fails(Code::Unauthenticated), "auth"),
        (Call::Fails(Code::DeadlineExceeded), "timeout"),
        (Call::Silence, "timeout"),
        (Call::loads([]), "empty"),
    ] {
        let server = GrpcServer::start(Servicer::Sglang, call).await;
        let site = Site::of(&[("w", 4, 1)]).await.asking(&[("w", server.url())], &quick());
        until(outcome, || site.outcomes(outcome) > 1).await;
        server.set(Call::loads([rank(4, 14)]));
        until("it has recovered", || site.running("w", 4..5) == [Some(14)]).await;
        assert_eq!(site.outcomes("no_route"), 0, "{outcome}");
    }
    for call in [Call::Fails(Code::Unimplemented), Call::Bytes(Bytes::from_static(b"\xff\xff\xff"))] {
        let server = GrpcServer::start(Servicer::Vllm, call).await;
        let site = Site::of(&[("w", 4, 1)]).await.asking(&[("w", server.url())], &quick());
        until("both routes were asked", || site.outcomes("no_route") + site.outcomes("other_schema") == 2)
            .await;
        assert_eq!(server.asked().len(), 1);
        assert_eq!(site.running("w", 4..5), [None]);
    }
}

/// L9: a server that speaks no gRPC, and one that is not there, cost their own ranks alone.
#[tokio::test]
async fn a_dead_source_disturbs_no_other() {
    let good = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..1)))]).await;
    let web = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..1)))]).await;
    let site = Site::of(&[("good", 0, 1), ("no-grpc", 0, 1), ("gone", 0, 1)]).await;
    let site = site.asking(
        &[
            ("good", good.url()),
            ("no-grpc", format!("grpc://{}", web.address())),
            // Reserved and never listened at.
            ("gone", "http://127.0.0.1:1".to_owned()),
        ],
        &quick(),
    );
    until("the good one is known", || site.running("good", 0..1) == [Some(10)]).await;
    let failed = || {
        let status = site.feeds.as_ref().unwrap().status();
        status.iter().filter(|feed| matches!(feed.last, Some(Outcome::TryAgain(_)))).count()
    };
    until("the others have failed", || failed() == 2).await;
    assert_eq!((site.running("no-grpc", 0..1), site.running("gone", 0..1)), (vec![None], vec![None]));
}

/// L16: every rank of a worker that comes back is known again at once, a grown range included, and nobody is
/// asked while it is away.
#[tokio::test]
async fn a_worker_that_comes_back_is_bound_again() {
    let server = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..4)))]).await;
    let mut config = quick();
    // Whatever is known a second time was asked for because the fleet has changed.
    config.probe.interval = NEVER;
    let site = Site::of(&[("w", 0, 2)]).await.asking(&[("w", server.url())], &config);
    until("the ranks are known", || site.running("w", 0..2) == [Some(10), Some(11)]).await;
    site.withdraw("w").await;
    assert_eq!(site.running("w", 0..2), [None, None]);
    site.declare("w", 0, 2).await;
    until("both are known again", || site.running("w", 0..2) == [Some(10), Some(11)]).await;
    site.declare("w", 0, 4).await;
    until("the new ones are known too", || site.running("w", 0..4) == [10, 11, 12, 13].map(Some)).await;
}

/// L16: an engine that was restored answers for every rank again.
#[tokio::test]
async fn an_engine_that_comes_back_is_heard_again() {
    let server = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..2)))]).await;
    let address = server.address();
    let site = Site::of(&[("w", 0, 2)]).await.asking(&[("w", server.url())], &quick());
    until("the ranks are known", || site.running("w", 0..2) == [Some(10), Some(11)]).await;
    drop(server);
    until("it is gone", || matches!(site.status().last, Some(Outcome::TryAgain(_)))).await;
    let body = json!({"loads": [
        {"dp_rank": 0, "num_running_reqs": 1}, {"dp_rank": 1, "num_running_reqs": 2}]});
    let _back = WebServer::start_at(&address, &[(V1_LOADS, Reply::ok(body.to_string()))]).await;
    until("every rank is heard", || site.running("w", 0..2) == [Some(1), Some(2)]).await;
}

/// L1, L2, L3, L4, L6: our own GetLoads holds the rules that we hold others to, under both servicers' names.
#[tokio::test]
async fn we_answer_get_loads_by_the_same_rules() {
    let site = Site::of(&[("w1", 0, 2), ("w2", 4, 2)]).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (view, control) = (site.node.view().clone(), site.node.control());
    let clock = move || control.now();
    let task = tokio::spawn(serve_loads(listener, view, clock, std::future::pending()));
    let ask_of = async |servicer: Servicer, dp_rank: Option<i32>, worker: Option<&str>| {
        let channel = tonic::transport::Endpoint::from_shared(url.clone()).unwrap().connect().await.unwrap();
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.unwrap();
        let worker = worker.map(str::to_owned);
        let question = GetLoadsRequest { dp_rank, include: Vec::new(), worker }.encode_to_vec();
        let request = tonic::Request::new(Bytes::from(question));
        let answer = client.unary(request, servicer.path().parse().unwrap(), BytesCodec).await?;
        Ok::<_, tonic::Status>(GetLoadsResponse::decode(answer.into_inner()).unwrap())
    };
    let ask = async |servicer, dp_rank| ask_of(servicer, dp_rank, None).await;
    let ranks = |answer: &GetLoadsResponse| -> Vec<i64> {
        assert_eq!(answer.dp_rank_count as usize, answer.loads.len());
        let of = |load: &Bytes| SchedulerLoad::decode(load.clone()).unwrap().dp_rank.unwrap();
        answer.loads.iter().map(of).collect()
    };
    assert!(ranks(&ask(Servicer::Vllm, None).await.unwrap()).is_empty(), "nothing is known, nothing is idle");
    for (worker, rank, running) in [("w2", 5, 7.0), ("w1", 0, 3.0)] {
        let load = RawRankLoad { num_running_reqs: running.into(), ..RawRankLoad::default() };
        let report = LoadReport::new(vec![LoadEntry::new(rank, load)]);
        let now = site.node.control().now();
        site.node.view().loads().lock().report(now, &worker.into(), &report);
    }
    for servicer in [Servicer::Vllm, Servicer::Sglang] {
        assert_eq!(ranks(&ask(servicer, None).await.unwrap()), [0, 5]);
        let zero = ask(servicer, Some(0)).await.unwrap();
        assert_eq!(ranks(&zero), [0], "an explicit 0 is a filter");
        let load = SchedulerLoad::decode(zero.loads[0].clone()).unwrap();
        assert_eq!((load.num_running_reqs, load.num_used_tokens), (Some(3), None));
        assert!(ranks(&ask(servicer, Some(4)).await.unwrap()).is_empty(), "managed, and not known");
        for foreign in [2, 9, -1] {
            let refused = ask(servicer, Some(foreign)).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
        }
    }
    // L19: a second worker with a rank 0. Nothing is merged, and what could mean either is refused.
    site.declare("w3", 0, 1).await;
    let load = RawRankLoad { num_running_reqs: 9.0.into(), ..RawRankLoad::default() };
    let now = site.node.control().now();
    site.node.view().report_load(now, now, &"w3".into(), &LoadReport::new(vec![LoadEntry::new(0, load)]));
    let whose = |answer: &GetLoadsResponse| -> Vec<_> {
        let of = |load: &Bytes| SchedulerLoad::decode(load.clone()).unwrap();
        answer.loads.iter().map(of).map(|load| (load.worker.unwrap(), load.num_running_reqs)).collect()
    };
    let all = ask(Servicer::Vllm, None).await.unwrap();
    let (w1, w2, w3) = (("w1".into(), Some(3)), ("w2".into(), Some(7)), ("w3".into(), Some(9)));
    assert_eq!(whose(&all), [w1, w3.clone(), w2]);
    assert_eq!(ask(Servicer::Vllm, Some(0)).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(whose(&ask_of(Servicer::Sglang, Some(0), Some("w3")).await.unwrap()), [w3]);
    let foreign = ask_of(Servicer::Sglang, Some(4), Some("w3")).await.unwrap_err();
    assert_eq!(foreign.code(), Code::InvalidArgument);
    let nobody = ask_of(Servicer::Sglang, None, Some("w9")).await.unwrap_err();
    assert_eq!(nobody.code(), Code::InvalidArgument);
    task.abort();
}

/// L20: whoever is declared at run time with a place to ask is asked, a change of it is followed, and one that
/// goes is asked no more. L18: equal series of TP ranks are one report.
#[tokio::test]
async fn feeds_follow_the_fleet() {
    let series = |rank: u32, running: u32| {
        format!(
            "sglang_num_running_reqs{{dp_rank=\"{rank}\",tp_rank=\"0\"}} {running}\n\
                 sglang_num_running_reqs{{dp_rank=\"{rank}\",tp_rank=\"1\"}} {running}\n"
        )
    };
    let one = WebServer::start(&[(METRICS, Reply::ok(series(0, 3) + &series(1, 4)))]).await;
    let two = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..2)))]).await;
    let site = Site::of(&[]).await.asking(&[], &quick());
    assert!(site.feeds.as_ref().unwrap().status().is_empty());
    site.declare_with("w", 0, 2, |spec| spec.loads = Some(one.url())).await;
    until("the first is asked", || site.running("w", 0..2) == [Some(3), Some(4)]).await;
    site.declare_with("w", 0, 2, |spec| spec.loads = Some(two.url())).await;
    until("the second is asked", || site.running("w", 0..2) == [Some(10), Some(11)]).await;
    until("the first is not", || site.feeds.as_ref().unwrap().status().len() == 1).await;
    site.withdraw("w").await;
    until("nobody is", || site.feeds.as_ref().unwrap().status().is_empty()).await;
}

/// S5: an engine that sleeps says so in its metrics (vLLM) or by `/ready` (SGLang), and all its ranks are asleep
/// until it wakes.
#[tokio::test]
async fn a_sleeping_engine_is_asleep() {
    let vllm_says = |awake: u8| {
        Reply::ok(format!(
            "vllm:num_requests_running{{engine=\"0\"}} 0\n\
             vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"awake\"}} {awake}\n\
             vllm:engine_sleep_state{{engine=\"0\",sleep_state=\"discard_all\"}} {}\n",
            1 - awake
        ))
    };
    let vllm = WebServer::start(&[(METRICS, vllm_says(1))]).await;
    let sglang = WebServer::start(&[(V1_LOADS, Reply::ok(loads(0..1))), ("/ready", Reply::ok("{}"))]).await;
    let site = Site::of(&[("v", 0, 1), ("s", 0, 1)]).await;
    let site = site.asking(&[("v", vllm.url()), ("s", sglang.url())], &quick());
    let asleep = |worker: &str| {
        let now = site.node.control().now();
        site.node.view().loads().lock().is_asleep(now, &rankwise::ids::RankKey::new(worker, 0))
    };
    until("both are known", || site.running("v", 0..1) == [Some(0)] && site.running("s", 0..1) == [Some(10)])
        .await;
    assert!(!asleep("v") && !asleep("s"));
    vllm.set(METRICS, vllm_says(0));
    sglang.set("/ready", Reply::Status(503, "{}".into()));
    until("both sleep", || asleep("v") && asleep("s")).await;
    vllm.set(METRICS, vllm_says(1));
    sglang.set("/ready", Reply::ok("{}"));
    until("both are awake", || !asleep("v") && !asleep("s")).await;
    assert_eq!(site.counts().refused_entries, 0);
}

/// L18: an answer that took its time is as old as the question, or as its own timestamp within that time.
#[tokio::test]
async fn a_slow_answer_is_as_old_as_its_question() {
    let server =
        WebServer::start(&[(V1_LOADS, Reply::Slow(std::time::Duration::from_millis(200), loads(0..1)))])
            .await;
    let mut config = quick();
    config.probe.interval = NEVER;
    config.fetch.timeout = std::time::Duration::from_secs(5);
    let site = Site::of(&[("w", 0, 1)]).await.asking(&[("w", server.url())], &config);
    until("the answer is in", || site.outcomes("answered") == 1).await;
    let now = site.node.control().now();
    let key = rankwise::ids::RankKey::new("w", 0);
    let age = site.node.view().loads().lock().newest(now, &key).unwrap().1;
    assert!(age >= std::time::Duration::from_millis(200), "{age:?}");
}

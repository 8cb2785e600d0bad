//! A worker's load in every form that routers read: JSON, Prometheus, gRPC, LoadStat messages.
//!
//! A rank that does not talk has no entry anywhere: nothing is made up for it.

use std::fmt;
use std::time::Duration;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::http::{RankFilter, Refused, WorkerState, unix_seconds};
use super::rank::{RankHandle, ReportedLoad};
use crate::ids::EventSeq;
use crate::mock::config::Shape;
use crate::wire::get_loads::{
    self, GetLoadsRequest, GetLoadsResponse, LoadsSource, SchedulerLoad, Servicer, entry_bytes,
};
use crate::wire::publisher::Publisher;

/// What the ranks that are asked for say.
async fn reported(ranks: &[RankHandle]) -> Result<Vec<ReportedLoad>, Refused> {
    let mut loads = Vec::new();
    for rank in ranks {
        loads.extend(rank.load().await?);
    }
    Ok(loads)
}

// === JSON ===

/// `GET /v1/loads`.
pub(super) async fn v1_loads(
    State(state): State<WorkerState>,
    Query(filter): Query<RankFilter>,
) -> Result<Json<Value>, Refused> {
    let loads = reported(filter.ranks(&state)?).await?;
    let shape = state.engine().shape;
    let mut body = json!({
        "timestamp": unix_seconds().to_string(),
        "version": env!("CARGO_PKG_VERSION"),
        "dp_rank_count": loads.len(),
        "loads": loads.iter().map(|load| entry(load, shape)).collect::<Vec<_>>(),
    });
    if shape == Shape::Sglang {
        let sum = |of: fn(&ReportedLoad) -> f64| loads.iter().map(of).sum::<f64>();
        let mean = if loads.is_empty() { 0.0 } else { sum(|load| load.token_usage) / loads.len() as f64 };
        body["aggregate"] = json!({
            "total_running_reqs": whole(sum(|load| load.num_running_reqs)),
            "total_waiting_reqs": whole(sum(|load| load.num_waiting_reqs)),
            "avg_token_usage": mean,
        });
    }
    Ok(Json(body))
}

fn entry(load: &ReportedLoad, shape: Shape) -> Value {
    let queued = match shape {
        Shape::Vllm => "queued_uncached_tokens",
        Shape::Sglang => "num_queued_uncached_tokens",
    };
    let mut entry = json!({
        "dp_rank": load.dp_rank.0,
        "num_running_reqs": whole(load.num_running_reqs),
        "num_waiting_reqs": whole(load.num_waiting_reqs),
        "num_total_reqs": whole(load.num_running_reqs + load.num_waiting_reqs),
        "num_used_tokens": whole(load.num_used_tokens),
        "max_total_num_tokens": whole(load.max_total_num_tokens),
        "token_usage": load.token_usage,
        "gen_throughput": load.engine.generation_throughput,
        "cache_hit_rate": hit_rate(load),
        "utilization": load.token_usage,
        "max_running_requests": load.engine.max_running,
    });
    entry[queued] = whole(load.queued_uncached_tokens);
    entry
}

fn hit_rate(load: &ReportedLoad) -> f64 {
    match load.engine.prefix_queries {
        0 => 0.0,
        queries => load.engine.prefix_hits as f64 / queries as f64,
    }
}

/// A count is written as one; a lie that is none stays what it is.
fn whole(value: f64) -> Value {
    // Beyond it, not every whole number is a double.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value.fract() == 0.0 && value.abs() < EXACT {
        // In range, as was just looked at.
        true => json!(value as i64),
        false => json!(value),
    }
}

/// `GET /get_load`: SGLang's older form.
pub(super) async fn get_load(State(state): State<WorkerState>) -> Result<Json<Value>, Refused> {
    let loads = reported(state.ranks()).await?;
    let one = |load: &ReportedLoad| {
        json!({
            "dp_rank": load.dp_rank.0,
            "num_reqs": whole(load.num_running_reqs + load.num_waiting_reqs),
            "num_waiting_reqs": whole(load.num_waiting_reqs),
            "num_tokens": whole(load.num_used_tokens),
        })
    };
    Ok(Json(loads.iter().map(one).collect()))
}

// === Prometheus ===

/// `GET /metrics`, in the names of the shape's engine.
pub(super) async fn metrics(State(state): State<WorkerState>) -> Result<Response, Refused> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape {
        shape: state.engine().shape,
        model: escaped(&state.address().model),
        block_size: state.address().block_size.to_string(),
        loads: reported(state.ranks()).await?,
    }));
    let mut text = String::new();
    encode(&mut text, &registry)
        .map_err(|error| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// The encoder writes label values as they are.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[derive(Debug)]
struct Scrape {
    shape: Shape,
    model: String,
    block_size: String,
    loads: Vec<ReportedLoad>,
}

/// A figure of every rank.
type Gauge = (&'static str, &'static str, fn(&ReportedLoad) -> f64);

const VLLM_GAUGES: &[Gauge] = &[
    ("vllm:num_requests_running", "Requests that run", |load| load.num_running_reqs),
    ("vllm:num_requests_waiting", "Requests that wait", |load| load.num_waiting_reqs),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache in use", |load| load.token_usage),
];

const SGLANG_GAUGES: &[Gauge] = &[
    ("sglang_num_running_reqs", "Requests that run", |load| load.num_running_reqs),
    ("sglang_num_queue_reqs", "Requests that wait", |load| load.num_waiting_reqs),
    ("sglang_num_used_tokens", "Tokens in the KV cache", |load| load.num_used_tokens),
    ("sglang_max_total_num_tokens", "Tokens that the KV cache holds", |load| load.max_total_num_tokens),
    ("sglang_token_usage", "Share of the KV cache in use", |load| load.token_usage),
    ("sglang_gen_throughput", "Tokens generated per second", |load| load.engine.generation_throughput),
    ("sglang_cache_hit_rate", "Share of prompt tokens found in the cache", hit_rate),
];

/// A count of every rank.
type Count = (&'static str, &'static str, fn(&ReportedLoad) -> u64);

const VLLM_COUNTS: &[Count] = &[
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache", |load| load.engine.prefix_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache", |load| load.engine.prefix_hits),
    ("vllm:prompt_tokens", "Prompt tokens of finished requests", |load| load.engine.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated", |load| load.engine.generated_tokens),
    ("vllm:num_preemptions", "Preemptions", |load| load.engine.preemptions),
];

const SGLANG_COUNTS: &[Count] = &[
    ("sglang_prompt_tokens", "Prompt tokens of finished requests", |load| load.engine.prompt_tokens),
    ("sglang_generation_tokens", "Tokens generated", |load| load.engine.generated_tokens),
    ("sglang_num_requests", "Requests finished", |load| load.engine.finished),
];

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let to = &mut encoder;
        let (gauges, counts) = match self.shape {
            Shape::Vllm => (VLLM_GAUGES, VLLM_COUNTS),
            Shape::Sglang => (SGLANG_GAUGES, SGLANG_COUNTS),
        };
        for (name, help, read) in gauges {
            let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for load in &self.loads {
                let rank = load.dp_rank.to_string();
                let labels = self.labels(&rank);
                ConstGauge::new(read(load)).encode(family.encode_family(&labels)?)?;
            }
        }
        for (name, help, read) in counts {
            let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
            for load in &self.loads {
                let rank = load.dp_rank.to_string();
                let labels = self.labels(&rank);
                ConstCounter::new(read(load)).encode(family.encode_family(&labels)?)?;
            }
        }
        if self.shape == Shape::Vllm { self.cache_config(to) } else { Ok(()) }
    }
}

impl Scrape {
    fn labels<'a>(&'a self, rank: &'a str) -> [(&'static str, &'a str); 2] {
        let engine = match self.shape {
            Shape::Vllm => "engine",
            Shape::Sglang => "dp_rank",
        };
        [("model_name", &self.model), (engine, rank)]
    }

    /// The pool's size, in the labels of a gauge that is always 1.
    fn cache_config(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "How the KV cache is made";
        let mut family = to.encode_descriptor("vllm:cache_config_info", help, None, MetricType::Gauge)?;
        for load in &self.loads {
            let (rank, blocks) = (load.dp_rank.to_string(), load.engine.total_blocks.to_string());
            let tokens = load.max_total_num_tokens.to_string();
            let labels = [
                ("engine", &*rank),
                ("block_size", &*self.block_size),
                ("num_gpu_blocks", &*blocks),
                ("kv_cache_size_tokens", &*tokens),
            ];
            ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

// === gRPC ===

impl LoadsSource for WorkerState {
    async fn get_loads(
        &self,
        servicer: Servicer,
        request: GetLoadsRequest,
        _: MetadataMap,
    ) -> Result<GetLoadsResponse, Status> {
        let filter = RankFilter::of(request.dp_rank.map(Into::into));
        let ranks =
            filter.ranks(self).map_err(|refused| Status::invalid_argument(refused.message().to_owned()))?;
        let loads = reported(ranks).await;
        let loads = loads.map_err(|refused| Status::unavailable(refused.message().to_owned()))?;
        let loads: Vec<Bytes> = loads.iter().map(|load| grpc_entry(servicer, load)).collect();
        Ok(GetLoadsResponse {
            timestamp: unix_seconds().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // At most as many as a worker has ranks.
            dp_rank_count: i32::try_from(loads.len()).unwrap_or(i32::MAX),
            loads,
        })
    }
}

fn grpc_entry(servicer: Servicer, load: &ReportedLoad) -> Bytes {
    // A cast to an integer saturates, and the message has no room for anything else.
    let count = |value: f64| Some(value as i64);
    let message = SchedulerLoad {
        dp_rank: Some(load.dp_rank.0.into()),
        num_running_reqs: count(load.num_running_reqs),
        num_waiting_reqs: count(load.num_waiting_reqs),
        num_used_tokens: count(load.num_used_tokens),
        max_total_num_tokens: count(load.max_total_num_tokens),
        token_usage: Some(load.token_usage),
        ..SchedulerLoad::default()
    };
    entry_bytes(servicer, &message, count(load.queued_uncached_tokens))
}

/// Answers the shape's own `GetLoads` until the fleet is stopped.
pub(super) async fn serve_grpc(
    listener: TcpListener,
    state: WorkerState,
    mut stopped: watch::Receiver<bool>,
) {
    let servicer = match state.engine().shape {
        Shape::Vllm => Servicer::Vllm,
        Shape::Sglang => Servicer::Sglang,
    };
    let shutdown = async move {
        // A fleet that is gone is stopped.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    if let Err(error) = get_loads::serve(listener, &[servicer], state, shutdown).await {
        tracing::error!(%error, "a mock worker no longer answers gRPC");
    }
}

// === LoadStat ===

/// How often a rank's load is looked at: about as often as an engine ends a step.
const LOOK: Duration = Duration::from_millis(20);

/// Looks without a change until it is said again: an idle scheduler speaks about once a second.
const IDLE_LOOKS: u32 = 50;

/// Publishes a rank's load when it has changed, and about once a second.
pub(super) async fn publish_loads(rank: RankHandle, socket: Publisher) {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = None;
    let mut looks = 0;
    let mut seq = EventSeq::ZERO;
    loop {
        ticks.tick().await;
        let Ok(load) = rank.load().await else { return };
        let Some(load) = load else { continue };
        let payload = load_stat(&load);
        looks += 1;
        if last.as_ref() == Some(&payload) && looks < IDLE_LOOKS {
            continue;
        }
        looks = 0;
        last = Some(payload.clone());
        // For who does not read, it is lost: the next one says more.
        let _ = timeout(LOOK, socket.publish(seq, payload)).await;
        seq = seq.next();
    }
}

/// `["LoadStat", running, waiting, tokens, max_total_tokens, attn_dp_rank]`.
fn load_stat(load: &ReportedLoad) -> Bytes {
    // Counts as integers, as a scheduler has them; casts saturate.
    let message = (
        "LoadStat",
        load.num_running_reqs as i64,
        load.num_waiting_reqs as i64,
        load.num_used_tokens as i64,
        load.max_total_num_tokens as i64,
        load.dp_rank.0,
    );
    // Integers and a short text always encode.
    rmp_serde::to_vec(&message).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::ids::DpRank;
    use crate::load::LoadStat;
    use crate::mock::engine::LoadNow;

    fn load() -> ReportedLoad {
        ReportedLoad {
            dp_rank: DpRank(4),
            num_running_reqs: 3.0,
            num_waiting_reqs: 1.0,
            num_used_tokens: 640.0,
            max_total_num_tokens: 8_192.0,
            token_usage: 0.078_125,
            queued_uncached_tokens: 70.0,
            engine: LoadNow { total_blocks: 512, ..LoadNow::default() },
        }
    }

    /// L1, L5: our own reader finds every figure in its own place, whichever form it was sent in.
    #[test]
    fn every_form_is_read_by_our_own_readers() {
        let stat = LoadStat::decode(&load_stat(&load())).unwrap();
        let read = stat.load.check().unwrap().0;
        assert_eq!((read.num_running_reqs, read.num_waiting_reqs), (Some(3), Some(1)));
        assert_eq!((read.num_used_tokens, read.max_total_num_tokens), (Some(640), Some(8_192)));
        for (servicer, shape) in [(Servicer::Vllm, Shape::Vllm), (Servicer::Sglang, Shape::Sglang)] {
            let loads = vec![grpc_entry(servicer, &load())];
            let body = GetLoadsResponse { loads, ..GetLoadsResponse::default() };
            let answer = get_loads::read(servicer, prost::Message::encode_to_vec(&body).into()).unwrap();
            let json = json!({ "loads": [entry(&load(), shape)] }).to_string();
            let from_json = crate::load::json::answer(json.as_bytes()).unwrap();
            for answer in [answer, from_json] {
                assert_eq!(answer.entries[0].dp_rank, Some(4));
                let read = answer.entries[0].load.check().unwrap().0;
                assert_eq!((read.num_running_reqs, read.num_used_tokens), (Some(3), Some(640)));
                assert_eq!((read.queued_uncached_tokens, read.token_usage), (Some(70), Some(0.078_125)));
            }
        }
    }

    #[test]
    fn the_metrics_have_the_engines_names() {
        for (shape, name, size) in [
            (
                Shape::Vllm,
                "vllm:num_requests_running{model_name=\"a\\\"b\",engine=\"4\"} 3.0",
                "num_gpu_blocks=\"512\"",
            ),
            (
                Shape::Sglang,
                "sglang_num_running_reqs{model_name=\"a\\\"b\",dp_rank=\"4\"} 3.0",
                "sglang_token_usage",
            ),
        ] {
            let mut registry = Registry::default();
            let scrape =
                Scrape { shape, model: escaped("a\"b"), block_size: "16".into(), loads: vec![load()] };
            registry.register_collector(Box::new(scrape));
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            assert!(text.contains(name) && text.contains(size), "{text}");
        }
    }

    #[test]
    fn lies_stay_what_they_are() {
        assert_eq!(whole(-3.0), json!(-3));
        assert_eq!(whole(0.5), json!(0.5));
        assert_eq!(whole(1e300), json!(1e300));
    }
}

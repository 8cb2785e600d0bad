//! A worker over HTTP: its routes, what they share, and how they refuse.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::ports::port_of;
use super::rank::{Gone, NotTaken, RankHandle};
use super::{FleetConfig, WorkerAddress, debug, generate, loads};
use crate::ids::DpRank;
use crate::mock::config::{EngineConfig, Shape};
use crate::mock::request::Refusal;
use crate::wire::listener::Limited;

/// Largest body: half a million token ids, several times the longest context.
const MAX_BODY: usize = 4 << 20;

/// Requests that are answered at once by one worker; one more is refused. Above what engines let run and wait by
/// default, so that the engine's own refusal is the one that is seen.
const MAX_IN_FLIGHT: usize = 8_192;

/// Connections that stand at once on a worker, more of them wait. Streams that nobody reads hold no more than these.
const MAX_CONNECTIONS: usize = 8_192;

/// What a worker's routes share. Cloning costs one reference count.
#[derive(Clone)]
pub(super) struct WorkerState(Arc<Inner>);

struct Inner {
    engine: EngineConfig,
    address: WorkerAddress,
    ranks: Vec<RankHandle>,
    next: AtomicUsize,
    in_flight: Semaphore,
}

impl WorkerState {
    pub(super) fn new(config: &FleetConfig, address: WorkerAddress, ranks: Vec<RankHandle>) -> Self {
        Self(Arc::new(Inner {
            engine: config.engine,
            address,
            ranks,
            next: AtomicUsize::new(0),
            in_flight: Semaphore::new(MAX_IN_FLIGHT),
        }))
    }

    pub(super) fn engine(&self) -> &EngineConfig {
        &self.0.engine
    }

    pub(super) fn address(&self) -> &WorkerAddress {
        &self.0.address
    }

    pub(super) fn ranks(&self) -> &[RankHandle] {
        &self.0.ranks
    }

    /// The rank of this global number, if the worker manages it.
    pub(super) fn by_global(&self, dp_rank: i64) -> Option<&RankHandle> {
        self.ranks().iter().find(|rank| i64::from(rank.dp_rank().0) == dp_rank)
    }

    /// The rank of this number within the worker, as dispatch names it.
    pub(super) fn by_local(&self, local: i64) -> Option<&RankHandle> {
        usize::try_from(local).ok().and_then(|local| self.ranks().get(local))
    }

    /// The number within the worker.
    pub(super) fn local(&self, rank: DpRank) -> u32 {
        rank.0 - self.0.address.ranks.first().map_or(0, |first| first.dp_rank)
    }

    /// The worker's own choice.
    pub(super) fn round_robin(&self) -> &RankHandle {
        let turn = self.0.next.fetch_add(1, Ordering::Relaxed);
        // A fleet has at least one rank per worker.
        &self.ranks()[turn % self.ranks().len()]
    }
}

/// Serves until the fleet is stopped, then lets answers end.
pub(super) async fn serve(listener: TcpListener, state: WorkerState, mut stopped: watch::Receiver<bool>) {
    let shutdown = async move {
        // A fleet that is gone is stopped.
        let _ = stopped.wait_for(|stopped| *stopped).await;
    };
    let listener = Limited::new(listener, MAX_CONNECTIONS);
    if let Err(error) = axum::serve(listener, app(state)).with_graceful_shutdown(shutdown).await {
        tracing::error!(%error, "a mock worker no longer answers HTTP");
    }
}

fn app(state: WorkerState) -> Router {
    Router::new()
        .route("/v1/completions", post(generate::completions))
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/v1/loads", get(loads::v1_loads))
        .route("/get_load", get(loads::get_load))
        .route("/metrics", get(loads::metrics))
        .route("/kv_event_sources", get(event_sources))
        .route("/server_info", get(server_info))
        .route("/get_server_info", get(server_info))
        .route("/reset_prefix_cache", post(reset))
        // SGLang's name for the same.
        .route("/flush_cache", post(reset))
        .route("/debug/blocks", get(debug::blocks))
        .route("/debug/fault", post(debug::fault))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .route_layer(middleware::from_fn_with_state(state.clone(), bounded))
        .fallback(|| async { Refused::new(StatusCode::NOT_FOUND, "there is no such route") })
        .with_state(state)
}

async fn bounded(State(state): State<WorkerState>, request: Request, next: Next) -> Response {
    match state.0.in_flight.try_acquire() {
        // Held until the head of the answer is there; a stream is bounded by what the engine takes.
        Ok(_permit) => next.run(request).await,
        Err(_) => {
            let why = format!("{MAX_IN_FLIGHT} requests are being answered already");
            Refused::new(StatusCode::SERVICE_UNAVAILABLE, why).into_response()
        }
    }
}

/// Seconds of Unix time, for answers that carry them.
pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

// === refusals ===

/// An error in the form of the OpenAI API.
#[derive(Debug)]
pub(super) struct Refused {
    status: StatusCode,
    message: String,
}

impl Refused {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }

    pub(super) fn not_managed(dp_rank: i64, state: &WorkerState) -> Self {
        let of = |rank: Option<&RankHandle>| rank.map_or(0, |rank| rank.dp_rank().0);
        let (first, last) = (of(state.ranks().first()), of(state.ranks().last()));
        Self::bad_request(format!("dp_rank {dp_rank} is not managed here: the ranks are {first} to {last}"))
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let kind = match self.status.is_client_error() {
            true => "BadRequestError",
            false => "InternalServerError",
        };
        let error =
            json!({"message": self.message, "type": kind, "param": null, "code": self.status.as_u16()});
        (self.status, Json(json!({ "error": error }))).into_response()
    }
}

impl From<Gone> for Refused {
    fn from(gone: Gone) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, gone.to_string())
    }
}

impl From<NotTaken> for Refused {
    fn from(why: NotTaken) -> Self {
        let status = match why {
            NotTaken::Refused(Refusal::QueueFull { .. }) | NotTaken::Gone(_) => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            NotTaken::Refused(_) => StatusCode::BAD_REQUEST,
        };
        Self::new(status, why.to_string())
    }
}

// === what is asked about a worker ===

/// `?dp_rank=`, by presence.
#[derive(Deserialize)]
pub(super) struct RankFilter {
    dp_rank: Option<i64>,
}

impl RankFilter {
    /// The rank of this global number, or all.
    pub(super) fn of(dp_rank: Option<i64>) -> Self {
        Self { dp_rank }
    }

    /// Whether one rank is asked for.
    pub(super) fn is_named(&self) -> bool {
        self.dp_rank.is_some()
    }

    /// The ranks that are asked for.
    pub(super) fn ranks<'s>(&self, state: &'s WorkerState) -> Result<&'s [RankHandle], Refused> {
        match self.dp_rank {
            None => Ok(state.ranks()),
            Some(dp_rank) => match state.by_global(dp_rank) {
                Some(rank) => Ok(std::slice::from_ref(rank)),
                None => Err(Refused::not_managed(dp_rank, state)),
            },
        }
    }
}

async fn health() -> StatusCode {
    StatusCode::OK
}

async fn models(State(state): State<WorkerState>) -> Json<Value> {
    let model = json!({
        "id": state.address().model, "object": "model", "created": unix_seconds(), "owned_by": "rankwise",
        "max_model_len": state.engine().max_model_len,
    });
    Json(json!({ "object": "list", "data": [model] }))
}

/// `GET /kv_event_sources`: a bare list by rank, as vLLM answers it.
async fn event_sources(State(state): State<WorkerState>) -> Json<Value> {
    let source = |rank: &super::RankAddress| {
        json!({
            "data_parallel_rank": rank.dp_rank, "endpoint": rank.events, "replay_endpoint": rank.replay,
            "topic": "",
        })
    };
    Json(state.address().ranks.iter().map(source).collect())
}

/// `GET /server_info`: what SGLang says of itself, as far as it means something here.
async fn server_info(State(state): State<WorkerState>) -> Json<Value> {
    let (engine, address) = (state.engine(), state.address());
    let ranks = &address.ranks;
    Json(json!({
        "model_path": address.model,
        "served_model_name": address.model,
        "version": env!("CARGO_PKG_VERSION"),
        "page_size": address.block_size,
        "dp_size": ranks.len(),
        "max_total_num_tokens": u64::from(engine.blocks) * u64::from(address.block_size),
        "max_running_requests": engine.max_running,
        "max_prefill_tokens": engine.max_batched_tokens,
        "context_length": engine.max_model_len,
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": host_of(ranks.first().map_or("", |rank| &rank.events)),
            "endpoint_port_base": port_base(ranks.iter().map(|rank| Some(&*rank.events))),
            "replay_endpoint_port_base": port_base(ranks.iter().map(|rank| Some(&*rank.replay))),
            "load_endpoint_port_base": match engine.shape {
                Shape::Vllm => None,
                Shape::Sglang => port_base(ranks.iter().map(|rank| rank.load_stat.as_deref())),
            },
            "load_topic": "load",
            "topic": "",
            "block_size": address.block_size,
            "dp_size": ranks.len(),
        },
    }))
}

fn host_of(endpoint: &str) -> &str {
    let address = endpoint.strip_prefix("tcp://").unwrap_or(endpoint);
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// The first port, if each next one is one higher: only then is there a base.
fn port_base<'a>(endpoints: impl Iterator<Item = Option<&'a str>>) -> Option<u16> {
    let ports: Option<Vec<u16>> = endpoints.map(|endpoint| endpoint.map(port_of)).collect();
    let ports = ports?;
    let neighbours = ports.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]));
    neighbours.then(|| ports.first().copied()).flatten()
}

/// `POST /reset_prefix_cache`: of every rank, or of the one that is named. Refused as a whole where one refuses.
async fn reset(
    State(state): State<WorkerState>,
    Query(filter): Query<RankFilter>,
) -> Result<Json<Value>, Refused> {
    let mut refused = Vec::new();
    for rank in filter.ranks(&state)? {
        if !rank.reset_prefix_cache().await? {
            refused.push(rank.dp_rank().0);
        }
    }
    if refused.is_empty() {
        return Ok(Json(json!({ "status": "ok" })));
    }
    let why = format!("requests are in the way on ranks {refused:?}");
    Err(Refused::new(StatusCode::CONFLICT, why))
}

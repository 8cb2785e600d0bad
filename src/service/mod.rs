//! The HTTP service: Dynamo's indexer and selection routes and Mooncake's shapes on one port, with our fields
//! beside the known ones.
//!
//! Handlers read through a [`Router`](crate::routing::Router) on their own thread: hashing and scoring take
//! microseconds and run inline. What changes the fleet goes to the writer's side through [`Control`] and
//! comes back with its answer.
//!
//! **Not here yet:** `/dump` and peers. Their routes are unknown ones: 404.

mod boundary;
mod capacity;
mod connections;
mod declaration;
mod fields;
mod gateway;
mod loads;
mod metrics;
mod narrow;
mod potential;
mod problem;
mod query;
mod ready;
mod records;
mod reservations;
mod select;
mod selection;
mod spec;
mod state;
mod url;
mod visit;
mod watch;
mod workers;

use std::future::Future;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use serde_json::json;

pub use self::connections::{ConnectionLimits, serve, serve_with};
pub use self::declaration::{StrictWorkerFields, WorkerFields};
pub use self::problem::Problem;
pub use self::state::{LogDecisions, ServiceConfig, ServiceState};
use self::visit::{Rules, Visit, may_take_effect};
use crate::fleet::{Change, DeclareError, WorkerSpec};
use crate::ids::{Moment, RankKey, WorkerId};

/// The writer's side as the service sees it: commands go to the indexing thread and come back with its answer.
///
/// When a command has answered, the view shows what it changed.
pub trait Control: Clone + Send + Sync + 'static {
    /// Declares a worker, or declares it anew.
    fn declare(&self, spec: WorkerSpec) -> impl Future<Output = Result<Change, ControlError>> + Send;

    /// Adds the ranks of `spec` to its worker, which is declared if it is new.
    fn add_rank(&self, spec: WorkerSpec) -> impl Future<Output = Result<Change, ControlError>> + Send;

    /// Removes one rank; `None` if it is not declared.
    fn remove_rank(&self, rank: RankKey)
    -> impl Future<Output = Result<Option<Change>, ControlError>> + Send;

    /// Removes a worker; `None` if it is not declared.
    fn withdraw(&self, worker: WorkerId)
    -> impl Future<Output = Result<Option<Change>, ControlError>> + Send;

    /// The moment on the clock that drives the indexer.
    fn now(&self) -> Moment;

    /// Messages that wait for the indexing thread; `None` where there is no queue.
    fn queued_messages(&self) -> Option<u64> {
        None
    }

    /// Why the view no longer moves, in words; `None` while the indexing thread runs.
    fn failure(&self) -> Option<String> {
        None
    }
}

/// Why a command was not carried out.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ControlError {
    /// The declaration was refused; nothing has changed.
    #[error(transparent)]
    Declare(#[from] DeclareError),
    /// The indexing thread has ended.
    #[error("the indexing thread has ended: the service is shutting down")]
    Closed,
}

/// All routes.
pub fn app<C: Control>(state: ServiceState<C>) -> Router {
    let config = state.config();
    // Noted for every request; most are bounded in time and number, and the rest answers whatever the load.
    let noted = |routes: Router<ServiceState<C>>, rules: &Rules| {
        routes.route_layer(middleware::from_fn_with_state((state.clone(), rules.clone()), visit::visited))
    };
    let guarded = |routes: Router<ServiceState<C>>, rules: &Rules| {
        let bounded = middleware::from_fn_with_state(state.clone(), bounded);
        noted(routes.layer(DefaultBodyLimit::max(rules.limit())).route_layer(bounded), rules)
    };
    let (asking, other) = (Rules::prompts(config, state.bodies()), Rules::others(config, state.bodies()));
    let prompts = Router::new()
        .route("/query", post(query::query))
        .route("/query_by_hash", post(query::query_by_hash))
        .route("/select", post(select::select))
        .route("/select_and_reserve", post(select::select_and_reserve))
        .route("/reservations", post(reservations::reserve))
        .route("/potential_loads", post(potential::potential_loads))
        .route("/overlap_scores", post(potential::overlap_scores));
    let others = Router::new()
        .route("/register", post(workers::register))
        .route("/unregister", post(workers::unregister))
        .route("/workers", post(workers::declare).get(workers::list))
        .route("/workers/{id}", delete(workers::withdraw).patch(workers::patch))
        .route("/workers/{id}/drain-check", get(capacity::drain_check))
        .route("/capacity", get(capacity::list))
        .route("/v1/loads", get(gateway::list))
        .route("/reservations/{id}", delete(reservations::free))
        .route("/reservations/{id}/prefill_complete", post(reservations::prefill_complete))
        .route("/reservations/{id}/output_block", post(reservations::output_block))
        .route("/loads", get(loads::list).post(loads::report))
        .route("/dispatch_rejected", post(loads::dispatch_rejected));
    let unbounded = Router::new()
        // Bounded by its own number of places, and not in time.
        .route("/loads/watch", get(watch::watch))
        .route("/", get(index))
        .route("/health", get(health::<C>))
        .route("/ready", get(ready::ready))
        .route("/metrics", get(metrics::scrape));
    guarded(prompts, &asking)
        .merge(guarded(others, &other))
        .merge(noted(unbounded, &other))
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .with_state(state)
}

/// Lets a limited number of requests be read at once, and none for ever.
async fn bounded<C: Control>(State(state): State<ServiceState<C>>, request: Request, next: Next) -> Response {
    let limit = state.config().request_timeout;
    let visit = Visit::of(request.extensions());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let served = async {
        // Never closed.
        let _permit = state.in_flight().acquire().await;
        next.run(request).await
    };
    match tokio::time::timeout(limit, served).await {
        Ok(response) => response,
        Err(_) => {
            let may = may_take_effect(&visit, &method, &path);
            let so = if may {
                "; what it asks for may still take effect: look at GET /workers before you send it again"
            } else {
                ""
            };
            let detail = format!("the request was not read and answered within {} ms{so}", limit.as_millis());
            let problem = Problem::new(StatusCode::SERVICE_UNAVAILABLE, "timeout", detail);
            problem.may_take_effect(may).into_response()
        }
    }
}

async fn index() -> impl IntoResponse {
    Json(json!({
        "name": env!("CARGO_PKG_NAME"),
        "version": env!("CARGO_PKG_VERSION"),
        "routes": [
            "POST /query", "POST /query_by_hash", "POST /select", "POST /potential_loads",
            "POST /select_and_reserve", "POST /reservations", "POST /reservations/{id}/prefill_complete",
            "POST /reservations/{id}/output_block", "DELETE /reservations/{id}",
            "POST /overlap_scores", "POST /register", "POST /unregister", "GET /workers", "POST /workers",
            "PATCH /workers/{id}", "DELETE /workers/{id}", "GET /loads", "POST /loads", "GET /health",
            "GET /ready", "GET /metrics", "GET /capacity", "GET /workers/{id}/drain-check", "GET /v1/loads",
            "GET /loads/watch", "POST /dispatch_rejected",
        ],
    }))
}

async fn health<C: Control>(State(state): State<ServiceState<C>>) -> Response {
    match state.control().failure() {
        None => Json(json!({ "status": "ok" })).into_response(),
        Some(why) => Problem::new(StatusCode::SERVICE_UNAVAILABLE, "index_stopped", why).into_response(),
    }
}

async fn unknown_route(request: Request) -> Problem {
    let detail = format!("route not found: {}", state::short(request.uri().path()));
    Problem::not_found("unknown_route", detail)
}

/// The router adds the methods that are allowed.
async fn unknown_method(request: Request) -> Problem {
    let detail = format!("method not allowed: {} {}", request.method(), state::short(request.uri().path()));
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "unknown_method", detail)
}

//! `GET /v1/loads`: the fleet's load as gateways read it, an entry per rank that is known and tagged with its
//! worker. A rank without a readable report has no entry, and no entry is made up.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Control;
use super::boundary::IdOut;
use super::problem::Problem;
use super::state::ServiceState;
use super::url::Params;
use crate::indexer::{PoolView, RankView, WorkerView};
use crate::load::{LoadAnswer, LoadTable, RankLoad};

#[derive(Deserialize)]
pub(super) struct LoadsQuery {
    dp_rank: Option<String>,
    worker: Option<String>,
    model: Option<String>,
    format: Option<String>,
    /// Sections of other servers' answers; ours has one, which is always there.
    #[allow(dead_code)]
    include: Option<String>,
}

/// One rank's newest figures; what its report did not say is not there.
#[derive(Serialize)]
struct LoadOut<'a> {
    worker: IdOut<'a>,
    worker_type: &'static str,
    model: &'a str,
    dp_rank: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_running_reqs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_waiting_reqs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_total_reqs: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    num_used_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_total_num_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_usage: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queued_uncached_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_running_requests: Option<u64>,
    /// Blocks that the rank holds: declared, or by its engine's word.
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_blocks: Option<u64>,
    age_ms: u64,
}

/// What was said of a whole: a worker, or one entry of another gateway's fleet. It is no rank's load here.
#[derive(Serialize)]
struct SaidOut<'a> {
    worker: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dp_rank: Option<u64>,
    source: &'a str,
    num_running_reqs: Option<u64>,
    num_waiting_reqs: Option<u64>,
    num_used_tokens: Option<u64>,
    max_total_num_tokens: Option<u64>,
    token_usage: Option<f64>,
    age_ms: u64,
}

impl<'a> SaidOut<'a> {
    fn of(worker: Option<&'a str>, source: &'a str, load: &RankLoad, age: Duration) -> Self {
        Self {
            worker,
            worker_type: None,
            dp_rank: None,
            source,
            num_running_reqs: load.num_running_reqs,
            num_waiting_reqs: load.num_waiting_reqs,
            num_used_tokens: load.num_used_tokens,
            max_total_num_tokens: load.max_total_num_tokens,
            token_usage: load.token_usage,
            age_ms: millis(age),
        }
    }
}

fn millis(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}

/// `GET /v1/loads?dp_rank=&worker=&model=`.
///
/// The filter works by presence: without `dp_rank` all ranks, with it that rank, 0 included. A rank that
/// nobody declares is a 400; a declared rank without a report is an answer without an entry.
pub(super) async fn list<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(query): Params<LoadsQuery>,
) -> Result<Response, Problem> {
    if let Some(format) = query.format.as_deref().filter(|format| *format != "json") {
        let detail = format!("format {format:?} is not offered; take json, or GET /metrics for Prometheus");
        return Err(Problem::bad_request("no_such_format", detail).field("format"));
    }
    let wanted = query.dp_rank.as_deref().map(rank_of).transpose()?;
    let fleet = state.view().fleet();
    let now = state.control().now();
    let loads = state.view().loads().lock();
    let ranks = || {
        fleet
            .pools()
            .filter(|pool| query.model.as_deref().is_none_or(|model| *model == *pool.key.model))
            .flat_map(|pool| pool.ranks().map(move |(worker, rank)| (pool, worker, rank)))
            .filter(|(_, worker, _)| {
                query.worker.as_deref().is_none_or(|id| id == worker.spec.worker.as_str())
            })
            .filter(|(_, _, rank)| wanted.is_none_or(|wanted| rank.plan.rank.dp_rank.0 == wanted))
    };
    if let Some(wanted) = wanted
        && ranks().next().is_none()
    {
        let detail = format!("rank {wanted} is not managed by any worker that the filters leave");
        return Err(Problem::bad_request("no_such_rank", detail).field("dp_rank"));
    }
    if let Some(wanted) = wanted
        && ranks().nth(1).is_some()
    {
        let detail = format!("rank {wanted} is a rank of several workers; name one: worker=…");
        return Err(Problem::bad_request("ambiguous_rank", detail).field("dp_rank"));
    }
    let entries: Vec<LoadOut<'_>> =
        ranks().filter_map(|(pool, worker, rank)| entry(pool, worker, rank, &loads, now)).collect();
    let wanted_worker = |id: &str| query.worker.as_deref().is_none_or(|wanted| wanted == id);
    let aggregates: Vec<_> = loads.aggregates(now).filter(|(id, _)| wanted_worker(id.as_str())).collect();
    let mut aggregates: Vec<_> = aggregates
        .iter()
        .map(|(id, said)| SaidOut::of(Some(id.as_str()), &said.source, &said.load, said.age))
        .collect();
    aggregates.sort_by_key(|said| said.worker);
    let rollups: Vec<_> =
        loads.rollups(now).flat_map(|(base, answer, age)| rolled_up(base, answer, age)).collect();
    let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let body = json!({
        "timestamp": timestamp,
        "version": env!("CARGO_PKG_VERSION"),
        "dp_rank_count": entries.len(),
        // No entry is "unavailable", which a reader must not take for "idle".
        "available": !entries.is_empty(),
        "loads": entries,
        // Neither is any rank's: figures of a worker as a whole, and what other gateways say of their fleets.
        "aggregates": aggregates,
        "rollups": rollups,
    });
    Ok(Json(body).into_response())
}

fn rolled_up<'a>(base: &'a str, answer: &'a LoadAnswer, age: Duration) -> impl Iterator<Item = SaidOut<'a>> {
    answer.rollup.iter().filter_map(move |said| {
        let (load, _) = said.entry.load.check().ok()?;
        Some(SaidOut {
            worker_type: said.worker_type.as_deref(),
            dp_rank: said.entry.dp_rank,
            ..SaidOut::of(said.worker.as_deref(), base, &load, age)
        })
    })
}

fn entry<'a>(
    pool: &'a PoolView,
    worker: &'a WorkerView,
    rank: &RankView,
    loads: &LoadTable,
    now: crate::ids::Moment,
) -> Option<LoadOut<'a>> {
    let (load, age) = loads.fresh(now, &rank.plan.rank)?;
    let RankLoad { num_running_reqs, num_waiting_reqs, .. } = *load;
    Some(LoadOut {
        worker: IdOut(&worker.spec.worker, worker.spec.id_form),
        worker_type: worker.spec.role.name(),
        model: &pool.key.model,
        dp_rank: rank.plan.rank.dp_rank.0,
        num_running_reqs,
        num_waiting_reqs,
        num_total_reqs: num_running_reqs
            .zip(num_waiting_reqs)
            .map(|(running, waiting)| running.saturating_add(waiting)),
        num_used_tokens: load.num_used_tokens,
        max_total_num_tokens: load.max_total_num_tokens,
        token_usage: load.token_usage,
        queued_uncached_tokens: load.queued_uncached_tokens,
        max_running_requests: load
            .max_running_requests
            .or_else(|| loads.reported_request_limit(&rank.plan.rank)),
        capacity_blocks: pool.capacity_of(worker, rank, loads).blocks(),
        age_ms: millis(age),
    })
}

fn rank_of(text: &str) -> Result<u32, Problem> {
    text.parse().map_err(|_| {
        let detail = format!("dp_rank {text:?} is no rank; give a whole number");
        Problem::bad_request("no_such_rank", detail).field("dp_rank")
    })
}

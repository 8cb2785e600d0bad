//! `/loads`: reports in, and what is known of each rank's load.

use std::fmt;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::Control;
use super::boundary::{IdOut, JsonBody, WireId, not_null, pool_names};
use super::fields::Strays;
use super::narrow::Narrow;
use super::problem::Problem;
use super::state::ServiceState;
use super::url::{NoParams, Params};
use super::visit::Visit;
use super::workers::WorkerFilter;
use crate::ids::{Moment, RankKey};
use crate::indexer::{PoolView, RankView, WorkerView};
use crate::load::json::{OWN_NAMES, own_figures};
use crate::load::{Booked, LoadEntry, LoadReport, LoadTable, RankLoadView};

// === reports ===

/// `ranks`: by global rank. Keeps a rank that is named twice twice, since then neither is believed.
#[derive(Default)]
struct ByRank {
    entries: Vec<LoadEntry>,
    strays: Strays,
}

impl<'de> Deserialize<'de> for ByRank {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Ranks;

        impl<'de> Visitor<'de> for Ranks {
            type Value = ByRank;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of loads by global rank")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ByRank, A::Error> {
                let mut ranks = ByRank::default();
                while let Some((rank, body)) = map.next_entry::<String, Value>()? {
                    look_into("ranks", &body, &mut ranks.strays);
                    ranks.entries.push(LoadEntry { dp_rank: rank.parse().ok(), load: own_figures(&body) });
                }
                Ok(ranks)
            }
        }

        from.deserialize_map(Ranks)
    }
}

/// Notes the names in one rank's figures that nobody reads. The figures are no struct: what is unreadable in
/// them costs its entry, never the report.
fn look_into(at: &'static str, body: &Value, strays: &mut Strays) {
    if let Value::Object(fields) = body {
        strays.look_into(at, fields.keys().filter(|name| *name != "dp_rank"), &OWN_NAMES);
    }
}

/// One of `entries`, a list as an engine's own answer has it.
fn entry(body: &Value) -> LoadEntry {
    LoadEntry { dp_rank: body.get("dp_rank").and_then(Value::as_u64), load: own_figures(body) }
}

#[derive(Deserialize)]
pub(super) struct ReportBody {
    worker_id: WireId,
    #[serde(default, deserialize_with = "not_null")]
    model_name: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    routing_group: Option<String>,
    model: Option<String>,
    modelname: Option<String>,
    tenant_id: Option<String>,
    source: Option<String>,
    ranks: Option<ByRank>,
    entries: Option<Vec<Value>>,
    aggregate: Option<Value>,
}

/// Longest name of a source; it is kept with every rank that it speaks for.
const MAX_SOURCE: usize = 64;

/// `POST /loads`: a worker's report. Answers what became of its entries.
pub(super) async fn report<C: Control>(
    State(state): State<ServiceState<C>>,
    visit: Visit,
    _: Params<NoParams>,
    JsonBody(mut body): JsonBody<ReportBody>,
) -> Result<Response, Problem> {
    let ByRank { mut entries, mut strays } = body.ranks.take().unwrap_or_default();
    body.entries.iter().flatten().for_each(|entry| look_into("entries", entry, &mut strays));
    body.aggregate.iter().for_each(|aggregate| look_into("aggregate", aggregate, &mut strays));
    visit.settle(strays)?;
    let id = &body.worker_id.id;
    let fleet = state.view().fleet();
    let names = pool_names!(body)?;
    let fits = |pool: &&std::sync::Arc<PoolView>| {
        names.model().is_none_or(|model| *model == *pool.key.model)
            && names.group().is_none_or(|group| *group == *pool.key.group)
    };
    if fleet.pool_of(id).filter(fits).is_none() {
        let detail = format!("worker {id} is not declared there");
        return Err(Problem::not_found("unknown_worker", detail).field("worker_id"));
    }
    let source = body.source.as_deref().unwrap_or(LoadReport::ENGINE);
    if source.len() > MAX_SOURCE {
        return Err(Problem::wrong_field("source", format!("source is longer than {MAX_SOURCE} bytes")));
    }
    entries.extend(body.entries.iter().flatten().map(entry));
    let aggregate = body.aggregate.as_ref().map(own_figures);
    let report = LoadReport { source: source.into(), entries, aggregate };
    let now = state.control().now();
    let counts = state.view().report_load(now, now, id, &report);
    Ok(Json(json!({
        "status": "ok",
        "accepted": counts.accepted,
        "refused_entries": counts.refused_entries,
        "out_of_range": counts.out_of_range,
        "empty": counts.empty,
        "superseded": counts.superseded,
    }))
    .into_response())
}

#[derive(Deserialize)]
pub(super) struct RejectedBody {
    worker_id: Option<WireId>,
    instance_id: Option<WireId>,
    dp_rank: Option<u32>,
}

/// `POST /dispatch_rejected`: a request that was sent to a rank came back, since the engine is full or does not
/// know the rank. The rank gets nothing more until it reports again.
pub(super) async fn dispatch_rejected<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<RejectedBody>,
) -> Result<Response, Problem> {
    let narrow = Narrow::of(body.worker_id.as_ref(), body.instance_id.as_ref(), body.dp_rank)?;
    let missing = |field: &str| Problem::wrong_field(field, format!("missing field `{field}`"));
    let worker = narrow.worker.ok_or_else(|| missing("worker_id"))?.clone();
    let dp_rank = narrow.dp_rank.ok_or_else(|| missing("dp_rank"))?;
    let rank = RankKey { worker, dp_rank };
    if !state.view().loads().lock().reject(state.control().now(), &rank) {
        let detail = format!("rank {rank} is not declared");
        return Err(Problem::not_found("no_such_rank", detail).field("dp_rank"));
    }
    tracing::warn!(worker = %rank.worker, dp_rank = rank.dp_rank.0, "{rank} turned a request away");
    Ok(Json(json!({ "status": "ok" })).into_response())
}

// === what is known ===

#[derive(Serialize)]
struct PoolLoadsOut<'a> {
    model_name: &'a str,
    routing_group: &'a str,
    loads: Vec<RankLoadOut<'a>>,
    pending_count: u64,
    pending_isl_tokens: u64,
}

/// One rank's load; `null` is unknown, and 0 is 0.
#[derive(Serialize)]
struct RankLoadOut<'a> {
    worker_id: IdOut<'a>,
    dp_rank: u32,
    potential_prefill_tokens: Option<u64>,
    potential_decode_blocks: Option<u64>,
    active_requests: Option<u64>,
    state: &'static str,
    /// What the active blocks follow from, or why they are not known.
    basis: &'static str,
    decode_blocks: Option<f64>,
    kv_used_blocks: Option<f64>,
    capacity_blocks: Option<u64>,
    request_limit: Option<u64>,
    asleep: bool,
    num_running_reqs: Option<u64>,
    num_waiting_reqs: Option<u64>,
    num_used_tokens: Option<u64>,
    max_total_num_tokens: Option<u64>,
    token_usage: Option<f64>,
    age_ms: Option<u64>,
    reserved: ReservedOut,
}

/// What is reserved on the rank; it is in the figures above as far as no report contains it.
#[derive(Serialize)]
struct ReservedOut {
    requests: u64,
    prefill_tokens: u64,
    decode_blocks: f64,
}

impl From<Booked> for ReservedOut {
    fn from(booked: Booked) -> Self {
        Self {
            requests: booked.requests,
            prefill_tokens: booked.prefill_tokens,
            decode_blocks: booked.decode_blocks,
        }
    }
}

/// `GET /loads`.
pub(super) async fn list<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(filter): Params<WorkerFilter>,
) -> Result<Response, Problem> {
    let filter = filter.read()?;
    let fleet = state.view().fleet();
    let now = state.control().now();
    let mut loads = state.view().loads().lock();
    loads.ledger_mut().expire(now);
    let pools = fleet.pools().filter(|pool| filter.admits(&pool.key)).map(|pool| {
        let out = |(worker, rank)| rank_load(&state, pool, worker, rank, &loads, now);
        PoolLoadsOut {
            model_name: &pool.key.model,
            routing_group: &pool.key.group,
            loads: pool.ranks().filter(|(worker, rank)| filter.admits_rank(worker, rank)).map(out).collect(),
            // Nothing waits here: a request is placed or refused at once.
            pending_count: 0,
            pending_isl_tokens: 0,
        }
    });
    let pools: Vec<_> = pools.collect();
    // Reports need not wait for the answer to be written.
    drop(loads);
    Ok(Json(pools).into_response())
}

fn rank_load<'a, C: Control>(
    state: &ServiceState<C>,
    pool: &PoolView,
    worker: &'a WorkerView,
    rank: &RankView,
    loads: &LoadTable,
    now: Moment,
) -> RankLoadOut<'a> {
    let key = &rank.plan.rank;
    let view = state.router().load(now, loads, pool, key);
    let newest = loads.newest(now, key).map(|(load, _)| *load).unwrap_or_default();
    let (known, basis, running) = match &view {
        RankLoadView::Known { basis, running, .. } => ("known", basis.name(), *running),
        RankLoadView::Unknown(why) => ("unknown", why.name(), None),
    };
    // Old figures are shown by their age and no more.
    let newest = if known == "known" { newest } else { Default::default() };
    RankLoadOut {
        worker_id: IdOut(&worker.spec.worker, worker.spec.id_form),
        dp_rank: key.dp_rank.0,
        potential_prefill_tokens: view.active_prefill_tokens(),
        // At most 2^53, and never negative.
        potential_decode_blocks: view.decode_blocks().map(|blocks| blocks.ceil() as u64),
        active_requests: running,
        state: known,
        basis,
        decode_blocks: view.decode_blocks(),
        kv_used_blocks: view.used_blocks(),
        capacity_blocks: pool.capacity_of(worker, rank, loads).blocks(),
        request_limit: rank.request_limit.or_else(|| loads.reported_request_limit(key)),
        asleep: loads.is_asleep(now, key),
        num_running_reqs: newest.num_running_reqs,
        num_waiting_reqs: newest.num_waiting_reqs,
        num_used_tokens: newest.num_used_tokens,
        max_total_num_tokens: newest.max_total_num_tokens,
        token_usage: newest.token_usage,
        age_ms: view.age().map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        reserved: loads.ledger().all(key).into(),
    }
}

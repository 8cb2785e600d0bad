//! `/register`, `/unregister`, `/workers`: who is there.

use std::borrow::Cow;
use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Control;
use super::boundary::{IdOut, JsonBody, PoolNames, WireId, not_null, pool_names};
use super::declaration::WorkerFields;
use super::problem::Problem;
use super::query::age_ms;
use super::records::{PostedOut, Record};
use super::spec::Readiness;
use super::state::{ServiceState, short};
use super::url::{NoParams, Params, PathId};
use crate::fleet::{EventsFrom, IdForm, PoolKey, WorkerSpec};
use crate::ids::{DpRank, Moment, RankKey, WorkerId};
use crate::indexer::{FleetView, RankView, WorkerView};
use crate::trust::Trust;

// === the indexer's way: rank by rank ===

/// `POST /register`.
pub(super) async fn register<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<WorkerFields>,
) -> Result<Response, Problem> {
    body.check_sizes()?;
    let spec = body.registration()?;
    let id = spec.worker.clone();
    let _change = state.records().change().await;
    let change = state.control().add_rank(spec).await;
    let change = change.map_err(|error| Problem::control(&error, |field| body.registered_as(field)))?;
    // What was posted for it in pieces is settled now.
    state.records().remove(&id);
    tracing::info!(worker = %change.worker, pool = %change.pool, ranks = change.added.len(), "registered");
    Ok((StatusCode::CREATED, Json(json!({ "status": "ok" }))).into_response())
}

#[derive(Deserialize)]
pub(super) struct UnregisterBody {
    instance_id: WireId,
    dp_rank: Option<u32>,
    #[serde(default, deserialize_with = "not_null")]
    model_name: Option<String>,
    routing_group: Option<String>,
    model: Option<String>,
    modelname: Option<String>,
    tenant_id: Option<String>,
}

/// `POST /unregister`.
pub(super) async fn unregister<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<UnregisterBody>,
) -> Result<Response, Problem> {
    let id = &body.instance_id.id;
    let not_found = |detail: String| Problem::not_found("unknown_worker", detail).field("instance_id");
    let _change = state.records().change().await;
    let fleet = state.view().fleet();
    let Some(spec) = fleet.declared().worker(id) else {
        return Err(not_found(format!("instance {id} not found")));
    };
    let (names, is) = (pool_names!(body)?, &spec.pool);
    let other_model = names.model().is_some_and(|model| *model != *is.model);
    let other_group = names.group().is_some_and(|group| *group != *is.group);
    if other_model || other_group {
        return Err(not_found(format!(
            "instance {id} is registered for model={} routing_group={}",
            is.model, is.group
        )));
    }
    let control = state.control();
    let gone = match body.dp_rank {
        Some(dp_rank) => {
            let rank = RankKey { worker: id.clone(), dp_rank: DpRank(dp_rank) };
            let change =
                control.remove_rank(rank).await.map_err(|error| Problem::control(&error, |of| of))?;
            let missing = || {
                let detail = format!("instance {id} dp_rank {dp_rank} not found");
                Problem::not_found("unknown_rank", detail).field("dp_rank")
            };
            change.ok_or_else(missing)?
        }
        None => {
            let change =
                control.withdraw(id.clone()).await.map_err(|error| Problem::control(&error, |of| of))?;
            change.ok_or_else(|| not_found(format!("instance {id} not found")))?
        }
    };
    // A worker that was posted whole is not that worker any more.
    state.records().remove(id);
    tracing::info!(worker = %gone.worker, pool = %gone.pool, ranks = gone.removed.len(), "unregistered");
    Ok(Json(json!({ "status": "ok" })).into_response())
}

// === the selection service's way: worker by worker ===

/// `POST /workers`.
pub(super) async fn declare<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<WorkerFields>,
) -> Result<Response, Problem> {
    let missing = || Problem::wrong_field("worker_id", "missing field `worker_id`");
    let id = body.id().cloned().ok_or_else(missing)?;
    let _change = state.records().change().await;
    let out = settle(&state, &id, body).await?;
    Ok((StatusCode::CREATED, out).into_response())
}

/// `PATCH /workers/{id}`.
pub(super) async fn patch<C: Control>(
    State(state): State<ServiceState<C>>,
    PathId(id): PathId,
    _: Params<NoParams>,
    JsonBody(patch): JsonBody<WorkerFields>,
) -> Result<Response, Problem> {
    let id = WorkerId::new(id);
    let _change = state.records().change().await;
    let fleet = state.view().fleet();
    let declared = fleet.declared().worker(&id);
    match state.records().get(&id) {
        Some(record) => {
            let id = WireId { id, form: record.form };
            settle(&state, &id, record.body.patched(patch)).await
        }
        None if declared.is_some() => Err(Problem::new(
            StatusCode::CONFLICT,
            "not_posted",
            format!("worker {id} was registered rank by rank or configured: post it whole to /workers first"),
        )),
        None => Err(unknown(&id)),
    }
}

/// `DELETE /workers/{id}`.
pub(super) async fn withdraw<C: Control>(
    State(state): State<ServiceState<C>>,
    PathId(id): PathId,
    _: Params<NoParams>,
) -> Result<Response, Problem> {
    let id = WorkerId::new(id);
    let _change = state.records().change().await;
    let fleet = state.view().fleet();
    let view = fleet.pool_of(&id).and_then(|pool| Some((&pool.key, pool.worker(&id)?)));
    let record = state.records().get(&id);
    if view.is_none() && record.is_none() {
        return Err(unknown(&id));
    }
    state.control().withdraw(id.clone()).await.map_err(|error| Problem::control(&error, |of| of))?;
    state.records().remove(&id);
    tracing::info!(worker = %id, "withdrawn");
    let now = state.control().now();
    let out = match (view, &record) {
        (Some((pool, view)), record) => {
            WorkerOut { lifecycle: "unschedulable", ..WorkerOut::declared(pool, view, record.as_ref(), now) }
        }
        (None, Some(record)) => {
            WorkerOut { lifecycle: "unschedulable", ..WorkerOut::incomplete(&id, record) }
        }
        (None, None) => return Err(unknown(&id)),
    };
    Ok(Json(out).into_response())
}

fn unknown(id: &WorkerId) -> Problem {
    let detail = format!("worker {} not found", short(id.as_str()));
    Problem::not_found("unknown_worker", detail).field("worker_id")
}

/// Brings a record into the fleet, or keeps it until it is complete.
async fn settle<C: Control>(
    state: &ServiceState<C>,
    id: &WireId,
    body: WorkerFields,
) -> Result<Response, Problem> {
    body.check_sizes()?;
    let refused = |error| Problem::control(&error, |field| body.called(field));
    let missing = match body.readiness(id)? {
        Readiness::Complete(spec) => {
            state.control().declare(*spec).await.map_err(refused)?;
            Vec::new()
        }
        Readiness::Incomplete(missing) => missing,
    };
    let record = Record { body: body.clone(), form: id.form, missing };
    state.records().put(id.id.clone(), record.clone())?;
    if !record.missing.is_empty() {
        // An incomplete worker serves nothing, also if it did before.
        state.control().withdraw(id.id.clone()).await.map_err(refused)?;
        tracing::info!(worker = %id.id, missing = ?record.missing, "incomplete");
        return Ok(Json(WorkerOut::incomplete(&id.id, &record)).into_response());
    }
    tracing::info!(worker = %id.id, "declared");
    let fleet = state.view().fleet();
    let view = fleet.pool_of(&id.id).and_then(|pool| Some((pool, pool.worker(&id.id)?)));
    let Some((pool, view)) = view else {
        // Withdrawn between the declaration and this line, from elsewhere.
        return Err(unknown(&id.id));
    };
    let out = WorkerOut::declared(&pool.key, view, Some(&record), state.control().now());
    Ok(Json(out).into_response())
}

// === lists ===

#[derive(Deserialize, Default)]
pub(super) struct WorkerFilter {
    model_name: Option<String>,
    routing_group: Option<String>,
    model: Option<String>,
    modelname: Option<String>,
    tenant_id: Option<String>,
    worker_id: Option<String>,
    instance_id: Option<String>,
    dp_rank: Option<String>,
}

impl WorkerFilter {
    /// The filter as it is meant.
    pub(super) fn read(&self) -> Result<Filter<'_>, Problem> {
        let worker = match (self.worker_id.as_deref(), self.instance_id.as_deref()) {
            (Some(worker), Some(instance)) if worker != instance => {
                let detail = "worker_id and instance_id name two workers; give one of them";
                return Err(Problem::bad_request("names_differ", detail).field("instance_id"));
            }
            (worker, instance) => worker.or(instance),
        };
        let number = |text: &str| {
            text.parse().map(DpRank).map_err(|_| {
                let detail = format!("dp_rank {:?} is no rank; give a whole number", short(text));
                Problem::bad_request("no_such_rank", detail).field("dp_rank")
            })
        };
        let dp_rank = self.dp_rank.as_deref().map(number).transpose()?;
        Ok(Filter { names: pool_names!(self)?, worker, dp_rank })
    }
}

/// Which workers and ranks a list is to show; by default all.
#[derive(Clone, Copy, Default)]
pub(super) struct Filter<'a> {
    names: PoolNames<'a>,
    worker: Option<&'a str>,
    dp_rank: Option<DpRank>,
}

impl Filter<'_> {
    /// Whether the filter lets a pool through.
    pub(super) fn admits(&self, pool: &PoolKey) -> bool {
        self.names.model().is_none_or(|model| *model == *pool.model)
            && self.names.group().is_none_or(|group| *group == *pool.group)
    }

    fn admits_id(&self, id: &WorkerId) -> bool {
        self.worker.is_none_or(|worker| worker == id.as_str())
    }

    /// Whether it lets a worker through: by its id, and with a rank that is let through.
    pub(super) fn admits_worker(&self, worker: &WorkerView) -> bool {
        self.admits_id(&worker.spec.worker)
            && self.dp_rank.is_none_or(|rank| worker.ranks.iter().any(|one| one.plan.rank.dp_rank == rank))
    }

    /// Whether it lets a rank through.
    pub(super) fn admits_rank(&self, worker: &WorkerView, rank: &RankView) -> bool {
        self.admits_id(&worker.spec.worker)
            && self.dp_rank.is_none_or(|wanted| rank.plan.rank.dp_rank == wanted)
    }
}

/// `GET /workers`.
pub(super) async fn list<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(filter): Params<WorkerFilter>,
) -> Result<Response, Problem> {
    let filter = filter.read()?;
    let fleet = state.view().fleet();
    let (incomplete, records) = (state.records().incomplete(), records_of(&state, &fleet));
    Ok(Json(all(&fleet, &incomplete, &records, &filter, state.control().now())).into_response())
}

/// Every worker as `GET /workers` lists it.
pub(super) fn listed<C: Control>(state: &ServiceState<C>, fleet: &FleetView) -> serde_json::Value {
    let (incomplete, records) = (state.records().incomplete(), records_of(state, fleet));
    json!(all(fleet, &incomplete, &records, &Filter::default(), state.control().now()))
}

fn records_of<C: Control>(state: &ServiceState<C>, fleet: &FleetView) -> BTreeMap<WorkerId, Record> {
    let posted = |spec: &WorkerSpec| Some((spec.worker.clone(), state.records().get(&spec.worker)?));
    fleet.declared().workers().filter_map(posted).collect()
}

fn all<'a>(
    fleet: &'a FleetView,
    incomplete: &'a [(WorkerId, Record)],
    records: &'a BTreeMap<WorkerId, Record>,
    filter: &Filter<'_>,
    now: Moment,
) -> Vec<WorkerOut<'a>> {
    let declared = fleet.pools().filter(|pool| filter.admits(&pool.key)).flat_map(|pool| {
        let out = |worker| WorkerOut::declared(&pool.key, worker, records.get(&worker.spec.worker), now);
        pool.workers.iter().filter(|worker| filter.admits_worker(worker)).map(out)
    });
    let incomplete = incomplete.iter().filter(|(id, record)| {
        filter.admits(&record.body.pool()) && filter.admits_id(id) && filter.dp_rank.is_none()
    });
    declared.chain(incomplete.map(|(id, record)| WorkerOut::incomplete(id, record))).collect()
}

/// A worker with the fields of both APIs.
#[derive(Serialize)]
struct WorkerOut<'a> {
    worker_id: IdOut<'a>,
    instance_id: IdOut<'a>,
    model_name: String,
    routing_group: String,
    block_size: Option<u32>,
    source: &'static str,
    status: &'static str,
    lifecycle: &'static str,
    endpoints: BTreeMap<u32, &'a str>,
    listeners: BTreeMap<u32, ListenerOut<'a>>,
    #[serde(flatten)]
    posted: PostedOut<'a>,
    role: Option<&'static str>,
    balance: Option<&'static str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    not_schedulable_reasons: &'a [String],
}

#[derive(Serialize)]
struct ListenerOut<'a> {
    endpoint: Option<&'a str>,
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<Cow<'static, str>>,
    replay_endpoint: Option<&'a str>,
    local_rank: Option<u32>,
    trust: &'static str,
    may_err: &'static [&'static str],
    reasons: Vec<&'static str>,
    age_ms: Option<u64>,
}

impl<'a> WorkerOut<'a> {
    fn declared(pool: &PoolKey, view: &'a WorkerView, record: Option<&'a Record>, now: Moment) -> Self {
        let spec = &view.spec;
        let id = IdOut(&spec.worker, spec.id_form);
        let endpoints = view
            .ranks
            .iter()
            .filter_map(|rank| Some((rank.plan.rank.dp_rank.0, rank.plan.events.as_ref()?.address())));
        let listeners: BTreeMap<_, _> =
            view.ranks.iter().map(|rank| (rank.plan.rank.dp_rank.0, listener(rank, now))).collect();
        Self {
            worker_id: id,
            instance_id: id,
            model_name: pool.model.to_string(),
            routing_group: pool.group.to_string(),
            block_size: Some(spec.block_size.get()),
            source: match spec.events {
                EventsFrom::Zmq { .. } => "zmq",
                EventsFrom::Fed => "fed",
                EventsFrom::None => "none",
            },
            status: status_of(listeners.values().map(|listener| listener.status)),
            lifecycle: "schedulable",
            endpoints: endpoints.collect(),
            listeners,
            posted: match record {
                Some(record) => PostedOut::of(&record.body),
                None => PostedOut::of_spec(spec),
            },
            role: Some(spec.role.name()),
            balance: Some(spec.balance.name()),
            not_schedulable_reasons: &[],
        }
    }

    fn incomplete(id: &'a WorkerId, record: &'a Record) -> Self {
        let pool = record.body.pool();
        let id: IdOut<'a> = IdOut(id, record.form);
        Self {
            worker_id: id,
            instance_id: id,
            model_name: pool.model.to_string(),
            routing_group: pool.group.to_string(),
            block_size: record.body.block_size,
            source: "zmq",
            status: "pending",
            lifecycle: "incomplete",
            endpoints: BTreeMap::new(),
            listeners: BTreeMap::new(),
            posted: PostedOut::of(&record.body),
            role: None,
            balance: None,
            not_schedulable_reasons: &record.missing,
        }
    }
}

fn listener(rank: &RankView, now: Moment) -> ListenerOut<'_> {
    let trust = rank.status.trust();
    let connected = rank.status.report().connected;
    let told = rank.status.last_error().map(|why| Cow::Owned(why.as_ref().clone()));
    let (status, last_error) = match trust {
        Trust::Silent => ("failed", Some(told.unwrap_or(Cow::Borrowed("nobody answers at the endpoint")))),
        _ if connected || !rank.plan.publishes => ("active", None),
        _ => ("pending", told),
    };
    ListenerOut {
        endpoint: rank.plan.events.as_ref().map(|at| at.address()),
        status,
        last_error,
        replay_endpoint: rank.plan.replay.as_ref().map(|at| at.address()),
        local_rank: rank.plan.local.map(|local| local.0),
        trust: trust.name(),
        may_err: trust.may_err(),
        reasons: rank.status.reasons().names().collect(),
        age_ms: age_ms(now, rank),
    }
}

/// A worker is as well as the least of its ranks.
fn status_of(ranks: impl Iterator<Item = &'static str>) -> &'static str {
    let weight = |status: &&str| match *status {
        "failed" => 2,
        "pending" => 1,
        _ => 0,
    };
    ranks.max_by_key(weight).unwrap_or("pending")
}

/// How a worker's id is written in answers that name it.
pub(super) fn form_of(fleet: &FleetView, id: &WorkerId) -> IdForm {
    fleet.declared().worker(id).map(|spec| spec.id_form).unwrap_or_default()
}

//! `/capacity` and the drain question: how much each rank holds, in which unit, and how well that is known.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

use super::Control;
use super::boundary::IdOut;
use super::problem::Problem;
use super::state::ServiceState;
use super::url::{NoParams, Params, PathId};
use super::workers::WorkerFilter;
use crate::fleet::Capacity;
use crate::ids::{Moment, WorkerId};
use crate::indexer::{PoolView, RankView, WorkerView};
use crate::load::LoadTable;
use crate::routing::{Drain, Room};
use crate::trust::Trust;

/// A capacity with its unit and where it comes from; `null` blocks are unknown, neither 0 nor without limit.
#[derive(Serialize)]
struct CapacityOut {
    blocks: Option<u64>,
    tokens: Option<u64>,
    provenance: Option<&'static str>,
}

impl CapacityOut {
    fn of(capacity: Capacity, block_size: u32) -> Self {
        match capacity {
            Capacity::Known { blocks, provenance } => Self {
                blocks: Some(blocks),
                tokens: Some(blocks.saturating_mul(u64::from(block_size))),
                provenance: Some(provenance.name()),
            },
            Capacity::Unknown => Self { blocks: None, tokens: None, provenance: None },
        }
    }
}

#[derive(Serialize)]
struct WorkerCapacityOut<'a> {
    worker_id: IdOut<'a>,
    model_name: &'a str,
    routing_group: &'a str,
    block_size: u32,
    ranks: BTreeMap<u32, CapacityOut>,
    /// Common to the ranks, never copied to each.
    worker_shared: CapacityOut,
    /// What one number for all of them has to be where they differ.
    smallest: CapacityOut,
    /// As declared: a rank that runs as many is no candidate.
    request_limit: BTreeMap<u32, Option<u64>>,
    /// By the engines' own word, whatever was declared.
    reported: BTreeMap<u32, ReportedOut>,
}

/// What an engine says of one rank; `null` is that it never said so.
#[derive(Serialize)]
struct ReportedOut {
    blocks: Option<u64>,
    divided: bool,
    request_limit: Option<u64>,
}

/// The one number that stands for all ranks: the smallest; unknown if any is.
fn smallest(ranks: impl Iterator<Item = Capacity>) -> Capacity {
    let mut least = Capacity::Unknown;
    for capacity in ranks {
        match (capacity.blocks(), least.blocks()) {
            (None, _) => return Capacity::Unknown,
            (Some(blocks), Some(known)) if blocks >= known => {}
            _ => least = capacity,
        }
    }
    least
}

/// `GET /capacity`: every worker's, per rank.
pub(super) async fn list<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(filter): Params<WorkerFilter>,
) -> Result<Response, Problem> {
    let filter = filter.read()?;
    let fleet = state.view().fleet();
    let declared = fleet.declared();
    let loads = state.view().loads().lock();
    let worker_out = |pool: &'_ PoolView, worker: &'_ WorkerView| -> serde_json::Value {
        let block_size = pool.block_size.get();
        let id = &worker.spec.worker;
        let out = WorkerCapacityOut {
            worker_id: IdOut(id, worker.spec.id_form),
            model_name: &pool.key.model,
            routing_group: &pool.key.group,
            block_size,
            ranks: worker
                .ranks
                .iter()
                .map(|rank| {
                    let capacity = pool.capacity_of(worker, rank, &loads);
                    (rank.plan.rank.dp_rank.0, CapacityOut::of(capacity, block_size))
                })
                .collect(),
            worker_shared: CapacityOut::of(worker.shared_capacity, block_size),
            smallest: CapacityOut::of(
                smallest(worker.ranks.iter().map(|rank| pool.capacity_of(worker, rank, &loads))),
                block_size,
            ),
            request_limit: worker
                .ranks
                .iter()
                .map(|rank| (rank.plan.rank.dp_rank.0, declared.request_limit(&rank.plan.rank)))
                .collect(),
            reported: worker.ranks.iter().map(|rank| reported(pool, rank, &loads)).collect(),
        };
        json!(out)
    };
    let workers: Vec<_> = fleet
        .pools()
        .filter(|pool| filter.admits(&pool.key))
        .flat_map(|pool| {
            let workers = pool.workers.iter().filter(|worker| filter.admits_worker(worker));
            let worker_out = &worker_out;
            workers.map(move |worker| worker_out(pool, worker))
        })
        .collect();
    Ok(Json(workers).into_response())
}

/// `GET /workers/{id}/drain-check`: would what this worker holds fit elsewhere in its pool?
pub(super) async fn drain_check<C: Control>(
    State(state): State<ServiceState<C>>,
    PathId(id): PathId,
    _: Params<NoParams>,
) -> Result<Response, Problem> {
    let fleet = state.view().fleet();
    let id = WorkerId::new(&id);
    let Some(pool) = fleet.pool_of(&id) else {
        return Err(Problem::not_found("unknown_worker", format!("worker {id} is not declared")));
    };
    let now = state.control().now();
    let (mut own, mut others) = (Vec::new(), Vec::new());
    {
        let loads = state.view().loads().lock();
        for (worker, rank) in pool.ranks() {
            let room = room(pool, worker, rank, &loads, now);
            if worker.spec.worker == id { own.push(room) } else { others.push(room) }
        }
    }
    let drain = Drain::of(&own, &others);
    let body = match &drain {
        Drain::Yes { needed, free } | Drain::No { needed, free } => {
            json!({ "drain": drain.name(), "needed_blocks": needed, "free_blocks": free })
        }
        Drain::NoPlaces { needed, free } => {
            json!({ "drain": drain.name(), "needed_requests": needed, "free_requests": free })
        }
        Drain::Last => {
            json!({ "drain": drain.name(), "because": ["no other worker of its pool can serve what it serves"] })
        }
        Drain::CannotTell { because } => {
            let because: Vec<String> = because.iter().map(ToString::to_string).collect();
            json!({ "drain": drain.name(), "because": because })
        }
    };
    Ok(Json(body).into_response())
}

fn reported(pool: &PoolView, rank: &RankView, loads: &LoadTable) -> (u32, ReportedOut) {
    let key = &rank.plan.rank;
    let capacity = loads.reported_capacity(key, pool.block_size);
    let out = ReportedOut {
        blocks: capacity.map(|capacity| capacity.blocks),
        divided: capacity.is_some_and(|capacity| capacity.divided),
        request_limit: loads.reported_request_limit(key),
    };
    (key.dp_rank.0, out)
}

fn room(pool: &PoolView, worker: &WorkerView, rank: &RankView, loads: &LoadTable, now: Moment) -> Room {
    let key = &rank.plan.rank;
    let capacity = pool.capacity_of(worker, rank, loads);
    let load = loads.load(now, key, pool.block_size, capacity.exact());
    Room {
        rank: key.clone(),
        capacity,
        used: load.used_blocks(),
        requests: load.requests(),
        request_limit: rank.request_limit.or_else(|| loads.reported_request_limit(key)),
        role: worker.spec.role,
        serves: rank.status.trust() != Trust::Silent && !loads.is_asleep(now, key),
    }
}

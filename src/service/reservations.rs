//! Reservations over HTTP: book what was selected, or a rank of the caller's own choice, and keep it true.
//!
//! The shapes and statuses are Dynamo's, except that a booking must name its rank: a missing one is never
//! rank 0. As there, an explicit booking without `effective_prefill_tokens` counts no prefill tokens.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Control;
use super::boundary::JsonBody;
use super::problem::Problem;
use super::select::id_value;
use super::selection::SelectBody;
use super::state::{ServiceState, Unnamed, check_block_size, meant, short};
use super::url::{NoParams, Params, PathId};
use crate::fleet::PoolKey;
use crate::ids::{DpRank, Moment, RankKey, WorkerId};
use crate::load::{Claim, ReservationId, ReserveError};
use crate::routing::SelectRequest;

/// Longest id of a reservation; a UUID has 36 bytes.
const MAX_ID: usize = 256;

/// The id of a selection, if the body gives one.
pub(super) fn id_of(body: &SelectBody) -> Result<Option<ReservationId>, Problem> {
    match body.selection_id.as_deref() {
        Some("") => {
            let detail = "selection_id must not be empty: leave it out to have one made";
            Err(Problem::wrong_field("selection_id", detail))
        }
        Some(id) if id.len() > MAX_ID => {
            let detail = format!("selection_id is longer than {MAX_ID} bytes; a UUID has 36");
            Err(Problem::wrong_field("selection_id", detail))
        }
        id => Ok(id.map(ReservationId::new)),
    }
}

/// A selection that may be booked by its id alone.
#[derive(Clone, Debug)]
pub(super) struct Selected {
    pub(super) pool: PoolKey,
    pub(super) rank: RankKey,
    pub(super) claim: Claim,
}

/// Selections that were answered under an id and not booked yet. The oldest are forgotten first.
#[derive(Debug, Default)]
pub(super) struct Pending {
    by_id: HashMap<ReservationId, (u64, Moment, Selected)>,
    order: BTreeMap<u64, ReservationId>,
    next: u64,
    blocks: usize,
}

/// How long a selection can be booked: the caller sends the request now or not at all.
const PENDING_FOR: Duration = Duration::from_secs(60);

/// Selections that are remembered: a thousand a second for four seconds, the time that a slow caller takes.
const MAX_PENDING: usize = 4_096;

/// Their blocks: 4,096 prompts of 256 blocks each, in 8 MiB.
const MAX_PENDING_BLOCKS: usize = 1 << 20;

impl Pending {
    pub(super) fn remember(&mut self, now: Moment, id: &ReservationId, selected: Selected) {
        self.take(id);
        self.blocks += selected.claim.named().len();
        self.order.insert(self.next, id.clone());
        self.by_id.insert(id.clone(), (self.next, now + PENDING_FOR, selected));
        self.next += 1;
        while let Some(oldest) = self.order.values().next()
            && (self.by_id.len() > MAX_PENDING
                || self.blocks > MAX_PENDING_BLOCKS
                || self.by_id.get(oldest).is_none_or(|(_, until, _)| *until <= now))
        {
            let oldest = oldest.clone();
            if self.take(&oldest).is_none() {
                break;
            }
        }
    }

    fn take(&mut self, id: &ReservationId) -> Option<(Moment, Selected)> {
        let (nth, until, selected) = self.by_id.remove(id)?;
        self.order.remove(&nth);
        self.blocks -= selected.claim.named().len();
        Some((until, selected))
    }

    /// A selection that can still be booked, with its number.
    fn fresh(&self, now: Moment, id: &ReservationId) -> Option<(u64, Selected)> {
        let (nth, until, selected) = self.by_id.get(id)?;
        (now < *until).then(|| (*nth, selected.clone()))
    }

    /// That very selection is booked; a newer one under the same id stays.
    fn booked(&mut self, id: &ReservationId, nth: u64) {
        if self.by_id.get(id).is_some_and(|(is, ..)| *is == nth) {
            self.take(id);
        }
    }
}

#[derive(Serialize)]
struct BookedOut<'a> {
    selection_id: &'a str,
    model_name: &'a str,
    routing_group: &'a str,
    worker_id: serde_json::Value,
    dp_rank: u32,
    endpoint: Option<String>,
}

/// `POST /reservations`: with an id alone, what `/select` answered under it; with a worker, that rank.
pub(super) async fn reserve<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let Some(id) = id_of(&body)? else {
        return Err(Problem::wrong_field("selection_id", "missing field `selection_id`"));
    };
    let now = state.control().now();
    let narrow = body.narrow()?;
    let (pending, selected) = match narrow.worker {
        None => selected(&state, now, &body, &id).map(|(nth, selected)| (Some(nth), selected))?,
        Some(worker) => (None, explicit(&state, &body, worker)?),
    };
    {
        let mut loads = state.view().loads().lock();
        loads.ledger_mut().expire(now);
        loads.ledger_mut().reserve(now, &id, &selected.rank, selected.claim)?;
    }
    // Only now: a booking that fails leaves the selection as it was.
    if let Some(nth) = pending {
        state.pending().lock().booked(&id, nth);
    }
    tracing::info!(pool = %selected.pool, selection_id = %id, rank = %selected.rank, "reserved");
    let fleet = state.view().fleet();
    let spec = fleet.declared().worker(&selected.rank.worker);
    let out = BookedOut {
        selection_id: id.as_str(),
        model_name: &selected.pool.model,
        routing_group: &selected.pool.group,
        worker_id: id_value(&fleet, &selected.rank.worker),
        dp_rank: selected.rank.dp_rank.0,
        endpoint: spec.and_then(|spec| spec.http_endpoint.clone()),
    };
    Ok((StatusCode::CREATED, Json(out)).into_response())
}

fn selected<C: Control>(
    state: &ServiceState<C>,
    now: Moment,
    body: &SelectBody,
    id: &ReservationId,
) -> Result<(u64, Selected), Problem> {
    let names = body.names()?;
    let Some((nth, selected)) = state.pending().lock().fresh(now, id) else {
        let id = short(id.as_str());
        let detail = format!("no pending selection {id}: it has expired, was used already, or never made");
        return Err(Problem::not_found("unknown_selection", detail).field("selection_id"));
    };
    let fleet = state.view().fleet();
    // The model may have been an adapter's name, or a pattern's.
    let asked = names.model().map(|_| meant(&fleet, names, Unnamed::Unavailable)).transpose()?;
    let other_model = asked.is_some_and(|meant| meant.pool.key != selected.pool);
    let other_rank = body.dp_rank.is_some_and(|rank| rank != selected.rank.dp_rank.0);
    if other_model || names.group().is_some_and(|group| *group != *selected.pool.group) || other_rank {
        let id = short(id.as_str());
        let detail = format!("the pending selection {id} is of {} on {}", selected.rank, selected.pool);
        return Err(Problem::not_found("unknown_selection", detail).field("selection_id"));
    }
    Ok((nth, selected))
}

fn explicit<C: Control>(
    state: &ServiceState<C>,
    body: &SelectBody,
    worker: &WorkerId,
) -> Result<Selected, Problem> {
    let fleet = state.view().fleet();
    let meant = meant(&fleet, body.names()?, Unnamed::Unavailable)?;
    let pool = meant.pool;
    check_block_size(body.block_size, pool.block_size)?;
    let parts = body.parts_to_book(meant.adapter)?;
    let Some(declared) = pool.worker(worker) else {
        let detail = format!("worker {} is not declared in this pool", short(worker.as_str()));
        return Err(Problem::not_found("unknown_worker", detail).field("worker_id"));
    };
    let Some(dp_rank) = body.dp_rank else {
        let detail = "a reservation names its rank: dp_rank is required beside worker_id";
        return Err(Problem::bad_request("no_rank", detail).field("dp_rank"));
    };
    let rank = RankKey { worker: worker.clone(), dp_rank: DpRank(dp_rank) };
    if !declared.ranks.iter().any(|one| one.plan.rank == rank) {
        let detail = format!("rank {rank} does not exist");
        return Err(Problem::not_found("no_such_rank", detail).field("dp_rank"));
    }
    let prompt = body.prompt(&parts);
    let isl_tokens = prompt.isl_tokens();
    let effective = body.effective_prefill_tokens.unwrap_or(0);
    if effective > isl_tokens {
        let detail =
            format!("effective_prefill_tokens ({effective}) must not exceed isl_tokens ({isl_tokens})");
        return Err(Problem::bad_request("too_many_tokens", detail).field("effective_prefill_tokens"));
    }
    let counted = if body.track_prefill_tokens == Some(false) { 0 } else { effective };
    let claim = state.with_scratch(|scratch| {
        state.router().overlap(pool, &prompt, body.hybrid(), scratch);
        let request = SelectRequest { policy: Some(&parts.policy), ..SelectRequest::new(prompt) };
        state.router().claim(pool, &request, counted, scratch)
    })?;
    Ok(Selected { pool: pool.key.clone(), rank, claim })
}

/// `POST /reservations/{id}/prefill_complete`; may be repeated.
pub(super) async fn prefill_complete<C: Control>(
    State(state): State<ServiceState<C>>,
    PathId(id): PathId,
    _: Params<NoParams>,
) -> Result<Response, Problem> {
    let now = state.control().now();
    answer(&id, with_ledger(&state, |ledger| ledger.prefill_complete(now, &ReservationId::new(&id))))
}

#[derive(Deserialize)]
pub(super) struct OutputBody {
    decay_fraction: Option<f64>,
}

/// `POST /reservations/{id}/output_block`.
pub(super) async fn output_block<C: Control>(
    State(state): State<ServiceState<C>>,
    PathId(id): PathId,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<OutputBody>,
) -> Result<Response, Problem> {
    if body.decay_fraction.is_some_and(|decay| !(0.0..=1.0).contains(&decay)) {
        let detail = "decay_fraction must be from 0 to 1";
        return Err(Problem::bad_request("decay_fraction", detail).field("decay_fraction"));
    }
    let now = state.control().now();
    let id_inside = ReservationId::new(&id);
    answer(&id, with_ledger(&state, |ledger| ledger.output_block(now, &id_inside, body.decay_fraction)))
}

/// `DELETE /reservations/{id}`.
pub(super) async fn free<C: Control>(
    State(state): State<ServiceState<C>>,
    PathId(id): PathId,
    _: Params<NoParams>,
) -> Result<Response, Problem> {
    answer(&id, with_ledger(&state, |ledger| ledger.free(&ReservationId::new(&id))))
}

fn with_ledger<C: Control>(
    state: &ServiceState<C>,
    work: impl FnOnce(&mut crate::load::Ledger) -> bool,
) -> bool {
    let mut loads = state.view().loads().lock();
    loads.ledger_mut().expire(state.control().now());
    work(loads.ledger_mut())
}

fn answer(id: &str, found: bool) -> Result<Response, Problem> {
    if found {
        return Ok(Json(json!({ "status": "ok" })).into_response());
    }
    Err(Problem::not_found("unknown_reservation", format!("reservation {} not found", short(id))))
}

impl From<ReserveError> for Problem {
    fn from(error: ReserveError) -> Self {
        let detail = error.to_string();
        match error {
            ReserveError::IdInUse { .. } => {
                Self::new(StatusCode::CONFLICT, "id_in_use", detail).field("selection_id")
            }
            ReserveError::NotDeclared { .. } => Self::not_found("unknown_worker", detail).field("dp_rank"),
            ReserveError::Full { .. } => Self::new(StatusCode::SERVICE_UNAVAILABLE, "ledger_full", detail),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::block::SequenceHash;
    use crate::load::ClaimedBlocks;

    fn selected(blocks: usize) -> Selected {
        let named = ClaimedBlocks::Named(vec![SequenceHash(1); blocks].into());
        Selected { pool: PoolKey::new("m", None), rank: RankKey::new("w", 0), claim: Claim::new(0, 0, named) }
    }

    fn at(millis: u64) -> Moment {
        Moment::from_millis(millis)
    }

    /// A selection is booked once, within its time; the newest under an id counts.
    #[test]
    fn a_selection_waits_a_while() {
        let mut pending = Pending::default();
        pending.remember(at(0), &"a".into(), selected(3));
        pending.remember(at(1), &"a".into(), selected(2));
        assert_eq!(pending.blocks, 2);
        let (nth, found) = pending.fresh(at(60_000), &"a".into()).unwrap();
        assert_eq!(found.claim.named().len(), 2);
        assert!(pending.fresh(at(60_000), &"a".into()).is_some(), "asking changes nothing");
        pending.booked(&"a".into(), nth + 1);
        assert!(pending.fresh(at(60_000), &"a".into()).is_some(), "another one was booked");
        pending.booked(&"a".into(), nth);
        assert!(pending.fresh(at(60_000), &"a".into()).is_none());
        pending.remember(at(0), &"b".into(), selected(1));
        assert!(pending.fresh(at(60_000), &"b".into()).is_none());
        pending.take(&"b".into());
        assert!(pending.by_id.is_empty() && pending.order.is_empty() && pending.blocks == 0);
    }

    /// The oldest go first, by number, by blocks and by age.
    #[test]
    fn what_is_remembered_is_bounded() {
        let mut pending = Pending::default();
        for n in 0..MAX_PENDING + 10 {
            pending.remember(at(0), &ReservationId::new(n.to_string()), selected(1));
        }
        assert_eq!(
            (pending.by_id.len(), pending.order.len(), pending.blocks),
            (MAX_PENDING, MAX_PENDING, MAX_PENDING)
        );
        assert!(pending.fresh(at(0), &"9".into()).is_none());
        assert!(pending.fresh(at(0), &"10".into()).is_some());
        pending.remember(at(0), &"big".into(), selected(MAX_PENDING_BLOCKS));
        assert_eq!(pending.by_id.len(), 1);
        pending.remember(at(60_000), &"late".into(), selected(1));
        assert_eq!(pending.by_id.len(), 1);
    }
}

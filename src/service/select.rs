//! `/select` and `/select_and_reserve`: which rank should serve a prompt, and why.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::Control;
use super::boundary::{HashForm, HashOut, JsonBody};
use super::problem::Problem;
use super::query::{HashParam, InstanceOut, Reach, TierBody, hashes_out};
use super::reservations::{Selected, id_of};
use super::selection::{Parts, SelectBody};
use super::state::{LogDecisions, ServiceState, Unnamed, check_block_size, meant};
use super::url::Params;
use super::workers::form_of;
use crate::fleet::IdForm;
use crate::ids::{RankKey, WorkerId};
use crate::indexer::{FleetView, PoolView};
use crate::load::ReservationId;
use crate::routing::{
    CandidateLoad, Constraints, Decision, Dispatch, LeftOut, Pick, Pin, RouterScratch, Scored, SelectError,
    SelectRequest,
};

/// `POST /select`.
pub(super) async fn select<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(param): Params<HashParam>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let form = HashForm::asked(param.hashes.as_deref(), &headers)?;
    answer(&state, &body, form, Then::Answer)
}

/// `POST /select_and_reserve`: the same, and booked in the same step.
pub(super) async fn select_and_reserve<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(param): Params<HashParam>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let form = HashForm::asked(param.hashes.as_deref(), &headers)?;
    answer(&state, &body, form, Then::Reserve)
}

/// What follows the choice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Answer,
    Reserve,
}

fn answer<C: Control>(
    state: &ServiceState<C>,
    body: &SelectBody,
    form: Option<HashForm>,
    then: Then,
) -> Result<Response, Problem> {
    let started = Instant::now();
    let id = id_of(body)?;
    let fleet = state.view().fleet();
    let meant = meant(&fleet, body.names()?, Unnamed::Unavailable)?;
    let pool = meant.pool;
    let parts = body.parts(meant.adapter)?;
    check_block_size(body.block_size, pool.block_size)?;
    let choice = Choice { state, fleet: &fleet, pool, body, parts: &parts, id: id.as_ref(), then };
    let result = state.with_scratch(|scratch| {
        let out = choice.decide(scratch)?;
        Ok::<_, SelectError>(out.finish(pool, form, scratch))
    });
    state.metrics().decision_took(started.elapsed());
    result.map_err(|error| {
        if state.config().log_decisions != LogDecisions::Off {
            tracing::info!(pool = %pool.key, selection_id = body.selection_id, %error, "refused");
        }
        error.into()
    })
}

/// One selection.
struct Choice<'a, C> {
    state: &'a ServiceState<C>,
    fleet: &'a FleetView,
    pool: &'a PoolView,
    body: &'a SelectBody,
    parts: &'a Parts<'a>,
    id: Option<&'a ReservationId>,
    then: Then,
}

impl<C: Control> Choice<'_, C> {
    fn decide(&self, scratch: &mut RouterScratch) -> Result<SelectOut, SelectError> {
        // A wish, not an order: where it cannot be met, the others are looked at.
        if let Some(affinity) = self.parts.affinity.as_ref().filter(|_| self.parts.pin.is_none())
            && let Ok(out) = self.decide_for(Some(affinity), true, scratch)
        {
            return Ok(out);
        }
        self.decide_for(self.parts.pin.as_ref(), false, scratch)
    }

    fn decide_for(
        &self,
        pin: Option<&Pin>,
        affine: bool,
        scratch: &mut RouterScratch,
    ) -> Result<SelectOut, SelectError> {
        let Self { state, pool, body, parts, .. } = *self;
        let now = state.control().now();
        let constraints = Constraints {
            role: body.role(),
            allowed: parts.allowed.as_ref(),
            pin,
            force_pin: parts.force_pin && !affine,
            left_out: parts.left_out.as_ref(),
            required_taints: &parts.required,
        };
        let request = SelectRequest {
            constraints,
            policy: Some(&parts.policy),
            hybrid: body.hybrid(),
            ..SelectRequest::new(body.prompt(parts))
        };
        let out = |decision: &Decision<'_>| SelectOut::of(state, self.fleet, pool, body, decision, affine);
        match self.then {
            Then::Reserve => {
                let reserved = state.router().select_and_reserve(now, pool, &request, self.id, scratch)?;
                let mut out = out(&reserved.decision);
                out.selection_id = Some(reserved.id.to_string());
                let tracked = parts.policy.track_prefill_tokens;
                let default = state.router().config().policy.track_prefill_tokens;
                out.track_prefill_tokens = Some(tracked.unwrap_or(default));
                Ok(out)
            }
            Then::Answer => {
                let out = out(&state.router().select(now, pool, &request, scratch)?);
                if let Some(id) = self.id {
                    let claim =
                        state.router().claim(pool, &request, out.effective_prefill_tokens, scratch)?;
                    let (pool, rank) = (pool.key.clone(), out.rank.clone());
                    state.pending().lock().remember(now, id, Selected { pool, rank, claim });
                }
                Ok(out)
            }
        }
    }
}

/// Answer of `/select`: Dynamo's fields, then ours.
#[derive(Serialize)]
struct SelectOut {
    #[serde(skip_serializing_if = "Option::is_none")]
    selection_id: Option<String>,
    model_name: String,
    routing_group: String,
    worker_id: serde_json::Value,
    dp_rank: Option<u32>,
    endpoint: Option<String>,
    block_size: u32,
    overlap: InstanceOut,
    effective_prefill_tokens: u64,
    potential_decode_blocks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_load: Option<WorkerLoadOut>,
    isl_tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    track_prefill_tokens: Option<bool>,
    local_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_no_rank: Option<&'static str>,
    dispatch: Option<DispatchOut>,
    reason: &'static str,
    logit: Option<f64>,
    formula: String,
    temperature: f64,
    trust: &'static str,
    may_err: &'static [&'static str],
    reasons: Vec<&'static str>,
    age_ms: Option<u64>,
    /// Nothing is heard of any rank that could serve the request.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    all_silent: bool,
    /// The pick, then as many others as were asked for, the best first.
    candidates: Vec<CandidateOut>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top: Option<Vec<TopOut>>,
    excluded: Vec<ExcludedOut>,
    /// All that were left out, by reason.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    excluded_counts: BTreeMap<&'static str, u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_hashes: Option<Vec<HashOut>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<HashOut>>,
    /// The rank that a booking stands on.
    #[serde(skip)]
    rank: RankKey,
}

#[derive(Serialize)]
struct WorkerLoadOut {
    active_prefill_tokens: Option<u64>,
    prefill_token_capacity: Option<u64>,
    total_kv_blocks: Option<u64>,
}

/// What to send so that the engine runs the request on the picked rank; the local rank is the number.
#[derive(Serialize)]
struct DispatchOut {
    local_rank: u32,
    header: Option<&'static str>,
    body_fields: &'static [&'static str],
}

impl From<Dispatch> for DispatchOut {
    fn from(dispatch: Dispatch) -> Self {
        Self { local_rank: dispatch.local.0, header: dispatch.header, body_fields: dispatch.body_fields }
    }
}

/// A rank that its own state kept out.
#[derive(Serialize)]
struct ExcludedOut {
    worker_id: serde_json::Value,
    dp_rank: u32,
    reason: &'static str,
}

impl ExcludedOut {
    fn of(fleet: &FleetView, left_out: &LeftOut) -> Self {
        let LeftOut { rank, obstacle } = left_out;
        Self { worker_id: id_value(fleet, &rank.worker), dp_rank: rank.dp_rank.0, reason: obstacle.name() }
    }
}

/// A rank in its place in the order.
#[derive(Serialize)]
struct TopOut {
    worker_id: serde_json::Value,
    dp_rank: u32,
    local_rank: Option<u32>,
    logit: Option<f64>,
}

impl TopOut {
    fn of(fleet: &FleetView, scored: &Scored) -> Self {
        let Scored { candidate, terms } = scored;
        Self {
            worker_id: id_value(fleet, &candidate.rank.worker),
            dp_rank: candidate.rank.dp_rank.0,
            local_rank: candidate.local.map(|local| local.0),
            logit: terms.logit,
        }
    }
}

/// One candidate with every term of its cost.
#[derive(Serialize)]
struct CandidateOut {
    worker_id: serde_json::Value,
    dp_rank: u32,
    local_rank: Option<u32>,
    logit: Option<f64>,
    formula: String,
    device_blocks: u32,
    host_blocks: u32,
    disk_blocks: u32,
    /// Leading blocks that were just sent there.
    expected_blocks: u32,
    /// Those of them that count as cached only because they were booked.
    booked_blocks: u32,
    new_blocks: u64,
    cached_tokens: u64,
    effective_prefill_tokens: u64,
    raw_prefill_blocks: f64,
    overlap_credit_blocks: f64,
    overlap_credit_decay: f64,
    trust_credit: f64,
    overlap_weight: f64,
    prefill_blocks: f64,
    prefill_tracked: bool,
    decode_blocks: Option<f64>,
    potential_decode_blocks: Option<u64>,
    decode_credit: f64,
    active_request_cost: f64,
    taint_multiplier: f64,
    tree_size: u64,
    total_blocks: Option<u64>,
    trust: &'static str,
    may_err: &'static [&'static str],
    reasons: Vec<&'static str>,
    age_ms: Option<u64>,
    load: &'static str,
    load_age_ms: Option<u64>,
}

pub(super) fn id_value(fleet: &FleetView, id: &WorkerId) -> serde_json::Value {
    match (form_of(fleet, id), id.as_str().parse::<u64>()) {
        (IdForm::Integer, Ok(number)) => number.into(),
        _ => id.as_str().into(),
    }
}

impl CandidateOut {
    fn of(fleet: &FleetView, scored: &Scored) -> Self {
        let Scored { candidate, terms } = scored;
        let (load, load_age) = match candidate.load {
            CandidateLoad::Known { age, .. } => ("known", age),
            CandidateLoad::Unknown => ("unknown", None),
        };
        Self {
            worker_id: id_value(fleet, &candidate.rank.worker),
            dp_rank: candidate.rank.dp_rank.0,
            local_rank: candidate.local.map(|local| local.0),
            logit: terms.logit,
            formula: terms.formula().to_string(),
            device_blocks: candidate.overlap.device,
            host_blocks: candidate.overlap.host,
            disk_blocks: candidate.overlap.disk,
            expected_blocks: candidate.expected_blocks,
            booked_blocks: candidate.booked_blocks(),
            new_blocks: candidate.new_blocks,
            cached_tokens: terms.cached_tokens,
            effective_prefill_tokens: terms.effective_prefill_tokens,
            raw_prefill_blocks: terms.raw_prefill_blocks,
            overlap_credit_blocks: terms.overlap_credit_blocks,
            overlap_credit_decay: terms.overlap_credit_decay,
            trust_credit: terms.trust_credit,
            overlap_weight: terms.overlap_weight,
            prefill_blocks: terms.prefill_blocks,
            prefill_tracked: terms.prefill_tracked,
            decode_blocks: terms.decode_blocks,
            potential_decode_blocks: terms.potential_decode_blocks,
            decode_credit: terms.decode_credit,
            active_request_cost: terms.active_request_cost,
            taint_multiplier: terms.taint_multiplier,
            tree_size: candidate.tree_size,
            total_blocks: candidate.total_blocks,
            trust: candidate.trust.name(),
            may_err: candidate.trust.may_err(),
            reasons: candidate.reasons.names().collect(),
            age_ms: candidate.view_age.map(millis),
            load,
            load_age_ms: load_age.map(millis),
        }
    }
}

/// The best `most` of a decision's candidates, the pick first. Only what is shown is put in order.
fn shown<T>(decision: &Decision<'_>, most: usize, out: impl Fn(&Scored) -> T) -> Vec<T> {
    match most {
        0 => Vec::new(),
        1 => vec![out(decision.chosen())],
        most => decision.ranked().into_iter().take(most).map(out).collect(),
    }
}

/// The lines that operators know, as far as they are wanted.
fn log(wanted: LogDecisions, pool: &PoolView, body: &SelectBody, decision: &Decision<'_>, affine: bool) {
    if wanted == LogDecisions::Off {
        return;
    }
    tracing::info!(pool = %pool.key, selection_id = body.selection_id, affine, "{decision}");
    if wanted == LogDecisions::Candidates {
        if let Some(tie) = decision.tie() {
            tracing::info!(pool = %pool.key, selection_id = body.selection_id, "{tie}");
        }
        for scored in decision.ranked() {
            tracing::info!(pool = %pool.key, selection_id = body.selection_id, "{scored}");
        }
    }
}

fn millis(age: Duration) -> u64 {
    u64::try_from(age.as_millis()).unwrap_or(u64::MAX)
}

impl SelectOut {
    fn of<C: Control>(
        state: &ServiceState<C>,
        fleet: &FleetView,
        pool: &PoolView,
        body: &SelectBody,
        decision: &Decision<'_>,
        affine: bool,
    ) -> Self {
        let reason = decision.reason;
        state.metrics().picked(reason);
        log(state.config().log_decisions, pool, body, decision, affine);
        let Scored { candidate, terms } = decision.chosen();
        let worker = decision.pick.worker();
        let spec = fleet.declared().worker(worker);
        let advisory = body.is_advisory();
        Self {
            selection_id: body.selection_id.clone(),
            model_name: pool.key.model.to_string(),
            routing_group: pool.key.group.to_string(),
            worker_id: id_value(fleet, worker),
            dp_rank: decision.pick.dp_rank().map(|rank| rank.0),
            endpoint: spec.and_then(|spec| spec.http_endpoint.clone()),
            block_size: pool.block_size.get(),
            overlap: InstanceOut::default(),
            effective_prefill_tokens: terms.effective_prefill_tokens,
            potential_decode_blocks: terms.potential_decode_blocks,
            worker_load: advisory.then(|| WorkerLoadOut {
                active_prefill_tokens: candidate.load.active_prefill_tokens(),
                prefill_token_capacity: spec.and_then(|spec| spec.max_num_batched_tokens),
                total_kv_blocks: state.records().get(worker).and_then(|record| record.body.total_kv_blocks),
            }),
            isl_tokens: decision.isl_tokens,
            track_prefill_tokens: None,
            local_rank: decision.pick.local().map(|local| local.0),
            why_no_rank: decision.pick.why_no_rank(),
            dispatch: decision.dispatch().map(Into::into),
            reason: match decision.pick {
                Pick::Rank { .. } if affine => "affinity",
                _ => reason.name(),
            },
            logit: terms.logit,
            formula: terms.formula().to_string(),
            temperature: decision.temperature,
            trust: candidate.trust.name(),
            may_err: candidate.trust.may_err(),
            reasons: candidate.reasons.names().collect(),
            age_ms: candidate.view_age.map(millis),
            all_silent: decision.all_silent,
            candidates: shown(decision, body.shown().saturating_add(1), |of| CandidateOut::of(fleet, of)),
            top: body.top_k().map(|top| shown(decision, top, |of| TopOut::of(fleet, of))),
            excluded: decision.left_out().iter().map(|of| ExcludedOut::of(fleet, of)).collect(),
            excluded_counts: decision
                .excluded
                .iter()
                .filter(|(_, ranks)| *ranks > 0)
                .map(|(obstacle, ranks)| (obstacle.name(), ranks))
                .collect(),
            block_hashes: None,
            sequence_hashes: None,
            rank: candidate.rank.clone(),
        }
    }

    /// Adds what is read from the buffers once the decision has let go of them.
    fn finish(mut self, pool: &PoolView, form: Option<HashForm>, scratch: &RouterScratch) -> Response {
        let overlaps = scratch.overlaps();
        for rank in pool.worker(&self.rank.worker).iter().flat_map(|worker| &worker.ranks) {
            let reach = Reach::of(overlaps, rank, self.block_size);
            self.overlap.add(rank.plan.rank.dp_rank.0, reach, TierBody::Any);
        }
        // A booking's answer shows the hashes that it stands for, as the field's does.
        let booked = self.track_prefill_tokens.map(|_| HashForm::Number);
        if let Some(shown) = form.or(booked) {
            let (locals, sequences) = hashes_out(overlaps, shown);
            self.block_hashes = form.map(|_| locals);
            self.sequence_hashes = Some(sequences);
        }
        Json(self).into_response()
    }
}

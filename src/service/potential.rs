//! `/potential_loads` and `/overlap_scores`: what a prompt would meet on each rank, without a choice.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

use super::Control;
use super::boundary::{IdOut, JsonBody};
use super::problem::Problem;
use super::query::Reach;
use super::selection::SelectBody;
use super::state::{ServiceState, Unnamed, check_block_size, meant};
use super::url::{NoParams, Params};
use crate::routing::{CandidateLoad, Request, SelectRequest, Terms};

#[derive(Serialize)]
struct PotentialOut<'a> {
    worker_id: IdOut<'a>,
    dp_rank: u32,
    potential_prefill_tokens: Option<u64>,
    potential_decode_blocks: Option<u64>,
    active_requests: Option<u64>,
    load: &'static str,
    trust: &'static str,
    may_err: &'static [&'static str],
    reasons: Vec<&'static str>,
}

/// `POST /potential_loads`: what each rank's load would be with this prompt. `null` where it is not known.
pub(super) async fn potential_loads<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let fleet = state.view().fleet();
    let meant = meant(&fleet, body.names()?, Unnamed::Unavailable)?;
    let pool = meant.pool;
    let parts = body.parts(meant.adapter)?;
    let narrow = body.narrow()?;
    narrow.check(pool)?;
    check_block_size(body.block_size, pool.block_size)?;
    let policy = state.router().config().policy.overlaid(&parts.policy)?;
    let prompt = body.prompt(&parts);
    let request = Request::new(prompt.isl_tokens(), pool.block_size);
    let wanted =
        SelectRequest { policy: Some(&parts.policy), hybrid: body.hybrid(), ..SelectRequest::new(prompt) };
    let now = state.control().now();
    let candidates = state.with_scratch(|scratch| state.router().candidates(now, pool, &wanted, scratch))?;
    let asked = pool.ranks().zip(&candidates).filter(|((worker, rank), _)| narrow.admits(worker, rank));
    let ranks = asked.map(|((worker, _), candidate)| {
        let terms = Terms::of(&policy, &request, None, candidate);
        let added = if policy.track_prefill_tokens { terms.effective_prefill_tokens } else { 0 };
        let new = if policy.assume_kv_reuse { candidate.new_blocks } else { request.full_blocks() };
        let (decode_blocks, active_requests, load) = match candidate.load {
            CandidateLoad::Known { decode_blocks, active_requests, .. } => {
                (Some(decode_blocks), active_requests, "known")
            }
            CandidateLoad::Unknown => (None, None, "unknown"),
        };
        PotentialOut {
            worker_id: IdOut(&worker.spec.worker, worker.spec.id_form),
            dp_rank: candidate.rank.dp_rank.0,
            potential_prefill_tokens: candidate
                .load
                .active_prefill_tokens()
                .map(|active| active.saturating_add(added)),
            // Unlike `/select`, this route leaves a partial last block out, as Dynamo's does.
            potential_decode_blocks: decode_blocks.map(|active| (active.ceil() as u64).saturating_add(new)),
            active_requests,
            load,
            trust: candidate.trust.name(),
            may_err: candidate.trust.may_err(),
            reasons: candidate.reasons.names().collect(),
        }
    });
    Ok(Json(ranks.collect::<Vec<_>>()).into_response())
}

#[derive(Serialize)]
struct OverlapOut<'a> {
    worker_id: IdOut<'a>,
    dp_rank: u32,
    device_blocks: u64,
    host_pinned_blocks: u64,
    disk_blocks: u64,
    host_pinned_extension_blocks: u64,
    disk_extension_blocks: u64,
    shared_beyond_device_blocks: Option<u64>,
    trust: &'static str,
    may_err: &'static [&'static str],
    reasons: Vec<&'static str>,
    groups_left_out: bool,
}

/// `POST /overlap_scores`: what each rank holds of a prompt, in blocks.
pub(super) async fn overlap_scores<C: Control>(
    State(state): State<ServiceState<C>>,
    _: Params<NoParams>,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let fleet = state.view().fleet();
    let meant = meant(&fleet, body.names()?, Unnamed::Unavailable)?;
    let pool = meant.pool;
    let parts = body.parts(meant.adapter)?;
    let narrow = body.narrow()?;
    narrow.check(pool)?;
    check_block_size(body.block_size, pool.block_size)?;
    let prompt = body.prompt(&parts);
    let response = state.with_scratch(|scratch| {
        let overlaps = state.router().overlap(pool, &prompt, body.hybrid(), scratch);
        let asked = pool.ranks().filter(|(worker, rank)| narrow.admits(worker, rank));
        let ranks = asked.map(|(worker, rank)| {
            // In blocks: a block size of one token.
            let reach = Reach::of(overlaps, rank, 1);
            let reasons = rank.status.reasons();
            let trust = reasons.trust();
            OverlapOut {
                worker_id: IdOut(&worker.spec.worker, worker.spec.id_form),
                dp_rank: rank.plan.rank.dp_rank.0,
                device_blocks: reach.device,
                host_pinned_blocks: reach.host,
                disk_blocks: reach.disk,
                host_pinned_extension_blocks: reach.host - reach.device,
                disk_extension_blocks: reach.disk - reach.host,
                shared_beyond_device_blocks: None,
                trust: trust.name(),
                may_err: trust.may_err(),
                reasons: reasons.names().collect(),
                groups_left_out: reach.left_out,
            }
        });
        let body = json!({
            "block_size": pool.block_size.get(),
            "num_blocks": overlaps.hashes().blocks(),
            "workers": ranks.collect::<Vec<_>>(),
            "shared_cache": { "enabled": false, "total_hit_blocks": 0, "ranges": [], "error": null },
        });
        Json(body).into_response()
    });
    Ok(response)
}

//! `/select`, `/potential_loads`, `/overlap_scores`: which rank should serve a prompt, and what it would cost.

use std::collections::BTreeMap;
use std::time::Instant;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Control;
use super::boundary::{HashForm, HashOut, IdOut, JsonBody, WireHash, WireId, not_null, pool_names};
use super::problem::Problem;
use super::query::{
    HybridBody, InstanceOut, KeyBody, MmBody, PromptKeys, Reach, TierBody, check_lengths, content_keys,
    hashes_out, mm_items,
};
use super::records::RoleBody;
use super::state::{ServiceState, Unnamed, check_block_size, pool};
use super::workers::form_of;
use crate::block::{ContentKey, ContentKeys, LocalBlockHash, SequenceHash};
use crate::fleet::IdForm;
use crate::ids::DpRank;
use crate::indexer::{FleetView, PoolView};
use crate::load::RankLoadView;
use crate::routing::{
    AllowList, Candidate, CandidateLoad, Constraints, Decision, Dispatch, MmItem, Overlap, Pick, Pin,
    PolicyOverride, Prompt, PromptForm, RouterScratch, Scored, SelectError, SelectRequest, Terms,
    TrustCredit,
};

// === requests ===

#[derive(Deserialize)]
pub(super) struct SelectBody {
    token_ids: Option<Vec<u32>>,
    block_hashes: Option<Vec<WireHash>>,
    sequence_hashes: Option<Vec<WireHash>>,
    isl_tokens: Option<u64>,
    model_name: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    routing_group: Option<String>,
    model: Option<String>,
    modelname: Option<String>,
    tenant_id: Option<String>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    block_size: Option<u32>,
    is_eagle: Option<bool>,
    #[serde(default)]
    mm: Vec<MmBody>,
    #[serde(default)]
    extra_keys: Vec<Option<Vec<KeyBody>>>,
    block_mm_infos: Option<Vec<Option<BlockMmBody>>>,
    mm_routing_info: Option<MmRoutingBody>,
    hybrid: Option<HybridBody>,
    router_config_override: Option<OverrideBody>,
    /// Ours: the same as in the override.
    temperature: Option<f64>,
    /// Ours: the same as in the override.
    overlap_weight: Option<f64>,
    pinned_worker: Option<PinBody>,
    affinity_target: Option<PinBody>,
    allowed_worker_ids: Option<Vec<WireId>>,
    routing_constraints: Option<ConstraintsBody>,
    role: Option<RoleBody>,
    selection_id: Option<String>,
    advisory: Option<bool>,
    // Known, checked and without effect on the choice.
    #[serde(rename = "expected_output_tokens")]
    _expected_output_tokens: Option<u32>,
    #[serde(rename = "priority_jump")]
    _priority_jump: Option<f64>,
    #[serde(rename = "strict_priority")]
    _strict_priority: Option<u32>,
}

/// Dynamo's marks of the images in one block.
#[derive(Deserialize)]
struct BlockMmBody {
    mm_objects: Vec<MmObjectBody>,
}

#[derive(Deserialize)]
struct MmObjectBody {
    mm_hash: u64,
    #[serde(rename = "offsets")]
    _offsets: Vec<(u64, u64)>,
}

/// The tokens to route by, where they are not those to be sent.
#[derive(Deserialize)]
struct MmRoutingBody {
    routing_token_ids: Vec<u32>,
    block_mm_infos: Option<Vec<Option<BlockMmBody>>>,
}

#[derive(Deserialize)]
struct PinBody {
    worker_id: WireId,
    dp_rank: Option<u32>,
}

impl PinBody {
    fn pin(&self) -> Pin {
        Pin { worker: self.worker_id.id.clone(), dp_rank: self.dp_rank.map(DpRank) }
    }
}

#[derive(Deserialize)]
struct ConstraintsBody {
    #[serde(default)]
    required_taints: Vec<String>,
    #[serde(default)]
    preferred_taints: BTreeMap<String, f64>,
}

/// Most labels that a request may require: each is looked for on each candidate.
const MAX_REQUIRED: usize = 64;

#[derive(Deserialize, Default)]
struct OverrideBody {
    overlap_weight: Option<f64>,
    prefill_load_scale: Option<f64>,
    overlap_score_weight: Option<f64>,
    overlap_score_credit: Option<f64>,
    overlap_score_credit_decay: Option<f64>,
    host_cache_hit_weight: Option<f64>,
    disk_cache_hit_weight: Option<f64>,
    decode_active_request_weight: Option<f64>,
    track_prefill_tokens: Option<bool>,
    temperature: Option<f64>,
    router_temperature: Option<f64>,
    decode_counts_request: Option<bool>,
    assume_kv_reuse: Option<bool>,
    untrusted_credit: Option<CreditBody>,
    shared_cache_multiplier: Option<f64>,
}

#[derive(Deserialize)]
struct CreditBody {
    #[serde(default = "one")]
    joining: f64,
    #[serde(default = "one")]
    repairing: f64,
    #[serde(default = "one")]
    may_miss: f64,
    #[serde(default = "one")]
    may_overcredit: f64,
    #[serde(default = "one")]
    silent: f64,
}

fn one() -> f64 {
    1.0
}

/// A body in the types of the inside.
struct Parts<'a> {
    locals: Vec<LocalBlockHash>,
    sequences: Vec<SequenceHash>,
    mm: Vec<MmItem<'a>>,
    keys: Vec<ContentKeys>,
    cache_salt: Option<&'a str>,
    policy: PolicyOverride,
    pin: Option<Pin>,
    affinity: Option<Pin>,
    allowed: Option<AllowList>,
    required: Vec<Box<str>>,
}

impl SelectBody {
    fn tokens(&self) -> Option<&[u32]> {
        let routing = self.mm_routing_info.as_ref().map(|info| info.routing_token_ids.as_slice());
        routing.or(self.token_ids.as_deref())
    }

    fn parts(&self) -> Result<Parts<'_>, Problem> {
        let (mut locals, mut sequences) = (Vec::new(), Vec::new());
        if self.tokens().is_none() {
            let missing = |field: &str| {
                let detail = format!("{field} is required without token_ids");
                Problem::bad_request("no_prompt", detail).field(field)
            };
            let blocks = self.block_hashes.as_deref().ok_or_else(|| missing("block_hashes"))?;
            let chain = self.sequence_hashes.as_deref().ok_or_else(|| missing("sequence_hashes"))?;
            self.isl_tokens.ok_or_else(|| missing("isl_tokens"))?;
            check_lengths(("block_hashes", Some(blocks)), ("sequence_hashes", Some(chain)))?;
            locals = WireHash::ints(blocks, "block_hashes")?.into_iter().map(LocalBlockHash).collect();
            sequences = WireHash::ints(chain, "sequence_hashes")?.into_iter().map(SequenceHash).collect();
        }
        let PromptKeys { mut keys, cache_salt } =
            content_keys(&self.extra_keys, self.lora_name.as_deref(), self.cache_salt.as_deref())?;
        let routing = self.mm_routing_info.as_ref().and_then(|info| info.block_mm_infos.as_deref());
        add_objects(routing.or(self.block_mm_infos.as_deref()).unwrap_or_default(), &mut keys);
        let constraints = self.routing_constraints.as_ref();
        let required = constraints.map_or(&[][..], |constraints| &constraints.required_taints);
        if required.len() > MAX_REQUIRED {
            let field = "routing_constraints.required_taints";
            return Err(Problem::wrong_field(field, format!("more than {MAX_REQUIRED} entries")));
        }
        Ok(Parts {
            locals,
            sequences,
            mm: mm_items(&self.mm, self.tokens().map_or(0, <[u32]>::len))?,
            keys,
            cache_salt,
            policy: self.policy()?,
            pin: self.pinned_worker.as_ref().map(PinBody::pin),
            affinity: self.affinity_target.as_ref().map(PinBody::pin),
            allowed: self
                .allowed_worker_ids
                .as_ref()
                .map(|allowed| allowed.iter().map(|worker| worker.id.clone()).collect()),
            required: required.iter().map(|taint| taint.as_str().into()).collect(),
        })
    }

    fn policy(&self) -> Result<PolicyOverride, Problem> {
        let nothing = OverrideBody::default();
        let over = self.router_config_override.as_ref().unwrap_or(&nothing);
        if let Some(multiplier) = over.shared_cache_multiplier.filter(|of| !(0.0..=1.0).contains(of)) {
            let field = "router_config_override.shared_cache_multiplier";
            return Err(Problem::wrong_field(
                field,
                format!("{field} is {multiplier}; it must be from 0 to 1"),
            ));
        }
        let preferred = self.routing_constraints.as_ref().map(|constraints| &constraints.preferred_taints);
        let labels = preferred.filter(|labels| !labels.is_empty());
        Ok(PolicyOverride {
            overlap_weight: (self.overlap_weight.or(over.overlap_weight))
                .or(over.prefill_load_scale)
                .or(over.overlap_score_weight),
            overlap_score_credit: over.overlap_score_credit,
            overlap_score_credit_decay: over.overlap_score_credit_decay,
            host_cache_hit_weight: over.host_cache_hit_weight,
            disk_cache_hit_weight: over.disk_cache_hit_weight,
            decode_active_request_weight: over.decode_active_request_weight,
            track_prefill_tokens: over.track_prefill_tokens,
            temperature: self.temperature.or(over.temperature).or(over.router_temperature),
            decode_counts_request: over.decode_counts_request,
            assume_kv_reuse: over.assume_kv_reuse,
            preferred_taints: labels.map(|labels| {
                labels.iter().map(|(label, weight)| (label.as_str().into(), *weight)).collect()
            }),
            untrusted_credit: over.untrusted_credit.as_ref().map(|credit| TrustCredit {
                joining: credit.joining,
                repairing: credit.repairing,
                may_miss: credit.may_miss,
                may_overcredit: credit.may_overcredit,
                silent: credit.silent,
            }),
        })
    }

    fn prompt<'a>(&'a self, parts: &'a Parts<'a>) -> Prompt<'a> {
        let form = match self.tokens() {
            Some(ids) => PromptForm::Tokens { ids, eagle: self.is_eagle == Some(true) },
            None => PromptForm::Hashes {
                locals: &parts.locals,
                sequences: &parts.sequences,
                isl_tokens: self.isl_tokens.unwrap_or(0),
            },
        };
        Prompt {
            form,
            lora_name: self.lora_name.as_deref(),
            cache_salt: parts.cache_salt,
            mm: &parts.mm,
            keys: &parts.keys,
        }
    }
}

/// Dynamo's object hashes are no identifiers that an engine sends, so a block that has one equals none that
/// we index: it must not be taken for text.
fn add_objects(blocks: &[Option<BlockMmBody>], keys: &mut Vec<ContentKeys>) {
    if blocks.len() > keys.len() {
        keys.resize(blocks.len(), ContentKeys::new());
    }
    for (block, keys) in blocks.iter().zip(keys) {
        let objects = block.iter().flat_map(|block| &block.mm_objects);
        keys.extend(objects.map(|object| ContentKey::Opaque(object.mm_hash.to_le_bytes().as_slice().into())));
    }
}

// === /select ===

/// The part of the URL that says how hashes are answered.
#[derive(Deserialize)]
pub(super) struct HashParam {
    hashes: Option<String>,
}

/// `POST /select`.
pub(super) async fn select<C: Control>(
    State(state): State<ServiceState<C>>,
    Query(param): Query<HashParam>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let started = Instant::now();
    let form = HashForm::asked(param.hashes.as_deref(), &headers)?;
    let parts = body.parts()?;
    let fleet = state.view().fleet();
    let pool = pool(&fleet, pool_names!(body), Unnamed::Unavailable)?;
    check_block_size(body.block_size, pool.block_size)?;
    let result = state.with_scratch(|scratch| {
        let out = decide(&state, &fleet, pool, &body, &parts, scratch)?;
        Ok::<_, SelectError>(out.finish(pool, form, scratch))
    });
    state.metrics().decision_took(started.elapsed());
    result.map_err(|error| {
        tracing::info!(pool = %pool.key, selection_id = body.selection_id, %error, "refused");
        error.into()
    })
}

fn decide<C: Control>(
    state: &ServiceState<C>,
    fleet: &FleetView,
    pool: &PoolView,
    body: &SelectBody,
    parts: &Parts<'_>,
    scratch: &mut RouterScratch,
) -> Result<SelectOut, SelectError> {
    let now = state.control().now();
    let request = |pin| SelectRequest {
        constraints: Constraints {
            role: body.role.map(Into::into),
            allowed: parts.allowed.as_ref(),
            pin,
            required_taints: &parts.required,
        },
        policy: Some(&parts.policy),
        hybrid: body.hybrid.map(Into::into),
        ..SelectRequest::new(body.prompt(parts))
    };
    // A wish, not an order: where it cannot be met, the others are looked at.
    if let Some(affinity) = parts.affinity.as_ref().filter(|_| parts.pin.is_none())
        && let Ok(decision) = state.router().select(now, pool, &request(Some(affinity)), scratch)
    {
        return Ok(SelectOut::of(state, fleet, pool, body, &decision, true));
    }
    let decision = state.router().select(now, pool, &request(parts.pin.as_ref()), scratch)?;
    Ok(SelectOut::of(state, fleet, pool, body, &decision, false))
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
    age_ms: Option<u64>,
    candidates: Vec<CandidateOut>,
    excluded: BTreeMap<&'static str, u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_hashes: Option<Vec<HashOut>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<HashOut>>,
    #[serde(skip)]
    worker: crate::ids::WorkerId,
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

/// One candidate with every term of its cost.
#[derive(Serialize)]
struct CandidateOut {
    worker_id: serde_json::Value,
    dp_rank: u32,
    local_rank: u32,
    logit: Option<f64>,
    formula: String,
    device_blocks: u32,
    host_blocks: u32,
    disk_blocks: u32,
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
    trust: &'static str,
    may_err: &'static [&'static str],
    age_ms: Option<u64>,
    load: &'static str,
    load_age_ms: Option<u64>,
}

fn id_value(fleet: &FleetView, id: &crate::ids::WorkerId) -> serde_json::Value {
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
            local_rank: candidate.local.0,
            logit: terms.logit,
            formula: terms.formula().to_string(),
            device_blocks: candidate.overlap.device,
            host_blocks: candidate.overlap.host,
            disk_blocks: candidate.overlap.disk,
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
            trust: candidate.trust.name(),
            may_err: candidate.trust.may_err(),
            age_ms: candidate.view_age.map(millis),
            load,
            load_age_ms: load_age.map(millis),
        }
    }
}

fn millis(age: std::time::Duration) -> u64 {
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
        tracing::info!(pool = %pool.key, selection_id = body.selection_id, affine, "{decision}");
        for scored in decision.candidates() {
            tracing::debug!(pool = %pool.key, "{scored}");
        }
        let Scored { candidate, terms } = decision.chosen();
        let worker = decision.pick.worker();
        let spec = fleet.declared().worker(worker);
        let advisory = body.advisory == Some(true);
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
            age_ms: candidate.view_age.map(millis),
            candidates: decision.candidates().iter().map(|scored| CandidateOut::of(fleet, scored)).collect(),
            excluded: decision
                .excluded
                .iter()
                .filter(|(_, ranks)| *ranks > 0)
                .map(|(obstacle, ranks)| (obstacle.name(), ranks))
                .collect(),
            block_hashes: None,
            sequence_hashes: None,
            worker: worker.clone(),
        }
    }

    /// Adds what is read from the buffers once the decision has let go of them.
    fn finish(mut self, pool: &PoolView, form: Option<HashForm>, scratch: &RouterScratch) -> Response {
        let overlaps = scratch.overlaps();
        for rank in pool.worker(&self.worker).iter().flat_map(|worker| &worker.ranks) {
            let reach = Reach::of(overlaps, rank, self.block_size);
            self.overlap.add(rank.plan.rank.dp_rank.0, reach, TierBody::Any);
        }
        if let Some(form) = form {
            let (locals, sequences) = hashes_out(overlaps, form);
            (self.block_hashes, self.sequence_hashes) = (Some(locals), Some(sequences));
        }
        Json(self).into_response()
    }
}

// === /potential_loads and /overlap_scores ===

#[derive(Serialize)]
struct PotentialOut<'a> {
    worker_id: IdOut<'a>,
    dp_rank: u32,
    potential_prefill_tokens: Option<u64>,
    potential_decode_blocks: Option<u64>,
    active_requests: Option<u64>,
    load: &'static str,
    trust: &'static str,
}

/// `POST /potential_loads`: what each rank's load would be with this prompt. `null` where it is not known.
pub(super) async fn potential_loads<C: Control>(
    State(state): State<ServiceState<C>>,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let parts = body.parts()?;
    let fleet = state.view().fleet();
    let pool = pool(&fleet, pool_names!(body), Unnamed::Unavailable)?;
    check_block_size(body.block_size, pool.block_size)?;
    let policy = state.router().config().policy.overlaid(&parts.policy)?;
    let prompt = body.prompt(&parts);
    let request = crate::routing::Request::new(prompt.isl_tokens(), pool.block_size);
    let out = state.with_scratch(|scratch| {
        let overlaps = state.router().overlap(pool, &prompt, body.hybrid.map(Into::into), scratch);
        let now = state.control().now();
        let loads = state.view().loads().lock();
        let ranks = pool.ranks().map(|(worker, rank)| {
            let load = state.router().load(now, &loads, pool, &rank.plan.rank);
            let overlap = overlaps.of(rank.slot).map_or_else(Overlap::default, |of| Overlap {
                device: of.device,
                host: of.host,
                disk: of.disk,
            });
            let known = candidate_load(&load);
            let candidate = Candidate {
                overlap,
                load: known,
                trust: rank.status.trust(),
                ..Candidate::new(rank.plan.rank.clone(), rank.plan.local)
            };
            let terms = Terms::of(&policy, &request, None, &candidate);
            let added = if policy.track_prefill_tokens { terms.effective_prefill_tokens } else { 0 };
            PotentialOut {
                worker_id: IdOut(&worker.spec.worker, worker.spec.id_form),
                dp_rank: rank.plan.rank.dp_rank.0,
                potential_prefill_tokens: load.active_prefill_tokens().map(|active| active + added),
                // Unlike `/select`, this route leaves a partial last block out, as Dynamo's does.
                potential_decode_blocks: load
                    .decode_blocks()
                    .map(|active| active.ceil() as u64 + request.full_blocks()),
                active_requests: match &load {
                    RankLoadView::Known { running, .. } => *running,
                    RankLoadView::Unknown(_) => None,
                },
                load: if known == CandidateLoad::Unknown { "unknown" } else { "known" },
                trust: candidate.trust.name(),
            }
        });
        ranks.collect::<Vec<_>>()
    });
    Ok(Json(out).into_response())
}

fn candidate_load(load: &RankLoadView) -> CandidateLoad {
    match load {
        RankLoadView::Known { decode_blocks, active_prefill_tokens, running, age, .. } => {
            CandidateLoad::Known {
                decode_blocks: *decode_blocks,
                active_prefill_tokens: *active_prefill_tokens,
                active_requests: *running,
                age: Some(*age),
            }
        }
        RankLoadView::Unknown(_) => CandidateLoad::Unknown,
    }
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
    groups_left_out: bool,
}

/// `POST /overlap_scores`: what each rank holds of a prompt, in blocks.
pub(super) async fn overlap_scores<C: Control>(
    State(state): State<ServiceState<C>>,
    JsonBody(body): JsonBody<SelectBody>,
) -> Result<Response, Problem> {
    let parts = body.parts()?;
    let fleet = state.view().fleet();
    let pool = pool(&fleet, pool_names!(body), Unnamed::Unavailable)?;
    check_block_size(body.block_size, pool.block_size)?;
    let prompt = body.prompt(&parts);
    let response = state.with_scratch(|scratch| {
        let overlaps = state.router().overlap(pool, &prompt, body.hybrid.map(Into::into), scratch);
        let ranks = pool.ranks().map(|(worker, rank)| {
            // In blocks: a block size of one token.
            let reach = Reach::of(overlaps, rank, 1);
            let trust = rank.status.trust();
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

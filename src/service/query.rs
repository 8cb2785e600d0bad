//! `/query` and `/query_by_hash`: how far each rank's cache reaches into a prompt.

use std::collections::BTreeMap;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};

use super::Control;
use super::boundary::{
    HashForm, HashOut, IdOut, JsonBody, PoolNames, Shape, WireHash, WireId, hex_bytes, not_null, pool_names,
};
use super::narrow::{Adapter, Narrow};
use super::problem::Problem;
use super::state::{ServiceState, Unnamed, check_block_size, meant, pool};
use super::url::Params;
use super::visit::KeyedByData;
use crate::block::{BlockHash, ContentKey, ContentKeys, LocalBlockHash, SequenceHash};
use crate::ids::{DpRank, Moment};
use crate::index::HybridRule;
use crate::indexer::{PoolView, RankView, WorkerView};
use crate::routing::{MmItem, Overlaps, Prompt, PromptForm, RouterScratch};

/// What a prompt carries beside its tokens, in the words of the wire.
#[derive(Deserialize)]
pub(super) struct MmBody {
    identifier: String,
    offset: u64,
    length: u64,
}

/// One entry of vLLM's `extra_keys`; byte strings are written as `0x` text.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum KeyBody {
    Text(String),
    Int(i64),
    Located(String, i64),
}

/// How hybrid models are credited, in the words of the wire.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum HybridBody {
    Joint,
    FullAttention,
}

impl From<HybridBody> for HybridRule {
    fn from(rule: HybridBody) -> Self {
        match rule {
            HybridBody::Joint => Self::Joint,
            HybridBody::FullAttention => Self::FullAttention,
        }
    }
}

/// Which reach counts as the score.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TierBody {
    Device,
    Host,
    Disk,
    Any,
}

#[derive(Deserialize)]
pub(super) struct QueryBody {
    token_ids: Vec<u32>,
    #[serde(default, deserialize_with = "not_null")]
    model_name: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    routing_group: Option<String>,
    model: Option<String>,
    modelname: Option<String>,
    tenant_id: Option<String>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    block_size: Option<u32>,
    #[serde(default)]
    mm: Vec<MmBody>,
    #[serde(default)]
    extra_keys: Vec<Option<Vec<KeyBody>>>,
    hybrid: Option<HybridBody>,
    tier: Option<TierBody>,
    #[serde(default)]
    is_eagle: bool,
    // What narrows the question.
    worker_id: Option<WireId>,
    instance_id: Option<WireId>,
    dp_rank: Option<u32>,
    lora_id: Option<i64>,
}

#[derive(Deserialize)]
pub(super) struct HashBody {
    block_hashes: Option<Vec<WireHash>>,
    seq_hashes: Option<Vec<WireHash>>,
    /// The rank whose own names the hashes are.
    worker: Option<WireId>,
    /// What narrows the question otherwise.
    worker_id: Option<WireId>,
    instance_id: Option<WireId>,
    dp_rank: Option<u32>,
    #[serde(default, deserialize_with = "not_null")]
    model_name: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    routing_group: Option<String>,
    model: Option<String>,
    modelname: Option<String>,
    tenant_id: Option<String>,
    cache_salt: Option<String>,
    /// The adapter is in the hashes already.
    #[serde(rename = "lora_name")]
    _lora_name: Option<String>,
    block_size: Option<u32>,
    hybrid: Option<HybridBody>,
    tier: Option<TierBody>,
}

/// The part of the URL that says how hashes are answered.
#[derive(Deserialize)]
pub(super) struct HashParam {
    pub(super) hashes: Option<String>,
}

/// `POST /query`.
pub(super) async fn query<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(param): Params<HashParam>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<QueryBody>,
) -> Result<Response, Problem> {
    let started = Instant::now();
    let form = HashForm::asked(param.hashes.as_deref(), &headers)?;
    let fleet = state.view().fleet();
    let names = pool_names!(body)?;
    let meant = meant(&fleet, names, Unnamed::Field)?;
    let pool = meant.pool;
    check_block_size(body.block_size, pool.block_size)?;
    let narrow = Narrow::of(body.worker_id.as_ref(), body.instance_id.as_ref(), body.dp_rank)?;
    narrow.check(pool)?;
    let mm = mm_items(&body.mm, body.token_ids.len())?;
    let adapter = Adapter::of(meant.adapter, body.lora_name.as_deref(), body.lora_id)?;
    let beside = content_keys(&body.extra_keys, adapter.name, body.cache_salt.as_deref())?;
    let prompt = Prompt {
        form: PromptForm::Tokens { ids: &body.token_ids, eagle: body.is_eagle },
        lora_name: adapter.name,
        lora_id: adapter.number,
        cache_salt: beside.cache_salt,
        mm: &mm,
        keys: &beside.keys,
    };
    let asked = Asked { names, tier: body.tier, form, hybrid: body.hybrid, narrow };
    let response = state.with_scratch(|scratch| answer(&state, pool, &prompt, asked, scratch));
    state.metrics().query_took(started.elapsed());
    Ok(response)
}

/// `POST /query_by_hash`.
pub(super) async fn query_by_hash<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(param): Params<HashParam>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<HashBody>,
) -> Result<Response, Problem> {
    let started = Instant::now();
    let form = HashForm::asked(param.hashes.as_deref(), &headers)?;
    let response = match &body.worker {
        Some(worker) => by_names(&state, &body, worker).await?,
        None => by_content(&state, &body, form)?,
    };
    state.metrics().query_took(started.elapsed());
    Ok(response)
}

fn by_content<C: Control>(
    state: &ServiceState<C>,
    body: &HashBody,
    form: Option<HashForm>,
) -> Result<Response, Problem> {
    if body.block_hashes.is_none() && body.seq_hashes.is_none() {
        return Err(Problem::wrong_field("block_hashes", "missing field `block_hashes` or `seq_hashes`"));
    }
    let locals = WireHash::ints(body.block_hashes.as_deref().unwrap_or_default(), "block_hashes")?;
    let sequences = WireHash::ints(body.seq_hashes.as_deref().unwrap_or_default(), "seq_hashes")?;
    check_lengths(
        ("block_hashes", body.block_hashes.as_deref()),
        ("seq_hashes", body.seq_hashes.as_deref()),
    )?;
    let fleet = state.view().fleet();
    let names = pool_names!(body)?;
    let pool = pool(&fleet, names, Unnamed::Field)?;
    let narrow = Narrow::of(body.worker_id.as_ref(), body.instance_id.as_ref(), body.dp_rank)?;
    narrow.check(pool)?;
    if body.cache_salt.is_some() {
        let detail = "cache_salt says nothing here: the salt is in the hashes";
        return Err(Problem::bad_request("cache_salt", detail).field("cache_salt"));
    }
    check_block_size(body.block_size, pool.block_size)?;
    let locals: Vec<_> = locals.into_iter().map(LocalBlockHash).collect();
    let sequences: Vec<_> = sequences.into_iter().map(SequenceHash).collect();
    let blocks = locals.len().max(sequences.len()) as u64;
    let isl_tokens = blocks * u64::from(pool.block_size.get());
    let prompt = Prompt {
        form: PromptForm::Hashes { locals: &locals, sequences: &sequences, isl_tokens },
        lora_name: None,
        lora_id: None,
        cache_salt: None,
        mm: &[],
        keys: &[],
    };
    let asked = Asked { names, tier: body.tier, form, hybrid: body.hybrid, narrow };
    Ok(state.with_scratch(|scratch| answer(state, pool, &prompt, asked, scratch)))
}

/// Two lists of hashes of one prompt, where both are given, must be of one length.
pub(super) fn check_lengths(
    (one, a): (&str, Option<&[WireHash]>),
    (other, b): (&str, Option<&[WireHash]>),
) -> Result<(), Problem> {
    match (a, b) {
        (Some(a), Some(b)) if a.len() != b.len() => {
            let detail = format!("{one} length {} must match {other} length {}", a.len(), b.len());
            Err(Problem::bad_request("lengths_differ", detail).field(other))
        }
        _ => Ok(()),
    }
}

/// `worker` and `dp_rank`: the hashes are the engine's own names on that rank.
async fn by_names<C: Control>(
    state: &ServiceState<C>,
    body: &HashBody,
    worker: &WireId,
) -> Result<Response, Problem> {
    for (field, other) in [("worker_id", &body.worker_id), ("instance_id", &body.instance_id)] {
        if other.as_ref().is_some_and(|other| other.id != worker.id) {
            let detail = format!("{field} and worker name two workers; give one of them");
            return Err(Problem::bad_request("names_differ", detail).field(field));
        }
    }
    let dp_rank = body.dp_rank.ok_or_else(|| {
        Problem::wrong_field(
            "dp_rank",
            "missing field `dp_rank`: engine names mean something on one rank only",
        )
    })?;
    let hashes = body.block_hashes.as_deref().ok_or_else(|| {
        Problem::wrong_field(
            "block_hashes",
            "missing field `block_hashes`: the engine's names, first to last",
        )
    })?;
    let names = engine_names(hashes)?;
    let fleet = state.view().fleet();
    let pool = fleet.pool_of(&worker.id).and_then(|pool| Some((pool, pool.worker(&worker.id)?)));
    let Some((pool, view)) = pool else {
        let detail = format!("worker {} is not declared", worker.id);
        return Err(Problem::not_found("unknown_worker", detail).field("worker"));
    };
    let asked = pool_names!(body)?;
    let other_model = asked.model().is_some_and(|model| *model != *pool.key.model);
    if other_model || asked.group().is_some_and(|group| *group != *pool.key.group) {
        let detail =
            format!("worker {} is declared in {}, not in the pool that is named", worker.id, pool.key);
        return Err(Problem::bad_request("other_pool", detail).field("worker"));
    }
    check_block_size(body.block_size, pool.block_size)?;
    let Some(rank) = view.ranks.iter().find(|rank| rank.plan.rank.dp_rank == DpRank(dp_rank)) else {
        let detail = format!("worker {} has no rank {dp_rank}: ranks are global", worker.id);
        return Err(Problem::bad_request("no_such_rank", detail).field("dp_rank"));
    };
    // Waits for a write section: not on a thread that answers others.
    let (index, slot) = (pool.index.clone(), rank.slot);
    let looked = tokio::task::spawn_blocking(move || index.overlap_by_names(slot, &names)).await;
    let blocks = looked.map_err(|error| {
        let detail = format!("the names could not be looked up: {error}");
        Problem::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, "lookup", detail)
    })?;
    let block_size = pool.block_size.get();
    let reach = Reach::of_blocks([blocks; 3], false, block_size);
    let mut answer = Answer::new(block_size, Some(TierBody::Device));
    answer.add(view, rank, reach, state.control().now());
    Ok(answer.respond(asked, pool, None))
}

fn engine_names(hashes: &[WireHash]) -> Result<Vec<BlockHash>, Problem> {
    let name = |(at, hash): (usize, &WireHash)| match hash {
        WireHash::Int(hash) => Ok(BlockHash::Int(*hash)),
        WireHash::Bytes(bytes) => BlockHash::from_bytes(bytes).ok_or_else(|| {
            super::boundary::bad_hash("block_hashes", at, "longer than any engine's name, 64 bytes")
        }),
        WireHash::Refused(text) => Err(super::boundary::bad_hash("block_hashes", at, text)),
    };
    hashes.iter().enumerate().map(name).collect()
}

// === prompts ===

/// Items times tokens of one prompt: each block looks at each item. 1,024 images on a million tokens.
const MAX_ITEM_WORK: usize = 1 << 30;

pub(super) fn mm_items(items: &[MmBody], tokens: usize) -> Result<Vec<MmItem<'_>>, Problem> {
    if items.len().saturating_mul(tokens) > MAX_ITEM_WORK {
        return Err(Problem::bad_request("too_many_items", "too many items for so long a prompt").field("mm"));
    }
    let item = |item: &MmBody| (item.offset, item.length);
    if items.iter().map(item).any(|(offset, length)| offset.saturating_add(length) > i64::MAX as u64) {
        return Err(Problem::bad_request("item_out_of_range", "an item ends past 2^63").field("mm"));
    }
    let items = items.iter().map(|item| MmItem {
        identifier: &item.identifier,
        offset: item.offset,
        length: item.length,
    });
    Ok(items.collect())
}

/// What stands beside a prompt's blocks, as the index knows it.
pub(super) struct PromptKeys<'a> {
    /// Content keys by block.
    pub(super) keys: Vec<ContentKeys>,
    /// The salt: the request's own, else the one that stood among the keys.
    pub(super) cache_salt: Option<&'a str>,
}

/// Reads keys the way that an engine's events are read: a leading entry that repeats the adapter says nothing
/// new, and the last bare text of the first block that is no digest is the prompt's salt.
pub(super) fn content_keys<'a>(
    blocks: &'a [Option<Vec<KeyBody>>],
    lora_name: Option<&str>,
    cache_salt: Option<&'a str>,
) -> Result<PromptKeys<'a>, Problem> {
    let mut salt = cache_salt;
    let mut keys = Vec::with_capacity(blocks.len());
    for (at, block) in blocks.iter().enumerate() {
        let own = match block.as_deref().unwrap_or_default() {
            [KeyBody::Text(name), rest @ ..] if lora_name == Some(name.as_str()) => rest,
            own => own,
        };
        let salted = if at == 0 { own.iter().rposition(is_salt) } else { None };
        if let Some(KeyBody::Text(text)) = salted.map(|at| &own[at]) {
            salt = salt.or(Some(text.strip_prefix(DYNAMO_SALT).unwrap_or(text)));
        }
        let others = own.iter().enumerate().filter(|(place, _)| Some(*place) != salted);
        keys.push(others.map(|(_, key)| content_key(at, key)).collect::<Result<ContentKeys, _>>()?);
    }
    Ok(PromptKeys { keys, cache_salt: salt })
}

/// How Dynamo marks a salt among the keys.
const DYNAMO_SALT: &str = "dynamo-cache-salt:";

/// A bare text that is neither an image's digest of 64 hex digits nor bytes written as `0x`.
fn is_salt(key: &KeyBody) -> bool {
    let is_digest = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match key {
        KeyBody::Text(text) => !text.starts_with("0x") && !is_digest(text),
        KeyBody::Int(_) | KeyBody::Located(..) => false,
    }
}

fn content_key(at: usize, key: &KeyBody) -> Result<ContentKey, Problem> {
    Ok(match key {
        KeyBody::Located(identifier, offset) => {
            ContentKey::Multimodal { identifier: identifier.as_str().into(), offset: Some(*offset) }
        }
        KeyBody::Int(number) => ContentKey::Opaque(number.to_le_bytes().as_slice().into()),
        KeyBody::Text(text) => match text.strip_prefix("0x") {
            None => ContentKey::Multimodal { identifier: text.as_str().into(), offset: None },
            Some(digits) => ContentKey::Opaque(hex_bytes(digits).ok_or_else(|| {
                let detail = format!("extra_keys[{at}]: 0x must be followed by an even number of hex digits");
                Problem::bad_request("extra_keys", detail).field(format!("extra_keys[{at}]"))
            })?),
        },
    })
}

// === answers ===

struct Asked<'a> {
    names: PoolNames<'a>,
    tier: Option<TierBody>,
    form: Option<HashForm>,
    hybrid: Option<HybridBody>,
    narrow: Narrow<'a>,
}

fn answer<C: Control>(
    state: &ServiceState<C>,
    pool: &PoolView,
    prompt: &Prompt<'_>,
    asked: Asked<'_>,
    scratch: &mut RouterScratch,
) -> Response {
    let overlaps = state.router().overlap(pool, prompt, asked.hybrid.map(Into::into), scratch);
    let now = state.control().now();
    let block_size = pool.block_size.get();
    let mut answer = Answer::new(block_size, asked.tier);
    for (worker, rank) in pool.ranks().filter(|(worker, rank)| asked.narrow.admits(worker, rank)) {
        answer.add(worker, rank, Reach::of(overlaps, rank, block_size), now);
    }
    answer.respond(asked.names, pool, asked.form.map(|form| (overlaps, form)))
}

/// How far a rank's cache reaches into a prompt, in tokens, cumulative by tier.
#[derive(Clone, Copy, Default)]
pub(super) struct Reach {
    pub(super) device: u64,
    pub(super) host: u64,
    pub(super) disk: u64,
    pub(super) left_out: bool,
}

impl Reach {
    pub(super) fn of(overlaps: &Overlaps, rank: &RankView, block_size: u32) -> Self {
        let found = overlaps.of(rank.slot);
        found.map_or_else(Self::default, |of| {
            Self::of_blocks([of.device, of.host, of.disk], of.left_out, block_size)
        })
    }

    fn of_blocks(blocks: [u32; 3], left_out: bool, block_size: u32) -> Self {
        let [device, host, disk] = blocks.map(|blocks| u64::from(blocks) * u64::from(block_size));
        Self { device, host: host.max(device), disk: disk.max(host).max(device), left_out }
    }

    fn at(&self, tier: TierBody) -> u64 {
        match tier {
            TierBody::Device => self.device,
            TierBody::Host => self.host,
            TierBody::Disk | TierBody::Any => self.disk,
        }
    }
}

/// One rank's reach with what it rests on.
#[derive(Serialize)]
struct RankOut<'a> {
    worker_id: IdOut<'a>,
    dp_rank: u32,
    device: u64,
    host: u64,
    disk: u64,
    trust: &'static str,
    may_err: &'static [&'static str],
    reasons: Vec<&'static str>,
    age_ms: Option<u64>,
    groups_left_out: bool,
}

/// A worker's reach: each tier is the furthest of its ranks.
#[derive(Default, Clone, Serialize)]
pub(super) struct InstanceOut {
    pub(super) longest_matched: u64,
    pub(super) gpu: u64,
    pub(super) dp: BTreeMap<u32, u64>,
    pub(super) cpu: u64,
    pub(super) disk: u64,
}

impl InstanceOut {
    pub(super) fn add(&mut self, dp_rank: u32, reach: Reach, longest: TierBody) {
        self.longest_matched = self.longest_matched.max(reach.at(longest));
        self.gpu = self.gpu.max(reach.device);
        self.cpu = self.cpu.max(reach.host);
        self.disk = self.disk.max(reach.disk);
        self.dp.insert(dp_rank, reach.device);
    }
}

#[derive(Serialize)]
struct MooncakeInstance<'a> {
    longest_matched: u64,
    #[serde(rename = "GPU")]
    gpu: u64,
    #[serde(rename = "DP")]
    dp: &'a BTreeMap<u32, u64>,
    #[serde(rename = "CPU")]
    cpu: u64,
    #[serde(rename = "DISK")]
    disk: u64,
    ranks: BTreeMap<u32, &'a RankOut<'a>>,
}

#[derive(Serialize)]
struct DynamoOut<'a> {
    scores: &'a BTreeMap<&'a str, BTreeMap<u32, u64>>,
    frequencies: [u64; 0],
    instances: &'a BTreeMap<&'a str, InstanceOut>,
    model_name: &'a str,
    routing_group: &'a str,
    block_size: u32,
    ranks: &'a [RankOut<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    block_hashes: Option<Vec<HashOut>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<HashOut>>,
}

/// An answer that grows rank by rank.
struct Answer<'a> {
    block_size: u32,
    tier: Option<TierBody>,
    scores: BTreeMap<&'a str, BTreeMap<u32, u64>>,
    instances: BTreeMap<&'a str, InstanceOut>,
    ranks: Vec<RankOut<'a>>,
}

impl<'a> Answer<'a> {
    fn new(block_size: u32, tier: Option<TierBody>) -> Self {
        let (scores, instances, ranks) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { block_size, tier, scores, instances, ranks }
    }

    fn add(&mut self, worker: &'a WorkerView, rank: &'a RankView, reach: Reach, now: Moment) {
        let id = &worker.spec.worker;
        let dp_rank = rank.plan.rank.dp_rank.0;
        let score = reach.at(self.tier.unwrap_or(TierBody::Device));
        if score > 0 {
            self.scores.entry(id.as_str()).or_default().insert(dp_rank, score);
        }
        if reach.disk > 0 {
            let longest = self.tier.unwrap_or(TierBody::Any);
            self.instances.entry(id.as_str()).or_default().add(dp_rank, reach, longest);
        }
        let reasons = rank.status.reasons();
        let trust = reasons.trust();
        self.ranks.push(RankOut {
            worker_id: IdOut(id, worker.spec.id_form),
            dp_rank,
            device: reach.device,
            host: reach.host,
            disk: reach.disk,
            trust: trust.name(),
            may_err: trust.may_err(),
            reasons: reasons.names().collect(),
            age_ms: age_ms(now, rank),
            groups_left_out: reach.left_out,
        });
    }

    fn respond(
        &self,
        names: PoolNames<'_>,
        pool: &PoolView,
        hashes: Option<(&Overlaps, HashForm)>,
    ) -> Response {
        if names.shape() == Shape::Mooncake {
            let mut response = Json(self.mooncake(&pool.key.group)).into_response();
            response.extensions_mut().insert(KeyedByData);
            return response;
        }
        let hashes = hashes.map(|(overlaps, form)| hashes_out(overlaps, form));
        let (block_hashes, sequence_hashes) = hashes.unzip();
        let out = DynamoOut {
            scores: &self.scores,
            frequencies: [],
            instances: &self.instances,
            model_name: &pool.key.model,
            routing_group: &pool.key.group,
            block_size: self.block_size,
            ranks: &self.ranks,
            block_hashes,
            sequence_hashes,
        };
        Json(out).into_response()
    }

    fn mooncake<'s>(&'s self, group: &'s str) -> BTreeMap<&'s str, BTreeMap<&'s str, MooncakeInstance<'s>>> {
        let instance = |of: &'s InstanceOut| MooncakeInstance {
            longest_matched: of.longest_matched,
            gpu: of.gpu,
            dp: &of.dp,
            cpu: of.cpu,
            disk: of.disk,
            ranks: BTreeMap::new(),
        };
        let mut instances: BTreeMap<_, _> =
            self.instances.iter().map(|(id, of)| (*id, instance(of))).collect();
        for rank in &self.ranks {
            if let Some(of) = instances.get_mut(rank.worker_id.0.as_str()) {
                of.ranks.insert(rank.dp_rank, rank);
            }
        }
        BTreeMap::from([(group, instances)])
    }
}

/// The prompt's local and sequence hashes in the wanted form.
pub(super) fn hashes_out(overlaps: &Overlaps, form: HashForm) -> (Vec<HashOut>, Vec<HashOut>) {
    let hashes = overlaps.hashes();
    let locals = hashes.locals().iter().map(|hash| HashOut(hash.0, form)).collect();
    let sequences = if hashes.sequences().is_empty() {
        SequenceHash::chain(hashes.locals()).map(|hash| HashOut(hash.0, form)).collect()
    } else {
        hashes.sequences().iter().map(|hash| HashOut(hash.0, form)).collect()
    };
    (locals, sequences)
}

/// Milliseconds since the rank was last heard; `None` if it never was.
pub(super) fn age_ms(now: Moment, rank: &RankView) -> Option<u64> {
    rank.status.last_heard().map(|at| now.since(at).as_micros() as u64 / 1_000)
}

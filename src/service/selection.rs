//! The body of `/select`, `/potential_loads` and `/overlap_scores`: a prompt, who may serve it, and what is
//! scored otherwise.

use std::collections::BTreeMap;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::boundary::{PoolNames, WireHash, WireId, not_null, pool_names};
use super::declaration::RoleBody;
use super::narrow::{Adapter, Narrow};
use super::problem::Problem;
use super::query::{HybridBody, KeyBody, MmBody, PromptKeys, check_lengths, content_keys, mm_items};
use crate::block::{ContentKey, ContentKeys, LocalBlockHash, SequenceHash};
use crate::fleet::Role;
use crate::ids::{DpRank, RankKey};
use crate::index::HybridRule;
use crate::routing::{AllowList, MmItem, Pin, PolicyOverride, Prompt, PromptForm, RankList, TrustCredit};

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
    pub(super) block_size: Option<u32>,
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
    /// Ours: the same as in the override.
    exclude_silent: Option<bool>,
    /// Ours: the same as in the override.
    untrusted_credit: Option<CreditBody>,
    pinned_worker: Option<PinBody>,
    affinity_target: Option<PinBody>,
    allowed_worker_ids: Option<Vec<WireId>>,
    exclude_ranks: Option<Vec<RankBody>>,
    /// How many other candidates the answer shows beside the pick.
    candidates: Option<Shown>,
    /// How many ranks the answer lists in the order in which they would be chosen.
    top_k: Option<usize>,
    routing_constraints: Option<ConstraintsBody>,
    role: Option<RoleBody>,
    pub(super) selection_id: Option<String>,
    /// Of `/reservations`: where to book, and how much.
    pub(super) worker_id: Option<WireId>,
    pub(super) dp_rank: Option<u32>,
    /// Mooncake's word for the worker.
    instance_id: Option<WireId>,
    /// Of an adapter that has no name.
    lora_id: Option<i64>,
    pub(super) effective_prefill_tokens: Option<u64>,
    pub(super) track_prefill_tokens: Option<bool>,
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
    /// The pin also holds on a rank that is silent or asleep.
    #[serde(default)]
    force: bool,
}

#[derive(Deserialize)]
struct RankBody {
    worker_id: WireId,
    dp_rank: u32,
}

/// Most ranks that a request may leave out: all those of the largest worker.
const MAX_LEFT_OUT: usize = 4096;

/// A number of candidates, or `"all"`.
#[derive(Clone, Copy)]
struct Shown(usize);

impl<'de> Deserialize<'de> for Shown {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Number;

        impl Visitor<'_> for Number {
            type Value = Shown;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number of candidates or \"all\"")
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Shown, E> {
                Ok(Shown(usize::try_from(number).unwrap_or(usize::MAX)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Shown, E> {
                match text {
                    "all" => Ok(Shown(usize::MAX)),
                    other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
                }
            }
        }

        from.deserialize_any(Number)
    }
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
    expect_booked: Option<bool>,
    exclude_silent: Option<bool>,
    untrusted_credit: Option<CreditBody>,
    shared_cache_multiplier: Option<f64>,
}

/// What overlap is worth on a rank that is not live: one number for all of them, or one by state.
#[derive(Clone, Copy)]
struct CreditBody(TrustCredit);

#[derive(Deserialize)]
struct CreditTable {
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

impl<'de> Deserialize<'de> for CreditBody {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Credit;

        impl<'de> Visitor<'de> for Credit {
            type Value = CreditBody;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number from 0 to 1, or one by trust state")
            }

            fn visit_f64<E: Error>(self, share: f64) -> Result<CreditBody, E> {
                Ok(CreditBody(TrustCredit::all(share)))
            }

            fn visit_u64<E: Error>(self, share: u64) -> Result<CreditBody, E> {
                self.visit_f64(share as f64)
            }

            fn visit_i64<E: Error>(self, share: i64) -> Result<CreditBody, E> {
                self.visit_f64(share as f64)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CreditBody, A::Error> {
                let by = CreditTable::deserialize(MapAccessDeserializer::new(map))?;
                let CreditTable { joining, repairing, may_miss, may_overcredit, silent } = by;
                Ok(CreditBody(TrustCredit { joining, repairing, may_miss, may_overcredit, silent }))
            }
        }

        from.deserialize_any(Credit)
    }
}

/// A body in the types of the inside.
pub(super) struct Parts<'a> {
    pub(super) locals: Vec<LocalBlockHash>,
    pub(super) sequences: Vec<SequenceHash>,
    pub(super) mm: Vec<MmItem<'a>>,
    pub(super) keys: Vec<ContentKeys>,
    adapter: Adapter<'a>,
    pub(super) cache_salt: Option<&'a str>,
    pub(super) policy: PolicyOverride,
    pub(super) pin: Option<Pin>,
    pub(super) affinity: Option<Pin>,
    pub(super) force_pin: bool,
    pub(super) allowed: Option<AllowList>,
    pub(super) left_out: Option<RankList>,
    pub(super) required: Vec<Box<str>>,
}

impl SelectBody {
    pub(super) fn names(&self) -> Result<PoolNames<'_>, Problem> {
        pool_names!(self)
    }

    /// The worker and rank that the question is about.
    pub(super) fn narrow(&self) -> Result<Narrow<'_>, Problem> {
        Narrow::of(self.worker_id.as_ref(), self.instance_id.as_ref(), self.dp_rank)
    }

    /// `pinned_worker`, or what narrows the choice to a worker in the words of the other routes.
    fn pin(&self) -> Result<Option<Pin>, Problem> {
        let pinned = self.pinned_worker.as_ref().map(PinBody::pin);
        let narrow = self.narrow()?;
        let differs = |field: &str| {
            let detail = format!("{field} differs from pinned_worker; give one of them");
            Err(Problem::bad_request("names_differ", detail).field(field))
        };
        match (pinned, narrow.worker) {
            (Some(pin), Some(worker)) if pin.worker != *worker => differs("worker_id"),
            (Some(pin), _) if narrow.dp_rank.is_some_and(|rank| Some(rank) != pin.dp_rank) => {
                match pin.dp_rank {
                    Some(_) => differs("dp_rank"),
                    None => Ok(Some(Pin { dp_rank: narrow.dp_rank, ..pin })),
                }
            }
            (Some(pin), _) => Ok(Some(pin)),
            (None, Some(worker)) => Ok(Some(Pin { worker: worker.clone(), dp_rank: narrow.dp_rank })),
            (None, None) if narrow.dp_rank.is_some() => {
                let detail = "dp_rank alone names no rank: give worker_id beside it";
                Err(Problem::bad_request("no_worker", detail).field("dp_rank"))
            }
            (None, None) => Ok(None),
        }
    }

    pub(super) fn hybrid(&self) -> Option<HybridRule> {
        self.hybrid.map(Into::into)
    }

    pub(super) fn role(&self) -> Option<Role> {
        self.role.map(Into::into)
    }

    pub(super) fn is_advisory(&self) -> bool {
        self.advisory == Some(true)
    }

    /// How many candidates the answer shows beside the pick; by default none.
    pub(super) fn shown(&self) -> usize {
        self.candidates.map_or(0, |shown| shown.0)
    }

    /// How many ranks the answer lists in the order in which they would be chosen.
    pub(super) fn top_k(&self) -> Option<usize> {
        self.top_k
    }

    fn left_out(&self) -> Result<Option<RankList>, Problem> {
        let Some(ranks) = &self.exclude_ranks else { return Ok(None) };
        if ranks.len() > MAX_LEFT_OUT {
            let detail = format!(
                "exclude_ranks has more than {MAX_LEFT_OUT} entries; leave out whole workers by allowed_worker_ids"
            );
            return Err(Problem::wrong_field("exclude_ranks", detail));
        }
        let key =
            |rank: &RankBody| RankKey { worker: rank.worker_id.id.clone(), dp_rank: DpRank(rank.dp_rank) };
        Ok(Some(ranks.iter().map(key).collect()))
    }

    fn tokens(&self) -> Option<&[u32]> {
        let routing = self.mm_routing_info.as_ref().map(|info| info.routing_token_ids.as_slice());
        routing.or(self.token_ids.as_deref())
    }

    /// The same in the types of the inside.
    ///
    /// `model` is the adapter that was asked for as a model, if one was.
    pub(super) fn parts<'a>(&'a self, model: Option<&'a str>) -> Result<Parts<'a>, Problem> {
        Ok(Parts { pin: self.pin()?, ..self.parts_with(model, true)? })
    }

    /// The same for a booking, which is known by its sequence hashes and needs no local ones.
    pub(super) fn parts_to_book<'a>(&'a self, model: Option<&'a str>) -> Result<Parts<'a>, Problem> {
        self.parts_with(model, false)
    }

    fn parts_with<'a>(&'a self, model: Option<&'a str>, locals_needed: bool) -> Result<Parts<'a>, Problem> {
        let adapter = Adapter::of(model, self.lora_name.as_deref(), self.lora_id)?;
        let (mut locals, mut sequences) = (Vec::new(), Vec::new());
        if self.tokens().is_none() {
            let missing = |field: &str| {
                let detail = format!("{field} is required without token_ids");
                Problem::bad_request("no_prompt", detail).field(field)
            };
            let blocks = match self.block_hashes.as_deref() {
                None if locals_needed => return Err(missing("block_hashes")),
                blocks => blocks,
            };
            let chain = self.sequence_hashes.as_deref().ok_or_else(|| missing("sequence_hashes"))?;
            self.isl_tokens.ok_or_else(|| missing("isl_tokens"))?;
            check_lengths(("block_hashes", blocks), ("sequence_hashes", Some(chain)))?;
            locals = WireHash::ints(blocks.unwrap_or_default(), "block_hashes")?
                .into_iter()
                .map(LocalBlockHash)
                .collect();
            sequences = WireHash::ints(chain, "sequence_hashes")?.into_iter().map(SequenceHash).collect();
        }
        let PromptKeys { mut keys, cache_salt } =
            content_keys(&self.extra_keys, adapter.name, self.cache_salt.as_deref())?;
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
            adapter,
            cache_salt,
            policy: self.policy()?,
            pin: None,
            force_pin: self.pinned_worker.as_ref().is_some_and(|pin| pin.force),
            left_out: self.left_out()?,
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
            expect_booked: over.expect_booked,
            preferred_taints: labels.map(|labels| {
                labels.iter().map(|(label, weight)| (label.as_str().into(), *weight)).collect()
            }),
            untrusted_credit: self.untrusted_credit.or(over.untrusted_credit).map(|credit| credit.0),
            exclude_silent: self.exclude_silent.or(over.exclude_silent),
        })
    }

    pub(super) fn prompt<'a>(&'a self, parts: &'a Parts<'a>) -> Prompt<'a> {
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
            lora_name: parts.adapter.name,
            lora_id: parts.adapter.number,
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

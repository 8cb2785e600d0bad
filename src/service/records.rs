//! Workers as they were posted to `/workers`, complete or not.
//!
//! The fleet knows only workers that can be listened to. What a client posted in pieces, and the fields that
//! mean nothing to routing but are answered again, stand here.

use std::collections::{BTreeMap, BTreeSet};

use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::boundary::{WireId, not_null};
use super::problem::Problem;
use super::state::DEFAULT_MODEL;
use crate::block::{Announcements, BlockSize};
use crate::fleet::{
    Balance, CapacitySpec, DeclareError, DpMode, Endpoints, EngineStyle, EventsFrom, IdForm, PoolKey, Ranks,
    Role, WorkerSpec,
};
use crate::ids::{DpRank, WorkerId};

/// A worker as posted. A field that is missing or null is unknown, and a patch leaves it as it was.
#[derive(Clone, Default, Deserialize)]
pub(super) struct WorkerBody {
    pub(super) worker_id: Option<WireId>,
    pub(super) model_name: Option<String>,
    #[serde(default, deserialize_with = "not_null")]
    pub(super) routing_group: Option<String>,
    pub(super) model: Option<String>,
    pub(super) modelname: Option<String>,
    pub(super) tenant_id: Option<String>,
    pub(super) endpoint: Option<String>,
    pub(super) kv_events_endpoint: Option<String>,
    pub(super) kv_events_endpoints: Option<BTreeMap<u32, String>>,
    /// Ours: every rank's port is this one plus its global rank.
    pub(super) kv_events_base_endpoint: Option<String>,
    pub(super) replay_endpoint: Option<String>,
    /// Ours.
    pub(super) replay_endpoints: Option<BTreeMap<u32, String>>,
    pub(super) block_size: Option<u32>,
    pub(super) data_parallel_start_rank: Option<u32>,
    pub(super) data_parallel_size: Option<u32>,
    pub(super) max_num_batched_tokens: Option<u64>,
    pub(super) total_kv_blocks: Option<u64>,
    pub(super) stable_routing_id: Option<String>,
    pub(super) is_eagle: Option<bool>,
    pub(super) taints: Option<BTreeSet<String>>,
    pub(super) topology_domains: Option<BTreeMap<String, String>>,
    pub(super) kv_transfer_domain: Option<String>,
    pub(super) kv_transfer_enforcement: Option<String>,
    pub(super) kv_transfer_preferred_weight: Option<f64>,
    /// Ours, as are those that follow.
    pub(super) capacity: Option<CapacityBody>,
    pub(super) max_running_requests: Option<u64>,
    pub(super) role: Option<RoleBody>,
    pub(super) balance: Option<BalanceBody>,
    pub(super) engine: Option<EngineBody>,
    pub(super) dp_mode: Option<DpModeBody>,
    pub(super) events: Option<EventsBody>,
    pub(super) announcements: Option<AnnouncementsBody>,
    pub(super) topic: Option<String>,
}

/// KV capacity in blocks, with what it speaks for.
#[derive(Clone, Deserialize)]
#[serde(tag = "scope", rename_all = "snake_case")]
pub(super) enum CapacityBody {
    Aggregate { blocks: u64 },
    PerRank { blocks: u64 },
    PerRankList { blocks: Vec<u64> },
    WorkerShared { blocks: u64 },
}

/// What a worker may be selected for, in the words of the wire.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RoleBody {
    Prefill,
    Decode,
    Both,
}

impl From<RoleBody> for Role {
    fn from(role: RoleBody) -> Self {
        match role {
            RoleBody::Prefill => Self::Prefill,
            RoleBody::Decode => Self::Decode,
            RoleBody::Both => Self::Both,
        }
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum BalanceBody {
    Internal,
    Hybrid,
    External,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) enum EngineBody {
    #[serde(rename = "vllm", alias = "vLLM")]
    Vllm,
    #[serde(rename = "sglang", alias = "SGLang")]
    Sglang,
    #[serde(other)]
    Unknown,
}

impl From<EngineBody> for EngineStyle {
    fn from(engine: EngineBody) -> Self {
        match engine {
            EngineBody::Vllm => Self::Vllm,
            EngineBody::Sglang => Self::Sglang,
            EngineBody::Unknown => Self::Unknown,
        }
    }
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum DpModeBody {
    Pure,
    Attention,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum EventsBody {
    /// Over ZMQ.
    Zmq,
    /// The worker publishes none: what it holds is unknown.
    None,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AnnouncementsBody {
    Counted,
    Set,
}

/// Longest text in a record; a URL or a label is far shorter, and records outlive their request.
const MAX_TEXT: usize = 512;

/// Most labels of one worker: each is compared with each label that a request prefers.
const MAX_LABELS: usize = 64;

/// Most missing endpoints that are listed one by one.
const MAX_REASONS: usize = 16;

impl WorkerBody {
    /// This record with what `patch` gives laid upon it.
    pub(super) fn patched(&self, patch: Self) -> Self {
        macro_rules! laid {
            ($($field:ident),* $(,)?) => {
                Self {
                    worker_id: self.worker_id.clone(),
                    $($field: patch.$field.or_else(|| self.$field.clone()),)*
                }
            };
        }
        laid!(
            model_name,
            routing_group,
            model,
            modelname,
            tenant_id,
            endpoint,
            kv_events_endpoint,
            kv_events_endpoints,
            kv_events_base_endpoint,
            replay_endpoint,
            replay_endpoints,
            block_size,
            data_parallel_start_rank,
            data_parallel_size,
            max_num_batched_tokens,
            total_kv_blocks,
            stable_routing_id,
            is_eagle,
            taints,
            topology_domains,
            kv_transfer_domain,
            kv_transfer_enforcement,
            kv_transfer_preferred_weight,
            capacity,
            max_running_requests,
            role,
            balance,
            engine,
            dp_mode,
            events,
            announcements,
            topic,
        )
    }

    /// The pool that it is for.
    pub(super) fn pool(&self) -> PoolKey {
        // A body whose names contradict each other was refused when it came.
        let names = super::boundary::pool_names!(self).unwrap_or_default();
        PoolKey::new(names.model().unwrap_or(DEFAULT_MODEL), names.group())
    }

    /// Refuses what would make the record itself a burden.
    pub(super) fn check_sizes(&self) -> Result<(), Problem> {
        super::boundary::pool_names!(self)?;
        let texts = [
            ("model_name", &self.model_name),
            ("routing_group", &self.routing_group),
            ("model", &self.model),
            ("modelname", &self.modelname),
            ("tenant_id", &self.tenant_id),
            ("endpoint", &self.endpoint),
            ("kv_events_endpoint", &self.kv_events_endpoint),
            ("kv_events_base_endpoint", &self.kv_events_base_endpoint),
            ("replay_endpoint", &self.replay_endpoint),
            ("stable_routing_id", &self.stable_routing_id),
            ("kv_transfer_domain", &self.kv_transfer_domain),
            ("kv_transfer_enforcement", &self.kv_transfer_enforcement),
            ("topic", &self.topic),
        ];
        let too_long = |text: &String| text.len() > MAX_TEXT;
        let long =
            texts.iter().find(|(_, text)| text.as_ref().is_some_and(too_long)).map(|(field, _)| *field);
        let labels = self.taints.as_ref();
        let domains = self.topology_domains.as_ref();
        let long_domain = |(key, value): (&String, &String)| too_long(key) || too_long(value);
        let rank_lists = [&self.kv_events_endpoints, &self.replay_endpoints];
        let long_list = |list: &&Option<BTreeMap<u32, String>>| {
            list.as_ref().is_some_and(|list| list.len() > Ranks::MAX as usize || list.values().any(too_long))
        };
        let field = match () {
            () if long.is_some() => long,
            () if labels.is_some_and(|set| set.len() > MAX_LABELS || set.iter().any(too_long)) => {
                Some("taints")
            }
            () if domains.is_some_and(|map| map.len() > MAX_LABELS || map.iter().any(long_domain)) => {
                Some("topology_domains")
            }
            () if rank_lists.iter().any(long_list) => Some("kv_events_endpoints"),
            () => None,
        };
        field.map_or(Ok(()), |field| {
            Err(Problem::bad_request("too_large", format!("{field} is longer than any that is used"))
                .field(field))
        })
    }

    /// What the fleet is to be told, or what is missing for it.
    ///
    /// # Errors
    ///
    /// What can never be right, whatever is added later.
    pub(super) fn readiness(&self, id: &WireId) -> Result<Readiness, Problem> {
        let called = |field| match field {
            "size" => "data_parallel_size",
            "endpoint" if self.kv_events_endpoints.is_some() => "kv_events_endpoints",
            "endpoint" => "kv_events_endpoint",
            field => field,
        };
        let invalid = |error: DeclareError| Problem::declare(&error, called);
        let (start, size) =
            (self.data_parallel_start_rank.unwrap_or(0), self.data_parallel_size.unwrap_or(1));
        let ranks = Ranks::range(start, size).map_err(invalid)?;
        let pool = self.pool();
        if pool.model.is_empty() {
            return Err(invalid(DeclareError::EmptyModel));
        }
        let block_size = self.block_size.map(block_size).transpose()?;
        let events = self.events_from(&ranks)?;
        let mut missing = Vec::new();
        if self.endpoint.as_ref().is_none_or(|endpoint| endpoint.is_empty()) {
            missing.push("endpoint is required".to_owned());
        }
        let (Some(block_size), Some(events)) = (block_size, events) else {
            if block_size.is_none() {
                missing.push("block_size must be greater than 0".to_owned());
            }
            missing.extend(self.ranks_without_events(&ranks));
            return Ok(Readiness::Incomplete(missing));
        };
        if !missing.is_empty() {
            return Ok(Readiness::Incomplete(missing));
        }
        let capacity = self.capacity(&ranks).transpose().map_err(invalid)?;
        Ok(Readiness::Complete(Box::new(WorkerSpec {
            id_form: id.form,
            events,
            announcements: match self.announcements {
                Some(AnnouncementsBody::Set) => Announcements::Set,
                Some(AnnouncementsBody::Counted) | None => Announcements::Counted,
            },
            role: self.role.map(Into::into).unwrap_or_default(),
            balance: match self.balance {
                Some(BalanceBody::Internal) => Balance::Internal,
                Some(BalanceBody::Hybrid) => Balance::Hybrid,
                Some(BalanceBody::External) | None => Balance::External,
            },
            engine: self.engine.map(Into::into).unwrap_or_default(),
            http_endpoint: self.endpoint.clone(),
            capacity,
            dp_mode: match self.dp_mode {
                Some(DpModeBody::Attention) => DpMode::Attention,
                Some(DpModeBody::Pure) | None => DpMode::Pure,
            },
            max_running_requests: self.max_running_requests,
            max_num_batched_tokens: self.max_num_batched_tokens,
            taints: self.taints.clone().unwrap_or_default(),
            ..WorkerSpec::new(id.id.clone(), pool, block_size, ranks)
        })))
    }

    /// `None` while a rank has no endpoint.
    fn events_from(&self, ranks: &Ranks) -> Result<Option<EventsFrom>, Problem> {
        if self.events == Some(EventsBody::None) {
            return Ok(Some(EventsFrom::None));
        }
        check_blank("kv_events_endpoint", self.kv_events_endpoint.as_deref())?;
        check_blank("kv_events_base_endpoint", self.kv_events_base_endpoint.as_deref())?;
        check_blank("replay_endpoint", self.replay_endpoint.as_deref())?;
        if self.ranks_without_events(ranks).next().is_some() {
            return Ok(None);
        }
        let single = (ranks.len() == 1).then(|| ranks.start());
        let own = |list: &Option<BTreeMap<u32, String>>, one: &Option<String>| {
            let one = one.iter().filter_map(|one| Some((single?, one.clone())));
            let list = list.iter().flatten().map(|(rank, at)| (DpRank(*rank), at.clone()));
            // What is given for the rank by its number wins.
            one.chain(list).collect::<BTreeMap<_, _>>()
        };
        let endpoints = Endpoints {
            base: self.kv_events_base_endpoint.clone(),
            per_rank: own(&self.kv_events_endpoints, &self.kv_events_endpoint),
        };
        let per_rank = own(&self.replay_endpoints, &self.replay_endpoint);
        // For several ranks the one endpoint is a base, as engines offset it.
        let base = if single.is_none() { self.replay_endpoint.clone() } else { None };
        let replay = (base.is_some() || !per_rank.is_empty()).then_some(Endpoints { base, per_rank });
        let topic = self.topic.clone().unwrap_or_default();
        Ok(Some(EventsFrom::Zmq { endpoints, replay, topic }))
    }

    fn ranks_without_events<'a>(&'a self, ranks: &'a Ranks) -> impl Iterator<Item = String> + 'a {
        let all = self.events == Some(EventsBody::None)
            || self.kv_events_base_endpoint.is_some()
            || (self.kv_events_endpoint.is_some() && ranks.len() == 1);
        let listed = |rank: &DpRank| {
            self.kv_events_endpoints.as_ref().is_some_and(|listed| listed.contains_key(&rank.0))
        };
        let without = ranks.iter().filter(move |rank| !all && !listed(rank)).take(MAX_REASONS);
        without.map(|rank| format!("kv_events endpoint is required for dp_rank {rank}"))
    }

    /// `total_kv_blocks` is the worker's: its ranks have a share each.
    fn capacity(&self, ranks: &Ranks) -> Option<Result<CapacitySpec, DeclareError>> {
        Some(match self.capacity.as_ref() {
            None => Ok(CapacitySpec::aggregate(self.total_kv_blocks?)),
            Some(CapacityBody::Aggregate { blocks }) => Ok(CapacitySpec::aggregate(*blocks)),
            Some(CapacityBody::PerRank { blocks }) => Ok(CapacitySpec::per_rank(*blocks)),
            Some(CapacityBody::PerRankList { blocks }) => CapacitySpec::per_rank_list(ranks, blocks),
            Some(CapacityBody::WorkerShared { blocks }) => Ok(CapacitySpec::worker_shared(*blocks)),
        })
    }
}

/// A block size, which is not 0.
pub(super) fn block_size(tokens: u32) -> Result<BlockSize, Problem> {
    let zero = || {
        Problem::bad_request("invalid_declaration", "block_size must be greater than 0").field("block_size")
    };
    BlockSize::new(tokens).ok_or_else(zero)
}

/// Blanks around an endpoint are no part of any address, and hide a typing error.
pub(super) fn check_blank(field: &'static str, endpoint: Option<&str>) -> Result<(), Problem> {
    match endpoint {
        Some(at) if at.trim() != at => {
            let detail = format!("{field} begins or ends with a blank");
            Err(Problem::bad_request("invalid_declaration", detail).field(field))
        }
        _ => Ok(()),
    }
}

/// Whether a record can be declared.
pub(super) enum Readiness {
    /// It can.
    Complete(Box<WorkerSpec>),
    /// These things are missing.
    Incomplete(Vec<String>),
}

/// A record with what became of it.
#[derive(Clone)]
pub(super) struct Record {
    pub(super) body: WorkerBody,
    pub(super) form: IdForm,
    /// What is missing; empty if the fleet has the worker.
    pub(super) missing: Vec<String>,
}

/// All records, and the order in which they are changed.
#[derive(Default)]
pub(super) struct Records {
    by_id: Mutex<BTreeMap<WorkerId, Record>>,
    /// Held over a whole change, so that two patches of one worker cannot lose each other.
    changing: tokio::sync::Mutex<()>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Records").finish_non_exhaustive()
    }
}

impl Records {
    /// Most incomplete workers: one posts its pieces within seconds, so this many are not waiting honestly.
    pub(super) const MAX_INCOMPLETE: usize = 1_024;

    /// Waits for the change before.
    pub(super) async fn change(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    pub(super) fn get(&self, id: &WorkerId) -> Option<Record> {
        self.by_id.lock().get(id).cloned()
    }

    pub(super) fn put(&self, id: WorkerId, record: Record) -> Result<(), Problem> {
        let mut by_id = self.by_id.lock();
        let waiting = |records: &BTreeMap<_, Record>| {
            records.values().filter(|record| !record.missing.is_empty()).count()
        };
        if !record.missing.is_empty() && !by_id.contains_key(&id) && waiting(&by_id) >= Self::MAX_INCOMPLETE {
            let detail = format!("{} workers are incomplete already", Self::MAX_INCOMPLETE);
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_incomplete", detail));
        }
        by_id.insert(id, record);
        Ok(())
    }

    pub(super) fn remove(&self, id: &WorkerId) -> Option<Record> {
        self.by_id.lock().remove(id)
    }

    /// The incomplete ones.
    pub(super) fn incomplete(&self) -> Vec<(WorkerId, Record)> {
        let by_id = self.by_id.lock();
        let incomplete = by_id.iter().filter(|(_, record)| !record.missing.is_empty());
        incomplete.map(|(id, record)| (id.clone(), record.clone())).collect()
    }
}

/// The fields of a worker that are answered as they were posted.
#[derive(Serialize)]
pub(super) struct PostedOut<'a> {
    endpoint: Option<&'a str>,
    kv_events_endpoint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_events_endpoints: Option<&'a BTreeMap<u32, String>>,
    replay_endpoint: Option<&'a str>,
    data_parallel_start_rank: Option<u32>,
    data_parallel_size: Option<u32>,
    max_num_batched_tokens: Option<u64>,
    total_kv_blocks: Option<u64>,
    stable_routing_id: Option<&'a str>,
    is_eagle: Option<bool>,
    taints: Vec<&'a str>,
    topology_domains: Option<&'a BTreeMap<String, String>>,
    kv_transfer_domain: Option<&'a str>,
    kv_transfer_enforcement: Option<&'a str>,
    kv_transfer_preferred_weight: Option<f64>,
}

static NO_DOMAINS: BTreeMap<String, String> = BTreeMap::new();

impl<'a> PostedOut<'a> {
    pub(super) fn of(body: &'a WorkerBody) -> Self {
        Self {
            endpoint: body.endpoint.as_deref(),
            kv_events_endpoint: body.kv_events_endpoint.as_deref(),
            kv_events_endpoints: body.kv_events_endpoints.as_ref(),
            replay_endpoint: body.replay_endpoint.as_deref(),
            data_parallel_start_rank: body.data_parallel_start_rank,
            data_parallel_size: body.data_parallel_size,
            max_num_batched_tokens: body.max_num_batched_tokens,
            total_kv_blocks: body.total_kv_blocks,
            stable_routing_id: body.stable_routing_id.as_deref(),
            is_eagle: body.is_eagle,
            taints: body.taints.iter().flatten().map(String::as_str).collect(),
            topology_domains: Some(body.topology_domains.as_ref().unwrap_or(&NO_DOMAINS)),
            kv_transfer_domain: body.kv_transfer_domain.as_deref(),
            kv_transfer_enforcement: body.kv_transfer_enforcement.as_deref(),
            kv_transfer_preferred_weight: body.kv_transfer_preferred_weight,
        }
    }

    /// The same fields of a worker that was not posted here but registered or configured.
    pub(super) fn of_spec(spec: &'a WorkerSpec) -> Self {
        Self {
            endpoint: spec.http_endpoint.as_deref(),
            kv_events_endpoint: None,
            kv_events_endpoints: None,
            replay_endpoint: None,
            data_parallel_start_rank: Some(spec.ranks.start().0),
            data_parallel_size: Some(spec.ranks.len()),
            max_num_batched_tokens: spec.max_num_batched_tokens,
            total_kv_blocks: None,
            stable_routing_id: None,
            is_eagle: None,
            taints: spec.taints.iter().map(String::as_str).collect(),
            topology_domains: Some(&NO_DOMAINS),
            kv_transfer_domain: None,
            kv_transfer_enforcement: None,
            kv_transfer_preferred_weight: None,
        }
    }
}

//! Workers as they were posted to `/workers`, complete or not.
//!
//! The fleet knows only workers that can be listened to. What a client posted in pieces, and the fields that
//! mean nothing to routing but are answered again, stand here.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use parking_lot::Mutex;
use serde::Serialize;

use super::declaration::WorkerFields;
use super::problem::Problem;
use crate::fleet::{IdForm, WorkerSpec};
use crate::ids::WorkerId;

/// A record with what became of it.
#[derive(Clone)]
pub(super) struct Record {
    pub(super) body: WorkerFields,
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
    max_running_requests: Option<u64>,
    loads: Option<&'a str>,
    adapters: Vec<&'a str>,
}

static NO_DOMAINS: BTreeMap<String, String> = BTreeMap::new();

impl<'a> PostedOut<'a> {
    pub(super) fn of(body: &'a WorkerFields) -> Self {
        Self {
            endpoint: body.endpoint.as_deref().or(body.http_endpoint.as_deref()),
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
            max_running_requests: body.max_running_requests,
            loads: body.loads.as_deref(),
            adapters: body.adapters.iter().flatten().map(String::as_str).collect(),
        }
    }

    /// The same fields of a worker that was not posted here but registered or configured.
    pub(super) fn of_spec(spec: &'a WorkerSpec) -> Self {
        Self {
            endpoint: spec.http_endpoint.as_deref(),
            kv_events_endpoint: None,
            kv_events_endpoints: None,
            replay_endpoint: None,
            data_parallel_start_rank: spec.ranks.said_start().map(|start| start.0),
            data_parallel_size: Some(spec.ranks.len()),
            max_num_batched_tokens: spec.max_num_batched_tokens,
            total_kv_blocks: None,
            stable_routing_id: None,
            is_eagle: spec.is_eagle,
            taints: spec.taints.iter().map(String::as_str).collect(),
            topology_domains: Some(&NO_DOMAINS),
            kv_transfer_domain: None,
            kv_transfer_enforcement: None,
            kv_transfer_preferred_weight: None,
            max_running_requests: spec.max_running_requests,
            loads: spec.loads.as_deref(),
            adapters: spec.adapters.iter().map(String::as_str).collect(),
        }
    }
}

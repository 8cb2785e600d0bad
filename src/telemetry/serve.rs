//! `GetLoads` as we answer it: every declared rank with a fresh report, by its global number.
//!
//! The rules are those that we hold others to: the filter works by presence, a rank that nobody manages is
//! `INVALID_ARGUMENT`, a managed rank without a report has no entry, and nothing is made up. Ranks of several
//! workers may have equal numbers: every entry names its worker, and a filter that could mean two is refused.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::TcpListener;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::wire::{
    self, GetLoadsRequest, GetLoadsResponse, LoadsSource, SchedulerLoad, Servicer, entry_bytes,
};
use crate::ids::{DpRank, Moment, RankKey, WorkerId};
use crate::indexer::{FleetView, PoolView, View};
use crate::load::RankLoad;

/// Names the model whose ranks are asked for, where there are several: ranks of different pools may have one
/// number.
pub const MODEL_KEY: &str = "x-rankwise-model";

/// Answers `GetLoads` under vLLM's and SGLang's names, from `view`, whose load table's clock is `now`, until
/// `shutdown` completes.
///
/// # Errors
///
/// Those of accepting connections.
pub async fn serve_loads(
    listener: TcpListener,
    view: View,
    now: impl Fn() -> Moment + Send + Sync + 'static,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), tonic::transport::Error> {
    let source = Source { view, now: Arc::new(now) };
    wire::serve(listener, &[Servicer::Vllm, Servicer::Sglang], source, shutdown).await
}

#[derive(Clone)]
struct Source {
    view: View,
    now: Arc<dyn Fn() -> Moment + Send + Sync>,
}

impl LoadsSource for Source {
    async fn get_loads(
        &self,
        servicer: Servicer,
        request: GetLoadsRequest,
        metadata: MetadataMap,
    ) -> Result<GetLoadsResponse, Status> {
        let fleet = self.view.fleet();
        let worker = request.worker.as_deref().filter(|worker| !worker.is_empty()).map(WorkerId::new);
        let asked = Asked {
            pools: pools(&fleet, &metadata, worker.as_ref(), request.dp_rank)?,
            worker,
            dp_rank: None,
        };
        let asked = match request.dp_rank {
            Some(rank) => asked.only(rank)?,
            None => asked,
        };
        let loads = self.loads(servicer, &asked);
        Ok(GetLoadsResponse {
            timestamp: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // At most as many as a process can have sockets.
            dp_rank_count: i32::try_from(loads.len()).unwrap_or(i32::MAX),
            loads,
        })
    }
}

impl Source {
    fn loads(&self, servicer: Servicer, asked: &Asked<'_>) -> Vec<Bytes> {
        let now = (self.now)();
        let table = self.view.loads().lock();
        let fresh = asked.ranks().filter_map(|rank| {
            let (load, _) = table.fresh(now, rank)?;
            Some(((rank.dp_rank, &rank.worker), encode(rank, load, servicer)))
        });
        // By rank, as engines list them; equal numbers are told apart by their worker.
        fresh.collect::<BTreeMap<_, _>>().into_values().collect()
    }
}

/// What is asked for.
struct Asked<'f> {
    pools: Vec<&'f Arc<PoolView>>,
    worker: Option<WorkerId>,
    dp_rank: Option<DpRank>,
}

impl Asked<'_> {
    fn ranks(&self) -> impl Iterator<Item = &RankKey> {
        let ranks = self.pools.iter().flat_map(|pool| pool.ranks()).map(|(_, rank)| &rank.plan.rank);
        let ranks = ranks.filter(|rank| self.worker.as_ref().is_none_or(|worker| *worker == rank.worker));
        ranks.filter(|rank| self.dp_rank.is_none_or(|wanted| rank.dp_rank == wanted))
    }

    /// The same for one rank, of which there must be one.
    fn only(self, rank: i32) -> Result<Self, Status> {
        let unmanaged = || Status::invalid_argument(format!("dp_rank {rank} is not managed here"));
        let dp_rank = Some(DpRank(u32::try_from(rank).map_err(|_| unmanaged())?));
        let asked = Self { dp_rank, ..self };
        match asked.ranks().count() {
            0 => Err(unmanaged()),
            1 => Ok(asked),
            several => Err(Status::invalid_argument(format!(
                "dp_rank {rank} is a rank of {several} workers; name one in the field `worker` (number 100)"
            ))),
        }
    }
}

/// The pools that are asked for: the worker's, the one that the metadata name, or the only one.
fn pools<'f>(
    fleet: &'f FleetView,
    metadata: &MetadataMap,
    worker: Option<&WorkerId>,
    dp_rank: Option<i32>,
) -> Result<Vec<&'f Arc<PoolView>>, Status> {
    if let Some(worker) = worker {
        let unknown = || Status::invalid_argument(format!("worker {worker:?} is not managed here"));
        return Ok(vec![fleet.pool_of(worker).ok_or_else(unknown)?]);
    }
    let model = metadata.get(MODEL_KEY).map(|value| value.to_str());
    match model {
        Some(Ok(model)) => {
            let pool = fleet.resolve(model, None);
            Ok(vec![pool.ok_or_else(|| Status::not_found(format!("model {model:?} is not served here")))?])
        }
        Some(Err(_)) => Err(Status::invalid_argument(format!("{MODEL_KEY} is not text"))),
        // One rank may be the only one of its number; if not, that is said.
        None if fleet.pools().count() > 1 && dp_rank.is_none() => {
            let detail = format!("several models are served here; name one in the metadata as {MODEL_KEY}");
            Err(Status::failed_precondition(detail))
        }
        None => Ok(fleet.pools().collect()),
    }
}

/// What the report said, and no field more.
fn encode(rank: &RankKey, load: &RankLoad, servicer: Servicer) -> Bytes {
    let number = |count: Option<u64>| count.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    let message = SchedulerLoad {
        dp_rank: Some(rank.dp_rank.0.into()),
        num_running_reqs: number(load.num_running_reqs),
        num_waiting_reqs: number(load.num_waiting_reqs),
        num_used_tokens: number(load.num_used_tokens),
        max_total_num_tokens: number(load.max_total_num_tokens),
        token_usage: load.token_usage,
        max_running_requests: number(load.max_running_requests),
        worker: Some(rank.worker.as_str().to_owned()),
    };
    entry_bytes(servicer, &message, number(load.queued_uncached_tokens))
}

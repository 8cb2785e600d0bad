//! `GetLoads` as we answer it: every declared rank with a fresh report, by its global number.
//!
//! The rules are those that we hold others to: the filter works by presence, a rank that nobody manages is
//! `INVALID_ARGUMENT`, a managed rank without a report has no entry, and nothing is made up.

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
use crate::ids::Moment;
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
        let pools = pools(&fleet, &metadata)?;
        let wanted = request.dp_rank.map(|rank| wanted(&pools, rank)).transpose()?;
        let loads = self.loads(servicer, &pools, wanted);
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
    fn loads(&self, servicer: Servicer, pools: &[&Arc<PoolView>], wanted: Option<u32>) -> Vec<Bytes> {
        let now = (self.now)();
        let table = self.view.loads().lock();
        let ranks = pools.iter().flat_map(|pool| pool.ranks()).map(|(_, rank)| &rank.plan.rank);
        let asked = ranks.filter(|rank| wanted.is_none_or(|wanted| rank.dp_rank.0 == wanted));
        let fresh = asked.filter_map(|rank| {
            let (load, _) = table.fresh(now, rank)?;
            Some((rank.dp_rank.0, encode(rank.dp_rank.0, load, servicer)))
        });
        // By rank, as engines list them.
        fresh.collect::<BTreeMap<_, _>>().into_values().collect()
    }
}

/// The pools that are asked for: the one that the metadata name, or the only one.
fn pools<'f>(fleet: &'f FleetView, metadata: &MetadataMap) -> Result<Vec<&'f Arc<PoolView>>, Status> {
    let model = metadata.get(MODEL_KEY).map(|value| value.to_str());
    match model {
        Some(Ok(model)) => {
            let pool = fleet.resolve(model, None);
            Ok(vec![pool.ok_or_else(|| Status::not_found(format!("model {model:?} is not served here")))?])
        }
        Some(Err(_)) => Err(Status::invalid_argument(format!("{MODEL_KEY} is not text"))),
        None if fleet.pools().count() > 1 => {
            let detail = format!("several models are served here; name one in the metadata as {MODEL_KEY}");
            Err(Status::failed_precondition(detail))
        }
        None => Ok(fleet.pools().collect()),
    }
}

fn wanted(pools: &[&Arc<PoolView>], rank: i32) -> Result<u32, Status> {
    let declared = |wanted: &u32| {
        let mut ranks = pools.iter().flat_map(|pool| pool.ranks());
        ranks.any(|(_, rank)| rank.plan.rank.dp_rank.0 == *wanted)
    };
    u32::try_from(rank)
        .ok()
        .filter(declared)
        .ok_or_else(|| Status::invalid_argument(format!("dp_rank {rank} is not managed here")))
}

/// What the report said, and no field more.
fn encode(dp_rank: u32, load: &RankLoad, servicer: Servicer) -> Bytes {
    let number = |count: Option<u64>| count.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    let message = SchedulerLoad {
        dp_rank: Some(dp_rank.into()),
        num_running_reqs: number(load.num_running_reqs),
        num_waiting_reqs: number(load.num_waiting_reqs),
        num_used_tokens: number(load.num_used_tokens),
        max_total_num_tokens: number(load.max_total_num_tokens),
        token_usage: load.token_usage,
    };
    entry_bytes(servicer, &message, number(load.queued_uncached_tokens))
}

//! `GetLoads` as we answer it: every declared rank with a fresh report, by its global number.
//!
//! The rules are those that we hold others to: the filter works by presence, a rank that nobody manages is
//! `INVALID_ARGUMENT`, a managed rank without a report has no entry, and nothing is made up.

use std::collections::BTreeMap;
use std::future::{Future, Ready, ready};
use std::sync::Arc;

use axum::extract::Request as HttpRequest;
use axum::routing::post;
use bytes::Bytes;
use prost::Message;
use tokio::net::TcpListener;
use tonic::metadata::MetadataMap;
use tonic::server::{Grpc, UnaryService};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use super::wire::{
    BytesCodec, GetLoadsRequest, GetLoadsResponse, SchedulerLoad, Servicer, SglangQueued, VllmQueued,
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
    let routes =
        [Servicer::Vllm, Servicer::Sglang].into_iter().fold(axum::Router::new(), |routes, servicer| {
            let method = Method { source: source.clone(), servicer };
            let answer = move |request: HttpRequest| {
                let method = method.clone();
                async move { Grpc::new(BytesCodec).unary(method, request).await }
            };
            routes.route(servicer.path(), post(answer))
        });
    Server::builder()
        .add_routes(routes.into())
        .serve_with_incoming_shutdown(TcpIncoming::from(listener), shutdown)
        .await
}

#[derive(Clone)]
struct Source {
    view: View,
    now: Arc<dyn Fn() -> Moment + Send + Sync>,
}

#[derive(Clone)]
struct Method {
    source: Source,
    servicer: Servicer,
}

impl UnaryService<Bytes> for Method {
    type Response = Bytes;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        ready(self.answer(&request).map(Response::new))
    }
}

impl Method {
    fn answer(&self, request: &Request<Bytes>) -> Result<Bytes, Status> {
        let asked = GetLoadsRequest::decode(request.get_ref().clone())
            .map_err(|_| Status::invalid_argument("the request is no GetLoadsRequest"))?;
        let fleet = self.source.view.fleet();
        let pools = pools(&fleet, request.metadata())?;
        let wanted = asked.dp_rank.map(|rank| wanted(&pools, rank)).transpose()?;
        let loads = self.loads(&pools, wanted);
        let answer = GetLoadsResponse {
            timestamp: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            // At most as many as a process can have sockets.
            dp_rank_count: i32::try_from(loads.len()).unwrap_or(i32::MAX),
            loads,
        };
        Ok(answer.encode_to_vec().into())
    }

    fn loads(&self, pools: &[&Arc<PoolView>], wanted: Option<u32>) -> Vec<Bytes> {
        let now = (self.source.now)();
        let table = self.source.view.loads().lock();
        let ranks = pools.iter().flat_map(|pool| pool.ranks()).map(|(_, rank)| &rank.plan.rank);
        let asked = ranks.filter(|rank| wanted.is_none_or(|wanted| rank.dp_rank.0 == wanted));
        let fresh = asked.filter_map(|rank| {
            let (load, _) = table.fresh(now, rank)?;
            Some((rank.dp_rank.0, encode(rank.dp_rank.0, load, self.servicer)))
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
    let mut bytes = message.encode_to_vec();
    let queued_uncached_tokens = number(load.queued_uncached_tokens);
    // Fields of one message may follow each other in any order.
    bytes.extend(match servicer {
        Servicer::Vllm => VllmQueued { queued_uncached_tokens }.encode_to_vec(),
        Servicer::Sglang => SglangQueued { queued_uncached_tokens }.encode_to_vec(),
    });
    bytes.into()
}

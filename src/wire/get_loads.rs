//! The messages of `GetLoads`, by hand and by number: `loads.proto` shows them. No build script, no compiler.
//! And a server for them, whatever they are answered from.

use std::future::Future;
use std::pin::Pin;

use axum::extract::Request as HttpRequest;
use axum::routing::post;
use bytes::{Buf, BufMut, Bytes};
use prost::Message;
use tokio::net::TcpListener;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::server::{Grpc, UnaryService};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::listener::Limited;
use crate::load::answer::MAX_ENTRIES;
use crate::load::timestamp::of_text;
use crate::load::{
    LoadAnswer, LoadEntry, NotOffered, Outcome, RawNumber, RawRankLoad, RollupEntry, TryAgain,
};

/// Which servicer is asked: their messages differ in one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Servicer {
    /// vLLM's.
    Vllm,
    /// SGLang's.
    Sglang,
}

impl Servicer {
    /// The method's path.
    pub fn path(self) -> &'static str {
        match self {
            Self::Vllm => "/vllm.grpc.engine.VllmEngine/GetLoads",
            Self::Sglang => "/sglang.grpc.scheduler.SglangScheduler/GetLoads",
        }
    }
}

/// The question.
#[derive(Clone, PartialEq, Message)]
pub struct GetLoadsRequest {
    /// The only rank that is wanted; absent is all, and 0 is rank 0.
    #[prost(int32, optional, tag = "1")]
    pub dp_rank: Option<i32>,
    /// The sections that are wanted.
    #[prost(string, repeated, tag = "2")]
    pub include: Vec<String>,
    /// The only worker that is wanted: ours, where a server has several whose ranks have equal numbers.
    #[prost(string, optional, tag = "100")]
    pub worker: Option<String>,
}

/// The answer, its entries not yet read: one that cannot be read spoils no other.
#[derive(Clone, PartialEq, Message)]
pub struct GetLoadsResponse {
    /// When it was made.
    #[prost(string, tag = "1")]
    pub timestamp: String,
    /// The engine's version.
    #[prost(string, tag = "2")]
    pub version: String,
    /// The number of entries, as the sender says.
    #[prost(int32, tag = "3")]
    pub dp_rank_count: i32,
    /// One [`SchedulerLoad`] per rank.
    #[prost(bytes = "bytes", repeated, tag = "4")]
    pub loads: Vec<Bytes>,
}

/// One rank's load. Numbers that were not sent are `None` here; see [`read`] for when that means 0. Whole
/// numbers are read as 64 bits wide, which takes in every narrower kind.
#[derive(Clone, PartialEq, Message)]
pub struct SchedulerLoad {
    /// The global rank; not sent is 0.
    #[prost(int64, optional, tag = "1")]
    pub dp_rank: Option<i64>,
    /// Requests being served.
    #[prost(int64, optional, tag = "2")]
    pub num_running_reqs: Option<i64>,
    /// Requests waiting.
    #[prost(int64, optional, tag = "3")]
    pub num_waiting_reqs: Option<i64>,
    /// Tokens in the KV cache.
    #[prost(int64, optional, tag = "5")]
    pub num_used_tokens: Option<i64>,
    /// Tokens that the KV cache holds.
    #[prost(int64, optional, tag = "6")]
    pub max_total_num_tokens: Option<i64>,
    /// Share of the KV cache in use.
    #[prost(double, optional, tag = "7")]
    pub token_usage: Option<f64>,
    /// Requests that the rank runs at once.
    #[prost(int64, optional, tag = "11")]
    pub max_running_requests: Option<i64>,
    /// Whose rank it is: ours, for servers that speak for several workers.
    #[prost(string, optional, tag = "100")]
    pub worker: Option<String>,
}

/// What vLLM says beyond that.
#[derive(Clone, PartialEq, Message)]
pub struct VllmQueued {
    /// Uncached prompt tokens of waiting requests.
    #[prost(int64, optional, tag = "12")]
    pub queued_uncached_tokens: Option<i64>,
}

/// What SGLang says beyond that.
#[derive(Clone, PartialEq, Message)]
pub struct SglangQueued {
    /// Uncached prompt tokens of waiting requests.
    #[prost(int64, optional, tag = "17")]
    pub queued_uncached_tokens: Option<i64>,
}

/// Reads an answer's bytes.
///
/// # Errors
/// No protobuf of this shape is another schema; no entry is empty, and so unavailable.
pub fn read(servicer: Servicer, body: Bytes) -> Result<LoadAnswer, Outcome> {
    let answer = GetLoadsResponse::decode(body).map_err(|_| Outcome::NotOffered(NotOffered::OtherSchema))?;
    if answer.loads.is_empty() {
        return Err(Outcome::TryAgain(TryAgain::Empty));
    }
    let timestamp = of_text(&answer.timestamp);
    let loads = answer.loads.into_iter().take(MAX_ENTRIES).map(|body| entry(servicer, body));
    let loads: Vec<_> = loads.collect();
    if loads.iter().any(|(worker, _)| worker.is_some()) {
        let rollup =
            loads.into_iter().map(|(worker, entry)| RollupEntry { worker, worker_type: None, entry });
        return Ok(LoadAnswer { rollup: rollup.collect(), timestamp, ..LoadAnswer::default() });
    }
    let entries = loads.into_iter().map(|(_, entry)| entry).collect();
    Ok(LoadAnswer { timestamp, ..LoadAnswer::of_ranks(entries) })
}

/// An entry, with the worker that it names.
fn entry(servicer: Servicer, body: Bytes) -> (Option<Box<str>>, LoadEntry) {
    let Ok(load) = SchedulerLoad::decode(body.clone()) else {
        let load = RawRankLoad { num_running_reqs: RawNumber::Unreadable, ..RawRankLoad::default() };
        return (None, LoadEntry { dp_rank: None, load });
    };
    let worker = load.worker.as_deref().filter(|worker| !worker.is_empty()).map(Into::into);
    let queued = match servicer {
        Servicer::Vllm => VllmQueued::decode(body).ok().and_then(|more| more.queued_uncached_tokens),
        Servicer::Sglang => SglangQueued::decode(body).ok().and_then(|more| more.queued_uncached_tokens),
    };
    // A sender of proto3 leaves out a plain 0, so what was not sent is 0 or was never set. A size, which cannot
    // be 0, proves that a snapshot was read; without one, what was not sent stays unknown.
    let max = load.max_total_num_tokens.filter(|&tokens| tokens != 0);
    let counter = |sent: Option<i64>| number(sent.or(max.map(|_| 0)));
    let entry = LoadEntry {
        dp_rank: u64::try_from(load.dp_rank.unwrap_or(0)).ok(),
        load: RawRankLoad {
            num_running_reqs: counter(load.num_running_reqs),
            num_waiting_reqs: counter(load.num_waiting_reqs),
            num_used_tokens: counter(load.num_used_tokens),
            max_total_num_tokens: number(max),
            token_usage: load.token_usage.into(),
            // Older servicers do not have it: not sent is unknown.
            queued_uncached_tokens: number(queued),
            // A limit of 0 would be an engine that serves nobody: it was not sent.
            max_running_requests: number(load.max_running_requests.filter(|&limit| limit != 0)),
            ..RawRankLoad::default()
        },
    };
    (worker, entry)
}

fn number(sent: Option<i64>) -> RawNumber {
    sent.map(|count| count as f64).into()
}

/// One entry of an answer, as `servicer` writes it.
pub fn entry_bytes(servicer: Servicer, load: &SchedulerLoad, queued_uncached_tokens: Option<i64>) -> Bytes {
    let mut bytes = load.encode_to_vec();
    // Fields of one message may follow each other in any order.
    bytes.extend(match servicer {
        Servicer::Vllm => VllmQueued { queued_uncached_tokens }.encode_to_vec(),
        Servicer::Sglang => SglangQueued { queued_uncached_tokens }.encode_to_vec(),
    });
    bytes.into()
}

/// What `GetLoads` is answered from.
pub trait LoadsSource: Clone + Send + Sync + 'static {
    /// The answer to `request` as `servicer` gives it.
    ///
    /// # Errors
    /// The status that the caller gets instead.
    fn get_loads(
        &self,
        servicer: Servicer,
        request: GetLoadsRequest,
        metadata: MetadataMap,
    ) -> impl Future<Output = Result<GetLoadsResponse, Status>> + Send;
}

/// Connections that stand at once. A router has one, and a handful of people look.
const MAX_CONNECTIONS: usize = 256;

/// Answers `GetLoads` of these servicers until `shutdown` completes.
///
/// # Errors
/// Those of accepting connections.
pub async fn serve(
    listener: TcpListener,
    servicers: &[Servicer],
    source: impl LoadsSource,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), tonic::transport::Error> {
    let routes = servicers.iter().fold(axum::Router::new(), |routes, &servicer| {
        let method = Method { source: source.clone(), servicer };
        let answer = move |request: HttpRequest| {
            let method = method.clone();
            async move { Grpc::new(BytesCodec).unary(method, request).await }
        };
        routes.route(servicer.path(), post(answer))
    });
    Server::builder()
        .add_routes(routes.into())
        .serve_with_incoming_shutdown(Limited::new(listener, MAX_CONNECTIONS).incoming(), shutdown)
        .await
}

#[derive(Clone)]
struct Method<S> {
    source: S,
    servicer: Servicer,
}

impl<S: LoadsSource> UnaryService<Bytes> for Method<S> {
    type Response = Bytes;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Bytes>, Status>> + Send>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        let Self { source, servicer } = self.clone();
        Box::pin(async move {
            let (metadata, _, body) = request.into_parts();
            let asked = GetLoadsRequest::decode(body)
                .map_err(|_| Status::invalid_argument("the request is no GetLoadsRequest"))?;
            let answer = source.get_loads(servicer, asked, metadata).await?;
            Ok(Response::new(answer.encode_to_vec().into()))
        })
    }
}

/// Carries messages as bytes, so that what cannot be read is told from what did not arrive.
#[derive(Clone, Copy, Debug, Default)]
pub struct BytesCodec;

impl Codec for BytesCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for BytesCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn answer(loads: &[SchedulerLoad]) -> Bytes {
        let loads = loads.iter().map(|load| load.encode_to_vec().into()).collect();
        GetLoadsResponse { loads, ..GetLoadsResponse::default() }.encode_to_vec().into()
    }

    fn load(dp_rank: i64) -> SchedulerLoad {
        SchedulerLoad { dp_rank: Some(dp_rank), max_total_num_tokens: Some(8192), ..SchedulerLoad::default() }
    }

    /// L4: 0 is only believed of a snapshot that was read, and a bad entry spoils no other.
    #[test]
    fn what_was_not_sent_is_zero_only_in_a_snapshot() {
        let unread = SchedulerLoad { dp_rank: Some(1), ..SchedulerLoad::default() };
        let negative = SchedulerLoad { num_running_reqs: Some(-1), ..load(2) };
        let read = read(Servicer::Sglang, answer(&[load(0), unread, negative, load(-3)])).unwrap();
        assert_eq!(read.entries[0].load.num_running_reqs, RawNumber::Value(0.0));
        assert_eq!(read.entries[0].load.queued_uncached_tokens, RawNumber::Absent);
        assert_eq!(read.entries[1].load, RawRankLoad::default());
        assert_eq!(read.entries[2].load.num_running_reqs, RawNumber::Value(-1.0));
        assert_eq!(read.entries[3].dp_rank, None);
        let ranks: Vec<_> = read.believable().iter().map(|entry| entry.dp_rank).collect();
        assert_eq!(ranks, [Some(0)]);
    }

    /// L8, L19: entries that name a worker are a fleet's, and nobody's ranks here. L18: the answer's own moment.
    #[test]
    fn entries_with_a_worker_are_a_rollup() {
        let named = SchedulerLoad { worker: Some("w".into()), ..load(0) };
        let fleet = read(Servicer::Vllm, answer(&[named, load(0)])).unwrap();
        assert_eq!((fleet.rollup.len(), fleet.entries.len()), (2, 0));
        assert_eq!(fleet.rollup[0].worker.as_deref(), Some("w"));
        let timestamp = "2025-12-01T01:15:30Z".to_owned();
        let loads = vec![load(0).encode_to_vec().into()];
        let body = GetLoadsResponse { timestamp, loads, ..GetLoadsResponse::default() };
        let own = read(Servicer::Sglang, body.encode_to_vec().into()).unwrap();
        assert_eq!((own.timestamp, own.entries.len()), (Some(1_764_551_730.0), 1));
    }

    /// L4, L6
    #[test]
    fn bad_bytes_are_told_apart() {
        let loads = vec![Bytes::from_static(b"\x10"), load(1).encode_to_vec().into()];
        let body = GetLoadsResponse { loads, ..GetLoadsResponse::default() };
        let answer = read(Servicer::Vllm, body.encode_to_vec().into()).unwrap();
        assert_eq!(answer.believable().len(), 1);
        let other = read(Servicer::Vllm, Bytes::from_static(b"\xff\xff\xff"));
        assert_eq!(other, Err(Outcome::NotOffered(NotOffered::OtherSchema)));
        assert_eq!(read(Servicer::Vllm, Bytes::new()), Err(Outcome::TryAgain(TryAgain::Empty)));
    }

    /// The messages here and in `loads.proto` have the same numbers.
    #[test]
    fn the_schema_says_the_same() {
        let number_of = |message: &str, field: &str| {
            let schema = include_str!("loads.proto");
            let body = schema.split(&format!("message {message} {{")).nth(1).unwrap();
            let body = body.split('}').next().unwrap();
            let line = body.lines().find(|line| line.contains(&format!(" {field} ="))).unwrap();
            line.trim_end_matches(';').rsplit(' ').next().unwrap().parse::<u8>().unwrap()
        };
        // A message with one field begins with that field's number, above three bits of wire type.
        let agrees = |message: &str, field: &str, bytes: Vec<u8>| {
            assert_eq!(bytes[0] >> 3, number_of(message, field), "{message}.{field}");
        };
        let one = Some(1);
        let none = SchedulerLoad::default;
        for (field, load) in [
            ("dp_rank", SchedulerLoad { dp_rank: one, ..none() }),
            ("num_running_reqs", SchedulerLoad { num_running_reqs: one, ..none() }),
            ("num_waiting_reqs", SchedulerLoad { num_waiting_reqs: one, ..none() }),
            ("num_used_tokens", SchedulerLoad { num_used_tokens: one, ..none() }),
            ("max_total_num_tokens", SchedulerLoad { max_total_num_tokens: one, ..none() }),
            ("token_usage", SchedulerLoad { token_usage: Some(0.5), ..none() }),
            ("max_running_requests", SchedulerLoad { max_running_requests: one, ..none() }),
        ] {
            agrees("SchedulerLoad", field, load.encode_to_vec());
        }
        let queued = VllmQueued { queued_uncached_tokens: one }.encode_to_vec();
        agrees("SchedulerLoad", "queued_uncached_tokens", queued);
        let loads = GetLoadsResponse { loads: vec![Bytes::new()], ..GetLoadsResponse::default() };
        agrees("GetLoadsResponse", "loads", loads.encode_to_vec());
        let count = GetLoadsResponse { dp_rank_count: 1, ..GetLoadsResponse::default() };
        agrees("GetLoadsResponse", "dp_rank_count", count.encode_to_vec());
        let rank = GetLoadsRequest { dp_rank: Some(0), ..GetLoadsRequest::default() };
        agrees("GetLoadsRequest", "dp_rank", rank.encode_to_vec());
        let include = GetLoadsRequest { include: vec!["core".into()], ..GetLoadsRequest::default() };
        agrees("GetLoadsRequest", "include", include.encode_to_vec());
        // A number above 15 takes two bytes.
        let named = SchedulerLoad { worker: Some("w".into()), ..none() }.encode_to_vec();
        let wanted = GetLoadsRequest { worker: Some("w".into()), ..GetLoadsRequest::default() };
        for (message, bytes) in [("SchedulerLoad", named), ("GetLoadsRequest", wanted.encode_to_vec())] {
            let tag = (u16::from(bytes[1]) << 7) | u16::from(bytes[0] & 0x7f);
            assert_eq!(tag >> 3, u16::from(number_of(message, "worker")), "{message}.worker");
        }
    }

    /// The number that is vLLM's is a message of SGLang's, and the other way round.
    #[test]
    fn queued_tokens_are_where_their_servicer_has_them() {
        let mut body = load(0).encode_to_vec();
        body.extend(VllmQueued { queued_uncached_tokens: Some(70) }.encode_to_vec());
        body.extend(SglangQueued { queued_uncached_tokens: Some(80) }.encode_to_vec());
        let answer: Bytes = GetLoadsResponse { loads: vec![body.into()], ..GetLoadsResponse::default() }
            .encode_to_vec()
            .into();
        for (servicer, queued) in [(Servicer::Vllm, 70.0), (Servicer::Sglang, 80.0)] {
            let read = read(servicer, answer.clone()).unwrap();
            assert_eq!(read.entries[0].load.queued_uncached_tokens, RawNumber::Value(queued));
        }
    }
}

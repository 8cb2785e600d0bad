//! Servers that answer as they are told, well or badly.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::routing::post;
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use rankwise::telemetry::wire::{BytesCodec, GetLoadsRequest, GetLoadsResponse, SchedulerLoad, Servicer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tonic::server::UnaryService;
use tonic::{Code, Request, Response, Status};

use super::harness::Shared;

/// What a path of a [`WebServer`] does.
#[derive(Clone)]
pub enum Reply {
    /// This status and body.
    Status(u16, String),
    /// The head, and half of the body that it promises.
    Half(String),
    /// Nothing, for ever.
    Silence,
    /// The connection is closed at once.
    HangUp,
    /// 200 and this body, after a while.
    Slow(std::time::Duration, String),
}

impl Reply {
    pub fn ok(body: impl Into<String>) -> Self {
        Self::Status(200, body.into())
    }
}

/// A web server of one request per connection; paths that it was not told of are 404.
pub struct WebServer {
    address: SocketAddr,
    replies: Shared<HashMap<String, Reply>>,
    /// The request lines so far.
    requests: Shared<Vec<String>>,
    task: JoinHandle<()>,
}

impl WebServer {
    pub async fn start(replies: &[(&str, Reply)]) -> Self {
        Self::start_at("127.0.0.1:0", replies).await
    }

    pub async fn start_at(address: &str, replies: &[(&str, Reply)]) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let replies = replies.iter().map(|(path, reply)| ((*path).to_owned(), reply.clone())).collect();
        let replies = Arc::new(Mutex::new(replies));
        let requests = Shared::default();
        let task = tokio::spawn(serve(listener, Arc::clone(&replies), Arc::clone(&requests)));
        Self { address, replies, requests, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// From now on, `path` does this.
    pub fn set(&self, path: &str, reply: Reply) {
        self.replies.lock().insert(path.to_owned(), reply);
    }

    /// Requests so far for exactly this path, whatever its query.
    pub fn asked(&self, path: &str) -> usize {
        self.requests().iter().filter(|line| path_of(line) == path).count()
    }

    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

impl Drop for WebServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn path_of(line: &str) -> &str {
    line.split(' ').nth(1).unwrap_or_default().split('?').next().unwrap()
}

async fn serve(
    listener: TcpListener,
    replies: Shared<HashMap<String, Reply>>,
    requests: Shared<Vec<String>>,
) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        connections.spawn(answer(stream, Arc::clone(&replies), Arc::clone(&requests)));
    }
}

async fn answer(
    mut stream: TcpStream,
    replies: Shared<HashMap<String, Reply>>,
    requests: Shared<Vec<String>>,
) -> Option<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let line = head.lines().next()?;
    let reply = replies.lock().get(path_of(line)).cloned();
    requests.lock().push(line.to_owned());
    let (status, body, length) = match reply.unwrap_or(Reply::Status(404, String::new())) {
        Reply::Status(status, body) => (status, body.clone(), body.len()),
        Reply::Half(body) => (200, body[..body.len() / 2].to_owned(), body.len()),
        Reply::Silence => std::future::pending().await,
        Reply::HangUp => return None,
        Reply::Slow(wait, body) => {
            tokio::time::sleep(wait).await;
            (200, body.clone(), body.len())
        }
    };
    let head = format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(format!("{head}{body}").as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}

/// What a servicer of a [`GrpcServer`] does.
#[derive(Clone)]
pub enum Call {
    /// These bytes, whatever they are.
    Bytes(Bytes),
    /// This status.
    Fails(Code),
    /// Nothing, for ever.
    Silence,
}

impl Call {
    /// An answer on these ranks.
    pub fn loads(loads: impl IntoIterator<Item = SchedulerLoad>) -> Self {
        let loads: Vec<Bytes> = loads.into_iter().map(|load| load.encode_to_vec().into()).collect();
        let dp_rank_count = i32::try_from(loads.len()).unwrap();
        let answer = GetLoadsResponse { loads, dp_rank_count, ..GetLoadsResponse::default() };
        Self::Bytes(answer.encode_to_vec().into())
    }
}

/// One rank of an engine with 8192 tokens.
pub fn rank(dp_rank: i64, running: i64) -> SchedulerLoad {
    SchedulerLoad {
        dp_rank: Some(dp_rank),
        num_running_reqs: Some(running),
        num_waiting_reqs: Some(2),
        num_used_tokens: Some(640),
        max_total_num_tokens: Some(8192),
        token_usage: Some(0.078_125),
        ..SchedulerLoad::default()
    }
}

/// A gRPC server that offers one servicer's `GetLoads`.
pub struct GrpcServer {
    address: SocketAddr,
    call: Shared<Call>,
    /// The questions so far.
    asked: Shared<Vec<GetLoadsRequest>>,
    task: JoinHandle<()>,
}

impl GrpcServer {
    pub async fn start(servicer: Servicer, call: Call) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let call = Arc::new(Mutex::new(call));
        let asked = Shared::default();
        let service = Answering { call: Arc::clone(&call), asked: Arc::clone(&asked) };
        let handler = move |request: axum::extract::Request| {
            let service = service.clone();
            async move { tonic::server::Grpc::new(BytesCodec).unary(service, request).await }
        };
        let routes = axum::Router::new().route(servicer.path(), post(handler));
        let incoming = tonic::transport::server::TcpIncoming::from(listener);
        let task = tokio::spawn(async move {
            let mut server = tonic::transport::Server::builder();
            server.add_routes(routes.into()).serve_with_incoming(incoming).await.unwrap();
        });
        Self { address, call, asked, task }
    }

    pub fn url(&self) -> String {
        format!("grpc://{}", self.address)
    }

    /// From now on, it does this.
    pub fn set(&self, call: Call) {
        *self.call.lock() = call;
    }

    pub fn asked(&self) -> Vec<GetLoadsRequest> {
        self.asked.lock().clone()
    }
}

impl Drop for GrpcServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone)]
struct Answering {
    call: Shared<Call>,
    asked: Shared<Vec<GetLoadsRequest>>,
}

type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

impl UnaryService<Bytes> for Answering {
    type Response = Bytes;
    type Future = BoxFuture<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        self.asked.lock().push(GetLoadsRequest::decode(request.into_inner()).unwrap());
        let call = self.call.lock().clone();
        Box::pin(async move {
            match call {
                Call::Bytes(bytes) => Ok(Response::new(bytes)),
                Call::Fails(code) => Err(Status::new(code, "as told")),
                Call::Silence => std::future::pending().await,
            }
        })
    }
}

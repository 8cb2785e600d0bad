//! One question, and what came of it.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use reqwest::redirect::Policy;
use reqwest::{Client, Response};
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use super::exposition;
use super::wire::{self, BytesCodec, GetLoadsRequest, Servicer};
use crate::load::{LoadAnswer, Outcome, Route, Transport, TryAgain, WorkerUrl, json};

/// How questions are asked.
#[derive(Clone, Debug)]
pub struct FetchConfig {
    /// A whole answer must be there by then. Engines answer in milliseconds when they are well.
    pub timeout: Duration,
    /// Longest answer that is read. A busy engine's `/metrics` has some hundred kilobytes, a load answer of a
    /// thousand ranks as many.
    pub max_bytes: usize,
    /// Sent as a bearer token, if the engines want one.
    pub token: Option<String>,
}

impl Default for FetchConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(2), max_bytes: 4 << 20, token: None }
    }
}

/// Asks one base URL. Keeps its connections.
#[derive(Clone, Debug)]
pub struct Fetcher {
    base: Box<str>,
    config: FetchConfig,
    client: Client,
    /// `None` over HTTP.
    channel: Option<Channel>,
}

/// The base URL cannot be asked at all.
#[derive(Debug, thiserror::Error)]
#[error("{base:?} cannot be asked: {why}")]
pub struct CannotAsk {
    base: Box<str>,
    why: Box<str>,
}

impl Fetcher {
    /// A fetcher for `url`'s base; the rank of a virtual worker is never dialled. Opens no connection yet.
    /// Must be called within a runtime.
    ///
    /// # Errors
    /// A URL that cannot be used.
    pub fn new(url: &WorkerUrl, config: FetchConfig) -> Result<Self, CannotAsk> {
        let cannot = |why: String| CannotAsk { base: url.base().into(), why: why.into() };
        let client = Client::builder()
            .timeout(config.timeout)
            .redirect(Policy::none())
            .no_proxy()
            .build()
            .map_err(|error| cannot(error.to_string()))?;
        let channel = match url.transport() {
            Transport::Http => None,
            Transport::Grpc => {
                let address = url.base().replacen("grpc://", "http://", 1);
                let endpoint = Endpoint::from_shared(address).map_err(|error| cannot(error.to_string()))?;
                Some(endpoint.connect_timeout(config.timeout).connect_lazy())
            }
        };
        Ok(Self { base: url.base().into(), config, client, channel })
    }

    /// What is dialled.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// What can be asked here, best first.
    pub fn routes(&self) -> &'static [Route] {
        if self.channel.is_some() { Route::GRPC } else { Route::HTTP }
    }

    /// Asks `route`. `owned` are the ranks that are declared at this URL, which is what series' labels are
    /// compared with. Takes no longer than the configured time limit.
    ///
    /// # Errors
    /// Every outcome but an answer.
    pub async fn fetch(&self, route: Route, owned: &BTreeSet<u32>) -> Result<LoadAnswer, Outcome> {
        match route {
            Route::HttpLoads => json::answer(&self.get("/v1/loads?include=core,queues&format=json").await?),
            Route::HttpRollup => json::answer(&self.get("/loads").await?),
            Route::Prometheus => {
                let body = self.get("/metrics").await?;
                exposition::read(&String::from_utf8_lossy(&body), owned)
            }
            Route::GrpcVllm => self.get_loads(Servicer::Vllm).await,
            Route::GrpcSglang => self.get_loads(Servicer::Sglang).await,
        }
    }

    /// Whether the engine says by `GET /ready` that it does not serve (SGLang while it sleeps); `None` where it
    /// says neither.
    pub async fn sleeps(&self) -> Option<bool> {
        match self.get("/ready").await {
            Ok(_) | Err(Outcome::TryAgain(TryAgain::Empty)) => Some(false),
            Err(Outcome::TryAgain(TryAgain::Unavailable)) => Some(true),
            Err(_) => None,
        }
    }

    async fn get(&self, path: &str) -> Result<Bytes, Outcome> {
        let mut request = self.client.get(format!("{}{path}", self.base));
        if let Some(token) = &self.config.token {
            request = request.bearer_auth(token);
        }
        let response = request.send().await.map_err(|error| failure(&error, TryAgain::Unreachable))?;
        match Outcome::of_http(response.status().as_u16()) {
            Some(outcome) => Err(outcome),
            None => self.body(response).await,
        }
    }

    async fn body(&self, mut response: Response) -> Result<Bytes, Outcome> {
        let mut body = Vec::new();
        loop {
            let chunk = response.chunk().await.map_err(|error| failure(&error, TryAgain::CutShort))?;
            let Some(chunk) = chunk else { return Ok(body.into()) };
            if body.len() + chunk.len() > self.config.max_bytes {
                return Err(Outcome::TryAgain(TryAgain::TooLong));
            }
            body.extend_from_slice(&chunk);
        }
    }

    async fn get_loads(&self, servicer: Servicer) -> Result<LoadAnswer, Outcome> {
        let Some(channel) = self.channel.clone() else {
            return Err(Outcome::TryAgain(TryAgain::Unreachable));
        };
        let question =
            GetLoadsRequest { include: vec!["core".into(), "queues".into()], ..GetLoadsRequest::default() };
        let mut request = tonic::Request::new(Bytes::from(question.encode_to_vec()));
        if let Some(token) =
            self.config.token.as_ref().and_then(|token| format!("Bearer {token}").parse().ok())
        {
            request.metadata_mut().insert("authorization", token);
        }
        let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(self.config.max_bytes);
        let call = async {
            client.ready().await.map_err(|_| Outcome::TryAgain(TryAgain::Unreachable))?;
            // Both paths are paths; were one not, nobody could serve it.
            let path =
                servicer.path().parse().map_err(|_| Outcome::of_grpc(tonic::Code::Unimplemented.into()))?;
            let answer = client.unary(request, path, BytesCodec).await;
            answer.map_err(|status| Outcome::of_grpc(status.code().into()))
        };
        let answer = timeout(self.config.timeout, call).await;
        wire::read(servicer, answer.map_err(|_| Outcome::TryAgain(TryAgain::Timeout))??.into_inner())
    }
}

/// What an error of the HTTP client says; `otherwise` if it was not the time limit.
fn failure(error: &reqwest::Error, otherwise: TryAgain) -> Outcome {
    Outcome::TryAgain(if error.is_timeout() { TryAgain::Timeout } else { otherwise })
}

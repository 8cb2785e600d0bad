//! A service over an indexer behind a lock, with engines played by the test: every subscription connects at
//! once, and requests for history are answered from what the test put there.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::Mutex;
use rankwise::fleet::{Change, WorkerSpec};
use rankwise::ids::{EventSeq, Moment, RankKey, WorkerId};
use rankwise::indexer::{Action, Config, Indexer, Input, View};
use rankwise::routing::{Router, RouterConfig};
use rankwise::service::{Control, ControlError, ServiceConfig, ServiceState, app, serve_with};
use reqwest::{Client, Method, StatusCode};
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// What one engine answers to requests for its history.
#[derive(Default)]
pub struct Ring {
    pub topic_frame: bool,
    pub batches: Vec<(u64, Vec<u8>)>,
    /// The newest number that was sent.
    pub sent: u64,
}

/// The writer's side.
#[derive(Clone)]
pub struct Engines {
    shared: Arc<Shared>,
}

struct Shared {
    indexer: Mutex<Indexer>,
    rings: Mutex<BTreeMap<String, Ring>>,
    now: AtomicU64,
    failure: OnceLock<String>,
}

impl Engines {
    pub fn new(config: Config) -> (Self, View) {
        let (indexer, view) = Indexer::new(config);
        let shared = Shared {
            indexer: Mutex::new(indexer),
            rings: Mutex::default(),
            now: AtomicU64::new(1),
            failure: OnceLock::new(),
        };
        (Self { shared: Arc::new(shared) }, view)
    }

    /// From now on the index does not move any more.
    pub fn fail(&self, why: &str) {
        self.shared.failure.set(why.to_owned()).unwrap();
    }

    pub fn advance_millis(&self, millis: u64) {
        self.shared.now.fetch_add(millis * 1_000, Ordering::Relaxed);
        let mut indexer = self.shared.indexer.lock();
        let mut actions = Vec::new();
        indexer.handle(self.now(), Input::Tick, &mut actions);
        self.carry_out(&mut indexer, actions);
    }

    pub fn set_ring(&self, endpoint: &str, ring: Ring) {
        self.shared.rings.lock().insert(endpoint.to_owned(), ring);
    }

    /// One message on the connection of a rank; `false` if the rank is not declared.
    pub fn send(&self, worker: &str, dp_rank: u32, seq: u64, payload: Vec<u8>) -> bool {
        let mut indexer = self.shared.indexer.lock();
        let rank = RankKey::new(worker, dp_rank);
        let Some(source) = indexer.source(&rank) else { return false };
        let replay = indexer.fleet().rank(&rank).and_then(|plan| plan.replay.clone());
        if let Some(at) = replay
            && let Some(ring) = self.shared.rings.lock().get_mut(at.address())
        {
            ring.sent = seq;
        }
        let frames = [Bytes::new(), Bytes::from(seq.to_be_bytes().to_vec()), Bytes::from(payload)];
        let mut actions = Vec::new();
        indexer.handle(self.now(), Input::Frames { source, frames: &frames }, &mut actions);
        self.carry_out(&mut indexer, actions);
        true
    }

    /// The same message three times with ascending numbers, handed over at once; `between` is called before each,
    /// in the middle of what applies them.
    pub fn send_all(
        &self,
        worker: &str,
        dp_rank: u32,
        first: u64,
        payload: Vec<u8>,
        between: impl Fn(usize),
    ) {
        let mut indexer = self.shared.indexer.lock();
        let source = indexer.source(&RankKey::new(worker, dp_rank)).unwrap();
        let messages = [first, first + 1, first + 2]
            .map(|seq| [Bytes::new(), Bytes::from(seq.to_be_bytes().to_vec()), Bytes::from(payload.clone())]);
        let inputs = messages.iter().enumerate().map(|(nth, frames)| {
            between(nth);
            Input::Frames { source, frames }
        });
        indexer.handle_all(self.now(), inputs, &mut Vec::new());
    }

    fn carry_out(&self, indexer: &mut Indexer, mut actions: Vec<Action>) {
        let now = self.now();
        while !actions.is_empty() {
            let mut more = Vec::new();
            for action in actions {
                match action {
                    Action::Subscribe { source, .. } => {
                        indexer.handle(now, Input::Connected { source }, &mut more);
                    }
                    Action::AskReplay { source, endpoint, request, from } => {
                        for frames in self.history(endpoint.address(), from.0) {
                            let input = Input::Replay { source, request, frames: &frames };
                            indexer.handle(now, input, &mut more);
                        }
                    }
                    _ => {}
                }
            }
            actions = more;
        }
    }

    fn history(&self, endpoint: &str, from: u64) -> Vec<Vec<Bytes>> {
        let rings = self.shared.rings.lock();
        let mut answers = Vec::new();
        let frames = |topic: bool, seq: u64, payload: Vec<u8>| {
            let topic = topic.then(Bytes::new);
            let rest = [Bytes::from(seq.to_be_bytes().to_vec()), Bytes::from(payload)];
            std::iter::once(Bytes::new()).chain(topic).chain(rest).collect::<Vec<_>>()
        };
        let topic = rings.get(endpoint).is_some_and(|ring| ring.topic_frame);
        if let Some(ring) = rings.get(endpoint) {
            let known = ring.batches.iter().filter(|(seq, _)| *seq >= from && *seq <= ring.sent);
            answers.extend(known.map(|(seq, payload)| frames(topic, *seq, payload.clone())));
        }
        answers.push(frames(topic, EventSeq::END_MARK.0, Vec::new()));
        answers
    }

    fn command<T>(&self, work: impl FnOnce(&mut Indexer, Moment, &mut Vec<Action>) -> T) -> T {
        let mut indexer = self.shared.indexer.lock();
        let mut actions = Vec::new();
        let answer = work(&mut indexer, self.now(), &mut actions);
        self.carry_out(&mut indexer, actions);
        answer
    }
}

impl Control for Engines {
    async fn declare(&self, spec: WorkerSpec) -> Result<Change, ControlError> {
        Ok(self.command(|indexer, now, actions| indexer.declare_worker(now, spec, actions))?)
    }

    async fn add_rank(&self, spec: WorkerSpec) -> Result<Change, ControlError> {
        Ok(self.command(|indexer, now, actions| indexer.add_rank(now, spec, actions))?)
    }

    async fn remove_rank(&self, rank: RankKey) -> Result<Option<Change>, ControlError> {
        Ok(self.command(|indexer, now, actions| indexer.remove_rank(now, &rank, actions)))
    }

    async fn withdraw(&self, worker: WorkerId) -> Result<Option<Change>, ControlError> {
        Ok(self.command(|indexer, now, actions| indexer.withdraw_worker(now, &worker, actions)))
    }

    fn now(&self) -> Moment {
        Moment(self.shared.now.load(Ordering::Relaxed))
    }

    fn failure(&self) -> Option<String> {
        self.shared.failure.get().cloned()
    }
}

/// A running service.
pub struct Service {
    pub engines: Engines,
    pub base: String,
    pub client: Client,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl Service {
    pub async fn start() -> Self {
        Self::start_with(Config::default(), RouterConfig::default(), ServiceConfig::default()).await
    }

    pub async fn start_with(config: Config, router: RouterConfig, service: ServiceConfig) -> Self {
        let (engines, view) = Engines::new(config);
        let connections = service.connections;
        let state = ServiceState::new(engines.clone(), Router::new(view, router), service);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(serve_with(listener, app(state), connections, async move {
            let _ = stopped.await;
        }));
        let client = Client::builder().no_proxy().build().unwrap();
        Self { engines, base, client, stop: Some(stop), served }
    }

    pub async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        drop(self.client);
        self.served.await.unwrap().unwrap();
    }

    pub async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        let body = body.map(|body| body.to_string().into_bytes());
        let kind = body.is_some().then_some("application/json");
        self.raw(method, path, kind, body).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(body)).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None).await
    }

    pub async fn raw(&self, method: &str, path: &str, kind: Option<&str>, body: Option<Vec<u8>>) -> Answer {
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let mut request = self.client.request(method, format!("{}{path}", self.base));
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        if let Some(body) = body {
            request = request.body(body);
        }
        let response = request.send().await.unwrap();
        let header = |name: &str| {
            response.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
        };
        let (allow, content_type) = (header("allow"), header("content-type"));
        let status = response.status();
        let text = response.text().await.unwrap();
        let json = serde_json::from_str(&text).unwrap_or(Value::Null);
        Answer { status, allow, content_type, text, json }
    }
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub allow: String,
    pub content_type: String,
    pub text: String,
    pub json: Value,
}

impl Answer {
    pub fn expect(self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        self.json
    }

    /// A problem that every client can read: ours by `detail`, Dynamo's by `error`, Mooncake's by `message`.
    pub fn problem(self, status: u16, field: Option<&str>) -> Value {
        assert_eq!(self.content_type, "application/problem+json", "{}", self.text);
        let json = self.expect(status);
        assert_eq!(json["status"], status, "{json}");
        assert_eq!(json["field"].as_str(), field, "{json}");
        assert!(json["type"].is_string() && json["title"].is_string(), "{json}");
        assert!(json["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{json}");
        assert_eq!((&json["error"], &json["message"]), (&json["detail"], &json["detail"]), "{json}");
        json
    }
}

/// JSON as msgpack, the way the recordings write events.
pub fn pack(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec_named(value).unwrap()
}

/// One batch of array-shaped events.
pub fn batch(events: Value) -> Vec<u8> {
    pack(&serde_json::json!([1.0, events, 0]))
}

//! Load sockets: SGLang's schedulers publish their load over ZMQ, each rank on a port of its own.
//!
//! The connection decides whose load it is. Nothing here is required: a rank whose socket is silent has no
//! load from here, and that is all.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::{info, warn};

use super::subscriber::{SubscriberConfig, SubscriberHandle, spawn_subscriber};
use super::{Closed, Sink, StreamEvent};
use crate::events::frame::parse_live;
use crate::fleet::{Endpoint, Endpoints};
use crate::ids::{Moment, RankKey, SourceId, WorkerId};
use crate::indexer::View;
use crate::load::stat::LOAD_STAT_TOPIC;
use crate::load::{LoadReport, LoadStat, LoadStatError};
use crate::wire::endpoint::BadEndpoint;

/// Where decoded load messages go. Called on the socket's task: it must not wait.
pub trait LoadStatSink: Clone + Send + Sync + 'static {
    /// A message that was heard at the endpoint of `rank`; or what was heard there instead.
    fn deliver(&self, rank: &RankKey, stat: Result<LoadStat, LoadStatError>);
}

/// Starts a subscriber to the load socket of `rank`. Ends when the handle is dropped.
///
/// # Errors
/// An endpoint that cannot be dialled or bound.
pub fn spawn_load_stat<S: LoadStatSink>(
    handle: &Handle,
    rank: RankKey,
    endpoint: &str,
    binds: bool,
    sink: S,
    config: SubscriberConfig,
) -> Result<SubscriberHandle, BadEndpoint> {
    // The number of a source only tells streams of one sink apart, and this sink has one.
    let source = SourceId(u64::from(rank.dp_rank.0));
    let decoding = Decoding { rank: Arc::new(rank), sink };
    spawn_subscriber(handle, source, endpoint, binds, LOAD_STAT_TOPIC, decoding, config)
}

#[derive(Clone)]
struct Decoding<S> {
    rank: Arc<RankKey>,
    sink: S,
}

impl<S: LoadStatSink> Sink for Decoding<S> {
    async fn deliver(&self, _: SourceId, event: StreamEvent) -> Result<(), Closed> {
        let StreamEvent::Message(frames) = event else { return Ok(()) };
        let stat = match parse_live(&frames) {
            Err(_) => Err(LoadStatError::Malformed),
            // A subscription is a prefix: the range may carry other messages, whose topics begin like ours.
            Ok(message) if message.topic != LOAD_STAT_TOPIC => Err(LoadStatError::OtherKind),
            Ok(message) => LoadStat::decode(&message.payload),
        };
        self.sink.deliver(&self.rank, stat);
        Ok(())
    }
}

/// What was heard at all load sockets of a feed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadStatCounts {
    /// Load messages, whatever the table has made of them.
    pub messages: u64,
    /// Messages that could not be read.
    pub malformed: u64,
    /// Messages of another kind.
    pub other_kind: u64,
    /// Load messages that name another rank than their connection.
    pub rank_mismatch: u64,
}

/// Reports to a view's load table.
#[derive(Clone)]
pub struct LoadTableSink {
    shared: Arc<Shared>,
}

struct Shared {
    view: View,
    now: Box<dyn Fn() -> Moment + Send + Sync>,
    messages: AtomicU64,
    malformed: AtomicU64,
    other_kind: AtomicU64,
    rank_mismatch: AtomicU64,
}

impl LoadTableSink {
    /// A sink for `view`; `now` is the clock of its load table.
    pub fn new(view: View, now: impl Fn() -> Moment + Send + Sync + 'static) -> Self {
        let zero = AtomicU64::default;
        let shared = Shared {
            view,
            now: Box::new(now),
            messages: zero(),
            malformed: zero(),
            other_kind: zero(),
            rank_mismatch: zero(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// What was heard so far.
    pub fn counts(&self) -> LoadStatCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LoadStatCounts {
            messages: get(&self.shared.messages),
            malformed: get(&self.shared.malformed),
            other_kind: get(&self.shared.other_kind),
            rank_mismatch: get(&self.shared.rank_mismatch),
        }
    }
}

impl LoadStatSink for LoadTableSink {
    fn deliver(&self, rank: &RankKey, stat: Result<LoadStat, LoadStatError>) {
        let count = |counter: &AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
        };
        let stat = match stat {
            Ok(stat) => stat,
            Err(LoadStatError::OtherKind) => return count(&self.shared.other_kind),
            Err(_) => return count(&self.shared.malformed),
        };
        count(&self.shared.messages);
        // An engine counts its own ranks from 0, a deployment counts all: either is this rank's name.
        let named = stat.attn_dp_rank.filter(|&named| named != u64::from(rank.dp_rank.0));
        let fleet = self.shared.view.fleet();
        let local = fleet.declared().local(rank).map(|local| u64::from(local.0));
        if named.is_some() && local.is_some() && named != local {
            count(&self.shared.rank_mismatch);
        }
        let source = Arc::from(LoadReport::LOAD_STAT);
        let report = LoadReport { source, entries: vec![stat.entry(rank.dp_rank)], aggregate: None };
        let now = (self.shared.now)();
        self.shared.view.report_load(now, now, &rank.worker, &report);
    }
}

/// A worker, and where its ranks publish their load.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadStatBinding {
    /// The worker. It need not be declared yet.
    pub worker: WorkerId,
    /// One endpoint per rank: with a base, each adds its global number to the port.
    pub endpoints: Endpoints,
}

/// How load sockets are treated.
#[derive(Clone, Debug)]
pub struct LoadStatConfig {
    /// Every connection.
    pub subscriber: SubscriberConfig,
    /// How often a change of the fleet is looked for.
    pub fleet_check: Duration,
    /// An idle scheduler publishes about once a second; one that is silent for this long is dialled anew,
    /// since a host that is gone without a word cannot be noticed otherwise.
    pub redial_after: Duration,
}

impl Default for LoadStatConfig {
    fn default() -> Self {
        Self {
            subscriber: SubscriberConfig::default(),
            fleet_check: Duration::from_millis(250),
            redial_after: Duration::from_secs(10),
        }
    }
}

/// One subscriber for every declared rank of the bound workers, following the fleet. Dropping it closes all.
#[derive(Debug)]
pub struct LoadStatFeed {
    task: JoinHandle<()>,
}

impl LoadStatFeed {
    /// Starts following the fleet of `view` on `handle`'s runtime.
    pub fn start<S: LoadStatSink>(
        handle: &Handle,
        view: View,
        bindings: Vec<LoadStatBinding>,
        sink: S,
        config: LoadStatConfig,
    ) -> Self {
        let following =
            Following { handle: handle.clone(), view, bindings, sink, config, sockets: HashMap::new() };
        Self { task: handle.spawn(following.run()) }
    }
}

impl Drop for LoadStatFeed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A rank, its stream, and where its load is listened to.
type Listened = (RankKey, SourceId, Endpoint);

struct Following<S> {
    handle: Handle,
    view: View,
    bindings: Vec<LoadStatBinding>,
    sink: S,
    config: LoadStatConfig,
    /// By rank, stream and place: a rank that was declared anew has another stream, and gets another socket.
    sockets: HashMap<Listened, Option<Socket>>,
}

struct Socket {
    subscriber: SubscriberHandle,
    heard: Arc<AtomicBool>,
    silent_for: Duration,
}

/// Notes that something was heard, and passes it on.
#[derive(Clone)]
struct Listening<S> {
    sink: S,
    heard: Arc<AtomicBool>,
}

impl<S: LoadStatSink> LoadStatSink for Listening<S> {
    fn deliver(&self, rank: &RankKey, stat: Result<LoadStat, LoadStatError>) {
        self.heard.store(true, Ordering::Relaxed);
        self.sink.deliver(rank, stat);
    }
}

impl<S: LoadStatSink> Following<S> {
    async fn run(mut self) {
        loop {
            self.follow();
            sleep(self.config.fleet_check.max(Duration::from_millis(1))).await;
            self.redial_the_silent();
        }
    }

    /// Opens the sockets of new ranks and closes those of ranks that are gone.
    fn follow(&mut self) {
        let fleet = self.view.fleet();
        let mut wanted = HashSet::new();
        let bound = self.bindings.iter().map(|binding| (&binding.worker, &binding.endpoints));
        let specs = fleet.declared().workers();
        let declared = specs.filter_map(|spec| Some((&spec.worker, spec.load_stat.as_ref()?)));
        for (id, endpoints) in bound.chain(declared) {
            let worker = fleet.pool_of(id).and_then(|pool| pool.worker(id));
            for rank in worker.map(|worker| &*worker.ranks).unwrap_or_default() {
                // What cannot be dialled was refused when it was declared.
                if let Ok(Some(endpoint)) = endpoints.endpoint(rank.plan.rank.dp_rank) {
                    wanted.insert((rank.plan.rank.clone(), rank.source, endpoint));
                }
            }
        }
        self.sockets.retain(|key, _| wanted.contains(key));
        let new: Vec<_> = wanted.into_iter().filter(|key| !self.sockets.contains_key(key)).collect();
        for key in new {
            let socket = open(&self.handle, &key.0, &key.2, &self.sink, &self.config);
            // One that cannot be opened is remembered as that, so that it is said once.
            self.sockets.insert(key, socket);
        }
    }

    fn redial_the_silent(&mut self) {
        for socket in self.sockets.values_mut().flatten() {
            if socket.heard.swap(false, Ordering::Relaxed) {
                socket.silent_for = Duration::ZERO;
                continue;
            }
            socket.silent_for += self.config.fleet_check;
            if socket.silent_for >= self.config.redial_after {
                socket.silent_for = Duration::ZERO;
                socket.subscriber.redial();
            }
        }
    }
}

fn open<S: LoadStatSink>(
    handle: &Handle,
    rank: &RankKey,
    endpoint: &Endpoint,
    sink: &S,
    config: &LoadStatConfig,
) -> Option<Socket> {
    let heard = Arc::new(AtomicBool::new(false));
    let listening = Listening { sink: sink.clone(), heard: Arc::clone(&heard) };
    let (address, binds) = (endpoint.address(), endpoint.binds());
    match spawn_load_stat(handle, rank.clone(), address, binds, listening, config.subscriber.clone()) {
        Ok(subscriber) => {
            info!(%rank, endpoint = address, "listening to load");
            Some(Socket { subscriber, heard, silent_for: Duration::ZERO })
        }
        Err(error) => {
            warn!(%rank, %error, "no load socket");
            None
        }
    }
}

//! Carries out what the indexer asks for: one subscriber per stream, one connection per request for history;
//! and takes what they bring to the indexing thread, never more than there is room for.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tracing::{info, warn};

use super::dial::shakes_hands;
use super::{
    Closed, ReplayConfig, ReplayFailure, ReplayHandle, Sink, StreamEvent, SubscriberConfig, SubscriberHandle,
    spawn_replay, spawn_subscriber,
};
use crate::events::order::ReplayId;
use crate::fleet::Endpoint;
use crate::ids::{Moment, SourceId};
use crate::indexer::Action;
use crate::pump::{PumpSender, Surroundings};
use crate::wire::endpoint::Target;

/// Limits of what may wait for the indexing thread.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Every stream's connection.
    pub subscriber: SubscriberConfig,
    /// Every request for history.
    pub replay: ReplayConfig,
    /// Credits of all streams together, in blocks as [`StreamEvent::weight`] counts them. A million blocks is
    /// some 64 MB of messages and a second's work of the indexing thread.
    pub credits: u32,
    /// Credits of one stream. An eighth of all: one flood leaves the others room.
    pub credits_per_stream: u32,
    /// Connections that may be open at once, those for history included; `None` is as many as the system gives.
    /// What is kept of its descriptors is for HTTP, so that a fleet that is too large can still be looked at.
    pub max_connections: Option<usize>,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            subscriber: SubscriberConfig::default(),
            // Whether an answer is late is for the stream's order to say, which gives up first and asks again.
            replay: ReplayConfig { idle_timeout: Duration::from_secs(30), ..ReplayConfig::default() },
            credits: 1 << 20,
            credits_per_stream: 1 << 17,
            max_connections: None,
        }
    }
}

impl DriverConfig {
    /// An eighth of the connections is for requests for history and second connections, which are short; the rest
    /// for events.
    fn share_connections(&mut self) {
        let Some(all) = self.max_connections else { return };
        let asks = (all / 8).clamp(1, ReplayConfig::DEFAULT_ASKS);
        self.replay.asks = Arc::new(Semaphore::new(asks));
        self.subscriber.connections = Some(Arc::new(Semaphore::new(all.saturating_sub(asks).max(1))));
    }
}

/// What the pump needs from the outside when sockets drive it: the clock, and the way to the driver.
#[derive(Debug)]
pub struct LiveSurroundings {
    clock: Clock,
    actions: mpsc::UnboundedSender<Action>,
    credits: Arc<Credits>,
}

impl Surroundings for LiveSurroundings {
    fn now(&self) -> Moment {
        self.clock.now()
    }

    fn act(&mut self, action: Action) {
        // The driver outlives the pump or everything ends; then nobody needs the action.
        let _ = self.actions.send(action);
    }

    fn give_back(&mut self, source: SourceId, weight: u32) {
        self.credits.give_back(source, weight);
    }
}

/// Moments since the process's node was made.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    /// A clock that begins now.
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    /// The moment.
    pub fn now(self) -> Moment {
        Moment::from_micros(u64::try_from(self.origin.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

/// Room for what waits: for all streams together and for each.
#[derive(Debug)]
struct Credits {
    all: Arc<Semaphore>,
    all_size: u32,
    per_stream: u32,
    streams: Mutex<HashMap<SourceId, Arc<Semaphore>>>,
}

impl Credits {
    fn new(config: &DriverConfig) -> Self {
        Self {
            all: Arc::new(Semaphore::new(config.credits as usize)),
            all_size: config.credits,
            per_stream: config.credits_per_stream.min(config.credits),
            streams: Mutex::new(HashMap::new()),
        }
    }

    /// A message heavier than a stream's whole share takes the share: more could never be had.
    fn weight(&self, event: &StreamEvent) -> u32 {
        event.weight().min(self.per_stream).min(self.all_size)
    }

    fn stream(&self, source: SourceId) -> Arc<Semaphore> {
        let mut streams = self.streams.lock();
        let stream =
            streams.entry(source).or_insert_with(|| Arc::new(Semaphore::new(self.per_stream as usize)));
        Arc::clone(stream)
    }

    /// Waits for room in the stream's own share first, so that a flood queues behind itself. What was taken comes
    /// back if the task ends before it has delivered.
    async fn take(&self, source: SourceId, weight: u32) -> Result<Taken, Closed> {
        let stream = self.stream(source).acquire_many_owned(weight).await.map_err(|_| Closed)?;
        let all = Arc::clone(&self.all).acquire_many_owned(weight).await.map_err(|_| Closed)?;
        Ok(Taken { stream, all })
    }

    fn give_back(&self, source: SourceId, weight: u32) {
        self.all.add_permits(weight as usize);
        if let Some(stream) = self.streams.lock().get(&source) {
            stream.add_permits(weight as usize);
        }
    }

    fn forget(&self, source: SourceId) {
        self.streams.lock().remove(&source);
    }
}

/// Credits of one message that is not delivered yet.
struct Taken {
    stream: OwnedSemaphorePermit,
    all: OwnedSemaphorePermit,
}

impl Taken {
    /// The message is delivered: whoever applies it gives the credits back.
    fn pass_on(self) {
        self.stream.forget();
        self.all.forget();
    }
}

/// The way from the sockets' tasks to the indexing thread.
#[derive(Clone, Debug)]
pub struct PumpSink {
    pump: PumpSender,
    credits: Arc<Credits>,
}

impl Sink for PumpSink {
    async fn deliver(&self, source: SourceId, event: StreamEvent) -> Result<(), Closed> {
        let weight = self.credits.weight(&event);
        let taken = self.credits.take(source, weight).await?;
        self.pump.deliver(source, event, weight).map_err(|_| Closed)?;
        taken.pass_on();
        Ok(())
    }
}

/// The two ends that a driver joins, made before the pump.
#[derive(Debug)]
pub struct DriverParts {
    actions: mpsc::UnboundedReceiver<Action>,
    credits: Arc<Credits>,
    config: DriverConfig,
}

/// Makes what the pump needs, and what the driver needs once the pump runs.
pub fn prepare(clock: Clock, config: DriverConfig) -> (LiveSurroundings, DriverParts) {
    let credits = Arc::new(Credits::new(&config));
    let (sender, actions) = mpsc::unbounded_channel();
    let surroundings = LiveSurroundings { clock, actions: sender, credits: Arc::clone(&credits) };
    (surroundings, DriverParts { actions, credits, config })
}

/// Runs until the pump has ended, or this future is dropped: then every connection is closed, and with the
/// last way in gone the pump applies what is left and ends.
pub async fn drive(handle: Handle, pump: PumpSender, parts: DriverParts) {
    let DriverParts { mut actions, credits, mut config } = parts;
    config.share_connections();
    let sink = PumpSink { pump, credits: Arc::clone(&credits) };
    let mut driver = Driver { handle, sink, config, subscribers: HashMap::new(), replays: HashMap::new() };
    while let Some(action) = actions.recv().await {
        driver.carry_out(action).await;
    }
}

struct Driver {
    handle: Handle,
    sink: PumpSink,
    config: DriverConfig,
    subscribers: HashMap<SourceId, SubscriberHandle>,
    replays: HashMap<(SourceId, ReplayId), ReplayHandle>,
}

/// All topics: what an engine publishes under another one than the configured must be seen to be told.
const ALL_TOPICS: &str = "";

impl Driver {
    async fn carry_out(&mut self, action: Action) {
        match action {
            Action::Subscribe { source, rank, endpoint, .. } => {
                let spawned = spawn_subscriber(
                    &self.handle,
                    source,
                    endpoint.address(),
                    endpoint.binds(),
                    ALL_TOPICS,
                    self.sink.clone(),
                    self.config.subscriber.clone(),
                );
                match spawned {
                    Ok(subscriber) => {
                        info!(%rank, endpoint = endpoint.address(), "listening");
                        self.subscribers.insert(source, subscriber);
                    }
                    Err(error) => {
                        warn!(%rank, %error, "cannot listen");
                        self.tell(source, StreamEvent::Unreachable { why: error.to_string() });
                    }
                }
            }
            Action::Unsubscribe { source } => {
                self.subscribers.remove(&source);
                self.replays.retain(|(of, _), _| *of != source);
                self.sink.credits.forget(source);
            }
            Action::AskReplay { source, endpoint, request, from } => {
                // Requests end by themselves; the ended ones are swept when a new one comes.
                self.replays.retain(|_, replay| !replay.is_finished());
                let sink = self.sink.clone();
                let address = endpoint.address();
                match spawn_replay(&self.handle, source, address, request, from, sink, &self.config.replay) {
                    Ok(replay) => {
                        self.replays.insert((source, request), replay);
                    }
                    Err(error) => {
                        warn!(endpoint = address, %error, "cannot ask for history");
                        let why = ReplayFailure::Unreachable;
                        self.tell(source, StreamEvent::ReplayFailed { request, why });
                    }
                }
            }
            Action::TryConnection { source, endpoint, request } => {
                self.try_connection(source, &endpoint, request)
            }
            Action::Reconnect { source } => {
                if let Some(subscriber) = self.subscribers.get(&source) {
                    subscriber.redial();
                }
            }
            Action::CancelReplay { source, request } => {
                self.replays.remove(&(source, request));
            }
        }
    }
}

impl Driver {
    /// Shakes hands on a connection of its own, which is dropped at once.
    fn try_connection(&self, source: SourceId, endpoint: &Endpoint, request: ReplayId) {
        let Ok(target) = Target::to_dial(endpoint.address()) else {
            return self.tell(source, StreamEvent::Tried { request, reached: false });
        };
        let (sink, dial, places) =
            (self.sink.clone(), self.config.subscriber.dial, Arc::clone(&self.config.replay.asks));
        self.handle.spawn(async move {
            let place = places.acquire_owned().await;
            let reached = shakes_hands(&target, &dial).await;
            drop(place);
            let _ = sink.deliver(source, StreamEvent::Tried { request, reached }).await;
        });
    }

    /// Says something that no task of the stream can say.
    fn tell(&self, source: SourceId, event: StreamEvent) {
        let sink = self.sink.clone();
        self.handle.spawn(async move {
            // Closed: then nobody needs to know.
            let _ = sink.deliver(source, event).await;
        });
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("subscribers", &self.subscribers.len()).finish_non_exhaustive()
    }
}

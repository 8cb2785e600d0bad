//! A publisher of our own: the engine's side of the wire, for replaying captures, mock engines and tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use parking_lot::Mutex;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use zeromq::util::PeerIdentity;
use zeromq::{
    RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend, XPubSocket, ZmqError, ZmqMessage, ZmqResult,
};

use super::endpoint::{BadEndpoint, Target};
use crate::ids::EventSeq;

/// Messages between [`Publisher::publish`] and the socket. Few: the socket's own buffers do the smoothing.
const QUEUE: usize = 64;

/// How long one message of a replay answer waits for its reader. A reader that has not read for so long gets no
/// more of it, and the next one is served.
const REPLAY_PATIENCE: Duration = Duration::from_secs(5);

/// Which frames the answers to a replay request have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplayFraming {
    /// `topic, number, payload`: vLLM from 0.26.0, SGLang from 0.5.22.
    #[default]
    WithTopic,
    /// `number, payload`: everything older.
    WithoutTopic,
}

/// How a [`Publisher`] behaves.
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// The first frame of every message.
    pub topic: String,
    /// Batches that a replay can give; the oldest goes when one more comes. Engines keep 10,000.
    pub buffer: usize,
    /// The frames of replay answers.
    pub framing: ReplayFraming,
    /// How long [`Publisher::close`] waits for readers.
    pub linger: Duration,
}

impl Default for PublisherConfig {
    fn default() -> Self {
        Self {
            topic: String::new(),
            buffer: 10_000,
            framing: ReplayFraming::default(),
            linger: Duration::from_secs(5),
        }
    }
}

/// Why something could not be published.
#[derive(Debug, Error)]
pub enum PublishError {
    /// The endpoint's text is wrong.
    #[error(transparent)]
    Endpoint(#[from] BadEndpoint),
    /// The endpoint cannot be bound.
    #[error("cannot bind {endpoint}: {source}")]
    Bind {
        /// The endpoint.
        endpoint: String,
        /// The library's reason.
        source: ZmqError,
    },
    /// The publisher's task has ended.
    #[error("the publisher is closed")]
    Closed,
}

/// Publishes numbered batches on one port, and answers requests for history on another.
///
/// Unlike an engine's PUB it drops nothing: while a subscriber does not read, [`Publisher::publish`] waits. (A
/// PUB of `zeromq` keeps 100,000 messages per subscriber whatever their size, and loses them when dropped.)
/// Dropping a publisher closes it at once and frees its ports soon; [`Publisher::close`] does both in order.
#[derive(Debug)]
pub struct Publisher {
    commands: mpsc::Sender<Command>,
    topic: Bytes,
    history: Arc<History>,
    events_endpoint: String,
    replay_endpoint: Option<String>,
    subscriptions: watch::Receiver<usize>,
    linger: Duration,
    events_task: JoinHandle<()>,
    replay_task: Option<(JoinHandle<()>, oneshot::Sender<oneshot::Sender<()>>)>,
}

impl Publisher {
    /// Binds both endpoints (port 0 lets the system choose) on the runtime that it is called on.
    ///
    /// # Errors
    /// An endpoint that cannot be bound.
    pub async fn bind(
        events_endpoint: &str,
        replay_endpoint: Option<&str>,
        config: PublisherConfig,
    ) -> Result<Self, PublishError> {
        let mut socket = XPubSocket::new();
        let monitor = socket.monitor();
        let bound_events = bind(&mut socket, events_endpoint).await?;
        let replay = match replay_endpoint {
            Some(endpoint) => {
                let mut router = RouterSocket::new();
                let bound = bind(&mut router, endpoint).await?;
                Some((router, bound))
            }
            None => None,
        };
        let topic = Bytes::from(config.topic.into_bytes());
        let history = Arc::new(History::new(config.buffer));
        let (commands, receiver) = mpsc::channel(QUEUE);
        let (counted, subscriptions) = watch::channel(0);
        let events = EventsSocket { socket, monitor, peers: VecDeque::new(), subscriptions: counted };
        let events_task = tokio::spawn(run_events(events, receiver));
        let (replay_endpoint, replay_task) = replay.map_or((None, None), |(router, bound)| {
            let (close, closed) = oneshot::channel();
            let answers =
                Answers { history: Arc::clone(&history), topic: topic.clone(), framing: config.framing };
            (Some(bound), Some((tokio::spawn(run_replays(router, answers, closed)), close)))
        });
        Ok(Self {
            commands,
            topic,
            history,
            events_endpoint: bound_events,
            replay_endpoint,
            subscriptions,
            linger: config.linger,
            events_task,
            replay_task,
        })
    }

    /// The endpoint of the events that is really bound.
    pub fn events_endpoint(&self) -> &str {
        &self.events_endpoint
    }

    /// The endpoint of the replays that is really bound.
    pub fn replay_endpoint(&self) -> Option<&str> {
        self.replay_endpoint.as_deref()
    }

    /// Publishes a batch and keeps it for replays. Waits while a subscriber does not read and the buffers
    /// between are full; may be cancelled, the batch is then kept for replays and perhaps not published.
    ///
    /// # Errors
    /// The publisher's task has ended.
    pub async fn publish(&self, seq: EventSeq, payload: Bytes) -> Result<(), PublishError> {
        self.history.insert(seq, payload.clone());
        self.send(numbered(Some(self.topic.clone()), seq, payload)).await
    }

    /// Publishes frames as they are, whatever they say; nothing is kept for replays, see
    /// [`Publisher::remember`]. Waits as [`Publisher::publish`] does. No frames are no message.
    ///
    /// # Errors
    /// The publisher's task has ended.
    pub async fn publish_frames(&self, frames: Vec<Bytes>) -> Result<(), PublishError> {
        match ZmqMessage::try_from(frames) {
            Ok(message) => self.send(message).await,
            Err(_) => Ok(()),
        }
    }

    async fn send(&self, message: ZmqMessage) -> Result<(), PublishError> {
        self.commands.send(Command::Publish(message)).await.map_err(|_| PublishError::Closed)
    }

    /// Keeps a batch for replays without publishing it, as an engine's subscriber sees a lost message.
    pub fn remember(&self, seq: EventSeq, payload: Bytes) {
        self.history.insert(seq, payload);
    }

    /// Forgets what a replay could give, as an engine that starts anew has nothing to give.
    pub fn forget(&self) {
        self.history.clear();
    }

    /// Subscriptions received since it was bound. One that came counts on after its subscriber has gone.
    pub fn subscriptions(&self) -> usize {
        *self.subscriptions.borrow()
    }

    /// Waits until `count` subscriptions have been received: what is published from then on reaches them.
    ///
    /// # Errors
    /// The publisher's task has ended.
    pub async fn subscribed(&self, count: usize) -> Result<(), PublishError> {
        let mut subscriptions = self.subscriptions.clone();
        subscriptions.wait_for(|seen| *seen >= count).await.map_err(|_| PublishError::Closed)?;
        Ok(())
    }

    /// Hands what was published to the connections, lets readers of replays finish, closes both and frees the
    /// ports. Waits for each no longer than the configured linger time.
    pub async fn close(mut self) {
        let (done, closed) = oneshot::channel();
        let publishing = async {
            if self.commands.send(Command::Close(done)).await.is_ok() {
                let _ = closed.await;
            }
        };
        let _ = timeout(self.linger, publishing).await;
        if let Some((task, close)) = self.replay_task.take() {
            let (done, closed) = oneshot::channel();
            if close.send(done).is_ok() {
                let _ = timeout(self.linger, closed).await;
            }
            task.abort();
            let _ = task.await;
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.events_task.abort();
        if let Some((task, _)) = &self.replay_task {
            task.abort();
        }
    }
}

#[derive(Debug)]
enum Command {
    Publish(ZmqMessage),
    Close(oneshot::Sender<()>),
}

/// The last batches, by number.
#[derive(Debug)]
struct History {
    batches: Mutex<BTreeMap<EventSeq, Bytes>>,
    limit: usize,
}

impl History {
    fn new(limit: usize) -> Self {
        Self { batches: Mutex::new(BTreeMap::new()), limit }
    }

    fn insert(&self, seq: EventSeq, payload: Bytes) {
        let mut batches = self.batches.lock();
        batches.insert(seq, payload);
        while batches.len() > self.limit {
            batches.pop_first();
        }
    }

    fn clear(&self) {
        self.batches.lock().clear();
    }

    fn from(&self, start: EventSeq) -> Vec<(EventSeq, Bytes)> {
        self.batches.lock().range(start..).map(|(seq, payload)| (*seq, payload.clone())).collect()
    }
}

async fn bind<S: Socket>(socket: &mut S, endpoint: &str) -> Result<String, PublishError> {
    let target = Target::to_bind(endpoint)?.to_string();
    match socket.bind(&target).await {
        Ok(bound) => Ok(bound.to_string()),
        Err(source) => Err(PublishError::Bind { endpoint: target, source }),
    }
}

/// The publishing socket. An XPUB, not a PUB: its `send` returns when the bytes are the kernel's, and it shows
/// the subscriptions.
///
/// A dropped XPUB of the library leaves its connections open for ever (their wakers and their queue own each
/// other), so the peers are remembered and cut off one by one.
struct EventsSocket {
    socket: XPubSocket,
    monitor: futures::channel::mpsc::Receiver<SocketEvent>,
    peers: VecDeque<PeerIdentity>,
    subscriptions: watch::Sender<usize>,
}

/// Peers remembered for cutting them off. Who has left cannot be told from who has not; the oldest of so many
/// has left, or keeps a descriptor.
const MAX_PEERS: usize = 10_000;

impl EventsSocket {
    fn note_peer(&mut self, event: Option<SocketEvent>) {
        if let Some(SocketEvent::Accepted(_, peer)) = event {
            if self.peers.len() == MAX_PEERS {
                self.peers.pop_front();
            }
            self.peers.push_back(peer);
        }
    }

    fn note_subscription(&self, received: ZmqResult<ZmqMessage>) {
        if let Ok(message) = received
            && message.get(0).and_then(|frame| frame.first()) == Some(&1)
        {
            self.subscriptions.send_modify(|count| *count += 1);
        }
    }

    /// Frees the port. Bytes that were not read would make the kernel reset the connections instead of
    /// closing them after what is still on its way.
    async fn close(mut self) {
        self.socket.unbind_all().await;
        while let Some(received) = self.socket.recv().now_or_never() {
            self.note_subscription(received);
        }
    }
}

impl Drop for EventsSocket {
    fn drop(&mut self) {
        while let Ok(event) = self.monitor.try_recv() {
            self.note_peer(Some(event));
        }
        let backend = self.socket.backend();
        for peer in &self.peers {
            backend.peer_disconnected(peer);
        }
    }
}

/// Publishes what is asked for, in order. Between messages the socket is read, or it would notice neither
/// subscriptions nor who has left.
async fn run_events(mut events: EventsSocket, mut commands: mpsc::Receiver<Command>) {
    loop {
        tokio::select! {
            biased;
            event = events.monitor.next() => events.note_peer(event),
            received = events.socket.recv() => events.note_subscription(received),
            command = commands.recv() => match command {
                Some(Command::Publish(message)) => {
                    if let Err(error) = events.socket.send(message).await {
                        tracing::debug!(%error, "a subscriber did not get a message");
                    }
                }
                Some(Command::Close(done)) => {
                    events.close().await;
                    let _ = done.send(());
                    return;
                }
                None => return,
            },
        }
    }
}

/// What replay answers are made of.
struct Answers {
    history: Arc<History>,
    topic: Bytes,
    framing: ReplayFraming,
}

async fn run_replays(
    mut socket: RouterSocket,
    answers: Answers,
    mut close: oneshot::Receiver<oneshot::Sender<()>>,
) {
    let mut monitor = socket.monitor();
    let mut peers = 0_usize;
    let mut closing = None;
    loop {
        // Readers hang up when they have read the end mark; until then their queues are not empty.
        if peers == 0 && closing.is_some() {
            break;
        }
        tokio::select! {
            biased;
            event = monitor.next() => match event {
                Some(SocketEvent::Accepted(..)) => peers += 1,
                Some(SocketEvent::Disconnected(_)) => peers = peers.saturating_sub(1),
                _ => {}
            },
            request = socket.recv() => if let Ok(request) = request {
                answers.give(&mut socket, request).await;
            },
            asked = &mut close, if closing.is_none() => match asked {
                Ok(done) => closing = Some(done),
                Err(_) => return,
            },
        }
    }
    socket.close().await;
    if let Some(done) = closing {
        let _ = done.send(());
    }
}

impl Answers {
    /// Everything from the number asked for, then the end mark. A request without the empty frame is dropped
    /// without a word, as engines do.
    async fn give(&self, socket: &mut RouterSocket, request: ZmqMessage) {
        let frames = request.into_vec();
        let [identity, delimiter, start] = frames.as_slice() else { return };
        if !delimiter.is_empty() {
            return;
        }
        for (seq, payload) in self.history.from(number(start)) {
            let sending = socket.send(self.frames(identity, seq, payload));
            if !matches!(timeout(REPLAY_PATIENCE, sending).await, Ok(Ok(()))) {
                return;
            }
        }
        let end = socket.send(self.frames(identity, EventSeq::END_MARK, Bytes::new()));
        let _ = timeout(REPLAY_PATIENCE, end).await;
    }

    fn frames(&self, identity: &Bytes, seq: EventSeq, payload: Bytes) -> ZmqMessage {
        let topic = match self.framing {
            // The end mark has an empty topic whatever the topic is.
            ReplayFraming::WithTopic if seq == EventSeq::END_MARK => Some(Bytes::new()),
            ReplayFraming::WithTopic => Some(self.topic.clone()),
            ReplayFraming::WithoutTopic => None,
        };
        let mut message = numbered(topic, seq, payload);
        message.push_front(Bytes::new());
        message.push_front(identity.clone());
        message
    }
}

fn numbered(topic: Option<Bytes>, seq: EventSeq, payload: Bytes) -> ZmqMessage {
    let mut message = ZmqMessage::from(payload);
    message.push_front(Bytes::copy_from_slice(&seq.0.to_be_bytes()));
    if let Some(topic) = topic {
        message.push_front(topic);
    }
    message
}

/// A big-endian number of any length; one past 64 bits is past every batch.
fn number(bytes: &[u8]) -> EventSeq {
    let mut value: u64 = 0;
    for byte in bytes {
        match value.checked_mul(256) {
            Some(shifted) => value = shifted | u64::from(*byte),
            None => return EventSeq::END_MARK,
        }
    }
    EventSeq(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn history_keeps_the_newest_numbers() {
        let history = History::new(3);
        for seq in [4, 1, 2, 3, 0] {
            history.insert(EventSeq(seq), Bytes::new());
        }
        let kept: Vec<u64> = history.from(EventSeq(0)).iter().map(|(seq, _)| seq.0).collect();
        assert_eq!(kept, [2, 3, 4]);
        assert_eq!(history.from(EventSeq(4)).len(), 1);
        assert!(history.from(EventSeq::END_MARK).is_empty());
    }

    #[test]
    fn numbers_of_any_length_are_read() {
        assert_eq!(number(&[]), EventSeq(0));
        assert_eq!(number(&[1, 2]), EventSeq(258));
        assert_eq!(number(&[0; 20]), EventSeq(0));
        assert_eq!(number(&[1; 9]), EventSeq::END_MARK);
        assert_eq!(number(&[0xff; 8]), EventSeq::END_MARK);
    }
}

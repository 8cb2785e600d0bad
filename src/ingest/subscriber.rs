//! One supervised SUB task per rank.
//!
//! Every connection gets a socket of its own, which is dropped when anything about it looks wrong. `zeromq`
//! re-establishes lost connections by itself, and that must not be relied on: if the peer resets the
//! connection between the handshake and our subscription, the library reports success and is deaf for ever.
//! So we subscribe *after* connecting, where a failure to send is an error that we see, and we are gone before
//! its own first attempt to reconnect.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::channel::mpsc;
use rand::TryRngCore;
use rand::rngs::OsRng;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use zeromq::util::PeerIdentity;
use zeromq::{Socket, SocketEvent, SocketRecv, SubSocket, ZmqError, ZmqMessage, ZmqResult};

use super::backoff::{Backoff, BackoffConfig};
use super::dial::{DialConfig, DialError, dial};
use super::frames::copy_frames;
use super::{Closed, Sink, StreamEvent};
use crate::ids::SourceId;
use crate::wire::endpoint::{BadEndpoint, Target};

/// How a subscriber treats its connection.
#[derive(Clone, Debug)]
pub struct SubscriberConfig {
    /// Limits of one attempt to connect.
    pub dial: DialConfig,
    /// Waits between attempts.
    pub backoff: BackoffConfig,
    /// Seed of the jitter, combined with the source's number; `None` takes one from the system.
    pub seed: Option<u64>,
    /// A message longer than this is dropped and said. Above the decoder's limit of 128 MiB, so that what is
    /// refused is refused in one place. Not a limit on what the library reads: it has none.
    pub max_message_bytes: usize,
    /// Connections that may stand at once, over all ranks; `None` is no bound of ours.
    pub connections: Option<Arc<Semaphore>>,
}

impl Default for SubscriberConfig {
    fn default() -> Self {
        Self {
            dial: DialConfig::default(),
            backoff: BackoffConfig::default(),
            seed: None,
            max_message_bytes: 144 << 20,
            connections: None,
        }
    }
}

/// What a subscriber has counted since it was spawned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SubscriberStats {
    /// Connections made (or accepted, where we bind).
    pub connects: u64,
    /// Attempts that met nobody.
    pub refusals: u64,
    /// Attempts that failed otherwise: mute, unreachable or foreign peers, ports that cannot be bound.
    pub failures: u64,
    /// Connections lost after they were made.
    pub losses: u64,
    /// Messages received, dropped ones included.
    pub messages: u64,
    /// Messages dropped for their size or their number of frames.
    pub oversized: u64,
    /// Publishers turned away because a bound endpoint already had one.
    pub second_peers: u64,
}

/// Starts a task that keeps `endpoint` subscribed and delivers what comes to `sink` as `source`.
///
/// `binds` is for engines that connect to us (any endpoint without a wildcard, in vLLM): one publisher is
/// accepted at a time, others are turned away and counted. `topic` is a prefix, as ZMQ has it; empty is all.
///
/// The task lives on `handle`'s runtime until the handle that is returned is dropped or stopped, or until the
/// sink is closed.
///
/// # Errors
/// An endpoint that cannot be dialled or bound, whatever the network does.
pub fn spawn_subscriber<S: Sink>(
    handle: &Handle,
    source: SourceId,
    endpoint: &str,
    binds: bool,
    topic: &str,
    sink: S,
    config: SubscriberConfig,
) -> Result<SubscriberHandle, BadEndpoint> {
    let target = if binds { Target::to_bind(endpoint)? } else { Target::to_dial(endpoint)? };
    if let (true, Target::Ipc(_)) = (binds, &target) {
        return Err(BadEndpoint::BindTransport(endpoint.to_owned()));
    }
    let counters = Arc::new(Counters::default());
    let redial = Arc::new(Notify::new());
    let (stop, stopped) = watch::channel(false);
    let (bound_sender, bound) = watch::channel(None);
    let seed = config.seed.unwrap_or_else(system_seed) ^ source.0;
    let supervisor = Supervisor {
        source,
        target,
        topic: topic.to_owned(),
        sink,
        backoff: Backoff::new(config.backoff, seed),
        config,
        counters: Arc::clone(&counters),
        signals: Signals { stop: stopped, redial: Arc::clone(&redial) },
    };
    let task = handle.spawn(async move {
        let ended =
            if binds { supervisor.run_bound(bound_sender).await } else { supervisor.run_dialling().await };
        if ended.is_err() {
            tracing::debug!(source = source.0, "subscriber ends: its receiver is gone");
        }
    });
    Ok(SubscriberHandle { task, stop, redial, counters, bound })
}

/// A running subscriber. Dropping it ends the task and closes the connection at once.
#[derive(Debug)]
pub struct SubscriberHandle {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
    redial: Arc<Notify>,
    counters: Arc<Counters>,
    bound: watch::Receiver<Option<String>>,
}

impl SubscriberHandle {
    /// Ends the task between two deliveries, and waits for it. Waits as long as the sink makes a delivery
    /// that is under way wait.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }

    /// Gives the connection up and makes a new one: for a stream that is suspiciously silent, since a peer
    /// whose host is gone without a word cannot be noticed from here.
    pub fn redial(&self) {
        self.redial.notify_one();
    }

    /// Whether the task has ended, because it was stopped or its sink was closed.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }

    /// What was counted so far.
    pub fn stats(&self) -> SubscriberStats {
        self.counters.snapshot()
    }

    /// The endpoint that is really bound, once it is: of use with port 0. Always `None` where we dial.
    pub fn bound_endpoint(&self) -> watch::Receiver<Option<String>> {
        self.bound.clone()
    }
}

impl Drop for SubscriberHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Debug, Default)]
struct Counters {
    connects: AtomicU64,
    refusals: AtomicU64,
    failures: AtomicU64,
    losses: AtomicU64,
    messages: AtomicU64,
    oversized: AtomicU64,
    second_peers: AtomicU64,
}

impl Counters {
    fn snapshot(&self) -> SubscriberStats {
        SubscriberStats {
            connects: self.connects.load(Ordering::Relaxed),
            refusals: self.refusals.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
            losses: self.losses.load(Ordering::Relaxed),
            messages: self.messages.load(Ordering::Relaxed),
            oversized: self.oversized.load(Ordering::Relaxed),
            second_peers: self.second_peers.load(Ordering::Relaxed),
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What the owner of the handle asks for.
struct Signals {
    stop: watch::Receiver<bool>,
    redial: Arc<Notify>,
}

impl Signals {
    /// Resolves when the task is to end. Safe to cancel.
    async fn stopped(&mut self) {
        let _ = self.stop.wait_for(|stop| *stop).await;
    }
}

/// All connections that the process has descriptors for are in use.
struct NoDescriptor;

const NO_DESCRIPTOR: &str =
    "no descriptor is left for it: the process has as many connections as its limit allows (ulimit -n)";

/// How a connection, or the attempt to make one, ended.
enum Ended {
    /// The owner wants the task to end.
    Stopped,
    /// No connection came about.
    Failed,
    /// There was one; `proven` if it has carried messages or lasted.
    Lost { proven: bool },
}

/// What happens to a socket, whichever comes first.
enum Occurrence {
    Stopped,
    Redial,
    Monitor(Option<SocketEvent>),
    Received(ZmqResult<ZmqMessage>),
    /// A connection knocked at the listener that we keep beside the socket.
    Knock,
}

struct Supervisor<S> {
    source: SourceId,
    target: Target,
    topic: String,
    sink: S,
    backoff: Backoff,
    config: SubscriberConfig,
    counters: Arc<Counters>,
    signals: Signals,
}

impl<S: Sink> Supervisor<S> {
    /// Dials for ever: one socket per connection.
    async fn run_dialling(mut self) -> Result<(), Closed> {
        loop {
            let ended = self.one_dialled_connection().await?;
            if self.pause_after(ended).await {
                return Ok(());
            }
        }
    }

    /// Binds once and keeps the port; accepts one publisher at a time.
    async fn run_bound(mut self, bound: watch::Sender<Option<String>>) -> Result<(), Closed> {
        let listener = loop {
            match listen(&self.target).await {
                Ok(listener) => break listener,
                Err(error) => {
                    self.failed(&format!("cannot listen on {}: {error}", self.target)).await?;
                }
            }
            if self.pause_after(Ended::Failed).await {
                return Ok(());
            }
        };
        if let (Ok(address), Target::Tcp { host, .. }) = (listener.local_addr(), &self.target) {
            let real = Target::Tcp { host: host.clone(), port: address.port() };
            bound.send_replace(Some(real.to_string()));
        }
        loop {
            let ended = self.one_accepted_connection(&listener).await?;
            if self.pause_after(ended).await {
                return Ok(());
            }
        }
    }

    /// Waits as the backoff says. True if the task is to end.
    async fn pause_after(&mut self, ended: Ended) -> bool {
        match ended {
            Ended::Stopped => return true,
            Ended::Lost { proven: true } => self.backoff.reset(),
            Ended::Lost { proven: false } | Ended::Failed => {}
        }
        let delay = self.backoff.next_delay();
        tokio::select! {
            biased;
            () = self.signals.stopped() => true,
            () = sleep(delay) => false,
        }
    }

    async fn one_dialled_connection(&mut self) -> Result<Ended, Closed> {
        let Ok(_descriptor) = self.descriptor() else { return self.failed(NO_DESCRIPTOR).await };
        let mut socket = SubSocket::with_options(self.config.dial.socket_options());
        let mut monitor = socket.monitor();
        let dialled = tokio::select! {
            biased;
            () = self.signals.stopped() => return Ok(Ended::Stopped),
            result = dial(&mut socket, &self.target, &self.config.dial) => result,
        };
        let dialled = match dialled {
            Ok(()) => self.subscribe(&mut socket).await.map_err(DialError::from),
            failed => failed,
        };
        match dialled {
            Ok(()) => {}
            Err(DialError::Refused) => {
                count(&self.counters.refusals);
                self.deliver(StreamEvent::Refused).await?;
                return Ok(Ended::Failed);
            }
            Err(why) => return self.failed(&why.to_string()).await,
        }
        self.connected().await?;
        self.read(&mut socket, &mut monitor, None, None).await
    }

    async fn one_accepted_connection(&mut self, listener: &TcpListener) -> Result<Ended, Closed> {
        let Ok(_descriptor) = self.descriptor() else { return self.failed(NO_DESCRIPTOR).await };
        let mut socket = SubSocket::with_options(self.config.dial.socket_options());
        let mut monitor = socket.monitor();
        let accepted = tokio::select! {
            biased;
            () = self.signals.stopped() => return Ok(Ended::Stopped),
            result = accept_one(&mut socket, &mut monitor, listener, &self.counters) => result,
        };
        let subscribed = match accepted {
            // Subscribed only now: of a peer that is gone again, the sending says so.
            Ok(peer) => self.subscribe(&mut socket).await.map(|()| peer),
            Err(error) => Err(error),
        };
        let peer = match subscribed {
            Ok(peer) => peer,
            Err(error) => return self.failed(&error.to_string()).await,
        };
        self.connected().await?;
        self.read(&mut socket, &mut monitor, Some(peer), Some(listener)).await
    }

    /// A place for one more connection; none is left when the process would run out of descriptors.
    fn descriptor(&self) -> Result<Option<OwnedSemaphorePermit>, NoDescriptor> {
        match &self.config.connections {
            None => Ok(None),
            Some(all) => Arc::clone(all).try_acquire_owned().map(Some).map_err(|_| NoDescriptor),
        }
    }

    /// No connection came about.
    async fn failed(&self, why: &str) -> Result<Ended, Closed> {
        count(&self.counters.failures);
        tracing::debug!(source = self.source.0, endpoint = %self.target, why, "no connection");
        self.deliver(StreamEvent::Unreachable { why: why.to_owned() }).await?;
        Ok(Ended::Failed)
    }

    /// Sends the subscription, after the connection is there.
    async fn subscribe(&self, socket: &mut SubSocket) -> ZmqResult<()> {
        let limit = self.config.dial.connect_timeout;
        match timeout(limit, socket.subscribe(&self.topic)).await {
            Ok(sent) => sent,
            Err(_) => Err(ZmqError::ConnectTimeout(limit)),
        }
    }

    async fn connected(&self) -> Result<(), Closed> {
        count(&self.counters.connects);
        tracing::info!(source = self.source.0, endpoint = %self.target, "connected");
        self.deliver(StreamEvent::Connected).await
    }

    /// Delivers messages until the connection is gone, and says that it is.
    ///
    /// `peer` and `listener` are those of a bound socket: other peers are turned away.
    async fn read(
        &mut self,
        socket: &mut SubSocket,
        monitor: &mut mpsc::Receiver<SocketEvent>,
        peer: Option<PeerIdentity>,
        listener: Option<&TcpListener>,
    ) -> Result<Ended, Closed> {
        let since = Instant::now();
        let mut carried = false;
        // The announcement of our own connection is still in the monitor; a second one is the library's.
        let mut announced = 0;
        let why = loop {
            match next(socket, monitor, &mut self.signals, listener).await {
                Occurrence::Stopped => {
                    self.deliver(StreamEvent::Disconnected).await?;
                    return Ok(Ended::Stopped);
                }
                Occurrence::Received(Ok(message)) => {
                    carried = true;
                    self.receive(&message).await?;
                }
                Occurrence::Received(Err(error)) => break error.to_string(),
                Occurrence::Redial => break "redial was asked for".to_owned(),
                Occurrence::Knock => self.turned_away(),
                Occurrence::Monitor(None) => break "the monitor is gone".to_owned(),
                Occurrence::Monitor(Some(event)) => match event {
                    SocketEvent::Connected(..) => {
                        announced += 1;
                        if announced > 1 {
                            break "the library has reconnected".to_owned();
                        }
                    }
                    SocketEvent::Disconnected(id) if peer.as_ref().is_none_or(|own| *own == id) => {
                        break "the peer has closed".to_owned();
                    }
                    SocketEvent::Accepted(_, id) => {
                        // Its handshake was under way when the first was accepted. One of the same name has
                        // replaced the first.
                        if peer.as_ref() == Some(&id) {
                            break "replaced by a peer of the same name".to_owned();
                        }
                        socket.backend().peer_disconnected(&id);
                        self.turned_away();
                    }
                    _ => {}
                },
            }
        };
        count(&self.counters.losses);
        tracing::info!(source = self.source.0, endpoint = %self.target, why, "disconnected");
        self.deliver(StreamEvent::Disconnected).await?;
        // A peer that resets each connection at once must not be dialled at the shortest delay for ever.
        Ok(Ended::Lost { proven: carried || since.elapsed() >= self.config.backoff.max })
    }

    async fn receive(&self, message: &ZmqMessage) -> Result<(), Closed> {
        count(&self.counters.messages);
        match copy_frames(message, self.config.max_message_bytes) {
            Some(frames) => self.deliver(StreamEvent::Message(frames)).await,
            None => {
                count(&self.counters.oversized);
                self.deliver(StreamEvent::TooLarge).await
            }
        }
    }

    fn turned_away(&self) {
        // Once loudly: such a peer comes back several times a second.
        if self.counters.second_peers.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(source = self.source.0, endpoint = %self.target, "a second publisher is turned away");
        }
    }

    async fn deliver(&self, event: StreamEvent) -> Result<(), Closed> {
        self.sink.deliver(self.source, event).await
    }
}

/// A seed of the system's. Without one all ranks of one process still differ by their source's number.
fn system_seed() -> u64 {
    OsRng.try_next_u64().unwrap_or(0)
}

/// The next thing that happens. The monitor goes before messages, so that a flood cannot hide it; what it says
/// about an end comes after the last message has been read.
async fn next(
    socket: &mut SubSocket,
    monitor: &mut mpsc::Receiver<SocketEvent>,
    signals: &mut Signals,
    listener: Option<&TcpListener>,
) -> Occurrence {
    let Signals { stop, redial } = signals;
    tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop) => Occurrence::Stopped,
        () = redial.notified() => Occurrence::Redial,
        event = monitor.next() => Occurrence::Monitor(event),
        () = knock(listener) => Occurrence::Knock,
        message = socket.recv() => Occurrence::Received(message),
    }
}

/// Accepts a connection and closes it. Never resolves without a listener.
async fn knock(listener: Option<&TcpListener>) {
    match listener {
        Some(listener) => {
            while listener.accept().await.is_err() {
                // Out of descriptors, as a rule: the next attempt would fail at once, too.
                sleep(Duration::from_millis(100)).await;
            }
        }
        None => std::future::pending().await,
    }
}

/// Binds our own listener; the sockets of successive connections get duplicates of it, so that the port is
/// ours from the first to the last.
async fn listen(target: &Target) -> std::io::Result<TcpListener> {
    let Target::Tcp { host, port } = target else {
        return Err(std::io::ErrorKind::Unsupported.into());
    };
    let listener = TcpListener::bind((host.as_str(), *port)).await?;
    // Connections inherit it. An engine whose host is gone without a word would otherwise occupy the port for
    // ever, and its successor be turned away; so it is noticed after some 25 seconds.
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(3);
    SockRef::from(&listener).set_tcp_keepalive(&keepalive)?;
    Ok(listener)
}

/// Lets `socket` accept until one peer has shaken hands, then takes the listener back.
async fn accept_one(
    socket: &mut SubSocket,
    monitor: &mut mpsc::Receiver<SocketEvent>,
    listener: &TcpListener,
    counters: &Counters,
) -> ZmqResult<PeerIdentity> {
    let endpoint = socket.bind_listener(duplicate(listener)?).await?;
    loop {
        match monitor.next().await {
            Some(SocketEvent::Accepted(_, peer)) => {
                socket.unbind(endpoint).await?;
                return Ok(peer);
            }
            Some(SocketEvent::AcceptFailed(error)) => {
                count(&counters.failures);
                tracing::debug!(%error, "a stranger at a bound endpoint");
            }
            Some(_) => {}
            None => return Err(ZmqError::NoMessage),
        }
    }
}

/// A second handle of the same listening socket.
fn duplicate(listener: &TcpListener) -> std::io::Result<std::net::TcpListener> {
    listener.as_fd().try_clone_to_owned().map(std::net::TcpListener::from)
}

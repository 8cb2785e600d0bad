//! Connections: accepted up to a number, given limited time for their request heads, ended with the service.
//!
//! What a request may take once its head is there is the routes' business.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::{Extension, Router};
use hyper::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

/// What clients' connections may take.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections at once; further ones wait in the system's queue until one ends. Each takes a descriptor and
    /// some 10 KiB: a thousand routers, pages and scrapers, or 10 MiB.
    pub max_connections: usize,
    /// How long a connection may be without a whole request head: a client that sends one byte at a time, and one
    /// that keeps an idle connection. Long enough for routers that keep their connections warm and for scrapes
    /// every 15 s; clients connect again where it is not.
    pub head_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self { max_connections: 1_024, head_timeout: Duration::from_secs(30) }
    }
}

/// Told to handlers whose answers have no end of their own: the service is to stop.
#[derive(Clone, Debug)]
pub(super) struct Stopping(watch::Receiver<bool>);

impl Stopping {
    /// Waits until the service is to stop.
    pub(super) async fn stopped(&mut self) {
        // The sender goes with the service: that is a stop too.
        let _ = self.0.wait_for(|stop| *stop).await;
    }
}

/// Serves until `shutdown` completes, then answers what has begun and returns. Answers that have no end of their
/// own end then.
///
/// # Errors
///
/// None today: what cannot be accepted is said in the log and tried again.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    serve_with(listener, app, ConnectionLimits::default(), shutdown).await
}

/// [`serve`] with limits of one's own.
///
/// # Errors
///
/// As [`serve`].
pub async fn serve_with(
    listener: TcpListener,
    app: Router,
    limits: ConnectionLimits,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (stop, stopping) = watch::channel(false);
    let app = app.layer(Extension(Stopping(stopping.clone())));
    let mut door = Door::new(listener, limits.max_connections);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let (stream, place) = tokio::select! {
            biased;
            () = &mut shutdown => break,
            entered = door.next() => entered,
        };
        while connections.try_join_next().is_some() {}
        let stopping = stopping.clone();
        connections.spawn(connection(stream, app.clone(), limits.head_timeout, stopping, place));
    }
    // Who connects now is refused rather than left waiting.
    drop(door);
    stop.send_replace(true);
    while connections.join_next().await.is_some() {}
    Ok(())
}

/// Lets connections in, one place each.
struct Door {
    listener: TcpListener,
    places: Arc<Semaphore>,
    size: usize,
    said: Option<Instant>,
}

/// What is wrong with accepting is said once in this time, however often it happens.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// A system without descriptors has none a moment later either.
const TRY_AGAIN: Duration = Duration::from_millis(200);

impl Door {
    fn new(listener: TcpListener, size: usize) -> Self {
        let size = size.clamp(1, Semaphore::MAX_PERMITS);
        Self { listener, places: Arc::new(Semaphore::new(size)), size, said: None }
    }

    /// The next connection, with its place. May be dropped at any await.
    async fn next(&mut self) -> (TcpStream, OwnedSemaphorePermit) {
        loop {
            let place = self.place().await;
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    prepare(&stream);
                    return (stream, place);
                }
                Err(error) if is_the_clients(&error) => {}
                Err(error) => {
                    self.say(|| warn!(%error, "connections cannot be accepted"));
                    sleep(TRY_AGAIN).await;
                }
            }
        }
    }

    async fn place(&mut self) -> OwnedSemaphorePermit {
        loop {
            if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
                return place;
            }
            let size = self.size;
            self.say(|| {
                warn!(max_connections = size, "all places for HTTP connections are taken: more wait")
            });
            if let Ok(place) = Arc::clone(&self.places).acquire_owned().await {
                return place;
            }
        }
    }

    fn say(&mut self, what: impl FnOnce()) {
        if self.said.is_none_or(|at| at.elapsed() >= SAY_EVERY) {
            self.said = Some(Instant::now());
            what();
        }
    }
}

/// The connection was gone before it was accepted.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// A peer that is gone without a word is found out after this: by silence when nothing is under way, by what it
/// does not take otherwise. A minute is longer than networks and paused clients need.
const GONE_AFTER: Duration = Duration::from_secs(60);

fn prepare(stream: &TcpStream) {
    // Answers are small; they must not wait for the acknowledgement of what came before. Where the system refuses
    // one of these the connection is as good as one of before.
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(GONE_AFTER / 2).with_interval(GONE_AFTER / 6);
    let mut refused = stream.set_nodelay(true).err();
    refused = refused.or(socket.set_tcp_keepalive(&keepalive).err());
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        refused = refused.or(socket.set_tcp_user_timeout(Some(GONE_AFTER)).err());
    }
    if let Some(error) = refused {
        debug!(%error, "a connection's options could not be set");
    }
}

/// Serves one connection. Once the service is to stop, it ends with the answers that have begun; one that has
/// begun none is not waited for.
async fn connection(
    stream: TcpStream,
    app: Router,
    head_timeout: Duration,
    mut stopping: watch::Receiver<bool>,
    _place: OwnedSemaphorePermit,
) {
    let begun = Arc::<AtomicUsize>::default();
    let counted = Arc::clone(&begun);
    let app = TowerToHyperService::new(app);
    let service = service_fn(move |request: Request<Incoming>| {
        let begun = Begun::one(&counted);
        let answer = app.call(request);
        async move {
            let answer = answer.await?;
            Ok::<_, Infallible>(answer.map(|body| Answering { body, _begun: begun }))
        }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_timeout);
    let mut served = pin!(http.serve_connection(TokioIo::new(stream), service));
    tokio::select! {
        // Peers that break off or are too slow are no news.
        ended = &mut served => return ended.unwrap_or_else(|error| debug!(%error, "a connection has ended")),
        _ = stopping.wait_for(|stop| *stop) => {}
    }
    served.as_mut().graceful_shutdown();
    tokio::select! {
        ended = &mut served => ended.unwrap_or_else(|error| debug!(%error, "a connection has ended")),
        () = nothing_begun(&begun) => {}
    }
}

/// What has been written in full may still be on its way out for so long.
const LAST_BYTES: Duration = Duration::from_millis(300);

async fn nothing_begun(begun: &AtomicUsize) {
    loop {
        sleep(LAST_BYTES).await;
        if begun.load(Ordering::Relaxed) == 0 {
            return;
        }
    }
}

/// Counts a request from its head to the last byte of its answer.
struct Begun(Arc<AtomicUsize>);

impl Begun {
    fn one(of: &Arc<AtomicUsize>) -> Self {
        of.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(of))
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer's body.
struct Answering {
    body: Body,
    _begun: Begun,
}

impl HttpBody for Answering {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

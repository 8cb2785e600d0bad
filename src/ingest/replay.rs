//! One request for history, on a connection of its own.
//!
//! A fresh DEALER each time: `zeromq` never reconnects one, and a late answer to an older request cannot be
//! taken for an answer to this one. Answers can be lossy and the end mark can be lost, so everything here has
//! a time limit, and whether the answers are complete is for the receiver to check.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, ZmqMessage};

use super::dial::{DialConfig, DialError, dial};
use super::frames::copy_frames;
use super::{Closed, ReplayFailure, Sink, StreamEvent};
use crate::events::frame::is_replay_end;
use crate::events::order::ReplayId;
use crate::ids::{EventSeq, SourceId};
use crate::wire::endpoint::{BadEndpoint, Target};

/// Limits of requests for history. Clones share the places of `slots`.
#[derive(Clone, Debug)]
pub struct ReplayConfig {
    /// Limits of the attempt to connect. There is one attempt per request.
    pub dial: DialConfig,
    /// How long an answer may be waited for. A publisher answers between two batches, within about 0.1 s when
    /// idle and after its next step when busy.
    pub idle_timeout: Duration,
    /// How long the answers to one request may be waited for in all; time that the sink takes does not count.
    /// A full buffer of 10,000 batches takes well under a second, and a publisher whose answers trickle must
    /// not keep the places of others.
    pub total_timeout: Duration,
    /// Answers to one request. Engines keep 10,000 batches unless told otherwise; a hundred times as many is a
    /// publisher that does not stop.
    pub max_answers: usize,
    /// An answer longer than this is dropped, and its number shows as a hole.
    pub max_message_bytes: usize,
    /// The places for answers that are taken in at once, over all ranks. An endpoint that does not answer needs
    /// none, so it delays nobody.
    pub slots: Arc<Semaphore>,
    /// The places for requests that wait for their first answer. Each costs a descriptor.
    pub asks: Arc<Semaphore>,
}

impl ReplayConfig {
    /// Requests at once unless configured otherwise. Each can bring a publisher's whole buffer (10,000
    /// batches, some 30 MB) and holds back that publisher's live events while it lasts, and all of them are
    /// applied by one thread: more at once would only wait, with their data in kernel buffers.
    pub const DEFAULT_SLOTS: usize = 4;

    /// Requests that wait for an answer at once. Each costs a descriptor and some kilobytes; a fleet of this many
    /// mute endpoints delays nobody else.
    pub const DEFAULT_ASKS: usize = 512;

    /// The default limits with `slots` requests at once.
    pub fn with_slots(slots: usize) -> Self {
        Self {
            dial: DialConfig::default(),
            idle_timeout: Duration::from_secs(2),
            total_timeout: Duration::from_secs(60),
            max_answers: 1_000_000,
            max_message_bytes: 144 << 20,
            slots: Arc::new(Semaphore::new(slots.clamp(1, Semaphore::MAX_PERMITS))),
            asks: Arc::new(Semaphore::new(Self::DEFAULT_ASKS)),
        }
    }
}

impl Default for ReplayConfig {
    fn default() -> Self {
        Self::with_slots(Self::DEFAULT_SLOTS)
    }
}

/// Asks the replay endpoint for the batches from `from` on, and delivers the answers to `sink`.
///
/// The request waits for a place first, and says [`StreamEvent::ReplayAsked`] when it has been sent, and again
/// while its answer waits for a place to be taken in. It ends with the message that is the end mark, or with [`StreamEvent::ReplayFailed`], or without a word when the
/// handle is dropped. Answers wait in the connection while the sink is full.
///
/// # Errors
/// An endpoint that cannot be dialled, whatever the network does.
pub fn spawn_replay<S: Sink>(
    handle: &Handle,
    source: SourceId,
    endpoint: &str,
    request: ReplayId,
    from: EventSeq,
    sink: S,
    config: &ReplayConfig,
) -> Result<ReplayHandle, BadEndpoint> {
    let target = Target::to_dial(endpoint)?;
    let replay = Replay { source, target, request, from, sink, config: config.clone() };
    Ok(ReplayHandle { request, task: handle.spawn(replay.run()) })
}

/// A request that runs. Dropping it cancels the request and closes its connection.
#[derive(Debug)]
pub struct ReplayHandle {
    request: ReplayId,
    task: JoinHandle<()>,
}

impl ReplayHandle {
    /// The request.
    pub fn request(&self) -> ReplayId {
        self.request
    }

    /// Whether the request has ended, well or not.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

impl Drop for ReplayHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Replay<S> {
    source: SourceId,
    target: Target,
    request: ReplayId,
    from: EventSeq,
    sink: S,
    config: ReplayConfig,
}

/// Why the answers stopped.
enum Stop {
    Failed(ReplayFailure),
    Closed,
}

impl From<Closed> for Stop {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

impl<S: Sink> Replay<S> {
    async fn run(self) {
        // Closed only by us, and we never do: then there is nobody to limit.
        let _place = Arc::clone(&self.config.asks).acquire_owned().await;
        if let Err(Stop::Failed(why)) = self.ask().await {
            tracing::info!(source = self.source.0, endpoint = %self.target, ?why, "no replay");
            let _ = self.deliver(StreamEvent::ReplayFailed { request: self.request, why }).await;
        }
    }

    async fn ask(&self) -> Result<(), Stop> {
        let mut socket = DealerSocket::with_options(self.config.dial.socket_options());
        let mut monitor = socket.monitor();
        dial(&mut socket, &self.target, &self.config.dial).await.map_err(|error| {
            Stop::Failed(match error {
                DialError::Refused => ReplayFailure::Refused,
                DialError::TimedOut | DialError::Failed(_) => ReplayFailure::Unreachable,
            })
        })?;
        socket.send(request_frames(self.from)).await.map_err(|_| Stop::Failed(ReplayFailure::Closed))?;
        self.deliver(StreamEvent::ReplayAsked { request: self.request }).await?;
        self.forward_answers(&mut socket, &mut monitor).await
    }

    /// Returns when the end mark has been delivered.
    async fn forward_answers(
        &self,
        socket: &mut DealerSocket,
        monitor: &mut mpsc::Receiver<SocketEvent>,
    ) -> Result<(), Stop> {
        let mut left = self.config.total_timeout;
        let mut slot = None;
        for _ in 0..self.config.max_answers {
            let limit = self.config.idle_timeout.min(left);
            let asked = Instant::now();
            let answer = match timeout(limit, next_answer(socket, monitor)).await {
                Ok(Some(answer)) => answer,
                Ok(None) => return Err(Stop::Failed(ReplayFailure::Closed)),
                Err(_) if limit < self.config.idle_timeout => {
                    return Err(Stop::Failed(ReplayFailure::TooLong));
                }
                Err(_) => return Err(Stop::Failed(ReplayFailure::Idle)),
            };
            left = left.saturating_sub(asked.elapsed());
            if slot.is_none() {
                slot = Some(self.wait_for_slot().await?);
            }
            let Some(frames) = copy_frames(&answer, self.config.max_message_bytes) else {
                self.deliver(StreamEvent::TooLarge).await?;
                continue;
            };
            let last = is_replay_end(&frames);
            self.deliver(StreamEvent::ReplayMessage { request: self.request, frames }).await?;
            if last {
                return Ok(());
            }
        }
        Err(Stop::Failed(ReplayFailure::TooLong))
    }

    /// Waits for a place to take the answer in, and says meanwhile that the request is under way: its publisher
    /// has answered, and our own queue is not its silence.
    async fn wait_for_slot(&self) -> Result<OwnedSemaphorePermit, Closed> {
        let mut slot = pin!(Arc::clone(&self.config.slots).acquire_owned());
        loop {
            match timeout(STILL_WAITING, &mut slot).await {
                Ok(slot) => return slot.map_err(|_| Closed),
                Err(_) => self.deliver(StreamEvent::ReplayAsked { request: self.request }).await?,
            }
        }
    }

    async fn deliver(&self, event: StreamEvent) -> Result<(), Closed> {
        self.sink.deliver(self.source, event).await
    }
}

/// Well below any time limit on an answer.
const STILL_WAITING: Duration = Duration::from_millis(300);

/// The next answer, or `None` if the connection has ended or speaks nonsense. Safe to cancel.
async fn next_answer(
    socket: &mut DealerSocket,
    monitor: &mut mpsc::Receiver<SocketEvent>,
) -> Option<ZmqMessage> {
    loop {
        tokio::select! {
            biased;
            answer = socket.recv() => return answer.ok(),
            event = monitor.next() => if let Some(SocketEvent::Disconnected(_)) | None = event {
                return None;
            },
        }
    }
}

/// The empty frame is what a REQ socket would put there itself; a ROUTER at an engine drops requests without it.
fn request_frames(from: EventSeq) -> ZmqMessage {
    let mut message = ZmqMessage::from(Bytes::new());
    message.push_back(Bytes::copy_from_slice(&from.0.to_be_bytes()));
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(frames: &[&'static [u8]]) -> Vec<Bytes> {
        frames.iter().map(|f| Bytes::from_static(f)).collect()
    }

    #[test]
    fn a_request_is_delimiter_and_number() {
        let request: Vec<Bytes> = request_frames(EventSeq(258)).into_vec();
        assert_eq!(request, frames(&[b"", b"\0\0\0\0\0\0\x01\x02"]));
    }
}

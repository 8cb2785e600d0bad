//! The indexing thread: everything that happens goes through one channel to the one writer.
//!
//! Connections deliver messages, callers send commands; the thread drains what has gathered, applies it in
//! as few write sections as possible, hands out the actions that follow, and gives back the credits that the
//! messages had taken. It knows no socket; its clock and its actions' receiver are the caller's.
//!
//! **What it costs.** One thread that sleeps when there is nothing to do; a wake-up is about 16 µs. Messages
//! that gather while it works are applied together.

use std::any::Any;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

use bytes::Bytes;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use crate::events::order::ReplayId;
use crate::ids::{Moment, SourceId};
use crate::indexer::{Action, Indexer, Input};

/// What is applied before actions go out and credits come back, in blocks. A block takes a quarter of a
/// microsecond, so commands, publishers and the few questions that wait for a write section are held up for about
/// a millisecond. A single message may weigh more: it is one event and cannot be cut.
const MAX_DRAIN: u64 = 4_096;

/// What taking in a message or a command costs beside its blocks, in blocks: decoding and ordering an empty one
/// takes some microseconds.
const EACH: u64 = 8;

/// What a stream's tasks tell the indexing thread.
///
/// Frames are copied off the socket's read buffer: keeping one keeps its message's bytes alive, not the
/// buffer's 64 KiB.
#[derive(Clone, PartialEq, Debug)]
pub enum StreamEvent {
    /// A publisher is connected and our subscription is on its way to it. What it published before is not
    /// coming by this connection.
    Connected,
    /// The connection that was announced last is gone.
    Disconnected,
    /// Nobody listens at the endpoint. Said for each attempt, about once a second.
    Refused,
    /// No connection came about, for another reason. Said for each attempt.
    Unreachable {
        /// Why, in words.
        why: String,
    },
    /// A live message or an answer was over the limit and was dropped.
    TooLarge,
    /// A second connection was tried, to see whether anybody is there.
    Tried {
        /// The request.
        request: ReplayId,
        /// Whether it shook hands.
        reached: bool,
    },
    /// The frames of a live message, as received.
    Message(Vec<Bytes>),
    /// The request has had its turn and was sent; until now it has waited for one of the few places, and
    /// no time limit on its answers should have run.
    ReplayAsked {
        /// The request.
        request: ReplayId,
    },
    /// One answer to a request for history, the end mark included, without the empty delimiter in front.
    ReplayMessage {
        /// The request that is answered.
        request: ReplayId,
        /// The frames, to be read from the back: payload, number, perhaps a topic.
        frames: Vec<Bytes>,
    },
    /// No more answers will come to the request, and no end mark was seen.
    ReplayFailed {
        /// The request that failed.
        request: ReplayId,
        /// How.
        why: ReplayFailure,
    },
}

/// Why a request for history ended without an end mark.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReplayFailure {
    /// Nobody listens at the replay endpoint.
    Refused,
    /// Somebody listens and does not speak ZMTP with us in time, or the host cannot be reached.
    Unreachable,
    /// The publisher closed the connection, or sent what is not ZMTP.
    Closed,
    /// Nothing came for the idle limit: the end mark was dropped, or the publisher is stuck.
    Idle,
    /// Answers came for longer, or were more, than is allowed for one request.
    TooLong,
}

impl StreamEvent {
    /// What the message weighs in credits: about the number of blocks in it. A block takes at least some 64
    /// bytes on the wire, its hash and sixteen short tokens.
    pub fn weight(&self) -> u32 {
        let bytes: usize = match self {
            Self::Message(frames) | Self::ReplayMessage { frames, .. } => frames.iter().map(Bytes::len).sum(),
            _ => 0,
        };
        u32::try_from(1 + bytes / 64).unwrap_or(u32::MAX)
    }

    fn input(&self, source: SourceId) -> Input<'_> {
        match self {
            Self::Connected => Input::Connected { source },
            Self::Disconnected => Input::Disconnected { source },
            Self::Refused => Input::Refused { source },
            Self::Unreachable { why } => Input::Unreachable { source, why },
            Self::TooLarge => Input::TooLarge { source },
            Self::Tried { request, reached } => Input::Tried { source, request: *request, reached: *reached },
            Self::Message(frames) => Input::Frames { source, frames },
            Self::ReplayAsked { request } => Input::ReplayAsked { source, request: *request },
            Self::ReplayMessage { request, frames } => Input::Replay { source, request: *request, frames },
            Self::ReplayFailed { request, .. } => Input::ReplayFailed { source, request: *request },
        }
    }
}

/// What a thread pump needs from its surroundings.
pub trait Surroundings: Send + 'static {
    /// The moment. Must not go back.
    fn now(&self) -> Moment;
    /// Carries out an action, or passes it to whoever does. Must not block.
    fn act(&mut self, action: Action);
    /// A message of this weight was applied: its credits are free again.
    fn give_back(&mut self, source: SourceId, weight: u32);
}

type Call = Box<dyn FnOnce(&mut Indexer, Moment, &mut Vec<Action>) + Send>;

enum Message {
    Stream { source: SourceId, input: StreamEvent, weight: u32 },
    Call(Call),
}

impl Message {
    /// What applying it costs, in blocks.
    fn cost(&self) -> u64 {
        match self {
            // Not the credits that it took: those are capped where a message outweighs its stream's share.
            Self::Stream { input, .. } => EACH + u64::from(input.weight()),
            Self::Call(_) => EACH,
        }
    }
}

/// The thread is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the indexing thread has ended")]
pub struct Gone;

/// A way in. When the last one is dropped, the thread applies what is left and ends.
#[derive(Clone, Debug)]
pub struct PumpSender {
    sender: Sender<Message>,
    depth: Arc<AtomicU64>,
    end: Arc<OnceLock<String>>,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stream { source, input, .. } => write!(f, "{source:?}: {input:?}"),
            Self::Call(_) => f.write_str("a call"),
        }
    }
}

impl PumpSender {
    /// Hands over something that happened. Never blocks: the bound is the sender's, who takes `weight` in
    /// credits before and gets it back by [`Surroundings::give_back`].
    ///
    /// # Errors
    ///
    /// [`Gone`] when the thread has ended.
    pub fn deliver(&self, source: SourceId, input: StreamEvent, weight: u32) -> Result<(), Gone> {
        self.send(Message::Stream { source, input, weight })
    }

    /// Has the thread run `call` on the indexer, behind everything that was delivered before.
    ///
    /// # Errors
    ///
    /// [`Gone`] when the thread has ended.
    pub fn call(
        &self,
        call: impl FnOnce(&mut Indexer, Moment, &mut Vec<Action>) + Send + 'static,
    ) -> Result<(), Gone> {
        self.send(Message::Call(Box::new(call)))
    }

    /// Messages that wait to be applied.
    pub fn depth(&self) -> u64 {
        self.depth.load(Ordering::Relaxed)
    }

    /// Why the thread is gone, in words; `None` while it runs. While anybody holds a way in, it ends by a panic
    /// alone, and then the view no longer moves.
    pub fn failure(&self) -> Option<&str> {
        self.end.get().map(String::as_str)
    }

    fn send(&self, message: Message) -> Result<(), Gone> {
        self.depth.fetch_add(1, Ordering::Relaxed);
        self.sender.send(message).map_err(|_| Gone)
    }
}

/// Starts the indexing thread.
///
/// # Errors
///
/// When the operating system has no thread left.
pub fn start<S: Surroundings>(
    indexer: Indexer,
    surroundings: S,
) -> io::Result<(PumpSender, JoinHandle<Indexer>)> {
    let (sender, receiver) = crossbeam_channel::unbounded();
    let depth = Arc::new(AtomicU64::new(0));
    let end = Arc::<OnceLock<String>>::default();
    let pump = Pump {
        indexer,
        surroundings,
        receiver,
        depth: Arc::clone(&depth),
        batch: Vec::new(),
        actions: Vec::new(),
    };
    let ended = Arc::clone(&end);
    let thread = std::thread::Builder::new().name("rankwise-index".to_owned()).spawn(move || {
        // Nothing of the pump is looked at after a panic but the view, which was whole before the last event.
        match catch_unwind(AssertUnwindSafe(|| pump.run())) {
            Ok(indexer) => {
                let _ = ended.set("the indexing thread has ended".to_owned());
                indexer
            }
            Err(panic) => {
                let _ = ended.set(format!("the indexing thread panicked: {}", said(panic.as_ref())));
                resume_unwind(panic)
            }
        }
    })?;
    Ok((PumpSender { sender, depth, end }, thread))
}

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("nothing was said")
}

struct Pump<S> {
    indexer: Indexer,
    surroundings: S,
    receiver: Receiver<Message>,
    depth: Arc<AtomicU64>,
    batch: Vec<Message>,
    actions: Vec<Action>,
}

impl<S: Surroundings> Pump<S> {
    fn run(mut self) -> Indexer {
        while let Some(first) = self.wait() {
            self.batch.extend(first);
            let mut cost: u64 = self.batch.iter().map(Message::cost).sum();
            while cost < MAX_DRAIN
                && let Ok(message) = self.receiver.try_recv()
            {
                cost += message.cost();
                self.batch.push(message);
            }
            self.depth.fetch_sub(self.batch.len() as u64, Ordering::Relaxed);
            self.apply();
            self.tick_if_due();
            for action in self.actions.drain(..) {
                self.surroundings.act(action);
            }
        }
        self.indexer
    }

    /// The next message; `Some(None)` when a deadline came first, `None` when nobody can send any more.
    fn wait(&self) -> Option<Option<Message>> {
        let Some(deadline) = self.indexer.next_deadline() else { return self.receiver.recv().ok().map(Some) };
        match self.receiver.recv_timeout(deadline.since(self.surroundings.now())) {
            Ok(message) => Some(Some(message)),
            Err(RecvTimeoutError::Timeout) => Some(None),
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    fn apply(&mut self) {
        let now = self.surroundings.now();
        let mut messages = self.batch.drain(..).peekable();
        while let Some(message) = messages.next() {
            match message {
                Message::Call(call) => call(&mut self.indexer, now, &mut self.actions),
                Message::Stream { source, input, weight } => {
                    let mut run = vec![(source, input, weight)];
                    while let Some(Message::Stream { source, input, weight }) =
                        messages.next_if(|next| matches!(next, Message::Stream { .. }))
                    {
                        run.push((source, input, weight));
                    }
                    let inputs = run.iter().map(|(source, input, _)| input.input(*source));
                    self.indexer.handle_all(now, inputs, &mut self.actions);
                    for (source, _, weight) in run {
                        self.surroundings.give_back(source, weight);
                    }
                }
            }
        }
    }

    fn tick_if_due(&mut self) {
        let now = self.surroundings.now();
        if self.indexer.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.indexer.handle(now, Input::Tick, &mut self.actions);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::block::BlockSize;
    use crate::fleet::{PoolKey, Ranks, WorkerSpec};
    use crate::indexer::Config;

    struct Still {
        actions: Sender<Action>,
        given_back: Arc<AtomicU64>,
    }

    impl Surroundings for Still {
        fn now(&self) -> Moment {
            Moment::default()
        }

        fn act(&mut self, action: Action) {
            let _ = self.actions.send(action);
        }

        fn give_back(&mut self, _source: SourceId, weight: u32) {
            self.given_back.fetch_add(weight.into(), Ordering::Relaxed);
        }
    }

    /// E7: what is delivered is applied in order, its credits come back, and the thread ends with its senders.
    #[test]
    fn everything_delivered_is_applied_and_its_credits_come_back() {
        let (indexer, view) = Indexer::new(Config::default());
        let (actions, _received) = crossbeam_channel::unbounded();
        let given_back = Arc::new(AtomicU64::new(0));
        let (pump, thread) = start(indexer, Still { actions, given_back: Arc::clone(&given_back) }).unwrap();
        let (told, answer) = crossbeam_channel::bounded(1);
        pump.call(move |indexer, now, actions| {
            let key = PoolKey::new("m", None);
            let spec = WorkerSpec::new("w1", key, BlockSize::new(4).unwrap(), Ranks::range(0, 1).unwrap());
            indexer.declare_worker(now, spec, actions).unwrap();
            let source = indexer.source(&crate::ids::RankKey::new("w1", 0)).unwrap();
            told.send(source).unwrap();
        })
        .unwrap();
        let source = answer.recv().unwrap();
        let mut taken = 0;
        for _ in 0..1_000 {
            let input = StreamEvent::Message(vec![Bytes::from_static(b"not three frames")]);
            let weight = input.weight();
            taken += u64::from(weight);
            pump.deliver(source, input, weight).unwrap();
        }
        drop(pump);
        thread.join().unwrap();
        assert_eq!(given_back.load(Ordering::Relaxed), taken);
        let fleet = view.fleet();
        let report = fleet.only_pool().unwrap().workers[0].ranks[0].status.report();
        assert_eq!(report.content.malformed_messages, 1_000);
    }

    /// S5: a thread that dies says so, to everyone who still has a way in.
    #[test]
    fn a_panic_of_the_thread_is_seen_by_every_way_in() {
        let (indexer, _view) = Indexer::new(Config::default());
        let (actions, _received) = crossbeam_channel::unbounded();
        let (pump, thread) = start(indexer, Still { actions, given_back: Arc::default() }).unwrap();
        let other = pump.clone();
        assert_eq!(pump.failure(), None);
        pump.call(|_, _, _| panic!("planted")).unwrap();
        assert!(thread.join().is_err());
        assert_eq!(other.failure(), Some("the indexing thread panicked: planted"));
        assert_eq!(other.call(|_, _, _| ()), Err(Gone));
    }

    /// I8: what is applied before anything else can have its turn is bounded by what it weighs.
    #[test]
    fn a_turn_is_bounded_by_blocks_and_not_by_messages() {
        struct Turns(Arc<AtomicU64>, Sender<u64>);
        impl Surroundings for Turns {
            fn now(&self) -> Moment {
                Moment::default()
            }
            // Each command asks for something, so actions tell the turns apart.
            fn act(&mut self, _: Action) {
                let _ = self.1.send(self.0.load(Ordering::Relaxed));
            }
            fn give_back(&mut self, _: SourceId, weight: u32) {
                self.0.fetch_add(weight.into(), Ordering::Relaxed);
            }
        }
        let (indexer, _view) = Indexer::new(Config::default());
        let (told, turns) = crossbeam_channel::unbounded();
        let (pump, thread) = start(indexer, Turns(Arc::default(), told)).unwrap();
        let heavy = StreamEvent::Message(vec![Bytes::from(vec![0; 64 * 1_000])]);
        let weight = heavy.weight();
        // The thread is held up until everything waits, so that what it takes at once is its own choice.
        let (go, gate) = crossbeam_channel::bounded::<()>(0);
        pump.call(move |_, _, _| _ = gate.recv()).unwrap();
        for _ in 0..20 {
            pump.deliver(SourceId(9), heavy.clone(), weight).unwrap();
            pump.call(|_, _, actions| actions.push(Action::Unsubscribe { source: SourceId(9) })).unwrap();
        }
        go.send(()).unwrap();
        drop(pump);
        thread.join().unwrap();
        let seen: Vec<u64> = turns.iter().collect();
        let most = seen.iter().zip([0].iter().chain(&seen)).map(|(after, before)| after - before).max();
        assert!(seen.len() == 20 && most.unwrap() <= 5 * u64::from(weight), "{seen:?}");
    }
}

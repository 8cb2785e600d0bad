//! Both state machines on ZMQ sockets: the coordinator's ROUTER, and a DEALER per rank.
//!
//! A DEALER of `zeromq` never reconnects, so a connection that has ended is a rank that has ended. A ROUTER says
//! so in the same moment, also when the peer's process is killed; a peer that only hangs is found by the limits.

use std::collections::VecDeque;
use std::pin::pin;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::StreamExt;
use futures::channel::mpsc::Receiver;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until, timeout};
use zeromq::{
    DealerSocket, RouterSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, ZmqError,
    ZmqMessage,
};

use super::choice::Choice;
use super::drill::{Drill, Twisted};
use super::grid::Point;
use super::lockstep::{
    Broken, Claim, Coordinator, CoordinatorAction, Outcome, Participant, ParticipantAction, PeerId, Step,
};
use super::measured::Measured;
use super::message::{self, FromRank, Limits, ToRank, Unreadable};
use super::runner::PointRunner;
use crate::ids::{DpRank, Moment};
use crate::wire::endpoint::{BadEndpoint, Target};

/// How long the last messages may take to be read before a socket is dropped; dropping one loses its queue.
const LINGER: Duration = Duration::from_secs(1);

/// One attempt to connect. `zeromq` itself waits longer and longer between its tries.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest that a rank hangs in a drill.
const HANG: Duration = Duration::from_secs(600);

/// The coordinator's port cannot be bound.
#[derive(Debug, Error)]
pub enum CannotBind {
    /// The endpoint's text is wrong.
    #[error("cannot bind the coordinator: {0}")]
    Endpoint(#[from] BadEndpoint),
    /// The system refuses.
    #[error("cannot bind {endpoint}: {source}")]
    Refused {
        /// What was to be bound.
        endpoint: String,
        /// The library's reason.
        source: ZmqError,
    },
}

/// A rank whose thread or process has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankEnded {
    /// The rank.
    pub rank: DpRank,
    /// How it ended.
    pub how: String,
}

/// The port on which ranks join.
pub struct Meeting {
    socket: RouterSocket,
    monitor: Receiver<SocketEvent>,
    endpoint: String,
}

impl Meeting {
    /// Binds `endpoint`; `tcp://*:port` is every IPv4 address, port 0 lets the system choose.
    ///
    /// # Errors
    /// An endpoint that cannot be bound.
    pub async fn bind(endpoint: &str) -> Result<Self, CannotBind> {
        let mut socket = RouterSocket::new();
        let monitor = socket.monitor();
        let endpoint = Target::to_bind(endpoint)?.to_string();
        match socket.bind(&endpoint).await {
            Ok(bound) => Ok(Self { socket, monitor, endpoint: bound.to_string() }),
            Err(source) => Err(CannotBind::Refused { endpoint, source }),
        }
    }

    /// What is really bound.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Leads `of` ranks through their grid. `ended` tells of ranks that are seen to end otherwise than by their
    /// connection; `watch` sees each step as it begins.
    ///
    /// # Errors
    /// What broke the bench, within the limit of what was waited for.
    pub async fn coordinate(
        mut self,
        of: u32,
        choice: Choice,
        limits: Limits,
        mut ended: mpsc::UnboundedReceiver<RankEnded>,
        mut watch: impl FnMut(Step) + Send,
    ) -> Result<Outcome, Broken> {
        let clock = Clock::start();
        let mut core = Coordinator::new(clock.now(), of, choice, limits);
        let mut actions = Vec::new();
        loop {
            let waking = core.deadline().map(|deadline| clock.at(deadline));
            tokio::select! {
                biased;
                // First, so that a rank which answers and ends has answered.
                received = self.socket.recv() => heard(&mut core, clock.now(), received, &mut actions),
                event = self.monitor.next() => if let Some(SocketEvent::Disconnected(peer)) = event {
                    core.gone(&PeerId(peer.into()), "its connection has ended", &mut actions);
                },
                Some(RankEnded { rank, how }) = ended.recv() => core.lost(rank, &how, &mut actions),
                () = asleep(waking) => {}
            }
            // In every turn: a flood on the port must not hold up time.
            core.tick(clock.now(), &mut actions);
            let mut todo = VecDeque::from(std::mem::take(&mut actions));
            while let Some(action) = todo.pop_front() {
                match action {
                    CoordinatorAction::Send(peer, message) => {
                        if self.send(&peer, &message).await.is_err() {
                            let mut more = Vec::new();
                            core.gone(&peer, "its connection has ended", &mut more);
                            todo.extend(more);
                        }
                    }
                    CoordinatorAction::Step(step) => watch(step),
                    CoordinatorAction::End(result) => {
                        self.linger(&core).await;
                        return *result;
                    }
                }
            }
        }
    }

    async fn send(&mut self, peer: &PeerId, message: &ToRank) -> Result<(), ZmqError> {
        let mut frames = zmq_message(message::frames(message));
        frames.push_front(peer.0.clone());
        self.socket.send(frames).await
    }

    /// Waits until every rank has read its last message and hung up.
    async fn linger(&mut self, core: &Coordinator) {
        let mut left: Vec<&PeerId> = core.peers().collect();
        let leaving = async {
            while !left.is_empty() {
                tokio::select! {
                    _ = self.socket.recv() => {}
                    event = self.monitor.next() => match event {
                        Some(SocketEvent::Disconnected(peer)) => {
                            let peer: Bytes = peer.into();
                            left.retain(|other| other.0 != peer);
                        }
                        Some(_) => {}
                        None => return,
                    },
                }
            }
        };
        // Who hangs does not hang up.
        let _ = timeout(LINGER, leaving).await;
    }
}

fn heard(
    core: &mut Coordinator,
    now: Moment,
    received: Result<ZmqMessage, ZmqError>,
    actions: &mut Vec<CoordinatorAction>,
) {
    let Ok(received) = received else { return };
    let frames = received.into_vec();
    // The socket puts the sender first.
    let Some((peer, frames)) = frames.split_first() else { return };
    let peer = PeerId(peer.clone());
    match message::read::<FromRank>(frames) {
        Ok(message) => core.handle(now, &peer, message, actions),
        Err(why) => core.unreadable(&peer, &why, actions),
    }
}

/// Takes part as one rank, from joining `coordinator` to the end. Dropping it hangs up.
///
/// # Errors
/// What broke the bench, as far as this rank knows; within its limits, also when the coordinator never answers.
pub async fn take_part<R: PointRunner>(
    coordinator: &str,
    claim: Claim,
    limits: Limits,
    runner: &mut R,
    drill: Option<Drill>,
) -> Result<(), Broken> {
    let clock = Clock::start();
    let rank = claim.rank;
    let mut actions = Vec::new();
    let mut core = Participant::join(clock.now(), claim, limits, &mut actions);
    if drill == Some(Drill::DiesBeforeJoining) {
        return Err(died(rank));
    }
    let mut line = match Line::dial(coordinator, limits.join).await {
        Ok(line) => line,
        Err(how) => {
            let (doing, how) = (core.doing(), how);
            return Err(Broken::CoordinatorGone { rank, doing, how });
        }
    };
    loop {
        let mut job = None;
        for action in std::mem::take(&mut actions) {
            match drill.map_or(Twisted::Do(action.clone()), |drill| drill.twist(action)) {
                Twisted::Die => return Err(died(rank)),
                Twisted::Hang => {
                    sleep(HANG).await;
                    return Err(died(rank));
                }
                Twisted::Do(ParticipantAction::Send(message)) => {
                    if line.send(&message).await.is_err() {
                        core.gone("its connection has ended", &mut actions);
                    }
                }
                Twisted::Do(ParticipantAction::WarmUp(point)) => job = Some(Job::WarmUp(point)),
                Twisted::Do(ParticipantAction::Run(point)) => job = Some(Job::Run(point)),
                Twisted::Do(ParticipantAction::End(result)) => {
                    if matches!(result, Err(Broken::Own { .. })) {
                        line.linger().await;
                    }
                    return result;
                }
            }
        }
        if actions.is_empty() {
            actions = next(&mut core, &mut line, job, runner, clock).await;
        }
    }
}

/// Waits for the next thing to happen: a message, the end of the job, a limit.
async fn next<R: PointRunner>(
    core: &mut Participant,
    line: &mut Line,
    job: Option<Job>,
    runner: &mut R,
    clock: Clock,
) -> Vec<ParticipantAction> {
    let mut actions = Vec::new();
    let mut work = pin!(async {
        match job {
            None => std::future::pending().await,
            Some(job) => job.run(runner).await,
        }
    });
    while actions.is_empty() {
        let waking = core.deadline().map(|deadline| clock.at(deadline));
        tokio::select! {
            biased;
            heard = line.recv() => match heard {
                Heard::Said(message) => core.handle(clock.now(), message, &mut actions),
                Heard::Unreadable(why) => {
                    let how = format!("it sent a message that cannot be read: {why}");
                    core.gone(&how, &mut actions);
                }
                Heard::Gone => core.gone("its connection has ended", &mut actions),
            },
            done = &mut work => match done {
                Done::Warm(ended) => core.warmed(clock.now(), ended, &mut actions),
                Done::Measured(ended) => core.measured(clock.now(), *ended, &mut actions),
            },
            () = asleep(waking) => {}
        }
        core.tick(clock.now(), &mut actions);
    }
    actions
}

fn died(rank: DpRank) -> Broken {
    Broken::Own { rank, why: "it has ended, as its drill wants".to_owned() }
}

/// Work for the engine.
enum Job {
    WarmUp(Point),
    Run(Point),
}

enum Done {
    Warm(Result<(), String>),
    Measured(Box<Result<Measured, String>>),
}

impl Job {
    async fn run<R: PointRunner>(self, runner: &mut R) -> Done {
        match self {
            Self::WarmUp(point) => {
                Done::Warm(runner.warm_up(&point).await.map_err(|error| error.to_string()))
            }
            Self::Run(point) => {
                Done::Measured(Box::new(runner.run(&point).await.map_err(|error| error.to_string())))
            }
        }
    }
}

/// A rank's connection to the coordinator.
struct Line {
    socket: DealerSocket,
    monitor: Receiver<SocketEvent>,
}

enum Heard {
    Said(ToRank),
    Unreadable(Unreadable),
    Gone,
}

impl Line {
    /// Connects within `limit`, by as many attempts as it takes: the coordinator may be started last.
    async fn dial(coordinator: &str, limit: Duration) -> Result<Self, String> {
        let endpoint = Target::to_dial(coordinator).map_err(|error| error.to_string())?.to_string();
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut options = SocketOptions::default();
            options.connect_timeout(ATTEMPT.min(left));
            let mut socket = DealerSocket::with_options(options);
            let monitor = socket.monitor();
            // The library's own limit does not cover looking a name up.
            match timeout(ATTEMPT.min(left), socket.connect(&endpoint)).await {
                Ok(Ok(())) => return Ok(Self { socket, monitor }),
                Ok(Err(error)) if left.is_zero() => return Err(format!("{endpoint}: {error}")),
                Err(_) if left.is_zero() => {
                    return Err(format!("{endpoint}: nobody answered within {limit:?}"));
                }
                Ok(Err(_)) | Err(_) => sleep(PAUSE.min(left)).await,
            }
        }
    }

    async fn send(&mut self, message: &FromRank) -> Result<(), ZmqError> {
        self.socket.send(zmq_message(message::frames(message))).await
    }

    /// The next message. Safe to cancel.
    async fn recv(&mut self) -> Heard {
        loop {
            tokio::select! {
                biased;
                received = self.socket.recv() => return match received {
                    Ok(received) => match message::read(&received.into_vec()) {
                        Ok(message) => Heard::Said(message),
                        Err(why) => Heard::Unreadable(why),
                    },
                    Err(_) => Heard::Gone,
                },
                event = self.monitor.next() => if let Some(SocketEvent::Disconnected(_)) | None = event {
                    return Heard::Gone;
                },
            }
        }
    }

    /// Waits until the coordinator has read what was said, and hung up.
    async fn linger(&mut self) {
        let leaving = async { while !matches!(self.recv().await, Heard::Gone) {} };
        let _ = timeout(LINGER, leaving).await;
    }
}

/// One rank alone, without a socket: the same state machines, their messages handed over directly.
///
/// # Errors
/// What broke the bench; a runner that does not end is cut off at the limit.
pub async fn alone<R: PointRunner>(
    claim: Claim,
    limits: Limits,
    runner: &mut R,
    mut watch: impl FnMut(Step) + Send,
) -> Result<Outcome, Broken> {
    let clock = Clock::start();
    let me = PeerId(Bytes::from_static(b"alone"));
    let mut mine = Vec::new();
    let choice = claim.choice.clone();
    let mut core =
        Participant::join(clock.now(), Claim { rank: DpRank(0), of: 1, ..claim }, limits, &mut mine);
    let mut coordinator = Coordinator::new(clock.now(), 1, choice, limits);
    loop {
        let mut said = Vec::new();
        let mut job = None;
        for action in std::mem::take(&mut mine) {
            match action {
                ParticipantAction::Send(message) => {
                    coordinator.handle(clock.now(), &me, message, &mut said);
                }
                ParticipantAction::WarmUp(point) => job = Some(Job::WarmUp(point)),
                ParticipantAction::Run(point) => job = Some(Job::Run(point)),
                // The coordinator ends too, and its result is the one with the figures.
                ParticipantAction::End(_) => {}
            }
        }
        if let Some(job) = job {
            match timeout(limits.point, job.run(runner)).await {
                Ok(Done::Warm(ended)) => core.warmed(clock.now(), ended, &mut mine),
                Ok(Done::Measured(ended)) => core.measured(clock.now(), *ended, &mut mine),
                Err(_) => coordinator.tick(clock.now() + limits.point, &mut said),
            }
        }
        for action in said {
            match action {
                CoordinatorAction::Send(_, message) => core.handle(clock.now(), message, &mut mine),
                CoordinatorAction::Step(step) => watch(step),
                CoordinatorAction::End(result) => return *result,
            }
        }
    }
}

/// Runs `rank` on a thread and a runtime of its own, so that ranks share nothing but the machine. `make` makes
/// the runner there. How the rank ended, well or not, is told to `ended`.
///
/// # Errors
/// When the system gives no thread.
pub fn spawn_rank<R, E>(
    coordinator: String,
    claim: Claim,
    limits: Limits,
    drill: Option<Drill>,
    make: impl FnOnce() -> Result<R, E> + Send + 'static,
    ended: mpsc::UnboundedSender<RankEnded>,
) -> std::io::Result<()>
where
    R: PointRunner,
    E: std::fmt::Display,
{
    let rank = claim.rank;
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let result = runtime.block_on(async {
            let mut runner = make().map_err(|error| error.to_string())?;
            let result = take_part(&coordinator, claim, limits, &mut runner, drill).await;
            result.map_err(|error| error.to_string())
        });
        // Names that are still looked up must not hold the thread.
        runtime.shutdown_background();
        result
    };
    let body = move || {
        let how = match run() {
            Ok(()) => "its thread has ended".to_owned(),
            Err(how) => how,
        };
        // Nobody listens any more once the bench is over.
        let _ = ended.send(RankEnded { rank, how });
    };
    std::thread::Builder::new().name(format!("rank {rank}")).spawn(body)?;
    Ok(())
}

/// The time since the start.
#[derive(Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn now(self) -> Moment {
        Moment::from_micros(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn at(self, moment: Moment) -> Instant {
        // Limits of centuries are none.
        const FAR: Duration = Duration::from_secs(1 << 32);
        self.0 + Duration::from_micros(moment.as_micros()).min(FAR)
    }
}

async fn asleep(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until.into()).await,
        None => std::future::pending().await,
    }
}

fn zmq_message([preamble, body]: [Bytes; 2]) -> ZmqMessage {
    let mut message = ZmqMessage::from(preamble);
    message.push_back(body);
    message
}

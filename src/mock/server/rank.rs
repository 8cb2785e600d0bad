//! One rank: its engine, its ports, and the task that lets its time pass.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};

use super::alarm::{AlarmClock, Waking};
use crate::ids::{DpRank, EventSeq, Moment};
use crate::mock::config::EngineConfig;
use crate::mock::engine::{Engine, LoadNow};
use crate::mock::page::Truth;
use crate::mock::request::{Failure, Generation, Output, Refusal, RequestId, Usage};
use crate::wire::publisher::{Publisher, PublisherConfig};

/// Commands that wait for a rank's task. Few: each is carried out in microseconds, and who asks waits.
const COMMANDS: usize = 64;

/// How long a batch waits for subscribers that do not read. An engine's socket would drop it for them; here it is
/// then not sent at all, and history has it.
const SLOW_SUBSCRIBER: Duration = Duration::from_secs(1);

/// How long a restarted rank tries to get its ports back.
const REBIND: Duration = Duration::from_secs(2);

/// The moment now on the engines' clock: microseconds of Unix time, which never go back.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineClock {
    origin: Moment,
    start: Instant,
}

impl EngineClock {
    pub(super) fn new() -> Self {
        // Before 1970 there were no engines.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let micros = u64::try_from(since.as_micros()).unwrap_or(0);
        Self { origin: Moment::from_micros(micros), start: Instant::now() }
    }

    pub(super) fn now(&self) -> Moment {
        self.origin + self.start.elapsed()
    }

    fn instant(&self, moment: Moment) -> Instant {
        self.start + moment.since(self.origin)
    }
}

/// What goes wrong on demand.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// The next so many batches are not sent; history has them.
    DropBatches(u32),
    /// The next so many batches are not sent, and history does not have them either.
    LoseBatches(u32),
    /// The engine does nothing for this long.
    Stall(Duration),
    /// The process ends and starts anew: empty caches, numbers from 0, no history, every request failed.
    Restart {
        /// Whether its ports are closed and bound again, as a real process's are. Otherwise subscribers keep
        /// their connections and see nothing but the numbers.
        reconnect: bool,
        /// How long it is gone.
        down: Duration,
    },
    /// The engine does nothing from now on; it takes requests and answers none.
    Wedge,
    /// It goes on.
    Unwedge,
    /// These figures are reported instead of the true ones.
    Lie(FalseLoad),
    /// The true ones are reported again.
    Truth,
}

/// Figures to be reported whatever is true; what is not given stays true.
#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FalseLoad {
    /// Requests that run.
    pub num_running_reqs: Option<f64>,
    /// Requests that wait.
    pub num_waiting_reqs: Option<f64>,
    /// Tokens in the KV cache that requests hold.
    pub num_used_tokens: Option<f64>,
    /// Tokens that the KV cache holds.
    pub max_total_num_tokens: Option<f64>,
    /// Share of the KV cache in use.
    pub token_usage: Option<f64>,
    /// Prompt tokens of waiting requests that are not cached.
    pub queued_uncached_tokens: Option<f64>,
}

/// What a rank says of its load.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ReportedLoad {
    /// The global rank.
    pub dp_rank: DpRank,
    /// Requests that run.
    pub num_running_reqs: f64,
    /// Requests that wait.
    pub num_waiting_reqs: f64,
    /// Tokens in the KV cache that requests hold.
    pub num_used_tokens: f64,
    /// Tokens that the KV cache holds.
    pub max_total_num_tokens: f64,
    /// Share of the KV cache in use.
    pub token_usage: f64,
    /// Prompt tokens of waiting requests that are not cached.
    pub queued_uncached_tokens: f64,
    /// The truth of the rest, which no fault changes.
    pub engine: LoadNow,
}

impl ReportedLoad {
    fn new(dp_rank: DpRank, engine: LoadNow, lie: FalseLoad) -> Self {
        let used = engine.used_tokens as f64;
        let total = engine.max_total_tokens as f64;
        let usage = if total > 0.0 { used / total } else { 0.0 };
        Self {
            dp_rank,
            num_running_reqs: lie.num_running_reqs.unwrap_or(engine.running.into()),
            num_waiting_reqs: lie.num_waiting_reqs.unwrap_or(engine.waiting.into()),
            num_used_tokens: lie.num_used_tokens.unwrap_or(used),
            max_total_num_tokens: lie.max_total_num_tokens.unwrap_or(total),
            token_usage: lie.token_usage.unwrap_or(usage),
            queued_uncached_tokens: lie
                .queued_uncached_tokens
                .unwrap_or(engine.waiting_uncached_tokens as f64),
            engine,
        }
    }
}

/// What a rank's caches hold, and the number of the batch that comes next: every batch before it is told in them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Blocks {
    /// The number of the next batch.
    pub next_seq: EventSeq,
    /// What is held.
    pub truth: Truth,
}

/// The fleet has been shut down.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the mock engine has been shut down")]
pub struct Gone;

/// Why a request was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotTaken {
    /// The engine refuses it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// There is no engine any more.
    #[error(transparent)]
    Gone(#[from] Gone),
}

/// Why an answer broke off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BrokenOff {
    /// The engine was restarted.
    #[error("the engine was restarted")]
    Restarted,
    /// The fleet has been shut down.
    #[error(transparent)]
    Gone(#[from] Gone),
}

/// An answer that is being generated. Dropping it aborts the request.
#[derive(Debug)]
pub struct Answer {
    id: RequestId,
    outputs: mpsc::UnboundedReceiver<Output>,
    commands: mpsc::Sender<Command>,
    ended: bool,
}

/// What comes next of an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// A token.
    Token(u32),
    /// Nothing more; this is what it took.
    End(Usage),
}

impl Answer {
    /// The request's number, unique on its rank.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// What comes next. After the end it breaks off.
    ///
    /// # Errors
    /// The answer broke off.
    pub async fn next(&mut self) -> Result<Next, BrokenOff> {
        match self.outputs.recv().await {
            Some(Output::Token { token, .. }) => Ok(Next::Token(token)),
            Some(Output::Finished { usage, .. }) => {
                self.ended = true;
                Ok(Next::End(usage))
            }
            Some(Output::Failed { reason: Failure::Restarted, .. }) => {
                self.ended = true;
                Err(BrokenOff::Restarted)
            }
            // A batch is nobody's answer.
            Some(Output::Batch { .. }) | None => Err(Gone.into()),
        }
    }

    /// All tokens, and what they took.
    ///
    /// # Errors
    /// The answer broke off.
    pub async fn whole(mut self) -> Result<(Vec<u32>, Usage), BrokenOff> {
        let mut tokens = Vec::new();
        loop {
            match self.next().await? {
                Next::Token(token) => tokens.push(token),
                Next::End(usage) => return Ok((tokens, usage)),
            }
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.ended {
            // Where there is no room, the rank sees at its next token that nobody listens.
            let _ = self.commands.try_send(Command::Abort(self.id));
        }
    }
}

/// A running rank. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RankHandle {
    dp_rank: DpRank,
    commands: mpsc::Sender<Command>,
}

impl RankHandle {
    /// The global rank.
    pub fn dp_rank(&self) -> DpRank {
        self.dp_rank
    }

    /// Hands in a prompt. The answer comes as the engine's time passes.
    ///
    /// # Errors
    /// A request that the engine refuses.
    pub async fn generate(&self, prompt: Vec<u32>, max_tokens: u32) -> Result<Answer, NotTaken> {
        let (listener, outputs) = mpsc::unbounded_channel();
        let (id, taken) = oneshot::channel();
        self.send(Command::Generate { prompt, max_tokens, listener, id }).await?;
        let id = taken.await.map_err(|_| Gone)??;
        Ok(Answer { id, outputs, commands: self.commands.clone(), ended: false })
    }

    /// What its caches hold.
    ///
    /// # Errors
    /// There is no engine any more.
    pub async fn blocks(&self) -> Result<Blocks, Gone> {
        self.ask(Command::Blocks).await
    }

    /// What it says of its load; `None` while it is stalled or wedged and says nothing.
    ///
    /// # Errors
    /// There is no engine any more.
    pub async fn load(&self) -> Result<Option<ReportedLoad>, Gone> {
        self.ask(Command::Load).await
    }

    /// Empties its caches; false if requests are in the way.
    ///
    /// # Errors
    /// There is no engine any more.
    pub async fn reset_prefix_cache(&self) -> Result<bool, Gone> {
        self.ask(Command::Reset).await
    }

    /// Lets something go wrong. Returns when it has begun; a restart, when it is over.
    ///
    /// # Errors
    /// There is no engine any more.
    pub async fn inject(&self, fault: Fault) -> Result<(), Gone> {
        self.ask(|done| Command::Fault(fault, done)).await
    }

    /// Ends it; its ports are free when this returns.
    pub(super) async fn stop(&self) {
        // Already gone is as good.
        let _ = self.ask(Command::Stop).await;
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Gone> {
        let (answer, answered) = oneshot::channel();
        self.send(command(answer)).await?;
        answered.await.map_err(|_| Gone)
    }

    async fn send(&self, command: Command) -> Result<(), Gone> {
        self.commands.send(command).await.map_err(|_| Gone)
    }
}

#[derive(Debug)]
enum Command {
    Generate {
        prompt: Vec<u32>,
        max_tokens: u32,
        /// Unbounded, and holds no more than the answer has tokens: at most the engine's longest.
        listener: mpsc::UnboundedSender<Output>,
        id: oneshot::Sender<Result<RequestId, Refusal>>,
    },
    Abort(RequestId),
    Blocks(oneshot::Sender<Blocks>),
    Load(oneshot::Sender<Option<ReportedLoad>>),
    Reset(oneshot::Sender<bool>),
    Fault(Fault, oneshot::Sender<()>),
    Stop(oneshot::Sender<()>),
}

/// Starts a rank on its ports, on the present runtime.
pub(super) fn spawn_rank(
    config: EngineConfig,
    dp_rank: DpRank,
    (clock, alarms): (EngineClock, AlarmClock),
    publisher: Publisher,
    ports: PublisherConfig,
) -> RankHandle {
    let (commands, receiver) = mpsc::channel(COMMANDS);
    let rank = Rank {
        engine: Engine::new(config, dp_rank),
        clock,
        alarms,
        waking: None,
        events_endpoint: publisher.events_endpoint().to_owned(),
        replay_endpoint: publisher.replay_endpoint().map(ToOwned::to_owned),
        publisher: Some(publisher),
        ports,
        next_seq: EventSeq::ZERO,
        patience: SLOW_SUBSCRIBER,
        to_drop: 0,
        to_lose: 0,
        silent_until: None,
        lie: FalseLoad::default(),
        next_id: 0,
        listeners: HashMap::new(),
        out: Vec::new(),
    };
    tokio::spawn(rank.run(receiver));
    RankHandle { dp_rank, commands }
}

struct Rank {
    engine: Engine,
    clock: EngineClock,
    alarms: AlarmClock,
    /// The alarm that is set for the next moment at which something is due.
    waking: Option<Waking>,
    /// `None` if its ports could not be bound again after a restart.
    publisher: Option<Publisher>,
    events_endpoint: String,
    replay_endpoint: Option<String>,
    ports: PublisherConfig,
    next_seq: EventSeq,
    patience: Duration,
    to_drop: u32,
    to_lose: u32,
    /// It says nothing of its load until then.
    silent_until: Option<Moment>,
    lie: FalseLoad,
    next_id: u64,
    /// Who waits for which answer: no more than the engine takes requests.
    listeners: HashMap<RequestId, mpsc::UnboundedSender<Output>>,
    out: Vec<Output>,
}

impl Rank {
    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        loop {
            self.pass_time().await;
            self.set_alarm();
            let command = tokio::select! {
                biased;
                command = commands.recv() => command,
                () = rung(&mut self.waking) => continue,
            };
            match command {
                Some(Command::Stop(done)) => {
                    if let Some(publisher) = self.publisher.take() {
                        publisher.close().await;
                    }
                    let _ = done.send(());
                    return;
                }
                Some(command) => self.carry_out(command).await,
                None => return,
            }
        }
    }

    /// Sees to it that an alarm rings when the engine has something to do.
    fn set_alarm(&mut self) {
        let due = self.engine.next_deadline().map(|moment| self.clock.instant(moment).into_std());
        if self.waking.as_ref().map(Waking::due) != due {
            self.waking = due.map(|due| self.alarms.at(due));
        }
    }

    /// Lets the engine do what is due, and hands out what comes of it.
    async fn pass_time(&mut self) {
        self.engine.advance(self.clock.now(), &mut self.out);
        self.deliver().await;
    }

    async fn carry_out(&mut self, command: Command) {
        let now = self.clock.now();
        match command {
            Command::Generate { prompt, max_tokens, listener, id } => {
                let number = RequestId(self.next_id);
                self.next_id += 1;
                let taken = self.engine.submit(now, Generation { id: number, prompt, max_tokens });
                if taken.is_ok() {
                    self.listeners.insert(number, listener);
                }
                if id.send(taken.map(|()| number)).is_err() {
                    self.abort(number);
                }
            }
            Command::Abort(id) => self.abort(id),
            Command::Blocks(answer) => {
                let _ = answer.send(Blocks { next_seq: self.next_seq, truth: self.engine.truth() });
            }
            Command::Load(answer) => {
                let silent = self.silent_until.is_some_and(|until| now < until);
                let load = ReportedLoad::new(self.engine.dp_rank(), self.engine.load(), self.lie);
                let _ = answer.send((!silent).then_some(load));
            }
            Command::Reset(answer) => {
                let done = self.engine.reset_prefix_cache(now, &mut self.out);
                self.deliver().await;
                let _ = answer.send(done);
            }
            Command::Fault(fault, done) => {
                self.suffer(now, fault).await;
                let _ = done.send(());
            }
            // The loop ends before it comes here.
            Command::Stop(_) => {}
        }
    }

    fn abort(&mut self, id: RequestId) {
        if self.listeners.remove(&id).is_some() {
            self.engine.abort(id);
        }
    }

    async fn suffer(&mut self, now: Moment, fault: Fault) {
        match fault {
            Fault::DropBatches(count) => self.to_drop = count,
            Fault::LoseBatches(count) => self.to_lose = count,
            Fault::Stall(length) => {
                self.silent_until = Some(now + length);
                self.engine.stall(now + length);
            }
            Fault::Wedge => {
                self.silent_until = Some(Moment(u64::MAX));
                self.engine.wedge();
            }
            Fault::Unwedge => {
                self.silent_until = None;
                self.engine.unwedge(now);
            }
            Fault::Lie(lie) => self.lie = lie,
            Fault::Truth => self.lie = FalseLoad::default(),
            Fault::Restart { reconnect, down } => self.restart(reconnect, down).await,
        }
    }

    async fn restart(&mut self, reconnect: bool, down: Duration) {
        match self.publisher.take() {
            Some(publisher) if !reconnect => {
                publisher.forget();
                self.publisher = Some(publisher);
                sleep(down).await;
            }
            publisher => {
                // Whatever a process had not sent goes with it.
                drop(publisher);
                sleep(down).await;
                self.publisher = self.bind_again().await;
            }
        }
        self.next_seq = EventSeq::ZERO;
        self.silent_until = None;
        self.engine.restart(self.clock.now(), &mut self.out);
        self.deliver().await;
    }

    /// The system may need a moment to let go of the ports.
    async fn bind_again(&self) -> Option<Publisher> {
        let end = Instant::now() + REBIND;
        loop {
            let bound =
                Publisher::bind(&self.events_endpoint, self.replay_endpoint.as_deref(), self.ports.clone());
            match bound.await {
                Ok(publisher) => return Some(publisher),
                Err(error) if Instant::now() >= end => {
                    tracing::error!(dp_rank = self.engine.dp_rank().0, %error, "publishes no more events");
                    return None;
                }
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    async fn deliver(&mut self) {
        let mut out = std::mem::take(&mut self.out);
        for output in out.drain(..) {
            match output {
                Output::Batch { payload, .. } => self.publish(payload.into()).await,
                Output::Token { id, .. } => {
                    if let Some(listener) = self.listeners.get(&id)
                        && listener.send(output).is_err()
                    {
                        self.abort(id);
                    }
                }
                Output::Finished { id, .. } | Output::Failed { id, .. } => {
                    if let Some(listener) = self.listeners.remove(&id) {
                        // Who has hung up misses nothing.
                        let _ = listener.send(output);
                    }
                }
            }
        }
        self.out = out;
    }

    async fn publish(&mut self, payload: Bytes) {
        let seq = self.next_seq;
        self.next_seq = seq.next();
        let Some(publisher) = &self.publisher else { return };
        if self.to_lose > 0 {
            self.to_lose -= 1;
        } else if self.to_drop > 0 {
            self.to_drop -= 1;
            publisher.remember(seq, payload);
        } else if timeout(self.patience, publisher.publish(seq, payload)).await.is_ok() {
            self.patience = SLOW_SUBSCRIBER;
        } else {
            // Nobody waits twice for the same reader.
            self.patience = Duration::ZERO;
        }
    }
}

async fn rung(waking: &mut Option<Waking>) {
    match waking {
        Some(waking) => waking.wait().await,
        None => std::future::pending().await,
    }
}

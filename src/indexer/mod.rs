//! The one door: live sockets, captures, simulation and benches all enter by [`Indexer::handle`].
//!
//! Frames become events, events are put in order, ordered events go into the index of their pool; requests
//! for history and connections to open come out as [`Action`]s. No thread, no socket and no clock is in
//! here: the driver passes the moment and carries out the actions.

mod adapters;
mod content;
mod deadlines;
mod reports;
mod stream;
mod tiers;
mod view;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

pub use self::adapters::LearntAdapters;
use self::deadlines::Deadlines;
use self::stream::{Buffers, Stream};
pub use self::tiers::TierSet;
use self::tiers::Tiers;
pub use self::view::{
    ContentCounters, FleetView, Named, PoolView, RankReport, RankStatus, RankView, View, WorkerView,
};
use crate::events::order::{HeldBudget, Link, OnLoss, ProbeConfig, ReplayId, SequencerConfig, Step};
use crate::events::{Limits, Sequencer};
use crate::fleet::{Change, DeclareError, Endpoint, Fleet, PoolKey, RankPlan, WorkerSpec};
use crate::ids::{EventSeq, Moment, RankKey, SourceId, WorkerId};
use crate::index::{self, PrefixIndex, WriteSection};
use crate::load::LoadConfig;
use crate::trust::Reasons;

/// How streams are treated. The defaults suit engines as they are shipped.
#[derive(Clone, Debug)]
pub struct Config {
    /// What a batch may cost.
    pub limits: Limits,
    /// What becomes of a rank's blocks from before an unfillable hole.
    pub on_loss: OnLoss,
    /// Live batches held per rank while its replay is outstanding. vLLM answers within one engine step or
    /// 100 ms; 10,000 batches are its whole replay buffer.
    pub max_held_batches: usize,
    /// Bytes of these batches. 64 MiB is a minute of a busy rank.
    pub max_held_bytes: usize,
    /// Bytes of these batches over all ranks. Room for four ranks that wait at their own bound; further ones see
    /// a gap and repair it.
    pub max_held_bytes_total: usize,
    /// A replay that brings nothing for this long has failed. Busy engines answer between steps, which may
    /// take seconds.
    pub replay_timeout: Duration,
    /// Requests in a row that may go unanswered before a hole is declared lost.
    pub max_replay_attempts: u32,
    /// A rank without a connection for this long is silent (requirement E4).
    pub silent_after: Duration,
    /// A connected rank without history that is not heard for this long is marked as never heard.
    pub silence_grace: Duration,
    /// A rank that says nothing for this long is asked whether it is there (requirement E9).
    pub probe_interval: Duration,
    /// The wait between two such questions doubles up to this.
    pub probe_max: Duration,
    /// How long the answer may take. An idle engine answers within 0.1 s; twice this and a second connection's
    /// handshake stay below fifteen seconds together.
    pub probe_timeout: Duration,
    /// What a load report is worth, and for how long.
    pub load: LoadConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            on_loss: OnLoss::Keep,
            max_held_batches: 10_000,
            max_held_bytes: 64 << 20,
            max_held_bytes_total: 256 << 20,
            replay_timeout: Duration::from_secs(5),
            max_replay_attempts: 5,
            silent_after: Duration::from_secs(5),
            silence_grace: Duration::from_secs(30),
            probe_interval: Duration::from_secs(5),
            probe_max: Duration::from_secs(60),
            probe_timeout: Duration::from_millis(2_500),
            load: LoadConfig::default(),
        }
    }
}

/// Something that happened outside.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Input<'a> {
    /// The event connection stands, and its subscription with it.
    Connected {
        /// Whose.
        source: SourceId,
    },
    /// The event connection is lost.
    Disconnected {
        /// Whose.
        source: SourceId,
    },
    /// A new event connection was refused: nobody listens.
    Refused {
        /// Whose.
        source: SourceId,
    },
    /// A new event connection did not come about for another reason.
    Unreachable {
        /// Whose.
        source: SourceId,
        /// Why, in words.
        why: &'a str,
    },
    /// A message was over the limit of what is taken off the wire, and was dropped.
    TooLarge {
        /// Whose.
        source: SourceId,
    },
    /// A live message.
    Frames {
        /// The connection that it came by, which alone says whose it is.
        source: SourceId,
        /// As received.
        frames: &'a [Bytes],
    },
    /// A request for history had its turn and was sent: only now can its answers be late.
    ReplayAsked {
        /// Whose.
        source: SourceId,
        /// The request.
        request: ReplayId,
    },
    /// One answer to a request for history.
    Replay {
        /// Whose.
        source: SourceId,
        /// The request.
        request: ReplayId,
        /// As received.
        frames: &'a [Bytes],
    },
    /// A request for history could not be made, or its connection broke.
    ReplayFailed {
        /// Whose.
        source: SourceId,
        /// The request.
        request: ReplayId,
    },
    /// A second event connection was tried, to see whether anybody is there.
    Tried {
        /// Whose.
        source: SourceId,
        /// The request.
        request: ReplayId,
        /// Whether it shook hands.
        reached: bool,
    },
    /// The engine has fallen into a sleep that takes its device cache.
    Slept {
        /// Whose.
        source: SourceId,
    },
    /// Nothing but that time has passed.
    Tick,
}

impl Input<'_> {
    fn source(&self) -> Option<SourceId> {
        match *self {
            Self::Connected { source }
            | Self::Disconnected { source }
            | Self::Refused { source }
            | Self::Unreachable { source, .. }
            | Self::TooLarge { source }
            | Self::Tried { source, .. }
            | Self::Frames { source, .. }
            | Self::ReplayAsked { source, .. }
            | Self::Replay { source, .. }
            | Self::ReplayFailed { source, .. }
            | Self::Slept { source } => Some(source),
            Self::Tick => None,
        }
    }
}

/// Something that the driver must do. An embedding router that has no sockets to open may ignore
/// [`Action::Subscribe`] and [`Action::Unsubscribe`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Action {
    /// Listen to a rank.
    Subscribe {
        /// To be given back with everything that comes.
        source: SourceId,
        /// The rank.
        rank: RankKey,
        /// Where it publishes.
        endpoint: Endpoint,
        /// Prefix of the topics to subscribe to.
        topic: String,
    },
    /// Stop listening, and drop every request for the stream's history.
    Unsubscribe {
        /// The stream.
        source: SourceId,
    },
    /// Ask a rank for its batches from a number on, on a fresh connection.
    AskReplay {
        /// The stream.
        source: SourceId,
        /// Where.
        endpoint: Endpoint,
        /// To be given back with each answer.
        request: ReplayId,
        /// First number wanted.
        from: EventSeq,
    },
    /// Drop a request.
    CancelReplay {
        /// The stream.
        source: SourceId,
        /// The request.
        request: ReplayId,
    },
    /// Make a second event connection that only shakes hands; answer with [`Input::Tried`].
    TryConnection {
        /// The stream.
        source: SourceId,
        /// Where.
        endpoint: Endpoint,
        /// To be given back with the answer.
        request: ReplayId,
    },
    /// Drop the event connection, which brings nothing any more, and make it anew.
    Reconnect {
        /// The stream.
        source: SourceId,
    },
}

/// What became of a list of cards.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Restored {
    /// Ranks that were declared.
    pub ranks: usize,
    /// Workers whose card was ignored, and why.
    pub ignored: Vec<(WorkerId, DeclareError)>,
}

/// The writer: owns the fleet, every stream and every index.
#[derive(Debug)]
pub struct Indexer {
    config: Config,
    fleet: Fleet,
    pools: BTreeMap<PoolKey, Pool>,
    streams: HashMap<SourceId, Stream>,
    sources: BTreeMap<RankKey, SourceId>,
    deadlines: Deadlines,
    next_source: u64,
    /// What all streams hold back together.
    held_budget: HeldBudget,
    buffers: Buffers,
    view: View,
}

#[derive(Debug)]
struct Pool {
    index: PrefixIndex,
    reader: index::Reader,
    adapters: Arc<LearntAdapters>,
}

impl Indexer {
    /// An empty indexer and its reader's handle.
    pub fn new(config: Config) -> (Self, View) {
        let view = View::new(config.load);
        let indexer = Self {
            held_budget: HeldBudget::new(config.max_held_bytes_total),
            config,
            fleet: Fleet::new(),
            pools: BTreeMap::new(),
            streams: HashMap::new(),
            sources: BTreeMap::new(),
            deadlines: Deadlines::default(),
            next_source: 0,
            buffers: Buffers::default(),
            view: view.clone(),
        };
        (indexer, view)
    }

    /// A reader's handle.
    pub fn view(&self) -> View {
        self.view.clone()
    }

    /// The declarations.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// The stream of a declared rank.
    pub fn source(&self, rank: &RankKey) -> Option<SourceId> {
        self.sources.get(rank).copied()
    }

    // === fleet ===

    /// Declares a worker, or declares it anew. The same declaration again changes nothing.
    ///
    /// # Errors
    ///
    /// As [`Fleet::declare`]; nothing has changed then.
    pub fn declare_worker(
        &mut self,
        now: Moment,
        spec: WorkerSpec,
        actions: &mut Vec<Action>,
    ) -> Result<Change, DeclareError> {
        let change = self.fleet.declare(spec)?;
        self.follow(now, &change, actions);
        Ok(change)
    }

    /// Adds the ranks of `spec` to its worker, which is declared if it is new.
    ///
    /// # Errors
    ///
    /// As [`Fleet::add_rank`]; nothing has changed then.
    pub fn add_rank(
        &mut self,
        now: Moment,
        spec: WorkerSpec,
        actions: &mut Vec<Action>,
    ) -> Result<Change, DeclareError> {
        let change = self.fleet.add_rank(spec)?;
        self.follow(now, &change, actions);
        Ok(change)
    }

    /// Removes one rank and everything that is keyed by it; `None` if it is not declared.
    pub fn remove_rank(&mut self, now: Moment, rank: &RankKey, actions: &mut Vec<Action>) -> Option<Change> {
        let change = self.fleet.remove_rank(rank)?;
        self.follow(now, &change, actions);
        Some(change)
    }

    /// Removes a worker and everything that is keyed by its ranks; `None` if it is not declared.
    pub fn withdraw_worker(
        &mut self,
        now: Moment,
        worker: &WorkerId,
        actions: &mut Vec<Action>,
    ) -> Option<Change> {
        let change = self.fleet.withdraw(worker)?;
        self.follow(now, &change, actions);
        Some(change)
    }

    /// Lets `pattern`, which ends in `/`, stand for the pool of `model`; `false` if it cannot.
    pub fn add_model_pattern(&mut self, pattern: &str, model: &str) -> bool {
        let added = self.fleet.add_model_pattern(pattern, model);
        self.publish_fleet();
        added
    }

    /// The declarations as they stand: what [`Indexer::restore`] takes.
    pub fn saved_fleet(&self) -> Vec<WorkerSpec> {
        self.fleet.workers().cloned().collect()
    }

    /// Declares workers from a saved or discovered list. Every rank is bound to its stream and its place in the
    /// load table, and all of them are published at once. A card that cannot be declared is ignored and
    /// counted; those that can, and what was declared before, stay as they are.
    pub fn restore(
        &mut self,
        now: Moment,
        cards: impl IntoIterator<Item = WorkerSpec>,
        actions: &mut Vec<Action>,
    ) -> Restored {
        let mut restored = Restored::default();
        for card in cards {
            let worker = card.worker.clone();
            match self.fleet.declare(card) {
                Ok(change) => {
                    restored.ranks += change.added.len();
                    self.apply(now, &change, actions);
                }
                Err(error) => restored.ignored.push((worker, error)),
            }
        }
        self.view.count_ignored_cards(restored.ignored.len() as u64);
        self.publish_fleet();
        restored
    }

    fn follow(&mut self, now: Moment, change: &Change, actions: &mut Vec<Action>) {
        self.apply(now, change, actions);
        self.publish_fleet();
    }

    fn apply(&mut self, now: Moment, change: &Change, actions: &mut Vec<Action>) {
        for rank in &change.removed {
            self.drop_rank(&change.pool, rank, actions);
        }
        if change.pool_gone {
            self.pools.remove(&change.pool);
        }
        for plan in &change.added {
            self.open_rank(now, &change.pool, plan, actions);
        }
        // A lower rank that came or went shifts the local numbers of the others.
        for rank in &change.kept {
            if let Some(plan) = self.fleet.rank(rank)
                && let Some(stream) = self.sources.get(rank).and_then(|source| self.streams.get_mut(source))
            {
                stream.plan = plan.clone();
                let Some(spec) = self.fleet.worker(&rank.worker) else { continue };
                stream.declared_eagle = spec.is_eagle;
                stream.tiers.follow(spec, self.fleet.capacity_blocks(rank).blocks());
                if let Some(pool) = self.pools.get_mut(&change.pool) {
                    pool.index.write().score_tiers(stream.slot, Tiers::scored(spec));
                }
            }
        }
    }

    fn drop_rank(&mut self, pool: &PoolKey, rank: &RankKey, actions: &mut Vec<Action>) {
        let Some(source) = self.sources.remove(rank) else { return };
        self.deadlines.forget(source);
        if let Some(stream) = self.streams.remove(&source)
            && let Some(pool) = self.pools.get_mut(pool)
        {
            pool.index.write().remove_rank(stream.slot);
        }
        self.view.loads().lock().retire(rank);
        actions.push(Action::Unsubscribe { source });
    }

    fn open_rank(&mut self, now: Moment, key: &PoolKey, plan: &RankPlan, actions: &mut Vec<Action>) {
        let Some(spec) = self.fleet.worker(&plan.rank.worker) else { return };
        let pool = self.pools.entry(key.clone()).or_insert_with(|| {
            let (index, reader) = index::new(spec.block_size);
            Pool { index, reader, adapters: Arc::default() }
        });
        let capacity = self.fleet.capacity_blocks(&plan.rank).blocks();
        let slot = pool.index.write().add_rank(Tiers::settings(spec, capacity));
        let tiers = Tiers::new(spec, capacity);
        let source = SourceId(self.next_source);
        self.next_source += 1;
        let order = SequencerConfig {
            has_replay: plan.replay.is_some(),
            on_loss: self.config.on_loss,
            max_held_batches: self.config.max_held_batches,
            max_held_bytes: self.config.max_held_bytes,
            held_budget: self.held_budget.clone(),
            replay_timeout: self.config.replay_timeout,
            max_replay_attempts: self.config.max_replay_attempts,
            link: match &plan.events {
                None => Link::Fed,
                Some(endpoint) if endpoint.binds() => Link::Bound,
                Some(_) => Link::Dialled,
            },
            silent_after: self.config.silent_after,
            silence_grace: self.config.silence_grace,
            probe: plan.publishes.then_some(ProbeConfig {
                interval: self.config.probe_interval,
                max_interval: self.config.probe_max,
                answer_timeout: self.config.probe_timeout,
                seed: source.0,
            }),
        };
        let status = Arc::new(RankStatus::new(Reasons::NONE));
        let sequencer = Sequencer::new(order, now);
        let adapters = Arc::clone(&pool.adapters);
        let mut stream = Stream::new(plan.clone(), key.clone(), slot, status, sequencer, adapters, tiers);
        stream.declared_eagle = spec.is_eagle;
        stream.publish();
        self.deadlines.set(source, stream.sequencer.next_deadline());
        self.streams.insert(source, stream);
        self.sources.insert(plan.rank.clone(), source);
        self.view.loads().lock().declare(&plan.rank);
        if let Some(endpoint) = &plan.events {
            actions.push(Action::Subscribe {
                source,
                rank: plan.rank.clone(),
                endpoint: endpoint.clone(),
                topic: plan.topic.clone(),
            });
        }
    }

    fn publish_fleet(&self) {
        let mut pools = BTreeMap::new();
        for declared in self.fleet.pools() {
            let Some(pool) = self.pools.get(&declared.key) else { continue };
            let specs = || self.fleet.workers_of(&declared.key);
            let workers = specs().map(|spec| self.worker_view(spec)).collect();
            let view = PoolView {
                key: declared.key.clone(),
                block_size: declared.block_size,
                index: pool.reader.clone(),
                workers,
                declared_adapters: specs().flat_map(|spec| spec.adapters.iter().cloned()).collect(),
                learnt_adapters: Arc::clone(&pool.adapters),
            };
            pools.insert(declared.key.clone(), Arc::new(view));
        }
        self.view.publish(FleetView { declared: self.fleet.clone(), pools });
    }

    fn worker_view(&self, spec: &WorkerSpec) -> WorkerView {
        let rank_view = |plan: &RankPlan| {
            let source = self.source(&plan.rank)?;
            let stream = self.streams.get(&source)?;
            Some(RankView {
                plan: plan.clone(),
                slot: stream.slot,
                source,
                capacity: self.fleet.capacity_blocks(&plan.rank),
                request_limit: self.fleet.request_limit(&plan.rank),
                status: Arc::clone(&stream.status),
            })
        };
        WorkerView {
            spec: spec.clone(),
            shared_capacity: self.fleet.shared_capacity(&spec.worker),
            ranks: self.fleet.plans(&spec.worker).filter_map(rank_view).collect(),
            taints: spec.taints.iter().map(|taint| taint.as_str().into()).collect(),
        }
    }

    // === events ===

    /// Takes in one thing that happened and says what must be done.
    pub fn handle(&mut self, now: Moment, input: Input<'_>, actions: &mut Vec<Action>) {
        self.handle_all(now, std::iter::once(input), actions);
    }

    /// Takes in several things; runs of them that concern one pool are applied in one write section, so that
    /// what a section costs is paid once.
    pub fn handle_all<'a>(
        &mut self,
        now: Moment,
        inputs: impl IntoIterator<Item = Input<'a>>,
        actions: &mut Vec<Action>,
    ) {
        let mut inputs = inputs.into_iter().peekable();
        while let Some(input) = inputs.next() {
            let Some(source) = input.source() else {
                self.tick(now, actions);
                continue;
            };
            let Self { streams, pools, buffers, config, view, deadlines, .. } = self;
            let Some(stream) = streams.get_mut(&source) else {
                view.count_stray();
                continue;
            };
            let key = stream.pool.clone();
            // The pool stands while it has a stream.
            let Some(pool) = pools.get_mut(&key) else { continue };
            let mut section = pool.index.write();
            let limits = &config.limits;
            stream.take_in(now, source, &input, limits, &mut section, buffers, actions);
            deadlines.set(source, stream.sequencer.next_deadline());
            loop {
                let same_pool = inputs.next_if(|input| {
                    input.source().and_then(|source| streams.get(&source)).is_some_and(|of| of.pool == key)
                });
                let Some(input) = same_pool else { break };
                let Some(source) = input.source() else { break };
                let Some(stream) = streams.get_mut(&source) else { break };
                stream.take_in(now, source, &input, limits, &mut section, buffers, actions);
                deadlines.set(source, stream.sequencer.next_deadline());
            }
        }
    }

    /// When [`Input::Tick`] is due next, if nothing else happens. Asked for each message, so it costs no look at
    /// the streams.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.deadlines.earliest()
    }

    fn tick(&mut self, now: Moment, actions: &mut Vec<Action>) {
        let Self { streams, pools, buffers, config, deadlines, .. } = self;
        for source in deadlines.due(now) {
            let Some(stream) = streams.get_mut(&source) else { continue };
            let Some(pool) = pools.get_mut(&stream.pool) else { continue };
            let mut section = pool.index.write();
            stream.take_in(now, source, &Input::Tick, &config.limits, &mut section, buffers, actions);
            deadlines.set(source, stream.sequencer.next_deadline());
        }
    }
}

/// What a refused connection is told as.
const REFUSED: &str = "nobody listens at the endpoint";

impl Stream {
    /// One input of this stream, followed through to the index.
    #[allow(clippy::too_many_arguments)]
    fn take_in(
        &mut self,
        now: Moment,
        source: SourceId,
        input: &Input<'_>,
        limits: &Limits,
        section: &mut WriteSection<'_>,
        buffers: &mut Buffers,
        actions: &mut Vec<Action>,
    ) {
        let (steps, mut batch_buffers) = buffers.split();
        match *input {
            Input::Connected { .. } => self.on_connected(now, steps),
            Input::Disconnected { .. } => self.on_disconnected(now, steps),
            Input::Refused { .. } => self.on_unreachable(now, REFUSED),
            Input::Unreachable { why, .. } => self.on_unreachable(now, why),
            Input::TooLarge { .. } => self.on_too_large(),
            Input::Tried { request, reached, .. } => self.sequencer.on_tried(now, request, reached, steps),
            Input::Frames { frames, .. } => self.on_frames(now, frames, steps),
            Input::ReplayAsked { request, .. } => self.sequencer.on_replay_asked(now, request),
            Input::Replay { request, frames, .. } => self.on_replay(now, request, frames, steps),
            Input::ReplayFailed { request, .. } => self.sequencer.on_replay_failed(now, request, steps),
            Input::Slept { .. } => self.on_slept(section),
            Input::Tick => self.sequencer.on_tick(now, steps),
        }
        for step in steps.drain(..) {
            match step {
                Step::Apply(batch) => self.apply(&batch, limits, section, &mut batch_buffers),
                Step::Clear => {
                    section.clear_rank(self.slot);
                    self.lift_content_reasons();
                }
                Step::AskReplay { request, from } => {
                    if let Some(endpoint) = self.plan.replay.clone() {
                        actions.push(Action::AskReplay { source, endpoint, request, from });
                    }
                }
                Step::CancelReplay { request } => actions.push(Action::CancelReplay { source, request }),
                Step::TryConnection { request } => {
                    if let Some(endpoint) = self.plan.events.clone() {
                        actions.push(Action::TryConnection { source, endpoint, request });
                    }
                }
                Step::Reconnect => actions.push(Action::Reconnect { source }),
                Step::Say(notice) => self.say(notice),
            }
        }
        self.publish();
    }
}

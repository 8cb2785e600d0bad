//! What a router reads: the fleet as it is declared, and each rank's state as the indexer leaves it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;

use super::adapters::LearntAdapters;
use super::tiers::TierSet;
use crate::block::BlockSize;
use crate::events::order::StreamCounters;
use crate::fleet::{Capacity, Fleet, PoolKey, RankPlan, WorkerSpec};
use crate::ids::{EventSeq, Moment, RankSlot, SourceId, WorkerId};
use crate::index;
use crate::load::{LoadConfig, LoadTable};
use crate::trust::{ReasonCounts, Reasons, Trust};

/// The reader's handle on everything: cheap to clone, shared by all threads that route.
#[derive(Clone, Debug)]
pub struct View {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    fleet: ArcSwap<FleetView>,
    /// Behind a lock of its own: reports come seldom and never while an index is written.
    loads: Mutex<LoadTable>,
    strays: AtomicU64,
    ignored_cards: AtomicU64,
}

impl View {
    pub(super) fn new(loads: LoadConfig) -> Self {
        let fleet = ArcSwap::from_pointee(FleetView::default());
        let loads = Mutex::new(LoadTable::new(loads));
        Self {
            shared: Arc::new(Shared {
                fleet,
                loads,
                strays: AtomicU64::new(0),
                ignored_cards: AtomicU64::new(0),
            }),
        }
    }

    /// The fleet as declared at this moment. Holding it costs memory, never the writer's time.
    pub fn fleet(&self) -> Arc<FleetView> {
        self.shared.fleet.load_full()
    }

    /// What is known of the ranks' load. The lock is held by nobody for longer than a report takes.
    pub fn loads(&self) -> &Mutex<LoadTable> {
        &self.shared.loads
    }

    /// Messages for streams that are gone or were never declared.
    pub fn strays(&self) -> u64 {
        self.shared.strays.load(Ordering::Relaxed)
    }

    /// Saved or discovered cards that could not be declared.
    pub fn ignored_cards(&self) -> u64 {
        self.shared.ignored_cards.load(Ordering::Relaxed)
    }

    pub(super) fn count_ignored_cards(&self, count: u64) {
        self.shared.ignored_cards.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn count_stray(&self) {
        self.shared.strays.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn publish(&self, fleet: FleetView) {
        self.shared.fleet.store(Arc::new(fleet));
    }
}

/// The fleet at one moment.
#[derive(Clone, Debug, Default)]
pub struct FleetView {
    pub(super) declared: Fleet,
    pub(super) pools: BTreeMap<PoolKey, Arc<PoolView>>,
}

impl FleetView {
    /// The declarations.
    pub fn declared(&self) -> &Fleet {
        &self.declared
    }

    /// All pools.
    pub fn pools(&self) -> impl Iterator<Item = &Arc<PoolView>> {
        self.pools.values()
    }

    /// The pool that serves `model` in `group`; a configured pattern counts where no name is equal.
    pub fn resolve(&self, model: &str, group: Option<&str>) -> Option<&Arc<PoolView>> {
        self.declared.resolve(model, group).and_then(|pool| self.pools.get(&pool.key))
    }

    /// What `model` in `group` is the name of: a pool's own name wins, then an adapter's, then a configured
    /// pattern. An adapter is looked for among the pools of the group alone.
    pub fn named(&self, model: &str, group: Option<&str>) -> Named<'_> {
        let own = PoolKey::new(model, group);
        if let Some(pool) = self.pools.get(&own) {
            return Named::Pool(pool);
        }
        let mut of_adapter =
            self.pools.values().filter(|pool| pool.key.group == own.group && pool.has_adapter(model));
        match (of_adapter.next(), of_adapter.next()) {
            (Some(pool), None) => Named::Adapter(pool),
            (Some(one), Some(other)) => Named::AdapterOfSeveral(one, other),
            _ => self.resolve(model, group).map_or(Named::Nothing, Named::Pool),
        }
    }

    /// The only pool, if there is one only: then requests need not name it.
    pub fn only_pool(&self) -> Option<&Arc<PoolView>> {
        let mut pools = self.pools.values();
        pools.next().filter(|_| pools.next().is_none())
    }

    /// The pool of a worker.
    pub fn pool_of(&self, worker: &WorkerId) -> Option<&Arc<PoolView>> {
        self.declared.worker(worker).and_then(|spec| self.pools.get(&spec.pool))
    }
}

/// What a name that was asked for as a model's is.
#[derive(Clone, Copy, Debug)]
pub enum Named<'f> {
    /// A pool's own name, or what a configured pattern makes of it.
    Pool(&'f Arc<PoolView>),
    /// The name of an adapter of this pool's base model.
    Adapter(&'f Arc<PoolView>),
    /// The name of adapters of two base models, so that nobody knows which is meant.
    AdapterOfSeveral(&'f Arc<PoolView>, &'f Arc<PoolView>),
    /// Nobody's.
    Nothing,
}

/// One pool: its workers and the index over all their ranks.
#[derive(Debug)]
pub struct PoolView {
    /// Model and group.
    pub key: PoolKey,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Who holds what.
    pub index: index::Reader,
    /// The workers, by id.
    pub workers: Vec<WorkerView>,
    /// Adapters that its workers declare.
    pub declared_adapters: BTreeSet<String>,
    /// Adapters whose blocks its ranks have announced.
    pub learnt_adapters: Arc<LearntAdapters>,
}

impl PoolView {
    /// All ranks with their workers.
    pub fn ranks(&self) -> impl Iterator<Item = (&WorkerView, &RankView)> {
        self.workers.iter().flat_map(|worker| worker.ranks.iter().map(move |rank| (worker, rank)))
    }

    /// Whether one of its workers declares this adapter, or has announced blocks of it.
    pub fn has_adapter(&self, name: &str) -> bool {
        self.declared_adapters.contains(name) || self.learnt_adapters.contains(name)
    }

    /// One worker.
    pub fn worker(&self, id: &WorkerId) -> Option<&WorkerView> {
        self.workers.iter().find(|worker| worker.spec.worker == *id)
    }
}

/// One worker and its ranks.
#[derive(Debug)]
pub struct WorkerView {
    /// As declared.
    pub spec: WorkerSpec,
    /// Its ranks, ascending.
    pub ranks: Vec<RankView>,
    /// What its ranks share, as declared.
    pub shared_capacity: Capacity,
    /// Its taints, shared with every decision that looks at it.
    pub taints: Arc<[Box<str>]>,
}

/// One rank.
#[derive(Clone, Debug)]
pub struct RankView {
    /// Its name, number within its worker and endpoints.
    pub plan: RankPlan,
    /// Its place in the index.
    pub slot: RankSlot,
    /// Its stream.
    pub source: SourceId,
    /// Blocks that it can hold, as declared; here, so that a decision does not look it up rank by rank. With
    /// what its engine reports of itself: [`PoolView::capacity_of`].
    pub capacity: Capacity,
    /// Requests that it runs at once, as declared: beyond, it is no candidate.
    pub request_limit: Option<u64>,
    /// What the indexer says of it.
    pub status: Arc<RankStatus>,
}

/// A rank's state, written by the indexer and read by anyone.
///
/// Trust and age are read without a lock, since every decision rests on them; the rest is for metrics and
/// pages.
#[derive(Debug)]
pub struct RankStatus {
    /// The bits of [`Reasons`].
    reasons: AtomicU64,
    /// Microseconds of the last message plus one; 0 is never.
    last_heard: AtomicU64,
    /// Why the last attempt to connect failed; `None` while there is a connection.
    last_error: ArcSwapOption<String>,
    report: Newest,
}

/// A report that is replaced all the time. The writer writes where no reader looks, and so waits for none: for one
/// it would have to lose its core in the middle of a copy, and another in the other place.
#[derive(Default, Debug)]
struct Newest {
    places: [Mutex<RankReport>; 2],
    newest: AtomicUsize,
}

impl Newest {
    fn get(&self) -> RankReport {
        *self.places[self.newest.load(Ordering::Acquire) % 2].lock()
    }

    fn set(&self, report: RankReport) {
        let newest = self.newest.load(Ordering::Relaxed);
        let other = newest.wrapping_add(1);
        if let Some(mut place) = self.places[other % 2].try_lock() {
            *place = report;
            drop(place);
            self.newest.store(other, Ordering::Release);
        } else {
            *self.places[newest % 2].lock() = report;
        }
    }
}

impl RankStatus {
    pub(super) fn new(reasons: Reasons) -> Self {
        Self {
            reasons: AtomicU64::new(reasons.bits()),
            last_heard: AtomicU64::new(0),
            last_error: ArcSwapOption::empty(),
            report: Newest::default(),
        }
    }

    /// How far the rank's view can be believed.
    pub fn trust(&self) -> Trust {
        self.reasons().trust()
    }

    /// Why it cannot be believed further.
    pub fn reasons(&self) -> Reasons {
        Reasons::from_bits(self.reasons.load(Ordering::Relaxed))
    }

    /// When the rank was last heard, on the clock that drives the indexer.
    pub fn last_heard(&self) -> Option<Moment> {
        self.last_heard.load(Ordering::Relaxed).checked_sub(1).map(Moment)
    }

    /// Why there is no event connection, in words; `None` while there is one or none was tried.
    pub fn last_error(&self) -> Option<Arc<String>> {
        self.last_error.load_full()
    }

    /// Keeps the cause; says whether it is another one than before.
    pub(super) fn set_last_error(&self, why: &str) -> bool {
        let changed = self.last_error.load().as_ref().is_none_or(|before| before.as_str() != why);
        if changed {
            self.last_error.store(Some(Arc::new(why.to_owned())));
        }
        changed
    }

    pub(super) fn clear_last_error(&self) {
        self.last_error.store(None);
    }

    /// Everything that is counted.
    pub fn report(&self) -> RankReport {
        self.report.get()
    }

    pub(super) fn publish(&self, reasons: Reasons, last_heard: Option<Moment>, report: RankReport) {
        self.reasons.store(reasons.bits(), Ordering::Relaxed);
        self.last_heard.store(last_heard.map_or(0, |at| at.0.saturating_add(1)), Ordering::Relaxed);
        self.report.set(report);
    }
}

/// What is counted of one rank since it was declared. All counters start at 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RankReport {
    /// Whether the event connection stands.
    pub connected: bool,
    /// The stream's order.
    pub stream: StreamCounters,
    /// The last number applied.
    pub watermark: Option<EventSeq>,
    /// Live batches that wait for a replay.
    pub held_batches: u64,
    /// Their payload bytes.
    pub held_bytes: u64,
    /// Tokens per block as its newest event of the device says; `None` before the first.
    pub announced_block_size: Option<u32>,
    /// Everything below the order.
    pub content: ContentCounters,
    /// How often each reason was given, since the rank was declared.
    pub given: ReasonCounts,
    /// The tiers that [`Reason::NoRemovals`](crate::trust::Reason::NoRemovals) speaks of.
    pub without_removals: TierSet,
}

impl RankReport {
    /// Adds another rank's counters; what is no counter (connection, watermark) stays.
    pub fn add(&mut self, other: &Self) {
        self.stream.add(&other.stream);
        self.held_batches += other.held_batches;
        self.held_bytes += other.held_bytes;
        self.content.add(&other.content);
        self.given.merge(&other.given);
    }
}

/// What happened to messages and events of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ContentCounters {
    /// Messages with the wrong framing or an undecodable payload.
    pub malformed_messages: u64,
    /// Messages of another topic that only shares our prefix.
    pub other_topic: u64,
    /// Events that were left out, or names of them, by reason.
    pub skipped: ReasonCounts,
    /// Batches whose payload names another rank than their connection.
    pub rank_mismatch: u64,
    /// Blocks whose parent was not known when they came.
    pub orphan_blocks: u64,
    /// Orphans of which only the name could be kept.
    pub orphans_dropped: u64,
    /// Removed names that the rank did not hold.
    pub unknown_removals: u64,
    /// Blocks announced on a medium that we do not know.
    pub other_medium_blocks: u64,
    /// Blocks announced.
    pub stored_blocks: u64,
    /// Names removed.
    pub removed_blocks: u64,
    /// Names stored as another block than the one that the rank holds under them.
    pub contradicted_names: u64,
    /// Clears.
    pub clears: u64,
    /// Stores whose hashes are not chained (SGLang before 0.5.6): their engine is too old to be indexed.
    pub unchained_stores: u64,
}

impl ContentCounters {
    fn add(&mut self, other: &Self) {
        self.skipped.merge(&other.skipped);
        for (count, more) in [
            (&mut self.malformed_messages, other.malformed_messages),
            (&mut self.other_topic, other.other_topic),
            (&mut self.rank_mismatch, other.rank_mismatch),
            (&mut self.orphan_blocks, other.orphan_blocks),
            (&mut self.orphans_dropped, other.orphans_dropped),
            (&mut self.unknown_removals, other.unknown_removals),
            (&mut self.other_medium_blocks, other.other_medium_blocks),
            (&mut self.stored_blocks, other.stored_blocks),
            (&mut self.removed_blocks, other.removed_blocks),
            (&mut self.contradicted_names, other.contradicted_names),
            (&mut self.clears, other.clears),
            (&mut self.unchained_stores, other.unchained_stores),
        ] {
            *count += more;
        }
    }
}

//! The newest report of every declared rank.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::answer::{LoadAnswer, agreed};
use super::ledger::{Booked, Ledger, LedgerConfig};
use super::place::{Place, ReportedCapacity, Stamp, Stored, Taken};
use super::report::{LoadReport, RankLoad};
use crate::block::BlockSize;
use crate::ids::{DpRank, Moment, RankKey, WorkerId};

/// Settings of a [`LoadTable`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LoadConfig {
    /// A report older than this makes its rank unknown.
    pub ttl: Duration,
    /// What makes a rank known.
    pub mode: LoadMode,
    /// The reservations.
    pub ledger: LedgerConfig,
}

impl Default for LoadConfig {
    /// 15 s: engines report at least once a second when they report at all, and a scrape may miss a few.
    fn default() -> Self {
        Self { ttl: Duration::from_secs(15), mode: LoadMode::default(), ledger: LedgerConfig::default() }
    }
}

/// What makes a rank's load known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum LoadMode {
    /// A fresh report, to which is added what was reserved since.
    #[default]
    Reports,
    /// Our own reservations too, where no fresh report is: the operator vouches that all traffic passes here.
    Ledger,
}

/// Per declared rank, the newest report and what was reserved; per worker, the newest aggregate, kept apart.
///
/// Only declared ranks have a place, so a report can create none: memory is bounded by the fleet, and by the
/// ledger's own limits.
///
/// Cost: a report is linear in its entries and in what was reserved since the last; a look-up is a few map
/// look-ups.
#[derive(Debug, Default)]
pub struct LoadTable {
    config: LoadConfig,
    workers: HashMap<WorkerId, WorkerLoad>,
    /// Sources whose reports are worth something for another time than the others'.
    limits: HashMap<Arc<str>, Duration>,
    ledger: Ledger,
    counts: LoadCounts,
    /// Ranks that were said to hold another amount than before, until somebody asks.
    resized: BTreeSet<RankKey>,
    /// Ranks whose engine has fallen asleep and lost its cache, until somebody asks.
    emptied: BTreeSet<RankKey>,
    /// By base URL: at most one for each that is asked.
    rollups: BTreeMap<Box<str>, (Moment, Arc<LoadAnswer>)>,
}

/// One rank's newest report, as a saved value.
#[derive(Clone, PartialEq, Debug)]
pub struct SavedLoad {
    /// Whose.
    pub rank: RankKey,
    /// Its figures.
    pub load: RankLoad,
    /// How old they were.
    pub age: Duration,
    /// Who said so.
    pub source: Arc<str>,
}

#[derive(Debug, Default)]
struct WorkerLoad {
    ranks: BTreeMap<DpRank, Place>,
    aggregate: Option<Stored>,
}

/// What became of a report's entries; or of all entries so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LoadCounts {
    /// Taken.
    pub accepted: u64,
    /// Refused: a value that cannot be, or one of several entries for one rank.
    pub refused_entries: u64,
    /// Dropped: the rank is not declared.
    pub out_of_range: u64,
    /// Ignored: no field at all.
    pub empty: u64,
    /// Ignored: older than what is known.
    pub superseded: u64,
}

impl LoadCounts {
    fn add(&mut self, more: Self) {
        self.accepted += more.accepted;
        self.refused_entries += more.refused_entries;
        self.out_of_range += more.out_of_range;
        self.empty += more.empty;
        self.superseded += more.superseded;
    }
}

/// A rank's load, or why there is none.
#[derive(Clone, PartialEq, Debug)]
pub enum RankLoadView {
    /// A fresh report says so, with what was reserved since; or the ledger alone, where it may.
    Known {
        /// Blocks active on the rank.
        decode_blocks: f64,
        /// What they follow from.
        basis: LoadBasis,
        /// Prompt tokens still to be computed there; `None` is unknown, not 0.
        active_prefill_tokens: Option<u64>,
        /// Blocks of the KV cache in use; `None` is unknown.
        used_blocks: Option<f64>,
        /// Requests being served.
        running: Option<u64>,
        /// Requests waiting.
        waiting: Option<u64>,
        /// How old the report is; `None` where the ledger alone makes the rank known.
        age: Option<Duration>,
        /// Who said so.
        source: Arc<str>,
    },
    /// Neither idle nor busy.
    Unknown(LoadUnknown),
}

impl RankLoadView {
    /// Blocks active on the rank, if known.
    pub fn decode_blocks(&self) -> Option<f64> {
        match self {
            Self::Known { decode_blocks, .. } => Some(*decode_blocks),
            Self::Unknown(_) => None,
        }
    }

    /// Blocks of the KV cache in use, if known.
    pub fn used_blocks(&self) -> Option<f64> {
        match self {
            Self::Known { used_blocks, .. } => *used_blocks,
            Self::Unknown(_) => None,
        }
    }

    /// Prompt tokens still to be computed, if known.
    pub fn active_prefill_tokens(&self) -> Option<u64> {
        match self {
            Self::Known { active_prefill_tokens, .. } => *active_prefill_tokens,
            Self::Unknown(_) => None,
        }
    }

    /// Requests waiting, if known.
    pub fn waiting(&self) -> Option<u64> {
        match self {
            Self::Known { waiting, .. } => *waiting,
            Self::Unknown(_) => None,
        }
    }

    /// Requests on the rank, running and waiting and sent since, as far as they are known.
    pub fn requests(&self) -> Option<u64> {
        match self {
            Self::Known { running: Some(running), waiting, .. } => {
                Some(running.saturating_add(waiting.unwrap_or(0)))
            }
            _ => None,
        }
    }

    /// How old the figures are; `None` if nothing was ever reported.
    pub fn age(&self) -> Option<Duration> {
        match self {
            Self::Known { age, .. } => *age,
            Self::Unknown(LoadUnknown::TooOld { age } | LoadUnknown::NoUsableField { age }) => Some(*age),
            Self::Unknown(_) => None,
        }
    }
}

/// What is shown of a rank's load whether or not it is known.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RankGauges {
    /// Requests being served, with what was sent there since the report.
    pub running: Option<u64>,
    /// Requests waiting.
    pub waiting: Option<u64>,
    /// Blocks of the KV cache in use, with what was sent there since the report.
    pub used_blocks: Option<f64>,
    /// Requests that the rank runs at once, as its engine says.
    pub request_limit: Option<u64>,
    /// Whether its engine sleeps.
    pub asleep: bool,
}

/// What a rank's active blocks follow from, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum LoadBasis {
    /// `decode_blocks` was reported.
    DecodeBlocks,
    /// `num_used_tokens`, in blocks and rounded up.
    UsedTokens,
    /// `kv_used_blocks`.
    UsedBlocks,
    /// `token_usage` of an exact capacity.
    Usage,
    /// No report: what was reserved.
    Ledger,
}

impl LoadBasis {
    /// The name at the boundary: that of the field.
    pub fn name(self) -> &'static str {
        match self {
            Self::DecodeBlocks => "decode_blocks",
            Self::UsedTokens => "num_used_tokens",
            Self::UsedBlocks => "kv_used_blocks",
            Self::Usage => "token_usage",
            Self::Ledger => "ledger",
        }
    }
}

/// Why a rank's load is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoadUnknown {
    /// The rank is not declared.
    NotDeclared,
    /// Nothing was ever reported for it.
    NeverReported,
    /// The newest report is older than the limit.
    TooOld {
        /// Its age.
        age: Duration,
    },
    /// The newest report has none of the fields from which active blocks follow.
    NoUsableField {
        /// Its age.
        age: Duration,
    },
}

impl LoadUnknown {
    /// The name at the boundary.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotDeclared => "not_declared",
            Self::NeverReported => "never_reported",
            Self::TooOld { .. } => "too_old",
            Self::NoUsableField { .. } => "no_usable_field",
        }
    }
}

/// A worker's own figures, which are no rank's.
#[derive(Clone, PartialEq, Debug)]
pub struct AggregateView {
    /// The figures.
    pub load: RankLoad,
    /// How old they are.
    pub age: Duration,
    /// Who said so.
    pub source: Arc<str>,
}

impl LoadTable {
    /// An empty table.
    pub fn new(config: LoadConfig) -> Self {
        Self { config, ledger: Ledger::new(config.ledger), ..Self::default() }
    }

    /// Gives a declared rank its place; one that has it keeps what is known.
    pub fn declare(&mut self, rank: &RankKey) {
        self.ledger.declare(rank);
        self.workers.entry(rank.worker.clone()).or_default().ranks.entry(rank.dp_rank).or_default();
    }

    /// Forgets a rank that is gone and what was reserved there, and with a worker's last rank its aggregate.
    /// `false` if it had no place.
    pub fn retire(&mut self, rank: &RankKey) -> bool {
        self.ledger.retire(rank);
        let Some(worker) = self.workers.get_mut(&rank.worker) else { return false };
        let gone = worker.ranks.remove(&rank.dp_rank).is_some();
        self.resized.remove(rank);
        self.emptied.remove(rank);
        if worker.ranks.is_empty() {
            self.workers.remove(&rank.worker);
        }
        gone
    }

    /// Takes a worker's report that is as old as its entries say, entry by entry.
    ///
    /// An entry that is refused neither becomes 0 nor renews the age of what is known.
    pub fn report(&mut self, now: Moment, worker: &WorkerId, report: &LoadReport) -> LoadCounts {
        self.report_measured(now, now, worker, report)
    }

    /// Takes a worker's report that was measured at `measured` and received at `now`; an entry's own age is
    /// counted from there.
    ///
    /// What was booked after that moment is not in the report and stays counted beside it (requirement L18).
    pub fn report_measured(
        &mut self,
        now: Moment,
        measured: Moment,
        worker: &WorkerId,
        report: &LoadReport,
    ) -> LoadCounts {
        let mut counts = LoadCounts::default();
        let agreed = agreed(&report.entries);
        for (at, entry) in report.entries.iter().enumerate() {
            let rank = entry.dp_rank.and_then(|rank| u32::try_from(rank).ok()).map(DpRank);
            if entry.dp_rank.is_some() && !self.has_place(worker, rank) {
                counts.out_of_range += 1;
                continue;
            }
            let (load, age) = match (entry.dp_rank.and_then(|rank| agreed.get(&rank)), entry.load.check()) {
                // Who says the same again has said it once.
                (Some(Some(first)), Ok(_)) if *first != at => continue,
                (Some(Some(_)), Ok(read)) => read,
                _ => {
                    counts.refused_entries += 1;
                    continue;
                }
            };
            let stamp = Stamp { received: now, age_then: now.since(measured).saturating_add(age) };
            let stored = Stored { load, stamp, source: report.source.clone() };
            match rank {
                _ if load.is_empty() => counts.empty += 1,
                Some(dp_rank) if self.offer(now, RankKey { worker: worker.clone(), dp_rank }, stored) => {
                    counts.accepted += 1;
                }
                _ => counts.superseded += 1,
            }
        }
        self.take_aggregate(now, measured, worker, report, &mut counts);
        self.counts.add(counts);
        counts
    }

    fn has_place(&self, worker: &WorkerId, rank: Option<DpRank>) -> bool {
        // The fleet's ranks, and nothing else, have a place.
        rank.is_some_and(|rank| {
            self.workers.get(worker).is_some_and(|worker| worker.ranks.contains_key(&rank))
        })
    }

    fn offer(&mut self, now: Moment, rank: RankKey, stored: Stored) -> bool {
        let (limits, ttl) = (&self.limits, self.config.ttl);
        let fresh =
            |stored: &Stored| stored.stamp.age(now) <= limits.get(&stored.source).copied().unwrap_or(ttl);
        let place = self.workers.get_mut(&rank.worker).and_then(|worker| worker.ranks.get_mut(&rank.dp_rank));
        let Some(place) = place else { return false };
        let measured = stored.stamp.measured();
        let Taken { taken, resized, cache_gone } = place.offer(now, stored, fresh);
        if taken {
            self.ledger.reported(&rank, measured, now);
        }
        if resized {
            self.resized.insert(rank.clone());
        }
        if cache_gone {
            self.emptied.insert(rank);
        }
        taken
    }

    /// An aggregate is nobody's load. But an engine that sleeps does so with all its ranks.
    fn take_aggregate(
        &mut self,
        now: Moment,
        measured: Moment,
        worker: &WorkerId,
        report: &LoadReport,
        counts: &mut LoadCounts,
    ) {
        let (Some(aggregate), Some(its)) = (&report.aggregate, self.workers.get_mut(worker)) else { return };
        let (load, age) = match aggregate.check() {
            Ok(read) if !read.0.is_empty() => read,
            Ok(_) => return counts.empty += 1,
            Err(_) => return counts.refused_entries += 1,
        };
        let stamp = Stamp { received: now, age_then: now.since(measured).saturating_add(age) };
        if let Some(state) = load.sleep {
            for (&dp_rank, place) in &mut its.ranks {
                if place.note_sleep(now, state, stamp) {
                    self.emptied.insert(RankKey { worker: worker.clone(), dp_rank });
                }
            }
        }
        if its.aggregate.as_ref().is_none_or(|known| stamp.age(now) <= known.stamp.age(now)) {
            its.aggregate = Some(Stored { load, stamp, source: report.source.clone() });
        }
    }

    /// A rank's load at `now`: its fresh report and what was reserved there since; where the mode lets the
    /// ledger speak alone and there is no fresh report, everything that is reserved there.
    ///
    /// A field that the report lacks is filled from the ledger only where something is reserved on the rank,
    /// or the ledger may speak alone; otherwise it stays unknown.
    ///
    /// `exact_capacity` is the rank's own KV capacity in blocks, if that is known exactly; a usage needs it,
    /// unless the report states the capacity itself.
    pub fn load(
        &self,
        now: Moment,
        rank: &RankKey,
        block_size: BlockSize,
        exact_capacity: Option<u64>,
    ) -> RankLoadView {
        match self.by_report(now, rank, block_size, exact_capacity) {
            RankLoadView::Unknown(LoadUnknown::NotDeclared) => {
                RankLoadView::Unknown(LoadUnknown::NotDeclared)
            }
            RankLoadView::Unknown(_) if self.config.mode == LoadMode::Ledger => self.by_ledger(rank),
            view => view,
        }
    }

    fn by_report(
        &self,
        now: Moment,
        rank: &RankKey,
        block_size: BlockSize,
        exact_capacity: Option<u64>,
    ) -> RankLoadView {
        let Some(place) = self.place(rank) else {
            return RankLoadView::Unknown(LoadUnknown::NotDeclared);
        };
        let Some(stored) = &place.report else {
            return RankLoadView::Unknown(LoadUnknown::NeverReported);
        };
        let age = stored.stamp.age(now);
        if age > self.limit(stored) {
            return RankLoadView::Unknown(LoadUnknown::TooOld { age });
        }
        let load = &stored.load;
        // A usage is a share of what the engine says that it has, whatever was declared.
        let capacity = place.capacity(block_size).map(|reported| reported.blocks).or(exact_capacity);
        let Some((decode_blocks, basis)) = active_blocks(load, block_size, capacity) else {
            return RankLoadView::Unknown(LoadUnknown::NoUsableField { age });
        };
        let since = self.ledger.since_report(rank);
        // What a report does not speak of is in none, so nothing of it is counted twice.
        let unreported = |of: fn(&Booked) -> u64| {
            let all = self.ledger.all(rank);
            (all.requests > 0 || self.config.mode == LoadMode::Ledger).then(|| of(&all))
        };
        let plus = |reported: Option<u64>, of: fn(&Booked) -> u64| match reported {
            Some(reported) => Some(reported.saturating_add(of(&since))),
            None => unreported(of),
        };
        RankLoadView::Known {
            decode_blocks: decode_blocks + since.decode_blocks,
            basis,
            active_prefill_tokens: plus(load.prefill_tokens.or(load.queued_uncached_tokens), |booked| {
                booked.prefill_tokens
            }),
            used_blocks: used_blocks(load, block_size, capacity).map(|used| used + since.decode_blocks),
            running: plus(load.num_running_reqs, |booked| booked.requests),
            waiting: load.num_waiting_reqs,
            age: Some(age),
            source: stored.source.clone(),
        }
    }

    fn by_ledger(&self, rank: &RankKey) -> RankLoadView {
        let all = self.ledger.all(rank);
        RankLoadView::Known {
            decode_blocks: all.decode_blocks,
            basis: LoadBasis::Ledger,
            active_prefill_tokens: Some(all.prefill_tokens),
            used_blocks: Some(all.decode_blocks),
            running: Some(all.requests),
            waiting: None,
            age: None,
            source: LoadBasis::Ledger.name().into(),
        }
    }

    /// The reservations.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The reservations, to book and to end.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Reports of `source` make their rank unknown at this age instead of [`LoadConfig::ttl`]: a socket that
    /// speaks every second is stale sooner than a scrape.
    pub fn limit_source(&mut self, source: &str, ttl: Duration) {
        self.limits.insert(source.into(), ttl);
    }

    fn limit(&self, stored: &Stored) -> Duration {
        self.limits.get(&stored.source).copied().unwrap_or(self.config.ttl)
    }

    /// The figures of a rank's newest report as they came, if it is fresh, with their age.
    pub fn fresh(&self, now: Moment, rank: &RankKey) -> Option<(&RankLoad, Duration)> {
        let stored = self.stored(rank)?;
        let age = stored.stamp.age(now);
        (age <= self.limit(stored)).then_some((&stored.load, age))
    }

    fn place(&self, rank: &RankKey) -> Option<&Place> {
        self.workers.get(&rank.worker)?.ranks.get(&rank.dp_rank)
    }

    fn stored(&self, rank: &RankKey) -> Option<&Stored> {
        self.place(rank)?.report.as_ref()
    }

    /// What a rank holds by its engine's own word, in blocks of `block_size`; `None` if it never said so. It
    /// stands until the engine says otherwise: a size does not age.
    pub fn reported_capacity(&self, rank: &RankKey, block_size: BlockSize) -> Option<ReportedCapacity> {
        self.place(rank)?.capacity(block_size)
    }

    /// Requests that a rank runs at once by its engine's own word. It informs, and excludes nobody.
    pub fn reported_request_limit(&self, rank: &RankKey) -> Option<u64> {
        self.place(rank)?.request_limit()
    }

    /// A request that was sent to a rank came back: its engine is full, or does not know the rank. Until a report
    /// that is measured later, and for [`LoadConfig::ttl`] at most, the rank counts as overloaded. `false` if the
    /// rank is not declared.
    pub fn reject(&mut self, now: Moment, rank: &RankKey) -> bool {
        let place = self.workers.get_mut(&rank.worker).and_then(|worker| worker.ranks.get_mut(&rank.dp_rank));
        place.map(|place| place.reject(now)).is_some()
    }

    /// Whether a request that was sent to a rank came back lately; see [`LoadTable::reject`].
    pub fn is_rejected(&self, now: Moment, rank: &RankKey) -> bool {
        self.place(rank).is_some_and(|place| place.is_rejected(now, self.config.ttl))
    }

    /// Whether a rank's engine sleeps, as it said within [`LoadConfig::ttl`]. `false` where nothing says so.
    pub fn is_asleep(&self, now: Moment, rank: &RankKey) -> bool {
        self.place(rank).is_some_and(|place| place.is_asleep(now, self.config.ttl))
    }

    /// Everything that is shown of a rank's load, known or not, at the cost of [`LoadTable::load`]. A figure
    /// that no fresh report gives is `None`.
    pub fn gauges(
        &self,
        now: Moment,
        rank: &RankKey,
        block_size: BlockSize,
        exact_capacity: Option<u64>,
    ) -> RankGauges {
        let view = self.load(now, rank, block_size, exact_capacity);
        let fresh = self.fresh(now, rank).map(|(load, _)| load);
        let (running, used_blocks) = match view {
            RankLoadView::Known { running, used_blocks, .. } => (running, used_blocks),
            RankLoadView::Unknown(_) => (fresh.and_then(|load| load.num_running_reqs), None),
        };
        RankGauges {
            running,
            waiting: fresh.and_then(|load| load.num_waiting_reqs),
            used_blocks,
            request_limit: self.reported_request_limit(rank),
            asleep: self.is_asleep(now, rank),
        }
    }

    /// Ranks that were said to hold another amount than before, since this was last asked.
    pub fn take_resized(&mut self) -> BTreeSet<RankKey> {
        std::mem::take(&mut self.resized)
    }

    /// Ranks whose engine has fallen into a sleep that takes its device cache, since this was last asked.
    pub fn take_emptied(&mut self) -> BTreeSet<RankKey> {
        std::mem::take(&mut self.emptied)
    }

    /// Every worker's own figures that are fresh, in no order.
    pub fn aggregates(&self, now: Moment) -> impl Iterator<Item = (&WorkerId, AggregateView)> {
        self.workers.keys().filter_map(move |worker| Some((worker, self.aggregate(now, worker)?)))
    }

    /// Keeps what a gateway at `base` said of a fleet: shown, and no rank's load.
    pub fn note_rollup(&mut self, measured: Moment, base: &str, answer: Arc<LoadAnswer>) {
        self.rollups.insert(base.into(), (measured, answer));
    }

    /// Forgets what a gateway said, since it is asked no more.
    pub fn forget_rollup(&mut self, base: &str) {
        self.rollups.remove(base);
    }

    /// What gateways said that is fresh, by base URL, with its age.
    pub fn rollups(&self, now: Moment) -> impl Iterator<Item = (&str, &LoadAnswer, Duration)> {
        let ttl = self.config.ttl;
        let aged = self
            .rollups
            .iter()
            .map(move |(base, (measured, answer))| (&**base, &**answer, now.since(*measured)));
        aged.filter(move |(_, _, age)| *age <= ttl)
    }

    /// The newest report of every rank that has one, with its age: what [`LoadTable::restore`] takes.
    pub fn saved(&self, now: Moment) -> Vec<SavedLoad> {
        let known = self.workers.iter().flat_map(|(worker, load)| {
            load.ranks
                .iter()
                .filter_map(move |(&dp_rank, stored)| Some((worker, dp_rank, stored.report.as_ref()?)))
        });
        known
            .map(|(worker, dp_rank, stored)| SavedLoad {
                rank: RankKey { worker: worker.clone(), dp_rank },
                load: stored.load,
                age: stored.stamp.age(now),
                source: stored.source.clone(),
            })
            .collect()
    }

    /// Takes over saved reports of ranks that are declared, as old as they were plus `since`, the time since
    /// they were saved. A rank that is not declared gets none, and a newer report stays. How many were taken.
    pub fn restore(
        &mut self,
        now: Moment,
        since: Duration,
        saved: impl IntoIterator<Item = SavedLoad>,
    ) -> usize {
        let mut taken = 0;
        for SavedLoad { rank, load, age, source } in saved {
            let stamp = Stamp { received: now, age_then: age.saturating_add(since) };
            taken += usize::from(self.offer(now, rank, Stored { load, stamp, source }));
        }
        taken
    }

    /// The figures of a rank's newest report as they came, fresh or not, with their age.
    pub fn newest(&self, now: Moment, rank: &RankKey) -> Option<(&RankLoad, Duration)> {
        let stored = self.stored(rank)?;
        Some((&stored.load, stored.stamp.age(now)))
    }

    /// A worker's own figures at `now`; `None` if there are none or they are older than the limit.
    pub fn aggregate(&self, now: Moment, worker: &WorkerId) -> Option<AggregateView> {
        let stored = self.workers.get(worker)?.aggregate.as_ref()?;
        let age = stored.stamp.age(now);
        (age <= self.limit(stored)).then(|| AggregateView {
            load: stored.load,
            age,
            source: stored.source.clone(),
        })
    }

    /// The ranks that have a place, in no order among workers and ascending within one.
    pub fn ranks(&self) -> impl Iterator<Item = RankKey> + '_ {
        self.workers.iter().flat_map(|(worker, load)| {
            load.ranks.keys().map(|&dp_rank| RankKey { worker: worker.clone(), dp_rank })
        })
    }

    /// What became of all entries so far.
    pub fn counts(&self) -> LoadCounts {
        self.counts
    }

    /// The settings.
    pub fn config(&self) -> LoadConfig {
        self.config
    }
}

fn active_blocks(load: &RankLoad, block_size: BlockSize, capacity: Option<u64>) -> Option<(f64, LoadBasis)> {
    if let Some(blocks) = load.decode_blocks {
        return Some((blocks, LoadBasis::DecodeBlocks));
    }
    if let Some(tokens) = load.num_used_tokens {
        return Some((blocks_of(tokens, block_size), LoadBasis::UsedTokens));
    }
    if let Some(blocks) = load.kv_used_blocks {
        return Some((blocks as f64, LoadBasis::UsedBlocks));
    }
    Some((by_usage(load, block_size, capacity)?, LoadBasis::Usage))
}

fn used_blocks(load: &RankLoad, block_size: BlockSize, capacity: Option<u64>) -> Option<f64> {
    load.kv_used_blocks
        .map(|blocks| blocks as f64)
        .or_else(|| load.num_used_tokens.map(|tokens| blocks_of(tokens, block_size)))
        .or_else(|| by_usage(load, block_size, capacity))
}

/// A share of the rank's capacity: the one that the report itself gives, else `capacity`.
fn by_usage(load: &RankLoad, block_size: BlockSize, capacity: Option<u64>) -> Option<f64> {
    let tokens = || load.max_total_num_tokens.map(|tokens| tokens / u64::from(block_size.get()));
    let own = load.kv_total_blocks.or_else(tokens).filter(|&blocks| blocks > 0);
    Some(load.token_usage? * own.or(capacity).filter(|&blocks| blocks > 0)? as f64)
}

/// Tokens in blocks, rounded up.
fn blocks_of(tokens: u64, block_size: BlockSize) -> f64 {
    tokens.div_ceil(block_size.get().into()) as f64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::load::{Claim, ClaimedBlocks, LoadEntry, RawNumber, RawRankLoad, SleepState};

    const BLOCK: BlockSize = BlockSize::new(4).unwrap();

    fn table(worker: &str, ranks: std::ops::Range<u32>) -> LoadTable {
        let mut table = LoadTable::new(LoadConfig::default());
        ranks.for_each(|rank| table.declare(&RankKey::new(worker, rank)));
        table
    }

    fn decode(blocks: f64) -> RawRankLoad {
        RawRankLoad { decode_blocks: blocks.into(), ..RawRankLoad::default() }
    }

    fn at(millis: u64) -> Moment {
        Moment::from_millis(millis)
    }

    impl LoadTable {
        fn say(&mut self, now: Moment, worker: &str, loads: &[(u32, RawRankLoad)]) -> LoadCounts {
            let entries = loads.iter().map(|&(rank, load)| LoadEntry::new(rank, load)).collect();
            self.report(now, &worker.into(), &LoadReport::new(entries))
        }

        fn view(&self, now: Moment, worker: &str, rank: u32) -> RankLoadView {
            self.load(now, &RankKey::new(worker, rank), BLOCK, None)
        }

        fn blocks(&self, now: Moment, worker: &str, ranks: std::ops::Range<u32>) -> Vec<Option<f64>> {
            ranks.map(|rank| self.view(now, worker, rank).decode_blocks()).collect()
        }
    }

    /// C36, L4, L6: a missing rank is unknown; an aggregate is nobody's; an empty report renews nothing.
    #[test]
    fn missing_is_not_idle() {
        let mut table = table("w1", 0..4);
        let mut report = LoadReport::new(vec![
            LoadEntry::new(0, RawRankLoad { kv_used_blocks: 10.0.into(), ..decode(30.0) }),
            LoadEntry::new(2, RawRankLoad { kv_used_blocks: 5.0.into(), ..decode(20.0) }),
        ]);
        report.aggregate = Some(RawRankLoad { kv_used_blocks: 15.0.into(), ..decode(50.0) });
        table.report(at(0), &"w1".into(), &report);
        assert_eq!(table.blocks(at(0), "w1", 0..4), [Some(30.0), None, Some(20.0), None]);
        assert_eq!(table.view(at(0), "w1", 1), RankLoadView::Unknown(LoadUnknown::NeverReported));
        report.entries.clear();
        table.report(at(0), &"w1".into(), &report);
        assert_eq!(table.aggregate(at(0), &"w1".into()).unwrap().load.decode_blocks, Some(50.0));
        assert_eq!(table.blocks(at(60_000), "w1", 0..4), [None; 4]);
        assert_eq!(table.aggregate(at(60_000), &"w1".into()), None);
    }

    /// C37, L4
    #[test]
    fn bad_entries_are_refused_one_by_one() {
        let mut table = table("w1", 0..4);
        let unreadable = RawRankLoad { decode_blocks: RawNumber::Unreadable, ..RawRankLoad::default() };
        let loads =
            [(0, decode(4.0)), (1, decode(-1.0)), (2, decode(7.0)), (2, decode(9.0)), (3, unreadable)];
        let counts = table.say(at(0), "w1", &loads);
        assert_eq!((counts.accepted, counts.refused_entries), (1, 4));
        assert_eq!(table.counts(), counts);
        assert_eq!(table.blocks(at(0), "w1", 0..4), [Some(4.0), None, None, None]);
    }

    /// C37: what is refused leaves the last good value, with its own age.
    #[test]
    fn a_refused_entry_renews_nothing() {
        let mut table = table("w1", 0..2);
        table.say(at(0), "w1", &[(0, decode(4.0)), (1, decode(5.0))]);
        let counts =
            table.say(at(10_000), "w1", &[(0, decode(f64::NAN)), (1, decode(6.0)), (1, decode(7.0))]);
        assert_eq!((counts.accepted, counts.refused_entries), (0, 3));
        assert_eq!(table.view(at(10_000), "w1", 0).age(), Some(Duration::from_secs(10)));
        assert_eq!(table.blocks(at(15_000), "w1", 0..2), [Some(4.0), Some(5.0)]);
        assert_eq!(table.blocks(at(15_001), "w1", 0..2), [None, None]);
    }

    #[test]
    fn an_unreadable_rank_is_refused_and_an_empty_entry_ignored() {
        let mut table = table("w1", 0..1);
        let mut report = LoadReport::new(vec![LoadEntry { dp_rank: None, load: decode(1.0) }]);
        report.entries.push(LoadEntry::new(0, RawRankLoad::default()));
        let counts = table.report(at(0), &"w1".into(), &report);
        assert_eq!((counts.refused_entries, counts.empty, counts.accepted), (1, 1, 0));
        assert_eq!(table.view(at(0), "w1", 0), RankLoadView::Unknown(LoadUnknown::NeverReported));
    }

    /// L15: each source's reports are worth something for their own time.
    #[test]
    fn a_source_may_have_a_limit_of_its_own() {
        let mut table = table("w1", 0..2);
        table.limit_source("load_stat", Duration::from_secs(3));
        for (rank, source) in [(0, "load_stat"), (1, "http")] {
            let report = LoadReport {
                source: source.into(),
                ..LoadReport::new(vec![LoadEntry::new(rank, decode(1.0))])
            };
            table.report(at(0), &"w1".into(), &report);
        }
        let fresh = |now| [0, 1].map(|rank| table.fresh(at(now), &RankKey::new("w1", rank)).is_some());
        assert_eq!(fresh(3_000), [true, true]);
        assert_eq!(fresh(3_001), [false, true]);
        assert!(matches!(table.view(at(3_001), "w1", 0), RankLoadView::Unknown(LoadUnknown::TooOld { .. })));
        assert_eq!(fresh(15_001), [false, false]);
    }

    /// C38: the same value again renews its age; silence makes it unknown.
    #[test]
    fn steady_is_not_gone() {
        let mut table = table("w1", 0..2);
        table.say(at(0), "w1", &[(0, decode(0.0)), (1, decode(0.0))]);
        table.say(at(10_000), "w1", &[(0, decode(0.0))]);
        assert_eq!(table.blocks(at(20_000), "w1", 0..2), [Some(0.0), None]);
        let too_old = LoadUnknown::TooOld { age: Duration::from_secs(20) };
        assert_eq!(table.view(at(20_000), "w1", 1), RankLoadView::Unknown(too_old));
    }

    /// C39: load stands under global ranks, and all of it leaves with the worker.
    #[test]
    fn load_arrives_and_leaves_by_global_rank() {
        let mut table = table("w2", 4..8);
        table.say(at(0), "w2", &[4, 5, 6, 7].map(|rank| (rank, decode(f64::from(rank)))));
        assert_eq!(table.blocks(at(0), "w2", 4..8), [4.0, 5.0, 6.0, 7.0].map(Some));
        assert_eq!(table.blocks(at(0), "w2", 0..4), [None; 4]);
        for rank in table.ranks().collect::<Vec<_>>() {
            assert!(table.retire(&rank));
            assert!(!table.retire(&rank));
        }
        assert!(table.workers.is_empty());
        // Coming back, it starts unknown.
        table.declare(&RankKey::new("w2", 4));
        assert_eq!(table.view(at(0), "w2", 4), RankLoadView::Unknown(LoadUnknown::NeverReported));
    }

    /// C43, L15: a report creates no rank.
    #[test]
    fn reports_outside_the_range_are_dropped_and_counted() {
        let mut table = table("w1", 0..2);
        let counts = table.say(at(0), "w1", &[(0, decode(95.0)), (1, decode(95.0)), (7, decode(1.0))]);
        assert_eq!((counts.accepted, counts.out_of_range), (2, 1));
        assert_eq!(table.view(at(0), "w1", 7), RankLoadView::Unknown(LoadUnknown::NotDeclared));
        assert_eq!(table.ranks().count(), 2);
        assert_eq!(table.say(at(0), "w9", &[(0, decode(1.0))]).out_of_range, 1);
        let far = LoadReport::new(vec![LoadEntry { dp_rank: Some(1 << 32), load: decode(1.0) }]);
        assert_eq!(table.report(at(0), &"w1".into(), &far).out_of_range, 1);
        assert_eq!(table.blocks(at(0), "w1", 0..1), [Some(95.0)]);
        assert_eq!(table.counts().out_of_range, 3);
    }

    /// A resize retires a rank; its late report finds nobody.
    #[test]
    fn a_late_report_of_a_retired_rank_finds_nobody() {
        let mut table = table("w1", 0..2);
        table.say(at(0), "w1", &[(0, decode(1.0)), (1, decode(2.0))]);
        assert!(table.retire(&RankKey::new("w1", 1)));
        table.declare(&RankKey::new("w1", 0));
        assert_eq!(table.say(at(1), "w1", &[(1, decode(2.0))]).out_of_range, 1);
        assert_eq!(table.blocks(at(1), "w1", 0..2), [Some(1.0), None]);
    }

    /// The rule of `POST /loads`: which field makes a rank known, best first, and nothing else does.
    #[test]
    fn active_blocks_follow_from_the_best_field() {
        let mut load = RawRankLoad {
            decode_blocks: 3.0.into(),
            num_used_tokens: 9.0.into(),
            kv_used_blocks: 5.0.into(),
            token_usage: 0.25.into(),
            num_running_reqs: 2.0.into(),
            num_waiting_reqs: 1.0.into(),
            ..RawRankLoad::default()
        };
        let view = |load: RawRankLoad, capacity| {
            let mut table = table("w", 0..1);
            table.say(at(0), "w", &[(0, load)]);
            table.load(at(0), &RankKey::new("w", 0), BLOCK, capacity)
        };
        let basis = |view: &RankLoadView| match view {
            RankLoadView::Known { decode_blocks, basis, .. } => Some((*decode_blocks, *basis)),
            RankLoadView::Unknown(_) => None,
        };
        assert_eq!(basis(&view(load, None)), Some((3.0, LoadBasis::DecodeBlocks)));
        assert_eq!(view(load, None).used_blocks(), Some(5.0));
        load.decode_blocks = RawNumber::Absent;
        assert_eq!(basis(&view(load, None)), Some((3.0, LoadBasis::UsedTokens)));
        load.num_used_tokens = RawNumber::Absent;
        assert_eq!(basis(&view(load, None)), Some((5.0, LoadBasis::UsedBlocks)));
        load.kv_used_blocks = RawNumber::Absent;
        assert_eq!(basis(&view(load, Some(100))), Some((25.0, LoadBasis::Usage)));
        let none = LoadUnknown::NoUsableField { age: Duration::ZERO };
        assert_eq!(view(load, None), RankLoadView::Unknown(none));
        // L5: the capacity that the engine itself profiled, in tokens.
        load.max_total_num_tokens = 803.0.into();
        assert_eq!(basis(&view(load, None)), Some((50.0, LoadBasis::Usage)));
        load.token_usage = RawNumber::Absent;
        assert_eq!(view(load, Some(100)), RankLoadView::Unknown(none));
    }

    /// Prefill tokens, else queued uncached tokens, else unknown and not 0.
    #[test]
    fn active_prefill_tokens_are_unknown_unless_reported() {
        let mut table = table("w", 0..3);
        let queued = RawRankLoad { queued_uncached_tokens: 70.0.into(), ..decode(1.0) };
        let both = RawRankLoad { prefill_tokens: 50.0.into(), ..queued };
        table.say(at(0), "w", &[(0, both), (1, queued), (2, decode(1.0))]);
        let tokens = [0, 1, 2].map(|rank| table.view(at(0), "w", rank).active_prefill_tokens());
        assert_eq!(tokens, [Some(50), Some(70), None]);
    }

    /// Figures may be old when they come, and then age from there; older ones do not displace newer ones.
    #[test]
    fn reported_age_counts() {
        let mut table = table("w", 0..2);
        let aged = |blocks, age_ms: f64| RawRankLoad { age_ms: age_ms.into(), ..decode(blocks) };
        table.say(at(0), "w", &[(0, aged(1.0, 14_000.0)), (1, aged(1.0, 20_000.0))]);
        assert_eq!(table.blocks(at(1_000), "w", 0..2), [Some(1.0), None]);
        assert_eq!(table.blocks(at(1_001), "w", 0..1), [None]);
        table.say(at(2_000), "w", &[(0, aged(2.0, 1_000.0))]);
        let late = table.say(at(3_000), "w", &[(0, aged(9.0, 2_500.0))]);
        assert_eq!((late.accepted, late.superseded), (0, 1));
        assert_eq!(table.blocks(at(3_000), "w", 0..1), [Some(2.0)]);
        assert_eq!(table.newest(at(3_000), &RankKey::new("w", 0)).unwrap().1, Duration::from_secs(2));
    }

    fn reserve(table: &mut LoadTable, now: Moment, id: &str, rank: u32, prefill: u64, blocks: u64) {
        let claim = Claim::new(prefill, prefill, ClaimedBlocks::Count(blocks));
        table.ledger_mut().reserve(now, &id.into(), &RankKey::new("w", rank), claim).unwrap();
    }

    /// L15: known = the fresh report + what was reserved since; a rank that was never seen stays unknown
    /// whatever is reserved there.
    #[test]
    fn what_was_reserved_since_the_report_is_added() {
        let mut table = table("w", 0..2);
        let report = RawRankLoad {
            prefill_tokens: 100.0.into(),
            num_running_reqs: 3.0.into(),
            kv_used_blocks: 20.0.into(),
            ..decode(10.0)
        };
        let figures = |table: &LoadTable, millis, rank| match table.view(at(millis), "w", rank) {
            RankLoadView::Known { decode_blocks, active_prefill_tokens, used_blocks, running, .. } => {
                Some((decode_blocks, active_prefill_tokens, used_blocks, running))
            }
            RankLoadView::Unknown(_) => None,
        };
        reserve(&mut table, at(0), "before", 0, 50, 5);
        assert_eq!(figures(&table, 0, 0), None);
        table.say(at(10), "w", &[(0, report)]);
        assert_eq!(figures(&table, 10, 0), Some((10.0, Some(100), Some(20.0), Some(3))));
        reserve(&mut table, at(20), "after", 0, 30, 4);
        reserve(&mut table, at(20), "elsewhere", 1, 30, 4);
        assert_eq!(figures(&table, 20, 0), Some((14.0, Some(130), Some(24.0), Some(4))));
        assert_eq!(figures(&table, 20, 1), None);
        // The next report contains it; one that was measured before it does not.
        table.say(at(30), "w", &[(0, RawRankLoad { age_ms: 15.0.into(), ..report })]);
        assert_eq!(figures(&table, 30, 0), Some((14.0, Some(130), Some(24.0), Some(4))));
        table.say(at(40), "w", &[(0, report)]);
        assert_eq!(figures(&table, 40, 0), Some((10.0, Some(100), Some(20.0), Some(3))));
        // A superseded report moves nothing.
        reserve(&mut table, at(50), "last", 0, 1, 1);
        table.say(at(60), "w", &[(0, RawRankLoad { age_ms: 30.0.into(), ..report })]);
        assert_eq!(figures(&table, 60, 0), Some((11.0, Some(101), Some(21.0), Some(4))));
        assert_eq!(figures(&table, 60_000, 0), None);
    }

    /// L15: a field that no report speaks of is filled from what is reserved, and is unknown without.
    #[test]
    fn what_no_report_speaks_of_comes_from_the_ledger() {
        let mut table = table("w", 0..1);
        reserve(&mut table, at(0), "a", 0, 50, 5);
        table.say(at(10), "w", &[(0, decode(10.0))]);
        assert_eq!(table.view(at(10), "w", 0).active_prefill_tokens(), Some(50));
        assert_eq!(table.view(at(10), "w", 0).decode_blocks(), Some(10.0));
        table.ledger_mut().free(&"a".into());
        assert_eq!(table.view(at(10), "w", 0).active_prefill_tokens(), None);
    }

    /// L15: only where the operator vouches for it does the ledger alone make a rank known; a fresh report
    /// is still believed.
    #[test]
    fn the_ledger_speaks_alone_only_where_it_may() {
        let config = LoadConfig { mode: LoadMode::Ledger, ..LoadConfig::default() };
        let mut table = LoadTable::new(config);
        table.declare(&RankKey::new("w", 0));
        reserve(&mut table, at(0), "a", 0, 50, 5);
        let view = table.view(at(0), "w", 0);
        assert_eq!((view.decode_blocks(), view.active_prefill_tokens()), (Some(5.0), Some(50)));
        assert_eq!((view.used_blocks(), view.age()), (Some(5.0), None));
        table.say(at(10), "w", &[(0, decode(7.0))]);
        assert_eq!(table.view(at(10), "w", 0).decode_blocks(), Some(7.0));
        assert_eq!(table.view(at(20_000), "w", 0).decode_blocks(), Some(5.0));
        assert_eq!(table.view(at(0), "w", 9), RankLoadView::Unknown(LoadUnknown::NotDeclared));
        // R7: a rank that comes back finds nothing reserved.
        table.retire(&RankKey::new("w", 0));
        table.declare(&RankKey::new("w", 0));
        assert_eq!(table.view(at(10), "w", 0).decode_blocks(), Some(0.0));
        assert!(table.ledger().is_empty());
    }

    impl LoadTable {
        fn say_as(&mut self, now: Moment, source: &str, load: RawRankLoad) -> LoadCounts {
            let report =
                LoadReport { source: source.into(), ..LoadReport::new(vec![LoadEntry::new(0, load)]) };
            self.report(now, &"w".into(), &report)
        }
    }

    /// L18: an engine's word outranks a router's while it is fresh, and only what can be used counts for that.
    #[test]
    fn the_engines_word_outranks_others() {
        let running = || RawRankLoad { num_running_reqs: 3.0.into(), ..RawRankLoad::default() };
        let mut table = table("w", 0..1);
        table.say_as(at(0), "router", decode(1.0));
        assert_eq!(table.blocks(at(0), "w", 0..1), [Some(1.0)]);
        for (n, source) in
            ["engine", "load_stat", "grpc_vllm", "http_v1_loads", "prometheus"].iter().enumerate()
        {
            let (now, blocks) = (at(10 + n as u64), 10.0 + n as f64);
            table.say_as(now, source, decode(blocks));
            let counts = table.say_as(now, "router", decode(99.0));
            assert_eq!((counts.accepted, counts.superseded), (0, 1));
            assert_eq!(table.blocks(now, "w", 0..1), [Some(blocks)]);
        }
        // Nothing usable replaces nothing usable, whoever says it.
        for source in ["prometheus", "engine", "router"] {
            assert_eq!(table.say_as(at(20), source, running()).superseded, 1);
            assert_eq!(table.blocks(at(20), "w", 0..1), [Some(14.0)]);
        }
        // Silent for too long, the engine has no word any more.
        table.say_as(at(15_015), "router", decode(5.0));
        assert_eq!(table.blocks(at(15_015), "w", 0..1), [Some(5.0)]);
        // What the engine says without a usable field leaves the router's usable word.
        table.say_as(at(15_016), "engine", running());
        assert_eq!(table.blocks(at(15_016), "w", 0..1), [Some(5.0)]);
        table.say_as(at(15_017), "engine", decode(6.0));
        assert_eq!(table.blocks(at(15_017), "w", 0..1), [Some(6.0)]);
    }

    /// L18: among hearsay the newest counts, and one without a usable field does not.
    #[test]
    fn a_usable_report_stands_until_it_is_too_old() {
        let mut table = table("w", 0..1);
        let tokens = RawRankLoad { num_used_tokens: 400.0.into(), ..RawRankLoad::default() };
        let running = RawRankLoad { num_running_reqs: 3.0.into(), ..RawRankLoad::default() };
        table.say_as(at(0), "a", tokens);
        table.say_as(at(1), "b", running);
        assert_eq!(table.blocks(at(1), "w", 0..1), [Some(100.0)]);
        table.say_as(at(2), "b", decode(7.0));
        assert_eq!(table.blocks(at(2), "w", 0..1), [Some(7.0)]);
        table.say_as(at(15_003), "b", running);
        let none = LoadUnknown::NoUsableField { age: Duration::ZERO };
        assert_eq!(table.view(at(15_003), "w", 0), RankLoadView::Unknown(none));
    }

    /// L18: what was booked while an engine took its time to answer is not in its answer.
    #[test]
    fn a_report_is_as_old_as_its_measurement() {
        let mut table = table("w", 0..1);
        reserve(&mut table, at(900), "before", 0, 10, 2);
        reserve(&mut table, at(1_200), "meanwhile", 0, 30, 5);
        let report = LoadReport::new(vec![LoadEntry::new(0, decode(1.0))]);
        table.report_measured(at(2_500), at(1_000), &"w".into(), &report);
        let view = table.view(at(2_500), "w", 0);
        assert_eq!((view.decode_blocks(), view.age()), (Some(6.0), Some(Duration::from_millis(1_500))));
        // An entry's own age counts from there.
        let aged =
            LoadReport::new(vec![LoadEntry::new(0, RawRankLoad { age_ms: 100.0.into(), ..decode(1.0) })]);
        table.report_measured(at(2_600), at(2_500), &"w".into(), &aged);
        assert_eq!(table.view(at(2_600), "w", 0).age(), Some(Duration::from_millis(200)));
    }

    /// L18, D10: several entries that say the same of one rank are one report.
    #[test]
    fn equal_entries_are_one_report() {
        let mut table = table("w", 0..2);
        let counts = table.say(at(0), "w", &[(0, decode(4.0)), (1, decode(6.0)), (0, decode(4.0))]);
        assert_eq!((counts.accepted, counts.refused_entries), (2, 0));
        assert_eq!(table.blocks(at(0), "w", 0..2), [Some(4.0), Some(6.0)]);
        let counts = table.say(at(1), "w", &[(0, decode(4.0)), (0, decode(4.0)), (0, decode(5.0))]);
        assert_eq!((counts.accepted, counts.refused_entries), (0, 3));
    }

    /// L17: an engine's size is its own to say, stands until it says another, and gives its usage a measure.
    #[test]
    fn what_an_engine_says_of_its_size_stands() {
        let mut table = table("w", 0..1);
        let rank = RankKey::new("w", 0);
        let blocks = |blocks: f64| RawRankLoad {
            kv_total_blocks: blocks.into(),
            total_is_divided: true,
            token_usage: 0.5.into(),
            ..RawRankLoad::default()
        };
        table.say_as(at(0), "prometheus", blocks(1000.0));
        let divided = ReportedCapacity { blocks: 1000, divided: true };
        assert_eq!(table.reported_capacity(&rank, BLOCK), Some(divided));
        assert_eq!(table.take_resized().len(), 1);
        assert_eq!(table.load(at(0), &rank, BLOCK, Some(9)).decode_blocks(), Some(500.0));
        table.say_as(at(1), "prometheus", blocks(1000.0));
        assert!(table.take_resized().is_empty());
        // Hearsay about a size is none; tokens are counted in blocks of the declared size.
        table.say_as(at(2), "router", RawRankLoad { max_total_num_tokens: 4.0.into(), ..decode(1.0) });
        assert_eq!(table.reported_capacity(&rank, BLOCK), Some(divided));
        table.say_as(at(3), "load_stat", RawRankLoad { max_total_num_tokens: 403.0.into(), ..decode(1.0) });
        let exact = ReportedCapacity { blocks: 100, divided: false };
        assert_eq!(table.reported_capacity(&rank, BLOCK), Some(exact));
        table.say_as(at(4), "engine", RawRankLoad { token_usage: 0.5.into(), ..RawRankLoad::default() });
        assert_eq!(table.view(at(4), "w", 0).decode_blocks(), Some(50.0));
        assert_eq!(table.gauges(at(4), &rank, BLOCK, None).used_blocks, Some(50.0));
    }

    /// S5: an engine is asleep for as long as it said so lately; a sleep that takes the cache is told once.
    #[test]
    fn a_sleeping_engine_is_known_as_that() {
        let mut table = table("w", 0..2);
        let rank = RankKey::new("w", 0);
        let says = |sleep| RawRankLoad { sleep: Some(sleep), ..decode(0.0) };
        let gone = SleepState::Asleep { cache_gone: true };
        table.say_as(at(0), "prometheus", says(SleepState::Awake));
        assert!(!table.is_asleep(at(0), &rank));
        for millis in [1, 2] {
            table.say_as(at(millis), "prometheus", says(gone));
        }
        assert!(table.is_asleep(at(2), &rank) && !table.is_asleep(at(2), &RankKey::new("w", 1)));
        assert_eq!(table.take_emptied().into_iter().collect::<Vec<_>>(), std::slice::from_ref(&rank));
        table.say_as(at(3), "router", says(SleepState::Awake));
        assert!(table.is_asleep(at(3), &rank), "a router does not know");
        assert!(!table.is_asleep(at(15_003), &rank), "nor do we, after a while");
        table.say_as(at(15_004), "prometheus", says(SleepState::Awake));
        table.say_as(at(15_005), "prometheus", says(gone));
        assert_eq!(table.take_emptied().len(), 1);
        // All engines of a front-end that cannot be told apart sleep together.
        let mut report = LoadReport::new(Vec::new());
        report.aggregate = Some(says(gone));
        table.report(at(15_006), &"w".into(), &report);
        assert!(table.is_asleep(at(15_006), &RankKey::new("w", 1)));
        assert_eq!(table.take_emptied().len(), 1);
    }
}

//! The [`Fleet`]: who is declared, and what a declaration changes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::capacity::Capacity;
use super::endpoint::{Endpoint, EndpointError, Endpoints, Place, Resolver, Unresolved};
use super::error::{DeclareError, PinError};
use super::names::NameTable;
use super::pool::{Pool, PoolKey};
use super::spec::{EventsFrom, WorkerSpec};
use crate::ids::{DpRank, LocalRank, RankKey, WorkerId};

/// All pools and workers as declared.
///
/// Every mutation either succeeds and says what changed, or is refused and changes nothing.
///
/// Cost: a declaration is linear in the worker's ranks; look-ups are one or two map look-ups.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    pools: BTreeMap<PoolKey, Pool>,
    workers: BTreeMap<WorkerId, Worker>,
    /// Whose each endpoint is, over all pools.
    claims: HashMap<Place, Claim>,
    /// Patterns of model names, to the model that they stand for.
    models: NameTable<Arc<str>>,
    ranks: usize,
}

#[derive(Clone, Debug)]
struct Worker {
    spec: WorkerSpec,
    plans: BTreeMap<DpRank, RankPlan>,
}

#[derive(Clone, Debug)]
struct Claim {
    rank: RankKey,
    field: &'static str,
}

/// What is to be done for one rank: whom to listen to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RankPlan {
    /// The rank.
    pub rank: RankKey,
    /// Its number within its worker; `None` where nobody said at which rank the worker starts. It may be said later;
    /// ask [`Fleet::local`] for the one that holds now.
    pub local: Option<LocalRank>,
    /// Whether it publishes events at all.
    pub publishes: bool,
    /// Where its events come from; `None` if there are none or they are handed in.
    pub events: Option<Endpoint>,
    /// Where its history can be asked for.
    pub replay: Option<Endpoint>,
    /// Prefix of the topics to subscribe to; empty is all.
    pub topic: String,
}

impl RankPlan {
    /// Whether both describe the same stream, so that what was learned from it still holds.
    fn same_stream(&self, other: &Self) -> bool {
        (self.publishes, &self.events, &self.replay, &self.topic)
            == (other.publishes, &other.events, &other.replay, &other.topic)
    }
}

/// What a mutation did to the ranks of one worker.
///
/// Follow `removed` before `added`: a rank whose stream is another now is in both.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// The worker.
    pub worker: WorkerId,
    /// Its pool.
    pub pool: PoolKey,
    /// Ranks that are new, or have a new stream: they start empty.
    pub added: Vec<RankPlan>,
    /// Ranks that are gone, or whose old stream is: everything keyed by them goes.
    pub removed: Vec<RankKey>,
    /// Ranks that stay as they were.
    pub kept: Vec<RankKey>,
    /// Whether the worker is gone.
    pub worker_gone: bool,
    /// Whether it was its pool's last, so that the pool is gone too.
    pub pool_gone: bool,
}

impl Change {
    /// Whether no rank came or went. Settings of the worker may still be others.
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty()
    }
}

/// A pin that holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pin {
    /// Any rank of the worker.
    Worker,
    /// This rank, under this local number if it has one.
    Rank(DpRank, Option<LocalRank>),
}

impl Fleet {
    /// Most ranks of all workers together: each has a socket and a task, and a process cannot have more
    /// descriptors than about this.
    pub const MAX_RANKS: usize = 65_536;

    /// An empty fleet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a worker, or declares it anew.
    ///
    /// The same declaration again changes nothing. Another range, or other endpoints, change exactly the
    /// ranks concerned; one whose stream or way of counting is another now is removed and added.
    ///
    /// # Errors
    /// See [`DeclareError`]; nothing has changed then.
    pub fn declare(&mut self, spec: WorkerSpec) -> Result<Change, DeclareError> {
        self.check_place(&spec)?;
        if let Some(capacity) = &spec.capacity {
            capacity.check(&spec.ranks)?;
        }
        let plans = plan(&spec)?;
        self.check_claims(&spec.worker, &plans, |claim| claim.rank.worker != spec.worker)?;
        self.replace(spec, plans)
    }

    /// Adds the ranks of `spec` to its worker, which is declared if it is new. The worker's other settings
    /// stay as they are; figures and load sockets of the new ranks alone are taken over.
    ///
    /// # Errors
    /// As [`Fleet::declare`], and [`DeclareError::RankExists`] for a rank that is there, whatever its
    /// endpoint. Nothing has changed then.
    pub fn add_rank(&mut self, spec: WorkerSpec) -> Result<Change, DeclareError> {
        let Some(worker) = self.workers.get(&spec.worker) else { return self.declare(spec) };
        self.check_place(&spec)?;
        let mut merged = worker.spec.clone();
        for rank in spec.ranks.iter() {
            if !merged.ranks.insert(rank)? {
                let rank = RankKey { worker: spec.worker, dp_rank: rank };
                return Err(DeclareError::RankExists { rank });
            }
        }
        let added = plan(&spec)?;
        self.check_claims(&spec.worker, &added, |_| true)?;
        merged.ranks.learn_start(&spec.ranks);
        let all = worker.plans.values().chain(added.values());
        merged.events.absorb(&spec.worker, &spec.events, all)?;
        merged.absorb(&spec);
        let plans = plan(&merged)?;
        self.replace(merged, plans)
    }

    /// Withdraws one rank and no other; with its last rank the worker goes. `None` if it is not declared.
    pub fn remove_rank(&mut self, rank: &RankKey) -> Option<Change> {
        let worker = self.workers.get(&rank.worker)?;
        if !worker.plans.contains_key(&rank.dp_rank) {
            return None;
        }
        let mut spec = worker.spec.clone();
        if !spec.ranks.remove(rank.dp_rank) {
            return self.withdraw(&rank.worker);
        }
        spec.events.forget(rank.dp_rank);
        if let Some(capacity) = &mut spec.capacity {
            capacity.forget(rank.dp_rank);
        }
        if let Some(load_stat) = &mut spec.load_stat {
            load_stat.per_rank.remove(&rank.dp_rank);
        }
        let mut plans = worker.plans.clone();
        plans.remove(&rank.dp_rank);
        // A subset of what was declared before cannot be refused.
        self.replace(spec, plans).ok()
    }

    /// Withdraws a worker with all its ranks; `None` if it is not declared.
    pub fn withdraw(&mut self, worker: &WorkerId) -> Option<Change> {
        let gone = self.workers.remove(worker)?;
        self.release(&gone.plans);
        self.ranks -= gone.plans.len();
        let pool = gone.spec.pool;
        let mut pool_gone = false;
        if let Some(entry) = self.pools.get_mut(&pool) {
            entry.workers.remove(worker);
            pool_gone = entry.workers.is_empty();
        }
        if pool_gone {
            self.pools.remove(&pool);
        }
        let removed = gone.plans.into_values().map(|plan| plan.rank).collect();
        let (added, kept) = (Vec::new(), Vec::new());
        Some(Change { worker: worker.clone(), pool, added, removed, kept, worker_gone: true, pool_gone })
    }

    /// The pools, in order of their names.
    pub fn pools(&self) -> impl ExactSizeIterator<Item = &Pool> {
        self.pools.values()
    }

    /// One pool.
    pub fn pool(&self, key: &PoolKey) -> Option<&Pool> {
        self.pools.get(key)
    }

    /// The declarations of all workers, in order of their ids.
    pub fn workers(&self) -> impl ExactSizeIterator<Item = &WorkerSpec> {
        self.workers.values().map(|worker| &worker.spec)
    }

    /// The declarations of a pool's workers, in order of their ids.
    pub fn workers_of(&self, pool: &PoolKey) -> impl Iterator<Item = &WorkerSpec> {
        let ids = self.pools.get(pool).into_iter().flat_map(|pool| &pool.workers);
        ids.filter_map(|id| self.worker(id))
    }

    /// One worker's declaration.
    pub fn worker(&self, worker: &WorkerId) -> Option<&WorkerSpec> {
        self.workers.get(worker).map(|worker| &worker.spec)
    }

    /// What is to be done for one rank; `None` if it is not declared.
    pub fn rank(&self, rank: &RankKey) -> Option<&RankPlan> {
        self.workers.get(&rank.worker)?.plans.get(&rank.dp_rank)
    }

    /// What is to be done for each rank of a worker, ascending.
    pub fn plans(&self, worker: &WorkerId) -> impl Iterator<Item = &RankPlan> {
        self.workers.get(worker).into_iter().flat_map(|worker| worker.plans.values())
    }

    /// How many ranks are declared.
    pub fn rank_count(&self) -> usize {
        self.ranks
    }

    /// The local number of a rank as it is now; `None` where it is not known.
    pub fn local(&self, rank: &RankKey) -> Option<LocalRank> {
        self.worker(&rank.worker)?.ranks.local(rank.dp_rank)
    }

    /// Whether a pin holds. It is answered or refused, never bent to another rank.
    ///
    /// # Errors
    /// The pool has no such worker, or the worker no such rank.
    pub fn pin(&self, pool: &PoolKey, worker: &WorkerId, rank: Option<DpRank>) -> Result<Pin, PinError> {
        let spec = self.worker(worker).filter(|spec| spec.pool == *pool);
        let Some(spec) = spec else {
            return Err(PinError::UnknownWorker { worker: worker.clone(), pool: pool.clone() });
        };
        let Some(rank) = rank else { return Ok(Pin::Worker) };
        if spec.ranks.contains(rank) {
            return Ok(Pin::Rank(rank, spec.ranks.local(rank)));
        }
        Err(PinError::NoSuchRank {
            rank: RankKey { worker: worker.clone(), dp_rank: rank },
            start: spec.ranks.start(),
            count: spec.ranks.len(),
        })
    }

    /// The KV capacity of one rank, in blocks.
    pub fn capacity_blocks(&self, rank: &RankKey) -> Capacity {
        let spec = self.worker(&rank.worker).filter(|spec| spec.ranks.contains(rank.dp_rank));
        spec.and_then(|spec| Some(spec.capacity.as_ref()?.of(&spec.ranks, rank.dp_rank)))
            .unwrap_or(Capacity::Unknown)
    }

    /// The KV capacity that a worker's ranks share, in blocks; unknown unless it was declared as shared.
    pub fn shared_capacity(&self, worker: &WorkerId) -> Capacity {
        let capacity = self.worker(worker).and_then(|spec| spec.capacity.as_ref());
        capacity.map_or(Capacity::Unknown, |capacity| capacity.shared())
    }

    /// The one number that stands for all ranks of a worker: the smallest; unknown if any rank's is.
    pub fn smallest_capacity(&self, worker: &WorkerId) -> Capacity {
        let mut smallest = Capacity::Unknown;
        for plan in self.plans(worker) {
            let capacity = self.capacity_blocks(&plan.rank);
            match (capacity.blocks(), smallest.blocks()) {
                (None, _) => return Capacity::Unknown,
                (Some(blocks), Some(least)) if blocks >= least => {}
                _ => smallest = capacity,
            }
        }
        smallest
    }

    /// How many requests one rank runs at once; `None` is unknown.
    pub fn request_limit(&self, rank: &RankKey) -> Option<u64> {
        let spec = self.worker(&rank.worker).filter(|spec| spec.ranks.contains(rank.dp_rank))?;
        spec.dp_mode.share(spec.max_running_requests?, &spec.ranks)
    }

    /// Lets every model name below `pattern` (which ends in `/`) stand for `model`.
    ///
    /// # Errors
    /// `false` if the pattern does not end in `/` or is no name; see [`NameTable::insert`].
    pub fn add_model_pattern(&mut self, pattern: &str, model: &str) -> bool {
        pattern.ends_with(NameTable::<Arc<str>>::SEPARATOR)
            && self.models.insert(pattern, model.into()).is_ok()
    }

    /// The pool that a request for `model` in `group` means: the one of that very name, else the one that the
    /// longest configured pattern stands for.
    pub fn resolve(&self, model: &str, group: Option<&str>) -> Option<&Pool> {
        self.pool(&PoolKey::new(model, group))
            .or_else(|| self.pool(&PoolKey::new(self.models.resolve(model)?, group)))
    }

    /// Names, pool and block size against what is declared.
    fn check_place(&self, spec: &WorkerSpec) -> Result<(), DeclareError> {
        if spec.worker.as_str().is_empty() {
            return Err(DeclareError::EmptyWorker);
        }
        if spec.pool.model.is_empty() {
            return Err(DeclareError::EmptyModel);
        }
        if let Some(known) = self.worker(&spec.worker).filter(|known| known.pool != spec.pool) {
            return Err(DeclareError::OtherPool { worker: spec.worker.clone(), is: known.pool.clone() });
        }
        match self.pools.get(&spec.pool) {
            Some(pool) if pool.block_size != spec.block_size => Err(DeclareError::OtherBlockSize {
                pool: spec.pool.clone(),
                is: pool.block_size,
                asked: spec.block_size,
            }),
            _ => Ok(()),
        }
    }

    /// That no endpoint is anyone's for whom `counts` holds.
    fn check_claims(
        &self,
        worker: &WorkerId,
        plans: &BTreeMap<DpRank, RankPlan>,
        counts: impl Fn(&Claim) -> bool,
    ) -> Result<(), DeclareError> {
        debug_assert!(plans.values().all(|plan| plan.rank.worker == *worker));
        for (endpoint, field) in plans.values().flat_map(endpoints_of) {
            if let Some(claim) = self.claims.get(endpoint.place()).filter(|claim| counts(claim)) {
                return Err(DeclareError::EndpointTaken {
                    field,
                    endpoint: endpoint.to_string(),
                    by: claim.rank.clone(),
                    other_field: claim.field,
                });
            }
        }
        Ok(())
    }

    /// Puts a checked declaration in the place of the worker's last one.
    fn replace(
        &mut self,
        spec: WorkerSpec,
        plans: BTreeMap<DpRank, RankPlan>,
    ) -> Result<Change, DeclareError> {
        let before = self.workers.get(&spec.worker).map_or(0, |old| old.plans.len());
        let ranks = self.ranks - before + plans.len();
        if ranks > Self::MAX_RANKS {
            return Err(DeclareError::FleetFull { ranks });
        }
        self.ranks = ranks;
        let old = self.workers.remove(&spec.worker);
        if let Some(old) = &old {
            self.release(&old.plans);
        }
        for plan in plans.values() {
            for (endpoint, field) in endpoints_of(plan) {
                self.claims.insert(endpoint.place().clone(), Claim { rank: plan.rank.clone(), field });
            }
        }
        let pool = self.pools.entry(spec.pool.clone()).or_insert_with(|| Pool {
            key: spec.pool.clone(),
            block_size: spec.block_size,
            workers: Default::default(),
        });
        pool.workers.insert(spec.worker.clone());
        let change = difference(&spec, old.as_ref(), &plans);
        self.workers.insert(spec.worker.clone(), Worker { spec, plans });
        Ok(change)
    }

    fn release(&mut self, plans: &BTreeMap<DpRank, RankPlan>) {
        for (endpoint, _) in plans.values().flat_map(endpoints_of) {
            self.claims.remove(endpoint.place());
        }
    }
}

fn difference(spec: &WorkerSpec, old: Option<&Worker>, plans: &BTreeMap<DpRank, RankPlan>) -> Change {
    let mut change = Change {
        worker: spec.worker.clone(),
        pool: spec.pool.clone(),
        added: Vec::new(),
        removed: Vec::new(),
        kept: Vec::new(),
        worker_gone: false,
        pool_gone: false,
    };
    let counts_like = old.is_some_and(|old| old.spec.counts_like(spec));
    let stays = |plan: &RankPlan, other: &RankPlan| counts_like && plan.same_stream(other);
    for was in old.into_iter().flat_map(|old| old.plans.values()) {
        match plans.get(&was.rank.dp_rank) {
            Some(plan) if stays(plan, was) => change.kept.push(was.rank.clone()),
            _ => change.removed.push(was.rank.clone()),
        }
    }
    for plan in plans.values() {
        let was = old.and_then(|old| old.plans.get(&plan.rank.dp_rank));
        if !was.is_some_and(|was| stays(plan, was)) {
            change.added.push(plan.clone());
        }
    }
    change
}

const EVENTS: &str = "endpoint";
const REPLAY: &str = "replay_endpoint";

/// The endpoints of one rank, each with the field that it was declared in.
fn endpoints_of(plan: &RankPlan) -> impl Iterator<Item = (&Endpoint, &'static str)> {
    let events = plan.events.iter().map(|endpoint| (endpoint, EVENTS));
    events.chain(plan.replay.iter().map(|endpoint| (endpoint, REPLAY)))
}

/// The plan of every rank of a declaration, checked within itself.
fn plan(spec: &WorkerSpec) -> Result<BTreeMap<DpRank, RankPlan>, DeclareError> {
    let (events, replay, topic) = match &spec.events {
        EventsFrom::Zmq { endpoints, replay, topic } => (
            Some(resolver(spec, endpoints, EVENTS)?),
            replay.as_ref().map(|replay| resolver(spec, replay, REPLAY)).transpose()?,
            topic.as_str(),
        ),
        EventsFrom::None | EventsFrom::Fed => (None, None, ""),
    };
    let mut plans = BTreeMap::new();
    for rank in spec.ranks.iter() {
        let at = |resolver: &Option<Resolver<'_>>, field| match resolver {
            Some(resolver) => resolver.at(rank).map_err(|why| unresolved(why, field, rank)),
            None => Ok(None),
        };
        let plan = RankPlan {
            rank: RankKey { worker: spec.worker.clone(), dp_rank: rank },
            local: spec.ranks.local(rank),
            publishes: spec.events.publishes(),
            events: at(&events, EVENTS)?,
            replay: at(&replay, REPLAY)?,
            topic: topic.to_owned(),
        };
        if events.is_some() && plan.events.is_none() {
            return Err(DeclareError::NoEndpoint { rank });
        }
        if let Some(replay) = plan.replay.as_ref().filter(|replay| replay.binds()) {
            let (endpoint, why) = (replay.to_string(), EndpointError::ReplayWildcard);
            return Err(DeclareError::BadEndpoint { field: REPLAY, endpoint, why });
        }
        plans.insert(rank, plan);
    }
    check_repeats(&plans)?;
    Ok(plans)
}

fn resolver<'a>(
    spec: &WorkerSpec,
    endpoints: &'a Endpoints,
    field: &'static str,
) -> Result<Resolver<'a>, DeclareError> {
    if let Some(&rank) = endpoints.per_rank.keys().find(|rank| !spec.ranks.contains(**rank)) {
        return Err(DeclareError::UndeclaredRank { field, rank });
    }
    Resolver::new(endpoints).map_err(|why| unresolved(why, field, spec.ranks.start()))
}

fn unresolved(why: Unresolved, field: &'static str, rank: DpRank) -> DeclareError {
    match why {
        Unresolved::Bad(endpoint, why) => DeclareError::BadEndpoint { field, endpoint, why },
        Unresolved::PastEnd(endpoint, port) => DeclareError::PortPastEnd { field, endpoint, port, rank },
    }
}

/// That no two sockets of one declaration are at one place.
fn check_repeats(plans: &BTreeMap<DpRank, RankPlan>) -> Result<(), DeclareError> {
    let mut seen: HashMap<&Place, (DpRank, &'static str)> = HashMap::new();
    for plan in plans.values() {
        for (endpoint, field) in endpoints_of(plan) {
            let rank = plan.rank.dp_rank;
            if let Some((other, other_field)) = seen.insert(endpoint.place(), (rank, field)) {
                let endpoint = endpoint.to_string();
                return Err(DeclareError::EndpointRepeated { field, endpoint, rank, other, other_field });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

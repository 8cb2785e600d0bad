//! The router's side of the house: a request against the fleet, the index and the load table.

use std::borrow::Cow;
use std::sync::Arc;

use super::booking::Booking;
use super::candidate::{Candidate, CandidateLoad, Constraints, Overlap, Request, Standing};
use super::decision::{Decision, Refusal};
use super::overlaps::Overlaps;
use super::policy::{Policy, PolicyError, PolicyOverride};
use super::prompt::Prompt;
use super::{Chance, Scorer};
use crate::block::SequenceHash;
use crate::fleet::{Capacity, Provenance};
use crate::ids::{Moment, RankKey};
use crate::index::HybridRule;
use crate::indexer::{PoolView, RankView, View, WorkerView};
use crate::load::{
    Admission, BusyThreshold, Claim, ClaimedBlocks, LoadTable, RankLoadView, ReservationId, ReserveError,
    Ticket,
};

/// Settings of a router.
#[derive(Clone, Debug, Default)]
pub struct RouterConfig {
    /// How candidates are scored unless a request says otherwise.
    pub policy: Policy,
    /// Share of a rank's KV capacity beyond which it is no candidate; `None` never excludes a rank.
    pub busy_threshold: Option<BusyThreshold>,
    /// Further limits on the load of a rank that is a candidate.
    pub admission: Admission,
    /// How hybrid models are credited unless a request says otherwise.
    pub hybrid: HybridRule,
    /// Whether a rank needs a declared HTTP endpoint to be a candidate.
    pub needs_endpoint: bool,
}

/// Chooses ranks, and books what it has chosen if asked to; cheap to clone, shared by all threads that route.
#[derive(Clone, Debug)]
pub struct Router {
    view: View,
    config: Arc<RouterConfig>,
}

/// Buffers and chance of one routing thread.
#[derive(Debug)]
pub struct RouterScratch {
    overlaps: Overlaps,
    /// The prompt's sequence hashes, where the ledger wants them.
    chain: Vec<SequenceHash>,
    scorer: Scorer,
    chance: Chance,
}

impl RouterScratch {
    /// Buffers whose ties are decided by the operating system's randomness.
    pub fn new() -> Self {
        Self::with_chance(Chance::from_os())
    }

    /// Buffers whose ties repeat from run to run.
    pub fn seeded(seed: u64) -> Self {
        Self::with_chance(Chance::from_seed(seed))
    }

    fn with_chance(chance: Chance) -> Self {
        Self { overlaps: Overlaps::default(), chain: Vec::new(), scorer: Scorer::default(), chance }
    }

    /// What the last request found in the index.
    pub fn overlaps(&self) -> &Overlaps {
        &self.overlaps
    }
}

impl Default for RouterScratch {
    fn default() -> Self {
        Self::new()
    }
}

/// A request for a rank.
#[derive(Clone, Copy, Debug)]
pub struct SelectRequest<'a> {
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// Who may serve it.
    pub constraints: Constraints<'a>,
    /// What this request wants scored otherwise.
    pub policy: Option<&'a PolicyOverride>,
    /// How hybrid models are credited for this request.
    pub hybrid: Option<HybridRule>,
}

impl<'a> SelectRequest<'a> {
    /// A request that any rank may serve.
    pub fn new(prompt: Prompt<'a>) -> Self {
        Self { prompt, constraints: Constraints::default(), policy: None, hybrid: None }
    }
}

/// Why no rank was chosen.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// The fleet has no rank for the request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The request's own settings cannot be.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A rank was chosen or not looked for, and nothing was booked.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
}

/// A choice that is booked.
#[derive(Debug)]
pub struct Reserved<'s> {
    /// The choice, as it was before the booking.
    pub decision: Decision<'s>,
    /// The reservation's id.
    pub id: ReservationId,
    /// Which reservation under that id.
    pub ticket: Ticket,
    /// What was booked.
    pub claim: Claim,
}

impl Router {
    /// A router over everything that the view shows.
    pub fn new(view: View, config: RouterConfig) -> Self {
        Self { view, config: Arc::new(config) }
    }

    /// What it reads.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Its settings.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Finds who holds the prompt's prefix, without choosing.
    pub fn overlap<'s>(
        &self,
        pool: &PoolView,
        prompt: &Prompt<'_>,
        hybrid: Option<HybridRule>,
        scratch: &'s mut RouterScratch,
    ) -> &'s Overlaps {
        scratch.overlaps.find(pool, prompt, hybrid.unwrap_or(self.config.hybrid));
        &scratch.overlaps
    }

    /// Chooses the rank for a request: reads only, and books nothing.
    ///
    /// # Errors
    ///
    /// [`SelectError`] when no rank can be chosen, or the request's settings cannot be.
    pub fn select<'s>(
        &self,
        now: Moment,
        pool: &PoolView,
        request: &SelectRequest<'_>,
        scratch: &'s mut RouterScratch,
    ) -> Result<Decision<'s>, SelectError> {
        let policy = self.policy(request.policy)?;
        let hybrid = request.hybrid.unwrap_or(self.config.hybrid);
        let RouterScratch { overlaps, chain, scorer, chance } = scratch;
        overlaps.find(pool, &request.prompt, hybrid);
        chain.clear();
        // A request that is booked between the two locks is missed, as it would be a moment earlier.
        if !self.view.loads().lock().ledger().is_empty() {
            overlaps.hashes().chain_into(chain);
        }
        let mut loads = self.view.loads().lock();
        loads.ledger_mut().expire(now);
        let sight = Sight::new(self, now, pool, request, &policy, overlaps, chain, &loads);
        Ok(scorer.decide(&policy, &sight.request, sight.candidates(), chance)?)
    }

    /// Chooses the rank for a request and books it there, in one step: nobody is scored or booked between the
    /// two, and nothing waits once it is booked.
    ///
    /// Without an id one is made. Where the engine picks the rank, the booking stands on the worker's best
    /// known rank, for want of a better place.
    ///
    /// # Errors
    ///
    /// [`SelectError`]; then nothing is booked.
    pub fn select_and_reserve<'s>(
        &self,
        now: Moment,
        pool: &PoolView,
        request: &SelectRequest<'_>,
        id: Option<&ReservationId>,
        scratch: &'s mut RouterScratch,
    ) -> Result<Reserved<'s>, SelectError> {
        let policy = self.policy(request.policy)?;
        let hybrid = request.hybrid.unwrap_or(self.config.hybrid);
        let RouterScratch { overlaps, chain, scorer, chance } = scratch;
        let id = id.cloned().unwrap_or_else(|| made_id(chance));
        overlaps.find(pool, &request.prompt, hybrid);
        overlaps.hashes().chain_into(chain);
        let mut loads = self.view.loads().lock();
        loads.ledger_mut().expire(now);
        loads.ledger_mut().check_id(&id)?;
        let sight = Sight::new(self, now, pool, request, &policy, overlaps, chain, &loads);
        let decision = scorer.decide(&policy, &sight.request, sight.candidates(), chance)?;
        let claim = claim_of(&policy, &sight.request, &decision, chain);
        let ticket =
            loads.ledger_mut().reserve(now, &id, &decision.chosen().candidate.rank, claim.clone())?;
        Ok(Reserved { decision, id, ticket, claim })
    }

    /// [`Router::select_and_reserve`] with a handle that ends the reservation when it is dropped.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn reserve<'s>(
        &self,
        now: Moment,
        pool: &PoolView,
        request: &SelectRequest<'_>,
        id: Option<&ReservationId>,
        scratch: &'s mut RouterScratch,
    ) -> Result<(Decision<'s>, Booking), SelectError> {
        let reserved = self.select_and_reserve(now, pool, request, id, scratch)?;
        let rank = reserved.decision.chosen().candidate.rank.clone();
        Ok((reserved.decision, Booking::new(self.view.clone(), reserved.id, reserved.ticket, rank)))
    }

    /// What a request that was decided by [`Router::select`] with these buffers would book.
    ///
    /// # Errors
    ///
    /// The request's settings cannot be.
    pub fn claim(
        &self,
        pool: &PoolView,
        request: &SelectRequest<'_>,
        effective_prefill_tokens: u64,
        scratch: &mut RouterScratch,
    ) -> Result<Claim, PolicyError> {
        let policy = self.policy(request.policy)?;
        let RouterScratch { overlaps, chain, .. } = scratch;
        overlaps.hashes().chain_into(chain);
        Ok(claim_for(&policy, &wanted(pool, request), effective_prefill_tokens, chain))
    }

    /// Every rank of the pool as a decision would see it, without choosing; in the order of the pool.
    ///
    /// # Errors
    ///
    /// The request's settings cannot be.
    pub fn candidates(
        &self,
        now: Moment,
        pool: &PoolView,
        request: &SelectRequest<'_>,
        scratch: &mut RouterScratch,
    ) -> Result<Vec<Candidate>, PolicyError> {
        let policy = self.policy(request.policy)?;
        let RouterScratch { overlaps, chain, .. } = scratch;
        overlaps.find(pool, &request.prompt, request.hybrid.unwrap_or(self.config.hybrid));
        overlaps.hashes().chain_into(chain);
        let mut loads = self.view.loads().lock();
        loads.ledger_mut().expire(now);
        let sight = Sight::new(self, now, pool, request, &policy, overlaps, chain, &loads);
        Ok(sight.candidates().collect())
    }

    fn policy(&self, over: Option<&PolicyOverride>) -> Result<Cow<'_, Policy>, PolicyError> {
        match over {
            Some(over) => self.config.policy.overlaid(over),
            None => Ok(Cow::Borrowed(&self.config.policy)),
        }
    }

    /// A rank's load as a decision would see it.
    pub fn load(&self, now: Moment, loads: &LoadTable, pool: &PoolView, rank: &RankKey) -> RankLoadView {
        let worker = pool.worker(&rank.worker);
        let view = worker.and_then(|worker| {
            let rank = worker.ranks.iter().find(|view| view.plan.rank == *rank)?;
            Some(pool.capacity_of(worker, rank, loads))
        });
        loads.load(now, rank, pool.block_size, view.and_then(Capacity::exact))
    }
}

fn wanted<'r>(pool: &PoolView, request: &SelectRequest<'r>) -> Request<'r> {
    Request {
        isl_tokens: request.prompt.isl_tokens(),
        block_size: pool.block_size,
        constraints: request.constraints,
    }
}

/// Everything that one decision looks at, under the lock of the load table.
struct Sight<'a> {
    config: &'a RouterConfig,
    now: Moment,
    pool: &'a PoolView,
    request: Request<'a>,
    expect_booked: bool,
    overlaps: &'a Overlaps,
    chain: &'a [SequenceHash],
    loads: &'a LoadTable,
}

impl<'a> Sight<'a> {
    #[allow(clippy::too_many_arguments, reason = "one place gathers what the other methods then share")]
    fn new(
        router: &'a Router,
        now: Moment,
        pool: &'a PoolView,
        request: &SelectRequest<'a>,
        policy: &Policy,
        overlaps: &'a Overlaps,
        chain: &'a [SequenceHash],
        loads: &'a LoadTable,
    ) -> Self {
        Self {
            config: &router.config,
            now,
            pool,
            request: wanted(pool, request),
            expect_booked: policy.expect_booked,
            overlaps,
            chain,
            loads,
        }
    }

    fn candidates(&self) -> impl Iterator<Item = Candidate> + '_ {
        self.pool.workers.iter().flat_map(move |worker| {
            let of_worker = self.standing_of_worker(worker);
            worker.ranks.iter().map(move |rank| self.candidate(worker, rank, of_worker))
        })
    }

    fn candidate(&self, worker: &WorkerView, rank: &RankView, of_worker: Standing) -> Candidate {
        let key = &rank.plan.rank;
        let capacity = self.pool.capacity_of(worker, rank, self.loads);
        let load = self.loads.load(self.now, key, self.pool.block_size, capacity.exact());
        let overlap = overlap_of(self.overlaps, rank);
        let reasons = rank.status.reasons();
        let shared = self.loads.ledger().shared(key, self.chain);
        let full = self.request.full_blocks();
        let active = (shared.active as u64).min(full);
        let expected = if self.expect_booked { u32::try_from(active).unwrap_or(u32::MAX) } else { 0 };
        // What the index shows is computed, and so is what a request there has prefilled.
        let computed = u64::from(overlap.device).max(shared.computed as u64);
        let pending = u64::from(expected).saturating_sub(computed);
        Candidate {
            role: worker.spec.role,
            balance: worker.spec.balance,
            engine: worker.spec.engine,
            standing: match of_worker {
                Standing::Ready => self.standing(worker, rank, &load, capacity),
                Standing::Overloaded if self.loads.is_asleep(self.now, key) => Standing::Asleep,
                other => other,
            },
            taints: Arc::clone(&worker.taints),
            overlap,
            trust: reasons.trust(),
            reasons,
            total_blocks: capacity.blocks(),
            view_age: rank.status.last_heard().map(|at| self.now.since(at)),
            tree_size: self.overlaps.tree_size(rank.slot),
            load: candidate_load(&load),
            new_blocks: full - active,
            expected_blocks: expected,
            shared_prefill_tokens: pending.saturating_mul(self.pool.block_size.get().into()),
            ..Candidate::new(key.clone(), rank.plan.local)
        }
    }

    /// What holds for all ranks of a worker: its address, and the capacity that they share, which is looked at
    /// once and never as if each rank had all of it.
    fn standing_of_worker(&self, worker: &WorkerView) -> Standing {
        if self.config.needs_endpoint && worker.spec.http_endpoint.is_none() {
            return Standing::NoEndpoint;
        }
        let Some(blocks) = hard(worker.shared_capacity) else { return Standing::Ready };
        if self.request.blocks() > blocks {
            return Standing::TooSmall;
        }
        let Some(threshold) = self.config.busy_threshold else { return Standing::Ready };
        let used = |rank: &RankView| {
            self.loads.load(self.now, &rank.plan.rank, self.pool.block_size, None).used_blocks()
        };
        // Ranks that are not known are left out: what the others use is over the limit alone, or not known to be.
        let used: f64 = worker.ranks.iter().filter_map(used).sum();
        if threshold.is_over(used, blocks) { Standing::Overloaded } else { Standing::Ready }
    }

    /// Whether a rank can be chosen, as far as its own load and capacity go. What is not known excludes nobody.
    fn standing(
        &self,
        worker: &WorkerView,
        rank: &RankView,
        load: &RankLoadView,
        capacity: Capacity,
    ) -> Standing {
        if capacity.exact().is_some_and(|blocks| self.request.blocks() > blocks) {
            return Standing::TooSmall;
        }
        if self.loads.is_asleep(self.now, &rank.plan.rank) {
            return Standing::Asleep;
        }
        let over = match (self.config.busy_threshold, load.used_blocks(), hard(capacity)) {
            (Some(threshold), Some(used), Some(capacity)) => threshold.is_over(used, capacity),
            _ => false,
        };
        let batched = worker.spec.max_num_batched_tokens;
        let prefill = load.active_prefill_tokens();
        // The limit is what runs at once: the request must still find a place.
        let full = rank.request_limit.is_some_and(|limit| load.requests().is_some_and(|is| is >= limit));
        let rejected = self.loads.is_rejected(self.now, &rank.plan.rank);
        if over || full || rejected || self.config.admission.is_over(prefill, load.waiting(), batched) {
            Standing::Overloaded
        } else {
            Standing::Ready
        }
    }
}

/// A capacity that may limit: an estimate never does.
fn hard(capacity: Capacity) -> Option<u64> {
    match capacity {
        Capacity::Known { provenance: Provenance::Estimated, .. } | Capacity::Unknown => None,
        Capacity::Known { blocks, .. } => Some(blocks),
    }
}

fn claim_of(
    policy: &Policy,
    request: &Request<'_>,
    decision: &Decision<'_>,
    chain: &[SequenceHash],
) -> Claim {
    claim_for(policy, request, decision.chosen().terms.effective_prefill_tokens, chain)
}

fn claim_for(policy: &Policy, request: &Request<'_>, effective: u64, chain: &[SequenceHash]) -> Claim {
    let blocks = match chain {
        [] => ClaimedBlocks::Count(request.full_blocks()),
        named => ClaimedBlocks::Named(named.into()),
    };
    let prefill = if policy.track_prefill_tokens { effective } else { 0 };
    Claim::new(prefill, request.isl_tokens, blocks)
}

/// An id in the form of a random UUID: ids of an earlier run must not fit reservations of this one.
fn made_id(chance: &mut Chance) -> ReservationId {
    let bits = chance.name();
    let part = |shift: u32, digits: u32| (bits >> shift) & ((1 << (4 * digits)) - 1);
    let (version, variant) = (0x4000 | part(64, 3), 0x8000 | (part(48, 4) & 0x3fff));
    let text =
        format!("{:08x}-{:04x}-{version:04x}-{variant:04x}-{:012x}", part(96, 8), part(80, 4), part(0, 12));
    ReservationId::new(text)
}

fn overlap_of(overlaps: &Overlaps, rank: &RankView) -> Overlap {
    overlaps.of(rank.slot).map_or_else(Overlap::default, |of| Overlap {
        device: of.device,
        host: of.host,
        disk: of.disk,
    })
}

fn candidate_load(load: &RankLoadView) -> CandidateLoad {
    match load {
        RankLoadView::Known { decode_blocks, active_prefill_tokens, running, age, .. } => {
            CandidateLoad::Known {
                decode_blocks: *decode_blocks,
                active_prefill_tokens: *active_prefill_tokens,
                active_requests: *running,
                age: *age,
            }
        }
        RankLoadView::Unknown(_) => CandidateLoad::Unknown,
    }
}

//! The router's side of the house: a request against the fleet, the index and the load table.

use std::sync::Arc;

use super::candidate::{Candidate, CandidateLoad, Constraints, Overlap, Request, Standing};
use super::decision::{Decision, Refusal};
use super::overlaps::Overlaps;
use super::policy::{Policy, PolicyError, PolicyOverride};
use super::prompt::Prompt;
use super::{Chance, Scorer};
use crate::ids::{Moment, RankKey};
use crate::index::HybridRule;
use crate::indexer::{PoolView, RankView, View, WorkerView};
use crate::load::{BusyThreshold, LoadTable, RankLoadView};

/// Settings of a router.
#[derive(Clone, Debug, Default)]
pub struct RouterConfig {
    /// How candidates are scored unless a request says otherwise.
    pub policy: Policy,
    /// Share of a rank's KV capacity beyond which it is no candidate; `None` never excludes a rank.
    pub busy_threshold: Option<BusyThreshold>,
    /// How hybrid models are credited unless a request says otherwise.
    pub hybrid: HybridRule,
    /// Whether a rank needs a declared HTTP endpoint to be a candidate.
    pub needs_endpoint: bool,
}

/// Chooses ranks. Reads only; cheap to clone, shared by all threads that route.
#[derive(Clone, Debug)]
pub struct Router {
    view: View,
    config: Arc<RouterConfig>,
}

/// Buffers and chance of one routing thread.
#[derive(Debug)]
pub struct RouterScratch {
    overlaps: Overlaps,
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
        Self { overlaps: Overlaps::default(), scorer: Scorer::default(), chance }
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
        let over = request.policy;
        let policy = match over {
            Some(over) => self.config.policy.overlaid(over)?,
            None => std::borrow::Cow::Borrowed(&self.config.policy),
        };
        let RouterScratch { overlaps, scorer, chance } = scratch;
        overlaps.find(pool, &request.prompt, request.hybrid.unwrap_or(self.config.hybrid));
        let wanted = Request {
            isl_tokens: request.prompt.isl_tokens(),
            block_size: pool.block_size,
            constraints: request.constraints,
        };
        let fleet = self.view.fleet();
        let new_blocks = wanted.full_blocks();
        let loads = self.view.loads().lock();
        let candidates = pool.workers.iter().flat_map(|worker| {
            let (fleet, loads, overlaps) = (&fleet, &loads, &*overlaps);
            worker.ranks.iter().map(move |rank| {
                let capacity = fleet.declared().capacity_blocks(&rank.plan.rank);
                let load = loads.load(now, &rank.plan.rank, pool.block_size, capacity.exact());
                Candidate {
                    role: worker.spec.role,
                    balance: worker.spec.balance,
                    engine: worker.spec.engine,
                    standing: self.standing(worker, &load, capacity.blocks()),
                    taints: Arc::clone(&worker.taints),
                    overlap: overlap_of(overlaps, rank),
                    trust: rank.status.trust(),
                    view_age: rank.status.last_heard().map(|at| now.since(at)),
                    tree_size: overlaps.tree_size(rank.slot),
                    load: candidate_load(&load),
                    new_blocks,
                    ..Candidate::new(rank.plan.rank.clone(), rank.plan.local)
                }
            })
        });
        Ok(scorer.decide(&policy, &wanted, candidates, chance)?)
    }

    /// Whether a rank can be chosen, as far as its load and its worker's declaration go.
    fn standing(&self, worker: &WorkerView, load: &RankLoadView, capacity: Option<u64>) -> Standing {
        if self.config.needs_endpoint && worker.spec.http_endpoint.is_none() {
            return Standing::NoEndpoint;
        }
        let over = match (self.config.busy_threshold, load.used_blocks(), capacity) {
            (Some(threshold), Some(used), Some(capacity)) => threshold.is_over(used, capacity),
            // What is not known overloads nobody.
            _ => false,
        };
        if over { Standing::Overloaded } else { Standing::Ready }
    }

    /// A rank's load as a decision would see it.
    pub fn load(&self, now: Moment, loads: &LoadTable, pool: &PoolView, rank: &RankKey) -> RankLoadView {
        let capacity = self.view.fleet().declared().capacity_blocks(rank);
        loads.load(now, rank, pool.block_size, capacity.exact())
    }
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

//! The tasks: one per base URL, which asks for all that live there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::fetch::{CannotAsk, FetchConfig, Fetcher};
use crate::ids::{DpRank, Moment, RankKey, SourceId, WorkerId};
use crate::indexer::View;
use crate::load::{LoadAnswer, Outcome, Probe, ProbeConfig, Route, Step, Tenant, WorkerUrl, share_out};

/// A worker, and where its load can be asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Binding {
    /// The worker. It need not be declared yet: as long as it is not, nobody is asked.
    pub worker: WorkerId,
    /// Its engine, or one rank of it as `url@rank`.
    pub url: WorkerUrl,
}

/// How load is asked for.
#[derive(Clone, Debug)]
pub struct FeedConfig {
    /// When.
    pub probe: ProbeConfig,
    /// How.
    pub fetch: FetchConfig,
    /// How often a change of the fleet is looked for; what it costs is two map look-ups per worker.
    pub fleet_check: Duration,
}

impl Default for FeedConfig {
    fn default() -> Self {
        let fleet_check = Duration::from_millis(250);
        Self { probe: ProbeConfig::default(), fetch: FetchConfig::default(), fleet_check }
    }
}

/// What has become of one base URL so far.
#[derive(Clone, Debug, Default)]
pub struct FeedStatus {
    /// The base URL.
    pub base: Box<str>,
    /// The route that answered last, while it is believed to answer.
    pub route: Option<Route>,
    /// What the last fetch came to.
    pub last: Option<Outcome>,
    /// Fetches by what they came to.
    pub outcomes: BTreeMap<&'static str, u64>,
    /// Answers in which there was nothing for one of the workers.
    pub unavailable: u64,
    /// How often the task was started anew after a panic, which would be a defect of ours.
    pub restarts: u64,
    /// The last rollup, and when it came: another fleet's table, shown and never used.
    pub rollup: Option<(Moment, Arc<LoadAnswer>)>,
}

/// Everything that is asked for load. Dropping it ends the tasks.
#[derive(Debug)]
pub struct Feeds {
    feeds: Vec<(Arc<Mutex<FeedStatus>>, JoinHandle<()>)>,
}

impl Feeds {
    /// Starts a task on `handle`'s runtime for every base URL among `bindings`. Must be called within that
    /// runtime. `now` is the clock of the view's load table.
    ///
    /// # Errors
    /// A URL that cannot be used; then nothing runs.
    pub fn start(
        handle: &Handle,
        view: &View,
        now: impl Fn() -> Moment + Clone + Send + Sync + 'static,
        bindings: impl IntoIterator<Item = Binding>,
        config: &FeedConfig,
    ) -> Result<Self, CannotAsk> {
        let mut by_base: BTreeMap<Box<str>, (WorkerUrl, Vec<Tenant>)> = BTreeMap::new();
        for Binding { worker, url } in bindings {
            let rank = url.rank();
            let (_, tenants) = by_base.entry(url.base().into()).or_insert_with(|| (url, Vec::new()));
            tenants.push(Tenant { worker, rank });
        }
        let fetchers = by_base.into_values().map(|(url, tenants)| {
            let fetcher = Fetcher::new(&url, config.fetch.clone())?;
            Ok((url, tenants, fetcher))
        });
        let fetchers: Vec<_> = fetchers.collect::<Result<_, CannotAsk>>()?;
        let start = |(url, tenants, fetcher): (WorkerUrl, Vec<Tenant>, Fetcher)| {
            let status = FeedStatus { base: url.base().into(), ..FeedStatus::default() };
            let status = Arc::new(Mutex::new(status));
            let feed = Feed {
                view: view.clone(),
                now: now.clone(),
                tenants: tenants.into(),
                fetcher,
                config: config.clone(),
                status: Arc::clone(&status),
            };
            (status, handle.spawn(supervise(feed)))
        };
        Ok(Self { feeds: fetchers.into_iter().map(start).collect() })
    }

    /// How every base URL fares, in their order.
    pub fn status(&self) -> Vec<FeedStatus> {
        self.feeds.iter().map(|(status, _)| status.lock().clone()).collect()
    }
}

impl Drop for Feeds {
    fn drop(&mut self) {
        self.feeds.iter().for_each(|(_, task)| task.abort());
    }
}

/// Wait before a task that panicked is started anew: a defect that strikes at once must not spin.
const RESTART_AFTER: Duration = Duration::from_secs(1);

async fn supervise<C: Fn() -> Moment + Clone + Send + Sync + 'static>(feed: Feed<C>) {
    loop {
        // The set ends the task when this one is aborted.
        let mut set = JoinSet::new();
        set.spawn(feed.clone().run());
        let Some(Err(error)) = set.join_next().await else { return };
        if !error.is_panic() {
            return;
        }
        warn!(base = feed.fetcher.base(), %error, "a task that asks for load has panicked and is started anew");
        feed.status.lock().restarts += 1;
        sleep(RESTART_AFTER).await;
    }
}

/// The declared ranks of a base URL's workers, each with its stream: that of a rank that was declared anew is
/// another one.
type Owned = BTreeSet<(RankKey, SourceId)>;

#[derive(Clone)]
struct Feed<C> {
    view: View,
    now: C,
    tenants: Arc<[Tenant]>,
    fetcher: Fetcher,
    config: FeedConfig,
    status: Arc<Mutex<FeedStatus>>,
}

impl<C: Fn() -> Moment> Feed<C> {
    async fn run(self) {
        let mut probe = Probe::new((self.now)(), self.fetcher.routes(), self.config.probe);
        let mut owned = Owned::new();
        loop {
            let before = std::mem::replace(&mut owned, self.owned());
            if before.is_empty() && !owned.is_empty() {
                // Whoever serves there now may be another engine than before.
                probe.forget((self.now)());
            } else if !owned.is_subset(&before) {
                probe.hurry((self.now)());
            }
            if owned.is_empty() {
                sleep(self.config.fleet_check.max(Duration::from_millis(1))).await;
                continue;
            }
            match probe.next((self.now)()) {
                Step::Fetch(route) => {
                    let outcome = self.fetch(route, &owned).await;
                    probe.done((self.now)(), outcome);
                    self.note(&probe, route, outcome);
                }
                Step::Wait(until) => {
                    // At least a millisecond, so that rounding cannot make this spin.
                    let left = until.since((self.now)()).max(Duration::from_millis(1));
                    sleep(left.min(self.config.fleet_check)).await;
                }
                // Never so here, since every fetch is waited for.
                Step::UnderWay => sleep(self.config.fleet_check.max(Duration::from_millis(1))).await,
            }
        }
    }

    fn owned(&self) -> Owned {
        let fleet = self.view.fleet();
        let ranks_of = |tenant: &Tenant| {
            let pool = fleet.pool_of(&tenant.worker);
            let worker = pool.and_then(|pool| pool.worker(&tenant.worker));
            let ranks = worker.map(|worker| &*worker.ranks).unwrap_or_default();
            let its = |rank: DpRank| tenant.rank.is_none_or(|only| only == rank);
            let ranks = ranks.iter().filter(move |rank| its(rank.plan.rank.dp_rank));
            ranks.map(|rank| (rank.plan.rank.clone(), rank.source)).collect::<Vec<_>>()
        };
        self.tenants.iter().flat_map(ranks_of).collect()
    }

    async fn fetch(&self, route: Route, owned: &Owned) -> Outcome {
        let ranks = owned.iter().map(|(rank, _)| rank.dp_rank.0).collect();
        match self.fetcher.fetch(route, &ranks).await {
            Ok(answer) => {
                self.report(route, answer, owned);
                Outcome::Answered
            }
            Err(outcome) => outcome,
        }
    }

    fn report(&self, route: Route, answer: LoadAnswer, owned: &Owned) {
        let now = (self.now)();
        let ranks: BTreeSet<&RankKey> = owned.iter().map(|(rank, _)| rank).collect();
        let owns = |worker: &WorkerId, dp_rank| ranks.contains(&RankKey { worker: worker.clone(), dp_rank });
        let shares = share_out(&answer, &route.name().into(), &self.tenants, owns);
        for (worker, share) in shares {
            match share {
                Ok(report) => {
                    self.view.loads().lock().report(now, &worker, &report);
                }
                Err(why) => {
                    debug!(%worker, ?why, "an answer says nothing of a worker");
                    self.status.lock().unavailable += 1;
                }
            }
        }
        if answer.is_rollup() {
            self.status.lock().rollup = Some((now, Arc::new(answer)));
        }
    }

    fn note(&self, probe: &Probe, route: Route, outcome: Outcome) {
        let mut status = self.status.lock();
        *status.outcomes.entry(outcome.name()).or_default() += 1;
        if status.last != Some(outcome) {
            info!(base = &*status.base, route = route.name(), outcome = outcome.name(), "asked for load");
        }
        status.last = Some(outcome);
        status.route = probe.answers();
    }
}

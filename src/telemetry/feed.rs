//! The tasks: one per base URL, which asks for all that live there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
use tracing::{debug, info, warn};

use super::fetch::{CannotAsk, FetchConfig, Fetcher};
use crate::ids::{DpRank, Moment, RankKey, SourceId, WorkerId};
use crate::indexer::View;
use crate::load::{
    LoadAnswer, Outcome, Probe, ProbeConfig, RawNumber, Route, SleepState, Step, Tenant, WorkerUrl, share_out,
};

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
    /// Whether `/ready` says that the engine does not serve; `None` where it says nothing.
    pub sleeps: Option<bool>,
    no_ready_until: Option<Moment>,
}

/// Everything that is asked for load, following the fleet. Dropping it ends the tasks.
#[derive(Debug)]
pub struct Feeds {
    running: Arc<Mutex<Asked>>,
    follower: JoinHandle<()>,
}

/// What is asked now, by base URL.
type Asked = BTreeMap<Box<str>, Running>;

#[derive(Debug)]
struct Running {
    tenants: Tenants,
    status: Arc<Mutex<FeedStatus>>,
    /// `None` for a URL that cannot be used, which is said once.
    task: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.iter().for_each(JoinHandle::abort);
    }
}

/// Whoever lives on a base URL now.
type Tenants = Arc<ArcSwap<Vec<Tenant>>>;

impl Feeds {
    /// Starts a task on `handle`'s runtime for every base URL among `bindings` and among the declarations of the
    /// view's fleet, and goes on as workers come, change and go. Must be called within that runtime. `now` is
    /// the clock of the view's load table. `emptied` is told of ranks whose engine has fallen into a sleep that
    /// takes its device cache.
    ///
    /// # Errors
    /// A URL among `bindings` that cannot be used; then nothing runs.
    pub fn start(
        handle: &Handle,
        view: &View,
        now: impl Fn() -> Moment + Clone + Send + Sync + 'static,
        bindings: impl IntoIterator<Item = Binding>,
        config: &FeedConfig,
        emptied: impl Fn(RankKey) + Send + 'static,
    ) -> Result<Self, CannotAsk> {
        let bindings: Vec<_> = bindings.into_iter().collect();
        for Binding { url, .. } in &bindings {
            Fetcher::new(url, config.fetch.clone())?;
        }
        let running = Arc::new(Mutex::new(Asked::new()));
        let follower = Follower {
            handle: handle.clone(),
            view: view.clone(),
            now,
            bindings,
            config: config.clone(),
            running: Arc::clone(&running),
        };
        follower.follow();
        Ok(Self { running, follower: handle.spawn(follower.run(emptied)) })
    }

    /// How every base URL fares, in their order.
    pub fn status(&self) -> Vec<FeedStatus> {
        self.running.lock().values().map(|feed| feed.status.lock().clone()).collect()
    }
}

impl Drop for Feeds {
    fn drop(&mut self) {
        self.follower.abort();
        self.running.lock().clear();
    }
}

/// Keeps what is asked in step with the fleet.
struct Follower<C> {
    handle: Handle,
    view: View,
    now: C,
    bindings: Vec<Binding>,
    config: FeedConfig,
    running: Arc<Mutex<Asked>>,
}

impl<C: Fn() -> Moment + Clone + Send + Sync + 'static> Follower<C> {
    async fn run(self, emptied: impl Fn(RankKey) + Send + 'static) {
        loop {
            self.follow();
            let gone = self.view.loads().lock().take_emptied();
            gone.into_iter().for_each(&emptied);
            sleep(self.config.fleet_check.max(Duration::from_millis(1))).await;
        }
    }

    fn follow(&self) {
        let mut wanted = self.wanted();
        let mut running = self.running.lock();
        running.retain(|base, _| {
            let stays = wanted.contains_key(base);
            if !stays {
                self.view.loads().lock().forget_rollup(base);
            }
            stays
        });
        for (base, feed) in &mut *running {
            if let Some((_, tenants)) = wanted.remove(base)
                && **feed.tenants.load() != tenants
            {
                feed.tenants.store(Arc::new(tenants));
            }
        }
        for (base, (url, tenants)) in wanted {
            running.insert(base, self.start(&url, tenants));
        }
    }

    /// Every base URL that somebody names, with all that live there.
    fn wanted(&self) -> BTreeMap<Box<str>, (WorkerUrl, Vec<Tenant>)> {
        let fleet = self.view.fleet();
        let declared = fleet.declared().workers().filter_map(|spec| {
            // A boundary has refused what is no such URL.
            let url = WorkerUrl::parse(spec.loads.as_deref()?).ok()?;
            Some(Binding { worker: spec.worker.clone(), url })
        });
        let mut wanted: BTreeMap<Box<str>, (WorkerUrl, Vec<Tenant>)> = BTreeMap::new();
        for Binding { worker, url } in self.bindings.iter().cloned().chain(declared) {
            let tenant = Tenant { worker, rank: url.rank() };
            let (_, tenants) = wanted.entry(url.base().into()).or_insert_with(|| (url, Vec::new()));
            if !tenants.contains(&tenant) {
                tenants.push(tenant);
            }
        }
        wanted
    }

    fn start(&self, url: &WorkerUrl, tenants: Vec<Tenant>) -> Running {
        let status = FeedStatus { base: url.base().into(), ..FeedStatus::default() };
        let status = Arc::new(Mutex::new(status));
        let tenants = Tenants::new(ArcSwap::from_pointee(tenants));
        let task = match Fetcher::new(url, self.config.fetch.clone()) {
            Ok(fetcher) => {
                let feed = Feed {
                    view: self.view.clone(),
                    now: self.now.clone(),
                    tenants: Arc::clone(&tenants),
                    fetcher,
                    config: self.config.clone(),
                    status: Arc::clone(&status),
                };
                Some(self.handle.spawn(supervise(feed)))
            }
            Err(error) => {
                warn!(%error, "no load from there");
                None
            }
        };
        Running { tenants, status, task }
    }
}

/// Wait before a task that panicked is started anew: a defect that strikes at once must not spin.
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// When a question was asked.
#[derive(Clone, Copy)]
struct Asking {
    at: Moment,
    by_the_wall: SystemTime,
}

impl Asking {
    /// When an answer that came at `now` was measured: at its own timestamp, if that lies between question and
    /// answer by our clock, else when it was asked for (requirement L18). What the engine did meanwhile is not
    /// in it.
    fn measured(self, now: Moment, wall: SystemTime, timestamp: Option<f64>) -> Moment {
        let stamp = timestamp
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
        let age = stamp
            .filter(|stamp| *stamp >= self.by_the_wall)
            .and_then(|stamp| wall.duration_since(stamp).ok());
        // The wall's clock may have been set meanwhile: never before the question.
        age.map_or(self.at, |age| (now - age).max(self.at))
    }
}

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
    tenants: Tenants,
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
        self.tenants.load().iter().flat_map(ranks_of).collect()
    }

    async fn fetch(&self, route: Route, owned: &Owned) -> Outcome {
        let ranks = owned.iter().map(|(rank, _)| rank.dp_rank.0).collect();
        let asked = Asking { at: (self.now)(), by_the_wall: SystemTime::now() };
        match self.fetcher.fetch(route, &ranks).await {
            Ok(mut answer) => {
                let now = (self.now)();
                let measured = asked.measured(now, SystemTime::now(), answer.timestamp);
                self.put_sleep(route, &mut answer);
                self.report(route, answer, owned, measured);
                self.ask_readiness(route).await;
                Outcome::Answered
            }
            Err(outcome) => outcome,
        }
    }

    /// SGLang says elsewhere that it sleeps, for all its ranks at once.
    fn put_sleep(&self, route: Route, answer: &mut LoadAnswer) {
        if route == Route::HttpLoads
            && let Some(sleeps) = self.status.lock().sleeps
        {
            let state = if sleeps { SleepState::Asleep { cache_gone: false } } else { SleepState::Awake };
            let loads = answer.entries.iter_mut().map(|entry| &mut entry.load).chain(&mut answer.aggregate);
            loads.for_each(|load| load.sleep = load.sleep.or(Some(state)));
        }
    }

    /// Behind the report, which must not wait for it: its answer goes with the next one.
    async fn ask_readiness(&self, route: Route) {
        let now = (self.now)();
        if route != Route::HttpLoads || self.status.lock().no_ready_until.is_some_and(|until| now < until) {
            return;
        }
        let sleeps = self.fetcher.sleeps().await;
        let mut status = self.status.lock();
        if let Some(sleeps) = sleeps.filter(|sleeps| status.sleeps.unwrap_or(false) != *sleeps) {
            info!(base = &*status.base, sleeps, "the engine says whether it serves");
        }
        // Most have no such route, and are not asked for it every second.
        status.no_ready_until = sleeps.is_none().then(|| now + self.config.probe.remember);
        status.sleeps = sleeps;
    }

    fn report(&self, route: Route, mut answer: LoadAnswer, owned: &Owned, measured: Moment) {
        let now = (self.now)();
        if answer.is_rollup() {
            let answer = Arc::new(answer);
            self.status.lock().rollup = Some((now, Arc::clone(&answer)));
            return self.view.loads().lock().note_rollup(measured, self.fetcher.base(), answer);
        }
        self.drop_meaningless_sizes(&mut answer);
        let ranks: BTreeSet<&RankKey> = owned.iter().map(|(rank, _)| rank).collect();
        let owns = |worker: &WorkerId, dp_rank| ranks.contains(&RankKey { worker: worker.clone(), dp_rank });
        let shares = share_out(&answer, &route.name().into(), &self.tenants.load(), owns);
        for (worker, share) in shares {
            match share {
                Ok(report) => {
                    self.view.report_load(now, measured, &worker, &report);
                }
                Err(why) => {
                    debug!(%worker, ?why, "an answer says nothing of a worker");
                    self.status.lock().unavailable += 1;
                }
            }
        }
    }

    /// Several attention groups draw from the same blocks: their number is then no number of blocks of tokens.
    fn drop_meaningless_sizes(&self, answer: &mut LoadAnswer) {
        let fleet = self.view.fleet();
        let tenants = self.tenants.load();
        let hybrid = tenants
            .iter()
            .filter_map(|tenant| fleet.pool_of(&tenant.worker))
            .any(|pool| pool.ranks().any(|(_, rank)| pool.index.has_several_groups(rank.slot)));
        if hybrid {
            answer.entries.iter_mut().for_each(|entry| entry.load.kv_total_blocks = RawNumber::Absent);
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

//! What all handlers share: the reader's side, the writer's side, settings, buffers, records.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::Control;
use super::boundary::PoolNames;
use super::connections::ConnectionLimits;
use super::metrics::Metrics;
use super::problem::Problem;
use super::ready::FirstHistory;
use super::records::Records;
use super::reservations::Pending;
use super::visit::Said;
use crate::block::BlockSize;
use crate::indexer::{FleetView, Named, PoolView, View};
use crate::routing::{Router, RouterScratch};

/// Settings of the HTTP side.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// Largest body of a request that carries a prompt. A prompt of 2^21 tokens passes: each id takes up to seven
    /// digits, a comma and a blank, which makes 18 MiB, and 2 MiB are for the rest.
    pub max_prompt_body: usize,
    /// Largest body of any other request. 2 MiB holds 4,096 ranks with their endpoints, the field's own limit.
    pub max_body: usize,
    /// How long a request may take, its body's arrival and its place in the queue included. A query takes
    /// microseconds; this ends peers that stall, and waits for a writer that hangs.
    pub request_timeout: Duration,
    /// Requests that are read and answered at once; more wait unread. What bounds memory is the next field.
    pub max_in_flight: usize,
    /// Bytes of all bodies that are read and answered at once; a request whose body finds no room waits unread. A
    /// body is held with its tokens as integers (half its length) and their hashes (at most twice its length, for
    /// blocks of one token), so 256 MiB, twelve of the longest prompts, bound a flood to 1 GiB.
    pub max_body_bytes_in_flight: usize,
    /// Refuse every field and parameter that is not known, instead of naming it in the answer.
    pub strict: bool,
    /// What is logged of each decision at INFO.
    pub log_decisions: LogDecisions,
    /// How long `/ready` waits at most for the first history of the ranks that were declared at the start. A
    /// replay of a full buffer takes seconds; an engine that does not answer must not hold a router back for ever.
    pub ready_wait: Duration,
    /// Seed of the ties between equal ranks; `None` takes the operating system's randomness.
    pub seed: Option<u64>,
    /// What clients' connections may take.
    pub connections: ConnectionLimits,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            max_prompt_body: 20 << 20,
            max_body: 2 << 20,
            request_timeout: Duration::from_secs(10),
            max_in_flight: 256,
            max_body_bytes_in_flight: 256 << 20,
            strict: false,
            log_decisions: LogDecisions::Off,
            ready_wait: Duration::from_secs(30),
            seed: None,
            connections: ConnectionLimits::default(),
        }
    }
}

/// What is logged of each decision.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum LogDecisions {
    /// Nothing, and it costs nothing.
    #[default]
    Off,
    /// The pick: one line.
    Pick,
    /// The pick, how a tie fell, and each candidate's formula.
    Candidates,
}

/// The state behind [`app`](super::app). Cloning costs one reference count.
#[derive(Debug)]
pub struct ServiceState<C> {
    inner: Arc<Inner<C>>,
}

impl<C> Clone for ServiceState<C> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

#[derive(Debug)]
struct Inner<C> {
    control: C,
    router: Router,
    config: ServiceConfig,
    in_flight: Semaphore,
    /// In KiB.
    bodies: Arc<Semaphore>,
    ignored: Said,
    watchers: Arc<Semaphore>,
    scratches: Mutex<Vec<RouterScratch>>,
    made: AtomicU64,
    records: Records,
    pending: Mutex<Pending>,
    metrics: Metrics,
    first_history: FirstHistory,
}

impl<C: Control> ServiceState<C> {
    /// The state of a service that answers from `router` and changes the fleet through `control`.
    pub fn new(control: C, router: Router, config: ServiceConfig) -> Self {
        let clock = control.clone();
        let queue = control.clone();
        let metrics =
            Metrics::new(router.view().clone(), move || clock.now(), move || queue.queued_messages());
        let in_flight = Semaphore::new(config.max_in_flight.clamp(1, Semaphore::MAX_PERMITS));
        // Room for one body of any size that passes, or it would wait for ever.
        let largest = config.max_prompt_body.max(config.max_body);
        let bodies = config.max_body_bytes_in_flight.max(largest).div_ceil(1_024);
        let inner = Inner {
            control,
            router,
            in_flight,
            bodies: Arc::new(Semaphore::new(bodies.min(Semaphore::MAX_PERMITS))),
            ignored: Said::default(),
            watchers: Arc::new(Semaphore::new(super::watch::MAX_WATCHERS)),
            scratches: Mutex::default(),
            made: AtomicU64::new(0),
            records: Records::default(),
            pending: Mutex::default(),
            metrics,
            first_history: FirstHistory::default(),
            config,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Places for those who watch loads.
    pub(super) fn watchers(&self) -> Arc<Semaphore> {
        Arc::clone(&self.inner.watchers)
    }

    /// Lets `/ready` wait for the first history of the ranks that are declared now, at most
    /// [`ServiceConfig::ready_wait`]. To be called once, when the workers of the start are declared.
    pub fn await_history(&self) {
        let until = self.control().now() + self.config().ready_wait;
        self.inner.first_history.begin(&self.view().fleet(), until);
    }

    pub(super) fn first_history(&self) -> &FirstHistory {
        &self.inner.first_history
    }

    /// The settings.
    pub fn config(&self) -> &ServiceConfig {
        &self.inner.config
    }

    pub(super) fn control(&self) -> &C {
        &self.inner.control
    }

    pub(super) fn router(&self) -> &Router {
        &self.inner.router
    }

    pub(super) fn view(&self) -> &View {
        self.inner.router.view()
    }

    pub(super) fn records(&self) -> &Records {
        &self.inner.records
    }

    /// Selections that may still be booked by their id.
    pub(super) fn pending(&self) -> &Mutex<Pending> {
        &self.inner.pending
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.inner.metrics
    }

    /// What was said of ignored fields.
    pub(super) fn ignored(&self) -> &Said {
        &self.inner.ignored
    }

    /// Room for bodies, in KiB.
    pub(super) fn bodies(&self) -> &Arc<Semaphore> {
        &self.inner.bodies
    }

    pub(super) fn in_flight(&self) -> &Semaphore {
        &self.inner.in_flight
    }

    /// Runs `work` with warm buffers. The lock is held for a push or a pop only; as many buffers exist as
    /// requests were ever routed at the same moment.
    pub(super) fn with_scratch<T>(&self, work: impl FnOnce(&mut RouterScratch) -> T) -> T {
        let pooled = self.inner.scratches.lock().pop();
        let mut scratch = pooled.unwrap_or_else(|| self.new_scratch());
        let result = work(&mut scratch);
        if scratch.overlaps().hashes().blocks() <= MAX_POOLED_BLOCKS {
            let mut pool = self.inner.scratches.lock();
            if pool.len() < MAX_POOLED {
                pool.push(scratch);
            }
        }
        result
    }

    fn new_scratch(&self) -> RouterScratch {
        let nth = self.inner.made.fetch_add(1, Ordering::Relaxed);
        match self.inner.config.seed {
            Some(seed) => RouterScratch::seeded(seed.wrapping_add(nth)),
            None => RouterScratch::new(),
        }
    }
}

/// Buffers that are kept: routing takes microseconds, so more than this many never run at once.
const MAX_POOLED: usize = 64;

/// Buffers that one huge prompt has blown up are dropped: a million tokens in blocks of 16 is 65,536 blocks.
const MAX_POOLED_BLOCKS: usize = 65_536;

// === which pool ===

/// What to answer where no pool is named and none follows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unnamed {
    /// The route needs a name: 422.
    Field,
    /// The route asks for a worker, and there is none: 503.
    Unavailable,
}

/// What a request's names mean.
#[derive(Clone, Copy)]
pub(super) struct Meant<'f, 'n> {
    /// The pool.
    pub(super) pool: &'f Arc<PoolView>,
    /// The model's name, where it is an adapter's.
    pub(super) adapter: Option<&'n str>,
}

/// What a request means that names no adapter as its model.
pub(super) fn pool<'f>(
    fleet: &'f FleetView,
    names: PoolNames<'_>,
    unnamed: Unnamed,
) -> Result<&'f Arc<PoolView>, Problem> {
    meant(fleet, names, unnamed).map(|meant| meant.pool)
}

/// The pool that a request means: the one of its model or of the adapter that it names as its model, or the
/// only one, or the one called `default`.
pub(super) fn meant<'f, 'n>(
    fleet: &'f FleetView,
    names: PoolNames<'n>,
    unnamed: Unnamed,
) -> Result<Meant<'f, 'n>, Problem> {
    let Some(model) = names.model() else {
        return unnamed_pool(fleet, names.group(), unnamed).map(|pool| Meant { pool, adapter: None });
    };
    match fleet.named(model, names.group()) {
        Named::Pool(pool) => Ok(Meant { pool, adapter: None }),
        Named::Adapter(pool) => Ok(Meant { pool, adapter: Some(model) }),
        Named::AdapterOfSeveral(one, other) => {
            let detail = format!(
                "{} is an adapter in {} and in {}: name the model, and the adapter as lora_name",
                short(model),
                one.key,
                other.key
            );
            Err(Problem::bad_request("ambiguous_adapter", detail).field("model_name"))
        }
        Named::Nothing => Err(unknown_pool(model, names.group())),
    }
}

fn unnamed_pool<'f>(
    fleet: &'f FleetView,
    group: Option<&str>,
    unnamed: Unnamed,
) -> Result<&'f Arc<PoolView>, Problem> {
    let fits = |pool: &&Arc<PoolView>| group.is_none_or(|group| *group == *pool.key.group);
    if let Some(pool) = fleet.only_pool().filter(fits) {
        return Ok(pool);
    }
    let none = fleet.pools().next().is_none();
    match unnamed {
        Unnamed::Unavailable if none => Err(Problem::new(
            axum::http::StatusCode::SERVICE_UNAVAILABLE,
            "no_worker",
            "no schedulable workers are available",
        )),
        Unnamed::Unavailable => {
            fleet.resolve(DEFAULT_MODEL, group).ok_or_else(|| unknown_pool(DEFAULT_MODEL, group))
        }
        Unnamed::Field => {
            let detail = "missing field `model_name`: it can be left out only while there is one pool";
            Err(Problem::wrong_field("model_name", detail))
        }
    }
}

/// The model of a worker or a selection that names none, as in Dynamo's selection service.
pub(super) const DEFAULT_MODEL: &str = "default";

fn unknown_pool(model: &str, group: Option<&str>) -> Problem {
    let group = group.unwrap_or(crate::fleet::PoolKey::DEFAULT_GROUP);
    let detail = format!("no indexer for model={} routing_group={}", short(model), short(group));
    Problem::not_found("unknown_model", detail).field("model_name")
}

/// An error must not carry a whole hostile body around.
pub(super) fn short(text: &str) -> &str {
    let end = text.char_indices().nth(200).map_or(text.len(), |(at, _)| at);
    &text[..end]
}

/// A query's block size, if it gives one, must be the pool's.
pub(super) fn check_block_size(asked: Option<u32>, is: BlockSize) -> Result<(), Problem> {
    match asked {
        Some(asked) if asked != is.get() => Err(Problem::bad_request(
            "block_size",
            format!("the pool has blocks of {is} tokens, not {asked}"),
        )
        .field("block_size")),
        _ => Ok(()),
    }
}

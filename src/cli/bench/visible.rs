//! From a publisher's send to the first query that sees the block.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use crossbeam_channel::Receiver;
use rankwise::block::LocalBlockHash;
use rankwise::ids::{DpRank, RankKey, RankSlot};
use rankwise::index::{HybridRule, IndexQuery, Reader, Scratch};
use rankwise::indexer::{PoolView, View};
use rankwise::lab::traffic::PoolEvent;
use rankwise::lab::{Arrivals, Latencies, Schedule};
use serde::Deserialize;
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::cpu::CpuTimes;
use super::fleet::{Fleet, MODEL, Outgoing};
use super::target::{Prepared, Target};

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Messages per second and rank.
    pub rate: f64,
    /// For how long.
    pub during: Duration,
    /// Messages per second, of all ranks together, whose block is watched for by the reader in this process.
    pub watched: f64,
    /// The same over HTTP.
    pub watched_http: f64,
    /// How long a watcher waits between two looks. Its sleep takes some 60 µs more, and both are in the figures.
    pub look_every: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Messages sent.
    pub messages: u64,
    /// Time from the first to the last.
    pub took: Duration,
    /// Microseconds of processor time per message, by kind of thread, as far as they are in this process.
    pub cpu: BTreeMap<&'static str, f64>,
    /// How late they were sent: the sender's own trouble, not in the other figures.
    pub lateness: Latencies,
    /// Until the reader in this process saw the block. Empty where the service is elsewhere.
    pub in_process: Latencies,
    /// Until the answer of the first query that saw it had come.
    pub http: Latencies,
    /// Watched blocks that nobody saw within [`PATIENCE`].
    pub unseen: u64,
}

/// A block that is not seen for so long is lost, or the service does not keep up.
const PATIENCE: Duration = Duration::from_secs(10);

/// A block to be watched for: the last of a chain.
struct Sighting {
    sent: Instant,
    rank: u32,
    locals: Vec<LocalBlockHash>,
}

/// Publishes at the planned rate, and watches. Blocks the thread that it is called on; `publishing` is the
/// fleet's runtime, `asking` that of the queries.
///
/// # Errors
/// A publisher that has ended, or no thread left.
pub fn run(
    fleet: &mut Fleet,
    view: Option<&View>,
    service: &Target,
    (publishing, asking): (&Handle, &Handle),
    plan: Plan,
) -> Result<Outcome> {
    let (watch, to_watch) = crossbeam_channel::unbounded();
    let watcher = view.map(|view| Watcher::start(view, to_watch, plan.look_every)).transpose()?;
    let all = plan.rate * f64::from(fleet.ranks());
    let mut outcome = Outcome::default();
    let mut queries = JoinSet::new();
    let mut maker = Maker::new(all, if watcher.is_some() { plan.watched } else { 0.0 }, plan.watched_http);
    // Ranks take turns at chance distances: each has its own steps, and none a beat with the others.
    let schedule: Vec<Duration> = Schedule::new(all, plan.during, Arrivals::Poisson { seed: 1 }).collect();
    let ahead: Vec<Made> = (0..schedule.len().min(MAX_AHEAD)).map(|_| maker.make(fleet)).collect();
    let mut ahead = ahead.into_iter();
    let before = CpuTimes::now();
    let start = Instant::now();
    for after in schedule {
        let Made { outgoing, watched, asked } = ahead.next().unwrap_or_else(|| maker.make(fleet));
        let due = start + after;
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            std::thread::sleep(wait);
        }
        let sent = Instant::now();
        publishing.block_on(fleet.publish(&outgoing))?;
        outcome.lateness.record(sent.saturating_duration_since(due));
        let rank = outgoing.batch.rank;
        if let Some(tokens) = asked {
            queries.spawn_on(ask_until_seen(service.clone(), rank, tokens, sent), asking);
        }
        if let Some(locals) = watched {
            // The watcher ends after this thread.
            let _ = watch.send(Sighting { sent, rank, locals });
        }
        outcome.messages += 1;
    }
    outcome.took = start.elapsed();
    outcome.cpu = CpuTimes::now().micros_per(&before, outcome.messages);
    drop(watch);
    if let Some(watcher) = watcher {
        let (seen, unseen) = watcher.join().ok().context("the watcher's thread has ended badly")?;
        outcome.in_process = seen;
        outcome.unseen += unseen;
    }
    asking.block_on(async {
        while let Some(seen) = queries.join_next().await {
            match seen.context("a query's task has ended badly")? {
                Some(latency) => outcome.http.record(latency),
                None => outcome.unseen += 1,
            }
        }
        Ok::<_, anyhow::Error>(())
    })?;
    Ok(outcome)
}

/// Takes so many of so many, evenly.
struct Every {
    step: f64,
    owed: f64,
}

impl Every {
    fn new(of: f64, wanted: f64) -> Self {
        Self { step: if of > 0.0 { (wanted / of).min(1.0) } else { 0.0 }, owed: 0.0 }
    }

    fn due(&mut self) -> bool {
        self.owed += self.step;
        let due = self.owed >= 1.0;
        if due {
            self.owed -= 1.0;
        }
        due
    }
}

/// Messages that are made before the first is sent, so that making them takes no time from what is measured:
/// some 150 MB, and eight seconds of 128 ranks at 250 each. Those of a longer run are made as it goes.
const MAX_AHEAD: usize = 1 << 18;

/// A message, and what is to be looked for once it is sent.
struct Made {
    outgoing: Outgoing,
    watched: Option<Vec<LocalBlockHash>>,
    asked: Option<Vec<u32>>,
}

/// Makes messages, of the ranks in turn.
struct Maker {
    nth: u32,
    watches: Every,
    asks: Every,
}

impl Maker {
    fn new(all: f64, watched: f64, asked: f64) -> Self {
        Self { nth: 0, watches: Every::new(all, watched), asks: Every::new(all, asked) }
    }

    fn make(&mut self, fleet: &mut Fleet) -> Made {
        let outgoing = fleet.next_batch(self.nth % fleet.ranks());
        self.nth = self.nth.wrapping_add(1);
        let (watches, asks) = (self.watches.due(), self.asks.due());
        let stores = |event: &PoolEvent| matches!(event, PoolEvent::Stored { .. });
        if !(watches || asks) || !outgoing.batch.events.iter().any(stores) {
            return Made { outgoing, watched: None, asked: None };
        }
        // The chain that ends in the batch's last stored block.
        let traffic = fleet.traffic();
        let blocks = traffic.conversation(outgoing.batch.conversation).to_vec();
        let asked = asks.then(|| {
            let mut tokens = Vec::new();
            traffic.tokens(blocks.iter().map(|block| block.content), &mut tokens);
            tokens
        });
        Made { watched: watches.then(|| traffic.locals(&blocks)), asked, outgoing }
    }
}

/// Looks for the blocks with a reader of the index, all of them in turn: a block that takes long is in nobody's
/// way.
struct Watcher {
    to_watch: Receiver<Sighting>,
    pool: Arc<PoolView>,
    slots: Vec<RankSlot>,
    look_every: Duration,
    scratch: Scratch,
    seen: Latencies,
    unseen: u64,
}

impl Watcher {
    fn start(
        view: &View,
        to_watch: Receiver<Sighting>,
        look_every: Duration,
    ) -> Result<std::thread::JoinHandle<(Latencies, u64)>> {
        let fleet = view.fleet();
        let pool = Arc::clone(fleet.resolve(MODEL, None).context("the made-up pool is not declared")?);
        let mut slots: Vec<(DpRank, RankSlot)> =
            pool.ranks().map(|(_, rank)| (rank.plan.rank.dp_rank, rank.slot)).collect();
        slots.sort_unstable_by_key(|(rank, _)| *rank);
        let slots = slots.into_iter().map(|(_, slot)| slot).collect();
        let (scratch, seen) = (Scratch::default(), Latencies::new());
        let watcher = Self { to_watch, pool, slots, look_every, scratch, seen, unseen: 0 };
        let thread = std::thread::Builder::new().name("rankwise-watcher".to_owned());
        thread.spawn(move || watcher.run()).context("cannot start the watcher's thread")
    }

    fn run(mut self) -> (Latencies, u64) {
        let mut open: Vec<Sighting> = Vec::new();
        loop {
            if open.is_empty() {
                match self.to_watch.recv() {
                    Ok(sighting) => open.push(sighting),
                    Err(_) => return (self.seen, self.unseen),
                }
            }
            while let Ok(sighting) = self.to_watch.try_recv() {
                open.push(sighting);
            }
            open.retain(|sighting| !self.settles(sighting));
            if !open.is_empty() && !self.look_every.is_zero() {
                std::thread::sleep(self.look_every);
            }
        }
    }

    /// Looks once; whether there is nothing left to look for.
    fn settles(&mut self, sighting: &Sighting) -> bool {
        let slot = self.slots[sighting.rank as usize];
        let waited = || sighting.sent.elapsed();
        if shows(&self.pool.index, slot, &sighting.locals, &mut self.scratch) {
            self.seen.record(waited());
            return true;
        }
        let given_up = waited() > PATIENCE;
        self.unseen += u64::from(given_up);
        given_up
    }
}

/// Whether a rank holds the whole chain.
fn shows(index: &Reader, slot: RankSlot, locals: &[LocalBlockHash], scratch: &mut Scratch) -> bool {
    let query = IndexQuery { locals, sequences: &[], hybrid: HybridRule::Joint };
    index.overlap(&query, scratch);
    scratch.overlap(slot).is_some_and(|found| found.device as usize >= locals.len())
}

/// Queries until an answer shows the whole prompt on its rank; how long that took from `sent` on.
async fn ask_until_seen(service: Target, rank: u32, tokens: Vec<u32>, sent: Instant) -> Option<Duration> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow)]
        ranks: Vec<Rank<'a>>,
    }
    #[derive(Deserialize)]
    struct Rank<'a> {
        worker_id: &'a str,
        dp_rank: u32,
        device: u64,
    }
    let wanted = tokens.len() as u64;
    let key = RankKey::new(Fleet::worker(rank).as_str(), rank);
    let body = json!({ "model_name": MODEL, "token_ids": tokens }).to_string().into_bytes();
    let query: Prepared = service.prepared("/query", Some(body));
    while sent.elapsed() < PATIENCE {
        let Ok(answer) = service.send(&query).await else { continue };
        let came = sent.elapsed();
        let Ok(answer) = serde_json::from_slice::<Answer<'_>>(&answer) else { return None };
        let of = |rank: &&Rank<'_>| rank.dp_rank == key.dp_rank.0 && rank.worker_id == key.worker.as_str();
        if answer.ranks.iter().find(of).is_some_and(|rank| rank.device >= wanted) {
            return Some(came);
        }
    }
    None
}

/// Publishes in the background at a rate, for runs that measure something else; ends when told.
pub fn publish_until(
    fleet: &mut Fleet,
    publishing: &Handle,
    rate: f64,
    stop: &Arc<AtomicBool>,
) -> Result<u64> {
    /// Longer than any run.
    const DAY: Duration = Duration::from_secs(24 * 3_600);
    let (ranks, start) = (fleet.ranks(), Instant::now());
    let mut messages = 0;
    for after in Schedule::new(rate * f64::from(ranks), DAY, Arrivals::Poisson { seed: 2 }) {
        let outgoing = fleet.next_batch(messages as u32 % ranks);
        let wait = (start + after).saturating_duration_since(Instant::now());
        std::thread::sleep(wait);
        if stop.load(Ordering::Relaxed) {
            break;
        }
        publishing.block_on(fleet.publish(&outgoing))?;
        messages += 1;
    }
    Ok(messages)
}

//! Open-loop load: requests are sent when they are due, whatever became of those before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rankwise::lab::search::Trial;
use rankwise::lab::{Arrivals, Latencies, Schedule};
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::cpu::CpuTimes;
use super::figures::Figures;
use super::target::{Prepared, Target};

/// One run at one rate.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Requests per second.
    pub rate: f64,
    /// For how long.
    pub during: Duration,
    /// How they are spread.
    pub arrivals: Arrivals,
    /// Connections; a request that finds none free waits, and its wait counts.
    pub connections: usize,
    /// Answered later than this is not in time.
    pub limit: Duration,
    /// A request that is overdue by so much is not sent any more. It counts as never answered, and its latency
    /// as this long: a rate that is far too high then ends soon after its last request was due.
    pub abandon: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Requests per second, as planned.
    pub rate: f64,
    /// Requests that were due.
    pub scheduled: u64,
    /// Answers with a status of success.
    pub answered: u64,
    /// Those of them that came within the limit.
    pub in_time: u64,
    /// Answers with another status, and connections that broke.
    pub failed: u64,
    /// What one of them said.
    pub failure: Option<String>,
    /// Requests that were overdue for too long to be sent.
    pub abandoned: u64,
    /// From the moment a request was due to the last byte of its answer.
    pub latency: Latencies,
    /// From the moment it was sent: what a closed loop would have measured.
    pub service: Latencies,
    /// From the moment it was due to that at which it was sent: this client's own lateness and the wait for a
    /// free connection.
    pub lateness: Latencies,
    /// Bytes of all answers.
    pub answer_bytes: u64,
    /// From the first request's moment to the last answer.
    pub took: Duration,
    /// Microseconds of processor time per request, by kind of thread, as far as they are in this process.
    pub cpu: BTreeMap<&'static str, f64>,
}

impl Outcome {
    /// As the search for the highest rate sees it.
    pub fn trial(&self) -> Trial {
        Trial { rate: self.rate, scheduled: self.scheduled, in_time: self.in_time }
    }

    fn add(&mut self, other: &Self) {
        self.answered += other.answered;
        self.in_time += other.in_time;
        self.failed += other.failed;
        self.failure = self.failure.take().or_else(|| other.failure.clone());
        self.abandoned += other.abandoned;
        self.answer_bytes += other.answer_bytes;
        self.latency.add(&other.latency);
        self.service.add(&other.service);
        self.lateness.add(&other.lateness);
    }

    /// For JSON.
    pub fn body(&self) -> OutcomeBody {
        let seconds = self.took.as_secs_f64();
        OutcomeBody {
            rate: self.rate,
            achieved_rate: (seconds > 0.0).then(|| self.answered as f64 / seconds),
            scheduled: self.scheduled,
            answered: self.answered,
            in_time: self.in_time,
            failed: self.failed,
            failure: self.failure.clone(),
            abandoned: self.abandoned,
            kept_up: self.trial().kept_up(),
            latency: Figures::of(&self.latency),
            service: Figures::of(&self.service),
            lateness: Figures::of(&self.lateness),
            cpu_us_per_request: self.cpu.clone(),
            mean_answer_bytes: (self.answered > 0).then(|| self.answer_bytes / self.answered),
        }
    }
}

/// An [`Outcome`] in figures.
#[derive(Clone, Debug, Serialize)]
pub struct OutcomeBody {
    rate: f64,
    achieved_rate: Option<f64>,
    scheduled: u64,
    answered: u64,
    in_time: u64,
    failed: u64,
    failure: Option<String>,
    abandoned: u64,
    kept_up: bool,
    latency: Figures,
    service: Figures,
    lateness: Figures,
    cpu_us_per_request: BTreeMap<&'static str, f64>,
    mean_answer_bytes: Option<u64>,
}

/// Sends what is due from `requests`, in turn, and waits for every answer.
///
/// # Errors
/// When the system gives no thread.
pub async fn run(target: &Target, requests: &Arc<[Prepared]>, plan: Plan) -> Result<Outcome> {
    let due: Arc<[Duration]> = Schedule::new(plan.rate, plan.during, plan.arrivals).collect();
    let ready = Arc::new(Semaphore::new(0));
    let before = CpuTimes::now();
    // Time for the connections' tasks to be there before the first request is due.
    let start = Instant::now() + Duration::from_millis(20);
    let pacer = pace(start, Arc::clone(&due), Arc::clone(&ready), plan.connections)?;
    let next = Arc::new(AtomicUsize::new(0));
    let mut connections = JoinSet::new();
    for _ in 0..plan.connections {
        let connection = Connection {
            target: target.clone(),
            requests: Arc::clone(requests),
            due: Arc::clone(&due),
            ready: Arc::clone(&ready),
            next: Arc::clone(&next),
            start,
            plan,
        };
        connections.spawn(connection.run());
    }
    let mut all = Outcome { rate: plan.rate, scheduled: due.len() as u64, ..Outcome::default() };
    while let Some(one) = connections.join_next().await {
        all.add(&one.context("a connection's task has ended badly")?);
    }
    all.took = start.elapsed();
    all.cpu = CpuTimes::now().micros_per(&before, all.answered);
    // It has let every connection go, so it has ended.
    let _ = pacer.join();
    Ok(all)
}

/// Lets a request go when it is due, and at the end every connection. A thread of its own: the runtime's
/// timers tell milliseconds apart, a thread's sleep some 60 µs.
fn pace(
    start: Instant,
    due: Arc<[Duration]>,
    ready: Arc<Semaphore>,
    connections: usize,
) -> Result<std::thread::JoinHandle<()>> {
    let pacing = move || {
        for after in due.iter() {
            let wait = (start + *after).saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                std::thread::sleep(wait);
            }
            ready.add_permits(1);
        }
        ready.add_permits(connections);
    };
    let thread = std::thread::Builder::new().name("rankwise-pacer".to_owned());
    thread.spawn(pacing).context("cannot start the pacer's thread")
}

struct Connection {
    target: Target,
    requests: Arc<[Prepared]>,
    due: Arc<[Duration]>,
    ready: Arc<Semaphore>,
    next: Arc<AtomicUsize>,
    start: Instant,
    plan: Plan,
}

impl Connection {
    async fn run(self) -> Outcome {
        let mut seen = Outcome::default();
        loop {
            match self.ready.acquire().await {
                Ok(permit) => permit.forget(),
                // Never closed.
                Err(_) => return seen,
            }
            let nth = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(after) = self.due.get(nth) else { return seen };
            let request = &self.requests[nth % self.requests.len()];
            self.ask(self.start + *after, request, &mut seen).await;
        }
    }

    async fn ask(&self, due: Instant, request: &Prepared, seen: &mut Outcome) {
        let sent = Instant::now();
        let late = sent.saturating_duration_since(due);
        if late > self.plan.abandon {
            seen.abandoned += 1;
            seen.latency.record(late);
            return;
        }
        let answer = self.target.send(request).await;
        let done = Instant::now();
        let latency = done.saturating_duration_since(due);
        seen.lateness.record(late);
        seen.latency.record(latency);
        seen.service.record(done - sent);
        match answer {
            Ok(body) => {
                seen.answered += 1;
                seen.answer_bytes += body.len() as u64;
                seen.in_time += u64::from(latency <= self.plan.limit);
            }
            Err(error) => {
                seen.failed += 1;
                seen.failure.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
}

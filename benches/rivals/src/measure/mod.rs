//! What is measured.

pub mod histories;
pub mod instructions;
pub mod queries;
pub mod serving;
pub mod side_by_side;
pub mod wire;

use std::sync::Arc;

use crate::contender::{Contender, Nanos};
use crate::workload::Workload;
use crate::workload::blocks::{Blocks, Event, Naming};
use crate::workload::trace::{Replay, TraceLine};
use crate::workload::traffic::Traffic;

/// Blocks of the events that one contender takes before it is the next one's turn. Some milliseconds: long
/// enough to win the caches back, short enough that a busy neighbour hits everyone.
pub const CHUNK: usize = 50_000;

/// A workload and its size.
#[derive(Clone, Debug)]
pub struct Spec {
    /// As reports call it.
    pub label: String,
    /// Number of ranks.
    pub ranks: u32,
    /// Blocks that all caches take together.
    pub entries: usize,
    /// Blocks that churn stores; it evicts about as many.
    pub churn: usize,
    /// A trace to replay instead of made-up traffic.
    pub trace: Option<Arc<Vec<TraceLine>>>,
    /// What engines call their blocks.
    pub naming: Naming,
}

impl Spec {
    /// Made-up traffic.
    pub fn traffic(ranks: u32, entries: usize, churn: usize) -> Self {
        let label = match entries {
            1_000_000.. => format!("{ranks} ranks, {:.0} M entries", entries as f64 / 1e6),
            _ => format!("{ranks} ranks, {} k entries", entries / 1_000),
        };
        Self { label, ranks, entries, churn, trace: None, naming: Naming::default() }
    }

    /// The workload, before its first event.
    pub fn start(&self, seed: u64) -> Workload {
        let mut workload = match &self.trace {
            None => Workload::Traffic(Box::new(Traffic::new(seed, self.ranks, self.entries))),
            Some(lines) => {
                Workload::Trace(Box::new(Replay::new(seed, self.ranks, self.entries, lines.to_vec())))
            }
        };
        workload.fleet_mut().blocks.naming = self.naming;
        workload
    }

    /// Whether the caches are as full as churn wants them: nearly, or with most of the trace gone.
    pub fn is_full(&self, workload: &Workload) -> bool {
        let trace_gone = matches!(workload, Workload::Trace(replay) if replay.progress() > 0.6);
        trace_gone || workload.fleet().entries() >= self.entries * 97 / 100
    }
}

/// Live bytes and allocations of the process so far; zeros where nobody counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap {
    /// Bytes allocated and not freed.
    pub live: i64,
    /// Calls that allocated.
    pub allocations: u64,
}

/// Reads the heap's counters.
pub type Gauge = fn() -> Heap;

/// Where nobody counts.
pub fn no_gauge() -> Heap {
    Heap::default()
}

/// A contender and what it has cost so far.
pub struct Seat {
    /// Who.
    pub contender: Box<dyn Contender>,
    /// Live bytes.
    pub live: i64,
    /// The most of them.
    pub peak: i64,
    nanos: Nanos,
    blocks: usize,
}

/// Contenders that take turns.
pub struct Table {
    /// In the order of reports.
    pub seats: Vec<Seat>,
    gauge: Gauge,
    turn: usize,
    /// Events and blocks since the last note.
    fed: (usize, usize),
}

impl Table {
    /// Seats for contenders that are made here, so that what they start with counts.
    pub fn new(gauge: Gauge, make: &dyn Fn(usize) -> Option<Box<dyn Contender>>) -> Self {
        let mut seats = Vec::new();
        loop {
            let before = gauge().live;
            let Some(contender) = make(seats.len()) else { break };
            let live = gauge().live - before;
            seats.push(Seat { contender, live, peak: live, nanos: 0, blocks: 0 });
        }
        Self { seats, gauge, turn: 0, fed: (0, 0) }
    }

    /// A table of these contenders, whose first bytes are not counted.
    pub fn of(contenders: Vec<Box<dyn Contender>>) -> Self {
        let seats = contenders.into_iter();
        let seats = seats.map(|contender| Seat { contender, live: 0, peak: 0, nanos: 0, blocks: 0 });
        Self { seats: seats.collect(), gauge: no_gauge, turn: 0, fed: (0, 0) }
    }

    /// Everyone applies the events; each time someone else begins.
    pub fn feed(&mut self, blocks: &Blocks, events: &[Event]) {
        let named: usize = events.iter().map(Event::blocks).sum();
        self.fed.0 += events.len();
        self.fed.1 += named;
        for nth in 0..self.seats.len() {
            let at = (self.turn + nth) % self.seats.len();
            let seat = &mut self.seats[at];
            let before = (self.gauge)().live;
            seat.contender.load(blocks, events);
            seat.nanos += seat.contender.apply();
            seat.blocks += named;
            seat.live += (self.gauge)().live - before;
            seat.peak = seat.peak.max(seat.live);
        }
        self.turn += 1;
    }

    /// Everyone finishes what it put off.
    pub fn settle(&mut self) {
        for seat in &mut self.seats {
            let before = (self.gauge)().live;
            seat.contender.settle();
            seat.live += (self.gauge)().live - before;
        }
    }

    /// The seats in the order of this turn.
    pub fn in_turn(&mut self) -> Vec<usize> {
        let seats = self.seats.len();
        self.turn += 1;
        (0..seats).map(|nth| (self.turn + nth) % seats).collect()
    }

    /// Blocks per event since the last call; `None` if there was no event.
    pub fn blocks_per_event(&mut self) -> Option<f64> {
        let (events, blocks) = std::mem::take(&mut self.fed);
        (events > 0).then(|| blocks as f64 / events as f64)
    }

    /// Nanoseconds per block since the last call, by seat; `None` if there were no blocks.
    pub fn costs(&mut self) -> Vec<Option<f64>> {
        let cost = |seat: &mut Seat| {
            let (nanos, blocks) = (std::mem::take(&mut seat.nanos), std::mem::take(&mut seat.blocks));
            (blocks > 0).then(|| nanos as f64 / blocks as f64)
        };
        self.seats.iter_mut().map(cost).collect()
    }
}

//! One workload from empty caches to empty caches.

use super::{CHUNK, Gauge, Spec, Table, no_gauge, queries, side_by_side};
use crate::contender::{self, Field};
use crate::samples::Findings;
use crate::workload::blocks::Event;
use crate::workload::{self, Workload, questions};

/// Hashes per event when caches are drained.
const DRAIN_EVENT: usize = 64;
/// Share of the entries that draining evicts.
const DRAINED: f64 = 0.4;
/// Ranks that are cleared, one after another.
const CLEARED: usize = 5;

/// What to measure on the way.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Who takes part.
    pub field: Field,
    /// Questions per class; zero asks none.
    pub questions: usize,
    /// Whether churn goes on with one block per event.
    pub one_block: bool,
}

/// Times events and queries.
pub fn timings(spec: &Spec, plan: Plan, seed: u64, findings: &mut Findings) {
    let label = spec.label.as_str();
    let mut run = Run::start(spec, plan.field, seed, no_gauge);
    run.fill(spec);
    run.note_costs("fill", label, findings);
    run.churn(spec.churn, false);
    run.note_costs("churn", label, findings);
    if plan.questions > 0 {
        let classes = questions::classes(&mut run.workload, plan.questions, seed);
        queries::latencies(&mut run.table, &run.workload, &classes, label, findings);
    }
    if plan.one_block {
        run.churn(spec.churn / 3, true);
        run.note_costs("one-block churn", label, findings);
    }
    run.clear_some_ranks(label, findings);
    run.drain();
    run.note_costs("drain", label, findings);
    let classes = questions::classes(&mut run.workload, plan.questions.min(200), seed + 1);
    let scenario = format!("after drain, {label}");
    queries::check(&mut run.table, &run.workload, &classes, &scenario, findings);
    run.dump(label, findings);
    let scenario = format!("after rebuild, {label}");
    queries::check(&mut run.table, &run.workload, &classes, &scenario, findings);
    // What it retired must not be freed in the next workload's time.
    run.table.settle();
}

/// Weighs the contenders.
pub fn weights(spec: &Spec, plan: Plan, seed: u64, gauge: Gauge, findings: &mut Findings) {
    let label = spec.label.as_str();
    let mut run = Run::start(spec, plan.field, seed, gauge);
    run.fill(spec);
    run.churn(spec.churn, false);
    run.table.settle();
    let (entries, distinct) = (run.workload.fleet().entries(), run.workload.fleet().distinct());
    let churned: Vec<i64> = run.table.seats.iter().map(|seat| seat.live).collect();
    for seat in &run.table.seats {
        let live = seat.live as f64;
        let name = seat.contender.name();
        findings.add("live bytes per entry after churn", label, name, live / entries as f64);
        findings.add("live bytes per distinct block after churn", label, name, live / distinct as f64);
    }
    if plan.questions > 0 {
        let classes = questions::classes(&mut run.workload, plan.questions, seed);
        queries::allocations(&mut run.table, &classes, gauge, label, findings);
    }
    run.drain();
    run.table.settle();
    let left = run.workload.fleet().entries();
    for (seat, churned) in run.table.seats.iter().zip(churned) {
        let (before, after) = (churned as f64 / entries as f64, seat.live as f64 / left as f64);
        let name = seat.contender.name();
        findings.add("bytes per entry after 40 % drain / before", label, name, after / before);
    }
    run.clear_all();
    run.table.settle();
    for seat in &run.table.seats {
        let share = seat.live.max(0) as f64 / seat.peak as f64;
        findings.add("left after clearing all / peak", label, seat.contender.name(), share);
    }
}

/// Contenders and the workload that they follow.
pub struct Run {
    /// Everyone.
    pub table: Table,
    /// What they follow.
    pub workload: Workload,
}

impl Run {
    /// Empty contenders, empty caches.
    pub fn start(spec: &Spec, field: Field, seed: u64, gauge: Gauge) -> Self {
        let ranks = spec.ranks;
        let table = Table::new(gauge, &|nth| contender::nth(field, nth, ranks));
        Self { table, workload: spec.start(seed) }
    }

    /// Fills the caches.
    pub fn fill(&mut self, spec: &Spec) {
        let mut events = Vec::new();
        self.workload.begin(&mut events);
        self.table.feed(&self.workload.fleet().blocks, &events);
        let full = |workload: &Workload| spec.is_full(workload);
        while let Some(events) = workload::next_chunk(&mut self.workload, CHUNK, full) {
            self.table.feed(&self.workload.fleet().blocks, &events);
        }
    }

    /// Goes on until `blocks` more blocks are stored, or the trace ends.
    pub fn churn(&mut self, blocks: usize, one_block: bool) {
        let mut stored = 0;
        while stored < blocks
            && let Some(mut events) = workload::next_chunk(&mut self.workload, CHUNK, |_| false)
        {
            stored += events
                .iter()
                .filter(|event| matches!(event, Event::Stored { .. }))
                .map(Event::blocks)
                .sum::<usize>();
            if one_block {
                let whole = std::mem::take(&mut events);
                whole.iter().for_each(|event| event.cut(&mut events));
            }
            self.table.feed(&self.workload.fleet().blocks, &events);
        }
    }

    /// Evicts the oldest of every rank, ranks in turn.
    pub fn drain(&mut self) {
        let fleet = self.workload.fleet_mut();
        fleet.stop();
        let left = (fleet.entries() as f64 * (1.0 - DRAINED)) as usize;
        let mut events = Vec::new();
        let mut some = true;
        while some && self.workload.fleet().entries() > left {
            some = false;
            for rank in 0..self.workload.fleet().ranks() {
                some |= self.workload.fleet_mut().evict(rank, DRAIN_EVENT, &mut events);
            }
            if events.iter().map(Event::blocks).sum::<usize>() >= CHUNK {
                self.table.feed(&self.workload.fleet().blocks, &events);
                events.clear();
            }
        }
        self.table.feed(&self.workload.fleet().blocks, &events);
    }

    /// Empties every rank.
    pub fn clear_all(&mut self) {
        let mut events = Vec::new();
        for rank in 0..self.workload.fleet().ranks() {
            self.workload.fleet_mut().clear(rank, &mut events);
        }
        self.table.feed(&self.workload.fleet().blocks, &events);
    }

    /// Clears a few ranks, one at a time, each beside a reader.
    pub fn clear_some_ranks(&mut self, label: &str, findings: &mut Findings) {
        self.workload.fleet_mut().stop();
        let ranks = self.workload.fleet().ranks();
        // Few of a small fleet's, since what comes after needs the rest.
        let cleared = CLEARED.min(ranks as usize / 4).max(1);
        let mut soonest = vec![f64::INFINITY; self.table.seats.len()];
        for rank in (0..ranks).step_by(ranks as usize / cleared).take(cleared) {
            let Some(question) = side_by_side::question_for(&self.workload, rank) else { continue };
            let mut events = Vec::new();
            self.workload.fleet_mut().clear(rank, &mut events);
            for at in self.table.in_turn() {
                let contender = self.table.seats[at].contender.as_mut();
                contender.load(&self.workload.fleet().blocks, &events);
                let clear = side_by_side::clear_beside_a_reader(contender, &question, rank);
                soonest[at] = soonest[at].min(clear.invisible);
                findings.add("clear a rank, until done (us)", label, contender.name(), clear.done);
            }
        }
        for (seat, soonest) in self.table.seats.iter().zip(soonest) {
            // The best of all ranks: whoever else wants the reader's core only adds to it.
            if soonest.is_finite() {
                findings.add("clear a rank, until invisible (us)", label, seat.contender.name(), soonest);
            }
        }
    }

    /// Writes everyone's content out and reads it back in.
    pub fn dump(&mut self, label: &str, findings: &mut Findings) {
        for seat in &mut self.table.seats {
            let Some(cost) = seat.contender.dump_and_rebuild() else { continue };
            let name = seat.contender.name();
            findings.add("dump (ms)", label, name, cost.dump as f64 / 1e6);
            findings.add("rebuild (ms)", label, name, cost.rebuild as f64 / 1e6);
            findings.add("dump + rebuild (ms)", label, name, (cost.dump + cost.rebuild) as f64 / 1e6);
        }
    }

    fn note_costs(&mut self, phase: &str, label: &str, findings: &mut Findings) {
        if let Some(mean) = self.table.blocks_per_event() {
            let fleet = self.workload.fleet();
            let share = fleet.entries() as f64 / fleet.distinct().max(1) as f64;
            findings.note(format!(
                "{label}, {phase}: {mean:.1} blocks per event, then {} entries, {share:.2} per distinct block",
                fleet.entries()
            ));
        }
        let costs = self.table.costs();
        for (seat, cost) in self.table.seats.iter().zip(costs) {
            if let Some(cost) = cost {
                findings.add(format!("{phase} (ns per block)"), label, seat.contender.name(), cost);
            }
        }
    }
}

//! Query latency by class, every answer checked.

use std::time::Instant;

use super::{Heap, Table};
use crate::contender::{Contender, Keys};
use crate::cpu;
use crate::samples::{Findings, percentile};
use crate::workload::Workload;
use crate::workload::questions::{Class, Question};

/// Questions that one contender answers before it is the next one's turn.
const GROUP: usize = 100;
/// Questions between two looks at whether the thread kept its core.
const BATCH: usize = 10;
/// Time without the core that is no mere interrupt.
const LOST: u64 = 50_000;
/// A third of the time that the kernel leaves a core to one of several threads.
const SLICE: u64 = 1_000_000;
/// Tries to keep the core for a batch, then the time counts as it is.
const TRIES: usize = 4;
/// Times that every question is asked; percentiles are the median of the passes'.
const PASSES: usize = 3;

/// Asks every class of everyone.
pub fn latencies(
    table: &mut Table,
    workload: &Workload,
    classes: &[Class],
    label: &str,
    findings: &mut Findings,
) {
    for class in classes {
        let truths: Vec<_> =
            class.questions.iter().map(|question| workload.fleet().truth(&question.path)).collect();
        for pass in 0..PASSES {
            for keys in [Keys::Content, Keys::Sequence] {
                one_pass(table, class, keys, label, findings, (pass == 0).then_some(&truths));
            }
        }
    }
}

fn one_pass(
    table: &mut Table,
    class: &Class,
    keys: Keys,
    label: &str,
    findings: &mut Findings,
    truths: Option<&Vec<Vec<(u32, u32)>>>,
) {
    let mut times: Vec<Vec<u64>> = table.seats.iter().map(|_| Vec::new()).collect();
    let mut answer = Vec::new();
    for (group, questions) in class.questions.chunks(GROUP).enumerate() {
        for seat in table.in_turn() {
            let contender = table.seats[seat].contender.as_mut();
            if keys == Keys::Sequence && !contender.uses_sequences() {
                continue;
            }
            for (batch, questions) in questions.chunks(BATCH).enumerate() {
                let answered = &mut times[seat];
                undisturbed(|| {
                    let asked = questions.iter().map(|question| timed(contender, question, keys));
                    asked.collect()
                })
                .into_iter()
                .for_each(|time| answered.push(time));
                for (nth, question) in questions.iter().enumerate() {
                    let Some(truths) = truths else { break };
                    contender.pose(question, keys);
                    contender.ask();
                    contender.answer(&mut answer);
                    let truth = &truths[group * GROUP + batch * BATCH + nth];
                    findings.check(&format!("serving, {label}"), contender.name(), truth, &answer);
                }
            }
        }
    }
    let kind = match keys {
        Keys::Content => "content",
        Keys::Sequence => "sequence",
    };
    for (seat, mut times) in table.seats.iter().zip(times) {
        if times.is_empty() {
            continue;
        }
        for (name, share) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
            let value = percentile(&mut times, share) as f64;
            let measure = format!("query {} {name}, {kind} hashes (ns)", class.name);
            findings.add(measure, label, seat.contender.name(), value);
        }
    }
}

/// The times of a batch; asked again if the kernel gave the core to someone else meanwhile, which says nothing
/// of any contender and would be the whole of a slow one's p99.
fn undisturbed(mut batch: impl FnMut() -> Vec<u64>) -> Vec<u64> {
    let mut times = Vec::new();
    for _ in 0..TRIES {
        let (start, before) = (Instant::now(), cpu::thread_nanos());
        times = batch();
        let ran = cpu::thread_nanos() - before;
        // What takes longer than the kernel's slice cannot be had undisturbed.
        if ran > SLICE || (start.elapsed().as_nanos() as u64).saturating_sub(ran) < LOST {
            break;
        }
    }
    times
}

fn timed(contender: &mut dyn Contender, question: &Question, keys: Keys) -> u64 {
    contender.pose(question, keys);
    let start = Instant::now();
    contender.ask();
    start.elapsed().as_nanos() as u64
}

/// Asks and compares, nothing else.
pub fn check(
    table: &mut Table,
    workload: &Workload,
    classes: &[Class],
    scenario: &str,
    findings: &mut Findings,
) {
    let mut answer = Vec::new();
    for question in classes.iter().flat_map(|class| &class.questions) {
        let truth = workload.fleet().truth(&question.path);
        for seat in &mut table.seats {
            seat.contender.pose(question, Keys::Content);
            seat.contender.ask();
            seat.contender.answer(&mut answer);
            findings.check(scenario, seat.contender.name(), &truth, &answer);
        }
    }
}

/// Allocations per query, once buffers have grown.
pub fn allocations(
    table: &mut Table,
    classes: &[Class],
    gauge: fn() -> Heap,
    label: &str,
    findings: &mut Findings,
) {
    for class in classes {
        for seat in &mut table.seats {
            let mut allocations = 0;
            for warm in [false, true] {
                for question in &class.questions {
                    seat.contender.pose(question, Keys::Content);
                    let before = gauge().allocations;
                    seat.contender.ask();
                    if warm {
                        allocations += gauge().allocations - before;
                    }
                }
            }
            let per_query = allocations as f64 / class.questions.len() as f64;
            let measure = format!("allocations per query, {}", class.name);
            findings.add(measure, label, seat.contender.name(), per_query);
        }
    }
}

//! One writer that never rests and one reader beside it; and how long a reader still sees a rank that is being
//! cleared.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::serving::{Plan, Run};
use super::{CHUNK, Spec, no_gauge, queries};
use crate::contender::{Ask, Contender, Keys};
use crate::samples::{Findings, percentile};
use crate::workload::blocks::{Blocks, Event};
use crate::workload::questions::{self, Class, Question};
use crate::workload::{self, Workload};

/// Blocks that the writer applies while it is read.
const WRITTEN: usize = 1_500_000;
/// What the reader asks for, in turns.
const ASKED: [&str; 2] = ["hit512", "turn"];

/// Lets every contender that can be read while it is written do both.
pub fn measure(spec: &Spec, plan: Plan, seed: u64, findings: &mut Findings) {
    let label = spec.label.as_str();
    let mut run = Run::start(spec, plan.field, seed, no_gauge);
    run.fill(spec);
    let mut classes = questions::classes(&mut run.workload, plan.questions, seed);
    classes.retain(|class| ASKED.contains(&class.name));
    let mut chunks = Vec::new();
    let mut named = 0;
    while named < WRITTEN
        && let Some(events) = workload::next_chunk(&mut run.workload, CHUNK, |_| false)
    {
        named += events.iter().map(Event::blocks).sum::<usize>();
        chunks.push(events);
    }
    for at in run.table.in_turn() {
        let contender = run.table.seats[at].contender.as_mut();
        for keys in [Keys::Content, Keys::Sequence] {
            // The same events cannot be applied twice: both kinds of question share them.
            let half = chunks.len() / 2;
            let share = if keys == Keys::Content { &chunks[..half] } else { &chunks[half..] };
            let asked = if contender.uses_sequences() { keys } else { Keys::Content };
            one_contender(contender, &run.workload.fleet().blocks, share, &classes, asked, label, findings);
        }
    }
    let scenario = format!("after writes beside reads, {label}");
    let classes = questions::classes(&mut run.workload, 100, seed + 1);
    queries::check(&mut run.table, &run.workload, &classes, &scenario, findings);
}

fn one_contender(
    contender: &mut dyn Contender,
    blocks: &Blocks,
    chunks: &[Vec<Event>],
    classes: &[Class],
    keys: Keys,
    label: &str,
    findings: &mut Findings,
) {
    let Some(mut reader) = contender.reader() else {
        // It follows, so that its answers can be checked with the others'.
        for events in chunks {
            contender.load(blocks, events);
            contender.apply();
        }
        return;
    };
    let (writing, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (mut nanos, mut named) = (0, 0);
    let mut times = std::thread::scope(|scope| {
        let reading = scope.spawn(|| read_while(reader.as_mut(), classes, keys, &writing, &over));
        for events in chunks {
            contender.load(blocks, events);
            writing.store(true, Ordering::SeqCst);
            nanos += contender.apply();
            writing.store(false, Ordering::SeqCst);
            named += events.iter().map(Event::blocks).sum::<usize>();
        }
        over.store(true, Ordering::SeqCst);
        reading.join().unwrap_or_default()
    });
    if times.is_empty() {
        return;
    }
    let name = contender.name();
    findings.add("one writer + one reader, writes (ns per block)", label, name, nanos as f64 / named as f64);
    let kind = if keys == Keys::Content { "content" } else { "sequence" };
    for (percent, share) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
        let measure = format!("one writer + one reader, query {percent}, {kind} hashes (ns)");
        findings.add(measure, label, name, percentile(&mut times, share) as f64);
    }
}

/// Latencies of the questions that began and ended while the writer wrote.
fn read_while(
    reader: &mut dyn Ask,
    classes: &[Class],
    keys: Keys,
    writing: &AtomicBool,
    over: &AtomicBool,
) -> Vec<u64> {
    let mut times = Vec::with_capacity(1 << 20);
    let questions: Vec<&Question> = classes.iter().flat_map(|class| &class.questions).collect();
    let mut next = 0;
    while !over.load(Ordering::SeqCst) && !questions.is_empty() {
        // Strides over all classes.
        next = (next + 7) % questions.len();
        reader.pose(questions[next], keys);
        let before = writing.load(Ordering::SeqCst);
        let start = Instant::now();
        reader.ask();
        let time = start.elapsed().as_nanos() as u64;
        if before && writing.load(Ordering::SeqCst) && times.len() < times.capacity() {
            times.push(time);
        }
    }
    times
}

/// What clearing a rank cost, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clear {
    /// From the moment before the call until a reader on another thread no longer saw the rank; for a contender
    /// that no other thread can read, until the call returned.
    pub invisible: f64,
    /// CPU time of the call and of what it put off.
    pub done: f64,
}

/// Clears `rank`, which was loaded and has an answer for `question`.
pub fn clear_beside_a_reader(contender: &mut dyn Contender, question: &Question, rank: u32) -> Clear {
    let origin = Instant::now();
    let Some(mut reader) = contender.reader() else {
        let done = contender.apply();
        let invisible = micros(origin.elapsed().as_nanos() as u64);
        return Clear { invisible, done: micros(done + contender.settle()) };
    };
    let (ready, gone) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut answer = Vec::new();
            let mut seen = true;
            while seen {
                reader.pose(question, Keys::Content);
                reader.ask();
                reader.answer(&mut answer);
                seen = answer.iter().any(|&(of, reach)| of == rank && reach > 0);
                ready.store(true, Ordering::SeqCst);
                // Who never forgets the rank is caught by the check of answers, not by waiting for ever.
                seen &= origin.elapsed().as_secs() < 2;
            }
            gone.store(origin.elapsed().as_nanos() as u64, Ordering::SeqCst);
        });
        while !ready.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
        let begun = origin.elapsed().as_nanos() as u64;
        let done = contender.apply();
        let done = done + contender.settle();
        while gone.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let invisible = gone.load(Ordering::SeqCst).saturating_sub(begun);
        Clear { invisible: micros(invisible), done: micros(done) }
    })
}

/// A short question that the rank has an answer for.
pub fn question_for(workload: &Workload, rank: u32) -> Option<Question> {
    let fleet = workload.fleet();
    let path = workload.live().into_iter().find(|path| fleet.reach(rank, path) > 0)?;
    Some(Question::new(fleet, path[..1].to_vec()))
}

fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1e3
}

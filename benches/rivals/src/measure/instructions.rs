//! Instructions per event block and per query, counted by valgrind's callgrind on a child process: they repeat
//! exactly, whatever else the machine does.

use std::path::PathBuf;
use std::process::Command;

use super::serving::Run;
use super::{CHUNK, Spec, no_gauge};
use crate::contender::{self, Contender, Field, Keys};
use crate::samples::Findings;
use crate::workload::blocks::Event;
use crate::workload::{self, questions};

/// Ranks and entries: small, since callgrind makes everything fifty times slower.
const RANKS: u32 = 64;
const ENTRIES: usize = 150_000;
/// Blocks that are stored and evicted under the counter.
const BLOCKS: usize = 100_000;
/// Questions per class under the counter.
const QUESTIONS: usize = 200;
/// What is counted; the last ones by the class of their questions.
const CALLS: [&str; 4] = ["events", "hit512", "turn", "miss0"];
/// Contenders whose calls run on the calling thread. The concurrent tree's events do not: callgrind's switch
/// belongs to a thread.
const COUNTED: [&str; 3] = ["rankwise", "SMG ChainIndex", "Dynamo RadixTree"];

/// Counts for everyone, or notes why not.
pub fn count(findings: &mut Findings) {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        findings.notes.push(format!("no instruction counts: valgrind cannot be run ({error})"));
        return;
    }
    let mut jobs: Vec<(&str, &str)> = Vec::new();
    for name in COUNTED {
        jobs.extend(CALLS.iter().map(|call| (name, *call)));
    }
    jobs.extend(CALLS[1..].iter().map(|call| ("Dynamo CRTC", *call)));
    // Two cores: two at a time, since counts do not feel each other.
    for pair in jobs.chunks(2) {
        let counts: Vec<_> = std::thread::scope(|scope| {
            let running: Vec<_> =
                pair.iter().map(|&(name, call)| scope.spawn(move || under_callgrind(name, call))).collect();
            running.into_iter().map(|job| job.join().unwrap_or_else(|_| Err("a panic".to_owned()))).collect()
        });
        for (&(name, call), count) in pair.iter().zip(counts) {
            match count {
                Ok(count) => findings.add(measure_of(call), &label(), name, count),
                Err(error) => findings.notes.push(format!("no instructions of {name}, {call}: {error}")),
            }
        }
    }
}

fn label() -> String {
    format!("{RANKS} ranks, {} k entries", ENTRIES / 1_000)
}

fn measure_of(call: &str) -> String {
    match call {
        "events" => "instructions per event block".to_owned(),
        class => format!("instructions per query, {class}"),
    }
}

/// Runs this program again under callgrind; instructions per block or query.
fn under_callgrind(name: &str, call: &str) -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let out: PathBuf =
        std::env::temp_dir().join(format!("rivals-{}-{}", std::process::id(), name.len() * 31 + call.len()));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*counted_call*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["--counted", name, call])
        .output()
        .map_err(|error| error.to_string())?;
    let _ = std::fs::remove_file(out);
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(errors.lines().last().unwrap_or("it failed").to_owned());
    }
    // "==123== Collected : 456789"
    let collected =
        errors.lines().find_map(|line| line.split_once("Collected : ")).map(|(_, count)| count.trim());
    let collected: f64 = collected.and_then(|count| count.parse().ok()).ok_or("no count")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let units: f64 = text.trim().parse().map_err(|_| "the child said no number".to_owned())?;
    if collected == 0.0 {
        return Err("the counted call was not found; were the symbols stripped?".to_owned());
    }
    Ok(collected / units)
}

/// The child's part: does what is counted, and prints how many blocks or questions it was.
///
/// # Errors
///
/// When there is no such contender or call.
pub fn child(name: &str, call: &str) -> Result<usize, String> {
    let spec = Spec::traffic(RANKS, ENTRIES, BLOCKS);
    let mut run = Run::start(&spec, Field::Best, 1, no_gauge);
    // Only this one: the others would only take time.
    let contender = contender::named(name, RANKS).ok_or("no such contender")?;
    run.table = super::Table::of(vec![contender]);
    run.fill(&spec);
    if call == "events" {
        return Ok(count_events(&mut run));
    }
    let classes = questions::classes(&mut run.workload, QUESTIONS, 1);
    let class = classes.into_iter().find(|class| class.name == call).ok_or("no such class of questions")?;
    let contender = run.table.seats[0].contender.as_mut();
    for question in &class.questions {
        contender.pose(question, Keys::Content);
        counted_call_to_ask(contender);
    }
    Ok(class.questions.len())
}

fn count_events(run: &mut Run) -> usize {
    let mut blocks = 0;
    let contender = run.table.seats[0].contender.as_mut();
    while blocks < BLOCKS
        && let Some(events) = workload::next_chunk(&mut run.workload, CHUNK, |_| false)
    {
        blocks += events.iter().map(Event::blocks).sum::<usize>();
        contender.load(&run.workload.fleet().blocks, &events);
        counted_call_to_apply(contender);
    }
    blocks
}

/// Callgrind counts inside this function: it is found by its name.
#[inline(never)]
fn counted_call_to_ask(contender: &mut dyn Contender) {
    contender.ask();
    // Not a tail call, so that this function is still there when the call ends.
    std::hint::black_box(contender.name());
}

/// The same for events.
#[inline(never)]
fn counted_call_to_apply(contender: &mut dyn Contender) {
    contender.apply();
    std::hint::black_box(contender.name());
}

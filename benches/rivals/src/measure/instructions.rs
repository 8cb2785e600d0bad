//! Instructions per event block and per query, counted by valgrind's callgrind on a child process: they repeat
//! exactly, whatever else the machine does.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::serving::Run;
use super::{CHUNK, Spec, Table, no_gauge};
use crate::contender::{self, Contender, Field, Keys};
use crate::samples::Findings;
use crate::workload::blocks::Event;
use crate::workload::{self, questions};

/// Ranks and entries: as small as the mix of events allows, since callgrind makes everything fifty times slower.
const RANKS: u32 = 64;
const ENTRIES: usize = 500_000;
/// Blocks that are stored and evicted under the counter.
const BLOCKS: usize = 100_000;
/// Questions per class under the counter.
const QUESTIONS: usize = 200;
/// Classes of questions that are counted; then events are, last, since they change what is asked.
const CLASSES: [&str; 3] = ["hit512", "turn", "miss0"];
/// Who is counted.
const COUNTED: [&str; 4] = ["rankwise", "SMG ChainIndex", "Dynamo RadixTree", THREADED];
/// Applies events on a thread of its own, where callgrind's switch is off.
const THREADED: &str = "Dynamo CRTC";

/// Counts for everyone, or notes why not.
pub fn count(findings: &mut Findings) {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        findings.note(format!("no instruction counts: valgrind cannot be run ({error})"));
        return;
    }
    // Two at a time: counts do not feel each other.
    for pair in COUNTED.chunks(2) {
        let counts: Vec<_> = std::thread::scope(|scope| {
            let running: Vec<_> =
                pair.iter().map(|&name| scope.spawn(move || under_callgrind(name))).collect();
            running.into_iter().map(|job| job.join().unwrap_or_else(|_| Err("a panic".to_owned()))).collect()
        });
        for (&name, counts) in pair.iter().zip(counts) {
            match counts {
                Ok(counts) => note_counts(name, &counts, findings),
                Err(error) => findings.note(format!("no instructions of {name}: {error}")),
            }
        }
    }
}

fn note_counts(name: &str, counts: &[f64], findings: &mut Findings) {
    let classes = CLASSES.iter().map(|class| format!("instructions per query, {class}"));
    let measures = classes.chain(["instructions per event block".to_owned()]);
    for (measure, &count) in measures.zip(counts) {
        if !(name == THREADED && measure.ends_with("block")) {
            findings.add(measure, &label(), name, count);
        }
    }
}

fn label() -> String {
    format!("{RANKS} ranks, {} k entries", ENTRIES / 1_000)
}

/// Runs this program again under callgrind; instructions per query of each class, then per block.
fn under_callgrind(name: &str) -> Result<Vec<f64>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    // Unlike any other contender's of this process.
    let out = std::env::temp_dir().join(format!("rivals-{}-{}", std::process::id(), name.replace(' ', "-")));
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*counted_call*"])
        .arg("--dump-after=*end_of_part*")
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(program)
        .args(["--counted", name])
        .output()
        .map_err(|error| error.to_string())?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let units = String::from_utf8_lossy(&output.stdout);
    let counts = units.lines().enumerate().map(|(part, units)| {
        let units: f64 = units.parse().map_err(|_| format!("the child said {units}"))?;
        Ok(total(&out, part + 1)? / units)
    });
    let counts: Result<Vec<f64>, String> = counts.collect();
    for part in 0..=CLASSES.len() + 1 {
        let _ = fs::remove_file(part_file(&out, part));
    }
    if !output.status.success() {
        return Err(errors.lines().last().unwrap_or("it failed").to_owned());
    }
    counts
}

/// The file of one part of the run; the last, unnumbered one is of what comes after all parts.
fn part_file(out: &Path, part: usize) -> PathBuf {
    match part {
        0 => out.to_owned(),
        part => PathBuf::from(format!("{}.{part}", out.display())),
    }
}

/// The instructions that were counted in one part: its file says `totals: N`.
fn total(out: &Path, part: usize) -> Result<f64, String> {
    let path = part_file(out, part);
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let total = text.lines().rev().find_map(|line| line.strip_prefix("totals:"));
    let total: f64 = total.and_then(|total| total.trim().parse().ok()).ok_or("no total")?;
    // Every part calls what is counted.
    if total == 0.0 {
        Err("the counted call was not found; were the symbols stripped?".to_owned())
    } else {
        Ok(total)
    }
}

/// The child's part: does what is counted, and prints how many questions or blocks each part had.
///
/// # Errors
///
/// When there is no such contender.
pub fn child(name: &str) -> Result<(), String> {
    let spec = Spec::traffic(RANKS, ENTRIES, BLOCKS);
    let mut run = Run::start(&spec, Field::Best, 1, no_gauge);
    // Only this one: the others would only take time.
    let contender = contender::named(name, RANKS).ok_or("no such contender")?;
    run.table = Table::of(vec![contender]);
    run.fill(&spec);
    let classes = questions::classes(&mut run.workload, QUESTIONS, 1);
    for name in CLASSES {
        let contender = run.table.seats[0].contender.as_mut();
        let asked = classes.iter().filter(|class| class.name == name).flat_map(|class| &class.questions);
        let mut questions = 0;
        for question in asked {
            contender.pose(question, Keys::Content);
            counted_call_to_ask(contender);
            questions += 1;
        }
        println!("{questions}");
        end_of_part();
    }
    println!("{}", count_events(&mut run));
    end_of_part();
    Ok(())
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

/// Callgrind writes its counts down and begins anew when this is left.
#[inline(never)]
fn end_of_part() {
    std::hint::black_box(());
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

//! Runs everyone and prints one table of ratios.

use std::fs;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use rivals::measure::{histories, instructions, serving, side_by_side, wire};
use rivals::plan::{Options, USAGE};
use rivals::report::{Report, Setting};
use rivals::samples::Findings;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(wrong) => {
            eprintln!("rivals: {wrong} wrong answers of rankwise");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("rivals: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what was asked for; the number of wrong answers of ours.
fn run(options: &Options) -> Result<u64, String> {
    if let Some(name) = &options.counted {
        instructions::child(name)?;
        return Ok(0);
    }
    let mut findings = Findings::default();
    let start = Instant::now();
    let say = |what: &str| eprintln!("[{:4} s] {what}", start.elapsed().as_secs());
    let workloads = options.workloads().map_err(|error| format!("the trace: {error}"))?;
    for round in 0..options.rounds() {
        for (spec, plan) in &workloads {
            say(&format!("round {}: {}", round + 1, spec.label));
            serving::timings(spec, *plan, 1 + round as u64, &mut findings);
        }
        for (spec, plan) in &options.side_by_side() {
            say(&format!("round {}: side by side, {}", round + 1, spec.label));
            side_by_side::measure(spec, *plan, 1 + round as u64, &mut findings);
        }
        if let Some(spec) = options.wire() {
            say(&format!("round {}: wire to index, {}", round + 1, spec.label));
            wire::measure(&spec, 1 + round as u64, &mut findings)?;
        }
    }
    if options.wants("instructions") && !options.ten_million {
        say("instructions");
        instructions::count(&mut findings);
    }
    for (spec, _) in &workloads {
        say(&format!("live bytes and allocations, {}", spec.label));
        weigh(options, &spec.label, &mut findings);
    }
    if options.wants("histories") && !options.ten_million {
        say("histories");
        histories::count(&mut findings);
    }
    say("done");
    let report = Report::new(&findings, setting());
    print!("{}", report.text(options.every_row));
    if let Some(path) = &options.json {
        let json = report.json().map_err(|error| error.to_string())?;
        fs::write(path, json).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(report.wrong_answers())
}

/// Lets processes with the counting allocator do their part: one per workload, since memory that an index gives
/// back late must not be taken for another's.
fn weigh(options: &Options, workload: &str, findings: &mut Findings) {
    match heap_findings(options, workload) {
        Ok(heap) => findings.merge(heap),
        Err(error) => findings.note(format!("no live bytes, no allocations on {workload}: {error}")),
    }
}

fn heap_findings(options: &Options, workload: &str) -> Result<Findings, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?.with_file_name("rivals-heap");
    let mut command = Command::new(&program);
    command.args(["--weighed", workload]);
    if options.quick {
        command.arg("--quick");
    }
    if options.ten_million {
        command.arg("--ten-million");
    }
    if let Some(trace) = &options.trace {
        command.arg("--trace").arg(trace);
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{} cannot be run: {error}", program.display()))?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", program.display(), output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
}

fn setting() -> Setting {
    let date = Command::new("date").args(["-u", "+%FT%TZ"]).output();
    let date = date.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let field = |file: &str, key: &str| {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let machine = format!(
        "{}, {cores} cores, {} of memory",
        field("/proc/cpuinfo", "model name"),
        field("/proc/meminfo", "MemTotal"),
    );
    let args: Vec<String> = std::env::args().skip(1).collect();
    Setting {
        date: date.unwrap_or_default(),
        machine,
        command: format!("scripts/rivals.sh {}", args.join(" ")),
    }
}

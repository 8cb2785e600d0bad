//! Live bytes and allocations of everyone on one workload, in a process whose allocator counts. Prints its
//! findings as JSON.

use std::alloc::System;
use std::process::ExitCode;

use rivals::measure::{Heap, serving};
use rivals::plan::Options;
use rivals::samples::Findings;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> ExitCode {
    match weigh() {
        Ok(json) => {
            println!("{json}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("rivals-heap: {error}");
            ExitCode::FAILURE
        }
    }
}

fn weigh() -> Result<String, String> {
    let options = Options::parse(std::env::args().skip(1))?;
    let mut findings = Findings::default();
    for (spec, plan) in options.workloads().map_err(|error| error.to_string())? {
        let plan = serving::Plan { questions: plan.questions.min(200), ..plan };
        serving::weights(&spec, plan, 1, heap, &mut findings);
    }
    serde_json::to_string(&findings).map_err(|error| error.to_string())
}

fn heap() -> Heap {
    let stats = ALLOCATOR.stats();
    // A reallocation's growth is counted in the bytes already.
    let live = stats.bytes_allocated as i64 - stats.bytes_deallocated as i64;
    Heap { live, allocations: (stats.allocations + stats.reallocations) as u64 }
}

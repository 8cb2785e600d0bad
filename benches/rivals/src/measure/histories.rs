//! Wrong answers under the histories that mislead, counted.

use super::Table;
use crate::contender::{self, Field, Keys};
use crate::samples::Findings;
use crate::workload::history::{History, RANKS, Scenario};
use crate::workload::questions::Question;

/// Forests per scenario, each with contenders of its own.
const FORESTS: u64 = 30;
/// Times per forest that something happens and questions are asked.
const STEPS: usize = 300;
/// Questions after each.
const QUESTIONS: usize = 3;

/// Counts the wrong answers of everyone in every scenario.
pub fn count(findings: &mut Findings) {
    for scenario in Scenario::ALL {
        for seed in 0..FORESTS {
            one_forest(scenario, seed, findings);
        }
    }
}

fn one_forest(scenario: Scenario, seed: u64, findings: &mut Findings) {
    let mut history = History::new(scenario, seed);
    let mut table = Table::of(contender::field(Field::Histories, RANKS));
    let mut answer = Vec::new();
    for _ in 0..STEPS {
        let mut events = Vec::new();
        (0..4).for_each(|_| history.step(&mut events));
        table.feed(&history.blocks, &events);
        for _ in 0..QUESTIONS {
            let path = history.prompt();
            let truth = history.truth(&path);
            let locals = path.iter().map(|&block| history.blocks.local(block)).collect();
            let sequences = path.iter().map(|&block| history.blocks.sequence(block)).collect();
            let question = Question { path, locals, sequences };
            for seat in &mut table.seats {
                let contender = seat.contender.as_mut();
                contender.pose(&question, Keys::Content);
                contender.ask();
                contender.answer(&mut answer);
                findings.check(scenario.name(), contender.name(), &truth, &answer);
                if contender.uses_sequences() {
                    contender.pose(&question, Keys::Sequence);
                    contender.ask();
                    contender.answer(&mut answer);
                    findings.check(scenario.name(), contender.name(), &truth, &answer);
                }
            }
        }
    }
}

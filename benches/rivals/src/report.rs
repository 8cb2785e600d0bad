//! Rows, goals, the table and the JSON.

use std::fmt::Write;

use serde::Serialize;

use crate::samples::{Findings, Sample};

/// Who the rows are about.
const OURS: &str = "rankwise";

/// One measure of ours beside one rival's.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What, with its unit.
    pub measure: String,
    /// On which workload.
    pub workload: String,
    /// Ours; `None` if it could not be measured.
    pub rankwise: Option<f64>,
    /// Theirs; `None` if they have no such thing.
    pub rival: Option<f64>,
    /// Who.
    pub rival_name: String,
    /// Ours by theirs; lower is better.
    pub ratio: Option<f64>,
    /// What the ratio, or our own value, is to be at most.
    pub goal: Option<f64>,
    /// Whether it is.
    pub reached: Option<bool>,
}

/// One count of wrong answers.
#[derive(Clone, Debug, Serialize)]
pub struct Exactness {
    /// Which history or workload.
    pub scenario: String,
    /// Whose answers.
    pub contender: String,
    /// How many.
    pub queries: u64,
    /// Of these, how many credit some rank with too much.
    pub over: u64,
    /// And how many with too little.
    pub under: u64,
}

/// Where and how it was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Setting {
    /// UTC.
    pub date: String,
    /// Processor, cores and memory.
    pub machine: String,
    /// As given by the user.
    pub command: String,
}

/// Everything, as the JSON holds it.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    #[serde(flatten)]
    setting: Setting,
    rows: Vec<Row>,
    exactness: Vec<Exactness>,
    notes: Vec<String>,
}

/// What is asked of a ratio, or of our value alone.
struct Goal {
    measure: &'static str,
    /// Only on workloads that start so.
    workload: &'static str,
    /// `None` for our own value.
    rival: Option<&'static str>,
    most: f64,
}

const SMG: Option<&str> = Some("SMG ChainIndex");
const RADIX_TREE: Option<&str> = Some("Dynamo RadixTree");

const fn goal(measure: &'static str, workload: &'static str, rival: Option<&'static str>, most: f64) -> Goal {
    Goal { measure, workload, rival, most }
}

/// Compared by the start of the measure's name.
const GOALS: &[Goal] = &[
    goal("churn (ns per block)", "64 ranks", SMG, 0.40),
    goal("churn (ns per block)", "256 ranks", SMG, 0.40),
    goal("churn (ns per block)", "8 ranks, 1 M", SMG, 0.60),
    goal("churn (ns per block)", "public trace", SMG, 0.60),
    goal("churn (ns per block)", "made-up trace", SMG, 0.60),
    goal("one-block churn (ns per block)", "", SMG, 0.35),
    goal("instructions per event block", "", SMG, 0.25),
    goal("query hit512 p50, content", "", SMG, 0.60),
    goal("query hit2048 p50, content", "", SMG, 0.60),
    goal("query turn p50, content", "", SMG, 0.60),
    goal("query hit512 p99, content", "", SMG, 0.70),
    goal("query hit2048 p99, content", "", SMG, 0.70),
    goal("query turn p99, content", "", SMG, 0.70),
    goal("query hit2048 p50, sequence", "", SMG, 0.20),
    goal("allocations per query", "", None, 0.0),
    goal("live bytes per entry after churn", "", SMG, 0.45),
    goal("bytes per entry after 40 % drain / before", "", None, 1.25),
    goal("left after clearing all / peak", "", None, 0.05),
    goal("one writer + one reader, writes", "", SMG, 0.60),
    goal("one writer + one reader, query p99, content", "", SMG, 0.65),
    goal("query hit512 p50 at 256 ranks / at 8", "", None, 1.5),
    goal("clear a rank, until invisible (us)", "256 ranks, 10 M", None, 10.0),
    goal("wire to index", "", RADIX_TREE, 0.25),
    goal("wire to index", "", Some("Dynamo CRTC"), 0.25),
];

impl Report {
    /// Puts medians beside each other.
    pub fn new(findings: &Findings, setting: Setting) -> Self {
        let mut medians = findings.medians();
        add_rank_scaling(&mut medians);
        let mut rows = Vec::new();
        for ours in medians.iter().filter(|sample| sample.contender == OURS) {
            rows.extend(rows_of(ours, &medians));
        }
        // What rivals can do and we cannot is told, too.
        for theirs in medians.iter().filter(|sample| sample.contender != OURS) {
            let same = |row: &Row| row.measure == theirs.measure && row.workload == theirs.workload;
            if !rows.iter().any(|row| same(row) && row.rival_name == theirs.contender) {
                rows.push(row(None, Some(theirs), &theirs.measure, &theirs.workload, &theirs.contender));
            }
        }
        Self { setting, rows, exactness: in_order(findings), notes: findings.notes.clone() }
    }

    /// The JSON text.
    ///
    /// # Errors
    ///
    /// Never, for what a report holds.
    pub fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }

    /// Wrong answers of ours, over all scenarios.
    pub fn wrong_answers(&self) -> u64 {
        let ours = self.exactness.iter().filter(|count| count.contender == OURS);
        ours.map(|count| count.over + count.under).sum()
    }

    /// The tables for a terminal: every row, or those that say most.
    pub fn text(&self, every_row: bool) -> String {
        let mut text = String::new();
        let Setting { date, machine, command } = &self.setting;
        let _ = writeln!(text, "{date}\n{machine}\n{command}\n");
        self.ratios(every_row, &mut text);
        self.wrong(&mut text);
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        text
    }

    fn ratios(&self, every_row: bool, text: &mut String) {
        let mut rivals: Vec<&str> = Vec::new();
        for row in self.rows.iter().filter(|row| !row.rival_name.is_empty()) {
            if !rivals.contains(&row.rival_name.as_str()) {
                rivals.push(&row.rival_name);
            }
        }
        let mut lines = vec![vec!["workload".to_owned(), "measure".to_owned(), OURS.to_owned()]];
        lines[0].extend(rivals.iter().map(|rival| format!("/ {rival}")));
        lines[0].extend(["goal".to_owned(), "reached".to_owned()]);
        let mut done: Vec<(&str, &str)> = Vec::new();
        for first in self.rows.iter().filter(|row| every_row || says_much(row)) {
            let key = (first.workload.as_str(), first.measure.as_str());
            if done.contains(&key) {
                continue;
            }
            done.push(key);
            let same: Vec<&Row> =
                self.rows.iter().filter(|row| (row.workload.as_str(), row.measure.as_str()) == key).collect();
            let ours = first.rankwise.map_or("none".to_owned(), number);
            let mut line = vec![key.0.to_owned(), key.1.to_owned(), ours];
            for rival in &rivals {
                let row = same.iter().find(|row| row.rival_name == *rival);
                line.push(match row {
                    Some(Row { ratio: Some(ratio), .. }) => format!("{ratio:.2}"),
                    // No ratio to nothing: their value.
                    Some(Row { rival: Some(rival), .. }) => format!("({})", number(*rival)),
                    _ => "-".to_owned(),
                });
            }
            let goals: Vec<&&Row> = same.iter().filter(|row| row.goal.is_some()).collect();
            let goal = goals.first().and_then(|row| row.goal);
            line.push(goal.map_or(String::new(), |goal| format!("<= {goal}")));
            line.push(match goals.iter().all(|row| row.reached == Some(true)) {
                _ if goals.is_empty() => String::new(),
                true => "yes".to_owned(),
                false => "NO".to_owned(),
            });
            lines.push(line);
        }
        aligned(&lines, text);
    }

    fn wrong(&self, text: &mut String) {
        let mut lines =
            vec![["scenario", "contender", "queries", "over", "under", "wrong"].map(str::to_owned).to_vec()];
        for count in &self.exactness {
            let wrong = (count.over + count.under) as f64 / count.queries.max(1) as f64;
            lines.push(vec![
                count.scenario.clone(),
                count.contender.clone(),
                count.queries.to_string(),
                count.over.to_string(),
                count.under.to_string(),
                format!("{:.1} %", wrong.min(1.0) * 100.0),
            ]);
        }
        aligned(&lines, text);
    }
}

/// Scenarios as they came, ours first in each.
fn in_order(findings: &Findings) -> Vec<Exactness> {
    let counts = &findings.exactness;
    let first = |wanted: &str| counts.iter().position(|(scenario, ..)| scenario == wanted);
    let mut order: Vec<_> = counts.iter().collect();
    order.sort_by_key(|(scenario, contender, _)| (first(scenario), contender != OURS, contender.as_str()));
    let exactness = order.into_iter().map(|(scenario, contender, tally)| Exactness {
        scenario: scenario.clone(),
        contender: contender.clone(),
        queries: tally.queries,
        over: tally.over,
        under: tally.under,
    });
    exactness.collect()
}

/// Our value beside everyone's.
fn rows_of(ours: &Sample, medians: &[Sample]) -> Vec<Row> {
    // Nobody else takes sequence hashes: their answer to the same prompt is by content.
    let theirs = ours.measure.replace("sequence hashes", "content hashes");
    let rivals: Vec<&Sample> = medians
        .iter()
        .filter(|sample| sample.contender != OURS)
        .filter(|sample| sample.workload == ours.workload && sample.measure == theirs)
        .collect();
    let Sample { measure, workload, .. } = ours;
    if rivals.is_empty() {
        return vec![row(Some(ours), None, measure, workload, "")];
    }
    rivals
        .into_iter()
        .map(|rival| row(Some(ours), Some(rival), measure, workload, &rival.contender))
        .collect()
}

fn row(ours: Option<&Sample>, rival: Option<&Sample>, measure: &str, workload: &str, name: &str) -> Row {
    let (ours, rival) = (ours.map(|sample| sample.value), rival.map(|sample| sample.value));
    let ratio = match (ours, rival) {
        (Some(ours), Some(rival)) if rival != 0.0 => Some(ours / rival),
        _ => None,
    };
    let goal = GOALS.iter().find(|goal| {
        measure.starts_with(goal.measure)
            && workload.starts_with(goal.workload)
            && goal.rival.is_none_or(|rival| rival == name)
            // Told once, not once per rival.
            && (goal.rival.is_some() || name.is_empty() || Some(name) == SMG)
    });
    let compared = match goal {
        Some(Goal { rival: Some(_), .. }) => ratio,
        Some(Goal { rival: None, .. }) => ours,
        None => None,
    };
    Row {
        measure: measure.to_owned(),
        workload: workload.to_owned(),
        rankwise: ours,
        rival,
        rival_name: name.to_owned(),
        ratio,
        goal: goal.map(|goal| goal.most),
        reached: goal.and_then(|goal| compared.map(|value| value <= goal.most)),
    }
}

/// How much slower the same question is on more ranks.
fn add_rank_scaling(medians: &mut Vec<Sample>) {
    let value_at = |workload: &str, contender: &str| {
        let found = medians.iter().find(|sample| {
            sample.measure == "query hit512 p50, content hashes (ns)"
                && sample.workload.starts_with(workload)
                && sample.contender == contender
        });
        found.map(|sample| sample.value)
    };
    let mut contenders: Vec<String> = Vec::new();
    for sample in medians.iter() {
        if !contenders.contains(&sample.contender) {
            contenders.push(sample.contender.clone());
        }
    }
    let scalings: Vec<Sample> = contenders
        .into_iter()
        .filter_map(|contender| {
            let value = value_at("256 ranks", &contender)? / value_at("8 ranks, 1 M", &contender)?;
            let (measure, workload) =
                ("query hit512 p50 at 256 ranks / at 8".to_owned(), "rank scaling".to_owned());
            Some(Sample { measure, workload, contender, value })
        })
        .collect();
    medians.extend(scalings);
}

/// Rows with a goal, everything that is no query, and the queries' medians.
fn says_much(row: &Row) -> bool {
    let median = row.measure.contains("p50, content");
    row.goal.is_some() || median || !row.measure.starts_with("query ")
}

fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value.abs() < 10.0 => format!("{value:.2}"),
        value if value.abs() < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// Columns as wide as their widest cell.
fn aligned(lines: &[Vec<String>], text: &mut String) {
    let columns = lines.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for line in lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        let joined = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(text, "{}", joined.trim_end());
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn report(values: &[(&str, &str, f64)]) -> Report {
        let mut findings = Findings::default();
        for (measure, contender, value) in values {
            findings.add(*measure, "64 ranks, 1 M entries", contender, *value);
        }
        Report::new(&findings, Setting::default())
    }

    #[test]
    fn a_goal_is_compared_with_the_ratio_to_its_rival() {
        let of = |ours| {
            let report = report(&[
                ("churn (ns per block)", OURS, ours),
                ("churn (ns per block)", "SMG ChainIndex", 100.0),
                ("churn (ns per block)", "Dynamo CRTC", 1.0),
            ]);
            report.rows.iter().map(|row| row.reached).collect::<Vec<_>>()
        };
        assert_eq!(of(40.0), [Some(true), None]);
        assert_eq!(of(41.0), [Some(false), None]);
    }

    #[test]
    fn sequence_hashes_are_compared_with_their_answer_by_content() {
        let report = report(&[
            ("query hit2048 p50, sequence hashes (ns)", OURS, 10.0),
            ("query hit2048 p50, content hashes (ns)", "SMG ChainIndex", 100.0),
        ]);
        assert_eq!(report.rows[0].ratio, Some(0.1));
        assert_eq!(report.rows[0].reached, Some(true));
    }

    #[test]
    fn the_median_of_the_rounds_counts() {
        let churn = "churn (ns per block)";
        let report = report(&[(churn, OURS, 1.0), (churn, OURS, 50.0), (churn, OURS, 2.0)]);
        assert_eq!(report.rows.len(), 1);
        assert_eq!(report.rows[0].rankwise, Some(2.0));
    }
}

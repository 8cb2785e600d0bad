//! Measured values and counted answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One measured value.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// What was measured, with its unit.
    pub measure: String,
    /// On which workload.
    pub workload: String,
    /// Of whom.
    pub contender: String,
    /// The value; lower is better.
    pub value: f64,
}

/// How many answers were wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Questions asked.
    pub queries: u64,
    /// Answers that credit some rank with more than it holds.
    pub over: u64,
    /// Answers that credit some rank with less than it holds.
    pub under: u64,
}

/// Everything that was found out.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Findings {
    /// Values, several per key when there were several rounds.
    pub samples: Vec<Sample>,
    /// Wrong answers by scenario and contender.
    pub exactness: Vec<(String, String, Tally)>,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
}

impl Findings {
    /// Adds a value.
    pub fn add(&mut self, measure: impl Into<String>, workload: &str, contender: &str, value: f64) {
        let (workload, contender) = (workload.to_owned(), contender.to_owned());
        self.samples.push(Sample { measure: measure.into(), workload, contender, value });
    }

    /// Adds a remark, once.
    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Compares an answer with the truth.
    pub fn check(&mut self, scenario: &str, contender: &str, truth: &[(u32, u32)], answer: &[(u32, u32)]) {
        let known = self.exactness.iter().position(|(of, by, _)| of == scenario && by == contender);
        let at = known.unwrap_or_else(|| {
            self.exactness.push((scenario.to_owned(), contender.to_owned(), Tally::default()));
            self.exactness.len() - 1
        });
        let tally = &mut self.exactness[at].2;
        tally.queries += 1;
        let (over, under) = compare(truth, answer);
        tally.over += u64::from(over);
        tally.under += u64::from(under);
    }

    /// Adds what another process found out.
    pub fn merge(&mut self, other: Self) {
        self.samples.extend(other.samples);
        self.exactness.extend(other.exactness);
        self.notes.extend(other.notes);
    }

    /// The median of every measure, by measure, workload and contender, in the order of their first samples.
    pub fn medians(&self) -> Vec<Sample> {
        let mut values: BTreeMap<(&str, &str, &str), (usize, Vec<f64>)> = BTreeMap::new();
        for (at, Sample { measure, workload, contender, value }) in self.samples.iter().enumerate() {
            let key = (measure.as_str(), workload.as_str(), contender.as_str());
            values.entry(key).or_insert((at, Vec::new())).1.push(*value);
        }
        let mut medians: Vec<_> = values
            .into_iter()
            .map(|((measure, workload, contender), (at, mut values))| {
                let (measure, workload) = (measure.to_owned(), workload.to_owned());
                let value = percentile(&mut values, 0.5);
                (at, Sample { measure, workload, contender: contender.to_owned(), value })
            })
            .collect();
        medians.sort_by_key(|&(at, _)| at);
        medians.into_iter().map(|(_, sample)| sample).collect()
    }
}

/// Whether an answer says too much of some rank, and whether too little. Both lists name a rank once.
pub fn compare(truth: &[(u32, u32)], answer: &[(u32, u32)]) -> (bool, bool) {
    let sorted = |list: &[(u32, u32)]| {
        let mut list: Vec<_> = list.iter().copied().filter(|&(_, reach)| reach > 0).collect();
        list.sort_unstable();
        list
    };
    let (truth, answer) = (sorted(truth), sorted(answer));
    if truth == answer {
        return (false, false);
    }
    let reach = |list: &[(u32, u32)], rank| {
        list.binary_search_by_key(&rank, |&(rank, _)| rank).map_or(0, |at| list[at].1)
    };
    let over = answer.iter().any(|&(rank, said)| said > reach(&truth, rank));
    let under = truth.iter().any(|&(rank, held)| held > reach(&answer, rank));
    (over, under)
}

/// The value below which this share of the values lies; the values are put in order.
pub fn percentile<T: Copy + PartialOrd>(values: &mut [T], share: f64) -> T {
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    let at = (values.len() as f64 * share) as usize;
    values[at.min(values.len() - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_much_and_too_little_are_told_apart() {
        let truth = [(0, 3), (2, 5)];
        assert_eq!(compare(&truth, &[(2, 5), (0, 3)]), (false, false));
        assert_eq!(compare(&truth, &[(0, 3), (2, 5), (1, 0)]), (false, false));
        assert_eq!(compare(&truth, &[(0, 4), (2, 5)]), (true, false));
        assert_eq!(compare(&truth, &[(0, 3), (2, 5), (1, 1)]), (true, false));
        assert_eq!(compare(&truth, &[(0, 3)]), (false, true));
        assert_eq!(compare(&truth, &[(0, 9), (2, 4)]), (true, true));
    }
}

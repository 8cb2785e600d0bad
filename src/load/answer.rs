//! A load answer in one shape, whichever route it came by.

use std::collections::HashMap;
use std::sync::Arc;

use super::report::{LoadEntry, LoadReport, RawRankLoad};

/// Entries of one answer that are looked at. The largest deployments have some hundreds of ranks; what is
/// beyond this is an error or an attack.
pub const MAX_ENTRIES: usize = 4096;

/// What a source of load says, as received: nothing in here has been checked.
///
/// The three parts never mix. `entries` may become ranks' values, `aggregate` never does, and `rollup` is
/// another fleet's table, which is shown and not used.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct LoadAnswer {
    /// One engine's ranks, in the order and number in which they came.
    pub entries: Vec<LoadEntry>,
    /// Figures for all its ranks together.
    pub aggregate: Option<RawRankLoad>,
    /// Entries that carry a worker. If one of an answer's entries does, all of them stand here.
    pub rollup: Vec<RollupEntry>,
    /// When the sender says that it was made, in seconds of Unix time by its own clock.
    pub timestamp: Option<f64>,
}

/// One entry of a fleet's rollup.
#[derive(Clone, PartialEq, Debug)]
pub struct RollupEntry {
    /// The worker as the gateway names it; `None` for an entry without one beside others that have one.
    pub worker: Option<Box<str>>,
    /// What the gateway says that it is for.
    pub worker_type: Option<Box<str>>,
    /// Its rank and load.
    pub entry: LoadEntry,
}

impl LoadAnswer {
    /// An engine's answer on these ranks.
    pub fn of_ranks(entries: Vec<LoadEntry>) -> Self {
        Self { entries, ..Self::default() }
    }

    /// Whether nothing at all is said. That is *unavailable* and not *idle*.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.aggregate.is_none() && self.rollup.is_empty()
    }

    /// Whether this is another fleet's table.
    pub fn is_rollup(&self) -> bool {
        !self.rollup.is_empty()
    }

    /// The number of entries of the engine's ranks, which is the answer's `dp_rank_count` whatever the sender
    /// has written there.
    pub fn dp_rank_count(&self) -> usize {
        self.entries.len()
    }

    /// The entries that can be believed, ascending by rank: what may be passed on. An entry with a value that
    /// cannot be is left out, as are all entries of a rank of which two different things are said, and entries
    /// that say nothing.
    ///
    /// Linear in the entries.
    pub fn believable(&self) -> Vec<LoadEntry> {
        let agreed = agreed(&self.entries);
        let says_something = |entry: &LoadEntry| entry.load.check().is_ok_and(|(load, _)| !load.is_empty());
        let firsts = agreed.values().flatten().map(|&at| self.entries[at]);
        let mut entries: Vec<_> = firsts.filter(says_something).collect();
        entries.sort_by_key(|entry| entry.dp_rank);
        entries
    }

    /// The answer as a report of `source` to a [`LoadTable`](super::LoadTable). A rollup reports nothing.
    pub fn into_report(self, source: Arc<str>) -> LoadReport {
        if self.is_rollup() {
            return LoadReport { source, entries: Vec::new(), aggregate: None };
        }
        LoadReport { source, entries: self.entries, aggregate: self.aggregate }
    }
}

/// The entry that speaks for each rank that is named: the first, if all others say the same; `None` if two
/// contradict each other, and then neither is believed. What is said of one rank by several parts of its engine
/// is one report (requirement L18).
pub(super) fn agreed(entries: &[LoadEntry]) -> HashMap<u64, Option<usize>> {
    let mut by_rank: HashMap<u64, Option<usize>> = HashMap::with_capacity(entries.len());
    for (at, entry) in entries.iter().enumerate() {
        let Some(rank) = entry.dp_rank else { continue };
        let first = by_rank.entry(rank).or_insert(Some(at));
        if first.is_some_and(|first| entries[first].load != entry.load) {
            *first = None;
        }
    }
    by_rank
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running(count: f64) -> RawRankLoad {
        RawRankLoad { num_running_reqs: count.into(), ..RawRankLoad::default() }
    }

    /// L1, L4: one entry per rank with a readable snapshot; what cannot be is left out entry by entry.
    #[test]
    fn only_believable_entries_are_passed_on() {
        let loads = [(5, 1.0), (0, 0.0), (1, -1.0), (2, f64::NAN), (3, 1e300), (4, 1.0), (4, 2.0)];
        let mut answer =
            LoadAnswer::of_ranks(loads.map(|(rank, count)| LoadEntry::new(rank, running(count))).to_vec());
        answer.entries.push(LoadEntry::new(6, RawRankLoad::default()));
        answer.entries.push(LoadEntry { dp_rank: None, load: running(1.0) });
        let ranks: Vec<_> = answer.believable().iter().map(|entry| entry.dp_rank).collect();
        assert_eq!(ranks, [Some(0), Some(5)]);
        assert_eq!(answer.dp_rank_count(), 9);
    }

    /// L6: an aggregate of nothing is no answer, and neither is no entry.
    #[test]
    fn empty_is_not_idle() {
        assert!(LoadAnswer::default().is_empty());
        assert!(!LoadAnswer { aggregate: Some(running(0.0)), ..LoadAnswer::default() }.is_empty());
        assert!(!LoadAnswer::of_ranks(vec![LoadEntry::new(0, running(0.0))]).is_empty());
    }

    /// L8
    #[test]
    fn a_rollup_reports_nothing() {
        let entry = LoadEntry::new(0, running(3.0));
        let answer = LoadAnswer {
            rollup: vec![RollupEntry { worker: Some("w".into()), worker_type: None, entry }],
            aggregate: Some(running(3.0)),
            ..LoadAnswer::default()
        };
        let report = answer.into_report("engine".into());
        assert!(report.entries.is_empty() && report.aggregate.is_none());
    }
}

//! Debounce: many changes of a rank become one announcement.
//!
//! Each rank has a deadline of its own: a change puts it off by the quiet time, but never beyond the longest
//! wait after the first change. One rank that changes all the time delays no other, and is announced itself.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use crate::ids::{Moment, RankKey};

/// Settings of a [`Debounce`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DebounceConfig {
    /// How long a rank must be without a change to be due.
    pub quiet: Duration,
    /// How long after its first change a rank is due whatever happens.
    pub longest_wait: Duration,
}

impl Default for DebounceConfig {
    /// 100 ms after the last change, at most half a second after the first: engines report once a step, tens
    /// of times a second.
    fn default() -> Self {
        Self { quiet: Duration::from_millis(100), longest_wait: Duration::from_millis(500) }
    }
}

/// Ranks that have changed and are not announced yet. At most one entry per rank.
///
/// Costs the logarithm of the number of waiting ranks per change.
#[derive(Debug, Default)]
pub struct Debounce {
    config: DebounceConfig,
    waiting: HashMap<RankKey, Waiting>,
    order: BTreeSet<(Moment, RankKey)>,
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    first: Moment,
    due: Moment,
}

impl Debounce {
    /// Nothing has changed yet.
    pub fn new(config: DebounceConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// The rank has changed.
    pub fn changed(&mut self, now: Moment, rank: &RankKey) {
        let known = self.waiting.get(rank).copied();
        let first = known.map_or(now, |waiting| waiting.first);
        let due = (now + self.config.quiet).min(first + self.config.longest_wait);
        if let Some(waiting) = known {
            if waiting.due == due {
                return;
            }
            self.order.remove(&(waiting.due, rank.clone()));
        }
        self.order.insert((due, rank.clone()));
        self.waiting.insert(rank.clone(), Waiting { first, due });
    }

    /// When the next rank is due: come back then.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.order.first().map(|(due, _)| *due)
    }

    /// Takes the rank that is due longest, if one is due. Ask again until there is none.
    pub fn take_due(&mut self, now: Moment) -> Option<RankKey> {
        if self.next_deadline()? > now {
            return None;
        }
        let (_, rank) = self.order.pop_first()?;
        self.waiting.remove(&rank);
        Some(rank)
    }

    /// Forgets a rank that is gone.
    pub fn retire(&mut self, rank: &RankKey) {
        if let Some(waiting) = self.waiting.remove(rank) {
            self.order.remove(&(waiting.due, rank.clone()));
        }
    }

    /// Ranks that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn at(millis: u64) -> Moment {
        Moment::from_millis(millis)
    }

    fn rank(n: u32) -> RankKey {
        RankKey::new("w", n)
    }

    fn debounce() -> Debounce {
        Debounce::new(DebounceConfig::default())
    }

    fn due(debounce: &mut Debounce, millis: u64) -> Vec<u32> {
        std::iter::from_fn(|| debounce.take_due(at(millis))).map(|rank| rank.dp_rank.0).collect()
    }

    /// L14: staggered deadlines; the earliest fires first and takes only what is due.
    #[test]
    fn the_earliest_fires_first_and_takes_only_what_is_due() {
        let mut debounce = debounce();
        for (millis, n) in [(0, 3), (30, 1), (60, 2)] {
            debounce.changed(at(millis), &rank(n));
        }
        assert_eq!(debounce.next_deadline(), Some(at(100)));
        assert!(due(&mut debounce, 99).is_empty());
        assert_eq!(due(&mut debounce, 100), [3]);
        assert_eq!(debounce.next_deadline(), Some(at(130)));
        assert_eq!(due(&mut debounce, 129), [0_u32; 0]);
        // Late, both are due, in the order of their deadlines.
        assert_eq!(due(&mut debounce, 160), [1, 2]);
        assert_eq!((debounce.next_deadline(), debounce.is_empty()), (None, true));
    }

    /// L14: a change of one rank puts off its own deadline and no other's.
    #[test]
    fn a_change_puts_off_its_own_rank_only() {
        let mut debounce = debounce();
        debounce.changed(at(0), &rank(0));
        debounce.changed(at(0), &rank(1));
        debounce.changed(at(90), &rank(0));
        assert_eq!(due(&mut debounce, 100), [1]);
        assert_eq!(debounce.len(), 1);
        assert_eq!(debounce.next_deadline(), Some(at(190)));
        assert_eq!(due(&mut debounce, 190), [0]);
    }

    /// L14: a rank that changes all the time gets through after the longest wait, again and again.
    #[test]
    fn a_rank_that_never_rests_gets_through() {
        let mut debounce = debounce();
        let mut fired = Vec::new();
        for millis in (0..2_000).step_by(10) {
            debounce.changed(at(millis), &rank(0));
            if millis == 1_000 {
                debounce.changed(at(millis), &rank(7));
            }
            fired.extend(due(&mut debounce, millis).into_iter().map(|n| (millis, n)));
        }
        let restless: Vec<_> = fired.iter().filter(|(_, n)| *n == 0).map(|(millis, _)| *millis).collect();
        assert_eq!(restless, [500, 1_010, 1_520]);
        assert!(fired.contains(&(1_100, 7)));
    }

    /// R7: nothing of a rank that is gone is announced.
    #[test]
    fn a_rank_that_is_gone_is_not_announced() {
        let mut debounce = debounce();
        debounce.changed(at(0), &rank(0));
        debounce.changed(at(1), &rank(1));
        debounce.retire(&rank(0));
        debounce.retire(&rank(9));
        assert_eq!(debounce.next_deadline(), Some(at(101)));
        assert_eq!(due(&mut debounce, 1_000), [1]);
        assert_eq!(debounce.len(), 0);
    }
}

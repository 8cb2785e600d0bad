//! The global ranks of one worker.

use super::error::DeclareError;
use crate::ids::{DpRank, LocalRank};

/// The ranks that one worker manages: a non-empty ordered set of **global** ranks, normally a range.
///
/// The start is remembered on its own: when a single rank is withdrawn, the others keep their local numbers,
/// because the engine behind them did not renumber itself. Ranks that come one by one say nothing about where
/// their worker starts: their local numbers are not known until somebody says it.
///
/// Cost: 4 bytes per rank; membership is a binary search.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ranks {
    start: u32,
    /// Whether `start` was said, and is not merely the lowest rank that came.
    start_said: bool,
    /// How many ranks the declaration spoke for; what a whole-worker figure is divided by.
    declared: u32,
    members: Vec<u32>,
}

impl Ranks {
    /// Most ranks of one worker: the field's own limit, and a bound on what one declaration may allocate.
    pub const MAX: u32 = 4096;

    /// The ranks `start .. start + size`.
    ///
    /// # Errors
    /// A size of 0, an end past `u32::MAX`, or more than [`Ranks::MAX`] ranks. Each names its field.
    pub fn range(start: u32, size: u32) -> Result<Self, DeclareError> {
        if size == 0 {
            return Err(DeclareError::NoRanks);
        }
        let Some(end) = start.checked_add(size) else {
            return Err(DeclareError::RangePastEnd { start, size });
        };
        if size > Self::MAX {
            return Err(DeclareError::TooManyRanks { size });
        }
        Ok(Self { start, start_said: true, declared: size, members: (start..end).collect() })
    }

    /// The one rank `rank` of a worker whose start is not known.
    ///
    /// # Errors
    /// `u32::MAX` is no rank: its range would end past `u32`.
    pub fn single(rank: DpRank) -> Result<Self, DeclareError> {
        if rank.0 == u32::MAX {
            return Err(DeclareError::RankPastEnd { rank });
        }
        Ok(Self { start_said: false, ..Self::range(rank.0, 1)? })
    }

    /// The same ranks of a worker that starts at `start`: above one of them it cannot be, and stays unknown.
    #[must_use]
    pub fn starting_at(mut self, start: DpRank) -> Self {
        if self.members.first().is_some_and(|first| *first >= start.0) {
            (self.start, self.start_said) = (start.0, true);
        }
        self
    }

    /// Adds one rank; `false` if it was there. It says nothing about where the worker starts.
    ///
    /// # Errors
    /// The set is full, or the rank is `u32::MAX`.
    pub fn insert(&mut self, rank: DpRank) -> Result<bool, DeclareError> {
        if rank.0 == u32::MAX {
            return Err(DeclareError::RankPastEnd { rank });
        }
        let Err(at) = self.members.binary_search(&rank.0) else { return Ok(false) };
        let size = self.len() + 1;
        if size > Self::MAX {
            return Err(DeclareError::TooManyRanks { size });
        }
        self.members.insert(at, rank.0);
        if !self.start_said {
            self.start = self.start.min(rank.0);
        }
        self.declared = self.declared.max(size);
        Ok(true)
    }

    /// Takes over the start that `other`, another part of the same worker, says; one that was said before stays.
    pub(super) fn learn_start(&mut self, other: &Self) {
        if other.start_said && !self.start_said {
            *self = self.clone().starting_at(other.start());
        }
    }

    /// Takes one rank away; `false` if it was not there **or is the last one**: a worker has ranks or is gone.
    pub fn remove(&mut self, rank: DpRank) -> bool {
        match self.members.binary_search(&rank.0) {
            Ok(at) if self.members.len() > 1 => {
                self.members.remove(at);
                true
            }
            _ => false,
        }
    }

    /// The global rank that is local rank 0 if anybody said so, else the lowest rank.
    pub fn start(&self) -> DpRank {
        DpRank(self.start)
    }

    /// The global rank that is local rank 0; `None` if nobody said so.
    pub fn said_start(&self) -> Option<DpRank> {
        self.start_said.then(|| self.start())
    }

    /// How many ranks there are now.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u32 {
        // Bounded by `Ranks::MAX`.
        self.members.len() as u32
    }

    /// How many ranks the declaration spoke for: [`Ranks::len`], unless single ranks were withdrawn since.
    pub fn declared(&self) -> u32 {
        self.declared
    }

    /// The ranks, ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = DpRank> + '_ {
        self.members.iter().map(|&rank| DpRank(rank))
    }

    /// Whether `rank` is one of them.
    pub fn contains(&self, rank: DpRank) -> bool {
        self.members.binary_search(&rank.0).is_ok()
    }

    /// `rank` counted from the start; `None` if it is not one of them, lies before the start, or nobody said where
    /// that is.
    pub fn local(&self, rank: DpRank) -> Option<LocalRank> {
        let start = self.said_start().filter(|_| self.contains(rank))?;
        rank.0.checked_sub(start.0).map(LocalRank)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fleet::ErrorKind;

    /// R2
    #[test]
    fn impossible_ranges_are_refused_and_name_the_field() {
        for (start, size) in [(0, 0), (5, 0), (u32::MAX, 1), (u32::MAX - 3, 4), (1, u32::MAX), (0, 4097)] {
            let refused = Ranks::range(start, size).unwrap_err();
            assert_eq!((refused.field(), refused.kind()), ("size", ErrorKind::Invalid), "{start}+{size}");
        }
        assert_eq!(Ranks::range(0, 4096).unwrap().len(), 4096);
        assert_eq!(Ranks::range(u32::MAX - 4, 4).unwrap().len(), 4);
        assert_eq!(Ranks::single(DpRank(u32::MAX)).unwrap_err().field(), "dp_rank");
    }

    /// R4: global 4..8 is local 0..4.
    #[test]
    fn local_ranks_are_counted_from_the_start() {
        let ranks = Ranks::range(4, 4).unwrap();
        assert_eq!(ranks.local(DpRank(4)), Some(LocalRank(0)));
        assert_eq!(ranks.local(DpRank(7)), Some(LocalRank(3)));
        assert_eq!(ranks.local(DpRank(0)), None);
        assert_eq!(ranks.local(DpRank(8)), None);
    }

    /// R4, R7: one rank withdrawn does not renumber its neighbours.
    #[test]
    fn the_start_stays_when_the_first_rank_goes() {
        let mut ranks = Ranks::range(4, 3).unwrap();
        assert!(ranks.remove(DpRank(4)));
        assert!(!ranks.remove(DpRank(4)));
        assert_eq!(ranks.local(DpRank(5)), Some(LocalRank(1)));
        assert_eq!((ranks.start(), ranks.len(), ranks.declared()), (DpRank(4), 2, 3));
    }

    #[test]
    fn single_ranks_come_in_any_order_and_the_last_one_stays() {
        let mut ranks = Ranks::single(DpRank(2)).unwrap();
        assert!(ranks.insert(DpRank(0)).unwrap());
        assert!(!ranks.insert(DpRank(2)).unwrap());
        assert_eq!(ranks.iter().collect::<Vec<_>>(), [DpRank(0), DpRank(2)]);
        assert_eq!(ranks.start(), DpRank(0));
        assert!(ranks.remove(DpRank(0)));
        assert!(!ranks.remove(DpRank(2)));
        assert_eq!(ranks.len(), 1);
    }

    /// R4: never guessed from the ranks that happen to be there.
    #[test]
    fn a_start_that_nobody_said_is_not_known() {
        let mut ranks = Ranks::single(DpRank(5)).unwrap();
        assert_eq!((ranks.local(DpRank(5)), ranks.said_start()), (None, None));
        ranks.insert(DpRank(4)).unwrap();
        assert_eq!((ranks.local(DpRank(4)), ranks.local(DpRank(5))), (None, None));
        // Above one of them it cannot be.
        assert_eq!(ranks.clone().starting_at(DpRank(5)).local(DpRank(5)), None);
        ranks.learn_start(&Ranks::range(3, 1).unwrap());
        assert_eq!(ranks.local(DpRank(5)), Some(LocalRank(2)));
        // What was said stays, and what lies before it has no number.
        ranks.learn_start(&Ranks::range(1, 1).unwrap());
        ranks.insert(DpRank(1)).unwrap();
        assert_eq!((ranks.local(DpRank(4)), ranks.local(DpRank(1))), (Some(LocalRank(1)), None));
        assert_eq!(Ranks::single(DpRank(0)).unwrap().local(DpRank(0)), None);
    }

    /// R2
    #[test]
    fn a_full_set_takes_no_more() {
        let mut ranks = Ranks::range(0, 4096).unwrap();
        assert_eq!(ranks.insert(DpRank(9000)), Err(DeclareError::TooManyRanks { size: 4097 }));
        assert!(!ranks.insert(DpRank(17)).unwrap());
        assert_eq!(ranks.insert(DpRank(u32::MAX)), Err(DeclareError::RankPastEnd { rank: DpRank(u32::MAX) }));
    }
}

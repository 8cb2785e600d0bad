//! How much one rank holds and runs, and where the number comes from.
//!
//! The unit is part of the value: a total of four ranks that is taken for each rank's own over-admits
//! fourfold.

use std::collections::BTreeMap;

use super::error::DeclareError;
use super::ranks::Ranks;
use crate::ids::DpRank;

/// A declared KV capacity, in blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CapacitySpec {
    scope: Scope,
    estimated: bool,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Scope {
    Aggregate(u64),
    PerRank(u64),
    List(BTreeMap<DpRank, u64>),
    Shared(u64),
}

impl CapacitySpec {
    /// The sum over all declared ranks.
    pub fn aggregate(blocks: u64) -> Self {
        Self { scope: Scope::Aggregate(blocks), estimated: false }
    }

    /// The same for every rank.
    pub fn per_rank(blocks: u64) -> Self {
        Self { scope: Scope::PerRank(blocks), estimated: false }
    }

    /// One for each of `ranks`, in their order.
    ///
    /// # Errors
    /// The list is longer or shorter than the ranks.
    pub fn per_rank_list(ranks: &Ranks, blocks: &[u64]) -> Result<Self, DeclareError> {
        if blocks.len() != ranks.iter().len() {
            return Err(DeclareError::CapacityList { entries: blocks.len(), ranks: ranks.len() });
        }
        let list = ranks.iter().zip(blocks.iter().copied()).collect();
        Ok(Self { scope: Scope::List(list), estimated: false })
    }

    /// One for each rank that is named; the others' is unknown.
    pub fn by_rank(blocks: impl IntoIterator<Item = (DpRank, u64)>) -> Self {
        Self { scope: Scope::List(blocks.into_iter().collect()), estimated: false }
    }

    /// One pool of blocks that all ranks of the worker draw from. It is nobody's own.
    pub fn worker_shared(blocks: u64) -> Self {
        Self { scope: Scope::Shared(blocks), estimated: false }
    }

    /// The same figure, not measured but reckoned. It never becomes a hard limit.
    pub fn estimated(mut self) -> Self {
        self.estimated = true;
        self
    }

    /// What `rank` of `ranks` holds. Zero is no capacity that a running rank can have, so it is unknown.
    pub(crate) fn of(&self, ranks: &Ranks, rank: DpRank) -> Capacity {
        let (blocks, provenance) = match &self.scope {
            Scope::Aggregate(sum) if ranks.declared() == 1 => (*sum, Provenance::Exact),
            Scope::Aggregate(sum) => (sum / u64::from(ranks.declared()), Provenance::Divided),
            Scope::PerRank(blocks) => (*blocks, Provenance::Exact),
            Scope::List(list) => (list.get(&rank).copied().unwrap_or(0), Provenance::Exact),
            Scope::Shared(_) => return Capacity::Unknown,
        };
        match blocks {
            0 => Capacity::Unknown,
            blocks if self.estimated => Capacity::Known { blocks, provenance: Provenance::Estimated },
            blocks => Capacity::Known { blocks, provenance },
        }
    }

    /// What the worker's ranks share; unknown unless it was declared as shared.
    pub(crate) fn shared(&self) -> Capacity {
        match self.scope {
            Scope::Shared(blocks) if blocks > 0 => {
                let provenance =
                    if self.estimated { Provenance::Estimated } else { Provenance::WorkerShared };
                Capacity::Known { blocks, provenance }
            }
            _ => Capacity::Unknown,
        }
    }

    /// The same figure said of `rank` alone, which it was given for: what comes later says nothing of it.
    pub(crate) fn own(&mut self, rank: DpRank) {
        if let Scope::Aggregate(blocks) | Scope::PerRank(blocks) = self.scope {
            self.scope = Scope::List(BTreeMap::from([(rank, blocks)]));
        }
    }

    /// Takes over what `more` lists of further ranks.
    pub(crate) fn absorb(&mut self, more: &Self) {
        if let (Scope::List(list), Scope::List(more)) = (&mut self.scope, &more.scope) {
            list.extend(more);
        }
    }

    /// Forgets the entry of one rank.
    pub(crate) fn forget(&mut self, rank: DpRank) {
        if let Scope::List(list) = &mut self.scope {
            list.remove(&rank);
        }
    }

    /// # Errors
    /// The figure is a list that names another rank than `ranks`. One that leaves some out leaves them unknown.
    pub(crate) fn check(&self, ranks: &Ranks) -> Result<(), DeclareError> {
        match &self.scope {
            Scope::List(list) if list.keys().any(|rank| !ranks.contains(*rank)) => {
                Err(DeclareError::CapacityList { entries: list.len(), ranks: ranks.len() })
            }
            _ => Ok(()),
        }
    }
}

/// A capacity as far as it is known.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Capacity {
    /// So many blocks.
    Known {
        /// Blocks; never 0.
        blocks: u64,
        /// Where the number comes from.
        provenance: Provenance,
    },
    /// Neither 0 nor 1 nor without limit.
    Unknown,
}

impl Capacity {
    /// This declared capacity beside what the rank's engine reports of itself: `blocks`, and whether they are a
    /// share of a sum.
    ///
    /// The engine's word stands where nothing or an estimate was declared. Where both are known and differ by
    /// more than one block, which is what rounding explains, the smaller one binds (requirement L17).
    pub fn beside_reported(self, blocks: u64, divided: bool) -> Self {
        let provenance = if divided { Provenance::Divided } else { Provenance::Exact };
        let reported = Self::Known { blocks, provenance };
        match self {
            Self::Unknown | Self::Known { provenance: Provenance::Estimated, .. } => reported,
            // Who measured knows better than who divided.
            Self::Known { blocks: declared, provenance: Provenance::Divided }
                if !self.contradicts(blocks) && !divided =>
            {
                Self::Known { blocks: declared.min(blocks), provenance: Provenance::Exact }
            }
            Self::Known { .. } if !self.contradicts(blocks) => self,
            Self::Known { blocks: declared, .. } => {
                if declared < blocks {
                    self
                } else {
                    reported
                }
            }
        }
    }

    /// Whether a declared capacity and what the engine reports cannot both be: an estimate contradicts nothing.
    pub fn contradicts(self, reported: u64) -> bool {
        match self {
            Self::Unknown | Self::Known { provenance: Provenance::Estimated, .. } => false,
            Self::Known { blocks, .. } => blocks.abs_diff(reported) > 1,
        }
    }

    /// The blocks, however they are known.
    pub fn blocks(self) -> Option<u64> {
        match self {
            Self::Known { blocks, .. } => Some(blocks),
            Self::Unknown => None,
        }
    }

    /// The blocks if they are the rank's own exact figure: the only kind that may become a hard limit.
    pub fn exact(self) -> Option<u64> {
        match self {
            Self::Known { blocks, provenance: Provenance::Exact } => Some(blocks),
            _ => None,
        }
    }
}

/// Where a number comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Provenance {
    /// The rank's own figure.
    Exact,
    /// A sum over ranks, divided and rounded down.
    Divided,
    /// Reckoned.
    Estimated,
    /// Common to the worker's ranks.
    WorkerShared,
}

impl Provenance {
    /// The name at the boundary.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Divided => "divided",
            Self::Estimated => "estimated",
            Self::WorkerShared => "worker_shared",
        }
    }
}

/// What kind of data parallelism a worker's ranks are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum DpMode {
    /// Independent replicas: a request limit holds for each.
    #[default]
    Pure,
    /// Attention data parallelism: one limit for all of them together.
    Attention,
}

impl DpMode {
    /// The share of one of `ranks` in a limit of `requests`; `None` if nothing is left of it.
    pub(crate) fn share(self, requests: u64, ranks: &Ranks) -> Option<u64> {
        let share = match self {
            Self::Pure => requests,
            Self::Attention => requests / u64::from(ranks.declared()),
        };
        (share > 0).then_some(share)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn ranks(start: u32, size: u32) -> Ranks {
        Ranks::range(start, size).unwrap()
    }

    fn each(spec: &CapacitySpec, ranks: &Ranks) -> Vec<Option<u64>> {
        ranks.iter().map(|rank| spec.of(ranks, rank).blocks()).collect()
    }

    /// L11, C40
    #[test]
    fn an_aggregate_is_divided_rounded_down_and_may_be_unknown() {
        let four = ranks(0, 4);
        assert_eq!(each(&CapacitySpec::aggregate(4000), &four), [Some(1000); 4]);
        assert_eq!(each(&CapacitySpec::aggregate(4003), &four), [Some(1000); 4]);
        assert_eq!(each(&CapacitySpec::aggregate(3), &four), [None; 4]);
        let capacity = CapacitySpec::aggregate(4000).of(&four, DpRank(0));
        assert_eq!(capacity, Capacity::Known { blocks: 1000, provenance: Provenance::Divided });
        assert_eq!(capacity.exact(), None);
        assert_eq!(CapacitySpec::aggregate(7).of(&ranks(3, 1), DpRank(3)).exact(), Some(7));
    }

    /// L11, C40
    #[test]
    fn a_per_rank_figure_holds_for_each_and_a_list_stays_a_list() {
        assert_eq!(each(&CapacitySpec::per_rank(1000), &ranks(4, 2)), [Some(1000); 2]);
        let two = ranks(4, 2);
        let list = CapacitySpec::per_rank_list(&two, &[900, 1000]).unwrap();
        assert_eq!(each(&list, &two), [Some(900), Some(1000)]);
        assert_eq!(list.of(&two, DpRank(4)).exact(), Some(900));
        assert_eq!(
            CapacitySpec::per_rank_list(&two, &[900]),
            Err(DeclareError::CapacityList { entries: 1, ranks: 2 })
        );
    }

    /// L11, C40
    #[test]
    fn a_shared_amount_is_no_ranks_own() {
        let shared = CapacitySpec::worker_shared(1000);
        assert_eq!(each(&shared, &ranks(0, 2)), [None; 2]);
        assert_eq!(shared.shared().blocks(), Some(1000));
        assert_eq!(CapacitySpec::per_rank(1000).shared(), Capacity::Unknown);
    }

    /// L13
    #[test]
    fn an_estimate_is_never_exact() {
        let estimate = CapacitySpec::per_rank(1000).estimated().of(&ranks(0, 1), DpRank(0));
        assert_eq!(estimate.blocks(), Some(1000));
        assert_eq!(estimate.exact(), None);
    }

    /// L17: the engine's word where nothing was declared; where both contradict each other, the smaller.
    #[test]
    fn the_smaller_of_two_words_binds() {
        let exact = |blocks| Capacity::Known { blocks, provenance: Provenance::Exact };
        let divided = |blocks| Capacity::Known { blocks, provenance: Provenance::Divided };
        let estimated = |blocks| Capacity::Known { blocks, provenance: Provenance::Estimated };
        assert_eq!(Capacity::Unknown.beside_reported(900, false), exact(900));
        assert_eq!(Capacity::Unknown.beside_reported(900, true), divided(900));
        assert_eq!(estimated(10).beside_reported(900, false), exact(900));
        assert_eq!(exact(1000).beside_reported(900, false), exact(900));
        assert_eq!(exact(800).beside_reported(900, false), exact(800));
        assert_eq!(exact(901).beside_reported(900, false), exact(901));
        assert_eq!(divided(901).beside_reported(900, false), exact(900));
        assert!(exact(902).contradicts(900) && !exact(899).contradicts(900));
        assert!(!estimated(1).contradicts(900) && !Capacity::Unknown.contradicts(900));
    }

    /// L12, C41
    #[test]
    fn a_request_limit_is_divided_under_attention_dp_only() {
        assert_eq!(DpMode::Pure.share(256, &ranks(0, 4)), Some(256));
        assert_eq!(DpMode::Attention.share(256, &ranks(0, 4)), Some(64));
        assert_eq!(DpMode::Attention.share(3, &ranks(0, 4)), None);
    }

    /// L11: withdrawing one rank gives its neighbours no memory.
    #[test]
    fn a_sum_is_divided_by_the_ranks_it_was_declared_for() {
        let mut four = ranks(0, 4);
        assert!(four.remove(DpRank(0)));
        assert_eq!(each(&CapacitySpec::aggregate(4000), &four), [Some(1000); 3]);
    }
}

//! The choice among scored candidates.
//!
//! Lowest cost; then the smaller tree, where every tree among the equal ones is known; then chance. A rank without
//! a logit yields to every rank that has one.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::cost::Terms;
use super::decision::{Reason, Scored};
use crate::trust::Trust;

/// Where chance comes from. Seeded alike, it falls alike.
#[derive(Clone, Debug)]
pub struct Chance(StdRng);

impl Chance {
    /// Chance that repeats with its seed.
    pub fn from_seed(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// Chance seeded by the operating system.
    pub fn from_os() -> Self {
        Self(StdRng::from_os_rng())
    }

    /// One of `0..n`, each equally likely; 0 if there is nothing to draw.
    fn below(&mut self, n: usize) -> usize {
        if n < 2 { 0 } else { self.0.random_range(0..n) }
    }

    /// 128 bits of chance: a name that no other draw has.
    pub(super) fn name(&mut self) -> u128 {
        self.0.random()
    }

    /// A number from 0 up to 1, which is left out.
    fn share(&mut self) -> f64 {
        self.0.random()
    }
}

/// Costs that differ by no more than this share of the larger one (or of one block, where both are smaller)
/// are equal: a tie is not to be decided by the order in which the same terms were added up.
pub const EQUAL_WITHIN: f64 = 1e-9;

/// The index of the candidate that wins, and why; `None` if there is none.
///
/// `temperature` above 0 draws among the candidates with a logit, with probabilities in proportion to
/// exp(−x / temperature), x their cost scaled to 0 for the lowest and 1 for the highest.
pub fn choose(scored: &[Scored], temperature: f64, chance: &mut Chance) -> Option<(usize, Reason)> {
    let known = scored.iter().filter(|scored| scored.terms.logit.is_some()).count();
    if known == 0 {
        let (index, _) = lowest(scored, |terms| Some(terms.prefill_cost), chance)?;
        return Some((index, Reason::LoadUnknown));
    }
    if scored.len() == 1 {
        return Some((0, Reason::OnlyCandidate));
    }
    if temperature > 0.0
        && known > 1
        && let Some(index) = drawn(scored, temperature, chance)
    {
        return Some((index, Reason::Temperature));
    }
    lowest(scored, |terms| terms.logit, chance)
}

fn lowest(
    scored: &[Scored],
    cost: impl Fn(&Terms) -> Option<f64>,
    chance: &mut Chance,
) -> Option<(usize, Reason)> {
    let least = scored.iter().filter_map(|scored| cost(&scored.terms)).min_by(f64::total_cmp)?;
    // Every cost is compared with the least one, so that "equal" cannot creep from neighbour to neighbour.
    let tied = || {
        let is_least = |scored: &Scored| cost(&scored.terms).is_some_and(|cost| are_equal(cost, least));
        scored.iter().enumerate().filter(move |(_, scored)| is_least(scored))
    };
    // A view that is not live may look small only because its stream is broken, and large only because removals
    // were lost. So one such tree among the equal ones leaves all of them to chance: a size that is not known is
    // neither the larger nor the smaller, and trust alone decides nothing.
    let known = tied().all(|(_, scored)| scored.candidate.trust == Trust::Live);
    let size = |scored: &Scored| if known { scored.candidate.tree_size } else { 0 };
    let smallest = tied().map(|(_, scored)| size(scored)).min()?;
    let last = || tied().filter(|(_, scored)| size(scored) == smallest);
    let (ties, left) = (tied().count(), last().count());
    let reason = match (ties, left) {
        (1, _) => Reason::LowestLogit,
        (_, 1) => Reason::SmallerTree,
        _ => Reason::Chance,
    };
    last().nth(chance.below(left)).map(|(index, _)| (index, reason))
}

/// `None` where costs are not finite, which no validated policy makes.
fn drawn(scored: &[Scored], temperature: f64, chance: &mut Chance) -> Option<usize> {
    let costs = || scored.iter().enumerate().filter_map(|(index, scored)| Some((index, scored.terms.logit?)));
    let least = costs().map(|(_, cost)| cost).min_by(f64::total_cmp)?;
    let spread = costs().map(|(_, cost)| cost - least).max_by(f64::total_cmp)?;
    let weight = |cost: f64| {
        let scaled = if spread > 0.0 { (cost - least) / spread } else { 0.0 };
        (-scaled / temperature).exp()
    };
    let total: f64 = costs().map(|(_, cost)| weight(cost)).sum();
    if !total.is_finite() || !spread.is_finite() {
        return None;
    }
    let mut left = chance.share() * total;
    let mut last = None;
    for (index, cost) in costs() {
        let weight = weight(cost);
        if weight > 0.0 {
            last = Some(index);
        }
        if left < weight {
            break;
        }
        left -= weight;
    }
    last
}

/// Whether two costs are one.
pub(super) fn are_equal(a: f64, b: f64) -> bool {
    a.total_cmp(&b).is_eq() || (a - b).abs() <= EQUAL_WITHIN * a.abs().max(b.abs()).max(1.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::ids::{LocalRank, RankKey};
    use crate::routing::candidate::Candidate;
    use crate::trust::MayErr;

    fn rank(logit: impl Into<Option<f64>>, tree_size: u64) -> Scored {
        let logit = logit.into();
        let candidate = Candidate { tree_size, ..Candidate::new(RankKey::new("w1", 0), LocalRank(0)) };
        Scored { candidate, terms: Terms { logit, prefill_cost: 5.0, ..Terms::default() } }
    }

    fn pick(scored: &[Scored]) -> (usize, Reason) {
        choose(scored, 0.0, &mut Chance::from_seed(1)).unwrap()
    }

    fn picks(scored: &[Scored], temperature: f64, draws: usize) -> Vec<usize> {
        let mut chance = Chance::from_seed(7);
        let mut picks = vec![0; scored.len()];
        for _ in 0..draws {
            picks[choose(scored, temperature, &mut chance).unwrap().0] += 1;
        }
        picks
    }

    /// S1
    #[test]
    fn the_lowest_logit_wins_then_the_smaller_tree() {
        assert_eq!(pick(&[rank(7.0, 0), rank(6.0, 99)]), (1, Reason::LowestLogit));
        assert_eq!(pick(&[rank(7.0, 3), rank(7.0, 1), rank(7.0, 2)]), (1, Reason::SmallerTree));
        assert_eq!(pick(&[rank(7.0, 3)]), (0, Reason::OnlyCandidate));
        assert_eq!(choose(&[], 0.0, &mut Chance::from_seed(1)), None);
    }

    /// S1: costs that differ only by the order of summation are equal; others are not.
    #[test]
    fn rounding_does_not_decide() {
        let sum = 0.1 + 0.2;
        assert_ne!(sum, 0.3);
        assert_eq!(pick(&[rank(0.3, 9), rank(sum, 2)]), (1, Reason::SmallerTree));
        assert_eq!(pick(&[rank(1e6 + 1e-2, 2), rank(1e6, 9)]), (1, Reason::LowestLogit));
        assert_eq!(pick(&[rank(1e-15, 2), rank(0.0, 9)]), (0, Reason::SmallerTree));
    }

    /// S1, case C34's rule: a broken stream makes a tree look small, or large; neither wins nor loses by it.
    #[test]
    fn one_tree_that_is_not_known_leaves_a_tie_to_chance() {
        for trust in [
            Trust::Unknown,
            Trust::Silent,
            Trust::Joining,
            Trust::Repairing,
            Trust::Partial(MayErr::Miss),
            Trust::Partial(MayErr::Overcredit),
        ] {
            for tree_size in [0, 3, 500, 9_000] {
                let mut broken = rank(7.0, tree_size);
                broken.candidate.trust = trust;
                let ranks = [broken.clone(), rank(7.0, 500), rank(7.0, 3), rank(7.5, 0)];
                assert_eq!(pick(&ranks).1, Reason::Chance);
                let picks = picks(&ranks, 0.0, 600);
                assert!(picks[..3].iter().all(|&n| n > 150) && picks[3] == 0, "{trust}: {picks:?}");
                assert_eq!(pick(&[rank(7.5, 1), broken]), (1, Reason::LowestLogit));
            }
        }
        let mut dearer = rank(8.0, 0);
        dearer.candidate.trust = Trust::Joining;
        assert_eq!(pick(&[dearer, rank(7.0, 5), rank(7.0, 4)]), (2, Reason::SmallerTree));
    }

    /// S1: `smaller_tree` is said only where sizes decided.
    #[test]
    fn equal_trees_are_left_to_chance() {
        assert_eq!(pick(&[rank(7.0, 2), rank(7.0, 2)]).1, Reason::Chance);
        let picks = picks(&[rank(7.0, 2), rank(7.0, 2), rank(7.0, 9)], 0.0, 400);
        assert!(picks[0] > 120 && picks[1] > 120 && picks[2] == 0, "{picks:?}");
    }

    /// S3
    #[test]
    fn ranks_without_a_logit_yield_then_order_by_prefill() {
        assert_eq!(pick(&[rank(None, 0), rank(900.0, 50)]), (1, Reason::LowestLogit));
        let mut warm = rank(None, 50);
        warm.terms.prefill_cost = 1.0;
        assert_eq!(pick(&[rank(None, 0), warm]), (1, Reason::LoadUnknown));
        assert_eq!(pick(&[rank(None, 4), rank(None, 3)]), (1, Reason::LoadUnknown));
        assert_eq!(pick(&[rank(None, 4)]), (0, Reason::LoadUnknown));
        let picks = picks(&[rank(None, 4), rank(None, 4)], 0.0, 400);
        assert!(picks.iter().all(|&n| n > 150), "{picks:?}");
    }

    /// S3: temperature draws among ranks with a logit only.
    #[test]
    fn temperature_never_draws_an_unknown_rank() {
        let ranks = [rank(None, 0), rank(5.0, 0), rank(5.0, 9)];
        let picks = picks(&ranks, 1e9, 1000);
        assert_eq!(picks[0], 0);
        assert!(picks[1] > 400 && picks[2] > 400, "{picks:?}");
        assert_eq!(choose(&ranks[..2], 1e9, &mut Chance::from_seed(1)).unwrap(), (1, Reason::LowestLogit));
    }

    /// T2: a huge temperature is close to uniform; a tiny one is strict.
    #[test]
    fn temperature_spreads_by_its_size() {
        let ranks = [rank(1.0, 0), rank(50.0, 0), rank(100.0, 0)];
        let uniform = picks(&ranks, 1e12, 3000);
        assert!(uniform.iter().all(|&n| (850..1150).contains(&n)), "{uniform:?}");
        assert_eq!(picks(&ranks, 1e-300, 300), [300, 0, 0]);
        assert_eq!(choose(&ranks, 0.5, &mut Chance::from_seed(1)).unwrap().1, Reason::Temperature);
    }

    /// A policy that nobody validated must not be able to panic.
    #[test]
    fn costs_that_are_no_numbers_still_give_a_choice() {
        for cost in [f64::NAN, f64::INFINITY, -f64::INFINITY] {
            for temperature in [0.0, 1.0, f64::NAN] {
                assert!(
                    choose(&[rank(cost, 0), rank(cost, 0)], temperature, &mut Chance::from_seed(1)).is_some()
                );
            }
        }
    }

    /// S1: the same seed, the same fall.
    #[test]
    fn chance_repeats_with_its_seed() {
        let run = |seed| {
            let mut chance = Chance::from_seed(seed);
            (0..64)
                .map(|_| choose(&[rank(1.0, 0), rank(1.0, 0)], 0.0, &mut chance).unwrap().0)
                .collect::<Vec<_>>()
        };
        assert_eq!(run(3), run(3));
        assert_ne!(run(3), run(4));
    }
}

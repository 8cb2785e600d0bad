//! The choice against its own definition, on random fleets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use rankwise::block::BlockSize;
use rankwise::ids::{LocalRank, RankKey};
use rankwise::routing::{
    Candidate, CandidateLoad, Chance, Decision, Overlap, Policy, Reason, Request, Scored, Scorer, Standing,
};
use rankwise::trust::{MayErr, Trust};

/// Small numbers, so that ties are common.
fn candidate() -> impl Strategy<Value = Candidate> {
    let load = prop_oneof![
        1 => Just(CandidateLoad::Unknown),
        3 => (0_u64..4, prop::option::of(0_u64..9), prop::option::of(0_u64..3)).prop_map(
            |(decode_blocks, active_prefill_tokens, active_requests)| CandidateLoad::Known {
                decode_blocks: decode_blocks as f64,
                active_prefill_tokens,
                active_requests,
                age: None,
            }
        ),
    ];
    let trust = prop_oneof![
        4 => Just(Trust::Live),
        1 => Just(Trust::Repairing),
        1 => Just(Trust::Partial(MayErr::Overcredit)),
    ];
    let standing = prop_oneof![5 => Just(Standing::Ready), 1 => Just(Standing::Overloaded)];
    let reach = (0_u32..4, 0_u32..3, 0_u32..3);
    (load, trust, standing, reach, 0_u64..3, 0_u64..3).prop_map(
        |(load, trust, standing, (device, host, disk), tree_size, new_blocks)| Candidate {
            load,
            trust,
            standing,
            overlap: Overlap { device, host: device + host, disk: device + host + disk },
            tree_size,
            new_blocks,
            ..Candidate::new(RankKey::new("w", 0), LocalRank(0))
        },
    )
}

fn fleet() -> impl Strategy<Value = Vec<Candidate>> {
    prop::collection::vec(candidate(), 1..9).prop_map(|mut fleet| {
        for (candidate, dp_rank) in fleet.iter_mut().zip(0..) {
            candidate.rank = RankKey::new("w", dp_rank);
        }
        fleet
    })
}

fn request() -> Request<'static> {
    Request::new(13, BlockSize::new(4).unwrap())
}

fn decide(policy: &Policy, fleet: &[Candidate], seed: u64) -> Option<Decision<'static>> {
    Scorer::default()
        .decide(policy, &request(), fleet.iter().cloned(), &mut Chance::from_seed(seed))
        .ok()
        .map(Decision::into_owned)
}

proptest! {
    /// S1, S3, L15: no rank that may serve is better than the one picked, by logit, then prefill, then tree where all are known.
    #[test]
    fn nobody_beats_the_pick(fleet in fleet(), seed: u64) {
        let Some(decision) = decide(&Policy::default(), &fleet, seed) else {
            prop_assert!(fleet.iter().all(|candidate| candidate.standing == Standing::Overloaded));
            return Ok(());
        };
        let picked = decision.chosen();
        prop_assert_eq!(picked.candidate.standing, Standing::Ready);
        let key = |scored: &Scored| {
            let cost = scored.terms.logit.unwrap_or(scored.terms.prefill_cost);
            (scored.terms.logit.is_none(), cost)
        };
        let tied = |other: &&Scored| key(other) == key(picked);
        let known = decision.candidates().iter().filter(tied).all(|other| other.candidate.trust == Trust::Live);
        for other in decision.candidates() {
            prop_assert!(key(picked) <= key(other), "{} over {}", picked, other);
            if known && tied(&other) {
                prop_assert!(picked.candidate.tree_size <= other.candidate.tree_size, "{} over {}", picked, other);
            }
        }
        if decision.reason == Reason::SmallerTree {
            prop_assert!(known);
        }
        let unknown = decision.candidates().iter().all(|scored| scored.terms.logit.is_none());
        prop_assert_eq!(decision.reason == Reason::LoadUnknown, unknown);
    }

    /// T2, S3: a drawn rank is one with a logit, whatever the temperature.
    #[test]
    fn a_drawn_rank_has_a_logit_if_any_has(fleet in fleet(), temperature in 1e-6_f64..1e6, seed: u64) {
        let policy = Policy { temperature, ..Policy::default() };
        if let Some(decision) = decide(&policy, &fleet, seed) {
            let any = decision.candidates().iter().any(|scored| scored.terms.logit.is_some());
            prop_assert_eq!(decision.chosen().terms.logit.is_some(), any);
        }
    }

    /// S1: the order in which ranks are offered decides nothing but where chance falls.
    #[test]
    fn the_order_of_candidates_does_not_decide(fleet in fleet()) {
        let mut reversed = fleet.clone();
        reversed.reverse();
        let (Some(one), Some(other)) =
            (decide(&Policy::default(), &fleet, 1), decide(&Policy::default(), &reversed, 1)) else { return Ok(()) };
        prop_assert_eq!(one.reason, other.reason);
        if !matches!(one.reason, Reason::Chance | Reason::LoadUnknown) {
            prop_assert_eq!(one.pick, other.pick);
        }
    }

    /// S1: the full model is the plain line where nothing but device overlap and decode load is known.
    #[test]
    fn the_defaults_are_the_plain_line(
        isl_tokens in 0_u64..300,
        block_size in 1_u32..40,
        cached in 0_u32..40,
        decode_blocks in 0_u64..100,
        overlap_weight in 0.0_f64..20.0,
    ) {
        let request = Request::new(isl_tokens, BlockSize::new(block_size).unwrap());
        let load =
            CandidateLoad::Known { decode_blocks: decode_blocks as f64, active_prefill_tokens: None, active_requests: None, age: None };
        let candidate = Candidate {
            load,
            overlap: Overlap::device(cached),
            ..Candidate::new(RankKey::new("w", 0), LocalRank(0))
        };
        let policy = Policy { overlap_weight, ..Policy::default() };
        let mut scorer = Scorer::default();
        let decision = scorer.decide(&policy, &request, [candidate], &mut Chance::from_seed(1)).unwrap();
        let missing = isl_tokens.saturating_sub(u64::from(cached) * u64::from(block_size));
        let expected = overlap_weight * (missing as f64 / f64::from(block_size)) + decode_blocks as f64;
        let logit = decision.chosen().terms.logit.unwrap();
        prop_assert!((logit - expected).abs() <= 1e-9 * expected.max(1.0), "{logit} is not {expected}");
    }
}

//! The scoring stage as a whole: the field cases C32 to C35, and what a decision tells.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::block::BlockSize;
use crate::ids::{DpRank, LocalRank, RankKey};
use crate::trust::Trust;

/// The cases leave the request's own blocks out.
fn case_policy(overlap_weight: f64) -> Policy {
    Policy { overlap_weight, decode_counts_request: false, ..Policy::default() }
}

fn request(isl_tokens: u64, block_size: u32) -> Request<'static> {
    Request::new(isl_tokens, BlockSize::new(block_size).unwrap())
}

fn known(decode_blocks: u64) -> CandidateLoad {
    let decode_blocks = decode_blocks as f64;
    let age = Some(Duration::from_millis(20));
    CandidateLoad::Known { decode_blocks, active_prefill_tokens: None, active_requests: None, age }
}

fn rank(worker: &str, dp_rank: u32, cached: u32, decode_blocks: u64, tree_size: u64) -> Candidate {
    Candidate {
        overlap: Overlap::device(cached),
        load: known(decode_blocks),
        tree_size,
        view_age: Some(Duration::from_millis(5)),
        ..Candidate::new(RankKey::new(worker, dp_rank), LocalRank(dp_rank % 4))
    }
}

fn decide(
    policy: &Policy,
    request: &Request<'_>,
    candidates: &[Candidate],
) -> Result<Decision<'static>, Refusal> {
    Scorer::default()
        .decide(policy, request, candidates.iter().cloned(), &mut Chance::from_seed(1))
        .map(Decision::into_owned)
}

fn logits(decision: &Decision<'_>) -> Vec<Option<f64>> {
    decision.candidates().iter().map(|scored| scored.terms.logit).collect()
}

fn eight(warm: u32) -> Vec<Candidate> {
    let mut ranks: Vec<_> = (0..8).map(|r| rank(if r < 4 { "w1" } else { "w2" }, r, 0, 12, 0)).collect();
    ranks[6].overlap = Overlap::device(warm);
    ranks[6].tree_size = u64::from(warm) + 2;
    ranks
}

/// Case C32, S1: the formula on two workers with four ranks each.
#[test]
fn c32_formula_on_eight_ranks() {
    let mut cold = eight(0);
    cold[6].tree_size = 0;
    let decision = decide(&case_policy(1.0), &request(196, 16), &cold).unwrap();
    assert_eq!(logits(&decision), [Some(24.25); 8]);
    assert_eq!(decision.reason, Reason::Chance);

    let decision = decide(&case_policy(1.0), &request(196, 16), &eight(12)).unwrap();
    let mut expected = [Some(24.25); 8];
    expected[6] = Some(12.25);
    assert_eq!(logits(&decision), expected);
    assert_eq!(decision.pick, Pick::Rank { rank: RankKey::new("w2", 6), local: Some(LocalRank(2)) });
    assert_eq!(decision.dispatch().map(|dispatch| dispatch.local), Some(LocalRank(2)));
    assert_eq!(decision.reason, Reason::LowestLogit);
}

/// Case C33, S1: a warm but busy rank loses to a cold idle one, until overlap weighs more.
#[test]
fn c33_load_beats_cache() {
    let ranks = [rank("w1", 0, 10, 40, 10), rank("w1", 1, 0, 5, 0)];
    let decision = decide(&case_policy(1.0), &request(48, 4), &ranks).unwrap();
    assert_eq!(logits(&decision), [Some(42.0), Some(17.0)]);
    assert_eq!(decision.pick.dp_rank(), Some(DpRank(1)));
    let decision = decide(&case_policy(20.0), &request(48, 4), &ranks).unwrap();
    assert_eq!(logits(&decision), [Some(80.0), Some(245.0)]);
    assert_eq!(decision.pick.dp_rank(), Some(DpRank(0)));
}

/// Case C34, S1: equal logits go to the smaller tree, also among ranks without a match; load comes first.
#[test]
fn c34_smaller_tree_breaks_ties() {
    let pick = |loads: [u64; 3], trees: [u64; 3]| {
        let ranks: Vec<_> = (0..3).map(|r| rank("w1", r as u32, 0, loads[r], trees[r])).collect();
        let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
        (decision.pick.dp_rank().unwrap().0, decision.reason)
    };
    assert_eq!(pick([5, 5, 5], [3, 1, 2]), (1, Reason::SmallerTree));
    assert_eq!(pick([5, 6, 5], [3, 1, 2]), (2, Reason::SmallerTree));
    assert_eq!(pick([5, 5, 5], [0, 1, 2]), (0, Reason::SmallerTree));
}

/// Case C34's rule: the emptied rank has an open gap, so its size says nothing, for it or against it.
#[test]
fn c34_an_open_gap_does_not_win_by_its_small_tree() {
    let mut ranks = [rank("w1", 0, 0, 5, 0), rank("w1", 1, 0, 5, 40)];
    ranks[0].trust = Trust::Repairing;
    assert_eq!(decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap().reason, Reason::Chance);
}

/// Case C35, S1: complete ties spread.
#[test]
fn c35_complete_ties_spread() {
    let ranks: Vec<_> = (0..4).map(|r| rank("w1", r, 0, 0, 0)).collect();
    let (mut scorer, mut chance) = (Scorer::default(), Chance::from_seed(35));
    let mut picks = BTreeMap::new();
    for _ in 0..400 {
        let decision =
            scorer.decide(&case_policy(1.0), &request(8, 4), ranks.iter().cloned(), &mut chance).unwrap();
        *picks.entry(decision.pick.dp_rank().unwrap().0).or_insert(0) += 1;
    }
    assert_eq!(picks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert!(picks.values().all(|&n| n >= 50), "{picks:?}");
}

/// S2: the log line carries the choice, the reason, the cost, and what they rest on.
#[test]
fn the_log_line_explains_the_pick() {
    let mut ranks = eight(12);
    ranks[0].load = CandidateLoad::Unknown;
    ranks[1].standing = Standing::Overloaded;
    ranks[6].total_blocks = Some(4096);
    let decision = decide(&case_policy(1.0), &request(196, 16), &ranks).unwrap();
    assert_eq!(
        decision.to_string(),
        "w2:6 (local rank 2) by lowest_logit: \
         12.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 12.000; \
         overlap 12 device, 12 host, 12 disk, tree 14, total blocks 4096, view live (5 ms old), load known (20 ms old); \
         7 candidates, 1 of unknown load, 1 ranks excluded"
    );
    assert_eq!(
        decision.candidates()[0].to_string(),
        "w1:0 unknown = 1.0 * prefill_blocks + ? = 1.0 * 12.250 + ?; \
         overlap 0 device, 0 host, 0 disk, tree 0, total blocks unknown, view live (5 ms old), load unknown"
    );
    assert_eq!(decision.excluded.by(Obstacle::Overloaded), 1);

    let warm = Policy { temperature: 0.5, ..case_policy(1.0) };
    let line = decide(&warm, &request(196, 16), &eight(12)).unwrap().to_string();
    assert!(line.contains(" by temperature 0.5: "), "{line}");
}

/// S3: whatever is known wins; if nothing is, the answer says so.
#[test]
fn unknown_loads_yield_and_say_so() {
    let mut ranks = [rank("w1", 0, 2, 0, 9), rank("w1", 1, 0, 1_000, 0)];
    ranks[0].load = CandidateLoad::Unknown;
    let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
    assert_eq!((decision.pick.dp_rank(), decision.reason), (Some(DpRank(1)), Reason::LowestLogit));
    ranks[1].load = CandidateLoad::Unknown;
    let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
    assert_eq!((decision.pick.dp_rank(), decision.reason), (Some(DpRank(0)), Reason::LoadUnknown));
}

/// R5, R6: an engine that balances itself gets the request without a rank; a pinned rank stays a rank.
#[test]
fn internal_balance_names_no_rank_unless_one_is_pinned() {
    let ranks: Vec<_> = (0..4)
        .map(|r| Candidate { balance: Balance::Internal, ..rank("w1", r, u32::from(r == 2), 5, 0) })
        .collect();
    let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
    assert_eq!(decision.pick, Pick::Engine { worker: "w1".into() });
    assert_eq!((decision.pick.dp_rank(), decision.reason), (None, Reason::EngineBalances));
    assert_eq!(decision.dispatch(), None);
    assert_eq!(decision.chosen().candidate.rank, RankKey::new("w1", 2));
    let line = decision.to_string();
    assert!(line.starts_with("w1 (load balancing is internal: the engine picks the rank) by"), "{line}");
    assert!(line.contains("on its best known rank w1:2"), "{line}");

    let pinned = |dp_rank| {
        let pin = Pin { worker: "w1".into(), dp_rank };
        let constraints = Constraints { pin: Some(&pin), ..Constraints::default() };
        let request = Request { constraints, ..request(8, 4) };
        decide(&case_policy(1.0), &request, &ranks).map(|decision| (decision.pick.dp_rank(), decision.reason))
    };
    assert_eq!(pinned(Some(DpRank(0))), Ok((Some(DpRank(0)), Reason::Pinned)));
    assert_eq!(pinned(None), Ok((None, Reason::EngineBalances)));
    assert!(matches!(pinned(Some(DpRank(4))), Err(Refusal::NoSuchRank { .. })));
}

/// I8: a warm scorer keeps its table.
#[test]
fn a_warm_scorer_does_not_grow() {
    let (mut scorer, mut chance) = (Scorer::default(), Chance::from_seed(1));
    let ranks = eight(12);
    let mut table = || {
        let decision =
            scorer.decide(&Policy::default(), &request(196, 16), ranks.iter().cloned(), &mut chance).unwrap();
        decision.candidates().as_ptr()
    };
    assert_eq!(table(), table());
}

/// Nothing of an earlier request shows in a later one.
#[test]
fn a_refusal_leaves_nothing_behind() {
    let (mut scorer, mut chance) = (Scorer::default(), Chance::from_seed(1));
    let (policy, request) = (Policy::default(), request(8, 4));
    scorer.decide(&policy, &request, eight(0), &mut chance).unwrap();
    let refusal = scorer.decide(&policy, &request, [], &mut chance).unwrap_err();
    assert_eq!((refusal.name(), refusal.kind()), ("no_worker", RefusalKind::Unavailable));
    let one = scorer.decide(&policy, &request, [rank("w1", 0, 0, 0, 0)], &mut chance).unwrap();
    assert_eq!((one.candidates().len(), one.reason), (1, Reason::OnlyCandidate));
}

fn silent(mut candidate: Candidate) -> Candidate {
    candidate.trust = Trust::Silent;
    candidate
}

/// S5: a silent rank is no candidate, however good it looks, and the answer says that it was left out.
#[test]
fn the_dead_get_nothing() {
    let ranks = [silent(rank("w1", 0, 2, 0, 0)), rank("w1", 1, 0, 900, 50), rank("w1", 2, 0, 950, 50)];
    let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
    assert_eq!((decision.pick.dp_rank(), decision.reason), (Some(DpRank(1)), Reason::LowestLogit));
    assert_eq!((decision.excluded.by(Obstacle::Silent), decision.all_silent), (1, false));
    let left_out = LeftOut { rank: RankKey::new("w1", 0), obstacle: Obstacle::Silent };
    assert_eq!(decision.left_out(), [left_out]);

    let all = Policy { exclude_silent: false, ..case_policy(1.0) };
    let decision = decide(&all, &request(8, 4), &ranks).unwrap();
    assert_eq!((decision.pick.dp_rank(), decision.excluded.total()), (Some(DpRank(0)), 0));
}

/// S5: where nothing is heard of anybody the choice is made among them, and says so; load elsewhere brings no
/// silent rank back, whatever else keeps others out.
#[test]
fn only_silence_everywhere_brings_the_silent_back() {
    let policy = case_policy(1.0);
    let mut ranks = [silent(rank("w1", 0, 0, 7, 0)), silent(rank("w1", 1, 0, 5, 0)), rank("w1", 2, 0, 5, 0)];
    ranks[2].standing = Standing::Overloaded;
    let refused = |ranks: &[Candidate]| decide(&policy, &request(8, 4), ranks).map(|_| ()).unwrap_err();
    assert_eq!(refused(&ranks), Refusal::Overloaded { ranks: 1 });
    for standing in [Standing::Asleep, Standing::TooSmall, Standing::NoEndpoint] {
        ranks[2].standing = standing;
        let decision = decide(&policy, &request(8, 4), &ranks).unwrap();
        assert_eq!((decision.pick.dp_rank(), decision.reason), (Some(DpRank(1)), Reason::AllSilent));
        assert_eq!((decision.left_out().len(), decision.excluded.by(Obstacle::Silent)), (1, 0));
    }
    ranks[2] = silent(ranks[2].clone());
    ranks[2].standing = Standing::Overloaded;
    let decision = decide(&policy, &request(8, 4), &ranks).unwrap();
    assert_eq!((decision.pick.dp_rank(), decision.all_silent), (Some(DpRank(1)), true));
    ranks.iter_mut().for_each(|rank| rank.standing = Standing::Overloaded);
    assert_eq!(refused(&ranks), Refusal::Overloaded { ranks: 3 });
    ranks.iter_mut().for_each(|rank| rank.standing = Standing::Asleep);
    assert_eq!(refused(&ranks), Refusal::Asleep { ranks: 3 });
}

/// S5: a pin on a silent or sleeping rank is refused with the reason, also where all are silent, unless it is forced.
#[test]
fn a_pin_on_the_dead_is_refused_unless_forced() {
    let dead = [silent(rank("w1", 0, 0, 0, 0)), silent(rank("w1", 1, 0, 0, 0))];
    let mut asleep = dead.clone();
    asleep.iter_mut().for_each(|rank| rank.standing = Standing::Asleep);
    let ask = |ranks: &[Candidate], dp_rank: Option<DpRank>, force_pin| {
        let pin = Pin { worker: "w1".into(), dp_rank };
        let constraints = Constraints { pin: Some(&pin), force_pin, ..Constraints::default() };
        let request = Request { constraints, ..request(8, 4) };
        decide(&case_policy(1.0), &request, ranks).map(|decision| decision.reason)
    };
    let refusal = ask(&dead, Some(DpRank(1)), false).unwrap_err();
    assert_eq!((refusal.name(), refusal.kind()), ("silent", RefusalKind::Unavailable));
    assert_eq!(ask(&dead, None, false), Err(Refusal::Silent { ranks: 2 }));
    assert_eq!(ask(&asleep, Some(DpRank(1)), false), Err(Refusal::Asleep { ranks: 1 }));
    for ranks in [&dead, &asleep] {
        assert_eq!(ask(ranks, Some(DpRank(1)), true), Ok(Reason::Pinned));
        assert!(ask(ranks, None, true).is_ok());
    }
    // Without a pin there is nothing to force.
    let constraints = Constraints { force_pin: true, ..Constraints::default() };
    let unpinned = Request { constraints, ..request(8, 4) };
    let decision = decide(&case_policy(1.0), &unpinned, &[dead[0].clone(), rank("w1", 1, 0, 9, 0)]);
    assert_eq!(decision.unwrap().pick.dp_rank(), Some(DpRank(1)));
}

/// S5, S6: ranks that the request leaves out are none of its candidates.
#[test]
fn a_request_leaves_ranks_out() {
    let ranks: Vec<_> = (0..3).map(|r| rank("w1", r, 0, r.into(), 0)).collect();
    let pick = |left_out: &[u32]| {
        let list: RankList = left_out.iter().map(|&dp_rank| RankKey::new("w1", dp_rank)).collect();
        let constraints = Constraints { left_out: Some(&list), ..Constraints::default() };
        decide(&case_policy(1.0), &Request { constraints, ..request(8, 4) }, &ranks)
            .map(|decision| decision.pick.dp_rank().unwrap().0)
    };
    assert_eq!((pick(&[]), pick(&[0]), pick(&[1, 0])), (Ok(0), Ok(1), Ok(2)));
    assert_eq!(pick(&[2, 0, 1]), Err(Refusal::AllLeftOut { ranks: 3 }));
}

/// S2: the best come first, ranks without a load last; a tie is told, and what was just sent there is named.
#[test]
fn the_others_are_ranked_and_the_tie_is_told() {
    let mut ranks: Vec<_> =
        [7, 5, 6, 5].into_iter().zip(0..).map(|(load, r)| rank("w1", r, 0, load, 9)).collect();
    ranks.push(Candidate { load: CandidateLoad::Unknown, ..rank("w1", 4, 2, 0, 0) });
    ranks[3].tree_size = 4;
    ranks[3].expected_blocks = 1;
    ranks[1].expected_blocks = 1;
    let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
    let order: Vec<_> = decision.ranked().iter().map(|scored| scored.candidate.rank.dp_rank.0).collect();
    assert_eq!(order, [3, 1, 2, 0, 4]);
    assert_eq!(
        decision.tie().unwrap().to_string(),
        "tie of 2 candidates at 6.000: w1:3 has the smallest tree, 4 blocks"
    );
    assert!(decision.to_string().contains("0 disk, 1 booked, tree 4"), "{decision}");
    ranks[3].trust = Trust::Repairing;
    let decision = decide(&case_policy(1.0), &request(8, 4), &ranks).unwrap();
    assert!(decision.tie().unwrap().to_string().ends_with("was chosen by chance"));
    assert_eq!(
        decide(&case_policy(1.0), &request(8, 4), &ranks[..3]).unwrap().tie().map(|tie| tie.ranks),
        None
    );
}

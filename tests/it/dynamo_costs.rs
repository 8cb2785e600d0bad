//! S1: the full cost model of the field. Every cost of Dynamo 1.6.1 in `cost.json`, term by term, and every pick.
//!
//! Left out: `ties` (Dynamo leaves them to chance, we take the smaller tree), and four rows of its service
//! that differ on purpose, each shown to differ for exactly the reason given here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rankwise::block::BlockSize;
use rankwise::ids::{DpRank, LocalRank, RankKey, WorkerId};
use rankwise::routing::{
    AllowList, Candidate, CandidateLoad, Chance, Constraints, Decision, Overlap, Pick, Pin, Policy,
    PolicyOverride, Reason, Request, Role, Scorer, Terms,
};
use serde_json::Value;

/// At credit 0 the service drops host and disk credit too, we keep it (as the crate does).
const SERVICE_DROPS_LOWER_TIERS: [&str; 1] = ["v010"];
/// The service checks these overrides and does not apply them, we do.
const SERVICE_IGNORES_OVERRIDE: [&str; 3] = ["v015", "v016", "v018"];

#[test]
fn every_situation_of_the_crate_is_reproduced() {
    let golden = golden();
    let mut costs = 0;
    for row in list(&golden["situations"]) {
        let situation = Situation::read(row);
        let decision = situation.decide(None);
        assert_eq!(decision.candidates().len(), list(&row["costs"]).len(), "{}", situation.id);
        for expected in list(&row["costs"]) {
            situation.check_terms(expected, situation.terms(&decision, expected));
            costs += 1;
        }
        situation.check_pick(&decision, &row["selected"]);
        let cached = number(&row["selected"]["cached_tokens"]);
        assert_eq!(decision.chosen().terms.cached_tokens as f64, cached, "{}", situation.id);
    }
    assert_eq!((list(&golden["situations"]).len(), costs), (89, 355), "the file shrank");
}

#[test]
fn every_cost_of_the_service_is_reproduced() {
    let golden = golden();
    let mut rows = 0;
    for row in list(&golden["service"]) {
        let situation = Situation::read(row);
        if differs_on_purpose(&situation.id) {
            continue;
        }
        situation.check_pinned(row);
        if !row["selected"].is_null() {
            let decision = situation.decide(None);
            situation.check_pick(&decision, &row["selected"]);
            near(
                &situation.id,
                "selected",
                decision.chosen().terms.logit.unwrap(),
                &row["selected"]["logit"],
                1e-5,
            );
        }
        rows += 1;
    }
    assert_eq!(rows, 22, "the file shrank");
}

/// The four rows are ours in every cost once the service's own rule is put in place of ours.
#[test]
fn rows_that_differ_do_so_for_the_reason_given() {
    let golden = golden();
    for row in list(&golden["service"]) {
        let mut situation = Situation::read(row);
        if !differs_on_purpose(&situation.id) {
            continue;
        }
        let ours = situation.decide(None);
        if SERVICE_DROPS_LOWER_TIERS.contains(&&*situation.id) {
            assert_eq!(situation.policy.overlap_score_credit, 0.0);
            (situation.policy.host_cache_hit_weight, situation.policy.disk_cache_hit_weight) = (0.0, 0.0);
        } else {
            situation.policy = situation.policy_without_override.clone();
        }
        let theirs = situation.decide(None);
        assert_ne!(logits(&ours), logits(&theirs), "{} does not differ", situation.id);
        for expected in list(&row["pinned"]) {
            let pinned = situation.decide(Some(expected));
            near(
                &situation.id,
                "logit",
                pinned.chosen().terms.logit.unwrap(),
                &expected["logit"],
                HALF_DIGIT,
            );
        }
        situation.check_pick(&theirs, &row["selected"]);
    }
}

/// S1, T2: temperature spreads the picks as softmax over the scaled costs says.
#[test]
fn temperature_has_the_expected_shares() {
    let golden = golden();
    let (draws, mut rows) = (2_000, 0);
    for row in list(&golden["service"]).iter().filter(|row| !row["requests"].is_null()) {
        // The service ignores an override of the temperature, we apply it.
        let situation = Situation::read(row).without_override();
        let (mut scorer, mut chance) = (Scorer::default(), Chance::from_seed(2_000));
        let mut picks = [0_u32; 3];
        for _ in 0..draws {
            let decision = situation.decide_with(&mut scorer, None, &mut chance);
            picks[decision.pick.dp_rank().unwrap().0 as usize] += 1;
        }
        for (rank, picked) in picks.iter().enumerate() {
            let share = match row["expected_share"].as_array() {
                Some(shares) => number(&shares[rank]),
                None => number(&row["picks_by_dp_rank"][rank.to_string()]) / f64::from(draws),
            };
            // Five standard deviations, and the rounding of the share to four digits.
            let allowed = 5.0 * (share * (1.0 - share) / f64::from(draws)).sqrt() + 1e-4;
            let off = (f64::from(*picked) / f64::from(draws) - share).abs();
            assert!(off <= allowed, "{}: rank {rank} of {picks:?}, expected {share}", situation.id);
        }
        rows += 1;
    }
    assert_eq!(rows, 5, "the file shrank");
}

/// Ours against the field's habit: equal costs go to the smaller tree (Dynamo: 292, 294, 314 of 900).
#[test]
fn ties_go_to_the_smaller_tree() {
    let golden = golden();
    assert_eq!(list(&golden["ties"]).len(), 2);
    let candidates = [2, 62, 3].into_iter().zip(0..).map(|(tree_size, dp_rank)| Candidate {
        tree_size,
        load: load(&Value::Null),
        ..Candidate::new(RankKey::new("1", dp_rank), LocalRank(dp_rank))
    });
    let request = Request::new(8, BlockSize::new(4).unwrap());
    let mut scorer = Scorer::default();
    let decision =
        scorer.decide(&Policy::default(), &request, candidates, &mut Chance::from_seed(1)).unwrap();
    assert_eq!((decision.pick.dp_rank(), decision.reason), (Some(DpRank(0)), Reason::SmallerTree));
}

/// One row of the file, in our terms.
struct Situation {
    id: String,
    policy: Policy,
    policy_without_override: Policy,
    isl_tokens: u64,
    block_size: BlockSize,
    role: Option<Role>,
    allowed: Option<AllowList>,
    candidates: Vec<Candidate>,
}

/// Costs are logged with three decimals.
const HALF_DIGIT: f64 = 0.000_51;

impl Situation {
    fn read(row: &Value) -> Self {
        let knobs = Policy::default().overlaid(&knobs(&row["knobs"])).unwrap().into_owned();
        let taints = PolicyOverride {
            preferred_taints: row["preferred_taints"].as_object().map(|taints| {
                taints.iter().map(|(label, weight)| (label.as_str().into(), number(weight))).collect()
            }),
            ..PolicyOverride::default()
        };
        let policy_without_override = knobs.overlaid(&taints).unwrap().into_owned();
        Self {
            id: row["id"].as_str().unwrap().to_owned(),
            policy: policy_without_override.overlaid(&self::knobs(&row["override"])).unwrap().into_owned(),
            policy_without_override,
            isl_tokens: count(&row["isl_tokens"]),
            block_size: BlockSize::new(count(&row["block_size"]) as u32).unwrap(),
            role: row["worker_type"].as_str().map(|role| match role {
                "prefill" => Role::Prefill,
                "decode" => Role::Decode,
                other => panic!("unknown role {other}"),
            }),
            allowed: row["allowed_worker_ids"]
                .as_array()
                .map(|ids| ids.iter().map(|id| WorkerId::new(id.to_string())).collect()),
            candidates: list(&row["ranks"]).iter().map(candidate).collect(),
        }
    }

    fn without_override(self) -> Self {
        Self { policy: self.policy_without_override.clone(), ..self }
    }

    fn decide(&self, pinned: Option<&Value>) -> Decision<'static> {
        self.decide_with(&mut Scorer::default(), pinned, &mut Chance::from_seed(1)).into_owned()
    }

    fn decide_with<'s>(
        &self,
        scorer: &'s mut Scorer,
        pinned: Option<&Value>,
        chance: &mut Chance,
    ) -> Decision<'s> {
        let pin = pinned.map(|row| {
            let RankKey { worker, dp_rank } = rank(row);
            Pin { worker, dp_rank: Some(dp_rank) }
        });
        let mut request = Request::new(self.isl_tokens, self.block_size);
        request.constraints = Constraints {
            role: self.role,
            allowed: self.allowed.as_ref(),
            pin: pin.as_ref(),
            ..Constraints::default()
        };
        scorer
            .decide(&self.policy, &request, self.candidates.iter().cloned(), chance)
            .unwrap_or_else(|refusal| panic!("{}: {refusal}", self.id))
    }

    fn terms(&self, decision: &Decision<'_>, expected: &Value) -> Terms {
        let rank = rank(expected);
        let scored = decision.candidates().iter().find(|scored| scored.candidate.rank == rank);
        scored.unwrap_or_else(|| panic!("{}: {rank} is no candidate", self.id)).terms
    }

    /// Dynamo logs the cost before the taint multiplier, and leaves out terms that it did not compute.
    fn check_terms(&self, expected: &Value, terms: Terms) {
        let check = |field: &str, ours: f64| {
            if !expected[field].is_null() {
                near(&self.id, field, ours, &expected[field], HALF_DIGIT);
            }
        };
        assert!(expected["logit"].is_number(), "{}: a row without a cost", self.id);
        check("logit", terms.logit.unwrap() / terms.taint_multiplier);
        check("raw_prefill_blocks", terms.raw_prefill_blocks);
        check("adjusted_prefill_blocks", terms.prefill_blocks);
        check("overlap_credit_blocks", terms.overlap_credit_blocks);
        check("overlap_credit_decay", terms.overlap_credit_decay);
        check("decode_blocks", terms.decode_blocks.unwrap());
        check("active_request_cost", terms.active_request_cost);
        let cached = number(&expected["effective_cached_blocks"]) * f64::from(self.block_size.get());
        let off = (terms.cached_tokens as f64 - cached).abs();
        assert!(off <= 0.5 + HALF_DIGIT * f64::from(self.block_size.get()), "{}: cached tokens", self.id);
    }

    fn check_pinned(&self, row: &Value) {
        assert_eq!(list(&row["pinned"]).len(), self.candidates.len(), "{}", self.id);
        for expected in list(&row["pinned"]) {
            let decision = self.decide(Some(expected));
            assert_eq!(decision.reason, Reason::Pinned);
            let terms = decision.chosen().terms;
            self.check_terms(expected, terms);
            assert_eq!(
                terms.effective_prefill_tokens,
                count(&expected["effective_prefill_tokens"]),
                "{}",
                self.id
            );
        }
    }

    fn check_pick(&self, decision: &Decision<'_>, expected: &Value) {
        let Pick::Rank { rank: picked, .. } = &decision.pick else { panic!("{}: no rank picked", self.id) };
        assert_eq!(*picked, rank(expected), "pick of {}: {decision}", self.id);
    }
}

fn differs_on_purpose(id: &str) -> bool {
    SERVICE_DROPS_LOWER_TIERS.contains(&id) || SERVICE_IGNORES_OVERRIDE.contains(&id)
}

/// Panics at a knob that it does not know, so that none goes unread.
fn knobs(row: &Value) -> PolicyOverride {
    let mut over = PolicyOverride::default();
    for (name, value) in row.as_object().into_iter().flatten() {
        match name.as_str() {
            "overlap_score_credit" => over.overlap_score_credit = value.as_f64(),
            "overlap_score_credit_decay" => over.overlap_score_credit_decay = value.as_f64(),
            "prefill_load_scale" => over.overlap_weight = value.as_f64(),
            "decode_active_request_weight" => over.decode_active_request_weight = value.as_f64(),
            "host_cache_hit_weight" => over.host_cache_hit_weight = value.as_f64(),
            "disk_cache_hit_weight" => over.disk_cache_hit_weight = value.as_f64(),
            "track_prefill_tokens" => over.track_prefill_tokens = value.as_bool(),
            "router_temperature" => over.temperature = value.as_f64(),
            other => panic!("unknown knob {other}"),
        }
    }
    over
}

/// The file counts each tier beyond the nearer one; a field that is not there is 0.
fn candidate(row: &Value) -> Candidate {
    let device = count(&row["device_blocks"]) as u32;
    let host = device + count(&row["host_blocks"]) as u32;
    let disk = host + count(&row["disk_blocks"]) as u32;
    let taints =
        row["taints"].as_array().map(|taints| taints.iter().map(|t| t.as_str().unwrap().into()).collect());
    let rank = rank(row);
    let local = LocalRank(rank.dp_rank.0);
    Candidate {
        overlap: Overlap { device, host, disk },
        load: load(row),
        new_blocks: count(&row["new_blocks"]),
        taints: taints.unwrap_or_default(),
        ..Candidate::new(rank, local)
    }
}

fn load(row: &Value) -> CandidateLoad {
    CandidateLoad::Known {
        decode_blocks: count(&row["active_blocks"]) as f64,
        active_prefill_tokens: Some(count(&row["active_prefill_tokens"])),
        active_requests: Some(count(&row["active_requests"])),
        age: None,
    }
}

fn rank(row: &Value) -> RankKey {
    let worker = row["worker_id"].as_u64().expect("a row without a worker");
    RankKey::new(worker.to_string().as_str(), row["dp_rank"].as_u64().expect("a row without a rank") as u32)
}

fn logits(decision: &Decision<'_>) -> Vec<Option<f64>> {
    decision.candidates().iter().map(|scored| scored.terms.logit).collect()
}

fn near(id: &str, what: &str, ours: f64, expected: &Value, within: f64) {
    let expected = number(expected);
    assert!((ours - expected).abs() < within, "{id}: {what} is {ours}, expected {expected}");
}

fn golden() -> Value {
    serde_json::from_str(include_str!("../../fixtures/dynamo/cost.json")).expect("the golden file is JSON")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn count(value: &Value) -> u64 {
    if value.is_null() { 0 } else { value.as_u64().unwrap_or_else(|| panic!("{value} is no count")) }
}

//! Costs, choices and admissions.

use std::collections::{BTreeMap, BTreeSet};

use rankwise::block::BlockSize;
use rankwise::ids::{LocalRank, RankKey, WorkerId};
use rankwise::routing::{
    Candidate, CandidateLoad, Chance, Constraints, Decision, Overlap, Pin, Policy, Prompt, PromptForm,
    Refusal, Request, RouterScratch, Scorer, SelectError, SelectRequest,
};
use serde_json::Value;

use super::reading::{Fields, Run, by_rank, fail, number, rank_key, rank_number, ranks, same, text, tokens};
use super::stage::{Stage, policy};

/// How often a single choice is repeated with other chance: one that must not vary must not vary ever, and
/// one of eight equal ranks that must not win is missed with probability (7/8)^64.
const REPEATS: u64 = 64;

/// A choice that was made, or why there is none.
type Choice = Result<Chosen, String>;

struct Chosen {
    logits: BTreeMap<RankKey, Option<f64>>,
    selected: RankKey,
}

impl From<&Decision<'_>> for Chosen {
    fn from(decision: &Decision<'_>) -> Self {
        let scored = decision.candidates().iter();
        let logits = scored.map(|scored| (scored.candidate.rank.clone(), scored.terms.logit)).collect();
        Self { logits, selected: decision.chosen().candidate.rank.clone() }
    }
}

impl Stage {
    pub(super) fn score(&mut self, step: &Value) -> Run {
        let known = ["isl_tokens", "block_size", "overlap_weight", "ranks", "expect", "refused"];
        let step = Fields::only("score", step, &known)?;
        let problem = Problem::read(&step)?;
        let choices = (0..REPEATS).map(|seed| problem.decide(&mut Chance::from_seed(seed)));
        // A policy that must be refused says so in `expect` or beside it.
        match step.flag("refused")? {
            Some(refused) => check_choices(choices, &serde_json::json!({ "refused": refused })),
            None => check_choices(choices, step.need("expect")?),
        }
    }

    pub(super) fn score_many(&mut self, step: &Value) -> Run {
        let known = ["isl_tokens", "block_size", "overlap_weight", "ranks", "draws", "expect"];
        let step = Fields::only("score_many", step, &known)?;
        let expect =
            Fields::only("score_many expect", step.need("expect")?, &["each_at_least", "only", "logits"])?;
        let problem = Problem::read(&step)?;
        let mut chance = Chance::from_seed(1);
        let mut drawn: BTreeMap<RankKey, u64> = BTreeMap::new();
        for _ in 0..step.need_count("draws")? {
            match problem.decide(&mut chance) {
                Ok(chosen) => {
                    check_logits(&chosen.logits, expect.get("logits"))?;
                    *drawn.entry(chosen.selected).or_default() += 1;
                }
                Err(why) => return fail(format!("refused: {why}")),
            }
        }
        let only = match expect.get("only") {
            Some(only) => ranks("only", only)?,
            None => drawn.keys().cloned().collect(),
        };
        if let Some(rank) = drawn.keys().find(|rank| !only.contains(*rank)) {
            return fail(format!("{rank} was drawn"));
        }
        let least = expect.count("each_at_least")?.unwrap_or(0);
        match only.iter().find(|rank| drawn.get(*rank).copied().unwrap_or(0) < least) {
            Some(rank) => fail(format!("{rank} was drawn fewer than {least} times: {drawn:?}")),
            None => Ok(()),
        }
    }

    pub(super) fn score_live(&mut self, step: &Value) -> Run {
        let step = Fields::only("score_live", step, &["tokens", "loads", "expect"])?;
        let ids = tokens(step.need("tokens")?)?;
        let loads = step.get("loads").map(|loads| by_rank("loads", loads)).transpose()?;
        let prompt = Prompt::tokens(&ids);
        let mut choices = Vec::new();
        for seed in 0..REPEATS {
            choices.push(match &loads {
                Some(loads) => self.decide_with(&prompt, loads, &mut Chance::from_seed(seed))?,
                None => self.select(&SelectRequest::new(prompt), seed)?,
            });
        }
        check_choices(choices, step.need("expect")?)
    }

    /// The product's own way from a prompt to a rank.
    fn select(&self, request: &SelectRequest<'_>, seed: u64) -> Run<Choice> {
        let Some(pool) = self.pool() else { return Ok(Err(Refusal::NoWorker.name().to_owned())) };
        let mut scratch = RouterScratch::seeded(seed);
        match self.router.select(self.now, &pool, request, &mut scratch) {
            Ok(decision) => Ok(Ok(Chosen::from(&decision))),
            Err(SelectError::Refused(refusal)) => Ok(Err(refusal.name().to_owned())),
            Err(why) => fail(why.to_string()),
        }
    }

    /// The same with decode blocks that the case gives.
    fn decide_with(
        &mut self,
        prompt: &Prompt<'_>,
        loads: &BTreeMap<RankKey, &Value>,
        chance: &mut Chance,
    ) -> Run<Choice> {
        let Some(pool) = self.pool() else { return Ok(Err(Refusal::NoWorker.name().to_owned())) };
        let overlaps = self.router.overlap(&pool, prompt, None, &mut self.scratch);
        let mut candidates = Vec::new();
        for (_, rank) in pool.ranks() {
            let device = overlaps.of(rank.slot).map_or(0, |overlap| overlap.device);
            let load = loads.get(&rank.plan.rank).filter(|load| !load.is_null());
            candidates.push(Candidate {
                overlap: Overlap::device(device),
                tree_size: overlaps.tree_size(rank.slot),
                trust: rank.status.trust(),
                load: load
                    .map(|load| number("loads", load))
                    .transpose()?
                    .map_or(CandidateLoad::Unknown, known_load),
                ..Candidate::new(rank.plan.rank.clone(), rank.plan.local)
            });
        }
        let request = Request::new(prompt.isl_tokens(), pool.block_size);
        Ok(decide(&self.router.config().policy, &request, candidates, chance))
    }

    pub(super) fn admit(&mut self, step: &Value) -> Run {
        let step = Fields::only("admit", step, &["needs_blocks", "pin", "expect"])?;
        let known = ["accepted", "eligible", "reason"];
        let expect = Fields::only("admit expect", step.need("expect")?, &known)?;
        let needs = step.count("needs_blocks")?.unwrap_or(0);
        let pin = step.object("pin")?.map(|pin| read_pin(&pin)).transpose()?;
        let isl_tokens = needs.saturating_mul(self.settings.block_size);
        let form = PromptForm::Hashes { locals: &[], sequences: &[], isl_tokens };
        let prompt = Prompt { form, lora_name: None, lora_id: None, cache_salt: None, mm: &[], keys: &[] };
        let constraints = Constraints { pin: pin.as_ref(), ..Constraints::default() };
        let answer = self.select(&SelectRequest { constraints, ..SelectRequest::new(prompt) }, 1)?;
        if let Some(accepted) = expect.flag("accepted")?
            && accepted != answer.is_ok()
        {
            return fail(format!("accepted: {}, expected {accepted}", answer.is_ok()));
        }
        let eligible: BTreeSet<_> =
            answer.as_ref().map(|chosen| chosen.logits.keys().cloned().collect()).unwrap_or_default();
        if let Some(expected) = expect.get("eligible")
            && ranks("eligible", expected)? != eligible
        {
            return fail(format!("eligible are {eligible:?}, expected {expected}"));
        }
        match (expect.text("reason")?, answer.err().as_deref().map(reason)) {
            (None, _) => Ok(()),
            (Some(expected), Some(reason)) if expected == reason => Ok(()),
            (Some(expected), reason) => fail(format!("refused as {reason:?}, expected {expected}")),
        }
    }
}

/// The names of the cases.
fn reason(refusal: &str) -> &str {
    match refusal {
        "unknown_worker" => "no_worker",
        other => other,
    }
}

fn read_pin(pin: &Fields<'_>) -> Run<Pin> {
    let dp_rank = pin.get("dp_rank").map(|rank| rank_number("dp_rank", rank)).transpose()?;
    Ok(Pin { worker: WorkerId::new(pin.need_text("worker")?), dp_rank })
}

/// A scoring problem without an index.
struct Problem {
    isl_tokens: u64,
    block_size: BlockSize,
    policy: Policy,
    candidates: Vec<Candidate>,
}

impl Problem {
    fn read(step: &Fields<'_>) -> Run<Self> {
        let block_size = u32::try_from(step.need_count("block_size")?).ok().and_then(BlockSize::new);
        let Some(block_size) = block_size else { return fail("no block size") };
        let mut candidates = Vec::new();
        for (rank, load) in by_rank("ranks", step.need("ranks")?)? {
            let load = Fields::only("score rank", load, &["cached_blocks", "decode_blocks", "tree_size"])?;
            let cached = load.count("cached_blocks")?.unwrap_or(0);
            let local = LocalRank(rank.dp_rank.0);
            candidates.push(Candidate {
                overlap: Overlap::device(u32::try_from(cached).unwrap_or(u32::MAX)),
                tree_size: load.count("tree_size")?.unwrap_or(0),
                load: load.number("decode_blocks")?.map_or(CandidateLoad::Unknown, known_load),
                ..Candidate::new(rank, local)
            });
        }
        Ok(Self {
            isl_tokens: step.need_count("isl_tokens")?,
            block_size,
            policy: policy(step.get("overlap_weight").map(weight).transpose()?),
            candidates,
        })
    }

    fn decide(&self, chance: &mut Chance) -> Choice {
        let request = Request::new(self.isl_tokens, self.block_size);
        decide(&self.policy, &request, self.candidates.clone(), chance)
    }
}

/// A number, or in words one that JSON does not have.
fn weight(value: &Value) -> Run<f64> {
    match value.as_str().map(str::parse) {
        Some(Ok(weight)) => Ok(weight),
        _ => number("overlap_weight", value),
    }
}

fn decide(policy: &Policy, request: &Request<'_>, candidates: Vec<Candidate>, chance: &mut Chance) -> Choice {
    policy.validate().map_err(|why| why.to_string())?;
    let mut scorer = Scorer::default();
    let decision = scorer.decide(policy, request, candidates, chance);
    decision.map(|decision| Chosen::from(&decision)).map_err(|refusal| refusal.name().to_owned())
}

fn known_load(decode_blocks: f64) -> CandidateLoad {
    CandidateLoad::Known { decode_blocks, active_prefill_tokens: None, active_requests: None, age: None }
}

fn check_choices(choices: impl IntoIterator<Item = Choice>, expect: &Value) -> Run {
    let known = ["logits", "selected", "selected_one_of", "refused"];
    let expect = Fields::only("score expect", expect, &known)?;
    for choice in choices {
        match (expect.get("refused").filter(|refused| **refused != Value::Bool(false)), choice) {
            (None, Err(why)) => return fail(format!("refused: {why}")),
            (Some(_), Ok(chosen)) => {
                return fail(format!("{} was selected, expected a refusal", chosen.selected));
            }
            (Some(Value::Bool(_)), Err(_)) => {}
            (Some(expected), Err(why)) => {
                let expected = text("refused", expected)?;
                if expected != reason(&why) {
                    return fail(format!("refused as {why}, expected {expected}"));
                }
            }
            (None, Ok(chosen)) => check_chosen(&chosen, &expect)?,
        }
    }
    Ok(())
}

fn check_chosen(chosen: &Chosen, expect: &Fields<'_>) -> Run {
    check_logits(&chosen.logits, expect.get("logits"))?;
    let one = expect.text("selected")?.map(rank_key).transpose()?;
    if let Some(expected) = one.filter(|expected| *expected != chosen.selected) {
        return fail(format!("{} was selected, expected {expected}", chosen.selected));
    }
    match expect.get("selected_one_of") {
        Some(any) if !ranks("selected_one_of", any)?.contains(&chosen.selected) => {
            fail(format!("{} was selected, expected one of {any}", chosen.selected))
        }
        _ => Ok(()),
    }
}

/// Every candidate's logit must be named, and null is no logit.
fn check_logits(is: &BTreeMap<RankKey, Option<f64>>, expected: Option<&Value>) -> Run {
    let Some(expected) = expected else { return Ok(()) };
    let expected = by_rank("logits", expected)?;
    for (rank, expected) in &expected {
        let logit = is.get(rank).copied().flatten();
        let equal = match logit {
            Some(logit) => expected.as_f64().is_some_and(|expected| same(logit, expected)),
            None => expected.is_null(),
        };
        if !equal {
            return fail(format!("logit of {rank} is {logit:?}, expected {expected}"));
        }
    }
    match is.keys().find(|rank| !expected.contains_key(*rank)) {
        Some(rank) => fail(format!("{rank} is a candidate, which is not expected")),
        None => Ok(()),
    }
}

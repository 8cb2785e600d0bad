//! What sending a request to a rank would cost there, term by term.
//!
//! At the default policy, on a rank without active prefill tokens and without overlap on host or disk, the
//! cost is `overlap_weight * prefill_blocks + decode_blocks`, with `prefill_blocks` the prompt's tokens
//! that the rank does not hold, in blocks, not rounded.

use std::fmt;

use super::candidate::{Candidate, CandidateLoad, Request, Role};
use super::policy::Policy;

/// Every term of a candidate's cost. Lower is better. The unit is blocks unless a field says otherwise.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Terms {
    /// Prompt tokens that the rank need not compute: its blocks weighed by tier, times the block size,
    /// rounded. Neither credit nor decay nor trust counts here.
    pub cached_tokens: u64,
    /// Prompt tokens that the rank would have to compute: what a booking adds to its prefill load.
    pub effective_prefill_tokens: u64,
    /// Prefill work with this request and without any credit: tokens active on the rank plus the prompt.
    pub raw_prefill_blocks: f64,
    /// Factor on the device credit, from 0 to 1: less on a rank with more prefill load than the least
    /// loaded candidate.
    pub overlap_credit_decay: f64,
    /// Factor on the whole credit, from 0 to 1, for a view that is not live.
    pub trust_credit: f64,
    /// What the blocks that the rank holds are worth, all factors applied.
    pub overlap_credit_blocks: f64,
    /// Weight of the prefill term, copied from the policy.
    pub overlap_weight: f64,
    /// `max(0, raw_prefill_blocks − overlap_credit_blocks)`; 0 where prefill is not tracked.
    pub prefill_blocks: f64,
    /// Blocks active on the rank plus those that the request adds; `None` if the load is not known.
    pub decode_blocks: Option<f64>,
    /// Blocks active on the rank once the request decodes there, its partial last block included, whatever
    /// the policy counts; `None` if the load is not known.
    pub potential_decode_blocks: Option<u64>,
    /// Credit taken from the decode blocks: only where prefill is not tracked.
    pub decode_credit: f64,
    /// The term for requests active on the rank; 0 where their number is not known or has no weight.
    pub active_request_cost: f64,
    /// Factor for labels that the request prefers; 1 without any, and for a pinned rank.
    pub taint_multiplier: f64,
    /// The prefill term alone, times the taint multiplier: orders ranks whose load is not known.
    pub prefill_cost: f64,
    /// The whole cost; `None` if the load is not known.
    pub logit: Option<f64>,
    /// Whether this rank's prefill work counts.
    pub prefill_tracked: bool,
}

impl Terms {
    /// The terms of `candidate` for `request`; `floor` is the least prefill load among the candidates
    /// ([`prefill_floor`]).
    ///
    /// On a rank whose load is not known prefill counts even where the policy does not track it: it is all
    /// there is to order such ranks by.
    pub fn of(policy: &Policy, request: &Request<'_>, floor: Option<u64>, candidate: &Candidate) -> Self {
        let block_size = f64::from(request.block_size.get());
        let tracked = policy.track_prefill_tokens || candidate.load == CandidateLoad::Unknown;
        let reach = candidate.reach();
        let device = f64::from(reach.device);
        let farther = policy.host_cache_hit_weight * f64::from(reach.beyond_device())
            + policy.disk_cache_hit_weight * f64::from(reach.beyond_host());
        let cached_tokens = ((device + farther) * block_size).round() as u64;
        let decay = if tracked { decay(policy, request, floor, candidate) } else { 1.0 };
        let trust_credit = policy.untrusted_credit.factor(candidate.trust);

        let mut terms = Self {
            cached_tokens,
            effective_prefill_tokens: request.isl_tokens.saturating_sub(cached_tokens),
            overlap_credit_decay: decay,
            trust_credit,
            overlap_credit_blocks: (policy.overlap_score_credit * decay * device + farther) * trust_credit,
            overlap_weight: policy.overlap_weight,
            taint_multiplier: taint_multiplier(policy, request, candidate),
            prefill_tracked: tracked,
            ..Self::default()
        };
        if tracked {
            let active = candidate.prefill_ahead().unwrap_or(0) as f64;
            let prompt = request.isl_tokens.max(cached_tokens) as f64;
            terms.raw_prefill_blocks = (active + prompt) / block_size;
            terms.prefill_blocks = (terms.raw_prefill_blocks - terms.overlap_credit_blocks).max(0.0);
        } else if policy.overlap_score_credit > 0.0 && !is_for_prefill(request, candidate) {
            terms.decode_credit = terms.overlap_credit_blocks;
        }
        terms.prefill_cost = terms.overlap_weight * terms.prefill_blocks * terms.taint_multiplier;
        terms.add_load(policy, request, candidate);
        terms
    }

    /// What ranks are ordered by, as far as they can be compared: the cost, or its prefill term where there is none.
    pub fn order(&self) -> f64 {
        self.logit.unwrap_or(self.prefill_cost)
    }

    /// The line that operators know: `24.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 12.250 + 12.000`.
    /// Terms that are switched off do not show.
    pub fn formula(&self) -> Formula<'_> {
        Formula(self)
    }

    fn add_load(&mut self, policy: &Policy, request: &Request<'_>, candidate: &Candidate) {
        let CandidateLoad::Known { decode_blocks, active_requests, .. } = candidate.load else { return };
        let new = if policy.assume_kv_reuse { candidate.new_blocks } else { request.full_blocks() };
        let partial = request.blocks() - request.full_blocks();
        // Negative and endless reports are refused before they come here.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let active = decode_blocks.ceil() as u64;
        self.potential_decode_blocks = Some(active.saturating_add(new).saturating_add(partial));
        let counted = if policy.decode_counts_request { new } else { 0 };
        let decode = decode_blocks + counted as f64;
        self.decode_blocks = Some(decode);
        self.active_request_cost = policy.decode_active_request_weight * active_requests.unwrap_or(0) as f64;
        let cost = if self.prefill_tracked {
            self.overlap_weight * self.prefill_blocks + decode
        } else {
            (decode - self.decode_credit).max(0.0)
        };
        self.logit = Some((cost + self.active_request_cost) * self.taint_multiplier);
    }
}

/// The least prefill load among the candidates, in tokens; a rank whose prefill load is not known sets no
/// floor, and neither gains nor loses by it.
pub fn prefill_floor<'c>(candidates: impl Iterator<Item = &'c Candidate>) -> Option<u64> {
    candidates.filter_map(Candidate::prefill_ahead).min()
}

/// Displays a cost with its terms: in words, then in numbers.
#[derive(Clone, Copy, Debug)]
pub struct Formula<'t>(&'t Terms);

impl fmt::Display for Formula<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(terms) = self;
        let (Some(logit), Some(decode)) = (terms.logit, terms.decode_blocks) else {
            let (weight, blocks) = (terms.overlap_weight, terms.prefill_blocks);
            return write!(f, "unknown = {weight:?} * prefill_blocks + ? = {weight:?} * {blocks:.3} + ?");
        };
        write!(f, "{logit:.3} = ")?;
        self.side(f, |f| {
            if terms.prefill_tracked {
                write!(f, "{:?} * prefill_blocks + decode_blocks", terms.overlap_weight)
            } else {
                f.write_str("max(0, decode_blocks - overlap_credit)")
            }?;
            self.requests(f, |f| f.write_str("active_requests"))
        })?;
        f.write_str(" = ")?;
        self.side(f, |f| {
            if terms.prefill_tracked {
                write!(f, "{:?} * {:.3} + {decode:.3}", terms.overlap_weight, terms.prefill_blocks)
            } else {
                write!(f, "max(0, {decode:.3} - {:.3})", terms.decode_credit)
            }?;
            self.requests(f, |f| write!(f, "{:.3}", terms.active_request_cost))
        })
    }
}

type Part<'a, 'b> = &'a mut fmt::Formatter<'b>;

impl Formula<'_> {
    /// One side of the equation, within the taint multiplier if there is one.
    fn side(&self, f: Part<'_, '_>, sum: impl Fn(Part<'_, '_>) -> fmt::Result) -> fmt::Result {
        if self.0.taint_multiplier == 1.0 {
            return sum(f);
        }
        write!(f, "{:.3} * (", self.0.taint_multiplier)?;
        sum(f)?;
        f.write_str(")")
    }

    fn requests(&self, f: Part<'_, '_>, term: impl Fn(Part<'_, '_>) -> fmt::Result) -> fmt::Result {
        if self.0.active_request_cost == 0.0 {
            return Ok(());
        }
        f.write_str(" + ")?;
        term(f)
    }
}

/// A request that is for prefill gains nothing by blocks that would be decoded elsewhere. The request's
/// role decides; without one, the worker's.
fn is_for_prefill(request: &Request<'_>, candidate: &Candidate) -> bool {
    request.constraints.role.unwrap_or(candidate.role) == Role::Prefill
}

fn decay(policy: &Policy, request: &Request<'_>, floor: Option<u64>, candidate: &Candidate) -> f64 {
    let (Some(active), Some(floor)) = (candidate.prefill_ahead(), floor) else { return 1.0 };
    let excess = active.saturating_sub(floor) as f64 / f64::from(request.block_size.get());
    1.0 / (1.0 + policy.overlap_score_credit_decay * excess / request.blocks().max(1) as f64)
}

/// A pinned rank has no rival that a preference could be held against, so its cost stays the plain one.
fn taint_multiplier(policy: &Policy, request: &Request<'_>, candidate: &Candidate) -> f64 {
    let pinned = request.constraints.pin.is_some_and(|pin| pin.dp_rank.is_some());
    if pinned || policy.preferred_taints.is_empty() {
        return 1.0;
    }
    let has = |label: &str| candidate.taints.iter().any(|taint| **taint == *label);
    let weight: f64 = policy.preferred_taints.iter().filter(|(label, _)| has(label)).map(|(_, w)| w).sum();
    (-weight.tanh()).exp()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::block::BlockSize;
    use crate::ids::{LocalRank, RankKey};
    use crate::routing::candidate::{Overlap, Pin, Taints};
    use crate::routing::policy::TrustCredit;
    use crate::trust::{MayErr, Trust};

    fn request(isl_tokens: u64, block_size: u32) -> Request<'static> {
        Request::new(isl_tokens, BlockSize::new(block_size).unwrap())
    }

    fn candidate(device: u32, decode_blocks: u64) -> Candidate {
        Candidate {
            overlap: Overlap::device(device),
            load: known(decode_blocks as f64, None),
            ..Candidate::new(RankKey::new("w1", 0), LocalRank(0))
        }
    }

    fn known(decode_blocks: f64, active_prefill_tokens: Option<u64>) -> CandidateLoad {
        CandidateLoad::Known { decode_blocks, active_prefill_tokens, active_requests: Some(2), age: None }
    }

    fn terms(policy: &Policy, candidate: &Candidate) -> Terms {
        Terms::of(policy, &request(196, 16), prefill_floor([candidate].into_iter()), candidate)
    }

    /// S1, S2: the defaults print the line that operators know.
    #[test]
    fn the_formula_is_the_known_line() {
        let policy = Policy::default();
        assert_eq!(
            terms(&policy, &candidate(0, 12)).formula().to_string(),
            "24.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 12.250 + 12.000"
        );
        assert_eq!(
            terms(&policy, &candidate(12, 12)).formula().to_string(),
            "12.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 12.000"
        );
    }

    /// S2: a term that counts is shown, in words and in numbers.
    #[test]
    fn the_formula_shows_every_term_that_counts() {
        let preferred = Policy {
            decode_active_request_weight: 0.5,
            preferred_taints: vec![("slow".into(), -50.0)],
            ..Policy::default()
        };
        let slow = Candidate { taints: Taints::from([Box::from("slow")]), ..candidate(12, 12) };
        assert_eq!(
            terms(&preferred, &slow).formula().to_string(),
            "36.017 = 2.718 * (1.0 * prefill_blocks + decode_blocks + active_requests) \
             = 2.718 * (1.0 * 0.250 + 12.000 + 1.000)"
        );
        let untracked = Policy { track_prefill_tokens: false, ..Policy::default() };
        assert_eq!(
            terms(&untracked, &candidate(5, 12)).formula().to_string(),
            "7.000 = max(0, decode_blocks - overlap_credit) = max(0, 12.000 - 5.000)"
        );
        let unknown = Candidate { load: CandidateLoad::Unknown, ..candidate(12, 0) };
        assert_eq!(
            terms(&untracked, &unknown).formula().to_string(),
            "unknown = 1.0 * prefill_blocks + ? = 1.0 * 0.250 + ?"
        );
    }

    /// S3: no load, no logit; the prefill term remains.
    #[test]
    fn an_unknown_load_has_no_logit() {
        let policy = Policy { overlap_weight: 2.0, ..Policy::default() };
        let unknown = terms(&policy, &Candidate { load: CandidateLoad::Unknown, ..candidate(12, 0) });
        assert_eq!((unknown.logit, unknown.decode_blocks), (None, None));
        assert_eq!(unknown.prefill_cost, 0.5);
    }

    /// S1: the request's own blocks count unless they are told not to.
    #[test]
    fn the_requests_blocks_count_as_decode_load() {
        let new = Candidate { new_blocks: 7, ..candidate(0, 12) };
        assert_eq!(terms(&Policy::default(), &new).decode_blocks, Some(19.0));
        let without = Policy { decode_counts_request: false, ..Policy::default() };
        assert_eq!(terms(&without, &new).decode_blocks, Some(12.0));
    }

    /// The field's own figures: 30 tokens in blocks of 4, six blocks active, none of them the request's.
    #[test]
    fn potential_blocks_round_up_and_reuse_can_be_ruled_out() {
        let shared = Candidate { new_blocks: 2, ..candidate(0, 6) };
        let blocks = |policy: &Policy| {
            let terms = Terms::of(policy, &request(30, 4), None, &shared);
            (terms.decode_blocks, terms.potential_decode_blocks)
        };
        assert_eq!(blocks(&Policy::default()), (Some(8.0), Some(9)));
        let apart = Policy { assume_kv_reuse: false, ..Policy::default() };
        assert_eq!(blocks(&apart), (Some(13.0), Some(14)));
    }

    /// I6: host and disk blocks save part of their work, and a booking reckons with them too.
    #[test]
    fn tiers_are_weighed() {
        let tiers = Candidate { overlap: Overlap { device: 2, host: 6, disk: 10 }, ..candidate(0, 0) };
        let terms = terms(&Policy::default(), &tiers);
        assert_eq!(terms.overlap_credit_blocks, 6.0);
        assert_eq!((terms.cached_tokens, terms.effective_prefill_tokens), (96, 100));
    }

    /// E4: a view that may be wrong can be discounted; the default only shows it.
    #[test]
    fn an_untrusted_view_can_earn_less() {
        let partial = Candidate { trust: Trust::Partial(MayErr::Overcredit), ..candidate(12, 0) };
        assert_eq!(terms(&Policy::default(), &partial).overlap_credit_blocks, 12.0);
        let credit = TrustCredit { may_overcredit: 0.5, ..TrustCredit::default() };
        let careful = Policy { untrusted_credit: credit, ..Policy::default() };
        let discounted = terms(&careful, &partial);
        assert_eq!((discounted.overlap_credit_blocks, discounted.cached_tokens), (6.0, 192));
        assert_eq!(terms(&careful, &candidate(12, 0)).overlap_credit_blocks, 12.0);
    }

    /// L4: a rank that does not say how much prefill it has is not the least loaded one.
    #[test]
    fn unknown_prefill_load_sets_no_floor() {
        let busy = Candidate { load: known(0.0, Some(160)), ..candidate(4, 0) };
        assert_eq!(prefill_floor([&busy, &candidate(0, 0)].into_iter()), Some(160));
        let policy = Policy { overlap_score_credit_decay: 1.0, ..Policy::default() };
        let decayed = |floor| Terms::of(&policy, &request(160, 16), floor, &busy).overlap_credit_decay;
        assert_eq!((decayed(Some(160)), decayed(Some(0)), decayed(None)), (1.0, 0.5, 1.0));
    }

    /// The preference is skipped for a pinned rank, as in the field.
    #[test]
    fn a_pinned_rank_has_no_taint_multiplier() {
        let policy = Policy { preferred_taints: vec![("slow".into(), 1.0)], ..Policy::default() };
        let slow = Candidate { taints: Taints::from([Box::from("slow")]), ..candidate(0, 0) };
        let rank = Pin { worker: "w1".into(), dp_rank: Some(slow.rank.dp_rank) };
        let worker = Pin { dp_rank: None, ..rank.clone() };
        let mut request = request(16, 16);
        let mut multiplier = |pin| {
            request.constraints.pin = pin;
            Terms::of(&policy, &request, None, &slow).taint_multiplier
        };
        assert_eq!(multiplier(Some(&rank)), 1.0);
        assert!(multiplier(Some(&worker)) < 0.5 && multiplier(None) < 0.5);
    }

    /// Counts far beyond any engine's give a cost, not a panic.
    #[test]
    fn huge_counts_stay_finite() {
        let policy = Policy { overlap_weight: 1e9, decode_active_request_weight: 1e9, ..Policy::default() };
        let huge = Candidate {
            load: known(u64::MAX as f64, Some(u64::MAX)),
            new_blocks: u64::MAX,
            overlap: Overlap::device(u32::MAX),
            ..candidate(0, 0)
        };
        let terms = Terms::of(&policy, &request(u64::MAX, 1), Some(0), &huge);
        assert!(terms.logit.is_some_and(f64::is_finite));
    }
}

//! The knobs of the cost model. A policy is a plain value: swap it, or lay an override over it for one request.
//!
//! Names and defaults are the field's (Dynamo 1.6.1), except where a knob's line says that it is ours.

use std::borrow::Cow;

use thiserror::Error;

use crate::trust::{MayErr, Trust};

/// How costs are formed and how the choice among them is made.
///
/// All values are valid alone or [`Policy::validate`] names the field that is not. A policy that was never
/// validated cannot make a decision panic, but its logits may be infinite or no numbers.
#[derive(Clone, PartialEq, Debug)]
pub struct Policy {
    /// Cost of a block that must be prefilled, in blocks of decode load; 0 to 1e9. Dynamo's
    /// `prefill_load_scale`, once `overlap_score_weight`.
    pub overlap_weight: f64,
    /// Share of a prefill block that a device block saves; 0 to 1e9. Above 1 a cached block also pays for
    /// prefill load that others left on the rank.
    pub overlap_score_credit: f64,
    /// How fast the device credit fades on a rank with more prefill load than the least loaded candidate:
    /// credit / (1 + decay × excess / request blocks); 0 to 1e9.
    pub overlap_score_credit_decay: f64,
    /// Worth of a block in host memory, in device blocks; 0 to 1.
    pub host_cache_hit_weight: f64,
    /// Worth of a block on disk, in device blocks; 0 to 1.
    pub disk_cache_hit_weight: f64,
    /// Cost of each request active on the rank, in blocks; 0 to 1e9.
    pub decode_active_request_weight: f64,
    /// Whether prefill work counts at all. If not, overlap is credited against decode blocks.
    pub track_prefill_tokens: bool,
    /// Spread of the choice, dimensionless: 0 takes the lowest cost, larger values approach a uniform
    /// choice; any finite value from 0. Dynamo's `router_temperature`.
    pub temperature: f64,
    /// Whether the request's own new blocks count as decode load. Ours.
    pub decode_counts_request: bool,
    /// Whether blocks of the request that are active on the rank already are shared there. If not, all its
    /// full blocks are new.
    pub assume_kv_reuse: bool,
    /// Whether blocks that were just sent to a rank count as held there before its events say so: then a
    /// burst of equal prompts goes to one rank until its load outweighs the prefix, else it spreads. Ours.
    pub expect_booked: bool,
    /// Labels that make a rank cheaper (weight above 0) or dearer (below 0): the cost is multiplied by
    /// exp(−tanh(Σ weights of the labels it has)); weights −1e6 to 1e6, at most [`Policy::MAX_PREFERRED`].
    pub preferred_taints: Vec<(Box<str>, f64)>,
    /// What overlap is worth on a rank whose view is not live. Ours.
    pub untrusted_credit: TrustCredit,
    /// Whether a rank of which nothing is heard is no candidate, as long as one of the others could be. Ours.
    pub exclude_silent: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            overlap_weight: 1.0,
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            host_cache_hit_weight: 0.75,
            disk_cache_hit_weight: 0.25,
            decode_active_request_weight: 0.0,
            track_prefill_tokens: true,
            temperature: 0.0,
            decode_counts_request: true,
            assume_kv_reuse: true,
            expect_booked: true,
            preferred_taints: Vec::new(),
            untrusted_credit: TrustCredit::default(),
            exclude_silent: true,
        }
    }
}

impl Policy {
    /// Most labels that a request may prefer: each is compared with each label of each candidate.
    pub const MAX_PREFERRED: usize = 64;

    /// Whether every knob is in its range.
    ///
    /// # Errors
    ///
    /// Names the first field that is not, with its value and the range.
    pub fn validate(&self) -> Result<(), PolicyError> {
        in_range("overlap_weight", self.overlap_weight, 0.0, LARGEST_WEIGHT)?;
        in_range("overlap_score_credit", self.overlap_score_credit, 0.0, LARGEST_WEIGHT)?;
        in_range("overlap_score_credit_decay", self.overlap_score_credit_decay, 0.0, LARGEST_WEIGHT)?;
        in_range("host_cache_hit_weight", self.host_cache_hit_weight, 0.0, 1.0)?;
        in_range("disk_cache_hit_weight", self.disk_cache_hit_weight, 0.0, 1.0)?;
        in_range("decode_active_request_weight", self.decode_active_request_weight, 0.0, LARGEST_WEIGHT)?;
        in_range("temperature", self.temperature, 0.0, f64::MAX)?;
        if self.preferred_taints.len() > Self::MAX_PREFERRED {
            return Err(PolicyError::TooMany { field: "preferred_taints", limit: Self::MAX_PREFERRED });
        }
        for (_, weight) in &self.preferred_taints {
            in_range("preferred_taints", *weight, -LARGEST_PREFERENCE, LARGEST_PREFERENCE)?;
        }
        self.untrusted_credit.validate()
    }

    /// This policy with `over` laid upon it. Costs nothing if `over` changes nothing, else one copy.
    ///
    /// # Errors
    ///
    /// As [`Policy::validate`] of the result.
    pub fn overlaid(&self, over: &PolicyOverride) -> Result<Cow<'_, Self>, PolicyError> {
        if *over == PolicyOverride::default() {
            return Ok(Cow::Borrowed(self));
        }
        let mut policy = self.clone();
        lay(&mut policy.overlap_weight, &over.overlap_weight);
        lay(&mut policy.overlap_score_credit, &over.overlap_score_credit);
        lay(&mut policy.overlap_score_credit_decay, &over.overlap_score_credit_decay);
        lay(&mut policy.host_cache_hit_weight, &over.host_cache_hit_weight);
        lay(&mut policy.disk_cache_hit_weight, &over.disk_cache_hit_weight);
        lay(&mut policy.decode_active_request_weight, &over.decode_active_request_weight);
        lay(&mut policy.track_prefill_tokens, &over.track_prefill_tokens);
        lay(&mut policy.temperature, &over.temperature);
        lay(&mut policy.decode_counts_request, &over.decode_counts_request);
        lay(&mut policy.assume_kv_reuse, &over.assume_kv_reuse);
        lay(&mut policy.expect_booked, &over.expect_booked);
        lay(&mut policy.preferred_taints, &over.preferred_taints);
        lay(&mut policy.untrusted_credit, &over.untrusted_credit);
        lay(&mut policy.exclude_silent, &over.exclude_silent);
        policy.validate()?;
        Ok(Cow::Owned(policy))
    }
}

/// What one request changes of a [`Policy`]; a field that is `None` stays. See the policy's fields.
#[derive(Clone, PartialEq, Default, Debug)]
#[allow(missing_docs, reason = "each field is the policy's field of the same name")]
pub struct PolicyOverride {
    pub overlap_weight: Option<f64>,
    pub overlap_score_credit: Option<f64>,
    pub overlap_score_credit_decay: Option<f64>,
    pub host_cache_hit_weight: Option<f64>,
    pub disk_cache_hit_weight: Option<f64>,
    pub decode_active_request_weight: Option<f64>,
    pub track_prefill_tokens: Option<bool>,
    pub temperature: Option<f64>,
    pub decode_counts_request: Option<bool>,
    pub assume_kv_reuse: Option<bool>,
    pub expect_booked: Option<bool>,
    pub preferred_taints: Option<Vec<(Box<str>, f64)>>,
    pub untrusted_credit: Option<TrustCredit>,
    pub exclude_silent: Option<bool>,
}

/// Factor on the whole overlap credit of a rank, by the trust in its view; each 0 to 1.
///
/// A live rank's factor is 1. The default is 1 everywhere: trust is shown, and discounts nothing.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TrustCredit {
    /// History is still being asked for.
    pub joining: f64,
    /// A hole is being repaired: the view is that of the moment before it.
    pub repairing: f64,
    /// Joined late: what we credit is there, more may be.
    pub may_miss: f64,
    /// Removals were lost: what we credit may be gone.
    pub may_overcredit: f64,
    /// Nothing is heard from the rank.
    pub silent: f64,
}

impl Default for TrustCredit {
    fn default() -> Self {
        Self { joining: 1.0, repairing: 1.0, may_miss: 1.0, may_overcredit: 1.0, silent: 1.0 }
    }
}

impl TrustCredit {
    /// The same factor for every rank that is not live.
    pub const fn all(share: f64) -> Self {
        Self { joining: share, repairing: share, may_miss: share, may_overcredit: share, silent: share }
    }

    /// The factor for a rank in this state.
    pub fn factor(&self, trust: Trust) -> f64 {
        match trust {
            Trust::Live => 1.0,
            Trust::Joining => self.joining,
            Trust::Repairing => self.repairing,
            Trust::Partial(MayErr::Miss) => self.may_miss,
            Trust::Partial(MayErr::Overcredit) => self.may_overcredit,
            Trust::Silent => self.silent,
            // Nothing is credited to a rank whose blocks cannot be known.
            Trust::Unknown => 1.0,
        }
    }

    fn validate(&self) -> Result<(), PolicyError> {
        in_range("untrusted_credit.joining", self.joining, 0.0, 1.0)?;
        in_range("untrusted_credit.repairing", self.repairing, 0.0, 1.0)?;
        in_range("untrusted_credit.may_miss", self.may_miss, 0.0, 1.0)?;
        in_range("untrusted_credit.may_overcredit", self.may_overcredit, 0.0, 1.0)?;
        in_range("untrusted_credit.silent", self.silent, 0.0, 1.0)
    }
}

/// Why a policy is refused.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A knob is outside its range, or no number.
    #[error("{field} is {value}; it must be from {least} to {most}")]
    OutOfRange {
        /// The knob.
        field: &'static str,
        /// What it was given.
        value: f64,
        /// The least that it may be.
        least: f64,
        /// The most that it may be.
        most: f64,
    },
    /// A list is too long.
    #[error("{field} has more than {limit} entries")]
    TooMany {
        /// The knob.
        field: &'static str,
        /// The most entries that it may have.
        limit: usize,
    },
}

impl PolicyError {
    /// The knob that is wrong.
    pub fn field(&self) -> &'static str {
        match self {
            Self::OutOfRange { field, .. } | Self::TooMany { field, .. } => field,
        }
    }
}

/// Times the largest count (2^64) this is far from infinite, and no operator needs more.
const LARGEST_WEIGHT: f64 = 1e9;

/// tanh is 1 from 20 on; the limit only keeps sums finite.
const LARGEST_PREFERENCE: f64 = 1e6;

fn in_range(field: &'static str, value: f64, least: f64, most: f64) -> Result<(), PolicyError> {
    // A NaN is in no range.
    if (least..=most).contains(&value) {
        Ok(())
    } else {
        Err(PolicyError::OutOfRange { field, value, least, most })
    }
}

fn lay<T: Clone>(knob: &mut T, over: &Option<T>) {
    if let Some(value) = over {
        *knob = value.clone();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;

    #[test]
    fn the_default_is_valid_and_an_empty_override_copies_nothing() {
        let policy = Policy::default();
        assert_eq!(policy.validate(), Ok(()));
        assert!(matches!(policy.overlaid(&PolicyOverride::default()), Ok(Cow::Borrowed(_))));
    }

    #[test]
    fn an_override_changes_what_it_names_and_nothing_else() {
        let over = PolicyOverride { temperature: Some(0.5), ..PolicyOverride::default() };
        let policy = Policy { overlap_weight: 3.0, ..Policy::default() };
        let laid = policy.overlaid(&over).unwrap();
        assert_eq!(*laid, Policy { temperature: 0.5, ..policy.clone() });
    }

    #[test]
    fn every_knob_can_be_overridden() {
        let taints = vec![("a".into(), 1.0)];
        let credit = TrustCredit { silent: 0.0, ..TrustCredit::default() };
        let over = PolicyOverride {
            overlap_weight: Some(2.0),
            overlap_score_credit: Some(3.0),
            overlap_score_credit_decay: Some(4.0),
            host_cache_hit_weight: Some(0.5),
            disk_cache_hit_weight: Some(0.6),
            decode_active_request_weight: Some(7.0),
            track_prefill_tokens: Some(false),
            temperature: Some(8.0),
            decode_counts_request: Some(false),
            assume_kv_reuse: Some(false),
            expect_booked: Some(false),
            preferred_taints: Some(taints.clone()),
            untrusted_credit: Some(credit),
            exclude_silent: Some(false),
        };
        let all = Policy {
            overlap_weight: 2.0,
            overlap_score_credit: 3.0,
            overlap_score_credit_decay: 4.0,
            host_cache_hit_weight: 0.5,
            disk_cache_hit_weight: 0.6,
            decode_active_request_weight: 7.0,
            track_prefill_tokens: false,
            temperature: 8.0,
            decode_counts_request: false,
            assume_kv_reuse: false,
            expect_booked: false,
            preferred_taints: taints,
            untrusted_credit: credit,
            exclude_silent: false,
        };
        assert_eq!(*Policy::default().overlaid(&over).unwrap(), all);
    }

    #[test]
    fn every_knob_out_of_range_is_named() {
        let field = |change: &dyn Fn(&mut PolicyOverride)| {
            let mut over = PolicyOverride::default();
            change(&mut over);
            Policy::default().overlaid(&over).unwrap_err().field()
        };
        let half_open = TrustCredit { silent: 1.5, ..TrustCredit::default() };
        assert_eq!(field(&|o| o.overlap_weight = Some(-1.0)), "overlap_weight");
        assert_eq!(field(&|o| o.overlap_weight = Some(f64::NAN)), "overlap_weight");
        assert_eq!(field(&|o| o.overlap_score_credit = Some(f64::INFINITY)), "overlap_score_credit");
        assert_eq!(field(&|o| o.overlap_score_credit_decay = Some(-0.1)), "overlap_score_credit_decay");
        assert_eq!(field(&|o| o.host_cache_hit_weight = Some(1.1)), "host_cache_hit_weight");
        assert_eq!(field(&|o| o.disk_cache_hit_weight = Some(-1.0)), "disk_cache_hit_weight");
        assert_eq!(field(&|o| o.decode_active_request_weight = Some(2e9)), "decode_active_request_weight");
        assert_eq!(field(&|o| o.temperature = Some(f64::INFINITY)), "temperature");
        assert_eq!(field(&|o| o.preferred_taints = Some(vec![("a".into(), 2e6)])), "preferred_taints");
        assert_eq!(field(&|o| o.preferred_taints = Some(vec![("a".into(), 1.0); 65])), "preferred_taints");
        assert_eq!(field(&|o| o.untrusted_credit = Some(half_open)), "untrusted_credit.silent");
    }
}

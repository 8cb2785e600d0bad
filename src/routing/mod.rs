//! Routing: which rank should serve this request, and why.
//!
//! Plain values in, a value out: candidates with their overlap, load and trust go through the filter
//! ([`Sieve`]), get a cost ([`Terms`]), and one is chosen ([`Reason`]); the [`Decision`] holds all of it.
//! No socket, no clock; chance comes from a generator that the caller seeds ([`Chance`]).
//!
//! **What it costs.** One pass over the candidates to filter, one for the costs, three for the choice; no
//! allocation once the [`Scorer`] has seen the largest fleet. A candidate that is copied in costs two
//! reference counts. Nothing is cached between requests.
//!
//! **What it does not know.** Where a load figure came from, what an index is, how an answer is sent.

pub mod booking;
pub mod candidate;
pub mod choice;
pub mod cost;
pub mod decision;
pub mod dispatch;
pub mod drain;
pub mod filter;
pub mod overlaps;
pub mod policy;
pub mod prompt;
pub mod router;

pub use booking::Booking;
pub use candidate::{
    AllowList, Balance, Candidate, CandidateLoad, Constraints, EngineStyle, Overlap, Pin, RankList, Request,
    Role, Standing, Taints,
};
pub use choice::Chance;
pub use cost::Terms;
pub use decision::{Decision, LeftOut, Pick, Reason, Refusal, RefusalKind, Scored, Tie};
pub use dispatch::Dispatch;
pub use drain::{Doubt, DoubtWhy, Drain, Room};
pub use filter::{Excluded, Obstacle, Sieve};
pub use overlaps::Overlaps;
pub use policy::{Policy, PolicyError, PolicyOverride, TrustCredit};
pub use prompt::{MmItem, Prompt, PromptForm, PromptHashes};
pub use router::{Reserved, Router, RouterConfig, RouterScratch, SelectError, SelectRequest};

use decision::KeptOut;

/// Scores candidates; keeps its table from request to request, so that a warm scorer allocates nothing.
///
/// One per querying thread. It holds no state that a later request could see.
///
/// ```
/// use rankwise::block::BlockSize;
/// use rankwise::ids::{LocalRank, RankKey};
/// use rankwise::routing::{Candidate, CandidateLoad, Chance, Overlap, Policy, Request, Scorer};
///
/// let rank = |dp_rank, cached| Candidate {
///     overlap: Overlap::device(cached),
///     load: CandidateLoad::Known {
///         decode_blocks: 12.0,
///         active_prefill_tokens: None,
///         active_requests: None,
///         age: None,
///     },
///     ..Candidate::new(RankKey::new("w2", dp_rank), LocalRank(dp_rank - 4))
/// };
/// let request = Request::new(196, BlockSize::new(16).unwrap());
/// let mut scorer = Scorer::default();
/// let mut chance = Chance::from_seed(1);
/// let decision = scorer.decide(&Policy::default(), &request, [rank(4, 0), rank(5, 12)], &mut chance)?;
/// assert_eq!(decision.pick.dp_rank().map(|rank| rank.0), Some(5));
/// assert_eq!(
///     decision.chosen().terms.formula().to_string(),
///     "12.250 = 1.0 * prefill_blocks + decode_blocks = 1.0 * 0.250 + 12.000"
/// );
/// # Ok::<(), rankwise::routing::Refusal>(())
/// ```
#[derive(Default, Debug)]
pub struct Scorer {
    scored: Vec<Scored>,
    /// Ranks of which nothing is heard: looked at where there is no other.
    silent: Vec<Scored>,
    left_out: Vec<LeftOut>,
}

impl Scorer {
    /// Decides where `request` goes.
    ///
    /// `candidates` are **all** declared ranks of the pool, so that a pin on a rank that does not exist is
    /// told from one that is not free, and so that the smaller tree wins among ranks without a match too.
    ///
    /// # Errors
    ///
    /// The [`Refusal`] says what stood in the way of the candidates that came furthest.
    pub fn decide<'s>(
        &'s mut self,
        policy: &Policy,
        request: &Request<'_>,
        candidates: impl IntoIterator<Item = Candidate>,
        chance: &mut Chance,
    ) -> Result<Decision<'s>, Refusal> {
        let mut sieve = Sieve::new(&request.constraints).excluding_silent(policy.exclude_silent);
        self.sift(&mut sieve, candidates);
        let all_silent = self.scored.is_empty() && !self.silent.is_empty() && sieve.lets_silent_in();
        if all_silent {
            std::mem::swap(&mut self.scored, &mut self.silent);
            self.left_out.retain(|left_out| left_out.obstacle != Obstacle::Silent);
        }
        let floor = cost::prefill_floor(self.scored.iter().map(|scored| &scored.candidate));
        for Scored { candidate, terms } in &mut self.scored {
            *terms = Terms::of(policy, request, floor, candidate);
        }
        let Some((chosen, reason)) = choice::choose(&self.scored, policy.temperature, chance) else {
            return Err(sieve.refusal());
        };
        let kept_out = KeptOut { all_silent, counts: sieve.excluded(), ranks: &self.left_out };
        Ok(Decision::new(policy, request, &self.scored, (chosen, reason), kept_out))
    }

    /// Puts every candidate where it belongs, and remembers who was left out.
    fn sift(&mut self, sieve: &mut Sieve<'_>, candidates: impl IntoIterator<Item = Candidate>) {
        self.scored.clear();
        self.silent.clear();
        self.left_out.clear();
        for candidate in candidates {
            let Some(obstacle) = sieve.obstacle_of(&candidate) else {
                self.scored.push(Scored { candidate, terms: Terms::default() });
                continue;
            };
            if obstacle.is_of_the_rank() && self.left_out.len() < LeftOut::MAX {
                self.left_out.push(LeftOut { rank: candidate.rank.clone(), obstacle });
            }
            if obstacle == Obstacle::Silent {
                self.silent.push(Scored { candidate, terms: Terms::default() });
            }
        }
    }
}

#[cfg(test)]
mod tests;

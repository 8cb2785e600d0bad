//! Who may serve a request at all.

use super::candidate::{Candidate, Constraints, Standing};
use super::decision::Refusal;
use crate::ids::{DpRank, RankKey};
use crate::trust::Trust;

/// Lets through the candidates that a request's constraints allow, and knows afterwards why there were none.
///
/// Offer it every declared rank of the pool, in any order. Keeps counts, no candidates.
#[derive(Clone, Debug)]
pub struct Sieve<'r> {
    constraints: Constraints<'r>,
    offered: u32,
    excluded: Excluded,
    exclude_silent: bool,
    /// A rank of which something is heard is kept out by its load alone.
    busy_elsewhere: bool,
    /// First and last rank of the pinned worker, once one of its ranks was offered.
    pinned_range: Option<(DpRank, DpRank)>,
    pinned_rank_exists: bool,
}

impl<'r> Sieve<'r> {
    /// A sieve for one request.
    pub fn new(constraints: &Constraints<'r>) -> Self {
        Self {
            constraints: *constraints,
            offered: 0,
            excluded: Excluded::default(),
            exclude_silent: true,
            busy_elsewhere: false,
            pinned_range: None,
            pinned_rank_exists: false,
        }
    }

    /// The same sieve, which keeps silent ranks out or does not.
    #[must_use]
    pub fn excluding_silent(self, exclude_silent: bool) -> Self {
        Self { exclude_silent, ..self }
    }

    /// Whether `candidate` may serve the request.
    pub fn passes(&mut self, candidate: &Candidate) -> bool {
        self.obstacle_of(candidate).is_none()
    }

    /// What keeps `candidate` out; `None` if it may serve the request.
    pub fn obstacle_of(&mut self, candidate: &Candidate) -> Option<Obstacle> {
        self.offered = self.offered.saturating_add(1);
        self.note_pinned(&candidate.rank);
        let obstacle = self.obstacle(candidate)?;
        self.excluded.count(obstacle);
        self.busy_elsewhere |= obstacle == Obstacle::Overloaded && !self.is_shut_out(candidate);
        Some(obstacle)
    }

    /// Lets the silent ranks in where nothing passed because every rank that could serve the request is silent;
    /// `false` otherwise. Load elsewhere brings none of them back, and a pin is answered or refused.
    pub fn lets_silent_in(&mut self) -> bool {
        let let_in = !self.busy_elsewhere && self.constraints.pin.is_none();
        if let_in {
            self.excluded.forget(Obstacle::Silent);
        }
        let_in
    }

    /// What kept out those that did not pass, so far.
    pub fn excluded(&self) -> Excluded {
        self.excluded
    }

    /// Why nothing passed: what is wrong with the pin, else what stopped the candidates that came furthest.
    /// Means nothing if something passed.
    pub fn refusal(&self) -> Refusal {
        if let Some(pin) = self.constraints.pin {
            if self.constraints.allowed.is_some_and(|allowed| !allowed.contains(&pin.worker)) {
                return Refusal::NotAllowed { worker: pin.worker.clone() };
            }
            let Some((first, last)) = self.pinned_range else {
                return Refusal::UnknownWorker { worker: pin.worker.clone() };
            };
            if let Some(dp_rank) = pin.dp_rank
                && !self.pinned_rank_exists
            {
                let rank = RankKey { worker: pin.worker.clone(), dp_rank };
                return Refusal::NoSuchRank { rank, first, last };
            }
        }
        match self.excluded.furthest() {
            None | Some(Obstacle::NotPinned) => Refusal::NoWorker,
            Some(Obstacle::NotAllowed) => Refusal::NoneAllowed,
            Some(Obstacle::WrongRole) => {
                Refusal::NoneInRole { role: self.constraints.role.unwrap_or_default() }
            }
            Some(Obstacle::LeftOut) => Refusal::AllLeftOut { ranks: self.excluded.by(Obstacle::LeftOut) },
            Some(Obstacle::MissingTaint) => Refusal::TaintsUnmet,
            Some(Obstacle::NoEndpoint) => Refusal::NoEndpoint,
            Some(Obstacle::TooSmall) => Refusal::TooLarge { ranks: self.excluded.by(Obstacle::TooSmall) },
            Some(Obstacle::Asleep) => Refusal::Asleep { ranks: self.excluded.by(Obstacle::Asleep) },
            Some(Obstacle::Silent) => Refusal::Silent { ranks: self.excluded.by(Obstacle::Silent) },
            Some(Obstacle::Overloaded) => {
                Refusal::Overloaded { ranks: self.excluded.by(Obstacle::Overloaded) }
            }
        }
    }

    fn note_pinned(&mut self, rank: &RankKey) {
        let Some(pin) = self.constraints.pin else { return };
        if pin.worker != rank.worker {
            return;
        }
        let (first, last) = self.pinned_range.unwrap_or((rank.dp_rank, rank.dp_rank));
        self.pinned_range = Some((first.min(rank.dp_rank), last.max(rank.dp_rank)));
        self.pinned_rank_exists |= pin.dp_rank == Some(rank.dp_rank);
    }

    /// Whether nothing is heard of the rank and that keeps it out.
    fn is_shut_out(&self, candidate: &Candidate) -> bool {
        self.exclude_silent && !self.is_forced() && candidate.trust == Trust::Silent
    }

    fn is_forced(&self) -> bool {
        self.constraints.force_pin && self.constraints.pin.is_some()
    }

    fn obstacle(&self, candidate: &Candidate) -> Option<Obstacle> {
        let Constraints { role, allowed, pin, left_out, required_taints, .. } = self.constraints;
        let worker = &candidate.rank.worker;
        if allowed.is_some_and(|allowed| !allowed.contains(worker)) {
            return Some(Obstacle::NotAllowed);
        }
        let wanted = |dp_rank: Option<DpRank>| dp_rank.is_none_or(|wanted| wanted == candidate.rank.dp_rank);
        if pin.is_some_and(|pin| pin.worker != *worker || !wanted(pin.dp_rank)) {
            return Some(Obstacle::NotPinned);
        }
        if left_out.is_some_and(|left_out| left_out.contains(&candidate.rank)) {
            return Some(Obstacle::LeftOut);
        }
        if !candidate.role.serves(role) {
            return Some(Obstacle::WrongRole);
        }
        if !required_taints.iter().all(|required| candidate.taints.contains(required)) {
            return Some(Obstacle::MissingTaint);
        }
        match candidate.standing {
            Standing::Ready if self.is_shut_out(candidate) => Some(Obstacle::Silent),
            Standing::Asleep if self.is_forced() => None,
            Standing::Ready => None,
            Standing::Asleep => Some(Obstacle::Asleep),
            Standing::NoEndpoint => Some(Obstacle::NoEndpoint),
            Standing::TooSmall => Some(Obstacle::TooSmall),
            Standing::Overloaded => Some(Obstacle::Overloaded),
        }
    }
}

/// The candidates that may serve a request, without scoring them.
///
/// # Errors
///
/// As [`Sieve::refusal`], if there is none.
pub fn eligible<'c>(
    constraints: &Constraints<'_>,
    candidates: impl IntoIterator<Item = &'c Candidate>,
) -> Result<Vec<&'c Candidate>, Refusal> {
    let mut sieve = Sieve::new(constraints);
    let (mut passed, mut silent) = (Vec::new(), Vec::new());
    for candidate in candidates {
        match sieve.obstacle_of(candidate) {
            None => passed.push(candidate),
            Some(Obstacle::Silent) => silent.push(candidate),
            Some(_) => {}
        }
    }
    if passed.is_empty() && !silent.is_empty() && sieve.lets_silent_in() {
        passed = silent;
    }
    if passed.is_empty() { Err(sieve.refusal()) } else { Ok(passed) }
}

/// What keeps a candidate out, in the order in which it is looked at.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Obstacle {
    /// Its worker is not on the allow-list.
    NotAllowed,
    /// Another worker or rank is pinned.
    NotPinned,
    /// The request does not want it.
    LeftOut,
    /// Its worker is for something else.
    WrongRole,
    /// It lacks a label that the request requires.
    MissingTaint,
    /// Its worker has no address to send a request to.
    NoEndpoint,
    /// It holds fewer blocks than the request needs.
    TooSmall,
    /// Its engine sleeps.
    Asleep,
    /// Nothing is heard of it.
    Silent,
    /// It is over its limit.
    Overloaded,
}

impl Obstacle {
    /// All of them, in the order in which they are looked at.
    pub const ALL: [Self; 10] = [
        Self::NotAllowed,
        Self::NotPinned,
        Self::LeftOut,
        Self::WrongRole,
        Self::MissingTaint,
        Self::NoEndpoint,
        Self::TooSmall,
        Self::Asleep,
        Self::Silent,
        Self::Overloaded,
    ];

    /// Whether it is the rank's own state, and not what the request wants, that keeps it out.
    pub fn is_of_the_rank(self) -> bool {
        self >= Self::NoEndpoint
    }

    /// The obstacle's name in answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::NotPinned => "not_pinned",
            Self::LeftOut => "left_out",
            Self::WrongRole => "wrong_role",
            Self::MissingTaint => "missing_taint",
            Self::NoEndpoint => "no_endpoint",
            Self::TooSmall => "too_small",
            Self::Asleep => "asleep",
            Self::Silent => "silent",
            Self::Overloaded => "overloaded",
        }
    }
}

/// How many ranks were kept out, by the first obstacle that each met.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Excluded([u32; Obstacle::ALL.len()]);

impl Excluded {
    /// Ranks that this obstacle kept out.
    pub fn by(&self, obstacle: Obstacle) -> u32 {
        self.0[obstacle as usize]
    }

    /// Every obstacle with the ranks that it kept out.
    pub fn iter(&self) -> impl Iterator<Item = (Obstacle, u32)> + '_ {
        Obstacle::ALL.into_iter().map(|obstacle| (obstacle, self.by(obstacle)))
    }

    /// Ranks kept out by anything.
    pub fn total(&self) -> u32 {
        self.0.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The obstacle that stopped the candidates which came furthest.
    fn furthest(&self) -> Option<Obstacle> {
        Obstacle::ALL.into_iter().rev().find(|&obstacle| self.by(obstacle) > 0)
    }

    fn forget(&mut self, obstacle: Obstacle) {
        self.0[obstacle as usize] = 0;
    }

    fn count(&mut self, obstacle: Obstacle) {
        let count = &mut self.0[obstacle as usize];
        *count = count.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use super::*;
    use crate::ids::{LocalRank, WorkerId};
    use crate::routing::candidate::{AllowList, Pin, Role, Taints};

    fn worker(name: &str, start: u32, size: u32) -> Vec<Candidate> {
        (0..size).map(|local| Candidate::new(RankKey::new(name, start + local), LocalRank(local))).collect()
    }

    fn names(constraints: &Constraints<'_>, candidates: &[Candidate]) -> Result<Vec<String>, Refusal> {
        eligible(constraints, candidates).map(|passed| passed.iter().map(|c| c.rank.to_string()).collect())
    }

    fn pin(worker: &str, dp_rank: Option<u32>) -> Pin {
        Pin { worker: worker.into(), dp_rank: dp_rank.map(DpRank) }
    }

    /// R5, case C44: rank 0 is a rank that w2 does not have, not "any".
    #[test]
    fn a_pin_outside_the_range_is_refused_and_never_replaced() {
        let mut fleet = worker("w2", 4, 4);
        fleet[1].standing = Standing::Overloaded;
        let ask = |dp_rank| names(&Constraints { pin: Some(&pin("w2", dp_rank)), ..<_>::default() }, &fleet);
        for missing in [0, 2, 8] {
            let rank = RankKey::new("w2", missing);
            assert_eq!(
                ask(Some(missing)),
                Err(Refusal::NoSuchRank { rank, first: DpRank(4), last: DpRank(7) })
            );
        }
        assert_eq!(ask(Some(6)).unwrap(), ["w2:6"]);
        assert_eq!(ask(Some(5)), Err(Refusal::Overloaded { ranks: 1 }));
        assert_eq!(ask(None).unwrap(), ["w2:4", "w2:6", "w2:7"]);
    }

    /// R5: rank 0 exists here, and is the one that is meant.
    #[test]
    fn a_pin_on_rank_zero_is_a_pin() {
        let zero = pin("w1", Some(0));
        let constraints = Constraints { pin: Some(&zero), ..Constraints::default() };
        assert_eq!(names(&constraints, &worker("w1", 0, 3)).unwrap(), ["w1:0"]);
    }

    /// L15, case C42: refused only when no rank is left.
    #[test]
    fn overloaded_ranks_are_no_candidates() {
        let everybody = Constraints::default();
        let mut fleet = worker("w1", 0, 2);
        fleet[0].standing = Standing::Overloaded;
        assert_eq!(names(&everybody, &fleet).unwrap(), ["w1:1"]);
        fleet[1].standing = Standing::Overloaded;
        assert_eq!(names(&everybody, &fleet), Err(Refusal::Overloaded { ranks: 2 }));
        assert_eq!(names(&everybody, &[]), Err(Refusal::NoWorker));
    }

    #[test]
    fn a_pin_beside_the_allow_list_or_the_fleet_says_so() {
        let fleet = worker("w1", 0, 2);
        let ask = |pin: &Pin, allowed: &[&str]| {
            let allowed: AllowList = allowed.iter().map(WorkerId::new).collect();
            let constraints =
                Constraints { pin: Some(pin), allowed: Some(&allowed), ..Constraints::default() };
            names(&constraints, &fleet)
        };
        let refused = Refusal::NotAllowed { worker: "w1".into() };
        assert_eq!(ask(&pin("w1", Some(1)), &["w2"]), Err(refused.clone()));
        assert_eq!(ask(&pin("w1", None), &[]), Err(refused));
        assert_eq!(ask(&pin("w2", None), &["w2"]), Err(Refusal::UnknownWorker { worker: "w2".into() }));
        assert_eq!(ask(&pin("w1", Some(1)), &["w2", "w1"]).unwrap(), ["w1:1"]);
    }

    /// R9 and the rest: the refusal names what stopped those who came furthest.
    #[test]
    fn the_refusal_names_the_last_obstacle() {
        let mut fleet = [worker("p", 0, 1), worker("d", 0, 1), worker("x", 0, 1)].concat();
        fleet[0].role = Role::Prefill;
        fleet[1].role = Role::Decode;
        fleet[2].role = Role::Prefill;
        fleet[2].taints = Taints::from([Box::from("zone=b")]);
        let (zone, nope) = ([Box::from("zone=b")], [Box::from("nope")]);
        let decode = Constraints { role: Some(Role::Decode), ..Constraints::default() };
        assert_eq!(names(&decode, &fleet).unwrap(), ["d:0"]);
        let zoned = Constraints { required_taints: &zone, ..decode };
        assert_eq!(names(&zoned, &fleet), Err(Refusal::TaintsUnmet));
        let prefill = Constraints { role: Some(Role::Prefill), ..zoned };
        assert_eq!(names(&prefill, &fleet).unwrap(), ["x:0"]);
        assert_eq!(
            names(&Constraints { required_taints: &nope, ..decode }, &fleet),
            Err(Refusal::TaintsUnmet)
        );
        assert_eq!(names(&prefill, &fleet[1..2]), Err(Refusal::NoneInRole { role: Role::Prefill }));
        let nobody = AllowList::default();
        let closed = Constraints { allowed: Some(&nobody), ..Constraints::default() };
        assert_eq!(names(&closed, &fleet), Err(Refusal::NoneAllowed));
        fleet[1].standing = Standing::NoEndpoint;
        assert_eq!(names(&decode, &fleet), Err(Refusal::NoEndpoint));
    }
}

//! Can this worker be taken out? Answered from exact figures alone.
//!
//! An estimate may guide a choice, but it must not become a promise that the rest of the fleet has room: where
//! any figure is less than exact, the answer is that it cannot be told, and why.

use std::fmt;

use crate::fleet::{Capacity, Provenance, Role};
use crate::ids::RankKey;

/// What is known of one rank's room.
#[derive(Clone, PartialEq, Debug)]
pub struct Room {
    /// The rank.
    pub rank: RankKey,
    /// Blocks that it can hold.
    pub capacity: Capacity,
    /// Blocks in use; `None` is unknown.
    pub used: Option<f64>,
    /// Requests on it; `None` is unknown.
    pub requests: Option<u64>,
    /// Requests that it runs at once, as declared or as its engine says; `None` is unknown.
    pub request_limit: Option<u64>,
    /// What its worker is for.
    pub role: Role,
    /// Whether it could serve now: it is neither silent nor asleep.
    pub serves: bool,
}

/// Whether a worker can be drained: whether what it holds would fit into the free blocks of the other ranks
/// of its pool.
#[derive(Clone, PartialEq, Debug)]
pub enum Drain {
    /// It can.
    Yes {
        /// Blocks that the worker uses.
        needed: f64,
        /// Blocks that the others have free.
        free: f64,
    },
    /// It cannot.
    No {
        /// Blocks that the worker uses.
        needed: f64,
        /// Blocks that the others have free.
        free: f64,
    },
    /// It cannot: the others run as many requests as they may.
    NoPlaces {
        /// Requests on the worker.
        needed: u64,
        /// Requests that the others could take.
        free: u64,
    },
    /// It cannot: it is the last one of its pool that can serve what it serves.
    Last,
    /// Some figure is missing or not exact.
    CannotTell {
        /// Every reason, by rank.
        because: Vec<Doubt>,
    },
}

/// A figure that is not good enough.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Doubt {
    /// Whose.
    pub rank: RankKey,
    /// What is wrong with it.
    pub why: DoubtWhy,
}

/// Why a figure is not good enough.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DoubtWhy {
    /// Its capacity was never told.
    CapacityUnknown,
    /// Its capacity is known, but not exactly.
    CapacityNotExact(Provenance),
    /// What it uses is not known: no fresh report says so.
    UseUnknown,
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = &self.rank;
        match self.why {
            DoubtWhy::CapacityUnknown => write!(f, "the capacity of {rank} is unknown"),
            DoubtWhy::CapacityNotExact(Provenance::Divided) => {
                write!(f, "the capacity of {rank} is only a share of its worker's total")
            }
            DoubtWhy::CapacityNotExact(_) => write!(f, "the capacity of {rank} is only an estimate"),
            DoubtWhy::UseUnknown => write!(f, "what {rank} uses is unknown"),
        }
    }
}

impl Drain {
    /// The answer for a worker with the ranks `own`, whose pool has the other ranks `others`.
    ///
    /// Enough exact room on some ranks is a yes, whatever is unknown of the rest. Ranks that cannot serve have
    /// no room.
    pub fn of(own: &[Room], others: &[Room]) -> Self {
        let others: Vec<&Room> = others.iter().filter(|room| room.serves).collect();
        if !covered(own, &others) {
            return Self::Last;
        }
        if let Some((needed, free)) = places(own, &others).filter(|(needed, free)| needed > free) {
            return Self::NoPlaces { needed, free };
        }
        let mut because = Vec::new();
        let mut needed = 0.0;
        for room in own {
            match room.used {
                Some(used) => needed += used,
                None => because.push(Doubt { rank: room.rank.clone(), why: DoubtWhy::UseUnknown }),
            }
        }
        let need_is_known = because.is_empty();
        let mut free = 0.0;
        for room in others {
            match room.free() {
                Ok(blocks) => free += blocks,
                Err(why) => because.push(Doubt { rank: room.rank.clone(), why }),
            }
        }
        match (need_is_known && free >= needed, because.is_empty()) {
            (true, _) => Self::Yes { needed, free },
            (false, true) => Self::No { needed, free },
            (false, false) => Self::CannotTell { because },
        }
    }

    /// The answer in one word: `yes`, `no`, `cannot_tell`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Yes { .. } => "yes",
            Self::No { .. } | Self::NoPlaces { .. } | Self::Last => "no",
            Self::CannotTell { .. } => "cannot_tell",
        }
    }
}

/// Whether others can do everything that this worker is for.
fn covered(own: &[Room], others: &[&Room]) -> bool {
    [Role::Prefill, Role::Decode]
        .into_iter()
        .filter(|&role| own.iter().any(|room| room.role.serves(Some(role))))
        .all(|role| others.iter().any(|room| room.role.serves(Some(role))))
}

/// Requests of the worker, and how many the others could take; `None` if a figure is missing.
fn places(own: &[Room], others: &[&Room]) -> Option<(u64, u64)> {
    let needed = own.iter().map(|room| room.requests).sum::<Option<u64>>()?;
    let free = |room: &&Room| Some(room.request_limit?.saturating_sub(room.requests?));
    Some((needed, others.iter().map(free).sum::<Option<u64>>()?))
}

impl Room {
    fn free(&self) -> Result<f64, DoubtWhy> {
        let capacity = match (self.capacity, self.capacity.exact()) {
            (_, Some(blocks)) => blocks as f64,
            (Capacity::Unknown, None) => return Err(DoubtWhy::CapacityUnknown),
            (Capacity::Known { provenance, .. }, None) => {
                return Err(DoubtWhy::CapacityNotExact(provenance));
            }
        };
        let used = self.used.ok_or(DoubtWhy::UseUnknown)?;
        Ok((capacity - used).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(worker: &str, provenance: Provenance, blocks: u64, used: Option<f64>) -> Room {
        Room {
            rank: RankKey::new(worker, 0),
            capacity: Capacity::Known { blocks, provenance },
            used,
            requests: None,
            request_limit: None,
            role: Role::Both,
            serves: true,
        }
    }

    /// L13: exact figures say yes or no.
    #[test]
    fn exact_figures_decide() {
        let own = [room("a", Provenance::Exact, 100, Some(40.0))];
        let others = |used| [room("b", Provenance::Exact, 100, Some(used))];
        assert_eq!(Drain::of(&own, &others(60.0)), Drain::Yes { needed: 40.0, free: 40.0 });
        assert_eq!(Drain::of(&own, &others(61.0)), Drain::No { needed: 40.0, free: 39.0 });
        assert_eq!(Drain::of(&own, &[]).name(), "no");
    }

    /// L17: never the last one that can serve, whatever the figures are; and requests need a place, too.
    #[test]
    fn the_last_one_is_never_drained() {
        let own = [room("a", Provenance::Exact, 100, Some(0.0))];
        let other = room("b", Provenance::Exact, 100, Some(0.0));
        assert_eq!(Drain::of(&own, &[]), Drain::Last);
        let silent = Room { serves: false, ..other.clone() };
        assert_eq!(Drain::of(&own, std::slice::from_ref(&silent)), Drain::Last);
        let prefill = Room { role: Role::Prefill, ..other.clone() };
        let decode = Room { role: Role::Decode, ..other.clone() };
        assert_eq!(Drain::of(&own, std::slice::from_ref(&prefill)), Drain::Last);
        assert_eq!(Drain::of(&own, &[prefill.clone(), decode]).name(), "yes");
        assert_eq!(Drain::of(&[Room { role: Role::Prefill, ..own[0].clone() }], &[prefill]).name(), "yes");
        let busy = [Room { requests: Some(5), ..own[0].clone() }];
        let limited = |is| [Room { requests: Some(is), request_limit: Some(8), ..other.clone() }];
        assert_eq!(Drain::of(&busy, &limited(3)).name(), "yes");
        assert_eq!(Drain::of(&busy, &limited(4)), Drain::NoPlaces { needed: 5, free: 4 });
        // Room that is silent is none.
        let need = [room("a", Provenance::Exact, 100, Some(40.0))];
        let little = room("c", Provenance::Exact, 10, Some(0.0));
        assert_eq!(Drain::of(&need, &[silent, little]).name(), "no");
    }

    /// L13: an estimate never becomes a hard limit.
    #[test]
    fn an_estimate_cannot_tell() {
        let own = [room("a", Provenance::Exact, 100, Some(40.0))];
        let estimated = [room("b", Provenance::Estimated, 1_000, Some(0.0))];
        let Drain::CannotTell { because } = Drain::of(&own, &estimated) else {
            unreachable!("an estimate said yes or no")
        };
        assert_eq!(because[0].to_string(), "the capacity of b:0 is only an estimate");
        let divided = [room("b", Provenance::Divided, 1_000, Some(0.0))];
        assert_eq!(Drain::of(&own, &divided).name(), "cannot_tell");
        let unheard = [room("b", Provenance::Exact, 1_000, None)];
        assert_eq!(Drain::of(&own, &unheard).name(), "cannot_tell");
    }

    /// L13: room that is known for sure is enough, whatever is unknown beside it.
    #[test]
    fn exact_room_is_enough_beside_what_is_unknown() {
        let own = [room("a", Provenance::Exact, 100, Some(40.0))];
        let others =
            [room("b", Provenance::Exact, 100, Some(10.0)), room("c", Provenance::Estimated, 100, None)];
        assert_eq!(Drain::of(&own, &others).name(), "yes");
        let unknown_need = [room("a", Provenance::Exact, 100, None)];
        assert_eq!(Drain::of(&unknown_need, &others).name(), "cannot_tell");
    }
}

//! The walk of the grid: two state machines that take the moment and what arrived, and return actions.
//!
//! ```text
//! rank                          coordinator
//!   Join(envelope)        ->                      all have joined, or the join limit names who has not
//!                         <-    Welcome(limits)
//!                         <-    Envelopes(of all)
//!   Grid(digest, counts)  ->                      all are one, or the error names each value and its ranks
//!                         <-    WarmUp
//!   Warm                  ->
//!                         <-    Run(point 0)      when all are warm
//!   Done(point 0)         ->                      ... and so on, a point when all have done the one before
//!                         <-    Finished
//! ```
//!
//! Whatever goes wrong ends the bench for all: the coordinator tells each rank why. A rank that hears nothing
//! for longer than the coordinator may need ends by itself.

mod coordinator;
mod participant;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use thiserror::Error;

pub use coordinator::{Coordinator, CoordinatorAction, Outcome, PeerId, PointOutcome};
pub use participant::{Claim, Participant, ParticipantAction};

use super::envelope::{Nonsense, NothingInCommon};
use super::grid::{NoGrid, Point, Summary};
use crate::ids::DpRank;

/// Ranks in one bench at most. Each is a connection with up to 8 MiB of kernel buffers at the coordinator;
/// the largest deployments of today have some hundred ranks.
pub const MAX_RANKS: u32 = 512;

/// What the coordinator waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Every rank's envelope.
    Join,
    /// Every rank's grid.
    Grid,
    /// The warm-up.
    WarmUp,
    /// A point.
    Point {
        /// Its place, from 0.
        index: u32,
        /// How many there are.
        of: u32,
        /// The point.
        point: Point,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Join => f.write_str("joining"),
            Self::Grid => f.write_str("comparing grids"),
            Self::WarmUp => f.write_str("warming up"),
            Self::Point { index, of, point } => write!(f, "point {} of {of} ({point})", index + 1),
        }
    }
}

/// Why a bench ended before its time. Ranks are named by their numbers, and what differs by its values.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum Broken {
    /// Ranks that were waited for in vain.
    #[error("{} of {of} {} not heard of within {limit:?} while {step}{}{}", Ranks(missing), were(missing), heard(*of, missing), strangers(*foreign))]
    Missing {
        /// What was waited for.
        step: Step,
        /// Who did not answer.
        missing: Vec<DpRank>,
        /// How many ranks there are.
        of: u32,
        /// How long was waited.
        limit: Duration,
        /// Messages on the port that were not of this bench.
        foreign: u64,
    },
    /// A rank's connection or process has ended.
    #[error("rank {rank} ({who}) is gone while {step}: {how}")]
    Gone {
        /// The rank.
        rank: DpRank,
        /// Its process and host.
        who: String,
        /// What was waited for.
        step: Step,
        /// What is known of its end.
        how: String,
    },
    /// A rank says that it cannot go on.
    #[error("rank {rank} ({who}) has failed while {step}: {why}")]
    Failed {
        /// The rank.
        rank: DpRank,
        /// Its process and host.
        who: String,
        /// What was waited for.
        step: Step,
        /// Its reason.
        why: String,
    },
    /// An envelope that cannot be one.
    #[error("rank {rank} ({who}) states an envelope that cannot be: {nonsense}")]
    Nonsense {
        /// The rank.
        rank: DpRank,
        /// Its process and host.
        who: String,
        /// The number.
        nonsense: Nonsense,
    },
    /// Envelopes without anything in common.
    #[error(transparent)]
    NothingInCommon(#[from] NothingInCommon),
    /// The common envelope has no room for a request.
    #[error(transparent)]
    NoGrid(#[from] NoGrid),
    /// Ranks that made different grids of one common envelope: different versions or different code.
    #[error("the ranks' grids differ: {}", groups(.0))]
    GridsDiffer(Vec<(Summary, Vec<DpRank>)>),
    /// The ranks agree on a grid, and the coordinator has another.
    #[error("the ranks have {ranks}; the coordinator has {coordinator}")]
    GridNotOurs {
        /// What the ranks made.
        ranks: Summary,
        /// What the coordinator made.
        coordinator: Summary,
    },
    /// Two ranks claim one number.
    #[error("rank {rank} is claimed twice: by {first} and by {second}")]
    ClaimedTwice {
        /// The number.
        rank: DpRank,
        /// Who came first.
        first: String,
        /// Who came then.
        second: String,
    },
    /// A rank that counts the ranks otherwise.
    #[error("rank {rank} ({who}) counts {theirs} ranks, the coordinator {ours}")]
    Miscounted {
        /// The rank.
        rank: u32,
        /// Its process and host.
        who: String,
        /// Its count.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// A rank answers what was not asked.
    #[error("rank {rank} ({who}) is out of step: it says {said} while {step}")]
    OutOfStep {
        /// The rank.
        rank: DpRank,
        /// Its process and host.
        who: String,
        /// What it said.
        said: String,
        /// What was waited for.
        step: Step,
    },
    /// A rank that has joined sends what cannot be read.
    #[error("rank {rank} ({who}) sent a message that cannot be read: {why}")]
    Unreadable {
        /// The rank.
        rank: DpRank,
        /// Its process and host.
        who: String,
        /// What is wrong with it.
        why: String,
    },
    /// This rank was told to stop.
    #[error("the coordinator has ended the bench: {0}")]
    Told(String),
    /// This rank has heard nothing from the coordinator.
    #[error("rank {rank}: the coordinator was not heard of within {limit:?} while {doing}")]
    CoordinatorSilent {
        /// This rank.
        rank: DpRank,
        /// What it waited for.
        doing: String,
        /// How long it waited.
        limit: Duration,
    },
    /// The coordinator's connection has ended, or never began.
    #[error("rank {rank}: the coordinator is gone while {doing}: {how}")]
    CoordinatorGone {
        /// This rank.
        rank: DpRank,
        /// What it waited for.
        doing: String,
        /// What is known.
        how: String,
    },
    /// This rank's own work failed or took too long.
    #[error("rank {rank}: {why}")]
    Own {
        /// This rank.
        rank: DpRank,
        /// Why.
        why: String,
    },
}

/// Ranks as people name them: `rank 3`, `ranks 0-2, 5`.
struct Ranks<'a>(&'a [DpRank]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        if self.0.is_empty() {
            return f.write_str("none");
        }
        let chains = self.0.chunk_by(|one, next| one.0.checked_add(1) == Some(next.0));
        for (nth, chain) in chains.enumerate() {
            let comma = if nth == 0 { "" } else { ", " };
            match chain {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                one => write!(f, "{comma}{}", one.first().map_or(0, |rank| rank.0))?,
            }
        }
        Ok(())
    }
}

fn were(ranks: &[DpRank]) -> &'static str {
    if ranks.len() == 1 { "was" } else { "were" }
}

fn heard(of: u32, missing: &[DpRank]) -> String {
    let heard: Vec<DpRank> = (0..of).map(DpRank).filter(|rank| !missing.contains(rank)).collect();
    if heard.is_empty() { String::new() } else { format!("; {} answered", Ranks(&heard)) }
}

fn strangers(foreign: u64) -> String {
    match foreign {
        0 => String::new(),
        1 => "; one message on the port was not of this bench".to_owned(),
        count => format!("; {count} messages on the port were not of this bench"),
    }
}

fn groups(groups: &[(Summary, Vec<DpRank>)]) -> String {
    let told: Vec<String> =
        groups.iter().map(|(summary, ranks)| format!("{}: {summary}", Ranks(ranks))).collect();
    told.join("; ")
}

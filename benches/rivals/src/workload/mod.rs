//! What the contenders are fed with and asked: events of a simulated fleet, and prompts.

pub mod blocks;
pub mod fleet;
pub mod history;
pub mod pool;
pub mod questions;
pub mod trace;
pub mod traffic;

use self::blocks::{BlockId, Event};
use self::fleet::Fleet;

/// Where requests come from.
#[derive(Debug)]
pub enum Workload {
    /// Made up.
    Traffic(Box<traffic::Traffic>),
    /// Read from a trace.
    Trace(Box<trace::Replay>),
}

impl Workload {
    /// The engines.
    pub fn fleet(&self) -> &Fleet {
        match self {
            Self::Traffic(traffic) => &traffic.fleet,
            Self::Trace(replay) => &replay.fleet,
        }
    }

    /// The engines.
    pub fn fleet_mut(&mut self) -> &mut Fleet {
        match self {
            Self::Traffic(traffic) => &mut traffic.fleet,
            Self::Trace(replay) => &mut replay.fleet,
        }
    }

    /// What happens before the first request.
    pub fn begin(&mut self, events: &mut Vec<Event>) {
        if let Self::Traffic(traffic) = self {
            traffic.pin_hot(events);
        }
    }

    /// One step of some request; `false` if there are no more requests.
    pub fn step(&mut self, events: &mut Vec<Event>) -> bool {
        match self {
            Self::Traffic(traffic) => {
                traffic.step(events);
                true
            }
            Self::Trace(replay) => replay.step(events),
        }
    }

    /// Prompts that may go on, most of which some rank still holds.
    pub fn live(&self) -> Vec<&[BlockId]> {
        match self {
            Self::Traffic(traffic) => {
                traffic.conversations.iter().map(|conversation| conversation.path.as_slice()).collect()
            }
            Self::Trace(replay) => replay.recent().collect(),
        }
    }
}

/// Steps the workload until it has named at least `blocks` blocks or `enough` says so; the events, or `None`
/// if there are no more.
pub fn next_chunk(
    workload: &mut Workload,
    blocks: usize,
    enough: impl Fn(&Workload) -> bool,
) -> Option<Vec<Event>> {
    let mut events = Vec::new();
    let (mut counted, mut named) = (0, 0);
    while named < blocks && !enough(workload) && workload.step(&mut events) {
        named += events[counted..].iter().map(Event::blocks).sum::<usize>();
        counted = events.len();
    }
    (!events.is_empty()).then_some(events)
}

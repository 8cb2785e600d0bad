//! Asking for memory ahead: while one event is applied, what the next ones will touch is on its way.
//!
//! Each event leads through three places, of which each is known by the one before: a line of the table of
//! names, the run, and the block within it. So there are three steps, some events apart.

use super::WriteSection;
use super::tree::Place;
use crate::block::BlockHash;

/// The names by which an event finds its place.
#[derive(Clone, Copy, Default, Debug)]
pub struct Leads<'a> {
    /// The name of the block before a store's first.
    pub parent: Option<&'a BlockHash>,
    /// The names that the event brings or takes.
    pub names: &'a [BlockHash],
}

/// What is known of an event that is still to come.
#[derive(Clone, Copy, Default, Debug)]
struct Awaited {
    /// The hash of the name that leads to the event's place.
    hash: Option<u64>,
    /// What that name probably stands for.
    place: Option<Place>,
}

/// Events between asking for names and the run, the block, and the event itself: an event takes about as long
/// as a miss, and misses wait for each other.
const RUN: usize = 3;
const BLOCKS: usize = 5;
const APPLIED: usize = 6;

/// A ring that an event stays in until it is applied.
const RING: usize = 8;

/// Names of one event that are asked for ahead; longer events ask for the rest themselves, group by group.
const NAMES: usize = 4;

impl WriteSection<'_> {
    /// Applies events one after the other. The memory of each is asked for while those before it are applied,
    /// which saves short events half of their time where the index is larger than the caches.
    pub fn apply_each<'e, E>(
        &mut self,
        events: &'e [E],
        leads: impl Fn(&'e E) -> Leads<'e>,
        mut apply: impl FnMut(&mut Self, &'e E),
    ) {
        if let [event] = events {
            return apply(self, event);
        }
        let mut ring = [Awaited::default(); RING];
        for step in 0..events.len() + APPLIED {
            let before = |steps: usize| step.checked_sub(steps).filter(|at| *at < events.len());
            if let Some(event) = events.get(step) {
                ring[step % RING] = self.ask_for_names(leads(event));
            }
            if let Some(at) = before(RUN) {
                self.ask_for_run(&mut ring[at % RING]);
            }
            if let Some(at) = before(BLOCKS) {
                self.ask_for_blocks(&ring[at % RING]);
            }
            if let Some(at) = before(APPLIED) {
                apply(self, &events[at]);
            }
        }
    }

    fn ask_for_names(&self, leads: Leads<'_>) -> Awaited {
        let tree = &self.core.tree;
        let parent = leads.parent.map(|name| tree.ask_for_name(name));
        let mut first = None;
        for name in leads.names.iter().take(NAMES) {
            let hash = tree.ask_for_name(name);
            first = first.or(Some(hash));
        }
        Awaited { hash: parent.or(first), place: None }
    }

    fn ask_for_run(&self, awaited: &mut Awaited) {
        awaited.place = awaited.hash.and_then(|hash| self.core.tree.ask_for_run(hash));
    }

    fn ask_for_blocks(&self, awaited: &Awaited) {
        if let (Some(place), Some(pin)) = (awaited.place, &self.pin) {
            self.core.tree.ask_for_blocks(place, pin);
        }
    }
}

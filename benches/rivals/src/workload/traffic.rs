//! Synthetic serving traffic: conversations over shared system prompts, and hot documents on every rank.

use super::blocks::{BlockId, Event};
use super::fleet::{Fleet, Request, Step};
use crate::dice::Dice;

/// Base system prompts, and variants of each.
const BASES: usize = 16;
const VARIANTS: usize = 8;
/// A conversation that would grow beyond this is given up.
const LONGEST: usize = 2_300;
/// Share of the requests that open a conversation.
const OPENING: f64 = 0.22;
/// Share of the turns that go back to the conversation's rank; the others move it for good.
const RETURNING: f64 = 0.85;
/// The hot documents: blocks, and whether every rank holds all of it.
const HOT: [(usize, bool); 5] = [(64, true), (512, true), (2_048, true), (2_048, false), (512, false)];

/// A conversation that goes on.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// The rank that serves it.
    pub rank: u32,
    /// Everything said so far.
    pub path: Vec<BlockId>,
    busy: bool,
}

/// A document that every rank holds, all of it or a prefix.
#[derive(Clone, Debug)]
pub struct HotDocument {
    /// Its blocks.
    pub path: Vec<BlockId>,
    /// Whether every rank holds all of it.
    pub whole: bool,
}

/// The traffic and the fleet that serves it.
#[derive(Debug)]
pub struct Traffic {
    /// The engines.
    pub fleet: Fleet,
    /// Those that may go on.
    pub conversations: Vec<Conversation>,
    /// System prompts that conversations open with.
    pub system_prompts: Vec<Vec<BlockId>>,
    /// Pinned everywhere.
    pub hot: Vec<HotDocument>,
    dice: Dice,
    most_conversations: usize,
    most_running: usize,
    longest: usize,
}

impl Traffic {
    /// Empty caches of `entries` blocks in all.
    pub fn new(seed: u64, ranks: u32, entries: usize) -> Self {
        let capacity = entries / ranks as usize;
        let mut traffic = Self {
            fleet: Fleet::new(ranks, capacity),
            conversations: Vec::new(),
            system_prompts: Vec::new(),
            hot: Vec::new(),
            dice: Dice::new(seed),
            most_conversations: entries / 300,
            most_running: (4 * ranks as usize).min(entries / 4_000 + 8),
            longest: LONGEST.min(capacity / 2),
        };
        traffic.write_prompts(capacity);
        traffic
    }

    /// System prompts and documents. A small cache gets shorter documents: pinned, they must leave room.
    fn write_prompts(&mut self, capacity: usize) {
        let Self { fleet, dice, system_prompts, hot, .. } = self;
        let shrink = (self.longest as f64 / LONGEST as f64).min(1.0);
        let scaled = |blocks: usize| ((blocks as f64 * shrink) as usize).max(2);
        for _ in 0..BASES {
            let mut base = Vec::new();
            fleet.blocks.extend(&mut base, scaled(dice.within(16, 128)));
            for _ in 0..VARIANTS {
                let mut path = base.clone();
                fleet.blocks.extend(&mut path, scaled(dice.within(8, 256)));
                system_prompts.push(path);
            }
        }
        dice.shuffle(system_prompts);
        // All five take about 3,900 blocks of a cache on the average.
        let shrink = (capacity as f64 / 3.0 / 3_900.0).min(1.0);
        for (blocks, whole) in HOT {
            let mut path = Vec::new();
            fleet.blocks.extend(&mut path, ((blocks as f64 * shrink) as usize).max(2));
            hot.push(HotDocument { path, whole });
        }
    }

    /// Puts the hot documents on every rank.
    pub fn pin_hot(&mut self, events: &mut Vec<Event>) {
        for document in &self.hot {
            for rank in 0..self.fleet.ranks() {
                let len = match document.whole {
                    true => document.path.len(),
                    false => self.dice.within(1, document.path.len()),
                };
                self.fleet.pin(rank, &document.path[..len], events);
            }
        }
    }

    /// One step of one running request, of which there are always as many as the fleet takes.
    pub fn step(&mut self, events: &mut Vec<Event>) {
        while self.fleet.running() < self.most_running {
            let request = self.next_request();
            self.fleet.admit(request);
        }
        if let Step::Ended(request) = self.fleet.step(&mut self.dice, events) {
            let conversation = &mut self.conversations[request.tag];
            conversation.busy = false;
            conversation.path = request.path;
            conversation.path.truncate(request.done);
        }
    }

    fn next_request(&mut self) -> Request {
        let known = self.conversations.len();
        if known > 0 && !self.dice.chance(OPENING) {
            // A few tries: most conversations are idle.
            for _ in 0..8 {
                let at = self.dice.below(known);
                let conversation = &self.conversations[at];
                if !conversation.busy && (1..self.longest - 64).contains(&conversation.path.len()) {
                    return self.turn(at);
                }
            }
        }
        self.opening()
    }

    fn turn(&mut self, at: usize) -> Request {
        if !self.dice.chance(RETURNING) {
            self.conversations[at].rank = self.dice.below(self.fleet.ranks() as usize) as u32;
        }
        let path = self.conversations[at].path.clone();
        self.say(at, path, 0)
    }

    fn opening(&mut self) -> Request {
        let rank = self.dice.below(self.fleet.ranks() as usize) as u32;
        // Skewed: an eighth of the prompts opens half of the conversations.
        let popular = self.dice.share().powi(3) * self.system_prompts.len() as f64;
        let path = self.system_prompts[popular as usize].clone();
        let body = match self.dice.below(100) {
            0..6 => self.dice.within(1_024, 1_900),
            6..25 => self.dice.within(256, 800),
            _ => self.dice.within(4, 96),
        };
        let body = body.min(self.longest.saturating_sub(path.len() + 64));
        let conversation = Conversation { rank, path: Vec::new(), busy: true };
        let at = self.place(conversation);
        self.say(at, path, body)
    }

    /// Where a new conversation goes: to the end, or in the place of one that is forgotten.
    fn place(&mut self, conversation: Conversation) -> usize {
        if self.conversations.len() >= self.most_conversations.max(self.most_running + 1) {
            for _ in 0..64 {
                let at = self.dice.below(self.conversations.len());
                if !self.conversations[at].busy {
                    self.conversations[at] = conversation;
                    return at;
                }
            }
        }
        self.conversations.push(conversation);
        self.conversations.len() - 1
    }

    fn say(&mut self, at: usize, mut path: Vec<BlockId>, body: usize) -> Request {
        let asked = body + self.dice.within(2, 32);
        self.fleet.blocks.extend(&mut path, asked);
        let prompt = path.len();
        let answered = self.dice.within(4, 32);
        self.fleet.blocks.extend(&mut path, answered);
        let conversation = &mut self.conversations[at];
        conversation.busy = true;
        Request { rank: conversation.rank, path, prompt, done: 0, tag: at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Replays the events into plain sets: they must say what the pools hold, leaves first.
    #[test]
    fn events_tell_the_truth_and_leave_no_hole() {
        let mut traffic = Traffic::new(3, 4, 24_000);
        let mut events = Vec::new();
        traffic.pin_hot(&mut events);
        (0..20_000).for_each(|_| traffic.step(&mut events));
        let mut held: Vec<HashSet<BlockId>> = vec![HashSet::new(); 4];
        let blocks = &traffic.fleet.blocks;
        for event in &events {
            match event {
                Event::Stored { rank, parent, blocks: stored } => {
                    let held = &mut held[*rank as usize];
                    let mut before = *parent;
                    for &block in stored {
                        assert_eq!(blocks.parent(block), before);
                        assert!(before.is_none_or(|before| held.contains(&before)));
                        assert!(held.insert(block));
                        before = Some(block);
                    }
                }
                Event::Removed { rank, blocks: removed } => {
                    assert!(removed.iter().all(|block| held[*rank as usize].remove(block)));
                }
                Event::Cleared { .. } => unreachable!("nobody clears"),
            }
        }
        for (rank, held) in (0..).zip(&held) {
            assert_eq!(held.len(), traffic.fleet.held(rank));
            assert!(
                held.iter().all(|&block| blocks.parent(block).is_none_or(|parent| held.contains(&parent)))
            );
        }
        assert!(events.iter().any(|event| matches!(event, Event::Removed { .. })), "no churn");
    }
}

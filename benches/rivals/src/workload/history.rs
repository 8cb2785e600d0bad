//! Histories that mislead: small forests of chains on six ranks, where engines do what the other workloads do
//! not. Truth is kept block by block.

use rustc_hash::FxHashMap;

use super::blocks::{BlockId, Blocks, Event, Naming};
use crate::dice::Dice;

/// Ranks of every history.
pub const RANKS: u32 = 6;
/// Blocks that a rank may hold before it evicts.
const ROOM: usize = 160;

/// What the engines do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scenario {
    /// Store, and evict leaves first.
    LeafFirst,
    /// The same, with stores repeated, every copy removed, and names removed that nobody knows.
    Duplicates,
    /// Contents from a small alphabet: equal content at other depths and under other parents.
    RepeatedContent,
    /// Ranks are cleared and filled again.
    Clears,
    /// Removals name an unknown block before those that are held.
    UnknownFirst,
    /// Blocks in the middle go, and come back with everything behind them.
    InteriorRefilled,
    /// Blocks in the middle go, and come back alone.
    HoleAlone,
    /// Blocks are stored under a parent that their rank has evicted, which may come back.
    EvictedParent,
    /// Half of the ranks name the same content otherwise.
    TwoSeeds,
    /// A block is announced twice and removed once: it is still there.
    TwoCopies,
    /// All of it in turns, but for [`Scenario::TwoCopies`].
    Everything,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::LeafFirst,
        Self::Duplicates,
        Self::RepeatedContent,
        Self::Clears,
        Self::UnknownFirst,
        Self::InteriorRefilled,
        Self::HoleAlone,
        Self::EvictedParent,
        Self::TwoSeeds,
        Self::TwoCopies,
        Self::Everything,
    ];

    /// As reports call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::LeafFirst => "leaf-first eviction",
            Self::Duplicates => "duplicate stores, repeated and unknown removals",
            Self::RepeatedContent => "equal content at other depths",
            Self::Clears => "ranks cleared and filled again",
            Self::UnknownFirst => "unknown name first in a removal",
            Self::InteriorRefilled => "interior block removed, stored again with its tail",
            Self::HoleAlone => "interior block removed, stored again alone",
            Self::EvictedParent => "store under a parent that was evicted",
            Self::TwoSeeds => "half the ranks hash otherwise",
            Self::TwoCopies => "two copies, one removed",
            Self::Everything => "all but two copies in turns",
        }
    }
}

/// A history on its way.
#[derive(Debug)]
pub struct History {
    /// All blocks.
    pub blocks: Blocks,
    scenario: Scenario,
    dice: Dice,
    ranks: Vec<Holding>,
    paths: Vec<Vec<BlockId>>,
    children: FxHashMap<(Option<BlockId>, u32), BlockId>,
}

/// What one rank holds.
#[derive(Default, Debug)]
struct Holding {
    copies: FxHashMap<BlockId, usize>,
    /// Blocks held right behind a block, held or not.
    behind: FxHashMap<BlockId, usize>,
    /// The same blocks as in `copies`, to pick from.
    order: Vec<BlockId>,
}

impl History {
    /// A forest, and nobody holds anything.
    pub fn new(scenario: Scenario, seed: u64) -> Self {
        let mut history = Self {
            blocks: Blocks::default(),
            scenario,
            dice: Dice::new(seed),
            ranks: (0..RANKS).map(|_| Holding::default()).collect(),
            paths: Vec::new(),
            children: FxHashMap::default(),
        };
        if matches!(scenario, Scenario::TwoSeeds | Scenario::Everything) {
            history.blocks.naming = Naming::TwoSeeds;
        }
        (0..24).for_each(|_| history.grow());
        history
    }

    /// One thing happens; a rank may say several events.
    pub fn step(&mut self, events: &mut Vec<Event>) {
        if self.dice.chance(0.05) {
            self.grow();
        }
        let rank = self.dice.below(RANKS as usize);
        let full = self.ranks[rank].order.len() > ROOM;
        match self.dice.below(100) {
            _ if full => self.evict_leaves(rank, events),
            0..40 => self.store(rank, events),
            40..60 => self.evict_leaves(rank, events),
            _ => self.misbehave(rank, events),
        }
    }

    /// A prompt: a path of the forest up to some depth, perhaps with an unknown end.
    pub fn prompt(&mut self) -> Vec<BlockId> {
        let at = self.dice.below(self.paths.len());
        let len = self.dice.within(1, self.paths[at].len());
        let mut path = self.paths[at][..len].to_vec();
        if self.dice.chance(0.2) {
            let more = self.dice.within(1, 4);
            self.blocks.extend(&mut path, more);
        }
        path
    }

    /// How many leading blocks each rank really holds.
    pub fn truth(&self, path: &[BlockId]) -> Vec<(u32, u32)> {
        let reach = |holding: &Holding| {
            path.iter().take_while(|block| holding.copies.contains_key(block)).count() as u32
        };
        let reaches = (0..).zip(self.ranks.iter().map(reach));
        reaches.filter(|&(_, reach)| reach > 0).collect()
    }

    /// A new path: a new chain, or a branch off an old one.
    fn grow(&mut self) {
        let mut path = Vec::new();
        if !self.paths.is_empty() && self.dice.chance(0.7) {
            let of = &self.paths[self.dice.below(self.paths.len())];
            path.extend_from_slice(&of[..self.dice.within(0, of.len() - 1)]);
        }
        for _ in 0..self.dice.within(4, 40) {
            let parent = path.last().copied();
            let content = match self.scenario {
                Scenario::RepeatedContent => self.dice.within(1, 3) as u32,
                Scenario::Everything if self.dice.chance(0.3) => self.dice.within(1, 3) as u32,
                _ => self.blocks.len() as u32 + 100,
            };
            let blocks = &mut self.blocks;
            let child = self.children.entry((parent, content));
            path.push(*child.or_insert_with(|| blocks.with_content(parent, content)));
        }
        self.paths.push(path);
    }

    fn misbehave(&mut self, rank: usize, events: &mut Vec<Event>) {
        let scenario = match self.scenario {
            Scenario::Everything => Scenario::ALL[self.dice.below(8)],
            scenario => scenario,
        };
        match scenario {
            Scenario::Duplicates => match self.dice.chance(0.3) {
                true => self.remove_unknown(rank, events),
                false => self.store_again(rank, events),
            },
            Scenario::Clears if self.dice.chance(0.1) => {
                self.ranks[rank] = Holding::default();
                events.push(Event::Cleared { rank: rank as u32 });
            }
            Scenario::UnknownFirst => self.remove_unknown(rank, events),
            Scenario::InteriorRefilled | Scenario::HoleAlone => match self.dice.chance(0.5) {
                true => self.remove_interior(rank, events),
                false => self.refill(rank, scenario == Scenario::InteriorRefilled, events),
            },
            Scenario::EvictedParent => match self.dice.chance(0.6) {
                true => self.store_under_evicted(rank, events),
                false => self.refill(rank, false, events),
            },
            Scenario::TwoCopies => match self.dice.chance(0.6) {
                true => self.store_again(rank, events),
                false => self.remove_one_copy(rank, events),
            },
            _ => self.store(rank, events),
        }
    }

    /// Stores what is missing of a path from its first hole on.
    fn store(&mut self, rank: usize, events: &mut Vec<Event>) {
        let path = self.paths[self.dice.below(self.paths.len())].clone();
        let held = path.iter().take_while(|block| self.ranks[rank].holds(**block)).count();
        if held < path.len() {
            let end = self.dice.within(held + 1, path.len());
            self.announce(rank, path[..end].to_vec(), held, events);
        }
    }

    /// Announces blocks that are held once more, and perhaps some that are not.
    fn store_again(&mut self, rank: usize, events: &mut Vec<Event>) {
        let path = self.paths[self.dice.below(self.paths.len())].clone();
        let held = path.iter().take_while(|block| self.ranks[rank].holds(**block)).count();
        if held > 0 {
            let start = self.dice.below(held);
            let end = self.dice.within(start + 1, path.len().min(held + 4));
            self.announce(rank, path[..end].to_vec(), start, events);
        }
    }

    fn announce(&mut self, rank: usize, path: Vec<BlockId>, from: usize, events: &mut Vec<Event>) {
        let parent = from.checked_sub(1).map(|before| path[before]);
        let blocks = path[from..].to_vec();
        blocks.iter().for_each(|&block| self.ranks[rank].put(block, self.blocks.parent(block)));
        events.push(Event::Stored { rank: rank as u32, parent, blocks });
    }

    /// Evicts a leaf and some of the blocks before it, with all their copies.
    fn evict_leaves(&mut self, rank: usize, events: &mut Vec<Event>) {
        let most = self.dice.within(1, 8);
        let Some(mut block) = self.pick(rank, |holding, block| !holding.has_behind(block)) else { return };
        let mut removed = Vec::new();
        for _ in 0..most {
            self.take_all(rank, block, &mut removed);
            let holding = &self.ranks[rank];
            match self.blocks.parent(block) {
                Some(parent) if holding.holds(parent) && !holding.has_behind(parent) => block = parent,
                _ => break,
            }
        }
        events.push(Event::Removed { rank: rank as u32, blocks: removed });
    }

    fn remove_unknown(&mut self, rank: usize, events: &mut Vec<Event>) {
        let unknown = self.blocks.fresh(None);
        let leaf = self.pick(rank, |holding, block| !holding.has_behind(block));
        let mut blocks = vec![unknown];
        if let Some(leaf) = leaf {
            self.take_all(rank, leaf, &mut blocks);
        }
        events.push(Event::Removed { rank: rank as u32, blocks });
    }

    fn remove_interior(&mut self, rank: usize, events: &mut Vec<Event>) {
        let Some(block) = self.pick(rank, Holding::has_behind) else { return };
        let mut blocks = Vec::new();
        self.take_all(rank, block, &mut blocks);
        events.push(Event::Removed { rank: rank as u32, blocks });
    }

    fn remove_one_copy(&mut self, rank: usize, events: &mut Vec<Event>) {
        let Some(block) = self.pick(rank, |holding, block| holding.copies[&block] > 1) else { return };
        if let Some(copies) = self.ranks[rank].copies.get_mut(&block) {
            *copies -= 1;
        }
        events.push(Event::Removed { rank: rank as u32, blocks: vec![block] });
    }

    /// Stores the blocks of a hole again, alone or with those behind it that are held.
    fn refill(&mut self, rank: usize, with_tail: bool, events: &mut Vec<Event>) {
        let path = self.paths[self.dice.below(self.paths.len())].clone();
        let holding = &self.ranks[rank];
        let hole = path.iter().take_while(|block| holding.holds(**block)).count();
        let missing = path[hole..].iter().take_while(|block| !holding.holds(**block)).count();
        if hole + missing == path.len() {
            return;
        }
        let tail = path[hole + missing..].iter().take_while(|block| holding.holds(**block)).count();
        let end = hole + missing + if with_tail { tail } else { 0 };
        self.announce(rank, path[..end].to_vec(), hole, events);
    }

    /// Evicts a block and stores something behind it.
    fn store_under_evicted(&mut self, rank: usize, events: &mut Vec<Event>) {
        let path = self.paths[self.dice.below(self.paths.len())].clone();
        let held = path.iter().take_while(|block| self.ranks[rank].holds(**block)).count();
        if held == 0 || held == path.len() {
            return;
        }
        let mut blocks = Vec::new();
        self.take_all(rank, path[held - 1], &mut blocks);
        events.push(Event::Removed { rank: rank as u32, blocks });
        let end = self.dice.within(held + 1, path.len());
        self.announce(rank, path[..end].to_vec(), held, events);
    }

    /// One of the blocks that a rank holds and that fit, after a few tries.
    fn pick(&mut self, rank: usize, fits: impl Fn(&Holding, BlockId) -> bool) -> Option<BlockId> {
        let holding = &self.ranks[rank];
        for _ in 0..64 {
            let block = *holding.order.get(self.dice.below(holding.order.len().max(1)))?;
            if fits(holding, block) {
                return Some(block);
            }
        }
        None
    }

    /// Takes every copy of a block, naming it once per copy.
    fn take_all(&mut self, rank: usize, block: BlockId, removed: &mut Vec<BlockId>) {
        let copies = self.ranks[rank].take(block, self.blocks.parent(block));
        removed.extend(std::iter::repeat_n(block, copies));
    }
}

impl Holding {
    fn holds(&self, block: BlockId) -> bool {
        self.copies.contains_key(&block)
    }

    fn has_behind(&self, block: BlockId) -> bool {
        self.behind.get(&block).is_some_and(|&count| count > 0)
    }

    fn put(&mut self, block: BlockId, parent: Option<BlockId>) {
        let copies = self.copies.entry(block).or_default();
        *copies += 1;
        if *copies == 1 {
            self.order.push(block);
            if let Some(parent) = parent {
                *self.behind.entry(parent).or_default() += 1;
            }
        }
    }

    fn take(&mut self, block: BlockId, parent: Option<BlockId>) -> usize {
        let Some(copies) = self.copies.remove(&block) else { return 0 };
        self.order.retain(|&held| held != block);
        if let Some(parent) = parent
            && let Some(behind) = self.behind.get_mut(&parent)
        {
            *behind -= 1;
        }
        copies
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replays each history into plain sets of copies: the truth must follow from the events alone.
    #[test]
    fn the_truth_follows_from_the_events() {
        for scenario in Scenario::ALL {
            let mut history = History::new(scenario, 5);
            let mut held: Vec<FxHashMap<BlockId, usize>> = vec![FxHashMap::default(); RANKS as usize];
            for _ in 0..2_000 {
                let mut events = Vec::new();
                history.step(&mut events);
                events.iter().for_each(|event| follow(&mut held, event));
                let path = history.prompt();
                let reach = |held: &FxHashMap<BlockId, usize>| {
                    path.iter().take_while(|block| held.get(block).is_some_and(|&copies| copies > 0)).count()
                };
                let expected: Vec<(u32, u32)> = (0..)
                    .zip(held.iter().map(|held| reach(held) as u32))
                    .filter(|&(_, reach)| reach > 0)
                    .collect();
                assert_eq!(history.truth(&path), expected, "{}", scenario.name());
            }
        }
    }

    fn follow(held: &mut [FxHashMap<BlockId, usize>], event: &Event) {
        match event {
            Event::Stored { rank, blocks, .. } => {
                blocks.iter().for_each(|&block| *held[*rank as usize].entry(block).or_default() += 1);
            }
            Event::Removed { rank, blocks } => {
                for block in blocks {
                    if let Some(copies) = held[*rank as usize].get_mut(block) {
                        *copies = copies.saturating_sub(1);
                    }
                }
            }
            Event::Cleared { rank } => held[*rank as usize].clear(),
        }
    }
}

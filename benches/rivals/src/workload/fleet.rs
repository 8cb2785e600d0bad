//! The engines: a cache per rank, and the requests that run on them. What the caches hold is the truth that
//! every contender's answers are compared with.

use super::blocks::{BlockId, Blocks, Event};
use super::pool::Pool;
use crate::dice::Dice;

/// Blocks that one prefill step computes: 8,192 tokens, vLLM's usual `max_num_batched_tokens`.
const PREFILL_STEP: usize = 512;

/// A running request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where it runs.
    pub rank: u32,
    /// Prompt and answer.
    pub path: Vec<BlockId>,
    /// Blocks of the prompt.
    pub prompt: usize,
    /// Blocks that are computed or were found in the cache.
    pub done: usize,
    /// The caller's own mark.
    pub tag: usize,
}

/// What a step of the fleet did.
#[derive(Debug)]
pub enum Step {
    /// Some request went on.
    Progress,
    /// A request ended. If its rank had no room, its path is longer than what was done.
    Ended(Request),
    /// No request is running.
    Idle,
}

/// All ranks.
#[derive(Debug)]
pub struct Fleet {
    /// Every block that there ever was.
    pub blocks: Blocks,
    pools: Vec<Pool>,
    running: Vec<Request>,
}

impl Fleet {
    /// `ranks` empty caches of `capacity` blocks each.
    pub fn new(ranks: u32, capacity: usize) -> Self {
        Self {
            blocks: Blocks::default(),
            pools: (0..ranks).map(|_| Pool::new(capacity)).collect(),
            running: Vec::new(),
        }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.pools.len() as u32
    }

    /// Blocks held, summed over ranks.
    pub fn entries(&self) -> usize {
        self.pools.iter().map(Pool::len).sum()
    }

    /// Distinct blocks held by anyone.
    pub fn distinct(&self) -> usize {
        let mut seen = vec![false; self.blocks.len()];
        for block in self.pools.iter().flat_map(Pool::held) {
            seen[block.0 as usize] = true;
        }
        seen.into_iter().filter(|&seen| seen).count()
    }

    /// Blocks that a rank holds.
    pub fn held(&self, rank: u32) -> usize {
        self.pools[rank as usize].len()
    }

    /// Number of running requests.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Admits a request; nothing happens before its first step.
    pub fn admit(&mut self, request: Request) {
        self.running.push(request);
    }

    /// Lets one request, picked at random, go one step further.
    pub fn step(&mut self, dice: &mut Dice, events: &mut Vec<Event>) -> Step {
        if self.running.is_empty() {
            return Step::Idle;
        }
        let at = dice.below(self.running.len());
        let Self { pools, running, .. } = self;
        let request = &mut running[at];
        let pool = &mut pools[request.rank as usize];
        let stuck = !go_on(request, pool, events);
        if !stuck && request.done < request.path.len() {
            return Step::Progress;
        }
        let request = running.swap_remove(at);
        for &block in request.path[..request.done].iter().rev() {
            pool.release(block);
        }
        Step::Ended(request)
    }

    /// Stores a path on a rank and keeps it there for good.
    pub fn pin(&mut self, rank: u32, path: &[BlockId], events: &mut Vec<Event>) {
        let mut request = Request { rank, path: path.to_vec(), prompt: path.len(), done: 0, tag: 0 };
        while request.done < path.len() && go_on(&mut request, &mut self.pools[rank as usize], events) {}
    }

    /// Ends every running request.
    pub fn stop(&mut self) {
        for request in std::mem::take(&mut self.running) {
            for &block in request.path[..request.done].iter().rev() {
                self.pools[request.rank as usize].release(block);
            }
        }
    }

    /// Evicts the oldest blocks of one rank; `false` if there is none.
    pub fn evict(&mut self, rank: u32, count: usize, events: &mut Vec<Event>) -> bool {
        let mut blocks = Vec::with_capacity(count);
        self.pools[rank as usize].evict(count, &mut blocks);
        let some = !blocks.is_empty();
        if some {
            events.push(Event::Removed { rank, blocks });
        }
        some
    }

    /// Empties one rank.
    pub fn clear(&mut self, rank: u32, events: &mut Vec<Event>) {
        self.pools[rank as usize].clear();
        events.push(Event::Cleared { rank });
    }

    /// How many leading blocks of `path` the rank holds.
    ///
    /// Bisects: engines evict leaves first, so what a rank holds of a path has no hole.
    pub fn reach(&self, rank: u32, path: &[BlockId]) -> u32 {
        let pool = &self.pools[rank as usize];
        path.partition_point(|&block| pool.holds(block)) as u32
    }

    /// The ranks that hold a prefix of `path` and how much of it, by rank.
    pub fn truth(&self, path: &[BlockId]) -> Vec<(u32, u32)> {
        let reaches = (0..self.ranks()).map(|rank| (rank, self.reach(rank, path)));
        reaches.filter(|&(_, reach)| reach > 0).collect()
    }

    /// Events that store what the fleet holds now, shallow paths first.
    pub fn snapshot(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (rank, pool) in self.pools.iter().enumerate() {
            // A block is older than the blocks behind it.
            let mut held: Vec<_> = pool.held().collect();
            held.sort_unstable();
            for block in held {
                let parent = self.blocks.parent(block);
                match events.last_mut() {
                    Some(Event::Stored { rank: last_rank, blocks, .. })
                        if *last_rank as usize == rank && blocks.last().copied() == parent =>
                    {
                        blocks.push(block);
                    }
                    _ => events.push(Event::Stored { rank: rank as u32, parent, blocks: vec![block] }),
                }
            }
        }
        events
    }
}

/// One step of one request; `false` if its rank has no room.
fn go_on(request: &mut Request, pool: &mut Pool, events: &mut Vec<Event>) -> bool {
    while request.done < request.path.len() && pool.pin(request.path[request.done]) {
        request.done += 1;
    }
    let left = request.path.len() - request.done;
    if left == 0 {
        return true;
    }
    let count = match request.prompt.saturating_sub(request.done) {
        0 => 1,
        prompt => prompt.min(PREFILL_STEP),
    };
    let mut evicted = Vec::new();
    if !pool.make_room(count, &mut evicted) {
        return false;
    }
    if !evicted.is_empty() {
        events.push(Event::Removed { rank: request.rank, blocks: evicted });
    }
    let blocks = request.path[request.done..request.done + count].to_vec();
    blocks.iter().for_each(|&block| pool.insert(block));
    let parent = request.done.checked_sub(1).map(|before| request.path[before]);
    events.push(Event::Stored { rank: request.rank, parent, blocks });
    request.done += count;
    true
}

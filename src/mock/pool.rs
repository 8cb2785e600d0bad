//! The device's paged pool with its prefix cache.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::mock::page::Page;

/// A physical block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockId(usize);

/// Physical blocks: held by requests, or free. A free block keeps its content until it is taken for another,
/// oldest first, so what is free is the cache.
///
/// Cost: a block is taken and released in logarithmic time of the free ones.
#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    /// The copies of each cached content, in the order in which they were cached.
    cached: HashMap<u64, Vec<BlockId>>,
    /// Free blocks in the order in which they are taken.
    free: BTreeMap<i64, BlockId>,
    /// Places in that order before the first and behind the last one ever given.
    front: i64,
    back: i64,
}

#[derive(Debug, Default)]
struct Block {
    /// Requests that hold it.
    refs: u32,
    /// Its content, if that is cached.
    page: Option<Arc<Page>>,
    /// Its place among the free, if it is.
    place: i64,
}

impl Pool {
    /// A pool of `count` empty blocks.
    pub fn new(count: u32) -> Self {
        let mut pool = Self {
            blocks: (0..count).map(|_| Block::default()).collect(),
            cached: HashMap::new(),
            free: BTreeMap::new(),
            front: 0,
            back: 0,
        };
        (0..pool.blocks.len()).for_each(|at| pool.append(BlockId(at)));
        pool
    }

    /// Blocks of the pool.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that can be taken.
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Blocks that requests hold.
    pub fn used(&self) -> usize {
        self.blocks.len() - self.free.len()
    }

    /// Blocks with cached content, held or not.
    pub fn cached_blocks(&self) -> usize {
        self.cached.values().map(Vec::len).sum()
    }

    /// The oldest copy of this content.
    pub fn find(&self, key: u64) -> Option<BlockId> {
        self.cached.get(&key)?.first().copied()
    }

    /// The blocks of the longest leading run of `pages` that is cached. A hole ends it.
    pub fn lead(&self, pages: &[Arc<Page>]) -> Vec<BlockId> {
        pages.iter().map_while(|page| self.find(page.key)).collect()
    }

    /// How many of `blocks` are free: holding these leaves fewer to take.
    pub fn free_among(&self, blocks: &[BlockId]) -> usize {
        blocks.iter().filter(|block| self.blocks[block.0].refs == 0).count()
    }

    /// Holds cached blocks for one more request.
    pub fn hold(&mut self, blocks: &[BlockId]) {
        for block in blocks {
            let block = &mut self.blocks[block.0];
            if block.refs == 0 {
                self.free.remove(&block.place);
            }
            block.refs += 1;
        }
    }

    /// Takes `count` blocks for a request, all or none. Appends the content that was lost to `evicted`.
    pub fn take(&mut self, count: usize, evicted: &mut Vec<Arc<Page>>) -> Option<Vec<BlockId>> {
        if count > self.free.len() {
            return None;
        }
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let (_, id) = self.free.pop_first()?;
            self.blocks[id.0].refs = 1;
            evicted.extend(self.forget(id));
            taken.push(id);
        }
        Some(taken)
    }

    /// Caches the content of a block that a request holds.
    pub fn cache(&mut self, id: BlockId, page: Arc<Page>) {
        self.cached.entry(page.key).or_default().push(id);
        self.blocks[id.0].page = Some(page);
    }

    /// One request lets go of its blocks, given from head to tail: the tail is taken again first, so that a
    /// prefix outlives what was built on it. Blocks without content are taken before all others.
    pub fn release(&mut self, blocks: &[BlockId]) {
        for &id in blocks.iter().rev() {
            let block = &mut self.blocks[id.0];
            block.refs -= 1;
            match (block.refs, &block.page) {
                (0, Some(_)) => self.append(id),
                (0, None) => self.prepend(id),
                _ => {}
            }
        }
    }

    /// Forgets all content.
    pub fn clear(&mut self) {
        self.cached.clear();
        self.blocks.iter_mut().for_each(|block| block.page = None);
    }

    /// What is cached, with its copies; in no order.
    pub fn pages(&self) -> impl Iterator<Item = (&Page, u32)> {
        self.cached.values().filter_map(|copies| {
            let page = self.blocks[copies.first()?.0].page.as_deref()?;
            Some((page, u32::try_from(copies.len()).unwrap_or(u32::MAX)))
        })
    }

    fn forget(&mut self, id: BlockId) -> Option<Arc<Page>> {
        let page = self.blocks[id.0].page.take()?;
        if let Some(copies) = self.cached.get_mut(&page.key) {
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.cached.remove(&page.key);
            }
        }
        Some(page)
    }

    fn append(&mut self, id: BlockId) {
        self.back += 1;
        self.place(id, self.back);
    }

    fn prepend(&mut self, id: BlockId) {
        self.front -= 1;
        self.place(id, self.front);
    }

    fn place(&mut self, id: BlockId, place: i64) {
        self.blocks[id.0].place = place;
        self.free.insert(place, id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::mock::config::EngineConfig;
    use crate::mock::page::Naming;

    /// The pages of a prompt of `blocks` blocks that begins with `first`.
    fn pages(first: u32, blocks: u32) -> Vec<Arc<Page>> {
        let config = EngineConfig::default();
        let tokens: Vec<u32> = (0..blocks * 16).map(|at| if at == 0 { first } else { at }).collect();
        let mut pages = Vec::new();
        Naming::new(&config, 0, 0).extend(&mut pages, &tokens, config.block_size);
        pages
    }

    fn fill(pool: &mut Pool, pages: &[Arc<Page>], evicted: &mut Vec<Arc<Page>>) -> Vec<BlockId> {
        let blocks = pool.take(pages.len(), evicted).unwrap();
        for (block, page) in blocks.iter().zip(pages) {
            pool.cache(*block, page.clone());
        }
        blocks
    }

    #[test]
    fn what_is_free_stays_cached_and_the_oldest_tail_goes_first() {
        let mut pool = Pool::new(4);
        let mut evicted = Vec::new();
        let (old, new) = (pages(1, 2), pages(2, 2));
        for prompt in [&old, &new] {
            let blocks = fill(&mut pool, prompt, &mut evicted);
            pool.release(&blocks);
        }
        assert_eq!((pool.used(), pool.cached_blocks(), evicted.len()), (0, 4, 0));
        // Used again, the older one becomes the newer one.
        let again = pool.lead(&old);
        assert_eq!(again.len(), 2);
        pool.hold(&again);
        pool.release(&again);
        pool.take(3, &mut evicted).unwrap();
        assert_eq!(evicted, [new[1].clone(), new[0].clone(), old[1].clone()]);
        assert_eq!((pool.lead(&old).len(), pool.lead(&new).len()), (1, 0));
    }

    #[test]
    fn a_block_is_free_when_nobody_holds_it() {
        let mut pool = Pool::new(2);
        let blocks = fill(&mut pool, &pages(1, 2), &mut Vec::new());
        pool.hold(&blocks);
        pool.release(&blocks);
        assert_eq!((pool.available(), pool.free_among(&blocks)), (0, 0));
        assert_eq!(pool.take(1, &mut Vec::new()), None);
        pool.release(&blocks);
        assert_eq!((pool.available(), pool.free_among(&blocks)), (2, 2));
    }

    #[test]
    fn taking_is_all_or_nothing() {
        let mut pool = Pool::new(2);
        let blocks = fill(&mut pool, &pages(1, 2), &mut Vec::new());
        pool.release(&blocks);
        let mut evicted = Vec::new();
        assert_eq!(pool.take(3, &mut evicted), None);
        assert_eq!((evicted.len(), pool.available(), pool.cached_blocks()), (0, 2, 2));
    }

    #[test]
    fn each_copy_goes_by_itself() {
        let mut pool = Pool::new(2);
        let mut evicted = Vec::new();
        let page = pages(1, 1);
        let first = fill(&mut pool, &page, &mut evicted);
        let second = fill(&mut pool, &page, &mut evicted);
        assert_eq!(pool.pages().map(|(_, copies)| copies).collect::<Vec<_>>(), [2]);
        pool.release(&first);
        pool.take(1, &mut evicted).unwrap();
        assert_eq!((evicted.len(), pool.lead(&page).len()), (1, 1));
        pool.release(&second);
        pool.take(1, &mut evicted).unwrap();
        assert_eq!((evicted.len(), pool.lead(&page).len()), (2, 0));
    }

    #[test]
    fn a_hole_ends_a_hit() {
        let mut pool = Pool::new(4);
        let prompt = pages(1, 3);
        let blocks = pool.take(3, &mut Vec::new()).unwrap();
        pool.cache(blocks[0], prompt[0].clone());
        pool.cache(blocks[2], prompt[2].clone());
        assert_eq!(pool.lead(&prompt), &blocks[..1]);
    }

    #[test]
    fn empty_blocks_are_taken_before_cached_ones() {
        let mut pool = Pool::new(2);
        let cached = fill(&mut pool, &pages(1, 1), &mut Vec::new());
        let empty = pool.take(1, &mut Vec::new()).unwrap();
        pool.release(&cached);
        pool.release(&empty);
        let mut evicted = Vec::new();
        assert_eq!(pool.take(1, &mut evicted), Some(empty));
        assert_eq!(evicted, []);
    }
}

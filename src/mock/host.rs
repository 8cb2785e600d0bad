//! The host tier: a second, slower cache that outlives the device's.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::mock::page::Page;

/// Pages in host memory, the one that was longest not wanted leaves first.
#[derive(Debug)]
pub struct HostTier {
    capacity: usize,
    held: HashMap<u64, (u64, Arc<Page>)>,
    ages: BTreeMap<u64, u64>,
    clock: u64,
}

/// What a copy to the host tier has changed there, in this order.
#[derive(Debug, Default)]
pub struct Saved {
    /// Pages that left.
    pub evicted: Vec<Arc<Page>>,
    /// Pages that came, from head to tail.
    pub stored: Vec<Arc<Page>>,
}

impl HostTier {
    /// A tier of `capacity` pages; 0 never holds any.
    pub fn new(capacity: u32) -> Self {
        Self { capacity: capacity as usize, held: HashMap::new(), ages: BTreeMap::new(), clock: 0 }
    }

    /// Pages that it can hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Pages that it holds.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many of the leading `pages` it holds. A hole ends it.
    pub fn lead(&self, pages: &[Arc<Page>]) -> usize {
        pages.iter().take_while(|page| self.held.contains_key(&page.key)).count()
    }

    /// Copies pages of one chain, from head to tail: as many of the leading ones as it can hold at all. What
    /// is there already is only made young. The tail is older than the head, so that it leaves first.
    pub fn save(&mut self, pages: &[Arc<Page>]) -> Saved {
        let pages = &pages[..pages.len().min(self.capacity)];
        self.wanted(pages);
        let mut saved = Saved::default();
        saved.stored.extend(pages.iter().filter(|page| !self.held.contains_key(&page.key)).cloned());
        while self.held.len() + saved.stored.len() > self.capacity {
            let Some((_, key)) = self.ages.pop_first() else { break };
            saved.evicted.extend(self.held.remove(&key).map(|(_, page)| page));
        }
        for page in saved.stored.iter().rev() {
            self.clock += 1;
            self.ages.insert(self.clock, page.key);
            self.held.insert(page.key, (self.clock, page.clone()));
        }
        saved
    }

    /// Makes those of `pages` young that it holds.
    pub fn wanted(&mut self, pages: &[Arc<Page>]) {
        for page in pages.iter().rev() {
            if let Some((age, _)) = self.held.get_mut(&page.key) {
                self.ages.remove(age);
                self.clock += 1;
                *age = self.clock;
                self.ages.insert(self.clock, page.key);
            }
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.held.clear();
        self.ages.clear();
    }

    /// What it holds, one copy of each; in no order.
    pub fn pages(&self) -> impl Iterator<Item = (&Page, u32)> {
        self.held.values().map(|(_, page)| (&**page, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::config::EngineConfig;
    use crate::mock::page::Naming;

    fn pages(first: u32, blocks: u32) -> Vec<Arc<Page>> {
        let config = EngineConfig::default();
        let tokens: Vec<u32> = (0..blocks * 16).map(|at| if at == 0 { first } else { at }).collect();
        let mut pages = Vec::new();
        Naming::new(&config, 0, 0).extend(&mut pages, &tokens, config.block_size);
        pages
    }

    #[test]
    fn the_oldest_tail_leaves_first_and_what_is_wanted_stays() {
        let mut host = HostTier::new(4);
        let (a, b, c) = (pages(1, 2), pages(2, 2), pages(3, 3));
        assert_eq!(host.save(&a).stored, a);
        assert_eq!(host.save(&b).stored, b);
        assert_eq!(host.save(&a).stored, []);
        let saved = host.save(&c);
        assert_eq!(saved.evicted, [b[1].clone(), b[0].clone(), a[1].clone()]);
        assert_eq!(saved.stored, c);
        assert_eq!((host.len(), host.lead(&a), host.lead(&b), host.lead(&c)), (4, 1, 0, 3));
    }

    #[test]
    fn it_never_holds_more_than_it_can() {
        let mut host = HostTier::new(2);
        let long = pages(1, 5);
        assert_eq!(host.save(&long).stored, long[..2]);
        assert_eq!(host.len(), 2);
        // The same once more pushes nothing out.
        assert!(host.save(&long).evicted.is_empty());
        let mut none = HostTier::new(0);
        assert!(none.save(&long).stored.is_empty() && none.is_empty());
    }
}

//! Names of adapters, learnt from the events that carry them.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwap;

/// Names that one pool learns at most: an engine keeps some hundred adapters loaded, and a hostile one could
/// name millions.
const MAX_NAMES: usize = 4_096;

/// Bytes of one name: what a model's name may have.
const MAX_LEN: usize = 512;

/// The adapters whose blocks a pool's ranks have announced since the pool was declared. Written by the indexer,
/// read by anyone without a lock.
#[derive(Debug, Default)]
pub struct LearntAdapters {
    names: ArcSwap<BTreeSet<Box<str>>>,
}

impl LearntAdapters {
    /// Whether blocks of this adapter were announced.
    pub fn contains(&self, name: &str) -> bool {
        self.names.load().contains(name)
    }

    /// All names.
    pub fn names(&self) -> Arc<BTreeSet<Box<str>>> {
        self.names.load_full()
    }

    /// A name that is new is copied into a new set: seldom, since the names are few.
    pub(super) fn learn(&self, name: &str) {
        let names = self.names.load();
        if name.is_empty() || name.len() > MAX_LEN || names.len() >= MAX_NAMES || names.contains(name) {
            return;
        }
        let mut more = BTreeSet::clone(&names);
        more.insert(name.into());
        self.names.store(Arc::new(more));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A3: names are kept once, and no more than so many.
    #[test]
    fn what_is_learnt_is_bounded() {
        let learnt = LearntAdapters::default();
        for name in ["sql", "sql", "", &"x".repeat(MAX_LEN + 1)] {
            learnt.learn(name);
        }
        assert_eq!(learnt.names().len(), 1);
        for nth in 0..MAX_NAMES {
            learnt.learn(&nth.to_string());
        }
        assert_eq!(learnt.names().len(), MAX_NAMES);
        assert!(learnt.contains("sql") && learnt.contains("7") && !learnt.contains("law"));
    }
}

//! Pools: the workers that can stand in for each other.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use crate::block::BlockSize;
use crate::ids::WorkerId;

/// A pool's name: the model and the routing group.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolKey {
    /// The model's name as requests carry it.
    pub model: Arc<str>,
    /// The routing group (tenant).
    pub group: Arc<str>,
}

impl PoolKey {
    /// The group of a worker or a request that names none.
    pub const DEFAULT_GROUP: &str = "default";

    /// The pool of `model` in `group`; no group, or an empty one, is [`PoolKey::DEFAULT_GROUP`].
    pub fn new(model: &str, group: Option<&str>) -> Self {
        let group = group.filter(|group| !group.is_empty()).unwrap_or(Self::DEFAULT_GROUP);
        Self { model: model.into(), group: group.into() }
    }
}

/// `model:group`. A model's name may hold colons itself, so this is for people, not for parsing.
impl fmt::Display for PoolKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.model, self.group)
    }
}

impl fmt::Debug for PoolKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A pool as it stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// Its name.
    pub key: PoolKey,
    /// Tokens per block of the full-attention group, fixed by the pool's first worker.
    pub block_size: BlockSize,
    /// Its workers, in order; never empty.
    pub workers: BTreeSet<WorkerId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R1
    #[test]
    fn no_group_is_the_default_group() {
        let key = PoolKey::new("llama-3", None);
        assert_eq!(key, PoolKey::new("llama-3", Some("")));
        assert_eq!(key, PoolKey::new("llama-3", Some("default")));
        assert_ne!(key, PoolKey::new("llama-3", Some("gold")));
        assert_eq!(key.to_string(), "llama-3:default");
    }
}

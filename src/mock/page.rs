//! A full block of tokens, its name on the engine, and lists of what is held.

use std::sync::Arc;

use twox_hash::xxhash3_64::Hasher as Xxh3;

use crate::block::{BlockHash, BlockSize};
use crate::mock::config::{EngineConfig, HashKind, HashSeed, Shape};

/// What an engine holds, per tier, each ascending by name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Truth {
    /// On the device.
    pub device: Vec<HeldBlock>,
    /// In host memory.
    pub host: Vec<HeldBlock>,
}

/// A block that is held.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeldBlock {
    /// Its name, as it was published.
    pub hash: BlockHash,
    /// Physical blocks with this content.
    pub copies: u32,
    /// The name of the block before it.
    pub parent: Option<BlockHash>,
    /// Blocks before it.
    pub depth: u32,
    /// Its own tokens.
    pub tokens: Arc<[u32]>,
}

/// A full block's content: its own tokens and, in its key, all before them.
#[derive(PartialEq, Eq, Debug)]
pub struct Page {
    /// Says which content: equal on one engine for equal tokens behind equal tokens.
    pub key: u64,
    /// The key of the page before it.
    pub parent: Option<u64>,
    /// Pages before it.
    pub depth: u32,
    /// Its own tokens.
    pub tokens: Arc<[u32]>,
}

/// Gives pages their keys, and keys their form on the wire.
///
/// Real engines use digests of their own; these are XXH3 chains that no other part of this crate computes,
/// so nobody can know a name otherwise than from an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Naming {
    seed: u64,
    form: Form,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Unsigned,
    Signed,
    Bytes,
}

/// A name on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireHash {
    /// An unsigned integer.
    Unsigned(u64),
    /// A signed integer.
    Signed(i64),
    /// A byte string.
    Bytes([u8; 16]),
}

impl Naming {
    /// The naming of the engine's `generation`th process on `dp_rank`.
    pub fn new(config: &EngineConfig, dp_rank: u32, generation: u32) -> Self {
        let (seed, form) = match (config.shape, config.hash) {
            (Shape::Sglang, _) => return Self { seed: 0, form: Form::Signed },
            (Shape::Vllm, HashKind::Int) => (config.hash_seed, Form::Unsigned),
            (Shape::Vllm, HashKind::Bytes) => (config.hash_seed, Form::Bytes),
        };
        let seed = match seed {
            HashSeed::Fixed(seed) => seed,
            HashSeed::PerProcess(seed) => {
                let process = [dp_rank.to_le_bytes(), generation.to_le_bytes()].concat();
                Xxh3::oneshot_with_seed(seed, &process)
            }
        };
        Self { seed, form }
    }

    /// Appends to `pages` the full blocks of `tokens` that it does not have yet.
    pub fn extend(self, pages: &mut Vec<Arc<Page>>, tokens: &[u32], block_size: BlockSize) {
        for block in tokens.chunks_exact(block_size.as_usize()).skip(pages.len()) {
            let parent = pages.last().map(|page| page.key);
            let depth = pages.last().map_or(0, |page| page.depth + 1);
            pages.push(Arc::new(Page { key: self.key(parent, block), parent, depth, tokens: block.into() }));
        }
    }

    /// A key's form on the wire.
    pub fn wire(self, key: u64) -> WireHash {
        match self.form {
            Form::Unsigned => WireHash::Unsigned(key),
            Form::Signed => WireHash::Signed(key.cast_signed()),
            Form::Bytes => {
                let mut bytes = [0; 16];
                bytes[..8]
                    .copy_from_slice(&Xxh3::oneshot_with_seed(self.seed, &key.to_be_bytes()).to_be_bytes());
                bytes[8..].copy_from_slice(&key.to_be_bytes());
                WireHash::Bytes(bytes)
            }
        }
    }

    /// A key's form for whoever has decoded it.
    pub fn published(self, key: u64) -> BlockHash {
        match self.wire(key) {
            WireHash::Unsigned(hash) => BlockHash::Int(hash),
            WireHash::Signed(hash) => BlockHash::from_i64(hash),
            WireHash::Bytes(bytes) => BlockHash::Bytes(Box::new(bytes)),
        }
    }

    /// What is held of `pages`, given with their copies, ascending by name.
    pub fn held<'a>(self, pages: impl Iterator<Item = (&'a Page, u32)>) -> Vec<HeldBlock> {
        let mut held: Vec<_> = pages
            .map(|(page, copies)| HeldBlock {
                hash: self.published(page.key),
                copies,
                parent: page.parent.map(|key| self.published(key)),
                depth: page.depth,
                tokens: page.tokens.clone(),
            })
            .collect();
        held.sort_unstable_by(|a, b| a.hash.cmp(&b.hash));
        held
    }

    fn key(self, parent: Option<u64>, tokens: &[u32]) -> u64 {
        let mut bytes = Vec::with_capacity(9 + tokens.len() * 4);
        bytes.push(u8::from(parent.is_some()));
        bytes.extend_from_slice(&parent.unwrap_or_default().to_le_bytes());
        for token in tokens {
            bytes.extend_from_slice(&token.to_le_bytes());
        }
        Xxh3::oneshot_with_seed(self.seed, &bytes)
    }
}

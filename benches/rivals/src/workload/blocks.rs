//! Every block that a workload knows: its content, the blocks before it, and what engines call it.

use rankwise::block::{Isolation, LocalHasher, SequenceHash};

use crate::dice::mix;

/// Tokens per block. It never reaches an index; it sets what hashing costs.
pub const BLOCK_SIZE: u32 = 16;

/// A block: content and everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockId(pub u32);

impl BlockId {
    fn at(self) -> usize {
        self.0 as usize
    }
}

/// What engines call their blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Naming {
    /// By their sequence hash, as a router would compute it. One peer's index needs this.
    #[default]
    Sequence,
    /// By a hash of the engine's own, the same on every rank, as vLLM does.
    Engine,
    /// By a hash that ranks with an odd number seed otherwise than the rest.
    TwoSeeds,
}

/// The blocks of a workload.
#[derive(Default, Debug)]
pub struct Blocks {
    /// How events name them.
    pub naming: Naming,
    locals: Vec<u64>,
    sequences: Vec<u64>,
    parents: Vec<Option<BlockId>>,
    contents: Vec<u32>,
    hasher: LocalHasher,
    tokens: Vec<u32>,
    next_content: u32,
}

impl Blocks {
    /// A block behind `parent` whose content nothing else has.
    pub fn fresh(&mut self, parent: Option<BlockId>) -> BlockId {
        self.next_content += 1;
        self.with_content(parent, self.next_content)
    }

    /// A block behind `parent` with a content that others may have too.
    pub fn with_content(&mut self, parent: Option<BlockId>, content: u32) -> BlockId {
        self.next_content = self.next_content.max(content);
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.clear();
        push_tokens(content, &mut tokens);
        let local = self.hasher.hash(Isolation::default(), &tokens, &[]);
        self.tokens = tokens;
        let before = parent.map(|parent| SequenceHash(self.sequences[parent.at()]));
        self.sequences.push(SequenceHash::extend(before, local).0);
        self.locals.push(local.0);
        self.parents.push(parent);
        self.contents.push(content);
        BlockId(self.locals.len() as u32 - 1)
    }

    /// Appends `count` fresh blocks to a path.
    pub fn extend(&mut self, path: &mut Vec<BlockId>, count: usize) {
        path.reserve(count);
        for _ in 0..count {
            let parent = path.last().copied();
            path.push(self.fresh(parent));
        }
    }

    /// The hash of the block's content alone.
    pub fn local(&self, block: BlockId) -> u64 {
        self.locals[block.at()]
    }

    /// The hash of the block's content and everything before it.
    pub fn sequence(&self, block: BlockId) -> u64 {
        self.sequences[block.at()]
    }

    /// What `rank` calls the block.
    pub fn name(&self, rank: u32, block: BlockId) -> u64 {
        let sequence = self.sequence(block);
        match self.naming {
            Naming::Sequence => sequence,
            Naming::Engine => mix(sequence),
            Naming::TwoSeeds if rank % 2 == 1 => mix(sequence),
            Naming::TwoSeeds => sequence,
        }
    }

    /// The block before it.
    pub fn parent(&self, block: BlockId) -> Option<BlockId> {
        self.parents[block.at()]
    }

    /// Appends the block's tokens.
    pub fn push_tokens(&self, block: BlockId, into: &mut Vec<u32>) {
        push_tokens(self.contents[block.at()], into);
    }

    /// Number of blocks ever made.
    pub fn len(&self) -> usize {
        self.locals.len()
    }

    /// Whether none was made.
    pub fn is_empty(&self) -> bool {
        self.locals.is_empty()
    }
}

fn push_tokens(content: u32, into: &mut Vec<u32>) {
    for at in 0..u64::from(BLOCK_SIZE) / 2 {
        let pair = mix(u64::from(content) << 8 | at);
        // Below 2^17, where vocabularies end.
        into.extend([(pair as u32) & 0x1_ffff, ((pair >> 32) as u32) & 0x1_ffff]);
    }
}

/// What an engine says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// A chain of blocks was cached.
    Stored {
        /// Whose.
        rank: u32,
        /// The block before the first, as the event says.
        parent: Option<BlockId>,
        /// First to last.
        blocks: Vec<BlockId>,
    },
    /// Blocks were evicted.
    Removed {
        /// Whose.
        rank: u32,
        /// In the event's order.
        blocks: Vec<BlockId>,
    },
    /// Everything was evicted.
    Cleared {
        /// Whose.
        rank: u32,
    },
}

impl Event {
    /// Blocks that the event names.
    pub fn blocks(&self) -> usize {
        match self {
            Self::Stored { blocks, .. } | Self::Removed { blocks, .. } => blocks.len(),
            Self::Cleared { .. } => 0,
        }
    }

    /// The same, one event per block.
    pub fn cut(&self, into: &mut Vec<Self>) {
        match self {
            Self::Stored { rank, parent, blocks } => {
                let mut parent = *parent;
                for &block in blocks {
                    into.push(Self::Stored { rank: *rank, parent, blocks: vec![block] });
                    parent = Some(block);
                }
            }
            Self::Removed { rank, blocks } => {
                into.extend(blocks.iter().map(|&block| Self::Removed { rank: *rank, blocks: vec![block] }));
            }
            Self::Cleared { .. } => into.push(self.clone()),
        }
    }
}

//! Typed events: what an engine said, before anyone decides what it means.

use crate::block::{AttentionKind, BlockHash, Tier};

/// One decoded batch of a publisher.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventBatch {
    /// The engine host's Unix time in seconds; absent or not finite is `None`.
    pub ts: Option<f64>,
    /// The rank that the payload names. The connection decides whose batch it is; this one is compared.
    pub dp_rank: Option<i64>,
    /// The events in their order, bad ones left out.
    pub events: Vec<KvEvent>,
    /// Events that were left out, by reason.
    pub skipped: SkipCounts,
}

/// One event.
#[derive(Clone, PartialEq, Debug)]
pub enum KvEvent {
    /// Blocks were cached.
    Stored(BlockStored),
    /// Blocks were evicted.
    Removed(BlockRemoved),
    /// The rank's whole cache was emptied, or one tier of it where the event names a medium.
    Cleared(Option<Tier>),
}

/// Blocks that form a chain were cached.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockStored {
    /// The blocks' names, first to last; may be empty (windowed groups).
    pub block_hashes: Vec<BlockHash>,
    /// The name of the block before the first; `None` starts a prompt.
    pub parent_block_hash: Option<BlockHash>,
    /// The tokens that the event covers.
    pub tokens: EventTokens,
    /// Tokens per block as the engine says; 0 in placeholders.
    pub block_size: u32,
    /// The engine-local adapter number.
    pub lora_id: Option<i64>,
    /// The adapter's name.
    pub lora_name: Option<String>,
    /// The cache salt (SGLang; vLLM hides it in `extra_keys`).
    pub cache_salt: Option<String>,
    /// Where the blocks lie.
    pub tier: Tier,
    /// The KV-cache group's number.
    pub group_idx: Option<u32>,
    /// The group's kind, when the engine says.
    pub attention: Option<AttentionKind>,
    /// One entry per hash, or empty when the engine sent none.
    pub extra_keys: Vec<Vec<ExtraKey>>,
}

/// The tokens of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventTokens {
    /// Token ids.
    Ids(Vec<u32>),
    /// The event carries tokens in a form that we cannot place (pairs, text): names stay, content does not.
    Unusable,
}

/// Blocks were evicted.
#[derive(Clone, PartialEq, Debug)]
pub struct BlockRemoved {
    /// The names of the blocks.
    pub block_hashes: Vec<BlockHash>,
    /// Where they lay.
    pub tier: Tier,
    /// The KV-cache group's number.
    pub group_idx: Option<u32>,
}

/// One entry of vLLM's `extra_keys`, uninterpreted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExtraKey {
    /// A bare string: adapter, salt or a multimodal identifier.
    Text(String),
    /// A bare integer (adapter number in vLLM up to 0.11.0).
    Int(i64),
    /// `[identifier, offset]`.
    Located(String, i64),
    /// A byte string: a digest of prompt embeddings.
    Bytes(Vec<u8>),
}

/// Why an event, or a block of it, was left out. Named in metrics and answers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum SkipReason {
    /// The tag is none that we know.
    UnknownTag,
    /// The event is not an array or map of the shape that its tag asks for.
    Malformed,
    /// A list is longer than the limit.
    TooLong,
    /// Hashes and tokens do not line up.
    TokenMismatch,
    /// The full-attention group's block size is not the declared one.
    BlockSizeMismatch,
    /// A block names itself as its parent.
    SelfParent,
    /// The rank announces more groups than the limit.
    TooManyGroups,
    /// The rank holds more blocks than any engine can.
    RankFull,
}

impl SkipReason {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::UnknownTag,
        Self::Malformed,
        Self::TooLong,
        Self::TokenMismatch,
        Self::BlockSizeMismatch,
        Self::SelfParent,
        Self::TooManyGroups,
        Self::RankFull,
    ];

    /// The reason's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::UnknownTag => "unknown_tag",
            Self::Malformed => "malformed",
            Self::TooLong => "too_long",
            Self::TokenMismatch => "token_mismatch",
            Self::BlockSizeMismatch => "block_size_mismatch",
            Self::SelfParent => "self_parent",
            Self::TooManyGroups => "too_many_groups",
            Self::RankFull => "rank_full",
        }
    }
}

/// Skipped events by reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SkipCounts([u32; SkipReason::ALL.len()]);

impl SkipCounts {
    /// Counts one event that was left out for `reason`.
    pub fn add(&mut self, reason: SkipReason) {
        let count = &mut self.0[reason as usize];
        *count = count.saturating_add(1);
    }

    /// Adds another batch's counts.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count = count.saturating_add(more);
        }
    }

    /// How many were left out for `reason`.
    pub fn get(&self, reason: SkipReason) -> u32 {
        self.0[reason as usize]
    }

    /// How many were left out in all.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|&count| u64::from(count)).sum()
    }
}

//! Typed events: what an engine said, before anyone decides what it means.

use crate::block::{AttentionKind, BlockHash, Tier};
use crate::trust::{Reason, ReasonCounts};

/// One decoded batch of a publisher.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventBatch {
    /// The engine host's Unix time in seconds; absent or not finite is `None`.
    pub ts: Option<f64>,
    /// The rank that the payload names. The connection decides whose batch it is; this one is compared.
    pub dp_rank: Option<i64>,
    /// The events in their order, bad ones left out.
    pub events: Vec<KvEvent>,
    /// What was left out, by reason: whole events, and names that could not be read beside others that could.
    pub skipped: ReasonCounts,
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
    /// Per hash the tokens behind the block that the hash covers too; empty when it covers none (vLLM's
    /// `lookahead_token_ids`).
    pub lookahead: Vec<Vec<u32>>,
}

/// The tokens of a store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventTokens {
    /// Token ids.
    Ids(Vec<u32>),
    /// The tokens that pairs `[t0, t1], [t1, t2], …` run through, one more than there are pairs (SGLang with an
    /// EAGLE drafter). The block size counts pairs. Never empty: no pairs are no ids.
    Pairs(Vec<u32>),
    /// The event carries tokens in a form that we cannot place (text): names stay, content does not.
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

/// The reasons for which an event, or a name of it, is left out.
pub const LEFT_OUT: [Reason; 11] = [
    Reason::UnknownTag,
    Reason::MalformedEvent,
    Reason::MalformedRemoval,
    Reason::TooLongRemoval,
    Reason::MalformedStore,
    Reason::TooLongStore,
    Reason::TokenMismatch,
    Reason::BlockSizeMismatch,
    Reason::SelfParent,
    Reason::TooManyGroups,
    Reason::RankFull,
];

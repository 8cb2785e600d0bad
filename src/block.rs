//! Blocks: their size, their identity by content, their names on an engine, and where they may lie.
//!
//! A block's identity is its content: its tokens and everything before them, the adapter and cache salt of
//! its chain, and the images or embeddings that it touches. Hashes follow the field's convention (Dynamo
//! 1.6.1, SMG), so that hashes made by existing clients can be sent to us.
//!
//! **Cost.** Two prefixes with one 64-bit [`SequenceHash`] are taken for the same content. The seeds are
//! public, so a client that can choose prompts freely could construct a collision; it would gain a wrong
//! routing hint, never another's data.

use std::fmt;
use std::num::NonZeroU32;

use smallvec::SmallVec;
use twox_hash::xxhash3_64::Hasher as Xxh3;

/// Seed of every local and sequence hash of a chain without adapter or salt.
pub const HASH_SEED: u64 = 1337;

/// Tokens per block, never zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct BlockSize(NonZeroU32);

impl BlockSize {
    /// A block size of `tokens`; `None` for zero.
    pub const fn new(tokens: u32) -> Option<Self> {
        match NonZeroU32::new(tokens) {
            Some(size) => Some(Self(size)),
            None => None,
        }
    }

    /// Tokens per block.
    pub const fn get(self) -> u32 {
        self.0.get()
    }

    /// Tokens per block, as a slice length.
    pub const fn as_usize(self) -> usize {
        self.0.get() as usize
    }
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Content of one block alone, chain identity folded into the seed: XXH3-64 over little-endian `u32` tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct LocalBlockHash(pub u64);

/// Content of a block and of everything before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(transparent)]
pub struct SequenceHash(pub u64);

impl SequenceHash {
    /// The hash of the block with content `local` behind `parent`; a first block's is its local hash.
    pub fn extend(parent: Option<Self>, local: LocalBlockHash) -> Self {
        let Some(parent) = parent else { return Self(local.0) };
        let mut pair = [0_u8; 16];
        pair[..8].copy_from_slice(&parent.0.to_le_bytes());
        pair[8..].copy_from_slice(&local.0.to_le_bytes());
        Self(Xxh3::oneshot_with_seed(HASH_SEED, &pair))
    }

    /// The sequence hashes of a prompt's blocks, in order.
    pub fn chain(locals: &[LocalBlockHash]) -> impl Iterator<Item = Self> + '_ {
        let mut parent = None;
        locals.iter().map(move |&local| {
            let sequence = Self::extend(parent, local);
            parent = Some(sequence);
            sequence
        })
    }
}

/// An engine's name for a block: meaningful within one rank only.
///
/// Signed and unsigned readings of one 64-bit pattern are equal; byte strings are compared whole.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockHash {
    /// A 64-bit pattern.
    Int(u64),
    /// A byte string of 1 to [`BlockHash::MAX_BYTES`] bytes.
    Bytes(Box<[u8]>),
}

impl BlockHash {
    /// Longest byte string that is taken as a hash: SHA-512, twice what any engine sends today.
    pub const MAX_BYTES: usize = 64;

    /// The name with this signed reading.
    pub fn from_i64(hash: i64) -> Self {
        Self::Int(hash.cast_unsigned())
    }

    /// The name with these bytes; `None` if empty or longer than [`BlockHash::MAX_BYTES`].
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        (1..=Self::MAX_BYTES).contains(&bytes.len()).then(|| Self::Bytes(bytes.into()))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Decimal for 64-bit names, lower-case hex for byte strings.
impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(hash) => hash.fmt(f),
            Self::Bytes(bytes) => bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}")),
        }
    }
}

/// Which namespace a chain of blocks belongs to: adapter and cache salt, folded into the seed of its local
/// hashes. A property of the chain: a continuation inherits it from its parent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Isolation {
    seed: u64,
}

impl Default for Isolation {
    fn default() -> Self {
        Self { seed: HASH_SEED }
    }
}

impl Isolation {
    /// The namespace of `lora_name` and `cache_salt`; empty strings count as absent.
    pub fn new(lora_name: Option<&str>, cache_salt: Option<&str>) -> Self {
        Self::default().plus(lora_name, 0).plus(cache_salt, 1)
    }

    /// The namespace of an adapter that is known by its engine-local number only: one of its own, never
    /// the base model's. The number means something on its own engine alone: a query that names it trusts the
    /// engines to number alike.
    pub fn unnamed_lora(lora_id: i64, cache_salt: Option<&str>) -> Self {
        let id = Xxh3::oneshot_with_seed(2, &lora_id.to_le_bytes());
        Self { seed: HASH_SEED.wrapping_add(id) }.plus(cache_salt, 1)
    }

    /// The seed of the chain's local hashes.
    pub fn seed(self) -> u64 {
        self.seed
    }

    fn plus(self, name: Option<&str>, seed: u64) -> Self {
        match name {
            Some(name) if !name.is_empty() => {
                Self { seed: self.seed.wrapping_add(Xxh3::oneshot_with_seed(seed, name.as_bytes())) }
            }
            _ => self,
        }
    }
}

/// Something beside its tokens that is part of a block's content.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum ContentKey {
    /// An image or other item: its identifier and where it begins, in tokens from the block's start
    /// (negative when it began in an earlier block). `None` where the engine does not say (vLLM 0.17, 0.18).
    Multimodal {
        /// The item's identifier, as the engine names it.
        identifier: Box<str>,
        /// Tokens from the block's first token to the item's first.
        offset: Option<i64>,
    },
    /// A digest of prompt embeddings or another opaque key.
    Opaque(Box<[u8]>),
}

impl ContentKey {
    /// Bytes that its text or digest takes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Multimodal { identifier, .. } => identifier.len(),
            Self::Opaque(bytes) => bytes.len(),
        }
    }
}

/// The keys of one block; nearly always none.
pub type ContentKeys = SmallVec<[ContentKey; 1]>;

/// Computes local hashes; keeps its buffer from block to block.
///
/// Cost: 4 ns for 16 tokens, 25 ns for 64 (XXH3), plus the copy of the tokens into the buffer.
#[derive(Default, Debug)]
pub struct LocalHasher {
    buffer: Vec<u8>,
}

impl LocalHasher {
    /// The local hash of a block with these tokens and keys. Keys must be sorted; the order is part of it.
    pub fn hash(&mut self, isolation: Isolation, tokens: &[u32], keys: &[ContentKey]) -> LocalBlockHash {
        self.buffer.clear();
        self.buffer.reserve(tokens.len() * 4);
        for token in tokens {
            self.buffer.extend_from_slice(&token.to_le_bytes());
        }
        for key in keys {
            self.push_key(key);
        }
        LocalBlockHash(Xxh3::oneshot_with_seed(isolation.seed, &self.buffer))
    }

    /// The local hashes of a prompt's full blocks (text only), appended to `out`.
    pub fn hash_prompt(
        &mut self,
        isolation: Isolation,
        tokens: &[u32],
        block_size: BlockSize,
        out: &mut Vec<LocalBlockHash>,
    ) {
        out.extend(tokens.chunks_exact(block_size.as_usize()).map(|block| self.hash(isolation, block, &[])));
    }

    /// The local hashes of windows of block size + 1 tokens at a stride of the block size (Eagle drafters):
    /// a last block without a following token has none.
    pub fn hash_eagle(
        &mut self,
        isolation: Isolation,
        tokens: &[u32],
        block_size: BlockSize,
        out: &mut Vec<LocalBlockHash>,
    ) {
        let window = block_size.as_usize() + 1;
        let mut rest = tokens;
        while let Some(block) = rest.get(..window) {
            out.push(self.hash(isolation, block, &[]));
            rest = &rest[block_size.as_usize()..];
        }
    }

    /// Keys are framed by a tag and their length, so that no two lists of keys share an encoding.
    fn push_key(&mut self, key: &ContentKey) {
        let (tag, bytes, offset) = match key {
            ContentKey::Multimodal { identifier, offset } => (1_u8, identifier.as_bytes(), *offset),
            ContentKey::Opaque(bytes) => (2, &**bytes, None),
        };
        self.buffer.push(tag);
        self.buffer.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        self.buffer.extend_from_slice(bytes);
        self.buffer.push(u8::from(offset.is_some()));
        self.buffer.extend_from_slice(&offset.unwrap_or_default().to_le_bytes());
    }
}

/// Where a copy of a block lies.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Tier {
    /// Accelerator memory: `GPU`, `DEVICE`, or no medium named.
    Device,
    /// Host memory: `CPU`, `CPU_PINNED`, `CPU_TIER1`, `HOST`, `HOST_PINNED`.
    Host,
    /// Storage and what lies beyond: `CPU_TIER2`, `NVME`, `FS`, `OBJ`, `STORAGE`, `DISK`, `EXTERNAL`, `SHARED`.
    Disk,
    /// A medium that we do not know, or that is not the rank's own: counted and shown, never scored.
    Other,
}

impl Tier {
    /// All tiers, nearest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::Other];

    /// The tier of an engine's medium name, read without regard to case; no name is the device.
    pub fn from_medium(medium: Option<&str>) -> Self {
        let Some(medium) = medium else { return Self::Device };
        let is = |name: &&str| medium.eq_ignore_ascii_case(name);
        if medium.is_empty() || ["GPU", "DEVICE"].iter().any(is) {
            Self::Device
        } else if ["CPU", "CPU_PINNED", "CPU_TIER1", "HOST", "HOST_PINNED"].iter().any(is) {
            Self::Host
        } else if ["CPU_TIER2", "NVME", "FS", "OBJ", "STORAGE", "DISK", "EXTERNAL", "SHARED"].iter().any(is) {
            Self::Disk
        } else {
            Self::Other
        }
    }

    /// The tier of this name, as [`Tier::name`] gives it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.name() == name)
    }

    /// The tier's name in answers and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Other => "other",
        }
    }
}

/// Names of media beyond those that [`Tier::from_medium`] knows, for connectors with names of their own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct MediumMap {
    /// Few: looked through name by name.
    further: Vec<(Box<str>, Tier)>,
}

impl MediumMap {
    /// Lets `medium` name `tier`, without regard to case; also where it names another one by itself.
    pub fn insert(&mut self, medium: &str, tier: Tier) {
        self.further.retain(|(name, _)| !name.eq_ignore_ascii_case(medium));
        self.further.push((medium.into(), tier));
    }

    /// The tier of an engine's medium name; no name is the device.
    pub fn tier(&self, medium: Option<&str>) -> Tier {
        let further =
            self.further.iter().find(|(name, _)| medium.is_some_and(|m| name.eq_ignore_ascii_case(m)));
        further.map_or_else(|| Tier::from_medium(medium), |(_, tier)| *tier)
    }
}

/// How announcements of one name add up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Announcements {
    /// Announced twice needs two removals (vLLM announces each physical copy).
    #[default]
    Counted,
    /// Announced twice is announced once (vLLM's `kv_cache_report_mode: full` repeats itself).
    Set,
}

/// What kind of cache an attention group keeps (vLLM's `kv_cache_spec_kind`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum AttentionKind {
    /// `full_attention`, `mla_attention`, `sink_full_attention`: every block of the prefix is needed.
    Full,
    /// `sliding_window`, `sliding_window_mla`: the blocks of the last `window` tokens are needed; an
    /// engine that does not say how many leaves the group's rule unknown.
    SlidingWindow {
        /// Window in tokens.
        window: Option<u32>,
    },
    /// `mamba`: the state block that ends where the reuse ends is needed.
    StateSpace,
    /// Any other kind: its rule is not known, so it is left out and the answer says so.
    Unknown,
}

impl AttentionKind {
    /// The kind of this wire name.
    pub fn from_spec(kind: &str, sliding_window: Option<u32>) -> Self {
        match kind {
            "full_attention" | "mla_attention" | "sink_full_attention" => Self::Full,
            "sliding_window" | "sliding_window_mla" => Self::SlidingWindow { window: sliding_window },
            "mamba" => Self::StateSpace,
            _ => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_outside_the_bounds_are_no_hash() {
        assert_eq!(BlockHash::from_bytes(&[]), None);
        assert_eq!(BlockHash::from_bytes(&[7; 65]), None);
        assert!(BlockHash::from_bytes(&[7; 64]).is_some());
    }

    #[test]
    fn signed_and_unsigned_readings_are_one_name() {
        assert_eq!(BlockHash::from_i64(-1), BlockHash::Int(u64::MAX));
    }

    #[test]
    fn an_unnamed_adapter_is_not_the_base_model() {
        let base = Isolation::default();
        assert_ne!(Isolation::unnamed_lora(0, None), base);
        assert_ne!(Isolation::unnamed_lora(7, None), Isolation::new(Some("7"), None));
        assert_eq!(Isolation::new(Some(""), Some("")), base);
    }

    #[test]
    fn keys_and_their_offsets_are_content() {
        let mut hasher = LocalHasher::default();
        let key = |identifier: &str, offset| ContentKey::Multimodal { identifier: identifier.into(), offset };
        let hashes = [
            hasher.hash(Isolation::default(), &[1, 2], &[]),
            hasher.hash(Isolation::default(), &[1, 2], &[key("a", Some(0))]),
            hasher.hash(Isolation::default(), &[1, 2], &[key("a", Some(-1))]),
            hasher.hash(Isolation::default(), &[1, 2], &[key("a", None)]),
            hasher.hash(Isolation::default(), &[1, 2], &[ContentKey::Opaque(Box::from(*b"a"))]),
        ];
        let distinct: std::collections::HashSet<_> = hashes.iter().collect();
        assert_eq!(distinct.len(), hashes.len());
    }
}

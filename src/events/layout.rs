//! What the positions, names and values of a batch mean, apart from how msgpack writes them.
//!
//! Both decoders read msgpack on their own and meet here: what a field is called, where it stands, which
//! values it takes and which make its event unusable is said once. vLLM up to 0.23 and SGLang up to 0.5.19
//! write events as arrays, later versions as maps; the fields and their order are the same.

use crate::block::{AttentionKind, BlockHash, MediumMap, Tier};
use crate::events::event::{BlockRemoved, BlockStored, EventTokens, ExtraKey, KvEvent, SkipReason};

/// Containers inside one another, the batch's own included, stay below this. A batch needs six (batch,
/// events, event, `extra_keys`, its list, its entry); the rest is room for fields that we skip.
pub(super) const MAX_DEPTH: usize = 16;

/// What a batch may cost. Everything that is read from the wire is held against one of these before it is
/// kept, so a batch costs at most some ten times its payload.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of payload. A million tokens with one integer hash each take 15 MB, the largest batch that an
    /// engine can mean today.
    pub payload_bytes: usize,
    /// Events in a batch. SGLang up to 0.5.17 sends one per page, at a page size of 1 one per token, so this
    /// is a prompt of a quarter of a million tokens.
    pub events: usize,
    /// Hashes in an event: the same prompt as one event.
    pub hashes: usize,
    /// Tokens in an event: the longest contexts served today, a million, in one store.
    pub tokens: usize,
    /// Extra keys in an event: one per block of the longest event, the adapter's name being in each.
    pub extra_keys: usize,
    /// Bytes of all extra keys of an event: 16 per key at their full number, so many long ones or a few
    /// very long.
    pub extra_key_bytes: usize,
    /// Bytes of an adapter's name, a salt or one extra key. Salts are digests or tenants' names.
    pub string_bytes: usize,
    /// Hashes and extra keys that all events of a batch hold together: as many as a million blocks have.
    /// One byte on the wire can become a hash of 24 bytes in memory, which a limit on bytes does not see.
    pub names: usize,
    /// What further media are called.
    pub media: MediumMap,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            payload_bytes: 16 << 20,
            events: 1 << 18,
            hashes: 1 << 18,
            tokens: 1 << 20,
            extra_keys: 1 << 18,
            extra_key_bytes: 4 << 20,
            string_bytes: 4 << 10,
            names: 1 << 20,
            media: MediumMap::default(),
        }
    }
}

/// Why a whole batch is lost. Its number in the stream is used up all the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The payload is longer than [`Limits::payload_bytes`]; it was not looked at.
    #[error("payload of {bytes} bytes exceeds the limit of {limit}")]
    PayloadTooLarge {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The batch declares more events than [`Limits::events`].
    #[error("batch of {events} events exceeds the limit of {limit}")]
    TooManyEvents {
        /// How many it declares.
        events: usize,
        /// The limit.
        limit: usize,
    },
    /// The msgpack breaks off, holds a byte that means nothing, or nests 16 deep.
    #[error("payload is no msgpack value")]
    Broken,
    /// Bytes follow the batch.
    #[error("payload goes on after the batch")]
    TrailingBytes,
    /// The payload is neither an array nor a map.
    #[error("payload is neither an array nor a map")]
    NotABatch,
    /// The batch has no list of events.
    #[error("batch has no list of events")]
    NoEvents,
}

/// One msgpack value that is not looked into. A `str` that is not UTF-8 is a byte string, as it was in
/// msgpack before the two were told apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar<'a> {
    Nil,
    UInt(u64),
    /// May be non-negative: encoders may write small numbers signed.
    Int(i64),
    Float(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    /// A boolean, an array, a map or an extension; already read past.
    Other,
}

impl<'a> Scalar<'a> {
    pub(super) fn text_or_bytes(raw: &'a [u8]) -> Self {
        std::str::from_utf8(raw).map_or(Self::Bytes(raw), Self::Text)
    }

    fn as_u32(self) -> Option<u32> {
        match self {
            Self::UInt(value) => u32::try_from(value).ok(),
            Self::Int(value) => u32::try_from(value).ok(),
            _ => None,
        }
    }

    fn as_i64(self) -> Option<i64> {
        match self {
            Self::UInt(value) => i64::try_from(value).ok(),
            Self::Int(value) => Some(value),
            _ => None,
        }
    }

    /// A token id; `None` is a token that cannot be placed, which makes the list unusable.
    pub(super) fn token(self) -> Option<u32> {
        self.as_u32()
    }

    /// A block's name on its engine.
    pub(super) fn hash(self) -> Option<BlockHash> {
        match self {
            Self::UInt(value) => Some(BlockHash::Int(value)),
            Self::Int(value) => Some(BlockHash::from_i64(value)),
            Self::Bytes(bytes) => BlockHash::from_bytes(bytes),
            _ => None,
        }
    }

    /// A batch's time.
    pub(super) fn time(self) -> Option<f64> {
        match self {
            Self::UInt(value) => Some(value as f64),
            Self::Int(value) => Some(value as f64),
            Self::Float(value) => Some(value).filter(|value| value.is_finite()),
            _ => None,
        }
    }

    /// The rank that a batch names. One that does not fit is the largest: it agrees with no connection,
    /// and saying "not named" would hide that.
    pub(super) fn rank(self) -> Option<i64> {
        match self {
            Self::UInt(value) => Some(i64::try_from(value).unwrap_or(i64::MAX)),
            Self::Int(value) => Some(value),
            _ => None,
        }
    }
}

/// A field of a batch written as a map.
#[derive(Clone, Copy, Debug)]
pub(super) enum BatchField {
    Time,
    Events,
    Rank,
}

impl BatchField {
    /// The fields in the order of a batch written as an array. What follows is from a later version.
    pub(super) const POSITIONS: [Self; 3] = [Self::Time, Self::Events, Self::Rank];

    /// The field of this key. vLLM says `data_parallel_rank`, SGLang `attn_dp_rank`.
    pub(super) fn from_key(key: &[u8]) -> Option<Self> {
        match key {
            b"ts" => Some(Self::Time),
            b"events" => Some(Self::Events),
            b"data_parallel_rank" | b"attn_dp_rank" | b"dp_rank" => Some(Self::Rank),
            _ => None,
        }
    }
}

/// What an event is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tag {
    Stored,
    Removed,
    Cleared,
}

impl Tag {
    /// The tag that this value names, or why its event is left out.
    pub(super) fn read(value: Scalar<'_>) -> Result<Self, SkipReason> {
        match value {
            Scalar::Text("BlockStored") => Ok(Self::Stored),
            Scalar::Text("BlockRemoved") => Ok(Self::Removed),
            Scalar::Text("AllBlocksCleared") => Ok(Self::Cleared),
            Scalar::Text(_) => Err(SkipReason::UnknownTag),
            _ => Err(SkipReason::Malformed),
        }
    }

    /// The fields that follow the tag in an event written as an array. What follows them is from a later
    /// version and ignored.
    pub(super) fn positions(self) -> &'static [Field] {
        match self {
            Self::Stored => &[
                Field::BlockHashes,
                Field::Parent,
                Field::TokenIds,
                Field::BlockSize,
                Field::LoraId,
                Field::Medium,
                Field::LoraName,
                Field::ExtraKeys,
                Field::GroupIdx,
                Field::SpecKind,
                Field::SpecWindow,
            ],
            Self::Removed => &[Field::BlockHashes, Field::Medium, Field::GroupIdx],
            Self::Cleared => &[Field::Medium],
        }
    }
}

/// A field of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Field {
    Tag,
    BlockHashes,
    Parent,
    TokenIds,
    BlockSize,
    LoraId,
    Medium,
    Locality,
    LoraName,
    CacheSalt,
    ExtraKeys,
    GroupIdx,
    SpecKind,
    SpecWindow,
}

impl Field {
    /// The field of this key in an event written as a map. Others (`session_id`, `ownership`,
    /// `lookahead_token_ids`, …) say nothing about what is cached where.
    pub(super) fn from_key(key: &[u8]) -> Option<Self> {
        Some(match key {
            b"type" => Self::Tag,
            b"block_hashes" => Self::BlockHashes,
            b"parent_block_hash" => Self::Parent,
            b"token_ids" => Self::TokenIds,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"medium" => Self::Medium,
            b"locality" => Self::Locality,
            b"lora_name" => Self::LoraName,
            b"cache_salt" => Self::CacheSalt,
            b"extra_keys" => Self::ExtraKeys,
            b"group_idx" => Self::GroupIdx,
            b"kv_cache_spec_kind" => Self::SpecKind,
            b"kv_cache_spec_sliding_window" => Self::SpecWindow,
            _ => return None,
        })
    }
}

/// What was read for a field: `Ok(None)` when it is absent or nil, an error when it spoils its event.
pub(super) type Read<T> = Result<Option<T>, SkipReason>;

/// The fields of one event as they come in. A field that comes twice has its last value.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    tag: Result<Tag, SkipReason>,
    pub(super) hashes: Read<Vec<BlockHash>>,
    /// Present but nil is the start of a prompt, absent is not.
    parent: Read<Option<BlockHash>>,
    pub(super) tokens: Read<EventTokens>,
    block_size: Read<u32>,
    lora_id: Read<i64>,
    medium: Read<&'a str>,
    locality: Read<&'a str>,
    lora_name: Read<&'a str>,
    cache_salt: Read<&'a str>,
    pub(super) extra_keys: Read<Vec<Vec<ExtraKey>>>,
    group_idx: Read<u32>,
    spec_kind: Read<&'a str>,
    spec_window: Read<u32>,
}

impl Default for Fields<'_> {
    fn default() -> Self {
        Self {
            // An event without a tag.
            tag: Err(SkipReason::Malformed),
            hashes: Ok(None),
            parent: Ok(None),
            tokens: Ok(None),
            block_size: Ok(None),
            lora_id: Ok(None),
            medium: Ok(None),
            locality: Ok(None),
            lora_name: Ok(None),
            cache_salt: Ok(None),
            extra_keys: Ok(None),
            group_idx: Ok(None),
            spec_kind: Ok(None),
            spec_window: Ok(None),
        }
    }
}

impl<'a> Fields<'a> {
    /// The fields of an event of this kind, none of them read.
    pub(super) fn of(tag: Tag) -> Self {
        Self { tag: Ok(tag), ..Self::default() }
    }

    /// Takes the value of a field that is not a list, or a value that is no list for one that should be.
    pub(super) fn set(&mut self, field: Field, value: Scalar<'a>, limits: &Limits) {
        match field {
            Field::Tag => self.tag = Tag::read(value),
            Field::BlockHashes => self.hashes = no_list(value),
            Field::Parent => self.parent = parent(value),
            Field::TokenIds => self.tokens = no_list(value),
            Field::BlockSize => self.block_size = read(value, Scalar::as_u32),
            Field::LoraId => self.lora_id = read(value, Scalar::as_i64),
            Field::Medium => self.medium = read(value, text),
            Field::Locality => self.locality = read(value, text),
            Field::LoraName => self.lora_name = bounded(value, limits),
            Field::CacheSalt => self.cache_salt = bounded(value, limits),
            Field::ExtraKeys => self.extra_keys = no_list(value),
            Field::GroupIdx => self.group_idx = read(value, Scalar::as_u32),
            Field::SpecKind => self.spec_kind = read(value, text),
            Field::SpecWindow => self.spec_window = read(value, Scalar::as_u32),
        }
    }

    /// The event, or why it is left out. `names` is what the batch may still hold. Lists are taken out.
    pub(super) fn finish(&mut self, names: &mut usize, limits: &Limits) -> Result<KvEvent, SkipReason> {
        let (event, held) = match self.tag? {
            Tag::Stored => self.stored(&limits.media)?,
            Tag::Removed => self.removed(&limits.media)?,
            Tag::Cleared => (KvEvent::Cleared(self.cleared(&limits.media)?), 0),
        };
        *names = names.checked_sub(held).ok_or(SkipReason::TooLong)?;
        Ok(event)
    }

    fn stored(&mut self, media: &MediumMap) -> Result<(KvEvent, usize), SkipReason> {
        let block_hashes = required(take(&mut self.hashes))?;
        let extra_keys = take(&mut self.extra_keys)?.unwrap_or_default();
        // Which key belongs to which block cannot be told.
        if !extra_keys.is_empty() && extra_keys.len() != block_hashes.len() {
            return Err(SkipReason::Malformed);
        }
        let keys = extra_keys.iter().map(|keys| 1 + keys.len()).sum::<usize>();
        let held = block_hashes.len() + keys;
        let window = self.spec_window?;
        let stored = BlockStored {
            block_hashes,
            parent_block_hash: required(take(&mut self.parent))?,
            tokens: required(take(&mut self.tokens))?,
            block_size: required(self.block_size)?,
            lora_id: self.lora_id?,
            lora_name: self.lora_name?.map(str::to_owned),
            cache_salt: self.cache_salt?.map(str::to_owned),
            tier: self.tier(media)?,
            group_idx: self.group_idx?,
            attention: self.spec_kind?.map(|kind| AttentionKind::from_spec(kind, window)),
            extra_keys,
        };
        Ok((KvEvent::Stored(stored), held))
    }

    fn removed(&mut self, media: &MediumMap) -> Result<(KvEvent, usize), SkipReason> {
        let block_hashes = required(take(&mut self.hashes))?;
        let held = block_hashes.len();
        let removed = BlockRemoved { block_hashes, tier: self.tier(media)?, group_idx: self.group_idx? };
        Ok((KvEvent::Removed(removed), held))
    }

    /// What was cleared: `None` where no medium is named.
    fn cleared(&self, media: &MediumMap) -> Read<Tier> {
        match self.medium?.unwrap_or_default() {
            "" => Ok(None),
            _ => self.tier(media).map(Some),
        }
    }

    /// Blocks that another publisher's machine holds are not the rank's own.
    fn tier(&self, media: &MediumMap) -> Result<Tier, SkipReason> {
        let medium = self.medium?;
        match self.locality? {
            Some(locality) if locality.eq_ignore_ascii_case("REMOTE") => Ok(Tier::Other),
            _ => Ok(media.tier(medium)),
        }
    }
}

fn take<T>(read: &mut Read<T>) -> Read<T> {
    std::mem::replace(read, Ok(None))
}

fn required<T>(read: Read<T>) -> Result<T, SkipReason> {
    read?.ok_or(SkipReason::Malformed)
}

fn read<'a, T>(value: Scalar<'a>, take: impl FnOnce(Scalar<'a>) -> Option<T>) -> Read<T> {
    match value {
        Scalar::Nil => Ok(None),
        value => take(value).map(Some).ok_or(SkipReason::Malformed),
    }
}

fn no_list<T>(value: Scalar<'_>) -> Read<T> {
    read(value, |_| None)
}

fn parent(value: Scalar<'_>) -> Read<Option<BlockHash>> {
    read(value, Scalar::hash).map(Some)
}

fn text(value: Scalar<'_>) -> Option<&str> {
    match value {
        Scalar::Text(text) => Some(text),
        _ => None,
    }
}

fn bounded<'a>(value: Scalar<'a>, limits: &Limits) -> Read<&'a str> {
    match read(value, text)? {
        Some(text) if text.len() > limits.string_bytes => Err(SkipReason::TooLong),
        text => Ok(text),
    }
}

/// One extra key, still in the payload.
#[derive(Clone, Copy, Debug)]
pub(super) enum KeyRef<'a> {
    Text(&'a str),
    Int(i64),
    Located(&'a str, i64),
    Bytes(&'a [u8]),
}

impl<'a> KeyRef<'a> {
    /// Longest entry: `("mm", identifier, offset)`.
    pub(super) const MAX_PARTS: usize = 3;

    /// The key that a bare value is.
    pub(super) fn bare(value: Scalar<'a>) -> Option<Self> {
        match value {
            Scalar::Text(text) => Some(Self::Text(text)),
            Scalar::Bytes(bytes) => Some(Self::Bytes(bytes)),
            value => value.as_i64().map(Self::Int),
        }
    }

    /// The key that an array of these values is: `[identifier, offset]`, or one of the tagged forms that
    /// vLLM hashes from 0.31 on.
    pub(super) fn compound(parts: &[Scalar<'a>]) -> Option<Self> {
        match *parts {
            [Scalar::Text("mm"), Scalar::Text(id), offset] => Some(Self::Located(id, offset.as_i64()?)),
            [Scalar::Text("lora" | "cache_salt"), Scalar::Text(text)] => Some(Self::Text(text)),
            [Scalar::Text("prompt_embeds"), Scalar::Bytes(digest)] => Some(Self::Bytes(digest)),
            [Scalar::Text(id), offset] => Some(Self::Located(id, offset.as_i64()?)),
            _ => None,
        }
    }

    fn bytes(self) -> usize {
        match self {
            Self::Text(text) | Self::Located(text, _) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Int(_) => 0,
        }
    }

    fn into_owned(self) -> ExtraKey {
        match self {
            Self::Text(text) => ExtraKey::Text(text.to_owned()),
            Self::Int(value) => ExtraKey::Int(value),
            Self::Located(id, offset) => ExtraKey::Located(id.to_owned(), offset),
            Self::Bytes(bytes) => ExtraKey::Bytes(bytes.to_owned()),
        }
    }
}

/// The extra keys of an event as they come in, held against the limits. Once one is refused, the rest of
/// the field need only be read past.
#[derive(Debug)]
pub(super) struct KeyLists<'l> {
    limits: &'l Limits,
    /// Empty until the first key: vLLM sends a nil per block when there are none.
    lists: Vec<Vec<ExtraKey>>,
    blocks: usize,
    keys: usize,
    bytes: usize,
}

impl<'l> KeyLists<'l> {
    /// The lists of `blocks` blocks, as declared.
    pub(super) fn new(blocks: usize, limits: &'l Limits) -> Result<Self, SkipReason> {
        if blocks > limits.hashes {
            return Err(SkipReason::TooLong);
        }
        Ok(Self { limits, lists: Vec::new(), blocks: 0, keys: 0, bytes: 0 })
    }

    /// The next block begins; it declares this many keys.
    pub(super) fn block(&mut self, keys: usize) -> Result<(), SkipReason> {
        self.blocks += 1;
        self.keys = self.keys.saturating_add(keys);
        if self.keys > self.limits.extra_keys { Err(SkipReason::TooLong) } else { Ok(()) }
    }

    /// One key of the block that began last; `None` is an entry that is no key.
    pub(super) fn key(&mut self, key: Option<KeyRef<'_>>) -> Result<(), SkipReason> {
        let key = key.ok_or(SkipReason::Malformed)?;
        let bytes = key.bytes();
        self.bytes += bytes;
        if bytes > self.limits.string_bytes || self.bytes > self.limits.extra_key_bytes {
            return Err(SkipReason::TooLong);
        }
        self.lists.resize_with(self.blocks, Vec::new);
        if let Some(list) = self.lists.last_mut() {
            list.push(key.into_owned());
        }
        Ok(())
    }

    /// One list per block, or none at all when no block has a key.
    pub(super) fn finish(mut self) -> Vec<Vec<ExtraKey>> {
        if !self.lists.is_empty() {
            self.lists.resize_with(self.blocks, Vec::new);
        }
        self.lists
    }
}

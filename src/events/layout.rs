//! What the positions, names and values of a batch mean, apart from how msgpack writes them.
//!
//! Both decoders read msgpack on their own and meet here: what a field is called, where it stands, which
//! values it takes and which make its event unusable is said once. vLLM up to 0.23 and SGLang up to 0.5.19
//! write events as arrays, later versions as maps; the fields and their order are the same.

use crate::block::{AttentionKind, BlockHash, MediumMap, Tier};
use crate::events::event::{BlockRemoved, BlockStored, EventTokens, ExtraKey, KvEvent};
use crate::events::limits::Limits;
use crate::events::lists::{Fault, Names, Read};
use crate::events::scalar::Scalar;
use crate::trust::{Reason, ReasonCounts};

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
    pub(super) fn read(value: Scalar<'_>) -> Result<Self, Reason> {
        match value {
            Scalar::Text("BlockStored") => Ok(Self::Stored),
            Scalar::Text("BlockRemoved") => Ok(Self::Removed),
            Scalar::Text("AllBlocksCleared") => Ok(Self::Cleared),
            Scalar::Text(_) => Err(Reason::UnknownTag),
            _ => Err(Reason::MalformedEvent),
        }
    }

    /// What it means that an event of this kind is lost.
    fn loss(self, fault: Fault) -> Reason {
        match (fault, self) {
            (Fault::BrokenPairs, Self::Stored) => Reason::TokenMismatch,
            (Fault::TooLong, Self::Stored) => Reason::TooLongStore,
            (Fault::Malformed, Self::Stored) => Reason::MalformedStore,
            (Fault::TooLong, Self::Removed | Self::Cleared) => Reason::TooLongRemoval,
            (Fault::Malformed | Fault::BrokenPairs, Self::Removed | Self::Cleared) => {
                Reason::MalformedRemoval
            }
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
                Field::ByType,
                Field::ByType,
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
    Lookahead,
    /// In an array, what its type says: a string is the adapter, a list the extra keys, a map holds fields by
    /// name. vLLM has the adapter in one of these places and the extra keys in the next.
    ByType,
}

impl Field {
    /// The field of this key in a map within an event written as an array: one that says more of the event than
    /// the array did, never what the array must say.
    pub(super) fn more_from_key(key: &[u8]) -> Option<Self> {
        Self::from_key(key).filter(|field| {
            !matches!(field, Self::Tag | Self::BlockHashes | Self::Parent | Self::TokenIds | Self::BlockSize)
        })
    }

    /// The field of this key in an event written as a map. Others (`session_id`, `ownership`, …) say nothing
    /// about what is cached where.
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
            b"lookahead_token_ids" => Self::Lookahead,
            _ => return None,
        })
    }
}

/// The fields of one event as they come in. A field that comes twice has its last value.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    tag: Result<Tag, Reason>,
    pub(super) hashes: Read<Names>,
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
    pub(super) lookahead: Read<Vec<Vec<u32>>>,
}

impl Default for Fields<'_> {
    fn default() -> Self {
        Self {
            // An event without a tag.
            tag: Err(Reason::MalformedEvent),
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
            lookahead: Ok(None),
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
            // No tokens are none: a placeholder that only names its blocks.
            Field::TokenIds if matches!(value, Scalar::Nil) => {
                self.tokens = Ok(Some(EventTokens::Ids(Vec::new())));
            }
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
            Field::Lookahead => self.lookahead = no_list(value),
            Field::ByType => match value {
                Scalar::Nil => {}
                // Two places may hold the adapter, one event has one.
                Scalar::Text(_) if matches!(self.lora_name, Ok(None | Some(""))) => {
                    self.lora_name = bounded(value, limits);
                }
                _ => self.lora_name = Err(Fault::Malformed),
            },
        }
    }

    /// The event; `None` if it is left out. What is left out is counted in `skipped`. `names` is what the batch may
    /// still hold. Lists are taken out.
    pub(super) fn finish(
        &mut self,
        names: &mut usize,
        limits: &Limits,
        skipped: &mut ReasonCounts,
    ) -> Option<KvEvent> {
        let tag = match self.tag {
            Ok(tag) => tag,
            Err(reason) => {
                skipped.add(reason, 1);
                return None;
            }
        };
        let mut unreadable = 0;
        let event = match tag {
            Tag::Stored => self.stored(&limits.media, &mut unreadable),
            Tag::Removed => self.removed(&limits.media, &mut unreadable),
            Tag::Cleared => self.cleared(&limits.media).map(|tier| Some((KvEvent::Cleared(tier), 0))),
        };
        let event = event.and_then(|event| {
            let Some((event, held)) = event else { return Ok(None) };
            *names = names.checked_sub(held).ok_or(Fault::TooLong)?;
            Ok(Some(event))
        });
        match event {
            Ok(event) => {
                if unreadable > 0 {
                    skipped.add(tag.loss(Fault::Malformed), unreadable);
                }
                event
            }
            Err(fault) => {
                skipped.add(tag.loss(fault), 1);
                None
            }
        }
    }

    fn stored(&mut self, media: &MediumMap, unreadable: &mut u32) -> Result<Option<(KvEvent, usize)>, Fault> {
        let names = required(take(&mut self.hashes))?;
        let (listed, before_unreadable) = (names.len(), names.before_unreadable);
        let extra_keys = take(&mut self.extra_keys)?.unwrap_or_default();
        let lookahead = take(&mut self.lookahead)?.unwrap_or_default();
        // Which belongs to which block cannot be told.
        let lines_up = |lists: usize| lists == 0 || lists == listed;
        if !lines_up(extra_keys.len()) || !lines_up(lookahead.len()) {
            return Err(Fault::Malformed);
        }
        *unreadable = names.unreadable;
        let window = self.spec_window?;
        let mut stored = BlockStored {
            block_hashes: names.readable,
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
            lookahead,
        };
        if let Some(readable) = before_unreadable {
            cut_behind_unreadable(&mut stored, listed, readable)?;
            if stored.block_hashes.is_empty() {
                return Ok(None);
            }
        }
        let keys = stored.extra_keys.iter().map(|keys| 1 + keys.len()).sum::<usize>();
        let held = stored.block_hashes.len() + keys + stored.lookahead.len();
        Ok(Some((KvEvent::Stored(stored), held)))
    }

    fn removed(
        &mut self,
        media: &MediumMap,
        unreadable: &mut u32,
    ) -> Result<Option<(KvEvent, usize)>, Fault> {
        let names = required(take(&mut self.hashes))?;
        let held = names.readable.len();
        let removed = BlockRemoved {
            block_hashes: names.readable,
            tier: self.tier(media)?,
            group_idx: self.group_idx?,
        };
        *unreadable = names.unreadable;
        let nothing_left = held == 0 && names.unreadable > 0;
        Ok((!nothing_left).then_some((KvEvent::Removed(removed), held)))
    }

    /// What was cleared: `None` where no medium is named.
    fn cleared(&self, media: &MediumMap) -> Read<Tier> {
        match self.medium?.unwrap_or_default() {
            "" => Ok(None),
            _ => self.tier(media).map(Some),
        }
    }

    /// Blocks that another publisher's machine holds are not the rank's own.
    fn tier(&self, media: &MediumMap) -> Result<Tier, Fault> {
        let medium = self.medium?;
        match self.locality? {
            Some(locality) if locality.eq_ignore_ascii_case("REMOTE") => Ok(Tier::Other),
            _ => Ok(media.tier(medium)),
        }
    }
}

/// Takes from a store what its unreadable names cost. A block behind one cannot be credited, since the removal of
/// that one would not be seen: the blocks before the first such name stay. Names without content stand each for
/// itself, so all of them stay.
fn cut_behind_unreadable(stored: &mut BlockStored, names: usize, readable: usize) -> Result<(), Fault> {
    let size = stored.block_size as usize;
    let (ids, more) = match &mut stored.tokens {
        EventTokens::Ids(ids) if !ids.is_empty() => (ids, 0),
        EventTokens::Pairs(ids) => (ids, 1),
        EventTokens::Ids(_) | EventTokens::Unusable => {
            stored.extra_keys.clear();
            stored.lookahead.clear();
            return Ok(());
        }
    };
    // With a name less they could line up by chance, and wrongly.
    if names.checked_mul(size).and_then(|pairs| pairs.checked_add(more)) != Some(ids.len()) {
        return Err(Fault::Malformed);
    }
    ids.truncate(readable * size + more);
    stored.block_hashes.truncate(readable);
    stored.extra_keys.truncate(readable);
    stored.lookahead.truncate(readable);
    Ok(())
}

fn take<T>(read: &mut Read<T>) -> Read<T> {
    std::mem::replace(read, Ok(None))
}

fn required<T>(read: Read<T>) -> Result<T, Fault> {
    read?.ok_or(Fault::Malformed)
}

fn read<'a, T>(value: Scalar<'a>, take: impl FnOnce(Scalar<'a>) -> Option<T>) -> Read<T> {
    match value {
        Scalar::Nil => Ok(None),
        value => take(value).map(Some).ok_or(Fault::Malformed),
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
        Some(text) if text.len() > limits.string_bytes => Err(Fault::TooLong),
        text => Ok(text),
    }
}

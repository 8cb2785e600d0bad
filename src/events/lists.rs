//! The lists of an event as they come in, element by element, held against the limits.
//!
//! Both decoders read msgpack on their own and put what they read in here, so that what a list means and when it
//! spoils its event is said once.

use crate::block::BlockHash;
use crate::events::event::{EventTokens, ExtraKey};
use crate::events::limits::Limits;
use crate::events::scalar::Scalar;

/// Why a field spoils its event, whatever that is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    /// It has not the shape that it should have.
    Malformed,
    /// It is longer than the limit.
    TooLong,
    /// Pairs of tokens of which one does not begin where the last one ended.
    BrokenPairs,
}

/// What was read for a field: `Ok(None)` when it is absent or nil, an error when it spoils its event.
pub(super) type Read<T> = Result<Option<T>, Fault>;

/// The names of an event. One that cannot be read costs itself.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) readable: Vec<BlockHash>,
    /// How many were readable before the first that was not.
    pub(super) before_unreadable: Option<usize>,
    pub(super) unreadable: u32,
}

impl Names {
    /// An empty list in this buffer.
    pub(super) fn in_buffer(readable: Vec<BlockHash>) -> Self {
        Self { readable, ..Self::default() }
    }

    /// Takes in the next name.
    #[inline]
    pub(super) fn push(&mut self, name: Option<BlockHash>) {
        match name {
            Some(name) => self.readable.push(name),
            None => {
                self.before_unreadable.get_or_insert(self.readable.len());
                self.unreadable = self.unreadable.saturating_add(1);
            }
        }
    }

    /// How many there are, the unreadable ones included.
    pub(super) fn len(&self) -> usize {
        self.readable.len() + self.unreadable as usize
    }
}

/// Tokens that come as pairs, each beginning where the one before it ended.
#[derive(Debug)]
pub(super) struct PairChain(Vec<u32>);

impl PairChain {
    /// An empty chain in this buffer.
    pub(super) fn in_buffer(tokens: Vec<u32>) -> Self {
        Self(tokens)
    }

    /// Takes in the next pair; `None` is an element that is no pair of tokens.
    pub(super) fn push(&mut self, pair: Option<(u32, u32)>) -> Result<(), BadTokens> {
        let (first, second) = pair.ok_or(BadTokens::Unusable)?;
        match self.0.last() {
            None => self.0.push(first),
            Some(last) if *last != first => return Err(BadTokens::BrokenPairs),
            Some(_) => {}
        }
        self.0.push(second);
        Ok(())
    }

    pub(super) fn finish(self) -> EventTokens {
        EventTokens::Pairs(self.0)
    }
}

/// Why a list of tokens need not be read further.
#[derive(Clone, Copy, Debug)]
pub(super) enum BadTokens {
    /// An element cannot be placed.
    Unusable,
    BrokenPairs,
}

impl From<BadTokens> for Read<EventTokens> {
    fn from(bad: BadTokens) -> Self {
        match bad {
            BadTokens::Unusable => Ok(Some(EventTokens::Unusable)),
            BadTokens::BrokenPairs => Err(Fault::BrokenPairs),
        }
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
    pub(super) fn new(blocks: usize, limits: &'l Limits) -> Result<Self, Fault> {
        if blocks > limits.hashes {
            return Err(Fault::TooLong);
        }
        Ok(Self { limits, lists: Vec::new(), blocks: 0, keys: 0, bytes: 0 })
    }

    /// The next block begins; it declares this many keys.
    pub(super) fn block(&mut self, keys: usize) -> Result<(), Fault> {
        self.blocks += 1;
        self.keys = self.keys.saturating_add(keys);
        if self.keys > self.limits.extra_keys { Err(Fault::TooLong) } else { Ok(()) }
    }

    /// One key of the block that began last; `None` is an entry that is no key.
    pub(super) fn key(&mut self, key: Option<KeyRef<'_>>) -> Result<(), Fault> {
        let key = key.ok_or(Fault::Malformed)?;
        let bytes = key.bytes();
        self.bytes += bytes;
        if bytes > self.limits.string_bytes || self.bytes > self.limits.extra_key_bytes {
            return Err(Fault::TooLong);
        }
        self.lists.resize_with(self.blocks, Vec::new);
        if let Some(list) = self.lists.last_mut() {
            // Most blocks have one key, and there may be millions of blocks.
            if list.is_empty() {
                list.reserve_exact(1);
            }
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

/// The tokens behind each block that its hash covers too. Once one is refused, the rest of the field need only be
/// read past.
#[derive(Debug)]
pub(super) struct LookaheadLists<'l> {
    limits: &'l Limits,
    /// Empty until the first token: an engine without a drafter covers none.
    lists: Vec<Vec<u32>>,
    blocks: usize,
    tokens: usize,
}

impl<'l> LookaheadLists<'l> {
    /// The lists of `blocks` blocks, as declared.
    pub(super) fn new(blocks: usize, limits: &'l Limits) -> Result<Self, Fault> {
        if blocks > limits.hashes {
            return Err(Fault::TooLong);
        }
        Ok(Self { limits, lists: Vec::new(), blocks: 0, tokens: 0 })
    }

    /// The next block begins; it declares this many tokens.
    pub(super) fn block(&mut self, tokens: usize) -> Result<(), Fault> {
        self.blocks += 1;
        self.tokens = self.tokens.saturating_add(tokens);
        if self.tokens > self.limits.tokens { Err(Fault::TooLong) } else { Ok(()) }
    }

    /// One token of the block that began last; `None` is an element that is no token.
    pub(super) fn token(&mut self, token: Option<u32>) -> Result<(), Fault> {
        let token = token.ok_or(Fault::Malformed)?;
        self.lists.resize_with(self.blocks, Vec::new);
        if let Some(list) = self.lists.last_mut() {
            if list.is_empty() {
                list.reserve_exact(1);
            }
            list.push(token);
        }
        Ok(())
    }

    /// A block whose tokens are one value: nil for none, or a token.
    pub(super) fn bare(&mut self, value: Scalar<'_>) -> Result<(), Fault> {
        match value {
            Scalar::Nil => self.block(0),
            value => {
                self.block(1)?;
                self.token(value.token())
            }
        }
    }

    /// One list per block, or none at all when no block has a token.
    pub(super) fn finish(mut self) -> Vec<Vec<u32>> {
        if !self.lists.is_empty() {
            self.lists.resize_with(self.blocks, Vec::new);
        }
        self.lists
    }
}

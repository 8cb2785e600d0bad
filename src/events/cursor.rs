//! The decoder of the hot path: a cursor over the payload's bytes.
//!
//! Gives the same answer as the decoder of record for every payload. It is faster because it knows where
//! each value must lie: hashes and tokens go from the wire into their list without a visitor between, and
//! the lists are those of the batch before.

use crate::block::BlockHash;
use crate::events::event::{EventBatch, EventTokens, ExtraKey, KvEvent};
use crate::events::layout::{BatchField, Field, Fields, Tag};
use crate::events::limits::{DecodeError, Limits, MAX_DEPTH};
use crate::events::lists::{BadTokens, Fault, KeyLists, KeyRef, LookaheadLists, Names, PairChain, Read};
use crate::events::scalar::Scalar;
use crate::trust::{Reason, ReasonCounts};

/// Lists longer than this are not kept for the next batch, so that one huge batch does not hold its memory
/// for ever. Most prefill chunks are shorter.
const KEPT_CAPACITY: usize = 16 << 10;

/// Decodes one batch into `into`, whose events are overwritten and whose buffers are used again.
///
/// Does what [`decode_batch`](super::decode_batch) does. After an error `into` is empty.
///
/// # Errors
///
/// [`DecodeError`] when the batch as a whole cannot be read or exceeds `limits`.
///
/// # Cost
///
/// One pass over the payload. With the buffers of a similar batch at hand it allocates for byte-string
/// hashes, names and extra keys only.
pub fn decode_batch_fast(payload: &[u8], limits: &Limits, into: &mut EventBatch) -> Result<(), DecodeError> {
    let outcome = read_payload(payload, limits, into);
    if outcome.is_err() {
        into.events.clear();
        into.skipped = ReasonCounts::default();
        into.ts = None;
        into.dp_rank = None;
    }
    outcome
}

/// The time of a batch without its events: the first element of an array, the first `ts` of a map.
///
/// `None` if there is none, it is not finite, or the payload is no batch. A batch whose time can be read may
/// still turn out to be undecodable.
///
/// Cost: a few nanoseconds for arrays; for maps as long as it takes to read past what precedes it.
pub fn peek_ts(payload: &[u8]) -> Option<f64> {
    let mut cursor = Cursor::new(payload);
    match cursor.head().ok()? {
        Head::List(1..) => cursor.scalar().ok()?.time(),
        Head::Map(entries) => {
            cursor.enter().ok()?;
            for _ in 0..entries {
                match cursor.key().ok()?.and_then(BatchField::from_key) {
                    Some(BatchField::Time) => return cursor.scalar().ok()?.time(),
                    _ => cursor.skip(1).ok()?,
                }
            }
            None
        }
        Head::List(0) | Head::Scalar(_) => None,
    }
}

fn read_payload(payload: &[u8], limits: &Limits, into: &mut EventBatch) -> Result<(), DecodeError> {
    if payload.len() > limits.payload_bytes {
        return Err(DecodeError::PayloadTooLarge { bytes: payload.len(), limit: limits.payload_bytes });
    }
    let mut cursor = Cursor::new(payload);
    into.ts = None;
    into.dp_rank = None;
    let shape = read_batch(&mut cursor, limits, into)?;
    if !cursor.rest.is_empty() {
        return Err(DecodeError::TrailingBytes);
    }
    shape
}

/// The outer error stops the reading; the inner one is about a value that was read to its end.
type Outcome<T> = Result<Result<T, DecodeError>, DecodeError>;

fn read_batch(cursor: &mut Cursor<'_>, limits: &Limits, into: &mut EventBatch) -> Outcome<()> {
    let mut found = Err(DecodeError::NoEvents);
    match cursor.head()? {
        Head::Scalar(_) => return Ok(Err(DecodeError::NotABatch)),
        Head::List(len) => {
            cursor.enter()?;
            for position in 0..len {
                match BatchField::POSITIONS.get(position) {
                    Some(&field) => read_batch_field(cursor, field, limits, into, &mut found)?,
                    None => {
                        cursor.skip(len - position)?;
                        break;
                    }
                }
            }
        }
        Head::Map(entries) => {
            cursor.enter()?;
            for _ in 0..entries {
                match cursor.key()?.and_then(BatchField::from_key) {
                    Some(field) => read_batch_field(cursor, field, limits, into, &mut found)?,
                    None => cursor.skip(1)?,
                }
            }
        }
    }
    cursor.leave();
    Ok(found)
}

fn read_batch_field(
    cursor: &mut Cursor<'_>,
    field: BatchField,
    limits: &Limits,
    into: &mut EventBatch,
    found: &mut Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    match field {
        BatchField::Time => into.ts = cursor.scalar()?.time(),
        BatchField::Rank => into.dp_rank = cursor.scalar()?.rank(),
        BatchField::Events => *found = read_events(cursor, limits, into)?,
    }
    Ok(())
}

fn read_events(cursor: &mut Cursor<'_>, limits: &Limits, into: &mut EventBatch) -> Outcome<()> {
    let len = match cursor.head()? {
        Head::List(len) => len,
        head => {
            cursor.skip_contents(&head)?;
            return Ok(Err(DecodeError::NoEvents));
        }
    };
    // Depth before length, as the decoder of record has it.
    cursor.enter()?;
    if len > limits.events {
        return Err(DecodeError::TooManyEvents { events: len, limit: limits.events });
    }
    into.skipped = ReasonCounts::default();
    let mut written = 0;
    let mut names = limits.names;
    let mut reader = EventReader { cursor, limits, spare: Spare::default(), fields: Fields::default() };
    for _ in 0..len {
        reader.spare.refill(into.events.get_mut(written));
        let event = match reader.event()? {
            Ok(()) => reader.fields.finish(&mut names, limits, &mut into.skipped),
            Err(reason) => {
                into.skipped.add(reason, 1);
                None
            }
        };
        if let Some(event) = event {
            match into.events.get_mut(written) {
                Some(place) => *place = event,
                None => into.events.push(event),
            }
            written += 1;
        }
    }
    into.events.truncate(written);
    if into.events.capacity() > KEPT_CAPACITY {
        into.events.shrink_to(KEPT_CAPACITY);
    }
    cursor.leave();
    Ok(Ok(()))
}

/// Lists of events that are about to be overwritten.
#[derive(Default)]
struct Spare {
    hashes: Vec<BlockHash>,
    tokens: Vec<u32>,
}

impl Spare {
    fn refill(&mut self, event: Option<&mut KvEvent>) {
        match event {
            Some(KvEvent::Stored(stored)) => {
                keep(&mut self.hashes, &mut stored.block_hashes);
                if let EventTokens::Ids(tokens) | EventTokens::Pairs(tokens) = &mut stored.tokens {
                    keep(&mut self.tokens, tokens);
                }
            }
            Some(KvEvent::Removed(removed)) => keep(&mut self.hashes, &mut removed.block_hashes),
            Some(KvEvent::Cleared(_)) | None => {}
        }
    }
}

fn keep<T>(spare: &mut Vec<T>, list: &mut Vec<T>) {
    if (spare.capacity() + 1..=KEPT_CAPACITY).contains(&list.capacity()) {
        list.clear();
        std::mem::swap(spare, list);
    }
}

fn emptied<T>(spare: &mut Vec<T>) -> Vec<T> {
    let mut list = std::mem::take(spare);
    list.clear();
    list
}

/// Reads one event after the other.
struct EventReader<'c, 'a, 'l> {
    cursor: &'c mut Cursor<'a>,
    limits: &'l Limits,
    spare: Spare,
    /// Of the event being read.
    fields: Fields<'a>,
}

impl<'a> EventReader<'_, 'a, '_> {
    /// Reads an event into `fields`, or says why it cannot be one.
    fn event(&mut self) -> Result<Result<(), Reason>, Broken> {
        match self.cursor.head()? {
            Head::List(len) => self.positional(len),
            Head::Map(entries) => self.named(entries).map(Ok),
            Head::Scalar(_) => Ok(Err(Reason::MalformedEvent)),
        }
    }

    fn positional(&mut self, len: usize) -> Result<Result<(), Reason>, Broken> {
        self.cursor.enter()?;
        let Some(rest) = len.checked_sub(1) else {
            self.cursor.leave();
            return Ok(Err(Reason::MalformedEvent));
        };
        let outcome = match Tag::read(self.cursor.scalar()?) {
            Ok(tag) => {
                self.fields = Fields::of(tag);
                let positions = tag.positions();
                for &field in positions.iter().take(rest) {
                    self.field(field)?;
                }
                self.cursor.skip(rest.saturating_sub(positions.len()))?;
                Ok(())
            }
            Err(reason) => {
                self.cursor.skip(rest)?;
                Err(reason)
            }
        };
        self.cursor.leave();
        Ok(outcome)
    }

    fn named(&mut self, entries: usize) -> Result<(), Broken> {
        self.fields = Fields::default();
        self.entries(entries, Field::from_key)
    }

    fn entries(&mut self, entries: usize, from_key: impl Fn(&[u8]) -> Option<Field>) -> Result<(), Broken> {
        self.cursor.enter()?;
        for _ in 0..entries {
            match self.cursor.key()?.and_then(&from_key) {
                Some(field) => self.field(field)?,
                None => self.cursor.skip(1)?,
            }
        }
        self.cursor.leave();
        Ok(())
    }

    fn field(&mut self, field: Field) -> Result<(), Broken> {
        let head = self.cursor.head()?;
        let len = match head {
            Head::List(len) => len,
            Head::Scalar(value) => {
                self.fields.set(field, value, self.limits);
                return Ok(());
            }
            // What is named in there is no such place again, so this goes no deeper.
            Head::Map(entries) if field == Field::ByType => {
                return self.entries(entries, Field::more_from_key);
            }
            Head::Map(_) => {
                self.cursor.skip_contents(&head)?;
                self.fields.set(field, Scalar::Other, self.limits);
                return Ok(());
            }
        };
        self.cursor.enter()?;
        match field {
            Field::BlockHashes => self.fields.hashes = self.hashes(len)?,
            Field::TokenIds => self.fields.tokens = self.tokens(len)?,
            Field::ExtraKeys | Field::ByType => self.fields.extra_keys = self.extra_keys(len)?,
            Field::Lookahead => self.fields.lookahead = self.lookahead(len)?,
            _ => {
                self.cursor.skip(len)?;
                self.fields.set(field, Scalar::Other, self.limits);
            }
        }
        self.cursor.leave();
        Ok(())
    }

    fn hashes(&mut self, len: usize) -> Result<Read<Names>, Broken> {
        if len > self.limits.hashes {
            self.cursor.skip(len)?;
            return Ok(Err(Fault::TooLong));
        }
        let mut names = Names::in_buffer(emptied(&mut self.spare.hashes));
        names.readable.reserve(self.cursor.believable(len));
        for _ in 0..len {
            names.push(self.cursor.hash()?);
        }
        Ok(Ok(Some(names)))
    }

    fn tokens(&mut self, len: usize) -> Result<Read<EventTokens>, Broken> {
        if len > self.limits.tokens {
            self.cursor.skip(len)?;
            return Ok(Err(Fault::TooLong));
        }
        let mut tokens = emptied(&mut self.spare.tokens);
        tokens.reserve(self.cursor.believable(len));
        if len > 0 && matches!(self.cursor.rest.first(), Some(0x90..=0x9f | 0xdc | 0xdd)) {
            return self.pairs(len, tokens);
        }
        for read in 1..=len {
            match self.cursor.token()? {
                Some(token) => tokens.push(token),
                None => {
                    self.cursor.skip(len - read)?;
                    return Ok(BadTokens::Unusable.into());
                }
            }
        }
        Ok(Ok(Some(EventTokens::Ids(tokens))))
    }

    /// A list of tokens that begins with a list.
    fn pairs(&mut self, len: usize, buffer: Vec<u32>) -> Result<Read<EventTokens>, Broken> {
        let mut pairs = PairChain::in_buffer(buffer);
        for read in 1..=len {
            let pair = self.cursor.pair()?;
            if let Err(bad) = pairs.push(pair) {
                self.cursor.skip(len - read)?;
                return Ok(bad.into());
            }
        }
        Ok(Ok(Some(pairs.finish())))
    }

    fn lookahead(&mut self, len: usize) -> Result<Read<Vec<Vec<u32>>>, Broken> {
        let mut lists = match LookaheadLists::new(len, self.limits) {
            Ok(lists) => lists,
            Err(fault) => {
                self.cursor.skip(len)?;
                return Ok(Err(fault));
            }
        };
        for read in 1..=len {
            if let Err(fault) = self.block_lookahead(&mut lists)? {
                self.cursor.skip(len - read)?;
                return Ok(Err(fault));
            }
        }
        Ok(Ok(Some(lists.finish())))
    }

    /// The tokens behind one block: nil, a token or a list.
    fn block_lookahead(&mut self, lists: &mut LookaheadLists<'_>) -> Result<Result<(), Fault>, Broken> {
        let head = self.cursor.head()?;
        let len = match head {
            Head::Scalar(value) => return Ok(lists.bare(value)),
            Head::List(len) => len,
            Head::Map(_) => {
                self.cursor.skip_contents(&head)?;
                return Ok(lists.bare(Scalar::Other));
            }
        };
        self.cursor.enter()?;
        let mut outcome = lists.block(len);
        let mut read = 0;
        while outcome.is_ok() && read < len {
            outcome = lists.token(self.cursor.token()?);
            read += 1;
        }
        self.cursor.skip(len - read)?;
        self.cursor.leave();
        Ok(outcome)
    }

    fn extra_keys(&mut self, len: usize) -> Result<Read<Vec<Vec<ExtraKey>>>, Broken> {
        let mut lists = match KeyLists::new(len, self.limits) {
            Ok(lists) => lists,
            Err(reason) => {
                self.cursor.skip(len)?;
                return Ok(Err(reason));
            }
        };
        for read in 1..=len {
            if let Err(reason) = self.block_keys(&mut lists)? {
                self.cursor.skip(len - read)?;
                return Ok(Err(reason));
            }
        }
        Ok(Ok(Some(lists.finish())))
    }

    /// The keys of one block: nil or a list.
    fn block_keys(&mut self, lists: &mut KeyLists<'_>) -> Result<Result<(), Fault>, Broken> {
        let head = self.cursor.head()?;
        let len = match head {
            Head::Scalar(Scalar::Nil) => return Ok(lists.block(0)),
            Head::List(len) => len,
            Head::Scalar(_) | Head::Map(_) => {
                self.cursor.skip_contents(&head)?;
                return Ok(Err(Fault::Malformed));
            }
        };
        self.cursor.enter()?;
        let mut outcome = lists.block(len);
        let mut read = 0;
        while outcome.is_ok() && read < len {
            let key = self.key()?;
            outcome = lists.key(key);
            read += 1;
        }
        self.cursor.skip(len - read)?;
        self.cursor.leave();
        Ok(outcome)
    }

    fn key(&mut self) -> Result<Option<KeyRef<'a>>, Broken> {
        let head = self.cursor.head()?;
        let len = match head {
            Head::Scalar(value) => return Ok(KeyRef::bare(value)),
            Head::List(len) => len,
            Head::Map(_) => {
                self.cursor.skip_contents(&head)?;
                return Ok(None);
            }
        };
        self.cursor.enter()?;
        let mut parts = [Scalar::Other; KeyRef::MAX_PARTS];
        let mut read = 0;
        for place in parts.iter_mut().take(len) {
            *place = self.cursor.scalar()?;
            read += 1;
        }
        self.cursor.skip(len - read)?;
        self.cursor.leave();
        Ok(if read == len { KeyRef::compound(&parts[..len]) } else { None })
    }
}

/// What [`TOKEN_WIDTH`] says of a marker that begins no unsigned number of up to 32 bits.
const NO_TOKEN: u8 = u8::MAX;

/// The bytes that follow a marker which begins a token.
const TOKEN_WIDTH: [u8; 256] = {
    let mut widths = [NO_TOKEN; 256];
    let mut fixed = 0;
    while fixed < 0x80 {
        widths[fixed] = 0;
        fixed += 1;
    }
    widths[0xcc] = 1;
    widths[0xcd] = 2;
    widths[0xce] = 4;
    widths
};

/// The msgpack breaks off, holds the byte that means nothing, or nests too deep.
struct Broken;

impl From<Broken> for DecodeError {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

/// How a value begins. Everything but a list's or map's contents has been read.
enum Head<'a> {
    Scalar(Scalar<'a>),
    /// Elements that follow.
    List(usize),
    /// Pairs that follow.
    Map(usize),
}

/// A position in msgpack bytes.
struct Cursor<'a> {
    rest: &'a [u8],
    /// Containers that the position is in.
    depth: usize,
}

impl<'a> Cursor<'a> {
    fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload, depth: 0 }
    }

    /// Goes into a container whose head was read.
    fn enter(&mut self) -> Result<(), Broken> {
        self.depth += 1;
        if self.depth < MAX_DEPTH { Ok(()) } else { Err(Broken) }
    }

    /// Leaves a container whose contents were read.
    fn leave(&mut self) {
        self.depth -= 1;
    }

    /// How many of `len` declared elements can be there: each takes a byte at least.
    fn believable(&self, len: usize) -> usize {
        len.min(self.rest.len())
    }

    #[inline]
    fn byte(&mut self) -> Result<u8, Broken> {
        let (&byte, rest) = self.rest.split_first().ok_or(Broken)?;
        self.rest = rest;
        Ok(byte)
    }

    #[inline]
    fn take(&mut self, len: usize) -> Result<&'a [u8], Broken> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(Broken)?;
        self.rest = rest;
        Ok(taken)
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Broken)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn len8(&mut self) -> Result<usize, Broken> {
        self.byte().map(usize::from)
    }

    fn len16(&mut self) -> Result<usize, Broken> {
        self.array().map(|bytes| usize::from(u16::from_be_bytes(bytes)))
    }

    fn len32(&mut self) -> Result<usize, Broken> {
        // A length that no address space holds is longer than what is left.
        self.array().and_then(|bytes| usize::try_from(u32::from_be_bytes(bytes)).map_err(|_| Broken))
    }

    #[inline]
    fn head(&mut self) -> Result<Head<'a>, Broken> {
        Ok(Head::Scalar(match self.byte()? {
            byte @ 0x00..=0x7f => Scalar::UInt(u64::from(byte)),
            byte @ 0x80..=0x8f => return Ok(Head::Map(usize::from(byte & 0x0f))),
            byte @ 0x90..=0x9f => return Ok(Head::List(usize::from(byte & 0x0f))),
            byte @ 0xa0..=0xbf => Scalar::text_or_bytes(self.take(usize::from(byte & 0x1f))?),
            0xc0 => Scalar::Nil,
            0xc1 => return Err(Broken),
            0xc2 | 0xc3 => Scalar::Other,
            0xc4 => Scalar::Bytes(self.len8().and_then(|len| self.take(len))?),
            0xc5 => Scalar::Bytes(self.len16().and_then(|len| self.take(len))?),
            0xc6 => Scalar::Bytes(self.len32().and_then(|len| self.take(len))?),
            0xc7 => self.len8().and_then(|len| self.extension(len))?,
            0xc8 => self.len16().and_then(|len| self.extension(len))?,
            0xc9 => self.len32().and_then(|len| self.extension(len))?,
            0xca => Scalar::Float(f64::from(f32::from_be_bytes(self.array()?))),
            0xcb => Scalar::Float(f64::from_be_bytes(self.array()?)),
            0xcc => Scalar::UInt(u64::from(self.byte()?)),
            0xcd => Scalar::UInt(u64::from(u16::from_be_bytes(self.array()?))),
            0xce => Scalar::UInt(u64::from(u32::from_be_bytes(self.array()?))),
            0xcf => Scalar::UInt(u64::from_be_bytes(self.array()?)),
            0xd0 => Scalar::Int(i64::from(i8::from_be_bytes(self.array()?))),
            0xd1 => Scalar::Int(i64::from(i16::from_be_bytes(self.array()?))),
            0xd2 => Scalar::Int(i64::from(i32::from_be_bytes(self.array()?))),
            0xd3 => Scalar::Int(i64::from_be_bytes(self.array()?)),
            byte @ 0xd4..=0xd8 => self.extension(1 << (byte - 0xd4))?,
            0xd9 => Scalar::text_or_bytes(self.len8().and_then(|len| self.take(len))?),
            0xda => Scalar::text_or_bytes(self.len16().and_then(|len| self.take(len))?),
            0xdb => Scalar::text_or_bytes(self.len32().and_then(|len| self.take(len))?),
            0xdc => return self.len16().map(Head::List),
            0xdd => return self.len32().map(Head::List),
            0xde => return self.len16().map(Head::Map),
            0xdf => return self.len32().map(Head::Map),
            byte @ 0xe0..=0xff => Scalar::Int(i64::from(byte.cast_signed())),
        }))
    }

    /// Reads past an extension of `len` bytes behind its type. It counts as a container.
    fn extension(&mut self, len: usize) -> Result<Scalar<'a>, Broken> {
        self.enter()?;
        self.byte()?;
        self.take(len)?;
        self.leave();
        Ok(Scalar::Other)
    }

    /// Reads one value; of a list or map that it is one.
    #[inline]
    fn scalar(&mut self) -> Result<Scalar<'a>, Broken> {
        match self.head()? {
            Head::Scalar(value) => Ok(value),
            head => {
                self.skip_contents(&head)?;
                Ok(Scalar::Other)
            }
        }
    }

    /// Reads one value that should be a hash.
    #[inline]
    fn hash(&mut self) -> Result<Option<BlockHash>, Broken> {
        match *self.rest {
            [0xcf | 0xd3, a, b, c, d, e, f, g, h, ref rest @ ..] => {
                self.rest = rest;
                Ok(Some(BlockHash::Int(u64::from_be_bytes([a, b, c, d, e, f, g, h]))))
            }
            _ => self.scalar().map(Scalar::hash),
        }
    }

    /// Reads one value that should be a token.
    ///
    /// Widths follow no pattern in real prompts, so a branch on them is guessed wrongly every other time.
    /// Where four bytes can be read behind the marker the width is looked up instead.
    #[inline]
    fn token(&mut self) -> Result<Option<u32>, Broken> {
        if let [marker, a, b, c, d, ..] = *self.rest {
            let width = TOKEN_WIDTH[usize::from(marker)];
            if width != NO_TOKEN {
                let (wide, width) = (u64::from(u32::from_be_bytes([a, b, c, d])), usize::from(width));
                let narrow = if marker < 0x80 { u32::from(marker) } else { 0 };
                self.rest = &self.rest[1 + width..];
                return Ok(Some((wide >> (32 - 8 * width)) as u32 | narrow));
            }
        }
        self.scalar().map(Scalar::token)
    }

    /// Reads one value that should be a list of two tokens.
    fn pair(&mut self) -> Result<Option<(u32, u32)>, Broken> {
        let head = self.head()?;
        let Head::List(2) = head else {
            self.skip_contents(&head)?;
            return Ok(None);
        };
        self.enter()?;
        let (first, second) = (self.token()?, self.token()?);
        self.leave();
        Ok(first.zip(second))
    }

    /// Reads one map key; `None` if it is no string. Keys are compared as bytes: one that is not UTF-8
    /// equals no name.
    fn key(&mut self) -> Result<Option<&'a [u8]>, Broken> {
        match *self.rest {
            [byte @ 0xa0..=0xbf, ref rest @ ..] => {
                self.rest = rest;
                self.take(usize::from(byte & 0x1f)).map(Some)
            }
            _ => match self.scalar()? {
                Scalar::Text(text) => Ok(Some(text.as_bytes())),
                _ => Ok(None),
            },
        }
    }

    /// Reads past the contents of the container that begins with `head`.
    fn skip_contents(&mut self, head: &Head<'a>) -> Result<(), Broken> {
        let values = match *head {
            Head::Scalar(_) => return Ok(()),
            Head::List(len) => len,
            // Twice 2^32 may not fit where `usize` has 32 bits, but then it is not there either.
            Head::Map(entries) => entries.saturating_mul(2),
        };
        self.enter()?;
        self.skip(values)?;
        self.leave();
        Ok(())
    }

    /// Reads past `values` values, whatever they hold, without recursion.
    fn skip(&mut self, values: usize) -> Result<(), Broken> {
        let mut open = [0_usize; MAX_DEPTH];
        let outermost = self.depth;
        open[outermost] = values;
        loop {
            while open[self.depth] == 0 {
                if self.depth == outermost {
                    return Ok(());
                }
                self.leave();
            }
            // Each value takes a byte at least: what was declared beyond that need not be looked for.
            if open[self.depth] > self.rest.len() {
                return Err(Broken);
            }
            open[self.depth] -= 1;
            if let Some(values) = self.skip_head()? {
                self.enter()?;
                open[self.depth] = values;
            }
        }
    }

    /// Reads past a value's head; of a container it says how many values follow.
    fn skip_head(&mut self) -> Result<Option<usize>, Broken> {
        let len = match self.byte()? {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => return Ok(None),
            byte @ 0x80..=0x8f => return Ok(Some(usize::from(byte & 0x0f) * 2)),
            byte @ 0x90..=0x9f => return Ok(Some(usize::from(byte & 0x0f))),
            byte @ 0xa0..=0xbf => usize::from(byte & 0x1f),
            0xc1 => return Err(Broken),
            0xc4 | 0xd9 => self.len8()?,
            0xc5 | 0xda => self.len16()?,
            0xc6 | 0xdb => self.len32()?,
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xdc => return self.len16().map(Some),
            0xdd => return self.len32().map(Some),
            0xde => return self.len16().map(|entries| Some(entries * 2)),
            0xdf => return self.len32().map(|entries| Some(entries.saturating_mul(2))),
            0xc7 => return self.len8().and_then(|len| self.extension(len)).map(|_| None),
            0xc8 => return self.len16().and_then(|len| self.extension(len)).map(|_| None),
            0xc9 => return self.len32().and_then(|len| self.extension(len)).map(|_| None),
            byte @ 0xd4..=0xd8 => return self.extension(1 << (byte - 0xd4)).map(|_| None),
        };
        self.take(len).map(|_| None)
    }
}

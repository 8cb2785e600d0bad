//! The decoder of record: serde visitors over `rmp-serde`.
//!
//! Written to be read, not to be fast. The hot path is [`decode_batch_fast`](super::decode_batch_fast),
//! which must give the same answer for every payload; property tests and a fuzz target compare the two.
//!
//! Nothing but broken msgpack is an error to the visitors: a value of the wrong shape is read past to its
//! end and becomes a [`Reason`], so that one bad event leaves the reader at the start of the next.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::events::event::{EventBatch, EventTokens, ExtraKey, KvEvent};
use crate::events::layout::{BatchField, Field, Fields, Tag};
use crate::events::limits::{DecodeError, Limits, MAX_DEPTH};
use crate::events::lists::{BadTokens, Fault, KeyLists, KeyRef, LookaheadLists, Names, PairChain, Read};
use crate::events::scalar::Scalar;
use crate::trust::{Reason, ReasonCounts};

/// Lists grow as their elements are read; what they declare is believed up to this many.
const TRUSTED_CAPACITY: usize = 1024;

/// Decodes one batch: an array or a map that holds events, each of them an array or a map.
///
/// An event that cannot be used is counted in [`EventBatch::skipped`] and left out; the others stand.
///
/// # Errors
///
/// [`DecodeError`] when the batch as a whole cannot be read or exceeds `limits`.
///
/// # Cost
///
/// Linear in the payload. Memory is bounded by `limits`, never by what the payload declares.
pub fn decode_batch(payload: &[u8], limits: &Limits) -> Result<EventBatch, DecodeError> {
    if payload.len() > limits.payload_bytes {
        return Err(DecodeError::PayloadTooLarge { bytes: payload.len(), limit: limits.payload_bytes });
    }
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(payload);
    deserializer.set_max_depth(MAX_DEPTH);
    let refused = Cell::new(None);
    let batch = As(Batch { limits, refused: &refused })
        .deserialize(&mut deserializer)
        .map_err(|_| refused.take().unwrap_or(DecodeError::Broken))?;
    // `rmp-serde` stops after the first value.
    if AnotherValue.deserialize(&mut deserializer).is_ok() {
        return Err(DecodeError::TrailingBytes);
    }
    batch
}

/// Succeeds if at least one more byte follows, without looking at what it begins.
struct AnotherValue;

impl<'de> DeserializeSeed<'de> for AnotherValue {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for AnotherValue {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another value")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, _: D) -> Result<(), D::Error> {
        Ok(())
    }
}

/// What is made of one value. Whatever it is, it is read to its end.
trait Shape<'de>: Sized {
    type Out;

    /// Not an array or map, or one that this shape does not look into.
    fn scalar(self, value: Scalar<'de>) -> Self::Out;

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        drain_list(&mut list)?;
        Ok(self.scalar(Scalar::Other))
    }

    fn map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Out, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(self.scalar(Scalar::Other))
    }
}

fn drain_list<'de, A: SeqAccess<'de>>(list: &mut A) -> Result<(), A::Error> {
    while list.next_element::<IgnoredAny>()?.is_some() {}
    Ok(())
}

/// Reads any value as the shape inside.
struct As<S>(S);

impl<'de, S: Shape<'de>> DeserializeSeed<'de> for As<S> {
    type Value = S::Out;

    /// Always by `deserialize_any`: the typed calls of `rmp-serde` convert (bytes to lists of integers,
    /// one-element maps to enums) where we want to see what was sent.
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Out, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: Shape<'de>> Visitor<'de> for As<S> {
    type Value = S::Out;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::Nil))
    }

    fn visit_bool<E>(self, _: bool) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::Other))
    }

    fn visit_u64<E>(self, value: u64) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::UInt(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::Int(value)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::Float(value)))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::Text(text)))
    }

    /// Also called for a `str` that is not UTF-8.
    fn visit_borrowed_bytes<E>(self, bytes: &'de [u8]) -> Result<S::Out, E> {
        Ok(self.0.scalar(Scalar::Bytes(bytes)))
    }

    /// An extension.
    fn visit_newtype_struct<D: Deserializer<'de>>(self, extension: D) -> Result<S::Out, D::Error> {
        extension.deserialize_any(IgnoredAny)?;
        Ok(self.0.scalar(Scalar::Other))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<S::Out, A::Error> {
        self.0.list(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<S::Out, A::Error> {
        self.0.map(map)
    }
}

/// A value that is not looked into.
struct Plain;

impl<'de> Shape<'de> for Plain {
    type Out = Scalar<'de>;

    fn scalar(self, value: Scalar<'de>) -> Scalar<'de> {
        value
    }
}

struct Batch<'l> {
    limits: &'l Limits,
    /// Why reading was stopped although the msgpack is sound.
    refused: &'l Cell<Option<DecodeError>>,
}

/// The batch as far as it has been read; `events` is `None` while there is no list of them.
#[derive(Default)]
struct Parts {
    ts: Option<f64>,
    dp_rank: Option<i64>,
    events: Option<(Vec<KvEvent>, ReasonCounts)>,
}

impl Parts {
    fn finish(self) -> Result<EventBatch, DecodeError> {
        let (events, skipped) = self.events.ok_or(DecodeError::NoEvents)?;
        Ok(EventBatch { ts: self.ts, dp_rank: self.dp_rank, events, skipped })
    }
}

impl<'de> Shape<'de> for Batch<'_> {
    type Out = Result<EventBatch, DecodeError>;

    fn scalar(self, _: Scalar<'de>) -> Self::Out {
        Err(DecodeError::NotABatch)
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let mut parts = Parts::default();
        for field in BatchField::POSITIONS {
            let value = BatchValue { field, parts: &mut parts, batch: &self };
            if list.next_element_seed(value)?.is_none() {
                return Ok(parts.finish());
            }
        }
        drain_list(&mut list)?;
        Ok(parts.finish())
    }

    fn map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Out, A::Error> {
        let mut parts = Parts::default();
        while let Some(key) = map.next_key_seed(As(Plain))? {
            match named(key, BatchField::from_key) {
                Some(field) => {
                    map.next_value_seed(BatchValue { field, parts: &mut parts, batch: &self })?;
                }
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(parts.finish())
    }
}

fn named<T>(key: Scalar<'_>, from_key: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
    match key {
        Scalar::Text(key) => from_key(key.as_bytes()),
        _ => None,
    }
}

/// The value of a known field of the batch.
struct BatchValue<'b, 'l> {
    field: BatchField,
    parts: &'b mut Parts,
    batch: &'b Batch<'l>,
}

impl<'de> DeserializeSeed<'de> for BatchValue<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.field {
            BatchField::Time => self.parts.ts = As(Plain).deserialize(deserializer)?.time(),
            BatchField::Rank => self.parts.dp_rank = As(Plain).deserialize(deserializer)?.rank(),
            BatchField::Events => self.parts.events = As(Events(self.batch)).deserialize(deserializer)?,
        }
        Ok(())
    }
}

struct Events<'b, 'l>(&'b Batch<'l>);

impl<'de> Shape<'de> for Events<'_, '_> {
    type Out = Option<(Vec<KvEvent>, ReasonCounts)>;

    fn scalar(self, _: Scalar<'de>) -> Self::Out {
        None
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let limits = self.0.limits;
        let declared = declared(&list);
        if declared > limits.events {
            self.0.refused.set(Some(DecodeError::TooManyEvents { events: declared, limit: limits.events }));
            return Err(A::Error::custom("too many events"));
        }
        let mut events = Vec::with_capacity(declared.min(TRUSTED_CAPACITY));
        let mut skipped = ReasonCounts::default();
        let mut names = limits.names;
        while let Some(fields) = list.next_element_seed(As(Event { limits, lifetime: PhantomData }))? {
            match fields {
                Ok(mut fields) => events.extend(fields.finish(&mut names, limits, &mut skipped)),
                Err(reason) => skipped.add(reason, 1),
            }
        }
        Ok(Some((events, skipped)))
    }
}

/// How long a list says it is. `rmp-serde` knows; the answer for another reader would only be less strict.
fn declared<'de, A: SeqAccess<'de>>(list: &A) -> usize {
    list.size_hint().unwrap_or(0)
}

struct Event<'l, 'de> {
    limits: &'l Limits,
    lifetime: PhantomData<&'de ()>,
}

impl<'de> Shape<'de> for Event<'_, 'de> {
    type Out = Result<Fields<'de>, Reason>;

    fn scalar(self, _: Scalar<'de>) -> Self::Out {
        Err(Reason::MalformedEvent)
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let Some(tag) = list.next_element_seed(As(Plain))? else {
            return Ok(Err(Reason::MalformedEvent));
        };
        let tag = match Tag::read(tag) {
            Ok(tag) => tag,
            Err(reason) => {
                drain_list(&mut list)?;
                return Ok(Err(reason));
            }
        };
        let mut fields = Fields::of(tag);
        for &field in tag.positions() {
            let value = FieldValue { field, fields: &mut fields, limits: self.limits };
            if list.next_element_seed(value)?.is_none() {
                return Ok(Ok(fields));
            }
        }
        drain_list(&mut list)?;
        Ok(Ok(fields))
    }

    fn map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Out, A::Error> {
        let mut fields = Fields::default();
        while let Some(key) = map.next_key_seed(As(Plain))? {
            match named(key, Field::from_key) {
                Some(field) => {
                    map.next_value_seed(FieldValue { field, fields: &mut fields, limits: self.limits })?;
                }
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Ok(fields))
    }
}

/// The value of a known field of an event.
struct FieldValue<'f, 'l, 'de> {
    field: Field,
    fields: &'f mut Fields<'de>,
    limits: &'l Limits,
}

impl<'de> DeserializeSeed<'de> for FieldValue<'_, '_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(As(self))
    }
}

impl<'de> Shape<'de> for FieldValue<'_, '_, 'de> {
    type Out = ();

    fn scalar(self, value: Scalar<'de>) {
        self.fields.set(self.field, value, self.limits);
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        match self.field {
            Field::BlockHashes => self.fields.hashes = hashes(&mut list, self.limits)?,
            Field::TokenIds => self.fields.tokens = tokens(&mut list, self.limits)?,
            Field::ExtraKeys | Field::ByType => {
                self.fields.extra_keys = extra_keys(&mut list, self.limits)?;
            }
            Field::Lookahead => self.fields.lookahead = lookahead(&mut list, self.limits)?,
            _ => self.fields.set(self.field, Scalar::Other, self.limits),
        }
        drain_list(&mut list)
    }

    fn map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { field, fields, limits } = self;
        while let Some(key) = map.next_key_seed(As(Plain))? {
            match named(key, Field::more_from_key).filter(|_| field == Field::ByType) {
                Some(field) => map.next_value_seed(FieldValue { field, fields: &mut *fields, limits })?,
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        if field != Field::ByType {
            fields.set(field, Scalar::Other, limits);
        }
        Ok(())
    }
}

fn hashes<'de, A: SeqAccess<'de>>(list: &mut A, limits: &Limits) -> Result<Read<Names>, A::Error> {
    let declared = declared(list);
    if declared > limits.hashes {
        return Ok(Err(Fault::TooLong));
    }
    let mut names = Names::in_buffer(Vec::with_capacity(declared.min(TRUSTED_CAPACITY)));
    while let Some(value) = list.next_element_seed(As(Plain))? {
        names.push(value.hash());
    }
    Ok(Ok(Some(names)))
}

/// A token, or a pair of them.
enum Element {
    Token(Option<u32>),
    Pair(Option<(u32, u32)>),
}

impl<'de> Shape<'de> for TokenOrPair {
    type Out = Element;

    fn scalar(self, value: Scalar<'de>) -> Element {
        Element::Token(value.token())
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
        let first = list.next_element_seed(As(Plain))?.and_then(Scalar::token);
        let second = list.next_element_seed(As(Plain))?.and_then(Scalar::token);
        let more = list.next_element::<IgnoredAny>()?.is_some();
        drain_list(&mut list)?;
        Ok(Element::Pair(first.zip(second).filter(|_| !more)))
    }
}

struct TokenOrPair;

/// Reads up to the first element that is not what the first one was: a token, or a pair of them.
fn tokens<'de, A: SeqAccess<'de>>(list: &mut A, limits: &Limits) -> Result<Read<EventTokens>, A::Error> {
    let declared = declared(list);
    if declared > limits.tokens {
        return Ok(Err(Fault::TooLong));
    }
    let mut next = list.next_element_seed(As(TokenOrPair))?;
    let buffer = Vec::with_capacity(declared.min(TRUSTED_CAPACITY));
    if let Some(Element::Pair(_)) = next {
        let mut pairs = PairChain::in_buffer(buffer);
        while let Some(element) = next {
            let pair = match element {
                Element::Pair(pair) => pair,
                Element::Token(_) => None,
            };
            if let Err(bad) = pairs.push(pair) {
                return Ok(bad.into());
            }
            next = list.next_element_seed(As(TokenOrPair))?;
        }
        return Ok(Ok(Some(pairs.finish())));
    }
    let mut tokens = buffer;
    while let Some(element) = next {
        match element {
            Element::Token(Some(token)) => tokens.push(token),
            Element::Token(None) | Element::Pair(_) => return Ok(BadTokens::Unusable.into()),
        }
        next = list.next_element_seed(As(TokenOrPair))?;
    }
    Ok(Ok(Some(EventTokens::Ids(tokens))))
}

/// Reads up to the first element that spoils the event.
fn lookahead<'de, A: SeqAccess<'de>>(list: &mut A, limits: &Limits) -> Result<Read<Vec<Vec<u32>>>, A::Error> {
    let mut lists = match LookaheadLists::new(declared(list), limits) {
        Ok(lists) => lists,
        Err(fault) => return Ok(Err(fault)),
    };
    while let Some(outcome) = list.next_element_seed(As(BlockLookahead(&mut lists)))? {
        if let Err(fault) = outcome {
            return Ok(Err(fault));
        }
    }
    Ok(Ok(Some(lists.finish())))
}

/// The tokens behind one block: nil, a token or a list.
struct BlockLookahead<'k, 'l>(&'k mut LookaheadLists<'l>);

impl<'de> Shape<'de> for BlockLookahead<'_, '_> {
    type Out = Result<(), Fault>;

    fn scalar(self, value: Scalar<'de>) -> Self::Out {
        self.0.bare(value)
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let mut outcome = self.0.block(declared(&list));
        while outcome.is_ok() {
            let Some(token) = list.next_element_seed(As(Plain))? else { break };
            outcome = self.0.token(token.token());
        }
        drain_list(&mut list)?;
        Ok(outcome)
    }
}

/// Reads up to the first element that spoils the event.
fn extra_keys<'de, A: SeqAccess<'de>>(
    list: &mut A,
    limits: &Limits,
) -> Result<Read<Vec<Vec<ExtraKey>>>, A::Error> {
    let mut lists = match KeyLists::new(declared(list), limits) {
        Ok(lists) => lists,
        Err(fault) => return Ok(Err(fault)),
    };
    while let Some(outcome) = list.next_element_seed(As(BlockKeys(&mut lists)))? {
        if let Err(fault) = outcome {
            return Ok(Err(fault));
        }
    }
    Ok(Ok(Some(lists.finish())))
}

/// The keys of one block: nil or a list.
struct BlockKeys<'k, 'l>(&'k mut KeyLists<'l>);

impl<'de> Shape<'de> for BlockKeys<'_, '_> {
    type Out = Result<(), Fault>;

    fn scalar(self, value: Scalar<'de>) -> Self::Out {
        match value {
            Scalar::Nil => self.0.block(0),
            _ => Err(Fault::Malformed),
        }
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let mut outcome = self.0.block(declared(&list));
        while outcome.is_ok() {
            let Some(key) = list.next_element_seed(As(Key))? else { break };
            outcome = self.0.key(key);
        }
        drain_list(&mut list)?;
        Ok(outcome)
    }
}

struct Key;

impl<'de> Shape<'de> for Key {
    type Out = Option<KeyRef<'de>>;

    fn scalar(self, value: Scalar<'de>) -> Self::Out {
        KeyRef::bare(value)
    }

    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let mut parts = [Scalar::Other; KeyRef::MAX_PARTS];
        let mut len = 0;
        while let Some(part) = list.next_element_seed(As(Plain))? {
            let Some(place) = parts.get_mut(len) else {
                drain_list(&mut list)?;
                return Ok(None);
            };
            *place = part;
            len += 1;
        }
        Ok(KeyRef::compound(&parts[..len]))
    }
}

//! LoadStat: the message that an SGLang scheduler publishes about itself (v0.5.19 and later).

use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::report::{LoadEntry, RawNumber, RawRankLoad};
use crate::ids::DpRank;

/// Topic of the load messages, and what else may be published beside them is told by it.
pub const LOAD_STAT_TOPIC: &str = "load";

/// Longest payload that is read. A message has some 40 bytes; later versions may append fields.
const MAX_BYTES: usize = 4096;

/// Deepest nesting that is read, in fields that are skipped.
const MAX_DEPTH: usize = 16;

/// One message as received: its numbers have not been checked.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LoadStat {
    /// Requests running and waiting, tokens in the KV cache and tokens that it holds.
    pub load: RawRankLoad,
    /// The rank that the payload names; the connection decides whose load it is.
    pub attn_dp_rank: Option<u64>,
}

/// Why a payload is no load message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadStatError {
    /// Longer than any load message.
    #[error("{0} bytes are too many for a load message")]
    TooLong(usize),
    /// No msgpack, cut short, or no list of six that begins with `LoadStat`.
    #[error("no load message")]
    Malformed,
    /// Another kind of message.
    #[error("a message of another kind")]
    OtherKind,
}

impl LoadStat {
    /// Reads a payload.
    ///
    /// # Errors
    /// What is no load message. A number in it that cannot be is no error here: it spoils its own entry when
    /// the table looks at it.
    pub fn decode(payload: &[u8]) -> Result<Self, LoadStatError> {
        if payload.len() > MAX_BYTES {
            return Err(LoadStatError::TooLong(payload.len()));
        }
        let mut from = rmp_serde::Deserializer::from_read_ref(payload);
        from.set_max_depth(MAX_DEPTH);
        match Wire::deserialize(&mut from) {
            Ok(Wire(Some(stat))) => Ok(stat),
            Ok(Wire(None)) => Err(LoadStatError::OtherKind),
            Err(_) => Err(LoadStatError::Malformed),
        }
    }

    /// The message as an entry for the rank at whose endpoint it was heard.
    pub fn entry(&self, rank: DpRank) -> LoadEntry {
        LoadEntry::new(rank.0, self.load)
    }
}

/// What a list says; `None` for a message of another kind.
struct Wire(Option<LoadStat>);

impl<'de> Deserialize<'de> for Wire {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_seq(Fields)
    }
}

struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Wire;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list that begins with LoadStat")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<Wire, A::Error> {
        let missing = |at: usize| serde::de::Error::invalid_length(at, &"six fields");
        let kind: &str = fields.next_element()?.ok_or_else(|| missing(0))?;
        let is_stat = kind == "LoadStat";
        let mut numbers = [RawNumber::Absent; 5];
        if is_stat {
            for (at, number) in numbers.iter_mut().enumerate() {
                *number = fields.next_element::<Number>()?.ok_or_else(|| missing(at + 1))?.0;
            }
        }
        // What a later version appends is none of our business.
        while fields.next_element::<IgnoredAny>()?.is_some() {}
        let [num_running_reqs, num_waiting_reqs, num_used_tokens, max_total_num_tokens, rank] = numbers;
        let attn_dp_rank = match rank {
            RawNumber::Value(rank) if rank >= 0.0 && rank.fract() == 0.0 => Some(rank as u64),
            _ => None,
        };
        let load = RawRankLoad {
            num_running_reqs,
            num_waiting_reqs,
            num_used_tokens,
            max_total_num_tokens,
            ..RawRankLoad::default()
        };
        Ok(Wire(is_stat.then_some(LoadStat { load, attn_dp_rank })))
    }
}

/// Whatever stands where a number should.
struct Number(RawNumber);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AnyNumber)
    }
}

struct AnyNumber;

impl<'de> Visitor<'de> for AnyNumber {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
        Ok(Number(RawNumber::Value(value as f64)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Number, E> {
        Ok(Number(RawNumber::Value(value as f64)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Number, E> {
        Ok(Number(RawNumber::Value(value)))
    }

    fn visit_unit<E>(self) -> Result<Number, E> {
        Ok(Number(RawNumber::Absent))
    }

    fn visit_none<E>(self) -> Result<Number, E> {
        Ok(Number(RawNumber::Absent))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Number, E> {
        Ok(Number(RawNumber::Unreadable))
    }

    fn visit_str<E>(self, _: &str) -> Result<Number, E> {
        Ok(Number(RawNumber::Unreadable))
    }

    fn visit_bytes<E>(self, _: &[u8]) -> Result<Number, E> {
        Ok(Number(RawNumber::Unreadable))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Number, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Number(RawNumber::Unreadable))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Number, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Number(RawNumber::Unreadable))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::load::Refused;

    fn pack(value: serde_json::Value) -> Vec<u8> {
        rmp_serde::to_vec(&value).unwrap()
    }

    proptest::proptest! {
        #[test]
        fn no_payload_is_fatal(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..64)) {
            let _ = LoadStat::decode(&bytes);
            let mut begins_well = b"\x96\xa8LoadStat".to_vec();
            begins_well.extend(bytes);
            let _ = LoadStat::decode(&begins_well);
        }
    }

    /// L5: running, waiting, tokens and the profiled size, in the order of the wire.
    #[test]
    fn a_message_is_read() {
        let stat = LoadStat::decode(&pack(serde_json::json!(["LoadStat", 3, 2, 640, 8192, 1]))).unwrap();
        let (load, _) = stat.load.check().unwrap();
        assert_eq!((load.num_running_reqs, load.num_waiting_reqs), (Some(3), Some(2)));
        assert_eq!((load.num_used_tokens, load.max_total_num_tokens), (Some(640), Some(8192)));
        assert_eq!(stat.attn_dp_rank, Some(1));
        let later = pack(serde_json::json!(["LoadStat", 0, 0, 0, 8192, null, {"a": [1]}, "x"]));
        let stat = LoadStat::decode(&later).unwrap();
        assert_eq!((stat.attn_dp_rank, stat.entry(DpRank(5)).dp_rank), (None, Some(5)));
        assert_eq!(stat.load.check().unwrap().0.num_running_reqs, Some(0));
    }

    /// L4: a number that cannot be spoils its message, and null is unknown.
    #[test]
    fn numbers_that_cannot_be_are_refused_by_the_check() {
        let refused = |value| {
            let stat = LoadStat::decode(&pack(serde_json::json!(["LoadStat", value, 0, 0, 1, 0]))).unwrap();
            stat.load.check().unwrap_err()
        };
        assert_eq!(refused(serde_json::json!(-1)), Refused::Negative);
        assert_eq!(refused(serde_json::json!(1e300)), Refused::TooLarge);
        for other in [serde_json::json!("1"), serde_json::json!([1]), serde_json::json!({}), true.into()] {
            assert_eq!(refused(other), Refused::NotANumber);
        }
        let unknown = LoadStat::decode(&pack(serde_json::json!(["LoadStat", null, 0, 0, 1, 0]))).unwrap();
        assert_eq!(unknown.load.check().unwrap().0.num_running_reqs, None);
    }

    #[test]
    fn what_is_no_load_message_is_told() {
        let whole = pack(serde_json::json!(["LoadStat", 3, 2, 640, 8192, 1]));
        for end in 0..whole.len() {
            assert_eq!(LoadStat::decode(&whole[..end]), Err(LoadStatError::Malformed), "{end}");
        }
        assert_eq!(
            LoadStat::decode(&pack(serde_json::json!(["LoadStat", 1]))),
            Err(LoadStatError::Malformed)
        );
        assert_eq!(LoadStat::decode(&pack(serde_json::json!({}))), Err(LoadStatError::Malformed));
        assert_eq!(LoadStat::decode(&pack(serde_json::json!(["Other", 1]))), Err(LoadStatError::OtherKind));
        assert_eq!(LoadStat::decode(&[0; 4097]), Err(LoadStatError::TooLong(4097)));
        // A list of 2^32 - 1 elements that never come; nesting without an end.
        assert_eq!(LoadStat::decode(&[0xdd, 255, 255, 255, 255]), Err(LoadStatError::Malformed));
        assert_eq!(LoadStat::decode(&[0x91; 4096]), Err(LoadStatError::Malformed));
    }
}

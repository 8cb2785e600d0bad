//! Reading a case: every field of every step is known, or the case is not runnable.

use std::collections::BTreeMap;

use rankwise::ids::{DpRank, RankKey};
use serde_json::{Map, Value};

/// Why a case ends early.
#[derive(Debug)]
pub enum Stop {
    /// The product, or the case file itself, is wrong.
    Fail(String),
    /// The case asks for something that is not there to be asked.
    NotRunnable(String),
}

pub type Run<T = ()> = Result<T, Stop>;

pub fn fail<T>(why: impl Into<String>) -> Run<T> {
    Err(Stop::Fail(why.into()))
}

pub fn not_runnable<T>(what: impl Into<String>) -> Run<T> {
    Err(Stop::NotRunnable(what.into()))
}

/// Fields that say something to readers only.
const FOR_READERS: [&str; 4] = ["op", "decoded", "note", "comment"];

/// An object of a case.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    what: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// `value` as an object, called `what` in complaints.
    pub fn of(what: &'a str, value: &'a Value) -> Run<Self> {
        match value.as_object() {
            Some(map) => Ok(Self { what, map }),
            None => fail(format!("{what} is no object: {value}")),
        }
    }

    /// The same, with no other fields than `known`.
    pub fn only(what: &'a str, value: &'a Value, known: &[&str]) -> Run<Self> {
        let this = Self::of(what, value)?;
        match this
            .map
            .keys()
            .find(|key| !known.contains(&key.as_str()) && !FOR_READERS.contains(&key.as_str()))
        {
            Some(key) => not_runnable(format!("{what} with {key}")),
            None => Ok(this),
        }
    }

    pub fn keys(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.map.keys().map(String::as_str)
    }

    pub fn entries(&self) -> impl Iterator<Item = (&'a str, &'a Value)> + use<'a> {
        self.map.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// A field that may be missing or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn need(&self, key: &str) -> Run<&'a Value> {
        match self.get(key) {
            Some(value) => Ok(value),
            None => fail(format!("{} has no `{key}`", self.what)),
        }
    }

    pub fn text(&self, key: &str) -> Run<Option<&'a str>> {
        self.get(key).map(|value| text(key, value)).transpose()
    }

    pub fn need_text(&self, key: &str) -> Run<&'a str> {
        text(key, self.need(key)?)
    }

    pub fn list(&self, key: &str) -> Run<&'a [Value]> {
        list(key, self.need(key)?)
    }

    pub fn object(&self, key: &'a str) -> Run<Option<Self>> {
        self.get(key).map(|value| Self::of(key, value)).transpose()
    }

    pub fn count(&self, key: &str) -> Run<Option<u64>> {
        self.get(key).map(|value| count(key, value)).transpose()
    }

    pub fn need_count(&self, key: &str) -> Run<u64> {
        count(key, self.need(key)?)
    }

    pub fn number(&self, key: &str) -> Run<Option<f64>> {
        self.get(key).map(|value| number(key, value)).transpose()
    }

    pub fn flag(&self, key: &str) -> Run<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_bool() {
            Some(flag) => Ok(Some(flag)),
            None => fail(format!("`{key}` is neither true nor false: {value}")),
        }
    }

    /// The rank that the fields `worker` and `dp_rank` name.
    pub fn rank(&self) -> Run<RankKey> {
        Ok(RankKey::new(self.need_text("worker")?, rank_number("dp_rank", self.need("dp_rank")?)?.0))
    }
}

pub fn text<'a>(what: &str, value: &'a Value) -> Run<&'a str> {
    value.as_str().map_or_else(|| fail(format!("`{what}` is no text: {value}")), Ok)
}

pub fn list<'a>(what: &str, value: &'a Value) -> Run<&'a [Value]> {
    match value {
        Value::Array(list) => Ok(list),
        other => fail(format!("`{what}` is no list: {other}")),
    }
}

pub fn number(what: &str, value: &Value) -> Run<f64> {
    value.as_f64().map_or_else(|| fail(format!("`{what}` is no number: {value}")), Ok)
}

/// A whole number of at least 0; above 2^53 it may be text.
pub fn count(what: &str, value: &Value) -> Run<u64> {
    match hash(value) {
        Some(Value::Number(number)) if number.is_u64() => Ok(number.as_u64().unwrap_or_default()),
        _ => fail(format!("`{what}` is no whole number from 0: {value}")),
    }
}

pub fn rank_number(what: &str, value: &Value) -> Run<DpRank> {
    match u32::try_from(count(what, value)?) {
        Ok(rank) => Ok(DpRank(rank)),
        Err(_) => fail(format!("`{what}` is no rank: {value}")),
    }
}

/// A hash as the wire has it: an integer, whatever notation the case chose.
pub fn hash(value: &Value) -> Option<Value> {
    let text = match value {
        Value::Number(number) if number.is_u64() || number.is_i64() => return Some(value.clone()),
        Value::String(text) => text.as_str(),
        _ => return None,
    };
    let hex = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    match hex {
        Some(digits) => u64::from_str_radix(digits, 16).ok().map(Value::from),
        None => text.parse::<u64>().map(Value::from).or_else(|_| text.parse::<i64>().map(Value::from)).ok(),
    }
}

/// `w1:0`.
pub fn rank_key(text: &str) -> Run<RankKey> {
    let parts = text.rsplit_once(':').and_then(|(worker, rank)| Some((worker, rank.parse().ok()?)));
    parts
        .map_or_else(|| fail(format!("`{text}` is no rank")), |(worker, rank)| Ok(RankKey::new(worker, rank)))
}

/// A map by rank.
pub fn by_rank<'a>(what: &'a str, value: &'a Value) -> Run<BTreeMap<RankKey, &'a Value>> {
    Fields::of(what, value)?.entries().map(|(rank, value)| Ok((rank_key(rank)?, value))).collect()
}

/// A list of ranks.
pub fn ranks(what: &str, value: &Value) -> Run<std::collections::BTreeSet<RankKey>> {
    list(what, value)?.iter().map(|rank| rank_key(text(what, rank)?)).collect()
}

/// A map by the rank's number within one worker.
pub fn by_number<'a>(what: &'a str, value: &'a Value) -> Run<BTreeMap<DpRank, &'a Value>> {
    let entries = Fields::of(what, value)?.entries();
    entries.map(|(rank, value)| Ok((rank_number(what, &Value::from(rank))?, value))).collect()
}

/// Token ids.
pub fn tokens(value: &Value) -> Run<Vec<u32>> {
    let token = |value: &Value| value.as_u64().and_then(|token| u32::try_from(token).ok());
    let tokens: Option<Vec<_>> = list("tokens", value)?.iter().map(token).collect();
    tokens.map_or_else(|| fail("`tokens` holds what is no token id"), Ok)
}

/// Numbers compare with a tolerance of 1e-9.
pub fn same(is: f64, expected: f64) -> bool {
    (is - expected).abs() <= 1e-9
}

//! Load answers as JSON: `GET /v1/loads` of an engine, `GET /loads` of a gateway.

use std::borrow::Cow;

use serde_json::Value;

use super::answer::{LoadAnswer, MAX_ENTRIES, RollupEntry};
use super::probe::{NotOffered, Outcome, TryAgain};
use super::report::{LoadEntry, RawNumber, RawRankLoad};
use super::timestamp::unix_seconds;

/// Names of a figure, ours first. Engines name some of them differently in an aggregate.
const RUNNING: &[&str] = &["num_running_reqs", "total_running_reqs"];
const WAITING: &[&str] = &["num_waiting_reqs", "total_waiting_reqs"];
const USED_TOKENS: &[&str] = &["num_used_tokens"];
const MAX_TOKENS: &[&str] = &["max_total_num_tokens"];
const USAGE: &[&str] = &["token_usage", "avg_token_usage"];
const USED_BLOCKS: &[&str] = &["kv_used_blocks"];
const PREFILL_TOKENS: &[&str] = &["prefill_tokens"];
const QUEUED: &[&str] = &["queued_uncached_tokens", "num_queued_uncached_tokens"];
const DECODE_BLOCKS: &[&str] = &["decode_blocks"];
const AGE: &[&str] = &["age_ms"];
const REQUEST_LIMIT: &[&str] = &["max_running_requests"];

/// One rank's figures as received, under any of their names. What is no object, or no number in it, spoils this
/// entry and no other.
pub fn figures(body: &Value) -> RawRankLoad {
    read(body, |names| names)
}

/// The names that [`own_figures`] reads.
pub const OWN_NAMES: [&str; 10] = [
    RUNNING[0],
    WAITING[0],
    USED_TOKENS[0],
    MAX_TOKENS[0],
    USAGE[0],
    USED_BLOCKS[0],
    PREFILL_TOKENS[0],
    QUEUED[0],
    DECODE_BLOCKS[0],
    AGE[0],
];

/// The same under our own names alone: what is posted to us.
pub fn own_figures(body: &Value) -> RawRankLoad {
    read(body, |names| &names[..1])
}

fn read(body: &Value, known: impl Fn(&'static [&'static str]) -> &'static [&'static str]) -> RawRankLoad {
    let Value::Object(fields) = body else {
        return RawRankLoad { decode_blocks: RawNumber::Unreadable, ..RawRankLoad::default() };
    };
    let number = |names: &'static [&'static str]| match known(names).iter().find_map(|&name| fields.get(name))
    {
        None | Some(Value::Null) => RawNumber::Absent,
        Some(value) => value.as_f64().map_or(RawNumber::Unreadable, RawNumber::Value),
    };
    RawRankLoad {
        num_running_reqs: number(RUNNING),
        num_waiting_reqs: number(WAITING),
        num_used_tokens: number(USED_TOKENS),
        max_total_num_tokens: number(MAX_TOKENS),
        token_usage: number(USAGE),
        kv_used_blocks: number(USED_BLOCKS),
        prefill_tokens: number(PREFILL_TOKENS),
        queued_uncached_tokens: number(QUEUED),
        decode_blocks: number(DECODE_BLOCKS),
        age_ms: number(AGE),
        max_running_requests: number(REQUEST_LIMIT),
        ..RawRankLoad::default()
    }
}

/// Reads the body of a successful answer: `{"loads": […], "aggregate": {…}}`, or a list of entries that carry
/// a worker.
///
/// Numbers that JSON does not have (`NaN`, `Infinity`, 1e999), which some servers write all the same, spoil
/// their own entry. Linear in the body.
///
/// # Errors
/// What the fetch has come to instead: another schema, cut short, empty.
pub fn answer(body: &[u8]) -> Result<LoadAnswer, Outcome> {
    let value = parse(body)?;
    let (loads, aggregate) = match &value {
        Value::Array(loads) if loads.iter().any(carries_worker) => (loads, None),
        Value::Object(fields) => match fields.get("loads") {
            Some(Value::Array(loads)) => (loads, fields.get("aggregate").filter(|value| !value.is_null())),
            _ => return Err(Outcome::NotOffered(NotOffered::OtherSchema)),
        },
        _ => return Err(Outcome::NotOffered(NotOffered::OtherSchema)),
    };
    let loads = &loads[..loads.len().min(MAX_ENTRIES)];
    let timestamp = value.get("timestamp").and_then(unix_seconds);
    let answer = if loads.iter().any(carries_worker) {
        LoadAnswer { rollup: loads.iter().map(rollup_entry).collect(), timestamp, ..LoadAnswer::default() }
    } else if !loads.is_empty() && !loads.iter().any(Value::is_object) {
        return Err(Outcome::NotOffered(NotOffered::OtherSchema));
    } else {
        LoadAnswer {
            entries: loads.iter().map(entry).collect(),
            // An aggregate over no rank is a sum of nothing.
            aggregate: aggregate.filter(|_| !loads.is_empty()).map(figures),
            rollup: Vec::new(),
            timestamp,
        }
    };
    if answer.is_empty() { Err(Outcome::TryAgain(TryAgain::Empty)) } else { Ok(answer) }
}

fn carries_worker(entry: &Value) -> bool {
    entry.get("worker").is_some_and(|worker| !worker.is_null())
}

fn entry(body: &Value) -> LoadEntry {
    LoadEntry { dp_rank: body.get("dp_rank").and_then(Value::as_u64), load: figures(body) }
}

fn rollup_entry(body: &Value) -> RollupEntry {
    let text = |field: &str| body.get(field).and_then(Value::as_str).map(Into::into);
    RollupEntry { worker: text("worker"), worker_type: text("worker_type"), entry: entry(body) }
}

fn parse(body: &[u8]) -> Result<Value, Outcome> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(Outcome::TryAgain(TryAgain::Empty));
    }
    let strict = serde_json::from_slice(body);
    match strict.or_else(|_| serde_json::from_slice(&quote_numbers_that_json_has_not(body))) {
        Ok(value) => Ok(value),
        Err(error) if error.is_eof() => Err(Outcome::TryAgain(TryAgain::CutShort)),
        Err(_) => Err(Outcome::NotOffered(NotOffered::OtherSchema)),
    }
}

/// The body with every number that is none, or too large for one, made a text: then it is no number, and the
/// rest can be read.
fn quote_numbers_that_json_has_not(body: &[u8]) -> Cow<'_, [u8]> {
    let mut out = Vec::with_capacity(body.len() + 64);
    let mut rest = body;
    while let Some(&first) = rest.first() {
        let length = match first {
            b'"' => text_length(rest),
            _ if is_word(first) => rest.iter().take_while(|&&byte| is_word(byte)).count(),
            _ => 1,
        };
        let (word, after) = rest.split_at(length);
        let foreign = is_word(first) && is_foreign_number(word);
        out.extend(foreign.then_some(b'"'));
        out.extend_from_slice(word);
        out.extend(foreign.then_some(b'"'));
        rest = after;
    }
    Cow::Owned(out)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

fn is_foreign_number(word: &[u8]) -> bool {
    let number = std::str::from_utf8(word).ok().and_then(|word| word.parse::<f64>().ok());
    number.is_some_and(|number| !number.is_finite())
}

/// Bytes of the text at the start of `rest`, its quotes included; all of it if it does not end.
fn text_length(rest: &[u8]) -> usize {
    let mut escaped = false;
    for (at, &byte) in rest.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::load::Refused;

    const OTHER: Outcome = Outcome::NotOffered(NotOffered::OtherSchema);
    const EMPTY: Outcome = Outcome::TryAgain(TryAgain::Empty);

    fn read(text: &str) -> Result<LoadAnswer, Outcome> {
        answer(text.as_bytes())
    }

    proptest::proptest! {
        /// L4: an entry is what it is whatever numbers stand beside it, those that JSON does not have included.
        #[test]
        fn neighbours_change_nothing(number in "NaN|-?Infinity|-?[1-9][0-9]{0,2}|-?[1-9]e[0-9]{1,4}|\"\\PC{0,5}\"", garbage in "\\PC{0,30}") {
            let escaped = serde_json::to_string(&garbage).unwrap();
            let number = if number.starts_with('"') { escaped.clone() } else { number };
            let text = format!("{{\"note\": {escaped}, \"loads\": [{{\"dp_rank\": 0, \"num_running_reqs\": {number}}}, {{\"dp_rank\": 1, \"num_running_reqs\": 3}}]}}");
            let answer = read(&text).unwrap();
            proptest::prop_assert_eq!(answer.entries[1].load.check().unwrap().0.num_running_reqs, Some(3));
            let _ = read(&garbage);
        }
    }

    /// L4: bad numbers spoil their own entry, those that are not even JSON included.
    #[test]
    fn bad_numbers_spoil_their_entry_alone() {
        let text = r#"{"timestamp": NaN, "dp_rank_count": 9, "loads": [
            {"dp_rank": 0, "num_running_reqs": 3, "note": "NaN, \" -Infinity"},
            {"dp_rank": 1, "num_running_reqs": NaN},
            {"dp_rank": 2, "num_running_reqs": -Infinity},
            {"dp_rank": 3, "num_running_reqs": 1e999},
            {"dp_rank": 4, "num_running_reqs": -1},
            {"dp_rank": 5, "num_running_reqs": null, "token_usage": 0.5},
            {"dp_rank": -1, "num_running_reqs": 1}, 7]}"#;
        let answer = read(text).unwrap();
        let checks: Vec<_> =
            answer.entries.iter().map(|entry| entry.load.check().map(|(load, _)| load)).collect();
        assert_eq!(checks[0].unwrap().num_running_reqs, Some(3));
        assert_eq!(
            checks[1..5],
            [
                Err(Refused::NotANumber),
                Err(Refused::NotANumber),
                Err(Refused::NotANumber),
                Err(Refused::Negative)
            ]
        );
        assert_eq!((checks[5].unwrap().num_running_reqs, checks[5].unwrap().token_usage), (None, Some(0.5)));
        assert_eq!((answer.entries[6].dp_rank, answer.entries[7].dp_rank), (None, None));
        let ranks: Vec<_> = answer.believable().iter().map(|entry| entry.dp_rank.unwrap()).collect();
        assert_eq!(ranks, [0, 5]);
    }

    /// L9: another schema is not an answer, an answer cut short may be whole the next time. L6: empty is neither.
    #[test]
    fn what_is_no_answer_is_told_apart() {
        for other in [
            "[]",
            "{}",
            "7",
            "<html>",
            r#"{"loads": {}}"#,
            r#"{"loads": [1, 2]}"#,
            r#"[{"dp_rank": 0}]"#,
            r#"{"loads": [}"#,
        ] {
            assert_eq!(read(other), Err(OTHER), "{other}");
        }
        for empty in
            ["", "  \n", r#"{"loads": []}"#, r#"{"loads": [], "aggregate": {"total_running_reqs": 0}}"#]
        {
            assert_eq!(read(empty), Err(EMPTY), "{empty}");
        }
        let whole = r#"{"loads": [{"dp_rank": 0, "num_running_reqs": NaN}]}"#;
        for end in 1..whole.len() {
            // Cut within `NaN` it is garbage to a parser; everywhere else the end is missing.
            let cut = read(&whole[..end]).unwrap_err();
            let in_nan = whole[..end].ends_with(" N") || whole[..end].ends_with(" Na");
            assert!(in_nan || cut == Outcome::TryAgain(TryAgain::CutShort), "{end}: {cut:?}");
        }
    }

    /// L8: one entry with a worker makes a rollup of all.
    #[test]
    fn entries_that_carry_a_worker_are_a_rollup() {
        for text in [
            r#"{"loads": [{"worker": "http://a", "worker_type": "decode", "dp_rank": 0}, {"dp_rank": 1}]}"#,
            r#"[{"worker": "http://a", "worker_type": "decode", "dp_rank": 0}, {"dp_rank": 1}]"#,
        ] {
            let answer = read(text).unwrap();
            assert!(answer.is_rollup() && answer.entries.is_empty());
            assert_eq!(answer.rollup[0].worker.as_deref(), Some("http://a"));
            assert_eq!(answer.rollup[0].worker_type.as_deref(), Some("decode"));
            assert_eq!((answer.rollup[1].worker.as_deref(), answer.rollup.len()), (None, 2));
        }
        assert!(!read(r#"{"loads": [{"worker": null, "dp_rank": 1}]}"#).unwrap().is_rollup());
    }

    /// L4: an aggregate stays one.
    #[test]
    fn an_aggregate_is_kept_apart() {
        let answer = read(r#"{"loads": [{"dp_rank": 1}], "aggregate": {"total_running_reqs": 7}}"#).unwrap();
        assert_eq!(answer.aggregate.unwrap().num_running_reqs, RawNumber::Value(7.0));
        assert_eq!(answer.entries[0].load, RawRankLoad::default());
    }
}

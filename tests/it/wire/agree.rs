//! The two decoders give one answer: on sound batches, on damaged ones, on noise.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use rankwise::events::{EventBatch, Limits, decode_batch, decode_batch_fast, peek_ts};

use super::pack::Value;

/// Decodes one payload after the other into one batch, as a stream does.
fn agree(payloads: &[Vec<u8>], limits: &Limits) -> Result<(), TestCaseError> {
    let mut fast = EventBatch::default();
    for payload in payloads {
        let record = decode_batch(payload, limits);
        let outcome = decode_batch_fast(payload, limits, &mut fast);
        prop_assert_eq!(outcome.map(|()| fast.clone()), record.clone(), "{:02x?}", payload);
        if outcome.is_err() {
            prop_assert_eq!(&fast, &EventBatch::default());
        }
        // A map may name its time twice; an array cannot.
        if let (Ok(batch), Some(0x90..=0x9f | 0xdc | 0xdd)) = (record, payload.first()) {
            prop_assert_eq!(peek_ts(payload), batch.ts);
        }
    }
    Ok(())
}

/// Limits that generated batches reach, and those that they do not.
fn limits() -> impl Strategy<Value = Limits> {
    let tight = (0..6_usize, 0..5_usize, 0..6_usize, 0..5_usize, 0..12_usize, 0..8_usize, 0..12_usize);
    let tight =
        tight.prop_map(|(events, hashes, tokens, extra_keys, extra_key_bytes, string_bytes, names)| Limits {
            events,
            hashes,
            tokens,
            extra_keys,
            extra_key_bytes,
            string_bytes,
            names,
            ..Limits::default()
        });
    prop_oneof![2 => Just(Limits::default()), 1 => tight]
}

fn int() -> impl Strategy<Value = Value> {
    prop_oneof![
        (0..300_u64).prop_map(Value::UInt),
        any::<u64>().prop_map(Value::UInt),
        any::<u32>().prop_map(|value| Value::UInt(value.into())),
        any::<u32>().prop_map(|value| Value::WideUInt(value.into())),
        any::<i64>().prop_map(Value::Int),
        any::<i16>().prop_map(|value| Value::Int(value.into())),
        any::<i8>().prop_map(|value| Value::Int(value.into())),
    ]
}

fn word() -> impl Strategy<Value = Value> {
    const WORDS: &[&str] = &[
        "GPU",
        "CPU",
        "cpu_tier2",
        "REMOTE",
        "sql",
        "",
        "mm",
        "lora",
        "cache_salt",
        "prompt_embeds",
        "full_attention",
        "sliding_window",
        "ts",
        "events",
        "type",
    ];
    prop_oneof![
        4 => select(WORDS).prop_map(Value::from),
        1 => "[a-zé]{0,40}".prop_map(|text| Value::Str(text.into_bytes())),
        1 => proptest::collection::vec(any::<u8>(), 0..6).prop_map(Value::Str),
    ]
}

fn bytes() -> impl Strategy<Value = Value> {
    prop_oneof![Just(0), Just(1), Just(16), Just(32), Just(64), Just(65), 0..300_usize]
        .prop_map(|len| Value::Bin(vec![7; len]))
}

/// Any value at all, up to a depth beyond what is allowed.
fn anything() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<bool>().prop_map(Value::Bool),
        int(),
        any::<f64>().prop_map(Value::F64),
        any::<f32>().prop_map(Value::F32),
        word(),
        bytes(),
        (any::<i8>(), proptest::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(kind, data)| Value::Ext(kind, data)),
    ];
    leaf.prop_recursive(4, 24, 5, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::Array),
            proptest::collection::vec((inner.clone(), inner.clone()), 0..4).prop_map(Value::Map),
            (inner, 1..16_usize).prop_map(|(inner, levels)| {
                (0..levels).fold(inner, |inner, _| Value::Array(vec![inner]))
            }),
        ]
    })
}

/// Mostly `good`, now and then nil or anything.
fn mostly(good: impl Strategy<Value = Value> + 'static) -> impl Strategy<Value = Value> {
    prop_oneof![24 => good, 2 => Just(Value::Nil), 1 => anything()]
}

fn list(element: impl Strategy<Value = Value> + 'static, most: usize) -> impl Strategy<Value = Value> {
    proptest::collection::vec(element, 0..most).prop_map(Value::Array)
}

fn hash() -> impl Strategy<Value = Value> {
    prop_oneof![3 => int(), 1 => bytes().prop_filter("a hash", |bytes| matches!(bytes, Value::Bin(bytes) if (1..=64).contains(&bytes.len())))]
}

fn extra_key() -> impl Strategy<Value = Value> {
    prop_oneof![
        word(),
        int(),
        bytes(),
        (word(), int()).prop_map(|(id, offset)| Value::Array(vec![id, offset])),
        (word(), word()).prop_map(|(tag, text)| Value::Array(vec![tag, text])),
        (word(), word(), int()).prop_map(|(tag, id, offset)| Value::Array(vec![tag, id, offset])),
        (word(), bytes()).prop_map(|(tag, digest)| Value::Array(vec![tag, digest])),
    ]
}

/// A value that this field of an event may well have.
fn field(name: &str) -> BoxedStrategy<Value> {
    match name {
        "type" => select(&["BlockStored", "BlockRemoved", "AllBlocksCleared", "BlockMoved"][..])
            .prop_map(Value::from)
            .boxed(),
        "block_hashes" => list(mostly_rarely(hash()), 5).boxed(),
        "parent_block_hash" => hash().boxed(),
        "token_ids" => {
            let pair = || {
                let token = || prop_oneof![Just(1_u64), Just(300)].prop_map(Value::UInt);
                proptest::collection::vec(mostly_rarely(token()), 2).prop_map(Value::Array)
            };
            let chained = (0..9_u64).prop_map(|len| {
                Value::Array(
                    (0..len).map(|at| Value::Array(vec![Value::UInt(at), Value::UInt(at + 1)])).collect(),
                )
            });
            prop_oneof![
                4 => list((0..200_000_u64).prop_map(Value::UInt), 20),
                4 => list(mostly_rarely(int()), 20),
                2 => chained,
                1 => list(mostly_rarely(pair()), 4),
            ]
            .boxed()
        }
        "lookahead_token_ids" => {
            let block = prop_oneof![int(), list(mostly_rarely(int()), 3), Just(Value::Nil)];
            list(mostly_rarely(block), 4).boxed()
        }
        "extra_keys" => list(mostly(list(mostly_rarely(extra_key()), 4)), 5).boxed(),
        "lora_id" | "block_size" | "group_idx" | "kv_cache_spec_sliding_window" => {
            prop_oneof![3 => (0..70_u64).prop_map(Value::UInt), 1 => int()].boxed()
        }
        _ => word().boxed(),
    }
}

fn mostly_rarely(good: impl Strategy<Value = Value> + 'static) -> impl Strategy<Value = Value> {
    prop_oneof![60 => good, 1 => anything()]
}

const STORED: [&str; 12] = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const REMOVED: [&str; 4] = ["type", "block_hashes", "medium", "group_idx"];
const CLEARED: [&str; 2] = ["type", "medium"];
const KEYS: [&str; 16] = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "cache_salt",
    "lookahead_token_ids",
    "session_id",
    "locality",
];

fn positional(tag: &'static str, names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let fields: Vec<_> = names[1..].iter().map(|name| mostly(field(name)).boxed()).collect();
    (fields, 0..=names.len(), proptest::collection::vec(anything(), 0..2)).prop_map(
        move |(fields, missing, more)| {
            // Shorter arrays are rarer than whole ones.
            let len = if missing > 5 { fields.len() } else { fields.len() - missing.min(fields.len()) };
            let tag = std::iter::once(Value::from(tag));
            Value::Array(tag.chain(fields.into_iter().take(len)).chain(more).collect())
        },
    )
}

fn named() -> impl Strategy<Value = Value> {
    let entry =
        |name: &'static str| mostly(field(name)).prop_map(move |value| (Value::from(name), value)).boxed();
    let tag = select(&["BlockStored", "BlockRemoved", "AllBlocksCleared"][..]);
    let whole: Vec<_> = STORED[1..].iter().map(|&name| entry(name)).collect();
    let some = subsequence(&KEYS[..], 0..KEYS.len())
        .prop_flat_map(move |names| names.into_iter().map(entry).collect::<Vec<_>>());
    let twice = proptest::collection::vec(
        prop_oneof![
            4 => select(&KEYS[..]).prop_flat_map(entry),
            1 => (anything(), anything()),
        ],
        0..2,
    );
    (tag, prop_oneof![whole, some], twice, any::<bool>()).prop_flat_map(|(tag, entries, twice, shuffle)| {
        let mut all = vec![(Value::from("type"), Value::from(tag))];
        all.extend(entries);
        all.extend(twice);
        if shuffle { Just(all).prop_shuffle().boxed() } else { Just(all).boxed() }.prop_map(Value::Map)
    })
}

fn event() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => positional("BlockStored", &STORED),
        2 => positional("BlockRemoved", &REMOVED),
        1 => positional("AllBlocksCleared", &CLEARED),
        1 => positional("BlockMoved", &REMOVED),
        6 => named(),
        1 => anything(),
    ]
}

fn batch() -> impl Strategy<Value = Value> {
    let events = || mostly_rarely(list(event(), 6));
    let time = || mostly(prop_oneof![any::<f64>().prop_map(Value::F64), int()]);
    let array = (time(), events(), mostly(int()), proptest::collection::vec(anything(), 0..2), 0..9_usize);
    let array = array.prop_map(|(ts, events, rank, more, len)| {
        let mut batch = vec![ts, events, rank];
        batch.truncate(len.max(1));
        batch.extend(more);
        Value::Array(batch)
    });
    let entry = prop_oneof![
        3 => events().prop_map(|events| (Value::from("events"), events)),
        2 => time().prop_map(|ts| (Value::from("ts"), ts)),
        2 => (select(&["data_parallel_rank", "attn_dp_rank", "dp_rank"][..]), mostly(int()))
            .prop_map(|(key, rank)| (Value::from(key), rank)),
        1 => (anything(), anything()),
    ];
    prop_oneof![3 => array, 1 => proptest::collection::vec(entry, 0..5).prop_map(Value::Map)]
}

/// Damage to a payload: bytes changed, taken out, put in, the end cut off.
fn damaged() -> impl Strategy<Value = Vec<u8>> {
    let edits = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 1..4);
    (batch(), edits).prop_map(|(batch, edits)| {
        let mut payload = batch.pack();
        for (place, byte, edit) in edits {
            if payload.is_empty() {
                break;
            }
            let place = place.index(payload.len());
            match edit {
                0 => payload[place] = byte,
                1 => drop(payload.remove(place)),
                2 => payload.insert(place, byte),
                _ => payload[place] ^= 1 << (byte % 8),
            }
        }
        payload
    })
}

fn packed() -> impl Strategy<Value = Vec<u8>> {
    batch().prop_map(|batch| batch.pack())
}

/// Noise that gets past the first bytes: a batch of one event, then anything.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    const HEADS: &[&[u8]] = &[
        b"",
        b"\x92\xc0\x91",
        b"\x93\xc0\x92\x93\xacBlockRemoved\x93",
        b"\x92\xc0\x91\x9a\xabBlockStored\x91\x01\xc0",
        b"\x92\xc0\x91\x83\xaaextra_keys",
    ];
    (select(HEADS), proptest::collection::vec(any::<u8>(), 0..60))
        .prop_map(|(head, tail)| [head, &tail[..]].concat())
}

/// Without files of failures: the payload is in the message.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config(1500))]

    /// E1
    #[test]
    fn on_sound_batches(payloads in proptest::collection::vec(packed(), 1..4), limits in limits()) {
        agree(&payloads, &limits)?;
    }

    /// E1
    #[test]
    fn on_damaged_batches(payloads in proptest::collection::vec(damaged(), 1..4), limits in limits()) {
        agree(&payloads, &limits)?;
    }
}

proptest! {
    #![proptest_config(config(20_000))]

    /// E1
    #[test]
    fn on_noise(payloads in proptest::collection::vec(noise(), 1..3)) {
        agree(&payloads, &Limits::default())?;
    }
}

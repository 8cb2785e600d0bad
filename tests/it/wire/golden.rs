//! Batches written by hand, one per layout and rule of the wire format.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rankwise::block::{AttentionKind, BlockHash, Tier};
use rankwise::events::{
    BlockRemoved, BlockStored, DecodeError, EventBatch, EventTokens, ExtraKey, KvEvent, Limits, peek_ts,
};
use rankwise::trust::Reason;

use super::pack::{Value, value};
use super::{decode, decode_with};

fn decoded(value: &Value) -> EventBatch {
    decode(&value.pack()).unwrap()
}

/// The only event of a batch array that holds this one.
fn event(event: Value) -> KvEvent {
    let mut batch = decoded(&value!([1.5, [event], 0]));
    assert_eq!((batch.skipped.total(), batch.events.len()), (0, 1));
    batch.events.remove(0)
}

fn stored(value: Value) -> BlockStored {
    match event(value) {
        KvEvent::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

/// Why the event is left out. A good event on either side of it must stay.
fn skipped(bad: Value) -> Reason {
    skipped_with(bad, &Limits::default())
}

fn skipped_with(bad: Value, limits: &Limits) -> Reason {
    let good = value!(["BlockRemoved", [1]]);
    let batch = decode_with(&value!([1.5, [(good.clone()), bad, good], 0]).pack(), limits).unwrap();
    assert_eq!((batch.events.len(), batch.skipped.total()), (2, 1));
    batch.skipped.iter().next().unwrap().0
}

fn text(text: &str) -> Value {
    text.into()
}

fn bin(bytes: &[u8]) -> Value {
    Value::Bin(bytes.into())
}

fn simple() -> BlockStored {
    BlockStored {
        block_hashes: vec![BlockHash::Int(11), BlockHash::Int(12)],
        parent_block_hash: None,
        tokens: EventTokens::Ids(vec![1, 2, 300, 70_000]),
        block_size: 2,
        lora_id: None,
        lora_name: None,
        cache_salt: None,
        tier: Tier::Device,
        group_idx: None,
        attention: None,
        extra_keys: vec![],
        lookahead: vec![],
    }
}

/// E1: batch array or map, event array or map, in every combination.
#[test]
fn four_layouts_say_the_same() {
    let array = value!([
        ["BlockStored", [11, 12], null, [1, 2, 300, 70_000], 2, null, "GPU", null],
        ["BlockRemoved", [(-5)], "CPU", 3],
        ["AllBlocksCleared"],
    ]);
    let map = value!([
        {"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null,
         "token_ids": [1, 2, 300, 70_000], "block_size": 2, "lora_id": null, "medium": "GPU", "lora_name": null},
        {"medium": "CPU", "block_hashes": [(-5)], "group_idx": 3, "type": "BlockRemoved"},
        {"type": "AllBlocksCleared"},
    ]);
    let removed =
        BlockRemoved { block_hashes: vec![BlockHash::from_i64(-5)], tier: Tier::Host, group_idx: Some(3) };
    let expected = EventBatch {
        ts: Some(1.5),
        dp_rank: Some(2),
        events: vec![KvEvent::Stored(simple()), KvEvent::Removed(removed), KvEvent::Cleared(None)],
        ..EventBatch::default()
    };
    for events in [array, map] {
        for batch in [
            value!([1.5, (events.clone()), 2]),
            value!([1.5, (events.clone()), 2, "later version", {"x": [null]}]),
            value!({"ts": 1.5, "events": (events.clone()), "data_parallel_rank": 2}),
            value!({"attn_dp_rank": 2, "more": [1, 2], "events": (events.clone()), "ts": 1.5}),
        ] {
            assert_eq!(decoded(&batch), expected);
            assert_eq!(peek_ts(&batch.pack()), Some(1.5));
        }
    }
}

/// E1: array lengths of all versions, from vLLM 0.9.0 (5 in SGLang) to 0.23, and one more.
#[test]
fn missing_and_surplus_trailing_fields() {
    let whole = value!([
        "BlockStored",
        [11, 12],
        null,
        [1, 2, 300, 70_000],
        2,
        7,
        "CPU",
        "sql",
        [["sql"], ["sql"]],
        4,
        "sliding_window",
        64,
        "later version"
    ]);
    let Value::Array(fields) = whole else { panic!() };
    for len in 5..=fields.len() {
        let keys = vec![vec![ExtraKey::Text("sql".into())]; 2];
        let window = (len > 11).then_some(64);
        let expected = BlockStored {
            lora_id: (len > 5).then_some(7),
            tier: if len > 6 { Tier::Host } else { Tier::Device },
            lora_name: (len > 7).then(|| "sql".into()),
            extra_keys: if len > 8 { keys } else { vec![] },
            group_idx: (len > 9).then_some(4),
            attention: (len > 10).then_some(AttentionKind::SlidingWindow { window }),
            ..simple()
        };
        assert_eq!(stored(Value::Array(fields[..len].to_vec())), expected, "{len}");
    }
    for len in 1..5 {
        assert_eq!(skipped(Value::Array(fields[..len].to_vec())), Reason::MalformedStore, "{len}");
    }
}

/// E1: nil stands for every optional field's default.
#[test]
fn nil_is_the_default() {
    let nils = value!([
        "BlockStored",
        [11, 12],
        null,
        [1, 2, 300, 70_000],
        2,
        null,
        null,
        null,
        null,
        null,
        null,
        null
    ]);
    assert_eq!(stored(nils), simple());
    let removed = event(value!(["BlockRemoved", [], null, null]));
    assert_eq!(
        removed,
        KvEvent::Removed(BlockRemoved { block_hashes: vec![], tier: Tier::Device, group_idx: None })
    );
}

/// E1, I2: hashes in every width and sign are the 64-bit pattern; byte strings are kept whole.
#[test]
fn hashes_of_all_forms() {
    let forms = vec![
        (Value::UInt(5), BlockHash::Int(5)),
        (Value::Int(5), BlockHash::Int(5)),
        (Value::WideUInt(5), BlockHash::Int(5)),
        (Value::UInt(u64::MAX), BlockHash::Int(u64::MAX)),
        (Value::Int(-1), BlockHash::Int(u64::MAX)),
        (Value::Int(i64::MIN), BlockHash::Int(1 << 63)),
        (Value::Int(-40_000), BlockHash::Int(40_000_u64.wrapping_neg())),
        (bin(&[9]), BlockHash::Bytes([9].into())),
        (bin(&[7; 32]), BlockHash::Bytes([7; 32].into())),
        (bin(&[7; 64]), BlockHash::Bytes([7; 64].into())),
    ];
    let (written, expected): (Vec<_>, Vec<_>) = forms.into_iter().unzip();
    for (form, hash) in written.iter().zip(&expected) {
        let batch = value!(["BlockStored", [], (form.clone()), [], 0]);
        assert_eq!(stored(batch).parent_block_hash.as_ref(), Some(hash));
    }
    let KvEvent::Removed(removed) = event(value!(["BlockRemoved", (Value::Array(written))])) else {
        panic!()
    };
    assert_eq!(removed.block_hashes, expected);
    for bad in [value!(null), text("ab"), bin(&[]), bin(&[7; 65]), value!(1.0), value!([1]), value!({1: 2})] {
        assert_eq!(skipped(value!(["BlockRemoved", [(bad.clone())]])), Reason::MalformedRemoval);
        if bad != Value::Nil {
            assert_eq!(skipped(value!(["BlockStored", [1], bad, [1], 1])), Reason::MalformedStore);
        }
    }
}

/// The only event of a batch, and what was left out beside it.
fn partly(event: Value) -> (KvEvent, Vec<(Reason, u32)>) {
    let mut batch = decoded(&value!([1.5, [event], 0]));
    assert_eq!(batch.events.len(), 1);
    (batch.events.remove(0), batch.skipped.iter().collect())
}

/// I4, E8: a name that cannot be read costs itself in a removal.
#[test]
fn an_unreadable_name_costs_itself_in_a_removal() {
    let expected = |names: &[u64]| {
        let block_hashes = names.iter().map(|&name| BlockHash::Int(name)).collect();
        KvEvent::Removed(BlockRemoved { block_hashes, tier: Tier::Device, group_idx: None })
    };
    for bad in [value!(null), text("ab"), bin(&[]), bin(&[7; 65]), value!(1.0), value!([1]), value!({1: 2})] {
        let one = value!(["BlockRemoved", [1, (bad.clone()), 2]]);
        assert_eq!(partly(one), (expected(&[1, 2]), vec![(Reason::MalformedRemoval, 1)]));
        let two = value!({"block_hashes": [(bad.clone()), 1, bad], "type": "BlockRemoved"});
        assert_eq!(partly(two), (expected(&[1]), vec![(Reason::MalformedRemoval, 2)]));
    }
}

/// I4, E8: in a store it costs what stands behind it too, since that can never be credited; what stands before
/// it stays, with its own tokens and keys.
#[test]
fn an_unreadable_name_cuts_a_store() {
    let store = |names: Value, tokens: Value| {
        value!({"type": "BlockStored", "block_hashes": names, "parent_block_hash": null, "token_ids": tokens,
            "block_size": 2, "extra_keys": [["a"], ["b"], ["c"]], "lookahead_token_ids": [[3], [5], [7]]})
    };
    let six = || value!([1, 2, 3, 4, 5, 6]);
    let key = |key: &str| vec![ExtraKey::Text(key.into())];
    let expected = BlockStored {
        block_hashes: vec![BlockHash::Int(11), BlockHash::Int(12)],
        tokens: EventTokens::Ids(vec![1, 2, 3, 4]),
        extra_keys: vec![key("a"), key("b")],
        lookahead: vec![vec![3], vec![5]],
        ..simple()
    };
    let lost = |count| vec![(Reason::MalformedStore, count)];
    let (event, left_out) = partly(store(value!([11, 12, "x"]), six()));
    assert_eq!((event, left_out), (KvEvent::Stored(expected.clone()), lost(1)));
    let first = BlockStored {
        block_hashes: vec![BlockHash::Int(11)],
        tokens: EventTokens::Ids(vec![1, 2]),
        extra_keys: vec![key("a")],
        lookahead: vec![vec![3]],
        ..simple()
    };
    let (event, left_out) = partly(store(value!([11, "x", 13]), six()));
    assert_eq!((event, left_out), (KvEvent::Stored(first.clone()), lost(1)));
    let pairs = value!([[1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]);
    let (event, left_out) = partly(store(value!([11, 12, "x"]), pairs));
    let paired = BlockStored { tokens: EventTokens::Pairs(vec![1, 2, 3, 4, 5]), ..expected.clone() };
    assert_eq!((event, left_out), (KvEvent::Stored(paired), lost(1)));
    // Names without content stand each for itself.
    let named = BlockStored {
        block_hashes: vec![BlockHash::Int(12), BlockHash::Int(13)],
        tokens: EventTokens::Ids(vec![]),
        extra_keys: vec![],
        lookahead: vec![],
        ..simple()
    };
    let (event, left_out) = partly(store(value!(["x", 12, 13]), value!([])));
    assert_eq!((event, left_out), (KvEvent::Stored(named), lost(1)));
    // Nothing stands before the first, and without the unreadable name the rest would line up wrongly.
    assert_eq!(skipped(store(value!(["x", 12, 13]), six())), Reason::MalformedStore);
    assert_eq!(skipped(store(value!([11, 12, "x"]), value!([1, 2, 3, 4]))), Reason::MalformedStore);
}

/// I11: pairs are kept as what they run through.
#[test]
fn pairs_of_tokens() {
    let of = |tokens: Value| value!(["BlockStored", [11, 12], null, tokens, 2]);
    let pairs = EventTokens::Pairs(vec![1, 2, 300, 70_000, 5]);
    let written = value!([[1, 2], [2, 300], [300, 70_000], [70_000, 5]]);
    assert_eq!(stored(of(written)), BlockStored { tokens: pairs, ..simple() });
    for broken in [value!([[1, 2], [3, 4]]), value!([[1, 2], [2, 3], [1, 2], ["not", "looked at"]])] {
        assert_eq!(skipped(of(broken)), Reason::TokenMismatch);
    }
    for odd in [
        value!([[1, 2], 2]),
        value!([1, [1, 2]]),
        value!([[1]]),
        value!([[1, 2, 3]]),
        value!([[]]),
        value!([[1, "2"]]),
        value!([[1, [2, 3]]]),
        value!([{1: 2}, [1, 2]]),
    ] {
        assert_eq!(stored(of(odd)).tokens, EventTokens::Unusable);
    }
    // No pairs are no tokens, whatever the next field begins with.
    let none = value!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null,
        "block_size": 2, "token_ids": [], "extra_keys": [null, null]});
    assert_eq!(stored(none).tokens, EventTokens::Ids(vec![]));
}

/// I11: tokens behind the blocks, one or more of them, as a list or bare.
#[test]
fn lookahead_tokens() {
    let with = |lookahead: Value| {
        value!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null,
            "token_ids": [1, 2, 300, 70_000], "block_size": 2, "lookahead_token_ids": lookahead})
    };
    for (written, expected) in [
        (value!([[300], [9]]), vec![vec![300], vec![9]]),
        (value!([300, 9]), vec![vec![300], vec![9]]),
        (value!([[300, 70_000], null]), vec![vec![300, 70_000], vec![]]),
        (value!([null, []]), vec![]),
        (value!([]), vec![]),
        (value!(null), vec![]),
    ] {
        assert_eq!(stored(with(written)), BlockStored { lookahead: expected, ..simple() });
    }
    for odd in
        [value!([[300]]), value!([[300], ["x"]]), value!([[300], {1: 2}]), value!(7), value!([["x"], []])]
    {
        assert_eq!(skipped(with(odd)), Reason::MalformedStore);
    }
}

/// I2: what follows the medium in an array is read by its type.
#[test]
fn the_eighth_element_is_read_by_its_type() {
    let with = |more: &[Value]| {
        let Value::Array(mut fields) =
            value!(["BlockStored", [11, 12], null, [1, 2, 300, 70_000], 2, null, "GPU"])
        else {
            panic!()
        };
        fields.extend_from_slice(more);
        Value::Array(fields)
    };
    let name = Some("sql".to_owned());
    let keys = vec![vec![ExtraKey::Text("k".into())], vec![]];
    let salted = || value!({"cache_salt": "tenant", "type": "BlockRemoved", "block_hashes": [1], 7: 8});
    for more in [vec![text("sql")], vec![value!(null), text("sql")], vec![value!({"lora_name": "sql"})]] {
        assert_eq!(stored(with(&more)), BlockStored { lora_name: name.clone(), ..simple() });
    }
    for more in [vec![value!([["k"], null])], vec![value!(null), value!([["k"], null])]] {
        assert_eq!(stored(with(&more)), BlockStored { extra_keys: keys.clone(), ..simple() });
    }
    let salt = Some("tenant".to_owned());
    assert_eq!(stored(with(&[salted()])), BlockStored { cache_salt: salt.clone(), ..simple() });
    let all =
        BlockStored { lora_name: name, cache_salt: salt, extra_keys: keys, group_idx: Some(4), ..simple() };
    assert_eq!(stored(with(&[text("sql"), salted(), value!(4)])).group_idx, Some(4));
    let map = value!({"cache_salt": "tenant", "extra_keys": [["k"], null], "group_idx": 4});
    assert_eq!(stored(with(&[text("sql"), map])), all);
    for odd in [
        vec![value!(7)],
        vec![text("sql"), text("tql")],
        vec![Value::Bool(true)],
        vec![value!({"lora_name": 7})],
    ] {
        assert_eq!(skipped(with(&odd)), Reason::MalformedStore, "{odd:?}");
    }
}

/// E1: TensorRT-LLM's strings leave the names usable.
#[test]
fn tokens_that_cannot_be_placed_keep_the_hashes() {
    for odd in [text("tok"), Value::Int(-1), Value::UInt(1 << 32), value!(1.0), value!(null), value!({1: 2})]
    {
        for tokens in
            [value!([(odd.clone())]), value!([1, (odd.clone()), 3]), value!([[1, 2], [2, 3], (odd.clone())])]
        {
            let expected = BlockStored { tokens: EventTokens::Unusable, ..simple() };
            assert_eq!(stored(value!(["BlockStored", [11, 12], null, tokens, 2])), expected);
        }
    }
    let wide = value!([(Value::Int(1)), (Value::WideUInt(2)), (Value::Int(300)), (Value::Int(70_000))]);
    assert_eq!(stored(value!(["BlockStored", [11, 12], null, wide, 2])), simple());
    let largest = stored(value!(["BlockStored", [], null, [0xffff_ffff_i64], 0]));
    assert_eq!(largest.tokens, EventTokens::Ids(vec![u32::MAX]));
}

const MEDIA: [(&str, Tier); 18] = [
    ("", Tier::Device),
    ("GPU", Tier::Device),
    ("gpu", Tier::Device),
    ("Device", Tier::Device),
    ("CPU", Tier::Host),
    ("cpu", Tier::Host),
    ("CPU_PINNED", Tier::Host),
    ("CPU_TIER1", Tier::Host),
    ("host_pinned", Tier::Host),
    ("CPU_TIER2", Tier::Disk),
    ("NVMe", Tier::Disk),
    ("fs", Tier::Disk),
    ("OBJ", Tier::Disk),
    ("STORAGE", Tier::Disk),
    ("DISK", Tier::Disk),
    ("EXTERNAL", Tier::Disk),
    ("REMOTE", Tier::Other),
    ("CXL", Tier::Other),
];

fn removed(value: Value) -> BlockRemoved {
    match event(value) {
        KvEvent::Removed(removed) => removed,
        other => panic!("{other:?}"),
    }
}

/// I6: media and their tiers, whatever their case.
#[test]
fn media() {
    for (medium, tier) in MEDIA {
        let map = value!({"type": "BlockRemoved", "block_hashes": [], "medium": medium});
        assert_eq!(removed(map).tier, tier, "{medium}");
        // What is another machine's is not the rank's own.
        let remote =
            value!({"type": "BlockRemoved", "block_hashes": [], "medium": medium, "locality": "Remote"});
        assert_eq!(removed(remote).tier, Tier::Other);
        let local =
            value!({"type": "BlockRemoved", "block_hashes": [], "medium": medium, "locality": "LOCAL"});
        assert_eq!(removed(local).tier, tier);
    }
}

/// I6: a clear that names a medium means that medium alone.
#[test]
fn a_clear_may_name_a_medium() {
    for (medium, tier) in MEDIA {
        let cleared = KvEvent::Cleared((!medium.is_empty()).then_some(tier));
        assert_eq!(event(value!(["AllBlocksCleared", medium, "later version"])), cleared, "{medium}");
        assert_eq!(event(value!({"medium": medium, "type": "AllBlocksCleared"})), cleared, "{medium}");
    }
    assert_eq!(event(value!(["AllBlocksCleared", null])), KvEvent::Cleared(None));
}

/// I6: names that the settings add, which go before our own.
#[test]
fn further_media() {
    let mut limits = Limits::default();
    limits.media.insert("my_tier", Tier::Host);
    limits.media.insert("DISK", Tier::Device);
    limits.media.insert("disk", Tier::Other);
    for (medium, tier) in
        [("MY_TIER", Tier::Host), ("Disk", Tier::Other), ("GPU", Tier::Device), ("YOUR_TIER", Tier::Other)]
    {
        let payload = value!([1.0, [["AllBlocksCleared", medium]]]).pack();
        assert_eq!(decode_with(&payload, &limits).unwrap().events, [KvEvent::Cleared(Some(tier))]);
    }
}

/// I9: group kinds by name.
#[test]
fn attention_kinds() {
    for (kind, window, expected) in [
        ("full_attention", value!(null), AttentionKind::Full),
        ("mla_attention", value!(null), AttentionKind::Full),
        ("sink_full_attention", value!(8), AttentionKind::Full),
        ("sliding_window", value!(64), AttentionKind::SlidingWindow { window: Some(64) }),
        ("sliding_window_mla", value!(null), AttentionKind::SlidingWindow { window: None }),
        ("mamba", value!(null), AttentionKind::StateSpace),
        ("chunked_local_attention", value!(4), AttentionKind::Unknown),
    ] {
        let map = value!({"type": "BlockStored", "block_hashes": [], "parent_block_hash": null, "token_ids": [],
            "block_size": 0, "group_idx": 1, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window});
        let stored = stored(map);
        assert_eq!((stored.attention, stored.group_idx), (Some(expected), Some(1)), "{kind}");
    }
    let window_alone = value!({"type": "BlockStored", "block_hashes": [], "parent_block_hash": null, "token_ids": [],
        "block_size": 0, "kv_cache_spec_sliding_window": 64});
    assert_eq!(stored(window_alone).attention, None);
}

/// I2: names and salts are kept as given, the empty ones too.
#[test]
fn adapter_and_salt() {
    let map = value!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null, "session_id": "s",
        "token_ids": [1, 2, 300, 70_000], "block_size": 2, "lora_id": (-3), "lora_name": "", "cache_salt": "tenant"});
    let expected = BlockStored {
        lora_id: Some(-3),
        lora_name: Some(String::new()),
        cache_salt: Some("tenant".into()),
        ..simple()
    };
    assert_eq!(stored(map), expected);
}

fn with_keys(keys: Value) -> Value {
    value!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null,
        "token_ids": [1, 2, 300, 70_000], "block_size": 2, "extra_keys": keys})
}

/// I2: every form of an extra key, tagged or not.
#[test]
fn extra_keys_of_all_forms() {
    let located = || ExtraKey::Located("img".into(), -12);
    let name = || ExtraKey::Text("sql".into());
    let digest = || ExtraKey::Bytes(vec![7; 32]);
    for (written, expected) in [
        (value!("sql"), name()),
        (value!(["lora", "sql"]), name()),
        (value!(["cache_salt", "sql"]), name()),
        (value!(["img", (-12)]), located()),
        (value!(["mm", "img", (-12)]), located()),
        (bin(&[7; 32]), digest()),
        (value!(["prompt_embeds", (bin(&[7; 32]))]), digest()),
        (Value::Int(-1), ExtraKey::Int(-1)),
        (Value::UInt(7), ExtraKey::Int(7)),
    ] {
        let stored = stored(with_keys(value!([null, [written, "last"]])));
        assert_eq!(stored.extra_keys, [vec![], vec![expected, ExtraKey::Text("last".into())]]);
    }
    for none in
        [value!(null), value!([]), value!([null, null]), value!([[], null]), value!([null, null, null])]
    {
        assert_eq!(stored(with_keys(none)), simple());
    }
}

/// I2: a key that is not understood is content that is not understood.
#[test]
fn a_strange_extra_key_spoils_its_event() {
    for strange in [
        value!(null),
        value!(1.5),
        Value::UInt(u64::MAX),
        Value::Bool(true),
        value!({"a": 1}),
        value!([]),
        value!(["img"]),
        value!(["img", "more"]),
        value!(["img", 1.5]),
        value!([1, "img"]),
        value!(["mm", "img", 1, 2]),
        value!(["nn", "img", 1]),
        value!(["prompt_embeds", "text"]),
        Value::Str(vec![0xff]).clone_into_list(),
    ] {
        assert_eq!(skipped(with_keys(value!([null, ["a", strange]]))), Reason::MalformedStore);
    }
    for keys in [
        value!("a"),
        value!(["a", "b"]),
        value!([["a"]]),
        value!([["a"], null, null]),
        value!([{1: 2}, null]),
    ] {
        assert_eq!(skipped(with_keys(keys)), Reason::MalformedStore);
    }
}

impl Value {
    /// `["mm", self, 0]`
    fn clone_into_list(&self) -> Self {
        value!(["mm", (self.clone()), 0])
    }
}

/// E1: an event of a kind or shape that we do not know is left out, and named.
#[test]
fn unknown_and_misshapen_events_are_left_out() {
    for unknown in [
        value!(["BlockMoved", [1], {"a": [1]}]),
        value!({"type": "BlockMoved", "x": 1}),
        value!(["blockstored"]),
    ] {
        assert_eq!(skipped(unknown), Reason::UnknownTag);
    }
    for misshapen in [
        value!(null),
        value!(7),
        value!("BlockRemoved"),
        value!([]),
        value!({}),
        value!([7, [1]]),
        value!([null]),
        value!([["BlockRemoved"], [1]]),
        value!({"block_hashes": [1]}),
        value!({"type": null, "block_hashes": [1]}),
        value!({"type": (bin(b"BlockRemoved")), "block_hashes": [1]}),
        Value::Ext(1, vec![1, 2, 3, 4]),
        Value::Bool(false),
    ] {
        assert_eq!(skipped(misshapen.clone()), Reason::MalformedEvent, "{misshapen:?}");
    }
    for misshapen in [
        value!(["BlockRemoved"]),
        value!(["BlockRemoved", null]),
        value!(["BlockRemoved", 7]),
        value!(["BlockRemoved", {1: 2}]),
        value!(["BlockRemoved", (Value::Ext(1, vec![1; 3]))]),
        value!(["BlockRemoved", [1], 7]),
        value!(["BlockRemoved", [1], ["GPU"]]),
        value!(["BlockRemoved", [1], "GPU", (-1)]),
        value!(["BlockRemoved", [1], "GPU", "0"]),
        value!(["AllBlocksCleared", 7]),
        value!({"type": "AllBlocksCleared", "medium": ["GPU"]}),
    ] {
        assert_eq!(skipped(misshapen.clone()), Reason::MalformedRemoval, "{misshapen:?}");
    }
}

/// E1: what a store cannot do without, and what spoils it.
#[test]
fn misshapen_stores_are_left_out() {
    let good = value!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": null,
        "token_ids": [1, 2, 300, 70_000], "block_size": 2});
    let Value::Map(entries) = good else { panic!() };
    for missing in 0..entries.len() {
        let mut entries = entries.clone();
        entries.remove(missing);
        let reason = if missing == 0 { Reason::MalformedEvent } else { Reason::MalformedStore };
        assert_eq!(skipped(Value::Map(entries)), reason, "{missing}");
    }
    for (key, bad) in [
        ("block_hashes", value!(null)),
        ("token_ids", text("text")),
        ("block_size", value!(null)),
        ("block_size", value!(-1)),
        ("block_size", Value::UInt(1 << 32)),
        ("block_size", value!(4.0)),
        ("lora_id", text("1")),
        ("lora_id", Value::UInt(1 << 63)),
        ("lora_name", value!(1)),
        ("lora_name", Value::Str(vec![0xff, 0xfe])),
        ("cache_salt", value!(["a"])),
        ("group_idx", Value::UInt(1 << 32)),
        ("kv_cache_spec_kind", value!(1)),
        ("kv_cache_spec_sliding_window", value!(-1)),
    ] {
        let mut spoilt = entries.clone();
        spoilt.push((key.into(), bad.clone()));
        assert_eq!(skipped(Value::Map(spoilt)), Reason::MalformedStore, "{key} {bad:?}");
    }
}

/// E1: of a key that comes twice the last counts; keys that are no text are read past.
#[test]
fn odd_maps() {
    let twice = value!({"type": "BlockMoved", "block_hashes": ["no hash"], 7: [1, {2: 3}], [1]: null,
        (bin(b"medium")): "CPU", null: 1, "block_hashes": [1], "type": "BlockRemoved", (Value::Str(vec![0xff])): 3});
    let removed = BlockRemoved { block_hashes: vec![BlockHash::Int(1)], tier: Tier::Device, group_idx: None };
    assert_eq!(event(twice), KvEvent::Removed(removed));
    let batch = value!({"events": [["BlockRemoved", [1]], [], ["BlockRemoved", [1]]], "ts": 1.0, 3: 4, "events": [["AllBlocksCleared"]], "ts": 2.0});
    let expected =
        EventBatch { ts: Some(2.0), events: vec![KvEvent::Cleared(None)], ..EventBatch::default() };
    assert_eq!(decoded(&batch), expected);
}

/// E1, R8: time and rank as far as they can be read.
#[test]
fn time_and_rank() {
    let head = |ts: Value, rank: Value| {
        let payload = value!([ts, [], rank]).pack();
        let batch = decode(&payload).unwrap();
        assert_eq!(batch.ts, peek_ts(&payload));
        (batch.ts, batch.dp_rank)
    };
    assert_eq!(head(value!(1.25), value!(3)), (Some(1.25), Some(3)));
    assert_eq!(head(Value::F32(1.25), Value::Int(3)), (Some(1.25), Some(3)));
    assert_eq!(head(value!(7), value!(-1)), (Some(7.0), Some(-1)));
    assert_eq!(head(value!(-7), value!(null)), (Some(-7.0), None));
    assert_eq!(head(value!(f64::NAN), value!("0")), (None, None));
    assert_eq!(head(value!(f64::INFINITY), Value::UInt(u64::MAX)), (None, Some(i64::MAX)));
    assert_eq!(head(value!(null), value!([1])), (None, None));
    assert_eq!(decoded(&value!([1.0, []])).dp_rank, None);
    assert_eq!(decoded(&value!({"events": []})), EventBatch::default());
}

/// E1: what makes a whole batch unusable.
#[test]
fn unusable_batches() {
    for (payload, error) in [
        (value!(null).pack(), DecodeError::NotABatch),
        (value!(7).pack(), DecodeError::NotABatch),
        (value!("text").pack(), DecodeError::NotABatch),
        (Value::Ext(1, vec![1]).pack(), DecodeError::NotABatch),
        (value!([]).pack(), DecodeError::NoEvents),
        (value!([1.0]).pack(), DecodeError::NoEvents),
        (value!([1.0, null, 0]).pack(), DecodeError::NoEvents),
        (value!([1.0, {"type": "AllBlocksCleared"}, 0]).pack(), DecodeError::NoEvents),
        (value!({}).pack(), DecodeError::NoEvents),
        (value!({"ts": 1.0}).pack(), DecodeError::NoEvents),
        (value!({"events": [], "events": null}).pack(), DecodeError::NoEvents),
        (vec![], DecodeError::Broken),
        (vec![0xc1], DecodeError::Broken),
        ([value!([1.0, []]).pack(), vec![0xc0]].concat(), DecodeError::TrailingBytes),
        ([value!([1.0, []]).pack(), vec![0xc1]].concat(), DecodeError::TrailingBytes),
        ([value!([1.0, []]).pack(), vec![0x91]].concat(), DecodeError::TrailingBytes),
        ([value!(7).pack(), vec![0xc0]].concat(), DecodeError::TrailingBytes),
    ] {
        assert_eq!(decode(&payload), Err(error), "{payload:02x?}");
    }
}

/// E1: however a batch breaks off, none of it is applied.
#[test]
fn truncated_batches() {
    let batch = value!([1.5, [["BlockStored", [11, (bin(&[1; 20]))], null, [1, 300], 2, null, "GPU", "sql", [null, ["a", ["b", 1]]]],
        {"type": "BlockRemoved", "block_hashes": [1], "x": {"y": [(Value::Ext(1, vec![3; 5]))]}}], 0]);
    let payload = batch.pack();
    assert_eq!(decode(&payload).unwrap().events.len(), 2);
    for len in 0..payload.len() {
        assert_eq!(decode(&payload[..len]), Err(DecodeError::Broken), "{len}");
    }
}

/// E1: each limit is the last value that passes.
#[test]
fn limits_of_an_event() {
    let limits = Limits {
        hashes: 2,
        tokens: 4,
        extra_keys: 3,
        extra_key_bytes: 8,
        string_bytes: 5,
        ..Limits::default()
    };
    let whole = |keys: Value, name: &str| {
        value!(["BlockStored", [11, 12], null, [1, 2, 300, 70_000], 2, null, "a long medium", name, keys])
    };
    let fitting = whole(value!([["aaaaa", "bbb"], [1]]), "abcde");
    let batch = decode_with(&value!([1.0, [fitting]]).pack(), &limits).unwrap();
    assert_eq!((batch.events.len(), batch.skipped.total()), (1, 0));
    for long in [value!(["BlockRemoved", [1, 2, 3]]), value!(["BlockRemoved", [1, 2, "not looked at"]])] {
        assert_eq!(skipped_with(long, &limits), Reason::TooLongRemoval);
    }
    for long in [
        value!(["BlockStored", [1], null, [1, 2, 3, 4, 5], 2]),
        whole(value!(null), "abcdef"),
        value!({"type": "BlockStored", "block_hashes": [], "parent_block_hash": null, "token_ids": [],
            "block_size": 0, "cache_salt": "abcdef"}),
        whole(value!([["aaaaaa"], null]), ""),
        whole(value!([[(bin(b"aaaaaa"))], null]), ""),
        whole(value!([[["aaaaaa", 1]], null]), ""),
        whole(value!([["aaaaa"], ["bbbb"]]), ""),
        whole(value!([[1, 2], [3, 4]]), ""),
        whole(value!([null, null, null]), ""),
        value!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null, "token_ids": [1],
            "block_size": 1, "lookahead_token_ids": [[1, 2, 3, 4, 5]]}),
        value!(["BlockStored", [1], null, [[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]], 1]),
    ] {
        assert_eq!(skipped_with(long.clone(), &limits), Reason::TooLongStore, "{long:?}");
    }
}

/// E1: each limit of a batch likewise.
#[test]
fn limits_of_a_batch() {
    let three =
        value!([1.0, [["BlockRemoved", [1, 2]], ["BlockRemoved", [3, 4]], ["BlockRemoved", [5]]]]).pack();
    let with = |limits: Limits| decode_with(&three, &limits);
    assert!(with(Limits { events: 3, ..Limits::default() }).is_ok());
    let error = DecodeError::TooManyEvents { events: 3, limit: 2 };
    assert_eq!(with(Limits { events: 2, ..Limits::default() }), Err(error));
    assert!(with(Limits { payload_bytes: three.len(), ..Limits::default() }).is_ok());
    let limit = three.len() - 1;
    let error = DecodeError::PayloadTooLarge { bytes: three.len(), limit };
    assert_eq!(with(Limits { payload_bytes: limit, ..Limits::default() }), Err(error));
    // The second does not fit beside the first, the third does.
    let batch = with(Limits { names: 3, ..Limits::default() }).unwrap();
    assert_eq!((batch.events.len(), batch.skipped.get(Reason::TooLongRemoval)), (2, 1));
}

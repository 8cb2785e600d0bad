//! Cases of our own for the ops and fields that the case files use seldom or never, so that files that use
//! them find them working.

use serde_json::{Value, json};

use super::{Outcome, run_case};

fn passes(config: Value, steps: Value) {
    let mut whole = json!({"block_size": 4, "overlap_weight": 1, "workers": {"w1": {"start": 0, "size": 1}}});
    for (key, value) in config.as_object().unwrap() {
        whole[key] = value.clone();
    }
    let outcome = run_case(&json!({"id": "ours", "config": whole, "steps": steps}));
    assert!(matches!(outcome, Outcome::Pass), "{outcome}");
}

/// A store of one block whose tokens are all `hash`.
fn stored(hash: u32, parent: Value) -> Value {
    json!({"type": "BlockStored", "block_hashes": [hash], "parent_block_hash": parent,
        "token_ids": [hash, hash, hash, hash], "block_size": 4})
}

fn live(seq: u64, event: Value) -> Value {
    json!({"op": "event", "worker": "w1", "dp_rank": 0, "seq": seq, "event": event})
}

fn at(op: &str) -> Value {
    json!({"op": op, "worker": "w1", "dp_rank": 0})
}

fn serves(from: u64, batches: Value, end: &str) -> Value {
    json!({"op": "replay_serves", "worker": "w1", "dp_rank": 0, "from": from, "batches": batches, "end": end})
}

fn overlap(hashes: &[u32], blocks: u32) -> Value {
    let tokens: Vec<u32> = hashes.iter().flat_map(|hash| [*hash; 4]).collect();
    json!({"op": "query", "tokens": tokens, "expect": {"w1:0": blocks}})
}

fn asked(from: Value) -> Value {
    json!({"op": "expect_replay_requests", "worker": "w1", "dp_rank": 0, "from": from})
}

fn exactly(counters: Value) -> Value {
    json!({"op": "expect_counters", "exactly": counters})
}

/// E3, E5: a new process answers the question about the watermark with its end mark alone.
#[test]
fn a_restart_with_replay_is_seen_before_the_next_event() {
    passes(
        json!({"replay": true}),
        json!([
            live(0, stored(1, Value::Null)),
            live(1, stored(2, json!(1))),
            overlap(&[1, 2], 2),
            asked(json!([])),
            at("publisher_restart"),
            // Nothing of it was scripted.
            asked(json!([])),
            overlap(&[1, 2], 0),
            live(0, stored(3, Value::Null)),
            overlap(&[3], 1),
            exactly(json!({"gaps": 0, "lost_batches": 0, "duplicate_batches": 0})),
        ]),
    );
}

/// E3: the script may stand before or behind the step whose request it answers.
#[test]
fn a_restart_may_have_its_history_scripted() {
    let history = json!([{"seq": 0, "events": [stored(3, Value::Null)]}]);
    passes(
        json!({"replay": true}),
        json!([
            live(0, stored(1, Value::Null)),
            at("publisher_restart"),
            serves(0, json!([]), "ok"),
            serves(0, history, "ok"),
            asked(json!([0, 0])),
            overlap(&[1], 0),
            overlap(&[3], 1),
        ]),
    );
}

/// E3: the same process behind a lost connection keeps its blocks, and what was missed is asked for.
#[test]
fn a_short_loss_of_connection_clears_nothing() {
    passes(
        json!({"replay": true}),
        json!([
            live(0, stored(1, Value::Null)),
            at("endpoint_down"),
            {"op": "expect_connection", "worker": "w1", "states": {"0": "connecting"}},
            live(1, stored(2, json!(1))),
            overlap(&[1, 2], 1),
            at("endpoint_up"),
            {"op": "expect_connection", "worker": "w1", "states": {"0": "up"}},
            asked(json!([])),
            overlap(&[1, 2], 2),
            exactly(json!({"lost_batches": 0, "duplicate_batches": 0})),
        ]),
    );
}

/// E2, E3: several timeouts, each answered by asking again; live batches wait meanwhile.
#[test]
fn requests_are_made_again_until_one_is_answered() {
    let hole = json!([{"seq": 1, "events": [stored(2, json!(1))]}]);
    passes(
        json!({"replay": true}),
        json!([
            live(0, stored(1, Value::Null)),
            serves(1, json!([]), "timeout"),
            serves(1, json!([]), "timeout"),
            serves(1, hole, "ok"),
            live(2, stored(3, json!(2))),
            overlap(&[1, 2, 3], 1),
            {"op": "expect_status", "trust": {"w1:0": "repairing"}},
            {"op": "advance", "ms": 60000},
            asked(json!([1, 1, 1])),
            overlap(&[1, 2, 3], 3),
            {"op": "expect_status", "trust": {"w1:0": "live"}, "silent_ranks": []},
            exactly(json!({"gaps": 1, "lost_batches": 0})),
        ]),
    );
}

/// E4: without a replay endpoint a hole is lost, and said to be.
#[test]
fn without_replay_a_hole_is_lost() {
    passes(
        json!({}),
        json!([
            live(0, stored(1, Value::Null)),
            live(3, stored(2, json!(1))),
            overlap(&[1, 2], 2),
            {"op": "expect_status", "trust": {"w1:0": "partial"}},
            exactly(json!({"gaps": 1, "lost_batches": 2})),
        ]),
    );
}

/// I2: adapter, salt and images are part of a query as they are of a store.
#[test]
fn salts_and_images_separate() {
    let image = json!([["img", 1]]);
    let mut store = stored(1, Value::Null);
    store["extra_keys"] = image.clone();
    let mut salted = stored(5, Value::Null);
    salted["cache_salt"] = json!("t1");
    let ask = |hash: u32, more: Value, blocks: u32| {
        let mut query = overlap(&[hash], blocks);
        for (key, value) in more.as_object().unwrap() {
            query[key] = value.clone();
        }
        query
    };
    passes(
        json!({}),
        json!([
            live(0, store),
            live(1, salted),
            ask(1, json!({}), 0),
            ask(1, json!({"extra_keys": image}), 1),
            ask(1, json!({"extra_keys": [["img", 2]]}), 0),
            ask(1, json!({"extra_keys": image, "cache_salt": "t1"}), 0),
            ask(5, json!({"cache_salt": "t1"}), 1),
            ask(5, json!({"extra_keys": [["t1"]]}), 1),
            ask(5, json!({}), 0),
        ]),
    );
}

/// E1: what only shares the topic's prefix is another topic's.
#[test]
fn another_topic_is_ignored() {
    let frames = json!(["6b7632", "0000000000000000", "93cb3ff000000000000090c0"]);
    let ours = json!(["6b76", "0000000000000000", "93cb3ff000000000000090c0"]);
    passes(
        json!({"topic": "kv"}),
        json!([
            {"op": "raw", "worker": "w1", "dp_rank": 0, "frames": frames, "expect": "ignored"},
            {"op": "raw", "worker": "w1", "dp_rank": 0, "frames": ours, "expect": "applied"},
        ]),
    );
}

/// E1: each worker may have a topic of its own.
#[test]
fn topics_may_differ_by_worker() {
    let frames = json!(["6b76", "0000000000000000", "93cb3ff000000000000090c0"]);
    let raw = |worker: &str, expect: &str| json!({"op": "raw", "worker": worker, "dp_rank": 0, "frames": frames, "expect": expect});
    passes(
        json!({"topic": {"w1": "kv", "w2": "other"}, "workers": {
            "w1": {"start": 0, "size": 1}, "w2": {"start": 0, "size": 1}, "w3": {"start": 0, "size": 1}}}),
        json!([raw("w1", "applied"), raw("w2", "ignored"), raw("w3", "applied")]),
    );
}

/// The last section of the format: deep chains, what a rank's blocks really are, policies that cannot be.
#[test]
fn the_further_ops_run() {
    passes(
        json!({"workers": {"w1": {"start": 0, "size": 1}, "w2": {"start": 4, "size": 2}}}),
        json!([
            {"op": "expect_workers", "workers": ["w1", "w2"], "ranks": ["w1:0", "w2:4", "w2:5"]},
            {"op": "expect_workers", "ranks": {"w2": [4, 5]}},
            live(0, json!({"type": "BlockStored", "block_hashes": [1], "parent_block_hash": null,
                "token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "block_size": 8})),
            {"op": "expect_status", "block_size": {"w1:0": 8, "w2:4": null}},
            {"op": "deep_chain", "worker": "w1", "dp_rank": 0, "blocks": 5000, "blocks_per_event": 100,
                "branch_worker": "w2", "branch_every": 400, "expect_overlap": 5000, "stack_kib": 128},
            {"op": "expect_workers", "workers": []},
        ]),
    );
    for weight in [json!(-1), json!("NaN"), json!("inf")] {
        let score = json!({"op": "score", "isl_tokens": 8, "block_size": 4, "overlap_weight": weight,
            "ranks": {"w1:0": {"cached_blocks": 0, "decode_blocks": 0, "tree_size": 0}}, "refused": true});
        passes(json!({}), json!([score]));
    }
}

/// L15: a rank that turned a request away is no candidate until it reports again.
#[test]
fn a_rank_that_turned_a_request_away_is_left_out() {
    let admit = |eligible: Value| json!({"op": "admit", "expect": {"eligible": eligible, "accepted": true}});
    let load = json!({"op": "load", "worker": "w1", "report": {"ranks": {"0": {"kv_used_blocks": 1}}}});
    passes(
        json!({"workers": {"w1": {"start": 0, "size": 2}}}),
        json!([
            admit(json!(["w1:0", "w1:1"])),
            at("dispatch_rejected"),
            admit(json!(["w1:1"])),
            {"op": "dispatch_rejected", "worker": "w1", "dp_rank": 1},
            {"op": "admit", "expect": {"accepted": false, "reason": "overloaded"}},
            {"op": "advance", "ms": 1},
            load,
            admit(json!(["w1:0"])),
        ]),
    );
}

/// R1, R3, L11: every field of a declaration; counters survive the worker.
#[test]
fn declarations_may_list_endpoints_and_capacities() {
    passes(
        json!({}),
        json!([
            live(0, stored(1, json!(77))),
            {"op": "withdraw", "worker": "w1"},
            {"op": "expect_workers", "workers": []},
            {"op": "expect_counters", "at_least": {"orphan_blocks": 1}},
            {"op": "declare", "worker": "w2", "start": 4, "size": 2, "endpoints": {"4": "tcp://h:1", "5": "tcp://h:2"},
                "capacity": {"scope": "per_rank_list", "blocks": [10, 20]}, "expect": "ok",
                "expect_endpoints": {"4": "tcp://h:1", "5": "tcp://h:2"}, "expect_capacity": {"4": 10, "5": 20},
                "expect_request_limit": {"4": null, "5": null}},
            {"op": "declare", "worker": "w3", "start": 0, "size": 1, "endpoints": ["tcp://h:2"], "expect": "refused"},
            {"op": "declare", "worker": "w3", "start": 4294967295_u32, "size": 2, "expect": "refused"},
            {"op": "declare", "worker": "w3", "start": 0, "size": 1, "block_size": 8, "expect": "refused"},
            {"op": "expect_workers", "workers": {"w2": {"start": 4, "size": 2}}},
            {"op": "churn", "worker": "w2", "dp_rank": 5, "chains": 3, "blocks_per_chain": 2,
                "shared_prefix_blocks": 1, "end": "withdraw"},
            {"op": "expect_workers", "workers": {"w2": [4, 5]}},
            {"op": "expect_index", "blocks": {}, "total_blocks": 0, "nodes_at_most": 1},
        ]),
    );
}

/// S1, S3, L15: refusals and unknown loads.
#[test]
fn scoring_may_refuse_and_may_not_know() {
    let none = json!({"op": "score", "isl_tokens": 8, "block_size": 4, "overlap_weight": 1, "ranks": {}});
    let mut refused = none.clone();
    refused["expect"] = json!({"refused": "no_worker"});
    let mut unknown = none;
    unknown["ranks"] = json!({"w1:0": {"cached_blocks": 0, "decode_blocks": null, "tree_size": 0},
        "w1:1": {"cached_blocks": 1, "decode_blocks": null, "tree_size": 9}});
    unknown["expect"] = json!({"logits": {"w1:0": null, "w1:1": null}, "selected": "w1:1"});
    passes(json!({}), json!([refused, unknown]));
}

//! The runner itself can fail, and says so when it cannot run a case.

use serde_json::{Value, json};

use super::{Outcome, our_files, run_case};

fn case(steps: Value) -> Value {
    json!({"id": "X", "config": {"block_size": 4, "workers": {"w1": {"start": 0, "size": 1}}}, "steps": steps})
}

fn store() -> Value {
    json!({"op": "event", "worker": "w1", "dp_rank": 0, "seq": 0, "event": {"type": "BlockStored",
        "block_hashes": ["0x1"], "parent_block_hash": null, "token_ids": [1, 2, 3, 4], "block_size": 4}})
}

fn overlap(blocks: u32) -> Value {
    json!({"op": "query", "tokens": [1, 2, 3, 4], "expect": {"w1:0": blocks}})
}

fn ends_at(steps: Value, op: &str) {
    match run_case(&case(steps)) {
        Outcome::NotRunnable(at) if at == op => {}
        other => panic!("{other}, expected not runnable: {op}"),
    }
}

#[test]
fn a_wrong_expectation_fails() {
    assert!(matches!(run_case(&case(json!([store(), overlap(1)]))), Outcome::Pass));
    assert!(matches!(run_case(&case(json!([store(), overlap(2)]))), Outcome::Fail(_)));
    assert!(matches!(run_case(&case(json!([overlap(1)]))), Outcome::Fail(_)));
    assert!(matches!(run_case(&json!({"id": "X"})), Outcome::Fail(_)));
}

#[test]
fn what_is_not_known_ends_the_case_and_is_named() {
    ends_at(json!([store(), {"op": "teleport"}, overlap(2)]), "teleport");
    ends_at(json!([{"op": "advance", "ms": 1, "speed": 2}]), "advance with speed");
    ends_at(json!([{"op": "expect_counters", "exactly": {"sighs": 0}}]), "expect_counters with sighs");
    let hidden = json!({"op": "raw_replay", "worker": "w1", "dp_rank": 0, "live_before": [{"op": "teleport"}],
        "live_gap": store(), "reply_frames": []});
    ends_at(json!([hidden]), "teleport");
    // What was wrong before is not excused.
    let outcome = run_case(&case(json!([store(), overlap(2), {"op": "teleport"}])));
    assert!(matches!(outcome, Outcome::Fail(_)), "{outcome}");
}

/// Each check of each case, its expectation changed, fails.
#[test]
fn every_check_of_every_case_can_fail() {
    let mut changed = 0;
    for file in our_files() {
        let mut case: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let steps = case["steps"].as_array_mut().unwrap();
        for step in steps.iter_mut().filter(|step| step["op"] == "churn") {
            step["chains"] = json!(10);
        }
        if !matches!(run_case(&case), Outcome::Pass) {
            continue;
        }
        for at in 0..case["steps"].as_array().unwrap().len() {
            let mut other = case.clone();
            if !spoil(&mut other["steps"][at]) {
                continue;
            }
            let outcome = run_case(&other);
            let (id, step) = (&case["id"], &other["steps"][at]);
            assert!(matches!(outcome, Outcome::Fail(_)), "{id} {outcome} with {step}");
            changed += 1;
        }
    }
    assert!(changed > 150, "only {changed} checks were changed");
}

/// Makes a step expect something else; `false` if it expects nothing.
fn spoil(step: &mut Value) -> bool {
    let op = step["op"].as_str().unwrap().to_owned();
    match op.as_str() {
        "query" => raise(&mut step["expect"], 1),
        "score" | "score_live" => match step["expect"].get_mut("selected") {
            Some(selected) => *selected = json!("nobody:0"),
            None => step["expect"]["selected_one_of"] = json!([]),
        },
        "score_many" => step["expect"]["each_at_least"] = step["draws"].clone(),
        "admit" => {
            let accepted = step["expect"]["accepted"].as_bool().unwrap();
            step["expect"]["accepted"] = json!(!accepted);
        }
        "declare" => step["expect"] = json!(if step["expect"] == "ok" { "refused" } else { "ok" }),
        "raw" => step["expect"] = json!(if step["expect"] == "applied" { "dropped" } else { "applied" }),
        "replay_serves" => step["from"] = json!(step["from"].as_u64().unwrap() + 1),
        "expect_index" if step.get("blocks").is_some() => raise(&mut step["blocks"], 1),
        "expect_index" => step["total_blocks"] = json!(1),
        "expect_counters" => {
            let way = if step.get("exactly").is_some() { "exactly" } else { "at_least" };
            raise(&mut step[way], 1_000_000);
        }
        "expect_load" if step.get("absent").is_some() => step["absent"] = json!(["w1:0"]),
        "expect_load" => {
            let first = step["ranks"].as_object_mut().unwrap().values_mut().next().unwrap();
            first["state"] = json!(if first["state"] == "known" { "unknown" } else { "known" });
        }
        "expect_metrics" => step["present_label"] = json!({"worker": "nobody"}),
        "http" if step["expect"].get("status").is_some() => step["expect"]["status"] = json!(418),
        "http" => step["expect"]["status_class"] = json!(1),
        "expect_replay_requests" => step["from"].as_array_mut().unwrap().push(json!(99)),
        "expect_connection" => {
            let first = step["states"].as_object_mut().unwrap().values_mut().next().unwrap();
            *first = json!(if *first == "up" { "down" } else { "up" });
        }
        "expect_status" => step["silent_ranks"].as_array_mut().unwrap().push(json!("w1:0")),
        _ => return false,
    }
    true
}

/// Adds to the first number of a map; an empty map expects one of `w1:0`.
fn raise(map: &mut Value, more: u64) {
    let map = map.as_object_mut().unwrap();
    match map.values_mut().find(|value| value.is_u64()) {
        Some(first) => *first = json!(first.as_u64().unwrap() + more),
        None => {
            map.insert("w1:0".to_owned(), json!(more));
        }
    }
}

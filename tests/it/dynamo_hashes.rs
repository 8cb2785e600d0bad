//! I3: hashes made by existing clients can be sent to us. Every text vector of Dynamo 1.6.1, Eagle included.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rankwise::block::{BlockSize, Isolation, LocalHasher, SequenceHash};
use serde_json::Value;

/// Vectors that the file holds: fewer would let this test pass by having nothing to check.
const TEXT_VECTORS: usize = 71;
const EAGLE_VECTORS: usize = 7;

#[test]
fn every_text_vector_is_reproduced() {
    let golden: Value = serde_json::from_str(include_str!("../../fixtures/dynamo/hashes.json"))
        .expect("the golden file is JSON");
    let text: Vec<_> =
        list(&golden["vectors"]).iter().filter(|vector| vector["block_mm_infos"].is_null()).collect();
    for vector in &text {
        check(vector);
    }
    let eagle = text.iter().filter(|vector| vector["is_eagle"] == true).count();
    assert_eq!((text.len(), eagle), (TEXT_VECTORS, EAGLE_VECTORS));
}

fn check(vector: &Value) {
    let name = format!("{} ({})", vector["id"], vector["why"]);
    let tokens: Vec<_> = list(&vector["tokens"]).iter().map(|token| number(token) as u32).collect();
    let block_size =
        BlockSize::new(number(&vector["block_size"]) as u32).expect("no golden has block size 0");
    let isolation = Isolation::new(vector["lora_name"].as_str(), vector["cache_salt"].as_str());

    let (mut hasher, mut locals) = (LocalHasher::default(), Vec::new());
    if vector["is_eagle"] == true {
        hasher.hash_eagle(isolation, &tokens, block_size, &mut locals);
    } else {
        hasher.hash_prompt(isolation, &tokens, block_size, &mut locals);
    }
    let sequence: Vec<_> = SequenceHash::chain(&locals).map(|hash| hash.0).collect();
    let locals: Vec<_> = locals.iter().map(|hash| hash.0).collect();

    assert_eq!(isolation.seed(), number(&vector["seed"]), "seed of {name}");
    assert_eq!(locals, numbers(&vector["local_hashes"]), "local hashes of {name}");
    assert_eq!(sequence, numbers(&vector["sequence_hashes"]), "sequence hashes of {name}");
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn numbers(value: &Value) -> Vec<u64> {
    list(value).iter().map(number).collect()
}

/// Hashes are decimal strings in the file, the rest are integers.
fn number(value: &Value) -> u64 {
    value.as_u64().or_else(|| value.as_str()?.parse().ok()).unwrap_or_else(|| panic!("{value} is no u64"))
}

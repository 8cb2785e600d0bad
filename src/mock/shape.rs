//! What happened to the caches, as the bytes that an engine sends.

use std::sync::Arc;

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use crate::block::Tier;
use crate::ids::{DpRank, Moment};
use crate::mock::config::{Encoding, EngineConfig, Shape};
use crate::mock::page::{Naming, Page, WireHash};

/// A change of a cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Change {
    /// Pages that follow each other were cached.
    Stored {
        /// Where.
        tier: Tier,
        /// Head to tail.
        pages: Vec<Arc<Page>>,
    },
    /// A copy of a page is gone.
    Removed {
        /// From where.
        tier: Tier,
        /// Which.
        key: u64,
    },
    /// Everything is gone.
    Cleared,
}

/// Writes the payload of one batch: `[ts, events, dp_rank]`, `ts` being `at` in seconds.
pub fn payload(
    config: &EngineConfig,
    naming: Naming,
    dp_rank: DpRank,
    at: Moment,
    changes: &[Change],
) -> Vec<u8> {
    let writer = Writer { config, naming };
    let events = match config.shape {
        Shape::Vllm => writer.one_by_one(changes),
        Shape::Sglang => writer.merged(changes),
    };
    let mut bytes = Vec::new();
    let batch = (at.as_micros() as f64 / 1e6, events, dp_rank.0);
    // A vector takes all bytes, and every length is known beforehand: nothing here can fail.
    let written = batch.serialize(&mut rmp_serde::Serializer::new(&mut bytes));
    debug_assert!(written.is_ok(), "{written:?}");
    bytes
}

struct Writer<'a> {
    config: &'a EngineConfig,
    naming: Naming,
}

impl Writer<'_> {
    /// vLLM: an event per change.
    fn one_by_one(&self, changes: &[Change]) -> Vec<Event> {
        let event = |change: &Change| match change {
            Change::Stored { tier, pages } => self.stored(*tier, pages.iter()),
            Change::Removed { tier, key } => self.removed(*tier, &[*key]),
            Change::Cleared => Event::new(self.config, "AllBlocksCleared"),
        };
        changes.iter().map(event).collect()
    }

    /// SGLang: neighbours of one kind and tier share an event, stores only if they continue the chain.
    fn merged(&self, changes: &[Change]) -> Vec<Event> {
        let mut events = Vec::new();
        let mut rest = changes;
        while let Some(first) = rest.first() {
            let (event, taken) = match first {
                Change::Stored { tier, .. } => {
                    let (pages, taken) = chain(rest, *tier);
                    (self.stored(*tier, pages.into_iter()), taken)
                }
                Change::Removed { tier, .. } => {
                    let keys: Vec<u64> = rest
                        .iter()
                        .map_while(|change| match change {
                            Change::Removed { tier: of, key } if of == tier => Some(*key),
                            _ => None,
                        })
                        .collect();
                    (self.removed(*tier, &keys), keys.len())
                }
                Change::Cleared => (Event::new(self.config, "AllBlocksCleared"), 1),
            };
            events.push(event);
            rest = &rest[taken..];
        }
        events
    }

    fn stored<'p>(&self, tier: Tier, pages: impl Iterator<Item = &'p Arc<Page>> + Clone) -> Event {
        let vllm = self.config.shape == Shape::Vllm;
        let hashes = pages.clone().map(|page| self.naming.wire(page.key)).collect::<Vec<_>>();
        let parent = pages.clone().next().and_then(|page| page.parent);
        let tokens = pages.flat_map(|page| page.tokens.iter().copied()).collect();
        let count = hashes.len();
        let mut event = Event::new(self.config, "BlockStored");
        event.field("block_hashes", Field::Hashes(hashes));
        event.field("parent_block_hash", parent.map_or(Field::Nil, |key| Field::Hash(self.naming.wire(key))));
        event.field("token_ids", Field::Tokens(tokens));
        event.field("block_size", Field::Number(self.config.block_size.get()));
        event.field("lora_id", Field::Nil);
        event.field("medium", Field::Text(self.medium(tier)));
        if vllm {
            event.field("lora_name", Field::Nil);
            // The pool sends one empty entry per block, the host tier nothing at all.
            event.field("extra_keys", if tier == Tier::Device { Field::Nils(count) } else { Field::Left });
            event.field("group_idx", Field::Number(0));
            event.field("kv_cache_spec_kind", Field::Text("full_attention"));
            event.field("kv_cache_spec_sliding_window", Field::Left);
        }
        event
    }

    fn removed(&self, tier: Tier, keys: &[u64]) -> Event {
        let mut event = Event::new(self.config, "BlockRemoved");
        event.field("block_hashes", Field::Hashes(keys.iter().map(|key| self.naming.wire(*key)).collect()));
        event.field("medium", Field::Text(self.medium(tier)));
        if self.config.shape == Shape::Vllm {
            event.field("group_idx", Field::Number(0));
        }
        event
    }

    fn medium(&self, tier: Tier) -> &'static str {
        match (tier, self.config.shape) {
            (Tier::Device, _) => "GPU",
            (_, Shape::Vllm) => "CPU",
            (_, Shape::Sglang) => "CPU_PINNED",
        }
    }
}

/// The pages of the leading stores that continue one chain on one tier, and how many stores these are.
fn chain(changes: &[Change], tier: Tier) -> (Vec<&Arc<Page>>, usize) {
    let mut all: Vec<&Arc<Page>> = Vec::new();
    let mut taken = 0;
    for change in changes {
        let Change::Stored { tier: of, pages } = change else { break };
        let parent = pages.first().and_then(|page| page.parent);
        let continues = all.last().is_none_or(|last| Some(last.key) == parent);
        if *of != tier || !continues {
            break;
        }
        all.extend(pages);
        taken += 1;
    }
    (all, taken)
}

/// An event's fields in the order of the wire.
#[derive(Debug)]
struct Event {
    encoding: Encoding,
    tag: &'static str,
    fields: Vec<(&'static str, Field)>,
}

#[derive(Debug)]
enum Field {
    Hashes(Vec<WireHash>),
    Hash(WireHash),
    Tokens(Vec<u32>),
    Number(u32),
    Text(&'static str),
    Nil,
    Nils(usize),
    /// At its default: left out of a map, nil in an array.
    Left,
}

impl Event {
    fn new(config: &EngineConfig, tag: &'static str) -> Self {
        Self { encoding: config.encoding, tag, fields: Vec::new() }
    }

    fn field(&mut self, name: &'static str, value: Field) {
        self.fields.push((name, value));
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.encoding {
            Encoding::Array => {
                let mut list = to.serialize_seq(Some(1 + self.fields.len()))?;
                list.serialize_element(self.tag)?;
                self.fields.iter().try_for_each(|(_, value)| list.serialize_element(value))?;
                list.end()
            }
            Encoding::Map => {
                let fields = || self.fields.iter().filter(|(_, value)| !matches!(value, Field::Left));
                let mut map = to.serialize_map(Some(1 + fields().count()))?;
                map.serialize_entry("type", self.tag)?;
                fields().try_for_each(|(name, value)| map.serialize_entry(name, value))?;
                map.end()
            }
        }
    }
}

impl Serialize for Field {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Hashes(hashes) => to.collect_seq(hashes),
            Self::Hash(hash) => hash.serialize(to),
            Self::Tokens(tokens) => to.collect_seq(tokens),
            Self::Number(number) => to.serialize_u32(*number),
            Self::Text(text) => to.serialize_str(text),
            Self::Nil | Self::Left => to.serialize_unit(),
            Self::Nils(count) => to.collect_seq(vec![(); *count]),
        }
    }
}

impl Serialize for WireHash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Unsigned(hash) => to.serialize_u64(*hash),
            Self::Signed(hash) => to.serialize_i64(*hash),
            Self::Bytes(bytes) => to.serialize_bytes(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::{Value, json};

    use super::*;
    use crate::block::BlockSize;
    use crate::mock::config::{HashKind, HashSeed};

    fn config(shape: Shape, encoding: Encoding) -> EngineConfig {
        let block_size = BlockSize::new(2).unwrap();
        EngineConfig { shape, encoding, block_size, hash_seed: HashSeed::Fixed(7), ..EngineConfig::default() }
    }

    /// The batch as generic values, and the names of its four pages.
    fn batch(config: &EngineConfig, changes: impl Fn(&[Arc<Page>]) -> Vec<Change>) -> (Value, Vec<Value>) {
        let naming = Naming::new(config, 0, 0);
        let mut pages = Vec::new();
        naming.extend(&mut pages, &[1, 2, 3, 4, 5, 6, 7, 8], config.block_size);
        let bytes = payload(config, naming, DpRank(3), Moment::from_millis(1_500), &changes(&pages));
        let names = pages.iter().map(|page| match naming.wire(page.key) {
            WireHash::Unsigned(hash) => json!(hash),
            WireHash::Signed(hash) => json!(hash),
            WireHash::Bytes(bytes) => json!(bytes),
        });
        (rmp_serde::from_slice(&bytes).unwrap(), names.collect())
    }

    fn story(pages: &[Arc<Page>]) -> Vec<Change> {
        let stored =
            |tier, range: std::ops::Range<usize>| Change::Stored { tier, pages: pages[range].to_vec() };
        let removed = |tier, at: usize| Change::Removed { tier, key: pages[at].key };
        vec![
            Change::Cleared,
            stored(Tier::Device, 0..1),
            stored(Tier::Device, 1..3),
            stored(Tier::Device, 1..2),
            stored(Tier::Host, 2..3),
            removed(Tier::Device, 2),
            removed(Tier::Device, 1),
            removed(Tier::Host, 2),
        ]
    }

    #[test]
    fn vllm_maps_have_the_fields_of_0_33() {
        let (batch, name) = batch(&config(Shape::Vllm, Encoding::Map), story);
        let stored = |hashes: &[usize], parent: Value, tokens: &[u32]| {
            json!({
                "type": "BlockStored", "block_hashes": hashes.iter().map(|at| &name[*at]).collect::<Vec<_>>(),
                "parent_block_hash": parent, "token_ids": tokens, "block_size": 2, "lora_id": null,
                "medium": "GPU", "lora_name": null, "extra_keys": vec![Value::Null; hashes.len()],
                "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            })
        };
        let removed = |at: usize, medium: &str| json!({"type": "BlockRemoved", "block_hashes": [name[at]], "medium": medium, "group_idx": 0});
        let events = json!([
            {"type": "AllBlocksCleared"},
            stored(&[0], Value::Null, &[1, 2]),
            stored(&[1, 2], name[0].clone(), &[3, 4, 5, 6]),
            stored(&[1], name[0].clone(), &[3, 4]),
            {
                "type": "BlockStored", "block_hashes": [name[2]], "parent_block_hash": name[1],
                "token_ids": [5, 6], "block_size": 2, "lora_id": null, "medium": "CPU", "lora_name": null,
                "group_idx": 0, "kv_cache_spec_kind": "full_attention",
            },
            removed(2, "GPU"), removed(1, "GPU"), removed(2, "CPU"),
        ]);
        assert_eq!(batch, json!([1.5, events, 3]));
        assert!(name.iter().all(Value::is_u64));
    }

    #[test]
    fn vllm_arrays_have_the_places_of_0_23() {
        let (batch, name) = batch(&config(Shape::Vllm, Encoding::Array), story);
        let kind = "full_attention";
        let events = json!([
            ["AllBlocksCleared"],
            ["BlockStored", [name[0]], null, [1, 2], 2, null, "GPU", null, [null], 0, kind, null],
            [
                "BlockStored",
                [name[1], name[2]],
                name[0],
                [3, 4, 5, 6],
                2,
                null,
                "GPU",
                null,
                [null, null],
                0,
                kind,
                null
            ],
            ["BlockStored", [name[1]], name[0], [3, 4], 2, null, "GPU", null, [null], 0, kind, null],
            ["BlockStored", [name[2]], name[1], [5, 6], 2, null, "CPU", null, null, 0, kind, null],
            ["BlockRemoved", [name[2]], "GPU", 0],
            ["BlockRemoved", [name[1]], "GPU", 0],
            ["BlockRemoved", [name[2]], "CPU", 0],
        ]);
        assert_eq!(batch, json!([1.5, events, 3]));
    }

    #[test]
    fn sglang_merges_neighbours_of_one_chain_and_tier() {
        let (map, name) = batch(&config(Shape::Sglang, Encoding::Map), story);
        let stored = |hashes: &[usize], parent: &Value, tokens: &[u32], medium: &str| {
            json!({
                "type": "BlockStored", "block_hashes": hashes.iter().map(|at| &name[*at]).collect::<Vec<_>>(),
                "parent_block_hash": parent, "token_ids": tokens, "block_size": 2, "lora_id": null,
                "medium": medium,
            })
        };
        let removed = |hashes: &[usize], medium: &str| {
            let hashes: Vec<_> = hashes.iter().map(|at| &name[*at]).collect();
            json!({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})
        };
        let events = json!([
            {"type": "AllBlocksCleared"},
            stored(&[0, 1, 2], &Value::Null, &[1, 2, 3, 4, 5, 6], "GPU"),
            stored(&[1], &name[0], &[3, 4], "GPU"),
            stored(&[2], &name[1], &[5, 6], "CPU_PINNED"),
            removed(&[2, 1], "GPU"), removed(&[2], "CPU_PINNED"),
        ]);
        assert_eq!(map, json!([1.5, events, 3]));
        let naming = Naming::new(&config(Shape::Sglang, Encoding::Map), 0, 0);
        assert_eq!(naming.wire(u64::MAX), WireHash::Signed(-1));
        let (array, _) = batch(&config(Shape::Sglang, Encoding::Array), story);
        let first =
            json!(["BlockStored", [name[0], name[1], name[2]], null, [1, 2, 3, 4, 5, 6], 2, null, "GPU"]);
        assert_eq!(array[1][1], first);
        assert_eq!(array[1][4], json!(["BlockRemoved", [name[2], name[1]], "GPU"]));
    }

    #[test]
    fn names_of_bytes_are_binary_and_are_read_back() {
        let config = EngineConfig { hash: HashKind::Bytes, ..config(Shape::Vllm, Encoding::Map) };
        let naming = Naming::new(&config, 0, 0);
        let mut pages = Vec::new();
        naming.extend(&mut pages, &[1, 2, 3, 4], config.block_size);
        let changes = [Change::Stored { tier: Tier::Device, pages: pages.clone() }];
        let bytes = payload(&config, naming, DpRank(0), Moment::default(), &changes);
        let batch = crate::events::decode_batch(&bytes, &crate::events::Limits::default()).unwrap();
        let [crate::events::KvEvent::Stored(stored)] = &batch.events[..] else { unreachable!() };
        let published: Vec<_> = pages.iter().map(|page| naming.published(page.key)).collect();
        assert_eq!(stored.block_hashes, published);
        assert!(matches!(&published[0], crate::block::BlockHash::Bytes(bytes) if bytes.len() == 16));
    }

    #[test]
    fn drawn_seeds_differ_by_rank_and_process_and_fixed_ones_do_not() {
        let of = |seed, rank, generation| {
            let config = EngineConfig { hash_seed: seed, ..config(Shape::Vllm, Encoding::Map) };
            let naming = Naming::new(&config, rank, generation);
            let mut pages = Vec::new();
            naming.extend(&mut pages, &[1, 2], config.block_size);
            pages[0].key
        };
        assert_eq!(of(HashSeed::Fixed(1), 0, 0), of(HashSeed::Fixed(1), 1, 1));
        assert_ne!(of(HashSeed::Fixed(1), 0, 0), of(HashSeed::Fixed(2), 0, 0));
        let drawn =
            [(0, 0), (0, 1), (1, 0)].map(|(rank, generation)| of(HashSeed::PerProcess(1), rank, generation));
        assert!(drawn[0] != drawn[1] && drawn[1] != drawn[2] && drawn[0] != drawn[2]);
    }
}

//! Overlap queries, by tokens and by one rank's own hashes.

use std::collections::BTreeMap;

use rankwise::block::{BlockHash, ContentKey, ContentKeys};
use rankwise::ids::RankKey;
use rankwise::routing::{Prompt, PromptForm};
use serde_json::Value;

use super::expect::same_counts;
use super::reading::{Fields, Run, fail, hash, list, not_runnable, tokens};
use super::stage::Stage;

impl Stage {
    pub(super) fn query(&mut self, step: &Value) -> Run {
        let known = [
            "tokens",
            "block_hashes",
            "worker_hashes",
            "lora_name",
            "cache_salt",
            "extra_keys",
            "tier",
            "expect",
        ];
        let step = Fields::only("query", step, &known)?;
        let found = match (step.get("tokens"), step.get("block_hashes")) {
            (Some(tokens), None) => self.by_tokens(tokens, &step)?,
            (None, Some(hashes)) => self.by_hashes(hashes, &step)?,
            _ => return fail("a query has either tokens or block hashes"),
        };
        same_counts("overlap", found, step.need("expect")?)
    }

    fn by_tokens(&mut self, ids: &Value, step: &Fields<'_>) -> Run<BTreeMap<RankKey, u64>> {
        let ids = tokens(ids)?;
        let content = Content::read(step)?;
        let prompt = content.prompt(&ids);
        let tier = step.text("tier")?.unwrap_or("device");
        if !["device", "host", "disk", "any"].contains(&tier) {
            return not_runnable(format!("query with tier {tier}"));
        }
        let Some(pool) = self.pool() else { return Ok(BTreeMap::new()) };
        let overlaps = self.router.overlap(&pool, &prompt, None, &mut self.scratch);
        let reach = |slot| {
            overlaps.of(slot).map_or(0, |overlap| match tier {
                "device" => overlap.device,
                "host" => overlap.host,
                _ => overlap.disk,
            })
        };
        Ok(pool.ranks().map(|(_, rank)| (rank.plan.rank.clone(), reach(rank.slot).into())).collect())
    }

    /// The hashes are names of one rank: they say nothing about any other.
    fn by_hashes(&self, hashes: &Value, step: &Fields<'_>) -> Run<BTreeMap<RankKey, u64>> {
        for key in ["lora_name", "cache_salt", "extra_keys", "tier"] {
            if step.get(key).is_some_and(|value| key != "tier" || value != "device") {
                return not_runnable(format!("query by block_hashes with {key}"));
            }
        }
        let Some(of) = step.object("worker_hashes")? else {
            return not_runnable("query by block_hashes without worker_hashes");
        };
        let names: Vec<BlockHash> = list("block_hashes", hashes)?.iter().map(name).collect::<Run<_>>()?;
        let rank = of.rank()?;
        let pool = self.pool();
        let view = pool.as_ref().and_then(|pool| pool.ranks().find(|(_, view)| view.plan.rank == rank));
        let blocks =
            pool.as_ref().zip(view).map(|(pool, (_, view))| pool.index.overlap_by_names(view.slot, &names));
        Ok(BTreeMap::from([(rank, blocks.unwrap_or(0).into())]))
    }
}

fn name(value: &Value) -> Run<BlockHash> {
    match hash(value) {
        Some(number) if number.is_u64() => Ok(BlockHash::Int(number.as_u64().unwrap_or_default())),
        Some(number) => Ok(BlockHash::from_i64(number.as_i64().unwrap_or_default())),
        None => fail(format!("no hash: {value}")),
    }
}

/// What belongs to a prompt's content beside its tokens.
struct Content {
    lora_name: Option<String>,
    cache_salt: Option<String>,
    keys: Vec<ContentKeys>,
}

impl Content {
    /// `extra_keys` are written as an engine writes them: one entry per block, null or a list, in which a
    /// leading adapter name says nothing new and the first block's last bare text is the salt.
    fn read(step: &Fields<'_>) -> Run<Self> {
        let lora_name = step.text("lora_name")?.map(str::to_owned);
        let mut cache_salt = step.text("cache_salt")?.map(str::to_owned);
        let mut keys = Vec::new();
        let given = step.get("extra_keys").map(|keys| list("extra_keys", keys)).transpose()?.unwrap_or(&[]);
        for (block, entries) in given.iter().enumerate() {
            let entries = if entries.is_null() { &[] } else { list("extra_keys", entries)? };
            let entries = match entries.split_first() {
                Some((first, rest)) if first.is_string() && first.as_str() == lora_name.as_deref() => rest,
                _ => entries,
            };
            let salt_at = if block == 0 { entries.iter().rposition(is_salt) } else { None };
            if let Some(salt) = salt_at.and_then(|at| entries[at].as_str()) {
                let salt = salt.strip_prefix("dynamo-cache-salt:").unwrap_or(salt);
                cache_salt.get_or_insert_with(|| salt.to_owned());
            }
            let others = entries.iter().enumerate().filter(|(at, _)| Some(*at) != salt_at);
            keys.push(others.map(|(_, entry)| content_key(entry)).collect::<Run<ContentKeys>>()?);
        }
        Ok(Self { lora_name, cache_salt, keys })
    }

    fn prompt<'a>(&'a self, ids: &'a [u32]) -> Prompt<'a> {
        Prompt {
            form: PromptForm::Tokens { ids, eagle: false },
            lora_name: self.lora_name.as_deref(),
            lora_id: None,
            cache_salt: self.cache_salt.as_deref(),
            mm: &[],
            keys: &self.keys,
        }
    }
}

fn is_salt(entry: &Value) -> bool {
    let digest = |text: &str| text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    entry.as_str().is_some_and(|text| !digest(text))
}

fn content_key(entry: &Value) -> Run<ContentKey> {
    match entry {
        Value::String(text) => Ok(ContentKey::Multimodal { identifier: text.as_str().into(), offset: None }),
        Value::Number(number) if number.is_i64() => {
            let bytes = number.as_i64().unwrap_or_default().to_le_bytes();
            Ok(ContentKey::Opaque(bytes.as_slice().into()))
        }
        Value::Array(pair) if pair.len() == 2 && pair[0].is_string() && pair[1].is_i64() => {
            let identifier = pair[0].as_str().unwrap_or_default().into();
            Ok(ContentKey::Multimodal { identifier, offset: pair[1].as_i64() })
        }
        other => fail(format!("no extra key: {other}")),
    }
}

//! From what an engine wrote beside its tokens to what a block's content is.
//!
//! Engines tag nothing: adapter, image, salt and digest stand in one list, told apart by shape and place
//! (vLLM 0.17 to 0.33).

use crate::block::{ContentKey, ContentKeys, Isolation};
use crate::events::{BlockStored, ExtraKey};

/// How Dynamo marks salts that pass through it; the salt itself follows.
const DYNAMO_SALT_PREFIX: &str = "dynamo-cache-salt:";

/// The namespace that a store starts, and the content keys of each of its blocks.
///
/// The namespace counts for a parentless store alone: a continuation inherits its parent's.
pub(super) fn identity(event: &BlockStored, keys: &mut Vec<ContentKeys>) -> Isolation {
    keys.clear();
    let starts_prompt = event.parent_block_hash.is_none();
    let mut salt = event.cache_salt.as_deref();
    for (at, entries) in event.extra_keys.iter().enumerate() {
        let own = without_adapter(event, entries);
        let salted = if starts_prompt && at == 0 { last_bare_text(own) } else { None };
        if let Some((_, text)) = salted {
            salt = salt.or(Some(text));
        }
        keys.push(content_keys(own, salted.map(|(at, _)| at)));
    }
    if keys.iter().all(|keys| keys.is_empty()) {
        keys.clear();
    }
    let salt = salt.map(|salt| salt.strip_prefix(DYNAMO_SALT_PREFIX).unwrap_or(salt));
    match (event.lora_name.as_deref(), event.lora_id) {
        (Some(name), _) if !name.is_empty() => Isolation::new(Some(name), salt),
        (_, Some(id)) => Isolation::unnamed_lora(id, salt),
        _ => Isolation::new(None, salt),
    }
}

/// A leading entry that repeats the event's adapter says nothing new.
fn without_adapter<'a>(event: &BlockStored, entries: &'a [ExtraKey]) -> &'a [ExtraKey] {
    match entries.split_first() {
        Some((ExtraKey::Text(name), rest)) if event.lora_name.as_deref() == Some(name) => rest,
        Some((ExtraKey::Int(id), rest)) if event.lora_id == Some(*id) => rest,
        _ => entries,
    }
}

fn last_bare_text(entries: &[ExtraKey]) -> Option<(usize, &str)> {
    entries.iter().enumerate().rev().find_map(|(at, entry)| match entry {
        ExtraKey::Text(text) if !is_digest(text) => Some((at, text.as_str())),
        _ => None,
    })
}

/// vLLM names an image by the hex digits of a 256-bit digest.
fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn content_keys(entries: &[ExtraKey], salt_at: Option<usize>) -> ContentKeys {
    let mut keys: ContentKeys = entries
        .iter()
        .enumerate()
        .filter(|(at, _)| Some(*at) != salt_at)
        .map(|(_, entry)| match entry {
            ExtraKey::Located(identifier, offset) => {
                ContentKey::Multimodal { identifier: identifier.as_str().into(), offset: Some(*offset) }
            }
            ExtraKey::Text(identifier) => {
                ContentKey::Multimodal { identifier: identifier.as_str().into(), offset: None }
            }
            ExtraKey::Bytes(digest) => ContentKey::Opaque(digest.as_slice().into()),
            ExtraKey::Int(number) => ContentKey::Opaque(number.to_le_bytes().as_slice().into()),
        })
        .collect();
    keys.sort();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Tier;
    use crate::events::EventTokens;

    fn stored(lora: Option<&str>, parent: bool, extra_keys: Vec<Vec<ExtraKey>>) -> BlockStored {
        BlockStored {
            block_hashes: Vec::new(),
            parent_block_hash: parent.then_some(crate::block::BlockHash::Int(1)),
            tokens: EventTokens::Ids(Vec::new()),
            block_size: 16,
            lora_id: lora.map(|_| 7),
            lora_name: lora.map(str::to_owned),
            cache_salt: None,
            tier: Tier::Device,
            group_idx: None,
            attention: None,
            extra_keys,
            lookahead: Vec::new(),
        }
    }

    fn text(text: &str) -> ExtraKey {
        ExtraKey::Text(text.to_owned())
    }

    #[test]
    fn the_last_bare_string_of_a_prompts_first_entry_is_the_salt() {
        let image = ExtraKey::Located("img-a".to_owned(), 4);
        let event =
            stored(Some("sql"), false, vec![vec![text("sql"), image, text("tenant-1")], vec![text("sql")]]);
        let mut keys = Vec::new();
        assert_eq!(identity(&event, &mut keys), Isolation::new(Some("sql"), Some("tenant-1")));
        assert_eq!(keys[0].len(), 1);
        assert!(keys[1].is_empty());
    }

    #[test]
    fn a_digest_is_an_image_and_a_continuation_has_no_salt() {
        let digest = "ab".repeat(32);
        let mut keys = Vec::new();
        let first = stored(None, false, vec![vec![text(&digest)]]);
        assert_eq!(identity(&first, &mut keys), Isolation::default());
        assert_eq!(keys[0].len(), 1);
        let behind = stored(None, true, vec![vec![text("img-a")]]);
        assert_eq!(identity(&behind, &mut keys), Isolation::default());
        assert_eq!(keys[0].len(), 1);
    }

    #[test]
    fn dynamos_mark_is_not_part_of_the_salt() {
        let event = stored(None, false, vec![vec![text("dynamo-cache-salt:t1")]]);
        assert_eq!(identity(&event, &mut Vec::new()), Isolation::new(None, Some("t1")));
    }

    #[test]
    fn entries_without_keys_cost_nothing() {
        let mut keys = Vec::new();
        identity(&stored(None, false, vec![Vec::new(), Vec::new()]), &mut keys);
        assert!(keys.is_empty());
    }
}

//! From what an engine wrote beside its tokens to what a block's content is.
//!
//! Engines tag nothing: adapter, image, salt and digest stand in one list, told apart by shape and place
//! (vLLM 0.17 to 0.33).

use crate::block::{BlockHash, ContentKey, ContentKeys, Isolation};
use crate::events::{BlockStored, EventTokens, ExtraKey};
use crate::index::StoreTokens;

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

/// Blocks of a store whose names cover equally much.
pub(super) struct Part<'a> {
    pub(super) names: &'a [BlockHash],
    pub(super) parent: Option<&'a BlockHash>,
    pub(super) tokens: StoreTokens<'a>,
    pub(super) keys: &'a [ContentKeys],
}

impl<'a> Part<'a> {
    /// The store as one; tokens behind the blocks are not looked at.
    pub(super) fn whole(event: &'a BlockStored, keys: &'a [ContentKeys]) -> Self {
        let tokens = match &event.tokens {
            // No engine sends both, so what the names cover is not known.
            EventTokens::Pairs(_) if !event.lookahead.is_empty() => StoreTokens::Unusable,
            EventTokens::Pairs(tokens) => {
                let stride = event.block_size as usize;
                StoreTokens::Windows { tokens, len: stride.saturating_add(1), stride }
            }
            EventTokens::Ids(tokens) => StoreTokens::Ids(tokens),
            EventTokens::Unusable => StoreTokens::Unusable,
        };
        Self { names: &event.block_hashes, parent: event.parent_block_hash.as_ref(), tokens, keys }
    }
}

/// A store in parts of which each has as many tokens behind every block. Where names cover no tokens behind their
/// blocks that is the whole of it, and so where names and tokens do not line up.
///
/// A block's content is all that its name covers. With one token behind it that is the window that EAGLE queries
/// hash. Queries hash no longer windows, so blocks with more tokens behind them are credited to none.
pub(super) fn in_parts<'a>(
    event: &'a BlockStored,
    keys: &'a [ContentKeys],
    windows: &mut Vec<u32>,
    mut apply: impl FnMut(&Part<'_>),
) {
    let names = &event.block_hashes;
    let size = event.block_size as usize;
    let ids = match &event.tokens {
        EventTokens::Ids(ids) if !event.lookahead.is_empty() => ids,
        _ => return apply(&Part::whole(event, keys)),
    };
    if size == 0 || names.len().checked_mul(size) != Some(ids.len()) {
        return apply(&Part::whole(event, keys));
    }
    let mut from = 0;
    for of_one_length in event.lookahead.chunk_by(|one, next| one.len() == next.len()) {
        let to = from + of_one_length.len();
        let len = size + of_one_length.first().map_or(0, Vec::len);
        windows.clear();
        for (block, behind) in ids[from * size..to * size].chunks_exact(size).zip(of_one_length) {
            windows.extend_from_slice(block);
            windows.extend_from_slice(behind);
        }
        let tokens = match len == size {
            true => StoreTokens::Ids(windows),
            false => StoreTokens::Windows { tokens: windows, len, stride: len },
        };
        let parent = from.checked_sub(1).map_or(event.parent_block_hash.as_ref(), |at| names.get(at));
        let keys = keys.get(from..to.min(keys.len())).unwrap_or_default();
        apply(&Part { names: &names[from..to], parent, tokens, keys });
        from = to;
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
            parent_block_hash: parent.then_some(BlockHash::Int(1)),
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

    /// I11: a store falls apart where its names begin to cover more or fewer tokens; each part hangs behind the last.
    #[test]
    fn a_store_falls_into_parts_of_equal_cover() {
        let mut event = stored(None, false, Vec::new());
        event.block_size = 2;
        event.block_hashes = (1..=4).map(BlockHash::Int).collect();
        event.tokens = EventTokens::Ids((0..8).collect());
        let of = |event: &BlockStored| {
            let (mut parts, mut windows) = (Vec::new(), Vec::new());
            in_parts(event, &[], &mut windows, |part| {
                let tokens = match part.tokens {
                    StoreTokens::Ids(ids) => (ids.to_vec(), 0),
                    StoreTokens::Windows { tokens, len, stride } => {
                        assert_eq!(len, stride);
                        (tokens.to_vec(), len)
                    }
                    _ => (Vec::new(), usize::MAX),
                };
                parts.push((part.names.to_vec(), part.parent.cloned(), tokens));
            });
            parts
        };
        let names = |names: std::ops::RangeInclusive<u64>| names.map(BlockHash::Int).collect::<Vec<_>>();
        assert_eq!(of(&event), [(names(1..=4), None, ((0..8).collect(), 0))]);
        event.lookahead = vec![vec![2], vec![4], vec![], vec![8, 9]];
        let expected = [
            (names(1..=2), None, (vec![0, 1, 2, 2, 3, 4], 3)),
            (names(3..=3), Some(BlockHash::Int(2)), (vec![4, 5], 0)),
            (names(4..=4), Some(BlockHash::Int(3)), (vec![6, 7, 8, 9], 4)),
        ];
        assert_eq!(of(&event), expected);
        // What does not line up is for the index to refuse.
        event.tokens = EventTokens::Ids((0..7).collect());
        assert_eq!(of(&event), [(names(1..=4), None, ((0..7).collect(), 0))]);
    }
}

//! Made-up batches as vLLM writes them.

use serde::Serialize;

use super::traffic::{PoolBatch, PoolEvent, tokens_of};
use crate::block::BlockSize;

/// An event in the map form of vLLM from 0.24 on.
#[derive(Serialize)]
#[serde(tag = "type")]
enum WireEvent<'a> {
    BlockStored {
        block_hashes: &'a [u64],
        parent_block_hash: Option<u64>,
        token_ids: Vec<u32>,
        block_size: u32,
        lora_id: Option<i64>,
        medium: &'static str,
        lora_name: Option<&'static str>,
    },
    BlockRemoved {
        block_hashes: &'a [u64],
        medium: &'static str,
    },
}

/// The payload of a batch: msgpack, events as maps. `ts` is the engine host's Unix time in seconds.
#[allow(clippy::expect_used, reason = "numbers and lists into a growing buffer can be written")]
pub fn payload(batch: &PoolBatch, block_size: BlockSize, ts: f64) -> Vec<u8> {
    let events: Vec<WireEvent<'_>> = batch
        .events
        .iter()
        .map(|event| match event {
            PoolEvent::Stored { parent, names, contents } => {
                let mut token_ids = Vec::with_capacity(contents.len() * block_size.as_usize());
                tokens_of(contents.iter().copied(), block_size, &mut token_ids);
                WireEvent::BlockStored {
                    block_hashes: names,
                    parent_block_hash: *parent,
                    token_ids,
                    block_size: block_size.get(),
                    lora_id: None,
                    medium: "GPU",
                    lora_name: None,
                }
            }
            PoolEvent::Removed { names } => WireEvent::BlockRemoved { block_hashes: names, medium: "GPU" },
        })
        .collect();
    let written = rmp_serde::to_vec_named(&(ts, events, batch.rank));
    // Plain numbers and lists, into a buffer that grows: nothing can fail.
    written.expect("numbers and lists can be written")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;
    use crate::block::BlockHash;
    use crate::events::{EventTokens, KvEvent, Limits, decode_batch};

    #[test]
    fn what_is_written_is_read() {
        let events = vec![
            PoolEvent::Removed { names: vec![u64::MAX, 3] },
            PoolEvent::Stored { parent: Some(7), names: vec![8, 9], contents: vec![1, 2] },
        ];
        let batch = PoolBatch { rank: 5, events, conversation: 0 };
        let read =
            decode_batch(&payload(&batch, BlockSize::new(4).unwrap(), 1.5), &Limits::default()).unwrap();
        assert_eq!((read.ts, read.dp_rank, read.skipped.total()), (Some(1.5), Some(5), 0));
        let [KvEvent::Removed(removed), KvEvent::Stored(stored)] = &read.events[..] else {
            panic!("{read:?}")
        };
        assert_eq!(removed.block_hashes, [BlockHash::Int(u64::MAX), BlockHash::Int(3)]);
        assert_eq!(stored.parent_block_hash, Some(BlockHash::Int(7)));
        assert_eq!(stored.block_hashes, [BlockHash::Int(8), BlockHash::Int(9)]);
        assert!(matches!(&stored.tokens, EventTokens::Ids(ids) if ids.len() == 8));
    }
}

//! Events in the form that all of Dynamo's trees take.

use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};

use crate::workload::blocks::{Blocks, Event};

/// The event as Dynamo's router passes it on.
pub fn router_event(blocks: &Blocks, event: &Event) -> RouterEvent {
    let name = |rank, block| ExternalSequenceBlockHash(blocks.name(rank, block));
    let (rank, data) = match event {
        Event::Stored { rank, parent, blocks: stored } => {
            let stored = stored.iter().map(|&block| KvCacheStoredBlockData {
                block_hash: name(*rank, block),
                tokens_hash: LocalBlockHash(blocks.local(block)),
                mm_extra_info: None,
            });
            let data = KvCacheStoreData {
                parent_hash: parent.map(|parent| name(*rank, parent)),
                start_position: None,
                blocks: stored.collect(),
            };
            (*rank, KvCacheEventData::Stored(data))
        }
        Event::Removed { rank, blocks: removed } => {
            let block_hashes = removed.iter().map(|&block| name(*rank, block)).collect();
            (*rank, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
        }
        Event::Cleared { rank } => (*rank, KvCacheEventData::Cleared),
    };
    RouterEvent::new(u64::from(rank), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

/// The scores by rank.
pub fn scores(scores: &OverlapScores, into: &mut Vec<(u32, u32)>) {
    into.clear();
    into.extend(scores.scores.iter().map(|(worker, &score)| (worker.worker_id as u32, score)));
}

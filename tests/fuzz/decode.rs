//! Any payload: no panic, and both decoders give one answer, under wide limits and under tight ones.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rankwise::block::MediumMap;
use rankwise::events::{EventBatch, Limits, decode_batch, decode_batch_fast, peek_ts};

fuzz_target!(|payload: &[u8]| {
    let tight = Limits {
        payload_bytes: 1 << 20,
        events: 3,
        hashes: 2,
        tokens: 4,
        extra_keys: 3,
        extra_key_bytes: 8,
        string_bytes: 4,
        names: 5,
        media: MediumMap::default(),
    };
    // The second time it is a batch whose buffers were used.
    let mut fast = EventBatch::default();
    for limits in [Limits::default(), tight] {
        let record = decode_batch(payload, &limits);
        let outcome = decode_batch_fast(payload, &limits, &mut fast);
        assert_eq!(outcome.map(|()| fast.clone()), record);
        if let (Ok(batch), Some(0x90..=0x9f | 0xdc | 0xdd)) = (record, payload.first()) {
            assert_eq!(peek_ts(payload), batch.ts);
        }
    }
});

//! Frames and payloads as they are on the wire: recorded, written by hand, and hostile.

mod agree;
mod captures;
mod golden;
mod hostile;
mod pack;

use rankwise::events::{DecodeError, EventBatch, Limits, decode_batch, decode_batch_fast};

/// Decodes by both decoders, which must agree. The fast one gets a batch that was in use before.
fn decode_with(payload: &[u8], limits: &Limits) -> Result<EventBatch, DecodeError> {
    let mut used = EventBatch::default();
    decode_batch_fast(USED, limits, &mut used).ok();
    let record = decode_batch(payload, limits);
    let fast = decode_batch_fast(payload, limits, &mut used).map(|()| used);
    assert_eq!(fast, record, "the decoders differ on {payload:02x?}");
    record
}

fn decode(payload: &[u8]) -> Result<EventBatch, DecodeError> {
    decode_with(payload, &Limits::default())
}

/// `[1.0, [["BlockStored", [1], nil, [1, 2, 3, 4], 4, nil, "GPU"], ["BlockRemoved", [1], "CPU"]], 5]`
const USED: &[u8] = b"\x93\xcb\x3f\xf0\0\0\0\0\0\0\x92\x97\xabBlockStored\x91\x01\xc0\x94\x01\x02\x03\x04\x04\xc0\xa3GPU\x93\xacBlockRemoved\x91\x01\xa3CPU\x05";

fn hex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "odd hex");
    let digit = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    text.as_bytes()
        .chunks_exact(2)
        .map(|pair| digit(pair[0]).zip(digit(pair[1])).map(|(high, low)| high << 4 | low))
        .collect::<Option<_>>()
        .unwrap_or_else(|| unreachable!("not hex: {text}"))
}

fn fixtures(directory: &str) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(directory)
}

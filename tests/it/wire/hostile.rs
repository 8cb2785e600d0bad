//! Payloads made to cost memory, time or a crash.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use rankwise::events::{
    DecodeError, EventBatch, EventTokens, KvEvent, Limits, decode_batch, decode_batch_fast, peek_ts,
};
use rankwise::trust::Reason;

use super::{decode, decode_with};

/// Both decoders, without the copy into a message that the agreeing test makes of large payloads.
fn refused(payload: &[u8]) -> DecodeError {
    let record = decode_batch(payload, &Limits::default()).unwrap_err();
    let mut into = EventBatch::default();
    assert_eq!(decode_batch_fast(payload, &Limits::default(), &mut into), Err(record));
    assert_eq!(into, EventBatch::default());
    record
}

/// `[1.0, [event…`, not closed; the event list has one element.
fn batch_of(event: &[u8]) -> Vec<u8> {
    [b"\x92\xcb\x3f\xf0\0\0\0\0\0\0\x91".as_slice(), event].concat()
}

/// E1: fifty million nils cost a look at their number.
#[test]
fn fifty_million_nils() {
    let mut payload = b"\x92\xc0\xdd\x02\xfa\xf0\x80".to_vec();
    let limit = Limits::default().payload_bytes;
    payload.resize(limit + 1, 0xc0);
    assert_eq!(refused(&payload), DecodeError::PayloadTooLarge { bytes: payload.len(), limit });
    payload.truncate(limit);
    let error = DecodeError::TooManyEvents { events: 50_000_000, limit: Limits::default().events };
    assert_eq!(refused(&payload), error);
}

/// E1: as many nils as the payload may hold, in every list of an event.
#[test]
fn lists_full_of_nils() {
    let nils = 17_000_000_u32;
    for (before, reason) in [
        (&b"\x92\xacBlockRemoved"[..], Reason::TooLongRemoval),
        (&b"\x94\xabBlockStored\x90\xc0"[..], Reason::TooLongStore),
        (&b"\x82\xa4type\xabBlockStored\xaaextra_keys"[..], Reason::MalformedStore),
        (&b"\x92\xaaBlockMoved"[..], Reason::UnknownTag),
    ] {
        let mut payload = batch_of(before);
        payload.push(0xdd);
        payload.extend(nils.to_be_bytes());
        payload.resize(payload.len() + nils as usize, 0xc0);
        let record = decode_batch(&payload, &Limits::default()).unwrap();
        let mut fast = EventBatch::default();
        decode_batch_fast(&payload, &Limits::default(), &mut fast).unwrap();
        assert!(record == fast);
        assert_eq!((record.events.len(), record.skipped.total()), (0, 1));
        assert_eq!(record.skipped.get(reason), 1, "{before:02x?}");
    }
}

/// E1: lengths of four billion are not believed, wherever they stand.
#[test]
fn declared_lengths_of_four_billion() {
    for marker in [0xc6, 0xc9, 0xdb, 0xdd, 0xdf] {
        let bomb = [marker, 0xff, 0xff, 0xff, 0xff, 0x01, 0x02];
        for before in [
            &b""[..],
            b"\x92",
            b"\x82\xa2ts",
            b"\x82",
            b"\x92\xc0\x91\x92\xacBlockRemoved",
            b"\x92\xc0\x91\x92\xacBlockRemoved\x91",
            b"\x92\xc0\x91\x95\xabBlockStored\x91\x01\xc0",
            b"\x92\xc0\x91\x95\xabBlockStored\x91\x01\xc0\x91",
            b"\x92\xc0\x91\x82\xaaextra_keys",
            b"\x92\xc0\x91\x82\xaaextra_keys\x91",
            b"\x92\xc0\x91\x82\xaaextra_keys\x91\x91",
            b"\x92\xc0\x91\x82\xaaextra_keys\x91\x91\x91",
            b"\x92\xc0\x91\x82\xa9lora_name",
            b"\x92\xc0\x91\x82",
            b"\x92\xc0\x91\x81\xa7unknown",
        ] {
            let payload = [before, &bomb].concat();
            assert_eq!(refused(&payload), DecodeError::Broken, "{payload:02x?}");
        }
    }
    let events = b"\x92\xc0\xdd\xff\xff\xff\xff\xc0";
    let error = DecodeError::TooManyEvents { events: u32::MAX as usize, limit: Limits::default().events };
    assert_eq!(refused(events), error);
}

/// E1: five million brackets end at the sixteenth, in every place that is looked into or read past.
#[test]
fn deep_nesting() {
    for bracket in [&b"\x91"[..], b"\x81\x01", b"\x81\x81", b"\xdd\0\0\0\x01", b"\xdf\0\0\0\x01\xc0"] {
        let deep = bracket.repeat(5_000_000 / bracket.len());
        for before in
            [&b""[..], b"\x92\xc0\x91\x92\xaaBlockMoved", b"\x92\xc0\x91\x92\xacBlockRemoved", b"\x82"]
        {
            let payload = [before, &deep].concat();
            assert_eq!(refused(&payload), DecodeError::Broken);
            assert_eq!(peek_ts(&payload), None);
        }
    }
}

/// E1: both decoders count the same depth: fifteen containers pass, sixteen do not. Extensions count.
#[test]
fn depth_limit() {
    for innermost in [&b"\x90"[..], b"\x80", b"\xd4\x01\x01", b"\xc7\x03\x01abc"] {
        for (levels, passes) in [(11, true), (12, false)] {
            // The batch, its events and the event are three, the innermost is one more.
            let payload = batch_of(&[b"\x92\xaaBlockMoved", &b"\x91".repeat(levels)[..], innermost].concat());
            assert_eq!(decode(&payload).is_ok(), passes, "{levels} {innermost:02x?}");
        }
    }
}

/// E1: a batch holds no more names than its limit, however cheap they are on the wire.
#[test]
fn cheap_names() {
    // An array of 65,535 one-byte hashes is 65,551 bytes here and 1.5 MB in memory.
    let mut event = b"\x92\xacBlockRemoved\xdc\xff\xff".to_vec();
    event.resize(event.len() + 0xffff, 0x01);
    let events = 80_u16;
    let mut payload = b"\x92\xc0\xdc".to_vec();
    payload.extend(events.to_be_bytes());
    payload.extend(event.repeat(usize::from(events)));
    let batch = decode_with(&payload, &Limits::default()).unwrap();
    assert_eq!(batch.events.len(), Limits::default().names / 0xffff);
    assert_eq!(batch.events.len() as u64 + batch.skipped.total(), u64::from(events));
}

/// E8: nothing that engines legally send is over a limit: a million blocks of one token stored and removed in one
/// event each, names of bytes, an adapter's name in every block, an image's data URL as an identifier.
#[test]
fn what_engines_legally_send() {
    const MILLION: u32 = 1_000_000;
    let list = |element: &dyn Fn(u32, &mut Vec<u8>)| {
        let mut list = b"\xdd".to_vec();
        list.extend(MILLION.to_be_bytes());
        (0..MILLION).for_each(|at| element(at, &mut list));
        list
    };
    let names = list(&|at, list| {
        list.extend(b"\xc4\x20");
        list.extend([7; 28]);
        list.extend(at.to_be_bytes());
    });
    let tokens = list(&|at, list| {
        list.push(0xce);
        list.extend(at.to_be_bytes());
    });
    let keys = list(&|_, list| {
        list.extend(b"\x91\xd9\x3c");
        list.extend([b'a'; 60]);
    });
    let store =
        [b"\x99\xabBlockStored".as_slice(), &names, b"\xc0", &tokens, b"\x01\xc0\xc0\xc0", &keys].concat();
    let removal = [b"\x92\xacBlockRemoved".as_slice(), &names].concat();
    let url = [b"\x91\x91\xdb\0\x0b\0\0".as_slice(), &vec![b'u'; 11 << 16]].concat();
    let image = [b"\x99\xabBlockStored\x91\x01\xc0\x91\x01\x01\xc0\xc0\xc0".as_slice(), &url].concat();
    assert!(store.len() > 64 << 20);
    for (event, blocks) in [(store, MILLION as usize), (removal, MILLION as usize), (image, 1)] {
        let payload = batch_of(&event);
        let mut batch = EventBatch::default();
        decode_batch_fast(&payload, &Limits::default(), &mut batch).unwrap();
        assert_eq!((batch.events.len(), batch.skipped.total()), (1, 0));
        match &batch.events[0] {
            KvEvent::Stored(stored) => {
                assert_eq!((stored.block_hashes.len(), stored.extra_keys.len()), (blocks, blocks));
                assert!(matches!(&stored.tokens, EventTokens::Ids(tokens) if tokens.len() == blocks));
            }
            KvEvent::Removed(removed) => assert_eq!(removed.block_hashes.len(), blocks),
            KvEvent::Cleared(_) => unreachable!(),
        }
    }
}

//! Any frames: no panic, and what is read is what was there.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use rankwise::events::{ReplayMessage, parse_live, parse_replay, replay_request};
use rankwise::ids::EventSeq;

fuzz_target!(|parts: Vec<Vec<u8>>| {
    let frames: Vec<_> = parts.into_iter().map(Bytes::from).collect();
    if let Ok(message) = parse_live(&frames) {
        assert_ne!(message.seq, EventSeq::END_MARK);
        let seq = Bytes::copy_from_slice(&message.seq.0.to_be_bytes());
        assert_eq!(frames, [message.topic, seq, message.payload]);
    }
    let end_mark = replay_request(EventSeq::END_MARK)[1].clone();
    match parse_replay(&frames) {
        Ok(ReplayMessage::Batch { topic, seq, payload }) => {
            assert_ne!(seq, EventSeq::END_MARK);
            assert!(frames.ends_with(&[replay_request(seq)[1].clone(), payload]));
            assert!(topic.is_none_or(|topic| frames.iter().rev().nth(2) == Some(&topic)));
        }
        Ok(ReplayMessage::End) => assert!(
            frames.last().is_some_and(Bytes::is_empty) || frames.iter().rev().nth(1) == Some(&end_mark)
        ),
        _ => {}
    }
});

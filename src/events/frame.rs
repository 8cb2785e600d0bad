//! The frames around a batch: live messages of a PUB socket, replay answers of a ROUTER socket.
//!
//! A live message is exactly `topic, seq, payload`. A replay answer is read from its end, because engines
//! differ in what they put before: vLLM from 0.26 and SGLang from 0.5.22 send `"", topic, seq, payload`,
//! earlier ones `"", seq, payload`; some transports hand over the empty delimiter and some do not. Both
//! framings, with and without it, are read here and nowhere else.

use bytes::Bytes;

use crate::ids::EventSeq;

/// Bytes of a message's number on the wire.
const SEQ_BYTES: usize = 8;
/// Delimiter, topic, number, payload.
const MOST_REPLAY_FRAMES: usize = 4;

/// A batch as a publisher sent it, not decoded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LiveMessage {
    /// The topic. It names no rank: the connection decides whose batch this is.
    pub topic: Bytes,
    /// The batch's number, never the end mark.
    pub seq: EventSeq,
    /// The msgpack payload.
    pub payload: Bytes,
}

/// One answer to a request for history.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ReplayMessage {
    /// A batch that was published before.
    Batch {
        /// The topic, if the framing has one. Three frames whose first is empty are read as the older framing
        /// behind its delimiter.
        topic: Option<Bytes>,
        /// Its number, never the end mark.
        seq: EventSeq,
        /// The msgpack payload.
        payload: Bytes,
    },
    /// Nothing more follows. May itself be lost on the way.
    End,
}

/// Why frames are no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Too few or too many frames.
    #[error("message of {0} frames")]
    FrameCount(usize),
    /// The number is not 8 bytes long.
    #[error("sequence number of {0} bytes instead of 8")]
    SeqLength(usize),
    /// A live message with the number that only ends a replay.
    #[error("live message with the end mark for a number")]
    EndMarkLive,
    /// A replay answer of four frames whose first is not empty.
    #[error("replay answer with a delimiter of {0} bytes")]
    Delimiter(usize),
}

impl FrameError {
    /// The reason's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::FrameCount(_) => "frame_count",
            Self::SeqLength(_) => "seq_length",
            Self::EndMarkLive => "end_mark_live",
            Self::Delimiter(_) => "delimiter",
        }
    }
}

/// Reads a message of a PUB socket. The payload is not looked at and may be anything.
///
/// # Errors
///
/// [`FrameError`] unless there are exactly three frames, the second of 8 bytes and not the end mark.
pub fn parse_live(frames: &[Bytes]) -> Result<LiveMessage, FrameError> {
    let [topic, seq, payload] = frames else { return Err(FrameError::FrameCount(frames.len())) };
    let seq = parse_seq(seq)?;
    if seq == EventSeq::END_MARK {
        return Err(FrameError::EndMarkLive);
    }
    Ok(LiveMessage { topic: topic.clone(), seq, payload: payload.clone() })
}

/// Reads one answer of a replay endpoint, with or without the empty delimiter and with or without a topic.
///
/// The end is the number 2^64-1, whatever payload stands beside it. Where a framing leaves the number empty or
/// out, it is the empty payload.
///
/// # Errors
///
/// [`FrameError`] if there is no number of 8 bytes before the last frame, or if there are frames too many.
pub fn parse_replay(frames: &[Bytes]) -> Result<ReplayMessage, FrameError> {
    let (before, seq, payload) = match frames {
        [only] if only.is_empty() => return Ok(ReplayMessage::End),
        [.., seq, payload] if frames.len() <= MOST_REPLAY_FRAMES => {
            (&frames[..frames.len() - 2], seq, payload)
        }
        _ => return Err(FrameError::FrameCount(frames.len())),
    };
    let topic = match before {
        [delimiter, _] if !delimiter.is_empty() => return Err(FrameError::Delimiter(delimiter.len())),
        [_, topic] => Some(topic),
        [topic] if !topic.is_empty() => Some(topic),
        _ => None,
    };
    if seq.is_empty() && payload.is_empty() {
        return Ok(ReplayMessage::End);
    }
    match parse_seq(seq)? {
        EventSeq::END_MARK => Ok(ReplayMessage::End),
        seq => Ok(ReplayMessage::Batch { topic: topic.cloned(), seq, payload: payload.clone() }),
    }
}

/// Whether these frames end a replay: nothing more follows on the connection.
pub fn is_replay_end(frames: &[Bytes]) -> bool {
    matches!(parse_replay(frames), Ok(ReplayMessage::End))
}

/// The frames that ask a replay endpoint for its batches from `from` on. Engines drop a request without
/// the empty delimiter and say nothing.
pub fn replay_request(from: EventSeq) -> [Bytes; 2] {
    [Bytes::new(), Bytes::copy_from_slice(&from.0.to_be_bytes())]
}

fn parse_seq(frame: &Bytes) -> Result<EventSeq, FrameError> {
    let bytes: [u8; SEQ_BYTES] = frame[..].try_into().map_err(|_| FrameError::SeqLength(frame.len()))?;
    Ok(EventSeq(u64::from_be_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: [u8; 8] = [0xff; 8];

    fn frames(parts: &[&[u8]]) -> Vec<Bytes> {
        parts.iter().map(|part| Bytes::copy_from_slice(part)).collect()
    }

    /// E1
    #[test]
    fn a_live_message_is_exactly_topic_number_payload() {
        let seq = 258_u64.to_be_bytes();
        let message = parse_live(&frames(&[b"kv", &seq, b"payload"]));
        let expected =
            LiveMessage { topic: Bytes::from("kv"), seq: EventSeq(258), payload: Bytes::from("payload") };
        assert_eq!(message, Ok(expected));
        for (parts, error) in [
            (&[][..], FrameError::FrameCount(0)),
            (&[b"p".as_slice()][..], FrameError::FrameCount(1)),
            (&[&seq, b"p"], FrameError::FrameCount(2)),
            (&[b"", b"", &seq, b"p"], FrameError::FrameCount(4)),
            (&[b"", b"", b"p"], FrameError::SeqLength(0)),
            (&[b"", b"\0\x01", b"p"], FrameError::SeqLength(2)),
            (&[b"", b"123456789", b"p"], FrameError::SeqLength(9)),
            (&[b"", &END, b"p"], FrameError::EndMarkLive),
            (&[b"", &END, b""], FrameError::EndMarkLive),
        ] {
            assert_eq!(parse_live(&frames(parts)), Err(error), "{parts:?}");
        }
    }

    /// E3
    #[test]
    fn a_replay_answer_is_read_from_its_end() {
        let seq = 7_u64.to_be_bytes();
        let of = |topic: Option<&'static str>| ReplayMessage::Batch {
            topic: topic.map(Bytes::from),
            seq: EventSeq(7),
            payload: Bytes::from("p"),
        };
        for (parts, topic) in [
            (&[seq.as_slice(), b"p"][..], None),
            (&[b"", &seq, b"p"], None),
            (&[b"kv", &seq, b"p"], Some("kv")),
            (&[b"", b"kv", &seq, b"p"], Some("kv")),
            (&[b"", b"", &seq, b"p"], Some("")),
        ] {
            assert_eq!(parse_replay(&frames(parts)), Ok(of(topic)), "{parts:?}");
            assert!(!is_replay_end(&frames(parts)));
        }
    }

    /// E10: the number ends it, whatever stands beside it; so does the older framings' empty form.
    #[test]
    fn a_replay_ends_with_its_mark() {
        for parts in [
            &[END.as_slice(), b""][..],
            &[b"", &END, b""],
            &[b"kv", &END, b""],
            &[b"", b"", &END, b""],
            &[b"", b"kv", &END, b""],
            &[&END, b"p"],
            &[b"", &END, b"p"],
            &[b"", b"kv", &END, b"p"],
            &[b""],
            &[b"", b""],
            &[b"", b"", b""],
            &[b"kv", b"", b""],
            &[b"", b"kv", b"", b""],
        ] {
            assert_eq!(parse_replay(&frames(parts)), Ok(ReplayMessage::End), "{parts:?}");
            assert!(is_replay_end(&frames(parts)), "{parts:?}");
        }
    }

    /// E3
    #[test]
    fn other_frames_are_no_replay_answer() {
        let seq = 7_u64.to_be_bytes();
        for (parts, error) in [
            (&[][..], FrameError::FrameCount(0)),
            (&[b"p".as_slice()][..], FrameError::FrameCount(1)),
            (&[b"", b"p"], FrameError::SeqLength(0)),
            (&[b"", b"", b"p"], FrameError::SeqLength(0)),
            (&[b"x", b"kv", &seq, b"p"], FrameError::Delimiter(1)),
            (&[b"", b"", b"", &seq, b"p"], FrameError::FrameCount(5)),
            (&[b"x", b"kv", &END, b""], FrameError::Delimiter(1)),
        ] {
            assert_eq!(parse_replay(&frames(parts)), Err(error), "{parts:?}");
        }
    }

    /// E3
    #[test]
    fn a_request_has_the_delimiter_and_eight_bytes() {
        assert_eq!(replay_request(EventSeq(258))[..], frames(&[b"", &[0, 0, 0, 0, 0, 0, 1, 2]])[..]);
    }
}

//! Frames off the socket's read buffer, within bounds.

use bytes::Bytes;
use zeromq::ZmqMessage;

/// Frames in one message. Engines send three, replays at most four; some more leave room for a format to come.
const MAX_FRAMES: usize = 8;

/// Copies a message's frames into one allocation of their own, or `None` if it breaks a bound.
///
/// Costs one allocation and one copy of the message. What the socket hands out are slices of its read buffer,
/// and one of them would keep 64 KiB and more alive for as long as a batch waits.
pub(super) fn copy_frames(message: &ZmqMessage, max_bytes: usize) -> Option<Vec<Bytes>> {
    if message.len() > MAX_FRAMES {
        return None;
    }
    let total: usize = message.iter().map(Bytes::len).sum();
    if total > max_bytes {
        return None;
    }
    let mut joined = Vec::with_capacity(total);
    for frame in message.iter() {
        joined.extend_from_slice(frame);
    }
    let joined = Bytes::from(joined);
    let mut start = 0;
    let frames = message.iter().map(|frame| {
        let end = start + frame.len();
        let copy = joined.slice(start..end);
        start = end;
        copy
    });
    Some(frames.collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn message(frames: &[&'static [u8]]) -> ZmqMessage {
        let frames: Vec<Bytes> = frames.iter().map(|f| Bytes::from_static(f)).collect();
        ZmqMessage::try_from(frames).unwrap()
    }

    #[test]
    fn copies_keep_every_frame_and_share_no_memory() {
        let original = message(&[b"", b"\0\0\0\0\0\0\0\x07", b"payload"]);
        let copies = copy_frames(&original, 64).unwrap();
        assert_eq!(copies, original.iter().cloned().collect::<Vec<_>>());
        assert_ne!(copies[2].as_ptr(), original.get(2).unwrap().as_ptr());
    }

    /// E1: hostile sizes cost a counter.
    #[test]
    fn too_much_is_refused() {
        assert_eq!(copy_frames(&message(&[b"1234", b"56"]), 5), None);
        assert_eq!(copy_frames(&message(&[b"x".as_slice(); MAX_FRAMES + 1]), 64), None);
        assert!(copy_frames(&message(&[b"x".as_slice(); MAX_FRAMES]), 64).is_some());
    }
}

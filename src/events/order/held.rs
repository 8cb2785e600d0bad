//! Live batches that wait for a replay.

use std::collections::BTreeMap;

use super::{Batch, Fingerprint};
use crate::ids::EventSeq;

/// A batch with its fingerprint, so that it is hashed once.
#[derive(Clone, Debug)]
pub(super) struct Arrived {
    pub(super) batch: Batch,
    pub(super) print: Fingerprint,
}

/// Batches by number, bounded in count and in payload bytes. When it is full the newcomer is dropped: what
/// is nearest to being applied came first, and a replay brings the rest.
#[derive(Debug)]
pub(super) struct HoldBack {
    batches: BTreeMap<EventSeq, Arrived>,
    bytes: usize,
    max_batches: usize,
    max_bytes: usize,
}

impl HoldBack {
    pub(super) fn new(max_batches: usize, max_bytes: usize) -> Self {
        Self { batches: BTreeMap::new(), bytes: 0, max_batches, max_bytes }
    }

    /// Takes the batch in; `false` if there is no room for it. The caller has checked that its number is not
    /// held.
    pub(super) fn insert(&mut self, arrived: Arrived) -> bool {
        let size = arrived.batch.payload.len();
        let fits = self.batches.len() < self.max_batches && size <= self.max_bytes.saturating_sub(self.bytes);
        if fits {
            self.bytes += size;
            self.batches.insert(arrived.batch.seq, arrived);
        }
        fits
    }

    /// The lowest number held, and its fingerprint.
    pub(super) fn first(&self) -> Option<(EventSeq, Fingerprint)> {
        self.batches.first_key_value().map(|(&seq, held)| (seq, held.print))
    }

    /// Takes the lowest number out if it is below `limit`.
    pub(super) fn pop_below(&mut self, limit: u64) -> Option<Arrived> {
        let first = self.batches.first_entry().filter(|first| first.key().0 < limit)?;
        let held = first.remove();
        self.bytes -= held.batch.payload.len();
        Some(held)
    }

    /// The fingerprint of the batch held under this number.
    pub(super) fn print(&self, seq: EventSeq) -> Option<Fingerprint> {
        self.batches.get(&seq).map(|held| held.print)
    }

    pub(super) fn len(&self) -> usize {
        self.batches.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// Payload bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn clear(&mut self) {
        self.batches.clear();
        self.bytes = 0;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn arrived(seq: u64, size: usize) -> Arrived {
        let payload = Bytes::from(vec![0; size]);
        let print = Fingerprint::of(EventSeq(seq), None, &payload);
        Arrived { batch: Batch { seq: EventSeq(seq), ts: None, payload }, print }
    }

    /// E7: neither bound is passed, and taking out gives the room back.
    #[test]
    fn bounds_hold() {
        let mut held = HoldBack::new(2, 10);
        assert!(held.insert(arrived(5, 4)));
        assert!(!held.insert(arrived(9, 7)), "bytes");
        assert!(held.insert(arrived(7, 6)));
        assert!(!held.insert(arrived(8, 0)), "batches");
        assert_eq!((held.len(), held.bytes()), (2, 10));
        assert_eq!(held.first().map(|(seq, _)| seq), Some(EventSeq(5)));
        assert!(held.pop_below(5).is_none());
        assert_eq!(held.pop_below(6).map(|held| held.batch.seq), Some(EventSeq(5)));
        assert!(!held.insert(arrived(8, 11)), "alone too large");
        assert!(held.insert(arrived(8, 4)));
        held.clear();
        assert_eq!((held.len(), held.bytes()), (0, 0));
    }
}

//! Live batches that wait for a replay.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Batch, Fingerprint};
use crate::ids::EventSeq;

/// A batch with its fingerprint, so that it is hashed once.
#[derive(Clone, Debug)]
pub(super) struct Arrived {
    pub(super) batch: Batch,
    pub(super) print: Fingerprint,
    /// By the event connection, not by a replay.
    pub(super) live: bool,
}

/// Payload bytes that all streams of an indexer may hold together.
#[derive(Clone, Debug)]
pub struct HeldBudget(Arc<Budget>);

#[derive(Debug)]
struct Budget {
    used: AtomicUsize,
    limit: usize,
}

impl HeldBudget {
    /// Room for so many bytes.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Budget { used: AtomicUsize::new(0), limit }))
    }

    /// No bound beyond each stream's own.
    pub fn unlimited() -> Self {
        Self::new(usize::MAX)
    }

    /// Bytes held now.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let taken = self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(bytes).filter(|&sum| sum <= self.0.limit)
        });
        taken.is_ok()
    }

    fn give_back(&self, bytes: usize) {
        self.0.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Batches by number, bounded in count and in payload bytes. When it is full the newcomer is dropped: what
/// is nearest to being applied came first, and a replay brings the rest.
#[derive(Debug)]
pub(super) struct HoldBack {
    batches: BTreeMap<EventSeq, Arrived>,
    bytes: usize,
    max_batches: usize,
    max_bytes: usize,
    budget: HeldBudget,
}

impl HoldBack {
    pub(super) fn new(max_batches: usize, max_bytes: usize, budget: HeldBudget) -> Self {
        Self { batches: BTreeMap::new(), bytes: 0, max_batches, max_bytes, budget }
    }

    /// Takes the batch in; `false` if there is no room for it. The caller has checked that its number is not
    /// held.
    pub(super) fn insert(&mut self, arrived: Arrived) -> bool {
        let size = arrived.batch.payload.len();
        let fits = self.batches.len() < self.max_batches
            && size <= self.max_bytes.saturating_sub(self.bytes)
            && self.budget.take(size);
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
        self.budget.give_back(held.batch.payload.len());
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
        self.budget.give_back(self.bytes);
        self.bytes = 0;
    }
}

impl Drop for HoldBack {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn arrived(seq: u64, size: usize) -> Arrived {
        let payload = Bytes::from(vec![0; size]);
        let print = Fingerprint::of(EventSeq(seq), None, &payload);
        Arrived { batch: Batch { seq: EventSeq(seq), ts: None, payload }, print, live: true }
    }

    /// E7: neither bound is passed, and taking out gives the room back.
    #[test]
    fn bounds_hold() {
        let mut held = HoldBack::new(2, 10, HeldBudget::unlimited());
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

    /// E7: streams share one budget, and what they held comes back when they go.
    #[test]
    fn a_shared_budget_bounds_all_streams() {
        let budget = HeldBudget::new(10);
        let mut one = HoldBack::new(9, 9, budget.clone());
        let mut two = HoldBack::new(9, 9, budget.clone());
        assert!(one.insert(arrived(1, 6)));
        assert!(!two.insert(arrived(1, 5)));
        assert!(two.insert(arrived(1, 4)));
        assert_eq!(budget.used(), 10);
        drop(one);
        assert_eq!(budget.used(), 4);
        two.pop_below(9);
        assert_eq!(budget.used(), 0);
    }
}

//! Is this the batch that we had?

use std::collections::VecDeque;

use twox_hash::XxHash3_64;

use crate::ids::EventSeq;

/// Recognises a batch: its time and a 64-bit hash of its number and payload.
///
/// Costs one XXH3 pass over the payload. Not proof against a publisher that wants two of its own batches
/// to look alike; it could only fool us about itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fingerprint {
    /// Bit pattern of the time, so that equality is exact and a NaN equals itself.
    ts: Option<u64>,
    hash: u64,
}

impl Fingerprint {
    /// The fingerprint of a batch.
    pub fn of(seq: EventSeq, ts: Option<f64>, payload: &[u8]) -> Self {
        let body = XxHash3_64::oneshot(payload);
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&seq.0.to_le_bytes());
        bytes[8..].copy_from_slice(&body.to_le_bytes());
        Self { ts: ts.map(f64::to_bits), hash: XxHash3_64::oneshot(&bytes) }
    }

    /// A fingerprint that was taken apart by [`ts`](Self::ts) and [`hash`](Self::hash), from a snapshot.
    pub fn from_parts(ts: Option<f64>, hash: u64) -> Self {
        Self { ts: ts.map(f64::to_bits), hash }
    }

    /// The batch's time.
    pub fn ts(self) -> Option<f64> {
        self.ts.map(f64::from_bits)
    }

    /// The hash of number and payload.
    pub fn hash(self) -> u64 {
        self.hash
    }

    /// Whether both times are known and this one is later.
    pub(super) fn is_newer_than(self, other: Self) -> bool {
        matches!((self.ts(), other.ts()), (Some(mine), Some(its)) if mine > its)
    }
}

/// Applied batches whose fingerprints are remembered. A publisher repeats itself only around a lost
/// connection, so a few suffice; 128 of them cost a rank 4 KiB.
const REMEMBERED: usize = 128;

/// The fingerprints of the batches applied last, by ascending number.
#[derive(Debug, Default)]
pub(super) struct FingerprintRing(VecDeque<(EventSeq, Fingerprint)>);

impl FingerprintRing {
    /// Remembers the batch just applied, whose number is above all others here.
    pub(super) fn push(&mut self, seq: EventSeq, print: Fingerprint) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((seq, print));
    }

    /// Whether this very batch was applied and is still remembered.
    pub(super) fn holds(&self, seq: EventSeq, print: Fingerprint) -> bool {
        self.0.binary_search_by_key(&seq, |&(seq, _)| seq).is_ok_and(|at| self.0[at].1 == print)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(seq: u64) -> Fingerprint {
        Fingerprint::of(EventSeq(seq), Some(1.0), b"x")
    }

    /// E5: number, time and payload all tell batches apart.
    #[test]
    fn every_part_counts() {
        let base = Fingerprint::of(EventSeq(3), Some(1.0), b"abc");
        assert_eq!(base, Fingerprint::of(EventSeq(3), Some(1.0), b"abc"));
        assert_ne!(base, Fingerprint::of(EventSeq(4), Some(1.0), b"abc"));
        assert_ne!(base, Fingerprint::of(EventSeq(3), Some(2.0), b"abc"));
        assert_ne!(base, Fingerprint::of(EventSeq(3), None, b"abc"));
        assert_ne!(base, Fingerprint::of(EventSeq(3), Some(1.0), b"abd"));
        assert_eq!(base, Fingerprint::from_parts(base.ts(), base.hash()));
    }

    /// E5, E7: the ring forgets the oldest, is bounded, and copes with numbers that jump.
    #[test]
    fn the_ring_is_bounded() {
        let mut ring = FingerprintRing::default();
        for seq in (0..3 * REMEMBERED as u64).map(|n| n * 7) {
            ring.push(EventSeq(seq), print(seq));
        }
        assert_eq!(ring.0.len(), REMEMBERED);
        let newest = (3 * REMEMBERED as u64 - 1) * 7;
        assert!(ring.holds(EventSeq(newest), print(newest)));
        assert!(!ring.holds(EventSeq(newest), print(newest - 7)));
        assert!(!ring.holds(EventSeq(newest - 1), print(newest - 1)));
        assert!(!ring.holds(EventSeq(0), print(0)));
    }
}

//! When a rank is overloaded.

/// The share of a rank's capacity above which it is overloaded.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct BusyThreshold(f64);

/// A product of a share and a capacity may miss a whole number by rounding (0.29 × 100 < 29); a block is never
/// decided by that.
const ROUNDING: f64 = 1e-9;

impl BusyThreshold {
    /// A threshold above 0 and at most 1; `None` for anything else.
    pub fn new(share: f64) -> Option<Self> {
        (share > 0.0 && share <= 1.0).then_some(Self(share))
    }

    /// The share.
    pub fn get(self) -> f64 {
        self.0
    }

    /// Whether `used` of `capacity` blocks is **over** the threshold; exactly at it is not over.
    pub fn is_over(self, used: f64, capacity: u64) -> bool {
        let capacity = capacity as f64;
        used > capacity.mul_add(self.0, capacity * ROUNDING)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// C42: 90 is not over 0.9 of 100.
    #[test]
    fn at_the_threshold_is_not_over_it() {
        let threshold = BusyThreshold::new(0.9).unwrap();
        assert!(!threshold.is_over(10.0, 100));
        assert!(!threshold.is_over(90.0, 100));
        assert!(threshold.is_over(91.0, 100));
        assert!(threshold.is_over(95.0, 100));
    }

    #[test]
    fn rounding_never_decides() {
        for percent in 1..=100_u32 {
            let threshold = BusyThreshold::new(f64::from(percent) / 100.0).unwrap();
            assert!(!threshold.is_over(f64::from(percent), 100), "{percent}");
            assert!(threshold.is_over(f64::from(percent) + 1.0, 100), "{percent}");
            // A million blocks: one more still counts.
            assert!(!threshold.is_over(f64::from(percent) * 1e4, 1_000_000), "{percent}");
            assert!(threshold.is_over(f64::from(percent) * 1e4 + 1.0, 1_000_000), "{percent}");
        }
    }

    #[test]
    fn shares_that_mean_nothing_are_none() {
        for share in [0.0, -0.5, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(BusyThreshold::new(share), None);
        }
    }
}

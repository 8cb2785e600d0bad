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

/// Further limits beyond which a rank takes no more requests; each is off unless set, and what is not known
/// is over no limit.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Default)]
pub struct Admission {
    /// Prompt tokens that the rank has still to prefill.
    pub max_prefill_tokens: Option<u64>,
    /// The same as a share of what the rank prefills in one step (`max_num_batched_tokens`); may be above 1.
    pub max_prefill_fraction: Option<f64>,
    /// Requests waiting on the rank.
    pub max_waiting: Option<u64>,
}

impl Admission {
    /// Whether a rank is **over** a limit; exactly at it is not over.
    ///
    /// `batched_tokens` is what the rank prefills in one step.
    pub fn is_over(
        &self,
        prefill_tokens: Option<u64>,
        waiting: Option<u64>,
        batched_tokens: Option<u64>,
    ) -> bool {
        let over =
            |value: Option<u64>, limit: Option<u64>| matches!((value, limit), (Some(v), Some(l)) if v > l);
        let over_share = match (prefill_tokens, self.max_prefill_fraction, batched_tokens) {
            (Some(tokens), Some(share), Some(step)) => {
                let step = step as f64;
                tokens as f64 > step.mul_add(share, step * ROUNDING)
            }
            _ => false,
        };
        over_share || over(prefill_tokens, self.max_prefill_tokens) || over(waiting, self.max_waiting)
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

    /// L15: each limit alone, none by default, and the unknown over none.
    #[test]
    fn limits_are_off_until_they_are_set() {
        let off = Admission::default();
        assert!(!off.is_over(Some(u64::MAX), Some(u64::MAX), Some(1)));
        let tokens = Admission { max_prefill_tokens: Some(100), ..off };
        assert!(!tokens.is_over(Some(100), Some(9), Some(1)) && tokens.is_over(Some(101), None, None));
        assert!(!tokens.is_over(None, Some(9), Some(1)));
        let share = Admission { max_prefill_fraction: Some(0.29), ..off };
        assert!(!share.is_over(Some(29), None, Some(100)) && share.is_over(Some(30), None, Some(100)));
        assert!(!share.is_over(Some(30), None, None));
        let queue = Admission { max_waiting: Some(0), ..off };
        assert!(!queue.is_over(None, Some(0), None) && queue.is_over(None, Some(1), None));
        assert!(!queue.is_over(Some(9), None, Some(1)));
    }
}

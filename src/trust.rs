//! What may be believed about a rank's view.
//!
//! Vocabulary shared by the stream order (which finds out), the fleet (which remembers) and every answer
//! (which says so).

use std::fmt;

/// How far the blocks that we list for a rank can be believed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Trust {
    /// Declared; history is being asked for, or nothing was heard yet within the grace.
    Joining,
    /// Every batch since the rank's cache was empty has been applied, in order.
    Live,
    /// A hole was seen and its replay is outstanding; the view is that of the moment before the hole.
    Repairing,
    /// History is gone and cannot be had.
    Partial(MayErr),
    /// Declared and never heard within the grace, or its endpoint refuses, or a liveness probe failed.
    Silent,
    /// The rank is declared to publish no events: what it holds cannot be known.
    Unknown,
}

/// Which way a partial view may be wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum MayErr {
    /// Joined late: the rank may hold blocks that we do not know.
    Miss,
    /// Removals were lost too: the rank may also lack blocks that we credit.
    Overcredit,
}

impl Trust {
    /// The state's name on the wire: `joining`, `live`, `repairing`, `partial`, `silent`, `unknown`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Live => "live",
            Self::Repairing => "repairing",
            Self::Partial(_) => "partial",
            Self::Silent => "silent",
            Self::Unknown => "unknown",
        }
    }

    /// The ways in which the view may err, by their wire names; empty unless partial.
    pub fn may_err(self) -> &'static [&'static str] {
        match self {
            Self::Partial(MayErr::Miss) => &["may_miss"],
            Self::Partial(MayErr::Overcredit) => &["may_miss", "may_overcredit"],
            _ => &[],
        }
    }

    /// A code for storing the state in an atomic.
    pub(crate) fn code(self) -> u32 {
        match self {
            Self::Joining => 0,
            Self::Live => 1,
            Self::Repairing => 2,
            Self::Partial(MayErr::Miss) => 3,
            Self::Partial(MayErr::Overcredit) => 4,
            Self::Silent => 5,
            Self::Unknown => 6,
        }
    }

    /// The inverse of [`Trust::code`]; an unknown code is the state that promises least.
    pub(crate) fn from_code(code: u32) -> Self {
        match code {
            0 => Self::Joining,
            1 => Self::Live,
            2 => Self::Repairing,
            3 => Self::Partial(MayErr::Miss),
            5 => Self::Silent,
            6 => Self::Unknown,
            _ => Self::Partial(MayErr::Overcredit),
        }
    }
}

impl fmt::Display for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for trust in [
            Trust::Joining,
            Trust::Live,
            Trust::Repairing,
            Trust::Partial(MayErr::Miss),
            Trust::Partial(MayErr::Overcredit),
            Trust::Silent,
            Trust::Unknown,
        ] {
            assert_eq!(Trust::from_code(trust.code()), trust);
        }
    }
}

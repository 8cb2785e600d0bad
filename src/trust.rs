//! What may be believed about a rank's view: one set of named reasons per rank.
//!
//! Whoever sees something go wrong adds its [`Reason`]; the [`Trust`] state that every answer carries is derived
//! from the set and is never set by hand. `live` is the empty set, as far as reasons touch the trust at all.
//!
//! Vocabulary shared by the stream order, the decoder and the connection (which find out), the indexer (which
//! remembers) and every answer (which says so).

use std::fmt;

/// How far the blocks that we list for a rank can be believed.
///
/// The order is that of requirement E4: where several apply, the first is said.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Trust {
    /// The rank is declared to publish no events: what it holds cannot be known.
    Unknown,
    /// No connection for some seconds, or a failed probe: nobody may be there.
    Silent,
    /// Declared; its history is being asked for.
    Joining,
    /// A hole was seen and its replay is outstanding; the view is that of the moment before the hole.
    Repairing,
    /// Something is missing from the view and cannot be had, or could not be used.
    Partial(MayErr),
    /// Every batch since the rank's cache was empty has been applied whole, in order.
    Live,
}

/// Which way a partial view may be wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum MayErr {
    /// The rank may hold blocks that we do not know.
    Miss,
    /// Removals were lost too: the rank may also lack blocks that we credit.
    Overcredit,
}

impl Trust {
    /// The state's name on the wire: `unknown`, `silent`, `joining`, `repairing`, `partial`, `live`.
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
}

impl fmt::Display for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a reason does to the trust while it stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Brings the rank into this state.
    State(Trust),
    /// Is shown beside the state and leaves it alone.
    Shown,
}

/// What lifts a reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lifted {
    /// Whoever raised it, when what it says is no longer so.
    BySource,
    /// A clear that leaves the rank empty, or a restart of its engine.
    ByClearOrRestart,
}

macro_rules! reasons {
    ($( $(#[doc = $doc:literal])+ $variant:ident, $name:literal, $effect:expr, $lifted:ident; )+) => {
        /// Why a rank's view is not beyond doubt. The names are those of answers, metrics and the log.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        #[non_exhaustive]
        pub enum Reason {
            $( $(#[doc = $doc])+ $variant, )+
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &'static [Self] = &[ $( Self::$variant, )+ ];

            /// The reason's name on the wire.
            pub fn name(self) -> &'static str {
                match self { $( Self::$variant => $name, )+ }
            }

            /// What it does to the trust.
            pub fn effect(self) -> Effect {
                match self { $( Self::$variant => $effect, )+ }
            }

            /// What lifts it.
            pub fn lifted(self) -> Lifted {
                match self { $( Self::$variant => Lifted::$lifted, )+ }
            }
        }
    };
}

const MISSES: Effect = Effect::State(Trust::Partial(MayErr::Miss));
const OVERCREDITS: Effect = Effect::State(Trust::Partial(MayErr::Overcredit));

reasons! {
    /// The rank is declared to publish no events.
    PublishesNothing, "publishes_nothing", Effect::State(Trust::Unknown), BySource;
    /// There has been no event connection for some seconds, whatever the cause.
    NoConnection, "no_connection", Effect::State(Trust::Silent), BySource;
    /// Neither the replay endpoint nor a second event connection answered.
    ProbeFailed, "probe_failed", Effect::State(Trust::Silent), BySource;
    /// The first history is being asked for.
    HistoryPending, "history_pending", Effect::State(Trust::Joining), BySource;
    /// A hole is being repaired.
    ReplayPending, "replay_pending", Effect::State(Trust::Repairing), BySource;

    /// There is no history to ask for, and what was published before we listened is not known.
    NoHistory, "no_history", MISSES, BySource;
    /// The first batches of the engine's present process are lost.
    JoinedLate, "joined_late", MISSES, ByClearOrRestart;
    /// Batches behind the first one are lost, removals perhaps among them.
    LostBatches, "lost_batches", OVERCREDITS, ByClearOrRestart;
    /// It was asked whether anything is missing and nobody answered.
    Unproven, "unproven", OVERCREDITS, BySource;
    /// Whether the engine restarted behind a lost connection cannot be told.
    RestartUndecided, "restart_undecided", OVERCREDITS, ByClearOrRestart;

    /// A batch could not be decoded.
    Undecodable, "undecodable", OVERCREDITS, ByClearOrRestart;
    /// A message or batch was over the limit.
    TooLarge, "too_large", OVERCREDITS, ByClearOrRestart;
    /// Batches came under another topic than the configured one.
    OtherTopic, "other_topic", OVERCREDITS, ByClearOrRestart;
    /// An event of an unknown kind.
    UnknownTag, "unknown_tag", OVERCREDITS, ByClearOrRestart;
    /// An event whose kind could not be read.
    MalformedEvent, "malformed_event", OVERCREDITS, ByClearOrRestart;
    /// A removal or clear, or a name in a removal, that could not be read.
    MalformedRemoval, "malformed_removal", OVERCREDITS, ByClearOrRestart;
    /// A removal longer than the limit.
    TooLongRemoval, "too_long_removal", OVERCREDITS, ByClearOrRestart;
    /// A store, or a name in a store, that could not be read.
    MalformedStore, "malformed_store", MISSES, ByClearOrRestart;
    /// A store longer than the limit.
    TooLongStore, "too_long_store", MISSES, ByClearOrRestart;
    /// A store whose names and tokens do not line up.
    TokenMismatch, "token_mismatch", MISSES, ByClearOrRestart;
    /// A store with tokens that cannot be placed.
    UnusableTokens, "unusable_tokens", MISSES, ByClearOrRestart;
    /// A store of the full-attention group in another block size than the declared one.
    BlockSizeMismatch, "block_size_mismatch", MISSES, ByClearOrRestart;
    /// A block that names itself as its parent.
    SelfParent, "self_parent", MISSES, ByClearOrRestart;
    /// More attention groups than the limit.
    TooManyGroups, "too_many_groups", MISSES, ByClearOrRestart;
    /// More blocks than any engine can hold.
    RankFull, "rank_full", MISSES, ByClearOrRestart;
    /// Blocks that waited for their parent were dropped for lack of room.
    OrphansDropped, "orphans_dropped", MISSES, ByClearOrRestart;
    /// The engine's hashes are not chained (SGLang before 0.5.6): one name stands for several blocks.
    UnchainedHashes, "unchained_hashes", OVERCREDITS, ByClearOrRestart;
    /// Two device stores say different things of one name.
    ContradictedName, "contradicting_stores", OVERCREDITS, ByClearOrRestart;

    /// A lower tier took in a cache's worth of blocks and never announced a removal: that tier alone may
    /// over-credit.
    NoRemovals, "no_removals", Effect::Shown, ByClearOrRestart;
    /// A connected rank without history has said nothing within the grace.
    NeverHeard, "never_heard", Effect::Shown, BySource;
    /// Messages that are no batch: their number is lost and shows as a hole where it was one.
    BadFraming, "bad_framing", Effect::Shown, ByClearOrRestart;
    /// Declared as EAGLE and not publishing token pairs, or the other way round.
    EagleDiffers, "eagle_differs", Effect::Shown, ByClearOrRestart;
}

/// A set of reasons.
#[derive(Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Reasons(u64);

// One bit each.
const _: () = assert!(Reason::ALL.len() <= 64);

impl Reasons {
    /// No reason: `live`.
    pub const NONE: Self = Self(0);

    /// All reasons that a clear or restart lifts.
    pub fn lifted_by_clear() -> Self {
        Reason::ALL.iter().copied().filter(|reason| reason.lifted() == Lifted::ByClearOrRestart).collect()
    }

    /// Adds a reason; `true` if it is new.
    pub fn insert(&mut self, reason: Reason) -> bool {
        let before = self.0;
        self.0 |= 1 << reason as u64;
        self.0 != before
    }

    /// Takes a reason out.
    pub fn remove(&mut self, reason: Reason) {
        self.0 &= !(1 << reason as u64);
    }

    /// Whether the reason stands.
    pub fn contains(self, reason: Reason) -> bool {
        self.0 & (1 << reason as u64) != 0
    }

    /// Whether there is none at all.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Both sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without the other.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The reasons, in the order of [`Reason::ALL`]. Costs no allocation.
    pub fn iter(self) -> impl Iterator<Item = Reason> {
        Reason::ALL.iter().copied().filter(move |&reason| self.contains(reason))
    }

    /// Their names.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        self.iter().map(Reason::name)
    }

    /// Whether some of what the rank stored may not be known.
    pub fn may_miss(self) -> bool {
        self.iter().any(|reason| matches!(reason.effect(), Effect::State(Trust::Partial(_))))
    }

    /// The state that follows: the first of requirement E4 that applies. Of two ways to err the worse.
    pub fn trust(self) -> Trust {
        let mut trust = Trust::Live;
        for reason in self.iter() {
            if let Effect::State(state) = reason.effect() {
                trust = worse(trust, state);
            }
        }
        trust
    }

    /// As one word, for an atomic.
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// How often each reason was given.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReasonCounts([u32; Reason::ALL.len()]);

impl Default for ReasonCounts {
    fn default() -> Self {
        Self([0; Reason::ALL.len()])
    }
}

impl ReasonCounts {
    /// Counts `times` more occasions.
    pub fn add(&mut self, reason: Reason, times: u32) {
        let count = &mut self.0[reason as usize];
        *count = count.saturating_add(times);
    }

    /// How often it was given.
    pub fn get(&self, reason: Reason) -> u32 {
        self.0[reason as usize]
    }

    /// How often any was given.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|&count| u64::from(count)).sum()
    }

    /// The reasons that were given, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (Reason, u32)> + '_ {
        Reason::ALL.iter().map(|&reason| (reason, self.get(reason))).filter(|(_, count)| *count > 0)
    }

    /// Adds another rank's counts.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.0.iter_mut().zip(other.0) {
            *count = count.saturating_add(more);
        }
    }
}

impl fmt::Debug for ReasonCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = Reason::ALL.iter().filter(|&&reason| self.get(reason) > 0);
        f.debug_map().entries(given.map(|&reason| (reason.name(), self.get(reason)))).finish()
    }
}

fn worse(a: Trust, b: Trust) -> Trust {
    match (a, b) {
        (Trust::Partial(a), Trust::Partial(b)) => Trust::Partial(a.max(b)),
        (a, b) => a.min(b),
    }
}

impl FromIterator<Reason> for Reasons {
    fn from_iter<I: IntoIterator<Item = Reason>>(reasons: I) -> Self {
        let mut set = Self::NONE;
        for reason in reasons {
            set.insert(reason);
        }
        set
    }
}

impl fmt::Debug for Reasons {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(reasons: &[Reason]) -> Reasons {
        reasons.iter().copied().collect()
    }

    /// E4: the first of the list wins, and `live` is the empty set.
    #[test]
    fn the_state_follows_from_the_set() {
        for (reasons, trust) in [
            (&[][..], Trust::Live),
            (&[Reason::NeverHeard, Reason::NoRemovals][..], Trust::Live),
            (&[Reason::NoHistory, Reason::NeverHeard], Trust::Partial(MayErr::Miss)),
            (&[Reason::UnknownTag, Reason::NoHistory], Trust::Partial(MayErr::Overcredit)),
            (&[Reason::NoHistory, Reason::UnknownTag], Trust::Partial(MayErr::Overcredit)),
            (&[Reason::UnknownTag, Reason::ReplayPending], Trust::Repairing),
            (&[Reason::ReplayPending, Reason::HistoryPending], Trust::Joining),
            (&[Reason::HistoryPending, Reason::NoConnection], Trust::Silent),
            (&[Reason::PublishesNothing, Reason::NoConnection], Trust::Unknown),
        ] {
            assert_eq!(set(reasons).trust(), trust, "{reasons:?}");
        }
    }

    #[test]
    fn every_reason_has_a_name_of_its_own() {
        let mut names: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
    }

    #[test]
    fn a_set_keeps_what_it_is_given() {
        let mut reasons = set(&[Reason::Undecodable, Reason::NoHistory]);
        assert!(!reasons.insert(Reason::NoHistory));
        assert!(reasons.insert(Reason::TooLarge));
        reasons.remove(Reason::Undecodable);
        assert_eq!(Reasons::from_bits(reasons.bits()), set(&[Reason::TooLarge, Reason::NoHistory]));
        assert_eq!(reasons.without(Reasons::lifted_by_clear()), set(&[Reason::NoHistory]));
        assert_eq!(reasons.names().collect::<Vec<_>>(), ["no_history", "too_large"]);
    }
}

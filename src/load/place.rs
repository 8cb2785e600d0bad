//! What is kept of one rank: its newest report, what its engine said of its size, and whether it sleeps.

use std::sync::Arc;
use std::time::Duration;

use super::probe::Route;
use super::report::{LoadReport, RankLoad, SleepState};
use crate::block::BlockSize;
use crate::ids::Moment;

/// One rank's place in the table.
#[derive(Clone, Debug, Default)]
pub(super) struct Place {
    /// The report that counts.
    pub(super) report: Option<Stored>,
    size: Option<Size>,
    request_limit: Option<u64>,
    sleep: Option<(SleepState, Stamp)>,
    /// When a request that was sent there last came back.
    rejected: Option<Moment>,
}

/// A report with what is needed to tell its age.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) load: RankLoad,
    pub(super) stamp: Stamp,
    pub(super) source: Arc<str>,
}

/// When something was received, and how old it was then. Kept as two, since what is older than the clock has
/// no moment on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) received: Moment,
    pub(super) age_then: Duration,
}

impl Stamp {
    pub(super) fn age(self, now: Moment) -> Duration {
        now.since(self.received).saturating_add(self.age_then)
    }

    /// When the figures were true.
    pub(super) fn measured(self) -> Moment {
        self.received - self.age_then
    }
}

/// Whose word it is. An engine's own outranks what others say of it, for as long as it is fresh.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Standing {
    /// A router's or a gateway's, or whoever else's.
    Hearsay,
    /// The engine's.
    Engine,
}

impl Standing {
    fn of(source: &str) -> Self {
        const ASKED: [Route; 4] = [Route::GrpcVllm, Route::GrpcSglang, Route::HttpLoads, Route::Prometheus];
        let engine = source == LoadReport::ENGINE
            || source == LoadReport::LOAD_STAT
            || ASKED.iter().any(|route| route.name() == source);
        if engine { Self::Engine } else { Self::Hearsay }
    }
}

/// What a report is good for: whether active blocks follow from it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Use {
    /// They do not.
    None,
    /// They do if the rank's capacity is known otherwise.
    WithCapacity,
    /// They do.
    Whole,
}

impl Use {
    fn of(load: &RankLoad, size: Option<Size>) -> Self {
        let blocks =
            load.decode_blocks.is_some() || load.num_used_tokens.is_some() || load.kv_used_blocks.is_some();
        match (blocks, load.token_usage) {
            (true, _) => Self::Whole,
            (false, None) => Self::None,
            (false, Some(_)) if size.is_some() || Size::of(load).is_some() => Self::Whole,
            (false, Some(_)) => Self::WithCapacity,
        }
    }
}

/// How much a rank holds, in the unit in which it was said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Size {
    Tokens(u64),
    Blocks { blocks: u64, divided: bool },
}

impl Size {
    fn of(load: &RankLoad) -> Option<Self> {
        let tokens = load.max_total_num_tokens.filter(|&tokens| tokens > 0).map(Self::Tokens);
        let divided = load.total_is_divided;
        let blocks = || load.kv_total_blocks.filter(|&blocks| blocks > 0);
        tokens.or_else(|| Some(Self::Blocks { blocks: blocks()?, divided }))
    }

    fn in_blocks(self, block_size: BlockSize) -> Option<ReportedCapacity> {
        let (blocks, divided) = match self {
            Self::Tokens(tokens) => (tokens / u64::from(block_size.get()), false),
            Self::Blocks { blocks, divided } => (blocks, divided),
        };
        (blocks > 0).then_some(ReportedCapacity { blocks, divided })
    }
}

/// A rank's KV capacity by its engine's own word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ReportedCapacity {
    /// Blocks of the declared size; never 0.
    pub blocks: u64,
    /// Whether they are a share of what several engines hold together.
    pub divided: bool,
}

/// What an offered report has led to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Taken {
    /// It is the one that counts now.
    pub(super) taken: bool,
    /// It says another size than before.
    pub(super) resized: bool,
    /// By it the engine has fallen asleep and lost its cache.
    pub(super) cache_gone: bool,
}

impl Place {
    /// Keeps a report if it is worth more than the one that is there. `fresh` says whether one still counts.
    ///
    /// Size and sleep are an engine's own to say, and hold whatever the rest of its report is worth.
    pub(super) fn offer(&mut self, now: Moment, new: Stored, fresh: impl Fn(&Stored) -> bool) -> Taken {
        let mut out = Taken::default();
        if Standing::of(&new.source) == Standing::Engine {
            out.resized = self.note_size(&new.load);
            out.cache_gone = new.load.sleep.is_some_and(|state| self.note_sleep(now, state, new.stamp));
        }
        let (size, is_fresh) = (self.size, fresh(&new));
        let replaces = |old: &Stored| {
            if !fresh(old) {
                return new.stamp.age(now) <= old.stamp.age(now) || is_fresh;
            }
            if !is_fresh {
                return false;
            }
            let (uses, used) = (Use::of(&new.load, size), Use::of(&old.load, size));
            // The same source may turn to saying less, but never to saying nothing.
            let says_less = uses < used && (new.source != old.source || uses == Use::None);
            if says_less {
                return false;
            }
            if uses > used && used == Use::None {
                return true;
            }
            match Standing::of(&new.source).cmp(&Standing::of(&old.source)) {
                std::cmp::Ordering::Less => false,
                std::cmp::Ordering::Greater => true,
                // The same figures again renew the age.
                std::cmp::Ordering::Equal => new.stamp.age(now) <= old.stamp.age(now),
            }
        };
        out.taken = self.report.as_ref().is_none_or(replaces);
        if out.taken {
            // Whoever measures after it knows better.
            self.rejected = self.rejected.filter(|at| *at > new.stamp.measured());
            self.report = Some(new);
        }
        out
    }

    fn note_size(&mut self, load: &RankLoad) -> bool {
        self.request_limit = load.max_running_requests.or(self.request_limit);
        let Some(size) = Size::of(load) else { return false };
        self.size.replace(size) != Some(size)
    }

    /// Whether the engine has fallen into a sleep that takes its cache.
    pub(super) fn note_sleep(&mut self, now: Moment, state: SleepState, stamp: Stamp) -> bool {
        if self.sleep.is_some_and(|(_, known)| known.age(now) < stamp.age(now)) {
            return false;
        }
        let gone = SleepState::Asleep { cache_gone: true };
        let was = self.sleep.replace((state, stamp)).map(|(state, _)| state);
        state == gone && was != Some(gone)
    }

    /// The rank's capacity by its engine's own word.
    pub(super) fn capacity(&self, block_size: BlockSize) -> Option<ReportedCapacity> {
        self.size?.in_blocks(block_size)
    }

    /// Requests that the rank runs at once, by its engine's own word.
    pub(super) fn request_limit(&self) -> Option<u64> {
        self.request_limit
    }

    /// A request that was sent there came back.
    pub(super) fn reject(&mut self, now: Moment) {
        self.rejected = Some(now);
    }

    /// Whether a request came back within `ttl`, and no report has been measured since.
    pub(super) fn is_rejected(&self, now: Moment, ttl: Duration) -> bool {
        self.rejected.is_some_and(|at| now.since(at) <= ttl)
    }

    /// Whether the engine sleeps, if it has said so within `ttl`.
    pub(super) fn is_asleep(&self, now: Moment, ttl: Duration) -> bool {
        self.sleep.is_some_and(|(state, stamp)| state != SleepState::Awake && stamp.age(now) <= ttl)
    }
}

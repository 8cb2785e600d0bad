//! When a rank that says nothing is asked, and where the question stands (requirement E9).

use std::time::Duration;

use super::{ProbeConfig, ReplayId};
use crate::ids::{EventSeq, Moment};

/// A batch of this size is not asked for again every few seconds: an idle rank would cost its bandwidth.
const LARGE_BATCH: usize = 64 << 10;

/// Questions in a row that may go unanswered before a second connection is tried, or tried again.
const TRIES: u32 = 2;

/// How long the event connection may take to bring what a probe's answer showed already.
pub(super) const LIVE_LAG: Duration = Duration::from_secs(1);

/// The question to a quiet rank. It holds no batch and, while it is open, changes no trust.
#[derive(Debug)]
pub(super) struct Quiet {
    config: ProbeConfig,
    /// Quiet for this long, the rank is asked.
    wait: Duration,
    /// When to look again. A message does not move it: that costs every message, and a look costs nothing.
    look_at: Option<Moment>,
    pub(super) stage: Stage,
    failures: u32,
}

/// Where the question stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Nothing is asked.
    Idle,
    /// The history was asked for, from the watermark, inclusive.
    Asked {
        request: ReplayId,
        /// Set once the request was sent.
        deadline: Option<Moment>,
        /// The batch under the watermark was among the answers.
        same: bool,
    },
    /// The answer showed numbers that the event connection has not brought; it has until then.
    Behind { highest: EventSeq, until: Moment },
    /// A second connection is being made.
    Trying { request: ReplayId },
}

impl Quiet {
    pub(super) fn new(config: ProbeConfig) -> Self {
        Self { config, wait: config.interval, look_at: None, stage: Stage::Idle, failures: 0 }
    }

    /// The connection stands: quiet from now on.
    pub(super) fn begin(&mut self, now: Moment) {
        self.stage = Stage::Idle;
        self.failures = 0;
        self.look_after(now, self.config.interval);
    }

    /// The connection is gone: there is nobody to ask.
    pub(super) fn end(&mut self) {
        self.stage = Stage::Idle;
        self.look_at = None;
    }

    /// A live batch came. Gives the request that it ends.
    pub(super) fn heard(&mut self, now: Moment, bytes: usize) -> Option<ReplayId> {
        self.failures = 0;
        let wait = if bytes > LARGE_BATCH { self.config.max_interval } else { self.config.interval };
        let ended = self.request();
        let open = matches!(self.stage, Stage::Asked { .. } | Stage::Trying { .. });
        if open {
            self.stage = Stage::Idle;
        }
        if open || (self.look_at.is_some() && wait < self.wait) {
            self.look_after(now, wait);
        }
        self.wait = wait;
        ended
    }

    /// The question is dropped. The next tick says when to ask again.
    pub(super) fn drop_question(&mut self) {
        self.stage = Stage::Idle;
        self.look_at = Some(Moment::default());
    }

    /// Whether the rank is to be asked now; if not, when to look again is noted.
    pub(super) fn is_due(&mut self, now: Moment, quiet_since: Moment) -> bool {
        let due = self.spread(quiet_since, self.wait);
        if due > now {
            self.look_at = Some(due);
        }
        due <= now
    }

    /// The rank is there, and nothing is new: next time it is asked later.
    pub(super) fn settled(&mut self, now: Moment) {
        self.stage = Stage::Idle;
        self.failures = 0;
        self.wait = self.wait.saturating_mul(2).min(self.config.max_interval);
        self.look_after(now, self.wait);
    }

    /// Nobody answered. Says whether the same may be tried once more.
    pub(super) fn failed(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.failures < TRIES
    }

    /// Nobody is there: asked again after a while, for as long as it takes.
    pub(super) fn rest(&mut self, now: Moment) {
        self.stage = Stage::Idle;
        self.failures = 0;
        self.wait = self.config.interval;
        self.look_after(now, self.wait);
    }

    /// What is asked now needs no look before its own deadline.
    pub(super) fn wait_for(&mut self, stage: Stage) {
        self.stage = stage;
        self.look_at = None;
    }

    /// The request was sent.
    pub(super) fn sent(&mut self, now: Moment, id: ReplayId) {
        if let Stage::Asked { request, deadline, .. } = &mut self.stage
            && *request == id
        {
            *deadline = Some(now + self.config.answer_timeout);
        }
    }

    pub(super) fn request(&self) -> Option<ReplayId> {
        match self.stage {
            Stage::Asked { request, .. } => Some(request),
            Stage::Idle | Stage::Behind { .. } | Stage::Trying { .. } => None,
        }
    }

    pub(super) fn deadline(&self) -> Option<Moment> {
        match self.stage {
            Stage::Idle => self.look_at,
            Stage::Asked { deadline, .. } => deadline,
            Stage::Behind { until, .. } => Some(until),
            Stage::Trying { .. } => None,
        }
    }

    fn look_after(&mut self, now: Moment, wait: Duration) {
        self.look_at = Some(self.spread(now, wait));
    }

    /// Up to a fifth later, so that ranks that fell quiet at one moment are not asked at one moment.
    fn spread(&self, from: Moment, wait: Duration) -> Moment {
        let share = (self.config.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48) as u32;
        from + wait + (wait / 5).mul_f64(f64::from(share) / 65_536.0)
    }
}

//! The book-keeping of one outstanding piece of history and the requests made for it.

use super::ReplayId;
use crate::ids::Moment;

/// History that is being asked for. It outlives its requests: an answer may be lossy or never come.
#[derive(Debug)]
pub(super) struct Repair {
    pub(super) wanted: Wanted,
    pub(super) stage: Stage,
    /// Requests in a row that brought nothing.
    pub(super) fruitless: u32,
    /// The hole in front of us is in the `gaps` counter.
    pub(super) gap_counted: bool,
    /// The present request has been answered by at least one batch.
    pub(super) answered: bool,
    /// The present request has brought something new.
    pub(super) progress: bool,
}

/// From where history is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wanted {
    /// From the first missing number.
    Missing,
    /// From the watermark, inclusive, to see whether the publisher is still the process that we knew.
    Probe,
}

/// Where the present request stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Asked; fails if nothing new comes before the deadline.
    Asked { request: ReplayId, deadline: Moment },
    /// The last request failed early; the next is made when that one would have timed out, so that an
    /// endpoint that refuses is asked no faster than one that is mute.
    Resting { until: Moment },
    /// No request is out: the event connection is down, or what to do next is being decided.
    Idle,
}

impl Repair {
    pub(super) fn new(wanted: Wanted, gap_counted: bool) -> Self {
        Self { wanted, stage: Stage::Idle, fruitless: 0, gap_counted, answered: false, progress: false }
    }

    /// A new request goes out.
    pub(super) fn asked(&mut self, request: ReplayId, deadline: Moment) {
        self.stage = Stage::Asked { request, deadline };
        self.answered = false;
        self.progress = false;
    }

    /// The present request left; its answers are due by this deadline.
    pub(super) fn sent(&mut self, due: Moment) {
        if let Stage::Asked { deadline, .. } = &mut self.stage {
            *deadline = due;
        }
    }

    /// The present request brought something new.
    pub(super) fn progressed(&mut self, new_deadline: Moment) {
        self.progress = true;
        self.sent(new_deadline);
    }

    /// No request is out any more.
    pub(super) fn ended(&mut self) {
        self.stage = Stage::Idle;
    }

    /// The present request is over. Says whether another may be made.
    pub(super) fn attempt_over(&mut self, max_attempts: u32) -> bool {
        self.fruitless = if self.progress { 0 } else { self.fruitless.saturating_add(1) };
        self.fruitless < max_attempts.max(1)
    }

    pub(super) fn request(&self) -> Option<ReplayId> {
        match self.stage {
            Stage::Asked { request, .. } => Some(request),
            Stage::Resting { .. } | Stage::Idle => None,
        }
    }

    pub(super) fn deadline(&self) -> Option<Moment> {
        match self.stage {
            Stage::Asked { deadline, .. } => Some(deadline),
            Stage::Resting { until } => Some(until),
            Stage::Idle => None,
        }
    }
}

//! The book-keeping of one outstanding piece of history and the requests made for it.

use super::ReplayId;
use crate::ids::{EventSeq, Moment};

/// Answers in a row that bring nothing new before what is missing is lost. A second one rules out that the first
/// was cut short by chance.
const MAX_IDLE_ANSWERS: u32 = 2;

/// History that is being asked for. It outlives its requests: an answer may be lossy or never come.
#[derive(Debug)]
pub(super) struct Repair {
    pub(super) wanted: Wanted,
    pub(super) stage: Stage,
    /// Requests in a row that nobody answered.
    unanswered: u32,
    /// Answers in a row that brought nothing new.
    idle_answers: u32,
    /// The hole in front of us is in the `gaps` counter.
    pub(super) gap_counted: bool,
    /// The present request has been answered by at least one batch.
    pub(super) answered: bool,
    /// The present request has brought something new, or the batch at the watermark again.
    progress: bool,
    /// The present request has brought something new.
    news: bool,
    /// The highest number that any answer showed: until it is applied the history is not whole.
    highest: Option<EventSeq>,
    /// The first number behind the hole that the present answer showed.
    behind_hole: Option<EventSeq>,
    /// Where to go on behind a hole that cannot be filled.
    pub(super) resume_at: Option<EventSeq>,
    /// A live number was heard since the repair began: history that reaches it is whole.
    pub(super) meets_live: bool,
    /// The first number that was missing.
    pub(super) first_missing: EventSeq,
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
    /// Waits for its turn, however long.
    Queued { request: ReplayId },
    /// Sent; fails if nothing new comes before the deadline.
    Asked { request: ReplayId, deadline: Moment },
    /// The last request failed early; the next is made when that one would have timed out, so that an
    /// endpoint that refuses is asked no faster than one that is mute.
    Resting { until: Moment },
    /// No request is out: the event connection is down, or what to do next is being decided.
    Idle,
}

/// What follows when a request is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Ask again.
    Ask,
    /// The answers bring nothing more: the hole is lost.
    Lost,
    /// Nobody answers.
    GiveUp,
}

impl Repair {
    pub(super) fn new(wanted: Wanted, gap_counted: bool, first_missing: EventSeq) -> Self {
        Self {
            wanted,
            stage: Stage::Idle,
            unanswered: 0,
            idle_answers: 0,
            gap_counted,
            answered: false,
            progress: false,
            news: false,
            highest: None,
            behind_hole: None,
            resume_at: None,
            meets_live: false,
            first_missing,
        }
    }

    /// A new request goes out.
    pub(super) fn asked(&mut self, request: ReplayId) {
        self.stage = Stage::Queued { request };
        self.answered = false;
        self.progress = false;
        self.news = false;
        self.behind_hole = None;
    }

    /// The present request left, or its answer goes on; more is due by this deadline.
    pub(super) fn sent(&mut self, due: Moment) {
        if let Stage::Queued { request } | Stage::Asked { request, .. } = self.stage {
            self.stage = Stage::Asked { request, deadline: due };
        }
    }

    /// The present request brought something new.
    pub(super) fn progressed(&mut self, new_deadline: Moment) {
        self.progress = true;
        self.sent(new_deadline);
    }

    /// What came was not known before.
    pub(super) fn brought_news(&mut self) {
        self.news = true;
    }

    /// Whether the present request has brought what was not known before.
    pub(super) fn has_news(&self) -> bool {
        self.news
    }

    /// An answer shows that this number exists.
    pub(super) fn saw(&mut self, seq: EventSeq) {
        self.highest = self.highest.max(Some(seq));
    }

    /// An answer goes on behind a hole.
    pub(super) fn saw_behind_hole(&mut self, seq: EventSeq) {
        self.behind_hole.get_or_insert(seq);
    }

    /// The highest number that any answer showed.
    pub(super) fn highest(&self) -> Option<EventSeq> {
        self.highest
    }

    /// Whether the present request has brought anything new.
    pub(super) fn has_progressed(&self) -> bool {
        self.progress
    }

    /// No request is out any more.
    pub(super) fn ended(&mut self) {
        self.stage = Stage::Idle;
    }

    /// The present request ended with its end mark and left something missing.
    pub(super) fn answer_over(&mut self) -> Next {
        self.unanswered = 0;
        self.idle_answers = if self.progress { 0 } else { self.idle_answers + 1 };
        if self.idle_answers < MAX_IDLE_ANSWERS {
            return Next::Ask;
        }
        self.idle_answers = 0;
        self.resume_at = self.behind_hole;
        Next::Lost
    }

    /// The present request failed or ran out of time. The batch at the watermark alone is no answer: an endpoint
    /// that breaks behind it each time would be asked for ever.
    pub(super) fn attempt_over(&mut self, max_attempts: u32) -> Next {
        self.unanswered = if self.news { 0 } else { self.unanswered.saturating_add(1) };
        if self.unanswered < max_attempts.max(1) { Next::Ask } else { Next::GiveUp }
    }

    pub(super) fn request(&self) -> Option<ReplayId> {
        match self.stage {
            Stage::Queued { request } | Stage::Asked { request, .. } => Some(request),
            Stage::Resting { .. } | Stage::Idle => None,
        }
    }

    pub(super) fn deadline(&self) -> Option<Moment> {
        match self.stage {
            Stage::Asked { deadline, .. } => Some(deadline),
            Stage::Resting { until } => Some(until),
            Stage::Queued { .. } | Stage::Idle => None,
        }
    }
}

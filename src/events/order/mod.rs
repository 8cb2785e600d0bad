//! The order of one rank's stream: duplicates, gaps, replays, restarts, losses.
//!
//! The [`Sequencer`] takes numbered batches that are not decoded yet and says in [`Step`]s what to do with
//! them. What it promises: within one publisher process the numbers of [`Step::Apply`] strictly ascend; a
//! batch of a process that is gone is never applied after its blocks were cleared; and
//! [`Trust::Live`](crate::trust::Trust::Live) is said only while nothing is known to be missing.
//!
//! What it cannot see: a publisher that restarts, loses its connection to us, and whose first batch that we
//! hear carries by chance exactly the number that we expect. With a replay endpoint the probe finds it, or
//! the view is partial where the probe is not answered; without one nothing on the wire does, unless the
//! endpoint refused connections in between or the batch is older than ours.

mod fingerprint;
mod held;
mod presence;
mod repair;
mod sequencer;

#[cfg(test)]
mod tests;

use std::time::Duration;

use bytes::Bytes;

use crate::ids::EventSeq;

pub use fingerprint::Fingerprint;
pub use sequencer::Sequencer;

/// One numbered batch as it came off the wire, not decoded.
#[derive(Clone, PartialEq, Debug)]
pub struct Batch {
    /// Its number.
    pub seq: EventSeq,
    /// The engine's time of the batch, if it can be read.
    pub ts: Option<f64>,
    /// The msgpack payload.
    pub payload: Bytes,
}

/// Names one request for history. A late answer to an older request is recognised by it.
///
/// Never reused within one sequencer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash)]
pub struct ReplayId(pub u64);

/// What the owner of the stream must do, in the order given.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Step {
    /// Decode the batch and apply it to the rank.
    Apply(Batch),
    /// Forget all blocks of the rank.
    Clear,
    /// Ask the publisher for its batches from a number on, on a fresh connection.
    AskReplay {
        /// To be given back with each answer.
        request: ReplayId,
        /// First number wanted.
        from: EventSeq,
    },
    /// The request is given up: close its connection.
    CancelReplay {
        /// The request.
        request: ReplayId,
    },
}

/// What became of one live batch. The [`Step`]s say what to do; this says what happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Arrival {
    /// It was the next one.
    Applied,
    /// It waits for a replay.
    Held,
    /// It would have to wait and there is no room: its number will be asked for.
    Dropped,
    /// We had it.
    Duplicate,
    /// It is of a new publisher process, by this rule; the rank is cleared before it.
    Restarted(RestartRule),
    /// It was applied behind a hole that nothing can fill.
    Lost {
        /// First number that never came.
        from: EventSeq,
        /// Last number that never came.
        to: EventSeq,
    },
    /// It carries the number of a replay's end, which is never data.
    NotData,
}

/// The rule by which a restart of the publisher was recognised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RestartRule {
    /// A live number that we had passed, in a batch newer than the last one.
    Newer,
    /// A live number that we had passed, after a lost connection, and not the batch that we had.
    Reconnected,
    /// The replay from our watermark showed another batch there, or none.
    Probed,
}

/// How one stream is to be treated. All bounds are per rank.
#[derive(Clone, Debug)]
pub struct SequencerConfig {
    /// Whether the publisher has a replay endpoint.
    pub has_replay: bool,
    /// What becomes of the blocks from before an unfillable hole.
    pub on_loss: OnLoss,
    /// Live batches held while a replay is outstanding; one more is dropped and becomes a gap.
    pub max_held_batches: usize,
    /// Bytes of payload held, likewise.
    pub max_held_bytes: usize,
    /// A replay that brings nothing for this long after it was sent has failed.
    pub replay_timeout: Duration,
    /// A request that was not sent for this long has failed. Requests take turns when many ranks ask at
    /// once, and waiting for a turn is not the publisher's silence.
    pub queue_timeout: Duration,
    /// Requests in a row that may fail or bring nothing new before the hole is declared lost. At least one
    /// is made.
    pub max_replay_attempts: u32,
    /// A declared rank that is not heard for this long is silent.
    pub silence_grace: Duration,
}

/// What becomes of the blocks from before an unfillable hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnLoss {
    /// Keep them and say that the view may over-credit.
    #[default]
    Keep,
    /// Forget them: the view then only misses.
    Clear,
}

/// What happened on one stream since it was declared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StreamCounters {
    /// Batches given out to be applied, live or replayed.
    pub applied_batches: u64,
    /// Holes seen: a live number above the expected one, once per hole. A hole that only a replay shows
    /// counts when it is given up. Numbers from before the first connect count like any others.
    pub gaps: u64,
    /// Numbers that never came, in holes that were given up.
    pub lost_batches: u64,
    /// Batches that we had already, live or replayed. The batch that a probe asks for to compare is none.
    pub duplicate_batches: u64,
    /// Restarts recognised by [`RestartRule::Newer`].
    pub restarts_newer: u64,
    /// Restarts recognised by [`RestartRule::Reconnected`].
    pub restarts_reconnected: u64,
    /// Restarts recognised by [`RestartRule::Probed`].
    pub restarts_probed: u64,
    /// Requests for history.
    pub replays_asked: u64,
    /// Requests that ended with their end mark, or reached what was heard live.
    pub replays_answered: u64,
    /// Requests that failed or timed out.
    pub replays_failed: u64,
    /// Times that all attempts at a request were used up.
    pub replays_given_up: u64,
    /// Answers to requests that had been given up; ignored.
    pub late_answers: u64,
    /// Live batches dropped because the hold-back buffer was full, or because their connection or their
    /// process ended while they waited.
    pub held_dropped: u64,
}

impl StreamCounters {
    /// Restarts by whichever rule.
    pub fn restarts(&self) -> u64 {
        self.restarts_newer.saturating_add(self.restarts_reconnected).saturating_add(self.restarts_probed)
    }

    /// Adds another stream's counters.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in [
            (&mut self.applied_batches, other.applied_batches),
            (&mut self.gaps, other.gaps),
            (&mut self.lost_batches, other.lost_batches),
            (&mut self.duplicate_batches, other.duplicate_batches),
            (&mut self.restarts_newer, other.restarts_newer),
            (&mut self.restarts_reconnected, other.restarts_reconnected),
            (&mut self.restarts_probed, other.restarts_probed),
            (&mut self.replays_asked, other.replays_asked),
            (&mut self.replays_answered, other.replays_answered),
            (&mut self.replays_failed, other.replays_failed),
            (&mut self.replays_given_up, other.replays_given_up),
            (&mut self.late_answers, other.late_answers),
            (&mut self.held_dropped, other.held_dropped),
        ] {
            *count += more;
        }
    }

    fn count_restart(&mut self, rule: RestartRule) {
        match rule {
            RestartRule::Newer => self.restarts_newer += 1,
            RestartRule::Reconnected => self.restarts_reconnected += 1,
            RestartRule::Probed => self.restarts_probed += 1,
        }
    }
}

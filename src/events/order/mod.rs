//! The order of one rank's stream: duplicates, gaps, replays, restarts, losses.
//!
//! The [`Sequencer`] takes numbered batches that are not decoded yet and says in [`Step`]s what to do with
//! them. What it promises: within one publisher process the numbers of [`Step::Apply`] strictly ascend; a
//! batch of a process that is gone is never applied after its blocks were cleared; and
//! [`Trust::Live`](crate::trust::Trust::Live) is said only while nothing is known to be missing.
//!
//! What it cannot see: a publisher without a replay endpoint that restarts, is reachable again within a second
//! and without one refused attempt, and whose first batch that we hear carries by chance exactly the number that
//! we expect. After any longer absence such a batch leaves the view in doubt.

mod fingerprint;
mod held;
mod presence;
mod quiet;
mod repair;
mod sequencer;

#[cfg(test)]
mod tests;

use std::time::Duration;

use bytes::Bytes;

use crate::ids::EventSeq;

pub use fingerprint::Fingerprint;
pub use held::HeldBudget;
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
    /// Make a second event connection that only shakes hands, to see whether anybody is there; answered by
    /// [`Sequencer::on_tried`].
    TryConnection {
        /// To be given back with the answer.
        request: ReplayId,
    },
    /// The event connection has gone deaf: drop it and make it anew.
    Reconnect,
    /// Something happened that an operator wants to read of. Nothing is to be done.
    Say(Notice),
}

/// What happened to a stream, for the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Notice {
    /// Another publisher process speaks, by this rule.
    Restarted(RestartRule),
    /// These numbers, both included, were missing and have been brought by a replay.
    Repaired {
        /// The first.
        from: EventSeq,
        /// The last.
        to: EventSeq,
    },
    /// These numbers, both included, cannot be had.
    Lost {
        /// The first.
        from: EventSeq,
        /// The last.
        to: EventSeq,
    },
    /// The engine has published batches that the event connection did not bring.
    LivePathDeaf {
        /// The highest number that the engine's history showed.
        highest: EventSeq,
    },
    /// The replay endpoint keeps no history: it is treated as if there were none.
    NoBuffer,
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
    /// Room for what all streams together hold; [`HeldBudget::unlimited`] where one stream is alone.
    pub held_budget: HeldBudget,
    /// A replay that brings nothing for this long after it was sent has failed. Until it is sent it waits for
    /// its turn, which is not the publisher's silence and costs no attempt.
    pub replay_timeout: Duration,
    /// Requests in a row that may go unanswered before the hole is declared lost. At least one is made.
    pub max_replay_attempts: u32,
    /// How the connection is made, and so what its absence means.
    pub link: Link,
    /// A rank without a connection for this long is silent.
    pub silent_after: Duration,
    /// A connected rank without history that is not heard for this long is marked as never heard.
    pub silence_grace: Duration,
    /// When a rank that says nothing is asked; `None`: never.
    pub probe: Option<ProbeConfig>,
}

/// How a stream's event connection comes about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Link {
    /// We dial the publisher.
    Dialled,
    /// The publisher dials us: it can only be heard.
    Bound,
    /// There is none: the owner hands events in, or the rank publishes none.
    Fed,
}

/// When a quiet rank is asked whether it is there and whether we have all (requirement E9).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeConfig {
    /// Quiet for this long, a rank is asked.
    pub interval: Duration,
    /// The wait doubles up to this while answers bring nothing new.
    pub max_interval: Duration,
    /// An answer takes no longer than this, or the rank is asked again. Engines answer within 0.1 s when idle.
    pub answer_timeout: Duration,
    /// Spreads the questions of many ranks in time; any number that differs from rank to rank.
    pub seed: u64,
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
    /// Questions to a quiet rank, second connections included.
    pub probes_asked: u64,
    /// Of these, such as brought no answer.
    pub probes_failed: u64,
    /// Times that the engine had published what the event connection did not bring.
    pub deaf_links: u64,
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
            (&mut self.probes_asked, other.probes_asked),
            (&mut self.probes_failed, other.probes_failed),
            (&mut self.deaf_links, other.deaf_links),
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

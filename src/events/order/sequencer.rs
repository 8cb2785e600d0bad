//! The state machine itself: its state, its inputs, and where a live batch goes.

mod apply;
mod history;
mod probe;

use bytes::Bytes;

use super::fingerprint::FingerprintRing;
use super::held::{Arrived, HoldBack};
use super::presence::Presence;
use super::quiet::Quiet;
use super::repair::{Next, Repair, Stage, Wanted};
use super::{Arrival, Batch, Fingerprint, ReplayId, RestartRule, SequencerConfig, Step, StreamCounters};
use crate::ids::{EventSeq, Moment};
use crate::trust::{Reason, Reasons, Trust};

/// Orders one rank's stream. Pure: time and input go in, [`Step`]s come out, in the order to be done.
///
/// Each call costs one hash of the payload and, away from holes, no allocation beyond the caller's list.
/// What waits is bounded by the configuration. The owner calls [`on_tick`](Self::on_tick) no later than
/// [`next_deadline`](Self::next_deadline).
#[derive(Debug)]
pub struct Sequencer {
    config: SequencerConfig,
    presence: Presence,
    /// The last number applied of the present process.
    watermark: Option<EventSeq>,
    /// The batch under the watermark.
    last: Option<Fingerprint>,
    ring: FingerprintRing,
    /// The batch under the watermark came by the present event connection.
    carried: bool,
    /// The present process has answered a request for history with a batch.
    has_answered: bool,
    /// The replay endpoint of the present process keeps nothing.
    bufferless: bool,
    /// Whether the beginning of the present process's history is settled, one way or the other.
    settled: bool,
    /// What was lost of it.
    losses: Reasons,
    /// The first number applied after the last loss: a clear in an earlier batch heals nothing.
    lost_before: Option<EventSeq>,
    /// History was settled once, so that what is asked now is a repair.
    joined: bool,
    continuity: Continuity,
    repair: Option<Repair>,
    quiet: Option<Quiet>,
    held: HoldBack,
    /// The highest live number above the watermark that this connection brought, held or dropped.
    live_high: Option<(EventSeq, Fingerprint)>,
    next_request: u64,
    counters: StreamCounters,
}

/// Whether what comes next surely belongs to the process that we applied last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Continuity {
    /// The connection was lost since the last batch was applied.
    broken: bool,
    /// And there is reason to think that the process ended: its endpoint could not be reached in between, or
    /// not for long, or the batch under our watermark could not be compared.
    suspect: bool,
    /// Whether anything is missing was asked and not answered, or there is nobody to ask.
    unproven: bool,
}

impl Sequencer {
    /// A stream that was declared `now` and is not connected yet.
    pub fn new(config: SequencerConfig, now: Moment) -> Self {
        Self {
            presence: Presence::new(now, config.link, config.silent_after, config.silence_grace),
            watermark: None,
            last: None,
            ring: FingerprintRing::default(),
            carried: false,
            has_answered: false,
            bufferless: false,
            settled: false,
            losses: Reasons::NONE,
            lost_before: None,
            joined: false,
            continuity: Continuity::default(),
            repair: None,
            quiet: config.probe.map(Quiet::new),
            held: HoldBack::new(config.max_held_batches, config.max_held_bytes, config.held_budget.clone()),
            live_high: None,
            next_request: 0,
            counters: StreamCounters::default(),
            config,
        }
    }

    /// A stream whose content was restored from a snapshot taken after the batch `watermark`, whose
    /// fingerprint is `last` ([`last_fingerprint`](Self::last_fingerprint)), with what was lost of its history
    /// until then ([`losses`](Self::losses)).
    ///
    /// It is treated as after a lost connection: the publisher is asked from the watermark, inclusive.
    pub fn resume(
        config: SequencerConfig,
        now: Moment,
        watermark: EventSeq,
        last: Fingerprint,
        losses: Reasons,
    ) -> Self {
        let mut this = Self::new(config, now);
        this.watermark = Some(watermark);
        this.last = Some(last);
        this.ring.push(watermark, last);
        // A snapshot taken during a repair is that of the moment before the hole, which the probe finds.
        this.settled = true;
        this.losses = losses;
        this.continuity = Continuity { broken: true, suspect: true, unproven: false };
        this
    }

    /// The event connection stands. Asks for history. Called twice, the loss in between went unseen.
    pub fn on_connected(&mut self, now: Moment, out: &mut Vec<Step>) {
        if self.presence.is_connected() {
            self.lose_link(now, out);
        }
        let long_away = self.presence.connect(now);
        self.continuity.suspect |= self.continuity.broken && long_away;
        if let Some(quiet) = &mut self.quiet {
            quiet.begin(now);
        }
        if self.has_history() {
            let wanted = if self.watermark.is_some() { Wanted::Probe } else { Wanted::Missing };
            let gap_counted = self.repair.as_ref().is_some_and(|repair| repair.gap_counted);
            self.start_repair(wanted, gap_counted, out);
        } else {
            self.joined = true;
            // Nobody can be asked what was missed; the next number tells.
            self.continuity.unproven |= self.continuity.broken;
        }
    }

    /// The event connection is lost. What waits is forgotten; it will be asked for again.
    pub fn on_disconnected(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.lose_link(now, out);
    }

    /// An attempt to connect failed, for whatever reason: the publisher that we had may have ended.
    pub fn on_unreachable(&mut self, now: Moment) {
        self.presence.tick(now);
        self.continuity.suspect |= self.continuity.broken && !self.presence.is_connected();
    }

    /// A batch came by the event connection.
    pub fn on_live(
        &mut self,
        now: Moment,
        seq: EventSeq,
        ts: Option<f64>,
        payload: &Bytes,
        out: &mut Vec<Step>,
    ) -> Arrival {
        if seq == EventSeq::END_MARK {
            return Arrival::NotData;
        }
        if !self.presence.is_connected() {
            self.on_connected(now, out);
        }
        self.presence.hear(now);
        self.end_probe(now, payload.len(), out);
        let arrived = arrived(seq, ts, payload, true);
        match self.judge(seq, arrived.print) {
            Verdict::Duplicate => {
                self.counters.duplicate_batches += 1;
                Arrival::Duplicate
            }
            Verdict::Restart(rule) => {
                self.drop_held();
                self.begin_process(rule, out);
                if self.has_history() && seq != EventSeq::ZERO {
                    self.start_repair(Wanted::Missing, false, out);
                }
                self.place(arrived, out);
                Arrival::Restarted(rule)
            }
            Verdict::Ahead => self.place(arrived, out),
        }
    }

    /// The request had its turn and was sent: from now on its answers can be late.
    pub fn on_replay_asked(&mut self, now: Moment, request: ReplayId) {
        if let Some(repair) = self.repair.as_mut().filter(|repair| repair.request() == Some(request)) {
            repair.sent(now + self.config.replay_timeout);
        } else if let Some(quiet) = &mut self.quiet {
            quiet.sent(now, request);
        }
    }

    /// A batch came in answer to a request.
    pub fn on_replay_batch(
        &mut self,
        now: Moment,
        request: ReplayId,
        seq: EventSeq,
        ts: Option<f64>,
        payload: &Bytes,
        out: &mut Vec<Step>,
    ) {
        if seq == EventSeq::END_MARK {
            return self.on_replay_end(now, request, out);
        }
        self.presence.hear(now);
        let arrived = arrived(seq, ts, payload, false);
        if self.is_probe(request) {
            self.quiet_answered(now, &arrived, out);
            self.has_answered = true;
            return;
        }
        let Some(wanted) = self.wanted_by(request) else {
            self.counters.late_answers += 1;
            return;
        };
        match wanted {
            Wanted::Probe => self.probe_answered(now, arrived, out),
            Wanted::Missing => self.history_answered(now, arrived, out),
        }
        self.has_answered = true;
    }

    /// The answer to a request ended with its end mark, which says nothing about whether it was whole.
    pub fn on_replay_end(&mut self, now: Moment, request: ReplayId, out: &mut Vec<Step>) {
        self.presence.hear(now);
        if self.is_probe(request) {
            return self.quiet_ended(now, out);
        }
        let Some(wanted) = self.wanted_by(request) else {
            self.counters.late_answers += 1;
            return;
        };
        self.counters.replays_answered += 1;
        if let Some(repair) = &mut self.repair {
            repair.ended();
        }
        match wanted {
            Wanted::Probe => self.nothing_at_the_watermark(out),
            Wanted::Missing => self.history_ended(out),
        }
    }

    /// A request could not be made or its connection broke.
    ///
    /// The next one is made when this one would have timed out, or at once behind an answer that brought something
    /// new: a long history over a connection that breaks is had in pieces. It compares the batch at the watermark
    /// again, for a publisher that ended takes this connection with it, and the news that the event
    /// connection is lost may come later.
    pub fn on_replay_failed(&mut self, now: Moment, request: ReplayId, out: &mut Vec<Step>) {
        if self.is_probe(request) {
            return self.probe_unanswered(now, out);
        }
        let max_attempts = self.config.max_replay_attempts;
        let Some(repair) = self.repair.as_mut().filter(|repair| repair.request() == Some(request)) else {
            return;
        };
        self.counters.replays_failed += 1;
        let until = repair.deadline().unwrap_or(now + self.config.replay_timeout);
        repair.stage = Stage::Resting { until };
        if self.watermark.is_some() && repair.resume_at.is_none() {
            repair.wanted = Wanted::Probe;
        }
        let has_news = repair.has_news();
        match repair.attempt_over(max_attempts) {
            Next::GiveUp => self.give_up(now, out),
            Next::Ask | Next::Lost if has_news => self.ask(out),
            Next::Ask | Next::Lost => {}
        }
    }

    /// Does what is due. Early and repeated calls do no harm.
    pub fn on_tick(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.presence.tick(now);
        self.probe_if_due(now, out);
        let Some(repair) = self.repair.as_ref().filter(|r| r.deadline().is_some_and(|at| now >= at)) else {
            return;
        };
        match repair.stage {
            Stage::Asked { .. } => self.request_timed_out(now, out),
            Stage::Resting { .. } => self.ask(out),
            Stage::Queued { .. } | Stage::Idle => {}
        }
    }

    /// The batch `seq`, as applied, emptied the rank's cache: what was lost before it no longer matters.
    pub fn on_cleared(&mut self, seq: EventSeq) {
        if Some(seq) <= self.watermark && Some(seq) >= self.lost_before {
            self.losses = Reasons::NONE;
        }
    }

    /// When [`on_tick`](Self::on_tick) is due next.
    pub fn next_deadline(&self) -> Option<Moment> {
        let repair = self.repair.as_ref().and_then(Repair::deadline);
        let quiet = self.quiet.as_ref().and_then(Quiet::deadline);
        [repair, quiet, self.presence.next_deadline()].into_iter().flatten().min()
    }

    /// What may be believed about the view that the applied steps have built.
    pub fn trust(&self) -> Trust {
        self.reasons().trust()
    }

    /// What stands against believing it.
    pub fn reasons(&self) -> Reasons {
        let mut reasons = self.losses.union(self.presence.reasons());
        if self.repair.is_some() {
            reasons.insert(if self.joined { Reason::ReplayPending } else { Reason::HistoryPending });
        } else if self.settled && self.joined {
            if self.is_in_doubt() {
                reasons.insert(Reason::Unproven);
            }
        } else if !self.settled && self.presence.is_open() && (self.joined || !self.has_history()) {
            reasons.insert(Reason::NoHistory);
            if self.presence.is_unheard() {
                reasons.insert(Reason::NeverHeard);
            }
        } else {
            // Not connected yet, or restored and not heard yet.
            reasons.insert(Reason::HistoryPending);
        }
        reasons
    }

    /// What was lost of the present process's history: what a snapshot keeps beside the watermark.
    pub fn losses(&self) -> Reasons {
        self.losses
    }

    /// The number of the last batch applied of the present publisher process.
    pub fn watermark(&self) -> Option<EventSeq> {
        self.watermark
    }

    /// The fingerprint of the batch under the watermark: what a snapshot keeps beside it.
    pub fn last_fingerprint(&self) -> Option<Fingerprint> {
        self.last
    }

    /// When the publisher last sent anything, a replay's end mark included.
    pub fn last_heard(&self) -> Option<Moment> {
        self.presence.last_heard()
    }

    /// What happened so far.
    pub fn counters(&self) -> &StreamCounters {
        &self.counters
    }

    /// Live batches that wait for a replay.
    pub fn held_batches(&self) -> usize {
        self.held.len()
    }

    /// Payload bytes of the batches that wait.
    pub fn held_bytes(&self) -> usize {
        self.held.bytes()
    }
}

/// What a live batch is.
enum Verdict {
    Duplicate,
    Restart(RestartRule),
    /// New, the next one or behind a hole.
    Ahead,
}

/// Live batches.
impl Sequencer {
    fn judge(&self, seq: EventSeq, print: Fingerprint) -> Verdict {
        if self.watermark.is_some_and(|watermark| seq <= watermark) {
            return self.judge_passed(seq, print);
        }
        match self.live_high {
            Some((high, high_print)) if seq <= high => {
                if self.held.print(seq) == Some(print) {
                    Verdict::Duplicate
                } else if print.is_newer_than(high_print) {
                    Verdict::Restart(RestartRule::Newer)
                } else if self.held.print(seq).is_some() {
                    Verdict::Duplicate
                } else {
                    Verdict::Ahead
                }
            }
            _ => Verdict::Ahead,
        }
    }

    /// A number at or below the watermark. The very batch that we had is a duplicate even where the
    /// publisher's clock was set back; otherwise requirement E5 to the letter.
    fn judge_passed(&self, seq: EventSeq, print: Fingerprint) -> Verdict {
        if self.ring.holds(seq, print) {
            Verdict::Duplicate
        } else if self.last.is_some_and(|last| print.is_newer_than(last)) {
            Verdict::Restart(RestartRule::Newer)
        } else if self.continuity.broken {
            Verdict::Restart(RestartRule::Reconnected)
        } else {
            Verdict::Duplicate
        }
    }

    /// Applies or holds a batch above the watermark.
    fn place(&mut self, arrived: Arrived, out: &mut Vec<Step>) -> Arrival {
        let seq = arrived.batch.seq;
        if self.live_high.is_none_or(|(high, _)| seq > high) {
            self.live_high = Some((seq, arrived.print));
        }
        if let Some(repair) = &mut self.repair {
            repair.meets_live = true;
        }
        let is_next = seq.0 == self.expected();
        match &self.repair {
            None if is_next => {
                self.apply_next(arrived, out);
                return Arrival::Applied;
            }
            None if !self.has_history() => {
                let from = EventSeq(self.expected());
                self.leap(arrived, out);
                return Arrival::Lost { from, to: EventSeq(seq.0 - 1) };
            }
            None => {
                self.counters.gaps += 1;
                // After a lost connection a higher number may also be a new process that has come far.
                let wanted = if self.continuity.broken { Wanted::Probe } else { Wanted::Missing };
                self.start_repair(wanted, true, out);
            }
            Some(repair) if is_next && repair.wanted == Wanted::Missing => {
                self.apply_next(arrived, out);
                self.drain(out);
                self.finish_if_caught_up(out);
                return Arrival::Applied;
            }
            Some(_) => {}
        }
        if self.held.insert(arrived) {
            Arrival::Held
        } else {
            self.counters.held_dropped += 1;
            Arrival::Dropped
        }
    }

    /// The number to be applied next; past every real number once `u64::MAX - 1` was applied.
    fn expected(&self) -> u64 {
        self.watermark.map_or(0, |watermark| watermark.0.saturating_add(1))
    }

    /// Whether a number above the watermark was seen, live or in an answer, that is not applied.
    fn hole_is_known(&self) -> bool {
        let replayed = self.repair.as_ref().and_then(Repair::highest);
        !self.held.is_empty()
            || replayed > self.watermark
            || self.live_high.is_some_and(|(high, _)| Some(high) > self.watermark)
    }

    /// Whether there is history to ask for.
    fn has_history(&self) -> bool {
        self.config.has_replay && !self.bufferless
    }

    fn drop_held(&mut self) {
        self.counters.held_dropped += self.held.len() as u64;
        self.held.clear();
        self.live_high = None;
    }

    fn lose_link(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.presence.disconnect(now);
        self.drop_held();
        self.carried = false;
        self.continuity.broken = self.watermark.is_some();
        self.cancel_probe(out);
        if let Some(repair) = &mut self.repair {
            out.extend(repair.request().map(|request| Step::CancelReplay { request }));
            repair.ended();
        }
    }
}

fn arrived(seq: EventSeq, ts: Option<f64>, payload: &Bytes, live: bool) -> Arrived {
    let print = Fingerprint::of(seq, ts, payload);
    Arrived { batch: Batch { seq, ts, payload: payload.clone() }, print, live }
}

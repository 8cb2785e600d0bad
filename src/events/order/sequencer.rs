//! The state machine itself: its state, its inputs, and where a live batch goes.

mod apply;
mod history;

use bytes::Bytes;

use super::fingerprint::FingerprintRing;
use super::held::{Arrived, HoldBack};
use super::presence::Presence;
use super::repair::{Repair, Stage, Wanted};
use super::{Arrival, Batch, Fingerprint, ReplayId, RestartRule, SequencerConfig, Step, StreamCounters};
use crate::ids::{EventSeq, Moment};
use crate::trust::{MayErr, Trust};

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
    /// What the applied batches are worth while nothing is outstanding.
    standing: Standing,
    /// The first number applied after the last loss: a clear in an earlier batch heals nothing.
    lost_before: Option<EventSeq>,
    /// History was settled once, so that what is asked now is a repair.
    joined: bool,
    continuity: Continuity,
    repair: Option<Repair>,
    held: HoldBack,
    /// The highest live number above the watermark that this connection brought, held or dropped.
    live_high: Option<(EventSeq, Fingerprint)>,
    next_request: u64,
    counters: StreamCounters,
}

/// What the applied batches are worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// Not known yet: nothing was heard and no history settled.
    Unknown,
    /// Everything since the cache was empty.
    Complete,
    Partial(MayErr),
}

/// Whether what comes next surely belongs to the process that we applied last.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Continuity {
    /// The connection was lost since the last batch was applied.
    broken: bool,
    /// And there is reason to think that the process ended: its endpoint refused connections in between,
    /// or the batch under our watermark could not be compared.
    suspect: bool,
    /// Requests for what may be missing brought no answer.
    unproven: bool,
}

impl Sequencer {
    /// A stream that was declared `now` and is not connected yet.
    pub fn new(config: SequencerConfig, now: Moment) -> Self {
        Self {
            presence: Presence::new(now, config.silence_grace),
            watermark: None,
            last: None,
            ring: FingerprintRing::default(),
            standing: Standing::Unknown,
            lost_before: None,
            joined: false,
            continuity: Continuity::default(),
            repair: None,
            held: HoldBack::new(config.max_held_batches, config.max_held_bytes),
            live_high: None,
            next_request: 0,
            counters: StreamCounters::default(),
            config,
        }
    }

    /// A stream whose content was restored from a snapshot taken after the batch `watermark`, whose
    /// fingerprint is `last` ([`last_fingerprint`](Self::last_fingerprint)), when its trust was `trust`.
    ///
    /// It is treated as after a lost connection: the publisher is asked from the watermark, inclusive.
    pub fn resume(
        config: SequencerConfig,
        now: Moment,
        watermark: EventSeq,
        last: Fingerprint,
        trust: Trust,
    ) -> Self {
        let mut this = Self::new(config, now);
        this.watermark = Some(watermark);
        this.last = Some(last);
        this.ring.push(watermark, last);
        // A snapshot taken during a repair is that of the moment before the hole, which the probe finds.
        this.standing = match trust {
            Trust::Partial(may_err) => Standing::Partial(may_err),
            _ => Standing::Complete,
        };
        this.continuity.broken = true;
        this
    }

    /// The event connection stands. Asks for history. Called twice, the loss in between went unseen.
    pub fn on_connected(&mut self, now: Moment, out: &mut Vec<Step>) {
        if self.presence.is_connected() {
            self.lose_link(out);
        }
        self.presence.connect();
        if self.config.has_replay {
            let wanted = if self.watermark.is_some() { Wanted::Probe } else { Wanted::Missing };
            let gap_counted = self.repair.as_ref().is_some_and(|repair| repair.gap_counted);
            self.start_repair(now, wanted, gap_counted, out);
        }
    }

    /// The event connection is lost. What waits is forgotten; it will be asked for again.
    pub fn on_disconnected(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.presence.tick(now);
        self.lose_link(out);
    }

    /// A new event connection was refused. After two seconds of that a publisher that we had is silent.
    pub fn on_refused(&mut self, now: Moment, _out: &mut Vec<Step>) {
        let news = self.presence.refuse(now);
        self.continuity.suspect |= news && self.watermark.is_some();
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
        let arrived = arrived(seq, ts, payload);
        match self.judge(seq, arrived.print) {
            Verdict::Duplicate => {
                self.counters.duplicate_batches += 1;
                Arrival::Duplicate
            }
            Verdict::Restart(rule) => {
                self.drop_held();
                self.begin_process(rule, out);
                if self.config.has_replay && seq != EventSeq::ZERO {
                    self.start_repair(now, Wanted::Missing, false, out);
                }
                self.place(now, arrived, out);
                Arrival::Restarted(rule)
            }
            Verdict::Ahead => self.place(now, arrived, out),
        }
    }

    /// The request had its turn and was sent: from now on its answers can be late. A driver that sends at once
    /// may leave this out, and waits [`SequencerConfig::queue_timeout`] for an answer instead.
    pub fn on_replay_asked(&mut self, now: Moment, request: ReplayId) {
        if let Some(repair) = self.repair.as_mut().filter(|repair| repair.request() == Some(request)) {
            repair.sent(now + self.config.replay_timeout);
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
        let Some(wanted) = self.wanted_by(request) else {
            self.counters.late_answers += 1;
            return;
        };
        let arrived = arrived(seq, ts, payload);
        match wanted {
            Wanted::Probe => self.probe_answered(now, arrived, out),
            Wanted::Missing => self.history_answered(now, arrived, out),
        }
    }

    /// The answer to a request ended with its end mark, which says nothing about whether it was whole.
    pub fn on_replay_end(&mut self, now: Moment, request: ReplayId, out: &mut Vec<Step>) {
        self.presence.hear(now);
        let Some(wanted) = self.wanted_by(request) else {
            self.counters.late_answers += 1;
            return;
        };
        self.counters.replays_answered += 1;
        if let Some(repair) = &mut self.repair {
            repair.ended();
        }
        if wanted == Wanted::Probe {
            // Nothing at our watermark, so a publisher that has not come that far.
            self.begin_process(RestartRule::Probed, out);
            return self.start_repair(now, Wanted::Missing, false, out);
        }
        self.drain(out);
        if !self.hole_is_known() {
            return self.finish_repair();
        }
        self.count_gap();
        self.ask_again_or_give_up(now, out);
    }

    /// A request could not be made or its connection broke.
    ///
    /// The next one is made when this one would have timed out. It compares the batch at the watermark
    /// again, for a publisher that ended takes this connection with it, and the news that the event
    /// connection is lost may come later.
    pub fn on_replay_failed(&mut self, now: Moment, request: ReplayId, out: &mut Vec<Step>) {
        let max_attempts = self.config.max_replay_attempts;
        let Some(repair) = self.repair.as_mut().filter(|repair| repair.request() == Some(request)) else {
            return;
        };
        self.counters.replays_failed += 1;
        let until = repair.deadline().unwrap_or(now).min(now + self.config.replay_timeout);
        repair.stage = Stage::Resting { until };
        if self.watermark.is_some() {
            repair.wanted = Wanted::Probe;
        }
        if !repair.attempt_over(max_attempts) {
            self.give_up(out);
        }
    }

    /// Does what is due. Early and repeated calls do no harm.
    pub fn on_tick(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.presence.tick(now);
        let Some(repair) = self.repair.as_ref().filter(|r| r.deadline().is_some_and(|at| now >= at)) else {
            return;
        };
        match repair.stage {
            Stage::Asked { .. } => {
                self.counters.replays_failed += 1;
                self.ask_again_or_give_up(now, out);
            }
            Stage::Resting { .. } => self.ask(now, out),
            Stage::Idle => {}
        }
    }

    /// The batch `seq`, as applied, emptied the rank's cache: what was lost before it no longer matters.
    pub fn on_cleared(&mut self, seq: EventSeq) {
        let counts = Some(seq) <= self.watermark && Some(seq) >= self.lost_before;
        if matches!(self.standing, Standing::Partial(_)) && counts {
            self.standing = Standing::Complete;
        }
    }

    /// When [`on_tick`](Self::on_tick) is due next.
    pub fn next_deadline(&self) -> Option<Moment> {
        let repair = self.repair.as_ref().and_then(Repair::deadline);
        repair.into_iter().chain(self.presence.next_deadline()).min()
    }

    /// What may be believed about the view that the applied steps have built.
    pub fn trust(&self) -> Trust {
        if self.presence.is_silent() {
            return Trust::Silent;
        }
        if self.repair.is_some() {
            return if self.joined { Trust::Repairing } else { Trust::Joining };
        }
        match self.standing {
            Standing::Unknown => Trust::Joining,
            // Restored, and not heard yet.
            _ if !self.joined => Trust::Joining,
            _ if self.is_in_doubt() => Trust::Partial(MayErr::Overcredit),
            Standing::Complete => Trust::Live,
            Standing::Partial(may_err) => Trust::Partial(may_err),
        }
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
    fn place(&mut self, now: Moment, arrived: Arrived, out: &mut Vec<Step>) -> Arrival {
        let seq = arrived.batch.seq;
        if self.live_high.is_none_or(|(high, _)| seq > high) {
            self.live_high = Some((seq, arrived.print));
        }
        let is_next = seq.0 == self.expected();
        match &self.repair {
            None if is_next => {
                self.apply_next(arrived, out);
                return Arrival::Applied;
            }
            None if !self.config.has_replay => {
                let from = EventSeq(self.expected());
                self.leap(arrived, out);
                return Arrival::Lost { from, to: EventSeq(seq.0 - 1) };
            }
            None => {
                self.counters.gaps += 1;
                // After a lost connection a higher number may also be a new process that has come far.
                let wanted = if self.continuity.broken { Wanted::Probe } else { Wanted::Missing };
                self.start_repair(now, wanted, true, out);
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

    /// Whether a live number above the watermark was seen that is not applied.
    fn hole_is_known(&self) -> bool {
        !self.held.is_empty() || self.live_high.is_some_and(|(high, _)| Some(high) > self.watermark)
    }

    fn drop_held(&mut self) {
        self.counters.held_dropped += self.held.len() as u64;
        self.held.clear();
        self.live_high = None;
    }

    fn lose_link(&mut self, out: &mut Vec<Step>) {
        self.presence.disconnect();
        self.drop_held();
        self.continuity.broken = self.watermark.is_some();
        if let Some(repair) = &mut self.repair {
            out.extend(repair.request().map(|request| Step::CancelReplay { request }));
            repair.ended();
        }
    }
}

fn arrived(seq: EventSeq, ts: Option<f64>, payload: &Bytes) -> Arrived {
    let print = Fingerprint::of(seq, ts, payload);
    Arrived { batch: Batch { seq, ts, payload: payload.clone() }, print }
}

//! Requests for history and their answers.

use std::cmp::Ordering;

use super::{Continuity, Sequencer, Standing};
use crate::events::order::held::Arrived;
use crate::events::order::repair::{Repair, Wanted};
use crate::events::order::{ReplayId, RestartRule, Step};
use crate::ids::{EventSeq, Moment};
use crate::trust::MayErr;

impl Sequencer {
    pub(super) fn wanted_by(&self, request: ReplayId) -> Option<Wanted> {
        self.repair.as_ref().filter(|repair| repair.request() == Some(request)).map(|repair| repair.wanted)
    }

    pub(super) fn start_repair(
        &mut self,
        now: Moment,
        wanted: Wanted,
        gap_counted: bool,
        out: &mut Vec<Step>,
    ) {
        self.cancel_repair(out);
        self.repair = Some(Repair::new(wanted, gap_counted));
        self.ask(now, out);
    }

    pub(super) fn ask(&mut self, now: Moment, out: &mut Vec<Step>) {
        let deadline = now + self.config.queue_timeout;
        let missing = EventSeq(self.expected());
        let Some(repair) = &mut self.repair else { return };
        let request = ReplayId(self.next_request);
        self.next_request += 1;
        self.counters.replays_asked += 1;
        let from = match repair.wanted {
            Wanted::Probe => self.watermark.unwrap_or(EventSeq::ZERO),
            Wanted::Missing => missing,
        };
        repair.asked(request, deadline);
        out.push(Step::AskReplay { request, from });
    }

    /// The answer to a probe: the first number at or above the watermark decides.
    pub(super) fn probe_answered(&mut self, now: Moment, arrived: Arrived, out: &mut Vec<Step>) {
        let Some(watermark) = self.watermark else { return };
        let Some(repair) = &mut self.repair else { return };
        let seq = arrived.batch.seq;
        if seq < watermark {
            return;
        }
        repair.wanted = Wanted::Missing;
        repair.answered = true;
        if seq > watermark {
            // Undecidable, whatever the numbers say.
            self.continuity = Continuity { broken: true, suspect: true, ..self.continuity };
            self.bridge_to(arrived, out);
            self.drain(out);
            self.progressed(now, out);
        } else if self.last == Some(arrived.print) {
            self.continuity = Continuity::default();
            self.drain(out);
            self.progressed(now, out);
        } else {
            self.begin_process(RestartRule::Probed, out);
            self.start_repair(now, Wanted::Missing, false, out);
        }
    }

    /// One batch of a replay. A first answer above the expected number means that what lies before it has
    /// left the publisher's buffer (or never entered it): asking again would bring the same. A hole behind
    /// the first answer may be the replay's own loss: what follows is left, and comes again when the hole
    /// is asked for at the end of this answer.
    pub(super) fn history_answered(&mut self, now: Moment, arrived: Arrived, out: &mut Vec<Step>) {
        if self.contradicts_held(&arrived) {
            self.drop_held();
            self.begin_process(RestartRule::Probed, out);
            return self.start_repair(now, Wanted::Missing, false, out);
        }
        let Some(repair) = &mut self.repair else { return };
        let first = !std::mem::replace(&mut repair.answered, true);
        match arrived.batch.seq.0.cmp(&self.expected()) {
            Ordering::Less => {
                self.counters.duplicate_batches += 1;
                return;
            }
            Ordering::Equal => self.apply_next(arrived, out),
            Ordering::Greater if first => self.bridge_to(arrived, out),
            Ordering::Greater => return,
        }
        self.drain(out);
        self.progressed(now, out);
    }

    /// Whether the replay speaks for another process than the live batches that wait: it has another batch
    /// under the same number, or a newer one under a lower. The replay was asked later, so it is the
    /// present process.
    pub(super) fn contradicts_held(&self, arrived: &Arrived) -> bool {
        self.held.first().is_some_and(|(first, print)| match arrived.batch.seq.cmp(&first) {
            Ordering::Less => arrived.print.is_newer_than(print),
            Ordering::Equal => arrived.print != print,
            Ordering::Greater => false,
        })
    }

    /// Nothing below this batch can be had any more but what is held.
    pub(super) fn bridge_to(&mut self, arrived: Arrived, out: &mut Vec<Step>) {
        while let Some(held) = self.held.pop_below(arrived.batch.seq.0) {
            self.release(held, out);
        }
        self.release(arrived, out);
    }

    pub(super) fn progressed(&mut self, now: Moment, out: &mut Vec<Step>) {
        let deadline = now + self.config.replay_timeout;
        if let Some(repair) = &mut self.repair {
            repair.progressed(deadline);
        }
        self.finish_if_caught_up(out);
    }

    /// The replay has reached what was heard live: the rest of it would be duplicates.
    pub(super) fn finish_if_caught_up(&mut self, out: &mut Vec<Step>) {
        if self.live_high.is_some() && !self.hole_is_known() {
            let answered = self.repair.as_ref().is_some_and(|repair| repair.answered);
            self.counters.replays_answered += u64::from(answered);
            self.cancel_repair(out);
            self.finish_repair();
        }
    }

    pub(super) fn finish_repair(&mut self) {
        self.repair = None;
        self.joined = true;
        self.continuity.unproven = false;
        if self.standing == Standing::Unknown {
            self.standing = Standing::Complete;
        }
    }

    pub(super) fn ask_again_or_give_up(&mut self, now: Moment, out: &mut Vec<Step>) {
        let max_attempts = self.config.max_replay_attempts;
        let Some(repair) = &mut self.repair else { return };
        out.extend(repair.request().map(|request| Step::CancelReplay { request }));
        repair.ended();
        if repair.attempt_over(max_attempts) {
            self.ask(now, out);
        } else {
            self.give_up(out);
        }
    }

    /// No attempt brought an answer. What is held goes on as on a stream without replay, but behind a lost
    /// connection even the expected number is undecidable. Where nothing is held there may or may not be
    /// something missing: in doubt until the next number tells.
    pub(super) fn give_up(&mut self, out: &mut Vec<Step>) {
        self.counters.replays_given_up += 1;
        let nothing_follows = self.held.is_empty();
        // A probe that nobody answered compared nothing.
        self.continuity.suspect |= self.continuity.broken;
        while let Some(held) = self.held.pop_below(u64::MAX) {
            self.release(held, out);
        }
        self.continuity.unproven = nothing_follows || self.hole_is_known();
        self.live_high = None;
        self.cancel_repair(out);
        self.joined = true;
        if self.watermark.is_none() {
            self.standing = Standing::Partial(MayErr::Miss);
            self.continuity.unproven = false;
        }
    }

    pub(super) fn cancel_repair(&mut self, out: &mut Vec<Step>) {
        let request = self.repair.take().and_then(|repair| repair.request());
        out.extend(request.map(|request| Step::CancelReplay { request }));
    }
}

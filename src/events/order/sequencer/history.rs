//! Requests for history and their answers.

use std::cmp::Ordering;

use super::{Continuity, Sequencer};
use crate::events::order::held::Arrived;
use crate::events::order::repair::{Next, Repair, Wanted};
use crate::events::order::{Notice, ReplayId, RestartRule, Step};
use crate::ids::{EventSeq, Moment};
use crate::trust::Reason;

impl Sequencer {
    pub(super) fn wanted_by(&self, request: ReplayId) -> Option<Wanted> {
        self.repair.as_ref().filter(|repair| repair.request() == Some(request)).map(|repair| repair.wanted)
    }

    pub(super) fn start_repair(&mut self, wanted: Wanted, gap_counted: bool, out: &mut Vec<Step>) {
        self.cancel_repair(out);
        self.cancel_probe(out);
        let mut repair = Repair::new(wanted, gap_counted, EventSeq(self.expected()));
        // What waits was heard live.
        repair.meets_live = self.hole_is_known();
        self.repair = Some(repair);
        self.ask(out);
    }

    pub(super) fn ask(&mut self, out: &mut Vec<Step>) {
        let request = self.name_request();
        let missing = EventSeq(self.expected());
        let Some(repair) = &mut self.repair else { return };
        self.counters.replays_asked += 1;
        let from = match repair.wanted {
            Wanted::Probe => self.watermark.unwrap_or(EventSeq::ZERO),
            Wanted::Missing => repair.resume_at.unwrap_or(missing),
        };
        repair.asked(request);
        out.push(Step::AskReplay { request, from });
    }

    pub(super) fn name_request(&mut self) -> ReplayId {
        let request = ReplayId(self.next_request);
        self.next_request += 1;
        request
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
        repair.saw(seq);
        if seq > watermark {
            // Undecidable, whatever the numbers say.
            self.continuity = Continuity { broken: true, suspect: true, ..self.continuity };
            repair.brought_news();
            self.bridge_to(arrived, out);
            self.drain(out);
            self.progressed(now, out);
        } else if self.last == Some(arrived.print) {
            self.continuity = Continuity::default();
            self.drain(out);
            self.progressed(now, out);
        } else {
            self.begin_process(RestartRule::Probed, out);
            self.start_repair(Wanted::Missing, false, out);
        }
    }

    /// Only the end mark where the batch under our watermark was asked for. An unbroken connection that has
    /// carried that batch leads to the same process: it keeps no history. Otherwise it is another process, which
    /// has not come that far.
    pub(super) fn nothing_at_the_watermark(&mut self, out: &mut Vec<Step>) {
        if self.carried && !self.has_answered {
            self.bufferless = true;
            out.push(Step::Say(Notice::NoBuffer));
            return self.lose(out);
        }
        self.begin_process(RestartRule::Probed, out);
        self.start_repair(Wanted::Missing, false, out);
    }

    /// The end mark of an answer. The history is whole when it has no hole up to the highest number seen, and
    /// either meets what was heard live or has nothing behind it (requirement E10).
    pub(super) fn history_ended(&mut self, out: &mut Vec<Step>) {
        self.drain(out);
        let Some(repair) = &mut self.repair else { return };
        let (meets_live, progress) = (repair.meets_live, repair.has_progressed());
        // Nothing came from behind the hole either.
        let resumed = repair.resume_at.take().is_some();
        if self.hole_is_known() {
            self.count_gap();
            let Some(repair) = &mut self.repair else { return };
            return match repair.answer_over() {
                Next::Ask => self.ask(out),
                Next::Lost | Next::GiveUp if resumed => self.lose(out),
                Next::Lost | Next::GiveUp => self.go_on_behind_the_hole(out),
            };
        }
        if progress && !meets_live { self.ask(out) } else { self.finish_repair(out) }
    }

    /// The hole cannot be filled. What the answers showed behind it can still be had.
    fn go_on_behind_the_hole(&mut self, out: &mut Vec<Step>) {
        let resumes = self.repair.as_ref().is_some_and(|repair| repair.resume_at.is_some());
        if resumes { self.ask(out) } else { self.lose(out) }
    }

    /// The publisher has said that it does not have what is missing.
    pub(super) fn lose(&mut self, out: &mut Vec<Step>) {
        while let Some(held) = self.held.pop_below(u64::MAX) {
            self.release(held, out);
        }
        let replayed = self.repair.as_ref().and_then(Repair::highest);
        let highest =
            replayed.max(self.live_high.map(|(high, _)| high)).filter(|&high| Some(high) > self.watermark);
        if let Some(highest) = highest {
            let from = EventSeq(self.expected());
            let lost = (highest.0 - from.0).saturating_add(1);
            self.counters.lost_batches = self.counters.lost_batches.saturating_add(lost);
            self.count_gap();
            out.push(Step::Say(Notice::Lost { from, to: highest }));
            self.degrade(EventSeq(highest.0.saturating_add(1)), Reason::LostBatches, out);
        }
        self.live_high = None;
        self.cancel_repair(out);
        self.finish_repair(out);
    }

    /// One batch of a replay. A first answer above the expected number means that what lies before it has
    /// left the publisher's buffer (or never entered it): asking again would bring the same. A hole behind
    /// the first answer may be the replay's own loss: what follows is left, and comes again when the hole
    /// is asked for at the end of this answer.
    pub(super) fn history_answered(&mut self, now: Moment, arrived: Arrived, out: &mut Vec<Step>) {
        if self.contradicts_held(&arrived) {
            self.drop_held();
            self.begin_process(RestartRule::Probed, out);
            return self.start_repair(Wanted::Missing, false, out);
        }
        let Some(repair) = &mut self.repair else { return };
        repair.saw(arrived.batch.seq);
        let first = !std::mem::replace(&mut repair.answered, true);
        match arrived.batch.seq.0.cmp(&self.expected()) {
            Ordering::Less => {
                self.counters.duplicate_batches += 1;
                return;
            }
            Ordering::Equal => self.apply_next(arrived, out),
            Ordering::Greater if first => self.bridge_to(arrived, out),
            Ordering::Greater => {
                if let Some(repair) = &mut self.repair {
                    repair.saw_behind_hole(arrived.batch.seq);
                }
                return;
            }
        }
        if let Some(repair) = &mut self.repair {
            repair.resume_at = None;
            repair.brought_news();
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
        let Some(repair) = self.repair.as_ref().filter(|repair| repair.meets_live) else { return };
        if !self.hole_is_known() {
            self.counters.replays_answered += u64::from(repair.answered);
            out.extend(repair.request().map(|request| Step::CancelReplay { request }));
            self.finish_repair(out);
        }
    }

    /// What was asked for is here, or known to be lost.
    pub(super) fn finish_repair(&mut self, out: &mut Vec<Step>) {
        let repair = self.repair.take();
        if let (Some(repair), Some(to), true) = (repair, self.watermark, self.joined)
            && repair.first_missing <= to
        {
            out.push(Step::Say(Notice::Repaired { from: repair.first_missing, to }));
        }
        self.joined = true;
        self.settled = true;
        self.continuity.unproven = false;
    }

    /// The answer is late. Nobody at all may be there, which a second connection finds out.
    pub(super) fn request_timed_out(&mut self, now: Moment, out: &mut Vec<Step>) {
        let max_attempts = self.config.max_replay_attempts;
        let Some(repair) = &mut self.repair else { return };
        self.counters.replays_failed += 1;
        out.extend(repair.request().map(|request| Step::CancelReplay { request }));
        repair.ended();
        let mute = !repair.answered;
        match repair.attempt_over(max_attempts) {
            Next::Ask | Next::Lost => self.ask(out),
            Next::GiveUp => self.give_up(now, out),
        }
        if mute {
            self.try_connection(out);
        }
    }

    /// No attempt brought an answer. What is held goes on as on a stream without replay, but behind a lost
    /// connection even the expected number is undecidable. Where nothing is held there may or may not be
    /// something missing: in doubt until the next number tells.
    pub(super) fn give_up(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.counters.replays_given_up += 1;
        let nothing_follows = self.held.is_empty();
        // A probe that nobody answered compared nothing.
        self.continuity.suspect |= self.continuity.broken;
        while let Some(held) = self.held.pop_below(u64::MAX) {
            self.release(held, out);
        }
        self.continuity.unproven = self.watermark.is_some() && (nothing_follows || self.hole_is_known());
        self.live_high = None;
        self.cancel_repair(out);
        self.joined = true;
        // Asked again as any rank that is quiet.
        if let Some(quiet) = &mut self.quiet {
            quiet.rest(now);
        }
    }

    pub(super) fn cancel_repair(&mut self, out: &mut Vec<Step>) {
        let request = self.repair.take().and_then(|repair| repair.request());
        out.extend(request.map(|request| Step::CancelReplay { request }));
    }
}

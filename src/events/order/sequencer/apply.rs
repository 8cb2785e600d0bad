//! Applying batches, and what becomes of the view when some are lost or the process is another.

use std::cmp::Ordering;

use super::{Continuity, Sequencer};
use crate::events::order::held::Arrived;
use crate::events::order::{Notice, OnLoss, RestartRule, Step};
use crate::ids::EventSeq;
use crate::trust::{Reason, Reasons};

impl Sequencer {
    /// Applies the expected batch. Where it follows a lost connection behind which the endpoint could not be
    /// reached, or is older than the batch before it, it may as well be of a new process that has come exactly
    /// this far: undecidable, and the view says so.
    pub(super) fn apply_next(&mut self, arrived: Arrived, out: &mut Vec<Step>) {
        let older = self.last.is_some_and(|last| last.is_newer_than(arrived.print));
        if self.continuity.broken && (self.continuity.suspect || older) {
            self.degrade(arrived.batch.seq, Reason::RestartUndecided, out);
        }
        self.settled = true;
        self.apply(arrived, out);
    }

    /// Gives up the numbers before this batch, and applies it.
    pub(super) fn leap(&mut self, arrived: Arrived, out: &mut Vec<Step>) {
        let lost = arrived.batch.seq.0.saturating_sub(self.expected());
        self.counters.lost_batches = self.counters.lost_batches.saturating_add(lost);
        if lost > 0 {
            self.count_gap();
            let (from, to) = (EventSeq(self.expected()), EventSeq(arrived.batch.seq.0 - 1));
            out.push(Step::Say(Notice::Lost { from, to }));
        }
        if let Some(repair) = &mut self.repair {
            repair.gap_counted = false;
            repair.first_missing = EventSeq(arrived.batch.seq.0.saturating_add(1));
        }
        self.degrade(arrived.batch.seq, Reason::LostBatches, out);
        if self.continuity.broken && self.continuity.suspect && !self.losses.contains(Reason::JoinedLate) {
            self.losses.insert(Reason::RestartUndecided);
        }
        self.apply(arrived, out);
    }

    /// Something before the batch `next` is lost, or may be. Where nothing was applied before, no removal
    /// can be missing.
    pub(super) fn degrade(&mut self, next: EventSeq, why: Reason, out: &mut Vec<Step>) {
        self.lost_before = Some(next);
        self.settled = true;
        match (self.watermark, self.config.on_loss) {
            (None, _) => drop(self.losses.insert(Reason::JoinedLate)),
            (Some(_), OnLoss::Keep) => drop(self.losses.insert(why)),
            (Some(_), OnLoss::Clear) => {
                out.push(Step::Clear);
                self.losses = Reasons::from_iter([Reason::JoinedLate]);
            }
        }
    }

    pub(super) fn apply(&mut self, arrived: Arrived, out: &mut Vec<Step>) {
        let Arrived { batch, print, live } = arrived;
        self.carried = live;
        self.watermark = Some(batch.seq);
        self.last = Some(print);
        self.ring.push(batch.seq, print);
        self.continuity = Continuity::default();
        self.joined |= self.repair.is_none();
        self.counters.applied_batches += 1;
        out.push(Step::Apply(batch));
    }

    /// Applies a batch wherever it stands: what is missing before it cannot be had.
    pub(super) fn release(&mut self, arrived: Arrived, out: &mut Vec<Step>) {
        match arrived.batch.seq.0.cmp(&self.expected()) {
            Ordering::Less => self.counters.duplicate_batches += 1,
            Ordering::Equal => self.apply_next(arrived, out),
            Ordering::Greater => self.leap(arrived, out),
        }
    }

    /// Applies held batches as far as they follow without a hole.
    pub(super) fn drain(&mut self, out: &mut Vec<Step>) {
        let mut drained = false;
        while let Some(held) = self.held.pop_below(self.expected().saturating_add(1)) {
            self.release(held, out);
            drained = true;
        }
        if let Some(repair) = self.repair.as_mut().filter(|_| drained) {
            // The hole is closed; one behind it is another.
            repair.gap_counted = false;
            if self.hole_is_known() {
                self.count_gap();
            }
        }
    }

    /// Counts the hole in front of us, once.
    pub(super) fn count_gap(&mut self) {
        let counted = self.repair.as_mut().is_some_and(|r| std::mem::replace(&mut r.gap_counted, true));
        self.counters.gaps += u64::from(!counted);
    }

    /// From here on another process speaks. Whose the held batches are, the caller knows.
    pub(super) fn begin_process(&mut self, rule: RestartRule, out: &mut Vec<Step>) {
        self.counters.count_restart(rule);
        self.cancel_repair(out);
        self.watermark = None;
        self.last = None;
        self.ring.clear();
        self.carried = false;
        self.has_answered = false;
        self.bufferless = false;
        self.settled = false;
        self.losses = Reasons::NONE;
        self.lost_before = None;
        self.joined = true;
        self.continuity = Continuity::default();
        out.push(Step::Say(Notice::Restarted(rule)));
        out.push(Step::Clear);
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        let Continuity { broken, suspect, unproven } = self.continuity;
        unproven || (broken && suspect && self.presence.is_connected())
    }
}

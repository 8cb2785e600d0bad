//! Quiet is checked (requirement E9): a rank that says nothing is asked whether it is there and whether we have
//! all that it published.

use super::{Continuity, Sequencer};
use crate::events::order::held::Arrived;
use crate::events::order::quiet::{LIVE_LAG, Stage};
use crate::events::order::repair::Wanted;
use crate::events::order::{Link, Notice, ReplayId, RestartRule, Step};
use crate::ids::{EventSeq, Moment};

impl Sequencer {
    pub(super) fn is_probe(&self, request: ReplayId) -> bool {
        self.quiet.as_ref().is_some_and(|quiet| quiet.request() == Some(request))
    }

    /// A live batch answers every question.
    pub(super) fn end_probe(&mut self, now: Moment, bytes: usize, out: &mut Vec<Step>) {
        let Some(quiet) = &mut self.quiet else { return };
        out.extend(quiet.heard(now, bytes).map(|request| Step::CancelReplay { request }));
    }

    pub(super) fn cancel_probe(&mut self, out: &mut Vec<Step>) {
        let connected = self.presence.is_connected();
        let Some(quiet) = &mut self.quiet else { return };
        out.extend(quiet.request().map(|request| Step::CancelReplay { request }));
        if connected && quiet.request().is_some() {
            quiet.drop_question();
        } else if !connected {
            quiet.end();
        }
    }

    pub(super) fn probe_if_due(&mut self, now: Moment, out: &mut Vec<Step>) {
        let quiet_since = self.presence.quiet_since();
        let watermark = self.watermark;
        let busy = self.repair.is_some();
        let Some(quiet) = &mut self.quiet else { return };
        if quiet.deadline().is_none_or(|at| now < at) {
            return;
        }
        match quiet.stage {
            // A repair asks by itself.
            Stage::Idle | Stage::Behind { .. } if busy => quiet.rest(now),
            Stage::Idle => {
                if quiet.is_due(now, quiet_since) {
                    self.probe(now, out);
                }
            }
            Stage::Asked { request, .. } => {
                out.push(Step::CancelReplay { request });
                self.probe_unanswered(now, out);
            }
            Stage::Behind { highest, .. } if watermark >= Some(highest) => quiet.settled(now),
            Stage::Behind { highest, .. } => self.found_deaf(now, highest, out),
            Stage::Trying { .. } => {}
        }
    }

    fn probe(&mut self, now: Moment, out: &mut Vec<Step>) {
        if !self.has_history() {
            if !self.try_connection(out)
                && let Some(quiet) = &mut self.quiet
            {
                // It can only be heard.
                quiet.settled(now);
            }
            return;
        }
        let request = self.name_request();
        self.counters.probes_asked += 1;
        let Some(quiet) = &mut self.quiet else { return };
        quiet.wait_for(Stage::Asked { request, deadline: None, same: false });
        out.push(Step::AskReplay { request, from: self.watermark.unwrap_or(EventSeq::ZERO) });
    }

    /// Tries a second connection, unless one is being tried; `false` if the endpoint cannot be dialled.
    pub(super) fn try_connection(&mut self, out: &mut Vec<Step>) -> bool {
        if self.presence.link() != Link::Dialled || !self.presence.is_connected() {
            return false;
        }
        let request = self.name_request();
        let Some(quiet) = &mut self.quiet else { return false };
        if !matches!(quiet.stage, Stage::Trying { .. }) {
            self.counters.probes_asked += 1;
            quiet.wait_for(Stage::Trying { request });
            out.push(Step::TryConnection { request });
        }
        true
    }

    /// One batch of the answer to a probe.
    pub(super) fn quiet_answered(&mut self, now: Moment, arrived: &Arrived, out: &mut Vec<Step>) {
        let seq = arrived.batch.seq;
        match self.watermark {
            Some(watermark) if seq < watermark => {}
            Some(watermark) if seq == watermark && self.last != Some(arrived.print) => {
                self.cancel_probe(out);
                self.found_restarted(out);
            }
            Some(watermark) if seq == watermark => {
                if let Some(Stage::Asked { same, .. }) = self.quiet.as_mut().map(|quiet| &mut quiet.stage) {
                    *same = true;
                }
            }
            // New to us, and it was never settled what we have.
            _ if !self.settled || self.continuity != Continuity::default() => {
                let wanted = if self.watermark.is_some() { Wanted::Probe } else { Wanted::Missing };
                self.start_repair(wanted, false, out);
            }
            // The event connection may bring it any moment; what follows is not needed.
            _ => {
                self.cancel_probe(out);
                if let Some(quiet) = &mut self.quiet {
                    quiet.wait_for(Stage::Behind { highest: seq, until: now + LIVE_LAG });
                }
            }
        }
    }

    /// The end mark of the answer to a probe, with nothing in it that is new to us.
    pub(super) fn quiet_ended(&mut self, now: Moment, out: &mut Vec<Step>) {
        let Some(quiet) = &mut self.quiet else { return };
        let Stage::Asked { same, .. } = quiet.stage else { return };
        quiet.settled(now);
        if same || self.watermark.is_none() {
            // Alive, and we have all of it.
            self.continuity = Continuity::default();
            self.joined = true;
            self.settled = true;
        } else if self.carried && !self.has_answered {
            self.bufferless = true;
            out.push(Step::Say(Notice::NoBuffer));
        } else {
            self.found_restarted(out);
        }
    }

    /// Nobody answered in time, or the connection for the answer could not be made.
    pub(super) fn probe_unanswered(&mut self, now: Moment, out: &mut Vec<Step>) {
        self.counters.probes_failed += 1;
        let Some(quiet) = &mut self.quiet else { return };
        quiet.drop_question();
        if quiet.failed() {
            return self.probe(now, out);
        }
        if !self.try_connection(out)
            && let Some(quiet) = &mut self.quiet
        {
            quiet.rest(now);
        }
    }

    /// A second connection was tried: it shook hands, or it did not.
    pub fn on_tried(&mut self, now: Moment, request: ReplayId, reached: bool, out: &mut Vec<Step>) {
        let has_history = self.has_history();
        let known = self.watermark.is_some();
        let Some(quiet) = &mut self.quiet else { return };
        if quiet.stage != (Stage::Trying { request }) {
            return;
        }
        if reached {
            quiet.settled(now);
            // Whether our own connection still leads anywhere is not known where nobody can be asked.
            self.continuity.unproven |= self.presence.show_life() && !has_history && known;
            return;
        }
        self.counters.probes_failed += 1;
        quiet.stage = Stage::Idle;
        if !has_history && quiet.failed() {
            self.try_connection(out);
            return;
        }
        quiet.rest(now);
        self.presence.fall_mute();
    }

    /// The engine has published what the event connection did not bring.
    fn found_deaf(&mut self, now: Moment, highest: EventSeq, out: &mut Vec<Step>) {
        self.counters.deaf_links += 1;
        out.push(Step::Say(Notice::LivePathDeaf { highest }));
        if let Some(quiet) = &mut self.quiet {
            quiet.rest(now);
        }
        let wanted = if self.watermark.is_some() { Wanted::Probe } else { Wanted::Missing };
        self.start_repair(wanted, false, out);
        out.push(Step::Reconnect);
    }

    /// The replay endpoint speaks for another process than the event connection did.
    fn found_restarted(&mut self, out: &mut Vec<Step>) {
        self.drop_held();
        self.begin_process(RestartRule::Probed, out);
        self.start_repair(Wanted::Missing, false, out);
        out.push(Step::Reconnect);
    }
}

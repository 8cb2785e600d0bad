//! Whether the publisher is there at all.

use std::time::Duration;

use crate::ids::Moment;

/// An endpoint that refuses for this long after a lost connection has nobody behind it (requirement E4).
const REFUSED_FOR: Duration = Duration::from_secs(2);

/// Connection, refusals and signs of life of one publisher.
#[derive(Debug)]
pub(super) struct Presence {
    declared: Moment,
    grace: Duration,
    connected: bool,
    /// Whether a connection was ever made; before that only the grace counts.
    known: bool,
    heard: Option<Moment>,
    refused_since: Option<Moment>,
    unheard: bool,
    gone: bool,
}

impl Presence {
    pub(super) fn new(declared: Moment, grace: Duration) -> Self {
        Self {
            declared,
            grace,
            connected: false,
            known: false,
            heard: None,
            refused_since: None,
            unheard: false,
            gone: false,
        }
    }

    pub(super) fn connect(&mut self) {
        self.connected = true;
        self.known = true;
        self.refused_since = None;
        self.gone = false;
    }

    pub(super) fn disconnect(&mut self) {
        self.connected = false;
    }

    /// A connection was refused. Says whether that is news about a publisher that we had.
    pub(super) fn refuse(&mut self, now: Moment) -> bool {
        if self.connected || !self.known {
            return false;
        }
        self.refused_since.get_or_insert(now);
        self.tick(now);
        true
    }

    pub(super) fn hear(&mut self, now: Moment) {
        self.heard = Some(now);
        self.unheard = false;
    }

    pub(super) fn tick(&mut self, now: Moment) {
        self.unheard |= self.grace_ends().is_some_and(|at| now >= at);
        self.gone |= self.refusal_ends().is_some_and(|at| now >= at);
    }

    /// When [`tick`](Self::tick) would change something.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        let grace = self.grace_ends().filter(|_| !self.unheard);
        let refusal = self.refusal_ends().filter(|_| !self.gone);
        grace.into_iter().chain(refusal).min()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    pub(super) fn is_silent(&self) -> bool {
        self.unheard || self.gone
    }

    pub(super) fn last_heard(&self) -> Option<Moment> {
        self.heard
    }

    fn grace_ends(&self) -> Option<Moment> {
        self.heard.is_none().then(|| self.declared + self.grace)
    }

    fn refusal_ends(&self) -> Option<Moment> {
        self.refused_since.map(|since| since + REFUSED_FOR)
    }
}

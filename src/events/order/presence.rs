//! Whether the publisher is there at all.

use std::time::Duration;

use super::Link;
use crate::ids::Moment;
use crate::trust::{Reason, Reasons};

/// Without a connection for this long, another process may have come up in the publisher's place. None starts
/// faster.
const RESTART_TAKES: Duration = Duration::from_secs(1);

/// Connection and signs of life of one publisher.
#[derive(Debug)]
pub(super) struct Presence {
    link: Link,
    silent_after: Duration,
    grace: Duration,
    connected: bool,
    /// Since when there is, or is not, a connection; declared is not connected.
    since: Moment,
    heard: Option<Moment>,
    /// No connection for `silent_after`.
    gone: bool,
    /// Not heard within the grace.
    unheard: bool,
    /// Nobody answered, neither the replay endpoint nor a second connection.
    mute: bool,
}

impl Presence {
    pub(super) fn new(declared: Moment, link: Link, silent_after: Duration, grace: Duration) -> Self {
        Self {
            link,
            silent_after,
            grace,
            connected: false,
            since: declared,
            heard: None,
            gone: false,
            unheard: false,
            mute: false,
        }
    }

    /// The connection stands. Says whether another process can have taken the publisher's place meanwhile.
    pub(super) fn connect(&mut self, now: Moment) -> bool {
        let away = now.since(self.since) >= RESTART_TAKES;
        self.connected = true;
        self.since = now;
        self.gone = false;
        self.mute = false;
        away
    }

    pub(super) fn disconnect(&mut self, now: Moment) {
        if self.connected {
            self.connected = false;
            self.since = now;
        }
        self.tick(now);
    }

    pub(super) fn hear(&mut self, now: Moment) {
        self.heard = Some(now);
        self.unheard = false;
        self.mute = false;
    }

    /// Nobody answered.
    pub(super) fn fall_mute(&mut self) {
        self.mute = true;
    }

    /// Somebody is there, though nothing was said. Says whether that is news.
    pub(super) fn show_life(&mut self) -> bool {
        std::mem::replace(&mut self.mute, false)
    }

    pub(super) fn tick(&mut self, now: Moment) {
        self.gone |= self.gone_at().is_some_and(|at| now >= at);
        self.unheard |= self.grace_ends().is_some_and(|at| now >= at);
    }

    /// When [`tick`](Self::tick) would change something.
    pub(super) fn next_deadline(&self) -> Option<Moment> {
        let gone = self.gone_at().filter(|_| !self.gone);
        let grace = self.grace_ends().filter(|_| !self.unheard);
        gone.into_iter().chain(grace).min()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    /// Whether events may come: there is a connection, or none is needed.
    pub(super) fn is_open(&self) -> bool {
        self.connected || self.link == Link::Fed
    }

    pub(super) fn link(&self) -> Link {
        self.link
    }

    pub(super) fn last_heard(&self) -> Option<Moment> {
        self.heard
    }

    /// Since when the publisher has said nothing on this connection.
    pub(super) fn quiet_since(&self) -> Moment {
        self.heard.map_or(self.since, |heard| heard.max(self.since))
    }

    /// Nothing was ever heard, and the grace is over.
    pub(super) fn is_unheard(&self) -> bool {
        self.unheard
    }

    pub(super) fn reasons(&self) -> Reasons {
        let gone = self.gone.then_some(Reason::NoConnection);
        let mute = self.mute.then_some(Reason::ProbeFailed);
        gone.into_iter().chain(mute).collect()
    }

    fn gone_at(&self) -> Option<Moment> {
        (!self.is_open()).then(|| self.since + self.silent_after)
    }

    fn grace_ends(&self) -> Option<Moment> {
        (self.heard.is_none() && self.is_open()).then(|| self.since + self.grace)
    }
}

//! Versions: how a reader knows that what it read belongs together.
//!
//! # The argument
//!
//! One writer opens a version (makes it odd), changes what it guards with relaxed stores, and closes it
//! (makes it even again). A reader takes an even version, reads, and asks whether it is unchanged.
//!
//! *One version.* `open` is a store followed by a release fence: a reader that sees any store made after it
//! and then passes the acquire fence in `unchanged` sees the odd version or a later one, and answers no.
//! `close` is a release store and `begin` an acquire load: a reader that begins at a version sees all that
//! was stored before it was closed. So a reader whose version is unchanged saw exactly what lay between a
//! close and the next open.
//!
//! *Several versions.* An event opens every version that it needs and closes none before its last change. If
//! a reader began at A before the event opened it and at B after the event closed it, then beginning at B
//! (acquire) came after closing B (release), which came after opening A; so `unchanged` of A says no. Hence
//! versions that all are unchanged at the end of a query show all of an event or nothing of it, and there
//! was one moment, between the last `begin` and the first `unchanged`, at which everything read was true.
//!
//! *Absence.* That nothing lies behind a block is read from a table without a version, last in a walk: after
//! every `begin` and before every `unchanged`. An event that takes a run out of the table opens the version
//! of the run before it first, so a reader that misses the run in the middle of the event learns of it as
//! above. One that puts a run in keeps that run's version open until its end, so what a reader misses before
//! that is missed in the state before the event, and what it finds it must wait for.

use super::sync::{AtomicU64, Ordering, fence};

/// Changes of something that one thread writes and any number read.
#[derive(Debug, Default)]
pub(super) struct Version(AtomicU64);

impl Version {
    /// A version that continues another's numbers: memory that is used again must not repeat one.
    pub(super) fn starting_at(even: u64) -> Self {
        Self(AtomicU64::new(even & !1))
    }

    /// Announces changes; `false` if they are announced already. The writer's.
    pub(super) fn open(&self) -> bool {
        let now = self.0.load(Ordering::Relaxed);
        if now & 1 == 1 {
            return false;
        }
        self.0.store(now + 1, Ordering::Relaxed);
        fence(Ordering::Release);
        true
    }

    /// Ends the changes. The writer's.
    pub(super) fn close(&self) {
        let now = self.0.load(Ordering::Relaxed);
        self.0.store((now | 1) + 1, Ordering::Release);
    }

    /// The number itself, for what must go on above it. The writer's.
    pub(super) fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The version to read at; `None` while it is being changed.
    pub(super) fn begin(&self) -> Option<u64> {
        let now = self.0.load(Ordering::Acquire);
        (now & 1 == 0).then_some(now)
    }

    /// Whether everything read since `begin` belongs to that version.
    pub(super) fn unchanged(&self, since: u64) -> bool {
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == since
    }
}

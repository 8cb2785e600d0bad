//! What one query sees of the tables: they are loaded once and not once per run.

use std::sync::Arc;

use super::published::Pin;
use super::run::Run;
use super::tree::{Heads, RunId, Tables, run_at, run_of};
use crate::block::SequenceHash;

/// What a query read was changed under it; it must be asked again.
pub(super) struct Changed;

/// Content that a walk looks for: the first block of a run.
#[derive(Clone, Copy)]
pub(super) struct Key {
    pub(super) first: SequenceHash,
    hash: u64,
}

/// The tables as they were when a query began.
#[derive(Clone, Copy)]
pub(super) struct Sight<'p> {
    tables: &'p Tables,
    chunks: &'p [Arc<[Run]>],
    heads: &'p Heads,
}

impl<'p> Sight<'p> {
    /// `None` if there is nothing in the index.
    pub(super) fn of(tables: &'p Tables, pin: &'p Pin) -> Option<Self> {
        Some(Self { tables, heads: tables.heads(pin)?, chunks: tables.chunks(pin)? })
    }

    #[inline]
    pub(super) fn key(&self, first: SequenceHash) -> Key {
        Key { first, hash: self.tables.head_hash(first) }
    }

    /// Asks for the line where a key is looked up.
    #[inline]
    pub(super) fn prefetch(&self, key: Key) {
        self.heads.prefetch(key.hash);
    }

    /// Asks for the header of the run that a key seems to lead to. Waits for the line where it is looked up.
    #[inline]
    pub(super) fn prefetch_guess(&self, key: Key) {
        if let Some(run) = self.heads.guess(key.hash).and_then(|payload| self.run(run_of(payload))) {
            run.prefetch();
        }
    }

    /// The run with this number; `None` if its chunk is younger than this.
    #[inline]
    pub(super) fn run(&self, id: RunId) -> Option<&'p Run> {
        run_at(self.chunks, id)
    }

    /// A run that begins with this content, at this moment.
    #[inline]
    pub(super) fn head(&self, key: Key) -> Result<Option<(RunId, &'p Run)>, Changed> {
        let (mut found, mut younger) = (None, false);
        self.heads.find(key.hash, |payload| {
            let id = run_of(payload);
            let Some(run) = self.run(id) else {
                younger = true;
                return true;
            };
            run.prefetch();
            found = (run.first() == key.first).then_some((id, run));
            found.is_some()
        });
        if younger { Err(Changed) } else { Ok(found) }
    }

    /// Whether what is not found here is nowhere.
    pub(super) fn is_current(&self, pin: &Pin) -> bool {
        self.tables.heads(pin).is_some_and(|heads| std::ptr::eq(heads, self.heads))
    }
}

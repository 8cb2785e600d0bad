//! A reservation as a handle: it ends when it is dropped.

use std::fmt;

use crate::ids::{Moment, RankKey};
use crate::indexer::View;
use crate::load::{ReservationId, Ticket};

/// A reservation that ends when it is dropped.
///
/// Each call takes the lock of the load table for a moment; do not drop a booking while holding it.
pub struct Booking {
    view: View,
    id: ReservationId,
    ticket: Ticket,
    rank: RankKey,
    kept: bool,
}

impl Booking {
    pub(super) fn new(view: View, id: ReservationId, ticket: Ticket, rank: RankKey) -> Self {
        Self { view, id, ticket, rank, kept: false }
    }

    /// Its id.
    pub fn id(&self) -> &ReservationId {
        &self.id
    }

    /// The rank that it stands on.
    pub fn rank(&self) -> &RankKey {
        &self.rank
    }

    /// The prompt is prefilled. `false` if the reservation is over: expired, ended by its id, or its rank went.
    pub fn prefill_complete(&self, now: Moment) -> bool {
        let mut loads = self.view.loads().lock();
        loads.ledger().ticket(&self.id) == Some(self.ticket)
            && loads.ledger_mut().prefill_complete(now, &self.id)
    }

    /// One more output block; see [`Ledger::output_block`](crate::load::Ledger::output_block). `false` if the
    /// reservation is over.
    pub fn output_block(&self, now: Moment, decay: Option<f64>) -> bool {
        let mut loads = self.view.loads().lock();
        loads.ledger().ticket(&self.id) == Some(self.ticket)
            && loads.ledger_mut().output_block(now, &self.id, decay)
    }

    /// Lets the reservation stand without its handle: it ends by its id or when its lease runs out.
    pub fn keep(mut self) -> ReservationId {
        self.kept = true;
        self.id.clone()
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if !self.kept {
            self.view.loads().lock().ledger_mut().free_ticket(&self.id, self.ticket);
        }
    }
}

impl fmt::Debug for Booking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Booking").field("id", &self.id).field("rank", &self.rank).finish_non_exhaustive()
    }
}

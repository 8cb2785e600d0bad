//! Reservations: what was just sent to each rank, before any report can show it.
//!
//! A reservation stands from the moment it is booked until it is freed, its lease runs out or its rank goes.
//! While it stands, its prefill tokens (until its prefill is complete), its blocks and its request count.
//!
//! **Together with reports.** A report is measured at one moment: when it came, less the age that it states.
//! A reservation booked before that moment is taken to be in the report, a later one is added to it; at the
//! same moment the order in which both came decides. So nothing is counted twice, and:
//!
//! - a block that a reported reservation holds is not added again by a later one that shares it;
//! - what ends is not subtracted from a report that may or may not contain it: the next report shows it;
//! - output blocks count with their reservation: a report that contains the one contains the others.
//!
//! **Blocks are shared by content.** Two reservations with one prefix hold its blocks once. A sequence hash
//! stands for everything before it, so a prompt's blocks that are active on a rank are its leading ones.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::block::SequenceHash;
use crate::ids::{Moment, RankKey};

/// The name of a reservation, chosen by the caller or made for it. Unique among all that stand.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReservationId(Arc<str>);

impl ReservationId {
    /// The id with this text.
    pub fn new(id: impl AsRef<str>) -> Self {
        Self(Arc::from(id.as_ref()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for ReservationId {
    fn from(id: &str) -> Self {
        Self::new(id)
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// Which reservation under an id: ids are used again, tickets never.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(u64);

/// What a request takes on its rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Claim {
    prefill_tokens: u64,
    isl_tokens: u64,
    blocks: ClaimedBlocks,
}

/// The blocks of a claim.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ClaimedBlocks {
    /// The prompt's full blocks by content, in order; those that are active on the rank already are shared.
    Named(Box<[SequenceHash]>),
    /// So many blocks of unknown content, shared with nobody.
    Count(u64),
}

/// Most tokens and unnamed blocks of one claim, so that no sum of claims overflows: a million times the longest prompts
/// of today. More is read as this many.
const MAX_AMOUNT: u64 = 1 << 40;

/// Most output blocks of one reservation: more than any context holds. More are read as this many.
const MAX_OUTPUT: u64 = 1 << 20;

impl Claim {
    /// A claim of so many tokens to be prefilled, of a prompt of `isl_tokens`, and of its blocks.
    pub fn new(prefill_tokens: u64, isl_tokens: u64, blocks: ClaimedBlocks) -> Self {
        let blocks = match blocks {
            ClaimedBlocks::Count(count) => ClaimedBlocks::Count(count.min(MAX_AMOUNT)),
            named @ ClaimedBlocks::Named(_) => named,
        };
        let (prefill_tokens, isl_tokens) = (prefill_tokens.min(MAX_AMOUNT), isl_tokens.min(MAX_AMOUNT));
        Self { prefill_tokens, isl_tokens, blocks }
    }

    /// Tokens to be prefilled.
    pub fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens
    }

    /// Tokens of the prompt.
    pub fn isl_tokens(&self) -> u64 {
        self.isl_tokens
    }

    /// The named blocks; empty where only their number is known.
    pub fn named(&self) -> &[SequenceHash] {
        match &self.blocks {
            ClaimedBlocks::Named(blocks) => blocks,
            ClaimedBlocks::Count(_) => &[],
        }
    }

    fn unnamed(&self) -> u64 {
        match self.blocks {
            ClaimedBlocks::Named(_) => 0,
            ClaimedBlocks::Count(count) => count,
        }
    }
}

/// Settings of a [`Ledger`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LedgerConfig {
    /// A reservation of which nothing is heard for this long is over.
    pub lease: Duration,
    /// Reservations that may stand at once.
    pub max_reservations: usize,
    /// Named blocks of all of them, each counted as often as it is claimed.
    pub max_blocks: usize,
}

impl Default for LedgerConfig {
    /// A lease of 15 minutes: longer than a generation takes, short enough that what a dead caller left does
    /// not stand in the way for long. 100,000 reservations are 1,000 requests on each of 100 ranks; 8 Mi
    /// blocks are 128 Mi tokens in blocks of 16, and at most half a gigabyte.
    fn default() -> Self {
        Self { lease: Duration::from_secs(900), max_reservations: 100_000, max_blocks: 8 << 20 }
    }
}

/// Why nothing was booked.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// A reservation with this id stands.
    #[error("reservation {id} is in use")]
    IdInUse {
        /// The id.
        id: ReservationId,
    },
    /// The rank is not declared, or has just gone.
    #[error("rank {rank} is not declared")]
    NotDeclared {
        /// The rank.
        rank: RankKey,
    },
    /// As many reservations, or blocks of them, stand as may.
    #[error("the ledger is full: {reservations} reservations with {blocks} blocks stand")]
    Full {
        /// Reservations that stand.
        reservations: usize,
        /// Their named blocks.
        blocks: usize,
    },
}

/// What stands on a rank.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug, Default)]
pub struct Booked {
    /// Requests.
    pub requests: u64,
    /// Prompt tokens whose prefill is not complete.
    pub prefill_tokens: u64,
    /// Blocks, each content once; a fraction where outputs decay.
    pub decode_blocks: f64,
}

/// How much of a prompt is active on a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shared {
    /// Leading blocks that reservations hold there.
    pub active: usize,
    /// Those of them that a reservation has prefilled already; never more than `active`.
    pub computed: usize,
}

/// What became of reservations so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LedgerCounts {
    /// Booked.
    pub booked: u64,
    /// Ended by the caller.
    pub freed: u64,
    /// Ended because nothing was heard of them.
    pub expired: u64,
    /// Ended because their rank went.
    pub dropped: u64,
    /// Refused: the id was in use.
    pub id_in_use: u64,
    /// Refused: the ledger was full.
    pub full: u64,
}

/// All reservations that stand, by id and by rank.
///
/// Only declared ranks have a place. Every total is kept as it changes: reading one costs a map look-up,
/// booking and ending cost one per named block.
#[derive(Debug, Default)]
pub struct Ledger {
    config: LedgerConfig,
    reservations: HashMap<ReservationId, Reservation>,
    ranks: HashMap<RankKey, RankBook>,
    leases: BTreeSet<(Moment, Ticket, ReservationId)>,
    next: u64,
    blocks: usize,
    counts: LedgerCounts,
}

#[derive(Debug)]
struct Reservation {
    rank: RankKey,
    ticket: Ticket,
    booked: Moment,
    expires: Moment,
    claim: Claim,
    open: Open,
    reported: bool,
}

/// What of a reservation changes while it stands.
#[derive(Clone, Copy, Debug)]
struct Open {
    prefill_tokens: u64,
    unnamed: u64,
    outputs: u64,
    /// Millionths: what each output block counts.
    share: u64,
}

impl Open {
    fn sums(self) -> Sums {
        Sums {
            requests: 1,
            prefill_tokens: self.prefill_tokens,
            unnamed: self.unnamed,
            output_millionths: self.outputs * self.share,
        }
    }
}

/// One whole block.
const WHOLE: u64 = 1_000_000;

/// Sums without the named blocks. In whole numbers, so that what is added and taken away again leaves 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sums {
    requests: u64,
    prefill_tokens: u64,
    unnamed: u64,
    output_millionths: u64,
}

impl Sums {
    fn add(&mut self, more: Self) {
        self.requests += more.requests;
        self.prefill_tokens += more.prefill_tokens;
        self.unnamed += more.unnamed;
        self.output_millionths += more.output_millionths;
    }

    /// `less` was added before.
    fn take(&mut self, less: Self) {
        self.requests -= less.requests;
        self.prefill_tokens -= less.prefill_tokens;
        self.unnamed -= less.unnamed;
        self.output_millionths -= less.output_millionths;
    }

    fn with_blocks(self, named: u64) -> Booked {
        Booked {
            requests: self.requests,
            prefill_tokens: self.prefill_tokens,
            decode_blocks: (named + self.unnamed) as f64 + self.output_millionths as f64 / WHOLE as f64,
        }
    }
}

impl Ledger {
    /// An empty ledger.
    pub fn new(config: LedgerConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// Gives a declared rank its place; one that has it keeps what stands there.
    pub fn declare(&mut self, rank: &RankKey) {
        if !self.ranks.contains_key(rank) {
            self.ranks.insert(rank.clone(), RankBook::default());
        }
    }

    /// Forgets a rank that is gone and all that stands there; how many reservations that were.
    pub fn retire(&mut self, rank: &RankKey) -> usize {
        let Some(book) = self.ranks.remove(rank) else { return 0 };
        for id in book.ids.values() {
            if let Some(gone) = self.reservations.remove(id) {
                self.leases.remove(&(gone.expires, gone.ticket, id.clone()));
                self.blocks -= gone.claim.named().len();
                self.counts.dropped += 1;
            }
        }
        book.ids.len()
    }

    /// Books a claim on a rank.
    ///
    /// # Errors
    ///
    /// [`ReserveError`]; then nothing has changed but a count.
    pub fn reserve(
        &mut self,
        now: Moment,
        id: &ReservationId,
        rank: &RankKey,
        claim: Claim,
    ) -> Result<Ticket, ReserveError> {
        self.check_id(id)?;
        let blocks = claim.named().len();
        if self.reservations.len() >= self.config.max_reservations
            || blocks > self.config.max_blocks.saturating_sub(self.blocks)
        {
            self.counts.full += 1;
            return Err(ReserveError::Full { reservations: self.reservations.len(), blocks: self.blocks });
        }
        let Some(book) = self.ranks.get_mut(rank) else {
            return Err(ReserveError::NotDeclared { rank: rank.clone() });
        };
        let ticket = Ticket(self.next);
        self.next += 1;
        let open =
            Open { prefill_tokens: claim.prefill_tokens, unnamed: claim.unnamed(), outputs: 0, share: WHOLE };
        book.enter(ticket, id, &claim, open);
        self.blocks += blocks;
        self.counts.booked += 1;
        let expires = now + self.config.lease;
        self.leases.insert((expires, ticket, id.clone()));
        let rank = rank.clone();
        let reservation = Reservation { rank, ticket, booked: now, expires, claim, open, reported: false };
        self.reservations.insert(id.clone(), reservation);
        Ok(ticket)
    }

    /// Whether a reservation could be booked under this id.
    ///
    /// # Errors
    ///
    /// [`ReserveError::IdInUse`], which is counted.
    pub fn check_id(&mut self, id: &ReservationId) -> Result<(), ReserveError> {
        if self.reservations.contains_key(id) {
            self.counts.id_in_use += 1;
            return Err(ReserveError::IdInUse { id: id.clone() });
        }
        Ok(())
    }

    /// The prompt is prefilled: its tokens count no longer. May be repeated; `false` if there is no such
    /// reservation.
    pub fn prefill_complete(&mut self, now: Moment, id: &ReservationId) -> bool {
        self.change(now, id, |open| open.prefill_tokens = 0, true)
    }

    /// The request has one more output block. With `decay`, from 0 to 1, all its output blocks count that
    /// much from now on: the nearer its end, the less. `false` if there is no such reservation.
    pub fn output_block(&mut self, now: Moment, id: &ReservationId, decay: Option<f64>) -> bool {
        let grow = |open: &mut Open| {
            open.outputs = (open.outputs + 1).min(MAX_OUTPUT);
            if let Some(decay) = decay {
                // A share of a million, whatever was given: not a number becomes 0.
                open.share = (decay.clamp(0.0, 1.0) * WHOLE as f64).round() as u64;
            }
        };
        self.change(now, id, grow, false)
    }

    /// Ends a reservation; `false` if there is none with this id.
    pub fn free(&mut self, id: &ReservationId) -> bool {
        let freed = self.end(id);
        self.counts.freed += u64::from(freed);
        freed
    }

    /// Ends a reservation if it is the one with this ticket, and not a later one with its id.
    pub fn free_ticket(&mut self, id: &ReservationId, ticket: Ticket) -> bool {
        self.ticket(id) == Some(ticket) && self.free(id)
    }

    /// Ends what has not been heard of for the length of a lease; how many those were.
    ///
    /// Costs a look at the earliest lease if none is due.
    pub fn expire(&mut self, now: Moment) -> usize {
        let mut expired = 0;
        while let Some((due, _, id)) = self.leases.first()
            && *due <= now
        {
            let id = id.clone();
            if !self.end(&id) {
                break;
            }
            expired += 1;
        }
        self.counts.expired += expired as u64;
        expired
    }

    /// When the earliest lease runs out.
    pub fn next_deadline(&self) -> Option<Moment> {
        self.leases.first().map(|(due, ..)| *due)
    }

    /// A report on the rank was measured at that moment: what was booked before is in it.
    ///
    /// Costs a map look-up per block that was booked since the last one.
    pub fn reported(&mut self, rank: &RankKey, measured: Moment, received: Moment) {
        let Some(book) = self.ranks.get_mut(rank) else { return };
        let in_report = |reservation: &Reservation| {
            // Booked at the very moment of a report that has just come: before it, as the order shows.
            reservation.booked < measured || (reservation.booked == measured && measured == received)
        };
        for (ticket, id) in std::mem::take(&mut book.since_ids) {
            match self.reservations.get_mut(&id) {
                Some(reservation) if reservation.ticket == ticket && in_report(reservation) => {
                    reservation.reported = true;
                    book.cover(&reservation.claim, reservation.open);
                }
                Some(reservation) if reservation.ticket == ticket => {
                    book.since_ids.insert(ticket, id);
                }
                _ => {}
            }
        }
        book.uncover();
    }

    /// Everything that stands on a rank.
    pub fn all(&self, rank: &RankKey) -> Booked {
        self.ranks
            .get(rank)
            .map_or_else(Booked::default, |book| book.all.with_blocks(book.active.len() as u64))
    }

    /// What stands on a rank and is in no report.
    pub fn since_report(&self, rank: &RankKey) -> Booked {
        self.ranks.get(rank).map_or_else(Booked::default, |book| book.since.with_blocks(book.since_blocks))
    }

    /// How much of a prompt with these blocks is active on a rank. Costs the logarithm of their number in
    /// look-ups, and one where nothing is active.
    pub fn shared(&self, rank: &RankKey, blocks: &[SequenceHash]) -> Shared {
        let Some(book) = self.ranks.get(rank).filter(|book| !book.active.is_empty()) else {
            return Shared::default();
        };
        if blocks.first().is_none_or(|first| !book.active.contains_key(first)) {
            return Shared::default();
        }
        let active = blocks.partition_point(|hash| book.active.contains_key(hash));
        let is_computed = |hash: &SequenceHash| book.active.get(hash).is_some_and(|held| held.computed);
        Shared { active, computed: blocks[..active].partition_point(is_computed) }
    }

    /// The reservation that stands under an id.
    pub fn ticket(&self, id: &ReservationId) -> Option<Ticket> {
        self.reservations.get(id).map(|reservation| reservation.ticket)
    }

    /// The rank of the reservation that stands under an id.
    pub fn rank_of(&self, id: &ReservationId) -> Option<&RankKey> {
        self.reservations.get(id).map(|reservation| &reservation.rank)
    }

    /// Reservations that stand.
    pub fn len(&self) -> usize {
        self.reservations.len()
    }

    /// Whether none stands.
    pub fn is_empty(&self) -> bool {
        self.reservations.is_empty()
    }

    /// What became of reservations so far.
    pub fn counts(&self) -> LedgerCounts {
        self.counts
    }

    /// The settings.
    pub fn config(&self) -> LedgerConfig {
        self.config
    }

    fn change(
        &mut self,
        now: Moment,
        id: &ReservationId,
        change: impl FnOnce(&mut Open),
        computed: bool,
    ) -> bool {
        let Some(reservation) = self.reservations.get_mut(id) else { return false };
        let before = reservation.open;
        change(&mut reservation.open);
        if let Some(book) = self.ranks.get_mut(&reservation.rank) {
            book.change(before, reservation.open, reservation.reported);
            // Again and again would cost a look at every block for nothing.
            if computed && (before.prefill_tokens > 0 || reservation.claim.prefill_tokens == 0) {
                book.compute(&reservation.claim);
            }
        }
        // A sign of life; a clock that went back shortens no lease.
        let expires = reservation.expires.max(now + self.config.lease);
        if expires != reservation.expires {
            let old = (reservation.expires, reservation.ticket, id.clone());
            self.leases.remove(&old);
            self.leases.insert((expires, reservation.ticket, id.clone()));
            reservation.expires = expires;
        }
        true
    }

    fn end(&mut self, id: &ReservationId) -> bool {
        let Some(gone) = self.reservations.remove(id) else { return false };
        self.leases.remove(&(gone.expires, gone.ticket, id.clone()));
        self.blocks -= gone.claim.named().len();
        if let Some(book) = self.ranks.get_mut(&gone.rank) {
            book.leave(&gone);
        }
        true
    }
}

/// What stands on one rank.
#[derive(Debug, Default)]
struct RankBook {
    ids: BTreeMap<Ticket, ReservationId>,
    /// Those that are in no report.
    since_ids: BTreeMap<Ticket, ReservationId>,
    active: HashMap<SequenceHash, Held>,
    all: Sums,
    since: Sums,
    /// Active blocks that are in no report.
    since_blocks: u64,
    /// Blocks whose reported holders have ended since that report. Each is here at most once per report and
    /// holder, and the list goes with the next report or the last block.
    held_over: Vec<SequenceHash>,
}

/// Who holds a block.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    holders: u32,
    /// Holders that are in the report.
    reported: u32,
    /// Its reported holders have ended, but the report still counts it.
    held_over: bool,
    /// A holder has prefilled it.
    computed: bool,
}

impl Held {
    fn is_reported(self) -> bool {
        self.reported > 0 || self.held_over
    }
}

impl RankBook {
    fn enter(&mut self, ticket: Ticket, id: &ReservationId, claim: &Claim, open: Open) {
        self.ids.insert(ticket, id.clone());
        self.since_ids.insert(ticket, id.clone());
        self.all.add(open.sums());
        self.since.add(open.sums());
        for hash in claim.named() {
            let held = self.active.entry(*hash).or_default();
            if held.holders == 0 {
                self.since_blocks += 1;
            }
            held.holders += 1;
        }
    }

    fn change(&mut self, before: Open, after: Open, reported: bool) {
        self.all.take(before.sums());
        self.all.add(after.sums());
        if !reported {
            self.since.take(before.sums());
            self.since.add(after.sums());
        }
    }

    fn compute(&mut self, claim: &Claim) {
        for hash in claim.named() {
            if let Some(held) = self.active.get_mut(hash) {
                held.computed = true;
            }
        }
    }

    /// The reservation is in the report that has come.
    fn cover(&mut self, claim: &Claim, open: Open) {
        self.since.take(open.sums());
        for hash in claim.named() {
            let Some(held) = self.active.get_mut(hash) else { continue };
            if !held.is_reported() {
                self.since_blocks -= 1;
            }
            held.reported += 1;
            held.held_over = false;
        }
    }

    /// The report has come: what its predecessor still counted must be held by someone that it contains.
    fn uncover(&mut self) {
        for hash in std::mem::take(&mut self.held_over) {
            if let Some(held) = self.active.get_mut(&hash)
                && std::mem::take(&mut held.held_over)
            {
                self.since_blocks += 1;
            }
        }
    }

    fn leave(&mut self, gone: &Reservation) {
        self.ids.remove(&gone.ticket);
        self.since_ids.remove(&gone.ticket);
        self.all.take(gone.open.sums());
        if !gone.reported {
            self.since.take(gone.open.sums());
        }
        for hash in gone.claim.named() {
            let Some(held) = self.active.get_mut(hash) else { continue };
            let was_reported = held.is_reported();
            held.holders -= 1;
            held.reported -= u32::from(gone.reported);
            if held.holders == 0 {
                self.active.remove(hash);
                self.since_blocks -= u64::from(!was_reported);
            } else if was_reported && !held.is_reported() {
                held.held_over = true;
                self.held_over.push(*hash);
            }
        }
        if self.active.is_empty() {
            self.held_over = Vec::new();
        }
    }
}

#[cfg(test)]
mod tests;

//! The ledger against its rules and against a literal model.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

fn at(millis: u64) -> Moment {
    Moment::from_millis(millis)
}

fn rank(n: u32) -> RankKey {
    RankKey::new("w", n)
}

fn ledger(ranks: u32) -> Ledger {
    let mut ledger = Ledger::new(LedgerConfig { lease: Duration::from_secs(10), ..LedgerConfig::default() });
    (0..ranks).for_each(|n| ledger.declare(&rank(n)));
    ledger
}

/// The blocks of a prompt: each name stands for all before it.
fn chain(path: &[u8]) -> Box<[SequenceHash]> {
    let mut name = 1;
    path.iter()
        .map(|step| {
            name = name * 8 + u64::from(*step) + 1;
            SequenceHash(name)
        })
        .collect()
}

fn claim(prefill: u64, path: &[u8]) -> Claim {
    Claim::new(prefill, 4 * path.len() as u64, ClaimedBlocks::Named(chain(path)))
}

fn booked(requests: u64, prefill_tokens: u64, decode_blocks: f64) -> Booked {
    Booked { requests, prefill_tokens, decode_blocks }
}

impl Ledger {
    fn book(&mut self, now: Moment, id: &str, n: u32, claim: Claim) -> Ticket {
        self.reserve(now, &id.into(), &rank(n), claim).unwrap()
    }
}

/// S4: the same id twice is refused and books nothing more; freed, it may be used again.
#[test]
fn an_id_in_use_books_nothing_more() {
    let mut ledger = ledger(2);
    let first = ledger.book(at(0), "a", 0, claim(7, &[1, 2]));
    let again = ledger.reserve(at(0), &"a".into(), &rank(1), claim(9, &[3]));
    assert_eq!(again, Err(ReserveError::IdInUse { id: "a".into() }));
    assert_eq!(ledger.all(&rank(0)), booked(1, 7, 2.0));
    assert_eq!(ledger.all(&rank(1)), Booked::default());
    assert!(ledger.free(&"a".into()) && !ledger.free(&"a".into()));
    let second = ledger.book(at(1), "a", 1, claim(9, &[3]));
    // A handle of the first must not end the second.
    assert!(!ledger.free_ticket(&"a".into(), first));
    assert_eq!(ledger.all(&rank(1)), booked(1, 9, 1.0));
    assert!(ledger.free_ticket(&"a".into(), second));
    assert_eq!(ledger.counts().id_in_use, 1);
}

/// S4: prefill_complete may be repeated, output blocks decay together, and free takes all of it away. The
/// numbers are those of the recorded selection session.
#[test]
fn a_reservation_runs_its_course() {
    let mut ledger = ledger(1);
    let id = "r1".into();
    ledger.book(at(0), "r1", 0, claim(2, &[1, 2, 3, 4, 5, 6]));
    ledger.book(at(0), "r2", 0, claim(2, &[1, 2, 3, 4, 5, 6]));
    assert_eq!(ledger.all(&rank(0)), booked(2, 4, 6.0));
    for _ in 0..2 {
        assert!(ledger.prefill_complete(at(1), &id));
        assert_eq!(ledger.all(&rank(0)), booked(2, 2, 6.0));
    }
    for (decay, blocks) in [(None, 7.0), (Some(0.5), 7.0), (Some(0.0), 6.0), (Some(1.0), 10.0)] {
        assert!(ledger.output_block(at(1), &id, decay));
        assert_eq!(ledger.all(&rank(0)).decode_blocks, blocks, "{decay:?}");
    }
    assert!(ledger.free(&id));
    assert_eq!(ledger.all(&rank(0)), booked(1, 2, 6.0));
    for gone in [ledger.prefill_complete(at(1), &id), ledger.output_block(at(1), &id, None)] {
        assert!(!gone);
    }
    assert!(ledger.free(&"r2".into()));
    assert_eq!(ledger.all(&rank(0)), Booked::default());
}

/// S4: a lease runs from the last sign of life.
#[test]
fn leases_run_out() {
    let mut ledger = ledger(1);
    ledger.book(at(0), "a", 0, claim(1, &[1]));
    ledger.book(at(0), "b", 0, claim(1, &[2]));
    assert_eq!(ledger.next_deadline(), Some(at(10_000)));
    assert!(ledger.output_block(at(5_000), &"b".into(), None));
    assert_eq!(ledger.expire(at(9_999)), 0);
    assert_eq!(ledger.expire(at(10_000)), 1);
    assert_eq!(ledger.all(&rank(0)), booked(1, 1, 2.0));
    assert_eq!(ledger.next_deadline(), Some(at(15_000)));
    assert_eq!(ledger.expire(at(60_000)), 1);
    assert!(ledger.is_empty() && ledger.next_deadline().is_none());
    assert_eq!(ledger.counts().expired, 2);
}

/// R7: a rank that goes takes its reservations with it, and those of no other.
#[test]
fn a_rank_takes_its_reservations_along() {
    let mut ledger = ledger(2);
    ledger.book(at(0), "a", 0, claim(1, &[1]));
    ledger.book(at(0), "b", 1, claim(1, &[1]));
    assert_eq!(ledger.retire(&rank(0)), 1);
    assert_eq!(ledger.rank_of(&"a".into()), None);
    let gone = ledger.reserve(at(0), &"a".into(), &rank(0), claim(1, &[1]));
    assert_eq!(gone, Err(ReserveError::NotDeclared { rank: rank(0) }));
    ledger.declare(&rank(0));
    assert_eq!(ledger.all(&rank(0)), Booked::default());
    assert_eq!(ledger.all(&rank(1)), booked(1, 1, 1.0));
    // Declared again, a rank that stayed keeps what stands there.
    ledger.declare(&rank(1));
    assert_eq!(ledger.len(), 1);
}

/// The bounds hold for the number of reservations and for their blocks.
#[test]
fn a_full_ledger_refuses() {
    let config = LedgerConfig { max_reservations: 2, max_blocks: 3, ..LedgerConfig::default() };
    let mut ledger = Ledger::new(config);
    ledger.declare(&rank(0));
    ledger.book(at(0), "a", 0, claim(1, &[1, 2]));
    let full =
        |ledger: &mut Ledger, path: &[u8]| ledger.reserve(at(0), &"c".into(), &rank(0), claim(0, path));
    assert_eq!(full(&mut ledger, &[1, 2]), Err(ReserveError::Full { reservations: 1, blocks: 2 }));
    ledger.book(at(0), "b", 0, claim(1, &[3]));
    assert_eq!(full(&mut ledger, &[]), Err(ReserveError::Full { reservations: 2, blocks: 3 }));
    assert!(ledger.free(&"a".into()));
    assert!(full(&mut ledger, &[1, 2]).is_ok());
    assert_eq!(ledger.counts().full, 2);
}

/// Hostile amounts neither overflow nor outlive their reservation.
#[test]
fn endless_claims_leave_nothing_behind() {
    let mut ledger = ledger(1);
    for id in ["a", "b"] {
        ledger.book(at(0), id, 0, Claim::new(u64::MAX, u64::MAX, ClaimedBlocks::Count(u64::MAX)));
        assert!(ledger.output_block(at(0), &id.into(), Some(f64::NAN)));
        assert!(ledger.output_block(at(0), &id.into(), Some(f64::INFINITY)));
    }
    assert_eq!(ledger.all(&rank(0)).prefill_tokens, 2 * MAX_AMOUNT);
    assert!(ledger.free(&"a".into()) && ledger.free(&"b".into()));
    assert_eq!(ledger.all(&rank(0)), Booked::default());
}

/// L15: booked before the measurement is in the report, later is added; aged reports are measured earlier.
#[test]
fn reports_and_reservations_are_not_counted_twice() {
    let mut ledger = ledger(1);
    let since = |ledger: &Ledger| ledger.since_report(&rank(0));
    ledger.book(at(100), "a", 0, claim(8, &[1, 2]));
    // Nothing was reported: all of it is news.
    assert_eq!(since(&ledger), booked(1, 8, 2.0));
    // A report that was measured before the booking does not contain it.
    ledger.reported(&rank(0), at(90), at(110));
    assert_eq!(since(&ledger), booked(1, 8, 2.0));
    ledger.reported(&rank(0), at(120), at(130));
    assert_eq!(since(&ledger), Booked::default());
    // A later one shares its blocks, which the report counts.
    ledger.book(at(140), "b", 0, claim(4, &[1, 2, 3]));
    assert_eq!(since(&ledger), booked(1, 4, 1.0));
    // What ends is not subtracted from the report, nor is what it shared added again.
    assert!(ledger.free(&"a".into()));
    assert_eq!(since(&ledger), booked(1, 4, 1.0));
    // The next report was measured when only the shared blocks' second holder could be missing from it.
    ledger.reported(&rank(0), at(135), at(150));
    assert_eq!(since(&ledger), booked(1, 4, 3.0));
    ledger.reported(&rank(0), at(160), at(160));
    assert_eq!(since(&ledger), Booked::default());
    assert_eq!(ledger.all(&rank(0)), booked(1, 4, 3.0));
}

/// L15: at one moment, the order decides.
#[test]
fn at_one_moment_the_order_decides() {
    let mut ledger = ledger(1);
    ledger.book(at(5), "a", 0, claim(1, &[1]));
    ledger.reported(&rank(0), at(5), at(5));
    ledger.book(at(5), "b", 0, claim(1, &[2]));
    assert_eq!(ledger.since_report(&rank(0)), booked(1, 1, 1.0));
}

/// What of a prompt is active, and what of that is prefilled.
#[test]
fn shared_blocks_are_the_leading_ones() {
    let mut ledger = ledger(2);
    let shared = |ledger: &Ledger, path: &[u8]| ledger.shared(&rank(0), &chain(path));
    ledger.book(at(0), "a", 0, claim(8, &[1, 2]));
    ledger.book(at(0), "b", 0, claim(8, &[1, 2, 3]));
    assert_eq!(shared(&ledger, &[1, 2, 3, 4]), Shared { active: 3, computed: 0 });
    assert_eq!(shared(&ledger, &[1, 5, 3]), Shared { active: 1, computed: 0 });
    assert_eq!(shared(&ledger, &[5]), Shared::default());
    assert_eq!(shared(&ledger, &[]), Shared::default());
    assert_eq!(ledger.shared(&rank(1), &chain(&[1])), Shared::default());
    assert!(ledger.prefill_complete(at(0), &"a".into()));
    assert_eq!(shared(&ledger, &[1, 2, 3, 4]), Shared { active: 3, computed: 2 });
    // Who computed it may go while another holds it.
    assert!(ledger.free(&"a".into()));
    assert_eq!(shared(&ledger, &[1, 2, 3, 4]), Shared { active: 3, computed: 2 });
    assert!(ledger.free(&"b".into()));
    assert_eq!(shared(&ledger, &[1, 2, 3, 4]), Shared::default());
}

// === against a literal model ===

#[derive(Clone, Debug)]
enum Step {
    Pass(u64),
    Reserve { id: u8, rank: u32, prefill: u64, path: Vec<u8>, unnamed: Option<u64> },
    Prefilled(u8),
    Output(u8, Option<u8>),
    Free(u8),
    Expire,
    Report { rank: u32, age: u64 },
    Retire(u32),
    Declare(u32),
}

const RANKS: u32 = 3;
const IDS: u8 = 6;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = prop::collection::vec(0_u8..2, 0..5);
    let step = prop_oneof![
        2 => (0_u64..4_000).prop_map(Step::Pass),
        6 => (0..IDS, 0..RANKS, 0_u64..50, path, prop::option::weighted(0.1, 0_u64..5)).prop_map(
            |(id, rank, prefill, path, unnamed)| Step::Reserve { id, rank, prefill, path, unnamed }
        ),
        2 => (0..IDS).prop_map(Step::Prefilled),
        2 => (0..IDS, prop::option::of(0_u8..5)).prop_map(|(id, decay)| Step::Output(id, decay)),
        3 => (0..IDS).prop_map(Step::Free),
        1 => Just(Step::Expire),
        3 => (0..RANKS, prop_oneof![Just(0), 0_u64..3_000]).prop_map(|(rank, age)| Step::Report { rank, age }),
        1 => (0..RANKS).prop_map(Step::Retire),
        2 => (0..RANKS).prop_map(Step::Declare),
    ];
    prop::collection::vec(step, 0..60)
}

/// Everything that stands, in a list; every total is added up anew.
#[derive(Default)]
struct Model {
    standing: Vec<Standing>,
    declared: BTreeSet<u32>,
    /// Active blocks that the newest report of a rank counts.
    in_report: BTreeMap<u32, BTreeSet<u64>>,
}

#[derive(Clone)]
struct Standing {
    id: u8,
    rank: u32,
    booked: u64,
    expires: u64,
    prefill: u64,
    blocks: Vec<u64>,
    unnamed: u64,
    outputs: u64,
    decay: f64,
    reported: bool,
}

impl Model {
    fn step(&mut self, now: u64, step: &Step) -> bool {
        let done = match step {
            Step::Pass(_) => true,
            Step::Reserve { id, rank, prefill, path, unnamed } => {
                let free = self.standing.iter().all(|one| one.id != *id) && self.declared.contains(rank);
                if free {
                    let named = chain(if unnamed.is_some() { &[] } else { path });
                    self.standing.push(Standing {
                        id: *id,
                        rank: *rank,
                        booked: now,
                        expires: now + 10_000,
                        prefill: *prefill,
                        blocks: named.iter().map(|hash| hash.0).collect(),
                        unnamed: unnamed.unwrap_or(0),
                        outputs: 0,
                        decay: 1.0,
                        reported: false,
                    });
                }
                free
            }
            Step::Prefilled(id) => self.with(now, *id, |one| one.prefill = 0),
            Step::Output(id, decay) => self.with(now, *id, |one| {
                one.outputs += 1;
                one.decay = decay.map_or(one.decay, |quarter| f64::from(quarter) / 4.0);
            }),
            Step::Free(id) => self.keep(|one| one.id != *id),
            Step::Expire => self.keep(|one| one.expires > now),
            Step::Report { rank, age } => {
                let measured = now.saturating_sub(*age);
                for one in self.standing.iter_mut().filter(|one| one.rank == *rank) {
                    one.reported |= one.booked < measured || (one.booked == measured && measured == now);
                }
                let reported = self.standing.iter().filter(|one| one.rank == *rank && one.reported);
                let blocks = reported.flat_map(|one| one.blocks.clone()).collect();
                self.in_report.insert(*rank, blocks);
                true
            }
            Step::Retire(rank) => {
                self.in_report.remove(rank);
                self.declared.remove(rank);
                self.keep(|one| one.rank != *rank)
            }
            Step::Declare(rank) => self.declared.insert(*rank),
        };
        for rank in 0..RANKS {
            let active = self.active(rank);
            self.in_report.entry(rank).or_default().retain(|hash| active.contains(hash));
        }
        done
    }

    fn with(&mut self, now: u64, id: u8, change: impl FnOnce(&mut Standing)) -> bool {
        let Some(one) = self.standing.iter_mut().find(|one| one.id == id) else { return false };
        change(one);
        one.expires = now + 10_000;
        true
    }

    fn keep(&mut self, keep: impl Fn(&Standing) -> bool) -> bool {
        let before = self.standing.len();
        self.standing.retain(keep);
        self.standing.len() < before
    }

    fn active(&self, rank: u32) -> BTreeSet<u64> {
        self.standing.iter().filter(|one| one.rank == rank).flat_map(|one| one.blocks.clone()).collect()
    }

    fn totals(&self, rank: u32, only_since: bool) -> Booked {
        let counted = |one: &&Standing| one.rank == rank && !(only_since && one.reported);
        let mut sum = Booked::default();
        for one in self.standing.iter().filter(counted) {
            sum.requests += 1;
            sum.prefill_tokens += one.prefill;
            sum.decode_blocks += one.unnamed as f64 + one.outputs as f64 * one.decay;
        }
        let reported = &self.in_report[&rank];
        let named = self.active(rank).iter().filter(|hash| !(only_since && reported.contains(hash))).count();
        sum.decode_blocks += named as f64;
        sum
    }
}

fn carry_out(ledger: &mut Ledger, now: u64, step: &Step) -> bool {
    let id = |id: &u8| ReservationId::new(id.to_string());
    match step {
        Step::Pass(_) => true,
        Step::Reserve { id: name, rank: n, prefill, path, unnamed } => {
            let blocks = match unnamed {
                Some(count) => ClaimedBlocks::Count(*count),
                None => ClaimedBlocks::Named(chain(path)),
            };
            ledger.reserve(at(now), &id(name), &rank(*n), Claim::new(*prefill, 0, blocks)).is_ok()
        }
        Step::Prefilled(name) => ledger.prefill_complete(at(now), &id(name)),
        Step::Output(name, decay) => {
            ledger.output_block(at(now), &id(name), decay.map(|quarter| f64::from(quarter) / 4.0))
        }
        Step::Free(name) => ledger.free(&id(name)),
        Step::Expire => ledger.expire(at(now)) > 0,
        Step::Report { rank: n, age } => {
            ledger.reported(&rank(*n), at(now.saturating_sub(*age)), at(now));
            true
        }
        Step::Retire(n) => ledger.retire(&rank(*n)) > 0,
        Step::Declare(n) => {
            let new = !ledger.ranks.contains_key(&rank(*n));
            ledger.declare(&rank(*n));
            new
        }
    }
}

proptest! {
    /// S4, L15, R7: every total is the model's at every step, so none is ever negative; and once all is freed
    /// or expired, nothing is left anywhere.
    #[test]
    fn the_ledger_is_the_model(steps in steps(), by_lease in any::<bool>()) {
        let (mut ledger, mut model) = (ledger(RANKS), Model::default());
        (0..RANKS).for_each(|rank| { model.step(0, &Step::Declare(rank)); });
        let mut now = 0;
        for step in &steps {
            if let Step::Pass(millis) = step {
                now += millis;
            }
            let (ours, theirs) = (carry_out(&mut ledger, now, step), model.step(now, step));
            prop_assert_eq!(ours, theirs, "{:?}", step);
            prop_assert_eq!(ledger.len(), model.standing.len());
            for n in 0..RANKS {
                prop_assert_eq!(ledger.all(&rank(n)), model.totals(n, false), "all of {} after {:?}", n, step);
                prop_assert_eq!(ledger.since_report(&rank(n)), model.totals(n, true), "{} after {:?}", n, step);
                for path in [&[0, 0, 0, 0][..], &[0, 1, 0, 1], &[1, 1]] {
                    let active = model.active(n);
                    let leading = chain(path).iter().take_while(|hash| active.contains(&hash.0)).count();
                    prop_assert_eq!(ledger.shared(&rank(n), &chain(path)).active, leading);
                }
            }
        }
        if by_lease {
            ledger.expire(at(now + 10_000));
        } else {
            (0..IDS).for_each(|id| { ledger.free(&ReservationId::new(id.to_string())); });
        }
        prop_assert!(ledger.is_empty() && ledger.leases.is_empty());
        prop_assert_eq!(ledger.blocks, 0);
        for book in ledger.ranks.values() {
            prop_assert_eq!((book.all, book.since, book.since_blocks), (Sums::default(), Sums::default(), 0));
            prop_assert!(book.ids.is_empty() && book.since_ids.is_empty());
            prop_assert!(book.active.is_empty() && book.held_over.is_empty());
        }
    }
}

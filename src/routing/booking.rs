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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

    use std::collections::BTreeSet;
    use std::time::Duration;

    use super::*;
    use crate::block::BlockSize;
    use crate::fleet::{CapacitySpec, PoolKey, Ranks, WorkerSpec};
    use crate::ids::DpRank;
    use crate::indexer::{Config, Indexer};
    use crate::load::{
        Admission, Booked, BusyThreshold, LoadConfig, LoadEntry, LoadMode, LoadReport, RawRankLoad,
        ReserveError,
    };
    use crate::routing::{
        Constraints, Pin, Policy, PolicyOverride, Prompt, Refusal, Router, RouterConfig, RouterScratch,
        SelectError, SelectRequest,
    };

    const NOW: Moment = Moment::from_millis(1_000);

    struct Stage {
        indexer: Indexer,
        router: Router,
        scratch: RouterScratch,
    }

    fn spec(worker: &str, start: u32, size: u32) -> WorkerSpec {
        let pool = PoolKey::new("m", None);
        WorkerSpec::new(worker, pool, BlockSize::new(16).unwrap(), Ranks::range(start, size).unwrap())
    }

    impl Stage {
        fn new(mode: LoadMode, config: RouterConfig) -> Self {
            let load = LoadConfig { mode, ..LoadConfig::default() };
            let (indexer, view) = Indexer::new(Config { load, ..Config::default() });
            Self { indexer, router: Router::new(view, config), scratch: RouterScratch::seeded(1) }
        }

        fn declare(&mut self, spec: WorkerSpec) {
            self.indexer.declare_worker(NOW, spec, &mut Vec::new()).unwrap();
        }

        fn report(&self, worker: &str, loads: &[(u32, RawRankLoad)]) {
            let entries = loads.iter().map(|(rank, load)| LoadEntry::new(*rank, *load)).collect();
            self.router.view().loads().lock().report(NOW, &worker.into(), &LoadReport::new(entries));
        }

        fn reserve(&mut self, ids: &[u32], id: Option<&str>) -> Result<(f64, Booking), SelectError> {
            self.reserve_as(&SelectRequest::new(Prompt::tokens(ids)), id)
        }

        fn reserve_as(
            &mut self,
            request: &SelectRequest<'_>,
            id: Option<&str>,
        ) -> Result<(f64, Booking), SelectError> {
            let fleet = self.router.view().fleet();
            let pool = fleet.only_pool().unwrap();
            let id = id.map(ReservationId::new);
            let reserved = self.router.reserve(NOW, pool, request, id.as_ref(), &mut self.scratch);
            reserved.map(|(decision, booking)| (decision.chosen().terms.logit.unwrap_or(f64::NAN), booking))
        }

        fn select(&mut self, ids: &[u32], pin: Option<&Pin>) -> Result<DpRank, SelectError> {
            let fleet = self.router.view().fleet();
            let constraints = Constraints { pin, ..Constraints::default() };
            let request = SelectRequest { constraints, ..SelectRequest::new(Prompt::tokens(ids)) };
            let decision =
                self.router.select(NOW, fleet.only_pool().unwrap(), &request, &mut self.scratch)?;
            Ok(decision.pick.dp_rank().unwrap())
        }

        fn all(&self, worker: &str, rank: u32) -> Booked {
            self.router.view().loads().lock().ledger().all(&RankKey::new(worker, rank))
        }
    }

    fn refused(result: Result<impl fmt::Debug, SelectError>) -> Refusal {
        match result {
            Err(SelectError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        }
    }

    fn prompt(tokens: u32) -> Vec<u32> {
        (0..tokens).collect()
    }

    fn used(blocks: f64) -> RawRankLoad {
        RawRankLoad { kv_used_blocks: blocks.into(), ..RawRankLoad::default() }
    }

    /// S4: a burst of equal prompts goes to one rank before the first event, until its load outweighs the
    /// prefix; the others stay free for other prompts.
    #[test]
    fn a_burst_of_equal_prompts_goes_to_one_rank() {
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig::default());
        stage.declare(spec("w1", 0, 4));
        let ids = prompt(196);
        let burst: Vec<_> = (0..20).map(|_| stage.reserve(&ids, None).unwrap()).collect();
        let ranks: BTreeSet<_> = burst.iter().map(|(_, booking)| booking.rank().clone()).collect();
        assert_eq!(ranks.len(), 1, "{ranks:?}");
        let logits: Vec<_> = burst.iter().take(3).map(|(logit, _)| *logit).collect();
        // 12.25 to prefill and 12 to decode; then a quarter of a block behind the quarter of each before.
        assert_eq!(logits, [24.25, 12.5, 12.75]);
        let other: Vec<u32> = (1_000..1_196).collect();
        let (_, elsewhere) = stage.reserve(&other, None).unwrap();
        assert!(!ranks.contains(elsewhere.rank()));
    }

    /// S4: told to spread, the burst spreads evenly.
    #[test]
    fn told_to_spread_a_burst_spreads() {
        let policy = Policy { expect_booked: false, ..Policy::default() };
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig { policy, ..RouterConfig::default() });
        stage.declare(spec("w1", 0, 4));
        let ids = prompt(196);
        let burst: Vec<_> = (0..4).map(|_| stage.reserve(&ids, None).unwrap().1).collect();
        let ranks: BTreeSet<_> = burst.iter().map(|booking| booking.rank().clone()).collect();
        assert_eq!(ranks.len(), 4);
        // A request may be told otherwise.
        let gather = PolicyOverride { expect_booked: Some(true), ..PolicyOverride::default() };
        let request = SelectRequest { policy: Some(&gather), ..SelectRequest::new(Prompt::tokens(&ids)) };
        let (logit, _) = stage.reserve_as(&request, None).unwrap();
        assert_eq!(logit, 12.5);
    }

    /// S4: the burst gathers on fresh reports too, and the prefill that is done is not held against others.
    #[test]
    fn prefilled_blocks_hide_no_other_work() {
        let mut stage = Stage::new(LoadMode::Reports, RouterConfig::default());
        stage.declare(spec("w1", 0, 2));
        let idle = RawRankLoad { decode_blocks: 0.0.into(), prefill_tokens: 0.0.into(), ..used(0.0) };
        stage.report("w1", &[(0, idle), (1, idle)]);
        let ids = prompt(160);
        let (first, booking) = stage.reserve(&ids, None).unwrap();
        assert_eq!(first, 20.0);
        assert!(booking.prefill_complete(NOW) && booking.prefill_complete(NOW));
        let pin = Pin { worker: "w1".into(), dp_rank: Some(booking.rank().dp_rank) };
        let constraints = Constraints { pin: Some(&pin), ..Constraints::default() };
        let other: Vec<u32> = (5_000..5_160).collect();
        let request = SelectRequest { constraints, ..SelectRequest::new(Prompt::tokens(&other)) };
        let (behind, _other) = stage.reserve_as(&request, None).unwrap();
        assert_eq!(behind, 10.0 + 20.0);
        // The prefix is computed; the other prompt's 160 tokens stand before ours, and 20 blocks are active.
        let request = SelectRequest { constraints, ..SelectRequest::new(Prompt::tokens(&ids)) };
        assert_eq!(stage.reserve_as(&request, None).unwrap().0, 10.0 + 20.0);
    }

    /// S4: a dropped handle frees its booking, a kept one does not; made ids are all different.
    #[test]
    fn a_dropped_handle_frees_its_booking() {
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig::default());
        stage.declare(spec("w1", 4, 1));
        let (ids, blocks) = (prompt(32), 2.0);
        let (_, first) = stage.reserve(&ids, None).unwrap();
        let (_, second) = stage.reserve(&ids, None).unwrap();
        assert_ne!(first.id(), second.id());
        assert_eq!(first.id().as_str().len(), 36);
        assert!(first.output_block(NOW, None));
        assert_eq!(stage.all("w1", 4).requests, 2);
        drop(first);
        assert_eq!((stage.all("w1", 4).requests, stage.all("w1", 4).decode_blocks), (1, blocks));
        let kept = second.keep();
        assert_eq!(stage.all("w1", 4).requests, 1);
        assert!(stage.router.view().loads().lock().ledger_mut().free(&kept));
        assert_eq!(stage.all("w1", 4), Booked::default());
        // The handle of one whose id was used again leaves its successor alone.
        let (_, old) = stage.reserve(&ids, Some("a")).unwrap();
        stage.router.view().loads().lock().ledger_mut().free(&"a".into());
        let (_, new) = stage.reserve(&ids, Some("a")).unwrap();
        assert!(!old.prefill_complete(NOW));
        drop(old);
        assert_eq!(stage.all("w1", 4).requests, 1);
        drop(new);
    }

    /// S4: the same id from many threads at once books once; different ids are all counted.
    #[test]
    fn one_step_for_all_threads() {
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig::default());
        stage.declare(spec("w1", 0, 3));
        let (router, ids) = (&stage.router, &prompt(64));
        let reserve = |seed, id: Option<ReservationId>| {
            let fleet = router.view().fleet();
            let request = SelectRequest::new(Prompt::tokens(ids));
            let mut scratch = RouterScratch::seeded(seed);
            let booked = router.reserve(NOW, fleet.only_pool().unwrap(), &request, id.as_ref(), &mut scratch);
            booked.map(|(_, booking)| booking.keep())
        };
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let tasks: Vec<_> = (0..8)
                .map(|thread| {
                    scope.spawn(move || {
                        let own = (0..50).map(|n| Some(ReservationId::new(format!("{thread}-{n}"))));
                        own.for_each(|id| assert!(reserve(thread, id).is_ok()));
                        reserve(thread, Some("same".into()))
                    })
                })
                .collect();
            tasks.into_iter().map(|task| task.join().unwrap()).collect()
        });
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
        let in_use = SelectError::Reserve(ReserveError::IdInUse { id: "same".into() });
        assert!(outcomes.into_iter().filter_map(Result::err).all(|error| error == in_use));
        let requests: u64 = (0..3).map(|rank| stage.all("w1", rank).requests).sum();
        assert_eq!(requests, 8 * 50 + 1);
    }

    /// R7: a worker that is withdrawn takes its bookings along, and its handles end nothing.
    #[test]
    fn a_withdrawn_worker_takes_its_bookings_along() {
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig::default());
        stage.declare(spec("w1", 4, 2));
        stage.declare(spec("w2", 0, 1));
        let (_, booking) = stage.reserve(&prompt(32), Some("a")).unwrap();
        let worker = booking.rank().worker.clone();
        stage.indexer.withdraw_worker(NOW, &worker, &mut Vec::new()).unwrap();
        assert!(stage.router.view().loads().lock().ledger().is_empty());
        assert!(!booking.prefill_complete(NOW));
        drop(booking);
        assert_eq!(stage.router.view().loads().lock().ledger().counts().dropped, 1);
    }

    /// L15: what we have sent counts against the limits at once; a healthy report clears the mark, a refresh
    /// of the fleet does not; only when no rank is left is the request refused, and a pin obeys.
    #[test]
    fn a_rank_is_overloaded_until_a_report_says_otherwise() {
        let admission = Admission { max_prefill_fraction: Some(1.0), ..Admission::default() };
        let mut stage = Stage::new(LoadMode::Reports, RouterConfig { admission, ..RouterConfig::default() });
        let mut worker = spec("w1", 4, 2);
        worker.max_num_batched_tokens = Some(100);
        stage.declare(worker.clone());
        let busy = RawRankLoad { prefill_tokens: 101.0.into(), ..used(1.0) };
        let idle = RawRankLoad { prefill_tokens: 0.0.into(), ..used(1.0) };
        stage.report("w1", &[(4, busy), (5, idle)]);
        let ids = prompt(102);
        let pin = Pin { worker: "w1".into(), dp_rank: Some(DpRank(4)) };
        assert_eq!(refused(stage.select(&ids, Some(&pin))), Refusal::Overloaded { ranks: 1 });
        let (_, booking) = stage.reserve(&ids, None).unwrap();
        assert_eq!(booking.rank().dp_rank, DpRank(5));
        // Both are over now: one by its report, one by what was sent there since.
        assert_eq!(refused(stage.select(&ids, None)), Refusal::Overloaded { ranks: 2 });
        worker.taints.insert("refreshed".to_owned());
        stage.declare(worker);
        assert_eq!(refused(stage.select(&ids, None)), Refusal::Overloaded { ranks: 2 });
        stage.report("w1", &[(4, idle)]);
        assert_eq!(stage.select(&ids, None).unwrap(), DpRank(4));
        drop(booking);
        let pin = Pin { worker: "w1".into(), dp_rank: Some(DpRank(5)) };
        assert_eq!(stage.select(&ids, Some(&pin)).unwrap(), DpRank(5));
    }

    /// L11, L15: what the ranks of a worker share is looked at once for the worker, never once per rank.
    #[test]
    fn a_shared_capacity_is_shared() {
        let busy_threshold = BusyThreshold::new(0.9);
        let mut stage =
            Stage::new(LoadMode::Reports, RouterConfig { busy_threshold, ..RouterConfig::default() });
        stage.declare(spec("w1", 0, 2).capacity(CapacitySpec::worker_shared(100)));
        stage.report("w1", &[(0, used(50.0)), (1, used(40.0))]);
        assert!(stage.select(&prompt(16), None).is_ok());
        stage.report("w1", &[(0, used(50.0)), (1, used(41.0))]);
        assert_eq!(refused(stage.select(&prompt(16), None)), Refusal::Overloaded { ranks: 2 });
        assert_eq!(refused(stage.select(&prompt(101 * 16), None)), Refusal::TooLarge { ranks: 2 });
    }

    /// L13: a request that fits into no rank is refused as such, by exact figures only.
    #[test]
    fn too_large_is_told_from_overloaded() {
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig::default());
        let ranks = Ranks::range(0, 2).unwrap();
        let uneven = CapacitySpec::per_rank_list(&ranks, &[3, 5]).unwrap();
        stage.declare(spec("w1", 0, 2).capacity(uneven));
        // Three blocks and a partial one.
        assert_eq!(stage.select(&prompt(49), None).unwrap(), DpRank(1));
        assert_eq!(refused(stage.select(&prompt(81), None)), Refusal::TooLarge { ranks: 2 });
        stage.declare(spec("w2", 0, 1).capacity(CapacitySpec::per_rank(1).estimated()));
        assert_eq!(stage.select(&prompt(81), None).unwrap(), DpRank(0));
    }

    /// S4: the lease runs out on the caller's clock, at the next look.
    #[test]
    fn a_lost_caller_holds_nothing_for_ever() {
        let mut stage = Stage::new(LoadMode::Ledger, RouterConfig::default());
        stage.declare(spec("w1", 0, 1));
        let lease = stage.router.view().loads().lock().ledger().config().lease;
        stage.reserve(&prompt(32), Some("a")).unwrap().1.keep();
        let fleet = stage.router.view().fleet();
        let (pool, ids) = (fleet.only_pool().unwrap(), prompt(32));
        let request = SelectRequest::new(Prompt::tokens(&ids));
        let mut look = |now| {
            stage.router.select(now, pool, &request, &mut stage.scratch).unwrap();
            stage.router.view().loads().lock().ledger().len()
        };
        assert_eq!(look(NOW + lease - Duration::from_micros(1)), 1);
        assert_eq!(look(NOW + lease), 0);
    }
}

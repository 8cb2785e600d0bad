//! Reports of load beside what was declared.

use std::collections::BTreeSet;

use super::view::{PoolView, RankView, View, WorkerView};
use crate::fleet::Capacity;
use crate::ids::{Moment, RankKey, WorkerId};
use crate::load::{LoadCounts, LoadReport, LoadTable};

impl View {
    /// Takes a report that was measured at `measured` and received at `now` into the load table, and says in
    /// the log, once for each size that a rank is said to have, where that contradicts its declaration.
    pub fn report_load(
        &self,
        now: Moment,
        measured: Moment,
        worker: &WorkerId,
        report: &LoadReport,
    ) -> LoadCounts {
        let (counts, resized) = {
            let mut loads = self.loads().lock();
            (loads.report_measured(now, measured, worker, report), loads.take_resized())
        };
        if !resized.is_empty() {
            self.say_contradictions(&resized);
        }
        counts
    }

    fn say_contradictions(&self, resized: &BTreeSet<RankKey>) {
        let fleet = self.fleet();
        let loads = self.loads().lock();
        for key in resized {
            let Some(pool) = fleet.pool_of(&key.worker) else { continue };
            let declared = fleet.declared().capacity_blocks(key);
            let Some(reported) = loads.reported_capacity(key, pool.block_size) else { continue };
            if declared.contradicts(reported.blocks) {
                tracing::warn!(
                    worker = %key.worker,
                    dp_rank = key.dp_rank.0,
                    declared_blocks = declared.blocks(),
                    reported_blocks = reported.blocks,
                    "{key}: the engine reports another capacity than was declared; the smaller one binds",
                );
            }
        }
    }
}

impl PoolView {
    /// What a rank of this pool holds: its declaration beside what its engine reports of itself.
    ///
    /// What a worker's ranks share is no rank's own, also where each of them reports it.
    pub fn capacity_of(&self, worker: &WorkerView, rank: &RankView, loads: &LoadTable) -> Capacity {
        if worker.shared_capacity != Capacity::Unknown {
            return rank.capacity;
        }
        match loads.reported_capacity(&rank.plan.rank, self.block_size) {
            Some(reported) => rank.capacity.beside_reported(reported.blocks, reported.divided),
            None => rank.capacity,
        }
    }
}

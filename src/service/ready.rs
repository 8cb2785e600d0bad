//! `/ready`: whether a request that comes now would find a rank, load aside.

use std::collections::BTreeSet;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;

use super::Control;
use super::state::ServiceState;
use super::url::Params;
use super::workers::listed;
use crate::ids::{Moment, RankKey};
use crate::indexer::{FleetView, PoolView, RankView, WorkerView};
use crate::load::LoadTable;
use crate::trust::{Reason, Trust};

#[derive(Deserialize)]
pub(super) struct ReadyParams {
    /// Names the workers and their ranks; `?verbose` alone is enough.
    verbose: Option<String>,
}

impl ReadyParams {
    fn is_verbose(&self) -> bool {
        self.verbose.as_deref().is_some_and(|text| !matches!(text, "0" | "false" | "no"))
    }
}

/// `GET /ready`: 200 unless no rank could be chosen for reasons other than load, and once the first history of the
/// ranks that were declared at the start is there.
pub(super) async fn ready<C: Control>(
    State(state): State<ServiceState<C>>,
    Params(params): Params<ReadyParams>,
) -> Response {
    let fleet = state.view().fleet();
    let now = state.control().now();
    let choosable = {
        let loads = state.view().loads().lock();
        let router = state.router().config();
        let chooser = Chooser {
            now,
            loads: &loads,
            exclude_silent: router.policy.exclude_silent,
            needs_endpoint: router.needs_endpoint,
        };
        chooser.over(&fleet)
    };
    let waits = state.first_history().is_awaited(&fleet, now);
    let ready = choosable.workers > 0 && !waits;
    let reason = match choosable {
        _ if waits => Some("history_pending"),
        Choosable { ranks: 0, .. } => Some("no_workers"),
        Choosable { workers: 0, asleep: true, .. } => Some("asleep"),
        Choosable { workers: 0, .. } => Some("no_endpoint"),
        Choosable { all_silent: true, .. } => Some("all_silent"),
        _ => None,
    };
    let mut body = json!({ "ready": ready, "schedulable_workers": choosable.workers });
    if let Some(reason) = reason {
        body["reason"] = reason.into();
    }
    if params.is_verbose() {
        body["workers"] = listed(&state, &fleet);
    }
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

/// What could be chosen now, load aside.
#[derive(Clone, Copy, Default)]
struct Choosable {
    ranks: usize,
    workers: usize,
    /// A rank is kept out because its engine sleeps.
    asleep: bool,
    /// Nothing is heard of any rank that could be chosen.
    all_silent: bool,
}

struct Chooser<'a> {
    now: Moment,
    loads: &'a LoadTable,
    exclude_silent: bool,
    needs_endpoint: bool,
}

impl Chooser<'_> {
    fn over(&self, fleet: &FleetView) -> Choosable {
        let mut sum = Choosable { all_silent: true, ..Choosable::default() };
        for pool in fleet.pools() {
            let ranks: Vec<_> = pool.ranks().collect();
            sum.ranks += ranks.len();
            sum.asleep |= ranks.iter().any(|(_, rank)| self.is_asleep(rank));
            let heard = self.workers(pool, |rank| rank.status.trust() != Trust::Silent);
            let any = self.workers(pool, |_| true);
            sum.all_silent &= heard == 0;
            // As in a selection: the silent are chosen where there is no other.
            sum.workers += if self.exclude_silent && heard > 0 { heard } else { any };
        }
        sum
    }

    fn workers(&self, pool: &PoolView, counts: impl Fn(&RankView) -> bool) -> usize {
        let can = |worker: &&WorkerView| {
            let addressed = !self.needs_endpoint || worker.spec.http_endpoint.is_some();
            addressed && worker.ranks.iter().any(|rank| counts(rank) && !self.is_asleep(rank))
        };
        pool.workers.iter().filter(can).count()
    }

    fn is_asleep(&self, rank: &RankView) -> bool {
        self.loads.is_asleep(self.now, &rank.plan.rank)
    }
}

/// The ranks that were declared at the start, as long as somebody waits for their history. Once it is there, or
/// cannot be had in time, it is never waited for again: a restart of an engine makes no router unready.
#[derive(Debug, Default)]
pub(super) struct FirstHistory(Mutex<Option<Awaited>>);

#[derive(Debug)]
struct Awaited {
    until: Moment,
    ranks: BTreeSet<RankKey>,
}

impl FirstHistory {
    pub(super) fn begin(&self, fleet: &FleetView, until: Moment) {
        let ranks = fleet.pools().flat_map(|pool| pool.ranks());
        let ranks = ranks.map(|(_, rank)| rank.plan.rank.clone()).collect();
        *self.0.lock() = Some(Awaited { until, ranks });
    }

    fn is_awaited(&self, fleet: &FleetView, now: Moment) -> bool {
        let mut awaited = self.0.lock();
        let Some(of) = awaited.as_ref() else { return false };
        let is_pending = |rank: &RankView| {
            let reasons = rank.status.reasons();
            reasons.contains(Reason::HistoryPending)
                && reasons.trust() != Trust::Silent
                && of.ranks.contains(&rank.plan.rank)
        };
        let waits =
            now < of.until && fleet.pools().flat_map(|pool| pool.ranks()).any(|(_, rank)| is_pending(rank));
        if !waits {
            *awaited = None;
        }
        waits
    }
}

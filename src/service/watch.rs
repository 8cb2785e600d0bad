//! `GET /loads/watch`: changes of ranks' loads as server-sent events, debounced per rank.
//!
//! Engines report tens of times a second; a watcher is told once a rank has been quiet for a moment, and of one
//! that changes all the time after the longest wait. The first events are the loads as they are.

use std::collections::HashMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::Stream;
use futures::stream::unfold;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep};

use super::Control;
use super::boundary::IdOut;
use super::connections::Stopping;
use super::problem::Problem;
use super::state::ServiceState;
use super::url::{NoParams, Params};
use super::workers::form_of;
use crate::ids::RankKey;
use crate::load::{Debounce, DebounceConfig, RankLoad};

/// Watchers at once. Each looks at every rank twenty times a second.
pub(super) const MAX_WATCHERS: usize = 64;

/// How often loads are looked at: well below the quiet time, so that it alone decides.
const LOOK: Duration = Duration::from_millis(50);

/// After this a watch ends, and the client connects again as such clients do: a place is not held for ever by
/// one that no longer looks.
const LONGEST_WATCH: Duration = Duration::from_secs(300);

/// `GET /loads/watch`.
pub(super) async fn watch<C: Control>(
    State(state): State<ServiceState<C>>,
    Extension(stopping): Extension<Stopping>,
    _: Params<NoParams>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let Ok(permit) = state.watchers().try_acquire_owned() else {
        let detail = format!("{MAX_WATCHERS} watchers are connected; no more are served at once");
        return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "too_many_watchers", detail));
    };
    let watch = Watch {
        state,
        debounce: Debounce::new(DebounceConfig::default()),
        seen: HashMap::new(),
        end: Instant::now() + LONGEST_WATCH,
        _permit: permit,
    };
    let events = unfold((watch, stopping), |(mut watch, mut stopping)| async move {
        let event = tokio::select! {
            () = stopping.stopped() => None,
            event = watch.next() => event,
        };
        Some((Ok(event?), (watch, stopping)))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::default()))
}

struct Watch<C> {
    state: ServiceState<C>,
    debounce: Debounce,
    /// The figures that were seen last of each rank, told or waiting to be told; `None` is none that is fresh.
    seen: HashMap<RankKey, Option<RankLoad>>,
    end: Instant,
    _permit: OwnedSemaphorePermit,
}

impl<C: Control> Watch<C> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if Instant::now() >= self.end {
                return None;
            }
            self.look();
            let now = self.state.control().now();
            if let Some(rank) = self.debounce.take_due(now) {
                return self.event(&rank);
            }
            let due = self.debounce.next_deadline().map_or(LOOK, |due| due.since(now));
            // At least a millisecond, so that rounding cannot make this spin.
            sleep(due.clamp(Duration::from_millis(1), LOOK)).await;
        }
    }

    /// Notes what has changed since the last look.
    fn look(&mut self) {
        let now = self.state.control().now();
        let fleet = self.state.view().fleet();
        let loads = self.state.view().loads().lock();
        self.seen.retain(|rank, _| {
            let declared = fleet.declared().rank(rank).is_some();
            if !declared {
                self.debounce.retire(rank);
            }
            declared
        });
        for (_, rank) in fleet.pools().flat_map(|pool| pool.ranks()) {
            let key = &rank.plan.rank;
            let fresh = loads.fresh(now, key).map(|(load, _)| *load);
            if self.seen.get(key) != Some(&fresh) {
                self.seen.insert(key.clone(), fresh);
                self.debounce.changed(now, key);
            }
        }
    }

    fn event(&self, rank: &RankKey) -> Option<Event> {
        let load = self.seen.get(rank).copied().flatten();
        let data = json!({
            "worker_id": IdOut(&rank.worker, form_of(&self.state.view().fleet(), &rank.worker)),
            "dp_rank": rank.dp_rank.0,
            "state": if load.is_some() { "reported" } else { "unknown" },
            "num_running_reqs": load.and_then(|load| load.num_running_reqs),
            "num_waiting_reqs": load.and_then(|load| load.num_waiting_reqs),
            "num_used_tokens": load.and_then(|load| load.num_used_tokens),
            "token_usage": load.and_then(|load| load.token_usage),
            "kv_used_blocks": load.and_then(|load| load.kv_used_blocks),
            "decode_blocks": load.and_then(|load| load.decode_blocks),
        });
        Event::default().event("load").json_data(data).ok()
    }
}

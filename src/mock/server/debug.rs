//! What only a mock can say: what its caches hold. And what only a mock does on demand: going wrong.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Query, State};
use serde::Deserialize;
use serde_json::{Value, json};

use super::http::{RankFilter, Refused, WorkerState};
use super::rank::{FalseLoad, Fault};
use crate::mock::page::HeldBlock;

/// `GET /debug/blocks?dp_rank=`: an object for the rank that is named; a list of them if none is.
pub(super) async fn blocks(
    State(state): State<WorkerState>,
    Query(filter): Query<RankFilter>,
) -> Result<Json<Value>, Refused> {
    let ranks = filter.ranks(&state)?;
    let mut all = Vec::new();
    for rank in ranks {
        let held = rank.blocks().await?;
        all.push(json!({
            "dp_rank": rank.dp_rank().0,
            "next_seq": held.next_seq.0,
            "device": held.truth.device.iter().map(block).collect::<Vec<_>>(),
            "host": held.truth.host.iter().map(block).collect::<Vec<_>>(),
        }));
    }
    Ok(Json(match (filter.is_named(), all.pop()) {
        (true, Some(only)) => only,
        (_, last) => all.into_iter().chain(last).collect(),
    }))
}

/// Names as text: 64-bit ones in decimal, byte strings in hex.
fn block(held: &HeldBlock) -> Value {
    json!({
        "hash": held.hash.to_string(),
        "copies": held.copies,
        "parent": held.parent.as_ref().map(ToString::to_string),
        "depth": held.depth,
        "tokens": &*held.tokens,
    })
}

#[derive(Deserialize)]
struct FaultBody {
    dp_rank: i64,
    kind: Kind,
    count: Option<u32>,
    milliseconds: Option<u64>,
    reconnect: Option<bool>,
    load: Option<FalseLoad>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    DropBatches,
    LoseBatches,
    Stall,
    Restart,
    Wedge,
    Unwedge,
    Lie,
    Truth,
}

/// Longest stall and longest absence: more is a wedge.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

impl FaultBody {
    fn fault(&self) -> Result<Fault, Refused> {
        let needs = |field: &str| Refused::bad_request(format!("{field} is missing"));
        let length = || {
            let given = self.milliseconds.map(Duration::from_millis);
            given.map(|length| length.min(LONGEST))
        };
        Ok(match self.kind {
            Kind::DropBatches => Fault::DropBatches(self.count.ok_or_else(|| needs("count"))?),
            Kind::LoseBatches => Fault::LoseBatches(self.count.ok_or_else(|| needs("count"))?),
            Kind::Stall => Fault::Stall(length().ok_or_else(|| needs("milliseconds"))?),
            Kind::Restart => Fault::Restart {
                reconnect: self.reconnect.unwrap_or(true),
                down: length().unwrap_or_default(),
            },
            Kind::Wedge => Fault::Wedge,
            Kind::Unwedge => Fault::Unwedge,
            Kind::Lie => Fault::Lie(self.load.ok_or_else(|| needs("load"))?),
            Kind::Truth => Fault::Truth,
        })
    }
}

/// `POST /debug/fault`.
pub(super) async fn fault(State(state): State<WorkerState>, body: Bytes) -> Result<Json<Value>, Refused> {
    let body: FaultBody =
        serde_json::from_slice(&body).map_err(|error| Refused::bad_request(error.to_string()))?;
    let fault = body.fault()?;
    let rank = state.by_global(body.dp_rank).ok_or_else(|| Refused::not_managed(body.dp_rank, &state))?;
    tracing::info!(worker = state.address().worker, dp_rank = body.dp_rank, ?fault, "a fault is injected");
    rank.inject(fault).await?;
    Ok(Json(json!({ "status": "ok" })))
}

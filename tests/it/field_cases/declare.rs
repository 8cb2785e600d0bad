//! Declarations: workers come, change and go.

use std::collections::BTreeMap;

use rankwise::block::BlockSize;
use rankwise::fleet::{CapacitySpec, DpMode, Endpoints, EngineStyle, EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::{DpRank, RankKey, WorkerId};
use serde_json::{Value, json};

use super::reading::{Fields, Run, by_number, count, fail, list, not_runnable, text};
use super::stage::Stage;

/// The only model: cases know no other.
const MODEL: &str = "model";

/// A declaration, or why the boundary refuses it before the product is asked: its numbers do not fit.
type Spec = Result<WorkerSpec, String>;

impl Stage {
    pub(super) fn declare_configured(&mut self, worker: &str, range: &Value) -> Run {
        let range = Fields::only("config worker", range, &["start", "size", "block_size"])?;
        match self.spec(worker, &range)? {
            Ok(spec) => {
                match self.with_actions(|indexer, now, actions| indexer.declare_worker(now, spec, actions)) {
                    Ok(_) => self.obey(false),
                    Err(why) => fail(format!("{worker} cannot be declared: {why}")),
                }
            }
            Err(why) => fail(format!("{worker} cannot be declared: {why}")),
        }
    }

    pub(super) fn declare(&mut self, step: &Value) -> Run {
        let known = [
            "worker",
            "start",
            "size",
            "endpoint",
            "endpoints",
            "replay_endpoint",
            "capacity",
            "dp_mode",
            "max_running_requests",
            "block_size",
            "expect",
            "expect_endpoints",
            "expect_capacity",
            "expect_request_limit",
        ];
        let step = Fields::only("declare", step, &known)?;
        let worker = step.need_text("worker")?;
        let answer = match self.spec(worker, &step)? {
            Ok(spec) => self
                .with_actions(|indexer, now, actions| indexer.declare_worker(now, spec, actions))
                .map(drop)
                .map_err(|why| why.to_string()),
            Err(why) => Err(why),
        };
        self.obey(false)?;
        match (step.text("expect")?.unwrap_or("ok"), answer) {
            ("ok", Err(why)) => fail(format!("refused: {why}")),
            ("refused", Ok(())) => fail("accepted, expected refused"),
            ("ok" | "refused", _) => self.check_declared(worker, &step),
            (other, _) => not_runnable(format!("declare with expect {other}")),
        }
    }

    pub(super) fn withdraw(&mut self, step: &Value) -> Run {
        let worker = WorkerId::new(Fields::only("withdraw", step, &["worker"])?.need_text("worker")?);
        let change =
            self.with_actions(|indexer, now, actions| indexer.withdraw_worker(now, &worker, actions));
        self.obey(false)?;
        if change.is_some() { Ok(()) } else { fail(format!("{worker} was not declared")) }
    }

    /// Withdraws a worker and declares it as it was.
    pub(super) fn declare_again(&mut self, worker: &WorkerId) -> Run {
        let Some(spec) = self.indexer.fleet().worker(worker).cloned() else {
            return fail(format!("{worker} is not declared"));
        };
        self.withdraw(&json!({"op": "withdraw", "worker": worker.as_str()}))?;
        match self.with_actions(|indexer, now, actions| indexer.declare_worker(now, spec, actions)) {
            Ok(_) => self.obey(false),
            Err(why) => fail(format!("{worker} cannot come back: {why}")),
        }
    }

    fn spec(&self, worker: &str, fields: &Fields<'_>) -> Run<Spec> {
        let small = |key: &str, otherwise: u64| -> Run<Result<u32, String>> {
            let number = fields.get(key).map_or(Ok(otherwise), |value| count(key, value))?;
            Ok(u32::try_from(number).map_err(|_| format!("`{key}` {number} is no 32-bit number")))
        };
        let numbers = (small("start", 0)?, small("size", 1)?, small("block_size", self.settings.block_size)?);
        let (start, size, block_size) = match numbers {
            (Ok(start), Ok(size), Ok(block_size)) => (start, size, block_size),
            (Err(why), ..) | (_, Err(why), _) | (.., Err(why)) => return Ok(Err(why)),
        };
        let Some(block_size) = BlockSize::new(block_size) else {
            return Ok(Err("a block size of 0".to_owned()));
        };
        let ranks = match Ranks::range(start, size) {
            Ok(ranks) => ranks,
            Err(why) => return Ok(Err(why.to_string())),
        };
        let events = self.events(worker, fields, &ranks)?;
        let pool = PoolKey::new(MODEL, None);
        let mut spec = WorkerSpec::new(worker, pool, block_size, ranks).events(events);
        spec.capacity = match fields.object("capacity")? {
            Some(capacity) => match capacity_of(&capacity, &spec.ranks)? {
                Ok(capacity) => Some(capacity),
                Err(why) => return Ok(Err(why)),
            },
            None => self.settings.capacity_blocks.map(CapacitySpec::per_rank),
        };
        spec.dp_mode = match fields.text("dp_mode")? {
            None | Some("pure") => DpMode::Pure,
            Some("attention") => DpMode::Attention,
            Some(other) => return not_runnable(format!("declare with dp_mode {other}")),
        };
        spec.max_running_requests = fields.count("max_running_requests")?;
        spec.engine = match self.settings.engine.as_deref() {
            Some("vllm") => EngineStyle::Vllm,
            Some("sglang") => EngineStyle::Sglang,
            _ => EngineStyle::Unknown,
        };
        Ok(Ok(spec))
    }

    /// The declared endpoints; where the case names none, ranks get addresses that nobody else has.
    fn events(&self, worker: &str, fields: &Fields<'_>, ranks: &Ranks) -> Run<EventsFrom> {
        let invented = |kind: &str| {
            Endpoints::per_rank(ranks.iter().map(|rank| (rank, format!("ipc://case/{worker}/{kind}/{rank}"))))
        };
        let mut endpoints = match fields.text("endpoint")? {
            Some(base) => Endpoints::base(base),
            None if fields.has("endpoints") => Endpoints::default(),
            None => invented("events"),
        };
        if let Some(own) = fields.get("endpoints") {
            endpoints.per_rank = own_endpoints(own, ranks)?;
        }
        let replay = match fields.text("replay_endpoint")? {
            Some(base) => Some(Endpoints::base(base)),
            None => self.settings.replay.then(|| invented("replay")),
        };
        Ok(EventsFrom::Zmq { endpoints, replay, topic: self.settings.topics.of(worker).to_owned() })
    }

    /// The three expected maps; each must name exactly the worker's ranks.
    fn check_declared(&self, worker: &str, step: &Fields<'_>) -> Run {
        let fleet = self.view.fleet();
        let fleet = fleet.declared();
        let plans: BTreeMap<DpRank, _> =
            fleet.plans(&worker.into()).map(|plan| (plan.rank.dp_rank, plan)).collect();
        let key = |rank: &DpRank| RankKey::new(worker, rank.0);
        let check = |field: &'static str, of: &dyn Fn(&DpRank) -> Value| match step.get(field) {
            None => Ok(()),
            Some(expected) => {
                let expected: BTreeMap<_, _> = by_number(field, expected)?
                    .into_iter()
                    .map(|(rank, value)| (rank, value.clone()))
                    .collect();
                let is: BTreeMap<_, _> = plans.keys().map(|rank| (*rank, of(rank))).collect();
                if is == expected { Ok(()) } else { fail(format!("{field} {expected:?}, but it is {is:?}")) }
            }
        };
        check("expect_endpoints", &|rank| {
            plans.get(rank).and_then(|plan| plan.events.as_ref()).map(|at| at.address()).into()
        })?;
        check("expect_capacity", &|rank| fleet.capacity_blocks(&key(rank)).blocks().into())?;
        check("expect_request_limit", &|rank| fleet.request_limit(&key(rank)).into())
    }
}

/// By rank, or in the order of the ranks.
fn own_endpoints(own: &Value, ranks: &Ranks) -> Run<BTreeMap<DpRank, String>> {
    if own.is_object() {
        return by_number("endpoints", own)?
            .into_iter()
            .map(|(rank, at)| Ok((rank, text("endpoints", at)?.to_owned())))
            .collect();
    }
    let own = list("endpoints", own)?;
    // A list that is too long names ranks beyond the range, which the product refuses.
    let start = ranks.start().0;
    own.iter().zip(start..).map(|(at, rank)| Ok((DpRank(rank), text("endpoints", at)?.to_owned()))).collect()
}

fn capacity_of(capacity: &Fields<'_>, ranks: &Ranks) -> Run<Result<CapacitySpec, String>> {
    if let Some(other) = capacity.keys().find(|key| !["scope", "blocks"].contains(key)) {
        return not_runnable(format!("declare with capacity {other}"));
    }
    let blocks = capacity.need("blocks")?;
    let one = || count("blocks", blocks);
    Ok(Ok(match capacity.need_text("scope")? {
        "aggregate" => CapacitySpec::aggregate(one()?),
        "per_rank" => CapacitySpec::per_rank(one()?),
        "worker_shared" => CapacitySpec::worker_shared(one()?),
        "per_rank_list" => {
            let each: Vec<u64> = if blocks.is_object() {
                by_number("blocks", blocks)?.values().map(|each| count("blocks", each)).collect::<Run<_>>()?
            } else {
                list("blocks", blocks)?.iter().map(|each| count("blocks", each)).collect::<Run<_>>()?
            };
            return Ok(CapacitySpec::per_rank_list(ranks, &each).map_err(|why| why.to_string()));
        }
        other => return not_runnable(format!("declare with capacity scope {other}")),
    }))
}

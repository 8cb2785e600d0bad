//! Load reports, and what the product says of itself: index size, load, counters, connections, status.

use std::collections::{BTreeMap, BTreeSet};

use rankwise::ids::{DpRank, RankKey, WorkerId};
use rankwise::indexer::RankReport;
use rankwise::load::{LoadEntry, LoadReport, RankLoadView, RawNumber, RawRankLoad};
use rankwise::trust::Trust;
use serde_json::Value;

use super::reading::{
    Fields, Run, by_number, by_rank, count, fail, list, not_runnable, number, ranks, same, text,
};
use super::stage::Stage;

impl Stage {
    pub(super) fn load(&mut self, step: &Value) -> Run {
        let step = Fields::only("load", step, &["worker", "report", "source"])?;
        let report = Fields::only("load report", step.need("report")?, &["ranks", "entries", "aggregate"])?;
        let mut entries = Vec::new();
        for (rank, load) in report.object("ranks")?.iter().flat_map(Fields::entries) {
            entries.push(LoadEntry { dp_rank: rank.parse().ok(), load: raw_load(load) });
        }
        for entry in report.get("entries").map(|entries| list("entries", entries)).transpose()?.unwrap_or(&[])
        {
            entries.push(LoadEntry { dp_rank: entry["dp_rank"].as_u64(), load: raw_load(entry) });
        }
        let source = step.text("source")?.unwrap_or(LoadReport::ENGINE).into();
        let aggregate = report.get("aggregate").map(raw_load);
        let report = LoadReport { source, entries, aggregate };
        let worker = WorkerId::new(step.need_text("worker")?);
        self.view.loads().lock().report(self.now, &worker, &report);
        Ok(())
    }

    pub(super) fn expect_load(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_load", step, &["ranks", "absent"])?;
        let kept: BTreeSet<_> = self.view.loads().lock().ranks().collect();
        let absent =
            step.get("absent").map(|absent| ranks("absent", absent)).transpose()?.unwrap_or_default();
        if let Some(rank) = absent.iter().find(|rank| kept.contains(*rank)) {
            return fail(format!("load of {rank} is kept"));
        }
        let Some(expected) = step.get("ranks") else { return Ok(()) };
        for (rank, expected) in by_rank("ranks", expected)? {
            self.check_load(&rank, &Fields::of("ranks", expected)?)?;
        }
        Ok(())
    }

    fn check_load(&self, rank: &RankKey, expected: &Fields<'_>) -> Run {
        let pool = self.pool();
        let loads = self.view.loads().lock();
        let load = pool.map(|pool| self.router.load(self.now, &loads, &pool, rank));
        let known = load.as_ref().filter(|load| matches!(load, RankLoadView::Known { .. }));
        match (expected.need_text("state")?, known) {
            ("known", None) => return fail(format!("load of {rank} is {load:?}, expected known")),
            ("unknown", Some(_)) => return fail(format!("load of {rank} is {load:?}, expected unknown")),
            ("known" | "unknown", _) => {}
            (other, _) => return not_runnable(format!("expect_load with state {other}")),
        }
        let newest = known.and_then(|_| loads.newest(self.now, rank)).map(|(load, _)| *load);
        let whole = |count: Option<u64>| count.map(|count| count as f64);
        for (field, expected) in expected.entries().filter(|(field, _)| *field != "state") {
            let is = match field {
                "decode_blocks" => known.and_then(RankLoadView::decode_blocks),
                "kv_used_blocks" => known.and_then(RankLoadView::used_blocks),
                "prefill_tokens" => known.and_then(|load| whole(load.active_prefill_tokens())),
                "age_ms" => known.and_then(RankLoadView::age).map(|age| age.as_secs_f64() * 1e3),
                "num_running_reqs" => newest.and_then(|load| whole(load.num_running_reqs)),
                "num_waiting_reqs" => newest.and_then(|load| whole(load.num_waiting_reqs)),
                "num_used_tokens" => newest.and_then(|load| whole(load.num_used_tokens)),
                "max_total_num_tokens" => newest.and_then(|load| whole(load.max_total_num_tokens)),
                "token_usage" => newest.and_then(|load| load.token_usage),
                other => return not_runnable(format!("expect_load with {other}")),
            };
            let equal = match is {
                Some(is) => expected.as_f64().is_some_and(|expected| same(is, expected)),
                None => expected.is_null(),
            };
            if !equal {
                return fail(format!("{field} of {rank} is {is:?}, expected {expected}"));
            }
        }
        Ok(())
    }

    pub(super) fn expect_index(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_index", step, &["blocks", "total_blocks", "nodes_at_most"])?;
        let pool = self.pool();
        if let Some(expected) = step.get("blocks") {
            let sizes = pool.iter().flat_map(|pool| {
                pool.ranks().map(|(_, rank)| {
                    let size = pool.index.tree_size(rank.slot).unwrap_or_default();
                    (rank.plan.rank.clone(), size)
                })
            });
            same_counts("blocks", sizes.collect(), expected)?;
        }
        let stats = pool.map(|pool| pool.index.stats()).unwrap_or_default();
        if let Some(expected) = step.count("total_blocks")?
            && expected != stats.total_blocks
        {
            return fail(format!("{} blocks in all, expected {expected}", stats.total_blocks));
        }
        if let Some(most) = step.count("nodes_at_most")?
            && stats.nodes as u64 > most
        {
            return fail(format!("{} nodes, expected at most {most}", stats.nodes));
        }
        Ok(())
    }

    pub(super) fn expect_counters(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_counters", step, &["exactly", "at_least"])?;
        for (way, expected) in step.entries().filter(|(way, _)| *way != "op") {
            for (name, expected) in Fields::of(way, expected)?.entries() {
                let expected = count(name, expected)?;
                let Some(is) = self.counter(name) else {
                    return not_runnable(format!("expect_counters with {name}"));
                };
                if is < expected || (way == "exactly" && is > expected) {
                    return fail(format!("{name} is {is}, expected {} {expected}", way.replace('_', " ")));
                }
            }
        }
        Ok(())
    }

    fn counter(&self, name: &str) -> Option<u64> {
        let total = self.total();
        let loads = self.view.loads().lock().counts();
        Some(match name {
            "gaps" => total.stream.gaps,
            "lost_batches" => total.stream.lost_batches,
            "duplicate_batches" => total.stream.duplicate_batches,
            "malformed_messages" => total.content.malformed_messages,
            "skipped_events" => total.content.skipped.total(),
            "orphan_blocks" => total.content.orphan_blocks,
            "unknown_removals" => total.content.unknown_removals,
            "rank_mismatch" => total.content.rank_mismatch,
            "out_of_range" => self.view.strays() + loads.out_of_range,
            "refused_load_entries" => loads.refused_entries,
            _ => return None,
        })
    }

    /// What was counted on all streams that ever were.
    pub(super) fn total(&self) -> RankReport {
        let mut total = RankReport::default();
        self.statuses.values().for_each(|status| total.add(&status.report()));
        total
    }

    /// A request that was sent there came back: the engine is full, or does not know the rank.
    pub(super) fn dispatch_rejected(&mut self, step: &Value) -> Run {
        let rank = Fields::only("dispatch_rejected", step, &["worker", "dp_rank"])?.rank()?;
        self.view
            .loads()
            .lock()
            .reject(self.now, &rank)
            .then_some(())
            .map_or_else(|| fail(format!("{rank} is not declared")), Ok)
    }

    pub(super) fn expect_connection(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_connection", step, &["worker", "states"])?;
        let worker = WorkerId::new(step.need_text("worker")?);
        let pool = self.pool();
        let view = pool.as_ref().and_then(|pool| pool.worker(&worker));
        let ranks = view.map(|view| view.ranks.as_slice()).unwrap_or_default();
        for (number, expected) in by_number("states", step.need("states")?)? {
            let Some(rank) = ranks.iter().find(|rank| rank.plan.rank.dp_rank == number) else {
                return fail(format!("{worker}:{number} is not declared"));
            };
            let wants_up = match text("states", expected)? {
                "up" => true,
                "down" | "connecting" => false,
                other => return not_runnable(format!("expect_connection with {other}")),
            };
            if rank.status.report().connected != wants_up {
                return fail(format!("{worker}:{number} is not {expected}"));
            }
        }
        Ok(())
    }

    pub(super) fn expect_status(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_status", step, &["silent_ranks", "trust", "block_size"])?;
        if let Some(expected) = step.get("block_size") {
            self.check_block_sizes(expected)?;
        }
        let trust: BTreeMap<RankKey, Trust> = self
            .pool()
            .iter()
            .flat_map(|pool| pool.ranks().map(|(_, rank)| (rank.plan.rank.clone(), rank.status.trust())))
            .collect();
        if let Some(expected) = step.get("silent_ranks") {
            let expected = ranks("silent_ranks", expected)?;
            let silent: BTreeSet<_> = trust
                .iter()
                .filter(|(_, trust)| **trust == Trust::Silent)
                .map(|(rank, _)| rank.clone())
                .collect();
            if silent != expected {
                return fail(format!("silent are {silent:?}, expected {expected:?}"));
            }
        }
        let Some(expected) = step.get("trust") else { return Ok(()) };
        for (rank, expected) in by_rank("trust", expected)? {
            let is = trust.get(&rank).map(|trust| trust.name());
            if is != Some(text("trust", expected)?) {
                return fail(format!("trust of {rank} is {is:?}, expected {expected}"));
            }
        }
        Ok(())
    }

    /// The block size that each rank's events really have; null where it has announced nothing.
    fn check_block_sizes(&self, expected: &Value) -> Run {
        let pool = self.pool();
        for (rank, expected) in by_rank("block_size", expected)? {
            let view = pool.as_ref().and_then(|pool| pool.ranks().find(|(_, view)| view.plan.rank == rank));
            let is = view.and_then(|(_, view)| view.status.report().announced_block_size);
            if is.map(u64::from) != expected.as_u64() {
                return fail(format!("blocks of {rank} have {is:?} tokens, expected {expected}"));
            }
        }
        Ok(())
    }

    fn check_ranks(&self, expected: &Value) -> Run {
        let fleet = self.view.fleet();
        let is = fleet.declared().workers().flat_map(|spec| {
            spec.ranks.iter().map(|dp_rank| RankKey { worker: spec.worker.clone(), dp_rank })
        });
        let is: BTreeSet<RankKey> = is.collect();
        let Value::Object(by_worker) = expected else {
            let expected = ranks("ranks", expected)?;
            return if is == expected {
                Ok(())
            } else {
                fail(format!("ranks are {is:?}, expected {expected:?}"))
            };
        };
        for (worker, listed) in by_worker {
            let of: Vec<u64> = is
                .iter()
                .filter(|rank| rank.worker.as_str() == worker)
                .map(|rank| rank.dp_rank.0.into())
                .collect();
            let wanted =
                list("ranks", listed)?.iter().map(|rank| count("ranks", rank)).collect::<Run<Vec<_>>>()?;
            if of != wanted {
                return fail(format!("{worker} has the ranks {of:?}, expected {wanted:?}"));
            }
        }
        Ok(())
    }

    /// `workers`: a list of names, or a map to ranges or to lists of ranks.
    pub(super) fn expect_workers(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_workers", step, &["workers", "ranks"])?;
        if let Some(expected) = step.get("ranks") {
            self.check_ranks(expected)?;
        }
        if !step.has("workers") && step.has("ranks") {
            return Ok(());
        }
        let fleet = self.view.fleet();
        let fleet = fleet.declared();
        let is: BTreeSet<&str> = fleet.workers().map(|spec| spec.worker.as_str()).collect();
        let expected = step.need("workers")?;
        let names: BTreeSet<&str> = match expected {
            Value::Object(map) => map.keys().map(String::as_str).collect(),
            other => list("workers", other)?.iter().map(|name| text("workers", name)).collect::<Run<_>>()?,
        };
        if is != names {
            return fail(format!("workers are {is:?}, expected {names:?}"));
        }
        for (worker, expected) in expected.as_object().into_iter().flatten() {
            let Some(spec) = fleet.worker(&worker.as_str().into()) else { continue };
            let ranks: Vec<DpRank> = spec.ranks.iter().collect();
            let wanted: Vec<DpRank> = if let Value::Array(listed) = expected {
                let number = |rank| Ok(DpRank(u32::try_from(count("ranks", rank)?).unwrap_or(u32::MAX)));
                listed.iter().map(number).collect::<Run<_>>()?
            } else {
                let range = Fields::only("expect_workers range", expected, &["start", "size"])?;
                let (start, size) = (range.need_count("start")?, range.need_count("size")?);
                (start..start + size).map(|rank| DpRank(u32::try_from(rank).unwrap_or(u32::MAX))).collect()
            };
            if ranks != wanted {
                return fail(format!("{worker} has the ranks {ranks:?}, expected {wanted:?}"));
            }
        }
        Ok(())
    }
}

/// Compares two counts per rank; a rank that is not named is absent or 0.
pub fn same_counts(what: &str, is: BTreeMap<RankKey, u64>, expected: &Value) -> Run {
    let mut wanted = BTreeMap::new();
    for (rank, count) in by_rank("expect", expected)? {
        wanted.insert(rank, number("expect", count)?);
    }
    for rank in is.keys().chain(wanted.keys()) {
        let (is, wanted) = (is.get(rank).copied().unwrap_or(0), wanted.get(rank).copied().unwrap_or(0.0));
        if !same(is as f64, wanted) {
            return fail(format!("{what} of {rank} is {is}, expected {wanted}"));
        }
    }
    Ok(())
}

fn raw_load(load: &Value) -> RawRankLoad {
    let field = |key: &str| match &load[key] {
        Value::Null => RawNumber::Absent,
        Value::Number(number) => number.as_f64().map_or(RawNumber::Unreadable, RawNumber::Value),
        _ => RawNumber::Unreadable,
    };
    RawRankLoad {
        num_running_reqs: field("num_running_reqs"),
        num_waiting_reqs: field("num_waiting_reqs"),
        num_used_tokens: field("num_used_tokens"),
        max_total_num_tokens: field("max_total_num_tokens"),
        token_usage: field("token_usage"),
        kv_used_blocks: field("kv_used_blocks"),
        prefill_tokens: field("prefill_tokens"),
        queued_uncached_tokens: field("queued_uncached_tokens"),
        decode_blocks: field("decode_blocks"),
        age_ms: field("age_ms"),
        ..RawRankLoad::default()
    }
}

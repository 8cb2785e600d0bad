//! `/metrics`: everything that is counted, read at the moment of the scrape.
//!
//! Series of ranks are made from the fleet as it stands, so none survives its rank. Nothing is counted twice:
//! the numbers are those that the indexer keeps anyway. A scrape costs one look at every rank, holds no lock that
//! the index's writer or a query wants, and none of the load table for longer than one worker's ranks take. What is
//! possible of a rank and does not stand (a reason, a kind of skipped event) has no series: hundreds of ranks with
//! dozens of zeros each would be most of the text.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::Semaphore;

use super::Control;
use super::problem::Problem;
use super::state::ServiceState;
use crate::block::Tier;
use crate::events::LEFT_OUT;
use crate::fleet::Capacity;
use crate::ids::Moment;
use crate::index::TierSize;
use crate::indexer::{FleetView, PoolView, RankReport, RankView, View, WorkerView};
use crate::load::{Booked, LoadTable, RankGauges, RankLoad};
use crate::routing::Reason;
use crate::trust::{self, Reasons, Trust};

/// What the service itself counts, and the registry that everything is encoded from.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    /// Whose scrape is it.
    turns: Arc<Semaphore>,
    queries: Histogram,
    decisions: Histogram,
    picks: Arc<Picks>,
    ignored: Counter,
}

/// Picks by reason.
#[derive(Default, Debug)]
struct Picks([AtomicU64; Reason::ALL.len()]);

impl Metrics {
    /// `clock` is the one that drives the indexer, `queue` the depth of what waits for it.
    pub(super) fn new(
        view: View,
        clock: impl Fn() -> Moment + Send + Sync + 'static,
        queue: impl Fn() -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        // 1 µs to 0.5 s: a text query takes microseconds, one of 8 MiB tens of milliseconds.
        let histogram = || Histogram::new(exponential_buckets(1e-6, 2.0, 20));
        let (queries, decisions) = (histogram(), histogram());
        let picks = Arc::<Picks>::default();
        let mut registry = Registry::with_prefix("rankwise");
        registry.register_with_unit(
            "query_duration",
            "Time from a query's parsed body to its answer",
            Unit::Seconds,
            queries.clone(),
        );
        registry.register_with_unit(
            "decision_duration",
            "Time from a selection's parsed body to its decision",
            Unit::Seconds,
            decisions.clone(),
        );
        let fleet = FleetCollector {
            view,
            clock: Box::new(clock),
            queue: Box::new(queue),
            picks: Arc::clone(&picks),
        };
        registry.register_collector(Box::new(fleet));
        let ignored = Counter::default();
        registry.register(
            "ignored_fields",
            "Fields and parameters of requests that are not known and were ignored",
            ignored.clone(),
        );
        Self { registry, turns: Arc::new(Semaphore::new(1)), queries, decisions, picks, ignored }
    }

    pub(super) fn ignored(&self, fields: usize) {
        self.ignored.inc_by(fields as u64);
    }

    pub(super) fn query_took(&self, time: Duration) {
        self.queries.observe(time.as_secs_f64());
    }

    pub(super) fn decision_took(&self, time: Duration) {
        self.decisions.observe(time.as_secs_f64());
    }

    pub(super) fn picked(&self, reason: Reason) {
        if let Some(at) = Reason::ALL.iter().position(|one| *one == reason) {
            self.picks.0[at].fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// `GET /metrics`.
pub(super) async fn scrape<C: Control>(State(state): State<ServiceState<C>>) -> Response {
    // One at a time, and beside the threads that answer: the text of hundreds of ranks takes milliseconds.
    // Never closed.
    let turn = Arc::clone(&state.metrics().turns).acquire_owned().await;
    let encoded = tokio::task::spawn_blocking(move || {
        let mut text = String::new();
        let encoded = encode(&mut text, &state.metrics().registry);
        drop(turn);
        encoded.map(|()| text)
    });
    match encoded.await.unwrap_or(Err(fmt::Error)) {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => Problem::new(
            axum::http::StatusCode::INTERNAL_SERVER_ERROR,
            "metrics",
            format!("metrics could not be encoded: {error}"),
        )
        .into_response(),
    }
}

/// Reads the fleet at each scrape.
struct FleetCollector {
    view: View,
    clock: Box<dyn Fn() -> Moment + Send + Sync>,
    queue: Box<dyn Fn() -> Option<u64> + Send + Sync>,
    picks: Arc<Picks>,
}

impl fmt::Debug for FleetCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetCollector").finish_non_exhaustive()
    }
}

/// One rank at the moment of the scrape, with its labels written once.
struct Row {
    model: String,
    worker: String,
    dp_rank: String,
    report: RankReport,
    trust: Trust,
    reasons: Reasons,
    age: Option<Duration>,
    load_age: Option<Duration>,
    booked: Booked,
    load: RankGauges,
    capacity: Capacity,
    block_size: u64,
    tiers: TierSizes,
}

/// What a rank holds in each tier, by the tier's name. The device always has a value, a lower tier only where the
/// rank holds anything there.
type TierSizes = [(&'static str, TierSize); Tier::ALL.len()];

fn tier_sizes(pool: &PoolView, rank: &RankView) -> TierSizes {
    Tier::ALL.map(|tier| (tier_name(tier), pool.index.tier_size(rank.slot, tier).unwrap_or_default()))
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Other => "other",
    }
}

impl Row {
    fn of(pool: &PoolView, worker: &WorkerView, rank: &RankView, now: Moment, loads: &LoadTable) -> Self {
        let key = &rank.plan.rank;
        let capacity = pool.capacity_of(worker, rank, loads);
        // One look, so that the state and its reasons agree.
        let reasons = rank.status.reasons();
        Self {
            model: escaped(&pool.key.model),
            worker: escaped(rank.plan.rank.worker.as_str()),
            dp_rank: rank.plan.rank.dp_rank.to_string(),
            report: rank.status.report(),
            trust: reasons.trust(),
            reasons,
            age: rank.status.last_heard().map(|at| now.since(at)),
            load_age: loads.newest(now, key).map(|(_, age)| age),
            booked: loads.ledger().all(key),
            load: loads.gauges(now, key, pool.block_size, capacity.exact()),
            capacity,
            block_size: pool.block_size.get().into(),
            tiers: tier_sizes(pool, rank),
        }
    }

    fn labels(&self) -> [(&'static str, &str); 3] {
        [("model", &self.model), ("worker", &self.worker), ("dp_rank", &self.dp_rank)]
    }

    fn labels_with<'a>(&'a self, name: &'static str, value: &'a str) -> [(&'static str, &'a str); 4] {
        let [model, worker, dp_rank] = self.labels();
        [model, worker, dp_rank, (name, value)]
    }
}

/// The encoder writes label values as they are; a quote or a line break in a model's name would end the value.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A counter of every rank.
type Count = (&'static str, &'static str, fn(&RankReport) -> u64);

const COUNTS: &[Count] = &[
    ("applied_batches", "Batches applied, live or replayed", |of| of.stream.applied_batches),
    ("gaps", "Holes seen in the sequence", |of| of.stream.gaps),
    ("lost_batches", "Batches that never came", |of| of.stream.lost_batches),
    ("duplicate_batches", "Batches that came again", |of| of.stream.duplicate_batches),
    ("replays_asked", "Requests for history", |of| of.stream.replays_asked),
    ("replays_answered", "Requests for history that were answered", |of| of.stream.replays_answered),
    ("replays_failed", "Requests for history that failed or timed out", |of| of.stream.replays_failed),
    ("replays_given_up", "Histories that could not be had", |of| of.stream.replays_given_up),
    ("held_dropped_batches", "Live batches dropped while a replay was outstanding", |of| {
        of.stream.held_dropped
    }),
    ("malformed_messages", "Messages with the wrong framing or payload", |of| of.content.malformed_messages),
    ("other_topic_messages", "Messages of a topic that only shares our prefix", |of| of.content.other_topic),
    ("rank_mismatch_batches", "Batches whose payload names another rank", |of| of.content.rank_mismatch),
    ("orphan_blocks", "Blocks whose parent was not known when they came", |of| of.content.orphan_blocks),
    ("orphans_dropped_blocks", "Orphans of which only the name was kept", |of| of.content.orphans_dropped),
    ("unknown_removals", "Removed names that the rank did not hold", |of| of.content.unknown_removals),
    ("other_medium_blocks", "Blocks on a medium that is not known", |of| of.content.other_medium_blocks),
    ("stored_blocks", "Blocks announced", |of| of.content.stored_blocks),
    ("removed_blocks", "Names removed", |of| of.content.removed_blocks),
    ("clears", "Whole caches emptied", |of| of.content.clears),
    ("unchained_stores", "Stores of an engine that is too old to be indexed", |of| {
        of.content.unchained_stores
    }),
    ("block_size_mismatches", "Stores with another block size than declared", |of| {
        of.content.skipped.get(trust::Reason::BlockSizeMismatch).into()
    }),
];

const TRUSTS: [Trust; 6] = [
    Trust::Joining,
    Trust::Live,
    Trust::Repairing,
    Trust::Partial(trust::MayErr::Miss),
    Trust::Silent,
    Trust::Unknown,
];

impl Collector for FleetCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let to = &mut encoder;
        let (fleet, now) = (self.view.fleet(), (self.clock)());
        let rows = self.rows(&fleet, now);
        for (name, help, read) in COUNTS {
            let mut family = to.encode_descriptor(name, help, None, MetricType::Counter)?;
            for row in &rows {
                count(&mut family, &row.labels(), read(&row.report))?;
            }
        }
        skipped(to, &rows)?;
        restarts(to, &rows)?;
        rank_gauges(to, &rows)?;
        trusts(to, &rows)?;
        self.process(to, &fleet, &rows)
    }
}

impl FleetCollector {
    fn rows(&self, fleet: &FleetView, now: Moment) -> Vec<Row> {
        let mut rows = Vec::new();
        self.view.loads().lock().ledger_mut().expire(now);
        for pool in fleet.pools() {
            for worker in &pool.workers {
                let loads = self.view.loads().lock();
                rows.extend(worker.ranks.iter().map(|rank| Row::of(pool, worker, rank, now, &loads)));
            }
        }
        rows
    }

    fn process(&self, to: &mut DescriptorEncoder<'_>, fleet: &FleetView, rows: &[Row]) -> fmt::Result {
        let mut picks =
            to.encode_descriptor("picks", "Ranks chosen, by reason", None, MetricType::Counter)?;
        for (reason, picked) in Reason::ALL.iter().zip(&self.picks.0) {
            count(&mut picks, &[("reason", reason.name())], picked.load(Ordering::Relaxed))?;
        }
        let silent = rows.iter().filter(|row| row.trust == Trust::Silent).count();
        plain(to, "silent_ranks", "Declared ranks that nothing is heard from", silent as u64)?;
        let never = rows.iter().filter(|row| row.reasons.contains(trust::Reason::NeverHeard)).count();
        plain(
            to,
            "never_heard_ranks",
            "Connected ranks that have said nothing within the grace",
            never as u64,
        )?;
        let held = rows.iter().map(|row| row.report.held_bytes).sum();
        let help = "Payload of all batches that wait for a replay";
        let mut family = to.encode_descriptor("held_total", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        gauge(&mut family, &NO_LABELS, held)?;
        plain(to, "ranks", "Declared ranks", rows.len() as u64)?;
        if let Some(depth) = (self.queue)() {
            plain(to, "queued_messages", "Messages that wait for the indexing thread", depth)?;
        }
        let mut strays = to.encode_descriptor(
            "stray_messages",
            "Messages of streams that are not declared",
            None,
            MetricType::Counter,
        )?;
        ConstCounter::new(self.view.strays()).encode(strays.encode_family(&NO_LABELS)?)?;
        self.reservations(to)?;
        let help = "Saved or discovered cards that could not be declared";
        let mut ignored = to.encode_descriptor("ignored_cards", help, None, MetricType::Counter)?;
        ConstCounter::new(self.view.ignored_cards()).encode(ignored.encode_family(&NO_LABELS)?)?;
        let loads = self.view.loads().lock().counts();
        let mut entries = to.encode_descriptor(
            "load_entries",
            "Entries of load reports, by result",
            None,
            MetricType::Counter,
        )?;
        for (result, value) in [
            ("accepted", loads.accepted),
            ("refused", loads.refused_entries),
            ("out_of_range", loads.out_of_range),
            ("empty", loads.empty),
            ("superseded", loads.superseded),
        ] {
            count(&mut entries, &[("result", result)], value)?;
        }
        self.aggregates(to)?;
        index_gauges(to, fleet)
    }

    /// What workers and gateways say of several ranks at once, which is no rank's own.
    fn aggregates(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Figure = (&'static str, &'static str, fn(&RankLoad) -> Option<f64>);
        const FIGURES: [Figure; 4] = [
            (
                "worker_running_requests",
                "Requests being served, where only the worker's sum is known",
                |of| of.num_running_reqs.map(|count| count as f64),
            ),
            ("worker_waiting_requests", "Requests waiting, where only the worker's sum is known", |of| {
                of.num_waiting_reqs.map(|count| count as f64)
            }),
            ("worker_used_tokens", "Tokens in the KV caches, where only the worker's sum is known", |of| {
                of.num_used_tokens.map(|count| count as f64)
            }),
            ("worker_token_usage", "Share of the KV caches in use, where only the worker's is known", |of| {
                of.token_usage
            }),
        ];
        let now = (self.clock)();
        let (workers, gateways) = {
            let loads = self.view.loads().lock();
            let workers = loads.aggregates(now).map(|(worker, of)| (escaped(worker.as_str()), of.load));
            let gateways = loads.rollups(now).map(|(base, answer, _)| (escaped(base), answer.rollup.len()));
            (workers.collect::<Vec<_>>(), gateways.collect::<Vec<_>>())
        };
        for (name, help, read) in FIGURES {
            let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (worker, load) in &workers {
                if let Some(value) = read(load) {
                    ConstGauge::new(value).encode(family.encode_family(&[("worker", worker.as_str())])?)?;
                }
            }
        }
        let help = "Ranks that a gateway's rollup names; shown, and nobody's load";
        let mut family = to.encode_descriptor("rollup_ranks", help, None, MetricType::Gauge)?;
        for (base, ranks) in &gateways {
            gauge(&mut family, &[("gateway", base)], *ranks as u64)?;
        }
        Ok(())
    }
}

const NO_LABELS: [(&str, &str); 0] = [];

impl FleetCollector {
    fn reservations(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let (standing, counts) = {
            let loads = self.view.loads().lock();
            (loads.ledger().len() as u64, loads.ledger().counts())
        };
        plain(to, "reservations", "Reservations that stand", standing)?;
        let help = "Attempts to reserve, by result";
        let mut family = to.encode_descriptor("reserve", help, None, MetricType::Counter)?;
        for (result, value) in
            [("booked", counts.booked), ("id_in_use", counts.id_in_use), ("full", counts.full)]
        {
            count(&mut family, &[("result", result)], value)?;
        }
        let help = "Reservations that are over, by what ended them";
        let mut family = to.encode_descriptor("reservations_ended", help, None, MetricType::Counter)?;
        for (cause, value) in
            [("freed", counts.freed), ("expired", counts.expired), ("rank_gone", counts.dropped)]
        {
            count(&mut family, &[("cause", cause)], value)?;
        }
        Ok(())
    }
}

fn count(family: &mut MetricEncoder<'_>, labels: &[(&str, &str)], value: u64) -> fmt::Result {
    ConstCounter::new(value).encode(family.encode_family(&labels)?)
}

fn gauge(family: &mut MetricEncoder<'_>, labels: &[(&str, &str)], value: u64) -> fmt::Result {
    // Gauges are signed; no count of ours comes near 2^63.
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)).encode(family.encode_family(&labels)?)
}

fn plain(to: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, MetricType::Gauge)?;
    gauge(&mut family, &NO_LABELS, value)
}

fn skipped(to: &mut DescriptorEncoder<'_>, rows: &[Row]) -> fmt::Result {
    let mut family =
        to.encode_descriptor("skipped_events", "Events left out, by reason", None, MetricType::Counter)?;
    for row in rows {
        for reason in LEFT_OUT {
            let skipped = row.report.content.skipped.get(reason);
            if skipped > 0 {
                count(&mut family, &row.labels_with("reason", reason.name()), skipped.into())?;
            }
        }
    }
    Ok(())
}

fn restarts(to: &mut DescriptorEncoder<'_>, rows: &[Row]) -> fmt::Result {
    let help = "Publisher restarts seen, by the rule that decided";
    let mut family = to.encode_descriptor("restarts", help, None, MetricType::Counter)?;
    for row in rows {
        let stream = &row.report.stream;
        for (rule, value) in [
            ("newer", stream.restarts_newer),
            ("reconnected", stream.restarts_reconnected),
            ("probed", stream.restarts_probed),
        ] {
            count(&mut family, &row.labels_with("rule", rule), value)?;
        }
    }
    Ok(())
}

/// A gauge of every rank; a rank that has no value has no series.
type Level = (&'static str, &'static str, Option<&'static Unit>, fn(&Row) -> Option<f64>);

const LEVELS: &[Level] = &[
    ("last_sequence", "Number of the last batch applied", None, |row| {
        row.report.watermark.map(|seq| seq.0 as f64)
    }),
    ("connected", "Whether the event connection stands", None, |row| {
        Some(if row.report.connected { 1.0 } else { 0.0 })
    }),
    ("held_batches", "Live batches that wait for a replay", None, |row| Some(row.report.held_batches as f64)),
    ("held", "Payload of the batches that wait for a replay", Some(&Unit::Bytes), |row| {
        Some(row.report.held_bytes as f64)
    }),
    ("event_age", "Time since the rank was last heard", Some(&Unit::Seconds), |row| {
        row.age.map(|age| age.as_secs_f64())
    }),
    ("load_report_age", "Age of the newest load report", Some(&Unit::Seconds), |row| {
        row.load_age.map(|age| age.as_secs_f64())
    }),
    ("reserved_requests", "Reservations that stand on the rank", None, |row| {
        Some(row.booked.requests as f64)
    }),
    ("reserved_prefill_tokens", "Their prompt tokens that are not prefilled", None, |row| {
        Some(row.booked.prefill_tokens as f64)
    }),
    ("reserved_blocks", "Their blocks, each content once", None, |row| Some(row.booked.decode_blocks)),
    ("running_requests", "Requests being served, with those sent since the report", None, |row| {
        row.load.running.map(|count| count as f64)
    }),
    ("waiting_requests", "Requests waiting, as reported", None, |row| {
        row.load.waiting.map(|count| count as f64)
    }),
    ("used_blocks", "Blocks of the KV cache in use, with those sent since the report", None, |row| {
        row.load.used_blocks
    }),
    ("request_limit", "Requests that the engine runs at once, as it says", None, |row| {
        row.load.request_limit.map(|count| count as f64)
    }),
    ("asleep", "Whether the engine sleeps; only where it does", None, |row| row.load.asleep.then_some(1.0)),
    ("block_size_tokens", "Tokens per block", None, |row| Some(row.block_size as f64)),
];

fn rank_gauges(to: &mut DescriptorEncoder<'_>, rows: &[Row]) -> fmt::Result {
    for (name, help, unit, read) in LEVELS {
        let mut family = to.encode_descriptor(name, help, *unit, MetricType::Gauge)?;
        for row in rows {
            if let Some(value) = read(row) {
                ConstGauge::new(value).encode(family.encode_family(&row.labels().as_slice())?)?;
            }
        }
    }
    let help = "Distinct blocks that the rank holds in its full-attention group";
    let mut family = to.encode_descriptor("blocks", help, None, MetricType::Gauge)?;
    for row in rows {
        for (tier, size) in row.tiers {
            if size.blocks > 0 || tier == tier_name(Tier::Device) {
                gauge(&mut family, &row.labels_with("tier", tier), size.blocks)?;
            }
        }
    }
    let help = "Names that the rank announced and whose content is not known";
    let mut family = to.encode_descriptor("nameless_blocks", help, None, MetricType::Gauge)?;
    for row in rows {
        for (tier, size) in row.tiers {
            if size.nameless > 0 {
                gauge(&mut family, &row.labels_with("tier", tier), size.nameless)?;
            }
        }
    }
    let help = "Blocks that the rank can hold, declared or reported; the provenance says how they are known";
    let mut family = to.encode_descriptor("capacity_blocks", help, None, MetricType::Gauge)?;
    for row in rows {
        if let Capacity::Known { blocks, provenance } = row.capacity {
            gauge(&mut family, &row.labels_with("provenance", provenance.name()), blocks)?;
        }
    }
    Ok(())
}

/// A state set: 1 for the state that holds, 0 for the others.
fn trusts(to: &mut DescriptorEncoder<'_>, rows: &[Row]) -> fmt::Result {
    let help = "How far the rank's view can be believed: 1 for the state that holds";
    let mut family = to.encode_descriptor("trust", help, None, MetricType::Gauge)?;
    for row in rows {
        for state in TRUSTS {
            let labels = row.labels_with("state", state.name());
            gauge(&mut family, &labels, u64::from(state.name() == row.trust.name()))?;
        }
    }
    let help = "Whether the rank's view may miss blocks, or credit blocks that are gone";
    let mut family = to.encode_descriptor("may_err", help, None, MetricType::Gauge)?;
    for row in rows {
        for way in ["may_miss", "may_overcredit"] {
            let labels = row.labels_with("way", way);
            gauge(&mut family, &labels, u64::from(row.trust.may_err().contains(&way)))?;
        }
    }
    let help = "Why the rank's view is not beyond doubt: 1 for each reason that stands";
    let mut family = to.encode_descriptor("trust_reason", help, None, MetricType::Gauge)?;
    for row in rows {
        for reason in row.reasons.names() {
            gauge(&mut family, &row.labels_with("reason", reason), 1)?;
        }
    }
    let help = "How often a reason to doubt the rank's view was given, lifted or not";
    let mut family = to.encode_descriptor("reasons_given", help, None, MetricType::Counter)?;
    for row in rows {
        for reason in trust::Reason::ALL {
            let given = row.report.given.get(*reason);
            if given > 0 {
                count(&mut family, &row.labels_with("reason", reason.name()), given.into())?;
            }
        }
    }
    Ok(())
}

fn index_gauges(to: &mut DescriptorEncoder<'_>, fleet: &FleetView) -> fmt::Result {
    let pools: Vec<_> = fleet
        .pools()
        .map(|pool| (escaped(&pool.key.model), escaped(&pool.key.group), pool.index.sizes()))
        .collect();
    type Size = (&'static str, &'static str, Option<&'static Unit>, fn(&crate::index::IndexStats) -> u64);
    let sizes: [Size; 4] = [
        ("index", "Live bytes of the index, estimated", Some(&Unit::Bytes), |of| of.bytes as u64),
        ("index_nodes", "Nodes of the prefix tree, the root included", None, |of| of.nodes as u64),
        ("index_distinct_blocks", "Distinct blocks, whoever holds them", None, |of| of.distinct_blocks),
        ("index_orphan_blocks", "Blocks kept aside because their parent is not known", None, |of| of.orphans),
    ];
    for (name, help, unit, read) in sizes {
        let mut family = to.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for (model, group, stats) in &pools {
            gauge(&mut family, &[("model", model), ("group", group)], read(stats))?;
        }
    }
    Ok(())
}

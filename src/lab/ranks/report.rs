//! The results: as JSON for programs, as a page for people.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::envelope::{Envelope, Field, binding};
use super::grid::{Phase, Point};
use super::lockstep::{Outcome, PointOutcome};
use super::measured::{Measured, Recorded};
use crate::ids::DpRank;
use crate::lab::plot::{CannotDraw, Scale, Series, duration_label, latency_over_points};
use crate::lab::report::{Report, Table};

/// The results as one JSON object. `runner` says what the points ran on.
///
/// `common` is what all ranks can take, `set_by` which ranks' envelopes set each number, `envelopes` what each
/// rank stated, `grid` the digest and the counts that all ranks had. Each of `points` has the latencies of all
/// ranks together, with the histogram (`[microseconds, how many]`), and each rank's own without it. What was not
/// measured is null.
pub fn json(outcome: &Outcome, runner: &str) -> Value {
    let summary = outcome.grid.summary();
    let mut set_by = Map::new();
    for field in Field::ALL {
        set_by.insert(field.name().to_owned(), json!(numbers(&binding(&outcome.envelopes, field))));
    }
    let envelopes = outcome.envelopes.iter().zip(&outcome.who).enumerate().map(|(rank, (envelope, who))| {
        let mut value = envelope_json(envelope);
        value["rank"] = json!(rank);
        value["who"] = json!(who);
        value
    });
    json!({
        "ok": true,
        "runner": runner,
        "ranks": outcome.envelopes.len(),
        "common": envelope_json(&outcome.common),
        "set_by": set_by,
        "envelopes": envelopes.collect::<Value>(),
        "grid": {
            "digest": summary.digest.to_string(),
            "points": summary.points,
            "prefill": summary.prefill,
            "decode": summary.decode,
        },
        "foreign_messages": outcome.foreign,
        "points": outcome.points.iter().map(point_json).collect::<Value>(),
    })
}

fn numbers(ranks: &[DpRank]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.0).collect()
}

fn envelope_json(envelope: &Envelope) -> Value {
    let stated = envelope.stated();
    Field::ALL.into_iter().map(|field| (field.name().to_owned(), json!(stated.get(field)))).collect()
}

fn point_json(outcome: &PointOutcome) -> Value {
    let Point { phase, prompt_tokens, width, output_tokens, requests } = outcome.point;
    let [ttft, itl, e2e] = KINDS.map(|kind| {
        let all = together(outcome, kind);
        let mut value = recorded_json(&all);
        if !value.is_null() {
            value["histogram"] = json!(all.buckets());
        }
        value
    });
    let ranks = outcome.ranks.iter().enumerate().map(|(rank, measured)| {
        let [ttft, itl, e2e] = KINDS.map(|kind| recorded_json(kind(measured)));
        let rates = rates(&outcome.point, measured);
        json!({
            "rank": rank, "ttft": ttft, "itl": itl, "e2e": e2e,
            "prompt_tokens_per_second": rates.map(|rates| rates.0),
            "output_tokens_per_second": rates.map(|rates| rates.1),
        })
    });
    json!({
        "phase": phase.name(),
        "prompt_tokens": prompt_tokens,
        "width": width,
        "output_tokens": output_tokens,
        "requests_per_rank": requests,
        "ttft": ttft,
        "itl": itl,
        "e2e": e2e,
        "ranks": ranks.collect::<Value>(),
    })
}

type Kind = fn(&Measured) -> &Recorded;

const KINDS: [Kind; 3] = [|measured| &measured.ttft, |measured| &measured.itl, |measured| &measured.e2e];

fn together(outcome: &PointOutcome, kind: Kind) -> Recorded {
    Recorded::merged(outcome.ranks.iter().map(kind))
}

fn recorded_json(recorded: &Recorded) -> Value {
    let micros = |latency: Option<Duration>| latency.map(|latency| latency.as_micros() as u64);
    if recorded.count() == 0 {
        return Value::Null;
    }
    json!({
        "count": recorded.count(),
        "mean_us": micros(recorded.mean()),
        "p50_us": micros(recorded.quantile(0.5)),
        "p90_us": micros(recorded.quantile(0.9)),
        "p99_us": micros(recorded.quantile(0.99)),
        "max_us": micros(recorded.longest()),
    })
}

/// Prompt tokens and generated tokens per second of one rank; unknown where no time passed.
fn rates(point: &Point, measured: &Measured) -> Option<(f64, f64)> {
    let seconds = Duration::from_micros(measured.elapsed_us).as_secs_f64();
    let prompts = f64::from(point.prompt_tokens) * f64::from(point.requests);
    (seconds > 0.0).then(|| (prompts / seconds, measured.output_tokens as f64 / seconds))
}

/// The results as a page that needs nothing beside it.
///
/// # Errors
/// [`CannotDraw`].
pub fn page(outcome: &Outcome, runner: &str) -> Result<String, CannotDraw> {
    let summary = outcome.grid.summary();
    let mut report = Report::new("rankwise bench ranks");
    report
        .parameter("ranks", outcome.envelopes.len())
        .parameter("points run on", runner)
        .parameter("grid", summary)
        .parameter("messages that were not of this bench", outcome.foreign)
        .heading("Capacity")
        .note("What all ranks can take is the smallest of each number; the grid is made of that alone.")
        .table(capacity(outcome));
    for phase in Phase::ALL {
        let (title, what, kind) = curves_of(phase);
        report.heading(title);
        for quantile in [0.5, 0.99] {
            let series = series(outcome, phase, kind, quantile);
            let title = format!("{what}, p{:.0}, all ranks", quantile * 100.0);
            report.plot(latency_over_points(&title, "prompt tokens", Scale::Log, &series)?);
        }
        report.table(points(outcome, phase, kind));
    }
    Ok(report.html())
}

fn curves_of(phase: Phase) -> (&'static str, &'static str, Kind) {
    match phase {
        Phase::Prefill => ("Prefill", "Time to first token", KINDS[0]),
        Phase::Decode => ("Decode", "Time between tokens", KINDS[1]),
    }
}

fn capacity(outcome: &Outcome) -> Table {
    let names = Field::ALL.map(|field| field.name().to_owned());
    let mut table = Table::new(["".to_owned(), "process".to_owned()].into_iter().chain(names));
    let row = |name: String, who: &str, envelope: &Envelope| {
        let stated = envelope.stated();
        let numbers = Field::ALL.map(|field| stated.get(field).to_string());
        [name, who.to_owned()].into_iter().chain(numbers).collect::<Vec<_>>()
    };
    table.row(row("common".to_owned(), "", &outcome.common));
    for (rank, (envelope, who)) in outcome.envelopes.iter().zip(&outcome.who).enumerate() {
        table.row(row(format!("rank {rank}"), who, envelope));
    }
    table
}

/// A line per width, over prompt lengths.
fn series(outcome: &Outcome, phase: Phase, kind: Kind, quantile: f64) -> Vec<Series> {
    let of_phase = || outcome.points.iter().filter(|of| of.point.phase == phase);
    let mut widths: Vec<u32> = of_phase().map(|of| of.point.width).collect();
    widths.sort_unstable();
    widths.dedup();
    let line = |width: u32| {
        let points = of_phase().filter(|of| of.point.width == width).filter_map(|of| {
            let latency = together(of, kind).quantile(quantile)?;
            Some((f64::from(of.point.prompt_tokens), latency.as_nanos() as f64))
        });
        Series { name: format!("{width} at once"), points: points.collect() }
    };
    widths.into_iter().map(line).collect()
}

fn points(outcome: &Outcome, phase: Phase, kind: Kind) -> Table {
    let mut table = Table::new([
        "point",
        "samples",
        "p50",
        "p90",
        "p99",
        "longest",
        "slowest rank (p50)",
        "tokens/s per rank",
    ]);
    for of in outcome.points.iter().filter(|of| of.point.phase == phase) {
        let all = together(of, kind);
        let label = |latency: Option<Duration>| {
            latency.map_or_else(|| "-".to_owned(), |latency| duration_label(latency.as_nanos() as f64))
        };
        let slowest = of
            .ranks
            .iter()
            .enumerate()
            .filter_map(|(rank, measured)| Some((kind(measured).quantile(0.5)?, rank)));
        let slowest = slowest.max_by_key(|(latency, _)| *latency);
        let slowest = slowest
            .map_or_else(|| "-".to_owned(), |(latency, rank)| format!("{rank} ({})", label(Some(latency))));
        let rates = of.ranks.iter().filter_map(|measured| rates(&of.point, measured));
        let rates: Vec<f64> =
            rates.map(|rates| if phase == Phase::Prefill { rates.0 } else { rates.1 }).collect();
        let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        table.row([
            of.point.to_string(),
            all.count().to_string(),
            label(all.quantile(0.5)),
            label(all.quantile(0.9)),
            label(all.quantile(0.99)),
            label(all.longest()),
            slowest,
            if rates.is_empty() { "-".to_owned() } else { format!("{mean:.0}") },
        ]);
    }
    table
}

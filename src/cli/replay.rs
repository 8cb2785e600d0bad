//! `rankwise replay`: captures into the index, or out again on ports.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use rankwise::block::{Announcements, Tier};
use rankwise::capture::{
    CaptureError, CheckReport, CheckRun, ExceptionBook, Exceptions, Feed, Outcome, Truth, check,
    check_without_truth, stem,
};
use rankwise::events::order::OnLoss;
use rankwise::indexer::Config;
use serde::Serialize;

use super::Verdict;
use super::inputs::{Loading, captures};
use super::output::{print_json, print_text, short, table};
use super::republish::PublishArgs;
use super::throughput::{Stopwatch, Throughput};

/// Feed captures into an index, check them against the engines' truth, or publish them again
///
/// A capture is a file named *.kvcap or *.kvcap.gz; other files among the arguments are ignored, and of a
/// directory the captures in it are taken. Each capture gets a fresh index and one worker, named after the
/// file. Its own recorded time counts, so the result does not depend on this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise replay fixtures/captures/vllm-0.33.0-reset.kvcap
      what each rank holds in the end, and how fast it went in
  rankwise replay --check --json fixtures/captures/*
      compare every rank's contents and every probe with what the engines themselves held and found;
      exit code 0 if all is equal, 1 if not
  rankwise replay --publish --base-port 5557 --replay-base-port 5657 --speed 4 run.kvcap
      be the engine: rank N publishes on port 5557+N and answers replays on port 5657+N")]
pub struct Args {
    /// Captures, and directories with captures
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// Compare with the truth beside each capture (STEM.truth.json or STEM.truth.json.gz); without one, check that
    /// everything could be decoded, put in order and applied whole
    #[arg(long, conflicts_with = "publish")]
    check: bool,

    /// Take the exceptions to the comparison from this file, not from check.json beside each capture
    #[arg(long, value_name = "FILE", conflicts_with = "publish")]
    expect: Option<PathBuf>,

    /// Print JSON; with --publish, a line with the endpoints at once and a line with the count at the end
    #[arg(long)]
    json: bool,

    /// Whether a block that is announced twice is there twice; by default what the exceptions say, else counted
    #[arg(long, value_name = "HOW", conflicts_with = "publish")]
    announcements: Option<AnnouncementsArg>,

    /// What becomes of the blocks from before a hole that cannot be filled
    #[arg(long, value_name = "WHAT", default_value = "keep", conflicts_with = "publish")]
    on_loss: OnLossArg,

    /// Feed each capture so often, each time into a fresh index, and report the median throughput
    #[arg(
        long, value_name = "N", default_value = "1", conflicts_with = "publish",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    repeat: u32,

    #[command(flatten)]
    publish: PublishArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum AnnouncementsArg {
    /// Announced twice is announced once
    Set,
    /// Announced twice needs two removals
    Counted,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum OnLossArg {
    /// Keep them; the rank may then be credited with blocks that it no longer has
    Keep,
    /// Forget them; the rank then only misses some that it has
    Clear,
}

impl Args {
    /// Does it.
    ///
    /// # Errors
    /// Input that is missing or cannot be read.
    pub fn run(self) -> Result<Verdict> {
        let captures = captures(&self.paths)?;
        if self.publish.wanted() {
            return self.publish.run(&captures, self.json);
        }
        if self.check { self.run_check(&captures) } else { self.run_plain(&captures) }
    }

    fn run_check(&self, captures: &[PathBuf]) -> Result<Verdict> {
        let mut loading = Loading::new(captures);
        let mut reports = Vec::new();
        for path in captures {
            let truth = match Truth::beside(path) {
                Ok(truth) => Some(truth),
                // One's own recording has none, and much can be checked all the same.
                Err(CaptureError::TruthMissing { .. }) => None,
                Err(error) => return Err(error.into()),
            };
            let fed = self.feed(path, truth.as_ref(), &mut loading)?;
            reports.push(match &truth {
                Some(truth) => check(fed.outcome, truth, &fed.exceptions),
                None => check_without_truth(fed.outcome, &fed.exceptions),
            });
        }
        drop(loading);
        let run = CheckRun::new(reports);
        if self.json {
            print_json(&run)?
        } else {
            print_text(check_table(&run))?
        }
        Ok(Verdict::of(run.ok))
    }

    fn run_plain(&self, captures: &[PathBuf]) -> Result<Verdict> {
        let mut loading = Loading::new(captures);
        let mut reports = Vec::new();
        for path in captures {
            let fed = self.feed(path, None, &mut loading)?;
            reports.push(PlainReport::new(fed));
        }
        drop(loading);
        let run = PlainRun { captures: reports };
        if self.json {
            print_json(&run)?
        } else {
            print_text(plain_table(&run))?
        }
        Ok(Verdict::Ok)
    }

    /// Feeds one capture as often as asked; the last index is the result.
    fn feed(&self, path: &Path, truth: Option<&Truth>, loading: &mut Loading) -> Result<Fed> {
        let worker = stem(path);
        let exceptions = self.exceptions(path)?;
        let announcements = self.announcements(&exceptions);
        let config = Config { on_loss: self.on_loss.into(), ..Config::default() };
        let script = loading.load(path)?;
        let mut stopwatch = Stopwatch::new()?;
        let mut fed_once = || -> Result<Feed<'_>> {
            let mut feed = Feed::new(&script, &worker, announcements, config.clone())
                .with_context(|| path.display().to_string())?;
            stopwatch.run(&mut feed);
            Ok(feed)
        };
        for _ in 1..self.repeat {
            fed_once()?;
        }
        let outcome = fed_once()?.outcome(&path.display().to_string(), truth);
        let throughput = stopwatch.throughput(&outcome);
        Ok(Fed { outcome, exceptions, announcements, throughput })
    }

    fn exceptions(&self, path: &Path) -> Result<Exceptions> {
        let book = match &self.expect {
            Some(file) => ExceptionBook::load(file)?,
            None => ExceptionBook::beside(path)?,
        };
        Ok(book.of(&stem(path)))
    }

    fn announcements(&self, exceptions: &Exceptions) -> Announcements {
        match self.announcements {
            Some(AnnouncementsArg::Set) => Announcements::Set,
            Some(AnnouncementsArg::Counted) => Announcements::Counted,
            None if exceptions.announcements_are_a_set() => Announcements::Set,
            None => Announcements::Counted,
        }
    }
}

impl From<OnLossArg> for OnLoss {
    fn from(arg: OnLossArg) -> Self {
        match arg {
            OnLossArg::Keep => Self::Keep,
            OnLossArg::Clear => Self::Clear,
        }
    }
}

/// A capture that has been fed.
struct Fed {
    outcome: Outcome,
    exceptions: Exceptions,
    announcements: Announcements,
    throughput: Throughput,
}

fn check_table(run: &CheckRun) -> String {
    let ok = run.captures.iter().filter(|capture| capture.ok).count();
    let lines = run.captures.iter().map(ToString::to_string);
    let lines: Vec<String> = std::iter::once(CheckReport::table_head()).chain(lines).collect();
    let total = run.captures.len();
    let alone = run.captures.iter().filter(|capture| !capture.against_truth).count();
    let without =
        if alone > 0 { format!(" ({alone} of them have no truth to compare with)") } else { String::new() };
    format!("{}\n\n{ok} of {total} captures equal the engines' truth{without}", lines.join("\n"))
}

/// What `--json` prints without `--check`.
#[derive(Serialize)]
struct PlainRun {
    captures: Vec<PlainReport>,
}

#[derive(Serialize)]
struct PlainReport {
    file: String,
    engine: String,
    engine_version: String,
    announcements: &'static str,
    ranks: Vec<PlainRank>,
    counters: std::collections::BTreeMap<String, u64>,
    throughput: Throughput,
}

#[derive(Serialize)]
struct PlainRank {
    worker: String,
    dp_rank: u32,
    trust: &'static str,
    blocks: Blocks,
}

/// Distinct hashes per tier over all groups.
#[derive(Clone, Copy, Serialize)]
struct Blocks {
    device: usize,
    host: usize,
    disk: usize,
    other: usize,
}

impl PlainReport {
    fn new(fed: Fed) -> Self {
        let Outcome { file, engine, engine_version, worker, ranks, counters, .. } = fed.outcome;
        let ranks = ranks.into_iter().map(|(dp_rank, rank)| {
            let distinct = |tier| rank.contents.distinct(tier);
            let blocks = Blocks {
                device: distinct(Tier::Device),
                host: distinct(Tier::Host),
                disk: distinct(Tier::Disk),
                other: distinct(Tier::Other),
            };
            PlainRank { worker: worker.clone(), dp_rank: dp_rank.0, trust: rank.trust.name(), blocks }
        });
        let announcements = match fed.announcements {
            Announcements::Set => "set",
            Announcements::Counted => "counted",
        };
        let ranks = ranks.collect();
        let throughput = fed.throughput;
        Self { file, engine, engine_version, announcements, ranks, counters, throughput }
    }
}

fn plain_table(run: &PlainRun) -> String {
    let mut ranks = table(["worker", "rank", "trust", "device", "host", "disk", "other"], 3);
    let mut speed = table(["capture", "messages", "blocks", "messages/s", "blocks/s", "p50 µs", "p99 µs"], 1);
    let mut counters = table(["counter", "count"], 1);
    let mut total = std::collections::BTreeMap::<&str, u64>::new();
    for capture in &run.captures {
        for rank in &capture.ranks {
            let Blocks { device, host, disk, other } = rank.blocks;
            let numbers = [device, host, disk, other].map(|count| count.to_string());
            let names = [rank.worker.clone(), rank.dp_rank.to_string(), rank.trust.to_owned()];
            ranks.add_row(names.into_iter().chain(numbers));
        }
        let took = &capture.throughput;
        let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), short);
        speed.add_row([
            capture.ranks.first().map_or(capture.file.clone(), |rank| rank.worker.clone()),
            took.messages.to_string(),
            took.blocks.to_string(),
            rate(took.messages_per_s),
            rate(took.blocks_per_s),
            format!("{:.1}", took.message_us.p50),
            format!("{:.1}", took.message_us.p99),
        ]);
        for (name, &count) in &capture.counters {
            *total.entry(name).or_insert(0) += count;
        }
    }
    for (name, count) in total.into_iter().filter(|&(_, count)| count > 0) {
        counters.add_row([name.to_owned(), count.to_string()]);
    }
    format!("{ranks}\n\n{speed}\n\n{counters}")
}

//! `rankwise bench index`.

mod captured;
mod generated;

use std::path::PathBuf;

use anyhow::{Result, bail};
use rankwise::lab::plot::percentile_curves;
use rankwise::lab::{Latencies, Report, Table};
use serde::Serialize;
use serde_json::json;

use super::figures::{Figures, PerBlock, cores, write_report};
use crate::cli::Verdict;
use crate::cli::output::{print_json, print_text, table};

/// Measure the index: blocks going in, prompts looked up, and both at once
///
/// Without files, on made-up traffic: conversations over shared system prompts, on ranks whose caches evict as
/// vLLM's do; every kind of look-up is checked against what the ranks really hold. With captures: their frames
/// through the indexer, then the prompts that were announced in them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise bench index --html index.html
      64 ranks of 24,000 blocks each
  rankwise bench index --ranks 256 --blocks 16000 --own-names
      more ranks, each naming equal blocks in its own way, as vLLM does without a fixed hash seed
  rankwise bench index run.kvcap.gz
      your own traffic")]
pub struct Args {
    /// Captures, and directories with captures
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Made-up ranks
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// Blocks of each rank's cache
    #[arg(long, default_value_t = 24_000, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    blocks: u32,

    /// Tokens per block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    block_size: u32,

    /// Blocks stored once all caches are full [default: as many as the ranks hold, at most a million]
    #[arg(long, value_name = "BLOCKS")]
    churn: Option<u64>,

    /// Each rank names equal blocks in its own way
    #[arg(long)]
    own_names: bool,

    /// Look-ups of each kind
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    queries: u32,

    /// Times that captures are fed, each into a fresh index
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,

    /// Of everything that is left to chance
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Write a report with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Write the percentile distribution of all look-ups in HdrHistogram's text form (milliseconds)
    #[arg(long, value_name = "FILE")]
    hdr: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Measures and reports; the check has failed where an answer of the index was wrong.
    ///
    /// # Errors
    /// Captures that cannot be read, files that cannot be written.
    pub fn run(self) -> Result<Verdict> {
        let measured = match self.files.is_empty() {
            true => generated::measure(&self)?,
            false => captured::measure(&self)?,
        };
        if let Some(path) = &self.hdr {
            let mut all = Latencies::new();
            measured.queries.iter().for_each(|class| all.add(&class.latency));
            if let Err(error) = std::fs::write(path, all.percentile_text()) {
                bail!("cannot write {}: {error}", path.display());
            }
        }
        if let Some(path) = &self.html {
            write_report(path, &measured.page()?)?;
        }
        match self.json {
            true => print_json(&measured.body())?,
            false => print_text(measured.text())?,
        }
        Ok(Verdict::of(measured.wrong == 0))
    }
}

/// Everything that was measured.
struct Measured {
    /// What was done, in words and numbers.
    parameters: Vec<(&'static str, String)>,
    ingest: Vec<Ingest>,
    queries: Vec<Class>,
    size: Size,
    /// Answers that were compared with the truth, and those that were not equal to it.
    checked: u64,
    wrong: u64,
}

/// Blocks that went in.
struct Ingest {
    phase: String,
    /// Stored and removed.
    blocks: u64,
    batches: u64,
    /// Time of all of it.
    nanos: u64,
    /// Nanoseconds per block, by batch, each block counted; or per message where no block count is known.
    spread: Latencies,
    per: &'static str,
}

/// Look-ups of one kind.
struct Class {
    name: String,
    latency: Latencies,
}

/// The index in the end.
#[derive(Clone, Copy, Default, Serialize)]
struct Size {
    ranks: u64,
    distinct_blocks: u64,
    held_blocks: u64,
    bytes: u64,
}

impl Ingest {
    fn mean_ns(&self) -> Option<f64> {
        (self.blocks > 0).then(|| self.nanos as f64 / self.blocks as f64)
    }

    fn row(&self) -> Vec<String> {
        let mean = self.mean_ns().map_or_else(|| "-".to_owned(), |ns| format!("{ns:.0} ns"));
        let fixed = [self.phase.clone(), self.blocks.to_string(), self.batches.to_string(), mean];
        let figures = Figures::of(&self.spread).cells();
        fixed.into_iter().chain(figures.into_iter().skip(1)).collect()
    }
}

const INGEST_HEAD: [&str; 9] =
    ["ingest", "blocks", "batches", "mean per block", "p50", "p90", "p99", "p99.9", "max"];

fn query_head() -> Vec<&'static str> {
    ["look-up"].into_iter().chain(Figures::HEAD).collect()
}

impl Class {
    fn row(&self) -> Vec<String> {
        [self.name.clone()].into_iter().chain(Figures::of(&self.latency).cells()).collect()
    }
}

impl Measured {
    fn body(&self) -> serde_json::Value {
        let ingest: Vec<_> = self
            .ingest
            .iter()
            .map(|of| {
                json!({
                    "phase": of.phase, "blocks": of.blocks, "batches": of.batches, "per": of.per,
                    "mean_ns_per_block": of.mean_ns(), "spread": PerBlock::of(&of.spread),
                })
            })
            .collect();
        let queries: Vec<_> = self
            .queries
            .iter()
            .map(|of| json!({ "class": of.name, "latency": Figures::of(&of.latency) }))
            .collect();
        let parameters: serde_json::Map<_, _> =
            self.parameters.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into())).collect();
        json!({
            "bench": "index", "parameters": parameters, "cores": cores(), "ingest": ingest, "queries": queries,
            "index": self.size, "answers_checked": self.checked, "wrong_answers": self.wrong,
        })
    }

    fn sentences(&self) -> String {
        let Size { ranks, distinct_blocks, held_blocks, bytes } = self.size;
        let per = if held_blocks > 0 { bytes as f64 / held_blocks as f64 } else { 0.0 };
        let size = format!(
            "In the end {ranks} ranks hold {held_blocks} blocks, {distinct_blocks} different ones; the index \
             takes {:.1} MB by its own estimate, {per:.0} bytes per block of a rank.",
            bytes as f64 / 1e6
        );
        match self.checked {
            0 => size,
            checked => format!(
                "{size} {checked} answers were compared with what the ranks hold: {} wrong.",
                self.wrong
            ),
        }
    }

    fn text(&self) -> String {
        let mut ingest = table(INGEST_HEAD, 1);
        self.ingest.iter().for_each(|of| {
            ingest.add_row(of.row());
        });
        let mut queries = table(query_head(), 1);
        self.queries.iter().for_each(|of| {
            queries.add_row(of.row());
        });
        format!("{ingest}\n\n{queries}\n\n{}", self.sentences())
    }

    fn page(&self) -> Result<Report> {
        let mut report = Report::new("rankwise bench index");
        for (name, value) in &self.parameters {
            report.parameter(*name, value);
        }
        report.parameter("cores", cores()).note(self.sentences());
        let mut ingest = Table::new(INGEST_HEAD);
        self.ingest.iter().for_each(|of| {
            ingest.row(of.row());
        });
        let curves: Vec<_> = self.ingest.iter().map(|of| (of.phase.as_str(), &of.spread)).collect();
        let per = self.ingest.first().map_or("block", |of| of.per);
        report.heading("Ingest").table(ingest);
        report.plot(percentile_curves(&format!("Time per {per}, by percentile"), &curves)?);
        let mut queries = Table::new(query_head());
        self.queries.iter().for_each(|of| {
            queries.row(of.row());
        });
        let curves: Vec<_> = self.queries.iter().map(|of| (of.name.as_str(), &of.latency)).collect();
        report.heading("Look-ups").table(queries);
        for some in curves.chunks(8) {
            report.plot(percentile_curves("Latency of a look-up, by percentile", some)?);
        }
        Ok(report)
    }
}

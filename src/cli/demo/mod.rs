//! `rankwise demo`: see it work without an engine and without a GPU.

mod captures;
mod drive;
mod live;
mod report;
mod stage;
mod traffic;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};

use self::drive::{Driver, RoutingPolicy};
use self::live::Live;
use self::report::{Figures, Report};
use self::stage::{Stage, StageConfig};
use self::traffic::Traffic;
use super::output::{print_json, print_text};
use super::{Verdict, asked_to_stop, runtime};

/// See it work: no engine, no GPU, no set-up
///
/// Mock engines publish KV events on real ports, the service subscribes, asks them for their load and answers over
/// HTTP, and conversations with shared system prompts are sent where it says; all in this process. The same
/// traffic, from the same seed and at the same times, is sent round robin, to the rank with the fewest requests of
/// ours in flight, and KV-aware (POST /select_and_reserve), each time to a fresh fleet. Shown is what the engines
/// answered: the share of prompt tokens that were cached, and the time to the first token, routing included.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise demo
      two workers of four ranks; shows the ranks as they work, then the comparison, and stays up to be asked
  rankwise demo --once --json
      for scripts: `kv_aware`, `round_robin` and `least_load`, each with `hit_rate` (0 to 1), `ttft_p50` and
      `ttft_p99` (milliseconds) and `picks`; exit code 1 if a request failed or KV-aware has the lower hit rate
  rankwise demo --captures
      captured streams of real engines instead: every answer beside the engines' own look-up")]
pub struct Args {
    /// End when the result is shown
    #[arg(long)]
    once: bool,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    /// Seconds in which conversations arrive, per policy
    #[arg(long, value_name = "SECONDS", default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,

    /// Workers
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    workers: u32,

    /// Data-parallel ranks of each worker
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=16))]
    ranks: u32,

    /// What the traffic is drawn from
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,

    /// Publish captures of real engines instead: these, or all in these directories [default: four of
    /// fixtures/captures]
    #[arg(long, value_name = "PATH", num_args = 0.., conflicts_with_all = ["seconds", "workers", "ranks", "seed"])]
    captures: Option<Vec<PathBuf>>,

    /// Address and port for HTTP; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    listen: String,
}

/// How long answers may still take when no more requests are sent; a loaded machine may take a while.
const PATIENCE: Duration = Duration::from_secs(60);

/// How often the ranks are shown on a terminal; in lines, only each fifth time.
const LOOK: Duration = Duration::from_millis(200);

impl Args {
    /// Shows it.
    ///
    /// # Errors
    /// Ports that cannot be bound, captures that cannot be read, engines or streams that do not answer.
    pub fn run(self) -> Result<Verdict> {
        match &self.captures {
            Some(paths) => captures::run(paths, &self),
            None => runtime()?.block_on(self.compare()),
        }
    }

    async fn compare(&self) -> Result<Verdict> {
        let length = Duration::from_secs(self.seconds);
        let traffic = Traffic::plan(self.seed, self.workers * self.ranks, length);
        let mut report = Report::new(self.seed, self.seconds, self.workers, self.ranks);
        let mut last = None;
        // The KV-aware one comes last, so that its service is the one that stays.
        for policy in [RoutingPolicy::RoundRobin, RoutingPolicy::LeastLoad, RoutingPolicy::KvAware] {
            if let Some(stage) = last.take() {
                Stage::close(stage).await?;
            }
            let stage = Stage::start(&self.stage_config()).await?;
            report.add(policy, self.drive(&stage, policy, &traffic).await?);
            last = Some(stage);
        }
        let Some(stage) = last else { return Ok(Verdict::Failed) };
        let address = stage.address();
        match self.json {
            true => print_json(&report.json(json!({ "address": address.to_string() })))?,
            false => print_text(report.text())?,
        }
        if !self.once {
            if !self.json {
                print_text(format!(
                    "\nStill up: http://{address} (try GET /workers, /loads, /metrics, POST /select). Ctrl-C ends it."
                ))?;
            }
            asked_to_stop().await;
        }
        stage.close().await?;
        Ok(Verdict::of(report.is_ok()))
    }

    fn stage_config(&self) -> StageConfig<'_> {
        StageConfig { workers: self.workers, ranks: self.ranks, seed: self.seed, listen: &self.listen }
    }

    /// Sends the traffic, and shows the ranks meanwhile.
    async fn drive(&self, stage: &Stage, policy: RoutingPolicy, traffic: &Traffic) -> Result<Figures> {
        let driver = Driver::new(stage, policy)?;
        let mut live = Live::new(self.json);
        let start = Instant::now();
        let mut conversations = JoinSet::new();
        for conversation in &traffic.conversations {
            conversations.spawn(driver.clone().converse(conversation.clone(), start));
        }
        let mut looks = interval(LOOK);
        let limit = Duration::from_secs(self.seconds) + PATIENCE;
        let all = async {
            loop {
                tokio::select! {
                    ended = conversations.join_next() => match ended {
                        None => return Ok(()),
                        Some(ended) => ended.context("a conversation has ended badly")?,
                    },
                    _ = looks.tick() => live.show(policy, start.elapsed(), stage, driver.tally())?,
                }
            }
        };
        let ended: Result<()> = timeout(limit, all)
            .await
            .with_context(|| format!("not every request was answered {PATIENCE:?} after the last one"))?;
        ended?;
        live.end();
        Ok(driver.tally().figures())
    }
}

//! `rankwise bench ranks`.

mod plan;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use rankwise::ids::DpRank;
use rankwise::lab::plot::duration_label;
use rankwise::lab::ranks::grid::Phase;
use rankwise::lab::ranks::lockstep::{Broken, Claim, MAX_RANKS, Outcome, Step};
use rankwise::lab::ranks::measured::{Measured, Recorded};
use rankwise::lab::ranks::message::Limits;
use rankwise::lab::ranks::report;
use rankwise::lab::ranks::socket::{Meeting, RankEnded, alone, spawn_rank, take_part};
use serde_json::json;
use tokio::process::Command;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use self::plan::{CapacityArgs, EngineArgs, GridArgs, Plan};
use crate::cli::output::{print_json, print_text, table};
use crate::cli::republish::seconds;
use crate::cli::{Verdict, runtime};

/// Measure the ranks of one deployment together, in lockstep
///
/// Ranks of a data-parallel deployment wait for each other in every step, so a rank's latency means something
/// only while all of them do the same thing. Each rank states what it can take: its capacity envelope. The
/// smallest of each number is what all can take, and of that (and of the points that were named) each rank makes the same grid of prefill
/// points (prompt length x prompts at once) and decode points (context x sequences at once). The grids' digests
/// and counts are compared before the warm-up. Then a point begins when the one before it has ended on every
/// rank.
///
/// Every wait has a limit. A rank that dies, hangs, is late, has another grid or states nonsense ends the bench
/// for all, with an error that names it and the values; --drill shows what that looks like.
///
/// Exit codes: 0 done, 1 the bench has failed, 2 wrong usage.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Ranks that are started here, each a thread; one alone opens no socket
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    ranks: u32,

    /// Give each rank but the first a process of its own
    #[arg(long)]
    spawn: bool,

    /// Be this rank only; the others are started by hand, here or on other hosts
    #[arg(long, value_name = "I", requires_all = ["of", "coordinator"], conflicts_with_all = ["ranks", "spawn"])]
    rank: Option<u32>,

    /// How many ranks there are in all
    #[arg(long, value_name = "N", requires = "rank",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_RANKS)))]
    of: Option<u32>,

    /// Where rank 0 listens and the others dial: tcp://HOST:PORT. The port is not encrypted and trusts whoever
    /// reaches it: keep it on a private network
    #[arg(long, value_name = "ENDPOINT")]
    coordinator: Option<String>,

    #[command(flatten)]
    capacity: CapacityArgs,

    #[command(flatten)]
    grid: GridArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// Seconds until every rank must have joined
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = limit, help_heading = "Limits")]
    join_limit: Duration,

    /// Seconds for an answer that needs no engine
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = limit, help_heading = "Limits")]
    answer_limit: Duration,

    /// Seconds for the warm-up, and for each point
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = limit, help_heading = "Limits")]
    point_limit: Duration,

    /// Print the results as JSON
    #[arg(long, help_heading = "Results")]
    json: bool,

    /// Write the results as JSON to this file
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    out: Option<PathBuf>,

    /// Write the results as a page, with latency curves, to this file
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    html: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  rankwise bench ranks --ranks 8 --uneven --html ranks.html
      Eight ranks that can take different amounts, each with a mock engine of that size.
  rankwise bench ranks --ranks 4 --engine http://10.0.0.5:8000 --max-num-running-reqs 256 \\
          --max-num-scheduled-tokens 8192
      One vLLM with four data-parallel ranks: each rank of the bench is pinned to one of the engine's.
      vLLM tells the length and the blocks; what it does not tell is given.
  rankwise bench ranks --ranks 2 --engine http://a:30000@0 --engine http://b:30000@0
      One rank of each of two engines.
  rankwise bench ranks --rank 0 --of 2 --coordinator tcp://10.0.0.5:5700 --engine http://127.0.0.1:8000
  rankwise bench ranks --rank 1 --of 2 --coordinator tcp://10.0.0.5:5700 --engine http://127.0.0.1:8000
      Two hosts. Rank 0 holds the coordinator and prints the results; the order of starting does not matter.
  rankwise bench ranks --ranks 4 --prefill-points 128,511x2 --decode-points none
      Two lengths of prompt and no decode; the second with two prompts at once.
  rankwise bench ranks --ranks 4 --drill 2=other-grid
      What it says when rank 2 has another grid.";

/// A limit in seconds, which must leave some time and end some day.
fn limit(text: &str) -> Result<Duration, String> {
    const MOST: Duration = Duration::from_secs(86_400);
    let limit = seconds(text)?;
    let sound = limit >= Duration::from_millis(10) && limit <= MOST;
    if sound { Ok(limit) } else { Err("between 0.01 seconds and a day is wanted".to_owned()) }
}

impl Args {
    /// Measures and reports.
    ///
    /// # Errors
    /// Wrong usage, an engine that does not answer, files that cannot be written.
    pub fn run(self) -> Result<Verdict> {
        let runtime = runtime()?;
        let ended = runtime.block_on(self.bench());
        // A rank that hangs must not hold the program.
        runtime.shutdown_background();
        ended
    }

    fn limits(&self) -> Limits {
        Limits { join: self.join_limit, answer: self.answer_limit, point: self.point_limit }
    }

    async fn bench(self) -> Result<Verdict> {
        let of = self.of.unwrap_or(self.ranks);
        if let Some(rank) = self.rank
            && rank >= of
        {
            bail!("--rank {rank} is none of {of} ranks: they are counted from 0");
        }
        let plan = Plan::new(&self.capacity, self.grid.choice(), &self.engine, of, self.rank.is_some())?;
        let outcome = match self.rank {
            None if of == 1 => self.alone(&plan).await?,
            None if self.spawn => self.processes(&plan, of).await?,
            None => self.threads(&plan, of).await?,
            Some(0) => self.first(&plan, of).await?,
            Some(rank) => return self.other(&plan, DpRank(rank), of).await,
        };
        self.report(&plan, outcome)
    }

    async fn alone(&self, plan: &Plan) -> Result<Result<Outcome, Broken>> {
        let rank = plan.rank(DpRank(0)).await?;
        if rank.drill.is_some() {
            bail!("a rank alone has nobody to see its drill: use --ranks");
        }
        let mut runner = rank.runner().await?;
        let bar = bar();
        Ok(alone(rank.claim, self.limits(), &mut runner, |step| show(&bar, step)).await)
    }

    /// All ranks here, as threads.
    async fn threads(&self, plan: &Plan, of: u32) -> Result<Result<Outcome, Broken>> {
        let meeting = self.meeting().await?;
        let (ends, ended) = mpsc::unbounded_channel();
        for rank in (0..of).map(DpRank) {
            self.thread(plan, rank, &meeting, &ends).await?;
        }
        let bar = bar();
        Ok(meeting.coordinate(of, self.grid.choice(), self.limits(), ended, |step| show(&bar, step)).await)
    }

    /// Rank 0 here, the others started by hand.
    async fn first(&self, plan: &Plan, of: u32) -> Result<Result<Outcome, Broken>> {
        let meeting = self.meeting().await?;
        let (ends, ended) = mpsc::unbounded_channel();
        self.thread(plan, DpRank(0), &meeting, &ends).await?;
        let bar = bar();
        Ok(meeting.coordinate(of, self.grid.choice(), self.limits(), ended, |step| show(&bar, step)).await)
    }

    /// Rank 0 here, the others as processes that are ours.
    async fn processes(&self, plan: &Plan, of: u32) -> Result<Result<Outcome, Broken>> {
        let meeting = self.meeting().await?;
        let (ends, ended) = mpsc::unbounded_channel();
        self.thread(plan, DpRank(0), &meeting, &ends).await?;
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut children = JoinSet::new();
        for rank in (1..of).map(DpRank) {
            let planned = plan.rank(rank).await?;
            let mut command = Command::new(&program);
            command.args(["bench", "ranks", "--coordinator", meeting.endpoint()]);
            command.arg("--rank").arg(rank.to_string()).arg("--of").arg(of.to_string());
            command.args(planned.arguments()).args(self.limit_arguments());
            // Its error, if it has one, comes to us over the port; what it can tell only there is shown.
            command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
            let mut child = command.spawn().context("cannot start a process for a rank")?;
            let ends = ends.clone();
            children.spawn(async move {
                let how = match child.wait().await {
                    Ok(status) => format!("its process has ended with {status}"),
                    Err(error) => format!("its process is lost: {error}"),
                };
                // Nobody listens any more once the bench is over.
                let _ = ends.send(RankEnded { rank, how });
            });
        }
        let bar = bar();
        let outcome =
            meeting.coordinate(of, self.grid.choice(), self.limits(), ended, |step| show(&bar, step)).await;
        // A rank that hangs would outlive us, and keep our standard error open for whoever reads it to its end.
        children.shutdown().await;
        Ok(outcome)
    }

    /// One rank, whose coordinator is elsewhere.
    async fn other(&self, plan: &Plan, rank: DpRank, of: u32) -> Result<Verdict> {
        let planned = plan.rank(rank).await?;
        let mut runner = planned.runner().await?;
        let claim = Claim { rank, of, ..planned.claim };
        let coordinator = self.coordinator.clone().unwrap_or_default();
        match take_part(&coordinator, claim, self.limits(), &mut runner, planned.drill).await {
            Ok(()) => Ok(Verdict::Ok),
            Err(broken) => self.failed(&broken),
        }
    }

    async fn meeting(&self) -> Result<Meeting> {
        let endpoint = self.coordinator.as_deref().unwrap_or("tcp://127.0.0.1:0");
        Ok(Meeting::bind(endpoint).await?)
    }

    async fn thread(
        &self,
        plan: &Plan,
        rank: DpRank,
        meeting: &Meeting,
        ends: &mpsc::UnboundedSender<RankEnded>,
    ) -> Result<()> {
        let planned = plan.rank(rank).await?;
        let endpoint = meeting.endpoint().to_owned();
        let (claim, drill) = (planned.claim.clone(), planned.drill);
        // On this runtime, so that a mock engine does not share the thread of whoever measures it.
        let runner = planned.runner().await?;
        let make = move || Ok::<_, std::convert::Infallible>(runner);
        spawn_rank(endpoint, claim, self.limits(), drill, make, ends.clone())
            .context("cannot start a thread for a rank")
    }

    fn limit_arguments(&self) -> Vec<String> {
        let Limits { join, answer, point } = self.limits();
        [("--join-limit", join), ("--answer-limit", answer), ("--point-limit", point)]
            .into_iter()
            .flat_map(|(name, limit)| [name.to_owned(), limit.as_secs_f64().to_string()])
            .collect()
    }

    fn report(&self, plan: &Plan, outcome: Result<Outcome, Broken>) -> Result<Verdict> {
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(broken) => return self.failed(&broken),
        };
        let runner = plan.runs_on();
        let value = report::json(&outcome, &runner);
        if let Some(path) = &self.out {
            write(path, &format!("{value}\n"))?;
        }
        if let Some(path) = &self.html {
            write(path, &report::page(&outcome, &runner)?)?;
        }
        match self.json {
            true => print_json(&value)?,
            false => print_text(text(&outcome, &runner))?,
        }
        Ok(Verdict::Ok)
    }

    fn failed(&self, broken: &Broken) -> Result<Verdict> {
        if self.json {
            print_json(&json!({ "ok": false, "error": broken.to_string() }))?;
        }
        // A closed stderr must not turn 1 into a panic's 101.
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("rankwise: {broken}\n"));
        Ok(Verdict::Failed)
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A bar over the points; shows itself on stderr if that is a terminal.
fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {pos} of {len} points {elapsed:>4}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

fn show(bar: &ProgressBar, step: Step) {
    tracing::info!(%step, "the ranks go on");
    if let Step::Point { index, of, point } = step {
        bar.set_length(of.into());
        bar.set_position(index.into());
        bar.set_message(point.to_string());
    } else {
        bar.set_message(step.to_string());
    }
}

fn text(outcome: &Outcome, runner: &str) -> String {
    let mut lines = table(["", "samples", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99"], 1);
    for of in &outcome.points {
        let together = |kind: fn(&Measured) -> &Recorded| Recorded::merged(of.ranks.iter().map(kind));
        let (ttft, itl, e2e) = (together(|of| &of.ttft), together(|of| &of.itl), together(|of| &of.e2e));
        let samples = if of.point.phase == Phase::Prefill { ttft.count() } else { itl.count() };
        let mut cells = vec![of.point.to_string(), samples.to_string()];
        for recorded in [&ttft, &itl, &e2e] {
            cells.extend([0.5, 0.99].map(|quantile| {
                let latency = recorded.quantile(quantile);
                latency.map_or_else(|| "-".to_owned(), |latency| duration_label(latency.as_nanos() as f64))
            }));
        }
        lines.add_row(cells);
    }
    let ranks = match outcome.envelopes.len() {
        1 => "One rank".to_owned(),
        count => format!("{count} ranks"),
    };
    let mut text = format!(
        "{ranks} on {runner}.\ncommon: {}\ngrid: {}\n\n{lines}",
        outcome.common,
        outcome.grid.summary()
    );
    if outcome.foreign > 0 {
        text.push_str(&format!("\n\n{} messages on the port were not of this bench.", outcome.foreign));
    }
    text
}

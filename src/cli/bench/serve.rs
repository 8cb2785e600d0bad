//! `rankwise bench serve`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rankwise::block::{BlockSize, SequenceHash};
use rankwise::ingest::NodeConfig;
use rankwise::lab::Arrivals;
use rankwise::lab::search::{RateSearch, SearchConfig};
use rankwise::lab::traffic::{Block, Traffic, TrafficConfig};
use rankwise::routing::RouterConfig;
use rankwise::service::ServiceConfig;
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use super::figures::write_report;
use super::fleet::{Fleet, MODEL};
use super::load::{self, Outcome};
use super::serve_report::{LoadReport, VisibleReport};
use super::target::{Prepared, Target};
use super::visible;
use crate::cli::output::{print_json, print_text};
use crate::cli::running::Running;
use crate::cli::{Verdict, runtime};

/// Load a service in an open loop, or time events until they are visible
///
/// Requests are sent when they are due, and latency counts from then: a service that stalls pays for everyone
/// who would have asked meanwhile. Without --qps the highest rate is searched that is kept up: 99 % of the
/// requests answered within --p99-limit, counting those that never were. Without --url a service is started in
/// this process, on real ports, with made-up ranks that publish over real ZMQ sockets.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise bench serve --what select --html select.html
      the highest rate of POST /select that is kept up here, and the latencies on the way
  rankwise bench serve --url http://10.0.0.9:8090 --ranks 64 --what query --qps 500 --seconds 30
      a running service; 64 made-up ranks are declared there and withdrawn at the end
  rankwise bench serve --event-to-visible --ranks 128 --rate 250
      from a publisher's send to the first query that sees the block")]
pub struct Args {
    /// A running service [default: one in this process]
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// What is asked
    #[arg(long, value_enum, default_value = "select")]
    what: What,

    /// How prompts are sent: as tokens, or as the hashes of their blocks
    #[arg(long, value_enum, default_value = "tokens")]
    form: Form,

    /// Requests per second [default: searched]
    #[arg(long, value_name = "RATE", value_parser = rate)]
    qps: Option<f64>,

    /// Seconds per rate
    #[arg(long, default_value = "5", value_parser = seconds)]
    seconds: Duration,

    /// Connections; a request that finds none free waits, and its wait counts
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=4096))]
    connections: u16,

    /// Answered later is not in time
    #[arg(long, value_name = "DURATION", default_value = "5ms", value_parser = duration)]
    p99_limit: Duration,

    /// The first rate of the search
    #[arg(long, value_name = "RATE", default_value = "200", value_parser = rate)]
    start_qps: f64,

    /// Requests at equal distances instead of at chance ones
    #[arg(long)]
    even: bool,

    /// Made-up ranks
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,

    /// Blocks of each rank's cache
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(64..=1_000_000))]
    blocks: u32,

    /// Tokens per block
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    block_size: u32,

    /// Messages per second that each rank publishes meanwhile [default: 0; 250 with --event-to-visible]
    #[arg(long, value_name = "RATE", value_parser = rate_or_none)]
    rate: Option<f64>,

    /// Where the made-up ranks publish: an address that the service can reach
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    publish_host: String,

    /// Measure the time from a publisher's send to the first query that sees the block
    #[arg(long, conflicts_with_all = ["what", "form", "qps", "connections", "p99_limit", "start_qps", "even"])]
    event_to_visible: bool,

    /// Microseconds between two looks for a block, its sleep's own inaccuracy apart
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 20, requires = "event_to_visible")]
    look_every: u64,

    /// Messages per second whose block is watched for over HTTP; each is a loop of queries
    #[arg(long, value_name = "RATE", default_value = "50", value_parser = rate_or_none, requires = "event_to_visible")]
    http_watched: f64,

    /// Of everything that is left to chance
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Write the percentile distribution in HdrHistogram's text form (milliseconds)
    #[arg(long, value_name = "FILE")]
    hdr: Option<PathBuf>,

    /// Write a report with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is asked of the service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum What {
    /// POST /query: who holds this prompt?
    Query,
    /// POST /select: which rank should serve it, and why?
    Select,
    /// GET /health: what this client and HTTP alone can do here
    Health,
}

/// How a prompt is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Form {
    /// Its token ids
    Tokens,
    /// The local and sequence hashes of its blocks
    Hashes,
}

/// A request overdue by a second is not sent any more while the highest rate is searched.
const ABANDON: Duration = Duration::from_secs(1);

/// Where nothing is searched, everything is sent that can be sent within reason.
const NEVER: Duration = Duration::from_secs(60);

/// Different prompts that are asked in turn, and the bytes that they may take.
const PROMPTS: usize = 512;
const MAX_PROMPT_BYTES: usize = 64 << 20;

/// Blocks watched for per second by a reader in this process.
const WATCHED: f64 = 500.0;

impl Args {
    /// Measures and reports.
    ///
    /// # Errors
    /// A service that cannot be started or reached, ports that cannot be bound, files that cannot be written.
    pub fn run(self) -> Result<Verdict> {
        let mut stage = Stage::set(&self)?;
        let verdict = match self.event_to_visible {
            true => self.time_events(&mut stage),
            false => self.load(&mut stage),
        };
        stage.close()?;
        verdict
    }

    fn traffic(&self) -> Result<TrafficConfig> {
        let block_size = BlockSize::new(self.block_size).context("a block has at least one token")?;
        Ok(TrafficConfig { seed: self.seed, ..TrafficConfig::new(self.ranks, self.blocks, block_size) })
    }

    /// Messages per second that each rank publishes.
    fn rate(&self) -> f64 {
        self.rate.unwrap_or(if self.event_to_visible { 250.0 } else { 0.0 })
    }

    // === load ===

    fn load(&self, stage: &mut Stage) -> Result<Verdict> {
        let requests = self.requests(stage)?;
        let stop = Arc::new(AtomicBool::new(false));
        let Stage { client, publishing, fleet, service, .. } = stage;
        let handle = publishing.handle();
        let (runs, published) = std::thread::scope(|scope| {
            let flag = Arc::clone(&stop);
            let rate = self.rate();
            let background = scope.spawn(move || match fleet {
                Some(fleet) => visible::publish_until(fleet, handle, rate, &flag),
                None => Ok(0),
            });
            let runs = match self.qps {
                Some(qps) => {
                    self.at(client, service, &requests, qps, NEVER).map(|run| (Vec::new(), Some(run)))
                }
                None => self.search(client, service, &requests),
            };
            stop.store(true, Ordering::Relaxed);
            (runs, background.join())
        });
        let (trials, run) = runs?;
        let published = published.ok().context("the publishing thread has ended badly")??;
        let report = LoadReport { args: self, requests: &requests, trials, run, published };
        if let (Some(path), Some(run)) = (&self.hdr, &report.run) {
            let text = run.latency.percentile_text();
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if let Some(path) = &self.html {
            write_report(path, &report.page()?)?;
        }
        match self.json {
            true => print_json(&report.body())?,
            false => print_text(report.text())?,
        }
        let failed = report.trials.iter().chain(&report.run).any(|run| run.failed > 0);
        Ok(Verdict::of(report.run.is_some() && !failed))
    }

    /// Trials up to the end of the search, and a run at half the rate that was found.
    fn search(
        &self,
        client: &Runtime,
        service: &Target,
        requests: &Arc<[Prepared]>,
    ) -> Result<(Vec<Outcome>, Option<Outcome>)> {
        let mut search = RateSearch::new(SearchConfig { start: self.start_qps, ..SearchConfig::default() });
        // Connections, buffers and caches are warm when the first trial counts.
        self.at(client, service, requests, self.start_qps, ABANDON)?;
        let mut trials = Vec::new();
        while let Some(rate) = search.next_rate() {
            let trial = self.at(client, service, requests, rate, ABANDON)?;
            tracing::debug!(rate, share = trial.trial().share(), "tried");
            search.told(trial.trial().kept_up());
            trials.push(trial);
        }
        let half = search.best().map(|best| self.at(client, service, requests, best / 2.0, ABANDON));
        Ok((trials, half.transpose()?))
    }

    fn at(
        &self,
        client: &Runtime,
        service: &Target,
        requests: &Arc<[Prepared]>,
        rate: f64,
        abandon: Duration,
    ) -> Result<Outcome> {
        let arrivals = if self.even { Arrivals::Even } else { Arrivals::Poisson { seed: self.seed } };
        let connections = usize::from(self.connections);
        let plan =
            load::Plan { rate, during: self.seconds, arrivals, connections, limit: self.p99_limit, abandon };
        client.block_on(load::run(service, requests, plan))
    }

    fn requests(&self, stage: &mut Stage) -> Result<Arc<[Prepared]>> {
        let route = match self.what {
            What::Health => return Ok([stage.service.prepared("/health", None)].into()),
            What::Query if self.form == Form::Hashes => "/query_by_hash",
            What::Query => "/query",
            What::Select => "/select",
        };
        let mut requests = Vec::new();
        let mut bytes = 0;
        while requests.len() < PROMPTS && bytes < MAX_PROMPT_BYTES {
            let Some(fleet) = &mut stage.fleet else { bail!("there is no traffic to take prompts from") };
            let prompt = fleet.traffic().prompt();
            let body = self.body(fleet.traffic(), &prompt).to_string().into_bytes();
            bytes += body.len();
            requests.push(stage.service.prepared(route, Some(body)));
        }
        Ok(requests.into())
    }

    fn body(&self, traffic: &Traffic, prompt: &[Block]) -> serde_json::Value {
        match self.form {
            Form::Tokens => {
                let mut tokens = Vec::new();
                traffic.tokens(prompt.iter().map(|block| block.content), &mut tokens);
                json!({ "model_name": MODEL, "token_ids": tokens })
            }
            Form::Hashes => {
                let locals = traffic.locals(prompt);
                let sequences: Vec<u64> = SequenceHash::chain(&locals).map(|hash| hash.0).collect();
                let locals: Vec<u64> = locals.into_iter().map(|hash| hash.0).collect();
                match self.what {
                    What::Select => json!({
                        "model_name": MODEL, "block_hashes": locals, "sequence_hashes": sequences,
                        "isl_tokens": prompt.len() * self.block_size as usize,
                    }),
                    _ => json!({ "model_name": MODEL, "block_hashes": locals, "seq_hashes": sequences }),
                }
            }
        }
    }

    // === events ===

    fn time_events(&self, stage: &mut Stage) -> Result<Verdict> {
        let plan = visible::Plan {
            rate: self.rate(),
            during: self.seconds,
            watched: WATCHED,
            watched_http: self.http_watched,
            look_every: Duration::from_micros(self.look_every),
        };
        let Stage { client, publishing, fleet, service, running, .. } = stage;
        let Some(fleet) = fleet else { bail!("there are no ranks to publish") };
        let view = running.as_ref().map(Running::view);
        let handles = (publishing.handle(), client.handle());
        // Sockets and buffers are warm when it counts.
        let warm_up = visible::Plan { during: Duration::from_secs(1).min(self.seconds), ..plan };
        visible::run(fleet, view, service, handles, warm_up)?;
        let outcome = visible::run(fleet, view, service, handles, plan)?;
        let report = VisibleReport { args: self, rate: self.rate(), outcome };
        if let Some(path) = &self.hdr {
            let text = report.main().percentile_text();
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if let Some(path) = &self.html {
            write_report(path, &report.page()?)?;
        }
        match self.json {
            true => print_json(&report.body())?,
            false => print_text(report.text())?,
        }
        Ok(Verdict::of(report.outcome.unseen == 0 && report.main().count() > 0))
    }
}

// What the report tells of the arguments.
impl Args {
    /// The parameters of the fleet and the service, by name.
    pub fn fleet_parameters(&self) -> serde_json::Map<String, serde_json::Value> {
        let service = self.url.as_deref().unwrap_or("in this process");
        let all = json!({
            "service": service, "ranks": self.ranks, "blocks_per_rank": self.blocks,
            "block_size": self.block_size, "messages_per_s_and_rank": self.rate(),
            "seconds": self.seconds.as_secs_f64(), "cores": super::figures::cores(), "seed": self.seed,
        });
        all.as_object().cloned().unwrap_or_default()
    }

    /// What is asked, and how.
    pub fn load_parameters(&self) -> serde_json::Map<String, serde_json::Value> {
        let name = |value: &dyn Fn() -> Option<clap::builder::PossibleValue>| {
            value().map_or_else(String::new, |value| value.get_name().to_owned())
        };
        let mut all = json!({
            "what": name(&|| self.what.to_possible_value()),
            "form": name(&|| self.form.to_possible_value()),
            "connections": self.connections, "p99_limit_ms": self.p99_limit.as_secs_f64() * 1e3,
            "arrivals": if self.even { "even" } else { "poisson" },
        })
        .as_object()
        .cloned()
        .unwrap_or_default();
        all.extend(self.fleet_parameters());
        all
    }

    /// The limit that the highest rate is searched under.
    pub fn limit(&self) -> Duration {
        self.p99_limit
    }

    /// Made-up ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Whether the highest rate was searched.
    pub fn searches(&self) -> bool {
        self.qps.is_none()
    }
}

// === the stage ===

/// Everything that runs, each on threads of its own: the service, its clients, and the publishers.
struct Stage {
    serving: Runtime,
    client: Runtime,
    publishing: Runtime,
    running: Option<Running>,
    service: Target,
    /// What is asked needs no ranks in some cases.
    fleet: Option<Fleet>,
    loads: Option<tokio::task::JoinHandle<()>>,
}

impl Stage {
    fn set(args: &Args) -> Result<Self> {
        let serving = runtime()?;
        let client = one_thread("rankwise-client")?;
        let publishing = one_thread("rankwise-fleet")?;
        let running = match &args.url {
            Some(_) => None,
            None => {
                let config = ServiceConfig { seed: Some(args.seed), ..ServiceConfig::default() };
                let (node, router) = (NodeConfig::default(), RouterConfig::default());
                Some(serving.block_on(Running::start("127.0.0.1:0", node, router, config))?)
            }
        };
        let base = match (&args.url, &running) {
            (Some(url), _) => url.clone(),
            (None, Some(running)) => format!("http://{}", running.address()),
            (None, None) => bail!("there is no service to load"),
        };
        let service = Target::new(&base, usize::from(args.connections))?;
        let mut stage = Self { serving, client, publishing, running, service, fleet: None, loads: None };
        let needs_fleet = args.event_to_visible || args.what != What::Health;
        if needs_fleet && let Err(error) = stage.add_fleet(args) {
            // What was declared at a running service must not stay there.
            let _ = stage.close();
            return Err(error);
        }
        Ok(stage)
    }

    /// Ranks that are declared, listened to and full.
    fn add_fleet(&mut self, args: &Args) -> Result<()> {
        let Self { client, publishing, service, .. } = self;
        let bound = publishing.block_on(Fleet::bind(args.traffic()?, &args.publish_host))?;
        let fleet = self.fleet.insert(bound);
        client.block_on(fleet.register(service))?;
        publishing.block_on(fleet.fill())?;
        client.block_on(fleet.settled(service))?;
        client.block_on(fleet.report_loads(service))?;
        self.loads = Some(client.spawn(keep_reporting(service.clone(), fleet.load_reports())));
        Ok(())
    }

    fn close(self) -> Result<()> {
        if let Some(loads) = self.loads {
            loads.abort();
        }
        if let Some(fleet) = self.fleet {
            self.client.block_on(fleet.close(&self.service));
        }
        // The connections that it keeps would hold up the service's end.
        drop(self.service);
        self.client.shutdown_background();
        self.publishing.shutdown_background();
        match self.running {
            Some(running) => self.serving.block_on(async {
                /// Requests that are late; nobody waits for their answers any more.
                const DRAIN: Duration = Duration::from_secs(2);
                match tokio::time::timeout(DRAIN, running.stop()).await {
                    Ok(stopped) => stopped,
                    Err(_) => Ok(()),
                }
            }),
            None => Ok(()),
        }
    }
}

/// One thread: the client and the publishers must not take both cores from what they measure.
fn one_thread(name: &str) -> Result<Runtime> {
    let runtime = Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build();
    runtime.context("cannot start a runtime")
}

/// Repeats the load reports, so that they stay fresh: without one a rank's load is unknown after 15 s.
async fn keep_reporting(service: Target, reports: Vec<serde_json::Value>) {
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        for report in &reports {
            // One that is missed is made good by the next.
            let _ = service.post::<serde_json::Value>("/loads", report).await;
        }
    }
}

// === reading arguments ===

fn seconds(text: &str) -> Result<Duration, String> {
    /// An hour at a rate is more than anyone waits for.
    const LONGEST: f64 = 3_600.0;
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= LONGEST => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("{text:?} is no number of seconds from above 0 to {LONGEST}")),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    rate_or_none(text).ok().filter(|rate| *rate > 0.0).ok_or_else(|| format!("{text:?} is no rate above 0"))
}

fn rate_or_none(text: &str) -> Result<f64, String> {
    /// No machine sends or answers so much: a schedule of it would only fill the memory.
    const HIGHEST: f64 = 1e6;
    match text.parse::<f64>() {
        Ok(rate) if (0.0..=HIGHEST).contains(&rate) => Ok(rate),
        _ => Err(format!("{text:?} is no rate from 0 to {HIGHEST} per second")),
    }
}

/// `5ms`, `800us`, `1.5s`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration such as 5ms, 800us or 1.5s");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
    let number: f64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit = match &text[digits..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(number * unit).ok().filter(|of| !of.is_zero()).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn durations_are_read_with_their_unit() {
        assert_eq!(duration("5ms").unwrap(), Duration::from_millis(5));
        assert_eq!(duration("800us").unwrap(), Duration::from_micros(800));
        assert_eq!(duration("1.5s").unwrap(), Duration::from_millis(1_500));
        for wrong in ["5", "ms", "0ms", "5m", "-1s", "1e9s", ""] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn seconds_are_bounded() {
        assert_eq!(seconds("0.5").unwrap(), Duration::from_millis(500));
        for wrong in ["0", "-1", "nan", "inf", "4000", "x"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}

//! `rankwise serve`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rankwise::fleet::WorkerSpec;
use rankwise::ingest::{DriverConfig, NodeConfig};
use tokio::time::{sleep, timeout};
use tracing::{error, info, warn};

use super::config::{ConfigFile, worker_flag};
use super::descriptors::Descriptors;
use super::output::{print_json, print_text};
use super::running::Running;
use super::{Signals, Verdict, runtime_of};

/// How long answers that have begun may take once we are asked to stop.
const DRAIN: Duration = Duration::from_secs(10);

/// How often it is looked whether the indexing thread still runs: it should never end, so a little late is fine.
const LOOK: Duration = Duration::from_millis(100);

/// How long a service whose view no longer moves goes on saying so before the process ends: what balances traffic
/// asks `/health` every few seconds and should hear it rather than a refused connection.
const FAREWELL: Duration = Duration::from_secs(5);

/// Where HTTP is served unless it is said otherwise: this host only, on the field's own port.
const DEFAULT_LISTEN: &str = "127.0.0.1:8090";

/// Listen to engines, keep the index, and answer routers over HTTP
///
/// Workers come from the configuration, from --worker, and at any time over HTTP (POST /workers, /register).
/// Ask with POST /query (who holds this prompt?) and POST /select (which rank should serve it, and why?).
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise serve --worker id=w1,model=llama,block_size=16,ranks=0-3,events=tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5657
      one vLLM deployment of four ranks: rank N publishes on port 5557+N, answers replays on 5657+N
  rankwise serve --config rankwise.toml --listen 0.0.0.0:8090
      a fleet from a file (scripts/rankwise.example.toml is a commented one)")]
pub struct Args {
    /// Settings and workers, as TOML
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Address and port for HTTP; port 0 takes a free one [default: 127.0.0.1:8090]
    #[arg(long, value_name = "ADDRESS", env = "RANKWISE_LISTEN")]
    listen: Option<String>,

    /// Address and port for gRPC (GetLoads, as vLLM's and SGLang's servicers have it) [default: not served]
    #[arg(long, value_name = "ADDRESS", env = "RANKWISE_GRPC_LISTEN")]
    grpc_listen: Option<String>,

    /// A worker: id=…,model=…,block_size=…,ranks=0-3,events=tcp://host:port, and any other field that a worker in the file has (replay=…,loads=…,taints=a+b,events_per_rank.4=…)
    #[arg(long = "worker", value_name = "FIELDS")]
    workers: Vec<String>,

    /// Threads that answer HTTP; engines have one of their own, and so has the index [default: what the machine runs at once]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,

    /// Do not start if a worker of the configuration cannot be declared; otherwise it is left out, and said
    #[arg(long)]
    strict: bool,

    /// Print the address as JSON once it is bound
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Serves until Ctrl-C or SIGTERM; a second one ends it at once.
    ///
    /// # Errors
    /// Settings that cannot be, an address that cannot be bound, a worker that is refused.
    pub fn run(self) -> Result<Verdict> {
        let file = self.config.as_deref().map(ConfigFile::read).transpose()?.unwrap_or_default();
        let mut workers = Vec::new();
        for worker in file.each_worker().context("in the configuration")? {
            match worker {
                Ok(spec) => workers.push(Start { spec, skippable: !self.strict }),
                Err(why) if self.strict => return Err(why.context("in the configuration")),
                Err(why) => skipped(&why),
            }
        }
        for flag in &self.workers {
            let spec = worker_flag(flag).with_context(|| format!("in --worker {flag}"))?;
            workers.push(Start { spec, skippable: false });
        }
        let listen = self.listen.as_deref().or(file.listen.as_deref()).unwrap_or(DEFAULT_LISTEN);
        let grpc = self.grpc_listen.as_deref().or(file.grpc_listen.as_deref());
        let threads = self.threads.or(file.threads()).unwrap_or_else(machine);
        runtime_of(threads)?.block_on(serve(listen, grpc, &file, workers, self.json))
    }
}

/// A worker to declare at the start.
struct Start {
    spec: WorkerSpec,
    /// Whether the service starts without it if it cannot be declared.
    skippable: bool,
}

fn skipped(why: &anyhow::Error) {
    tracing::error!("a worker of the configuration is left out (--strict refuses to start then): {why:#}");
}

async fn serve(
    listen: &str,
    grpc: Option<&str>,
    file: &ConfigFile,
    workers: Vec<Start>,
    json: bool,
) -> Result<Verdict> {
    let mut signals = Signals::watch();
    let mut service = file.service();
    let descriptors = Descriptors::take(service.connections.max_connections);
    service.connections.max_connections = descriptors.http;
    info!(limit = descriptors.limit, engines = descriptors.engines, http = descriptors.http, "descriptors");
    let driver = DriverConfig { max_connections: descriptors.engines, ..DriverConfig::default() };
    let node = NodeConfig { indexer: file.indexer(), driver };
    let telemetry = file.telemetry().context("in the configuration")?;
    let mut running = Running::start(listen, node, file.router()?, service).await?;
    for (pattern, model) in file.patterns() {
        running
            .control()
            .add_model_pattern(pattern, model)
            .await?
            .then_some(())
            .with_context(|| format!("the pattern {pattern:?} cannot be used; end it in a slash"))?;
    }
    for Start { spec, skippable } in workers {
        let change = match running.declare(spec).await {
            Ok(change) => change,
            Err(why) if skippable => {
                skipped(&why);
                continue;
            }
            Err(why) => return Err(why),
        };
        info!(worker = %change.worker, pool = %change.pool, ranks = change.added.len(), "declared");
    }
    running.await_history();
    for (source, ttl) in file.load_limits() {
        running.view().loads().lock().limit_source(source, ttl);
    }
    running.watch_loads(telemetry)?;
    let address = running.address();
    let grpc = match grpc {
        Some(listen) => Some(running.serve_grpc(listen).await?),
        None => None,
    };
    if json {
        let grpc = grpc.map(|grpc| grpc.to_string());
        print_json(&serde_json::json!({ "address": address.to_string(), "grpc_address": grpc }))?;
    } else {
        let grpc = grpc.map(|grpc| format!(" and gRPC on {grpc}")).unwrap_or_default();
        print_text(format!("rankwise serves on http://{address}{grpc} (Ctrl-C ends it)"))?;
    }
    let control = running.control();
    match end(|| control.failure().map(str::to_owned), &mut signals, FAREWELL).await {
        End::Asked => stop(running, &mut signals).await,
        End::Failed => Ok(Verdict::Failed),
    }
}

/// As many threads as the machine runs at once.
fn machine() -> usize {
    // Where it cannot be known two threads keep one slow request from holding up all others.
    std::thread::available_parallelism().map_or(2, Into::into)
}

/// Why a service ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Asked,
    Failed,
}

/// Waits for the end. A dead index is said for a moment, in the log and on `/health`.
async fn end(failure: impl Fn() -> Option<String>, signals: &mut Signals, farewell: Duration) -> End {
    let failed = async {
        loop {
            match failure() {
                Some(why) => return why,
                None => sleep(LOOK).await,
            }
        }
    };
    tokio::select! {
        () = signals.next() => End::Asked,
        why = failed => {
            error!("{why}: what is known of the engines no longer changes; the process ends");
            // Who cannot wait may ask.
            let _ = timeout(farewell, signals.next()).await;
            End::Failed
        }
    }
}

/// Ends in good order, unless asked again.
async fn stop(running: Running, signals: &mut Signals) -> Result<Verdict> {
    info!("asked to stop: answers that have begun are given; ask again to end at once");
    tokio::select! {
        stopped = timeout(DRAIN, running.stop()) => match stopped {
            Ok(stopped) => stopped.map(|()| info!("every answer was given"))?,
            Err(_) => warn!("some answers took longer than {DRAIN:?} and were cut off"),
        },
        () = signals.next() => {
            warn!("asked again: ended at once");
            // Not by returning: the runtime would wait for what it is in the middle of.
            std::process::exit(1);
        }
    }
    Ok(Verdict::Ok)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// S5, I8: a dead index ends the process, and not as if all were well. Nobody can kill it from outside, so the
    /// death is planted.
    #[tokio::test]
    async fn a_dead_index_ends_the_service_after_a_moment() {
        let looks = Cell::new(0);
        let failure = || {
            looks.set(looks.get() + 1);
            (looks.get() > 3).then(|| "planted".to_owned())
        };
        let (began, farewell) = (tokio::time::Instant::now(), Duration::from_millis(100));
        assert_eq!(end(failure, &mut Signals::watch(), farewell).await, End::Failed);
        assert!(began.elapsed() >= farewell);
    }
}

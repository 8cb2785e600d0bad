//! Mock engines on real ports: events, replays, load, HTTP and gRPC, as the engines have them.
//!
//! A [`Fleet`] runs on the runtime that starts it, one task per rank. Its ranks can be used over their ports like
//! any engine's, and in process by their [`RankHandle`]s.
//!
//! - [`rank`]: a rank's task, its faults, and the way to it.
//! - `ports`: which ports are bound.
//! - `http`, `generate`, `text`: completions and what is asked about a worker.
//! - `loads`: load in every form that routers read.
//! - `alarm`: who lets engines' time pass on time.
//! - `debug`: the truth about the caches, and faults on demand.
//!
//! # What to know
//! Everything is open to whoever reaches the ports, faults included: they bind to loopback unless told otherwise.
//! Bodies, connections of HTTP and gRPC, requests in flight and waiting requests are bounded; connections to the
//! ZMQ ports are not, since the library does not count them.

mod alarm;
mod debug;
mod generate;
mod http;
mod loads;
mod ports;
pub mod rank;
mod text;

use std::io;
use std::time::Duration;

use serde::Serialize;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use self::alarm::AlarmClock;
use self::http::WorkerState;
use self::rank::EngineClock;
pub use self::rank::{
    Answer, Blocks, BrokenOff, FalseLoad, Fault, Gone, Next, NotTaken, RankHandle, ReportedLoad,
};
use super::config::{EngineConfig, Shape};
use crate::fleet::Ranks;
use crate::ids::DpRank;
use crate::wire::publisher::PublishError;

/// How long answers that have begun may take once the fleet is shut down.
const DRAIN: Duration = Duration::from_secs(1);

/// A fleet of mock workers, all alike.
#[derive(Clone, PartialEq, Debug)]
pub struct FleetConfig {
    /// Every rank's engine.
    pub engine: EngineConfig,
    /// The model that all serve.
    pub model: String,
    /// Worker `i` is called by this name, a hyphen and `i`.
    pub name: String,
    /// The address that every port is bound on.
    pub host: String,
    /// Workers.
    pub workers: u32,
    /// Data-parallel ranks of each worker.
    pub ranks: u32,
    /// The global number of each worker's first rank.
    pub dp_start_rank: u32,
    /// HTTP port of worker 0, each next one's is one higher; 0 lets the system choose each.
    pub port: u16,
    /// gRPC port, likewise.
    pub grpc_port: u16,
    /// Event port of the first rank, each next one's is one higher, from worker to worker. 0 lets the system
    /// choose; a worker's ports are then neighbours too, if the system lets them.
    pub event_port: u16,
    /// Replay port, likewise.
    pub replay_port: u16,
    /// Batches that a replay can give.
    pub replay_buffer: usize,
}

impl Default for FleetConfig {
    /// One vLLM-shaped worker of two ranks on loopback ports that the system chooses.
    fn default() -> Self {
        Self {
            engine: EngineConfig::default(),
            model: "mock".to_owned(),
            name: "mock".to_owned(),
            host: "127.0.0.1".to_owned(),
            workers: 1,
            ranks: 2,
            dp_start_rank: 0,
            port: 0,
            grpc_port: 0,
            event_port: 0,
            replay_port: 0,
            replay_buffer: 10_000,
        }
    }
}

/// Where a worker is reached. Its serialised form is what `rankwise mock` prints.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct WorkerAddress {
    /// The worker's id.
    pub worker: String,
    /// `vllm` or `sglang`.
    pub shape: &'static str,
    /// The model that it serves.
    pub model: String,
    /// Base URL of HTTP.
    pub url: String,
    /// Base URL of gRPC.
    pub grpc: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Its ranks, ascending.
    pub ranks: Vec<RankAddress>,
}

/// Where a rank publishes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RankAddress {
    /// The global rank.
    pub dp_rank: u32,
    /// Its events.
    pub events: String,
    /// Its replays.
    pub replay: String,
    /// Its LoadStat messages; `None` for a vLLM shape, which has none.
    pub load_stat: Option<String>,
}

/// Why a fleet could not be started.
#[derive(Debug, Error)]
pub enum StartError {
    /// No worker, no rank, or more ranks than one worker may have.
    #[error("{0}")]
    Size(String),
    /// A port past 65535.
    #[error("port {base} plus {offset} is past 65535; choose a lower base port")]
    PortRange {
        /// The configured port.
        base: u16,
        /// What was added.
        offset: u32,
    },
    /// A port that cannot be bound.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// The system gives no thread for the engines' clock.
    #[error("cannot start a thread for the engines' time: {0}")]
    Thread(io::Error),
    /// A port of HTTP or gRPC that cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: String,
        /// The system's reason.
        source: io::Error,
    },
}

/// Running mock workers. Dropping it ends them without ceremony; [`Fleet::shutdown`] lets answers end.
#[derive(Debug)]
pub struct Fleet {
    addresses: Vec<WorkerAddress>,
    ranks: Vec<Vec<RankHandle>>,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Fleet {
    /// Binds every port and starts every rank, on the runtime that it is called on.
    ///
    /// # Errors
    /// Sizes that cannot be, and ports that cannot be bound.
    pub async fn start(config: FleetConfig) -> Result<Self, StartError> {
        check_size(&config)?;
        let alarms = AlarmClock::start().map_err(StartError::Thread)?;
        let clock = (EngineClock::new(), alarms);
        let (stop, stopped) = watch::channel(false);
        let mut fleet = Self { addresses: Vec::new(), ranks: Vec::new(), stop, tasks: Vec::new() };
        for worker in 0..config.workers {
            let bound = ports::bind_worker(&config, worker).await?;
            fleet.start_worker(&config, worker, bound, &clock, &stopped).await?;
        }
        Ok(fleet)
    }

    async fn start_worker(
        &mut self,
        config: &FleetConfig,
        worker: u32,
        bound: Vec<ports::RankPorts>,
        clock: &(EngineClock, AlarmClock),
        stopped: &watch::Receiver<bool>,
    ) -> Result<(), StartError> {
        let (http, url) = listen(config, config.port, worker).await?;
        let (grpc, grpc_url) = listen(config, config.grpc_port, worker).await?;
        let addresses = (config.dp_start_rank..).zip(&bound).map(|(dp_rank, ports)| ports.address(dp_rank));
        let address = WorkerAddress {
            worker: format!("{}-{worker}", config.name),
            shape: shape_name(config.engine.shape),
            model: config.model.clone(),
            url,
            grpc: grpc_url,
            block_size: config.engine.block_size.get(),
            ranks: addresses.collect(),
        };
        let mut ranks = Vec::new();
        for (dp_rank, ports) in (config.dp_start_rank..).zip(bound) {
            let publisher = ports::publisher_config(config);
            let rank =
                rank::spawn_rank(config.engine, DpRank(dp_rank), clock.clone(), ports.events, publisher);
            if let Some(socket) = ports.load_stat {
                self.tasks.push(tokio::spawn(loads::publish_loads(rank.clone(), socket)));
            }
            ranks.push(rank);
        }
        let state = WorkerState::new(config, address.clone(), ranks.clone());
        self.tasks.push(tokio::spawn(http::serve(http, state.clone(), stopped.clone())));
        self.tasks.push(tokio::spawn(loads::serve_grpc(grpc, state, stopped.clone())));
        self.addresses.push(address);
        self.ranks.push(ranks);
        Ok(())
    }

    /// Where each worker is reached.
    pub fn workers(&self) -> &[WorkerAddress] {
        &self.addresses
    }

    /// The rank `dp_rank` (global) of the `worker`th worker.
    pub fn rank(&self, worker: usize, dp_rank: DpRank) -> Option<&RankHandle> {
        self.ranks.get(worker)?.iter().find(|rank| rank.dp_rank() == dp_rank)
    }

    /// All ranks, worker by worker.
    pub fn ranks(&self) -> impl Iterator<Item = (&WorkerAddress, &RankHandle)> {
        let workers = self.addresses.iter().zip(&self.ranks);
        workers.flat_map(|(address, ranks)| ranks.iter().map(move |rank| (address, rank)))
    }

    /// Takes no more requests, lets answers end within a second, and frees every port.
    pub async fn shutdown(mut self) {
        // Nobody listening is stopped already.
        let _ = self.stop.send(true);
        for task in std::mem::take(&mut self.tasks) {
            let abort = task.abort_handle();
            if timeout(DRAIN, task).await.is_err() {
                abort.abort();
            }
        }
        let ranks: Vec<_> = self.ranks.drain(..).flatten().collect();
        futures::future::join_all(ranks.iter().map(RankHandle::stop)).await;
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// The shape's name on the command line and in answers.
pub(super) fn shape_name(shape: Shape) -> &'static str {
    match shape {
        Shape::Vllm => "vllm",
        Shape::Sglang => "sglang",
    }
}

/// Most workers of one fleet: each has sockets, and tests need a handful.
const MAX_WORKERS: u32 = 256;

fn check_size(config: &FleetConfig) -> Result<(), StartError> {
    if !(1..=MAX_WORKERS).contains(&config.workers) {
        return Err(StartError::Size(format!("{} workers; give 1 to {MAX_WORKERS}", config.workers)));
    }
    Ranks::range(config.dp_start_rank, config.ranks)
        .map(|_| ())
        .map_err(|error| StartError::Size(error.to_string()))
}

/// A listener for worker `worker`, and its base URL.
async fn listen(config: &FleetConfig, base: u16, worker: u32) -> Result<(TcpListener, String), StartError> {
    let port = ports::offset(base, worker)?;
    let address = match config.host.contains(':') {
        true => format!("[{}]:{port}", config.host.trim_matches(['[', ']'])),
        false => format!("{}:{port}", config.host),
    };
    let bound = match TcpListener::bind(&address).await {
        Ok(listener) => listener.local_addr().map(|bound| (listener, format!("http://{bound}"))),
        Err(error) => Err(error),
    };
    bound.map_err(|source| StartError::Listen { address, source })
}

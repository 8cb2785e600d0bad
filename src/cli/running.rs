//! A whole service in this process: a node, and HTTP in front of it.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use rankwise::fleet::{Change, WorkerSpec};
use rankwise::ids::{Moment, RankKey, WorkerId};
use rankwise::indexer::View;
use rankwise::ingest::{
    LoadStatBinding, LoadStatConfig, LoadStatFeed, LoadTableSink, Node, NodeConfig, NodeControl,
};
use rankwise::pump::Gone;
use rankwise::routing::{Router, RouterConfig};
use rankwise::service::{self, Control, ControlError, ServiceConfig, ServiceState};
use rankwise::telemetry::serve::serve_loads;
use rankwise::telemetry::{Binding, FeedConfig, Feeds};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A service that runs until it is stopped.
pub struct Running {
    node: Node,
    address: SocketAddr,
    state: ServiceState<Live>,
    stop: oneshot::Sender<()>,
    http: JoinHandle<std::io::Result<()>>,
    /// What asks for load and listens to it, for as long as the service runs.
    feeds: Option<(Feeds, LoadStatFeed)>,
    /// Ends gRPC when it is dropped.
    grpc: Option<oneshot::Sender<()>>,
}

/// Who is asked for load, and who publishes it.
#[derive(Debug, Default)]
pub struct Telemetry {
    /// Workers that are asked.
    pub asked: Vec<Binding>,
    /// Workers that publish.
    pub published: Vec<LoadStatBinding>,
    /// How the first are asked.
    pub config: FeedConfig,
}

impl Running {
    /// Binds `listen` and serves on the present runtime.
    ///
    /// # Errors
    /// An address that cannot be bound, or no thread left.
    pub async fn start(
        listen: &str,
        node: NodeConfig,
        router: RouterConfig,
        service: ServiceConfig,
    ) -> Result<Self> {
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("cannot listen on {listen}; choose another with --listen"))?;
        let address = listener.local_addr().context("the listener has no address")?;
        let node = Node::start(node).context("cannot start the indexing thread")?;
        let router = Router::new(node.view().clone(), router);
        let connections = service.connections;
        let state = ServiceState::new(Live(node.control()), router, service);
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            // Dropped or told: both mean to stop.
            let _ = stopped.await;
        };
        let app = service::app(state.clone());
        let http = tokio::spawn(service::serve_with(listener, app, connections, shutdown));
        Ok(Self { node, address, state, stop, http, feeds: None, grpc: None })
    }

    /// Where HTTP is served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The way to the fleet.
    pub fn control(&self) -> NodeControl {
        self.node.control()
    }

    /// What routers read.
    pub fn view(&self) -> &View {
        self.node.view()
    }

    /// Lets `/ready` wait for the first history of the workers that are declared now.
    pub fn await_history(&self) {
        self.state.await_history();
    }

    /// Declares a worker.
    ///
    /// # Errors
    /// A declaration that is refused, with its reason.
    pub async fn declare(&self, spec: WorkerSpec) -> Result<Change> {
        let id = spec.worker.clone();
        let declared = self.node.control().declare(spec).await?;
        declared.with_context(|| format!("worker {id:?} cannot be declared"))
    }

    /// Asks for load, and listens to it, from now on and on the present runtime. Workers need not be declared
    /// yet.
    ///
    /// # Errors
    /// A URL that cannot be used.
    pub fn watch_loads(&mut self, telemetry: Telemetry) -> Result<()> {
        let handle = Handle::current();
        let view = self.node.view();
        let clock = self.node.clock();
        let Telemetry { asked, published, config } = telemetry;
        let control = self.node.control();
        let emptied = move |rank| control.slept(rank);
        let feeds = Feeds::start(&handle, view, move || clock.now(), asked, &config, emptied)?;
        let sink = LoadTableSink::new(view.clone(), move || clock.now());
        let sockets = LoadStatFeed::start(&handle, view.clone(), published, sink, LoadStatConfig::default());
        self.feeds = Some((feeds, sockets));
        Ok(())
    }

    /// Answers `GetLoads` over gRPC on `listen`, for as long as the service runs; the address that is bound.
    ///
    /// # Errors
    /// An address that cannot be bound.
    pub async fn serve_grpc(&mut self, listen: &str) -> Result<SocketAddr> {
        let listener = TcpListener::bind(listen)
            .await
            .with_context(|| format!("cannot listen on {listen}; choose another with --grpc-listen"))?;
        let address = listener.local_addr().context("the listener has no address")?;
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            // Dropped with the service.
            let _ = stopped.await;
        };
        let clock = self.node.clock();
        let serving = serve_loads(listener, self.view().clone(), move || clock.now(), shutdown);
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::warn!(%error, "gRPC is no longer served");
            }
        });
        self.grpc = Some(stop);
        Ok(address)
    }

    /// Answers what has begun, closes the connections and ends.
    ///
    /// # Errors
    /// Those of accepting connections.
    pub async fn stop(self) -> Result<()> {
        drop(self.feeds);
        drop(self.grpc);
        let _ = self.stop.send(());
        self.http.await.context("the HTTP task has ended badly")?.context("cannot accept connections")?;
        drop(self.node);
        Ok(())
    }
}

/// The node's control as the service wants it.
#[derive(Clone)]
struct Live(NodeControl);

impl Control for Live {
    async fn declare(&self, spec: WorkerSpec) -> Result<Change, ControlError> {
        Ok(self.0.declare(spec).await.map_err(closed)??)
    }

    async fn add_rank(&self, spec: WorkerSpec) -> Result<Change, ControlError> {
        Ok(self.0.add_rank(spec).await.map_err(closed)??)
    }

    async fn remove_rank(&self, rank: RankKey) -> Result<Option<Change>, ControlError> {
        self.0.remove_rank(rank).await.map_err(closed)
    }

    async fn withdraw(&self, worker: WorkerId) -> Result<Option<Change>, ControlError> {
        self.0.withdraw(worker).await.map_err(closed)
    }

    fn now(&self) -> Moment {
        self.0.now()
    }

    fn queued_messages(&self) -> Option<u64> {
        Some(self.0.depth())
    }

    fn failure(&self) -> Option<String> {
        self.0.failure().map(str::to_owned)
    }
}

fn closed(_: Gone) -> ControlError {
    ControlError::Closed
}

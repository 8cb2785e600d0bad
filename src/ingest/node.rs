//! A running indexer: the indexing thread, the sockets that feed it, and the way to its fleet.

use std::io;
use std::thread::JoinHandle;

use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::{Clock, DriverConfig, drive, prepare};
use crate::fleet::{Change, DeclareError, WorkerSpec};
use crate::ids::{Moment, RankKey, WorkerId};
use crate::indexer::{Action, Config, Indexer, Input, View};
use crate::pump::{self, Gone, PumpSender};

/// Settings of a node.
#[derive(Clone, Debug, Default)]
pub struct NodeConfig {
    /// How streams are treated.
    pub indexer: Config,
    /// How connections are treated.
    pub driver: DriverConfig,
}

/// Everything that listens. Dropping it closes the connections and ends the indexing thread.
#[derive(Debug)]
pub struct Node {
    control: NodeControl,
    view: View,
    driver: AbortHandle,
    thread: Option<JoinHandle<Indexer>>,
    /// Ingest has a runtime of its own: a slow page must not hold up the streams. One worker is best on
    /// small hosts (measured: more of them steal from the indexing thread).
    runtime: Option<Runtime>,
}

/// The way to a node's fleet: commands run on the indexing thread, behind everything that came before.
#[derive(Clone, Debug)]
pub struct NodeControl {
    pump: PumpSender,
    clock: Clock,
}

impl Node {
    /// Starts the indexing thread and the ingest runtime, with nobody to listen to yet.
    ///
    /// # Errors
    ///
    /// When the operating system has no thread left.
    pub fn start(config: NodeConfig) -> io::Result<Self> {
        let clock = Clock::start();
        let (indexer, view) = Indexer::new(config.indexer);
        let (surroundings, parts) = prepare(clock, config.driver);
        let (pump, thread) = pump::start(indexer, surroundings)?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("rankwise-ingest")
            .enable_all()
            .build()?;
        let driver = runtime.spawn(drive(runtime.handle().clone(), pump.clone(), parts)).abort_handle();
        let control = NodeControl { pump, clock };
        Ok(Self { control, view, driver, thread: Some(thread), runtime: Some(runtime) })
    }

    /// The way to the fleet.
    pub fn control(&self) -> NodeControl {
        self.control.clone()
    }

    /// What routers read.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The node's clock.
    pub fn clock(&self) -> Clock {
        self.control.clock
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.driver.abort();
        if let Some(runtime) = self.runtime.take() {
            // The runtime may be dropped inside another one, where waiting is not allowed.
            runtime.shutdown_background();
        }
        // The indexing thread ends when the last control is gone; it is not waited for.
        drop(self.thread.take());
    }
}

impl NodeControl {
    /// The moment on the node's clock.
    pub fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Messages that wait for the indexing thread.
    pub fn depth(&self) -> u64 {
        self.pump.depth()
    }

    /// Why the indexing thread is gone, in words; `None` while it runs.
    pub fn failure(&self) -> Option<&str> {
        self.pump.failure()
    }

    /// Declares a worker, or declares it anew.
    ///
    /// # Errors
    ///
    /// [`Gone`] when the node has ended; inside, the refusal.
    pub async fn declare(&self, spec: WorkerSpec) -> Result<Result<Change, DeclareError>, Gone> {
        self.ask(|indexer, now, actions| indexer.declare_worker(now, spec, actions)).await
    }

    /// Adds ranks to a worker, which is declared if it is new.
    ///
    /// # Errors
    ///
    /// [`Gone`] when the node has ended; inside, the refusal.
    pub async fn add_rank(&self, spec: WorkerSpec) -> Result<Result<Change, DeclareError>, Gone> {
        self.ask(|indexer, now, actions| indexer.add_rank(now, spec, actions)).await
    }

    /// Removes one rank; `None` if it is not declared.
    ///
    /// # Errors
    ///
    /// [`Gone`] when the node has ended.
    pub async fn remove_rank(&self, rank: RankKey) -> Result<Option<Change>, Gone> {
        self.ask(move |indexer, now, actions| indexer.remove_rank(now, &rank, actions)).await
    }

    /// Removes a worker; `None` if it is not declared.
    ///
    /// # Errors
    ///
    /// [`Gone`] when the node has ended.
    pub async fn withdraw(&self, worker: WorkerId) -> Result<Option<Change>, Gone> {
        self.ask(move |indexer, now, actions| indexer.withdraw_worker(now, &worker, actions)).await
    }

    /// The engine of `rank` has fallen into a sleep that takes its device cache. Does not wait; a rank that is
    /// gone meanwhile has nothing to lose.
    pub fn slept(&self, rank: RankKey) {
        // When the node has ended there is no cache either.
        let _ = self.pump.call(move |indexer, now, actions| {
            if let Some(source) = indexer.source(&rank) {
                indexer.handle(now, Input::Slept { source }, actions);
            }
        });
    }

    /// Lets `pattern`, which ends in `/`, stand for the pool of `model`; `false` if it cannot.
    ///
    /// # Errors
    ///
    /// [`Gone`] when the node has ended.
    pub async fn add_model_pattern(&self, pattern: &str, model: &str) -> Result<bool, Gone> {
        let (pattern, model) = (pattern.to_owned(), model.to_owned());
        self.ask(move |indexer, _, _| indexer.add_model_pattern(&pattern, &model)).await
    }

    /// Runs `question` on the indexing thread.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Indexer, Moment, &mut Vec<Action>) -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let (told, answer) = oneshot::channel();
        self.pump.call(move |indexer, now, actions| {
            // Who asked may have gone meanwhile.
            let _ = told.send(question(indexer, now, actions));
        })?;
        answer.await.map_err(|_| Gone)
    }
}

//! Dynamo's `ConcurrentRadixTreeCompressed`, behind its own worker loop on one thread of its own.
//!
//! The loop's CPU time is read by the loop's own thread: an acknowledgement wakes its waiter there, and the
//! waiter is ours.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};
use std::thread::JoinHandle;

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{LocalBlockHash, OverlapScores, RouterEvent};
use tokio::sync::oneshot;

use super::router_asker::{Search, SharedAsker};
use super::router_event::router_event;
use super::{Ask, Contender, DumpCost, HasAsker, Nanos};
use crate::cpu;
use crate::workload::blocks::{Blocks, Event};

/// `dynamo_kv_router::ConcurrentRadixTreeCompressed`.
pub struct Crtc {
    lane: Lane,
    queue: Vec<RouterEvent>,
    asker: SharedAsker<ConcurrentRadixTreeCompressed>,
}

impl Crtc {
    /// An empty tree and its thread.
    pub fn new() -> Self {
        let lane = Lane::start();
        let asker = SharedAsker::new(Arc::clone(&lane.tree));
        Self { lane, queue: Vec::new(), asker }
    }

    /// Takes events in Dynamo's own form.
    pub fn load_router_events(&mut self, events: impl IntoIterator<Item = RouterEvent>) {
        self.queue.extend(events);
    }
}

impl Default for Crtc {
    fn default() -> Self {
        Self::new()
    }
}

impl Contender for Crtc {
    fn name(&self) -> &'static str {
        "Dynamo CRTC"
    }

    fn load(&mut self, blocks: &Blocks, events: &[Event]) {
        self.queue.extend(events.iter().map(|event| router_event(blocks, event)));
    }

    fn apply(&mut self) -> Nanos {
        self.lane.apply(std::mem::take(&mut self.queue))
    }

    fn reader(&self) -> Option<Box<dyn Ask + Send>> {
        Some(Box::new(SharedAsker::new(Arc::clone(&self.lane.tree))))
    }

    fn dump_and_rebuild(&mut self) -> Option<DumpCost> {
        let mut events = None;
        let dump = cpu::spent(|| events = self.lane.tree.dump_events());
        let mut fresh = Lane::start();
        let rebuild = fresh.apply(events?);
        self.asker = SharedAsker::new(Arc::clone(&fresh.tree));
        self.lane = fresh;
        Some(DumpCost { dump, rebuild })
    }
}

impl HasAsker for Crtc {
    type Asker = SharedAsker<ConcurrentRadixTreeCompressed>;

    fn asker(&self) -> &Self::Asker {
        &self.asker
    }

    fn asker_mut(&mut self) -> &mut Self::Asker {
        &mut self.asker
    }
}

impl Search for ConcurrentRadixTreeCompressed {
    fn search(&self, locals: &[LocalBlockHash]) -> OverlapScores {
        self.find_matches(locals, false)
    }
}

/// The tree's worker loop.
struct Lane {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    fn start() -> Self {
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        let (tasks, queued) = flume::unbounded();
        let thread = std::thread::spawn({
            let tree = Arc::clone(&tree);
            // The loop ends with its channel; it has no other error.
            move || drop(tree.worker(queued, None))
        });
        Self { tree, tasks, thread: Some(thread) }
    }

    /// Queues the events while the loop is held at a gate, opens it, and waits for the end.
    fn apply(&mut self, events: Vec<RouterEvent>) -> Nanos {
        let start = Mark::at_gate(&self.tasks);
        for event in events {
            let _ = self.tasks.send(WorkerTask::Event(event));
        }
        // As the peer's thread pool does between events, when it finds that it is time to.
        if self.tree.try_schedule_cleanup() {
            let _ = self.tasks.send(WorkerTask::CleanupStaleChildren);
        }
        let end = Mark::open(&self.tasks);
        start.open_gate();
        let end = end.wait();
        end.saturating_sub(start.wait())
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A place in the queue that notes the loop's CPU time when the loop comes by.
struct Mark {
    stamp: Arc<Stamp>,
    /// Kept, since an acknowledgement without a receiver wakes nobody.
    _acknowledged: Pin<Box<oneshot::Receiver<()>>>,
}

#[derive(Default)]
struct Stamp {
    nanos: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    closed: bool,
    reached: bool,
}

impl Mark {
    /// The loop stops at this mark until the gate is opened.
    fn at_gate(tasks: &flume::Sender<WorkerTask>) -> Self {
        Self::new(tasks, true)
    }

    fn open(tasks: &flume::Sender<WorkerTask>) -> Self {
        Self::new(tasks, false)
    }

    fn new(tasks: &flume::Sender<WorkerTask>, closed: bool) -> Self {
        let stamp =
            Arc::new(Stamp { state: Mutex::new(State { closed, reached: false }), ..Stamp::default() });
        let (resp, acknowledged) = oneshot::channel();
        let mut acknowledged = Box::pin(acknowledged);
        let waker = Waker::from(Arc::clone(&stamp));
        // Pending, since nothing was sent: this only leaves the waker behind.
        let _ = acknowledged.as_mut().poll(&mut Context::from_waker(&waker));
        let _ = tasks.send(WorkerTask::Flush(resp));
        Self { stamp, _acknowledged: acknowledged }
    }

    fn open_gate(&self) {
        self.stamp.state.lock().unwrap_or_else(PoisonError::into_inner).closed = false;
        self.stamp.changed.notify_all();
    }

    fn wait(&self) -> Nanos {
        let mut state = self.stamp.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !state.reached {
            state = self.stamp.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.stamp.nanos.load(Ordering::Acquire)
    }
}

impl Wake for Stamp {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.nanos.store(cpu::thread_nanos(), Ordering::Release);
        state.reached = true;
        drop(state);
        self.changed.notify_all();
    }
}

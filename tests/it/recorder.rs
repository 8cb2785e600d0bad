//! A sink that keeps what the socket tasks deliver, and waits by polling.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rankwise::events::order::ReplayId;
use rankwise::ids::SourceId;
use rankwise::ingest::{Closed, ReplayFailure, Sink, StreamEvent};
use tokio::sync::Semaphore;

/// Longer than anything here takes on a loaded machine; nothing waits for it to pass.
const PATIENCE: Duration = Duration::from_secs(30);

/// Keeps every event. With `credits`, each delivery takes one, and waits for it.
#[derive(Clone, Default)]
pub struct Recorder {
    events: Arc<Mutex<Vec<(SourceId, StreamEvent)>>>,
    credits: Option<Arc<Semaphore>>,
}

impl Sink for Recorder {
    async fn deliver(&self, source: SourceId, event: StreamEvent) -> Result<(), Closed> {
        if let Some(credits) = &self.credits {
            credits.acquire().await.map_err(|_| Closed)?.forget();
        }
        self.events.lock().unwrap().push((source, event));
        Ok(())
    }
}

impl Recorder {
    /// A sink with room for `credits` events.
    pub fn with_credits(credits: usize) -> Self {
        Self { credits: Some(Arc::new(Semaphore::new(credits))), ..Self::default() }
    }

    /// Room for more.
    pub fn add_credits(&self, credits: usize) {
        self.credits.as_ref().unwrap().add_permits(credits);
    }

    /// The receiver goes away.
    pub fn close(&self) {
        self.credits.as_ref().unwrap().close();
    }

    pub fn len(&self) -> usize {
        self.events.lock().unwrap().len()
    }

    pub fn events_of(&self, source: SourceId) -> Vec<StreamEvent> {
        let events = self.events.lock().unwrap();
        events.iter().filter(|(of, _)| *of == source).map(|(_, event)| event.clone()).collect()
    }

    /// Numbers of the live messages of `source`, in the order of their arrival.
    pub fn live(&self, source: SourceId) -> Vec<u64> {
        let of = |event| match event {
            StreamEvent::Message(frames) => Some(number(&frames)),
            _ => None,
        };
        self.events_of(source).into_iter().filter_map(of).collect()
    }

    /// Numbers of the answers to `request`, the end mark (`u64::MAX`) included.
    pub fn answers(&self, source: SourceId, request: ReplayId) -> Vec<u64> {
        let of = |event| match event {
            StreamEvent::ReplayMessage { request: of, frames } if of == request => Some(number(&frames)),
            _ => None,
        };
        self.events_of(source).into_iter().filter_map(of).collect()
    }

    /// How `request` failed, if it has.
    pub fn failure(&self, source: SourceId, request: ReplayId) -> Option<ReplayFailure> {
        self.events_of(source).into_iter().find_map(|event| match event {
            StreamEvent::ReplayFailed { request: of, why } if of == request => Some(why),
            _ => None,
        })
    }

    /// How often `event` has come from `source`.
    pub fn count(&self, source: SourceId, event: &StreamEvent) -> usize {
        self.events_of(source).iter().filter(|seen| *seen == event).count()
    }
}

/// The number of a message: its last frame but one.
pub fn number(frames: &[Bytes]) -> u64 {
    match frames {
        [.., seq, _] => seq[..].try_into().map_or(u64::MAX, u64::from_be_bytes),
        _ => u64::MAX,
    }
}

/// Polls until `condition` holds; fails the test, with `what` it waited for, when patience runs out.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

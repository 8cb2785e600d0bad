//! Moments to the tenth of a millisecond. The runtime's timers end at the next whole millisecond or later, which
//! is several percent of a short step.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use tokio::sync::oneshot;

/// A thread that sleeps for those who must wake on time. Cloning it costs one reference count; the thread ends
/// with the last clone.
#[derive(Clone, Debug)]
pub(super) struct AlarmClock(Sender<Alarm>);

/// Who is woken when. Ordered by the moment alone.
#[derive(Debug)]
struct Alarm {
    due: Instant,
    wake: oneshot::Sender<()>,
}

impl AlarmClock {
    /// Starts the thread.
    pub(super) fn start() -> io::Result<Self> {
        // Who waits has one alarm set at a time, and sets another when that moment has changed.
        let (set, alarms) = unbounded();
        thread::Builder::new().name("mock-alarms".to_owned()).spawn(move || ring(&alarms))?;
        Ok(Self(set))
    }

    /// An alarm that rings at `due`, at once if that is over.
    pub(super) fn at(&self, due: Instant) -> Waking {
        let (wake, woken) = oneshot::channel();
        // A thread that is gone wakes at once, since its end of the channel is dropped.
        let _ = self.0.send(Alarm { due, wake });
        Waking { due, woken, over: false }
    }
}

/// An alarm that is set. What is not waited for any more is dropped when its moment comes.
#[derive(Debug)]
pub(super) struct Waking {
    due: Instant,
    woken: oneshot::Receiver<()>,
    over: bool,
}

impl Waking {
    /// The moment that it was set to.
    pub(super) fn due(&self) -> Instant {
        self.due
    }

    /// Waits until it rings. May be dropped and called again.
    pub(super) async fn wait(&mut self) {
        if !self.over {
            // Dropped by a thread that is gone is as good as woken.
            let _ = (&mut self.woken).await;
            self.over = true;
        }
    }
}

fn ring(set: &Receiver<Alarm>) {
    let mut waiting: BinaryHeap<Reverse<Alarm>> = BinaryHeap::new();
    loop {
        let next = match waiting.peek() {
            Some(Reverse(first)) => set.recv_deadline(first.due),
            None => set.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(alarm) => waiting.push(Reverse(alarm)),
            Err(RecvTimeoutError::Timeout) => {}
            // Nobody can set one any more; those that are left wake at once as their senders are dropped.
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        while waiting.peek().is_some_and(|Reverse(first)| first.due <= now) {
            if let Some(Reverse(alarm)) = waiting.pop() {
                // Who does not wait any more is not woken.
                let _ = alarm.wake.send(());
            }
        }
    }
}

impl Ord for Alarm {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due.cmp(&other.due)
    }
}

impl PartialOrd for Alarm {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Alarm {
    fn eq(&self, other: &Self) -> bool {
        self.due == other.due
    }
}

impl Eq for Alarm {}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::*;

    /// Alarms ring in the order of their moments, none before its own, and those that are over at once.
    #[tokio::test]
    async fn alarms_ring_when_they_are_due() {
        let clock = AlarmClock::start().unwrap();
        let start = Instant::now();
        let mut late = clock.at(start + Duration::from_millis(30));
        let mut soon = clock.at(start + Duration::from_millis(10));
        drop(clock.at(start + Duration::from_millis(1)));
        clock.at(start).wait().await;
        soon.wait().await;
        assert!(start.elapsed() >= Duration::from_millis(10));
        late.wait().await;
        assert!(start.elapsed() >= Duration::from_millis(30));
        late.wait().await;
    }

    /// Without a thread nobody waits for ever.
    #[tokio::test]
    async fn the_thread_ends_with_the_clock() {
        let clock = AlarmClock::start().unwrap();
        let mut far = clock.at(Instant::now() + Duration::from_secs(3_600));
        drop(clock);
        far.wait().await;
    }
}

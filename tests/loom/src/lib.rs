//! Every order in which two threads can meet in the index's versions, tried one by one (I8).
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release --manifest-path tests/loom/Cargo.toml`
#![cfg(loom)]

#[path = "../../../src/index/sync.rs"]
mod sync;
#[allow(dead_code)]
#[path = "../../../src/index/version.rs"]
mod version;

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    use loom::thread;

    use super::version::Version;

    /// A run as a reader sees it: a version and what it guards.
    #[derive(Default)]
    struct Run {
        version: Version,
        words: [AtomicU64; 2],
    }

    impl Run {
        fn set(&self, value: u64) {
            self.words.iter().for_each(|word| word.store(value, Relaxed));
        }

        fn get(&self) -> [u64; 2] {
            [self.words[0].load(Relaxed), self.words[1].load(Relaxed)]
        }
    }

    #[test]
    fn what_is_unchanged_was_read_whole() {
        loom::model(|| {
            let run = Arc::new(Run::default());
            let writer = {
                let run = Arc::clone(&run);
                thread::spawn(move || {
                    for value in 1..=2 {
                        run.version.open();
                        run.set(value);
                        run.version.close();
                    }
                })
            };
            if let Some(version) = run.version.begin() {
                let [a, b] = run.get();
                if run.version.unchanged(version) {
                    assert_eq!((a, a), (b, version / 2));
                }
            }
            writer.join().unwrap();
        });
    }

    /// An event over two runs is seen whole or not at all, whichever run is read first.
    #[test]
    fn an_event_over_two_runs_is_seen_whole() {
        for first in [0, 1] {
            loom::model(move || {
                let runs = Arc::new([Run::default(), Run::default()]);
                let writer = {
                    let runs = Arc::clone(&runs);
                    thread::spawn(move || {
                        runs[0].version.open();
                        runs[0].words[0].store(1, Relaxed);
                        runs[1].version.open();
                        runs[1].words[0].store(1, Relaxed);
                        runs[0].version.close();
                        runs[1].version.close();
                    })
                };
                let order = [first, 1 - first];
                let begun = order.map(|at| (at, runs[at].version.begin()));
                if let [(a, Some(a_version)), (b, Some(b_version))] = begun {
                    let seen = [a, b].map(|at| runs[at].words[0].load(Relaxed));
                    if runs[a].version.unchanged(a_version) && runs[b].version.unchanged(b_version) {
                        assert_eq!(seen[0], seen[1]);
                    }
                }
                writer.join().unwrap();
            });
        }
    }

    /// A run that leaves the table in the middle of an event that goes on to change the run before it: who
    /// misses it must not take the run before it for unchanged.
    #[test]
    fn absence_is_guarded_by_the_run_before() {
        loom::model(|| {
            let before = Arc::new(Run::default());
            let slot = Arc::new(AtomicU64::new(1));
            let writer = {
                let (before, slot) = (Arc::clone(&before), Arc::clone(&slot));
                thread::spawn(move || {
                    before.version.open();
                    slot.store(0, Release);
                    before.words[0].store(1, Relaxed);
                    before.version.close();
                })
            };
            if let Some(version) = before.version.begin() {
                let changed = before.words[0].load(Relaxed);
                let absent = slot.load(Acquire) == 0;
                if before.version.unchanged(version) {
                    assert_eq!(absent, changed == 1, "half an event was seen");
                }
            }
            writer.join().unwrap();
        });
    }

    /// The settled words of a buffer: counted with release order, read below the count alone.
    #[test]
    fn words_below_the_count_are_there() {
        loom::model(|| {
            let words = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
            let count = Arc::new(AtomicU64::new(0));
            let writer = {
                let (words, count) = (Arc::clone(&words), Arc::clone(&count));
                thread::spawn(move || {
                    for (at, word) in words.iter().enumerate() {
                        word.store(7, Relaxed);
                        count.store(at as u64 + 1, Release);
                    }
                })
            };
            let settled = count.load(Acquire) as usize;
            words[..settled].iter().for_each(|word| assert_eq!(word.load(Relaxed), 7));
            writer.join().unwrap();
        });
    }
}

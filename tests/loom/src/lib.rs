//! Every order in which two threads can meet in the index's versions, tried one by one (I8).
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release --manifest-path tests/loom/Cargo.toml`
//!
//! Each model returns what its reader saw in any order, and the tests compare the whole set: an answer too many
//! is a fault of the versions, one too few means that orders were left out. The latter has happened: see
//! `tests::answers`.
#![cfg(loom)]

#[path = "../../../src/index/sync.rs"]
mod sync;
#[allow(dead_code)]
#[path = "../../../src/index/version.rs"]
mod version;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Debug;
    use std::sync::{Arc as StdArc, Mutex};

    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    use loom::thread;

    use super::version::Version;

    /// What the reader answers in any order of the two.
    ///
    /// The reader is the thread that is spawned, never the other way round: loom (0.7.3) remembers one last
    /// access per atomic, so a writer that loads a version and then stores it hides the load that a reader made
    /// before, and a reader that runs first is never tried after that store. It then begins at version 0 alone,
    /// and a version that is closed without release order passes.
    fn answers<S, A>(
        state: fn() -> S,
        writer: impl Fn(&S) + Copy + Send + Sync + 'static,
        reader: impl Fn(&S) -> A + Copy + Send + Sync + 'static,
    ) -> BTreeSet<A>
    where
        S: Send + Sync + 'static,
        A: Ord + Clone + Debug + Send + 'static,
    {
        let seen = StdArc::new(Mutex::new(BTreeSet::new()));
        let answers = StdArc::clone(&seen);
        loom::model(move || {
            let shared = Arc::new(state());
            let reading = {
                let (shared, answers) = (Arc::clone(&shared), StdArc::clone(&answers));
                thread::spawn(move || {
                    let answer = reader(&shared);
                    answers.lock().unwrap().insert(answer);
                })
            };
            writer(&shared);
            reading.join().unwrap();
        });
        let seen = seen.lock().unwrap();
        seen.clone()
    }

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

    /// Changes that a writer makes one after another: 2, or `RANKWISE_LOOM_CHANGES`. Loom remembers seven stores
    /// of an atomic, so 3 is the most that it can follow.
    fn changes() -> u64 {
        let told = std::env::var("RANKWISE_LOOM_CHANGES").map_or(2, |changes| changes.parse().unwrap());
        assert!((2..=3).contains(&told), "RANKWISE_LOOM_CHANGES is 2 or 3");
        told
    }

    /// `(version, words)` of a reader that found the version unchanged; a version is twice the value that was
    /// written in it.
    #[test]
    fn what_is_unchanged_was_read_whole() {
        let changes = changes();
        let whole = answers(
            Run::default,
            move |run| {
                for value in 1..=changes {
                    run.version.open();
                    run.set(value);
                    run.version.close();
                }
            },
            |run| {
                let version = run.version.begin()?;
                let words = run.get();
                run.version.unchanged(version).then_some((version, words))
            },
        );
        let expected = (0..=changes).map(|value| Some((2 * value, [value, value])));
        assert_eq!(whole, expected.chain([None]).collect());
    }

    /// An event over two runs is seen whole or not at all, whichever run is read first. One event less than
    /// [`changes`], since two runs have many more orders.
    #[test]
    fn an_event_over_two_runs_is_seen_whole() {
        let events = changes() - 1;
        for first in [0, 1] {
            let whole = answers(
                <[Run; 2]>::default,
                move |runs| {
                    for value in 1..=events {
                        runs[0].version.open();
                        runs[0].words[0].store(value, Relaxed);
                        runs[1].version.open();
                        runs[1].words[0].store(value, Relaxed);
                        runs[0].version.close();
                        runs[1].version.close();
                    }
                },
                move |runs| {
                    let [a, b] = [&runs[first], &runs[1 - first]];
                    let (a_version, b_version) = (a.version.begin()?, b.version.begin()?);
                    let seen = [a, b].map(|run| run.words[0].load(Relaxed));
                    (a.version.unchanged(a_version) && b.version.unchanged(b_version)).then_some(seen)
                },
            );
            let expected = (0..=events).map(|value| Some([value, value]));
            assert_eq!(whole, expected.chain([None]).collect(), "run {first} first");
        }
    }

    /// A run that leaves the table in the middle of an event that goes on to change the run before it: who
    /// misses it must not take the run before it for unchanged.
    #[test]
    fn absence_is_guarded_by_the_run_before() {
        let whole = answers(
            || (Run::default(), AtomicU64::new(1)),
            |(before, slot)| {
                before.version.open();
                slot.store(0, Release);
                before.words[0].store(1, Relaxed);
                before.version.close();
            },
            |(before, slot)| {
                let version = before.version.begin()?;
                let changed = before.words[0].load(Relaxed) == 1;
                let absent = slot.load(Acquire) == 0;
                before.version.unchanged(version).then_some((changed, absent))
            },
        );
        assert_eq!(whole, BTreeSet::from([None, Some((false, false)), Some((true, true))]));
    }

    /// The settled words of a buffer: counted with release order, read below the count alone.
    #[test]
    fn words_below_the_count_are_there() {
        let settled = answers(
            <(AtomicU64, [AtomicU64; 2])>::default,
            |(count, words)| {
                for (at, word) in words.iter().enumerate() {
                    word.store(7, Relaxed);
                    count.store(at as u64 + 1, Release);
                }
            },
            |(count, words)| {
                let count = count.load(Acquire) as usize;
                words[..count].iter().map(|word| word.load(Relaxed)).collect::<Vec<_>>()
            },
        );
        assert_eq!(settled, BTreeSet::from([vec![], vec![7], vec![7, 7]]));
    }
}

//! Where this process's processor time goes, by kind of thread.

use std::collections::BTreeMap;
use std::fs;

/// Nanoseconds of processor time by kind of thread. Empty where the system does not tell (other than Linux).
///
/// Time on the processor does not grow with what else runs beside, as latencies do: on a shared machine these
/// are the figures to compare.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuTimes(BTreeMap<&'static str, u64>);

/// Threads by the beginning of their names. The service's runtime keeps the name that it has by default.
const KINDS: [(&str, &str); 6] = [
    ("tokio-", "service"),
    ("rankwise-index", "indexing"),
    ("rankwise-ingest", "ingest"),
    ("rankwise-client", "client"),
    ("rankwise-fleet", "publishers"),
    ("rankwise-watche", "watcher"),
];

impl CpuTimes {
    /// Up to now, of all threads that live.
    pub fn now() -> Self {
        let mut times = BTreeMap::new();
        let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        for thread in threads {
            let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
            let name = read("comm");
            let Some((_, kind)) = KINDS.iter().find(|(start, _)| name.starts_with(start)) else { continue };
            // Time on the processor, time waiting for it, turns; the first two in nanoseconds.
            let ran = read("schedstat").split_whitespace().next().and_then(|ran| ran.parse::<u64>().ok());
            *times.entry(*kind).or_default() += ran.unwrap_or(0);
        }
        Self(times)
    }

    /// Microseconds per item of `items`, since `before`.
    pub fn micros_per(&self, before: &Self, items: u64) -> BTreeMap<&'static str, f64> {
        let since = |(kind, ran): (&&'static str, &u64)| {
            let ran = ran.saturating_sub(before.0.get(kind).copied().unwrap_or(0));
            (*kind, ran as f64 / 1e3 / items.max(1) as f64)
        };
        self.0.iter().map(since).filter(|(_, micros)| *micros > 0.0).collect()
    }
}

/// In words: `service 120 µs, client 40 µs`.
pub fn words(cpu: &BTreeMap<&'static str, f64>) -> String {
    let word = |(kind, micros): (&&str, &f64)| format!("{kind} {micros:.0} µs");
    cpu.iter().map(word).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_shared_among_items() {
        let before = CpuTimes(BTreeMap::from([("service", 5_000)]));
        let after = CpuTimes(BTreeMap::from([("service", 45_000), ("client", 10_000)]));
        let per = after.micros_per(&before, 10);
        assert_eq!(per, BTreeMap::from([("client", 1.0), ("service", 4.0)]));
        assert_eq!(words(&per), "client 1 µs, service 4 µs");
    }
}

//! Clocks.

use rustix::time::{ClockId, clock_gettime};

/// CPU time of this thread so far, in nanoseconds.
pub fn thread_nanos() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}

/// CPU time that this thread spends in `work`, in nanoseconds.
pub fn spent(work: impl FnOnce()) -> u64 {
    let before = thread_nanos();
    work();
    thread_nanos() - before
}

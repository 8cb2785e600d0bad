//! How many descriptors there are, and who gets them.

/// Descriptors of the process, shared out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptors {
    /// How many the system gives; `None` is no limit.
    pub limit: Option<usize>,
    /// Connections to engines that may be open at once.
    pub engines: Option<usize>,
    /// HTTP connections that may be open at once.
    pub http: usize,
}

/// Kept for what is neither an engine's nor a client's connection: the three standard streams, the listeners, the
/// runtimes' own, files, and engines that are asked for their load.
const OTHERS: usize = 64;

impl Descriptors {
    /// Takes as many as the system lets us have and shares them out: `http` connections are wanted, the engines
    /// get the rest.
    pub fn take(http: usize) -> Self {
        Self::share(raise(), http)
    }

    /// A quarter at most is kept from the engines: with the usual 1,024 that is 192 for HTTP, enough to look at
    /// a fleet that is too large, and to make it smaller.
    fn share(limit: Option<usize>, http: usize) -> Self {
        let Some(limit) = limit else { return Self { limit, engines: None, http } };
        let kept = http.saturating_add(OTHERS).min((limit / 4).max(OTHERS + 1));
        Self { limit: Some(limit), engines: Some(limit.saturating_sub(kept).max(1)), http: kept - OTHERS }
    }
}

/// Raises the soft limit to the hard one, which costs nothing: it is low for programs that use `select`. The
/// limit in force.
#[cfg(unix)]
fn raise() -> Option<usize> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limits = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limits.maximum, maximum: limits.maximum };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limits.maximum,
        Err(error) => {
            tracing::warn!(%error, "the limit of descriptors cannot be raised");
            limits.current
        }
    };
    current.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

#[cfg(not(unix))]
fn raise() -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I8: clients always find some descriptors left, and engines too.
    #[test]
    fn neither_side_takes_all_descriptors() {
        let of = |limit, http| {
            let Descriptors { engines, http, .. } = Descriptors::share(limit, http);
            (engines, http)
        };
        assert_eq!(of(None, 1_024), (None, 1_024));
        assert_eq!(of(Some(1 << 20), 1_024), (Some((1 << 20) - 1_088), 1_024));
        assert_eq!(of(Some(1_024), 1_024), (Some(768), 192));
        assert_eq!(of(Some(1_024), 10), (Some(950), 10));
        assert_eq!(of(Some(20), 1_024), (Some(1), 1), "nothing works then, and says so");
    }
}

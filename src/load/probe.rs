//! Which route of a base URL to ask, and when: the memory of what it answers.
//!
//! Pure: `now` and outcomes come in, the next fetch comes out.

use std::time::Duration;

use crate::ids::Moment;

/// A way to ask for load, best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Route {
    /// gRPC `GetLoads` of vLLM's servicer.
    GrpcVllm,
    /// gRPC `GetLoads` of SGLang's servicer.
    GrpcSglang,
    /// `GET /v1/loads`.
    HttpLoads,
    /// A gateway's rollup, `GET /loads`: never a rank's load.
    HttpRollup,
    /// `GET /metrics`, the last resort: seconds old, and seldom per rank.
    Prometheus,
}

impl Route {
    /// What is tried over HTTP, in this order.
    pub const HTTP: &[Self] = &[Self::HttpLoads, Self::HttpRollup, Self::Prometheus];
    /// What is tried over gRPC, in this order.
    pub const GRPC: &[Self] = &[Self::GrpcSglang, Self::GrpcVllm];

    /// The name in reports and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::GrpcVllm => "grpc_vllm",
            Self::GrpcSglang => "grpc_sglang",
            Self::HttpLoads => "http_v1_loads",
            Self::HttpRollup => "http_loads",
            Self::Prometheus => "prometheus",
        }
    }
}

/// What a fetch has come to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// An answer that says something.
    Answered,
    /// This route will not answer here, now or in a second.
    NotOffered(NotOffered),
    /// It may well answer the next time.
    TryAgain(TryAgain),
}

/// Why a route is not offered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum NotOffered {
    /// 404, 405, 501, or gRPC's `UNIMPLEMENTED`.
    NoRoute,
    /// Success, and something else is served there.
    OtherSchema,
}

/// Why a route should be asked again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum TryAgain {
    /// No whole answer in time.
    Timeout,
    /// Nobody listens, or the connection was lost before there was an answer.
    Unreachable,
    /// 5xx, or what gRPC has for it.
    ServerError,
    /// 503: it is there, and does not serve now.
    Unavailable,
    /// 401, 403, 407.
    Auth,
    /// Success, and nothing in it: unavailable, not idle.
    Empty,
    /// The answer ends in the middle.
    CutShort,
    /// The answer is longer than what is read.
    TooLong,
    /// Another status, which says nothing about whether the route is there.
    OtherStatus,
}

impl Outcome {
    /// What an HTTP status says by itself; `None` if the body decides.
    pub fn of_http(status: u16) -> Option<Self> {
        Some(match status {
            200 => return None,
            204 => Self::TryAgain(TryAgain::Empty),
            404 | 405 | 501 => Self::NotOffered(NotOffered::NoRoute),
            401 | 403 | 407 => Self::TryAgain(TryAgain::Auth),
            408 => Self::TryAgain(TryAgain::Timeout),
            503 => Self::TryAgain(TryAgain::Unavailable),
            500..=599 => Self::TryAgain(TryAgain::ServerError),
            _ => Self::TryAgain(TryAgain::OtherStatus),
        })
    }

    /// What a gRPC status that is no success says, by its number.
    pub fn of_grpc(code: i32) -> Self {
        match code {
            // CANCELLED is what a client's own time limit looks like.
            1 | 4 => Self::TryAgain(TryAgain::Timeout),
            7 | 16 => Self::TryAgain(TryAgain::Auth),
            12 => Self::NotOffered(NotOffered::NoRoute),
            14 => Self::TryAgain(TryAgain::Unreachable),
            // UNKNOWN, RESOURCE_EXHAUSTED, ABORTED, INTERNAL, DATA_LOSS
            2 | 8 | 10 | 13 | 15 => Self::TryAgain(TryAgain::ServerError),
            _ => Self::TryAgain(TryAgain::OtherStatus),
        }
    }

    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::NotOffered(NotOffered::NoRoute) => "no_route",
            Self::NotOffered(NotOffered::OtherSchema) => "other_schema",
            Self::TryAgain(TryAgain::Timeout) => "timeout",
            Self::TryAgain(TryAgain::Unreachable) => "unreachable",
            Self::TryAgain(TryAgain::ServerError | TryAgain::Unavailable) => "server_error",
            Self::TryAgain(TryAgain::Auth) => "auth",
            Self::TryAgain(TryAgain::Empty) => "empty",
            Self::TryAgain(TryAgain::CutShort) => "cut_short",
            Self::TryAgain(TryAgain::TooLong) => "too_long",
            Self::TryAgain(TryAgain::OtherStatus) => "other_status",
        }
    }
}

/// Settings of a [`Probe`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeConfig {
    /// From one answer to the next question.
    pub interval: Duration,
    /// The first wait after a failure; doubled with each.
    pub retry_min: Duration,
    /// The longest wait after a failure.
    pub retry_max: Duration,
    /// How long a route that is not offered is left alone. An engine may be replaced by one that offers it.
    pub remember: Duration,
}

impl Default for ProbeConfig {
    /// Once a second, as engines renew their figures; ten times more slowly where nobody answers, which is
    /// still well within the 15 s after which a rank becomes unknown.
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            retry_min: Duration::from_secs(1),
            retry_max: Duration::from_secs(10),
            remember: Duration::from_secs(60),
        }
    }
}

/// The shortest of all waits: nonsense from a configuration must not make a probe spin.
const LEAST: Duration = Duration::from_millis(10);

/// What to do next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Ask this route, and say what came of it.
    Fetch(Route),
    /// Nothing before then.
    Wait(Moment),
    /// A fetch is under way: its outcome comes first.
    UnderWay,
}

/// The state of one base URL, however many ranks and workers live on it.
///
/// - One fetch at a time.
/// - A route that is not offered is passed over for [`ProbeConfig::remember`]; the next one is asked at once.
/// - A route that fails otherwise stays the one to ask, later and later, and no lower one is asked instead:
///   figures of two sources with different lags would alternate. Only where another route is known to answer
///   does a failure count as *not offered* for the while.
/// - With no route left, nothing is asked until the first is due again.
#[derive(Clone, Debug)]
pub struct Probe {
    config: ProbeConfig,
    routes: Vec<Memory>,
    /// Which route answered last.
    answers: Option<usize>,
    under_way: Option<usize>,
    due: Moment,
    failures: u32,
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    route: Route,
    closed_until: Option<Moment>,
}

impl Memory {
    fn is_open(&self, now: Moment) -> bool {
        self.closed_until.is_none_or(|until| until <= now)
    }
}

impl Probe {
    /// A base URL of which nothing is known; its first fetch is due at `now`. `routes` are tried in order.
    pub fn new(now: Moment, routes: &[Route], config: ProbeConfig) -> Self {
        let config = ProbeConfig {
            interval: config.interval.max(LEAST),
            retry_min: config.retry_min.max(LEAST),
            retry_max: config.retry_max.max(LEAST),
            remember: config.remember.max(LEAST),
        };
        let routes = routes.iter().map(|&route| Memory { route, closed_until: None }).collect();
        Self { config, routes, answers: None, under_way: None, due: now, failures: 0 }
    }

    /// What to do at `now`. A fetch that is handed out is under way until [`done`](Self::done) is called.
    pub fn next(&mut self, now: Moment) -> Step {
        if self.under_way.is_some() {
            return Step::UnderWay;
        }
        if now < self.due {
            return Step::Wait(self.due);
        }
        match self.routes.iter().position(|memory| memory.is_open(now)) {
            Some(at) => {
                self.under_way = Some(at);
                Step::Fetch(self.routes[at].route)
            }
            None => {
                let opens = self.routes.iter().filter_map(|memory| memory.closed_until).min();
                Step::Wait(opens.unwrap_or(now + self.config.remember))
            }
        }
    }

    /// Says what came of the fetch that is under way. Without one, nothing happens.
    pub fn done(&mut self, now: Moment, outcome: Outcome) {
        let Some(at) = self.under_way.take() else { return };
        match outcome {
            Outcome::Answered => {
                self.routes[at].closed_until = None;
                self.answers = Some(at);
                self.failures = 0;
                self.due = now + self.config.interval;
            }
            Outcome::NotOffered(_) => self.close(at, now),
            Outcome::TryAgain(_) if self.answers.is_some_and(|answers| answers != at) => self.close(at, now),
            Outcome::TryAgain(_) => {
                self.due = now + self.wait_after_failure();
                self.failures = self.failures.saturating_add(1);
            }
        }
    }

    /// Makes the next fetch due at `now`: an engine came back, or its ranks have changed.
    pub fn hurry(&mut self, now: Moment) {
        self.due = self.due.min(now);
        self.failures = 0;
    }

    /// The engine is another one than before: what it does not offer must be found out anew.
    pub fn forget(&mut self, now: Moment) {
        self.routes.iter_mut().for_each(|memory| memory.closed_until = None);
        self.answers = None;
        self.hurry(now);
    }

    /// The route that answered last.
    pub fn answers(&self) -> Option<Route> {
        self.answers.map(|at| self.routes[at].route)
    }

    fn close(&mut self, at: usize, now: Moment) {
        self.routes[at].closed_until = Some(now + self.config.remember);
        if self.answers == Some(at) {
            self.answers = None;
        }
        // The next route is asked within the same round.
        self.due = now;
    }

    fn wait_after_failure(&self) -> Duration {
        let factor = 1_u32.checked_shl(self.failures).unwrap_or(u32::MAX);
        self.config.retry_min.saturating_mul(factor).min(self.config.retry_max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_ROUTE: Outcome = Outcome::NotOffered(NotOffered::NoRoute);
    const TIMEOUT: Outcome = Outcome::TryAgain(TryAgain::Timeout);

    fn at(seconds: u64) -> Moment {
        Moment::from_millis(seconds * 1_000)
    }

    fn probe() -> Probe {
        Probe::new(at(0), Route::HTTP, ProbeConfig::default())
    }

    /// L9: the field's statuses, told apart.
    #[test]
    fn statuses_are_told_apart() {
        for status in [404, 405, 501] {
            assert_eq!(Outcome::of_http(status), Some(NO_ROUTE), "{status}");
        }
        for status in [401, 403, 407, 408, 429, 500, 502, 503, 504, 302, 400, 204, 0, 999] {
            assert!(matches!(Outcome::of_http(status), Some(Outcome::TryAgain(_))), "{status}");
        }
        assert_eq!(Outcome::of_http(200), None);
        for code in -1..20 {
            assert_eq!(Outcome::of_grpc(code) == NO_ROUTE, code == 12, "{code}");
        }
    }

    /// L9: what is not offered is remembered, and the next route is asked at once.
    #[test]
    fn the_route_that_answers_is_remembered() {
        let mut probe = probe();
        assert_eq!(probe.next(at(0)), Step::Fetch(Route::HttpLoads));
        assert_eq!(probe.next(at(0)), Step::UnderWay);
        probe.done(at(0), NO_ROUTE);
        assert_eq!(probe.next(at(0)), Step::Fetch(Route::HttpRollup));
        probe.done(at(0), Outcome::NotOffered(NotOffered::OtherSchema));
        assert_eq!(probe.next(at(0)), Step::Fetch(Route::Prometheus));
        probe.done(at(0), Outcome::Answered);
        assert_eq!(probe.next(at(0)), Step::Wait(at(1)));
        for second in 1..60 {
            assert_eq!(probe.next(at(second)), Step::Fetch(Route::Prometheus), "{second}");
            probe.done(at(second), Outcome::Answered);
        }
        // After a minute the better routes are looked for again; a failure there does not lose what works.
        assert_eq!(probe.next(at(60)), Step::Fetch(Route::HttpLoads));
        probe.done(at(60), TIMEOUT);
        assert_eq!(probe.next(at(60)), Step::Fetch(Route::HttpRollup));
        probe.done(at(60), TIMEOUT);
        assert_eq!(probe.next(at(60)), Step::Fetch(Route::Prometheus));
    }

    /// L9: "try again" asks the same route, more and more seldom, and never a lower one.
    #[test]
    fn failures_keep_the_route_and_back_off() {
        let mut probe = probe();
        let mut now = at(0);
        let mut waits = Vec::new();
        for _ in 0..6 {
            assert_eq!(probe.next(now), Step::Fetch(Route::HttpLoads));
            probe.done(now, TIMEOUT);
            let Step::Wait(until) = probe.next(now) else { unreachable!("a failure was just noted") };
            waits.push(until.since(now).as_secs());
            now = until;
        }
        assert_eq!(waits, [1, 2, 4, 8, 10, 10]);
        assert_eq!(probe.next(now), Step::Fetch(Route::HttpLoads));
        probe.done(now, Outcome::Answered);
        assert_eq!(probe.next(now), Step::Wait(now + Duration::from_secs(1)));
        for _ in 0..200 {
            probe.done(now, TIMEOUT);
            now = now + Duration::from_secs(60);
            assert_eq!(probe.next(now), Step::Fetch(Route::HttpLoads));
        }
    }

    /// L9: a worker that offers nothing is left alone, and asked again when its memory has run out.
    #[test]
    fn nothing_offered_is_not_asked_for_ever() {
        let mut probe = probe();
        for _ in Route::HTTP {
            assert!(matches!(probe.next(at(5)), Step::Fetch(_)));
            probe.done(at(5), NO_ROUTE);
        }
        assert_eq!(probe.next(at(5)), Step::Wait(at(65)));
        assert_eq!(probe.next(at(65)), Step::Fetch(Route::HttpLoads));
    }

    /// Waits of nothing are tamed.
    #[test]
    fn nonsense_does_not_spin() {
        let zero = Duration::ZERO;
        let config = ProbeConfig { interval: zero, retry_min: zero, retry_max: zero, remember: zero };
        for outcome in [Outcome::Answered, TIMEOUT, NO_ROUTE] {
            let mut probe = Probe::new(at(0), &[Route::HttpLoads], config);
            probe.next(at(0));
            probe.done(at(0), outcome);
            assert_eq!(probe.next(at(0)), Step::Wait(at(0) + LEAST));
        }
    }

    /// L16: an engine that came back is asked at once, every route anew.
    #[test]
    fn an_engine_that_came_back_is_asked_at_once() {
        let mut probe = probe();
        probe.next(at(0));
        probe.done(at(0), NO_ROUTE);
        probe.next(at(0));
        probe.done(at(0), Outcome::Answered);
        assert_eq!((probe.next(at(0)), probe.answers()), (Step::Wait(at(1)), Some(Route::HttpRollup)));
        probe.forget(at(0));
        assert_eq!((probe.next(at(0)), probe.answers()), (Step::Fetch(Route::HttpLoads), None));
    }
}

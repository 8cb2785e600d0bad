//! One request at the boundary: what its route demands, and what was noticed on the way in.
//!
//! A layer puts a [`Visit`] into the request. The extractors of body, parameters and path leave there what they
//! ignored; the layer counts it, says it once, and adds it to the answer.

use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::Control;
use super::fields::{Misspelt, Strays};
use super::problem::Problem;
use super::state::{ServiceConfig, ServiceState};

/// What a group of routes demands.
#[derive(Clone, Debug)]
pub(super) struct Rules {
    /// Largest body in bytes.
    limit: usize,
    /// The setting that says so.
    setting: &'static str,
    /// Whether the body is a question: then a field that narrows it is honoured or refused.
    question: bool,
    /// Whether every unknown field is refused.
    strict: bool,
    /// KiB of bodies that may be read at once, over all requests.
    bodies: Arc<Semaphore>,
}

impl Rules {
    /// Of routes whose body carries a prompt.
    pub(super) fn prompts(config: &ServiceConfig, bodies: &Arc<Semaphore>) -> Self {
        Self {
            limit: config.max_prompt_body,
            setting: "[http] max_prompt_body_bytes",
            question: true,
            strict: config.strict,
            bodies: Arc::clone(bodies),
        }
    }

    /// Of all others.
    pub(super) fn others(config: &ServiceConfig, bodies: &Arc<Semaphore>) -> Self {
        Self {
            limit: config.max_body,
            setting: "[http] max_body_bytes",
            question: false,
            strict: config.strict,
            bodies: Arc::clone(bodies),
        }
    }

    /// Largest body in bytes.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }
}

/// Fields that narrow a question: passed over, they would have it answered for others than were asked about.
const NARROWING: [&str; 8] = [
    "instance_id",
    "worker_id",
    "worker",
    "dp_rank",
    "data_parallel_rank",
    "lora_id",
    "lora_name",
    "tenant_id",
];

/// One request. Clones are the same visit.
#[derive(Clone, Debug)]
pub(super) struct Visit(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    rules: Rules,
    ignored: Mutex<Vec<String>>,
    /// Place for the body, until the answer is made.
    place: Mutex<Option<OwnedSemaphorePermit>>,
    begun: AtomicBool,
}

impl Visit {
    fn new(rules: Rules) -> Self {
        let (ignored, place, begun) = (Mutex::default(), Mutex::default(), AtomicBool::new(false));
        Self(Arc::new(Inner { rules, ignored, place, begun }))
    }

    /// The visit of a request; the default rules' where no layer made one.
    pub(super) fn of(extensions: &Extensions) -> Self {
        let none = || {
            let config = ServiceConfig::default();
            Self::new(Rules::others(&config, &Arc::new(Semaphore::new(kib(config.max_body) as usize))))
        };
        extensions.get::<Self>().cloned().unwrap_or_else(none)
    }

    /// Waits until a body of this length may be read; one of unknown length counts as the longest.
    pub(super) async fn take_place(&self, length: Option<usize>) {
        let rules = &self.0.rules;
        let bytes = length.unwrap_or(rules.limit).min(rules.limit);
        let place = Arc::clone(&rules.bodies).acquire_many_owned(kib(bytes)).await;
        // The semaphore is never closed; without a place the body is read all the same.
        *self.0.place.lock() = place.ok();
    }

    /// Notes that the handler's own work may have begun.
    pub(super) fn begin(&self) {
        self.0.begun.store(true, Ordering::Relaxed);
    }

    /// Whether the handler's own work may have begun.
    pub(super) fn has_begun(&self) -> bool {
        self.0.begun.load(Ordering::Relaxed)
    }

    /// Refuses what must not be passed over, and keeps the rest for the answer.
    pub(super) fn settle(&self, strays: Strays) -> Result<(), Problem> {
        self.settle_as(strays, self.0.rules.question)
    }

    /// The same for the parameters of a URL, which are questions on every route.
    pub(super) fn settle_parameters(&self, strays: Strays) -> Result<(), Problem> {
        self.settle_as(strays, true)
    }

    fn settle_as(&self, strays: Strays, question: bool) -> Result<(), Problem> {
        if let Some(misspelt) = strays.misspelt {
            return Err(misspelt.into());
        }
        let last = |path: &String| path.rsplit('.').next().is_some_and(|name| NARROWING.contains(&name));
        if let Some(path) = strays.foreign.iter().find(|path| question && last(path)) {
            let detail =
                format!("{path} cannot narrow what is asked here: leave it out, or ask another route");
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "cannot_narrow", detail).field(path));
        }
        if let Some(path) = strays.foreign.first().filter(|_| self.0.rules.strict) {
            let detail =
                format!("{path} is not known here, and the setting [http] strict refuses such fields");
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "unknown_field", detail).field(path));
        }
        self.0.ignored.lock().extend(strays.foreign);
        Ok(())
    }

    /// The refusal of a body that is too long.
    pub(super) fn too_large(&self) -> Problem {
        let Rules { limit, setting, .. } = self.0.rules;
        let detail = format!(
            "the body is longer than {limit} bytes, the limit of this route; send less, or raise {setting}"
        );
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Visit {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::of(&parts.extensions))
    }
}

impl From<Misspelt> for Problem {
    fn from(Misspelt { path, meant }: Misspelt) -> Self {
        let detail = format!("{path} is not known; `{meant}` was meant? Correct it or leave it out");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "misspelt_field", detail).field(path).meant(meant)
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1_024)).unwrap_or(u32::MAX)
}

/// The layer: makes the visit, and adds to the answer what was ignored.
pub(super) async fn visited<C: Control>(
    State((state, rules)): State<(ServiceState<C>, Rules)>,
    mut request: Request,
    next: Next,
) -> Response {
    let visit = Visit::new(rules);
    request.extensions_mut().insert(visit.clone());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let ignored = std::mem::take(&mut *visit.0.ignored.lock());
    if ignored.is_empty() {
        return response;
    }
    state.metrics().ignored(ignored.len());
    state.ignored().say(route.as_ref().map_or("?", |route| route.as_str()), &ignored);
    named(response, &ignored).await
}

/// Whether a request that was given up may have changed the fleet, or may yet.
pub(super) fn may_take_effect(visit: &Visit, method: &Method, path: &str) -> bool {
    // The other changes are made without waiting for anyone, so they are done or not begun.
    let waits = ["/register", "/unregister", "/workers"].iter().any(|route| path.starts_with(route));
    // Nothing of a DELETE is waited for before its work begins.
    (visit.has_begun() || *method == Method::DELETE) && *method != Method::GET && waits
}

/// An answer whose keys are data (Mooncake's, by tenant): nothing is added to it but a header.
#[derive(Clone, Copy)]
pub(super) struct KeyedByData;

async fn named(response: Response, ignored: &[String]) -> Response {
    let (mut head, body) = response.into_parts();
    let visible = |letter: char| if letter.is_ascii_graphic() { letter } else { '?' };
    let names: Vec<String> = ignored.iter().map(|name| name.chars().map(visible).collect()).collect();
    if let Ok(value) = HeaderValue::from_str(&names.join(", ")) {
        head.headers.insert("x-rankwise-ignored", value);
    }
    let is_json =
        head.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().ends_with(b"json"));
    if !is_json || head.extensions.get::<KeyedByData>().is_some() {
        return Response::from_parts(head, body);
    }
    // Our own answers are whole in memory already.
    let Ok(bytes) = to_bytes(body, usize::MAX).await else {
        return Response::from_parts(head, Body::empty());
    };
    let bytes = with_ignored(bytes, ignored);
    head.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(head, Body::from(bytes))
}

/// The JSON object with `ignored` behind its last field; anything else as it is.
fn with_ignored(body: Bytes, ignored: &[String]) -> Bytes {
    let Some(head) = body.strip_suffix(b"}").filter(|head| head.starts_with(b"{")) else { return body };
    let Ok(list) = serde_json::to_string(ignored) else { return body };
    let comma = if head.len() > 1 { "," } else { "" };
    [head, comma.as_bytes(), b"\"ignored\":", list.as_bytes(), b"}"].concat().into()
}

/// What was said in the log already.
#[derive(Debug, Default)]
pub(super) struct Said(Mutex<HashSet<(String, String)>>);

/// Pairs of route and field that are said: a fleet of clients has a few dozen, and the log is not a client's.
const MAX_SAID: usize = 512;

impl Said {
    fn say(&self, route: &str, fields: &[String]) {
        let mut said = self.0.lock();
        for field in fields {
            if said.len() < MAX_SAID && said.insert((route.to_owned(), field.clone())) {
                tracing::warn!(route, field, "ignored a field that is not known; said once");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_object_is_added_to() {
        let ignored = ["a\"b".to_owned(), "c".to_owned()];
        let with = |body: &'static str| with_ignored(Bytes::from_static(body.as_bytes()), &ignored);
        assert_eq!(with("{\"x\":1}"), "{\"x\":1,\"ignored\":[\"a\\\"b\",\"c\"]}");
        assert_eq!(with("{}"), "{\"ignored\":[\"a\\\"b\",\"c\"]}");
        assert_eq!(with("[1]"), "[1]");
        assert_eq!(with(""), "");
    }
}

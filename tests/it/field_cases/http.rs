//! What the HTTP service says, asked over a real port. It reads the case's own product; commands that would
//! change the fleet are not its to carry out here.

use std::collections::BTreeMap;

use rankwise::fleet::{Change, WorkerSpec};
use rankwise::ids::{Moment, RankKey, WorkerId};
use rankwise::service::{Control, ControlError, ServiceConfig, ServiceState, app, serve};
use reqwest::Method;
use serde_json::Value;
use tokio::net::TcpListener;

use super::expect::same_counts;
use super::reading::{Fields, Run, fail, not_runnable, text};
use super::stage::Stage;

impl Stage {
    pub(super) fn http(&mut self, step: &Value) -> Run {
        let step = Fields::only("http", step, &["request", "expect"])?;
        let known = ["method", "path", "path_is", "body", "body_raw"];
        let request = Fields::only("http request", step.need("request")?, &known)?;
        let expect =
            Fields::only("http expect", step.need("expect")?, &["status", "status_class", "matches"])?;
        let (method, path) = route(&request)?;
        let body = match (request.text("body_raw")?, request.get("body")) {
            (Some(raw), _) => Some(raw.to_owned()),
            (None, body) => body.map(Value::to_string),
        };
        let (status, answer) = self.ask(&method, &path, body)?;
        let wrong = |expected: u64| fail(format!("status {status}, expected {expected}: {answer}"));
        if let Some(expected) = expect.count("status")?.filter(|expected| *expected != u64::from(status)) {
            return wrong(expected);
        }
        if let Some(class) = expect.count("status_class")?.filter(|class| *class != u64::from(status / 100)) {
            return wrong(class * 100);
        }
        match expect.get("matches") {
            Some(expected) => same_counts("match", matches_of(&answer)?, expected),
            None => Ok(()),
        }
    }

    /// `absent_label`, `present_label`: no series, or some series, has all these labels.
    pub(super) fn expect_metrics(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_metrics", step, &["absent_label", "present_label"])?;
        let (status, answer) = self.ask(&Method::GET, "/metrics", None)?;
        if status != 200 {
            return fail(format!("status {status}: {answer}"));
        }
        for (field, wanted) in [("absent_label", false), ("present_label", true)] {
            let Some(labels) = step.object(field)? else { continue };
            let mut pairs = Vec::new();
            for (name, value) in labels.entries() {
                pairs.push(format!("{name}=\"{}\"", text(name, value)?));
            }
            let has = |line: &&str| pairs.iter().all(|pair| line.contains(pair.as_str()));
            match answer.lines().filter(|line| !line.starts_with('#')).find(has) {
                Some(line) if !wanted => return fail(format!("there is a series {line}")),
                None if wanted => return fail(format!("no series has {pairs:?}")),
                _ => {}
            }
        }
        Ok(())
    }

    /// Status and body of one answer.
    fn ask(&self, method: &Method, path: &str, body: Option<String>) -> Run<(u16, String)> {
        let state = ServiceState::new(Reading(self.now), self.router.clone(), ServiceConfig::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let answer = runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}{path}", listener.local_addr().unwrap());
            let service = tokio::spawn(serve(listener, app(state), std::future::pending()));
            let mut request = reqwest::Client::new().request(method.clone(), url);
            if let Some(body) = body {
                request = request.header("content-type", "application/json").body(body);
            }
            let response = request.send().await?;
            let status = response.status().as_u16();
            let text = response.text().await?;
            service.abort();
            Ok::<_, reqwest::Error>((status, text))
        });
        answer.or_else(|why| fail(format!("no answer: {why}")))
    }
}

/// The clock of the case, and nothing to command.
#[derive(Clone)]
struct Reading(Moment);

impl Control for Reading {
    async fn declare(&self, _spec: WorkerSpec) -> Result<Change, ControlError> {
        Err(ControlError::Closed)
    }

    async fn add_rank(&self, _spec: WorkerSpec) -> Result<Change, ControlError> {
        Err(ControlError::Closed)
    }

    async fn remove_rank(&self, _rank: RankKey) -> Result<Option<Change>, ControlError> {
        Err(ControlError::Closed)
    }

    async fn withdraw(&self, _worker: WorkerId) -> Result<Option<Change>, ControlError> {
        Err(ControlError::Closed)
    }

    fn now(&self) -> Moment {
        self.0
    }
}

/// The product's name of a route that changes no fleet.
fn route(request: &Fields<'_>) -> Run<(Method, String)> {
    let method = match request.text("method")?.unwrap_or("GET") {
        "GET" => Method::GET,
        "POST" => Method::POST,
        other => return not_runnable(format!("http with method {other}")),
    };
    let path = match (request.text("path")?, request.text("path_is")?) {
        (Some(path), _) => path,
        (None, Some("query by hashes")) => "/query_by_hash",
        (None, Some("query")) => "/query",
        (None, Some("select")) => "/select",
        (None, Some("loads")) => "/loads",
        (None, Some("health")) => "/health",
        (None, Some("metrics")) => "/metrics",
        (None, other) => return not_runnable(format!("http with path_is {}", other.unwrap_or("missing"))),
    };
    let bare = path.split('?').next().unwrap_or(path);
    let reads = ["/query", "/query_by_hash", "/select", "/loads", "/overlap_scores", "/potential_loads"];
    if method == Method::POST && !reads.contains(&bare) {
        return not_runnable(format!("http with POST {bare}"));
    }
    Ok((method, path.to_owned()))
}

/// Matched blocks per rank; the service answers in tokens.
fn matches_of(answer: &str) -> Run<BTreeMap<RankKey, u64>> {
    let Ok(answer) = serde_json::from_str::<Value>(answer) else { return fail(format!("no JSON: {answer}")) };
    let Some(block_size) = answer["block_size"].as_u64().filter(|size| *size > 0) else {
        return fail(format!("no block size in {answer}"));
    };
    let mut matches = BTreeMap::new();
    for (worker, ranks) in Fields::of("scores", &answer["scores"])?.entries() {
        for (rank, tokens) in Fields::of("scores", ranks)?.entries() {
            let read = rank.parse().ok().zip(tokens.as_u64());
            let Some((rank, tokens)) = read else { return fail(format!("no score: {answer}")) };
            if tokens % block_size != 0 {
                return fail(format!("{tokens} tokens are no blocks"));
            }
            matches.insert(RankKey::new(worker, rank), tokens / block_size);
        }
    }
    Ok(matches)
}

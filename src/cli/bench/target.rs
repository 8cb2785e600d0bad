//! The service under test, as a client sees it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longer than a service takes for any request: its own limit is ten seconds.
const TIMEOUT: Duration = Duration::from_secs(15);

/// A service at a URL. Connections are kept and used again.
#[derive(Clone, Debug)]
pub struct Target {
    http: reqwest::Client,
    base: String,
}

/// A request that is made once and sent often.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The whole URL.
    pub url: String,
    /// What is posted; a request without it is a GET.
    pub body: Option<Bytes>,
}

impl Target {
    /// The service at `base`, with room for so many idle connections.
    ///
    /// # Errors
    /// When the HTTP client cannot be made.
    pub fn new(base: &str, connections: usize) -> Result<Self> {
        let http = reqwest::Client::builder()
            // A proxy in the environment must not come between.
            .no_proxy()
            .pool_max_idle_per_host(connections)
            .tcp_nodelay(true)
            .timeout(TIMEOUT)
            .build()
            .context("cannot make an HTTP client")?;
        Ok(Self { http, base: base.trim_end_matches('/').to_owned() })
    }

    /// A request to be sent often.
    pub fn prepared(&self, route: &str, body: Option<Vec<u8>>) -> Prepared {
        Prepared { url: format!("{}{route}", self.base), body: body.map(Bytes::from) }
    }

    /// Sends a prepared request and reads the answer's body.
    ///
    /// # Errors
    /// A service that cannot be reached or does not say success.
    pub async fn send(&self, prepared: &Prepared) -> Result<Bytes> {
        let request = match &prepared.body {
            Some(body) => self
                .http
                .post(&prepared.url)
                .header(reqwest::header::CONTENT_TYPE, "application/json")
                .body(body.clone()),
            None => self.http.get(&prepared.url),
        };
        successful(&prepared.url, request).await
    }

    /// Posts `body` and reads the answer.
    ///
    /// # Errors
    /// A service that cannot be reached, refuses, or answers something else.
    pub async fn post<T: DeserializeOwned>(&self, route: &str, body: &impl Serialize) -> Result<T> {
        self.read(route, self.http.post(format!("{}{route}", self.base)).json(body)).await
    }

    /// Deletes what is at `route`.
    ///
    /// # Errors
    /// As [`Target::post`].
    pub async fn delete(&self, route: &str) -> Result<serde_json::Value> {
        self.read(route, self.http.delete(format!("{}{route}", self.base))).await
    }

    async fn read<T: DeserializeOwned>(&self, route: &str, request: reqwest::RequestBuilder) -> Result<T> {
        let body = successful(&format!("{}{route}", self.base), request).await?;
        serde_json::from_slice(&body).with_context(|| format!("{route} answered something unexpected"))
    }
}

async fn successful(url: &str, request: reqwest::RequestBuilder) -> Result<Bytes> {
    let reach = || format!("cannot reach {url}");
    let answer = request.send().await.with_context(reach)?;
    let status = answer.status();
    let body = answer.bytes().await.with_context(reach)?;
    if !status.is_success() {
        let problem: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        bail!("{url} answered {status}: {}", problem["detail"].as_str().unwrap_or("no detail"));
    }
    Ok(body)
}

//! Sends conversations to engines by one policy, and notes what the engines answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use rankwise::ids::RankKey;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::report::Tally;
use super::stage::{MODEL, Stage, Target};
use super::traffic::{Conversation, Turn};

/// How the rank of a request is chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RoutingPolicy {
    /// One after the other.
    RoundRobin,
    /// The rank with the fewest requests of ours in flight, the lowest number on a tie.
    LeastLoad,
    /// As the service says.
    KvAware,
}

impl RoutingPolicy {
    /// Its name in the result.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::LeastLoad => "least_load",
            Self::KvAware => "kv_aware",
        }
    }
}

/// A router and its clients.
pub struct Driver {
    policy: RoutingPolicy,
    http: reqwest::Client,
    service: String,
    targets: Vec<Target>,
    in_flight: Vec<AtomicUsize>,
    next: AtomicU64,
    tally: Tally,
}

/// Where a request goes.
struct Choice {
    target: usize,
    /// The reservation, where the service keeps one.
    booking: Option<String>,
    /// Prompt tokens that the service expects to be cached there.
    predicted: Option<u64>,
}

impl Driver {
    /// A router of this policy for the stage's ranks.
    ///
    /// # Errors
    /// When there is no HTTP client to be had.
    pub fn new(stage: &Stage, policy: RoutingPolicy) -> Result<Arc<Self>> {
        // All addresses are ours; a proxy in the environment must not come between.
        let http = reqwest::Client::builder()
            .tcp_nodelay(true)
            .no_proxy()
            .build()
            .context("cannot make an HTTP client")?;
        let targets = stage.targets.clone();
        Ok(Arc::new(Self {
            policy,
            http,
            service: format!("http://{}", stage.address()),
            in_flight: targets.iter().map(|_| AtomicUsize::new(0)).collect(),
            next: AtomicU64::new(0),
            tally: Tally::new(targets.iter().map(|target| target.rank.clone())),
            targets,
        }))
    }

    /// What has been answered so far.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Holds a conversation from `start` on. It ends with the first request that fails.
    pub async fn converse(self: Arc<Self>, conversation: Conversation, start: Instant) {
        let mut text = conversation.system;
        for turn in &conversation.turns {
            sleep_until(start + turn.at).await;
            text.extend(&turn.words);
            if let Err(error) = self.ask(&mut text, turn).await {
                self.tally.failed(&error);
                return;
            }
        }
    }

    /// One turn: routes it, reads the answer as it comes, and adds it to the text.
    async fn ask(&self, text: &mut Vec<u32>, turn: &Turn) -> Result<()> {
        let asked = Instant::now();
        let choice = self.route(text).await?;
        self.in_flight[choice.target].fetch_add(1, Ordering::Relaxed);
        let answered = self.generate(&choice, text, turn, asked).await;
        self.in_flight[choice.target].fetch_sub(1, Ordering::Relaxed);
        if let Some(id) = &choice.booking {
            let freed = self.http.delete(format!("{}/reservations/{id}", self.service)).send().await;
            freed.context("cannot free a reservation")?;
        }
        answered
    }

    async fn route(&self, prompt: &[u32]) -> Result<Choice> {
        let target = match self.policy {
            RoutingPolicy::RoundRobin => {
                // The remainder is below the number of ranks.
                (self.next.fetch_add(1, Ordering::Relaxed) % self.targets.len() as u64) as usize
            }
            RoutingPolicy::LeastLoad => {
                let loads = self.in_flight.iter().map(|count| count.load(Ordering::Relaxed));
                loads.enumerate().min_by_key(|(_, count)| *count).context("there is no rank")?.0
            }
            RoutingPolicy::KvAware => return self.select(prompt).await,
        };
        Ok(Choice { target, booking: None, predicted: None })
    }

    async fn select(&self, prompt: &[u32]) -> Result<Choice> {
        let body = json!({ "model_name": MODEL, "token_ids": prompt });
        let asked = self.http.post(format!("{}/select_and_reserve", self.service)).json(&body).send().await;
        let answer = asked.context("cannot reach the service")?;
        let status = answer.status();
        let picked: Value = answer.json().await.context("the service answered no JSON")?;
        if !status.is_success() {
            bail!("the service answered {status}: {}", picked["detail"].as_str().unwrap_or("no detail"));
        }
        let worker = picked["worker_id"].as_str().context("the pick names no worker")?;
        let dp_rank = picked["dp_rank"].as_u64().context("the pick names no rank")?;
        let rank = RankKey::new(worker, u32::try_from(dp_rank)?);
        let target = self.targets.iter().position(|target| target.rank == rank);
        let spared = picked["effective_prefill_tokens"].as_u64();
        Ok(Choice {
            target: target.with_context(|| format!("the service picks {rank}, which is not there"))?,
            booking: picked["selection_id"].as_str().map(ToOwned::to_owned),
            predicted: spared.map(|left| (prompt.len() as u64).saturating_sub(left)),
        })
    }

    async fn generate(
        &self,
        choice: &Choice,
        text: &mut Vec<u32>,
        turn: &Turn,
        asked: Instant,
    ) -> Result<()> {
        let target = &self.targets[choice.target];
        let body = json!({
            "model": MODEL, "prompt": text, "max_tokens": turn.answer, "stream": true,
            "stream_options": { "include_usage": true }, "return_token_ids": true,
        });
        let request = self.http.post(format!("{}/v1/completions", target.url)).json(&body);
        let sent = request.header("X-data-parallel-rank", target.local).send().await;
        let answer = sent.with_context(|| format!("cannot reach {}", target.rank))?;
        if !answer.status().is_success() {
            bail!("{} answered {}", target.rank, answer.status());
        }
        let mut events = Events { answer, buffer: Vec::new() };
        let mut first = None;
        while let Some(event) = events.next().await? {
            let tokens = event["choices"][0]["token_ids"].as_array();
            for token in tokens.into_iter().flatten().filter_map(Value::as_u64) {
                if first.is_none() {
                    first = Some(asked.elapsed());
                    self.prefilled(choice);
                }
                text.push(u32::try_from(token)?);
            }
            let usage = &event["usage"];
            if let (Some(first), Some(prompt)) = (first, usage["prompt_tokens"].as_u64()) {
                let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
                let cached =
                    cached.with_context(|| format!("{} does not say what was cached", target.rank))?;
                self.tally.answered(choice.target, first, prompt, cached, choice.predicted);
                return Ok(());
            }
            if let Some(why) = event["error"]["message"].as_str() {
                bail!("{}: {why}", target.rank);
            }
        }
        bail!("{} ended its answer early", target.rank)
    }

    /// Tells the service that the prompt is computed; nobody waits for its answer.
    fn prefilled(&self, choice: &Choice) {
        if let Some(id) = &choice.booking {
            let told = self.http.post(format!("{}/reservations/{id}/prefill_complete", self.service)).send();
            // A reservation that is told nothing is freed with its request all the same.
            tokio::spawn(async move { drop(told.await) });
        }
    }
}

/// Server-sent events of an answer, as JSON.
struct Events {
    answer: reqwest::Response,
    buffer: Vec<u8>,
}

impl Events {
    /// The next event; `None` at the end.
    async fn next(&mut self) -> Result<Option<Value>> {
        loop {
            while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).collect();
                match line.trim_ascii().strip_prefix(b"data: ") {
                    None => {}
                    Some(b"[DONE]") => return Ok(None),
                    Some(data) => {
                        return serde_json::from_slice(data).map(Some).context("an event is no JSON");
                    }
                }
            }
            match self.answer.chunk().await.context("an answer broke off")? {
                Some(bytes) => self.buffer.extend_from_slice(&bytes),
                None => return Ok(None),
            }
        }
    }
}

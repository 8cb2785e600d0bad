//! A point against an engine's `/v1/completions`, as its clients see it: streamed, token by token.

use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use reqwest::redirect::Policy;
use reqwest::{Client, Response};
use serde_json::{Value, json};
use thiserror::Error;

use super::grid::Point;
use super::measured::{Measured, Recorder};
use super::runner::PointRunner;
use crate::ids::LocalRank;

/// How long a connection may take to be made. The time of an answer is the point's limit.
const CONNECT: Duration = Duration::from_secs(5);

/// Longest line of a stream. A chunk has a few hundred bytes, and some engines put usage and logprobs in it.
const MAX_LINE: usize = 1 << 20;

/// What is kept of an engine's complaint.
const MAX_COMPLAINT: usize = 300;

/// Token ids of prompts. Every vocabulary in use has more than that many, and special tokens lie at the ends.
const TOKEN_IDS: std::ops::Range<u32> = 1_000..30_000;

/// Runs points against one rank of an OpenAI-compatible engine.
///
/// Prompts are random tokens, so that no prefix is in a cache. Requests ask for exactly the point's tokens
/// (`ignore_eos`) at temperature 0. A chunk of the stream counts as a token.
#[derive(Debug)]
pub struct Completions {
    client: Client,
    url: String,
    model: String,
    pin: Option<LocalRank>,
    random: StdRng,
}

/// Why a request did not give what was asked for.
#[derive(Debug, Error)]
pub enum RequestFailed {
    /// The engine cannot be reached, or hangs up.
    #[error("{url}: {}", causes(error))]
    Http {
        /// What was asked.
        url: String,
        /// What the HTTP client says.
        error: reqwest::Error,
    },
    /// The engine refuses, or breaks off with an error.
    #[error("{url} answered {status}: {complaint}")]
    Refused {
        /// What was asked.
        url: String,
        /// The status, 200 where the stream broke off.
        status: u16,
        /// What the engine says.
        complaint: String,
    },
    /// The stream is none, or ends before its end mark or without a token.
    #[error("{url}: {why}")]
    Stream {
        /// What was asked.
        url: String,
        /// What is wrong.
        why: &'static str,
    },
}

impl Completions {
    /// A runner for the engine at `base` (`http://host:port`) that serves `model`. With `pin`, each request is
    /// sent to that rank of it: as vLLM wants it (a header) and as SGLang does (a field). `seed` chooses the
    /// prompts; ranks that share an engine need different ones.
    ///
    /// # Errors
    /// When the system gives no HTTP client.
    pub fn new(base: &str, model: &str, pin: Option<LocalRank>, seed: u64) -> Result<Self, reqwest::Error> {
        let client =
            Client::builder().tcp_nodelay(true).no_proxy().redirect(Policy::none()).connect_timeout(CONNECT);
        Ok(Self {
            client: client.build()?,
            url: format!("{}/v1/completions", base.trim_end_matches('/')),
            model: model.to_owned(),
            pin,
            random: StdRng::seed_from_u64(seed),
        })
    }

    fn bodies(&mut self, point: &Point) -> Vec<Value> {
        (0..point.width)
            .map(|_| {
                let prompt: Vec<u32> =
                    (0..point.prompt_tokens).map(|_| self.random.random_range(TOKEN_IDS)).collect();
                let mut body = json!({
                    "model": self.model,
                    "prompt": prompt,
                    "max_tokens": point.output_tokens,
                    "temperature": 0,
                    "ignore_eos": true,
                    "stream": true,
                });
                if let Some(LocalRank(rank)) = self.pin {
                    body["routed_dp_rank"] = json!(rank);
                }
                body
            })
            .collect()
    }

    async fn ask(&self, body: &Value) -> Result<Answer, RequestFailed> {
        let mut request = self.client.post(&self.url).json(body);
        if let Some(LocalRank(rank)) = self.pin {
            request = request.header("X-data-parallel-rank", rank);
        }
        let began = Instant::now();
        let response = request.send().await.map_err(|error| self.http(error))?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            let complaint = response.text().await.unwrap_or_default();
            return Err(self.refused(status, &complaint));
        }
        self.read(began, response).await
    }

    /// Reads the stream to its end mark.
    async fn read(&self, began: Instant, mut response: Response) -> Result<Answer, RequestFailed> {
        let mut tokens: Vec<Instant> = Vec::new();
        let mut lines = Lines::default();
        while let Some(bytes) = response.chunk().await.map_err(|error| self.http(error))? {
            let arrived = Instant::now();
            lines.push(&bytes).map_err(|why| self.stream(why))?;
            while let Some(line) = lines.next() {
                match chunk(&line).map_err(|why| self.stream(why))? {
                    Chunk::Token => tokens.push(arrived),
                    Chunk::Other => {}
                    Chunk::Error(complaint) => return Err(self.refused(200, &complaint)),
                    Chunk::End => return Answer::new(began, &tokens).ok_or_else(|| self.stream(NO_TOKEN)),
                }
            }
        }
        Err(self.stream("the stream ended before its end mark"))
    }

    fn http(&self, error: reqwest::Error) -> RequestFailed {
        RequestFailed::Http { url: self.url.clone(), error: error.without_url() }
    }

    fn refused(&self, status: u16, complaint: &str) -> RequestFailed {
        let complaint = complaint.chars().take(MAX_COMPLAINT).collect();
        RequestFailed::Refused { url: self.url.clone(), status, complaint }
    }

    fn stream(&self, why: &'static str) -> RequestFailed {
        RequestFailed::Stream { url: self.url.clone(), why }
    }
}

const NO_TOKEN: &str = "the answer has no token";

impl PointRunner for Completions {
    type Error = RequestFailed;

    /// Once the point's width: connections are made, and the engine has captured and compiled what it does.
    async fn warm_up(&mut self, point: &Point) -> Result<(), RequestFailed> {
        let bodies = self.bodies(point);
        try_join_all(bodies.iter().map(|body| self.ask(body))).await?;
        Ok(())
    }

    async fn run(&mut self, point: &Point) -> Result<Measured, RequestFailed> {
        let (mut ttft, mut itl, mut e2e) = (Recorder::new(), Recorder::new(), Recorder::new());
        let mut output_tokens = 0;
        let mut elapsed = Duration::ZERO;
        for _ in 0..point.rounds() {
            // Made before the clock starts: long prompts take a while to write.
            let bodies = self.bodies(point);
            let began = Instant::now();
            let answers = try_join_all(bodies.iter().map(|body| self.ask(body))).await?;
            elapsed += began.elapsed();
            for answer in answers {
                ttft.record(answer.ttft);
                e2e.record(answer.e2e);
                answer.gaps.iter().for_each(|gap| itl.record(*gap));
                output_tokens += answer.gaps.len() as u64 + 1;
            }
        }
        Ok(Measured {
            ttft: ttft.recorded(),
            itl: itl.recorded(),
            e2e: e2e.recorded(),
            output_tokens,
            elapsed_us: u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX),
        })
    }
}

/// One request's times.
struct Answer {
    ttft: Duration,
    gaps: Vec<Duration>,
    e2e: Duration,
}

impl Answer {
    fn new(began: Instant, tokens: &[Instant]) -> Option<Self> {
        let (first, last) = (tokens.first()?, tokens.last()?);
        let gaps = tokens.windows(2).map(|pair| pair[1].duration_since(pair[0])).collect();
        Some(Self { ttft: first.duration_since(began), gaps, e2e: last.duration_since(began) })
    }
}

/// An error and what is behind it: the HTTP client's own words leave out why.
fn causes(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Lines of a stream that arrives in pieces.
#[derive(Default)]
struct Lines {
    pending: Vec<u8>,
    /// How much of `pending` has been handed out.
    taken: usize,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) -> Result<(), &'static str> {
        self.pending.drain(..self.taken);
        self.taken = 0;
        if self.pending.len() > MAX_LINE {
            return Err("a line of the stream is too long");
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        let rest = &self.pending[self.taken..];
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]).to_vec();
        self.taken += end + 1;
        Some(line)
    }
}

/// What a line of the stream means.
#[derive(PartialEq, Eq, Debug)]
enum Chunk {
    Token,
    End,
    Error(String),
    Other,
}

fn chunk(line: &[u8]) -> Result<Chunk, &'static str> {
    let Some(data) = line.strip_prefix(b"data:") else { return Ok(Chunk::Other) };
    let data = data.trim_ascii();
    if data == b"[DONE]" {
        return Ok(Chunk::End);
    }
    let value: Value = serde_json::from_slice(data).map_err(|_| "a chunk of the stream is no JSON")?;
    if let Some(error) = value.get("error").filter(|error| !error.is_null()) {
        let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
        return Ok(Chunk::Error(message));
    }
    let Some(choice) = value["choices"].get(0) else { return Ok(Chunk::Other) };
    // The last chunk may bring a token or only the reason; a token in the middle may have no text of its own.
    let text = choice["text"].as_str().is_some_and(|text| !text.is_empty());
    Ok(if text || choice["finish_reason"].is_null() { Chunk::Token } else { Chunk::Other })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lines_come_whole_whatever_the_pieces() {
        let text = b"data: 1\n\r\ndata: 2\r\n\ndata: ";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let mut seen = Vec::new();
            for piece in text.chunks(size) {
                lines.push(piece).unwrap();
                seen.extend(std::iter::from_fn(|| lines.next()));
            }
            assert_eq!(seen, [&b"data: 1"[..], b"", b"data: 2", b""]);
        }
        let mut lines = Lines::default();
        lines.push(&vec![b'x'; MAX_LINE + 1]).unwrap();
        assert!(lines.next().is_none() && lines.push(b"x").is_err());
    }

    #[test]
    fn chunks_are_told_apart() {
        let of = |line: &str| chunk(line.as_bytes()).unwrap();
        let text = |text: &str, finish: &str| {
            of(&format!(r#"data: {{"choices": [{{"text": "{text}", "finish_reason": {finish}}}]}}"#))
        };
        assert_eq!(text("a", "null"), Chunk::Token);
        assert_eq!(text("", "null"), Chunk::Token);
        assert_eq!(text("a", "\"length\""), Chunk::Token);
        assert_eq!(text("", "\"length\""), Chunk::Other);
        assert_eq!(of(r#"data: {"choices": [], "usage": {}}"#), Chunk::Other);
        assert_eq!(of(": keep-alive"), Chunk::Other);
        assert_eq!(of("data: [DONE]"), Chunk::End);
        assert_eq!(of(r#"data: {"error": {"message": "no"}}"#), Chunk::Error("no".to_owned()));
        assert!(chunk(b"data: {").is_err());
    }
}

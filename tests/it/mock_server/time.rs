//! T3: the mock's answers take as long as its time model says, over every socket that it serves.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rankwise::ids::{DpRank, SourceId};
use rankwise::ingest::{Closed, Sink, StreamEvent, SubscriberConfig, spawn_subscriber};
use rankwise::mock::server::{Fleet, FleetConfig, Next};
use rankwise::mock::{EngineConfig, Shape, Timing};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use tokio::runtime::Handle;

/// Requests behind each median.
const REQUESTS: usize = 50;

/// Measured may differ from the model by this share.
const TOLERANCE: f64 = 0.1;

/// A machine that is busy with something else measures that. The tolerance stays; the attempt is repeated.
const ATTEMPTS: usize = 5;

/// As in the report that showed 43 ms for all of them; a partial last block each.
const PROMPT: u32 = 129;

/// Tokens of each answer.
const ANSWER: u32 = 3;

/// What the engine's own time model says, at speed 1.
struct Model {
    ttft: Duration,
    itl: Duration,
}

impl Model {
    fn of(timing: &Timing) -> Self {
        assert!((timing.speed - 1.0).abs() < f64::EPSILON);
        Self { ttft: timing.step(PROMPT as usize, false), itl: timing.step(0, true) }
    }

    fn whole(&self) -> Duration {
        self.ttft + self.itl * (ANSWER - 1)
    }
}

/// Which way a request goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Completion,
    Chat,
    WholeCompletion,
    WholeChat,
    InProcess,
}

const WAYS: [Way; 5] = [Way::Completion, Way::Chat, Way::WholeCompletion, Way::WholeChat, Way::InProcess];

/// One request's times: to each token, or to the whole answer.
type Times = Vec<Duration>;

struct Measured {
    what: &'static str,
    median: Duration,
    model: Duration,
}

impl Measured {
    fn is_true(&self) -> bool {
        let (median, model) = (self.median.as_secs_f64(), self.model.as_secs_f64());
        (median - model).abs() <= TOLERANCE * model
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}, by the model {:?}", self.what, self.median, self.model)
    }
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

/// A mock, its client, and a number that makes every prompt new to its cache.
struct Bench {
    fleet: Fleet,
    client: Client,
    fresh: u32,
}

impl Bench {
    async fn start(shape: Shape) -> Self {
        let engine = EngineConfig { shape, ..EngineConfig::default() };
        let config = FleetConfig { engine, ranks: 1, ..FleetConfig::default() };
        let client = Client::builder().no_proxy().build().unwrap();
        Self { fleet: Fleet::start(config).await.unwrap(), client, fresh: 0 }
    }

    fn prompt(&mut self) -> Vec<u32> {
        self.fresh += 1;
        (0..PROMPT).map(|at| if at == 0 { self.fresh } else { at }).collect()
    }

    async fn ask(&mut self, way: Way) -> Times {
        let prompt = self.prompt();
        let streamed = matches!(way, Way::Completion | Way::Chat);
        let url = &self.fleet.workers()[0].url;
        let (path, mut body) = match way {
            Way::InProcess => return self.in_process(prompt).await,
            Way::Completion | Way::WholeCompletion => ("/v1/completions", json!({ "prompt": prompt })),
            Way::Chat | Way::WholeChat => ("/v1/chat/completions", json!({ "messages": messages(&prompt) })),
        };
        body["max_tokens"] = json!(ANSWER);
        body["stream"] = json!(streamed);
        let request = self.client.post(format!("{url}{path}")).json(&body);
        let began = Instant::now();
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), 200, "{way:?}");
        match streamed {
            true => stream(began, response).await,
            false => {
                let answer: Value = response.json().await.unwrap();
                assert_eq!(answer["usage"]["prompt_tokens"], PROMPT, "{way:?}");
                assert_eq!(answer["usage"]["completion_tokens"], ANSWER);
                vec![began.elapsed()]
            }
        }
    }

    async fn in_process(&self, prompt: Vec<u32>) -> Times {
        let began = Instant::now();
        let mut answer = self.fleet.rank(0, DpRank(0)).unwrap().generate(prompt, ANSWER).await.unwrap();
        let mut times = Vec::new();
        while let Next::Token(_) = answer.next().await.unwrap() {
            times.push(began.elapsed());
        }
        times
    }

    /// The medians of so many requests one after the other, of whichever ways.
    async fn measure(&mut self, way: Way) -> Vec<Measured> {
        let model = Model::of(&EngineConfig::default().timing);
        let (mut firsts, mut gaps) = (Vec::new(), Vec::new());
        // The first makes the connection.
        self.ask(way).await;
        for _ in 0..REQUESTS {
            let times = self.ask(way).await;
            gaps.extend(times.windows(2).map(|pair| pair[1] - pair[0]));
            firsts.push(times[0]);
        }
        let first = median(firsts);
        match gaps.is_empty() {
            true => vec![Measured { what: "whole answer", median: first, model: model.whole() }],
            false => vec![
                Measured { what: "TTFT", median: first, model: model.ttft },
                Measured { what: "ITL", median: median(gaps), model: model.itl },
            ],
        }
    }
}

/// A conversation of one message whose prompt has as many tokens as `tokens` all in all: the role before it, the
/// end behind it and the role of who answers are some of them.
fn messages(tokens: &[u32]) -> Value {
    const AROUND: usize = 3;
    let text: String = tokens[..tokens.len() - AROUND].iter().map(|token| format!("<{token}>")).collect();
    json!([{ "role": "user", "content": text }])
}

/// When each chunk with a token came.
async fn stream(began: Instant, mut response: Response) -> Times {
    let (mut times, mut text) = (Vec::new(), String::new());
    while let Some(bytes) = response.chunk().await.unwrap() {
        let arrived = began.elapsed();
        text.push_str(std::str::from_utf8(&bytes).unwrap());
        while let Some((line, rest)) = text.split_once("\n\n") {
            let data = line.strip_prefix("data: ").unwrap();
            if data != "[DONE]" {
                let chunk: Value = serde_json::from_str(data).unwrap();
                if chunk["choices"][0]["finish_reason"].is_null() {
                    times.push(arrived);
                }
            }
            text = rest.to_owned();
        }
    }
    assert_eq!(times.len(), ANSWER as usize);
    times
}

/// Repeats an attempt until its figures are true; the last one's are the complaint.
async fn until_true(who: &str, mut attempt: impl AsyncFnMut() -> Vec<Measured>) {
    let mut last = String::new();
    for _ in 0..ATTEMPTS {
        let measured = attempt().await;
        if measured.iter().all(Measured::is_true) {
            return;
        }
        last = measured.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        eprintln!("{who}: {last}");
    }
    panic!("{who}: {last}");
}

async fn answers_take_their_time(shape: Shape) {
    let ways = WAYS.map(|way| async move {
        // An engine each, so that they can be measured side by side.
        let mut bench = Bench::start(shape).await;
        until_true(&format!("{shape:?}, {way:?}"), async || bench.measure(way).await).await;
    });
    futures::future::join_all(ways).await;
}

/// T3: time to first token, between tokens and of whole answers, streamed and not, within 10 % of the model.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t3_answers_of_vllm_take_their_time() {
    answers_take_their_time(Shape::Vllm).await;
}

/// T3: the same of the other shape.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t3_answers_of_sglang_take_their_time() {
    answers_take_their_time(Shape::Sglang).await;
}

/// T3: a vLLM-shaped engine tells of a block in the step that fills it. With blocks of one token its events come
/// at the distance of its tokens, over the event socket too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t3_events_come_at_the_distance_of_tokens() {
    let block_size = rankwise::block::BlockSize::new(1).unwrap();
    let engine = EngineConfig { block_size, ..EngineConfig::default() };
    let fleet = Fleet::start(FleetConfig { engine, ranks: 1, ..FleetConfig::default() }).await.unwrap();
    let stamps = Stamps::default();
    let endpoint = &fleet.workers()[0].ranks[0].events;
    let config = SubscriberConfig::default();
    let _subscriber =
        spawn_subscriber(&Handle::current(), SourceId(0), endpoint, false, "", stamps.clone(), config)
            .unwrap();
    let rank = fleet.rank(0, DpRank(0)).unwrap();
    let mut first = 0;
    // Whoever subscribes late misses the first.
    while stamps.take().is_empty() {
        first += 1;
        rank.generate(vec![first, 1, 2], 3).await.unwrap().whole().await.unwrap();
    }
    until_true("events", async || {
        first += 1;
        let answer = rank.generate(vec![first, 1, 2], REQUESTS as u32 + 2).await.unwrap();
        answer.whole().await.unwrap();
        let at = stamps.take();
        let gaps = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let model = Model::of(&engine.timing);
        vec![Measured { what: "between events", median: median(gaps), model: model.itl }]
    })
    .await;
}

/// When live messages came.
#[derive(Clone, Default)]
struct Stamps(Arc<Mutex<Vec<Instant>>>);

impl Stamps {
    fn take(&self) -> Vec<Instant> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Sink for Stamps {
    async fn deliver(&self, _: SourceId, event: StreamEvent) -> Result<(), Closed> {
        if matches!(event, StreamEvent::Message(_)) {
            self.0.lock().unwrap().push(Instant::now());
        }
        Ok(())
    }
}

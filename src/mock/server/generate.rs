//! Completions and chat completions, whole and streamed.

use std::convert::Infallible;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use futures::stream::unfold;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::http::{Refused, WorkerState, unix_seconds};
use super::rank::{Answer, BrokenOff, Next, RankHandle};
use super::text::{piece, tokenize};
use crate::mock::request::Usage;

/// Chooses the rank of a request, by its number within the worker; in an answer it says which one it was.
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// What engines generate if nobody says how much.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// `POST /v1/completions`.
pub(super) async fn completions(
    State(state): State<WorkerState>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Refused> {
    let body: CompletionBody = parse(&body)?;
    let asked = body.asked;
    let prompt = body.prompt.tokens()?;
    respond(&state, &headers, prompt, &asked, Form::Completion).await
}

/// `POST /v1/chat/completions`.
pub(super) async fn chat(
    State(state): State<WorkerState>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Refused> {
    let body: ChatBody = parse(&body)?;
    let prompt = chat_tokens(&body.messages);
    respond(&state, &headers, prompt, &body.asked, Form::Chat).await
}

#[derive(Deserialize)]
struct CompletionBody {
    prompt: Prompt,
    #[serde(flatten)]
    asked: Asked,
}

#[derive(Deserialize)]
struct ChatBody {
    messages: Vec<Message>,
    #[serde(flatten)]
    asked: Asked,
}

/// What both kinds of request have. Everything else that clients send means nothing here.
#[derive(Deserialize)]
struct Asked {
    model: Option<String>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    stream: bool,
    stream_options: Option<StreamOptions>,
    /// vLLM's: the answer's token ids are wanted too.
    #[serde(default)]
    return_token_ids: bool,
    /// SGLang's ways to choose a rank.
    routed_dp_rank: Option<i64>,
    data_parallel_rank: Option<i64>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
    Batch(Vec<Vec<u32>>),
    Texts(Vec<String>),
}

impl Prompt {
    fn tokens(self) -> Result<Vec<u32>, Refused> {
        let one = || Refused::bad_request("one prompt per request, please");
        let text = match self {
            Self::Tokens(tokens) => return Ok(tokens),
            Self::Batch(prompts) => {
                let [tokens] = <[_; 1]>::try_from(prompts).map_err(|_| one())?;
                return Ok(tokens);
            }
            Self::Text(text) => text,
            Self::Texts(texts) => {
                let [text] = <[_; 1]>::try_from(texts).map_err(|_| one())?;
                text
            }
        };
        let mut tokens = Vec::new();
        tokenize(&text, &mut tokens);
        Ok(tokens)
    }
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    text: Option<String>,
}

/// A conversation as one prompt: each message between its role and an end, then the role of who answers. A
/// conversation that goes on begins with the tokens that it had.
fn chat_tokens(messages: &[Message]) -> Vec<u32> {
    let mut tokens = Vec::new();
    for message in messages {
        tokenize(&format!("<|{}|>", message.role), &mut tokens);
        match &message.content {
            Some(Content::Text(text)) => tokenize(text, &mut tokens),
            Some(Content::Parts(parts)) => {
                parts.iter().filter_map(|part| part.text.as_deref()).for_each(|text| {
                    tokenize(text, &mut tokens);
                });
            }
            None => {}
        }
        tokenize("<|end|>", &mut tokens);
    }
    tokenize("<|assistant|>", &mut tokens);
    tokens
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refused> {
    serde_json::from_slice(body).map_err(|error| Refused::bad_request(error.to_string()))
}

/// The rank that a request wants, or the worker's own choice.
///
/// A rank that is not there is refused, as vLLM does: any other answer would be another rank's.
fn rank<'s>(state: &'s WorkerState, headers: &HeaderMap, asked: &Asked) -> Result<&'s RankHandle, Refused> {
    let header = match headers.get(RANK_HEADER) {
        None => None,
        Some(value) => {
            let number = value.to_str().ok().and_then(|text| text.trim().parse::<i64>().ok());
            Some(number.ok_or_else(|| Refused::bad_request(format!("{RANK_HEADER} is no number")))?)
        }
    };
    let wanted: Vec<i64> =
        [header, asked.routed_dp_rank, asked.data_parallel_rank].into_iter().flatten().collect();
    let Some(&first) = wanted.first() else { return Ok(state.round_robin()) };
    if wanted.iter().any(|other| *other != first) {
        return Err(Refused::bad_request(format!("the request names several ranks: {wanted:?}")));
    }
    state.by_local(first).ok_or_else(|| {
        let ranks = state.ranks().len();
        Refused::bad_request(format!("data parallel rank {first} is out of range [0, {ranks})"))
    })
}

/// Which API is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Completion,
    Chat,
}

impl Form {
    fn object(self, streamed: bool) -> &'static str {
        match (self, streamed) {
            (Self::Completion, _) => "text_completion",
            (Self::Chat, false) => "chat.completion",
            (Self::Chat, true) => "chat.completion.chunk",
        }
    }

    /// A choice with this text.
    fn choice(self, text: String, streamed: bool, finish: Option<&str>) -> Value {
        match (self, streamed) {
            (Self::Completion, _) => {
                json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish})
            }
            (Self::Chat, false) => {
                let message = json!({"role": "assistant", "content": text});
                json!({"index": 0, "message": message, "logprobs": null, "finish_reason": finish})
            }
            (Self::Chat, true) => {
                json!({"index": 0, "delta": {"content": text}, "logprobs": null, "finish_reason": finish})
            }
        }
    }
}

async fn respond(
    state: &WorkerState,
    headers: &HeaderMap,
    prompt: Vec<u32>,
    asked: &Asked,
    form: Form,
) -> Result<Response, Refused> {
    let model = &state.address().model;
    if asked.model.as_ref().is_some_and(|asked| asked != model) {
        let why = "that model is not served here; GET /v1/models says which one is";
        return Err(Refused::new(StatusCode::NOT_FOUND, why));
    }
    let rank = rank(state, headers, asked)?;
    let max_tokens = asked.max_completion_tokens.or(asked.max_tokens).unwrap_or(DEFAULT_MAX_TOKENS);
    let answer = rank.generate(prompt, max_tokens).await?;
    let local = state.local(rank.dp_rank());
    let frame = Frame {
        form,
        id: format!("mock-{}-{}", rank.dp_rank(), answer.id().0),
        created: unix_seconds(),
        model: model.clone(),
        dp_rank: rank.dp_rank().0,
        token_ids: asked.return_token_ids,
        usage: asked.stream_options.as_ref().is_some_and(|options| options.include_usage),
    };
    let mut response = match asked.stream {
        true => Sse::new(chunks(answer, frame)).into_response(),
        false => whole(answer, &frame).await?.into_response(),
    };
    response.headers_mut().insert(RANK_HEADER, HeaderValue::from(local));
    Ok(response)
}

/// What stands around an answer's tokens.
struct Frame {
    form: Form,
    /// Unique on the worker.
    id: String,
    created: u64,
    model: String,
    /// The global rank.
    dp_rank: u32,
    token_ids: bool,
    usage: bool,
}

impl Frame {
    fn around(&self, streamed: bool, choices: Vec<Value>, usage: Option<Usage>) -> Value {
        json!({
            "id": self.id,
            "object": self.form.object(streamed),
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage.map(usage_out),
            "dp_rank": self.dp_rank,
        })
    }

    fn chunk(&self, token: u32) -> Value {
        let mut choice = self.form.choice(piece(token), true, None);
        if self.token_ids {
            choice["token_ids"] = json!([token]);
        }
        self.around(true, vec![choice], None)
    }
}

fn usage_out(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}

/// A mock ends no text by itself: every answer is as long as was asked for.
const FINISH: Option<&str> = Some("length");

async fn whole(answer: Answer, frame: &Frame) -> Result<Json<Value>, Refused> {
    let (tokens, usage) = answer.whole().await?;
    let text = tokens.iter().map(|token| piece(*token)).collect();
    let mut choice = frame.form.choice(text, false, FINISH);
    if frame.token_ids {
        choice["token_ids"] = json!(tokens);
    }
    Ok(Json(frame.around(false, vec![choice], Some(usage))))
}

impl From<BrokenOff> for Refused {
    fn from(why: BrokenOff) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, why.to_string())
    }
}

/// Where a stream is.
enum Streaming {
    Tokens,
    Usage(Usage),
    Done,
    Over,
}

/// The answer as server-sent events: a chunk per token, one that ends the choice, one with the usage if it is
/// wanted, and the end mark. An answer that breaks off ends with an error and without the mark.
fn chunks(answer: Answer, frame: Frame) -> impl Stream<Item = Result<Event, Infallible>> {
    unfold((answer, frame, Streaming::Tokens), |(mut answer, frame, at)| async move {
        let (text, at) = match at {
            Streaming::Over => return None,
            Streaming::Done => ("[DONE]".to_owned(), Streaming::Over),
            Streaming::Usage(usage) => {
                (frame.around(true, Vec::new(), Some(usage)).to_string(), Streaming::Done)
            }
            Streaming::Tokens => match answer.next().await {
                Ok(Next::Token(token)) => (frame.chunk(token).to_string(), Streaming::Tokens),
                Ok(Next::End(usage)) => {
                    let last = frame.form.choice(String::new(), true, FINISH);
                    let next = if frame.usage { Streaming::Usage(usage) } else { Streaming::Done };
                    (frame.around(true, vec![last], None).to_string(), next)
                }
                Err(why) => (json!({ "error": { "message": why.to_string() } }).to_string(), Streaming::Over),
            },
        };
        Some((Ok(Event::default().data(text)), (answer, frame, at)))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn chat(json: Value) -> Vec<u32> {
        chat_tokens(&serde_json::from_value::<Vec<Message>>(json).unwrap())
    }

    #[test]
    fn a_conversation_begins_with_what_it_was() {
        let first =
            chat(json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]));
        let second = chat(
            json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"text": "hi"}]},
            {"role": "assistant", "content": "<17><4>"}, {"role": "user", "content": "more"}]),
        );
        assert!(second.starts_with(&first));
        assert_eq!(&second[first.len()..first.len() + 2], [17, 4]);
    }

    #[test]
    fn prompts_are_read_in_every_form() {
        for prompt in ["[1, 2]", "[[1, 2]]", "\"<1><2>\"", "[\"<1> <2>\"]"] {
            let body: CompletionBody =
                parse(format!("{{\"prompt\": {prompt}, \"temperature\": 0.7}}").as_bytes()).unwrap();
            assert_eq!(body.prompt.tokens().unwrap(), [1, 2], "{prompt}");
        }
        for prompt in ["[[1], [2]]", "[]", "[\"a\", \"b\"]"] {
            let body: CompletionBody = parse(format!("{{\"prompt\": {prompt}}}").as_bytes()).unwrap();
            assert!(body.prompt.tokens().map_or(true, |tokens| tokens.is_empty()), "{prompt}");
        }
        assert!(parse::<CompletionBody>(b"{\"prompt\": [-1]}").is_err());
        assert!(parse::<CompletionBody>(b"{}").is_err());
    }
}

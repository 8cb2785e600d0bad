//! A rank's envelope, from what its engine says about itself.
//!
//! No engine says everything: vLLM tells the length in `/v1/models` and the blocks in `/metrics`, SGLang all of it
//! in `/server_info`. What stays unknown must be given by whoever starts the bench; nothing is guessed.

use std::time::Duration;

use reqwest::Client;
use reqwest::redirect::Policy;
use serde_json::Value;
use thiserror::Error;

use super::envelope::{Field, Stated};
use crate::ids::LocalRank;

/// How long each question may take, and how much of an answer is read.
const PATIENCE: Duration = Duration::from_secs(5);
const MAX_BYTES: usize = 4 << 20;

/// Numbers of an envelope, as far as they are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Known {
    numbers: [Option<u64>; 5],
}

impl Known {
    /// The number of `field`.
    pub fn get(&self, field: Field) -> Option<u64> {
        self.numbers[field as usize]
    }

    /// Knows `field` now.
    pub fn set(&mut self, field: Field, value: u64) {
        self.numbers[field as usize] = Some(value);
    }

    /// These numbers, and `other`'s where these are unknown.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        for (mine, theirs) in self.numbers.iter_mut().zip(other.numbers) {
            *mine = mine.or(theirs);
        }
        self
    }

    /// The whole envelope.
    ///
    /// # Errors
    /// The fields that are unknown.
    pub fn whole(&self) -> Result<Stated, Unknown> {
        let unknown: Vec<Field> = Field::ALL.into_iter().filter(|field| self.get(*field).is_none()).collect();
        if !unknown.is_empty() {
            return Err(Unknown(unknown));
        }
        let mut stated = Stated {
            max_model_len: 0,
            max_num_running_reqs: 0,
            max_num_scheduled_tokens: 0,
            kv_blocks: 0,
            block_size: 0,
        };
        for field in Field::ALL {
            stated.set(field, self.get(field).unwrap_or_default());
        }
        Ok(stated)
    }
}

/// Fields that nobody has told.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("the engine does not tell {}", .0.iter().map(|field| field.name()).collect::<Vec<_>>().join(", "))]
pub struct Unknown(pub Vec<Field>);

/// What an engine says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Says {
    /// Of its envelope.
    pub known: Known,
    /// The first model that it serves.
    pub model: Option<String>,
}

/// The engine cannot be asked.
#[derive(Debug, Error)]
#[error("{base} does not answer /v1/models: {why}")]
pub struct NoAnswer {
    base: String,
    why: String,
}

/// Asks the engine at `base` for its envelope and its model; of an engine with several ranks, `rank`'s.
///
/// # Errors
/// An engine that does not answer `/v1/models`, as every one does. What else it lacks is only unknown.
pub async fn ask(base: &str, rank: LocalRank) -> Result<Says, NoAnswer> {
    let base = base.trim_end_matches('/');
    let no_answer = |why: String| NoAnswer { base: base.to_owned(), why };
    let client =
        Client::builder().tcp_nodelay(true).no_proxy().redirect(Policy::none()).timeout(PATIENCE).build();
    let client = client.map_err(|error| no_answer(error.to_string()))?;
    let models = fetch(&client, &format!("{base}/v1/models")).await.map_err(no_answer)?;
    let models: Value = serde_json::from_slice(&models).map_err(|error| no_answer(error.to_string()))?;
    let mut says = of_models(&models);
    if let Ok(body) = fetch(&client, &format!("{base}/server_info")).await
        && let Ok(info) = serde_json::from_slice(&body)
    {
        says.known = of_server_info(&info, rank).or(says.known);
    }
    if let Ok(body) = fetch(&client, &format!("{base}/metrics")).await {
        says.known = says.known.or(of_metrics(&String::from_utf8_lossy(&body), rank));
    }
    Ok(says)
}

async fn fetch(client: &Client, url: &str) -> Result<Vec<u8>, String> {
    let mut response = client.get(url).send().await.map_err(|error| error.to_string())?;
    if !response.status().is_success() {
        return Err(format!("status {}", response.status().as_u16()));
    }
    let mut body = Vec::new();
    while let Some(bytes) = response.chunk().await.map_err(|error| error.to_string())? {
        if body.len() + bytes.len() > MAX_BYTES {
            return Err("the answer is too long".to_owned());
        }
        body.extend_from_slice(&bytes);
    }
    Ok(body)
}

/// `/v1/models`: vLLM and SGLang tell the longest sequence with the model.
fn of_models(models: &Value) -> Says {
    let model = &models["data"][0];
    let mut known = Known::default();
    note(&mut known, Field::MaxModelLen, &[&model["max_model_len"]]);
    Says { known, model: model["id"].as_str().map(str::to_owned) }
}

/// `/server_info`, in SGLang's names and in ours. A rank's own state stands before what is said of all.
fn of_server_info(info: &Value, rank: LocalRank) -> Known {
    let own = &info["internal_states"][rank.0 as usize];
    let mut known = Known::default();
    note(&mut known, Field::BlockSize, &[&info["block_size"], &info["page_size"]]);
    note(&mut known, Field::MaxModelLen, &[&info["max_model_len"], &info["context_length"]]);
    note(
        &mut known,
        Field::MaxNumRunningReqs,
        &[
            &own["effective_max_running_requests_per_dp"],
            &info["max_num_running_reqs"],
            &info["max_num_seqs"],
            &info["max_running_requests"],
        ],
    );
    note(
        &mut known,
        Field::MaxNumScheduledTokens,
        // A chunk's size of -1 is none at all, and then whole prefills are bounded.
        &[
            &info["max_num_scheduled_tokens"],
            &info["max_num_batched_tokens"],
            &info["chunked_prefill_size"],
            &info["max_prefill_tokens"],
        ],
    );
    let block_size = known.get(Field::BlockSize).filter(|size| *size > 0);
    note(&mut known, Field::KvBlocks, &[&info["kv_blocks"]]);
    let tokens = [&own["max_total_num_tokens"], &info["max_total_num_tokens"]];
    if let (None, Some(tokens), Some(size)) =
        (known.get(Field::KvBlocks), tokens.into_iter().find_map(Value::as_u64), block_size)
    {
        known.set(Field::KvBlocks, tokens / size);
    }
    known
}

fn note(known: &mut Known, field: Field, places: &[&Value]) {
    if let Some(value) = places.iter().find_map(|place| place.as_u64()) {
        known.set(field, value);
    }
}

/// `/metrics`: vLLM's `vllm:cache_config_info`, a series per engine whose labels are the configuration. One of
/// its blocks is never given to a request.
fn of_metrics(text: &str, rank: LocalRank) -> Known {
    let mut known = Known::default();
    let series = text.lines().filter_map(|line| line.strip_prefix("vllm:cache_config_info{"));
    let series: Vec<&str> = series.collect();
    let engine = format!("engine=\"{}\"", rank.0);
    let own = series.iter().find(|labels| labels.contains(&engine));
    // Where the series name no engine there is one.
    let Some(labels) = own.or(series.first().filter(|labels| !labels.contains("engine=\""))) else {
        return known;
    };
    let label = |name: &str| {
        let (_, rest) = labels.split_once(&format!("{name}=\""))?;
        rest.split('"').next()?.parse::<u64>().ok()
    };
    if let Some(size) = label("block_size") {
        known.set(Field::BlockSize, size);
    }
    if let Some(blocks) = label("num_gpu_blocks").and_then(|blocks| blocks.checked_sub(1)) {
        known.set(Field::KvBlocks, blocks);
    }
    known
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    /// B1: from an engine of SGLang's shape everything is known.
    #[test]
    fn b1_sglang_tells_all_of_it() {
        let info = json!({
            "page_size": 16, "context_length": 4_096, "max_running_requests": 64,
            "chunked_prefill_size": -1, "max_prefill_tokens": 8_192, "max_total_num_tokens": 65_540,
        });
        let known = of_server_info(&info, LocalRank(0));
        let stated = known.whole().unwrap();
        assert_eq!(Field::ALL.map(|field| stated.get(field)), [4_096, 64, 8_192, 4_096, 16]);
        let mut info = info;
        info["internal_states"] = json!([
            {}, { "effective_max_running_requests_per_dp": 8, "max_total_num_tokens": 160 }
        ]);
        let stated = of_server_info(&info, LocalRank(1)).whole().unwrap();
        assert_eq!((stated.max_num_running_reqs, stated.kv_blocks), (8, 10));
    }

    /// B1: what vLLM leaves out stays unknown until it is given.
    #[test]
    fn b1_what_vllm_does_not_tell_is_unknown() {
        let says = of_models(&json!({ "data": [{ "id": "llama", "max_model_len": 8_192 }] }));
        assert_eq!(says.model.as_deref(), Some("llama"));
        let metrics = "# HELP x\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"101\"} 1.0\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"1\",num_gpu_blocks=\"51\"} 1.0\n";
        let known = says.known.or(of_metrics(metrics, LocalRank(1)));
        assert_eq!((known.get(Field::KvBlocks), known.get(Field::BlockSize)), (Some(50), Some(16)));
        assert_eq!(of_metrics(metrics, LocalRank(2)), Known::default());
        let unknown = known.whole().unwrap_err();
        assert_eq!(
            unknown.to_string(),
            "the engine does not tell max_num_running_reqs, max_num_scheduled_tokens"
        );
        let mut given = Known::default();
        given.set(Field::MaxNumRunningReqs, 4);
        given.set(Field::MaxNumScheduledTokens, 2_048);
        given.set(Field::KvBlocks, 7);
        let stated = given.or(known).whole().unwrap();
        assert_eq!((stated.kv_blocks, stated.max_num_scheduled_tokens), (7, 2_048));
        assert_eq!(of_models(&json!([])), Says::default());
        assert_eq!(
            of_server_info(&json!({ "page_size": 0, "max_total_num_tokens": 1 }), LocalRank(0))
                .get(Field::KvBlocks),
            None
        );
    }
}

//! The engines' truth: what they held after the stream had ended, and what their own lookup found.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use super::check::Contents;
use super::error::CaptureError;
use super::format::from_hex;
use super::reader::stem;
use crate::block::{BlockHash, BlockSize, Tier};
use crate::ids::{DpRank, EventSeq};

/// Largest truth that is read, as text. The longest that exists has 1 MB; this holds a thousand of them.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// Most tokens that [`Truth::prompts`] expands to: 1 GiB. Deltas let a small file stand for far more.
const MAX_PROMPT_TOKENS: usize = 1 << 28;

/// What engines held and answered, read from them after the stream of the capture beside it.
#[derive(Clone, Debug, Deserialize)]
pub struct Truth {
    /// The engine's name.
    #[serde(default)]
    pub engine: String,
    /// Its version.
    #[serde(default)]
    pub engine_version: String,
    /// Tokens per block.
    pub block_size: u32,
    /// What each rank held.
    pub ranks: Vec<RankTruth>,
    /// What each rank's own lookup found.
    #[serde(default)]
    pub probes: Vec<Probe>,
    /// Every request that was played, in its order.
    #[serde(default)]
    pub requests: Vec<Request>,
    /// How the prompts of [`Truth::requests`] are written.
    #[serde(default)]
    request_encoding: Option<RequestEncoding>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RequestEncoding {
    Delta,
}

impl Truth {
    /// Reads a truth file; names ending in `.gz` are decompressed.
    ///
    /// # Errors
    /// When it cannot be read, is not a truth, or contradicts itself.
    pub fn load(path: &Path) -> Result<Self, CaptureError> {
        let truth: Self =
            serde_json::from_str(&read_text(path)?).map_err(|error| CaptureError::json(path, error))?;
        match truth.contradiction() {
            Some(reason) => Err(CaptureError::Contradiction { path: path.to_owned(), reason }),
            None => Ok(truth),
        }
    }

    /// Reads the truth beside a capture: `STEM.truth.json`, else `STEM.truth.json.gz`.
    ///
    /// # Errors
    /// [`CaptureError::TruthMissing`] if there is none, and those of [`Truth::load`].
    pub fn beside(capture: &Path) -> Result<Self, CaptureError> {
        let stem = stem(capture);
        let tried: Vec<PathBuf> = [".truth.json", ".truth.json.gz"]
            .map(|end| capture.with_file_name(format!("{stem}{end}")))
            .into();
        match tried.iter().find(|path| path.exists()) {
            Some(path) => Self::load(path),
            None => Err(CaptureError::TruthMissing { capture: capture.to_owned(), tried }),
        }
    }

    /// Tokens per block as a block size; `None` for zero.
    pub fn block_size(&self) -> Option<BlockSize> {
        BlockSize::new(self.block_size)
    }

    /// What a rank held.
    pub fn rank(&self, rank: DpRank) -> Option<&RankTruth> {
        self.ranks.iter().find(|truth| truth.rank == rank.0)
    }

    /// The whole prompt of every request, in order; deltas expanded.
    ///
    /// Cost: the tokens of all prompts in memory.
    ///
    /// # Errors
    /// When a request has neither a prompt nor a base among the requests before it, or all prompts together
    /// are too long to be held.
    pub fn prompts(&self) -> Result<Vec<Vec<u32>>, PromptError> {
        let mut by_id: HashMap<&str, usize> = HashMap::new();
        let mut prompts: Vec<Vec<u32>> = Vec::with_capacity(self.requests.len());
        let mut total = 0;
        for (index, request) in self.requests.iter().enumerate() {
            let base = match &request.base {
                None => None,
                Some(id) => match by_id.get(id.as_str()) {
                    Some(&base) => Some((&prompts[base], &self.requests[base].output)),
                    None => {
                        return Err(PromptError::UnknownBase {
                            request: request.id.clone(),
                            base: id.clone(),
                        });
                    }
                },
            };
            let prompt = self.expand(request, base)?;
            total += prompt.len();
            if total > MAX_PROMPT_TOKENS {
                return Err(PromptError::TooLong { request: request.id.clone(), limit: MAX_PROMPT_TOKENS });
            }
            prompts.push(prompt);
            by_id.insert(&request.id, index);
        }
        Ok(prompts)
    }

    fn expand(
        &self,
        request: &Request,
        base: Option<(&Vec<u32>, &Vec<u32>)>,
    ) -> Result<Vec<u32>, PromptError> {
        if self.request_encoding.is_none() {
            return request
                .prompt
                .clone()
                .ok_or_else(|| PromptError::NoPrompt { request: request.id.clone() });
        }
        let base_tokens = base.into_iter().flat_map(|(prompt, output)| prompt.iter().chain(output));
        let prompt: Vec<u32> = base_tokens.take(request.base_len).chain(&request.tokens).copied().collect();
        if prompt.len() - request.tokens.len() != request.base_len {
            return Err(PromptError::ShortBase { request: request.id.clone(), base_len: request.base_len });
        }
        Ok(prompt)
    }

    fn contradiction(&self) -> Option<String> {
        if self.block_size == 0 {
            return Some("block_size is 0".into());
        }
        let mut ranks: Vec<u32> = self.ranks.iter().map(|rank| rank.rank).collect();
        ranks.sort_unstable();
        ranks.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| format!("rank {} comes twice", pair[0]))
    }
}

/// Why a request's prompt could not be expanded.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// The request has no prompt and the file does not say that prompts are deltas.
    #[error("request {request} has no prompt")]
    NoPrompt {
        /// Its id.
        request: String,
    },
    /// The request builds on one that does not come before it.
    #[error("request {request} builds on {base}, which does not come before it")]
    UnknownBase {
        /// Its id.
        request: String,
        /// The id of the other.
        base: String,
    },
    /// The request takes more tokens from its base than that has.
    #[error("request {request} takes {base_len} tokens from its base, which has fewer")]
    ShortBase {
        /// Its id.
        request: String,
        /// Tokens that it takes.
        base_len: usize,
    },
    /// All prompts together are too long to be held.
    #[error("with request {request} the prompts have more than {limit} tokens")]
    TooLong {
        /// Its id.
        request: String,
        /// Tokens allowed.
        limit: usize,
    },
}

/// What one rank held.
#[derive(Clone, Debug, Deserialize)]
pub struct RankTruth {
    /// The global rank.
    pub rank: u32,
    /// The number of its last batch; `None` when it sent none.
    #[serde(default)]
    pub last_seq: Option<u64>,
    /// Its contents by group and medium.
    pub groups: Vec<GroupTruth>,
}

impl RankTruth {
    /// The number of the rank's last batch; `None` if it never sent one.
    pub fn last_seq(&self) -> Option<EventSeq> {
        self.last_seq.map(EventSeq)
    }

    /// Everything that the rank held, by tier and group.
    pub fn contents(&self) -> Contents {
        let mut contents = Contents::default();
        for group in &self.groups {
            let tier = Tier::from_medium(group.medium.as_deref());
            for (HashField(hash), copies) in &group.hashes {
                contents.insert(tier, group.group_idx, hash.clone(), *copies);
            }
        }
        contents
    }
}

/// What one rank held in one group on one medium.
#[derive(Clone, Debug, Deserialize)]
pub struct GroupTruth {
    /// The KV-cache group's number; `None` where the engine has no groups.
    #[serde(default)]
    pub group_idx: Option<u32>,
    /// The engine's name of the medium; `None` is the device.
    #[serde(default)]
    pub medium: Option<String>,
    /// Each hash and its copies. vLLM counts physical blocks, SGLang namespaces or tree pages.
    pub hashes: Vec<(HashField, u32)>,
}

/// A block's name in a truth file: a JSON integer, signed or unsigned, or a hex string.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct HashField(pub BlockHash);

impl<'de> Deserialize<'de> for HashField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HashVisitor).map(Self)
    }
}

struct HashVisitor;

impl Visitor<'_> for HashVisitor {
    type Value = BlockHash;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a hash: an integer of 64 bits, or 1 to {} bytes in hex", BlockHash::MAX_BYTES)
    }

    fn visit_u64<E: de::Error>(self, hash: u64) -> Result<BlockHash, E> {
        Ok(BlockHash::Int(hash))
    }

    fn visit_i64<E: de::Error>(self, hash: i64) -> Result<BlockHash, E> {
        Ok(BlockHash::from_i64(hash))
    }

    fn visit_str<E: de::Error>(self, hash: &str) -> Result<BlockHash, E> {
        from_hex(hash)
            .and_then(|bytes| BlockHash::from_bytes(&bytes))
            .ok_or_else(|| E::invalid_value(de::Unexpected::Str(hash), &self))
    }
}

/// One prompt and how much of it each rank's own lookup found.
#[derive(Clone, Debug, Deserialize)]
pub struct Probe {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// The adapter's name.
    #[serde(default)]
    pub lora_name: Option<String>,
    /// The adapter's number on the engine.
    #[serde(default)]
    pub lora_id: Option<i64>,
    /// The cache salt.
    #[serde(default)]
    pub cache_salt: Option<String>,
    /// Images and other items in the prompt.
    #[serde(default)]
    pub mm: Vec<MmItem>,
    /// SGLang's namespace. Not on the wire; where it stands for a named adapter, `lora_name` is beside it.
    #[serde(default)]
    pub extra_key: Option<String>,
    /// The engine's names of the prompt's blocks, where all ranks agree on them.
    #[serde(default)]
    pub block_hashes: Option<Vec<HashField>>,
    /// What each rank found.
    pub by_rank: Vec<ProbeAnswer>,
}

impl Probe {
    /// The probe as a client would ask it.
    ///
    /// `extra_key` is left out: no event carries it, so no client could ask for it. Where that makes the
    /// answer unknowable, the exceptions say so.
    pub fn query(&self) -> ProbeQuery<'_> {
        ProbeQuery {
            tokens: &self.tokens,
            lora_name: self.lora_name.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
            mm: &self.mm,
        }
    }
}

/// A probe as plain query data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ProbeQuery<'a> {
    /// The prompt.
    pub tokens: &'a [u32],
    /// The adapter's name.
    pub lora_name: Option<&'a str>,
    /// The cache salt.
    pub cache_salt: Option<&'a str>,
    /// Images and other items in the prompt.
    pub mm: &'a [MmItem],
}

/// An image or other item in a prompt.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MmItem {
    /// Its identifier, as the engine names it.
    pub identifier: String,
    /// Where its placeholders begin, in tokens from the prompt's start.
    pub offset: u32,
    /// How many placeholders it has, in tokens.
    pub length: u32,
}

/// What one rank's own lookup found of a probe.
#[derive(Clone, Debug, Deserialize)]
pub struct ProbeAnswer {
    /// The global rank.
    pub rank: u32,
    /// Tokens found.
    pub matched_tokens: u32,
    /// Blocks found; with several groups the joint answer of all.
    pub matched_blocks: u32,
    /// vLLM: tokens that its scheduler would take, which is never the whole prompt.
    #[serde(default)]
    pub scheduler_hit_tokens: Option<u32>,
    /// The rank's names of the prompt's blocks, where ranks differ.
    #[serde(default)]
    pub block_hashes: Option<Vec<HashField>>,
}

/// One request that was played.
#[derive(Clone, Debug, Deserialize)]
pub struct Request {
    /// Its name.
    pub id: String,
    /// The global rank that served it.
    pub rank: u32,
    /// The whole prompt; absent where prompts are deltas ([`Truth::prompts`] expands them).
    #[serde(default)]
    pub prompt: Option<Vec<u32>>,
    /// The request whose prompt and output this one begins with.
    #[serde(default)]
    pub base: Option<String>,
    /// How many tokens it takes from that.
    #[serde(default)]
    pub base_len: usize,
    /// The tokens that follow them.
    #[serde(default)]
    pub tokens: Vec<u32>,
    /// The tokens that the engine made.
    #[serde(default)]
    pub output: Vec<u32>,
    /// The adapter's name.
    #[serde(default)]
    pub lora_name: Option<String>,
    /// The cache salt.
    #[serde(default)]
    pub cache_salt: Option<String>,
    /// Images and other items in the prompt.
    #[serde(default)]
    pub mm: Vec<MmItem>,
    /// SGLang's namespace.
    #[serde(default)]
    pub extra_key: Option<String>,
    /// The conversation that it belongs to.
    #[serde(default)]
    pub session_id: Option<String>,
    /// Prompt tokens that the engine found cached, where it says.
    #[serde(default)]
    pub num_cached_tokens: Option<u32>,
}

/// The text of a JSON file beside a capture, decompressed if its name says so.
pub(crate) fn read_text(path: &Path) -> Result<String, CaptureError> {
    let io = |error| CaptureError::io(path, error);
    let file = BufReader::new(File::open(path).map_err(io)?);
    let input: Box<dyn Read> = match path.extension() {
        Some(end) if end == "gz" => Box::new(MultiGzDecoder::new(file)),
        _ => Box::new(file),
    };
    let mut text = String::new();
    let read = input.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text).map_err(io)?;
    if read as u64 > MAX_TEXT_BYTES {
        return Err(CaptureError::Contradiction {
            path: path.to_owned(),
            reason: format!("longer than {MAX_TEXT_BYTES} bytes"),
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn hash(text: &str) -> Result<BlockHash, serde_json::Error> {
        serde_json::from_str::<HashField>(text).map(|HashField(hash)| hash)
    }

    /// R4: signed and unsigned readings of one pattern are one name.
    #[test]
    fn hashes_are_integers_of_both_signs_or_hex() {
        assert_eq!(hash("-1").unwrap(), hash("18446744073709551615").unwrap());
        assert_eq!(hash(r#""0aff""#).unwrap(), BlockHash::from_bytes(&[0x0a, 0xff]).unwrap());
        for bad in ["18446744073709551616", "-9223372036854775809", r#""""#, r#""0af""#, "1.5", "null", "[1]"]
        {
            assert!(hash(bad).is_err(), "{bad}");
        }
    }

    fn truth(requests: &str) -> Truth {
        serde_json::from_str(&format!(
            r#"{{"block_size":16,"ranks":[],"request_encoding":"delta","requests":{requests}}}"#
        ))
        .unwrap()
    }

    #[test]
    fn deltas_build_on_prompt_and_output() {
        let truth = truth(
            r#"[{"id":"a","rank":0,"base":null,"base_len":0,"tokens":[1,2],"output":[3,4]},
                {"id":"b","rank":0,"base":"a","base_len":3,"tokens":[9],"output":[]},
                {"id":"c","rank":0,"base":"b","base_len":4,"tokens":[],"output":[]}]"#,
        );
        assert_eq!(truth.prompts().unwrap(), [vec![1, 2], vec![1, 2, 3, 9], vec![1, 2, 3, 9]]);
    }

    #[test]
    fn deltas_that_do_not_fit_are_named() {
        let short = truth(
            r#"[{"id":"a","rank":0,"tokens":[1]},{"id":"b","rank":0,"base":"a","base_len":2,"tokens":[2]}]"#,
        );
        assert_eq!(short.prompts(), Err(PromptError::ShortBase { request: "b".into(), base_len: 2 }));
        let own_base = truth(r#"[{"id":"a","rank":0,"base":"a","base_len":1,"tokens":[1]}]"#);
        assert!(matches!(own_base.prompts(), Err(PromptError::UnknownBase { .. })));
    }
}

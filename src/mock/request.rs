//! What is asked of an engine and what it answers.

use twox_hash::xxhash3_64::Hasher as Xxh3;

use crate::ids::Moment;

/// Generated tokens are below this.
pub const VOCABULARY: u32 = 32_000;

/// A request's number, unique among those that an engine has not finished.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RequestId(pub u64);

/// A prompt to be answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Generation {
    /// Its number.
    pub id: RequestId,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate, exactly.
    pub max_tokens: u32,
}

/// Why a request was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is nothing to compute.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// No token was asked for.
    #[error("max_tokens is 0")]
    NothingToGenerate,
    /// Prompt and answer are longer than the engine's limit.
    #[error("{tokens} tokens of prompt and answer are more than the engine's {limit}")]
    TooLong {
        /// Tokens of prompt and answer.
        tokens: u64,
        /// The limit.
        limit: u32,
    },
    /// Too many requests wait already.
    #[error("{limit} requests wait already")]
    QueueFull {
        /// The limit.
        limit: u32,
    },
    /// A request of this number has not finished.
    #[error("request {} has not finished", .0.0)]
    Taken(RequestId),
}

/// What comes out of an engine, in the order of happening.
#[derive(Clone, PartialEq, Debug)]
pub enum Output {
    /// The caches changed: an event payload as the engine sends it. Whoever publishes numbers them, from 0.
    Batch {
        /// msgpack `[ts, events, dp_rank]`.
        payload: Vec<u8>,
        /// When; `ts` in it is the same moment in seconds.
        at: Moment,
    },
    /// A token of an answer. The first one, with `index` 0, ends the time to first token.
    Token {
        /// Whose.
        id: RequestId,
        /// Its place in the answer, from 0.
        index: u32,
        /// The token.
        token: u32,
        /// When its step ended.
        at: Moment,
    },
    /// The answer is complete.
    Finished {
        /// Whose.
        id: RequestId,
        /// What it took.
        usage: Usage,
        /// When.
        at: Moment,
    },
    /// There will be no (further) answer.
    Failed {
        /// Whose.
        id: RequestId,
        /// Why.
        reason: Failure,
        /// When.
        at: Moment,
    },
}

/// What a request took, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u32,
    /// Of these, found in the cache when the request was first admitted.
    pub cached_tokens: u32,
    /// Of the answer.
    pub completion_tokens: u32,
}

/// Why a request that was taken was not answered.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The engine was restarted.
    Restarted,
}

/// An engine's answer to a prompt: a function of the prompt alone, the same on every engine, so that a
/// conversation can be played again and its next prompt be known beforehand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    seed: u64,
}

impl Completion {
    /// The answer to `prompt`.
    pub fn of(prompt: &[u32]) -> Self {
        let mut bytes = Vec::with_capacity(prompt.len() * 4);
        for token in prompt {
            bytes.extend_from_slice(&token.to_le_bytes());
        }
        Self { seed: Xxh3::oneshot(&bytes) }
    }

    /// Its token at `index`.
    pub fn token(self, index: u32) -> u32 {
        let hash = Xxh3::oneshot_with_seed(self.seed, &index.to_le_bytes());
        // Below the vocabulary, so it fits.
        (hash % u64::from(VOCABULARY)) as u32
    }

    /// Its first `count` tokens.
    pub fn tokens(self, count: u32) -> impl Iterator<Item = u32> {
        (0..count).map(move |index| self.token(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_depends_on_the_whole_prompt_and_nothing_else() {
        let answer: Vec<u32> = Completion::of(&[1, 2, 3]).tokens(8).collect();
        assert_eq!(answer, Completion::of(&[1, 2, 3]).tokens(8).collect::<Vec<_>>());
        assert_ne!(answer, Completion::of(&[2, 1, 3]).tokens(8).collect::<Vec<_>>());
        assert!(answer.iter().all(|token| *token < VOCABULARY));
    }
}

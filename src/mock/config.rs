//! What an engine is made with.

use crate::block::BlockSize;
use crate::mock::timing::Timing;

/// Whose behaviour an engine shows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Shape {
    /// vLLM: a block is announced when the step that fills it is scheduled, each physical copy by itself,
    /// and removed by itself; at most one batch per step; a reset's clear travels with the next step's batch.
    Vllm,
    /// SGLang: a page is announced when it was computed (a prompt's after each prefill step, an answer's when
    /// the request ends), once however many computed it; neighbours in a chain share an event; the first
    /// event of a process is a clear.
    Sglang,
}

/// How events are written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Encoding {
    /// Positional arrays, as vLLM 0.23 and SGLang 0.5.18 write them.
    Array,
    /// Maps, as vLLM 0.33 and SGLang 0.5.23 write them.
    Map,
}

/// What a block's name looks like on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HashKind {
    /// A 64-bit integer: unsigned from vLLM, signed from SGLang.
    Int,
    /// A string of 16 bytes, as vLLM sends `xxhash` names. SGLang knows integers only and sends these.
    Bytes,
}

/// Where names begin. SGLang has no seed: its ranks always agree.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum HashSeed {
    /// The same on every rank and after every restart (`PYTHONHASHSEED`, or vLLM from 0.29).
    Fixed(u64),
    /// Another on each rank and after each restart, drawn from this number (vLLM before 0.29).
    PerProcess(u64),
}

/// One rank's engine. Numbers below 1 that must not be are taken as 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EngineConfig {
    /// Whose behaviour.
    pub shape: Shape,
    /// How events are written.
    pub encoding: Encoding,
    /// What names look like.
    pub hash: HashKind,
    /// Where names begin.
    pub hash_seed: HashSeed,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Blocks of the device's pool.
    pub blocks: u32,
    /// Blocks of the host tier; 0 is none. What is computed on the device is copied there too.
    pub host_blocks: u32,
    /// Requests that run at once.
    pub max_running: u32,
    /// Tokens that one step computes, prefill and decode together.
    pub max_batched_tokens: u32,
    /// Tokens of a prompt and its answer. Never more than the pool holds: a request that cannot fit would
    /// wait for ever.
    pub max_model_len: u32,
    /// Requests that wait; more are refused.
    pub max_waiting: u32,
    /// How long a step takes.
    pub timing: Timing,
}

impl Default for EngineConfig {
    /// vLLM as it is shipped, on a small pool: 2,048 blocks of 16 tokens.
    fn default() -> Self {
        Self {
            shape: Shape::Vllm,
            encoding: Encoding::Map,
            hash: HashKind::Int,
            hash_seed: HashSeed::Fixed(0),
            block_size: DEFAULT_BLOCK_SIZE,
            blocks: 2_048,
            host_blocks: 0,
            max_running: 128,
            max_batched_tokens: 2_048,
            max_model_len: 32_768,
            max_waiting: 4_096,
            timing: Timing::default(),
        }
    }
}

/// What vLLM and most SGLang deployments use.
const DEFAULT_BLOCK_SIZE: BlockSize = match BlockSize::new(16) {
    Some(size) => size,
    // 16 is not zero; the compiler would say so.
    None => unreachable!(),
};

impl EngineConfig {
    /// The same with every number in its range.
    #[must_use]
    pub fn in_range(mut self) -> Self {
        self.blocks = self.blocks.max(1);
        self.max_running = self.max_running.max(1);
        self.max_batched_tokens = self.max_batched_tokens.max(1);
        let pool = self.blocks.saturating_mul(self.block_size.get());
        self.max_model_len = self.max_model_len.clamp(1, pool);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_never_needs_more_than_the_pool() {
        let config = EngineConfig { blocks: 3, max_model_len: 1_000, ..EngineConfig::default() };
        assert_eq!(config.in_range().max_model_len, 48);
        let config = EngineConfig { blocks: 0, max_running: 0, max_batched_tokens: 0, ..config }.in_range();
        assert_eq!((config.blocks, config.max_running, config.max_batched_tokens), (1, 1, 1));
    }
}

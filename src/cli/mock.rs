//! `rankwise mock`.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rand::TryRngCore;
use rand::rngs::OsRng;
use rankwise::block::BlockSize;
use rankwise::mock::server::{Fleet, FleetConfig};
use rankwise::mock::{Encoding, EngineConfig, HashKind, HashSeed, Shape, Timing};
use tracing::info;

use super::output::print_json;
use super::{Verdict, asked_to_stop, runtime};

/// Run engines without a GPU: real ports, real caches, no model
///
/// Each rank has a paged KV cache, continuous batching and a clock, publishes KV events and answers replays, and
/// serves completions over HTTP. Where everything is bound is printed as one line of JSON once it is.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  rankwise mock --ranks 4 --event-port 5557 --replay-port 5657 --port 8000
      one vLLM-shaped worker of four ranks: rank N publishes on port 5557+N, answers replays on 5657+N
  rankwise mock --shape sglang --workers 2 --ranks 2 --blocks 512 --speed 10
      two SGLang-shaped workers with small caches, ten times as fast as real ones
  curl localhost:8000/v1/completions -H 'X-data-parallel-rank: 1' -d '{\"prompt\": \"once upon a time\"}'
      a completion by rank 1; its usage says how many prompt tokens were cached
  curl localhost:8000/debug/fault -d '{\"dp_rank\": 1, \"kind\": \"drop_batches\", \"count\": 3}'
      rank 1 loses three batches (also: lose_batches, stall, restart, wedge, unwedge, lie, truth)")]
pub struct Args {
    /// Whose behaviour
    #[arg(long, value_enum, default_value = "vllm")]
    shape: ShapeName,

    /// Workers
    #[arg(long, value_name = "N", default_value_t = 1)]
    workers: u32,

    /// Data-parallel ranks of each worker
    #[arg(long, value_name = "N", default_value_t = 2)]
    ranks: u32,

    /// Global number of each worker's first rank
    #[arg(long, value_name = "RANK", default_value_t = 0)]
    dp_start_rank: u32,

    /// Model that is served
    #[arg(long, value_name = "MODEL", default_value = "mock")]
    model: String,

    /// Worker N is called NAME-N
    #[arg(long, value_name = "NAME", default_value = "mock")]
    name: String,

    /// Address to bind
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,

    /// HTTP port of worker 0, one more for each next one; 0 takes free ones
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,

    /// Event port of the first rank, one more for each next one, from worker to worker; 0 takes free ones
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    event_port: u16,

    /// Replay port, likewise
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    replay_port: u16,

    /// gRPC port of worker 0, one more for each next one; 0 takes free ones
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    grpc_port: u16,

    #[command(flatten)]
    cache: CacheArgs,

    #[command(flatten)]
    time: TimeArgs,

    /// Batches that a replay can give
    #[arg(long, value_name = "BATCHES", default_value_t = 10_000)]
    replay_buffer: usize,
}

#[derive(Debug, clap::Args)]
struct CacheArgs {
    /// Tokens per block
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    block_size: u32,

    /// Blocks of each rank's device
    #[arg(long, value_name = "BLOCKS", default_value_t = 2_048)]
    blocks: u32,

    /// Blocks of each rank's host tier; 0 is none
    #[arg(long, value_name = "BLOCKS", default_value_t = 0)]
    host_blocks: u32,

    /// How events are written: by position, or by name
    #[arg(long, value_enum, default_value = "map")]
    encoding: EncodingName,

    /// What blocks are called: 64-bit integers, or byte strings (vLLM only)
    #[arg(long, value_enum, default_value = "int")]
    hash: HashName,

    /// Where blocks' names begin: the same number on every rank, or `random`: another on each rank and after
    /// each restart
    #[arg(long, value_name = "SEED", default_value = "random", value_parser = hash_seed)]
    hash_seed: HashSeed,
}

#[derive(Debug, clap::Args)]
struct TimeArgs {
    /// Prompt tokens computed per second
    #[arg(long, value_name = "TOKENS", default_value_t = Timing::default().prefill_tokens_per_second)]
    prefill_rate: f64,

    /// Milliseconds that one token of every running request takes
    #[arg(long, value_name = "MS", default_value_t = 20.0)]
    decode_step: f64,

    /// Tokens that one step computes
    #[arg(long, value_name = "TOKENS")]
    max_batched_tokens: Option<u32>,

    /// Requests that run at once on a rank
    #[arg(long, value_name = "N")]
    max_running: Option<u32>,

    /// Tokens of a prompt and its answer
    #[arg(long, value_name = "TOKENS")]
    max_model_len: Option<u32>,

    /// How many times faster than real time passes
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed: f64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ShapeName {
    /// vLLM
    Vllm,
    /// SGLang
    Sglang,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum EncodingName {
    /// Positional arrays: vLLM up to 0.23, SGLang up to 0.5.19
    Array,
    /// Maps: newer ones
    Map,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum HashName {
    /// 64-bit integers
    Int,
    /// Byte strings
    Bytes,
}

fn hash_seed(text: &str) -> Result<HashSeed, String> {
    match text {
        "random" => OsRng.try_next_u64().map(HashSeed::PerProcess).map_err(|error| error.to_string()),
        number => number.parse().map(HashSeed::Fixed).map_err(|_| "give `random` or a number".to_owned()),
    }
}

impl Args {
    /// Runs the engines until Ctrl-C or SIGTERM.
    ///
    /// # Errors
    /// Numbers that cannot be, and ports that cannot be bound.
    pub fn run(self) -> Result<Verdict> {
        let config = self.config()?;
        runtime()?.block_on(async {
            let fleet = Fleet::start(config).await?;
            print_json(&serde_json::json!({ "workers": fleet.workers() }))?;
            asked_to_stop().await;
            info!("the engines stop");
            fleet.shutdown().await;
            Ok(Verdict::Ok)
        })
    }

    fn config(self) -> Result<FleetConfig> {
        Ok(FleetConfig {
            engine: self.engine()?,
            model: self.model,
            name: self.name,
            host: self.host,
            workers: self.workers,
            ranks: self.ranks,
            dp_start_rank: self.dp_start_rank,
            port: self.port,
            grpc_port: self.grpc_port,
            event_port: self.event_port,
            replay_port: self.replay_port,
            replay_buffer: self.replay_buffer,
        })
    }

    fn engine(&self) -> Result<EngineConfig> {
        let Self { cache, time, .. } = self;
        for (flag, value) in [("--prefill-rate", time.prefill_rate), ("--speed", time.speed)] {
            if !(value > 0.0 && value.is_finite()) {
                bail!("{flag} is {value}; give a number above 0");
            }
        }
        let decode_step = Duration::try_from_secs_f64(time.decode_step / 1e3)
            .with_context(|| format!("--decode-step is {}; give milliseconds", time.decode_step))?;
        let default = EngineConfig::default();
        Ok(EngineConfig {
            shape: match self.shape {
                ShapeName::Vllm => Shape::Vllm,
                ShapeName::Sglang => Shape::Sglang,
            },
            encoding: match cache.encoding {
                EncodingName::Array => Encoding::Array,
                EncodingName::Map => Encoding::Map,
            },
            hash: match cache.hash {
                HashName::Int => HashKind::Int,
                HashName::Bytes => HashKind::Bytes,
            },
            hash_seed: cache.hash_seed,
            block_size: BlockSize::new(cache.block_size).context("--block-size is 0")?,
            blocks: cache.blocks,
            host_blocks: cache.host_blocks,
            max_running: time.max_running.unwrap_or(default.max_running),
            max_batched_tokens: time.max_batched_tokens.unwrap_or(default.max_batched_tokens),
            max_model_len: time.max_model_len.unwrap_or(default.max_model_len),
            timing: Timing {
                prefill_tokens_per_second: time.prefill_rate,
                decode_step,
                speed: time.speed,
                ..default.timing
            },
            ..default
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn seeds_are_numbers_or_random() {
        assert_eq!(hash_seed("17").unwrap(), HashSeed::Fixed(17));
        assert!(matches!(hash_seed("random").unwrap(), HashSeed::PerProcess(_)));
        assert!(hash_seed("never").is_err());
    }
}

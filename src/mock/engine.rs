//! One rank's engine: the scheduler, step by step.

use crate::ids::{DpRank, Moment};
use crate::mock::config::EngineConfig;
use crate::mock::page::Truth;
use crate::mock::request::{Generation, Output, Refusal, RequestId};

/// One rank's engine.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    dp_rank: DpRank,
}

/// How busy and how full an engine is at this moment, and what it has done since it was started. Exact; what
/// is reported of it, and in which engine's words, is the reporter's business.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct LoadNow {
    /// Requests that run.
    pub running: u32,
    /// Requests that wait, the preempted ones among them.
    pub waiting: u32,
    /// The limit of requests that run.
    pub max_running: u32,
    /// Blocks that requests hold.
    pub used_blocks: u32,
    /// Blocks with cached content, whether requests hold them or not.
    pub cached_blocks: u32,
    /// Blocks of the pool.
    pub total_blocks: u32,
    /// Blocks in the host tier, and how many it can hold.
    pub host_blocks: u32,
    /// How many it can hold.
    pub total_host_blocks: u32,
    /// Tokens in the blocks that requests hold, counted by whole blocks as engines do.
    pub used_tokens: u64,
    /// Tokens that the pool holds.
    pub max_total_tokens: u64,
    /// Prompt tokens of waiting requests that the cache does not have now.
    pub waiting_uncached_tokens: u64,
    /// Tokens that running requests have still to compute before their first or next token.
    pub prefill_tokens: u64,
    /// Tokens computed by the step that is under way.
    pub batched_tokens: u32,
    /// Prompt tokens looked up in the cache since the start.
    pub prefix_queries: u64,
    /// Of these, found.
    pub prefix_hits: u64,
    /// Prompt tokens of finished requests since the start.
    pub prompt_tokens: u64,
    /// Tokens generated since the start.
    pub generated_tokens: u64,
    /// Requests finished since the start.
    pub finished: u64,
    /// Preemptions since the start.
    pub preemptions: u64,
    /// Tokens generated per second, over the last second in which the engine worked.
    pub generation_throughput: f64,
}

impl Engine {
    /// An engine with empty caches.
    pub fn new(config: EngineConfig, dp_rank: DpRank) -> Self {
        Self { config: config.in_range(), dp_rank }
    }

    /// What it was made with, in range.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Its rank.
    pub fn dp_rank(&self) -> DpRank {
        self.dp_rank
    }

    /// Takes a request; nothing comes out before [`Engine::advance`] is called.
    ///
    /// # Errors
    /// A request that could never be answered, and one more than may wait.
    pub fn submit(&mut self, _now: Moment, _request: Generation) -> Result<(), Refusal> {
        Ok(())
    }

    /// Forgets a request, answered or not, and frees its blocks. False if there is none of this number.
    pub fn abort(&mut self, _id: RequestId) -> bool {
        false
    }

    /// Ends and begins every step that is due by `now`, at its own moment.
    pub fn advance(&mut self, _now: Moment, _out: &mut Vec<Output>) {}

    /// When [`Engine::advance`] has something to do; `None` without requests, and when wedged.
    pub fn next_deadline(&self) -> Option<Moment> {
        None
    }

    /// Empties both tiers, unless requests are in the way: then it is refused, and false.
    pub fn reset_prefix_cache(&mut self, _now: Moment, _out: &mut Vec<Output>) -> bool {
        false
    }

    /// Ends the process and starts it anew: empty caches, counters at 0, another seed if it is drawn; every
    /// request fails. Whoever numbers the batches begins at 0 again.
    pub fn restart(&mut self, _now: Moment, _out: &mut Vec<Output>) {}

    /// Does nothing until `until`: no step ends and none begins.
    pub fn stall(&mut self, _now: Moment, _until: Moment) {}

    /// Does nothing until [`Engine::unwedge`].
    pub fn wedge(&mut self) {}

    /// Goes on after [`Engine::wedge`] or [`Engine::stall`].
    pub fn unwedge(&mut self, _now: Moment) {}

    /// How busy and how full it is.
    pub fn load(&self) -> LoadNow {
        LoadNow::default()
    }

    /// What its caches hold.
    pub fn truth(&self) -> Truth {
        Truth::default()
    }

    /// How many leading tokens of `prompt` a request would be spared if it were admitted now: on the device,
    /// and with the host tier's help.
    pub fn cached_tokens(&self, _prompt: &[u32]) -> (u32, u32) {
        (0, 0)
    }
}

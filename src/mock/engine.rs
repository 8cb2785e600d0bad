//! One rank's engine: requests in, steps at their moments, outputs out.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use crate::ids::{DpRank, Moment};
use crate::mock::config::{EngineConfig, Shape};
use crate::mock::host::HostTier;
use crate::mock::page::{Naming, Page, Truth};
use crate::mock::pool::Pool;
use crate::mock::request::{Failure, Generation, Output, Refusal, RequestId};
use crate::mock::sequence::{Sequence, narrow};
use crate::mock::shape::{Change, payload};
use crate::mock::step::Step;

/// One rank's engine.
///
/// It works in steps, one after the other while there is anything to do. A step computes at most
/// [`EngineConfig::max_batched_tokens`] tokens: first of the running requests, one token of each that
/// decodes and as much as fits of each that prefills; then requests are admitted in the order in which they
/// came, as long as blocks, tokens and the limit of running requests allow, and the first that does not fit
/// blocks those behind it. A request is admitted with the longest leading run of full blocks that the device
/// holds, then with what the host tier can add to it. If a running request finds no free block, the newest
/// running one gives up all of its blocks and waits again in front.
///
/// A step that begins evicts and, in vLLM's shape, announces what it fills; a step that ends delivers tokens
/// and, in SGLang's shape, announces what it has computed. Both publish at once, so that between two calls
/// [`Engine::truth`] is what has been published, but for [`Engine::has_unpublished`].
#[derive(Debug)]
pub struct Engine {
    pub(super) config: EngineConfig,
    pub(super) naming: Naming,
    pub(super) pool: Pool,
    pub(super) host: HostTier,
    pub(super) waiting: VecDeque<Sequence>,
    pub(super) running: Vec<Sequence>,
    pub(super) changes: Vec<Change>,
    /// vLLM's shape: what the step under way computes and the next one will copy to the host tier.
    pub(super) unsaved: Vec<Vec<Arc<Page>>>,
    pub(super) counts: Counts,
    dp_rank: DpRank,
    /// How many processes there were before this one.
    generation: u32,
    /// Numbers of waiting and running requests.
    taken: HashSet<RequestId>,
    step: Option<Step>,
    /// When the last step ended.
    clock: Moment,
    /// Nothing happens before.
    held: Moment,
}

/// What has been done since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub finished: u64,
    pub preemptions: u64,
    pub throughput: f64,
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
    /// Blocks in the host tier.
    pub host_blocks: u32,
    /// Blocks that the host tier can hold.
    pub total_host_blocks: u32,
    /// Tokens in the blocks that requests hold, counted by whole blocks as engines do.
    pub used_tokens: u64,
    /// Tokens that the pool holds.
    pub max_total_tokens: u64,
    /// Prompt tokens of waiting requests that the device does not have now.
    pub waiting_uncached_tokens: u64,
    /// Tokens of running requests that are being or have still to be computed before they decode.
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
    /// Tokens generated per second by the last step; 0 when idle.
    pub generation_throughput: f64,
}

/// Later than any step: [`Engine::wedge`].
const NEVER: Moment = Moment(u64::MAX);

impl Engine {
    /// An engine with empty caches.
    pub fn new(config: EngineConfig, dp_rank: DpRank) -> Self {
        let config = config.in_range();
        Self {
            naming: Naming::new(&config, dp_rank.0, 0),
            pool: Pool::new(config.blocks),
            host: HostTier::new(config.host_blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            changes: first_changes(&config),
            unsaved: Vec::new(),
            counts: Counts::default(),
            dp_rank,
            generation: 0,
            taken: HashSet::new(),
            step: None,
            clock: Moment::default(),
            held: Moment::default(),
            config,
        }
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
    pub fn submit(&mut self, now: Moment, request: Generation) -> Result<(), Refusal> {
        if request.prompt.is_empty() {
            return Err(Refusal::EmptyPrompt);
        }
        if request.max_tokens == 0 {
            return Err(Refusal::NothingToGenerate);
        }
        let tokens = request.prompt.len() as u64 + u64::from(request.max_tokens);
        let limit = self.config.max_model_len;
        if tokens > u64::from(limit) {
            return Err(Refusal::TooLong { tokens, limit });
        }
        if self.waiting.len() >= self.config.max_waiting as usize {
            return Err(Refusal::QueueFull { limit: self.config.max_waiting });
        }
        if !self.taken.insert(request.id) {
            return Err(Refusal::Taken(request.id));
        }
        let mut sequence = Sequence::new(request, now);
        sequence.name_pages(self.naming, self.config.block_size);
        self.waiting.push_back(sequence);
        Ok(())
    }

    /// Forgets a request, answered or not, and frees its blocks. False if there is none of this number.
    pub fn abort(&mut self, id: RequestId) -> bool {
        if !self.taken.remove(&id) {
            return false;
        }
        self.waiting.retain(|sequence| sequence.id != id);
        if let Some(at) = self.running.iter().position(|sequence| sequence.id == id) {
            let sequence = self.running.remove(at);
            self.pool.release(&sequence.blocks);
        }
        true
    }

    /// Ends and begins every step that is due by `now`, each at its own moment.
    pub fn advance(&mut self, now: Moment, out: &mut Vec<Output>) {
        loop {
            if let Some(step) = self.step.take() {
                let due = step.due.max(self.held);
                if due > now || due == NEVER {
                    self.step = Some(step);
                    return;
                }
                self.end_step(&step, due, out);
                self.clock = due;
            }
            match self.next_start() {
                Some(start) if start <= now && start != NEVER => {
                    let step = self.begin_step(start, out);
                    self.step = Some(step);
                }
                _ => return,
            }
        }
    }

    /// When [`Engine::advance`] has something to do; `None` without requests, and when wedged.
    pub fn next_deadline(&self) -> Option<Moment> {
        let next = match &self.step {
            Some(step) => Some(step.due.max(self.held)),
            None => self.next_start(),
        };
        next.filter(|next| *next != NEVER)
    }

    /// Empties both tiers, unless requests are in the way: then it is refused, and false.
    ///
    /// In vLLM's shape waiting requests are not in the way, and the clear travels with the next step's
    /// batch: after a reset of an idle engine nothing is published before its next request.
    pub fn reset_prefix_cache(&mut self, now: Moment, out: &mut Vec<Output>) -> bool {
        let sglang = self.config.shape == Shape::Sglang;
        if self.pool.used() > 0 || (sglang && !self.taken.is_empty()) {
            return false;
        }
        self.pool.clear();
        self.host.clear();
        self.unsaved.clear();
        if self.changes.last() != Some(&Change::Cleared) {
            self.changes.push(Change::Cleared);
        }
        if sglang {
            self.publish(now, out);
        }
        true
    }

    /// Ends the process and starts it anew: empty caches, counters at 0, another seed if it is drawn, no
    /// stall; every request fails. Whoever numbers the batches begins at 0 again.
    pub fn restart(&mut self, now: Moment, out: &mut Vec<Output>) {
        let requests = self.running.drain(..).chain(self.waiting.drain(..));
        let failed =
            |sequence: Sequence| Output::Failed { id: sequence.id, reason: Failure::Restarted, at: now };
        out.extend(requests.map(failed));
        let generation = self.generation.wrapping_add(1);
        let mut fresh = Self::new(self.config, self.dp_rank);
        fresh.naming = Naming::new(&fresh.config, fresh.dp_rank.0, generation);
        fresh.generation = generation;
        fresh.clock = now;
        *self = fresh;
    }

    /// Does nothing until `until`: no step ends and none begins.
    pub fn stall(&mut self, until: Moment) {
        self.held = self.held.max(until);
    }

    /// Does nothing until [`Engine::unwedge`].
    pub fn wedge(&mut self) {
        self.held = NEVER;
    }

    /// Goes on after [`Engine::wedge`] or [`Engine::stall`], from `now`.
    pub fn unwedge(&mut self, now: Moment) {
        self.held = now;
    }

    /// How busy and how full it is. Looks up every waiting prompt.
    pub fn load(&self) -> LoadNow {
        let block = u64::from(self.config.block_size.get());
        let waiting_uncached = self.waiting.iter().map(|sequence| {
            let hit = self.pool.lead(&sequence.pages[..sequence.hit_limit(self.config.block_size)]).len();
            sequence.tokens.len() as u64 - hit as u64 * block
        });
        let missing = self
            .running
            .iter()
            .filter(|sequence| sequence.missing() > 1)
            .map(Sequence::missing)
            .sum::<usize>();
        let step = self.step.as_ref();
        let counts = self.counts;
        LoadNow {
            running: narrow(self.running.len()),
            waiting: narrow(self.waiting.len()),
            max_running: self.config.max_running,
            used_blocks: narrow(self.pool.used()),
            cached_blocks: narrow(self.pool.cached_blocks()),
            total_blocks: narrow(self.pool.total()),
            host_blocks: narrow(self.host.len()),
            total_host_blocks: narrow(self.host.capacity()),
            used_tokens: self.pool.used() as u64 * block,
            max_total_tokens: self.pool.total() as u64 * block,
            waiting_uncached_tokens: waiting_uncached.sum(),
            prefill_tokens: missing as u64 + step.map_or(0, |step| step.prefill as u64),
            batched_tokens: step.map_or(0, |step| narrow(step.tokens)),
            prefix_queries: counts.prefix_queries,
            prefix_hits: counts.prefix_hits,
            prompt_tokens: counts.prompt_tokens,
            generated_tokens: counts.generated_tokens,
            finished: counts.finished,
            preemptions: counts.preemptions,
            generation_throughput: if step.is_some() { counts.throughput } else { 0.0 },
        }
    }

    /// What its caches hold. Copies every name.
    pub fn truth(&self) -> Truth {
        Truth { device: self.naming.held(self.pool.pages()), host: self.naming.held(self.host.pages()) }
    }

    /// Whether a clear has not been published yet: SGLang's first one, and vLLM's after a reset. They travel
    /// with the next batch.
    pub fn has_unpublished(&self) -> bool {
        !self.changes.is_empty()
    }

    /// How many leading tokens of `prompt` a request would be spared if it were admitted now: by the device
    /// alone, and with the host tier's help.
    pub fn cached_tokens(&self, prompt: &[u32]) -> (u32, u32) {
        let block_size = self.config.block_size;
        let usable = prompt.len().saturating_sub(1) / block_size.as_usize();
        let mut pages = Vec::new();
        self.naming.extend(&mut pages, &prompt[..usable * block_size.as_usize()], block_size);
        let device = self.pool.lead(&pages).len();
        let host = self.host.lead(&pages[device..]);
        let tokens = |blocks: usize| narrow(blocks * block_size.as_usize());
        (tokens(device), tokens(device + host))
    }

    /// Sends what has changed, if anything has.
    pub(super) fn publish(&mut self, at: Moment, out: &mut Vec<Output>) {
        if !self.changes.is_empty() {
            let payload = payload(&self.config, self.naming, self.dp_rank, at, &self.changes);
            self.changes.clear();
            out.push(Output::Batch { payload, at });
        }
    }

    /// A request is done with: its number can be used again.
    pub(super) fn forget(&mut self, id: RequestId) {
        self.taken.remove(&id);
    }

    /// When the next step can begin, none being under way.
    fn next_start(&self) -> Option<Moment> {
        let ready = match (self.running.is_empty(), self.waiting.front()) {
            (true, None) => return None,
            (true, Some(first)) => self.clock.max(first.arrived),
            (false, _) => self.clock,
        };
        Some(ready.max(self.held))
    }
}

/// What a new process has to tell.
fn first_changes(config: &EngineConfig) -> Vec<Change> {
    match config.shape {
        Shape::Vllm => Vec::new(),
        Shape::Sglang => vec![Change::Cleared],
    }
}

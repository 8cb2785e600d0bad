//! One step of the scheduler.

use std::sync::Arc;

use crate::block::Tier;
use crate::ids::Moment;
use crate::mock::config::Shape;
use crate::mock::engine::Engine;
use crate::mock::page::Page;
use crate::mock::pool::BlockId;
use crate::mock::request::{Output, RequestId};
use crate::mock::sequence::Sequence;
use crate::mock::shape::Change;

/// A step under way.
#[derive(Debug)]
pub struct Step {
    pub due: Moment,
    /// Tokens that it computes.
    pub tokens: usize,
    /// Of these, prefill.
    pub prefill: usize,
    began: Moment,
    work: Vec<RequestId>,
}

/// What a step has room for, and what is in it.
struct Plan {
    budget: usize,
    prefill: usize,
    decodes: bool,
    tokens: usize,
    work: Vec<RequestId>,
}

impl Plan {
    fn add(&mut self, sequence: &Sequence, tokens: usize) {
        self.budget -= tokens;
        self.tokens += tokens;
        // A preempted request computes what it has generated like a prompt.
        match sequence.generated() > 0 && tokens == 1 {
            true => self.decodes = true,
            false => self.prefill += tokens,
        }
        self.work.push(sequence.id);
    }
}

impl Engine {
    /// Schedules a step, and says what it evicts and, in vLLM's shape, fills.
    pub(super) fn begin_step(&mut self, at: Moment, out: &mut Vec<Output>) -> Step {
        for pages in std::mem::take(&mut self.unsaved) {
            self.save_to_host(&pages);
        }
        let budget = self.config.max_batched_tokens as usize;
        let mut plan = Plan { budget, prefill: 0, decodes: false, tokens: 0, work: Vec::new() };
        let preempted = self.plan_running(&mut plan);
        if !preempted {
            self.plan_waiting(at, &mut plan);
        }
        self.publish(at, out);
        let due = at + self.config.timing.step(plan.prefill, plan.decodes);
        Step { due, tokens: plan.tokens, prefill: plan.prefill, began: at, work: plan.work }
    }

    /// Delivers what a step has computed.
    pub(super) fn end_step(&mut self, step: &Step, at: Moment, out: &mut Vec<Output>) {
        let mut generated = 0_u32;
        for &id in &step.work {
            // Aborted meanwhile.
            let Some(index) = self.running.iter().position(|sequence| sequence.id == id) else { continue };
            let sequence = &mut self.running[index];
            let prefilled = sequence.generated() == 0;
            let mut complete = false;
            if sequence.missing() == 0 {
                let (index, token) = sequence.generate();
                out.push(Output::Token { id, index, token, at });
                generated += 1;
                complete = sequence.is_complete();
            }
            if self.config.shape == Shape::Sglang && (prefilled || complete) {
                self.cache_computed(index);
            }
            if complete {
                self.finish(index, at, out);
            }
        }
        self.counts.generated_tokens += u64::from(generated);
        let seconds = at.since(step.began).as_secs_f64();
        self.counts.throughput = if seconds > 0.0 { f64::from(generated) / seconds } else { 0.0 };
        self.publish(at, out);
    }

    /// Gives the running requests their tokens; true if one of them lost its blocks to another.
    fn plan_running(&mut self, plan: &mut Plan) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() && plan.budget > 0 {
            let tokens = self.running[index].missing().min(plan.budget);
            while !self.grow(index, tokens) {
                preempted = true;
                self.preempt_newest();
                if index == self.running.len() {
                    return preempted;
                }
            }
            self.compute(index, tokens, plan);
            index += 1;
        }
        preempted
    }

    /// Admits waiting requests in their order, until one does not fit.
    fn plan_waiting(&mut self, at: Moment, plan: &mut Plan) {
        while plan.budget > 0 && self.running.len() < self.config.max_running as usize {
            match self.waiting.pop_front() {
                Some(mut sequence) if sequence.arrived <= at => {
                    match self.admit(&mut sequence, plan.budget) {
                        Some(tokens) => {
                            self.running.push(sequence);
                            self.compute(self.running.len() - 1, tokens, plan);
                        }
                        None => return self.waiting.push_front(sequence),
                    }
                }
                Some(sequence) => return self.waiting.push_front(sequence),
                None => return,
            }
        }
    }

    /// Gives a waiting request what the caches have of it and blocks for as many further tokens as the step
    /// has room for, and says for how many; `None`, and nothing has changed, if there are not enough blocks.
    fn admit(&mut self, sequence: &mut Sequence, budget: usize) -> Option<usize> {
        let block_size = self.config.block_size;
        sequence.name_pages(self.naming, block_size);
        let limit = sequence.hit_limit(block_size);
        let hits = self.pool.lead(&sequence.pages[..limit]);
        let on_device = hits.len();
        let found = on_device + self.host.lead(&sequence.pages[on_device..limit]);
        let computed = found * block_size.as_usize();
        let tokens = (sequence.tokens.len() - computed).min(budget);
        let fresh = (computed + tokens).div_ceil(block_size.as_usize()) - on_device;
        if fresh > self.pool.available() - self.pool.free_among(&hits) {
            return None;
        }
        self.pool.hold(&hits);
        sequence.blocks = hits;
        // There are enough, as was just counted.
        sequence.blocks.extend(self.take(fresh).unwrap_or_default());
        let loaded = on_device..found;
        self.host.wanted(&sequence.pages[loaded.clone()]);
        self.cache(&sequence.blocks[loaded.clone()], &sequence.pages[loaded]);
        sequence.cached = found;
        sequence.computed = computed;
        if sequence.found.is_none() {
            sequence.found = Some(computed);
            self.counts.prefix_queries += sequence.tokens.len() as u64;
            self.counts.prefix_hits += computed as u64;
        }
        Some(tokens)
    }

    /// Puts tokens of a running request, for which it has blocks, into the step.
    fn compute(&mut self, index: usize, tokens: usize, plan: &mut Plan) {
        let sequence = &mut self.running[index];
        plan.add(sequence, tokens);
        sequence.computed += tokens;
        if self.config.shape == Shape::Vllm {
            self.cache_scheduled(index);
        }
    }

    /// Takes the blocks that a running request needs for further tokens; false if there are not enough.
    fn grow(&mut self, index: usize, tokens: usize) -> bool {
        let sequence = &self.running[index];
        let needed = (sequence.computed + tokens).div_ceil(self.config.block_size.as_usize());
        let Some(fresh) = self.take(needed.saturating_sub(sequence.blocks.len())) else { return false };
        self.running[index].blocks.extend(fresh);
        true
    }

    fn preempt_newest(&mut self) {
        if let Some(mut sequence) = self.running.pop() {
            let blocks = sequence.forget_progress();
            self.pool.release(&blocks);
            self.waiting.push_front(sequence);
            self.counts.preemptions += 1;
        }
    }

    fn finish(&mut self, index: usize, at: Moment, out: &mut Vec<Output>) {
        let sequence = self.running.remove(index);
        self.pool.release(&sequence.blocks);
        self.forget(sequence.id);
        let usage = sequence.usage();
        self.counts.finished += 1;
        self.counts.prompt_tokens += u64::from(usage.prompt_tokens);
        out.push(Output::Finished { id: sequence.id, usage, at });
    }

    /// vLLM: caches the blocks that the step fills, each physical one by itself, before they are computed.
    fn cache_scheduled(&mut self, index: usize) {
        let block_size = self.config.block_size;
        let sequence = &mut self.running[index];
        sequence.name_pages(self.naming, block_size);
        let filled = sequence.cached..sequence.computed / block_size.as_usize();
        sequence.cached = filled.end;
        let blocks = sequence.blocks[filled.clone()].to_vec();
        let pages = sequence.pages[filled].to_vec();
        self.cache(&blocks, &pages);
        if self.host.capacity() > 0 && !pages.is_empty() {
            self.unsaved.push(pages);
        }
    }

    /// SGLang: caches the pages that have been computed. A page that is cached already is shared, and the
    /// request's own block is free again.
    fn cache_computed(&mut self, index: usize) {
        let block_size = self.config.block_size;
        let sequence = &mut self.running[index];
        sequence.name_pages(self.naming, block_size);
        let computed = sequence.cached..sequence.computed / block_size.as_usize();
        sequence.cached = computed.end;
        let pages = sequence.pages[computed.clone()].to_vec();
        for (at, page) in computed.zip(&pages) {
            let own = self.running[index].blocks[at];
            match self.pool.find(page.key) {
                Some(held) => {
                    self.pool.hold(&[held]);
                    self.pool.release(&[own]);
                    self.running[index].blocks[at] = held;
                }
                None => self.cache(&[own], std::slice::from_ref(page)),
            }
        }
        self.save_to_host(&pages);
    }

    /// Caches `pages` in `blocks`, and says so.
    fn cache(&mut self, blocks: &[BlockId], pages: &[Arc<Page>]) {
        for (block, page) in blocks.iter().zip(pages) {
            self.pool.cache(*block, page.clone());
        }
        if !pages.is_empty() {
            self.changes.push(Change::Stored { tier: Tier::Device, pages: pages.to_vec() });
        }
    }

    /// Takes free blocks, and says what they held.
    fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        let mut evicted = Vec::new();
        let taken = self.pool.take(count, &mut evicted);
        let removed = |page: Arc<Page>| Change::Removed { tier: Tier::Device, key: page.key };
        self.changes.extend(evicted.into_iter().map(removed));
        taken
    }

    /// Copies pages of one chain to the host tier, and says what came and left.
    fn save_to_host(&mut self, pages: &[Arc<Page>]) {
        let saved = self.host.save(pages);
        let removed = |page: Arc<Page>| Change::Removed { tier: Tier::Host, key: page.key };
        self.changes.extend(saved.evicted.into_iter().map(removed));
        let stored = |page: Arc<Page>| Change::Stored { tier: Tier::Host, pages: vec![page] };
        match self.config.shape {
            // In vLLM's host tier children may come before their parents; here they always do.
            Shape::Vllm => self.changes.extend(saved.stored.into_iter().rev().map(stored)),
            Shape::Sglang => self.changes.extend(saved.stored.into_iter().map(stored)),
        }
    }
}

//! A request inside the engine.

use std::sync::Arc;

use crate::block::BlockSize;
use crate::ids::Moment;
use crate::mock::page::{Naming, Page};
use crate::mock::pool::BlockId;
use crate::mock::request::{Completion, Generation, RequestId, Usage};

/// A request that waits or runs.
#[derive(Debug)]
pub struct Sequence {
    pub id: RequestId,
    /// The prompt, and what has been generated.
    pub tokens: Vec<u32>,
    pub arrived: Moment,
    /// The full blocks of `tokens`, as far as they have been named.
    pub pages: Vec<Arc<Page>>,
    /// The blocks that it holds, head to tail.
    pub blocks: Vec<BlockId>,
    /// How many leading ones of them are in the prefix cache.
    pub cached: usize,
    /// Tokens that have been computed, or are by the step under way.
    pub computed: usize,
    /// Prompt tokens found in the cache when it was first admitted.
    pub found: Option<usize>,
    prompt: usize,
    max_tokens: usize,
    answer: Completion,
}

impl Sequence {
    pub fn new(request: Generation, arrived: Moment) -> Self {
        Self {
            id: request.id,
            answer: Completion::of(&request.prompt),
            prompt: request.prompt.len(),
            tokens: request.prompt,
            max_tokens: request.max_tokens as usize,
            arrived,
            pages: Vec::new(),
            blocks: Vec::new(),
            cached: 0,
            computed: 0,
            found: None,
        }
    }

    /// Tokens that have to be computed before the next one can be generated.
    pub fn missing(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub fn generated(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    pub fn is_complete(&self) -> bool {
        self.generated() >= self.max_tokens
    }

    /// Generates a token: its place in the answer, and the token.
    pub fn generate(&mut self) -> (u32, u32) {
        let index = narrow(self.generated());
        let token = self.answer.token(index);
        self.tokens.push(token);
        (index, token)
    }

    /// Names the full blocks of its tokens.
    pub fn name_pages(&mut self, naming: Naming, block_size: BlockSize) {
        naming.extend(&mut self.pages, &self.tokens, block_size);
    }

    /// Pages that can be a hit: the last token is always computed, or there would be nothing to generate from.
    pub fn hit_limit(&self, block_size: BlockSize) -> usize {
        self.tokens.len().saturating_sub(1) / block_size.as_usize()
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: narrow(self.prompt),
            cached_tokens: narrow(self.found.unwrap_or_default()),
            completion_tokens: narrow(self.generated()),
        }
    }

    /// Back to where it has nothing: everything but the text that it has is to be computed again.
    pub fn forget_progress(&mut self) -> Vec<BlockId> {
        self.cached = 0;
        self.computed = 0;
        std::mem::take(&mut self.blocks)
    }
}

/// Token counts stay below `max_model_len`, which is 32 bits.
pub fn narrow(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

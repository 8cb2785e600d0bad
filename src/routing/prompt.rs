//! From a request's prompt to the hashes that the index knows blocks by.

use crate::block::{
    BlockSize, ContentKey, ContentKeys, Isolation, LocalBlockHash, LocalHasher, SequenceHash,
};

/// A request's prompt and what belongs to its blocks' content.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The prompt itself.
    pub form: PromptForm<'a>,
    /// The adapter's name; empty is absent.
    pub lora_name: Option<&'a str>,
    /// The number of an adapter that the engines announce without a name; it counts where `lora_name` is absent.
    pub lora_id: Option<i64>,
    /// The cache salt; empty is absent. A salted prompt finds salted blocks only.
    pub cache_salt: Option<&'a str>,
    /// Images and other items in the prompt. They count for prompts given as tokens.
    pub mm: &'a [MmItem<'a>],
    /// Further content keys by block, for prompts given as tokens; may be shorter than the prompt.
    pub keys: &'a [ContentKeys],
}

/// How a prompt is given.
#[derive(Clone, Copy, Debug)]
pub enum PromptForm<'a> {
    /// Its token ids.
    Tokens {
        /// The ids.
        ids: &'a [u32],
        /// Hash windows of block size + 1 tokens, as engines with Eagle drafters do.
        eagle: bool,
    },
    /// The hashes of its full blocks, made by the caller. Adapter and salt are in them.
    Hashes {
        /// Local hashes; may be empty if `sequences` is given.
        locals: &'a [LocalBlockHash],
        /// Sequence hashes; may be empty.
        sequences: &'a [SequenceHash],
        /// Tokens of the prompt, the partial last block included.
        isl_tokens: u64,
    },
}

/// An item, an image for instance, that stands for some tokens of the prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmItem<'a> {
    /// The item's identifier, as the engine names it.
    pub identifier: &'a str,
    /// Its first token's place in the prompt.
    pub offset: u64,
    /// How many tokens it stands for.
    pub length: u64,
}

impl<'a> Prompt<'a> {
    /// A prompt of plain text tokens.
    pub fn tokens(ids: &'a [u32]) -> Self {
        let form = PromptForm::Tokens { ids, eagle: false };
        Self { form, lora_name: None, lora_id: None, cache_salt: None, mm: &[], keys: &[] }
    }

    /// Tokens of the prompt.
    pub fn isl_tokens(&self) -> u64 {
        match self.form {
            PromptForm::Tokens { ids, .. } => ids.len() as u64,
            PromptForm::Hashes { isl_tokens, .. } => isl_tokens,
        }
    }
}

/// A prompt's hashes; keeps its buffers from prompt to prompt.
#[derive(Default, Debug)]
pub struct PromptHashes {
    hasher: LocalHasher,
    locals: Vec<LocalBlockHash>,
    unlocated: Vec<LocalBlockHash>,
    sequences: Vec<SequenceHash>,
    keys: ContentKeys,
}

impl PromptHashes {
    /// Hashes the prompt's full blocks.
    ///
    /// Costs 4 ns per block of 16 tokens for text; with items each block that one touches allocates.
    pub fn fill(&mut self, prompt: &Prompt<'_>, block_size: BlockSize) {
        self.locals.clear();
        self.unlocated.clear();
        self.sequences.clear();
        match prompt.form {
            PromptForm::Hashes { locals, sequences, .. } => {
                self.locals.extend_from_slice(locals);
                self.sequences.extend_from_slice(sequences);
            }
            PromptForm::Tokens { ids, eagle } => self.hash_tokens(prompt, ids, eagle, block_size),
        }
    }

    fn hash_tokens(&mut self, prompt: &Prompt<'_>, ids: &[u32], eagle: bool, block_size: BlockSize) {
        let isolation = match (prompt.lora_name.filter(|name| !name.is_empty()), prompt.lora_id) {
            (None, Some(id)) => Isolation::unnamed_lora(id, prompt.cache_salt),
            (name, _) => Isolation::new(name, prompt.cache_salt),
        };
        if eagle {
            return self.hasher.hash_eagle(isolation, ids, block_size, &mut self.locals);
        }
        if prompt.mm.is_empty() && prompt.keys.is_empty() {
            return self.hasher.hash_prompt(isolation, ids, block_size, &mut self.locals);
        }
        for (nth, block) in ids.chunks_exact(block_size.as_usize()).enumerate() {
            let start = nth as u64 * u64::from(block_size.get());
            let located = self.hash_block(prompt, isolation, nth, start, block, true);
            self.locals.push(located);
            if !prompt.mm.is_empty() {
                let unlocated = self.hash_block(prompt, isolation, nth, start, block, false);
                self.unlocated.push(unlocated);
            }
        }
    }

    fn hash_block(
        &mut self,
        prompt: &Prompt<'_>,
        isolation: Isolation,
        nth: usize,
        start: u64,
        block: &[u32],
        located: bool,
    ) -> LocalBlockHash {
        self.keys.clear();
        self.keys.extend(prompt.keys.get(nth).into_iter().flatten().cloned());
        let end = start + block.len() as u64;
        let touching = prompt
            .mm
            .iter()
            .filter(|item| item.offset < end && item.offset.saturating_add(item.length) > start);
        self.keys.extend(touching.map(|item| ContentKey::Multimodal {
            identifier: item.identifier.into(),
            // Both lie within one prompt, far below 2^63.
            offset: located.then(|| item.offset.cast_signed().wrapping_sub(start.cast_signed())),
        }));
        self.keys.sort();
        self.hasher.hash(isolation, block, &self.keys)
    }

    /// Local hashes of the full blocks; empty where the caller gave sequence hashes alone.
    pub fn locals(&self) -> &[LocalBlockHash] {
        &self.locals
    }

    /// The same for engines that do not say where in a block an item begins (vLLM 0.17 and 0.18); `None`
    /// where that makes no difference.
    pub fn unlocated(&self) -> Option<&[LocalBlockHash]> {
        (!self.unlocated.is_empty() && self.unlocated != self.locals).then_some(&self.unlocated)
    }

    /// Sequence hashes that the caller gave.
    pub fn sequences(&self) -> &[SequenceHash] {
        &self.sequences
    }

    /// Writes the sequence hashes of the full blocks into `chain`: those that the caller gave, else made.
    pub fn chain_into(&self, chain: &mut Vec<SequenceHash>) {
        chain.clear();
        if self.sequences.is_empty() {
            chain.extend(SequenceHash::chain(&self.locals));
        } else {
            chain.extend_from_slice(&self.sequences);
        }
    }

    /// Full blocks of the prompt.
    pub fn blocks(&self) -> usize {
        self.locals.len().max(self.sequences.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: BlockSize = BlockSize::new(4).unwrap();

    fn locals(mm: &[MmItem<'_>]) -> Vec<LocalBlockHash> {
        let ids: Vec<u32> = (0..14).collect();
        let mut hashes = PromptHashes::default();
        hashes.fill(&Prompt { mm, ..Prompt::tokens(&ids) }, BLOCK);
        hashes.locals().to_vec()
    }

    /// I2: an image changes the blocks that it touches and no other, and where it stands counts.
    #[test]
    fn an_image_belongs_to_the_blocks_that_it_touches() {
        let item = |identifier, offset, length| MmItem { identifier, offset, length };
        let text = locals(&[]);
        let image = locals(&[item("img", 5, 4)]);
        assert_eq!(text.len(), 3);
        assert_eq!(image[0], text[0]);
        assert_ne!(image[1], text[1]);
        assert_ne!(image[2], text[2]);
        assert_ne!(locals(&[item("img", 6, 4)]), image);
        assert_ne!(locals(&[item("other", 5, 4)]), image);
        assert_eq!(locals(&[item("img", 5, 3)])[2], text[2]);
    }

    /// I2: a salted prompt shares nothing with the unsalted one.
    #[test]
    fn salt_and_adapter_separate() {
        let ids = [1, 2, 3, 4];
        let mut hashes = PromptHashes::default();
        let mut of = |prompt: Prompt<'_>| {
            hashes.fill(&prompt, BLOCK);
            hashes.locals()[0]
        };
        let plain = of(Prompt::tokens(&ids));
        let salted = of(Prompt { cache_salt: Some("t1"), ..Prompt::tokens(&ids) });
        let adapted = of(Prompt { lora_name: Some("t1"), ..Prompt::tokens(&ids) });
        assert!(plain != salted && salted != adapted && plain != adapted);
    }
}

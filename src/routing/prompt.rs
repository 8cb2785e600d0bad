//! From a request's prompt to the hashes that the index knows blocks by.

use std::ops::Range;

use crate::block::{
    BlockSize, ContentKey, ContentKeys, Isolation, LocalBlockHash, LocalHasher, SequenceHash,
};
use crate::index::TokenForms;

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
        /// Hash windows of block size + 1 tokens, as engines with Eagle drafters do. Ranks that store in the other
        /// form are found all the same.
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
    other: Vec<LocalBlockHash>,
    other_unlocated: Vec<LocalBlockHash>,
    sequences: Vec<SequenceHash>,
    keys: ContentKeys,
}

impl PromptHashes {
    /// Hashes the prompt's full blocks, in the form that it asks for.
    ///
    /// Costs 4 ns per block of 16 tokens for text; with items each block that one touches allocates.
    pub fn fill(&mut self, prompt: &Prompt<'_>, block_size: BlockSize) {
        for hashes in [&mut self.locals, &mut self.unlocated, &mut self.other, &mut self.other_unlocated] {
            hashes.clear();
        }
        self.sequences.clear();
        match prompt.form {
            PromptForm::Hashes { locals, sequences, .. } => {
                self.locals.extend_from_slice(locals);
                self.sequences.extend_from_slice(sequences);
            }
            PromptForm::Tokens { eagle, .. } => self.hash_tokens(prompt, eagle, block_size),
        }
    }

    /// Hashes them in the other form too, if some rank stored blocks in it. Call it behind [`Self::fill`].
    pub fn fill_other_form(&mut self, prompt: &Prompt<'_>, block_size: BlockSize, stored: TokenForms) {
        let PromptForm::Tokens { eagle, .. } = prompt.form else { return };
        if if eagle { stored.plain } else { stored.eagle } {
            self.swap_forms();
            self.hash_tokens(prompt, !eagle, block_size);
            self.swap_forms();
        }
    }

    fn swap_forms(&mut self) {
        std::mem::swap(&mut self.locals, &mut self.other);
        std::mem::swap(&mut self.unlocated, &mut self.other_unlocated);
    }

    fn hash_tokens(&mut self, prompt: &Prompt<'_>, eagle: bool, block_size: BlockSize) {
        let PromptForm::Tokens { ids, .. } = prompt.form else { return };
        let isolation = match (prompt.lora_name.filter(|name| !name.is_empty()), prompt.lora_id) {
            (None, Some(id)) => Isolation::unnamed_lora(id, prompt.cache_salt),
            (name, _) => Isolation::new(name, prompt.cache_salt),
        };
        if prompt.mm.is_empty() && prompt.keys.is_empty() {
            return match eagle {
                true => self.hasher.hash_eagle(isolation, ids, block_size, &mut self.locals),
                false => self.hasher.hash_prompt(isolation, ids, block_size, &mut self.locals),
            };
        }
        let size = block_size.as_usize();
        for (nth, block) in ids.windows(size + usize::from(eagle)).step_by(size).enumerate() {
            let span = nth as u64 * size as u64..(nth as u64 + 1) * size as u64;
            let located = self.hash_block(prompt, isolation, nth, &span, block, true);
            self.locals.push(located);
            if !prompt.mm.is_empty() {
                let unlocated = self.hash_block(prompt, isolation, nth, &span, block, false);
                self.unlocated.push(unlocated);
            }
        }
    }

    /// `span` is where the block's own tokens stand; its hash may cover one more.
    fn hash_block(
        &mut self,
        prompt: &Prompt<'_>,
        isolation: Isolation,
        nth: usize,
        span: &Range<u64>,
        block: &[u32],
        located: bool,
    ) -> LocalBlockHash {
        self.keys.clear();
        self.keys.extend(prompt.keys.get(nth).into_iter().flatten().cloned());
        let touching = prompt
            .mm
            .iter()
            .filter(|item| item.offset < span.end && item.offset.saturating_add(item.length) > span.start);
        self.keys.extend(touching.map(|item| ContentKey::Multimodal {
            identifier: item.identifier.into(),
            // Both lie within one prompt, far below 2^63.
            offset: located.then(|| item.offset.cast_signed().wrapping_sub(span.start.cast_signed())),
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

    /// All local hashes beside [`Self::locals`] by which ranks may know the prompt: without the items' places, and
    /// both ways in the other form.
    pub fn further(&self) -> impl Iterator<Item = &[LocalBlockHash]> {
        let other = (!self.other.is_empty()).then_some(&*self.other);
        let differs = !self.other_unlocated.is_empty() && self.other_unlocated != self.other;
        let other_unlocated = differs.then_some(&*self.other_unlocated);
        self.unlocated().into_iter().chain(other).chain(other_unlocated)
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

    /// I11, I2: the other form is made where it is stored, and keys belong to its blocks too.
    #[test]
    fn the_other_form_is_made_where_it_is_stored() {
        let ids: Vec<u32> = (0..9).collect();
        let mut hashes = PromptHashes::default();
        let mut further = |prompt: &Prompt<'_>, plain, eagle| {
            hashes.fill(prompt, BLOCK);
            hashes.fill_other_form(prompt, BLOCK, TokenForms { plain, eagle });
            let further: Vec<_> = hashes.further().map(<[_]>::to_vec).collect();
            (hashes.locals().to_vec(), further)
        };
        let plain = Prompt::tokens(&ids);
        let eagle = Prompt { form: PromptForm::Tokens { ids: &ids, eagle: true }, ..plain };
        let (of_blocks, none) = further(&plain, true, false);
        assert!(none.is_empty());
        let (of_windows, none) = further(&eagle, false, true);
        assert!(none.is_empty());
        assert_eq!((of_blocks.len(), of_windows.len()), (2, 2));
        assert_eq!(further(&plain, true, true), (of_blocks.clone(), vec![of_windows.clone()]));
        assert_eq!(further(&eagle, true, true), (of_windows.clone(), vec![of_blocks]));
        let item = [MmItem { identifier: "img", offset: 0, length: 1 }];
        let (pictured, _) = further(&Prompt { mm: &item, ..eagle }, false, true);
        assert_ne!(pictured[0], of_windows[0]);
        assert_eq!(pictured[1], of_windows[1]);
    }
}

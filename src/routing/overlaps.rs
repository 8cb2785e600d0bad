//! A prompt against the index of a pool.

use super::prompt::{Prompt, PromptHashes};
use crate::ids::RankSlot;
use crate::index::{HybridRule, IndexQuery, RankOverlap, Scratch};
use crate::indexer::PoolView;

/// Finds who holds a prompt's prefix; keeps its buffers, so that a warm one allocates nothing for text.
#[derive(Default, Debug)]
pub struct Overlaps {
    hashes: PromptHashes,
    scratch: Scratch,
    further: Scratch,
    found: Vec<RankOverlap>,
    tree_sizes: Vec<u64>,
}

impl Overlaps {
    /// Asks the pool's index about the prompt. The answer stays until the next question.
    pub fn find(&mut self, pool: &PoolView, prompt: &Prompt<'_>, hybrid: HybridRule) {
        self.hashes.fill(prompt, pool.block_size);
        let query = IndexQuery { locals: self.hashes.locals(), sequences: self.hashes.sequences(), hybrid };
        pool.index.overlap(&query, &mut self.scratch);
        pool.index.tree_sizes(&mut self.tree_sizes);
        self.found.clear();
        self.found.extend(self.scratch.overlaps().iter());
        // Each rank stores in one form, so what is found in another way adds to the others alone.
        self.hashes.fill_other_form(prompt, pool.block_size, pool.index.token_forms());
        for locals in self.hashes.further() {
            pool.index.overlap(&IndexQuery { locals, sequences: &[], hybrid }, &mut self.further);
            for other in self.further.overlaps().iter() {
                merge(&mut self.found, &other);
            }
        }
        self.found.sort_unstable_by_key(|overlap| overlap.slot.index);
    }

    /// The prompt's hashes.
    pub fn hashes(&self) -> &PromptHashes {
        &self.hashes
    }

    /// Ranks that hold a prefix of the prompt, ordered by slot.
    pub fn found(&self) -> &[RankOverlap] {
        &self.found
    }

    /// Distinct device blocks of a rank at that moment.
    pub fn tree_size(&self, slot: RankSlot) -> u64 {
        self.tree_sizes.get(slot.index as usize).copied().unwrap_or_default()
    }

    /// What one rank holds of the prompt; a rank that holds nothing is not listed.
    pub fn of(&self, slot: RankSlot) -> Option<&RankOverlap> {
        let at = self.found.binary_search_by_key(&slot.index, |overlap| overlap.slot.index).ok()?;
        Some(&self.found[at]).filter(|overlap| overlap.slot == slot)
    }
}

/// An engine names items in one way and stores blocks in one form, so the further reach is that engine's.
fn merge(found: &mut Vec<RankOverlap>, other: &RankOverlap) {
    match found.iter_mut().find(|overlap| overlap.slot == other.slot) {
        Some(overlap) => {
            overlap.device = overlap.device.max(other.device);
            overlap.host = overlap.host.max(other.host);
            overlap.disk = overlap.disk.max(other.disk);
            overlap.left_out |= other.left_out;
        }
        None => found.push(*other),
    }
}

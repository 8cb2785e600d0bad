//! Blocks that are kept alive without being held, chunks, and taking a rank out of a run.

use super::{Place, RunId, Tree};
use crate::block::Tier;
use crate::index::published::Pin;
use crate::index::run::ChunkHold;

impl Tree {
    /// Whether the run is there still.
    pub(in crate::index) fn is_there(&self, id: RunId) -> bool {
        self.own.get(id.0 as usize).is_some_and(Option::is_some)
    }

    /// Keeps a block alive though nobody may hold it, until it is let go as often.
    pub(in crate::index) fn keep(&mut self, place: Place) {
        self.own_mut(place.run).add_child(place.offset);
    }

    pub(in crate::index) fn let_go(&mut self, place: Place, pin: &Pin) {
        self.own_mut(place.run).remove_child(place.offset);
        self.trim(place.run, pin);
    }

    /// The block's own hash.
    pub(in crate::index) fn local(&self, place: Place, pin: &Pin) -> Option<u64> {
        self.run(place.run).hashes(pin).locals().get(place.offset as usize).copied()
    }

    /// How many blocks, `most` at most, end with this one.
    pub(in crate::index) fn blocks_up_to(&self, place: Place, most: u32) -> u32 {
        let (mut count, mut at) = (0_u32, Some(place));
        while let Some(place) = at.filter(|_| count < most) {
            count = count.saturating_add(place.offset + 1);
            at = self.own(place.run).parent;
        }
        count.min(most)
    }

    pub(in crate::index) fn hold_chunk(&mut self, id: RunId, chunk: ChunkHold, pin: &Pin) {
        self.change(id).add_chunk(chunk, pin);
    }

    pub(in crate::index) fn release_chunk(&mut self, id: RunId, chunk: ChunkHold, pin: &Pin) {
        self.change(id).remove_chunk(chunk, pin);
    }

    /// Takes the rank out of a run, in all layers.
    pub(in crate::index) fn release_run(&mut self, id: RunId, rank: u32, pin: &Pin) {
        let run = self.change(id);
        run.release_rank(rank, pin);
        run.release_cold(rank, None, pin);
        self.trim(id, pin);
    }

    /// Takes the rank out of a run in one tier; returns how many blocks it had there outside the hot layer.
    pub(in crate::index) fn release_tier(&mut self, id: RunId, rank: u32, tier: Tier, pin: &Pin) -> u64 {
        let run = self.change(id);
        if tier == Tier::Device {
            run.release_rank(rank, pin);
        }
        let gone = run.release_cold(rank, Some(tier), pin);
        self.trim(id, pin);
        gone
    }
}

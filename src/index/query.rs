//! Queries: how far each rank's blocks reach into a prompt.

use super::core::Core;
use super::coverage::RankSet;
use super::rank::{Group, Rank};
use super::tree::{Layer, RunId};
use super::{HybridRule, IndexQuery, RankOverlap};
use crate::block::{AttentionKind, BlockSize, LocalBlockHash, SequenceHash, Tier};
use crate::ids::RankSlot;

/// Buffers of a querying thread. Once they have grown to the size of the prompts in use, a query allocates
/// nothing.
#[derive(Default, Debug)]
pub struct Scratch {
    path: Vec<Segment>,
    active: RankSet,
    still: RankSet,
    overlaps: Vec<RankOverlap>,
    tree_sizes: Vec<u64>,
    usable: Vec<bool>,
}

impl Scratch {
    /// The ranks that hold a prefix of the last query's prompt on any tier, in no particular order.
    pub fn overlaps(&self) -> &[RankOverlap] {
        &self.overlaps
    }

    /// Distinct device blocks of a rank at the moment of the last query; 0 for one that is gone.
    pub fn tree_size(&self, slot: RankSlot) -> u64 {
        self.tree_sizes.get(slot.index as usize).copied().unwrap_or_default()
    }

    /// The last query's answer for one rank; a rank that holds nothing is not listed.
    pub fn overlap(&self, slot: RankSlot) -> Option<&RankOverlap> {
        self.overlaps.iter().find(|overlap| overlap.slot == slot)
    }
}

/// A stretch of the prompt that lies in one run.
#[derive(Clone, Copy, Debug)]
struct Segment {
    run: RunId,
    /// Blocks of the run that the prompt matches and goes through.
    len: u32,
    /// Blocks of the prompt before the run.
    start: u32,
}

impl Core {
    pub(super) fn overlap(&self, query: &IndexQuery<'_>, scratch: &mut Scratch) {
        scratch.overlaps.clear();
        scratch.tree_sizes.clear();
        scratch.tree_sizes.extend(self.tree_sizes());
        self.walk(query, &mut scratch.path);
        self.device_reach(scratch);
        for index in self.layered.iter() {
            self.layered_rank(index, query.hybrid, scratch);
        }
    }

    /// Follows the prompt through the tree for as long as its content is there.
    fn walk(&self, query: &IndexQuery<'_>, path: &mut Vec<Segment>) {
        path.clear();
        let total = query.len();
        let mut at = 0;
        let mut parent = None;
        while at < total {
            let Some(id) = self.tree.head(query.head(parent, at)) else { return };
            let run = self.tree.run(id);
            let len = query.common_prefix(at, &run.locals, &run.sequences);
            if len == 0 {
                return;
            }
            path.push(Segment { run: id, len: blocks(len), start: blocks(at) });
            parent = Some(run.sequences[len - 1]);
            at += len;
        }
    }

    /// Device reach in the first full-attention group.
    fn device_reach(&self, scratch: &mut Scratch) {
        let Scratch { path, active, still, overlaps, .. } = scratch;
        active.clear();
        let mut end = |index: u32, reach: u32| {
            if reach > 0
                && let Some((slot, _)) = self.rank_at(index)
            {
                overlaps.push(RankOverlap { slot, device: reach, host: reach, disk: reach, left_out: false });
            }
        };
        let mut total = 0;
        for (nth, segment) in path.iter().enumerate() {
            let hot = &self.tree.run(segment.run).hot;
            let at_root = nth == 0;
            if at_root {
                active.assign(&hot.full);
                still.assign(&hot.full);
            } else {
                still.clear();
                hot.full.iter().filter(|rank| active.contains(*rank)).for_each(|rank| still.insert(rank));
            }
            for held in hot.partial().iter().filter(|held| held.from == 0) {
                if !at_root && !active.contains(held.rank) {
                    continue;
                }
                active.insert(held.rank);
                if held.to >= segment.len {
                    still.insert(held.rank);
                } else {
                    end(held.rank, segment.start + held.to);
                    active.remove(held.rank);
                }
            }
            active.difference(still).for_each(|rank| end(rank, segment.start));
            std::mem::swap(active, still);
            total = segment.start + segment.len;
            if active.is_empty() {
                return;
            }
        }
        active.iter().for_each(|rank| end(rank, total));
    }

    /// All tiers and groups of one rank, by the general rule.
    fn layered_rank(&self, index: u32, hybrid: HybridRule, scratch: &mut Scratch) {
        let Some((slot, rank)) = self.rank_at(index) else { return };
        let Scratch { path, overlaps, usable, .. } = scratch;
        let mut view = View { core: self, index, rank, path, usable, hybrid };
        let device = view.reach(&[Tier::Device]);
        let host = view.reach(&[Tier::Device, Tier::Host]);
        let disk = view.reach(&[Tier::Device, Tier::Host, Tier::Disk]);
        let left_out = view.leaves_groups_out();
        let known = overlaps.iter().position(|overlap| overlap.slot == slot);
        if disk == 0 {
            if let Some(at) = known {
                overlaps.swap_remove(at);
            }
            return;
        }
        let overlap = RankOverlap { slot, device, host, disk, left_out };
        match known {
            Some(at) => overlaps[at] = overlap,
            None => overlaps.push(overlap),
        }
    }
}

/// One rank's view of a path.
struct View<'a> {
    core: &'a Core,
    index: u32,
    rank: &'a Rank,
    path: &'a [Segment],
    usable: &'a mut Vec<bool>,
    hybrid: HybridRule,
}

impl View<'_> {
    /// Usable blocks when copies in any of these tiers count.
    fn reach(&mut self, tiers: &[Tier]) -> u32 {
        let full = |group: &Group| group.kind == AttentionKind::Full && group.idx.is_some();
        let reach = self
            .groups()
            .filter(|(_, group)| full(group))
            .map(|(slot, _)| self.contiguous(tiers, slot))
            .min()
            .unwrap_or_default();
        let windowed = self.groups().any(|(_, group)| Rule::of(&group, self.core.block_size).is_some());
        if reach == 0 || !windowed || self.hybrid == HybridRule::FullAttention {
            return reach;
        }
        self.joint(tiers, reach)
    }

    fn leaves_groups_out(&self) -> bool {
        self.hybrid == HybridRule::Joint
            && self.groups().any(|(_, group)| {
                group.kind != AttentionKind::Full && Rule::of(&group, self.core.block_size).is_none()
            })
    }

    // At most MAX_GROUPS slots, so the number fits.
    #[allow(clippy::cast_possible_truncation)]
    fn groups(&self) -> impl Iterator<Item = (u8, Group)> + use<'_> {
        self.rank.groups.iter().enumerate().map(|(slot, group)| (slot as u8, *group))
    }

    /// Leading blocks held without a hole.
    fn contiguous(&self, tiers: &[Tier], slot: u8) -> u32 {
        let mut reach = 0;
        for segment in self.path {
            let mut at = 0;
            while at < segment.len {
                let Some(next) = self.held_until(tiers, slot, segment.run, at) else { break };
                at = next;
            }
            reach = segment.start + at.min(segment.len);
            if at < segment.len {
                break;
            }
        }
        reach
    }

    /// One past the last block of the stretch around `offset` that one of the tiers holds.
    fn held_until(&self, tiers: &[Tier], slot: u8, run: RunId, offset: u32) -> Option<u32> {
        let run = self.core.tree.run(run);
        tiers
            .iter()
            .filter_map(|&tier| run.coverage(Layer { tier, slot }))
            .filter_map(|coverage| {
                if coverage.full.contains(self.index) {
                    return Some(run.len());
                }
                let held = coverage.of(self.index).iter();
                held.filter(|held| held.from <= offset && offset < held.to).map(|held| held.to).next()
            })
            .max()
    }

    /// The largest reach at which every group can go on: the engine's own joint answer.
    fn joint(&mut self, tiers: &[Tier], full_reach: u32) -> u32 {
        let base = self.core.block_size;
        let step = self
            .groups()
            .filter_map(|(_, group)| group.block_size.map(|size| size.get() / base.get()))
            .max()
            .unwrap_or(1)
            .max(1);
        self.usable.clear();
        self.usable.resize(full_reach as usize + 1, true);
        for slot in 0..self.rank.groups.len() {
            let Some(rule) = Rule::of(&self.rank.groups[slot], base) else { continue };
            // At most MAX_GROUPS slots, so the number fits.
            #[allow(clippy::cast_possible_truncation)]
            self.rule_out(tiers, slot as u8, rule, full_reach);
        }
        (0..=full_reach / step)
            .rev()
            .map(|steps| steps * step)
            .find(|&reach| self.usable[reach as usize])
            .unwrap_or_default()
    }

    /// Marks the reaches at which this group lacks a block that it needs.
    fn rule_out(&mut self, tiers: &[Tier], slot: u8, rule: Rule, full_reach: u32) {
        let Rule { blocks_per_group_block, needed } = rule;
        let mut segments = self.path.iter();
        let mut segment = segments.next();
        let mut run_length = 0;
        for nth in 1..=full_reach / blocks_per_group_block {
            let last = nth * blocks_per_group_block - 1;
            while segment.is_some_and(|segment| segment.start + segment.len <= last) {
                segment = segments.next();
            }
            let held = segment.is_some_and(|segment| {
                self.held_until(tiers, slot, segment.run, last - segment.start).is_some()
            });
            run_length = if held { run_length + 1 } else { 0 };
            if run_length < needed.min(nth) {
                self.usable[last as usize + 1] = false;
            }
        }
    }
}

/// What a group other than full attention needs before the point of reuse.
#[derive(Clone, Copy)]
struct Rule {
    /// Blocks of ours per block of the group.
    blocks_per_group_block: u32,
    /// Group blocks needed right before the point of reuse.
    needed: u32,
}

impl Rule {
    /// `None`: full attention, or a group whose rule is not known.
    fn of(group: &Group, base: BlockSize) -> Option<Self> {
        let size = group.block_size?;
        if size.get() % base.get() != 0 {
            return None;
        }
        let needed = match group.kind {
            AttentionKind::SlidingWindow { window: Some(window) } => {
                window.saturating_sub(1).div_ceil(size.get())
            }
            AttentionKind::StateSpace => 1,
            _ => return None,
        };
        Some(Self { blocks_per_group_block: size.get() / base.get(), needed })
    }
}

impl IndexQuery<'_> {
    fn len(&self) -> usize {
        self.locals.len().max(self.sequences.len())
    }

    /// The sequence hash of the block at `at`, behind `parent`.
    fn head(&self, parent: Option<SequenceHash>, at: usize) -> SequenceHash {
        match self.sequences.get(at) {
            Some(&sequence) => sequence,
            None => SequenceHash::extend(parent, self.locals[at]),
        }
    }

    /// How many blocks from `at` on are the run's. Sequence hashes need one comparison per run: equality at
    /// a depth means equality before it.
    fn common_prefix(&self, at: usize, locals: &[LocalBlockHash], sequences: &[SequenceHash]) -> usize {
        if self.sequences.is_empty() {
            let wanted = &self.locals[at..];
            let len = wanted.len().min(locals.len());
            if wanted[..len] == locals[..len] {
                return len;
            }
            return wanted.iter().zip(locals).take_while(|(a, b)| a == b).count();
        }
        let wanted = &self.sequences[at..];
        let len = wanted.len().min(sequences.len());
        if len > 0 && wanted[len - 1] == sequences[len - 1] {
            return len;
        }
        let (mut low, mut high) = (0, len);
        while low < high {
            let middle = low.midpoint(high);
            if wanted[middle] == sequences[middle] {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }
}

// Prompts are bounded far below 2^32 blocks by their callers; a longer one is cut by saturation.
fn blocks(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

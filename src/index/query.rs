//! Queries: how far each rank's blocks reach into a prompt.

use super::coverage::bits_of;
use super::published::{Pin, local_words, sequence_words};
use super::rank::Group;
use super::roster::{Ranks, Roster};
use super::run::{Hashes, INLINE_WORDS, Run};
use super::tree::{Layer, RunId, Tables};
use super::{HybridRule, IndexQuery, RankOverlap};
use crate::block::{AttentionKind, BlockSize, SequenceHash, Tier};
use crate::ids::RankSlot;

/// Buffers of a querying thread. Once they have grown to the size of the prompts in use, a query allocates
/// nothing.
#[derive(Default, Debug)]
pub struct Scratch {
    path: Vec<Segment>,
    active: Vec<u64>,
    still: Vec<u64>,
    overlaps: Vec<RankOverlap>,
    usable: Vec<bool>,
}

impl Scratch {
    /// The ranks that hold a prefix of the last query's prompt on any tier, in no particular order.
    pub fn overlaps(&self) -> &[RankOverlap] {
        &self.overlaps
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
    /// The run's version that all of this belongs to.
    version: u64,
    /// Blocks of the run that the prompt matches and goes through.
    len: u32,
    /// Blocks of the prompt before the run.
    start: u32,
}

/// What a query read was changed under it; it must be asked again.
struct Changed;

/// A run as a walk enters it.
#[derive(Clone, Copy)]
struct Entered<'p> {
    id: RunId,
    run: &'p Run,
    version: u64,
    hashes: Hashes<'p>,
    last: SequenceHash,
}

/// One attempt at a query.
pub(super) struct Attempt<'a> {
    pub(super) tables: &'a Tables,
    pub(super) roster: &'a Roster,
    pub(super) block_size: BlockSize,
    pub(super) pin: &'a Pin,
}

impl Attempt<'_> {
    /// Answers the query as of one moment; `false` if what it read was changed meanwhile.
    pub(super) fn answer(&self, query: &IndexQuery<'_>, scratch: &mut Scratch) -> bool {
        scratch.overlaps.clear();
        let Some(version) = self.roster.version.begin() else { return false };
        let Some(ranks) = self.roster.ranks(self.pin) else { return true };
        let hidden = self.roster.hidden();
        if self.walk(query, &mut scratch.path).is_err() {
            return false;
        }
        let answered = self.device_reach(ranks, hidden, scratch).is_ok()
            && ranks
                .layered()
                .iter()
                .filter(|index| Some(**index) != hidden)
                .all(|index| self.layered_rank(*index, ranks, query.hybrid, scratch).is_ok());
        let unchanged = |segment: &Segment| {
            self.tables.run(segment.run, self.pin).is_some_and(|run| run.version.unchanged(segment.version))
        };
        answered && scratch.path.iter().all(unchanged) && self.roster.version.unchanged(version)
    }

    /// Follows the prompt through the tree for as long as its content is there.
    fn walk(&self, query: &IndexQuery<'_>, path: &mut Vec<Segment>) -> Result<(), Changed> {
        path.clear();
        let total = query.len();
        let mut at = 0;
        let mut first = if total > 0 { query.head(None, 0) } else { return Ok(()) };
        while let Some(entered) = self.enter(first)? {
            let Entered { id, version, hashes, last, .. } = entered;
            let whole = hashes.locals().len();
            // Most prompts go through to a run's end: ask for what comes then before comparing.
            let through = (at + whole < total).then(|| query.head(Some(last), at + whole));
            if let Some(next) = through {
                self.prefetch_head(next);
            }
            let len = query.common(at, hashes, last);
            if len == 0 {
                return Ok(());
            }
            path.push(Segment { run: id, version, len: blocks(len), start: blocks(at) });
            at += len;
            first = match through {
                _ if at >= total => return Ok(()),
                Some(next) if len == whole => next,
                _ => self.branching(query, at, &entered, len)?,
            };
        }
        Ok(())
    }

    /// The sequence hash of the prompt's block at `at`, which leaves the run behind its first `len` blocks.
    fn branching(
        &self,
        query: &IndexQuery<'_>,
        at: usize,
        entered: &Entered<'_>,
        len: usize,
    ) -> Result<SequenceHash, Changed> {
        let Entered { run, version, hashes, last, .. } = *entered;
        if !query.sequences.is_empty() {
            return Ok(query.head(Some(last), at));
        }
        let before = run.branch(blocks(len - 1)).unwrap_or_else(|| hashes.sequence(len - 1));
        if run.version.unchanged(version) { Ok(query.head(Some(before), at)) } else { Err(Changed) }
    }

    /// The run that begins with this content, at a version.
    fn enter(&self, first: SequenceHash) -> Result<Option<Entered<'_>>, Changed> {
        let heads = self.tables.heads(self.pin);
        let Some((id, run)) = self.tables.head(first, self.pin) else {
            // Between the two a larger table may have taken over what was looked for in the old one.
            let now = self.tables.heads(self.pin);
            let same = heads.map(std::ptr::from_ref) == now.map(std::ptr::from_ref);
            return if same { Ok(None) } else { Err(Changed) };
        };
        run.prefetch_holders();
        let version = run.version.begin().ok_or(Changed)?;
        let entered = Entered { id, run, version, hashes: run.hashes(self.pin), last: run.last() };
        let alive = run.first() == first && !entered.hashes.locals().is_empty();
        if alive && run.version.unchanged(version) { Ok(Some(entered)) } else { Err(Changed) }
    }

    fn prefetch_head(&self, first: SequenceHash) {
        if let Some(heads) = self.tables.heads(self.pin) {
            heads.prefetch(self.tables.head_hash(first));
        }
    }

    fn run(&self, id: RunId) -> Result<&Run, Changed> {
        self.tables.run(id, self.pin).ok_or(Changed)
    }

    /// Device reach in the first full-attention group.
    fn device_reach(&self, ranks: &Ranks, hidden: Option<u32>, scratch: &mut Scratch) -> Result<(), Changed> {
        let Scratch { path, active, still, overlaps, .. } = scratch;
        let words = ranks.len().div_ceil(64);
        active.clear();
        active.resize(words, 0);
        still.clear();
        still.resize(words, 0);
        overlaps.reserve(ranks.len());
        let mut end = |index: u32, reach: u32| {
            if reach > 0
                && Some(index) != hidden
                && let Some(slot) = ranks.slot(index)
            {
                overlaps.push(RankOverlap { slot, device: reach, host: reach, disk: reach, left_out: false });
            }
        };
        let mut total = 0;
        for (nth, segment) in path.iter().enumerate() {
            let run = self.run(segment.run)?;
            let at_root = nth == 0;
            for (at, (active, still)) in active.iter_mut().zip(&mut *still).enumerate() {
                let full = run.full_word(at, self.pin);
                if at_root {
                    *active = full;
                }
                *still = *active & full;
            }
            self.partial_reach(run, segment, at_root, active, still, &mut end);
            for (base, (active, still)) in (0..).step_by(64).zip(active.iter().zip(&*still)) {
                bits_of(active & !still).for_each(|bit| end(base + bit, segment.start));
            }
            std::mem::swap(active, still);
            total = segment.start + segment.len;
            if active.iter().all(|word| *word == 0) {
                return Ok(());
            }
        }
        for (base, active) in (0..).step_by(64).zip(&*active) {
            bits_of(*active).for_each(|bit| end(base + bit, total));
        }
        Ok(())
    }

    /// Ranks that hold a part of the run from its beginning: they go on in `still`, or end here and leave
    /// `active`.
    fn partial_reach(
        &self,
        run: &Run,
        segment: &Segment,
        at_root: bool,
        active: &mut [u64],
        still: &mut [u64],
        end: &mut impl FnMut(u32, u32),
    ) {
        let partial = run.partial(self.pin);
        if let Some(summary) = partial.summary() {
            let concerned =
                |at: usize, active: &[u64]| summary.ranks(at) & if at_root { !0 } else { active[at] };
            if (0..active.len()).all(|at| concerned(at, active) == 0) {
                return;
            }
            if summary.common_reach().is_some_and(|reach| reach >= segment.len) {
                for at in 0..active.len().min(INLINE_WORDS) {
                    still[at] |= concerned(at, active);
                    active[at] |= still[at];
                }
                return;
            }
        }
        for held in partial.iter().filter(|held| held.from == 0) {
            let (at, bit) = ((held.rank / 64) as usize, 1 << (held.rank % 64));
            // A rank that came after the roster was read is not asked for.
            if at >= active.len() || (!at_root && active[at] & bit == 0) {
                continue;
            }
            if held.to >= segment.len {
                active[at] |= bit;
                still[at] |= bit;
            } else {
                active[at] &= !bit;
                end(held.rank, segment.start + held.to);
            }
        }
    }

    /// All tiers and groups of one rank, by the general rule.
    fn layered_rank(
        &self,
        index: u32,
        ranks: &Ranks,
        hybrid: HybridRule,
        scratch: &mut Scratch,
    ) -> Result<(), Changed> {
        let Some(rank) = ranks.at(index) else { return Ok(()) };
        let Some(groups) = rank.layers.as_deref() else { return Ok(()) };
        let slot = rank.slot;
        let Scratch { path, overlaps, usable, .. } = scratch;
        let mut view = View { of: self, index, groups, path, usable, hybrid };
        let device = view.reach(&[Tier::Device])?;
        let host = view.reach(&[Tier::Device, Tier::Host])?;
        let disk = view.reach(&[Tier::Device, Tier::Host, Tier::Disk])?;
        let left_out = view.leaves_groups_out();
        let known = overlaps.iter().position(|overlap| overlap.slot == slot);
        if disk == 0 {
            if let Some(at) = known {
                overlaps.swap_remove(at);
            }
            return Ok(());
        }
        let overlap = RankOverlap { slot, device, host, disk, left_out };
        match known {
            Some(at) => overlaps[at] = overlap,
            None => overlaps.push(overlap),
        }
        Ok(())
    }
}

/// One rank's view of a path.
struct View<'a> {
    of: &'a Attempt<'a>,
    index: u32,
    groups: &'a [Group],
    path: &'a [Segment],
    usable: &'a mut Vec<bool>,
    hybrid: HybridRule,
}

impl View<'_> {
    /// Usable blocks when copies in any of these tiers count.
    fn reach(&mut self, tiers: &[Tier]) -> Result<u32, Changed> {
        let full = |group: &Group| group.kind == AttentionKind::Full && group.idx.is_some();
        let mut least = None;
        for (slot, _) in self.groups().filter(|(_, group)| full(group)) {
            let reach = self.contiguous(tiers, slot)?;
            least = Some(least.map_or(reach, |least: u32| least.min(reach)));
        }
        let reach = least.unwrap_or_default();
        let windowed = self.groups().any(|(_, group)| Rule::of(&group, self.of.block_size).is_some());
        if reach == 0 || !windowed || self.hybrid == HybridRule::FullAttention {
            return Ok(reach);
        }
        self.joint(tiers, reach)
    }

    fn leaves_groups_out(&self) -> bool {
        self.hybrid == HybridRule::Joint
            && self.groups().any(|(_, group)| {
                group.kind != AttentionKind::Full && Rule::of(&group, self.of.block_size).is_none()
            })
    }

    // At most MAX_GROUPS slots, so the number fits.
    #[allow(clippy::cast_possible_truncation)]
    fn groups(&self) -> impl Iterator<Item = (u8, Group)> + use<'_> {
        self.groups.iter().enumerate().map(|(slot, group)| (slot as u8, *group))
    }

    /// Leading blocks held without a hole.
    fn contiguous(&self, tiers: &[Tier], slot: u8) -> Result<u32, Changed> {
        let mut reach = 0;
        for segment in self.path {
            let mut at = 0;
            while at < segment.len {
                let Some(next) = self.held_until(tiers, slot, segment.run, at)? else { break };
                at = next;
            }
            reach = segment.start + at.min(segment.len);
            if at < segment.len {
                break;
            }
        }
        Ok(reach)
    }

    /// One past the last block of the stretch around `offset` that one of the tiers holds.
    fn held_until(&self, tiers: &[Tier], slot: u8, run: RunId, offset: u32) -> Result<Option<u32>, Changed> {
        let run = self.of.run(run)?;
        let until = |tier: Tier| {
            let layer = Layer { tier, slot };
            run.held_around(layer, self.index, offset, self.of.pin).map(|(_, until)| until)
        };
        // A run that is being changed may end before the offset; its version will say so, but a walk must not
        // turn back meanwhile.
        Ok(tiers.iter().filter_map(|tier| until(*tier)).filter(|until| *until > offset).max())
    }

    /// The largest reach at which every group can go on: the engine's own joint answer.
    fn joint(&mut self, tiers: &[Tier], full_reach: u32) -> Result<u32, Changed> {
        let base = self.of.block_size;
        let step = self
            .groups()
            .filter_map(|(_, group)| group.block_size.map(|size| size.get() / base.get()))
            .max()
            .unwrap_or(1)
            .max(1);
        self.usable.clear();
        self.usable.resize(full_reach as usize + 1, true);
        for slot in 0..self.groups.len() {
            let Some(rule) = Rule::of(&self.groups[slot], base) else { continue };
            // At most MAX_GROUPS slots, so the number fits.
            #[allow(clippy::cast_possible_truncation)]
            self.rule_out(tiers, slot as u8, rule, full_reach)?;
        }
        let mut reaches = (0..=full_reach / step).rev().map(|steps| steps * step);
        Ok(reaches.find(|&reach| self.usable[reach as usize]).unwrap_or_default())
    }

    /// Marks the reaches at which this group lacks a block that it needs.
    fn rule_out(&mut self, tiers: &[Tier], slot: u8, rule: Rule, full_reach: u32) -> Result<(), Changed> {
        let Rule { blocks_per_group_block, needed } = rule;
        let mut segments = self.path.iter();
        let mut segment = segments.next();
        let mut run_length = 0;
        for nth in 1..=full_reach / blocks_per_group_block {
            let last = nth * blocks_per_group_block - 1;
            while segment.is_some_and(|segment| segment.start + segment.len <= last) {
                segment = segments.next();
            }
            let held = match segment {
                Some(segment) => self.held_until(tiers, slot, segment.run, last - segment.start)?.is_some(),
                None => false,
            };
            run_length = if held { run_length + 1 } else { 0 };
            if run_length < needed.min(nth) {
                self.usable[last as usize + 1] = false;
            }
        }
        Ok(())
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

    /// How many blocks from `at` on are the run's, whose last block has the sequence hash `last`. With
    /// sequence hashes one comparison says so for a prompt that goes through the whole run.
    fn common(&self, at: usize, hashes: Hashes<'_>, last: SequenceHash) -> usize {
        if self.sequences.is_empty() {
            return common_prefix(local_words(&self.locals[at..]), hashes.locals());
        }
        let whole = hashes.locals().len();
        let wanted = sequence_words(&self.sequences[at..]);
        if wanted.get(whole - 1) == Some(&last.0) {
            return whole;
        }
        hashes.common_sequences(wanted)
    }
}

/// How many leading words are equal.
pub(super) fn common_prefix(a: &[u64], b: &[u64]) -> usize {
    /// Words compared without a branch: what the compiler turns into a few vector instructions.
    const STEP: usize = 16;
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    // Mostly all of it is equal, and nothing says so faster than a comparison of memory.
    if a == b {
        return len;
    }
    let equal = a.chunks(STEP).zip(b.chunks(STEP)).take_while(|(a, b)| a == b).count() * STEP;
    let equal = equal.min(len);
    equal + a[equal..].iter().zip(&b[equal..]).take_while(|(a, b)| a == b).count()
}

// Prompts are bounded far below 2^32 blocks by their callers; a longer one is cut by saturation.
fn blocks(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

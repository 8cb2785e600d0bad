//! Queries: how far each rank's blocks reach into a prompt.

use smallvec::SmallVec;

use super::answer::{Answer, RankOverlaps};
use super::groups::{Group, Groups};
use super::intervals::Reached;
use super::published::{Pin, local_words, sequence_words};
use super::roster::{Ranks, Roster};
use super::run::{BRANCHES, Hashes, Run};
use super::sight::{Changed, Key, Sight};
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
    answer: Answer,
    usable: Vec<bool>,
    chunks: Vec<OnPath>,
    ends: Vec<u32>,
}

/// A chunk that the prompt goes all through: blocks `from..to` of the prompt.
#[derive(Clone, Copy, Debug)]
struct OnPath {
    slot: u8,
    from: u32,
    to: u32,
}

impl OnPath {
    fn contains(self, at: u32) -> bool {
        self.from <= at && at < self.to
    }
}

impl Scratch {
    /// The ranks that hold a prefix of the last query's prompt on any tier, in no particular order.
    pub fn overlaps(&self) -> RankOverlaps<'_> {
        RankOverlaps { answer: &self.answer }
    }

    /// The last query's answer for one rank; a rank that holds nothing is not listed.
    pub fn overlap(&self, slot: RankSlot) -> Option<RankOverlap> {
        self.overlaps().iter().find(|overlap| overlap.slot == slot)
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

/// A run as a walk enters it.
#[derive(Clone, Copy)]
struct Entered<'p> {
    id: RunId,
    run: &'p Run,
    version: u64,
    len: usize,
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

impl<'a> Attempt<'a> {
    /// Answers the query as of one moment; `false` if what it read was changed meanwhile.
    pub(super) fn answer(&self, query: &IndexQuery<'_>, scratch: &mut Scratch) -> bool {
        scratch.answer.clear();
        let query = &query.usable();
        // Before the walk: an absence counts as of a moment at which every version is known.
        let Some(version) = self.roster.version.begin() else { return false };
        let Some(sight) = Sight::of(self.tables, self.pin) else { return true };
        if self.walk(&sight, query, &mut scratch.path).is_err() {
            return false;
        }
        // That the prompt's first block is nowhere was read at one moment and needs nothing else.
        if scratch.path.is_empty() {
            return true;
        }
        let Some(ranks) = self.roster.ranks(self.pin) else { return true };
        let hidden = self.roster.hidden();
        let answered = self.device_reach(&sight, ranks, hidden, scratch).is_ok()
            && ranks
                .layered()
                .iter()
                .filter(|index| Some(**index) != hidden)
                .all(|index| self.layered_rank(*index, ranks, query.hybrid, scratch).is_ok());
        let unchanged = |segment: &Segment| {
            sight.run(segment.run).is_some_and(|run| run.version.unchanged(segment.version))
        };
        answered && scratch.path.iter().all(unchanged) && self.roster.version.unchanged(version)
    }

    /// Follows the prompt through the tree for as long as its content is there.
    fn walk(
        &self,
        sight: &Sight<'a>,
        query: &IndexQuery<'_>,
        path: &mut Vec<Segment>,
    ) -> Result<(), Changed> {
        path.clear();
        let total = query.len();
        if total == 0 {
            return Ok(());
        }
        let mut at = 0;
        let mut key = sight.key(query.head(None, 0));
        while let Some(entered) = self.enter(sight, key)? {
            let Entered { id, run, version, len: whole, hashes, last } = entered;
            let rest = total - at;
            // All of this is on its way while the first of it is compared.
            run.prefetch_buffers(whole.min(rest), self.pin);
            // Most prompts go through to a run's end.
            let through = (whole < rest).then(|| sight.key(query.head(Some(last), at + whole)));
            if let Some(next) = through {
                sight.prefetch(next);
            }
            let branches = self.branches(sight, query, at, &entered, rest);
            // Long enough a comparison hides a second miss: that of the header behind the run's end.
            if let Some(next) = through {
                sight.prefetch_guess(next);
            }
            let len = query.common(at, hashes, whole, last);
            if len == 0 {
                // Two contents with one hash, or what was read does not belong together.
                return if run.version.unchanged(version) { Ok(()) } else { Err(Changed) };
            }
            path.push(Segment { run: id, version, len: blocks(len), start: blocks(at) });
            at += len;
            key = match through {
                _ if at >= total => return Ok(()),
                Some(next) if len == whole => next,
                _ => match branches.iter().find(|(behind, _)| *behind == len) {
                    Some((_, Some(next))) => *next,
                    _ => sight.key(self.branching(query, at, &entered, len)),
                },
            };
        }
        Ok(())
    }

    /// What comes if the prompt leaves the run where others do, asked for ahead: behind how many blocks, and what.
    #[inline]
    fn branches(
        &self,
        sight: &Sight<'a>,
        query: &IndexQuery<'_>,
        at: usize,
        entered: &Entered<'_>,
        rest: usize,
    ) -> [(usize, Option<Key>); BRANCHES] {
        let Entered { run, len, .. } = *entered;
        run.kept_branches().map(|(behind, sequence)| {
            // The run's own end is asked for anyway.
            let next = (behind > 0 && behind < len && behind < rest)
                .then(|| sight.key(query.head(Some(sequence), at + behind)));
            if let Some(next) = next {
                sight.prefetch(next);
            }
            (behind, next)
        })
    }

    /// The sequence hash of the prompt's block at `at`, which leaves the run behind its first `len` blocks.
    fn branching(
        &self,
        query: &IndexQuery<'_>,
        at: usize,
        entered: &Entered<'_>,
        len: usize,
    ) -> SequenceHash {
        let Entered { run, hashes, last, .. } = *entered;
        if !query.sequences.is_empty() {
            return query.head(Some(last), at);
        }
        let before = run.branch(blocks(len - 1)).unwrap_or_else(|| hashes.sequence(len - 1));
        query.head(Some(before), at)
    }

    /// The run that begins with this content, at a version.
    fn enter(&self, sight: &Sight<'a>, key: Key) -> Result<Option<Entered<'a>>, Changed> {
        let Some((id, run)) = sight.head(key)? else {
            // Meanwhile a larger table may have taken over what was looked for in the old one.
            return if sight.is_current(self.pin) { Ok(None) } else { Err(Changed) };
        };
        let version = run.version.begin().ok_or(Changed)?;
        let (len, hashes, last) = (run.len() as usize, run.hashes(self.pin), run.last());
        // The run was found by its first block before its version was known.
        if run.first() != key.first || len == 0 {
            return Err(Changed);
        }
        Ok(Some(Entered { id, run, version, len, hashes, last }))
    }

    fn run(&self, id: RunId) -> Result<&Run, Changed> {
        self.tables.run(id, self.pin).ok_or(Changed)
    }

    /// Device reach in the first full-attention group.
    fn device_reach(
        &self,
        sight: &Sight<'a>,
        ranks: &Ranks,
        hidden: Option<u32>,
        scratch: &mut Scratch,
    ) -> Result<(), Changed> {
        let Scratch { path, active, answer, .. } = scratch;
        answer.make_room(ranks);
        // What the others hold is asked for by the general rule.
        active.resize(ranks.plain().len(), 0);
        active.copy_from_slice(ranks.plain());
        if let Some(hidden) = hidden
            && let Some(word) = active.get_mut((hidden / 64) as usize)
        {
            *word &= !(1 << (hidden % 64));
        }
        let mut ends = [0; 64];
        let mut total = 0;
        for segment in &*path {
            let run = sight.run(segment.run).ok_or(Changed)?;
            let mut reaches = run.partial(self.pin).reaches();
            let mut any = 0;
            for (nth, (active, base)) in active.iter_mut().zip((0_u32..).step_by(64)).enumerate() {
                let full = *active & run.full_word(nth, self.pin);
                let Reached { through, ended } =
                    reaches.of_word(nth, *active & !full, segment.len, &mut ends);
                answer.put_ends(base, ended, segment.start, &ends);
                if segment.start > 0 {
                    answer.put_all(base, *active & !(full | through | ended), segment.start);
                }
                *active = full | through;
                any |= *active;
            }
            total = segment.start + segment.len;
            if any == 0 {
                break;
            }
        }
        for (base, active) in (0..).step_by(64).zip(&*active) {
            answer.put_all(base, *active, total);
        }
        Ok(())
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
        let Scratch { path, answer, usable, chunks, ends, .. } = scratch;
        let mut view = View { of: self, index, groups, path, usable, chunks, ends, hybrid };
        let counts = |tier: Tier| {
            let scored = match tier {
                Tier::Host => rank.scored.host,
                Tier::Disk => rank.scored.disk,
                _ => true,
            };
            scored && rank.hidden != Some(tier)
        };
        let mut tiers = SmallVec::<[Tier; 3]>::new();
        let mut reach_with = |tier: Tier| {
            if counts(tier) {
                tiers.push(tier);
            }
            view.reach(&tiers)
        };
        let device = reach_with(Tier::Device)?;
        let host = reach_with(Tier::Host)?;
        let disk = reach_with(Tier::Disk)?;
        let left_out = view.leaves_groups_out();
        if disk > 0 {
            answer.put_layered(RankOverlap { slot, device, host, disk, left_out });
        }
        Ok(())
    }
}

/// One rank's view of a path.
struct View<'a> {
    of: &'a Attempt<'a>,
    index: u32,
    groups: &'a Groups,
    path: &'a [Segment],
    usable: &'a mut Vec<bool>,
    /// Chunks on the path in the tiers at hand.
    chunks: &'a mut Vec<OnPath>,
    /// How far a prompt must go for each block of a group to be usable.
    ends: &'a mut Vec<u32>,
    hybrid: HybridRule,
}

impl View<'_> {
    /// Usable blocks when copies in any of these tiers count.
    fn reach(&mut self, tiers: &[Tier]) -> Result<u32, Changed> {
        self.find_chunks(tiers)?;
        let mut least = None;
        for (slot, _) in self.groups().filter(|(_, group)| group.kind == AttentionKind::Full) {
            let reach = self.contiguous(tiers, slot)?;
            least = Some(least.map_or(reach, |least: u32| least.min(reach)));
        }
        let reach = least.unwrap_or_default();
        let windowed = self.hybrid == HybridRule::Joint
            && self.groups().any(|(_, group)| Rule::of(&group, self.of.block_size).is_some());
        // One full group's reach never ends within a chunk; another group's may.
        let may_cut_chunks = !self.chunks.is_empty() && self.groups().count() > 1;
        if reach == 0 || !windowed && !may_cut_chunks {
            return Ok(reach);
        }
        self.joint(tiers, reach, windowed)
    }

    /// The rank's chunks in these tiers that the path goes all through.
    fn find_chunks(&mut self, tiers: &[Tier]) -> Result<(), Changed> {
        self.chunks.clear();
        for segment in self.path {
            for chunk in self.of.run(segment.run)?.chunks(self.of.pin) {
                let to = segment.start + chunk.offset + 1;
                if chunk.rank == self.index && chunk.offset < segment.len && tiers.contains(&chunk.layer.tier)
                {
                    let from = to.saturating_sub(chunk.len);
                    self.chunks.push(OnPath { slot: chunk.layer.slot, from, to });
                }
            }
        }
        Ok(())
    }

    fn leaves_groups_out(&self) -> bool {
        self.hybrid == HybridRule::Joint
            && self.groups().any(|(_, group)| {
                group.kind != AttentionKind::Full && Rule::of(&group, self.of.block_size).is_none()
            })
    }

    /// The groups whose rule binds.
    fn groups(&self) -> impl Iterator<Item = (u8, Group)> + use<'_> {
        (0..)
            .zip(self.groups.as_slice())
            .filter(|(_, group)| group.binds())
            .map(|(slot, group)| (slot, *group))
    }

    /// Leading blocks held without a hole, alone or as part of a chunk.
    fn contiguous(&self, tiers: &[Tier], slot: u8) -> Result<u32, Changed> {
        let mut reach = 0;
        let mut segments = self.path.iter();
        let mut segment = segments.next();
        loop {
            while segment.is_some_and(|segment| reach >= segment.start + segment.len) {
                segment = segments.next();
            }
            let Some(Segment { run, len, start, .. }) = segment.copied() else { return Ok(reach) };
            reach = match self.held_until(tiers, slot, run, reach - start)? {
                Some(until) => start + until.min(len),
                None => match self.chunks_around(slot, reach).map(|chunk| chunk.to).max() {
                    Some(to) => to,
                    None => return Ok(reach),
                },
            };
        }
    }

    fn chunks_around(&self, slot: u8, at: u32) -> impl Iterator<Item = &OnPath> {
        self.chunks.iter().filter(move |chunk| chunk.slot == slot && chunk.contains(at))
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
    fn joint(&mut self, tiers: &[Tier], full_reach: u32, windowed: bool) -> Result<u32, Changed> {
        let base = self.of.block_size;
        let of_group = |(_, group): (u8, Group)| group.block_size.map(|size| size.get() / base.get());
        let step = self.groups().filter_map(of_group).max().filter(|_| windowed).unwrap_or(1).max(1);
        self.usable.clear();
        self.usable.resize(full_reach as usize + 1, true);
        for slot in 0..self.groups.slots() {
            let group = *self.groups.of_slot(slot);
            if !group.binds() {
                continue;
            }
            if group.kind == AttentionKind::Full {
                self.rule_out_cut_chunks(tiers, slot, full_reach)?;
            } else if let Some(rule) = Rule::of(&group, base).filter(|_| windowed) {
                self.rule_out(tiers, slot, rule, full_reach)?;
            }
        }
        let mut reaches = (0..=full_reach / step).rev().map(|steps| steps * step);
        Ok(reaches.find(|&reach| self.usable[reach as usize]).unwrap_or_default())
    }

    /// How far a prompt must go for each of a group's blocks to be usable, as far as one is held: the end of the
    /// block, or of the shortest chunk around it.
    fn find_ends(&mut self, tiers: &[Tier], slot: u8, size: u32, full_reach: u32) -> Result<(), Changed> {
        let mut ends = std::mem::take(self.ends);
        ends.clear();
        let mut segments = self.path.iter();
        let mut segment = segments.next();
        for nth in 1..=full_reach / size {
            let last = nth * size - 1;
            while segment.is_some_and(|segment| segment.start + segment.len <= last) {
                segment = segments.next();
            }
            let held = match segment {
                Some(segment) => self.held_until(tiers, slot, segment.run, last - segment.start)?.is_some(),
                None => false,
            };
            let in_chunk = || self.chunks_around(slot, last).map(|chunk| chunk.to).min();
            ends.push(if held { last + 1 } else { in_chunk().unwrap_or(u32::MAX) });
        }
        *self.ends = ends;
        Ok(())
    }

    /// Marks the reaches that end within a chunk without which something before them is missing.
    fn rule_out_cut_chunks(&mut self, tiers: &[Tier], slot: u8, full_reach: u32) -> Result<(), Changed> {
        if !self.chunks.iter().any(|chunk| chunk.slot == slot) {
            return Ok(());
        }
        self.find_ends(tiers, slot, 1, full_reach)?;
        let mut furthest = 0;
        for (reach, end) in (1..).zip(self.ends.iter()) {
            furthest = furthest.max(*end);
            self.usable[reach as usize] &= furthest <= reach;
        }
        Ok(())
    }

    /// Marks the reaches at which this group lacks a block that it needs.
    fn rule_out(&mut self, tiers: &[Tier], slot: u8, rule: Rule, full_reach: u32) -> Result<(), Changed> {
        let Rule { blocks_per_group_block: size, needed } = rule;
        self.find_ends(tiers, slot, size, full_reach)?;
        let has_chunks = self.chunks.iter().any(|chunk| chunk.slot == slot);
        let mut run_length = 0;
        for (nth, end) in (1..).zip(self.ends.iter()) {
            run_length = if *end == u32::MAX { 0 } else { run_length + 1 };
            let wanted = needed.min(nth);
            let reach = nth * size;
            let window = &self.ends[(nth - wanted) as usize..nth as usize];
            if run_length < wanted || has_chunks && window.iter().any(|end| *end > reach) {
                self.usable[reach as usize] = false;
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
    /// Sequence hashes that do not reach as far as the local ones would end every match where they end, so they
    /// are not used.
    fn usable(&self) -> Self {
        let cut = self.sequences.len() < self.locals.len();
        Self { sequences: if cut { &[] } else { self.sequences }, ..*self }
    }

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

    /// How many blocks from `at` on are the run's, which has `whole` with the sequence hash `last` at the end. With
    /// sequence hashes one comparison says so for a prompt that goes through the whole run.
    fn common(&self, at: usize, hashes: Hashes<'_>, whole: usize, last: SequenceHash) -> usize {
        if self.sequences.is_empty() {
            return common_prefix(local_words(&self.locals[at..]), hashes.locals());
        }
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

//! Hybrid models against a literal reference: the joint reach of full, windowed and state-space groups.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;

use proptest::prelude::*;
use rankwise::block::{Announcements, AttentionKind, BlockHash, BlockSize, Isolation, LocalHasher, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, GroupTag, HybridRule, IndexQuery, PrefixIndex, Reader, Scratch, StoreRequest, StoreTokens,
};

const BASE: u32 = 2;
const DEPTH: usize = 12;

type Path = Vec<u8>;

#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Base blocks per block of the windowed group.
    window_multiple: u32,
    window: u32,
    /// Base blocks per block of the state-space group.
    state_multiple: u32,
}

const FULL: u32 = 0;
const WINDOWED: u32 = 1;
const STATE: u32 = 2;

/// One step of a history.
#[derive(Clone, Debug)]
enum Step {
    /// A prefill: the full group stores everything from `from` on, the windowed group its last blocks, the
    /// state-space group its last state.
    Prefill {
        path: Path,
        from: usize,
        kept: usize,
        tier: usize,
        line_up: bool,
        windowed_first: bool,
    },
    /// A group forgets the blocks of a path that the bits name.
    Evict {
        group: u32,
        path: Path,
        bits: u16,
        tier: usize,
    },
    /// The host takes in the blocks up to the end of a path as one chunk.
    Offload {
        group: u32,
        path: Path,
        len: usize,
    },
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let path = || prop::collection::vec(0_u8..2, 1..=DEPTH);
    let tier = || prop_oneof![5 => Just(0_usize), 1 => Just(1_usize)];
    let prefill = (path(), 0..DEPTH, 0..5_usize, tier(), any::<bool>(), prop::bool::weighted(0.2)).prop_map(
        |(path, from, kept, tier, line_up, windowed_first)| Step::Prefill {
            path,
            from,
            kept,
            tier,
            line_up,
            windowed_first,
        },
    );
    let evict = (0..3_u32, path(), any::<u16>(), tier()).prop_map(|(group, path, bits, tier)| Step::Evict {
        group,
        path,
        bits,
        tier,
    });
    let offload =
        (0..2_u32, path(), 2..=DEPTH).prop_map(|(group, path, len)| Step::Offload { group, path, len });
    let step = prop_oneof![10 => prefill, 8 => evict, 4 => offload, 2 => Just(Step::Clear)];
    prop::collection::vec(step, 1..30)
}

fn name(path: &[u8]) -> BlockHash {
    BlockHash::Int(path.iter().fold(1, |sum, symbol| sum * 3 + u64::from(*symbol)))
}

fn tokens(path: &[u8]) -> Vec<u32> {
    path.iter().flat_map(|&symbol| [u32::from(symbol), 9]).collect()
}

struct World {
    shape: Shape,
    index: PrefixIndex,
    reader: Reader,
    slot: RankSlot,
    /// (tier, group, content) to copies.
    held: BTreeMap<(Tier, u32, Path), u32>,
    /// (tier, group, content up to the last block) to blocks and copies.
    chunks: BTreeMap<(Tier, u32, Path), (usize, u32)>,
    seen: [bool; 3],
    /// Nothing is stored behind a name that is not held: a chunk would tell the reference, which looks at
    /// contents, more of such blocks than their names tell the index.
    rooted: bool,
    scratch: Scratch,
}

impl World {
    fn new(shape: Shape) -> Self {
        let (mut index, reader) = index::new(BlockSize::new(BASE).unwrap());
        let slot = index.write().add_rank(Announcements::Counted);
        Self {
            shape,
            index,
            reader,
            slot,
            held: BTreeMap::new(),
            chunks: BTreeMap::new(),
            seen: [false; 3],
            rooted: false,
            scratch: Scratch::default(),
        }
    }

    fn multiple(&self, group: u32) -> usize {
        match group {
            FULL => 1,
            WINDOWED => self.shape.window_multiple as usize,
            _ => self.shape.state_multiple as usize,
        }
    }

    fn kind(&self, group: u32) -> AttentionKind {
        match group {
            FULL => AttentionKind::Full,
            WINDOWED => AttentionKind::SlidingWindow { window: Some(self.shape.window) },
            _ => AttentionKind::StateSpace,
        }
    }

    /// Stores the blocks of `path` that end at these depths (in base blocks); the event's tokens begin at
    /// `from`.
    fn store(&mut self, group: u32, tier: Tier, path: &[u8], from: usize, ends: &[usize]) {
        self.store_blocks(group, tier, path, from, ends, self.multiple(group));
    }

    /// The same in blocks of so many base blocks: chunks, if these are more than one in a lower tier.
    fn store_blocks(&mut self, group: u32, tier: Tier, path: &[u8], from: usize, ends: &[usize], len: usize) {
        let names: Vec<BlockHash> = ends.iter().map(|&end| name(&path[..end])).collect();
        let last = ends.last().copied().unwrap_or(path.len());
        let ids = tokens(&path[from..last]);
        let parent = (from > 0).then(|| name(&path[..from]));
        let kind = self.kind(group);
        let block_size = BASE * len as u32;
        let result = self.index.write().store(
            self.slot,
            &StoreRequest {
                tier,
                group: GroupTag { idx: Some(group), kind: Some(kind) },
                names: &names,
                parent: parent.as_ref(),
                tokens: StoreTokens::Ids(&ids),
                block_size,
                isolation: Isolation::default(),
                keys: &[],
                history_complete: true,
            },
        );
        result.unwrap();
        for &end in ends {
            let key = (tier, group, path[..end].to_vec());
            self.seen[group as usize] = true;
            if tier != Tier::Device && len > 1 {
                self.chunks.entry(key).or_insert((len, 0)).1 += 1;
            } else {
                *self.held.entry(key).or_default() += 1;
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Prefill { path, from, kept, tier, line_up, windowed_first } => {
                let tier = Tier::ALL[*tier];
                let held = |from: usize| {
                    let held = |tier| self.held.contains_key(&(tier, FULL, path[..from].to_vec()));
                    Tier::ALL.into_iter().any(held)
                };
                let from =
                    Some(from % path.len()).filter(|from| !self.rooted || held(*from)).unwrap_or_default();
                let full: Vec<usize> = (from + 1..=path.len()).collect();
                if *windowed_first {
                    self.store_windowed(tier, path, from, *kept, *line_up);
                }
                self.store(FULL, tier, path, from, &full);
                if !*windowed_first {
                    self.store_windowed(tier, path, from, *kept, *line_up);
                }
                let multiple = self.multiple(STATE);
                let end = path.len() / multiple * multiple;
                if end > 0 && end - multiple >= from {
                    self.store(STATE, tier, path, end - multiple, &[end]);
                }
            }
            Step::Evict { group, path, bits, tier } => {
                let tier = Tier::ALL[*tier];
                let ends = (1..=path.len()).filter(|end| bits >> (end % 16) & 1 == 1);
                for end in ends.collect::<Vec<_>>() {
                    let key = (tier, *group, path[..end].to_vec());
                    let removed =
                        self.index.write().remove(self.slot, tier, Some(*group), &[name(&path[..end])]);
                    // A block under the name of a chunk came later than that.
                    if let Some(copies) = self.held.get_mut(&key) {
                        assert_eq!(removed.unknown, 0);
                        *copies -= 1;
                        if *copies == 0 {
                            self.held.remove(&key);
                        }
                    } else if let Some((_, copies)) = self.chunks.get_mut(&key) {
                        assert_eq!(removed.unknown, 0);
                        *copies -= 1;
                        if *copies == 0 {
                            self.chunks.remove(&key);
                        }
                    } else {
                        assert_eq!(removed.unknown, 1);
                    }
                }
            }
            Step::Clear => {
                self.index.write().clear_rank(self.slot);
                self.held.clear();
                self.chunks.clear();
                // A group is known from its first store on, until the rank is cleared.
                self.seen = [false; 3];
            }
            Step::Offload { group, path, len } => self.offload(*group, path, *len),
        }
    }

    /// The last `kept` of the group's blocks; with all of the event's tokens, or only with their own.
    fn store_windowed(&mut self, tier: Tier, path: &[u8], from: usize, kept: usize, line_up: bool) {
        let multiple = self.multiple(WINDOWED);
        let from = from.div_ceil(multiple) * multiple;
        let ends: Vec<usize> =
            (1..=path.len() / multiple).map(|nth| nth * multiple).filter(|end| *end > from).collect();
        let ends = &ends[ends.len() - kept.min(ends.len())..];
        let Some(first) = ends.first() else { return };
        let from = if line_up { first - multiple } else { from };
        self.store(WINDOWED, tier, path, from, ends);
    }

    fn offload(&mut self, group: u32, path: &[u8], len: usize) {
        let multiple = self.multiple(group);
        let end = path.len() / multiple * multiple;
        let len = len.min(end) / multiple * multiple;
        let key = (Tier::Host, group, path[..end].to_vec());
        let parent = |tier: Tier| self.held.contains_key(&(tier, FULL, path[..end - len].to_vec()));
        // What hangs behind a name that was never said cannot be placed, and one name has one size here.
        let placeable = len == end || Tier::ALL.into_iter().any(parent);
        let is_new = !self.held.contains_key(&key) && !self.chunks.contains_key(&key);
        // The device says how large a group's blocks are.
        if len > 1 && placeable && is_new && (group == FULL || self.seen[group as usize]) {
            self.store_blocks(group, Tier::Host, path, end - len, &[end], len);
        }
    }

    /// Whether the block that ends there is usable by a prompt that goes on to `reach`.
    fn holds(&self, tiers: &[Tier], group: u32, prompt: &[u8], end: usize, reach: usize) -> bool {
        let in_chunk = |to: usize, tier: Tier| {
            let chunk = self.chunks.get(&(tier, group, prompt[..to].to_vec()));
            chunk.is_some_and(|(len, _)| to - (*len).min(to) < end)
        };
        tiers.iter().any(|tier| {
            self.held.contains_key(&(*tier, group, prompt[..end].to_vec()))
                || (end..=reach).any(|to| in_chunk(to, *tier))
        })
    }

    /// A group has to be known before its rule can bind.
    fn literal_reach(&self, tiers: &[Tier], prompt: &[u8], groups_seen: [bool; 3]) -> u32 {
        let seen = |group: u32| groups_seen[group as usize];
        let step = [FULL, WINDOWED, STATE]
            .into_iter()
            .filter(|group| seen(*group))
            .map(|group| self.multiple(group))
            .max()
            .unwrap_or(1);
        let fits = |reach: &usize| {
            let reach = *reach;
            let full = (1..=reach).all(|end| self.holds(tiers, FULL, prompt, end, reach));
            let size = self.multiple(WINDOWED);
            let needed = ((self.shape.window - 1) as usize).div_ceil(size * BASE as usize);
            let windowed = (0..needed.min(reach / size))
                .all(|back| self.holds(tiers, WINDOWED, prompt, reach - back * size, reach));
            let state = self.holds(tiers, STATE, prompt, reach, reach);
            full && (!seen(WINDOWED) || windowed) && (!seen(STATE) || state)
        };
        let usable = (1..=prompt.len()).rev().filter(|reach| reach % step == 0).find(fits);
        usable.unwrap_or_default() as u32
    }

    fn check(&mut self, prompt: &[u8], groups_seen: [bool; 3]) {
        let mut locals = Vec::new();
        LocalHasher::default().hash_prompt(
            Isolation::default(),
            &tokens(prompt),
            BlockSize::new(BASE).unwrap(),
            &mut locals,
        );
        for (hybrid, groups) in
            [(HybridRule::Joint, groups_seen), (HybridRule::FullAttention, [groups_seen[0], false, false])]
        {
            let query = IndexQuery { locals: &locals, sequences: &[], hybrid };
            self.reader.overlap(&query, &mut self.scratch);
            let told = self.scratch.overlap(self.slot).map_or([0; 2], |told| [told.device, told.host]);
            let tiers = [Tier::Device, Tier::Host];
            let wanted = [1, 2].map(|count| self.literal_reach(&tiers[..count], prompt, groups));
            assert_eq!(told, wanted, "{hybrid:?} reach of {prompt:?}");
        }
        let contents: BTreeMap<(Tier, Option<u32>, BlockHash), u64> = self
            .reader
            .contents(self.slot)
            .into_iter()
            .flat_map(|layer| {
                layer.names.into_iter().map(move |(name, n)| ((layer.tier, layer.group_idx, name), n))
            })
            .collect();
        let mut literal = BTreeMap::new();
        let chunks = self.chunks.iter().map(|(key, (_, copies))| (key, copies));
        for ((tier, group, path), copies) in self.held.iter().chain(chunks) {
            *literal.entry((*tier, Some(*group), name(path))).or_default() += u64::from(*copies);
        }
        assert_eq!(contents, literal);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// I9: the joint reach is the largest one at which every group can go on, and contents are exact, whether
    /// windowed blocks come with their own tokens, with everybody's, or before the full group's.
    #[test]
    fn joint_reach_equals_the_literal_rule(
        history in steps(),
        prompts in prop::collection::vec(prop::collection::vec(0_u8..2, DEPTH), 4),
        window in prop::sample::select(vec![3_u32, 5, 8, 9]),
        window_multiple in 1_u32..=2,
        state_multiple in 1_u32..=2,
    ) {
        let mut world = World::new(Shape { window_multiple, window, state_multiple });
        world.rooted = history.iter().any(|step| matches!(step, Step::Offload { .. }));
        for step in &history {
            world.step(step);
            let asked: Vec<Path> = match step {
                Step::Prefill { path, .. } | Step::Evict { path, .. } | Step::Offload { path, .. } => {
                    let mut deep = path.clone();
                    deep.resize(DEPTH, 0);
                    vec![deep]
                }
                Step::Clear => Vec::new(),
            };
            for prompt in prompts.iter().chain(&asked) {
                world.check(prompt, world.seen);
            }
        }
    }
}

//! Tiers, placeholders, groups and contradictions, from a batch's bytes to overlap and trust.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::num::NonZeroU32;

use bytes::Bytes;
use rankwise::block::{BlockSize, Isolation, LocalHasher, Tier};
use rankwise::fleet::{CapacitySpec, ClearScope, PoolKey, Ranks, ScoreTiers, WorkerSpec};
use rankwise::ids::{Moment, RankKey, SourceId};
use rankwise::index::{HybridRule, IndexQuery, Scratch};
use rankwise::indexer::{Config, Indexer, Input, RankReport, View};
use rankwise::trust::Reason;
use serde_json::{Value, json};

const SIZE: u32 = 4;

/// One rank whose batches are handed in.
struct Engine {
    indexer: Indexer,
    view: View,
    source: SourceId,
    seq: u64,
}

fn spec() -> WorkerSpec {
    let size = BlockSize::new(SIZE).unwrap();
    WorkerSpec::new("w", PoolKey::new("m", None), size, Ranks::range(0, 1).unwrap())
}

impl Engine {
    fn new(spec: WorkerSpec) -> Self {
        let (mut indexer, view) = Indexer::new(Config::default());
        indexer.declare_worker(Moment::default(), spec, &mut Vec::new()).unwrap();
        let source = indexer.source(&RankKey::new("w", 0)).unwrap();
        Self { indexer, view, source, seq: 0 }
    }

    /// The first number heard is not 0, and there is nobody to ask for what came before.
    fn joined_late(spec: WorkerSpec) -> Self {
        Self { seq: 7, ..Self::new(spec) }
    }

    fn declare_again(&mut self, spec: WorkerSpec) {
        self.indexer.declare_worker(Moment::default(), spec, &mut Vec::new()).unwrap();
        assert_eq!(self.indexer.source(&RankKey::new("w", 0)), Some(self.source), "the stream goes on");
    }

    fn send(&mut self, events: &[Value]) {
        let payload = rmp_serde::to_vec(&json!([1.5, events, 0])).unwrap();
        let frames = [Bytes::new(), Bytes::copy_from_slice(&self.seq.to_be_bytes()), Bytes::from(payload)];
        let input = Input::Frames { source: self.source, frames: &frames };
        self.indexer.handle(Moment::default(), input, &mut Vec::new());
        self.seq += 1;
    }

    fn report(&self) -> RankReport {
        self.view.fleet().only_pool().unwrap().workers[0].ranks[0].status.report()
    }

    fn reasons(&self) -> Vec<Reason> {
        self.view.fleet().only_pool().unwrap().workers[0].ranks[0].status.reasons().iter().collect()
    }

    fn is_live(&self) -> bool {
        self.view.fleet().only_pool().unwrap().workers[0].ranks[0].status.trust().name() == "live"
    }

    /// Device, host and disk reach.
    fn reach(&self, tokens: &[u32]) -> [u32; 3] {
        let fleet = self.view.fleet();
        let pool = fleet.only_pool().unwrap();
        let mut locals = Vec::new();
        LocalHasher::default().hash_prompt(Isolation::default(), tokens, pool.block_size, &mut locals);
        let mut scratch = Scratch::default();
        let query = IndexQuery { locals: &locals, sequences: &[], hybrid: HybridRule::Joint };
        pool.index.overlap(&query, &mut scratch);
        let slot = pool.workers[0].ranks[0].slot;
        scratch.overlap(slot).map_or([0; 3], |told| [told.device, told.host, told.disk])
    }

    fn held(&self, tier: Tier) -> (u64, u64) {
        let fleet = self.view.fleet();
        let pool = fleet.only_pool().unwrap();
        let size = pool.index.tier_size(pool.workers[0].ranks[0].slot, tier).unwrap();
        (size.blocks, size.nameless)
    }
}

fn stored(names: std::ops::Range<u64>, medium: &str) -> Value {
    let parent = names.start.checked_sub(1).filter(|name| *name > 0);
    let tokens: Vec<u32> =
        prompt(names.end as usize - 1).split_off((names.start as usize - 1) * SIZE as usize);
    json!({"type": "BlockStored", "block_hashes": names.collect::<Vec<_>>(), "parent_block_hash": parent,
           "token_ids": tokens, "block_size": SIZE, "lora_id": null, "medium": medium, "lora_name": null})
}

fn with(mut event: Value, fields: &Value) -> Value {
    for (key, value) in fields.as_object().unwrap() {
        event[key] = value.clone();
    }
    event
}

fn named(names: &[u64], medium: &str) -> Value {
    json!({"type": "BlockStored", "block_hashes": names, "parent_block_hash": null, "token_ids": [],
           "block_size": 0, "lora_id": null, "medium": medium, "lora_name": null})
}

fn removed(names: &[u64], medium: &str) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": names, "medium": medium})
}

fn cleared(medium: Option<&str>) -> Value {
    match medium {
        Some(medium) => json!({"type": "AllBlocksCleared", "medium": medium}),
        None => json!({"type": "AllBlocksCleared"}),
    }
}

/// The prompt whose blocks are named 1, 2, 3 ...
fn prompt(blocks: usize) -> Vec<u32> {
    (0..blocks as u32 * SIZE).map(|token| token * 7 + 1).collect()
}

/// I6, E8: a clear that names a medium empties that one alone and lifts no reason; one that names none does both,
/// unless the worker's clears are of the device alone and the rank holds something below.
#[test]
fn a_clear_empties_what_it_names() {
    let mut engine = Engine::new(spec());
    engine.send(&[stored(1..4, "GPU"), stored(1..4, "CPU"), stored(1..3, "DISK"), json!(["Sneezed"])]);
    assert_eq!((engine.reach(&prompt(4)), engine.reasons()), ([3, 3, 3], vec![Reason::UnknownTag]));
    engine.send(&[cleared(Some("GPU"))]);
    assert_eq!((engine.reach(&prompt(4)), engine.reasons()), ([0, 3, 3], vec![Reason::UnknownTag]));
    assert_eq!((engine.held(Tier::Device), engine.held(Tier::Host)), ((0, 0), (3, 0)));
    engine.send(&[cleared(Some("CPU"))]);
    assert_eq!(engine.reach(&prompt(4)), [0, 0, 2]);
    engine.send(&[cleared(Some("DISK"))]);
    assert_eq!((engine.reach(&prompt(4)), engine.reasons()), ([0; 3], vec![Reason::UnknownTag]));
    engine.send(&[stored(1..4, "GPU"), stored(1..4, "CPU"), cleared(None)]);
    assert_eq!((engine.reach(&prompt(4)), engine.reasons()), ([0; 3], vec![]));

    let mut engine = Engine::new(WorkerSpec { clear_scope: ClearScope::Device, ..spec() });
    engine.send(&[stored(1..4, "GPU"), stored(1..3, "CPU"), json!(["Sneezed"]), cleared(None)]);
    assert_eq!((engine.reach(&prompt(4)), engine.reasons()), ([0, 2, 2], vec![Reason::UnknownTag]));
    engine.send(&[cleared(Some("CPU")), cleared(None)]);
    assert_eq!((engine.reach(&prompt(4)), engine.reasons()), ([0; 3], vec![]));
}

/// I6: a lower tier that takes in a cache's worth and gives nothing back is said, by tier; the trust stays, and
/// the reason goes with the first removal, or with a clear of that tier.
#[test]
fn a_tier_without_removals_is_said() {
    let mut engine = Engine::new(spec().capacity(CapacitySpec::per_rank(4)));
    engine.send(&[stored(1..5, "GPU"), stored(1..5, "GPU"), stored(1..4, "CPU"), stored(1..4, "CPU")]);
    assert_eq!(engine.reasons(), []);
    engine.send(&[named(&[4], "CPU"), named(&[1, 2, 3, 98], "FS")]);
    assert_eq!((engine.reasons(), engine.is_live()), (vec![Reason::NoRemovals], true));
    let tiers = engine.report().without_removals;
    assert_eq!(tiers.iter().collect::<Vec<_>>(), [Tier::Host, Tier::Disk]);
    engine.send(&[removed(&[98], "FS")]);
    assert_eq!(engine.reasons(), [Reason::NoRemovals]);
    engine.send(&[removed(&[77], "CPU")]);
    assert_eq!(engine.reasons(), [Reason::NoRemovals], "what is not there is not given back");
    engine.send(&[removed(&[4], "CPU")]);
    assert_eq!((engine.reasons(), engine.report().without_removals.is_empty()), (vec![], true));
    engine.send(&[cleared(Some("CPU")), stored(1..5, "CPU")]);
    assert_eq!(engine.reasons(), [Reason::NoRemovals]);
    engine.send(&[cleared(Some("CPU"))]);
    assert_eq!((engine.reasons(), engine.reach(&prompt(4))), (vec![], [4, 4, 4]));
}

/// I6: only the tiers that a worker's settings name are scored, and the settings may change.
#[test]
fn only_scored_tiers_count() {
    let scored = |host, disk| WorkerSpec { score_tiers: ScoreTiers { host, disk }, ..spec() };
    let mut engine = Engine::new(scored(false, true));
    engine.send(&[stored(1..2, "GPU"), stored(2..4, "CPU"), stored(2..3, "DISK")]);
    assert_eq!(engine.reach(&prompt(4)), [1, 1, 2]);
    engine.declare_again(scored(true, false));
    assert_eq!(engine.reach(&prompt(4)), [1, 3, 3]);
    engine.declare_again(scored(false, false));
    assert_eq!(engine.reach(&prompt(4)), [1, 1, 1]);
    assert_eq!(engine.held(Tier::Host), (2, 0), "held all the same");
}

/// I9: a name without tokens takes its content from the block of that name, be it there, gone, or still to
/// come; what the rank does not know is a name in that tier alone and leaves the trust as it is.
#[test]
fn a_placeholder_takes_its_content_from_the_name() {
    let mut engine = Engine::new(spec());
    engine.send(&[stored(1..4, "GPU"), named(&[1], "CPU"), removed(&[1, 2, 3], "GPU"), named(&[2], "CPU")]);
    assert_eq!((engine.reach(&prompt(4)), engine.held(Tier::Host)), ([0, 2, 2], (2, 0)));
    engine.send(&[named(&[4], "CPU")]);
    assert_eq!((engine.held(Tier::Host), engine.is_live()), ((2, 1), true));
    engine.send(&[with(named(&[3], "CPU"), &json!({"token_ids": null, "block_size": 64}))]);
    engine.send(&[stored(4..5, "GPU")]);
    assert_eq!((engine.reach(&prompt(4)), engine.held(Tier::Host)), ([0, 4, 4], (4, 0)));
    assert_eq!((engine.report().content.unknown_removals, engine.is_live()), (0, true));
    // A clear leaves nothing of it.
    engine.send(&[cleared(None), named(&[1, 2], "CPU")]);
    assert_eq!((engine.reach(&prompt(4)), engine.held(Tier::Host)), ([0; 3], (0, 2)));
}

/// I9: the names that one host event brings, or the blocks that end at a placeholder's name, are one unit: with
/// any of its names it goes, and a copy of one of its blocks on the device changes nothing about the rest.
#[test]
fn chunks_count_as_a_whole() {
    let chunks = || Engine::new(WorkerSpec { host_chunk_blocks: NonZeroU32::new(4), ..spec() });
    for gone in 1..=4 {
        let mut engine = chunks();
        engine.send(&[stored(1..5, "GPU"), stored(1..5, "CPU"), removed(&[4, 3, 2, 1], "GPU")]);
        let host = |engine: &Engine, blocks| engine.reach(&prompt(blocks))[1];
        assert_eq!((host(&engine, 4), host(&engine, 3)), (4, 0));
        engine.send(&[stored(1..3, "GPU")]);
        assert_eq!((host(&engine, 4), host(&engine, 3)), (4, 2));
        engine.send(&[removed(&[2], "GPU")]);
        assert_eq!((host(&engine, 4), host(&engine, 3)), (4, 1));
        engine.send(&[removed(&[gone], "CPU")]);
        assert_eq!(host(&engine, 4), 1, "without name {gone}");
        engine.send(&[removed(&[1, 2, 3, 4].map(|name| if name == gone { 99 } else { name }), "CPU")]);
        assert_eq!(engine.report().content.unknown_removals, 1, "each name was there once");
    }
    let mut engine = chunks();
    engine.send(&[stored(1..9, "GPU"), named(&[4], "CPU"), named(&[8], "CPU"), removed(&[1, 6], "GPU")]);
    assert_eq!(engine.reach(&prompt(8)), [0, 8, 8]);
    assert_eq!(engine.reach(&prompt(7))[1], 5);
    // Chunks that share blocks each go by their own.
    engine.send(&[stored(3..7, "CPU"), removed(&[8], "CPU")]);
    assert_eq!(engine.reach(&prompt(8))[1], 8, "the device has 7 and 8");
    engine.send(&[removed(&[3, 4, 5, 6], "CPU")]);
    assert_eq!(engine.reach(&prompt(8))[1], 5, "the placeholder of 4 is there still");
}

/// I10: what a rank holds under a name is what the name means. The device's word re-places what a lower tier had
/// said; the device against itself is said.
#[test]
fn a_name_means_what_the_device_said() {
    let mut engine = Engine::new(spec());
    let elsewhere = |medium| with(stored(2..3, medium), &json!({"parent_block_hash": null}));
    engine.send(&[stored(1..4, "GPU"), elsewhere("CPU")]);
    assert_eq!((engine.reach(&prompt(4)), engine.is_live()), ([3, 3, 3], true));
    assert_eq!(engine.reach(&prompt(2)[SIZE as usize..]), [0; 3]);
    assert_eq!(engine.report().content.contradicted_names, 1);
    engine.send(&[removed(&[1, 2, 3], "GPU"), stored(1..2, "GPU")]);
    assert_eq!(engine.reach(&prompt(4)), [1, 2, 2], "the host's copy is where the device's was");
    engine.send(&[stored(2..3, "GPU"), elsewhere("GPU")]);
    assert_eq!((engine.reasons(), engine.reach(&prompt(4))), (vec![Reason::ContradictedName], [2, 2, 2]));

    let mut engine = Engine::new(spec());
    engine.send(&[elsewhere("CPU"), stored(1..4, "GPU")]);
    assert_eq!((engine.reach(&prompt(4)), engine.is_live()), ([3, 3, 3], true));
    assert_eq!(engine.reach(&prompt(2)[SIZE as usize..]), [0; 3], "re-placed");
    engine.send(&[removed(&[1, 2, 3], "GPU"), stored(1..2, "CPU")]);
    assert_eq!(engine.reach(&prompt(4))[1], 2);
}

/// I10: without the whole history a store below the device that names no parent need not be a prompt's beginning:
/// it waits until another store places its name.
#[test]
fn a_root_below_the_device_needs_the_history() {
    let tail = |medium| with(stored(2..4, medium), &json!({"parent_block_hash": null}));
    let behind = prompt(3)[SIZE as usize..].to_vec();
    let mut engine = Engine::new(spec());
    engine.send(&[tail("CPU")]);
    assert_eq!(engine.reach(&behind), [0, 2, 2]);

    let mut engine = Engine::joined_late(spec());
    engine.send(&[tail("CPU")]);
    assert_eq!((engine.reach(&behind), engine.report().content.orphan_blocks), ([0; 3], 2));
    engine.send(&[stored(1..3, "GPU")]);
    assert_eq!((engine.reach(&behind), engine.reach(&prompt(4))), ([0; 3], [2, 3, 3]));
    engine.send(&[cleared(None), tail("CPU")]);
    assert_eq!(engine.reach(&behind), [0, 2, 2], "from the clear on the history is whole");
}

/// I9: a kind that is said replaces one that was assumed, and a process that starts anew has no groups yet.
#[test]
fn groups_are_what_is_said_of_them() {
    let full = |idx| json!({"group_idx": idx, "kv_cache_spec_kind": "full_attention"});
    let windowed = |idx| json!({"group_idx": idx, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8});
    let hybrid = |windowed_idx: u32, full_idx: u32| {
        let first = removed(&[1, 2, 3, 4, 5, 6], "GPU");
        [
            with(stored(1..9, "GPU"), &full(full_idx)),
            with(stored(1..9, "GPU"), &windowed(windowed_idx)),
            with(first, &json!({"group_idx": windowed_idx})),
        ]
    };
    for before in [
        vec![],
        vec![with(stored(1..9, "GPU"), &json!({"group_idx": 0})), cleared(None)],
        vec![with(stored(1..9, "GPU"), &full(0)), cleared(None)],
        vec![named(&[999], "CPU")],
        vec![with(stored(1..9, "CPU"), &json!({"group_idx": 0}))],
    ] {
        let mut engine = Engine::new(spec());
        engine.send(&before);
        engine.send(&hybrid(0, 1));
        let held = (engine.reach(&prompt(8))[0], engine.report().content.unknown_removals);
        assert_eq!((held, engine.is_live()), ((8, 0), true), "after {before:?}");
        let pool = engine.view.fleet();
        let slot = pool.only_pool().unwrap().workers[0].ranks[0].slot;
        assert_eq!(pool.only_pool().unwrap().index.tree_size(slot), Some(8), "after {before:?}");
    }
    // A group that is left out may say what it likes.
    let mut engine = Engine::new(spec());
    let left_out = with(stored(1..4, "GPU"), &json!({"group_idx": 3, "block_hashes": [7, 8]}));
    engine.send(&[stored(1..4, "GPU"), left_out]);
    assert_eq!((engine.reach(&prompt(3))[0], engine.is_live()), (3, true));
    // The hybrid manager is turned off: the windowed group's absence binds nobody.
    engine.send(&hybrid(1, 0));
    engine.send(&[cleared(None), with(stored(1..9, "GPU"), &full(0))]);
    assert_eq!(engine.reach(&prompt(8)), [8, 8, 8]);
}

/// E8: each store that is refused has its reason in the trust, and so have tokens that cannot be used.
#[test]
fn what_is_refused_is_said() {
    for (event, reason) in [
        (with(stored(1..4, "GPU"), &json!({"block_size": 8})), Reason::BlockSizeMismatch),
        (with(stored(1..4, "CPU"), &json!({"block_size": 6})), Reason::BlockSizeMismatch),
        (with(stored(1..4, "GPU"), &json!({"block_hashes": [1, 2]})), Reason::TokenMismatch),
        (with(stored(1..4, "CPU"), &json!({"block_hashes": [1], "block_size": 8})), Reason::TokenMismatch),
        (with(stored(1..2, "GPU"), &json!({"parent_block_hash": 1})), Reason::SelfParent),
        (with(stored(1..2, "CPU"), &json!({"parent_block_hash": 1})), Reason::SelfParent),
        (with(stored(1..2, "GPU"), &json!({"token_ids": [1, "a3", "a3", 4]})), Reason::UnusableTokens),
    ] {
        let mut engine = Engine::new(spec());
        engine.send(std::slice::from_ref(&event));
        assert_eq!(engine.reasons(), [reason], "{event}");
        assert_eq!(engine.report().given.get(reason), 1);
        engine.send(&[cleared(None)]);
        assert!(engine.is_live());
    }
    // Whose name is known is missed by nobody.
    let mut engine = Engine::new(spec());
    engine.send(&[stored(1..2, "GPU"), with(stored(1..2, "GPU"), &json!({"token_ids": [1, "a3", "a3", 4]}))]);
    assert!(engine.is_live());
    // More that wait than there is room for.
    let behind = |name: u64| {
        with(stored(1..2, "GPU"), &json!({"block_hashes": [name], "parent_block_hash": 1_000_000}))
    };
    for batch in 0..25 {
        let events: Vec<Value> = (1..1_000).map(|name| behind(batch * 1_000 + name)).collect();
        engine.send(&events);
    }
    assert_eq!(engine.reasons(), [Reason::OrphansDropped]);
}

/// E8: what is left out behind a clear of the same batch is not lifted by it; the next batch's clear lifts it.
#[test]
fn a_clear_does_not_lift_what_is_left_out_behind_it() {
    let stored = json!(["BlockStored", [1], null, [1, 2, 3, 4], 4, null, "GPU", null]);
    for left_out in [json!(["BlockTransferred", [1]]), json!(["BlockRemoved", [true], "GPU"])] {
        let mut engine = Engine::new(spec());
        engine.send(&[json!(["AllBlocksCleared"]), stored.clone(), left_out]);
        assert!(!engine.is_live(), "{:?}", engine.reasons());
        engine.send(&[json!(["AllBlocksCleared"])]);
        assert!(engine.is_live(), "{:?}", engine.reasons());
    }
}

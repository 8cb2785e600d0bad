//! How long a query takes while the index is written as fast as one thread can: percentiles of an HDR histogram,
//! first with the writer at rest, then beside it. Conversations over shared system prompts grow block by block
//! and are evicted leaf first, on 64 ranks.
//!
//! `cargo bench --bench read_beside_write`; `RANKWISE_BENCH_SECONDS` makes each part longer than two seconds.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rankwise::block::{Announcements, BlockHash, BlockSize, Isolation, LocalBlockHash, SequenceHash, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, GroupTag, HybridRule, IndexQuery, Leads, PrefixIndex, Reader, Scratch, StoreRequest, StoreTokens,
};

const RANKS: usize = 64;
const SYSTEM_PROMPTS: usize = 16;
const SYSTEM_BLOCKS: usize = 96;
const CONVERSATIONS: usize = 2_000;
const BLOCKS: usize = 512;
const BLOCK_SIZE: u32 = 16;

/// One prompt that a rank caches up to some block.
struct Conversation {
    rank: usize,
    locals: Vec<LocalBlockHash>,
    names: Vec<BlockHash>,
    held: usize,
}

/// A change of one conversation: blocks from `from` on come (or go, where `to` is less).
#[derive(Clone, Copy)]
struct Event {
    conversation: usize,
    from: usize,
    to: usize,
}

struct Fleet {
    index: PrefixIndex,
    slots: Vec<RankSlot>,
    conversations: Vec<Conversation>,
    dice: StdRng,
}

impl Fleet {
    fn new() -> (Self, Reader) {
        let (mut index, reader) = index::new(BlockSize::new(BLOCK_SIZE).unwrap());
        let slots = (0..RANKS).map(|_| index.write().add_rank(Announcements::Set)).collect();
        let mut dice = StdRng::seed_from_u64(1);
        let prompts: Vec<Vec<LocalBlockHash>> = (0..SYSTEM_PROMPTS)
            .map(|_| (0..SYSTEM_BLOCKS).map(|_| LocalBlockHash(dice.random())).collect())
            .collect();
        let conversations = (0..CONVERSATIONS).map(|nth| {
            let mut locals = prompts[nth % SYSTEM_PROMPTS].clone();
            locals.extend((SYSTEM_BLOCKS..BLOCKS).map(|_| LocalBlockHash(dice.random())));
            let names = SequenceHash::chain(&locals).map(|sequence| BlockHash::Int(sequence.0)).collect();
            Conversation { rank: nth % RANKS, locals, names, held: 0 }
        });
        let conversations = conversations.collect();
        let mut fleet = Self { index, slots, conversations, dice };
        for conversation in 0..CONVERSATIONS {
            let half = Event { conversation, from: 0, to: BLOCKS / 2 };
            fleet.conversations[conversation].held = half.to;
            fleet.apply(&[half]);
        }
        (fleet, reader)
    }

    /// The next events: decoded blocks, and a whole conversation's own blocks when it is full.
    fn next(&mut self) -> Vec<Event> {
        let Self { conversations, dice, .. } = self;
        let next = (0..16).map(|_| {
            let nth = dice.random_range(0..conversations.len());
            let from = conversations[nth].held;
            let to = if from == BLOCKS { SYSTEM_BLOCKS } else { from + 1 };
            conversations[nth].held = to;
            Event { conversation: nth, from, to }
        });
        next.collect()
    }

    /// Applies events under one write section; returns the blocks that came or went.
    fn apply(&mut self, events: &[Event]) -> usize {
        let Self { index, slots, conversations, .. } = self;
        let of = |event: &Event| &conversations[event.conversation];
        let leads = |event: &Event| Leads {
            parent: event.from.checked_sub(1).map(|before| &of(event).names[before]),
            names: of(event).names.get(event.from..event.to).unwrap_or(&[]),
        };
        index.write().apply_each(events, leads, |section, event| {
            let Conversation { rank, locals, names, .. } = of(event);
            if event.to < event.from {
                let leaves: Vec<BlockHash> = names[event.to..event.from].iter().rev().cloned().collect();
                section.remove(slots[*rank], Tier::Device, None, &leaves);
                return;
            }
            let request = StoreRequest {
                tier: Tier::Device,
                group: GroupTag::default(),
                names: &names[event.from..event.to],
                parent: event.from.checked_sub(1).map(|before| &names[before]),
                tokens: StoreTokens::Locals(&locals[event.from..event.to]),
                block_size: BLOCK_SIZE,
                isolation: Isolation::default(),
                keys: &[],
                history_complete: true,
            };
            section.store(slots[*rank], &request).expect("a plain store");
        });
        events.iter().map(|event| event.from.abs_diff(event.to)).sum()
    }
}

/// Asks about random conversations until `done` says so.
fn ask(reader: &Reader, prompts: &[Vec<LocalBlockHash>], done: impl Fn() -> bool) -> Histogram<u64> {
    // A minute: nothing is cut off that one would wait for.
    let mut latencies = Histogram::new_with_max(60_000_000_000, 3).unwrap();
    let mut dice = StdRng::seed_from_u64(2);
    let mut scratch = Scratch::default();
    while !done() {
        let locals = &prompts[dice.random_range(0..prompts.len())];
        let query = IndexQuery { locals, sequences: &[], hybrid: HybridRule::Joint };
        let before = Instant::now();
        reader.overlap(&query, &mut scratch);
        latencies.saturating_record(u64::try_from(before.elapsed().as_nanos()).unwrap_or(u64::MAX));
        assert!(!scratch.overlaps().is_empty(), "every conversation's system prompt is held");
    }
    latencies
}

fn print(part: &str, latencies: &Histogram<u64>) {
    let at = |quantile: f64| latencies.value_at_quantile(quantile);
    println!(
        "{part:24} {:>10} queries   p50 {:>7} ns   p90 {:>7}   p99 {:>7}   p99.9 {:>8}   max {:>9}",
        latencies.len(),
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.999),
        latencies.max()
    );
}

fn main() {
    let seconds =
        std::env::var("RANKWISE_BENCH_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let part = Duration::from_secs_f64(seconds);
    let (mut fleet, reader) = Fleet::new();
    let prompts: Vec<_> = fleet.conversations.iter().map(|of| of.locals.clone()).collect();
    let start = Instant::now();
    print("writer at rest", &ask(&reader, &prompts, || start.elapsed() >= part));

    let over = AtomicBool::new(false);
    let (beside, blocks, took) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&reader, &prompts, || over.load(Ordering::Relaxed)));
        let (start, mut blocks) = (Instant::now(), 0);
        while start.elapsed() < part {
            let events = fleet.next();
            blocks += fleet.apply(&events);
        }
        let took = start.elapsed();
        over.store(true, Ordering::Relaxed);
        (asking.join().expect("the reader ends"), blocks, took)
    });
    print("beside a busy writer", &beside);
    println!("written meanwhile        {:.1} M blocks a second", blocks as f64 / took.as_secs_f64() / 1e6);
}

//! The index under made-up traffic, alone and with a reader beside the writer.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use rankwise::block::{Announcements, BlockHash, BlockSize, Isolation, LocalBlockHash, SequenceHash, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, GroupTag, HybridRule, IndexQuery, PrefixIndex, Reader, Scratch, StoreRequest, StoreTokens,
};
use rankwise::lab::Latencies;
use rankwise::lab::traffic::{Block, PoolBatch, PoolEvent, Traffic, TrafficConfig, tokens_of};

use super::{Args, Class, Ingest, Measured, Size};

/// Blocks stored after the fill unless it is told otherwise; more only repeats itself.
const MAX_CHURN: u64 = 1_000_000;

/// Blocks applied while a reader asks, made beforehand so that nothing but the index holds up the writer.
const BESIDE_READER: u64 = 200_000;

/// Runs all of it.
pub fn measure(args: &Args) -> Result<Measured> {
    let block_size = BlockSize::new(args.block_size).context("a block has at least one token")?;
    let mut config = TrafficConfig::new(args.ranks, args.blocks, block_size);
    (config.shared_names, config.seed) = (!args.own_names, args.seed);
    let mut stage = Stage::new(config);
    let mut ingest = Recorder::new("fill");
    while !stage.traffic.is_warm() {
        stage.apply_round(&mut ingest);
    }
    let fill = ingest.ended();
    let held = u64::from(args.ranks) * u64::from(args.blocks);
    let churn = args.churn.unwrap_or(held.min(MAX_CHURN));
    let mut ingest = Recorder::new("churn");
    while ingest.of.blocks < churn * 2 {
        stage.apply_round(&mut ingest);
    }
    let churn = ingest.ended();
    let (checked, wrong) = stage.check(args.queries.min(200));
    let mut queries = stage.classes(args.queries as usize);
    let (beside, reading) = stage.beside_reader(args.queries as usize)?;
    queries.push(reading);
    let (checked_after, wrong_after) = stage.check(args.queries.min(200));
    Ok(Measured {
        parameters: vec![
            ("source", "made-up traffic".to_owned()),
            ("ranks", args.ranks.to_string()),
            ("blocks_per_rank", args.blocks.to_string()),
            ("block_size", args.block_size.to_string()),
            ("names", if args.own_names { "each rank its own" } else { "one hash seed" }.to_owned()),
            ("clock_ns", clock_ns().to_string()),
            ("seed", args.seed.to_string()),
        ],
        ingest: vec![fill, churn, beside],
        queries,
        size: stage.size(),
        checked: checked + checked_after,
        wrong: wrong + wrong_after,
    })
}

/// What two readings of the clock take: it is in every single figure.
fn clock_ns() -> u64 {
    const READINGS: u32 = 10_000;
    let start = Instant::now();
    (0..READINGS).for_each(|_| {
        black_box(Instant::now());
    });
    nanos(start) / u64::from(READINGS)
}

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

struct Recorder {
    of: Ingest,
}

impl Recorder {
    fn new(phase: &str) -> Self {
        let (spread, phase) = (Latencies::new(), phase.to_owned());
        Self { of: Ingest { phase, blocks: 0, batches: 0, nanos: 0, spread, per: "block" } }
    }

    fn took(&mut self, nanos: u64, blocks: u64) {
        self.of.blocks += blocks;
        self.of.batches += 1;
        self.of.nanos += nanos;
        self.of.spread.record_many_ns(nanos / blocks.max(1), blocks);
    }

    fn ended(self) -> Ingest {
        self.of
    }
}

/// A batch as the index takes it, made outside of what is measured.
struct Ready {
    slot: RankSlot,
    events: Vec<ReadyEvent>,
    blocks: u64,
}

enum ReadyEvent {
    Store { names: Vec<BlockHash>, parent: Option<BlockHash>, tokens: Vec<u32> },
    Remove { names: Vec<BlockHash> },
}

impl Ready {
    fn new(batch: &PoolBatch, slot: RankSlot, block_size: BlockSize) -> Self {
        let named = |names: &[u64]| names.iter().map(|name| BlockHash::Int(*name)).collect();
        let event = |event: &PoolEvent| match event {
            PoolEvent::Stored { parent, names, contents } => {
                let mut tokens = Vec::new();
                tokens_of(contents.iter().copied(), block_size, &mut tokens);
                ReadyEvent::Store { names: named(names), parent: parent.map(BlockHash::Int), tokens }
            }
            PoolEvent::Removed { names } => ReadyEvent::Remove { names: named(names) },
        };
        Self { slot, events: batch.events.iter().map(event).collect(), blocks: batch.blocks() as u64 }
    }

    /// One batch under one write section, as a single message comes in.
    fn apply(&self, index: &mut PrefixIndex) {
        let block_size = index.block_size().get();
        let mut section = index.write();
        for event in &self.events {
            match event {
                ReadyEvent::Store { names, parent, tokens } => {
                    let request = StoreRequest {
                        tier: Tier::Device,
                        group: GroupTag::default(),
                        names,
                        parent: parent.as_ref(),
                        tokens: StoreTokens::Ids(tokens),
                        block_size,
                        isolation: Isolation::default(),
                        keys: &[],
                        history_complete: true,
                    };
                    // What is refused shows in the comparison with the truth.
                    let _ = black_box(section.store(self.slot, &request));
                }
                ReadyEvent::Remove { names } => {
                    black_box(section.remove(self.slot, Tier::Device, None, names));
                }
            }
        }
    }
}

/// A prompt by its hashes.
struct Asked {
    blocks: Vec<Block>,
    locals: Vec<LocalBlockHash>,
    sequences: Vec<SequenceHash>,
}

impl Asked {
    fn query(&self, with_sequences: bool) -> IndexQuery<'_> {
        let sequences = if with_sequences { &self.sequences[..] } else { &[] };
        IndexQuery { locals: &self.locals, sequences, hybrid: HybridRule::Joint }
    }
}

struct Stage {
    traffic: Traffic,
    index: PrefixIndex,
    reader: Reader,
    slots: Vec<RankSlot>,
}

impl Stage {
    fn new(config: TrafficConfig) -> Self {
        let (mut index, reader) = index::new(config.block_size);
        let mut section = index.write();
        let slots = (0..config.ranks).map(|_| section.add_rank(Announcements::Counted)).collect();
        drop(section);
        Self { traffic: Traffic::new(config), index, reader, slots }
    }

    fn next(&mut self, rank: u32) -> Ready {
        let batch = self.traffic.step(rank);
        Ready::new(&batch, self.slots[rank as usize], self.traffic.config().block_size)
    }

    /// One batch of every rank.
    fn apply_round(&mut self, recorder: &mut Recorder) {
        for rank in 0..self.traffic.config().ranks {
            let ready = self.next(rank);
            let start = Instant::now();
            ready.apply(&mut self.index);
            recorder.took(nanos(start), ready.blocks);
        }
    }

    fn asked(&self, blocks: Vec<Block>) -> Asked {
        let locals = self.traffic.locals(&blocks);
        let sequences = SequenceHash::chain(&locals).collect();
        Asked { blocks, locals, sequences }
    }

    /// Compares answers for all ranks with what the ranks hold: how many were compared, how many were wrong.
    fn check(&mut self, prompts: u32) -> (u64, u64) {
        let (mut checked, mut wrong) = (0, 0);
        let mut scratch = Scratch::default();
        for _ in 0..prompts {
            let blocks = self.traffic.prompt();
            let asked = self.asked(blocks);
            for with_sequences in [false, true] {
                self.reader.overlap(&asked.query(with_sequences), &mut scratch);
                for (rank, slot) in (0..).zip(&self.slots) {
                    let found = scratch.overlap(*slot).map_or(0, |of| of.device as usize);
                    checked += 1;
                    wrong += u64::from(found != self.traffic.overlap(rank, &asked.blocks));
                }
            }
        }
        (checked, wrong)
    }

    /// Look-ups of every kind, each prompt once by content and once with its sequence hashes.
    fn classes(&mut self, count: usize) -> Vec<Class> {
        let kinds = [
            ("64 blocks held", Kind::Held(64)),
            ("512 blocks held", Kind::Held(512)),
            ("2,048 blocks held", Kind::Held(2_048)),
            ("next turn", Kind::Turn),
            ("system prompt, then 512 unknown", Kind::System),
            ("512 unknown", Kind::Unknown),
        ];
        let mut classes = Vec::new();
        for (name, kind) in kinds {
            let prompts: Vec<Asked> = (0..count).map_while(|_| self.prompt(kind)).collect();
            if prompts.is_empty() {
                // No conversation is so long: caches of this size have none.
                continue;
            }
            for (hashes, with_sequences) in [("content", false), ("sequence", true)] {
                let latency = look_up(&self.reader, &prompts, with_sequences, |_| true);
                classes.push(Class { name: format!("{name}, {hashes} hashes"), latency });
            }
        }
        classes
    }

    fn prompt(&mut self, kind: Kind) -> Option<Asked> {
        let blocks = match kind {
            Kind::Held(depth) => self.traffic.live_prefix(depth)?,
            Kind::Turn => self.traffic.prompt(),
            Kind::System => self.traffic.system_then_unknown(512),
            Kind::Unknown => self.traffic.unknown(512),
        };
        Some(self.asked(blocks))
    }

    /// A saturated writer and a reader that asks without pause.
    fn beside_reader(&mut self, count: usize) -> Result<(Ingest, Class)> {
        let prompts: Vec<Asked> = (0..count).filter_map(|_| self.prompt(Kind::Turn)).collect();
        let (mut batches, mut blocks) = (Vec::new(), 0);
        while blocks < BESIDE_READER {
            for rank in 0..self.traffic.config().ranks {
                let ready = self.next(rank);
                blocks += ready.blocks;
                batches.push(ready);
            }
        }
        let mut recorder = Recorder::new("with a reader beside");
        let (done, reader, index) = (AtomicBool::new(false), self.reader.clone(), &mut self.index);
        let latency = std::thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let mut all = Latencies::new();
                while !done.load(Ordering::Relaxed) {
                    let go_on = |_: usize| !done.load(Ordering::Relaxed);
                    all.add(&look_up(&reader, &prompts, false, go_on));
                }
                all
            });
            for batch in &batches {
                let start = Instant::now();
                batch.apply(index);
                recorder.took(nanos(start), batch.blocks);
            }
            done.store(true, Ordering::Relaxed);
            reading.join().ok()
        });
        let latency = latency.context("the reader's thread has ended badly")?;
        let name = "next turn, content hashes, beside a saturated writer".to_owned();
        Ok((recorder.ended(), Class { name, latency }))
    }

    fn size(&self) -> Size {
        let stats = self.reader.stats();
        Size {
            ranks: self.slots.len() as u64,
            distinct_blocks: stats.distinct_blocks,
            held_blocks: stats.total_blocks,
            bytes: stats.bytes as u64,
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Held(usize),
    Turn,
    System,
    Unknown,
}

/// Asks each prompt once, for as long as `go_on` says so. The prompt's hashes are touched before, as they are
/// after hashing; the index is as cold as the prompts before have left it.
fn look_up(
    reader: &Reader,
    prompts: &[Asked],
    with_sequences: bool,
    go_on: impl Fn(usize) -> bool,
) -> Latencies {
    let (mut latencies, mut scratch) = (Latencies::new(), Scratch::default());
    for (nth, asked) in prompts.iter().enumerate() {
        if !go_on(nth) {
            break;
        }
        let query = asked.query(with_sequences);
        black_box(query.locals.iter().fold(0, |all, hash| all ^ hash.0));
        black_box(query.sequences.iter().fold(0, |all, hash| all ^ hash.0));
        let start = Instant::now();
        reader.overlap(&query, &mut scratch);
        black_box(scratch.overlaps());
        latencies.record_ns(nanos(start));
    }
    latencies
}

//! The index under recorded traffic: frames through the indexer, then the prompts that were announced in it.

use std::collections::HashMap;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use rankwise::block::{Announcements, BlockHash, BlockSize};
use rankwise::capture::{CaptureScript, Feed, stem};
use rankwise::events::{BlockStored, EventTokens, KvEvent, Limits, decode_batch, parse_live};
use rankwise::ids::DpRank;
use rankwise::index::{HybridRule, IndexQuery, Scratch};
use rankwise::indexer::{Config, PoolView};
use rankwise::lab::Latencies;
use rankwise::routing::{Overlaps, Prompt};

use super::{Args, Class, Ingest, Measured, Size};
use crate::cli::inputs::{Loading, captures};

/// Prompts that are built of one capture: evenly chosen among all that were announced.
const MAX_PROMPTS: usize = 2_000;

/// Runs all of it, capture by capture.
pub fn measure(args: &Args) -> Result<Measured> {
    let paths = captures(&args.files)?;
    let mut loading = Loading::new(&paths);
    let mut measured = Measured {
        parameters: vec![
            ("source", "captures".to_owned()),
            ("captures", paths.iter().map(|path| stem(path)).collect::<Vec<_>>().join(", ")),
            ("repeats", args.repeats.to_string()),
        ],
        ingest: Vec::new(),
        queries: Vec::new(),
        size: Size::default(),
        checked: 0,
        wrong: 0,
    };
    for path in &paths {
        let script = loading.load(path)?;
        measure_one(path, &script, args, &mut measured)?;
    }
    Ok(measured)
}

fn measure_one(path: &Path, script: &CaptureScript, args: &Args, all: &mut Measured) -> Result<()> {
    let name = stem(path);
    let mut ingest = Ingest {
        phase: name.clone(),
        blocks: 0,
        batches: 0,
        nanos: 0,
        spread: Latencies::new(),
        per: "message",
    };
    let mut last = None;
    for _ in 0..args.repeats {
        let feed = Feed::new(script, "bench", Announcements::Counted, Config::default());
        let mut feed = feed.with_context(|| format!("{}", path.display()))?;
        loop {
            let start = Instant::now();
            if !feed.step() {
                break;
            }
            let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
            ingest.spread.record_ns(took);
            ingest.nanos += took;
            ingest.batches += 1;
        }
        let pool = feed.pool().context("the capture has no pool")?;
        ingest.blocks += pool.ranks().map(|(_, rank)| moved(&rank.status.report().content)).sum::<u64>();
        last = Some(pool);
    }
    let Some(pool) = last else { return Ok(()) };
    all.ingest.push(ingest);
    ask(&name, &pool, &announced(script, pool.block_size), &mut all.queries);
    let stats = pool.index.stats();
    all.size.ranks += pool.ranks().count() as u64;
    all.size.distinct_blocks += stats.distinct_blocks;
    all.size.held_blocks += stats.total_blocks;
    all.size.bytes += stats.bytes as u64;
    Ok(())
}

fn moved(content: &rankwise::indexer::ContentCounters) -> u64 {
    content.stored_blocks + content.removed_blocks
}

/// Asks every prompt from its tokens, and by its hashes alone.
fn ask(name: &str, pool: &PoolView, prompts: &[Vec<u32>], classes: &mut Vec<Class>) {
    let (mut from_tokens, mut by_hashes) = (Latencies::new(), Latencies::new());
    let (mut overlaps, mut scratch) = (Overlaps::default(), Scratch::default());
    for tokens in prompts {
        let start = Instant::now();
        overlaps.find(pool, &Prompt::tokens(tokens), HybridRule::Joint);
        black_box(overlaps.found());
        from_tokens.record(start.elapsed());
        let query =
            IndexQuery { locals: overlaps.hashes().locals(), sequences: &[], hybrid: HybridRule::Joint };
        let start = Instant::now();
        pool.index.overlap(&query, &mut scratch);
        black_box(scratch.overlaps());
        by_hashes.record(start.elapsed());
    }
    for (how, latency) in [("from tokens", from_tokens), ("by hashes", by_hashes)] {
        classes.push(Class { name: format!("{name}, {how}"), latency });
    }
}

/// The prompts that end where nothing was announced behind them, of plain text only.
fn announced(script: &CaptureScript, block_size: BlockSize) -> Vec<Vec<u32>> {
    let mut chains = Chains::default();
    for message in script.live() {
        let Ok(live) = parse_live(&message.frames) else { continue };
        let Ok(batch) = decode_batch(&live.payload, &Limits::default()) else { continue };
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => chains.add(message.rank, stored, block_size),
                // A restarted or cleared engine may use a name again for something else.
                KvEvent::Cleared(_) => chains.names.retain(|(rank, _), _| *rank != message.rank),
                KvEvent::Removed(_) => {}
            }
        }
    }
    chains.prompts()
}

/// Blocks with the block before each.
#[derive(Default)]
struct Chains {
    names: HashMap<(DpRank, BlockHash), usize>,
    blocks: Vec<(Option<usize>, Vec<u32>)>,
    followed: Vec<bool>,
}

impl Chains {
    fn add(&mut self, rank: DpRank, stored: &BlockStored, block_size: BlockSize) {
        let EventTokens::Ids(tokens) = &stored.tokens else { return };
        let plain = stored.lora_id.is_none()
            && stored.lora_name.is_none()
            && stored.cache_salt.is_none()
            && stored.extra_keys.iter().all(Vec::is_empty);
        let size = block_size.as_usize();
        let fits = stored.block_size == block_size.get() && tokens.len() == stored.block_hashes.len() * size;
        if !plain || !fits {
            return;
        }
        let mut parent = match &stored.parent_block_hash {
            None => None,
            // Behind what is not known, or not plain, there is no prompt to be built.
            Some(name) => match self.names.get(&(rank, name.clone())) {
                Some(at) => Some(*at),
                None => return,
            },
        };
        for (name, block) in stored.block_hashes.iter().zip(tokens.chunks_exact(size)) {
            let at = self.blocks.len();
            if let Some(before) = parent {
                self.followed[before] = true;
            }
            self.blocks.push((parent, block.to_vec()));
            self.followed.push(false);
            self.names.insert((rank, name.clone()), at);
            parent = Some(at);
        }
    }

    fn prompts(&self) -> Vec<Vec<u32>> {
        let ends: Vec<usize> = (0..self.blocks.len()).filter(|at| !self.followed[*at]).collect();
        let step = ends.len().div_ceil(MAX_PROMPTS).max(1);
        ends.into_iter().step_by(step).map(|end| self.prompt(end)).collect()
    }

    fn prompt(&self, end: usize) -> Vec<u32> {
        let chain = std::iter::successors(Some(end), |at| self.blocks[*at].0);
        let blocks: Vec<&[u32]> = chain.map(|at| self.blocks[at].1.as_slice()).collect();
        blocks.into_iter().rev().flatten().copied().collect()
    }
}

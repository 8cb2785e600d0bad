//! Requests from a public trace: one JSON object a line, with `input_length` and `output_length` in tokens and
//! one `hash_ids` entry per 512 tokens of the input, where equal ids mean equal blocks with equal history.
//! That is the form of the traces that Mooncake published with its FAST'25 paper.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use rustc_hash::FxHashMap;
use serde::Deserialize;

use super::blocks::{BLOCK_SIZE, BlockId, Event};
use super::fleet::{Fleet, Request, Step};
use crate::dice::Dice;

/// Tokens that one id of a trace stands for.
const TOKENS_PER_ID: usize = 512;
/// Share of the requests that go to the rank that last saw their deepest known id.
const AFFINE: f64 = 0.70;
/// Ended requests that are remembered, to ask for.
const REMEMBERED: usize = 4_096;

/// One line of a trace.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct TraceLine {
    /// Tokens of the prompt.
    pub input_length: usize,
    /// Tokens of the answer.
    pub output_length: usize,
    /// One per started 512 tokens of the prompt.
    pub hash_ids: Vec<u64>,
}

/// Reads a trace, compressed or not.
///
/// # Errors
///
/// When the file cannot be read or a line is not of the form.
pub fn read(path: &Path) -> io::Result<Vec<TraceLine>> {
    let file = File::open(path)?;
    let gz = path.extension().is_some_and(|extension| extension == "gz");
    let plain: Box<dyn Read> = if gz { Box::new(flate2::read::GzDecoder::new(file)) } else { Box::new(file) };
    let mut lines = Vec::new();
    for line in BufReader::new(plain).lines() {
        let line = line?;
        if !line.trim().is_empty() {
            lines.push(serde_json::from_str(&line)?);
        }
    }
    Ok(lines)
}

/// A small trace of the same form: conversations whose answers do not come back, as in the public ones.
pub fn made_up(seed: u64, requests: usize) -> Vec<TraceLine> {
    let mut dice = Dice::new(seed);
    let mut next_id = 0_u64;
    let mut open: Vec<Vec<u64>> = Vec::new();
    let mut lines = Vec::with_capacity(requests);
    for _ in 0..requests {
        let mut ids = match open.len() {
            0 => vec![0],
            known if dice.chance(0.6) => open.swap_remove(dice.below(known)),
            _ => vec![0],
        };
        let turn = if dice.chance(0.1) { dice.within(16, 60) } else { dice.within(1, 12) };
        for _ in 0..turn {
            next_id += 1;
            ids.push(next_id);
        }
        let input_length = ids.len() * TOKENS_PER_ID - dice.below(TOKENS_PER_ID);
        lines.push(TraceLine { input_length, output_length: dice.within(16, 900), hash_ids: ids.clone() });
        // The last id was of a started block: the next turn fills it, under another id.
        ids.pop();
        if ids.len() < 240 && !ids.is_empty() {
            open.push(ids);
        }
    }
    lines
}

/// A trace on its way through a fleet.
#[derive(Debug)]
pub struct Replay {
    /// The engines.
    pub fleet: Fleet,
    lines: VecDeque<TraceLine>,
    dice: Dice,
    /// The blocks of every id met so far, and the rank that saw it last.
    known: FxHashMap<u64, (Vec<BlockId>, u32)>,
    recent: VecDeque<Vec<BlockId>>,
    most_running: usize,
    longest: usize,
    lines_in_all: usize,
}

impl Replay {
    /// Empty caches of `entries` blocks in all, and the whole trace ahead.
    pub fn new(seed: u64, ranks: u32, entries: usize, lines: Vec<TraceLine>) -> Self {
        let capacity = entries / ranks as usize;
        Self {
            fleet: Fleet::new(ranks, capacity),
            lines_in_all: lines.len(),
            lines: lines.into(),
            dice: Dice::new(seed),
            known: FxHashMap::default(),
            recent: VecDeque::new(),
            most_running: (4 * ranks as usize).min(entries / 4_000 + 8),
            longest: capacity / 2,
        }
    }

    /// Share of the trace that is read.
    pub fn progress(&self) -> f64 {
        1.0 - self.lines.len() as f64 / self.lines_in_all.max(1) as f64
    }

    /// Prompts of requests that ended lately.
    pub fn recent(&self) -> impl Iterator<Item = &[BlockId]> {
        self.recent.iter().map(Vec::as_slice)
    }

    /// One step of one running request; `false` at the end of the trace.
    pub fn step(&mut self, events: &mut Vec<Event>) -> bool {
        while self.fleet.running() < self.most_running
            && let Some(line) = self.lines.pop_front()
        {
            let request = self.request(&line);
            self.fleet.admit(request);
        }
        match self.fleet.step(&mut self.dice, events) {
            Step::Progress => true,
            Step::Ended(request) => {
                if self.recent.len() == REMEMBERED {
                    self.recent.pop_front();
                }
                self.recent.push_back(request.path[..request.prompt.min(request.done)].to_vec());
                true
            }
            Step::Idle => false,
        }
    }

    fn request(&mut self, line: &TraceLine) -> Request {
        let Self { fleet, known, dice, .. } = self;
        let full = (line.input_length / BLOCK_SIZE as usize).min(self.longest);
        let per_id = TOKENS_PER_ID / BLOCK_SIZE as usize;
        let seen = line.hash_ids.iter().rev().find_map(|id| known.get(id)).map(|&(_, rank)| rank);
        let rank = match seen {
            Some(rank) if dice.chance(AFFINE) => rank,
            _ => dice.below(fleet.ranks() as usize) as u32,
        };
        let mut path: Vec<BlockId> = Vec::with_capacity(full);
        for id in &line.hash_ids {
            let (blocks, last_seen) = known.entry(*id).or_default();
            *last_seen = rank;
            // A last id covers fewer blocks than the others, and may be met again with more.
            while blocks.len() < per_id.min(full - path.len()) {
                let parent = blocks.last().or(path.last()).copied();
                blocks.push(fleet.blocks.fresh(parent));
            }
            let count = per_id.min(full - path.len());
            path.extend_from_slice(&blocks[..count]);
        }
        let prompt = path.len();
        fleet.blocks.extend(&mut path, line.output_length / BLOCK_SIZE as usize);
        Request { rank, path, prompt, done: 0, tag: 0 }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_line_of_a_public_trace_is_read() {
        let text = r#"{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}"#;
        let line: TraceLine = serde_json::from_str(text).unwrap();
        assert_eq!(line, TraceLine { input_length: 6758, output_length: 500, hash_ids: vec![0, 1, 2] });
    }

    #[test]
    fn equal_ids_are_equal_blocks() {
        let line = |ids: &[u64]| TraceLine {
            input_length: ids.len() * TOKENS_PER_ID,
            output_length: 16,
            hash_ids: ids.to_vec(),
        };
        let mut replay = Replay::new(1, 1, 100_000, Vec::new());
        let first = replay.request(&line(&[1, 2]));
        let second = replay.request(&line(&[1, 2, 3]));
        let other = replay.request(&line(&[4]));
        assert_eq!(first.prompt, 64);
        assert_eq!(first.path[..64], second.path[..64]);
        assert_ne!(first.path[0], other.path[0]);
        assert_eq!(first.path.len(), 65);
    }
}

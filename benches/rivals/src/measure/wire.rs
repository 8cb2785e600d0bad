//! From the frames of a publisher's messages to an index that holds what they say, on one thread: decoding,
//! hashing, applying. vLLM 0.33's form: three frames, the events as maps.

use bytes::Bytes;
use dynamo_kv_router::protocols::{RouterEvent, WorkerWithDpRank};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use rankwise::block::{BlockSize, LocalBlockHash};
use rankwise::fleet::{PoolKey, Ranks, WorkerSpec};
use rankwise::ids::{Moment, RankKey, SourceId};
use rankwise::index::{HybridRule, IndexQuery, Scratch};
use rankwise::indexer::{Config, Indexer, Input, View};
use rmp::encode;

use super::{CHUNK, Spec};
use crate::contender::{Ask, Contender, Crtc, Keys, Nanos};
use crate::cpu;
use crate::samples::Findings;
use crate::workload::blocks::{BLOCK_SIZE, BlockId, Blocks, Event};
use crate::workload::questions::{self, Question};
use crate::workload::{self, Workload};

/// Events of one message. An engine step stores for several requests and evicts for them first.
const EVENTS_PER_MESSAGE: usize = 6;
/// Messages that are handed over together, as a pump drains its queue.
const MESSAGES_AT_ONCE: usize = 16;

/// A message as it comes off the socket.
struct Message {
    rank: u32,
    frames: [Bytes; 3],
}

/// Times fill and churn of this workload, from the frames on.
pub fn measure(spec: &Spec, seed: u64, findings: &mut Findings) -> Result<(), String> {
    let mut workload = spec.start(seed);
    let mut publishers = Publishers::new(spec.ranks);
    let mut takers: Vec<Box<dyn TakesFrames>> =
        vec![Box::new(Ours::new(spec.ranks)?), Box::new(Tree::new()), Box::new(Concurrent::new())];
    let mut begin = Vec::new();
    workload.begin(&mut begin);
    let mut turn = 0;
    let mut feed = |workload: &Workload, events: &[Event], costs: &mut [Nanos]| {
        let messages = publishers.publish(&workload.fleet().blocks, events);
        turn += 1;
        for nth in 0..takers.len() {
            let at = (turn + nth) % takers.len();
            costs[at] += takers[at].take(&messages);
        }
        events.iter().map(Event::blocks).sum::<usize>()
    };
    let mut costs = [0; 3];
    let mut blocks = feed(&workload, &begin, &mut costs);
    while let Some(events) = workload::next_chunk(&mut workload, CHUNK, |workload| spec.is_full(workload)) {
        blocks += feed(&workload, &events, &mut costs);
    }
    let filled = (costs, blocks);
    (costs, blocks) = ([0; 3], 0);
    while blocks < spec.churn
        && let Some(events) = workload::next_chunk(&mut workload, CHUNK, |_| false)
    {
        blocks += feed(&workload, &events, &mut costs);
    }
    for (phase, (costs, blocks)) in [("fill", filled), ("churn", (costs, blocks))] {
        for (taker, cost) in takers.iter().zip(costs) {
            let measure = format!("wire to index, {phase} (ns per block)");
            findings.add(measure, &spec.label, taker.name(), cost as f64 / blocks as f64);
        }
    }
    check(&mut takers, &mut workload, seed, &spec.label, findings);
    Ok(())
}

fn check(
    takers: &mut [Box<dyn TakesFrames>],
    workload: &mut Workload,
    seed: u64,
    label: &str,
    findings: &mut Findings,
) {
    let classes = questions::classes(workload, 100, seed);
    let mut answer = Vec::new();
    for question in classes.iter().flat_map(|class| &class.questions) {
        let truth = workload.fleet().truth(&question.path);
        for taker in &mut *takers {
            taker.answer(question, &mut answer);
            findings.check(&format!("wire to index, {label}"), taker.name(), &truth, &answer);
        }
    }
}

/// An index with everything before it.
trait TakesFrames {
    fn name(&self) -> &'static str;
    /// Takes the messages in and says what that cost.
    fn take(&mut self, messages: &[Message]) -> Nanos;
    fn answer(&mut self, question: &Question, into: &mut Vec<(u32, u32)>);
}

struct Ours {
    indexer: Indexer,
    view: View,
    sources: Vec<SourceId>,
    scratch: Scratch,
    now: u64,
}

impl Ours {
    fn new(ranks: u32) -> Result<Self, String> {
        let (mut indexer, view) = Indexer::new(Config::default());
        let block_size = BlockSize::new(BLOCK_SIZE).ok_or("no block size")?;
        let of = Ranks::range(0, ranks).map_err(|error| error.to_string())?;
        let spec = WorkerSpec::new("w", PoolKey::new("model", None), block_size, of);
        let mut actions = Vec::new();
        indexer.declare_worker(Moment(0), spec, &mut actions).map_err(|error| error.to_string())?;
        let sources: Option<Vec<SourceId>> =
            (0..ranks).map(|rank| indexer.source(&RankKey::new("w", rank))).collect();
        let sources = sources.ok_or("a rank without a stream")?;
        for &source in &sources {
            indexer.handle(Moment(0), Input::Connected { source }, &mut actions);
        }
        Ok(Self { indexer, view, sources, scratch: Scratch::default(), now: 0 })
    }
}

impl TakesFrames for Ours {
    fn name(&self) -> &'static str {
        "rankwise"
    }

    fn take(&mut self, messages: &[Message]) -> Nanos {
        let Self { indexer, sources, now, .. } = self;
        let mut actions = Vec::new();
        cpu::spent(|| {
            for messages in messages.chunks(MESSAGES_AT_ONCE) {
                *now += 1_000;
                let inputs = messages.iter().map(|message| Input::Frames {
                    source: sources[message.rank as usize],
                    frames: &message.frames,
                });
                indexer.handle_all(Moment(*now), inputs, &mut actions);
                // Nothing to carry out: there is no socket to open and no hole to fill.
                actions.clear();
            }
        })
    }

    fn answer(&mut self, question: &Question, into: &mut Vec<(u32, u32)>) {
        into.clear();
        let fleet = self.view.fleet();
        let Some(pool) = fleet.only_pool() else { return };
        let locals: Vec<LocalBlockHash> =
            question.locals.iter().map(|&local| LocalBlockHash(local)).collect();
        let query = IndexQuery { locals: &locals, sequences: &[], hybrid: HybridRule::Joint };
        pool.index.overlap(&query, &mut self.scratch);
        into.extend(pool.ranks().filter_map(|(_, rank)| {
            let overlap = self.scratch.overlap(rank.slot)?;
            Some((rank.plan.rank.dp_rank.0, overlap.device))
        }));
    }
}

/// Dynamo's decoding, as its listener does it: a batch, then each event by itself.
struct Decoder {
    normalizer: ZmqEventNormalizer,
    next_id: u64,
}

impl Decoder {
    fn new() -> Self {
        Self { normalizer: ZmqEventNormalizer::new(BLOCK_SIZE), next_id: 0 }
    }

    fn decode(&mut self, message: &Message, mut each: impl FnMut(RouterEvent)) {
        // A message that is not understood shows as wrong answers.
        let Ok(batch) = decode_event_batch(&message.frames[2]) else { return };
        let worker = WorkerWithDpRank::new(u64::from(message.rank), 0);
        for raw in batch.events {
            self.next_id += 1;
            let event = self.normalizer.normalize(raw, self.next_id, worker);
            if let Some(event) = event.and_then(|event| event.into_router_event()) {
                each(event);
            }
        }
    }
}

struct Tree {
    decoder: Decoder,
    tree: dynamo_kv_router::RadixTree,
}

impl Tree {
    fn new() -> Self {
        Self { decoder: Decoder::new(), tree: dynamo_kv_router::RadixTree::new() }
    }
}

impl TakesFrames for Tree {
    fn name(&self) -> &'static str {
        "Dynamo RadixTree"
    }

    fn take(&mut self, messages: &[Message]) -> Nanos {
        let Self { decoder, tree } = self;
        cpu::spent(|| {
            for message in messages {
                decoder.decode(message, |event| {
                    let _ = tree.apply_event(event);
                });
            }
        })
    }

    fn answer(&mut self, question: &Question, into: &mut Vec<(u32, u32)>) {
        let locals = question.locals.iter();
        let locals = locals.map(|&local| dynamo_kv_router::LocalBlockHash(local)).collect();
        crate::contender::scores(&self.tree.find_matches(locals, false), into);
    }
}

/// The tree has a thread of its own: both threads' time counts.
struct Concurrent {
    decoder: Decoder,
    tree: Crtc,
}

impl Concurrent {
    fn new() -> Self {
        Self { decoder: Decoder::new(), tree: Crtc::new() }
    }
}

impl TakesFrames for Concurrent {
    fn name(&self) -> &'static str {
        "Dynamo CRTC"
    }

    fn take(&mut self, messages: &[Message]) -> Nanos {
        let mut events = Vec::new();
        let decoding = cpu::spent(|| {
            for message in messages {
                self.decoder.decode(message, |event| events.push(event));
            }
        });
        self.tree.load_router_events(events);
        decoding + self.tree.apply()
    }

    fn answer(&mut self, question: &Question, into: &mut Vec<(u32, u32)>) {
        self.tree.pose(question, Keys::Content);
        self.tree.ask();
        self.tree.answer(into);
    }
}

/// Turns events into messages: one stream per rank, numbered from 0.
struct Publishers {
    pending: Vec<Vec<Event>>,
    next: Vec<u64>,
}

impl Publishers {
    fn new(ranks: u32) -> Self {
        Self { pending: (0..ranks).map(|_| Vec::new()).collect(), next: vec![0; ranks as usize] }
    }

    fn publish(&mut self, blocks: &Blocks, events: &[Event]) -> Vec<Message> {
        let mut messages = Vec::new();
        for event in events {
            let (Event::Stored { rank, .. } | Event::Removed { rank, .. } | Event::Cleared { rank }) = event;
            self.pending[*rank as usize].push(event.clone());
            if self.pending[*rank as usize].len() == EVENTS_PER_MESSAGE {
                messages.push(self.message(blocks, *rank));
            }
        }
        // What is asked afterwards has been said.
        for rank in 0..self.pending.len() as u32 {
            if !self.pending[rank as usize].is_empty() {
                messages.push(self.message(blocks, rank));
            }
        }
        messages
    }

    fn message(&mut self, blocks: &Blocks, rank: u32) -> Message {
        let seq = self.next[rank as usize];
        self.next[rank as usize] += 1;
        let events = std::mem::take(&mut self.pending[rank as usize]);
        let payload = Bytes::from(payload(blocks, rank, &events));
        let frames = [Bytes::from_static(b"kv-events"), Bytes::copy_from_slice(&seq.to_be_bytes()), payload];
        Message { rank, frames }
    }
}

/// A batch in msgpack. Writing to a vector cannot fail.
fn payload(blocks: &Blocks, rank: u32, events: &[Event]) -> Vec<u8> {
    let mut to = Vec::with_capacity(events.len() * 256);
    let _ = encode::write_array_len(&mut to, 3);
    let _ = encode::write_f64(&mut to, 1.75e9);
    let _ = encode::write_array_len(&mut to, events.len() as u32);
    for event in events {
        match event {
            Event::Stored { parent, blocks: stored, .. } => {
                write_stored(&mut to, blocks, rank, *parent, stored);
            }
            Event::Removed { blocks: removed, .. } => {
                let _ = encode::write_map_len(&mut to, 4);
                write_text(&mut to, "type", "BlockRemoved");
                write_names(&mut to, blocks, rank, removed);
                write_text(&mut to, "medium", "GPU");
                write_number(&mut to, "group_idx", 0);
            }
            Event::Cleared { .. } => {
                let _ = encode::write_map_len(&mut to, 1);
                write_text(&mut to, "type", "AllBlocksCleared");
            }
        }
    }
    let _ = encode::write_uint(&mut to, u64::from(rank));
    to
}

fn write_stored(to: &mut Vec<u8>, blocks: &Blocks, rank: u32, parent: Option<BlockId>, stored: &[BlockId]) {
    let _ = encode::write_map_len(to, 11);
    write_text(to, "type", "BlockStored");
    write_names(to, blocks, rank, stored);
    let _ = encode::write_str(to, "parent_block_hash");
    match parent {
        Some(parent) => drop(encode::write_uint(to, blocks.name(rank, parent))),
        None => drop(encode::write_nil(to)),
    }
    let _ = encode::write_str(to, "token_ids");
    let mut tokens = Vec::with_capacity(stored.len() * BLOCK_SIZE as usize);
    stored.iter().for_each(|&block| blocks.push_tokens(block, &mut tokens));
    let _ = encode::write_array_len(to, tokens.len() as u32);
    for token in tokens {
        let _ = encode::write_uint(to, u64::from(token));
    }
    write_number(to, "block_size", u64::from(BLOCK_SIZE));
    for absent in ["lora_id", "lora_name"] {
        let _ = encode::write_str(to, absent);
        let _ = encode::write_nil(to);
    }
    write_text(to, "medium", "GPU");
    let _ = encode::write_str(to, "extra_keys");
    let _ = encode::write_array_len(to, stored.len() as u32);
    for _ in stored {
        let _ = encode::write_nil(to);
    }
    write_number(to, "group_idx", 0);
    write_text(to, "kv_cache_spec_kind", "full_attention");
}

fn write_names(to: &mut Vec<u8>, blocks: &Blocks, rank: u32, named: &[BlockId]) {
    let _ = encode::write_str(to, "block_hashes");
    let _ = encode::write_array_len(to, named.len() as u32);
    for &block in named {
        let _ = encode::write_uint(to, blocks.name(rank, block));
    }
}

fn write_text(to: &mut Vec<u8>, key: &str, value: &str) {
    let _ = encode::write_str(to, key);
    let _ = encode::write_str(to, value);
}

fn write_number(to: &mut Vec<u8>, key: &str, value: u64) {
    let _ = encode::write_str(to, key);
    let _ = encode::write_uint(to, value);
}

//! The regression gate: what a block and a question cost in instructions, counted by valgrind's callgrind.
//!
//! `scripts/instructions.sh` builds it, runs it and ends with its exit code; `--write` makes the budget anew.
//! Needs valgrind. The program runs itself once under callgrind, which counts in functions named `counted_call`
//! alone, and compares with `benches/instructions.json`.
//!
//! Instructions, since they do not feel what else the machine does; a cache miss costs nothing here, so this
//! sees an algorithm or an inlining that went wrong, and not a layout.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rankwise::block::{Announcements, BlockHash, BlockSize, Isolation, LocalBlockHash, SequenceHash, Tier};
use rankwise::capture::CaptureScript;
use rankwise::events::{KvEvent, Limits, decode_batch, parse_live};
use rankwise::fleet::{Endpoints, EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::{DpRank, Moment, RankKey, RankSlot};
use rankwise::index::{
    GroupTag, HybridRule, IndexQuery, PrefixIndex, Reader, Scratch, StoreRequest, StoreTokens, new,
};
use rankwise::indexer::{Config, Indexer, Input};
use serde::{Deserialize, Serialize};

/// How far a measure may lie above its budget, in per cent.
///
/// The tables' seeds differ from run to run: over 12 runs of the same program no measure went beyond 0.9 % of
/// its budget. What a change costs on purpose is written into the budget, not into this.
const TOLERANCE: f64 = 3.0;

/// Runs the child instead: callgrind's part.
const COUNT: &str = "--count";
const WRITE: &str = "--write";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.iter().any(|arg| arg == COUNT) {
        count();
        return ExitCode::SUCCESS;
    }
    let found = match under_callgrind() {
        Ok(found) => found,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let now = Budget { made_with: MadeWith::here(), instructions: found };
    if args.iter().any(|arg| arg == WRITE) {
        now.save();
        println!("written: {}", budget_path().display());
    }
    match Budget::load() {
        Ok(budget) if now.holds(&budget) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{}: {error}; make it with scripts/instructions.sh --write", budget_path().display());
            ExitCode::from(2)
        }
    }
}

// === the budget ===

/// `benches/instructions.json`.
#[derive(Serialize, Deserialize)]
struct Budget {
    made_with: MadeWith,
    /// Instructions by measure.
    instructions: BTreeMap<String, f64>,
}

/// What else than the source decides the counts.
#[derive(Serialize, Deserialize, PartialEq)]
struct MadeWith {
    rustc: String,
    valgrind: String,
    arch: String,
    /// Libraries choose their loops by it.
    avx2: bool,
}

impl MadeWith {
    fn here() -> Self {
        #[cfg(target_arch = "x86_64")]
        let avx2 = std::is_x86_feature_detected!("avx2");
        #[cfg(not(target_arch = "x86_64"))]
        let avx2 = false;
        Self {
            rustc: version_of("rustc"),
            valgrind: version_of("valgrind"),
            arch: std::env::consts::ARCH.to_owned(),
            avx2,
        }
    }

    fn differences(&self, budget: &Self) -> Vec<String> {
        let avx2 = |has: bool| if has { "avx2" } else { "no avx2" }.to_owned();
        let pairs = [
            (self.rustc.clone(), budget.rustc.clone()),
            (self.valgrind.clone(), budget.valgrind.clone()),
            (self.arch.clone(), budget.arch.clone()),
            (avx2(self.avx2), avx2(budget.avx2)),
        ];
        let unequal = pairs.into_iter().filter(|(now, then)| now != then);
        unequal.map(|(now, then)| format!("the budget was made with {then}, this is {now}")).collect()
    }
}

fn version_of(tool: &str) -> String {
    let output = Command::new(tool).arg("--version").output();
    output.map_or_else(
        |_| format!("unknown {tool}"),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

fn budget_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.json")
}

impl Budget {
    fn load() -> Result<Self, String> {
        let text = fs::read_to_string(budget_path()).map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| error.to_string())
    }

    fn save(&self) {
        fs::write(budget_path(), serde_json::to_string_pretty(self).unwrap() + "\n").unwrap();
    }

    /// Prints every measure beside its budget; whether all are within it.
    fn holds(&self, budget: &Self) -> bool {
        let mut complaints = Vec::new();
        println!("{:<44} {:>10} {:>10} {:>9}", "instructions per", "budget", "now", "per cent");
        for (measure, &now) in &self.instructions {
            let Some(&allowed) = budget.instructions.get(measure) else {
                complaints.push(format!("{measure}: has no budget"));
                println!("{measure:<44} {:>10} {now:>10.1}", "-");
                continue;
            };
            let difference = (now / allowed - 1.0) * 100.0;
            println!("{measure:<44} {allowed:>10.1} {now:>10.1} {difference:>+9.2}");
            if difference > TOLERANCE {
                complaints
                    .push(format!("{measure}: {difference:+.2} % ({:+.1} instructions)", now - allowed));
            } else if difference < -TOLERANCE {
                println!("  cheaper than its budget: lower it (scripts/instructions.sh --write)");
            }
        }
        let gone = budget.instructions.keys().filter(|measure| !self.instructions.contains_key(*measure));
        complaints.extend(gone.map(|measure| format!("{measure}: has a budget and was not measured")));
        for difference in self.made_with.differences(&budget.made_with) {
            println!("note: {difference}");
        }
        if self.made_with.arch != budget.made_with.arch {
            println!("not judged: another architecture has other instructions");
            return true;
        }
        complaints
            .iter()
            .for_each(|complaint| eprintln!("over budget by more than {TOLERANCE} %: {complaint}"));
        complaints.is_empty()
    }
}

// === callgrind ===

/// Runs this program under callgrind; instructions per unit, by measure.
fn under_callgrind() -> Result<BTreeMap<String, f64>, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let out = folder.path().join("counts");
    let output = Command::new("valgrind")
        .args(["--quiet", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=*counted_call*"])
        .arg("--dump-after=*end_of_part*")
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().map_err(|error| error.to_string())?)
        .arg(COUNT)
        .output()
        .map_err(|error| {
            format!("valgrind cannot be run ({error}); install your system's package `valgrind`")
        })?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let parts = String::from_utf8_lossy(&output.stdout);
    // A tenth of an instruction is more than the seeds leave certain.
    let to_tenths = |count: f64| (count * 10.0).round() / 10.0;
    let parts = parts.lines().enumerate().map(|(at, part)| {
        let (measure, units) = part.split_once('\t').ok_or_else(|| format!("the child said {part}"))?;
        let units: f64 = units.parse().map_err(|_| format!("the child said {part}"))?;
        let counted = total(&PathBuf::from(format!("{}.{}", out.display(), at + 1)))?;
        Ok((measure.to_owned(), to_tenths(counted / units)))
    });
    parts.collect()
}

/// The instructions of one part: its file says `totals: N`.
fn total(path: &Path) -> Result<f64, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let total = text.lines().rev().find_map(|line| line.strip_prefix("totals:"));
    match total.and_then(|total| total.trim().parse().ok()) {
        None | Some(0.0) => Err("nothing was counted; were the symbols stripped?".to_owned()),
        Some(total) => Ok(total),
    }
}

/// Callgrind counts inside this function: it is found by its name.
#[inline(never)]
fn counted_call<T>(call: impl FnOnce() -> T) -> T {
    let answer = call();
    // Not a tail call, so that this function is still there when the call ends.
    black_box(());
    answer
}

/// Callgrind writes its counts down and begins anew when this is left.
#[inline(never)]
fn end_of_part() {
    black_box(());
}

fn part(measure: &str, units: usize) {
    println!("{measure}\t{units}");
    end_of_part();
}

// === what is counted ===

fn count() {
    let mut indexes: Vec<_> = (0..INDEXES).map(Filled::new).collect();
    let mut measure = |name: &str, step: fn(&mut Filled) -> usize| {
        let units = indexes.iter_mut().map(step).sum();
        part(name, units);
    };
    measure("block stored, prefill", Filled::fill);
    measure("block stored, decode", Filled::decode);
    measure("query, hit, content hashes", |index| index.hit(false));
    measure("query, hit, sequence hashes", |index| index.hit(true));
    measure("query, miss, content hashes", |index| index.miss(false));
    measure("query, miss, sequence hashes", |index| index.miss(true));
    measure("block removed", Filled::drain);
    for (engine, file) in CAPTURES {
        let script = CaptureScript::load(&captures().join(file), |_| {}).unwrap();
        let units = (0..FEEDS).map(|_| wire_to_index(engine, &script)).sum();
        part(&format!("block, wire to index, {engine}"), units);
    }
}

/// Each seeds its tables anew, and a seed has its luck: of one index, a miss costs up to 5 % more or less.
const INDEXES: u64 = 32;
/// The same for captures, where a table's luck weighs little.
const FEEDS: usize = 4;
const RANKS: usize = 64;
/// Conversations per index: two of each rank, some 30,000 blocks.
const CONVERSATIONS: usize = 128;
/// Blocks that an engine announces at once while it prefills.
const CHUNK: usize = 512;
/// Blocks that are decoded, and announced one by one.
const DECODED: usize = 24;
const TOKENS_PER_BLOCK: u32 = 16;
/// Names of one removal.
const EVICTED_AT_ONCE: usize = 64;

struct Conversation {
    rank: usize,
    /// Blocks of its system prompt, which others share.
    system: usize,
    /// Blocks of its prompt; the rest is decoded.
    prompt: usize,
    locals: Vec<LocalBlockHash>,
    sequences: Vec<SequenceHash>,
    names: Vec<BlockHash>,
}

/// An index under serving traffic: prompts behind shared system prompts, each rank with its share.
struct Filled {
    index: PrefixIndex,
    reader: Reader,
    scratch: Scratch,
    slots: Vec<RankSlot>,
    conversations: Vec<Conversation>,
}

impl Filled {
    fn new(nth: u64) -> Self {
        let (mut index, reader) = new(BlockSize::new(TOKENS_PER_BLOCK).unwrap());
        let slots = (0..RANKS).map(|_| index.write().add_rank(Announcements::Counted)).collect();
        let mut dice = Dice(0x5eed + nth);
        let systems: Vec<Vec<_>> = (0..16).map(|nth| dice.blocks(16 + nth * 7)).collect();
        let conversations = (0..CONVERSATIONS)
            .map(|nth| {
                let mut locals = systems[dice.below(systems.len())].clone();
                let system = locals.len();
                let length = 30 + dice.below(300);
                locals.extend(dice.blocks(length));
                let prompt = locals.len();
                locals.extend(dice.blocks(DECODED));
                let sequences: Vec<_> = SequenceHash::chain(&locals).collect();
                // An engine's names are its own: one to one with the sequences, and unlike them.
                let names =
                    sequences.iter().map(|hash| BlockHash::Int(hash.0.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
                Conversation { rank: nth % RANKS, system, prompt, names: names.collect(), locals, sequences }
            })
            .collect();
        Self { index, reader, scratch: Scratch::default(), slots, conversations }
    }

    fn fill(&mut self) -> usize {
        let mut blocks = 0;
        for of in &self.conversations {
            let slot = self.slots[of.rank];
            // An engine announces what it did not hold.
            self.reader.overlap(&of.question(of.prompt, false), &mut self.scratch);
            let mut at = self.scratch.overlap(slot).map_or(0, |held| held.device as usize);
            while at < of.prompt {
                let to = (at + CHUNK).min(of.prompt);
                store(&mut self.index, slot, &of.request(at, to));
                blocks += to - at;
                at = to;
            }
        }
        blocks
    }

    /// Conversations of all ranks decode at the same time, one of each rank.
    fn decode(&mut self) -> usize {
        let mut blocks = 0;
        for at_once in self.conversations.chunks(RANKS) {
            for nth in 0..DECODED {
                for of in at_once {
                    let at = of.prompt + nth;
                    store(&mut self.index, self.slots[of.rank], &of.request(at, at + 1));
                    blocks += 1;
                }
            }
        }
        blocks
    }

    fn hit(&mut self, with_sequences: bool) -> usize {
        for of in &self.conversations {
            let question = of.question(of.locals.len(), with_sequences);
            counted_call(|| self.reader.overlap(&question, &mut self.scratch));
            let found = self.scratch.overlap(self.slots[of.rank]).unwrap();
            assert_eq!(found.device as usize, of.locals.len());
        }
        self.conversations.len()
    }

    fn miss(&mut self, with_sequences: bool) -> usize {
        for of in &self.conversations {
            // A prompt that begins in the middle of another is none that anyone holds.
            let locals = &of.locals[of.system..];
            let sequences: Vec<_> = SequenceHash::chain(locals).filter(|_| with_sequences).collect();
            let question = IndexQuery { locals, sequences: &sequences, hybrid: HybridRule::Joint };
            counted_call(|| self.reader.overlap(&question, &mut self.scratch));
            assert!(self.scratch.overlaps().iter().all(|found| found.device == 0));
        }
        self.conversations.len()
    }

    /// Every rank evicts everything, the ends of its conversations first and their system prompts last.
    fn drain(&mut self) -> usize {
        let mut blocks = 0;
        for (rank, &slot) in self.slots.iter().enumerate() {
            let own: Vec<_> = self.conversations.iter().filter(|of| of.rank == rank).collect();
            let ends = own.iter().flat_map(|of| of.names[of.system..].iter().rev());
            let systems = own.iter().flat_map(|of| of.names[..of.system].iter().rev());
            let mut seen = HashSet::new();
            let names: Vec<_> = ends.chain(systems).filter(|name| seen.insert(*name)).cloned().collect();
            for names in names.chunks(EVICTED_AT_ONCE) {
                counted_call(|| self.index.write().remove(slot, Tier::Device, None, names));
                blocks += names.len();
            }
        }
        assert_eq!(self.reader.stats().distinct_blocks, 0);
        blocks
    }
}

impl Conversation {
    fn question(&self, blocks: usize, with_sequences: bool) -> IndexQuery<'_> {
        IndexQuery {
            locals: &self.locals[..blocks],
            sequences: if with_sequences { &self.sequences[..blocks] } else { &[] },
            hybrid: HybridRule::Joint,
        }
    }

    fn request(&self, from: usize, to: usize) -> StoreRequest<'_> {
        StoreRequest {
            tier: Tier::Device,
            group: GroupTag::default(),
            names: &self.names[from..to],
            parent: from.checked_sub(1).map(|before| &self.names[before]),
            tokens: StoreTokens::Locals(&self.locals[from..to]),
            block_size: TOKENS_PER_BLOCK,
            isolation: Isolation::default(),
            keys: &[],
            history_complete: true,
        }
    }
}

fn store(index: &mut PrefixIndex, slot: RankSlot, request: &StoreRequest<'_>) {
    let stored = counted_call(|| index.write().store(slot, request)).unwrap();
    assert_eq!(stored.orphans, 0);
}

/// A fixed sequence: xorshift.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.roll() % limit as u64).unwrap()
    }

    fn blocks(&mut self, count: usize) -> Vec<LocalBlockHash> {
        (0..count).map(|_| LocalBlockHash(self.roll())).collect()
    }
}

// === wire to index ===

const CAPTURES: [(&str, &str); 2] =
    [("vllm", "vllm-0.33.0-bench-dp4.kvcap.gz"), ("sglang", "sglang-0.5.23-bench-dp4.kvcap.gz")];

fn captures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures")
}

/// Frames of a recorded engine through the indexer's one door; how many blocks they stored and removed.
fn wire_to_index(engine: &str, script: &CaptureScript) -> usize {
    let (mut indexer, view) = Indexer::new(Config::default());
    let mut actions = Vec::new();
    indexer.declare_worker(Moment::default(), declaration(engine, script), &mut actions).unwrap();
    let source = |indexer: &Indexer, rank: DpRank| indexer.source(&RankKey::new("w", rank.0)).unwrap();
    for &rank in script.ranks() {
        let source = source(&indexer, rank);
        indexer.handle(Moment::default(), Input::Connected { source }, &mut actions);
    }
    let mut blocks = 0;
    for message in script.live() {
        blocks += blocks_of(&parse_live(&message.frames).unwrap().payload);
        let input = Input::Frames { source: source(&indexer, message.rank), frames: &message.frames };
        counted_call(|| indexer.handle(message.at, input, &mut actions));
        actions.clear();
    }
    assert!(view.fleet().only_pool().unwrap().index.stats().total_blocks > 0);
    blocks
}

fn declaration(engine: &str, script: &CaptureScript) -> WorkerSpec {
    let mut ranks = Ranks::single(script.ranks()[0]).unwrap();
    for &rank in &script.ranks()[1..] {
        ranks.insert(rank).unwrap();
    }
    let endpoints = script.ranks().iter().map(|rank| (*rank, format!("ipc://capture/{rank}")));
    let events =
        EventsFrom::Zmq { endpoints: Endpoints::per_rank(endpoints), replay: None, topic: String::new() };
    let block_size = script.header().block_size().unwrap();
    WorkerSpec::new("w", PoolKey::new(engine, None), block_size, ranks).events(events)
}

fn blocks_of(payload: &[u8]) -> usize {
    let batch = decode_batch(payload, &Limits::default()).unwrap();
    let blocks = batch.events.iter().map(|event| match event {
        KvEvent::Stored(stored) => stored.block_hashes.len(),
        KvEvent::Removed(removed) => removed.block_hashes.len(),
        KvEvent::Cleared(_) => 0,
    });
    blocks.sum()
}

//! Many readers beside a writer: every answer must be the index's at some moment of the query.
#![allow(clippy::unwrap_used)]

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rankwise::block::{Announcements, BlockHash, BlockSize, Isolation, LocalBlockHash, SequenceHash, Tier};
use rankwise::ids::RankSlot;
use rankwise::index::{
    self, GroupTag, HybridRule, IndexQuery, PrefixIndex, RankSettings, Reader, Scratch, StoreRequest,
    StoreTokens,
};

const BLOCK_SIZE: u32 = 16;
const DEPTH: usize = 24;
/// Past one word of a rank set, so that a set's words can be seen apart.
const RANKS: usize = 70;

/// Prompts that share beginnings, as paths of content.
fn prompts() -> Vec<Vec<LocalBlockHash>> {
    let path = |turns: [u64; 3]| {
        (0..DEPTH as u64).map(|at| LocalBlockHash(turns[at as usize / 8] * 1000 + at)).collect()
    };
    [[1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 2], [2, 1, 1], [2, 1, 2]].map(path).to_vec()
}

/// A name per content, the same on every rank but one.
fn names(prompt: &[LocalBlockHash], salt: u64) -> Vec<BlockHash> {
    SequenceHash::chain(prompt).map(|sequence| BlockHash::Int(sequence.0 ^ salt)).collect()
}

/// Its engine hashes with another seed.
const OWN_NAMES: usize = 1;

/// Its host tier takes in chunks.
const WITH_CHUNKS: usize = 65;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Store {
        rank: usize,
        tier: Tier,
        prompt: usize,
        from: usize,
        to: usize,
    },
    Remove {
        rank: usize,
        tier: Tier,
        prompt: usize,
        from: usize,
        to: usize,
    },
    /// Names of blocks that an offload took to the host; of a chunk each, where the rank has chunks.
    Placeholder {
        rank: usize,
        prompt: usize,
        at: usize,
    },
    Clear {
        rank: usize,
        tier: Option<Tier>,
    },
}

/// Few ranks get most of the events, so that queries meet runs that are being changed.
pub(crate) fn random_event(random: &mut StdRng) -> Event {
    let rank = [0, 1, 65, random.random_range(0..RANKS)][random.random_range(0..4)];
    let tier = if random.random_ratio(1, 12) { Tier::Host } else { Tier::Device };
    let prompt = random.random_range(0..6);
    let from = random.random_range(0..DEPTH);
    let to = random.random_range(from + 1..=DEPTH);
    match random.random_range(0..40) {
        0 => {
            let tier = [None, Some(Tier::Device), Some(Tier::Host)][random.random_range(0..3)];
            Event::Clear { rank, tier }
        }
        31..=33 => Event::Placeholder { rank, prompt, at: from },
        1..=12 => Event::Store { rank, tier, prompt, from: 0, to },
        13..=20 => Event::Store { rank, tier, prompt, from, to },
        21..=30 => Event::Remove { rank, tier, prompt, from, to: DEPTH },
        _ => Event::Remove { rank, tier, prompt, from, to },
    }
}

pub(crate) struct Subject {
    pub(crate) index: PrefixIndex,
    pub(crate) reader: Reader,
    pub(crate) slots: Vec<RankSlot>,
    pub(crate) prompts: Vec<Vec<LocalBlockHash>>,
    pub(crate) names: Vec<Vec<BlockHash>>,
    pub(crate) own_names: Vec<Vec<BlockHash>>,
}

impl Subject {
    pub(crate) fn new() -> Self {
        let (mut index, reader) = index::new(BlockSize::new(BLOCK_SIZE).unwrap());
        let settings = |rank: usize| RankSettings {
            host_chunk_blocks: NonZeroU32::new(3).filter(|_| rank == WITH_CHUNKS),
            ..Announcements::Set.into()
        };
        let slots = (0..RANKS).map(|rank| index.write().add_rank(settings(rank))).collect();
        let prompts = prompts();
        let of_salt = |salt: u64| prompts.iter().map(|prompt| names(prompt, salt)).collect();
        let (names, own_names) = (of_salt(0xabcd), of_salt(0x1234));
        Self { index, reader, slots, prompts, names, own_names }
    }

    fn names_of(&self, rank: usize, prompt: usize) -> &[BlockHash] {
        if rank == OWN_NAMES { &self.own_names[prompt] } else { &self.names[prompt] }
    }

    pub(crate) fn apply(&mut self, event: Event) {
        let (Event::Store { rank, prompt, .. }
        | Event::Remove { rank, prompt, .. }
        | Event::Placeholder { rank, prompt, .. }) = event
        else {
            let Event::Clear { rank, tier } = event else { return };
            let (mut section, slot) = (self.index.write(), self.slots[rank]);
            let known = match tier {
                Some(tier) => section.clear_tier(slot, tier),
                None => section.clear_rank(slot),
            };
            assert!(known);
            return;
        };
        let names = self.names_of(rank, prompt).to_vec();
        let mut section = self.index.write();
        match event {
            Event::Clear { .. } => {}
            Event::Placeholder { rank, at, .. } => {
                let request = StoreRequest {
                    tier: Tier::Host,
                    group: GroupTag::default(),
                    names: &names[at..=at],
                    parent: None,
                    tokens: StoreTokens::Ids(&[]),
                    block_size: 0,
                    isolation: Isolation::default(),
                    keys: &[],
                    history_complete: true,
                };
                section.store(self.slots[rank], &request).unwrap();
            }
            Event::Store { rank, tier, prompt, from, to } => {
                let request = StoreRequest {
                    tier,
                    group: GroupTag::default(),
                    names: &names[from..to],
                    parent: from.checked_sub(1).map(|at| &names[at]),
                    tokens: StoreTokens::Locals(&self.prompts[prompt][from..to]),
                    block_size: BLOCK_SIZE,
                    isolation: Isolation::default(),
                    keys: &[],
                    history_complete: true,
                };
                section.store(self.slots[rank], &request).unwrap();
            }
            Event::Remove { rank, tier, from, to, .. } => {
                let names: Vec<_> = names[from..to].iter().rev().cloned().collect();
                section.remove(self.slots[rank], tier, None, &names);
            }
        }
    }
}

/// Rank index, device and host reach.
pub(crate) type Answer = Vec<(u32, u32, u32)>;

pub(crate) fn ask(reader: &Reader, query: &IndexQuery<'_>, scratch: &mut Scratch) -> Answer {
    reader.overlap(query, scratch);
    let mut answer: Answer =
        scratch.overlaps().iter().map(|of| (of.slot.index, of.device, of.host)).collect();
    answer.sort_unstable();
    answer
}

/// Ends the round when its thread ends, be it by a failed comparison.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// I8: while one thread applies events one by one, every answer on other threads, by content and by sequence
/// hashes, equals that of a single-threaded index after some event between the query's start and its end.
#[test]
fn every_answer_beside_a_writer_was_true_at_some_moment() {
    let rounds = std::env::var("RANKWISE_STRESS_ROUNDS").map_or(2, |rounds| rounds.parse().unwrap());
    for seed in 0..rounds {
        let compared = stress(seed, 6_000);
        // Readers that never ran beside the writer would prove nothing.
        assert!(compared > 1_000, "only {compared} answers were compared");
    }
}

fn stress(seed: u64, events: usize) -> usize {
    let mut random = StdRng::seed_from_u64(seed);
    let history: Vec<Event> = (0..events).map(|_| random_event(&mut random)).collect();
    let expected = answers_after_each_event(&history);

    let mut subject = Subject::new();
    let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let over = AtomicBool::new(false);
    let compared = AtomicUsize::new(0);
    let (reader, prompts) = (subject.reader.clone(), subject.prompts.clone());
    thread::scope(|scope| {
        for nth in 0..3_usize {
            let (reader, prompts, expected) = (reader.clone(), &prompts, &expected);
            let (begun, ended, over, compared) = (&begun, &ended, &over, &compared);
            scope.spawn(move || {
                let _end = End(over);
                let mut scratch = Scratch::default();
                let mut at = nth;
                while !over.load(Ordering::Relaxed) {
                    at = (at + 1) % prompts.len();
                    let sequences: Vec<_> = SequenceHash::chain(&prompts[at]).collect();
                    let by_content = (compared.fetch_add(1, Ordering::Relaxed) + nth) % 2 == 0;
                    let query = IndexQuery {
                        locals: &prompts[at],
                        sequences: if by_content { &[] } else { &sequences },
                        hybrid: HybridRule::Joint,
                    };
                    let first = ended.load(Ordering::SeqCst);
                    let answer = ask(&reader, &query, &mut scratch);
                    let last = begun.load(Ordering::SeqCst);
                    assert!(
                        (first..=last).any(|version| expected[version][at] == answer),
                        "seed {seed}, prompt {at}: {answer:?} was never true after events {first}..={last}: {:?}",
                        &history_of(expected, first, last, at)
                    );
                }
            });
        }
        let _end = End(&over);
        for (nth, event) in history.iter().enumerate().take_while(|_| !over.load(Ordering::Relaxed)) {
            begun.store(nth + 1, Ordering::SeqCst);
            subject.apply(*event);
            ended.store(nth + 1, Ordering::SeqCst);
            // Two cores are shared by four threads: a writer far ahead would leave nothing to be read beside it.
            while compared.load(Ordering::Relaxed) < nth / 3 && !over.load(Ordering::Relaxed) {
                thread::yield_now();
            }
        }
    });
    compared.load(Ordering::Relaxed)
}

fn history_of(expected: &[Vec<Answer>], first: usize, last: usize, prompt: usize) -> Vec<Answer> {
    expected[first..=last].iter().map(|answers| answers[prompt].clone()).collect()
}

/// Answers to all prompts after 0, 1, 2 ... events.
fn answers_after_each_event(history: &[Event]) -> Vec<Vec<Answer>> {
    let mut subject = Subject::new();
    let mut scratch = Scratch::default();
    let mut answers = |subject: &Subject| -> Vec<Answer> {
        let hybrid = HybridRule::Joint;
        let queries = subject.prompts.iter().map(|locals| IndexQuery { locals, sequences: &[], hybrid });
        queries.map(|query| ask(&subject.reader, &query, &mut scratch)).collect()
    };
    let mut after = vec![answers(&subject)];
    for event in history {
        subject.apply(*event);
        after.push(answers(&subject));
    }
    after
}

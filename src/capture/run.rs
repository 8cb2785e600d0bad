//! Feeds a capture through the indexer's one door.
//!
//! Time is the capture's own clock. A rank with recorded replay answers has a replay endpoint, whose answers
//! come at the moment of the request; one without has none.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::check::{Contents, Outcome, RankOutcome};
use super::script::{CaptureScript, ReplayDesk};
use super::truth::Truth;
use crate::block::Announcements;
use crate::events::LEFT_OUT;
use crate::fleet::{DeclareError, Endpoints, EventsFrom, PoolKey, Ranks, WorkerSpec};
use crate::ids::{DpRank, EventSeq, Moment, RankKey, SourceId};
use crate::indexer::{Action, Config, Indexer, Input, PoolView, RankReport, View};
use crate::routing::{MmItem, Overlaps, Prompt, PromptForm};
use std::sync::Arc;

/// Why a capture cannot be fed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FeedError {
    /// The header does not say how many tokens a block has.
    #[error("the header names no block size; add `block_size` to the capture's first line")]
    NoBlockSize,
    /// The header's ranks cannot be declared.
    #[error("the capture's ranks cannot be declared: {0}")]
    Declare(#[from] DeclareError),
}

/// A capture on its way into an index of its own.
#[derive(Debug)]
pub struct Feed<'a> {
    script: &'a CaptureScript,
    desk: ReplayDesk<'a>,
    indexer: Indexer,
    view: View,
    worker: String,
    sources: BTreeMap<DpRank, SourceId>,
    ranks: BTreeMap<SourceId, DpRank>,
    actions: Vec<Action>,
    next: usize,
}

impl<'a> Feed<'a> {
    /// Declares one worker, named `worker`, with the capture's ranks, and connects them.
    ///
    /// # Errors
    ///
    /// When the capture's header cannot be declared as a worker.
    pub fn new(
        script: &'a CaptureScript,
        worker: &str,
        announcements: Announcements,
        config: Config,
    ) -> Result<Self, FeedError> {
        let (indexer, view) = Indexer::new(config);
        let mut feed = Self {
            script,
            desk: ReplayDesk::new(script.replies()),
            indexer,
            view,
            worker: worker.to_owned(),
            sources: BTreeMap::new(),
            ranks: BTreeMap::new(),
            actions: Vec::new(),
            next: 0,
        };
        feed.declare(announcements)?;
        feed.connect();
        Ok(feed)
    }

    fn declare(&mut self, announcements: Announcements) -> Result<(), FeedError> {
        let header = self.script.header();
        let block_size = header.block_size().ok_or(FeedError::NoBlockSize)?;
        let pool = PoolKey::new(header.engine(), None);
        let mut spec = WorkerSpec::new(self.worker.as_str(), pool, block_size, ranks(self.script)?)
            .events(self.endpoints());
        spec.announcements = announcements;
        let mut actions = Vec::new();
        self.indexer.declare_worker(Moment::default(), spec, &mut actions)?;
        for &rank in self.script.ranks() {
            let key = RankKey::new(self.worker.as_str(), rank.0);
            if let Some(source) = self.indexer.source(&key) {
                self.sources.insert(rank, source);
                self.ranks.insert(source, rank);
            }
        }
        Ok(())
    }

    /// Nobody dials these: they say which ranks have a replay endpoint.
    fn endpoints(&self) -> EventsFrom {
        let at = |kind: &str, rank: DpRank| (rank, format!("ipc://capture/{kind}/{rank}"));
        let replies = self.script.replies();
        let events = Endpoints::per_rank(self.script.ranks().iter().map(|rank| at("events", *rank)));
        let with_replay: Vec<_> = replies.ranks().map(|rank| at("replay", rank)).collect();
        let replay = (!with_replay.is_empty()).then(|| Endpoints::per_rank(with_replay));
        EventsFrom::Zmq { endpoints: events, replay, topic: String::new() }
    }

    fn connect(&mut self) {
        let sources: Vec<SourceId> = self.ranks.keys().copied().collect();
        for source in sources {
            self.indexer.handle(Moment::default(), Input::Connected { source }, &mut self.actions);
            self.follow(Moment::default());
        }
    }

    /// Feeds the next message; `false` when there is none.
    pub fn step(&mut self) -> bool {
        let Some(message) = self.script.live().get(self.next) else { return false };
        self.next += 1;
        let Some(&source) = self.sources.get(&message.rank) else { return true };
        self.desk.live(message);
        if self.indexer.next_deadline().is_some_and(|at| at <= message.at) {
            self.indexer.handle(message.at, Input::Tick, &mut self.actions);
            self.follow(message.at);
        }
        let input = Input::Frames { source, frames: &message.frames };
        self.indexer.handle(message.at, input, &mut self.actions);
        self.follow(message.at);
        true
    }

    /// Feeds everything that is left.
    pub fn run(&mut self) {
        while self.step() {}
    }

    /// Answers requests for history until none is left.
    fn follow(&mut self, now: Moment) {
        while !self.actions.is_empty() {
            for action in std::mem::take(&mut self.actions) {
                let Action::AskReplay { source, request, from, .. } = action else { continue };
                let Some(&rank) = self.ranks.get(&source) else { continue };
                let Some(answers) = self.desk.ask(rank, from) else { continue };
                for (seq, payload) in answers {
                    let frames = answer(seq, payload.clone());
                    let input = Input::Replay { source, request, frames: &frames };
                    self.indexer.handle(now, input, &mut self.actions);
                }
                let frames = answer(EventSeq::END_MARK, Bytes::new());
                self.indexer.handle(
                    now,
                    Input::Replay { source, request, frames: &frames },
                    &mut self.actions,
                );
            }
        }
    }

    /// The reader's handle.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The pool that the capture fills.
    pub fn pool(&self) -> Option<Arc<PoolView>> {
        self.view.fleet().only_pool().cloned()
    }

    /// Messages fed so far.
    pub fn fed(&self) -> usize {
        self.next
    }

    /// What the capture left behind, with the answers to the truth's probes.
    pub fn outcome(&self, file: &str, truth: Option<&Truth>) -> Outcome {
        let header = self.script.header();
        let mut outcome = Outcome {
            file: file.to_owned(),
            engine: header.engine().to_owned(),
            engine_version: header.engine_version().to_owned(),
            worker: self.worker.clone(),
            ..Outcome::default()
        };
        let Some(pool) = self.pool() else { return outcome };
        let mut overlaps = Overlaps::default();
        for (nth, probe) in truth.iter().flat_map(|truth| truth.probes.iter().enumerate()) {
            let query = probe.query();
            let mm: Vec<MmItem<'_>> = query
                .mm
                .iter()
                .map(|item| MmItem {
                    identifier: &item.identifier,
                    offset: item.offset.into(),
                    length: item.length.into(),
                })
                .collect();
            let prompt = Prompt {
                form: PromptForm::Tokens { ids: query.tokens, eagle: false },
                lora_name: query.lora_name,
                lora_id: None,
                cache_salt: query.cache_salt,
                mm: &mm,
                keys: &[],
            };
            overlaps.find(&pool, &prompt, Default::default());
            for (_, rank) in pool.ranks() {
                let blocks = overlaps.of(rank.slot).map_or(0, |overlap| overlap.device);
                outcome.probes.insert((nth, rank.plan.rank.dp_rank), blocks);
            }
        }
        let mut total = RankReport::default();
        for (_, rank) in pool.ranks() {
            let mut contents = Contents::default();
            for layer in pool.index.contents(rank.slot) {
                for (hash, copies) in layer.names {
                    contents.insert(
                        layer.tier,
                        layer.group_idx,
                        hash,
                        u32::try_from(copies).unwrap_or(u32::MAX),
                    );
                }
            }
            outcome
                .ranks
                .insert(rank.plan.rank.dp_rank, RankOutcome { trust: rank.status.trust(), contents });
            total.add(&rank.status.report());
        }
        outcome.counters = counters(&total);
        outcome
    }
}

/// The names that the field cases use.
fn counters(total: &RankReport) -> BTreeMap<String, u64> {
    let content = &total.content;
    let mut counters: BTreeMap<String, u64> = [
        ("gaps", total.stream.gaps),
        ("lost_batches", total.stream.lost_batches),
        ("duplicate_batches", total.stream.duplicate_batches),
        ("malformed_messages", content.malformed_messages),
        ("skipped_events", content.skipped.total()),
        ("orphan_blocks", content.orphan_blocks),
        ("unknown_removals", content.unknown_removals),
        ("rank_mismatch", content.rank_mismatch),
        ("out_of_range", 0),
        ("refused_load_entries", 0),
        ("restarts", total.stream.restarts()),
        ("stored_blocks", content.stored_blocks),
        ("removed_blocks", content.removed_blocks),
    ]
    .into_iter()
    .map(|(name, count)| (name.to_owned(), count))
    .collect();
    for reason in LEFT_OUT {
        let count = content.skipped.get(reason);
        if count > 0 {
            counters.insert(format!("skipped_{}", reason.name()), count.into());
        }
    }
    counters
}

fn ranks(script: &CaptureScript) -> Result<Ranks, DeclareError> {
    let mut ranks = script.ranks().iter().copied();
    let mut declared = Ranks::single(ranks.next().unwrap_or(DpRank(0)))?;
    for rank in ranks {
        declared.insert(rank)?;
    }
    Ok(declared)
}

/// An answer as a DEALER receives it.
fn answer(seq: EventSeq, payload: Bytes) -> [Bytes; 4] {
    [Bytes::new(), Bytes::new(), Bytes::copy_from_slice(&seq.0.to_be_bytes()), payload]
}

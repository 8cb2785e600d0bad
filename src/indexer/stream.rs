//! One rank's stream: frames in, steps of its order, events into the index.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::adapters::LearntAdapters;
use super::content::{self, Part};
use super::tiers::Tiers;
use super::view::{ContentCounters, RankReport, RankStatus};
use crate::block::{AttentionKind, BlockHash, ContentKeys, Isolation, Tier};
use crate::events::order::{Batch, Notice, Step};
use crate::events::{
    BlockRemoved, BlockStored, DecodeError, EventBatch, EventTokens, KvEvent, Limits, ReplayMessage,
    Sequencer, decode_batch_fast, parse_live, parse_replay, peek_ts,
};
use crate::fleet::{PoolKey, RankPlan};
use crate::ids::{Moment, RankSlot};
use crate::index::{GroupTag, Leads, StoreRefusal, StoreRequest, StoreTokens, Stored, WriteSection};
use crate::trust::{Effect, Reason, ReasonCounts, Reasons, Trust};

/// `hash(())` of 64-bit CPython from 3.8 on: what SGLang before 0.5.6 names as the parent of a first page.
const UNCHAINED_ROOT: BlockHash = BlockHash::Int(5_740_354_900_026_072_187);

/// The names by which an event finds its place.
fn leads(event: &KvEvent) -> Leads<'_> {
    match event {
        KvEvent::Stored(stored) => {
            Leads { parent: stored.parent_block_hash.as_ref(), names: &stored.block_hashes }
        }
        KvEvent::Removed(removed) => Leads { parent: None, names: &removed.block_hashes },
        KvEvent::Cleared(_) => Leads::default(),
    }
}

/// A connection that keeps failing for one cause is said this often.
const SAY_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// One declared rank.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) plan: RankPlan,
    pub(super) pool: PoolKey,
    pub(super) slot: RankSlot,
    pub(super) status: Arc<RankStatus>,
    pub(super) sequencer: Sequencer,
    connected: bool,
    counters: ContentCounters,
    /// What the content of batches gave reason to doubt since the rank was last known to be empty.
    content_reasons: Reasons,
    given: ReasonCounts,
    announced_block_size: Option<u32>,
    /// Its pool's.
    adapters: Arc<LearntAdapters>,
    pub(super) tiers: Tiers,
    /// Whether the worker is declared to have an EAGLE drafter.
    pub(super) declared_eagle: Option<bool>,
    /// Attempts to connect that failed since the last connection.
    failed_attempts: u64,
    said_unreachable: Option<Moment>,
}

/// Buffers that outlive a message.
#[derive(Default, Debug)]
pub(super) struct Buffers {
    pub(super) steps: Vec<Step>,
    batch: EventBatch,
    content: ContentBuffers,
}

/// What a store's content is put together in.
#[derive(Default, Debug)]
struct ContentBuffers {
    keys: Vec<ContentKeys>,
    windows: Vec<u32>,
}

impl Stream {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        plan: RankPlan,
        pool: PoolKey,
        slot: RankSlot,
        status: Arc<RankStatus>,
        sequencer: Sequencer,
        adapters: Arc<LearntAdapters>,
        tiers: Tiers,
    ) -> Self {
        Self {
            plan,
            pool,
            slot,
            status,
            sequencer,
            connected: false,
            counters: ContentCounters::default(),
            content_reasons: Reasons::NONE,
            given: ReasonCounts::default(),
            announced_block_size: None,
            adapters,
            tiers,
            declared_eagle: None,
            failed_attempts: 0,
            said_unreachable: None,
        }
    }

    /// Something of a batch could not be applied. Said once per rank and reason, and counted.
    fn give(&mut self, reason: Reason, times: u32) {
        self.given.add(reason, times);
        if self.content_reasons.insert(reason) {
            let rank = &self.plan.rank;
            tracing::warn!(
                worker = %rank.worker,
                dp_rank = rank.dp_rank.0,
                reason = reason.name(),
                times = self.given.get(reason),
                "{rank}: the view can no longer be believed to the letter: {}",
                reason.name(),
            );
        }
    }

    /// The rank is empty, or its process is another: what was lost before no longer matters.
    pub(super) fn lift_content_reasons(&mut self) {
        self.content_reasons = self.content_reasons.without(Reasons::lifted_by_clear());
        self.tiers.emptied();
    }

    pub(super) fn on_connected(&mut self, now: Moment, steps: &mut Vec<Step>) {
        self.connected = true;
        self.failed_attempts = 0;
        self.said_unreachable = None;
        self.status.clear_last_error();
        self.sequencer.on_connected(now, steps);
    }

    pub(super) fn on_disconnected(&mut self, now: Moment, steps: &mut Vec<Step>) {
        self.connected = false;
        self.sequencer.on_disconnected(now, steps);
    }

    /// An attempt to connect failed. Its cause is kept for whoever asks, and said when it is another one, or
    /// after a while again.
    pub(super) fn on_unreachable(&mut self, now: Moment, why: &str) {
        self.connected = false;
        self.sequencer.on_unreachable(now);
        self.failed_attempts += 1;
        let changed = self.status.set_last_error(why);
        if changed || self.said_unreachable.is_none_or(|at| now >= at + SAY_AGAIN_AFTER) {
            self.said_unreachable = Some(now);
            let rank = &self.plan.rank;
            tracing::warn!(
                worker = %rank.worker,
                dp_rank = rank.dp_rank.0,
                endpoint = self.plan.events.as_ref().map(|endpoint| endpoint.address()),
                attempts = self.failed_attempts,
                "{rank}: no event connection: {why}",
            );
        }
    }

    /// A message was dropped for its size before it came here.
    pub(super) fn on_too_large(&mut self) {
        self.counters.malformed_messages += 1;
        self.give(Reason::TooLarge, 1);
    }

    /// Writes to the log what happened to the stream's order.
    pub(super) fn say(&self, notice: Notice) {
        let rank = &self.plan.rank;
        let (worker, dp_rank) = (&rank.worker, rank.dp_rank.0);
        match notice {
            Notice::Restarted(rule) => {
                tracing::info!(%worker, dp_rank, rule = ?rule, "{rank}: the engine has restarted; its old blocks are forgotten");
            }
            Notice::Repaired { from, to } => {
                tracing::info!(%worker, dp_rank, from = from.0, to = to.0, "{rank}: missing batches were brought by a replay");
            }
            Notice::Lost { from, to } => {
                tracing::info!(%worker, dp_rank, from = from.0, to = to.0, "{rank}: batches are lost");
            }
            Notice::LivePathDeaf { highest } => {
                tracing::warn!(
                    %worker,
                    dp_rank,
                    highest = highest.0,
                    "{rank}: the engine has published what the event connection did not bring; it is made anew",
                );
            }
            Notice::NoBuffer => {
                tracing::info!(%worker, dp_rank, "{rank}: the replay endpoint keeps no history");
            }
        }
    }

    pub(super) fn on_frames(&mut self, now: Moment, frames: &[Bytes], steps: &mut Vec<Step>) {
        let Ok(message) = parse_live(frames) else { return self.badly_framed() };
        if !self.is_our_topic(&message.topic) {
            return;
        }
        self.connected = true;
        let ts = peek_ts(&message.payload);
        self.sequencer.on_live(now, message.seq, ts, &message.payload, steps);
    }

    pub(super) fn on_replay(
        &mut self,
        now: Moment,
        request: crate::events::order::ReplayId,
        frames: &[Bytes],
        steps: &mut Vec<Step>,
    ) {
        match parse_replay(frames) {
            Ok(ReplayMessage::Batch { topic, seq, payload }) => {
                if topic.is_none_or(|topic| self.is_our_topic(&topic)) {
                    let ts = peek_ts(&payload);
                    self.sequencer.on_replay_batch(now, request, seq, ts, &payload, steps);
                }
            }
            Ok(ReplayMessage::End) => self.sequencer.on_replay_end(now, request, steps),
            Err(_) => self.badly_framed(),
        }
    }

    fn badly_framed(&mut self) {
        self.counters.malformed_messages += 1;
        self.give(Reason::BadFraming, 1);
    }

    /// Topics are compared whole: ZMQ's own filter is by prefix, so `kv` also brings `kv2`. Where none is
    /// configured any will do. What comes under another one is not ours, and said: it may be an engine whose
    /// topic is not the configured one.
    fn is_our_topic(&mut self, topic: &[u8]) -> bool {
        let ours = self.plan.topic.is_empty() || topic == self.plan.topic.as_bytes();
        if !ours {
            self.counters.other_topic += 1;
            self.give(Reason::OtherTopic, 1);
        }
        ours
    }

    /// What the device held is gone with the engine's sleep, and no event says so.
    pub(super) fn on_slept(&mut self, section: &mut WriteSection<'_>) {
        self.counters.clears += 1;
        section.clear_tier(self.slot, Tier::Device);
    }

    /// Applies one batch: what cannot be used is counted and does not stop the rest.
    pub(super) fn apply(
        &mut self,
        batch: &Batch,
        limits: &Limits,
        section: &mut WriteSection<'_>,
        batch_buffer: &mut BatchBuffers<'_>,
    ) {
        let BatchBuffers { decoded, content } = batch_buffer;
        if let Err(error) = decode_batch_fast(&batch.payload, limits, decoded) {
            self.counters.malformed_messages += 1;
            return self.give(lost_by(error), 1);
        }
        if decoded.dp_rank.is_some_and(|rank| rank != i64::from(self.plan.rank.dp_rank.0)) {
            self.counters.rank_mismatch += 1;
        }
        self.counters.skipped.merge(&decoded.skipped);
        section.apply_each(&decoded.events, leads, |section, event| match event {
            KvEvent::Stored(stored) => self.store(stored, section, content),
            KvEvent::Removed(removed) => self.remove(removed, section),
            KvEvent::Cleared(medium) => {
                self.counters.clears += 1;
                if self.tiers.clear(*medium, self.slot, section) {
                    self.sequencer.on_cleared(batch.seq);
                    self.lift_content_reasons();
                } else if self.tiers.without_removals().is_empty() {
                    self.content_reasons.remove(Reason::NoRemovals);
                }
            }
        });
        // After the events: where in the batch they stood is not known, and a clear may have come before them.
        for (reason, times) in decoded.skipped.iter() {
            self.give(reason, times);
        }
    }

    fn store(&mut self, event: &BlockStored, section: &mut WriteSection<'_>, buffers: &mut ContentBuffers) {
        let ContentBuffers { keys, windows } = buffers;
        let isolation = content::identity(event, keys);
        // The groups of a hybrid model may differ: what the pool fixes is the full-attention one's.
        if event.tier == Tier::Device && event.attention.is_none_or(|kind| kind == AttentionKind::Full) {
            self.announced_block_size = Some(event.block_size);
        }
        if event.parent_block_hash == Some(UNCHAINED_ROOT) {
            self.counters.unchained_stores += 1;
            self.give(Reason::UnchainedHashes, 1);
        }
        self.note_form(event);
        content::in_parts(event, keys, windows, |part| self.store_part(event, part, isolation, section));
    }

    /// Which form the tokens come in is learnt from the stream; a declaration that differs is said.
    fn note_form(&mut self, event: &BlockStored) {
        let windows = match &event.tokens {
            EventTokens::Ids(ids) if ids.is_empty() => return,
            EventTokens::Ids(_) => !event.lookahead.is_empty(),
            EventTokens::Pairs(_) => true,
            EventTokens::Unusable => return,
        };
        if self.declared_eagle.is_some_and(|declared| declared != windows) {
            self.give(Reason::EagleDiffers, 1);
        }
        if event.lookahead.iter().any(|behind| behind.len() > 1) {
            self.give(Reason::UnusableTokens, 1);
        }
    }

    fn store_part(
        &mut self,
        event: &BlockStored,
        part: &Part<'_>,
        isolation: Isolation,
        section: &mut WriteSection<'_>,
    ) {
        let request = StoreRequest {
            tier: event.tier,
            group: GroupTag { idx: event.group_idx, kind: event.attention },
            names: part.names,
            parent: part.parent,
            tokens: part.tokens,
            block_size: event.block_size,
            isolation,
            keys: part.keys,
            history_complete: event.tier == Tier::Device
                || part.parent.is_some()
                || !self.reasons().may_miss(),
        };
        match section.store(self.slot, &request) {
            Ok(stored) => {
                if let Some(name) = &event.lora_name {
                    self.adapters.learn(name);
                }
                let blocks = part.names.len() as u64;
                self.counters.stored_blocks += blocks;
                self.counters.orphan_blocks += stored.orphans;
                self.counters.orphans_dropped += stored.orphans_dropped;
                self.counters.contradicted_names += stored.contradicted;
                if event.tier == Tier::Other {
                    self.counters.other_medium_blocks += blocks;
                }
                for (reason, times) in doubts(&stored, &part.tokens) {
                    self.give(reason, u32::try_from(times).unwrap_or(u32::MAX));
                }
                if event.tier != Tier::Device && self.tiers.took_in(event.tier, self.slot, section) {
                    self.give(Reason::NoRemovals, 1);
                }
            }
            Err(refusal) => {
                if let Some(reason) = skip_reason(refusal) {
                    self.counters.skipped.add(reason, 1);
                    self.give(reason, 1);
                }
            }
        }
    }

    fn remove(&mut self, event: &BlockRemoved, section: &mut WriteSection<'_>) {
        let removed = section.remove(self.slot, event.tier, event.group_idx, &event.block_hashes);
        self.counters.removed_blocks += event.block_hashes.len() as u64 - removed.unknown;
        self.counters.unknown_removals += removed.unknown;
        let gave_back = removed.unknown < event.block_hashes.len() as u64;
        if gave_back && self.tiers.gave_back(event.tier) {
            self.content_reasons.remove(Reason::NoRemovals);
        }
    }

    /// What stands against believing the rank's view.
    fn reasons(&self) -> Reasons {
        if !self.plan.publishes {
            return Reasons::from_iter([Reason::PublishesNothing]);
        }
        self.sequencer.reasons().union(self.content_reasons)
    }

    /// Lets readers see what has changed.
    pub(super) fn publish(&self) {
        let reasons = self.reasons();
        let before = self.status.reasons();
        if reasons != before {
            self.say_change(before, reasons);
        }
        let report = RankReport {
            connected: self.connected,
            stream: *self.sequencer.counters(),
            watermark: self.sequencer.watermark(),
            held_batches: self.sequencer.held_batches() as u64,
            held_bytes: self.sequencer.held_bytes() as u64,
            announced_block_size: self.announced_block_size,
            content: self.counters,
            given: self.given,
            without_removals: self.tiers.without_removals(),
        };
        self.status.publish(reasons, self.sequencer.last_heard(), report);
    }
}

impl Stream {
    fn say_change(&self, before: Reasons, after: Reasons) {
        let rank = &self.plan.rank;
        // What batches gave was said with its batch.
        for reason in
            after.without(before).without(self.content_reasons).iter().filter(|&reason| alarms(reason))
        {
            tracing::warn!(
                worker = %rank.worker,
                dp_rank = rank.dp_rank.0,
                reason = reason.name(),
                "{rank}: the view can no longer be believed: {}",
                reason.name(),
            );
        }
        let (was, is) = (before.trust(), after.trust());
        if was == is {
            return;
        }
        tracing::info!(
            worker = %rank.worker,
            dp_rank = rank.dp_rank.0,
            reasons = ?after,
            may_err = ?is.may_err(),
            "{rank}: {was} -> {is}",
        );
    }
}

/// Whether a reason that the stream's order gives is worth a warning: states that pass and ways to be set up are not.
fn alarms(reason: Reason) -> bool {
    matches!(reason.effect(), Effect::State(Trust::Silent | Trust::Partial(_))) && reason != Reason::NoHistory
}

/// The parts of [`Buffers`] that applying a batch needs.
pub(super) struct BatchBuffers<'a> {
    decoded: &'a mut EventBatch,
    content: &'a mut ContentBuffers,
}

impl Buffers {
    pub(super) fn split(&mut self) -> (&mut Vec<Step>, BatchBuffers<'_>) {
        (&mut self.steps, BatchBuffers { decoded: &mut self.batch, content: &mut self.content })
    }
}

/// A batch that was not looked into for its size, or could not be read.
fn lost_by(error: DecodeError) -> Reason {
    match error {
        DecodeError::PayloadTooLarge { .. } | DecodeError::TooManyEvents { .. } => Reason::TooLarge,
        _ => Reason::Undecodable,
    }
}

fn skip_reason(refusal: StoreRefusal) -> Option<Reason> {
    match refusal {
        StoreRefusal::TokenMismatch => Some(Reason::TokenMismatch),
        StoreRefusal::BlockSizeMismatch => Some(Reason::BlockSizeMismatch),
        StoreRefusal::SelfParent => Some(Reason::SelfParent),
        StoreRefusal::TooManyGroups => Some(Reason::TooManyGroups),
        StoreRefusal::RankFull => Some(Reason::RankFull),
        // The stream goes before its slot does.
        StoreRefusal::UnknownRank => None,
    }
}

/// What a store that was taken in gives reason to doubt, and how often. A placeholder that names nothing known
/// can only miss in its own tier, and gives none.
fn doubts(stored: &Stored, tokens: &StoreTokens<'_>) -> impl Iterator<Item = (Reason, u64)> {
    let unusable = if matches!(tokens, StoreTokens::Unusable) { stored.nameless } else { 0 };
    [
        (Reason::OrphansDropped, stored.orphans_dropped),
        (Reason::ContradictedName, stored.device_contradicted),
        (Reason::UnusableTokens, unusable),
    ]
    .into_iter()
    .filter(|(_, times)| *times > 0)
}

//! A capture as input: the live messages in their order, what its replay endpoints can answer, and the plan
//! for publishing it again.
//!
//! **Lives.** A publisher that restarts counts from 0 again, so a number means something only within one
//! life of its rank. A message begins a new life when its number was passed already and its payload is not
//! the one that had the number. A recorded replay answer whose number had another payload in this life
//! belongs to the next.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use bytes::Bytes;

use super::error::CaptureError;
use super::format::{CaptureHeader, CaptureLine, Direction, LineBody, ReplaySocket, numbered};
use super::reader::{CaptureReader, Progress};
use crate::ids::{DpRank, EventSeq, Moment};

/// Bytes of frames that a script keeps unless told otherwise: 300 times the longest capture that exists.
pub const DEFAULT_MAX_BYTES: u64 = 1 << 30;

/// One message of a rank's publisher, as it was received.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LiveMessage {
    /// When, since the recorder had started.
    pub at: Moment,
    /// The global rank whose socket it came from.
    pub rank: DpRank,
    /// Its frames: topic, number, payload.
    pub frames: Vec<Bytes>,
    /// How many times the rank's publisher had restarted before it.
    pub life: u32,
}

/// A whole capture in memory.
#[derive(Clone, Debug)]
pub struct CaptureScript {
    header: CaptureHeader,
    ranks: Vec<DpRank>,
    live: Vec<LiveMessage>,
    replies: ReplayBook,
}

impl CaptureScript {
    /// Reads a whole capture of at most [`DEFAULT_MAX_BYTES`], telling `progress` after every line.
    ///
    /// # Errors
    /// Those of [`CaptureReader`], and [`CaptureError::TooLarge`].
    pub fn load(path: &Path, progress: impl FnMut(Progress)) -> Result<Self, CaptureError> {
        Self::read(CaptureReader::open(path)?, DEFAULT_MAX_BYTES, progress)
    }

    /// Reads the rest of a capture, keeping at most `max_bytes` of frames.
    ///
    /// # Errors
    /// Those of [`CaptureReader`], and [`CaptureError::TooLarge`].
    pub fn read(
        mut reader: CaptureReader,
        max_bytes: u64,
        mut progress: impl FnMut(Progress),
    ) -> Result<Self, CaptureError> {
        let mut builder = ScriptBuilder::new(reader.header().clone());
        let mut bytes = 0;
        while let Some(line) = reader.next() {
            let line = line?;
            bytes += line.frame_bytes();
            if bytes > max_bytes {
                let path = reader.path().to_owned();
                return Err(CaptureError::TooLarge { path, line: reader.line(), limit: max_bytes });
            }
            builder.push(line);
            progress(reader.progress());
        }
        Ok(builder.finish())
    }

    /// A script of lines that are in memory already.
    pub fn from_lines(header: CaptureHeader, lines: impl IntoIterator<Item = CaptureLine>) -> Self {
        let mut builder = ScriptBuilder::new(header);
        lines.into_iter().for_each(|line| builder.push(line));
        builder.finish()
    }

    /// The capture's first line.
    pub fn header(&self) -> &CaptureHeader {
        &self.header
    }

    /// The ranks that the header names and those that were heard, ascending.
    pub fn ranks(&self) -> &[DpRank] {
        &self.ranks
    }

    /// All live messages, in the order in which they were received.
    pub fn live(&self) -> &[LiveMessage] {
        &self.live
    }

    /// What was recorded of the replay endpoints.
    pub fn replies(&self) -> &ReplayBook {
        &self.replies
    }

    /// The plan for publishing the capture again.
    pub fn publish_plan(&self) -> PublishPlan {
        PublishPlan { ranks: self.ranks.iter().map(|&rank| RankPlan::new(self, rank)).collect() }
    }
}

/// The replay answers that a capture holds, per rank and life, merged by number over all that were recorded.
#[derive(Clone, Debug, Default)]
pub struct ReplayBook {
    ranks: BTreeMap<DpRank, RecordedReplies>,
}

#[derive(Clone, Debug, Default)]
struct RecordedReplies {
    /// Per life of the rank: number to payload.
    lives: Vec<BTreeMap<EventSeq, Bytes>>,
    framing: Option<ReplayFraming>,
}

impl ReplayBook {
    /// Whether the rank has a replay endpoint: whether any answer of it was recorded, an end mark included.
    pub fn has_replay(&self, rank: DpRank) -> bool {
        self.ranks.contains_key(&rank)
    }

    /// The ranks with a replay endpoint, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = DpRank> + '_ {
        self.ranks.keys().copied()
    }

    /// How the rank's answers are framed; `None` if none with data was recorded.
    pub fn framing(&self, rank: DpRank) -> Option<ReplayFraming> {
        self.ranks.get(&rank)?.framing
    }

    /// The recorded batches of one life of a rank with numbers from `from` on, ascending.
    pub fn answers_from(
        &self,
        rank: DpRank,
        life: u32,
        from: EventSeq,
    ) -> impl Iterator<Item = (EventSeq, &Bytes)> + '_ {
        self.life(rank, life)
            .into_iter()
            .flat_map(move |answers| answers.range(from..))
            .map(|(&seq, payload)| (seq, payload))
    }

    fn life(&self, rank: DpRank, life: u32) -> Option<&BTreeMap<EventSeq, Bytes>> {
        self.ranks.get(&rank)?.lives.get(life as usize)
    }
}

/// How a replay endpoint frames its answers, behind the delimiter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplayFraming {
    /// Topic, number, payload; the end mark is an empty topic, −1, nothing.
    WithTopic,
    /// Number, payload; the end mark is −1, nothing.
    Plain,
}

/// The replay endpoints of a capture while it is being fed to an index: keeps what was asked.
///
/// The request at first connect gets nothing but an end mark, since the recorder was there from the start;
/// later ones get what was recorded of the rank's present life.
#[derive(Debug)]
pub struct ReplayDesk<'a> {
    book: &'a ReplayBook,
    /// Per rank: its present life.
    lives: HashMap<DpRank, u32>,
    asked: HashMap<DpRank, u64>,
}

impl<'a> ReplayDesk<'a> {
    /// The endpoints before the first message.
    pub fn new(book: &'a ReplayBook) -> Self {
        Self { book, lives: HashMap::new(), asked: HashMap::new() }
    }

    /// A live message is about to be fed.
    pub fn live(&mut self, message: &LiveMessage) {
        self.lives.insert(message.rank, message.life);
    }

    /// The batches that answer a request, to be followed by the end mark; `None` if the rank has no replay
    /// endpoint.
    pub fn ask(
        &mut self,
        rank: DpRank,
        from: EventSeq,
    ) -> Option<impl Iterator<Item = (EventSeq, &'a Bytes)> + use<'a>> {
        if !self.book.has_replay(rank) {
            return None;
        }
        let asked = self.asked.entry(rank).or_insert(0);
        *asked += 1;
        let from = if *asked == 1 { EventSeq::END_MARK } else { from };
        Some(self.book.answers_from(rank, self.lives.get(&rank).copied().unwrap_or(0), from))
    }

    /// How many requests a rank's endpoint has had.
    pub fn asked(&self, rank: DpRank) -> u64 {
        self.asked.get(&rank).copied().unwrap_or(0)
    }
}

/// How to send a capture out again on real ports, one per rank.
#[derive(Clone, Debug)]
pub struct PublishPlan {
    /// One plan per rank, ascending.
    pub ranks: Vec<RankPlan>,
}

/// How to send one rank's stream out again.
#[derive(Clone, Debug)]
pub struct RankPlan {
    /// The global rank.
    pub rank: DpRank,
    /// What to do, in order.
    pub steps: Vec<PublishStep>,
    /// Whether the capture holds replay answers of the rank.
    pub has_replay: bool,
    /// How its answers were framed; `None` if none was recorded.
    pub framing: Option<ReplayFraming>,
    /// Recorded answers by life.
    recorded: Vec<BTreeMap<EventSeq, Bytes>>,
}

/// One thing to do for a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PublishStep {
    /// Send a message with these frames, as recorded.
    Publish {
        /// When, on the capture's clock.
        at: Moment,
        /// Topic, number, payload.
        frames: Vec<Bytes>,
        /// How many restarts lie before it.
        life: u32,
    },
    /// The publisher restarted: close both sockets, bind them again, forget what was sent.
    Restart {
        /// When, on the capture's clock: halfway between the last message before and the first after, since
        /// the moment itself is not part of the stream.
        at: Moment,
    },
}

impl RankPlan {
    fn new(script: &CaptureScript, rank: DpRank) -> Self {
        let mut steps = Vec::new();
        let mut before: Option<&LiveMessage> = None;
        for message in script.live.iter().filter(|message| message.rank == rank) {
            if let Some(before) = before.filter(|before| before.life != message.life) {
                let pause = message.at.since(before.at);
                steps.push(PublishStep::Restart { at: before.at + pause / 2 });
            }
            let LiveMessage { at, frames, life, .. } = message.clone();
            steps.push(PublishStep::Publish { at, frames, life });
            before = Some(message);
        }
        let replies = script.replies.ranks.get(&rank);
        Self {
            rank,
            steps,
            has_replay: replies.is_some(),
            framing: replies.and_then(|replies| replies.framing),
            recorded: replies.map(|replies| replies.lives.clone()).unwrap_or_default(),
        }
    }

    /// What the replay endpoint may serve after the first `done` steps, ascending by number: what was sent
    /// in this life, and recorded answers for the holes before the last of it. Nothing from before a restart,
    /// nothing that is still to come.
    ///
    /// Cost: grows with the number of batches served; a publisher that is asked often keeps its own buffer
    /// and takes [`RankPlan::filling`] at each step.
    pub fn servable(&self, done: usize) -> BTreeMap<EventSeq, Bytes> {
        let mut buffer = BTreeMap::new();
        for step in 0..done.min(self.steps.len()) {
            match &self.steps[step] {
                PublishStep::Restart { .. } => buffer.clear(),
                PublishStep::Publish { .. } => buffer.extend(self.filling(step)),
            }
        }
        buffer
    }

    /// What a replay endpoint must add to its buffer before step number `step` is sent: the recorded answers
    /// for the hole right before it, then the step's own batch. Empty for a restart.
    pub fn filling(&self, step: usize) -> Vec<(EventSeq, Bytes)> {
        let Some((life, seq, payload)) = self.batch(step) else { return Vec::new() };
        let passed = step.checked_sub(1).and_then(|before| self.batch(before));
        let hole_from = passed.map_or(EventSeq::ZERO, |(_, seq, _)| seq.next());
        // A number that comes again has no hole before it.
        let recorded = self.recorded.get(life as usize).filter(|_| hole_from < seq);
        let hole = recorded.into_iter().flat_map(|recorded| recorded.range(hole_from..seq));
        hole.map(|(&seq, payload)| (seq, payload.clone())).chain([(seq, payload.clone())]).collect()
    }

    fn batch(&self, step: usize) -> Option<(u32, EventSeq, &Bytes)> {
        match self.steps.get(step)? {
            PublishStep::Publish { frames, life, .. } => {
                numbered(frames).map(|(seq, payload)| (*life, seq, payload))
            }
            PublishStep::Restart { .. } => None,
        }
    }
}

/// Sorts the lines of a capture.
struct ScriptBuilder {
    header: CaptureHeader,
    live: Vec<LiveMessage>,
    replies: ReplayBook,
    lives: BTreeMap<DpRank, Life>,
}

/// One rank's publisher, from one start to the next.
#[derive(Default)]
struct Life {
    number: u32,
    /// The number after the highest that was published.
    next: u64,
    /// What is known of this life, published or answered.
    known: HashMap<EventSeq, Bytes>,
    /// Answers that contradict it: those of the next life.
    successor: HashMap<EventSeq, Bytes>,
}

impl ScriptBuilder {
    fn new(header: CaptureHeader) -> Self {
        Self { header, live: Vec::new(), replies: ReplayBook::default(), lives: BTreeMap::new() }
    }

    fn push(&mut self, line: CaptureLine) {
        match line.body {
            LineBody::Pub { frames } => {
                let life = self.lives.entry(line.rank).or_default();
                if let Some((seq, payload)) = numbered(&frames) {
                    life.published(seq, payload);
                }
                let life = life.number;
                self.live.push(LiveMessage { at: line.at, rank: line.rank, frames, life });
            }
            LineBody::Replay { dir: Direction::Rx, sock, frames } => self.answered(line.rank, sock, &frames),
            LineBody::Replay { dir: Direction::Tx, .. } | LineBody::Mark { .. } => {}
        }
    }

    fn answered(&mut self, rank: DpRank, sock: ReplaySocket, frames: &[Bytes]) {
        let replies = self.replies.ranks.entry(rank).or_default();
        let Some((seq, payload)) = numbered(frames) else { return };
        if seq == EventSeq::END_MARK {
            return;
        }
        let delimiter = usize::from(sock == ReplaySocket::Dealer);
        replies.framing = Some(match frames.len() - delimiter.min(frames.len()) {
            0..=2 => ReplayFraming::Plain,
            _ => ReplayFraming::WithTopic,
        });
        let life = self.lives.entry(rank).or_default().answered(seq, payload) as usize;
        if replies.lives.len() <= life {
            replies.lives.resize_with(life + 1, BTreeMap::new);
        }
        replies.lives[life].insert(seq, payload.clone());
    }

    fn finish(self) -> CaptureScript {
        let mut ranks = self.header.ranks();
        ranks.extend(self.lives.keys());
        ranks.extend(self.replies.ranks.keys());
        ranks.sort_unstable();
        ranks.dedup();
        CaptureScript { header: self.header, ranks, live: self.live, replies: self.replies }
    }
}

impl Life {
    fn published(&mut self, seq: EventSeq, payload: &Bytes) {
        let passed = seq.0 < self.next;
        let again = self.known.get(&seq) == Some(payload);
        if passed && !again {
            let known = std::mem::take(&mut self.successor);
            *self = Self { number: self.number + 1, next: 0, known, successor: HashMap::new() };
        }
        self.next = self.next.max(seq.next().0);
        self.known.insert(seq, payload.clone());
    }

    /// Which life an answer belongs to.
    fn answered(&mut self, seq: EventSeq, payload: &Bytes) -> u32 {
        let other = self.known.get(&seq).is_some_and(|known| known != payload);
        // Once one answer came from the next life, those after it do too.
        if other || !self.successor.is_empty() {
            self.successor.insert(seq, payload.clone());
            return self.number + 1;
        }
        self.known.insert(seq, payload.clone());
        self.number
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const R0: DpRank = DpRank(0);

    fn header() -> CaptureHeader {
        CaptureHeader::parse(r#"{"kvcap":1,"engine":"vllm","dp_size":1}"#).unwrap()
    }

    fn frames(topic: &'static str, seq: u64, payload: &'static str) -> Vec<Bytes> {
        vec![topic.into(), Bytes::copy_from_slice(&seq.to_be_bytes()), payload.into()]
    }

    fn live(at: u64, seq: u64, payload: &'static str) -> CaptureLine {
        let body = LineBody::Pub { frames: frames("", seq, payload) };
        CaptureLine { at: Moment::from_micros(at), rank: R0, body }
    }

    fn answer(seq: u64, payload: &'static str) -> CaptureLine {
        let mut frames = frames("", seq, payload);
        frames.insert(0, Bytes::new());
        let body = LineBody::Replay { dir: Direction::Rx, sock: ReplaySocket::Dealer, frames };
        CaptureLine { at: Moment::default(), rank: R0, body }
    }

    fn seqs<'a>(answers: impl Iterator<Item = (EventSeq, &'a Bytes)>) -> Vec<(u64, &'a str)> {
        answers.map(|(seq, payload)| (seq.0, std::str::from_utf8(payload).unwrap())).collect()
    }

    /// E3: only what was received answers, whatever socket asked.
    #[test]
    fn requests_and_end_marks_are_no_answers() {
        let mut request = answer(3, "x");
        if let LineBody::Replay { dir, .. } = &mut request.body {
            *dir = Direction::Tx;
        }
        let script = CaptureScript::from_lines(header(), [live(1, 0, "a"), request]);
        assert!(!script.replies().has_replay(R0));

        let script = CaptureScript::from_lines(header(), [answer(u64::MAX, "")]);
        assert!(script.replies().has_replay(R0), "an end mark shows an endpoint");
        assert_eq!(script.replies().answers_from(R0, 0, EventSeq::ZERO).count(), 0);
    }

    #[test]
    fn answers_merge_by_number() {
        let lines = [live(1, 9, "j"), answer(5, "f"), answer(7, "h"), answer(6, "g"), answer(7, "h")];
        let script = CaptureScript::from_lines(header(), lines);
        let book = script.replies();
        assert_eq!(seqs(book.answers_from(R0, 0, EventSeq(6))), [(6, "g"), (7, "h")]);
        assert_eq!(book.framing(R0), Some(ReplayFraming::WithTopic));
    }

    /// E3: the recorder was there from the start, so the first question finds nothing before it.
    #[test]
    fn the_first_request_gets_an_end_mark_only() {
        let script = CaptureScript::from_lines(header(), [live(1, 2, "c"), answer(0, "a"), answer(1, "b")]);
        let mut desk = ReplayDesk::new(script.replies());
        assert_eq!(seqs(desk.ask(R0, EventSeq::ZERO).unwrap()), []);
        assert_eq!(seqs(desk.ask(R0, EventSeq::ZERO).unwrap()), [(0, "a"), (1, "b")]);
        assert_eq!(desk.asked(R0), 2);
        assert!(desk.ask(DpRank(1), EventSeq::ZERO).is_none());
    }

    /// E2: the same numbers in two lives are two streams.
    #[test]
    fn answers_of_a_former_life_are_not_given() {
        let lines = [
            live(1, 0, "old 0"),
            live(2, 4, "old 4"),
            answer(2, "old 2"),
            answer(3, "old 3"),
            live(3, 0, "new 0"),
            live(4, 3, "new 3"),
            answer(1, "new 1"),
            answer(2, "new 2"),
        ];
        let script = CaptureScript::from_lines(header(), lines);
        assert_eq!(script.live().iter().map(|message| message.life).collect::<Vec<_>>(), [0, 0, 1, 1]);
        let mut desk = ReplayDesk::new(script.replies());
        let _ = desk.ask(R0, EventSeq::ZERO);
        desk.live(&script.live()[1]);
        assert_eq!(seqs(desk.ask(R0, EventSeq(1)).unwrap()), [(2, "old 2"), (3, "old 3")]);
        desk.live(&script.live()[3]);
        assert_eq!(seqs(desk.ask(R0, EventSeq(1)).unwrap()), [(1, "new 1"), (2, "new 2")]);
    }

    /// The new process was asked before it published anything.
    #[test]
    fn an_answer_that_contradicts_what_was_published_is_of_the_next_life() {
        let lines = [
            live(1, 0, "old 0"),
            live(2, 1, "old 1"),
            answer(0, "new 0"),
            answer(1, "new 1"),
            answer(2, "new 2"),
            live(3, 0, "new 0"),
        ];
        let script = CaptureScript::from_lines(header(), lines);
        assert_eq!(script.live()[2].life, 1);
        assert_eq!(seqs(script.replies().answers_from(R0, 0, EventSeq::ZERO)), []);
        assert_eq!(script.replies().answers_from(R0, 1, EventSeq::ZERO).count(), 3);
    }

    #[test]
    fn the_same_message_again_is_no_restart() {
        let script = CaptureScript::from_lines(header(), [live(1, 0, "a"), live(2, 1, "b"), live(3, 0, "a")]);
        assert!(script.live().iter().all(|message| message.life == 0));
    }

    #[test]
    fn frames_that_carry_no_number_are_published_as_they_were() {
        let mut odd = live(2, 0, "x");
        odd.body = LineBody::Pub { frames: vec!["only".into()] };
        let script = CaptureScript::from_lines(header(), [live(1, 0, "a"), odd, live(3, 1, "b")]);
        let plan = &script.publish_plan().ranks[0];
        assert_eq!(plan.steps.len(), 3);
        assert_eq!(plan.filling(1), []);
        assert_eq!(plan.servable(3).len(), 2);
    }
}

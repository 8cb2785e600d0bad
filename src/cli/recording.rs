//! The recorder behind `rankwise capture`: connections on one side, a file on the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use bytes::Bytes;
use rankwise::capture::{
    CaptureHeader, CaptureLine, CaptureWriter, Direction, HeaderFields, LineBody, ReplaySocket, stem,
};
use rankwise::events::{
    KvEvent, Limits as EventLimits, ReplayId, ReplayMessage, decode_batch, parse_live, parse_replay,
    replay_request,
};
use rankwise::fleet::{Endpoint, RankPlan};
use rankwise::ids::{DpRank, EventSeq, Moment, SourceId};
use rankwise::ingest::{
    Clock, Closed, ReplayConfig, ReplayHandle, Sink, StreamEvent, SubscriberConfig, SubscriberHandle,
    spawn_replay, spawn_subscriber,
};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::asked_to_stop;
use super::output::message_bar;

/// What is to be recorded.
pub struct Recording {
    /// The file.
    pub out: PathBuf,
    /// Its header; the block size is filled in when a stored block tells it.
    pub header: HeaderFields,
    /// The ranks with their endpoints.
    pub plans: Vec<RankPlan>,
    /// Whether replay endpoints are asked for their history at each connect, and for what holes lack.
    pub with_history: bool,
    /// When to stop.
    pub limits: Limits,
}

/// When a recording stops by itself.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// After this long.
    pub time: Option<Duration>,
    /// After so many live messages.
    pub messages: Option<u64>,
}

/// What was recorded.
#[derive(Debug, Serialize)]
pub struct Recorded {
    /// The file.
    pub file: String,
    /// Live messages of all ranks.
    pub messages: u64,
    /// How long it took.
    pub seconds: f64,
    /// Per rank, ascending.
    pub ranks: Vec<RecordedRank>,
}

/// What was recorded of one rank.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RecordedRank {
    /// The global rank.
    pub dp_rank: u32,
    /// Connections made; 0 is a rank that was never there.
    pub connects: u64,
    /// Live messages.
    pub messages: u64,
    /// Batches that replays gave.
    pub replayed: u64,
    /// The first live number.
    pub first_seq: Option<u64>,
    /// The last live number.
    pub last_seq: Option<u64>,
    /// Places where the live numbers jump ahead.
    pub holes: u64,
}

/// How often what was written is handed to the system, so that a process that dies loses little.
const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// Records until a limit, Ctrl-C or SIGTERM; then the file is complete.
///
/// # Errors
/// Endpoints that cannot be used, and a file that cannot be written.
pub async fn record(recording: Recording) -> Result<Recorded> {
    let Recording { out, header, plans, with_history, limits } = recording;
    let file = out.display().to_string();
    let bar = message_bar(None);
    bar.set_message(stem(&out));
    let mut tape = Tape::create(out, header)?;
    let clock = Clock::start();
    // A few: the file is faster than the sockets, and while it is not, TCP holds the publishers back.
    let (sender, mut arrivals) = mpsc::channel(256);
    let mut ranks = Ranks::connect(plans, with_history, RecordSink { clock, sender })?;
    let mut flush = interval(FLUSH_EVERY);
    flush.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let stop = stop_asked(limits.time);
    tokio::pin!(stop);
    let mut messages = 0;
    let complete = loop {
        tokio::select! {
            biased;
            told = &mut stop => break !told,
            _ = flush.tick() => tape.flush()?,
            arrived = arrivals.recv() => {
                let Some((at, source, event)) = arrived else { break false };
                let live = matches!(event, StreamEvent::Message(_));
                ranks.take_in(at, source, event, &mut tape)?;
                messages += u64::from(live);
                bar.set_position(messages);
                if limits.messages.is_some_and(|limit| messages >= limit) {
                    break true;
                }
            }
        }
    };
    // Whoever presses Ctrl-C wants the file now; a limit concerns live messages only.
    if complete {
        drain(&mut arrivals, &mut ranks, &mut tape).await?;
    }
    tape.finish()?;
    bar.finish_and_clear();
    let seconds = clock.now().since(Moment::default()).as_secs_f64();
    Ok(Recorded { file, messages, seconds, ranks: ranks.counts() })
}

/// Records the answers that are still to come. Requests have time limits of their own.
async fn drain(arrivals: &mut mpsc::Receiver<Arrival>, ranks: &mut Ranks, tape: &mut Tape) -> Result<()> {
    let stop = asked_to_stop();
    tokio::pin!(stop);
    while ranks.are_asking() {
        let arrived = tokio::select! {
            () = &mut stop => break,
            arrived = arrivals.recv() => arrived,
        };
        let Some((at, source, event)) = arrived else { break };
        if !matches!(event, StreamEvent::Message(_) | StreamEvent::Connected) {
            ranks.take_in(at, source, event, tape)?;
        }
    }
    Ok(())
}

/// Resolves when the recording is to end; whether somebody told us to.
async fn stop_asked(after: Option<Duration>) -> bool {
    let Some(after) = after else {
        asked_to_stop().await;
        return true;
    };
    tokio::select! {
        () = asked_to_stop() => true,
        () = sleep(after) => false,
    }
}

/// When, on which stream, and what.
type Arrival = (Moment, SourceId, StreamEvent);

/// Stamps what comes and hands it to the recorder.
#[derive(Clone)]
struct RecordSink {
    clock: Clock,
    sender: mpsc::Sender<Arrival>,
}

impl Sink for RecordSink {
    async fn deliver(&self, source: SourceId, event: StreamEvent) -> Result<(), Closed> {
        self.sender.send((self.clock.now(), source, event)).await.map_err(|_| Closed)
    }
}

/// The ranks that are being recorded, by the number of their stream.
struct Ranks {
    ranks: BTreeMap<SourceId, Rank>,
    replay: ReplayConfig,
    sink: RecordSink,
}

struct Rank {
    plan: RankPlan,
    counts: RecordedRank,
    refused: bool,
    history: History,
    /// Keeps the rank connected.
    _subscriber: SubscriberHandle,
}

impl Ranks {
    fn connect(plans: Vec<RankPlan>, with_history: bool, sink: RecordSink) -> Result<Self> {
        let handle = Handle::current();
        let mut ranks = BTreeMap::new();
        for (source, plan) in (0..).map(SourceId).zip(plans) {
            let Some(endpoint) = &plan.events else { continue };
            let subscriber = spawn_subscriber(
                &handle,
                source,
                endpoint.address(),
                endpoint.binds(),
                &plan.topic,
                sink.clone(),
                SubscriberConfig::default(),
            )?;
            let counts = RecordedRank { dp_rank: plan.rank.dp_rank.0, ..RecordedRank::default() };
            let history = History::new(plan.replay.clone().filter(|_| with_history));
            let rank = Rank { plan, counts, refused: false, history, _subscriber: subscriber };
            ranks.insert(source, rank);
        }
        Ok(Self { ranks, replay: ReplayConfig::default(), sink })
    }

    fn take_in(&mut self, at: Moment, source: SourceId, event: StreamEvent, tape: &mut Tape) -> Result<()> {
        let Some(rank) = self.ranks.get_mut(&source) else { return Ok(()) };
        let dp_rank = rank.plan.rank.dp_rank;
        let mark =
            |note: &str| CaptureLine { at, rank: dp_rank, body: LineBody::Mark { note: note.to_owned() } };
        match event {
            StreamEvent::Connected => {
                rank.counts.connects += 1;
                rank.refused = false;
                tape.write(mark("connected"))?;
                rank.history.begin();
            }
            StreamEvent::Disconnected => tape.write(mark("connection lost"))?,
            StreamEvent::Refused if rank.refused => {}
            StreamEvent::Refused => {
                rank.refused = true;
                let endpoint = rank.plan.events.as_ref().map(ToString::to_string);
                tracing::warn!(rank = dp_rank.0, endpoint, "nobody listens; trying on");
            }
            StreamEvent::Unreachable { .. } if rank.refused => {}
            StreamEvent::Unreachable { why } => {
                rank.refused = true;
                tracing::warn!(rank = dp_rank.0, why, "no connection; trying on");
            }
            StreamEvent::TooLarge => {
                tracing::warn!(rank = dp_rank.0, "a message over the limit was dropped");
                tape.write(mark("a message over the limit was dropped"))?;
            }
            // Nobody here asks for it.
            StreamEvent::Tried { .. } => {}
            StreamEvent::Message(frames) => {
                if let Some(missing) = rank.count(&frames) {
                    rank.history.want(missing);
                }
                tape.write(CaptureLine { at, rank: dp_rank, body: LineBody::Pub { frames } })?;
            }
            StreamEvent::ReplayAsked { .. } => {
                let frames = replay_request(rank.history.asked_from).to_vec();
                tape.write(replay_line(at, dp_rank, Direction::Tx, frames))?;
            }
            StreamEvent::ReplayMessage { frames, .. } => {
                match parse_replay(&frames) {
                    Ok(ReplayMessage::Batch { .. }) => rank.counts.replayed += 1,
                    Ok(ReplayMessage::End) => rank.history.running = None,
                    _ => {}
                }
                tape.write(replay_line(at, dp_rank, Direction::Rx, frames))?;
            }
            StreamEvent::ReplayFailed { why, .. } => {
                rank.history.running = None;
                tracing::warn!(rank = dp_rank.0, ?why, "the history did not come to its end");
                tape.write(mark(&format!("replay failed: {why:?}")))?;
            }
        }
        rank.history.ask(source, &self.sink, &self.replay)
    }

    /// Whether answers of a replay endpoint are still to come.
    fn are_asking(&self) -> bool {
        self.ranks.values().any(|rank| rank.history.running.is_some())
    }

    fn counts(&self) -> Vec<RecordedRank> {
        self.ranks.values().map(|rank| rank.counts.clone()).collect()
    }
}

impl Rank {
    /// Counts a live message; the first number that is missing before it, if it shows a hole.
    fn count(&mut self, frames: &[Bytes]) -> Option<EventSeq> {
        self.counts.messages += 1;
        let seq = parse_live(frames).ok()?.seq;
        let expected = self.counts.last_seq.map(|last| EventSeq(last).next());
        self.counts.first_seq.get_or_insert(seq.0);
        self.counts.last_seq = Some(seq.0);
        let missing = expected.filter(|&expected| seq > expected);
        self.counts.holes += u64::from(missing.is_some());
        missing
    }
}

/// One rank's replay endpoint: one request at a time, on a connection of its own.
struct History {
    endpoint: Option<Endpoint>,
    /// The first number that is to be asked for next.
    wanted: Option<EventSeq>,
    /// The first number that was asked for last.
    asked_from: EventSeq,
    running: Option<ReplayHandle>,
    requests: u64,
}

impl History {
    fn new(endpoint: Option<Endpoint>) -> Self {
        Self { endpoint, wanted: None, asked_from: EventSeq::ZERO, running: None, requests: 0 }
    }

    /// A new connection, perhaps to a new process: everything is wanted, and who was asked before may be gone.
    fn begin(&mut self) {
        self.running = None;
        self.wanted = Some(EventSeq::ZERO);
    }

    fn want(&mut self, from: EventSeq) {
        self.wanted = Some(self.wanted.map_or(from, |wanted| wanted.min(from)));
    }

    /// Asks for what is wanted, unless a request runs: then when that has ended.
    fn ask(&mut self, source: SourceId, sink: &RecordSink, config: &ReplayConfig) -> Result<()> {
        let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.running.is_none()) else { return Ok(()) };
        let Some(from) = self.wanted.take() else { return Ok(()) };
        let request = ReplayId(self.requests);
        let handle = Handle::current();
        let running = spawn_replay(&handle, source, endpoint.address(), request, from, sink.clone(), config)?;
        self.requests += 1;
        self.asked_from = from;
        self.running = Some(running);
        Ok(())
    }
}

fn replay_line(at: Moment, rank: DpRank, dir: Direction, frames: Vec<Bytes>) -> CaptureLine {
    CaptureLine { at, rank, body: LineBody::Replay { dir, sock: ReplaySocket::Dealer, frames } }
}

/// The file being written. A capture cannot be replayed without its block size, which stands in the first
/// line: until it is known, lines wait.
enum Tape {
    Waiting(Waiting),
    Writing(CaptureWriter),
}

/// Lines whose header is not complete.
struct Waiting {
    path: PathBuf,
    /// The file, still empty; `None` once it is handed on.
    file: Option<File>,
    header: HeaderFields,
    lines: Vec<CaptureLine>,
    bytes: u64,
}

impl Waiting {
    /// Bytes of frames that wait at most. The first batch of an engine stores blocks, unless it is of those
    /// that announce a clear first; a stream that says nothing of blocks for so long is written without.
    const MAX_BYTES: u64 = 64 << 20;
    /// Lines likewise.
    const MAX_LINES: usize = 100_000;

    /// Whether there is nothing to wait for any more.
    fn is_complete(&self) -> bool {
        self.header.block_size.is_some() || self.bytes > Self::MAX_BYTES || self.lines.len() > Self::MAX_LINES
    }
}

impl Drop for Waiting {
    /// A recording that never began leaves no file that the next one would have to spare.
    fn drop(&mut self) {
        if self.file.is_some() {
            // Nobody is left to hear of it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Tape {
    fn create(path: PathBuf, header: HeaderFields) -> Result<Self> {
        if header.block_size.is_some() {
            return Ok(Self::Writing(CaptureWriter::create(&path, &CaptureHeader::new(header)?)?));
        }
        // What cannot be written is worth knowing before an hour of messages waits for it.
        if path.exists() {
            bail!("{}: exists already; a recording is never overwritten", path.display());
        }
        let file = Some(CaptureWriter::reserve(&path)?);
        Ok(Self::Waiting(Waiting { path, file, header, lines: Vec::new(), bytes: 0 }))
    }

    /// Writes a line, or lets it wait.
    fn write(&mut self, line: CaptureLine) -> Result<()> {
        match self {
            Self::Writing(writer) => Ok(writer.write(&line)?),
            Self::Waiting(waiting) => {
                waiting.header.block_size = block_size_in(&line);
                waiting.bytes += line.frame_bytes();
                waiting.lines.push(line);
                if waiting.is_complete() { self.start() } else { Ok(()) }
            }
        }
    }

    /// Writes the header and what waits for it.
    fn start(&mut self) -> Result<()> {
        let Self::Waiting(waiting) = self else { return Ok(()) };
        if waiting.header.block_size.is_none() {
            tracing::warn!("no stored block has told its size; give --block-size to have it in the header");
        }
        let header = CaptureHeader::new(std::mem::take(&mut waiting.header))?;
        let Some(file) = waiting.file.take() else { return Ok(()) };
        let mut writer = CaptureWriter::begin(&waiting.path, file, &header)?;
        for line in waiting.lines.drain(..) {
            writer.write(&line)?;
        }
        *self = Self::Writing(writer);
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        match self {
            Self::Waiting(_) => Ok(()),
            Self::Writing(writer) => Ok(writer.flush()?),
        }
    }

    fn finish(mut self) -> Result<()> {
        self.start()?;
        match self {
            Self::Waiting(_) => Ok(()),
            Self::Writing(writer) => Ok(writer.finish()?),
        }
    }
}

/// The block size that the first stored block of a message names, live or replayed.
fn block_size_in(line: &CaptureLine) -> Option<u32> {
    let (LineBody::Pub { frames } | LineBody::Replay { frames, .. }) = &line.body else { return None };
    // A request's last frame is a number, and an end mark's is empty: neither is a batch.
    let batch = decode_batch(frames.last()?, &EventLimits::default()).ok()?;
    batch.events.iter().find_map(|event| match event {
        KvEvent::Stored(stored) => Some(stored.block_size).filter(|&size| size > 0),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A file that cannot be written is found before anything is recorded, whether or not the header is complete.
    #[test]
    fn the_file_is_made_before_anything_is_recorded() {
        let scratch = tempfile::tempdir().unwrap();
        for block_size in [None, Some(16)] {
            let header = || HeaderFields { block_size, ..HeaderFields::default() };
            assert!(Tape::create(scratch.path().join("missing/run.kvcap"), header()).is_err());
            let path = scratch.path().join(format!("run{}.kvcap", block_size.unwrap_or(0)));
            let tape = Tape::create(path.clone(), header()).unwrap();
            assert!(path.exists());
            assert!(Tape::create(path.clone(), header()).is_err(), "it is there already");
            tape.finish().unwrap();
            assert!(path.metadata().unwrap().len() > 0);
        }
        let path = scratch.path().join("never.kvcap");
        drop(Tape::create(path.clone(), HeaderFields::default()).unwrap());
        assert!(!path.exists(), "an empty file stands in the way of the next recording");
    }
}

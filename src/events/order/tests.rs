//! Each rule of the order, one stream at a time. Random histories are in the integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::ids::Moment;
use crate::trust::MayErr::{Miss, Overcredit};
use crate::trust::{Reason, Reasons, Trust};

/// What a step is, in short.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Did {
    Apply(u64),
    Clear,
    Ask(u64),
    Cancel,
    Try,
    Reconnect,
}
use Did::{Apply, Ask, Cancel, Clear, Reconnect, Try};

/// A sequencer, a clock, and the last request made.
struct Rig {
    stream: Sequencer,
    now: Moment,
    asked: Option<ReplayId>,
    /// Requests that are sent as soon as they are made.
    prompt: bool,
    said: Vec<Notice>,
    /// The life of the publisher that the next batches come from: its batches are newer and different.
    life: u64,
}

const TIMEOUT: Duration = Duration::from_secs(2);

fn config(has_replay: bool) -> SequencerConfig {
    SequencerConfig {
        has_replay,
        on_loss: OnLoss::Keep,
        max_held_batches: 8,
        max_held_bytes: 1_000,
        held_budget: HeldBudget::unlimited(),
        replay_timeout: TIMEOUT,
        max_replay_attempts: 3,
        link: Link::Dialled,
        silent_after: Duration::from_secs(5),
        silence_grace: Duration::from_secs(10),
        probe: None,
    }
}

fn ts_of(life: u64, seq: u64) -> f64 {
    (life * 1_000 + seq.min(999)) as f64
}

fn payload_of(life: u64, seq: u64) -> Bytes {
    Bytes::from(format!("life {life} batch {seq}"))
}

impl Rig {
    fn with(config: SequencerConfig) -> Self {
        Self {
            stream: Sequencer::new(config, Moment(0)),
            now: Moment(0),
            asked: None,
            prompt: true,
            said: Vec::new(),
            life: 1,
        }
    }

    /// Without a replay endpoint, connected.
    fn plain() -> Self {
        let mut rig = Self::with(config(false));
        assert_eq!(rig.connect(), []);
        rig
    }

    /// With a replay endpoint, connected, and its empty history settled.
    fn replaying() -> Self {
        let mut rig = Self::with(config(true));
        assert_eq!(rig.connect(), [Ask(0)]);
        assert_eq!(rig.end(), []);
        assert_eq!(rig.trust(), Trust::Live);
        rig
    }

    /// As [`replaying`](Self::replaying), with numbers 0 up to `last` applied.
    fn at(last: u64) -> Self {
        let mut rig = Self::replaying();
        for seq in 0..=last {
            assert_eq!(rig.live(seq), [Apply(seq)]);
        }
        rig
    }

    fn did(&mut self, steps: Vec<Step>) -> Vec<Did> {
        let mut did = Vec::new();
        for step in steps {
            did.push(match step {
                Step::Apply(batch) => Apply(batch.seq.0),
                Step::Clear => Clear,
                Step::AskReplay { request, from } => {
                    assert!(self.asked.is_none_or(|last| request > last), "a request's name is reused");
                    self.asked = Some(request);
                    if self.prompt {
                        self.stream.on_replay_asked(self.now, request);
                    }
                    Ask(from.0)
                }
                Step::CancelReplay { request } => {
                    assert!(self.asked >= Some(request));
                    Cancel
                }
                Step::TryConnection { request } => {
                    self.asked = Some(request);
                    Try
                }
                Step::Reconnect => Reconnect,
                Step::Say(notice) => {
                    self.said.push(notice);
                    continue;
                }
            });
        }
        did
    }

    fn run(&mut self, act: impl FnOnce(&mut Sequencer, Moment, &mut Vec<Step>)) -> Vec<Did> {
        let mut out = Vec::new();
        act(&mut self.stream, self.now, &mut out);
        self.did(out)
    }

    fn connect(&mut self) -> Vec<Did> {
        self.run(|stream, now, out| stream.on_connected(now, out))
    }

    fn disconnect(&mut self) -> Vec<Did> {
        self.run(|stream, now, out| stream.on_disconnected(now, out))
    }

    fn refuse(&mut self) {
        self.stream.on_unreachable(self.now);
    }

    fn arrive(&mut self, seq: u64) -> (Arrival, Vec<Did>) {
        self.arrive_with(seq, Some(ts_of(self.life, seq)), payload_of(self.life, seq))
    }

    fn arrive_with(&mut self, seq: u64, ts: Option<f64>, payload: Bytes) -> (Arrival, Vec<Did>) {
        let mut out = Vec::new();
        let arrival = self.stream.on_live(self.now, EventSeq(seq), ts, &payload, &mut out);
        (arrival, self.did(out))
    }

    fn live(&mut self, seq: u64) -> Vec<Did> {
        self.arrive(seq).1
    }

    fn replay(&mut self, seq: u64) -> Vec<Did> {
        self.replay_to(self.asked.unwrap(), seq)
    }

    fn replay_to(&mut self, request: ReplayId, seq: u64) -> Vec<Did> {
        let (ts, payload) = (ts_of(self.life, seq), payload_of(self.life, seq));
        self.run(|stream, now, out| {
            stream.on_replay_batch(now, request, EventSeq(seq), Some(ts), &payload, out);
        })
    }

    fn end(&mut self) -> Vec<Did> {
        let request = self.asked.unwrap();
        self.run(|stream, now, out| stream.on_replay_end(now, request, out))
    }

    /// The end mark, and again the end mark for the question whether that was all (E10).
    fn end_twice(&mut self, next: u64) {
        assert_eq!(self.end(), [Ask(next)]);
        assert_eq!(self.end(), []);
    }

    fn fail(&mut self) -> Vec<Did> {
        let request = self.asked.unwrap();
        self.run(|stream, now, out| stream.on_replay_failed(now, request, out))
    }

    fn pass(&mut self, time: Duration) -> Vec<Did> {
        self.now = self.now + time;
        self.run(|stream, now, out| stream.on_tick(now, out))
    }

    fn trust(&self) -> Trust {
        self.stream.trust()
    }

    fn counters(&self) -> StreamCounters {
        *self.stream.counters()
    }
}

// ---- the first connect ---------------------------------------------------------------------------------

/// E3: history is asked from 0 at once; an end mark alone is an empty history, and complete.
#[test]
fn e3_first_connect_asks_from_zero() {
    let mut rig = Rig::with(config(true));
    assert_eq!(rig.trust(), Trust::Joining);
    assert_eq!(rig.connect(), [Ask(0)]);
    assert_eq!(rig.trust(), Trust::Joining);
    assert_eq!(rig.end(), []);
    assert_eq!((rig.trust(), rig.stream.watermark()), (Trust::Live, None));
    assert_eq!(rig.stream.last_heard(), Some(Moment(0)));
}

/// E3, case C10: history, then what was held, each number once and nothing asked twice.
#[test]
fn e3_c10_history_before_what_is_live() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.arrive(3), (Arrival::Held, vec![]));
    assert_eq!(rig.arrive(4), (Arrival::Held, vec![]));
    assert_eq!(rig.replay(0), [Apply(0)]);
    assert_eq!(rig.trust(), Trust::Joining);
    assert_eq!(rig.replay(1), [Apply(1)]);
    assert_eq!(rig.replay(2), [Apply(2), Apply(3), Apply(4), Cancel], "nothing more to be had");
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!((rig.replay(3), rig.end()), (vec![], vec![]));
    let counters = rig.counters();
    assert_eq!((counters.gaps, counters.lost_batches, counters.replays_asked), (0, 0, 1));
    assert_eq!((counters.late_answers, counters.replays_answered), (2, 1));

    let mut rig = Rig::with(config(true));
    rig.connect();
    for seq in 0..=3 {
        assert_eq!(rig.replay(seq), [Apply(seq)]);
    }
    rig.end_twice(4);
    assert_eq!(rig.arrive(3), (Arrival::Duplicate, vec![]));
    assert_eq!((rig.trust(), rig.counters().replays_asked), (Trust::Live, 2));
}

/// E3: a history that begins above 0 is lost in part: applied, and the view may miss.
#[test]
fn e3_history_lost_at_the_first_connect_may_miss() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.replay(5), [Apply(5)]);
    assert_eq!(rig.replay(6), [Apply(6)]);
    rig.end_twice(7);
    assert_eq!(rig.trust(), Trust::Partial(Miss));
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches), (1, 5));
    assert_eq!(rig.live(7), [Apply(7)]);
    assert_eq!(rig.trust(), Trust::Partial(Miss));
}

/// E3: an empty history and then a number above 0 is a gap from 0.
#[test]
fn e3_empty_history_then_a_higher_number_is_a_gap_from_zero() {
    let mut rig = Rig::replaying();
    assert_eq!(rig.arrive(2), (Arrival::Held, vec![Ask(0)]));
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!(rig.replay(0), [Apply(0)]);
    assert_eq!(rig.replay(1), [Apply(1), Apply(2), Cancel]);
    assert_eq!((rig.trust(), rig.counters().gaps), (Trust::Live, 1));

    // The same, the number being there before the end mark.
    let mut rig = Rig::with(config(true));
    rig.connect();
    rig.live(2);
    assert_eq!(rig.end(), [Ask(0)]);
    assert_eq!(rig.trust(), Trust::Joining);
    assert_eq!(rig.counters().gaps, 1);
    assert_eq!(rig.end(), [Apply(2)], "two answers without it");
    assert_eq!(rig.trust(), Trust::Partial(Miss), "nothing was credited that could be gone");
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches), (1, 2));
}

/// E3: number 0 is the beginning; a history that does not answer adds nothing to it.
#[test]
fn e3_number_zero_needs_no_history() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.arrive(0), (Arrival::Applied, vec![Apply(0), Cancel]));
    assert_eq!((rig.trust(), rig.counters().replays_answered), (Trust::Live, 0));
}

/// E3: without a replay endpoint a first number 0 is complete and a higher one is a late join.
#[test]
fn e3_first_number_without_replay() {
    let mut rig = Rig::plain();
    assert_eq!(rig.stream.reasons(), Reasons::from_iter([Reason::NoHistory]));
    assert_eq!(rig.arrive(0), (Arrival::Applied, vec![Apply(0)]));
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = Rig::plain();
    let lost = Arrival::Lost { from: EventSeq(0), to: EventSeq(6) };
    assert_eq!(rig.arrive(7), (lost, vec![Apply(7)]));
    assert_eq!(rig.trust(), Trust::Partial(Miss));
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches), (1, 7));
}

/// E3, E4: a history that never answers is given up, and what was held goes on.
#[test]
fn e4_history_that_never_answers() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    rig.live(3);
    rig.live(4);
    assert_eq!(rig.stream.next_deadline(), Some(rig.now + TIMEOUT));
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(0)]);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(0)]);
    assert_eq!(rig.trust(), Trust::Joining);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Apply(3), Apply(4)]);
    assert_eq!(rig.trust(), Trust::Partial(Miss));
    assert_eq!(rig.stream.next_deadline(), None);
    let counters = rig.counters();
    assert_eq!((counters.replays_failed, counters.replays_given_up), (3, 1));
    assert_eq!((counters.gaps, counters.lost_batches), (1, 3));

    // With nothing held: the next number tells.
    let mut rig = Rig::with(config(true));
    rig.connect();
    for _ in 0..3 {
        rig.pass(TIMEOUT);
    }
    rig.life = 1;
    assert_eq!(rig.live(0), [Apply(0)]);
    assert_eq!(rig.trust(), Trust::Live, "0 is the beginning");
}

// ---- gaps ----------------------------------------------------------------------------------------------

/// E2, case C12: in order, once, and what comes twice is counted.
#[test]
fn e2_c12_duplicates_count_once() {
    let mut rig = Rig::at(0);
    assert_eq!(rig.arrive(0), (Arrival::Duplicate, vec![]));
    assert_eq!(rig.arrive(2), (Arrival::Held, vec![Ask(1)]));
    assert_eq!(rig.arrive(2), (Arrival::Duplicate, vec![]));
    assert_eq!(rig.stream.held_bytes(), payload_of(1, 2).len());
    assert_eq!(rig.replay(1), [Apply(1), Apply(2), Cancel]);
    assert_eq!(rig.replay(2), []);
    assert_eq!(rig.replay(3), [], "too late: not asked for any more");
    assert_eq!(rig.live(3), [Apply(3)]);
    assert_eq!((rig.trust(), rig.counters().duplicate_batches), (Trust::Live, 2));
}

/// E3, case C11: a request that times out is made again, and the batches come in order.
#[test]
fn e3_c11_a_slow_replay_is_asked_again() {
    let mut rig = Rig::at(0);
    assert_eq!(rig.live(3), [Ask(1)]);
    let slow = rig.asked.unwrap();
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!(rig.pass(Duration::from_secs(60)), [Cancel, Ask(1)]);
    assert_eq!(rig.replay_to(slow, 1), [], "the late answer of the first");
    assert_eq!(rig.replay(1), [Apply(1)]);
    assert_eq!(rig.replay(2), [Apply(2), Apply(3), Cancel]);
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches), (1, 0));
}

/// E3, E4, case C11: after the hole is given up, its batches are never applied on top.
#[test]
fn e4_c11_nothing_late_after_a_loss() {
    let mut rig = Rig::at(0);
    rig.live(3);
    let mut requests = vec![rig.asked.unwrap()];
    for _ in 0..2 {
        assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(1)]);
        requests.push(rig.asked.unwrap());
    }
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Apply(3)]);
    for request in requests {
        assert_eq!((rig.replay_to(request, 1), rig.replay_to(request, 2)), (vec![], vec![]));
    }
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches), (1, 2));
    assert_eq!(rig.live(4), [Apply(4)]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
}

/// E4: the setting `clear` forgets the blocks from before the hole, before the batch behind it.
#[test]
fn e4_clear_on_loss() {
    let mut rig = Rig::with(SequencerConfig { on_loss: OnLoss::Clear, ..config(true) });
    rig.connect();
    rig.live(0);
    rig.live(3);
    assert_eq!(rig.replay(3), [Clear, Apply(3), Cancel], "the buffer begins behind the hole");
    assert_eq!(rig.trust(), Trust::Partial(Miss));
    assert_eq!(rig.counters().lost_batches, 2);

    let mut rig = Rig::with(SequencerConfig { on_loss: OnLoss::Clear, ..config(false) });
    rig.connect();
    assert_eq!(rig.live(2), [Apply(2)], "there is nothing to forget yet");
    assert_eq!(rig.live(5), [Clear, Apply(5)]);
    assert_eq!(rig.trust(), Trust::Partial(Miss));
}

/// E2, E4: without a replay endpoint a gap is a loss at once.
#[test]
fn e4_gap_without_replay() {
    let mut rig = Rig::plain();
    rig.live(0);
    let lost = Arrival::Lost { from: EventSeq(1), to: EventSeq(3) };
    assert_eq!(rig.arrive(4), (lost, vec![Apply(4)]));
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches), (1, 3));
}

/// E3: a hole inside an answer is asked for again at its end mark, from its first number.
#[test]
fn e3_a_lossy_answer_is_asked_again() {
    let mut rig = Rig::at(0);
    rig.live(6);
    assert_eq!(rig.replay(1), [Apply(1)]);
    assert_eq!(rig.replay(3), []);
    assert_eq!(rig.replay(4), []);
    assert_eq!(rig.end(), [Ask(2)]);
    for seq in 2..5 {
        assert_eq!(rig.replay(seq), [Apply(seq)]);
    }
    // The end mark is lost this time.
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(5)]);
    assert_eq!(rig.replay(5), [Apply(5), Apply(6), Cancel]);
    assert_eq!((rig.trust(), rig.counters().gaps, rig.counters().lost_batches), (Trust::Live, 1, 0));
}

/// E3: progress keeps a replay alive however long it is; attempts count only in a row.
#[test]
fn e3_progress_renews_the_time_and_the_attempts() {
    let mut rig = Rig::at(0);
    rig.live(8);
    for seq in 1..4 {
        assert_eq!(rig.pass(TIMEOUT - Duration::from_millis(1)), []);
        assert_eq!(rig.replay(seq), [Apply(seq)]);
    }
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(4)]);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(4)]);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(4)], "the first of these had brought something");
    assert_eq!(rig.replay(4), [Apply(4)]);
    assert_eq!(rig.end(), [Ask(5)]);
    assert_eq!(rig.end(), [Ask(5)]);
    assert_eq!(rig.end(), [Apply(8)], "two answers in a row without it");
    assert_eq!(rig.counters().lost_batches, 3);
}

/// E3: batches that an answer repeats or that follow its hole do not keep it alive.
#[test]
fn e3_noise_is_no_progress() {
    let mut rig = Rig::at(4);
    rig.live(9);
    for _ in 0..4 {
        rig.pass(TIMEOUT / 5);
        assert_eq!(rig.replay(3), []);
    }
    assert_eq!(rig.pass(TIMEOUT / 5), [Cancel, Ask(5)]);
    assert_eq!(rig.counters().duplicate_batches, 4);
}

/// E3: the first answer above the missing number says that the rest has left the buffer.
#[test]
fn e3_below_the_buffer_is_lost_at_once() {
    let mut rig = Rig::at(1);
    rig.live(7);
    assert_eq!(rig.replay(5), [Apply(5)]);
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!(rig.replay(6), [Apply(6), Apply(7), Cancel]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!((rig.counters().gaps, rig.counters().lost_batches, rig.counters().replays_asked), (1, 3, 2));
}

/// E3: what is held fills what has left the buffer.
#[test]
fn e3_held_batches_fill_a_short_buffer() {
    let mut rig = Rig::at(0);
    rig.live(2);
    rig.live(3);
    assert_eq!(rig.replay(4), [Apply(2), Apply(3), Apply(4), Cancel]);
    assert_eq!(rig.counters().lost_batches, 1);
}

/// E7: a full hold-back buffer drops the newest, which is then seen and repaired as a gap.
#[test]
fn e7_a_full_buffer_becomes_a_gap() {
    let mut rig = Rig::with(SequencerConfig { max_held_batches: 2, ..config(true) });
    rig.connect();
    rig.live(0);
    assert_eq!(rig.arrive(2), (Arrival::Held, vec![Ask(1)]));
    assert_eq!(rig.arrive(3), (Arrival::Held, vec![]));
    assert_eq!(rig.arrive(4), (Arrival::Dropped, vec![]));
    assert_eq!((rig.stream.held_batches(), rig.counters().held_dropped), (2, 1));
    assert_eq!(rig.replay(1), [Apply(1), Apply(2), Apply(3)], "number 4 is known to be missing");
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!(rig.end(), [Ask(4)]);
    assert_eq!(rig.replay(4), [Apply(4), Cancel]);
    assert_eq!((rig.trust(), rig.counters().gaps, rig.counters().lost_batches), (Trust::Live, 2, 0));
}

/// E7: bytes bound it too; a batch larger than all room comes by replay.
#[test]
fn e7_bytes_are_bounded() {
    let mut rig = Rig::with(SequencerConfig { max_held_bytes: 20, ..config(true) });
    rig.connect();
    rig.live(0);
    let (arrival, did) = rig.arrive_with(2, Some(ts_of(1, 2)), Bytes::from(vec![0; 21]));
    assert_eq!((arrival, did), (Arrival::Dropped, vec![Ask(1)]));
    assert_eq!(rig.stream.held_bytes(), 0);
    assert_eq!(rig.replay(1), [Apply(1)]);
    assert_eq!(rig.replay(2), [Apply(2), Cancel]);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E4, E7: a number that was dropped and whose replay is given up is not forgotten.
#[test]
fn e4_a_dropped_number_that_cannot_be_had() {
    let mut rig = Rig::with(SequencerConfig { max_held_batches: 0, ..config(true) });
    rig.connect();
    rig.live(0);
    rig.live(2);
    for _ in 0..3 {
        rig.pass(TIMEOUT);
    }
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!(rig.live(3), [Ask(1)]);
    for seq in 1..3 {
        assert_eq!(rig.replay(seq), [Apply(seq)]);
    }
    assert_eq!(rig.replay(3), [Apply(3), Cancel]);
    assert_eq!((rig.trust(), rig.counters().lost_batches), (Trust::Live, 0), "it came after all");
}

/// E4: a history that breaks off and is not answered again leaves doubt until the next number.
#[test]
fn e4_history_that_breaks_off() {
    let broken_off = || {
        let mut rig = Rig::with(config(true));
        rig.connect();
        rig.replay(0);
        (0..4).for_each(|_| drop(rig.pass(TIMEOUT)));
        assert_eq!(rig.trust(), Trust::Partial(Overcredit));
        rig
    };
    let mut rig = broken_off();
    assert_eq!((rig.live(1), rig.trust()), (vec![Apply(1)], Trust::Live));
    let mut rig = broken_off();
    assert_eq!((rig.live(2), rig.trust()), (vec![Ask(1)], Trust::Repairing));

    // A number that was dropped is known to be missing, though nothing before it was credited.
    let mut rig = Rig::with(SequencerConfig { max_held_batches: 1, ..config(true) });
    rig.connect();
    rig.live(3);
    rig.live(4);
    (0..3).for_each(|_| drop(rig.pass(TIMEOUT)));
    assert_eq!((rig.stream.watermark(), rig.trust()), (Some(EventSeq(3)), Trust::Partial(Overcredit)));
}

/// E3: a request that fails at once is not repeated at once, and compares the process again.
#[test]
fn e3_a_failing_endpoint_is_not_hammered() {
    let mut rig = Rig::at(4);
    rig.live(6);
    assert_eq!((rig.fail(), rig.fail()), (vec![], vec![]), "a second report of the same is none");
    assert_eq!(rig.pass(TIMEOUT - Duration::from_millis(1)), []);
    assert_eq!(rig.pass(Duration::from_millis(1)), [Ask(4)]);
    assert_eq!(rig.replay(4), []);
    assert_eq!(rig.replay(5), [Apply(5), Apply(6), Cancel]);
    let counters = rig.counters();
    assert_eq!((rig.trust(), counters.replays_failed, counters.duplicate_batches), (Trust::Live, 1, 0));

    rig.live(8);
    rig.fail();
    for _ in 0..2 {
        assert_eq!(rig.pass(TIMEOUT), [Ask(6)]);
        rig.fail();
    }
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!((rig.stream.watermark(), rig.counters().lost_batches), (Some(EventSeq(8)), 1));
}

/// E3: a long history over a connection that breaks is had in pieces, without a pause between them.
#[test]
fn e3_an_answer_that_breaks_behind_something_new_is_asked_for_at_once() {
    let mut rig = Rig::at(4);
    rig.live(9);
    assert_eq!(rig.replay(5), [Apply(5)]);
    assert_eq!(rig.fail(), [Ask(5)]);
    assert_eq!((rig.replay(5), rig.replay(6)), (vec![], vec![Apply(6)]));
    assert_eq!(rig.fail(), [Ask(6)]);
    assert_eq!(rig.trust(), Trust::Repairing);
}

/// E3: an endpoint that breaks behind the batch that we have is not asked for ever.
#[test]
fn e3_the_batch_at_the_watermark_alone_is_no_answer() {
    let mut rig = Rig::at(4);
    rig.live(6);
    rig.fail();
    for _ in 0..2 {
        assert_eq!(rig.pass(TIMEOUT), [Ask(4)]);
        assert_eq!(rig.replay(4), []);
        rig.fail();
    }
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!((rig.stream.watermark(), rig.counters().lost_batches), (Some(EventSeq(6)), 1));
}

/// E3: the number of the end mark is the end mark, and live it is nothing.
#[test]
fn e3_the_end_mark_is_never_data() {
    let mut rig = Rig::plain();
    assert_eq!(rig.arrive(u64::MAX), (Arrival::NotData, vec![]));
    assert_eq!((rig.trust(), rig.stream.watermark()), (Trust::Partial(Miss), None));

    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.replay(u64::MAX), []);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E7: the highest number there is overflows nothing.
#[test]
fn e7_numbers_at_the_edge() {
    let mut rig = Rig::plain();
    rig.live(0);
    rig.live(u64::MAX - 1);
    assert_eq!((rig.live(u64::MAX - 1), rig.live(1)), (vec![], vec![]));
    assert_eq!(rig.counters().lost_batches, u64::MAX - 2);
    rig.life = 2;
    assert_eq!(rig.live(3), [Clear, Apply(3)]);
    assert_eq!(rig.counters().lost_batches, u64::MAX, "as far as it counts");
}

// ---- restarts ------------------------------------------------------------------------------------------

/// E5: on one connection, a number that we passed in a newer batch is a restart.
#[test]
fn e5_newer_is_a_restart() {
    let mut rig = Rig::plain();
    (0..5).for_each(|seq| drop(rig.live(seq)));
    rig.life = 2;
    assert_eq!(rig.arrive(0), (Arrival::Restarted(RestartRule::Newer), vec![Clear, Apply(0)]));
    assert_eq!((rig.trust(), rig.counters().restarts_newer, rig.counters().gaps), (Trust::Live, 1, 0));

    rig.life = 3;
    assert_eq!(rig.arrive(0), (Arrival::Restarted(RestartRule::Newer), vec![Clear, Apply(0)]));
    rig.live(1);
    rig.life = 4;
    assert_eq!(rig.live(1), [Clear, Apply(1)], "its number 0 was not heard");
    assert_eq!(rig.trust(), Trust::Partial(Miss));
}

/// E5: an old batch is a duplicate, one without a time too, and so is the very one after a clock step.
#[test]
fn e5_not_newer_is_a_duplicate() {
    let mut rig = Rig::plain();
    assert_eq!(rig.arrive_with(0, Some(900.0), Bytes::from_static(b"a")).1, [Apply(0)]);
    assert_eq!(rig.arrive_with(1, Some(500.0), Bytes::from_static(b"b")).1, [Apply(1)]);
    assert_eq!(rig.arrive_with(0, Some(900.0), Bytes::from_static(b"a")), (Arrival::Duplicate, vec![]));
    assert_eq!(rig.arrive_with(1, Some(500.0), Bytes::from_static(b"c")), (Arrival::Duplicate, vec![]));
    assert_eq!(rig.arrive_with(1, None, Bytes::from_static(b"c")), (Arrival::Duplicate, vec![]));
    assert_eq!(rig.arrive_with(1, Some(f64::NAN), Bytes::from_static(b"c")), (Arrival::Duplicate, vec![]));
    assert_eq!(rig.counters().restarts(), 0);
}

/// E5, case C07: after a lost connection a number that we passed is a restart unless we had the batch.
#[test]
fn e5_c07_after_a_lost_connection() {
    let mut rig = Rig::plain();
    (0..3).for_each(|seq| drop(rig.live(seq)));
    rig.disconnect();
    rig.connect();
    assert_eq!(rig.stream.reasons(), Reasons::from_iter([Reason::Unproven]), "nobody can be asked");
    assert_eq!(rig.arrive(1), (Arrival::Duplicate, vec![]), "we had it");
    let other = rig.arrive_with(1, None, Bytes::from_static(b"other"));
    assert_eq!(other, (Arrival::Restarted(RestartRule::Reconnected), vec![Clear, Apply(1)]));
    assert_eq!((rig.trust(), rig.counters().restarts_reconnected), (Trust::Partial(Miss), 1));

    let mut rig = Rig::plain();
    (0..200).for_each(|seq| drop(rig.live(seq)));
    rig.disconnect();
    rig.connect();
    let forgotten = rig.arrive(0);
    assert_eq!(forgotten, (Arrival::Restarted(RestartRule::Reconnected), vec![Clear, Apply(0)]));
    assert_eq!((rig.trust(), rig.counters().gaps), (Trust::Live, 0));
}

/// E5: the batches of a dead process are no batches that we had.
#[test]
fn e5_a_new_process_is_remembered_afresh() {
    let mut rig = Rig::plain();
    (0..6).for_each(|seq| drop(rig.live(seq)));
    rig.life = 2;
    (0..4).for_each(|seq| drop(rig.live(seq)));
    rig.disconnect();
    rig.connect();
    (0..4).for_each(|seq| assert_eq!(rig.arrive(seq).0, Arrival::Duplicate));
    rig.life = 1;
    assert_eq!(rig.arrive(3).0, Arrival::Restarted(RestartRule::Reconnected));
}

/// E5: once a batch was applied after the reconnect, only newer batches restart again.
#[test]
fn e5_a_lost_connection_is_forgotten_after_the_next_batch() {
    let mut rig = Rig::plain();
    (0..3).for_each(|seq| drop(rig.live(seq)));
    rig.disconnect();
    rig.connect();
    assert_eq!(rig.live(3), [Apply(3)]);
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.arrive_with(1, None, Bytes::from_static(b"other")).0, Arrival::Duplicate);
}

/// E5: with a replay endpoint a restarted stream's history is asked from 0, and its batches wait.
#[test]
fn e5_restart_asks_for_the_new_history() {
    let mut rig = Rig::at(6);
    rig.life = 2;
    assert_eq!(rig.arrive(2), (Arrival::Restarted(RestartRule::Newer), vec![Clear, Ask(0)]));
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!(rig.replay(0), [Apply(0)]);
    assert_eq!(rig.replay(1), [Apply(1), Apply(2), Cancel]);
    assert_eq!((rig.trust(), rig.counters().gaps), (Trust::Live, 0));

    rig.life = 3;
    assert_eq!(rig.live(0), [Clear, Apply(0)], "0 is the beginning, nothing to ask");
    assert_eq!(rig.trust(), Trust::Live);
}

/// E5: a restart while batches wait drops those of the dead process.
#[test]
fn e5_restart_while_batches_wait() {
    let mut rig = Rig::at(2);
    rig.live(5);
    rig.live(6);
    rig.life = 2;
    assert_eq!(rig.arrive(0), (Arrival::Restarted(RestartRule::Newer), vec![Cancel, Clear, Apply(0)]));
    assert_eq!((rig.stream.held_batches(), rig.trust()), (0, Trust::Live));
    assert_eq!(rig.live(1), [Apply(1)]);

    // The number lies in the hole: only its time tells.
    let mut rig = Rig::at(2);
    rig.live(6);
    rig.life = 2;
    assert_eq!(rig.arrive(4), (Arrival::Restarted(RestartRule::Newer), vec![Cancel, Clear, Ask(0)]));
    assert_eq!(rig.stream.held_batches(), 1);

    // At the first connect, with nothing applied.
    let mut rig = Rig::with(config(true));
    rig.connect();
    rig.live(5);
    rig.live(6);
    rig.life = 2;
    assert_eq!(rig.live(0), [Cancel, Clear, Apply(0)]);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E5: a replay that contradicts a held batch is of a newer process than that.
#[test]
fn e5_a_replay_of_another_process() {
    let mut rig = Rig::at(2);
    rig.live(5);
    rig.life = 2;
    assert_eq!(rig.replay(3), [Cancel, Clear, Ask(0)]);
    assert_eq!((rig.stream.held_batches(), rig.counters().restarts_probed), (0, 1));
    assert_eq!(rig.replay(0), [Apply(0)]);
    rig.end_twice(1);
    assert_eq!(rig.trust(), Trust::Live);
}

// ---- reconnects ----------------------------------------------------------------------------------------

/// E3: the same batch at the watermark is the same process; what was missed comes along; no duplicate.
#[test]
fn e3_reconnect_to_the_same_process() {
    let mut rig = Rig::at(3);
    assert_eq!(rig.disconnect(), []);
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.connect(), [Ask(3)]);
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!(rig.arrive(6), (Arrival::Held, vec![]));
    assert_eq!(rig.replay(3), []);
    assert_eq!(rig.replay(4), [Apply(4)]);
    assert_eq!(rig.replay(5), [Apply(5), Apply(6), Cancel]);
    let counters = rig.counters();
    assert_eq!((rig.trust(), counters.duplicate_batches, counters.gaps), (Trust::Live, 0, 0));

    rig.disconnect();
    assert_eq!(rig.connect(), [Ask(6)]);
    assert_eq!(rig.replay(6), [], "idle");
    rig.end_twice(7);
    assert_eq!((rig.trust(), rig.counters().restarts()), (Trust::Live, 0));

    rig.disconnect();
    rig.connect();
    rig.live(7);
    assert_eq!(rig.replay(6), [Apply(7), Cancel], "verified, and nothing missing");
}

/// E3, E5: another batch at the watermark, or none, is a new process.
#[test]
fn e5_reconnect_to_a_new_process() {
    let mut rig = Rig::at(3);
    rig.disconnect();
    rig.connect();
    rig.life = 2;
    assert_eq!(rig.live(7), [], "it may have come further than we had");
    assert_eq!(rig.replay(3), [Cancel, Clear, Ask(0)]);
    for seq in 0..6 {
        assert_eq!(rig.replay(seq), [Apply(seq)]);
    }
    assert_eq!(rig.replay(6), [Apply(6), Apply(7), Cancel]);
    assert_eq!((rig.trust(), rig.counters().restarts_probed, rig.counters().gaps), (Trust::Live, 1, 0));

    rig.disconnect();
    rig.connect();
    rig.life = 3;
    assert_eq!(rig.end(), [Clear, Ask(0)]);
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!((rig.end(), rig.trust()), (vec![], Trust::Live));
    assert_eq!(rig.live(0), [Apply(0)]);
}

/// E5: while the probe is out, a live batch that decides need not wait for it.
#[test]
fn e5_a_live_batch_decides_before_the_probe() {
    let mut rig = Rig::at(3);
    rig.disconnect();
    rig.connect();
    rig.life = 2;
    assert_eq!(rig.arrive(0), (Arrival::Restarted(RestartRule::Newer), vec![Cancel, Clear, Apply(0)]));
    assert_eq!((rig.trust(), rig.counters().gaps), (Trust::Live, 0));
}

/// E3: a first answer above the watermark cannot be decided.
#[test]
fn e3_reconnect_below_the_buffer_is_undecidable() {
    for first in [4, 6] {
        let mut rig = Rig::at(3);
        rig.disconnect();
        rig.connect();
        assert_eq!(rig.replay(first), [Apply(first)]);
        rig.end_twice(first + 1);
        assert_eq!(rig.trust(), Trust::Partial(Overcredit));
        assert!(rig.stream.reasons().contains(Reason::RestartUndecided));
        assert_eq!((rig.counters().lost_batches, rig.counters().gaps), (first - 4, u64::from(first > 4)));
    }
    let mut rig = Rig::with(SequencerConfig { on_loss: OnLoss::Clear, ..config(true) });
    rig.connect();
    rig.live(0);
    rig.disconnect();
    rig.connect();
    assert_eq!(rig.replay(1), [Clear, Apply(1)]);
    rig.end_twice(2);
    assert_eq!(rig.trust(), Trust::Partial(Miss));
}

/// E3, E4: a probe that is never answered leaves the next number to decide, and doubt until then.
#[test]
fn e4_a_probe_without_an_answer() {
    let unanswered = || {
        let mut rig = Rig::at(3);
        rig.disconnect();
        assert_eq!(rig.connect(), [Ask(3)]);
        assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(3)]);
        assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(3)]);
        rig
    };
    let mut rig = unanswered();
    assert_eq!(rig.pass(TIMEOUT), [Cancel]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!(rig.live(4), [Apply(4)]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit), "a new process may have come as far");

    let mut rig = unanswered();
    rig.pass(TIMEOUT);
    assert_eq!(rig.live(6), [Ask(3)], "still in question, so compared once more");
    assert_eq!((rig.replay(3), rig.replay(4)), (vec![], vec![Apply(4)]));
    assert_eq!(rig.replay(5), [Apply(5), Apply(6), Cancel]);
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = unanswered();
    rig.live(4);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Apply(4)]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));

    let mut rig = unanswered();
    rig.live(6);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Apply(6)]);
    assert_eq!((rig.trust(), rig.counters().lost_batches), (Trust::Partial(Overcredit), 2));

    let mut rig = unanswered();
    rig.pass(TIMEOUT);
    rig.life = 2;
    assert_eq!(rig.live(0), [Clear, Apply(0)]);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E3: a repair that the loss of the connection interrupts goes on as a probe.
#[test]
fn e3_a_repair_outlives_the_connection() {
    let mut rig = Rig::at(3);
    rig.live(6);
    assert_eq!(rig.disconnect(), [Cancel]);
    assert_eq!((rig.trust(), rig.stream.held_batches()), (Trust::Repairing, 0));
    assert_eq!((rig.replay(4), rig.pass(Duration::from_secs(60))), (vec![], vec![]));
    assert_eq!(rig.trust(), Trust::Silent);
    assert_eq!(rig.connect(), [Ask(3)]);
    assert_eq!(rig.replay(3), []);
    (4..=6).for_each(|seq| assert_eq!(rig.replay(seq), [Apply(seq)]));
    rig.end_twice(7);
    assert_eq!((rig.trust(), rig.counters().gaps, rig.counters().lost_batches), (Trust::Live, 1, 0));

    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.replay(0), [Apply(0)]);
    assert_eq!((rig.disconnect(), rig.trust()), (vec![Cancel], Trust::Joining));
    assert_eq!(rig.connect(), [Ask(0)]);
    assert_eq!(rig.replay(0), []);
    rig.end_twice(1);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E5: a connection that comes back without having been seen to go is suspect all the same.
#[test]
fn e5_an_unseen_loss_of_the_connection() {
    let mut rig = Rig::at(3);
    assert_eq!(rig.connect(), [Ask(3)]);
    let mut rig = Rig::plain();
    (0..3).for_each(|seq| drop(rig.live(seq)));
    rig.connect();
    let other = rig.arrive_with(1, None, Bytes::from_static(b"other"));
    assert_eq!(other.0, Arrival::Restarted(RestartRule::Reconnected));
}

/// E4, E5: without a replay endpoint, a higher number after a lost connection is undecidable, and so is
/// the expected one after the endpoint had refused, or with an older time.
#[test]
fn e4_reconnect_without_replay() {
    let reconnected = |refused: bool| {
        let mut rig = Rig::plain();
        (0..3).for_each(|seq| drop(rig.live(seq)));
        rig.disconnect();
        if refused {
            rig.refuse();
        }
        rig.connect();
        rig
    };
    let mut rig = reconnected(false);
    rig.live(4);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));

    let mut rig = reconnected(true);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit), "most likely the process is another");
    assert_eq!(rig.live(3), [Apply(3)]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));

    let mut rig = reconnected(true);
    rig.life = 2;
    assert_eq!(rig.live(0), [Clear, Apply(0)]);
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = reconnected(false);
    assert_eq!(rig.arrive_with(3, Some(1.0), Bytes::from_static(b"old")).1, [Apply(3)]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
}

// ---- a later snapshot ----------------------------------------------------------------------------------

/// E6: a restored stream is asked from its watermark and compared.
#[test]
fn e6_resumed_from_a_snapshot() {
    let before = Rig::at(3);
    let resume = |trust| {
        let mut rig = Rig::with(config(true));
        let (watermark, last) = (before.stream.watermark(), before.stream.last_fingerprint());
        rig.stream = Sequencer::resume(config(true), rig.now, watermark.unwrap(), last.unwrap(), trust);
        assert_eq!(rig.trust(), Trust::Joining);
        assert_eq!(rig.connect(), [Ask(3)]);
        assert_eq!(rig.trust(), Trust::Joining);
        rig
    };
    let mut rig = resume(Reasons::NONE);
    rig.live(5);
    assert_eq!((rig.replay(3), rig.replay(4)), (vec![], vec![Apply(4), Apply(5), Cancel]));
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = resume(Reasons::from_iter([Reason::JoinedLate]));
    assert_eq!(rig.replay(3), []);
    rig.end_twice(4);
    assert_eq!(rig.trust(), Trust::Partial(Miss));

    let mut rig = resume(Reasons::NONE);
    assert_eq!(rig.end(), [Clear, Ask(0)]);
    assert_eq!((rig.end(), rig.trust()), (vec![], Trust::Live));

    let mut rig = resume(Reasons::NONE);
    assert_eq!(rig.replay(9), [Apply(9)]);
    rig.end_twice(10);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));

    let last = before.stream.last_fingerprint().unwrap();
    let mut rig = Rig::plain();
    rig.stream = Sequencer::resume(config(false), rig.now, EventSeq(3), last, Reasons::NONE);
    rig.connect();
    assert_eq!(rig.stream.reasons(), Reasons::from_iter([Reason::Unproven]));
    assert_eq!(rig.live(4), [Apply(4)]);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit), "a new process may have come as far");
}

// ---- trust ---------------------------------------------------------------------------------------------

/// E4: a partial view is live again at the next clear, but not by one from before the loss.
#[test]
fn e4_a_clear_heals() {
    let mut rig = Rig::plain();
    rig.live(0);
    rig.live(4);
    rig.stream.on_cleared(EventSeq(0));
    rig.stream.on_cleared(EventSeq(9));
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    rig.stream.on_cleared(EventSeq(4));
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = Rig::at(0);
    rig.live(9);
    assert_eq!(rig.replay(4), [Apply(4)]);
    rig.stream.on_cleared(EventSeq(4));
    assert_eq!(rig.trust(), Trust::Repairing);
    (5..8).for_each(|seq| assert_eq!(rig.replay(seq), [Apply(seq)]));
    assert_eq!(rig.replay(8), [Apply(8), Apply(9), Cancel]);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E4: a restart heals too.
#[test]
fn e4_a_restart_heals() {
    let mut rig = Rig::plain();
    rig.live(0);
    rig.live(4);
    rig.life = 2;
    rig.live(0);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E4: without history, a connected rank that has said nothing within the grace is marked until it speaks.
#[test]
fn e4_never_heard_until_heard() {
    let mut rig = Rig::plain();
    assert_eq!(rig.stream.next_deadline(), Some(Moment::from_millis(10_000)));
    rig.pass(Duration::from_millis(9_999));
    assert_eq!(rig.stream.reasons(), Reasons::from_iter([Reason::NoHistory]));
    rig.pass(Duration::from_millis(1));
    let marked = Reasons::from_iter([Reason::NoHistory, Reason::NeverHeard]);
    assert_eq!((rig.stream.reasons(), rig.stream.next_deadline()), (marked, None));
    assert_eq!(rig.trust(), Trust::Partial(Miss), "it is there");
    rig.live(0);
    assert_eq!((rig.stream.reasons(), rig.stream.last_heard()), (Reasons::NONE, Some(rig.now)));
    rig.pass(Duration::from_secs(3_600));
    assert_eq!(rig.trust(), Trust::Live);
}

/// E4, case C47: no connection for five seconds is silent, from the beginning and after a loss, and whether or
/// not anybody refuses; a connection ends it.
#[test]
fn e4_c47_no_connection_is_silent() {
    let mut rig = Rig::with(config(true));
    assert_eq!(rig.stream.next_deadline(), Some(Moment::from_millis(5_000)));
    rig.pass(Duration::from_millis(4_999));
    assert_eq!(rig.trust(), Trust::Joining);
    rig.pass(Duration::from_millis(1));
    assert_eq!((rig.trust(), rig.stream.next_deadline()), (Trust::Silent, None));
    rig.connect();
    assert_eq!(rig.trust(), Trust::Joining);

    for refuses in [false, true] {
        let mut rig = Rig::at(1);
        rig.disconnect();
        if refuses {
            rig.refuse();
        }
        rig.pass(Duration::from_millis(4_999));
        assert_eq!(rig.trust(), Trust::Live);
        rig.pass(Duration::from_millis(1));
        assert_eq!((rig.trust(), rig.stream.next_deadline()), (Trust::Silent, None));
        assert_eq!(rig.connect(), [Ask(1)]);
        assert_eq!(rig.trust(), Trust::Repairing);
        assert_eq!(rig.replay(1), []);
        rig.end_twice(2);
        assert_eq!(rig.trust(), Trust::Live);
    }
}

/// E4: events that are handed in need no connection.
#[test]
fn e4_fed_ranks_are_never_silent() {
    let mut rig = Rig::with(SequencerConfig { link: Link::Fed, ..config(false) });
    rig.pass(Duration::from_secs(3_600));
    assert_eq!(rig.trust(), Trust::Partial(Miss));
    rig.live(0);
    rig.pass(Duration::from_secs(3_600));
    assert_eq!(rig.trust(), Trust::Live);
}

/// E4: without a replay endpoint, an absence of a second and more leaves the next number undecided.
#[test]
fn e4_a_long_absence_is_suspect() {
    for (away, trust) in [(999, Trust::Live), (1_000, Trust::Partial(Overcredit))] {
        let mut rig = Rig::plain();
        rig.live(0);
        rig.disconnect();
        rig.pass(Duration::from_millis(away));
        rig.connect();
        assert_eq!(rig.trust(), Trust::Partial(Overcredit), "until the next number tells");
        rig.live(1);
        assert_eq!(rig.trust(), trust);
    }
}

// ---- a replay is over when it is complete ----------------------------------------------------------------

/// E10: an answer with a hole and its end mark is no end, also where nothing is heard live.
#[test]
fn e10_a_lossy_answer_with_its_end_mark_is_asked_again() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!((rig.replay(0), rig.replay(1), rig.replay(3)), (vec![Apply(0)], vec![Apply(1)], vec![]));
    assert_eq!(rig.end(), [Ask(2)]);
    assert_eq!(rig.trust(), Trust::Joining);
    assert_eq!((rig.replay(2), rig.replay(3)), (vec![Apply(2)], vec![Apply(3)]));
    rig.end_twice(4);
    assert_eq!((rig.trust(), rig.counters().lost_batches), (Trust::Live, 0));
}

/// E10: a tail that was lost together with everything behind it is found by asking once more.
#[test]
fn e10_a_lost_tail_is_found() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    rig.replay(0);
    assert_eq!(rig.end(), [Ask(1)]);
    assert_eq!(rig.replay(1), [Apply(1)]);
    rig.end_twice(2);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E10: what two answers in a row leave out is lost; what they show behind it is had.
#[test]
fn e10_two_answers_without_it_and_it_is_lost() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    rig.replay(0);
    rig.replay(2);
    rig.replay(3);
    assert_eq!(rig.end(), [Ask(1)]);
    // The first answer began with what is behind the hole: it has left the buffer.
    assert_eq!(rig.replay(2), [Apply(2)]);
    assert_eq!(rig.replay(3), [Apply(3)]);
    rig.end_twice(4);
    assert_eq!((rig.trust(), rig.counters().lost_batches), (Trust::Partial(Overcredit), 1));

    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!((rig.replay(0), rig.replay(1), rig.replay(3)), (vec![Apply(0)], vec![Apply(1)], vec![]));
    assert_eq!(rig.end(), [Ask(2)]);
    assert_eq!((rig.replay(1), rig.replay(3), rig.end()), (vec![], vec![], vec![Ask(2)]));
    assert_eq!((rig.replay(1), rig.replay(3), rig.end()), (vec![], vec![], vec![Ask(3)]), "lost: behind it");
    assert_eq!(rig.replay(3), [Apply(3)]);
    rig.end_twice(4);
    assert_eq!((rig.trust(), rig.counters().lost_batches), (Trust::Partial(Overcredit), 1));
    assert!(rig.said.contains(&Notice::Lost { from: EventSeq(2), to: EventSeq(2) }));
}

/// E10: what was shown once and never again is lost, and the view says so without any further publication.
#[test]
fn e10_what_was_shown_and_is_gone_is_lost() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!((rig.replay(0), rig.replay(3)), (vec![Apply(0)], vec![]));
    assert_eq!(rig.end(), [Ask(1)]);
    assert_eq!(rig.end(), [Ask(1)]);
    assert_eq!(rig.end(), []);
    assert_eq!((rig.trust(), rig.counters().lost_batches), (Trust::Partial(Overcredit), 3));
}

/// E10: a busy engine does not keep the rank repairing: what meets a live number is whole.
#[test]
fn e10_meeting_what_is_live_is_enough() {
    let mut rig = Rig::at(2);
    rig.live(5);
    assert_eq!(rig.replay(3), [Apply(3)]);
    assert_eq!(rig.arrive(6).0, Arrival::Held);
    assert_eq!(rig.replay(4), [Apply(4), Apply(5), Apply(6), Cancel]);
    assert_eq!(rig.trust(), Trust::Live);
    assert!(rig.said.contains(&Notice::Repaired { from: EventSeq(3), to: EventSeq(6) }));
}

/// E3, E10: a publisher that ignores the number asked for does not keep us asking.
#[test]
fn e10_repeated_answers_end() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    rig.replay(0);
    assert_eq!(rig.end(), [Ask(1)]);
    assert_eq!((rig.replay(0), rig.end()), (vec![], vec![]));
    assert_eq!(rig.trust(), Trust::Live);
}

/// E3: only the end mark on an unbroken connection that has carried the batch is a publisher without a buffer.
#[test]
fn e3_a_publisher_without_a_buffer_is_no_restart() {
    let mut rig = Rig::with(probing(true));
    rig.connect();
    rig.end();
    rig.live(0);
    assert_eq!(rig.pass(Duration::from_secs(6)), [Ask(0)]);
    assert_eq!(rig.end(), []);
    assert_eq!((rig.trust(), rig.said.as_slice()), (Trust::Live, &[Notice::NoBuffer][..]));
    // From now on as one without a replay endpoint.
    rig.disconnect();
    assert_eq!(rig.connect(), []);
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));
    assert_eq!(rig.live(1), [Apply(1)]);
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.counters().restarts(), 0);

    // One that had answered before keeps a buffer: then it is another process.
    let mut rig = Rig::with(probing(true));
    rig.connect();
    rig.replay(0);
    rig.end_twice(1);
    rig.live(1);
    assert_eq!(rig.pass(Duration::from_secs(6)), [Ask(1)]);
    assert_eq!(rig.end(), [Clear, Ask(0), Reconnect]);
}

// ---- quiet is checked ------------------------------------------------------------------------------------

fn probing(has_replay: bool) -> SequencerConfig {
    let probe = ProbeConfig {
        interval: Duration::from_secs(5),
        max_interval: Duration::from_secs(60),
        answer_timeout: Duration::from_secs(2),
        seed: 0,
    };
    SequencerConfig { probe: Some(probe), ..config(has_replay) }
}

/// A rank that was heard up to `last` and is quiet.
fn quiet(has_replay: bool, last: u64) -> Rig {
    let mut rig = Rig::with(probing(has_replay));
    rig.connect();
    if has_replay {
        rig.end();
    }
    (0..=last).for_each(|seq| drop(rig.live(seq)));
    rig
}

const FIVE: Duration = Duration::from_secs(5);

/// E9: the same batch proves life; the wait doubles to its limit, and a live batch resets it.
#[test]
fn e9_the_wait_doubles_while_nothing_is_new() {
    let mut rig = quiet(true, 2);
    for wait in [5, 10, 20, 40, 60, 60] {
        assert_eq!(rig.pass(Duration::from_millis(wait * 1_000 - 1)), [], "{wait}");
        assert_eq!(rig.pass(Duration::from_millis(1)), [Ask(2)], "{wait}");
        assert_eq!(rig.trust(), Trust::Live, "a probe changes nothing while it is open");
        assert_eq!((rig.replay(2), rig.end()), (vec![], vec![]));
        assert_eq!(rig.trust(), Trust::Live);
    }
    rig.live(3);
    assert_eq!(rig.pass(FIVE), [Ask(3)]);
    assert_eq!(rig.counters().duplicate_batches, 0);
}

/// E9: a live batch ends the probe and is not held back by it.
#[test]
fn e9_a_live_batch_ends_the_probe() {
    let mut rig = quiet(true, 2);
    assert_eq!(rig.pass(FIVE), [Ask(2)]);
    assert_eq!(rig.arrive(3), (Arrival::Applied, vec![Cancel, Apply(3)]));
    assert_eq!((rig.replay(2), rig.end()), (vec![], vec![]), "late");
    assert_eq!((rig.trust(), rig.counters().late_answers), (Trust::Live, 2));
}

/// E9: a rank never heard is asked from 0; only the end mark is complete.
#[test]
fn e9_a_rank_never_heard() {
    let mut rig = Rig::with(probing(true));
    rig.connect();
    rig.end();
    assert_eq!(rig.pass(FIVE), [Ask(0)]);
    assert_eq!((rig.end(), rig.trust()), (vec![], Trust::Live));
}

/// E9: what the live path does not bring within a second makes it deaf.
#[test]
fn e9_a_deaf_live_path_is_made_anew() {
    let mut rig = quiet(true, 2);
    assert_eq!(rig.pass(FIVE), [Ask(2)]);
    assert_eq!((rig.replay(2), rig.replay(3)), (vec![], vec![Cancel]));
    assert_eq!(rig.pass(Duration::from_millis(999)), []);
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.pass(Duration::from_millis(1)), [Ask(2), Reconnect]);
    assert_eq!((rig.trust(), rig.counters().deaf_links), (Trust::Repairing, 1));
    assert_eq!(rig.disconnect(), [Cancel]);
    assert_eq!(rig.connect(), [Ask(2)]);
    assert_eq!((rig.replay(2), rig.replay(3)), (vec![], vec![Apply(3)]));
    rig.end_twice(4);
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = quiet(true, 2);
    rig.pass(FIVE);
    rig.replay(2);
    rig.replay(3);
    assert_eq!(rig.live(3), [Apply(3)], "it was only slower");
    assert_eq!(rig.pass(Duration::from_secs(1)), []);
    assert_eq!((rig.trust(), rig.counters().deaf_links), (Trust::Live, 0));
}

/// E9, E3: another batch at the watermark is another process, though no connection was lost.
#[test]
fn e9_a_restart_behind_an_unbroken_connection() {
    let mut rig = quiet(true, 2);
    rig.pass(FIVE);
    rig.life = 2;
    assert_eq!(rig.replay(2), [Cancel, Clear, Ask(0), Reconnect]);
    assert_eq!(rig.trust(), Trust::Repairing);
}

/// E9: no answer, no answer, no handshake: silent. Any sign of life ends it.
#[test]
fn e9_nobody_answers() {
    let mut rig = quiet(true, 2);
    assert_eq!(rig.pass(FIVE), [Ask(2)]);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Ask(2)]);
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.pass(TIMEOUT), [Cancel, Try]);
    let tried = rig.asked.unwrap();
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.run(|stream, now, out| stream.on_tried(now, tried, false, out)), []);
    assert_eq!(rig.stream.reasons(), Reasons::from_iter([Reason::ProbeFailed]));
    assert_eq!(rig.pass(FIVE), [Ask(2)], "and it is tried again");
    assert_eq!((rig.replay(2), rig.end(), rig.trust()), (vec![], vec![], Trust::Live));

    let mut rig = quiet(true, 2);
    rig.pass(FIVE);
    rig.pass(TIMEOUT);
    rig.pass(TIMEOUT);
    let tried = rig.asked.unwrap();
    rig.run(|stream, now, out| stream.on_tried(now, tried, true, out));
    assert_eq!(rig.trust(), Trust::Live, "busy, and there");
}

/// E9: without history only a second connection can tell, and it is tried twice.
#[test]
fn e9_without_a_replay_endpoint() {
    let mut rig = quiet(false, 2);
    assert_eq!(rig.pass(FIVE), [Try]);
    for (last, did) in [(false, vec![Try]), (true, vec![])] {
        let tried = rig.asked.unwrap();
        assert_eq!(rig.run(|stream, now, out| stream.on_tried(now, tried, false, out)), did);
        assert_eq!(rig.trust() == Trust::Silent, last);
    }
    assert_eq!(rig.pass(FIVE), [Try]);
    let tried = rig.asked.unwrap();
    rig.run(|stream, now, out| stream.on_tried(now, tried, true, out));
    assert_eq!(
        rig.stream.reasons(),
        Reasons::from_iter([Reason::Unproven]),
        "our own connection may be dead"
    );
    rig.live(3);
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = Rig::with(SequencerConfig { link: Link::Bound, ..probing(false) });
    rig.connect();
    rig.live(0);
    assert_eq!(rig.pass(FIVE), [], "it can only be heard");
    assert_eq!(rig.trust(), Trust::Live);
}

/// E9: while a request waits for its turn no attempt is used up.
#[test]
fn e9_waiting_for_a_slot_costs_no_attempt() {
    let mut rig = Rig::with(config(true));
    rig.prompt = false;
    assert_eq!(rig.connect(), [Ask(0)]);
    assert_eq!(rig.pass(Duration::from_secs(3_600)), []);
    let request = rig.asked.unwrap();
    rig.stream.on_replay_asked(rig.now, request);
    assert_eq!(rig.replay(0), [Apply(0)]);
    assert_eq!(rig.counters().replays_failed, 0);
}

/// E9: history that was given up is asked for again, slowly, and then had.
#[test]
fn e9_what_was_given_up_is_tried_again() {
    let mut rig = Rig::with(probing(true));
    rig.connect();
    for _ in 0..3 {
        rig.pass(TIMEOUT);
    }
    assert_eq!(rig.stream.reasons(), Reasons::from_iter([Reason::NoHistory]));
    // The second connection was tried meanwhile, and shakes hands.
    let tried = rig.asked.unwrap();
    rig.run(|stream, now, out| stream.on_tried(now, tried, true, out));
    assert!((0..60).any(|_| rig.pass(Duration::from_secs(1)) == [Ask(0)]));
    assert_eq!(rig.replay(0), [Cancel, Ask(0)]);
    assert_eq!((rig.replay(0), rig.replay(1)), (vec![Apply(0)], vec![Apply(1)]));
    rig.end_twice(2);
    assert_eq!(rig.trust(), Trust::Live);
}

/// E9: a large last batch is not fetched every few seconds.
#[test]
fn e9_a_large_batch_is_asked_for_seldom() {
    let mut rig = quiet(true, 2);
    let large = Bytes::from(vec![7; 65 << 10]);
    rig.arrive_with(3, Some(2_000.0), large);
    let waited = (0..90).take_while(|_| rig.pass(Duration::from_secs(1)).is_empty()).count();
    assert!((59..=61).contains(&waited), "{waited} s");
}

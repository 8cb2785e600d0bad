//! Each rule of the order, one stream at a time. Random histories are in the integration tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::ids::Moment;
use crate::trust::MayErr::{Miss, Overcredit};
use crate::trust::Trust;

/// What a step is, in short.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Did {
    Apply(u64),
    Clear,
    Ask(u64),
    Cancel,
}
use Did::{Apply, Ask, Cancel, Clear};

/// A sequencer, a clock, and the last request made.
struct Rig {
    stream: Sequencer,
    now: Moment,
    asked: Option<ReplayId>,
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
        replay_timeout: TIMEOUT,
        queue_timeout: TIMEOUT,
        max_replay_attempts: 3,
        silence_grace: Duration::from_secs(10),
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
        Self { stream: Sequencer::new(config, Moment(0)), now: Moment(0), asked: None, life: 1 }
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
        steps
            .into_iter()
            .map(|step| match step {
                Step::Apply(batch) => Apply(batch.seq.0),
                Step::Clear => Clear,
                Step::AskReplay { request, from } => {
                    assert!(self.asked.is_none_or(|last| request > last), "a request's name is reused");
                    self.asked = Some(request);
                    Ask(from.0)
                }
                Step::CancelReplay { request } => {
                    assert!(self.asked >= Some(request));
                    Cancel
                }
            })
            .collect()
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
        assert_eq!(self.run(|stream, now, out| stream.on_refused(now, out)), []);
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
    assert_eq!(rig.end(), []);
    assert_eq!(rig.arrive(3), (Arrival::Duplicate, vec![]));
    assert_eq!((rig.trust(), rig.counters().replays_asked), (Trust::Live, 1));
}

/// E3: a history that begins above 0 is lost in part: applied, and the view may miss.
#[test]
fn e3_history_lost_at_the_first_connect_may_miss() {
    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.replay(5), [Apply(5)]);
    assert_eq!(rig.replay(6), [Apply(6)]);
    assert_eq!(rig.end(), []);
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
    assert_eq!((rig.end(), rig.counters().gaps), (vec![Ask(0)], 1));
    assert_eq!(rig.end(), [Apply(2)], "three answers without it");
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
    assert_eq!(rig.trust(), Trust::Joining);
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
    assert_eq!(rig.end(), [Ask(5)]);
    assert_eq!(rig.end(), [Apply(8)]);
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

/// E3: the number of the end mark is the end mark, and live it is nothing.
#[test]
fn e3_the_end_mark_is_never_data() {
    let mut rig = Rig::plain();
    assert_eq!(rig.arrive(u64::MAX), (Arrival::NotData, vec![]));
    assert_eq!((rig.trust(), rig.stream.watermark()), (Trust::Joining, None));

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
    assert_eq!(rig.trust(), Trust::Live);
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
    assert_eq!(rig.end(), []);
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
    assert_eq!((rig.replay(6), rig.end()), (vec![], vec![]), "idle");
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
        assert_eq!(rig.end(), []);
        assert_eq!(rig.trust(), Trust::Partial(Overcredit));
        assert_eq!((rig.counters().lost_batches, rig.counters().gaps), (first - 4, u64::from(first > 4)));
    }
    let mut rig = Rig::with(SequencerConfig { on_loss: OnLoss::Clear, ..config(true) });
    rig.connect();
    rig.live(0);
    rig.disconnect();
    rig.connect();
    assert_eq!(rig.replay(1), [Clear, Apply(1)]);
    assert_eq!((rig.end(), rig.trust()), (vec![], Trust::Partial(Miss)));
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
    assert_eq!(rig.connect(), [Ask(3)]);
    assert_eq!(rig.replay(3), []);
    (4..=6).for_each(|seq| assert_eq!(rig.replay(seq), [Apply(seq)]));
    assert_eq!(rig.end(), []);
    assert_eq!((rig.trust(), rig.counters().gaps, rig.counters().lost_batches), (Trust::Live, 1, 0));

    let mut rig = Rig::with(config(true));
    rig.connect();
    assert_eq!(rig.replay(0), [Apply(0)]);
    assert_eq!((rig.disconnect(), rig.trust()), (vec![Cancel], Trust::Joining));
    assert_eq!(rig.connect(), [Ask(0)]);
    assert_eq!((rig.replay(0), rig.end(), rig.trust()), (vec![], vec![], Trust::Live));
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
    let mut rig = resume(Trust::Live);
    rig.live(5);
    assert_eq!((rig.replay(3), rig.replay(4)), (vec![], vec![Apply(4), Apply(5), Cancel]));
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = resume(Trust::Partial(Miss));
    assert_eq!((rig.replay(3), rig.end()), (vec![], vec![]));
    assert_eq!(rig.trust(), Trust::Partial(Miss));

    let mut rig = resume(Trust::Live);
    assert_eq!(rig.end(), [Clear, Ask(0)]);
    assert_eq!((rig.end(), rig.trust()), (vec![], Trust::Live));

    let mut rig = resume(Trust::Live);
    assert_eq!((rig.replay(9), rig.end()), (vec![Apply(9)], vec![]));
    assert_eq!(rig.trust(), Trust::Partial(Overcredit));

    let last = before.stream.last_fingerprint().unwrap();
    let mut rig = Rig::plain();
    rig.stream = Sequencer::resume(config(false), rig.now, EventSeq(3), last, Trust::Live);
    rig.connect();
    assert_eq!((rig.live(4), rig.trust()), (vec![Apply(4)], Trust::Live));
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

/// E4, case C47: never heard within the grace is silent; the first message ends it; idle is not silent.
#[test]
fn e4_c47_silent_until_heard() {
    let mut rig = Rig::plain();
    assert_eq!(rig.stream.next_deadline(), Some(Moment::from_millis(10_000)));
    rig.pass(Duration::from_millis(9_999));
    assert_eq!(rig.trust(), Trust::Joining);
    rig.pass(Duration::from_millis(1));
    assert_eq!((rig.trust(), rig.stream.next_deadline()), (Trust::Silent, None));
    rig.live(0);
    assert_eq!((rig.trust(), rig.stream.last_heard()), (Trust::Live, Some(rig.now)));
    rig.pass(Duration::from_secs(3_600));
    assert_eq!(rig.trust(), Trust::Live);

    let mut rig = Rig::replaying();
    rig.pass(Duration::from_secs(3_600));
    assert_eq!(rig.trust(), Trust::Live, "its replay endpoint answered");
}

/// E4: a lost connection whose endpoint refuses for two seconds is silent until it is back.
#[test]
fn e4_refused_for_two_seconds() {
    let mut rig = Rig::at(1);
    rig.disconnect();
    rig.refuse();
    assert_eq!(rig.trust(), Trust::Live);
    assert_eq!(rig.stream.next_deadline(), Some(rig.now + Duration::from_secs(2)));
    rig.pass(Duration::from_millis(1_999));
    rig.refuse();
    assert_eq!(rig.trust(), Trust::Live);
    rig.pass(Duration::from_millis(1));
    assert_eq!((rig.trust(), rig.stream.next_deadline()), (Trust::Silent, None));
    assert_eq!(rig.connect(), [Ask(1)]);
    assert_eq!(rig.trust(), Trust::Repairing);
    assert_eq!((rig.replay(1), rig.end()), (vec![], vec![]));
    assert_eq!(rig.trust(), Trust::Live);
}

/// E4: before the first connection only the grace counts.
#[test]
fn e4_refused_from_the_start() {
    let mut rig = Rig::with(config(false));
    rig.refuse();
    rig.pass(Duration::from_secs(3));
    assert_eq!(rig.trust(), Trust::Joining);
    rig.pass(Duration::from_secs(7));
    assert_eq!(rig.trust(), Trust::Silent);
    rig.connect();
    assert_eq!(rig.trust(), Trust::Silent);
    rig.live(0);
    assert_eq!(rig.trust(), Trust::Live);
}

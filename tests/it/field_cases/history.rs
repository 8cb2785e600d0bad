//! Requests for history, and the publishers' answers to them.

use bytes::Bytes;
use rankwise::events::order::ReplayId;
use rankwise::ids::{EventSeq, RankKey, SourceId};
use rankwise::indexer::Input;
use serde_json::Value;

use super::reading::{Fields, Run, count, fail, list, not_runnable};
use super::stage::Stage;
use super::stream::{frames_of, payload};

/// A request for history that the product made.
pub struct Request {
    pub source: SourceId,
    pub rank: RankKey,
    pub id: ReplayId,
    pub from: u64,
    /// It was made because a connection has come about.
    pub at_connect: bool,
}

/// What a case says that a request gets.
pub struct Script {
    /// What the request must ask for; `None` if the case does not say.
    from: Option<u64>,
    answers: Answers,
    /// Whether an end mark closes the answer.
    ends: bool,
}

enum Answers {
    /// `{seq, events, …}` each, to be written when they are asked for.
    Batches(Vec<Value>),
    Frames(Vec<Vec<Bytes>>),
}

impl Stage {
    pub(super) fn replay_serves(&mut self, step: &Value) -> Run {
        let known = ["worker", "dp_rank", "from", "batches", "end"];
        let step = Fields::only("replay_serves", step, &known)?;
        let batches = step.get("batches").map(|batches| list("batches", batches)).transpose()?.unwrap_or(&[]);
        for batch in batches {
            Fields::only("replay_serves batch", batch, &["seq", "events", "batch_rank", "topic"])?;
        }
        let ends = match step.text("end")? {
            None | Some("ok") => true,
            Some("timeout") => false,
            Some(other) => return not_runnable(format!("replay_serves with end {other}")),
        };
        let from = Some(step.need_count("from")?);
        let script = Script { from, answers: Answers::Batches(batches.to_vec()), ends };
        self.publisher(&step.rank()?).scripts.push_back(script);
        Ok(())
    }

    pub(super) fn raw_replay(&mut self, step: &Value) -> Run {
        let known = ["worker", "dp_rank", "live_before", "live_gap", "reply_frames"];
        let step = Fields::only("raw_replay", step, &known)?;
        let rank = step.rank()?;
        for before in step.list("live_before")? {
            self.step(before)?;
            self.settle()?;
        }
        let answers = step.list("reply_frames")?.iter().map(frames_of).collect::<Run<_>>()?;
        let script = Script { from: None, answers: Answers::Frames(answers), ends: false };
        self.publisher(&rank).scripts.push_back(script);
        self.step(step.need("live_gap")?)?;
        self.settle()?;
        if self.publisher(&rank).scripts.is_empty() {
            Ok(())
        } else {
            fail(format!("{rank} was not asked for its history"))
        }
    }

    /// Answers one request: as scripted, else with what the publisher has sent so far, as a real one would.
    pub(super) fn serve(&mut self, request: &Request) -> Run {
        let Request { rank, from, at_connect, .. } = request;
        let publisher = self.publisher(rank);
        let fits = |script: &Script| script.from.is_none_or(|wanted| wanted == *from);
        let script = match publisher.scripts.front() {
            Some(script) if fits(script) => publisher.scripts.pop_front(),
            // The case speaks of a later request: this one is a probe, a confirmation or the one at the connect.
            // A script that is never asked for fails the case at its end.
            _ => None,
        };
        if script.is_some() {
            publisher.asked.push(*from);
        }
        if script.is_none() && !publisher.up {
            return self.feed(Input::ReplayFailed { source: request.source, request: request.id });
        }
        self.feed(Input::ReplayAsked { source: request.source, request: request.id })?;
        let publisher = self.publisher(rank);
        let (answers, ends) = match script {
            Some(Script { answers: Answers::Frames(frames), ends, .. }) => (frames, ends),
            Some(Script { answers: Answers::Batches(batches), ends, .. }) => {
                (batches.iter().map(|batch| self.answer_of(rank, batch)).collect::<Run<_>>()?, ends)
            }
            None => {
                let sent = publisher.sent.range(*from..);
                (sent.map(|(seq, payload)| answer(*seq, payload.clone())).collect(), true)
            }
        };
        let end = ends.then(|| answer(EventSeq::END_MARK.0, Bytes::new()));
        for frames in answers.iter().chain(&end) {
            if self.cancelled.contains(&(request.source, request.id)) {
                break;
            }
            let input = Input::Replay { source: request.source, request: request.id, frames };
            if *at_connect { self.feed_at_connect(input)? } else { self.feed(input)? }
        }
        Ok(())
    }

    fn answer_of(&mut self, rank: &RankKey, batch: &Value) -> Run<Vec<Bytes>> {
        let seq = count("seq", &batch["seq"])?;
        let restarts = self.publisher(rank).restarts;
        let payload = payload(restarts, list("events", &batch["events"])?, rank, batch.get("batch_rank"))?;
        Ok(answer(seq, payload))
    }

    /// Every scripted answer must have been asked for.
    pub(super) fn nothing_is_left_over(&self) -> Run {
        let waiting = self.publishers.iter().find_map(|(rank, of)| Some((rank, of.scripts.front()?)));
        match waiting {
            Some((rank, script)) => {
                let from = script.from.unwrap_or_default();
                fail(format!("{rank} was never asked for its history from {from}"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn expect_replay_requests(&mut self, step: &Value) -> Run {
        let step = Fields::only("expect_replay_requests", step, &["worker", "dp_rank", "from"])?;
        let expected: Vec<u64> =
            step.list("from")?.iter().map(|from| count("from", from)).collect::<Run<_>>()?;
        let asked = &self.publisher(&step.rank()?).asked;
        if *asked == expected { Ok(()) } else { fail(format!("asked from {asked:?}, expected {expected:?}")) }
    }
}

/// An answer as the newer engines send it.
fn answer(seq: u64, payload: Bytes) -> Vec<Bytes> {
    vec![Bytes::new(), Bytes::new(), Bytes::copy_from_slice(&seq.to_be_bytes()), payload]
}

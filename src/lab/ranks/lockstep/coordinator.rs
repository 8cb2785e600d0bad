//! The coordinator's side.

use std::fmt;

use bytes::Bytes;

use super::super::choice::Choice;
use super::super::envelope::{self, Envelope};
use super::super::grid::{Grid, Point, Summary};
use super::super::measured::Measured;
use super::super::message::{FromRank, Limits, ToRank, Unreadable};
use super::{Broken, MAX_RANKS, Step};
use crate::ids::{DpRank, Moment};

/// A connection to the coordinator, as its socket names it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PeerId(pub Bytes);

/// What is to be done.
#[derive(Clone, PartialEq, Debug)]
pub enum CoordinatorAction {
    /// Send this.
    Send(PeerId, ToRank),
    /// A step begins; for whoever watches.
    Step(Step),
    /// It is over, with this result. Nothing follows.
    End(Box<Result<Outcome, Broken>>),
}

/// What the ranks have found.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// What all can take.
    pub common: Envelope,
    /// What each can take, by rank.
    pub envelopes: Vec<Envelope>,
    /// Each rank's process and host, by rank.
    pub who: Vec<String>,
    /// The grid that was walked.
    pub grid: Grid,
    /// Its points with what was measured, in order.
    pub points: Vec<PointOutcome>,
    /// Messages on the port that were not of this bench.
    pub foreign: u64,
}

/// A point, and what each rank measured there.
#[derive(Clone, PartialEq, Debug)]
pub struct PointOutcome {
    /// The point.
    pub point: Point,
    /// By rank.
    pub ranks: Vec<Measured>,
}

/// Gathers the ranks, compares what they say, and leads them through the grid.
///
/// It holds what was measured: a few kilobytes per point and rank.
#[derive(Debug)]
pub struct Coordinator {
    choice: Choice,
    limits: Limits,
    seats: Vec<Option<Seat>>,
    step: Step,
    began: Moment,
    ended: bool,
    foreign: u64,
    agreed: Option<Agreed>,
    points: Vec<PointOutcome>,
}

/// A rank that has joined.
#[derive(Debug)]
struct Seat {
    peer: PeerId,
    who: String,
    envelope: Envelope,
    answer: Option<Answer>,
}

/// What a rank has answered to the present step.
#[derive(Debug)]
enum Answer {
    Grid(Summary),
    Warm,
    Done(Measured),
}

#[derive(Debug)]
struct Agreed {
    common: Envelope,
    grid: Grid,
}

/// A rank's description of itself is cut here: it stands in every error.
const MAX_WHO: usize = 120;

impl Coordinator {
    /// A coordinator of `of` ranks, which is clamped to 1..=[`MAX_RANKS`], at `now`. `choice` is what the ranks
    /// were told, too.
    pub fn new(now: Moment, of: u32, choice: Choice, limits: Limits) -> Self {
        let of = of.clamp(1, MAX_RANKS);
        Self {
            choice,
            limits,
            seats: (0..of).map(|_| None).collect(),
            step: Step::Join,
            began: now,
            ended: false,
            foreign: 0,
            agreed: None,
            points: Vec::new(),
        }
    }

    /// A message has come.
    pub fn handle(
        &mut self,
        now: Moment,
        peer: &PeerId,
        message: FromRank,
        actions: &mut Vec<CoordinatorAction>,
    ) {
        if self.ended {
            return;
        }
        match (self.seat_of(peer), message) {
            (None, FromRank::Join { rank, of, who, envelope }) => {
                let who = clipped(who);
                if let Err(broken) = self.join(now, peer, (rank, of, who, envelope), actions) {
                    self.fail(broken, actions);
                }
            }
            // Somebody who has not joined has nothing to say; it costs a counter.
            (None, _) => self.foreign += 1,
            (Some(rank), message) => match self.answer(rank, message) {
                Ok(()) => self.go_on(now, actions),
                Err(broken) => self.fail(broken, actions),
            },
        }
    }

    /// A message has come that cannot be read. From a rank it ends the bench; from a stranger it is counted.
    pub fn unreadable(&mut self, peer: &PeerId, why: &Unreadable, actions: &mut Vec<CoordinatorAction>) {
        if self.ended {
            return;
        }
        let Some(rank) = self.seat_of(peer) else {
            self.foreign += 1;
            // Whoever means this bench learns why it is not heard; others get one message per message.
            if *why != Unreadable::Foreign {
                let told = ToRank::Failed { why: format!("your message cannot be read: {why}") };
                actions.push(CoordinatorAction::Send(peer.clone(), told));
            }
            return;
        };
        let who = self.who(rank);
        self.fail(Broken::Unreadable { rank, who, why: why.to_string() }, actions);
    }

    /// A connection has ended.
    pub fn gone(&mut self, peer: &PeerId, how: &str, actions: &mut Vec<CoordinatorAction>) {
        if let Some(rank) = self.seat_of(peer) {
            self.lost(rank, how, actions);
        }
    }

    /// A rank has ended, as its thread or process shows, whether it has joined or not.
    pub fn lost(&mut self, rank: DpRank, how: &str, actions: &mut Vec<CoordinatorAction>) {
        if !self.ended {
            let who = self.who(rank);
            self.fail(Broken::Gone { rank, who, step: self.step, how: how.to_owned() }, actions);
        }
    }

    /// Time has passed. Does nothing before [`Coordinator::deadline`].
    pub fn tick(&mut self, now: Moment, actions: &mut Vec<CoordinatorAction>) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        let silent = |seat: &Option<Seat>| match seat {
            None => true,
            Some(seat) => self.step != Step::Join && seat.answer.is_none(),
        };
        let missing = (0..).map(DpRank).zip(&self.seats).filter(|(_, seat)| silent(seat));
        let broken = Broken::Missing {
            step: self.step,
            missing: missing.map(|(rank, _)| rank).collect(),
            of: self.of(),
            limit: self.limit(),
            foreign: self.foreign,
        };
        self.fail(broken, actions);
    }

    /// When [`Coordinator::tick`] is to be called at the latest; `None` when it is over.
    pub fn deadline(&self) -> Option<Moment> {
        (!self.ended).then(|| self.began + self.limit())
    }

    /// The connections of the ranks that have joined.
    pub fn peers(&self) -> impl Iterator<Item = &PeerId> {
        self.seats.iter().flatten().map(|seat| &seat.peer)
    }

    fn limit(&self) -> std::time::Duration {
        match self.step {
            Step::Join => self.limits.join,
            Step::Grid => self.limits.answer,
            Step::WarmUp | Step::Point { .. } => self.limits.point,
        }
    }

    fn of(&self) -> u32 {
        // Made of a `u32`.
        u32::try_from(self.seats.len()).unwrap_or(u32::MAX)
    }

    fn seat_of(&self, peer: &PeerId) -> Option<DpRank> {
        let mut seats = (0..).map(DpRank).zip(&self.seats);
        seats.find(|(_, seat)| seat.as_ref().is_some_and(|seat| seat.peer == *peer)).map(|(rank, _)| rank)
    }

    fn who(&self, rank: DpRank) -> String {
        let seat = self.seats.get(rank.0 as usize).and_then(Option::as_ref);
        seat.map_or_else(|| "not joined".to_owned(), |seat| seat.who.clone())
    }

    fn join(
        &mut self,
        now: Moment,
        peer: &PeerId,
        (number, of, who, stated): (u32, u32, String, envelope::Stated),
        actions: &mut Vec<CoordinatorAction>,
    ) -> Result<(), Broken> {
        if self.step != Step::Join {
            // The ranks that are here go on: the newcomer is one too many, whatever it says.
            let why =
                format!("this bench is already {}; rank {number} is {}", self.step, self.who(DpRank(number)));
            actions.push(CoordinatorAction::Send(peer.clone(), ToRank::Failed { why }));
            self.foreign += 1;
            return Ok(());
        }
        let told = |broken: Broken, actions: &mut Vec<CoordinatorAction>| {
            // It has no seat, so that a failure for all would not reach it.
            let why = broken.to_string();
            actions.push(CoordinatorAction::Send(peer.clone(), ToRank::Failed { why }));
            broken
        };
        let ours = self.of();
        if of != ours || number >= ours {
            return Err(told(Broken::Miscounted { rank: number, who, theirs: of, ours }, actions));
        }
        let rank = DpRank(number);
        let seat = &mut self.seats[number as usize];
        if let Some(first) = seat {
            let first = first.who.clone();
            return Err(told(Broken::ClaimedTwice { rank, first, second: who }, actions));
        }
        let envelope = stated.check();
        let envelope = envelope
            .map_err(|nonsense| told(Broken::Nonsense { rank, who: who.clone(), nonsense }, actions))?;
        *seat = Some(Seat { peer: peer.clone(), who, envelope, answer: None });
        actions.push(CoordinatorAction::Send(peer.clone(), ToRank::Welcome(self.limits)));
        if self.seats.iter().all(Option::is_some) {
            self.agree(now, actions)?;
        }
        Ok(())
    }

    /// All have joined: what they have in common, and the grid that comes of it.
    fn agree(&mut self, now: Moment, actions: &mut Vec<CoordinatorAction>) -> Result<(), Broken> {
        let envelopes = self.envelopes();
        let common = envelope::common(&envelopes)?;
        let grid = Grid::derive(&common, &self.choice)?;
        self.agreed = Some(Agreed { common, grid });
        let envelopes = envelopes.iter().map(Envelope::stated).collect();
        self.begin(now, Step::Grid, &ToRank::Envelopes { envelopes }, actions);
        Ok(())
    }

    fn envelopes(&self) -> Vec<Envelope> {
        self.seats.iter().flatten().map(|seat| seat.envelope).collect()
    }

    fn answer(&mut self, rank: DpRank, message: FromRank) -> Result<(), Broken> {
        let step = self.step;
        let who = self.who(rank);
        let out_of_step = |said: &dyn fmt::Display| Broken::OutOfStep {
            rank,
            who: who.clone(),
            said: said.to_string(),
            step,
        };
        let (answer, said) = match (step, message) {
            (_, FromRank::Failed { why }) => {
                return Err(Broken::Failed { rank, who, step, why: clipped(why) });
            }
            (Step::Grid, FromRank::Grid(summary)) => (Answer::Grid(summary), "its grid".to_owned()),
            (Step::WarmUp, FromRank::Warm) => (Answer::Warm, "that it is warm".to_owned()),
            (Step::Point { index, .. }, FromRank::Done { point, measured }) if index == point => {
                (Answer::Done(measured), format!("that point {} is done", point + 1))
            }
            (_, FromRank::Join { .. }) => return Err(out_of_step(&"that it joins")),
            (_, FromRank::Grid(summary)) => return Err(out_of_step(&summary)),
            (_, FromRank::Warm) => return Err(out_of_step(&"that it is warm")),
            (_, FromRank::Done { point, .. }) => {
                let said = format!("that point {} is done", u64::from(point) + 1);
                return Err(out_of_step(&said));
            }
        };
        // Who answers has a seat.
        if let Some(Some(seat)) = self.seats.get_mut(rank.0 as usize) {
            if seat.answer.is_some() {
                return Err(out_of_step(&format!("{said} once more")));
            }
            seat.answer = Some(answer);
        }
        Ok(())
    }

    /// Begins the next step if all have answered to this one.
    fn go_on(&mut self, now: Moment, actions: &mut Vec<CoordinatorAction>) {
        if !self.seats.iter().flatten().all(|seat| seat.answer.is_some()) || self.step == Step::Join {
            return;
        }
        let answers: Vec<Answer> =
            self.seats.iter_mut().flatten().filter_map(|seat| seat.answer.take()).collect();
        match self.step {
            Step::Join => {}
            Step::Grid => match self.compare(answers) {
                Ok(()) => self.begin(now, Step::WarmUp, &ToRank::WarmUp, actions),
                Err(broken) => self.fail(broken, actions),
            },
            Step::WarmUp => self.run(now, 0, actions),
            Step::Point { index, point, .. } => {
                let measured = answers.into_iter().filter_map(|answer| match answer {
                    Answer::Done(measured) => Some(measured),
                    Answer::Grid(_) | Answer::Warm => None,
                });
                self.points.push(PointOutcome { point, ranks: measured.collect() });
                self.run(now, index + 1, actions);
            }
        }
    }

    fn compare(&self, answers: Vec<Answer>) -> Result<(), Broken> {
        let mut groups: Vec<(Summary, Vec<DpRank>)> = Vec::new();
        for (rank, answer) in (0..).map(DpRank).zip(answers) {
            let Answer::Grid(summary) = answer else { continue };
            match groups.iter_mut().find(|(other, _)| *other == summary) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((summary, vec![rank])),
            }
        }
        let ours = self.agreed.as_ref().map(|agreed| agreed.grid.summary());
        match (groups.as_slice(), ours) {
            ([(ranks, _)], Some(coordinator)) if *ranks != coordinator => {
                Err(Broken::GridNotOurs { ranks: *ranks, coordinator })
            }
            ([_], _) => Ok(()),
            _ => Err(Broken::GridsDiffer(groups)),
        }
    }

    /// Begins point `index`, or ends if there is none.
    fn run(&mut self, now: Moment, index: u32, actions: &mut Vec<CoordinatorAction>) {
        let Some(agreed) = &self.agreed else { return };
        let of = agreed.grid.summary().points;
        if let Some(point) = agreed.grid.points().get(index as usize) {
            let step = Step::Point { index, of, point: *point };
            self.begin(now, step, &ToRank::Run { point: index }, actions);
            return;
        }
        let outcome = Outcome {
            common: agreed.common,
            envelopes: self.envelopes(),
            who: self.seats.iter().flatten().map(|seat| seat.who.clone()).collect(),
            grid: agreed.grid.clone(),
            points: std::mem::take(&mut self.points),
            foreign: self.foreign,
        };
        self.ended = true;
        self.tell_all(&ToRank::Finished, actions);
        actions.push(CoordinatorAction::End(Box::new(Ok(outcome))));
    }

    fn begin(&mut self, now: Moment, step: Step, order: &ToRank, actions: &mut Vec<CoordinatorAction>) {
        self.step = step;
        self.began = now;
        actions.push(CoordinatorAction::Step(step));
        self.tell_all(order, actions);
    }

    fn fail(&mut self, broken: Broken, actions: &mut Vec<CoordinatorAction>) {
        if self.ended {
            return;
        }
        self.ended = true;
        self.tell_all(&ToRank::Failed { why: broken.to_string() }, actions);
        actions.push(CoordinatorAction::End(Box::new(Err(broken))));
    }

    fn tell_all(&self, message: &ToRank, actions: &mut Vec<CoordinatorAction>) {
        actions.extend(self.peers().map(|peer| CoordinatorAction::Send(peer.clone(), message.clone())));
    }
}

/// At most [`MAX_WHO`] characters, none of which could spoil a terminal.
fn clipped(text: String) -> String {
    let sound = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MAX_WHO).map(sound).collect()
}

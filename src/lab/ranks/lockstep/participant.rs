//! A rank's side.

use super::super::choice::Choice;
use super::super::envelope::{self, Envelope, Stated};
use super::super::grid::{Grid, Point};
use super::super::measured::Measured;
use super::super::message::{FromRank, Limits, ToRank};
use super::Broken;
use crate::ids::{DpRank, Moment};

/// Who a rank says it is, and what it can take.
#[derive(Clone, PartialEq, Debug)]
pub struct Claim {
    /// Its number, from 0.
    pub rank: DpRank,
    /// How many ranks there are.
    pub of: u32,
    /// Its process and host, for errors.
    pub who: String,
    /// Its own envelope.
    pub envelope: Stated,
    /// Which points it was told to measure. It is not sent: the digests of the grids show whether all were told
    /// the same.
    pub choice: Choice,
}

/// What is to be done.
#[derive(Clone, PartialEq, Debug)]
pub enum ParticipantAction {
    /// Send this to the coordinator.
    Send(FromRank),
    /// Warm the engine up with this point, and call [`Participant::warmed`].
    WarmUp(Point),
    /// Measure this point, and call [`Participant::measured`].
    Run(Point),
    /// It is over. What still runs is to be dropped.
    End(Result<(), Broken>),
}

/// Does what the coordinator says, in the only order in which it may say it.
#[derive(Debug)]
pub struct Participant {
    claim: Claim,
    limits: Limits,
    state: State,
    began: Moment,
    grid: Option<Grid>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Until the coordinator has answered.
    Joining,
    /// Until all have joined.
    Joined,
    /// Until all grids are compared.
    Compared,
    WarmingUp,
    /// Until all are warm.
    Warm,
    Running(u32),
    /// Until all have done the point.
    Done(u32),
    Ended,
}

impl Participant {
    /// A rank that joins at `now`. `limits` count until the coordinator has told its own.
    pub fn join(now: Moment, claim: Claim, limits: Limits, actions: &mut Vec<ParticipantAction>) -> Self {
        actions.push(ParticipantAction::Send(FromRank::Join {
            rank: claim.rank.0,
            of: claim.of,
            who: claim.who.clone(),
            envelope: claim.envelope,
        }));
        Self { claim, limits, state: State::Joining, began: now, grid: None }
    }

    /// The coordinator has said something.
    pub fn handle(&mut self, now: Moment, message: ToRank, actions: &mut Vec<ParticipantAction>) {
        match (self.state, message) {
            (State::Ended, _) => {}
            (_, ToRank::Failed { why }) => self.end(Err(Broken::Told(why)), actions),
            (State::Joining, ToRank::Welcome(limits)) => {
                self.limits = limits;
                self.enter(now, State::Joined);
            }
            (State::Joined, ToRank::Envelopes { envelopes }) => match self.grid_of(&envelopes) {
                Ok(grid) => {
                    actions.push(ParticipantAction::Send(FromRank::Grid(grid.summary())));
                    self.grid = Some(grid);
                    self.enter(now, State::Compared);
                }
                Err(why) => self.give_up(why, actions),
            },
            (State::Compared, ToRank::WarmUp) => match self.point(0) {
                Some(point) => {
                    self.enter(now, State::WarmingUp);
                    actions.push(ParticipantAction::WarmUp(point));
                }
                None => self.give_up("the grid has no points".to_owned(), actions),
            },
            (State::Warm, ToRank::Run { point: 0 }) => self.run(now, 0, actions),
            (State::Done(last), ToRank::Run { point }) if last.checked_add(1) == Some(point) => {
                self.run(now, point, actions);
            }
            (State::Done(last), ToRank::Finished) if self.point(last.saturating_add(1)).is_none() => {
                self.end(Ok(()), actions);
            }
            (_, message) => {
                let why = format!(
                    "the coordinator is out of step: it says {} to a rank that is {}",
                    order(&message),
                    self.doing()
                );
                self.give_up(why, actions);
            }
        }
    }

    /// The warm-up has ended.
    pub fn warmed(&mut self, now: Moment, ended: Result<(), String>, actions: &mut Vec<ParticipantAction>) {
        match ended {
            _ if self.state != State::WarmingUp => {}
            Ok(()) => {
                actions.push(ParticipantAction::Send(FromRank::Warm));
                self.enter(now, State::Warm);
            }
            Err(why) => self.give_up(why, actions),
        }
    }

    /// The point has ended.
    pub fn measured(
        &mut self,
        now: Moment,
        ended: Result<Measured, String>,
        actions: &mut Vec<ParticipantAction>,
    ) {
        let State::Running(point) = self.state else { return };
        match ended {
            Ok(measured) => {
                actions.push(ParticipantAction::Send(FromRank::Done { point, measured }));
                self.enter(now, State::Done(point));
            }
            Err(why) => self.give_up(why, actions),
        }
    }

    /// The connection has ended, or could not be made.
    pub fn gone(&mut self, how: &str, actions: &mut Vec<ParticipantAction>) {
        let (rank, doing, how) = (self.claim.rank, self.doing(), how.to_owned());
        self.end(Err(Broken::CoordinatorGone { rank, doing, how }), actions);
    }

    /// Time has passed. Does nothing before [`Participant::deadline`].
    pub fn tick(&mut self, now: Moment, actions: &mut Vec<ParticipantAction>) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        let (rank, doing, limit) = (self.claim.rank, self.doing(), self.limit());
        match self.state {
            State::WarmingUp | State::Running(_) => {
                self.give_up(format!("{doing} was not done within {limit:?}"), actions);
            }
            _ => self.end(Err(Broken::CoordinatorSilent { rank, doing, limit }), actions),
        }
    }

    /// When [`Participant::tick`] is to be called at the latest; `None` when it is over.
    pub fn deadline(&self) -> Option<Moment> {
        (self.state != State::Ended).then(|| self.began + self.limit())
    }

    /// The grid that this rank has made; `None` until it has everybody's envelope.
    pub fn grid(&self) -> Option<&Grid> {
        self.grid.as_ref()
    }

    /// What this rank is doing, in words.
    pub fn doing(&self) -> String {
        let point = |index: u32| match (self.point(index), &self.grid) {
            (Some(point), Some(grid)) => {
                format!("point {} of {} ({point})", index + 1, grid.points().len())
            }
            _ => format!("point {index}"),
        };
        match self.state {
            State::Joining => "joining".to_owned(),
            State::Joined => "waiting for all ranks to join".to_owned(),
            State::Compared => "waiting for all grids to be compared".to_owned(),
            State::WarmingUp => "warming up".to_owned(),
            State::Warm => "waiting for all ranks to be warm".to_owned(),
            State::Running(index) => point(index),
            State::Done(index) => format!("waiting for all ranks to end {}", point(index)),
            State::Ended => "ended".to_owned(),
        }
    }

    /// How long the present state may last. Where others are waited for, the coordinator's own limit comes
    /// first: its error names who is missing, and gets the time of a message to come here.
    fn limit(&self) -> std::time::Duration {
        let Limits { join, answer, point } = self.limits;
        match self.state {
            State::Joining => join,
            State::Joined => join + answer,
            State::Compared => answer + answer,
            State::WarmingUp | State::Running(_) => point,
            State::Warm | State::Done(_) => point + answer,
            State::Ended => std::time::Duration::ZERO,
        }
    }

    /// The grid, made here of what everybody stated; nothing of it is taken over from the coordinator.
    fn grid_of(&self, stated: &[Stated]) -> Result<Grid, String> {
        let Claim { rank, of, envelope, choice, .. } = &self.claim;
        if stated.len() != *of as usize {
            return Err(format!("the coordinator tells {} envelopes, of {of} ranks", stated.len()));
        }
        if stated.get(rank.0 as usize) != Some(envelope) {
            return Err("the coordinator tells another envelope for this rank than it stated".to_owned());
        }
        let mut envelopes: Vec<Envelope> = Vec::with_capacity(stated.len());
        for (rank, stated) in stated.iter().enumerate() {
            envelopes
                .push(stated.check().map_err(|nonsense| format!("the envelope of rank {rank}: {nonsense}"))?);
        }
        let common = envelope::common(&envelopes).map_err(|error| error.to_string())?;
        Grid::derive(&common, choice).map_err(|error| error.to_string())
    }

    fn point(&self, index: u32) -> Option<Point> {
        self.grid.as_ref().and_then(|grid| grid.points().get(index as usize)).copied()
    }

    fn run(&mut self, now: Moment, index: u32, actions: &mut Vec<ParticipantAction>) {
        match self.point(index) {
            Some(point) => {
                self.enter(now, State::Running(index));
                actions.push(ParticipantAction::Run(point));
            }
            None => self
                .give_up(format!("the coordinator asks for point {index}, which the grid has not"), actions),
        }
    }

    fn enter(&mut self, now: Moment, state: State) {
        self.state = state;
        self.began = now;
    }

    /// Ends by this rank's own doing; the coordinator is told why.
    fn give_up(&mut self, why: String, actions: &mut Vec<ParticipantAction>) {
        if self.state != State::Ended {
            actions.push(ParticipantAction::Send(FromRank::Failed { why: why.clone() }));
            self.end(Err(Broken::Own { rank: self.claim.rank, why }), actions);
        }
    }

    fn end(&mut self, result: Result<(), Broken>, actions: &mut Vec<ParticipantAction>) {
        if self.state != State::Ended {
            self.state = State::Ended;
            actions.push(ParticipantAction::End(result));
        }
    }
}

fn order(message: &ToRank) -> String {
    match message {
        ToRank::Welcome(_) => "welcome".to_owned(),
        ToRank::Envelopes { .. } => "the envelopes".to_owned(),
        ToRank::WarmUp => "to warm up".to_owned(),
        ToRank::Run { point } => format!("to run point {}", u64::from(*point) + 1),
        ToRank::Finished => "that all is done".to_owned(),
        ToRank::Failed { .. } => "that it has failed".to_owned(),
    }
}

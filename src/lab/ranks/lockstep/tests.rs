//! Both state machines together under simulated time, with delayed messages, dead, hanging and lying ranks.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::choice::Choice;
use super::super::envelope::{Field, Stated, uneven};
use super::super::grid::{Digest, Grid, Phase};
use super::super::measured::Measured;
use super::super::message::{FromRank, Limits, ToRank, Unreadable};
use super::*;
use crate::ids::Moment;

const FULL: Stated = Stated {
    max_model_len: 2_048,
    max_num_running_reqs: 16,
    max_num_scheduled_tokens: 2_048,
    kv_blocks: 1_024,
    block_size: 16,
};

const LIMITS: Limits = Limits {
    join: Duration::from_secs(2),
    answer: Duration::from_millis(500),
    point: Duration::from_secs(1),
};

/// What a rank of the simulation does wrong.
enum Fault {
    None,
    /// Its connection ends when this many messages have come; with none, before it joins.
    Dies(usize),
    /// From then on it neither reads nor says anything, and its connection stays.
    Hangs(usize),
    /// It says something else.
    Lies(Box<dyn Fn(FromRank) -> FromRank>),
}

enum Event {
    ToCoordinator(usize, FromRank),
    ToRank(usize, ToRank),
    WorkEnds(usize),
    ConnectionEnds(usize),
    /// The coordinator's connections end, at every rank.
    CoordinatorDies,
}

struct Node {
    core: Participant,
    fault: Fault,
    heard: usize,
    work: Option<ParticipantAction>,
    ended: Option<Result<(), Broken>>,
    last_said: Moment,
}

struct World {
    now: Moment,
    events: BTreeMap<(Moment, u64), Event>,
    count: u64,
    random: StdRng,
    coordinator: Coordinator,
    nodes: Vec<Node>,
    ended: Option<Result<Outcome, Broken>>,
    steps: Vec<Step>,
    coordinator_dead: bool,
    work: Duration,
}

/// How each rank ended; `None` for those that are dead or hang.
type RankEnds = Vec<Option<Result<(), Broken>>>;

fn peer(nth: usize) -> PeerId {
    PeerId(Bytes::from(format!("peer {nth}")))
}

impl World {
    fn new(seed: u64, of: u32, envelope: impl Fn(u32) -> Stated, fault: impl Fn(u32) -> Fault) -> Self {
        let now = Moment::default();
        let mut world = Self {
            now,
            events: BTreeMap::new(),
            count: 0,
            random: StdRng::seed_from_u64(seed),
            coordinator: Coordinator::new(now, of, Choice::default(), LIMITS),
            nodes: Vec::new(),
            ended: None,
            steps: Vec::new(),
            coordinator_dead: false,
            work: Duration::from_millis(20),
        };
        for rank in 0..of {
            let claim = Claim {
                rank: DpRank(rank),
                of,
                who: format!("pid {rank}"),
                envelope: envelope(rank),
                choice: Choice::default(),
            };
            let mut actions = Vec::new();
            let core = Participant::join(now, claim, LIMITS, &mut actions);
            let fault = fault(rank);
            world.nodes.push(Node { core, fault, heard: 0, work: None, ended: None, last_said: now });
            world.carry_out(rank as usize, actions);
        }
        world
    }

    fn at(&mut self, delay: Duration, event: Event) {
        self.count += 1;
        self.events.insert((self.now + delay, self.count), event);
    }

    /// Messages of one connection stay in order.
    fn say(&mut self, nth: usize, message: FromRank) {
        let delay = Duration::from_micros(self.random.random_range(10..5_000));
        let node = &mut self.nodes[nth];
        let arrival = (self.now + delay).max(node.last_said);
        node.last_said = arrival;
        let message = match &node.fault {
            Fault::Lies(lie) => lie(message),
            _ => message,
        };
        self.at(arrival.since(self.now), Event::ToCoordinator(nth, message));
    }

    fn is_off(&self, nth: usize) -> bool {
        let node = &self.nodes[nth];
        match node.fault {
            Fault::Dies(after) | Fault::Hangs(after) => node.heard >= after,
            Fault::None | Fault::Lies(_) => false,
        }
    }

    fn carry_out(&mut self, nth: usize, actions: Vec<ParticipantAction>) {
        if self.is_off(nth) {
            if matches!(self.nodes[nth].fault, Fault::Dies(_)) {
                self.at(Duration::from_millis(1), Event::ConnectionEnds(nth));
            }
            return;
        }
        for action in actions {
            match action {
                ParticipantAction::Send(message) => self.say(nth, message),
                ParticipantAction::WarmUp(_) | ParticipantAction::Run(_) => {
                    self.nodes[nth].work = Some(action);
                    self.at(self.work, Event::WorkEnds(nth));
                }
                ParticipantAction::End(result) => self.nodes[nth].ended = Some(result),
            }
        }
    }

    fn conduct(&mut self, actions: Vec<CoordinatorAction>) {
        for action in actions {
            match action {
                CoordinatorAction::Send(to, message) => {
                    if let Some(nth) = (0..self.nodes.len()).find(|nth| peer(*nth) == to) {
                        self.at(Duration::from_millis(5), Event::ToRank(nth, message));
                    }
                }
                CoordinatorAction::Step(step) => self.steps.push(step),
                CoordinatorAction::End(result) => self.ended = Some(*result),
            }
        }
    }

    fn event(&mut self, event: Event) {
        let now = self.now;
        let mut orders = Vec::new();
        let mut actions = Vec::new();
        match event {
            Event::ToCoordinator(..) | Event::ConnectionEnds(_) if self.coordinator_dead => {}
            Event::ToCoordinator(nth, message) => {
                self.coordinator.handle(now, &peer(nth), message, &mut orders);
            }
            Event::ConnectionEnds(nth) => {
                self.coordinator.gone(&peer(nth), "its connection has ended", &mut orders);
            }
            Event::ToRank(nth, _) | Event::WorkEnds(nth) if self.is_off(nth) => {}
            Event::ToRank(nth, message) => {
                self.nodes[nth].heard += 1;
                self.nodes[nth].core.handle(now, message, &mut actions);
                self.carry_out(nth, std::mem::take(&mut actions));
            }
            Event::WorkEnds(nth) => {
                let node = &mut self.nodes[nth];
                match node.work.take() {
                    Some(ParticipantAction::WarmUp(_)) => node.core.warmed(now, Ok(()), &mut actions),
                    _ => node.core.measured(now, Ok(Measured::default()), &mut actions),
                }
                self.carry_out(nth, actions);
            }
            Event::CoordinatorDies => {
                self.coordinator_dead = true;
                for nth in 0..self.nodes.len() {
                    self.nodes[nth].core.gone("the connection has ended", &mut actions);
                    self.carry_out(nth, std::mem::take(&mut actions));
                }
            }
        }
        self.conduct(orders);
    }

    /// Goes to the next event or deadline; false when nothing is left to happen.
    fn advance(&mut self) -> bool {
        let alive = (0..self.nodes.len()).filter(|nth| !self.is_off(*nth));
        let mut deadlines: Vec<Moment> = alive.filter_map(|nth| self.nodes[nth].core.deadline()).collect();
        deadlines.extend(self.coordinator.deadline().filter(|_| !self.coordinator_dead));
        let deadline = deadlines.into_iter().min();
        match self.events.first_key_value().map(|(key, _)| *key) {
            Some(key) if deadline.is_none_or(|deadline| key.0 <= deadline) => {
                self.now = self.now.max(key.0);
                let event = self.events.remove(&key).unwrap();
                self.event(event);
            }
            _ => {
                let Some(deadline) = deadline else { return false };
                self.now = self.now.max(deadline);
                let mut orders = Vec::new();
                if !self.coordinator_dead {
                    self.coordinator.tick(self.now, &mut orders);
                }
                self.conduct(orders);
                for nth in (0..self.nodes.len()).filter(|nth| !self.is_off(*nth)).collect::<Vec<_>>() {
                    let mut actions = Vec::new();
                    self.nodes[nth].core.tick(self.now, &mut actions);
                    self.carry_out(nth, actions);
                }
            }
        }
        true
    }

    /// To the end, which must come: for the coordinator and for every rank that is still there.
    fn run(mut self) -> (Option<Result<Outcome, Broken>>, RankEnds, Duration) {
        for _ in 0..100_000 {
            if !self.advance() {
                for (nth, node) in self.nodes.iter().enumerate() {
                    assert!(self.is_off(nth) || node.ended.is_some(), "rank {nth} waits for ever");
                }
                assert!(self.coordinator_dead || self.ended.is_some(), "the coordinator waits for ever");
                let ranks = self.nodes.into_iter().map(|node| node.ended).collect();
                return (self.ended, ranks, self.now.since(Moment::default()));
            }
        }
        panic!("it does not end");
    }

    fn broken(self) -> (Broken, RankEnds, Duration) {
        let (ended, ranks, time) = self.run();
        (ended.unwrap().unwrap_err(), ranks, time)
    }
}

fn even(_: u32) -> Stated {
    FULL
}

fn sound(_: u32) -> Fault {
    Fault::None
}

/// Only `rank` does something wrong.
fn only(rank: u32, fault: impl Fn() -> Fault) -> impl Fn(u32) -> Fault {
    move |of| if of == rank { fault() } else { Fault::None }
}

fn lies(lie: impl Fn(FromRank) -> FromRank + Clone + 'static) -> impl Fn() -> Fault {
    move || Fault::Lies(Box::new(lie.clone()))
}

/// B1, B2, B3: uneven ranks on 1, 4 and 8: the smallest of each wins, all walk all points in the grid's order.
#[test]
fn uneven_ranks_walk_one_grid() {
    for of in [1, 4, 8] {
        let world = World::new(7, of, |rank| uneven(FULL, DpRank(rank), of), sound);
        let (ended, ranks, _) = world.run();
        let outcome = ended.unwrap().unwrap();
        assert!(ranks.iter().all(|ended| *ended == Some(Ok(()))), "{ranks:?}");
        for field in Field::ALL.into_iter().filter(|field| *field != Field::BlockSize) {
            assert_eq!(outcome.common.stated().get(field), FULL.get(field) / 2);
        }
        assert_eq!(outcome.grid, Grid::derive(&outcome.common, &Choice::default()).unwrap());
        let walked: Vec<_> = outcome.points.iter().map(|outcome| outcome.point).collect();
        assert_eq!(walked, outcome.grid.points());
        assert!(outcome.points.iter().all(|point| point.ranks.len() == of as usize));
        assert!(walked.is_sorted_by_key(|point| point.phase == Phase::Decode));
    }
}

/// B2: each rank makes its grid by itself, and all have the same bytes.
#[test]
fn b2_uneven_ranks_have_the_same_bytes() {
    for of in [4, 8] {
        let mut world = World::new(8, of, |rank| uneven(FULL, DpRank(rank), of), sound);
        while world.steps.last() != Some(&Step::WarmUp) {
            assert!(world.advance());
        }
        let grids: Vec<&[u8]> =
            world.nodes.iter().map(|node| node.core.grid().unwrap().canonical()).collect();
        assert_eq!(grids.len(), of as usize);
        assert!(grids.iter().all(|bytes| *bytes == grids[0] && bytes.len() > 500));
    }
}

/// B3: a point begins when the one before it has ended everywhere: no rank is ever two points from another.
#[test]
fn b3_no_rank_runs_ahead() {
    let mut world = World::new(11, 4, even, sound);
    let running = |node: &Node| match node.work {
        Some(ParticipantAction::Run(point)) => Some(point),
        _ => None,
    };
    while world.advance() {
        let mut points: Vec<_> = world.nodes.iter().filter_map(running).collect();
        points.dedup();
        assert!(points.len() <= 1, "{points:?}");
    }
    assert!(world.ended.unwrap().is_ok());
}

/// B3: a rank that dies, wherever it is in the walk, is named at once.
#[test]
fn b3_a_rank_that_dies_is_named() {
    let (ended, ..) = World::new(1, 4, even, sound).run();
    let points = ended.unwrap().unwrap().points.len();
    // Welcome, envelopes, warm-up, and each point but the last message, after which it may go.
    for after in 1..points + 3 {
        let world = World::new(after as u64, 4, even, only(2, || Fault::Dies(after)));
        let (broken, ranks, _) = world.broken();
        assert!(matches!(&broken, Broken::Gone { rank: DpRank(2), .. }), "{after}: {broken}");
        for nth in [0, 1, 3] {
            assert_eq!(ranks[nth], Some(Err(Broken::Told(broken.to_string()))));
        }
    }
}

/// B3: a rank that dies before it has joined is missed when the join limit is over.
#[test]
fn b3_a_rank_that_never_joins_is_named() {
    let (broken, ranks, time) = World::new(1, 4, even, only(2, || Fault::Dies(0))).broken();
    assert_eq!(
        broken.to_string(),
        "rank 2 of 4 was not heard of within 2s while joining; ranks 0-1, 3 answered"
    );
    assert!(time < LIMITS.join + LIMITS.answer);
    assert_eq!(ranks.iter().flatten().filter(|ended| ended.is_err()).count(), 3);
}

/// B3: a rank that hangs, wherever it is in the walk, is named within the limit of what it hangs in.
#[test]
fn b3_a_rank_that_hangs_is_named() {
    let (ended, ..) = World::new(1, 4, even, sound).run();
    let points = ended.unwrap().unwrap().points.len();
    for after in 1..points + 3 {
        let world = World::new(after as u64, 4, even, only(1, || Fault::Hangs(after)));
        let (broken, ranks, time) = world.broken();
        let Broken::Missing { missing, step, limit, of: 4, foreign: 0 } = &broken else { panic!("{broken}") };
        assert_eq!(missing, &[DpRank(1)]);
        let expected = match step {
            Step::Join => LIMITS.join,
            Step::Grid => LIMITS.answer,
            Step::WarmUp | Step::Point { .. } => LIMITS.point,
        };
        assert_eq!(*limit, expected);
        // What went well before it, the limit, and the message that tells the others.
        assert!(time < *limit + LIMITS.point * u32::try_from(after).unwrap());
        for nth in [0, 2, 3] {
            assert_eq!(ranks[nth], Some(Err(Broken::Told(broken.to_string()))));
        }
    }
}

/// B3: several at once are all named.
#[test]
fn b3_all_who_are_missing_are_named() {
    let fault = |rank| if rank == 3 || rank > 5 { Fault::Hangs(5) } else { Fault::None };
    let (broken, ..) = World::new(3, 8, even, fault).broken();
    let said = broken.to_string();
    assert!(said.starts_with("ranks 3, 6-7 of 8 were not heard of within 1s while point 2 of "), "{said}");
    assert!(said.ends_with("; ranks 0-2, 4-5 answered"), "{said}");
}

/// B3: ranks whose coordinator dies or falls silent end by themselves.
#[test]
fn b3_ranks_survive_their_coordinator() {
    for millis in [1, 8, 20, 60, 300] {
        for dies in [true, false] {
            let mut world = World::new(millis, 4, even, sound);
            if dies {
                world.at(Duration::from_millis(millis), Event::CoordinatorDies);
            }
            loop {
                world.coordinator_dead |= !dies && world.now >= Moment::from_millis(millis);
                if !world.advance() {
                    break;
                }
            }
            for node in world.nodes {
                let broken = node.ended.unwrap().unwrap_err();
                let expected = match dies {
                    true => matches!(broken, Broken::CoordinatorGone { .. }),
                    false => matches!(broken, Broken::CoordinatorSilent { .. }),
                };
                assert!(expected, "{broken}");
            }
        }
    }
}

/// B2: another digest, another number of points, other phases: each is an error with both values and whose
/// they are.
#[test]
fn b2_another_grid_is_named_with_both_values() {
    fn other(change: impl Fn(&mut Summary) + Clone + 'static) -> impl Fn() -> Fault {
        lies(move |message| match message {
            FromRank::Grid(mut summary) => {
                change(&mut summary);
                FromRank::Grid(summary)
            }
            message => message,
        })
    }
    let check = |fault: &dyn Fn() -> Fault, wanted: &str| {
        for of in [4, 8] {
            let world = World::new(
                5,
                of,
                |rank| uneven(FULL, DpRank(rank), of),
                |rank| match rank {
                    2 => fault(),
                    _ => Fault::None,
                },
            );
            let (broken, ..) = world.broken();
            let Broken::GridsDiffer(groups) = &broken else { panic!("{broken}") };
            let others: Vec<DpRank> = (0..of).map(DpRank).filter(|rank| rank.0 != 2).collect();
            assert_eq!(
                groups.iter().map(|(_, ranks)| ranks).collect::<Vec<_>>(),
                [&others, &vec![DpRank(2)]]
            );
            let said = broken.to_string();
            assert!(said.contains("ranks 0-1, 3") && said.contains(&format!("rank 2: {wanted}")), "{said}");
        }
    };
    check(&other(|summary| summary.digest = Digest(0xbad)), "digest 0000000000000bad, ");
    check(&other(|summary| summary.points = 1), "digest ");
    check(
        &other(|summary| {
            summary.prefill += 1;
            summary.decode -= 1;
        }),
        "digest ",
    );
}

/// B2: ranks that agree among each other, and not with the coordinator.
#[test]
fn b2_a_coordinator_with_another_grid_is_told_apart() {
    let fault = |_| {
        Fault::Lies(Box::new(|message| match message {
            FromRank::Grid(summary) => FromRank::Grid(Summary { digest: Digest(1), ..summary }),
            message => message,
        }))
    };
    let (broken, ..) = World::new(5, 4, even, fault).broken();
    assert!(matches!(broken, Broken::GridNotOurs { .. }), "{broken}");
}

/// B1: nonsense is refused with the rank, the number and what would be possible; all others learn it too.
#[test]
fn b1_nonsense_names_rank_and_value() {
    for (field, value) in [(Field::KvBlocks, 0), (Field::MaxModelLen, u64::MAX), (Field::BlockSize, 0)] {
        let envelope = |rank| {
            let mut stated = FULL;
            if rank == 3 {
                stated.set(field, value);
            }
            stated
        };
        let (broken, ranks, _) = World::new(9, 4, envelope, sound).broken();
        let said = broken.to_string();
        assert!(said.contains("rank 3 (pid 3)") && said.contains(&format!("{field} = {value}")), "{said}");
        // The one that said it is told as well, although it has no seat.
        assert_eq!(ranks[3], Some(Err(Broken::Told(said))));
        assert!(ranks.iter().flatten().all(Result::is_err));
    }
}

/// B1: different block sizes, and an envelope without room.
#[test]
fn b1_what_has_nothing_in_common_is_refused() {
    let envelope = |rank| Stated { block_size: if rank == 2 { 32 } else { 16 }, ..FULL };
    let (broken, ..) = World::new(9, 4, envelope, sound).broken();
    assert_eq!(broken.to_string(), "block sizes differ: 16 at rank 0, 32 at rank 2");
    let envelope = |rank| Stated { max_model_len: if rank == 1 { 1 } else { 100 }, ..FULL };
    let (broken, ..) = World::new(9, 4, envelope, sound).broken();
    assert!(matches!(broken, Broken::NoGrid(_)), "{broken}");
}

/// B3: a number claimed twice, a number that does not exist, ranks counted otherwise.
#[test]
fn b3_wrong_numbers_are_named() {
    let renumbered = |to: u32| {
        lies(move |message| match message {
            FromRank::Join { of, who, envelope, .. } => FromRank::Join { rank: to, of, who, envelope },
            message => message,
        })
    };
    let (broken, ranks, time) = World::new(2, 4, even, only(3, renumbered(1))).broken();
    let Broken::ClaimedTwice { rank: DpRank(1), first, second } = &broken else { panic!("{broken}") };
    let mut both = [first.as_str(), second.as_str()];
    both.sort_unstable();
    assert_eq!(both, ["pid 1", "pid 3"]);
    assert!(ranks.iter().all(|ended| matches!(ended, Some(Err(_)))) && time < LIMITS.answer);
    let (broken, ..) = World::new(2, 4, even, only(3, renumbered(4))).broken();
    assert_eq!(broken.to_string(), "rank 4 (pid 3) counts 4 ranks, the coordinator 4");
    let miscounted = lies(|message| match message {
        FromRank::Join { rank, who, envelope, .. } => FromRank::Join { rank, of: 8, who, envelope },
        message => message,
    });
    let (broken, ..) = World::new(2, 4, even, only(3, miscounted)).broken();
    assert_eq!(broken.to_string(), "rank 3 (pid 3) counts 8 ranks, the coordinator 4");
}

/// B3: answers to another question are refused, not counted as answers.
#[test]
fn b3_a_rank_out_of_step_is_named() {
    let ahead = lies(|message| match message {
        FromRank::Done { point, measured } => FromRank::Done { point: point + 1, measured },
        message => message,
    });
    let (broken, ..) = World::new(4, 4, even, only(1, ahead)).broken();
    let said = broken.to_string();
    assert!(
        said.starts_with("rank 1 (pid 1) is out of step: it says that point 2 is done while point 1 of "),
        "{said}"
    );
    let warm = lies(|message| match message {
        FromRank::Grid(_) => FromRank::Warm,
        message => message,
    });
    let (broken, ..) = World::new(4, 4, even, only(1, warm)).broken();
    assert!(matches!(broken, Broken::OutOfStep { rank: DpRank(1), step: Step::Grid, .. }), "{broken}");
    let failed = lies(|message| match message {
        FromRank::Done { point: 2, .. } => FromRank::Failed { why: "the engine answered 500".to_owned() },
        message => message,
    });
    let (broken, ..) = World::new(4, 4, even, only(1, failed)).broken();
    let said = broken.to_string();
    assert!(said.contains("rank 1 (pid 1) has failed while point 3 of "), "{said}");
    assert!(said.ends_with("): the engine answered 500"), "{said}");
}

/// B3: strangers on the port cost a counter; they neither end a bench nor count as ranks.
#[test]
fn b3_strangers_do_no_harm() {
    let mut world = World::new(6, 4, even, sound);
    let stranger = PeerId(Bytes::from_static(b"stranger"));
    for _ in 0..40 {
        let mut orders = Vec::new();
        world.coordinator.unreadable(&stranger, &Unreadable::Foreign, &mut orders);
        assert!(orders.is_empty());
        world.coordinator.handle(world.now, &stranger, FromRank::Warm, &mut orders);
        world.coordinator.gone(&stranger, "gone", &mut orders);
        assert!(orders.is_empty());
        let version = Unreadable::Version { theirs: "rankwise-ranks/9".to_owned() };
        world.coordinator.unreadable(&stranger, &version, &mut orders);
        assert!(
            matches!(orders.as_slice(), [CoordinatorAction::Send(to, ToRank::Failed { .. })] if *to == stranger)
        );
        world.advance();
    }
    // A rank too many, while the others already walk.
    while !world.steps.iter().any(|step| matches!(step, Step::Point { .. })) {
        world.advance();
    }
    let mut orders = Vec::new();
    let late = FromRank::Join { rank: 1, of: 4, who: "pid 99".to_owned(), envelope: FULL };
    world.coordinator.handle(world.now, &stranger, late, &mut orders);
    assert!(
        matches!(orders.as_slice(), [CoordinatorAction::Send(to, ToRank::Failed { .. })] if *to == stranger)
    );
    let (ended, ..) = world.run();
    assert_eq!(ended.unwrap().unwrap().foreign, 121);
}

/// B3: but what a rank that has joined sends must be readable.
#[test]
fn b3_an_unreadable_rank_is_named() {
    let mut world = World::new(6, 4, even, sound);
    while world.steps.is_empty() {
        world.advance();
    }
    let mut orders = Vec::new();
    world.coordinator.unreadable(&peer(2), &Unreadable::TooLong(9_000_000), &mut orders);
    world.conduct(orders);
    let (broken, ..) = world.broken();
    assert_eq!(broken.to_string(), "rank 2 (pid 2) sent a message that cannot be read: it has 9000000 bytes");
}

/// B3: a rank whose thread or process is seen to end is named at once, even before it has joined.
#[test]
fn b3_an_ended_process_is_named_before_it_joins() {
    let mut world = World::new(6, 4, even, only(3, || Fault::Hangs(0)));
    let mut orders = Vec::new();
    world.coordinator.lost(DpRank(3), "its process ended with exit status: 2", &mut orders);
    world.conduct(orders);
    let (broken, _, time) = world.broken();
    assert_eq!(
        broken.to_string(),
        "rank 3 (not joined) is gone while joining: its process ended with exit status: 2"
    );
    // The others have not joined either and are told by nobody; they have limits of their own.
    assert!(time <= LIMITS.join + LIMITS.answer);
}

/// B3: whatever fails wherever, under many orders of messages, it ends.
#[test]
fn b3_it_always_ends() {
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let of = random.random_range(1..9);
        let plan: Vec<(u32, usize)> =
            (0..of).map(|_| (random.random_range(0..12), random.random_range(0..16))).collect();
        let world = World::new(
            seed,
            of,
            |rank| uneven(FULL, DpRank(rank), of),
            |rank| match plan[rank as usize] {
                (0, after) => Fault::Dies(after),
                (1, after) => Fault::Hangs(after),
                (2, after) => Fault::Lies(Box::new(move |message| match message {
                    FromRank::Done { point, .. } if point as usize == after => FromRank::Warm,
                    message => message,
                })),
                _ => Fault::None,
            },
        );
        let (ended, _, time) = world.run();
        assert!(ended.is_some());
        assert!(time < Duration::from_secs(60), "{seed}: {time:?}");
    }
}

#![allow(clippy::unwrap_used, clippy::panic)]
use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::block::BlockSize;
use crate::fleet::{Announcements, CapacitySpec, DpMode, ErrorKind, Provenance, Ranks};

fn spec(worker: &str, start: u32, size: u32) -> WorkerSpec {
    let ranks = Ranks::range(start, size).unwrap();
    WorkerSpec::new(worker, PoolKey::new("m", None), BlockSize::new(4).unwrap(), ranks)
}

fn zmq(worker: &str, start: u32, size: u32, base: &str) -> WorkerSpec {
    spec(worker, start, size).events(EventsFrom::zmq(base))
}

fn replayed(worker: &str, start: u32, size: u32, base: &str, replay: &str) -> WorkerSpec {
    spec(worker, start, size).events(EventsFrom::zmq_with_replay(base, replay))
}

fn single(worker: &str, rank: u32, at: &str) -> WorkerSpec {
    let endpoints = Endpoints::per_rank([(DpRank(rank), at)]);
    let spec =
        spec(worker, rank, 1).events(EventsFrom::Zmq { endpoints, replay: None, topic: String::new() });
    WorkerSpec { ranks: Ranks::single(DpRank(rank)).unwrap(), ..spec }
}

fn added(change: &Change) -> Vec<u32> {
    change.added.iter().map(|plan| plan.rank.dp_rank.0).collect()
}

fn numbers(ranks: &[RankKey]) -> Vec<u32> {
    ranks.iter().map(|rank| rank.dp_rank.0).collect()
}

fn events(fleet: &Fleet, worker: &str) -> Vec<String> {
    fleet.plans(&worker.into()).map(|plan| plan.events.as_ref().unwrap().to_string()).collect()
}

/// The fleet as far as it can be seen: for showing that a refusal changed nothing.
fn seen(fleet: &Fleet) -> String {
    let mut claims: Vec<_> = fleet.claims.iter().map(|claim| format!("{claim:?}")).collect();
    claims.sort();
    format!("{:?} {:?} {claims:?} {}", fleet.pools, fleet.workers, fleet.ranks)
}

fn refused(fleet: &mut Fleet, spec: WorkerSpec) -> DeclareError {
    let before = seen(fleet);
    let error = fleet.declare(spec).unwrap_err();
    assert_eq!(seen(fleet), before, "{error}");
    error
}

/// R3, C06
#[test]
fn one_endpoint_per_declared_rank_offset_by_the_global_rank() {
    let mut fleet = Fleet::new();
    fleet.declare(zmq("w1", 0, 4, "tcp://10.0.0.1:5557")).unwrap();
    let change = fleet.declare(zmq("w2", 4, 4, "tcp://10.0.0.2:5557")).unwrap();
    assert_eq!(events(&fleet, "w1"), [5557, 5558, 5559, 5560].map(|port| format!("tcp://10.0.0.1:{port}")));
    assert_eq!(events(&fleet, "w2"), [5561, 5562, 5563, 5564].map(|port| format!("tcp://10.0.0.2:{port}")));
    assert_eq!(added(&change), [4, 5, 6, 7]);
    assert_eq!(change.added[3].local, Some(LocalRank(3)));
}

/// R1: ranks 0-3 and 4-7 of two workers serve one model side by side.
#[test]
fn two_workers_share_a_pool() {
    let mut fleet = Fleet::new();
    fleet.declare(spec("w1", 0, 4)).unwrap();
    fleet.declare(spec("w2", 4, 4)).unwrap();
    let pool = fleet.pools().next().unwrap();
    assert_eq!((fleet.pools().len(), pool.workers.len(), fleet.rank_count()), (1, 2, 8));
    assert_eq!(fleet.workers_of(&pool.key).map(|spec| spec.ranks.start().0).collect::<Vec<_>>(), [0, 4]);
    assert_eq!(fleet.local(&RankKey::new("w2", 6)), Some(LocalRank(2)));
    assert_eq!(fleet.local(&RankKey::new("w2", 2)), None);
}

/// R1
#[test]
fn the_first_worker_fixes_the_pools_block_size() {
    let mut fleet = Fleet::new();
    fleet.declare(spec("w1", 0, 1)).unwrap();
    let mut other = spec("w2", 1, 1);
    other.block_size = BlockSize::new(16).unwrap();
    let error = refused(&mut fleet, other.clone());
    assert_eq!((error.field(), error.kind()), ("block_size", ErrorKind::Conflict));
    fleet.withdraw(&"w1".into()).unwrap();
    fleet.declare(other).unwrap();
}

/// R1
#[test]
fn a_worker_is_in_one_pool() {
    let mut fleet = Fleet::new();
    fleet.declare(spec("w1", 0, 1)).unwrap();
    for pool in [PoolKey::new("n", None), PoolKey::new("m", Some("gold"))] {
        let mut moved = spec("w1", 0, 1);
        moved.pool = pool;
        assert_eq!(refused(&mut fleet, moved).kind(), ErrorKind::Conflict);
    }
}

#[test]
fn empty_names_are_refused() {
    let mut fleet = Fleet::new();
    assert_eq!(refused(&mut fleet, spec("", 0, 1)), DeclareError::EmptyWorker);
    let mut nameless = spec("w", 0, 1);
    nameless.pool = PoolKey::new("", None);
    assert_eq!(refused(&mut fleet, nameless), DeclareError::EmptyModel);
}

/// C46
#[test]
fn ports_that_would_collide_are_refused() {
    let mut fleet = Fleet::new();
    let error = refused(&mut fleet, replayed("w1", 0, 4, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5559"));
    assert_eq!((error.field(), error.kind()), ("endpoint", ErrorKind::Invalid));
    let w1 = || replayed("w1", 0, 4, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5561");
    fleet.declare(w1()).unwrap();
    let error = refused(&mut fleet, zmq("w2", 0, 2, "tcp://10.0.0.1:5558"));
    assert!(matches!(&error, DeclareError::EndpointTaken { by, .. } if by.dp_rank.0 == 1), "{error}");
    assert_eq!(error.kind(), ErrorKind::Conflict);
    fleet.declare(zmq("w2", 0, 2, "tcp://10.0.0.2:5557")).unwrap();
    let again = fleet.declare(w1()).unwrap();
    assert!(again.is_empty());
    assert_eq!(numbers(&again.kept), [0, 1, 2, 3]);
}

/// R3: event and replay ranges must not meet across workers and pools either, nor wildcards that we bind.
#[test]
fn endpoints_are_compared_over_the_whole_fleet() {
    let mut fleet = Fleet::new();
    fleet.declare(replayed("w1", 0, 2, "tcp://h:5557", "tcp://h:6557")).unwrap();
    let mut other_pool = zmq("w2", 0, 1, "tcp://H:6558");
    other_pool.pool = PoolKey::new("n", None);
    let error = refused(&mut fleet, other_pool);
    assert!(matches!(error, DeclareError::EndpointTaken { other_field: "replay_endpoint", .. }));
    let error = refused(&mut fleet, replayed("w2", 0, 1, "tcp://g:1", "tcp://h:5557"));
    assert_eq!(error.field(), "replay_endpoint");
    fleet.declare(zmq("w3", 0, 2, "tcp://*:5557")).unwrap();
    assert_eq!(refused(&mut fleet, zmq("w4", 0, 1, "tcp://[::]:5558")).kind(), ErrorKind::Conflict);
}

/// R3
#[test]
fn two_ranks_on_one_endpoint_of_one_worker_are_refused() {
    let mut endpoints = Endpoints::base("tcp://h:5557");
    endpoints.per_rank.insert(DpRank(0), "tcp://h:5558".into());
    let spec = spec("w1", 0, 2).events(EventsFrom::Zmq { endpoints, replay: None, topic: String::new() });
    let error = refused(&mut Fleet::new(), spec);
    assert!(matches!(error, DeclareError::EndpointRepeated { rank: DpRank(1), other: DpRank(0), .. }));
}

/// R3
#[test]
fn endpoints_that_cannot_be_are_refused_and_name_the_field() {
    let mut fleet = Fleet::new();
    let with = |endpoints, replay| {
        spec("w1", 4, 2).events(EventsFrom::Zmq { endpoints, replay, topic: String::new() })
    };
    let error = refused(&mut fleet, with(Endpoints::per_rank([(DpRank(4), "tcp://h:1")]), None));
    assert_eq!(error, DeclareError::NoEndpoint { rank: DpRank(5) });
    // Local numbers where global ones are meant.
    let mut local = Endpoints::base("tcp://h:5557");
    local.per_rank.insert(DpRank(0), "tcp://h:7000".into());
    let error = refused(&mut fleet, with(local, None));
    assert_eq!(error, DeclareError::UndeclaredRank { field: "endpoint", rank: DpRank(0) });
    let error = refused(&mut fleet, with(Endpoints::base("tcp://h:65531"), None));
    assert!(matches!(error, DeclareError::PortPastEnd { rank: DpRank(5), port: 65531, .. }), "{error}");
    let error = refused(&mut fleet, with(Endpoints::base("tcp://h:1"), Some(Endpoints::base("inproc://x"))));
    assert_eq!((error.field(), error.kind()), ("replay_endpoint", ErrorKind::Invalid));
}

/// R3: replay is always dialled, so a wildcard is a mistake.
#[test]
fn a_replay_wildcard_is_refused() {
    let error = refused(&mut Fleet::new(), replayed("w1", 0, 2, "tcp://h:5557", "tcp://*:6557"));
    assert_eq!((error.field(), error.kind()), ("replay_endpoint", ErrorKind::Invalid));
}

/// C45: what is refused changes nothing; the earlier range stays.
#[test]
fn zero_ranks_are_refused_and_the_earlier_range_stays() {
    let mut fleet = Fleet::new();
    assert_eq!(Ranks::range(0, 0), Err(DeclareError::NoRanks));
    fleet.declare(zmq("w2", 0, 2, "tcp://h:5557")).unwrap();
    refused(&mut fleet, zmq("w2", 0, 3, "tcp://h:65534"));
    assert_eq!(fleet.worker(&"w2".into()).unwrap().ranks.len(), 2);
}

/// R7: exactly the ranks that are gone go, wherever the range starts.
#[test]
fn another_range_changes_the_ranks_concerned() {
    let mut fleet = Fleet::new();
    fleet.declare(zmq("w1", 4, 4, "tcp://h:5557")).unwrap();
    let change = fleet.declare(zmq("w1", 6, 4, "tcp://h:5557")).unwrap();
    assert_eq!(numbers(&change.removed), [4, 5]);
    assert_eq!(numbers(&change.kept), [6, 7]);
    assert_eq!(added(&change), [8, 9]);
    assert_eq!(fleet.rank_count(), 4);
    // The endpoints of the ranks that are gone are free again.
    fleet.declare(zmq("w2", 4, 2, "tcp://h:5557")).unwrap();
}

/// R7: a rank with another stream starts anew.
#[test]
fn a_rank_whose_stream_changed_is_removed_and_added() {
    let mut fleet = Fleet::new();
    fleet.declare(zmq("w1", 0, 2, "tcp://h:5557")).unwrap();
    let mut endpoints = Endpoints::base("tcp://h:5557");
    endpoints.per_rank.insert(DpRank(1), "tcp://h:7000".into());
    let moved = spec("w1", 0, 2).events(EventsFrom::Zmq { endpoints, replay: None, topic: String::new() });
    let change = fleet.declare(moved.clone()).unwrap();
    assert_eq!(
        (numbers(&change.kept), numbers(&change.removed), added(&change)),
        (vec![0], vec![1], vec![1])
    );
    let mut set = moved;
    set.announcements = Announcements::Set;
    let change = fleet.declare(set.clone()).unwrap();
    assert_eq!((numbers(&change.removed), added(&change)), (vec![0, 1], vec![0, 1]));
    set.http_endpoint = Some("http://h:8000".into());
    assert!(fleet.declare(set).unwrap().is_empty());
    assert!(fleet.worker(&"w1".into()).unwrap().http_endpoint.is_some());
}

/// Ranks of one worker may take over each other's endpoints in one declaration.
#[test]
fn endpoints_may_be_swapped_within_a_worker() {
    let mut fleet = Fleet::new();
    let swapped = |zero: &str, one: &str| {
        let endpoints = Endpoints::per_rank([(DpRank(0), zero), (DpRank(1), one)]);
        spec("w1", 0, 2).events(EventsFrom::Zmq { endpoints, replay: None, topic: String::new() })
    };
    fleet.declare(swapped("tcp://h:1", "tcp://h:2")).unwrap();
    let change = fleet.declare(swapped("tcp://h:2", "tcp://h:1")).unwrap();
    assert_eq!(added(&change), [0, 1]);
    let error = refused(&mut fleet, zmq("w2", 0, 1, "tcp://h:1"));
    assert!(matches!(error, DeclareError::EndpointTaken { by, .. } if by == RankKey::new("w1", 1)));
}

/// C27, R7
#[test]
fn a_withdrawn_worker_leaves_nothing() {
    let mut fleet = Fleet::new();
    let nothing = seen(&fleet);
    fleet.declare(replayed("w1", 3, 2, "tcp://h:5557", "tcp://h:6557")).unwrap();
    let change = fleet.withdraw(&"w1".into()).unwrap();
    assert_eq!(numbers(&change.removed), [3, 4]);
    assert!(change.worker_gone && change.pool_gone && change.added.is_empty() && change.kept.is_empty());
    assert_eq!(seen(&fleet), nothing);
    assert_eq!(fleet.withdraw(&"w1".into()), None);
    let back = fleet.declare(replayed("w1", 3, 2, "tcp://h:5557", "tcp://h:6557")).unwrap();
    assert_eq!(added(&back), [3, 4]);
}

#[test]
fn a_pool_goes_with_its_last_worker_only() {
    let mut fleet = Fleet::new();
    fleet.declare(spec("w1", 0, 1)).unwrap();
    fleet.declare(spec("w2", 1, 1)).unwrap();
    assert!(!fleet.withdraw(&"w1".into()).unwrap().pool_gone);
    assert!(fleet.pool(&PoolKey::new("m", None)).is_some());
    assert!(fleet.withdraw(&"w2".into()).unwrap().pool_gone);
    assert!(fleet.pool(&PoolKey::new("m", None)).is_none());
}

/// `/register` of single ranks.
#[test]
fn ranks_are_registered_one_by_one() {
    let mut fleet = Fleet::new();
    assert_eq!(added(&fleet.add_rank(single("7", 1, "tcp://h:1")).unwrap()), [1]);
    let change = fleet.add_rank(single("7", 0, "tcp://h:2")).unwrap();
    assert_eq!((added(&change), numbers(&change.kept)), (vec![0], vec![1]));
    // R4: nobody said where the worker starts.
    assert_eq!(fleet.local(&RankKey::new("7", 1)), None);
    assert_eq!(events(&fleet, "7"), ["tcp://h:2", "tcp://h:1"]);
    let before = seen(&fleet);
    let error = fleet.add_rank(single("7", 1, "tcp://h:3")).unwrap_err();
    assert_eq!((error.field(), error.kind()), ("dp_rank", ErrorKind::Conflict));
    let error = fleet.add_rank(single("7", 2, "tcp://h:1")).unwrap_err();
    assert_eq!((error.field(), error.kind()), ("endpoint", ErrorKind::Conflict));
    let error = fleet.add_rank(spec("7", 2, 1)).unwrap_err();
    assert_eq!(error, DeclareError::OtherEvents { worker: "7".into() });
    assert_eq!(seen(&fleet), before);
}

/// `/register` beside a declared range, with a replay endpoint that the range has not.
#[test]
fn a_rank_is_registered_beside_a_range() {
    let mut fleet = Fleet::new();
    fleet.declare(zmq("w1", 0, 2, "tcp://h:5557")).unwrap();
    let rank = EventsFrom::Zmq {
        endpoints: Endpoints::per_rank([(DpRank(2), "tcp://g:1")]),
        replay: Some(Endpoints::per_rank([(DpRank(2), "tcp://g:2")])),
        topic: String::new(),
    };
    let change = fleet.add_rank(spec("w1", 2, 1).events(rank)).unwrap();
    assert_eq!((added(&change), numbers(&change.kept)), (vec![2], vec![0, 1]));
    assert_eq!(events(&fleet, "w1"), ["tcp://h:5557", "tcp://h:5558", "tcp://g:1"]);
    assert!(fleet.rank(&RankKey::new("w1", 2)).unwrap().replay.is_some());
    assert!(fleet.rank(&RankKey::new("w1", 1)).unwrap().replay.is_none());
}

/// A rank that is registered without a replay endpoint has none, whatever its neighbours' base would give it.
#[test]
fn a_registered_rank_inherits_no_endpoint() {
    let mut fleet = Fleet::new();
    let range = || replayed("w1", 4, 2, "tcp://h:5557", "tcp://h:6557");
    fleet.declare(range()).unwrap();
    fleet.add_rank(zmq("w1", 0, 1, "tcp://h:5557")).unwrap();
    assert_eq!(fleet.rank(&RankKey::new("w1", 0)).unwrap().replay, None);
    assert!(fleet.rank(&RankKey::new("w1", 5)).unwrap().replay.is_some());
    let back = fleet.declare(range()).unwrap();
    assert_eq!((numbers(&back.removed), numbers(&back.kept), added(&back)), (vec![0], vec![4, 5], vec![]));
}

/// `/unregister` of one rank takes that rank only (R7), and its neighbours keep their local numbers (R4).
#[test]
fn ranks_are_unregistered_one_by_one() {
    let mut fleet = Fleet::new();
    let mut four = zmq("w1", 4, 3, "tcp://h:5557");
    four.capacity = Some(CapacitySpec::per_rank_list(&four.ranks, &[10, 20, 30]).unwrap());
    fleet.declare(four.clone()).unwrap();
    let change = fleet.remove_rank(&RankKey::new("w1", 4)).unwrap();
    assert_eq!((numbers(&change.removed), numbers(&change.kept)), (vec![4], vec![5, 6]));
    assert!(!change.worker_gone && !change.pool_gone);
    assert_eq!(fleet.remove_rank(&RankKey::new("w1", 4)), None);
    assert_eq!(fleet.local(&RankKey::new("w1", 5)), Some(LocalRank(1)));
    assert_eq!(fleet.capacity_blocks(&RankKey::new("w1", 5)).exact(), Some(20));
    assert_eq!(fleet.capacity_blocks(&RankKey::new("w1", 4)), Capacity::Unknown);
    fleet.add_rank(single("w1", 9, "tcp://g:1")).unwrap();
    assert_eq!(fleet.capacity_blocks(&RankKey::new("w1", 9)), Capacity::Unknown);
    assert!(!fleet.remove_rank(&RankKey::new("w1", 9)).unwrap().worker_gone);
    let back = fleet.declare(four).unwrap();
    assert_eq!((added(&back), numbers(&back.kept)), (vec![4], vec![5, 6]));
    for rank in [4, 5, 6] {
        assert_eq!(fleet.remove_rank(&RankKey::new("w1", rank)).unwrap().worker_gone, rank == 6);
    }
    assert_eq!((fleet.pools().len(), fleet.claims.len(), fleet.rank_count()), (0, 0, 0));
}

/// R9
#[test]
fn a_worker_without_events_is_declared_as_such() {
    let mut fleet = Fleet::new();
    let change = fleet.declare(spec("w1", 0, 2).events(EventsFrom::None)).unwrap();
    assert!(change.added.iter().all(|plan| !plan.publishes && plan.events.is_none()));
    let change = fleet.declare(spec("w2", 0, 1)).unwrap();
    assert!(change.added[0].publishes);
}

/// C44, R5
#[test]
fn a_pin_holds_or_is_refused() {
    let mut fleet = Fleet::new();
    fleet.declare(spec("w2", 4, 4)).unwrap();
    let pool = PoolKey::new("m", None);
    let pin = |rank: Option<u32>| fleet.pin(&pool, &"w2".into(), rank.map(DpRank));
    assert_eq!(pin(Some(6)), Ok(Pin::Rank(DpRank(6), Some(LocalRank(2)))));
    assert_eq!(pin(None), Ok(Pin::Worker));
    for outside in [0, 2, 3, 8] {
        assert!(matches!(pin(Some(outside)), Err(PinError::NoSuchRank { count: 4, .. })));
    }
    let unknown = fleet.pin(&pool, &"w1".into(), Some(DpRank(4)));
    assert!(matches!(unknown, Err(PinError::UnknownWorker { .. })));
    let elsewhere = fleet.pin(&PoolKey::new("n", None), &"w2".into(), Some(DpRank(4)));
    assert!(matches!(elsewhere, Err(PinError::UnknownWorker { .. })));
}

/// C40, L11
#[test]
fn capacity_is_told_per_rank() {
    let mut fleet = Fleet::new();
    fleet.declare(spec("a", 0, 4).capacity(CapacitySpec::aggregate(4003))).unwrap();
    fleet.declare(spec("d", 4, 2).capacity(CapacitySpec::per_rank(1000))).unwrap();
    fleet.declare(spec("e", 0, 2).capacity(CapacitySpec::worker_shared(1000))).unwrap();
    fleet.declare(spec("f", 0, 2)).unwrap();
    let blocks = |worker: &str, rank| fleet.capacity_blocks(&RankKey::new(worker, rank)).blocks();
    assert_eq!((blocks("a", 3), blocks("d", 5), blocks("e", 0)), (Some(1000), Some(1000), None));
    assert_eq!((blocks("a", 4), blocks("f", 0), blocks("nobody", 0)), (None, None, None));
    assert_eq!(
        fleet.shared_capacity(&"e".into()),
        Capacity::Known { blocks: 1000, provenance: Provenance::WorkerShared }
    );
    assert_eq!(fleet.shared_capacity(&"a".into()), Capacity::Unknown);
}

/// L11: the smallest stands for uneven ranks.
#[test]
fn the_smallest_capacity_stands_for_all() {
    let mut fleet = Fleet::new();
    let mut uneven = spec("w", 0, 3);
    uneven.capacity = Some(CapacitySpec::per_rank_list(&uneven.ranks, &[30, 10, 20]).unwrap());
    fleet.declare(uneven.clone()).unwrap();
    assert_eq!(fleet.smallest_capacity(&"w".into()).exact(), Some(10));
    uneven.capacity = Some(CapacitySpec::per_rank_list(&uneven.ranks, &[30, 0, 20]).unwrap());
    fleet.declare(uneven.clone()).unwrap();
    assert_eq!(fleet.smallest_capacity(&"w".into()), Capacity::Unknown);
    uneven.ranks = Ranks::range(0, 2).unwrap();
    assert_eq!(refused(&mut fleet, uneven).field(), "capacity");
}

/// C41, L12
#[test]
fn request_limits_follow_the_kind_of_data_parallelism() {
    let mut fleet = Fleet::new();
    for (worker, dp_mode) in [("p", DpMode::Pure), ("t", DpMode::Attention)] {
        let mut limited = spec(worker, 0, 4);
        (limited.dp_mode, limited.max_running_requests) = (dp_mode, Some(256));
        fleet.declare(limited).unwrap();
    }
    let limit = |worker: &str, rank| fleet.request_limit(&RankKey::new(worker, rank));
    assert_eq!([limit("p", 0), limit("p", 3)], [Some(256); 2]);
    assert_eq!([limit("t", 0), limit("t", 3)], [Some(64); 2]);
    assert_eq!(limit("t", 4), None);
}

#[test]
fn a_full_fleet_takes_no_more() {
    let mut fleet = Fleet::new();
    for worker in 0..16 {
        fleet.declare(spec(&worker.to_string(), 0, 4096)).unwrap();
    }
    assert_eq!(refused(&mut fleet, spec("16", 0, 1)), DeclareError::FleetFull { ranks: 65_537 });
    fleet.declare(spec("0", 0, 4095)).unwrap();
    fleet.declare(spec("16", 0, 1)).unwrap();
}

/// Names match exactly; a prefix counts for configured patterns only.
#[test]
fn models_resolve_to_pools() {
    let mut fleet = Fleet::new();
    let mut llama = spec("w1", 0, 1);
    llama.pool = PoolKey::new("llama", None);
    fleet.declare(llama).unwrap();
    assert!(!fleet.add_model_pattern("llama", "llama"));
    assert!(fleet.add_model_pattern("llama/", "llama"));
    assert!(fleet.add_model_pattern("llama/sql/", "absent"));
    let model = |name, group| fleet.resolve(name, group).map(|pool| pool.key.to_string());
    assert_eq!(model("llama", None).as_deref(), Some("llama:default"));
    assert_eq!(model("llama/adapter", None).as_deref(), Some("llama:default"));
    assert_eq!(model("llama-3", None), None);
    assert_eq!(model("llama", Some("gold")), None);
    assert_eq!(model("llama/sql/1", None), None);
}

/// Messages say what to do.
#[test]
fn refusals_read_well() {
    let error = refused(&mut Fleet::new(), zmq("w1", 0, 10, "tcp://h:65530"));
    assert_eq!(
        error.to_string(),
        "endpoint `tcp://h:65530`: base port 65530 plus global rank 6 is past port 65535: \
         use a lower base port or give rank 6 its own endpoint"
    );
}

/// What a random history does next.
#[derive(Clone, Debug)]
enum Step {
    Declare(WorkerSpec),
    Add(WorkerSpec),
    Remove(RankKey),
    Withdraw(WorkerId),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let worker = || (0..3_u32).prop_map(|worker| format!("w{worker}"));
    let port = || 1..12_u16;
    let spec = move || {
        (worker(), 0..5_u32, 1..5_u32, port(), prop::option::of(port()), 0..3_u8, any::<bool>()).prop_map(
            |(worker, start, size, events, replay, pool, counted)| {
                let events = format!("tcp://h:{events}");
                let mut spec = spec(&worker, start, size);
                spec.events = match (pool, replay) {
                    (0, None) => EventsFrom::None,
                    (_, None) => EventsFrom::zmq(events),
                    (_, Some(replay)) => EventsFrom::zmq_with_replay(events, format!("tcp://h:{replay}")),
                };
                spec.pool = PoolKey::new(if pool == 2 { "n" } else { "m" }, None);
                spec.announcements = if counted { Announcements::Counted } else { Announcements::Set };
                spec
            },
        )
    };
    let step = prop_oneof![
        4 => spec().prop_map(Step::Declare),
        3 => spec().prop_map(Step::Add),
        2 => (worker(), 0..8_u32).prop_map(|(worker, rank)| Step::Remove(RankKey::new(&*worker, rank))),
        1 => worker().prop_map(|worker| Step::Withdraw(WorkerId::new(worker))),
    ];
    prop::collection::vec(step, 1..40)
}

/// What every consumer of changes does: the ranks that it keeps something for.
fn follow(mirror: &mut BTreeMap<RankKey, RankPlan>, change: &Change) {
    for rank in &change.removed {
        assert!(mirror.remove(rank).is_some(), "removed {rank} was not there");
    }
    for rank in &change.kept {
        assert!(mirror.contains_key(rank), "kept {rank} was not there");
    }
    for plan in &change.added {
        assert!(mirror.insert(plan.rank.clone(), plan.clone()).is_none(), "added {} was there", plan.rank);
    }
}

proptest! {
    /// R3, R7: whoever follows the changes has exactly the declared ranks, with their streams; no place is
    /// ever claimed twice; nothing outlives its rank; what is refused changes nothing.
    #[test]
    fn changes_tell_everything(steps in steps()) {
        let mut fleet = Fleet::new();
        let mut mirror = BTreeMap::new();
        for step in steps {
            let before = seen(&fleet);
            let change = match step {
                Step::Declare(spec) => fleet.declare(spec).ok(),
                Step::Add(spec) => fleet.add_rank(spec).ok(),
                Step::Remove(rank) => fleet.remove_rank(&rank),
                Step::Withdraw(worker) => fleet.withdraw(&worker),
            };
            let Some(change) = change else {
                prop_assert_eq!(seen(&fleet), before);
                continue;
            };
            follow(&mut mirror, &change);
            prop_assert_eq!(change.worker_gone, fleet.worker(&change.worker).is_none());
            prop_assert_eq!(change.pool_gone, fleet.pool(&change.pool).is_none());
            let plans: Vec<_> =
                fleet.workers().flat_map(|spec| fleet.plans(&spec.worker)).collect();
            prop_assert_eq!(plans.len(), fleet.rank_count());
            prop_assert_eq!(plans.len(), mirror.len());
            for plan in &plans {
                prop_assert!(mirror[&plan.rank].same_stream(plan));
                prop_assert_eq!(fleet.local(&plan.rank), plan.local);
            }
            let places: Vec<_> = plans.iter().flat_map(|plan| endpoints_of(plan)).collect();
            let distinct: HashSet<_> = places.iter().map(|(endpoint, _)| endpoint.place()).collect();
            prop_assert_eq!(distinct.len(), places.len());
            prop_assert_eq!(distinct, fleet.claims.keys().collect::<HashSet<_>>());
            prop_assert!(fleet.pools().all(|pool| !pool.workers.is_empty()));
        }
    }
}

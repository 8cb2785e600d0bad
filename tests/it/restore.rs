//! The fleet and its loads rebuilt from a saved value.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use rankwise::block::BlockSize;
use rankwise::fleet::{EventsFrom, PoolKey, Ranks, WorkerSpec};
use rankwise::ids::{Moment, RankKey};
use rankwise::indexer::{Action, Config, Indexer};
use rankwise::load::{LoadEntry, LoadReport, RawRankLoad};

fn worker(id: &str, start: u32, host: u8) -> WorkerSpec {
    let key = PoolKey::new("m", None);
    WorkerSpec::new(id, key, BlockSize::new(16).unwrap(), Ranks::range(start, 4).unwrap())
        .events(EventsFrom::zmq(format!("tcp://10.0.0.{host}:5557")))
}

/// L16, R2: after a restore every declared rank is bound to its stream and its load at once, not only the
/// first; a card that cannot be is ignored and counted, and the valid ones stay.
#[test]
fn a_restored_fleet_is_bound_and_published_at_once() {
    let (mut first, first_view) = Indexer::new(Config::default());
    let mut actions = Vec::new();
    let saved_at = Moment::from_millis(5_000);
    first.declare_worker(saved_at, worker("w1", 0, 1), &mut actions).unwrap();
    first.declare_worker(saved_at, worker("w2", 4, 2), &mut actions).unwrap();
    for (id, ranks) in [("w1", 0..4), ("w2", 4..8)] {
        let entries = ranks.map(|rank| {
            let load = RawRankLoad { num_running_reqs: f64::from(rank).into(), ..RawRankLoad::default() };
            LoadEntry::new(rank, load)
        });
        let report = LoadReport::new(entries.collect());
        first_view.loads().lock().report(saved_at, &id.into(), &report);
    }
    let mut cards = first.saved_fleet();
    let loads = first_view.loads().lock().saved(saved_at);
    assert_eq!((cards.len(), loads.len()), (2, 8));

    // A card that dials what another one dials.
    cards.insert(1, worker("w3", 0, 1));
    let (mut second, view) = Indexer::new(Config::default());
    let now = Moment::from_millis(100);
    actions.clear();
    let restored = second.restore(now, cards, &mut actions);
    assert_eq!(restored.ranks, 8);
    assert_eq!(restored.ignored.iter().map(|(id, _)| id.as_str()).collect::<Vec<_>>(), ["w3"]);
    assert_eq!(view.ignored_cards(), 1);
    let bound = actions.iter().filter(|action| matches!(action, Action::Subscribe { .. })).count();
    assert_eq!(bound, 8, "every rank listens");
    assert_eq!(view.fleet().only_pool().unwrap().ranks().count(), 8, "every rank is published");

    let mut table = view.loads().lock();
    let taken = table.restore(now, Duration::from_secs(3), loads);
    assert_eq!(taken, 8);
    for rank in 0..8 {
        let key = RankKey::new(if rank < 4 { "w1" } else { "w2" }, rank);
        let (load, age) = table.newest(now, &key).unwrap();
        assert_eq!(load.num_running_reqs, Some(u64::from(rank)));
        assert_eq!(age, Duration::from_secs(3), "as old as it is, not new");
    }
}

//! One answer for all who asked the same base URL: what of it is whose.

use std::sync::Arc;

use super::answer::{LoadAnswer, agreed};
use super::report::{LoadEntry, LoadReport};
use crate::ids::{DpRank, WorkerId};

/// A worker's URL: an engine, or one rank of it as the virtual worker `url@rank`.
///
/// Only [`base`](Self::base) is ever dialled.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WorkerUrl {
    base: Box<str>,
    rank: Option<DpRank>,
}

/// A text that is no worker's URL.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadWorkerUrl {
    /// Neither HTTP nor gRPC.
    #[error("{0:?} is no URL of http:// or grpc://")]
    Scheme(Box<str>),
    /// Nobody to ask.
    #[error("{0:?} has no host")]
    Host(Box<str>),
    /// A rank beyond what a rank can be.
    #[error("{0:?} ends in a rank above 4294967295")]
    Rank(Box<str>),
}

/// How a base URL is asked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Transport {
    /// `http://`
    Http,
    /// `grpc://`
    Grpc,
}

impl WorkerUrl {
    /// Reads `http://host:port`, `grpc://host:port`, or either with `@rank` behind it. A trailing slash does
    /// not make another worker. There is no TLS: `https://` is another scheme.
    ///
    /// # Errors
    /// Another scheme, no host, a rank that cannot be.
    pub fn parse(text: &str) -> Result<Self, BadWorkerUrl> {
        let (base, rank) = match text.rsplit_once('@') {
            Some((base, digits)) if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) => {
                let rank = digits.parse().map_err(|_| BadWorkerUrl::Rank(text.into()))?;
                (base, Some(DpRank(rank)))
            }
            _ => (text, None),
        };
        let base = base.trim_end_matches('/');
        let rest = ["http://", "grpc://"].iter().find_map(|scheme| base.strip_prefix(scheme));
        match rest {
            None => Err(BadWorkerUrl::Scheme(text.into())),
            Some(rest) if rest.split(['/', '?', '#']).next().is_none_or(str::is_empty) => {
                Err(BadWorkerUrl::Host(text.into()))
            }
            Some(_) => Ok(Self { base: base.into(), rank }),
        }
    }

    /// What is dialled: never with a rank.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The rank that this worker is of the engine; `None` is the whole engine.
    pub fn rank(&self) -> Option<DpRank> {
        self.rank
    }

    /// How it is asked.
    pub fn transport(&self) -> Transport {
        if self.base.starts_with("grpc://") { Transport::Grpc } else { Transport::Http }
    }
}

/// Why an answer says nothing of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Unavailable {
    /// It says nothing at all.
    Empty,
    /// The worker's rank is not in it.
    RankMissing,
    /// Two different things are said of the worker's rank.
    RankTwice,
    /// What stands there for the rank cannot be, or says nothing.
    RankUnreadable,
}

/// The part of `answer` that a worker sees: all of it without a rank; with one, that rank's entry alone and
/// no aggregate. A rollup is nobody's in particular and passes unchanged.
///
/// # Errors
/// Why there is nothing for it, which makes it unknown and not idle.
pub fn project(answer: &LoadAnswer, rank: Option<DpRank>) -> Result<LoadAnswer, Unavailable> {
    let Some(rank) = rank.filter(|_| !answer.is_rollup()) else {
        return if answer.is_empty() { Err(Unavailable::Empty) } else { Ok(answer.clone()) };
    };
    if answer.is_empty() {
        return Err(Unavailable::Empty);
    }
    let first = agreed(&answer.entries).get(&rank.0.into()).copied().ok_or(Unavailable::RankMissing)?;
    let entry = &answer.entries[first.ok_or(Unavailable::RankTwice)?];
    match entry.load.check() {
        Ok((load, _)) if !load.is_empty() => {
            Ok(LoadAnswer { timestamp: answer.timestamp, ..LoadAnswer::of_ranks(vec![*entry]) })
        }
        _ => Err(Unavailable::RankUnreadable),
    }
}

/// A worker that lives on a base URL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tenant {
    /// The worker.
    pub worker: WorkerId,
    /// The only rank that it is, if it is a virtual worker.
    pub rank: Option<DpRank>,
}

/// One report per tenant from one answer. `owns` says whether a worker has a rank declared.
///
/// An entry goes to the tenants that own it. One that nobody owns goes to the first whole engine among them,
/// whose table drops and counts it. An aggregate is a worker's only if the URL is its alone. A tenant for whom
/// there is nothing gets its reason.
///
/// Linear in entries times tenants.
pub fn share_out(
    answer: &LoadAnswer,
    source: &Arc<str>,
    tenants: &[Tenant],
    owns: impl Fn(&WorkerId, DpRank) -> bool,
) -> Vec<(WorkerId, Result<LoadReport, Unavailable>)> {
    let owned_by = |tenant: &Tenant, entry: &LoadEntry| {
        let rank = entry.dp_rank.and_then(|rank| u32::try_from(rank).ok()).map(DpRank);
        rank.is_some_and(|rank| tenant.rank.is_none_or(|only| only == rank) && owns(&tenant.worker, rank))
    };
    let catcher = tenants.iter().position(|tenant| tenant.rank.is_none());
    let shares = tenants.iter().enumerate().map(|(number, tenant)| {
        let share = project(answer, tenant.rank).map(|mut share| {
            if tenants.len() > 1 {
                share.aggregate = None;
            }
            let is_its = |entry: &LoadEntry| {
                owned_by(tenant, entry)
                    || (catcher == Some(number) && !tenants.iter().any(|other| owned_by(other, entry)))
            };
            if tenant.rank.is_none() {
                share.entries.retain(is_its);
            }
            share.into_report(Arc::clone(source))
        });
        (tenant.worker.clone(), share)
    });
    shares.collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::load::{RawRankLoad, RollupEntry};

    fn entry(rank: u32) -> LoadEntry {
        LoadEntry::new(
            rank,
            RawRankLoad { num_running_reqs: f64::from(rank).into(), ..RawRankLoad::default() },
        )
    }

    fn answer(ranks: &[u32]) -> LoadAnswer {
        let mut answer = LoadAnswer::of_ranks(ranks.iter().copied().map(entry).collect());
        answer.aggregate = Some(entry(9).load);
        answer
    }

    /// L9: a virtual worker's rank is never part of what is dialled.
    #[test]
    fn a_virtual_worker_dials_its_base() {
        let url = WorkerUrl::parse("http://10.0.0.5:8000/@3").unwrap();
        assert_eq!((url.base(), url.rank()), ("http://10.0.0.5:8000", Some(DpRank(3))));
        let url = WorkerUrl::parse("grpc://h:50051@0").unwrap();
        assert_eq!(
            (url.base(), url.rank(), url.transport()),
            ("grpc://h:50051", Some(DpRank(0)), Transport::Grpc)
        );
        let named = WorkerUrl::parse("http://user@host:1/base/").unwrap();
        assert_eq!((named.base(), named.rank()), ("http://user@host:1/base", None));
        let error = |text| WorkerUrl::parse(text).unwrap_err();
        assert!(matches!(error("tcp://h:1"), BadWorkerUrl::Scheme(_)));
        assert!(matches!(error("https://h:1"), BadWorkerUrl::Scheme(_)));
        assert!(matches!(error("http://@1"), BadWorkerUrl::Host(_) | BadWorkerUrl::Scheme(_)));
        assert!(matches!(error("http:///x"), BadWorkerUrl::Host(_)));
        assert!(matches!(error("http://h:1@99999999999"), BadWorkerUrl::Rank(_)));
    }

    /// L7
    #[test]
    fn a_virtual_worker_sees_its_rank_alone() {
        let seen = project(&answer(&[4, 5, 6]), Some(DpRank(5))).unwrap();
        assert_eq!((seen.dp_rank_count(), seen.aggregate), (1, None));
        assert_eq!(seen.entries, [entry(5)]);
        assert_eq!(project(&answer(&[4, 5]), Some(DpRank(0))), Err(Unavailable::RankMissing));
        assert!(project(&answer(&[4, 4]), Some(DpRank(4))).is_ok());
        let mut contradicting = answer(&[4, 4]);
        contradicting.entries[1].load.num_running_reqs = 7.0.into();
        assert_eq!(project(&contradicting, Some(DpRank(4))), Err(Unavailable::RankTwice));
        let mut bad = answer(&[4]);
        bad.entries[0].load.token_usage = 2.0.into();
        assert_eq!(project(&bad, Some(DpRank(4))), Err(Unavailable::RankUnreadable));
        assert_eq!(project(&answer(&[4, 5]), None).unwrap(), answer(&[4, 5]));
    }

    /// L6
    #[test]
    fn an_empty_answer_is_unavailable() {
        assert_eq!(project(&LoadAnswer::default(), None), Err(Unavailable::Empty));
        assert_eq!(project(&LoadAnswer::default(), Some(DpRank(0))), Err(Unavailable::Empty));
    }

    /// L8
    #[test]
    fn a_rollup_passes_whole() {
        let rollup = RollupEntry { worker: Some("w".into()), worker_type: None, entry: entry(1) };
        let rollup = LoadAnswer { rollup: vec![rollup], ..LoadAnswer::default() };
        assert_eq!(project(&rollup, Some(DpRank(7))).unwrap(), rollup);
        let tenants = [Tenant { worker: "a".into(), rank: None }];
        let shares = share_out(&rollup, &"http".into(), &tenants, |_, _| true);
        assert!(shares[0].1.as_ref().unwrap().entries.is_empty());
    }

    /// L9: one answer serves all that live on the URL; what nobody owns is counted once, by the first.
    #[test]
    fn one_answer_serves_all() {
        let tenants = [Tenant { worker: "a".into(), rank: None }, Tenant { worker: "b".into(), rank: None }];
        let owns = |worker: &WorkerId, rank: DpRank| (worker.as_str() == "a") == (rank.0 < 4) && rank.0 < 8;
        let shares = share_out(&answer(&[0, 4, 7, 9]), &"http".into(), &tenants, owns);
        let ranks = |at: usize| -> Vec<_> {
            shares[at].1.as_ref().unwrap().entries.iter().map(|entry| entry.dp_rank.unwrap()).collect()
        };
        assert_eq!((ranks(0), ranks(1)), (vec![0, 9], vec![4, 7]));
        assert_eq!(shares[0].1.as_ref().unwrap().aggregate, None);
        let alone = share_out(&answer(&[0]), &"http".into(), &tenants[..1], owns);
        assert!(alone[0].1.as_ref().unwrap().aggregate.is_some());
    }
}

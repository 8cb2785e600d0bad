//! What a described worker comes to: the [`WorkerSpec`] that the fleet takes, or what is missing for it, for each
//! of the ways to describe one.

use std::collections::BTreeMap;

use super::boundary::WireId;
use super::declaration::{
    CapacityBody, EngineBody, PerRank, TierBody, WorkerFields, block_size, check_blank,
};
use super::problem::Problem;
use crate::block::BlockSize;
use crate::fleet::{CapacitySpec, DeclareError, Endpoints, EventsFrom, Ranks, ScoreTiers, WorkerSpec};
use crate::ids::DpRank;
use crate::load::WorkerUrl;

/// Most missing endpoints that are listed one by one.
const MAX_REASONS: usize = 16;

/// Whether a worker can be declared.
pub(super) enum Readiness {
    /// It can.
    Complete(Box<WorkerSpec>),
    /// These things are missing.
    Incomplete(Vec<String>),
}

// === as posted to /workers ===

impl WorkerFields {
    /// What the fleet is to be told of a worker that was posted to `/workers`, or what is missing for it.
    ///
    /// # Errors
    ///
    /// What can never be right, whatever is added later.
    pub(super) fn readiness(&self, id: &WireId) -> Result<Readiness, Problem> {
        let ranks = self.ranks()?;
        let pool = self.pool();
        if pool.model.is_empty() {
            return Err(self.invalid(DeclareError::EmptyModel));
        }
        let block_size = self.block_size.map(block_size).transpose()?;
        let events = self.events_from(&ranks, false)?;
        let mut missing = Vec::new();
        if self.endpoint.as_ref().or(self.http_endpoint.as_ref()).is_none_or(String::is_empty) {
            missing.push("endpoint is required".to_owned());
        }
        let (Some(block_size), Some(events)) = (block_size, events) else {
            if block_size.is_none() {
                missing.push("block_size must be greater than 0".to_owned());
            }
            missing.extend(self.ranks_without_events(&ranks));
            return Ok(Readiness::Incomplete(missing));
        };
        if !missing.is_empty() {
            return Ok(Readiness::Incomplete(missing));
        }
        let mut spec = WorkerSpec::new(id.id.clone(), pool, block_size, ranks).events(events);
        spec.id_form = id.form;
        spec.http_endpoint = self.endpoint.clone().or_else(|| self.http_endpoint.clone());
        self.put_settings(&mut spec)?;
        Ok(Readiness::Complete(Box::new(spec)))
    }

    pub(super) fn ranks(&self) -> Result<Ranks, Problem> {
        let (start, size) =
            (self.data_parallel_start_rank.unwrap_or(0), self.data_parallel_size.unwrap_or(1));
        Ranks::range(start, size).map_err(|error| self.invalid(error))
    }

    fn invalid(&self, error: DeclareError) -> Problem {
        Problem::declare(&error, |field| self.called(field))
    }

    /// What a field of the fleet is called here.
    pub(super) fn called(&self, field: &'static str) -> &'static str {
        match field {
            "size" => "data_parallel_size",
            "endpoint" if self.kv_events_endpoints.is_some() => "kv_events_endpoints",
            "endpoint" => "kv_events_endpoint",
            field => field,
        }
    }

    fn has_no_events(&self) -> bool {
        self.no_events == Some(true) || self.events.as_deref() == Some("none")
    }

    /// The base of all ranks' event endpoints.
    fn events_base(&self) -> Option<&String> {
        let named = self.events.as_ref().filter(|events| !matches!(events.as_str(), "zmq" | "none"));
        self.kv_events_base_endpoint.as_ref().or(named)
    }

    /// `None` while a rank has no endpoint. `replay_is_base`: also one rank's replay endpoint is a base.
    fn events_from(&self, ranks: &Ranks, replay_is_base: bool) -> Result<Option<EventsFrom>, Problem> {
        if self.has_no_events() {
            return Ok(Some(EventsFrom::None));
        }
        check_blank("kv_events_endpoint", self.kv_events_endpoint.as_deref())?;
        check_blank("kv_events_base_endpoint", self.events_base().map(String::as_str))?;
        check_blank("replay_endpoint", self.replay_endpoint.as_deref())?;
        if let Some(events) = self.events_base()
            && !events.contains("://")
        {
            let detail = format!("events is {events:?}; give `zmq`, `none` or a base endpoint (tcp://…)");
            return Err(Problem::wrong_field("events", detail));
        }
        if self.ranks_without_events(ranks).next().is_some() {
            return Ok(None);
        }
        let single = (ranks.len() == 1).then(|| ranks.start());
        let own = |list: &Option<BTreeMap<u32, String>>, one: &Option<String>| {
            let one = one.iter().filter_map(|one| Some((single?, one.clone())));
            let list = list.iter().flatten().map(|(rank, at)| (DpRank(*rank), at.clone()));
            // What is given for the rank by its number wins.
            one.chain(list).collect::<BTreeMap<_, _>>()
        };
        let endpoints = Endpoints {
            base: self.events_base().cloned(),
            per_rank: own(&self.kv_events_endpoints, &self.kv_events_endpoint),
        };
        // For several ranks the one endpoint is a base, as engines offset it.
        let is_base = single.is_none() || replay_is_base;
        let one = if is_base { &None } else { &self.replay_endpoint };
        let per_rank = own(&self.replay_endpoints, one);
        let base = if is_base { self.replay_endpoint.clone() } else { None };
        let replay = (base.is_some() || !per_rank.is_empty()).then_some(Endpoints { base, per_rank });
        let topic = self.topic.clone().unwrap_or_default();
        Ok(Some(EventsFrom::Zmq { endpoints, replay, topic }))
    }

    fn ranks_without_events<'a>(&'a self, ranks: &'a Ranks) -> impl Iterator<Item = String> + 'a {
        let all = self.has_no_events()
            || self.events_base().is_some()
            || (self.kv_events_endpoint.is_some() && ranks.len() == 1);
        let listed = |rank: &DpRank| {
            self.kv_events_endpoints.as_ref().is_some_and(|listed| listed.contains_key(&rank.0))
        };
        let without = ranks.iter().filter(move |rank| !all && !listed(rank)).take(MAX_REASONS);
        without.map(|rank| format!("kv_events endpoint is required for dp_rank {rank}"))
    }
}

// === what every way can say ===

impl WorkerFields {
    /// Everything but who and where it is, and where its events come from.
    fn put_settings(&self, spec: &mut WorkerSpec) -> Result<(), Problem> {
        if let Some(loads) = &self.loads {
            let bad = |error| Problem::bad_request("bad_url", format!("loads: {error}")).field("loads");
            WorkerUrl::parse(loads).map_err(bad)?;
            spec.loads = Some(loads.clone());
        }
        spec.load_stat = self.load_stat(&spec.ranks)?;
        spec.capacity = self.capacity(&spec.ranks)?;
        if self.estimated == Some(true) {
            spec.capacity = spec.capacity.take().map(CapacitySpec::estimated);
        }
        spec.max_running_requests = self.max_running_requests;
        spec.max_num_batched_tokens = self.max_num_batched_tokens;
        set(&mut spec.role, self.role.map(Into::into));
        set(&mut spec.balance, self.balance.map(Into::into));
        set(&mut spec.engine, self.engine.map(Into::into));
        set(&mut spec.dp_mode, self.dp_mode.map(Into::into));
        set(&mut spec.announcements, self.announcements.map(Into::into));
        set(&mut spec.clear_scope, self.clear_scope.map(Into::into));
        set(&mut spec.taints, self.taints.clone());
        set(&mut spec.adapters, self.adapters.clone());
        spec.is_eagle = self.is_eagle;
        spec.host_chunk_blocks = self.host_chunk_blocks;
        let tiers = self.score_tiers.as_ref();
        let tiers = tiers.map(|tiers| {
            let scored = |tier| tiers.contains(&tier);
            ScoreTiers { host: scored(TierBody::Host), disk: scored(TierBody::Disk) }
        });
        set(&mut spec.score_tiers, tiers);
        Ok(())
    }

    fn load_stat(&self, ranks: &Ranks) -> Result<Option<Endpoints>, Problem> {
        let list = self.load_stat_per_rank.iter().flatten();
        let per_rank: BTreeMap<_, _> = list.map(|(rank, at)| (DpRank(*rank), at.clone())).collect();
        if self.load_stat.is_none() && per_rank.is_empty() {
            return Ok(None);
        }
        let endpoints = Endpoints { base: self.load_stat.clone(), per_rank };
        let bad = |detail: String| Problem::bad_request("invalid_declaration", detail).field("load_stat");
        if let Some(rank) = endpoints.per_rank.keys().find(|rank| !ranks.contains(**rank)) {
            return Err(bad(format!(
                "load_stat_per_rank names rank {rank}, which the worker does not declare"
            )));
        }
        for rank in ranks.iter() {
            endpoints.endpoint(rank).map_err(|error| bad(format!("load_stat of rank {rank}: {error}")))?;
        }
        Ok(Some(endpoints))
    }

    /// `total_kv_blocks` is the worker's, as are all ranks' together: its ranks have a share each.
    pub(super) fn capacity(&self, ranks: &Ranks) -> Result<Option<CapacitySpec>, Problem> {
        // Dynamo's field beside ours is a coarser word for the same.
        if self.capacity_words() - usize::from(self.total_kv_blocks.is_some()) > 1 {
            let detail = "the capacity is given twice: give one of capacity, capacity_blocks_per_rank, \
                          capacity_blocks_all_ranks, capacity_blocks_by_rank and capacity_blocks_shared";
            return Err(Problem::bad_request("invalid_declaration", detail).field("capacity"));
        }
        let named = |list: &PerRank| list.capacity(ranks).map_err(|error| self.invalid(error)).map(Some);
        match &self.capacity {
            Some(CapacityBody::Aggregate { blocks }) => return Ok(Some(CapacitySpec::aggregate(*blocks))),
            Some(CapacityBody::PerRank { blocks }) => return Ok(Some(CapacitySpec::per_rank(*blocks))),
            Some(CapacityBody::PerRankList { blocks }) => return named(blocks),
            Some(CapacityBody::WorkerShared { blocks }) => {
                return Ok(Some(CapacitySpec::worker_shared(*blocks)));
            }
            None => {}
        }
        if let Some(list) = &self.capacity_blocks_by_rank {
            return named(list);
        }
        let all = self.capacity_blocks_all_ranks.or(self.total_kv_blocks).map(CapacitySpec::aggregate);
        let shared = self.capacity_blocks_shared.map(CapacitySpec::worker_shared);
        Ok(self.capacity_blocks_per_rank.map(CapacitySpec::per_rank).or(shared).or(all))
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

// === rank by rank: /register ===

impl WorkerFields {
    /// The ranks that a registration adds, with what it says of them.
    ///
    /// # Errors
    ///
    /// What is missing or cannot be.
    pub(super) fn registration(&self) -> Result<WorkerSpec, Problem> {
        let missing =
            |field: &'static str| move || Problem::wrong_field(field, format!("missing field `{field}`"));
        let WireId { id, form } =
            self.instance_id.as_ref().or(self.worker_id.as_ref()).ok_or_else(missing("instance_id"))?;
        let endpoint = self.endpoint.as_deref().ok_or_else(missing("endpoint"))?;
        let size = self.block_size.ok_or_else(missing("block_size"))?;
        let pool = super::boundary::pool_names!(self)?.pool_key()?;
        let block_size = block_size(size)?;
        check_blank("endpoint", Some(endpoint))?;
        check_blank("replay_endpoint", self.replay_endpoint.as_deref())?;
        let rank = DpRank(self.dp_rank.or(self.data_parallel_start_rank).unwrap_or(0));
        let ranks = match self.data_parallel_size {
            Some(size) => Ranks::range(rank.0, size),
            None => Ranks::single(rank),
        };
        let ranks = ranks.map_err(|error| Problem::declare(&error, |field| self.registered_as(field)))?;
        let at = |endpoint: &str| match self.data_parallel_size {
            Some(_) => Endpoints::base(endpoint),
            None => Endpoints::per_rank([(rank, endpoint)]),
        };
        let events = EventsFrom::Zmq {
            endpoints: at(endpoint),
            replay: self.replay_endpoint.as_deref().map(at),
            topic: self.topic.clone().unwrap_or_default(),
        };
        let mut spec = WorkerSpec::new(id.clone(), pool, block_size, ranks).events(events);
        spec.id_form = *form;
        spec.http_endpoint.clone_from(&self.http_endpoint);
        self.put_settings(&mut spec)?;
        if self.data_parallel_size.is_none() {
            spec.own_figures();
            if let Some(load_stat) = &self.load_stat {
                spec.load_stat = Some(Endpoints::per_rank([(rank, load_stat.as_str())]));
            }
        }
        Ok(spec)
    }

    /// What a field of the fleet is called in a registration.
    pub(super) fn registered_as(&self, field: &'static str) -> &'static str {
        match field {
            "worker_id" => "instance_id",
            "size" if self.data_parallel_size.is_some() => "data_parallel_size",
            "size" => "dp_rank",
            field => field,
        }
    }
}

// === whole: the configuration file and --worker ===

impl WorkerFields {
    /// The worker of a configuration: it needs an id, a model, a block size and its events, and no address
    /// for requests.
    ///
    /// # Errors
    ///
    /// What is missing or cannot be, in one sentence.
    pub fn configured(&self) -> Result<WorkerSpec, String> {
        let missing = |field: &str| format!("`{field}` is missing");
        let id = self.id().ok_or_else(|| missing("id"))?;
        if self.model.is_none() && self.model_name.is_none() && self.modelname.is_none() {
            return Err(missing("model"));
        }
        let block_size = self.block_size.ok_or_else(|| missing("block_size"))?;
        let block_size = BlockSize::new(block_size).ok_or("block_size is 0; give the engine's own")?;
        self.data_parallel_size.ok_or_else(|| missing("size"))?;
        if self.engine == Some(EngineBody::Unknown) {
            return Err("engine is not known; give `vllm` or `sglang`".to_owned());
        }
        self.check_sizes().map_err(|problem| problem.detail().to_owned())?;
        let named = self.events_base().is_some()
            || self.kv_events_endpoint.is_some()
            || self.kv_events_endpoints.as_ref().is_some_and(|list| !list.is_empty());
        match (named, self.has_no_events()) {
            (true, true) => return Err("no_events stands beside an events endpoint; remove one".to_owned()),
            (false, false) => {
                return Err(
                    "no events endpoint; give `events`, `events_per_rank` or `no_events = true`".to_owned()
                );
            }
            _ => {}
        }
        let spec = self.ranks().and_then(|ranks| {
            let Some(events) = self.events_from(&ranks, true)? else {
                let without = self.ranks_without_events(&ranks).collect::<Vec<_>>().join("; ");
                return Err(Problem::wrong_field("events", without));
            };
            let mut spec = WorkerSpec::new(id.id.clone(), self.pool(), block_size, ranks).events(events);
            spec.id_form = id.form;
            spec.http_endpoint = self.http_endpoint.clone().or_else(|| self.endpoint.clone());
            self.put_settings(&mut spec)?;
            Ok(spec)
        });
        spec.map_err(|problem| problem.detail().to_owned())
    }

    /// The worker's id as it is described; empty if it is missing.
    pub fn id_text(&self) -> &str {
        self.id().map_or("", |id| id.id.as_str())
    }
}

impl PerRank {
    pub(super) fn capacity(&self, ranks: &Ranks) -> Result<CapacitySpec, DeclareError> {
        match self {
            Self::Listed(blocks) if blocks.len() != ranks.iter().len() => {
                Err(DeclareError::CapacityList { entries: blocks.len(), ranks: ranks.len() })
            }
            Self::Listed(blocks) => {
                let known = ranks.iter().zip(blocks).filter_map(|(rank, blocks)| Some((rank, (*blocks)?)));
                Ok(CapacitySpec::by_rank(known))
            }
            Self::Named(blocks) => {
                let mut known = Vec::with_capacity(blocks.len());
                for (rank, blocks) in blocks {
                    let rank = rank.parse().map(DpRank).ok().filter(|rank| ranks.contains(*rank));
                    let Some(rank) = rank else {
                        return Err(DeclareError::CapacityList {
                            entries: known.len() + 1,
                            ranks: ranks.len(),
                        });
                    };
                    known.extend(blocks.map(|blocks| (rank, blocks)));
                }
                Ok(CapacitySpec::by_rank(known))
            }
        }
    }
}

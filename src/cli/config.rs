//! The service's settings: a TOML file, and flags on top of it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rankwise::block::{Announcements, BlockSize};
use rankwise::events::order::OnLoss;
use rankwise::fleet::{
    Balance, CapacitySpec, DpMode, Endpoints, EngineStyle, EventsFrom, PoolKey, Ranks, Role, WorkerSpec,
};
use rankwise::ids::DpRank;
use rankwise::index::HybridRule;
use rankwise::indexer;
use rankwise::ingest::LoadStatBinding;
use rankwise::load::{Admission, BusyThreshold, LoadMode, WorkerUrl};
use rankwise::routing::{Policy, RouterConfig};
use rankwise::service::ServiceConfig;
use rankwise::telemetry::{Binding, FeedConfig};
use serde::Deserialize;

use super::running::Telemetry;

/// The whole file. Every field may be left out; a field that is not known is an error, so that a misspelt one
/// is not taken for a default.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConfigFile {
    /// Where HTTP is served.
    pub listen: Option<String>,
    /// Where gRPC is served; not at all unless it is named.
    pub grpc_listen: Option<String>,
    streams: StreamsTable,
    scoring: ScoringTable,
    http: HttpTable,
    load: LoadTable,
    telemetry: TelemetryTable,
    models: Vec<ModelTable>,
    workers: Vec<WorkerTable>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StreamsTable {
    on_loss: Option<OnLossName>,
    silence_grace_ms: Option<u64>,
    replay_timeout_ms: Option<u64>,
    max_replay_attempts: Option<u32>,
    max_held_batches: Option<usize>,
    max_held_bytes: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ScoringTable {
    overlap_weight: Option<f64>,
    overlap_score_credit: Option<f64>,
    overlap_score_credit_decay: Option<f64>,
    host_cache_hit_weight: Option<f64>,
    disk_cache_hit_weight: Option<f64>,
    decode_active_request_weight: Option<f64>,
    track_prefill_tokens: Option<bool>,
    decode_counts_request: Option<bool>,
    temperature: Option<f64>,
    expect_booked: Option<bool>,
    busy_threshold: Option<f64>,
    max_prefill_tokens: Option<u64>,
    max_prefill_fraction: Option<f64>,
    max_waiting: Option<u64>,
    hybrid: Option<HybridName>,
    seed: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HttpTable {
    request_timeout_ms: Option<u64>,
    max_in_flight: Option<usize>,
    max_body_bytes: Option<usize>,
    max_prompt_body_bytes: Option<usize>,
    max_connections: Option<usize>,
    head_timeout_ms: Option<u64>,
    threads: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct LoadTable {
    ttl_ms: Option<u64>,
    ttl_ms_by_source: BTreeMap<String, u64>,
    mode: Option<LoadModeName>,
    lease_ms: Option<u64>,
    max_reservations: Option<usize>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum LoadModeName {
    Reports,
    Ledger,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct TelemetryTable {
    interval_ms: Option<u64>,
    timeout_ms: Option<u64>,
    retry_max_ms: Option<u64>,
    remember_ms: Option<u64>,
    max_body_bytes: Option<usize>,
    /// The environment variable that has the engines' bearer token: a secret has no place in a file.
    token_from: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelTable {
    pattern: String,
    model: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerTable {
    id: String,
    model: String,
    group: Option<String>,
    block_size: u32,
    #[serde(default)]
    start: u32,
    size: u32,
    /// Base endpoint: rank N publishes on its port plus N.
    events: Option<String>,
    #[serde(default)]
    events_per_rank: BTreeMap<String, String>,
    replay: Option<String>,
    #[serde(default)]
    replay_per_rank: BTreeMap<String, String>,
    #[serde(default)]
    topic: String,
    /// The worker publishes no events.
    #[serde(default)]
    no_events: bool,
    http_endpoint: Option<String>,
    /// Where its load can be asked for: `http://…` or `grpc://…`, with `@rank` behind it for one rank.
    loads: Option<String>,
    /// Base endpoint of its load sockets: rank N publishes on its port plus N.
    load_stat: Option<String>,
    #[serde(default)]
    load_stat_per_rank: BTreeMap<String, String>,
    role: Option<RoleName>,
    balance: Option<BalanceName>,
    engine: Option<EngineName>,
    announcements: Option<AnnouncementsName>,
    dp_mode: Option<DpModeName>,
    capacity_blocks_per_rank: Option<u64>,
    capacity_blocks_all_ranks: Option<u64>,
    max_running_requests: Option<u64>,
    #[serde(default)]
    taints: Vec<String>,
}

/// Names at the boundary and what they stand for.
macro_rules! names {
    ($($name:ident for $of:ty { $($variant:ident => $meaning:expr),+ $(,)? })+) => {$(
        #[derive(Clone, Copy, Debug, Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum $name { $($variant),+ }

        impl From<$name> for $of {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => $meaning),+ }
            }
        }
    )+};
}

names! {
    OnLossName for OnLoss { Keep => OnLoss::Keep, Clear => OnLoss::Clear }
    HybridName for HybridRule { Joint => HybridRule::Joint, FullAttention => HybridRule::FullAttention }
    RoleName for Role { Prefill => Role::Prefill, Decode => Role::Decode, Both => Role::Both }
    BalanceName for Balance {
        Internal => Balance::Internal, Hybrid => Balance::Hybrid, External => Balance::External,
    }
    EngineName for EngineStyle { Vllm => EngineStyle::Vllm, Sglang => EngineStyle::Sglang }
    AnnouncementsName for Announcements {
        Counted => Announcements::Counted, Set => Announcements::Set,
    }
    DpModeName for DpMode { Pure => DpMode::Pure, Attention => DpMode::Attention }
}

impl ConfigFile {
    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong, and on which line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in the configuration {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        // The TOML library's message shows the line and points at the place.
        toml::from_str(text).map_err(|error| anyhow!("{error}"))
    }

    /// How streams are treated.
    pub fn indexer(&self) -> indexer::Config {
        let mut config = indexer::Config::default();
        let StreamsTable {
            on_loss,
            silence_grace_ms,
            replay_timeout_ms,
            max_replay_attempts,
            max_held_batches,
            max_held_bytes,
        } = &self.streams;
        set(&mut config.on_loss, on_loss.map(Into::into));
        set(&mut config.silence_grace, silence_grace_ms.map(Duration::from_millis));
        set(&mut config.replay_timeout, replay_timeout_ms.map(Duration::from_millis));
        set(&mut config.max_replay_attempts, *max_replay_attempts);
        set(&mut config.max_held_batches, *max_held_batches);
        set(&mut config.max_held_bytes, *max_held_bytes);
        set(&mut config.load.ttl, self.load.ttl_ms.map(Duration::from_millis));
        let mode = self.load.mode.map(|mode| match mode {
            LoadModeName::Reports => LoadMode::Reports,
            LoadModeName::Ledger => LoadMode::Ledger,
        });
        set(&mut config.load.mode, mode);
        set(&mut config.load.ledger.lease, self.load.lease_ms.map(Duration::from_millis));
        set(&mut config.load.ledger.max_reservations, self.load.max_reservations);
        config
    }

    /// How long reports of single sources are worth something.
    pub fn load_limits(&self) -> impl Iterator<Item = (&str, Duration)> {
        let limits = self.load.ttl_ms_by_source.iter();
        limits.map(|(source, millis)| (source.as_str(), Duration::from_millis(*millis)))
    }

    /// How ranks are scored.
    ///
    /// # Errors
    /// A knob outside its range.
    pub fn router(&self) -> Result<RouterConfig> {
        let scoring = &self.scoring;
        let mut policy = Policy::default();
        set(&mut policy.overlap_weight, scoring.overlap_weight);
        set(&mut policy.overlap_score_credit, scoring.overlap_score_credit);
        set(&mut policy.overlap_score_credit_decay, scoring.overlap_score_credit_decay);
        set(&mut policy.host_cache_hit_weight, scoring.host_cache_hit_weight);
        set(&mut policy.disk_cache_hit_weight, scoring.disk_cache_hit_weight);
        set(&mut policy.decode_active_request_weight, scoring.decode_active_request_weight);
        set(&mut policy.track_prefill_tokens, scoring.track_prefill_tokens);
        set(&mut policy.decode_counts_request, scoring.decode_counts_request);
        set(&mut policy.expect_booked, scoring.expect_booked);
        set(&mut policy.temperature, scoring.temperature);
        policy.validate().context("in [scoring]")?;
        let busy_threshold = match scoring.busy_threshold {
            None => None,
            Some(share) => Some(BusyThreshold::new(share).with_context(|| {
                format!(
                    "[scoring] busy_threshold is {share}; give a share of the capacity, above 0 and at most 1"
                )
            })?),
        };
        let hybrid = scoring.hybrid.map(Into::into).unwrap_or_default();
        if let Some(share) = scoring.max_prefill_fraction
            && !(share > 0.0 && share.is_finite())
        {
            bail!(
                "[scoring] max_prefill_fraction is {share}; give a share of max_num_batched_tokens above 0"
            );
        }
        let admission = Admission {
            max_prefill_tokens: scoring.max_prefill_tokens,
            max_prefill_fraction: scoring.max_prefill_fraction,
            max_waiting: scoring.max_waiting,
        };
        Ok(RouterConfig { policy, busy_threshold, admission, hybrid, needs_endpoint: false })
    }

    /// How HTTP is served.
    pub fn service(&self) -> ServiceConfig {
        let mut config = ServiceConfig { seed: self.scoring.seed, ..ServiceConfig::default() };
        set(&mut config.request_timeout, self.http.request_timeout_ms.map(Duration::from_millis));
        set(&mut config.max_in_flight, self.http.max_in_flight);
        set(&mut config.max_body, self.http.max_body_bytes);
        set(&mut config.max_prompt_body, self.http.max_prompt_body_bytes);
        set(&mut config.connections.max_connections, self.http.max_connections);
        set(&mut config.connections.head_timeout, self.http.head_timeout_ms.map(Duration::from_millis));
        config
    }

    /// Threads that answer HTTP; as many as the machine runs at once where it is not said.
    pub fn threads(&self) -> Option<usize> {
        self.http.threads
    }

    /// Who is asked for load, and how; and who publishes it.
    ///
    /// # Errors
    /// A URL or a token that cannot be used, by the worker's id.
    pub fn telemetry(&self) -> Result<Telemetry> {
        let mut telemetry = Telemetry::default();
        let TelemetryTable { interval_ms, timeout_ms, retry_max_ms, remember_ms, max_body_bytes, token_from } =
            &self.telemetry;
        let FeedConfig { probe, fetch, .. } = &mut telemetry.config;
        set(&mut probe.interval, interval_ms.map(Duration::from_millis));
        set(&mut probe.retry_max, retry_max_ms.map(Duration::from_millis));
        set(&mut probe.remember, remember_ms.map(Duration::from_millis));
        set(&mut fetch.timeout, timeout_ms.map(Duration::from_millis));
        set(&mut fetch.max_bytes, *max_body_bytes);
        if let Some(name) = token_from {
            let token = std::env::var(name);
            fetch.token = Some(token.with_context(|| format!("[telemetry] token_from names {name:?}"))?);
        }
        for table in &self.workers {
            table.bind(&mut telemetry).with_context(|| format!("worker {:?}", table.id))?;
        }
        Ok(telemetry)
    }

    /// Patterns of model names, and the models that they stand for.
    pub fn patterns(&self) -> impl Iterator<Item = (&str, &str)> {
        self.models.iter().map(|table| (table.pattern.as_str(), table.model.as_str()))
    }

    /// The workers to declare at the start.
    ///
    /// # Errors
    /// A worker that cannot be declared, by its id.
    pub fn workers(&self) -> Result<Vec<WorkerSpec>> {
        self.workers
            .iter()
            .map(|table| table.spec().with_context(|| format!("worker {:?}", table.id)))
            .collect()
    }
}

impl WorkerTable {
    fn spec(&self) -> Result<WorkerSpec> {
        let block_size = BlockSize::new(self.block_size).context("block_size is 0; give the engine's own")?;
        let pool = PoolKey::new(&self.model, self.group.as_deref());
        let ranks = Ranks::range(self.start, self.size)?;
        let mut spec = WorkerSpec::new(self.id.as_str(), pool, block_size, ranks).events(self.events()?);
        spec.http_endpoint.clone_from(&self.http_endpoint);
        set(&mut spec.role, self.role.map(Into::into));
        set(&mut spec.balance, self.balance.map(Into::into));
        set(&mut spec.engine, self.engine.map(Into::into));
        set(&mut spec.announcements, self.announcements.map(Into::into));
        set(&mut spec.dp_mode, self.dp_mode.map(Into::into));
        spec.max_running_requests = self.max_running_requests;
        spec.capacity = match (self.capacity_blocks_per_rank, self.capacity_blocks_all_ranks) {
            (Some(_), Some(_)) => {
                bail!("capacity_blocks_per_rank and capacity_blocks_all_ranks are both given; give one")
            }
            (Some(blocks), None) => Some(CapacitySpec::per_rank(blocks)),
            (None, Some(blocks)) => Some(CapacitySpec::aggregate(blocks)),
            (None, None) => None,
        };
        spec.taints = self.taints.iter().cloned().collect();
        Ok(spec)
    }

    fn bind(&self, telemetry: &mut Telemetry) -> Result<()> {
        if let Some(loads) = &self.loads {
            let url = WorkerUrl::parse(loads).context("loads")?;
            telemetry.asked.push(Binding { worker: self.id.as_str().into(), url });
        }
        if self.load_stat.is_some() || !self.load_stat_per_rank.is_empty() {
            let endpoints = endpoints(self.load_stat.as_ref(), &self.load_stat_per_rank)?;
            telemetry.published.push(LoadStatBinding { worker: self.id.as_str().into(), endpoints });
        }
        Ok(())
    }

    fn events(&self) -> Result<EventsFrom> {
        let named = self.events.is_some() || !self.events_per_rank.is_empty();
        match (named, self.no_events) {
            (true, true) => bail!("no_events stands beside an events endpoint; remove one"),
            (false, true) => return Ok(EventsFrom::None),
            (false, false) => {
                bail!("no events endpoint; give `events`, `events_per_rank` or `no_events = true`")
            }
            (true, false) => {}
        }
        let replay = (self.replay.is_some() || !self.replay_per_rank.is_empty())
            .then(|| endpoints(self.replay.as_ref(), &self.replay_per_rank))
            .transpose()?;
        Ok(EventsFrom::Zmq {
            endpoints: endpoints(self.events.as_ref(), &self.events_per_rank)?,
            replay,
            topic: self.topic.clone(),
        })
    }
}

fn endpoints(base: Option<&String>, per_rank: &BTreeMap<String, String>) -> Result<Endpoints> {
    let per_rank = per_rank
        .iter()
        .map(|(rank, endpoint)| {
            let number = rank.parse().with_context(|| format!("{rank:?} is no rank"))?;
            Ok((DpRank(number), endpoint.clone()))
        })
        .collect::<Result<_>>()?;
    Ok(Endpoints { base: base.cloned(), per_rank })
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// A worker on the command line: `id=w1,model=llama,block_size=16,ranks=0-3,events=tcp://host:5557`, and
/// optionally `replay=…`, `group=…`, `topic=…`, `http=…`.
///
/// # Errors
/// What is missing or not known.
pub fn worker_flag(text: &str) -> Result<WorkerSpec> {
    let mut fields = BTreeMap::new();
    for part in text.split(',') {
        let (name, value) = part.split_once('=').with_context(|| format!("{part:?} is not name=value"))?;
        fields.insert(name.trim(), value.trim());
    }
    let mut take = |name: &str| fields.remove(name).map(str::to_owned);
    let need = |name: &str, value: Option<String>| value.with_context(|| format!("`{name}=` is missing"));
    let (start, size) = range(&take("ranks").unwrap_or_else(|| "0".to_owned()))?;
    let table = WorkerTable {
        id: need("id", take("id"))?,
        model: need("model", take("model"))?,
        group: take("group"),
        block_size: need("block_size", take("block_size"))?.parse().context("block_size is no number")?,
        start,
        size,
        events: Some(need("events", take("events"))?),
        events_per_rank: BTreeMap::new(),
        replay: take("replay"),
        replay_per_rank: BTreeMap::new(),
        topic: take("topic").unwrap_or_default(),
        no_events: false,
        http_endpoint: take("http"),
        loads: None,
        load_stat: None,
        load_stat_per_rank: BTreeMap::new(),
        role: None,
        balance: None,
        engine: None,
        announcements: None,
        dp_mode: None,
        capacity_blocks_per_rank: None,
        capacity_blocks_all_ranks: None,
        max_running_requests: None,
        taints: Vec::new(),
    };
    if let Some(unknown) = fields.keys().next() {
        bail!(
            "`{unknown}` is not known; known are id, model, group, block_size, ranks, events, replay, topic, http"
        );
    }
    table.spec()
}

/// `0-3`, or one rank.
fn range(text: &str) -> Result<(u32, u32)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first: u32 = first.parse().with_context(|| format!("{text:?} is no range of ranks"))?;
    let last: u32 = last.parse().with_context(|| format!("{text:?} is no range of ranks"))?;
    let size = last.checked_sub(first).with_context(|| format!("the range {text:?} goes backwards"))?;
    Ok((first, size.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The commented example in the repository is a valid configuration.
    #[test]
    fn the_example_is_valid() {
        let file = ConfigFile::parse(include_str!("../../scripts/rankwise.example.toml")).unwrap();
        assert_eq!(file.workers().unwrap().len(), 2);
        file.router().unwrap();
        assert_eq!(file.patterns().count(), 1);
        let telemetry = file.telemetry().unwrap();
        assert_eq!((telemetry.asked.len(), telemetry.published.len()), (1, 0));
    }

    #[test]
    fn a_misspelt_field_is_an_error() {
        let error = ConfigFile::parse("[scoring]\noverlap_wieght = 1.0").unwrap_err();
        assert!(error.to_string().contains("overlap_wieght"), "{error}");
    }

    /// R2, R3: what a worker may not be is refused with its id and the field.
    #[test]
    fn workers_that_cannot_be_are_refused() {
        let refused = |fields: &str| {
            let text = format!("[[workers]]\nid = \"w1\"\nmodel = \"m\"\nblock_size = 16\n{fields}");
            format!("{:#}", ConfigFile::parse(&text).and_then(|file| file.workers()).unwrap_err())
        };
        assert!(refused("size = 0\nevents = \"tcp://h:5557\"").contains("size"));
        assert!(refused("size = 1").contains("no events endpoint"));
        assert!(refused("size = 1\nno_events = true\nevents = \"tcp://h:1\"").contains("no_events"));
    }

    /// L9: a URL of load is read when the file is; its rank is not part of what is dialled.
    #[test]
    fn urls_of_load_are_checked() {
        let read = |url: &str| {
            let text = format!(
                "[[workers]]\nid = \"w1\"\nmodel = \"m\"\nblock_size = 16\nsize = 1\nloads = \"{url}\""
            );
            ConfigFile::parse(&text).unwrap().telemetry()
        };
        assert_eq!(read("http://h:8000@3").unwrap().asked[0].url.base(), "http://h:8000");
        let error = format!("{:#}", read("h:8000").unwrap_err());
        assert!(error.contains("w1") && error.contains("loads"), "{error}");
    }

    #[test]
    fn a_worker_fits_on_the_command_line() {
        let spec = worker_flag("id=w2,model=m,block_size=16,ranks=4-7,events=tcp://h:5557").unwrap();
        assert_eq!((spec.ranks.start(), spec.ranks.len()), (DpRank(4), 4));
        assert!(worker_flag("id=w2,model=m,ranks=4-7,events=tcp://h:5557").is_err());
        assert!(worker_flag("id=w2,model=m,block_size=16,events=tcp://h:1,colour=red").is_err());
    }
}

//! The service's settings: a TOML file, and flags on top of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rankwise::block::Tier;
use rankwise::events::order::OnLoss;
use rankwise::fleet::WorkerSpec;
use rankwise::index::HybridRule;
use rankwise::indexer;
use rankwise::load::{Admission, BusyThreshold, LoadMode};
use rankwise::routing::{Policy, RouterConfig, TrustCredit};
use rankwise::service::{LogDecisions, ServiceConfig, StrictWorkerFields, WorkerFields};
use rankwise::telemetry::FeedConfig;
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
    events: EventsTable,
    scoring: ScoringTable,
    http: HttpTable,
    load: LoadTable,
    telemetry: TelemetryTable,
    models: Vec<ModelTable>,
    workers: Vec<StrictWorkerFields>,
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
    max_held_bytes_total: Option<usize>,
    silent_after_ms: Option<u64>,
    probe_interval_ms: Option<u64>,
    probe_max_ms: Option<u64>,
    probe_timeout_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct EventsTable {
    /// What connectors call their media beyond the names that are known.
    media: BTreeMap<String, TierName>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum TierName {
    Device,
    Host,
    Disk,
    Other,
}

impl From<TierName> for Tier {
    fn from(name: TierName) -> Self {
        match name {
            TierName::Device => Self::Device,
            TierName::Host => Self::Host,
            TierName::Disk => Self::Disk,
            TierName::Other => Self::Other,
        }
    }
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
    exclude_silent: Option<bool>,
    untrusted_credit: Option<CreditSetting>,
    log_decisions: Option<LogDecisionsName>,
    busy_threshold: Option<f64>,
    max_prefill_tokens: Option<u64>,
    max_prefill_fraction: Option<f64>,
    max_waiting: Option<u64>,
    hybrid: Option<HybridName>,
    seed: Option<u64>,
}

/// What overlap is worth on a rank that is not live: one number for all of them, or one by state.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "a number from 0 to 1, or a table of them by trust state")]
enum CreditSetting {
    All(f64),
    ByState(CreditTable),
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct CreditTable {
    joining: Option<f64>,
    repairing: Option<f64>,
    may_miss: Option<f64>,
    may_overcredit: Option<f64>,
    silent: Option<f64>,
}

impl From<CreditSetting> for TrustCredit {
    fn from(setting: CreditSetting) -> Self {
        let by = match setting {
            CreditSetting::All(share) => return Self::all(share),
            CreditSetting::ByState(by) => by,
        };
        let mut credit = Self::default();
        set(&mut credit.joining, by.joining);
        set(&mut credit.repairing, by.repairing);
        set(&mut credit.may_miss, by.may_miss);
        set(&mut credit.may_overcredit, by.may_overcredit);
        set(&mut credit.silent, by.silent);
        credit
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct HttpTable {
    request_timeout_ms: Option<u64>,
    max_in_flight: Option<usize>,
    ready_wait_ms: Option<u64>,
    max_body_bytes: Option<usize>,
    max_prompt_body_bytes: Option<usize>,
    max_body_bytes_in_flight: Option<usize>,
    /// Whether a field of a request that is not known is refused.
    strict: Option<bool>,
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
    LogDecisionsName for LogDecisions {
        Off => LogDecisions::Off, Pick => LogDecisions::Pick, Candidates => LogDecisions::Candidates,
    }
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
        // Kept as it is: its message has several lines, of which the last points at the place.
        Ok(toml::from_str(text)?)
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
            max_held_bytes_total,
            silent_after_ms,
            probe_interval_ms,
            probe_max_ms,
            probe_timeout_ms,
        } = &self.streams;
        set(&mut config.max_held_bytes_total, *max_held_bytes_total);
        set(&mut config.silent_after, silent_after_ms.map(Duration::from_millis));
        set(&mut config.probe_interval, probe_interval_ms.map(Duration::from_millis));
        set(&mut config.probe_max, probe_max_ms.map(Duration::from_millis));
        set(&mut config.probe_timeout, probe_timeout_ms.map(Duration::from_millis));
        set(&mut config.on_loss, on_loss.map(Into::into));
        set(&mut config.silence_grace, silence_grace_ms.map(Duration::from_millis));
        set(&mut config.replay_timeout, replay_timeout_ms.map(Duration::from_millis));
        set(&mut config.max_replay_attempts, *max_replay_attempts);
        set(&mut config.max_held_batches, *max_held_batches);
        set(&mut config.max_held_bytes, *max_held_bytes);
        for (medium, tier) in &self.events.media {
            config.limits.media.insert(medium, (*tier).into());
        }
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
        set(&mut policy.exclude_silent, scoring.exclude_silent);
        set(&mut policy.untrusted_credit, scoring.untrusted_credit.map(Into::into));
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
        set(&mut config.ready_wait, self.http.ready_wait_ms.map(Duration::from_millis));
        set(&mut config.log_decisions, self.scoring.log_decisions.map(Into::into));
        set(&mut config.max_body, self.http.max_body_bytes);
        set(&mut config.max_prompt_body, self.http.max_prompt_body_bytes);
        set(&mut config.max_body_bytes_in_flight, self.http.max_body_bytes_in_flight);
        set(&mut config.strict, self.http.strict);
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
        Ok(telemetry)
    }

    /// Patterns of model names, and the models that they stand for.
    pub fn patterns(&self) -> impl Iterator<Item = (&str, &str)> {
        self.models.iter().map(|table| (table.pattern.as_str(), table.model.as_str()))
    }

    /// The workers to declare at the start; where one cannot be declared, why, by its id.
    ///
    /// # Errors
    /// Two workers of one id: nobody knows which one is meant.
    pub fn each_worker(&self) -> Result<Vec<Result<WorkerSpec>>> {
        let mut seen = BTreeSet::new();
        let ids = self.workers.iter().map(|StrictWorkerFields(fields)| fields.id_text());
        if let Some(twice) = ids.filter(|id| !id.is_empty()).find(|id| !seen.insert(*id)) {
            bail!("two [[workers]] have the id {twice:?}; give each an id of its own");
        }
        let spec = |StrictWorkerFields(fields): &StrictWorkerFields| {
            fields
                .configured()
                .map_err(|why| anyhow!("{why}"))
                .with_context(|| format!("worker {:?}", fields.id_text()))
        };
        Ok(self.workers.iter().map(spec).collect())
    }

    /// The same, where every one must be right.
    ///
    /// # Errors
    /// As [`ConfigFile::each_worker`], and the first worker that cannot be declared.
    #[cfg(test)]
    pub fn workers(&self) -> Result<Vec<WorkerSpec>> {
        self.each_worker()?.into_iter().collect()
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// A worker on the command line: `id=w1,model=llama,block_size=16,ranks=0-3,events=tcp://host:5557`, and
/// whatever else a worker in the file can say.
///
/// # Errors
/// What is missing or not known.
pub fn worker_flag(text: &str) -> Result<WorkerSpec> {
    WorkerFields::from_pairs(text).and_then(|fields| fields.configured()).map_err(|why| anyhow!("{why}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rankwise::ids::DpRank;

    use super::*;

    /// The commented example in the repository is a valid configuration.
    #[test]
    fn the_example_is_valid() {
        let file = ConfigFile::parse(include_str!("../../scripts/rankwise.example.toml")).unwrap();
        assert_eq!(file.workers().unwrap().len(), 2);
        file.router().unwrap();
        assert_eq!(file.patterns().count(), 1);
        file.telemetry().unwrap();
        let workers = file.workers().unwrap();
        assert_eq!(workers.iter().filter(|spec| spec.loads.is_some()).count(), 1);
    }

    #[test]
    fn a_misspelt_field_is_an_error() {
        let error = ConfigFile::parse("[scoring]\noverlap_wieght = 1.0").unwrap_err();
        assert!(error.to_string().contains("overlap_wieght"), "{error}");
        let error = ConfigFile::parse("[[workers]]\nid = \"w\"\nlaods = \"http://h\"").unwrap_err();
        assert!(error.to_string().contains("laods") && error.to_string().contains("line 3"), "{error}");
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

    /// A1, R2: an id is one worker's, and what is wrong with one worker is no other's fault.
    #[test]
    fn a_bad_worker_is_told_apart_and_a_doubled_id_is_refused() {
        let worker = |id: &str, size: u32| {
            format!(
                "[[workers]]\nid = \"{id}\"\nmodel = \"m\"\nblock_size = 16\nno_events = true\nsize = {size}\n"
            )
        };
        let read = |text: String| ConfigFile::parse(&text).unwrap().each_worker();
        let each = read(worker("a", 1) + &worker("b", 0) + &worker("c", 2)).unwrap();
        assert_eq!(each.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true]);
        let why = format!("{:#}", each[1].as_ref().unwrap_err());
        assert!(why.contains("\"b\"") && why.contains("size"), "{why}");
        let twice = read(worker("a", 1) + &worker("a", 2)).unwrap_err().to_string();
        assert!(twice.contains("\"a\""), "{twice}");
    }

    /// L9: a URL of load is read when the file is; its rank is not part of what is dialled.
    #[test]
    fn urls_of_load_are_checked() {
        let read = |url: &str| {
            let text = format!(
                "[[workers]]\nid = \"w1\"\nmodel = \"m\"\nblock_size = 16\nsize = 1\nno_events = true\nloads = \"{url}\""
            );
            ConfigFile::parse(&text).unwrap().workers()
        };
        assert_eq!(read("http://h:8000@3").unwrap()[0].loads.as_deref(), Some("http://h:8000@3"));
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

    /// I6: further media, and a tier that there is not.
    #[test]
    fn further_media_name_tiers() {
        let file: ConfigFile = toml::from_str("[events]\nmedia = { MY_TIER = \"host\" }").unwrap();
        assert_eq!(file.indexer().limits.media.tier(Some("my_tier")), Tier::Host);
        let error = toml::from_str::<ConfigFile>("[events]\nmedia = { MY_TIER = \"hots\" }").unwrap_err();
        assert!(error.to_string().contains("hots"), "{error}");
    }
}

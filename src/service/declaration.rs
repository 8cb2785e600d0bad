//! A worker as its operator describes it: one shape for `POST /workers`, `PATCH`, `/register`, the
//! configuration file and `--worker`, so that what can be said in one place can be said in each.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::num::NonZeroU32;

use serde::de::{Error, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::boundary::{WireId, not_null};
use super::problem::Problem;
use super::state::DEFAULT_MODEL;
use crate::block::{Announcements, BlockSize};
use crate::fleet::{Balance, ClearScope, DpMode, EngineStyle, PoolKey, Ranks, Role};

/// A worker as described. A field that is missing or null is unknown, and a patch leaves it as it was.
///
/// Where the field's systems and our configuration file call one thing by two names, both are read.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct WorkerFields {
    #[serde(alias = "id")]
    pub(super) worker_id: Option<WireId>,
    pub(super) instance_id: Option<WireId>,
    pub(super) model_name: Option<String>,
    #[serde(default, alias = "group", deserialize_with = "not_null")]
    pub(super) routing_group: Option<String>,
    pub(super) model: Option<String>,
    pub(super) modelname: Option<String>,
    pub(super) tenant_id: Option<String>,
    /// Where requests go; to `/register`, where its events come from.
    pub(super) endpoint: Option<String>,
    #[serde(alias = "http")]
    pub(super) http_endpoint: Option<String>,
    pub(super) kv_events_endpoint: Option<String>,
    #[serde(default, alias = "events_per_rank", deserialize_with = "by_rank")]
    pub(super) kv_events_endpoints: Option<BTreeMap<u32, String>>,
    /// Every rank's port is this one plus its global rank.
    pub(super) kv_events_base_endpoint: Option<String>,
    /// `zmq`, `none`, or the base endpoint.
    pub(super) events: Option<String>,
    pub(super) no_events: Option<bool>,
    #[serde(alias = "replay")]
    pub(super) replay_endpoint: Option<String>,
    #[serde(default, alias = "replay_per_rank", deserialize_with = "by_rank")]
    pub(super) replay_endpoints: Option<BTreeMap<u32, String>>,
    pub(super) topic: Option<String>,
    pub(super) block_size: Option<u32>,
    #[serde(alias = "start")]
    pub(super) data_parallel_start_rank: Option<u32>,
    #[serde(alias = "size")]
    pub(super) data_parallel_size: Option<u32>,
    pub(super) dp_rank: Option<u32>,
    pub(super) max_num_batched_tokens: Option<u64>,
    pub(super) max_running_requests: Option<u64>,
    pub(super) total_kv_blocks: Option<u64>,
    pub(super) capacity: Option<CapacityBody>,
    pub(super) capacity_blocks_per_rank: Option<u64>,
    pub(super) capacity_blocks_all_ranks: Option<u64>,
    pub(super) capacity_blocks_by_rank: Option<PerRank>,
    pub(super) capacity_blocks_shared: Option<u64>,
    /// The capacity is reckoned and not measured: it never binds.
    pub(super) estimated: Option<bool>,
    pub(super) stable_routing_id: Option<String>,
    pub(super) is_eagle: Option<bool>,
    pub(super) taints: Option<BTreeSet<String>>,
    pub(super) adapters: Option<BTreeSet<String>>,
    pub(super) topology_domains: Option<BTreeMap<String, String>>,
    pub(super) kv_transfer_domain: Option<String>,
    pub(super) kv_transfer_enforcement: Option<String>,
    pub(super) kv_transfer_preferred_weight: Option<f64>,
    pub(super) role: Option<RoleBody>,
    pub(super) balance: Option<BalanceBody>,
    #[serde(alias = "type")]
    pub(super) engine: Option<EngineBody>,
    pub(super) dp_mode: Option<DpModeBody>,
    pub(super) announcements: Option<AnnouncementsBody>,
    /// Where its load can be asked for: `http://…` or `grpc://…`, with `@rank` behind it for one rank.
    pub(super) loads: Option<String>,
    /// Base endpoint of its load sockets: rank N publishes on its port plus N.
    pub(super) load_stat: Option<String>,
    #[serde(default, deserialize_with = "by_rank")]
    pub(super) load_stat_per_rank: Option<BTreeMap<u32, String>>,
    pub(super) host_chunk_blocks: Option<NonZeroU32>,
    pub(super) clear_scope: Option<ClearScopeBody>,
    /// The lower tiers that are scored.
    pub(super) score_tiers: Option<BTreeSet<TierBody>>,
}

/// Reads an object by rank, whatever its format makes of a key.
fn by_rank<'de, D: Deserializer<'de>>(from: D) -> Result<Option<BTreeMap<u32, String>>, D::Error> {
    let Some(named) = Option::<BTreeMap<String, String>>::deserialize(from)? else { return Ok(None) };
    let ranks = named.into_iter().map(|(rank, at)| match rank.parse() {
        Ok(number) => Ok((number, at)),
        Err(_) => Err(D::Error::custom(format!("{rank:?} is no rank"))),
    });
    ranks.collect::<Result<_, _>>().map(Some)
}

/// KV capacity in blocks, with what it speaks for.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "scope", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum CapacityBody {
    Aggregate { blocks: u64 },
    PerRank { blocks: u64 },
    PerRankList { blocks: PerRank },
    WorkerShared { blocks: u64 },
}

/// A number for each rank: in their order, or by their global number. What is null or left out is unknown.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum PerRank {
    Listed(Vec<Option<u64>>),
    Named(BTreeMap<String, Option<u64>>),
}

/// Names at the boundary and what they stand for.
macro_rules! names {
    ($($name:ident for $of:ty { $($variant:ident => $meaning:expr),+ $(,)? })+) => {$(
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub(super) enum $name { $($variant),+ }

        impl From<$name> for $of {
            fn from(name: $name) -> Self {
                match name { $($name::$variant => $meaning),+ }
            }
        }
    )+};
}

names! {
    RoleBody for Role { Prefill => Role::Prefill, Decode => Role::Decode, Both => Role::Both }
    BalanceBody for Balance {
        Internal => Balance::Internal, Hybrid => Balance::Hybrid, External => Balance::External,
    }
    DpModeBody for DpMode { Pure => DpMode::Pure, Attention => DpMode::Attention }
    AnnouncementsBody for Announcements {
        Counted => Announcements::Counted, Set => Announcements::Set,
    }
    ClearScopeBody for ClearScope { All => ClearScope::All, Device => ClearScope::Device }
}

/// A tier that may be scored; the device always is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TierBody {
    Device,
    Host,
    Disk,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub(super) enum EngineBody {
    #[serde(rename = "vllm", alias = "vLLM")]
    Vllm,
    #[serde(rename = "sglang", alias = "SGLang")]
    Sglang,
    #[serde(other)]
    Unknown,
}

impl From<EngineBody> for EngineStyle {
    fn from(engine: EngineBody) -> Self {
        match engine {
            EngineBody::Vllm => Self::Vllm,
            EngineBody::Sglang => Self::Sglang,
            EngineBody::Unknown => Self::Unknown,
        }
    }
}

/// Longest text in a record; a URL or a label is far shorter, and records outlive their request.
const MAX_TEXT: usize = 512;

/// Most labels of one worker: each is compared with each label that a request prefers.
const MAX_LABELS: usize = 64;

/// Most adapters of one worker: an engine loads some hundreds.
const MAX_ADAPTERS: usize = 4_096;

// === as posted to /workers ===

impl WorkerFields {
    /// This description with what `patch` gives laid upon it. What a patch says of the capacity or of where
    /// events come from replaces everything that was said of it.
    pub(super) fn patched(&self, patch: Self) -> Self {
        let mut was = self.clone();
        if patch.says_capacity() {
            (was.total_kv_blocks, was.capacity, was.capacity_blocks_per_rank) = (None, None, None);
            (was.capacity_blocks_all_ranks, was.capacity_blocks_by_rank) = (None, None);
            was.capacity_blocks_shared = None;
        }
        if patch.events.is_some() || patch.no_events.is_some() {
            (was.events, was.no_events) = (None, None);
        }
        macro_rules! laid {
            ($($field:ident),* $(,)?) => {
                Self {
                    worker_id: was.worker_id,
                    instance_id: was.instance_id,
                    $($field: patch.$field.or(was.$field),)*
                }
            };
        }
        laid!(
            model_name,
            routing_group,
            model,
            modelname,
            tenant_id,
            endpoint,
            http_endpoint,
            kv_events_endpoint,
            kv_events_endpoints,
            kv_events_base_endpoint,
            events,
            no_events,
            replay_endpoint,
            replay_endpoints,
            topic,
            block_size,
            data_parallel_start_rank,
            data_parallel_size,
            dp_rank,
            max_num_batched_tokens,
            max_running_requests,
            total_kv_blocks,
            capacity,
            capacity_blocks_per_rank,
            capacity_blocks_all_ranks,
            capacity_blocks_by_rank,
            capacity_blocks_shared,
            estimated,
            stable_routing_id,
            is_eagle,
            taints,
            adapters,
            topology_domains,
            kv_transfer_domain,
            kv_transfer_enforcement,
            kv_transfer_preferred_weight,
            role,
            balance,
            engine,
            dp_mode,
            announcements,
            loads,
            load_stat,
            load_stat_per_rank,
            host_chunk_blocks,
            clear_scope,
            score_tiers,
        )
    }

    /// The pool that it is for.
    pub(super) fn pool(&self) -> PoolKey {
        // A body whose names contradict each other was refused when it came.
        let names = super::boundary::pool_names!(self).unwrap_or_default();
        PoolKey::new(names.model().unwrap_or(DEFAULT_MODEL), names.group())
    }

    /// The worker's id, if one is given.
    pub(super) fn id(&self) -> Option<&WireId> {
        self.worker_id.as_ref().or(self.instance_id.as_ref())
    }

    /// Refuses what would make the record itself a burden.
    pub(super) fn check_sizes(&self) -> Result<(), Problem> {
        super::boundary::pool_names!(self)?;
        let texts = [
            ("model_name", &self.model_name),
            ("routing_group", &self.routing_group),
            ("model", &self.model),
            ("modelname", &self.modelname),
            ("tenant_id", &self.tenant_id),
            ("endpoint", &self.endpoint),
            ("http_endpoint", &self.http_endpoint),
            ("kv_events_endpoint", &self.kv_events_endpoint),
            ("kv_events_base_endpoint", &self.kv_events_base_endpoint),
            ("events", &self.events),
            ("replay_endpoint", &self.replay_endpoint),
            ("loads", &self.loads),
            ("load_stat", &self.load_stat),
            ("stable_routing_id", &self.stable_routing_id),
            ("kv_transfer_domain", &self.kv_transfer_domain),
            ("kv_transfer_enforcement", &self.kv_transfer_enforcement),
            ("topic", &self.topic),
        ];
        let too_long = |text: &String| text.len() > MAX_TEXT;
        let mut long = texts.iter().filter(|(_, text)| text.as_ref().is_some_and(too_long));
        let sets = [("taints", &self.taints, MAX_LABELS), ("adapters", &self.adapters, MAX_ADAPTERS)];
        let long_set = |(_, set, most): &&(&str, &Option<BTreeSet<String>>, usize)| {
            set.as_ref().is_some_and(|set| set.len() > *most || set.iter().any(too_long))
        };
        let long_domain = |(key, value): (&String, &String)| too_long(key) || too_long(value);
        let domains = self.topology_domains.as_ref();
        let lists = [
            ("kv_events_endpoints", &self.kv_events_endpoints),
            ("replay_endpoints", &self.replay_endpoints),
            ("load_stat_per_rank", &self.load_stat_per_rank),
        ];
        let long_list = |(_, list): &&(&str, &Option<BTreeMap<u32, String>>)| {
            list.as_ref().is_some_and(|list| list.len() > Ranks::MAX as usize || list.values().any(too_long))
        };
        let field = long
            .next()
            .map(|(field, _)| *field)
            .or_else(|| sets.iter().find(long_set).map(|(field, ..)| *field))
            .or_else(|| lists.iter().find(long_list).map(|(field, _)| *field))
            .or_else(|| {
                let long = domains.is_some_and(|map| map.len() > MAX_LABELS || map.iter().any(long_domain));
                long.then_some("topology_domains")
            });
        field.map_or(Ok(()), |field| {
            Err(Problem::bad_request("too_large", format!("{field} is longer than any that is used"))
                .field(field))
        })
    }

    pub(super) fn says_capacity(&self) -> bool {
        self.capacity_words() > 0
    }

    pub(super) fn capacity_words(&self) -> usize {
        let said = [
            self.total_kv_blocks.is_some(),
            self.capacity.is_some(),
            self.capacity_blocks_per_rank.is_some(),
            self.capacity_blocks_all_ranks.is_some(),
            self.capacity_blocks_by_rank.is_some(),
            self.capacity_blocks_shared.is_some(),
        ];
        said.into_iter().filter(|said| *said).count()
    }

    /// Reads `name=value` pairs, divided by commas: `id=w1,model=llama,block_size=16,ranks=0-3,events=…`.
    ///
    /// Every field of a configured worker can be said: `events_per_rank.4=…` for one rank of an object, `a+b`
    /// for several items of a list.
    ///
    /// # Errors
    ///
    /// What cannot be read, in one sentence.
    pub fn from_pairs(text: &str) -> Result<Self, String> {
        let mut fields = serde_json::Map::new();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| format!("{part:?} is not name=value"))?;
            let (name, value) = (name.trim(), value.trim());
            if name == "ranks" {
                let (start, size) = range(value)?;
                fields.insert("start".into(), start.into());
                fields.insert("size".into(), size.into());
                continue;
            }
            let (field, rank) =
                name.split_once('.').map_or((name, None), |(field, rank)| (field, Some(rank)));
            if !known_fields().contains(&field) {
                return Err(format!(
                    "`{field}` is not known; known are ranks, {}",
                    known_fields().join(", ")
                ));
            }
            let value = typed(field, value)?;
            match rank {
                None => drop(fields.insert(field.to_owned(), value)),
                Some(rank) => {
                    let object = fields.entry(field).or_insert_with(|| serde_json::json!({}));
                    let object = object.as_object_mut();
                    let object = object.ok_or_else(|| format!("`{field}` is given whole and by rank"))?;
                    object.insert(rank.to_owned(), value);
                }
            }
        }
        fields.entry("size").or_insert(1.into());
        serde_path_to_error::deserialize(serde_json::Value::Object(fields)).map_err(|error| error.to_string())
    }
}

/// A value of `--worker` in the type of its field.
fn typed(field: &str, value: &str) -> Result<serde_json::Value, String> {
    const LISTS: [&str; 3] = ["taints", "adapters", "score_tiers"];
    const TRUTHS: [&str; 3] = ["no_events", "estimated", "is_eagle"];
    const NUMBERS: [&str; 14] = [
        "block_size",
        "start",
        "size",
        "data_parallel_start_rank",
        "data_parallel_size",
        "dp_rank",
        "max_num_batched_tokens",
        "max_running_requests",
        "total_kv_blocks",
        "capacity_blocks_per_rank",
        "capacity_blocks_all_ranks",
        "capacity_blocks_by_rank",
        "capacity_blocks_shared",
        "host_chunk_blocks",
    ];
    let no = |what: &str| format!("{field} is no {what}: {value:?}");
    Ok(match field {
        _ if LISTS.contains(&field) => value.split('+').filter(|item| !item.is_empty()).collect(),
        _ if TRUTHS.contains(&field) => value.parse::<bool>().map_err(|_| no("truth value"))?.into(),
        _ if NUMBERS.contains(&field) => value.parse::<u64>().map_err(|_| no("number"))?.into(),
        _ => value.into(),
    })
}

/// `0-3`, or one rank: the first, and how many.
fn range(text: &str) -> Result<(u32, u32), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |part: &str| part.parse::<u32>().map_err(|_| format!("{text:?} is no range of ranks"));
    let (first, last) = (number(first)?, number(last)?);
    let size = last.checked_sub(first).ok_or_else(|| format!("the range {text:?} goes backwards"))?;
    Ok((first, size.saturating_add(1)))
}

// === one that refuses what it does not know ===

/// [`WorkerFields`] in a file, where a field that is not known is an error: a misspelt one must not be taken
/// for a default.
#[derive(Clone, Debug)]
pub struct StrictWorkerFields(pub WorkerFields);

impl<'de> Deserialize<'de> for StrictWorkerFields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = StrictWorkerFields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a worker")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                let checked = serde::de::value::MapAccessDeserializer::new(Checked(map));
                WorkerFields::deserialize(checked).map(StrictWorkerFields)
            }
        }

        from.deserialize_map(Fields)
    }
}

/// Lets known keys through.
struct Checked<A>(A);

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Checked<A> {
    type Error = A::Error;

    fn next_key_seed<K: serde::de::DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        self.0.next_key_seed(KnownKey(seed))
    }

    fn next_value_seed<V: serde::de::DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.0.next_value_seed(seed)
    }
}

struct KnownKey<K>(K);

impl<'de, K: serde::de::DeserializeSeed<'de>> serde::de::DeserializeSeed<'de> for KnownKey<K> {
    type Value = K::Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<K::Value, D::Error> {
        // Within the key's own reading, so that the format says where it stands.
        let key = String::deserialize(from)?;
        if !known_fields().contains(&key.as_str()) {
            return Err(D::Error::unknown_field(&key, known_fields()));
        }
        self.0.deserialize(key.into_deserializer())
    }
}

/// The names of all fields, the second ones included.
pub(super) fn known_fields() -> &'static [&'static str] {
    struct Names(&'static [&'static str]);
    type Refused = serde::de::value::Error;

    impl<'de> Deserializer<'de> for &mut Names {
        type Error = Refused;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Refused> {
            Err(Refused::custom("only the names are asked for"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Refused> {
            self.0 = fields;
            self.deserialize_any(visitor)
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names = Names(&[]);
    // It always refuses, once it has been told the names.
    let _ = WorkerFields::deserialize(&mut names);
    names.0
}

/// A block size, which is not 0.
pub(super) fn block_size(tokens: u32) -> Result<BlockSize, Problem> {
    let zero = || {
        Problem::bad_request("invalid_declaration", "block_size must be greater than 0").field("block_size")
    };
    BlockSize::new(tokens).ok_or_else(zero)
}

/// Blanks around an endpoint are no part of any address, and hide a typing error.
pub(super) fn check_blank(field: &'static str, endpoint: Option<&str>) -> Result<(), Problem> {
    match endpoint {
        Some(at) if at.trim() != at => {
            let detail = format!("{field} begins or ends with a blank");
            Err(Problem::bad_request("invalid_declaration", detail).field(field))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::fleet::{CapacitySpec, ScoreTiers};
    use crate::ids::DpRank;
    use crate::service::spec::Readiness;

    /// L20: everything that can be said of a worker, said in four ways, is the same.
    #[test]
    fn every_way_can_say_everything() {
        let everything = json!({
            "loads": "http://h:8000", "load_stat": "tcp://h:5757", "load_stat_per_rank": {"5": "tcp://h:7001"},
            "capacity_blocks_by_rank": {"4": 900}, "estimated": true, "max_running_requests": 64,
            "max_num_batched_tokens": 8192, "announcements": "set", "taints": ["a", "b"], "role": "decode",
            "balance": "hybrid", "engine": "sglang", "dp_mode": "attention", "adapters": ["sql"],
            "is_eagle": true, "host_chunk_blocks": 16, "clear_scope": "device", "score_tiers": ["host"],
        });
        let with = |own: serde_json::Value| {
            let mut all = everything.clone();
            all.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            all
        };
        let posted: WorkerFields = serde_json::from_value(with(json!({
            "worker_id": "w", "model_name": "m", "block_size": 16, "endpoint": "http://h:8000",
            "data_parallel_start_rank": 4, "data_parallel_size": 2, "kv_events_base_endpoint": "tcp://h:5557",
        })))
        .unwrap();
        let Readiness::Complete(posted) = posted.readiness(posted.id().unwrap()).unwrap() else {
            unreachable!("nothing is missing")
        };
        let registered: WorkerFields = serde_json::from_value(with(json!({
            "instance_id": "w", "model_name": "m", "block_size": 16, "endpoint": "tcp://h:5557", "dp_rank": 4,
            "data_parallel_size": 2, "http_endpoint": "http://h:8000",
        })))
        .unwrap();
        let StrictWorkerFields(file) = serde_json::from_value(with(json!({
            "id": "w", "model": "m", "block_size": 16, "start": 4, "size": 2, "events": "tcp://h:5557",
            "http_endpoint": "http://h:8000",
        })))
        .unwrap();
        let flag = WorkerFields::from_pairs(
            "id=w,model=m,block_size=16,ranks=4-5,events=tcp://h:5557,http=http://h:8000,loads=http://h:8000,\
             load_stat=tcp://h:5757,load_stat_per_rank.5=tcp://h:7001,capacity_blocks_by_rank.4=900,\
             estimated=true,max_running_requests=64,max_num_batched_tokens=8192,announcements=set,taints=a+b,\
             role=decode,balance=hybrid,engine=sglang,dp_mode=attention,adapters=sql,is_eagle=true,\
             host_chunk_blocks=16,clear_scope=device,score_tiers=host",
        )
        .unwrap();
        assert_eq!(registered.registration().unwrap(), *posted);
        assert_eq!(file.configured().unwrap(), *posted);
        assert_eq!(flag.configured().unwrap(), *posted);
        assert_eq!(posted.loads.as_deref(), Some("http://h:8000"));
        assert_eq!(posted.score_tiers, ScoreTiers { host: true, disk: false });
        assert_eq!((posted.is_eagle, posted.clear_scope), (Some(true), ClearScope::Device));
        assert_eq!(posted.capacity, Some(CapacitySpec::by_rank([(DpRank(4), 900)]).estimated()));
    }

    /// L18: a list may leave ranks out; one that fits nobody is refused.
    #[test]
    fn a_capacity_list_may_leave_ranks_out() {
        let capacity = |list: serde_json::Value| {
            let fields =
                json!({"data_parallel_size": 2, "capacity": {"scope": "per_rank_list", "blocks": list}});
            let fields: WorkerFields = serde_json::from_value(fields).unwrap();
            fields.capacity(&fields.ranks().unwrap())
        };
        let one = Some(CapacitySpec::by_rank([(DpRank(1), 9)]));
        assert_eq!(capacity(json!([null, 9])).unwrap(), one);
        assert_eq!(capacity(json!({"1": 9})).unwrap(), one);
        assert!(capacity(json!([9])).is_err() && capacity(json!({"2": 9})).is_err());
    }

    /// A patch of the capacity takes the place of whatever was said of it.
    #[test]
    fn a_patch_replaces_the_whole_capacity() {
        let fields = |value| serde_json::from_value::<WorkerFields>(value).unwrap();
        let was = fields(json!({"capacity": {"scope": "per_rank", "blocks": 5}, "role": "decode"}));
        let now = was.patched(fields(json!({"total_kv_blocks": 7})));
        let ranks = now.ranks().unwrap();
        assert_eq!(now.capacity(&ranks).unwrap(), Some(CapacitySpec::aggregate(7)));
        assert_eq!(now.role, Some(RoleBody::Decode));
        let twice = fields(json!({"capacity_blocks_shared": 5, "capacity_blocks_per_rank": 7}));
        assert!(twice.capacity(&ranks).is_err());
    }

    #[test]
    fn what_is_not_known_is_refused() {
        assert!(known_fields().contains(&"load_stat") && known_fields().contains(&"start"));
        let strict = |value| serde_json::from_value::<StrictWorkerFields>(value).unwrap_err().to_string();
        assert!(strict(json!({"id": "w", "colour": "red"})).contains("colour"));
        let flag =
            |text: &str| WorkerFields::from_pairs(text).and_then(|fields| fields.configured()).unwrap_err();
        assert!(flag("id=w,colour=red").contains("colour"));
        assert!(flag("id=w,model=m,block_size=x,events=tcp://h:1").contains("block_size"));
        assert!(flag("id=w,model=m,block_size=16,events=tcp://h:1,loads=h:8000").contains("loads"));
        assert!(flag("id=w,model=m,block_size=16,events=tcp://h:1,load_stat=h").contains("load_stat"));
        assert!(flag("id=w,model=m,block_size=16,events=nowhere").contains("events"));
        assert!(flag("id=w,model=m,block_size=16,ranks=3-1,events=tcp://h:1").contains("backwards"));
    }
}

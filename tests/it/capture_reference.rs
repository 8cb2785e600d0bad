//! The captures fed to the simplest possible model of an engine's cache, and compared with the truth.
//!
//! A map from hash to copies, a generic msgpack value, no index, no sequencer: it shows that the script, its
//! replay answers and the check itself are right, before anything clever is held against them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rankwise::block::{BlockHash, Tier};
use rankwise::capture::format::numbered;
use rankwise::capture::{
    CaptureScript, Contents, ExceptionBook, Exceptions, Outcome, RankOutcome, ReplayDesk, Truth, check,
    is_capture, stem,
};
use rankwise::ids::{DpRank, EventSeq};
use rankwise::trust::{MayErr, Trust};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// S3, R4: counting references reproduces every engine's contents, copies included, where announcements
/// count; a set does where they do not.
#[test]
fn a_count_of_references_reproduces_every_truth() {
    let directory = std::env::var_os("RANKWISE_CAPTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures"), PathBuf::from);
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if !is_capture(&path) {
            continue;
        }
        let truth = Truth::beside(&path).unwrap();
        let exceptions = ExceptionBook::beside(&path).unwrap().of(&stem(&path));
        let script = CaptureScript::load(&path, |_| {}).unwrap();
        let report = check(replayed(&script, &truth, &exceptions), &truth, &exceptions);
        assert!(report.ok, "{report}");
    }
}

/// What the model holds after a capture. Probes, which need content, are taken from the truth.
fn replayed(script: &CaptureScript, truth: &Truth, exceptions: &Exceptions) -> Outcome {
    let set = exceptions.announcements_are_a_set();
    let mut models: BTreeMap<DpRank, Model> =
        script.ranks().iter().map(|&rank| (rank, Model::new(set))).collect();
    let mut desk = ReplayDesk::new(script.replies());
    for &rank in script.ranks() {
        assert!(desk.ask(rank, EventSeq::ZERO).is_none_or(|mut answers| answers.next().is_none()));
    }
    for message in script.live() {
        desk.live(message);
        let model = models.get_mut(&message.rank).unwrap();
        let (seq, payload) = numbered(&message.frames).unwrap();
        if message.life != model.life {
            *model = Model { life: message.life, ..Model::new(set) };
        }
        if seq > model.next {
            let answers = desk.ask(message.rank, model.next).into_iter().flatten();
            answers
                .take_while(|(answer, _)| *answer < seq)
                .for_each(|(seq, payload)| model.take(seq, payload));
        }
        model.take(seq, payload);
    }
    let answers = truth.probes.iter().enumerate().flat_map(|(index, probe)| {
        probe.by_rank.iter().map(move |answer| ((index, DpRank(answer.rank)), answer.matched_blocks))
    });
    Outcome {
        engine: script.header().engine().to_owned(),
        ranks: models.into_iter().map(|(rank, model)| (rank, model.outcome())).collect(),
        probes: answers.collect(),
        ..Outcome::default()
    }
}

/// One rank's cache.
struct Model {
    set: bool,
    life: u32,
    next: EventSeq,
    trust: Trust,
    copies: HashMap<(Tier, Option<u64>, BlockHash), u32>,
}

impl Model {
    fn new(set: bool) -> Self {
        Self { set, life: 0, next: EventSeq::ZERO, trust: Trust::Live, copies: HashMap::new() }
    }

    fn take(&mut self, seq: EventSeq, payload: &Bytes) {
        if seq > self.next {
            // What was evicted in the hole is unknown, so nothing from before it can be kept.
            self.copies.clear();
            self.trust = Trust::Partial(MayErr::Miss);
        }
        self.next = seq.next();
        for event in decode(payload) {
            match event {
                Event::Cleared => self.copies.clear(),
                Event::Stored(blocks) => blocks.keys().for_each(|key| {
                    let copies = self.copies.entry(key).or_insert(0);
                    *copies = if self.set { 1 } else { *copies + 1 };
                }),
                Event::Removed(blocks) => blocks.keys().for_each(|key| {
                    if let Some(copies) = self.copies.get_mut(&key) {
                        *copies = copies.saturating_sub(1);
                    }
                }),
            }
        }
    }

    fn outcome(self) -> RankOutcome {
        let mut contents = Contents::default();
        for ((tier, group, hash), copies) in self.copies.into_iter().filter(|(_, copies)| *copies > 0) {
            contents.insert(tier, group.map(|group| u32::try_from(group).unwrap()), hash, copies);
        }
        RankOutcome { trust: self.trust, contents }
    }
}

/// An event as far as the model needs it.
pub enum Event {
    /// Blocks were cached.
    Stored(Blocks),
    /// Blocks were evicted.
    Removed(Blocks),
    /// All were.
    Cleared,
}

/// The blocks of an event and where they lie.
pub struct Blocks {
    hashes: Vec<BlockHash>,
    tier: Tier,
    group: Option<u64>,
}

impl Blocks {
    fn keys(&self) -> impl Iterator<Item = (Tier, Option<u64>, BlockHash)> {
        self.hashes.iter().map(|hash| (self.tier, self.group, hash.clone()))
    }
}

/// The events of a batch, by way of a generic value.
pub fn decode(payload: &[u8]) -> Vec<Event> {
    let batch: Value = rmp_serde::from_slice(payload).unwrap();
    let Value::Seq(events) = batch.field(1, "events") else { panic!("no events") };
    events.iter().map(event).collect()
}

fn event(event: &Value) -> Event {
    let blocks = |medium, group| {
        let Value::Seq(hashes) = event.field(1, "block_hashes") else { panic!("no hashes") };
        let tier = match event.field(medium, "medium") {
            Value::Text(medium) => Tier::from_medium(Some(medium)),
            _ => Tier::from_medium(None),
        };
        let group = match event.field(group, "group_idx") {
            Value::Int(group) => Some(*group),
            _ => None,
        };
        Blocks { hashes: hashes.iter().map(Value::hash).collect(), tier, group }
    };
    match event.field(0, "type") {
        Value::Text(tag) if tag == "BlockStored" => Event::Stored(blocks(6, 9)),
        Value::Text(tag) if tag == "BlockRemoved" => Event::Removed(blocks(2, 3)),
        Value::Text(tag) if tag == "AllBlocksCleared" => Event::Cleared,
        other => panic!("unknown tag {other:?}"),
    }
}

/// Any msgpack value of a capture.
#[derive(Debug)]
enum Value {
    Nothing,
    Int(u64),
    Text(String),
    Bytes(Vec<u8>),
    Seq(Vec<Value>),
    Map(Vec<(Value, Value)>),
}

impl Value {
    fn field(&self, place: usize, name: &str) -> &Self {
        match self {
            Self::Seq(items) => items.get(place),
            Self::Map(pairs) => pairs
                .iter()
                .find(|(key, _)| matches!(key, Self::Text(key) if key == name))
                .map(|(_, value)| value),
            other => panic!("no fields in {other:?}"),
        }
        .unwrap_or(&Self::Nothing)
    }

    fn hash(&self) -> BlockHash {
        match self {
            Self::Int(hash) => BlockHash::Int(*hash),
            Self::Bytes(bytes) => BlockHash::from_bytes(bytes).unwrap(),
            other => panic!("no hash: {other:?}"),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Nothing)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Value, E> {
        Ok(Value::Nothing)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
        Ok(Value::Nothing)
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Int(number))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Int(number.cast_unsigned()))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_owned()))
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Value, E> {
        Ok(Value::Bytes(bytes.to_vec()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Seq(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut pairs = Vec::new();
        while let Some(pair) = map.next_entry()? {
            pairs.push(pair);
        }
        Ok(Value::Map(pairs))
    }
}

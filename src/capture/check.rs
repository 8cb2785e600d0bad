//! A replayed capture against the engines' truth.
//!
//! A pure function on plain data: what the index holds and answers goes in, a report comes out. The report
//! serialises to the JSON that `rankwise replay --check --json` prints, and displays as a table line with
//! everything that differs below it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::CaptureError;
use super::truth::{RankTruth, Truth, read_text};
use crate::block::{BlockHash, Tier};
use crate::ids::DpRank;
use crate::trust::Trust;

/// Differences of one kind that are kept as examples; the rest is counted. Enough to see a pattern.
pub const MAX_EXAMPLES: usize = 20;

/// What one rank holds: per tier and group the hashes and their copies.
///
/// No group and group 0 are the same: engines without groups name none, and older ones do not send theirs.
/// Ordered, so that two runs report the same examples.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Contents {
    layers: BTreeMap<(Tier, u32), BTreeMap<BlockHash, u32>>,
}

impl Contents {
    /// Adds copies of a block.
    pub fn insert(&mut self, tier: Tier, group: Option<u32>, hash: BlockHash, copies: u32) {
        let held = self.layers.entry((tier, group.unwrap_or(0))).or_default().entry(hash).or_insert(0);
        *held = held.saturating_add(copies);
    }

    /// Distinct hashes on a tier, over all groups.
    pub fn distinct(&self, tier: Tier) -> usize {
        let mut layers = self.layers.iter().filter(|((at, _), _)| *at == tier).map(|(_, layer)| layer);
        match (layers.next(), layers.next()) {
            (None, _) => 0,
            (Some(only), None) => only.len(),
            (Some(first), Some(second)) => {
                let mut all: std::collections::HashSet<&BlockHash> = first.keys().collect();
                all.extend(second.keys());
                layers.for_each(|layer| all.extend(layer.keys()));
                all.len()
            }
        }
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.layers.values().all(BTreeMap::is_empty)
    }

    /// Every block, in the order of tier and group.
    fn blocks(&self) -> impl Iterator<Item = (Tier, u32, &BlockHash, u32)> {
        self.layers.iter().flat_map(|(&(tier, group), layer)| {
            layer.iter().map(move |(hash, &copies)| (tier, group, hash, copies))
        })
    }

    fn copies(&self, tier: Tier, group: u32, hash: &BlockHash) -> Option<u32> {
        self.layers.get(&(tier, group))?.get(hash).copied()
    }
}

/// What a replayed capture left behind, as plain data.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The capture's file, as it was named.
    pub file: String,
    /// The engine's name, from the capture's header.
    pub engine: String,
    /// Its version, likewise.
    pub engine_version: String,
    /// The worker that the capture was fed to.
    pub worker: String,
    /// Every declared rank.
    pub ranks: BTreeMap<DpRank, RankOutcome>,
    /// Blocks answered per probe (by its place in the truth) and rank.
    pub probes: HashMap<(usize, DpRank), u32>,
    /// Counters of the run, by name.
    pub counters: BTreeMap<String, u64>,
}

/// What a replayed capture left behind of one rank.
#[derive(Clone, Debug)]
pub struct RankOutcome {
    /// How far its view can be believed.
    pub trust: Trust,
    /// What it is said to hold.
    pub contents: Contents,
}

/// What is not to be compared plainly, per capture: `check.json`.
#[derive(Clone, Debug, Default)]
pub struct ExceptionBook {
    by_stem: BTreeMap<String, Exceptions>,
}

impl ExceptionBook {
    /// Reads an exceptions file.
    ///
    /// # Errors
    /// When it cannot be read or is no JSON object of exceptions by stem.
    pub fn load(path: &Path) -> Result<Self, CaptureError> {
        serde_json::from_str(&read_text(path)?)
            .map(|by_stem| Self { by_stem })
            .map_err(|error| CaptureError::json(path, error))
    }

    /// Reads `check.json` beside a capture; without one there are no exceptions.
    ///
    /// # Errors
    /// As [`ExceptionBook::load`].
    pub fn beside(capture: &Path) -> Result<Self, CaptureError> {
        let path = capture.with_file_name("check.json");
        if path.exists() { Self::load(&path) } else { Ok(Self::default()) }
    }

    /// The exceptions of the capture with this stem; none if it is not listed.
    pub fn of(&self, stem: &str) -> Exceptions {
        self.by_stem.get(stem).cloned().unwrap_or_default()
    }
}

/// What is not to be compared plainly of one capture. Echoed in the report as it was written.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Exceptions {
    written: serde_json::Map<String, serde_json::Value>,
}

impl Exceptions {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.written.is_empty()
    }

    /// Whether an announcement means "is there" rather than "one more copy": the engine announces reused
    /// blocks again. The index must then be fed so, and copies are not compared.
    pub fn announcements_are_a_set(&self) -> bool {
        self.written.get("announcements").is_some_and(|value| value == "set")
    }

    /// The trust that a rank is to end with; those not named are to be `live`.
    pub fn expected_trust(&self, rank: DpRank) -> &str {
        let named = self.written.get("expect_trust").and_then(|ranks| ranks.get(rank.to_string()));
        named.and_then(serde_json::Value::as_str).unwrap_or(Trust::Live.name())
    }

    /// Whether no subscriber can know a rank's answer to a probe.
    pub fn unknowable(&self, probe: usize, rank: DpRank) -> bool {
        let pairs = self.written.get("unknowable").and_then(serde_json::Value::as_array);
        pairs.into_iter().flatten().any(|pair| {
            let number = |name| pair.get(name).and_then(serde_json::Value::as_u64);
            number("probe") == Some(probe as u64) && number("rank") == Some(u64::from(rank.0))
        })
    }
}

/// The check of several captures.
#[derive(Clone, Debug, Serialize)]
pub struct CheckRun {
    /// Whether every capture is as it should be.
    pub ok: bool,
    /// One report per capture, in the order of the arguments.
    pub captures: Vec<CheckReport>,
}

impl CheckRun {
    /// Gathers reports.
    pub fn new(captures: Vec<CheckReport>) -> Self {
        Self { ok: captures.iter().all(|capture| capture.ok), captures }
    }
}

/// The check of one capture.
#[derive(Clone, Debug, Serialize)]
pub struct CheckReport {
    /// The capture's file.
    pub file: String,
    /// The engine's name.
    pub engine: String,
    /// Its version.
    pub engine_version: String,
    /// Whether every `live` rank's contents equal the truth, no rank holds anything beyond it, trust is as
    /// expected, and every probe is equal or listed as unknowable.
    pub ok: bool,
    /// The exceptions that were applied, as they were written.
    pub exceptions: Exceptions,
    /// One row per rank.
    pub ranks: Vec<RankReport>,
    /// How the probes went.
    pub probes: ProbeReport,
    /// Counters of the run, by name.
    pub counters: BTreeMap<String, u64>,
    /// Whether there was a truth to compare with. Without one, `ok` says no more than that every rank's trust is as
    /// expected: all batches were decoded, put in order and applied whole.
    #[serde(skip_serializing_if = "is_true")]
    pub against_truth: bool,
    /// What differs, for people.
    #[serde(skip)]
    pub differences: Differences,
}

/// Said only where it is not so.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_true(value: &bool) -> bool {
    *value
}

/// The check of one rank.
#[derive(Clone, Debug, Serialize)]
pub struct RankReport {
    /// The worker.
    pub worker: String,
    /// The global rank.
    pub dp_rank: u32,
    /// Its trust by name.
    pub trust: &'static str,
    /// What it holds.
    pub blocks: BlockCounts,
    /// Whether that is exactly the truth, whatever its trust.
    pub contents_equal: bool,
}

/// Distinct hashes per tier over all groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct BlockCounts {
    /// On the device.
    pub device: usize,
    /// In host memory.
    pub host: usize,
    /// In storage.
    pub disk: usize,
    /// On media that we do not know.
    pub other: usize,
}

impl BlockCounts {
    fn of(contents: &Contents) -> Self {
        Self {
            device: contents.distinct(Tier::Device),
            host: contents.distinct(Tier::Host),
            disk: contents.distinct(Tier::Disk),
            other: contents.distinct(Tier::Other),
        }
    }
}

/// How the (probe, rank) pairs went. Every pair is equal, unknowable, or wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct ProbeReport {
    /// Pairs in the truth.
    pub total: usize,
    /// Pairs with exactly the truth's blocks.
    pub equal: usize,
    /// Pairs that differ and are listed as unknowable.
    pub unknowable: usize,
}

/// What differs: up to [`MAX_EXAMPLES`] examples of each kind, and how many more there are.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Differences {
    examples: Vec<Difference>,
    counts: BTreeMap<DifferenceKind, usize>,
}

/// A kind of [`Difference`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DifferenceKind {
    /// A rank's trust is not the expected one.
    Trust,
    /// The truth has a block that the rank lacks.
    Missing,
    /// A rank holds a block that the truth lacks.
    Beyond,
    /// A block's copies differ.
    Copies,
    /// A probe's answer differs.
    Probe,
}

/// One thing that is not as the truth says.
#[derive(Clone, PartialEq, Debug)]
pub struct Difference {
    /// What kind it is of.
    pub kind: DifferenceKind,
    /// Where it was found.
    pub rank: DpRank,
    /// In words.
    pub text: String,
    /// Whether it makes the capture fail. A rank that is not live may lack blocks.
    pub fails: bool,
}

impl Differences {
    /// The examples, in the order in which they were found.
    pub fn examples(&self) -> &[Difference] {
        &self.examples
    }

    /// How many there are of a kind, examples included.
    pub fn count(&self, kind: DifferenceKind) -> usize {
        self.counts.get(&kind).copied().unwrap_or(0)
    }

    fn add(&mut self, kind: DifferenceKind, rank: DpRank, fails: bool, text: impl FnOnce() -> String) {
        let count = self.counts.entry(kind).or_insert(0);
        *count += 1;
        if *count <= MAX_EXAMPLES {
            self.examples.push(Difference { kind, rank, text: text(), fails });
        }
    }
}

/// Compares what a replayed capture left behind with the truth.
pub fn check(outcome: Outcome, truth: &Truth, exceptions: &Exceptions) -> CheckReport {
    let mut differences = Differences::default();
    let mut ok = true;
    // SGLang's truth counts namespaces or tree pages, which no event tells.
    let compare_copies = outcome.engine == "vllm" && !exceptions.announcements_are_a_set();

    let mut known: Vec<DpRank> = outcome.ranks.keys().copied().collect();
    known.extend(truth.ranks.iter().map(|rank| DpRank(rank.rank)));
    known.sort_unstable();
    known.dedup();
    let ranks = known.into_iter().map(|rank| {
        let comparison = RankComparison {
            rank,
            outcome: outcome.ranks.get(&rank),
            truth: truth.rank(rank).map(RankTruth::contents).unwrap_or_default(),
            expected_trust: exceptions.expected_trust(rank),
            compare_copies,
        };
        let (row, as_it_should_be) = comparison.run(&outcome.worker, &mut differences);
        ok &= as_it_should_be;
        row
    });
    let ranks = ranks.collect();
    let probes = compare_probes(&outcome, truth, exceptions, &mut differences);
    ok &= probes.equal + probes.unknowable == probes.total;
    CheckReport {
        file: outcome.file,
        engine: outcome.engine,
        engine_version: outcome.engine_version,
        ok,
        exceptions: exceptions.clone(),
        ranks,
        probes,
        counters: outcome.counters,
        against_truth: true,
        differences,
    }
}

/// Checks a capture that has no truth beside it: what its ranks hold cannot be compared, but whether all that was
/// recorded could be decoded, put in order and applied whole shows in their trust.
pub fn check_without_truth(outcome: Outcome, exceptions: &Exceptions) -> CheckReport {
    let mut differences = Differences::default();
    let mut ok = true;
    let ranks = outcome.ranks.iter().map(|(&rank, of_rank)| {
        let comparison = RankComparison {
            rank,
            outcome: Some(of_rank),
            truth: of_rank.contents.clone(),
            expected_trust: exceptions.expected_trust(rank),
            compare_copies: false,
        };
        let (row, as_it_should_be) = comparison.run(&outcome.worker, &mut differences);
        ok &= as_it_should_be;
        row
    });
    let ranks = ranks.collect();
    CheckReport {
        file: outcome.file,
        engine: outcome.engine,
        engine_version: outcome.engine_version,
        ok,
        exceptions: exceptions.clone(),
        ranks,
        probes: ProbeReport::default(),
        counters: outcome.counters,
        against_truth: false,
        differences,
    }
}

/// One rank's view and its truth.
struct RankComparison<'a> {
    rank: DpRank,
    /// `None`: the rank was not declared.
    outcome: Option<&'a RankOutcome>,
    truth: Contents,
    expected_trust: &'a str,
    compare_copies: bool,
}

impl RankComparison<'_> {
    /// The rank's row, and whether the rank is as it should be.
    fn run(&self, worker: &str, differences: &mut Differences) -> (RankReport, bool) {
        let nothing = Contents::default();
        let (trust, contents) = match self.outcome {
            Some(outcome) => (outcome.trust, &outcome.contents),
            // Nobody listened to it, so it was never heard.
            None => (Trust::Silent, &nothing),
        };
        let trusted = trust.name() == self.expected_trust;
        if !trusted {
            differences.add(DifferenceKind::Trust, self.rank, true, || {
                format!("is {trust}, expected {}", self.expected_trust)
            });
        }
        let live = trust == Trust::Live;
        let found = self.compare(contents, live, differences);
        let equal = found.missing + found.beyond + found.copies == 0;
        let row = RankReport {
            worker: worker.to_owned(),
            dp_rank: self.rank.0,
            trust: trust.name(),
            blocks: BlockCounts::of(contents),
            contents_equal: equal,
        };
        (row, trusted && found.beyond == 0 && (equal || !live))
    }

    fn compare(&self, contents: &Contents, live: bool, differences: &mut Differences) -> Found {
        use DifferenceKind::{Beyond, Copies, Missing};

        let mut found = Found::default();
        for (tier, group, hash, held) in contents.blocks() {
            let place = || format!("{hash} ({}, group {group})", tier.name());
            match self.truth.copies(tier, group, hash) {
                None => {
                    found.beyond += 1;
                    differences
                        .add(Beyond, self.rank, true, || format!("holds {}, the engine does not", place()));
                }
                Some(copies) if self.compare_copies && copies != held => {
                    found.copies += 1;
                    differences.add(Copies, self.rank, live, || {
                        format!("has {held} copies of {}, the engine {copies}", place())
                    });
                }
                Some(_) => {}
            }
        }
        for (tier, group, hash, _) in self.truth.blocks() {
            if contents.copies(tier, group, hash).is_none() {
                found.missing += 1;
                differences.add(Missing, self.rank, live, || {
                    format!("lacks {hash} ({}, group {group})", tier.name())
                });
            }
        }
        found
    }
}

/// How many differences a rank's contents have.
#[derive(Default)]
struct Found {
    missing: usize,
    beyond: usize,
    copies: usize,
}

fn compare_probes(
    outcome: &Outcome,
    truth: &Truth,
    exceptions: &Exceptions,
    differences: &mut Differences,
) -> ProbeReport {
    let mut report = ProbeReport::default();
    for (index, probe) in truth.probes.iter().enumerate() {
        for expected in &probe.by_rank {
            let rank = DpRank(expected.rank);
            let answer = outcome.probes.get(&(index, rank)).copied();
            report.total += 1;
            if answer == Some(expected.matched_blocks) {
                report.equal += 1;
                continue;
            }
            let unknowable = exceptions.unknowable(index, rank);
            report.unknowable += usize::from(unknowable);
            differences.add(DifferenceKind::Probe, rank, !unknowable, || {
                let given = answer.map_or("no answer".to_owned(), |blocks| format!("{blocks} blocks"));
                let listed = if unknowable { " (unknowable)" } else { "" };
                format!("probe {index}: {given}, the engine found {}{listed}", expected.matched_blocks)
            });
        }
    }
    report
}

impl CheckReport {
    /// The head of a table of reports.
    pub fn table_head() -> String {
        format!(
            "{:<44} {:<5} {:>5} {:>7} {:>7} {:>7} {:>7} {:>9}  {}",
            "capture", "check", "ranks", "device", "host", "disk", "other", "probes", "exceptions"
        )
    }
}

/// A table line, and below it what differs.
impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Path::new(&self.file).file_name().unwrap_or_default().to_string_lossy();
        let sum =
            |of: fn(&BlockCounts) -> usize| self.ranks.iter().map(|rank| of(&rank.blocks)).sum::<usize>();
        let probes = format!("{}/{}", self.probes.equal, self.probes.total);
        write!(
            f,
            "{name:<44} {:<5} {:>5} {:>7} {:>7} {:>7} {:>7} {probes:>9}  {}",
            if self.ok { "ok" } else { "FAIL" },
            self.ranks.len(),
            sum(|blocks| blocks.device),
            sum(|blocks| blocks.host),
            sum(|blocks| blocks.disk),
            sum(|blocks| blocks.other),
            self.exceptions,
        )?;
        if !self.against_truth {
            write!(f, "\n    no truth beside it: decoding, order and trust were checked, contents were not")?;
        }
        for difference in self.differences.examples() {
            let weight = if difference.fails { "" } else { " (allowed)" };
            write!(f, "\n    rank {} {}{weight}", difference.rank, difference.text)?;
        }
        for (kind, &count) in &self.differences.counts {
            if let Some(more) = count.checked_sub(MAX_EXAMPLES).filter(|&more| more > 0) {
                write!(f, "\n    … and {more} more of the kind: {}", kind.name())?;
            }
        }
        Ok(())
    }
}

impl DifferenceKind {
    fn name(self) -> &'static str {
        match self {
            Self::Trust => "trust",
            Self::Missing => "missing blocks",
            Self::Beyond => "blocks beyond the truth",
            Self::Copies => "copies",
            Self::Probe => "probes",
        }
    }
}

/// The exceptions in short, `-` for none.
impl fmt::Display for Exceptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("-");
        }
        for (index, (name, value)) in self.written.iter().filter(|(name, _)| *name != "reason").enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match value {
                serde_json::Value::Array(pairs) => write!(f, "{comma}{name} {}", pairs.len())?,
                serde_json::Value::String(text) => write!(f, "{comma}{name} {text}")?,
                other => write!(f, "{comma}{name} {other}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::trust::MayErr;

    const R0: DpRank = DpRank(0);
    const R1: DpRank = DpRank(1);

    fn truth() -> Truth {
        serde_json::from_str(
            r#"{"engine":"vllm","block_size":16,
                "ranks":[
                  {"rank":0,"last_seq":3,"groups":[
                    {"group_idx":0,"medium":"GPU","hashes":[[1,1],[2,2],[3,1]]},
                    {"group_idx":1,"medium":"GPU","hashes":[[3,1]]},
                    {"group_idx":0,"medium":"CPU","hashes":[["0aff",1]]}]},
                  {"rank":1,"last_seq":0,"groups":[{"group_idx":null,"medium":null,"hashes":[[1,1],[9,1]]}]}],
                "probes":[{"tokens":[1],"by_rank":[
                  {"rank":0,"matched_tokens":32,"matched_blocks":2},
                  {"rank":1,"matched_tokens":0,"matched_blocks":0}]}]}"#,
        )
        .unwrap()
    }

    /// What a run that is exactly right leaves behind.
    fn right() -> Outcome {
        let truth = truth();
        let rank = |rank: &RankTruth| {
            (DpRank(rank.rank), RankOutcome { trust: Trust::Live, contents: rank.contents() })
        };
        Outcome {
            file: "dir/vllm-x.kvcap".into(),
            engine: "vllm".into(),
            engine_version: "1".into(),
            worker: "vllm-x".into(),
            ranks: truth.ranks.iter().map(rank).collect(),
            probes: HashMap::from([((0, R0), 2), ((0, R1), 0)]),
            counters: BTreeMap::from([("gaps".into(), 1)]),
        }
    }

    fn exceptions(json: &str) -> Exceptions {
        serde_json::from_str(json).unwrap()
    }

    fn contents(outcome: &mut Outcome, rank: DpRank) -> &mut Contents {
        &mut outcome.ranks.get_mut(&rank).unwrap().contents
    }

    fn lose(outcome: &mut Outcome, rank: DpRank, hash: u64) {
        contents(outcome, rank)
            .layers
            .get_mut(&(Tier::Device, 0))
            .unwrap()
            .remove(&BlockHash::Int(hash))
            .unwrap();
    }

    #[test]
    fn the_json_is_the_agreed_one() {
        let report = check(right(), &truth(), &exceptions(r#"{"reason":"why","unknowable":[]}"#));
        let run = serde_json::to_value(CheckRun::new(vec![report])).unwrap();
        let rank = |rank: u32, device: u32, host: u32| {
            serde_json::json!({"worker":"vllm-x","dp_rank":rank,"trust":"live","contents_equal":true,
                "blocks":{"device":device,"host":host,"disk":0,"other":0}})
        };
        let expected = serde_json::json!({"ok":true,"captures":[{
            "file":"dir/vllm-x.kvcap","engine":"vllm","engine_version":"1","ok":true,
            "exceptions":{"reason":"why","unknowable":[]},
            "ranks":[rank(0, 3, 1), rank(1, 2, 0)],
            "probes":{"total":2,"equal":2,"unknowable":0},
            "counters":{"gaps":1}}]});
        assert_eq!(run, expected);
    }

    #[test]
    fn a_live_rank_must_hold_every_block_and_every_copy() {
        let mut outcome = right();
        lose(&mut outcome, R0, 1);
        let report = check(outcome, &truth(), &Exceptions::default());
        assert!(!report.ok && !report.ranks[0].contents_equal && report.ranks[1].contents_equal);
        assert_eq!(report.differences.count(DifferenceKind::Missing), 1);

        let mut outcome = right();
        contents(&mut outcome, R0).insert(Tier::Device, None, BlockHash::Int(1), 1);
        let report = check(outcome.clone(), &truth(), &Exceptions::default());
        assert!(!report.ok && report.differences.count(DifferenceKind::Copies) == 1);
        assert!(check(outcome.clone(), &truth(), &exceptions(r#"{"announcements":"set"}"#)).ok);
        outcome.engine = "sglang".into();
        assert!(check(outcome, &truth(), &Exceptions::default()).ok, "SGLang counts something else");
    }

    #[test]
    fn a_block_in_the_wrong_place_is_missing_and_beyond() {
        let mut outcome = right();
        lose(&mut outcome, R1, 9);
        contents(&mut outcome, R1).insert(Tier::Host, None, BlockHash::Int(9), 1);
        let report = check(outcome, &truth(), &Exceptions::default());
        assert_eq!(report.differences.count(DifferenceKind::Missing), 1);
        assert_eq!(report.differences.count(DifferenceKind::Beyond), 1);
    }

    #[test]
    fn a_partial_rank_may_lack_blocks_but_must_be_expected_and_hold_nothing_else() {
        let expected = exceptions(r#"{"expect_trust":{"1":"partial"}}"#);
        let mut outcome = right();
        outcome.ranks.get_mut(&R1).unwrap().trust = Trust::Partial(MayErr::Miss);
        lose(&mut outcome, R1, 9);
        let report = check(outcome.clone(), &truth(), &expected);
        assert!(report.ok && !report.ranks[1].contents_equal);
        assert!(report.differences.examples().iter().all(|difference| !difference.fails));

        assert!(!check(outcome.clone(), &truth(), &Exceptions::default()).ok, "it was to be live");
        contents(&mut outcome, R1).insert(Tier::Device, Some(0), BlockHash::Int(8), 1);
        assert!(!check(outcome, &truth(), &expected).ok, "8 is not there");
        assert!(!check(right(), &truth(), &expected).ok, "live where partial was expected");
    }

    #[test]
    fn ranks_that_only_one_side_knows() {
        let mut outcome = right();
        outcome.ranks.remove(&R1);
        let report = check(outcome, &truth(), &Exceptions::default());
        assert!(!report.ok);
        assert_eq!((report.ranks[1].trust, report.ranks[1].contents_equal), ("silent", false));

        let mut outcome = right();
        let mut contents = Contents::default();
        contents.insert(Tier::Device, None, BlockHash::Int(1), 1);
        outcome.ranks.insert(DpRank(7), RankOutcome { trust: Trust::Live, contents });
        assert!(!check(outcome, &truth(), &Exceptions::default()).ok);
    }

    #[test]
    fn probes_are_equal_or_listed() {
        let listed = exceptions(r#"{"unknowable":[{"probe":0,"rank":1}],"reason":"salt"}"#);
        let mut outcome = right();
        outcome.probes.insert((0, R1), 1);
        let report = check(outcome.clone(), &truth(), &listed);
        assert!(report.ok);
        assert_eq!(report.probes, ProbeReport { total: 2, equal: 1, unknowable: 1 });
        assert!(!check(outcome.clone(), &truth(), &Exceptions::default()).ok);
        outcome.probes.remove(&(0, R0));
        let report = check(outcome, &truth(), &listed);
        assert!(!report.ok, "a probe that nobody answered is not equal");
        assert_eq!(check(right(), &truth(), &listed).probes.unknowable, 0, "equal after all");
    }

    #[test]
    fn examples_are_bounded_and_the_rest_is_counted() {
        let mut outcome = right();
        for hash in 100..200 {
            contents(&mut outcome, R0).insert(Tier::Device, None, BlockHash::Int(hash), 1);
        }
        let report = check(outcome, &truth(), &Exceptions::default());
        assert_eq!(report.differences.count(DifferenceKind::Beyond), 100);
        assert_eq!(report.differences.examples().len(), MAX_EXAMPLES);
        let text = report.to_string();
        assert!(text.contains("FAIL") && text.contains("80 more"), "{text}");
        assert!(text.contains("rank 0 holds 100 (device, group 0)"), "{text}");
    }
}

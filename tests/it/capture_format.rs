//! Every capture in the repository through the capture format: read, written again, counted, planned.
//!
//! The captures come from `RANKWISE_CAPTURES`, by default the repository's own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rankwise::block::{BlockHash, Tier};
use rankwise::capture::{
    CaptureError, CaptureHeader, CaptureLine, CaptureReader, CaptureScript, CaptureWriter, Direction,
    ExceptionBook, LineBody, LineProblem, Outcome, PublishStep, RankOutcome, RankPlan, ReplayDesk, Truth,
    check, is_capture, stem,
};
use rankwise::ids::{DpRank, EventSeq};
use rankwise::trust::Trust;

use crate::capture_reference::{Event, decode};

/// The captures' directory.
fn directory() -> PathBuf {
    std::env::var_os("RANKWISE_CAPTURES").map_or_else(own_directory, PathBuf::from)
}

fn own_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/captures")
}

fn own(name: &str) -> CaptureScript {
    CaptureScript::load(&own_directory().join(name), |_| {}).unwrap()
}

fn captures() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = fs::read_dir(directory())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| is_capture(path))
        .collect();
    all.sort();
    assert!(!all.is_empty(), "no captures in {}", directory().display());
    all
}

fn lines(path: &Path) -> Vec<CaptureLine> {
    CaptureReader::open(path).unwrap().map(Result::unwrap).collect()
}

#[test]
fn every_capture_is_written_again_byte_for_byte() {
    let scratch = tempfile::tempdir().unwrap();
    for path in captures() {
        let reader = CaptureReader::open(&path).unwrap();
        let copy = scratch.path().join(path.file_name().unwrap());
        let mut writer = CaptureWriter::create(&copy, reader.header()).unwrap();
        for line in reader {
            writer.write(&line.unwrap()).unwrap();
        }
        writer.finish().unwrap();
        assert_eq!(text_of(&path), text_of(&copy), "{}", path.display());
        assert_eq!(lines(&path), lines(&copy), "{}", path.display());
    }
}

/// The text of a file, decompressed by name.
fn text_of(path: &Path) -> Vec<u8> {
    use std::io::Read as _;

    let bytes = fs::read(path).unwrap();
    if path.extension().is_some_and(|end| end == "gz") {
        let mut text = Vec::new();
        flate2::read::MultiGzDecoder::new(&bytes[..]).read_to_end(&mut text).unwrap();
        text
    } else {
        bytes
    }
}

/// One row of the table in the captures' own description.
#[derive(PartialEq, Eq, Debug)]
struct Row {
    ranks: usize,
    block: u32,
    form: String,
    messages: usize,
    stored: usize,
    removed: usize,
    cleared: usize,
    replay_rx: usize,
    requests: usize,
    probes: usize,
}

/// Counts as the recorder's own description says: every batch once, holes filled from recorded answers.
#[test]
fn counts_equal_the_table_beside_the_captures() {
    let table = table();
    for path in captures() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Some(expected) = table.get(&name) else {
            // Captures of another directory may have no table.
            assert_ne!(directory(), own_directory(), "{name} is not in the table");
            continue;
        };
        assert_eq!(&counted(&path), expected, "{name}");
    }
}

fn table() -> BTreeMap<String, Row> {
    let text = fs::read_to_string(directory().join("README.md")).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let [_, name, ranks, block, form, _hash, counts @ .., _] = cells.as_slice() else { return None };
            let name = name.strip_prefix('`')?.strip_suffix('`')?;
            let counts: Vec<usize> = counts.iter().map(|cell| cell.parse()).collect::<Result<_, _>>().ok()?;
            let [messages, stored, removed, cleared, replay_rx, requests, probes] = counts[..] else {
                return None;
            };
            let (ranks, block, form) = (ranks.parse().ok()?, block.parse().ok()?, (*form).to_owned());
            let row =
                Row { ranks, block, form, messages, stored, removed, cleared, replay_rx, requests, probes };
            Some((name.to_owned(), row))
        })
        .collect()
}

fn counted(path: &Path) -> Row {
    let truth = Truth::beside(path).unwrap();
    let reader = CaptureReader::open(path).unwrap();
    let fields = reader.header().fields().clone();
    let lines: Vec<_> = reader.map(Result::unwrap).collect();
    let mut events = Events::default();
    let (mut messages, mut replay_rx) = (0, 0);
    for line in &lines {
        match &line.body {
            LineBody::Pub { frames } => {
                messages += 1;
                events.add(frames.last().unwrap());
            }
            LineBody::Replay { dir: Direction::Rx, .. } => replay_rx += 1,
            _ => {}
        }
    }
    Row {
        ranks: fields.dp_size.unwrap() as usize,
        block: fields.block_size.unwrap(),
        form: fields.event_encoding.unwrap(),
        messages,
        stored: events.stored,
        removed: events.removed,
        cleared: events.cleared,
        replay_rx,
        requests: truth.requests.len(),
        probes: truth.probes.len(),
    }
}

#[derive(Default)]
struct Events {
    stored: usize,
    removed: usize,
    cleared: usize,
}

impl Events {
    fn add(&mut self, payload: &[u8]) {
        for event in decode(payload) {
            match event {
                Event::Stored(_) => self.stored += 1,
                Event::Removed(_) => self.removed += 1,
                Event::Cleared => self.cleared += 1,
            }
        }
    }
}

/// S3: every rank's last number is in the capture, published or answered, and its truth has what it says.
#[test]
fn every_truth_is_read_whole() {
    for path in captures() {
        let (script, truth) = (CaptureScript::load(&path, |_| {}).unwrap(), Truth::beside(&path).unwrap());
        let name = stem(&path);
        assert_eq!(truth.block_size(), script.header().block_size(), "{name}");
        assert_eq!(truth.engine, script.header().engine(), "{name}");
        let by_wire = script.header().fields().hash_wire.as_deref() == Some("bytes");
        for rank in &truth.ranks {
            let dp_rank = DpRank(rank.rank);
            assert!(script.ranks().contains(&dp_rank), "{name} rank {dp_rank}");
            let mut of_rank = script.live().iter().filter(|message| message.rank == dp_rank);
            let published = of_rank.next_back().map(|message| (message.life, number(&message.frames)));
            let life = published.map_or(0, |(life, _)| life);
            let answered = script.replies().answers_from(dp_rank, life, EventSeq::ZERO).last();
            let last = published.and_then(|(_, seq)| seq).max(answered.map(|(seq, _)| seq));
            assert_eq!(last, rank.last_seq(), "{name} rank {dp_rank}");
            let hashes = rank.groups.iter().flat_map(|group| &group.hashes);
            assert!(
                hashes.clone().all(|(hash, copies)| {
                    *copies > 0 && matches!(hash.0, BlockHash::Bytes(_)) == by_wire
                })
            );
            let distinct = Tier::ALL.map(|tier| rank.contents().distinct(tier)).iter().sum::<usize>();
            assert!(distinct <= hashes.count(), "{name} rank {}", rank.rank);
        }
        for probe in &truth.probes {
            assert_eq!(probe.query().tokens, probe.tokens);
            for answer in &probe.by_rank {
                assert!(answer.matched_tokens as usize <= probe.tokens.len(), "{name}");
                assert!(answer.matched_blocks <= answer.matched_tokens, "{name}");
            }
        }
    }
}

fn number(frames: &[bytes::Bytes]) -> Option<EventSeq> {
    rankwise::capture::format::numbered(frames).map(|(seq, _)| seq)
}

/// Prompts that were written as deltas begin with what their base had, and probes find blocks of them.
#[test]
fn prompts_written_as_deltas_expand() {
    for path in captures() {
        let truth = Truth::beside(&path).unwrap();
        let prompts = truth.prompts().unwrap();
        let by_id: HashMap<&str, usize> =
            truth.requests.iter().enumerate().map(|(index, request)| (&*request.id, index)).collect();
        for (request, prompt) in truth.requests.iter().zip(&prompts) {
            if let Some(whole) = &request.prompt {
                assert_eq!(whole, prompt);
                continue;
            }
            assert_eq!(prompt.len(), request.base_len + request.tokens.len());
            assert!(prompt.ends_with(&request.tokens));
            let Some(base) = &request.base else { continue };
            let base = by_id[base.as_str()];
            let output = &truth.requests[base].output;
            let before: Vec<u32> = prompts[base].iter().chain(output).copied().collect();
            assert_eq!(prompt[..request.base_len], before[..request.base_len], "{}", request.id);
        }
    }
}

/// S3: the truth compared with itself is equal everywhere, with the exceptions that its directory lists.
#[test]
fn a_truth_is_equal_to_itself() {
    for path in captures() {
        let truth = Truth::beside(&path).unwrap();
        let exceptions = ExceptionBook::beside(&path).unwrap().of(&stem(&path));
        let mut outcome = Outcome { engine: truth.engine.clone(), ..Outcome::default() };
        for rank in &truth.ranks {
            let trust = match exceptions.expected_trust(DpRank(rank.rank)) {
                "partial" => Trust::Partial(rankwise::trust::MayErr::Miss),
                _ => Trust::Live,
            };
            let contents = rank.contents();
            outcome.ranks.insert(DpRank(rank.rank), RankOutcome { trust, contents });
        }
        for (index, probe) in truth.probes.iter().enumerate() {
            let answers = probe.by_rank.iter();
            outcome
                .probes
                .extend(answers.map(|answer| ((index, DpRank(answer.rank)), answer.matched_blocks)));
        }
        let report = check(outcome, &truth, &exceptions);
        assert!(report.ok, "{report}");
        assert_eq!(report.probes.equal, report.probes.total);
    }
}

/// S3: exceptions hold for the capture, rank and probe that they name, and for no other.
#[test]
fn exceptions_hold_for_what_they_name() {
    let book = ExceptionBook::load(&own_directory().join("check.json")).unwrap();
    assert_eq!(book.of("vllm-0.33.0-gap-lost").expected_trust(DpRank(1)), "partial");
    assert_eq!(book.of("vllm-0.33.0-gap-lost").expected_trust(DpRank(0)), "live");
    assert!(book.of("vllm-0.33.0-report-full").announcements_are_a_set());
    assert!(book.of("sglang-0.5.23-extra-keys").unknowable(0, DpRank(0)));
    assert!(!book.of("sglang-0.5.23-extra-keys").unknowable(0, DpRank(1)));
    assert!(book.of("vllm-0.33.0-reset").is_empty());
}

/// E3: what the recorded endpoints answer is what a gap needs.
#[test]
fn recorded_answers_fill_the_gap() {
    for (name, from, expected) in [
        ("vllm-0.33.0-gap-replay.kvcap", 8, (8..=16).collect::<Vec<u64>>()),
        ("sglang-0.5.23-gap-replay.kvcap", 6, (6..=15).collect()),
        ("vllm-0.33.0-gap-lost.kvcap", 8, (18..=21).collect()),
    ] {
        let script = own(name);
        let mut desk = ReplayDesk::new(script.replies());
        assert_eq!(desk.ask(DpRank(1), EventSeq::ZERO).unwrap().count(), 0, "{name}: first connect");
        let answers: Vec<_> = desk.ask(DpRank(1), EventSeq(from)).unwrap().collect();
        assert_eq!(answers.iter().map(|(seq, _)| seq.0).collect::<Vec<_>>(), expected, "{name}");
        for (seq, payload) in answers {
            // What was published and answered too is the same batch.
            let live = script
                .live()
                .iter()
                .find(|message| message.rank == DpRank(1) && number(&message.frames) == Some(seq));
            assert!(live.is_none_or(|live| live.frames.last() == Some(payload)), "{name} {seq}");
        }
    }
    let script = own("vllm-0.33.0-gap-lost.kvcap");
    assert!(!script.replies().has_replay(DpRank(0)), "nothing was recorded of rank 0");
}

fn plan(script: &CaptureScript, rank: u32) -> RankPlan {
    script.publish_plan().ranks.into_iter().find(|plan| plan.rank == DpRank(rank)).unwrap()
}

fn served(plan: &RankPlan, done: usize) -> Vec<u64> {
    plan.servable(done).keys().map(|seq| seq.0).collect()
}

fn sent(plan: &RankPlan) -> Vec<u64> {
    plan.steps
        .iter()
        .filter_map(|step| match step {
            PublishStep::Publish { frames, .. } => number(frames).map(|seq| seq.0),
            PublishStep::Restart { .. } => None,
        })
        .collect()
}

/// E3: a publisher that is played again serves holes once they are passed, and nothing from the future.
#[test]
fn a_played_publisher_serves_holes_that_it_has_passed() {
    let script = own("vllm-0.33.0-gap-replay.kvcap");
    let rank = plan(&script, 1);
    assert_eq!(sent(&rank), (0..=7).chain(14..=18).collect::<Vec<_>>());
    assert!(served(&rank, 0).is_empty());
    assert_eq!(served(&rank, 8), (0..=7).collect::<Vec<_>>(), "the hole is still to come");
    assert_eq!(served(&rank, 9), (0..=14).collect::<Vec<_>>());
    assert_eq!(served(&rank, usize::MAX), (0..=18).collect::<Vec<_>>());
    assert_eq!(rank.framing, Some(rankwise::capture::script::ReplayFraming::WithTopic));

    let rank = plan(&own("vllm-0.33.0-gap-lost.kvcap"), 1);
    assert_eq!(served(&rank, usize::MAX), (0..=7).chain(18..=22).collect::<Vec<_>>(), "8 to 17 are gone");
    let rank = plan(&own("sglang-0.5.23-gap-replay.kvcap"), 1);
    assert_eq!(served(&rank, usize::MAX), (0..=16).collect::<Vec<_>>());
}

/// E2: a restart binds again with an empty buffer, between the last message before and the first after.
#[test]
fn a_restart_empties_the_buffer() {
    let rank = plan(&own("vllm-0.33.0-restart.kvcap"), 0);
    assert_eq!(sent(&rank), [0, 1, 2, 3, 4, 0, 1, 2]);
    let PublishStep::Restart { at } = rank.steps[5] else { panic!("{:?}", rank.steps[5]) };
    assert!((717_684..3_271_026).contains(&at.as_micros()));
    assert_eq!(served(&rank, 5), [0, 1, 2, 3, 4]);
    assert!(served(&rank, 6).is_empty());
    assert_eq!(served(&rank, 8), [0, 1]);
    assert!(!rank.has_replay);
}

/// Every plan sends every message once, in its order and with its frames, at times that do not go back.
#[test]
fn plans_send_everything_as_it_was() {
    for path in captures() {
        let script = CaptureScript::load(&path, |_| {}).unwrap();
        for plan in script.publish_plan().ranks {
            let mut before = rankwise::ids::Moment::default();
            let mut live = script.live().iter().filter(|message| message.rank == plan.rank);
            for step in &plan.steps {
                let (PublishStep::Publish { at, .. } | PublishStep::Restart { at }) = step;
                assert!(*at >= before, "{}", path.display());
                before = *at;
                if let PublishStep::Publish { frames, .. } = step {
                    assert_eq!(frames, &live.next().unwrap().frames);
                }
            }
            assert!(live.next().is_none());
        }
    }
}

#[test]
fn progress_ends_at_the_files_size() {
    for path in captures() {
        let mut last = None;
        CaptureScript::load(&path, |progress| {
            assert!(last.is_none_or(|before: rankwise::capture::Progress| before.read <= progress.read));
            last = Some(progress);
        })
        .unwrap();
        let last = last.unwrap();
        assert_eq!((last.read, last.total), (fs::metadata(&path).unwrap().len(), last.read));
    }
}

const HEADER: &str = r#"{"kvcap":1,"engine":"vllm","dp_size":1,"block_size":16}"#;
const MARK: &str = r#"{"t_us":1,"rank":0,"ep":"mark","note":""}"#;

/// The error of a capture with this text.
fn error_of(name: &str, bytes: &[u8]) -> CaptureError {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join(name);
    fs::write(&path, bytes).unwrap();
    let reader = match CaptureReader::open(&path) {
        Ok(reader) => reader,
        Err(error) => return error,
    };
    let mut errors = reader.filter_map(Result::err);
    let error = errors.next().expect("an error");
    assert!(errors.next().is_none(), "a reader ends after its first error");
    error
}

/// S3: an error names the file, the line and what to do.
#[test]
fn bad_lines_are_named_by_their_number() {
    for (text, line, says) in [
        (String::new(), 1, "empty"),
        ("PK\u{3}\u{4}".into(), 1, "kvcap"),
        (format!("{MARK}\n"), 1, "header"),
        (r#"{"kvcap":2,"engine":"vllm"}"#.into(), 1, "version 2"),
        (format!("{HEADER}\n{MARK}\n[]\n"), 3, "remove or repair"),
        (format!("{HEADER}\n{MARK}\n\n{MARK}x\n"), 4, "remove or repair"),
        (
            format!("{HEADER}\n{MARK}\n{{\"t_us\":1,\"rank\":0,\"ep\":\"pub\",\"frames\":[\"zz\"]}}\n"),
            3,
            "hex",
        ),
        (format!("{HEADER}\n{MARK}\n{{\"t_us\":1,\"ra"), 3, "middle of this line"),
    ] {
        let error = error_of("x.kvcap", text.as_bytes());
        assert_eq!(error.line(), Some(line), "{error}");
        let words = error.to_string();
        assert!(words.contains(says) && words.contains(&format!("x.kvcap:{line}: ")), "{words}");
    }
}

#[test]
fn a_cut_or_damaged_archive_is_named_by_its_line() {
    let whole = fs::read(own_directory().join("vllm-0.33.0-bs1.kvcap.gz")).unwrap();
    let error = error_of("x.kvcap.gz", &whole[..whole.len() / 2]);
    let CaptureError::Line { line, problem: LineProblem::Truncated, .. } = &error else { panic!("{error}") };
    assert!(*line > 2, "{error}");

    // The checksum at the end is wrong: every line before it was given, and still the archive is not whole.
    let mut damaged = whole;
    let checksum = damaged.len() - 8;
    damaged[checksum] ^= 1;
    let error = error_of("x.kvcap.gz", &damaged);
    assert!(matches!(error, CaptureError::Line { problem: LineProblem::Damaged(_), .. }), "{error}");
    let error = error_of("x.kvcap.gz", HEADER.as_bytes());
    assert!(matches!(error, CaptureError::Line { problem: LineProblem::Damaged(_), .. }), "{error}");
}

/// Hostile input: a line without an end, from a small archive, is refused before it is all in memory.
#[test]
fn a_line_without_an_end_is_refused() {
    let mut archive = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    writeln!(archive, "{HEADER}").unwrap();
    let chunk = vec![b' '; 1 << 20];
    for _ in 0..200 {
        archive.write_all(&chunk).unwrap();
    }
    let error = error_of("x.kvcap.gz", &archive.finish().unwrap());
    assert!(
        matches!(error, CaptureError::Line { line: 2, problem: LineProblem::TooLong { .. }, .. }),
        "{error}"
    );
}

#[test]
fn a_capture_beyond_the_limit_is_refused() {
    let path = own_directory().join("vllm-0.33.0-reset.kvcap");
    let error = CaptureScript::read(CaptureReader::open(&path).unwrap(), 3_000, |_| {}).unwrap_err();
    assert!(matches!(error, CaptureError::TooLarge { line: 3.., limit: 3_000, .. }), "{error}");
}

#[test]
fn a_missing_truth_says_where_it_was_looked_for() {
    let scratch = tempfile::tempdir().unwrap();
    let error = Truth::beside(&scratch.path().join("a.kvcap.gz")).unwrap_err().to_string();
    assert!(error.contains("a.truth.json and") && error.contains("a.truth.json.gz"), "{error}");
    let none = ExceptionBook::beside(&scratch.path().join("a.kvcap")).unwrap();
    assert!(none.of("a").is_empty());
}

/// A recording in progress can be read up to its last flush, and a file is never overwritten.
#[test]
fn recordings_are_flushed_and_never_overwritten() {
    let scratch = tempfile::tempdir().unwrap();
    let header = CaptureHeader::parse(HEADER).unwrap();
    for name in ["live.kvcap", "live.kvcap.gz"] {
        let path = scratch.path().join(name);
        let mut writer = CaptureWriter::create(&path, &header).unwrap();
        let at = rankwise::ids::Moment::from_micros(5);
        writer.publication(at, DpRank(0), ["t".into(), vec![0; 8].into(), "payload".into()]).unwrap();
        writer.flush().unwrap();
        writer.mark(at, DpRank(0), "not flushed yet").unwrap();
        let first = CaptureReader::open(&path).unwrap().next().unwrap().unwrap();
        assert_eq!((first.at, first.rank), (at, DpRank(0)));
        assert!(matches!(CaptureWriter::create(&path, &header), Err(CaptureError::Io { .. })));
        assert_eq!(writer.lines(), 3);
        writer.finish().unwrap();
        assert_eq!(lines(&path).len(), 2);
    }
}

/// Captures are told from what lies beside them by name alone.
#[test]
fn only_captures_are_taken_for_captures() {
    let stems: BTreeSet<String> = captures().iter().map(|path| stem(path)).collect();
    assert_eq!(stems.len(), captures().len());
    for entry in fs::read_dir(own_directory()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(is_capture(&path), name.contains(".kvcap"), "{name}");
    }
}

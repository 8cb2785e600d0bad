//! What the engines really sent, and the raw frames of the field cases.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rankwise::block::BlockHash;
use rankwise::events::{
    EventBatch, EventTokens, KvEvent, ReplayMessage, parse_live, parse_replay, peek_ts, replay_request,
};
use rankwise::ids::EventSeq;
use serde_json::Value as Json;

use super::{decode, fixtures, hex};

/// A line of a capture: `pub` or `replay`, with its frames.
struct Line {
    kind: String,
    direction: Option<String>,
    frames: Vec<Bytes>,
}

fn captures() -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(fixtures("captures"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().contains(".kvcap"))
        .collect();
    paths.sort();
    paths
}

fn lines(path: &Path) -> Vec<Line> {
    let file = File::open(path).unwrap();
    let text: Box<dyn Read> = match path.extension().unwrap().to_str() {
        Some("gz") => Box::new(flate2::read::GzDecoder::new(file)),
        _ => Box::new(file),
    };
    let parsed =
        BufReader::new(text).lines().map(|line| serde_json::from_str::<Json>(&line.unwrap()).unwrap());
    parsed.filter(|line| line.get("frames").is_some()).map(|line| read_line(&line)).collect()
}

fn read_line(line: &Json) -> Line {
    let text = |name: &str| line.get(name).and_then(Json::as_str).map(str::to_owned);
    Line { kind: text("ep").unwrap(), direction: text("dir"), frames: frames(&line["frames"]) }
}

fn frames(list: &Json) -> Vec<Bytes> {
    list.as_array().unwrap().iter().map(|frame| Bytes::from(hex(frame.as_str().unwrap()))).collect()
}

#[derive(Default, PartialEq, Eq, Debug)]
struct Counts {
    messages: usize,
    stored: usize,
    removed: usize,
    cleared: usize,
}

impl Counts {
    fn add(&mut self, batch: &EventBatch) {
        self.messages += 1;
        for event in &batch.events {
            *match event {
                KvEvent::Stored(_) => &mut self.stored,
                KvEvent::Removed(_) => &mut self.removed,
                KvEvent::Cleared(_) => &mut self.cleared,
            } += 1;
        }
    }
}

/// E1: every recorded message decodes, to the counts that an independent decoder found when they were made.
#[test]
fn every_recorded_message_decodes() {
    let mut counts = Counts::default();
    let paths = captures();
    assert_eq!(paths.len(), 34);
    for path in &paths {
        for line in lines(path).iter().filter(|line| line.kind == "pub") {
            let message = parse_live(&line.frames).unwrap();
            let batch = decode(&message.payload).unwrap();
            assert_eq!(batch.skipped.total(), 0, "{path:?}");
            assert_eq!(batch.ts, peek_ts(&message.payload));
            assert!(batch.ts.is_some_and(|ts| ts > 1.6e9), "{path:?}: {:?}", batch.ts);
            assert!(batch.dp_rank.is_some_and(|rank| (0..4).contains(&rank)));
            batch.events.iter().for_each(|event| check_event(path, event));
            counts.add(&batch);
        }
    }
    assert_eq!(counts, Counts { messages: 4313, stored: 6703, removed: 10585, cleared: 33 });
}

fn check_event(path: &Path, event: &KvEvent) {
    let KvEvent::Stored(stored) = event else { return };
    let EventTokens::Ids(tokens) = &stored.tokens else { panic!("{path:?}: tokens lost") };
    let hybrid = path.to_string_lossy().contains("hybrid");
    let aligned = tokens.len() == stored.block_hashes.len() * stored.block_size as usize;
    assert!(aligned || hybrid, "{path:?}: {stored:?}");
}

/// E1: the encodings of a hash that the captures name in their header are told apart.
#[test]
fn recorded_hashes_keep_their_form() {
    for path in captures() {
        let as_bytes = path.to_string_lossy().contains("-bytes");
        for line in lines(&path).iter().filter(|line| line.kind == "pub") {
            for event in decode(&line.frames[2]).unwrap().events {
                let (KvEvent::Stored(rankwise::events::BlockStored { block_hashes, .. })
                | KvEvent::Removed(rankwise::events::BlockRemoved { block_hashes, .. })) = event
                else {
                    continue;
                };
                for hash in block_hashes {
                    assert_eq!(matches!(hash, BlockHash::Bytes(ref bytes) if bytes.len() == 32), as_bytes);
                }
            }
        }
    }
}

/// E3: recorded replay answers, old framing and new, and the requests that were answered.
#[test]
fn every_recorded_replay_answer_is_read() {
    let (mut batches, mut ends, mut requests) = (0, 0, 0);
    for path in captures() {
        for line in lines(&path).iter().filter(|line| line.kind == "replay") {
            if line.direction.as_deref() == Some("tx") {
                let [delimiter, start] = &line.frames[..] else { continue };
                if delimiter.is_empty() && start.len() == 8 {
                    let from = u64::from_be_bytes(start[..].try_into().unwrap());
                    assert_eq!(replay_request(EventSeq(from))[..], line.frames[..]);
                    requests += 1;
                }
                continue;
            }
            match parse_replay(&line.frames).unwrap() {
                ReplayMessage::Batch { payload, .. } => {
                    assert_eq!(decode(&payload).unwrap().skipped.total(), 0);
                    batches += 1;
                }
                ReplayMessage::End => ends += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((batches, ends, requests), (69, 9, 8));
}

fn case(id: &str) -> Json {
    let mut entries = std::fs::read_dir(fixtures("cases")).unwrap().map(|entry| entry.unwrap());
    let entry = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(id)).unwrap();
    serde_json::from_reader(File::open(entry.path()).unwrap()).unwrap()
}

/// E1: C01 to C05, as far as frames and decoding go.
#[test]
fn raw_frames_of_the_field_cases() {
    let mut steps = 0;
    for id in ["C01", "C02", "C03", "C04", "C05"] {
        for step in case(id)["steps"].as_array().unwrap().iter().filter(|step| step["op"] == "raw") {
            let outcome = parse_live(&frames(&step["frames"]))
                .map_err(|error| error.to_string())
                .and_then(|message| decode(&message.payload).map_err(|error| error.to_string()));
            match step["expect"].as_str().unwrap() {
                "applied" => {
                    let batch = outcome.unwrap();
                    assert_eq!((batch.events.len(), batch.skipped.total()), (1, 0), "{step}");
                }
                "dropped" => assert!(outcome.is_err(), "{step}"),
                other => panic!("{other}"),
            }
            steps += 1;
        }
    }
    assert_eq!(steps, 18);
}

/// C05, I2: a hash stored unsigned is removed by its signed reading.
#[test]
fn signed_and_unsigned_readings_are_one_hash() {
    let case = case("C05");
    let events: Vec<_> = case["steps"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|step| step["op"] == "raw")
        .map(|step| decode(&frames(&step["frames"])[2]).unwrap().events.remove(0))
        .collect();
    let name = BlockHash::Int(0xf000_0000_0000_0001);
    let [KvEvent::Stored(first), KvEvent::Stored(second), KvEvent::Removed(removed)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(first.block_hashes, std::slice::from_ref(&name));
    assert_eq!(second.parent_block_hash.as_ref(), Some(&name));
    assert_eq!(removed.block_hashes, [name]);
}

/// C13, E3: all forms of answers, and both end marks.
#[test]
fn replay_answers_of_the_field_case() {
    for step in case("C13")["steps"].as_array().unwrap().iter().filter(|step| step["op"] == "raw_replay") {
        for with_delimiter in [false, true] {
            let mut numbers = Vec::new();
            for answer in step["reply_frames"].as_array().unwrap() {
                let mut frames = frames(answer);
                if with_delimiter {
                    frames.insert(0, Bytes::new());
                }
                numbers.push(match parse_replay(&frames).unwrap() {
                    ReplayMessage::Batch { seq, payload, .. } => {
                        assert_eq!(decode(&payload).unwrap().events.len(), 1);
                        Some(seq.0)
                    }
                    _ => None,
                });
            }
            let last = numbers.pop().unwrap();
            assert_eq!(last, None, "{step}");
            assert!(numbers == [Some(1)] || numbers == [Some(1), Some(2)], "{step}");
        }
    }
}

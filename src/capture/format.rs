//! The lines of a capture, as types. Version 1 of the format.
//!
//! Line 1 is the header. Every other line has `t_us`, `rank` and `ep`, which says what the line is: `pub`
//! (a message of the rank's publisher), `replay` (a message on a replay socket), `mark` (a remark of the
//! recorder, not part of the stream). Frames are hex.

use std::fmt;

use bytes::Bytes;
use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::block::BlockSize;
use crate::ids::{DpRank, EventSeq, Moment};

/// The version of the format that this crate reads and writes.
pub const VERSION: u64 = 1;

/// The first line of a capture: who was recorded.
///
/// Keeps the line as it was written, so that fields which this version does not know survive a rewrite.
#[derive(Clone, Debug)]
pub struct CaptureHeader {
    text: String,
    fields: HeaderFields,
}

impl CaptureHeader {
    /// A header with these fields, for a new recording; `kvcap` is set to [`VERSION`].
    ///
    /// # Errors
    /// None in practice: every field has a JSON form.
    pub fn new(mut fields: HeaderFields) -> Result<Self, serde_json::Error> {
        fields.kvcap = VERSION;
        Ok(Self { text: serde_json::to_string(&fields)?, fields })
    }

    /// Reads a header line.
    ///
    /// # Errors
    /// When the line is not a JSON object with a numeric `kvcap` and an `engine`.
    pub fn parse(line: &str) -> Result<Self, serde_json::Error> {
        let fields = serde_json::from_str(line)?;
        // Between JSON's tokens only: within a string a line end would have been refused.
        Ok(Self { text: line.replace(['\n', '\r'], " "), fields })
    }

    /// The header's line, without its end.
    pub fn as_line(&self) -> &str {
        &self.text
    }

    /// The fields that this version knows.
    pub fn fields(&self) -> &HeaderFields {
        &self.fields
    }

    /// Any field by its name, known or not.
    pub fn field(&self, name: &str) -> Option<serde_json::Value> {
        let mut all: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&self.text).ok()?;
        all.remove(name)
    }

    /// The engine's name: `vllm`, `sglang`.
    pub fn engine(&self) -> &str {
        &self.fields.engine
    }

    /// The engine's version, empty if the recorder did not know it.
    pub fn engine_version(&self) -> &str {
        &self.fields.engine_version
    }

    /// Tokens per block; `None` if the recorder did not know it.
    pub fn block_size(&self) -> Option<BlockSize> {
        self.fields.block_size.and_then(BlockSize::new)
    }

    /// The ranks that the header names, ascending: those with endpoints, else as many as `dp_size` says.
    /// Cut off at [`CaptureHeader::MAX_RANKS`].
    pub fn ranks(&self) -> Vec<DpRank> {
        let mut ranks: Vec<DpRank> = match self.fields.endpoints.as_slice() {
            [] => (0..self.fields.dp_size.unwrap_or(0).min(Self::MAX_RANKS)).map(DpRank).collect(),
            endpoints => endpoints.iter().take(Self::MAX_RANKS as usize).map(|at| DpRank(at.rank)).collect(),
        };
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Most ranks that are taken from a header: ports end at 65535, and every rank has one of its own.
    pub const MAX_RANKS: u32 = 65_536;
}

impl PartialEq for CaptureHeader {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

/// The fields of a header that this version knows.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct HeaderFields {
    /// The version of the format.
    pub kvcap: u64,
    /// The engine's name: `vllm`, `sglang`.
    pub engine: String,
    /// The engine's version.
    #[serde(default)]
    pub engine_version: String,
    /// The publisher's class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub publisher: Option<String>,
    /// `array` or `map`: how an event is laid out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_encoding: Option<String>,
    /// How many ranks there were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_size: Option<u32>,
    /// Tokens per block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// How the engine hashes blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_algo: Option<String>,
    /// `i64`, `u64` or `bytes`: how hashes are written on the wire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash_wire: Option<String>,
    /// The KV-cache groups, as far as the engine has them.
    #[serde(default)]
    pub groups: Vec<HeaderGroup>,
    /// The publisher's topic.
    #[serde(default)]
    pub topic: String,
    /// Where each rank published.
    #[serde(default)]
    pub endpoints: Vec<HeaderEndpoint>,
    /// What was played.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scenario: Option<String>,
    /// The same in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// One KV-cache group of a header.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeaderGroup {
    /// Its number.
    pub group_idx: u32,
    /// Its kind, as vLLM names it.
    #[serde(default)]
    pub kind: Option<String>,
    /// Tokens per block of the group.
    #[serde(default)]
    pub block_size: Option<u32>,
    /// Window in tokens.
    #[serde(default)]
    pub sliding_window: Option<u32>,
}

/// Where one rank published.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HeaderEndpoint {
    /// The global rank.
    pub rank: u32,
    /// Its event endpoint.
    #[serde(rename = "pub")]
    pub events: String,
    /// Its replay endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<String>,
}

/// Any line of a capture but the first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CaptureLine {
    /// When the recorder saw it, since it had started.
    pub at: Moment,
    /// The global rank whose socket it was.
    pub rank: DpRank,
    /// What it was.
    pub body: LineBody,
}

/// What a line records.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LineBody {
    /// A message of the rank's publisher, with its frames as received: topic, number, payload.
    Pub {
        /// The frames.
        frames: Vec<Bytes>,
    },
    /// A message on a client's socket to the rank's replay endpoint.
    Replay {
        /// Which way it went.
        dir: Direction,
        /// What kind of socket the client had.
        sock: ReplaySocket,
        /// The frames.
        frames: Vec<Bytes>,
    },
    /// What the recorder did at that moment. Not part of the stream.
    Mark {
        /// In words.
        note: String,
    },
}

/// Which way a message on a replay socket went, seen from the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From the client to the engine: a request.
    Tx,
    /// From the engine to the client: an answer.
    Rx,
}

/// What kind of socket asked for a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ReplaySocket {
    /// Its frames begin with the empty delimiter.
    Dealer,
    /// Its frames come without the delimiter.
    Req,
}

impl CaptureLine {
    /// Reads a line.
    ///
    /// # Errors
    /// When it is not a JSON object of one of the three kinds.
    pub fn parse(line: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice::<WireLine>(line)?.into_line()
    }

    /// Bytes of all its frames.
    pub fn frame_bytes(&self) -> u64 {
        match &self.body {
            LineBody::Pub { frames } | LineBody::Replay { frames, .. } => {
                frames.iter().map(|frame| frame.len() as u64).sum()
            }
            LineBody::Mark { .. } => 0,
        }
    }
}

impl Serialize for CaptureLine {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        WireLine::from_line(self).serialize(serializer)
    }
}

/// The number and payload of a message, read from the back: the payload is its last frame and the number,
/// eight bytes big-endian, the one before. `None` where that does not fit.
pub fn numbered(frames: &[Bytes]) -> Option<(EventSeq, &Bytes)> {
    let [.., seq, payload] = frames else { return None };
    let seq: [u8; 8] = seq.as_ref().try_into().ok()?;
    Some((EventSeq(u64::from_be_bytes(seq)), payload))
}

/// A line's form in the file. Field order is the file's.
#[derive(Serialize, Deserialize)]
struct WireLine {
    t_us: u64,
    rank: u32,
    ep: LineKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dir: Option<Direction>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sock: Option<ReplaySocket>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    frames: Option<Vec<HexFrame>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum LineKind {
    Pub,
    Replay,
    Mark,
}

impl WireLine {
    fn into_line(self) -> Result<CaptureLine, serde_json::Error> {
        let missing = <serde_json::Error as de::Error>::missing_field;
        let frames = |frames: Option<Vec<HexFrame>>| {
            let frames = frames.ok_or_else(|| missing("frames"))?;
            Ok::<_, serde_json::Error>(frames.into_iter().map(|HexFrame(frame)| frame).collect())
        };
        let body = match self.ep {
            LineKind::Pub => LineBody::Pub { frames: frames(self.frames)? },
            LineKind::Replay => LineBody::Replay {
                dir: self.dir.ok_or_else(|| missing("dir"))?,
                sock: self.sock.ok_or_else(|| missing("sock"))?,
                frames: frames(self.frames)?,
            },
            LineKind::Mark => LineBody::Mark { note: self.note.ok_or_else(|| missing("note"))? },
        };
        Ok(CaptureLine { at: Moment::from_micros(self.t_us), rank: DpRank(self.rank), body })
    }

    fn from_line(line: &CaptureLine) -> Self {
        let hex = |frames: &[Bytes]| Some(frames.iter().cloned().map(HexFrame).collect());
        let (ep, dir, sock, frames, note) = match &line.body {
            LineBody::Pub { frames } => (LineKind::Pub, None, None, hex(frames), None),
            LineBody::Replay { dir, sock, frames } => {
                (LineKind::Replay, Some(*dir), Some(*sock), hex(frames), None)
            }
            LineBody::Mark { note } => (LineKind::Mark, None, None, None, Some(note.clone())),
        };
        Self { t_us: line.at.as_micros(), rank: line.rank.0, ep, dir, sock, frames, note }
    }
}

/// A frame, written as hex.
struct HexFrame(Bytes);

impl Serialize for HexFrame {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&to_hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for HexFrame {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(HexVisitor).map(|bytes| Self(bytes.into()))
    }
}

struct HexVisitor;

impl Visitor<'_> for HexVisitor {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string of hex digits, two a byte")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
        from_hex(text).ok_or_else(|| E::invalid_value(de::Unexpected::Str(&shorten(text)), &self))
    }
}

/// The bytes that `text` writes, two hex digits a byte; `None` if it does not.
pub(crate) fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    };
    let pairs = text.as_bytes().chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return None;
    }
    pairs.map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    let digit = |half: u8| char::from(DIGITS[usize::from(half)]);
    bytes.iter().flat_map(|&byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// The beginning of a long text, for an error message.
fn shorten(text: &str) -> String {
    // Enough to find the place; the whole frame would fill the screen.
    const SHOWN: usize = 40;
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn hex_goes_both_ways_and_refuses_the_rest() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(from_hex(&to_hex(&all)).unwrap(), all);
        assert_eq!(from_hex("AbfF").unwrap(), [0xab, 0xff]);
        for bad in ["a", "0g", "é1", "+1", "0x00"] {
            assert_eq!(from_hex(bad), None, "{bad}");
        }
    }

    #[test]
    fn lines_are_written_as_they_were_read() {
        for text in [
            r#"{"t_us":1,"rank":0,"ep":"pub","frames":["6b76","0000000000000001","93"]}"#,
            r#"{"t_us":2,"rank":1,"ep":"replay","dir":"tx","sock":"DEALER","frames":["","0000000000000000"]}"#,
            r#"{"t_us":3,"rank":1,"ep":"replay","dir":"rx","sock":"REQ","frames":[]}"#,
            r#"{"t_us":4,"rank":1,"ep":"mark","note":"zu \"Ende\""}"#,
        ] {
            let line = CaptureLine::parse(text.as_bytes()).unwrap();
            assert_eq!(serde_json::to_string(&line).unwrap(), text);
        }
    }

    #[test]
    fn lines_that_lack_something_are_refused_by_its_name() {
        for (text, word) in [
            (r#"{"t_us":1,"rank":0,"ep":"pub"}"#, "frames"),
            (r#"{"t_us":1,"rank":0,"ep":"mark"}"#, "note"),
            (r#"{"t_us":1,"rank":0,"ep":"replay","sock":"REQ","frames":[]}"#, "dir"),
            (r#"{"t_us":1,"rank":-1,"ep":"mark","note":""}"#, "-1"),
            (r#"{"t_us":1,"rank":0,"ep":"sub","frames":[]}"#, "sub"),
            (r#"{"t_us":1,"rank":0,"ep":"pub","frames":["0"]}"#, "hex"),
        ] {
            let error = CaptureLine::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn numbers_are_read_from_the_back() {
        let frames =
            |all: &[&'static [u8]]| all.iter().map(|frame| Bytes::from_static(frame)).collect::<Vec<_>>();
        let seven = &[0, 0, 0, 0, 0, 0, 0, 7];
        for before in [&[][..], &[&b""[..]], &[&b""[..], &b"topic"[..]]] {
            let all: Vec<_> = before.iter().copied().chain([&seven[..], b"p"]).collect();
            assert_eq!(numbered(&frames(&all)), Some((EventSeq(7), &Bytes::from_static(b"p"))));
        }
        assert_eq!(numbered(&frames(&[b"p"])), None);
        assert_eq!(numbered(&frames(&[&[7], b"p"])), None);
    }

    #[test]
    fn a_header_keeps_fields_that_it_does_not_know() {
        let text = r#"{"kvcap":1,"engine":"vllm","dp_size":2,"num_gpu_blocks":40,"block_size":16}"#;
        let header = CaptureHeader::parse(text).unwrap();
        assert_eq!(header.as_line(), text);
        assert_eq!(header.field("num_gpu_blocks"), Some(40.into()));
        assert_eq!(header.block_size(), BlockSize::new(16));
        assert_eq!(header.ranks(), [DpRank(0), DpRank(1)]);
    }

    #[test]
    fn a_new_header_is_one_line_of_this_version() {
        let fields = HeaderFields { engine: "vllm".into(), note: Some("a\nb".into()), ..Default::default() };
        let header = CaptureHeader::new(fields).unwrap();
        assert!(!header.as_line().contains('\n'));
        assert_eq!(CaptureHeader::parse(header.as_line()).unwrap().fields(), header.fields());
        assert_eq!(header.fields().kvcap, VERSION);
        let spread = CaptureHeader::parse("{\n\"kvcap\":1,\r\n\"engine\":\"vllm\"}").unwrap();
        assert!(!spread.as_line().contains(['\n', '\r']));
    }

    #[test]
    fn a_header_of_billions_of_ranks_is_cut_off() {
        let text = r#"{"kvcap":1,"engine":"vllm","dp_size":4294967295}"#;
        assert_eq!(CaptureHeader::parse(text).unwrap().ranks().len(), 65_536);
    }
}

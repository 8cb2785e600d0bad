//! What ranks and their coordinator say to each other, and its form on the wire.
//!
//! A message is two frames: [`PREAMBLE`] and a JSON object. JSON, because a bench says a few hundred bytes per
//! point, and whoever looks at the wire can read it.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::envelope::Stated;
use super::grid::{Digest, Summary};
use super::measured::Measured;

/// The first frame of every message: the protocol and its version.
pub const PREAMBLE: &[u8] = b"rankwise-ranks/1";

/// Longest second frame that is read. The largest message has three histograms of at most 32,768 buckets.
pub const MAX_BYTES: usize = 4 << 20;

/// From a rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromRank {
    /// The first message: who this is, and what it can take.
    Join {
        /// The rank's number, from 0.
        rank: u32,
        /// How many ranks there are, as this one knows it.
        of: u32,
        /// Process and host, for errors.
        who: String,
        /// The rank's own envelope.
        envelope: Stated,
    },
    /// The grid that this rank made of the common envelope.
    Grid(#[serde(with = "SummaryWire")] Summary),
    /// The warm-up is over.
    Warm,
    /// A point has been measured.
    Done {
        /// The point's place in the grid.
        point: u32,
        /// What was measured.
        measured: Measured,
    },
    /// This rank cannot go on.
    Failed {
        /// Why, in words.
        why: String,
    },
}

/// To a rank.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToRank {
    /// The rank has joined; how long waits may last from now on.
    Welcome(#[serde(with = "LimitsWire")] Limits),
    /// Every rank's envelope, from rank 0. Each rank reduces them and makes its grid by itself.
    Envelopes {
        /// By rank.
        envelopes: Vec<Stated>,
    },
    /// All grids are one: warm up.
    WarmUp,
    /// Every rank is ready: measure this point.
    Run {
        /// The point's place in the grid.
        point: u32,
    },
    /// All points are measured.
    Finished,
    /// The bench has failed, or this rank is not wanted.
    Failed {
        /// Why, in words.
        why: String,
    },
}

/// How long waits may last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// From the start until every rank has joined: engines may still be loading.
    pub join: Duration,
    /// Whatever needs no engine: making a grid, receiving a message.
    pub answer: Duration,
    /// The warm-up, and each point.
    pub point: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            join: Duration::from_secs(60),
            answer: Duration::from_secs(10),
            point: Duration::from_secs(300),
        }
    }
}

/// Why a message cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Unreadable {
    /// Not a message of this bench at all.
    #[error("it is no message of this bench")]
    Foreign,
    /// The same bench, but another version of it.
    #[error("it speaks {theirs:?}, this program {}", String::from_utf8_lossy(PREAMBLE))]
    Version {
        /// Their preamble.
        theirs: String,
    },
    /// Longer than [`MAX_BYTES`].
    #[error("it has {0} bytes")]
    TooLong(usize),
    /// Not what the preamble promises.
    #[error("{0}")]
    Body(String),
}

/// The frames of a message.
pub fn frames<M: Serialize>(message: &M) -> [Bytes; 2] {
    // These messages have no maps with odd keys and no fallible parts; an empty body would be unreadable.
    let body = serde_json::to_vec(message).unwrap_or_default();
    [Bytes::from_static(PREAMBLE), Bytes::from(body)]
}

/// The message of these frames, without the envelope frames of a ROUTER.
///
/// # Errors
/// What is no message of this bench or of this version.
pub fn read<'a, M: Deserialize<'a>>(frames: &'a [Bytes]) -> Result<M, Unreadable> {
    let family = PREAMBLE.split(|byte| *byte == b'/').next().unwrap_or(PREAMBLE);
    match frames {
        [preamble, body] if preamble == PREAMBLE => {
            if body.len() > MAX_BYTES {
                return Err(Unreadable::TooLong(body.len()));
            }
            serde_json::from_slice(body).map_err(|error| Unreadable::Body(error.to_string()))
        }
        [preamble, ..]
            if preamble != PREAMBLE
                && preamble.len() <= 2 * PREAMBLE.len()
                && preamble.starts_with(family) =>
        {
            Err(Unreadable::Version { theirs: String::from_utf8_lossy(preamble).into_owned() })
        }
        _ => Err(Unreadable::Foreign),
    }
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Summary")]
struct SummaryWire {
    #[serde(with = "hex")]
    digest: Digest,
    points: u32,
    prefill: u32,
    decode: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Limits")]
struct LimitsWire {
    #[serde(with = "millis")]
    join: Duration,
    #[serde(with = "millis")]
    answer: Duration,
    #[serde(with = "millis")]
    point: Duration,
}

/// A digest in JSON: sixteen hex digits, since many readers round numbers beyond 2^53.
mod hex {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Digest;

    pub fn serialize<S: Serializer>(digest: &Digest, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(digest)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        u64::from_str_radix(&text, 16).map(Digest).map_err(D::Error::custom)
    }
}

mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(limit: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ENVELOPE: Stated = Stated {
        max_model_len: 1,
        max_num_running_reqs: 2,
        max_num_scheduled_tokens: 3,
        kv_blocks: u64::MAX,
        block_size: 0,
    };

    #[test]
    fn messages_come_back_as_they_were() {
        let summary = Summary { digest: Digest(u64::MAX), points: 3, prefill: 1, decode: 2 };
        for message in [
            FromRank::Join { rank: 1, of: 2, who: "pid 3".to_owned(), envelope: ENVELOPE },
            FromRank::Grid(summary),
            FromRank::Warm,
            FromRank::Done { point: 7, measured: Measured::default() },
            FromRank::Failed { why: "no engine".to_owned() },
        ] {
            assert_eq!(read::<FromRank>(&frames(&message)).unwrap(), message);
        }
        for message in [
            ToRank::Welcome(Limits::default()),
            ToRank::Envelopes { envelopes: vec![ENVELOPE] },
            ToRank::WarmUp,
            ToRank::Run { point: 1 },
            ToRank::Finished,
            ToRank::Failed { why: "x".to_owned() },
        ] {
            assert_eq!(read::<ToRank>(&frames(&message)).unwrap(), message);
        }
    }

    #[test]
    fn what_is_not_ours_is_told_apart() {
        let read = |frames: &[&'static [u8]]| {
            let frames: Vec<Bytes> = frames.iter().map(|frame| Bytes::from_static(frame)).collect();
            read::<FromRank>(&frames).unwrap_err()
        };
        let strangers: [&[&'static [u8]]; 5] =
            [&[], &[b""], &[b"", b"x"], &[PREAMBLE, b"{}", b""], &[b"kv-events", b"{}"]];
        for foreign in strangers {
            assert_eq!(read(foreign), Unreadable::Foreign);
        }
        let other = Unreadable::Version { theirs: "rankwise-ranks/2".to_owned() };
        assert_eq!(read(&[b"rankwise-ranks/2", b"{}"]), other);
        assert!(matches!(read(&[PREAMBLE, b"{}"]), Unreadable::Body(_)));
        assert!(matches!(read(&[PREAMBLE, b"[[[["]), Unreadable::Body(_)));
        let long = [Bytes::from_static(PREAMBLE), Bytes::from(vec![b' '; MAX_BYTES + 1])];
        assert_eq!(super::read::<FromRank>(&long), Err(Unreadable::TooLong(MAX_BYTES + 1)));
    }
}

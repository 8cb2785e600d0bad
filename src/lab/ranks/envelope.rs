//! What a rank can take at most, and what all of them can.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::block::BlockSize;
use crate::ids::DpRank;

/// The numbers of an envelope.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Field {
    /// Longest sequence, prompt and answer together, in tokens.
    MaxModelLen,
    /// Requests that run at once.
    MaxNumRunningReqs,
    /// Tokens in one step of the scheduler, prefill and decode together.
    MaxNumScheduledTokens,
    /// KV blocks that requests can use.
    KvBlocks,
    /// Tokens in a KV block.
    BlockSize,
}

impl Field {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Self; 5] = [
        Self::MaxModelLen,
        Self::MaxNumRunningReqs,
        Self::MaxNumScheduledTokens,
        Self::KvBlocks,
        Self::BlockSize,
    ];

    /// The name in JSON, in messages and, with dashes, on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::MaxModelLen => "max_model_len",
            Self::MaxNumRunningReqs => "max_num_running_reqs",
            Self::MaxNumScheduledTokens => "max_num_scheduled_tokens",
            Self::KvBlocks => "kv_blocks",
            Self::BlockSize => "block_size",
        }
    }

    /// The field of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|field| field.name() == name)
    }

    /// The largest value that is believed. Each is ten times and more beyond what any engine offers today;
    /// what lies above is a slip (bytes for tokens, a negative number read as unsigned), and a grid made of it
    /// would never be walked to its end.
    pub fn most(self) -> u64 {
        match self {
            Self::MaxModelLen | Self::MaxNumScheduledTokens => 1 << 27,
            Self::MaxNumRunningReqs => 1 << 16,
            Self::KvBlocks => 1 << 31,
            Self::BlockSize => 1 << 16,
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An envelope as its rank states it: any numbers at all, until [`Stated::check`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Stated {
    /// See [`Field::MaxModelLen`].
    pub max_model_len: u64,
    /// See [`Field::MaxNumRunningReqs`].
    pub max_num_running_reqs: u64,
    /// See [`Field::MaxNumScheduledTokens`].
    pub max_num_scheduled_tokens: u64,
    /// See [`Field::KvBlocks`].
    pub kv_blocks: u64,
    /// See [`Field::BlockSize`].
    pub block_size: u64,
}

impl Stated {
    /// The number of `field`.
    pub fn get(&self, field: Field) -> u64 {
        match field {
            Field::MaxModelLen => self.max_model_len,
            Field::MaxNumRunningReqs => self.max_num_running_reqs,
            Field::MaxNumScheduledTokens => self.max_num_scheduled_tokens,
            Field::KvBlocks => self.kv_blocks,
            Field::BlockSize => self.block_size,
        }
    }

    /// Puts `value` in place of `field`'s number.
    pub fn set(&mut self, field: Field, value: u64) {
        *match field {
            Field::MaxModelLen => &mut self.max_model_len,
            Field::MaxNumRunningReqs => &mut self.max_num_running_reqs,
            Field::MaxNumScheduledTokens => &mut self.max_num_scheduled_tokens,
            Field::KvBlocks => &mut self.kv_blocks,
            Field::BlockSize => &mut self.block_size,
        } = value;
    }

    /// The envelope, if each number can be one.
    ///
    /// # Errors
    /// The first field that is zero or beyond [`Field::most`].
    pub fn check(self) -> Result<Envelope, Nonsense> {
        let number = |field: Field| {
            let value = self.get(field);
            let sound = (1..=field.most()).contains(&value);
            // The bounds lie within 32 bits.
            u32::try_from(value).ok().filter(|_| sound).ok_or(Nonsense { field, value })
        };
        let block_size = number(Field::BlockSize)?;
        Ok(Envelope {
            max_model_len: number(Field::MaxModelLen)?,
            max_num_running_reqs: number(Field::MaxNumRunningReqs)?,
            max_num_scheduled_tokens: number(Field::MaxNumScheduledTokens)?,
            kv_blocks: number(Field::KvBlocks)?,
            block_size: BlockSize::new(block_size)
                .ok_or(Nonsense { field: Field::BlockSize, value: self.block_size })?,
        })
    }
}

/// A number that no rank can have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{field} = {value} is not within 1..={}", field.most())]
pub struct Nonsense {
    /// Which.
    pub field: Field,
    /// What was stated.
    pub value: u64,
}

/// What a rank, or all ranks, can take: each number is at least 1 and at most [`Field::most`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Envelope {
    max_model_len: u32,
    max_num_running_reqs: u32,
    max_num_scheduled_tokens: u32,
    kv_blocks: u32,
    block_size: BlockSize,
}

impl Envelope {
    /// Longest sequence, prompt and answer together, in tokens.
    pub fn max_model_len(&self) -> u32 {
        self.max_model_len
    }

    /// Requests that run at once.
    pub fn max_num_running_reqs(&self) -> u32 {
        self.max_num_running_reqs
    }

    /// Tokens in one step of the scheduler.
    pub fn max_num_scheduled_tokens(&self) -> u32 {
        self.max_num_scheduled_tokens
    }

    /// KV blocks that requests can use.
    pub fn kv_blocks(&self) -> u32 {
        self.kv_blocks
    }

    /// Tokens in a KV block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Tokens that fit into the KV blocks.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.kv_blocks) * u64::from(self.block_size.get())
    }

    /// The numbers, to be stated.
    pub fn stated(&self) -> Stated {
        Stated {
            max_model_len: self.max_model_len.into(),
            max_num_running_reqs: self.max_num_running_reqs.into(),
            max_num_scheduled_tokens: self.max_num_scheduled_tokens.into(),
            kv_blocks: self.kv_blocks.into(),
            block_size: self.block_size.get().into(),
        }
    }
}

impl fmt::Display for Envelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stated = self.stated();
        for (nth, field) in Field::ALL.into_iter().enumerate() {
            write!(f, "{}{field}={}", if nth == 0 { "" } else { " " }, stated.get(field))?;
        }
        Ok(())
    }
}

/// Why ranks have nothing in common.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum NothingInCommon {
    /// Blocks of different sizes cannot be counted against each other; the ranks of one model have one size.
    #[error("block sizes differ: {first_size} at rank {first}, {other_size} at rank {other}")]
    BlockSizes {
        /// A rank.
        first: DpRank,
        /// Its block size.
        first_size: BlockSize,
        /// The first rank whose block size is another.
        other: DpRank,
        /// That block size.
        other_size: BlockSize,
    },
    /// There are no ranks.
    #[error("no rank has stated an envelope")]
    NoRanks,
}

/// What every rank can take: the smallest of each number. `envelopes` are by rank, from rank 0.
///
/// # Errors
/// Ranks whose block sizes differ, or no ranks.
pub fn common(envelopes: &[Envelope]) -> Result<Envelope, NothingInCommon> {
    let (first, rest) = envelopes.split_first().ok_or(NothingInCommon::NoRanks)?;
    let mut common = *first;
    for (rank, envelope) in (1..).zip(rest) {
        if envelope.block_size != first.block_size {
            return Err(NothingInCommon::BlockSizes {
                first: DpRank(0),
                first_size: first.block_size,
                other: DpRank(rank),
                other_size: envelope.block_size,
            });
        }
        common.max_model_len = common.max_model_len.min(envelope.max_model_len);
        common.max_num_running_reqs = common.max_num_running_reqs.min(envelope.max_num_running_reqs);
        common.max_num_scheduled_tokens =
            common.max_num_scheduled_tokens.min(envelope.max_num_scheduled_tokens);
        common.kv_blocks = common.kv_blocks.min(envelope.kv_blocks);
    }
    Ok(common)
}

/// The ranks that set `field` of the common envelope, because theirs is the smallest.
pub fn binding(envelopes: &[Envelope], field: Field) -> Vec<DpRank> {
    let smallest = envelopes.iter().map(|envelope| envelope.stated().get(field)).min();
    (0..)
        .map(DpRank)
        .zip(envelopes)
        .filter(|(_, envelope)| Some(envelope.stated().get(field)) == smallest)
        .map(|(rank, _)| rank)
        .collect()
}

/// The envelope of `rank` of `of` in a deliberately uneven deployment: each number but the block size falls
/// with another rank, so that no rank is the smallest in all, and what is common is nobody's own.
pub fn uneven(full: Stated, rank: DpRank, of: u32) -> Stated {
    let mut stated = full;
    let of = u64::from(of.max(1));
    for (nth, field) in (0_u64..).zip(Field::ALL) {
        if field == Field::BlockSize {
            continue;
        }
        // From half of the full value up to all of it, the half at the rank whose turn it is.
        let step = (u64::from(rank.0) + of - nth % of) % of;
        let value = full.get(field);
        stated.set(field, (value / 2 + value / 2 * step / of).max(1));
    }
    stated
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const FULL: Stated = Stated {
        max_model_len: 8_192,
        max_num_running_reqs: 64,
        max_num_scheduled_tokens: 8_192,
        kv_blocks: 4_096,
        block_size: 16,
    };

    /// B1: zero and absurd numbers are refused field by field, with the value.
    #[test]
    fn b1_nonsense_is_refused() {
        assert!(FULL.check().is_ok());
        for field in Field::ALL {
            for value in [0, field.most() + 1, u64::MAX] {
                let mut stated = FULL;
                stated.set(field, value);
                assert_eq!(stated.check(), Err(Nonsense { field, value }));
            }
            for value in [1, field.most()] {
                let mut stated = FULL;
                stated.set(field, value);
                assert_eq!(stated.check().unwrap().stated().get(field), value);
            }
        }
        let zero = Nonsense { field: Field::KvBlocks, value: 0 };
        assert_eq!(zero.to_string(), "kv_blocks = 0 is not within 1..=2147483648");
    }

    /// B1: the smallest of each, whoever has it.
    #[test]
    fn b1_the_smallest_of_each_wins() {
        for of in [1, 2, 4, 8] {
            let stated: Vec<Stated> = (0..of).map(|rank| uneven(FULL, DpRank(rank), of)).collect();
            let envelopes: Vec<Envelope> = stated.iter().map(|stated| stated.check().unwrap()).collect();
            let all = common(&envelopes).unwrap();
            for field in Field::ALL {
                let smallest = stated.iter().map(|stated| stated.get(field)).min().unwrap();
                assert_eq!(all.stated().get(field), smallest);
                if field != Field::BlockSize {
                    assert_eq!(smallest, FULL.get(field) / 2);
                    assert_eq!(binding(&envelopes, field).len(), 1);
                }
            }
            // What is common is nobody's own.
            assert!(of < 4 || !envelopes.contains(&all));
        }
    }

    /// B1
    #[test]
    fn b1_block_sizes_must_be_one() {
        let mut other = FULL;
        other.block_size = 32;
        let envelopes = [FULL.check().unwrap(), FULL.check().unwrap(), other.check().unwrap()];
        let error = common(&envelopes).unwrap_err();
        assert_eq!(error.to_string(), "block sizes differ: 16 at rank 0, 32 at rank 2");
        assert_eq!(common(&[]), Err(NothingInCommon::NoRanks));
    }
}

//! Single msgpack values, and what they may stand for.

use crate::block::BlockHash;

/// One msgpack value that is not looked into. A `str` that is not UTF-8 is a byte string, as it was in
/// msgpack before the two were told apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar<'a> {
    Nil,
    UInt(u64),
    /// May be non-negative: encoders may write small numbers signed.
    Int(i64),
    Float(f64),
    Text(&'a str),
    Bytes(&'a [u8]),
    /// A boolean, an array, a map or an extension; already read past.
    Other,
}

impl<'a> Scalar<'a> {
    pub(super) fn text_or_bytes(raw: &'a [u8]) -> Self {
        std::str::from_utf8(raw).map_or(Self::Bytes(raw), Self::Text)
    }

    pub(super) fn as_u32(self) -> Option<u32> {
        match self {
            Self::UInt(value) => u32::try_from(value).ok(),
            Self::Int(value) => u32::try_from(value).ok(),
            _ => None,
        }
    }

    pub(super) fn as_i64(self) -> Option<i64> {
        match self {
            Self::UInt(value) => i64::try_from(value).ok(),
            Self::Int(value) => Some(value),
            _ => None,
        }
    }

    /// A token id; `None` is a token that cannot be placed, which makes the list unusable.
    pub(super) fn token(self) -> Option<u32> {
        self.as_u32()
    }

    /// A block's name on its engine.
    pub(super) fn hash(self) -> Option<BlockHash> {
        match self {
            Self::UInt(value) => Some(BlockHash::Int(value)),
            Self::Int(value) => Some(BlockHash::from_i64(value)),
            Self::Bytes(bytes) => BlockHash::from_bytes(bytes),
            _ => None,
        }
    }

    /// A batch's time.
    pub(super) fn time(self) -> Option<f64> {
        match self {
            Self::UInt(value) => Some(value as f64),
            Self::Int(value) => Some(value as f64),
            Self::Float(value) => Some(value).filter(|value| value.is_finite()),
            _ => None,
        }
    }

    /// The rank that a batch names. One that does not fit is the largest: it agrees with no connection,
    /// and saying "not named" would hide that.
    pub(super) fn rank(self) -> Option<i64> {
        match self {
            Self::UInt(value) => Some(i64::try_from(value).unwrap_or(i64::MAX)),
            Self::Int(value) => Some(value),
            _ => None,
        }
    }
}

//! What a batch may cost, and why one is lost whole.

use crate::block::MediumMap;

/// Containers inside one another, the batch's own included, stay below this. A batch needs six (batch,
/// events, event, `extra_keys`, its list, its entry); the rest is room for fields that we skip.
pub(super) const MAX_DEPTH: usize = 16;

/// What a batch may cost, and what its media are called. Everything that is read from the wire is held against a
/// limit before it is kept. The limits lie above what engines legally send, since what is over one is lost: a
/// removal of a million hashes, a store of a million blocks of one token. While it is decoded a batch costs a few
/// times its payload, at most some 200 MB.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of payload. A million blocks of one token, each with a hash of 32 bytes, its token and an adapter's
    /// name of 60 bytes, take 105 MB.
    pub payload_bytes: usize,
    /// Events in a batch. SGLang up to 0.5.17 sends one per page: evicting a prompt of a million tokens at a page
    /// size of 1 is a million removals.
    pub events: usize,
    /// Hashes in an event. Later versions merge removals, so one may empty a rank's whole cache: four million
    /// blocks of one token are more than an accelerator holds.
    pub hashes: usize,
    /// Tokens in an event: the longest contexts are ten million.
    pub tokens: usize,
    /// Extra keys in an event: one per block of the longest event, the adapter's name being in each.
    pub extra_keys: usize,
    /// Bytes of all extra keys of an event: a name of 64 bytes in each of a million blocks.
    pub extra_key_bytes: usize,
    /// Bytes of an adapter's name, a salt or one extra key. Engines set no limit; a client may give an image's
    /// data URL as its identifier, and that of a picture of 700 KB is as long as this.
    pub string_bytes: usize,
    /// Hashes, extra keys and lists of them that all events of a batch hold together: the longest removal, or a
    /// store of a million blocks that all have an adapter. One byte on the wire can become a hash of 24 bytes in
    /// memory, which a limit on bytes does not see.
    pub names: usize,
    /// What further media are called.
    pub media: MediumMap,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            payload_bytes: 128 << 20,
            events: 1 << 20,
            hashes: 1 << 22,
            tokens: 1 << 24,
            extra_keys: 1 << 22,
            extra_key_bytes: 64 << 20,
            string_bytes: 1 << 20,
            names: 1 << 22,
            media: MediumMap::default(),
        }
    }
}

/// Why a whole batch is lost. Its number in the stream is used up all the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The payload is longer than [`Limits::payload_bytes`]; it was not looked at.
    #[error("payload of {bytes} bytes exceeds the limit of {limit}")]
    PayloadTooLarge {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The batch declares more events than [`Limits::events`].
    #[error("batch of {events} events exceeds the limit of {limit}")]
    TooManyEvents {
        /// How many it declares.
        events: usize,
        /// The limit.
        limit: usize,
    },
    /// The msgpack breaks off, holds a byte that means nothing, or nests 16 deep.
    #[error("payload is no msgpack value")]
    Broken,
    /// Bytes follow the batch.
    #[error("payload goes on after the batch")]
    TrailingBytes,
    /// The payload is neither an array nor a map.
    #[error("payload is neither an array nor a map")]
    NotABatch,
    /// The batch has no list of events.
    #[error("batch has no list of events")]
    NoEvents,
}

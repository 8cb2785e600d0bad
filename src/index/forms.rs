//! In which forms blocks were stored, so that a query asks in those alone.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::StoreTokens;
use crate::block::BlockSize;

/// The forms in which the ranks of an index have stored blocks. A form that was seen once is asked for ever after:
/// one lookup more, never a wrong answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TokenForms {
    /// A block is its own tokens.
    pub plain: bool,
    /// A block is its own tokens and the one behind them (EAGLE drafters).
    pub eagle: bool,
}

const PLAIN: u8 = 1;
const EAGLE: u8 = 2;

/// The same, as the writer leaves it for readers.
#[derive(Default, Debug)]
pub(super) struct FormsSeen(AtomicU8);

impl FormsSeen {
    pub(super) fn get(&self) -> TokenForms {
        let seen = self.0.load(Relaxed);
        TokenForms { plain: seen & PLAIN != 0, eagle: seen & EAGLE != 0 }
    }

    pub(super) fn set(&self, forms: TokenForms) {
        let plain = if forms.plain { PLAIN } else { 0 };
        let eagle = if forms.eagle { EAGLE } else { 0 };
        self.0.fetch_or(plain | eagle, Relaxed);
    }

    /// Takes note of a store. Hashes say nothing of how they were made: whoever hands them in asks by them.
    pub(super) fn note(&self, tokens: &StoreTokens<'_>, block_size: BlockSize) {
        let form = match tokens {
            StoreTokens::Ids([_, ..]) => PLAIN,
            StoreTokens::Windows { len, .. } if *len == block_size.as_usize() + 1 => EAGLE,
            // Longer windows are asked for by nobody.
            StoreTokens::Windows { .. }
            | StoreTokens::Ids([])
            | StoreTokens::Locals(_)
            | StoreTokens::Unusable => return,
        };
        // A plain load for what is nearly always known already.
        if self.0.load(Relaxed) & form == 0 {
            self.0.fetch_or(form, Relaxed);
        }
    }
}

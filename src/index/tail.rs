//! What nearly all events of a serving engine do, by the shortest way: a decoded block comes behind the tail of
//! a run that its rank alone holds, or the tail of such a run goes. Neither changes who holds the run, so there
//! is nothing to add to or take from coverage. Everything else is left to the rules of
//! [`bulk`](super::bulk) and [`announcer`](super::announcer).

use super::announcer::Announcer;
use super::tree::{Layer, RunId};
use super::{StoreRequest, StoreTokens};

impl Announcer<'_> {
    /// Appends the only block of a store; `false`, and nothing done, if it is not that plain a case.
    pub(super) fn append_to_tail(&mut self, request: &StoreRequest<'_>, layer: Layer) -> bool {
        let ([name], Some(parent)) = (request.names, request.parent) else { return false };
        if layer != Layer::HOT || !self.is_plain() {
            return false;
        }
        let Some(tail) = self.tree.named(parent, self.pin) else { return false };
        if !self.tree.may_append(tail, layer, self.index, self.pin) {
            return false;
        }
        let local = match request.tokens {
            StoreTokens::Locals(&[local]) => local,
            StoreTokens::Ids(tokens) | StoreTokens::Windows { tokens, .. } => {
                let keys = request.keys.first().map_or(&[][..], |keys| keys);
                self.hasher.hash(self.tree.isolation(tail.run), tokens, keys)
            }
            StoreTokens::Locals(_) | StoreTokens::Unusable => return false,
        };
        let pushed = self.tree.push(tail, name, local, layer, self.index, self.pin);
        if pushed {
            self.count(layer, 1);
        }
        pushed
    }

    /// Takes the blocks `from..to` from the rank if they are the tail of a run that it alone holds and go on
    /// to be the run's no more; `false`, and nothing done, if not.
    pub(super) fn cut_tail(&mut self, layer: Layer, run: RunId, from: u32, to: u32) -> bool {
        let cut = layer == Layer::HOT && self.tree.cut_tail(run, from, to, self.index, self.pin);
        if cut {
            self.count(layer, -i64::from(to - from));
        }
        cut
    }
}

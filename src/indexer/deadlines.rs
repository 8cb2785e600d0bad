//! Which stream is due when.

use std::collections::{BTreeSet, HashMap};

use crate::ids::{Moment, SourceId};

/// The streams that wait for a moment, by that moment. A stream in its usual state waits for none, so this is
/// nearly empty however many streams there are.
#[derive(Default, Debug)]
pub(super) struct Deadlines {
    by_moment: BTreeSet<(Moment, SourceId)>,
    of: HashMap<SourceId, Moment>,
}

impl Deadlines {
    /// The next of all.
    pub(super) fn earliest(&self) -> Option<Moment> {
        self.by_moment.first().map(|(at, _)| *at)
    }

    /// What a stream waits for from now on. Costs a look into an empty table in most cases.
    pub(super) fn set(&mut self, source: SourceId, at: Option<Moment>) {
        if self.of.get(&source).copied() == at {
            return;
        }
        self.forget(source);
        if let Some(at) = at {
            self.of.insert(source, at);
            self.by_moment.insert((at, source));
        }
    }

    /// The stream is gone.
    pub(super) fn forget(&mut self, source: SourceId) {
        if let Some(at) = self.of.remove(&source) {
            self.by_moment.remove(&(at, source));
        }
    }

    /// Streams whose moment has come, the longest overdue first.
    pub(super) fn due(&self, now: Moment) -> Vec<SourceId> {
        self.by_moment.iter().take_while(|(at, _)| *at <= now).map(|(_, source)| *source).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_is_due_first_and_what_is_moved_is_due_once() {
        let mut deadlines = Deadlines::default();
        let at = |micros| Some(Moment(micros));
        for (source, moment) in [(1, 30), (2, 20), (3, 20), (1, 10)] {
            deadlines.set(SourceId(source), at(moment));
        }
        assert_eq!(deadlines.earliest(), at(10));
        assert_eq!(deadlines.due(Moment(9)), []);
        assert_eq!(deadlines.due(Moment(20)), [1, 2, 3].map(SourceId));
        deadlines.set(SourceId(1), None);
        deadlines.forget(SourceId(2));
        deadlines.forget(SourceId(7));
        assert_eq!((deadlines.earliest(), deadlines.due(Moment(100))), (at(20), vec![SourceId(3)]));
        deadlines.set(SourceId(3), None);
        assert_eq!(deadlines.earliest(), None);
    }
}

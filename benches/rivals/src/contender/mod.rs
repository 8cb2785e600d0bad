//! The contenders behind one trait: take events in, answer prompts, forget.

mod crtc;
mod naive;
mod positional;
mod radix_tree;
mod rankwise;
mod router_asker;
mod router_event;
mod smg;

use crate::workload::blocks::{Blocks, Event};
use crate::workload::questions::Question;

pub use self::crtc::Crtc;
pub use self::naive::Naive;
pub use self::positional::Positional;
pub use self::radix_tree::RadixTree;
pub use self::rankwise::Rankwise;
pub use self::router_event::{router_event, scores};
pub use self::smg::Smg;

/// How a question is put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keys {
    /// By the hashes of its blocks' contents.
    Content,
    /// By these and the sequence hashes of its blocks, where the contender can use them.
    Sequence,
}

/// Someone who answers: a contender, or a reader of it for another thread.
pub trait Ask {
    /// Puts a question into the contender's own form. Not part of any measure.
    fn pose(&mut self, question: &Question, keys: Keys);

    /// Answers the question posed last; the answer is kept in the contender's own form.
    fn ask(&mut self);

    /// The last answer: the ranks with an overlap and how many blocks, in no order.
    fn answer(&self, into: &mut Vec<(u32, u32)>);
}

/// A contender that is asked as its readers on other threads are.
pub trait HasAsker {
    /// Its own reader.
    type Asker: Ask;

    /// The reader.
    fn asker(&self) -> &Self::Asker;

    /// The reader, to be asked.
    fn asker_mut(&mut self) -> &mut Self::Asker;
}

impl<T: HasAsker> Ask for T {
    fn pose(&mut self, question: &Question, keys: Keys) {
        self.asker_mut().pose(question, keys);
    }

    fn ask(&mut self) {
        self.asker_mut().ask();
    }

    fn answer(&self, into: &mut Vec<(u32, u32)>) {
        self.asker().answer(into);
    }
}

/// An index under test.
pub trait Contender: Ask {
    /// As reports call it.
    fn name(&self) -> &'static str;

    /// Puts events into the contender's own form. Not part of any measure.
    fn load(&mut self, blocks: &Blocks, events: &[Event]);

    /// Applies what was loaded, gives its buffers back, and says what it cost.
    fn apply(&mut self) -> Nanos;

    /// A reader for another thread; `None` if the contender cannot be read while it is written.
    fn reader(&self) -> Option<Box<dyn Ask + Send>> {
        None
    }

    /// Whether questions with sequence hashes are answered in another way than those without.
    fn uses_sequences(&self) -> bool {
        false
    }

    /// Finishes what [`Contender::apply`] put off, and says what that cost.
    fn settle(&mut self) -> Nanos {
        0
    }

    /// Writes the content out and builds an equal index from it; `None` if its interface has no such thing.
    fn dump_and_rebuild(&mut self) -> Option<DumpCost> {
        None
    }
}

/// CPU time of a thread, in nanoseconds.
pub type Nanos = u64;

/// What a dump cost.
#[derive(Clone, Copy, Debug)]
pub struct DumpCost {
    /// Writing it out.
    pub dump: Nanos,
    /// Building an index from it.
    pub rebuild: Nanos,
}

/// Which contenders take part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Field {
    /// Those that scale, `rankwise` first.
    All,
    /// The two that the goals compare.
    Best,
    /// These two and the trie that only small workloads can afford.
    WithNaive,
    /// Everyone, and every search mode: for histories, where answers are counted and not timed.
    Histories,
}

/// Fresh contenders for `ranks` ranks; `rankwise` is the first.
pub fn field(field: Field, ranks: u32) -> Vec<Box<dyn Contender>> {
    (0..).map_while(|nth| self::nth(field, nth, ranks)).collect()
}

/// The `nth` contender of a field.
pub fn nth(field: Field, nth: usize, ranks: u32) -> Option<Box<dyn Contender>> {
    Some(match (nth, field) {
        (0, _) => Box::new(Rankwise::new(ranks)),
        (1, _) => Box::new(Smg::new(ranks)),
        (2, Field::WithNaive) => Box::new(Naive::new()),
        (2, Field::All | Field::Histories) => Box::new(RadixTree::new()),
        (3, Field::All | Field::Histories) => Box::new(Crtc::new()),
        (4, Field::All | Field::Histories) => Box::new(Positional::jump()),
        (5, Field::Histories) => Box::new(Positional::binary()),
        (6, Field::Histories) => Box::new(Naive::new()),
        _ => return None,
    })
}

/// One contender by its name.
pub fn named(name: &str, ranks: u32) -> Option<Box<dyn Contender>> {
    field(Field::Histories, ranks).into_iter().find(|contender| contender.name() == name)
}

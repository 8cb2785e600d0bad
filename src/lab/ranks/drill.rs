//! Faults on demand: what a rank does wrong so that its bench's error can be seen, and tested.

use std::fmt;
use std::str::FromStr;

use super::envelope::Field;
use super::grid::Digest;
use super::lockstep::ParticipantAction;
use super::message::FromRank;

/// What one rank does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Drill {
    /// It ends before it has joined.
    DiesBeforeJoining,
    /// It ends when it should send its grid.
    DiesInExchange,
    /// It ends when it should have measured the first point.
    DiesInWalk,
    /// It falls silent when it should have measured the first point; its connection stays.
    Hangs,
    /// It made another grid of the same size.
    OtherGrid,
    /// Its grid has a point less.
    OtherCount,
    /// It has a prefill point where the others have a decode point.
    OtherPhases,
    /// It states no KV blocks.
    Nonsense,
    /// It states more tokens than there can be.
    Absurd,
}

impl Drill {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::DiesBeforeJoining,
        Self::DiesInExchange,
        Self::DiesInWalk,
        Self::Hangs,
        Self::OtherGrid,
        Self::OtherCount,
        Self::OtherPhases,
        Self::Nonsense,
        Self::Absurd,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::DiesBeforeJoining => "dies-before-joining",
            Self::DiesInExchange => "dies-in-exchange",
            Self::DiesInWalk => "dies-in-walk",
            Self::Hangs => "hangs",
            Self::OtherGrid => "other-grid",
            Self::OtherCount => "other-count",
            Self::OtherPhases => "other-phases",
            Self::Nonsense => "nonsense",
            Self::Absurd => "absurd",
        }
    }

    /// What becomes of an action.
    pub fn twist(self, action: ParticipantAction) -> Twisted {
        let ParticipantAction::Send(message) = action else { return Twisted::Do(action) };
        let twisted = match (self, message) {
            (Self::DiesBeforeJoining, FromRank::Join { .. })
            | (Self::DiesInExchange, FromRank::Grid(_))
            | (Self::DiesInWalk, FromRank::Done { .. }) => return Twisted::Die,
            (Self::Hangs, FromRank::Done { .. }) => return Twisted::Hang,
            (Self::Nonsense | Self::Absurd, FromRank::Join { rank, of, who, mut envelope }) => {
                match self {
                    Self::Nonsense => envelope.set(Field::KvBlocks, 0),
                    _ => envelope.set(Field::MaxModelLen, u64::MAX),
                }
                FromRank::Join { rank, of, who, envelope }
            }
            (_, FromRank::Grid(mut summary)) => {
                match self {
                    Self::OtherGrid => summary.digest = Digest(!summary.digest.0),
                    Self::OtherCount => {
                        summary.points = summary.points.saturating_sub(1);
                        summary.decode = summary.decode.saturating_sub(1);
                    }
                    Self::OtherPhases => {
                        summary.prefill += 1;
                        summary.decode = summary.decode.saturating_sub(1);
                    }
                    _ => {}
                }
                FromRank::Grid(summary)
            }
            (_, message) => message,
        };
        Twisted::Do(ParticipantAction::Send(twisted))
    }
}

/// What becomes of an action under a drill.
#[derive(Clone, PartialEq, Debug)]
pub enum Twisted {
    /// This is done.
    Do(ParticipantAction),
    /// The rank ends, without a word.
    Die,
    /// The rank neither reads nor says anything any more.
    Hang,
}

impl fmt::Display for Drill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Drill {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|drill| drill.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("{name:?} is no drill; there are {names}")
        })
    }
}

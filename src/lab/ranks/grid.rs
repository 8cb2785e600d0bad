//! The points that all ranks measure. Made of the common envelope and of what the user chose, and of nothing
//! else, so that every rank that has the same of both has the same bytes.
//!
//! **Prefill** points are prompt length × prompts at once, **decode** points are context × sequences at once.
//! Lengths and widths grow by [`FACTOR`] from the smallest useful one and end exactly at what the envelope
//! allows, so the largest point of each row is the ranks' real limit.

use std::fmt::{self, Write};

use thiserror::Error;
use twox_hash::xxhash3_64::Hasher as Xxh3;

use super::choice::{Choice, MAX_DENSITY, NamedPoint};
use super::envelope::Envelope;

/// Step between two lengths or two widths. With 4, an envelope of a million tokens and a thousand requests
/// still has fewer than a hundred points.
pub const FACTOR: u32 = 4;

/// Shortest prompt and shortest context, unless the envelope allows less. Below it, what is measured is the
/// engine's overhead per request.
pub const SHORTEST: u32 = 128;

/// Tokens that a request of a decode point generates, unless the envelope allows less: enough gaps between
/// tokens for a median, few enough that the context hardly grows.
pub const DECODE_TOKENS: u32 = 32;

/// Requests of a prefill point at least: each gives one time to first token.
const PREFILL_SAMPLES: u32 = 8;

/// Requests of a decode point at least: each gives [`DECODE_TOKENS`] gaps.
const DECODE_SAMPLES: u32 = 2;

/// What a point measures.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Phase {
    /// Time to the first token.
    Prefill,
    /// Time between tokens.
    Decode,
}

impl Phase {
    /// Both, in the order in which they are walked.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One point of the grid.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Point {
    /// What is measured.
    pub phase: Phase,
    /// Tokens of each prompt: its length in a prefill point, the context in a decode point.
    pub prompt_tokens: u32,
    /// Requests at once.
    pub width: u32,
    /// Tokens that each request generates.
    pub output_tokens: u32,
    /// Requests in all: a multiple of the width, sent as so many rounds.
    pub requests: u32,
}

impl Point {
    /// How often the point's width is sent.
    pub fn rounds(&self) -> u32 {
        self.requests / self.width.max(1)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, prompt_tokens, width, .. } = self;
        match phase {
            Phase::Prefill => write!(f, "prefill of {prompt_tokens} tokens x {width}"),
            Phase::Decode => write!(f, "decode at {prompt_tokens} tokens x {width}"),
        }
    }
}

/// The points, in the order in which they are walked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grid {
    points: Vec<Point>,
    canonical: String,
}

/// Points of a grid at most: each is kept with what every rank measured there, and takes seconds to walk. What an
/// envelope gives by itself stays below 300.
pub const MAX_POINTS: usize = 4_096;

/// There are no points to walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NoGrid {
    /// The envelope has no room for a single request.
    #[error("no request fits into {0}: it needs room for a token of prompt and a token of answer")]
    NoRoom(Envelope),
    /// A named point that the envelope has no room for.
    #[error("a {phase} point of {tokens} tokens x {width} is asked for, and {envelope} takes {most}{unit}")]
    Beyond {
        /// What it was to measure.
        phase: Phase,
        /// Its length.
        tokens: u32,
        /// How many at once.
        width: u32,
        /// The common envelope.
        envelope: Envelope,
        /// What it takes at most.
        most: u32,
        /// Of what.
        unit: &'static str,
    },
    /// Neither phase has a point.
    #[error("no point is asked for, neither of prefill nor of decode")]
    Nothing,
    /// More points than anybody walks.
    #[error("{0} points are asked for, more than {MAX_POINTS}: name fewer, or lower the density")]
    TooMany(usize),
}

impl Grid {
    /// The grid of `common` within `choice`. Costs microseconds and at most [`MAX_POINTS`] points.
    ///
    /// # Errors
    /// An envelope in which not even two tokens fit, or not a point that was named; a choice without points or
    /// with too many.
    pub fn derive(common: &Envelope, choice: &Choice) -> Result<Self, NoGrid> {
        let room = u64::from(common.max_model_len()).min(common.kv_tokens());
        // `room` is at most the model length, which has 32 bits.
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        if room < 2 {
            return Err(NoGrid::NoRoom(*common));
        }
        let output = DECODE_TOKENS.min(room / 2);
        let mut points = Vec::new();
        for (phase, output, named) in
            [(Phase::Prefill, 1, &choice.prefill), (Phase::Decode, output, &choice.decode)]
        {
            let row = Row { common, phase, output, longest: room - output, density: choice.density };
            match named {
                None => row.all(&mut points),
                Some(named) => row.named(named.points(), &mut points)?,
            }
        }
        match points.len() {
            0 => return Err(NoGrid::Nothing),
            many if many > MAX_POINTS => return Err(NoGrid::TooMany(many)),
            _ => {}
        }
        let canonical = canonical(common, choice, &points);
        Ok(Self { points, canonical })
    }

    /// The points, in order.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The grid and the envelope that it was made of, as bytes that are equal where and only where they are:
    /// a line of version, one of the envelope, one per point.
    pub fn canonical(&self) -> &[u8] {
        self.canonical.as_bytes()
    }

    /// What ranks compare.
    pub fn summary(&self) -> Summary {
        let count = |phase| self.points.iter().filter(|point| point.phase == phase).count();
        let short = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Summary {
            digest: Digest(Xxh3::oneshot(self.canonical())),
            points: short(self.points.len()),
            prefill: short(count(Phase::Prefill)),
            decode: short(count(Phase::Decode)),
        }
    }
}

/// XXH3-64 of a grid's canonical bytes; shown as sixteen hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Digest(pub u64);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A grid in short, for comparison.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Summary {
    /// Of the canonical bytes.
    pub digest: Digest,
    /// How many points there are.
    pub points: u32,
    /// How many of them are prefill.
    pub prefill: u32,
    /// How many of them are decode.
    pub decode: u32,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { digest, points, prefill, decode } = self;
        write!(f, "digest {digest}, {points} points ({prefill} prefill, {decode} decode)")
    }
}

/// One phase's part of the grid.
struct Row<'a> {
    common: &'a Envelope,
    phase: Phase,
    output: u32,
    longest: u32,
    density: u32,
}

impl Row<'_> {
    /// The points that the envelope gives.
    fn all(&self, points: &mut Vec<Point>) {
        for tokens in ladder(SHORTEST, self.longest, self.density) {
            self.widths(tokens, points);
        }
    }

    /// The points that were named.
    fn named(&self, named: &[NamedPoint], points: &mut Vec<Point>) -> Result<(), NoGrid> {
        let (phase, envelope) = (self.phase, *self.common);
        for &NamedPoint { tokens, width } in named {
            let wanted = width.unwrap_or(1);
            let beyond = |most, unit| NoGrid::Beyond { phase, tokens, width: wanted, envelope, most, unit };
            if tokens > self.longest {
                return Err(beyond(self.longest, " tokens"));
            }
            match width {
                None => self.widths(tokens, points),
                // A round that does not fit into one step is a measurement like any other; one that does not fit
                // into the blocks would wait for them.
                Some(width) if width <= self.fitting(tokens) => points.push(self.point(tokens, width)),
                Some(_) => return Err(beyond(self.fitting(tokens), " at once")),
            }
        }
        // `511` stands for `511x1` too.
        points.sort_unstable();
        points.dedup();
        Ok(())
    }

    fn widths(&self, tokens: u32, points: &mut Vec<Point>) {
        let scheduled = self.common.max_num_scheduled_tokens();
        let in_one_step = match self.phase {
            // A step takes so many prompts whole; one that is longer than a step is cut, alone.
            Phase::Prefill => (scheduled / tokens).max(1),
            // Each sequence takes one token of a step.
            Phase::Decode => scheduled,
        };
        let widest = self.fitting(tokens).min(in_one_step);
        points.extend(ladder(1, widest, self.density).map(|width| self.point(tokens, width)));
    }

    /// So many run at once and fit into the blocks together.
    fn fitting(&self, tokens: u32) -> u32 {
        let widest = widest(self.common, tokens, self.output);
        match self.phase {
            Phase::Prefill => widest,
            Phase::Decode => widest.min(self.common.max_num_scheduled_tokens()),
        }
    }

    fn point(&self, prompt_tokens: u32, width: u32) -> Point {
        let samples = match self.phase {
            Phase::Prefill => PREFILL_SAMPLES,
            Phase::Decode => DECODE_SAMPLES,
        };
        let requests = width * samples.div_ceil(width);
        Point { phase: self.phase, prompt_tokens, width, output_tokens: self.output, requests }
    }
}

/// `first`, then [`FACTOR`] times as much, as long as it is less than `last`; then `last`. Between two of them are
/// `density - 1` others, evenly spaced: whole numbers only, so that every machine has the same.
fn ladder(first: u32, last: u32, density: u32) -> impl Iterator<Item = u32> {
    let density = u64::from(density.clamp(1, MAX_DENSITY));
    let whole = std::iter::successors(Some(u64::from(first)), |step| Some(step * u64::from(FACTOR)));
    let last = u64::from(last);
    let whole = whole.take_while(move |step| *step < last);
    let between = whole.flat_map(move |step| {
        let wider = step * u64::from(FACTOR - 1);
        (0..density).map(move |nth| step + wider * nth / density).filter(move |size| *size < last)
    });
    // All are at most `last`, which has 32 bits. Small steps leave no room between them.
    let mut before = None;
    let sizes = between.chain([last]).filter_map(|size| u32::try_from(size).ok());
    sizes.filter(move |size| before.replace(*size) != Some(*size))
}

/// Sequences of `prompt` and `output` tokens that may run at once and fit into the KV blocks together.
fn widest(common: &Envelope, prompt: u32, output: u32) -> u32 {
    let tokens = u64::from(prompt) + u64::from(output);
    let blocks = tokens.div_ceil(u64::from(common.block_size().get()));
    let fit = u64::from(common.kv_blocks()) / blocks;
    // `fit` is at most the number of blocks, which has 32 bits.
    common.max_num_running_reqs().min(u32::try_from(fit).unwrap_or(u32::MAX)).max(1)
}

fn canonical(common: &Envelope, choice: &Choice, points: &[Point]) -> String {
    let mut text = format!("rankwise grid 1\nenvelope {common}\n");
    if *choice != Choice::default() {
        // Writing to a string does not fail.
        let _ = writeln!(text, "choice {choice}");
    }
    for point in points {
        let Point { phase, prompt_tokens, width, output_tokens, requests } = point;
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{phase} prompt={prompt_tokens} width={width} output={output_tokens} requests={requests}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::lab::ranks::envelope::{Field, Stated};
    use proptest::prelude::*;

    fn envelope(numbers: [u64; 5]) -> Envelope {
        let mut stated = Stated {
            max_model_len: 1,
            max_num_running_reqs: 1,
            max_num_scheduled_tokens: 1,
            kv_blocks: 1,
            block_size: 1,
        };
        for (field, value) in Field::ALL.into_iter().zip(numbers) {
            stated.set(field, value);
        }
        stated.check().unwrap()
    }

    /// B2: a golden grid. A change here is a change of what ranks of two versions compare: raise the version
    /// in the first line of the canonical bytes.
    #[test]
    fn b2_the_grid_of_a_small_engine() {
        let grid = Grid::derive(&envelope([1_024, 8, 512, 256, 16]), &Choice::default()).unwrap();
        let text = String::from_utf8(grid.canonical().to_vec()).unwrap();
        assert_eq!(
            text,
            "rankwise grid 1\n\
             envelope max_model_len=1024 max_num_running_reqs=8 max_num_scheduled_tokens=512 kv_blocks=256 \
             block_size=16\n\
             prefill prompt=128 width=1 output=1 requests=8\n\
             prefill prompt=128 width=4 output=1 requests=8\n\
             prefill prompt=512 width=1 output=1 requests=8\n\
             prefill prompt=1023 width=1 output=1 requests=8\n\
             decode prompt=128 width=1 output=32 requests=2\n\
             decode prompt=128 width=4 output=32 requests=4\n\
             decode prompt=128 width=8 output=32 requests=8\n\
             decode prompt=512 width=1 output=32 requests=2\n\
             decode prompt=512 width=4 output=32 requests=4\n\
             decode prompt=512 width=7 output=32 requests=7\n\
             decode prompt=992 width=1 output=32 requests=2\n\
             decode prompt=992 width=4 output=32 requests=4\n"
        );
        let summary = grid.summary();
        assert_eq!((summary.points, summary.prefill, summary.decode), (12, 4, 8));
        assert_eq!(
            summary.digest,
            Grid::derive(&envelope([1_024, 8, 512, 256, 16]), &Choice::default()).unwrap().summary().digest
        );
    }

    /// B2: what is not in the envelope is not in the grid, and every number of the envelope is.
    #[test]
    fn b2_every_number_of_the_envelope_counts() {
        let full = [1_024, 8, 512, 256, 16];
        let whole = Grid::derive(&envelope(full), &Choice::default()).unwrap();
        for nth in 0..full.len() {
            let mut less = full;
            less[nth] /= 2;
            let grid = Grid::derive(&envelope(less), &Choice::default()).unwrap();
            assert_ne!(grid.canonical(), whole.canonical());
            assert_ne!(grid.summary().digest, whole.summary().digest);
        }
    }

    fn chosen(prefill: &str, decode: &str, density: u32) -> Choice {
        let named = |text: &str| (text != "all").then(|| text.parse().unwrap());
        Choice { prefill: named(prefill), decode: named(decode), density }
    }

    /// B2, T3: named points are walked instead of the envelope's, and are in the bytes that ranks compare.
    #[test]
    fn b2_named_points_take_the_place_of_the_ladder() {
        let common = envelope([1_024, 8, 512, 256, 16]);
        let choice = chosen("128,511x2,1022", "none", 1);
        let grid = Grid::derive(&common, &choice).unwrap();
        let sizes = |grid: &Grid| {
            let sizes = grid.points().iter().map(|point| (point.prompt_tokens, point.width));
            sizes.collect::<Vec<_>>()
        };
        assert_eq!(sizes(&grid), [(128, 1), (128, 4), (511, 2), (1022, 1)]);
        let text = String::from_utf8(grid.canonical().to_vec()).unwrap();
        assert!(text.contains("\nchoice prefill=128,511x2,1022 decode=none density=1\n"), "{text}");
        // The same points, chosen otherwise: ranks that were told different things differ.
        let spelled = Grid::derive(&common, &chosen("128x1,128x4,511x2,1022", "none", 1)).unwrap();
        assert_eq!(spelled.points(), grid.points());
        assert_ne!(spelled.summary().digest, grid.summary().digest);
        let twice = Grid::derive(&common, &chosen("128,128x4", "none", 1)).unwrap();
        assert_eq!(sizes(&twice), [(128, 1), (128, 4)]);
        let decode = Grid::derive(&common, &chosen("none", "100x3", 1)).unwrap();
        assert_eq!(sizes(&decode), [(100, 3)]);
    }

    /// B2: what the envelope has no room for is refused with what it takes, and nothing is left out in silence.
    #[test]
    fn b2_named_points_beyond_the_envelope_are_refused() {
        let common = envelope([1_024, 8, 512, 256, 16]);
        let refused =
            |prefill, decode| Grid::derive(&common, &chosen(prefill, decode, 1)).unwrap_err().to_string();
        assert!(refused("128,1024", "all").contains("prefill point of 1024 tokens x 1"));
        assert!(refused("128,1024", "all").ends_with("takes 1023 tokens"));
        assert!(refused("all", "993").ends_with("takes 992 tokens"));
        assert!(refused("128x9", "all").ends_with("takes 8 at once"));
        assert!(refused("1000x5", "none").ends_with("takes 4 at once"));
        assert!(refused("none", "none").contains("no point is asked for"));
    }

    /// B2: a density adds points between those of the envelope, and takes none away.
    #[test]
    fn b2_a_density_adds_points() {
        assert_eq!(ladder(128, 1_023, 1).collect::<Vec<_>>(), [128, 512, 1_023]);
        assert_eq!(ladder(128, 1_023, 3).collect::<Vec<_>>(), [128, 256, 384, 512, 1_023]);
        assert_eq!(ladder(1, 7, 4).collect::<Vec<_>>(), [1, 2, 3, 4, 7]);
        assert_eq!(ladder(1, 1, 4).collect::<Vec<_>>(), [1]);
        let common = envelope([1_024, 8, 512, 256, 16]);
        let sparse = Grid::derive(&common, &Choice::default()).unwrap();
        for density in 2..=MAX_DENSITY {
            let dense = Grid::derive(&common, &chosen("all", "all", density)).unwrap();
            assert!(dense.points().len() > sparse.points().len());
            assert!(sparse.points().iter().all(|point| dense.points().contains(point)));
        }
    }

    #[test]
    fn no_room_for_a_request() {
        for numbers in [[1, 8, 8, 8, 16], [8, 8, 8, 1, 1]] {
            let envelope = envelope(numbers);
            assert_eq!(Grid::derive(&envelope, &Choice::default()), Err(NoGrid::NoRoom(envelope)));
        }
        let grid = Grid::derive(&envelope([2, 1, 1, 1, 2]), &Choice::default()).unwrap();
        assert_eq!(grid.points().len(), 2);
    }

    fn any_envelope() -> impl Strategy<Value = Envelope> {
        let exponents = Field::ALL.map(|field| 0..field.most().ilog2());
        let numbers = exponents.map(|range| range.prop_flat_map(|bits| (1_u64 << bits)..(2_u64 << bits)));
        numbers.prop_map(envelope)
    }

    proptest! {
        /// B2: whatever the envelope, the grid is small, keeps to it and reaches its limits.
        #[test]
        fn b2_grids_keep_to_their_envelope(common in any_envelope()) {
            let Ok(grid) = Grid::derive(&common, &Choice::default()) else {
                prop_assert!(common.max_model_len() < 2 || common.kv_tokens() < 2);
                return Ok(());
            };
            prop_assert!(grid.points().len() <= 300, "{} points", grid.points().len());
            for point in grid.points() {
                let tokens = u64::from(point.prompt_tokens) + u64::from(point.output_tokens);
                let blocks = tokens.div_ceil(u64::from(common.block_size().get()));
                prop_assert!(point.prompt_tokens >= 1 && point.output_tokens >= 1 && point.width >= 1);
                prop_assert!(tokens <= u64::from(common.max_model_len()));
                prop_assert!(blocks * u64::from(point.width) <= u64::from(common.kv_blocks()));
                prop_assert!(point.width <= common.max_num_running_reqs());
                prop_assert!(point.requests % point.width == 0 && point.rounds() >= 1);
            }
            let longest = grid.points().iter().map(|point| point.prompt_tokens + point.output_tokens).max();
            let room = common.kv_tokens().min(common.max_model_len().into());
            prop_assert_eq!(longest.map(u64::from), Some(room));
            let mut once = grid.points().to_vec();
            once.sort();
            once.dedup();
            prop_assert_eq!(once.len(), grid.points().len());
        }
    }
}

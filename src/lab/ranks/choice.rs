//! What the user wants of the grid. Every rank is given the same; a rank that was given another has other bytes,
//! so the comparison of digests finds it.

use std::fmt;
use std::str::FromStr;

/// Points that may be named for a phase. Each stands for up to a ladder of widths, and somebody writes them by hand.
pub const MAX_NAMED: usize = 64;

/// The highest density. Points grow with its square: 4 is sixteen times as many.
pub const MAX_DENSITY: u32 = 4;

/// Which points are measured, within what the envelope allows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Prefill points instead of those that the envelope gives.
    pub prefill: Option<Named>,
    /// Decode points instead of those that the envelope gives.
    pub decode: Option<Named>,
    /// Steps from a length or width to [`super::grid::FACTOR`] times as much, 1 to [`MAX_DENSITY`].
    pub density: u32,
}

impl Default for Choice {
    fn default() -> Self {
        Self { prefill: None, decode: None, density: 1 }
    }
}

impl Choice {
    /// The same as arguments of `rankwise bench ranks`; none for the default.
    pub fn arguments(&self) -> Vec<String> {
        let named = |flag: &str, named: &Option<Named>| {
            named.iter().flat_map(|named| [flag.to_owned(), named.to_string()]).collect::<Vec<_>>()
        };
        let mut arguments = named("--prefill-points", &self.prefill);
        arguments.extend(named("--decode-points", &self.decode));
        if self.density != 1 {
            arguments.extend(["--density".to_owned(), self.density.to_string()]);
        }
        arguments
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named =
            |named: &Option<Named>| named.as_ref().map_or_else(|| "all".to_owned(), ToString::to_string);
        let Self { prefill, decode, density } = self;
        write!(f, "prefill={} decode={} density={density}", named(prefill), named(decode))
    }
}

/// Points by name, ascending and each once; may be empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named(Vec<NamedPoint>);

/// A length, and how many requests at once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct NamedPoint {
    /// Prompt length of a prefill point, context of a decode point; at least 1.
    pub tokens: u32,
    /// Requests at once, at least 1; `None` is every width that the envelope gives for this length.
    pub width: Option<u32>,
}

impl Named {
    /// The points.
    pub fn points(&self) -> &[NamedPoint] {
        &self.0
    }
}

impl FromStr for Named {
    type Err = String;

    /// Reads `128,511x2`, where `x2` is two at once, or `none`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(Vec::new()));
        }
        let number = |text: &str| match text.trim().parse::<u32>() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(format!("{text:?} is no count; write TOKENS or TOKENSxWIDTH, as in 128,511x2, or none")),
        };
        let point = |text: &str| match text.split_once('x') {
            None => Ok(NamedPoint { tokens: number(text)?, width: None }),
            Some((tokens, width)) => Ok(NamedPoint { tokens: number(tokens)?, width: Some(number(width)?) }),
        };
        let mut points = text.split(',').map(point).collect::<Result<Vec<_>, String>>()?;
        if points.len() > MAX_NAMED {
            return Err(format!("{} points, of {MAX_NAMED} at most", points.len()));
        }
        points.sort_unstable();
        points.dedup();
        Ok(Self(points))
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (nth, NamedPoint { tokens, width }) in self.0.iter().enumerate() {
            let comma = if nth == 0 { "" } else { "," };
            write!(f, "{comma}{tokens}")?;
            if let Some(width) = width {
                write!(f, "x{width}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn named_points_are_read_and_written() {
        let written = |text: &str| text.parse::<Named>().map(|named| named.to_string());
        assert_eq!(written("128, 511x2,1022").unwrap(), "128,511x2,1022");
        assert_eq!(written("511,128,511").unwrap(), "128,511", "ascending and each once");
        assert_eq!(written("none").unwrap(), "none");
        for bad in ["", "0", "128,", "128x", "128x0", "x2", "-1", "4294967296", "all"] {
            assert!(written(bad).is_err(), "{bad}");
        }
        let many = vec!["7"; MAX_NAMED + 1].join(",");
        assert!(written(&many).unwrap_err().contains("64 at most"));
    }

    #[test]
    fn the_default_needs_no_argument() {
        assert!(Choice::default().arguments().is_empty());
        let choice = Choice { prefill: Some("128x2".parse().unwrap()), density: 2, ..Choice::default() };
        assert_eq!(choice.arguments(), ["--prefill-points", "128x2", "--density", "2"]);
    }
}

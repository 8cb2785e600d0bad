//! Curves of latency, as SVG: over percentiles, and over points of a run.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;

use super::Latencies;

/// Pixels of a plot; a page scales it.
const SIZE: (u32, u32) = (900, 420);

/// Colours that can be told apart, by most readers and on white.
const COLOURS: [RGBColor; 8] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 150, 170),
    RGBColor(140, 86, 75),
    RGBColor(90, 90, 90),
];

/// A plot could not be drawn. Nothing that a caller passes leads to it; the drawing library says so.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw: {0}")]
pub struct CannotDraw(String);

/// How the points of an axis are spread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// Evenly.
    Linear,
    /// By their magnitude; points at 0 and below are left out.
    Log,
}

/// One line of [`latency_over_points`].
#[derive(Clone, Debug)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// Where, and nanoseconds.
    pub points: Vec<(f64, f64)>,
}

/// Latency over percentile: along the bottom, each step to the right is ten times as rare (50, 90, 99, 99.9 %
/// …). Curves without a latency are named in the legend and not drawn.
///
/// # Errors
/// [`CannotDraw`].
pub fn percentile_curves(title: &str, curves: &[(&str, &Latencies)]) -> Result<String, CannotDraw> {
    let most = curves.iter().map(|(_, latencies)| latencies.count()).max().unwrap_or(0);
    // Beyond one in so many there is nothing to see: a single measurement.
    let right = (most.max(100) as f64).log10().ceil().min(7.0);
    let rare = |share: f64| if share < 1.0 { -(1.0 - share).log10() } else { f64::INFINITY };
    let lines = curves.iter().map(|(name, latencies)| {
        let last = (latencies.count().max(1) as f64).log10().min(right);
        let points = latencies.curve().map(|(share, nanos)| (rare(share).min(last), nanos as f64));
        Series { name: (*name).to_owned(), points: points.collect() }
    });
    let marks = (1..=right as i32).map(f64::from);
    let x = Axis {
        title: "percentile",
        range: 0.0..right,
        marks: std::iter::once(0.5_f64).map(rare).chain(marks).collect(),
        label: &percentile_label,
    };
    draw(title, x, &lines.collect::<Vec<_>>())
}

/// Latency over the points of a run: rates, sizes, moments.
///
/// # Errors
/// [`CannotDraw`].
pub fn latency_over_points(
    title: &str,
    x_title: &str,
    scale: Scale,
    series: &[Series],
) -> Result<String, CannotDraw> {
    let place = |x: f64| if scale == Scale::Log { x.log10() } else { x };
    let placed: Vec<Series> = series
        .iter()
        .map(|of| {
            let points = of.points.iter().map(|&(x, nanos)| (place(x), nanos));
            Series { name: of.name.clone(), points: points.filter(|(x, _)| x.is_finite()).collect() }
        })
        .collect();
    let range = span(placed.iter().flat_map(|of| &of.points).map(|point| point.0));
    let marks = match scale {
        Scale::Log => marks_125(&range),
        Scale::Linear => even_marks(&range),
    };
    let label: &dyn Fn(f64) -> String = match scale {
        Scale::Log => &|x| number_label(10_f64.powf(x)),
        Scale::Linear => &number_label,
    };
    let range = span(marks.iter().copied());
    draw(title, Axis { title: x_title, range, marks, label }, &placed)
}

/// Nanoseconds as people write them: `850 ns`, `1.2 µs`, `5 ms`.
pub fn duration_label(nanos: f64) -> String {
    let (value, unit) = match nanos {
        n if n < 1e3 => (n, "ns"),
        n if n < 1e6 => (n / 1e3, "µs"),
        n if n < 1e9 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    format!("{} {unit}", number_label(value))
}

/// At most three digits, and none that say nothing.
fn number_label(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 || size == 0.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// `99.9 %` for the place of one in a thousand.
fn percentile_label(rare: f64) -> String {
    let digits = (rare - 1.0).max(1.0) as usize - 1;
    format!("{:.digits$} %", 100.0 * (1.0 - 10_f64.powf(-rare)))
}

struct Axis<'a> {
    title: &'a str,
    range: Range<f64>,
    marks: Vec<f64>,
    label: &'a dyn Fn(f64) -> String,
}

/// An axis whose marks are given. (The library's own for this cannot be labelled, since it has no format.)
struct Marked {
    range: Range<f64>,
    marks: Vec<f64>,
}

impl Ranged for Marked {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        limit.0 + (share * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.marks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// From the least to the greatest, never empty.
fn span(values: impl Iterator<Item = f64>) -> Range<f64> {
    let (low, high) = values
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    match low <= high {
        true if high > low => low..high,
        true => low - 0.5..high + 0.5,
        false => 0.0..1.0,
    }
}

/// 1, 2 and 5 of each decade, as logarithms, from the last at or below the range to the first at or above it.
fn marks_125(range: &Range<f64>) -> Vec<f64> {
    let decades = range.start.floor() as i32..=range.end.ceil() as i32;
    let all: Vec<f64> =
        decades.flat_map(|decade| [1.0_f64, 2.0, 5.0].map(|m| m.log10() + f64::from(decade))).collect();
    let first = all.iter().rposition(|mark| *mark <= range.start).unwrap_or(0);
    let last = all.iter().position(|mark| *mark >= range.end).unwrap_or(all.len() - 1);
    all.into_iter().take(last + 1).skip(first).collect()
}

fn even_marks(range: &Range<f64>) -> Vec<f64> {
    const STEPS: u32 = 8;
    let step = (range.end - range.start) / f64::from(STEPS);
    (0..=STEPS).map(|nth| range.start + step * f64::from(nth)).collect()
}

/// Lines over an axis that is laid out already; upwards, nanoseconds by their magnitude.
fn draw(title: &str, x: Axis<'_>, series: &[Series]) -> Result<String, CannotDraw> {
    let mut svg = String::new();
    draw_into(&mut svg, title, x, series).map_err(|error| CannotDraw(error.to_string()))?;
    Ok(svg)
}

fn draw_into(
    svg: &mut String,
    title: &str,
    x: Axis<'_>,
    series: &[Series],
) -> Result<(), Box<dyn std::error::Error>> {
    let up = |nanos: f64| nanos.max(1.0).log10();
    let y_marks = marks_125(&span(series.iter().flat_map(|of| &of.points).map(|point| up(point.1))));
    let y_range = span(y_marks.iter().copied());
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .margin_right(28)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(
            Marked { range: x.range, marks: x.marks.clone() },
            Marked { range: y_range, marks: y_marks.clone() },
        )?;
    chart
        .configure_mesh()
        .x_desc(x.title)
        .y_desc("latency")
        .x_labels(x.marks.len())
        .y_labels(y_marks.len())
        .x_label_formatter(&|at| (x.label)(*at))
        .y_label_formatter(&|at| duration_label(10_f64.powf(*at)))
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(225, 225, 225))
        .label_style(("sans-serif", 13))
        .draw()?;
    for (of, colour) in series.iter().zip(COLOURS.iter().cycle()) {
        let style = colour.stroke_width(2);
        let points = of.points.iter().map(|&(x, nanos)| (x, up(nanos)));
        chart
            .draw_series(LineSeries::new(points, style))?
            .label(of.name.clone())
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(RGBColor(200, 200, 200))
        .label_font(("sans-serif", 13))
        .draw()?;
    area.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn labels_are_what_people_write() {
        let labels = [850.0, 1_200.0, 5e6, 2.5e9, 1.0].map(duration_label);
        assert_eq!(labels, ["850 ns", "1.2 µs", "5 ms", "2.5 s", "1 ns"]);
        let shares = [std::f64::consts::LOG10_2, 1.0, 2.0, 3.0, 4.0].map(percentile_label);
        assert_eq!(shares, ["50 %", "90 %", "99 %", "99.9 %", "99.99 %"]);
    }

    #[test]
    fn a_percentile_curve_shows_its_marks_and_names() {
        let mut some = Latencies::new();
        (1..20_000).for_each(|nth| some.record_ns(nth * 100));
        let svg = percentile_curves("Select", &[("p2", &some), ("none", &Latencies::new())]).unwrap();
        for wanted in ["<svg", "</svg>", "Select", "99.9 %", "99.99 %", "1 ms", "p2", "none", "polyline"] {
            assert!(svg.contains(wanted), "{wanted} is not in {svg}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn points_are_drawn_on_either_scale_and_without_any() {
        let of = |points: &[(f64, f64)]| [Series { name: "p99".to_owned(), points: points.to_vec() }];
        for scale in [Scale::Linear, Scale::Log] {
            for points in [&[][..], &[(100.0, 5e6)], &[(0.0, 0.0), (100.0, 1e6), (10_000.0, 3e7)]] {
                let svg = latency_over_points("Rates", "requests/s", scale, &of(points)).unwrap();
                assert!(svg.contains("requests/s") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
    }

    #[test]
    fn marks_enclose_the_range() {
        let marks = marks_125(&(3.1..5.4));
        assert!(marks.first().unwrap() <= &3.1 && marks.last().unwrap() >= &5.4);
        assert_eq!(marks_125(&(3.0..3.0)), [3.0]);
    }
}

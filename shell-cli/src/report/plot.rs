//! Rows as an SVG: one panel for each benchmark, ours and the baseline against size.
//!
//! Text stays text in the SVG, so no font is needed here.

use super::Row;
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::{Path, PathBuf};

/// Why no picture was written. Nothing usable is left at the path.
#[derive(Debug, thiserror::Error)]
pub enum PlotError {
    /// There was nothing to draw.
    #[error("no row has a figure to plot")]
    Empty,
    /// The picture could not be drawn or written.
    #[error("cannot write {path}: {reason}")]
    Draw {
        /// Where it was to go.
        path: PathBuf,
        /// What the drawing library said.
        reason: String,
    },
}

const PANEL: (u32, u32) = (640, 360);
const OURS: RGBColor = RGBColor(31, 119, 180);
const BASELINE: RGBColor = RGBColor(140, 140, 140);

/// One point of a panel: where on the x axis, our figure, the baseline's.
struct Point {
    x: f64,
    ours: f64,
    baseline: Option<f64>,
}

struct Panel {
    bench: &'static str,
    unit: &'static str,
    /// x is a size on a logarithmic axis; else it is the row's number.
    sized: bool,
    points: Vec<Point>,
}

/// The figure a benchmark is read by, with the baseline's, and its unit.
fn figures(row: &Row) -> Option<(f64, Option<f64>, &'static str)> {
    if let Some(us) = row.half_rtt_us {
        return Some((us, row.baseline_half_rtt_us, "us"));
    }
    match (row.shape.bench, row.mops, row.gb_per_s) {
        ("rate", Some(mops), _) => Some((mops, row.ratio.map(|ratio| mops / ratio), "Mop/s")),
        (_, _, Some(gb)) => Some((gb, row.baseline_gb_per_s, "GB/s")),
        _ => None,
    }
}

fn panels(rows: &[Row]) -> Vec<Panel> {
    let mut panels: Vec<Panel> = Vec::new();
    for row in rows {
        let Some((ours, baseline, unit)) = figures(row) else {
            continue;
        };
        let found = panels.iter().position(|panel| panel.bench == row.shape.bench);
        let index = found.unwrap_or_else(|| {
            let sized = rows
                .iter()
                .filter(|other| other.shape.bench == row.shape.bench)
                .all(|other| other.shape.bytes.is_some_and(|bytes| bytes > 0));
            panels.push(Panel { bench: row.shape.bench, unit, sized, points: Vec::new() });
            panels.len() - 1
        });
        if let Some(panel) = panels.get_mut(index) {
            let number = panel.points.len() as f64 + 1.0;
            let x = if panel.sized { row.shape.bytes.unwrap_or(1) as f64 } else { number };
            panel.points.push(Point { x, ours, baseline });
        }
    }
    for panel in &mut panels {
        panel.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    panels
}

/// Draws `rows` into an SVG file at `path`, replacing it.
///
/// # Errors
///
/// [`PlotError`]: no row has a figure, or the file cannot be written.
pub fn plot(rows: &[Row], path: &Path) -> Result<(), PlotError> {
    let panels = panels(rows);
    if panels.is_empty() {
        return Err(PlotError::Empty);
    }
    let mut svg = String::new();
    let failed = |reason: String| PlotError::Draw { path: path.to_owned(), reason };
    render(&panels, &mut svg).map_err(|error| failed(error.to_string()))?;
    std::fs::write(path, svg).map_err(|error| failed(error.to_string()))
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn render<'a>(panels: &[Panel], svg: &'a mut String) -> Drawn<'a> {
    let count = u32::try_from(panels.len()).unwrap_or(u32::MAX);
    let columns = if count > 1 { 2 } else { 1 };
    let lines = count.div_ceil(columns);
    let size = (PANEL.0 * columns, PANEL.1.saturating_mul(lines));
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let cells = root.split_evenly((lines as usize, columns as usize));
    for (panel, area) in panels.iter().zip(&cells) {
        draw(panel, area)?;
    }
    root.present()
}

fn draw<'a>(panel: &Panel, area: &Area<'a>) -> Drawn<'a> {
    let top = panel
        .points
        .iter()
        .flat_map(|point| [Some(point.ours), point.baseline])
        .flatten()
        .fold(f64::MIN_POSITIVE, f64::max);
    let first = panel.points.first().map_or(1.0, |point| point.x);
    let last = panel.points.last().map_or(1.0, |point| point.x);
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(format!("{} ({})", panel.bench, panel.unit), ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(32)
        .y_label_area_size(56);
    // An axis needs an extent, also around a single point.
    let x = (first / 1.5)..(last * 1.5);
    let y = 0.0..top * 1.1;
    if panel.sized {
        let mut chart = builder.build_cartesian_2d(x.log_scale(), y)?;
        chart
            .configure_mesh()
            .x_desc("bytes of one transfer")
            .x_label_formatter(&|bytes| {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "a label"
                )]
                crate::report::bytes_text(*bytes as u64)
            })
            .draw()?;
        series(panel, &mut chart)
    } else {
        let mut chart = builder.build_cartesian_2d(x, y)?;
        chart.configure_mesh().x_desc("row").draw()?;
        series(panel, &mut chart)
    }
}

fn series<'a, X>(
    panel: &Panel,
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, RangedF64>>,
) -> Drawn<'a>
where
    X: plotters::coord::ranged1d::Ranged<ValueType = f64>,
{
    let ours: Vec<_> = panel.points.iter().map(|point| (point.x, point.ours)).collect();
    let baseline: Vec<_> =
        panel.points.iter().filter_map(|point| Some((point.x, point.baseline?))).collect();
    for (name, colour, points) in [("baseline", BASELINE, baseline), ("immwire", OURS, ours)] {
        if points.is_empty() {
            continue;
        }
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .border_style(BLACK.mix(0.3))
        .background_style(WHITE.mix(0.8))
        .draw()
}

type RangedF64 = plotters::coord::types::RangedCoordf64;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::samples;
    use crate::report::{Measure, Shape};

    #[test]
    fn one_panel_for_each_bench_with_its_figures() {
        let rows = samples();
        let panels = panels(&rows);
        let shown: Vec<_> = panels
            .iter()
            .map(|panel| (panel.bench, panel.unit, panel.sized, panel.points.len()))
            .collect();
        assert_eq!(
            shown,
            [
                ("write", "GB/s", true, 2),
                ("pages", "GB/s", true, 1),
                ("latency", "us", true, 1),
                ("barrier", "us", false, 1),
            ]
        );
        assert_eq!((panels[0].points[0].ours, panels[0].points[0].baseline), (10.0, Some(20.0)));
    }

    #[test]
    fn the_file_is_an_svg_that_names_every_bench() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.svg");
        plot(&samples(), &path).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for bench in ["write (GB/s)", "pages (GB/s)", "latency (us)", "barrier (us)", "baseline"] {
            assert!(svg.contains(bench), "{bench}");
        }
        // Two write rows, one pages row and one latency row with a baseline; one barrier without.
        assert_eq!(svg.matches("<circle").count(), 4 * 2 + 1);
    }

    #[test]
    fn nothing_to_draw_and_nowhere_to_write_are_errors() {
        let empty = Row::new(Shape::default(), Measure::Rate, &[], None, true);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.svg");
        assert!(matches!(plot(&[empty], &path), Err(PlotError::Empty)));
        assert!(!path.exists());
        let nowhere = dir.path().join("missing/out.svg");
        assert!(matches!(plot(&samples(), &nowhere), Err(PlotError::Draw { .. })));
    }
}

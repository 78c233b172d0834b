//! Figures of the simulation as SVG: one panel per quantity, the paper's values hollow and dashed, ours
//! filled.

use conductor_sim::figures::{At, Panel, Point};

use crate::svg::{Mark, STYLES, Svg, escaped};

const WIDTH: f64 = 860.0;
const PANEL_HEIGHT: f64 = 330.0;
/// The edges of the plot areas, horizontally.
const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 250.0;
/// The edges of a plot area within its panel.
const TOP: f64 = 26.0;
const BOTTOM: f64 = PANEL_HEIGHT - 66.0;
/// Space above the first panel.
const TITLE_HEIGHT: f64 = 40.0;

/// The content of the file. Every panel shows the points of its series.
pub(super) fn svg(title: &str, panels: &[Panel], points: &[Point]) -> String {
    let height = TITLE_HEIGHT + PANEL_HEIGHT * panels.len() as f64;
    let mut svg = Svg::new(WIDTH, height, LEFT, title);
    for (nth, panel) in panels.iter().enumerate() {
        let shown: Vec<&Point> = points.iter().filter(|point| panel.shows(&point.series)).collect();
        Area::new(panel, &shown, TITLE_HEIGHT + PANEL_HEIGHT * nth as f64).draw(&mut svg, &shown);
    }
    svg.finished()
}

/// A plot area. Places on the horizontal axis are evenly spaced, in the order in which they come.
struct Area<'a> {
    panel: &'a Panel,
    places: Vec<&'a At>,
    series: Vec<&'a str>,
    above: f64,
    top: f64,
    steps: u32,
}

impl<'a> Area<'a> {
    fn new(panel: &'a Panel, points: &[&'a Point], above: f64) -> Self {
        let (mut places, mut series): (Vec<&At>, Vec<&str>) = (Vec::new(), Vec::new());
        for point in points {
            if !places.contains(&&point.x) {
                places.push(&point.x);
            }
            if !series.contains(&&*point.series) {
                series.push(&point.series);
            }
        }
        let values = points.iter().flat_map(|point| [Some(point.ours), point.paper]).flatten();
        let highest = values.fold(0.0, f64::max).min(panel.y_max.unwrap_or(f64::INFINITY));
        // Grid lines at round numbers, eight at most.
        let mut step = 0.001;
        for factor in [2.0, 2.5, 2.0].into_iter().cycle().take(30) {
            if highest <= step * 8.0 {
                break;
            }
            step *= factor;
        }
        let steps = ((highest / step).ceil() as u32).clamp(1, 8);
        Self { panel, places, series, above, top: step * f64::from(steps), steps }
    }

    fn x(&self, place: &At, series: usize) -> f64 {
        let nth = self.places.iter().position(|known| *known == place).unwrap_or(0) as f64;
        let width = (RIGHT - LEFT) / self.places.len().max(1) as f64;
        let middle = LEFT + (nth + 0.5) * width;
        match place {
            At::Number(_) => middle,
            // Series stand side by side.
            At::Name(_) => {
                let share = (series as f64 + 0.5) / self.series.len().max(1) as f64 - 0.5;
                middle + share * width * 0.8
            }
        }
    }

    /// Values above the area are drawn at its edge.
    fn y(&self, value: f64) -> f64 {
        self.above + BOTTOM - (value / self.top).clamp(0.0, 1.0) * (BOTTOM - TOP)
    }

    fn draw(&self, svg: &mut Svg, points: &[&Point]) {
        self.axes(svg);
        for (nth, series) in self.series.iter().enumerate() {
            let own = || points.iter().filter(|point| point.series == *series);
            let (colour, mark) = STYLES[nth % STYLES.len()];
            // A seventh curve has the first one's colour and another mark.
            let mark = if nth < STYLES.len() { mark } else { Mark::Triangle };
            let paper: Vec<(f64, f64)> =
                own().filter_map(|point| Some((self.x(&point.x, nth), self.y(point.paper?)))).collect();
            let ours: Vec<(f64, f64)> =
                own().map(|point| (self.x(&point.x, nth), self.y(point.ours))).collect();
            if own().all(|point| matches!(point.x, At::Number(_))) {
                line(svg, &paper, colour, r#" stroke-dasharray="5 4""#);
                line(svg, &ours, colour, "");
            }
            let hollow: String = paper.iter().map(|(x, y)| mark.drawn(*x, *y)).collect();
            let filled: String = ours.iter().map(|(x, y)| mark.drawn(*x, *y)).collect();
            if !hollow.is_empty() {
                svg.line(format_args!(
                    r##"<path d="{hollow}" fill="#ffffff" fill-opacity="0" stroke="{colour}" stroke-width="1.5"/>"##
                ));
            }
            svg.line(format_args!(r##"<path d="{filled}" fill="{colour}" fill-opacity="0.8"/>"##));
            let (x, y) = (RIGHT + 16.0, self.above + TOP + 8.0 + 19.0 * nth as f64);
            svg.line(format_args!(
                r##"<path d="{}" fill="{colour}"/><text x="{:.1}" y="{:.1}" font-size="12">{}</text>"##,
                mark.drawn(x, y),
                x + 10.0,
                y + 4.0,
                escaped(series)
            ));
        }
    }

    fn axes(&self, svg: &mut Svg) {
        for step in 0..=self.steps {
            let value = self.top * f64::from(step) / f64::from(self.steps);
            let y = self.y(value);
            svg.line(format_args!(
                r##"<path d="M{LEFT} {y:.1}H{RIGHT}" stroke="#dddddd"/><text x="{:.1}" y="{:.1}" text-anchor="end" font-size="12">{}</text>"##,
                LEFT - 6.0,
                y + 4.0,
                number(value)
            ));
        }
        let bottom = self.above + BOTTOM;
        let width = (RIGHT - LEFT) / self.places.len().max(1) as f64;
        for (nth, place) in self.places.iter().enumerate() {
            let x = LEFT + (nth as f64 + 0.5) * width;
            for (line, part) in place.to_string().split(", ").enumerate() {
                svg.line(format_args!(
                    r##"<text x="{x:.1}" y="{:.1}" text-anchor="middle" font-size="11">{}</text>"##,
                    bottom + 15.0 + 12.0 * line as f64,
                    escaped(part)
                ));
            }
        }
        svg.line(format_args!(
            r##"<path d="M{LEFT} {:.1}V{bottom:.1}H{RIGHT}" fill="none" stroke="#222222"/>"##,
            self.above + TOP
        ));
        let middle = (LEFT + RIGHT) / 2.0;
        svg.line(format_args!(
            r##"<text x="{middle:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
            self.above + PANEL_HEIGHT - 10.0,
            escaped(self.panel.x)
        ));
        svg.line(format_args!(
            r##"<text x="{LEFT}" y="{:.1}">{} (paper: hollow, dashed; simulated: filled)</text>"##,
            self.above + TOP - 9.0,
            escaped(self.panel.y)
        ));
    }
}

fn line(svg: &mut Svg, points: &[(f64, f64)], colour: &str, dash: &str) {
    if points.len() > 1 {
        let list: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let list = list.join(" ");
        svg.line(format_args!(
            r##"<polyline points="{list}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>"##
        ));
    }
}

/// A number with at most three decimals.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use conductor_sim::figures::Kind;

    fn point(series: &str, x: f64, paper: Option<f64>, ours: f64) -> Point {
        Point { figure: "1", series: series.to_owned(), x: At::Number(x), paper, ours, kind: Kind::Predicted }
    }

    #[test]
    fn both_curves_are_drawn_and_a_value_above_the_area_stays_in_it() {
        let panel = Panel { y: "a < b", x: "x", y_max: Some(10.0), series: &["s"] };
        let points =
            [point("s", 1.0, Some(1.0), 2.0), point("s", 2.0, Some(1.0), 900.0), point("t", 1.0, None, 1.0)];
        let text = svg("title", &[panel], &points);
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        assert_eq!((text.matches("<polyline").count(), text.matches("dasharray").count()), (2, 1), "{text}");
        assert!(text.contains("a &lt; b") && !text.contains(">t<"), "{text}");
        let solid =
            text.lines().find(|line| line.contains("polyline") && !line.contains("dasharray")).unwrap();
        let list = solid.split('"').nth(1).unwrap();
        let heights: Vec<f64> =
            list.split(' ').map(|pair| pair.split_once(',').unwrap().1.parse().unwrap()).collect();
        assert_eq!(heights, [TITLE_HEIGHT + BOTTOM - 0.2 * (BOTTOM - TOP), TITLE_HEIGHT + TOP]);
    }

    #[test]
    fn figures_without_points_are_empty_and_numbers_are_short() {
        let panel = Panel { y: "y", x: "x", y_max: None, series: &[] };
        assert!(!svg("t", &[panel], &[]).contains("NaN"));
        assert_eq!([2.0, 0.25, 0.0].map(number), ["2", "0.25", "0"]);
    }
}

//! Hit rate over capacity, as an SVG: lines, marks, axes and a legend.

use super::simulate::{BELADY, Row, Simulation, Tokens};
use crate::svg::{Mark, STYLES, Svg};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
/// The edges of the plot area.
const LEFT: f64 = 64.0;
const RIGHT: f64 = WIDTH - 170.0;
const TOP: f64 = 48.0;
const BOTTOM: f64 = HEIGHT - 60.0;
/// Minimum distance of labels on the capacity axis.
const LABEL_SPACE: f64 = 56.0;

const BELADY_COLOUR: &str = "#555555";

/// The content of the file.
pub(super) fn svg(simulation: &Simulation, title: &str) -> String {
    let mut points: Vec<(usize, u64)> = simulation.capacities_tokens.iter().copied().enumerate().collect();
    points.sort_by_key(|(_, tokens)| *tokens);
    let scale = Scale::new(simulation, &points);
    let mut svg = Svg::new(WIDTH, HEIGHT, LEFT, title);
    axes(&mut svg, &scale, &points);
    for (nth, row) in simulation.rows.iter().enumerate() {
        draw(&mut svg, nth, row, &scale, &points);
    }
    svg.finished()
}

/// Grid lines, marks of the capacities, and the labels of both axes.
fn axes(svg: &mut Svg, scale: &Scale, points: &[(usize, u64)]) {
    for step in 0..=scale.steps {
        let rate = scale.top * f64::from(step) / f64::from(scale.steps);
        let y = scale.y(rate);
        svg.line(format_args!(
            r##"<line x1="{LEFT}" y1="{y:.1}" x2="{RIGHT}" y2="{y:.1}" stroke="#dddddd"/>"##
        ));
        svg.line(format_args!(
            r##"<text x="{:.1}" y="{:.1}" text-anchor="end">{:.0} %</text>"##,
            LEFT - 8.0,
            y + 4.5,
            rate * 100.0
        ));
    }
    let mut labelled = f64::NEG_INFINITY;
    for (_, tokens) in points {
        let x = scale.x(*tokens);
        svg.line(format_args!(
            r##"<line x1="{x:.1}" y1="{BOTTOM}" x2="{x:.1}" y2="{:.1}" stroke="#222222"/>"##,
            BOTTOM + 5.0
        ));
        if x - labelled >= LABEL_SPACE {
            labelled = x;
            svg.line(format_args!(
                r##"<text x="{x:.1}" y="{:.1}" text-anchor="middle">{}</text>"##,
                BOTTOM + 21.0,
                Tokens::of(*tokens)
            ));
        }
    }
    svg.line(format_args!(r##"<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#222222"/>"##));
    svg.line(format_args!(
        r##"<text x="{:.1}" y="{:.1}" text-anchor="middle">capacity, tokens (logarithmic)</text>"##,
        (LEFT + RIGHT) / 2.0,
        BOTTOM + 44.0
    ));
    svg.line(format_args!(
        r##"<text transform="translate(18 {:.1}) rotate(-90)" text-anchor="middle">hit rate</text>"##,
        (TOP + BOTTOM) / 2.0
    ));
}

/// The line of one policy, its marks, and its entry in the legend.
fn draw(svg: &mut Svg, nth: usize, row: &Row, scale: &Scale, points: &[(usize, u64)]) {
    let bound = row.policy == BELADY;
    let (colour, mark) = if bound { (BELADY_COLOUR, Mark::Disc) } else { STYLES[nth % STYLES.len()] };
    let dash = if bound { r#" stroke-dasharray="6 4""# } else { "" };
    let places: Vec<(f64, f64)> =
        points.iter().map(|(at, tokens)| (scale.x(*tokens), scale.y(row.hit_rates[*at]))).collect();
    let list: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    svg.line(format_args!(
        r##"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>"##,
        list.join(" ")
    ));
    let marks: String = places.iter().map(|(x, y)| mark.drawn(*x, *y)).collect();
    svg.line(format_args!(r##"<path d="{marks}" fill="{colour}"/>"##));

    let (x, y) = (RIGHT + 20.0, TOP + 10.0 + 24.0 * nth as f64);
    svg.line(format_args!(
        r##"<path d="M{x:.1} {y:.1}h28" stroke="{colour}" stroke-width="2"{dash}/><path d="{}" fill="{colour}"/>"##,
        mark.drawn(x + 14.0, y)
    ));
    let name = row.label();
    svg.line(format_args!(r##"<text x="{:.1}" y="{:.1}">{name}</text>"##, x + 36.0, y + 4.5));
}
/// Converts capacities and rates to coordinates.
struct Scale {
    least: f64,
    most: f64,
    /// The rate at the upper end of the axis, and the number of grid lines up to it.
    top: f64,
    steps: u32,
}

impl Scale {
    fn new(simulation: &Simulation, points: &[(usize, u64)]) -> Self {
        let end = |point: Option<&(usize, u64)>| point.map_or(1.0, |(_, tokens)| (*tokens as f64).ln());
        let highest = simulation.rows.iter().flat_map(|row| &row.hit_rates).copied().fold(0.0, f64::max);
        // Grid lines at round percentages, eight at most.
        let percents = [1, 2, 5, 10, 20];
        let step = percents.into_iter().find(|step| highest * 100.0 <= f64::from(8 * step)).unwrap_or(20);
        let steps = ((highest * 100.0 / f64::from(step)).ceil() as u32).max(1);
        let top = f64::from(steps * step) / 100.0;
        Self { least: end(points.first()), most: end(points.last()), top, steps }
    }

    fn x(&self, tokens: u64) -> f64 {
        let width = self.most - self.least;
        let share = if width > 0.0 { ((tokens as f64).ln() - self.least) / width } else { 0.5 };
        // Marks keep a distance from the axis.
        LEFT + 16.0 + share * (RIGHT - LEFT - 32.0)
    }

    fn y(&self, rate: f64) -> f64 {
        BOTTOM - rate / self.top * (BOTTOM - TOP)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn simulation(capacities_tokens: Vec<u64>, rows: Vec<Row>) -> Simulation {
        Simulation { capacities_tokens, rows, ..Simulation::default() }
    }

    #[test]
    fn a_higher_rate_is_drawn_higher_and_a_larger_pool_further_right() {
        let rows = vec![
            Row { policy: "lru", hit_rates: vec![0.3, 0.1], ..Row::default() },
            Row { policy: BELADY, hit_rates: vec![0.5, 0.4], ..Row::default() },
        ];
        let text = svg(&simulation(vec![4_000_000, 1_000_000], rows), "a <b> & c");
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        assert!(text.contains("a &lt;b&gt; &amp; c") && text.contains(">belady (bound)<"), "{text}");
        assert!(
            text.contains(">1M<")
                && text.contains(">4M<")
                && text.contains(">10 %<")
                && text.contains(">50 %<"),
            "{text}"
        );
        let lines: Vec<Vec<(f64, f64)>> = text
            .lines()
            .filter_map(|line| line.strip_prefix("<polyline points=\"")?.split('"').next())
            .map(|list| {
                let place = |pair: &str| {
                    let (x, y) = pair.split_once(',').unwrap();
                    (x.parse().unwrap(), y.parse().unwrap())
                };
                list.split(' ').map(place).collect()
            })
            .collect();
        let [lru, belady] = &lines[..] else { panic!("{text}") };
        assert!(lru[0].0 < lru[1].0 && lru[1].1 < lru[0].1, "{lru:?}");
        assert!(belady.iter().zip(lru).all(|(belady, lru)| belady.1 < lru.1), "{lines:?}");
    }

    #[test]
    fn one_capacity_and_no_hit_at_all_can_be_drawn() {
        let text = svg(
            &simulation(vec![512], vec![Row { policy: "fifo", hit_rates: vec![0.0], ..Row::default() }]),
            "t",
        );
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}

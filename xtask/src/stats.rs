//! Medians, and the formatting of durations and tables.

use std::time::Duration;

/// Median, minimum and maximum of some figures.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spread {
    /// The middle figure, or the mean of the middle two.
    pub(crate) median: f64,
    /// The smallest figure.
    pub(crate) min: f64,
    /// The largest figure.
    pub(crate) max: f64,
}

impl Spread {
    /// The spread of `figures`; all zero when there are none.
    pub(crate) fn of(figures: &[f64]) -> Self {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(min), Some(max)) = (sorted.first(), sorted.last()) else { return Self::default() };
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        };
        Self { median, min: *min, max: *max }
    }
}

/// `0.8 s`, `12 s`, `3 min 07 s`.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..10 => format!("{:.1} s", duration.as_secs_f64()),
        10..60 => format!("{seconds} s"),
        _ => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

/// A table in which each column is as wide as its widest cell; the first row is the heading.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}", width = *width));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        assert_eq!(Spread::of(&[4.0, 1.0, 3.0, 2.0]), Spread { median: 2.5, min: 1.0, max: 4.0 });
        assert_eq!(Spread::of(&[9.0, 1.0, 5.0]).median, 5.0);
        assert_eq!(Spread::of(&[]), Spread::default());
    }

    #[test]
    fn a_table_aligns_its_columns() {
        let row = |cells: [&str; 2]| cells.map(str::to_owned).to_vec();
        assert_eq!(table(&[row(["a", "bb"]), row(["ccc", "d"])]), "a    bb\nccc  d");
    }

    #[test]
    fn durations_grow_coarser_as_they_grow() {
        assert_eq!(duration(Duration::from_millis(840)), "0.8 s");
        assert_eq!(duration(Duration::from_secs(12)), "12 s");
        assert_eq!(duration(Duration::from_secs(187)), "3 min 07 s");
    }
}

//! Parts of plots as SVG: lines of text, colours, marks.

use std::fmt::Write as _;

/// Okabe and Ito's colours, which are distinguishable with colour vision deficiency, and a mark for each.
pub(crate) const STYLES: [(&str, Mark); 6] = [
    ("#0072b2", Mark::Disc),
    ("#d55e00", Mark::Square),
    ("#009e73", Mark::Diamond),
    ("#cc79a7", Mark::Triangle),
    ("#e69f00", Mark::Disc),
    ("#56b4e9", Mark::Square),
];

/// The shape of a point.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mark {
    Disc,
    Square,
    Diamond,
    Triangle,
}

impl Mark {
    /// The path of the mark around a point.
    pub(crate) fn drawn(self, x: f64, y: f64) -> String {
        match self {
            Self::Disc => format!("M{:.1} {y:.1}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", x - 4.0),
            Self::Square => format!("M{:.1} {:.1}h7v7h-7z", x - 3.5, y - 3.5),
            Self::Diamond => format!("M{x:.1} {:.1}l5 5l-5 5l-5 -5z", y - 5.0),
            Self::Triangle => format!("M{x:.1} {:.1}l5 8h-10z", y - 5.0),
        }
    }
}

/// The lines of a file so far.
#[derive(Debug)]
pub(crate) struct Svg(String);

impl Svg {
    /// A white page with a title.
    pub(crate) fn new(width: f64, height: f64, left: f64, title: &str) -> Self {
        let mut svg = Self(String::new());
        let title = escaped(title);
        svg.line(format_args!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="#222222">"##
        ));
        svg.line(format_args!(r##"<title>{title}</title>"##));
        svg.line(format_args!(r##"<rect width="{width}" height="{height}" fill="#ffffff"/>"##));
        svg.line(format_args!(
            r##"<text x="{left}" y="26" font-size="15" font-weight="600">{title}</text>"##
        ));
        svg
    }

    /// Adds a line.
    pub(crate) fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = self.0.write_fmt(text);
        self.0.push('\n');
    }

    /// The content of the file.
    pub(crate) fn finished(mut self) -> String {
        self.line(format_args!("</svg>"));
        self.0
    }
}

/// Text without characters that mean something in SVG.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            letter if letter.is_control() => out.push('\u{fffd}'),
            letter => out.push(letter),
        }
    }
    out
}

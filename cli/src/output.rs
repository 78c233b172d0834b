//! Output on stdout: tables for people, JSON for programs. When the reader closes stdout, the command ends
//! without an error message.

use std::io::{self, Write as _};

use serde::Serialize;

use crate::exit::{Exit, Failure};

/// Prints `text` unchanged.
///
/// # Errors
/// A silent failure when the reader has closed stdout (`| head`); otherwise a failure when stdout cannot be
/// written.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// Prints `bytes` unchanged. Errors as [`print()`].
pub(crate) fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::silent(Exit::Ok).into()),
        Err(error) => Err(Failure::failed(format!("cannot write to stdout: {error}")).into()),
    }
}

/// Prints one JSON value and a newline. Errors as [`print()`].
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string(value)?;
    text.push('\n');
    print(&text)
}

/// How a piece of text is highlighted on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    /// Not highlighted.
    Plain,
    /// Something is wrong.
    Bad,
    /// Something may soon be wrong.
    Warning,
    /// A heading.
    Strong,
    /// Background information.
    Faint,
}

impl Tone {
    /// The text with the escape sequences of this tone; unchanged when `colour` is false.
    pub(crate) fn paint(self, text: &str, colour: bool) -> String {
        let code = match self {
            _ if !colour => return text.to_owned(),
            Self::Plain => return text.to_owned(),
            Self::Bad => "31;1",
            Self::Warning => "33",
            Self::Strong => "1",
            Self::Faint => "2",
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }
}

/// Whether to colour stdout: it is a terminal, and NO_COLOR (no-color.org) is not set.
pub(crate) fn is_coloured() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && io::IsTerminal::is_terminal(&io::stdout())
}

/// The first `columns` columns of a line. Escape sequences take no columns.
pub(crate) fn clip(line: &str, columns: usize) -> String {
    let (mut out, mut shown, mut in_code) = (String::new(), 0, false);
    for c in line.chars() {
        if c == '\u{1b}' {
            in_code = true;
        }
        if in_code {
            out.push(c);
            in_code = c != 'm';
        } else if shown + char_width(c) <= columns {
            out.push(c);
            shown += char_width(c);
        } else {
            // The next character must not move into the gap that a wide character leaves.
            shown = columns;
        }
    }
    out
}

/// The first column is never cut to less than this, columns.
const FIRST_MIN: usize = 12;

/// Alignment of a column's cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A table with a header; each column is as wide as its widest cell.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns. If all names are empty, no header is printed.
    pub(crate) fn new(columns: &[(&'static str, Align)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row.
    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Width of the widest line, columns.
    pub(crate) fn width(&self) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)
    }

    /// The whole table, within `columns` columns if possible: the first column that holds text is cut, to
    /// [`FIRST_MIN`] at least.
    pub(crate) fn render_in(&self, columns: usize) -> String {
        let over = self.width().saturating_sub(columns);
        let Some(first) = self.columns.iter().position(|(_, align)| *align == Align::Left) else {
            return self.render();
        };
        let most = self.widths()[first].saturating_sub(over).max(FIRST_MIN);
        let mut cut = self.clone();
        for cell in cut.rows.iter_mut().filter_map(|row| row.get_mut(first)) {
            if width(cell) > most {
                *cell = shortened(cell, most);
            }
        }
        cut.render()
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths: Vec<usize> = self.columns.iter().map(|(name, _)| width(name)).collect();
        for row in &self.rows {
            for (most, cell) in widths.iter_mut().zip(row) {
                *most = width(cell).max(*most);
            }
        }
        widths
    }

    /// The whole table as text.
    pub(crate) fn render(&self) -> String {
        let widths = self.widths();
        let mut out = String::new();
        if self.columns.iter().any(|(name, _)| !name.is_empty()) {
            self.line(&mut out, &widths, self.columns.iter().map(|(name, _)| *name));
        }
        for row in &self.rows {
            self.line(&mut out, &widths, row.iter().map(String::as_str));
        }
        out
    }

    fn line<'a>(&self, out: &mut String, widths: &[usize], cells: impl Iterator<Item = &'a str>) {
        let start = out.len();
        for (i, (cell, &most)) in cells.zip(widths).enumerate() {
            if i > 0 {
                out.push_str("  ");
            }
            let pad = most - width(cell).min(most);
            match self.columns[i].1 {
                Align::Left => {
                    out.push_str(cell);
                    out.extend(std::iter::repeat_n(' ', pad));
                }
                Align::Right => {
                    out.extend(std::iter::repeat_n(' ', pad));
                    out.push_str(cell);
                }
            }
        }
        let end = start + out[start..].trim_end().len();
        out.truncate(end);
        out.push('\n');
    }
}

/// A table whose rows are printed one by one: a column is as wide as its header, and at least `WIDTH_MIN`.
#[derive(Clone, Debug)]
pub(crate) struct LiveTable {
    table: Table,
    widths: Vec<usize>,
    started: bool,
}

const WIDTH_MIN: usize = 7;

impl LiveTable {
    /// An empty table with these columns.
    pub(crate) fn new(columns: &[(&'static str, Align)]) -> Self {
        let widths = columns.iter().map(|(name, _)| width(name).max(WIDTH_MIN)).collect();
        Self { table: Table::new(columns), widths, started: false }
    }

    /// Prints a row, and the header before the first one. Errors as [`print()`].
    pub(crate) fn row(&mut self, cells: &[String]) -> anyhow::Result<()> {
        let mut out = String::new();
        if !self.started {
            self.table.line(&mut out, &self.widths, self.table.columns.iter().map(|(name, _)| *name));
            self.started = true;
        }
        self.table.line(&mut out, &self.widths, cells.iter().map(String::as_str));
        print(&out)
    }
}

/// The beginning and the end of a text, within `columns` columns: names often differ only in their last
/// characters.
fn shortened(text: &str, columns: usize) -> String {
    let room = columns.saturating_sub(1);
    let head = clip(text, room.div_ceil(2));
    let mut tail: Vec<char> = Vec::new();
    let mut left = room - width(&head);
    for c in text.chars().rev() {
        match left.checked_sub(char_width(c)) {
            Some(rest) => left = rest,
            None => break,
        }
        tail.push(c);
    }
    head + "…" + &tail.into_iter().rev().collect::<String>()
}

/// A key, or any other text of foreign origin, escaped so that it fits on one terminal line and cannot
/// control the terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            if c.is_control() || is_format(c) { c.escape_default().collect::<Vec<_>>() } else { vec![c] }
        })
        .collect()
}

/// Whether a character changes how others are shown: direction marks and joiners, which can make one name
/// look like another.
fn is_format(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// As [`printable`], cut to the length of a line: for messages that name a key.
pub(crate) fn brief(text: &str) -> String {
    const CHARS_MAX: usize = 64;
    let text = printable(text);
    match text.char_indices().nth(CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1 object`, `2,000 objects`.
pub(crate) fn counted(number: u64, one: &str) -> String {
    format!("{} {one}{}", thousands(number), if number == 1 { "" } else { "s" })
}

/// A number with as many decimals as suit its size.
pub(crate) fn figure(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v >= 1000.0 => thousands(value.round() as u64),
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.2e}"),
    }
}

/// A number for JSON: rounded to six significant digits.
pub(crate) fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(5 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

/// Width of the text on a terminal, columns.
pub(crate) fn width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

/// Width of one character: combining marks take no column, East Asian characters and emoji take two.
fn char_width(c: char) -> usize {
    match c {
        '\u{300}'..='\u{36f}' | '\u{20d0}'..='\u{20ff}' | '\u{fe00}'..='\u{fe0f}' => 0,
        '\u{1100}'..='\u{115f}'
        | '\u{2e80}'..='\u{303e}'
        | '\u{3041}'..='\u{a4cf}'
        | '\u{ac00}'..='\u{d7a3}'
        | '\u{f900}'..='\u{faff}'
        | '\u{fe30}'..='\u{fe6f}'
        | '\u{ff00}'..='\u{ff60}'
        | '\u{ffe0}'..='\u{ffe6}'
        | '\u{1f300}'..='\u{1f64f}'
        | '\u{1f900}'..='\u{1f9ff}'
        | '\u{20000}'..='\u{3fffd}' => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_have_no_trailing_blanks() {
        let mut table = Table::new(&[("name", Align::Left), ("bytes", Align::Right), ("", Align::Left)]);
        table.row(["a", "1", ""]);
        table.row(["longer", "1234567", "µ"]);
        assert_eq!(table.render(), "name      bytes\na             1\nlonger  1234567  µ\n");
    }

    #[test]
    fn a_table_that_is_too_wide_has_its_first_texts_cut() {
        let mut table = Table::new(&[("no", Align::Right), ("name", Align::Left), ("bytes", Align::Right)]);
        table.row(["1", "a-name-of-24-characters-", "5"]);
        table.row(["2", "short", "6"]);
        assert_eq!(table.width(), 35);
        assert_eq!(table.render_in(35), table.render());
        assert_eq!(
            table.render_in(30),
            "no  name                 bytes\n 1  a-name-of…aracters-      5\n 2  short                    6\n"
        );
        assert!(table.render_in(0).contains("a-name…ters-"));
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let mut table = Table::new(&[("name", Align::Left), ("bytes", Align::Right)]);
        table.row(["\u{95ee}\u{5019}", "1"]);
        table.row(["e\u{301}", "2"]);
        assert_eq!(table.render(), "name  bytes\n\u{95ee}\u{5019}      1\ne\u{301}         2\n");
        assert_eq!(
            [clip("\u{95ee}\u{5019}a", 3), clip("\u{95ee}\u{5019}a", 4)],
            ["\u{95ee}", "\u{95ee}\u{5019}"]
        );
    }

    #[test]
    fn keys_cannot_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\nc é"), "a\\u{1b}[2Jb\\nc é");
        assert_eq!(printable("a\u{202e}fdp.exe"), "a\\u{202e}fdp.exe");
        assert_eq!(brief(&"é".repeat(65)), "é".repeat(64) + "…");
    }

    #[test]
    fn a_line_is_cut_where_the_terminal_ends_and_keeps_its_tone() {
        let line = Tone::Bad.paint("abcdef", true) + "gh";
        assert_eq!(clip(&line, 3), "\u{1b}[31;1mabc\u{1b}[0m");
        assert_eq!(clip(&line, 7), "\u{1b}[31;1mabcdef\u{1b}[0mg");
        assert_eq!(Tone::Bad.paint("abc", false), "abc");
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1, 2_000].map(|n| counted(n, "node")), ["0 nodes", "1 node", "2,000 nodes"]);
        assert_eq!(
            [0.0, 0.366, 7.25, 42.25, 421.6, 12_345.6].map(figure),
            ["0", "0.37", "7.25", "42.2", "422", "12,346"]
        );
        assert_eq!(
            [0.0, 0.123_456_789, 1_234_567.8, f64::NAN].map(rounded),
            [0.0, 0.123_457, 1_234_570.0, 0.0]
        );
    }
}

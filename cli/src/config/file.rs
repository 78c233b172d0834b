//! The settings file: TOML, with the line number of every value.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Map, Value};
use toml::Spanned;
use toml::de::{DeInteger, DeTable, DeValue};

use super::{Entry, Origin, Problem, Renamed, keys, readings};

/// Longest file, bytes. A typical settings file has a few thousand.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Every value of the file: those by an old name, then the others, each in the order of the file. Errors are
/// added to `problems`, old names to `renamed`, and fabrics that this build lacks to `not_built`.
pub(super) fn entries(
    path: &Path,
    problems: &mut Vec<Problem>,
    renamed: &mut Vec<Renamed>,
    not_built: &mut BTreeSet<&'static str>,
) -> Vec<Entry> {
    let at = |line| Origin::File { path: path.to_owned(), line };
    let text = match read(path) {
        Ok(text) => text,
        Err(what) => {
            problems.push(Problem { at: at(0), key: String::new(), what });
            return Vec::new();
        }
    };
    let lines = Lines(&text);
    match DeTable::parse(&text) {
        Ok(table) => {
            let mut walk = Walk { lines, path, entries: Vec::new(), problems, renamed, not_built };
            walk.table("", table.get_ref());
            // The later entry of a setting wins: the new name, wherever the two stand in the file.
            walk.entries.sort_by_key(|entry| !entry.by_old_name);
            walk.entries
        }
        Err(error) => {
            let line = lines.of(error.span().map_or(0, |span| span.start));
            let what = format!("not TOML: {}", error.message());
            problems.push(Problem { at: at(line), key: String::new(), what });
            Vec::new()
        }
    }
}

/// Parses a value in TOML syntax that was given in a shell.
pub(super) fn literal(text: &str) -> Option<Value> {
    let line = format!("x = {text}");
    let table = DeTable::parse(&line).ok()?;
    // Exactly one value: a text with a second line is refused.
    let table = table.get_ref();
    (table.len() == 1).then(|| table.iter().next().map(|(_, value)| json(value.get_ref()))).flatten()
}

fn read(path: &Path) -> Result<String, String> {
    let refused =
        |error: std::io::Error| format!("cannot be read: {error}; check --config and SNOWSKIN_CONFIG");
    let len = std::fs::metadata(path).map_err(refused)?.len();
    if len > FILE_BYTES_MAX {
        return Err(format!(
            "has {len} bytes, more than {FILE_BYTES_MAX}: check --config and SNOWSKIN_CONFIG"
        ));
    }
    std::fs::read_to_string(path).map_err(refused)
}

struct Walk<'a> {
    lines: Lines<'a>,
    path: &'a Path,
    entries: Vec<Entry>,
    problems: &'a mut Vec<Problem>,
    renamed: &'a mut Vec<Renamed>,
    not_built: &'a mut BTreeSet<&'static str>,
}

impl Walk<'_> {
    fn table(&mut self, prefix: &str, table: &DeTable<'_>) {
        // In the order of the file, so that problems are listed in the order of lines.
        let mut rows: Vec<_> = table.iter().collect();
        rows.sort_by_key(|(name, _)| name.span().start);
        for (name, value) in rows {
            self.row(&format!("{prefix}{}", name.get_ref()), name.span().start, value);
        }
    }

    fn row(&mut self, path: &str, offset: usize, value: &Spanned<DeValue<'_>>) {
        let at = Origin::File { path: self.path.to_owned(), line: self.lines.of(offset) };
        let own = keys::find(path);
        let by_old_name = own.is_none();
        if let Some(key) = own.or_else(|| keys::find_renamed(path)) {
            if by_old_name {
                self.renamed.push((path.to_owned(), key));
            }
            let readings = match value.get_ref() {
                DeValue::String(text) => readings(key, text, false),
                value => vec![json(value)],
            };
            self.entries.push(Entry { key, at, readings, by_old_name });
            return;
        }
        if let Some(fabric) = keys::fabric_not_built(path) {
            self.not_built.insert(fabric);
            return;
        }
        let section = format!("{path}.");
        let is_section = keys::is_section(&section);
        let what = match value.get_ref() {
            DeValue::Table(table) if is_section => return self.table(&section, table),
            _ if is_section => format!("is a section: write [{path}], and its settings below"),
            _ => match keys::nearest(path) {
                Some(near) => format!("no such setting; did you mean {near}?"),
                None => "no such setting".to_owned(),
            },
        };
        self.problems.push(Problem { at, key: path.to_owned(), what });
    }
}

struct Lines<'a>(&'a str);

impl Lines<'_> {
    fn of(&self, offset: usize) -> usize {
        1 + self.0.as_bytes()[..offset.min(self.0.len())].iter().filter(|byte| **byte == b'\n').count()
    }
}

fn json(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(number) => integer(number),
        // A number that does not parse stays a text, which its setting refuses.
        DeValue::Float(number) => {
            let text = number.as_str();
            text.parse::<f64>().map_or_else(|_| Value::from(text), Value::from)
        }
        DeValue::Boolean(value) => Value::from(*value),
        DeValue::Datetime(time) => Value::from(time.to_string()),
        DeValue::Array(values) => values.iter().map(|value| json(value.get_ref())).collect(),
        DeValue::Table(table) => {
            let rows = table.iter().map(|(name, value)| (name.get_ref().to_string(), json(value.get_ref())));
            Value::Object(rows.collect::<Map<_, _>>())
        }
    }
}

fn integer(number: &DeInteger<'_>) -> Value {
    let (text, radix) = (number.as_str(), number.radix());
    i64::from_str_radix(text, radix)
        .map(Value::from)
        .or_else(|_| u64::from_str_radix(text, radix).map(Value::from))
        .unwrap_or_else(|_| Value::from(text))
}

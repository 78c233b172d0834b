//! Comments and Markdown prose end at the column at which rustfmt breaks code.

use super::{Finding, Source, TRANSLATION};

const COLUMNS_MAX: usize = 110;

pub(super) fn check(source: &Source) -> Vec<Finding> {
    let is_prose: fn(&str) -> bool = match source.path.rsplit_once('.') {
        Some((_, "rs")) => |line| line.trim_start().starts_with("//"),
        // A translation breaks its lines where its language allows.
        Some((_, "md")) if !source.path.ends_with(TRANSLATION) => |_| true,
        _ => return Vec::new(),
    };
    let mut in_code = false;
    let mut findings = Vec::new();
    for (index, line) in source.text.lines().enumerate() {
        if !is_prose(line) {
            in_code = false;
            continue;
        }
        let text = line.trim_start().trim_start_matches(['/', '!']).trim_start();
        if text.starts_with("```") {
            in_code = !in_code;
        } else if !in_code && !text.starts_with(['|', '#']) && columns(line) > COLUMNS_MAX {
            let what = format!("{} columns of prose: wrap it at {COLUMNS_MAX}", columns(line));
            findings.push(source.finding(index + 1, what));
        }
    }
    findings
}

/// Columns of a line without what cannot be broken: the targets of links, and addresses.
fn columns(line: &str) -> usize {
    let mut columns = 0;
    let mut rest = line;
    while let Some(at) = rest.find("](").map(|at| at + 2) {
        columns += rest[..at].chars().count();
        rest = rest[at..].split_once(')').map_or("", |(_, rest)| rest);
    }
    columns += rest.chars().count();
    let addresses = line.split_whitespace().filter(|word| word.contains("://") && !word.contains("]("));
    columns - addresses.map(|word| word.chars().count()).sum::<usize>().min(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        check(&source).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn long_comments_and_prose_are_found() {
        let (short, long) = ("word ".repeat(21), "word ".repeat(23));
        let (short, long) = (short.trim_end(), long.trim_end());
        assert_eq!(lines("a.rs", &format!("/// {short}\n// {long}\n    //! {long}\n")), [2, 3]);
        assert_eq!(lines("a.md", &format!("{short}\n{long}\n")), [2]);
    }

    #[test]
    fn code_tables_headings_links_and_addresses_are_exempt() {
        let long = "word ".repeat(30);
        for text in [
            format!("let a = \"{long}\";\n"),
            format!("/// | {long} |\n"),
            format!("/// ```text\n/// {long}\n/// ```\n"),
            format!("// see https://example.org/{}\n", "a".repeat(110)),
            format!("/// [`a`](crate::{})\n", "a".repeat(110)),
        ] {
            assert_eq!(lines("a.rs", &text), Vec::<usize>::new(), "{text}");
        }
        let text = format!("# {long}\n| {long} |\n```sh\n{long}\n```\n{long}\n");
        assert_eq!(lines("a.md", &text), [6]);
        assert_eq!(lines("a.zh-CN.md", &text), Vec::<usize>::new());
        assert_eq!(lines("a.toml", &format!("# {long}\n")), Vec::<usize>::new());
    }
}

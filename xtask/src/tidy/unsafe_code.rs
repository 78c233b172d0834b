//! Unsafe code is only where CONTRIBUTING.md lists it: the list on that page is the rule.

use super::rust::{self, Line};
use super::{Finding, Source};

const PAGE: &str = "CONTRIBUTING.md";
const HEADING: &str = "### Where unsafe code may be";

/// One entry of the list.
#[derive(Debug)]
struct Entry {
    /// A file, or a directory with `/` at its end; `*/` at its beginning stands for every crate.
    path: String,
    /// Where the page lists it.
    line: usize,
}

impl Entry {
    fn covers(&self, path: &str) -> bool {
        let is_it = |entry: &str, path: &str| match entry.ends_with('/') {
            true => path.starts_with(entry),
            false => path == entry,
        };
        match self.path.strip_prefix("*/") {
            Some(entry) => path.split_once('/').is_some_and(|(_, path)| is_it(entry, path)),
            None => is_it(&self.path, path),
        }
    }
}

/// Checks all Rust files with their lines.
pub(super) fn check(sources: &[Source], rust: &[(&Source, Vec<Line>)]) -> Vec<Finding> {
    let Some(page) = sources.iter().find(|source| source.path == PAGE) else { return Vec::new() };
    let entries = entries(page);
    let mut needed = vec![false; entries.len()];
    let mut findings = Vec::new();
    for (source, lines) in rust {
        let Some(first) = lines.iter().position(|line| rust::has_token(&line.code, "unsafe")) else {
            continue;
        };
        let mut covered = false;
        for (_, needed) in entries.iter().zip(&mut needed).filter(|(entry, _)| entry.covers(&source.path)) {
            (covered, *needed) = (true, true);
        }
        if !covered {
            let what = format!(
                "unsafe code where {PAGE} does not list it: move it, or add the file with its reason"
            );
            findings.push(source.finding(first + 1, what));
        }
    }
    if entries.is_empty() {
        findings.push(page.finding(1, format!("`{HEADING}` lists no files")));
    }
    let idle = entries.iter().zip(&needed).filter(|(_, needed)| !**needed);
    findings.extend(idle.map(|(entry, _)| {
        page.finding(entry.line, format!("no file of `{}` has unsafe code: remove the entry", entry.path))
    }));
    findings
}

/// The paths in backticks below the heading.
fn entries(page: &Source) -> Vec<Entry> {
    let numbered = page.text.lines().enumerate().map(|(index, line)| (index + 1, line));
    let section = numbered.skip_while(|(_, line)| *line != HEADING).skip(1);
    let section = section.take_while(|(_, line)| !line.starts_with('#'));
    section
        .flat_map(|(line, text)| text.split('`').skip(1).step_by(2).map(move |path| (line, path)))
        .filter(|(_, path)| path.contains('/'))
        .map(|(line, path)| Entry { path: path.to_owned(), line })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }

    fn findings(list: &str, files: &[(&str, &str)]) -> Vec<(String, usize)> {
        let page = [source(PAGE, &format!("# Page\n\n{HEADING}\n\n{list}\n\n### Next: `not/this/`\n"))];
        let files: Vec<Source> = files.iter().map(|(path, text)| source(path, text)).collect();
        let files: Vec<_> = files.iter().map(|file| (file, rust::lines(&file.text))).collect();
        check(&page, &files).into_iter().map(|finding| (finding.path, finding.line)).collect()
    }

    #[test]
    fn unsafe_code_is_accepted_where_the_page_lists_it() {
        let list =
            "* System calls: `*/src/sys/`, `te-core/src/memory.rs` and `unsafe` words\n* Tools: `fuzz/`";
        let unsafe_code = "fn f() {\n    unsafe { g() }\n}\n";
        let files = [
            ("te-tcp/src/sys/mem.rs", unsafe_code),
            ("te-core/src/memory.rs", unsafe_code),
            ("fuzz/fuzz_targets/a.rs", unsafe_code),
            ("te-core/src/lib.rs", "#![deny(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe\";\n"),
        ];
        assert_eq!(findings(list, &files), []);
    }

    #[test]
    fn unsafe_code_elsewhere_and_an_entry_without_any_are_found() {
        let files = [("te-tcp/src/frame.rs", "fn f() {\n    unsafe { g() }\n}\n")];
        let expected = [("te-tcp/src/frame.rs".to_owned(), 2), (PAGE.to_owned(), 5)];
        assert_eq!(findings("* `*/src/sys/`", &files), expected);
    }

    #[test]
    fn a_list_that_is_gone_is_found() {
        assert_eq!(findings("", &[]), [(PAGE.to_owned(), 1)]);
    }
}

//! Files and functions have a greatest length, or a reason beside them.

use super::rust::{self, Block, Line};
use super::{Finding, Source};

const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 80;
/// What a reason begins with.
const REASON: &str = "// Long because: ";
/// Lines at the beginning of a file that may give its reason.
const FILE_HEAD_LINES: usize = 5;

pub(super) fn check(source: &Source, lines: &[Line]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if lines.len() > FILE_LINES_MAX && !lines.iter().take(FILE_HEAD_LINES).any(is_reason) {
        let what = format!(
            "the file has {} lines, more than {FILE_LINES_MAX}: split it, or begin it with `{REASON}...`",
            lines.len()
        );
        findings.push(source.finding(1, what));
    }
    let too_long = |block: &Block| {
        block.keyword == "fn" && block.lines() > FUNCTION_LINES_MAX && !has_reason(block, lines)
    };
    findings.extend(rust::blocks(lines).iter().filter(|block| too_long(block)).map(|block| {
        let what = format!(
            "`{}` has {} lines, more than {FUNCTION_LINES_MAX}: split it, or write `{REASON}...` above it",
            block.name,
            block.lines()
        );
        source.finding(block.first, what)
    }));
    findings
}

fn is_reason(line: &Line) -> bool {
    line.comment.strip_prefix(REASON).is_some_and(|reason| !reason.trim().is_empty())
}

/// Whether one of the comments and attributes above a function is a reason.
fn has_reason(block: &Block, lines: &[Line]) -> bool {
    let above = lines[..block.first - 1].iter().rev();
    above
        .take_while(|line| {
            let code = line.code.trim();
            !line.comment.is_empty() || (!code.is_empty() && !code.ends_with(['}', '{', ';']))
        })
        .any(is_reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(text: &str) -> usize {
        let source = Source { path: "a.rs".to_owned(), text: text.to_owned() };
        check(&source, &rust::lines(text)).len()
    }

    /// A function of this many lines, with lines above it.
    fn function(above: &str, lines: usize) -> String {
        format!("{above}fn long() {{\n{}}}\n", "    x();\n".repeat(lines - 2))
    }

    #[test]
    fn a_function_of_more_than_80_lines_is_found() {
        assert_eq!(findings(&function("", 80)), 0);
        assert_eq!(findings(&function("", 81)), 1);
    }

    #[test]
    fn a_reason_above_a_function_is_accepted() {
        assert_eq!(findings(&function("/// What.\n// Long because: one row per field.\n#[test]\n", 81)), 0);
        assert_eq!(findings(&function("// Long because: one row per field.\nfn other() {}\n\n", 81)), 1);
        assert_eq!(findings(&function("// Long because: \n", 81)), 1, "an empty reason");
    }

    #[test]
    fn a_file_of_more_than_800_lines_is_found_unless_it_begins_with_a_reason() {
        assert_eq!(findings(&"x();\n".repeat(800)), 0);
        assert_eq!(findings(&"x();\n".repeat(801)), 1);
        assert_eq!(findings(&format!("// Long because: it is a table.\n{}", "x();\n".repeat(801))), 0);
    }
}

//! Tests wait for conditions, not for time. A test that needs real time is in a file or a module named
//! `timing`.

use super::rust::{self, Block, Line};
use super::{Finding, Source};

/// Parts of a path that exempt a file: the suites that need time, tests on real devices, and the helpers that
/// wait for other tests.
const EXEMPT: [&str; 4] = ["timing", "hw-tests", "common", "testkit"];
/// Exempts a line, with a reason.
const MARK: &str = "// timing: ";

pub(super) fn check(source: &Source, lines: &[Line]) -> Vec<Finding> {
    let parts = || source.path.trim_end_matches(".rs").split('/');
    if parts().any(|part| EXEMPT.contains(&part)) {
        return Vec::new();
    }
    let is_test_file = parts().any(|part| part == "tests") || source.path.ends_with("_tests.rs");
    let blocks = rust::blocks(lines);
    let is_in = |line, name: &str| {
        blocks
            .iter()
            .any(|block: &Block| block.keyword == "mod" && block.name == name && block.contains(line))
    };
    let mut findings = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        let Some(what) = uses_time(&line.code) else { continue };
        let number = index + 1;
        let is_marked = |line: &Line| line.comment.contains(MARK);
        let above = index.checked_sub(1).map(|above| &lines[above]);
        let marked =
            is_marked(line) || above.is_some_and(|above| above.code.trim().is_empty() && is_marked(above));
        if (is_test_file || is_in(number, "tests")) && !is_in(number, "timing") && !marked {
            findings.push(source.finding(
                number,
                format!(
                    "`{what}` in a test: wait with `te_fabric::testkit::eventually`, move the test to a `timing` file, or \
                     write `{MARK}` and a reason"
                ),
            ));
        }
    }
    findings
}

fn uses_time(code: &str) -> Option<&'static str> {
    ["sleep(", "elapsed()"].into_iter().find(|call| {
        code.match_indices(call).any(|(at, _)| !code[..at].chars().next_back().is_some_and(rust::is_of_name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<usize> {
        let source = Source { path: path.to_owned(), text: text.to_owned() };
        check(&source, &rust::lines(text)).into_iter().map(|finding| finding.line).collect()
    }

    const SLEEP: &str = "fn a() {\n    thread::sleep(MS);\n    let b = start.elapsed();\n}\n";

    #[test]
    fn sleeps_and_elapsed_times_of_tests_are_found() {
        assert_eq!(findings("te-tcp/tests/laws.rs", SLEEP), [2, 3]);
        assert_eq!(findings("te-tcp/src/io/tests.rs", SLEEP), [2, 3]);
        assert_eq!(findings("te-tcp/src/io/mod.rs", &format!("{SLEEP}mod tests {{\n{SLEEP}}}\n")), [7, 8]);
    }

    #[test]
    fn timing_files_helpers_and_marked_lines_are_exempt() {
        for path in
            ["a/tests/timing.rs", "a/tests/timing/idle.rs", "a/tests/common/mod.rs", "a/src/testkit/wait.rs"]
        {
            assert_eq!(findings(path, SLEEP), Vec::<usize>::new(), "{path}");
        }
        assert_eq!(findings("a/tests/b.rs", &format!("mod timing {{\n{SLEEP}}}\n")), Vec::<usize>::new());
        let marked =
            "// timing: the lease has to run out\nsleep(MS);\nsleep(MS); // timing: the same\nsleep(MS);\n";
        assert_eq!(findings("a/tests/b.rs", marked), [4]);
    }

    #[test]
    fn other_names_and_texts_are_no_sleeps() {
        let text = "no_sleep();\nlet a = \"sleep(1)\"; // sleep(\nunsleep(1);\n";
        assert_eq!(findings("a/tests/b.rs", text), Vec::<usize>::new());
    }
}

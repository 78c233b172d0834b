//! Findings for people: by area, the worst first, one line each, with the fix below.

use std::cmp::Reverse;
use std::fmt::Write as _;

use super::checks::{Finding, Verdict};

/// All findings as text. Checks that do not apply are listed in one line per area.
pub(super) fn render(findings: &[Finding]) -> String {
    let width = findings.iter().map(|finding| finding.check.chars().count()).max().unwrap_or(0);
    let mut areas: Vec<&str> = findings.iter().map(|finding| finding.area).collect();
    areas.dedup();
    // The sort is stable: areas and checks with equal verdicts stay in the order of their tables.
    let worst = |area: &&str| findings.iter().filter(|f| f.area == *area).map(|f| f.verdict).max();
    areas.sort_by_key(|area| Reverse(worst(area)));
    let mut text = String::new();
    for area in areas {
        let mut of_area: Vec<&Finding> = findings.iter().filter(|finding| finding.area == area).collect();
        of_area.sort_by_key(|finding| Reverse(finding.verdict));
        text += &format!("{area}\n");
        for finding in of_area.iter().filter(|finding| finding.verdict > Verdict::Skip) {
            line(&mut text, finding, width);
        }
        skipped(&mut text, &of_area);
        text.push('\n');
    }
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    text += &match (count(Verdict::Fail), count(Verdict::Warn)) {
        (0, 0) => "Nothing to fix.\n".to_owned(),
        (failed, warned) => format!("{failed} failed, {warned} warned.\n"),
    };
    text
}

fn line(text: &mut String, finding: &Finding, width: usize) {
    let Finding { check, verdict, found, why, fix, .. } = finding;
    // Writing to a string cannot fail.
    let _ = writeln!(text, "  {:4}  {check:width$}  {found}", verdict.word());
    if let Some(fix) = fix {
        let _ = writeln!(text, "        {why}");
        let _ = writeln!(text, "        fix: {}", fix.words);
        if let Some(command) = &fix.command {
            let _ = writeln!(text, "          $ {command}");
        }
    }
}

/// One line per reason.
fn skipped(text: &mut String, findings: &[&Finding]) {
    let mut rest: Vec<&Finding> =
        findings.iter().copied().filter(|finding| finding.verdict == Verdict::Skip).collect();
    while let Some(first) = rest.first() {
        let reason = first.found.clone();
        let (same, others): (Vec<&Finding>, Vec<&Finding>) =
            rest.into_iter().partition(|finding| finding.found == reason);
        let names: Vec<&str> = same.iter().map(|finding| finding.check).collect();
        let _ = writeln!(text, "  {:4}  {}: {reason}", Verdict::Skip.word(), names.join(", "));
        rest = others;
    }
}

#[cfg(test)]
mod tests {
    use super::super::checks::Fix;
    use super::*;

    fn finding(area: &'static str, check: &'static str, verdict: Verdict, found: &str) -> Finding {
        let fix = (verdict > Verdict::Ok).then(|| Fix::from(("turn it", "turn it on")));
        Finding { area, check, verdict, found: found.to_owned(), why: "It matters.", fix }
    }

    #[test]
    fn the_worst_comes_first_with_its_fix_below_and_what_does_not_apply_takes_one_line() {
        let text = render(&[
            finding("a", "fine", Verdict::Ok, "yes"),
            finding("a", "x", Verdict::Skip, "no card"),
            finding("a", "y", Verdict::Skip, "unknown"),
            finding("a", "z", Verdict::Skip, "no card"),
            finding("b", "good", Verdict::Ok, "1"),
            finding("b", "bad", Verdict::Fail, "0"),
        ]);
        let expected = "b
  fail  bad   0
        It matters.
        fix: turn it
          $ turn it on
  ok    good  1

a
  ok    fine  yes
  skip  x, z: no card
  skip  y: unknown

1 failed, 0 warned.
";
        assert_eq!(text, expected);
    }
}

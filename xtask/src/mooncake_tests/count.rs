//! How many tests passed and were skipped, from what unittest and pytest print.

use std::fmt;

/// Numbers of tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) passed: u32,
    pub(super) skipped: u32,
    pub(super) failed: u32,
}

impl Count {
    pub(super) const fn of(passed: u32, skipped: u32) -> Self {
        Self { passed, skipped, failed: 0 }
    }

    /// The numbers in the output of a script. `None`: it has none, so the script did not run to its end.
    pub(super) fn in_output(output: &str) -> Option<Self> {
        let lines = || output.lines().rev();
        lines().find_map(of_pytest).or_else(|| {
            // unittest prints two lines: `Ran 16 tests in 9.1s` and `OK (skipped=1)`.
            let ran = lines().find_map(|line| line.strip_prefix("Ran ")?.split(' ').next()?.parse().ok())?;
            let end = lines().find(|line| line.starts_with("OK") || line.starts_with("FAILED"))?;
            let named = |name: &str| {
                let at = end.find(&format!("{name}="))? + name.len() + 1;
                end[at..].split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok()
            };
            let failed = named("failures").unwrap_or(0) + named("errors").unwrap_or(0);
            let skipped = named("skipped").unwrap_or(0);
            Some(Self { passed: u32::checked_sub(ran, failed + skipped)?, skipped, failed })
        })
    }
}

/// The numbers in a line such as `14 passed, 2 skipped in 3.21s`.
fn of_pytest(line: &str) -> Option<Count> {
    let line = line.trim_matches(['=', ' ']);
    let (counts, _) = line.split_once(" in ")?;
    let mut count = Count::default();
    for part in counts.split(", ") {
        let (number, what) = part.split_once(' ')?;
        let number: u32 = number.parse().ok()?;
        match what {
            "passed" => count.passed += number,
            "skipped" => count.skipped += number,
            "failed" | "error" | "errors" => count.failed += number,
            _ => {}
        }
    }
    Some(count)
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.passed)?;
        if self.skipped > 0 {
            write!(f, " + {} skipped", self.skipped)?;
        }
        if self.failed > 0 {
            write!(f, ", {} failed", self.failed)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unittest_and_pytest_print_their_counts() {
        let count = |output: &str| Count::in_output(output).map(|count| count.to_string());
        assert_eq!(count("..\nRan 16 tests in 9.123s\n\nOK\n").as_deref(), Some("16"));
        assert_eq!(count("Ran 10 tests in 1s\n\nOK (skipped=2)\n").as_deref(), Some("8 + 2 skipped"));
        let failed = "Ran 10 tests in 1s\n\nFAILED (failures=1, errors=2, skipped=1)\n";
        assert_eq!(count(failed).as_deref(), Some("6 + 1 skipped, 3 failed"));
        assert_eq!(count("....\n14 passed in 2.1s\n").as_deref(), Some("14"));
        assert_eq!(count("== 1 failed, 3 passed, 2 warnings in 2.10s ==").as_deref(), Some("3, 1 failed"));
    }

    #[test]
    fn an_output_without_counts_has_none() {
        for output in ["", "Ran\n", "Traceback (most recent call last):\n  in x", "Ran 3 tests in 1s\n"] {
            assert_eq!(Count::in_output(output), None, "{output:?}");
        }
    }
}

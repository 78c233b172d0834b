//! Which seeds a test runs: its default, or what the environment asks for. One syntax for every test of the
//! workspace.

use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::string::String;
use std::vec::Vec;

const SEED: &str = "SNOWSKIN_SEED";
const SEEDS: &str = "SNOWSKIN_SEEDS";

/// The seeds to run: those of `SNOWSKIN_SEED` or `SNOWSKIN_SEEDS`, or `default` where neither is set.
///
/// | variable | seeds |
/// |---|---|
/// | `SNOWSKIN_SEED=7` | 7 alone, whatever `SNOWSKIN_SEEDS` is |
/// | `SNOWSKIN_SEEDS=1000..2000` | 1000 to 1999 |
/// | `SNOWSKIN_SEEDS=100` | 0 to 99 |
///
/// The seeds are the default ones exactly when the result equals `default`: a test that also asserts on what
/// all of them together have seen compares.
///
/// # Panics
/// With this syntax, when a variable holds anything else or asks for no seed at all.
#[must_use]
pub fn seeds(default: Range<u64>) -> Range<u64> {
    match chosen(variable(SEED).as_deref(), variable(SEEDS).as_deref()) {
        Ok(seeds) => seeds.unwrap_or(default),
        Err(complaint) => panic!("{complaint}"),
    }
}

/// [`seeds`], for a loop over them: when its body panics, the seed is printed, with the command that runs the
/// test with this seed alone.
///
/// # Panics
/// As [`seeds`].
pub fn each_seed(default: Range<u64>) -> impl Iterator<Item = u64> {
    EachSeed { left: seeds(default), running: None }
}

/// What `run` returns for each of [`seeds`], in their order. All cores run seeds at the same time.
///
/// # Panics
/// As [`seeds`], and as `run` does: then the seed is printed, as for [`each_seed`].
pub fn on_all_cores<R: Send>(default: Range<u64>, run: impl Fn(u64) -> R + Sync) -> Vec<R> {
    let range = seeds(default);
    let next = AtomicU64::new(range.start);
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let one = || {
        let mut ended = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= range.end {
                return ended;
            }
            // Of the thread that asked: it has the name of the test.
            let running = Running { seed, test };
            ended.push((seed, run(seed)));
            core::mem::forget(running);
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut ended: Vec<(u64, R)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(one)).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.flat_map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    ended.sort_unstable_by_key(|(seed, _)| *seed);
    ended.into_iter().map(|(_, result)| result).collect()
}

/// A seed that runs: dropped only when it panics.
struct Running<'a> {
    seed: u64,
    test: &'a str,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let package = variable("CARGO_PKG_NAME").unwrap_or_default();
        std::eprintln!("{}", again(self.seed, &package, self.test));
    }
}

struct EachSeed {
    left: Range<u64>,
    running: Option<u64>,
}

impl Iterator for EachSeed {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.running = self.left.next();
        self.running
    }
}

impl Drop for EachSeed {
    fn drop(&mut self) {
        if let Some(seed) = self.running.filter(|_| std::thread::panicking()) {
            // Cargo sets the variable for tests, and the test harness names the thread after the test.
            let package = variable("CARGO_PKG_NAME").unwrap_or_default();
            let thread = std::thread::current();
            std::eprintln!("{}", again(seed, &package, thread.name().unwrap_or_default()));
        }
    }
}

fn again(seed: u64, package: &str, test: &str) -> String {
    std::format!("seed {seed} failed; run it alone:\n  {SEED}={seed} cargo test -p {package} {test}")
}

/// Whether `SNOWSKIN_SEED` asks for one seed alone, so that a test may print what it sees.
#[must_use]
pub fn one_seed() -> bool {
    std::env::var_os(SEED).is_some()
}

fn variable(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}

/// The seeds that the two variables ask for; `None` where neither is set.
fn chosen(seed: Option<&str>, seeds: Option<&str>) -> Result<Option<Range<u64>>, String> {
    let (name, text, range) = match (seed, seeds) {
        (Some(text), _) => (SEED, text, one(text)),
        (None, Some(text)) => (SEEDS, text, many(text)),
        (None, None) => return Ok(None),
    };
    match range {
        Some(range) => Ok(Some(range)),
        None => Err(std::format!(
            "{name}={text:?} names no seeds: write {SEED}=7 for one seed, {SEEDS}=1000..2000 for a range (the end is not \
             part of it), or {SEEDS}=100 for 0..100"
        )),
    }
}

fn one(text: &str) -> Option<Range<u64>> {
    let seed: u64 = text.parse().ok()?;
    Some(seed..seed.checked_add(1)?)
}

fn many(text: &str) -> Option<Range<u64>> {
    let range = match text.split_once("..") {
        Some((first, end)) => first.parse().ok()?..end.parse().ok()?,
        None => 0..text.parse().ok()?,
    };
    (!range.is_empty()).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_a_range_and_a_count_are_understood() {
        assert_eq!(chosen(None, None), Ok(None));
        assert_eq!(chosen(Some("7"), None), Ok(Some(7..8)));
        assert_eq!(chosen(None, Some("1000..2000")), Ok(Some(1000..2000)));
        assert_eq!(chosen(None, Some("100")), Ok(Some(0..100)));
        assert_eq!(chosen(Some("7"), Some("nonsense")), Ok(Some(7..8)), "one seed alone");
    }

    #[test]
    fn the_command_runs_one_seed_of_one_test() {
        let text = again(7, "te-core", "sim::tests::after_a_fence_no_write_lands_late");
        let command = "SNOWSKIN_SEED=7 cargo test -p te-core sim::tests::after_a_fence_no_write_lands_late";
        assert!(text.ends_with(command) && text.contains("seed 7"), "{text}");
    }

    #[test]
    fn the_seed_that_runs_is_known_to_the_end() {
        let mut each = EachSeed { left: 3..5, running: None };
        assert_eq!((each.next(), each.running), (Some(3), Some(3)));
        assert_eq!((each.next(), each.running), (Some(4), Some(4)));
        assert_eq!((each.next(), each.running), (None, None), "no seed runs after the loop");
    }

    #[test]
    fn anything_else_is_refused_with_the_syntax() {
        let max = "18446744073709551615";
        for text in ["", "a", "-1", "7..8", "7 ", "0x7", max] {
            assert!(chosen(Some(text), None).is_err(), "SNOWSKIN_SEED={text}");
        }
        for text in [
            "",
            "a",
            "0",
            "1..",
            "..2",
            "5..5",
            "6..5",
            "1..=2",
            "1...2",
            "1..2..3",
            "1, 2",
            "18446744073709551616",
        ] {
            let complaint = chosen(None, Some(text)).expect_err(text);
            assert!(complaint.contains("SNOWSKIN_SEEDS=1000..2000"), "{complaint}");
        }
    }
}

//! What the threads of the client share: counters, complaints and the end.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Complaints of one kind that are printed; all are counted.
const COMPLAINTS_MAX: u64 = 20;

/// Counters by name.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    counts: Mutex<BTreeMap<&'static str, u64>>,
    over: AtomicBool,
}

impl Shared {
    pub(crate) fn count(&self, name: &'static str, more: u64) -> u64 {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(name).or_default();
        *count += more;
        *count
    }

    pub(crate) fn set(&self, name: &'static str, value: u64) {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).insert(name, value);
    }

    /// Something that must not happen.
    pub(crate) fn complain(&self, kind: &'static str, text: &str) {
        if self.count(kind, 1) <= COMPLAINTS_MAX {
            say(&format!("complaint {kind}: {text}"));
        }
    }

    pub(crate) fn say_counts(&self) {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let words: Vec<String> = counts.iter().map(|(name, count)| format!("{name}={count}")).collect();
        drop(counts);
        say(&format!("counts {}", words.join(" ")));
    }

    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// Prints one line at once. If the parent does not read any more, it is about to end this process.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

//! Probers: a small request every few milliseconds, and when each was answered, so that outages can be
//! measured as clients see them.
//!
//! One prober of a client puts versions of one object, a register, another one reads an object that does not
//! change: a get of an object with a put under way waits for that put. A third thread reads the register: a
//! read that began after a put was acknowledged must not find an earlier version.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use store_client::{Client, Pin, PutOptions, Retention, Store as _};

use super::content;
use super::ledger::Read;
use super::shared::{Shared, say};

/// Answers that are remembered: minutes.
const TIMES_MAX: usize = 1 << 17;
/// Bytes of the register, at least.
const BYTES: usize = 2_048;
/// Puts after which the bytes that one put moves are known.
const SAMPLE_PUTS: u64 = 16;

const OPTIONS: PutOptions = PutOptions {
    retention: Retention { pin: Pin::Hard, ..Retention::DEFAULT },
    replicas: 2,
    ..PutOptions::DEFAULT
};

/// The times of the answers that a prober has received, ns since 1970.
#[derive(Debug, Default)]
pub(crate) struct Times(Mutex<VecDeque<u64>>);

impl Times {
    fn add(&self) {
        let mut times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() == TIMES_MAX {
            times.pop_front();
        }
        times.push_back(now_ns());
    }

    /// The longest time between two answers that follow each other, of which the second one came after
    /// `from`, and the first one before `to`, ns; with `begun`, the first one came after `from` as well, so
    /// that an outage does not count that had begun before. `None`: it may still go on.
    pub(crate) fn longest_gap(&self, from: u64, to: u64, begun: bool) -> Option<u64> {
        let times = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        longest_gap(times.iter().copied(), from, to, begun)
    }
}

fn longest_gap(times: impl Iterator<Item = u64>, from: u64, to: u64, begun: bool) -> Option<u64> {
    let (mut before, mut longest) = (None, 0);
    for time in times {
        if let Some(before) = before.replace(time)
            && time > from
            && before < to
            && (!begun || before > from)
        {
            longest = longest.max(time.saturating_sub(before));
        }
    }
    before.filter(|last| *last > from && *last >= to).map(|_| longest)
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// The probers of a client.
pub(crate) struct Probers {
    pub(crate) puts: Arc<Times>,
    pub(crate) gets: Arc<Times>,
    threads: Vec<JoinHandle<()>>,
}

impl Probers {
    /// They act as client number `who`.
    pub(crate) fn start(who: u64, clients: [Client; 3], pace: Duration, shared: &Arc<Shared>) -> Self {
        let [putter, getter, reader] = clients;
        let acked = Arc::new(AtomicU64::new(0));
        let (puts, gets) = (Arc::new(Times::default()), Arc::new(Times::default()));
        let put = {
            let (times, acked, shared) = (Arc::clone(&puts), Arc::clone(&acked), Arc::clone(shared));
            thread::spawn(move || probe_puts(who, putter, pace, &times, &acked, &shared))
        };
        let get = {
            let (times, shared) = (Arc::clone(&gets), Arc::clone(shared));
            thread::spawn(move || probe_gets(who, getter, pace, &times, &shared))
        };
        let shared = Arc::clone(shared);
        let read = thread::spawn(move || read_register(who, reader, pace * 4, &acked, &shared));
        Self { puts, gets, threads: vec![put, get, read] }
    }

    pub(crate) fn join(self) {
        self.threads.into_iter().for_each(|thread| drop(thread.join()));
    }
}

fn key(who: u64) -> Vec<u8> {
    format!("probe/{who}").into_bytes()
}

fn moved(client: &Client) -> u64 {
    client.engine_stats().rails.iter().map(|rail| rail.bytes).sum()
}

fn probe_puts(
    who: u64,
    mut client: Client,
    pace: Duration,
    times: &Times,
    acked: &AtomicU64,
    shared: &Shared,
) {
    let failing = AtomicBool::new(false);
    // Bytes that one byte of a value moves, and those that should have been moved.
    let (mut bytes, mut sample) = (0, None);
    for version in 1.. {
        if shared.is_over() {
            break;
        }
        let value = content::value(who, u64::MAX >> 16, version, BYTES);
        let before = moved(&client);
        match client.upsert(&key(who), value.as_slice(), &OPTIONS) {
            Ok(()) => {
                acked.store(version, Ordering::SeqCst);
                times.add();
                shared.count("probe_puts", 1);
                failing.store(false, Ordering::Relaxed);
                bytes += value.len() as u64;
                let ratio = (moved(&client) - before) as f64 / value.len() as f64;
                match sample {
                    None if version >= SAMPLE_PUTS => sample = Some(ratio),
                    // More than was needed: some of it was sent again.
                    Some(sample) if ratio > sample * 1.05 => {
                        let again = (ratio - sample) * value.len() as f64;
                        shared.count("probe_bytes_sent_again", again as u64);
                        shared.count("probe_puts_sent_again", 1);
                    }
                    _ => {}
                }
            }
            Err(error) => {
                shared.count("probe_put_errors", 1);
                if !failing.swap(true, Ordering::Relaxed) {
                    say(&format!("note a put of the prober failed: {error}"));
                }
            }
        }
        thread::sleep(pace);
    }
    shared.count("probe_bytes", bytes);
}

fn probe_gets(who: u64, mut client: Client, pace: Duration, times: &Times, shared: &Shared) {
    let key = format!("probe/{who}/still").into_bytes();
    let value = content::value(who, 0, 1, BYTES);
    let mut failing = false;
    while !shared.is_over() {
        match client.get(&key) {
            Ok(Some(found)) => {
                times.add();
                shared.count("probe_gets", 1);
                failing = false;
                if found != value {
                    shared.complain("wrong", &format!("bytes of the still object of client {who}"));
                }
            }
            // It is not there yet, or both nodes that had it were killed.
            Ok(None) => {
                times.add();
                shared.count("probe_misses", 1);
                if client.upsert(&key, value.as_slice(), &OPTIONS).is_err() {
                    shared.count("probe_put_errors", 1);
                }
            }
            Err(error) => {
                shared.count("probe_get_errors", 1);
                if !std::mem::replace(&mut failing, true) {
                    say(&format!("note a get of the prober failed: {error}"));
                }
            }
        }
        thread::sleep(pace);
    }
}

fn read_register(who: u64, mut client: Client, pace: Duration, acked: &AtomicU64, shared: &Shared) {
    while !shared.is_over() {
        let least = acked.load(Ordering::SeqCst);
        match client.get(&key(who)) {
            Ok(found) => match content::read(who, u64::MAX >> 16, BYTES, found.as_deref()) {
                Read::Miss => {
                    shared.count("register_misses", u64::from(least > 0));
                }
                Read::Value { intact: false, .. } => {
                    shared.complain("wrong", &format!("bytes of the register of client {who}"));
                }
                Read::Value { version, .. } if version < least => {
                    let text = format!(
                        "version {version} of the register of client {who} after {least} was acknowledged"
                    );
                    shared.complain("stale", &text);
                }
                Read::Value { .. } => {
                    shared.count("register_reads", 1);
                }
            },
            Err(_) => {
                shared.count("register_get_errors", 1);
            }
        }
        thread::sleep(pace);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_is_that_around_the_fault() {
        let times = [0, 10, 20, 900, 910, 930, 2_000];
        let gap = |from, to| longest_gap(times.into_iter(), from, to, false);
        assert_eq!(gap(15, 950), Some(1_070), "an answer after the end counts, too");
        assert_eq!(gap(15, 920), Some(880));
        assert_eq!(gap(21, 905), Some(880), "it began before the fault");
        assert_eq!(longest_gap(times.into_iter(), 21, 905, true), Some(10), "only what began after it");
        assert_eq!(gap(0, 15), Some(10));
        assert_eq!(gap(15, 2_001), None, "it may still go on");
        assert_eq!(longest_gap([5].into_iter(), 5, 5, false), None);
        assert_eq!(longest_gap(std::iter::empty(), 0, 5, false), None);
    }
}

//! The attack: its processes, its schedule, and the call durations of the honest prober before and during it.
//!
//! Each kind of attack is a process of the program `hostile` (see `xtask/hostile/`) with the lowest priority,
//! because real attackers would run on other machines. The prober sends requests at a steady pace from
//! beginning to end. The durations of its calls in the quiet phase are the reference: the 99th percentile
//! under attack may be three times as long. The other clients work all the time, so the two phases differ by
//! the attack alone.

use super::process::{Role, Slot};
use super::{Args, END_MAX, build, free_address};
use crate::stats;
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Every kind of attack.
const KINDS: [&str; 8] = ["flood", "silent", "garbage", "thief", "guess", "fork", "wishes", "writer"];
/// The counter of each kind that shows that the attack took place.
const SIGNS: [(&str, &str); 8] = [
    ("flood", "flood_answers"),
    ("silent", "silent_connections"),
    ("garbage", "garbage_sent"),
    ("thief", "theft_tries"),
    ("guess", "guesses"),
    ("fork", "forks"),
    ("wishes", "wishes_refused"),
    ("writer", "writer_puts"),
];
const QUIET_MAX: Duration = Duration::from_secs(300);
/// The soak ends with a quiet phase of an eighth of its length, within these bounds, in which resources that
/// the attack used must be freed.
const AFTERMATH_MIN: Duration = Duration::from_secs(25);
const AFTERMATH_MAX: Duration = Duration::from_secs(90);
/// Longer than the master of these soaks waits for a writer (6 s), and how long the writer works in between.
const WRITER_STOPPED: Duration = Duration::from_secs(10);
const WRITER_WORKS: Duration = Duration::from_secs(7);
/// Largest ratio of the 99th percentiles, under attack and in the quiet phase.
const RATIO_MAX: f64 = 3.0;
/// With fewer calls, the 99th percentile has no meaning.
const CALLS_MIN: usize = 200;

/// The attack, and the durations seen so far.
pub(super) struct Attack {
    begins_at: Instant,
    ends_at: Instant,
    stage: Stage,
    stop_writer_at: Instant,
    waiting: Vec<Slot>,
    quiet: BTreeMap<String, Vec<u32>>,
    attacked: BTreeMap<String, Vec<u32>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Quiet,
    Attack,
    Aftermath,
}

/// The durations of one operation, in the quiet phase and under attack.
pub(super) struct Contest {
    operation: String,
    quiet: Quantiles,
    attacked: Quantiles,
}

/// Quantiles of one operation's durations, µs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Quantiles {
    calls: usize,
    p50: u32,
    p99: u32,
    max: u32,
}

/// The slots of the master, the nodes and the prober, and the attack that follows. The attack uses the
/// master's HTTP address and the nodes' ports.
pub(super) fn stage(args: &Args, master: SocketAddr, seed: u64) -> Result<(Vec<Slot>, Attack)> {
    let binary = Arc::new(match &args.hostile_binary {
        Some(binary) => binary.clone(),
        None => build("-p xtask --features hostile --bin hostile", "hostile")?,
    });
    let slot = |role: Role, words: &[&str]| {
        Slot::new(role, Arc::clone(&binary), words.iter().map(|word| (*word).to_owned()).collect())
    };
    let http = free_address()?;
    let rpc = master.to_string();
    let mut slots = vec![slot(Role::Master, &["master", &rpc, &http.to_string()])];
    let mut others = vec![http.to_string()];
    for node in 0..args.nodes() {
        let [control, data] = [free_address()?.to_string(), free_address()?.to_string()];
        let (name, bytes) = (format!("node-{node}"), (args.node_mib() << 20).to_string());
        slots.push(slot(Role::Node(node), &["node", &name, &rpc, &bytes, &control, &data]));
        others.extend([control, data]);
    }
    slots.push(slot(Role::Prober, &["probe", &rpc, &seed.to_string()]));
    let waiting = KINDS.iter().zip(1..).map(|(kind, number)| {
        let seed = seed.wrapping_add(number).to_string();
        let mut words = vec![*kind, &rpc, &seed];
        words.extend(others.iter().map(String::as_str));
        slot(Role::Hostile(kind), &words)
    });
    let now = Instant::now();
    let attack = Attack {
        begins_at: now,
        ends_at: now,
        stage: Stage::Quiet,
        stop_writer_at: now,
        waiting: waiting.collect(),
        quiet: BTreeMap::new(),
        attacked: BTreeMap::new(),
    };
    Ok((slots, attack))
}

impl Attack {
    /// Starts the quiet phase: all honest processes are ready. Returns beginning and end of the attack.
    pub(super) fn begin(&mut self, now: Instant, length: Duration) -> (Duration, Duration) {
        let begins = (length / 4).min(QUIET_MAX);
        let ends = length.saturating_sub((length / 8).clamp(AFTERMATH_MIN, AFTERMATH_MAX)).max(begins);
        (self.begins_at, self.ends_at) = (now + begins, now + ends);
        (begins, ends)
    }

    /// Collects the prober's durations, starts and ends the attackers, and stops the writer during its work.
    pub(super) fn turn(&mut self, now: Instant, slots: &mut Vec<Slot>) -> Result<()> {
        let times: Vec<(String, u32)> = slots.iter().flat_map(Slot::take_times).collect();
        let phase = match self.stage {
            Stage::Quiet => Some(&mut self.quiet),
            Stage::Attack => Some(&mut self.attacked),
            Stage::Aftermath => None,
        };
        if let Some(phase) = phase {
            times.into_iter().for_each(|(operation, time)| phase.entry(operation).or_default().push(time));
        }
        match self.stage {
            Stage::Quiet if now >= self.begins_at => self.send_in(now, slots)?,
            Stage::Attack if now >= self.ends_at => {
                eprintln!("soak: the attack is over");
                let hostile = slots.iter_mut().filter(|slot| matches!(slot.role, Role::Hostile(_)));
                hostile.for_each(|slot| slot.end(Instant::now() + END_MAX));
                self.stage = Stage::Aftermath;
            }
            Stage::Attack if now >= self.stop_writer_at => {
                let writer = slots.iter_mut().find(|slot| slot.role == Role::Hostile("writer"));
                if let Some(writer) = writer.filter(|writer| writer.process().is_some()) {
                    writer.stop(now + WRITER_STOPPED)?;
                }
                self.stop_writer_at = now + WRITER_STOPPED + WRITER_WORKS;
            }
            _ => {}
        }
        Ok(())
    }

    fn send_in(&mut self, now: Instant, slots: &mut Vec<Slot>) -> Result<()> {
        eprintln!("soak: the quiet phase is over, {} kinds of attack begin", self.waiting.len());
        for mut slot in self.waiting.drain(..) {
            slot.start().with_context(|| format!("{} does not start", slot.role))?;
            slot.wait_until_ready(Instant::now() + END_MAX)?;
            slots.push(slot);
        }
        self.stage = Stage::Attack;
        self.stop_writer_at = now + WRITER_WORKS;
        Ok(())
    }

    /// The results of each operation.
    pub(super) fn contests(mut self) -> Vec<Contest> {
        let mut contests = Vec::new();
        for (operation, quiet) in std::mem::take(&mut self.quiet) {
            let attacked = self.attacked.remove(&operation).unwrap_or_default();
            contests.push(Contest {
                operation,
                quiet: Quantiles::of(quiet),
                attacked: Quantiles::of(attacked),
            });
        }
        contests
    }
}

impl Contest {
    fn ratio(&self) -> f64 {
        f64::from(self.attacked.p99) / f64::from(self.quiet.p99.max(1))
    }

    pub(super) fn json(&self) -> Value {
        let quantiles =
            |of: Quantiles| json!({"calls": of.calls, "p50_us": of.p50, "p99_us": of.p99, "max_us": of.max});
        json!({
            "operation": self.operation,
            "quiet": quantiles(self.quiet),
            "attacked": quantiles(self.attacked),
            "p99_ratio": self.ratio(),
            "p99_ratio_max": RATIO_MAX,
        })
    }
}

impl Quantiles {
    fn of(mut times: Vec<u32>) -> Self {
        times.sort_unstable();
        let at = |share: f64| {
            // The smallest duration that this share of the calls does not exceed.
            let index = (times.len() as f64 * share).ceil() as usize;
            times.get(index.saturating_sub(1)).copied().unwrap_or(0)
        };
        Self { calls: times.len(), p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

/// The prober's durations as a table.
pub(super) fn table(contests: &[Contest]) -> String {
    let heading = [
        "prober",
        "calls",
        "p50, µs",
        "p99, µs",
        "calls, attacked",
        "p50, µs",
        "p99, µs",
        "max, µs",
        "p99 ratio",
        "bound",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    for contest in contests {
        let (quiet, attacked) = (contest.quiet, contest.attacked);
        let numbers = [quiet.calls as u64, quiet.p50.into(), quiet.p99.into(), attacked.calls as u64];
        let mut row = vec![contest.operation.clone()];
        row.extend(numbers.iter().map(u64::to_string));
        row.extend([attacked.p50, attacked.p99, attacked.max].iter().map(u32::to_string));
        row.extend([format!("{:.2}", contest.ratio()), format!("{RATIO_MAX:.1}")]);
        rows.push(row);
    }
    stats::table(&rows)
}

/// # Errors
/// An attack did not take place, there were too few calls, or an operation took too long.
pub(super) fn judge(contests: &[Contest], counts: &BTreeMap<String, u64>) -> Result<()> {
    for (kind, sign) in SIGNS {
        ensure!(
            counts.get(sign).is_some_and(|count| *count > 0),
            "the attack `{kind}` did nothing: no {sign}"
        );
    }
    ensure!(
        contests.len() == 3,
        "the prober reported durations of {} operations instead of 3",
        contests.len()
    );
    for contest in contests {
        let calls = contest.quiet.calls.min(contest.attacked.calls);
        ensure!(calls >= CALLS_MIN, "{}: {calls} calls are too few for a result", contest.operation);
        let (ratio, p99) = (contest.ratio(), contest.attacked.p99);
        ensure!(
            ratio <= RATIO_MAX,
            "{}: its 99th percentile is {ratio:.2} times as long under attack ({p99} µs), more than {RATIO_MAX}",
            contest.operation
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contests(attacked: u32) -> Vec<Contest> {
        ["exists", "get", "put"]
            .map(|operation| Contest {
                operation: operation.to_owned(),
                quiet: Quantiles::of(vec![100; 300]),
                attacked: Quantiles::of(vec![attacked; 300]),
            })
            .into()
    }

    fn signs() -> BTreeMap<String, u64> {
        SIGNS.map(|(_, sign)| (sign.to_owned(), 1)).into()
    }

    #[test]
    fn times_under_attack_are_held_to_those_of_the_quiet() {
        assert!(judge(&contests(300), &signs()).is_ok());
        let error = judge(&contests(301), &signs()).expect_err("more than three times");
        assert!(error.to_string().contains("3.01 times"), "{error}");
    }

    #[test]
    fn an_attack_that_did_nothing_proves_nothing() {
        for (kind, sign) in SIGNS {
            let mut without = signs();
            without.remove(sign);
            let error = judge(&contests(100), &without).expect_err("it did nothing");
            assert!(error.to_string().contains(kind), "{error}");
        }
        let mut few = contests(100);
        few[1].attacked.calls = 10;
        assert!(judge(&few, &signs()).is_err());
    }

    #[test]
    fn quantiles_are_durations_that_a_share_of_the_calls_does_not_exceed() {
        let quantiles = Quantiles::of((1..=1000).collect());
        assert_eq!(quantiles, Quantiles { calls: 1000, p50: 500, p99: 990, max: 1000 });
        assert_eq!(Quantiles::of(Vec::new()), Quantiles { calls: 0, p50: 0, p99: 0, max: 0 });
    }
}

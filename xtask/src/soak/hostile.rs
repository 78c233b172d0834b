//! Those who attack: who they are, when they come, and what the honest prober's calls took before and meanwhile.
//!
//! Each kind is a process of the program `hostile` (see `xtask/hostile/`), run with the lowest priority, for its processor would
//! not be ours. The prober asks at a steady pace from beginning to end. What its calls take in the quiet is what they are held to:
//! the 99th percentile under attack may be three times as long. While nobody attacks, the other clients work as always, so the
//! two differ by the attack alone.

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
/// What each kind counts when it does what it is there for.
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
/// At the end there is quiet again, an eighth of the whole within these bounds: what the attack took has to come back.
const AFTERMATH_MIN: Duration = Duration::from_secs(25);
const AFTERMATH_MAX: Duration = Duration::from_secs(90);
/// Longer than the master of these soaks waits for a writer (6 s), and how long the writer works in between.
const WRITER_STOPPED: Duration = Duration::from_secs(10);
const WRITER_WORKS: Duration = Duration::from_secs(7);
/// How much longer the 99th percentile may be under attack.
const RATIO_MAX: f64 = 3.0;
/// Fewer calls say nothing of one in a hundred.
const CALLS_MIN: usize = 200;

/// The attack, and the times seen so far.
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

/// One operation, in quiet and under attack.
pub(super) struct Contest {
    operation: String,
    quiet: Quantiles,
    attacked: Quantiles,
}

/// Of one operation's times, µs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Quantiles {
    calls: usize,
    p50: u32,
    p99: u32,
    max: u32,
}

/// The master, the nodes and the prober, and the attack that is to come. The master's HTTP and the nodes' ports are known to it.
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
    for node in 0..args.nodes {
        let [control, data] = [free_address()?.to_string(), free_address()?.to_string()];
        let (name, bytes) = (format!("node-{node}"), (args.node_mib << 20).to_string());
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
    /// All honest processes are ready: the quiet begins. Says from when to when the attack is.
    pub(super) fn begin(&mut self, now: Instant, length: Duration) -> (Duration, Duration) {
        let begins = (length / 4).min(QUIET_MAX);
        let ends = length.saturating_sub((length / 8).clamp(AFTERMATH_MIN, AFTERMATH_MAX)).max(begins);
        (self.begins_at, self.ends_at) = (now + begins, now + ends);
        (begins, ends)
    }

    /// Takes the prober's times; sends the attackers in and away; stops the writer in the middle of its work.
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
        eprintln!("soak: the quiet is over, {} kinds of attack begin", self.waiting.len());
        for mut slot in self.waiting.drain(..) {
            slot.start().with_context(|| format!("{} does not start", slot.role))?;
            slot.wait_until_ready(Instant::now() + END_MAX)?;
            slots.push(slot);
        }
        self.stage = Stage::Attack;
        self.stop_writer_at = now + WRITER_WORKS;
        Ok(())
    }

    /// What became of each operation.
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
            // The least time that so many calls kept to.
            let index = (times.len() as f64 * share).ceil() as usize;
            times.get(index.saturating_sub(1)).copied().unwrap_or(0)
        };
        Self { calls: times.len(), p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

/// Times of the honest prober, for people.
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
/// When an attack did not take place, too little was asked to judge by, or an operation took too long.
pub(super) fn judge(contests: &[Contest], counts: &BTreeMap<String, u64>) -> Result<()> {
    for (kind, sign) in SIGNS {
        ensure!(
            counts.get(sign).is_some_and(|count| *count > 0),
            "the attack `{kind}` did nothing: no {sign}"
        );
    }
    ensure!(contests.len() == 3, "the prober gave times of {} operations instead of 3", contests.len());
    for contest in contests {
        let calls = contest.quiet.calls.min(contest.attacked.calls);
        ensure!(calls >= CALLS_MIN, "{}: {calls} calls are too few to judge by", contest.operation);
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
    fn quantiles_are_times_that_so_many_calls_kept_to() {
        let quantiles = Quantiles::of((1..=1000).collect());
        assert_eq!(quantiles, Quantiles { calls: 1000, p50: 500, p99: 990, max: 1000 });
        assert_eq!(Quantiles::of(Vec::new()), Quantiles { calls: 0, p50: 0, p99: 0, max: 0 });
    }
}

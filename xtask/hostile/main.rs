//! Processes of `cargo xtask soak --hostile`: a master, nodes, an honest prober, and the attackers.
//!
//! ```text
//!   honest    the master, the nodes, and the prober whose call durations are judged
//!   raw       raw frames
//!   wire      floods, silence, garbage: attacks that only need a socket
//!   theft     attempts on names, nodes and puts of other processes
//!   misuse    clients that fork, request impossible puts, or are stopped during a write
//! ```
//!
//! Each process ends when its standard input is closed. It prints `ready` when it begins, a line of counters
//! per second, and `wrong …` for results that must never occur. The attacks are bounded: sockets, requests in
//! flight and pauses between rounds are constants here, and only the given loopback addresses are reached.
#![deny(unsafe_code)]

mod honest;
mod misuse;
mod raw;
mod theft;
mod wire;

use std::collections::BTreeMap;
use std::env;
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["master", rpc, http] => honest::master(rpc.parse()?, http.parse()?),
        ["node", name, master, bytes, control, data] => {
            honest::node(name, master.parse()?, bytes.parse()?, control.parse()?, data.parse()?)
        }
        ["probe", master, seed] => honest::probe(&mut Turn::new(seed)?, master.parse()?),
        [kind, master, seed, ref others @ ..] => {
            let others: Vec<SocketAddr> =
                others.iter().map(|address| address.parse()).collect::<std::result::Result<_, _>>()?;
            let master: SocketAddr = master.parse()?;
            if !others.iter().chain([&master]).all(|address| address.ip().is_loopback()) {
                return Err("only loopback addresses may be attacked".into());
            }
            let mut turn = Turn::new(seed)?;
            match kind {
                "flood" => wire::flood(&mut turn, master),
                "silent" => wire::silent(&mut turn, master, &others),
                "garbage" => wire::garbage(&mut turn, master, &others),
                "thief" => theft::thief(&mut turn, master),
                "guess" => theft::guess(&mut turn, master),
                "fork" => misuse::fork(&mut turn, master),
                "wishes" => misuse::wishes(&mut turn, master),
                "writer" => misuse::writer(&mut turn, master),
                _ => Err(format!("no role `{kind}`").into()),
            }
        }
        _ => Err("arguments: a role, the master's address, a seed, and addresses".into()),
    }
}

/// State that every role has: random numbers, counters, and its end.
struct Turn {
    rng: u64,
    counts: BTreeMap<&'static str, u64>,
    over: Arc<AtomicBool>,
    say_at: Instant,
}

impl Turn {
    fn new(seed: &str) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&over);
        std::thread::spawn(move || {
            wait_for_parent();
            flag.store(true, Ordering::Relaxed);
        });
        say("ready");
        Ok(Self { rng: seed.parse()?, counts: BTreeMap::new(), over, say_at: Instant::now() })
    }

    /// Whether to continue. Prints the counters once per second.
    fn goes_on(&mut self) -> bool {
        if Instant::now() >= self.say_at {
            self.report();
            self.say_at = Instant::now() + Duration::from_secs(1);
        }
        !self.over.load(Ordering::Relaxed)
    }

    /// Sleeps for `length`, or until the process is to end.
    fn pause(&mut self, length: Duration) {
        let until = Instant::now() + length;
        while self.goes_on() && Instant::now() < until {
            std::thread::sleep((until - Instant::now().min(until)).min(Duration::from_millis(50)));
        }
    }

    /// Repeats an action, with a pause after each time. Failures are counted and the action is repeated: a
    /// client that was disconnected connects again.
    fn rounds(
        &mut self,
        pause: Duration,
        failed: &'static str,
        mut round: impl FnMut(&mut Self) -> Result<()>,
    ) {
        while self.goes_on() {
            if round(self).is_err() {
                self.count(failed, 1);
            }
            self.pause(pause);
        }
    }

    fn count(&mut self, name: &'static str, count: u64) {
        *self.counts.entry(name).or_default() += count;
    }

    /// Reports a result that must never occur.
    fn wrong(&mut self, what: &str) {
        self.count("wrong", 1);
        say(&format!("wrong {what}"));
    }

    fn report(&self) {
        let words: Vec<String> = self.counts.iter().map(|(name, count)| format!("{name}={count}")).collect();
        say(&format!("counts {}", words.join(" ")));
    }

    fn below(&mut self, n: u64) -> u64 {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.rng) % n.max(1)
    }

    fn random(&mut self) -> u64 {
        self.below(u64::MAX)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.report();
    }
}

/// The finaliser of SplitMix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The only value that a key may have, so that a reader recognises bytes of another key.
fn value_of(key: &[u8], len: usize) -> Vec<u8> {
    let mut state = key.iter().fold(0x6a09_e667_f3bc_c908, |state, byte| mix(state ^ u64::from(*byte)));
    let mut value = vec![0; len];
    for word in value.chunks_mut(8) {
        state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    value
}

/// Prints one line at once. Errors are ignored: a parent that does not read any more is about to end this
/// process.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0]);
}

//! Runs a store under load for minutes, while its processes are killed, stopped and restarted.
//!
//! ```text
//!   process    one slot each for the master, the nodes and the clients; a slot's process ends and is started again
//!   faults     which process is killed or stopped, from a seed
//!   flat       memory and descriptors of every process over time, and whether they grow
//!   hostile    with `--hostile`: attackers beside the honest load, and their effect on its call durations
//!   ha         with `--ha` or `--disk`: another soak, of several masters and of disks
//! ```
//!
//! The processes are roles of `store-client/examples/soak.rs`. Clients derive every byte that they store from
//! its key and its put, and check every byte that they read. The soak fails when a byte was wrong, when
//! memory or descriptors of a process grow (see `flat`), when a process ends without having been ended, or
//! when nothing was read or stored.

mod faults;
mod flat;
mod ha;
mod hostile;
mod process;

use crate::cmd::Cmd;
use crate::host::Host;
use crate::stats;
use anyhow::{Context as _, Result, bail, ensure};
use faults::Faults;
use flat::Flat;
use hostile::Attack;
use nix::sys::signal::{SigSet, Signal};
use process::{Process, Role, Slot};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Options of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Duration, minutes. Default: 10; with `--kills` there is no limit.
    #[arg(long)]
    minutes: Option<f64>,
    /// Number of client processes; with `--ha` or `--disk`, of clients in one process. Default: 3, or 2.
    #[arg(long)]
    clients: Option<usize>,
    /// Number of node processes. Default: 3; with `--ha` or `--disk` 2.
    #[arg(long)]
    nodes: Option<usize>,
    /// Memory of each node, MiB. It is small, so that there are evictions all the time. Default: 16; with
    /// `--ha` or `--disk` 32.
    #[arg(long)]
    node_mib: Option<u64>,
    /// Number of keys that clients choose from.
    #[arg(long, default_value_t = 4096)]
    keys: u64,
    /// Seed of faults and load; the time by default. Processes still run concurrently, so runs with one seed
    /// differ.
    #[arg(long)]
    seed: Option<u64>,
    /// Run without faults.
    #[arg(long)]
    calm: bool,
    /// Instead of faults, run attackers: floods, silence, garbage, theft, forks, impossible puts, and writers
    /// that are stopped for longer than every timeout. The first quarter, at most five minutes, is quiet, and
    /// its call durations are the reference for those under attack. The end is quiet too: descriptors must be
    /// freed.
    #[arg(long, conflicts_with = "calm")]
    hostile: bool,
    /// Several masters with a shared arbiter: etcd if it is installed, otherwise a directory. Masters, nodes
    /// and etcd are killed and stopped, one at a time; after each fault, everything that was acknowledged is
    /// read.
    #[arg(long, conflicts_with_all = ["calm", "hostile"])]
    ha: bool,
    /// Nodes with disks, which are damaged as well; without `--ha`, the master is alone and has a journal.
    #[arg(long, conflicts_with_all = ["calm", "hostile"])]
    disk: bool,
    /// The options of `--ha` and `--disk`.
    #[command(flatten)]
    faulty: FaultyArgs,
    /// Print the results as JSON on stdout, or write them to this file.
    #[arg(long, num_args = 0..=1, default_missing_value = "-", value_name = "FILE")]
    json: Option<PathBuf>,
    /// The built example `soak` of store-client; with `--ha` or `--disk`, the program `snowskin`. By default
    /// it is built with `--release`.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// The built program `hostile` of xtask; by default it is built with `--release`.
    #[arg(long)]
    hostile_binary: Option<PathBuf>,
}

/// Options of `--ha` and `--disk`.
#[derive(clap::Args)]
struct FaultyArgs {
    /// End after so many `kill -9`.
    #[arg(long, value_name = "N")]
    kills: Option<u64>,
    /// Only these faults, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FAULT")]
    faults: Vec<ha::Fault>,
    /// Number of masters with `--ha`.
    #[arg(long, default_value_t = 2)]
    masters: usize,
    /// The arbiter of `--ha`. Default: etcd, if it is installed and the program can use it.
    #[arg(long, value_enum)]
    arbiter: Option<ha::Arbiter>,
    /// How long etcd is stopped, seconds. Default: 2 to 6.
    #[arg(long, value_name = "SECONDS")]
    arbiter_pause_s: Option<f64>,
    /// Size of the disk of each node with `--disk`, MiB.
    #[arg(long, default_value_t = 512)]
    disk_mib: u64,
    /// Objects that each client keeps and audits, at most.
    #[arg(long, default_value_t = 800)]
    objects: u64,
    /// Pause of a client after each operation, microseconds.
    #[arg(long, default_value_t = 3_000)]
    pace_us: u64,
    /// Pause of a prober after each operation, microseconds.
    #[arg(long, default_value_t = 4_000)]
    probe_us: u64,
    /// Load that is not audited and fills memory and disks, MiB per second.
    #[arg(long, default_value_t = 8.0)]
    churn_mib_s: f64,
    /// Directory for disks and logs; it needs a file system with direct I/O.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The built example `soak_ha` of store-client; by default it is built with `--release`.
    #[arg(long)]
    clients_binary: Option<PathBuf>,
    /// To see the audit fail: one of so many puts is reported as acknowledged and never sent.
    #[arg(long, default_value_t = 0, hide = true)]
    lie: u64,
}

impl Args {
    fn clients(&self) -> usize {
        self.clients.unwrap_or(3)
    }

    fn nodes(&self) -> usize {
        self.nodes.unwrap_or(3)
    }

    fn node_mib(&self) -> u64 {
        self.node_mib.unwrap_or(16)
    }

    /// Prints the text and writes the JSON. Where the JSON goes to stdout, nothing else does.
    fn publish(&self, text: &str, json: &Value) -> Result<()> {
        let Some(path) = &self.json else {
            println!("{text}");
            return Ok(());
        };
        let json = serde_json::to_string_pretty(json)?;
        if path.as_os_str() == "-" {
            eprintln!("{text}");
            println!("{json}");
            return Ok(());
        }
        println!("{text}");
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))
    }
}

const TICK: Duration = Duration::from_millis(50);
const SAMPLE: Duration = Duration::from_secs(1);
const PROGRESS: Duration = Duration::from_secs(10);
/// Time for processes to end after SIGTERM.
const END_MAX: Duration = Duration::from_secs(20);

/// Runs the soak and prints the results.
///
/// # Errors
/// A check failed, or the soak could not run.
pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.clients() > 0 && args.nodes() > 0, "--clients and --nodes must be at least 1");
    let minutes = args.minutes.unwrap_or(10.0);
    ensure!((0.05..=1e6).contains(&minutes), "--minutes must be at least 0.05");
    let interrupted = catch_interrupts()?;
    let seed = args.seed.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
    });
    if args.ha || args.disk {
        eprintln!("soak: seed {seed}, Ctrl-C ends it early");
        return ha::run(args, seed, &interrupted);
    }
    let binary = match &args.binary {
        Some(binary) => binary.clone(),
        None => build("-p store-client --example soak", "examples/soak")?,
    };
    eprintln!("soak: seed {seed}, {minutes} min, Ctrl-C ends it early");
    let mut soak = Soak::start(args, binary, seed, minutes)?;
    let ended = soak.run(&interrupted);
    let report = soak.end();
    args.publish(&report.text(), &report.json(args, seed))?;
    ended?;
    report.judge()
}

/// Builds `selection` with cargo; returns the program at `path` below the directory of the profile.
fn build(selection: &str, path: &str) -> Result<PathBuf> {
    let host = Host::probe()?;
    let build = Cmd::new(&format!("cargo build --quiet --release {selection}"));
    eprintln!("$ {build}");
    build.run(&host.root, None).with_context(|| format!("{path} does not build"))?;
    Ok(host.target_dir.join("release").join(path))
}

/// A thread waits for Ctrl-C and SIGTERM, which are blocked otherwise. A child that is to end after SIGTERM
/// has to be started with [`spawn`].
fn catch_interrupts() -> Result<Arc<AtomicBool>> {
    let set = interrupts();
    set.thread_block().context("cannot block signals")?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&interrupted);
    std::thread::spawn(move || {
        if set.wait().is_ok() {
            flag.store(true, Ordering::Relaxed);
        }
    });
    Ok(interrupted)
}

fn interrupts() -> SigSet {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set
}

/// Starts a process without the block of signals, which it would inherit.
fn spawn(command: &mut Command) -> std::io::Result<Child> {
    interrupts().thread_unblock()?;
    let child = command.spawn();
    interrupts().thread_block()?;
    child
}

struct Soak {
    slots: Vec<Slot>,
    faults: Option<Faults>,
    attack: Option<Attack>,
    flat: Flat,
    began: Instant,
    until: Instant,
}

impl Soak {
    fn start(args: &Args, binary: PathBuf, seed: u64, minutes: f64) -> Result<Self> {
        let address = free_address()?;
        let binary = Arc::new(binary);
        let slot = |role: Role, words: Vec<String>| Slot::new(role, Arc::clone(&binary), words);
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let master = address.to_string();
        let mut slots = Vec::new();
        let mut attack = None;
        if args.hostile {
            let (mine, stage) = hostile::stage(args, address, seed)?;
            slots.extend(mine);
            attack = Some(stage);
        } else {
            slots.push(slot(Role::Master, words(&["master", &master])));
            for node in 0..args.nodes() {
                let bytes = (args.node_mib() << 20).to_string();
                slots
                    .push(slot(Role::Node(node), words(&["node", &format!("node-{node}"), &master, &bytes])));
            }
        }
        for client in 0..args.clients() {
            let seed = seed.wrapping_add(client as u64).to_string();
            let keys = args.keys.to_string();
            let who = client.to_string();
            slots.push(slot(Role::Client(client), words(&["client", &who, &master, &seed, &keys])));
        }
        for slot in &mut slots {
            slot.start().with_context(|| format!("{} does not start", slot.role))?;
            slot.wait_until_ready(Instant::now() + END_MAX)?;
        }
        let began = Instant::now();
        let length = Duration::from_secs_f64(minutes * 60.0);
        let faults = (!args.calm && !args.hostile).then(|| Faults::new(seed, began, length));
        let attacked = attack.as_mut().map(|attack| attack.begin(began, length));
        let flat = Flat::new(length, attacked);
        Ok(Self { slots, faults, attack, flat, began, until: began + length })
    }

    /// Runs until the time is over or a signal interrupts it.
    fn run(&mut self, interrupted: &AtomicBool) -> Result<()> {
        let (mut sample_at, mut progress_at) = (self.began, self.began + PROGRESS);
        while Instant::now() < self.until {
            if interrupted.load(Ordering::Relaxed) {
                eprintln!("soak: interrupted");
                return Ok(());
            }
            std::thread::sleep(TICK);
            let now = Instant::now();
            for slot in &mut self.slots {
                slot.turn(now)?;
            }
            if let Some(faults) = &mut self.faults {
                faults.turn(now, &mut self.slots)?;
            }
            if let Some(attack) = &mut self.attack {
                attack.turn(now, &mut self.slots)?;
            }
            if now >= sample_at {
                let at = now - self.began;
                // The resources of attackers are not judged.
                let judged = self.slots.iter().filter(|slot| !matches!(slot.role, Role::Hostile(_)));
                let running = judged.filter_map(|slot| Some((slot.role, slot.process()?)));
                running
                    .for_each(|(role, process)| self.flat.sample(at, role, process.pid(), process.age(now)));
                sample_at = now + SAMPLE;
            }
            if now >= progress_at {
                self.say_progress(now);
                progress_at = now + PROGRESS;
            }
        }
        Ok(())
    }

    fn say_progress(&self, now: Instant) {
        let counts = totals(&self.slots);
        let count = |name: &str| counts.get(name).copied().unwrap_or(0);
        eprintln!(
            "soak: {} of {}: {} puts, {} hits of {} gets, {} wrong, {} faults",
            stats::duration(now - self.began),
            stats::duration(self.until - self.began),
            count("puts"),
            count("hits"),
            count("gets"),
            count("wrong"),
            self.faults.as_ref().map_or(0, Faults::total),
        );
    }

    /// Ends every process and returns the results.
    fn end(mut self) -> Report {
        let length = self.began.elapsed();
        // Clients end first, because they would report that servers are missing.
        for slot in self.slots.iter_mut().rev() {
            slot.end(Instant::now() + END_MAX);
        }
        Report {
            length,
            counts: totals(&self.slots),
            complaints: self.slots.iter().flat_map(|slot| slot.complaints()).collect(),
            faults: self.faults.take().map(Faults::into_counts).unwrap_or_default(),
            contests: self.attack.take().map(|attack| attack.contests()),
            growths: self.flat.growths(),
        }
    }
}

/// The sum of the counters of all clients, over all their processes.
fn totals(slots: &[Slot]) -> BTreeMap<String, u64> {
    let mut sum = BTreeMap::new();
    for (name, count) in slots.iter().flat_map(Slot::counts) {
        *sum.entry(name).or_default() += count;
    }
    sum
}

/// An address with a port that was free a moment ago; the master is restarted with the same one.
fn free_address() -> Result<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0").context("no free port")?.local_addr()?)
}

struct Report {
    length: Duration,
    counts: BTreeMap<String, u64>,
    complaints: Vec<String>,
    faults: BTreeMap<&'static str, u64>,
    /// Call durations in the quiet phase and under attack, if there was one.
    contests: Option<Vec<hostile::Contest>>,
    growths: Vec<flat::Growth>,
}

impl Report {
    fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    fn text(&self) -> String {
        let mut rows = vec![
            ["process", "RSS, MiB", "grew by", "bound", "descriptors", "grew by", "starts", ""]
                .map(str::to_owned)
                .to_vec(),
        ];
        for growth in &self.growths {
            rows.push(growth.row());
        }
        let list = |counts: &mut dyn Iterator<Item = (String, u64)>| {
            counts.map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        let counts = list(&mut self.counts.iter().map(|(name, count)| (name.clone(), *count)));
        let faults = list(&mut self.faults.iter().map(|(name, count)| ((*name).to_owned(), *count)));
        let mut text = format!(
            "ran for {}\ncounted: {counts}\nfaults: {faults}\n\n\
             Memory{}: mean over the second half, and growth over it as a line through the samples.{}\n{}",
            stats::duration(self.length),
            if self.contests.is_some() { "" } else { " and descriptors" },
            if self.contests.is_some() {
                " Descriptors: mean after the attack, and difference from the mean before it."
            } else {
                ""
            },
            stats::table(&rows)
        );
        if let Some(contests) = &self.contests {
            text.push_str(&format!("\n\n{}", hostile::table(contests)));
        }
        for complaint in &self.complaints {
            text.push_str(&format!("\n{complaint}"));
        }
        let verdict = match self.judge() {
            Ok(()) if self.contests.is_some() => {
                "0 wrong bytes, memory and descriptors flat, call durations under attack within their bound"
                    .to_owned()
            }
            Ok(()) => "0 wrong bytes, memory and descriptors flat".to_owned(),
            Err(error) => format!("FAILED: {error}"),
        };
        format!("{text}\n{verdict}")
    }

    fn json(&self, args: &Args, seed: u64) -> Value {
        json!({
            "seed": seed,
            "seconds": self.length.as_secs_f64(),
            "clients": args.clients(),
            "nodes": args.nodes(),
            "node_mib": args.node_mib(),
            "keys": args.keys,
            "counts": self.counts,
            "faults": self.faults,
            "complaints": self.complaints,
            "times": self.contests.iter().flatten().map(hostile::Contest::json).collect::<Vec<_>>(),
            "processes": self.growths.iter().map(flat::Growth::json).collect::<Vec<_>>(),
            "passed": self.judge().is_ok(),
        })
    }

    fn judge(&self) -> Result<()> {
        if self.count("wrong") > 0 {
            bail!(
                "{} results that must never occur: wrong bytes, or an attack that succeeded",
                self.count("wrong")
            );
        }
        if let Some(complaint) = self.complaints.first() {
            bail!("{complaint}");
        }
        if let Some(growth) = self.growths.iter().find(|growth| !growth.is_flat()) {
            bail!("{} grows: see the table", growth.role());
        }
        if let Some(contests) = &self.contests {
            hostile::judge(contests, &self.counts)?;
        }
        ensure!(self.count("puts") > 0 && self.count("hits") > 0, "nothing was stored and read");
        Ok(())
    }
}

impl Drop for Soak {
    fn drop(&mut self) {
        // Needed after an error only: no process may be left.
        self.slots.iter_mut().filter_map(Slot::take).for_each(Process::kill);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Soak {
        #[command(flatten)]
        args: Args,
    }

    fn json(words: &[&str]) -> Option<String> {
        let parsed = Soak::try_parse_from([&["soak"], words].concat()).expect("it is valid");
        parsed.args.json.map(|path| path.display().to_string())
    }

    #[test]
    fn json_goes_to_a_file_or_to_stdout() {
        assert_eq!(json(&[]), None);
        assert_eq!(json(&["--json", "results.json", "--ha"]).as_deref(), Some("results.json"));
        assert_eq!(json(&["--json", "--ha"]).as_deref(), Some("-"));
        assert_eq!(json(&["--ha", "--json"]).as_deref(), Some("-"));
    }

    #[test]
    fn faults_of_masters_and_disks_are_not_mixed_with_attackers() {
        for other in ["--calm", "--hostile"] {
            assert!(Soak::try_parse_from(["soak", "--ha", other]).is_err());
            assert!(Soak::try_parse_from(["soak", "--disk", other]).is_err());
        }
    }
}

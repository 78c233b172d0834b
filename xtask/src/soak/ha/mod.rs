//! `cargo xtask soak --ha` and `--disk`: real masters, nodes and etcd are killed, stopped and damaged one at
//! a time, and after each fault everything that was acknowledged is read again.
//!
//! ```text
//!   plan      which fault is next, from a seed
//!   cluster   the processes, and whether they are whole
//!   clients   the process of the clients, store-client/examples/soak_ha: load, probers, audit
//!   report    what was measured, and whether it is good enough
//! ```
//!
//! Which objects must be there is a rule of the clients' ledger (`soak_ha/ledger.rs`). An object that must be
//! there and is missing is *lost*. Objects that were on a disk are counted separately when a node was killed
//! or a disk damaged, because a disk may have lost its latest writes then.
//!
//! A disk that is full is not among the faults: a disk is allocated when it is made, and a file system that
//! is too small for it is refused there.

mod clients;
mod cluster;
mod plan;
mod report;

use super::{Args, build};
use crate::stats;
use anyhow::{Context as _, Result, bail, ensure};
use clients::{Clients, Numbers, list};
use cluster::{Cluster, Shape, View, damage};
use nix::sys::signal::Signal;
use plan::{Plan, Setting};
use report::Report;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(crate) use plan::Fault;

const PROGRESS: Duration = Duration::from_secs(10);
/// Minutes, if neither time nor kills are given.
const MINUTES: f64 = 10.0;
/// Bits flipped in the disk of a node that does not run.
const BITS_AT_REST: usize = 16;
/// Objects whose bits are flipped by one fault.
const FLIPS: usize = 40;
/// How long the memory may take to be filled before the first fault.
const FILL_MAX: Duration = Duration::from_secs(60);
const SWITCHOVER_MAX: Duration = Duration::from_secs(10);

/// Ctrl-C or SIGTERM.
#[derive(Debug)]
struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Runs the soak; prints and returns its result.
pub(super) fn run(args: &Args, seed: u64, interrupted: &AtomicBool) -> Result<()> {
    let mut soak = Soak::start(args, seed, interrupted)?;
    let ended = soak.run();
    let report = soak.end(ended);
    args.publish(&report.text(), &report.json())?;
    report.judge()
}

struct Soak<'a> {
    clients: Clients,
    cluster: Cluster,
    plan: Plan,
    report: Report,
    program: PathBuf,
    dir: Option<tempfile::TempDir>,
    interrupted: &'a AtomicBool,
    began: Instant,
    until: Option<Instant>,
    progress_at: Instant,
    pause_s: Option<f64>,
    nodes_die: bool,
    churns: bool,
}

impl<'a> Soak<'a> {
    fn start(args: &Args, seed: u64, interrupted: &'a AtomicBool) -> Result<Self> {
        let program = match &args.binary {
            Some(program) => program.clone(),
            None => build("-p cli --features cli/etcd", "snowskin")?,
        };
        let binary = match &args.faulty.clients_binary {
            Some(binary) => binary.clone(),
            None => build("-p store-client --example soak_ha", "examples/soak_ha")?,
        };
        let masters = if args.ha { args.faulty.masters } else { 1 };
        ensure!(!args.ha || masters >= 2, "--masters must be at least 2 with --ha");
        let etcd = args.ha && use_etcd(args.faulty.arbiter, &program)?;
        let setting = Setting { masters, etcd, disks: args.disk };
        let plan = Plan::new(seed, &args.faulty.faults, setting).map_err(anyhow::Error::msg)?;
        let dir = match &args.faulty.dir {
            Some(dir) => tempfile::Builder::new().prefix("soak-").tempdir_in(dir),
            None => tempfile::Builder::new().prefix("snowskin-soak-").tempdir(),
        };
        let dir = dir.context("cannot make a directory for disks and logs; see --dir")?;
        let report = Report {
            seed,
            arbiter: if masters < 2 {
                "none"
            } else if etcd {
                "etcd"
            } else {
                "directory"
            },
            profile: profile_of(&program),
            masters,
            nodes: args.nodes.unwrap_or(2),
            clients: args.clients.unwrap_or(2),
            node_mib: args.node_mib.unwrap_or(32),
            disk_mib: if args.disk { args.faulty.disk_mib } else { 0 },
            wanted: args.faulty.kills,
            ..Report::default()
        };
        ensure!(report.nodes <= 16, "--nodes must be at most 16");
        let shape = Shape {
            program: program.clone(),
            dir: dir.path().to_owned(),
            masters,
            nodes: report.nodes,
            node_mib: report.node_mib,
            disk_mib: report.disk_mib,
            etcd,
        };
        eprintln!(
            "soak: {masters} masters, arbiter {}, {} nodes, {}",
            report.arbiter, report.nodes, report.profile
        );
        let mut cluster = Cluster::start(shape)?;
        cluster.wait_whole(None, interrupted).context("the cluster did not start")?;
        let nodes_die = plan.has(|fault| fault == Fault::KillNode);
        let words = words(args, &cluster, &report, nodes_die);
        let clients = Clients::start(&binary, &words, cluster.group())?;
        let began = Instant::now();
        let minutes = args.minutes.or(args.faulty.kills.is_none().then_some(MINUTES));
        Ok(Self {
            clients,
            cluster,
            plan,
            report,
            program,
            dir: Some(dir),
            interrupted,
            began,
            until: minutes.map(|minutes| began + Duration::from_secs_f64(minutes * 60.0)),
            progress_at: began + PROGRESS,
            pause_s: args.faulty.arbiter_pause_s,
            nodes_die,
            churns: args.faulty.churn_mib_s > 0.0,
        })
    }

    /// Faults, one after the other, until the time is over or there were enough kills.
    fn run(&mut self) -> Result<()> {
        let deadline = Instant::now() + FILL_MAX;
        while self.churns && !self.clients.counts().contains_key("filled") {
            ensure!(Instant::now() < deadline, "the memory of the nodes could not be filled");
            self.sleep(Duration::from_millis(50))?;
        }
        self.sleep(Duration::from_secs(1))?;
        loop {
            let over = self.until.is_some_and(|until| Instant::now() >= until);
            if over || self.report.wanted.is_some_and(|wanted| self.report.kills() >= wanted) {
                return Ok(());
            }
            let fault = self.plan.next();
            let before = self.clients.counts();
            self.fault(fault).with_context(|| format!("{fault}, number {}", self.total() + 1))?;
            *self.report.faults.entry(fault).or_default() += 1;
            self.audit(if fault.is_of_masters() { "quick" } else { "live" }, Some(fault))?;
            self.count_failures(fault, &before);
            let pause = 50 + self.plan.below(400);
            self.sleep(Duration::from_millis(pause))?;
        }
    }

    fn total(&self) -> u64 {
        self.report.faults.values().sum()
    }

    fn fault(&mut self, fault: Fault) -> Result<()> {
        if self.report.disk_mib > 0 {
            let expected = self.clients.numbers("expect", "expected")?;
            if fault == Fault::KillNode {
                // What a node has written a second ago has to be there again.
                self.sleep(Duration::from_secs(1))?;
            }
            add(&mut self.report.audits, "on_disk_before_faults", expected.get("on_disk").copied());
        }
        match fault {
            Fault::KillLeader => self.kill_leader(),
            Fault::KillStandby => self.kill_standby(),
            Fault::KillNode => self.kill_node(),
            Fault::StopLeader => self.stop_leader(),
            Fault::StopStandby => self.stop_standby(),
            Fault::PauseArbiter => self.pause_arbiter(),
            Fault::Switchover => self.switchover(),
            Fault::Flip => self.flip(),
        }
    }

    fn kill_leader(&mut self) -> Result<()> {
        let leader = self.cluster.wait_leader(None, self.interrupted)?;
        let killed = now_ns();
        self.cluster.masters[leader].kill();
        if self.cluster.masters.len() == 1 {
            self.cluster.start_master(leader)?;
            self.whole(None)?;
            return self.window("restart", killed, now_ns());
        }
        self.cluster.wait_leader(Some(leader), self.interrupted)?;
        self.pause(0, 300)?;
        let again = now_ns();
        self.window("failover", killed, again)?;
        self.cluster.start_master(leader)?;
        self.whole(None)?;
        self.window("rejoin", again, now_ns())
    }

    fn kill_standby(&mut self) -> Result<()> {
        let standby = self.standby()?;
        let killed = now_ns();
        self.cluster.masters[standby].kill();
        self.pause(700, 1_200)?;
        let again = now_ns();
        self.window("standby_stall", killed, again)?;
        self.cluster.start_master(standby)?;
        self.whole(None)?;
        self.window("rejoin", again, now_ns())
    }

    fn kill_node(&mut self) -> Result<()> {
        let node = self.plan.below(self.cluster.nodes.len() as u64) as usize;
        self.clients.ask(&format!("node-down {node}"), "down")?;
        self.cluster.nodes[node].kill();
        self.pause(0, 2_000)?;
        if self.report.disk_mib > 0 && self.plan.below(3) == 0 {
            let plan = &mut self.plan;
            damage(&self.cluster.disk_path(node), BITS_AT_REST, |n| plan.below(n))?;
            self.report.flips_at_rest += BITS_AT_REST as u64;
            self.clients.tell("void-disks")?;
        }
        self.cluster.start_node(node)?;
        self.whole(Some(node))?;
        self.clients.tell(&format!("node-up {node}"))
    }

    fn stop_leader(&mut self) -> Result<()> {
        let leader = self.cluster.wait_leader(None, self.interrupted)?;
        let deposed = self.clients.numbers(&format!("deposed {}", self.cluster.rpc_of(leader)), "deposed")?;
        add(&mut self.report.audits, "leaders_asked_after_a_stop", deposed.get("connected").copied());
        let stopped = now_ns();
        self.cluster.masters[leader].signal(Signal::SIGSTOP)?;
        self.clients.ask("deposed-send", "deposed")?;
        self.cluster.wait_leader(Some(leader), self.interrupted)?;
        self.pause(0, 2_000)?;
        let again = now_ns();
        self.cluster.masters[leader].signal(Signal::SIGCONT)?;
        let answers = self.clients.numbers("deposed-read", "deposed")?;
        self.report.late_answers += answers.get("answers").copied().unwrap_or(0);
        self.window("stop", stopped, again)?;
        self.whole(None)?;
        self.window("rejoin", again, now_ns())
    }

    fn stop_standby(&mut self) -> Result<()> {
        let standby = self.standby()?;
        let stopped = now_ns();
        self.cluster.masters[standby].signal(Signal::SIGSTOP)?;
        self.pause(50, 3_000)?;
        self.cluster.masters[standby].signal(Signal::SIGCONT)?;
        self.whole(None)?;
        self.window("standby_stop", stopped, now_ns())
    }

    fn pause_arbiter(&mut self) -> Result<()> {
        let leader = self.cluster.wait_leader(None, self.interrupted)?;
        let etcd = self.cluster.etcd.as_mut().context("no etcd runs")?;
        let stopped = now_ns();
        etcd.signal(Signal::SIGSTOP)?;
        match self.pause_s {
            Some(seconds) => self.sleep(Duration::from_secs_f64(seconds))?,
            None => self.pause(2_000, 6_000)?,
        }
        if let Some(etcd) = &mut self.cluster.etcd {
            etcd.signal(Signal::SIGCONT)?;
        }
        let view = self.whole(None)?;
        if view.leader != leader {
            add(&mut self.report.audits, "leaders_changed_without_arbiter", Some(1));
        }
        self.window("arbiter_pause", stopped, now_ns())
    }

    fn switchover(&mut self) -> Result<()> {
        let leader = self.cluster.wait_leader(None, self.interrupted)?;
        let at = self.cluster.http_of(leader).to_string();
        let asked = now_ns();
        let said = Command::new(&self.program)
            .args(["admin", "switchover", "--at", &at])
            .stdin(Stdio::null())
            .output()
            .context("cannot start the program")?;
        if !said.status.success() {
            bail!("admin switchover: {}", String::from_utf8_lossy(&said.stderr).trim());
        }
        let deadline = Instant::now() + SWITCHOVER_MAX;
        while self.cluster.leader().is_none_or(|now| now == leader) {
            ensure!(Instant::now() < deadline, "the switchover was accepted, but the same master leads");
            self.sleep(Duration::from_millis(10))?;
        }
        self.whole(None)?;
        self.window("switchover", asked, now_ns())
    }

    fn flip(&mut self) -> Result<()> {
        let paths: Vec<String> =
            self.cluster.disk_paths().iter().map(|path| path.display().to_string()).collect();
        let order = format!("flip {FLIPS} {}", paths.join(" "));
        let flipped = self.clients.numbers(&order, "flipped")?;
        for (name, number) in flipped {
            add(&mut self.report.flips, &name, Some(number));
        }
        Ok(())
    }

    /// A master that does not lead.
    fn standby(&mut self) -> Result<usize> {
        let leader = self.cluster.wait_leader(None, self.interrupted)?;
        let others: Vec<usize> = (0..self.cluster.masters.len()).filter(|master| *master != leader).collect();
        let other = self.plan.below(others.len() as u64) as usize;
        others.get(other).copied().context("there is no other master")
    }

    /// Waits until the cluster is whole, and complains about nodes that were given up though they ran.
    fn whole(&mut self, anew: Option<usize>) -> Result<View> {
        let view = self.cluster.wait_whole(anew, self.interrupted)?;
        for name in &view.remounted {
            if anew.is_some_and(|node| *name == format!("n{node}")) {
                continue;
            }
            self.report.complaints.push(format!("{name} was given up though it ran, and mounted anew"));
            if let Some(node) = name.strip_prefix('n') {
                self.clients.ask(&format!("node-down {node}"), "down")?;
                self.clients.tell(&format!("node-up {node}"))?;
            }
        }
        Ok(view)
    }

    /// Measures how long clients had no answer.
    fn window(&mut self, name: &'static str, from: u64, to: u64) -> Result<()> {
        // While a master comes back, an outage that began before may not have ended for every client.
        let order = if name == "rejoin" { "window-begun" } else { "window" };
        let gaps = self.clients.ask(&format!("{order} {from} {to}"), "gaps")?;
        let (puts, gets) = (list(&gaps, "put"), list(&gaps, "get"));
        let names = match name {
            "failover" => ["failover", "failover_put", "failover_get"],
            "restart" => ["restart", "restart_put", "restart_get"],
            "stop" => ["stop", "stop_put", "stop_get"],
            "switchover" => ["switchover", "switchover_put", "switchover_get"],
            // Puts wait for a standby, gets do not: the whole of both says nothing.
            "standby_stall" => ["", "standby_stall", "standby_stall_get"],
            "standby_stop" => ["", "standby_stop_put", "standby_stop_get"],
            "arbiter_pause" => ["", "arbiter_pause_put", "arbiter_pause_get"],
            _ => ["", "rejoin_put", "rejoin_get"],
        };
        let mut extend = |name: &'static str, more: &[u64]| {
            if !name.is_empty() {
                self.report.times.entry(name).or_default().extend(more);
            }
        };
        extend(names[0], &puts);
        extend(names[0], &gets);
        extend(names[1], &puts);
        extend(names[2], &gets);
        Ok(())
    }

    fn audit(&mut self, which: &str, after: Option<Fault>) -> Result<()> {
        let audited = self.clients.numbers(&format!("audit {which}"), "audited")?;
        let number = |name: &str| audited.get(name).copied();
        for (name, number) in &audited {
            add(&mut self.report.audits, name, Some(*number));
        }
        match after {
            Some(Fault::KillNode) => {
                add(&mut self.report.audits, "cold_after_node", number("cold"));
                add(&mut self.report.audits, "cold_lost_after_node", number("cold_lost"));
            }
            // Nothing happened to nodes and disks.
            Some(fault) if fault.is_of_masters() => {
                add(&mut self.report.audits, "lost_by_masters", number("cold_lost"));
            }
            _ => {}
        }
        Ok(())
    }

    /// Counts the operations that failed since `before`.
    fn count_failures(&mut self, fault: Fault, before: &Numbers) {
        let failed = |name: &str| name.ends_with("_errors");
        let counts = self.clients.counts();
        let more: u64 = counts
            .iter()
            .filter(|(name, _)| failed(name))
            .map(|(name, now)| now.saturating_sub(before.get(name).copied().unwrap_or(0)))
            .sum();
        *self.report.failed.entry(fault.name()).or_default() += more;
    }

    fn pause(&mut self, min_ms: u64, max_ms: u64) -> Result<()> {
        let ms = min_ms + self.plan.below(max_ms - min_ms);
        self.sleep(Duration::from_millis(ms))
    }

    /// Sleeps; reports progress.
    fn sleep(&mut self, time: Duration) -> Result<()> {
        let until = Instant::now() + time;
        loop {
            let now = Instant::now();
            if self.interrupted.load(Ordering::Relaxed) {
                bail!(Interrupted);
            }
            if now >= self.progress_at {
                self.progress_at = now + PROGRESS;
                self.say_progress();
            }
            if now >= until {
                return Ok(());
            }
            std::thread::sleep((until - now).min(Duration::from_millis(50)));
        }
    }

    fn say_progress(&self) {
        let counts = self.clients.counts();
        let count = |name: &str| counts.get(name).copied().unwrap_or(0);
        let audited = |name: &str| self.report.audits.get(name).copied().unwrap_or(0);
        let failover = self.report.times.get("failover").map_or(0, |times| report::percentile(times, 0.99));
        eprintln!(
            "soak: {}: {} faults, {} kills, {} puts and {} removes acknowledged, {} objects audited, {} lost, \
             {} resurrected, {} wrong, failover p99 {} ms",
            stats::duration(self.began.elapsed()),
            self.total(),
            self.report.kills(),
            count("acked_puts"),
            count("acked_removes"),
            audited("read") + audited("removed"),
            audited("lost") + audited("lost_by_masters"),
            count("resurrected"),
            count("wrong"),
            failover / 1_000,
        );
    }

    /// The last audit; ends every process.
    fn end(mut self, ended: Result<()>) -> Report {
        self.report.length = self.began.elapsed();
        if let Err(error) = ended {
            if error.downcast_ref::<Interrupted>().is_some() || error.root_cause().is::<Interrupted>() {
                eprintln!("soak: interrupted; the last audit follows");
                self.report.interrupted = true;
            } else {
                self.report.complaints.push(format!("{error:#}"));
            }
        }
        if let Err(error) = self.audit_all() {
            self.report.complaints.push(format!("the last audit: {error:#}"));
        }
        self.report.stats = self.cluster.stats().unwrap_or_default();
        if let Err(error) = self.clients.end() {
            self.report.complaints.push(format!("{error:#}"));
        }
        self.report.counts = self.clients.counts();
        self.report.complaints.extend(self.clients.complaints());
        let stubborn = self.cluster.end();
        self.report.complaints.extend(stubborn);
        if self.report.judge().is_err()
            && let Some(dir) = self.dir.take()
        {
            eprintln!("soak: the logs are in {}", dir.keep().display());
        }
        std::mem::take(&mut self.report)
    }

    fn audit_all(&mut self) -> Result<()> {
        self.cluster.heal()?;
        // The signal that has ended the soak does not end this.
        let never = AtomicBool::new(false);
        self.cluster.wait_whole(None, &never)?;
        if self.report.disk_mib > 0 && !self.report.interrupted && self.nodes_die {
            // Nothing is expected of disks that was not confirmed after the last fault.
            self.clients.numbers("expect", "expected")?;
        }
        self.audit("full", None)
    }
}

impl Drop for Soak<'_> {
    fn drop(&mut self) {
        self.clients.kill();
    }
}

/// The command line of the clients.
fn words(args: &Args, cluster: &Cluster, report: &Report, nodes_die: bool) -> Vec<String> {
    // A quarter of the memory at most is pinned: two clients, objects of 3 KiB in 1.5 replicas.
    let room = (report.node_mib * report.nodes as u64) << 20;
    let pinned = (room / 4 / report.clients.max(1) as u64 / 4_608).clamp(16, args.faulty.objects);
    let cold = if report.disk_mib > 0 { args.faulty.objects / 2 } else { 0 };
    let churn =
        if args.faulty.churn_mib_s > 0.0 { (args.faulty.churn_mib_s * 1_048_576.0) as u64 } else { 0 };
    [
        format!("masters={}", cluster.master_list()),
        format!("seed={}", report.seed),
        format!("clients={}", report.clients),
        format!("pinned={pinned}"),
        format!("cold={cold}"),
        format!("pace_us={}", args.faulty.pace_us),
        format!("probe_us={}", args.faulty.probe_us),
        format!("fill_bytes={room}"),
        format!("churn_bytes_per_s={churn}"),
        format!("nodes_die={}", u8::from(nodes_die)),
        format!("lie={}", args.faulty.lie),
    ]
    .into()
}

/// Where masters agree on which of them leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Arbiter {
    Etcd,
    Directory,
}

/// Whether etcd is used; says why not.
fn use_etcd(wanted: Option<Arbiter>, program: &Path) -> Result<bool> {
    if wanted == Some(Arbiter::Directory) {
        return Ok(false);
    }
    let installed =
        Command::new("etcd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    let why = if !installed {
        "etcd is not installed (`apt-get install etcd-server`)"
    } else if !has_etcd(program)? {
        "the program was built without the feature `etcd`"
    } else {
        return Ok(true);
    };
    ensure!(wanted.is_none(), "--arbiter etcd: {why}");
    eprintln!("soak: {why}, so a directory is the arbiter");
    Ok(false)
}

/// Whether the program was built with the feature `etcd`: without it, it refuses the address at once.
fn has_etcd(program: &Path) -> Result<bool> {
    let words = ["master", "--ha", "etcd://127.0.0.1:1", "--listen", "127.0.0.1:0"];
    let mut child = Command::new(program)
        .args(words)
        .args(["--http", "127.0.0.1:0", "--ha-listen", "127.0.0.1:0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let deadline = Instant::now() + Duration::from_secs(1);
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    let output = child.wait_with_output()?;
    Ok(!String::from_utf8_lossy(&output.stderr).contains("which this build lacks"))
}

/// The program and its profile, as far as its path tells.
fn profile_of(program: &Path) -> String {
    let named = program.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    match named.as_deref() {
        Some(profile @ ("debug" | "release")) => format!("profile {profile}"),
        _ => program.display().to_string(),
    }
}

fn add(numbers: &mut Numbers, name: &str, more: Option<u64>) {
    *numbers.entry(name.to_owned()).or_default() += more.unwrap_or(0);
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_is_that_of_the_directory() {
        assert_eq!(profile_of(Path::new("/a/target/release/snowskin")), "profile release");
        assert_eq!(profile_of(Path::new("/opt/snowskin")), "/opt/snowskin");
    }
}

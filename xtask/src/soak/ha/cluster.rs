//! The masters, the nodes and the arbiter, as processes of the `snowskin` program and of etcd.

use super::super::{free_address, spawn};
use super::Interrupted;
use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long everything may take to be whole again.
pub(super) const WHOLE_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
const END_MAX: Duration = Duration::from_secs(10);

/// What the cluster consists of.
pub(super) struct Shape {
    pub(super) program: PathBuf,
    pub(super) dir: PathBuf,
    pub(super) masters: usize,
    pub(super) nodes: usize,
    pub(super) node_mib: u64,
    /// Size of each node's disk; 0: it has none.
    pub(super) disk_mib: u64,
    pub(super) etcd: bool,
}

pub(super) struct Cluster {
    shape: Shape,
    pub(super) masters: Vec<Proc>,
    pub(super) nodes: Vec<Proc>,
    pub(super) etcd: Option<Proc>,
    rpc: Vec<SocketAddr>,
    http: Vec<SocketAddr>,
    guard: Child,
    /// The incarnation of each node, as it was mounted last.
    incarnations: BTreeMap<String, String>,
}

/// A process that can be started again.
pub(super) struct Proc {
    pub(super) name: String,
    program: PathBuf,
    words: Vec<String>,
    log: PathBuf,
    group: i32,
    child: Option<Child>,
    stopped: bool,
}

/// A cluster that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct View {
    /// Which master leads.
    pub(super) leader: usize,
    /// Nodes that were mounted anew since the last view, by name.
    pub(super) remounted: Vec<String>,
}

impl Proc {
    fn start(&mut self, more: &[&str]) -> Result<()> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        let log = log.with_context(|| format!("cannot write {}", self.log.display()))?;
        let mut command = Command::new(&self.program);
        // Ctrl-C reaches only this process.
        command.args(&self.words).args(more).process_group(self.group);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child =
            spawn(&mut command).with_context(|| format!("cannot start {}", self.program.display()))?;
        (self.child, self.stopped) = (Some(child), false);
        Ok(())
    }

    pub(super) fn signal(&mut self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().with_context(|| format!("{} does not run", self.name))?;
        kill(Pid::from_raw(child.id() as i32), signal)?;
        self.stopped = match signal {
            Signal::SIGSTOP => {
                // Its threads run until the one that takes the signal was scheduled.
                let until = Instant::now() + WHOLE_MAX;
                while !is_stopped(child.id()) && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                true
            }
            Signal::SIGCONT => false,
            _ => self.stopped,
        };
        Ok(())
    }

    /// Ends it without warning.
    pub(super) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.stopped = false;
    }

    fn check(&mut self) -> Result<()> {
        let Some(child) = &mut self.child else { return Ok(()) };
        if let Some(status) = child.try_wait()? {
            self.child = None;
            bail!("{} ended by itself ({status}); its log is {}", self.name, self.log.display());
        }
        Ok(())
    }
}

impl Cluster {
    pub(super) fn start(shape: Shape) -> Result<Self> {
        // All processes are in the group of this one, which kills the group when its standard input ends:
        // when the soak ends, for whatever reason.
        let guard = Command::new("sh")
            .args(["-c", "trap '' INT TERM; read -r _; kill -9 0"])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start sh")?;
        let group = guard.id() as i32;
        let (mut rpc, mut http) = (Vec::new(), Vec::new());
        for _ in 0..shape.masters {
            rpc.push(free_address()?);
            http.push(free_address()?);
        }
        let (masters, nodes, incarnations) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut cluster = Self { shape, masters, nodes, etcd: None, rpc, http, guard, incarnations };
        let ha = cluster.start_arbiter(group)?;
        for no in 0..cluster.shape.masters {
            let mut words = vec!["master".to_owned(), "--json".into()];
            let mut say = |name: &str, value: String| words.extend([format!("--{name}"), value]);
            say("listen", cluster.rpc[no].to_string());
            say("http", cluster.http[no].to_string());
            say("spin-us", "0".into());
            // Short enough that objects are evicted, long enough for a machine that is busy.
            say("lease-ms", "2000".into());
            say("slow-start-ms", "0".into());
            say("store-demote-ahead", "0.3".into());
            match &ha {
                Some(ha) => {
                    say("ha", ha.clone());
                    say("cluster-id", "soak".into());
                    say("member-id", (no + 1).to_string());
                    say("ha-listen", free_address()?.to_string());
                }
                None => say("journal", cluster.shape.dir.join("journal").display().to_string()),
            }
            let mut master =
                cluster.proc(&format!("master-{no}"), cluster.shape.program.clone(), words, group);
            master.start(&[])?;
            cluster.masters.push(master);
        }
        for no in 0..cluster.shape.nodes {
            let mut words: Vec<String> = ["node", "--json", "--name"].map(str::to_owned).to_vec();
            words.extend([format!("n{no}"), "--master".into(), cluster.master_list()]);
            words.extend(["--memory".into(), format!("{}MiB", cluster.shape.node_mib)]);
            words.extend(["--engine-spin-us", "0", "--rpc-spin-us", "0"].map(str::to_owned));
            if cluster.shape.disk_mib > 0 {
                let disk = format!("{}:{}MiB", cluster.disk_path(no).display(), cluster.shape.disk_mib);
                words.extend(["--disk".into(), disk, "--stage-memory-bytes".into(), "16MiB".into()]);
            }
            let mut node = cluster.proc(&format!("n{no}"), cluster.shape.program.clone(), words, group);
            node.start(&[])?;
            cluster.nodes.push(node);
        }
        Ok(cluster)
    }

    fn proc(&self, name: &str, program: PathBuf, words: Vec<String>, group: i32) -> Proc {
        let log = self.shape.dir.join(format!("{name}.log"));
        Proc { name: name.to_owned(), program, words, log, group, child: None, stopped: false }
    }

    /// The value of `--ha`, if there are several masters.
    fn start_arbiter(&mut self, group: i32) -> Result<Option<String>> {
        if self.shape.masters < 2 {
            return Ok(None);
        }
        if !self.shape.etcd {
            let dir = self.shape.dir.join("arbiter");
            std::fs::create_dir_all(&dir)?;
            return Ok(Some(format!("file://{}", dir.display())));
        }
        let (addr, peers) = (free_address()?, format!("http://{}", free_address()?));
        let clients = format!("http://{addr}");
        let data = self.shape.dir.join("etcd").display().to_string();
        let cluster = format!("soak={peers}");
        let words = [
            ["--name", "soak"],
            ["--data-dir", &data],
            ["--listen-client-urls", &clients],
            ["--advertise-client-urls", &clients],
            ["--listen-peer-urls", &peers],
            ["--initial-advertise-peer-urls", &peers],
            ["--initial-cluster", &cluster],
        ];
        let words = words.concat().into_iter().map(str::to_owned).collect();
        let mut etcd = self.proc("etcd", "etcd".into(), words, group);
        etcd.start(&[])?;
        let deadline = Instant::now() + WHOLE_MAX;
        while TcpStream::connect(addr).is_err() {
            etcd.check()?;
            ensure!(Instant::now() < deadline, "etcd does not listen");
            std::thread::sleep(LOOK);
        }
        self.etcd = Some(etcd);
        Ok(Some(format!("etcd://{addr}")))
    }

    /// The process group of everything.
    pub(super) fn group(&self) -> i32 {
        self.guard.id() as i32
    }

    pub(super) fn master_list(&self) -> String {
        self.rpc.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }

    pub(super) fn rpc_of(&self, master: usize) -> SocketAddr {
        self.rpc[master]
    }

    pub(super) fn http_of(&self, master: usize) -> SocketAddr {
        self.http[master]
    }

    pub(super) fn disk_path(&self, node: usize) -> PathBuf {
        self.shape.dir.join(format!("n{node}.disk"))
    }

    pub(super) fn disk_paths(&self) -> Vec<PathBuf> {
        let nodes = if self.shape.disk_mib > 0 { self.shape.nodes } else { 0 };
        (0..nodes).map(|node| self.disk_path(node)).collect()
    }

    pub(super) fn start_master(&mut self, master: usize) -> Result<()> {
        self.masters[master].start(&[])
    }

    /// A node that was killed takes its name over from itself: no process has to wait until it is given up.
    pub(super) fn start_node(&mut self, node: usize) -> Result<()> {
        self.nodes[node].start(&["--takeover"])
    }

    /// The master that leads and answers, if there is one.
    pub(super) fn leader(&self) -> Option<usize> {
        (0..self.masters.len()).find(|master| {
            let running = self.masters[*master].child.is_some() && !self.masters[*master].stopped;
            running && self.says(*master, "/api/v1/masters").is_some_and(|says| leads(&says))
        })
    }

    fn says(&self, master: usize, path: &str) -> Option<Value> {
        serde_json::from_str(&get(self.http[master], path)?).ok()
    }

    /// A counter or gauge of the master that leads.
    pub(super) fn stats(&self) -> Option<Value> {
        let status = self.says(self.leader()?, "/api/v1/status")?;
        status.get("stats").cloned()
    }

    /// Waits until a master other than `not` leads.
    pub(super) fn wait_leader(&mut self, not: Option<usize>, interrupted: &AtomicBool) -> Result<usize> {
        self.wait("no master took over", interrupted, |cluster| {
            cluster.leader().filter(|leader| Some(*leader) != not).ok_or_else(String::new)
        })
    }

    /// Waits until one master leads, all are in sync, every node is mounted, and every disk is there. A node
    /// in `anew` has to be mounted anew.
    pub(super) fn wait_whole(&mut self, anew: Option<usize>, interrupted: &AtomicBool) -> Result<View> {
        let view = self.wait("not whole again", interrupted, |cluster| cluster.look(anew))?;
        let leader = view.leader;
        self.incarnations =
            self.says(leader, "/api/v1/segments").map(|says| incarnations(&says)).unwrap_or_default();
        Ok(view)
    }

    fn wait<T>(
        &mut self,
        what: &str,
        interrupted: &AtomicBool,
        look: impl Fn(&Self) -> std::result::Result<T, String>,
    ) -> Result<T> {
        let deadline = Instant::now() + WHOLE_MAX;
        loop {
            let why = match look(self) {
                Ok(seen) => return Ok(seen),
                Err(why) => why,
            };
            if interrupted.load(Ordering::Relaxed) {
                bail!(Interrupted);
            }
            ensure!(Instant::now() < deadline, "{what} after {} s: {why}", WHOLE_MAX.as_secs());
            self.check()?;
            std::thread::sleep(LOOK);
        }
    }

    /// An error if a process ended that was not ended here.
    pub(super) fn check(&mut self) -> Result<()> {
        let all = self.masters.iter_mut().chain(&mut self.nodes).chain(&mut self.etcd);
        all.into_iter().try_for_each(Proc::check)
    }

    /// Whether it is whole; otherwise what is missing.
    fn look(&self, anew: Option<usize>) -> std::result::Result<View, String> {
        let leader = self.leader().ok_or("no master leads")?;
        let says = self.says(leader, "/api/v1/masters").ok_or("the leader does not answer")?;
        let members = says["masters"].as_array().cloned().unwrap_or_default();
        let in_sync = members.iter().filter(|member| member["in_sync"] == true).count();
        // A master that is alone lists none.
        if self.masters.len() > 1 && in_sync != self.masters.len() {
            return Err(format!("{in_sync} of {} masters are in sync", self.masters.len()));
        }
        let segments = self.says(leader, "/api/v1/segments").ok_or("the leader does not answer")?;
        let now = incarnations(&segments);
        for no in 0..self.nodes.len() {
            let name = format!("n{no}");
            let incarnation = now.get(&name).ok_or_else(|| format!("{name} is not mounted"))?;
            if anew == Some(no) && self.incarnations.get(&name) == Some(incarnation) {
                return Err(format!("{name} is not mounted anew"));
            }
        }
        if self.shape.disk_mib > 0 {
            let status = self.says(leader, "/api/v1/status").ok_or("the leader does not answer")?;
            let disks = status["stats"]["disks"].as_u64().unwrap_or(0);
            let away = status["stats"]["disks_away"].as_u64().unwrap_or(0);
            if disks != self.nodes.len() as u64 || away > 0 {
                return Err(format!("{disks} disks are there, and {away} away"));
            }
        }
        let known = now
            .iter()
            .filter(|(name, now)| self.incarnations.get(*name).is_some_and(|before| before != *now));
        let remounted = known.map(|(name, _)| name.clone()).collect();
        Ok(View { leader, remounted })
    }

    /// Continues what is stopped and starts what does not run.
    pub(super) fn heal(&mut self) -> Result<()> {
        for proc in self.masters.iter_mut().chain(&mut self.nodes).chain(&mut self.etcd) {
            if proc.stopped {
                proc.signal(Signal::SIGCONT)?;
            }
            if proc.child.is_none() {
                let takeover: &[&str] = if proc.name.starts_with('n') { &["--takeover"] } else { &[] };
                proc.start(takeover)?;
            }
        }
        Ok(())
    }

    /// Ends every process, nodes first. Returns those that did not end by themselves within ten seconds.
    pub(super) fn end(&mut self) -> Vec<String> {
        let mut stubborn = Vec::new();
        for proc in self.nodes.iter_mut().chain(&mut self.masters).chain(&mut self.etcd) {
            if proc.child.is_none() {
                continue;
            }
            let _ = proc.signal(Signal::SIGCONT);
            let _ = proc.signal(Signal::SIGTERM);
            let deadline = Instant::now() + END_MAX;
            let ended = |proc: &mut Proc| {
                proc.child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
            };
            while !ended(proc) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            if !ended(proc) {
                stubborn.push(format!("{} did not end after SIGTERM", proc.name));
            }
            proc.kill();
        }
        stubborn
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for proc in self.nodes.iter_mut().chain(&mut self.masters).chain(&mut self.etcd) {
            proc.kill();
        }
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }
}

fn leads(says: &Value) -> bool {
    let role = says["role"].as_str();
    // A master without others has no role to speak of.
    says["serving"] == true
        && (role == Some("leading") || says["masters"].as_array().is_some_and(Vec::is_empty))
}

fn incarnations(segments: &Value) -> BTreeMap<String, String> {
    let rows = segments.as_array().into_iter().flatten();
    let row = |row: &Value| Some((row["name"].as_str()?.to_owned(), row["incarnation"].as_str()?.to_owned()));
    rows.filter_map(row).collect()
}

/// The body of the answer to a GET; `None`: there is none.
fn get(addr: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&addr, Duration::from_millis(300)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 200").then(|| body.to_owned())
}

/// Flips this many bits of a file, at places that `below` chooses.
pub(super) fn damage(path: &Path, bits: usize, mut below: impl FnMut(u64) -> u64) -> Result<()> {
    use std::os::unix::fs::FileExt as _;
    let file = File::options().read(true).write(true).open(path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    let len = file.metadata()?.len();
    for _ in 0..bits {
        let (at, mut byte) = (below(len), [0]);
        file.read_exact_at(&mut byte, at)?;
        byte[0] ^= 1 << below(8);
        file.write_all_at(&byte, at)?;
    }
    Ok(file.sync_data()?)
}

/// Whether every thread of a process is stopped.
fn is_stopped(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    threads.flatten().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // proc(5): the state follows the name, which is in parentheses and may contain any character.
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T') || rest.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_flips_single_bits() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("disk");
        std::fs::write(&path, [0; 1000]).expect("written");
        let mut state = 1_u64;
        damage(&path, 1, |n| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        })
        .expect("damaged");
        let ones: u32 = std::fs::read(&path).expect("read").iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(ones, 1);
    }

    #[test]
    fn who_leads_is_read_from_what_masters_say() {
        let says = |text: &str| leads(&serde_json::from_str(text).expect("JSON"));
        assert!(says(r#"{"role":"leading","serving":true,"masters":[{"id":"1"}]}"#));
        assert!(!says(r#"{"role":"leading","serving":false,"masters":[{"id":"1"}]}"#));
        assert!(!says(r#"{"role":"following","serving":true,"masters":[{"id":"1"}]}"#));
        assert!(says(r#"{"role":"alone","serving":true,"masters":[]}"#));
    }
}

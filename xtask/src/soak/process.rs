//! Slots and the processes in them.

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A process that is not ready within this time is started again: the master may be down.
const READY_MAX: Duration = Duration::from_secs(10);
/// Complaints that are kept per process.
const COMPLAINTS_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Master,
    Node(usize),
    Client(usize),
    /// Sends requests at a steady pace; the durations of its calls are judged.
    Prober,
    /// An attacker of the given kind.
    Hostile(&'static str),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Master => f.write_str("master"),
            Self::Node(node) => write!(f, "node {node}"),
            Self::Client(client) => write!(f, "client {client}"),
            Self::Prober => f.write_str("prober"),
            Self::Hostile(kind) => write!(f, "hostile {kind}"),
        }
    }
}

/// A place for one process after another.
pub(super) struct Slot {
    pub(super) role: Role,
    binary: Arc<PathBuf>,
    words: Vec<String>,
    process: Option<Process>,
    /// When the next process is to be started, if there is none.
    start_at: Option<Instant>,
    /// When the process is to be continued, if it is stopped.
    resume_at: Option<Instant>,
    /// Counters of former processes.
    counted: BTreeMap<String, u64>,
    complaints: Vec<String>,
}

pub(super) struct Process {
    child: Child,
    began: Instant,
    said: Arc<Mutex<Said>>,
}

/// The output of a process so far.
#[derive(Default)]
struct Said {
    ready: bool,
    counts: BTreeMap<String, u64>,
    wrong: Vec<String>,
    /// Durations of calls in microseconds, by operation, since they were last taken.
    times: Vec<(String, u32)>,
}

impl Slot {
    pub(super) fn new(role: Role, binary: Arc<PathBuf>, words: Vec<String>) -> Self {
        Self {
            role,
            binary,
            words,
            process: None,
            start_at: None,
            resume_at: None,
            counted: BTreeMap::new(),
            complaints: Vec::new(),
        }
    }

    pub(super) fn start(&mut self) -> Result<()> {
        self.start_at = None;
        // Real attackers run on other machines, so they must not take CPU time from the store.
        let nice = matches!(self.role, Role::Hostile(_));
        self.process = Some(Process::start(&self.binary, &self.words, nice)?);
        Ok(())
    }

    pub(super) fn wait_until_ready(&mut self, deadline: Instant) -> Result<()> {
        while !self.process.as_ref().is_some_and(Process::is_ready) {
            if Instant::now() > deadline {
                bail!("{} did not get ready", self.role);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The running process, if it is ready, stopped or not.
    pub(super) fn process(&self) -> Option<&Process> {
        self.process.as_ref().filter(|process| process.is_ready())
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.resume_at.is_some()
    }

    /// Does what is due: starts and continues processes, and notices those that have ended by themselves.
    pub(super) fn turn(&mut self, now: Instant) -> Result<()> {
        if self.start_at.is_some_and(|at| now >= at) {
            self.start()?;
        }
        if self.resume_at.is_some_and(|at| now >= at) {
            self.resume_at = None;
            self.signal(Signal::SIGCONT)?;
        }
        let Some(process) = &mut self.process else { return Ok(()) };
        let ended = process.child.try_wait()?;
        let ready = process.is_ready();
        match ended {
            // It did not reach its master, which may be down for a moment.
            Some(_) if !ready => self.clear(now + Duration::from_millis(200)),
            Some(status) => {
                self.complaints.push(format!("{} ended by itself: {status}", self.role));
                self.clear(now);
            }
            None if !ready && self.resume_at.is_none() && process.age(now) > READY_MAX => {
                self.kill(now)?;
            }
            None => {}
        }
        Ok(())
    }

    /// Kills the process without warning. Another one is started at `again_at`.
    pub(super) fn kill(&mut self, again_at: Instant) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        if let Some(process) = &mut self.process {
            process.child.wait()?;
        }
        self.clear(again_at);
        Ok(())
    }

    /// Stops the process with SIGSTOP until `resume_at`.
    pub(super) fn stop(&mut self, resume_at: Instant) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        self.resume_at = Some(resume_at);
        Ok(())
    }

    /// Stops the process with SIGTERM, and kills it if it does not end by `deadline`.
    pub(super) fn end(&mut self, deadline: Instant) {
        // The process may be stopped; a signal to one that has ended has no effect.
        let _ = self.signal(Signal::SIGCONT);
        let Some(process) = &mut self.process else { return };
        drop(process.child.stdin.take());
        let ready = process.is_ready();
        let ended = loop {
            match process.child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
                _ => break None,
            }
        };
        match ended {
            Some(status) if status.success() || !ready => {}
            Some(status) => self.complaints.push(format!("{} ended badly: {status}", self.role)),
            None => self.complaints.push(format!("{} did not end after SIGTERM", self.role)),
        }
        if let Some(process) = self.take() {
            process.kill();
        }
    }

    /// The counters of its processes, including those that have ended.
    pub(super) fn counts(&self) -> impl Iterator<Item = (String, u64)> {
        let now = self.process.as_ref().map(|process| process.said().counts.clone()).unwrap_or_default();
        self.counted.clone().into_iter().chain(now)
    }

    /// Operations and the durations of their calls, µs, since the last call of this.
    pub(super) fn take_times(&self) -> Vec<(String, u32)> {
        self.process.as_ref().map(|process| std::mem::take(&mut process.said().times)).unwrap_or_default()
    }

    /// Results that must never occur.
    pub(super) fn complaints(&self) -> Vec<String> {
        self.complaints.clone()
    }

    pub(super) fn take(&mut self) -> Option<Process> {
        let process = self.process.take()?;
        let said = process.said();
        for (name, count) in &said.counts {
            *self.counted.entry(name.clone()).or_default() += count;
        }
        for wrong in said.wrong.iter().take(COMPLAINTS_MAX.saturating_sub(self.complaints.len())) {
            self.complaints.push(format!("{}: {wrong}", self.role));
        }
        drop(said);
        Some(process)
    }

    fn clear(&mut self, again_at: Instant) {
        drop(self.take());
        (self.start_at, self.resume_at) = (Some(again_at), None);
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        match &self.process {
            Some(process) => Ok(kill(Pid::from_raw(process.child.id() as i32), signal)?),
            None => Ok(()),
        }
    }
}

impl Process {
    fn start(binary: &Path, words: &[String], nice: bool) -> Result<Self> {
        let (program, words) = if nice {
            let nicely = ["-n".to_owned(), "19".to_owned(), binary.display().to_string()];
            (Path::new("nice"), nicely.into_iter().chain(words.iter().cloned()).collect())
        } else {
            (binary, words.to_vec())
        };
        let mut child = Command::new(program)
            .args(words)
            // Ctrl-C reaches only this process; the children end when their standard input is closed.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", binary.display()))?;
        let said = Arc::new(Mutex::new(Said::default()));
        let stdout = child.stdout.take().context("no stdout")?;
        let heard = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(std::result::Result::ok) {
                heard.lock().unwrap_or_else(PoisonError::into_inner).hear(&line);
            }
        });
        Ok(Self { child, began: Instant::now(), said })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.began)
    }

    pub(super) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn is_ready(&self) -> bool {
        self.said().ready
    }

    fn said(&self) -> std::sync::MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Said {
    fn hear(&mut self, line: &str) {
        match line.split_once(' ').map_or(line, |(first, _)| first) {
            "ready" => self.ready = true,
            "wrong" => self.wrong.push(line.to_owned()),
            "times" => {
                let mut words = line.split(' ').skip(1);
                let name = words.next().unwrap_or_default();
                let times = words.filter_map(|word| word.parse().ok());
                self.times.extend(times.map(|time: u32| (name.to_owned(), time)));
            }
            "counts" => {
                for (name, count) in line.split(' ').filter_map(|word| word.split_once('=')) {
                    if let Ok(count) = count.parse() {
                        self.counts.insert(name.to_owned(), count);
                    }
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_of_a_process_is_parsed() {
        let mut said = Said::default();
        said.hear("counts puts=3 hits=x");
        assert!(!said.ready && said.counts == BTreeMap::from([("puts".to_owned(), 3)]));
        said.hear("ready 127.0.0.1:1");
        said.hear("counts puts=5 wrong=1");
        said.hear("wrong bytes of key 7");
        said.hear("");
        said.hear("times get 12 x 7");
        assert_eq!(said.times, [("get".to_owned(), 12), ("get".to_owned(), 7)]);
        assert!(said.ready);
        assert_eq!((said.counts["puts"], said.counts["wrong"], said.wrong.len()), (5, 1, 1));
    }
}

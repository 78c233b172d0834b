//! Child processes: this same binary, started again as a master, a node or a target. A child never outlives
//! its parent.
//!
//! A child reports on its stdout, in one line of JSON, that it is ready and where it listens. The last lines
//! of its stderr are kept, so that the message about a failed child can quote them. `PR_SET_PDEATHSIG` ends
//! the child with its parent, even when the parent is killed.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::de::DeserializeOwned;

use crate::exit::Failure;
use crate::{fail, sys};

/// Lines of a child's stderr that are kept.
const STDERR_LINES_MAX: usize = 20;
/// Bytes that are kept of each line.
const LINE_BYTES_MAX: u64 = 4096;
/// Time for a child to stop before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// How often a wait checks whether the child has ended or Ctrl-C was pressed.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A running child. Dropping it kills it and waits for it to end.
#[derive(Debug)]
pub(crate) struct Child {
    name: String,
    process: std::process::Child,
    status: Option<ExitStatus>,
    stdout: Receiver<String>,
    stderr: Arc<Mutex<VecDeque<String>>>,
    reader: Option<JoinHandle<()>>,
    last_cpu: Duration,
}

impl Child {
    /// Starts this binary with `args`; messages call the child `name`.
    ///
    /// # Errors
    /// The system cannot start the process.
    pub(crate) fn start(name: impl Into<String>, args: &[String]) -> anyhow::Result<Self> {
        let name = name.into();
        // The running binary, even if its file has been replaced by a newer build.
        let mut command = Command::new("/proc/self/exe");
        std::os::unix::process::CommandExt::arg0(&mut command, "snowskin");
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        sys::die_with_parent(&mut command);
        let mut process = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let (lines, stdout) = channel();
        if let Some(output) = process.stdout.take() {
            std::thread::spawn(move || for_each_line(output, |line| drop(lines.send(line))));
        }
        let stderr = Arc::new(Mutex::new(VecDeque::new()));
        let reader = process.stderr.take().map(|output| {
            let (kept, name) = (Arc::clone(&stderr), name.clone());
            std::thread::spawn(move || {
                for_each_line(output, |line| {
                    tracing::info!(target: "snowskin::child", "{name}: {line}");
                    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                    if kept.len() == STDERR_LINES_MAX {
                        kept.pop_front();
                    }
                    kept.push_back(line);
                });
            })
        });
        tracing::debug!("{name} is process {}", process.id());
        Ok(Self { name, process, status: None, stdout, stderr, reader, last_cpu: Duration::ZERO })
    }

    /// Waits for the line in which the child reports that it is ready.
    ///
    /// # Errors
    /// The child ends first, takes longer than `timeout`, or prints another line. The error quotes its
    /// stderr.
    pub(crate) fn ready<T: DeserializeOwned>(&mut self, timeout: Duration) -> anyhow::Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.stdout.recv_timeout(CHECK_INTERVAL) {
                Ok(line) => {
                    return serde_json::from_str(&line).map_err(|error| {
                        Failure::failed(format!(
                            "{} printed `{line}` where a JSON line with its addresses was expected: {error}",
                            self.name
                        ))
                        .into()
                    });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.wait(STOP_GRACE);
                    return fail(Failure::failed(self.describe_end(status)));
                }
            }
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            if Instant::now() >= deadline {
                let secs = timeout.as_secs();
                return fail(
                    Failure::failed(format!("{} was not ready within {secs} s{}", self.name, self.quoted_stderr()))
                        .hint("the machine may be overloaded or short of memory; `snowskin doctor` looks for causes"),
                );
            }
        }
    }

    /// CPU time used so far; after the child has ended, the last value that was read.
    pub(crate) fn cpu(&mut self) -> Duration {
        if self.status.is_none()
            && let Some(cpu) = sys::process_cpu(self.process.id())
        {
            self.last_cpu = self.last_cpu.max(cpu);
        }
        self.last_cpu
    }

    /// Resident memory, bytes.
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
    }

    /// If the child has ended: how, as a message for the user.
    pub(crate) fn died(&mut self) -> Option<String> {
        if self.status.is_none() {
            // CPU time is read before the child is reaped: after that its process id may be reused.
            self.cpu();
            self.status = self.process.try_wait().ok().flatten();
        }
        let status = self.status?;
        Some(self.describe_end(Some(status)))
    }

    /// Sends SIGTERM, without waiting.
    pub(crate) fn ask_to_stop(&mut self) {
        if self.died().is_none() {
            sys::terminate(self.process.id());
        }
    }

    /// Stops the child and waits for it; kills it when it takes longer than `STOP_GRACE`.
    pub(crate) fn stop(&mut self) {
        self.ask_to_stop();
        if self.wait(STOP_GRACE).is_none() {
            tracing::warn!("{} did not stop within {} s: killed", self.name, STOP_GRACE.as_secs());
            self.kill();
        }
    }

    /// Kills the child, and waits for its end.
    pub(crate) fn kill(&mut self) {
        if self.status.is_none() {
            let _ = self.process.kill();
            self.status = self.process.wait().ok();
        }
    }

    fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + timeout;
        while self.status.is_none() && Instant::now() < deadline {
            self.status = self.process.try_wait().ok().flatten();
            if self.status.is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        self.status
    }

    fn describe_end(&mut self, status: Option<ExitStatus>) -> String {
        let how = status.map_or_else(|| "closed its output".to_owned(), |status| format!("ended ({status})"));
        // The last lines of its stderr may still be in the pipe.
        if status.is_some()
            && let Some(reader) = self.reader.take()
        {
            let deadline = Instant::now() + Duration::from_millis(200);
            while !reader.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        format!("{} {how}{}", self.name, self.quoted_stderr())
    }

    fn quoted_stderr(&self) -> String {
        let kept = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_empty() {
            return "; stderr was empty".to_owned();
        }
        kept.iter().fold(":".to_owned(), |text, line| text + "\n    | " + line)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Stops all children at the same time and waits for each.
pub(crate) fn stop_all<'a>(children: impl IntoIterator<Item = &'a mut Child>) {
    let mut children: Vec<_> = children.into_iter().collect();
    for child in &mut children {
        child.ask_to_stop();
    }
    for child in children {
        child.stop();
    }
}

/// Calls `line` for each line, cut at `LINE_BYTES_MAX`, until the pipe is closed.
fn for_each_line(pipe: impl Read, mut line: impl FnMut(String)) {
    let mut input = BufReader::new(pipe);
    let mut buffer = Vec::new();
    loop {
        buffer.clear();
        match input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(_) => line(String::from_utf8_lossy(buffer.trim_ascii_end()).into_owned()),
        }
    }
}

//! Children: this same binary, started again as a master, a node or a target, and never outliving us.
//!
//! A child says on its stdout, in one line of JSON, that it is ready and where it listens. Its stderr is kept, so that a
//! child that fails can be quoted. It dies with us (`PR_SET_PDEATHSIG`), even when we are killed.

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
/// Bytes of one line that are kept.
const LINE_BYTES_MAX: u64 = 4096;
/// How long a child may take to stop before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// How often a wait looks whether the child died or somebody pressed Ctrl-C.
const LOOK: Duration = Duration::from_millis(20);

/// A running child. Dropping it kills it and waits for its end.
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
    /// When the system cannot start it.
    pub(crate) fn start(name: impl Into<String>, args: &[String]) -> anyhow::Result<Self> {
        let name = name.into();
        // The running image, even when the file was replaced by a newer build meanwhile.
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

    /// Waits for the line that says where it listens.
    ///
    /// # Errors
    /// When it dies first, takes longer than `timeout`, or says something else: with what it wrote to stderr.
    pub(crate) fn ready<T: DeserializeOwned>(&mut self, timeout: Duration) -> anyhow::Result<T> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.stdout.recv_timeout(LOOK) {
                Ok(line) => {
                    return serde_json::from_str(&line).map_err(|error| {
                        Failure::failed(format!(
                            "{} said `{line}` instead of where it listens: {error}",
                            self.name
                        ))
                        .into()
                    });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.wait(STOP_GRACE);
                    return fail(Failure::failed(self.obituary(status)));
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

    /// CPU time so far; after its end, as much as was seen last.
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

    /// How it ended, if it has: for a message to the user.
    pub(crate) fn died(&mut self) -> Option<String> {
        if self.status.is_none() {
            // Its CPU time must be read while its id is still its own.
            self.cpu();
            self.status = self.process.try_wait().ok().flatten();
        }
        let status = self.status?;
        Some(self.obituary(Some(status)))
    }

    /// Asks it to stop; does not wait.
    pub(crate) fn ask_to_stop(&mut self) {
        if self.died().is_none() {
            sys::terminate(self.process.id());
        }
    }

    /// Waits for its end, and kills it when it takes too long.
    pub(crate) fn stop(&mut self) {
        self.ask_to_stop();
        if self.wait(STOP_GRACE).is_none() {
            tracing::warn!("{} did not stop within {} s: killed", self.name, STOP_GRACE.as_secs());
            self.kill();
        }
    }

    fn kill(&mut self) {
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

    fn obituary(&mut self, status: Option<ExitStatus>) -> String {
        let how = status.map_or_else(|| "closed its output".to_owned(), |status| format!("ended ({status})"));
        // Its last words may still be on their way through the pipe.
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
            return ", without a word on stderr".to_owned();
        }
        kept.iter().fold(":".to_owned(), |text, line| text + "\n    | " + line)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Stops all at once and waits for each.
pub(crate) fn stop_all<'a>(children: impl IntoIterator<Item = &'a mut Child>) {
    let mut children: Vec<_> = children.into_iter().collect();
    for child in &mut children {
        child.ask_to_stop();
    }
    for child in children {
        child.stop();
    }
}

/// Calls `line` for each line, cut at `LINE_BYTES_MAX`, until the pipe closes.
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

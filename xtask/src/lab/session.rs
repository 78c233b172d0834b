//! One run of a lab: its directory, its guests, their output, and the result.
//!
//! A guest writes to a virtio port. Lines that start with `lab: ` come from the second stage (booted, rails
//! up, ready, result); all others are the job's output. The kernel's console goes to a file, which is
//! examined when a guest has ended without a result.

use super::kernel::Kernel;
use super::profile::Profile;
use super::qemu::{self, Guest, Wires};
use crate::stats;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Runs whose logs are kept.
const RUNS_KEPT: usize = 20;
/// Time for a guest to become ready, seconds. It takes 10 s on an idle machine.
const READY_S: u64 = 240;
/// Time for the serving guest to end after it was stopped, seconds.
const STOP_S: u64 = 30;
/// Lines of logs that an error shows.
const TAIL_LINES: usize = 25;
/// Prefixes of the environment variables that are passed to the job.
const ENV_PREFIXES: [&str; 4] = ["RUST_", "HW_TESTS_", "SNOWSKIN_", "PROPTEST_"];

/// What the guests run.
pub(super) struct Job {
    /// The command of guest a, whose exit code is that of the run.
    pub(super) command: Vec<String>,
    /// The command that guest b runs until a is done; without one, b only boots.
    pub(super) peer: Option<Vec<String>>,
    /// Wall time for everything.
    pub(super) limit: Duration,
}

/// A run that is being prepared or in progress. Dropping it kills the guests.
pub(super) struct Session<'a> {
    profile: &'a Profile,
    kernel: &'a Kernel,
    dir: PathBuf,
    guests: Vec<Running>,
}

/// A guest that was started.
struct Running {
    name: char,
    child: Child,
    ready: bool,
    verdict: Option<i32>,
}

/// What the reader of a guest's output found.
enum Event {
    Line(usize, String),
    End(usize),
}

impl<'a> Session<'a> {
    /// Creates the run's directory.
    ///
    /// # Errors
    /// It cannot be created.
    pub(super) fn new(profile: &'a Profile, kernel: &'a Kernel, lab_dir: &Path) -> Result<Self> {
        let logs = lab_dir.join("logs");
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let dir = logs.join(format!("{}-{}-{}", profile.name, since.as_secs(), std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        forget_old_runs(&logs);
        fs::write(dir.join("guest.sh"), include_str!("guest.sh"))?;
        Ok(Self { profile, kernel, dir, guests: Vec::new() })
    }

    /// The run's directory.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Boots the guests, runs the job, and reports the result.
    ///
    /// # Errors
    /// The job fails in a guest, or a guest reports no result.
    pub(super) fn run(mut self, job: &Job) -> Result<()> {
        let outcome = self.try_run(job);
        self.kill();
        let said = if outcome.is_ok() { "logs" } else { "the logs of this run are" };
        println!("lab: {said} in {}", self.dir.display());
        outcome
    }

    /// Boots the guests and connects the terminal to guest a's shell.
    ///
    /// # Errors
    /// A guest cannot be started.
    pub(super) fn shell(mut self) -> Result<()> {
        println!("lab: `exit` ends the guests, and so does Ctrl-A X. Files of the run: /run/lab");
        fs::write(self.dir.join("go"), "")?;
        let idle = Job { command: Vec::new(), peer: None, limit: Duration::ZERO };
        self.start(&idle, true)?;
        let status = self.guests[0].child.wait();
        self.kill();
        status.context("guest a is lost")?;
        Ok(())
    }

    fn try_run(&mut self, job: &Job) -> Result<()> {
        let began = Instant::now();
        println!(
            "lab: booting {} guest{} of profile {} (emulated: QEMU without hardware acceleration, Linux {})",
            self.profile.guests,
            if self.profile.guests == 1 { "" } else { "s" },
            self.profile.name,
            self.kernel.version,
        );
        let readers = self.start(job, false)?;
        let (events, inbox) = mpsc::channel();
        for (index, stdout) in readers.into_iter().enumerate() {
            let (events, log) = (events.clone(), self.log("output", self.guests[index].name));
            std::thread::spawn(move || read(index, stdout, &log, &events));
        }
        drop(events);

        let ready_by = began + Duration::from_secs(READY_S);
        let ends_by = began + job.limit;
        let mut stop_by = None;
        let mut tests = TestCount::default();
        loop {
            let all_ready = self.guests.iter().all(|guest| guest.ready);
            let deadline = match stop_by {
                Some(stop_by) => stop_by,
                None if all_ready => ends_by,
                None => ready_by.min(ends_by),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            match inbox.recv_timeout(left) {
                Ok(Event::Line(index, line)) => match line.strip_prefix("lab: ") {
                    Some(said) => self.heard(index, said, began)?,
                    None if index == 0 => println!("  {}{line}", tests.progress(&line)),
                    None => {}
                },
                Ok(Event::End(index)) if self.guests[index].verdict.is_none() => {
                    bail!("{}", self.no_verdict(index, "ended without a result"));
                }
                Ok(Event::End(_)) => {}
                Err(RecvTimeoutError::Disconnected) => {}
                Err(RecvTimeoutError::Timeout) => {
                    let late = self
                        .guests
                        .iter()
                        .position(|guest| guest.verdict.is_none() && (all_ready || !guest.ready));
                    let why = match (stop_by, all_ready) {
                        (Some(_), _) => format!("did not end within {STOP_S} s after it was stopped"),
                        (None, false) => format!("was not ready after {}", stats::duration(began.elapsed())),
                        (None, true) => format!("exceeded the limit of {}", stats::duration(job.limit)),
                    };
                    bail!("{}", self.no_verdict(late.unwrap_or(0), &why));
                }
            }
            // A guest that only serves must not end before the other.
            if let Some(guest) = self.guests.iter().skip(1).find(|guest| guest.verdict.is_some())
                && self.guests[0].verdict.is_none()
            {
                bail!("guest {} ended before the job did\n{}", guest.name, self.tails(1));
            }
            if let Some(code) = self.guests[0].verdict {
                if stop_by.is_none() {
                    fs::write(self.dir.join("stop"), "")?;
                    stop_by = Some(Instant::now() + Duration::from_secs(STOP_S));
                }
                if self.guests.iter().all(|guest| guest.verdict.is_some()) {
                    return self.judge(code, began);
                }
            }
        }
    }

    fn heard(&mut self, index: usize, said: &str, began: Instant) -> Result<()> {
        let guest = &mut self.guests[index];
        let time = stats::duration(began.elapsed());
        if let Some(code) = said.strip_prefix("verdict ") {
            guest.verdict = Some(code.trim().parse().unwrap_or(-1));
            return Ok(());
        }
        println!("lab: {time:>8}  guest {}: {said}", guest.name);
        if said == "ready" {
            guest.ready = true;
            if self.guests.iter().all(|guest| guest.ready) {
                fs::write(self.dir.join("go"), "")?;
                println!("lab: {time:>8}  running the job");
            }
        }
        Ok(())
    }

    fn judge(&self, code: i32, began: Instant) -> Result<()> {
        for guest in &self.guests {
            let console = fs::read_to_string(self.log("console", guest.name)).unwrap_or_default();
            if let Some(line) = console.lines().find(|line| is_kernel_trouble(line)) {
                bail!("the kernel of guest {} reported an error: {line}", guest.name);
            }
        }
        match (code, self.guests.iter().skip(1).find(|guest| guest.verdict != Some(0))) {
            (0, None) => {
                println!("lab: the job succeeded after {} (emulated)", stats::duration(began.elapsed()));
                Ok(())
            }
            (0, Some(guest)) => bail!("guest {} failed\n{}", guest.name, self.tails(1)),
            (code, _) => {
                let peer = if self.guests.len() > 1 { self.tails(1) } else { String::new() };
                bail!("the job failed with exit code {code}\n{peer}")
            }
        }
    }

    fn no_verdict(&self, index: usize, why: &str) -> String {
        let name = self.guests[index].name;
        let console = fs::read_to_string(self.log("console", name)).unwrap_or_default();
        let panicked = console.lines().any(is_kernel_trouble);
        let why = if panicked { format!("{why}: its kernel panicked") } else { why.to_owned() };
        format!("guest {name} {why}\n{}", self.tails(index))
    }

    /// The last lines of a guest's logs.
    fn tails(&self, index: usize) -> String {
        let name = self.guests[index].name;
        let mut text = String::new();
        for kind in ["console", "output", "qemu"] {
            let log = fs::read(self.log(kind, name)).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
            if !lines.is_empty() {
                text += &format!("  end of {kind}-{name}.log:\n");
            }
            for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
                text += &format!("    {line}\n");
            }
        }
        text
    }

    fn log(&self, kind: &str, guest: char) -> PathBuf {
        self.dir.join(format!("{kind}-{guest}.log"))
    }

    /// Starts the guests; returns their output.
    fn start(&mut self, job: &Job, interactive: bool) -> Result<Vec<std::process::ChildStdout>> {
        let mut wires = match self.profile.guests {
            2 => Vec::from(Wires::pair(self.profile)?),
            _ => vec![Wires::alone()],
        };
        let mut readers = Vec::new();
        for (index, name) in ['a', 'b'].into_iter().enumerate().take(self.profile.guests) {
            let (words, kind) = match (index, &job.peer) {
                (0, _) if interactive => (Vec::new(), "shell"),
                (0, _) => (job.command.clone(), "run"),
                (_, Some(peer)) => (peer.clone(), "serve"),
                (_, None) => (vec!["sleep".to_owned(), "infinity".to_owned()], "serve"),
            };
            self.write_scripts(name, index, kind, words)?;
            let interactive = interactive && index == 0;
            let guest = Guest { name, number: index + 1, dir: &self.dir, interactive };
            let wire = wires.remove(0);
            let command = qemu::command(self.profile, self.kernel, &guest, &wire)?;
            fs::write(self.dir.join(format!("qemu-{name}.txt")), format!("{command}\n"))?;
            let mut command = command.command(&self.dir);
            if !interactive {
                let errors = fs::File::create(self.log("qemu", name))?;
                // A port whose other side is at the end of a file counts as unplugged, so the pipe stays
                // open.
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
            }
            let mut child = command.spawn().context("cannot start QEMU")?;
            readers.extend(child.stdout.take());
            self.guests.push(Running { name, child, ready: false, verdict: None });
        }
        Ok(readers)
    }

    fn write_scripts(&self, name: char, index: usize, kind: &str, words: Vec<String>) -> Result<()> {
        let quoted = |word: &str| format!("'{}'", word.replace('\'', r"'\''"));
        let modules = self.kernel.modules.display().to_string();
        let settings = [
            ("LAB_GUEST", name.to_string()),
            ("LAB_NUMBER", (index + 1).to_string()),
            ("LAB_PROFILE", self.profile.name.to_owned()),
            ("LAB_KERNEL", self.kernel.version.clone()),
            ("LAB_MODULES", modules),
            ("LAB_RAILS", self.profile.rails.to_string()),
            ("LAB_MANAGEMENT", u8::from(self.profile.guests > 1).to_string()),
            ("LAB_SETUP", self.profile.setup.join(" ")),
            ("LAB_JOB", kind.to_owned()),
        ];
        let settings: String =
            settings.iter().map(|(key, value)| format!("export {key}={}\n", quoted(value))).collect();
        fs::write(self.dir.join(format!("env-{name}")), settings)?;

        let here = std::env::current_dir().context("no current directory")?;
        let mut script = format!("cd {} || exit 1\n", quoted(&here.display().to_string()));
        for (key, value) in
            std::env::vars().filter(|(key, _)| ENV_PREFIXES.iter().any(|prefix| key.starts_with(prefix)))
        {
            script += &format!("export {key}={}\n", quoted(&value));
        }
        script += &format!("exec {}\n", words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "));
        fs::write(self.dir.join(format!("job-{name}.sh")), script)?;
        Ok(())
    }

    fn kill(&mut self) {
        for guest in &mut self.guests {
            // An error is ignored: the guest may have ended by itself.
            let _ = guest.child.kill();
            let _ = guest.child.wait();
        }
        // It is large, and useless without the guests.
        let _ = fs::remove_file(self.dir.join("cxl-memory"));
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The number of the current test and of all tests, read from the output of a test harness.
#[derive(Default)]
struct TestCount {
    done: u32,
    all: u32,
}

impl TestCount {
    /// The prefix of this line: `[3/12] ` for the result of a test.
    fn progress(&mut self, line: &str) -> String {
        let announced =
            line.strip_prefix("running ").and_then(|rest| rest.split_once(" test")?.0.parse().ok());
        if let Some(all) = announced {
            *self = Self { done: 0, all };
        }
        if !line.starts_with("test ") || line.starts_with("test result") || self.all == 0 {
            return String::new();
        }
        self.done += 1;
        format!("[{}/{}] ", self.done, self.all)
    }
}

fn read(index: usize, stdout: std::process::ChildStdout, log: &Path, events: &mpsc::Sender<Event>) {
    let mut log = fs::File::create(log).ok();
    for line in BufReader::new(stdout).split(b'\n') {
        let Ok(line) = line else { break };
        let line = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
        if let Some(log) = &mut log {
            // The log is for people; the run continues without it.
            let _ = writeln!(log, "{line}");
        }
        if events.send(Event::Line(index, line)).is_err() {
            return;
        }
    }
    // The receiver is gone when the run has a result.
    let _ = events.send(Event::End(index));
}

fn is_kernel_trouble(line: &str) -> bool {
    ["Kernel panic", "BUG: ", "Oops: ", "general protection fault"].iter().any(|sign| line.contains(sign))
}

fn forget_old_runs(logs: &Path) {
    let Ok(entries) = fs::read_dir(logs) else { return };
    let mut runs: Vec<(std::time::SystemTime, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    runs.sort();
    runs.reverse();
    for (_, path) in runs.into_iter().skip(RUNS_KEPT) {
        let _ = fs::remove_dir_all(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_tests_are_numbered() {
        let mut count = TestCount::default();
        assert_eq!(count.progress("test before_any_suite ... ok"), "");
        assert_eq!(count.progress("running 2 tests"), "");
        assert_eq!(count.progress("test one ... ok"), "[1/2] ");
        assert_eq!(count.progress("a note"), "");
        assert_eq!(count.progress("test two ... FAILED"), "[2/2] ");
        assert_eq!(count.progress("test result: FAILED. 1 passed; 1 failed"), "");
    }

    #[test]
    fn a_panic_on_the_console_is_seen() {
        assert!(is_kernel_trouble("[   12.3] Kernel panic - not syncing: Attempted to kill init!"));
        assert!(!is_kernel_trouble("[    1.0] mitigations: off"));
    }
}

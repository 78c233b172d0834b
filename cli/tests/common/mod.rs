//! The binary under test, and clusters of its processes.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longest time that a process may take for anything here.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The binary with these arguments, without the environment of the test run.
pub(crate) fn snowskin(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_snowskin"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SNOWSKIN_") || name == "RUST_LOG")
    {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the binary to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    snowskin(args).output().expect("it starts")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Stdout as JSON; a failure shows the whole output.
pub(crate) fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: stdout `{}`, stderr `{}`", stdout(output), stderr(output)))
}

/// Asserts the exit code; a failure shows the whole output.
pub(crate) fn assert_exit(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "stdout `{}`, stderr `{}`", stdout(output), stderr(output));
}

/// A server process that is killed when dropped.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) ready: serde_json::Value,
}

impl Daemon {
    /// Starts the server and waits for its line of JSON.
    pub(crate) fn start(args: &[&str]) -> Self {
        let mut child = snowskin(args).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it speaks");
        let ready = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: `{line}`"));
        Self { child, ready }
    }

    pub(crate) fn text(&self, field: &str) -> String {
        self.ready[field].as_str().expect("a text").to_owned()
    }

    /// Stops it with SIGTERM and returns its exit code.
    pub(crate) fn terminate(mut self) -> Option<i32> {
        self.end()
    }

    /// As `terminate`, for a server that is part of something.
    pub(crate) fn end(&mut self) -> Option<i32> {
        signal(self.child.id(), "TERM");
        let status = wait(&mut self.child).expect("it ends");
        status.code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A master and a node.
pub(crate) struct Store {
    pub(crate) node: Daemon,
    pub(crate) master: Daemon,
    pub(crate) address: String,
}

impl Store {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// A store whose master has further flags.
    pub(crate) fn start_with(flags: &[&str]) -> Self {
        let master = ["master", "--listen", "127.0.0.1:0", "--http", "none", "--json"];
        let master = Daemon::start(&[&master[..], flags].concat());
        let address = master.text("rpc");
        let node =
            Daemon::start(&["node", "--master", &address, "--memory", "16MiB", "--name", "n1", "--json"]);
        Self { node, master, address }
    }

    /// Runs a command against this store.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        snowskin(args).env("SNOWSKIN_MASTER", &self.address).output().expect("it starts")
    }
}

/// Sends a signal, given by name.
pub(crate) fn signal(pid: u32, name: &str) {
    let status =
        Command::new("kill").args([format!("-{name}"), pid.to_string()]).status().expect("kill runs");
    assert!(status.success(), "kill -{name} {pid}");
}

/// Waits for the end of a child; `None` when it takes too long.
pub(crate) fn wait(child: &mut Child) -> Option<std::process::ExitStatus> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("it can be waited for") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Processes whose parent is `pid`, with their arguments.
pub(crate) fn children_of(pid: u32) -> Vec<(u32, String)> {
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("procfs").flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // The format is "pid (name) state ppid …", where the name may contain anything.
        let Some((_, rest)) = stat.rsplit_once(')') else { continue };
        if rest.split_whitespace().nth(1) == Some(&pid.to_string()) {
            let arguments = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            children.push((id, String::from_utf8_lossy(&arguments).replace('\0', " ")));
        }
    }
    children
}

/// Whether the process exists and is not a zombie process.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Waits until `condition` holds. It has more time than in tests without processes: a busy machine starts
/// them slowly.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(5));
    }
}

//! Stores on loopback, in this process and in others.
#![allow(dead_code, unused_imports, reason = "each test file uses its part")]

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::ops::RangeBounds;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use store_client::{
    Client, ClientConfig, ErrorCode, Fabrics, Get, Masters, Node, NodeConfig, Put, PutOptions, Store,
    StoreError,
};
use store_core::MasterConfig;
use store_master::{Config, MasterHandle, MasterServer};
pub(crate) use te_core::testkit::pattern;

pub(crate) mod front;
#[cfg(feature = "nvmeof")]
pub(crate) mod storage;

pub(crate) const MIB: u64 = 1 << 20;

/// A value with changes: settings outside of their crate are changed field by field.
pub(crate) fn with<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

pub(crate) fn master_config() -> Config {
    Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() }
}

pub(crate) fn master_with(store: MasterConfig) -> MasterHandle {
    MasterServer::bind(Config { store, ..master_config() }).unwrap().spawn().unwrap()
}

/// A master that listens here.
pub(crate) fn master_at(listen: SocketAddr, store: MasterConfig) -> MasterHandle {
    MasterServer::bind(Config { rpc_listen: listen, store, ..master_config() }).unwrap().spawn().unwrap()
}

/// A host that only one test uses: for a master that is restarted at its address. A process that binds any
/// port of 127.0.0.1 cannot get that port in the meantime.
pub(crate) fn own_host(number: u8) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, number], 0))
}

pub(crate) fn master() -> MasterHandle {
    master_with(MasterConfig::default())
}

pub(crate) fn node(name: &str, master: SocketAddr) -> Node {
    node_over(name, master, Fabrics::default())
}

pub(crate) fn node_over(name: &str, master: SocketAddr, fabrics: Fabrics) -> Node {
    Node::start(NodeConfig::new(name, master.into(), 32 * MIB).fabrics(fabrics)).unwrap()
}

pub(crate) fn client(master: SocketAddr) -> Client {
    client_over(master, Fabrics::default())
}

pub(crate) fn client_over(master: SocketAddr, fabrics: Fabrics) -> Client {
    Client::connect(ClientConfig::new(master.into()).fabrics(fabrics)).unwrap()
}

/// Results in a form that can be compared.
pub(crate) fn codes<T>(
    results: impl IntoIterator<Item = Result<T, StoreError>>,
) -> Vec<Result<T, ErrorCode>> {
    results.into_iter().map(|result| result.map_err(|error| error.code())).collect()
}

/// Stores plain values in one batch.
pub(crate) fn put_batch(
    store: &mut dyn Store,
    items: &[(&[u8], &[u8])],
    options: &PutOptions,
) -> Vec<Result<bool, ErrorCode>> {
    let mut puts: Vec<_> = items.iter().map(|(key, value)| Put::new(*key, *value)).collect();
    let tally = store.batch_put(&mut puts, options);
    let results = codes(puts.into_iter().map(Put::into_result));
    assert_eq!(tally.done, results.iter().filter(|result| **result == Ok(true)).count());
    assert_eq!(tally.done + tally.missed + tally.failed, results.len());
    results
}

/// Reads whole values in one batch.
pub(crate) fn get_batch(store: &mut dyn Store, keys: &[&[u8]]) -> Vec<Result<Option<Vec<u8>>, ErrorCode>> {
    let mut values = vec![Vec::new(); keys.len()];
    let mut gets: Vec<_> = keys.iter().zip(&mut values).map(|(key, value)| Get::new(*key, value)).collect();
    let tally = store.batch_get(&mut gets);
    let results = codes(gets.into_iter().map(Get::into_result));
    assert_eq!(tally.done, results.iter().filter(|result| matches!(result, Ok(Some(_)))).count());
    assert_eq!(tally.done + tally.missed + tally.failed, results.len());
    let read = |(result, value): (Result<Option<u64>, _>, Vec<u8>)| {
        result.map(|len| {
            assert_eq!(len.unwrap_or(0), value.len() as u64);
            len.map(|_| value)
        })
    };
    results.into_iter().zip(values).map(read).collect()
}

/// Reads a part of one object.
pub(crate) fn get_range(
    store: &mut dyn Store,
    key: &[u8],
    range: impl RangeBounds<u64>,
) -> Result<Option<Vec<u8>>, StoreError> {
    let mut bytes = Vec::new();
    let read = store.get_with(Get::new(key, &mut bytes).range(range))?;
    Ok(read.map(|_| bytes))
}

/// Waits until it holds. Processes on a busy machine need longer than `te_fabric::testkit::eventually` waits.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether every thread of a process is stopped.
fn is_stopped(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    // The state follows the name, which is in parentheses.
    let is_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'));
    threads.flatten().all(|thread| std::fs::read_to_string(thread.path().join("stat")).is_ok_and(is_stopped))
}

/// This test binary in another process and role. Killed when dropped.
pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    said: String,
    lines: Receiver<String>,
}

const ROLE: &str = "SNOWSKIN_TEST_ROLE";

impl Process {
    /// Runs the test `entry` of this binary, which calls [`role`], and waits for its first line.
    pub(crate) fn start(entry: &str, role: &[&str]) -> Self {
        Self::start_by(Command::new(env::current_exe().unwrap()), entry, role)
    }

    /// As [`Self::start`], with a limit on the length of files, bytes.
    pub(crate) fn start_limited(entry: &str, role: &[&str], file_bytes: u64) -> Self {
        let mut command = Command::new("sh");
        // In blocks of 512 bytes. The signal is ignored, so that the system calls fail instead.
        let script = format!("trap '' XFSZ; ulimit -f {}; exec \"$@\"", file_bytes / 512);
        command.args(["-c", &script, "sh"]).arg(env::current_exe().unwrap());
        Self::start_by(command, entry, role)
    }

    fn start_by(mut command: Command, entry: &str, role: &[&str]) -> Self {
        let mut child = command
            .args(["--exact", entry, "--nocapture", "--test-threads=1"])
            .env(ROLE, role.join(" "))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        // The harness prints lines, too.
        let said = lines.find_map(|line| Some(line.split_once("SAYS ")?.1.to_owned()));
        let (sender, heard) = channel();
        // The harness must not be interrupted while it prints.
        std::thread::spawn(move || {
            for line in lines {
                if let Some((_, said)) = line.split_once("SAYS ") {
                    let _ = sender.send(said.to_owned());
                }
            }
        });
        let stdin = child.stdin.take();
        Self { child, stdin, said: said.expect("the process ended without a line"), lines: heard }
    }

    /// The latest line that it has printed since the last call.
    pub(crate) fn says_more(&self) -> Option<String> {
        self.lines.try_recv().ok()
    }

    /// Sends it a signal. After STOP, this waits until it has stopped.
    pub(crate) fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([format!("-{name}"), self.pid().to_string()]).status();
        assert!(kill.unwrap().success());
        if name == "STOP" {
            eventually("it has stopped", || is_stopped(self.pid()));
        }
    }

    pub(crate) fn said(&self) -> &str {
        &self.said
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it without notice.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Makes it end, and waits.
    pub(crate) fn stop(&mut self) {
        drop(self.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of this process, if it is a child.
pub(crate) fn role() -> Option<Vec<String>> {
    Some(env::var(ROLE).ok()?.split(' ').map(str::to_owned).collect())
}

/// Prints a line for the parent.
pub(crate) fn say(what: &str) {
    println!("\nSAYS {what}");
}

/// Waits until the parent closes the pipe.
pub(crate) fn wait_for_parent() {
    let _ = std::io::stdin().read(&mut [0]);
}

pub(crate) fn fabrics(name: &str) -> Fabrics {
    name.parse().unwrap()
}

/// The role `node NAME MASTER FABRICS`.
pub(crate) fn be_node(role: &[String]) {
    let master: Masters = role[2].parse().unwrap();
    let node = Node::start(NodeConfig::new(&role[1], master, 32 * MIB).fabrics(fabrics(&role[3]))).unwrap();
    say(node.endpoint());
    wait_for_parent();
    node.stop();
}

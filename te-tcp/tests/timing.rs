//! What needs real time: another process is stopped with bytes of its own in kernel buffers. The test waits
//! until the kernel has stopped it, and polls for a while to see that nothing lands.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant as Clock};

use common::{Process, REMOTE, by_peers, bytes_of, drive, hex, linger, users, write};
use te_core::{ErrorKind, ExpelMode, Memory, Transport};
use te_tcp::Config;

const BYTES: usize = 1 << 20;
const TARGET: &str = "SNOWSKIN_TEST_EXPEL_TARGET";

/// Writes without end to the export in the environment, when there is one; otherwise it tests nothing.
#[test]
fn writer_process() {
    let Ok(hex) = std::env::var(TARGET) else { return };
    let blob = bytes_of(&hex);
    let mut node = common::node(
        Config { identity: 99, connections: 4, reconnect_ms_max: 10, ..common::config() },
        BYTES,
    );
    node.transport.attach(REMOTE, &blob).unwrap();
    node.memory.set(0, &[0xbb; BYTES]);
    let mut token = 0;
    println!("\nwriting");
    std::io::stdout().flush().unwrap();
    loop {
        while node.transport.submit(&[write(token, 0, 0, BYTES as u32)]) == Ok(1) {
            token += 1;
        }
        node.poll();
        // A WRITE that has failed is followed by others.
        if node.done.iter().any(|end| end.result.is_err_and(|error| error.kind == ErrorKind::Expelled)) {
            println!("expelled");
            std::io::stdout().flush().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        node.done.clear();
    }
}

#[test]
fn a_writer_that_was_stopped_and_goes_on_is_expelled_and_writes_nothing() {
    let mut target = common::node(common::config(), BYTES);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["writer_process", "--exact", "--nocapture"])
        .env(TARGET, hex(&target.export()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut process = Process(child);
    let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "writing"));
    drive(&mut [&mut target], |target| target.transport.stats().bytes_served > 8 << 20);
    let pid = process.0.id() as libc::pid_t;
    // SAFETY: takes no pointer; the process is a child of this one.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
    // While it is stopped, the socket buffers of both ends hold megabytes of its WRITEs.
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !state().contains(") T ") {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(target.transport.expel(99, ExpelMode::SpareConnected), Err(ErrorKind::Busy.into()));
    assert_eq!(target.transport.expel(99, ExpelMode::Force), Ok(true));
    target.memory.set(0, &[0xaa; BYTES]);
    linger(&mut [&mut target], Duration::from_millis(50));
    assert!(target.memory.get(0, BYTES) == [0xaa; BYTES]);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    drive(&mut [&mut target], |target| target.transport.stats().turned_away > 0);
    assert!(lines.any(|line| line == "expelled"), "it learns why");
    let start = Clock::now();
    while start.elapsed() < Duration::from_millis(100) {
        target.poll();
    }
    assert!(target.memory.get(0, BYTES) == [0xaa; BYTES], "not a byte has landed");
    assert_eq!(users(&target), by_peers(0));
}

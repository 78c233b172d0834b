//! Child processes of a test.
#![allow(unsafe_code, reason = "forks")]

use core::time::Duration;
use std::process::Child;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

/// How long a child process may run.
const PATIENCE: Duration = Duration::from_secs(60);

/// A child process that is killed when the value drops.
#[derive(Debug)]
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The result of a child, which cannot fail as a test does: what is wrong.
pub type Complaint = Result<(), String>;

/// Runs `child` in a fork of this process, while `parent` runs here. Both must end, the child without a
/// complaint and within a minute. A failure names `what` is tested.
pub fn fork_and(what: &str, child: impl FnOnce() -> Complaint, parent: impl FnOnce()) {
    // SAFETY: the child runs only the code under test, which is written for a process without its parent's
    // threads, and ends by `_exit`: it never returns into the test harness.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let code = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)) {
                Ok(Ok(())) => 0,
                Ok(Err(complaint)) => {
                    // Not `eprintln!`: another thread of the parent may have held the lock of stderr.
                    let _ = nix::unistd::write(std::io::stderr(), format!("child: {complaint}\n").as_bytes());
                    1
                }
                Err(_) => 2,
            };
            // SAFETY: ends the process without running the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => {
            parent();
            let give_up = Instant::now() + PATIENCE;
            loop {
                match waitpid(child, Some(WaitPidFlag::WNOHANG)).unwrap() {
                    WaitStatus::StillAlive if Instant::now() < give_up => {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    WaitStatus::StillAlive => {
                        kill(child, Signal::SIGKILL).unwrap();
                        waitpid(child, None).unwrap();
                        panic!("{what}: the child hangs");
                    }
                    ended => return assert_eq!(ended, WaitStatus::Exited(child, 0), "{what}"),
                }
            }
        }
    }
}

/// As [`fork_and`], with a parent that only waits.
pub fn in_a_child(what: &str, child: impl FnOnce() -> Complaint) {
    fork_and(what, child, || ());
}

/// Bytes as hexadecimal digits, for the environment or the output of a process.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes that [`hex`] wrote.
#[must_use]
pub fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
}

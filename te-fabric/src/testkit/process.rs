//! Other processes of a test.
#![allow(unsafe_code, reason = "forks")]

use core::time::Duration;
use std::process::Child;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

/// How long a child may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process of this test, which ends with it.
#[derive(Debug)]
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is wrong, in a child that cannot fail as a test does.
pub type Complaint = Result<(), String>;

/// Runs `child` in a fork of this process, while `parent` runs here. Both must come to their ends; the child without a
/// complaint and within a minute. `what` it is about stands in the failure.
pub fn fork_and(what: &str, child: impl FnOnce() -> Complaint, parent: impl FnOnce()) {
    // SAFETY: the child runs what is to be tested, in spite of the threads that it does not have. It never returns into the
    // test harness.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let code = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)) {
                Ok(Ok(())) => 0,
                Ok(Err(complaint)) => {
                    // Not `eprintln!`: another thread of the parent may have held its lock.
                    let _ = nix::unistd::write(std::io::stderr(), format!("child: {complaint}\n").as_bytes());
                    1
                }
                Err(_) => 2,
            };
            // SAFETY: ends the process without the parent's handlers.
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

/// As [`fork_and`], with a parent that waits.
pub fn in_a_child(what: &str, child: impl FnOnce() -> Complaint) {
    fork_and(what, child, || ());
}

/// Bytes as text, for a process's environment or output.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes behind [`hex`].
#[must_use]
pub fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect()
}

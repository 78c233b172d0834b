//! Tests that need hardware, or the lab that emulates it. Each declares what it needs; where that is missing,
//! the test is reported as ignored, with the reason, never as passed.
//!
//! ```text
//!   cargo xtask hw-test            on this machine, with the devices that it has
//!   cargo xtask hw-test --lab      in guests with emulated devices
//!
//!   initiator (this program)                         target (another machine, or guest b)
//!   ┌───────────────────────────┐   management    ┌────────────────────────────────────┐
//!   │ runner: needs, tests      │ ───────────────►│ hw-tests agent                     │
//!   │ verified load, faults     │  one connection │   one process per connection,      │
//!   │                           │  = one process  │   killed when it closes            │
//!   └────────────┬──────────────┘                 └───────────────┬────────────────────┘
//!                └───────────── rails: RDMA, TCP ─────────────────┘
//! ```
//!
//! Without arguments, or with those of a test harness (`--help`), the program runs the tests. `agent ADDRESS`
//! serves a peer, `facts` prints which devices this machine has, and agents start `helper …`. What the
//! program cannot detect is set in the environment:
//!
//! | Variable | Meaning |
//! |---|---|
//! | `HW_TESTS_PEER` | `host:port` of the agent on the second machine |
//! | `HW_TESTS_TOKEN` | The secret of an agent and its callers; an agent runs any program for a caller that knows it |
//! | `HW_TESTS_FAULTS` | `1`: tests may take links of this machine and the peer down |
//! | `HW_TESTS_LONG` | `1`: tests that take long run as well, and others in full |
//! | `HW_TESTS_NVMEOF` | Targets whose contents may be overwritten, `TRANSPORT ADDRESS PORT NQN`, separated by `;` |
//! | `HW_TESTS_NVMEOF_LATE` | Namespace of the first target whose writes are late, its device at the peer, and the delay: `NSID DEVICE MILLISECONDS` |
//! | `HW_TESTS_DAX` | A device-DAX node whose contents may be lost |
//! | `HW_TESTS_SUITES` | Test programs to run without arguments, separated by `;` |
//! | `HW_TESTS_LAB` | The lab's profile, set by the lab: its devices are checked, and results are labelled as emulated |
#![deny(unsafe_code)]

mod agent;
mod content;
mod cxl;
mod engines;
mod facts;
mod helper;
mod host;
mod load;
mod nvmeof;
mod remote;
mod remote_target;
mod runner;
mod sys;
mod tests;

use std::alloc::System;
use std::process::ExitCode;
use te_core::testkit::CountingAlloc;

/// The conformance suite counts allocations on the data path.
#[global_allocator]
static ALLOCATOR: CountingAlloc<System> = CountingAlloc::new(System);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["agent", address] => agent::serve(address),
        ["facts"] => facts::print(),
        ["helper", name, rest @ ..] => helper::run(name, rest),
        _ => return runner::run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hw-tests: {error:#}");
            ExitCode::FAILURE
        }
    }
}

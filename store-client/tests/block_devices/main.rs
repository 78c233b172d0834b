//! Disks on real block devices, of which device-mapper makes devices that lose power, fail and stall.
//!
//! `cargo xtask hw-test --lab --profile disk` runs them in a guest with three RAM disks, and then, on the
//! host, the test that reads what was recorded in the guest. Elsewhere they are skipped by name.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it did"
)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "../disk/bench_disk.rs"]
mod bench_disk;
#[path = "../common/mod.rs"]
mod common;
mod dm;
mod faults;
mod power_loss;
mod write_log;

use std::path::PathBuf;
use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

/// Block devices that may be overwritten, with spaces between them.
const DEVICES: &str = "SNOWSKIN_BLOCK_DEVICES";
/// Where the log of writes is: it is written where there are devices, and then read where there are none.
const LOG: &str = "SNOWSKIN_WRITE_LOG";

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Each test has all devices and both processors.
    arguments.test_threads = Some(1);
    let devices = std::env::var(DEVICES).ok();
    let log = std::env::var_os(LOG).map(PathBuf::from);
    let trials = vec![
        trial(
            "everything_that_a_disk_writes_and_flushes_is_recorded",
            devices.clone().zip(log.clone()),
            |(devices, log)| {
                power_loss::everything_that_a_disk_writes_and_flushes_is_recorded(&names(&devices), &log);
            },
        ),
        trial(
            "after_a_loss_of_power_no_removed_object_comes_back_and_no_other_bytes_are_read",
            log.filter(|_| devices.is_none()),
            |log| power_loss::no_removed_object_comes_back_and_no_other_bytes_are_read(&log),
        ),
        trial(
            "a_disk_that_stalls_fails_no_put_and_holds_up_no_get_beyond_its_deadline",
            devices.clone(),
            |devices| {
                faults::a_disk_that_stalls_fails_no_put_and_holds_up_no_get_beyond_its_deadline(&names(
                    &devices,
                ));
            },
        ),
        trial("a_disk_that_fails_costs_its_own_objects_only", devices, |devices| {
            faults::a_disk_that_fails_costs_its_own_objects_only(&names(&devices));
        }),
    ];
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A test that runs where its devices, or its file, are named.
fn trial<T: Send + 'static>(name: &str, given: Option<T>, test: fn(T)) -> Trial {
    Trial::ignorable_test(name, move || match given {
        None => Ok(Completion::ignored_with("cargo xtask hw-test --lab --profile disk runs it")),
        Some(given) => {
            test(given);
            Ok(Completion::Completed)
        }
    })
}

fn names(devices: &str) -> Vec<&str> {
    devices.split(' ').collect()
}

//! Runs the tests through libtest-mimic, one at a time: they share links and devices.

use crate::host::{Host, Need};
use crate::tests;
use anyhow::Result;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// A test and what it needs.
pub(crate) struct Test {
    /// A sentence.
    pub(crate) name: &'static str,
    /// All of these.
    pub(crate) needs: &'static [Need],
    /// The test.
    pub(crate) run: fn(&Host) -> Result<()>,
}

/// Runs what the command line selects. A run in which nothing ran is a failure.
pub(crate) fn run() -> ExitCode {
    let mut args = Arguments::from_args();
    let host = match Host::look() {
        Ok(host) => Arc::new(host),
        Err(error) => {
            eprintln!("hw-tests: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    // With one thread the harness writes a test's name before it runs and its result behind whatever the test wrote. With two it
    // writes whole lines; the lock keeps the tests apart.
    args.test_threads = Some(2);
    let one_at_a_time = Arc::new(Mutex::new(()));
    let trials = tests::all().map(|test| trial(test, &host, &one_at_a_time)).collect();
    let listing = args.list;
    let conclusion = libtest_mimic::run(&args, trials);
    if !listing && conclusion.num_passed + conclusion.num_failed == 0 {
        println!("hw-tests: nothing ran: this machine has nothing that the selected tests need");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

fn trial(test: &'static Test, host: &Arc<Host>, one_at_a_time: &Arc<Mutex<()>>) -> Trial {
    let (host, one_at_a_time) = (Arc::clone(host), Arc::clone(one_at_a_time));
    Trial::ignorable_test(test.name, move || {
        if let Some(reason) = host.lacks(test.needs) {
            return Ok(Completion::ignored_with(reason));
        }
        // A test that panicked leaves nothing behind that the next one would see.
        let _turn = one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner);
        println!("begins: {}", test.name);
        (test.run)(&host).map(|()| Completion::Completed).map_err(|error| Failed::from(format!("{error:#}")))
    })
}

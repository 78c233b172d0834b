//! Runs the tests through libtest-mimic, one at a time: they share links and devices.

use crate::host::{Host, Need};
use crate::tests;
use anyhow::Result;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// A test and what it needs.
pub(crate) struct Test {
    /// The property that the test checks, as an identifier.
    pub(crate) name: &'static str,
    /// The test runs only where all of these are present.
    pub(crate) needs: &'static [Need],
    /// The body of the test.
    pub(crate) run: fn(&Host) -> Result<()>,
}

/// Runs what the command line selects. A run in which nothing ran is a failure.
pub(crate) fn run() -> ExitCode {
    let mut args = Arguments::from_args();
    let host = match Host::detect() {
        Ok(host) => Arc::new(host),
        Err(error) => {
            eprintln!("hw-tests: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    args.test_threads = Some(1);
    let trials = tests::all().map(|test| trial(test, &host)).collect();
    let listing = args.list;
    let conclusion = libtest_mimic::run(&args, trials);
    if !listing && conclusion.num_passed + conclusion.num_failed == 0 {
        println!("hw-tests: no test ran: this machine lacks what each of the selected tests needs");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

fn trial(test: &'static Test, host: &Arc<Host>) -> Trial {
    let host = Arc::clone(host);
    Trial::ignorable_test(test.name, move || {
        if let Some(reason) = host.lacks(test.needs) {
            return Ok(Completion::ignored_with(reason));
        }
        // The harness has printed the name without a line end: the empty line flushes it, and separates it
        // from the output of the test.
        println!();
        // Printed at once as well: the harness prints it after the last test, and the run may be cut before.
        let began = Instant::now();
        let result = (test.run)(&host);
        println!("    took {:.1} s", began.elapsed().as_secs_f64());
        result.map(|()| Completion::Completed).map_err(|error| {
            println!("    {error:#}");
            Failed::from(format!("{error:#}"))
        })
    })
}

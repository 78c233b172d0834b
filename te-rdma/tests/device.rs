//! The conformance suite over real devices: for each active port, two transports of one process that reach
//! each other through it. Without a port, every case is reported as ignored, and the reason is printed. A
//! software device is enough: `rdma link add rxe0 type rxe netdev eth0`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::alloc::System;
use std::process::ExitCode;
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use te_core::testkit::{CountingAlloc, Harness, Pair, Verdict, cases, run_case};
use te_fabric::testkit::{Ends, EndsConfig, Fabric};
use te_rdma::{Config, RdmaTransport, SystemVerbs, devices};

#[global_allocator]
static ALLOC: CountingAlloc<System> = CountingAlloc::new(System);

/// After this time a test fails. Software devices under emulation are slow.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // The tests share one device and its limits, and the log stays readable.
    arguments.test_threads = Some(1);
    let ports: Vec<Config> = match devices() {
        Ok(found) => {
            let active = found.into_iter().filter(|port| port.active);
            active.map(|port| config(port.name, port.port)).collect()
        }
        Err(reason) => {
            println!("ignored: {reason}");
            Vec::new()
        }
    };
    let mut trials = Vec::new();
    for config in &ports {
        for (setting, config) in settings(config) {
            let device = config.devices.concat();
            trials.extend(cases().iter().map(|case| {
                let config = config.clone();
                Trial::test(format!("{device}::{setting}::{}", case.name), move || {
                    match run_case(case.name, &mut Loopback(config)) {
                        Verdict::Passed => Ok(()),
                        Verdict::Skipped(reason) => {
                            println!("skipped {}: {reason}", case.name);
                            Ok(())
                        }
                    }
                })
            }));
        }
    }
    if ports.is_empty() {
        println!("ignored: no port that can carry traffic");
        trials.extend(cases().iter().map(|case| Trial::test(case.name, || Ok(())).with_ignored_flag(true)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn config(device: String, port: u8) -> Config {
    Config {
        devices: vec![format!("{device}:{port}")],
        // The loopback of an emulated device is slow.
        proof_ms_max: 10_000,
        slice_bytes_max: 16 << 20,
        timeout_exponent: 12,
        peer_silence_ms_max: 10_000,
        ..Config::default()
    }
}

/// The default settings, and settings that differ much from them.
fn settings(config: &Config) -> [(&'static str, Config); 3] {
    let small = Config {
        qps: 1,
        qp_depth: 8,
        signal_every: 2,
        sges: 1,
        inline_bytes_max: 0,
        message_bytes_max: 8_192,
        registration_chunk_bytes: 16_384,
        ..config.clone()
    };
    let hasty = Config { qps: 4, cancel_drain_ms: 0, ..config.clone() };
    [("plain", config.clone()), ("small", small), ("hasty", hasty)]
}

struct Loopback(Config);

impl Harness for Loopback {
    fn skip(&self, case: &str) -> Option<&'static str> {
        (case == "submit_and_poll_do_not_allocate" && self.0.qp_depth < 64)
            .then_some("checked with the defaults; a driver may allocate when its queue is full")
    }

    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let (initiator, target) = (self.open(), self.open());
        // The restarted target comes back at the same address.
        let restart = Self(Config { bind: target.local_address(), ..self.0.clone() });
        let config = EndsConfig { patience: PATIENCE, late_max: Duration::from_millis(100) };
        Box::new(Ends::new(initiator, target, restart, config))
    }
}

impl Loopback {
    fn open(&self) -> RdmaTransport<SystemVerbs> {
        RdmaTransport::open(self.0.clone()).unwrap()
    }
}

impl Fabric for Loopback {
    type Transport = RdmaTransport<SystemVerbs>;

    fn reopen(&mut self) -> Self::Transport {
        self.open()
    }

    fn identity(transport: &Self::Transport) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut Self::Transport) {
        transport.close_connections();
    }
}

//! The contract's conformance suite over real devices: two transports of one device, which reaches itself.

use crate::host::{Host, Need};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use te_core::Transport;
use te_core::testkit::{Harness, Hook, Pair, Verdict, WallClock, cases, run_case};
use te_rdma::exchange::Export;
use te_rdma::sys::{Device, SystemVerbs};
use te_rdma::{Config, RdmaTransport};

pub(super) const TESTS: &[Test] = &[Test {
    name: "the_conformance_suite_holds_on_every_rail",
    needs: &[Need::Rdma],
    run: suite_holds_on_every_rail,
}];

fn suite_holds_on_every_rail(host: &Host) -> Result<()> {
    let mut broken = Vec::new();
    for rail in host.rails() {
        let (_, address) = rail.address().context("the rail has no address")?;
        let port = u8::try_from(rail.port).context("a port's number")?;
        let mut harness = OneDevice { device: rail.device.clone(), port, address };
        let (mut passed, mut skipped) = (0, 0);
        for (index, case) in cases().iter().enumerate() {
            let began = Instant::now();
            // A broken law panics with a sentence; the other cases shall tell what they know, too.
            let verdict = catch_unwind(AssertUnwindSafe(|| run_case(case.name, &mut harness)));
            let said = match verdict {
                Ok(Verdict::Passed) => {
                    passed += 1;
                    "passed".to_owned()
                }
                Ok(Verdict::Skipped(reason)) => {
                    skipped += 1;
                    format!("skipped: {reason}")
                }
                Err(panic) => {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    let text =
                        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked");
                    broken.push(format!("{}: {}: {text}", rail.device, case.name));
                    format!("BROKEN: {text}")
                }
            };
            let (all, took) = (cases().len(), began.elapsed().as_secs_f64());
            println!("    {} [{}/{all}] {} {said} ({took:.1} s)", rail.device, index + 1, case.name);
        }
        println!("    {}{}: {passed} cases passed, {skipped} skipped", host.label(), rail.device);
        ensure!(passed > 0 || !broken.is_empty(), "{}: no case ran", rail.device);
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}

/// Pairs of transports on one port of one device.
struct OneDevice {
    device: String,
    port: u8,
    address: IpAddr,
}

impl OneDevice {
    /// The suite's longest slices, short limits; generous where emulation is slow.
    fn config(&self) -> Config {
        Config {
            bind: SocketAddr::new(self.address, 0),
            proof_ms_max: 0,
            slice_bytes_max: 16 << 20,
            timeout_exponent: 15,
            retries: 3,
            peer_silence_ms_max: 10_000,
            connect_ms_max: 5_000,
            reconnect_ms_max: 200,
            ..Config::default()
        }
    }

    fn open(&self, config: &Config) -> RdmaTransport<SystemVerbs> {
        let verbs = Device::open(&self.device, self.port)
            .unwrap_or_else(|error| panic!("cannot open {}: {error}", self.device));
        RdmaTransport::new(verbs, config.clone())
            .unwrap_or_else(|error| panic!("no transport on {}: {error}", self.device))
    }
}

impl Harness for OneDevice {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let config = self.config();
        let target = self.open(&config);
        Box::new(Ends {
            initiator: self.open(&config),
            // The restarted target comes back at the same address.
            restart: Config { bind: target.local_address(), ..config },
            target: Some(target),
            clock: WallClock::new(Duration::ZERO),
            device: self,
        })
    }
}

struct Ends<'a> {
    initiator: RdmaTransport<SystemVerbs>,
    target: Option<RdmaTransport<SystemVerbs>>,
    restart: Config,
    clock: WallClock,
    device: &'a OneDevice,
}

impl Pair for Ends<'_> {
    fn initiator(&mut self) -> &mut dyn Transport {
        &mut self.initiator
    }

    fn target(&mut self) -> &mut dyn Transport {
        match &mut self.target {
            Some(target) => target,
            None => panic!("the suite polls a target that it killed"),
        }
    }

    fn tick(&mut self) -> te_core::Instant {
        self.clock.tick()
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    fn late_max(&self) -> Duration {
        Duration::from_millis(100)
    }

    fn address_bytes(&self, export: &[u8]) -> Range<usize> {
        Export::ADDRESSES_AT..export.len()
    }

    fn key_bytes(&self, _export: &[u8]) -> Option<Range<usize>> {
        Some(Export::KEY_AT..Export::KEY_AT + 8)
    }

    fn kill_target(&mut self) -> Hook {
        // What the system does to the queue pairs and sockets of a killed process.
        self.target = None;
        Hook::Done
    }

    fn restart_target(&mut self) -> Hook {
        self.target = Some(self.device.open(&self.restart));
        Hook::Done
    }

    fn stall_target(&mut self, _stalled: bool) -> Hook {
        // The device goes on; the process is polled by nobody but the suite.
        Hook::Done
    }

    fn cut(&mut self) -> Hook {
        if let Some(target) = &mut self.target {
            target.close_connections();
        }
        Hook::Done
    }
}

//! The conformance suite over real devices: between two transports of one device, which reaches itself, and
//! between an initiator on this machine and a target on the peer.

use crate::agent;
use crate::facts::Rail;
use crate::host::{Host, Need};
use crate::remote::{Peer, Process};
use crate::remote_target::{Link, RemotePair, TargetProcess};
use crate::runner::Test;
use anyhow::{Context as _, Result, bail, ensure};
use std::io::Write as _;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use te_core::testkit::{Harness, Pair, Verdict, cases, run_case};
use te_fabric::testkit::{Ends, EndsConfig, Fabric};
use te_rdma::sys::{Device, SystemVerbs};
use te_rdma::{Config, RdmaTransport};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "the_conformance_suite_holds_on_every_rail",
        needs: &[Need::Rdma],
        run: suite_holds_on_every_rail,
    },
    Test {
        name: "the_conformance_suite_holds_between_two_machines",
        needs: &[Need::Rdma, Need::Peer],
        run: suite_holds_between_two_machines,
    },
];

fn suite_holds_on_every_rail(host: &Host) -> Result<()> {
    let mut broken = Vec::new();
    for rail in host.rails() {
        let (_, address) = rail.address().context("the rail has no address")?;
        let port = u8::try_from(rail.port).context("a port's number")?;
        let mut harness = OneDevice { device: rail.device.clone(), port, address };
        run_suite(host, &rail.device, &mut harness, Share::ALL, &mut broken)?;
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}

fn suite_holds_between_two_machines(host: &Host) -> Result<()> {
    let mut broken = Vec::new();
    let joined = host.joined_rails()?;
    ensure!(!joined.is_empty(), "no rail of this machine is in the network of one of the peer's");
    let rails = joined.len();
    for (index, (ours, theirs)) in joined.into_iter().enumerate() {
        // Emulated rails are the same device twice, and slow: there each case runs over one of them.
        let share = if host.emulated() { Share { index, of: rails } } else { Share::ALL };
        let ends = format!("{} to the peer's {}", ours.device, theirs.device);
        let mut harness = TwoMachines { peer: host.peer()?.clone(), ours, theirs };
        run_suite(host, &ends, &mut harness, share, &mut broken)?;
    }
    ensure!(broken.is_empty(), "{}", broken.join("\n"));
    Ok(())
}

/// The cases that run over one rail: those whose number, divided by `of`, leaves `index`.
#[derive(Clone, Copy)]
struct Share {
    index: usize,
    of: usize,
}

impl Share {
    const ALL: Self = Self { index: 0, of: 1 };
}

/// Runs every case of a share; adds the messages of the cases whose law does not hold to `broken`.
fn run_suite(
    host: &Host,
    on: &str,
    harness: &mut dyn Harness,
    share: Share,
    broken: &mut Vec<String>,
) -> Result<()> {
    let (mut passed, mut skipped, mut left) = (0, 0, 0);
    for (index, case) in cases().iter().enumerate() {
        if index % share.of != share.index {
            left += 1;
            continue;
        }
        let began = Instant::now();
        // A broken law panics with a message; the other cases run all the same.
        let verdict = catch_unwind(AssertUnwindSafe(|| run_case(case.name, harness)));
        let result = match verdict {
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
                let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked");
                broken.push(format!("{}: {}: {text}", on, case.name));
                format!("BROKEN: {text}")
            }
        };
        let (all, took) = (cases().len(), began.elapsed().as_secs_f64());
        println!("    {} [{}/{all}] {} {result} ({took:.1} s)", on, index + 1, case.name);
    }
    let elsewhere = if left == 0 { String::new() } else { format!(", {left} run over the other rails") };
    println!("    {}{}: {passed} cases passed, {skipped} skipped{elsewhere}", host.label(), on);
    ensure!(passed > 0 || !broken.is_empty(), "{}: no case ran", on);
    Ok(())
}

/// Pairs of transports on one port of one device.
struct OneDevice {
    device: String,
    port: u8,
    address: IpAddr,
}

/// A configuration for the suite: its longest slices, short time limits, and longer ones where emulation is
/// slow.
pub(crate) fn config() -> Config {
    Config {
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

impl OneDevice {
    fn config(&self) -> Config {
        Config { bind: SocketAddr::new(self.address, 0), ..config() }
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
        let mut config = self.config();
        let (initiator, target) = (self.open(&config), self.open(&config));
        // The restarted target comes back at the same address.
        config.bind = target.local_address();
        let ends = EndsConfig { patience: Duration::from_secs(60), late_max: Duration::from_millis(100) };
        Box::new(Ends::new(initiator, target, Restart { device: self, config }, ends))
    }
}

struct Restart<'a> {
    device: &'a OneDevice,
    config: Config,
}

impl Fabric for Restart<'_> {
    type Transport = RdmaTransport<SystemVerbs>;

    fn reopen(&mut self) -> Self::Transport {
        self.device.open(&self.config)
    }

    fn identity(transport: &Self::Transport) -> u64 {
        transport.identity()
    }

    fn cut(transport: &mut Self::Transport) {
        transport.close_connections();
    }
}

/// Pairs whose target is on the peer.
struct TwoMachines {
    peer: Peer,
    ours: Rail,
    theirs: Rail,
}

/// A target's process on the peer.
struct OnPeer<'a> {
    machines: &'a TwoMachines,
    /// The address where the transport accepts control connections; port 0 before the first start.
    address: String,
    process: Option<Process>,
}

impl TargetProcess for OnPeer<'_> {
    type Transport = RdmaTransport<SystemVerbs>;

    fn start(&mut self) -> Result<TcpStream> {
        let TwoMachines { peer, theirs, .. } = self.machines;
        let (port, management) = (theirs.port.to_string(), peer.management().1.to_string());
        let argv =
            ["self", "helper", "conformance-target", &theirs.device, &port, &self.address, &management];
        let mut process = peer.start(&argv)?;
        let ready = process.receive()?;
        let words: Vec<&str> = ready.split_whitespace().collect();
        let ["ready", address, management] = words[..] else {
            bail!("the target printed `{ready}` at its start")
        };
        let mut stream = TcpStream::connect(management).context("the target does not listen")?;
        stream.write_all(agent::token()?.as_bytes())?;
        address.clone_into(&mut self.address);
        self.process = Some(process);
        Ok(stream)
    }

    fn kill(&mut self, _link: &Link) -> Result<()> {
        self.process.take().map_or(Ok(()), Process::kill)
    }

    fn identity(transport: &Self::Transport) -> u64 {
        transport.identity()
    }
}

impl Harness for TwoMachines {
    fn pair(&mut self) -> Box<dyn Pair + '_> {
        let open = || -> Result<_> {
            let (_, here) = self.ours.address().context("the rail has no address")?;
            let (_, there) = self.theirs.address().context("the peer's rail has no address")?;
            let address = SocketAddr::new(there, 0).to_string();
            let mut target = OnPeer { machines: self, address, process: None };
            let stream = target.start()?;
            let port = u8::try_from(self.ours.port).context("a port's number")?;
            let device = OneDevice { device: self.ours.device.clone(), port, address: here };
            let initiator = device.open(&device.config());
            let ends =
                EndsConfig { patience: Duration::from_secs(120), late_max: Duration::from_millis(100) };
            RemotePair::new(initiator, stream, target, ends)
        };
        Box::new(open().unwrap_or_else(|error| panic!("no pair of machines: {error:#}")))
    }
}

//! Something breaks while verified transfers run, and is mended. No wrong byte, no write after completion, and the
//! transfers are back within a bound.

use super::run;
use super::transfers::ends;
use crate::host::{Host, Need};
use crate::load::Load;
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::time::{Duration, Instant};

const NEEDS: &[Need] = &[Need::Rdma, Need::Peer, Need::Netadmin];

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "tcp_survives_a_link_that_goes_down_and_comes_back",
        needs: NEEDS,
        run: |host| under_fault(host, "tcp", &LINK_DOWN_AND_UP),
    },
    Test {
        name: "tcp_survives_the_loss_of_one_packet_in_a_hundred",
        needs: &[Need::Rdma, Need::Peer, Need::Netadmin, Need::Program("tc")],
        run: |host| under_fault(host, "tcp", &LOSS),
    },
    Test {
        name: "tcp_survives_the_death_and_restart_of_its_peer",
        needs: &[Need::Rdma, Need::Peer],
        run: |host| under_fault(host, "tcp", &DEATH_AND_RESTART),
    },
];

/// Something that breaks and is mended.
struct Fault {
    what: &'static str,
    inject: fn(&Scene) -> Result<()>,
    mend: fn(&Scene) -> Result<()>,
    /// How long it stays broken.
    hold: Duration,
    /// Whether transfers are verified while it lasts.
    goes_on: bool,
    /// From mending to the next verified transfer, at most. Generous: guests under emulation may be starved.
    bound: Duration,
}

/// What a fault can lay hands on.
struct Scene {
    load: Load,
    /// Network interfaces of our rails.
    links: Vec<String>,
}

const LINK_DOWN_AND_UP: Fault = Fault {
    what: "the first rail's link down",
    inject: |scene| scene.set_link(0, "down"),
    mend: |scene| scene.set_link(0, "up"),
    hold: Duration::from_secs(4),
    goes_on: false,
    bound: Duration::from_secs(20),
};

const LOSS: Fault = Fault {
    what: "1 % of the first rail's packets lost",
    inject: |scene| {
        run(&["tc", "qdisc", "add", "dev", scene.link(0)?, "root", "netem", "loss", "1%"]).map(drop)
    },
    mend: |scene| run(&["tc", "qdisc", "del", "dev", scene.link(0)?, "root"]).map(drop),
    hold: Duration::from_secs(6),
    goes_on: true,
    bound: Duration::from_secs(20),
};

const DEATH_AND_RESTART: Fault = Fault {
    what: "the peer's process killed",
    inject: |scene| scene.load.kill_target(),
    mend: |scene| scene.load.restart_target(),
    hold: Duration::from_secs(2),
    goes_on: false,
    bound: Duration::from_secs(20),
};

/// How long the load runs before, and again after.
const CALM: Duration = Duration::from_secs(2);

fn under_fault(host: &Host, fabric: &'static str, fault: &Fault) -> Result<()> {
    let links = host.joined_rails()?.into_iter().filter_map(|(ours, _)| ours.netdev).collect();
    let scene = Scene { load: Load::start(host.peer()?, ends(host, fabric)?)?, links };
    let load = &scene.load;
    load.verified_since(Instant::now(), fault.bound).context("before anything was broken")?;
    std::thread::sleep(CALM);
    let before = load.failures();
    ensure!(before == 0, "{before} transfers failed before anything was broken");

    (fault.inject)(&scene).with_context(|| fault.what)?;
    let injected = Instant::now();
    std::thread::sleep(fault.hold);
    let meanwhile = if fault.goes_on { Some(load.verified_since(injected, fault.bound)) } else { None };
    // Whatever was found: nobody else shall find the link broken.
    (fault.mend)(&scene).with_context(|| format!("mending: {}", fault.what))?;
    let mended = Instant::now();
    meanwhile.transpose().with_context(|| format!("while {}", fault.what))?;
    let recovered =
        load.verified_since(mended, fault.bound).with_context(|| format!("after {}", fault.what))?;
    std::thread::sleep(CALM);

    let findings = scene.load.finish()?;
    ensure!(findings.broken.is_empty(), "{}", findings.broken.join("; "));
    println!(
        "    {}{fabric}, {} for {:.1} s: verified again {:.2} s after it was mended (bound {} s); longest gap {:.2} s; \
         {} MiB verified, 0 wrong bytes; {} transfers failed, canaries intact in {} of our blocks and {} of the target's",
        host.label(),
        fault.what,
        fault.hold.as_secs_f64(),
        recovered.as_secs_f64(),
        fault.bound.as_secs(),
        findings.longest_gap().as_secs_f64(),
        findings.bytes() >> 20,
        findings.failures.len(),
        findings.canaries.0,
        findings.canaries.1,
    );
    if let Some((at, why)) = findings.failures.first() {
        println!(
            "    first failure, {:.2} s after the fault: {why}",
            at.saturating_duration_since(injected).as_secs_f64()
        );
    }
    Ok(())
}

impl Scene {
    fn link(&self, index: usize) -> Result<&str> {
        self.links.get(index).map(String::as_str).with_context(|| format!("there is no rail {index}"))
    }

    fn set_link(&self, index: usize, state: &str) -> Result<()> {
        run(&["ip", "link", "set", self.link(index)?, state]).map(drop)
    }
}

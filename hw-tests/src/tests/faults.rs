//! A fault is injected while verified transfers run, and removed again. No byte is wrong, nothing is written
//! after a completion, no transfer fails while a usable route remains, and transfers succeed again within a
//! bound.

use super::run;
use super::transfers::ends;
use crate::engines::{self, Button};
use crate::host::{Host, Need};
use crate::load::{Findings, Load};
use crate::runner::Test;
use anyhow::{Context as _, Result, bail, ensure};
use std::time::{Duration, Instant};

const LINKS: &[Need] = &[Need::Rdma, Need::Peer, Need::Netadmin];
const LINKS_OF_TWO: &[Need] = &[Need::Rails(2), Need::Peer, Need::Netadmin];

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "tcp_survives_a_link_that_goes_down_and_comes_back",
        needs: LINKS,
        run: |host| under_fault(host, "tcp", &Fault { goes_on: false, errors: true, ..FIRST_LINK }),
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
    Test {
        name: "rdma_goes_on_over_the_other_rail_while_one_is_down",
        needs: LINKS_OF_TWO,
        run: |host| under_fault(host, "rdma", &FIRST_LINK),
    },
    Test {
        name: "rdma_survives_both_links_down",
        needs: LINKS_OF_TWO,
        run: |host| under_fault(host, "rdma", &Fault { goes_on: false, errors: true, ..BOTH_LINKS }),
    },
    Test {
        name: "rdma_fails_over_to_tcp_while_both_links_are_down_and_comes_back",
        needs: LINKS_OF_TWO,
        run: |host| under_fault(host, "rdma+tcp", &BOTH_LINKS),
    },
    Test {
        name: "rdma_survives_the_loss_of_one_packet_in_a_hundred",
        needs: &[Need::Rails(2), Need::Peer, Need::Netadmin, Need::Program("tc")],
        run: |host| under_fault(host, "rdma", &LOSS),
    },
    Test {
        name: "rdma_survives_queue_pairs_forced_to_error",
        needs: &[Need::Rails(2), Need::Peer],
        run: |host| under_fault(host, "rdma", &QUEUE_PAIRS),
    },
    Test {
        name: "rdma_survives_the_death_and_restart_of_its_peer",
        needs: &[Need::Rdma, Need::Peer],
        run: |host| under_fault(host, "rdma", &DEATH_AND_RESTART),
    },
];

/// A fault and its repair.
#[derive(Clone, Copy)]
struct Fault {
    /// The fault, as a clause for reports.
    what: &'static str,
    /// Injects the fault.
    inject: fn(&Scene) -> Result<()>,
    /// Removes it.
    repair: fn(&Scene) -> Result<()>,
    /// How long the fault lasts.
    hold: Duration,
    /// Whether transfers must be verified while it lasts.
    goes_on: bool,
    /// Whether transfers may fail.
    errors: bool,
    /// The rails that must carry bytes again after the repair, by index.
    rails: &'static [usize],
    /// Longest time from the fault or the repair to the next verified transfer. Generous, because guests
    /// under emulation may get little CPU time.
    bound: Duration,
}

/// Longest time from the repair until each rail carries bytes again. A rail's backoff has grown to at most
/// 10 s during the fault, and so has the wait for the next probe of a rail that was slow after the repair.
const RETURN_BOUND: Duration = Duration::from_secs(60);

const FIRST_LINK: Fault = Fault {
    what: "the first rail's link down",
    inject: |scene| scene.set_links(1, "down"),
    repair: |scene| scene.set_links(1, "up"),
    hold: Duration::from_secs(4),
    goes_on: true,
    errors: false,
    rails: &[0],
    bound: Duration::from_secs(30),
};

const BOTH_LINKS: Fault = Fault {
    what: "both rails' links down",
    inject: |scene| scene.set_links(2, "down"),
    repair: |scene| scene.set_links(2, "up"),
    rails: &[0, 1],
    ..FIRST_LINK
};

const LOSS: Fault = Fault {
    what: "1 % of the first rail's packets lost",
    inject: |scene| {
        run(&["tc", "qdisc", "add", "dev", scene.link(0)?, "root", "netem", "loss", "1%"]).map(drop)
    },
    repair: |scene| run(&["tc", "qdisc", "del", "dev", scene.link(0)?, "root"]).map(drop),
    hold: Duration::from_secs(6),
    ..FIRST_LINK
};

const QUEUE_PAIRS: Fault = Fault {
    what: "every queue pair of the initiator in error",
    inject: |scene| {
        scene.button.press();
        Ok(())
    },
    repair: |_| Ok(()),
    hold: Duration::from_secs(1),
    rails: &[0, 1],
    ..FIRST_LINK
};

const DEATH_AND_RESTART: Fault = Fault {
    what: "the peer's process killed",
    inject: |scene| scene.load.kill_target(),
    repair: |scene| scene.load.restart_target(),
    hold: Duration::from_secs(2),
    goes_on: false,
    errors: true,
    rails: &[],
    ..FIRST_LINK
};

/// How long the load runs before the fault, and again after the recovery.
const CALM: Duration = Duration::from_secs(2);

/// What faults act on.
struct Scene {
    load: Load,
    button: Button,
    /// Network interfaces of this machine's rails.
    links: Vec<String>,
    /// The rails' names in the engine's statistics.
    rails: Vec<String>,
}

fn under_fault(host: &Host, fabric: &'static str, fault: &Fault) -> Result<()> {
    let scene = Scene::start(host, fabric)?;
    let load = &scene.load;
    load.verified_since(Instant::now(), fault.bound).context("before the fault")?;
    std::thread::sleep(CALM);
    let before = load.failures();
    ensure!(before == 0, "{before} transfers failed before the fault");

    (fault.inject)(&scene).with_context(|| fault.what)?;
    let injected = Instant::now();
    std::thread::sleep(fault.hold);
    let meanwhile = if fault.goes_on { Some(load.verified_since(injected, fault.bound)) } else { None };
    // Before any error is returned: later tests need the link.
    (fault.repair)(&scene).with_context(|| format!("repair of: {}", fault.what))?;
    let repaired = Instant::now();
    let meanwhile = meanwhile.transpose().with_context(|| format!("while {}", fault.what))?;
    let recovered =
        load.verified_since(repaired, fault.bound).with_context(|| format!("after {}", fault.what))?;
    let returned = if fabric == "tcp" { Vec::new() } else { scene.rails_returned(fault, repaired)? };
    std::thread::sleep(CALM);

    let bytes = load.rail_bytes();
    let findings = scene.load.finish()?;
    ensure!(findings.broken.is_empty(), "{}", findings.broken.join("; "));
    let label = host.label();
    println!(
        "    {label}{fabric}, {} for {}; bound for recovery: {}",
        fault.what,
        seconds(fault.hold),
        seconds(fault.bound)
    );
    if let Some(meanwhile) = meanwhile {
        println!("    {label}verified again {} after the fault, while it lasted", seconds(meanwhile));
    }
    println!(
        "    {label}verified again {} after the repair; longest gap {}",
        seconds(recovered),
        seconds(findings.longest_gap())
    );
    for (rail, time) in returned {
        println!(
            "    {label}{rail} carries bytes again {} after the repair (bound {})",
            seconds(time),
            seconds(RETURN_BOUND)
        );
    }
    print_findings(label, &findings, &bytes, injected);
    if let Some((_, why)) = findings.failures.first() {
        let count = findings.failures.len();
        ensure!(fault.errors, "{count} operations failed while a usable route remained; the first: {why}");
    }
    Ok(())
}

fn seconds(time: Duration) -> String {
    format!("{:.2} s", time.as_secs_f64())
}

/// Prints the counts of a load, `bytes` per rail, and its failures with the time from `injected`.
fn print_findings(label: &str, findings: &Findings, bytes: &[(String, u64)], injected: Instant) {
    let rails: Vec<String> =
        bytes.iter().map(|(rail, bytes)| format!("{rail} {} MiB", bytes >> 20)).collect();
    println!(
        "    {label}{} MiB verified, 0 wrong bytes ({}); {} operations failed; canaries intact after {} reads and in {} chunks of the target",
        findings.bytes() >> 20,
        rails.join(", "),
        findings.failures.len(),
        findings.canaries.0,
        findings.canaries.1,
    );
    let mut printed = "";
    for (at, why) in &findings.failures {
        // A series of equal failures is printed once.
        if why != printed {
            println!("    {label}{} after the fault: {why}", seconds(at.saturating_duration_since(injected)));
            printed = why;
        }
    }
}

impl Scene {
    fn start(host: &Host, fabric: &'static str) -> Result<Self> {
        let ours: Vec<_> = host.joined_rails()?.into_iter().map(|(ours, _)| ours).collect();
        let (ends, button) = (ends(host, fabric)?, Button::default());
        let engine = match fabric {
            "rdma" => engines::start_breakable(&ours, &ends.ours, &button)?,
            fabric => engines::start(fabric, &ends.ours)?,
        };
        Ok(Self {
            load: Load::start(engine, host.peer()?, ends)?,
            button,
            rails: ours.iter().map(|rail| format!("{}:{}", rail.device, rail.port)).collect(),
            links: ours.into_iter().filter_map(|rail| rail.netdev).collect(),
        })
    }

    fn link(&self, index: usize) -> Result<&str> {
        self.links.get(index).map(String::as_str).with_context(|| format!("there is no rail {index}"))
    }

    fn set_links(&self, count: usize, state: &str) -> Result<()> {
        (0..count).try_for_each(|index| run(&["ip", "link", "set", self.link(index)?, state]).map(drop))
    }

    /// Waits until each of the fault's rails carries bytes again; returns the time from the repair per rail.
    fn rails_returned(&self, fault: &Fault, repaired: Instant) -> Result<Vec<(String, Duration)>> {
        let bytes = |name: &str| {
            let all = self.load.rail_bytes();
            all.into_iter().find(|(rail, _)| rail == name).map_or(0, |(_, bytes)| bytes)
        };
        let mut waiting: Vec<(String, u64)> = fault
            .rails
            .iter()
            .filter_map(|index| self.rails.get(*index))
            .map(|name| (name.clone(), bytes(name)))
            .collect();
        let mut returned = Vec::new();
        while !waiting.is_empty() {
            waiting.retain(|(name, before)| {
                let back = bytes(name) > *before;
                if back {
                    returned.push((name.clone(), repaired.elapsed()));
                }
                !back
            });
            if repaired.elapsed() > RETURN_BOUND && !waiting.is_empty() {
                let names: Vec<&str> = waiting.iter().map(|(name, _)| name.as_str()).collect();
                let (names, all) = (names.join(" and "), self.load.rail_details());
                bail!("{names} did not carry bytes within {RETURN_BOUND:?} of the repair; the rails: {all}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(returned)
    }
}

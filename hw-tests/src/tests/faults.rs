//! Something breaks while verified transfers run, and is mended. No wrong byte, no write after completion, no error that a
//! living path could have spared, and the transfers are back within a bound.

use super::run;
use super::transfers::ends;
use crate::engines::{self, Button};
use crate::host::{Host, Need};
use crate::load::Load;
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

/// Something that breaks and is mended.
#[derive(Clone, Copy)]
struct Fault {
    what: &'static str,
    inject: fn(&Scene) -> Result<()>,
    mend: fn(&Scene) -> Result<()>,
    /// How long it stays broken.
    hold: Duration,
    /// Whether transfers must be verified while it lasts.
    goes_on: bool,
    /// Whether transfers may fail.
    errors: bool,
    /// The rails that must carry bytes again after it was mended.
    rails: &'static [usize],
    /// From breaking or mending to the next verified transfer, at most. Generous: guests under emulation may be starved.
    bound: Duration,
}

/// From mending until each rail carries bytes again, at most. Its pause has grown to 10 s at most while it was broken, and so
/// has the wait for the next try of a rail that was slow when it came back.
const RETURN_BOUND: Duration = Duration::from_secs(60);

const FIRST_LINK: Fault = Fault {
    what: "the first rail's link down",
    inject: |scene| scene.set_links(1, "down"),
    mend: |scene| scene.set_links(1, "up"),
    hold: Duration::from_secs(4),
    goes_on: true,
    errors: false,
    rails: &[0],
    bound: Duration::from_secs(30),
};

const BOTH_LINKS: Fault = Fault {
    what: "both rails' links down",
    inject: |scene| scene.set_links(2, "down"),
    mend: |scene| scene.set_links(2, "up"),
    rails: &[0, 1],
    ..FIRST_LINK
};

const LOSS: Fault = Fault {
    what: "1 % of the first rail's packets lost",
    inject: |scene| {
        run(&["tc", "qdisc", "add", "dev", scene.link(0)?, "root", "netem", "loss", "1%"]).map(drop)
    },
    mend: |scene| run(&["tc", "qdisc", "del", "dev", scene.link(0)?, "root"]).map(drop),
    hold: Duration::from_secs(6),
    ..FIRST_LINK
};

const QUEUE_PAIRS: Fault = Fault {
    what: "every queue pair of ours in error",
    inject: |scene| {
        scene.button.press();
        Ok(())
    },
    mend: |_| Ok(()),
    hold: Duration::from_secs(1),
    rails: &[0, 1],
    ..FIRST_LINK
};

const DEATH_AND_RESTART: Fault = Fault {
    what: "the peer's process killed",
    inject: |scene| scene.load.kill_target(),
    mend: |scene| scene.load.restart_target(),
    hold: Duration::from_secs(2),
    goes_on: false,
    errors: true,
    rails: &[],
    ..FIRST_LINK
};

/// How long the load runs before, and again after.
const CALM: Duration = Duration::from_secs(2);

/// What a fault can lay hands on.
struct Scene {
    load: Load,
    button: Button,
    /// Network interfaces of our rails.
    links: Vec<String>,
    /// The rails' names in the engine's statistics.
    rails: Vec<String>,
}

fn under_fault(host: &Host, fabric: &'static str, fault: &Fault) -> Result<()> {
    let scene = Scene::set(host, fabric)?;
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
    let meanwhile = meanwhile.transpose().with_context(|| format!("while {}", fault.what))?;
    let recovered =
        load.verified_since(mended, fault.bound).with_context(|| format!("after {}", fault.what))?;
    let returned = if fabric == "tcp" { Vec::new() } else { scene.rails_returned(fault, mended)? };
    std::thread::sleep(CALM);

    let bytes = load.rail_bytes();
    let findings = scene.load.finish()?;
    ensure!(findings.broken.is_empty(), "{}", findings.broken.join("; "));
    let label = host.label();
    let seconds = |time: Duration| format!("{:.2} s", time.as_secs_f64());
    println!(
        "    {label}{fabric}, {} for {}; bound for recovery: {}",
        fault.what,
        seconds(fault.hold),
        seconds(fault.bound)
    );
    if let Some(meanwhile) = meanwhile {
        println!("    {label}verified again {} after it broke, while broken", seconds(meanwhile));
    }
    println!(
        "    {label}verified again {} after it was mended; longest gap {}",
        seconds(recovered),
        seconds(findings.longest_gap())
    );
    for (rail, time) in returned {
        println!(
            "    {label}{rail} carries bytes again {} after it was mended (bound {})",
            seconds(time),
            seconds(RETURN_BOUND)
        );
    }
    let rails: Vec<String> =
        bytes.iter().map(|(rail, bytes)| format!("{rail} {} MiB", bytes >> 20)).collect();
    println!(
        "    {label}{} MiB verified, 0 wrong bytes ({}); {} operations failed; canaries intact behind {} of our reads and in {} of the target's blocks",
        findings.bytes() >> 20,
        rails.join(", "),
        findings.failures.len(),
        findings.canaries.0,
        findings.canaries.1,
    );
    let mut told = "";
    for (at, why) in &findings.failures {
        // A series of the same is told once.
        if why != told {
            println!("    {label}{} after it broke: {why}", seconds(at.saturating_duration_since(injected)));
            told = why;
        }
    }
    if let Some((_, why)) = findings.failures.first() {
        ensure!(fault.errors, "a path was alive, and {} operations failed: {why}", findings.failures.len());
    }
    Ok(())
}

impl Scene {
    fn set(host: &Host, fabric: &'static str) -> Result<Self> {
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

    /// When each of the fault's rails carried bytes again.
    fn rails_returned(&self, fault: &Fault, mended: Instant) -> Result<Vec<(String, Duration)>> {
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
                    returned.push((name.clone(), mended.elapsed()));
                }
                !back
            });
            if mended.elapsed() > RETURN_BOUND && !waiting.is_empty() {
                let names: Vec<&str> = waiting.iter().map(|(name, _)| name.as_str()).collect();
                let (names, all) = (names.join(" and "), self.load.rails_at_length());
                bail!("{names} carries nothing again within {RETURN_BOUND:?}; the rails: {all}");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(returned)
    }
}

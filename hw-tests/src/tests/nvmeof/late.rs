//! The late write: a target that carries writes out seconds after their connection was cut.
//!
//! ```text
//!   WRITE ──▶ nvmet ──▶ dm-delay, 3 s ──▶ disk
//!     ╳ cut                 │
//!     fence ends            ▼ old bytes: before the fence ends, never after
//!     new bytes ───────────────────────▶ disk    are still there when the delay has passed
//! ```

use super::kernels_target;
use crate::host::{Host, LateNamespace, Need};
use crate::nvmeof::{Initiator, RawHost, config, find};
use crate::remote::Process;
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::time::{Duration, Instant};
use te_core::testkit::pattern;
use te_core::{Op, Outcome};
use te_nvmeof::{Config, Namespace};

const NEEDS: &[Need] = &[Need::Nvmeof, Need::Late, Need::Peer, Need::Netadmin, Need::Lab(&["nvmeof"])];

const LONG: &[Need] =
    &[Need::Long, Need::Nvmeof, Need::Late, Need::Peer, Need::Netadmin, Need::Lab(&["nvmeof"])];

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "the_kernels_nvme_target_writes_after_it_has_reported_that_its_controller_is_disabled",
        needs: NEEDS,
        run: disabled_and_late,
    },
    Test {
        name: "nothing_lands_on_an_nvme_namespace_after_our_fence_when_connections_are_cut",
        needs: NEEDS,
        run: |host| fenced(host, false),
    },
    Test {
        name: "nothing_lands_on_an_nvme_namespace_after_our_fence_when_the_link_goes_down",
        needs: LONG,
        run: |host| fenced(host, true),
    },
];

/// Writes that are fenced at the same time, each by a transport of its own.
const TRIALS: u64 = 10;
/// The range of each.
const RANGE: u64 = 2 << 20;
const GRANULE: u64 = 4_096;
/// Bytes of the write that is late.
const LATE: u32 = 256 << 10;
const OLD: u64 = 1;
const NEW: u64 = 100_000;
const PATIENCE: Duration = Duration::from_secs(60);

fn late(host: &Host) -> Result<&LateNamespace> {
    host.late.as_ref().context("the test uses a late namespace without declaring Need::Late")
}

/// The device behind the late namespace.
struct Disk(Process);

impl Disk {
    fn open(host: &Host) -> Result<Self> {
        let mut process = host.peer()?.start(&["self", "helper", "nvmeof", "disk", &late(host)?.device])?;
        ensure!(process.receive()? == "ready", "the helper does not start");
        Ok(Self(process))
    }

    fn holds(&mut self, seed: u64, offset: u64, len: u32) -> Result<bool> {
        Ok(self.0.request(&format!("check {seed} {offset} {len}"))? == "ok")
    }

    fn fill(&mut self, seed: u64, offset: u64, len: u32) -> Result<()> {
        ensure!(self.0.request(&format!("fill {seed} {offset} {len}"))? == "ok", "the disk is not written");
        Ok(())
    }
}

/// (a) F3 proves nothing: `nvmet` clears CSTS.RDY while the commands of the controller run.
fn disabled_and_late(host: &Host) -> Result<()> {
    const LEN: u32 = 4_096;
    const AT: u64 = 60 << 20;
    const BLOCK: u64 = 512;
    let (address, nqn) = kernels_target(host)?;
    let late = late(host)?;
    let mut disk = Disk::open(host)?;
    disk.fill(NEW, AT, LEN)?;
    let mut raw = RawHost::connect(address, &nqn)?;
    raw.begin_write(late.nsid, AT / BLOCK, LEN / BLOCK as u32, &pattern(OLD, LEN as usize))?;
    std::thread::sleep(Duration::from_millis(500));
    let took = raw.disable()?;
    ensure!(disk.holds(NEW, AT, LEN)?, "the write was not late: the test proves nothing");
    std::thread::sleep(late.delay + Duration::from_secs(1));
    ensure!(
        disk.holds(OLD, AT, LEN)?,
        "no byte landed after CSTS.RDY = 0: this kernel's target tells the truth, and `fence.rs` says otherwise"
    );
    println!("    {}CSTS.RDY was 0 after {} ms; the write landed after that", host.label(), took.as_millis());
    Ok(())
}

/// One write that is late.
struct Trial {
    initiator: Initiator,
    /// Where its data is on the disk.
    at: u64,
    write: u64,
    submitted: Instant,
    /// How long after that it was cut.
    cut_after: Duration,
    fence: Option<(u64, Instant)>,
    /// The write had its response before the cut: nothing is late.
    carried_out: bool,
    /// Whether the data was on the disk when the fence had ended.
    landed: bool,
    fenced_after: Option<Duration>,
}

/// (b) After a fence, nothing lands.
fn fenced(host: &Host, by_link: bool) -> Result<()> {
    let (address, nqn) = kernels_target(host)?;
    let delay = late(host)?.delay;
    let namespace = find(address, &nqn, late(host)?.nsid)?;
    let mut disk = Disk::open(host)?;
    let base = if by_link { TRIALS * RANGE } else { 0 };
    let mut trials = begin(&namespace, base, delay)?;
    let link = super::faults::Link::to(address.ip())?;
    cut(&mut trials, by_link.then_some(&link))?;
    // Each fence ends by itself; what is on the disk is replaced at once.
    let give_up = Instant::now() + PATIENCE;
    let mut back = Instant::now() + Duration::from_secs(4);
    while trials.iter().any(|trial| trial.fenced_after.is_none()) {
        ensure!(Instant::now() < give_up, "a fence does not end");
        if by_link && Instant::now() > back {
            link.set(true)?;
            back = give_up;
        }
        for trial in &mut trials {
            trial.initiator.linger(Duration::from_millis(1));
            proceed(trial, &mut disk)?;
        }
    }
    link.set(true)?;
    // Everything that was late has landed then.
    std::thread::sleep(delay + Duration::from_secs(2));
    let mut wrong = 0;
    for trial in &trials {
        wrong += u32::from(!disk.holds(NEW, trial.at, LATE)?);
    }
    // The device holds a write back for the whole delay, so what was cut before was not on the disk then.
    let between = trials.iter().filter(|trial| trial.landed && trial.cut_after < delay).count();
    let in_time = trials.iter().filter(|trial| !trial.carried_out).count() as u64;
    let fences = trials.iter().filter_map(|trial| trial.fenced_after);
    let by_time: u64 = trials.iter().map(|trial| trial.initiator.node.transport.stats().fenced_by_time).sum();
    println!(
        "    {}{TRIALS} writes, {in_time} of them in flight when their {}: {between} landed between that and the \
         end of the fence, {wrong} after it; {by_time} fences by time, the longest {:.1} s",
        host.label(),
        if by_link { "link went down" } else { "connection was cut" },
        fences.max().unwrap_or_default().as_secs_f64()
    );
    ensure!(wrong == 0, "{wrong} of {TRIALS} writes landed after their fence");
    ensure!(in_time * 2 >= TRIALS, "only {in_time} of {TRIALS} writes were cut in time: the machine is busy");
    ensure!(between > 0, "no write was late: the test proves nothing");
    Ok(())
}

/// Adopts the ranges and submits the writes.
fn begin(namespace: &Namespace, base: u64, delay: Duration) -> Result<Vec<Trial>> {
    let quiesce_ms = delay.as_millis() as u32 + 1_000;
    let config = Config { queues: 1, quiesce_ms, ..config() };
    // All are submitted at once: each of them is cut before the delay is over.
    let content = pattern(OLD, LATE as usize);
    let mut trials = Vec::new();
    for number in 0..TRIALS {
        let mut initiator = Initiator::open(config.clone(), LATE as usize)?;
        initiator.node.memory.set(0, &content);
        let first = base + number * RANGE;
        initiator.begin_adoption(namespace, first..first + RANGE)?;
        let at = first + GRANULE;
        trials.push(Trial {
            initiator,
            at,
            write: 0,
            submitted: Instant::now(),
            cut_after: Duration::ZERO,
            fence: None,
            carried_out: false,
            landed: false,
            fenced_after: None,
        });
    }
    // Their superblocks are late as well: they are written at the same time.
    let give_up = Instant::now() + PATIENCE;
    let mut waiting: Vec<&mut Trial> = trials.iter_mut().collect();
    while !waiting.is_empty() {
        ensure!(Instant::now() < give_up, "{} ranges are not adopted", waiting.len());
        let mut left = Vec::new();
        for trial in waiting {
            trial.initiator.linger(Duration::from_millis(1));
            if !trial.initiator.end_adoption()? {
                left.push(trial);
            }
        }
        waiting = left;
    }
    for trial in &mut trials {
        trial.write = trial.initiator.begin(Op::Write, 0, 0, LATE)?;
        trial.submitted = Instant::now();
    }
    Ok(trials)
}

/// Cuts each connection at another time of its write, or the link that all share.
fn cut(trials: &mut [Trial], link: Option<&super::faults::Link>) -> Result<()> {
    let began = Instant::now();
    let mut next = 0;
    while next < trials.len() {
        for trial in trials.iter_mut() {
            trial.initiator.linger(Duration::from_millis(1));
        }
        if let Some(link) = link {
            if began.elapsed() > Duration::from_millis(1_000) {
                link.set(false)?;
                trials.iter_mut().for_each(|trial| trial.cut_after = trial.submitted.elapsed());
                next = trials.len();
            }
            continue;
        }
        // Several, when the round has taken long.
        while next < trials.len() && began.elapsed() > Duration::from_millis(100 * next as u64 + 200) {
            trials[next].initiator.node.transport.close_connections();
            trials[next].cut_after = trials[next].submitted.elapsed();
            next += 1;
        }
    }
    Ok(())
}

/// Fences a write that has ended; replaces its bytes once the fence has ended.
fn proceed(trial: &mut Trial, disk: &mut Disk) -> Result<()> {
    let Trial { initiator, at, write, fence, carried_out, landed, fenced_after, .. } = trial;
    match fence {
        None if *carried_out => {}
        None => {
            let Some(ended) = initiator.node.ended(*write) else { return Ok(()) };
            let Err(error) = ended.result else {
                // On a busy machine, the cut may come after the delay.
                disk.fill(NEW, *at, LATE)?;
                *fenced_after = Some(Duration::ZERO);
                *carried_out = true;
                return Ok(());
            };
            ensure!(ended.outcome == Outcome::Unknown, "the write ends {:?}: {error}", ended.outcome);
            *fence = Some((initiator.fence()?, Instant::now()));
        }
        Some((token, since)) if fenced_after.is_none() => {
            let Some(ended) = initiator.node.ended(*token) else { return Ok(()) };
            ended.result.context("the fence")?;
            *fenced_after = Some(since.elapsed());
            *landed = disk.holds(OLD, *at, LATE)?;
            disk.fill(NEW, *at, LATE)?;
        }
        Some(_) => {}
    }
    Ok(())
}

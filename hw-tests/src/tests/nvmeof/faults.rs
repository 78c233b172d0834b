//! Faults while our initiator works on the kernel's target: every slice ends once, no byte is wrong, and it
//! works again within ten seconds of the repair.

use super::{kernels_target, run};
use crate::host::{Host, Need};
use crate::nvmeof::{Initiator, config, find, patient};
use crate::runner::Test;
use anyhow::{Context as _, Result, bail, ensure};
use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Lines};
use std::net::IpAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use te_core::testkit::pattern;
use te_core::{ErrorKind, Op, Outcome};
use te_fabric::testkit::hex;

const NEEDS: &[Need] = &[Need::Nvmeof, Need::Peer, Need::Netadmin, Need::Lab(&["nvmeof"])];

const LONG: &[Need] = &[Need::Long, Need::Nvmeof, Need::Peer, Need::Netadmin, Need::Lab(&["nvmeof"])];

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "our_nvme_initiator_works_again_after_the_link_was_down",
        needs: NEEDS,
        run: |host| {
            let link = Link::to(kernels_target(host)?.0.ip())?;
            let break_it = || link.set(false);
            recovers(host, "the link was down for 5 s", Duration::from_secs(5), break_it, || link.set(true))
        },
    },
    Test {
        name: "our_nvme_initiator_works_while_packets_are_lost",
        needs: NEEDS,
        run: |host| {
            let link = Link::to(kernels_target(host)?.0.ip())?;
            let (lose, keep) = (|| link.lose(true), || link.lose(false));
            recovers(host, "1 % of the packets were lost for 5 s", Duration::from_secs(5), lose, keep)
        },
    },
    Test {
        name: "our_nvme_initiator_works_again_after_the_namespace_was_disabled",
        needs: NEEDS,
        run: |host| {
            let (off, on) = (|| enable(host, false), || enable(host, true));
            recovers(host, "the namespace was disabled for 3 s", Duration::from_secs(3), off, on)
        },
    },
    Test {
        name: "our_nvme_initiator_works_again_after_it_connected_to_a_disabled_namespace",
        needs: NEEDS,
        run: |host| {
            let link = Link::to(kernels_target(host)?.0.ip())?;
            let break_both = || {
                enable(host, false)?;
                link.set(false)?;
                std::thread::sleep(Duration::from_secs(3));
                link.set(true)
            };
            let what = "the namespace was disabled while the link was down";
            recovers(host, what, Duration::from_secs(4), break_both, || enable(host, true))
        },
    },
    Test {
        name: "our_nvme_initiator_works_again_after_the_port_was_unlinked",
        needs: LONG,
        run: |host| {
            let unlink = || on_peer(host, &format!("rm {NVMET}/ports/1/subsystems/lab"));
            let link =
                || on_peer(host, &format!("ln -s {NVMET}/subsystems/lab {NVMET}/ports/1/subsystems/lab"));
            recovers(host, "the port was unlinked for 3 s", Duration::from_secs(3), unlink, link)
        },
    },
    Test { name: "our_nvme_initiator_works_again_after_its_process_was_stopped", needs: NEEDS, run: stopped },
    Test {
        name: "an_nvme_range_beyond_the_namespace_is_stale_until_the_namespace_has_grown",
        needs: NEEDS,
        run: resized,
    },
];

const NVMET: &str = "/sys/kernel/config/nvmet";
/// Within this time after the repair, bytes are verified again.
const RETURN_BOUND: Duration = Duration::from_secs(10);
/// Slices that the load has in flight, and their length.
const SLOTS: u64 = 8;
const LEN: u32 = 64 << 10;
const RANGE: u64 = 2 << 20;
/// The pause before a refused slice is tried again.
const RETRY: Duration = Duration::from_millis(20);

/// The network interface that leads to an address.
pub(super) struct Link(String);

impl Link {
    pub(super) fn to(address: IpAddr) -> Result<Self> {
        let route = run(&["ip", "-o", "route", "get", &address.to_string()])?;
        let mut words = route.split_whitespace().skip_while(|word| *word != "dev");
        Ok(Self(words.nth(1).with_context(|| format!("no interface in `{route}`"))?.to_owned()))
    }

    pub(super) fn set(&self, up: bool) -> Result<()> {
        run(&["ip", "link", "set", &self.0, if up { "up" } else { "down" }]).map(drop)
    }

    fn lose(&self, lose: bool) -> Result<()> {
        let (verb, rest) = if lose { ("add", &["netem", "loss", "1%"][..]) } else { ("del", &[][..]) };
        run(&[&["tc", "qdisc", verb, "dev", &self.0, "root"], rest].concat()).map(drop)
    }
}

fn on_peer(host: &Host, line: &str) -> Result<()> {
    host.peer()?.run(&["sh", "-c", line]).map(drop)
}

fn enable(host: &Host, on: bool) -> Result<()> {
    on_peer(host, &format!("echo {} > {NVMET}/subsystems/lab/namespaces/1/enable", u8::from(on)))
}

/// What a slot does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing before this time.
    Idle(Instant),
    Writing,
    Reading,
    Fencing,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    seed: u64,
    verified: Option<Instant>,
    /// A write of it may still land.
    doubtful: bool,
}

/// Slices that are written, read back and compared without end.
struct Load {
    initiator: Initiator,
    slots: Vec<Slot>,
    /// The slot of each token in flight.
    tokens: HashMap<u64, usize>,
    rounds: u64,
    failures: HashMap<String, u32>,
    fences: u32,
}

impl Load {
    fn start(host: &Host) -> Result<Self> {
        let (address, nqn) = kernels_target(host)?;
        let namespace = find(address, &nqn, 1)?;
        let mut initiator = Initiator::open(config(), (2 * SLOTS * u64::from(LEN)) as usize)?;
        initiator.adopt(&namespace, 0..RANGE)?;
        let idle = Slot { state: State::Idle(Instant::now()), seed: 0, verified: None, doubtful: false };
        let slots = vec![idle; SLOTS as usize];
        Ok(Self { initiator, slots, tokens: HashMap::new(), rounds: 0, failures: HashMap::new(), fences: 0 })
    }

    /// Polls, and does the next step of each slot.
    fn step(&mut self) -> Result<()> {
        self.initiator.linger(Duration::from_micros(1));
        for ended in std::mem::take(&mut self.initiator.node.done) {
            let slot = self.tokens.remove(&ended.token.0);
            let at = slot.with_context(|| format!("L1: {ended:?} belongs to nothing in flight"))?;
            self.ended(at, ended.result.err().map(|error| error.kind), ended.outcome)?;
        }
        for at in 0..self.slots.len() {
            if matches!(self.slots[at].state, State::Idle(from) if Instant::now() >= from) {
                let next = if self.slots[at].doubtful { State::Fencing } else { State::Writing };
                self.begin(at, next);
            }
        }
        Ok(())
    }

    fn begin(&mut self, at: usize, state: State) {
        let (remote, local) = (at as u64 * u64::from(LEN), 2 * at as u64 * u64::from(LEN));
        let begun = match state {
            State::Writing => {
                self.slots[at].seed += SLOTS + 1;
                let content = pattern(self.slots[at].seed, LEN as usize);
                self.initiator.node.memory.set(local, &content);
                self.initiator.begin(Op::Write, local, remote, LEN)
            }
            State::Reading => self.initiator.begin(Op::Read, local + u64::from(LEN), remote, LEN),
            _ => self.initiator.fence(),
        };
        self.slots[at].state = match begun {
            Ok(token) => {
                self.tokens.insert(token, at);
                state
            }
            Err(error) => {
                self.count(format!("refused: {error:#}"));
                State::Idle(Instant::now() + RETRY)
            }
        };
    }

    fn ended(&mut self, at: usize, error: Option<ErrorKind>, outcome: Outcome) -> Result<()> {
        let again = State::Idle(Instant::now() + RETRY);
        match (self.slots[at].state, error) {
            (State::Writing, None) => self.begin(at, State::Reading),
            (State::Reading, None) => {
                let local = (2 * at as u64 + 1) * u64::from(LEN);
                crate::nvmeof::same(
                    &self.initiator.node.memory.get(local, LEN as usize),
                    self.slots[at].seed,
                )?;
                self.rounds += 1;
                self.slots[at].verified = Some(Instant::now());
                self.begin(at, State::Writing);
            }
            (State::Fencing, None) => {
                self.fences += 1;
                self.slots[at].doubtful = false;
                self.begin(at, State::Writing);
            }
            (State::Idle(_), _) => bail!("L1: a slice ended that was not in flight"),
            (state, Some(error)) => {
                self.count(format!("{state:?}: {error:?}, {outcome:?}"));
                self.slots[at].doubtful |= state == State::Writing && outcome == Outcome::Unknown;
                self.slots[at].state = again;
            }
        }
        Ok(())
    }

    fn count(&mut self, failure: String) {
        *self.failures.entry(failure).or_default() += 1;
    }

    fn run(&mut self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.step()?;
        }
        Ok(())
    }

    /// Waits until each slot has verified bytes after `since`; returns when the last one did.
    fn verified_since(&mut self, since: Instant) -> Result<Duration> {
        loop {
            let done = |slot: &Slot| slot.verified.is_some_and(|at| at > since);
            let left = self.slots.iter().filter(|slot| !done(slot)).count();
            if left == 0 {
                return Ok(since.elapsed());
            }
            ensure!(
                since.elapsed() < RETURN_BOUND,
                "{left} of {SLOTS} slots have not verified a byte {RETURN_BOUND:?} after the repair: {:?}, {:?}, {:?}",
                self.slots,
                self.failures,
                self.initiator.node.transport.stats()
            );
            self.step()?;
        }
    }
}

fn recovers(
    host: &Host,
    what: &str,
    time: Duration,
    break_it: impl Fn() -> Result<()>,
    repair: impl Fn() -> Result<()>,
) -> Result<()> {
    let mut load = Load::start(host)?;
    let before = Instant::now();
    load.verified_since(before).context("before the fault")?;
    load.run(Duration::from_millis(500))?;
    let broken = break_it();
    let during = load.run(time);
    // The next test shall find it whole.
    let repaired = repair();
    broken.and(during).and(repaired)?;
    let took = load.verified_since(Instant::now())?;
    load.run(Duration::from_millis(500))?;
    let stats = load.initiator.node.transport.stats();
    ensure!(stats.corrupt == 0 && stats.protocol_errors == 0, "{stats:?}");
    println!(
        "    {}{what}: verified again after {:.1} s; {} rounds of 64 KiB, 0 wrong bytes; {} associations lost, {} fences",
        host.label(),
        took.as_secs_f64(),
        load.rounds,
        stats.associations_lost,
        load.fences
    );
    let mut failures: Vec<_> = load.failures.iter().collect();
    failures.sort();
    println!("      failures: {failures:?}");
    Ok(())
}

/// A process that runs the load by itself.
struct Other {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(blob: &[u8]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["helper", "nvmeof", "load", &hex(blob)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        Ok(Self { child, lines })
    }

    fn line(&mut self) -> Result<String> {
        Ok(self.lines.next().context("the process has ended")??)
    }

    fn signal(&self, name: &str) -> Result<()> {
        run(&["kill", &format!("-{name}"), &self.child.id().to_string()]).map(drop)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process is stopped for longer than twice its keep-alive timeout: the target has ended its controller.
fn stopped(host: &Host) -> Result<()> {
    let (address, nqn) = kernels_target(host)?;
    let namespace = find(address, &nqn, 1)?;
    let mut owner = Initiator::open(config(), 1 << 20)?;
    let blob = owner.adopt(&namespace, 0..RANGE)?;
    let mut other = Other::start(&blob)?;
    while other.line()? != "round 20" {}
    other.signal("STOP")?;
    std::thread::sleep(Duration::from_millis(2 * u64::from(config().keep_alive_ms) + 1_500));
    let continued = Instant::now();
    other.signal("CONT")?;
    let mut errors = Vec::new();
    let mut rounds = 0;
    // Some lines may be from before the stop.
    while rounds < 40 {
        let line = other.line()?;
        match line.strip_prefix("error ") {
            Some(error) => errors.push(error.to_owned()),
            None => rounds += 1,
        }
    }
    let took = continued.elapsed();
    drop(other.child.stdin.take());
    let stats = loop {
        let line = other.line()?;
        if line.starts_with("stats ") {
            break line;
        }
    };
    ensure!(other.child.wait()?.success(), "the process fails");
    ensure!(took < RETURN_BOUND, "40 rounds took {took:?} after the process went on; {errors:?}");
    ensure!(!stats.contains(" associations_lost: 0,"), "the target did not end the controller: {stats}");
    println!(
        "    {}the process was stopped for 3.5 s: 40 rounds later after {:.1} s, 0 wrong bytes; {errors:?}",
        host.label(),
        took.as_secs_f64()
    );
    Ok(())
}

fn resized(host: &Host) -> Result<()> {
    const HALF: u64 = 32 << 20;
    const NSID: u32 = 3;
    let (address, nqn) = kernels_target(host)?;
    let namespace = find(address, &nqn, NSID)?;
    let resize = |sectors: u64| {
        on_peer(
            host,
            &format!(
                "export DM_DISABLE_UDEV=1; dmsetup load growing --table '0 {sectors} linear /dev/ram2 0' && \
                 dmsetup resume growing && echo 1 > {NVMET}/subsystems/lab/namespaces/{NSID}/revalidate_size"
            ),
        )
    };
    let beyond = HALF - RANGE / 2..HALF + RANGE / 2;
    let adopt = || -> Result<Initiator> {
        let mut initiator = Initiator::open(patient(), 1 << 20)?;
        initiator.adopt(&namespace, beyond.clone())?;
        Ok(initiator)
    };
    let refused = adopt().err().context("a range beyond the end of the namespace was adopted")?;
    let kind = refused.downcast_ref::<te_core::Error>().map(|error| error.kind);
    ensure!(kind == Some(ErrorKind::Stale), "{refused:#}");
    resize(2 * HALF / 512)?;
    let mut initiator = adopt().context("after the namespace has grown")?;
    let last = (RANGE - 4_096 - u64::from(LEN)) / 4_096 * 4_096;
    initiator.write(7, last, LEN)?;
    initiator.expect(7, last, LEN)?;
    // It shrinks under an adopted range: what is left can be read, the rest fails.
    resize(HALF / 512)?;
    initiator.write(8, 0, LEN)?;
    initiator.expect(8, 0, LEN)?;
    let ended = initiator.run(Op::Read, 0, last, LEN)?;
    let error = ended.result.err().context("bytes behind the end of the namespace were read")?;
    resize(2 * HALF / 512)?;
    initiator.expect(7, last, LEN)?;
    resize(HALF / 512)?;
    println!(
        "    {}a range beyond the namespace is Stale, is adopted once it has grown, and fails with {error} when \
         it shrinks",
        host.label()
    );
    Ok(())
}

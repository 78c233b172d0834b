//! CXL memory as device-DAX: mapped, written, read back, and read by another host of the same pool. Then the
//! same memory as a pool of ours: an initiator here, an owner on the peer.

use crate::cxl::{self, Guest, Owner};
use crate::host::{Host, Need};
use crate::remote::Process;
use crate::runner::Test;
use crate::sys::DevDax;
use anyhow::{Context as _, Result, bail, ensure};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use te_core::testkit::pattern;
use te_core::{ErrorKind, Op};
use te_cxl::{FormatOptions, Pool, Seat};
use te_fabric::testkit::{bytes_of, hex};

const OF_POOLS: &[Need] = &[Need::Cxl, Need::Peer, Need::Lab(&["cxl"])];

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "cxl_memory_is_mapped_written_and_read_back",
        needs: &[Need::Cxl, Need::Lab(&["cxl"])],
        run: written_and_read_back,
    },
    Test {
        name: "two_hosts_read_each_others_bytes_in_the_cxl_pool_they_share",
        needs: &[Need::Cxl, Need::Peer, Need::Lab(&["cxl"])],
        run: shared_by_two_hosts,
    },
    Test {
        name: "an_owner_and_a_peer_of_a_cxl_pool_read_each_others_bytes",
        needs: OF_POOLS,
        run: each_others_bytes,
    },
    Test {
        name: "a_range_of_a_cxl_pool_is_used_again_without_a_wrong_byte",
        needs: OF_POOLS,
        run: used_again,
    },
    Test {
        name: "clients_of_two_hosts_put_get_and_reuse_a_store_in_a_cxl_pool_without_a_wrong_byte",
        needs: OF_POOLS,
        run: store_rounds,
    },
    Test {
        name: "of_two_owners_that_claim_one_extent_of_a_cxl_pool_one_loses",
        needs: OF_POOLS,
        run: one_loses,
    },
    Test {
        name: "a_range_of_a_cxl_pool_is_not_used_again_while_a_stopped_writer_is_inside",
        needs: OF_POOLS,
        run: stopped_inside,
    },
];

/// Few bytes, because emulated CXL memory takes a trap per access.
const BYTES: usize = 64 << 10;

fn written_and_read_back(host: &Host) -> Result<()> {
    let path = device(host)?;
    let content = pattern(7, BYTES);
    DevDax::open(&path, BYTES)?.write(&content);
    // Another mapping of the same memory.
    ensure!(
        DevDax::open(&path, BYTES)?.read(BYTES) == content,
        "the bytes read differ from the bytes written"
    );
    println!("    {}{} KiB of {}, verified", host.label(), BYTES >> 10, path.display());
    Ok(())
}

fn shared_by_two_hosts(host: &Host) -> Result<()> {
    let ours = device(host)?;
    let peer = host.peer()?;
    let theirs = peer.facts()?.cxl.first().cloned().context("the peer has no CXL memory")?;
    let dax = DevDax::open(&ours, BYTES)?;
    for seed in [11u64, 12] {
        let (seed_text, bytes) = (seed.to_string(), BYTES.to_string());
        peer.run(&["self", "helper", "cxl", "paint", &theirs.display().to_string(), &seed_text, &bytes])?;
        ensure!(
            dax.read(BYTES) == pattern(seed, BYTES),
            "the peer's bytes of seed {seed} are not readable here"
        );
    }
    println!(
        "    {}the peer's writes to {} are readable in {}",
        host.label(),
        theirs.display(),
        ours.display()
    );
    Ok(())
}

fn device(host: &Host) -> Result<PathBuf> {
    host.facts.cxl.first().cloned().context("this machine has no CXL memory")
}

/// Rounds of [`used_again`], and those with `HW_TESTS_LONG=1`.
const ROUNDS: u64 = 100;
const ROUNDS_LONG: u64 = 1_000;
/// Bytes of a region of a pool.
const REGION: u32 = 64 << 10;

/// A new pool on the device that both machines have: its paths here and there.
fn new_pool(host: &Host) -> Result<(PathBuf, String)> {
    let ours = device(host)?;
    let theirs = host.peer()?.facts()?.cxl.first().cloned().context("the peer has no CXL memory")?;
    // Each call looks at every peer's page, and each look takes a trap.
    Pool::format(&ours, FormatOptions { force: true, peers: 4, ..FormatOptions::default() })?;
    Ok((ours, theirs.display().to_string()))
}

/// An owner's process on the peer.
struct Theirs(Process);

impl Theirs {
    fn start(host: &Host, path: &str) -> Result<Self> {
        let mut process = host.peer()?.start(&["self", "helper", "cxl", "own", path])?;
        ensure!(process.receive()? == "ready", "the owner does not start");
        Ok(Self(process))
    }

    fn must(&mut self, command: &str) -> Result<()> {
        let answer = self.0.request(command)?;
        ensure!(answer == "ok", "`{command}`: {answer}");
        Ok(())
    }

    /// The number of a new region, and its export.
    fn export(&mut self, at: u64, len: u32) -> Result<(String, Vec<u8>)> {
        let answer = self.0.request(&format!("export {at} {len}"))?;
        let words: Vec<&str> = answer.split_whitespace().collect();
        let ["export", number, blob] = words[..] else { bail!("the owner answers `{answer}`") };
        Ok((number.to_owned(), bytes_of(blob)))
    }
}

fn each_others_bytes(host: &Host) -> Result<()> {
    let (ours, theirs) = new_pool(host)?;
    let mut owner = Theirs::start(host, &theirs)?;
    owner.must("claim 0 1")?;
    let (_, blob) = owner.export(0, REGION)?;
    let mut guest = Guest::open(&ours, Seat { slot: 0, epoch: 1 }, REGION as usize)?;
    let id = guest.attach(&blob)?;
    let began = Instant::now();
    for round in 0..8_u64 {
        // The whole region, and parts of it down to one line.
        let (at, len) = [(0, REGION), (4_096, 4_096), (64, 64), (REGION - 192, 128)][round as usize % 4];
        guest.write(round, id, at.into(), len)?;
        owner.must(&format!("check {round} {at} {len}")).context("what the peer wrote")?;
        let seed = round + 100;
        owner.must(&format!("fill {seed} {at} {len}"))?;
        guest.expect(seed, id, at.into(), len).context("what the owner wrote")?;
    }
    println!(
        "    {}8 exchanges of 64 B to 64 KiB with an owner on the peer, 0 wrong bytes, {:.1} s",
        host.label(),
        began.elapsed().as_secs_f64()
    );
    owner.0.kill()
}

/// Put, get, take back, and use the same range again, for which the peer's old export is good for nothing.
fn used_again(host: &Host) -> Result<()> {
    const LEN: u32 = 1_024;
    let rounds = if host.may_take_long() { ROUNDS_LONG } else { ROUNDS };
    let (ours, theirs) = new_pool(host)?;
    let mut owner = Theirs::start(host, &theirs)?;
    owner.must("claim 1 1")?;
    let mut guest = Guest::open(&ours, Seat { slot: 0, epoch: 1 }, REGION as usize)?;
    let began = Instant::now();
    let mut old = None;
    for round in 0..rounds {
        // A few ranges, so that each is soon used again, and not always by the same row.
        let at = round % 3 * u64::from(LEN);
        let (number, blob) = owner.export(at, LEN)?;
        let id = guest.attach(&blob)?;
        guest.write(round, id, 0, LEN)?;
        guest.expect(round, id, 0, LEN)?;
        if let Some(stale) = old.replace(id) {
            for op in [Op::Write, Op::Read] {
                let error = guest.run(op, stale, 0, LEN)?.result.err();
                let kind = error.map(|error| error.kind);
                ensure!(kind == Some(ErrorKind::Stale), "round {round}: {op:?} of an old region: {kind:?}");
            }
            guest.detach(stale)?;
        }
        owner.must(&format!("check {round} {at} {LEN}")).with_context(|| format!("round {round}"))?;
        owner.must(&format!("deregister {number}"))?;
    }
    println!(
        "    {}{rounds} rounds of put, get and reuse of {LEN} B, 0 wrong bytes, {:.1} s",
        host.label(),
        began.elapsed().as_secs_f64()
    );
    owner.0.kill()
}

/// Clients here and on the peer, and a node there, without coherent caches: what one puts, the other one gets
/// and removes, so that the lines are used again.
fn store_rounds(host: &Host) -> Result<()> {
    let rounds = if host.may_take_long() { ROUNDS_LONG } else { ROUNDS };
    let (ours, theirs) = new_pool(host)?;
    let (here, there) = host.peer()?.management();
    let config = store_master::Config {
        rpc_listen: std::net::SocketAddr::new(here, 0),
        http_listen: None,
        ..store_master::Config::default()
    };
    let master = store_master::MasterServer::bind(config)?.spawn()?;
    let (address, rounds_text) = (master.rpc_addr().to_string(), rounds.to_string());
    let mut node = host.peer()?.start(&[
        "self",
        "helper",
        "cxl",
        "store-node",
        &theirs,
        &address,
        &there.to_string(),
    ])?;
    ensure!(node.receive()? == "ready", "the node does not start");
    let began = Instant::now();
    let mut other =
        host.peer()?.start(&["self", "helper", "cxl", "store-peer", &theirs, &address, &rounds_text])?;
    cxl::store_rounds(&ours, &address, (0, rounds))?;
    ensure!(other.receive()? == "done", "the peer's client");
    println!(
        "    {}{rounds} rounds of put, get and reuse by clients of two hosts, 0 wrong bytes, {:.1} s",
        host.label(),
        began.elapsed().as_secs_f64()
    );
    other.kill()?;
    node.kill()
}

/// Two owners claim the same extent at the same time, in epochs that the master has given out one after the
/// other. At most one has it then.
fn one_loses(host: &Host) -> Result<()> {
    const EXTENT: u32 = 3;
    let (ours, theirs) = new_pool(host)?;
    let (mut both, mut won) = (0, [0, 0]);
    for round in 0..10_u64 {
        let mut other = Theirs::start(host, &theirs)?;
        let mut here = Owner::open(&ours)?;
        let (low, high) = (2 * round + 1, 2 * round + 2);
        let (epoch_here, epoch_there) = if round % 2 == 0 { (low, high) } else { (high, low) };
        let claim = format!("claim {EXTENT} {epoch_there}");
        other.0.send(&claim)?;
        let first_here = here.claim(EXTENT, epoch_here).is_ok();
        let first_there = other.0.receive()? == "ok";
        both += u32::from(first_here && first_there);
        // A claim that is repeated confirms that the extent is still this owner's.
        let holds_here = first_here && here.claim(EXTENT, epoch_here).is_ok();
        let holds_there = first_there && other.0.request(&claim)? == "ok";
        ensure!(!(holds_here && holds_there), "round {round}: both owners have the extent");
        ensure!(holds_here || holds_there, "round {round}: neither owner has the extent");
        won[0] += u32::from(holds_here);
        won[1] += u32::from(holds_there);
        // The one that has lost exports nothing.
        if holds_here {
            here.export(0, u64::from(REGION)).context("the owner's export")?;
        } else {
            ensure!(!first_here || here.export(0, u64::from(REGION)).is_err(), "round {round}: a lost claim");
        }
        other.0.kill()?;
    }
    println!(
        "    {}10 rounds: the extent went {} times here and {} times to the peer; {both} times the first had \
         it before the second",
        host.label(),
        won[0],
        won[1]
    );
    Ok(())
}

/// A writer here, which is stopped in the middle of a copy, and an owner on the peer.
fn stopped_inside(host: &Host) -> Result<()> {
    const LEN: u32 = 1 << 20;
    let (ours, theirs) = new_pool(host)?;
    let mut owner = Theirs::start(host, &theirs)?;
    owner.must("claim 5 1")?;
    let mut inside = 0;
    for round in 0..10_u64 {
        let (number, blob) = owner.export(0, LEN)?;
        let epoch = round + 1;
        let mut writer = Writer::start(&ours, epoch, &blob, LEN)?;
        writer.wait_for("round 0")?;
        std::thread::sleep(Duration::from_millis(37 * round));
        writer.signal("STOP")?;
        let deregister = format!("deregister {number}");
        let answer = owner.0.request(&deregister)?;
        if answer == "Busy" {
            inside += 1;
            for _ in 0..20 {
                let answer = owner.0.request(&deregister)?;
                ensure!(answer == "Busy", "the range of a stopped writer was given up: {answer}");
            }
        } else {
            ensure!(answer == "ok", "`{deregister}`: {answer}");
            // It was between two copies, and must not begin another one.
            owner.must(&format!("fill 1000 0 {LEN}"))?;
        }
        writer.signal("CONT")?;
        let give_up = Instant::now() + Duration::from_secs(30);
        while answer == "Busy" && owner.0.request(&deregister)? != "ok" {
            ensure!(Instant::now() < give_up, "the writer does not leave");
        }
        owner.must(&format!("fill 1000 0 {LEN}"))?;
        writer.wait_for("ended Stale")?;
        owner.must(&format!("check 1000 0 {LEN}")).context("a late write")?;
        if inside >= 2 {
            break;
        }
    }
    ensure!(inside > 0, "no writer was stopped in the middle of a copy");
    println!(
        "    {}{inside} writers stopped in the middle of a copy: Busy until they had left, no late write",
        host.label()
    );
    owner.0.kill()
}

/// A writer's process on this machine, killed when the value drops.
struct Writer {
    child: std::process::Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Writer {
    fn start(path: &Path, epoch: u64, blob: &[u8], len: u32) -> Result<Self> {
        let (path, epoch, len) = (path.display().to_string(), epoch.to_string(), len.to_string());
        let mut child = Command::new(std::env::current_exe()?)
            .args(["helper", "cxl", "write", &path, "1", &epoch, &hex(blob), &len])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        Ok(Self { child, lines })
    }

    fn wait_for(&mut self, wanted: &str) -> Result<()> {
        for line in self.lines.by_ref() {
            let line = line?;
            if line == wanted {
                return Ok(());
            }
            ensure!(!line.starts_with("ended"), "the writer has {line}");
        }
        bail!("the writer has ended before it said `{wanted}`")
    }

    fn signal(&self, name: &str) -> Result<()> {
        super::run(&["kill", &format!("-{name}"), &self.child.id().to_string()]).map(drop)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! The kernel's host against our target, which is a process on the peer.

use super::{Connection, HOST_NQN, expect_all, kernels_target, run, write_all};
use crate::host::{Host, Need};
use crate::nvmeof::{Initiator, patient};
use crate::remote::Process;
use crate::runner::Test;
use anyhow::{Context as _, Result, bail, ensure};
use std::process::{Command, Stdio};
use std::time::Duration;
use te_fabric::testkit::bytes_of;
use te_nvmeof::Config;

const NEEDS: &[Need] = &[Need::Nvmeof, Need::Peer, Need::Program("nvme"), Need::Program("fio")];

const LONG: &[Need] = &[Need::Long, Need::Nvmeof, Need::Peer, Need::Program("nvme"), Need::Program("fio")];

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "the_kernels_nvme_host_verifies_every_byte_of_our_target",
        needs: NEEDS,
        run: |host| verified_by_fio(host, &[]),
    },
    Test {
        name: "the_kernels_nvme_host_verifies_every_byte_of_our_target_with_digests_and_one_short_queue",
        needs: LONG,
        run: |host| {
            verified_by_fio(host, &["--hdr-digest", "--data-digest"])?;
            verified_by_fio(host, &["--nr-io-queues=1", "--queue-size=16"])
        },
    },
    Test {
        name: "our_nvme_initiator_and_the_kernels_read_each_others_bytes_on_our_target",
        needs: NEEDS,
        run: each_others_bytes,
    },
    Test { name: "the_kernels_nvme_discovery_finds_our_subsystem", needs: NEEDS, run: discovered },
    Test { name: "the_kernels_nvme_host_goes_on_after_resets", needs: NEEDS, run: goes_on_after_resets },
    Test {
        name: "the_kernels_nvme_host_goes_on_after_our_target_was_stopped",
        needs: LONG,
        run: goes_on_after_a_stop,
    },
];

/// The memory that our target serves.
const BYTES: u64 = 32 << 20;
/// What fio writes and verifies of it.
const FIO_BYTES: &str = "24m";
const PORT: u16 = 4430;
const MIB: usize = 1 << 20;

/// Our target on the peer, at its address on the rail.
struct Ours {
    process: Process,
    address: String,
    nqn: String,
    export: Vec<u8>,
    pid: String,
}

impl Ours {
    fn start(host: &Host) -> Result<Self> {
        let address = kernels_target(host)?.0.ip().to_string();
        let listen = format!("{address}:{PORT}");
        let bytes = BYTES.to_string();
        let mut process = host.peer()?.start(&["self", "helper", "nvmeof", "serve", &listen, &bytes])?;
        let ready = process.receive()?;
        let words: Vec<&str> = ready.split_whitespace().collect();
        let ["ready", nqn, export, pid] = words[..] else {
            bail!("the target printed `{ready}` at its start")
        };
        let (nqn, export, pid) = (nqn.to_owned(), bytes_of(export), pid.to_owned());
        Ok(Self { process, address, nqn, export, pid })
    }

    fn connect(&self, options: &[&str]) -> Result<Connection> {
        Connection::open("tcp", &self.address, &PORT.to_string(), &self.nqn, options)
    }

    /// Compares the target's memory with the pattern of `seed`.
    fn check(&mut self, seed: u64, offset: u64, len: usize) -> Result<()> {
        let answer = self.process.request(&format!("check {seed} {offset} {len}"))?;
        ensure!(answer == "ok", "the target's memory: {answer}");
        Ok(())
    }
}

/// fio's arguments for a device: it writes with checksums, and reads all of it back.
fn fio(device: &str, options: &[&str]) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=v", "--direct=1", "--verify=crc32c", "--verify_fatal=1", "--ioengine=libaio"]);
    command.args(["--bsrange=4k-256k", "--iodepth=16", "--minimal", "--randrepeat=0"]);
    command.arg("--verify_state_save=0");
    command.arg(format!("--size={FIO_BYTES}")).arg(format!("--filename={device}")).args(options);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn succeeded(child: std::process::Child) -> Result<()> {
    let output = child.wait_with_output().context("fio")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && errors.is_empty(), "fio: {}\n{text}{errors}", output.status);
    Ok(())
}

/// Lines of the kernel's log.
fn kernel_log() -> Result<Vec<String>> {
    Ok(run(&["dmesg"])?.lines().map(str::to_owned).collect())
}

/// Lines that the kernel has logged since, about NVMe, that complain.
fn complaints(before: &[String]) -> Result<Vec<String>> {
    const SIGNS: [&str; 9] =
        ["error", "fail", "timeout", "invalid", "unexpected", "mismatch", "bogus", "warn", "BUG"];
    let is_new = |line: &&String| !before.contains(line) && line.to_lowercase().contains("nvme");
    let bad = |line: &&String| SIGNS.iter().any(|sign| line.to_lowercase().contains(&sign.to_lowercase()));
    Ok(kernel_log()?.iter().filter(is_new).filter(bad).cloned().collect())
}

fn verified_by_fio(host: &Host, options: &[&str]) -> Result<()> {
    let before = kernel_log()?;
    let mut ours = Ours::start(host)?;
    let kernels = ours.connect(options)?;
    let device = kernels.device.display().to_string();
    succeeded(fio(&device, &["--rw=randrw"]).spawn().context("fio")?)?;
    write_all(&kernels.device, 5, 4 * MIB, 0)?;
    expect_all(&kernels.device, 5, 4 * MIB, 0)?;
    kernels.close()?;
    ours.check(5, 0, 4 * MIB)?;
    let found = complaints(&before)?;
    ensure!(found.is_empty(), "the kernel complains: {found:#?}");
    let stats = ours.process.request("stats")?;
    ensure!(
        stats.contains(" corrupt: 0,") && stats.contains(" protocol_errors: 0 "),
        "our target counts {stats}"
    );
    println!(
        "    {}fio verified {FIO_BYTES} of our target, options {options:?}, no complaint of the kernel",
        host.label()
    );
    ours.process.kill()
}

fn each_others_bytes(host: &Host) -> Result<()> {
    let mut ours = Ours::start(host)?;
    let mut initiator = Initiator::open(Config { queues: 4, ..patient() }, MIB)?;
    initiator.attach(&ours.export)?;
    let kernels = ours.connect(&[])?;
    for round in 0..4_u64 {
        let at = round * MIB as u64;
        initiator.write(round, at, MIB as u32)?;
        expect_all(&kernels.device, round, MIB, at).context("written by ours")?;
        write_all(&kernels.device, round + 100, MIB, at)?;
        ours.check(round + 100, at, MIB)?;
        initiator.expect(round + 100, at, MIB as u32).context("written by the kernel's")?;
    }
    kernels.close()?;
    println!("    {}4 MiB written by each host and read by the other, 0 wrong bytes", host.label());
    ours.process.kill()
}

fn discovered(host: &Host) -> Result<()> {
    let ours = Ours::start(host)?;
    let port = PORT.to_string();
    let words = ["nvme", "discover", "-t", "tcp", "-a", &ours.address, "-s", &port, "--hostnqn", HOST_NQN];
    let text = run(&words)?;
    let has = |what: &str| text.lines().any(|line| line.ends_with(what));
    ensure!(
        has(&ours.nqn) && has(&ours.address) && has(&port) && has("tcp"),
        "nvme discover does not show our subsystem {}:\n{text}",
        ours.nqn
    );
    println!("    {}nvme discover shows {}", host.label(), ours.nqn);
    ours.process.kill()
}

fn goes_on_after_resets(host: &Host) -> Result<()> {
    let ours = Ours::start(host)?;
    let kernels = ours.connect(&[])?;
    let device = kernels.device.display().to_string();
    let mut child = fio(&device, &["--rw=randwrite", "--time_based", "--runtime=10"]).spawn()?;
    let mut resets = 0;
    while child.try_wait()?.is_none() {
        run(&["nvme", "reset", &kernels.controller.display().to_string()])?;
        resets += 1;
        std::thread::sleep(Duration::from_secs(2));
    }
    succeeded(child)?;
    ensure!(resets > 1, "fio ended after {resets} resets");
    kernels.close()?;
    println!("    {}fio went on through {resets} resets, 0 wrong bytes", host.label());
    ours.process.kill()
}

/// Our target does not run for twice the keep-alive timeout. The kernel's host reconnects by itself.
fn goes_on_after_a_stop(host: &Host) -> Result<()> {
    let mut ours = Ours::start(host)?;
    let kernels = ours.connect(&["--keep-alive-tmo=2", "--reconnect-delay=1", "--ctrl-loss-tmo=60"])?;
    let device = kernels.device.display().to_string();
    let mut child = fio(&device, &["--rw=randwrite", "--time_based", "--runtime=12"]).spawn()?;
    std::thread::sleep(Duration::from_secs(2));
    host.peer()?.run(&["kill", "-STOP", &ours.pid])?;
    std::thread::sleep(Duration::from_secs(4));
    ensure!(child.try_wait()?.is_none(), "fio ended while our target was stopped");
    host.peer()?.run(&["kill", "-CONT", &ours.pid])?;
    succeeded(child)?;
    kernels.close()?;
    let stats = ours.process.request("stats")?;
    println!("    {}fio went on after our target was stopped for 4 s, 0 wrong bytes", host.label());
    println!("      {stats}");
    ours.process.kill()
}

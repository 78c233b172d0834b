//! NVMe over Fabrics: the kernel's initiator and target against each other and against ours.
//!
//! ```text
//!   guest a                                guest b
//!   our initiator ───────────────────────▶ nvmet      initiator, faults, late
//!   the kernel's host ───────────────────▶ our target target
//!   the kernel's host ───────────────────▶ nvmet      this file
//!   a node and a client of a store ──────▶ nvmet      store
//! ```

mod faults;
mod initiator;
mod late;
mod store;
mod target;

use super::run;
use crate::host::{Host, Need, NvmeofTarget};
use crate::nvmeof::{read_direct, same, write_direct};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use te_core::testkit::pattern;

/// The tests of every file here.
pub(super) fn tests() -> impl Iterator<Item = &'static Test> {
    [TESTS, initiator::TESTS, target::TESTS, faults::TESTS, late::TESTS, store::TESTS].into_iter().flatten()
}

const TESTS: &[Test] = &[Test {
    name: "an_nvme_namespace_connects_and_reads_back_what_was_written",
    needs: &[Need::Nvmeof, Need::Program("nvme")],
    run: |host| host.nvmeof.iter().try_for_each(|target| write_and_read_back(host, target)),
}];

const BYTES: usize = 4 << 20;
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:5e0f2a4c-77e1-4b10-8a77-1ab000000001";
const PATIENCE: Duration = Duration::from_secs(60);

fn write_and_read_back(host: &Host, target: &NvmeofTarget) -> Result<()> {
    let NvmeofTarget { transport, address, port, nqn } = target;
    let connection = Connection::open(transport, address, port, nqn, &[])?;
    write_all(&connection.device, process_seed(), BYTES, 0)
        .and_then(|()| expect_all(&connection.device, process_seed(), BYTES, 0))
        .with_context(|| format!("{nqn} over {transport}"))?;
    connection.close()?;
    println!("    {}{} MiB over NVMe/{transport} to {address}:{port}, verified", host.label(), BYTES >> 20);
    Ok(())
}

fn process_seed() -> u64 {
    std::process::id().into()
}

/// The kernel's host, connected to a subsystem. Dropping the value disconnects it.
struct Connection {
    nqn: String,
    /// The block device of namespace 1.
    device: PathBuf,
    /// The controller: `/dev/nvme0`.
    controller: PathBuf,
}

impl Connection {
    fn open(transport: &str, address: &str, port: &str, nqn: &str, options: &[&str]) -> Result<Self> {
        let words =
            ["nvme", "connect", "-t", transport, "-a", address, "-s", port, "-n", nqn, "--hostnqn", HOST_NQN];
        run(&[&words[..], options].concat())?;
        let mut connection = Self { nqn: nqn.to_owned(), device: PathBuf::new(), controller: PathBuf::new() };
        (connection.controller, connection.device) = namespace(nqn, transport)?;
        Ok(connection)
    }

    fn close(self) -> Result<()> {
        let nqn = self.nqn.clone();
        std::mem::forget(self);
        run(&["nvme", "disconnect", "-n", &nqn]).map(drop)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // The test has failed already.
        let _ = run(&["nvme", "disconnect", "-n", &self.nqn]);
    }
}

/// Writes the pattern of `seed` to a block device.
fn write_all(device: &Path, seed: u64, bytes: usize, offset: u64) -> Result<()> {
    let device = device.display().to_string();
    write_direct(&device, offset, &pattern(seed, bytes)).context("the kernel's write")
}

/// Reads a block device, and compares with the pattern of `seed`.
fn expect_all(device: &Path, seed: u64, bytes: usize, offset: u64) -> Result<()> {
    let found = read_direct(&device.display().to_string(), offset, bytes).context("the kernel's read")?;
    same(&found, seed).context("the bytes that the kernel's host reads")
}

/// The controller of the subsystem, and the block device of its namespace 1.
fn namespace(nqn: &str, transport: &str) -> Result<(PathBuf, PathBuf)> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        for controller in fs::read_dir("/sys/class/nvme").into_iter().flatten().flatten() {
            let is = |file: &str, value: &str| {
                fs::read_to_string(controller.path().join(file)).is_ok_and(|text| text.trim() == value)
            };
            if !is("subsysnqn", nqn) || !is("transport", transport) {
                continue;
            }
            // nvme0 has namespaces nvme0n1, or nvme0c0n1 with a shared node nvme0n1 above it.
            for entry in fs::read_dir(controller.path())?.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let Some((_, "1")) = name.rsplit_once('n').filter(|_| name.starts_with("nvme")) else {
                    continue;
                };
                let instance = name.trim_start_matches("nvme").split(['c', 'n']).next().unwrap_or_default();
                let device = Path::new("/dev").join(format!("nvme{instance}n1"));
                if device.exists() {
                    return Ok((Path::new("/dev").join(controller.file_name()), device));
                }
            }
        }
        ensure!(Instant::now() < give_up, "no block device of {nqn} appears within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Where the kernel's target listens over TCP, and its subsystem: the first target of the list.
fn kernels_target(host: &Host) -> Result<(SocketAddr, String)> {
    let tcp = host.nvmeof.iter().find(|target| target.transport == "tcp");
    let NvmeofTarget { address, port, nqn, .. } = tcp.context("HW_TESTS_NVMEOF names no target over TCP")?;
    Ok((SocketAddr::new(address.parse()?, port.parse()?), nqn.clone()))
}

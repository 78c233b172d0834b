//! NVMe over Fabrics through the kernel's initiator.

use super::run;
use crate::host::{Host, Need, NvmeofTarget};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use te_core::testkit::pattern;

pub(super) const TESTS: &[Test] = &[Test {
    name: "a_namespace_connects_and_reads_back_what_was_written",
    needs: &[Need::Nvmeof, Need::Program("nvme")],
    run: |host| host.nvmeof.iter().try_for_each(|target| write_and_read_back(host, target)),
}];

const BYTES: usize = 4 << 20;
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:5e0f2a4c-77e1-4b10-8a77-1ab000000001";
const PATIENCE: Duration = Duration::from_secs(60);

fn write_and_read_back(host: &Host, target: &NvmeofTarget) -> Result<()> {
    let NvmeofTarget { transport, address, port, nqn } = target;
    run(&["nvme", "connect", "-t", transport, "-a", address, "-s", port, "-n", nqn, "--hostnqn", HOST_NQN])?;
    let verified = namespace(nqn, transport).and_then(|device| verify(&device));
    let disconnected = run(&["nvme", "disconnect", "-n", nqn]);
    verified.with_context(|| format!("{nqn} over {transport}"))?;
    disconnected?;
    println!("    {}{} MiB over NVMe/{transport} to {address}, verified", host.label(), BYTES >> 20);
    Ok(())
}

fn verify(device: &Path) -> Result<()> {
    let file = File::options().read(true).write(true).open(device)?;
    let content = pattern(std::process::id().into(), BYTES);
    file.write_all_at(&content, 0)?;
    file.sync_all()?;
    // The bytes shall come from the target, not from this machine's page cache.
    fs::write("/proc/sys/vm/drop_caches", "3").context("cannot drop the page cache")?;
    let mut back = vec![0; BYTES];
    file.read_exact_at(&mut back, 0)?;
    ensure!(back == content, "the bytes read differ from the bytes written");
    Ok(())
}

/// The block device of the subsystem's first namespace.
fn namespace(nqn: &str, transport: &str) -> Result<PathBuf> {
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
                let Some((_, number)) = name.rsplit_once('n').filter(|_| name.starts_with("nvme")) else {
                    continue;
                };
                let instance = name.trim_start_matches("nvme").split(['c', 'n']).next().unwrap_or_default();
                let device = Path::new("/dev").join(format!("nvme{instance}n{number}"));
                if !number.is_empty() && device.exists() {
                    return Ok(device);
                }
            }
        }
        ensure!(Instant::now() < give_up, "no block device of {nqn} appears within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

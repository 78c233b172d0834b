//! CXL memory as device-DAX: mapped, written, read back, and read by another host of the same pool.

use crate::host::{Host, Need};
use crate::runner::Test;
use crate::sys::DevDax;
use anyhow::{Context as _, Result, ensure};
use std::path::PathBuf;
use te_core::testkit::pattern;

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
        peer.run(&["self", "helper", "cxl", "write", &theirs.display().to_string(), &seed_text, &bytes])?;
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

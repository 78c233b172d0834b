//! Device-DAX memory of one host as a pool of ours, and memory that the kernel reports as damaged.

use crate::cxl::{Guest, Owner};
use crate::host::{Host, Need};
use crate::runner::Test;
use crate::sys;
use anyhow::{Context as _, Result, ensure};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use te_core::{ErrorKind, Op, Outcome};
use te_cxl::{FormatOptions, Pool, Seat};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "a_cxl_pool_on_a_devdax_device_is_written_and_read_back",
        needs: &[Need::Dax],
        run: written_and_read_back,
    },
    Test {
        name: "a_read_of_a_damaged_page_of_a_cxl_pool_is_corrupt_and_the_process_lives",
        needs: &[Need::Poison],
        run: damaged_page,
    },
    Test {
        name: "a_process_survives_that_a_page_of_its_cxl_pool_on_devdax_is_damaged",
        needs: &[Need::Dax, Need::Poison],
        run: damaged_devdax,
    },
];

const MIB: u32 = 1 << 20;
/// The page that is damaged, in the region.
const DAMAGED: u64 = 512 << 10;

fn dax(host: &Host) -> Result<&Path> {
    host.dax.as_deref().context("the test uses a devdax device without declaring Need::Dax")
}

fn force() -> FormatOptions {
    FormatOptions { force: true, ..FormatOptions::default() }
}

fn written_and_read_back(host: &Host) -> Result<()> {
    let path = dax(host)?;
    Pool::format(path, force())?;
    let mut owner = Owner::open(path)?;
    owner.claim(0, 1)?;
    let (_, blob) = owner.export(0, u64::from(2 * MIB))?;
    let mut guest = Guest::open(path, Seat { slot: 0, epoch: 1 }, 2 * MIB as usize)?;
    let id = guest.attach(&blob)?;
    for (seed, len) in [64, 4_096, 64 << 10, MIB, 2 * MIB].into_iter().enumerate() {
        guest.write(seed as u64, id, 0, len)?;
        guest.expect(seed as u64, id, 0, len)?;
        let found = sys::peek(&owner.pool, owner.part(0, len.into())?)?;
        crate::nvmeof::same(&found, seed as u64).context("what the owner sees")?;
    }
    println!("    {}64 B to 2 MiB of {} written and read back", host.label(), path.display());
    Ok(())
}

/// A file in a tmpfs: the kernel takes the page out of the mappings, and the next access is a SIGBUS.
struct Shared(PathBuf);

impl Shared {
    fn new() -> Result<Self> {
        let path = PathBuf::from(format!("/dev/shm/snowskin-pool-{}", std::process::id()));
        File::create(&path)?.set_len(16 << 20)?;
        Ok(Self(path))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // It is in memory, and nobody else knows its name.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn damaged_page(host: &Host) -> Result<()> {
    let file = Shared::new()?;
    Pool::format(&file.0, FormatOptions::default())?;
    let mut owner = Owner::open(&file.0)?;
    owner.claim(0, 1)?;
    let (_, blob) = owner.export(0, u64::from(2 * MIB))?;
    let mut guest = Guest::open(&file.0, Seat { slot: 0, epoch: 1 }, 2 * MIB as usize)?;
    let id = guest.attach(&blob)?;
    guest.write(1, id, 0, MIB)?;
    guest.expect(1, id, 0, MIB)?;
    // Another region of the pool, in another granule of 2 MiB.
    let mut second = Owner::open(&file.0)?;
    second.claim(1, 1)?;
    let (_, blob) = second.export(0, u64::from(MIB))?;
    let neighbour = guest.attach(&blob)?;
    guest.write(2, neighbour, 0, MIB)?;
    sys::poison(owner.part(DAMAGED, 4_096)?)?;
    for (op, wanted) in [(Op::Read, Outcome::NotApplied), (Op::Write, Outcome::NotApplied)] {
        let ended = guest.run(op, id, 0, MIB)?;
        let kind = ended.result.err().map(|error| error.kind);
        ensure!(kind == Some(ErrorKind::Corrupt), "{op:?} of a damaged page: {kind:?}");
        ensure!(ended.outcome == wanted, "{op:?} of a damaged page: {:?}", ended.outcome);
    }
    guest.expect(2, neighbour, 0, MIB).context("a neighbour")?;
    println!(
        "    {}a damaged page of a tmpfs: Corrupt, its neighbours are whole, the process lives",
        host.label()
    );
    Ok(())
}

fn damaged_devdax(host: &Host) -> Result<()> {
    let path = dax(host)?;
    Pool::format(path, force())?;
    let mut owner = Owner::open(path)?;
    owner.claim(0, 1)?;
    let (_, blob) = owner.export(0, u64::from(2 * MIB))?;
    let mut guest = Guest::open(path, Seat { slot: 0, epoch: 1 }, 2 * MIB as usize)?;
    let id = guest.attach(&blob)?;
    guest.write(1, id, 0, MIB)?;
    for round in 0..3_u64 {
        // Another process reports it: the kernel sends SIGBUS to all that map the page.
        let at = (DAMAGED + round * 4_096).to_string();
        let epoch = (10 + round).to_string();
        let reporter = Command::new(std::env::current_exe()?)
            .args(["helper", "cxl", "poison", &path.display().to_string(), "5", &epoch, &at])
            .output()?;
        println!(
            "      round {round}: the reporter ends with {}, {}{}",
            reporter.status,
            String::from_utf8_lossy(&reporter.stdout).trim(),
            String::from_utf8_lossy(&reporter.stderr).trim()
        );
    }
    let ended = guest.run(Op::Read, id, 0, MIB)?;
    println!("      after reports elsewhere in the pool: {:?}", ended.result);
    Ok(())
}

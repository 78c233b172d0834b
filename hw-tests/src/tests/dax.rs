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
        // It is in memory, and only this test knows its name.
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

/// With `vm.memory_failure_early_kill`, the kernel sends SIGBUS to each process that has mapped a damaged
/// page, whether it touches the page or not: more than one such signal is survived, and the memory is not
/// used any more.
fn damaged_devdax(host: &Host) -> Result<()> {
    const EXTENTS: u32 = 3;
    let path = dax(host)?;
    let block = Pool::format(path, force())?;
    let mut guest = Guest::open(path, Seat { slot: 0, epoch: 1 }, 2 * MIB as usize)?;
    let (mut owners, mut regions) = (Vec::new(), Vec::new());
    for extent in 0..EXTENTS + 1 {
        let mut owner = Owner::open(path)?;
        owner.claim(extent, 1)?;
        let id = guest.attach(&owner.export(0, u64::from(2 * MIB))?.1)?;
        // The kernel reports to a process what is in its page tables.
        guest.write(extent.into(), id, 0, 2 * MIB)?;
        owners.push(owner);
        regions.push(id);
    }
    std::fs::write("/proc/sys/vm/memory_failure_early_kill", "1")?;
    let before = super::run(&["dmesg"])?.lines().count();
    for extent in 0..EXTENTS {
        let at = (block.extent_at(extent) + DAMAGED).to_string();
        let device = path.display().to_string();
        // It may be killed by its own report.
        Command::new(std::env::current_exe()?).args(["helper", "cxl", "poison", &device, &at]).output()?;
    }
    let log = super::run(&["dmesg"])?;
    let us = format!("hw-tests:{} ", std::process::id());
    let signals = log.lines().skip(before).filter(|line| line.contains("Sending SIGBUS"));
    let ours = signals.filter(|line| line.contains(&us)).count();
    ensure!(ours > 1, "the kernel has sent {ours} signals to this process: the test proves nothing");
    for (id, op) in regions.iter().take(EXTENTS as usize).flat_map(|id| [(*id, Op::Read), (*id, Op::Write)]) {
        let ended = guest.run(op, id, 0, MIB)?;
        let kind = ended.result.err().map(|error| error.kind);
        ensure!(kind == Some(ErrorKind::Corrupt), "{op:?} of memory that was reported as damaged: {kind:?}");
    }
    guest.expect(EXTENTS.into(), regions[EXTENTS as usize], 0, 2 * MIB).context("a neighbour")?;
    println!(
        "    {}{EXTENTS} pages of {} were reported as damaged: {ours} SIGBUS survived, Corrupt from then on",
        host.label(),
        path.display()
    );
    Ok(())
}

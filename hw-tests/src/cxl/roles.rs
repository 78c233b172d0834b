//! `helper cxl own`, `write` and `poison`: processes that a test starts, stops and kills.

use super::{Guest, Owner};
use crate::helper::print_line;
use crate::sys;
use anyhow::{Context as _, Result, bail};
use std::io::BufRead as _;
use std::path::Path;
use te_core::testkit::pattern;
use te_core::{Op, RegionId};
use te_cxl::Seat;
use te_fabric::testkit::{bytes_of, hex};

/// An owner. It prints `ready` and answers `claim EXTENT EPOCH`, `export OFFSET LEN` (with
/// `export NUMBER HEX`), `deregister NUMBER`, `fill SEED OFFSET LEN` and `check SEED OFFSET LEN`: with `ok`,
/// or with what is wrong.
///
/// # Errors
/// When the pool cannot be opened, or with a malformed command.
pub(crate) fn own(path: &str) -> Result<()> {
    let mut owner = Owner::open(Path::new(path))?;
    let mut regions: Vec<RegionId> = Vec::new();
    print_line("ready")?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        print_line(&match words[..] {
            ["claim", extent, epoch] => match owner.claim(extent.parse()?, epoch.parse()?) {
                Ok(_) => "ok".to_owned(),
                Err(error) => format!("refused: {error}"),
            },
            ["export", at, len] => {
                let (id, blob) = owner.export(at.parse()?, len.parse()?)?;
                regions.push(id);
                format!("export {} {}", regions.len() - 1, hex(&blob))
            }
            ["deregister", number] => {
                let id = regions.get(number.parse::<usize>()?).context("no such region")?;
                owner.deregister(*id).map_or_else(|error| format!("{:?}", error.kind), |()| "ok".to_owned())
            }
            ["fill", seed, at, len] => {
                let part = owner.part(at.parse()?, len.parse()?)?;
                sys::poke(&owner.pool, part, &pattern(seed.parse()?, part.len()))?;
                "ok".to_owned()
            }
            ["check", seed, at, len] => {
                let found = sys::peek(&owner.pool, owner.part(at.parse()?, len.parse()?)?)?;
                let same = crate::nvmeof::same(&found, seed.parse()?);
                same.map_or_else(|error| format!("{error:#}"), |()| "ok".to_owned())
            }
            _ => bail!("`{line}` is not a command"),
        })?;
    }
    Ok(())
}

/// A peer that writes `len` bytes of a region without end. It prints `round N` after each write, and
/// `ended KIND` when one has failed.
///
/// # Errors
/// When the region cannot be attached.
pub(crate) fn write(path: &str, slot: &str, epoch: &str, blob: &str, len: &str) -> Result<()> {
    let seat = Seat { slot: slot.parse()?, epoch: epoch.parse()? };
    let len: u32 = len.parse()?;
    let mut guest = Guest::open(Path::new(path), seat, len as usize)?;
    let id = guest.attach(&bytes_of(blob))?;
    guest.memory.write(&pattern(seat.epoch, len as usize));
    for round in 0_u64.. {
        match guest.run(Op::Write, id, 0, len)?.result {
            Ok(()) => print_line(&format!("round {round}"))?,
            Err(error) => return print_line(&format!("ended {:?}", error.kind)),
        }
    }
    Ok(())
}

/// Has the kernel treat a page of a device as damaged: that of byte `at`. The kernel sends SIGBUS to all
/// processes that have mapped it, this one first.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn poison(path: &str, at: &str) -> Result<()> {
    const PAGE: usize = 4_096;
    let at: usize = at.parse()?;
    let device = sys::DevDax::open(Path::new(path), at + PAGE)?;
    let page = device.span().part(at as u64, PAGE as u64)?;
    print_line("poisoning")?;
    sys::poison(page)
}

//! `helper nvmeof write-read` and `helper nvmeof load`: our initiator in a process of its own.

use super::{Initiator, config, find, patient};
use crate::helper::print_line;
use anyhow::{Context as _, Result, ensure};
use std::io::BufRead as _;
use std::net::SocketAddr;
use std::time::Instant;
use te_nvmeof::Config;

/// Sizes of slices, from one granule up.
const SIZES: [u32; 7] = [4 << 10, 16 << 10, 64 << 10, 68 << 10, 1 << 20, 4 << 20, 16 << 20];
/// The range that is adopted, bytes.
const RANGE: u64 = 24 << 20;

/// Adopts the first 24 MiB of a namespace, writes and reads back slices of 4 KiB to 16 MiB, and compares.
///
/// # Errors
/// When the namespace cannot be adopted, or a byte differs.
pub(crate) fn write_read(address: &str, port: &str, nqn: &str, nsid: &str) -> Result<()> {
    let address = SocketAddr::new(address.parse()?, port.parse()?);
    let namespace = find(address, nqn, nsid.parse()?)?;
    let mut initiator = Initiator::open(Config { queues: 4, ..patient() }, 16 << 20)?;
    initiator.adopt(&namespace, 0..RANGE)?;
    for (seed, len) in SIZES.into_iter().enumerate() {
        let began = Instant::now();
        initiator.write(seed as u64, 4_096, len)?;
        initiator.expect(seed as u64, 4_096, len)?;
        print_line(&format!(
            "{} KiB written and read back, every byte, in {:.2} s",
            len >> 10,
            began.elapsed().as_secs_f64()
        ))?;
    }
    let stats = initiator.node.transport.stats();
    ensure!(stats.corrupt == 0 && stats.protocol_errors == 0, "{stats:?}");
    Ok(())
}

/// A process that a test stops: with the export of an adopted range, it writes and reads back 64 KiB without
/// end, and prints `round N` after each; an error is printed as `error N KIND`, and the slice is repeated
/// behind a fence. It ends with its stdin.
///
/// # Errors
/// When the range cannot be attached, or a byte differs.
pub(crate) fn stoppable(blob: &str) -> Result<()> {
    const LEN: u32 = 64 << 10;
    let mut initiator = Initiator::open(config(), LEN as usize)?;
    initiator.attach(&te_fabric::testkit::bytes_of(blob))?;
    let (sender, ended) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().map_while(Result::ok).for_each(drop);
        drop(sender);
    });
    for round in 0_u64.. {
        if ended.try_recv() == Err(std::sync::mpsc::TryRecvError::Disconnected) {
            break;
        }
        let result = initiator.write(round, 0, LEN).and_then(|()| initiator.expect(round, 0, LEN));
        let Err(error) = result else {
            print_line(&format!("round {round}"))?;
            continue;
        };
        // Wrong bytes are no `te_core::Error`.
        let kind = error.downcast_ref::<te_core::Error>().map(|error| error.kind);
        let Some(kind) = kind else { return Err(error) };
        print_line(&format!("error {round} {kind:?}"))?;
        let fence = initiator.fence()?;
        initiator.ended(fence)?.result.context("the fence")?;
    }
    print_line(&format!("stats {:?}", initiator.node.transport.stats()))
}

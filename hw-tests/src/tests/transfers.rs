//! Transfers of the engine between two machines.

use super::verbs::packets;
use crate::content::{fill, first_difference};
use crate::engines;
use crate::host::{Host, Need};
use crate::load::{Ends, rail_bytes};
use crate::runner::Test;
use anyhow::{Context as _, Result, bail, ensure};
use std::time::{Duration, Instant};
use te_core::{Access, Op};
use te_engine::{TransferEngine, TransferRequest};

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "the_engine_writes_and_reads_back_64_mib_over_tcp",
        needs: &[Need::Rdma, Need::Peer],
        run: |host| write_and_read_back(host, "tcp").map(drop),
    },
    Test {
        name: "the_engine_writes_and_reads_back_64_mib_over_every_rail_and_the_devices_count_them",
        needs: &[Need::Rails(2), Need::Peer],
        run: over_every_rail,
    },
];

/// Bytes that are moved in each direction.
const BYTES: u64 = 64 << 20;
/// Bytes in one request.
const REQUEST_BYTES: u64 = 4 << 20;
/// Much longer than 64 MiB take even where every device is emulated.
const PATIENCE: Duration = Duration::from_secs(120);
/// The target's control port.
const PORT: u16 = 17077;

/// The addresses of the two engines. For TCP they are those of the first pair of rails; for RDMA the
/// listeners of the engines and the control connections are on the management network, which no test breaks.
pub(super) fn ends(host: &Host, fabric: &'static str) -> Result<Ends> {
    let socket = |address, port| std::net::SocketAddr::new(address, port).to_string();
    if fabric.starts_with("rdma") {
        let (ours, theirs) = host.peer()?.management();
        let transfer_max = Duration::from_secs(15);
        return Ok(Ends { fabric, ours: socket(ours, 0), theirs: socket(theirs, PORT), transfer_max });
    }
    let joined = host.joined_rails()?;
    let (ours, theirs) = joined.first().context("no rail is joined to one of the peer's")?;
    let (_, ours) = ours.address().context("this machine's rail has no address")?;
    let (_, theirs) = theirs.address().context("the peer's rail has no address")?;
    let transfer_max = Duration::from_secs(2);
    Ok(Ends { fabric, ours: socket(ours, 0), theirs: socket(theirs, PORT), transfer_max })
}

/// The devices' own packet counters confirm the engine's counters per rail.
fn over_every_rail(host: &Host) -> Result<()> {
    let rails: Vec<_> = host.joined_rails()?.into_iter().map(|(ours, _)| ours).collect();
    let before: Vec<_> = rails.iter().map(packets).collect();
    let engine = write_and_read_back(host, "rdma")?;
    let moved = rail_bytes(&engine);
    for (rail, before) in rails.iter().zip(before) {
        let name = format!("{}:{}", rail.device, rail.port);
        let bytes = moved.iter().find(|(device, _)| *device == name).map_or(0, |(_, bytes)| *bytes);
        let share = bytes as f64 / (2 * BYTES) as f64;
        println!("    {}{name}: {} MiB, {:.0} % of all", host.label(), bytes >> 20, share * 100.0);
        ensure!(share >= 0.1, "{name} moved only {bytes} bytes: equal rails share the work");
        if let (Some(before), Some(after)) = (before, packets(rail)) {
            // A packet carries at most 4096 bytes; the rest are acknowledgements, requests and repetitions.
            let (counted, least) = (after.0 - before.0 + after.1 - before.1, bytes / 4096);
            ensure!(
                counted >= least,
                "{name}: the device counts {counted} packets, {bytes} bytes need {least}"
            );
            println!(
                "    {}{name}: the device counts {counted} packets, the bytes need {least}",
                host.label()
            );
        }
    }
    Ok(())
}

/// Writes, lets the target's process compare, reads back and compares. Returns the engine, for its counters.
fn write_and_read_back(host: &Host, fabric: &'static str) -> Result<TransferEngine> {
    let ends = ends(host, fabric)?;
    let bytes = BYTES.to_string();
    let mut target = host.peer()?.start(&["self", "helper", "target", fabric, &ends.theirs, &bytes])?;
    let ready = target.receive()?;
    let words: Vec<&str> = ready.split_whitespace().collect();
    let ["ready", name, addr] = words[..] else { bail!("the target printed `{ready}` at its start") };
    let addr: u64 = addr.parse()?;

    let engine = engines::start(fabric, &ends.ours)?;
    let local = engine.alloc_shared(BYTES as usize, Access::LOCAL)?;
    let segment = engine.open_segment(name)?;
    let requests = |op| -> Vec<TransferRequest> {
        (0..BYTES / REQUEST_BYTES)
            .map(|index| TransferRequest {
                op,
                local: (local.id(), index * REQUEST_BYTES).into(),
                segment,
                remote_addr: addr + index * REQUEST_BYTES,
                len: REQUEST_BYTES,
            })
            .collect()
    };
    fill(&local, 1, 0, BYTES as usize)?;
    let began = Instant::now();
    engine.submit(&requests(Op::Write), Some(PATIENCE))?.wait(None).context("the write")?;
    let answer = target.request(&format!("check 1 0 {BYTES}"))?;
    ensure!(answer == "ok", "the target's memory differs from the bytes written: {answer}");
    fill(&local, 2, 0, BYTES as usize)?;
    engine.submit(&requests(Op::Read), Some(PATIENCE))?.wait(None).context("the read")?;
    let difference = first_difference(&local, 1, 0, BYTES as usize)?;
    ensure!(
        difference.is_none(),
        "the bytes read differ from the bytes written, from offset {difference:?} on"
    );
    println!(
        "    {}{} MiB written and read over {fabric}, verified on both sides, in {:.1} s",
        host.label(),
        BYTES >> 20,
        began.elapsed().as_secs_f64()
    );
    Ok(engine)
}

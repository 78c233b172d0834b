//! Our initiator against the kernel's target.

use super::{Connection, expect_all, kernels_target, write_all};
use crate::host::{Host, Need};
use crate::nvmeof::{Initiator, find, patient};
use crate::runner::Test;
use anyhow::{Context as _, Result, ensure};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use te_nvmeof::Config;

pub(super) const TESTS: &[Test] = &[
    Test {
        name: "our_nvme_initiator_reads_back_what_it_wrote_whatever_the_settings",
        needs: &[Need::Nvmeof],
        run: every_setting,
    },
    Test {
        name: "our_nvme_initiator_and_the_kernels_read_each_others_bytes_on_the_kernels_target",
        needs: &[Need::Nvmeof, Need::Program("nvme")],
        run: each_others_bytes,
    },
    Test { name: "our_nvme_discovery_finds_the_kernels_subsystem", needs: &[Need::Nvmeof], run: discovered },
];

const KIB: u32 = 1 << 10;
const MIB: u32 = 1 << 20;
/// Slices of these sizes in every combination of settings.
const SIZES: [u32; 5] = [4 * KIB, 16 * KIB, 64 * KIB, 68 * KIB, MIB];
/// And in some of them, because emulated networks are slow.
const LONG: [u32; 2] = [4 * MIB, 16 * MIB];
/// The range that is adopted.
const RANGE: u64 = 24 << 20;
/// Slices that are in flight at the same time.
const TOGETHER: u64 = 32;

fn every_setting(host: &Host) -> Result<()> {
    let targets: Vec<_> = host.nvmeof.iter().filter(|target| target.transport == "tcp").collect();
    let (mut moved, mut combinations) = (0, 0);
    let began = Instant::now();
    for (at, target) in targets.iter().enumerate() {
        let address = SocketAddr::new(target.address.parse()?, target.port.parse()?);
        for (digests, queues) in [false, true].into_iter().flat_map(|on| [1, 4, 8].map(|count| (on, count))) {
            let config = Config {
                header_digest: digests,
                data_digest: digests,
                queues,
                in_capsule_bytes_max: if at == 0 { 16 * KIB } else { 64 * KIB },
                ..patient()
            };
            let long = if queues == 4 { &LONG[..] } else { &[] };
            let what = format!("{address}, digests {digests}, {queues} queues");
            moved += written_and_read(address, &target.nqn, config, long).context(what)?;
            combinations += 1;
        }
    }
    println!(
        "    {}{combinations} combinations of settings on {} ports, {} MiB moved, 0 wrong bytes, {:.1} s",
        host.label(),
        targets.len(),
        moved >> 20,
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Returns the bytes that were moved.
fn written_and_read(address: SocketAddr, nqn: &str, config: Config, long: &[u32]) -> Result<u64> {
    let namespace = find(address, nqn, 1)?;
    let in_capsule = config.in_capsule_bytes_max;
    let mut initiator = Initiator::open(config, 16 << 20)?;
    initiator.adopt(&namespace, 0..RANGE)?;
    for (seed, len) in SIZES.iter().chain(long).enumerate() {
        // Not always at the beginning of the range.
        let at = u64::from(seed as u32 * 4 * KIB);
        initiator.write(seed as u64, at, *len)?;
        initiator.expect(seed as u64, at, *len)?;
    }
    many_at_a_time(&mut initiator, in_capsule)?;
    let stats = initiator.node.transport.stats();
    ensure!(stats.corrupt == 0 && stats.protocol_errors == 0 && stats.failed == 0, "{stats:?}");
    ensure!(stats.associations == 1 && stats.associations_lost == 0, "{stats:?}");
    Ok(stats.bytes_read + stats.bytes_written)
}

/// Slices of all queues at the same time, some of which travel in capsules.
fn many_at_a_time(initiator: &mut Initiator, in_capsule: u32) -> Result<()> {
    let len = u64::from(in_capsule);
    let content = te_core::testkit::pattern(99, (len * TOGETHER) as usize);
    initiator.node.memory.set(0, &content);
    for op in [te_core::Op::Write, te_core::Op::Read] {
        if op == te_core::Op::Read {
            initiator.node.memory.set(0, &vec![0; content.len()]);
        }
        let mut tokens = Vec::new();
        for at in 0..TOGETHER {
            tokens.push(initiator.begin(op, at * len, at * len, in_capsule)?);
        }
        for token in tokens {
            initiator.ended(token)?.result.with_context(|| format!("one of {TOGETHER} slices, {op:?}"))?;
        }
    }
    ensure!(initiator.node.memory.get(0, content.len()) == content, "the bytes of {TOGETHER} slices differ");
    Ok(())
}

fn each_others_bytes(host: &Host) -> Result<()> {
    let (address, nqn) = kernels_target(host)?;
    let namespace = find(address, &nqn, 1)?;
    let mut initiator = Initiator::open(patient(), MIB as usize)?;
    initiator.adopt(&namespace, 0..RANGE)?;
    let (ip, port) = (address.ip().to_string(), address.port().to_string());
    let kernels = Connection::open("tcp", &ip, &port, &nqn, &[])?;
    // The range begins behind its superblock, which takes one granule.
    let behind = u64::from(initiator.node.transport.config().granule_bytes);
    for round in 0..4_u64 {
        let at = round * u64::from(MIB);
        initiator.write(round, at, MIB)?;
        expect_all(&kernels.device, round, MIB as usize, behind + at).context("written by ours")?;
        write_all(&kernels.device, round + 100, MIB as usize, behind + at)?;
        initiator.expect(round + 100, at, MIB).context("written by the kernel's")?;
    }
    kernels.close()?;
    println!("    {}4 MiB written by each host and read by the other, 0 wrong bytes", host.label());
    Ok(())
}

fn discovered(host: &Host) -> Result<()> {
    let (address, nqn) = kernels_target(host)?;
    let found = te_nvmeof::discover(address, Duration::from_secs(10))?;
    let is_it = |entry: &&te_nvmeof::identify::DiscoveryEntry| {
        entry.transport == 3
            && entry.nqn == nqn
            && entry.port == address.port().to_string()
            && entry.address == address.ip().to_string()
    };
    ensure!(found.iter().any(|entry| is_it(&entry)), "{address} and {nqn} are not in {found:?}");
    println!("    {}{} entries of the discovery log, ours among them: {nqn}", host.label(), found.len());
    Ok(())
}

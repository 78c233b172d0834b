//! A plan of faults for each seed: links that lose, delay and duplicate packets, queue pairs that fail, ports
//! that go down, control connections that break, cancels, while transfers run and every byte is checked.
//! Simulated devices, real control connections.
//!
//! A seed that fails is printed; `SNOWSKIN_SEED=n cargo test -p te-rdma --test faults` runs it alone.
//! Devices, links and the plan are determined by the seed. The time at which a byte of a control connection
//! arrives is not, because its sockets are real.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::{Net, REMOTE, config, slice, write};
use te_core::testkit::{Rng, each_seed, seeds};
use te_core::{Op, Outcome, RegionOffset, RemoteOffset, Slice, Token, Transport};
use te_rdma::Config;
use te_rdma::sim::LinkConfig;
use te_rdma::verbs::WcStatus;

const SEEDS: std::ops::Range<u64> = 0..500;
const ROUNDS: u64 = 5;
const BYTES: usize = 64 << 10;
const CELLS: usize = 24;
/// The last part of the region, which no slice writes.
const CANARY_BYTES: usize = 4 << 10;
const FAULTS: u64 = 10;

#[test]
fn no_wrong_byte_and_no_late_write_under_any_plan() {
    let mut seen = Seen::default();
    for seed in each_seed(SEEDS) {
        seen.add(&run(seed));
    }
    println!("{seen:?}");
    if seeds(SEEDS) == SEEDS {
        // Each of these has to occur, or the test proves nothing.
        let Seen { applied, unknown, not_applied, replays, fences, late, flushes } = seen;
        assert!(
            [applied, unknown, not_applied, replays, fences, late, flushes].iter().all(|&count| count > 0)
        );
    }
}

/// Counts over all plans.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    applied: u64,
    unknown: u64,
    not_applied: u64,
    replays: u64,
    fences: u64,
    /// WRITE packets that were executed after their sender had failed.
    late: u64,
    flushes: u64,
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.applied += other.applied;
        self.unknown += other.unknown;
        self.not_applied += other.not_applied;
        self.replays += other.replays;
        self.fences += other.fences;
        self.late += other.late;
        self.flushes += other.flushes;
    }
}

fn run(seed: u64) -> Seen {
    let mut rng = Rng::new(seed);
    let mut pick = |values: &[u32]| values[rng.index(values.len())];
    let config = Config {
        qps: pick(&[1, 2, 4]) as u8,
        qp_depth: pick(&[2, 8, 64]),
        sges: pick(&[1, 4]) as u8,
        signal_every: pick(&[1, 4, 16]) as u16,
        message_bytes_max: pick(&[1_024, 4_096, 1 << 20]),
        mtu_bytes_max: pick(&[512, 4_096]),
        registration_chunk_bytes: u64::from(pick(&[4_096, 1 << 20])),
        cancel_drain_ms: pick(&[0, 1, 20]),
        inline_bytes_max: pick(&[0, 128]),
        replays_max: pick(&[1, 8]) as u8,
        ..config()
    };
    let link = LinkConfig {
        latency_ns: u64::from(pick(&[1_000, 20_000, 100_000])),
        jitter_ns: u64::from(pick(&[0, 50_000])),
        loss_ppm: pick(&[0, 0, 5_000, 20_000]),
        duplicate_ppm: pick(&[0, 10_000]),
        hold_ppm: pick(&[0, 2_000, 20_000]),
        hold_ns: u64::from(pick(&[1_000_000, 10_000_000])),
        ..LinkConfig::CALM
    };
    let mut net = Net::new(seed);
    net.add(&config, BYTES);
    net.add(&config, BYTES);
    net.attach(0, REMOTE, 1, common::REGION);
    net.set_link(0, 1, link);
    let canary = vec![0xC5; CANARY_BYTES];
    net.nodes[1].memory.set((BYTES - CANARY_BYTES) as u64, &canary);
    let mut seen = Seen::default();
    let mut token = 1;
    for round in 0..ROUNDS {
        net.nodes[0].memory.paint((seed ^ round) as u8);
        net.nodes[1].memory.set(0, &common::pattern(!(seed ^ round) as u8, 7, BYTES - CANARY_BYTES));
        let before = [net.nodes[0].memory.get(0, BYTES), net.nodes[1].memory.get(0, BYTES)];
        let slices = slices(&mut rng, &mut token);
        let accepted = net.nodes[0].transport.submit(&slices).unwrap();
        assert_eq!(accepted, slices.len());
        disturb(&mut net, &mut rng, &slices, link);
        for slice in &slices {
            let end = net.finish(slice.token.0);
            check(&net, slice, &before, end.outcome);
            match end.outcome {
                Outcome::Applied => seen.applied += 1,
                Outcome::NotApplied => seen.not_applied += 1,
                Outcome::Unknown => seen.unknown += 1,
            }
        }
        fence(&mut net, &mut token);
        // Fenced: the range is used for something else, and is not written any more.
        net.nodes[1].memory.set(0, &[0x3C; BYTES - CANARY_BYTES]);
        net.linger(Duration::from_millis(if round == 0 { 25 } else { 1 }));
        let there = net.nodes[1].memory.get(0, BYTES - CANARY_BYTES);
        assert!(there.iter().all(|&byte| byte == 0x3C), "L5: a WRITE landed after its fence");
        assert_eq!(net.nodes[1].memory.get((BYTES - CANARY_BYTES) as u64, CANARY_BYTES), canary);
    }
    let stats = net.nodes[0].transport.stats();
    seen.replays = stats.replays;
    seen.fences = stats.fences;
    seen.flushes = stats.flushes;
    seen.late = net.fabric.counters().landed_late;
    assert_eq!(stats.quarantined_bytes, 0);
    assert_eq!(net.nodes[0].transport.slices_in_flight(), 0);
    seen
}

/// One slice per cell, at random offsets, READ or WRITE.
fn slices(rng: &mut Rng, token: &mut u64) -> Vec<Slice> {
    let cell = (BYTES - CANARY_BYTES) / CELLS;
    (0..CELLS)
        .map(|i| {
            let len = 1 + rng.index(cell - 1);
            let (local, remote) = (rng.index(cell - len + 1), rng.index(cell - len + 1));
            let op = if rng.chance_ppm(500_000) { Op::Read } else { Op::Write };
            *token += 1;
            slice(*token, op, (i * cell + local) as u64, (i * cell + remote) as u64, len as u32)
        })
        .collect()
}

/// Some faults while the slices run. Afterwards everything works again.
fn disturb(net: &mut Net, rng: &mut Rng, slices: &[Slice], link: LinkConfig) {
    for _ in 0..1 + rng.index(3) {
        for _ in 0..rng.index(80) {
            net.step();
        }
        let (here, there) = (net.ports[0], net.ports[1]);
        let time = Duration::from_micros(rng.below(4_000));
        match rng.below(FAULTS) {
            0 | 1 => {
                for slice in slices {
                    if rng.chance_ppm(400_000) {
                        let _done_or_not = net.nodes[0].transport.cancel(slice.token);
                    }
                }
            }
            2 => (0..64).for_each(|number| net.fabric.fail_qp(here, number)),
            3 => (0..64).for_each(|number| net.fabric.fail_qp(there, number)),
            4 => {
                net.set_link(0, 1, LinkConfig { down: true, ..link });
                net.linger(time);
                net.set_link(0, 1, link);
            }
            5 => {
                net.fabric.set_port_active(here, false);
                net.linger(time);
                net.fabric.set_port_active(here, true);
            }
            6 => net.nodes[1].transport.close_connections(),
            7 => {
                let statuses =
                    [WcStatus::Local, WcStatus::RemoteOperation, WcStatus::RetriesExceeded, WcStatus::Other];
                net.fabric.corrupt_status(here, rng.index(4) as u32, statuses[rng.index(statuses.len())]);
            }
            8 => net.fabric.linger_in_error(there, 3),
            _ => {
                net.stalled.push(1);
                net.linger(time);
                net.stalled.clear();
            }
        }
    }
}

fn check(net: &Net, slice: &Slice, before: &[Vec<u8>; 2], outcome: Outcome) {
    let len = slice.len as usize;
    let (local, remote) = (slice.local.offset, slice.remote.offset);
    let there = net.nodes[1].memory.get(remote, len);
    let old = &before[1][remote as usize..][..len];
    match (slice.op, outcome) {
        (_, Outcome::Applied) => assert_eq!(there, net.nodes[0].memory.get(local, len), "{slice:?}"),
        (Op::Read, _) | (_, Outcome::NotApplied) => assert_eq!(there, old, "{slice:?} changed the target"),
        (Op::Write, Outcome::Unknown) => {
            let new = &before[0][local as usize..][..len];
            let mixed = there.iter().zip(old).zip(new).all(|((byte, old), new)| byte == old || byte == new);
            assert!(mixed, "{slice:?} wrote bytes that were never sent");
        }
    }
}

/// Repeats a fence until the target has confirmed it.
fn fence(net: &mut Net, token: &mut u64) {
    for _ in 0..1_000 {
        *token += 1;
        net.nodes[0].transport.fence(Token(*token), REMOTE).unwrap();
        if net.finish(*token).outcome == Outcome::Applied {
            return;
        }
    }
    panic!("a thousand fences in a row failed although the target works");
}

#[test]
fn a_region_registered_while_the_port_is_down_is_usable_when_the_port_is_up() {
    use te_core::Memory;
    let mut net = Net::pair(&config(), 1 << 20);
    net.warm_up();
    let (ours, theirs) = (net.ports[0], net.ports[1]);
    for port in [ours, theirs] {
        net.fabric.set_port_active(port, false);
    }
    net.linger(Duration::from_millis(1));
    assert!(!net.nodes[0].transport.is_up() && !net.nodes[1].transport.is_up());
    let (late, remote) = (te_core::RegionId::new(1, 1), te_core::RemoteRegionId::new(1, 1));
    for node in &mut net.nodes {
        let span = node.memory.span();
        node.transport.deregister(common::REGION).unwrap();
        #[allow(unsafe_code, reason = "registers memory of its own")]
        // SAFETY: the block outlives the transport and is reached only by volatile copies.
        unsafe { node.transport.register(late, span, common::ALL) }.unwrap();
    }
    // The export is valid before the port is up.
    net.attach(0, remote, 1, late);
    for port in [ours, theirs] {
        net.fabric.set_port_active(port, true);
    }
    net.drive("the ports are up", |net| net.nodes.iter().all(|node| node.transport.is_up()));
    net.nodes[0].memory.paint(9);
    let slice = Slice {
        local: RegionOffset::new(late, 0),
        remote: RemoteOffset::new(remote, 0),
        ..write(1, 0, 0, 4_096)
    };
    net.transfer(&[slice]);
    assert!(net.nodes[1].memory.get(0, 4_096) == common::pattern(9, 0, 4_096));
}

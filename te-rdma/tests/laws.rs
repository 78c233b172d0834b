//! The laws where RDMA makes them hard to keep: the slices that a failed queue pair affects, late writes, the
//! cost of a cancel.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::time::Duration;

use common::{ALL, Block, Net, REGION, REMOTE, config, kind, pattern, read, write};
use te_core::{
    Access, ErrorKind, Memory, Outcome, RegionId, RemoteOffset, RemoteRegionId, Slice, Token, Transport,
};
use te_rdma::Config;
use te_rdma::sim::{DeviceConfig, LinkConfig, Refusal};
use te_rdma::verbs::WcStatus;

const KIB: usize = 1 << 10;

/// A link with a long latency.
const SLOW: LinkConfig = LinkConfig { latency_ns: 300_000, ..LinkConfig::CALM };

#[test]
fn small_slices_that_are_contiguous_at_the_peer_share_work_requests_and_doorbells() {
    let mut net = Net::pair(&Config { qps: 1, ..config() }, 64 * KIB);
    net.warm_up();
    net.nodes[0].memory.paint(3);
    let before = net.nodes[0].transport.stats();
    // Scattered here, contiguous there.
    let slices: Vec<Slice> = (0..64).map(|i| write(i, i * 300, i * 200, 200)).collect();
    net.transfer(&slices);
    let stats = net.nodes[0].transport.stats();
    assert_eq!(stats.doorbells - before.doorbells, 1);
    assert_eq!(stats.posted - before.posted, 8);
    assert_eq!(stats.merged - before.merged, 56);
    assert_eq!(stats.signaled - before.signaled, 1);
    for i in 0..64 {
        assert_eq!(net.nodes[1].memory.get(i * 200, 200), pattern(3, i * 300, 200));
    }
}

#[test]
fn tiny_writes_are_carried_inside_their_work_requests() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    let before = net.nodes[0].transport.stats().inlined;
    net.transfer(&[write(1, 0, 0, 64), write(2, 1_000, 9_000, 128), write(3, 2_000, 20_000, 129)]);
    net.transfer(&[read(4, 0, 0, 64)]);
    assert_eq!(net.nodes[0].transport.stats().inlined - before, 2);
}

#[test]
fn most_work_requests_report_nothing_and_every_slice_ends() {
    let mut net = Net::pair(&Config { qps: 1, sges: 1, signal_every: 16, ..config() }, 64 * KIB);
    net.warm_up();
    let before = net.nodes[0].transport.stats();
    let slices: Vec<Slice> = (0..32).map(|i| write(i, i * 512, i * 1_024, 400)).collect();
    net.transfer(&slices);
    let stats = net.nodes[0].transport.stats();
    assert_eq!((stats.posted - before.posted, stats.signaled - before.signaled), (32, 2));
}

#[test]
fn a_slice_with_invalid_keys_does_not_fail_other_slices() {
    let mut net = Net::pair(&Config { qps: 1, ..config() }, 64 * KIB);
    let (other, remote) = (RegionId::new(1, 1), RemoteRegionId::new(1, 1));
    let memory = Block::new(4 * KIB);
    // SAFETY: the block outlives the region, which is deregistered below.
    unsafe { net.nodes[1].transport.register(other, memory.span(), ALL) }.unwrap();
    net.attach(0, remote, 1, other);
    net.warm_up();
    net.transfer(&[Slice { remote: RemoteOffset::new(remote, 0), ..write(1, 0, 0, 100) }]);
    // The target deregisters it. The next slices are posted before the initiator receives that report.
    net.nodes[1].transport.deregister(other).unwrap();
    net.nodes[0].memory.paint(9);
    let doomed = Slice { remote: RemoteOffset::new(remote, 0), ..write(50, 0, 0, 100) };
    let mut batch: Vec<Slice> = (10..40).map(|i| write(i, i * 1_000, i * 1_500, 900)).collect();
    batch.insert(10, doomed);
    net.nodes[0].submit(&batch);
    let end = net.finish(50);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::AccessDenied, Outcome::NotApplied));
    for i in 10..40 {
        let end = net.finish(i);
        assert_eq!(end.result, Ok(()), "slice {i} failed because of another one");
        assert_eq!(net.nodes[1].memory.get(i * 1_500, 900), pattern(9, i * 1_000, 900));
    }
    let stats = net.nodes[0].transport.stats();
    assert!(stats.replays > 0 && stats.flushes == 1, "{stats:?}");
    // From now on it is refused without a failed queue pair.
    net.nodes[0].transport.submit(&[Slice { token: Token(60), ..doomed }]).unwrap_err();
}

#[test]
fn a_cancel_flushes_after_its_drain_time_and_the_other_slices_are_sent_again() {
    let config = Config { qps: 1, cancel_drain_ms: 1, timeout_exponent: 14, ..config() };
    let mut net = Net::pair(&config, 64 * KIB);
    net.warm_up();
    net.nodes[0].memory.paint(5);
    // Nothing arrives for longer than the drain time.
    net.set_link(0, 1, LinkConfig { latency_ns: 5_000_000, ..LinkConfig::CALM });
    net.nodes[0].submit(&[write(1, 0, 0, 500), write(2, 1_000, 1_000, 500), read(3, 8_000, 2_000, 500)]);
    net.nodes[0].transport.cancel(Token(1)).unwrap();
    let end = net.finish(1);
    assert_eq!((kind(&end), end.outcome, end.fence_needed), (ErrorKind::Canceled, Outcome::Unknown, true));
    // The other WRITE is applied, and its completion says that a first copy of it may still land.
    let end = net.finish(2);
    assert_eq!((end.result, end.fence_needed), (Ok(()), true));
    assert_eq!(net.nodes[1].memory.get(1_000, 500), pattern(5, 1_000, 500));
    let end = net.finish(3);
    assert_eq!((end.result, end.fence_needed), (Ok(()), false));
    assert_eq!(net.nodes[0].transport.stats().replays, 2);
}

#[test]
fn a_cancelled_slice_that_ends_by_itself_flushes_nothing() {
    let mut net = Net::pair(&Config { cancel_drain_ms: 50, ..config() }, 64 * KIB);
    net.warm_up();
    net.set_link(0, 1, SLOW);
    net.nodes[0].submit(&[write(1, 0, 0, 500), write(2, 1_000, 1_000, 500)]);
    net.nodes[0].transport.cancel(Token(1)).unwrap();
    net.nodes[0].transport.cancel(Token(1)).unwrap();
    assert_eq!(net.finish(1).outcome, Outcome::Applied);
    assert_eq!(net.finish(2).outcome, Outcome::Applied);
    assert_eq!(net.nodes[0].transport.stats().flushes, 0);
}

#[test]
fn a_late_write_is_stopped_by_a_fence_and_by_nothing_else() {
    for fence in [false, true] {
        let mut net = Net::pair(&Config { cancel_drain_ms: 0, timeout_exponent: 16, ..config() }, 64 * KIB);
        net.warm_up();
        net.nodes[0].memory.paint(1);
        // The packet is on the wire for 50 ms, and the slice is cancelled at once.
        net.set_link(0, 1, LinkConfig { latency_ns: 50_000_000, ..LinkConfig::CALM });
        net.nodes[0].submit(&[write(1, 0, 0, 4 * KIB as u32)]);
        net.step();
        if !fence {
            // The initiator would request that it destroy the unused queue pair, which is what a fence does.
            net.stalled.push(1);
        }
        net.nodes[0].transport.cancel(Token(1)).unwrap();
        assert_eq!(net.finish(1).outcome, Outcome::Unknown);
        if fence {
            assert_eq!(net.fence(2).outcome, Outcome::Applied);
        }
        // The range is used for something else.
        net.nodes[1].memory.set(0, &[0xEE; 4 * KIB]);
        net.linger(Duration::from_millis(120));
        let kept = net.nodes[1].memory.get(0, 4 * KIB) == [0xEE; 4 * KIB];
        assert_eq!(kept, fence, "fenced: {fence}");
    }
}

#[test]
fn a_fence_waits_for_a_target_that_is_not_polled() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    net.stalled.push(1);
    net.nodes[0].transport.fence(Token(1), REMOTE).unwrap();
    net.linger(Duration::from_millis(20));
    assert_eq!(net.nodes[0].ended(1), None);
    net.stalled.clear();
    assert_eq!(net.finish(1).outcome, Outcome::Applied);
}

#[test]
fn transfers_do_not_need_the_target_to_be_polled() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    net.stalled.push(1);
    net.transfer(&(0..32).map(|i| read(i, i * 1_000, i * 1_000, 1_000)).collect::<Vec<_>>());
    net.transfer(&(100..132).map(|i| write(i, 0, i, 1_000)).collect::<Vec<_>>());
}

#[test]
fn a_queue_pair_that_fails_from_outside_is_replaced_and_its_slices_are_sent_again() {
    let mut net = Net::pair(&Config { qps: 2, ..config() }, 64 * KIB);
    net.warm_up();
    net.set_link(0, 1, SLOW);
    net.nodes[0].memory.paint(4);
    let port = net.ports[0];
    for round in 0..5_u64 {
        let slices: Vec<Slice> =
            (0..40).map(|i| write(round * 100 + i, i * 1_000, i * 1_200, 1_000)).collect();
        net.nodes[0].submit(&slices);
        net.step();
        // Every queue pair that was ever made, and some more numbers.
        (0..64).for_each(|number| net.fabric.fail_qp(port, number));
        for slice in &slices {
            assert_eq!(net.finish(slice.token.0).result, Ok(()));
        }
        assert_eq!(net.nodes[1].memory.get(1_200, 1_000), pattern(4, 1_000, 1_000));
    }
    assert!(net.nodes[0].transport.stats().replays > 0);
}

#[test]
fn a_lost_path_ends_its_slices_so_that_other_rails_can_take_them() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    net.set_link(0, 1, LinkConfig { down: true, ..LinkConfig::CALM });
    net.nodes[0].submit(&[write(1, 0, 0, 500), read(2, 0, 0, 500)]);
    let (write_end, read_end) = (net.finish(1), net.finish(2));
    assert_eq!((kind(&write_end), write_end.outcome), (ErrorKind::Rail, Outcome::Unknown));
    assert_eq!((kind(&read_end), read_end.outcome), (ErrorKind::Rail, Outcome::NotApplied));
    net.set_link(0, 1, LinkConfig::CALM);
    assert_eq!(net.fence(3).outcome, Outcome::Applied);
    net.transfer(&[write(4, 0, 0, 500)]);
}

#[test]
fn a_port_that_goes_down_ends_its_slices_at_once_and_comes_back() {
    let mut net = Net::pair(&Config { timeout_exponent: 20, ..config() }, 64 * KIB);
    net.warm_up();
    net.set_link(0, 1, SLOW);
    net.nodes[0].submit(&[write(1, 0, 0, 500)]);
    let port = net.ports[0];
    net.fabric.set_port_active(port, false);
    let end = net.finish(1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Rail, Outcome::Unknown));
    assert!(!net.nodes[0].transport.is_up());
    // While it is down, new slices end soon.
    net.nodes[0].submit(&[write(2, 0, 0, 500)]);
    assert_eq!((kind(&net.finish(2)), net.finish(2).outcome), (ErrorKind::Rail, Outcome::NotApplied));
    net.fabric.set_port_active(port, true);
    net.drive("the port is up", |net| net.nodes[0].transport.is_up());
    net.transfer(&[write(3, 0, 0, 500)]);
}

#[test]
fn an_address_that_changes_ends_connections_and_later_slices_succeed() {
    use te_rdma::verbs::GidKind;
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    for (node, token) in [(0, 10), (1, 20)] {
        let (port, gid) = (net.ports[node], net.nodes[node].transport.gid());
        let mut raw = gid.raw;
        raw[15] ^= 0x55;
        net.fabric.set_gid(port, gid.index, Some((raw, GidKind::RoceV2)));
        net.drive("the new address is known", |net| net.nodes[node].transport.gid().raw != gid.raw);
        net.nodes[0].submit(&[write(token, 0, 0, 500)]);
        // It may have been posted already.
        if let Err(error) = net.finish(token).result {
            assert!(error.kind.is_retryable_elsewhere(), "{error}");
        }
        net.transfer(&[write(token + 1, 0, 0, 500)]);
    }
}

#[test]
fn slices_and_regions_of_a_lost_device_end() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    net.set_link(0, 1, SLOW);
    net.nodes[0].submit(&[write(1, 0, 0, 500), read(2, 0, 0, 500)]);
    let port = net.ports[0];
    net.fabric.kill(port);
    for token in [1, 2] {
        assert_eq!(kind(&net.finish(token)), ErrorKind::Rail);
    }
    net.nodes[0].submit(&[write(3, 0, 0, 500)]);
    assert_eq!((kind(&net.finish(3)), net.finish(3).outcome), (ErrorKind::Rail, Outcome::NotApplied));
    net.nodes[0].transport.deregister(REGION).unwrap();
}

#[test]
fn a_target_that_fails_to_execute_a_write_fails_that_slice_alone() {
    let mut net = Net::pair(&Config { qps: 1, ..config() }, 64 * KIB);
    net.warm_up();
    let port = net.ports[1];
    net.fabric.refuse_requests(port, Refusal::Failed, 1);
    net.nodes[0].submit(&[write(1, 0, 0, 500), write(2, 600, 1_000, 500)]);
    assert_eq!((kind(&net.finish(1)), net.finish(1).outcome), (ErrorKind::Rail, Outcome::Unknown));
    assert_eq!(net.finish(2).result, Ok(()));
}

#[test]
fn a_status_of_any_kind_ends_its_slice_once_and_the_queue_pair_is_replaced() {
    let statuses = [
        (WcStatus::Local, ErrorKind::System),
        (WcStatus::RemoteAccess, ErrorKind::AccessDenied),
        (WcStatus::RemoteOperation, ErrorKind::Rail),
        (WcStatus::RetriesExceeded, ErrorKind::Rail),
        (WcStatus::NotReady, ErrorKind::Rail),
        (WcStatus::Other, ErrorKind::Rail),
    ];
    for (status, expected) in statuses {
        let mut net = Net::pair(&Config { qps: 1, ..config() }, 64 * KIB);
        net.warm_up();
        let port = net.ports[0];
        net.fabric.corrupt_status(port, 0, status);
        net.nodes[0].submit(&[write(1, 0, 0, 8_000)]);
        let end = net.finish(1);
        assert_eq!((kind(&end), end.outcome), (expected, Outcome::Unknown), "{status:?}");
        assert_eq!(net.fence(2).outcome, Outcome::Applied);
        net.transfer(&[write(3, 0, 0, 8_000), read(4, 0, 0, 8_000)]);
    }
}

#[test]
fn a_registration_that_fails_half_way_leaves_nothing_behind() {
    let mut net = Net::pair(&Config { registration_chunk_bytes: 4_096, ..config() }, 64 * KIB);
    let port = net.ports[0];
    let before = net.fabric.mr_count(port);
    let memory = Block::new(256 * KIB);
    net.fabric.fail_registrations(port, libc::ENOMEM, 1);
    // SAFETY: the block outlives the node's use of it: it is deregistered below.
    let register =
        |net: &mut Net| unsafe { net.nodes[0].transport.register(RegionId::new(5, 1), memory.span(), ALL) };
    let error = register(&mut net).unwrap_err();
    assert_eq!((error.kind, error.code), (ErrorKind::System, libc::ENOMEM));
    assert_eq!(net.fabric.mr_count(port), before);
    register(&mut net).unwrap();
    assert!(net.fabric.mr_count(port) >= before + 64);
    net.nodes[0].transport.deregister(RegionId::new(5, 1)).unwrap();
    assert_eq!(net.fabric.mr_count(port), before);
}

#[test]
fn a_region_of_a_thousand_chunks_is_reached_from_end_to_end() {
    let config = Config { registration_chunk_bytes: 4_096, ..config() };
    let bytes = 1_000 * 4_096 + 77;
    let mut net = Net::pair(&config, bytes);
    net.nodes[1].memory.paint(8);
    // Across hundreds of chunks on both sides, from odd places.
    net.transfer(&[read(1, 1, 3, 1 << 20), read(2, 1 << 21, (1 << 21) + 5, 1 << 20)]);
    assert_eq!(net.nodes[0].memory.get(1, 1 << 20), pattern(8, 3, 1 << 20));
    assert_eq!(net.nodes[0].memory.get(1 << 21, 1 << 20), pattern(8, (1 << 21) + 5, 1 << 20));
    let last = bytes as u64 - 100;
    net.transfer(&[read(3, last, last, 100)]);
    assert_eq!(net.nodes[0].memory.get(last, 100), pattern(8, last, 100));
}

#[test]
fn progress_of_a_registration_is_counted() {
    let progress = te_rdma::Progress::default();
    let config = Config { registration_chunk_bytes: 4_096, progress: Some(progress.clone()), ..config() };
    let mut net = Net::new(1);
    net.add(&config, 100 * KIB);
    assert_eq!((progress.bytes_done(), progress.bytes_total()), (100 << 10, 100 << 10));
    assert_eq!(net.nodes[0].transport.stats().registered_bytes, 100 << 10);
}

#[test]
fn connections_beyond_the_limit_are_evicted_for_others() {
    let mut net = Net::new(3);
    net.add(&Config { peers_max: 2, ..config() }, 64 * KIB);
    for target in 1..6 {
        net.add(&config(), 64 * KIB);
        net.attach(0, RemoteRegionId::new(target as u32, 1), target, REGION);
    }
    for round in 0..3_u64 {
        let to = |target: u64| Slice {
            remote: RemoteOffset::new(RemoteRegionId::new(target as u32, 1), 0),
            ..write(round * 10 + target, 0, 0, 100)
        };
        // All at the same time: three have to wait until the first two have ended.
        net.transfer(&(1..6).map(to).collect::<Vec<_>>());
    }
    let stats = net.nodes[0].transport.stats();
    assert!(stats.evictions >= 9, "{stats:?}");
    assert_eq!(stats.connections_opened - stats.connections_lost, 2);
    for target in 1..6 {
        net.nodes[0].transport.fence(Token(100 + target), RemoteRegionId::new(target as u32, 1)).unwrap();
        assert_eq!(net.finish(100 + target).outcome, Outcome::Applied);
    }
}

#[test]
fn both_ends_may_open_to_each_other_at_the_same_time() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.attach(1, REMOTE, 0, REGION);
    net.nodes[0].submit(&[write(1, 0, 100, 50)]);
    net.nodes[1].submit(&[write(1, 0, 200, 50)]);
    net.drive("both have written", |net| net.nodes[0].ended(1).is_some() && net.nodes[1].ended(1).is_some());
    assert_eq!((net.nodes[0].done[0].result, net.nodes[1].done[0].result), (Ok(()), Ok(())));
}

#[test]
fn a_transport_reaches_itself() {
    let mut net = Net::new(1);
    net.add(&config(), 64 * KIB);
    net.attach(0, REMOTE, 0, REGION);
    net.nodes[0].memory.paint(2);
    net.transfer(&[write(1, 0, 10_000, 5_000), read(2, 30_000, 0, 100)]);
    assert_eq!(net.nodes[0].memory.get(10_000, 5_000), pattern(2, 0, 5_000));
    assert_eq!(net.fence(3).outcome, Outcome::Applied);
}

#[test]
fn queue_pairs_are_destroyed_with_the_last_remote_region_of_their_peer() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    let (here, there) = (net.ports[0], net.ports[1]);
    assert_eq!((net.fabric.qp_count(here), net.fabric.qp_count(there)), (2, 2));
    net.nodes[0].transport.detach(REMOTE).unwrap();
    net.drive("they are destroyed", |net| net.fabric.qp_count(here) + net.fabric.qp_count(there) == 0);
}

#[test]
fn a_failed_queue_pair_is_destroyed_at_the_target() {
    let mut net = Net::pair(&Config { qps: 1, ..config() }, 64 * KIB);
    net.warm_up();
    let port = net.ports[0];
    for round in 1..20 {
        net.fabric.corrupt_status(port, 0, WcStatus::RetriesExceeded);
        net.nodes[0].submit(&[write(2 * round, 0, 0, 10)]);
        net.finish(2 * round);
        net.transfer(&[write(2 * round + 1, 0, 0, 10)]);
    }
    net.linger(Duration::from_millis(5));
    assert_eq!(net.fabric.qp_count(net.ports[1]), 1);
}

#[test]
fn ports_without_a_common_address_family_are_unreachable() {
    use te_rdma::verbs::{Gid, GidKind};
    let gid = |raw: [u8; 16], kind| Some(Gid { index: 0, raw, kind });
    let mut v4 = [0; 16];
    v4[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 0, 1]);
    let mut v6 = [0; 16];
    v6[0] = 0x20;
    let with = |gids| DeviceConfig { gids, ..DeviceConfig::default() };
    let mut net = Net::new(1);
    net.add_device(with(vec![gid(v4, GidKind::RoceV2)]), &config(), 4 * KIB);
    net.add_device(with(vec![gid(v6, GidKind::RoceV2)]), &config(), 4 * KIB);
    net.attach(0, REMOTE, 1, REGION);
    net.nodes[0].submit(&[write(1, 0, 0, 10)]);
    let end = net.finish(1);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::Unreachable, Outcome::NotApplied));
}

#[test]
fn rights_that_only_a_forged_export_has_are_not_granted() {
    let mut net = Net::new(1);
    net.add(&config(), 64 * KIB);
    net.add(&config(), 64 * KIB);
    let (region, memory) = (RegionId::new(3, 1), Block::new(KIB));
    // SAFETY: the block outlives the region, which is deregistered below.
    unsafe { net.nodes[1].transport.register(region, memory.span(), Access::REMOTE_READ) }.unwrap();
    let mut blob = net.nodes[1].export_of(region);
    blob[6] = 12;
    net.nodes[0].transport.attach(REMOTE, &blob).unwrap();
    net.nodes[0].submit(&[write(1, 0, 0, 10)]);
    assert_eq!((kind(&net.finish(1)), net.finish(1).outcome), (ErrorKind::AccessDenied, Outcome::NotApplied));
    net.transfer(&[read(2, 0, 0, 10)]);
    assert_eq!(net.nodes[0].transport.stats().flushes, 0, "it was refused before it was posted");
    net.nodes[1].transport.deregister(region).unwrap();
}

#[test]
fn settings_are_lowered_to_the_limits_of_the_device() {
    let device = DeviceConfig {
        qp_depth_max: 7,
        sge_max: 3,
        reads_max: 2,
        message_bytes_max: 5_000,
        mr_bytes_max: 10_000,
        ..DeviceConfig::default()
    };
    let mut net = Net::new(1);
    net.add_device(device, &config(), KIB);
    let settings = net.nodes[0].transport.config();
    let seen = (settings.qp_depth, settings.sges, settings.reads, settings.message_bytes_max);
    assert_eq!((seen, settings.registration_chunk_bytes), ((7, 3, 2, 5_000), 8_192));
}

#[test]
fn a_transport_without_work_may_park() {
    let mut net = Net::pair(&config(), 64 * KIB);
    net.warm_up();
    net.linger(Duration::from_millis(10));
    for node in &net.nodes {
        let at = node.transport.poll_at();
        assert!(at.is_none_or(|at| at > net.now), "{at:?} at {:?}", net.now);
    }
    // The target is gone. Between two attempts to reach it, there is no work either.
    net.nodes.pop();
    net.nodes[0].submit(&[write(1, 0, 0, 10)]);
    net.finish(1);
    let mut parked = 0;
    for token in 2..6 {
        net.nodes[0].submit(&[write(token, 0, 0, 10)]);
        while net.nodes[0].ended(token).is_none() {
            net.step();
            parked += u32::from(net.nodes[0].transport.poll_at().is_none_or(|at| at > net.now));
        }
    }
    assert!(parked > 100, "it had to be polled all the time while it waited");
}

#[test]
fn slices_that_wait_when_a_connection_breaks_go_over_the_next_one() {
    let config = Config { qps: 1, window_bytes_max: 1, ..config() };
    let mut net = Net::pair(&config, 64 * KIB);
    net.warm_up();
    net.set_link(0, 1, SLOW);
    let slices: Vec<Slice> = (0..4).map(|token| write(token, token * 8_192, token * 8_192, 4_096)).collect();
    net.nodes[0].submit(&slices);
    net.step();
    net.nodes[1].transport.close_connections();
    assert_eq!(kind(&net.finish(0)), ErrorKind::PeerDead);
    for token in 1..4 {
        assert_eq!(net.finish(token).result, Ok(()), "{token}");
    }
}

#[test]
fn a_fence_covers_the_writes_of_an_evicted_connection() {
    for detach in [false, true] {
        let config = Config { peers_max: 1, cancel_drain_ms: 0, timeout_exponent: 18, ..config() };
        let mut net = Net::pair(&config, 64 * KIB);
        let third = net.add(&config, 64 * KIB);
        let other = RemoteRegionId::new(1, 1);
        net.attach(0, other, third, REGION);
        net.warm_up();
        net.nodes[0].memory.paint(1);
        net.set_link(0, 1, LinkConfig { latency_ns: 400_000_000, ..LinkConfig::CALM });
        net.nodes[0].submit(&[write(1, 0, 0, 4 * KIB as u32)]);
        net.step();
        net.stalled.push(1);
        net.nodes[0].transport.cancel(Token(1)).unwrap();
        assert_eq!(net.finish(1).outcome, Outcome::Unknown);
        net.transfer(&[Slice { remote: RemoteOffset::new(other, 0), ..write(2, 0, 0, 100) }]);
        assert_eq!(net.nodes[0].transport.stats().evictions, 1);
        if detach {
            net.nodes[0].transport.detach(REMOTE).unwrap();
            net.attach(0, REMOTE, 1, REGION);
        }
        net.stalled.clear();
        assert_eq!(net.fence(3).outcome, Outcome::Applied);
        net.nodes[1].memory.set(0, &[0xEE; 4 * KIB]);
        net.linger(Duration::from_millis(500));
        assert!(net.nodes[1].memory.get(0, 4 * KIB) == [0xEE; 4 * KIB], "detached: {detach}");
    }
}

//! The behaviour of the simulated provider with faults: keys, rights, retries, loss.

#![allow(clippy::unwrap_used, reason = "a test")]

mod rig;

use rig::{ALL, BUFFER_BYTES, Node, Pair, QP, connect};
use te_core::testkit::each_seed;
use te_core::{Instant, Op};
use te_rdma::sim::{DeviceConfig, LinkConfig, Refusal, SimConfig, SimFabric};
use te_rdma::verbs::{AsyncEvent, MrAccess, QpStep, Sge, Verbs as _, WcStatus, WorkRequest};

type Change = fn(&mut Pair);

const BOTH: [SimConfig; 2] = [SimConfig::TIMED, SimConfig::IMMEDIATE];

#[test]
fn a_wrong_path_to_the_peer_never_works() {
    type Spoil = fn(&mut te_rdma::verbs::Path, &mut te_rdma::verbs::Path);
    let spoils: [(&str, Spoil); 8] = [
        ("queue pair that does not exist", |to_b, _| to_b.peer_qp += 5),
        ("the peer expects another queue pair", |_, to_a| to_a.peer_qp += 5),
        ("unknown GID", |to_b, _| to_b.peer_gid[15] ^= 0x40),
        ("the peer expects another GID", |_, to_a| to_a.peer_gid[15] ^= 0x40),
        ("RoCE v1 to v2", |to_b, _| to_b.gid_index = 2),
        ("we count from a later number", |to_b, _| to_b.psn = 5),
        ("we count from an earlier number", |to_b, _| to_b.psn = 0xff_fff0),
        ("the peer expects a later number", |_, to_a| to_a.peer_psn = 0x10),
    ];
    for config in BOTH {
        for (what, spoil) in spoils {
            let mut pair = Pair::with(config, DeviceConfig::default(), spoil);
            pair.a.mem.fill(1);
            pair.write(1, 0, 100);
            pair.read(2, 0, 100);
            let end = pair.settle();
            assert_eq!(end, [(1, WcStatus::RetriesExceeded), (2, WcStatus::Flushed)], "{what}, {config:?}");
        }
    }
}

#[test]
fn keys_bind_memory_rights_and_range() {
    for config in BOTH {
        // (description, rights of the registration, offset, length, op)
        let cases: [(&str, MrAccess, i64, u32, Op); 5] = [
            ("one byte before", ALL, -1, 10, Op::Write),
            ("one byte behind", ALL, BUFFER_BYTES as i64 - 9, 10, Op::Write),
            ("reading over the end", ALL, BUFFER_BYTES as i64 - 9, 10, Op::Read),
            ("writing with the right to read", MrAccess::REMOTE_READ, 0, 10, Op::Write),
            (
                "reading with the right to write",
                MrAccess::LOCAL_WRITE.union(MrAccess::REMOTE_WRITE),
                0,
                10,
                Op::Read,
            ),
        ];
        for (what, access, offset, len, op) in cases {
            let mut pair = Pair::new(config);
            // SAFETY: `Mem` is never freed and lends no references.
            let mr = unsafe { pair.b.verbs.register(pair.b.mem.span, access) }.unwrap();
            let request = WorkRequest {
                remote_key: mr.remote_key,
                remote_addr: pair.b.mem.addr().wrapping_add_signed(offset),
                ..pair.request(1, op, 0, 1)
            };
            pair.a.mem.fill(9);
            pair.a.post(pair.qa, &[request], &[pair.a.sge(0, len)]);
            pair.write(2, 0, 10);
            let end = pair.settle();
            assert_eq!(end, [(1, WcStatus::RemoteAccess), (2, WcStatus::Flushed)], "{what}");
            assert!(pair.b.mem.is_all(0) && pair.a.mem.is_all(9), "{what}");
        }
    }
}

#[test]
fn an_access_fault_puts_both_queue_pairs_in_error_and_raises_an_event_at_the_target() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let wrong = WorkRequest { remote_key: pair.b.mr.remote_key ^ 1, ..pair.request(1, Op::Write, 0, 1) };
        pair.a.post(pair.qa, &[wrong], &[pair.a.sge(0, 8)]);
        assert_eq!(pair.settle(), [(1, WcStatus::RemoteAccess)]);
        assert_eq!(pair.b.verbs.next_event(), Some(AsyncEvent::QpError(pair.qb.number)));
        // The target's own work on that queue pair is flushed.
        let back = WorkRequest {
            remote_addr: pair.a.mem.addr(),
            remote_key: pair.a.mr.remote_key,
            ..pair.request(3, Op::Write, 0, 1)
        };
        let sge = pair.b.sge(0, 8);
        pair.b.post(pair.qb, &[back], &[sge]);
        assert_eq!(pair.b.poll(), [(3, WcStatus::Flushed)]);
    }
}

#[test]
fn a_key_ends_with_its_registration_and_a_local_key_is_no_remote_key() {
    for config in BOTH {
        for local_key in [false, true] {
            let mut pair = Pair::new(config);
            let mut request = pair.request(1, Op::Write, 0, 1);
            if local_key {
                request.remote_key = pair.b.mr.local_key;
            } else {
                pair.b.verbs.deregister(pair.b.mr).unwrap();
                assert!(pair.b.verbs.deregister(pair.b.mr).is_err());
                // SAFETY: as everywhere here.
                let again = unsafe { pair.b.verbs.register(pair.b.mem.span, ALL) }.unwrap();
                assert_ne!(again.remote_key, pair.b.mr.remote_key);
            }
            pair.a.mem.fill(1);
            pair.a.post(pair.qa, &[request], &[pair.a.sge(0, 8)]);
            assert_eq!(pair.settle(), [(1, WcStatus::RemoteAccess)]);
            assert!(pair.b.mem.is_all(0));
        }
    }
}

#[test]
fn a_registration_that_ends_during_a_message_stops_the_rest_of_it() {
    let mut pair = Pair::new(SimConfig::TIMED);
    let slow = LinkConfig { bytes_per_s: 1_024_000_000, ..LinkConfig::CALM };
    pair.fabric.set_link(pair.a.verbs.id(), pair.b.verbs.id(), slow);
    pair.a.mem.fill(1);
    pair.write(1, 0, 10 * 1_024);
    pair.fabric.advance_to(Instant::from_nanos(4_500));
    pair.b.verbs.deregister(pair.b.mr).unwrap();
    assert_eq!(pair.settle(), [(1, WcStatus::RemoteAccess)]);
    assert!(pair.b.mem.read(4_095, 2) == [1, 0], "four packets had arrived");
}

#[test]
fn a_bad_local_key_is_a_local_fault_after_earlier_requests() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.write(1, 0, 100);
        let sge = Sge { local_key: pair.a.mr.local_key ^ 2, ..pair.a.sge(0, 8) };
        pair.a.post(pair.qa, &[pair.request(2, Op::Write, 0, 1)], &[sge]);
        pair.write(3, 0, 100);
        let end = [(1, WcStatus::Success), (2, WcStatus::Local), (3, WcStatus::Flushed)];
        assert_eq!(pair.settle(), end);

        // A READ into memory without the right to write.
        let mut pair = Pair::new(config);
        // SAFETY: as everywhere here.
        let mr = unsafe { pair.a.verbs.register(pair.a.mem.span, MrAccess::empty()) }.unwrap();
        assert_eq!(mr.remote_key, 0);
        let sge = Sge { local_key: mr.local_key, ..pair.a.sge(0, 8) };
        pair.a.post(pair.qa, &[pair.request(1, Op::Read, 0, 1)], &[sge]);
        assert_eq!(pair.settle(), [(1, WcStatus::Local)]);
    }
}

#[test]
fn a_request_to_a_target_that_is_not_ready_is_repeated_up_to_the_limit() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.fabric.refuse_requests(pair.b.verbs.id(), Refusal::NotReady, 2);
        pair.write(1, 0, 100);
        assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
        assert_eq!(pair.fabric.counters().retried, 2);

        pair.fabric.refuse_requests(pair.b.verbs.id(), Refusal::NotReady, 3);
        pair.write(2, 0, 100);
        pair.write(3, 0, 100);
        assert_eq!(pair.settle(), [(2, WcStatus::NotReady), (3, WcStatus::Flushed)]);

        // 7: no limit.
        let mut pair = Pair::with(config, DeviceConfig::default(), |to_b, _| to_b.rnr_retries = 7);
        pair.fabric.refuse_requests(pair.b.verbs.id(), Refusal::NotReady, 50);
        pair.write(1, 0, 100);
        assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
    }
}

#[test]
fn a_target_that_fails_ends_both_queue_pairs() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.fabric.refuse_requests(pair.b.verbs.id(), Refusal::Failed, 1);
        pair.write(1, 0, 100);
        assert_eq!(pair.settle(), [(1, WcStatus::RemoteOperation)]);
        assert_eq!(pair.b.verbs.next_event(), Some(AsyncEvent::QpError(pair.qb.number)));
    }
}

#[test]
fn retries_run_out_without_an_answer() {
    let breaks: [(&str, Change); 7] = [
        ("link down", |p| {
            let down = LinkConfig { down: true, ..LinkConfig::CALM };
            p.fabric.set_link(p.a.verbs.id(), p.b.verbs.id(), down);
        }),
        ("link back down", |p| {
            let down = LinkConfig { down: true, ..LinkConfig::CALM };
            p.fabric.set_link(p.b.verbs.id(), p.a.verbs.id(), down);
        }),
        ("own port down", |p| p.fabric.set_port_active(p.a.verbs.id(), false)),
        ("peer's port down", |p| p.fabric.set_port_active(p.b.verbs.id(), false)),
        ("peer's queue pair in error", |p| p.b.verbs.modify_qp(p.qb.handle, QpStep::Error).unwrap()),
        ("peer's queue pair destroyed", |p| p.b.verbs.destroy_qp(p.qb.handle).unwrap()),
        ("peer's device dead", |p| p.fabric.kill(p.b.verbs.id())),
    ];
    for config in BOTH {
        for (what, break_it) in breaks {
            let mut pair = Pair::new(config);
            break_it(&mut pair);
            pair.write(1, 0, 100);
            pair.read(2, 0, 100);
            let end = pair.settle();
            assert_eq!(end, [(1, WcStatus::RetriesExceeded), (2, WcStatus::Flushed)], "{what}");
            assert_eq!(pair.fabric.counters().retried, 3, "{what}: the retries of the path");
        }
    }
}

#[test]
fn retries_bridge_a_link_that_comes_back() {
    let mut pair = Pair::new(SimConfig::TIMED);
    let (a, b) = (pair.a.verbs.id(), pair.b.verbs.id());
    pair.fabric.set_link(a, b, LinkConfig { down: true, ..LinkConfig::CALM });
    pair.a.mem.fill(1);
    pair.write(1, 0, 100);
    // The link is up after two timeouts of 4.096 µs × 2^10.
    pair.fabric.advance_to(Instant::from_nanos(2 * 4_096 * 1_024 + 1));
    pair.fabric.set_link(a, b, LinkConfig::CALM);
    assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
    assert_eq!(pair.fabric.counters().retried, 3);
}

#[test]
fn loss_and_duplicates_have_no_effect() {
    for seed in each_seed(0..20) {
        let rough = LinkConfig {
            loss_ppm: 30_000,
            duplicate_ppm: 50_000,
            hold_ppm: 10_000,
            hold_ns: 50_000,
            jitter_ns: 3_000,
            ..LinkConfig::CALM
        };
        let fabric = SimFabric::new(seed, SimConfig { link: rough, ..SimConfig::TIMED });
        let mut a = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let mut b = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let (qa, qb) = connect(&mut a, &mut b, QP, |to_b, _| to_b.retries = 7);
        let mut pair = Pair { fabric, a, b, qa, qb };
        for round in 0..30u64 {
            pair.a.mem.fill(round as u8 + 1);
            pair.write(2 * round, 1_000, 6_000);
            assert_eq!(pair.settle(), [(2 * round, WcStatus::Success)]);
            assert!(pair.b.mem.read(1_000, 6_000) == vec![round as u8 + 1; 6_000]);
            pair.a.mem.fill(0);
            pair.read(2 * round + 1, 1_000, 6_000);
            assert_eq!(pair.settle(), [(2 * round + 1, WcStatus::Success)]);
            assert!(pair.a.mem.read(0, 6_000) == vec![round as u8 + 1; 6_000]);
        }
        let counters = pair.fabric.counters();
        assert!(counters.lost > 0 && counters.retried > 0 && counters.duplicates > 0, "{counters:?}");
    }
}

#[test]
fn equal_seeds_give_equal_histories() {
    let history = |seed| {
        let link = LinkConfig { loss_ppm: 100_000, jitter_ns: 5_000, ..LinkConfig::CALM };
        let fabric = SimFabric::new(seed, SimConfig { link, ..SimConfig::TIMED });
        let mut a = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let mut b = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let (qa, qb) = connect(&mut a, &mut b, QP, |_, _| {});
        let mut pair = Pair { fabric, a, b, qa, qb };
        for id in 0..50 {
            pair.write(id, 0, 9_000);
        }
        (pair.settle(), pair.fabric.now(), pair.fabric.counters())
    };
    assert_eq!(history(3), history(3));
    assert_ne!(history(3), history(4));
}

#[test]
fn a_path_mtu_that_differs_is_malformed() {
    let smaller = |_: &mut te_rdma::verbs::Path, to_a: &mut te_rdma::verbs::Path| to_a.mtu_bytes = 512;
    let mut pair = Pair::with(SimConfig::TIMED, DeviceConfig::default(), smaller);
    pair.write(1, 0, 100);
    pair.write(2, 0, 4_096);
    assert_eq!(pair.settle(), [(1, WcStatus::Success), (2, WcStatus::RemoteOperation)]);
}

#[test]
fn a_queue_pair_without_a_right_refuses_requests_that_the_memory_allows() {
    for config in BOTH {
        let fabric = SimFabric::new(1, config);
        let mut a = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let mut b = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let (qa, qb) = (a.verbs.create_qp(QP).unwrap(), b.verbs.create_qp(QP).unwrap());
        let gid = |node: &rig::SimNode| node.verbs.gid(3).unwrap().unwrap().raw;
        let (to_b, to_a) = (rig::default_path(qb, gid(&b)), rig::default_path(qa, gid(&a)));
        a.verbs.modify_qp(qa.handle, QpStep::Init(ALL)).unwrap();
        b.verbs.modify_qp(qb.handle, QpStep::Init(MrAccess::REMOTE_READ)).unwrap();
        a.verbs.modify_qp(qa.handle, QpStep::Connect(to_b)).unwrap();
        b.verbs.modify_qp(qb.handle, QpStep::Connect(to_a)).unwrap();
        let mut pair = Pair { fabric, a, b, qa, qb };
        pair.read(1, 0, 8);
        pair.write(2, 0, 8);
        assert_eq!(pair.settle(), [(1, WcStatus::Success), (2, WcStatus::RemoteOperation)]);
    }
}

#[test]
fn a_queue_pair_fails_on_request() {
    let mut pair = Pair::new(SimConfig::TIMED);
    pair.write(1, 0, 8);
    pair.fabric.fail_qp(pair.a.verbs.id(), pair.qa.number);
    assert_eq!(pair.a.verbs.next_event(), Some(AsyncEvent::QpError(pair.qa.number)));
    assert_eq!(pair.a.poll(), [(1, WcStatus::Flushed)]);
}

#[test]
fn a_completion_gets_a_requested_status() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.fabric.corrupt_status(pair.a.verbs.id(), 1, WcStatus::Other);
        for id in 0..3 {
            pair.write(id, 0, 8);
        }
        let end = [(0, WcStatus::Success), (1, WcStatus::Other), (2, WcStatus::Flushed)];
        assert_eq!(pair.settle(), end);
    }
}

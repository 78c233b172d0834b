//! The rules that the simulated provider keeps. The transport's own tests lean on every one of them.

#![allow(clippy::unwrap_used, reason = "a test")]

mod rig;

use rig::{ALL, BUFFER_BYTES, Mem, Node, Pair, QP, connect};
use te_core::testkit::{CountingAlloc, allocations};
use te_core::{ErrorKind, Instant, Op};
use te_rdma::sim::{DeviceConfig, LinkConfig, Refusal, SimConfig, SimFabric};
use te_rdma::verbs::{
    AsyncEvent, GidKind, MrAccess, QpConfig, QpHandle, QpStep, Sge, Verbs as _, WcStatus, WorkRequest,
};

#[global_allocator]
static ALLOC: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

type Change = fn(&mut Pair);

const BOTH: [SimConfig; 2] = [SimConfig::TIMED, SimConfig::IMMEDIATE];

#[test]
fn a_write_lands_and_a_read_brings_bytes_back() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.a.mem.fill(7);
        pair.write(1, 100, 5_000);
        assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
        assert!(pair.b.mem.read(99, 5_002) == [vec![0], vec![7; 5_000], vec![0]].concat());

        pair.a.mem.fill(0);
        pair.read(2, 90, 3_000);
        assert_eq!(pair.settle(), [(2, WcStatus::Success)]);
        assert!(pair.a.mem.read(0, 3_001) == [vec![0; 10], vec![7; 2_990], vec![0]].concat());
    }
}

#[test]
fn pieces_are_gathered_and_scattered_in_order() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let pattern: Vec<u8> = (0..8_192u32).map(|i| (i % 251) as u8).collect();
        pair.a.mem.write(0, &pattern);
        let pieces = [pair.a.sge(0, 1_500), pair.a.sge(4_000, 1), pair.a.sge(2_000, 1_999)];
        let expected = [&pattern[..1_500], &pattern[4_000..4_001], &pattern[2_000..3_999]].concat();
        pair.a.post(pair.qa, &[pair.request(1, Op::Write, 10, 3)], &pieces);
        assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
        assert_eq!(pair.b.mem.read(10, expected.len()), expected);

        let pieces = [pair.a.sge(20_000, 700), pair.a.sge(30_000, 2_800)];
        pair.a.post(pair.qa, &[pair.request(2, Op::Read, 10, 2)], &pieces);
        assert_eq!(pair.settle(), [(2, WcStatus::Success)]);
        assert_eq!(pair.a.mem.read(20_000, 700), expected[..700]);
        assert_eq!(pair.a.mem.read(30_000, 2_800), expected[700..]);
    }
}

#[test]
fn completions_come_in_the_order_of_posting() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let link = LinkConfig { jitter_ns: 20_000, latency_ns: 1_000, ..config.link };
        pair.fabric.set_link(pair.a.verbs.id(), pair.b.verbs.id(), link);
        for id in 0..40 {
            if id % 3 == 0 { pair.read(id, 0, 2_000) } else { pair.write(id, 4_096, 2_000) }
        }
        let expected: Vec<_> = (0..40).map(|id| (id, WcStatus::Success)).collect();
        assert_eq!(pair.settle(), expected);
    }
}

#[test]
fn a_packet_takes_its_links_latency_and_the_acknowledgement_its_own() {
    let mut pair = Pair::new(SimConfig::TIMED);
    pair.fabric.set_link(
        pair.a.verbs.id(),
        pair.b.verbs.id(),
        LinkConfig { latency_ns: 5_000, ..LinkConfig::CALM },
    );
    pair.a.mem.fill(3);
    pair.write(1, 0, 10);
    pair.fabric.advance_to(Instant::from_nanos(4_999));
    assert!(pair.b.mem.is_all(0));
    assert_eq!(pair.fabric.next_event(), Some(Instant::from_nanos(5_000)));
    pair.fabric.advance_to(Instant::from_nanos(5_999));
    assert!(pair.b.mem.read(0, 11) == [vec![3; 10], vec![0]].concat());
    assert_eq!(pair.a.poll(), []);
    pair.fabric.advance_to(Instant::from_nanos(6_000));
    assert_eq!(pair.a.poll(), [(1, WcStatus::Success)]);
    assert_eq!(pair.fabric.next_event(), None);
}

#[test]
fn a_wrong_idea_of_the_peer_never_works() {
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
        // (what, remote key of b to use, offset, length, op)
        let cases: [(&str, MrAccess, i64, u32, Op); 5] = [
            ("one byte before", ALL, -1, 10, Op::Write),
            ("one byte behind", ALL, BUFFER_BYTES as i64 - 9, 10, Op::Write),
            ("reading over the end", ALL, BUFFER_BYTES as i64 - 9, 10, Op::Read),
            ("writing what may be read", MrAccess::REMOTE_READ, 0, 10, Op::Write),
            (
                "reading what may be written",
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
fn an_access_fault_puts_both_queue_pairs_in_error_and_tells_the_target() {
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
fn a_registration_that_ends_under_way_stops_the_rest_of_a_message() {
    let mut pair = Pair::new(SimConfig::TIMED);
    let slow = LinkConfig { bytes_per_s: 1_024_000_000, ..LinkConfig::CALM };
    pair.fabric.set_link(pair.a.verbs.id(), pair.b.verbs.id(), slow);
    pair.a.mem.fill(1);
    pair.write(1, 0, 10 * 1_024);
    pair.fabric.advance_to(Instant::from_nanos(4_500));
    pair.b.verbs.deregister(pair.b.mr).unwrap();
    assert_eq!(pair.settle(), [(1, WcStatus::RemoteAccess)]);
    assert!(pair.b.mem.read(4_095, 2) == [1, 0], "four packets had come");
}

#[test]
fn a_bad_local_key_is_a_local_fault_after_what_went_before() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.write(1, 0, 100);
        let sge = Sge { local_key: pair.a.mr.local_key ^ 2, ..pair.a.sge(0, 8) };
        pair.a.post(pair.qa, &[pair.request(2, Op::Write, 0, 1)], &[sge]);
        pair.write(3, 0, 100);
        let end = [(1, WcStatus::Success), (2, WcStatus::Local), (3, WcStatus::Flushed)];
        assert_eq!(pair.settle(), end);

        // A READ into memory that may not be written.
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
fn a_target_that_is_not_ready_is_asked_again_and_given_up_at_the_limit() {
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

        // 7 is for ever.
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
fn retries_run_out_when_nobody_answers() {
    let breaks: [(&str, Change); 7] = [
        ("link down", |p| {
            let down = LinkConfig { down: true, ..LinkConfig::CALM };
            p.fabric.set_link(p.a.verbs.id(), p.b.verbs.id(), down);
        }),
        ("way back down", |p| {
            let down = LinkConfig { down: true, ..LinkConfig::CALM };
            p.fabric.set_link(p.b.verbs.id(), p.a.verbs.id(), down);
        }),
        ("own port down", |p| p.fabric.set_port(p.a.verbs.id(), false)),
        ("peer's port down", |p| p.fabric.set_port(p.b.verbs.id(), false)),
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
            assert_eq!(pair.fabric.counters().retried, 3, "{what}: as many retries as the path says");
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
    // Two timeouts of 4.096 µs × 2^10, then it is up.
    pair.fabric.advance_to(Instant::from_nanos(2 * 4_096 * 1_024 + 1));
    pair.fabric.set_link(a, b, LinkConfig::CALM);
    assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
    assert_eq!(pair.fabric.counters().retried, 3);
}

#[test]
fn loss_and_duplicates_do_not_show() {
    for seed in 0..20u64 {
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
            assert_eq!(pair.settle(), [(2 * round, WcStatus::Success)], "seed {seed}");
            assert!(pair.b.mem.read(1_000, 6_000) == vec![round as u8 + 1; 6_000]);
            pair.a.mem.fill(0);
            pair.read(2 * round + 1, 1_000, 6_000);
            assert_eq!(pair.settle(), [(2 * round + 1, WcStatus::Success)], "seed {seed}");
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
fn error_flushes_everything_posted_in_order_signaled_or_not() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        for id in 0..5 {
            let request = WorkRequest { signaled: id % 2 == 0, ..pair.request(id, Op::Write, 0, 1) };
            pair.a.post(pair.qa, &[request], &[pair.a.sge(0, 8)]);
        }
        pair.a.verbs.modify_qp(pair.qa.handle, QpStep::Error).unwrap();
        let flushed: Vec<_> = (0..5).map(|id| (id, WcStatus::Flushed)).collect();
        assert_eq!(pair.a.poll(), flushed);
        // What is posted afterwards, too.
        pair.write(9, 0, 8);
        assert_eq!(pair.a.poll(), [(9, WcStatus::Flushed)]);
    }
}

#[test]
fn unsignaled_work_ends_with_the_next_signaled_one() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        pair.a.mem.fill(5);
        for id in 0..8 {
            let request = WorkRequest { signaled: id == 7, ..pair.request(id, Op::Write, 100 * id, 1) };
            pair.a.post(pair.qa, &[request], &[pair.a.sge(0, 100)]);
        }
        assert_eq!(pair.settle(), [(7, WcStatus::Success)]);
        assert!(pair.b.mem.read(0, 801) == [vec![5; 800], vec![0]].concat());
    }
}

#[test]
fn a_polled_completion_frees_the_slots_of_what_went_before_it() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        for round in 0..20 {
            for id in 0..u64::from(QP.depth) {
                let request = WorkRequest {
                    signaled: id + 1 == u64::from(QP.depth),
                    ..pair.request(id, Op::Write, 0, 1)
                };
                pair.a.post(pair.qa, &[request], &[pair.a.sge(0, 8)]);
            }
            assert_eq!(pair.settle().len(), 1, "round {round}");
        }
    }
}

#[test]
fn a_full_send_queue_takes_no_more_until_a_completion_was_polled() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let depth = QP.depth as usize;
        let requests: Vec<_> = (0..depth as u64 + 3).map(|id| pair.request(id, Op::Write, 0, 1)).collect();
        let sges = vec![pair.a.sge(0, 8); requests.len()];
        // SAFETY: nothing is inline.
        let (taken, error) = unsafe { pair.a.verbs.post(pair.qa.handle, &requests, &sges) };
        assert_eq!(
            (taken, error.map(|e| (e.kind, e.code))),
            (depth, Some((ErrorKind::System, libc::ENOMEM)))
        );
        pair.fabric.run_until_idle();
        // Done, but not polled: still full.
        // SAFETY: nothing is inline.
        assert_eq!(unsafe { pair.a.verbs.post(pair.qa.handle, &requests[..1], &sges[..1]) }.0, 0);
        assert_eq!(pair.a.poll().len(), depth);
        // SAFETY: nothing is inline.
        assert_eq!(unsafe { pair.a.verbs.post(pair.qa.handle, &requests[..1], &sges[..1]) }.0, 1);
    }
}

#[test]
fn a_queue_of_unsignaled_work_alone_stays_full() {
    let mut pair = Pair::new(SimConfig::IMMEDIATE);
    let request = WorkRequest { signaled: false, ..pair.request(0, Op::Write, 0, 1) };
    for _ in 0..QP.depth {
        pair.a.post(pair.qa, &[request], &[pair.a.sge(0, 8)]);
    }
    assert_eq!(pair.settle(), []);
    // SAFETY: nothing is inline.
    assert_eq!(unsafe { pair.a.verbs.post(pair.qa.handle, &[request], &[pair.a.sge(0, 8)]) }.0, 0);
}

#[test]
fn inline_bytes_are_copied_at_once_and_need_no_key() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let outside = Mem::new(64);
        outside.fill(4);
        let request = WorkRequest { inline: true, ..pair.request(1, Op::Write, 0, 2) };
        let sges = [
            Sge { addr: outside.addr(), len: 30, local_key: 0 },
            Sge { addr: outside.addr() + 30, len: 34, local_key: 0 },
        ];
        pair.a.post(pair.qa, &[request], &sges);
        outside.fill(9);
        assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
        assert!(pair.b.mem.read(0, 65) == [vec![4; 64], vec![0]].concat());

        let too_long = [sges[0], Sge { len: 35, ..sges[1] }];
        // SAFETY: refused by its length, nothing is read.
        let refused = unsafe { pair.a.verbs.post(pair.qa.handle, &[request], &too_long) };
        assert_eq!(refused.0, 0);
        let read = WorkRequest { op: Op::Read, ..request };
        // SAFETY: a READ is never inline; refused.
        assert_eq!(unsafe { pair.a.verbs.post(pair.qa.handle, &[read], &sges) }.0, 0);
    }
}

#[test]
fn reads_in_flight_are_limited_and_hold_up_what_follows() {
    let mut pair = Pair::new(SimConfig::TIMED);
    for id in 0..6 {
        pair.read(id, 0, 8);
    }
    pair.write(6, 0, 8);
    assert_eq!(pair.fabric.counters().packets, 4, "the path allows four READs");
    let all: Vec<_> = (0..7).map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(pair.settle(), all);

    // Who sends more than the target agreed to is refused.
    let more = |to_b: &mut te_rdma::verbs::Path, _: &mut te_rdma::verbs::Path| to_b.reads_to_peer = 5;
    let mut pair = Pair::with(SimConfig::TIMED, DeviceConfig::default(), more);
    for id in 0..5 {
        pair.read(id, 0, 8);
    }
    assert!(pair.settle().contains(&(4, WcStatus::RemoteOperation)));
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
fn a_queue_pair_without_a_right_refuses_what_the_memory_would_allow() {
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
fn a_completion_queue_that_overruns_fails_and_says_so() {
    let device = DeviceConfig { cq_depth: 4, ..DeviceConfig::default() };
    for config in BOTH {
        let mut pair = Pair::with(config, device.clone(), |_, _| {});
        for id in 0..5 {
            pair.write(id, 0, 8);
        }
        pair.fabric.run_until_idle();
        assert_eq!(pair.a.verbs.next_event(), Some(AsyncEvent::CqError));
        assert!(pair.a.verbs.poll_cq(&mut [rig::EMPTY; 8]).is_err());
        pair.write(9, 0, 8);
        assert!(pair.a.verbs.poll_cq(&mut [rig::EMPTY; 8]).is_err());
    }
}

#[test]
fn steps_out_of_order_are_refused() {
    let mut pair = Pair::new(SimConfig::TIMED);
    let gid = pair.b.verbs.gid(3).unwrap().unwrap().raw;
    let path = rig::default_path(pair.qb, gid);
    let qp = pair.a.verbs.create_qp(QP).unwrap();
    let code = |result: Result<(), te_core::Error>| result.map_err(|error| error.code);
    assert_eq!(code(pair.a.verbs.modify_qp(qp.handle, QpStep::Connect(path))), Err(libc::EINVAL));
    // SAFETY: nothing is inline.
    let (taken, error) =
        unsafe { pair.a.verbs.post(qp.handle, &[pair.request(1, Op::Write, 0, 1)], &[pair.a.sge(0, 8)]) };
    assert_eq!((taken, error.map(|e| e.code)), (0, Some(libc::EINVAL)));
    assert_eq!(code(pair.a.verbs.modify_qp(qp.handle, QpStep::Init(ALL))), Ok(()));
    let bad = [
        te_rdma::verbs::Path { mtu_bytes: 1_000, ..path },
        te_rdma::verbs::Path { psn: 1 << 24, ..path },
        te_rdma::verbs::Path { gid_index: 99, ..path },
        te_rdma::verbs::Path { reads_to_peer: 17, ..path },
    ];
    for path in bad {
        assert_eq!(code(pair.a.verbs.modify_qp(qp.handle, QpStep::Connect(path))), Err(libc::EINVAL));
    }
    assert_eq!(code(pair.a.verbs.modify_qp(qp.handle, QpStep::Connect(path))), Ok(()));
    assert_eq!(code(pair.a.verbs.modify_qp(qp.handle, QpStep::Init(ALL))), Err(libc::EINVAL));
    assert_eq!(code(pair.a.verbs.modify_qp(QpHandle(999), QpStep::Error)), Err(libc::EINVAL));
    assert_eq!(code(pair.b.verbs.modify_qp(qp.handle, QpStep::Error)), Err(libc::EINVAL), "not its own");
}

#[test]
fn limits_and_failures_of_registration_have_their_errno() {
    let device = DeviceConfig {
        mr_bytes_max: 4_096,
        mr_count_max: 3,
        pinned_bytes_max: 10_000,
        ..DeviceConfig::default()
    };
    let fabric = SimFabric::new(1, SimConfig::TIMED);
    let verbs = fabric.device(device);
    let mem = Mem::new(1 << 16);
    // SAFETY: `Mem` is never freed and lends no references.
    let register = |len, access| unsafe { verbs.register(mem.span.part(0, len).unwrap(), access) };
    let code = |result: Result<_, te_core::Error>| {
        result.map(|_: te_rdma::verbs::Registration| ()).map_err(|e| e.code)
    };
    assert_eq!(code(register(4_097, ALL)), Err(libc::EINVAL));
    assert_eq!(code(register(0, ALL)), Err(libc::EINVAL));
    assert_eq!(code(register(8, MrAccess::REMOTE_WRITE)), Err(libc::EINVAL), "needs LOCAL_WRITE");
    let first = register(4_096, ALL).unwrap();
    assert_eq!(code(register(4_096, ALL)), Ok(()));
    assert_eq!(code(register(4_096, ALL)), Err(libc::ENOMEM), "locked-memory limit");
    assert_eq!(code(register(8, ALL)), Ok(()));
    assert_eq!(code(register(8, ALL)), Err(libc::ENOMEM), "number of registrations");
    verbs.deregister(first).unwrap();
    fabric.fail_registrations(verbs.id(), libc::EFAULT, 2);
    assert_eq!(code(register(8, ALL)), Err(libc::EFAULT));
    assert_eq!(code(register(8, ALL)), Err(libc::EFAULT));
    assert_eq!(code(register(8, ALL)), Ok(()));
    assert_eq!(fabric.mr_count(verbs.id()), 3);
    assert_eq!(
        verbs.register_dmabuf(0, 0, 8, 0, ALL).map_err(|error| error.kind),
        Err(ErrorKind::Unsupported)
    );
}

#[test]
fn limits_and_failures_of_queue_pairs_have_their_errno() {
    let device = DeviceConfig { qp_count_max: 2, qp_depth_max: 64, ..DeviceConfig::default() };
    let fabric = SimFabric::new(1, SimConfig::TIMED);
    let mut verbs = fabric.device(device);
    let code = |result: Result<te_rdma::verbs::Qp, te_core::Error>| result.map(|_| ()).map_err(|e| e.code);
    assert_eq!(code(verbs.create_qp(QpConfig { depth: 65, ..QP })), Err(libc::EINVAL));
    assert_eq!(code(verbs.create_qp(QpConfig { sges: 17, ..QP })), Err(libc::EINVAL));
    let first = verbs.create_qp(QpConfig { inline_bytes: 4_096, ..QP }).unwrap();
    assert_eq!(first.config.inline_bytes, 256, "lowered to what the device takes");
    assert_eq!(code(verbs.create_qp(QP)), Ok(()));
    assert_eq!(code(verbs.create_qp(QP)), Err(libc::ENOMEM));
    verbs.destroy_qp(first.handle).unwrap();
    assert_eq!(verbs.destroy_qp(first.handle).map_err(|e| e.code), Err(libc::EINVAL));
    fabric.fail_qp_creations(verbs.id(), libc::ENOMEM, 1);
    assert_eq!(code(verbs.create_qp(QP)), Err(libc::ENOMEM));
    let second = verbs.create_qp(QP).unwrap();
    assert_ne!(second.number, first.number);
    fabric.fail_qp_steps(verbs.id(), libc::ETIMEDOUT, 1);
    let step = QpStep::Init(ALL);
    assert_eq!(verbs.modify_qp(second.handle, step).map_err(|e| e.code), Err(libc::ETIMEDOUT));
    assert_eq!(verbs.modify_qp(second.handle, step), Ok(()));
}

#[test]
fn a_destroyed_queue_pair_loses_its_completions() {
    let mut pair = Pair::new(SimConfig::IMMEDIATE);
    let (qa2, _qb2) = connect(&mut pair.a, &mut pair.b, QP, |_, _| {});
    pair.write(1, 0, 8);
    let (request, sge) = (pair.request(2, Op::Write, 0, 1), pair.a.sge(0, 8));
    pair.a.post(qa2, &[request], &[sge]);
    pair.fabric.run_until_idle();
    pair.a.verbs.destroy_qp(pair.qa.handle).unwrap();
    assert_eq!(pair.a.poll(), [(2, WcStatus::Success)]);
}

#[test]
fn an_event_is_raised_once_for_each_arming() {
    let readable = |fd: i32| {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives for the call.
        assert!(unsafe { libc::poll(&raw mut poll, 1, 0) } >= 0);
        poll.revents & libc::POLLIN != 0
    };
    for config in BOTH {
        let mut pair = Pair::new(config);
        let [Some(completions), Some(events)] = pair.a.verbs.event_fds() else { panic!("two descriptors") };
        pair.write(1, 0, 8);
        pair.fabric.run_until_idle();
        assert!(!readable(completions), "nobody asked");
        pair.a.verbs.arm().unwrap();
        assert!(!readable(completions), "what was there before raises nothing");
        pair.write(2, 0, 8);
        pair.fabric.run_until_idle();
        assert!(readable(completions));
        assert_eq!(pair.a.verbs.next_event(), None);
        assert!(!readable(completions), "taken");
        pair.write(3, 0, 8);
        pair.fabric.run_until_idle();
        assert!(!readable(completions), "once");

        assert!(!readable(events));
        pair.fabric.set_port(pair.a.verbs.id(), false);
        pair.fabric.set_port(pair.a.verbs.id(), false);
        pair.fabric.set_port(pair.a.verbs.id(), true);
        pair.fabric.set_gid(pair.a.verbs.id(), 3, None);
        assert!(readable(events));
        let told: Vec<_> = std::iter::from_fn(|| pair.a.verbs.next_event()).collect();
        assert_eq!(told, [AsyncEvent::PortError, AsyncEvent::PortActive, AsyncEvent::GidChange]);
        assert!(!readable(events));
    }
}

#[test]
fn a_gid_that_was_taken_away_takes_its_queue_pairs_along() {
    for config in BOTH {
        for own in [true, false] {
            let mut pair = Pair::new(config);
            pair.write(1, 0, 8);
            assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
            let port = if own { pair.a.verbs.id() } else { pair.b.verbs.id() };
            let mut raw = pair.a.verbs.gid(3).unwrap().unwrap().raw;
            raw[15] = 77;
            pair.fabric.set_gid(port, 3, Some((raw, GidKind::RoceV2)));
            pair.write(2, 0, 8);
            assert_eq!(pair.settle(), [(2, WcStatus::RetriesExceeded)]);
        }
    }
}

#[test]
fn infiniband_finds_its_peer_by_lid() {
    let device = DeviceConfig { infiniband: true, ..DeviceConfig::default() };
    for right in [true, false] {
        let mut pair = Pair::with(SimConfig::TIMED, DeviceConfig::default(), |_, _| {});
        let mut a = Node::new(pair.fabric.device(device.clone()), BUFFER_BYTES);
        let mut b = Node::new(pair.fabric.device(device.clone()), BUFFER_BYTES);
        let (qa, qb) = (a.verbs.create_qp(QP).unwrap(), b.verbs.create_qp(QP).unwrap());
        let (lid_a, lid_b) = (a.verbs.port().unwrap().lid, b.verbs.port().unwrap().lid);
        for (node, qp, peer, lid) in [(&mut a, qa, qb, lid_b), (&mut b, qb, qa, lid_a)] {
            let path = rig::default_path(peer, [0; 16]);
            let path =
                te_rdma::verbs::Path { gid_index: 0, peer_lid: if right { lid } else { lid + 9 }, ..path };
            node.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
            node.verbs.modify_qp(qp.handle, QpStep::Connect(path)).unwrap();
        }
        (pair.a, pair.b, pair.qa, pair.qb) = (a, b, qa, qb);
        pair.write(1, 0, 8);
        let status = if right { WcStatus::Success } else { WcStatus::RetriesExceeded };
        assert_eq!(pair.settle(), [(1, status)]);
    }
}

#[test]
fn a_dead_device_says_so_and_can_be_taken_down() {
    let mut pair = Pair::new(SimConfig::TIMED);
    pair.write(1, 0, 8);
    pair.fabric.kill(pair.a.verbs.id());
    assert_eq!(pair.a.verbs.next_event(), Some(AsyncEvent::DeviceFatal));
    assert_eq!(pair.a.verbs.poll_cq(&mut [rig::EMPTY]).map_err(|e| e.code), Err(libc::EIO));
    assert!(pair.a.verbs.port().is_err() && pair.a.verbs.gid(0).is_err() && pair.a.verbs.arm().is_err());
    assert!(pair.a.verbs.create_qp(QP).is_err());
    pair.a.verbs.destroy_qp(pair.qa.handle).unwrap();
    pair.a.verbs.deregister(pair.a.mr).unwrap();
}

#[test]
fn a_queue_pair_can_be_failed_from_outside() {
    let mut pair = Pair::new(SimConfig::TIMED);
    pair.write(1, 0, 8);
    pair.fabric.fail_qp(pair.a.verbs.id(), pair.qa.number);
    assert_eq!(pair.a.verbs.next_event(), Some(AsyncEvent::QpError(pair.qa.number)));
    assert_eq!(pair.a.poll(), [(1, WcStatus::Flushed)]);
}

#[test]
fn a_status_can_be_made_up() {
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

#[test]
fn a_queue_pair_may_be_connected_to_itself() {
    for config in BOTH {
        let fabric = SimFabric::new(1, config);
        let mut node = Node::new(fabric.device(DeviceConfig::default()), BUFFER_BYTES);
        let qp = node.verbs.create_qp(QP).unwrap();
        let gid = node.verbs.gid(3).unwrap().unwrap().raw;
        node.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
        node.verbs.modify_qp(qp.handle, QpStep::Connect(rig::default_path(qp, gid))).unwrap();
        node.mem.write(0, &[5; 100]);
        let request = |id, op, key| WorkRequest {
            id,
            op,
            signaled: true,
            inline: false,
            sges: 1,
            remote_addr: node.mem.addr() + 200,
            remote_key: key,
        };
        let key = node.mr.remote_key;
        let requests =
            [request(1, Op::Write, key), request(2, Op::Read, key), request(3, Op::Write, key ^ 1)];
        let sges = [node.sge(0, 100), node.sge(500, 100), node.sge(0, 100)];
        node.post(qp, &requests, &sges);
        fabric.run_until_idle();
        let end = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::RemoteAccess)];
        assert_eq!(node.poll(), end);
        assert_eq!(node.mem.read(500, 100), vec![5; 100]);
    }
}

#[test]
fn a_message_without_bytes_needs_no_key() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let request = |id, op| WorkRequest { remote_key: 0, ..pair.request(id, op, 0, 0) };
        let requests = [request(1, Op::Write), request(2, Op::Read)];
        pair.a.post(pair.qa, &requests, &[]);
        assert_eq!(pair.settle(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    }
}

#[test]
fn posting_and_polling_allocate_nothing() {
    for config in BOTH {
        let mut pair = Pair::new(config);
        let requests: Vec<_> = (0..32)
            .map(|id| pair.request(id, if id % 4 == 0 { Op::Read } else { Op::Write }, 0, 1))
            .collect();
        let sges = vec![pair.a.sge(0, 4_096); 32];
        let mut out = [rig::EMPTY; 32];
        let mut round = || {
            pair.a.post(pair.qa, &requests, &sges);
            pair.fabric.run_until_idle();
            assert_eq!(pair.a.verbs.poll_cq(&mut out).unwrap(), 32);
        };
        round();
        round();
        let before = allocations();
        for _ in 0..100 {
            round();
        }
        assert_eq!(allocations() - before, 0, "{config:?}");
    }
}

//! The behaviour of the simulated provider without faults, on which the tests of the transport rely. The rest
//! is in `verbs_sim_faults`, `verbs_sim_control` and `verbs_sim_late`.

#![allow(clippy::unwrap_used, reason = "a test")]

mod rig;

use rig::{ALL, BUFFER_BYTES, Mem, Node, Pair, QP};
use te_core::testkit::{CountingAlloc, allocations};
use te_core::{ErrorKind, Instant, Op};
use te_rdma::sim::{DeviceConfig, LinkConfig, SimConfig, SimFabric};
use te_rdma::verbs::{QpStep, Sge, Verbs as _, WcStatus, WorkRequest};

#[global_allocator]
static ALLOC: CountingAlloc<std::alloc::System> = CountingAlloc::new(std::alloc::System);

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
        // Requests that are posted afterwards are flushed as well.
        pair.write(9, 0, 8);
        assert_eq!(pair.a.poll(), [(9, WcStatus::Flushed)]);
    }
}

#[test]
fn unsignaled_requests_end_with_the_next_signaled_one() {
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
fn a_polled_completion_frees_the_slots_of_earlier_requests() {
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
        // Executed, but not polled: still full.
        // SAFETY: nothing is inline.
        assert_eq!(unsafe { pair.a.verbs.post(pair.qa.handle, &requests[..1], &sges[..1]) }.0, 0);
        assert_eq!(pair.a.poll().len(), depth);
        // SAFETY: nothing is inline.
        assert_eq!(unsafe { pair.a.verbs.post(pair.qa.handle, &requests[..1], &sges[..1]) }.0, 1);
    }
}

#[test]
fn a_queue_of_unsignaled_requests_stays_full() {
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

    // More READs than the target agreed to are refused.
    let more = |to_b: &mut te_rdma::verbs::Path, _: &mut te_rdma::verbs::Path| to_b.reads_to_peer = 5;
    let mut pair = Pair::with(SimConfig::TIMED, DeviceConfig::default(), more);
    for id in 0..5 {
        pair.read(id, 0, 8);
    }
    assert!(pair.settle().contains(&(4, WcStatus::RemoteOperation)));
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

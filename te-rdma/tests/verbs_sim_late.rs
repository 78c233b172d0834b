//! Packets that land late, twice or not at all: the reasons why a transport needs fences (law L5).
#![allow(clippy::unwrap_used, reason = "a test")]

mod rig;

use rig::Pair;
use te_core::Instant;
use te_rdma::sim::{LinkConfig, SimConfig};
use te_rdma::verbs::{QpStep, Verbs as _, WcStatus};

type Change = fn(&mut Pair);

/// Ways in which a sender ends while its packets are on the wire.
fn ends_of_a_sender() -> [(&'static str, Change); 3] {
    [
        ("error", |p| p.a.verbs.modify_qp(p.qa.handle, QpStep::Error).unwrap()),
        ("destroyed", |p| p.a.verbs.destroy_qp(p.qa.handle).unwrap()),
        ("device killed", |p| p.fabric.kill(p.a.verbs.id())),
    ]
}

#[test]
fn packets_on_the_wire_land_after_their_sender_has_ended() {
    for (what, end) in ends_of_a_sender() {
        let mut pair = Pair::new(SimConfig::TIMED);
        pair.a.mem.fill(1);
        pair.write(1, 0, 5_000);
        end(&mut pair);
        // The memory is used for something else now. The packets have copies.
        pair.a.mem.fill(2);
        assert!(pair.b.mem.is_all(0));
        pair.fabric.run_until_idle();
        assert!(pair.b.mem.read(0, 5_001) == [vec![1; 5_000], vec![0]].concat(), "{what}");
        assert_eq!(pair.fabric.counters().landed_late, 5, "{what}");
    }
}

#[test]
fn nothing_lands_when_the_targets_queue_pair_is_in_error_or_destroyed() {
    let fences: [Change; 3] = [
        |p| p.b.verbs.modify_qp(p.qb.handle, QpStep::Error).unwrap(),
        |p| p.b.verbs.destroy_qp(p.qb.handle).unwrap(),
        |p| p.b.verbs.deregister(p.b.mr).unwrap(),
    ];
    for (_, end) in ends_of_a_sender() {
        for fence in fences {
            let mut pair = Pair::new(SimConfig::TIMED);
            pair.a.mem.fill(1);
            pair.write(1, 0, 5_000);
            end(&mut pair);
            fence(&mut pair);
            pair.fabric.run_until_idle();
            assert!(pair.b.mem.is_all(0));
            assert_eq!(pair.fabric.counters().landed_late, 0);
        }
    }
}

#[test]
fn packets_that_were_not_sent_when_the_queue_pair_fails_never_land() {
    let mut pair = Pair::new(SimConfig::TIMED);
    let slow = LinkConfig { bytes_per_s: 1_024_000_000, ..LinkConfig::CALM };
    pair.fabric.set_link(pair.a.verbs.id(), pair.b.verbs.id(), slow);
    pair.a.mem.fill(1);
    pair.write(1, 0, 10 * 1_024);
    pair.fabric.advance_to(Instant::from_nanos(2_500));
    pair.a.verbs.modify_qp(pair.qa.handle, QpStep::Error).unwrap();
    assert_eq!(pair.settle(), [(1, WcStatus::Flushed)]);
    // Packets were sent at 0, 1, 2 µs.
    assert!(pair.b.mem.read(3_071, 2) == [1, 0]);
}

#[test]
fn a_flushed_read_never_writes_here_again() {
    let mut pair = Pair::new(SimConfig::TIMED);
    pair.b.mem.fill(8);
    pair.read(1, 0, 5_000);
    pair.fabric.advance_to(Instant::from_nanos(1_500));
    pair.a.verbs.modify_qp(pair.qa.handle, QpStep::Error).unwrap();
    assert_eq!(pair.settle(), [(1, WcStatus::Flushed)]);
    assert!(pair.a.mem.is_all(0));
}

#[test]
fn a_repeated_write_is_acknowledged_and_not_executed_again() {
    let mut pair = Pair::new(SimConfig::TIMED);
    let back = (pair.b.verbs.id(), pair.a.verbs.id());
    pair.fabric.set_link(back.0, back.1, LinkConfig { down: true, ..LinkConfig::CALM });
    pair.a.mem.fill(1);
    pair.write(1, 0, 3_000);
    pair.fabric.advance_to(Instant::from_micros(100));
    assert_eq!(pair.b.mem.read(2_999, 2), [1, 0]);
    // The acknowledgement is lost. The target's process uses its memory; the sender repeats the packets.
    pair.b.mem.fill(9);
    pair.fabric.set_link(back.0, back.1, LinkConfig::CALM);
    assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
    assert!(pair.fabric.counters().duplicates > 0);
    assert!(pair.b.mem.is_all(9));
}

#[test]
fn a_response_that_finds_the_port_down_is_requested_again() {
    let mut pair = Pair::new(SimConfig::TIMED);
    pair.b.mem.fill(8);
    pair.read(1, 0, 3_000);
    pair.fabric.advance_to(Instant::from_nanos(1_500));
    pair.fabric.set_port_active(pair.a.verbs.id(), false);
    pair.fabric.advance_to(Instant::from_micros(10));
    assert!(pair.a.mem.is_all(0));
    pair.fabric.set_port_active(pair.a.verbs.id(), true);
    assert_eq!(pair.settle(), [(1, WcStatus::Success)]);
    assert_eq!(pair.a.mem.read(2_999, 2), [8, 0]);
    assert!(pair.fabric.counters().retried > 0);
}

#[test]
fn only_a_destroyed_queue_pair_is_a_fence_on_devices_that_linger() {
    for destroyed in [false, true] {
        let mut pair = Pair::new(SimConfig::TIMED);
        pair.fabric.linger_in_error(pair.b.verbs.id(), 2);
        pair.a.mem.fill(1);
        pair.write(1, 0, 5_000);
        pair.b.verbs.modify_qp(pair.qb.handle, QpStep::Error).unwrap();
        if destroyed {
            pair.b.verbs.destroy_qp(pair.qb.handle).unwrap();
        }
        pair.fabric.run_until_idle();
        let landed = if destroyed { 0 } else { 2 * 1_024 };
        assert!(pair.b.mem.read(0, 5_000) == [vec![1; landed], vec![0; 5_000 - landed]].concat());
    }
}

//! The control path of the simulated provider: state changes, limits, events, ports.

#![allow(clippy::unwrap_used, reason = "a test")]

mod rig;

use std::os::fd::{AsFd as _, AsRawFd as _};

use rig::{ALL, BUFFER_BYTES, Mem, Node, Pair, QP, connect};
use te_core::{ErrorKind, Op};
use te_rdma::sim::{DeviceConfig, SimConfig, SimFabric};
use te_rdma::verbs::{
    AsyncEvent, DeviceFeatures, GidKind, MrAccess, QpConfig, QpHandle, QpStep, Verbs as _, WcStatus,
};

const BOTH: [SimConfig; 2] = [SimConfig::TIMED, SimConfig::IMMEDIATE];

#[test]
fn a_completion_queue_that_overruns_fails_and_raises_an_event() {
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
fn state_changes_out_of_order_are_refused() {
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
    assert_eq!(
        code(pair.b.verbs.modify_qp(qp.handle, QpStep::Error)),
        Err(libc::EINVAL),
        "of another device"
    );
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
}

#[test]
fn a_dmabuf_is_registered_by_a_device_that_can_and_refused_as_the_kernel_does() {
    let fabric = SimFabric::new(1, SimConfig::TIMED);
    let file = tempfile::tempfile().unwrap();
    file.set_len(8_192).unwrap();
    let able = DeviceConfig { features: DeviceFeatures::DMABUF, ..DeviceConfig::default() };
    let (without, with) = (fabric.device(DeviceConfig::default()), fabric.device(able));
    let refused = without.register_dmabuf(file.as_fd(), 0, 8, 0, ALL);
    assert_eq!(refused.map_err(|error| error.kind), Err(ErrorKind::Unsupported));
    let register = |offset, len, address| {
        let registered = with.register_dmabuf(file.as_fd(), offset, len, address, ALL);
        registered.map(|_| ()).map_err(|error| error.code)
    };
    assert_eq!(register(4_000, 4_192, 4_000), Ok(()));
    assert_eq!(register(4_000, 4_193, 4_000), Err(libc::EINVAL), "beyond the end");
    assert_eq!(register(100, 8, 0), Err(libc::EINVAL), "another place in the page");
    assert_eq!(register(0, 0, 0), Err(libc::EINVAL), "no bytes");
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
fn an_event_is_raised_once_per_request() {
    let readable = |fd: i32| {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives for the call.
        assert!(unsafe { libc::poll(&raw mut poll, 1, 0) } >= 0);
        poll.revents & libc::POLLIN != 0
    };
    for config in BOTH {
        let mut pair = Pair::new(config);
        let fds = pair.a.verbs.event_fds().map(|fd| fd.map(|fd| fd.as_raw_fd()));
        let [Some(completions), Some(events)] = fds else { panic!("two file descriptors") };
        pair.write(1, 0, 8);
        pair.fabric.run_until_idle();
        assert!(!readable(completions), "no event was requested");
        pair.a.verbs.arm().unwrap();
        assert!(!readable(completions), "earlier completions raise none");
        pair.write(2, 0, 8);
        pair.fabric.run_until_idle();
        assert!(readable(completions));
        assert_eq!(pair.a.verbs.next_event(), None);
        assert!(!readable(completions), "taken");
        pair.write(3, 0, 8);
        pair.fabric.run_until_idle();
        assert!(!readable(completions), "once");

        assert!(!readable(events));
        pair.fabric.set_port_active(pair.a.verbs.id(), false);
        pair.fabric.set_port_active(pair.a.verbs.id(), false);
        pair.fabric.set_port_active(pair.a.verbs.id(), true);
        pair.fabric.set_gid(pair.a.verbs.id(), 3, None);
        assert!(readable(events));
        let raised: Vec<_> = std::iter::from_fn(|| pair.a.verbs.next_event()).collect();
        assert_eq!(raised, [AsyncEvent::PortError, AsyncEvent::PortActive, AsyncEvent::GidChange]);
        assert!(!readable(events));
    }
}

#[test]
fn queue_pairs_with_a_removed_gid_reach_nothing() {
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
fn infiniband_addresses_its_peer_by_lid() {
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
fn a_failed_device_raises_an_event_and_its_objects_can_be_destroyed() {
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

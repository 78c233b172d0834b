//! Real devices: list, open, register, connect a queue pair to itself, WRITE, READ, error and flush, destroy.
//!
//! Without a device these tests are reported as ignored, and the reason is printed. A software device is
//! enough: `rdma link add rxe0 type rxe netdev eth0`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod rig;

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use rig::{ALL, EMPTY, Mem, Node};
use te_core::Op;
use te_core::testkit::pattern;
use te_rdma::sys::{Device, SystemVerbs};
use te_rdma::verbs::{
    DeviceFeatures, Gid, GidKind, MrAccess, Path, Qp, QpConfig, QpStep, Sge, Verbs as _, WcStatus,
    WorkRequest,
};

const BYTES: usize = 1 << 20;
/// After this time a test fails. Software devices under emulation are slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// A device and one of its active ports.
#[derive(Clone)]
struct Place {
    name: String,
    port: u8,
}

type Test = fn(&Place);

const TESTS: [(&str, Test); 16] = [
    ("a_device_reports_its_limits", a_device_reports_its_limits),
    ("a_write_and_a_read_through_a_queue_pair_to_itself", a_write_and_a_read_through_a_queue_pair_to_itself),
    ("pieces_are_gathered_and_scattered", pieces_are_gathered_and_scattered),
    ("inline_bytes_are_copied_at_once", inline_bytes_are_copied_at_once),
    ("only_signaled_work_is_reported", only_signaled_work_is_reported),
    ("two_devices_are_opened_and_connected", two_devices_are_opened_and_connected),
    ("error_flushes_in_order", error_flushes_in_order),
    ("posted_work_succeeds_or_is_flushed_in_order", posted_work_succeeds_or_is_flushed_in_order),
    (
        "after_the_targets_queue_pair_is_destroyed_nothing_lands_there",
        after_the_targets_queue_pair_is_destroyed_nothing_lands_there,
    ),
    ("a_wrong_key_is_refused_and_nothing_is_written", a_wrong_key_is_refused_and_nothing_is_written),
    ("a_key_ends_with_its_registration", a_key_ends_with_its_registration),
    ("a_peer_that_is_not_there_costs_the_retries", a_peer_that_is_not_there_costs_the_retries),
    ("a_full_send_queue_takes_a_prefix", a_full_send_queue_takes_a_prefix),
    ("a_requested_event_makes_the_descriptor_readable", a_requested_event_makes_the_descriptor_readable),
    ("registrations_from_several_threads", registrations_from_several_threads),
    ("mistakes_give_an_errno_and_no_harm", mistakes_give_an_errno_and_no_harm),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // The tests share one device and its limits, and the log stays readable.
    arguments.test_threads = Some(1);
    let place = place();
    if let Err(reason) = &place {
        println!("ignored: {reason}");
    }
    let trials = TESTS
        .into_iter()
        .map(|(name, test)| {
            let here = place.clone();
            let trial = Trial::test(name, move || {
                if let Ok(place) = here {
                    test(&place);
                }
                Ok(())
            });
            trial.with_ignored_flag(place.is_err())
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The first active port; else the reason why there is none.
fn place() -> Result<Place, String> {
    let devices = Device::list().map_err(|reason| reason.to_string())?;
    for device in &devices {
        println!("device {device:?}");
    }
    devices
        .iter()
        .find_map(|device| {
            let port = device.ports.iter().find(|port| port.state == "ACTIVE")?;
            Some(Place { name: device.name.clone(), port: port.number })
        })
        .ok_or_else(|| format!("no port is active: bring its link up ({devices:?})"))
}

impl Place {
    fn open(&self) -> Node<SystemVerbs> {
        Node::new(Device::open(&self.name, self.port).unwrap(), BYTES)
    }
}

impl Node<SystemVerbs> {
    /// The GID to use: RoCE v2 over IPv4 if there is one.
    fn gid(&self) -> Gid {
        let gids = self.verbs.port().unwrap().gids;
        let all: Vec<Gid> = (0..gids.min(256)).filter_map(|index| self.verbs.gid(index).unwrap()).collect();
        let ipv4 = |gid: &&Gid| {
            gid.kind == GidKind::RoceV2 && gid.raw[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255]
        };
        *all.iter().find(ipv4).or(all.first()).expect("a GID")
    }

    fn path(&self, peer: Qp) -> Path {
        let (port, gid) = (self.verbs.port().unwrap(), self.gid());
        let reads = self.verbs.info().reads_max.min(4);
        Path {
            peer_qp: peer.number,
            peer_lid: port.lid,
            peer_gid: gid.raw,
            gid_index: gid.index,
            mtu_bytes: port.mtu_bytes,
            peer_psn: 0x1234,
            psn: 0x1234,
            reads_from_peer: reads,
            reads_to_peer: reads,
            traffic_class: 0,
            service_level: 0,
            timeout_exponent: 14,
            retries: 3,
            rnr_retries: 3,
        }
    }

    /// A queue pair that is its own peer.
    fn loopback(&mut self) -> Qp {
        let config = QpConfig { depth: 64, sges: 4, inline_bytes: 64 };
        let qp = self.verbs.create_qp(config).unwrap();
        assert!(qp.config.depth >= 64 && qp.config.sges >= 4, "{qp:?}");
        self.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
        self.verbs.modify_qp(qp.handle, QpStep::Connect(self.path(qp))).unwrap();
        qp
    }

    fn request(&self, id: u64, op: Op, offset: u64, sges: u32) -> WorkRequest {
        WorkRequest {
            id,
            op,
            signaled: true,
            inline: false,
            sges,
            remote_addr: self.mem.addr() + offset,
            remote_key: self.mr.remote_key,
        }
    }

    /// Polls until there are `count` completions.
    fn wait(&mut self, count: usize) -> Vec<(u64, WcStatus)> {
        let (give_up, mut all) = (Instant::now() + PATIENCE, Vec::new());
        while all.len() < count {
            assert!(Instant::now() < give_up, "{} of {count} completions: {all:?}", all.len());
            all.extend(self.poll());
        }
        all
    }
}

/// Queue pairs of two devices, connected.
fn connect(a: &mut Node<SystemVerbs>, b: &mut Node<SystemVerbs>) -> (Qp, Qp) {
    let config = QpConfig { depth: 64, sges: 1, inline_bytes: 0 };
    let (qa, qb) = (a.verbs.create_qp(config).unwrap(), b.verbs.create_qp(config).unwrap());
    let paths = [a.path(qb), b.path(qa)];
    for (node, qp, path) in [(a, qa, paths[0]), (b, qb, paths[1])] {
        node.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
        node.verbs.modify_qp(qp.handle, QpStep::Connect(path)).unwrap();
    }
    (qa, qb)
}

/// Long enough for packets on the wire to arrive.
fn let_packets_arrive() {
    std::thread::sleep(Duration::from_millis(300)); // timing: packets that must not land cannot be observed
}

fn a_device_reports_its_limits(place: &Place) {
    let node = place.open();
    let info = node.verbs.info();
    println!(
        "{info:?}\n{:?}\n{:?}, registered memory survives a fork: {:?}",
        node.verbs.port(),
        node.gid(),
        te_rdma::sys::survives_fork()
    );
    assert_eq!((info.name.as_str(), info.port), (place.name.as_str(), place.port));
    assert!(info.mr_bytes_max >= BYTES as u64 && info.qp_depth_max >= 16 && info.cq_depth >= 16);
    assert!(info.sge_max >= 1 && info.reads_max >= 1 && info.message_bytes_max >= 1 << 20);
    let port = node.verbs.port().unwrap();
    assert!(port.active && port.mtu_bytes >= 256 && port.gids >= 1);
    assert!(node.verbs.event_fds().iter().all(Option::is_some));
    assert!(Device::open(&place.name, 200).is_err());
}

fn a_write_and_a_read_through_a_queue_pair_to_itself(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let bytes = pattern(1, 300_000);
    node.mem.write(0, &bytes);
    let (write, sge) = (node.request(1, Op::Write, 400_000, 1), node.sge(0, 300_000));
    node.post(qp, &[write], &[sge]);
    assert_eq!(node.wait(1), [(1, WcStatus::Success)]);
    assert!(node.mem.read(400_000, 300_000) == bytes);
    assert_eq!(node.mem.read(700_000, 1), [0]);

    let (read, sge) = (node.request(2, Op::Read, 400_001, 1), node.sge(800_000, 100_000));
    node.post(qp, &[read], &[sge]);
    assert_eq!(node.wait(1), [(2, WcStatus::Success)]);
    assert!(node.mem.read(800_000, 100_000) == bytes[1..100_001]);
    node.verbs.destroy_qp(qp.handle).unwrap();
    node.verbs.deregister(node.mr).unwrap();
}

fn pieces_are_gathered_and_scattered(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let bytes = pattern(2, 100_000);
    node.mem.write(0, &bytes);
    let pieces = [node.sge(10, 5_000), node.sge(50_000, 1), node.sge(90_000, 3_000)];
    let expected = [&bytes[10..5_010], &bytes[50_000..50_001], &bytes[90_000..93_000]].concat();
    let write = node.request(1, Op::Write, 200_000, 3);
    // Two requests share one doorbell, and the list is divided between them.
    let read = node.request(2, Op::Read, 200_000, 2);
    let all = [pieces[0], pieces[1], pieces[2], node.sge(300_000, 4_000), node.sge(310_000, 4_001)];
    node.post(qp, &[write, read], &all);
    assert_eq!(node.wait(2), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert!(node.mem.read(200_000, expected.len()) == expected);
    assert!(node.mem.read(300_000, 4_000) == expected[..4_000]);
    assert!(node.mem.read(310_000, 4_001) == expected[4_000..]);
}

fn inline_bytes_are_copied_at_once(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let outside = Mem::new(64);
    let len = 64.min(qp.config.inline_bytes);
    println!("inline: {} bytes", qp.config.inline_bytes);
    if len == 0 {
        return;
    }
    outside.fill(4);
    let request = WorkRequest { inline: true, ..node.request(1, Op::Write, 0, 1) };
    node.post(qp, &[request], &[Sge { addr: outside.addr(), len, local_key: 0 }]);
    outside.fill(9);
    assert_eq!(node.wait(1), [(1, WcStatus::Success)]);
    assert!(node.mem.read(0, len as usize) == vec![4; len as usize]);
}

fn only_signaled_work_is_reported(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let quiet = |id| WorkRequest { signaled: false, ..node.request(id, Op::Write, 500_000, 1) };
    let requests = [quiet(1), quiet(2), node.request(3, Op::Write, 500_000, 1)];
    let sges = [node.sge(0, 100); 3];
    node.post(qp, &requests, &sges);
    assert_eq!(node.wait(1), [(3, WcStatus::Success)]);
    assert_eq!(node.poll(), []);
}

fn two_devices_are_opened_and_connected(place: &Place) {
    let (mut a, mut b) = (place.open(), place.open());
    let (qa, qb) = connect(&mut a, &mut b);
    let bytes = pattern(3, BYTES);
    a.mem.write(0, &bytes);
    let (write, sge) = (b.request(1, Op::Write, 0, 1), a.sge(0, BYTES as u32));
    a.post(qa, &[write], &[sge]);
    assert_eq!(a.wait(1), [(1, WcStatus::Success)]);
    assert!(b.mem.read(0, BYTES) == bytes);
    let (read, sge) = (a.request(2, Op::Read, 100, 1), b.sge(0, 1_000));
    b.post(qb, &[read], &[sge]);
    assert_eq!(b.wait(1), [(2, WcStatus::Success)]);
    assert!(b.mem.read(0, 1_000) == bytes[100..1_100]);
}

fn error_flushes_in_order(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    node.verbs.modify_qp(qp.handle, QpStep::Error).unwrap();
    let requests: Vec<_> = (0..8).map(|id| node.request(id, Op::Write, 0, 1)).collect();
    let sges = [node.sge(0, 8); 8];
    node.post(qp, &requests, &sges);
    let flushed: Vec<_> = (0..8).map(|id| (id, WcStatus::Flushed)).collect();
    assert_eq!(node.wait(8), flushed);
}

fn posted_work_succeeds_or_is_flushed_in_order(place: &Place) {
    let (mut a, mut b) = (place.open(), place.open());
    let (qa, _qb) = connect(&mut a, &mut b);
    let requests: Vec<_> = (0..60).map(|id| b.request(id, Op::Write, 0, 1)).collect();
    let sges = vec![a.sge(0, BYTES as u32); 60];
    a.post(qa, &requests, &sges);
    a.verbs.modify_qp(qa.handle, QpStep::Error).unwrap();
    let ends = a.wait(60);
    let good = ends.iter().take_while(|(_, status)| *status == WcStatus::Success).count();
    println!("{good} of 60 had succeeded");
    assert!(good < 60, "all work had ended before: this proved nothing");
    let expected: Vec<_> = (0..60u64)
        .map(|id| (id, if (id as usize) < good { WcStatus::Success } else { WcStatus::Flushed }))
        .collect();
    assert_eq!(ends, expected);
    assert_eq!(a.poll(), []);
}

fn after_the_targets_queue_pair_is_destroyed_nothing_lands_there(place: &Place) {
    let (mut a, mut b) = (place.open(), place.open());
    let (mut stopped, mut after_error) = (0, 0);
    for round in 0..6 {
        let (qa, qb) = connect(&mut a, &mut b);
        a.mem.fill(1);
        b.mem.fill(0);
        let requests: Vec<_> = (0..60).map(|id| b.request(id, Op::Write, 0, 1)).collect();
        let sges = vec![a.sge(0, BYTES as u32); 60];
        a.post(qa, &requests, &sges);
        std::thread::sleep(Duration::from_millis(round)); // timing: varies how much of the work is executed
        b.verbs.modify_qp(qb.handle, QpStep::Error).unwrap();
        b.mem.fill(2);
        if round % 2 == 0 {
            // Some devices still execute the packet that they have begun. The number is printed, not checked.
            let_packets_arrive();
            let landed = b.mem.read(0, BYTES).iter().filter(|&&byte| byte != 2).count();
            println!("round {round}: {landed} bytes landed after the target's queue pair was in error");
            after_error += landed;
        }
        b.verbs.destroy_qp(qb.handle).unwrap();
        // L5: this is the target's confirmation. From here on nothing lands.
        b.mem.fill(3);
        let_packets_arrive();
        assert!(b.mem.is_all(3), "round {round}");
        a.verbs.modify_qp(qa.handle, QpStep::Error).unwrap();
        let ends = a.wait(60);
        let good = ends.iter().filter(|(_, status)| *status == WcStatus::Success).count();
        println!("{good} of 60 WRITEs had succeeded after {round} ms");
        stopped += 60 - good;
        a.verbs.destroy_qp(qa.handle).unwrap();
    }
    println!("{after_error} bytes in all landed between error and destruction");
    assert!(stopped > 0, "all work had ended before: this proved nothing");
}

fn a_wrong_key_is_refused_and_nothing_is_written(place: &Place) {
    let (mut a, mut b) = (place.open(), place.open());
    let cases: [(&str, u32, u64, Op); 4] = [
        ("unknown key", 0x00ff_0000, 0, Op::Write),
        ("over the end", 0, BYTES as u64 - 99, Op::Write),
        ("before the start", 0, 0u64.wrapping_sub(1), Op::Write),
        ("reading over the end", 0, BYTES as u64 - 99, Op::Read),
    ];
    for (what, key, offset, op) in cases {
        let (qa, qb) = connect(&mut a, &mut b);
        a.mem.fill(5);
        let wrong = WorkRequest {
            remote_key: b.mr.remote_key ^ key,
            remote_addr: b.mem.addr().wrapping_add(offset),
            ..b.request(1, op, 0, 1)
        };
        let sge = a.sge(0, 100);
        a.post(qa, &[wrong], &[sge]);
        assert_eq!(a.wait(1), [(1, WcStatus::RemoteAccess)], "{what}");
        assert!(b.mem.is_all(0) && a.mem.is_all(5), "{what}");
        // By the specification the target's queue pair is in error as well. Not every device does that, so it
        // is printed, not checked.
        let (own, sge) = (a.request(2, Op::Write, 0, 1), b.sge(0, 8));
        b.post(qb, &[own], &[sge]);
        println!("{what}: the target's own work ended {:?}", b.wait(1));
        b.mem.fill(0);
        a.verbs.destroy_qp(qa.handle).unwrap();
        b.verbs.destroy_qp(qb.handle).unwrap();
        println!(
            "{what}: events at the target: {:?}",
            std::iter::from_fn(|| b.verbs.next_event()).collect::<Vec<_>>()
        );
    }
}

fn a_key_ends_with_its_registration(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let target = Mem::new(4096);
    // SAFETY: `Mem` is never freed and lends no references.
    let mr = unsafe { node.verbs.register(target.span, ALL) }.unwrap();
    node.verbs.deregister(mr).unwrap();
    assert_eq!(node.verbs.deregister(mr).map_err(|error| error.code), Err(libc::EINVAL), "once");
    node.mem.fill(6);
    let request = WorkRequest {
        remote_addr: target.addr(),
        remote_key: mr.remote_key,
        ..node.request(1, Op::Write, 0, 1)
    };
    let sge = node.sge(0, 100);
    node.post(qp, &[request], &[sge]);
    let end = node.wait(1);
    // On a queue pair that is its own peer, some devices flush before the refusal arrives.
    assert!(matches!(end[0], (1, WcStatus::RemoteAccess | WcStatus::Flushed)), "{end:?}");
    assert!(target.is_all(0));
}

fn a_peer_that_is_not_there_costs_the_retries(place: &Place) {
    let mut node = place.open();
    let qp = node.verbs.create_qp(QpConfig { depth: 16, sges: 1, inline_bytes: 0 }).unwrap();
    let path = Path { peer_qp: 0x00ab_cdef, retries: 1, timeout_exponent: 10, ..node.path(qp) };
    node.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
    node.verbs.modify_qp(qp.handle, QpStep::Connect(path)).unwrap();
    let (requests, sges) =
        ([node.request(1, Op::Write, 0, 1), node.request(2, Op::Write, 0, 1)], [node.sge(0, 8); 2]);
    node.post(qp, &requests, &sges);
    assert_eq!(node.wait(2), [(1, WcStatus::RetriesExceeded), (2, WcStatus::Flushed)]);
}

fn a_full_send_queue_takes_a_prefix(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let depth = qp.config.depth as usize;
    let requests: Vec<_> = (0..2 * depth as u64).map(|id| node.request(id, Op::Write, 0, 1)).collect();
    let sges = vec![node.sge(0, 4_096); requests.len()];
    // SAFETY: nothing is inline.
    let (taken, error) = unsafe { node.verbs.post(qp.handle, &requests, &sges) };
    println!("{taken} of {} taken with a depth of {depth}: {error:?}", requests.len());
    assert!(taken >= depth || error.is_some());
    assert_eq!(taken < requests.len(), error.is_some());
    let expected: Vec<_> = (0..taken as u64).map(|id| (id, WcStatus::Success)).collect();
    assert_eq!(node.wait(taken), expected, "exactly the requests that were taken end, in order");
    assert_eq!(node.poll(), []);
}

fn a_requested_event_makes_the_descriptor_readable(place: &Place) {
    let mut node = place.open();
    let qp = node.loopback();
    let [Some(fd), _] = node.verbs.event_fds().map(|fd| fd.map(|fd| fd.as_raw_fd())) else {
        panic!("a file descriptor")
    };
    let readable = |timeout_ms| {
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, which lives for the call.
        unsafe { libc::poll(&raw mut poll, 1, timeout_ms) == 1 }
    };
    assert!(!readable(0));
    assert_eq!(node.verbs.next_event(), None, "and it does not block");
    node.verbs.arm().unwrap();
    assert_eq!(node.poll(), []);
    let (request, sge) = (node.request(1, Op::Write, 0, 1), node.sge(0, 8));
    node.post(qp, &[request], &[sge]);
    assert!(readable(PATIENCE.as_millis() as i32), "an event for the completion");
    assert_eq!(node.wait(1), [(1, WcStatus::Success)]);
    let _ = node.verbs.next_event();
    assert!(!readable(0), "taken");
    node.post(qp, &[request], &[sge]);
    node.wait(1);
    assert!(!readable(0), "not armed");
}

fn registrations_from_several_threads(place: &Place) {
    let node = place.open();
    let registrar = node.verbs.registrar();
    let access = if node.verbs.info().features.contains(DeviceFeatures::RELAXED_ORDERING) {
        ALL | MrAccess::RELAXED_ORDERING
    } else {
        ALL
    };
    let mems: Vec<Mem> = (0..16).map(|_| Mem::new(64 << 10)).collect();
    let mut all = std::thread::scope(|scope| {
        let threads: Vec<_> = mems
            .iter()
            // SAFETY: `Mem` is never freed and lends no references.
            .map(|mem| scope.spawn(move || unsafe { registrar.register(mem.span, access) }.unwrap()))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    all.sort_by_key(|mr| mr.remote_key);
    all.dedup_by_key(|mr| mr.remote_key);
    assert_eq!(all.len(), 16, "each has a key of its own");
    for mr in all {
        node.verbs.deregister(mr).unwrap();
    }
}

fn mistakes_give_an_errno_and_no_harm(place: &Place) {
    let mut node = place.open();
    let depth = node.verbs.info().qp_depth_max;
    let config = QpConfig { depth: 16, sges: 1, inline_bytes: 0 };
    assert!(node.verbs.create_qp(QpConfig { depth: depth.saturating_add(1), ..config }).is_err());
    let huge = node.verbs.create_qp(QpConfig { inline_bytes: 1 << 20, ..config }).unwrap();
    println!("requested 1 MiB inline, got {} bytes", huge.config.inline_bytes);
    let qp = node.verbs.create_qp(config).unwrap();
    let path = node.path(qp);
    assert!(node.verbs.modify_qp(qp.handle, QpStep::Connect(path)).is_err(), "not yet");
    node.verbs.modify_qp(qp.handle, QpStep::Init(ALL)).unwrap();
    assert!(node.verbs.modify_qp(qp.handle, QpStep::Connect(Path { mtu_bytes: 1500, ..path })).is_err());
    assert!(node.verbs.modify_qp(qp.handle, QpStep::Connect(Path { gid_index: 254, ..path })).is_err());
    node.verbs.destroy_qp(qp.handle).unwrap();
    assert_eq!(node.verbs.destroy_qp(qp.handle).map_err(|error| error.code), Err(libc::EINVAL));
    let (request, sge) = (node.request(1, Op::Write, 0, 1), node.sge(0, 8));
    // SAFETY: nothing is inline.
    assert_eq!(unsafe { node.verbs.post(qp.handle, &[request], &[sge]) }.0, 0);
    // Pages that are not mapped, and a file descriptor that is not a dma-buf.
    let nowhere = te_core::MemSpan::new(std::ptr::without_provenance_mut(0x10_0000_0000), 4096);
    // SAFETY: nothing is mapped there, so nothing can be borrowed; the driver refuses it.
    let refused = unsafe { node.verbs.register(nowhere, ALL) };
    println!("memory that is not mapped: {refused:?}");
    assert!(refused.is_err());
    let refused = node.verbs.register_dmabuf(std::io::stdin().as_fd(), 0, 4096, 0, ALL);
    println!("no dma-buf: {refused:?}, features {:?}", node.verbs.info().features);
    assert!(refused.is_err());
    assert_eq!(node.verbs.poll_cq(&mut [EMPTY; 4]), Ok(0));
}

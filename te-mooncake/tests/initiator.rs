//! The rail against data ports that follow a script: versions, refusals, restarts, connections that are cut
//! in each state, and what the completions say about it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{ALL, Exported, Scripted, config, next_request, rail, service};
use te_core::{
    Access, Completion, ErrorKind, Features, Memory as _, Op, Outcome, RemoteRegionId, Token, Transport as _,
};
use te_fabric::testkit::{Node, REMOTE, drive, eventually, finish, kind, read, slice, write};
use te_mooncake::header::{Status, Version};
use te_mooncake::{Buffer, Config, Lookup, MooncakeTransport, PeerError, SegmentDescriptor};

const BASE: u64 = 0x7000_0000_0000;
const LEN: u64 = 1 << 20;

/// Serves requests as a Mooncake engine does, from a buffer of its own.
fn serve(mut stream: TcpStream) {
    let mut memory = vec![0; LEN as usize];
    while let Some(request) = next_request(&mut stream) {
        let range = (request.addr - BASE) as usize..(request.addr - BASE + request.len) as usize;
        let status = if request.version == Version::V2 { &Status::Done.to_bytes()[..] } else { &[] };
        let answered = match request.op {
            Op::Read => stream.write_all(status).and_then(|()| stream.write_all(&memory[range])),
            Op::Write => stream.read_exact(&mut memory[range]).and_then(|()| stream.write_all(status)),
        };
        if answered.is_err() {
            return;
        }
    }
}

/// Answers questions for descriptors with what the test has put there.
#[derive(Default)]
struct Known {
    descriptor: Mutex<Option<SegmentDescriptor>>,
    asked: AtomicUsize,
}

impl Lookup for Known {
    fn descriptor(&self, name: &str) -> Result<SegmentDescriptor, PeerError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.descriptor.lock().unwrap().clone().ok_or_else(|| PeerError::Name(name.into()))
    }
}

impl Known {
    fn with(descriptor: SegmentDescriptor) -> Arc<Self> {
        Arc::new(Self { descriptor: Mutex::new(Some(descriptor)), asked: AtomicUsize::new(0) })
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn descriptor(port: u16, buffers: &[(u64, u64)]) -> SegmentDescriptor {
    SegmentDescriptor {
        name: "peer:1".into(),
        data_host: Some("127.0.0.1".into()),
        data_port: port,
        version: Version::V2,
        buffers: buffers.iter().map(|&(addr, len)| Buffer { addr, len, name: "peer:1".into() }).collect(),
        native: None,
    }
}

/// The export of a range in the life that a descriptor states.
fn export_of(descriptor: &SegmentDescriptor, addr: u64, len: u64) -> Vec<u8> {
    te_mooncake::export::Export {
        access: ALL,
        addresses: vec![common::HERE],
        port: descriptor.data_port,
        version: descriptor.version,
        addr,
        len,
        life: descriptor.life(),
        segment: descriptor.name.clone(),
    }
    .to_bytes()
    .unwrap()
}

fn node(target: &Scripted, version: Version) -> Node<MooncakeTransport> {
    rail(&config(), None, LEN as usize, &target.export(BASE, LEN, version))
}

fn fence(node: &mut Node<MooncakeTransport>, token: u64) -> Completion {
    node.transport.fence(Token(token), REMOTE).unwrap();
    finish(&mut [node], token)
}

#[test]
fn bytes_move_in_both_directions_over_both_versions() {
    for version in [Version::V2, Version::V1] {
        let target = Scripted::start(|stream, _| serve(stream));
        let allowed = Config { allow_unacknowledged_v1: true, connections: 1, ..config() };
        let mut node = rail(&allowed, None, LEN as usize, &target.export(BASE, LEN, version));
        node.memory.paint(5);
        node.submit(&[write(1, 10, 20, 500_000)]);
        let written = finish(&mut [&mut node], 1);
        assert_eq!((written.result, written.outcome), (Ok(()), Outcome::Applied));
        assert_eq!(written.fence_needed, version == Version::V1, "version 1 acknowledges nothing");
        let sent = node.memory.get(10, 500_000);
        node.memory.paint(6);
        node.submit(&[read(2, 0, 20, 500_000)]);
        assert_eq!(finish(&mut [&mut node], 2), Completion::applied(Token(2)));
        assert!(node.memory.get(0, 500_000) == sent);
        assert_eq!(target.connections(), 1, "a connection is used again");
        assert_eq!(fence(&mut node, 3).result.is_ok(), version == Version::V2);
    }
}

#[test]
fn a_write_of_version_1_is_refused_unless_it_is_allowed() {
    let target = Scripted::start(|stream, _| serve(stream));
    for (config, version) in [(config(), Version::V1), (Config { force_v1: true, ..config() }, Version::V2)] {
        let mut node = rail(&config, None, 4096, &target.export(BASE, LEN, version));
        let refused = node.transport.submit(&[write(1, 0, 0, 8)]).map_err(|error| error.kind);
        assert_eq!(refused, Err(ErrorKind::AccessDenied));
        node.submit(&[read(2, 0, 0, 8)]);
        assert_eq!(finish(&mut [&mut node], 2), Completion::applied(Token(2)));
    }
}

#[test]
fn it_declares_what_the_protocol_can_do() {
    let rail = MooncakeTransport::new(&config(), None).unwrap();
    let capabilities = rail.capabilities();
    assert_eq!(capabilities.features, Features::READ | Features::WRITE | Features::CALLER_DRIVEN);
    assert_eq!((rail.name(), capabilities.slice_bytes_max), ("mooncake", 1 << 30));
    assert!(rail.event_source().is_some());
}

#[test]
fn nothing_is_exported_because_it_is_registered() {
    let node = Node::with(MooncakeTransport::new(&config(), None).unwrap(), 64, Access::all());
    let exported = node.transport.export(te_fabric::testkit::REGION, &mut [0; 1024]);
    assert_eq!(exported.map_err(|error| error.kind), Err(ErrorKind::Unsupported));
}

#[test]
fn as_many_slices_are_exchanged_at_a_time_as_there_are_connections() {
    let (busy, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (now, peak) = (busy.clone(), most.clone());
    let target = Scripted::start(move |mut stream, _| {
        while let Some(request) = next_request(&mut stream) {
            peak.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            stream.write_all(&Status::Done.to_bytes()).unwrap();
            now.fetch_sub(1, Ordering::SeqCst);
            stream.write_all(&vec![3; request.len as usize]).unwrap();
        }
    });
    let config = Config { connections: 3, ..config() };
    let mut node = rail(&config, None, LEN as usize, &target.export(BASE, LEN, Version::V2));
    node.submit(&(0..200).map(|token| read(token, token * 1000, 0, 1000)).collect::<Vec<_>>());
    drive(&mut [&mut node], |node| node.done.len() == 200);
    assert!(node.done.iter().all(|completion| completion.result.is_ok()));
    assert!((1..=3).contains(&target.connections()), "{} connections", target.connections());
    assert!(most.load(Ordering::SeqCst) <= 3);
    assert!(node.memory.get(0, 200_000).iter().all(|byte| *byte == 3));
}

#[test]
fn beyond_the_limit_of_connections_each_peer_has_one() {
    let targets = [(); 3].map(|()| Scripted::start(|stream, _| serve(stream)));
    let config = Config { connections: 4, connections_max: 2, ..config() };
    let mut node = rail(&config, None, LEN as usize, &targets[0].export(BASE, LEN, Version::V2));
    for (i, target) in targets.iter().enumerate() {
        let id = RemoteRegionId::new(10 + i as u32, 1);
        node.transport.attach(id, &target.export(BASE, LEN, Version::V2)).unwrap();
    }
    let slices = (0..300).map(|token| {
        let remote = te_core::RemoteOffset::new(RemoteRegionId::new(10 + token as u32 % 3, 1), 0);
        te_core::Slice { remote, ..read(token, token * 1000, 0, 1000) }
    });
    node.submit(&slices.collect::<Vec<_>>());
    drive(&mut [&mut node], |node| node.done.len() == 300);
    assert!(node.done.iter().all(|completion| completion.result.is_ok()));
    let opened: Vec<usize> = targets.iter().map(Scripted::connections).collect();
    assert!(
        opened.iter().all(|count| (1..=2).contains(count)) && node.transport.connections() <= 4,
        "{opened:?}"
    );
}

/// A descriptor states its life itself. One that states another's must not get the other's transfers.
#[test]
fn peers_that_state_the_same_life_are_kept_apart() {
    let targets = [1, 2].map(|byte| {
        Scripted::start(move |mut stream, _| {
            while let Some(request) = next_request(&mut stream) {
                let bytes = vec![byte; request.len as usize];
                stream.write_all(&[&Status::Done.to_bytes()[..], &bytes].concat()).unwrap();
            }
        })
    });
    let exports = targets.each_ref().map(|target| {
        let export = te_mooncake::export::Export {
            access: ALL,
            addresses: vec![common::HERE],
            port: target.address.port(),
            version: Version::V2,
            addr: BASE,
            len: LEN,
            life: 7,
            segment: "peer:1".into(),
        };
        export.to_bytes().unwrap()
    });
    let mut node = rail(&config(), None, 4096, &exports[0]);
    let second = RemoteRegionId::new(5, 1);
    node.transport.attach(second, &exports[1]).unwrap();
    let remote = te_core::RemoteOffset::new(second, 0);
    node.submit(&[read(1, 0, 0, 8), te_core::Slice { remote, ..read(2, 8, 0, 8) }]);
    for token in [1, 2] {
        assert!(finish(&mut [&mut node], token).result.is_ok());
    }
    assert_eq!(node.memory.get(0, 16), [[1; 8], [2; 8]].concat());
}

/// Bytes of a payload that are not all of it.
const SOME: usize = 100_000;

/// What a target does before it cuts the connection, and how the operation ends then.
type Cut = (&'static str, Op, fn(&mut TcpStream), Outcome, ErrorKind);

#[test]
fn a_read_whose_connection_is_cut_in_any_state_ends_with_what_is_known() {
    let rows: [Cut; 6] = [
        ("before the request is read", Op::Read, |_| {}, Outcome::NotApplied, ErrorKind::PeerDead),
        (
            "after the request of a READ",
            Op::Read,
            |stream| {
                next_request(stream);
            },
            Outcome::NotApplied,
            ErrorKind::PeerDead,
        ),
        (
            "in the status of a READ",
            Op::Read,
            |stream| {
                next_request(stream);
                stream.write_all(&Status::Done.to_bytes()[..5]).unwrap();
            },
            Outcome::NotApplied,
            ErrorKind::PeerDead,
        ),
        (
            "in the bytes of a READ",
            Op::Read,
            |stream| {
                next_request(stream);
                stream.write_all(&Status::Done.to_bytes()).unwrap();
                stream.write_all(&[1; SOME]).unwrap();
            },
            Outcome::NotApplied,
            ErrorKind::PeerDead,
        ),
        (
            "after a READ was answered as by version 1",
            Op::Read,
            |stream| {
                next_request(stream);
                stream.write_all(&[7; SOME]).unwrap();
            },
            Outcome::NotApplied,
            ErrorKind::Protocol,
        ),
        (
            "after an unknown status",
            Op::Read,
            |stream| {
                next_request(stream);
                stream.write_all(&Status::Other(9).to_bytes()).unwrap();
            },
            Outcome::NotApplied,
            ErrorKind::Protocol,
        ),
    ];
    rows.into_iter().for_each(ends_with_what_is_known);
}

#[test]
fn a_write_whose_connection_is_cut_in_any_state_ends_with_what_is_known() {
    let rows: [Cut; 4] = [
        (
            "after some bytes of a WRITE",
            Op::Write,
            |stream| {
                next_request(stream);
                stream.read_exact(&mut [0; SOME]).unwrap();
            },
            Outcome::Unknown,
            ErrorKind::PeerDead,
        ),
        (
            "after all bytes of a WRITE",
            Op::Write,
            |stream| {
                let request = next_request(stream).unwrap();
                stream.read_exact(&mut vec![0; request.len as usize]).unwrap();
            },
            Outcome::Unknown,
            ErrorKind::PeerDead,
        ),
        (
            "in the status of a WRITE",
            Op::Write,
            |stream| {
                let request = next_request(stream).unwrap();
                stream.read_exact(&mut vec![0; request.len as usize]).unwrap();
                stream.write_all(&Status::Done.to_bytes()[..7]).unwrap();
            },
            Outcome::Unknown,
            ErrorKind::PeerDead,
        ),
        (
            "after a status before the last byte of a WRITE",
            Op::Write,
            |stream| {
                next_request(stream);
                stream.write_all(&Status::Done.to_bytes()).unwrap();
                stream.read_exact(&mut [0; SOME]).unwrap();
            },
            Outcome::Unknown,
            ErrorKind::Protocol,
        ),
    ];
    rows.into_iter().for_each(ends_with_what_is_known);
}

/// Both for a connection that is closed and for one that is reset.
fn ends_with_what_is_known((what, op, script, outcome, error): Cut) {
    for with_reset in [false, true] {
        let target = Scripted::start(move |mut stream, _| {
            script(&mut stream);
            if with_reset { common::reset(stream) } else { drop(stream) }
        });
        // Longer than the buffers of both sockets, so that no WRITE is sent whole before its end.
        let len = 64 << 20;
        let mut node = rail(&config(), None, len, &target.export(BASE, len as u64, Version::V2));
        node.submit(&[slice(1, op, 0, 0, len as u32)]);
        let end = finish(&mut [&mut node], 1);
        assert_eq!(
            (end.outcome, end.fence_needed),
            (outcome, outcome == Outcome::Unknown),
            "{what}: {end:?}"
        );
        // A reset may overtake what was sent before it.
        let overtaken = with_reset && kind(&end) == ErrorKind::PeerDead;
        assert!(kind(&end) == error || overtaken, "{what}: {end:?}");
        assert_eq!(target.connections(), 1, "{what}: a connection is not used after an incomplete exchange");
        // A fence cannot say that nothing lands any more.
        let fenced = fence(&mut node, 2);
        match outcome {
            Outcome::Unknown => {
                assert_eq!((kind(&fenced), fenced.outcome), (ErrorKind::Unsupported, Outcome::Unknown))
            }
            _ => assert_eq!(fenced, Completion::applied(Token(2)), "{what}"),
        }
    }
}

#[test]
fn doubts_about_a_peer_outlive_its_attachment() {
    let target = Scripted::start(|mut stream, _| {
        let request = next_request(&mut stream).unwrap();
        stream.read_exact(&mut vec![0; request.len as usize]).unwrap();
    });
    let mut node = node(&target, Version::V2);
    node.submit(&[write(1, 0, 0, 100)]);
    assert_eq!(finish(&mut [&mut node], 1).outcome, Outcome::Unknown);
    node.transport.detach(REMOTE).unwrap();
    node.transport.attach(REMOTE, &target.export(BASE, LEN, Version::V2)).unwrap();
    assert_eq!(kind(&fence(&mut node, 2)), ErrorKind::Unsupported);
}

#[test]
fn a_cancelled_slice_ends_at_once_and_says_what_is_known() {
    let held = Arc::new(AtomicBool::new(true));
    let hold = held.clone();
    let target = Scripted::start(move |mut stream, _| {
        // Reads the request alone, and answers nothing.
        next_request(&mut stream);
        eventually("the test is over", || !hold.load(Ordering::SeqCst));
    });
    let config = Config { connections: 1, ..config() };
    let mut node = rail(&config, None, 64 << 20, &target.export(BASE, 64 << 20, Version::V2));
    // The first is exchanged, the second waits for the connection.
    node.submit(&[read(1, 0, 0, 100), write(2, 0, 0, 100)]);
    drive(&mut [&mut node], |node| node.transport.stats().bytes >= 24);
    for token in [2, 1] {
        node.transport.cancel(Token(token)).unwrap();
    }
    node.poll();
    for token in [1, 2] {
        let end = node.ended(token).unwrap();
        assert_eq!((kind(&end), end.outcome), (ErrorKind::Canceled, Outcome::NotApplied), "{token}");
    }
    let again = node.transport.cancel(Token(1)).map_err(|error| error.kind);
    assert_eq!(again, Err(ErrorKind::NotFound));
    // A WRITE whose bytes have left.
    node.submit(&[write(3, 0, 0, 64 << 20)]);
    drive(&mut [&mut node], |node| node.transport.stats().bytes >= 24 + 24 + 1000);
    node.transport.cancel(Token(3)).unwrap();
    node.poll();
    let end = node.ended(3).unwrap();
    assert_eq!((kind(&end), end.outcome, end.fence_needed), (ErrorKind::Canceled, Outcome::Unknown, true));
    held.store(false, Ordering::SeqCst);
}

#[test]
fn an_idle_connection_that_the_peer_has_closed_costs_no_slice() {
    // Each connection serves one exchange and is closed.
    let target = Scripted::start(|mut stream, _| {
        let request = next_request(&mut stream).unwrap();
        let mut bytes = vec![0; request.len as usize];
        match request.op {
            Op::Read => stream.write_all(&[&Status::Done.to_bytes()[..], &bytes].concat()).unwrap(),
            Op::Write => {
                stream.read_exact(&mut bytes).unwrap();
                stream.write_all(&Status::Done.to_bytes()).unwrap();
            }
        }
    });
    let mut node = node(&target, Version::V2);
    for token in 1..=20 {
        let op = if token % 2 == 0 { Op::Read } else { Op::Write };
        node.submit(&[slice(token, op, 0, 0, 100)]);
        let end = finish(&mut [&mut node], token);
        assert_eq!(end.result, Ok(()), "slice {token}");
    }
    assert_eq!(target.connections(), 20);
}

#[test]
fn a_refused_range_is_looked_up_once_and_sent_again_if_it_is_there() {
    let target = Scripted::start(|mut stream, number| {
        if number == 0 {
            next_request(&mut stream);
            stream.write_all(&Status::Rejected.to_bytes()).unwrap();
            return common::finish(stream);
        }
        serve(stream);
    });
    let now = descriptor(target.address.port(), &[(BASE, LEN)]);
    let known = Known::with(now.clone());
    let mut node = rail(&config(), Some(known.clone()), 4096, &export_of(&now, BASE, LEN));
    node.submit(&[write(1, 0, 0, 100)]);
    assert_eq!(finish(&mut [&mut node], 1), Completion::applied(Token(1)));
    let stats = node.transport.stats();
    assert_eq!((known.asked(), stats.lookups, stats.refused), (1, 1, 1));
    assert_eq!(fence(&mut node, 2), Completion::applied(Token(2)), "a refused WRITE leaves no doubt");
}

#[test]
fn a_range_that_is_refused_twice_or_listed_no_more_is_denied() {
    for (listed, lookups) in [(&[(BASE, LEN)][..], 1), (&[(BASE + LEN, LEN)], 1), (&[], 1)] {
        let target = Scripted::start(|mut stream, _| {
            next_request(&mut stream);
            let _ = stream.write_all(&Status::Rejected.to_bytes());
            common::finish(stream);
        });
        let now = descriptor(target.address.port(), listed);
        let known = Known::with(now.clone());
        let mut node = rail(&config(), Some(known.clone()), 4096, &export_of(&now, BASE, LEN));
        node.submit(&[write(1, 0, 0, 100)]);
        let end = finish(&mut [&mut node], 1);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::AccessDenied, Outcome::NotApplied));
        assert_eq!(known.asked(), lookups);
    }
}

#[test]
fn without_a_look_up_a_refused_range_is_denied_at_once() {
    let target = Scripted::start(|mut stream, _| {
        next_request(&mut stream);
        let _ = stream.write_all(&Status::Rejected.to_bytes());
        common::finish(stream);
    });
    let mut node = node(&target, Version::V2);
    node.submit(&[read(1, 0, 0, 100)]);
    assert_eq!(kind(&finish(&mut [&mut node], 1)), ErrorKind::AccessDenied);
}

#[test]
fn a_read_of_version_1_that_is_closed_without_a_byte_counts_as_refused() {
    let target = Scripted::start(|mut stream, _| {
        next_request(&mut stream);
    });
    let old = SegmentDescriptor { version: Version::V1, ..descriptor(target.address.port(), &[]) };
    let known = Known::with(old.clone());
    let mut node = rail(&config(), Some(known.clone()), 4096, &export_of(&old, BASE, LEN));
    node.submit(&[read(1, 0, 0, 100)]);
    assert_eq!(kind(&finish(&mut [&mut node], 1)), ErrorKind::AccessDenied);
    assert_eq!(known.asked(), 1);
}

#[test]
fn a_peer_with_another_data_port_has_restarted() {
    let gone = Scripted::start(|mut stream, _| {
        next_request(&mut stream);
        let _ = stream.write_all(&Status::Rejected.to_bytes());
        common::finish(stream);
    });
    let dead_port = std::net::TcpListener::bind((common::HERE, 0)).unwrap().local_addr().unwrap().port();
    let target = Scripted::start(|stream, _| serve(stream));
    let now = descriptor(target.address.port(), &[(BASE, LEN)]);
    // One refuses, at the other nothing listens.
    for port in [gone.address.port(), dead_port] {
        let old = descriptor(port, &[(BASE, LEN)]);
        let known = Known::with(now.clone());
        let mut node = rail(&config(), Some(known), 4096, &export_of(&old, BASE, LEN));
        node.submit(&[write(1, 0, 0, 100), read(2, 0, 0, 100)]);
        for token in [1, 2] {
            let end = finish(&mut [&mut node], token);
            assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerRestarted, Outcome::NotApplied));
        }
        node.submit(&[read(3, 0, 0, 100)]);
        assert_eq!(kind(&finish(&mut [&mut node], 3)), ErrorKind::PeerRestarted, "from now on");
        // What is attached from the new descriptor works beside it.
        let fresh = RemoteRegionId::new(9, 1);
        node.transport.attach(fresh, &export_of(&now, BASE, LEN)).unwrap();
        let again = te_core::Slice { remote: te_core::RemoteOffset::new(fresh, 0), ..read(4, 0, 0, 100) };
        node.submit(&[again]);
        assert_eq!(finish(&mut [&mut node], 4), Completion::applied(Token(4)));
    }
}

#[test]
fn a_peer_that_is_dead_fails_at_once_and_is_reached_again_when_it_is_back() {
    let listener = std::net::TcpListener::bind((common::HERE, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let known = Known::with(descriptor(port, &[(BASE, LEN)]));
    let blob = export_of(&descriptor(port, &[]), BASE, LEN);
    let mut node = rail(&config(), Some(known), 4096, &blob);
    node.submit(&[read(1, 0, 0, 100), write(2, 0, 0, 100)]);
    for token in [1, 2] {
        let end = finish(&mut [&mut node], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::PeerDead, Outcome::NotApplied));
    }
    let listener = te_fabric::net::Listener::bind((common::HERE, port).into()).unwrap();
    let listener = Mutex::new(listener);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut accepted = None;
            eventually("the rail connects", || {
                if let te_fabric::net::Accepted::Connection(stream) = listener.lock().unwrap().accept() {
                    stream.set_nonblocking(false).unwrap();
                    accepted = Some(stream);
                }
                accepted.is_some()
            });
            serve(accepted.unwrap());
        });
        let mut token = 10;
        loop {
            token += 1;
            node.submit(&[read(token, 0, 0, 100)]);
            if finish(&mut [&mut node], token).result.is_ok() {
                break;
            }
        }
        drop(node);
    });
}

#[test]
fn exports_of_other_processes_and_overlong_slices_are_refused() {
    let target = Scripted::start(|stream, _| serve(stream));
    let config = Config { slice_bytes_max: 1000, ..config() };
    let mut node = rail(&config, None, 4096, &target.export(BASE, LEN, Version::V2));
    let mut foreign = target.export(BASE, LEN, Version::V2);
    foreign[8] ^= 1;
    let attached = node.transport.attach(RemoteRegionId::new(2, 1), &foreign).map_err(|error| error.kind);
    assert_eq!(attached, Err(ErrorKind::InvalidArgument));
    let long = node.transport.submit(&[read(1, 0, 0, 1001)]).map_err(|error| error.kind);
    assert_eq!(long, Err(ErrorKind::InvalidArgument));
    let denied = common::export(target.address.port(), BASE, LEN, Version::V2, Access::REMOTE_READ);
    node.transport.attach(RemoteRegionId::new(3, 1), &denied).unwrap();
    let to = te_core::RemoteOffset::new(RemoteRegionId::new(3, 1), 0);
    let refused = node.transport.submit(&[te_core::Slice { remote: to, ..write(1, 0, 0, 1) }]);
    assert_eq!(refused.map_err(|error| error.kind), Err(ErrorKind::AccessDenied));
}

#[test]
fn a_rail_reaches_a_service_and_sees_what_is_withdrawn() {
    let service = service();
    let exported = Exported::new(&service, 1 << 20, ALL);
    exported.block.paint(3);
    let segment = service.client().descriptor(service.name()).unwrap();
    let blob = export_of(&segment, exported.addr(), 1 << 20);
    let mut node = rail(&config(), Some(service.client()), 1 << 20, &blob);
    let slices: Vec<_> = (0..64).map(|token| read(token, token * 16_384, token * 16_384, 16_384)).collect();
    node.submit(&slices);
    drive(&mut [&mut node], |node| node.done.len() == 64);
    assert!(node.memory.get(0, 1 << 20) == exported.block.get(0, 1 << 20));
    service.withdraw(exported.addr()).unwrap();
    node.submit(&[write(100, 0, 0, 1 << 20)]);
    let end = finish(&mut [&mut node], 100);
    assert_eq!((kind(&end), end.outcome), (ErrorKind::AccessDenied, Outcome::NotApplied));
}

/// The conformance suite cannot go on after a WRITE in doubt. Here each round has memory of its own.
#[test]
fn what_is_said_about_cancelled_writes_is_true() {
    const CELL: u64 = 16 << 10;
    let service = service();
    let segment = service.client().descriptor(service.name()).unwrap();
    let mut outcomes = std::collections::HashMap::<Outcome, u32>::new();
    for round in 0..60_u64 {
        let exported = Exported::new(&service, 48 * CELL as usize, ALL);
        exported.block.paint(1);
        let before = exported.block.get(0, 48 * CELL as usize);
        let blob = export_of(&segment, exported.addr(), 48 * CELL);
        let mut node = rail(&config(), None, 48 * CELL as usize, &blob);
        node.memory.paint(2);
        let sent = node.memory.get(0, 48 * CELL as usize);
        node.submit(&(0..48).map(|i| write(i, i * CELL, i * CELL, CELL as u32)).collect::<Vec<_>>());
        for _ in 0..round % 20 {
            node.poll();
        }
        for token in (0..48).filter(|token| (token * 7 + round) % 3 != 0) {
            // It may have ended.
            let _ = node.transport.cancel(Token(token));
        }
        drive(&mut [&mut node], |node| node.done.len() == 48);
        // What may land lands now, or never: no connection is left.
        drop(node.transport);
        eventually("the target has seen the end", || service.stats().data.open == 0);
        for end in &node.done {
            let range = (end.token.0 * CELL) as usize..((end.token.0 + 1) * CELL) as usize;
            let there = exported.block.get(range.start as u64, CELL as usize);
            let (old, new) = (&before[range.clone()], &sent[range]);
            match end.outcome {
                Outcome::Applied => assert!(there == new, "{end:?}"),
                Outcome::NotApplied => assert!(there == old, "{end:?}"),
                Outcome::Unknown => {
                    let mixed = there
                        .iter()
                        .zip(old.iter().zip(new))
                        .all(|(byte, (old, new))| byte == old || byte == new);
                    assert!(mixed && end.fence_needed, "{end:?}");
                }
            }
            *outcomes.entry(end.outcome).or_default() += 1;
        }
    }
    assert!(
        outcomes.contains_key(&Outcome::Applied) && outcomes.contains_key(&Outcome::NotApplied),
        "{outcomes:?}"
    );
}

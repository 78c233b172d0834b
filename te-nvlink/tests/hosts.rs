//! Peers of other hosts: handles, keys and refusals; peers and owners that send what they must not, or end.
//! Both ends are in this process, over copies of the fake driver, and name different hosts.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod common;
#[path = "../../te-gpu/tests/common/mod.rs"]
mod fakes;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use common::{
    INITIATOR, MIB, REGION, REMOTE, TARGET, bytes, export, fabric_memory, on_a_host, on_a_host_with, poll,
    register, run, slice, until, with,
};
use fakes::Fake;
use te_core::grant::{Message, PROTOCOL};
use te_core::{Access, ErrorKind, ExpelMode, MemSpan, Memory, Op, RegionId, RemoteRegionId, Transport};
use te_gpu::NotShared;
use te_nvlink::wire::{FRAME_BYTES_MAX, Frame, Means, Part};
use te_nvlink::{Config, Export, NotExported, NvlinkTransport};

const BYTES: usize = MIB;
const HELLO: Message = Message::Hello { protocol: PROTOCOL, identity: 77 };

/// The two ends, with a region each.
struct Two {
    fakes: [Fake; 2],
    peer: NvlinkTransport,
    owner: NvlinkTransport,
    here: MemSpan,
    there: MemSpan,
}

impl Two {
    fn new() -> Self {
        Self::of(Config::default())
    }

    fn of(config: Config) -> Self {
        let fakes = [Fake::cuda(), Fake::cuda()];
        let mut peer = on_a_host(&fakes[0], INITIATOR);
        let mut owner = on_a_host_with(&fakes[1], Config { identity: TARGET, ..config });
        let (here, there) = (fakes[0].allocate(BYTES), fabric_memory(&fakes[1], 1, 2 * MIB));
        register(&mut peer, REGION, here, Access::LOCAL);
        register(&mut owner, REGION, there, Access::all());
        Self { fakes, peer, owner, here, there }
    }

    fn export(&self) -> Export {
        Export::parse(&export(&self.owner, REGION)).unwrap()
    }

    fn attach(&mut self) {
        self.peer.attach(REMOTE, &export(&self.owner, REGION)).unwrap();
    }

    fn write(&mut self) -> Result<(), ErrorKind> {
        let result = run(&mut self.peer, Some(&mut self.owner), &[slice(1, Op::Write, 0, 4_096, 8_192)])[0];
        result.map_err(|error| error.kind)
    }

    /// A connection of another peer to the owner.
    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.export().addresses[0]).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    fn frees(&mut self) {
        until("the region is free", || {
            poll(&mut self.peer);
            self.owner.deregister(REGION).is_ok()
        });
        assert_eq!([self.fakes[0].wrong(), self.fakes[1].wrong()], [0, 0]);
    }
}

fn frame(frame: Frame) -> Vec<u8> {
    let mut bytes = [0; FRAME_BYTES_MAX];
    let len = frame.encode(&mut bytes);
    [&[len as u8], &bytes[..len]].concat()
}

fn message(message: Message) -> Vec<u8> {
    frame(Frame::Grant(message))
}

fn fabric(len: u64, handle: [u8; 64]) -> Vec<u8> {
    frame(Frame::Part(Part { means: Means::Fabric(handle), bytes: 2 * MIB as u64, offset: 0, len }))
}

#[test]
fn a_region_is_mapped_by_its_fabric_handle_alone_and_busy_until_its_peer_has_closed_it() {
    let mut two = Two::new();
    two.attach();
    two.fakes[0].fill(two.here, &bytes(3, BYTES));
    assert_eq!(two.write(), Ok(()));
    let written = two.fakes[1].bytes(two.there.part(4_096, 8_192).unwrap());
    assert!(written == bytes(3, BYTES)[..8_192]);
    assert_eq!(two.fakes[0].calls("cuMemImportFromShareableHandle"), 1);
    assert!(two.owner.is_connected(INITIATOR));
    // The peer does not poll, and so does not close it.
    for _ in 0..100 {
        poll(&mut two.owner);
        assert_eq!(two.owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
    }
    assert_eq!(two.fakes[0].calls("cuMemUnmap"), 0);
    two.frees();
    assert_eq!(two.fakes[0].calls("cuMemUnmap"), 1, "it was unmapped before the region was free");
    assert_eq!(two.write(), Err(ErrorKind::Stale));
}

#[test]
fn a_peer_that_detaches_releases_the_region_and_ends_its_connection() {
    let mut two = Two::new();
    two.attach();
    assert_eq!(two.write(), Ok(()));
    two.peer.detach(REMOTE).unwrap();
    until("the peer has gone", || {
        poll(&mut two.peer);
        poll(&mut two.owner);
        !two.owner.is_connected(INITIATOR)
    });
    // timing: much less than the time after which a peer that has ended without a word counts as dead
    let start = std::time::Instant::now();
    two.frees();
    // timing: as above
    assert!(start.elapsed().as_millis() < 900, "it said that it had closed the mapping");
}

#[test]
fn without_the_setting_no_other_host_is_served_or_reached() {
    let fakes = [Fake::cuda(), Fake::cuda()];
    let mut closed = with(&fakes[0], Config { host: Some([1; 16]), ..Config::default() });
    let memory = fabric_memory(&fakes[0], 1, 2 * MIB);
    register(&mut closed, REGION, memory, Access::all());
    let blob = export(&closed, REGION);
    assert!(Export::parse(&blob).unwrap().addresses.is_empty());
    assert_eq!((closed.not_across_hosts(REGION), closed.why_not_exported(REGION)), (Ok(None), None));
    let mut open = on_a_host(&fakes[1], INITIATOR);
    assert_eq!(open.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
    register(&mut open, REGION, fabric_memory(&fakes[1], 1, 2 * MIB), Access::all());
    let blob = export(&open, REGION);
    assert!(blob.len() <= open.capabilities().export_bytes_max as usize);
    assert_eq!(closed.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
}

#[test]
fn memory_that_other_hosts_cannot_map_is_exported_to_this_host_and_says_why() {
    let fake = Fake::cuda();
    let mut owner = on_a_host(&fake, TARGET);
    let ids = [RegionId::new(1, 1), RegionId::new(2, 1), RegionId::new(3, 1)];
    register(&mut owner, ids[0], fake.allocate(BYTES), Access::all());
    let chunks = fabric_memory(&fake, 1, 2 * MIB);
    // The first handle is a descriptor, for this host.
    fake.fail("cuMemExportToShareableHandle", 2, 800);
    register(&mut owner, ids[1], chunks, Access::all());
    register(&mut owner, ids[2], common::shared(BYTES).span(), Access::all());
    assert!(matches!(
        owner.not_across_hosts(ids[0]),
        Ok(Some(NotExported::Device(NotShared::NoFabric { .. })))
    ));
    for (id, why) in [(ids[0], "has no fabric handle"), (ids[1], "no IMEX channel")] {
        let text = owner.why_not_exported(id).unwrap();
        assert!(text.starts_with("other hosts cannot map it: ") && text.contains(why), "{text}");
        assert_eq!(owner.not_exported(id), Ok(None));
    }
    // Host memory is never shared so, which is no news.
    assert_eq!(owner.why_not_exported(ids[2]), None);
    let other = Fake::cuda();
    let mut peer = on_a_host(&other, INITIATOR);
    for id in ids {
        let blob = export(&owner, id);
        assert!(Export::parse(&blob).unwrap().addresses.is_empty());
        assert_eq!(peer.attach(REMOTE, &blob).unwrap_err().kind, ErrorKind::Unreachable);
    }
}

#[test]
fn a_peer_without_the_domain_leaves_the_region_to_other_fabrics() {
    for domain in [0, 8] {
        let mut two = Two::new();
        two.fakes[0].set("domain", domain);
        two.attach();
        assert_eq!(two.write(), Err(ErrorKind::Unreachable), "domain {domain}");
        two.frees();
    }
}

#[test]
fn a_peer_that_shows_no_key_gets_no_handle() {
    let mut two = Two::new();
    two.attach();
    assert_eq!(two.write(), Ok(()));
    let good = two.export();
    let mut forged = good.clone();
    forged.key[3] ^= 0x20;
    let second = RemoteRegionId::new(1, 1);
    two.peer.attach(second, &forged.to_bytes()).unwrap();
    let mut wrong = slice(1, Op::Write, 0, 0, 4_096);
    wrong.remote.region = second;
    let ended = run(&mut two.peer, Some(&mut two.owner), &[wrong])[0];
    assert_eq!(ended.unwrap_err().kind, ErrorKind::AccessDenied);
    assert_eq!(two.write(), Ok(()), "the connection survives");
    // A peer that speaks the protocol and guesses.
    let mut guesses = two.connect();
    let ask = Message::Ask { request: 1, region: REGION, key: forged.key };
    for sent in [frame(Frame::Open(good.socket)), message(HELLO), message(ask)] {
        guesses.write_all(&sent).unwrap();
    }
    let mut answer = Vec::new();
    until("it is answered", || {
        poll(&mut two.owner);
        _ = guesses.read_to_end(&mut answer);
        answer.len() >= 3 + 8
    });
    let refuse = message(Message::Refuse { request: 1, stale: false });
    assert_eq!(answer, [message(Message::Welcome), refuse].concat());
    // One that knows the key, and wants no owner or another one, is answered nothing.
    let ask = message(Message::Ask { request: 1, region: REGION, key: good.key });
    for opens in [Vec::new(), frame(Frame::Open([9; 16]))] {
        let mut lost = two.connect();
        lost.write_all(&[opens, message(HELLO), ask.clone()].concat()).unwrap();
        let mut answer = Vec::new();
        until("it is disconnected", || {
            poll(&mut two.owner);
            lost.read_to_end(&mut answer).is_ok_and(|_| true)
        });
        assert!(answer.is_empty(), "{answer:?}");
    }
}

#[test]
fn a_peer_that_sends_garbage_is_disconnected_and_others_are_served() {
    let mut two = Two::of(Config { idle_ms_max: 200, ..Config::default() });
    two.attach();
    let good = two.export();
    let open = frame(Frame::Open(good.socket));
    let ask = message(Message::Ask { request: 1, region: REGION, key: good.key });
    let cases: Vec<Vec<u8>> = vec![
        vec![0],
        vec![91],
        vec![255; 4_096],
        vec![1, 9],
        vec![1, 2],
        // Before it has named the owner; another owner; twice.
        message(HELLO),
        ask.clone(),
        frame(Frame::Open([9; 16])),
        [&open[..], &open].concat(),
        [&[18, 2, 2], &[1; 16][..]].concat(),
        [open.clone(), message(HELLO), message(HELLO)].concat(),
        [open.clone(), ask.clone()].concat(),
        [open.clone(), message(HELLO), fabric(1, [1; 64])].concat(),
        [open.clone(), message(HELLO), message(Message::Welcome)].concat(),
        // Frames that are cut off: it is granted nothing in time.
        open[..9].to_vec(),
        [&open[..], &message(HELLO)[..5]].concat(),
        [&open[..], &message(HELLO), &ask[..20]].concat(),
        // Granted, and then garbage: it has to release the region first.
        [open.clone(), message(HELLO), ask, vec![3, 7, 7, 7], message(Message::Release { row: 0 })].concat(),
    ];
    for case in cases {
        let mut liar = two.connect();
        // The owner may have closed the connection before the last bytes.
        _ = liar.write_all(&case);
        until("the liar is disconnected", || {
            poll(&mut two.owner);
            let mut bytes = [0; 256];
            loop {
                match liar.read(&mut bytes) {
                    Ok(0) => break true,
                    Ok(_) => {}
                    Err(error) => break error.kind() != std::io::ErrorKind::WouldBlock,
                }
            }
        });
        assert_eq!(two.write(), Ok(()), "{case:?}");
    }
    two.frees();
}

#[test]
fn a_peer_that_ends_with_the_region_frees_it_after_the_quarantine() {
    for resets in [false, true] {
        let mut two = Two::of(Config { quarantine_ms: 300, ..Config::default() });
        let good = two.export();
        let mut peer = two.connect();
        let ask = Message::Ask { request: 1, region: REGION, key: good.key };
        for sent in [frame(Frame::Open(good.socket)), message(HELLO), message(ask)] {
            peer.write_all(&sent).unwrap();
        }
        let mut answer = Vec::new();
        until("it is granted", || {
            poll(&mut two.owner);
            _ = peer.read_to_end(&mut answer);
            answer.len() > 100
        });
        assert_eq!(two.owner.deregister(REGION).unwrap_err().kind, ErrorKind::Busy);
        if resets {
            te_fabric::net::reset_on_close(&peer);
        }
        drop(peer);
        // timing: the time of the setting has to pass
        let start = std::time::Instant::now();
        until("the region is free", || {
            poll(&mut two.owner);
            two.owner.deregister(REGION).is_ok()
        });
        // timing: as above
        let waited = start.elapsed().as_millis();
        assert!((250..10_000).contains(&waited), "{waited} ms");
    }
}

#[test]
fn a_peer_that_is_expelled_is_told_and_the_owner_waits_for_its_release() {
    let mut two = Two::new();
    two.attach();
    assert_eq!(two.write(), Ok(()));
    assert_eq!(two.owner.expel(INITIATOR, ExpelMode::Force), Ok(false), "it has the region mapped");
    until("the peer has gone", || {
        assert_eq!(two.peer.submit(&[slice(1, Op::Write, 0, 0, 4_096)]), Ok(1));
        let refused = poll(&mut two.peer).into_iter().filter_map(|end| end.result.err());
        assert!(refused.map(|error| error.kind).all(|kind| kind == ErrorKind::Expelled), "no other reason");
        poll(&mut two.owner);
        two.owner.expel(INITIATOR, ExpelMode::Force) == Ok(true)
    });
    until("all slices have ended", || poll(&mut two.peer).is_empty());
    assert_eq!(two.write(), Err(ErrorKind::Expelled));
    // It is refused when it comes again.
    let second = RemoteRegionId::new(1, 1);
    two.peer.attach(second, &export(&two.owner, REGION)).unwrap();
    let mut again = slice(1, Op::Write, 0, 0, 4_096);
    again.remote.region = second;
    let refused = run(&mut two.peer, Some(&mut two.owner), &[again])[0].unwrap_err().kind;
    assert_eq!(refused, ErrorKind::Expelled);
    two.frees();
}

#[test]
fn an_address_that_leads_nowhere_or_to_another_owner_leaves_slices_to_other_fabrics() {
    let mut two = Two::new();
    let good = two.export();
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let attempts = [
        Export { addresses: vec![closed], ..good.clone() },
        // The owner of an export whose process has ended, and whose port is another one's by now.
        Export { socket: [9; 16], ..good.clone() },
    ];
    for (nth, attempt) in (1..).zip(attempts) {
        let id = RemoteRegionId::new(nth, 1);
        two.peer.attach(id, &attempt.to_bytes()).unwrap();
        let mut nowhere = slice(1, Op::Write, 0, 0, 4_096);
        nowhere.remote.region = id;
        let ended = run(&mut two.peer, Some(&mut two.owner), &[nowhere])[0];
        assert_eq!(ended.unwrap_err().kind, ErrorKind::Unreachable, "{attempt:?}");
    }
    // The second address is tried when the first one refuses.
    let port = good.addresses[0].port();
    let at = |ip: [u8; 4]| SocketAddr::new(ip.into(), port);
    let walks = Export { addresses: vec![at([127, 0, 0, 2]), at([127, 0, 0, 1])], ..good };
    two.peer.attach(REMOTE, &walks.to_bytes()).unwrap();
    assert_eq!(two.write(), Ok(()));
}

#[test]
fn a_port_that_is_in_use_keeps_the_fabric_from_starting() {
    let used = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = used.local_addr().unwrap().port();
    let fake = Fake::cuda();
    let config = Config { across_hosts: true, port, ..Config::default() };
    let error = NvlinkTransport::new(config, fake.gpu(fake.config())).map(drop).unwrap_err();
    assert!(error.to_string().contains("listen for processes of other hosts"), "{error}");
}

/// Answers a peer's request with these bytes; the error with which a slice ends.
fn lie(sent: &[&[u8]], closes: bool) -> ErrorKind {
    let fake = Fake::cuda();
    let mut peer =
        on_a_host_with(&fake, Config { identity: INITIATOR, grant_ms_max: 500, ..Config::default() });
    register(&mut peer, REGION, fake.allocate(BYTES), Access::LOCAL);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let export = Export {
        host: [1; 16],
        gpu: Some([1; 16]),
        socket: [2; 16],
        region: REGION,
        key: [7; 16],
        len: BYTES as u64,
        access: Access::REMOTE_WRITE,
        addresses: vec![listener.local_addr().unwrap()],
    };
    peer.attach(REMOTE, &export.to_bytes()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    let bytes = sent.concat();
    let (mut done, mut asked) = (0, Vec::new());
    assert_eq!(peer.submit(&[slice(1, Op::Write, 0, 0, 4_096)]), Ok(1));
    let mut ended = Vec::new();
    let mut socket = Some(socket);
    until("the slice ends", || {
        if let Some(there) = &mut socket {
            _ = there.read_to_end(&mut asked);
            done += there.write(&bytes[done..]).unwrap_or(0);
            if closes && done == bytes.len() {
                socket = None;
            }
        }
        ended.extend(poll(&mut peer));
        !ended.is_empty()
    });
    peer.detach(REMOTE).unwrap();
    peer.deregister(REGION).unwrap();
    drop(peer);
    assert_eq!(fake.wrong(), 0);
    ended[0].result.unwrap_err().kind
}

#[test]
fn an_owner_of_another_host_that_lies_is_not_believed() {
    let len = BYTES as u64;
    let welcome = message(Message::Welcome);
    let grant = |row, len| message(Message::Grant { request: 1, row, offset: 0, len, access: Access::all() });
    let part = |means| frame(Frame::Part(Part { means, bytes: 2 * MIB as u64, offset: 0, len }));
    let kind = |sent: &[&[u8]]| lie(sent, false);
    // Nothing; garbage; what a peer sends; a grant before the welcome.
    assert_eq!(kind(&[]), ErrorKind::Unreachable);
    assert_eq!(kind(&[&[255; 100]]), ErrorKind::Protocol);
    assert_eq!(kind(&[&[3, 9, 9, 9]]), ErrorKind::Protocol);
    assert_eq!(kind(&[&welcome, &frame(Frame::Open([2; 16]))]), ErrorKind::Protocol);
    assert_eq!(kind(&[&grant(0, len)]), ErrorKind::Protocol);
    // Handles of its own host, in whatever form; none; one of nothing; a row that does not exist.
    for means in [Means::Fd, Means::Ipc([1; 64]), Means::File] {
        assert_eq!(kind(&[&welcome, &part(means), &grant(0, len)]), ErrorKind::Protocol, "{means:?}");
    }
    assert_eq!(kind(&[&welcome, &grant(0, len)]), ErrorKind::InvalidArgument);
    let nothing = fabric(len, [0xAB; 64]);
    assert_eq!(kind(&[&welcome, &nothing, &grant(0, len)]), ErrorKind::Unreachable);
    assert_eq!(kind(&[&welcome, &nothing, &grant(0, len + 1)]), ErrorKind::AccessDenied);
    assert_eq!(kind(&[&welcome, &nothing, &grant(u32::MAX, len)]), ErrorKind::Unreachable);
    // More parts than a region has.
    let many = fabric(1, [1; 64]).repeat(4_097);
    assert_eq!(kind(&[&welcome, &many]), ErrorKind::Protocol);
    // Frames that are cut off by the end of the connection, before the owner was met and afterwards.
    assert_eq!(lie(&[&welcome[..1]], true), ErrorKind::Unreachable);
    assert_eq!(lie(&[&welcome, &nothing[..40]], true), ErrorKind::PeerDead);
    assert_eq!(lie(&[&welcome, &nothing, &grant(0, len)[..20]], true), ErrorKind::PeerDead);
}

//! A host that breaks the protocol, against our target, which also has an honest host.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use common::{Node, REGION, eventually, finish, pair, write};
use te_nvmeof::Config;
use te_nvmeof::command::{
    CC_ENABLED, CC_SHUTDOWN, CONTROLLER_ANY, CSTS_SHUT_DOWN, Cqe, Place, Sqe, Status, admin, connect_data,
    io, property,
};
use te_nvmeof::pdu::{self, Agreed, Data, End, Fatal, Kind, Pdu, Step};
use zerocopy::IntoBytes;

const BYTES: usize = 1 << 20;
const BLOCK: u32 = 4_096;

/// A raw connection to a target, which is polled meanwhile.
struct Raw {
    stream: TcpStream,
    bytes: Vec<u8>,
    agreed: Agreed,
}

impl Raw {
    fn new(target: &Node) -> Self {
        let stream = TcpStream::connect(target.transport.local_address()).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, bytes: Vec::new(), agreed: Agreed::default() }
    }

    fn send(&mut self, target: &mut Node, parts: &[&[u8]]) {
        let bytes = parts.concat();
        let mut left = &bytes[..];
        eventually("the target takes the bytes", || {
            match self.stream.write(left) {
                Ok(count) => left = &left[count..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // Closed: what follows shows it.
                Err(_) => left = &[],
            }
            target.poll();
            left.is_empty()
        });
    }

    /// The next PDU and its data; `None` once the target has closed.
    fn next(&mut self, target: &mut Node) -> Option<(Pdu, Vec<u8>)> {
        let mut found = None;
        eventually("an answer", || {
            target.poll();
            let mut more = [0; 65_536];
            let closed = match self.stream.read(&mut more) {
                Ok(0) => true,
                Ok(count) => {
                    self.bytes.extend_from_slice(&more[..count]);
                    false
                }
                Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
            };
            if let Step::Frame(pdu, used) =
                pdu::parse(&self.bytes, End::Controller, self.agreed, 1 << 25).unwrap()
            {
                let data = if let Pdu::C2hData(_, data) = pdu { data } else { Data::default() };
                let whole = used + data.len as usize;
                if self.bytes.len() >= whole {
                    let bytes: Vec<u8> = self.bytes.drain(..whole).collect();
                    found = Some((pdu, bytes[used..].to_vec()));
                    return true;
                }
            }
            closed
        });
        found
    }

    fn response(&mut self, target: &mut Node) -> Cqe {
        match self.next(target) {
            Some((Pdu::Response(cqe), _)) => cqe,
            other => panic!("no response: {other:?}"),
        }
    }

    fn opened(target: &mut Node) -> Self {
        let mut raw = Self::new(target);
        raw.send(target, &[pdu::initialize(Kind::IcReq, 0, (false, false), 0).as_bytes()]);
        assert!(matches!(raw.next(target), Some((Pdu::IcResp(_), _))));
        raw
    }

    fn connect(&mut self, target: &mut Node, qid: u16, controller: u16, nqn: &str, host: u8) -> Cqe {
        let data = connect_data([host; 16], controller, nqn, "nqn.2014-08.org.example:host");
        let head = pdu::command(Sqe::connect(1, qid, 8, 60_000), 1_024, self.agreed);
        self.send(target, &[head.bytes(), data.as_bytes()]);
        self.response(target)
    }

    fn command(&mut self, target: &mut Node, sqe: Sqe) -> Cqe {
        self.send(target, &[pdu::command(sqe, 0, self.agreed).bytes()]);
        self.response(target)
    }

    /// An admin queue, and an I/O queue of its controller.
    fn queues(target: &mut Node) -> (Self, Self) {
        let nqn = target.transport.nqn();
        let mut admin = Self::opened(target);
        let id = admin.connect(target, 0, CONTROLLER_ANY, &nqn, 9).result.get() as u16;
        let enabled = admin.command(target, Sqe::property_set(2, property::CC, CC_ENABLED));
        assert_eq!(enabled.status(), Status::SUCCESS);
        let mut queue = Self::opened(target);
        let connected = queue.connect(target, 1, id, &nqn, 9);
        assert_eq!(connected.status(), Status::SUCCESS);
        (admin, queue)
    }

    /// The error in the TermReq that the target sends before it closes.
    fn term(&mut self, target: &mut Node) -> Option<Fatal> {
        let mut found = None;
        while let Some((pdu, _)) = self.next(target) {
            if let Pdu::TermReq(fatal) = pdu {
                found = Some(fatal);
                break;
            }
        }
        found
    }
}

/// The host may send from its memory until the response: that of a refused WRITE comes after its data.
#[test]
fn a_refused_write_is_answered_after_its_data() {
    let (mut honest, mut target) = open();
    honest_works(&mut honest, &mut target, 1);
    let (_admin, mut queue) = Raw::queues(&mut target);
    let bytes = vec![0x55; BLOCK as usize];
    let wrong = Sqe::blocks(io::WRITE, 8, 1, 0, 1).with_data(Place::InCapsule(BLOCK / 2));
    for (sqe, status) in [
        (write_sqe(7, 1 << 40, 1, Place::InCapsule(BLOCK)), Status::LBA_OUT_OF_RANGE),
        (wrong, Status::SGL_TYPE),
    ] {
        let head = pdu::command(sqe, BLOCK, queue.agreed);
        queue.send(&mut target, &[head.bytes(), &bytes[..1_000]]);
        for _ in 0..100 {
            target.poll();
        }
        let mut early = [0; 64];
        let read = queue.stream.read(&mut early).map_err(|error| error.kind());
        assert_eq!(read, Err(std::io::ErrorKind::WouldBlock), "{status:?}");
        queue.send(&mut target, &[&bytes[1_000..]]);
        let cqe = queue.response(&mut target);
        assert_eq!((cqe.status(), cqe.cid.get()), (status, sqe.cid.get()));
    }
    honest_works(&mut honest, &mut target, 2);
}

fn open() -> (Node, Node) {
    pair(&Config { open_to_hosts: true, ..Config::default() }, BYTES)
}

fn honest_works(honest: &mut Node, target: &mut Node, token: u64) {
    honest.memory.set(0, &token.to_le_bytes());
    honest.submit(&[write(token, 0, (BYTES - BLOCK as usize) as u64, BLOCK)]);
    assert!(finish(&mut [honest, target], token).result.is_ok());
    assert_eq!(target.memory.get((BYTES - BLOCK as usize) as u64, 8), token.to_le_bytes());
}

fn write_sqe(cid: u16, lba: u64, blocks: u32, place: Place) -> Sqe {
    Sqe::blocks(io::WRITE, cid, 1, lba, blocks).with_data(place)
}

#[test]
fn a_dialogue_cut_at_any_byte_does_no_harm() {
    let (mut honest, mut target) = open();
    let nqn = target.transport.nqn();
    let agreed = Agreed::default();
    let data = connect_data([9; 16], CONTROLLER_ANY, &nqn, "nqn.2014-08.org.example:host");
    let talk = [
        pdu::initialize(Kind::IcReq, 0, (false, false), 0).as_bytes(),
        pdu::command(Sqe::connect(1, 0, 8, 60_000), 1_024, agreed).bytes(),
        data.as_bytes(),
        pdu::command(Sqe::property_set(2, property::CC, CC_ENABLED), 0, agreed).bytes(),
        pdu::command(Sqe::new(admin::KEEP_ALIVE, 3, 0), 0, agreed).bytes(),
    ]
    .concat();
    for cut in (0..=talk.len()).step_by(7).chain([talk.len()]) {
        let mut raw = Raw::new(&target);
        raw.send(&mut target, &[&talk[..cut]]);
        raw.stream.shutdown(Shutdown::Write).unwrap();
        eventually("the target closes", || {
            target.poll();
            let mut more = [0; 4_096];
            match raw.stream.read(&mut more) {
                Ok(count) => count == 0,
                Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
            }
        });
    }
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn wrong_openings_are_answered_with_the_reason() {
    let (mut honest, mut target) = open();
    let request = pdu::initialize(Kind::IcReq, 0, (false, false), 0);
    let changed = |at: usize, value: u8| {
        let mut bytes = request.as_bytes().to_vec();
        bytes[at] = value;
        bytes
    };
    for (bytes, fatal) in [
        (vec![0x55; 128], Fatal::Field(0)),
        (changed(1, 1), Fatal::Field(1)),
        (changed(2, 24), Fatal::Field(2)),
        (changed(4, 127), Fatal::Field(4)),
        (changed(7, 0x80), Fatal::Field(4)),
        (changed(8, 1), Fatal::Unsupported(8)),
        (changed(10, 32), Fatal::Field(10)),
        (changed(11, 4), Fatal::Field(11)),
        (pdu::command(Sqe::new(io::READ, 1, 1), 0, Agreed::default()).bytes().to_vec(), Fatal::Sequence),
    ] {
        let mut raw = Raw::new(&target);
        raw.send(&mut target, &[&bytes]);
        assert_eq!(raw.term(&mut target), Some(fatal), "{:?}", &bytes[..12]);
    }
    assert_eq!(target.transport.stats().protocol_errors, 9);
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn a_connect_that_must_not_be_is_refused() {
    let (mut honest, mut target) = open();
    let nqn = target.transport.nqn();
    for (qid, controller, name, status) in [
        (0, CONTROLLER_ANY, "nqn.2014-08.org.example:other", Status::CONNECT_PARAMETERS),
        (0, CONTROLLER_ANY, "not-an-nqn", Status::CONNECT_PARAMETERS),
        (0, 5, nqn.as_str(), Status::CONNECT_PARAMETERS),
        (1, 5_555, nqn.as_str(), Status::CONNECT_PARAMETERS),
        (1, CONTROLLER_ANY, nqn.as_str(), Status::CONNECT_PARAMETERS),
        (77, CONTROLLER_ANY, nqn.as_str(), Status::CONNECT_PARAMETERS),
    ] {
        let mut raw = Raw::opened(&mut target);
        let refused = raw.connect(&mut target, qid, controller, name, 9);
        assert_eq!(refused.status(), status, "queue {qid} of {controller} of {name}");
        assert!(raw.next(&mut target).is_none(), "it is closed");
    }
    // Another host's controller, and a queue twice.
    let (_admin, _queue) = Raw::queues(&mut target);
    let mut raw = Raw::opened(&mut target);
    assert_eq!(raw.connect(&mut target, 2, 2, &nqn, 8).status(), Status::CONNECT_PARAMETERS);
    // A command before Connect.
    let mut raw = Raw::opened(&mut target);
    let early = raw.command(&mut target, Sqe::new(admin::IDENTIFY, 4, 0));
    assert_eq!(early.status(), Status::SEQUENCE);
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn reads_and_writes_out_of_range_are_refused_and_the_queue_lives() {
    let (mut honest, mut target) = open();
    let (_admin, mut queue) = Raw::queues(&mut target);
    let blocks = BYTES as u64 / u64::from(BLOCK);
    let before = target.memory.get(0, BYTES);
    let read_sqe =
        |nsid, lba, count, len| Sqe::blocks(io::READ, 7, nsid, lba, count).with_data(Place::Transport(len));
    for (sqe, status) in [
        (read_sqe(1, blocks, 1, BLOCK), Status::LBA_OUT_OF_RANGE),
        (read_sqe(1, u64::MAX, 1, BLOCK), Status::LBA_OUT_OF_RANGE),
        (read_sqe(1, blocks - 1, 2, 2 * BLOCK), Status::LBA_OUT_OF_RANGE),
        (read_sqe(1, 0, 1, BLOCK + 1), Status::SGL_LENGTH),
        (read_sqe(1, 0, 2, BLOCK), Status::SGL_LENGTH),
        (read_sqe(1, 0, 65_536, 0), Status::SGL_TYPE),
        (read_sqe(99, 0, 1, BLOCK), Status::INVALID_NAMESPACE),
        (read_sqe(u32::MAX, 0, 1, BLOCK), Status::INVALID_NAMESPACE),
        (write_sqe(7, blocks, 1, Place::Transport(BLOCK)), Status::LBA_OUT_OF_RANGE),
        (write_sqe(7, 0, 1, Place::Transport(u32::MAX)), Status::SGL_LENGTH),
        (write_sqe(7, 0, 1, Place::InCapsule(BLOCK)), Status::SGL_TYPE),
        (Sqe::new(0x99, 7, 1), Status::INVALID_OPCODE),
        (Sqe { flags: 0, ..read_sqe(1, 0, 1, BLOCK) }, Status::SGL_TYPE),
        (Sqe::new(io::FLUSH, 7, 99), Status::INVALID_NAMESPACE),
        (Sqe::new(io::FLUSH, 7, 1), Status::SUCCESS),
    ] {
        assert_eq!(queue.command(&mut target, sqe).status(), status, "{sqe:?}");
    }
    // In-capsule data of a refused WRITE is discarded, and the queue goes on behind it.
    let head = pdu::command(write_sqe(8, blocks, 1, Place::InCapsule(BLOCK)), BLOCK, queue.agreed);
    queue.send(&mut target, &[head.bytes(), &[1; BLOCK as usize]]);
    assert_eq!(queue.response(&mut target).status(), Status::LBA_OUT_OF_RANGE);
    assert!(target.memory.get(0, BYTES) == before);
    honest_works(&mut honest, &mut target, 1);
}

/// Sends a WRITE that needs an R2T, and returns the transfer's tag.
fn asked(queue: &mut Raw, target: &mut Node, cid: u16) -> u16 {
    let sqe = write_sqe(cid, 0, 2, Place::Transport(2 * BLOCK));
    queue.send(target, &[pdu::command(sqe, 0, queue.agreed).bytes()]);
    match queue.next(target) {
        Some((Pdu::R2t(r2t), _)) => r2t.ttag.get(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn data_that_was_not_asked_for_ends_the_controller() {
    let (mut honest, mut target) = open();
    type Change = fn(&mut (u16, u16, u32, u32, u8));
    let changes: &[(Change, Fatal)] = &[
        (|data| data.0 ^= 1, Fatal::Field(10)),
        (|data| data.1 ^= 1, Fatal::Field(10)),
        (|data| data.1 = 0xffff, Fatal::Field(10)),
        (|data| data.2 = BLOCK, Fatal::OutOfRange(12)),
        (|data| data.2 = u32::MAX - 8, Fatal::OutOfRange(16)),
        (|data| data.3 = 2 * BLOCK + 4, Fatal::OutOfRange(16)),
        (|data| data.4 = 0, Fatal::Field(1)),
        (|data| data.3 = BLOCK, Fatal::Field(1)),
        (|data| data.3 = 64 << 20, Fatal::Limit),
    ];
    for &(change, fatal) in changes {
        let (_admin, mut queue) = Raw::queues(&mut target);
        let tag = asked(&mut queue, &mut target, 5);
        let mut data = (5, tag, 0, 2 * BLOCK, pdu::FLAG_LAST);
        change(&mut data);
        let (cid, ttag, offset, len, flags) = data;
        let head = pdu::transfer(Kind::H2cData, flags, cid, ttag, (offset, len), queue.agreed);
        queue.send(&mut target, &[head.bytes()]);
        assert_eq!(queue.term(&mut target), Some(fatal), "{data:?}");
        assert_eq!(target.transport.region_pins(REGION), Ok((0, 0)), "nothing is held");
    }
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn a_host_that_dies_in_the_middle_of_data_releases_the_region() {
    let (mut honest, mut target) = open();
    let (_admin, mut queue) = Raw::queues(&mut target);
    let tag = asked(&mut queue, &mut target, 5);
    assert_eq!(target.transport.region_pins(REGION), Ok((0, 1)));
    let head = pdu::transfer(Kind::H2cData, pdu::FLAG_LAST, 5, tag, (0, 2 * BLOCK), queue.agreed);
    queue.send(&mut target, &[head.bytes(), &[7; 100]]);
    drop(queue);
    eventually("the region is free", || {
        target.poll();
        target.transport.region_pins(REGION) == Ok((0, 0))
    });
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn more_commands_than_the_queue_has_entries_end_the_controller() {
    let (mut honest, mut target) = open();
    let (_admin, mut queue) = Raw::queues(&mut target);
    // The queue has 8 entries, so 7 or 8 may be in flight; none gets its data.
    let heads: Vec<u8> = (10..22)
        .flat_map(|cid| {
            let sqe = write_sqe(cid, 0, 1, Place::Transport(BLOCK));
            pdu::command(sqe, 0, queue.agreed).bytes().to_vec()
        })
        .collect();
    queue.send(&mut target, &[&heads]);
    assert_eq!(queue.term(&mut target), Some(Fatal::Limit));
    assert_eq!(target.transport.region_pins(REGION), Ok((0, 0)));
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn damaged_data_is_reported_and_the_queue_lives() {
    let (mut honest, mut target) = open();
    let (mut admin, _queue) = Raw::queues(&mut target);
    let identify = Sqe::new(admin::IDENTIFY, 3, 0).with_data(Place::Transport(4_096)).with_dwords(&[1]);
    admin.send(&mut target, &[pdu::command(identify, 0, admin.agreed).bytes()]);
    let Some((Pdu::C2hData(..), data)) = admin.next(&mut target) else { panic!("no data") };
    let id = u16::from_le_bytes([data[78], data[79]]);
    let mut queue = Raw::new(&target);
    queue.send(&mut target, &[pdu::initialize(Kind::IcReq, 0, (false, true), 0).as_bytes()]);
    assert!(matches!(queue.next(&mut target), Some((Pdu::IcResp(_), _))));
    queue.agreed.data_digest = true;
    let nqn = target.transport.nqn();
    let connect = connect_data([9; 16], id, &nqn, "nqn.2014-08.org.example:host");
    let head = pdu::command(Sqe::connect(1, 2, 8, 0), 1_024, queue.agreed);
    let digest = crc32c::crc32c(connect.as_bytes()).to_le_bytes();
    queue.send(&mut target, &[head.bytes(), connect.as_bytes(), &digest]);
    assert_eq!(queue.response(&mut target).status(), Status::SUCCESS);
    let head = pdu::command(write_sqe(4, 0, 1, Place::InCapsule(BLOCK)), BLOCK, queue.agreed);
    queue.send(&mut target, &[head.bytes(), &[3; BLOCK as usize], &[0; 4]]);
    assert_eq!(queue.response(&mut target).status(), Status::TRANSIENT_TRANSPORT);
    let digest = crc32c::crc32c(&[3; BLOCK as usize]).to_le_bytes();
    queue.send(&mut target, &[head.bytes(), &[3; BLOCK as usize], &digest]);
    assert_eq!(queue.response(&mut target).status(), Status::SUCCESS);
    assert_eq!(target.memory.get(0, BLOCK as usize), [3; BLOCK as usize]);
    assert_eq!(target.transport.stats().corrupt, 1);
    honest_works(&mut honest, &mut target, 1);
}

#[test]
fn silent_connections_and_too_many_of_them_make_no_difference() {
    let config = Config { connections_max: 8, ..Config::default() };
    let (mut honest, mut target) = pair(&config, BYTES);
    honest_works(&mut honest, &mut target, 1);
    let _silent: Vec<TcpStream> =
        (0..16).map(|_| TcpStream::connect(target.transport.local_address()).unwrap()).collect();
    eventually("some are turned away", || {
        target.poll();
        target.transport.stats().turned_away > 0
    });
    honest_works(&mut honest, &mut target, 2);
    common::skip(std::time::Duration::from_secs(6));
    eventually("the silent ones are closed", || {
        target.poll();
        honest.poll();
        target.transport.connections() <= 3
    });
    honest_works(&mut honest, &mut target, 3);
}

/// The kernel's host disconnects and resets in this order: it closes its I/O queues, then it writes CC on the
/// admin queue and waits for CSTS.
#[test]
fn a_controller_outlives_the_connections_of_its_io_queues() {
    let (mut honest, mut target) = open();
    let (mut admin, queue) = Raw::queues(&mut target);
    let connections = target.transport.connections();
    drop(queue);
    eventually("the connection is gone", || {
        target.poll();
        target.transport.connections() < connections
    });
    let shut_down = Sqe::property_set(3, property::CC, CC_ENABLED | CC_SHUTDOWN);
    assert_eq!(admin.command(&mut target, shut_down).status(), Status::SUCCESS);
    let status = admin.command(&mut target, Sqe::property_get(4, property::CSTS));
    assert_eq!(status.result.get() as u32, CSTS_SHUT_DOWN);
    // The admin queue is the controller: with it, the other connections end.
    let (admin, mut queue) = Raw::queues(&mut target);
    drop(admin);
    assert!(queue.next(&mut target).is_none(), "the I/O queue of a controller that is gone is closed");
    honest_works(&mut honest, &mut target, 1);
}

/// More data than a target queues at a time, from a host that sends nothing else: the commands that wait in
/// the target's buffer are taken once there is room.
#[test]
fn reads_beyond_what_is_queued_at_once_are_all_served() {
    let (mut honest, mut target) = open();
    let (_admin, mut queue) = Raw::queues(&mut target);
    let heads: Vec<u8> = (10..60)
        .flat_map(|cid| {
            let blocks = BYTES as u32 / BLOCK;
            let sqe = Sqe::blocks(io::READ, cid, 1, 0, blocks).with_data(Place::Transport(BYTES as u32));
            pdu::command(sqe, 0, queue.agreed).bytes().to_vec()
        })
        .collect();
    queue.send(&mut target, &[&heads]);
    // The host empties its socket between two polls of the target, so that the target can send all it has.
    let (mut arrived, mut more) = (0, vec![0; 1 << 20]);
    eventually("all data", || {
        while let Ok(count @ 1..) = queue.stream.read(&mut more) {
            arrived += count;
        }
        target.poll();
        arrived == 50 * (BYTES + 24)
    });
    honest_works(&mut honest, &mut target, 1);
}

//! A target without a transport, and peers that the test plays over sockets.

use core::net::SocketAddr;
use std::io::{Read, Write};
use std::net::TcpStream;

use zerocopy::little_endian::{U16, U32, U64};

use te_fabric::testkit::eventually;

use super::*;
use crate::config::Config;
use crate::context::testing::{KEY, Lent, REGION};
use crate::frame::{DataEntry, MAGIC, Operation, VERSION, Welcome};

/// The incarnation of the target.
const US: u64 = 5;

struct Rig {
    target: Target,
    lent: Lent,
    address: SocketAddr,
}

impl Rig {
    fn new(config: Config) -> Self {
        let mut lent = Lent::new(config);
        lent.region(4_096, 9);
        let address = lent.io.local_address().expect("it is bound");
        Self { target: Target::new(US), lent, address }
    }

    /// Does once what a poll does for the target.
    fn poll(&mut self) {
        let Self { target, lent, .. } = self;
        target.begin_poll(&mut lent.cx());
        for at in 0..lent.io.ready() {
            let Some(event) = lent.io.event(at) else { continue };
            if let ConnectionName::Peer(name) = ConnectionName::of(event.token) {
                target.drive(name, Reading::of(event.readable), event.writable, &mut lent.cx());
            }
        }
        if lent.io.takes_connections() {
            target.accept_all(&mut lent.cx());
        }
    }

    /// Polls until `done` returns true.
    fn poll_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        eventually("the rig has reached the expected state", || {
            self.poll();
            done(self)
        });
    }

    /// Connects, sends a HELLO, and returns the stream and the status of the WELCOME.
    fn connect(&mut self, session: u64, connection: u16, target: u64) -> (TcpStream, u32) {
        let mut stream = TcpStream::connect(self.address).expect("it listens");
        let hello = Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            connection: U16::new(connection),
            connection_generation: U32::new(1),
            session: U64::new(session),
            initiator: U64::new(8),
            target: U64::new(target),
            identity: U64::new(session),
        };
        stream.write_all(hello.as_bytes()).expect("room");
        let sent = self.lent.io.stats().bytes_sent + size_of::<Welcome>() as u64;
        self.poll_until(|rig| rig.lent.io.stats().bytes_sent >= sent);
        let mut welcome = [0; size_of::<Welcome>()];
        stream.read_exact(&mut welcome).expect("a WELCOME");
        let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&welcome) else { panic!("no WELCOME") };
        (stream, welcome.status.get())
    }
}

fn asked(key: u64, len: u64) -> Operation {
    Operation {
        region: U32::new(REGION.index),
        generation: U32::new(REGION.generation),
        key: U64::new(key),
        offset: U64::new(0),
        len: U64::new(len),
        crc: U32::ZERO,
        reserved: U32::ZERO,
    }
}

#[test]
fn a_read_is_answered_with_what_was_granted_and_the_rest_is_refused() {
    let mut rig = Rig::new(Config::default());
    let (mut stream, status) = rig.connect(1, 0, US);
    assert_eq!((status, rig.target.has_peer(1), rig.target.has_peer(2)), (0, true, false));
    stream.write_all(Header::new(Kind::Read, 0, 2, 0).as_bytes()).expect("room");
    stream.write_all([asked(KEY, 100), asked(KEY + 1, 100)].as_bytes()).expect("room");
    rig.poll_until(|rig| rig.target.stats().bytes_served == 100 && rig.lent.users() == (0, 0));
    let mut answer = [0; size_of::<Header>() + 2 * size_of::<DataEntry>() + 100];
    stream.read_exact(&mut answer).expect("DATA");
    let Ok(Step::Frame(frame::Response::Data { entries: [granted, refused], .. }, head)) =
        frame::parse_response(&answer)
    else {
        panic!("no DATA")
    };
    assert_eq!((granted.status.get(), refused.status.get()), (0, Status::AccessDenied as u32));
    assert_eq!((answer[head..] == [9; 100], rig.target.stats().refused), (true, 1));
}

#[test]
fn a_hello_for_another_incarnation_is_refused() {
    let mut rig = Rig::new(Config::default());
    let (_stream, status) = rig.connect(1, 0, US + 1);
    assert_eq!((status, rig.target.admission.admitted()), (Status::Restarted as u32, 0));
}

#[test]
fn a_fence_ends_the_connections_of_its_session_that_it_does_not_list() {
    let mut rig = Rig::new(Config::default());
    let (mut first, _) = rig.connect(1, 0, US);
    let (mut second, _) = rig.connect(1, 1, US);
    let (_other, _) = rig.connect(2, 1, US);
    // A WRITE that has arrived by half on the second connection.
    second.write_all(Header::new(Kind::Write, 0, 1, 0).as_bytes()).expect("room");
    second.write_all(asked(KEY, 100).as_bytes()).expect("room");
    rig.poll_until(|rig| rig.lent.users() == (0, 1));

    first.write_all(Header::new(Kind::Fence, 0, 1, 33).as_bytes()).expect("room");
    first.write_all(ConnectionEntry::new(0, 1).as_bytes()).expect("room");
    rig.poll_until(|rig| rig.target.stats().fences_served == 1);
    assert_eq!((rig.target.connections.len(), rig.lent.io.connections(), rig.lent.users()), (2, 2, (0, 0)));
    let mut answer = [0; size_of::<Header>()];
    first.read_exact(&mut answer).expect("FENCE_ACK");
    assert_eq!(answer, Header::new(Kind::FenceAck, 0, 0, 33).as_bytes());
}

#[test]
fn a_region_is_withdrawn_from_a_write_in_the_middle() {
    let mut rig = Rig::new(Config::default());
    let (mut stream, _) = rig.connect(1, 0, US);
    stream.write_all(Header::new(Kind::Write, 0, 1, 0).as_bytes()).expect("room");
    stream.write_all(asked(KEY, 4).as_bytes()).expect("room");
    rig.poll_until(|rig| rig.lent.users() == (0, 1));
    rig.target.withdraw(REGION.index, &mut rig.lent.cx());
    assert_eq!(rig.lent.users(), (0, 0));
    stream.write_all(&[1; 4]).expect("room");
    let sent = rig.lent.io.stats().bytes_sent;
    rig.poll_until(|rig| rig.lent.io.stats().bytes_sent > sent);
    let mut answer = [0; size_of::<Header>() + 4];
    stream.read_exact(&mut answer).expect("ACK");
    assert_eq!(answer[size_of::<Header>()..], (Status::Withdrawn as u32).to_le_bytes());
}

#[test]
fn a_connection_that_never_carries_anything_is_closed_in_time() {
    let mut rig = Rig::new(Config::default());
    let (mut stream, _) = rig.connect(1, 0, US);
    assert_eq!(rig.target.look(&mut rig.lent.cx()), Some(Instant::from_millis(6_000)));
    rig.lent.timers.begin(Instant::from_millis(6_000));
    assert_eq!(rig.target.look(&mut rig.lent.cx()), Some(Instant::from_millis(7_000)));
    let mut last = [0; size_of::<Header>()];
    stream.read_exact(&mut last).expect("GO_AWAY");
    assert_eq!(last, Header::new(Kind::GoAway, 0, 0, 0).as_bytes());
    assert!(rig.target.has_peer(1), "it may be alive");
    rig.lent.timers.begin(Instant::from_millis(7_000));
    assert_eq!((rig.target.look(&mut rig.lent.cx()), rig.lent.io.connections()), (None, 0));
    assert!(rig.target.has_peer(1), "this target closed its connection");
    assert_eq!(rig.target.expel(1, ExpelMode::Force, &mut rig.lent.cx()), Ok(true));
    assert_eq!(rig.connect(1, 0, US).1, Status::Expelled as u32);
}

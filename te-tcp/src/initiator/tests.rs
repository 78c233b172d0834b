//! An initiator without a transport, connected to a listener at which the test plays the target.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use te_core::{Outcome, RegionOffset, RemoteOffset};
use zerocopy::FromBytes;

use te_fabric::testkit::{eventually, export};

use super::*;
use crate::connection::ConnectionName;
use crate::context::testing::{Lent, REGION};
use crate::frame::{self, EXPORT_FORMAT, Hello, PROTOCOL, Request, Status, Step};

const REMOTE: RemoteRegionId = RemoteRegionId::new(0, 1);
const US: Greeting = Greeting { session: 1, incarnation: 2, identity: 3 };
/// The incarnation of the target.
const THEM: u64 = 5;

struct Rig {
    initiator: Initiator,
    peers: Peers,
    lent: Lent,
    listener: TcpListener,
}

impl Rig {
    fn new(config: Config) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("it is bound");
        let mut export = export(EXPORT_FORMAT);
        (export.port, export.incarnation, export.region) = (address.port(), THEM, 6);
        let mut initiator = Initiator::new(US, &config);
        let mut peers = Peers::new(config.remote_regions_max, config.fences_max);
        initiator.attach(REMOTE, &export, &mut peers).expect("room");
        let mut lent = Lent::new(config);
        lent.region(1 << 20, 9);
        Self { initiator, peers, lent, listener }
    }

    fn write(&mut self, token: u64, len: u32) {
        let slice = Slice {
            token: Token(token),
            local: RegionOffset::new(REGION, 0),
            remote: RemoteOffset::new(REMOTE, 0),
            len,
            op: Op::Write,
        };
        self.initiator.accept(&slice, &mut self.peers, &mut self.lent.cx()).expect("a good slice");
    }

    /// Does once what a poll does for the initiator.
    fn poll(&mut self) {
        let Self { initiator, peers, lent, .. } = self;
        initiator.feed(peers, &mut lent.cx());
        for at in 0..lent.io.ready() {
            let Some(event) = lent.io.event(at) else { continue };
            if let ConnectionName::Own(name) = ConnectionName::of(event.token) {
                initiator.drive(name, Reading::of(event.readable), event.writable, peers, &mut lent.cx());
            }
        }
        initiator.feed(peers, &mut lent.cx());
    }

    /// Polls until `done` returns true.
    fn poll_until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        eventually("the rig has reached the expected state", || {
            self.poll();
            done(self)
        });
    }

    /// Accepts the initiator's connection, reads its HELLO and answers with a WELCOME. Returns the target's
    /// end of the connection.
    fn welcomed(&mut self) -> (TcpStream, Hello) {
        self.poll();
        let (mut stream, _) = self.listener.accept().expect("a connection");
        self.poll_until(|rig| rig.lent.io.stats().bytes_sent >= size_of::<Hello>() as u64);
        let mut hello = [0; size_of::<Hello>()];
        stream.read_exact(&mut hello).expect("a HELLO");
        stream.write_all(PROTOCOL.welcome(0, THEM, 1 << 30).as_bytes()).expect("room");
        (stream, Hello::read_from_bytes(&hello).expect("of that length"))
    }

    fn fetch(&mut self) -> Option<Completion> {
        let mut out = [Completion::applied(Token(0))];
        (self.initiator.fetch(&mut out) == 1).then_some(out[0])
    }
}

#[test]
fn a_slice_opens_a_connection_that_says_who_we_are() {
    let mut rig = Rig::new(Config::default());
    rig.write(1, 100);
    let (mut stream, hello) = rig.welcomed();
    let said = (hello.session.get(), hello.initiator.get(), hello.target.get(), hello.identity.get());
    assert_eq!(said, (US.session, US.incarnation, THEM, US.identity));
    assert_eq!((rig.lent.io.connections(), rig.initiator.stats().connections_opened), (1, 1));

    rig.poll_until(|rig| rig.initiator.stats().frames_sent == 1);
    let mut head = [0; size_of::<Header>() + size_of::<frame::Operation>() + 100];
    stream.read_exact(&mut head).expect("a WRITE and its payload");
    let Ok(Step::Frame(Request::Write { seq: 0, operations: [asked], .. }, len)) =
        frame::parse_request(&head)
    else {
        panic!("no WRITE")
    };
    assert_eq!((asked.region.get(), asked.key.get(), asked.len.get()), (6, 7, 100));
    assert_eq!(head[len..], [9; 100]);

    stream.write_all(Header::new(Kind::Ack, 0, 1, 0).as_bytes()).expect("room");
    stream.write_all(&(Status::Ok as u32).to_le_bytes()).expect("room");
    rig.poll_until(|rig| rig.initiator.has_completions());
    assert_eq!(rig.fetch(), Some(Completion::applied(Token(1))));
    assert_eq!((rig.initiator.slices_in_flight(), rig.lent.users()), (0, (0, 0)));
}

#[test]
fn an_answer_to_what_was_not_asked_ends_the_connection_and_settles_its_pieces() {
    let mut rig = Rig::new(Config::default());
    rig.write(1, 100);
    let (mut stream, _) = rig.welcomed();
    rig.poll_until(|rig| rig.initiator.stats().frames_sent == 1);
    // Two statuses for one WRITE.
    stream.write_all(Header::new(Kind::Ack, 0, 2, 0).as_bytes()).expect("room");
    stream.write_all(&[0; 8]).expect("room");
    rig.poll_until(|rig| rig.initiator.stats().connections_lost == 1);
    let end = rig.fetch().expect("L1");
    assert_eq!(end.outcome, Outcome::Unknown);
    assert_eq!(end.result.map_err(|error| error.kind), Err(ErrorKind::Protocol));
    assert_eq!((rig.initiator.slices_in_flight(), rig.lent.users()), (0, (0, 0)));
}

#[test]
fn a_slice_cancelled_before_a_connection_is_up_ends_at_once() {
    let mut rig = Rig::new(Config::default());
    rig.write(1, 100);
    rig.poll();
    rig.initiator.cancel(Token(1), &mut rig.peers, &mut rig.lent.cx()).expect("it is in flight");
    assert_eq!(rig.fetch().map(|end| end.outcome), Some(Outcome::NotApplied));
    assert_eq!((rig.initiator.slices_in_flight(), rig.lent.users()), (0, (0, 0)));
    let again = rig.initiator.cancel(Token(1), &mut rig.peers, &mut rig.lent.cx());
    assert_eq!(again.map_err(|error| error.kind), Err(ErrorKind::NotFound));
}

#[test]
fn a_connection_that_does_not_come_up_in_time_is_given_up() {
    let mut rig = Rig::new(Config { connect_ms_max: 50, ..Config::default() });
    rig.write(1, 100);
    rig.poll();
    let Rig { initiator, peers, lent, .. } = &mut rig;
    assert_eq!(initiator.look(peers, &mut lent.cx()), Some(Instant::from_millis(1_050)));
    lent.timers.begin(Instant::from_millis(1_050));
    initiator.look(peers, &mut lent.cx());
    assert_eq!((initiator.stats().connections_lost, lent.io.connections()), (1, 0));
    let end = rig.fetch().expect("there is no other address");
    let kind = end.result.map_err(|error| error.kind);
    assert_eq!((end.outcome, kind), (Outcome::NotApplied, Err(ErrorKind::PeerDead)));
}

#[test]
fn a_peer_goes_with_its_last_remote_region() {
    let mut rig = Rig::new(Config::default());
    rig.write(1, 100);
    let kind = |result: Result<(), Error>| result.map_err(|error| error.kind);
    let Rig { initiator, peers, lent, .. } = &mut rig;
    assert_eq!(kind(initiator.detach(REMOTE, peers, &mut lent.cx())), Err(ErrorKind::Busy));
    initiator.cancel(Token(1), peers, &mut lent.cx()).expect("it is in flight");
    assert_eq!(kind(initiator.detach(REMOTE, peers, &mut lent.cx())), Ok(()));
    assert!(peers.get(0).is_none() && !peers.has_listed());
}

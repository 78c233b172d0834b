use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;
use crate::connection::PeerName;
use te_fabric::Slab;

/// A connection that is watched, and the peer's end of it.
fn connection(io: &mut Io, names: &mut Slab<(), PeerName>) -> (Connection<u32>, TcpStream) {
    let theirs = TcpStream::connect(io.local_address().expect("it is bound")).expect("it listens");
    let ours = loop {
        match io.accept() {
            Accepted::Connection(stream) => break stream,
            Accepted::Empty => std::thread::yield_now(),
            other => panic!("{other:?}"),
        }
    };
    let connection = Connection::new(ours.into(), names.reserve().1.raw(), Interest::READ, 0);
    io.watch(&connection).expect("a fresh socket");
    (connection, theirs)
}

fn open() -> (Io, Slab<(), PeerName>) {
    (Io::open(&Config::default()).expect("loopback"), Slab::new())
}

#[test]
fn connections_are_counted_while_they_are_watched() {
    let (mut io, mut names) = open();
    let (one, _theirs) = connection(&mut io, &mut names);
    let (other, _others) = connection(&mut io, &mut names);
    assert_eq!(io.connections(), 2);
    io.forget(&one);
    assert_eq!(io.connections(), 1);
    io.forget(&other);
    assert_eq!(io.connections(), 0);
}

#[test]
fn bytes_go_out_and_come_in_and_are_counted() {
    let (mut io, mut names) = open();
    let (mut connection, mut theirs) = connection(&mut io, &mut names);
    connection.outbox.push_head(&[b"there"]);
    let mut finished = 0;
    let sent = io.send(&mut connection, |role, _, progress| {
        *role += 1;
        finished += u32::from(progress == Progress::Finished);
    });
    assert_eq!((sent.ok(), connection.role, finished), (Some(true), 1, 1));
    assert_eq!(io.send(&mut connection, |_, _, _| {}).ok(), Some(false), "nothing waits");
    let mut bytes = [0; 5];
    theirs.read_exact(&mut bytes).expect("five bytes");
    assert_eq!(&bytes, b"there");

    let nothing = io.receive(&mut connection, &mut Reading::Yes).expect("the connection is up");
    assert!(nothing.is_none());
    theirs.write_all(b"here").expect("room");
    let received = loop {
        if let Some(received) = io.receive(&mut connection, &mut Reading::Yes).expect("the connection is up")
        {
            break received;
        }
    };
    assert_eq!((received.bytes, received.drained, connection.inbox.unparsed()), (4, true, &b"here"[..]));
    drop(theirs);
    let end = loop {
        match io.receive(&mut connection, &mut Reading::Yes) {
            Ok(_) => std::thread::yield_now(),
            Err(error) => break error.kind(),
        }
    };
    assert_eq!(end, io::ErrorKind::UnexpectedEof);
    let stats = io.stats();
    assert_eq!((stats.sends, stats.receives, stats.bytes_sent, stats.bytes_received), (1, 1, 5, 4));
}

#[test]
fn an_active_connection_is_read_without_asking_until_it_has_been_idle_for_long() {
    let (mut io, mut names) = open();
    let (mut connection, _theirs) = connection(&mut io, &mut names);
    assert!(io.asks(1), "no connection is active");
    io.mark_active(&mut connection);
    io.mark_active(&mut connection);
    assert_eq!(
        (io.active(0), io.active(1), io.asks(1), io.asks(ASK_EVERY)),
        (Some(connection.name), None, false, true)
    );
    for _ in 1..EAGER_READS {
        assert!(io.receive(&mut connection, &mut Reading::Yes).expect("the connection is up").is_none());
        assert_eq!(io.had_turn(0, connection.name, connection.is_active()), 1);
    }
    assert!(io.receive(&mut connection, &mut Reading::Yes).expect("the connection is up").is_none());
    assert_eq!((connection.eager_reads, io.had_turn(0, connection.name, false), io.active(0)), (0, 0, None));
    io.mark_active(&mut connection);
    io.forget(&connection);
    assert_eq!(io.active(0), None, "it has ended");
}

#[test]
fn a_connection_that_waits_for_its_socket_makes_the_system_be_asked() {
    let (mut io, mut names) = open();
    let (mut connection, _theirs) = connection(&mut io, &mut names);
    io.mark_active(&mut connection);
    assert!(!io.asks(1));
    connection.blocked = true;
    io.settle_interest(&mut connection);
    assert_eq!((connection.interest, io.asks(1)), (Interest::BOTH, true));
    connection.blocked = false;
    io.settle_interest(&mut connection);
    assert!(!io.asks(1));
    connection.blocked = true;
    io.settle_interest(&mut connection);
    io.forget(&connection);
    assert_eq!(io.waiting_to_write, 0);
}

#[test]
fn a_paused_listener_takes_no_connections_until_its_pause_is_over() {
    let (mut io, _) = open();
    let mut timers = Timers::new();
    timers.begin(Instant::from_millis(1_000));
    io.accepts_more();
    io.pause_listener(&io::Error::from_raw_os_error(libc::EMFILE), 8, &mut timers);
    assert_eq!((io.takes_connections(), timers.is_due()), (false, true));
    let until = io.look_at_listener(&mut timers).expect("accepting is paused");
    timers.begin(until);
    assert_eq!((io.look_at_listener(&mut timers), io.takes_connections()), (None, true));
}

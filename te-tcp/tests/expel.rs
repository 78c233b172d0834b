//! An initiator that is cut off: nothing of it lands any more, whatever lies in which buffer, and others do
//! not notice.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant as Clock};

use common::raw::{Raw, frame_of};
use common::{
    Process, REMOTE, by_peers, bytes_of, drive, finish, hex, kind, linger, pair, skip, users, write,
};
use te_core::{Completion, EXPELLED_MAX, ErrorKind, Memory, Outcome, Token, Transport};
use te_tcp::Config;
use te_tcp::frame::{self, Kind, Status, Step};
use zerocopy::IntoBytes;

const BYTES: usize = 1 << 20;

#[test]
fn what_lies_in_the_socket_of_an_expelled_peer_never_lands() {
    let mut target = common::node(common::config(), BYTES);
    let (mut writer, mut other) = (Raw::greeted(&mut target, 1, 0), Raw::greeted(&mut target, 2, 0));
    for raw in [&mut writer, &mut other] {
        raw.say(&mut target, &frame_of(Kind::Write, 0, 0, &[raw.operation(0, 1_000)]));
        raw.say(&mut target, &[1; 400]);
    }
    linger(&mut [&mut target], Duration::from_millis(20));
    assert_eq!(users(&target), by_peers(2));
    // The rest of the payload, and another WRITE, lie in the target's socket.
    writer.stream.write_all(&[2; 600]).unwrap();
    writer.stream.write_all(&frame_of(Kind::Write, 0, 1, &[writer.operation(0, 1_000)])).unwrap();
    writer.stream.write_all(&[3; 1_000]).unwrap();
    assert_eq!(target.transport.expel(2, false), Err(ErrorKind::Busy.into()), "it has a connection");
    assert_eq!(target.transport.expel(2, true), Ok(true));
    assert_eq!(users(&target), by_peers(1), "the other's WRITE is not touched");
    target.memory.set(0, &[7; 1_000]);
    linger(&mut [&mut target], Duration::from_millis(50));
    assert_eq!(target.memory.get(0, 1_000), [7; 1_000]);

    // It comes back, on as many connections as it likes, and is told why it may not.
    for connection in 0..3 {
        let mut again = Raw::new(&target);
        let hello = again.hello(1, connection);
        again.say(&mut target, hello.as_bytes());
        let Ok(Step::Frame(welcome, _)) = frame::parse_welcome(&again.hear_out(&mut target)) else {
            panic!()
        };
        assert_eq!(welcome.status.get(), Status::Expelled as u32);
    }
    other.say(&mut target, &[1; 600]);
    assert_eq!(other.hear(&mut target, 20)[16..], [0; 4], "the other goes on in mid-word");
    assert!(target.transport.is_connected(3) && !target.transport.is_connected(2));
}

#[test]
fn a_peer_without_a_connection_is_refused_when_it_comes() {
    let (mut a, mut target) = pair(&Config { identity: 77, ..common::config() }, BYTES);
    assert_eq!(a.transport.identity(), 77);
    assert_eq!(target.transport.expel(0, true), Err(ErrorKind::InvalidArgument.into()));
    assert_eq!(target.transport.expel(77, false), Ok(true));
    assert_eq!(target.transport.expel(77, false), Ok(true), "once more is no harm");
    for token in 1..4 {
        a.submit(&[write(token, 0, 0, 8)]);
        let end = finish(&mut [&mut a, &mut target], token);
        assert_eq!((kind(&end), end.outcome), (ErrorKind::Expelled, Outcome::NotApplied));
    }
    // The target has said that nothing of ours lands any more.
    a.transport.fence(Token(9), REMOTE).unwrap();
    assert_eq!(finish(&mut [&mut a, &mut target], 9), Completion::applied(Token(9)));
    // Its own memory and its work as an initiator are another matter.
    a.transport.detach(REMOTE).unwrap();
    target.attach(&a);
    target.submit(&[write(1, 0, 0, 8)]);
    assert!(finish(&mut [&mut target, &mut a], 1).result.is_ok());
}

#[test]
fn a_peer_that_was_sent_away_for_being_idle_is_not_taken_for_a_dead_one() {
    let (mut a, mut target) = pair(&Config { identity: 77, ..common::config() }, BYTES);
    a.transport.fence(Token(1), REMOTE).unwrap();
    finish(&mut [&mut a, &mut target], 1);
    // Its connection has never carried anything.
    skip(Duration::from_secs(6));
    drive(&mut [&mut target, &mut a], |target| target.transport.connections() == 0);
    assert_eq!(target.transport.expel(77, false), Err(ErrorKind::Busy.into()));
    a.submit(&[write(2, 0, 0, 8)]);
    assert!(finish(&mut [&mut a, &mut target], 2).result.is_ok());
    // It hangs up by itself.
    drop(a);
    drive(&mut [&mut target], |target| target.transport.connections() == 0);
    assert_eq!(target.transport.expel(77, false), Ok(true));
}

#[test]
fn the_expelled_are_counted_and_there_is_a_limit() {
    let mut target = common::node(common::config(), BYTES);
    for identity in 1..=EXPELLED_MAX as u64 {
        assert_eq!(target.transport.expel(identity, false), Ok(true));
    }
    let one_more = EXPELLED_MAX as u64 + 1;
    let mut raw = Raw::greeted(&mut target, one_more - 1, 0);
    assert_eq!(target.transport.expel(one_more, true), Err(ErrorKind::Full.into()));
    assert!(raw.is_alive(&mut target), "nothing has changed for it");
    assert_eq!(target.transport.expel(5, true), Ok(true), "who is refused already needs no room");
}

const TARGET: &str = "SNOWSKIN_TEST_EXPEL_TARGET";

/// Writes over and over to the export that it is given, when it is asked to; else there is nothing to test
/// here.
#[test]
fn writer_process() {
    let Ok(hex) = std::env::var(TARGET) else { return };
    let blob = bytes_of(&hex);
    let mut node = common::node(
        Config { identity: 99, connections: 4, reconnect_ms_max: 10, ..common::config() },
        BYTES,
    );
    node.transport.attach(REMOTE, &blob).unwrap();
    node.memory.set(0, &[0xbb; BYTES]);
    let mut token = 0;
    println!("\nwriting");
    std::io::stdout().flush().unwrap();
    loop {
        while node.transport.submit(&[write(token, 0, 0, BYTES as u32)]) == Ok(1) {
            token += 1;
        }
        node.poll();
        // What fails is tried again, with the same bytes and with others.
        if node.done.iter().any(|end| end.result.is_err_and(|error| error.kind == ErrorKind::Expelled)) {
            println!("expelled");
            std::io::stdout().flush().unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        node.done.clear();
    }
}

#[test]
fn a_writer_that_was_stopped_and_goes_on_is_expelled_and_writes_nothing() {
    let mut target = common::node(common::config(), BYTES);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["writer_process", "--exact", "--nocapture"])
        .env(TARGET, hex(&target.export()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut process = Process(child);
    let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "writing"));
    drive(&mut [&mut target], |target| target.transport.stats().bytes_served > 8 << 20);
    let pid = process.0.id() as libc::pid_t;
    // SAFETY: takes no pointer; the process is ours.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
    // While it stands, its kernel and ours hold megabytes of it.
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    while !state().contains(") T ") {
        std::thread::yield_now();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(target.transport.expel(99, false), Err(ErrorKind::Busy.into()));
    assert_eq!(target.transport.expel(99, true), Ok(true));
    target.memory.set(0, &[0xaa; BYTES]);
    linger(&mut [&mut target], Duration::from_millis(50));
    assert!(target.memory.get(0, BYTES) == [0xaa; BYTES]);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    drive(&mut [&mut target], |target| target.transport.stats().turned_away > 0);
    assert!(lines.any(|line| line == "expelled"), "it hears why");
    let start = Clock::now();
    while start.elapsed() < Duration::from_millis(100) {
        target.poll();
    }
    assert!(target.memory.get(0, BYTES) == [0xaa; BYTES], "not a byte");
    assert_eq!(users(&target), by_peers(0));
}

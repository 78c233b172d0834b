//! Tests of connections over sockets, with time that is counted instead of measured: each request costs what
//! its kind costs.

use std::io::{Read as _, Write as _};

use mio::Poll;
use mio::net::UnixStream;
use store_core::message::{
    ExplainEviction, Find, FindQuery, LeaseRange, LeaseWanted, List, ListQuery, Operation, ReturnLeases,
};
use store_core::wire::{Frame, HEADER_BYTES};
use store_core::{Key, Kind, Session, WireError};

use super::*;
use crate::connection::{Verdict, answer_status};

const US: Duration = Duration::from_micros(1);
/// Length of a round.
const ROUND: Duration = Duration::from_millis(1);

/// Answers with empty bodies, and lets time pass.
struct Costly {
    now: Instant,
    /// The latest reading of the clock: the time that the master gets.
    seen: Instant,
    /// Requests handled since the start, and the ids of those that are short.
    handled: u64,
    short: Vec<u64>,
    left: usize,
}

impl Handler for Costly {
    fn depends_on(&self) -> u64 {
        0
    }

    fn confirmed(&mut self) -> Option<u64> {
        Some(u64::MAX)
    }

    fn surely_confirmed(&self) -> Option<u64> {
        Some(u64::MAX)
    }

    fn clock(&mut self) -> Instant {
        self.seen = self.now;
        self.seen
    }

    fn frame(&mut self, _: &mut Session, _: Source, frame: &Frame<'_>, out: &mut Vec<u8>) -> Verdict {
        let stale = self.now - self.seen;
        assert!(stale <= 100 * US, "a request is handled {stale:?} after the time that it is handled at");
        let header = frame.header;
        let short = header.kind == Kind::Exists as u8;
        self.now += if short { US } else { 200 * US };
        self.handled += 1;
        if short {
            self.short.push(header.request_id);
        }
        if header.kind != Kind::ReturnLeases as u8 {
            answer_status(header.kind, header.request_id, store_core::ErrorCode::ObjectNotFound, out);
        }
        Verdict::Answered
    }

    fn broken(&mut self, error: WireError) {
        panic!("{error}");
    }

    fn turn_ended(&mut self, _: Duration) {}

    fn left(&mut self, _: Session) {
        self.left += 1;
    }
}

struct Place {
    connections: Connections,
    poll: Poll,
    handler: Costly,
    /// The peers' ends of the sockets.
    peers: Vec<UnixStream>,
}

impl Place {
    fn new(config: &Config) -> Self {
        let now = Instant::now();
        let handler = Costly { now, seen: now, handled: 0, short: Vec::new(), left: 0 };
        Self { connections: Connections::new(config), poll: Poll::new().unwrap(), handler, peers: Vec::new() }
    }

    fn enter(&mut self, from: Source) -> Entered {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stream = Stream::Unix(ours);
        let entered =
            self.connections.enter(stream, Peer::Remote, from, self.poll.registry(), &mut self.handler);
        if matches!(entered, Entered::Yes) {
            self.peers.push(theirs);
        }
        entered
    }

    /// Sends as many of the bytes as the socket accepts, and reports the event.
    fn send(&mut self, index: usize, bytes: &[u8]) -> usize {
        let sent = match self.peers[index].write(bytes) {
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => panic!("{error}"),
        };
        self.connections.ready(index, true, true, false);
        sent
    }

    /// Reads the answers.
    fn take(&mut self, index: usize) {
        let mut scrap = [0; 64 << 10];
        while self.peers[index].read(&mut scrap).is_ok_and(|len| len > 0) {}
        self.connections.ready(index, true, true, false);
    }

    fn serve(&mut self) {
        let now = self.handler.clock();
        self.connections.serve(now, ROUND, &mut self.handler);
    }
}

fn any_source() -> Source {
    Source::of([10, 0, 0, 1].into())
}

fn exists(id: u64) -> Vec<u8> {
    let mut out = Vec::new();
    store_core::message::Exists::encode_request(&mut out, id, &(), [Key(b"k")].into_iter()).unwrap();
    out
}

/// Several of each request that takes long.
fn flood() -> Vec<u8> {
    let (mut out, none) = (Vec::new(), std::iter::empty);
    let find = FindQuery { pattern: "(a[ab]{20}c|b[ab]{20}d)", limit: 1, cursor: 0 };
    Find::encode_request(&mut out, 1, &find, none()).unwrap();
    let list = ListQuery { prefix: Key(b"absent"), limit: 4096, cursor: 0 };
    List::encode_request(&mut out, 2, &list, none()).unwrap();
    ExplainEviction::encode_request(&mut out, 3, &4096, none()).unwrap();
    let keys = (0..KEYS).map(|_| Key(b"a key of the usual length"));
    store_core::message::Get::encode_request(&mut out, 4, &LeaseWanted::Quick, keys).unwrap();
    out
}

/// Number of keys of a batch that is not short.
const KEYS: usize = 256;

#[test]
fn a_lookup_among_dozens_that_flood_waits_for_a_handful_of_their_requests() {
    for known in [true, false] {
        let mut place = Place::new(&Config::default());
        let flood = flood().repeat(20);
        for index in 0..60 {
            assert!(matches!(place.enter(any_source()), Entered::Yes));
            place.send(index, &flood);
        }
        assert!(matches!(place.enter(any_source()), Entered::Yes));
        if known {
            place.send(60, &exists(1_000));
        }
        (0..200).for_each(|_| place.serve());
        for id in 1..=200 {
            let before = place.handler.handled;
            place.send(60, &exists(id));
            while place.handler.short.last() != Some(&id) {
                place.serve();
                let others = place.handler.handled - before;
                // One turn of the flooding connections, and the one that had begun before: 1 ms each, of 200
                // µs per request.
                assert!(others <= 14, "{others} requests of others before request {id}");
            }
            place.take(60);
            // The other connections send requests all the time.
            for index in 0..60 {
                place.take(index);
                // A frame that was cut in two would have to be continued: only whole frames are sent.
                if place.connections.connections[index].as_ref().unwrap().backlog_bytes() == 0 {
                    place.refill(index, &flood);
                }
            }
        }
        assert!(place.handler.handled > 1_000, "there was no flood");
    }
}

impl Place {
    /// Sends again when everything before was accepted.
    fn refill(&mut self, index: usize, bytes: &[u8]) {
        let idle = self.connections.connections[index].as_ref().unwrap().waits.is_none();
        if idle {
            assert_eq!(self.send(index, bytes), bytes.len());
        }
    }
}

#[test]
fn connections_that_flood_share_the_remaining_time_equally() {
    let mut place = Place::new(&Config::default());
    let flood = flood().repeat(20);
    for index in 0..8 {
        place.enter(any_source());
        place.send(index, &flood);
    }
    // 8 connections with 80 requests each, half of which are served.
    while place.handler.handled < 320 {
        place.serve();
    }
    let left: Vec<usize> = (0..8)
        .map(|index| {
            let mut answers = Vec::new();
            let _ = place.peers[index].read_to_end(&mut answers);
            answers.len() / HEADER_BYTES
        })
        .collect();
    assert!(left.iter().all(|served| (34..=46).contains(served)), "{left:?}");
}

#[test]
fn a_round_ends_after_its_time_however_much_is_left_to_do() {
    let mut place = Place::new(&Config::default());
    let flood = flood().repeat(20);
    for index in 0..20 {
        place.enter(any_source());
        place.send(index, &flood);
    }
    let before = place.handler.handled;
    place.serve();
    // Five requests of 200 µs fill the round; one turn may have begun before its end.
    assert!(place.handler.handled - before <= 11, "{}", place.handler.handled - before);
}

#[test]
fn a_ticket_is_not_inherited_by_the_next_connection_with_the_same_index() {
    let config = Config { connections_max: 1, ..Config::default() };
    let mut place = Place::new(&config);
    place.enter(any_source());
    // The first connection waits for a turn, and is closed before it has it.
    assert!(matches!(place.enter(any_source()), Entered::Yes));
    place.peers.remove(0);
    place.send(0, &exists(1));
    place.serve();
    assert_eq!((place.handler.handled, place.handler.left, place.connections.open()), (1, 1, 1));
}

#[test]
fn a_connection_without_a_request_is_closed_after_its_time_and_one_with_a_request_is_not() {
    let config = Config { greet_ms_max: 5_000, ..Config::default() };
    let mut place = Place::new(&config);
    place.enter(any_source());
    place.enter(any_source());
    place.enter(any_source());
    place.send(1, &exists(1));
    // Bytes that never become a complete request.
    place.send(2, &exists(1)[..HEADER_BYTES]);
    place.serve();
    place.handler.now += Duration::from_millis(4_999);
    place.send(2, &exists(1)[HEADER_BYTES..HEADER_BYTES + 1]);
    place.serve();
    place.connections.sweep(&mut place.handler);
    assert_eq!(place.connections.open(), 3);
    place.handler.now += Duration::from_millis(1);
    place.connections.sweep(&mut place.handler);
    assert_eq!((place.connections.open(), place.connections.totals().silent), (1, 2));
    assert_eq!(place.peers[0].read(&mut [0]).unwrap(), 0);
}

#[test]
fn connections_with_occasional_requests_do_not_keep_all_places() {
    let config = Config { connections_max: 8, ..Config::default() };
    let mut place = Place::new(&config);
    for index in 0..8 {
        place.enter(any_source());
        place.send(index, &exists(1));
    }
    place.serve();
    // All of them are in use: a new connection of the same address is refused, one of another address is
    // accepted.
    assert!(matches!(place.enter(any_source()), Entered::Full(_)));
    assert_eq!(place.connections.totals().refused, 1);
    for round in 0..100 {
        place.handler.now += Duration::from_secs(2);
        for index in 1..8 {
            place.send(index, &exists(round));
        }
        place.serve();
        let before = place.connections.totals().displaced;
        assert!(matches!(place.enter(any_source()), Entered::Yes));
        let newcomer = place.peers.pop().unwrap();
        place.peers[0] = newcomer;
        place.send(0, &exists(round));
        place.serve();
        assert_eq!((place.connections.open(), place.connections.totals().displaced), (8, before + 1));
    }
    let elsewhere = Source::of([10, 0, 0, 2].into());
    assert!(matches!(place.enter(elsewhere), Entered::Yes));
}

#[test]
fn a_request_is_handled_at_a_time_after_it_was_sent_and_not_long_before_it_is_handled() {
    let mut place = Place::new(&Config::default());
    place.enter(any_source());
    place.enter(any_source());
    // The turn of the other connection is long, and this one has many requests: see `Costly::frame`.
    place.send(0, &flood().repeat(20));
    let many: Vec<u8> = (1..=2_000).flat_map(exists).collect();
    assert_eq!(place.send(1, &many), many.len());
    while place.handler.short.len() < 2_000 {
        place.serve();
        place.take(1);
        // The process was stopped after it had read the clock.
        place.handler.now += Duration::from_secs(10);
        place.handler.seen = place.handler.now - Duration::from_secs(10);
    }
}

#[test]
fn a_connection_that_sends_bytes_and_closes_at_once_is_removed_by_one_event() {
    let mut place = Place::new(&Config::default());
    assert!(matches!(place.enter(any_source()), Entered::Yes));
    // It never gets an answer, so that no write fails.
    let mut last_word = Vec::new();
    let lease = LeaseRange { first: 1, count: 1 };
    ReturnLeases::encode_request(&mut last_word, 1, &(), [lease].into_iter()).unwrap();
    place.peers[0].write_all(&last_word).unwrap();
    place.peers.clear();
    place.connections.ready(0, true, true, true);
    place.serve();
    assert_eq!((place.connections.open(), place.handler.left), (0, 1));
}

//! Tests of the desk, with a clock of their own, and of the readers' connections.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use store_core::chunks::stored_len;
use store_core::message::{Greeting, Hello, Operation as _, StageItem, Staged};
use store_core::{ErrorCode, FrameBuffer, SegmentNo};
use te_core::{Access, Secret};
use te_engine::{SharedRegion, TransferEngine};
use te_fabric::testkit::eventually;

use super::config::StageConfig;
use super::desk::{Answer, Asked, Desk, Order};
use super::greeting::Door;
use super::source::JobEnd;
use super::{MapSource, StageConnections, StageEnd, StageServer, StagedAt, Wanted};
use crate::rpc::RpcConfig;

const BLOCK: u64 = 4096;
const DISK: SegmentNo = SegmentNo::new(7);
const BUSY: ErrorCode = ErrorCode::UnavailableInCurrentStatus;
const MS: Duration = Duration::from_millis(1);

struct Bench {
    desk: Desk,
    start: Instant,
    orders: Vec<Order>,
}

impl Bench {
    /// A desk with this many blocks of memory, a window of 1,000 ms and a guard of 100 ms.
    fn new(blocks: u64, change: impl FnOnce(&mut StageConfig)) -> Self {
        let mut config = StageConfig { window_ms: 1_000, guard_ms: 100, ..StageConfig::default() };
        change(&mut config);
        Self { desk: Desk::new(config, 1 << 40, blocks * BLOCK), start: Instant::now(), orders: Vec::new() }
    }

    fn at(&self, ms: u32) -> Instant {
        self.start + MS * ms
    }

    fn ask(&mut self, ms: u32, connection: u64, deadline_ms: u32, lens: &[u64]) -> Option<Answer> {
        let asked = Asked { connection, id: 5, deadline_ms };
        let items = lens.iter().map(|&len| StageItem { disk: DISK, locator: 9, len });
        self.desk.request(self.at(ms), &asked, items, &mut self.orders)
    }

    /// Ends the oldest job that was not ended.
    fn end(&mut self, ms: u32, end: JobEnd) -> Option<Answer> {
        let order = self.orders.remove(0);
        self.desk.job_ended(self.at(ms), order.number, end)
    }

    fn used(&self) -> u64 {
        self.desk.counted().memory_used_bytes / BLOCK
    }
}

fn tickets(answer: &Answer) -> Vec<u64> {
    answer.items.iter().flatten().map(|staged| staged.ticket).collect()
}

#[test]
fn an_answer_names_what_was_read_and_memory_is_free_when_it_is_released() {
    let mut bench = Bench::new(16, |_| {});
    assert!(bench.ask(0, 1, 100, &[1, BLOCK, BLOCK + 1]).is_none());
    assert_eq!(bench.used(), 4);
    assert!(bench.end(1, JobEnd::Read).is_none());
    assert!(bench.end(2, JobEnd::Failed(ErrorCode::ObjectNotFound)).is_none());
    let answer = bench.end(3, JobEnd::Read).unwrap();
    let addrs: Vec<_> =
        answer.items.iter().map(|item| item.map(|Staged { addr, .. }| addr - (1 << 40))).collect();
    assert_eq!(addrs, [Ok(0), Err(ErrorCode::ObjectNotFound), Ok(2 * BLOCK)]);
    assert_eq!((answer.connection, answer.id, answer.window_ms), (1, 5, 1_100));
    let [first, second] = tickets(&answer)[..] else { panic!("{}", answer.items.len()) };
    bench.desk.release(2, first);
    assert_eq!(bench.used(), 3, "the ticket is of another connection");
    for ticket in [first, first, second] {
        bench.desk.release(1, ticket);
    }
    assert_eq!((bench.used(), bench.desk.due_at()), (0, None));
}

#[test]
fn the_deadline_answers_and_a_late_buffer_is_in_quarantine_until_its_job_ends() {
    let mut bench = Bench::new(4, |_| {});
    assert!(bench.ask(0, 1, 100, &[BLOCK, BLOCK]).is_none());
    assert!(bench.end(50, JobEnd::Read).is_none());
    assert_eq!(bench.desk.due_at(), Some(bench.at(100)));
    assert!(bench.desk.expire(bench.at(99)).is_none());
    let answer = bench.desk.expire(bench.at(100)).unwrap();
    assert_eq!(answer.items[0].map(|_| ()), Ok(()), "what was read in time can be read");
    assert_eq!(answer.items[1].map(|_| ()), Err(BUSY));
    bench.desk.release(1, tickets(&answer)[0]);
    let counted = bench.desk.counted();
    assert_eq!((counted.quarantined_bytes, counted.reading, counted.busy_total), (BLOCK, 1, 1));
    // Whatever comes, the buffer is not given to another object.
    assert!(bench.ask(200, 2, 100, &[BLOCK; 4]).is_none());
    assert_eq!(bench.orders.len(), 4);
    let late = bench.orders.remove(0);
    assert!(bench.orders.iter().all(|order| order.place.offset != late.place.offset));
    bench.orders.clear();
    let refused = bench.desk.expire(bench.at(300)).unwrap();
    assert_eq!(refused.items.iter().filter(|item| **item == Err(BUSY)).count(), 4);
    assert!(bench.desk.job_ended(bench.at(60_000), late.number, JobEnd::Read).is_none(), "no reader waits");
    assert_eq!(bench.used(), 3);
    let counted = bench.desk.counted();
    assert_eq!((counted.quarantined_bytes, counted.quarantined_total), (3 * BLOCK, 4));
}

#[test]
fn a_ticket_that_is_not_released_ends_with_its_window_and_the_guard() {
    let mut bench = Bench::new(4, |_| {});
    bench.ask(0, 1, 100, &[BLOCK]);
    let answer = bench.end(20, JobEnd::Read).unwrap();
    // From the answer on: the deadline and the window, in which the reader reads, and the guard.
    let end = 20 + answer.window_ms + 100;
    assert_eq!(bench.desk.due_at(), Some(bench.at(end)));
    assert!(bench.desk.expire(bench.at(end - 1)).is_none());
    assert_eq!(bench.used(), 1);
    assert!(bench.desk.expire(bench.at(end)).is_none());
    assert_eq!((bench.used(), bench.desk.counted().expired_total), (0, 1));
    bench.desk.release(1, tickets(&answer)[0]);
}

#[test]
fn the_end_of_a_connection_ends_its_requests_and_after_the_guard_its_tickets() {
    let mut bench = Bench::new(8, |_| {});
    bench.ask(0, 1, 100, &[BLOCK]);
    bench.end(1, JobEnd::Read).unwrap();
    bench.ask(2, 1, 100, &[BLOCK, BLOCK]);
    assert!(bench.end(3, JobEnd::Read).is_none());
    bench.ask(4, 2, 100, &[BLOCK]);
    bench.desk.connection_ended(bench.at(10), 1);
    assert_eq!(bench.used(), 4, "a fabric may still read");
    assert!(bench.end(11, JobEnd::Read).is_none(), "its reader is gone");
    assert!(bench.desk.expire(bench.at(109)).is_some(), "the other connection goes on");
    assert_eq!(bench.used(), 3);
    assert!(bench.desk.expire(bench.at(110)).is_none());
    assert_eq!(bench.used(), 1, "that of the other connection is in quarantine");
}

#[test]
fn what_does_not_fit_is_refused_at_once() {
    let mut bench = Bench::new(8, |_| {});
    let answer = bench.ask(0, 1, 100, &[0, u64::MAX, 8 * BLOCK + 1]).unwrap();
    let codes: Vec<_> = answer.items.iter().map(|item| item.map(|_| ())).collect();
    let large = Err(ErrorCode::ObjectTooLarge);
    assert_eq!(codes, [Err(ErrorCode::InvalidParams), large, large]);
    assert_eq!(bench.ask(0, 1, 0, &[1]).unwrap().items, [Err(BUSY)], "its deadline is over");
    assert!(bench.ask(0, 1, 100, &[8 * BLOCK]).is_none());
    assert_eq!(bench.ask(0, 1, 100, &[1]).unwrap().items, [Err(BUSY)], "the memory is full");

    let mut bench = Bench::new(64, |config| config.queue_items_max = 2);
    assert!(bench.ask(0, 1, 100, &[1, 1, 1]).is_none());
    assert_eq!(bench.orders.len(), 2);
    bench.end(1, JobEnd::Failed(BUSY));
    assert!(bench.ask(2, 1, 100, &[1, 1]).is_none());
    assert_eq!((bench.orders.len(), bench.desk.counted().refused_total), (2, 2));

    let mut bench = Bench::new(64, |config| config.queue_bytes_max = 2 * BLOCK);
    assert!(bench.ask(0, 1, 100, &[9 * BLOCK, 1]).is_none());
    assert_eq!(bench.orders.len(), 1, "a long object is read alone");
    bench.end(1, JobEnd::Read);
    assert!(bench.ask(2, 1, 100, &[1, BLOCK, 1]).is_none());
    assert_eq!(bench.orders.len(), 2);
}

#[test]
fn the_buffer_of_a_job_that_was_dropped_is_never_used_again() {
    let mut bench = Bench::new(2, |_| {});
    bench.ask(0, 1, 100, &[BLOCK]);
    let answer = bench.end(1, JobEnd::Lost).unwrap();
    assert_eq!(answer.items, [Err(ErrorCode::InternalError)]);
    assert_eq!((bench.used(), bench.desk.counted().lost_bytes), (1, BLOCK));
    assert!(bench.ask(2, 1, 100, &[2 * BLOCK]).unwrap().items[0].is_err());
    bench.ask(3, 1, 10, &[BLOCK]);
    assert!(bench.desk.expire(bench.at(20)).is_some());
    assert!(bench.end(30, JobEnd::Lost).is_none());
    let counted = bench.desk.counted();
    assert_eq!((bench.used(), counted.lost_bytes, counted.quarantined_bytes), (2, 2 * BLOCK, 0));
}

fn engine() -> (TransferEngine, SharedRegion) {
    let listen = "127.0.0.1:0".parse().unwrap();
    let engine = TransferEngine::start(te_engine::Config { listen, ..te_engine::Config::default() }).unwrap();
    let region = engine.alloc_shared(1 << 20, Access::REMOTE_READ).unwrap();
    (engine, region)
}

fn serve(region: &SharedRegion, source: &Arc<MapSource>) -> StageServer {
    let source = Arc::clone(source);
    StageServer::start(StageConfig::default(), region.clone(), Secret::default(), source).unwrap()
}

fn connections() -> StageConnections<u32> {
    StageConnections::new(RpcConfig::default(), Secret::default(), 50 * MS)
}

fn want(connections: &mut StageConnections<u32>, server: &StageServer, what: u32, len: u64) {
    let line = connections.line(&server.addr().to_string());
    let item = StageItem { disk: DISK, locator: what.into(), len };
    connections.want(line, Wanted { item, deadline: Instant::now() + 5_000 * MS, what });
}

/// Waits for this many ends.
fn ends(connections: &mut StageConnections<u32>, count: usize) -> Vec<(u32, Result<StagedAt, ErrorCode>)> {
    let mut ends = Vec::new();
    while ends.len() < count {
        assert!(!connections.is_idle(), "{} of {count} have ended", ends.len());
        connections.poll(&mut ends);
        connections.wait(Instant::now() + 100 * MS);
    }
    ends.into_iter().map(|StageEnd { what, result }| (what, result)).collect()
}

#[test]
fn what_was_staged_does_not_count_after_the_connection_or_the_window() {
    let (_engine, region) = engine();
    let source = Arc::new(MapSource::new());
    source.insert(DISK, 1, &[5; 1000]);
    let server = serve(&region, &source);
    let mut connections = connections();
    want(&mut connections, &server, 1, 1000);
    let (_, staged) = ends(&mut connections, 1)[0];
    let staged = staged.unwrap();
    assert!(staged.until > Instant::now() + 5_000 * MS, "the deadline is added to the window");
    assert!(connections.is_valid(&staged, &mut Vec::new()));
    let over = StagedAt { until: Instant::now(), ..staged };
    assert!(!connections.is_valid(&over, &mut Vec::new()));
    server.stop();
    assert!(!connections.is_valid(&staged, &mut Vec::new()), "its memory may be used again");
}

#[test]
fn a_window_is_counted_from_before_the_request() {
    let (_engine, region) = engine();
    let source = Arc::new(MapSource::new());
    source.insert(DISK, 1, &[5; 1000]);
    source.delay(500 * MS);
    let server = serve(&region, &source);
    let mut connections = connections();
    want(&mut connections, &server, 1, 1000);
    let staged = ends(&mut connections, 1)[0].1.unwrap();
    // The window of 5 s and nine tenths of the deadline, of which the disk has used 500 ms.
    assert!(staged.until <= Instant::now() + 9_000 * MS, "an answer may be under way for long");
}

#[test]
fn a_service_that_has_gone_is_left_alone_for_a_while_and_then_found_again() {
    let (_engine, region) = engine();
    let source = Arc::new(MapSource::new());
    source.insert(DISK, 1, &[5; 1000]);
    let server = serve(&region, &source);
    let listen = server.addr();
    let mut connections = connections();
    want(&mut connections, &server, 1, 1000);
    ends(&mut connections, 1)[0].1.unwrap();
    source.hold(true);
    want(&mut connections, &server, 1, 1000);
    connections.poll(&mut Vec::new());
    eventually("the job begins", || source.jobs() == 2);
    server.stop();
    assert!(matches!(ends(&mut connections, 1)[..], [(1, Err(ErrorCode::TransferFail))]));
    source.hold(false);
    let config = StageConfig { listen, ..StageConfig::default() };
    let mut restarted = None;
    eventually("the address is free again", || {
        let started =
            StageServer::start(config.clone(), region.clone(), Secret::default(), Arc::clone(&source) as _);
        restarted = started.ok();
        restarted.is_some()
    });
    let server = restarted.unwrap();
    eventually("it is tried again", || {
        want(&mut connections, &server, 1, 1000);
        ends(&mut connections, 1)[0].1.is_ok()
    });
}

/// A service that greets its readers and answers nothing else.
fn silent() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut streams = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let mut input = FrameBuffer::new();
            let len = stream.read(input.spare_mut(4096)).unwrap();
            input.filled(len);
            let id = input.next_frame().unwrap().unwrap().header.request_id;
            let welcome = Door::new().unwrap().greet(&Greeting::default(), &Secret::default(), 1).unwrap();
            let mut out = Vec::new();
            Hello::encode_response(&mut out, id, &welcome, std::iter::empty()).unwrap();
            stream.write_all(&out).unwrap();
            streams.push(stream);
        }
    });
    addr
}

#[test]
fn a_service_that_does_not_answer_is_waited_for_to_the_deadline_and_then_left() {
    let line = silent().to_string();
    let mut connections = connections();
    let line = connections.line(&line);
    let mut ask = |what: u32, deadline: Duration| {
        let item = StageItem { disk: DISK, locator: 1, len: 1 };
        connections.want(line, Wanted { item, deadline: Instant::now() + deadline, what });
        ends(&mut connections, 1)[0].1.map(|_| ())
    };
    assert_eq!(ask(1, 100 * MS), Err(BUSY), "at the reader's own deadline");
    // A second after the deadline that it was told, it does not count as alive.
    assert_eq!(ask(2, 60_000 * MS), Err(ErrorCode::TransferFail));
    assert_eq!(ask(3, 60_000 * MS), Err(ErrorCode::TransferFail), "it is left alone");
}

#[test]
fn thousands_of_objects_pass_through_little_memory() {
    let (_engine, region) = engine();
    let source = Arc::new(MapSource::new());
    let value: Vec<u8> = (0..70_000_u32).map(|i| i as u8).collect();
    for locator in 0..3_000 {
        source.insert(DISK, locator, &value[..1 + locator as usize]);
    }
    let server = serve(&region, &source);
    let mut connections = connections();
    let mut left = 3_000;
    let mut refused = 0;
    for locator in 0..3_000 {
        want(&mut connections, &server, locator, 1 + u64::from(locator));
    }
    while left > 0 {
        for (what, staged) in ends(&mut connections, 1) {
            match staged {
                Ok(staged) => {
                    left -= 1;
                    let len = 1 + what as usize;
                    let mut found = vec![0; stored_len(len as u64) as usize];
                    region.read(staged.addr - region.addr(), &mut found).unwrap();
                    assert_eq!(found[..len], value[..len]);
                    connections.release(&staged, true);
                }
                // There is room for 256 of them.
                Err(error) => {
                    assert_eq!(error, BUSY);
                    refused += 1;
                    want(&mut connections, &server, what, 1 + u64::from(what));
                }
            }
        }
    }
    connections.flush();
    eventually("all of the memory is free", || server.counters().memory_used_bytes == 0);
    let counters = server.counters();
    assert_eq!(counters.staged_total, 3_000);
    assert_eq!((counters.refused_total, counters.tickets, counters.reading), (refused, 0, 0));
}

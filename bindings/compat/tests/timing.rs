//! Transfers to a process that stops, and to one that dies.
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests register memory of their own and stop processes")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use snowskin_compat::engine::{Copy, Engine, Request, Session, Setup, State};
use snowskin_compat::env::Env;
use snowskin_compat::{codes, read_bytes, write_bytes};
use te_core::Op;
use te_engine::Fabrics;
use te_fabric::testkit::eventually;

/// Memory of each process: more than the buffers of a connection hold.
const LEN: u64 = 64 << 20;
const TIMEOUT: Duration = Duration::from_millis(500);
/// What a call may take, timeouts and a busy machine included.
const BOUND: Duration = Duration::from_secs(20);
/// Set in the process that owns the peer's memory.
const IS_PEER: &str = "SNOWSKIN_TEST_IS_PEER";

struct Memory(Box<[u8]>);

impl Memory {
    fn new(fill: u8) -> Self {
        Self(vec![fill; LEN as usize].into())
    }

    fn addr(&self) -> u64 {
        self.0.as_ptr().addr() as u64
    }

    fn fill(&self, byte: u8) {
        // SAFETY: the range is the whole memory, to whose bytes no reference exists.
        unsafe { write_bytes(self.addr(), &vec![byte; LEN as usize]) };
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: as in `fill`.
        unsafe { read_bytes(self.addr(), LEN as usize) }.unwrap()
    }
}

/// An engine that moves bytes over TCP alone, and memory that is registered with it.
fn engine(fill: u8) -> (Engine, Memory) {
    let mut env = Env::default();
    env.transfer_timeout = TIMEOUT;
    env.fabrics = Some(Fabrics::TCP);
    let (engine, memory) = (Engine::new(), Memory::new(fill));
    assert_eq!(engine.start(Setup::of("127.0.0.1", "P2PHANDSHAKE", "tcp", "", env)), 0);
    // SAFETY: the memory is dropped after the engine, or with the process.
    assert_eq!(unsafe { engine.register(memory.addr(), LEN, "*") }, 0);
    (engine, memory)
}

/// Another process with memory full of ones.
struct Peer {
    child: Child,
    name: String,
    addr: u64,
}

impl Peer {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--ignored", "--nocapture"])
            .env(IS_PEER, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let line = lines.filter_map(|line| line.split_once("PEER ").map(|(_, line)| line.to_owned())).next();
        let line = line.unwrap();
        let (name, addr) = line.split_once(' ').unwrap();
        Self { child, name: name.to_owned(), addr: addr.parse().unwrap() }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: sends a signal to a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn copy(&self, memory: &Memory, len: u64) -> Copy {
        Copy { local: memory.addr(), remote: self.addr, len }
    }

    /// A transfer between the beginnings of both memories.
    fn transfer(&self, engine: &Engine, op: Op, memory: &Memory, len: u64) -> i32 {
        // SAFETY: the memory outlives the engine.
        unsafe { engine.transfer_sync(&self.name, op, &[self.copy(memory, len)], None, "") }
    }

    /// After a stop, waits until transfers work again.
    fn goes_on(&self, engine: &Engine) {
        self.signal(libc::SIGCONT);
        let other = Memory::new(0);
        // SAFETY: unregistered below, before the memory is dropped.
        assert_eq!(unsafe { engine.register(other.addr(), LEN, "*") }, 0);
        eventually("the peer is read again", || self.transfer(engine, Op::Read, &other, LEN) == 0);
        assert_eq!(engine.unregister(other.addr()), 0);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have been killed by the test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "the process that the other tests start"]
fn the_other_process() {
    if std::env::var_os(IS_PEER).is_none() {
        return;
    }
    let (engine, memory) = engine(1);
    println!("PEER {} {}", engine.session_name(), memory.addr());
    // Until the parent has gone.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop((engine, memory));
}

#[test]
fn a_read_that_timed_out_writes_no_byte_after_the_call() {
    let (peer, (engine, memory)) = (Peer::start(), engine(0));
    assert_eq!(peer.transfer(&engine, Op::Read, &memory, 4096), 0);
    assert!(memory.bytes()[..4096].iter().all(|byte| *byte == 1));
    peer.signal(libc::SIGSTOP);
    let began = Instant::now();
    assert!(peer.transfer(&engine, Op::Read, &memory, LEN) < 0);
    assert!(began.elapsed() >= TIMEOUT && began.elapsed() < BOUND, "{:?}", began.elapsed());
    memory.fill(7);
    peer.goes_on(&engine);
    assert!(memory.bytes().iter().all(|byte| *byte == 7), "bytes of the read came after the call");
    drop((engine, memory));
}

#[test]
fn a_write_that_timed_out_reads_no_byte_of_its_source_after_the_call() {
    let (peer, (engine, memory)) = (Peer::start(), engine(2));
    assert_eq!(peer.transfer(&engine, Op::Write, &memory, 4096), 0);
    peer.signal(libc::SIGSTOP);
    let began = Instant::now();
    assert!(peer.transfer(&engine, Op::Write, &memory, LEN) < 0);
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    memory.fill(7);
    peer.goes_on(&engine);
    assert_eq!(peer.transfer(&engine, Op::Read, &memory, LEN), 0);
    let there = memory.bytes();
    assert!(there[..4096].iter().all(|byte| *byte == 2));
    assert!(there.iter().all(|byte| *byte == 1 || *byte == 2), "bytes from after the call were sent");
    drop((engine, memory));
}

fn submitted(session: &Session, peer: &Peer, memory: &Memory) -> u64 {
    let segment = session.open_segment(&peer.name).unwrap();
    let batch = session.allocate_batch(1).unwrap();
    let request = Request { op: Op::Read, local: memory.addr(), segment, remote: peer.addr, len: LEN };
    // SAFETY: the memory outlives the engine.
    unsafe { session.submit(batch, &[request], None) }.unwrap();
    batch
}

#[test]
fn a_batch_to_a_peer_that_was_killed_fails_and_can_be_freed() {
    let (peer, (engine, memory)) = (Peer::start(), engine(0));
    assert_eq!(peer.transfer(&engine, Op::Read, &memory, 4096), 0);
    let session = engine.session().unwrap();
    peer.signal(libc::SIGSTOP);
    let batch = submitted(&session, &peer, &memory);
    assert_eq!(session.batch_state(batch).unwrap(), State::Pending);
    assert_eq!(session.free_batch(batch).unwrap_err().status(), codes::status::BATCH_BUSY);
    peer.signal(libc::SIGKILL);
    eventually("the batch has failed", || session.task_status(batch, 0).unwrap().state == State::Failed);
    assert_ne!(session.task_status(batch, 0).unwrap().bytes, LEN);
    session.free_batch(batch).unwrap();
    assert!(session.task_status(batch, 0).is_err(), "a stale id");
    drop((session, engine, memory));
}

#[test]
fn an_engine_with_a_batch_to_a_stopped_peer_is_closed_in_bounded_time() {
    let (peer, (engine, memory)) = (Peer::start(), engine(0));
    assert_eq!(peer.transfer(&engine, Op::Read, &memory, 4096), 0);
    let session = engine.session().unwrap();
    peer.signal(libc::SIGSTOP);
    let _ = submitted(&session, &peer, &memory);
    drop(session);
    let began = Instant::now();
    engine.close();
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    memory.fill(7);
    peer.signal(libc::SIGCONT);
    assert!(memory.bytes().iter().all(|byte| *byte == 7));
    drop(memory);
}

//! Sessions and engines against each other, over memory of this process.
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests register memory of their own")]

use te_core::Op;
use te_fabric::testkit::eventually;

use super::*;
use crate::codes;

/// Memory of a test. Peers may write it, so it is only read and written through its address.
struct Memory(Box<[u8]>);

impl Memory {
    fn new(len: usize, fill: u8) -> Self {
        Self(vec![fill; len].into())
    }

    fn addr(&self) -> u64 {
        self.0.as_ptr().addr() as u64
    }

    fn set(&self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= self.0.len());
        // SAFETY: the range lies in the memory; no reference to its bytes exists.
        unsafe { crate::write_bytes(self.addr() + offset, bytes) };
    }

    fn get(&self, offset: u64, len: usize) -> Vec<u8> {
        assert!(offset as usize + len <= self.0.len());
        // SAFETY: as in `set`.
        unsafe { crate::read_bytes(self.addr() + offset, len) }.unwrap()
    }
}

fn setup() -> Setup {
    let env = Env { transfer_timeout: std::time::Duration::from_secs(20), ..Env::default() };
    let setup = Setup::of("127.0.0.1", "P2PHANDSHAKE", "tcp", "", env).unwrap();
    Setup { arena_bytes: 8 << 20, ..setup }
}

fn engine() -> Engine {
    let engine = Engine::new();
    assert_eq!(engine.start(Ok(setup())), 0);
    engine
}

fn register(engine: &Engine, memory: &Memory) -> i32 {
    // SAFETY: tests keep their memory until they have dropped the engine.
    unsafe { engine.register(memory.addr(), memory.0.len() as u64, "*") }
}

fn sync(engine: &Engine, target: &Engine, op: Op, copies: &[Copy]) -> i32 {
    // SAFETY: as in `register`.
    unsafe { engine.transfer_sync(&target.session_name(), op, copies, None, "") }
}

fn copy(local: u64, remote: u64, len: u64) -> Copy {
    Copy { local, remote, len }
}

#[test]
fn bytes_move_both_ways_between_raw_memory() {
    let (from, to) = (Memory::new(1 << 20, 1), Memory::new(1 << 20, 2));
    let (here, there) = (engine(), engine());
    assert_eq!((register(&here, &from), register(&there, &to)), (0, 0));
    from.set(100, b"kv cache");
    let all = copy(from.addr(), to.addr(), 1 << 20);
    assert_eq!(sync(&here, &there, Op::Write, &[all]), 0);
    assert_eq!(to.get(100, 8), b"kv cache");
    to.set(5, b"back");
    let parts: Vec<Copy> =
        (0..256).map(|part| copy(from.addr() + part * 4096, to.addr() + part * 4096, 4096)).collect();
    assert_eq!(sync(&here, &there, Op::Read, &parts), 0);
    assert_eq!(from.get(5, 4), b"back");
    drop((here, there));
}

#[test]
#[cfg(feature = "rdma")]
fn an_engine_whose_rdma_devices_are_not_there_uses_tcp() {
    let memory = Memory::new(64, 7);
    let named = Engine::new();
    assert_eq!(named.start(Ok(Setup { devices: vec!["none0".into()], ..setup() })), 0);
    assert_eq!(register(&named, &memory), 0);
    let other = Memory::new(64, 1);
    let engine = engine();
    assert_eq!(register(&engine, &other), 0);
    assert_eq!(sync(&engine, &named, Op::Read, &[copy(other.addr(), memory.addr(), 64)]), 0);
    assert_eq!(other.get(0, 64), [7; 64]);
}

#[test]
fn the_codes_of_registration_are_mooncakes() {
    let memory = Memory::new(8192, 0);
    let engine = engine();
    let (addr, len) = (memory.addr(), 4096);
    // SAFETY: `memory` outlives the engine.
    let register = |addr, len| unsafe { engine.register(addr, len, "*") };
    assert_eq!(register(addr, len), 0);
    assert_eq!(register(addr, len), -7, "the same address");
    assert_eq!(register(addr + 4095, len), -7, "an overlap");
    assert_eq!((register(addr, 0), register(0, len), register(1 << 46, len)), (-1, -1, -1));
    assert_eq!(engine.unregister(addr + 1), -3, "not the beginning");
    assert_eq!((engine.unregister(addr), engine.unregister(addr)), (0, -3));
    // SAFETY: as above.
    let batch = |addrs: &[u64], lens: &[u64]| unsafe { engine.batch_register(addrs, lens, "cpu:0") };
    assert_eq!(batch(&[addr], &[1, 2]), -1);
    assert_eq!(batch(&[addr, addr + 100], &[4096, 4096]), -7);
    assert!(engine.session().unwrap().registered().is_empty(), "all or none");
    assert_eq!(batch(&[addr, addr + 4096], &[4096, 4096]), 0);
    assert_eq!(engine.batch_unregister(&[addr, 7, addr + 4096]), -3, "the first failure");
    assert!(engine.session().unwrap().registered().is_empty(), "the others were unregistered");
    drop(engine);
}

#[test]
fn an_engine_that_is_not_initialized_returns_what_a_failure_returns() {
    let engine = Engine::new();
    // SAFETY: without a session nothing is touched.
    unsafe {
        assert_eq!(engine.register(1, 1, "*"), -1);
        assert_eq!(engine.batch_register(&[1], &[1], "*"), -1);
        assert_eq!(engine.transfer_sync("h:1", Op::Read, &[], None, ""), -1);
        assert_eq!(engine.submit("h:1", Op::Read, &[], ""), 0);
    }
    assert_eq!((engine.unregister(1), engine.probe("h:1"), engine.check(1)), (-1, -1, -1));
    assert_eq!((engine.allocate_managed(1), engine.free_managed(1, 1)), (0, -1));
    assert_eq!((engine.rpc_port(), engine.first_buffer("h:1")), (0, 0));
    assert_eq!((engine.session_name().as_str(), engine.notifies().len()), ("", 0));
    assert_eq!(engine.initialize("127.0.0.1", "ftp://x", "tcp", ""), -1);
    assert_eq!(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "xgmi", ""), -1);
}

#[test]
fn memory_that_is_not_registered_is_registered_for_the_transfer_alone() {
    let (from, to) = (Memory::new(100_000, 3), Memory::new(100_000, 0));
    let (here, there) = (engine(), engine());
    assert_eq!(register(&there, &to), 0);
    // The middle is registered, both ends are not.
    let middle = from.addr() + 30_000;
    // SAFETY: `from` outlives the engine.
    assert_eq!(unsafe { here.register(middle, 40_000, "*") }, 0);
    let before = here.session().unwrap().engine().stats().regions;
    assert_eq!(sync(&here, &there, Op::Write, &[copy(from.addr(), to.addr(), 100_000)]), 0);
    assert_eq!(to.get(0, 100_000), vec![3; 100_000]);
    assert_eq!(here.session().unwrap().engine().stats().regions, before);
    // A batch gives the memory back when its status is read.
    // SAFETY: as above.
    let batch =
        unsafe { here.submit(&there.session_name(), Op::Read, &[copy(from.addr(), to.addr(), 5_000)], "") };
    assert_ne!(batch, 0);
    eventually("the batch ends", || here.check(batch) != 0);
    assert_eq!(here.session().unwrap().engine().stats().regions, before);
    // What cannot be memory fails before anything is touched.
    assert_eq!(sync(&here, &there, Op::Write, &[copy(1 << 46, to.addr(), 10)]), -1);
    drop((here, there));
}

#[test]
fn a_request_may_lie_in_several_registered_regions_that_are_adjacent() {
    let (from, to) = (Memory::new(12_288, 9), Memory::new(12_288, 0));
    let (here, there) = (engine(), engine());
    assert_eq!(register(&there, &to), 0);
    for part in 0..3 {
        // SAFETY: `from` outlives the engine.
        assert_eq!(unsafe { here.register(from.addr() + part * 4096, 4096, "*") }, 0);
    }
    assert_eq!(sync(&here, &there, Op::Write, &[copy(from.addr() + 10, to.addr() + 10, 12_000)]), 0);
    assert_eq!(to.get(0, 12_288), [vec![0; 10], vec![9; 12_000], vec![0; 278]].concat());
    drop((here, there));
}

#[test]
fn memory_that_a_peer_registers_later_is_found_and_memory_that_it_lacks_fails() {
    let (from, to) = (Memory::new(4096, 5), Memory::new(8192, 0));
    let (here, there) = (engine(), engine());
    // SAFETY: `to` outlives the engine.
    assert_eq!(unsafe { there.register(to.addr(), 4096, "*") }, 0);
    assert_eq!(sync(&here, &there, Op::Write, &[copy(from.addr(), to.addr(), 4096)]), 0);
    let later = copy(from.addr(), to.addr() + 4096, 4096);
    assert_eq!(sync(&here, &there, Op::Write, &[later]), -1);
    // SAFETY: as above.
    assert_eq!(unsafe { there.register(to.addr() + 4096, 4096, "*") }, 0);
    assert_eq!(sync(&here, &there, Op::Write, &[later]), 0);
    assert_eq!(there.unregister(to.addr()), 0);
    assert_eq!(sync(&here, &there, Op::Write, &[copy(from.addr(), to.addr(), 1)]), -1);
    // Of a batch, only the request that names no memory fails.
    let session = here.session().unwrap();
    let segment = session.open_segment(&there.session_name()).unwrap();
    let batch = session.allocate_batch(2).unwrap();
    let request = |remote| Request { op: Op::Write, local: from.addr(), segment, remote, len: 16 };
    // SAFETY: as above.
    unsafe { session.submit(batch, &[request(to.addr()), request(to.addr() + 5_000)], None).unwrap() };
    let state = |task| session.task_status(batch, task).unwrap();
    eventually("the batch ends", || session.batch_state(batch).unwrap().is_over());
    assert_eq!((state(0).state, state(0).bytes), (State::Failed, 0));
    assert_eq!((state(1).state, state(1).bytes), (State::Completed, 16));
    session.free_batch(batch).unwrap();
    drop((session, here, there));
}

#[test]
fn a_peer_that_restarts_under_its_name_is_used_again() {
    let (from, to) = (Memory::new(4096, 6), Memory::new(4096, 0));
    let (here, there) = (engine(), engine());
    let name = there.session_name();
    assert_eq!(register(&there, &to), 0);
    let write = [copy(from.addr(), to.addr(), 4096)];
    assert_eq!(sync(&here, &there, Op::Write, &write), 0);
    let port = there.rpc_port();
    drop(there);
    // SAFETY: `from` outlives the engine.
    assert_eq!(unsafe { here.transfer_sync(&name, Op::Write, &write, None, "") }, -1);
    assert_ne!(here.probe(&name), 0);
    let again = Engine::new();
    eventually("the port is free again", || again.start(Ok(Setup { rpc_port: Some(port), ..setup() })) == 0);
    assert_eq!((again.session_name(), register(&again, &to)), (name, 0));
    assert_eq!((here.probe(&again.session_name()), sync(&here, &again, Op::Write, &write)), (0, 0));
    assert_eq!(to.get(0, 4096), vec![6; 4096]);
    drop((here, again));
}

#[test]
fn batches_are_waited_for_checked_and_freed_once() {
    let (from, to) = (Memory::new(1 << 16, 7), Memory::new(1 << 16, 0));
    let (here, there) = (engine(), engine());
    assert_eq!((register(&here, &from), register(&there, &to)), (0, 0));
    let name = there.session_name();
    // SAFETY: the memory outlives the engines.
    let submit = |copies: &[Copy]| unsafe { here.submit(&name, Op::Write, copies, "") };
    let batches: Vec<u64> = (0..16)
        .map(|part| submit(&[copy(from.addr() + part * 4096, to.addr() + part * 4096, 4096)]))
        .collect();
    assert!(!batches.contains(&0));
    assert_eq!((here.wait_batches(&batches), here.wait_batches(&batches)), (0, -1));
    assert_eq!(to.get(0, 1 << 16), vec![7; 1 << 16]);
    let bad = submit(&[copy(from.addr(), 64, 1)]);
    assert_ne!(bad, 0);
    eventually("the batch fails", || here.check(bad) == -1);
    assert_eq!(here.check(bad), -1, "a stale id");
    let good = submit(&[copy(from.addr(), to.addr(), 0), copy(from.addr(), to.addr(), 1)]);
    eventually("the batch completes", || here.check(good) == 1);
    assert_eq!(here.check(good), -1, "a stale id");
    assert_eq!((here.wait_batches(&[]), here.wait_batches(&[12345])), (0, -1));
    // SAFETY: nothing is there to be touched.
    assert_eq!(unsafe { here.submit("127.0.0.1:1", Op::Write, &[], "") }, 0, "an unknown peer");
    drop((here, there));
}

#[test]
fn a_batch_of_the_c_interface_takes_posts_until_it_is_full() {
    let (from, to) = (Memory::new(4096, 8), Memory::new(4096, 0));
    let (here, there) = (engine(), engine());
    assert_eq!((register(&here, &from), register(&there, &to)), (0, 0));
    let session = here.session().unwrap();
    let segment = session.open_segment(&there.session_name()).unwrap();
    let request = Request { op: Op::Write, local: from.addr(), segment, remote: to.addr(), len: 100 };
    let batch = session.allocate_batch(3).unwrap();
    // SAFETY: the memory outlives the engines.
    let submit = |batch, count| unsafe { session.submit(batch, &vec![request; count], None) };
    submit(batch, 0).unwrap();
    submit(batch, 2).unwrap();
    submit(batch, 1).unwrap();
    assert_eq!(submit(batch, 1).unwrap_err().status(), codes::status::TOO_MANY_REQUESTS);
    eventually("the batch ends", || session.batch_state(batch).unwrap() == State::Completed);
    assert_eq!(session.task_status(batch, 2).unwrap().bytes, 100);
    assert_eq!(session.task_status(batch, 3).unwrap_err().status(), codes::status::INVALID_ARGUMENT);
    session.free_batch(batch).unwrap();
    for error in [session.free_batch(batch), submit(batch, 1), session.task_status(batch, 0).map(drop)] {
        assert_eq!(error.unwrap_err().status(), codes::status::INVALID_ARGUMENT, "a stale id");
    }
    let unknown = Request { segment: SegmentNumber::from_raw(99).unwrap(), ..request };
    let other = session.allocate_batch(1).unwrap();
    // SAFETY: as above.
    assert!(unsafe { session.submit(other, &[unknown], None) }.is_err());
    session.free_batch(other).unwrap();
    drop((session, here, there));
}

#[test]
fn the_own_memory_is_segment_0_and_numbers_stay_the_same() {
    let memory = Memory::new(8192, 0);
    let engine = engine();
    assert_eq!(register(&engine, &memory), 0);
    memory.set(0, b"here");
    let session = engine.session().unwrap();
    assert_eq!(session.open_segment(session.name()).unwrap(), SegmentNumber::LOCAL);
    let request = Request {
        op: Op::Write,
        local: memory.addr(),
        segment: SegmentNumber::LOCAL,
        remote: memory.addr() + 4096,
        len: 4,
    };
    let batch = session.allocate_batch(1).unwrap();
    // SAFETY: the memory outlives the engine.
    unsafe { session.submit(batch, &[request], None).unwrap() };
    eventually("the batch ends", || session.batch_state(batch).unwrap() == State::Completed);
    assert_eq!(memory.get(4096, 4), b"here");
    session.free_batch(batch).unwrap();
    let other = self::engine();
    let name = format!("//{}", other.session_name());
    let number = session.open_segment(&name).unwrap();
    assert_eq!(session.open_segment(&other.session_name()).unwrap(), number);
    session.close_segment(number).unwrap();
    session.close_segment(number).unwrap();
    session.close_segment(number).unwrap();
    assert_eq!(session.reopen_segment(&name).unwrap(), number);
    assert!(session.close_segment(SegmentNumber::from_raw(7).unwrap()).is_err());
    for bad in ["", "/", &"n".repeat(2000), "no port", "127.0.0.1:1"] {
        assert!(session.open_segment(bad).is_err(), "{bad:?}");
    }
    assert_eq!(SegmentNumber::from_raw(-1), None);
    drop((session, engine, other));
}

#[test]
fn notifications_arrive_with_a_transfer_and_alone() {
    let (from, to) = (Memory::new(64, 1), Memory::new(64, 0));
    let (here, there) = (engine(), engine());
    assert_eq!(register(&there, &to), 0);
    let notice = Notice { name: "req-1".into(), message: b"done".to_vec() };
    let name = there.session_name();
    // SAFETY: the memory outlives the engines.
    let transfer = |remote| unsafe {
        here.transfer_sync(&name, Op::Write, &[copy(from.addr(), remote, 64)], Some(&notice), "")
    };
    assert_eq!(transfer(to.addr()), 0);
    assert_eq!(there.notifies(), [("req-1".to_owned(), "done".to_owned())]);
    assert_eq!(transfer(1), -1, "a transfer that fails");
    assert_eq!(there.notifies(), [], "sends nothing");
    let session = here.session().unwrap();
    let segment = session.open_segment(&name).unwrap();
    session.notify(segment, "", b"\xff\0").unwrap();
    assert_eq!(there.session().unwrap().take_notifications()[0].message, b"\xff\0");
    let long = vec![0; 2 << 20];
    assert!(session.notify(segment, "long", &long).is_err());
    drop((session, here, there));
}

#[test]
fn buffers_come_from_one_arena_and_long_ones_stand_alone() {
    let (here, there) = (engine(), engine());
    assert_eq!(there.first_buffer(&there.session_name()), 0);
    let first = there.allocate_managed(64 << 10);
    assert_eq!(here.first_buffer(&there.session_name()), first);
    let second = there.allocate_managed(1);
    assert_eq!(there.session().unwrap().managed_spans().len(), 1);
    let long = there.allocate_managed(9 << 20);
    assert!(first != 0 && second != 0 && long != 0 && first != second);
    assert_eq!(there.session().unwrap().managed_spans().len(), 2);
    let from = here.allocate_managed(64 << 10);
    // SAFETY: the engine keeps the buffer mapped.
    unsafe { crate::write_bytes(from, b"shared") };
    assert_eq!(sync(&here, &there, Op::Write, &[copy(from, long + (8 << 20), 6)]), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { crate::read_bytes(long + (8 << 20), 6) }.unwrap(), b"shared");
    assert_eq!((there.free_managed(long, 9 << 20), there.free_managed(long, 9 << 20)), (0, -1));
    assert_eq!((there.free_managed(first, 64 << 10), there.free_managed(first, 64 << 10)), (0, -1));
    assert_eq!(there.free_managed(12345, 1), -1);
    assert_eq!(there.unregister(first), -3, "buffers are not the caller's to unregister");
    assert_eq!(there.allocate_managed(u64::MAX), 0);
}

#[test]
fn several_engines_of_a_process_register_the_same_memory() {
    let (from, to) = (Memory::new(4096, 4), Memory::new(4096, 0));
    let engines: Vec<Engine> = (0..5).map(|_| engine()).collect();
    let there = engine();
    assert_eq!(register(&there, &to), 0);
    for (index, engine) in engines.iter().enumerate() {
        assert_eq!(register(engine, &from), 0);
        from.set(0, &[index as u8; 4096]);
        assert_eq!(sync(engine, &there, Op::Write, &[copy(from.addr(), to.addr(), 4096)]), 0);
        assert_eq!(to.get(0, 4096), vec![index as u8; 4096]);
    }
    drop((engines, there));
}

#[test]
fn many_threads_share_an_engine() {
    const THREADS: u64 = 8;
    let (from, to) = (Memory::new(THREADS as usize * 65_536, 1), Memory::new(THREADS as usize * 65_536, 0));
    let (here, there) = (engine(), engine());
    assert_eq!((register(&here, &from), register(&there, &to)), (0, 0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (here, there, from, to) = (&here, &there, &from, &to);
            scope.spawn(move || {
                let at = thread * 65_536;
                for round in 0..50 {
                    from.set(at, &[round; 4096]);
                    let write = copy(from.addr() + at, to.addr() + at, 65_536);
                    assert_eq!(sync(here, there, Op::Write, &[write]), 0);
                    assert_eq!(to.get(at, 4096), vec![round; 4096]);
                    // SAFETY: the memory outlives the engines.
                    let batch = unsafe { here.submit(&there.session_name(), Op::Read, &[write], "") };
                    assert_eq!(here.wait_batches(&[batch]), 0);
                }
            });
        }
    });
    drop((here, there));
}

#[test]
fn what_an_engine_reports_is_text_and_json() {
    let engine = engine();
    let session = engine.session().unwrap();
    let json: serde_json::Value = serde_json::from_str(&session.links(true)).unwrap();
    assert_eq!(json["name"], session.name());
    assert!(session.links(false).starts_with(session.name()));
    assert_eq!(session.rail_loads().len(), json["rails"].as_array().unwrap().len());
    assert!((15_000..=17_000).contains(&engine.rpc_port()));
    drop(session);
    engine.close();
    assert_eq!(engine.rpc_port(), 0);
}

//! Sessions, replicas, tasks, mounts, and stores through the node on this machine.
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests pass addresses of their own memory")]

use std::time::Duration;

use store_client::local::{LocalServer, LocalServerConfig, make_default_path};
use store_client::{Address, ClientConfig, Masters, Node, NodeConfig};
use te_fabric::testkit::eventually;

use super::tests::{config, master, options, span, store};
use super::*;

const PAGE: usize = 4096;

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

/// Writes `part` of the object of `key` at `offset`.
fn write(store: &Store, key: &str, part: &[u8], offset: u64) -> i64 {
    // SAFETY: `part` is borrowed until the call returns.
    let codes = unsafe { store.put_session_ranges(&[key], &[vec![span(part)]], &[vec![offset]]) };
    codes[0]
}

/// Reads `into.len()` bytes of the object of `key` at `offset`.
fn read(store: &Store, key: &str, into: &mut [u8], offset: u64) -> i64 {
    let to = Span { addr: into.as_mut_ptr().addr() as u64, len: into.len() as u64 };
    // SAFETY: `into` is borrowed mutably until the call returns.
    let codes = unsafe { store.get_session_ranges(&[key], &[vec![to]], &[vec![offset]]) };
    codes[0]
}

#[test]
fn a_put_session_is_invisible_until_its_end() {
    let master = master();
    let (store, other) = (store(&master), store(&master));
    let value = bytes(1, 3 * PAGE);
    assert_eq!(store.put_session_start(&["k"], &[value.len() as u64], &config()), [0]);
    assert_eq!(store.put_session_start(&["k"], &[1], &config()), [-600], "it is open");
    // The last part first, and one that is registered.
    // SAFETY: `value` lives until the end of the test.
    assert_eq!(unsafe { store.register(value.as_ptr().addr() as u64, value.len() as u64) }, 0);
    assert_eq!(write(&store, "k", &value[2 * PAGE..], 2 * PAGE as u64), PAGE as i64);
    assert_eq!(other.exists(&["k"]), [0]);
    assert_eq!(store.put_session_end(&["k"]), [-600], "bytes are missing");
    assert_eq!(write(&store, "k", &value[..2 * PAGE], 0), 2 * PAGE as i64);
    assert_eq!(other.get(b"k"), Err(-704));
    assert_eq!(store.put_session_end(&["k"]), [0]);
    assert_eq!(other.get(b"k"), Ok(value.clone()));
    assert_eq!(store.put_session_end(&["k"]), [-600], "it has ended");
    assert_eq!(store.put_session_revoke(&["k"]), [-600], "it has ended");
    assert_eq!(store.put_session_start(&["k", "l"], &[1, 1], &config()), [-705, 0]);
    assert_eq!(store.unregister(value.as_ptr().addr() as u64), 0);
    master.stop().unwrap();
}

#[test]
fn a_put_session_that_is_revoked_or_closed_never_was() {
    let master = master();
    let (store, other) = (store(&master), store(&master));
    assert_eq!(store.put_session_start(&["r", "c"], &[8, 8], &config()), [0, 0]);
    assert_eq!(write(&store, "r", b"12345678", 0), 8);
    assert_eq!(store.put_session_revoke(&["r", "never"]), [0, -600]);
    assert_eq!(other.put(b"r", b"another", &config()), 0);
    assert_eq!(other.get(b"r"), Ok(b"another".to_vec()));
    assert_eq!(store.close(), 0);
    assert_eq!(other.exists(&["c"]), [0]);
    master.stop().unwrap();
}

#[test]
fn writes_that_no_session_has_are_refused() {
    let master = master();
    let store = store(&master);
    assert_eq!(store.put_session_start(&["k"], &[8], &config()), [0]);
    assert_eq!(write(&store, "unknown", b"1", 0), -600);
    assert_eq!(write(&store, "k", b"123456789", 0), -600, "longer than the object");
    assert_eq!(write(&store, "k", b"1", 8), -600, "behind the end");
    assert_eq!(write(&store, "k", b"1", u64::MAX), -600);
    assert_eq!(write(&store, "k", b"1234", 0), 4);
    assert_eq!(write(&store, "k", b"1", 3), -600, "written before");
    // SAFETY: no memory is touched: the lists do not fit, or the address is none.
    unsafe {
        assert_eq!(store.put_session_ranges(&["k"], &[vec![]], &[vec![1]]), [-600]);
        assert_eq!(store.put_session_ranges(&["k"], &[], &[]), [-600]);
        let none = Span { addr: 0, len: 1 };
        assert_eq!(store.put_session_ranges(&["k"], &[vec![none]], &[vec![4]]), [-600]);
        assert_eq!(store.put_session_ranges::<&str>(&[], &[], &[]), [0_i64; 0]);
    }
    assert_eq!(store.put_session_start(&["z"], &[0], &config()), [-600], "an object has bytes");
    assert_eq!(store.put_session_start(&["z"], &[], &config()), [-600]);
    assert_eq!(store.put_session_revoke(&["k"]), [0]);
    master.stop().unwrap();
}

#[test]
fn a_get_session_reads_ranges_until_its_end() {
    let master = master();
    let store = store(&master);
    let value = bytes(7, 2 * PAGE);
    assert_eq!(store.put(b"k", &value, &config()), 0);
    let mut part = vec![0; 100];
    assert_eq!(read(&store, "k", &mut part, 0), -600, "not started");
    assert_eq!(store.get_session_start(&["k", "missing"]), [0, -704]);
    assert_eq!(store.remove(b"k", false), -706, "it has a lease");
    for offset in [0, 1, PAGE - 50, 2 * PAGE - 100] {
        assert_eq!(read(&store, "k", &mut part, offset as u64), 100);
        assert_eq!(part, value[offset..offset + 100]);
    }
    assert!(read(&store, "k", &mut part, 2 * PAGE as u64 - 99) < 0, "beyond the end");
    assert_eq!(store.get_session_start(&["k"]), [0], "started anew");
    assert_eq!((store.get_session_end(&["k", "missing"]), store.get_session_end(&["k"])), (0, 0));
    assert_eq!(read(&store, "k", &mut part, 0), -600, "ended");
    master.stop().unwrap();
}

#[test]
fn replicas_are_listed_copied_moved_and_cleared() {
    let master = master();
    let stores = [store(&master), store(&master), store(&master)];
    let names: Vec<String> = stores.iter().map(Store::hostname).collect();
    let mut first = config();
    first.preferred_segments = vec![names[0].clone()];
    assert_eq!(stores[2].put(b"k", b"value", &first), 0);
    let places = |key: &[u8]| {
        let mut names: Vec<String> =
            stores[2].replicas(key).unwrap_or_default().into_iter().map(|at| at.segment).collect();
        names.sort_unstable();
        names
    };
    let sorted = |wanted: &[usize]| {
        let mut names: Vec<String> = wanted.iter().map(|at| names[*at].clone()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(places(b"k"), sorted(&[0]));
    assert_eq!(stores[2].replicas(b"k").unwrap()[0].len, 5);
    assert_eq!(stores[2].replicas(b"zz"), Err(-704));
    let listed = stores[2].batch_replicas(&["zz", "k", ""]);
    assert!(matches!(&listed[..], [Err(-704), Ok(one), Err(_)] if one.len() == 1));

    let done = |number: TaskNumber| {
        eventually("the task ends", || {
            let progress = stores[1].query_task(number).unwrap().progress;
            matches!(progress, Progress::Done | Progress::Failed)
        });
        stores[1].query_task(number).unwrap()
    };
    let copy = stores[2].copy_task(b"k", &[&names[1], &names[2]]).unwrap();
    let task = done(copy);
    assert_eq!((task.progress, task.is_move, task.message.as_str()), (Progress::Done, false, ""));
    assert!(task.created_ms <= task.seen_ms && task.node > 0);
    assert_eq!(places(b"k"), sorted(&[0, 1, 2]));
    let again = stores[2].copy_task(b"k", &[&names[1]]).unwrap();
    assert_eq!(done(again).progress, Progress::Done, "nothing to do");

    let cleared = || stores[2].replica_clear(&["zz", "k"], &names[0]);
    eventually("the lease ends", || cleared() == [1]);
    assert_eq!(places(b"k"), sorted(&[1, 2]));
    assert!(stores[2].replica_clear(&["k"], "no such segment").is_empty());
    let moved = stores[2].move_task(b"k", &names[1], &names[0]).unwrap();
    assert!(done(moved).is_move);
    assert_eq!(places(b"k"), sorted(&[0, 2]));
    assert_eq!(stores[0].get(b"k"), Ok(b"value".to_vec()));

    assert_eq!(stores[2].copy_task(b"zz", &[&names[1]]), Err(-704));
    assert_eq!(stores[2].copy_task(b"k", &["unknown"]), Err(-600));
    assert_eq!(stores[2].copy_task::<&str>(b"k", &[]), Err(-600));
    assert_eq!(stores[2].move_task(b"k", &names[0], &names[0]), Err(-600));
    assert_eq!(stores[2].move_task(b"k", &names[0], "unknown"), Err(-600));
    assert_eq!(stores[2].move_task(b"zz", &names[0], &names[1]), Err(-704));
    for unknown in [(1 << 60, 0), (0, 0), (u64::MAX, u64::MAX)] {
        assert_eq!(stores[2].query_task(unknown).map(|task| task.number), Err(-1400), "{unknown:?}");
    }
    master.stop().unwrap();
}

#[test]
fn further_memory_is_contributed_and_taken_back() {
    let master = master();
    let mut settings = options(&master, 0);
    settings.local_buffer_size = 64 << 20;
    let store = Store::new();
    assert_eq!(store.allocate_and_mount(1 << 20, "tcp", ""), Err(-1));
    assert_eq!(store.setup_in(&settings, &Env::default()), 0);
    assert_eq!(store.put(b"k", b"v", &config()), -200, "there is no memory");
    let (numbers, bytes) = store.allocate_and_mount(16 << 20, "tcp", "").unwrap();
    assert_eq!((numbers.len(), bytes), (1, 16 << 20));
    assert_eq!(store.put(b"k", b"v", &config()), 0);
    assert_eq!(store.get(b"k"), Ok(b"v".to_vec()));
    assert_eq!(store.unmount(&["unknown"], Duration::ZERO), -1);
    assert_eq!(store.unmount(&numbers, Duration::ZERO), 0);
    assert_eq!(store.unmount(&numbers, Duration::ZERO), -1, "twice");
    assert_eq!(store.get(b"k"), Err(-704));
    assert_eq!(store.allocate_and_mount(0, "tcp", ""), Err(-600));

    // With a grace, the object moves to the other memory.
    let (first, _) = store.allocate_and_mount(16 << 20, "tcp", "").unwrap();
    assert_eq!(store.put(b"k", b"v", &config()), 0);
    let (second, _) = store.allocate_and_mount(16 << 20, "tcp", "").unwrap();
    assert_ne!(first, second);
    assert_eq!(store.unmount(&first, Duration::from_secs(60)), 0);
    eventually("the object moves", || {
        store.replicas(b"k").is_ok_and(|places| places.iter().all(|at| at.segment == second[0]))
    });
    assert_eq!(store.get(b"k"), Ok(b"v".to_vec()));
    master.stop().unwrap();
}

#[test]
fn files_are_checked_and_not_contributed() {
    let master = master();
    let store = store(&master);
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(PAGE as u64).unwrap();
    assert_eq!(store.mount(std::path::Path::new("/nonexistent"), 0, 1), Err(-1));
    assert_eq!(store.mount(file.path(), 0, PAGE as u64 + 1), Err(-1));
    assert_eq!(store.mount(file.path(), u64::MAX, 2), Err(-1));
    assert_eq!(store.mount(file.path(), 0, PAGE as u64), Err(-1012));
    master.stop().unwrap();
}

#[test]
fn a_store_without_an_engine_uses_the_node_on_this_machine() {
    let master = master();
    // The port is only a name here: no process listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let path = make_default_path(&Address::Tcp(format!("127.0.0.1:{port}"))).unwrap();
    let address = format!("localhost:{port}");
    let dummy = Store::new();
    assert_eq!(dummy.setup_dummy(1 << 20, 1 << 20, &address), -1, "no process serves there");
    for wrong in ["", "host", "host:0", "host:99999", ":"] {
        assert_eq!(dummy.setup_dummy(1 << 20, 1 << 20, wrong), -600, "{wrong}");
    }
    let address_of_master: Masters = master.rpc_addr().to_string().parse().unwrap();
    let node = Node::start(NodeConfig::new("node", address_of_master.clone(), 32 << 20)).unwrap();
    let server =
        LocalServer::start(LocalServerConfig::new(&path, ClientConfig::new(address_of_master))).unwrap();

    assert_eq!(dummy.setup_dummy(1 << 20, 1 << 20, &address), 0);
    assert!(dummy.is_dummy() && dummy.is_set_up());
    assert_eq!((dummy.health(), dummy.hostname()), (0, address.clone()));
    let value = bytes(9, 100_000);
    assert_eq!(dummy.put(b"k", &value, &config()), 0);
    assert_eq!(dummy.put(b"k", b"other", &config()), 0, "the key exists");
    assert_eq!(dummy.get(b"k"), Ok(value.clone()));
    assert_eq!((dummy.size(b"k"), dummy.size(b"zz")), (100_000, -704));
    assert_eq!(dummy.exists(&["k", "zz"]), [1, 0]);
    let memory = dummy.alloc_from_pool(100_000);
    assert_eq!(memory % 4096, 0);
    // SAFETY: the memory of the pool stays until the store is closed, and nothing else uses it.
    unsafe {
        assert_eq!(dummy.register(memory, 100_000), 0);
        let all = Span { addr: memory, len: 100_000 };
        assert_eq!(dummy.batch_get_into(&["k"], &[vec![all]], Fill::Any), [100_000]);
        assert_eq!(std::slice::from_raw_parts(memory as *const u8, 100_000), value);
        assert_eq!(dummy.batch_put(&["copy"], &[vec![all]], &config()), [0]);
        let (into, from) = (vec![vec![vec![0]]], vec![vec![vec![5]]]);
        let read = dummy.get_into_ranges(&[memory], &[vec!["copy"]], &into, &from, &[vec![vec![10]]]);
        assert_eq!(read, [vec![vec![10]]]);
        assert_eq!(std::slice::from_raw_parts(memory as *const u8, 10), &value[5..15]);
        assert_eq!(dummy.unregister(memory), 0);
    }
    assert_eq!(dummy.alloc_from_pool(1 << 20), 0, "not so much is left");
    assert_eq!(dummy.alloc_from_pool(0), 0);
    assert_ne!(dummy.alloc_from_pool(1), memory);
    assert_eq!(dummy.remove(b"copy", true), 0);
    // What only the master can answer.
    assert_eq!((dummy.remove_all(true), dummy.replicas(b"k")), (-1012, Err(-1012)));
    assert_eq!(dummy.put_session_start(&["s"], &[1], &config()), [-1012]);
    assert_eq!(dummy.allocate_and_mount(1 << 20, "tcp", ""), Err(-1012));
    assert_eq!((dummy.close(), dummy.put(b"k", b"v", &config())), (0, -600));
    server.stop();
    node.stop();
    master.stop().unwrap();
}

#[test]
fn nothing_is_done_before_the_setup() {
    let store = Store::new();
    assert!(!store.is_dummy() && store.alloc_from_pool(1) == 0);
    assert_eq!(store.get_session_start(&["k"]), [-600]);
    assert_eq!(store.get_session_end(&["k"]), -600);
    assert_eq!(store.put_session_start(&["k"], &[1], &config()), [-600]);
    assert_eq!((store.put_session_end(&["k"]), store.put_session_revoke(&["k"])), (vec![-600], vec![-600]));
    assert_eq!((store.replicas(b"k"), store.copy_task(b"k", &["s"])), (Err(-600), Err(-600)));
    assert_eq!((store.query_task((1, 0)).map(drop), store.replica_clear(&["k"], "")), (Err(-600), vec![]));
    assert_eq!(store.unmount(&["s"], Duration::ZERO), -1);
}

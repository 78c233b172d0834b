//! Stores against a master in this process: the numbers of python.md 1.4.
#![allow(unsafe_code, clippy::unwrap_used, reason = "tests pass addresses of their own memory")]

use store_master::{Config, MasterHandle, MasterServer};
use te_fabric::testkit::eventually;

use std::time::Duration;

use super::*;
use crate::clients::{Clients, ClientsError};

/// Short enough for tests that wait for the end of a lease.
const LEASE_MS: u32 = 500;

pub(super) fn master() -> MasterHandle {
    let mut config =
        Config { rpc_listen: "127.0.0.1:0".parse().unwrap(), http_listen: None, ..Config::default() };
    config.store.lease_ttl_ms = LEASE_MS;
    MasterServer::bind(config).unwrap().spawn().unwrap()
}

pub(super) fn options(master: &MasterHandle, segment: u64) -> SetupOptions {
    SetupOptions {
        local_hostname: "127.0.0.1".into(),
        metadata_server: "P2PHANDSHAKE".into(),
        global_segment_size: segment,
        local_buffer_size: 1 << 20,
        master_server_addr: master.rpc_addr().to_string(),
        ..SetupOptions::default()
    }
}

pub(super) fn store(master: &MasterHandle) -> Store {
    let store = Store::new();
    assert_eq!(store.setup_in(&options(master, 32 << 20), &Env::default()), 0);
    store
}

pub(super) fn config() -> ReplicateConfig {
    ReplicateConfig::default()
}

pub(super) fn span(bytes: &[u8]) -> Span {
    Span { addr: bytes.as_ptr().addr() as u64, len: bytes.len() as u64 }
}

/// Reads one object into parts of `buffer`.
fn get_into(store: &Store, key: &str, buffer: &mut [u8], parts: &[(usize, usize)], fill: Fill) -> i64 {
    let base = buffer.as_mut_ptr().addr() as u64;
    let spans = parts.iter().map(|(at, len)| Span { addr: base + *at as u64, len: *len as u64 }).collect();
    assert!(parts.iter().all(|(at, len)| at + len <= buffer.len()));
    // SAFETY: `buffer` is borrowed mutably until the call returns.
    let read = unsafe { store.batch_get_into(&[key], &[spans], fill) };
    read[0]
}

#[test]
fn bytes_are_put_once_and_read_until_they_are_removed() {
    let master = master();
    let store = store(&master);
    assert_eq!((store.health(), store.is_set_up()), (0, true));
    assert!(store.hostname().starts_with("127.0.0.1:"));
    assert_eq!(store.put(b"a", b"hello", &config()), 0);
    assert_eq!(store.put(b"a", b"other", &config()), 0, "the key exists");
    assert_eq!(store.get(b"a"), Ok(b"hello".to_vec()), "the first value stays");
    assert_eq!((store.put(b"e", b"", &config()), store.put(b"", b"x", &config())), (-600, -600));
    assert_eq!((store.get(b"zz"), store.get(b"")), (Err(-704), Err(-704)));
    assert_eq!((store.size(b"a"), store.size(b"zz")), (5, -704));
    assert_eq!(store.exists(&["a", "zz", ""]), [1, 0, 0]);
    assert!(store.exists::<&str>(&[]).is_empty());
    assert_eq!(store.batch_get(&["a", "zz"]), [Ok(b"hello".to_vec()), Err(-704)]);
    assert_eq!(store.remove(b"a", false), -706, "a reader has a lease");
    assert_eq!((store.remove(b"a", true), store.remove(b"a", true)), (0, -704));
    assert_eq!(store.upsert(b"u", b"1", &config()), 0);
    assert_eq!(store.upsert(b"u", b"22", &config()), 0);
    assert_eq!(store.get(b"u"), Ok(b"22".to_vec()));
    assert_eq!((store.close(), store.close(), store.health()), (0, 0, 1));
    master.stop().unwrap();
}

#[test]
fn a_buffer_that_a_call_uses_is_unregistered_when_the_call_is_over() {
    let master = master();
    let config = store_client::ClientConfig::new(master.rpc_addr().to_string().parse().unwrap());
    let clients = Clients::connect(config).unwrap();
    let bytes = vec![7_u8; 8192];
    let Span { addr, len } = span(&bytes);
    let limit = Duration::from_millis(100);
    // SAFETY: `bytes` outlives the clients, and nothing refers to it meanwhile.
    unsafe { clients.add_buffer(addr, len) }.unwrap();
    let lent = clients.lend().unwrap();
    let (before, _) = lent.find(addr, len).unwrap();
    let busy = clients.remove_buffer_within(addr, limit, || {});
    assert!(matches!(busy, Err(ClientsError::Busy { .. })), "{busy:?}");
    assert_eq!(clients.room(addr), None, "no further call uses it");
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| clients.remove_buffer(addr, || {}));
        // timing: a removal that did not wait would be over by then.
        std::thread::sleep(Duration::from_millis(50));
        assert!(!removal.is_finished(), "the call still uses it");
        drop(lent);
        assert!(removal.join().unwrap().is_ok());
    });
    let unknown = clients.remove_buffer(addr, || {});
    assert!(matches!(unknown, Err(ClientsError::NotRegistered { .. })), "{unknown:?}");
    // SAFETY: as above.
    unsafe { clients.add_buffer(addr, len) }.unwrap();
    assert_ne!(clients.lend().unwrap().find(addr, len).unwrap().0, before, "another registration");
    drop(clients);
    master.stop().unwrap();
}

#[test]
fn destinations_that_overlap_are_filled_one_after_the_other() {
    let master = master();
    let store = store(&master);
    assert_eq!((store.put(b"a", b"aaaa", &config()), store.put(b"b", b"bbbb", &config())), (0, 0));
    let mut buffer = vec![0; 6];
    let base = buffer.as_mut_ptr().addr() as u64;
    let at = |offset| vec![Span { addr: base + offset, len: 4 }];
    // SAFETY: nothing else uses the buffer during the call.
    let read = unsafe { store.batch_get_into(&["a", "b"], &[at(0), at(2)], Fill::Any) };
    assert_eq!((read, &buffer[..]), (vec![4, 4], &b"aabbbb"[..]));
    let twice = vec![Span { addr: base, len: 3 }, Span { addr: base + 2, len: 3 }];
    // SAFETY: as above.
    assert_eq!(unsafe { store.batch_get_into(&["a"], &[twice], Fill::Any) }, [-600]);
    store.close();
    master.stop().unwrap();
}

#[test]
fn a_store_that_is_not_set_up_returns_numbers() {
    let store = Store::new();
    assert_eq!((store.health(), store.close(), store.is_set_up()), (1, 0, false));
    assert_eq!((store.put(b"a", b"b", &config()), store.get(b"a")), (-600, Err(-600)));
    assert_eq!((store.size(b"a"), store.exists(&["a", "b"])), (-600, vec![-600, -600]));
    assert_eq!((store.remove(b"a", true), store.remove_all(true)), (-600, -600));
    assert_eq!((store.remove_by_regex("a", false), store.hostname().as_str()), (-600, ""));
    assert!(store.client().is_none());
    // SAFETY: nothing is touched before the setup.
    unsafe {
        assert_eq!((store.register(1, 1), store.unregister(1)), (-600, -600));
        assert_eq!(store.batch_put(&["a"], &[vec![]], &config()), [-600]);
        assert_eq!(store.batch_get_into(&["a", "b"], &[vec![], vec![]], Fill::Any), [-600, -600]);
        let ranges = store.get_into_ranges(&[1], &[vec!["a", "b"]], &[vec![]], &[vec![]], &[vec![]]);
        assert_eq!(ranges, [[[-600], [-600]]]);
    }
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let master = master();
    let store = Store::new();
    let setup = |change: fn(&mut SetupOptions)| {
        let mut options = options(&master, 0);
        change(&mut options);
        store.setup_in(&options, &Env::default())
    };
    assert_eq!(setup(|options| options.local_hostname.clear()), -600);
    assert_eq!(setup(|options| options.metadata_server.clear()), -600);
    assert_eq!(setup(|options| options.global_segment_size = 7), -600);
    assert_eq!(setup(|options| options.master_server_addr = "no port".into()), -600);
    assert_eq!(setup(|options| options.master_server_addr = "127.0.0.1:1".into()), -1);
    assert!(!store.is_set_up());
    assert_eq!(setup(|_| ()), 0);
    assert_eq!(setup(|options| options.global_segment_size = 16 << 20), 0, "it is set up anew");
    assert_eq!(store.init_all("tcp", "", 0), -600, "it is set up");
    store.close();
    master.stop().unwrap();
}

#[test]
fn devices_that_are_named_beside_tcp_are_not_looked_for() {
    let master = master();
    let devices = |protocol: &str| SetupOptions {
        protocol: protocol.into(),
        rdma_devices: "none0".into(),
        ..options(&master, 1 << 20)
    };
    let store = Store::new();
    assert_eq!(store.setup_in(&devices("tcp"), &Env::default()), 0);
    #[cfg(feature = "rdma")]
    assert_eq!(store.setup_in(&devices("rdma"), &Env::default()), -1, "no device has that name");
    store.close();
    master.stop().unwrap();
}

#[test]
fn a_name_that_another_store_has_gets_another_port() {
    let master = master();
    let named = SetupOptions { local_hostname: "127.0.0.1:4711".into(), ..options(&master, 1 << 20) };
    let (first, second) = (Store::new(), Store::new());
    assert_eq!((first.setup_in(&named, &Env::default()), second.setup_in(&named, &Env::default())), (0, 0));
    assert_eq!(first.hostname(), "127.0.0.1:4711");
    let other = second.hostname();
    let port: u16 = other.strip_prefix("127.0.0.1:").unwrap().parse().unwrap();
    assert!(crate::env::STORE_PORTS.contains(&port), "{other}");
    let config = ReplicateConfig { preferred_segments: vec![other.clone()], ..config() };
    assert_eq!(first.put(b"a", b"hello", &config), 0);
    assert_eq!(second.close(), 0);
    eventually("the object vanishes with its node", || first.get(b"a") == Err(-704));
    first.close();
    master.stop().unwrap();
}

#[test]
fn memory_of_the_caller_is_moved_registered_or_not() {
    let master = master();
    let store = store(&master);
    let mut memory = vec![0_u8; 1 << 20];
    let (source, sink) = memory.split_at_mut(1 << 19);
    source.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 / 3) as u8);
    let (addr, len) = (source.as_ptr().addr() as u64, 1 << 20);
    for registered in [false, true] {
        if registered {
            // SAFETY: `memory` lives until the end of the test, where the store is closed.
            unsafe {
                assert_eq!((store.register(addr, len), store.register(addr, len)), (0, -600));
                assert_eq!(
                    (store.register(addr + 5, 7), store.register(0, 7), store.register(addr, 0)),
                    (-600, -600, -600)
                );
                assert_eq!(store.register(1 << 46, 4096), -600);
            }
        }
        let key = |name: &str| format!("{name}/{registered}");
        let parts = vec![span(&source[..1000]), span(&source[5000..400_000]), Span { addr: 0, len: 0 }];
        let (many, none) = (source[..4000].chunks(2).map(span).collect::<Vec<_>>(), vec![]);
        let keys = [key("parts"), key("many"), key("none")];
        // SAFETY: `source` is borrowed, and nothing writes it meanwhile.
        let put =
            || unsafe { store.batch_put(&keys, &[parts.clone(), many.clone(), none.clone()], &config()) };
        assert_eq!((put(), put()), (vec![0; 3], vec![0; 3]));
        assert_eq!(store.exists(&keys), [1, 1, 0], "no bytes, no object");
        let whole = [&source[..1000], &source[5000..400_000]].concat();
        assert_eq!(get_into(&store, &keys[0], sink, &[(0, 500_000)], Fill::Any), 396_000);
        assert!(sink[..396_000] == whole);
        sink.fill(0);
        let scattered = [(100_000, 300_000), (7, 96_000)];
        assert_eq!(get_into(&store, &keys[0], sink, &scattered, Fill::Exact), 396_000);
        assert!(sink[100_000..400_000] == whole[..300_000] && sink[7..96_007] == whole[300_000..]);
        assert_eq!(get_into(&store, &keys[0], sink, &[(0, 395_999)], Fill::Any), -600, "too short");
        assert_eq!(get_into(&store, &keys[0], sink, &[(0, 396_001)], Fill::Exact), -800, "too long");
        assert_eq!(get_into(&store, &keys[1], sink, &[(0, 4000)], Fill::Exact), 4000);
        assert!(sink[..4000] == source[..4000]);
        assert_eq!(get_into(&store, "zz", sink, &[(0, 9)], Fill::Any), -704);
    }
    // SAFETY: as above.
    unsafe {
        assert_eq!(store.batch_put(&["a", "b"], &[vec![]], &config()), [-600, -600]);
        assert_eq!(store.batch_get_into(&["a", "b"], &[vec![]], Fill::Any), [-600, -600]);
        assert_eq!(store.batch_put(&["a"], &[vec![Span { addr: 0, len: 5 }]], &config()), [-600]);
        assert_eq!(store.batch_put(&["a"], &[vec![Span { addr, len: u64::MAX }]], &config()), [-600]);
    }
    assert_eq!((store.unregister(addr), store.unregister(addr)), (0, -600));
    store.close();
    master.stop().unwrap();
}

#[test]
fn ranges_of_objects_land_in_ranges_of_buffers() {
    let master = master();
    let store = store(&master);
    assert_eq!(store.put(b"m1", b"0123456789abcdef", &config()), 0);
    let mut buffer = vec![b'.'; 64];
    let base = buffer.as_mut_ptr().addr() as u64;
    for registered in [false, true] {
        buffer.fill(b'.');
        if registered {
            // SAFETY: `buffer` lives until the end of the test, where the store is closed.
            assert_eq!(unsafe { store.register(base, 64) }, 0);
        }
        let read = |into: Vec<Vec<u64>>, from: Vec<Vec<u64>>, lens: Vec<Vec<u64>>| {
            // SAFETY: `buffer` has 64 bytes, and nothing else accesses it meanwhile.
            unsafe { store.get_into_ranges(&[base], &[vec!["m1", "zz"]], &[into], &[from], &[lens]) }
        };
        let ok = read(vec![vec![0, 8], vec![20]], vec![vec![0, 4], vec![0]], vec![vec![4, 4], vec![4]]);
        assert_eq!(ok, [[vec![4, 4], vec![-704]]]);
        assert_eq!(&buffer[..13], b"0123....4567.", "registered: {registered}");
        let beyond = read(vec![vec![0], vec![]], vec![vec![15], vec![]], vec![vec![2], vec![]]);
        assert_eq!(beyond[0][0], [-600]);
        let differ = read(vec![vec![0, 1], vec![]], vec![vec![0], vec![]], vec![vec![1], vec![]]);
        assert_eq!(differ[0][0], [-600, -600], "one number per range");
        let huge = read(vec![vec![u64::MAX], vec![]], vec![vec![0], vec![]], vec![vec![2], vec![]]);
        assert_eq!(huge[0][0], [-600]);
        if registered {
            let past = read(vec![vec![62, 63], vec![]], vec![vec![0, 0], vec![]], vec![vec![2, 2], vec![]]);
            assert_eq!(past[0][0], [2, -600], "the second one ends behind the buffer");
            assert_eq!(&buffer[60..], b"..01");
        }
    }
    // SAFETY: lists that differ in length touch nothing.
    let shape = unsafe { store.get_into_ranges(&[base, base], &[vec!["m1"]], &[], &[], &[]) };
    assert_eq!(shape, [[[-600]]]);
    store.close();
    master.stop().unwrap();
}

#[test]
fn the_local_buffer_limits_bytes_but_not_memory_of_the_caller() {
    let master = master();
    let store = store(&master);
    let long = vec![1_u8; (1 << 20) + 1];
    assert_eq!(store.local_buffer(), 1 << 20);
    assert_eq!(store.put(b"k", &long, &config()), -600);
    // SAFETY: `long` is borrowed, and nothing writes it meanwhile.
    unsafe {
        assert_eq!(store.put_parts(b"k", &[span(&long)], &config()), -600);
        assert_eq!(store.put_parts(b"none", &[], &config()), 0);
        assert_eq!(store.batch_put(&["k"], &[vec![span(&long)]], &config()), [0]);
    }
    assert_eq!(store.get(b"k"), Err(-600));
    let mut into = vec![0_u8; long.len()];
    let len = into.len();
    assert_eq!(get_into(&store, "k", &mut into, &[(0, len)], Fill::Any), len as i64);
    assert!(into == long);
    store.close();
    let without = SetupOptions { local_buffer_size: 0, ..options(&master, 32 << 20) };
    assert_eq!(store.setup_in(&without, &Env::default()), 0);
    assert_eq!((store.put(b"z", b"x", &config()), store.exists(&["z"])), (-600, vec![0]));
    // SAFETY: as above.
    assert_eq!(unsafe { store.batch_put(&["z"], &[vec![span(&long)]], &config()) }, [0]);
    store.close();
    master.stop().unwrap();
}

#[test]
fn options_of_a_put_count() {
    let master = master();
    let store = store(&master);
    let put = |key: &str, config: &ReplicateConfig| store.put(key.as_bytes(), b"x", config);
    assert_eq!(put("r2", &ReplicateConfig { replica_num: 2, ..config() }), 0, "as many as there is room for");
    assert_eq!(put("r0", &ReplicateConfig { replica_num: 0, ..config() }), -600);
    let preferred = |name: &str| ReplicateConfig { preferred_segments: vec![name.into()], ..config() };
    assert_eq!(put("rp", &preferred("nope:1")), 0, "it is placed elsewhere");
    assert_eq!(put("own", &preferred(&store.hostname())), 0);
    assert_eq!(put("near", &ReplicateConfig { prefer_alloc_in_same_node: true, ..config() }), 0);
    let groups = |names: &[&str]| ReplicateConfig {
        group_ids: Some(names.iter().map(|name| (*name).into()).collect()),
        ..config()
    };
    // SAFETY: constants are borrowed for ever.
    let grouped = |names: &[&str]| unsafe {
        store.batch_put(
            &["g1", "g2", "g3"],
            &[vec![span(b"1")], vec![span(b"2")], vec![span(b"3")]],
            &groups(names),
        )
    };
    assert_eq!(grouped(&["a", "b"]), [-600; 3]);
    assert_eq!(grouped(&["a", "b", "a"]), [0; 3]);
    assert_eq!(
        store.batch_get(&["g1", "g2", "g3"]),
        [Ok(b"1".to_vec()), Ok(b"2".to_vec()), Ok(b"3".to_vec())]
    );
    assert_eq!(store.put(b"big", &[0; 1 << 20], &config()), 0);
    let huge = vec![0_u8; 33 << 20];
    // SAFETY: `huge` is borrowed until the call returns, and nothing writes it meanwhile.
    let codes = unsafe { store.batch_put(&["huge"], &[vec![span(&huge)]], &config()) };
    assert_eq!(codes, [-200]);
    store.close();
    master.stop().unwrap();
}

#[test]
fn many_are_removed_by_expression_or_all_at_once() {
    let master = master();
    let store = store(&master);
    for key in ["k1", "k2", "k3", "other"] {
        assert_eq!(store.put(key.as_bytes(), b"x", &config()), 0);
    }
    assert_eq!(store.remove_by_regex("(", true), -600);
    assert_eq!(store.remove_by_regex("^k", true), 3);
    assert_eq!(store.batch_remove(&["k1", "other"], true), [-704, 0]);
    assert_eq!((store.remove_all(true), store.remove_all(false)), (0, 0));
    store.close();
    master.stop().unwrap();
}

#[test]
fn objects_vanish_with_the_process_that_contributed_their_memory() {
    let master = master();
    let (owner, reader) = (store(&master), Store::new());
    assert_eq!(reader.setup_in(&options(&master, 0), &Env::default()), 0);
    assert_eq!(reader.put(b"a", b"hello", &config()), 0);
    assert_eq!(reader.get(b"a"), Ok(b"hello".to_vec()));
    assert_ne!(owner.hostname(), reader.hostname());
    drop(owner);
    eventually("the object is gone", || reader.exists(&["a"]) == [0]);
    assert_eq!(reader.put(b"b", b"x", &config()), -200, "no memory is left");
    reader.close();
    master.stop().unwrap();
}

#[test]
fn a_master_that_is_gone_is_a_number_and_the_store_closes_nevertheless() {
    let master = master();
    let store = store(&master);
    assert_eq!(store.put(b"a", b"hello", &config()), 0);
    master.stop().unwrap();
    assert_eq!((store.exists(&["a", "b"]), store.size(b"a")), (vec![-900, -900], -900));
    assert_eq!((store.put(b"b", b"x", &config()), store.remove(b"a", true)), (-900, -900));
    assert_eq!((store.remove_all(true), store.health()), (-900, 2));
    assert_eq!(store.close(), 0);
}

#[test]
fn many_threads_share_a_store() {
    let master = master();
    let store = store(&master);
    let mut memory = vec![0_u8; 12 << 16];
    let base = memory.as_mut_ptr().addr() as u64;
    // SAFETY: `memory` lives until the end of the test, where the store is closed.
    assert_eq!(unsafe { store.register(base, 12 << 16) }, 0);
    std::thread::scope(|scope| {
        for thread in 0..12_u64 {
            let store = store.clone();
            scope.spawn(move || {
                let buffer = vec![Span { addr: base + (thread << 16), len: 1 << 16 }];
                for round in 0..20 {
                    let key = format!("{thread}/{round}");
                    let value = vec![(thread * 31 + round) as u8; 1 << 16];
                    assert_eq!(store.put(key.as_bytes(), &value, &config()), 0);
                    assert_eq!(store.get(key.as_bytes()).as_deref(), Ok(value.as_slice()));
                    // SAFETY: each thread has its own part of the memory.
                    let read =
                        unsafe { store.batch_get_into(&[&key], std::slice::from_ref(&buffer), Fill::Any) };
                    assert_eq!(read, [1 << 16]);
                    // SAFETY: as above.
                    assert!(unsafe { crate::read_bytes(buffer[0].addr, 1 << 16) }.unwrap() == value);
                }
            });
        }
    });
    store.close();
    master.stop().unwrap();
}

#[test]
fn asynchronous_callers_have_a_client_of_the_same_store() {
    let master = master();
    let store = store(&master);
    assert_eq!(store.put(b"a", b"hello", &config()), 0);
    let mut client = store.client().unwrap().blocking();
    assert_eq!(store_client::Store::get(&mut client, b"a").unwrap(), Some(b"hello".to_vec()));
    store.close();
    master.stop().unwrap();
}

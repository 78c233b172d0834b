//! The trait that all clients have: the same calls to each kind of client, with the same results.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};

use common::{client, codes, eventually, get_batch, get_range, master, node, pattern, put_batch, with};
use store_client::local::{LocalConfig, LocalServerConfig};
use store_client::{
    AsyncClient, BlockingClient, BufferRange, Client, ClientConfig, ErrorCode, Fragment, Get, LocalClient,
    LocalServer, Node, PARTS_MAX, Pin, Put, PutOptions, RemoveMode, RetentionChange, Source, Store,
    StoreError, TtlChange,
};
use store_master::MasterHandle;

const ONE: PutOptions = PutOptions::DEFAULT;
const LEN: usize = 200_000;

/// One store, and one client of each kind.
struct Clients {
    embedded: Client,
    shared: BlockingClient,
    local: LocalClient,
    server: LocalServer,
    node: Node,
    master: MasterHandle,
    _dir: tempfile::TempDir,
}

impl Clients {
    fn new() -> Self {
        let master = master();
        let node = node("a", master.rpc_addr());
        let dir = tempfile::tempdir().unwrap();
        let config = ClientConfig::new(master.rpc_addr().into());
        let server = LocalServer::start(LocalServerConfig::new(dir.path().join("s"), config)).unwrap();
        let local = with(LocalConfig::new(server.path()), |config| config.arena_bytes = 4 << 20);
        Self {
            embedded: client(master.rpc_addr()),
            shared: AsyncClient::start(client(master.rpc_addr())).unwrap().blocking(),
            local: LocalClient::connect(local).unwrap(),
            server,
            node,
            master,
            _dir: dir,
        }
    }

    fn each(&mut self) -> [(&'static str, &mut dyn Store); 3] {
        [("embedded", &mut self.embedded), ("shared", &mut self.shared), ("local", &mut self.local)]
    }

    fn stop(self) {
        let Self { server, node, master, .. } = self;
        server.stop();
        node.stop();
        master.stop().unwrap();
    }
}

#[test]
fn every_client_gives_the_same_results() {
    let mut clients = Clients::new();
    for (name, store) in clients.each() {
        let value = pattern(name.len() as u64, LEN);
        let key = |what: &str| format!("{name}/{what}").into_bytes();
        let (a, b, c, none) = (key("a"), key("b"), key("c"), key("none"));
        let stored = put_batch(
            store,
            &[(&a, &value), (&b, b"short"), (&a, b"taken"), (b"", b"no key"), (&c, b"")],
            &ONE,
        );
        let (no_key, no_value) = (Err(ErrorCode::InvalidKey), Err(ErrorCode::InvalidParams));
        assert_eq!(stored, [Ok(true), Ok(true), Ok(false), no_key, no_value], "{name}");
        let found = get_batch(store, &[&a, &none, &b, &a]);
        let whole = Ok(Some(value.clone()));
        assert_eq!(found, [whole.clone(), Ok(None), Ok(Some(b"short".to_vec())), whole], "{name}");
        assert_eq!(store.get(&a).unwrap().as_ref(), Some(&value));
        assert_eq!(store.get(&none).unwrap(), None);
        assert!(store.exists(&a).unwrap() && !store.exists(&none).unwrap());
        assert_eq!(store.batch_exists(&[&a, &none, &b]).unwrap(), [true, false, true]);
        let removed = codes(store.batch_remove(&[&a, &none], RemoveMode::Force).unwrap());
        assert_eq!(removed, [Ok(true), Ok(false)], "{name}");
        assert!(
            store.remove(&b, RemoveMode::Force).unwrap() && !store.remove(&b, RemoveMode::Force).unwrap()
        );
    }
    clients.stop();
}

#[test]
fn every_client_replaces_what_exists_and_leaves_it_when_that_fails() {
    let mut clients = Clients::new();
    let segment = clients.node.status().segment.unwrap();
    for (name, store) in clients.each() {
        let (old, new) = (pattern(1, LEN), pattern(2, LEN / 3));
        let key = |what: &str| format!("{name}/{what}").into_bytes();
        let (a, b) = (key("a"), key("b"));
        assert_eq!(put_batch(store, &[(&a, &old)], &ONE), [Ok(true)]);
        // Nowhere to go: the old object stays.
        let mut nowhere = ONE;
        nowhere.placement.excluded.push(segment).unwrap();
        let mut items = [Put::new(&a, &new[..])];
        assert_eq!(store.batch_upsert(&mut items, &nowhere).failed, 1, "{name}");
        assert_eq!(codes([items[0].result()]), [Err(ErrorCode::SegmentsExcluded)], "{name}");
        assert_eq!(store.get(&a).unwrap().as_ref(), Some(&old), "{name}");
        // One that exists, one that does not, and one key twice: the last one remains.
        let mut items =
            [Put::new(&a, &new[..]), Put::new(&b, b"1".as_slice()), Put::new(&b, b"22".as_slice())];
        assert_eq!(store.batch_upsert(&mut items, &ONE).done, 3, "{name}");
        assert_eq!(store.get(&a).unwrap().as_ref(), Some(&new), "{name}");
        assert_eq!(store.get(&b).unwrap().as_deref(), Some(b"22".as_slice()), "{name}");
        // A put still does not replace.
        assert_eq!(put_batch(store, &[(&a, &old)], &ONE), [Ok(false)]);
    }
    let local = &mut clients.local;
    local.upsert(b"one", b"first", &ONE).unwrap();
    local.upsert(b"one", b"second", &ONE).unwrap();
    assert_eq!(local.get(b"one").unwrap().as_deref(), Some(b"second".as_slice()));
    assert_eq!(local.upsert(b"", b"x", &ONE).map_err(|error| error.code()), Err(ErrorCode::InvalidKey));
    clients.stop();
}

#[test]
fn a_reader_misses_nothing_while_an_object_is_replaced_over_and_over() {
    let clients = Clients::new();
    let Clients { mut embedded, shared, .. } = clients;
    let value = |round: usize| vec![round as u8; 1_000 + round * 777];
    embedded.upsert(b"k", &value(0), &ONE).unwrap();
    const ROUNDS: usize = 200;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for mut reader in [shared.clone(), shared.clone()] {
            let done = &done;
            scope.spawn(move || {
                let mut latest = 0;
                while !done.load(Ordering::Relaxed) {
                    let found = reader.get(b"k").unwrap().expect("there is always an object");
                    let round = (found.len() - 1_000) / 777;
                    assert_eq!(found, value(round));
                    assert!(round >= latest, "{round} after {latest}");
                    latest = round;
                }
            });
        }
        // Ended even if a write fails.
        let writes: Result<(), StoreError> =
            (1..=ROUNDS).try_for_each(|round| embedded.upsert(b"k", &value(round), &ONE));
        done.store(true, Ordering::Relaxed);
        writes.unwrap();
    });
    assert_eq!(embedded.get(b"k").unwrap(), Some(value(ROUNDS)));
    let stats = embedded.master().stats().unwrap();
    assert_eq!((stats.upserts_total, stats.objects, stats.upserts_unfinished), (ROUNDS as u64 + 1, 1, 0));
}

#[test]
fn every_client_leases_what_it_says_exists_if_it_is_asked_to() {
    let mut clients = Clients::new();
    for (name, store) in clients.each() {
        let key = |what: &str| format!("{name}/{what}").into_bytes();
        let (a, b, none) = (key("a"), key("b"), key("none"));
        assert_eq!(put_batch(store, &[(&a, b"1"), (&b, b"2")], &ONE), [Ok(true), Ok(true)]);
        assert_eq!(store.batch_exists(&[&a, &none]).unwrap(), [true, false], "{name}");
        assert_eq!(store.batch_exists_leased(&[&none, &b]).unwrap(), [false, true], "{name}");
        let removed = codes(store.batch_remove(&[&a, &b], RemoveMode::Unused).unwrap());
        assert_eq!(removed, [Ok(true), Err(ErrorCode::ObjectHasLease)], "{name}");
        assert_eq!(store.get(&b).unwrap().as_deref(), Some(b"2".as_slice()), "{name}");
    }
    clients.stop();
}

#[test]
fn every_client_changes_how_long_objects_are_kept() {
    let mut clients = Clients::new();
    for (name, store) in clients.each() {
        let key = |what: &str| format!("{name}/{what}").into_bytes();
        let (a, none) = (key("a"), key("none"));
        assert_eq!(put_batch(store, &[(&a, b"1")], &ONE), [Ok(true)]);
        let pin = RetentionChange { pin: Some(Pin::Hard), ..RetentionChange::default() };
        let changed = codes(store.batch_change_retention(&[&a, &none], &pin).unwrap());
        assert_eq!(changed, [Ok(true), Ok(false)], "{name}");
        let bad = RetentionChange { soft_pin_ttl_ms: Some(5), ..pin };
        let changed = codes(store.batch_change_retention(&[&a], &bad).unwrap());
        assert_eq!(changed, [Err(ErrorCode::InvalidParams)], "{name}");
        // What is pinned for good shows in the master's numbers.
        let short = RetentionChange { pin: Some(Pin::None), ttl: TtlChange::After(1), ..pin };
        assert_eq!(codes(store.batch_change_retention(&[&a], &short).unwrap()), [Ok(true)]);
        eventually("the object is expired", || store.get(&a).unwrap().is_none());
    }
    clients.stop();
}

#[test]
fn every_client_reads_parts() {
    let mut clients = Clients::new();
    let value = pattern(3, LEN);
    let len = LEN as u64;
    assert!(clients.embedded.put(b"k", &value, &ONE).unwrap());
    assert!(clients.embedded.put(b"short", &value[..100], &ONE).unwrap());
    for (name, store) in clients.each() {
        for (start, end) in [(0, 1), (5, 6), (65_535, 65_537), (65_536, 131_072), (1, len), (len - 1, len)] {
            let wanted = &value[start as usize..end as usize];
            assert_eq!(
                get_range(store, b"k", start..end).unwrap().as_deref(),
                Some(wanted),
                "{name} {start}..{end}"
            );
            // Plain memory in one piece and in several pieces; longer than needed, and unchanged after the
            // part.
            let mut bytes = vec![0xee; wanted.len() + 3];
            let read = store.get_with(Get::new("k", &mut bytes[..]).range(start..end)).unwrap();
            assert_eq!((read, &bytes[..wanted.len()]), (Some(end - start), wanted), "{name}");
            assert_eq!(bytes[wanted.len()..], [0xee; 3]);
            let (mut head, mut tail) = ([0; 1], vec![0; wanted.len()]);
            let mut slices = [&mut head[..], &mut [], &mut tail[..]];
            assert_eq!(
                store.get_with(Get::new("k", &mut slices).range(start..end)).unwrap(),
                Some(end - start)
            );
            assert_eq!([&head[..], &tail[..wanted.len() - 1]].concat(), wanted, "{name}");
        }
        assert_eq!(get_range(store, b"k", len - 9..).unwrap().as_deref(), Some(&value[LEN - 9..]), "{name}");
        assert_eq!(get_range(store, b"short", 7..).unwrap().as_deref(), Some(&value[7..100]), "{name}");
        assert_eq!(get_range(store, b"none", 7..).unwrap(), None);
        let error = get_range(store, b"k", 5..len + 1).unwrap_err();
        assert!(matches!(error, StoreError::BeyondEnd { end } if end == len + 1), "{name}: {error}");
        let error = get_range(store, b"k", len..).unwrap_err();
        assert!(matches!(error, StoreError::BeyondEnd { .. }), "{name}: {error}");
        let error = get_range(store, b"k", 5..5).unwrap_err();
        assert!(matches!(error, StoreError::BadRange { start: 5, len: 0 }), "{name}: {error}");
        let error = store.get_with(Get::new("k", &mut [0; 9]).range(0..10)).unwrap_err();
        assert!(matches!(error, StoreError::TooLong { room: 9 }), "{name}: {error}");
        let error = store.get_with(Get::new("k", &mut [0; 9]).range(100..)).unwrap_err();
        assert!(matches!(error, StoreError::TooLong { room: 9 }), "{name}: {error}");
        let error = store.get_with(Get::new("k", &mut [0; 9])).unwrap_err();
        assert!(matches!(error, StoreError::TooLong { room: 9 }), "{name}: {error}");
    }
    clients.stop();
}

#[test]
fn an_item_that_cannot_be_carried_out_fails_alone() {
    let mut clients = Clients::new();
    let region = clients.embedded.alloc(1 << 16).unwrap();
    let foreign = BufferRange::part(&region, 0, 4096);
    let outside = BufferRange::part(&region, 1 << 16, 1);
    let fragments = [Fragment { offset: 0, into: outside }];
    for (name, store) in clients.each() {
        let slices = vec![&b"x"[..]; PARTS_MAX + 1];
        let mut puts = [
            Put::new(name, b"value"),
            Put::new("wrong", Source::Slices(&slices)),
            Put::new("wrong", outside),
            Put::new("", b"value"),
        ];
        let tally = store.batch_put(&mut puts, &ONE);
        assert_eq!((tally.done, tally.missed, tally.failed, tally.is_complete()), (1, 0, 3, false), "{name}");
        assert!(
            matches!(puts[1].result(), Err(StoreError::TooManyParts { parts }) if parts == PARTS_MAX + 1)
        );
        let error = puts[2].result().unwrap_err();
        assert!(
            matches!(error, StoreError::Unregistered { .. } | StoreError::ForeignMemory),
            "{name}: {error}"
        );

        let (mut value, mut stale) = (Vec::new(), b"stale".to_vec());
        let mut gets = [
            Get::new(name, &mut value),
            Get::new(name, outside),
            Get::new("none", &mut stale),
            Get::new(name, &fragments).range(1..2),
        ];
        let tally = store.batch_get(&mut gets);
        assert_eq!((tally.done, tally.missed, tally.failed), (1, 1, 2), "{name}");
        let error = gets[1].result().unwrap_err();
        assert!(
            matches!(error, StoreError::Unregistered { .. } | StoreError::ForeignMemory),
            "{name}: {error}"
        );
        assert!(matches!(gets[3].result(), Err(StoreError::BadRange { start: 1, len: 1 })), "{name}");
        assert_eq!((&value[..], &stale[..]), (&b"value"[..], &b""[..]), "{name}");
    }
    // A local client refuses registered memory, and an engine refuses an arena.
    let error = clients.local.put(b"foreign", foreign, &ONE).unwrap_err();
    assert!(matches!(error, StoreError::ForeignMemory), "{error}");
    let buffer = clients.local.alloc(64).unwrap();
    for error in [
        clients.embedded.get_with(Get::new("local", buffer.all())).unwrap_err(),
        clients.embedded.put(b"foreign", buffer.all(), &ONE).unwrap_err(),
        clients.shared.get_with(Get::new("local", buffer.all())).unwrap_err(),
        clients.shared.put(b"foreign", buffer.all(), &ONE).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::ForeignMemory), "{error}");
        assert_eq!(error.code(), ErrorCode::InvalidParams);
    }
    clients.stop();
}

#[test]
fn the_arena_of_a_local_client_accepts_parts_and_fragments_go_to_registered_memory() {
    let mut clients = Clients::new();
    let value = pattern(8, LEN);
    assert!(clients.embedded.put(b"k", &value, &ONE).unwrap());
    let buffer = clients.local.alloc(100_000).unwrap();
    let read = clients.local.get_with(Get::new("k", buffer.part(10, 70_000)).range(65_000..135_000)).unwrap();
    assert_eq!(read, Some(70_000));
    let mut found = vec![0; 70_000];
    buffer.read(10, &mut found).unwrap();
    assert_eq!(found, value[65_000..135_000]);
    // Together with other items in one request; the part to the end is longer than its place.
    let (mut whole, mut part) = (Vec::new(), [0; 4]);
    let mut items = [
        Get::new("k", buffer.part(0, 10)).range(5..15),
        Get::new("k", &mut whole),
        Get::new("k", buffer.part(10, 10)).range(100..),
        Get::new("k", &mut part).range(9..13),
    ];
    let tally = clients.local.batch_get(&mut items);
    assert_eq!((tally.done, tally.failed), (3, 1));
    assert!(matches!(items[2].result(), Err(StoreError::TooLong { room: 10 })));
    let mut found = [0; 10];
    buffer.read(0, &mut found).unwrap();
    assert_eq!((&found[..], &part[..], whole == value), (&value[5..15], &value[9..13], true));

    // Several ranges of registered memory share one part.
    let region = clients.embedded.alloc(LEN).unwrap();
    let ranges = [
        BufferRange::part(&region, 100_000, 3),
        BufferRange::part(&region, 0, 0),
        BufferRange::part(&region, 0, 90_000),
    ];
    let read = clients.embedded.get_with(Get::new("k", &ranges).range(65_534..131_077)).unwrap();
    assert_eq!(read, Some(65_543));
    let mut found = vec![0; 65_543];
    region.read(100_000, &mut found[..3]).unwrap();
    region.read(0, &mut found[3..]).unwrap();
    assert_eq!(found, value[65_534..131_077]);
    let read = clients.embedded.get_with(Get::new("k", &ranges).range(110_000..)).unwrap();
    assert_eq!(read, Some(90_000));
    clients.stop();
}

#[test]
fn threads_share_one_client_and_its_registered_memory() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let region = client.alloc(8 * 4096).unwrap();
    let shared = AsyncClient::start(client).unwrap().blocking();
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let (mut store, region) = (shared.clone(), &region);
            scope.spawn(move || {
                let range = BufferRange::part(region, thread * 4096, 4096);
                for round in 0..20 {
                    let (key, value) = (format!("{thread}/{round}"), pattern(thread << 8 | round, 4096));
                    assert!(store.put(key.as_bytes(), &value, &ONE).unwrap());
                    assert_eq!(store.get_with(Get::new(&key, range)).unwrap(), Some(4096));
                    let mut found = vec![0; 4096];
                    region.read(range.offset, &mut found).unwrap();
                    assert_eq!(found, value);
                    let fragments = [Fragment { offset: 7, into: BufferRange { len: 9, ..range } }];
                    assert_eq!(store.get_with(Get::new(&key, &fragments)).unwrap(), Some(9));
                    assert!(store.put(format!("{key}/again").as_bytes(), range, &ONE).unwrap());
                }
            });
        }
    });
}

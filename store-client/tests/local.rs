//! The local client with a server, a node and a master: what works, what is refused, and what happens when
//! processes die.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use common::{
    Process, client, codes, eventually, get_batch, master, node, pattern, put_batch, role, say,
    wait_for_parent, with,
};
use store_client::local::{LocalConfig, LocalError, LocalServerConfig, LocalStartError, Refusal};
use store_client::{
    ClientConfig, ErrorCode, Get, LocalClient, LocalServer, Node, PutOptions, RemoveMode, Store as _,
    StoreError,
};
use store_core::message::{Operation as _, ReadStats};
use store_core::wire::VERSION;
use store_core::{Frame, FrameWriter, Header, WireError};
use store_master::MasterHandle;

const ONE: PutOptions = PutOptions::DEFAULT;
const MIB: u64 = 1 << 20;
/// The bytes of a hello: variant, version, tenant, and 4,096 bytes of arena.
const HELLO: &[u8] = b"\x00\x03\x07default\x80\x20";

struct Store {
    server: LocalServer,
    _node: Node,
    master: MasterHandle,
    dir: tempfile::TempDir,
}

impl Store {
    fn with(change: impl FnOnce(&mut LocalServerConfig)) -> Self {
        let master = master();
        let node = node("a", master.rpc_addr());
        let dir = tempfile::tempdir().unwrap();
        let client = ClientConfig::new(master.rpc_addr().into());
        let mut config = LocalServerConfig::new(dir.path().join("local.sock"), client);
        change(&mut config);
        let server = LocalServer::start(config).unwrap();
        Self { server, _node: node, master, dir }
    }

    fn new() -> Self {
        Self::with(|_| {})
    }

    fn config(&self) -> LocalConfig {
        with(LocalConfig::new(self.server.path()), |config| config.arena_bytes = 8 * MIB)
    }

    fn client(&self) -> LocalClient {
        LocalClient::connect(self.config()).unwrap()
    }

    fn raw(&self) -> UnixStream {
        UnixStream::connect(self.server.path()).unwrap()
    }
}

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    match role[0].as_str() {
        "busy-client" => be_busy_client(&role),
        "server" => be_server(&role),
        _ => {}
    }
}

/// Puts and gets until it is killed.
fn be_busy_client(role: &[String]) {
    let mut client = LocalClient::connect(LocalConfig::new(&role[1])).unwrap();
    let big = pattern(7, 4 << 20);
    say("connected");
    for round in 0u64.. {
        let key = format!("{}-{round}", role[2]);
        let stored = client.put(key.as_bytes(), &big, &ONE);
        // The pool fills up; only the work under way at the moment of death matters.
        if matches!(stored, Ok(true)) {
            assert_eq!(client.get(key.as_bytes()).unwrap_or(None).unwrap_or_else(|| big.clone()), big);
        }
        let _ = client.remove(key.as_bytes(), RemoveMode::Force);
    }
}

/// The role `server PATH MASTER`.
fn be_server(role: &[String]) {
    let client = ClientConfig::new(role[2].parse().unwrap());
    let server = LocalServer::start(LocalServerConfig::new(&role[1], client)).unwrap();
    say("listening");
    wait_for_parent();
    server.stop();
}

#[test]
fn objects_that_one_kind_of_client_puts_are_got_by_the_other() {
    let store = Store::new();
    let (mut local, mut embedded) = (store.client(), client(store.master.rpc_addr()));
    for (seed, len) in [1usize, 63, 4096, 65_536, 65_537, 1 << 20, 3_000_001].into_iter().enumerate() {
        let value = pattern(seed as u64, len);
        let (a, b) = (format!("local-{len}"), format!("embedded-{len}"));
        assert!(local.put(a.as_bytes(), &value, &ONE).unwrap());
        assert!(!local.put(a.as_bytes(), b"other", &ONE).unwrap(), "the key exists");
        assert_eq!(embedded.get(a.as_bytes()).unwrap().as_ref(), Some(&value));
        assert!(embedded.put(b.as_bytes(), &value, &ONE).unwrap());
        assert_eq!(local.get(b.as_bytes()).unwrap(), Some(value));
        assert!(local.exists(b.as_bytes()).unwrap());
    }
    assert_eq!(local.get(b"nothing").unwrap(), None);
    assert!(!local.exists(b"nothing").unwrap());
    assert!(!local.remove(b"nothing", RemoveMode::Unused).unwrap());
    // A new lease, however long the lines above took.
    assert_eq!(embedded.get(b"local-1").unwrap(), Some(pattern(0, 1)));
    let leased = local.remove(b"local-1", RemoveMode::Unused).unwrap_err();
    assert_eq!(leased.code(), ErrorCode::ObjectHasLease);
    assert!(local.remove(b"local-1", RemoveMode::Force).unwrap());
    assert_eq!(embedded.get(b"local-1").unwrap(), None);
    assert_eq!(local.put(b"empty", b"", &ONE).unwrap_err().code(), ErrorCode::InvalidParams);
    assert_eq!(local.put(b"", b"x", &ONE).unwrap_err().code(), ErrorCode::InvalidKey);
    assert!(store.server.stats().requests_total > 20);
}

#[test]
fn batches_have_a_result_for_each_key_however_they_are_split() {
    // More values than fit the arena at once, and more keys than fit one request.
    let store = Store::with(|config| config.arena_bytes_max = MIB);
    let mut client = store.client();
    assert_eq!(client.arena_bytes(), MIB, "the node gives less than requested");
    let values: Vec<_> = (0..1500u64).map(|seed| pattern(seed, 1 + (seed as usize * 37) % 9000)).collect();
    let keys: Vec<_> = (0..1500).map(|i| format!("k{i}")).collect();
    let items: Vec<(&[u8], &[u8])> =
        keys.iter().zip(&values).map(|(key, value)| (key.as_bytes(), &value[..])).collect();
    assert!(put_batch(&mut client, &items, &ONE).iter().all(|stored| *stored == Ok(true)));
    let again = put_batch(&mut client, &items[..3], &ONE);
    assert_eq!(again, [Ok(false); 3]);
    let mut wanted: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
    wanted.insert(700, b"missing");
    let found = get_batch(&mut client, &wanted);
    assert_eq!(found.len(), 1501);
    assert_eq!(found[700], Ok(None));
    for (index, value) in values.iter().enumerate() {
        let place = index + usize::from(index >= 700);
        assert_eq!(found[place].as_ref().unwrap().as_ref(), Some(value), "{index}");
    }
    let there = client.batch_exists(&wanted).unwrap();
    assert_eq!(there.iter().filter(|there| !**there).count(), 1);
    let removed = codes(client.batch_remove(&wanted, RemoveMode::Force).unwrap());
    assert_eq!(removed[700], Ok(false));
    assert_eq!(removed.iter().filter(|removed| **removed == Ok(true)).count(), 1500);
}

#[test]
fn values_stay_in_the_arena_for_as_long_as_their_buffer() {
    let store = Store::new();
    let mut client = store.client();
    let value = pattern(3, 100_000);
    let buffer = client.alloc(200_000).unwrap();
    buffer.write(50_000, &value).unwrap();
    assert!(client.put(b"k", buffer.part(50_000, 100_000), &ONE).unwrap());
    assert_eq!(client.get_with(Get::new(b"k", buffer.part(0, 100_000))).unwrap(), Some(100_000));
    let mut found = vec![0; 100_000];
    buffer.read(0, &mut found).unwrap();
    assert_eq!(found, value);
    let got = client.get_buffer(b"k").unwrap().unwrap();
    assert_eq!((got.len(), got.span().len()), (100_000, 100_000));
    // A value that does not fit, and a range that lies outside.
    assert_eq!(
        client.get_with(Get::new(b"k", buffer.part(0, 99_999))).unwrap_err().code(),
        ErrorCode::BufferOverflow
    );
    for (offset, len) in [(200_000, 1), (0, 200_001), (u64::MAX, 2), (1, u64::MAX)] {
        let error = client.get_with(Get::new(b"k", buffer.part(offset, len))).unwrap_err();
        assert!(matches!(error, StoreError::Unregistered { .. }), "{error}");
    }
    assert!(matches!(buffer.read(200_000, &mut [0]), Err(StoreError::Unregistered { .. })));
    assert!(matches!(client.alloc(9 * MIB), Err(StoreError::ArenaFull { .. })));
    assert!(matches!(client.put(b"l", &vec![1; 9 << 20], &ONE), Err(StoreError::ArenaFull { .. })));
    // A buffer may outlive its client, and is refused by another one.
    let mut other = store.client();
    assert!(matches!(other.put(b"l", buffer.all(), &ONE), Err(StoreError::ForeignMemory)));
    drop(client);
    assert_eq!(got.to_vec().unwrap(), value);
    drop(store);
    assert_eq!(got.to_vec().unwrap(), value);
}

#[test]
fn many_clients_share_a_few_workers() {
    let store = Store::new();
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let mut client = store.client();
            scope.spawn(move || {
                for round in 0..30u64 {
                    let key = format!("{thread}/{round}");
                    let value = pattern(thread * 100 + round, 10_000 + round as usize);
                    assert!(client.put(key.as_bytes(), &value, &ONE).unwrap());
                    assert_eq!(client.get(key.as_bytes()).unwrap(), Some(value));
                }
            });
        }
    });
    eventually("all clients have gone", || store.server.stats().clients == 0);
    eventually("their memory is freed", || store.server.stats().arenas_bytes == 0);
    assert_eq!(store.server.stats().clients_total, 6);
}

#[test]
fn a_writer_that_changes_its_arena_during_a_put_harms_only_its_own_object() {
    let store = Store::new();
    let (mut local, mut embedded) = (store.client(), client(store.master.rpc_addr()));
    let other = pattern(1, 500_000);
    assert!(embedded.put(b"other", &other, &ONE).unwrap());
    let buffer = local.alloc(2 * MIB).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    /// Stops the writer even if the test panics.
    struct Stops<'a>(&'a std::sync::atomic::AtomicBool);
    impl Drop for Stops<'_> {
        fn drop(&mut self) {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _stops = Stops(&stop);
        scope.spawn(|| {
            let mut byte = 0u8;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                byte = byte.wrapping_add(1);
                buffer.write(0, &[byte; 4096]).unwrap();
                buffer.write(2 * MIB - 4096, &[byte; 4096]).unwrap();
            }
        });
        // The space is released with the leases of reads: all rounds together fit.
        for round in 0..12 {
            let key = format!("mine-{round}");
            local.put(key.as_bytes(), buffer.all(), &ONE).unwrap();
            // Either the committed bytes or a miss: which of the two depends on the moment of the change.
            let found = embedded.get(key.as_bytes()).unwrap();
            assert!(found.is_none_or(|bytes| bytes.len() == 2 << 20));
            assert_eq!(embedded.get(b"other").unwrap().as_ref(), Some(&other));
            embedded.remove(key.as_bytes(), RemoveMode::Force).unwrap();
        }
    });
}

#[test]
fn a_node_that_dies_is_an_error_and_the_next_call_uses_its_successor() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let role = ["server", path.to_str().unwrap(), &master.rpc_addr().to_string()];
    let mut server = Process::start("entry", &role);
    let mut client = LocalClient::connect(LocalConfig::new(&path)).unwrap();
    let value = pattern(2, 50_000);
    assert!(client.put(b"k", &value, &ONE).unwrap());
    let old = client.alloc(50_000).unwrap();
    old.write(0, &value).unwrap();
    server.kill();
    let error = client.get(b"k").unwrap_err();
    assert!(is(&error, |error| matches!(error, LocalError::Lost { .. })), "{error}");
    let error = client.get(b"k").unwrap_err();
    assert!(is(&error, |error| matches!(error, LocalError::Connect { .. })), "{error}");
    assert!(error.to_string().contains("--local"), "{error}");
    // The socket that the dead node left behind is replaced.
    let _server = Process::start("entry", &role);
    assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value));
    assert_eq!(old.to_vec().unwrap(), value, "a buffer of the old arena can be read");
    assert!(matches!(client.put(b"l", old.all(), &ONE), Err(StoreError::ForeignMemory)));
}

#[test]
fn buffers_that_a_lost_node_was_writing_stay_held() {
    let store = Store::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("relay");
    let listener = UnixListener::bind(&path).unwrap();
    let mut client = None;
    std::thread::scope(|scope| {
        // A node that accepts the client, receives a request, and dies before it answers.
        let relay = scope.spawn(|| relay_hello(&listener, store.server.path()));
        client = Some(LocalClient::connect(LocalConfig::new(&path)).unwrap());
        let (mut near, far) = relay.join().unwrap();
        let client = client.as_mut().unwrap();
        let buffer = client.alloc(1000).unwrap();
        let idle = client.alloc(1000).unwrap();
        scope.spawn(move || {
            let _ = near.read(&mut [0; 4096]);
            drop((near, far));
        });
        let error = client.get_with(Get::new(b"k", buffer.all())).unwrap_err();
        assert!(is(&error, |error| matches!(error, LocalError::Lost { .. })), "{error}");
        assert!(matches!(buffer.read(0, &mut [0]), Err(StoreError::Held)));
        assert!(idle.read(0, &mut [0]).is_ok(), "other buffers are not held");
    });
}

#[test]
fn buffers_that_a_lost_node_may_still_store_cannot_be_written_any_more() {
    let store = Store::new();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("relay");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        let relay = scope.spawn(|| relay_hello(&listener, store.server.path()));
        let mut client = LocalClient::connect(LocalConfig::new(&path)).unwrap();
        let (mut near, far) = relay.join().unwrap();
        let buffer = client.alloc(1000).unwrap();
        let idle = client.alloc(1000).unwrap();
        let value = pattern(5, 1000);
        buffer.write(0, &value).unwrap();
        scope.spawn(move || {
            let _ = near.read(&mut [0; 4096]);
            drop((near, far));
        });
        let error = client.put(b"k", buffer.all(), &ONE).unwrap_err();
        assert!(is(&error, |error| matches!(error, LocalError::Lost { .. })), "{error}");
        assert!(matches!(buffer.write(0, b"other"), Err(StoreError::Held)));
        assert_eq!(buffer.to_vec().unwrap(), value, "it can be read");
        assert!(idle.write(0, b"other").is_ok(), "other buffers are not held");
    });
}

/// Whether an operation failed because of this error of the connection to the node.
fn is(error: &StoreError, what: impl FnOnce(&LocalError) -> bool) -> bool {
    matches!(error, StoreError::Local(error) if what(error))
}

/// Relays one hello to a real server, and its answer with the file descriptor back.
fn relay_hello(listener: &UnixListener, server: &Path) -> (UnixStream, UnixStream) {
    use std::os::fd::AsFd as _;
    let (mut near, _) = listener.accept().unwrap();
    let mut far = UnixStream::connect(server).unwrap();
    let mut bytes = [0; 4096];
    let len = near.read(&mut bytes).unwrap();
    far.write_all(&bytes[..len]).unwrap();
    let (len, fd) = te_host::recv_with_fd(far.as_fd(), &mut bytes).unwrap();
    te_host::send_with_fd(near.as_fd(), &bytes[..len], fd.unwrap().as_fd()).unwrap();
    (near, far)
}

#[test]
fn connections_of_hostile_peers_are_closed_and_other_clients_are_not_affected() {
    let store = Store::with(|config| config.workers = 1);
    let mut client = store.client();
    let value = pattern(4, 10_000);
    assert!(client.put(b"k", &value, &ONE).unwrap());

    let mut rpc = Vec::new();
    ReadStats::encode_request(&mut rpc, 1, &(), std::iter::empty()).unwrap();
    let local = |body: &[u8]| {
        let mut out = Vec::new();
        let mut frame =
            FrameWriter::begin(&mut out, &Header { kind: 90, response: false, request_id: 1, status: 0 });
        frame.body().extend_from_slice(body);
        frame.finish().unwrap();
        out
    };
    let mut too_long = local(&vec![0; 2 << 20]);
    too_long.truncate(1 << 21);
    let hello = local(HELLO);
    let twice = [hello.clone(), hello.clone()].concat();
    let cases: [(&str, Vec<u8>); 8] = [
        ("not of this protocol", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("a frame of the master's RPC", rpc),
        ("an unknown request", local(&[99])),
        ("a body that ends early", local(&[0, 1, 5])),
        ("a request before hello", local(&[3, 0])),
        ("a second hello", twice),
        ("a count that no frame could hold", local(&[3, 0xff, 0xff, 0xff, 0xff, 0x0f])),
        ("a frame that is too long", too_long),
    ];
    let broken = cases.len() as u64;
    for (what, bytes) in cases {
        let mut stream = store.raw();
        // The server may close the connection before everything is written.
        let _ = stream.write_all(&bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        if what != "a second hello" {
            assert_eq!(answer, b"", "{what}");
        }
        assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value), "{what}");
    }
    assert_eq!(store.server.stats().broken_total, broken);
    eventually("they are gone", || store.server.stats().clients == 1);
    // A client that closes its connection in the middle of a frame does not count as broken.
    let mut stream = store.raw();
    stream.write_all(&hello[..10]).unwrap();
    drop(stream);
    eventually("it is gone, too", || store.server.stats().clients == 1);
    assert_eq!(store.server.stats().broken_total, broken);
}

#[test]
fn a_range_outside_the_arena_is_refused_and_the_connection_survives() {
    let store = Store::new();
    let mut neighbour = store.client();
    let secret = neighbour.alloc(4096).unwrap();
    secret.write(0, &[7; 4096]).unwrap();
    let mut stream = store.raw();
    let send = |stream: &mut UnixStream, body: &[u8]| {
        let mut out = Vec::new();
        let mut frame =
            FrameWriter::begin(&mut out, &Header { kind: 90, response: false, request_id: 5, status: 0 });
        frame.body().extend_from_slice(body);
        frame.finish().unwrap();
        stream.write_all(&out).unwrap();
        let mut bytes = [0; 256];
        let len = stream.read(&mut bytes).unwrap();
        Frame::parse(&bytes[..len]).unwrap().unwrap().0.body.to_vec()
    };
    assert_eq!(send(&mut stream, HELLO), [0, 0x80, 0x20]);
    // Gets of all of `k` into offset, len: beyond the end, across the end, and with an overflow.
    let into: [&[u8]; 3] =
        [&[0x80, 0x20, 1], &[0xff, 0x1f, 2], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2]];
    let invalid = {
        let mut zigzag = Vec::new();
        let mut code = ((-600i32 << 1) ^ (-600i32 >> 31)) as u32;
        while code >= 0x80 {
            zigzag.push(code as u8 | 0x80);
            code >>= 7;
        }
        zigzag.push(code as u8);
        zigzag
    };
    for place in into {
        let request = [&[2, 1, 1, b'k'], place, &[0]].concat();
        let answer = send(&mut stream, &request);
        // The answer: `Got`, one item, failed, `InvalidParams`.
        assert_eq!(answer, [&[3, 1, 4][..], &invalid].concat());
    }
    assert_eq!(secret.to_vec().unwrap(), [7; 4096]);
}

#[test]
fn a_client_of_another_release_gets_the_version_that_the_node_does_not_speak() {
    let store = Store::new();
    let mut stream = store.raw();
    let mut out = Vec::new();
    let mut frame =
        FrameWriter::begin(&mut out, &Header { kind: 90, response: false, request_id: 5, status: 0 });
    // The hello of the first release.
    frame.body().extend_from_slice(b"\x00\x01\x07default\x80\x20");
    frame.finish().unwrap();
    stream.write_all(&out).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    // `Refused`, `Version`, 1; then the connection is closed.
    assert_eq!(Frame::parse(&answer).unwrap().unwrap().0.body, [1, 0, 1]);
    let refusal = Refusal::Version { theirs: 1 };
    assert!(refusal.to_string().contains("version 1 of the local protocol"), "{refusal}");
    assert_eq!(LocalError::Refused(refusal).code(), ErrorCode::InvalidVersion);
    assert_eq!(store.server.stats().broken_total, 0, "a refused client does not count as broken");
}

#[test]
fn frames_of_another_version_are_refused_with_both_versions_on_either_side() {
    let store = Store::new();
    let old = VERSION - 1;
    let mut hello = Vec::new();
    let mut frame =
        FrameWriter::begin(&mut hello, &Header { kind: 90, response: false, request_id: 5, status: 0 });
    frame.body().extend_from_slice(HELLO);
    frame.finish().unwrap();
    hello[4..6].copy_from_slice(&old.to_le_bytes());
    let mut stream = store.raw();
    stream.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    // A client of that release finds this release's version in the header, which has the same form in both.
    let frame = Frame::parse(&answer).unwrap().unwrap().0;
    assert_eq!((frame.header.request_id, frame.body), (5, &[1, 0, old as u8][..]));
    let stats = store.server.stats();
    assert_eq!((stats.refused_total, stats.broken_total), (1, 0));

    // A node of that release, which answers, and one that closes the connection.
    let path = store.dir.path().join("old");
    let listener = UnixListener::bind(&path).unwrap();
    answer[4..6].copy_from_slice(&old.to_le_bytes());
    std::thread::spawn(move || {
        for answer in [&answer[..], &[]] {
            let (mut stream, _) = listener.accept().unwrap();
            assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
            stream.write_all(answer).unwrap();
        }
    });
    let error = LocalClient::connect(LocalConfig::new(&path)).unwrap_err();
    assert!(matches!(error, LocalError::Wire(WireError::Version { theirs, .. }) if theirs == old));
    let text = error.to_string();
    assert!(text.contains(&format!("version {old}, this side uses {VERSION}")), "{text}");
    assert_eq!(error.code(), ErrorCode::InvalidVersion);
    let error = LocalClient::connect(LocalConfig::new(&path)).unwrap_err();
    assert!(matches!(error, LocalError::Unanswered { .. }), "{error:?}");
    assert!(error.to_string().contains("run the same release"), "{error}");
}

#[test]
fn an_untrusted_user_is_told_what_the_user_of_the_program_can_do() {
    let refused = Refusal::User { uid: 7 }.to_string();
    assert!(refused.contains("run as the node's user"), "{refused}");
    assert!(refused.contains("embeds the server, add 7 to `LocalServerConfig::allowed_uids`"), "{refused}");
    let untrusted = LocalError::UntrustedUser { path: "/n.sock".into(), uid: 7 }.to_string();
    assert!(untrusted.contains("use a node that runs as this user"), "{untrusted}");
    assert!(untrusted.contains("embeds the client, add 7 to `LocalConfig::trusted_uids`"), "{untrusted}");
}

#[test]
fn limits_and_identities_are_refused_by_name() {
    let store = Store::with(|config| {
        config.clients_max = 2;
        config.arenas_bytes_max = 3 * MIB;
        config.client.identity.tenant = "default".into();
    });
    let red = |arena_bytes| with(store.config(), |config| config.arena_bytes = arena_bytes);
    let refused = |config| match LocalClient::connect(config) {
        Err(LocalError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(with(store.config(), |config| config.tenant = "blue".into())), Refusal::Tenant);
    eventually("it is gone", || store.server.stats().clients == 0);
    let first = LocalClient::connect(red(2 * MIB)).unwrap();
    assert_eq!(refused(red(2 * MIB)), Refusal::Memory { bytes_left: MIB });
    eventually("it is gone", || store.server.stats().clients == 1);
    let second = LocalClient::connect(red(MIB)).unwrap();
    // The reason is delivered whether the hello arrives before or after the node closes the connection.
    for _ in 0..200 {
        assert_eq!(refused(red(1)), Refusal::Clients { clients_max: 2 });
    }
    drop((first, second));
    eventually("all memory is free again", || store.server.stats().arenas_bytes == 0);
    LocalClient::connect(red(3 * MIB)).unwrap();
    assert!(store.server.stats().refused_total >= 3);
}

#[test]
fn a_client_without_a_hello_or_that_reads_nothing_does_not_affect_others() {
    let store = Store::with(|config| {
        config.workers = 1;
        // Long enough for clients that send a hello, however busy the machine is.
        config.hello_ms_max = 1_000;
    });
    let mut client = store.client();
    let mut silent = store.raw();
    assert_eq!(silent.read(&mut [0]).unwrap(), 0, "its connection is closed");

    // A client that sends requests and never reads an answer.
    let mut write_blocked = store.raw();
    let mut out = Vec::new();
    let ask = |out: &mut Vec<u8>, body: &[u8]| {
        let mut frame =
            FrameWriter::begin(out, &Header { kind: 90, response: false, request_id: 5, status: 0 });
        frame.body().extend_from_slice(body);
        frame.finish().unwrap();
    };
    ask(&mut out, HELLO);
    write_blocked.write_all(&out).unwrap();
    out.clear();
    for _ in 0..1000 {
        ask(&mut out, &[5, 0]);
    }
    write_blocked.set_nonblocking(true).unwrap();
    // Until both sockets are full.
    let mut full = 0;
    while full < 50 {
        match write_blocked.write(&out) {
            Ok(_) => full = 0,
            Err(_) => full += 1,
        }
        client.exists(b"k").unwrap();
    }
    for _ in 0..100 {
        assert!(!client.exists(b"k").unwrap());
    }
    // When it reads after all, it gets every answer.
    write_blocked.set_nonblocking(false).unwrap();
    write_blocked.set_read_timeout(Some(std::time::Duration::from_secs(5))).unwrap();
    let mut bytes = [0; 1 << 16];
    assert!(write_blocked.read(&mut bytes).unwrap() > 0);
    drop(write_blocked);
    eventually("it is gone", || store.server.stats().clients == 1);
}

#[test]
fn the_socket_is_for_this_user_alone_and_is_removed_with_its_server() {
    let store = Store::new();
    let path = store.server.path().to_owned();
    let meta = std::fs::symlink_metadata(&path).unwrap();
    assert_eq!(meta.permissions().mode() & 0o777, 0o600);
    assert_eq!(meta.uid(), te_host::own_uid());
    let config = || LocalServerConfig::new(&path, ClientConfig::new(store.master.rpc_addr().into()));
    assert!(matches!(LocalServer::start(config()), Err(LocalStartError::InUse { .. })));
    assert_eq!(store.client().get(b"nothing").unwrap(), None, "the first server still serves");
    // A file that is not a socket is never removed.
    let file = store.dir.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let taken = LocalServer::start(with(config(), |config| config.path = file.clone()));
    assert!(matches!(taken, Err(LocalStartError::Bind { .. })), "{taken:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    for config in [
        with(config(), |config| config.workers = 0),
        with(config(), |config| config.clients_max = 0),
        with(config(), |config| config.mode = 0o444),
        with(config(), |config| config.mode = 0o4600),
        with(config(), |config| config.arena_bytes_max = 0),
    ] {
        assert!(matches!(LocalServer::start(config), Err(LocalStartError::Config { .. })));
    }
    let Store { server, .. } = store;
    server.stop();
    assert!(!path.exists());
}

#[test]
fn without_a_master_a_client_gets_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut client = ClientConfig::new("127.0.0.1:1".parse().unwrap());
    client.rpc.reconnect_ms_max = 10;
    let server = LocalServer::start(LocalServerConfig::new(dir.path().join("s"), client)).unwrap();
    let refused = LocalClient::connect(LocalConfig::new(server.path()));
    assert!(matches!(refused, Err(LocalError::Refused(Refusal::Store(ErrorCode::RpcFail)))), "{refused:?}");
}

/// Lengths on both sides of every rounding: of a grain, a page, a checksum chunk, and the largest that the
/// test's node holds.
fn lengths() -> impl Iterator<Item = usize> {
    (1..=200).chain([4_096, 4_097, 65_536, 65_537, 1_048_577, 20_000_001])
}

#[test]
fn a_value_of_any_length_passes_through_an_arena_of_its_own_length() {
    let store = Store::new();
    for len in lengths() {
        let value = pattern(len as u64, len);
        let connect = |arena_bytes| {
            LocalClient::connect(with(store.config(), |config| config.arena_bytes = arena_bytes)).unwrap()
        };
        let key = format!("k{len}");
        let mut exact = connect(len as u64);
        assert!(exact.arena_bytes() >= len as u64, "{len}");
        assert!(exact.put(key.as_bytes(), &value, &ONE).unwrap(), "{len}");
        assert_eq!(exact.get(key.as_bytes()).unwrap().as_ref(), Some(&value), "{len}");
        drop(exact);
        assert_eq!(connect(len as u64).get(key.as_bytes()).unwrap(), Some(value), "{len}");
        client(store.master.rpc_addr()).remove(key.as_bytes(), RemoveMode::Force).unwrap();
    }
}

#[test]
fn an_arena_is_replaced_for_a_longer_value_unless_a_buffer_is_held() {
    // The server may not have noticed that the old connection is closed when the new one comes.
    let store = Store::with(|config| {
        config.clients_max = 1;
        config.arena_bytes_max = 20 * MIB + 7;
    });
    let mut local = LocalClient::connect(with(store.config(), |config| config.arena_bytes = 4_096)).unwrap();
    for len in [4_097, 70_000, 1_048_577, 5_000_001] {
        let (key, value) = (format!("k{len}"), pattern(len as u64, len));
        assert!(local.put(key.as_bytes(), &value, &ONE).unwrap(), "{len}");
        assert_eq!(get_batch(&mut local, &[key.as_bytes()]), [Ok(Some(value))], "{len}");
    }
    drop(local);
    // A client that did not write the value has to find out its length.
    let mut reader = None;
    eventually("the other client has gone", || {
        reader = LocalClient::connect(with(store.config(), |config| config.arena_bytes = 4_096)).ok();
        reader.is_some()
    });
    let mut reader = reader.unwrap();
    let held = reader.alloc(64).unwrap();
    held.write(0, b"kept").unwrap();
    let full = reader.get(b"k5000001").unwrap_err();
    assert!(matches!(full, StoreError::ArenaFull { wanted: 5_000_001, .. }), "{full}");
    assert!(reader.put(b"held", held.part(0, 4), &ONE).unwrap(), "its arena is unchanged");
    drop(held);
    assert_eq!(reader.get(b"k5000001").unwrap(), Some(pattern(5_000_001, 5_000_001)));
    // The node gives no more than its limit, and reports how much that is.
    let refused = reader.put(b"longer", &pattern(1, 20 * MIB as usize + 7), &ONE).unwrap_err();
    assert!(
        matches!(refused, StoreError::ArenaFull { arena_bytes, .. } if arena_bytes == 20 * MIB),
        "{refused}"
    );
    assert!(reader.exists(b"held").unwrap());
}

#[test]
fn a_short_value_is_read_through_the_little_room_that_is_left() {
    let store = Store::new();
    let mut local = LocalClient::connect(with(store.config(), |config| config.arena_bytes = MIB)).unwrap();
    assert!(local.put(b"k", b"short", &ONE).unwrap());
    let _held = local.alloc(MIB - 64).unwrap();
    assert_eq!(local.get(b"k").unwrap().as_deref(), Some(b"short".as_slice()));
    assert_eq!(
        get_batch(&mut local, &[b"k", b"k"]),
        [Ok(Some(b"short".to_vec())), Ok(Some(b"short".to_vec()))]
    );
}

#[test]
fn metrics_of_the_servers_own_clients_can_be_exported() {
    let store = Store::new();
    assert_eq!(store.server.client_metrics().len(), 0);
    let mut local = store.client();
    assert!(local.put(b"k", b"value", &ONE).unwrap());
    assert!(local.get(b"k").unwrap().is_some());
    assert!(local.get(b"other").unwrap().is_none());
    let metrics = store.server.client_metrics();
    let counters = metrics[0].counters();
    assert_eq!((counters.puts, counters.hits, counters.misses), (1, 1, 1));
    let text = store_client::metrics_text_of(&metrics);
    assert!(text.contains("snowskin_client_puts_total 1\n"), "{text}");
}

mod timing {
    //! Real time: processes are killed at different points of their work.

    use super::*;

    #[test]
    fn clients_killed_at_any_point_leave_nothing_behind() {
        let store = Store::new();
        let mut witness = store.client();
        let value = pattern(9, 300_000);
        assert!(witness.put(b"witness", &value, &ONE).unwrap());
        let path = store.server.path().to_str().unwrap().to_owned();
        for round in 0..12u64 {
            let mut doomed = Process::start("entry", &["busy-client", &path, &round.to_string()]);
            // At another point of its loop each time.
            std::thread::sleep(std::time::Duration::from_micros(500 + round * 1_700));
            doomed.kill();
            assert_eq!(witness.get(b"witness").unwrap().as_ref(), Some(&value));
        }
        eventually("only the witness is left", || store.server.stats().clients == 1);
        let arena_bytes = witness.arena_bytes();
        eventually("only its arena is left", || store.server.stats().arenas_bytes == arena_bytes);
        assert_eq!(store.server.stats().broken_total, 0);
    }
}

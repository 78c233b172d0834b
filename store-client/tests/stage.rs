//! Objects on the disk of a node: the node's stage service, and the gets that read from it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod staging;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{MIB, codes, eventually, get_batch, get_range, master_with, pattern, with};
use staging::{DISK, Host, MEMORY, Readers};
use store_client::local::{LocalConfig, LocalServerConfig};
use store_client::stage::{StageConfig, StageError, StageServer};
use store_client::{
    AsyncClient, BufferRange, Client, ErrorCode, Fabrics, Fragment, Get, Identity, LocalClient, LocalServer,
    Node, NodeConfig, RpcConfig, RpcConnection, RpcError, SegmentNo, Store as _,
};
use store_core::message::{
    AdoptObjects, Adoption, DiskProof, DiskReady, FoundObject, Hello, Kind, Mount, MountDisk, MountDisks,
    MountSegment, NodeProof, Operation as _, ReleaseStaged, Segments, Stage, StageItem, StageRequest, Staged,
    Staging,
};
use store_core::{DEFAULT_TENANT, Frame, FrameBuffer, Incarnation, Key, MasterConfig, NodeId, TenantTag};
use te_core::Secret;

const BOTH: [Fabrics; 2] = [Fabrics::TCP, Fabrics::SHM];
const BUSY: ErrorCode = ErrorCode::UnavailableInCurrentStatus;

#[test]
fn one_batch_reads_from_disk_and_memory() {
    for fabrics in BOTH {
        let mut host = Host::new(fabrics);
        let master = Readers::new(&host);
        let mut client = master.client(fabrics);
        // Objects of one checksum chunk have no trailer. Some are longer than a request's bytes.
        let lens = [1, 4_095, 65_536, 65_537, 300_000, 2 << 20, 20 << 20];
        let mut keys = Vec::new();
        for (index, len) in lens.into_iter().enumerate() {
            for place in ["disk", "memory"] {
                let value = pattern(index as u64 + place.len() as u64, len);
                let replica = match place {
                    "disk" => host.on_disk(4096 * index as u64, &value),
                    _ => host.in_memory(&value),
                };
                let key = format!("{place}-{index}").into_bytes();
                master.put(&key, &value, &[replica]);
                keys.push((key, value));
            }
        }
        let names: Vec<&[u8]> =
            keys.iter().map(|(key, _)| key.as_slice()).chain([b"none".as_slice()]).collect();
        let found = get_batch(&mut client, &names);
        for ((key, value), found) in keys.iter().zip(&found) {
            let name = String::from_utf8_lossy(key);
            assert!(found.as_ref().unwrap().as_ref() == Some(value), "{fabrics} {name}");
        }
        assert_eq!(found.last(), Some(&Ok(None)));
        let counters = client.counters();
        assert_eq!((counters.hits, counters.disk_hits), (14, 7));
        assert_eq!((counters.misses, counters.disk_misses, counters.replica_failovers), (1, 0, 0));
        eventually("all staging memory is released", || host.server.counters().memory_used_bytes == 0);
        let counted = host.server.counters();
        assert_eq!((counted.staged_total, counted.busy_total, counted.expired_total), (7, 0, 0));
        assert_eq!(master.asked(Kind::Segments), 2, "a disk is looked up once");
    }
}

#[test]
fn every_kind_of_get_reads_from_a_disk() {
    for fabrics in BOTH {
        let host = Host::new(fabrics);
        let master = Readers::new(&host);
        let mut client = master.client(fabrics);
        let value = pattern(3, 300_000);
        master.put(b"k", &value, &[host.on_disk(8192, &value)]);
        let memory = client.alloc(400_000).unwrap();
        let read = |from: u64, len: u64| {
            let mut bytes = vec![0; len as usize];
            memory.read(from, &mut bytes).unwrap();
            bytes
        };
        // The whole object, into registered memory, and into plain memory.
        assert_eq!(client.get_with(Get::new(b"k", BufferRange::all(&memory))).unwrap(), Some(300_000));
        assert_eq!(read(0, 300_000), value);
        assert_eq!(client.get(b"k").unwrap().unwrap(), value);
        let mut slice = vec![0; 300_000];
        assert_eq!(client.get_with(Get::new(b"k", slice.as_mut_slice())).unwrap(), Some(300_000));
        assert_eq!(slice, value);
        // Parts of it.
        assert_eq!(get_range(&mut client, b"k", 65_000..200_001).unwrap().unwrap(), value[65_000..200_001]);
        let fragments = [(10, 0, 100), (131_072, 200, 65_536), (299_999, 100_000, 1)]
            .map(|(offset, at, len)| Fragment { offset, into: BufferRange::part(&memory, at, len) });
        client.get_with(Get::new(b"k", fragments.as_slice())).unwrap().unwrap();
        assert_eq!(read(0, 100), value[10..110]);
        assert_eq!(read(200, 65_536), value[131_072..196_608]);
        assert_eq!(read(100_000, 1), value[299_999..]);
        // Started once, read twice.
        assert_eq!(client.start_gets(&[b"k"])[0].as_ref().unwrap(), &300_000);
        for _ in 0..2 {
            let mut bytes = Vec::new();
            let mut gets = [Get::new(b"k", &mut bytes).range(5..70_000)];
            assert_eq!(client.batch_get_started(&mut gets).done, 1);
            drop(gets);
            assert_eq!(bytes, value[5..70_000]);
        }
        assert_eq!(client.end_gets(&[b"k"]), [true]);
        assert_eq!(client.counters().disk_hits, 7);
        // The clients that use a client.
        let client = AsyncClient::start(client).unwrap();
        assert_eq!(client.blocking().get(b"k").unwrap().unwrap(), value);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let config = LocalServerConfig::new(&path, master.config(fabrics));
        let server = LocalServer::start(config).unwrap();
        let mut local = LocalClient::connect(LocalConfig::new(&path)).unwrap();
        assert_eq!(local.get(b"k").unwrap().unwrap(), value);
        server.stop();
    }
}

#[test]
fn wrong_bytes_are_a_miss_and_reported() {
    for fabrics in BOTH {
        let mut host = Host::new(fabrics);
        let master = Readers::new(&host);
        let mut client = master.client(fabrics);
        let value = pattern(3, 100_000);
        let disk = host.on_disk(0, &value);
        master.put(b"k", &value, &[disk]);
        host.source.damage(true);
        assert_eq!(client.get(b"k").unwrap(), None);
        assert_eq!(get_range(&mut client, b"k", 5..10).unwrap(), None);
        assert_eq!(master.bad(), [(b"k".to_vec(), DISK), (b"k".to_vec(), DISK)]);
        let counters = client.counters();
        assert_eq!((counters.checksum_mismatches, counters.misses, counters.hits), (2, 2, 0));
        host.source.damage(false);
        // The object of another key, with other bytes.
        let other = pattern(4, 100_000);
        master.put(b"other", &other, &[disk]);
        assert_eq!(client.get(b"other").unwrap(), None);
        assert_eq!(master.bad(), [(b"other".to_vec(), DISK)]);
        // With another replica, that one is read.
        let memory = host.in_memory(&other);
        host.memory.write(0, &[0; 10]).unwrap();
        master.put(b"both", &other, &[memory, host.on_disk(4096, &other)]);
        assert_eq!(client.get(b"both").unwrap().unwrap(), other);
        assert_eq!(master.bad(), [(b"both".to_vec(), MEMORY)]);
        assert_eq!(client.counters().disk_hits, 1);
        eventually("all staging memory is released", || host.server.counters().memory_used_bytes == 0);
    }
}

#[test]
fn memory_is_preferred_and_a_disk_is_read_when_no_memory_can_be() {
    let mut host = Host::new(Fabrics::SHM);
    let master = Readers::new(&host);
    let value = pattern(3, 100_000);
    let (disk, memory) = (host.on_disk(0, &value), host.in_memory(&value));
    let gone = store_core::message::Replica { segment: SegmentNo::new(99), addr: 0 };
    let mut client = master.client(Fabrics::SHM);
    // Reads of an object begin with another replica each time.
    for replicas in [[disk, memory], [memory, disk]] {
        master.put(b"k", &value, &replicas);
        for _ in 0..4 {
            assert_eq!(client.get(b"k").unwrap().unwrap(), value);
        }
    }
    assert_eq!((host.source.jobs(), client.counters().disk_hits), (0, 0));
    for replicas in [[disk, gone], [gone, disk]] {
        master.put(b"k", &value, &replicas);
        for _ in 0..4 {
            assert_eq!(client.get(b"k").unwrap().unwrap(), value);
        }
    }
    assert_eq!((host.source.jobs(), client.counters().disk_hits), (8, 8));
    // A disk that does not deliver, and then another one.
    let other = store_core::message::Replica { segment: DISK, addr: 4096 };
    master.put(b"k", &value, &[other, disk]);
    for _ in 0..4 {
        assert_eq!(client.get(b"k").unwrap().unwrap(), value);
    }
    assert_eq!(client.counters().disk_misses, 0, "they are hits in the end");
}

#[test]
fn a_slow_disk_costs_its_own_objects_and_its_buffers_are_used_again_afterwards() {
    for fabrics in BOTH {
        let config = with(StageConfig::default(), |config| config.memory_bytes = MIB);
        let mut host = Host::with(fabrics, config, Secret::default());
        let master = Readers::new(&host);
        let value = pattern(3, 500_000);
        master.put(b"disk", &value, &[host.on_disk(0, &value)]);
        let replica = host.in_memory(&value);
        master.put(b"memory", &value, &[replica]);
        let config = with(master.config(fabrics), |config| config.disk_deadline_ms = 300);
        let mut client = Client::connect(config).unwrap();
        assert_eq!(client.get(b"disk").unwrap().unwrap(), value);

        host.source.hold(true);
        let began = Instant::now();
        let found = get_batch(&mut client, &[b"disk", b"memory"]);
        // timing: compared with generous bounds below.
        let took = began.elapsed();
        assert_eq!(found, [Ok(None), Ok(Some(value.clone()))]);
        // It waits for the disk nearly to its deadline, and not much longer.
        assert!((Duration::from_millis(250)..Duration::from_secs(3)).contains(&took), "{took:?}");
        let counters = client.counters();
        assert_eq!((counters.misses, counters.disk_misses, counters.transfer_misses), (1, 1, 0));
        eventually("the buffer is in quarantine", || host.server.counters().quarantined_bytes >= 500_000);
        assert_eq!(client.get(b"disk").unwrap(), None);
        // Both halves of the memory are taken: what comes now is refused at once.
        let began = Instant::now();
        assert_eq!(client.get(b"disk").unwrap(), None);
        // timing: it does not wait to the deadline.
        let took = began.elapsed();
        assert!(took < Duration::from_millis(250), "{took:?}");
        eventually("it is counted", || host.server.counters().refused_total >= 1);
        assert_eq!(client.get(b"memory").unwrap().unwrap(), value);

        host.source.hold(false);
        eventually("the buffers are used again", || {
            let counted = host.server.counters();
            (counted.quarantined_bytes, counted.memory_used_bytes) == (0, 0)
        });
        assert_eq!(client.get(b"disk").unwrap().unwrap(), value);
        assert_eq!(client.counters().checksum_mismatches, 0);
        assert_eq!(master.bad(), []);
    }
}

#[test]
fn errors_of_a_disk_are_misses() {
    let host = Host::new(Fabrics::SHM);
    let master = Readers::new(&host);
    let value = pattern(3, 5_000);
    master.put(b"k", &value, &[host.on_disk(0, &value)]);
    master.put(b"moved", &value, &[store_core::message::Replica { segment: DISK, addr: 1 << 60 }]);
    let mut client = master.client(Fabrics::SHM);
    assert_eq!(client.get(b"moved").unwrap(), None);
    for error in [ErrorCode::TransferFail, BUSY, ErrorCode::InternalError] {
        host.source.fail(Some(error));
        assert_eq!(client.get(b"k").unwrap(), None);
    }
    host.source.fail(None);
    host.source.drop_jobs(true);
    assert_eq!(client.get(b"k").unwrap(), None);
    host.source.drop_jobs(false);
    assert_eq!(client.counters().disk_misses, 5);
    assert_eq!(client.get(b"k").unwrap().unwrap(), value);
    // A node that does not know the number: it is looked up anew after a while.
    host.source.fail(Some(ErrorCode::SegmentNotFound));
    let asked = master.asked(Kind::Segments);
    assert_eq!(client.get(b"k").unwrap(), None);
    host.source.fail(None);
    eventually("it is looked up again", || client.get(b"k").unwrap().as_ref() == Some(&value));
    assert_eq!(master.asked(Kind::Segments), asked + 1);
    // A client that reads from no disk.
    let config = with(master.config(Fabrics::SHM), |config| config.disk_deadline_ms = 0);
    let jobs = host.source.jobs();
    let mut client = Client::connect(config).unwrap();
    assert_eq!(client.get(b"k").unwrap(), None);
    assert_eq!((host.source.jobs(), client.counters().disk_misses), (jobs, 1));
}

#[test]
fn a_node_that_dies_in_the_middle_is_a_miss_at_once_and_found_again_elsewhere() {
    for fabrics in BOTH {
        let host = Host::new(fabrics);
        let master = Readers::new(&host);
        let value = pattern(3, 500_000);
        master.put(b"k", &value, &[host.on_disk(0, &value)]);
        let config = with(master.config(fabrics), |config| config.disk_deadline_ms = 60_000);
        let mut client = Client::connect(config).unwrap();
        assert_eq!(client.get(b"k").unwrap().unwrap(), value);
        host.source.hold(true);
        let Host { engine, server, source, .. } = host;
        let got = std::thread::scope(|scope| {
            let got = scope.spawn(|| client.get(b"k").unwrap());
            eventually("the object is being read", || source.jobs() == 2);
            server.stop();
            got.join().unwrap()
        });
        assert_eq!(got, None);
        drop((engine, source));
        assert_eq!(client.get(b"k").unwrap(), None);
        assert_eq!(client.counters().disk_misses, 2);

        let host = Host::new(fabrics);
        host.on_disk(0, &value);
        master.know(&host);
        eventually("it is found at its other address", || {
            // A number that is known is not looked up again until a fabric has failed.
            let fresh = master.client(fabrics).get(b"k").unwrap();
            fresh.as_ref() == Some(&value)
        });
    }
}

/// A connection to a stage service.
fn raw(server: &StageServer) -> RpcConnection {
    RpcConnection::connect(server.addr().into(), RpcConfig::default()).unwrap()
}

fn stage(
    rpc: &mut RpcConnection,
    deadline_ms: u32,
    items: &[(u32, u64, u64)],
) -> Vec<Result<Staged, ErrorCode>> {
    let items =
        items.iter().map(|&(disk, locator, len)| StageItem { disk: SegmentNo::new(disk), locator, len });
    let (window, answers) = rpc.call::<Stage>(&StageRequest { deadline_ms }, items).unwrap();
    assert_eq!(window.window_ms, 5_000 + deadline_ms);
    answers.collect()
}

#[test]
fn a_service_refuses_what_it_cannot_stage() {
    let config = with(StageConfig::default(), |config| {
        config.memory_bytes = MIB;
        config.queue_items_max = 8;
    });
    let host = Host::with(Fabrics::TCP, config, Secret::default());
    host.on_disk(4096, &[1; 5_000]);
    let mut rpc = raw(&host.server);
    let answers = stage(
        &mut rpc,
        1_000,
        &[
            (7, 4096, 5_000),
            (7, 4096, 4_999),
            (7, 1, 5_000),
            (8, 4096, 5_000),
            (7, 4096, 0),
            (7, 4096, u64::MAX),
            (7, u64::MAX, 1),
        ],
    );
    let first = answers[0].unwrap();
    assert!(first.addr.is_multiple_of(4096) && first.addr >= host.staging.addr());
    let not_found = Err(ErrorCode::ObjectNotFound);
    assert_eq!(
        answers[1..],
        [
            not_found,
            not_found,
            Err(ErrorCode::SegmentNotFound),
            Err(ErrorCode::InvalidParams),
            Err(ErrorCode::ObjectTooLarge),
            not_found
        ]
    );
    rpc.call::<ReleaseStaged>(&(), [first.ticket, first.ticket, 0, u64::MAX].into_iter()).unwrap();
    assert_eq!(stage(&mut rpc, 0, &[(7, 4096, 5_000)]), [Err(BUSY)]);
    assert_eq!(stage(&mut rpc, 1_000, &[]), []);
    // The queue, then the memory.
    let objects = vec![(7, 4096, 5_000); 9];
    let refused =
        |answers: &[Result<Staged, ErrorCode>]| answers.iter().filter(|answer| **answer == Err(BUSY)).count();
    host.source.hold(true);
    host.source.delay(Duration::ZERO);
    let answers = stage(&mut rpc, 50, &objects);
    assert_eq!(refused(&answers), 9, "eight are busy, the ninth was refused");
    assert_eq!(stage(&mut rpc, 50, &objects[..1]), [Err(BUSY)]);
    host.source.hold(false);
    eventually("the queue is empty", || host.server.counters().reading == 0);
    let mut tickets = Vec::new();
    loop {
        let answers = stage(&mut rpc, 1_000, &objects[..8]);
        let full = refused(&answers) > 0;
        tickets.extend(answers.into_iter().flatten().map(|staged| staged.ticket));
        if full {
            break;
        }
    }
    assert_eq!(tickets.len(), 128, "two blocks each of 256");
    eventually("they are counted", || {
        let counters = host.server.counters();
        (counters.tickets, counters.memory_used_bytes) == (128, counters.memory_bytes)
    });
    assert!(matches!(
        rpc.call::<Segments>(&(), [DISK].into_iter()).map(|_| ()),
        Err(RpcError::Refused(ErrorCode::NotSupported))
    ));
}

#[test]
fn the_memory_of_a_reader_that_goes_is_free_after_the_guard() {
    let config = with(StageConfig::default(), |config| config.guard_ms = 50);
    let host = Host::with(Fabrics::TCP, config, Secret::default());
    host.on_disk(0, &[1; 100]);
    let (mut reader, mut other) = (raw(&host.server), raw(&host.server));
    let objects = vec![(7, 0, 100); 500];
    let mut tickets = Vec::new();
    for _ in 0..8 {
        let answers = stage(&mut reader, 1_000, &objects);
        tickets.extend(answers.into_iter().map(|staged| staged.unwrap().ticket));
    }
    assert_eq!(tickets.len(), 4_000);
    other.call::<ReleaseStaged>(&(), tickets.iter().copied()).unwrap();
    eventually("they are not those of this connection", || {
        let counters = host.server.counters();
        (counters.tickets, counters.requests_total) == (4_000, 8)
    });
    reader.call::<ReleaseStaged>(&(), tickets[..1_000].iter().copied()).unwrap();
    eventually("they are released", || host.server.counters().tickets == 3_000);
    drop(reader);
    eventually("the others are over", || host.server.counters().memory_used_bytes == 0);
    assert_eq!(host.server.counters().expired_total, 3_000);
}

/// Sends bytes, and returns what comes until the service closes the connection.
fn say(server: &StageServer, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
    answer
}

#[test]
fn messages_of_no_reader_end_their_connection_and_no_other() {
    let host = Host::new(Fabrics::TCP);
    host.on_disk(0, &[1; 100]);
    let mut rpc = raw(&host.server);
    let mut hello = Vec::new();
    Hello::encode_request(&mut hello, 1, &Default::default(), std::iter::empty()).unwrap();
    let mut other_version = hello.clone();
    other_version[4] += 1;
    let answer = say(&host.server, &other_version);
    let (frame, _) = Frame::parse(&answer).unwrap().unwrap();
    assert_eq!((frame.header.status, frame.header.request_id), (ErrorCode::InvalidVersion.code(), 1));
    assert!(say(&host.server, b"GET / HTTP/1.1\r\n\r\n").is_empty());
    let mut long = hello.clone();
    long[20..24].copy_from_slice(&(3_u32 << 20).to_le_bytes());
    long.resize(2 << 20, 7);
    say(&host.server, &long);
    eventually("they are counted", || host.server.counters().broken_total >= 3);
    // A request that does not decode is refused, and the connection goes on. A cut one is nothing.
    let mut stream = TcpStream::connect(host.server.addr()).unwrap();
    let mut broken = hello.clone();
    Stage::encode_request(&mut broken, 2, &StageRequest { deadline_ms: 9 }, std::iter::empty()).unwrap();
    let end = broken.len() - 1;
    broken[end] = 200;
    broken.extend_from_slice(&hello[..10]);
    stream.write_all(&broken).unwrap();
    let mut input = FrameBuffer::new();
    let mut statuses = Vec::new();
    while statuses.len() < 2 {
        let len = stream.read(input.spare_mut(4096)).unwrap();
        assert!(len > 0);
        input.filled(len);
        while let Some(frame) = input.next_frame().unwrap() {
            statuses.push(frame.header.status);
        }
    }
    assert_eq!(statuses, [0, ErrorCode::InvalidParams.code()]);
    drop(stream);
    assert!(stage(&mut rpc, 1_000, &[(7, 0, 100)])[0].is_ok());
}

#[test]
fn without_the_cluster_secret_nothing_is_staged() {
    let secret = Secret::new(b"open sesame");
    let mut host = Host::with(Fabrics::SHM, StageConfig::default(), secret.clone());
    let value = pattern(3, 100_000);
    let master = Readers::new(&host);
    master.put(b"k", &value, &[host.on_disk(0, &value)]);
    let mut bare = raw(&host.server);
    let item = StageItem { disk: DISK, locator: 0, len: 100_000 };
    let refused = bare.call::<Stage>(&StageRequest { deadline_ms: 1_000 }, [item].into_iter()).map(|_| ());
    assert!(matches!(refused, Err(RpcError::Refused(ErrorCode::PermissionDenied))), "{refused:?}");
    let wrong = with(Identity::default(), |identity| identity.cluster = Secret::new(b"guess"));
    let connected = RpcConnection::connect_as(host.server.addr().into(), RpcConfig::default(), wrong);
    assert!(matches!(connected, Err(RpcError::Secret)));
    assert_eq!(host.source.jobs(), 0);
    let config = with(master.config(Fabrics::SHM), |config| config.identity.cluster = secret.clone());
    assert_eq!(Client::connect(config).unwrap().get(b"k").unwrap().unwrap(), value);
    // Without the secret the memory is out of reach as well.
    let replica = host.in_memory(&value);
    master.put(b"memory", &value, &[replica]);
    let mut client = master.client(Fabrics::SHM);
    assert_eq!(codes(["k", "memory"].map(|key| client.get(key.as_bytes()))), [Ok(None), Ok(None)]);
}

#[test]
fn a_service_that_cannot_be_reached_delays_no_read_from_memory() {
    let mut host = Host::new(Fabrics::SHM);
    let master = Readers::new(&host);
    let value = pattern(3, 100_000);
    master.put(b"disk", &value, &[host.on_disk(0, &value)]);
    let replica = host.in_memory(&value);
    master.put(b"memory", &value, &[replica]);
    // It accepts no connection: its queue is full, and it answers nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = listener.local_addr().unwrap();
    master.known.lock().unwrap().segments.get_mut(&DISK).unwrap().2 = silent.to_string();
    let config = with(master.config(Fabrics::SHM), |config| {
        config.disk_deadline_ms = 200;
        config.unreachable_ms = 60_000;
    });
    let mut client = Client::connect(config).unwrap();
    assert_eq!(get_batch(&mut client, &[b"disk", b"memory"]), [Ok(None), Ok(Some(value))]);
    assert_eq!(client.counters().disk_misses, 1);
    eventually("it is left alone", || {
        let began = Instant::now();
        assert_eq!(client.get(b"disk").unwrap(), None);
        // timing: a service that is left alone is not waited for.
        began.elapsed() < Duration::from_millis(100)
    });
}

#[test]
fn connections_are_limited_and_settings_checked() {
    let config = with(StageConfig::default(), |config| config.connections_max = 2);
    let host = Host::with(Fabrics::TCP, config, Secret::default());
    let (_a, b) = (raw(&host.server), raw(&host.server));
    let refused = RpcConnection::connect(host.server.addr().into(), RpcConfig::default());
    assert!(matches!(refused, Err(RpcError::Refused(ErrorCode::TooManyConnections) | RpcError::Lost { .. })));
    drop(b);
    eventually("there is room again", || {
        RpcConnection::connect(host.server.addr().into(), RpcConfig::default()).is_ok()
    });
    let source = || std::sync::Arc::clone(&host.source) as _;
    let taken = with(StageConfig::default(), |config| config.listen = host.server.addr());
    let error = StageServer::start(taken, host.staging.clone(), Secret::default(), source()).unwrap_err();
    assert!(matches!(error, StageError::Listen { .. }) && error.to_string().contains("port"), "{error}");
    let wrong = with(StageConfig::default(), |config| config.window_ms = 10);
    let error = StageServer::start(wrong, host.staging.clone(), Secret::default(), source()).unwrap_err();
    assert!(error.to_string().contains("`window_ms` must be 100 to 600000"), "{error}");
}

/// Mounts a part of a host's memory and its disk at a master; returns the disk's number and its proof.
fn mount(host: &Host, master: &mut RpcConnection) -> DiskProof {
    let (node, incarnation, key) = (NodeId::new(9), Incarnation::new(1), 5);
    let lineage = master.welcome().lineage;
    let endpoint = host.engine.name();
    let segment = MountSegment {
        node,
        incarnation,
        name: "host",
        endpoint,
        base: host.memory.addr(),
        len: 64 << 10,
        export: host.export(&host.memory),
        lineage,
        key,
        ..MountSegment::default()
    };
    master.call::<Mount>(&segment, std::iter::empty()).unwrap().0.mounted().unwrap();
    let staging = Staging {
        base: host.staging.addr(),
        len: host.staging.len() as u64,
        export: host.export(&host.staging),
        ..Staging::default()
    };
    let stage = host.server.addr().to_string();
    let disk = MountDisk {
        shared: "",
        node,
        incarnation,
        key,
        lineage,
        uuid: [7; 16],
        bytes: 1 << 30,
        extent_bytes: 64 << 20,
        endpoint,
        stage: &stage,
        staging,
    };
    let (_, mut mounted) = master.call::<MountDisks>(&(), [disk].into_iter()).unwrap();
    let disk = mounted.next().unwrap().unwrap().disk;
    DiskProof { node: NodeProof { node, key }, disk }
}

#[test]
fn what_a_master_adopts_from_a_disk_is_read_and_promoted() {
    for fabrics in BOTH {
        let config = with(MasterConfig::default(), |config| config.node_ttl_ms = 600_000);
        let master = master_with(config);
        let host = Host::new(fabrics);
        let mut rpc = RpcConnection::connect(master.rpc_addr().into(), RpcConfig::default()).unwrap();
        let proof = mount(&host, &mut rpc);
        let values: Vec<_> = (0..6).map(|index| pattern(index, 100_000 + index as usize)).collect();
        let keys: Vec<_> = (0..6).map(|index| format!("k{index}")).collect();
        let found = (0..6_usize).map(|index| {
            let (value, locator) = (&values[index], (1 << 20) | (index as u64 * 4096));
            host.source.insert(proof.disk, locator, value);
            FoundObject {
                tenant: TenantTag::of(DEFAULT_TENANT),
                key: Key(keys[index].as_bytes()),
                generation: 40 + index as u64,
                len: value.len() as u64,
                crc32c: te_host::crc32c_of(0, value),
                locator,
            }
        });
        let (_, adopted) = rpc.call::<AdoptObjects>(&proof, found).unwrap();
        assert!(adopted.into_iter().all(|adoption| adoption == Adoption::Adopted));
        rpc.call::<DiskReady>(&proof, std::iter::empty()).unwrap();

        let mut client = common::client_over(master.rpc_addr(), fabrics);
        assert_eq!(client.get(b"k0").unwrap().as_ref(), Some(&values[0]));
        let names: Vec<&[u8]> = keys.iter().map(|key| key.as_bytes()).collect();
        let read: Vec<_> =
            get_batch(&mut client, &names).into_iter().map(|read| read.unwrap().unwrap()).collect();
        assert!(read == values);
        let counters = client.counters();
        assert_eq!((counters.hits, counters.disk_hits, counters.disk_misses), (7, 7, 0));

        // A node copies them to its memory, from where they are read then.
        let node = NodeConfig::new("a", master.rpc_addr().into(), 32 * MIB).fabrics(fabrics);
        let node = Node::start(with(node, |node| node.heartbeat_ms = 20)).unwrap();
        eventually("all are read from memory", || {
            let before = client.counters().disk_hits;
            let read = get_batch(&mut client, &names);
            assert!(
                read.iter().zip(&values).all(|(read, value)| read.as_ref().unwrap().as_ref() == Some(value))
            );
            client.counters().disk_hits == before
        });
        assert!(node.status().copies >= 6);
        assert_eq!(client.counters().checksum_mismatches, 0);
        eventually("all staging memory is released", || host.server.counters().memory_used_bytes == 0);
        node.stop();
        master.stop().unwrap();
    }
}

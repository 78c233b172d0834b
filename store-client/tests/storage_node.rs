//! Nodes whose segment is a range of a namespace of NVMe over TCP: they mount it, and copy replicas to it and
//! from it. The target is our own, in a thread; it has reservations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::storage::{GRANULE, LEN, Target, UNTOUCHED, nvmeof};
use common::{MIB, client_over, eventually, master, master_at, master_with, own_host, pattern, with};
use store_client::{
    Client, DiskList, Fabrics, Nguid, Node, NodeConfig, NodeDiskConfig, Placement, PutOptions, PutRange,
    RpcConfig, RpcConnection, SegmentNo, Store as _, TaskId, TaskState,
};
use store_core::MasterConfig;
use store_core::chunks::stored_len;
use store_core::message::Segments;
use te_core::Access;

/// Bytes of the namespace.
const DISK: u64 = LEN;
/// Where the range of a node begins in the namespace, and its length.
const AT: u64 = MIB;
const RANGE: u64 = 8 * MIB;
/// What is everywhere in the namespace at first.
const BEFORE: u8 = UNTOUCHED;

fn config(name: &str, master: SocketAddr) -> NodeConfig {
    with(NodeConfig::new(name, master.into(), 32 * MIB).fabrics(nvmeof()), |it| it.heartbeat_ms = 20)
}

fn storage_config(name: &str, master: SocketAddr, target: &Target, offset: u64) -> NodeConfig {
    with(config(name, master), |it| {
        it.storage.namespace = Some(target.place(offset));
        it.storage.bytes = RANGE;
        it.storage.nguid = Some(Nguid(target.namespace.nguid));
    })
}

fn on(segment: SegmentNo) -> PutOptions {
    PutOptions { placement: Placement::on(segment), ..PutOptions::DEFAULT }
}

fn segment_of(node: &Node) -> SegmentNo {
    node.status().segment.unwrap()
}

fn state(client: &mut Client, id: TaskId) -> TaskState {
    client.master().task(id).unwrap().state
}

fn done(client: &mut Client, id: TaskId) {
    eventually("the task is done", || {
        let task = client.master().task(id).unwrap();
        assert!(!matches!(task.state, TaskState::Failed | TaskState::Canceled), "{task:?}");
        task.state == TaskState::Done
    });
}

/// Base, length, granule and location of a segment, as the master lists it.
fn listed(master: SocketAddr, segment: SegmentNo) -> (u64, u64, u32, String) {
    let mut rpc = RpcConnection::connect(master.into(), RpcConfig::default()).unwrap();
    let (_, mut infos) = rpc.call::<Segments>(&(), std::iter::once(segment)).unwrap();
    let info = infos.next().unwrap().unwrap();
    (info.base, info.len, info.location.granule_bytes(), info.location.to_string())
}

/// Checks every byte of the replica on a segment that is the range at `range`, and what follows in its last
/// granule. Returns where it begins in the namespace.
fn check_raw(
    (client, master): (&mut Client, SocketAddr),
    (target, range): (&Target, u64),
    key: &[u8],
    segment: SegmentNo,
    value: &[u8],
) -> u64 {
    let replicas = client.master().replicas(key).unwrap();
    let replica = replicas.iter().find(|replica| replica.segment == segment).unwrap();
    let offset = replica.addr - listed(master, segment).0;
    assert!(offset.is_multiple_of(GRANULE), "{offset}");
    let at = range + GRANULE + offset;
    let stored = stored_len(value.len() as u64);
    assert!(target.bytes(at, value.len() as u64) == value, "{} bytes", value.len());
    let whole = stored.next_multiple_of(GRANULE);
    assert!(target.bytes(at + stored, whole - stored).iter().all(|byte| *byte == 0), "{stored} of {whole}");
    at
}

#[test]
fn storage_is_mounted_and_listed_with_its_capacity() {
    let (master, target) = (master(), Target::serve());
    let addr = master.rpc_addr();
    let node = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    assert!(node.region().is_none(), "it has no memory in the store");
    let (_, len, granule, location) = listed(addr, segment_of(&node));
    assert_eq!((len, granule, &*location), (RANGE - GRANULE, 4_096, "storage"));
    assert!(node.metrics_text().contains(&format!("capacity_bytes {}", RANGE - GRANULE)));
    // The mark is in the first granule, and nothing else of the namespace has changed.
    assert!(target.epoch(AT) > 0);
    assert!(target.bytes(0, AT).iter().all(|byte| *byte == BEFORE));
    assert!(target.bytes(AT + GRANULE, DISK - AT - GRANULE).iter().all(|byte| *byte == BEFORE));
    node.stop();
    assert_eq!(client_over(addr, Fabrics::TCP).master().segments().unwrap(), []);
}

#[test]
fn replicas_are_copied_to_storage_in_whole_granules_and_back() {
    let (master, target) = (master(), Target::serve());
    let addr = master.rpc_addr();
    let memory = Node::start(config("memory", addr)).unwrap();
    let disk = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    let other = Node::start(storage_config("other", addr, &target, AT + RANGE - 4 * MIB)).err();
    assert!(other.is_some(), "another engine finds the namespace reserved");
    let (a, b) = (segment_of(&memory), segment_of(&disk));
    let mut client = client_over(addr, Fabrics::TCP);
    // Around the granule, and chunks with a trailer.
    for len in [1, 4_095, 4_096, 4_097, 300_000, 1_000_001] {
        let (key, value) = (format!("k{len}").into_bytes(), pattern(len as u64, len));
        assert!(client.put(&key, &value, &on(a)).unwrap());
        let id = client.master().copy(&key, &[b]).unwrap().remove(0).unwrap();
        done(&mut client, id);
        check_raw((&mut client, addr), (&target, AT), &key, b, &value);
    }
    assert_eq!((disk.status().copies, disk.status().copy_failures), (6, 0));
    // Back: the bytes come from the target, for the replica in memory is gone.
    for len in [4_097, 1_000_001] {
        let (key, value) = (format!("k{len}").into_bytes(), pattern(len as u64, len));
        eventually("it is not leased", || {
            client.master().batch_clear_replicas(&[&key], Some(a)).unwrap() == [Ok(())]
        });
        let id = client.master().move_(&key, b, Some(a)).unwrap();
        done(&mut client, id);
        let segments: Vec<_> = client.master().replicas(&key).unwrap().iter().map(|it| it.segment).collect();
        assert_eq!(segments, [a]);
        assert!(client.get(&key).unwrap().as_ref() == Some(&value), "{len}");
    }
    assert_eq!(memory.status().copies, 2);
    assert_eq!(client.counters().checksum_mismatches, 0);
}

#[test]
fn a_node_that_leaves_moves_its_objects_to_storage_and_storage_moves_them_back() {
    let (master, target) =
        (master_with(MasterConfig { lease_ttl_ms: 500, ..MasterConfig::default() }), Target::serve());
    let addr = master.rpc_addr();
    let memory = Node::start(config("memory", addr)).unwrap();
    let mut client = client_over(addr, Fabrics::TCP);
    let objects: Vec<_> =
        (0..24_u64).map(|i| (format!("k{i}").into_bytes(), pattern(i, 1_000 + 9_973 * i as usize))).collect();
    for (key, value) in &objects {
        assert!(client.put(key, value, &on(segment_of(&memory))).unwrap());
    }
    let disk = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    let info = memory.stop_drained(Duration::from_secs(30)).unwrap();
    assert_eq!((info.blocks, info.moved_total), (0, 24), "{info:?}");
    for (key, value) in &objects {
        check_raw((&mut client, addr), (&target, AT), key, segment_of(&disk), value);
    }
    let memory = Node::start(config("memory", addr)).unwrap();
    let info = disk.stop_drained(Duration::from_secs(30)).unwrap();
    assert_eq!((info.blocks, info.moved_total), (0, 24), "{info:?}");
    for (key, value) in &objects {
        assert!(client.get(key).unwrap().as_ref() == Some(value));
    }
    assert_eq!((memory.status().copies, memory.status().copy_failures), (24, 0));
}

#[test]
fn what_follows_an_object_in_its_last_granule_is_not_copied() {
    // One target for each: a namespace has one host that reserves it.
    let (master, targets) = (master(), [Target::serve(), Target::serve()]);
    let addr = master.rpc_addr();
    let memory = Node::start(config("memory", addr)).unwrap();
    let disks = ["one", "two"];
    let disks =
        [0, 1].map(|at: usize| Node::start(storage_config(disks[at], addr, &targets[at], AT)).unwrap());
    let [a, b, c] = [&memory, &disks[0], &disks[1]].map(segment_of);
    let mut client = client_over(addr, Fabrics::TCP);
    let value = pattern(5, 70_001);
    assert!(client.put(b"k", &value, &on(a)).unwrap());
    let id = client.master().copy(b"k", &[b]).unwrap().remove(0).unwrap();
    done(&mut client, id);
    let at = check_raw((&mut client, addr), (&targets[0], AT), b"k", b, &value);
    eventually("it is not leased", || {
        client.master().batch_clear_replicas(&[b"k"], Some(a)).unwrap() == [Ok(())]
    });
    // As if an object had been there before.
    let stored = stored_len(value.len() as u64);
    targets[0].memory.0.set(at + stored, &vec![0xAB; (stored.next_multiple_of(GRANULE) - stored) as usize]);
    let id = client.master().copy(b"k", &[c]).unwrap().remove(0).unwrap();
    done(&mut client, id);
    check_raw((&mut client, addr), (&targets[1], AT), b"k", c, &value);
}

#[test]
fn a_copy_ends_when_the_target_has_it_and_fails_when_it_does_not_come_there() {
    let (master, target) = (master(), Target::serve());
    let addr = master.rpc_addr();
    let memory = Node::start(config("memory", addr)).unwrap();
    let disk = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    let (a, b) = (segment_of(&memory), segment_of(&disk));
    let mut client = client_over(addr, Fabrics::TCP);
    let value = pattern(1, 300_000);
    for key in [b"late".as_slice(), b"never"] {
        assert!(client.put(key, &value, &on(a)).unwrap());
    }
    // The first copy opens the node's own segment, which takes the target as well.
    target.pause(true);
    let id = client.master().copy(b"late", &[b]).unwrap().remove(0).unwrap();
    eventually("the node has the order", || state(&mut client, id) != TaskState::Pending);
    // timing: long enough for a copy that does not wait for its write.
    std::thread::sleep(Duration::from_millis(300));
    assert!(!matches!(state(&mut client, id), TaskState::Done | TaskState::Failed));
    assert_eq!(
        client
            .master()
            .replicas(b"late")
            .unwrap()
            .iter()
            .filter(|it| it.segment == b && it.state == store_client::ReplicaState::Complete)
            .count(),
        0
    );
    target.pause(false);
    done(&mut client, id);
    check_raw((&mut client, addr), (&target, AT), b"late", b, &value);
    // A target that is gone.
    drop(target);
    let id = client.master().copy(b"never", &[b]).unwrap().remove(0).unwrap();
    eventually("the task has failed", || state(&mut client, id) == TaskState::Failed);
    eventually("it is counted", || disk.status().copy_failures > 0);
    assert_eq!(client.get(b"never").unwrap(), Some(value));
}

#[test]
fn a_copy_in_doubt_keeps_its_place_from_other_objects() {
    let config_of_master = MasterConfig { lease_ttl_ms: 1_000, ..MasterConfig::default() };
    let (master, target) = (master_with(config_of_master), Target::serve());
    let addr = master.rpc_addr();
    let memory = Node::start(config("memory", addr)).unwrap();
    let impatient = with(storage_config("disk", addr, &target, AT), |it| {
        it.engine.nvmeof.peer_silence_ms_max = 200;
    });
    let disk = Node::start(impatient).unwrap();
    let (a, b) = (segment_of(&memory), segment_of(&disk));
    let mut client = client_over(addr, Fabrics::TCP);
    let value = pattern(1, 2_000_000);
    for key in [b"open".as_slice(), b"doubt", b"after"] {
        assert!(client.put(key, &value, &on(a)).unwrap());
    }
    // The node's own segment is open from now on.
    let id = client.master().copy(b"open", &[b]).unwrap().remove(0).unwrap();
    done(&mut client, id);
    let used = |client: &mut Client| {
        client.master().segments().unwrap().iter().find(|entry| entry.segment == b).unwrap().used
    };
    let one = used(&mut client);
    target.pause(true);
    let id = client.master().copy(b"doubt", &[b]).unwrap().remove(0).unwrap();
    eventually("the task has failed", || state(&mut client, id) == TaskState::Failed);
    assert_eq!(used(&mut client), 2 * one, "no other object gets the place");
    target.pause(false);
    let id = client.master().copy(b"after", &[b]).unwrap().remove(0).unwrap();
    done(&mut client, id);
    check_raw((&mut client, addr), (&target, AT), b"after", b, &value);
}

#[test]
fn storage_that_is_mounted_anew_has_another_epoch_and_takes_replicas_again() {
    let addr = std::net::TcpListener::bind(own_host(47)).unwrap().local_addr().unwrap();
    let target = Target::serve();
    let mut master = Some(master_at(addr, MasterConfig { epoch: 1, ..MasterConfig::default() }));
    let memory = Node::start(config("memory", addr)).unwrap();
    let disk = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    for epoch in 2..4 {
        let mut client = client_over(addr, Fabrics::TCP);
        let value = pattern(epoch.into(), 100_000);
        assert!(client.put(b"k", &value, &on(segment_of(&memory))).unwrap());
        let id = client.master().copy(b"k", &[segment_of(&disk)]).unwrap().remove(0).unwrap();
        done(&mut client, id);
        check_raw((&mut client, addr), (&target, AT), b"k", segment_of(&disk), &value);
        let (mounts, before) = ([&memory, &disk].map(|node| node.status().mounts), target.epoch(AT));
        master.take().unwrap().stop().unwrap();
        master = Some(master_at(addr, MasterConfig { epoch, ..MasterConfig::default() }));
        eventually("they are mounted anew", || {
            memory.status().mounts > mounts[0] && disk.status().mounts > mounts[1]
        });
        assert!(target.epoch(AT) > before);
        assert_eq!(listed(addr, segment_of(&disk)).1, RANGE - GRANULE);
    }
}

#[test]
fn a_second_node_does_not_take_the_range_of_a_live_one_and_an_heir_does() {
    let (master, target) =
        (master_with(MasterConfig { node_ttl_ms: 30_000, ..MasterConfig::default() }), Target::serve());
    let addr = master.rpc_addr();
    let first = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    let mark = target.bytes(AT, GRANULE);
    // The same settings, with the order to take over.
    let taking = with(storage_config("disk", addr, &target, AT), |it| {
        it.storage.take_over = true;
        it.wait_master_ms = 100;
    });
    let error = Node::start(taking.clone()).map(drop).unwrap_err().to_string();
    assert!(error.contains("has the name `disk`") && error.contains(first.endpoint()), "{error}");
    assert_eq!(target.bytes(AT, GRANULE), mark, "it was not touched");
    // Another name, without that order.
    let error = Node::start(storage_config("heir", addr, &target, AT)).map(drop).unwrap_err().to_string();
    assert!(error.contains("reserved") && error.contains("storage.take_over"), "{error}");
    assert!(error.contains(&target.place(AT).to_string()), "{error}");
    assert_eq!(target.bytes(AT, GRANULE), mark, "it was not touched");
    drop(first);
    let heir = Node::start(taking).unwrap();
    assert_ne!(target.bytes(AT, GRANULE), mark);
    drop(heir);
}

#[test]
fn storage_that_cannot_be_is_refused_with_what_to_do() {
    let (master, target) = (master(), Target::serve());
    let good = storage_config("disk", master.rpc_addr(), &target, AT);
    let refused = |change: &dyn Fn(&mut NodeConfig)| {
        Node::start(with(good.clone(), change)).err().map(|error| error.to_string()).unwrap_or_default()
    };
    let disks = || DiskList(vec![NodeDiskConfig { path: "/tmp/none".into(), bytes: Some(1 << 30) }]);
    type Change<'a> = &'a dyn Fn(&mut NodeConfig);
    let cases: [(Change<'_>, &str, &str); 12] = [
        (&|it| it.storage.namespace = None, "storage.namespace", "must name the namespace"),
        (&|it| it.storage.nguid = None, "storage.nguid", "nvme id-ns"),
        (&|it| it.storage.bytes = GRANULE, "storage.bytes", "at least two"),
        (&|it| it.storage.bytes = RANGE + 512, "storage.bytes", "multiple"),
        (&|it| it.storage.bytes = u64::MAX - 4_095, "storage.bytes", "multiple"),
        (&|it| it.engine.nvmeof.granule_bytes = 1 << 16, "storage.bytes", "granule_bytes"),
        (&|it| it.disks = disks(), "storage.namespace", "`disks`"),
        (&|it| it.shared = disks(), "storage.namespace", "`shared`"),
        (&|it| (it.cxl.pool, it.cxl.count) = ("/none".into(), 1), "storage.namespace", "cxl.pool"),
        (&|it| it.engine.fabrics = Fabrics::TCP, "storage.namespace", "`nvmeof` in `engine.fabrics`"),
        (&|it| it.storage.nguid = Some(Nguid([7; 16])), "another namespace", "storage.nguid"),
        (&|it| it.storage.bytes = DISK, "ends before", "storage.bytes"),
    ];
    for (change, names, says) in cases {
        let bytes = match names {
            "storage.bytes" if says == "granule_bytes" => Some(RANGE + GRANULE),
            _ => None,
        };
        let text = refused(&|it| {
            it.storage.bytes = bytes.unwrap_or(it.storage.bytes);
            change(it);
        });
        assert!(text.contains(names) && text.contains(says), "{names} {says}: {text}");
    }
    assert!(target.bytes(0, DISK).iter().all(|byte| *byte == BEFORE), "nothing was written");
    Node::start(good).unwrap().stop();
}

#[test]
fn clients_of_a_former_mount_are_fenced_and_come_back() {
    let addr = std::net::TcpListener::bind(own_host(48)).unwrap().local_addr().unwrap();
    let target = Target::serve();
    let master = master_at(addr, MasterConfig { epoch: 1, ..MasterConfig::default() });
    let disk = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    let mut client = client_over(addr, nvmeof());
    assert!(client.put(b"k", &pattern(1, 100_000), &PutOptions::DEFAULT).unwrap());
    let config = te_engine::Config { fabrics: nvmeof(), ..te_engine::Config::default() };
    let engine = te_engine::TransferEngine::start(config).unwrap();
    let memory = engine.alloc_shared(GRANULE as usize, Access::LOCAL).unwrap();
    let segment = engine.open_segment(disk.endpoint()).unwrap();
    let base = listed(addr, segment_of(&disk)).0;
    let write = || {
        let request = te_engine::TransferRequest {
            op: te_core::Op::Write,
            local: (memory.id(), 0).into(),
            segment,
            remote_addr: base + RANGE / 2,
            len: GRANULE,
        };
        engine.submit(&[request], Some(Duration::from_secs(10))).and_then(|it| it.wait(None).map(drop))
    };
    write().unwrap();
    let mounts = disk.status().mounts;
    master.stop().unwrap();
    let _master = master_at(addr, MasterConfig { epoch: 2, ..MasterConfig::default() });
    eventually("it is mounted anew", || disk.status().mounts > mounts);
    let at = AT + GRANULE + RANGE / 2;
    target.memory.0.set(at, &[BEFORE; GRANULE as usize]);
    assert!(write().is_err(), "an engine that knows the former mount");
    assert!(target.bytes(at, GRANULE).iter().all(|byte| *byte == BEFORE), "nothing has landed");
    // The client goes on with another engine.
    eventually("the client puts again", || {
        client.put(b"k", &pattern(2, 70_000), &PutOptions::DEFAULT).is_ok_and(|stored| stored)
    });
    assert_eq!(client.get(b"k").unwrap(), Some(pattern(2, 70_000)));
    let segment = segment_of(&disk);
    check_raw((&mut client, addr), (&target, AT), b"k", segment, &pattern(2, 70_000));
}

#[test]
fn a_writer_that_has_gone_is_fenced_at_the_target_before_its_place_is_used_again() {
    let (master, target) = (master(), Target::serve());
    let addr = master.rpc_addr();
    let disk = Node::start(storage_config("disk", addr, &target, AT)).unwrap();
    let used = |client: &mut Client| {
        client.master().segments().unwrap().iter().find(|it| it.segment == segment_of(&disk)).unwrap().used
    };
    let mut writer = client_over(addr, nvmeof());
    assert!(writer.put(b"k", &pattern(1, 100_000), &PutOptions::DEFAULT).unwrap());
    let before = used(&mut writer);
    // Most of the range, half written.
    let value = pattern(2, 5 << 20);
    assert!(writer.start_puts(&[(b"open", value.len() as u64)], &PutOptions::DEFAULT)[0].is_ok());
    let half = PutRange::new(b"open", 0, &value[..2 << 20]);
    assert!(writer.write_puts(&[half])[0].is_ok());
    assert!(used(&mut writer) > before + (5 << 20));
    drop(writer);
    let mut client = client_over(addr, nvmeof());
    eventually("its place is free", || used(&mut client) == before);
    assert!(client.put(b"next", &value, &PutOptions::DEFAULT).unwrap());
    check_raw((&mut client, addr), (&target, AT), b"next", segment_of(&disk), &value);
    assert_eq!(client.get(b"k").unwrap(), Some(pattern(1, 100_000)));
}

//! Copies, moves and drains by real nodes, while clients read.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{MIB, client, client_over, eventually, get_range, master, master_with, pattern, with};
use store_client::{
    Client, ErrorCode, Fabrics, Node, NodeConfig, Placement, PutOptions, ReplicaState, SegmentNo,
    SegmentState, Store as _, TaskId, TaskState,
};
use store_core::message::Kind;
use store_core::{Frame, MasterConfig, ReplicationConfig, ReplicationMode};

/// A node with frequent heartbeats.
fn node(name: &str, master: SocketAddr, fabrics: Fabrics) -> Node {
    let mut config = NodeConfig::new(name, master.into(), 32 * MIB).fabrics(fabrics);
    config.heartbeat_ms = 20;
    Node::start(config).unwrap()
}

fn on(segment: SegmentNo) -> PutOptions {
    PutOptions { placement: Placement::on(segment), ..PutOptions::DEFAULT }
}

fn done(client: &mut Client, id: TaskId) {
    eventually("the task is done", || {
        let task = client.master().task(id).unwrap();
        assert!(!matches!(task.state, TaskState::Failed | TaskState::Canceled), "{task:?}");
        task.state == TaskState::Done
    });
}

fn segments_of(client: &mut Client, key: &[u8]) -> Vec<SegmentNo> {
    let mut segments: Vec<_> =
        client.master().replicas(key).unwrap().iter().map(|replica| replica.segment).collect();
    // Sorted, because the order is that in which they became readable.
    segments.sort_unstable();
    segments
}

fn copies_and_moves(fabrics: Fabrics) {
    let master = master();
    let address = master.rpc_addr();
    let nodes = ["a", "b", "c"].map(|name| node(name, address, fabrics));
    let [a, b, c] = [0, 1, 2].map(|at: usize| nodes[at].status().segment.unwrap());
    let mut client = client_over(address, fabrics);
    // One object of a single chunk, and one of many with a trailer.
    for (key, len) in [(b"small".as_slice(), 4_000), (b"large", 3_000_001)] {
        let value = pattern(len as u64, len);
        assert!(client.put(key, &value, &on(a)).unwrap());
        let created = client.master().copy(key, &[b, c]).unwrap();
        created.into_iter().for_each(|id| done(&mut client, id.unwrap()));
        let replicas = client.master().replicas(key).unwrap();
        assert!(replicas.iter().all(|replica| replica.state == ReplicaState::Complete));
        assert_eq!(segments_of(&mut client, key), [a, b, c]);
        // Each get reads another replica.
        for _ in 0..6 {
            assert_eq!(client.get(key).unwrap().as_ref(), Some(&value));
        }
        if len > 100_000 {
            let part = get_range(&mut client, key, 70_000..1_000_000).unwrap();
            assert_eq!(part.as_deref(), Some(&value[70_000..1_000_000]), "the trailer was copied, too");
        }
        let again = client.master().copy(key, &[b]).unwrap();
        assert_eq!(again, [Err(ErrorCode::ReplicaAlreadyExists)]);
    }
    let value = pattern(7, 500_000);
    client.put(b"moved", &value, &on(a)).unwrap();
    let id = client.master().move_(b"moved", a, Some(b)).unwrap();
    done(&mut client, id);
    assert_eq!(segments_of(&mut client, b"moved"), [b]);
    assert_eq!(client.get(b"moved").unwrap().as_ref(), Some(&value));
    let listed = client.master().tasks(Some(TaskState::Done), 0, 100).unwrap();
    assert_eq!((listed.entries.len(), listed.cursor), (5, 0));
    assert_eq!(nodes.iter().map(|node| node.status().copies).sum::<u64>(), 5);
    let counters = client.counters();
    assert_eq!((counters.checksum_mismatches, counters.misses), (0, 0));
    assert_eq!(
        client.master().task(store_client::TaskId::new(99)).unwrap_err().code(),
        ErrorCode::TaskNotFound
    );
}

#[test]
fn replicas_are_copied_and_moved_over_tcp() {
    copies_and_moves(Fabrics::TCP);
}

#[test]
fn replicas_are_copied_and_moved_over_the_fastest_fabric() {
    copies_and_moves(Fabrics::default());
}

#[test]
fn the_replicas_of_many_objects_are_found_with_their_segments() {
    let master = master_with(MasterConfig { lease_ttl_ms: 200, ..MasterConfig::default() });
    let address = master.rpc_addr();
    let nodes = ["a", "b"].map(|name| node(name, address, Fabrics::default()));
    let [a, b] = [0, 1].map(|at: usize| nodes[at].status().segment.unwrap());
    let mut client = client(address);
    let two = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
    assert!(client.put(b"both", &pattern(1, 200_000), &two).unwrap());
    assert!(client.put(b"one", &pattern(2, 1_000), &on(b)).unwrap());
    // More keys than one request may have.
    let missing = vec![b"missing".as_slice(); 2_000];
    let keys = [[b"both".as_slice(), b"one", b""].as_slice(), &missing, &[b"both"]].concat();
    let mut found = client.master().batch_replicas(&keys).unwrap();
    assert_eq!(found.len(), 2_004);
    for at in [0, 2_003] {
        let both = found[at].as_mut().unwrap();
        both.sort_unstable_by_key(|replica| replica.segment);
        let facts: Vec<_> = both
            .iter()
            .map(|replica| (replica.segment, replica.name.as_str(), replica.endpoint.as_str(), replica.len))
            .collect();
        let [to_a, to_b] = [nodes[0].endpoint(), nodes[1].endpoint()];
        assert_eq!(facts, [(a, "a", to_a, 200_000), (b, "b", to_b, 200_000)]);
        assert!(both.iter().all(|replica| replica.state == ReplicaState::Complete && replica.addr > 0));
    }
    let one = found[1].as_ref().unwrap();
    assert_eq!((one.len(), one[0].segment, one[0].len), (1, b, 1_000));
    assert_eq!(found[2], Err(ErrorCode::ObjectNotFound), "no object has an empty key");
    assert!(found[3..2_003].iter().all(|found| *found == Err(ErrorCode::ObjectNotFound)));
    assert_eq!(client.master().batch_replicas(&[]).unwrap(), []);
    // By the name of the segment.
    let named = client.master().segment_named("b").unwrap();
    assert_eq!((named.segment, named.endpoint.as_str()), (b, nodes[1].endpoint()));
    let error = client.master().segment_named("c").unwrap_err();
    assert_eq!(error.code(), ErrorCode::SegmentNotFound);
    // Objects that were just written count as leased, for a while.
    let mut left = vec![b"both".as_slice(), b"one"];
    eventually("the replicas are cleared", || {
        let keys = [left.as_slice(), &[b"missing"]].concat();
        let mut cleared = client.master().batch_clear_replicas(&keys, Some(b)).unwrap();
        assert_eq!(cleared.pop(), Some(Err(ErrorCode::KeyNotFound)));
        let answers: BTreeMap<_, _> = left.iter().copied().zip(cleared).collect();
        left.retain(|key| answers[key] == Err(ErrorCode::ObjectHasLease));
        assert!(answers.values().all(|answer| matches!(answer, Ok(()) | Err(ErrorCode::ObjectHasLease))));
        left.is_empty()
    });
    let found = client.master().batch_replicas(&[b"both", b"one"]).unwrap();
    assert_eq!(
        (found[0].as_ref().map(Vec::len), found[1].as_ref().err()),
        (Ok(1), Some(&ErrorCode::ObjectNotFound))
    );
}

/// How often a call is sent before it is given up.
const SENT: u64 = 2;

/// A proxy between a node and its master that loses the first report of ended tasks, however often it is
/// sent, and the connection each time. Returns how often such a report was sent.
fn losing_the_first_end(master: SocketAddr) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let ends = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&ends);
    thread::spawn(move || {
        for node in listener.incoming().flatten() {
            let Ok(master) = TcpStream::connect(master) else { return };
            let (mut from, mut to) = (master.try_clone().unwrap(), node.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
            let seen = Arc::clone(&seen);
            thread::spawn(move || {
                forward(&node, &master, &seen);
                let _ = master.shutdown(Shutdown::Both);
                let _ = node.shutdown(Shutdown::Both);
            });
        }
    });
    (address, ends)
}

/// Forwards until a side closes the connection, or a report is lost.
fn forward(mut node: &TcpStream, mut master: &TcpStream, seen: &AtomicU64) {
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    while let Ok(count @ 1..) = node.read(&mut chunk) {
        bytes.extend_from_slice(&chunk[..count]);
        while let Some((frame, len)) = Frame::parse(&bytes).unwrap() {
            let is_end = frame.header.kind == Kind::EndTasks as u8;
            let lost = is_end && seen.fetch_add(1, Ordering::Relaxed) < SENT;
            if lost || master.write_all(&bytes[..len]).is_err() {
                return;
            }
            bytes.drain(..len);
        }
    }
}

#[test]
fn a_node_whose_report_was_lost_reports_again_and_does_not_write_again() {
    let master = master();
    let address = master.rpc_addr();
    let (through, ends) = losing_the_first_end(address);
    let (from, into) = (node("from", address, Fabrics::TCP), node("into", through, Fabrics::TCP));
    let [a, b] = [&from, &into].map(|node| node.status().segment.unwrap());
    let mut client = client_over(address, Fabrics::TCP);
    let value = pattern(1, 300_000);
    assert!(client.put(b"k", &value, &on(a)).unwrap());
    let created = client.master().copy(b"k", &[b]).unwrap();
    done(&mut client, created[0].unwrap());
    assert_eq!(ends.load(Ordering::Relaxed), SENT + 1, "the first report was lost, the second arrived");
    // The replica is not written again: by then its place could belong to another object.
    assert_eq!(into.status().copies, 1);
    for _ in 0..2 {
        assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value), "each get reads another replica");
    }
}

#[test]
fn a_damaged_replica_is_not_copied_and_is_dropped_when_two_readers_have_reported_it() {
    let master = master();
    let address = master.rpc_addr();
    let nodes = ["a", "b"].map(|name| node(name, address, Fabrics::default()));
    let [a, b] = [0, 1].map(|at: usize| nodes[at].status().segment.unwrap());
    let mut reader = client(address);
    let value = pattern(3, 10_000);
    reader.put(b"k", &value, &on(a)).unwrap();
    let replica = reader.master().replicas(b"k").unwrap()[0];
    let region = nodes[0].region().unwrap();
    region.write(replica.addr - region.addr() + 77, b"rot").unwrap();
    let id = reader.master().copy(b"k", &[b]).unwrap().remove(0).unwrap();
    eventually("the task has failed", || reader.master().task(id).unwrap().state == TaskState::Failed);
    assert_eq!(reader.master().task(id).unwrap().error, Some(ErrorCode::ChecksumMismatch));
    assert_eq!(segments_of(&mut reader, b"k"), [a]);
    // The node has reported it, and now a reader does.
    eventually("one report", || reader.master().task_report().unwrap().bad_reports_total == 1);
    assert_eq!(reader.get(b"k").unwrap(), None);
    assert_eq!(reader.master().task_report().unwrap().bad_dropped_total, 1);
    assert!(!reader.exists(b"k").unwrap(), "it was the last replica");
    assert!(reader.put(b"k", &value, &on(b)).unwrap());
    assert_eq!(reader.get(b"k").unwrap(), Some(value));
}

#[test]
fn readers_find_every_byte_while_a_node_is_drained_and_leaves() {
    // The drain waits for the readers' leases, and a move on a busy machine must fit into one.
    let config = MasterConfig { lease_ttl_ms: 2_000, ..MasterConfig::default() };
    let master = master_with(config);
    let address = master.rpc_addr();
    let [leaving, _b, _c] = ["a", "b", "c"].map(|name| node(name, address, Fabrics::TCP));
    let segment = leaving.status().segment.unwrap();
    let mut writer = client(address);
    let (objects, sizes) = (40u64, [1_000, 70_000, 300_000]);
    let content = move |i: u64| pattern(i, sizes[i as usize % 3]);
    for i in 0..objects {
        assert!(writer.put(format!("k{i}").as_bytes(), &content(i), &on(segment)).unwrap());
    }
    let stop = Arc::new(AtomicBool::new(false));
    let reads = Arc::new(AtomicU64::new(0));
    let readers: Vec<_> = (0..2u64)
        .map(|reader| {
            let (stop, reads) = (Arc::clone(&stop), Arc::clone(&reads));
            thread::spawn(move || {
                let mut client = client_over(address, Fabrics::TCP);
                let mut misses = 0u64;
                for i in (reader * 13..).map(|i| i % objects) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    // A miss may be the end of a lease on a very busy machine; wrong bytes never are.
                    match client.get(format!("k{i}").as_bytes()).unwrap() {
                        Some(found) => assert!(found == content(i), "k{i}"),
                        None => misses += 1,
                    }
                    reads.fetch_add(1, Ordering::Relaxed);
                }
                (client.counters(), misses)
            })
        })
        .collect();
    eventually("all clients read", || reads.load(Ordering::Relaxed) > 20);
    let info = leaving.stop_drained(Duration::from_secs(30)).unwrap();
    assert_eq!((info.state, info.blocks), (SegmentState::Drained, 0), "{info:?}");
    assert_eq!(info.moved_total, objects);
    let so_far = reads.load(Ordering::Relaxed);
    eventually("they continue to read", || reads.load(Ordering::Relaxed) > so_far + 100);
    stop.store(true, Ordering::Relaxed);
    for reader in readers {
        let (counters, misses) = reader.join().unwrap();
        assert_eq!(counters.checksum_mismatches, 0);
        assert_eq!(misses, counters.lease_misses, "{counters:?}");
    }
    assert_eq!(writer.master().stats().unwrap().objects_lost_total, 0);
    for i in 0..objects {
        assert_eq!(writer.get(format!("k{i}").as_bytes()).unwrap(), Some(content(i)));
        assert!(!segments_of(&mut writer, format!("k{i}").as_bytes()).contains(&segment));
    }
}

#[test]
fn a_drain_takes_few_heartbeats_and_ends_with_its_last_move() {
    const OBJECTS: u64 = 200;
    // A drain that waited for a lease would not end in time.
    let master = master_with(MasterConfig { lease_ttl_ms: 600_000, ..MasterConfig::default() });
    let address = master.rpc_addr();
    let orders_max = u64::from(MasterConfig::default().tasks.per_node_max);
    let [leaving, staying] = ["a", "b"].map(|name| {
        let config = NodeConfig::new(name, address.into(), 32 * MIB);
        Node::start(with(config, |config| config.heartbeat_ms = 2_000)).unwrap()
    });
    let segment = leaving.status().segment.unwrap();
    let mut writer = client(address);
    for i in 0..OBJECTS {
        assert!(writer.put(format!("k{i}").as_bytes(), &pattern(i, 10_000), &on(segment)).unwrap());
    }
    let beats = staying.status().heartbeats;
    let info = leaving.stop_drained(Duration::from_secs(60)).unwrap();
    assert_eq!((info.state, info.blocks, info.moved_total), (SegmentState::Drained, 0, OBJECTS), "{info:?}");
    // A node that fetched work only with its heartbeats would have needed more of them.
    let beats = staying.status().heartbeats - beats;
    assert!(beats * orders_max < OBJECTS, "{beats} heartbeats");
    assert_eq!(writer.get(b"k7").unwrap(), Some(pattern(7, 10_000)));
}

#[test]
fn an_object_that_is_read_very_often_gets_a_second_replica() {
    let replication = ReplicationConfig {
        mode: ReplicationMode::Enforce,
        gets_per_s_min: 1.0,
        window_ms: 10_000,
        ..ReplicationConfig::default()
    };
    let master = master_with(MasterConfig { replication, ..MasterConfig::default() });
    let address = master.rpc_addr();
    let _nodes = ["a", "b"].map(|name| node(name, address, Fabrics::default()));
    let mut client = client(address);
    let value = pattern(1, 100_000);
    client.put(b"hot", &value, &PutOptions::DEFAULT).unwrap();
    client.put(b"cold", &value, &PutOptions::DEFAULT).unwrap();
    for _ in 0..30 {
        assert_eq!(client.get(b"hot").unwrap().as_ref(), Some(&value));
    }
    eventually("it has two replicas", || {
        let replicas = client.master().replicas(b"hot").unwrap();
        replicas.iter().filter(|replica| replica.state == ReplicaState::Complete).count() == 2
    });
    assert_eq!(client.master().replicas(b"cold").unwrap().len(), 1);
    for _ in 0..4 {
        assert_eq!(client.get(b"hot").unwrap().as_ref(), Some(&value));
    }
}

//! Nodes whose memory is in a CXL pool, and clients that reach it there alone. The pools are files in
//! `/dev/shm`; no CXL device is behind them, and all processes are of one host.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{
    Process, eventually, get_range, master, master_with, pattern, role, say, wait_for_parent, with,
};
use store_client::{
    Client, ClientConfig, ConnectError, DiskList, Fabrics, Masters, Node, NodeConfig, NodeDiskConfig,
    PutOptions, PutRange, RemoveMode, RpcConfig, RpcConnection, Source, Store as _,
};
use store_core::message::{
    ClaimExtents, ExtentsGiven, ExtentsWanted, FreePage, ListPools, PageFreed, PoolEntry,
};
use store_core::{MasterConfig, NodeId};
use te_core::{Access, Location, Op};
use te_engine::cxl::pool::format::{EXTENT_BYTES_MIN, PAGE};
use te_engine::cxl::{Claim, Coherence, FormatOptions, Pool, Seat};
use te_engine::{LocalAddr, TransferEngine, TransferRequest};

const ONE: PutOptions = PutOptions::DEFAULT;
/// Extents of a node.
const COUNT: u32 = 4;

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    match role[0].as_str() {
        "node" => be_node(&role),
        "client" => be_client(&role),
        "half-put" => be_half_put(&role),
        "rounds" => be_other_half(&role),
        _ => {}
    }
}

/// A file with a pool, which is removed at the end.
struct PoolFile(PathBuf);

impl PoolFile {
    fn new(name: &str) -> Self {
        Self::with(name, FormatOptions::default())
    }

    fn with(name: &str, options: FormatOptions) -> Self {
        let path = Path::new("/dev/shm").join(format!("snowskin-store-{name}-{}", std::process::id()));
        std::fs::File::create(&path).unwrap().set_len(16 * EXTENT_BYTES_MIN).unwrap();
        Pool::format(&path, options).unwrap();
        Self(path)
    }
}

impl Drop for PoolFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A node of extents from `first` on, which no fabric but that of pools reaches.
fn node_config(name: &str, master: Masters, pool: &Path, first: u32) -> NodeConfig {
    with(NodeConfig::new(name, master, 1).fabrics(cxl()), |config| {
        config.engine.cxl.coherence = Coherence::Hardware;
        config.engine.cxl.peer_silence_ms_max = 500;
        (config.cxl.pool, config.cxl.first, config.cxl.count) = (pool.to_path_buf(), first, COUNT);
    })
}

fn client_config(master: Masters, pool: &Path) -> ClientConfig {
    with(ClientConfig::new(master).fabrics(cxl()), |config| {
        config.engine.cxl.coherence = Coherence::Hardware;
        config.engine.cxl.pools = vec![pool.to_path_buf()];
    })
}

fn cxl() -> Fabrics {
    "cxl".parse().unwrap()
}

/// The role `node NAME MASTER POOL FIRST [flush]`.
fn be_node(role: &[String]) {
    let (name, master, pool) = (&role[1], role[2].parse().unwrap(), Path::new(&role[3]));
    let config = node_config(name, master, pool, role[4].parse().unwrap());
    let node = Node::start(with(config, |config| {
        config.engine.cxl.coherence = coherence(role.get(5));
    }))
    .unwrap();
    say(node.endpoint());
    wait_for_parent();
    node.stop();
}

fn start_node(name: &str, master: &dyn std::fmt::Display, pool: &PoolFile, first: u32) -> Process {
    let (pool, first) = (pool.0.to_str().unwrap(), first.to_string());
    Process::start("entry", &["node", name, &master.to_string(), pool, &first])
}

fn connect(role: &[String]) -> Client {
    let config = client_config(role[1].parse().unwrap(), Path::new(&role[2]));
    Client::connect(with(config, |config| config.engine.cxl.coherence = coherence(role.get(3)))).unwrap()
}

fn coherence(named: Option<&String>) -> Coherence {
    if named.is_some_and(|name| name == "flush") { Coherence::Flush } else { Coherence::Hardware }
}

/// The role `client MASTER POOL [flush]`: puts, gets, and says by which rails its bytes went.
fn be_client(role: &[String]) {
    let mut client = connect(role);
    for seed in 0..20 {
        let (key, value) = (format!("k{seed}"), pattern(seed, 3_001 * seed as usize + 1));
        assert!(client.put(key.as_bytes(), &value, &ONE).unwrap());
        assert_eq!(client.get(key.as_bytes()).unwrap(), Some(value));
    }
    say(&rails(&client).join(","));
    wait_for_parent();
}

/// Rounds of [`rounds`].
const ROUNDS: u64 = 1_000;

/// In turns with another process: puts an object for the other one, gets that one's, compares it and removes
/// it, so that its lines are used again. `me`: 0 begins.
fn rounds(client: &mut Client, me: u64) {
    for round in 0..ROUNDS {
        let key = format!("r{round}");
        let value = pattern(round, 1 + (round as usize * 7_919) % 300_000);
        if round % 2 == me {
            eventually("there is room", || client.put(key.as_bytes(), &value, &ONE).unwrap_or(false));
            continue;
        }
        // timing: only a hang takes as long
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let found = loop {
            match client.get(key.as_bytes()).unwrap() {
                Some(found) => break found,
                // timing: as above
                None => assert!(std::time::Instant::now() < deadline, "round {round} was not put"),
            }
        };
        assert!(found == value, "a wrong byte in round {round}");
        client.remove(key.as_bytes(), RemoveMode::Force).unwrap();
    }
}

/// The role `rounds MASTER POOL flush`: the other process of [`rounds`]. At the end it reports its rails and
/// its mismatches.
fn be_other_half(role: &[String]) {
    let mut client = connect(role);
    say("ready");
    rounds(&mut client, 1);
    say(&format!("{} {}", rails(&client).join(","), client.counters().checksum_mismatches));
    wait_for_parent();
}

/// The role `half-put MASTER POOL`: writes half of an object, and never the rest.
fn be_half_put(role: &[String]) {
    let mut client = connect(role);
    let value = pattern(3, 2 << 20);
    client.start_puts(&[(b"half", value.len() as u64)], &ONE).pop().unwrap().unwrap();
    let source = Source::Bytes(&value[..1 << 20]);
    client.write_puts(&[PutRange { key: b"half", offset: 0, source }]).pop().unwrap().unwrap();
    say("half");
    wait_for_parent();
}

/// Rails that have moved bytes.
fn rails(client: &Client) -> Vec<String> {
    let stats = client.engine_stats();
    stats.rails.iter().filter(|rail| rail.bytes > 0).map(|rail| rail.name.to_owned()).collect()
}

/// The first extent and the number of extents of each claim.
fn claims(master: &dyn std::fmt::Display) -> Vec<(u32, u32)> {
    let mut rpc = RpcConnection::connect(master.to_string().parse().unwrap(), RpcConfig::default()).unwrap();
    let (_, entries) = rpc.call::<ListPools>(&(), std::iter::empty()).unwrap();
    let claim = |entry| match entry {
        PoolEntry::Extents { first, count, .. } => Some((first, count)),
        PoolEntry::Page { .. } => None,
    };
    entries.filter_map(claim).collect()
}

fn pages(master: &dyn std::fmt::Display) -> Vec<(u32, u64, u64)> {
    let mut rpc = RpcConnection::connect(master.to_string().parse().unwrap(), RpcConfig::default()).unwrap();
    let (_, entries) = rpc.call::<ListPools>(&(), std::iter::empty()).unwrap();
    let page = |entry| match entry {
        PoolEntry::Page { slot, identity, epoch, .. } => Some((slot, identity, epoch)),
        PoolEntry::Extents { .. } => None,
    };
    entries.filter_map(page).collect()
}

#[test]
fn what_one_process_puts_into_a_pool_another_one_gets_from_there_without_a_network() {
    let (master, pool) = (master(), PoolFile::new("put-get"));
    let addr = master.rpc_addr();
    let (mut a, mut b) = (start_node("a", &addr, &pool, 0), start_node("b", &addr, &pool, COUNT));
    let mut writer = Process::start("entry", &["client", &addr.to_string(), pool.0.to_str().unwrap()]);
    assert_eq!(writer.said(), "cxl", "every byte went through the pool");
    let mut client = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    for seed in 0..20 {
        let found = client.get(format!("k{seed}").as_bytes()).unwrap();
        assert_eq!(found, Some(pattern(seed, 3_001 * seed as usize + 1)), "{seed}");
    }
    assert_eq!(rails(&client), ["cxl"]);
    let stats = client.master().stats().unwrap();
    assert_eq!((stats.segments, stats.capacity_bytes), (2, 2 * u64::from(COUNT) * EXTENT_BYTES_MIN));
    assert_eq!(pages(&addr).len(), 2);
    writer.stop();
    a.stop();
    b.stop();
    // They gave their extents back: any other process may have them.
    let mut rpc = RpcConnection::connect(addr.into(), RpcConfig::default()).unwrap();
    let pool = Pool::open(&pool.0, Coherence::Hardware, None).unwrap().superblock().uuid;
    let lineage = rpc.welcome().lineage;
    let wanted = ExtentsWanted {
        lineage,
        name: "c",
        pool,
        count: 2 * COUNT,
        locked: true,
        ..ExtentsWanted::default()
    };
    let (given, _) = rpc.call::<ClaimExtents>(&wanted, std::iter::empty()).unwrap();
    assert!(matches!(given, ExtentsGiven::Given { .. }), "{given:?}");
}

#[test]
fn a_node_that_is_killed_and_restarted_has_its_extents_again_and_none_of_its_objects() {
    let (master, pool) = (master(), PoolFile::new("killed"));
    let addr = master.rpc_addr();
    let mut node = start_node("a", &addr, &pool, 2);
    let mut client = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    for round in 0..3 {
        let value = pattern(round, 1 << 20);
        assert!(client.put(b"k", &value, &ONE).unwrap());
        assert_eq!(client.get(b"k").unwrap(), Some(value));
        node.kill();
        // At once: the kernel's lock proves that the former process has ended, and no time has to pass.
        node = start_node("a", &addr, &pool, 2);
        assert_eq!(client.get(b"k").unwrap(), None, "the object is gone with its node");
        let other = pattern(round + 100, 1 << 20);
        eventually("it is put again", || client.put(b"k", &other, &ONE).unwrap_or(false));
        assert_eq!(client.get(b"k").unwrap(), Some(other));
        client.remove(b"k", RemoveMode::Force).unwrap();
    }
    assert_eq!(rails(&client), ["cxl"]);
}

#[test]
fn a_node_that_wants_extents_of_another_one_is_told_who_has_them() {
    let (master, pool) = (master(), PoolFile::new("two"));
    let addr = master.rpc_addr();
    let config = |name, first| node_config(name, addr.into(), &pool.0, first);
    let first = Node::start(config("first", 0)).unwrap();
    let refused = Node::start(config("second", COUNT - 1)).err().unwrap();
    let text = refused.to_string();
    assert!(
        matches!(refused, ConnectError::ExtentsHeld { first: 0, count: COUNT, here: true, .. }),
        "{text}"
    );
    for part in ["extents 0 to 3 of", "the node `first`", "runs on this host", "choose other extents"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(first.status().segment.is_some());
    let second = Node::start(config("second", COUNT)).unwrap();
    first.stop();
    let third = Node::start(config("third", 0)).unwrap();
    second.stop();
    third.stop();
}

#[test]
fn a_node_that_could_not_start_gives_its_extents_back() {
    let (master, pool) = (master(), PoolFile::new("failed"));
    let addr = master.rpc_addr();
    let config =
        |first| with(node_config("a", addr.into(), &pool.0, first), |config| config.heartbeat_ms = 50);
    let first = Node::start(config(0)).unwrap();
    let refused = Node::start(config(COUNT)).err().unwrap();
    assert!(matches!(refused, ConnectError::Held { .. }), "{refused}");
    assert_eq!(claims(&addr), [(0, COUNT)]);
    let owners = Pool::open(&pool.0, Coherence::Hardware, None).unwrap().owners(COUNT, COUNT).unwrap();
    assert!(
        owners.iter().all(|owner| owner.is_some_and(|owner| !owner.owned && owner.epoch > 0)),
        "{owners:?}"
    );
    first.stop();
}

/// A way to the master on which a step happens after the master has answered the first claim of
/// extents, and before the node has the answer.
fn relay_to(master: std::net::SocketAddr, step: impl FnOnce() + Send + 'static) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let (step, claimed) = (Arc::new(Mutex::new(Some(step))), Arc::new(AtomicBool::new(false)));
    std::thread::spawn(move || {
        for node in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(master).unwrap();
            let (mut from, mut to) = (node.try_clone().unwrap(), server.try_clone().unwrap());
            let seen = Arc::clone(&claimed);
            std::thread::spawn(move || {
                let mut bytes = [0; 4_096];
                while let Ok(len @ 1..) = from.read(&mut bytes) {
                    // A node has one request under way on a connection: its kind is in the header.
                    if len > 8 && u16::from_le_bytes([bytes[6], bytes[7]]) == 110 {
                        seen.store(true, Ordering::SeqCst);
                    }
                    to.write_all(&bytes[..len]).unwrap();
                }
                let _ = to.shutdown(Shutdown::Both);
            });
            let (mut from, mut to) = (server, node);
            let (step, claimed) = (Arc::clone(&step), Arc::clone(&claimed));
            std::thread::spawn(move || {
                let mut bytes = [0; 4_096];
                while let Ok(len @ 1..) = from.read(&mut bytes) {
                    if claimed.load(Ordering::SeqCst)
                        && let Some(step) = step.lock().unwrap().take()
                    {
                        step();
                    }
                    if to.write_all(&bytes[..len]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    });
    addr
}

#[test]
fn a_node_does_not_claim_extents_that_another_process_has_written_while_the_master_was_asked() {
    let (master, pool) = (master(), PoolFile::new("meanwhile"));
    let other = Pool::open(&pool.0, Coherence::Hardware, None).unwrap();
    let writer = Arc::clone(&other);
    // An earlier lineage of the master gave them to a process of another host, in a lower epoch.
    let theirs = Claim { first: 1, count: 1, incarnation: 7, epoch: 5, key: [7; 16] };
    let way = relay_to(master.rpc_addr(), move || {
        writer.claim(theirs).unwrap();
    });
    let refused = Node::start(node_config("a", way.into(), &pool.0, 0)).err().unwrap();
    assert!(matches!(refused, ConnectError::ExtentsHeld { first: 0, count: COUNT, .. }), "{refused}");
    let owners = other.owners(0, COUNT).unwrap();
    let owned: Vec<_> = owners.iter().flatten().map(|owner| (owner.owned, owner.epoch)).collect();
    assert_eq!(owned, [(false, 0), (true, 5), (false, 0), (false, 0)]);
}

#[test]
fn extents_whose_record_cannot_be_read_are_taken_only_with_takeover() {
    let (master, pool) = (master(), PoolFile::new("unreadable"));
    let addr = master.rpc_addr();
    let file = std::fs::OpenOptions::new().write(true).open(&pool.0).unwrap();
    // The record of extent 1.
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xFF; 64], 2 * PAGE).unwrap();
    let config =
        |takeover| with(node_config("a", addr.into(), &pool.0, 0), |config| config.takeover = takeover);
    let refused = Node::start(config(false)).err().unwrap();
    assert!(matches!(refused, ConnectError::ExtentsHeld { first: 0, count: COUNT, .. }), "{refused}");
    Node::start(config(true)).unwrap().stop();
    // Its record is one again.
    Node::start(config(false)).unwrap().stop();
}

#[test]
fn a_holder_of_an_export_of_a_node_that_was_killed_cannot_touch_the_extents_any_more() {
    let (master, pool) = (master(), PoolFile::new("stale"));
    let addr = master.rpc_addr();
    let mut node = start_node("a", &addr, &pool, 0);
    let mut client = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    let engine = TransferEngine::start(client_config(addr.into(), &pool.0).engine).unwrap();
    // As if the master had given it a page.
    engine.pools()[0].take_seat(Seat { slot: 63, epoch: 1 });
    let segment = engine.open_segment(node.said()).unwrap();
    let base = engine.segment_regions(segment).unwrap()[0].addr;
    let local = engine.alloc_shared(4_096, Access::LOCAL).unwrap();
    let write = |byte: u8| {
        local.write(0, &[byte; 4_096]).unwrap();
        let request = TransferRequest {
            op: Op::Write,
            local: LocalAddr::from((local.id(), 0)),
            segment,
            remote_addr: base,
            len: 4_096,
        };
        let timeout = Some(Duration::from_secs(20));
        engine.submit(&[request], timeout).unwrap().wait(timeout).map(drop)
    };
    write(1).unwrap();
    node.kill();
    // No process has claimed the extents since: they are still those of the node that has ended.
    let again = start_node("a", &addr, &pool, 0);
    let value = pattern(9, 1 << 20);
    eventually("an object is put", || client.put(b"k", &value, &ONE).unwrap_or(false));
    write(2).unwrap_err();
    assert_eq!(client.get(b"k").unwrap(), Some(value));
    drop(again);
}

#[test]
fn a_node_whose_extents_an_operator_gave_to_another_process_takes_its_memory_out_of_service() {
    loses_its_extents("lost", false);
}

#[test]
fn a_node_that_was_started_with_takeover_does_not_take_its_extents_back_from_a_later_owner() {
    loses_its_extents("taken-over", true);
}

fn loses_its_extents(name: &str, takeover: bool) {
    let (master, pool) = (master(), PoolFile::new(name));
    let addr = master.rpc_addr();
    let node = Node::start(with(node_config("a", addr.into(), &pool.0, 0), |config| {
        (config.heartbeat_ms, config.takeover) = (50, takeover);
    }))
    .unwrap();
    let mut client = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    assert!(client.put(b"k", &pattern(1, 10_000), &ONE).unwrap());
    let segments = client.master().segments().unwrap();
    assert_eq!(segments[0].location, Some(Location::Pool));
    let mounted = node.status().mounts;
    // A process of another host, which sees none of this host's locks.
    let other = Pool::open(&pool.0, Coherence::Hardware, None).unwrap();
    let mut rpc = RpcConnection::connect(addr.into(), RpcConfig::default()).unwrap();
    let lineage = rpc.welcome().lineage;
    let wanted = |takeover| ExtentsWanted {
        lineage,
        node: NodeId::new(77),
        key: 77,
        name: "other",
        pool: other.superblock().uuid,
        first: 1,
        count: 1,
        incarnation: 7,
        domain: 7,
        locked: true,
        above: 1,
        owned_elsewhere: true,
        takeover,
    };
    let (held, _) = rpc.call::<ClaimExtents>(&wanted(false), std::iter::empty()).unwrap();
    assert!(matches!(held, ExtentsGiven::Held { name: "a", alive: true, .. }), "{held:?}");
    let (given, _) = rpc.call::<ClaimExtents>(&wanted(true), std::iter::empty()).unwrap();
    let ExtentsGiven::Given { epoch } = given else { panic!("{given:?}") };
    other.claim(Claim { first: 1, count: 1, incarnation: 7, epoch, key: [7; 16] }).unwrap();
    eventually("the memory is not mounted", || node.status().segment.is_none());
    eventually("the node tries again", || node.status().failures > 3);
    assert_eq!((node.status().segment, node.status().mounts), (None, mounted));
    assert_eq!(client.get(b"k").unwrap(), None);
    node.stop();
}

#[test]
fn a_node_that_is_drained_moves_its_objects_to_another_one_through_the_pool() {
    let (master, pool) = (master(), PoolFile::new("drained"));
    let addr = master.rpc_addr();
    let config = |name, first| node_config(name, addr.into(), &pool.0, first);
    let first = Node::start(config("a", 0)).unwrap();
    let mut client = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    for seed in 0..10 {
        assert!(client.put(format!("k{seed}").as_bytes(), &pattern(seed, 50_000), &ONE).unwrap());
    }
    let second = Node::start(config("b", COUNT)).unwrap();
    let drained = first.stop_drained(Duration::from_secs(30)).unwrap();
    assert_eq!((drained.blocks, second.status().copies), (0, 10));
    for seed in 0..10 {
        assert_eq!(client.get(format!("k{seed}").as_bytes()).unwrap(), Some(pattern(seed, 50_000)));
    }
}

fn flush_node(name: &str, master: Masters, pool: &PoolFile, first: u32) -> NodeConfig {
    with(node_config(name, master, &pool.0, first), |config| {
        config.engine.cxl.coherence = Coherence::Flush;
    })
}

fn flush_client(master: Masters, pool: &PoolFile, fabrics: &str) -> Client {
    let config = with(client_config(master, &pool.0), |config| {
        config.engine.cxl.coherence = Coherence::Flush;
        config.engine.fabrics = fabrics.parse().unwrap();
    });
    Client::connect(config).unwrap()
}

#[test]
fn what_is_put_into_a_pool_without_coherent_caches_is_what_other_processes_get_also_when_it_is_used_again() {
    let config = MasterConfig { lease_ttl_ms: 200, ..MasterConfig::default() };
    let (master, pool) = (master_with(config), PoolFile::new("flush"));
    let (addr, path) = (master.rpc_addr(), pool.0.to_str().unwrap());
    let mut node = Process::start("entry", &["node", "a", &addr.to_string(), path, "0", "flush"]);
    let mut writer = Process::start("entry", &["client", &addr.to_string(), path, "flush"]);
    assert_eq!(writer.said(), "cxl", "every byte went through the pool");
    let mut client = flush_client(addr.into(), &pool, "cxl");
    for seed in 0..20 {
        let found = client.get(format!("k{seed}").as_bytes()).unwrap();
        assert_eq!(found, Some(pattern(seed, 3_001 * seed as usize + 1)), "{seed}");
    }
    client.master().remove_all(RemoveMode::Force).unwrap();
    // Objects of all lengths, side by side, over the same lines again and again.
    let mut other = flush_client(addr.into(), &pool, "cxl");
    for round in 0..200_u64 {
        let values: Vec<Vec<u8>> = (0..4)
            .map(|at| pattern(round * 4 + at, 1 + ((round * 4 + at) as usize * 7_919) % 200_000))
            .collect();
        for (at, value) in values.iter().enumerate() {
            let key = format!("r{at}");
            let by = if at % 2 == 0 { &mut client } else { &mut other };
            eventually("there is room", || by.put(key.as_bytes(), value, &ONE).unwrap_or(false));
        }
        for (at, value) in values.iter().enumerate() {
            let (key, by) = (format!("r{at}"), if at % 2 == 0 { &mut other } else { &mut client });
            assert_eq!(by.get(key.as_bytes()).unwrap().as_ref(), Some(value), "{round} {at}");
            let (from, len) = (value.len() / 3, value.len().div_ceil(2));
            let part = get_range(by, key.as_bytes(), from as u64..(from + len) as u64).unwrap();
            assert_eq!(part.as_deref(), Some(&value[from..from + len]), "{round} {at}");
            by.remove(key.as_bytes(), RemoveMode::Force).unwrap();
        }
    }
    // Ranges of an open put that meet in the middle of lines, in any order.
    let value = pattern(9, 150_001);
    client.start_puts(&[(b"open", value.len() as u64)], &ONE).pop().unwrap().unwrap();
    for (from, to) in [(100, 70_001), (70_001, 70_002), (0, 100), (70_002, 150_001)] {
        let source = Source::Bytes(&value[from..to]);
        let range = PutRange { key: b"open", offset: from as u64, source };
        client.write_puts(&[range]).pop().unwrap().unwrap();
    }
    client.end_puts(&[b"open".as_slice()]).pop().unwrap().unwrap();
    assert_eq!(other.get(b"open").unwrap(), Some(value));
    assert_eq!((rails(&client), rails(&other)), (vec!["cxl".to_owned()], vec!["cxl".to_owned()]));
    assert_eq!(client.counters().checksum_mismatches + other.counters().checksum_mismatches, 0);
    writer.stop();
    node.stop();
}

/// Two processes and a node in a third one, as on three hosts that map one device. The file is memory of this
/// host, whose caches are coherent: what is shown is that each line has one writer, and no line is used too
/// early. `hw-tests` runs the same on two machines (profile `cxl` of the lab).
#[test]
fn two_processes_put_get_and_use_the_lines_of_a_pool_again_without_a_wrong_byte() {
    let config = MasterConfig { lease_ttl_ms: 100, ..MasterConfig::default() };
    let (master, pool) = (master_with(config), PoolFile::new("two-processes"));
    let (addr, path) = (master.rpc_addr(), pool.0.to_str().unwrap());
    let mut node = Process::start("entry", &["node", "a", &addr.to_string(), path, "0", "flush"]);
    node.said();
    let mut other = Process::start("entry", &["rounds", &addr.to_string(), path, "flush"]);
    let mut client = flush_client(addr.into(), &pool, "cxl");
    rounds(&mut client, 0);
    let mut said = None;
    eventually("the other process is through as well", || {
        said = other.says_more();
        said.is_some()
    });
    assert_eq!(said.as_deref(), Some("cxl 0"));
    assert_eq!((rails(&client), client.counters().checksum_mismatches), (vec!["cxl".to_owned()], 0));
    other.stop();
    node.stop();
}

#[test]
fn a_node_of_a_pool_without_coherent_caches_gets_copies_from_other_memory_and_gives_them() {
    let (master, pool) = (master(), PoolFile::new("flush-copies"));
    let addr = master.rpc_addr();
    // Memory of the host first, which clients reach over TCP.
    let host = Node::start(NodeConfig::new("host", addr.into(), 8 << 20).fabrics(Fabrics::TCP)).unwrap();
    let mut client = flush_client(addr.into(), &pool, "cxl,tcp");
    for seed in 0..10 {
        assert!(
            client.put(format!("k{seed}").as_bytes(), &pattern(seed, 99_000 + seed as usize), &ONE).unwrap()
        );
    }
    let both = |config: &mut NodeConfig| config.engine.fabrics = "cxl,tcp".parse().unwrap();
    let mut copies = 0;
    let mut from = host;
    for (name, first) in [("a", 0), ("b", COUNT)] {
        let next = Node::start(with(flush_node(name, addr.into(), &pool, first), both)).unwrap();
        let drained = from.stop_drained(Duration::from_secs(30)).unwrap();
        assert_eq!((drained.blocks, next.status().copies), (0, 10), "{name}");
        let before = client.engine_stats().rails.iter().map(|rail| rail.bytes).sum::<u64>();
        for seed in 0..10 {
            let found = client.get(format!("k{seed}").as_bytes()).unwrap();
            assert_eq!(found, Some(pattern(seed, 99_000 + seed as usize)), "{name} {seed}");
        }
        assert!(client.engine_stats().rails.iter().map(|rail| rail.bytes).sum::<u64>() > before);
        copies += next.status().copies;
        from = next;
    }
    assert_eq!(copies, 20);
    assert_eq!(client.counters().checksum_mismatches, 0);
    // Who has not opened the pool does not reach its memory, and finds no wrong bytes.
    let mut outside = Client::connect(ClientConfig::new(addr.into()).fabrics(Fabrics::TCP)).unwrap();
    assert!(!matches!(outside.get(b"k1"), Ok(Some(_))));
    from.stop();
}

#[test]
fn objects_of_a_pool_without_coherent_caches_go_to_the_disk_of_their_node_and_come_back() {
    let config = MasterConfig { lease_ttl_ms: 200, demote_ahead: 0.5, ..MasterConfig::default() };
    let (master, pool) = (master_with(config), PoolFile::new("flush-disk"));
    let (addr, dir) = (master.rpc_addr(), tempfile::tempdir().unwrap());
    let node = Node::start(with(flush_node("a", addr.into(), &pool, 0), |config| {
        config.engine.fabrics = "cxl,shm,tcp".parse().unwrap();
        let disk = NodeDiskConfig { path: dir.path().join("disk"), bytes: Some(64 << 20) };
        config.disks = DiskList(vec![disk]);
    }))
    .unwrap();
    eventually("the disk is ready", || node.disks().iter().any(|disk| disk.ready));
    let mut client = flush_client(addr.into(), &pool, "cxl,shm,tcp");
    let value = |seed: u64| pattern(seed, 300_001 + seed as usize);
    let stats = |client: &mut Client| client.master().stats().unwrap();
    for seed in 0..60 {
        eventually("there is room", || {
            client.put(format!("k{seed}").as_bytes(), &value(seed), &ONE).unwrap_or(false)
        });
        // The oldest of what is in memory is on the disk before its space is needed.
        eventually("the disk keeps up", || {
            stats(&mut client).demotions_total >= (seed + 1).saturating_sub(20)
        });
    }
    assert!(stats(&mut client).evictions_to_disk_total > 0);
    for seed in 0..60 {
        let found = client.get(format!("k{seed}").as_bytes()).unwrap();
        assert_eq!(found, Some(value(seed)), "{seed}");
    }
    assert!(stats(&mut client).disk_hits_total > 0, "some were read from the disk");
    assert_eq!(client.counters().checksum_mismatches, 0);
    node.stop();
}

#[test]
fn a_master_that_has_lost_its_state_gives_the_page_of_a_killed_client_away_without_an_operator() {
    let options = FormatOptions { peers: 1, ..FormatOptions::default() };
    let pool = PoolFile::with("lost-state", options);
    let former = master();
    let addr = former.rpc_addr();
    let mut node = start_node("a", &addr, &pool, 0);
    let mut holder = Process::start("entry", &["client", &addr.to_string(), pool.0.to_str().unwrap()]);
    assert_eq!(holder.said(), "cxl");
    node.kill();
    drop(former);
    // Another master, which knows nothing. The client lives: its page stays with it.
    let next = master();
    let _node = Node::start(node_config("a", next.rpc_addr().into(), &pool.0, 0)).unwrap();
    let mut client = Client::connect(client_config(next.rpc_addr().into(), &pool.0)).unwrap();
    assert!(!client.put(b"k", &pattern(1, 10_000), &ONE).unwrap_or(false), "there is no page");
    holder.kill();
    eventually("its page is given away", || client.put(b"k", &pattern(1, 10_000), &ONE).unwrap_or(false));
    assert_eq!(client.get(b"k").unwrap(), Some(pattern(1, 10_000)));
    assert_eq!(rails(&client), ["cxl"]);
}

#[test]
fn a_tenant_has_no_more_pages_of_a_pool_than_it_may_and_gets_others_when_its_clients_have_left() {
    let config = MasterConfig { tenant_pool_pages_max: 1, ..MasterConfig::default() };
    let (master, pool) = (master_with(config), PoolFile::new("limited"));
    let addr = master.rpc_addr();
    let _node = Node::start(node_config("a", addr.into(), &pool.0, 0)).unwrap();
    let connect = || Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    let (mut first, mut second) = (connect(), connect());
    assert!(first.put(b"k", &pattern(1, 10_000), &ONE).unwrap());
    assert!(!matches!(second.get(b"k"), Ok(Some(_))));
    assert_eq!(first.get(b"k").unwrap(), Some(pattern(1, 10_000)));
    assert_eq!(pages(&addr).len(), 1);
    drop(first);
    eventually("the page is free", || matches!(second.get(b"k"), Ok(Some(_))));
    assert_eq!(rails(&second), ["cxl"]);
}

#[test]
fn settings_of_a_pool_that_cannot_be_used_are_refused_with_what_to_do() {
    let (master, pool) = (master(), PoolFile::new("settings"));
    let good = node_config("a", master.rpc_addr().into(), &pool.0, 0);
    let refused = |change: &dyn Fn(&mut NodeConfig)| {
        Node::start(with(good.clone(), change)).err().map(|error| error.to_string()).unwrap_or_default()
    };
    for (change, says) in [
        (&(|config: &mut NodeConfig| config.cxl.count = 0) as &dyn Fn(&mut NodeConfig), "cxl.count"),
        (&|config| config.cxl.pool = PathBuf::new(), "cxl.count"),
        (&|config| config.cxl.first = u32::MAX, "cxl.count"),
        (&|config| config.cxl.first = 1_000, "snowskin cxl inspect"),
        (&|config| config.cxl.pool = "/dev/shm/there-is-none".into(), "there-is-none"),
        (&|config| config.engine.fabrics = Fabrics::TCP, "engine.fabrics"),
    ] {
        let text = refused(change);
        assert!(text.contains(says), "{says}: {text}");
    }
    Node::start(good).unwrap().stop();
}

#[test]
fn the_bytes_of_a_thousand_rounds_over_the_same_extents_are_those_that_were_put_last() {
    // Leases end soon: removed objects make room.
    let config = MasterConfig { lease_ttl_ms: 200, ..MasterConfig::default() };
    let (master, pool) = (master_with(config), PoolFile::new("rounds"));
    let _node = Node::start(node_config("a", master.rpc_addr().into(), &pool.0, 0)).unwrap();
    let connect = || Client::connect(client_config(master.rpc_addr().into(), &pool.0)).unwrap();
    let (mut writer, mut reader) = (connect(), connect());
    for round in 0..1_000_u64 {
        let value = pattern(round, 1_000 + (round as usize * 7_919) % 300_000);
        eventually("there is room", || writer.put(b"k", &value, &ONE).unwrap_or(false));
        assert_eq!(reader.get(b"k").unwrap(), Some(value), "{round}");
        writer.remove(b"k", RemoveMode::Force).unwrap();
        assert_eq!(reader.get(b"k").unwrap(), None, "{round}");
    }
    assert_eq!((rails(&writer), rails(&reader)), (vec!["cxl".to_owned()], vec!["cxl".to_owned()]));
    assert_eq!(reader.counters().checksum_mismatches, 0);
}

#[test]
fn the_space_of_a_writer_that_stops_in_the_middle_is_not_reused_before_the_node_has_cut_it_off() {
    let (master, pool) = (master_with(MasterConfig::default()), PoolFile::new("half"));
    let addr = master.rpc_addr();
    let _node = Node::start(node_config("a", addr.into(), &pool.0, 0)).unwrap();
    let mut writer = Process::start("entry", &["half-put", &addr.to_string(), pool.0.to_str().unwrap()]);
    let mut client = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    let used = |client: &mut Client| client.master().stats().unwrap().used_bytes;
    assert!(used(&mut client) >= 2 << 20, "the half put holds its space");
    writer.signal("STOP");
    // Everything else is filled, several times over; what was put is read as it was.
    let fill = |client: &mut Client, seeds: std::ops::Range<u64>| {
        for seed in seeds {
            let (key, value) = (format!("fill-{seed}"), pattern(seed, 1 << 20));
            if client.put(key.as_bytes(), &value, &ONE).unwrap_or(false) {
                assert_eq!(client.get(key.as_bytes()).unwrap(), Some(value), "{seed}");
            }
        }
    };
    fill(&mut client, 0..20);
    assert_eq!(client.master().stats().unwrap().expulsions_total, 0, "it may go on");
    assert!(used(&mut client) >= 2 << 20);
    writer.kill();
    eventually("the node has cut the writer off", || client.master().stats().unwrap().expulsions_total == 1);
    eventually("its space is free", || client.master().stats().unwrap().quarantined_bytes == 0);
    fill(&mut client, 20..40);
    assert_eq!(client.get(b"half").unwrap(), None);
}

#[test]
fn pages_of_processes_that_have_ended_are_given_to_others_of_their_host_and_no_live_one_loses_its_own() {
    let (master, pool) =
        (master(), PoolFile::with("pages", FormatOptions { peers: 2, ..FormatOptions::default() }));
    let addr = master.rpc_addr();
    let _node = Node::start(node_config("a", addr.into(), &pool.0, 0)).unwrap();
    let mut stays = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
    assert!(stays.put(b"stays", b"here", &ONE).unwrap());
    for round in 0..6 {
        let mut other = Process::start("entry", &["client", &addr.to_string(), pool.0.to_str().unwrap()]);
        assert_eq!(other.said(), "cxl");
        // A third process has no page, and so no way to the memory.
        let mut third = Client::connect(client_config(addr.into(), &pool.0)).unwrap();
        assert_eq!(third.get(b"stays").unwrap(), None);
        if round % 2 == 0 {
            other.kill()
        } else {
            other.stop()
        }
        for seed in 0..20 {
            stays.remove(format!("k{seed}").as_bytes(), RemoveMode::Force).unwrap();
        }
        assert_eq!(stays.get(b"stays").unwrap(), Some(b"here".to_vec()));
    }
    let pages = pages(&addr);
    assert_eq!(pages.len(), 2, "{pages:?}");
    assert!(pages[1].2 >= 6, "{pages:?}");
    // An operator may free a page; one that there is not is an error.
    let mut rpc = RpcConnection::connect(addr.into(), RpcConfig::default()).unwrap();
    let pool = Pool::open(&pool.0, Coherence::Hardware, None).unwrap().superblock().uuid;
    let (slot, _, epoch) = pages[1];
    let mut free =
        |slot, epoch| rpc.call::<FreePage>(&PageFreed { pool, slot, epoch }, std::iter::empty()).is_ok();
    assert!(free(slot, epoch));
    assert!(!free(slot, epoch - 1) && !free(7, epoch));
}

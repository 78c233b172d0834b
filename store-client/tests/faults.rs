//! Real processes under load that are killed and stopped at any moment: every value that is read is right.
//!
//! Every value names its writer and the number of its put; all its bytes follow from these and from the key.
//! What the tests assert does not depend on how long something takes, only on what has happened.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{
    Process, be_node, client, eventually, fabrics, get_batch, master_at, master_with, node, own_host,
    pattern, put_batch, role, say, wait_for_parent,
};
use store_client::{Client, ClientConfig, PutOptions, RemoveMode, Store as _};
use store_core::MasterConfig;
use te_core::testkit::Rng;

const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
const KEYS: u64 = 200;
const HEAD_BYTES: usize = 16;
const LARGE: usize = 8 << 20;

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    let Some(role) = role() else { return };
    match role[0].as_str() {
        "node" => be_node(&role),
        "master" => be_master(role[1].parse().unwrap(), role.get(2).is_some()),
        "load" => be_load(&role),
        "writer" => be_writer(&role),
        "reader" => be_reader(&role),
        _ => {}
    }
}

/// All timeouts are short, except that of space whose writers do not answer.
fn quick() -> MasterConfig {
    MasterConfig {
        lease_ttl_ms: 300,
        node_ttl_ms: 600,
        put_start_discard_timeout_ms: 300,
        put_start_release_timeout_ms: 60_000,
        ..MasterConfig::default()
    }
}

fn start_node(name: &str, master: &dyn std::fmt::Display) -> Process {
    Process::start("entry", &["node", name, &master.to_string(), "auto"])
}

fn start_load(who: u64, master: &dyn std::fmt::Display) -> Process {
    let rail = if who.is_multiple_of(2) { "auto" } else { "tcp" };
    Process::start("entry", &["load", &who.to_string(), &master.to_string(), rail])
}

/// A patient master gives up silent nodes soon, and nothing else.
fn be_master(listen: SocketAddr, patient: bool) {
    let store =
        if patient { MasterConfig { node_ttl_ms: 2_000, ..MasterConfig::default() } } else { quick() };
    let master = master_at(listen, store);
    say(&master.rpc_addr().to_string());
    wait_for_parent();
    master.stop().unwrap();
}

fn connect(master: &str, rail: &str) -> Client {
    let mut config = ClientConfig::new(master.parse().unwrap()).fabrics(fabrics(rail));
    config.rpc.call_ms_max = 2_000;
    config.rpc.reconnect_ms_max = 100;
    Client::connect(config).unwrap()
}

/// Set when the parent closes the pipe.
fn parent_gone() -> Arc<AtomicBool> {
    let gone = Arc::new(AtomicBool::new(false));
    let reported = Arc::clone(&gone);
    std::thread::spawn(move || {
        wait_for_parent();
        reported.store(true, Ordering::Relaxed);
    });
    gone
}

/// Puts, gets and removes until the parent closes the pipe; a wrong byte makes it fail.
fn be_load(role: &[String]) {
    let who: u64 = role[1].parse().unwrap();
    let mut client = connect(&role[2], &role[3]);
    let gone = parent_gone();
    say("ready");
    // A former process may have had the same number.
    let life = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let mut rng = Rng::new(life);
    let (mut hits, mut reported) = (0, 0);
    for put in life.. {
        if gone.load(Ordering::Relaxed) {
            break;
        }
        let name = rng.below(KEYS);
        // Errors are the effect of the faults; only values that are read are judged.
        match rng.below(10) {
            0..4 => {
                let options = if rng.below(2) == 0 { ONE } else { TWO };
                let _ = client.put(&key(name), &value(name, who, put), &options);
            }
            4..6 => {
                let names: Vec<u64> = (0..8).map(|_| rng.below(KEYS)).collect();
                let keys: Vec<Vec<u8>> = names.iter().map(|name| key(*name)).collect();
                let refs: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
                for (name, got) in names.into_iter().zip(get_batch(&mut client, &refs)) {
                    hits += u64::from(is_right(name, got.ok().flatten()));
                }
            }
            6..9 => hits += u64::from(is_right(name, client.get(&key(name)).ok().flatten())),
            _ => drop(client.remove(&key(name), RemoveMode::forced(rng.below(2) == 0))),
        }
        // A batch may skip any number of hits.
        if hits >= reported + 100 {
            say("hits");
            reported = hits;
        }
    }
}

/// Puts large objects, each under its own key, until the parent closes the pipe.
fn be_writer(role: &[String]) {
    let mut client = connect(&role[1], &role[2]);
    let gone = parent_gone();
    // Made once, so that the writer is writing nearly all the time.
    let value = pattern(1_000, LARGE);
    say("ready");
    for name in 1_000.. {
        if gone.load(Ordering::Relaxed) {
            break;
        }
        say("puts");
        let _ = client.put(&key(name), &value, &ONE);
        let _ = client.remove(&key(name), RemoveMode::Force);
    }
}

/// Reads one large object again and again; reports each time that it was too late for its lease.
fn be_reader(role: &[String]) {
    let mut client = connect(&role[1], &role[2]);
    let gone = parent_gone();
    // Made once, so that the reader is reading nearly all the time.
    let wanted = pattern(7, LARGE);
    say("ready");
    let mut late = 0;
    while !gone.load(Ordering::Relaxed) {
        if let Ok(Some(value)) = client.get(b"large") {
            assert_eq!(value, wanted);
        }
        if client.counters().lease_misses > late {
            late = client.counters().lease_misses;
            say("late");
        }
    }
}

fn key(name: u64) -> Vec<u8> {
    format!("key-{name}").into_bytes()
}

fn value(name: u64, who: u64, put: u64) -> Vec<u8> {
    let seed = name.wrapping_mul(0x9e37_79b9) ^ who.rotate_left(40) ^ put.wrapping_mul(0x85eb_ca6b);
    let len = HEAD_BYTES + (seed % 100_000) as usize;
    let mut value = pattern(seed, len);
    value[..8].copy_from_slice(&who.to_le_bytes());
    value[8..HEAD_BYTES].copy_from_slice(&put.to_le_bytes());
    value
}

/// Whether there is a value; if so, it must be right.
fn is_right(name: u64, got: Option<Vec<u8>>) -> bool {
    let Some(got) = got else { return false };
    let word = |at: usize| u64::from_le_bytes(got[at..at + 8].try_into().unwrap());
    assert!(got == value(name, word(0), word(8)), "wrong bytes of key {name}");
    true
}

/// Reads every key; returns how many were found.
fn verify_all(client: &mut Client) -> usize {
    (0..KEYS).filter(|name| is_right(*name, client.get(&key(*name)).unwrap())).count()
}

/// Waits until this load has read something more.
fn reads_on(load: &Process) {
    while load.says_more().is_some() {}
    eventually("the load continues to read", || load.says_more().is_some());
}

#[test]
fn nodes_killed_under_load_cost_misses_and_never_a_wrong_byte() {
    let master = master_with(quick());
    let addr = master.rpc_addr();
    let _steady = node("steady", addr);
    let mut doomed = start_node("doomed", &addr);
    let mut loads: Vec<Process> = (0..3).map(|who| start_load(who, &addr)).collect();
    for _ in 0..4 {
        reads_on(&loads[1]);
        doomed.kill();
        // The dead node delays no other client: they continue before it is given up.
        reads_on(&loads[2]);
        doomed = start_node("doomed", &addr);
    }
    loads.iter_mut().for_each(Process::stop);
    let mut client = client(addr);
    assert!(verify_all(&mut client) > 0);
    assert_eq!(client.counters().checksum_mismatches, 0);
}

#[test]
fn clients_killed_in_mid_put_and_mid_get_leave_right_bytes_and_their_space_is_released() {
    // Not because of a timeout, but because their nodes confirm that the clients are gone.
    let store = MasterConfig { put_start_release_timeout_ms: 600_000, ..quick() };
    let master = master_with(store);
    let addr = master.rpc_addr();
    let _a = node("a", addr);
    let _b = node("b", addr);
    let mut steady = start_load(9, &addr);
    let mut loads: Vec<Process> = (0..2).map(|who| start_load(who, &addr)).collect();
    for round in 0..8_u64 {
        let who = round % 2;
        reads_on(&loads[who as usize]);
        loads[who as usize].kill();
        loads[who as usize] = start_load(who, &addr);
    }
    loads.iter_mut().for_each(Process::stop);
    reads_on(&steady);
    steady.stop();
    let mut client = client(addr);
    assert!(verify_all(&mut client) > 0);
    eventually("the space of the dead clients is released", || {
        let stats = client.master().stats().unwrap();
        stats.objects_processing == 0 && stats.quarantined_bytes == 0
    });
}

#[test]
fn a_node_stopped_for_longer_than_its_time_to_live_is_mounted_anew_with_empty_memory() {
    let master = master_with(quick());
    let addr = master.rpc_addr();
    let _steady = node("steady", addr);
    let paused = start_node("paused", &addr);
    let mut loads: Vec<Process> = (0..2).map(|who| start_load(who, &addr)).collect();
    let mut client = client(addr);
    let incarnation = |client: &mut Client| {
        let segments = client.master().segments().unwrap();
        segments.iter().find(|segment| segment.name == "paused").map(|segment| segment.incarnation)
    };
    for _ in 0..2 {
        // Under load its heartbeats may be late, and it may be given up without being stopped.
        let mut before = None;
        eventually("it is mounted", || {
            before = incarnation(&mut client);
            before.is_some()
        });
        let before = before.unwrap();
        paused.signal("STOP");
        eventually("the silent node is given up", || incarnation(&mut client).is_none());
        reads_on(&loads[0]);
        paused.signal("CONT");
        eventually("it is mounted anew", || incarnation(&mut client).is_some_and(|now| now > before));
        reads_on(&loads[1]);
    }
    loads.iter_mut().for_each(Process::stop);
    assert!(verify_all(&mut client) > 0);
    assert_eq!(client.counters().checksum_mismatches, 0);
}

/// A port for a master that is restarted, on a host that only this test uses.
fn free_address(host: u8) -> SocketAddr {
    TcpListener::bind(own_host(host)).unwrap().local_addr().unwrap()
}

#[test]
fn a_master_killed_under_load_is_restarted_and_all_processes_reconnect() {
    let addr = free_address(9);
    let start = || Process::start("entry", &["master", &addr.to_string()]);
    let mut master = start();
    let _a = start_node("a", &addr);
    let _b = start_node("b", &addr);
    let mut loads: Vec<Process> = (0..2).map(|who| start_load(who, &addr)).collect();
    for _ in 0..3 {
        reads_on(&loads[0]);
        master.kill();
        master = start();
        loads.iter().for_each(reads_on);
    }
    loads.iter_mut().for_each(Process::stop);
    let mut client = client(addr);
    eventually("both nodes are back", || client.master().stats().unwrap().segments == 2);
    assert!(verify_all(&mut client) > 0);
    assert_eq!(client.counters().checksum_mismatches, 0);
    master.stop();
}

/// Puts while a node is killed, and while another one is stopped: each put finds another place in the same
/// call.
fn puts_go_elsewhere(rail: &str) {
    let master = master_with(MasterConfig { node_ttl_ms: 60_000, ..MasterConfig::default() });
    let addr = master.rpc_addr();
    let start = |name| Process::start("entry", &["node", name, &addr.to_string(), rail]);
    let (mut killed, stopped, _steady) = (start("killed"), start("stopped"), start("steady"));
    let mut warm = connect(&addr.to_string(), rail);
    let put_all = |client: &mut Client, names: std::ops::Range<u64>| {
        for name in names {
            let value = value(name, 5, name);
            assert!(client.put(&key(name), &value, &ONE).unwrap(), "{rail} {name}");
            assert_eq!(client.get(&key(name)).unwrap().as_ref(), Some(&value), "{rail} {name}");
        }
    };
    put_all(&mut warm, 0..20);
    killed.kill();
    // A client that has used the node, and one that has not.
    put_all(&mut warm, 20..40);
    assert!(
        warm.master().stats().unwrap().segments_unreachable > 0,
        "{rail}: the master does not know that the segment cannot be reached"
    );
    put_all(&mut connect(&addr.to_string(), rail), 40..60);
    stopped.signal("STOP");
    put_all(&mut warm, 60..70);
    put_all(&mut connect(&addr.to_string(), rail), 70..80);
    // A batch of which some items had a place on the stopped node.
    let values: Vec<(Vec<u8>, Vec<u8>)> = (80..100).map(|name| (key(name), value(name, 5, name))).collect();
    let items: Vec<(&[u8], &[u8])> = values.iter().map(|(key, value)| (&key[..], &value[..])).collect();
    let mut fresh = connect(&addr.to_string(), rail);
    assert!(put_batch(&mut fresh, &items, &ONE).into_iter().all(|put| put.is_ok()), "{rail}");
    assert_eq!(fresh.counters().put_failures + warm.counters().put_failures, 0);
    stopped.signal("CONT");
}

#[test]
fn a_put_that_meets_a_dead_node_goes_elsewhere_in_the_same_call() {
    puts_go_elsewhere("tcp");
}

#[test]
fn a_put_that_meets_a_dead_node_goes_elsewhere_over_shared_memory_too() {
    puts_go_elsewhere("auto");
}

mod timing {
    //! Real time: processes are killed and stopped at different points of their work, and stay stopped until
    //! a lease, a window or the time to live of a node has ended.

    use super::*;

    #[test]
    fn space_of_writers_killed_in_mid_put_is_released_by_their_nodes() {
        for rail in ["tcp", "auto"] {
            let store = MasterConfig { put_start_release_timeout_ms: 600_000, ..quick() };
            let master = master_with(store);
            let addr = master.rpc_addr();
            let _node = node("a", addr);
            let mut client = client(addr);
            // Until some were killed in the middle of a put, as most are.
            let mut held = 0;
            for _ in 0..20 {
                let mut writer = Process::start("entry", &["writer", &addr.to_string(), rail]);
                eventually("it writes", || writer.says_more().is_some_and(|line| line == "puts"));
                std::thread::sleep(Duration::from_millis(3));
                writer.kill();
                let stats = client.master().stats().unwrap();
                held += u32::from(stats.objects_processing > 0 || stats.quarantined_bytes > 0);
                if held == 3 {
                    break;
                }
            }
            assert!(held > 0, "{rail}: no writer was killed in the middle of a put");
            eventually("the space of the dead writers is released", || {
                let stats = client.master().stats().unwrap();
                stats.objects_processing == 0 && stats.quarantined_bytes == 0
            });
            // All of the space, at the same time.
            for name in 0..3 {
                assert!(client.put(&key(name), &pattern(name, LARGE), &ONE).unwrap(), "{rail} {name}");
            }
            for name in 0..3 {
                assert_eq!(client.get(&key(name)).unwrap(), Some(pattern(name, LARGE)), "{rail} {name}");
            }
        }
    }

    /// Stops a writer at any moment, lets other clients take the space that they can get, resumes the writer,
    /// and returns the number of checksum mismatches.
    fn stop_writers(store: MasterConfig, rail: &str) -> u64 {
        let discard_ms = store.put_start_discard_timeout_ms;
        let release_ms = store.put_start_release_timeout_ms;
        let master = master_with(store);
        let addr = master.rpc_addr();
        // Room for three of its objects.
        let _node = node("a", addr);
        let mut writer = Process::start("entry", &["writer", &addr.to_string(), rail]);
        let mut client = client(addr);
        let large = |name: u64| (key(10_000 + name), pattern(name, LARGE));
        for round in 0..8 {
            while writer.says_more().is_some() {}
            eventually("it writes", || writer.says_more().is_some());
            writer.signal("STOP");
            // The space of its put is not given out while it may still write; after the release timeout it
            // is.
            let wait_ms = if release_ms < 10_000 { release_ms } else { discard_ms } + 50;
            std::thread::sleep(Duration::from_millis(wait_ms.into()));
            // All available space is given out repeatedly, including that of the stopped writer as soon as
            // the node has confirmed that the writer is gone. In every other round it is taken by many small
            // objects.
            for name in 0..KEYS {
                let _ = client.put(&key(name), &value(name, 77, name), &ONE);
            }
            for (key, value) in (0..6 * (round % 2)).map(large) {
                let _ = client.put(&key, &value, &ONE);
            }
            writer.signal("CONT");
            while writer.says_more().is_some() {}
            eventually("it continues", || writer.says_more().is_some());
            let read = (0..6).map(large).filter(|(key, value)| match client.get(key) {
                Ok(Some(got)) => {
                    assert!(got == *value, "bytes of another put under {key:?}");
                    true
                }
                _ => false,
            });
            assert!(read.count() + verify_all(&mut client) > 0);
            for name in (0..KEYS).chain(10_000..10_006) {
                let _ = client.remove(&key(name), RemoveMode::Force);
            }
        }
        writer.stop();
        client.counters().checksum_mismatches
    }

    #[test]
    fn bytes_of_a_writer_stopped_past_its_window_reach_no_other_object() {
        for rail in ["tcp", "auto"] {
            assert_eq!(stop_writers(quick(), rail), 0, "{rail}");
        }
    }

    #[test]
    fn bytes_of_a_writer_stopped_past_every_timeout_damage_no_other_object() {
        // The node cuts the writer off before its space is given to others; the writer then continues with
        // another engine.
        let store = MasterConfig { put_start_release_timeout_ms: 400, ..quick() };
        for rail in ["tcp", "auto"] {
            assert_eq!(stop_writers(store.clone(), rail), 0, "{rail}");
        }
    }

    #[test]
    fn a_reader_stopped_past_its_lease_has_a_miss() {
        let master = master_with(quick());
        let addr = master.rpc_addr();
        let _node = node("a", addr);
        let mut client = client(addr);
        let mut reader = Process::start("entry", &["reader", &addr.to_string(), "tcp"]);
        let mut tries = 0;
        eventually("a stopped reader is too late", || {
            let _ = client.put(b"large", &pattern(7, LARGE), &ONE);
            // At another point of its loop each time.
            tries += 1;
            std::thread::sleep(Duration::from_micros(10_000 + 1_300 * (tries % 16)));
            reader.signal("STOP");
            // Its lease expires, and the space is given to others.
            std::thread::sleep(Duration::from_millis(400));
            let _ = client.remove(b"large", RemoveMode::Force);
            for name in 0..4 {
                let _ = client.put(&key(name), &pattern(name, LARGE), &ONE);
                let _ = client.remove(&key(name), RemoveMode::Force);
            }
            reader.signal("CONT");
            std::thread::sleep(Duration::from_millis(50));
            reader.says_more().is_some()
        });
        reader.stop();
    }

    #[test]
    fn a_master_stopped_for_longer_than_nodes_live_forgets_nothing() {
        let addr = free_address(10);
        // Every put and every get must succeed, even on a busy machine.
        let mut master = Process::start("entry", &["master", &addr.to_string(), "patient"]);
        let _a = start_node("a", &addr);
        let mut client = client(addr);
        for name in 0..KEYS {
            assert!(client.put(&key(name), &value(name, 1, name), &ONE).unwrap());
        }
        master.signal("STOP");
        // The node sends heartbeats all the time; the stopped master does not read them.
        std::thread::sleep(Duration::from_millis(3_500));
        master.signal("CONT");
        assert_eq!(verify_all(&mut client), KEYS as usize);
        assert_eq!(client.master().stats().unwrap().nodes_expired_total, 0);
        master.stop();
    }
}

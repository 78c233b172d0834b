//! Shared directories: what no longer fits into memory is in packs, which readers read without their node.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use common::{MIB, Process, client_over, eventually, master_with, pattern, role, say, wait_for_parent, with};
use store_client::disk::{Damage, PackDirectory, PackFault, inspect, verify};
use store_client::{
    Client, ClientConfig, DiskKind, DiskList, Fabrics, Node, NodeConfig, NodeDiskConfig, PutOptions,
    RemoveMode, Stats, Store as _,
};
use store_core::MasterConfig;
use store_master::MasterHandle;

const OBJECT: usize = 256 << 10;

fn config() -> MasterConfig {
    let config = MasterConfig {
        lease_ttl_ms: 2_000,
        lease_guard_ms: 0,
        demote_ahead: 0.3,
        node_ttl_ms: 2_000,
        ..MasterConfig::default()
    };
    with(config, |it| it.tasks.bad_reports_min = 1)
}

fn node_config(name: &str, master: SocketAddr, root: &Path, bytes: u64) -> NodeConfig {
    let shared = NodeDiskConfig { path: root.to_owned(), bytes: Some(bytes) };
    with(NodeConfig::new(name, master.into(), 8 * MIB), |it| {
        it.shared = DiskList(vec![shared]);
        it.shared_adopt_ms = 500;
        it.stage.memory_bytes = 8 * MIB;
    })
}

fn is_ready(node: &Node) -> bool {
    node.disks().iter().any(|disk| disk.ready && !disk.adopted)
}

fn start(name: &str, master: &MasterHandle, root: &Path) -> Node {
    let node = Node::start(node_config(name, master.rpc_addr(), root, 64 * MIB)).unwrap();
    eventually("its directory is ready", || is_ready(&node));
    node
}

/// The role `packs NAME MASTER ROOT BYTES`: a node in a process of its own.
#[test]
fn be_a_node_with_packs() {
    let Some(role) = role() else { return };
    let (master, bytes) = (role[2].parse().unwrap(), role[4].parse().unwrap());
    let node = Node::start(node_config(&role[1], master, Path::new(&role[3]), bytes)).unwrap();
    common::eventually("its directory is ready", || is_ready(&node));
    say(node.endpoint());
    wait_for_parent();
    node.stop();
}

fn process(name: &str, master: &MasterHandle, root: &Path) -> Process {
    let (master, bytes) = (master.rpc_addr().to_string(), (64 * MIB).to_string());
    Process::start("be_a_node_with_packs", &["packs", name, &master, root.to_str().unwrap(), &bytes])
}

fn value(number: usize) -> Vec<u8> {
    pattern(number as u64, OBJECT)
}

fn key(number: usize) -> Vec<u8> {
    format!("object-{number}").into_bytes()
}

fn stats(client: &mut Client) -> Stats {
    client.master().stats().unwrap()
}

/// Puts more than fits into memory, which is empty, slowly enough for the directory.
fn fill(client: &mut Client, numbers: std::ops::Range<usize>) {
    let (first, before) = (numbers.start, stats(client).demotions_total);
    for number in numbers {
        eventually("there is room", || {
            client.put(&key(number), &value(number), &PutOptions::DEFAULT).unwrap_or(false)
        });
        let expected = before + (number + 1 - first).saturating_sub(24) as u64;
        eventually("the directory keeps up", || stats(client).demotions_total >= expected);
    }
}

fn read_all(client: &mut Client, numbers: std::ops::Range<usize>) -> usize {
    let mut found = 0;
    for number in numbers {
        if let Some(read) = client.get(&key(number)).unwrap() {
            assert!(read == value(number), "{number}");
            found += 1;
        }
    }
    found
}

/// The directory of the only node.
fn directory(root: &Path) -> PathBuf {
    let found = PackDirectory::list(&root.join("default"));
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

/// Its packs, oldest first.
fn packs(root: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory(root)).unwrap().map(|entry| entry.unwrap().path());
    let is_pack = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "pack");
    let mut found: Vec<PathBuf> = entries.filter(is_pack).collect();
    found.sort();
    found
}

#[test]
fn packs_are_read_while_their_node_is_there_and_after_it_was_killed_and_by_a_successor() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let mut node = process("a", &master, root.path());
    fill(&mut client, 0..80);
    let objects = stats(&mut client).disk_objects as usize;
    assert!(objects >= 40, "{objects}");
    assert_eq!(read_all(&mut client, 0..80), 80, "{:?}", stats(&mut client));
    let direct = client.counters().shared_hits;
    assert!(direct >= 20 && direct == client.counters().disk_hits, "{:?}", client.counters());

    node.kill();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    client.remove(&key(1), RemoveMode::Force).unwrap();
    let is_there = |number: &usize| client.get(&key(*number)).unwrap().is_some();
    let on_disk: Vec<usize> = (0..objects).filter(is_there).collect();
    assert!(on_disk.len() + 8 >= objects, "{} of {objects}", on_disk.len());
    assert!(client.counters().shared_hits > direct);
    // A client that never knew the node.
    let mut other = client_over(master.rpc_addr(), Fabrics::default());
    for number in &on_disk {
        assert!(other.get(&key(*number)).unwrap() == Some(value(*number)), "{number}");
    }
    assert_eq!(other.counters().shared_hits, on_disk.len() as u64);
    assert_eq!(other.get(&key(1)).unwrap(), None, "it was removed");
    // A client that has the directory elsewhere says where; here it is nowhere, and no node serves it.
    let blind = with(ClientConfig::new(master.rpc_addr().into()), |it| it.shared = "/nowhere".into());
    let mut blind = Client::connect(blind).unwrap();
    assert_eq!(blind.get(&key(on_disk[0])).unwrap(), None);
    assert!(other.get(&key(on_disk[0])).unwrap().is_some(), "which is no reason to drop anything");

    // Another node takes the directory over. What was removed meanwhile stays removed.
    client.remove(&key(2), RemoveMode::Force).unwrap();
    let successor = start("b", &master, root.path());
    let adopted = |node: &Node| node.disks().iter().filter(|disk| disk.adopted && disk.ready).count();
    eventually("the directory is adopted", || adopted(&successor) == 1);
    assert!(successor.disks().iter().all(|disk| disk.kind == DiskKind::Shared));
    eventually("nothing is away", || stats(&mut client).disks_away == 0);
    for number in &on_disk {
        let expected = (*number > 2 || *number == 0).then(|| value(*number));
        assert!(other.get(&key(*number)).unwrap() == expected, "{number}");
    }
    eventually("the removals are confirmed", || stats(&mut client).disk_tombstones == 0);
    successor.stop();
    // The first node is back. Its directory belongs to another one that is stopped: it gets one of its own,
    // and adopts the others.
    let node = start("a", &master, root.path());
    eventually("both directories are adopted", || adopted(&node) == 2);
    for number in [1, 2] {
        assert_eq!(client.get(&key(number)).unwrap(), None, "nor after another adoption");
    }
    let again = on_disk.iter().filter(|number| client.get(&key(**number)).unwrap().is_some()).count();
    assert!(again + 2 >= on_disk.len(), "{again} of {}", on_disk.len());
    node.stop();
}

#[test]
fn after_a_restart_of_everything_packs_are_announced_and_removed_objects_do_not_come_back() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let node = start("a", &master, root.path());
    fill(&mut client, 0..80);
    let objects = stats(&mut client).disk_objects as usize;
    client.remove(&key(3), RemoveMode::Force).unwrap();
    eventually("the removal is confirmed", || stats(&mut client).disk_tombstones == 0);
    node.stop();
    drop((client, master));
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let node = start("a", &master, root.path());
    let found = read_all(&mut client, 0..80);
    assert!(found + 2 >= objects && objects >= 40, "{found} of {objects}");
    assert_eq!(client.get(&key(3)).unwrap(), None);
    // It writes on, and the oldest packs go when the room is used up.
    fill(&mut client, 80..400);
    assert!(packs(root.path()).len() <= 64);
    assert!(stats(&mut client).disk_reclaimed_total > 0);
    let bytes: u64 =
        fs::read_dir(directory(root.path())).unwrap().map(|it| it.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes <= 65 * MIB, "{bytes}");
    node.stop();
}

#[test]
fn a_flipped_bit_and_a_missing_pack_are_misses_whose_replicas_are_dropped() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let mut node = process("a", &master, root.path());
    fill(&mut client, 0..80);
    node.kill();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    let packs = packs(root.path());
    assert!(packs.len() >= 8, "{}", packs.len());
    // In the first images of the first pack, and all of the third.
    let damaged = fs::OpenOptions::new().write(true).read(true).open(&packs[0]).unwrap();
    let mut byte = [0];
    damaged.read_exact_at(&mut byte, 4_096 + 1_000).unwrap();
    damaged.write_all_at(&[byte[0] ^ 1], 4_096 + 1_000).unwrap();
    fs::remove_file(&packs[2]).unwrap();
    let before = stats(&mut client).disk_objects;
    let mut reader = client_over(master.rpc_addr(), Fabrics::default());
    let found = read_all(&mut reader, 0..before as usize);
    let counters = reader.counters();
    assert_eq!(counters.checksum_mismatches, 1, "{counters:?}");
    assert!(counters.shared_lost >= 1, "{counters:?}");
    let lost = counters.checksum_mismatches + counters.shared_lost;
    let after = stats(&mut client);
    assert_eq!(after.disk_objects + lost, before, "{after:?}");
    assert_eq!(after.disk_lost_total, lost);
    assert!(found as u64 + lost + 8 >= before, "{found}");
    // They are known to be gone now.
    assert_eq!(read_all(&mut client, 0..before as usize), found);
    assert_eq!(client.counters().checksum_mismatches + client.counters().shared_lost, 0);
}

#[test]
fn files_that_are_no_packs_are_refused_by_name_and_nothing_else_is_lost() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let node = start("a", &master, root.path());
    fill(&mut client, 0..80);
    node.stop();
    eventually("the master notices", || stats(&mut client).disks_away == 1);
    let known = read_all(&mut client, 0..80);
    let path = directory(root.path());
    let intact = inspect(&PackDirectory::open_to_read(&path).unwrap()).unwrap();
    assert!(intact.damage.is_empty() && intact.objects as usize >= known && known >= 40, "{intact:?}");
    let verified =
        verify(&PackDirectory::open_to_read(&path).unwrap(), |_| std::ops::ControlFlow::Continue(()));
    assert_eq!(verified.unwrap().damaged, 0);

    let packs = packs(root.path());
    let bytes = fs::read(&packs[0]).unwrap();
    // One is cut, one has a later version, one belongs elsewhere, and one is something else.
    let file = fs::OpenOptions::new().write(true).open(&packs[0]).unwrap();
    file.set_len(bytes.len() as u64 / 2).unwrap();
    let later = path.join("0000000000100000.pack");
    let mut other = bytes.clone();
    other[8] = 9;
    other.truncate(bytes.len() - 4_096);
    fs::write(&later, &other).unwrap();
    other[8..10].copy_from_slice(&bytes[8..10]);
    other[16] ^= 1;
    let elsewhere = path.join("0000000000100001.pack");
    fs::write(&elsewhere, &other).unwrap();
    let foreign = path.join("0000000000100002.pack");
    fs::write(&foreign, vec![7; 10_000]).unwrap();
    let renamed = path.join("0000000000100003.pack");
    fs::copy(&packs[1], &renamed).unwrap();

    let opened = PackDirectory::open_to_read(&path).unwrap();
    let refused: Vec<_> = opened.refused().iter().map(|it| (it.path.clone(), it.why)).collect();
    let expected = [
        (packs[0].clone(), PackFault::Cut),
        (later, PackFault::Version(9)),
        (elsewhere, PackFault::OtherDirectory),
        (foreign, PackFault::Foreign),
        (renamed, PackFault::Renamed),
    ];
    assert_eq!(refused, expected);
    let said = opened.refused()[1].to_string();
    assert!(said.contains("version 9"), "{said}");
    let all = |_| std::ops::ControlFlow::Continue(());
    let verified = verify(&opened, all).unwrap();
    let sound = verified.objects - verified.damaged;
    assert!(sound < intact.objects && sound + 4 >= intact.objects, "{verified:?}");
    let missing = |damage: &Damage| matches!(damage, Damage::Missing { .. });
    assert!(!verified.survey.damage.iter().any(missing), "{:?}", verified.survey.damage);

    let node = start("a", &master, root.path());
    assert_eq!(node.disks()[0].refused, 4);
    let found = read_all(&mut client, 0..80);
    assert!(found < known && found + 4 >= known, "{found} of {known}");
    assert!(expected.iter().all(|(path, _)| path.exists()), "they are left as they are");
    assert!(packs[0].exists(), "what is intact in the first was kept");
    node.stop();
}

#[test]
fn puts_go_on_when_the_directory_is_full() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let (address, bytes) = (master.rpc_addr().to_string(), (1_024 * MIB).to_string());
    // No file becomes longer than two thirds of an extent: as with a quota, writes fail in the middle of it.
    let role = ["packs", "a", &address, root.path().to_str().unwrap(), &bytes];
    let mut node = Process::start_limited("be_a_node_with_packs", &role, 10 * MIB);
    let mut puts = 0;
    while puts < 150 || stats(&mut client).demotions_failed_total == 0 {
        assert!(puts < 5_000, "nothing was refused for lack of room: {:?}", stats(&mut client));
        eventually("a put goes on", || {
            client.put(&key(puts), &value(puts), &PutOptions::DEFAULT).unwrap_or(false)
        });
        assert!(client.get(&key(puts)).unwrap() == Some(value(puts)), "{puts}");
        puts += 1;
    }
    for number in puts..puts + 100 {
        eventually("a put goes on afterwards", || {
            client.put(&key(number), &value(number), &PutOptions::DEFAULT).unwrap_or(false)
        });
    }
    node.stop();
    // With room, slots in which writes failed are used again.
    let node = start("a", &master, root.path());
    let before = stats(&mut client).demotions_total;
    fill(&mut client, 10_000..10_080);
    assert!(stats(&mut client).demotions_total >= before + 50);
    node.stop();
}

#[test]
fn a_second_writer_is_told_who_writes() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let node = start("first", &master, root.path());
    let error = PackDirectory::open(&directory(root.path())).unwrap_err().to_string();
    assert!(error.contains("node first") && error.contains("writes to this directory"), "{error}");
    // Another node does not take what is not free, whatever it waits.
    let other = start("other", &master, root.path());
    // timing: longer than a node waits before it takes a directory.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(other.disks().len(), 1);
    assert_eq!(PackDirectory::owner_of(node.disks()[0].path.as_path()), "first");
    assert!(node.disks()[0].ready);
    let missing = node_config("third", master.rpc_addr(), &root.path().join("not-mounted"), MIB);
    let error = Node::start(missing).err().unwrap().to_string();
    assert!(error.contains("not-mounted"), "{error}");
    other.stop();
    node.stop();
}

#[test]
fn an_owner_that_was_replaced_while_it_was_stopped_writes_nothing_more() {
    let root = tempfile::tempdir().unwrap();
    let master = master_with(config());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let node = process("a", &master, root.path());
    fill(&mut client, 0..60);
    node.signal("STOP");
    let path = directory(root.path());
    // As on a file system that carries no locks: the successor has a lock file of its own.
    fs::remove_file(path.join("lock")).unwrap();
    fs::write(path.join("lock"), b"").unwrap();
    eventually("the master gives it up", || stats(&mut client).disks_away == 1);
    let successor = start("b", &master, root.path());
    let adopted = || successor.disks().iter().any(|disk| disk.adopted && disk.ready);
    eventually("the directory is adopted", adopted);
    let list = || {
        let mut names: Vec<_> =
            fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = list();
    let superblock = fs::read(path.join("superblock")).unwrap();
    node.signal("CONT");
    // timing: what the former owner might do, it does by then.
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert_eq!(PackDirectory::owner_of(&path), "b");
    assert_eq!((list(), fs::read(path.join("superblock")).unwrap()), (before, superblock));
    assert_eq!(read_all(&mut client, 0..20), 20);
    drop(node);
    successor.stop();
}

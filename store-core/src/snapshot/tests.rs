//! Every part of the state, and every byte of it, is in a snapshot for a reason: without it the digest is
//! another.

use alloc::format;
use alloc::vec::Vec;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Failed, Put, Take};
use crate::message::{
    Adoption, DiskProof, Existing, FetchDisk, FetchRequest, FoundObject, Inherit, MountDisk, MountSegment,
    NodeProof, Pin, PutOptions, PutRequest, RemoveMode, Retention, SegmentOrder, SegmentState, TenantSetting,
    WriterState,
};
use crate::{
    AllocatorKind, ChangeHow, ConfigChange, ConfigChanges, EvictionPolicy, Incarnation, Instant, Key, Master,
    MasterConfig, NodeId, Place, ReplicationConfig, ReplicationMode, TenantConfig, TenantTag,
};

const NAMES: [&str; 16] = [
    "settings",
    "secrets and what the start chose",
    "changed settings",
    "tenants",
    "segments",
    "objects",
    "shelf",
    "disks and promotions",
    "pending release",
    "writers",
    "nodes",
    "counters",
    "numbers",
    "wall time and eviction",
    "tasks, drains, hot objects",
    "suspects, ended upserts, lease floor",
];
const COUNTERS: usize = 11;

/// The values one by one, in postcard.
#[derive(Clone, Default)]
struct Parts(Vec<Vec<u8>>);

impl Put for Parts {
    fn put(&mut self, value: &impl Serialize) -> Result<(), Failed> {
        self.0.push(postcard::to_allocvec(value).map_err(|_| Failed)?);
        Ok(())
    }
}

struct Taking<'a>(core::slice::Iter<'a, Vec<u8>>);

impl Take for Taking<'_> {
    fn take<T: DeserializeOwned>(&mut self) -> Result<T, Failed> {
        let part = self.0.next().ok_or(Failed)?;
        match postcard::take_from_bytes(part) {
            Ok((value, [])) => Ok(value),
            _ => Err(Failed),
        }
    }
}

impl Parts {
    fn of(master: &Master) -> Self {
        let mut parts = Self::default();
        assert!(master.save(&mut parts).is_ok());
        assert_eq!(parts.0.len(), NAMES.len());
        parts
    }

    fn load(&self) -> Option<Master> {
        Master::load(&mut Taking(self.0.iter())).ok()?.ok()
    }
}

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn empty(policy: EvictionPolicy, allocator: AllocatorKind) -> Master {
    Master::new(MasterConfig {
        eviction: policy,
        allocator,
        multi_tenants: true,
        admin_secret: "admin".into(),
        cluster_secret: "cluster".into(),
        tenants: alloc::vec![
            TenantConfig::default(),
            TenantConfig { name: "a".into(), secret: "of a".into(), ..TenantConfig::default() },
        ],
        tenant_default: Some(TenantConfig { secret: "of all".into(), ..TenantConfig::default() }),
        handle_key: [3, 4],
        started_wall_ms: 1_000_000,
        hash_seed: 7,
        epoch: 5,
        replication: ReplicationConfig { mode: ReplicationMode::Enforce, ..ReplicationConfig::default() },
        ..MasterConfig::default()
    })
    .unwrap()
}

/// A master in which everything has happened.
fn eventful(policy: EvictionPolicy, allocator: AllocatorKind) -> Master {
    let mut master = empty(policy, allocator);
    let mount = |node: u64, name, incarnation| MountSegment {
        node: NodeId::new(node),
        incarnation: Incarnation::new(incarnation),
        key: 9 + node,
        name,
        endpoint: "host:1",
        len: 1 << 20,
        lineage: 5,
        ..MountSegment::default()
    };
    let nodes = [(1, "n1"), (2, "n2"), (3, "n3")];
    let segments = nodes
        .map(|(node, name)| master.mount(at(1), &mount(node, name, 1)).unwrap().mounted().unwrap().segment);
    let request = |options, writer, nonce| PutRequest { nonce, options, writer };
    let put = |master: &mut Master, ms, key: &str, len, options, ends: bool| {
        let start = request(options, 77, 5);
        let start = master.put_start_in(at(ms), key.as_bytes(), len, &start, Place::ALONE).unwrap();
        if ends {
            master.put_end(at(ms), key.as_bytes(), start.generation, 3).unwrap();
        }
        start
    };
    let two = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
    let kept = |retention| PutOptions { retention, ..PutOptions::DEFAULT };
    for object in 0..40 {
        put(&mut master, 2, &format!("object {object}, whose key is not short at all"), 20_000, two, true);
    }
    let _ = put(&mut master, 3, "unfinished", 5_000, two, false);
    let given_up = put(&mut master, 3, "given up", 5_000, two, false);
    master.put_revoke(at(3), &b"given up"[..], given_up.generation, WriterState::MayWrite).unwrap();
    for (key, retention) in [
        ("soft", Retention { pin: Pin::Soft, ..Retention::DEFAULT }),
        ("hard", Retention { pin: Pin::Hard, ..Retention::DEFAULT }),
        ("mortal", Retention { ttl_ms: Some(5_000), ..Retention::DEFAULT }),
        ("member 1", Retention { group: Some(8), ..Retention::DEFAULT }),
        ("member 2", Retention { group: Some(8), ..Retention::DEFAULT }),
    ] {
        put(&mut master, 4, key, 3_000, kept(retention), true);
    }
    for _ in 0..3 {
        let _ = master.get(at(5), &b"soft"[..]).unwrap();
    }
    let _ = master.get(at(5), &b"member 1"[..]).unwrap();
    let _ = master.get(at(5), &b"object 7, whose key is not short at all"[..]).unwrap();
    master.remove(at(6), &b"object 7, whose key is not short at all"[..], RemoveMode::Force).unwrap();
    let replace = PutOptions { existing: Existing::Replace(Inherit::default()), ..PutOptions::DEFAULT };
    put(&mut master, 7, "soft", 4_000, replace, false);
    let ended = put(&mut master, 7, "hard", 4_000, replace, true);
    assert!(ended.generation > given_up.generation);
    // More than fits: something is evicted, and remembered.
    for object in 0..200 {
        let key = format!("more {object}");
        let Ok(start) = master.put_start(at(8), key.as_bytes(), 30_000, &PutOptions::DEFAULT) else {
            continue;
        };
        master.put_end(at(8), key.as_bytes(), start.generation, 3).unwrap();
    }
    assert!(master.stats().evictions_total > 50);
    let order = SegmentOrder { segment: segments[2], state: SegmentState::Draining };
    master.order_segment(at(9), &order).unwrap();
    master.handle_timeout(at(9));
    master.report_unreachable(at(9), segments[0]).unwrap();
    let setting = TenantSetting { name: "b", quota_bytes: Some(1 << 20), ..TenantSetting::default() };
    master.set_tenant(&setting).unwrap();
    master.set_wall_ms(at(9), 2_000_000);
    let changes = ConfigChanges { disk_away_ms: Some(700_000), ..ConfigChanges::default() };
    master.change_config(at(9), &ConfigChange { how: ChangeHow::Set, changes }).unwrap();
    on_disks(&mut master);
    master
}

/// A disk with objects that are read, removed, written and waited for.
fn on_disks(master: &mut Master) {
    let mount = MountDisk {
        shared: "",
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        key: 10,
        lineage: 5,
        uuid: [6; 16],
        bytes: 1 << 30,
        extent_bytes: 1 << 20,
        endpoint: "host:1",
        stage: "host:2",
        ..MountDisk::default()
    };
    let disk = master.mount_disk(at(9), &mount).unwrap().disk;
    let node = NodeProof { node: NodeId::new(1), key: 10 };
    let proof = DiskProof { node, disk };
    let keys: [&[u8]; 3] = [b"on disk", b"on disk, whose key is not short at all", b"removed"];
    for (number, key) in keys.into_iter().enumerate() {
        let tenant = TenantTag::of("default");
        let (generation, locator) = ((5 << 32) + 10_000 + number as u64, (number as u64 + 1) << 20);
        let found = FoundObject { tenant, key: Key(key), generation, len: 5_000, crc32c: 7, locator };
        assert_eq!(master.adopt(&proof, &found), Ok(Adoption::Adopted));
    }
    master.disk_ready(&proof).unwrap();
    master.remove(at(9), keys[2], RemoveMode::Force).unwrap();
    let fetch =
        FetchRequest { node: NodeId::new(1), incarnation: Incarnation::new(1), count_max: 2, key: 10 };
    let orders = master.fetch_disk(at(9), &FetchDisk { fetch, disk, bytes_max: 1 << 20 }).unwrap();
    assert!(orders.len() > 1, "a removal, and something to write");
    // Once: twice would begin a promotion.
    let _ = master.get(at(9), keys[0]).unwrap();
}

fn all() -> impl Iterator<Item = (EvictionPolicy, AllocatorKind)> {
    EvictionPolicy::ALL.iter().flat_map(|policy| AllocatorKind::ALL.iter().map(move |kind| (*policy, *kind)))
}

#[test]
fn what_was_saved_is_loaded_whatever_the_policy_and_the_allocator() {
    for (policy, kind) in all() {
        let master = eventful(policy, kind);
        let parts = Parts::of(&master);
        let mut loaded = parts.load().unwrap();
        assert_eq!(loaded.digest(), master.digest(), "{policy} {kind}");
        assert_eq!(loaded.stats().object_bytes, master.stats().object_bytes);
        assert_eq!(loaded.poll_timeout(), master.poll_timeout());
        assert!(Parts::of(&loaded).0 == parts.0, "it is saved as it was");
        let mut master = master;
        let there = (0..200).filter(|object| {
            let key = format!("more {object}");
            let there = master.exists(key.as_bytes());
            assert_eq!(loaded.exists(key.as_bytes()), there, "{key}");
            there
        });
        assert!(there.count() > 20 && !loaded.exists(&b"no such key"[..]));
    }
}

#[test]
fn other_settings_are_taken_and_nothing_is_lost() {
    for (policy, kind) in all() {
        let mut master = eventful(policy, kind);
        let before = master.stats();
        // As it was before one of them was changed.
        let disk_away_ms = empty(policy, kind).config().disk_away_ms;
        let config = MasterConfig { disk_away_ms, ..master.config().clone() };
        assert_eq!(master.reconfigure(at(10), config.clone()), Ok(false));
        let fixed = MasterConfig { multi_tenants: false, tenants: Vec::new(), ..config.clone() };
        assert!(master.reconfigure(at(10), fixed).is_err());
        for eviction in EvictionPolicy::ALL {
            let changed = MasterConfig {
                eviction: *eviction,
                lease_ttl_ms: 50,
                node_ttl_ms: 900,
                epoch: 99,
                hash_seed: 99,
                ..config.clone()
            };
            assert_eq!(master.reconfigure(at(10), changed), Ok(true), "{policy} to {eviction}");
            assert_eq!((master.config().epoch, master.config().hash_seed), (5, 7));
            let after = master.stats();
            assert_eq!((after.objects, after.used_bytes), (before.objects, before.used_bytes));
        }
        // Leases that were granted for longer still hold: the space of an object that is removed comes back
        // later.
        master.took_over(at(10), false, core::iter::empty());
        let used = |master: &Master| master.stats().used_bytes;
        let (then, key) = (used(&master), b"member 1");
        master.remove(at(11), &key[..], RemoveMode::Force).unwrap();
        master.handle_timeout(at(800));
        assert_eq!(used(&master), then, "{policy} {kind}");
        // Everything that is evicted one by one was in the new order.
        let key = |object: u32| format!("late {object}");
        for object in 0..300 {
            let Ok(start) = master.put_start(at(7_000), key(object).as_bytes(), 30_000, &PutOptions::DEFAULT)
            else {
                continue;
            };
            master.put_end(at(7_000), key(object).as_bytes(), start.generation, 3).unwrap();
        }
        assert!(master.exists(key(299).as_bytes()), "{policy} {kind}");
    }
}

#[test]
fn a_snapshot_without_one_of_its_parts_is_noticed() {
    let (policy, kind) = (EvictionPolicy::default(), AllocatorKind::default());
    let master = eventful(policy, kind);
    let config = empty(policy, kind).config().clone();
    let other = MasterConfig { slow_start_ms: 1, admin_secret: Default::default(), ..config };
    let other = Master::new(other).unwrap();
    let (whole, without) = (Parts::of(&master), Parts::of(&other));
    for (part, name) in NAMES.into_iter().enumerate() {
        assert!(whole.0[part] != without.0[part], "there is nothing in {name}");
        let mut mutant = whole.clone();
        mutant.0[part].clone_from(&without.0[part]);
        let noticed = mutant.load().is_none_or(|loaded| loaded.digest() != master.digest());
        assert_eq!(noticed, part != COUNTERS, "{name}");
    }
}

#[test]
fn a_snapshot_in_which_a_byte_of_a_small_part_is_another_is_noticed() {
    let master = eventful(EvictionPolicy::default(), AllocatorKind::default());
    let whole = Parts::of(&master);
    let digest = master.digest();
    // Secrets do not print, so the settings and the tenants are compared as they are saved, above.
    for part in [2, 6, 7, 8, 9, 10, 12, 13, 15] {
        for byte in 0..whole.0[part].len() {
            let mut mutant = whole.clone();
            mutant.0[part][byte] ^= 1;
            if let Some(loaded) = mutant.load() {
                assert_ne!(loaded.digest(), digest, "byte {byte} of {}", NAMES[part]);
            }
        }
    }
}

//! Master memory per object, measured at the allocator and not estimated, and that it is freed.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, reason = "a counting global allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use store_core::message::*;
use store_core::{
    AllocatorKind, ErrorCode, Frame, Incarnation, Key, Master, MasterConfig, NodeId, Session, TenantTag,
};
use te_core::Instant;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system allocator; the count beside it touches no memory that is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const BYTES_PER_OBJECT_MAX: f64 = 200.0;
/// The same for an object that is in memory and on a disk.
const BYTES_IN_BOTH_MAX: f64 = 250.0;

/// A master with room for `objects` objects. The tests count all allocations of the process, so they run one
/// after the other: drop the guard last.
fn master(objects: u64, kind: AllocatorKind) -> (MutexGuard<'static, ()>, Master, usize) {
    master_with(3, objects, MasterConfig { allocator: kind, ..MasterConfig::default() })
}

/// The same with so many nodes, each of which has room for all objects.
fn master_with(nodes: u64, objects: u64, config: MasterConfig) -> (MutexGuard<'static, ()>, Master, usize) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let before = LIVE.load(Ordering::Relaxed);
    let mut master = Master::new(config).unwrap();
    for node in 1..=nodes {
        let name = format!("node-{node}");
        let segment = MountSegment {
            node: NodeId::new(node),
            incarnation: Incarnation::new(1),
            name: &name,
            endpoint: "127.0.0.1:9000",
            len: objects * 4096,
            ..MountSegment::default()
        };
        master.mount(Instant::ZERO, &segment).unwrap();
    }
    (turn, master, before)
}

fn put(master: &mut Master, object: u64, options: &PutOptions) {
    let key = format!("{object:032x}");
    let put = master.put_start(Instant::ZERO, key.as_bytes(), 4096, options).unwrap();
    master.put_end(Instant::ZERO, key.as_bytes(), put.generation, 0).unwrap();
}

#[test]
fn an_object_with_a_key_of_32_bytes_and_one_replica_costs_at_most_200_bytes() {
    let objects: u64 = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
    let (_turn, mut master, before) = master(objects, AllocatorKind::default());
    let mut worst: f64 = 0.0;
    for object in 0..objects {
        put(&mut master, object, &PutOptions::default());
        // The worst moment is just after the table has grown.
        if object > objects / 2 && object % 1000 == 0 {
            worst = worst.max((LIVE.load(Ordering::Relaxed) - before) as f64 / object as f64);
        }
    }
    let live = LIVE.load(Ordering::Relaxed) - before;
    let each = live as f64 / objects as f64;
    let estimate = master.memory_bytes() as f64 / objects as f64;
    println!(
        "{each:.1} bytes per object at {objects} objects, {worst:.1} at worst in between, {estimate:.1} estimated"
    );
    assert!(worst.max(each) <= BYTES_PER_OBJECT_MAX, "{each:.1}, {worst:.1} at worst");
    assert!((estimate - each).abs() < each * 0.05, "the estimate is wrong: {estimate:.1} for {each:.1}");
}

fn call<'a, O: Operation>(
    master: &mut Master,
    out: &'a mut Vec<u8>,
    head: &O::Request<'_>,
    items: Vec<O::RequestItem<'_>>,
) -> Vec<O::ResponseItem<'a>> {
    let mut request = Vec::new();
    O::encode_request(&mut request, 1, head, items.into_iter()).unwrap();
    out.clear();
    master.handle(Instant::ZERO, &mut Session::owner(), &Frame::parse(&request).unwrap().unwrap().0, out);
    O::decode_response(&Frame::parse(out).unwrap().unwrap().0).unwrap().1.collect()
}

/// Mounts a disk that is ready, of the first node.
fn mount_disk(master: &mut Master) -> DiskProof {
    let node = NodeId::new(1);
    let mount = MountDisk {
        node,
        incarnation: Incarnation::new(1),
        uuid: [7; 16],
        bytes: 1 << 40,
        extent_bytes: 64 << 20,
        endpoint: "127.0.0.1:9001",
        stage: "127.0.0.1:9002",
        ..MountDisk::default()
    };
    let disk = master.mount_disk(Instant::ZERO, &mount).unwrap().disk;
    DiskProof { node: NodeProof { node, key: 0 }, disk }
}

#[test]
fn an_object_on_a_disk_costs_at_most_200_bytes_and_in_both_tiers_at_most_250() {
    let objects: u64 = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
    let (turn, mut store, before) = master(objects, AllocatorKind::default());
    let (proof, mut out) = (mount_disk(&mut store), Vec::new());
    // As a node announces what it has found on its disk.
    for first in (0..objects).step_by(100) {
        let keys: Vec<String> = (first..first + 100).map(|object| format!("{object:032x}")).collect();
        let found = keys.iter().zip(first..).map(|(key, object)| FoundObject {
            tenant: TenantTag::of("default"),
            key: Key(key.as_bytes()),
            generation: object + 1,
            len: 4096,
            crc32c: 1,
            locator: (64 << 20) + object * 8192,
        });
        let adopted = call::<AdoptObjects>(&mut store, &mut out, &proof, found.collect());
        assert!(adopted.iter().all(|adoption| *adoption == Adoption::Adopted), "{adopted:?}");
    }
    assert_eq!(store.stats().disk_objects, objects);
    let on_disk = (LIVE.load(Ordering::Relaxed) - before) as f64 / objects as f64;
    drop((store, turn));

    // Half of a full memory is to be on the disk as well.
    let config = MasterConfig { demote_ahead: 0.5, eviction_high_watermark: 1.0, ..MasterConfig::default() };
    let (_turn, mut store, before) = master_with(1, objects, config);
    let proof = mount_disk(&mut store);
    call::<DiskReady>(&mut store, &mut out, &proof, vec![]);
    (0..objects).for_each(|object| put(&mut store, object, &PutOptions::default()));
    let alone = LIVE.load(Ordering::Relaxed) - before;
    let (node, incarnation) = (proof.node.node, Incarnation::new(1));
    let fetch = FetchRequest { node, incarnation, count_max: 64, key: 0 };
    let fetch = FetchDisk { fetch, disk: proof.disk, bytes_max: 1 << 30 };
    let mut locator = 64 << 20;
    loop {
        let orders = call::<FetchDiskOrders>(&mut store, &mut out, &fetch, vec![]);
        let ends: Vec<DiskEnd<'_>> = orders
            .iter()
            .filter_map(|order| match order {
                DiskOrder::Demote { generation, .. } => {
                    locator += 8192;
                    Some(DiskEnd::Demoted { generation: *generation, result: Ok(locator) })
                }
                _ => None,
            })
            .collect();
        if ends.is_empty() {
            break;
        }
        let mut ended = Vec::new();
        let ended: Vec<Result<(), ErrorCode>> = call::<EndDiskOrders>(&mut store, &mut ended, &proof, ends);
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    }
    let (both, stats) = (LIVE.load(Ordering::Relaxed) - before, store.stats());
    assert!(stats.disk_objects > objects / 3, "{} of {objects} were copied", stats.disk_objects);
    let more = both.saturating_sub(alone) as f64 / stats.disk_objects as f64;
    let both = alone as f64 / objects as f64 + more;
    println!("{on_disk:.1} bytes per object on a disk, {both:.1} for one in memory as well");
    assert!(on_disk <= BYTES_PER_OBJECT_MAX, "{on_disk:.1}");
    assert!(both <= BYTES_IN_BOTH_MAX, "{both:.1}");
}

/// Limit on the memory of a master that was filled and emptied, bytes.
const LEFT_BYTES_MAX: usize = 1 << 20;

/// Does what is due; returns the number of calls.
fn settle(master: &mut Master) -> u32 {
    let mut turns = 0;
    while master.poll_timeout().is_some_and(|at| at <= Instant::ZERO) {
        master.handle_timeout(Instant::ZERO);
        turns += 1;
    }
    turns
}

#[test]
fn memory_comes_back_when_objects_are_removed_one_by_one_whatever_the_order() {
    let objects: u64 = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
    let grouped =
        |object: u64| Retention { ttl_ms: Some(60_000), group: Some(object / 8), ..Retention::DEFAULT };
    for kind in [AllocatorKind::Offset, AllocatorKind::Slab] {
        for (stride, retained) in [(1, false), (7_919, false), (objects - 1, false), (7_919, true)] {
            let (_turn, mut master, before) = master(objects, kind);
            let empty = (LIVE.load(Ordering::Relaxed) - before, master.memory_bytes());
            // Twice: the second time, the master must not become larger, nor free less.
            let mut full = 0;
            for _ in 0..2 {
                for object in 0..objects {
                    let retention = if retained { grouped(object) } else { Retention::DEFAULT };
                    put(&mut master, object, &PutOptions { retention, ..PutOptions::DEFAULT });
                }
                full = LIVE.load(Ordering::Relaxed) - before;
                for turn in 0..objects {
                    let key = format!("{:032x}", turn * stride % objects);
                    master.remove(Instant::ZERO, key.as_bytes(), RemoveMode::IfUnused).unwrap();
                }
                settle(&mut master);
            }
            // Queued events about objects that are gone are forgotten at their time.
            master.handle_timeout(Instant::from_millis(61_000));
            let left = (LIVE.load(Ordering::Relaxed) - before, master.memory_bytes());
            println!("{kind:?}, stride {stride}: {full} bytes full, {left:?} left, {empty:?} empty");
            assert_eq!(master.stats().objects, 0);
            assert!(left.0 <= empty.0 + LEFT_BYTES_MAX, "{kind:?}, stride {stride}: {left:?} of {full}");
            assert!(left.1 <= empty.1 + LEFT_BYTES_MAX, "{kind:?}, stride {stride}: {left:?} of {full}");
        }
    }
}

#[test]
fn what_comes_and_goes_gathers_so_that_memory_comes_back_though_something_stays() {
    let objects: u64 = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
    let (_turn, mut master, before) = master(objects, AllocatorKind::default());
    (0..objects).for_each(|object| put(&mut master, object, &PutOptions::DEFAULT));
    let full = LIVE.load(Ordering::Relaxed) - before;
    // One object in ten stays, in random places, and they are replaced one by one.
    let mut there: Vec<u64> = (0..objects).filter(|object| object % 10 == 0).collect();
    let gone = (0..objects).filter(|object| object % 10 != 0);
    gone.for_each(|object| {
        master.remove(Instant::ZERO, format!("{object:032x}").as_bytes(), RemoveMode::IfUnused).unwrap()
    });
    for object in &mut there {
        master.remove(Instant::ZERO, format!("{object:032x}").as_bytes(), RemoveMode::IfUnused).unwrap();
        *object += objects;
        put(&mut master, *object, &PutOptions::DEFAULT);
    }
    settle(&mut master);
    let left = LIVE.load(Ordering::Relaxed) - before;
    println!("{full} bytes for {objects} objects, {left} for {}", there.len());
    // Most of the rest belongs to the allocators: nearly every allocated block has a free neighbour, which
    // needs memory as well.
    assert!(left < full * 2 / 5, "{left} of {full}");
    assert!(there.iter().all(|object| master.exists(format!("{object:032x}").as_bytes())));
}

//! The budget of master memory per object, counted at the allocator, not estimated.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(unsafe_code, reason = "a counting global allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use store_core::message::{MountSegment, PutOptions};
use store_core::{Master, MasterConfig};
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

#[test]
fn an_object_with_a_key_of_32_bytes_and_one_replica_costs_at_most_200_bytes() {
    let objects: u64 = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
    let before = LIVE.load(Ordering::Relaxed);
    let mut master = Master::new(MasterConfig::default()).unwrap();
    for node in 1..=3u64 {
        let name = format!("node-{node}");
        let segment = MountSegment {
            node,
            incarnation: 1,
            name: &name,
            endpoint: "127.0.0.1:9000",
            base: 0,
            len: objects * 4096,
            export: Default::default(),
            epoch: 0,
            key: 0,
            takeover: false,
        };
        master.mount(Instant::ZERO, &segment).unwrap();
    }
    let mut worst: f64 = 0.0;
    for object in 0..objects {
        let key = format!("{object:032x}");
        let put = master.put_start(Instant::ZERO, key.as_bytes(), 4096, &PutOptions::default()).unwrap();
        master.put_end(Instant::ZERO, key.as_bytes(), put.generation, 0).unwrap();
        // The worst moment is just after the table has grown.
        if object > objects / 2 && object % 1000 == 0 {
            worst = worst.max((LIVE.load(Ordering::Relaxed) - before) as f64 / object as f64);
        }
    }
    let live = LIVE.load(Ordering::Relaxed) - before;
    let each = live as f64 / objects as f64;
    let estimate = master.memory_bytes() as f64 / objects as f64;
    println!(
        "{each:.1} bytes per object at {objects} objects, {worst:.1} at worst on the way, {estimate:.1} estimated"
    );
    assert!(worst.max(each) <= BYTES_PER_OBJECT_MAX, "{each:.1}, {worst:.1} at worst");
    assert!((estimate - each).abs() < each * 0.05, "the estimate is off: {estimate:.1} for {each:.1}");
}

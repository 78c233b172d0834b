//! What an object on the disk costs in memory of the node, measured at the allocator.
#![allow(unsafe_code, reason = "a counting global allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use store_core::disk::format::{FIRST_EXTENT_AT, Geometry, Stream};
use store_core::disk::{Demote, Disk, DiskConfig, End, Event};
use te_core::Instant;

struct Counting;

std::thread_local! {
    // Const and without a destructor: reading it allocates nothing.
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    let _thread_is_ending = LIVE.try_with(|live| live.set(live.get() + bytes));
}

// SAFETY: forwards to the system allocator; the count beside it touches no memory that is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn an_object_on_the_disk_costs_at_most_eight_bytes() {
    const OBJECTS: u64 = 400_000;
    let (now, extent_bytes) = (Instant::from_millis(1_000), 64 << 20);
    let before = LIVE.get();
    let geometry = Geometry::new(FIRST_EXTENT_AT + ((OBJECTS * 17) << 10), extent_bytes, 512).unwrap();
    let mut disk = Disk::format(now, DiskConfig::default(), geometry, [1; 16], 1).unwrap();
    for n in 0..OBJECTS {
        while let Some(order) = disk.poll_order() {
            disk.complete(now, order.op, End::Done { bytes: order.work.bytes(), data: &[] });
        }
        while let Some(event) = disk.poll_event() {
            assert!(!matches!(event, Event::DemoteFailed { .. }));
        }
        let key = format!("{n:032x}").into_bytes().into();
        let stream = Stream::Proven;
        let request =
            Demote { id: n, tenant: 1, key, generation: n, len: 16 << 10, crc32c: 0, stream, token: n };
        disk.demote(now, request).unwrap();
    }
    let each = (LIVE.get() - before) as f64 / OBJECTS as f64;
    println!(
        "{} bytes per object, by the disk's own estimate {}",
        each,
        disk.memory_bytes() as u64 / OBJECTS
    );
    assert!(each <= 8.0, "{each}");
    assert!(disk.memory_bytes() as u64 / OBJECTS <= 8);
}

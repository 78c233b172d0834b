//! Counts the allocations of one get or put of one block on the calling thread, once all buffers have their
//! size.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "counting allocations needs an allocator")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{client_over, master, node_over};
use store_client::{BufferRange, Fabrics, Get, Put, PutOptions, Store as _};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The number of allocations of this thread during `run`: the lowest of several tries, since buffers grow
/// occasionally.
fn allocations(mut run: impl FnMut()) -> u64 {
    let tries = (0..20).map(|_| {
        let before = COUNT.with(Cell::get);
        run();
        COUNT.with(Cell::get) - before
    });
    tries.min().unwrap()
}

#[test]
fn blocks_in_the_callers_memory_cost_no_allocation() {
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::SHM);
    let mut client = client_over(master.rpc_addr(), Fabrics::SHM);
    let region = client.alloc(2 << 12).unwrap();
    let range = |at: u64| BufferRange::part(&region, at << 12, 1 << 12);
    let value = [7; 4096];
    let mut number = 0_u64;
    let mut key = || {
        number += 1;
        number.to_le_bytes()
    };
    let options = PutOptions::default();
    assert!(client.put(b"k", &value, &options).unwrap());

    let get = allocations(|| assert_eq!(client.get_with(Get::new(b"k", range(0))).unwrap(), Some(4096)));
    let mut bytes = [0; 4096];
    let get_plain = allocations(|| {
        assert_eq!(client.get_with(Get::new(b"k", &mut bytes)).unwrap(), Some(4096));
    });
    let get_batch = allocations(|| {
        let mut items = [Get::new(b"k", range(0)), Get::new(b"none", range(1))];
        assert_eq!(client.batch_get(&mut items).done, 1);
    });
    let get_vec = allocations(|| assert!(client.get(b"k").unwrap().is_some()));
    let put = allocations(|| assert!(client.put(&key(), range(0), &options).unwrap()));
    let put_plain = allocations(|| assert!(client.put(&key(), &value, &options).unwrap()));
    let put_batch = allocations(|| {
        let (a, b) = (key(), key());
        let mut items = [Put::new(&a, range(0)), Put::new(&b, range(1))];
        assert!(client.batch_put(&mut items, &options).is_complete());
    });
    assert_eq!((get, get_plain, get_batch, get_vec), (0, 0, 0, 1), "only the value of a `Vec` is allocated");
    assert_eq!((put, put_plain, put_batch), (0, 0, 0));
}

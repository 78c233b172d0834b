//! Lent memory in a process that forks and goes on without `exec`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(unsafe_code, reason = "copies what a fork inherits")]

use std::os::fd::AsFd;

use te_fabric::testkit::in_a_child;
use te_host::{AllocOptions, BorrowedMemory, Protection, SharedMemory};

const LEN: usize = 1 << 20;

fn is<T: std::fmt::Debug + PartialEq>(what: &str, found: T, wanted: T) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("{what}: {found:?}, not {wanted:?}")) }
}

#[test]
fn memory_that_was_borrowed_is_empty_in_a_child() {
    let options = AllocOptions { peers_may_write: true, ..AllocOptions::default() };
    let memory = SharedMemory::new(LEN, options).unwrap();
    let borrowed =
        BorrowedMemory::map(memory.share(Protection::ReadWrite).unwrap().as_fd(), LEN as u64).unwrap();
    borrowed.view().write(0, b"mine").unwrap();
    in_a_child("borrowed", || {
        is("view", borrowed.view().len(), 0)?;
        is("read", borrowed.view().read(0, &mut [0]).is_err(), true)?;
        // SAFETY: read once, and the process ends without running the parent's drop.
        drop(unsafe { std::ptr::read(&raw const borrowed) });
        Ok(())
    });
    let mut seen = [0; 4];
    borrowed.view().read(0, &mut seen).unwrap();
    assert_eq!(&seen, b"mine");
}

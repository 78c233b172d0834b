//! Memory of an engine that is lent to a process without an engine.
#![allow(clippy::unwrap_used, reason = "a test that fails reports the line")]

use std::io;
use std::os::fd::AsFd as _;

use te_core::Access;
use te_engine::{Config, Engine, Fabrics};
use te_host::BorrowedMemory;

fn engine() -> Engine {
    let fabrics = Fabrics::LOCAL.and(Fabrics::SHM);
    Engine::start(Config { fabrics, ..Config::default() }).unwrap()
}

#[test]
fn borrowed_memory_keeps_its_bytes_after_its_owner_has_dropped_it() {
    let mut engine = engine();
    let region = engine.alloc_lent(10_000, Access::LOCAL).unwrap();
    let borrowed = BorrowedMemory::map(region.lend().unwrap().as_fd(), 10_000).unwrap();
    borrowed.view().write(9_000, b"from the borrower").unwrap();
    let mut seen = [0; 17];
    region.read(9_000, &mut seen).unwrap();
    assert_eq!(&seen, b"from the borrower");
    engine.unregister(region.id()).unwrap();
    drop((region, engine));
    borrowed.view().read(9_000, &mut seen).unwrap();
    assert_eq!(&seen, b"from the borrower");
}

#[test]
fn memory_that_was_not_allocated_for_it_is_not_lent() {
    let mut engine = engine();
    let region = engine.alloc_shared(4096, Access::LOCAL).unwrap();
    assert_eq!(region.lend().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
}

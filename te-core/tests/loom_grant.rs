//! The row of a grant under loom: every interleaving and every reordering that the memory model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p te-core --release --test loom_grant`
#![cfg(loom)]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use te_core::grant::{Revoked, Row};

/// A row, and the memory that it grants. Loom fails when two threads touch the memory and nothing orders
/// their accesses.
struct Granted {
    row: Row,
    memory: UnsafeCell<u32>,
}

// SAFETY: the test checks that one thread at a time touches the memory.
unsafe impl Send for Granted {}
// SAFETY: as above.
unsafe impl Sync for Granted {}

impl Granted {
    /// Uses the memory as a peer does.
    fn use_once(&self) -> Result<(), Revoked> {
        let _inside = self.row.enter()?;
        // SAFETY: as above.
        self.memory.with_mut(|memory| unsafe { *memory += 1 });
        Ok(())
    }
}

#[test]
fn memory_that_is_revoked_is_its_owners_alone() {
    loom::model(|| {
        let granted = Arc::new(Granted { row: Row::new(), memory: UnsafeCell::new(0) });
        let peer = {
            let granted = granted.clone();
            thread::spawn(move || {
                let uses = [granted.use_once(), granted.use_once()];
                assert!(uses[0].is_ok() || uses[1].is_err(), "a revoked grant does not come back");
            })
        };
        // The wait is here and not in `join`, which would order the two threads and hide a missing Acquire.
        while !granted.row.revoke(Revoked::Region) {
            thread::yield_now();
        }
        // SAFETY: as above.
        granted.memory.with_mut(|memory| unsafe { *memory = 99 });
        peer.join().expect("peer");
        assert_eq!(granted.use_once(), Err(Revoked::Region));
        // SAFETY: as above.
        granted.memory.with(|memory| assert_eq!(unsafe { *memory }, 99, "nothing landed late"));
    });
}

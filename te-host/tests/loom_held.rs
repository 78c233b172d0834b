//! The gate before registered memory under loom: every interleaving and every reordering that the memory
//! model allows.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p te-host --release --test loom_held`
#![cfg(loom)]
#![allow(unsafe_code, reason = "loom's cells stand for the memory behind the gate")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use te_host::Gate;

/// A gate, and the memory behind it: a cell for each user, because users do not exclude each other. Loom
/// fails when two threads access a cell and nothing orders them.
struct Held {
    gate: Gate,
    memory: [UnsafeCell<u32>; 2],
}

// SAFETY: the test checks that one thread at a time accesses each cell.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    /// Uses a cell of the memory as a copy does; false when the gate is shut.
    fn use_once(&self, cell: usize) -> bool {
        let Some(_inside) = self.gate.enter() else { return false };
        // SAFETY: as above.
        self.memory[cell].with_mut(|memory| unsafe { *memory += 1 });
        true
    }

    /// Takes the memory back as its owner does, and writes all of it.
    fn take_back(&self) {
        // Waits here, not in `join`, which would order the threads and hide a missing Acquire.
        while !self.gate.shut() {
            thread::yield_now();
        }
        for cell in &self.memory {
            // SAFETY: as above.
            cell.with_mut(|memory| unsafe { *memory = 99 });
        }
    }

    /// Checks the final state, after all threads have ended.
    fn check(&self) {
        assert!(!self.use_once(0) && self.gate.is_shut(), "a gate that is shut stays shut");
        for cell in &self.memory {
            // SAFETY: as above.
            cell.with(|memory| assert_eq!(unsafe { *memory }, 99, "nothing landed late"));
        }
    }
}

fn held() -> Arc<Held> {
    Arc::new(Held { gate: Gate::default(), memory: [UnsafeCell::new(0), UnsafeCell::new(0)] })
}

#[test]
fn memory_behind_a_shut_gate_is_not_used() {
    loom::model(|| {
        let held = held();
        let user = {
            let held = held.clone();
            thread::spawn(move || {
                let uses = [held.use_once(0), held.use_once(0)];
                assert!(uses[0] || !uses[1], "a gate that is shut does not open again");
            })
        };
        held.take_back();
        user.join().expect("user");
        held.check();
    });
}

#[test]
fn a_refused_user_does_not_hide_another_inside() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let held = held();
        let users: Vec<_> = (0..2)
            .map(|cell| {
                let held = held.clone();
                thread::spawn(move || held.use_once(cell))
            })
            .collect();
        held.take_back();
        for user in users {
            user.join().expect("user");
        }
        held.check();
    });
}

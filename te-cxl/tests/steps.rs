//! The operations on a pool that a call consists of, in their order: what one host alone cannot see otherwise.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::cell::RefCell;
use std::rc::Rc;

use te_cxl::lines::{Cause, Fault, Fence, LINE, Lines, Local, Side, get_between, put_between};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Load,
    LoadPast,
    Store,
    NtStore,
    Flush,
    Fence(Fence),
}

/// A pool of zeroes that writes down what is done to it, under its name. One kind of step may fail.
struct Pool {
    name: char,
    fails: Option<Step>,
    steps: Rc<RefCell<Vec<(char, Step)>>>,
}

const POISON: Fault = Fault { cause: Cause::Poison { at: 4096 }, done: 0 };

impl Pool {
    fn step(&mut self, step: Step) -> Result<(), Fault> {
        self.steps.borrow_mut().push((self.name, step));
        if self.fails == Some(step) { Err(POISON) } else { Ok(()) }
    }
}

impl Lines for Pool {
    fn load(&mut self, _: u64, _: Local<'_>) -> Result<(), Fault> {
        self.step(Step::Load)
    }

    fn load_past(&mut self, _: u64, _: Local<'_>) -> Result<(), Fault> {
        self.step(Step::LoadPast)
    }

    fn store(&mut self, _: u64, _: Local<'_>) -> Result<(), Fault> {
        self.step(Step::Store)
    }

    fn nt_store(&mut self, _: u64, _: Local<'_>) -> Result<(), Fault> {
        self.step(Step::NtStore)
    }

    fn flush(&mut self, _: u64, _: u64) -> Result<(), Fault> {
        self.step(Step::Flush)
    }

    fn fence(&mut self, of: Fence) {
        self.step(Step::Fence(of)).unwrap();
    }
}

/// The pool of the other process, which fails at a step, and our own, which fails at another.
fn pools(remote: Option<Step>, own: Option<Step>) -> [Pool; 2] {
    let steps = Rc::default();
    [('r', remote), ('o', own)].map(|(name, fails)| Pool { name, fails, steps: Rc::clone(&steps) })
}

const ALL: Step = Step::Fence(Fence::All);

#[test]
fn a_read_into_a_pool_stores_past_the_cache_and_drops_its_lines_also_after_a_fault() {
    for (remote, own, result) in [
        (None, None, Ok(())),
        (Some(Step::LoadPast), None, Err((Side::Remote, POISON))),
        (None, Some(Step::Flush), Err((Side::Own, POISON))),
    ] {
        let [mut from, mut to] = pools(remote, own);
        let got = get_between(&mut from, 0, Local::of(&mut [0; LINE as usize]), (&mut to, 0));
        assert_eq!(got, result);
        let expected =
            [('r', Step::Flush), ('r', ALL), ('r', Step::LoadPast), ('o', Step::Flush), ('o', ALL)];
        assert_eq!(*from.steps.borrow(), expected, "{remote:?} {own:?}");
    }
}

#[test]
fn a_write_from_a_pool_drops_stale_lines_and_names_the_side_that_failed() {
    for (remote, own, result) in [
        (None, None, Ok(())),
        (Some(Step::NtStore), None, Err((Side::Remote, POISON))),
        (None, Some(Step::Flush), Err((Side::Own, POISON))),
    ] {
        let [mut to, mut from] = pools(remote, own);
        let put = put_between(&mut to, 0, Local::of(&mut [0; LINE as usize]), (&mut from, 0));
        assert_eq!(put, result);
        assert_eq!(to.steps.borrow()[..2], [('o', Step::Flush), ('o', ALL)]);
        let wrote = to.steps.borrow().contains(&('r', Step::NtStore));
        assert_eq!(wrote, own.is_none(), "nothing is written after a fault of our own pool");
    }
}

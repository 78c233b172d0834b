//! The operations on a pool that a call consists of, in their order: one host alone cannot see their effect.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::cell::RefCell;
use std::rc::Rc;

use te_cxl::Coherence::{Flush, Hardware};
use te_cxl::ledger::{write_line, write_page};
use te_cxl::lines::{Cause, Fault, Fence, LINE, Lines, Local, Side, get_between, put_between};
use te_cxl::pool::format::{OwnerRecord, Superblock};

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

#[test]
fn a_line_of_the_ledger_is_read_back_where_caches_are_not_coherent() {
    for (coherence, expected) in
        [(Flush, &[Step::NtStore, ALL, Step::Flush, ALL, Step::Load][..]), (Hardware, &[Step::Store, ALL])]
    {
        let [mut pool, _] = pools(None, None);
        write_line(&mut pool, coherence, 64, [1; LINE as usize]).unwrap();
        let steps: Vec<Step> = pool.steps.borrow().iter().map(|(_, step)| *step).collect();
        assert_eq!(steps, expected);
    }
    // A line that may not have arrived was not written.
    let [mut pool, _] = pools(Some(Step::Load), None);
    assert_eq!(write_line(&mut pool, Flush, 64, [1; LINE as usize]), Err(POISON));
}

#[test]
fn a_page_is_read_back_line_by_line() {
    let block = Superblock { uuid: [7; 16], size: 4 << 20, extent_bytes: 2 << 20, extents: 1, peers: 2 };
    let owner =
        OwnerRecord { extent: 0, owned: true, incarnation: 1, epoch: 1, uuid: [7; 16], key_hash: [0; 16] };
    let [mut pool, _] = pools(None, None);
    write_page(&mut pool, Flush, &block, &owner).unwrap();
    let steps: Vec<Step> = pool.steps.borrow().iter().map(|(_, step)| *step).collect();
    let count = |of| steps.iter().filter(|step| **step == of).count();
    assert_eq!([Step::NtStore, Step::Flush, Step::Load].map(count), [64, 64, 64]);
    // The record of the owner first: from then on no peer of the former owner begins.
    assert_eq!(steps[..6], [Step::NtStore, ALL, Step::Flush, ALL, Step::Load, Step::NtStore]);
    let stored = steps.iter().rposition(|step| *step == Step::NtStore).unwrap();
    assert_eq!(steps[stored + 1..stored + 3], [ALL, Step::Flush]);
    assert_eq!(steps[steps.len() - 64], ALL, "before the first line is read back");
}

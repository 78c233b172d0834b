//! What te-engine orders by hand, under loom: every interleaving and every reordering that the memory model
//! allows. A wake-up that is lost is a deadlock here, which loom reports.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p te-engine --release --test loom_ordered`
#![cfg(loom)]

use std::sync::Arc as StdArc;
use std::task::{Wake, Waker};

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use te_core::Mailbox;
use te_engine::ordered::{Ending, Parking};

/// An eventfd: keeps a ring until it is cleared.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    ring: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.ring.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.ring.wait(rung).unwrap();
        }
    }

    fn clear(&self) {
        *self.rung.lock().unwrap() = false;
    }
}

/// What is done under the lock.
struct State {
    /// When the worker has to wake without a bell.
    due: u64,
}

/// A worker and its callers, in the steps of `worker.rs`: `Link::push`, `Link::help`, `Link::stop`,
/// `Worker::run`, `Worker::park`.
struct Link {
    mailbox: Mailbox<Command>,
    parking: Parking,
    bell: Bell,
    stop: AtomicBool,
    state: Mutex<State>,
}

/// Either ends something that its caller waits for, or makes the worker wake at a time.
enum Command {
    End(Arc<Bell>),
    WakeAt(u64),
}

impl Link {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            mailbox: Mailbox::new(2),
            parking: Parking::new(),
            bell: Bell::default(),
            stop: AtomicBool::new(false),
            state: Mutex::new(State { due: u64::MAX }),
        })
    }

    fn turn(&self, state: &mut State) {
        while let Some(command) = self.mailbox.pop() {
            match command {
                Command::End(done) => done.ring(),
                Command::WakeAt(due) => state.due = due,
            }
        }
    }

    /// The worker, until it is stopped or `done`.
    fn run(&self, done: impl Fn(&State) -> bool) {
        while !self.stop.load(Ordering::Acquire) {
            let mut state = self.state.lock().unwrap();
            self.turn(&mut state);
            if done(&state) {
                return;
            }
            drop(state);
            self.park();
        }
    }

    fn park(&self) {
        let state = self.state.lock().unwrap();
        let due = state.due;
        self.parking.announce(due);
        drop(state);
        // A sleep with an end is over at once: there is no clock here.
        if due == u64::MAX && self.mailbox.is_empty() && !self.stop.load(Ordering::Relaxed) {
            self.bell.wait();
        } else {
            // Loom gives the others their turn: they may be about to push what this thread has seen.
            thread::yield_now();
        }
        self.parking.leave();
        self.bell.clear();
    }

    fn push(&self, command: Command, help: bool) {
        assert!(self.mailbox.push(command).is_ok(), "there is room");
        if !help || !self.help() {
            self.ring();
        }
    }

    fn help(&self) -> bool {
        let Ok(mut state) = self.state.try_lock() else { return false };
        self.turn(&mut state);
        let due = state.due;
        drop(state);
        if self.parking.sleeps_past(due) || !self.mailbox.is_empty() {
            self.ring();
        }
        true
    }

    fn ring(&self) {
        if self.parking.must_ring() {
            self.bell.ring();
        }
    }

    /// Hands over a command and waits for its end.
    fn call(&self, help: bool) {
        let done = Arc::new(Bell::default());
        self.push(Command::End(done.clone()), help);
        done.wait();
    }

    fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.ring();
    }
}

fn spawn(link: &Arc<Link>, run: impl FnOnce(&Link) + 'static) -> thread::JoinHandle<()> {
    let link = link.clone();
    thread::spawn(move || run(&link))
}

#[test]
fn a_worker_never_sleeps_through_what_is_pushed_nor_through_its_stop() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(|| {
        let link = Link::new();
        let worker = spawn(&link, |link| link.run(|_| false));
        link.call(false);
        link.stop();
        worker.join().unwrap();
    });
}

#[test]
fn callers_that_help_leave_nothing_behind() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let link = Link::new();
        let worker = spawn(&link, |link| link.run(|_| false));
        let other = spawn(&link, |link| link.call(true));
        link.call(true);
        other.join().unwrap();
        link.stop();
        worker.join().unwrap();
    });
}

#[test]
fn a_worker_never_sleeps_past_a_time_that_a_caller_has_set() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(|| {
        let link = Link::new();
        let worker = spawn(&link, |link| link.run(|state| state.due == 7));
        link.push(Command::WakeAt(7), true);
        worker.join().unwrap();
    });
}

/// A waker that rings.
struct Ring(Bell);

impl Wake for Ring {
    fn wake(self: StdArc<Self>) {
        self.0.ring();
    }
}

/// Sets the result as the worker does.
fn set(ending: &Ending<u32>) {
    if ending.set(7) {
        ending.wake();
    }
}

/// `Transfer::poll` until it is ready.
fn poll_to_end(ending: &Ending<u32>, wakers: usize) -> u32 {
    let rings: Vec<_> = (0..wakers).map(|_| StdArc::new(Ring(Bell::default()))).collect();
    let mut nth = 0;
    loop {
        if let Some(end) = ending.get() {
            return *end;
        }
        let ring = &rings[nth.min(wakers - 1)];
        ending.set_waker(&Waker::from(ring.clone()));
        if let Some(end) = ending.get() {
            return *end;
        }
        // All but the last waker are replaced before they could wake.
        nth += 1;
        if nth >= wakers {
            ring.0.wait();
            ring.0.clear();
        }
    }
}

#[test]
fn a_thread_that_sleeps_is_woken_by_the_end() {
    loom::model(|| {
        let ending = Arc::new(Ending::new());
        let setter = {
            let ending = ending.clone();
            thread::spawn(move || set(&ending))
        };
        assert_eq!(ending.wait_until(None), Some(&7));
        setter.join().unwrap();
    });
}

#[test]
fn a_waker_is_woken_by_the_end_though_it_took_anothers_place() {
    for wakers in [1, 2] {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let ending = Arc::new(Ending::new());
            let setter = {
                let ending = ending.clone();
                thread::spawn(move || set(&ending))
            };
            assert_eq!(poll_to_end(&ending, wakers), 7);
            setter.join().unwrap();
        });
    }
}

#[test]
fn every_waiter_is_woken_by_the_end() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let ending = Arc::new(Ending::new());
        let sleeper = {
            let ending = ending.clone();
            thread::spawn(move || assert_eq!(ending.wait_until(None), Some(&7)))
        };
        let poller = {
            let ending = ending.clone();
            thread::spawn(move || assert_eq!(poll_to_end(&ending, 1), 7))
        };
        set(&ending);
        sleeper.join().unwrap();
        poller.join().unwrap();
    });
}

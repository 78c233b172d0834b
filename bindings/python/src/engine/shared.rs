//! [`Shared`]: an open engine, which its regions, peers and batches use.
//!
//! Memory that Python lends is given back only after its registration has ended (`unregister` returned `Ok`):
//! until then a rail may touch it. A registration that cannot end before the engine is closed costs its
//! memory, which is reported and stays where it is for the life of the process.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use te_core::RegionId;
use te_engine::{RegisterError, TransferEngine};
use te_host::fork::Mark;
use te_mooncake::Service;

use super::batch::Flight;
use super::mooncake;
use super::region::{Kept, Registration};
use crate::errors::Fault;
use crate::gil;
use crate::lifecycle::{self, Registered};
use crate::slot::Slot;

/// How long the end of an engine waits for transfers that still use registered memory.
const END_MAX: Duration = Duration::from_millis(1_500);
/// Time between two attempts to end registrations that are in use.
const BUSY: Duration = Duration::from_millis(5);
/// Lists of what may have ended are swept when they reach a power of two from here on.
const SWEEP_MIN: usize = 64;

/// An engine, until it is closed.
pub(super) struct Shared {
    state: Mutex<State>,
    exit: Mutex<Option<Registered>>,
    mark: Mark,
}

struct State {
    engine: Option<Arc<TransferEngine>>,
    /// The ports for Mooncake peers.
    mooncake: Option<Arc<Service>>,
    /// Batches in flight: a transfer keeps its engine.
    flights: Vec<Weak<Flight>>,
    registrations: Vec<Weak<Registration>>,
    /// Registrations that are to end, with the memory that they hold.
    ending: Vec<(RegionId, Kept)>,
}

impl Shared {
    pub(super) fn new(engine: TransferEngine, mooncake: Option<Service>) -> Arc<Self> {
        let state = State {
            engine: Some(Arc::new(engine)),
            mooncake: mooncake.map(Arc::new),
            flights: Vec::new(),
            registrations: Vec::new(),
            ending: Vec::new(),
        };
        let this = Arc::new(Self { state: Mutex::new(state), exit: Mutex::new(None), mark: Mark::new() });
        let weak = Arc::downgrade(&this);
        let exit = lifecycle::at_exit(move |_time| {
            if let Some(this) = weak.upgrade() {
                this.end();
            }
        });
        *this.exit.lock().unwrap_or_else(PoisonError::into_inner) = Some(exit);
        this
    }

    /// A handle of the engine.
    ///
    /// # Errors
    /// The engine is closed, or belongs to the parent process.
    pub(super) fn engine(&self) -> Result<Handle<TransferEngine>, Fault> {
        if self.mark.is_forked() {
            return Err(Fault::forked());
        }
        let engine = self.lock().engine.clone().ok_or_else(|| Fault::closed("engine"))?;
        Ok(Handle::new(engine))
    }

    /// A handle of the ports for Mooncake peers.
    ///
    /// # Errors
    /// The engine has none, is closed, or belongs to the parent process.
    pub(super) fn mooncake(&self) -> Result<Handle<Service>, Fault> {
        if self.mark.is_forked() {
            return Err(Fault::forked());
        }
        let state = self.lock();
        if state.engine.is_none() {
            return Err(Fault::closed("engine"));
        }
        mooncake::handle(state.mooncake.as_ref())
    }

    /// Whether it is closed, or belongs to the parent process.
    pub(super) fn is_closed(&self) -> bool {
        self.mark.is_forked() || self.lock().engine.is_none()
    }

    /// Whether this process is a fork of the one that started it.
    pub(super) fn is_forked(&self) -> bool {
        self.mark.is_forked()
    }

    /// Records a batch, to be cancelled when the engine is closed.
    pub(super) fn began(&self, flight: &Arc<Flight>) {
        let mut state = self.lock();
        let flights = &mut state.flights;
        if flights.len() >= SWEEP_MIN && flights.len().is_power_of_two() {
            flights.retain(|flight| flight.upgrade().is_some_and(|flight| !flight.is_over()));
        }
        flights.push(Arc::downgrade(flight));
    }

    /// Records a registration, to be ended when the engine is closed.
    pub(super) fn registered(&self, registration: &Arc<Registration>) {
        let mut state = self.lock();
        let known = &mut state.registrations;
        if known.len() >= SWEEP_MIN && known.len().is_power_of_two() {
            known.retain(|registration| registration.strong_count() > 0);
        }
        known.push(Arc::downgrade(registration));
    }

    /// Ends a registration in the background, and then lets go of its memory.
    pub(super) fn unregister(self: &Arc<Self>, id: RegionId, memory: Kept) {
        self.lock().ending.push((id, memory));
        self.reap_later();
    }

    fn reap_later(self: &Arc<Self>) {
        let this = Arc::clone(self);
        gil::later(move || {
            if let Ok(engine) = this.engine()
                && !this.reap(&engine)
            {
                drop(engine);
                // Behind what else is to be closed: a quarantined transfer may take long.
                std::thread::sleep(BUSY);
                this.reap_later();
            }
        });
    }

    /// Ends the registrations that are to end and that are not in use. Returns whether none is left.
    fn reap(&self, engine: &TransferEngine) -> bool {
        let ending = std::mem::take(&mut self.lock().ending);
        let mut busy = Vec::new();
        for (id, mut memory) in ending {
            drop(memory.export.take());
            match engine.unregister(id) {
                Ok(()) | Err(RegisterError::NotFound) => drop(memory),
                Err(_) => busy.push((id, memory)),
            }
        }
        let is_empty = busy.is_empty();
        self.lock().ending.append(&mut busy);
        is_empty
    }

    /// Closes the engine. The slot is filled when it is closed.
    pub(super) fn close(self: &Arc<Self>) -> Arc<Slot<()>> {
        let slot = Slot::new();
        if self.mark.is_forked() || lifecycle::is_exiting() {
            slot.set(());
            return slot;
        }
        let exit = self.exit.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(exit);
        let (this, filled) = (Arc::clone(self), Arc::clone(&slot));
        gil::apart(move || {
            this.end();
            filled.set(());
        });
        slot
    }

    /// Cancels the batches in flight, ends the registrations and stops the engine. Blocks.
    fn end(&self) {
        let (engine, mooncake, flights, registrations) = {
            let mut state = self.lock();
            let registrations = std::mem::take(&mut state.registrations);
            let flights = std::mem::take(&mut state.flights);
            (state.engine.take(), state.mooncake.take(), flights, registrations)
        };
        let Some(engine) = engine else { return };
        flights.into_iter().filter_map(|flight| flight.upgrade()).for_each(|flight| flight.give_up());
        for registration in registrations.into_iter().filter_map(|weak| weak.upgrade()) {
            if let Some(memory) = registration.give_up() {
                self.lock().ending.push((registration.id(), memory));
            }
        }
        let until = Instant::now() + END_MAX;
        while !self.reap(&engine) && Instant::now() < until {
            std::thread::sleep(BUSY);
        }
        self.leak();
        // Closes the ports, unless a call that returns now has a handle.
        drop(mooncake);
        // Joins the engine's thread, unless a call that returns now has a handle, which then does.
        drop(Arc::into_inner(engine));
    }

    /// Keeps the memory of registrations that have not ended for the life of the process.
    fn leak(&self) {
        let ending = std::mem::take(&mut self.lock().ending);
        for (id, memory) in ending {
            log::error!("region {id} is still in use: its memory stays exported for the life of the process");
            std::mem::forget(memory);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let (engine, ending) = (state.engine.take(), std::mem::take(&mut state.ending));
        let mooncake = state.mooncake.take();
        if self.mark.is_forked() {
            return std::mem::forget((engine, mooncake, ending));
        }
        for (id, memory) in ending {
            log::error!("region {id} was never unregistered: its memory stays exported");
            std::mem::forget(memory);
        }
        drop((Handle(engine), Handle(mooncake)));
    }
}

/// The engine, or its ports, for one call. Dropping the last handle joins a thread, which a thread with the
/// GIL must not do.
pub(super) struct Handle<T: Send + 'static>(Option<Arc<T>>);

impl<T: Send> Handle<T> {
    pub(super) const fn new(shared: Arc<T>) -> Self {
        Self(Some(shared))
    }
}

impl<T: Send> std::ops::Deref for Handle<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // Taken by `drop` alone.
        self.0.as_ref().expect("a handle has what it is for until it is dropped")
    }
}

impl<T: Send> Drop for Handle<T> {
    fn drop(&mut self) {
        if let Some(last) = self.0.take().and_then(Arc::into_inner) {
            gil::apart(move || drop(last));
        }
    }
}

/// Something that happens once and that many wait for.
pub(super) struct Event {
    state: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    happened: bool,
    wakers: Vec<Waker>,
}

impl Event {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default() })
    }

    pub(super) fn set(&self) {
        let wakers = {
            let mut state = self.lock();
            state.happened = true;
            std::mem::take(&mut state.wakers)
        };
        // A waker runs code of the event loop, so no lock is held here.
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(super) fn has_happened(&self) -> bool {
        self.lock().happened
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for Event {
    fn wake(self: Arc<Self>) {
        self.set();
    }
}

/// An event as a future.
pub(super) struct Happens(pub(super) Arc<Event>);

impl Future for Happens {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.lock();
        if state.happened {
            return Poll::Ready(());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            state.wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}

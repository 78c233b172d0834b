//! Transports around a transport: the tool a user debugs with is the tool the tests inject faults with.
//!
//! Each implements [`Transport`](crate::Transport) over any other and keeps its laws; the conformance suite runs through
//! each of them. They allocate when they are made and never after.
//!
//! ```
//! use core::time::Duration;
//! use te_core::sim::{SimConfig, SimNet};
//! use te_core::{Delay, Fault, FaultConfig, Throttle, Trace, Transport};
//!
//! let sim = SimNet::new(1, SimConfig::CALM).node();
//! // A rail of 1 GB/s that answers 50 µs late, loses one slice in a thousand, and remembers its last 256 events.
//! let slow = Throttle::new(sim, 1_000_000_000, 1 << 20);
//! let late = Delay::new(slow, Duration::from_micros(50));
//! let lossy = Fault::new(late, 7, FaultConfig { slice_dropped_ppm: 1_000, ..FaultConfig::default() });
//! let rail = Trace::new(lossy, 256);
//! assert_eq!(rail.name(), "sim");
//! ```

mod delay;
mod fault;
mod ledger;
mod shelf;
mod throttle;
mod trace;

pub use delay::Delay;
pub use fault::{Fault, FaultConfig, FaultCounters};
pub use throttle::Throttle;
pub use trace::{Trace, TraceEntry, TraceEvent};

/// Fences that a decorator which holds completions back keeps in flight, at most.
const FENCES_MAX: usize = 256;

/// The three ways to what is inside.
macro_rules! access_inner {
    ($name:ident) => {
        impl<T> $name<T> {
            /// What it is around.
            pub fn inner(&self) -> &T {
                &self.inner
            }

            /// What it is around. Submit to the decorator, not to this.
            pub fn inner_mut(&mut self) -> &mut T {
                &mut self.inner
            }

            /// Takes the decorator off. Completions that it holds back are lost: do it when nothing is in flight.
            pub fn into_inner(self) -> T {
                self.inner
            }
        }
    };
}
use access_inner;

/// The memory of what is inside, kept while the decorator holds a completion that refers to it.
macro_rules! shelved_memory {
    ($name:ident) => {
        impl<T: Transport> $crate::Memory for $name<T> {
            unsafe fn register(
                &mut self,
                id: $crate::RegionId,
                span: $crate::MemSpan,
                access: $crate::Access,
            ) -> Result<(), Error> {
                // SAFETY: the caller's promise, passed on.
                unsafe { self.inner.register(id, span, access) }
            }

            fn deregister(&mut self, id: $crate::RegionId) -> Result<(), Error> {
                self.shelf.check_region_is_free(id)?;
                self.inner.deregister(id)
            }

            fn export(&self, id: $crate::RegionId, out: &mut [u8]) -> Result<usize, Error> {
                self.inner.export(id, out)
            }

            fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
                self.inner.attach(id, blob)
            }

            fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
                self.shelf.check_segment_is_free(id)?;
                self.inner.detach(id)
            }
        }
    };
}
use shelved_memory;

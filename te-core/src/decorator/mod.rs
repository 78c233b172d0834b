//! Transports around a transport, for debugging and for the injection of faults in tests.
//!
//! Each implements [`Transport`](crate::Transport) over any other and keeps its laws; the conformance suite
//! runs through each of them. They allocate only when they are made.
//!
//! ```
//! use core::time::Duration;
//! use te_core::sim::{SimConfig, SimNet};
//! use te_core::{Delay, Fault, FaultConfig, Throttle, Trace, Transport};
//!
//! let sim = SimNet::new(1, SimConfig::CALM).node();
//! // A rail of 1 GB/s whose completions come 50 µs late. It loses one slice in a thousand and keeps its last
//! // 256 events.
//! let slow = Throttle::new(sim, 1_000_000_000, 1 << 20);
//! let late = Delay::new(slow, Duration::from_micros(50));
//! let mut faults = FaultConfig::default();
//! faults.slice_dropped_ppm = 1_000;
//! let lossy = Fault::new(late, 7, faults);
//! let rail = Trace::new(lossy, 256);
//! assert_eq!(rail.name(), "sim");
//! ```

mod delay;
mod fault;
mod held;
mod ledger;
mod throttle;
mod trace;

pub use delay::Delay;
pub use fault::{Fault, FaultConfig, FaultCounters};
pub use throttle::Throttle;
pub use trace::{Trace, TraceEntry, TraceEvent};

/// The largest number of fences in flight of a decorator that holds completions back.
const FENCES_MAX: usize = 256;

/// The three accessors of the inner transport.
macro_rules! access_inner {
    ($name:ident) => {
        impl<T> $name<T> {
            /// The inner transport.
            pub fn inner(&self) -> &T {
                &self.inner
            }

            /// The inner transport. Submit to the decorator, not to this.
            pub fn inner_mut(&mut self) -> &mut T {
                &mut self.inner
            }

            /// Removes the decorator. Completions that it holds back are lost: call this when nothing is in
            /// flight.
            pub fn into_inner(self) -> T {
                self.inner
            }
        }
    };
}
use access_inner;

/// Forwards registration and attachment to the inner transport, and keeps a region busy while the decorator
/// holds a completion that refers to it.
macro_rules! held_memory {
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
                self.held.check_region_is_free(id)?;
                self.inner.deregister(id)
            }

            fn export(&self, id: $crate::RegionId, out: &mut [u8]) -> Result<usize, Error> {
                self.inner.export(id, out)
            }

            fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
                self.inner.attach(id, blob)
            }

            fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
                self.held.check_remote_is_free(id)?;
                self.inner.detach(id)
            }
        }
    };
}
use held_memory;

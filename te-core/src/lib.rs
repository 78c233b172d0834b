//! The Transport contract of Snowskin.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod batch;
mod decorator;
mod error;
mod id;
mod mailbox;
mod memory;
mod multi;
mod registered;
mod route;
#[cfg(feature = "testkit")]
pub mod sim;
mod slice;
mod slicer;
#[cfg(feature = "testkit")]
pub mod testkit;
mod time;
mod transport;

pub use batch::{BatchHandle, BatchTable, CancelReason, Progress, Status};
pub use decorator::{Delay, Fault, FaultConfig, FaultCounters, Throttle, Trace, TraceEntry, TraceEvent};
pub use error::{Error, ErrorKind};
pub use id::{RegionId, SegmentId, Token};
pub use mailbox::Mailbox;
pub use memory::{Access, Location, MemSpan, VolatileSpan, copy_bytes};
pub use multi::MultiTransport;
pub use registered::{Buffer, Registered};
pub use route::{HealthConfig, HealthRoute, RAILS_MAX, RailHealth, Route};
pub use slice::{Completion, Op, Outcome, Slice};
pub use slicer::{Slicer, TransferRequest};
pub use time::Instant;
pub use transport::{Capabilities, EventSource, Features, Memory, Transport};

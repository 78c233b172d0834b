//! The Transport contract of Snowskin.
#![no_std]
#![deny(unsafe_code)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod error;
mod id;
mod mailbox;
mod memory;
#[cfg(feature = "testkit")]
pub mod sim;
mod slice;
#[cfg(feature = "testkit")]
pub mod testkit;
mod time;
mod transport;

pub use error::{Error, ErrorKind};
pub use id::{RegionId, SegmentId, Token};
pub use mailbox::Mailbox;
pub use memory::{Access, Location, MemSpan, VolatileSpan, copy_bytes};
pub use slice::{Completion, Op, Outcome, Slice};
pub use time::Instant;
pub use transport::{Capabilities, EventSource, Features, Memory, Transport};

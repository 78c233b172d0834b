//! The disks of a node: files and block devices, driven for [`store_core::disk`].
//!
//! ```text
//!   the node's event loop              the thread of the disk                        threads, or io_uring
//!  ┌─────────────────────┐ requests  ┌───────────────────────────┐    operations    ┌─────────────────────┐
//!  │ DiskService         │ ────────▶ │ store_core::disk::Disk    │ ───────────────▶ │ Driver              │
//!  │  demote stage       │  bounded  │  batches, extents,        │                  │  preadv2, pwritev2  │
//!  │  forget reclaimed … │           │  tombstones, recovery     │ ◀─────────────── │  fdatasync          │
//!  │                     │ ◀──────── │                           │   completions    └──────────┬──────────┘
//!  └──────────┬──────────┘  events,  └───────────────────────────┘                             │
//!             │             one fd                                                             │
//!             └───── Lent: memory of objects, buffers of readers ──────────────────────────────┘
//!                    the kernel reads and writes them in place (O_DIRECT)
//! ```
//!
//! [`DiskFile`] opens a file or block device for direct I/O, locks it against a second opener, and measures
//! the alignment that it needs. [`DiskService`] is a disk with its thread. Its owner calls functions that
//! never wait, and polls one descriptor for [`DiskEvent`]s. [`inspect`] and [`verify`] read a disk without
//! changing it.
//!
//! # Memory
//!
//! A request lends memory ([`Lent`]): an address, and an owner that keeps it mapped. The answer returns it.
//! While the kernel may touch the memory, the owner is kept and the memory is not returned, whatever
//! happens: a reader whose deadline passes gets [`DiskEvent::ReadFailed`] without its buffer, and
//! [`DiskEvent::BufferFree`] with it when the read has ended. A disk that is closed while operations are in
//! the kernel leaves the owners with those operations.
//!
//! An object is written from where it is: its whole blocks in place, its tail together with headers and
//! padding through a small buffer. Memory off the alignment of the device is copied.
//!
//! # What waits for what
//!
//! Nothing in the memory path waits for a disk. The queues of requests are bounded; a full one returns the
//! request ([`Unsent`]). Where the owner does not take its events, the thread takes no further requests, and
//! a recovery pauses.
//!
//! # Who may open a disk
//!
//! | | While a node has it open | Why |
//! |---|---|---|
//! | another node, `format`, `bench` | refused | two logs in one place |
//! | [`verify`] | refused | extents are overwritten while it reads, which looks like damage |
//! | [`inspect`] | allowed | it only reads, and says that the disk is in use |
//!
//! # Example
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use store_client::disk::{
//!     AlignedBuffer, Caching, Demote, DiskEvent, DiskFile, DiskOptions, DiskService, FormatOptions, Lent, Stage,
//!     image_of, is_intact,
//! };
//! use store_core::disk::format::Stream;
//!
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk");
//! let options = FormatOptions { bytes: Some(64 << 20), ..FormatOptions::default() };
//! # // This example runs on file systems without direct I/O as well.
//! # let options = FormatOptions { caching: Caching::Buffered, ..options };
//! let (file, geometry) = DiskFile::prepare(&path, options)?;
//! let disk = DiskService::format(file, geometry, DiskOptions::default(), 1)?;
//! let wait = Duration::from_secs(10); // A node polls the descriptor instead.
//! assert!(matches!(disk.wait_event(wait), Some(DiskEvent::Ready)));
//!
//! // An object: data and trailer in aligned memory, which is lent.
//! let data = vec![42; 100_000];
//! let (crc32c, source) = image_of(&data);
//! let (key, len, stream) = (Box::from(*b"prompt/0"), 100_000, Stream::Trial);
//! disk.demote(Demote { id: 1, tenant: 1, key, generation: 1, len, crc32c, stream, source })?;
//! let Some(DiskEvent::Demoted { id: 1, locator, source }) = disk.wait_event(wait) else { panic!() };
//! drop(source); // It has come back, and can be reused or freed.
//!
//! // It is read into a buffer of the reader, who verifies it.
//! let buffer = Lent::buffer(AlignedBuffer::new(geometry.image_bytes(len) as usize));
//! let deadline = Instant::now() + Duration::from_secs(10);
//! disk.stage(Stage { id: 2, locator, len, deadline, buffer })?;
//! let Some(DiskEvent::Staged { id: 2, buffer }) = disk.wait_event(wait) else { panic!() };
//! let bytes = buffer.into_buffer().expect("a buffer was lent");
//! assert!(is_intact(&bytes, len, crc32c) && bytes[..100_000] == data[..]);
//! assert!(disk.close(wait), "everything is durable");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bell;
mod clock;
mod driver;
mod error;
mod file;
mod held;
mod image;
mod inbox;
mod inspect;
mod meter;
mod outbox;
mod packs;
mod probe;
mod request;
mod service;
mod shared;
mod shell;
mod stats;
mod survey;
mod sys;
mod threads;
#[cfg(all(feature = "uring", target_os = "linux"))]
mod uring;

pub use bell::Bell;
pub use driver::{Completion, Destination, Driver, DriverError, Io, IoWork, Part};
pub use error::DiskError;
pub use file::{Caching, DiskFile, EXTENT_BYTES, FormatOptions, Sharing};
pub use image::{image_of, is_intact};
pub use inspect::{Volume, inspect, verify};
pub(crate) use packs::BucketAddress;
#[cfg(fuzzing)]
pub use packs::fuzzing;
#[cfg(feature = "s3")]
pub(crate) use packs::{BucketDirectory, Gone, pack_name};
pub use packs::{
    BucketFault, PackDirectory, PackFault, PackNames, RefusedPack, Room, check_bucket, is_bucket,
};
#[cfg(feature = "s3")]
pub use packs::{PackBucket, PackBucketReader};
pub use probe::DiskProbe;
pub use request::{Demote, DiskEvent, NotDone, Stage, Unsent};
pub use service::{DiskOptions, DiskService, DriverKind, QUEUE_DEPTH};
pub use stats::{CLASSES, DiskStats, Times};
pub use survey::{Damage, FoundObject, Progress, Survey, Verified};
pub use sys::{AlignedBuffer, Lent};

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;

//! All unsafe code of the crate: the driver's library, found at run time, and memory that a device writes.
//!
//! ```text
//!   stager.rs   slots, hops, plans; what is tried before a stager is used
//!   channel.rs  a stream with its copies and marks    module.rs   the copy kernel in a context
//!   ring.rs     page-locked memory                       pointer.rs  what the driver knows of an address
//!   buffer.rs   allocations that can be shared           share.rs    dma-bufs, flushes
//!   order.rs    callers' events and streams              import.rs   memory of other processes
//!   queue.rs    copies between any memory                pin.rs      host memory of callers
//!
//!   device.rs   a device, its context, errors
//!   load.rs     table of functions, or why there is none       abi.rs  structures and numbers
//! ```
//!
//! The contract with a driver is that of its manual: an object is used only between its creation and its
//! destruction, the context of a device is current while its objects are created or used, and any thread may
//! make any call.
#![allow(unsafe_code, reason = "calls into a C library, and memory that a device writes")]

pub(crate) mod abi;
pub(crate) mod buffer;
pub(crate) mod channel;
pub(crate) mod device;
pub(crate) mod import;
pub(crate) mod load;
pub(crate) mod module;
pub(crate) mod order;
pub(crate) mod pin;
pub(crate) mod pointer;
pub(crate) mod queue;
pub(crate) mod ring;
pub(crate) mod share;
pub(crate) mod stager;

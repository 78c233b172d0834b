//! Memory of GPUs: where it is, and how its bytes get to page-locked host memory and back.
//!
//! [`Gpu`] implements [`te_core::device::Devices`] for the devices of one vendor: NVIDIA's by the CUDA driver
//! (feature `cuda`), AMD's by HIP (feature `hip`). A fabric over sockets moves device memory through the
//! stagers that it makes, and a fabric over RDMA registers device memory by its dma-bufs. This crate is no
//! fabric, and moves nothing between hosts.
//!
//! ```text
//!     locate, dmabuf, allocate, plan, probe                take, start, poll, give_back
//!                  │                                                   │
//!   ┌──────────────▼───────────────┐   makes   ┌───────────────────────▼───────────────────────┐
//!   │ gpu        devices, blocks   ├──────────►│ sys/stager   slots, and which hops go together │
//!   │ affinity   numbers, nodes    │           │    │                                           │
//!   │ calibrate  measures paths    │           │ slots     which are taken                      │
//!   │ probe      tries everything  │           │ plan      loop, batch or kernel                │
//!   │ after      work held back    │           │ kernel    text and shape of the copy kernel    │
//!   └──────────────┬───────────────┘           │ flight    hops in a stream, in order           │
//!                  │                           └───────────────────────┬───────────────────────┘
//!                  ▼                                                   ▼
//!   sys   buffer · share · order · pointer          channel: a stream and its marks · ring: page-locked memory
//!                  └───────────────────┬───────────────────────────────┘
//!                                      ▼
//!         device: context, errors · load: the driver's library, found at run time · abi
//! ```
//!
//! All unsafe code is in `sys`. Nothing is linked: the driver's library is loaded when it is first needed,
//! and a process that only has host memory never loads it, because memory of a device cannot exist in a
//! process that has not mapped the library and started the driver.
//!
//! **A hop** is one copy between a slot and device memory. A stager has a stream of its own for each
//! direction, in which there is nothing but its copies, so a hop waits for nothing else. The hops of one call
//! of `start` become at most three launches per direction: small ones, small ones whose ends are aligned
//! differently, and large ones. Behind each launch is a *mark*: the device stores the number of the launch to
//! page-locked memory. So a poll is one load per direction, without a call of the driver.
//!
//! **Three paths** copy: a copy-engine call per hop, one call for all of them, or a small kernel, whose PTX
//! text the driver compiles. The kernel is off unless [`Config::kernel`] is set, because it has not run on a
//! device so far. Which is the fastest depends on direction, size, number and machine; the first
//! stager of a device measures it ([`Config::calibrate_ms_max`]), and [`Gpu::plan`] prints it.
//!
//! **Other processes.** [`Gpu::share`] makes handles of any device memory, for each mapping the best that
//! it has, and [`Gpu::import`] maps what another process shared. A [`CopyQueue`] copies between such
//! memory, that of this process, and host memory that [`Gpu::pin`] has page-locked, in a stream of its own
//! with the same marks. The fabric over it is `te-nvlink`.
//!
//! **Contexts.** Device memory belongs to the primary context, which the CUDA runtime uses, too. Calls enter
//! it and restore what the calling thread had: its context, and how its calls act on captures of streams.
//! Memory of another context is copied, but not by the kernel.
//!
//! # Capabilities
//!
//! | | CUDA | HIP |
//! |---|---|---|
//! | driver | 12.0 (release 525) and later | ROCm 6.0 and later |
//! | [`Devices::locate`](te_core::device::Devices::locate) | yes; managed memory counts as host memory | yes |
//! | stager | yes | yes |
//! | copy paths | loop; batch from 12.8 on; kernel from compute capability 7.0 on, where it is allowed | loop; batch where the library has it |
//! | marks | words in page-locked memory; events where streams cannot store words | the same |
//! | dma-buf | where the driver exports it; one per mapping with [`Gpu::dmabufs`] | where the library exports it |
//! | [`DeviceBuffer`] | with file descriptors and fabric handles, as far as the device has them | with file descriptors |
//! | [`Gate`] | yes | no |
//! | [`Gpu::flush_writes`] | where the device needs it | no |
//! | [`Gpu::share`], [`Gpu::import`], [`CopyQueue`], [`HostPin`] | yes | no |
//!
//! # Laws
//!
//! L1 and L2: each hop ends once, after the mark behind its copy. A launch that fails is drained first, and
//! then all of its hops end with the error. L3: a hop cannot be cancelled; it ends by itself. L4: `start` and
//! `poll` make no call that waits, allocate nothing and read no clock. At most 64 launches, with at most 512
//! entries of the driver's queue, are in a stream, because the queue has about 1,024 entries and a call waits
//! while it is full. L6: a stager checks that each hop lies in memory of its device, and asks the driver
//! about an allocation again whenever device memory was registered anywhere. L7: device memory is never a
//! `&[u8]`.
//!
//! When a context fails (a fault of any kernel of the process, an uncorrectable memory error), or the driver
//! answers with the same unknown error eight times in a row while hops do not end, everything that runs ends
//! as `Rail`, and the device is not used again until the process restarts. The slots of its stagers stay
//! mapped, because copies may still write to them; [`Gpu::stagers_quarantined`] counts these.
//! Slots that are taken later are in other memory, and their hops are refused, so a transfer that waited for
//! a slot ends as well.
//!
//! # Limits
//!
//! What L6 cannot promise here: the driver's number of an allocation tells that memory was freed and
//! allocated again ([`Gpu::recheck`]), but only when it is asked. A caller that frees memory that is still
//! registered breaks the promise of registration, and copies may then go to what was allocated in its place.
//! An IPC handle of the older kind ([`DeviceBuffer::export_ipc`], [`Gpu::share`]) shares a whole allocation.
//!
//! Both interfaces are tested with a fake driver alone (`examples/fake`), which has no GPU behind it and is
//! not fast: no figure of this crate has been measured on a device. The fake's dma-bufs are memfds, and it
//! knows the kernel by the names of its entries instead of executing its text.
//!
//! # Example
//!
//! ```
//! # #[cfg(feature = "cuda")] {
//! use te_core::device::Devices;
//! use te_gpu::{Config, Gpu};
//!
//! let gpu = Gpu::cuda(Config::default())?;
//! let mut host = [0_u8; 64];
//! assert_eq!(gpu.locate(host.as_mut_ptr(), 64), None);
//! match gpu.devices() {
//!     Ok(devices) => devices.iter().for_each(|device| println!("{} at {:?}", device.location, device.pci)),
//!     Err(reason) => println!("{reason}"),
//! }
//! # }
//! # Ok::<(), te_gpu::SettingError>(())
//! ```
#![deny(unsafe_code)]
#![cfg_attr(
    not(any(feature = "cuda", feature = "hip")),
    allow(dead_code, reason = "without a feature there is no way to make a `Gpu`")
)]

mod affinity;
mod after;
mod calibrate;
mod config;
mod flight;
mod gpu;
mod kernel;
pub mod plan;
mod probe;
mod slots;
mod sys;

pub use after::{After, Over};
pub use config::{Config, SettingError};
pub use gpu::{Block, Gpu};
pub use probe::Probe;
pub use sys::buffer::{DeviceBuffer, HandleTypes};
pub use sys::channel::Place;
pub use sys::device::DeviceInfo;
pub use sys::import::{Imported, NotImported};
pub use sys::load::NoGpu;
pub use sys::order::{ForeignEvent, Gate};
pub use sys::pin::HostPin;
pub use sys::queue::{Copy, CopyQueue};
pub use sys::share::{Handle, NotShared, SharedPart};
pub use te_core::device::DmaBuf;

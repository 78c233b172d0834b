//! The fabric from GPU to GPU, and between GPUs and shared host memory, of one host's processes (CUDA); with
//! [`Config::across_hosts`], also from GPU to GPU of the hosts of one NVLink domain.
//!
//! A peer opens the memory of an owner by handles of the driver, and a device of the peer copies by itself:
//! over NVLink, over PCIe, or within one GPU. Neither the owner nor any CPU touches a byte.
//!
//! ```text
//!       submit                    poll                      control connection: abstract SOCK_SEQPACKET,
//!         │                        ▲                        or TCP between hosts (`stream`)
//!         │                        │                                    │ Hello, Ask{region, key}
//!  ┌──────▼────────────────────────┴──────┐                             │ parts with handles, Grant
//!  │ transport   NvlinkTransport: slices  │   ┌─────────────────────────▼──────────────────────────┐
//!  │             that wait, copies that   ├───┤ owner    who may map what, who has died            │
//!  │             run, regions             │   │ peers    what is mapped here, rows, releases       │
//!  └──────┬───────────────────────────────┘   │ channel  frames that wait for room                 │
//!         │ start, poll                       │ wire     the frames; export: what leads to a region│
//!  ┌──────▼───────────────────────────────┐   └─────────────────────────┬──────────────────────────┘
//!  │ te_gpu::CopyQueue: a stream of each  │                             │ calls that may wait
//!  │ device that copies, with its marks   │   ┌─────────────────────────▼──────────────────────────┐
//!  └──────────────────────────────────────┘   │ worker   a thread: opens, closes, locks pages      │
//!                                             │ memory   what was opened                           │
//!                                             └────────────────────────────────────────────────────┘
//! ```
//!
//! **A grant.** An export contains no handle. A peer shows the key of the export over the control
//! connection, and the owner answers with the handles of the region: POSIX file descriptors and memory
//! files travel as descriptors, other handles in the frames ([`wire`]). The messages are those of
//! [`te_core::grant`].
//!
//! **Another host** is reached where an export has addresses: the owner listens for TCP, the memory has a
//! fabric handle, and both have an IMEX channel of one domain, which is tried by importing. The peer names
//! the owner, and then the same messages follow. The rows are seen by the peer alone, so what it was granted
//! is in use until it says that it has closed the mapping. Who has the key of an export, and reaches the
//! port, gets the handles: the network has to keep others out, as for the other fabrics.
//!
//! **A slice** waits until its region is granted and mapped. Then its peer marks the row of the grant as in
//! use, starts the copy, and clears the mark when the device says that the copies are over. A revoked row
//! takes no further copy. `poll` sees the end of a copy by one load from page-locked memory.
//!
//! **Taking memory back.** `deregister` returns `Ok` only when every peer has closed its mapping and said
//! so, because the CUDA manual leaves it undefined what happens when memory is freed that another process
//! has open. A peer that has died is known by its process (a pidfd), not by its connection: a process that
//! dies closes its descriptors one after the other, and its work on the device may end after the
//! connection. The process of another host cannot be seen: when its kernel says that the connection is over
//! (FIN or RST), its copies count as ended after [`Config::quarantine_ms`].
//!
//! | | |
//! |---|---|
//! | memory of devices | of `cudaMalloc`, by IPC handles; by virtual memory management, by descriptors or fabric handles |
//! | memory of the host | local: any, page-locked at the first slice; exported: [`SharedMemory`](te_host::SharedMemory) |
//! | sides of a slice | at least one is memory of a device; two sides of host memory are `Unreachable` |
//! | one-sided READ and WRITE | yes; slices of up to 64 MiB |
//! | the owner has to poll | to grant a region, and to take it back; not for copies |
//! | read-only grants | mapped for reading alone, but memory of `cudaMalloc`; enforced by the kernel for memory files |
//! | fences | end at once, because a slice ends after its last byte has arrived; unknown after a device failed |
//! | expulsion | yes |
//! | checksums | no |
//! | other hosts | memory of devices, by fabric handles, within an NVLink domain |
//!
//! # Limits
//!
//! * **What L6 cannot promise.** Handles open whole allocations. An IPC handle opens all of what
//!   `cudaMalloc` returned, with the other tensors in it, and for writing; a descriptor opens whole
//!   mappings. A peer that has a key and runs other code can use all of that, and can keep it. It can also
//!   say that it has released the memory and keep its mapping: `deregister` then returns `Ok`, and the peer
//!   reaches what is put there next. So only processes of the same user and of root are admitted
//!   ([`Config::other_users`]). A memory file is granted read-only as the region is, and the kernel enforces
//!   it.
//! * A process that is stopped (SIGSTOP), or does not poll, keeps what it has mapped: `deregister` is `Busy`
//!   until it goes on or dies. Of a process in a PID namespace that is not visible here, on a kernel before
//!   6.5, the end of the connection and [`Config::quarantine_ms`] count as its end.
//! * A process has up to 1,024 regions of one owner mapped or requested; `attach` of more is `Full`.
//! * File descriptors: one for each connection and one more for the process of a peer of this host, one for
//!   each exported memory file, and for each exported mapping of virtual memory. When there are none left,
//!   peers are refused, and owners are `Unreachable`: raise RLIMIT_NOFILE.
//! * Up to 20 warnings about other processes are written to the log in a minute.
//! * [`NvlinkTransport::not_exported`] says why memory is not exported, and
//!   [`NvlinkTransport::not_across_hosts`] why memory of a device is not exported to other hosts, as memory
//!   of `cudaMalloc`; [`te_core::Transport::why_not_exported`], from which engines list it, says both. Shared
//!   memory of the host is not served to other hosts.
//! * Of a peer on another host whose host stops answering (a partition, a crash), nothing is known: what it
//!   has mapped stays in use until its kernel answers a probe, which are sent for an hour, or this process
//!   ends. A peer that does not hear from its owner's host for 20 s closes what it has mapped. So with
//!   something between the hosts that ends connections by itself, such as a firewall,
//!   [`Config::quarantine_ms`] has to be above 20,000.
//! * What only an NVLink domain of several hosts can show: that the driver opens fabric handles of another
//!   host, which error it returns for a foreign domain, how copies and other hosts fare when a host of the
//!   domain dies, that the copies of a process that was killed have ended after the quarantine, and every
//!   figure. The tests use a fake driver, whose fabric handles are valid in all processes that have the
//!   number of the same domain.
//! * A remote region is mapped for one device, which does all copies from and to it: the one that has the
//!   memory, if this process has registered memory of it, or else a registered one that reaches it. Local
//!   memory of a further device is copied by that device, over PCIe where it has no direct way.
//! * The copy kernel is used where `te_gpu::Config::kernel` allows it; it is off by default.
//! * Device memory that is freed while it is registered is noticed when a peer asks for it, and on the
//!   local side after the next registration, but not in between; and of a span of several mappings, only
//!   the first one is looked at.
//! * When a device fails, slices end as `Rail`, fences end as unknown from then on, and regions stay in use
//!   until the process ends ([`NvlinkTransport::quarantined`]). Regions of up to 4,096 mappings; 65,536
//!   regions and remote regions.
//! * No figure of this crate has been measured on a device: its tests use a fake driver.
//!   `tests/hardware.rs` runs on the GPUs of a host, and prints figures beside their bounds.
//!
//! # Example
//!
//! Two transports of one process; usually they are in two.
//!
//! ```
//! use te_core::*;
//! use te_gpu::Gpu;
//! use te_nvlink::{Config, NvlinkTransport};
//!
//! let gpu = Gpu::cuda(te_gpu::Config::default())?;
//! let device = match gpu.devices() {
//!     Ok(devices) => devices[0].location,
//!     Err(reason) => {
//!         println!("{reason}");
//!         return Ok(());
//!     }
//! };
//! let (here, there) = (gpu.allocate(device, 4096)?, gpu.allocate(device, 4096)?);
//! here.write(0, b"kv cache")?;
//! let mut peer = NvlinkTransport::new(Config::default(), gpu.clone())?;
//! let mut owner = NvlinkTransport::new(Config::default(), gpu.clone())?;
//! let (region, remote_region) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! // SAFETY: both live until they are deregistered, below.
//! unsafe {
//!     peer.register(region, here.span(), Access::LOCAL)?;
//!     owner.register(region, there.span(), Access::REMOTE_WRITE)?;
//! }
//! let mut export = [0; 128];
//! let len = owner.export(region, &mut export)?;
//! peer.attach(remote_region, &export[..len])?;
//!
//! let (local, remote) = (RegionOffset::new(region, 0), RemoteOffset::new(remote_region, 100));
//! peer.submit(&[Slice { token: Token(1), local, remote, len: 8, op: Op::Write }])?;
//! let mut ended = [Completion::applied(Token(0))];
//! while peer.poll(Instant::ZERO, &mut ended) == 0 {
//!     owner.poll(Instant::ZERO, &mut []);
//! }
//! assert_eq!(ended[0], Completion::applied(Token(1)));
//! peer.detach(remote_region)?;
//! peer.deregister(region)?;
//! // The peer closes its mapping while it polls.
//! while owner.deregister(region).is_err() {
//!     peer.poll(Instant::ZERO, &mut []);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(unsafe_code)]

mod channel;
mod config;
mod export;
mod memory;
mod not_exported;
mod owner;
mod peers;
mod stream;
mod sys;
mod transport;
mod warnings;
pub mod wire;
mod worker;

pub use config::Config;
pub use export::Export;
pub use not_exported::NotExported;
pub use te_fabric::OpenError;
pub use transport::NvlinkTransport;

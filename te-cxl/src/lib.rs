//! The fabric over a CXL pool: memory that several hosts map. A peer copies to and from it by itself; the
//! owner of the bytes need not poll, nor run.
//!
//! A pool is a devdax device that the fabric manager gives to several hosts, or any file that can be mapped
//! shared: a memory file, a file in a tmpfs. CXL memory that the kernel uses as a NUMA node
//! (`system-ram`) is host memory and needs none of this.
//!
//! ```text
//!        submit                poll                          the master, outside
//!          │                    ▲                    gives extents to owners, pages to peers
//!  ┌───────▼────────────────────┴─────────┐                       │ Claim, Seat
//!  │ transport  CxlTransport: queue,      │      ┌────────────────▼──────────────────┐
//!  │            regions, cancels          ├──────┤ pool   Pool: format, open,        │
//!  │ owner      rows of exported regions, │      │        inspect, claim, release    │
//!  │            expelled identities       │      │ pool::format   the lines in it    │
//!  └───────┬──────────────────┬───────────┘      └────────────────┬──────────────────┘
//!          │ enter, leave,    │ get, put                          │
//!  ┌───────▼───────┐  ┌───────▼───────┐   generic over `Lines`    │
//!  │ ledger        │  │ lines         │   (release: instructions; tests: a model of caches)
//!  └───────┬───────┘  └───────┬───────┘                           │
//!  ┌───────▼──────────────────▼───────────────────────────────────▼──────────────────┐
//!  │ sys   mappings, copy routines in assembly, the handler of SIGBUS                │
//!  └─────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! | | mode `flush` (default) | mode `hardware` |
//! |---|---|---|
//! | caches of different hosts | do not know of each other | are coherent, as the operator states |
//! | WRITE | stores past the cache, `sfence` | plain copy |
//! | READ | drops the lines from the cache, `mfence`, plain copy | plain copy |
//! | offsets and lengths | multiples of 64 bytes; any, where each line has one writer ([`Config::sole_writer`]) | any |
//! | runs on | x86_64 with CLFLUSH | every processor |
//! | one-sided READ and WRITE | yes | yes |
//! | exports | memory of extents that this process has claimed | the same |
//! | fences | end at once, because nothing is ever late | the same |
//! | expulsion | up to 112 identities that hold a page of the pool | the same |
//! | checksums | CRC-32C, computed after the copy | the same |
//! | memory that fails (SIGBUS) | ends the slice: `Corrupt`, `Rail` | the same on x86_64 |
//! | reports of damaged memory (SIGBUS of `vm.memory_failure_early_kill`) | noted: slices there are `Corrupt` | the same on x86_64 |
//!
//! # Who decides what
//!
//! The pool decides nothing and holds no lock: hosts have no atomic operations on it. The master gives
//! extents to owners ([`Claim`]) and one page each to peers ([`Seat`]), in epochs that grow. Both are written
//! down in the pool ([`Pool::claim`]), each line by one host alone, and what an export states is compared
//! with them before a byte moves ([`ledger`]). Processes of one host prove to each other that one has ended
//! with the kernel's locks on the pool's file ([`Pool::lock`]).
//!
//! A slice ends within one call of `poll`. A peer writes into its own page what it uses while it copies; an
//! owner that takes a region back looks there. So `deregister` is `Busy` while a peer is in the middle of a
//! copy, also when that process is stopped. When it was killed, an owner of the same host sees that no
//! process holds the lock that the peer held on its page, and does not wait for it. An owner of another host
//! cannot see that: there `deregister` stays `Busy` until the master gives the peer's page to another
//! process, which it does when it knows that the process, or the host, can write no more.
//!
//! # Limits
//!
//! * **L6 rests on trust.** A pool has no keys: a process that may open the device can write all of it.
//!   Honest code is held to exports, rights and extents; keys are compared by the peer, and the pool holds
//!   their hashes. [`Pool::open_to_read`] maps the extents so that this process cannot write them.
//! * Linux. Slices of up to 2 MiB, 4,096 in flight; one call of `poll` copies about 1 MiB. 65,536 regions,
//!   of which 47 can begin in one extent, and 65,536 remote regions. Extents of 2 MiB or a multiple; up to
//!   1,024 peers of one pool.
//! * In mode `flush`, bytes that this host writes into the pool by itself reach other hosts with
//!   [`Pool::write_back`], and what other hosts wrote is read after [`Pool::refresh`]. [`Pool::read`] and
//!   [`Pool::write`] do both, and so does the transport for its own slices.
//! * In mode `flush`, the handshake of owners and peers assumes that a store past the cache is seen by the
//!   loads of every other host once its host has fenced (`mfence`), dropped the line from its cache and read
//!   it back. Writes to a CXL device are posted: no document of the processor promises when another host sees
//!   them. The read takes the same way, and the device answers it after the write.
//! * Other processors than x86_64 have the mode `hardware` alone, and memory that fails ends the process.
//! * Reports of damaged memory are noted for up to 64 mappings of pools in a process.
//! * The handler of SIGBUS is installed whenever a pool is mapped and it is not there, and again when a
//!   handler that it passes a signal on to has taken it away. A handler that is installed after that replaces
//!   it, unless it passes on what is not its own.
//!
//! # Figures
//!
//! A WRITE in mode `flush` to memory that is in no cache, one slice at a time, beside the `memcpy` of libc in
//! the same run: medians of five runs on two cores of an EPYC (Zen 4) that had other work (load average 8.5).
//! The pool was a memory file; the memory of a CXL device is farther away. `benches/benches/cxl.rs` measures
//! the same.
//!
//! | | this crate | `memcpy` | factor, least and most |
//! |---|---|---|---|
//! | 1 MiB | 44.4 µs | 90.3 µs | 2.0 × (1.4 to 2.1) |
//! | 64 KiB | 3.5 µs | 6.9 µs | 2.0 × (1.7 to 2.1) |
//! | 4 KiB | 1.19 µs | 0.35 µs | 0.29 × |
//!
//! From 16 KiB on, lines go to four pages side by side: with bare instructions, 1 MiB took 44.5 µs this way,
//! and 67.2 µs one page after the other, whatever the width of the stores. A slice of 4 KiB is bound by the
//! handshake of [`ledger`], whose steps wait for memory one after the other: that the entry in the peer's
//! page is there, then for the lines of the owner, then for the bytes. The same stores, fences and loads
//! without any other code took 0.93 µs, of which the bytes were 0.22 µs. Slices of one `poll` to the same
//! region share the handshake.
//!
//! # Example
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use te_core::*;
//! use te_cxl::{Claim, Config, CxlTransport, FormatOptions, Mount, Pool, Seat};
//!
//! # let dir = std::env::temp_dir();
//! # let path = dir.join(format!("snowskin-doc-{}", std::process::id()));
//! # std::fs::File::create(&path)?.set_len(16 << 20)?;
//! // Once: make a pool. Then each host maps it; in this example, one process does it twice.
//! let config = Config::default();
//! Pool::format(&path, FormatOptions::default())?;
//! let (ours, theirs) = (Pool::open(&path, config.coherence, None)?, Pool::open(&path, config.coherence, None)?);
//! # std::fs::remove_file(&path)?;
//! // The master has given extent 0 to the owner and page 0 to the peer.
//! let memory = theirs.claim(Claim { first: 0, count: 1, incarnation: 1, epoch: 1, key: [7; 16] })?;
//! let seat = Some(Seat { slot: 0, epoch: 1 });
//! let mut peer = CxlTransport::new(config.clone(), vec![Mount { pool: ours, seat }])?;
//! let mut owner = CxlTransport::new(config, vec![Mount { pool: theirs, seat: None }])?;
//!
//! let (region, remote) = (RegionId::new(0, 1), RemoteRegionId::new(0, 1));
//! let mut buffer = *b"one line of sixty-four bytes, which is the unit of this fabric..";
//! // SAFETY: the pool is mapped and the buffer exists until both are deregistered, below.
//! unsafe {
//!     owner.register(region, memory, Access::REMOTE_WRITE)?;
//!     peer.register(region, MemSpan::new(buffer.as_mut_ptr(), 64), Access::LOCAL)?;
//! }
//! let mut export = [0; 128];
//! let len = owner.export(region, &mut export)?;
//! peer.attach(remote, &export[..len])?;
//!
//! let (local, there) = (RegionOffset::new(region, 0), RemoteOffset::new(remote, 4096));
//! peer.submit(&[Slice { token: Token(1), local, remote: there, len: 64, op: Op::Write }])?;
//! let mut ended = [Completion::applied(Token(0))];
//! assert_eq!((peer.poll(Instant::ZERO, &mut ended), ended[0]), (1, Completion::applied(Token(1))));
//! peer.deregister(region)?;
//! owner.deregister(region)?;
//! # Ok(())
//! # }
//! ```
#![deny(unsafe_code)]

mod config;
mod export;
pub mod ledger;
pub mod lines;
mod owner;
pub mod pool;
mod sys;
mod transport;

pub use config::{Coherence, Config};
pub use export::Export;
pub use pool::{Claim, FormatOptions, Inspection, Part, Pool, PoolError, Seat};
pub use te_fabric::OpenError;
pub use transport::{CxlTransport, Mount};

/// Whether this processor can do what the mode `flush` needs.
#[must_use]
pub fn can_flush() -> bool {
    sys::can_flush()
}

/// Random bytes that cannot be guessed.
pub(crate) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| std::io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(bytes)
}

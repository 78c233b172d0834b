//! The fabric within one host: processes map each other's memory files and copy, one `memcpy` per slice.
//!
//! ```text
//!      owner                                            peer
//!   SharedMemory ── export: boot id, socket name,
//!    (a memfd)        region, key, length, rights ─────► attach
//!        │                                                 │
//!     listener ◄────────── Hello, Ask{region, key} ────── socket
//!        │                                                 │
//!        ├─── Welcome + ledger file ─────────────────────► mapped by both
//!        ├─── Grant{row, offset, len} + memory file ─────► mapped with the granted rights
//!        │                                                 │
//!   deregister: row revoked ──(ledger)──► seen before each copy
//!        │        row not in use  ◄──(ledger)──┘
//!        └─── Revoked{row} ──────────────────────────────► unmapped, Release{row}
//! ```
//!
//! The messages and what follows from them are defined by [`te_core::grant`]; this module has the sockets,
//! the files and the mappings.
//!
//! Guarantees and limits:
//! * A region is granted only to a peer with its key. When the grant is read-only, the kernel enforces that.
//! * After `deregister` has returned `Ok`, no peer that runs this code touches the memory. A peer that died
//!   in the middle of a copy does not delay it: the kernel closes the peer's socket after its memory is gone.
//!   A peer that has the key and runs other code can keep its mapping: on one host, the key is the trust.
//! * A peer that is *expelled* loses everything that it was granted, and is refused from then on by the
//!   identity in its HELLO. The expulsion is complete when no row of the peer is in use: a peer that was
//!   stopped in the middle of a copy delays it until it continues, and leaves the row, or dies.
//! * Any process of the host can connect to the listener. One that was granted nothing within 2 s is
//!   disconnected, one that reads no answers is not read until it does, and a user other than the owner's
//!   (and root) has 64 connections at most.
//! * While an owner has not granted a region after 2 s, copies fail with `Unreachable` at once, so that other
//!   fabrics take over. Its answer counts whenever it arrives.
//! * A process that forks without `exec` keeps its sockets open in the child. The child does not use them
//!   ([`fork`](crate::fork)), and the death of a peer is detected by its process as well as by its socket.
//! * Only [`SharedMemory`] can be exported. Other memory can only be the local side of slices, and `export`
//!   returns `Unsupported`.
//! * Abstract socket names belong to a network namespace: containers in different namespaces do not reach
//!   each other.
//!
//! The export, 66 bytes: `version u8 = 1 | boot id 16 | socket 16 | region u64 | key 16 | len u64 | access
//! u8`.

mod owner;
mod peer;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::grant::{Offer, Want};
use te_core::{Access, Error, ErrorKind, EventSource, Instant, RegionId, Slice};
use te_fabric::config::{ConfigError, check_ranges};
use te_fabric::{Epoll, Interest, OpenError};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::copier::Copier;
use crate::keys::{identity, no_random_numbers, random, remote_access, remote_bits};
use crate::reach::{Checksum, Copied, EXPORT_BYTES_MAX, Reach};
use crate::sys::{HeldSpan, SharedMemory, Use};
use owner::Owner;
use peer::Peers;

const VERSION: u8 = 1;
/// Events taken from the kernel in one call.
const EVENTS_MAX: usize = 16;

/// The settings of a [`ShmTransport`]: its identity, and its limits for peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct ShmConfig {
    /// How peers identify this process, and expel it: the same for all transports of one engine. Default 0: a
    /// random one.
    #[serde(skip)]
    pub identity: u64,
    /// Processes that may map memory of this process at the same time; 1 to 65,536. Default 1,024.
    pub peers_max: u32,
    /// Processes among these that may belong to one user who is neither this process's user nor root; 0 to
    /// 65,536. Default 64.
    pub peers_per_user_max: u32,
    /// A process that has connected and was granted nothing for this long is disconnected, ms; 1 to
    /// 3,600,000. Any process of the host can connect, and a peer requests a region at once. Default 2,000.
    pub idle_ms_max: u32,
    /// How long copies wait for an owner to grant a region, ms; 1 to 3,600,000. After that they fail with
    /// `Unreachable`, so that other fabrics take over, until the owner answers. Default 2,000.
    pub grant_ms_max: u32,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self {
            identity: 0,
            peers_max: 1_024,
            peers_per_user_max: 64,
            idle_ms_max: 2_000,
            grant_ms_max: 2_000,
        }
    }
}

impl ShmConfig {
    /// Checks every field against its range.
    ///
    /// # Errors
    /// The first field that is outside its range, with the range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_ranges([
            ("peers_max", u64::from(self.peers_max), 1, 65_536),
            ("peers_per_user_max", u64::from(self.peers_per_user_max), 0, 65_536),
            ("idle_ms_max", u64::from(self.idle_ms_max), 1, 3_600_000),
            ("grant_ms_max", u64::from(self.grant_ms_max), 1, 3_600_000),
        ])
    }
}

/// Copies between the processes of one host, through shared memory.
pub type ShmTransport = Copier<Shm>;

impl ShmTransport {
    /// A transport without regions. It listens from its first export on.
    ///
    /// # Errors
    /// A setting outside its range; a host whose boot id cannot be read; no file descriptor or no random
    /// numbers from the system.
    pub fn new(config: ShmConfig) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        let identity = if config.identity == 0 { identity() } else { Ok(config.identity) };
        let milliseconds = |ms: u32| Duration::from_millis(ms.into());
        Ok(Self::over(Shm {
            boot: boot_id().map_err(OpenError::step("read the boot id"))?,
            socket: random().map_err(no_random_numbers)?,
            epoll: Epoll::new(EVENTS_MAX).map_err(OpenError::step("create an epoll instance"))?,
            owner: Owner::new(&config),
            peers: Peers::new(identity.map_err(no_random_numbers)?, milliseconds(config.grant_ms_max)),
        }))
    }
}

/// Finds memory of other processes of the host by requesting it from them.
pub struct Shm {
    boot: [u8; 16],
    /// Name of this transport's listener.
    socket: [u8; 16],
    epoll: Epoll,
    /// The exported regions, and the peers that map them.
    owner: Owner,
    /// The owners whose regions are mapped here.
    peers: Peers,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Export {
    version: u8,
    boot: [u8; 16],
    socket: [u8; 16],
    region: U64,
    key: [u8; 16],
    len: U64,
    access: u8,
}

/// The socket that an event belongs to.
#[derive(Clone, Copy)]
enum Tag {
    Listener,
    /// The socket of a peer that maps memory of this process.
    Holder(u32),
    /// The socket of an owner whose memory is mapped here.
    Host(u32),
}

impl Tag {
    fn to_bits(self) -> u64 {
        match self {
            Self::Listener => 0,
            Self::Holder(index) => 1 << 32 | u64::from(index),
            Self::Host(index) => 2 << 32 | u64::from(index),
        }
    }

    fn from_bits(bits: u64) -> Self {
        match bits >> 32 {
            0 => Self::Listener,
            1 => Self::Holder(bits as u32),
            _ => Self::Host(bits as u32),
        }
    }
}

impl Shm {
    /// Handles what has arrived on the sockets.
    fn events(&mut self) {
        let count = self.epoll.ready().unwrap_or(0);
        for at in 0..count {
            match Tag::from_bits(self.epoll.event(at).token) {
                Tag::Listener => self.owner.accept(&self.epoll),
                Tag::Holder(index) => self.owner.receive(&self.epoll, index),
                Tag::Host(index) => self.peers.receive(index),
            }
        }
    }
}

impl Reach for Shm {
    const NAME: &'static str = "shm";
    const EXPORT_BYTES: u32 = size_of::<Export>() as u32;
    const OWNER_POLLS: bool = true;
    type Export = [u8; 16];
    /// Index of an attached region in `peers`.
    type Link = u32;

    fn share(
        &mut self,
        id: RegionId,
        held: &Arc<HeldSpan>,
        access: Access,
    ) -> Result<Option<[u8; 16]>, Error> {
        let Some((memory, offset)) = SharedMemory::find(held.span()) else { return Ok(None) };
        if access.contains(Access::REMOTE_WRITE) && !memory.peers_may_write() {
            return Ok(None);
        }
        let key = random()?;
        self.owner.listen(&self.epoll, &socket_name(&self.socket))?;
        let len = held.span().len() as u64;
        self.owner.share(id, Offer { key, offset, len, access }, memory);
        Ok(Some(key))
    }

    fn unshare(&mut self, id: RegionId, _export: &[u8; 16]) -> bool {
        // The death of peers is detected first.
        self.events();
        self.owner.unshare(id)
    }

    fn export(
        &self,
        id: RegionId,
        key: &[u8; 16],
        access: Access,
        len: u64,
        out: &mut [u8; EXPORT_BYTES_MAX],
    ) -> usize {
        let export = Export {
            version: VERSION,
            boot: self.boot,
            socket: self.socket,
            region: id.to_bits().into(),
            key: *key,
            len: len.into(),
            access: remote_bits(access),
        };
        out[..size_of::<Export>()].copy_from_slice(export.as_bytes());
        size_of::<Export>()
    }

    fn attach(&mut self, blob: &[u8]) -> Result<(u32, u64, Access), Error> {
        let export = Export::read_from_bytes(blob).map_err(|_| ErrorKind::InvalidArgument)?;
        let (len, access) = (export.len.get(), remote_access(export.access)?);
        if export.version != VERSION {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        if export.boot != self.boot {
            return Err(Error::new(ErrorKind::Unreachable));
        }
        let want = Want { region: RegionId::from_bits(export.region.get()), key: export.key, len, access };
        Ok((self.peers.attach(&self.epoll, export.socket, want)?, len, access))
    }

    fn detach(&mut self, link: u32) {
        self.peers.detach(link);
    }

    fn copy(&self, link: &u32, local: &Use<'_>, slice: &Slice, checksum: Checksum) -> Copied {
        self.peers.copy(*link, local, slice, checksum)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.owner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        // The death of peers is detected first. A peer that waits in the accept queue is accepted, so that it
        // can be expelled.
        self.events();
        self.owner.expel(peer)
    }

    fn poll(&mut self, now: Instant) {
        self.events();
        self.owner.poll(&self.epoll, now);
        self.peers.poll(now);
    }

    fn poll_at(&self) -> Option<Instant> {
        let owner = self.owner.poll_at(self.peers.soon());
        owner.into_iter().chain(self.peers.poll_at()).min()
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(self.epoll.raw_fd()))
    }
}

/// The boot id of this machine: shared memory does not reach beyond one boot of one machine.
///
/// # Errors
/// The system's error.
pub fn boot_id() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    let mut id = [0; 16];
    if digits.len() != 32 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Ok(id)
}

/// The abstract name of a listener. It is printable, because `ss -x` shows it.
#[must_use]
pub fn socket_name(socket: &[u8; 16]) -> [u8; 41] {
    let mut name = *b"snowskin-00000000000000000000000000000000";
    for (pair, byte) in name[9..].chunks_exact_mut(2).zip(socket) {
        let digit = |nibble: u8| if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 };
        (pair[0], pair[1]) = (digit(byte >> 4), digit(byte & 15));
    }
    name
}

fn watch(epoll: &Epoll, socket: impl AsFd, tag: Tag) -> Result<(), Error> {
    epoll.add(socket, tag.to_bits(), Interest::READ).map_err(system)
}

fn system(error: impl Into<io::Error>) -> Error {
    Error::with_code(ErrorKind::System, error.into().raw_os_error().unwrap_or(0))
}

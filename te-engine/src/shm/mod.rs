//! The fabric within one host: processes map each other's memory files and copy, one `memcpy` a slice.
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
//! What holds, and what does not:
//! * A region is handed out only for its key, and read-only in a way that the kernel enforces when the grant is read-only.
//! * After `deregister` returned `Ok`, no peer that runs this code touches the memory. A peer that died in the middle of a
//!   copy does not block it: the kernel closes its socket after its memory is gone. A peer that holds the key and runs other
//!   code can keep its mapping: on one host, the key is the trust.
//! * A peer that is *expelled* loses all that it was granted, and is refused from then on by the identity that it told. It is gone
//!   once no row of it is in use: one that is stopped in the middle of a copy is not gone until it goes on, and steps out, or dies.
//! * Any process of the host can connect to the listener. One that is granted nothing within 2 s is dropped, one that reads
//!   no answers is not heard until it does, and a user other than the owner's (and root) has 64 connections at most.
//! * While an owner that took longer than 2 s to grant a region has not done so, copies are `Unreachable` at once, so that
//!   other fabrics take over. Its answer counts whenever it comes.
//! * A process that forks without `exec` keeps its sockets open in the child. A child does not use them ([`fork`](crate::fork)), and
//!   that a peer has died is known by its process as well as by its socket.
//! * Only [`SharedMemory`] can be exported; other memory is a local side alone, and `export` says `Unsupported`.
//! * Abstract socket names belong to a network namespace: containers that share none do not reach each other.
//!
//! The export, 66 bytes: `version u8 = 1 | boot id 16 | socket 16 | region u64 | key 16 | len u64 | access u8`.

mod message;
mod owner;
mod peer;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::vec::Vec;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Instant, MemSpan, Memory, RegionId,
    SegmentId, Slice, Token, Transport,
};

use crate::blob::{Fields, identity, put, random, remote_bits};
use crate::copier::{Copied, Copier, Reach};
use crate::sys::{HeldSpan, SeqSocket, SharedMemory, Use};
use owner::{Owner, Shared};
use peer::{Ask, Peers};

const VERSION: u8 = 1;
/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 16;

/// Shared memory between the processes of one host.
pub struct ShmTransport(Copier<ShmReach>);

impl ShmTransport {
    /// A transport without regions, under an identity of its own. It listens from its first export on.
    ///
    /// # Errors
    /// `System` when the host tells no boot id, or the system gives no descriptor or randomness.
    pub fn new() -> Result<Self, Error> {
        Self::with_identity(identity()?)
    }

    /// A transport without regions that its peers know by `identity`; not 0. It listens from its first export on.
    ///
    /// # Errors
    /// `InvalidArgument` for 0; as [`new`](Self::new).
    pub fn with_identity(identity: u64) -> Result<Self, Error> {
        if identity == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        let socket = random()?;
        let reach = ShmReach {
            boot: boot_id()?,
            socket,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(system)?,
            owner: Owner::new(),
            peers: Peers::new(identity),
        };
        Ok(Self(Copier::new(reach)))
    }
}

crate::copier::forward_transport!(ShmTransport);

struct ShmReach {
    boot: [u8; 16],
    /// Names our listener.
    socket: [u8; 16],
    epoll: Epoll,
    /// Our regions, and who maps them.
    owner: Owner,
    /// Owners whose regions we map.
    peers: Peers,
}

/// Whose socket an event is about.
#[derive(Clone, Copy)]
enum Tag {
    Listener,
    /// One who maps our memory.
    Holder(u32),
    /// One whose memory we map.
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

impl ShmReach {
    /// Takes what waits on the sockets.
    fn events(&mut self) {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            match Tag::from_bits(event.data()) {
                Tag::Listener => self.owner.accept(&self.epoll),
                Tag::Holder(index) => self.owner.receive(&self.epoll, index),
                Tag::Host(index) => self.peers.receive(index),
            }
        }
    }
}

impl Reach for ShmReach {
    const NAME: &'static str = "shm";
    const EXPORT_BYTES: u32 = 66;
    const OWNER_POLLS: bool = true;
    type Export = [u8; 16];
    /// A row of `peers`.
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
        self.owner.share(id, Shared { generation: id.generation, key, memory, offset, len, access });
        Ok(Some(key))
    }

    fn unshare(&mut self, id: RegionId, _export: &[u8; 16]) -> bool {
        // Whoever died is noticed first.
        self.events();
        self.owner.unshare(id)
    }

    fn export(&self, id: RegionId, key: &[u8; 16], access: Access, len: u64, out: &mut [u8; 128]) -> usize {
        let (region, len) = (id.to_bits().to_le_bytes(), len.to_le_bytes());
        put(out, &[&[VERSION], &self.boot, &self.socket, &region, key, &len, &[remote_bits(access)]])
    }

    fn attach(&mut self, blob: &[u8]) -> Result<(u32, u64, Access), Error> {
        let mut fields = Fields(blob);
        let (version, boot, socket) = (fields.u8()?, fields.bytes::<16>()?, fields.bytes::<16>()?);
        let region = RegionId::from_bits(fields.u64()?);
        let (key, len, access) = (fields.bytes()?, fields.u64()?, fields.remote_access()?);
        fields.end()?;
        if version != VERSION {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        if boot != self.boot {
            return Err(Error::new(ErrorKind::Unreachable));
        }
        let link = self.peers.attach(&self.epoll, socket, Ask { region, key, len, access })?;
        Ok((link, len, access))
    }

    fn detach(&mut self, link: u32) {
        self.peers.detach(link);
    }

    fn copy(&self, link: &u32, local: &Use<'_>, slice: &Slice) -> Copied {
        self.peers.copy(*link, local, slice)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.owner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        // Whoever died is noticed first, and who waits at the door is let in to be thrown out.
        self.events();
        self.owner.expel(peer)
    }

    fn poll(&mut self, now: Instant) {
        self.events();
        self.owner.poll(&self.epoll, now);
        self.peers.flush(now);
    }

    fn poll_at(&self) -> Option<Instant> {
        let owner = self.owner.poll_at(self.peers.soon());
        owner.into_iter().chain(self.peers.poll_at()).min()
    }

    fn event_source(&self) -> Option<EventSource> {
        Some(EventSource(std::os::fd::AsRawFd::as_raw_fd(&self.epoll.0)))
    }
}

/// Which boot of which machine this is: shared memory does not reach further.
fn boot_id() -> Result<[u8; 16], Error> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|error| Error::with_code(ErrorKind::System, error.raw_os_error().unwrap_or(0)))?;
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    let mut id = [0; 16];
    if digits.len() != 32 {
        return Err(Error::new(ErrorKind::System));
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Ok(id)
}

/// The abstract name of a listener; readable, since `ss -x` shows it.
fn socket_name(socket: &[u8; 16]) -> [u8; 41] {
    let mut name = *b"snowskin-00000000000000000000000000000000";
    for (pair, byte) in name[9..].chunks_exact_mut(2).zip(socket) {
        let digit = |nibble: u8| if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 };
        (pair[0], pair[1]) = (digit(byte >> 4), digit(byte & 15));
    }
    name
}

/// Takes `bytes` for a message: what is understood comes back the same.
#[cfg(fuzzing)]
pub(crate) fn fuzz_message(bytes: &[u8]) {
    let Ok(understood) = message::Message::decode(bytes) else { return };
    let mut out = [0; 128];
    let len = understood.encode(&mut out);
    assert!(len <= message::MESSAGE_BYTES_MAX);
    assert_eq!(message::Message::decode(&out[..len]), Ok(understood));
}

fn watch(epoll: &Epoll, socket: &SeqSocket, tag: Tag) -> Result<(), Error> {
    epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, tag.to_bits())).map_err(system)
}

fn system(errno: nix::errno::Errno) -> Error {
    Error::with_code(ErrorKind::System, errno as i32)
}

//! The fabric within one process: transports that share an address space copy from one's memory to the
//! other's.
//!
//! An export names an entry of a table that all transports of the process share. Its layout, 50 bytes:
//!
//! ```text
//!   version u8 = 1 | process 16 | number u64 | key 16 | len u64 | access u8
//! ```
//!
//! `process` is random: an export that another process attaches is `Unreachable`, whatever its process id is,
//! even if it is a fork of the process that wrote the export.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use te_core::{Access, EXPELLED_MAX, Error, ErrorKind, RegionId, Slice};
use te_fabric::OpenError;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::copier::{Copier, carry_out, rights};
use crate::fork::PerProcess;
use crate::keys::{identity, no_random_numbers, random, remote_access, remote_bits, same_bytes};
use crate::reach::{Checksum, Copied, EXPORT_BYTES_MAX, Reach};
use crate::sys::{Gate, HeldSpan, Use};

const VERSION: u8 = 1;

/// The settings of a [`LocalTransport`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// How peers identify this process, and expel it: the same for all transports of one engine. Default 0: a
    /// random one.
    pub identity: u64,
}

/// Copies within the process. Bytes move inside `poll`; the owner of the other side need not poll.
pub type LocalTransport = Copier<Local>;

impl Config {
    /// The settings of a transport with this identity.
    #[must_use]
    pub const fn of(identity: u64) -> Self {
        Self { identity }
    }
}

impl LocalTransport {
    /// A transport without regions.
    ///
    /// # Errors
    /// The system returns no random numbers.
    pub fn new(config: Config) -> Result<Self, OpenError> {
        let identity = if config.identity == 0 { identity() } else { Ok(config.identity) };
        Ok(Self::over(Local {
            identity: identity.map_err(no_random_numbers)?,
            process: process().map_err(no_random_numbers)?,
            gates: Arc::default(),
        }))
    }
}

/// Finds memory of this process by a table that all transports of the process share.
pub struct Local {
    identity: u64,
    process: [u8; 16],
    gates: Arc<Gates>,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Export {
    version: u8,
    process: [u8; 16],
    number: U64,
    key: [u8; 16],
    len: U64,
    access: u8,
}

/// One gate for each peer that has attached memory of one owner, by the peer's identity. A peer copies while
/// it is inside its gate; a gate that is shut is kept, and its peer stays outside.
#[derive(Default)]
struct Gates(Mutex<HashMap<u64, Arc<Gate>>>);

/// From this number of gates on, gates that no peer uses are removed.
const GATES_SWEPT: usize = 1024;

impl Gates {
    /// The gate of a peer; an error when the peer was expelled.
    fn gate(&self, peer: u64) -> Result<Arc<Gate>, Error> {
        let mut gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if gates.len() >= GATES_SWEPT && !gates.contains_key(&peer) {
            gates.retain(|_, gate| gate.is_shut() || Arc::strong_count(gate) > 1);
        }
        let gate = gates.entry(peer).or_default();
        if gate.is_shut() { Err(Error::new(ErrorKind::Expelled)) } else { Ok(gate.clone()) }
    }

    fn is_connected(&self, peer: u64) -> bool {
        let gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        gates.get(&peer).is_some_and(|gate| !gate.is_shut() && Arc::strong_count(gate) > 1)
    }

    fn expel(&self, peer: u64) -> Result<bool, Error> {
        let mut gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let barred = |gates: &HashMap<u64, Arc<Gate>>| gates.values().filter(|gate| gate.is_shut()).count();
        if !gates.get(&peer).is_some_and(|gate| gate.is_shut()) && barred(&gates) >= EXPELLED_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        Ok(gates.entry(peer).or_default().shut())
    }
}

/// A region that transports of this process may reach.
pub struct Entry {
    number: u64,
    key: [u8; 16],
    access: Access,
    held: Arc<HeldSpan>,
    gates: Arc<Gates>,
}

/// How a peer reaches a region: the entry, and the peer's gate, which the owner can shut.
pub struct Attached {
    entry: Arc<Entry>,
    gate: Arc<Gate>,
}

/// All exported regions of the process.
#[derive(Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, Arc<Entry>>,
}

static TABLE: PerProcess<Mutex<Table>> = PerProcess::new();

/// A random number for this process, which no other process has.
fn process() -> Result<[u8; 16], Error> {
    static PROCESS: PerProcess<OnceLock<[u8; 16]>> = PerProcess::new();
    let known = PROCESS.get();
    match known.get() {
        Some(process) => Ok(*process),
        None => {
            let process = random()?;
            Ok(*known.get_or_init(|| process))
        }
    }
}

impl Reach for Local {
    const NAME: &'static str = "local";
    const EXPORT_BYTES: u32 = size_of::<Export>() as u32;
    const OWNER_POLLS: bool = false;
    type Export = Arc<Entry>;
    /// An error when the region cannot be reached.
    type Link = Result<Attached, Error>;

    fn share(
        &mut self,
        _id: RegionId,
        held: &Arc<HeldSpan>,
        access: Access,
    ) -> Result<Option<Arc<Entry>>, Error> {
        let key = random()?;
        let mut table = TABLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        let number = table.next;
        table.next += 1;
        let gates = self.gates.clone();
        let entry = Arc::new(Entry { number, key, access, held: held.clone(), gates });
        table.entries.insert(number, entry.clone());
        Ok(Some(entry))
    }

    fn unshare(&mut self, _id: RegionId, export: &Arc<Entry>) -> bool {
        let mut table = TABLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        table.entries.remove(&export.number);
        // Peers hold the same `HeldSpan`, which the caller revokes.
        true
    }

    fn export(
        &self,
        _id: RegionId,
        export: &Arc<Entry>,
        access: Access,
        len: u64,
        out: &mut [u8; EXPORT_BYTES_MAX],
    ) -> usize {
        let export = Export {
            version: VERSION,
            process: self.process,
            number: export.number.into(),
            key: export.key,
            len: len.into(),
            access: remote_bits(access),
        };
        out[..size_of::<Export>()].copy_from_slice(export.as_bytes());
        size_of::<Export>()
    }

    fn attach(&mut self, blob: &[u8]) -> Result<(Self::Link, u64, Access), Error> {
        let export = Export::read_from_bytes(blob).map_err(|_| ErrorKind::InvalidArgument)?;
        let access = remote_access(export.access)?;
        if export.version != VERSION {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        if export.process != self.process {
            return Err(Error::new(ErrorKind::Unreachable));
        }
        let table = TABLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        let link = match table.entries.get(&export.number.get()) {
            None => Err(Error::new(ErrorKind::Stale)),
            Some(entry) if !same_bytes(&entry.key, &export.key) => Err(Error::new(ErrorKind::AccessDenied)),
            Some(entry) => {
                entry.gates.gate(self.identity).map(|gate| Attached { entry: entry.clone(), gate })
            }
        };
        Ok((link, export.len.get(), access))
    }

    fn copy(&self, link: &Self::Link, local: &Use<'_>, slice: &Slice, checksum: Checksum) -> Copied {
        let Attached { entry, gate } = match link {
            Ok(attached) => attached,
            Err(error) => return Copied::Failed(*error),
        };
        let Some(_inside) = gate.enter() else {
            return Copied::Failed(Error::new(ErrorKind::Expelled));
        };
        if !entry.access.contains(rights(slice.op).1) {
            return Copied::Failed(Error::new(ErrorKind::AccessDenied));
        }
        let Some(remote) = entry.held.enter() else {
            return Copied::Failed(Error::new(ErrorKind::Stale));
        };
        carry_out(slice, local.window(), remote.window(), checksum)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.gates.is_connected(peer)
    }

    fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        self.gates.expel(peer)
    }
}

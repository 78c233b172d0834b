//! The fabric within one process: engines that share an address space copy from one's memory to the other's.
//!
//! An export names a row of a table that all engines of the process share. Its layout, 50 bytes:
//!
//! ```text
//!   version u8 = 1 | process 16 | number u64 | key 16 | len u64 | access u8
//! ```
//!
//! `process` is random: an export that another process attaches is `Unreachable`, whatever its process id is, and though it be a
//! fork of the one that exported it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use te_core::{
    Access, Capabilities, Completion, EXPELLED_MAX, Error, ErrorKind, EventSource, Instant, MemSpan, Memory,
    RegionId, SegmentId, Slice, Token, Transport,
};

use crate::blob::{Fields, identity, put, random, remote_bits, same_key};
use crate::copier::{Copied, Copier, Reach, carry_out, rights};
use crate::sys::{Gate, HeldSpan, PerProcess, Use};

const VERSION: u8 = 1;

/// Copies within the process. Bytes move inside `poll`; the owner of the other side need not poll.
pub struct LocalTransport(Copier<LocalReach>);

impl LocalTransport {
    /// A transport without regions, under an identity of its own.
    ///
    /// # Errors
    /// `System` when the system has no randomness to give.
    pub fn new() -> Result<Self, Error> {
        Self::with_identity(identity()?)
    }

    /// A transport without regions that its peers know by `identity`; not 0.
    ///
    /// # Errors
    /// `InvalidArgument` for 0; as [`new`](Self::new).
    pub fn with_identity(identity: u64) -> Result<Self, Error> {
        if identity == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        Ok(Self(Copier::new(LocalReach { identity, process: process()?, gates: Arc::default() })))
    }
}

crate::copier::forward_transport!(LocalTransport);

struct LocalReach {
    identity: u64,
    process: [u8; 16],
    gates: Arc<Gates>,
}

/// One gate for each peer that has attached memory of one owner, by its identity. A peer copies inside its gate; a gate that is
/// shut stays, and keeps its peer out.
#[derive(Default)]
struct Gates(Mutex<HashMap<u64, Arc<Gate>>>);

/// Gates from which on those are swept out that nobody uses.
const GATES_SWEPT: usize = 1024;

impl Gates {
    /// A peer's gate; an error when it was expelled.
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

/// A region that engines of this process may reach.
struct Entry {
    number: u64,
    key: [u8; 16],
    access: Access,
    held: Arc<HeldSpan>,
    gates: Arc<Gates>,
}

/// All exported regions of the process.
#[derive(Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, Arc<Entry>>,
}

static TABLE: PerProcess<Mutex<Table>> = PerProcess::new();

/// This process, and no other that ever ran.
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

impl Reach for LocalReach {
    const NAME: &'static str = "local";
    const EXPORT_BYTES: u32 = 50;
    const OWNER_POLLS: bool = false;
    type Export = Arc<Entry>;
    /// Or why it cannot be reached.
    type Link = Result<(Arc<Entry>, Arc<Gate>), Error>;

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
        // Peers hold the same `HeldSpan` that our caller revokes: its word is theirs.
        true
    }

    fn export(
        &self,
        _id: RegionId,
        export: &Arc<Entry>,
        access: Access,
        len: u64,
        out: &mut [u8; 128],
    ) -> usize {
        let number = export.number.to_le_bytes();
        put(
            out,
            &[&[VERSION], &self.process, &number, &export.key, &len.to_le_bytes(), &[remote_bits(access)]],
        )
    }

    fn attach(&mut self, blob: &[u8]) -> Result<(Self::Link, u64, Access), Error> {
        let mut fields = Fields(blob);
        let (version, process) = (fields.u8()?, fields.bytes::<16>()?);
        let (number, key, len, access) =
            (fields.u64()?, fields.bytes::<16>()?, fields.u64()?, fields.remote_access()?);
        fields.end()?;
        if version != VERSION {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        if process != self.process {
            return Err(Error::new(ErrorKind::Unreachable));
        }
        let table = TABLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        let link = match table.entries.get(&number) {
            None => Err(Error::new(ErrorKind::Stale)),
            Some(entry) if !same_key(&entry.key, &key) => Err(Error::new(ErrorKind::AccessDenied)),
            Some(entry) => entry.gates.gate(self.identity).map(|gate| (entry.clone(), gate)),
        };
        Ok((link, len, access))
    }

    fn detach(&mut self, _link: Self::Link) {}

    fn copy(&self, link: &Self::Link, local: &Use<'_>, slice: &Slice) -> Copied {
        let (entry, gate) = match link {
            Ok(way) => way,
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
        carry_out(slice, local.window(), remote.window())
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.gates.is_connected(peer)
    }

    fn expel(&mut self, peer: u64) -> Result<bool, Error> {
        self.gates.expel(peer)
    }

    fn poll(&mut self, _now: Instant) {}

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn event_source(&self) -> Option<EventSource> {
        None
    }
}

//! The fabric within one process: engines that share an address space copy from one's memory to the other's.
//!
//! An export names a row of a table that all engines of the process share. Its layout, 50 bytes:
//!
//! ```text
//!   version u8 = 1 | process 16 | number u64 | key 16 | len u64 | access u8
//! ```
//!
//! `process` is random: an export that another process attaches is `Unreachable`, whatever its process id is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Instant, MemSpan, Memory, RegionId,
    SegmentId, Slice, Token, Transport,
};

use crate::blob::{Fields, put, random, remote_bits, same_key};
use crate::copier::{Copied, Copier, Reach, carry_out, rights};
use crate::sys::{HeldSpan, Use};

const VERSION: u8 = 1;

/// Copies within the process. Bytes move inside `poll`; the owner of the other side need not poll.
pub struct LocalTransport(Copier<LocalReach>);

impl LocalTransport {
    /// A transport without regions.
    ///
    /// # Errors
    /// `System` when the system has no randomness to give.
    pub fn new() -> Result<Self, Error> {
        Ok(Self(Copier::new(LocalReach { process: process()? })))
    }
}

crate::copier::forward_transport!(LocalTransport);

struct LocalReach {
    process: [u8; 16],
}

/// A region that engines of this process may reach.
struct Entry {
    number: u64,
    key: [u8; 16],
    access: Access,
    held: Arc<HeldSpan>,
}

/// All exported regions of the process.
struct Table {
    next: u64,
    entries: Option<HashMap<u64, Arc<Entry>>>,
}

static TABLE: Mutex<Table> = Mutex::new(Table { next: 0, entries: None });

/// This process, and no other that ever ran.
fn process() -> Result<[u8; 16], Error> {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    match PROCESS.get() {
        Some(process) => Ok(*process),
        None => {
            let process = random()?;
            Ok(*PROCESS.get_or_init(|| process))
        }
    }
}

impl Reach for LocalReach {
    const NAME: &'static str = "local";
    const EXPORT_BYTES: u32 = 50;
    const OWNER_POLLS: bool = false;
    type Export = Arc<Entry>;
    /// Or why it cannot be reached.
    type Link = Result<Arc<Entry>, Error>;

    fn share(
        &mut self,
        _id: RegionId,
        held: &Arc<HeldSpan>,
        access: Access,
    ) -> Result<Option<Arc<Entry>>, Error> {
        let key = random()?;
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = table.next;
        table.next += 1;
        let entry = Arc::new(Entry { number, key, access, held: held.clone() });
        table.entries.get_or_insert_default().insert(number, entry.clone());
        Ok(Some(entry))
    }

    fn unshare(&mut self, _id: RegionId, export: &Arc<Entry>) -> bool {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entries) = &mut table.entries {
            entries.remove(&export.number);
        }
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
        let table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let link = match table.entries.as_ref().and_then(|entries| entries.get(&number)) {
            None => Err(Error::new(ErrorKind::Stale)),
            Some(entry) if !same_key(&entry.key, &key) => Err(Error::new(ErrorKind::AccessDenied)),
            Some(entry) => Ok(entry.clone()),
        };
        Ok((link, len, access))
    }

    fn detach(&mut self, _link: Self::Link) {}

    fn copy(&self, link: &Self::Link, local: &Use<'_>, slice: &Slice) -> Copied {
        let entry = match link {
            Ok(entry) => entry,
            Err(error) => return Copied::Failed(*error),
        };
        if !entry.access.contains(rights(slice.op).1) {
            return Copied::Failed(Error::new(ErrorKind::AccessDenied));
        }
        let Some(remote) = entry.held.enter() else {
            return Copied::Failed(Error::new(ErrorKind::Stale));
        };
        carry_out(slice, local.window(), remote.window())
    }

    fn poll(&mut self, _now: Instant) {}

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn event_source(&self) -> Option<EventSource> {
        None
    }
}

//! A pool: a device or a file that several hosts map, cut into extents that the master gives to owners.
//!
//! The pool itself decides nothing. Who owns an extent, and which page a peer writes, is decided outside; the
//! calls here write that down where the other hosts see it, and refuse what the master has decided otherwise
//! since.

pub(crate) mod bad;
mod error;
pub mod format;
mod lock;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};
use te_core::{Location, MemSpan, VolatileSpan};

pub use error::PoolError;
pub use format::PAGE;
pub use lock::Part;

use self::format::{OwnerRecord, PeerRecord, Superblock, Use};
use crate::Coherence;
use crate::export::Export;
use crate::ledger::{Guest, fetch_line, peer, take, write_line, write_page};
use crate::lines::{LINE, Local, drop_stale, get, put, put_parts};
use crate::owner::Owned;
use crate::sys::{Access, Map, NativeLines, Opened, can_flush};

/// How to make a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FormatOptions {
    /// The bytes of an extent: a multiple of 2 MiB. Default 2 MiB.
    pub extent_bytes: u64,
    /// The number of processes that can use the pool at a time, 1 to 1,024. Default 64.
    pub peers: u32,
    /// Overwrite a pool that is there already. Default off.
    pub force: bool,
}

impl Default for FormatOptions {
    fn default() -> Self {
        Self { extent_bytes: format::EXTENT_BYTES_MIN, peers: 64, force: false }
    }
}

/// Extents that the master has given to an owner.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The first extent.
    pub first: u32,
    /// The number of extents.
    pub count: u32,
    /// The incarnation of the owner.
    pub incarnation: u64,
    /// The epoch in which they were given. The master gives each extent in a higher one than before, and only
    /// when the process that had it cannot write the pool any more.
    pub epoch: u64,
    /// The key that exports of the owner carry.
    pub key: [u8; 16],
}

/// Without the key.
impl std::fmt::Debug for Claim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { first, count, incarnation, epoch, key: _ } = self;
        write!(f, "Claim {{ extents {first}+{count}, incarnation {incarnation:x}, epoch {epoch} }}")
    }
}

/// The page of a pool that the master has given to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The number of the page.
    pub slot: u32,
    /// The epoch in which it was given. The master gives each page in a higher one than before, and only when
    /// the process that had it cannot write the pool any more.
    pub epoch: u64,
}

/// What a page held when the master was asked for one: the epoch and the identity of its record, if it has
/// one.
pub(crate) type Found = Option<(u64, u64)>;

fn found_in(record: Option<PeerRecord>) -> Found {
    record.map(|record| (record.epoch, record.identity))
}

/// What is on a device or in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// The superblock.
    pub superblock: Superblock,
    /// The record of each extent's owner; `None` for one that cannot be understood.
    pub owners: Vec<Option<OwnerRecord>>,
    /// The record of each peer; `None` for a page that no peer has used, or that cannot be understood.
    pub peers: Vec<Option<PeerRecord>>,
}

/// A pool that is mapped here. Transports share it.
#[derive(Debug)]
pub struct Pool {
    map: Map,
    /// The open file of the mapping, which has its locks.
    file: OwnedFd,
    block: Superblock,
    coherence: Coherence,
    writable: bool,
    owned: Mutex<Owned>,
    /// The lock domain of this process; 0: unknown.
    domain: u64,
    /// The pages that this mapping has locked.
    locked: Mutex<BTreeSet<u32>>,
    /// Bytes that were refreshed.
    refreshed: AtomicU64,
    /// The page that the master has given to this process, for the transport that has none.
    seat: Mutex<Option<(Seat, Option<Found>)>>,
}

impl Pool {
    /// Makes a pool of a devdax device or a file, whose contents are lost. The file has its size already.
    ///
    /// # Errors
    /// `NotMappable`, `TooSmall`, `Setting`, `System`. `Formatted` when there is a pool that may not be
    /// overwritten.
    pub fn format(path: &Path, options: FormatOptions) -> Result<Superblock, PoolError> {
        Self::format_file(&Opened::open(path, Access::ReadWrite)?, options)
    }

    /// As [`format`](Self::format), for a descriptor that can be read and written.
    ///
    /// # Errors
    /// As [`format`](Self::format).
    pub fn format_fd(fd: OwnedFd, options: FormatOptions) -> Result<Superblock, PoolError> {
        Self::format_file(&Opened::of(fd)?, options)
    }

    fn format_file(opened: &Opened, options: FormatOptions) -> Result<Superblock, PoolError> {
        let uuid =
            crate::random().map_err(|source| PoolError::System { what: "get random numbers", source })?;
        let block = Superblock::of(uuid, opened.size, options.extent_bytes, options.peers)?;
        let map = opened.map(Access::ReadWrite)?;
        let mut lines = NativeLines::new(&map);
        let before = Superblock::parse(&fetch_line(&mut lines, 0)?, opened.size);
        if let (Ok(Superblock { uuid, .. }), false) = (before, options.force) {
            return Err(PoolError::Formatted { uuid });
        }
        // No host finds a pool before it is complete.
        let coherence = writing();
        write_line(&mut lines, coherence, 0, [0; LINE as usize])?;
        for extent in 0..block.extents {
            let free =
                OwnerRecord { uuid, extent, owned: false, incarnation: 0, epoch: 0, key_hash: [0; 16] };
            write_page(&mut lines, coherence, &block, &free)?;
        }
        for slot in 0..block.peers {
            write_line(&mut lines, coherence, block.peer_at(slot), [0; LINE as usize])?;
            write_line(&mut lines, coherence, block.use_at(slot), Use::NONE)?;
        }
        write_line(&mut lines, coherence, 0, block.write())?;
        Ok(block)
    }

    /// Reads what is on a device or in a file, and changes nothing.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn inspect(path: &Path) -> Result<Inspection, PoolError> {
        let opened = Opened::open(path, Access::ReadOnly)?;
        let (map, superblock) = mapped(&opened, Access::ReadOnly)?;
        let mut lines = NativeLines::new(&map);
        let mut owners = Vec::new();
        for extent in 0..superblock.extents {
            let record = OwnerRecord::parse(&fetch_line(&mut lines, superblock.owner_at(extent))?).ok();
            owners.push(record.filter(|owner| owner.uuid == superblock.uuid && owner.extent == extent));
        }
        let mut peers = Vec::new();
        for slot in 0..superblock.peers {
            peers.push(peer(&mut lines, &superblock, slot)?);
        }
        Ok(Inspection { superblock, owners, peers })
    }

    /// Maps the pool on a devdax device or in a file. `wanted`: the pool that it has to be.
    ///
    /// # Errors
    /// `NotMappable`, `NotAPool`, `Version`, `Crc`, `Layout`, `TooSmall`, `Foreign`. `NoFlush` on a processor
    /// that cannot do what `coherence` needs. `System`.
    pub fn open(path: &Path, coherence: Coherence, wanted: Option<[u8; 16]>) -> Result<Arc<Self>, PoolError> {
        Self::open_file(&Opened::open(path, Access::ReadWrite)?, coherence, wanted, true)
    }

    /// As [`open`](Self::open), for a descriptor that can be read and written.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_fd(
        fd: OwnedFd,
        coherence: Coherence,
        wanted: Option<[u8; 16]>,
    ) -> Result<Arc<Self>, PoolError> {
        Self::open_file(&Opened::of(fd)?, coherence, wanted, true)
    }

    /// As [`open`](Self::open); the extents can only be read here. The pages of the pool that say who uses
    /// what are written all the same.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_read(
        path: &Path,
        coherence: Coherence,
        wanted: Option<[u8; 16]>,
    ) -> Result<Arc<Self>, PoolError> {
        Self::open_file(&Opened::open(path, Access::ReadWrite)?, coherence, wanted, false)
    }

    fn open_file(
        opened: &Opened,
        coherence: Coherence,
        wanted: Option<[u8; 16]>,
        writable: bool,
    ) -> Result<Arc<Self>, PoolError> {
        if coherence == Coherence::Flush && !can_flush() {
            return Err(PoolError::NoFlush);
        }
        let (map, block) = mapped(opened, Access::ReadWrite)?;
        if let Some(wanted) = wanted
            && wanted != block.uuid
        {
            return Err(PoolError::Foreign { found: block.uuid, wanted });
        }
        if !writable {
            map.protect_from(block.front_bytes())?;
        }
        let file = lock::kept(opened)?;
        Ok(Arc::new(Self {
            map,
            // Without one, nothing is proved by locks.
            domain: lock::domain(&file).unwrap_or(0),
            locked: Mutex::default(),
            file,
            block,
            coherence,
            writable,
            owned: Mutex::default(),
            refreshed: AtomicU64::new(0),
            seat: Mutex::default(),
        }))
    }

    /// Says which peer's page the master has given to this process. A transport over this mapping of the pool
    /// takes it when it attaches the next region, in place of the page that it had.
    pub fn take_seat(&self, seat: Seat) {
        *self.next() = Some((seat, None));
    }

    /// As [`take_seat`](Self::take_seat), for a page in which this record was found before the master was
    /// asked. The transport does not take the page once another process has written it since: a master that
    /// has lost its state may have given the page to that process.
    pub fn take_seat_found(&self, seat: Seat, found: Option<PeerRecord>) {
        *self.next() = Some((seat, Some(found_in(found))));
    }

    /// Forgets the page that was given last, unless a transport has taken it: the master that has given it is
    /// another lineage by now, and may give it to another process.
    pub fn forget_seat(&self) {
        *self.next() = None;
    }

    fn next(&self) -> MutexGuard<'_, Option<(Seat, Option<Found>)>> {
        self.seat.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The page that was given last, unless a transport has taken it since.
    #[must_use]
    pub fn seat(&self) -> Option<Seat> {
        self.next().map(|(seat, _)| seat)
    }

    /// Takes the page that was given last, and what was found in it.
    pub(crate) fn next_seat(&self) -> Option<(Seat, Option<Found>)> {
        self.next().take()
    }

    /// The span, as memory that only a transport for pools may move: where the caches of the hosts are not
    /// coherent, [`MemoryKinds::POOL`](te_core::MemoryKinds::POOL). A span of other memory comes back as it
    /// is.
    #[must_use]
    pub fn located(&self, span: MemSpan) -> MemSpan {
        let is_apart = self.coherence == Coherence::Flush && self.map.overlaps(span);
        if is_apart { span.at(Location::Pool) } else { span }
    }

    /// The superblock.
    #[must_use]
    pub const fn superblock(&self) -> &Superblock {
        &self.block
    }

    /// How the hosts see each other's writes.
    #[must_use]
    pub const fn coherence(&self) -> Coherence {
        self.coherence
    }

    /// Whether the extents can be written here.
    #[must_use]
    pub const fn is_writable(&self) -> bool {
        self.writable
    }

    /// Takes possession of extents that the master has given to this process: writes who owns them. Exports
    /// of earlier owners are refused from then on. A process claims an extent by one mapping of the pool,
    /// which its transports share.
    ///
    /// Where caches are not coherent, it drops all lines of the extents from the cache, which touches each.
    ///
    /// # Errors
    /// `NoSuch` for extents that there are not. `Stale` when the master has given one away in this epoch or a
    /// later one. `InUse` while a peer uses a region of an earlier owner: that peer may still write. Nothing
    /// but the records has then changed, and the call can be repeated. `Memory`.
    pub fn claim(&self, claim: Claim) -> Result<MemSpan, PoolError> {
        let end = u64::from(claim.first) + u64::from(claim.count);
        let extents = u64::from(self.block.extents);
        if claim.count == 0 || end > extents {
            return Err(PoolError::NoSuch { what: "extent", number: end.max(1) - 1, count: extents });
        }
        if self.owned().claim_of(claim.first, claim.count) == Some(claim) {
            self.confirm(&claim)?;
            return self.span(claim.first, claim.count).ok_or(PoolError::Layout);
        }
        let mine = self.owner_of(claim.first, &claim);
        let mut fresh = Vec::new();
        for extent in claim.first..claim.first + claim.count {
            let found = self.owner(extent)?;
            let again = OwnerRecord { extent, ..mine };
            match found {
                // An earlier call has written it, and had to wait for a peer.
                Some(found) if found == again => {}
                Some(found) if found.epoch >= claim.epoch => {
                    let (found, given) = (found.epoch, claim.epoch);
                    return Err(PoolError::Stale { number: extent, found, given });
                }
                _ => fresh.push(again),
            }
        }
        let extents = (claim.first, claim.count);
        if let Some(peer) = take(&mut self.lines(), self.coherence, &self.block, &fresh, extents, &|slot| {
            self.has_ended(slot)
        })? {
            return Err(PoolError::InUse { peer });
        }
        self.confirm(&claim)?;
        self.drop_extents(claim.first, claim.count)?;
        let mut owned = self.owned();
        let claims = &mut owned.claims;
        claims.retain(|held| !overlap(held, claim.first, claim.count));
        claims.push(claim);
        self.span(claim.first, claim.count).ok_or(PoolError::Layout)
    }

    /// Gives extents back that were [claimed](Self::claim) in this epoch. Their regions were deregistered
    /// before. Where caches are not coherent, it first drops all lines of the extents from the cache, so that
    /// none of them lands later.
    ///
    /// # Errors
    /// `NotClaimed`. `Memory`: some extents may be given back, and the call can be repeated. `Stale` when the
    /// master has given one away since: it stays as it is.
    pub fn release(&self, first: u32, count: u32, epoch: u64) -> Result<(), PoolError> {
        let is_it = |held: &Claim| (held.first, held.count, held.epoch) == (first, count, epoch);
        let claim = self.owned().claims.iter().copied().find(is_it);
        let claim = claim.ok_or(PoolError::NotClaimed { first, count, epoch })?;
        self.drop_extents(first, count)?;
        let mut owned = self.owned();
        let mut lost = Ok(());
        for extent in first..first + count {
            let mine = self.owner_of(extent, &claim);
            let free = OwnerRecord { owned: false, ..mine };
            match self.owner(extent)? {
                // An earlier call has written it, maybe without the rest of the page.
                Some(found) if found == mine || found == free => {
                    write_page(&mut self.lines(), self.coherence, &self.block, &free)?;
                }
                found => {
                    let found = found.map_or(0, |found| found.epoch);
                    lost = Err(PoolError::Stale { number: extent, found, given: epoch });
                }
            }
        }
        owned.claims.retain(|held| !is_it(held));
        lost
    }

    /// Drops the lines of extents from the cache, where that is needed.
    fn drop_extents(&self, first: u32, count: u32) -> Result<(), PoolError> {
        let (at, len) = (self.block.extent_at(first), u64::from(count) * self.block.extent_bytes);
        match self.coherence {
            Coherence::Flush => Ok(drop_stale(&mut self.lines(), at, len)?),
            Coherence::Hardware => Ok(()),
        }
    }

    /// Checks that the records of all extents of a claim say what it says.
    fn confirm(&self, claim: &Claim) -> Result<(), PoolError> {
        for extent in claim.first..claim.first + claim.count {
            let found = self.owner(extent)?;
            if found != Some(self.owner_of(extent, claim)) {
                let found = found.map_or(0, |found| found.epoch);
                return Err(PoolError::Stale { number: extent, found, given: claim.epoch });
            }
        }
        Ok(())
    }

    /// The records of the owners of extents, in their order; `None` for one that cannot be understood.
    ///
    /// # Errors
    /// `NoSuch` for extents that there are not. `Memory`.
    pub fn owners(&self, first: u32, count: u32) -> Result<Vec<Option<OwnerRecord>>, PoolError> {
        let (end, extents) = (u64::from(first) + u64::from(count), u64::from(self.block.extents));
        if end > extents {
            return Err(PoolError::NoSuch { what: "extent", number: end - 1, count: extents });
        }
        (first..first + count).map(|extent| self.owner(extent)).collect()
    }

    /// The records of all peers, by their pages; `None` for a page that no peer has used, or that cannot be
    /// understood.
    ///
    /// # Errors
    /// `Memory`.
    pub fn peers(&self) -> Result<Vec<Option<PeerRecord>>, PoolError> {
        (0..self.block.peers).map(|slot| Ok(peer(&mut self.lines(), &self.block, slot)?)).collect()
    }

    /// The bytes of a span of extents, which peers may write at any time. `None`: the span is not in the
    /// pool, or its bytes are to be read with [`refresh`](Self::refresh) and not as they are; in a child
    /// after a fork.
    #[must_use]
    pub fn view(&self, span: MemSpan) -> Option<VolatileSpan<'_>> {
        match self.coherence {
            Coherence::Hardware if self.writable => self.map.view(span),
            _ => None,
        }
    }

    /// The record of an extent's owner, if it can be understood.
    fn owner(&self, extent: u32) -> Result<Option<OwnerRecord>, PoolError> {
        let line = fetch_line(&mut self.lines(), self.block.owner_at(extent))?;
        let found = OwnerRecord::parse(&line).ok();
        Ok(found.filter(|owner| owner.uuid == self.block.uuid && owner.extent == extent))
    }

    /// Whether the first extent of a region is still this owner's: another one may have been given it since,
    /// and writes its page.
    pub(crate) fn is_still_owned(&self, export: &Export) -> Result<bool, te_core::Error> {
        let found = self.owner(export.first).map_err(|error| match error {
            PoolError::Memory(error) => error,
            other => other.kind().into(),
        })?;
        Ok(found.is_some_and(|owner| {
            owner.owned && owner.incarnation == export.incarnation && owner.epoch == export.epoch
        }))
    }

    /// The memory of extents, for who has claimed them.
    fn span(&self, first: u32, count: u32) -> Option<MemSpan> {
        let span = self.map.span(self.block.extent_at(first), u64::from(count) * self.block.extent_bytes)?;
        Some(self.located(span))
    }

    fn owner_of(&self, extent: u32, claim: &Claim) -> OwnerRecord {
        OwnerRecord {
            uuid: self.block.uuid,
            extent,
            owned: true,
            incarnation: claim.incarnation,
            epoch: claim.epoch,
            key_hash: key_hash(&claim.key),
        }
    }

    /// The offsets of the granules of 2 MiB in which the hardware has reported damaged memory, in bytes. The
    /// master must not give them away again.
    #[must_use]
    pub fn bad_granules(&self) -> Vec<u64> {
        self.map.bad().all()
    }

    /// Copies bytes out of a span of extents, as they are in memory: what other hosts have written before
    /// this call is seen.
    ///
    /// # Errors
    /// `Outside`: the bytes do not lie in the span, or the span in the pool. `Memory`.
    pub fn read(&self, span: MemSpan, offset: u64, out: &mut [u8]) -> Result<(), PoolError> {
        let at = self.place_of(span, offset, out.len())?;
        Ok(get(&mut self.lines(), self.coherence, at, Local::of(out))?)
    }

    /// Copies bytes into a span of extents, so that every host sees them after this call. Lines of which they
    /// are a part have no other writer meanwhile.
    ///
    /// # Errors
    /// As [`read`](Self::read): some bytes may have been written. `Memory` with `AccessDenied` for a pool that
    /// was [opened to read](Self::open_to_read).
    pub fn write(&self, span: MemSpan, offset: u64, bytes: &[u8]) -> Result<(), PoolError> {
        if !self.writable {
            return Err(PoolError::Memory(te_core::ErrorKind::AccessDenied.into()));
        }
        let mut at = self.place_of(span, offset, bytes.len())?;
        let mut piece = [0; 4096];
        for part in bytes.chunks(piece.len()) {
            let copy = &mut piece[..part.len()];
            copy.copy_from_slice(part);
            match self.coherence {
                Coherence::Flush => put_parts(&mut self.lines(), at, Local::of(copy))?,
                Coherence::Hardware => put(&mut self.lines(), self.coherence, at, Local::of(copy))?,
            }
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Where `len` bytes at `offset` of a span lie in the pool.
    fn place_of(&self, span: MemSpan, offset: u64, len: usize) -> Result<u64, PoolError> {
        let part = span.part(offset, len as u64).map_err(|_| PoolError::Outside)?;
        self.map.find(part).ok_or(PoolError::Outside)
    }

    /// Bytes whose lines were dropped from the cache by [`refresh`](Self::refresh) and
    /// [`write_back`](Self::write_back), since the pool was opened.
    #[must_use]
    pub fn refreshed_bytes(&self) -> u64 {
        self.refreshed.load(Ordering::Relaxed)
    }

    /// Whether a span lies in the pool, and this process is the one that has mapped it.
    #[must_use]
    pub fn has(&self, span: MemSpan) -> bool {
        !self.is_forked() && self.map.find(span).is_some()
    }

    /// Whether this process is a fork of the one that has mapped the pool, which it does not have.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        self.map.is_forked()
    }

    /// Makes bytes visible to the other hosts that this host has written into the pool by itself, with the
    /// CPU or with a device: before it announces them.
    ///
    /// # Errors
    /// `Outside`, `Memory`.
    pub fn write_back(&self, span: MemSpan) -> Result<(), PoolError> {
        self.drop_cached(span)
    }

    /// Drops what this host's caches hold of a span, so that the CPU reads what other hosts have written:
    /// after it was announced.
    ///
    /// # Errors
    /// As [`write_back`](Self::write_back).
    pub fn refresh(&self, span: MemSpan) -> Result<(), PoolError> {
        self.drop_cached(span)
    }

    fn drop_cached(&self, span: MemSpan) -> Result<(), PoolError> {
        let at = self.map.find(span).ok_or(PoolError::Outside)?;
        match self.coherence {
            Coherence::Flush => drop_stale(&mut self.lines(), at, span.len() as u64)?,
            Coherence::Hardware => return Ok(()),
        }
        self.refreshed.fetch_add(span.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) const fn lines(&self) -> NativeLines<'_> {
        NativeLines::new(&self.map)
    }

    pub(crate) fn mark_bad(&self, at: u64) {
        self.map.bad().mark(at);
    }

    pub(crate) fn is_bad(&self, at: u64, len: u64) -> bool {
        self.map.bad().any(at, len)
    }

    /// Where a span lies in the pool, in bytes.
    pub(crate) fn find(&self, span: MemSpan) -> Option<u64> {
        self.map.find(span)
    }

    /// What this process owns here. Not locked while a slice is carried out.
    pub(crate) fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the process has ended that has written a peer's page: it held the kernel's lock on the page
    /// where this process sees it, and no process holds that lock.
    pub(crate) fn has_ended(&self, slot: u32) -> bool {
        let held_here = |record: PeerRecord| record.domain != 0 && record.domain == self.domain;
        let record = peer(&mut self.lines(), &self.block, slot).ok().flatten();
        record.is_some_and(held_here)
            && !self.has_locked(slot)
            && matches!(self.is_locked(Part::Page(slot)), Ok(false))
    }

    /// Takes a peer's page, and states that it uses nothing. `before`: what was found in it when the master
    /// was asked, if that is known.
    pub(crate) fn sit(&self, seat: Seat, before: Option<Found>, identity: u64) -> Result<Guest, PoolError> {
        if seat.slot >= self.block.peers {
            let (number, count) = (u64::from(seat.slot), u64::from(self.block.peers));
            return Err(PoolError::NoSuch { what: "peer", number, count });
        }
        let found = peer(&mut self.lines(), &self.block, seat.slot)?;
        let changed = before.is_some_and(|before| before != found_in(found));
        if changed || found.is_some_and(|found| found.epoch >= seat.epoch) {
            let found = found.map_or(0, |found| found.epoch);
            return Err(PoolError::Stale { number: seat.slot, found, given: seat.epoch });
        }
        let guest = Guest { slot: seat.slot, identity };
        write_line(&mut self.lines(), self.coherence, self.block.use_at(seat.slot), Use::NONE)?;
        self.tell(guest, seat.epoch, true, 0)?;
        Ok(guest)
    }

    /// As [`tell`](Self::tell), while the page is still this peer's: another one may have been given it since,
    /// and writes it.
    pub(crate) fn tell_again(
        &self,
        guest: Guest,
        epoch: u64,
        present: bool,
        beat: u64,
    ) -> Result<(), PoolError> {
        let found = peer(&mut self.lines(), &self.block, guest.slot)?;
        match found {
            Some(found) if (found.epoch, found.identity) == (epoch, guest.identity) => {
                self.tell(guest, epoch, present, beat)
            }
            found => {
                let found = found.map_or(0, |found| found.epoch);
                Err(PoolError::Stale { number: guest.slot, found, given: epoch })
            }
        }
    }

    /// Writes the record of a peer.
    fn tell(&self, guest: Guest, epoch: u64, present: bool, beat: u64) -> Result<(), PoolError> {
        let Guest { slot, identity } = guest;
        let domain = if self.has_locked(slot) { self.domain } else { 0 };
        let record = PeerRecord { uuid: self.block.uuid, slot, present, identity, epoch, beat, domain };
        Ok(write_line(&mut self.lines(), self.coherence, self.block.peer_at(slot), record.write())?)
    }
}

/// How lines are written where it is not known how the pool will be used.
fn writing() -> Coherence {
    if can_flush() { Coherence::Flush } else { Coherence::Hardware }
}

fn mapped(opened: &Opened, access: Access) -> Result<(Map, Superblock), PoolError> {
    if opened.size < PAGE {
        return Err(PoolError::TooSmall { bytes: opened.size, needed: PAGE });
    }
    let map = opened.map(access)?;
    let line = fetch_line(&mut NativeLines::new(&map), 0)?;
    let block = Superblock::parse(&line, opened.size)?;
    Ok((map, block))
}

fn overlap(held: &Claim, first: u32, count: u32) -> bool {
    Use { number: 0, first: held.first, count: held.count }.touches(first, count)
}

/// What the pool holds of a key.
pub(crate) fn key_hash(key: &[u8; 16]) -> [u8; 16] {
    let whole = Sha256::digest(key);
    let mut hash = [0; 16];
    hash.copy_from_slice(&whole[..16]);
    hash
}

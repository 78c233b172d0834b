//! The transport: a queue of slices that `poll` copies.
//!
//! A slice is copied completely within one call of `poll`, or not at all, unless the memory fails in the
//! middle of a WRITE: then its outcome is unknown, and nothing of it lands later all the same.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use te_core::{
    Access, Capabilities, Completion, EXPELLED_MAX, Error, ErrorKind, ExpelMode, Features, Instant, Location,
    MemSpan, Memory, MemoryKinds, Op, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::{OpenError, Region, Regions, RemoteRegion, RemoteRegions};

use crate::config::{Coherence, Config};
use crate::export::Export;
use crate::ledger::{Grant, Guest, check, enter, leave, peer};
use crate::lines::{Cause, Fault, LINE, Side, get, get_between, put, put_between, put_parts};
use crate::pool::{Found, Pool, PoolError, Seat, key_hash};
use crate::sys::Pinned;

/// Longest slice, bytes. Copying it in one go takes some hundred microseconds.
const SLICE_BYTES_MAX: u32 = 2 << 20;
/// Size from which on longer slices are no faster, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;
/// Memory that it touches: the host's, and that of pools whose hosts are not coherent.
const KINDS: MemoryKinds = MemoryKinds::HOST.union(MemoryKinds::POOL);
/// Bytes that one call of `poll` copies before it returns; the last slice may exceed it.
const POLL_BYTES_MAX: u64 = 1 << 20;
/// Regions, and remote regions.
const ROWS_MAX: u32 = 1 << 16;
/// From this number on, peers that were silent for too long are forgotten.
const SEEN_MAX: usize = 1024;
/// How often a peer renews its sign of life.
const BEAT: Duration = Duration::from_millis(100);

/// A pool that a transport uses, and the page in it that the master has given to this transport. Without a
/// page it can export regions, and attach none.
#[derive(Clone, Debug)]
pub struct Mount {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The page.
    pub seat: Option<Seat>,
}

/// Copies to and from regions of pools. Bytes move inside `poll`; the owner of a region need not poll, nor
/// run.
///
/// Dropping it revokes what was exported: it waits up to a second for a peer that is in the middle of a copy.
#[derive(Debug)]
pub struct CxlTransport {
    config: Config,
    identity: u64,
    mounts: Vec<Mounted>,
    /// The identities that were expelled.
    expelled: BTreeSet<u64>,
    /// The last sign of life of each peer that was asked for, and when it was first seen.
    seen: RefCell<BTreeMap<Seen, (u64, Instant)>>,
    regions: Regions<Held>,
    remote_regions: RemoteRegions<Link>,
    /// The number of remote regions.
    attached: u32,
    queue: VecDeque<Job>,
    /// Jobs in the queue that are cancelled.
    canceled: usize,
    checksums: bool,
    /// The remote region that this peer has entered, and the extents of it that were checked.
    inside: Option<Inside>,
    now: Instant,
    next_beat: Instant,
    beat: u64,
}

/// The identity of a peer, the mount, and the number of its page.
type Seen = (u64, usize, u32);

#[derive(Debug)]
struct Mounted {
    pool: Arc<Pool>,
    guest: Option<(Guest, u64)>,
}

impl Mounted {
    /// Takes a page, in place of the one that the transport had.
    fn sit(
        &mut self,
        seat: Seat,
        before: Option<Found>,
        (identity, beat): (u64, u64),
    ) -> Result<(), PoolError> {
        let guest = self.pool.sit(seat, before, identity)?;
        if let Some((before, epoch)) = self.guest.replace((guest, seat.epoch))
            && before.slot != guest.slot
        {
            // When the page is another peer's by now, it stays as it is.
            let _ = self.pool.tell_again(before, epoch, false, beat);
        }
        Ok(())
    }
}

/// What is kept of a region beside its rights.
#[derive(Debug)]
struct Held {
    memory: Pinned,
    /// The pool in which the memory lies, and where.
    place: Option<(Arc<Pool>, u64)>,
    /// How peers reach it.
    export: Option<Export>,
}

/// How a remote region is reached.
#[derive(Debug)]
struct Link {
    mount: usize,
    grant: Grant,
}

#[derive(Clone, Copy, Debug)]
struct Inside {
    remote: u32,
    mount: usize,
    guest: Guest,
    first: u32,
    count: u32,
}

#[derive(Debug)]
enum Job {
    Copy { slice: Slice, canceled: bool },
    Fence { token: Token, remote: RemoteRegionId },
}

/// Why a slice was not carried out.
enum Failed {
    /// No byte was changed at the remote side.
    Before(Error),
    /// The memory failed while it was being written.
    Within(Error),
}

impl CxlTransport {
    /// A transport over these pools, without regions. It takes the pages that `mounts` names.
    ///
    /// # Errors
    /// A setting is outside its range; the system returns no random numbers; a page does not exist, or was
    /// given to another process since; the memory of a pool failed. `mounts` whose pools were opened for
    /// another coherence than the settings name.
    pub fn new(mut config: Config, mounts: Vec<Mount>) -> Result<Self, OpenError> {
        config.validate().map_err(OpenError::Config)?;
        if mounts.iter().any(|mount| mount.pool.coherence() != config.coherence) {
            let source = std::io::Error::other(PoolError::OtherCoherence);
            return Err(OpenError::System { what: "use the pool", source });
        }
        while config.identity == 0 {
            config.identity =
                crate::random().map(u64::from_ne_bytes).map_err(OpenError::step("get random numbers"))?;
        }
        let mut mounted = Vec::with_capacity(mounts.len());
        for Mount { pool, seat } in mounts {
            let mut mount = Mounted { pool, guest: None };
            if let Some(seat) = seat {
                mount.sit(seat, None, (config.identity, 0)).map_err(|source| OpenError::System {
                    what: "take the peer's page of the pool",
                    source: std::io::Error::other(source),
                })?;
            }
            mounted.push(mount);
        }
        Ok(Self {
            identity: config.identity,
            mounts: mounted,
            expelled: BTreeSet::new(),
            seen: RefCell::default(),
            regions: Regions::new(ROWS_MAX),
            remote_regions: RemoteRegions::new(ROWS_MAX),
            attached: 0,
            queue: VecDeque::with_capacity(config.inflight_max as usize),
            canceled: 0,
            checksums: false,
            inside: None,
            now: Instant::ZERO,
            next_beat: Instant::ZERO,
            beat: 0,
            config,
        })
    }

    /// By what peers know this transport.
    #[must_use]
    pub const fn identity(&self) -> u64 {
        self.identity
    }

    /// Whether the slice can be carried out, as far as this side knows.
    fn check(&self, slice: &Slice) -> Result<(), Error> {
        let granule = self.config.granule_bytes();
        if slice.len == 0 || slice.len > SLICE_BYTES_MAX {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if !slice.len.is_multiple_of(granule) || !slice.remote.offset.is_multiple_of(u64::from(granule)) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let local = self.regions.check_local(slice)?;
        let own = u64::from(self.config.coherence.granule_bytes());
        if let Some((_, base)) = &local.ext.place
            && !((base + slice.local.offset) | u64::from(slice.len)).is_multiple_of(own)
        {
            // The rest of the line may be another process's.
            return Err(ErrorKind::InvalidArgument.into());
        }
        let remote = self.remote_regions.check_remote(slice)?;
        if slice.op == Op::Write && !self.mounts[remote.ext.mount].pool.is_writable() {
            return Err(ErrorKind::AccessDenied.into());
        }
        Ok(())
    }

    /// Releases the region and the remote region of a slice that has ended.
    fn unpin(&mut self, slice: &Slice) {
        self.regions.unpin(slice.local.region.index);
        self.remote_regions.unpin(slice.remote.region.index);
    }

    /// Ends cancelled slices, wherever they are in the queue. Returns their number.
    fn end_canceled(&mut self, out: &mut [Completion]) -> usize {
        if self.canceled == 0 {
            return 0;
        }
        let mut written = 0;
        let mut queue = std::mem::take(&mut self.queue);
        queue.retain(|job| {
            let Job::Copy { slice, canceled: true } = job else { return true };
            let Some(room) = out.get_mut(written) else { return true };
            *room = Completion::not_applied(slice.token, ErrorKind::Canceled.into());
            self.unpin(slice);
            written += 1;
            false
        });
        self.queue = queue;
        self.canceled -= written;
        written
    }

    /// Copies the bytes of a slice; returns their checksum when it is wanted and could be computed.
    fn carry_out(&mut self, slice: &Slice) -> Result<Option<u32>, Failed> {
        let (mount, at) = self.enter(slice).map_err(Failed::Before)?;
        let pool = &self.mounts[mount].pool;
        let len = u64::from(slice.len);
        let region = self.regions.find(slice.local.region).map_err(Failed::Before)?;
        let local = region.ext.memory.part(slice.local.offset, len).map_err(Failed::Before)?;
        let place = region.ext.place.as_ref();
        let place = place.map(|(pool, base)| (pool, base + slice.local.offset));
        let (lines, coherence) = (&mut pool.lines(), self.config.coherence);
        // Where our own memory is in a pool as well, its lines must not stay in our cache, nor be stale.
        let own = place.filter(|_| coherence == Coherence::Flush);
        let copied = match (slice.op, own) {
            (Op::Read, Some((own, own_at))) => get_between(lines, at, local, (&mut own.lines(), own_at)),
            (Op::Write, Some((own, own_at))) => put_between(lines, at, local, (&mut own.lines(), own_at)),
            (Op::Read, None) => get(lines, coherence, at, local).map_err(|fault| (Side::Remote, fault)),
            (Op::Write, None) if coherence == Coherence::Flush && self.config.sole_writer => {
                put_parts(lines, at, local).map_err(|fault| (Side::Remote, fault))
            }
            (Op::Write, None) => put(lines, coherence, at, local).map_err(|fault| (Side::Remote, fault)),
        };
        match copied {
            Ok(()) => Ok(if self.checksums { local.crc32c() } else { None }),
            Err((side, fault)) => {
                if let Cause::Poison { at } = fault.cause {
                    let own = own.map(|(own, _)| own).filter(|_| side == Side::Own);
                    own.unwrap_or(pool).mark_bad(at);
                    log::error!("cxl: damaged memory at offset {at:#x} of the pool");
                }
                Err(failed(slice.op, fault))
            }
        }
    }

    /// Makes sure that the peer is inside the remote region of a slice; returns its mount, and where in the
    /// pool the slice is.
    fn enter(&mut self, slice: &Slice) -> Result<(usize, u64), Error> {
        // The slice pins it, so it is still there.
        let remote = self.remote_regions.find(slice.remote.region)?;
        let Link { mount, grant } = &remote.ext;
        let Mounted { pool, guest } = &self.mounts[*mount];
        let (guest, _) = guest.ok_or(ErrorKind::Unreachable)?;
        let (at, len) = (grant.base + slice.remote.offset, u64::from(slice.len));
        if pool.is_bad(at, len) {
            return Err(Error::with_code(ErrorKind::Corrupt, libc::EHWPOISON));
        }
        let block = pool.superblock();
        let (first, count) = block.extents_of(at, len).ok_or(ErrorKind::OutOfRange)?;
        let (lines, coherence) = (&mut pool.lines(), self.config.coherence);
        match self.inside {
            Some(inside) if inside.remote == slice.remote.region.index => {
                let (from, to) = (inside.first, inside.first + inside.count);
                if first < from || first + count > to {
                    check(lines, coherence, block, guest, grant, (first, count))?;
                }
            }
            _ => {
                let entry = Inside { remote: slice.remote.region.index, mount: *mount, guest, first, count };
                let grant = *grant;
                self.leave();
                let block = self.mounts[entry.mount].pool.superblock();
                let lines = &mut self.mounts[entry.mount].pool.lines();
                enter(lines, coherence, block, guest, &grant, (first, count))?;
                self.inside = Some(entry);
                return Ok((entry.mount, at));
            }
        }
        let mount = *mount;
        if let Some(inside) = &mut self.inside {
            (inside.first, inside.count) = (first, count);
        }
        Ok((mount, at))
    }

    /// Leaves the remote region that the last slice was in.
    fn leave(&mut self) {
        let Some(inside) = self.inside.take() else { return };
        let pool = &self.mounts[inside.mount].pool;
        if let Err(fault) = leave(&mut pool.lines(), self.config.coherence, pool.superblock(), inside.guest) {
            log::error!("cxl: a region could not be left: {}", Error::from(fault));
        }
    }

    /// The pages of a peer with this identity, by mount and number, and their signs of life.
    fn beats(&self, identity: u64) -> impl Iterator<Item = ((usize, u32), u64)> {
        self.mounts.iter().enumerate().flat_map(move |(mount, Mounted { pool, .. })| {
            (0..pool.superblock().peers).filter_map(move |slot| {
                let record = peer(&mut pool.lines(), pool.superblock(), slot).ok()??;
                (record.present && record.identity == identity).then_some(((mount, slot), record.beat))
            })
        })
    }

    /// Renews the sign of life, while owners may wait for it. A page that is another peer's by now is not
    /// used any more: slices then end without a byte that moved.
    fn renew(&mut self) {
        if self.attached == 0 || self.now < self.next_beat {
            return;
        }
        self.next_beat = self.now + BEAT;
        self.beat += 1;
        for Mounted { pool, guest } in &mut self.mounts {
            let Some((sits, epoch)) = *guest else { continue };
            // When the pool is gone, slices tell.
            if let Err(why @ PoolError::Stale { .. }) = pool.tell_again(sits, epoch, true, self.beat) {
                log::error!("cxl: page {} of the pool is not used any more: {why}", sits.slot);
                *guest = None;
            }
        }
    }

    /// Ends a region's export. Returns whether no peer uses it any more.
    fn take_back(&mut self, id: RegionId) -> Result<bool, Error> {
        let Some(region) = self.regions.get_mut(id.index) else { return Ok(true) };
        region.closing = true;
        let Held { place: Some((pool, _)), export: Some(export), .. } = &region.ext else { return Ok(true) };
        // In a child after a fork the lock may be held for ever: there, this fails.
        pool.is_still_owned(export)?;
        pool.owned().revoke(pool, export)
    }

    /// Gives a region up that no peer uses any more.
    fn forget(&mut self, id: RegionId) {
        let region = self.regions.remove(id.index).map(|region| region.ext);
        if let Some(Held { place: Some((pool, _)), export: Some(export), .. }) = region {
            pool.owned().forget(&export);
        }
    }
}

/// How a slice ends whose memory failed.
fn failed(op: Op, fault: Fault) -> Failed {
    match (op, fault.cause) {
        (Op::Read, _) | (Op::Write, Cause::Range | Cause::Forked) => Failed::Before(fault.into()),
        // Bytes may have been written before the one that failed; none will be any more.
        (Op::Write, _) => Failed::Within(fault.into()),
    }
}

impl Memory for CxlTransport {
    #[allow(unsafe_code, reason = "the trait's method; its promise is passed to `Pinned`")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        span.require(KINDS)?;
        if span.is_empty() {
            return Err(ErrorKind::InvalidArgument.into());
        }
        self.regions.vacant(id.index)?;
        let found = self.mounts.iter().find_map(|mount| Some((mount.pool.clone(), mount.pool.find(span)?)));
        if found.is_none() && span.location() == Location::Pool {
            return Err(ErrorKind::Unsupported.into());
        }
        let export = match &found {
            Some((pool, at)) if access.is_remote() => {
                pool.owned().grant(pool, *at, span.len() as u64, access)?
            }
            _ => None,
        };
        // SAFETY: the caller's promise lasts until `deregister` returns `Ok`, after which nothing holds the
        // value; slices pin the region while they use it.
        let memory = unsafe { Pinned::new(span) };
        let held = Held { memory, place: found, export };
        self.regions.insert(id.index, Region::new(id, span.len() as u64, span.location(), access, 0, held))
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.regions.find(id)?.pins > 0 {
            return Err(ErrorKind::Busy.into());
        }
        if !self.take_back(id)? {
            return Err(ErrorKind::Busy.into());
        }
        self.forget(id);
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let region = self.regions.find(id)?;
        if !region.access.is_remote() || region.closing {
            return Err(ErrorKind::AccessDenied.into());
        }
        let export = region.ext.export.as_ref().ok_or(ErrorKind::Unsupported)?;
        export.write(out).ok_or_else(|| ErrorKind::OutOfRange.into())
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        let export = Export::parse(blob)?;
        self.remote_regions.vacant(id.index)?;
        let (identity, beat) = (self.identity, self.beat);
        for mount in self.mounts.iter_mut().filter(|mount| mount.pool.superblock().uuid == export.uuid) {
            if let Some((seat, before)) = mount.pool.next_seat()
                && let Err(why) = mount.sit(seat, before, (identity, beat))
            {
                log::warn!("cxl: page {} of the pool could not be taken: {why}", seat.slot);
            }
        }
        let here = |mount: &Mounted| mount.pool.superblock().uuid == export.uuid && mount.guest.is_some();
        let mount = self.mounts.iter().position(here).ok_or(ErrorKind::Unreachable)?;
        if export.coherence != self.config.coherence {
            // The owner reads and writes as if we did the same.
            return Err(ErrorKind::Unreachable.into());
        }
        let Mounted { pool, guest } = &self.mounts[mount];
        let (guest, _) = guest.ok_or(ErrorKind::Unreachable)?;
        let block = pool.superblock();
        if block.extents_of(export.base, export.len) != Some((export.first, export.count)) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if !export.base.is_multiple_of(u64::from(self.config.coherence.granule_bytes())) {
            return Err(ErrorKind::InvalidArgument.into());
        }
        let grant = Grant {
            first: export.first,
            count: export.count,
            row: export.row,
            number: export.number,
            base: export.base,
            len: export.len,
            rights: export.rights,
            incarnation: export.incarnation,
            epoch: export.epoch,
            key_hash: key_hash(&export.key),
        };
        let extents = (export.first, export.count);
        check(&mut pool.lines(), self.config.coherence, block, guest, &grant, extents)?;
        let remote = RemoteRegion {
            generation: id.generation,
            // How the owner names the region is in `grant`.
            peer: 0,
            region: 0,
            region_generation: 0,
            key: 0,
            len: export.len,
            location: Location::Host,
            access: export.rights,
            pins: 0,
            ext: Link { mount, grant },
        };
        self.remote_regions.insert(id.index, remote)?;
        self.attached += 1;
        Ok(())
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.remote_regions.detach(id)?;
        self.attached -= 1;
        Ok(())
    }
}

impl Transport for CxlTransport {
    fn name(&self) -> &'static str {
        "cxl"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ | Features::WRITE | Features::FENCE | Features::CALLER_DRIVEN)
            .with_slice_bytes(SLICE_BYTES_PREFERRED, SLICE_BYTES_MAX)
            .with_inflight_max(self.config.inflight_max)
            .with_export_bytes_max(Export::BYTES as u32)
            .with_memory(KINDS)
            .with_granule_bytes(self.config.granule_bytes())
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        for (accepted, slice) in batch.iter().enumerate() {
            if let Err(error) = self.check(slice) {
                return if accepted == 0 { Err(error) } else { Ok(accepted) };
            }
            if self.queue.len() == self.config.inflight_max as usize {
                return Ok(accepted);
            }
            self.regions.pin(slice.local.region.index);
            self.remote_regions.pin(slice.remote.region.index);
            self.queue.push_back(Job::Copy { slice: *slice, canceled: false });
        }
        Ok(batch.len())
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.now = now;
        self.renew();
        let (mut written, mut bytes) = (self.end_canceled(out), 0);
        while let Some(room) = out.get_mut(written).filter(|_| bytes < POLL_BYTES_MAX) {
            let Some(job) = self.queue.pop_front() else { break };
            *room = match job {
                Job::Fence { token, remote } => {
                    self.remote_regions.unpin(remote.index);
                    Completion::applied(token)
                }
                Job::Copy { slice, .. } => {
                    bytes += u64::from(slice.len);
                    let ended = self.carry_out(&slice);
                    self.unpin(&slice);
                    match ended {
                        Ok(Some(crc32c)) => Completion::applied(slice.token).with_crc32c(crc32c),
                        Ok(None) => Completion::applied(slice.token),
                        Err(Failed::Before(error)) => Completion::not_applied(slice.token, error),
                        Err(Failed::Within(error)) => Completion::unknown(slice.token, error),
                    }
                }
            };
            written += 1;
        }
        self.leave();
        written
    }

    fn poll_at(&self) -> Option<Instant> {
        match (self.queue.is_empty(), self.attached) {
            (false, _) => Some(self.now),
            (true, 0) => None,
            (true, _) => Some(self.next_beat),
        }
    }

    fn set_checksums(&mut self, wanted: bool) {
        self.checksums = wanted;
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        for job in &mut self.queue {
            if let Job::Copy { slice, canceled } = job
                && slice.token == token
            {
                self.canceled += usize::from(!*canceled);
                *canceled = true;
                return Ok(());
            }
        }
        Err(ErrorKind::NotFound.into())
    }

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        self.remote_regions.find(remote)?;
        if self.queue.len() == self.config.inflight_max as usize {
            return Err(ErrorKind::Full.into());
        }
        self.remote_regions.pin(remote.index);
        self.queue.push_back(Job::Fence { token, remote });
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        if peer == 0 || self.expelled.contains(&peer) {
            return false;
        }
        let silence = Duration::from_millis(u64::from(self.config.peer_silence_ms_max));
        self.beats(peer).any(|((mount, slot), beat)| {
            let mut seen = self.seen.borrow_mut();
            if seen.len() >= SEEN_MAX {
                seen.retain(|_, (_, since)| self.now < *since + silence);
            }
            let (last, since) = seen.entry((peer, mount, slot)).or_insert((beat, self.now));
            if *last != beat {
                (*last, *since) = (beat, self.now);
            }
            self.now < *since + silence
        })
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        if peer == 0 {
            return Err(ErrorKind::InvalidArgument.into());
        }
        if mode == ExpelMode::SpareConnected && self.is_connected(peer) {
            return Err(ErrorKind::Busy.into());
        }
        for Mounted { pool, .. } in &self.mounts {
            match pool.owned().place_of(pool, peer) {
                Err(error) if error.kind == ErrorKind::Full => return Err(error),
                // A pool that is gone does not keep the peer in the others.
                _ => {}
            }
        }
        if self.expelled.len() >= EXPELLED_MAX && !self.expelled.contains(&peer) {
            return Err(ErrorKind::Full.into());
        }
        self.expelled.insert(peer);
        let mut all_out = Ok(true);
        for Mounted { pool, .. } in &self.mounts {
            let out = pool.owned().expel(pool, peer);
            all_out = all_out.and_then(|all_out| Ok(all_out & out?));
        }
        all_out
    }
}

impl Drop for CxlTransport {
    /// Peers stop using the memory before it goes back to the code that drops the transport. For a peer that
    /// was stopped in the middle of a copy this waits up to a second.
    fn drop(&mut self) {
        let start = std::time::Instant::now();
        let ids: Vec<RegionId> =
            self.regions.iter().map(|(index, region)| RegionId::new(index, region.generation)).collect();
        for id in ids {
            // Where the pool is gone, or belongs to the parent of this process, there is nothing to wait for.
            loop {
                match self.take_back(id) {
                    Ok(true) => self.forget(id),
                    Ok(false) if start.elapsed().as_secs() < 1 => {
                        std::thread::yield_now();
                        continue;
                    }
                    Ok(false) => {
                        log::error!(
                            "cxl: a peer is still inside region {id} after 1 s; its memory may change"
                        );
                    }
                    Err(_) => {}
                }
                break;
            }
        }
        for Mounted { pool, guest } in &self.mounts {
            if let Some((guest, epoch)) = guest {
                let _ = pool.tell_again(*guest, *epoch, false, self.beat);
            }
        }
    }
}

const _: () = assert!(LINE == 64, "slices of a pool in mode `flush` are multiples of a line");

#[cfg(test)]
mod tests {
    use te_core::Outcome;

    use super::*;

    #[test]
    fn a_transport_can_go_to_another_thread() {
        fn goes<T: Send>() {}
        goes::<CxlTransport>();
        goes::<Mount>();
    }

    #[test]
    fn a_write_whose_memory_fails_is_unknown_and_a_read_is_not_applied() {
        let fault = |cause| Fault { cause, done: 64 };
        for cause in [Cause::Poison { at: 0 }, Cause::Gone, Cause::Local] {
            assert!(matches!(failed(Op::Write, fault(cause)), Failed::Within(_)));
            assert!(matches!(failed(Op::Read, fault(cause)), Failed::Before(_)));
        }
        for cause in [Cause::Range, Cause::Forked] {
            assert!(matches!(failed(Op::Write, fault(cause)), Failed::Before(_)));
        }
        let unknown = Completion::unknown(Token(1), ErrorKind::Rail.into());
        assert_eq!(unknown.outcome, Outcome::Unknown);
    }
}

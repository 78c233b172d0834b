//! The transport of every fabric within a host: a queue of slices that `poll` copies with `memcpy`.
//!
//! A slice is copied completely within one call of `poll`, or not at all. Cancelled and failed slices have
//! therefore changed nothing, every outcome is known, and nothing needs a fence. A limit on the bytes of one
//! call keeps large copies from delaying other transports of the same polling thread.

use std::collections::VecDeque;
use std::sync::Arc;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, Location,
    MemSpan, Memory, MemoryKinds, Op, RegionId, RemoteRegionId, Slice, Token, Transport,
};
use te_fabric::{Region, Regions, RemoteRegion, RemoteRegions};

use crate::reach::{Checksum, Copied, EXPORT_BYTES_MAX, Reach};
use crate::sys::{HeldSpan, Window, copy, copy_summed};

/// Longest slice, bytes. Copying it in one go takes tens of microseconds.
const SLICE_BYTES_MAX: u32 = 2 << 20;
/// Size from which on longer slices are no faster, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;
/// A WRITE of at least this many bytes is checksummed when checksums are [wanted](Transport::set_checksums).
/// The target is unlikely to read the bytes soon, so they are stored past the cache, which is faster and
/// leaves the cache as it is. A shorter WRITE is copied in the cache, where computing the checksum would take
/// longer than the copy.
const PAST_CACHE_BYTES_MIN: u64 = 32 << 10;
/// Slices and fences in the queue.
const INFLIGHT_MAX: usize = 4096;
/// Bytes that one call of `poll` copies before it returns; the last slice may exceed it.
const POLL_BYTES_MAX: u64 = 1 << 20;
/// Regions, and remote regions.
const ROWS_MAX: u32 = 1 << 16;

/// A transport that copies between memory that `R` reaches. [`LocalTransport`](crate::LocalTransport) and
/// [`ShmTransport`](crate::ShmTransport) are two of them.
///
/// Dropping it revokes what was exported: it waits up to a second for a peer that is in the middle of a copy.
pub struct Copier<R: Reach> {
    reach: R,
    regions: Regions<Held<R::Export>>,
    remote_regions: RemoteRegions<R::Link>,
    queue: VecDeque<Job>,
    /// Jobs in the queue whose remote region the last `poll` could not reach yet.
    stalled: usize,
    /// Jobs in the queue that are cancelled.
    canceled: usize,
    /// Whether checksums are wanted.
    checksum: Checksum,
    now: Instant,
}

/// What is kept of a region beside its rights.
struct Held<E> {
    held: Arc<HeldSpan>,
    export: Option<E>,
}

enum Job {
    Copy { slice: Slice, canceled: bool },
    Fence { token: Token, remote: RemoteRegionId },
}

impl<R: Reach> Copier<R> {
    /// A transport without regions.
    #[must_use]
    pub fn over(reach: R) -> Self {
        Self {
            reach,
            regions: Regions::new(ROWS_MAX),
            remote_regions: RemoteRegions::new(ROWS_MAX),
            queue: VecDeque::with_capacity(INFLIGHT_MAX),
            stalled: 0,
            canceled: 0,
            checksum: Checksum::Skip,
            now: Instant::ZERO,
        }
    }

    /// Whether the slice can be carried out, as far as this side knows.
    fn check(&self, slice: &Slice) -> Result<(), Error> {
        if slice.len == 0 || slice.len > SLICE_BYTES_MAX {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        self.regions.check_local(slice)?;
        self.remote_regions.check_remote(slice).map(drop)
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
            *room = Completion::not_applied(slice.token, Error::new(ErrorKind::Canceled));
            self.unpin(slice);
            written += 1;
            false
        });
        self.queue = queue;
        self.canceled -= written;
        written
    }

    fn copy(&self, slice: &Slice) -> Copied {
        // The slice pins both, so both are still there.
        let (region, remote) =
            match (self.regions.find(slice.local.region), self.remote_regions.find(slice.remote.region)) {
                (Ok(region), Ok(remote)) => (region, remote),
                (Err(error), _) | (_, Err(error)) => return Copied::Failed(error),
            };
        match region.ext.held.enter() {
            Some(local) => self.reach.copy(&remote.ext, &local, slice, self.checksum),
            None => Copied::Failed(Error::new(ErrorKind::NotFound)),
        }
    }
}

/// Copies the bytes of a slice between two windows, in which its ranges must lie: all of them or nothing.
/// With `Checksum::Compute`, the checksum of a READ, and of a WRITE that is long enough, is computed during
/// the copy.
pub fn carry_out(slice: &Slice, local: Window<'_>, remote: Window<'_>, checksum: Checksum) -> Copied {
    let len = u64::from(slice.len);
    let (from, to) = match slice.op {
        Op::Read => ((remote, slice.remote.offset), (local, slice.local.offset)),
        Op::Write => ((local, slice.local.offset), (remote, slice.remote.offset)),
    };
    let past_cache = slice.op == Op::Write;
    let copied = if checksum == Checksum::Compute && (!past_cache || len >= PAST_CACHE_BYTES_MIN) {
        copy_summed(from.0, from.1, to.0, to.1, len, past_cache).map(Some)
    } else {
        copy(from.0, from.1, to.0, to.1, len).map(|()| None)
    };
    copied.map_or_else(Copied::Failed, Copied::Done)
}

/// The rights that an operation needs on the local and on the remote side.
#[must_use]
pub const fn rights(op: Op) -> (Access, Access) {
    match op {
        Op::Read => (Access::LOCAL_WRITE, Access::REMOTE_READ),
        Op::Write => (Access::LOCAL_READ, Access::REMOTE_WRITE),
    }
}

impl<R: Reach> Memory for Copier<R> {
    #[allow(unsafe_code, reason = "the trait's method; its promise is passed to `HeldSpan`")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        span.require(MemoryKinds::HOST)?;
        if span.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        self.regions.vacant(id.index)?;
        // SAFETY: the caller's promise lasts until `deregister` returns `Ok`, which it does only after
        // `revoke` has returned true.
        let held = Arc::new(unsafe { HeldSpan::new(span) });
        let export = if access.is_remote() { self.reach.share(id, &held, access)? } else { None };
        let region = Region::new(id, span.len() as u64, span.location(), access, 0, Held { held, export });
        self.regions.insert(id.index, region)
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.regions.find(id)?.pins > 0 {
            return Err(Error::new(ErrorKind::Busy));
        }
        let Some(region) = self.regions.get_mut(id.index) else {
            return Err(Error::new(ErrorKind::NotFound));
        };
        region.closing = true;
        if !take_back(&mut self.reach, id, region) {
            return Err(Error::new(ErrorKind::Busy));
        }
        self.regions.remove(id.index);
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let region = self.regions.find(id)?;
        if !region.access.is_remote() || region.closing {
            return Err(Error::new(ErrorKind::AccessDenied));
        }
        let export = region.ext.export.as_ref().ok_or(Error::new(ErrorKind::Unsupported))?;
        let mut blob = [0; EXPORT_BYTES_MAX];
        let len = self.reach.export(id, export, region.access, region.len, &mut blob);
        out.get_mut(..len).ok_or(Error::new(ErrorKind::OutOfRange))?.copy_from_slice(&blob[..len]);
        Ok(len)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.remote_regions.vacant(id.index)?;
        let (link, len, access) = self.reach.attach(blob)?;
        let generation = id.generation;
        // How the owner names the region is known to `reach` alone.
        let (peer, region, region_generation, key) = (0, 0, 0, 0);
        let remote = RemoteRegion {
            generation,
            peer,
            region,
            region_generation,
            key,
            len,
            location: Location::Host,
            access,
            pins: 0,
            ext: link,
        };
        self.remote_regions.insert(id.index, remote)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        let remote = self.remote_regions.detach(id)?;
        self.reach.detach(remote.ext);
        Ok(())
    }
}

impl<R: Reach> Transport for Copier<R> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    fn capabilities(&self) -> Capabilities {
        let progress = if R::OWNER_POLLS { Features::TWO_SIDED_PROGRESS } else { Features::empty() };
        Capabilities::new(Features::READ | Features::WRITE | Features::CALLER_DRIVEN | progress)
            .with_slice_bytes(SLICE_BYTES_PREFERRED, SLICE_BYTES_MAX)
            .with_inflight_max(INFLIGHT_MAX as u32)
            .with_export_bytes_max(R::EXPORT_BYTES)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        for (accepted, slice) in batch.iter().enumerate() {
            if let Err(error) = self.check(slice) {
                return if accepted == 0 { Err(error) } else { Ok(accepted) };
            }
            if self.queue.len() == INFLIGHT_MAX {
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
        self.reach.poll(now);
        let (mut written, mut bytes) = (self.end_canceled(out), 0);
        self.stalled = 0;
        for _ in 0..self.queue.len() {
            let Some(room) = out.get_mut(written).filter(|_| bytes < POLL_BYTES_MAX) else { break };
            let Some(job) = self.queue.pop_front() else { break };
            *room = match job {
                Job::Fence { token, remote } => {
                    self.remote_regions.unpin(remote.index);
                    Completion::applied(token)
                }
                Job::Copy { slice, canceled: true } => {
                    // `out` had no room for it before.
                    self.queue.push_front(Job::Copy { slice, canceled: true });
                    break;
                }
                Job::Copy { slice, canceled: false } => {
                    let copied = self.copy(&slice);
                    if matches!(copied, Copied::NotYet) {
                        self.queue.push_back(Job::Copy { slice, canceled: false });
                        self.stalled += 1;
                        continue;
                    }
                    bytes += u64::from(slice.len);
                    self.unpin(&slice);
                    match copied {
                        Copied::Failed(error) => Completion::not_applied(slice.token, error),
                        Copied::Done(Some(crc32c)) => Completion::applied(slice.token).with_crc32c(crc32c),
                        Copied::Done(None) | Copied::NotYet => Completion::applied(slice.token),
                    }
                }
            };
            written += 1;
        }
        written
    }

    fn poll_at(&self) -> Option<Instant> {
        if self.queue.len() > self.stalled { Some(self.now) } else { self.reach.poll_at() }
    }

    fn event_source(&self) -> Option<EventSource> {
        self.reach.event_source()
    }

    fn set_checksums(&mut self, wanted: bool) {
        self.checksum = if wanted { Checksum::Compute } else { Checksum::Skip };
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        for job in &mut self.queue {
            if let Job::Copy { slice, canceled } = job
                && slice.token == token
            {
                // It ends with the next poll, even when its remote region cannot be reached yet.
                self.canceled += usize::from(!*canceled);
                *canceled = true;
                self.stalled = 0;
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::NotFound))
    }

    fn fence(&mut self, token: Token, remote: RemoteRegionId) -> Result<(), Error> {
        self.remote_regions.find(remote)?;
        if self.queue.len() == INFLIGHT_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        self.remote_regions.pin(remote.index);
        self.queue.push_back(Job::Fence { token, remote });
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.reach.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        if peer == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        if mode == ExpelMode::SpareConnected && self.is_connected(peer) {
            return Err(Error::new(ErrorKind::Busy));
        }
        self.reach.expel(peer)
    }
}

impl<R: Reach> Drop for Copier<R> {
    /// Peers stop using the memory before it goes back to the code that drops the transport. A copy takes
    /// microseconds, and a peer that died in the middle of one is noticed. For a peer that was stopped in the
    /// middle of a copy this waits up to a second.
    fn drop(&mut self) {
        let start = std::time::Instant::now();
        for (index, region) in self.regions.iter() {
            let id = RegionId::new(index, region.generation);
            while !take_back(&mut self.reach, id, region) {
                if start.elapsed().as_secs() >= 1 {
                    log::error!(
                        "{}: a peer is still inside region {id} after 1 s; its memory may change",
                        R::NAME
                    );
                    break;
                }
                std::thread::yield_now();
            }
        }
    }
}

/// Ends a region's export and its registration. Returns true when nothing uses its memory any more.
fn take_back<R: Reach>(reach: &mut R, id: RegionId, region: &Region<Held<R::Export>>) -> bool {
    let Held { held, export } = &region.ext;
    let peers_out = export.as_ref().is_none_or(|export| reach.unshare(id, export));
    held.revoke() && peers_out
}

#[cfg(test)]
mod tests {
    use te_core::{RegionOffset, RemoteOffset};

    use super::*;
    use crate::{LocalConfig, LocalTransport};

    #[test]
    fn a_cancelled_slice_ends_with_the_next_poll_however_much_is_before_it() {
        let open = || LocalTransport::new(LocalConfig::default()).unwrap();
        let (mut owner, mut peer) = (open(), open());
        let mut memory = [vec![1u8; 2 << 20], vec![2u8; 2 << 20]];
        let id = RegionId::new(0, 0);
        for (side, memory) in [&mut owner, &mut peer].into_iter().zip(&mut memory) {
            let span = MemSpan::new(memory.as_mut_ptr(), memory.len());
            #[allow(unsafe_code, reason = "a test's own memory")]
            // SAFETY: the memory outlives the transports' use of it, and nothing else accesses it meanwhile.
            unsafe {
                side.register(id, span, Access::all()).unwrap();
            }
        }
        let (mut blob, remote) = ([0; 128], RemoteRegionId::new(0, 0));
        let len = owner.export(id, &mut blob).unwrap();
        peer.attach(remote, &blob[..len]).unwrap();
        let slice = |token| Slice {
            token: Token(token),
            local: RegionOffset::new(id, 0),
            remote: RemoteOffset::new(remote, 0),
            len: 2 << 20,
            op: Op::Read,
        };
        let slices: Vec<Slice> = (0..200).map(slice).collect();
        assert_eq!(peer.submit(&slices), Ok(200));
        (2..200).for_each(|token| peer.cancel(Token(token)).unwrap());
        peer.cancel(Token(2)).unwrap();
        let mut out = [Completion::applied(Token(u64::MAX)); 64];
        let mut ended = Vec::new();
        for count in [64, 64, 64] {
            assert_eq!(peer.poll(Instant::ZERO, &mut out), count);
            ended.extend_from_slice(&out);
        }
        // The remaining cancelled slices, and as many copies as one call may make.
        assert_eq!(peer.poll(Instant::ZERO, &mut out), 7);
        ended.extend_from_slice(&out[..7]);
        let copied: Vec<u64> = ended.iter().filter(|end| end.result.is_ok()).map(|end| end.token.0).collect();
        assert_eq!(copied, [0]);
        assert_eq!(peer.poll(Instant::ZERO, &mut out), 1);
        assert_eq!((out[0].token, out[0].result.is_ok()), (Token(1), true));
        assert_eq!(peer.poll(Instant::ZERO, &mut out), 0);
        peer.deregister(id).unwrap();
        owner.deregister(id).unwrap();
    }
}

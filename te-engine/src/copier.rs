//! What the two fabrics of one host share: a queue of slices that `poll` works off with `memcpy`.
//!
//! A slice is copied whole within one call of `poll`, or not at all. So it is never half done: cancelled and failed slices
//! have touched nothing, every outcome is known, and nothing needs a fence. A bound on the bytes of one call keeps large
//! copies from starving whoever else is polled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::vec::Vec;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, EventSource, Features, Instant, MemSpan, Memory, Op,
    RegionId, SegmentId, Slice, Token, Transport,
};

use crate::sums::{self, Note};
use crate::sys::{HeldSpan, Use, Window, copy, copy_summed};

/// Longest slice, bytes. Copied in one go, it takes tens of microseconds.
const SLICE_BYTES_MAX: u32 = 2 << 20;
/// Where one more cut no longer pays, bytes.
const SLICE_BYTES_PREFERRED: u32 = 256 << 10;
/// A WRITE of this many bytes is checksummed where that is asked for: nobody looks soon at what it leaves at the target, so it is
/// stored past the cache, which is faster and spares what is there. A shorter one is copied in the cache, and takes longer to sum than
/// to copy.
const COLD_BYTES_MIN: u64 = 32 << 10;
/// Slices and fences in the queue, at most.
const INFLIGHT_MAX: usize = 4096;
/// Bytes that one call of `poll` copies before it returns, give or take a slice.
const POLL_BYTES_MAX: u64 = 1 << 20;
/// Regions and segments, at most each.
pub(crate) const ROWS_MAX: usize = 1 << 16;

/// How one of the two fabrics finds the memory behind an export.
pub(crate) trait Reach {
    /// The fabric's name.
    const NAME: &'static str;
    /// Length of an export, bytes.
    const EXPORT_BYTES: u32;
    /// Whether exports work only while their owner polls.
    const OWNER_POLLS: bool;
    /// What the owner keeps of an exported region.
    type Export;
    /// What a peer keeps of an attached one.
    type Link;

    /// Prepares a region with remote rights for export. `None`: this fabric cannot export such memory.
    fn share(
        &mut self,
        id: RegionId,
        held: &Arc<HeldSpan>,
        access: Access,
    ) -> Result<Option<Self::Export>, Error>;
    /// Ends an export. True: no peer touches the memory, and none will. Asked again until it is.
    fn unshare(&mut self, id: RegionId, export: &Self::Export) -> bool;
    /// Writes the export.
    fn export(
        &self,
        id: RegionId,
        export: &Self::Export,
        access: Access,
        len: u64,
        out: &mut [u8; 128],
    ) -> usize;
    /// Understands an export: the way to its memory, its length and the rights that it claims.
    fn attach(&mut self, blob: &[u8]) -> Result<(Self::Link, u64, Access), Error>;
    /// Forgets a way.
    fn detach(&mut self, link: Self::Link);
    /// Copies between local memory and the memory behind `link`.
    fn copy(&self, link: &Self::Link, local: &Use<'_>, slice: &Slice) -> Copied;
    /// As [`Transport::is_connected`].
    fn is_connected(&self, peer: u64) -> bool;
    /// As [`Transport::expel`], of a peer that is somebody and may be expelled.
    fn expel(&mut self, peer: u64) -> Result<bool, Error>;
    /// Progress beside copying.
    fn poll(&mut self, now: Instant);
    /// When `poll` must run even if nothing arrives.
    fn poll_at(&self) -> Option<Instant>;
    /// What becomes readable when `poll` has something to do.
    fn event_source(&self) -> Option<EventSource>;
}

/// What became of one attempt to copy.
pub(crate) enum Copied {
    /// All of it is in place.
    Done,
    /// The way is not known yet; ask again after `poll`.
    NotYet,
    /// Nothing was touched.
    Failed(Error),
}

/// A transport that copies. Its parts differ in `R` alone.
pub(crate) struct Copier<R: Reach> {
    reach: R,
    regions: Vec<Option<Region<R::Export>>>,
    segments: Vec<Option<Segment<R::Link>>>,
    queue: VecDeque<Job>,
    /// Jobs in the queue that the last `poll` found waiting for their way.
    stalled: usize,
    /// Jobs in the queue that are cancelled.
    canceled: usize,
    now: Instant,
}

struct Region<E> {
    generation: u32,
    access: Access,
    held: Arc<HeldSpan>,
    export: Option<E>,
    in_use: u32,
    /// A `deregister` met a peer's running copy; only another one makes sense now.
    closing: bool,
}

struct Segment<L> {
    generation: u32,
    link: L,
    len: u64,
    access: Access,
    in_use: u32,
}

enum Job {
    Copy { slice: Slice, canceled: bool },
    Fence { token: Token, segment: SegmentId },
}

impl<R: Reach> Copier<R> {
    pub(crate) fn new(reach: R) -> Self {
        Self {
            reach,
            regions: Vec::new(),
            segments: Vec::new(),
            queue: VecDeque::with_capacity(INFLIGHT_MAX),
            stalled: 0,
            canceled: 0,
            now: Instant::ZERO,
        }
    }

    fn region(&self, id: RegionId) -> Result<&Region<R::Export>, Error> {
        let region = self.regions.get(id.index as usize).and_then(Option::as_ref);
        let region = region.ok_or(Error::new(ErrorKind::NotFound))?;
        if region.generation == id.generation { Ok(region) } else { Err(Error::new(ErrorKind::Stale)) }
    }

    fn segment(&self, id: SegmentId) -> Result<&Segment<R::Link>, Error> {
        let segment = self.segments.get(id.index as usize).and_then(Option::as_ref);
        let segment = segment.ok_or(Error::new(ErrorKind::NotFound))?;
        if segment.generation == id.generation { Ok(segment) } else { Err(Error::new(ErrorKind::Stale)) }
    }

    /// Whether the slice can be carried out as far as this side knows.
    fn check(&self, slice: &Slice) -> Result<(), Error> {
        if slice.len == 0 || slice.len > SLICE_BYTES_MAX {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        let (region, segment) = (self.region(slice.local.0)?, self.segment(slice.remote.0)?);
        if region.closing {
            return Err(Error::new(ErrorKind::NotFound));
        }
        let end = slice.remote.1.checked_add(u64::from(slice.len));
        if !region.held.span().contains(slice.local.1, u64::from(slice.len))
            || end.is_none_or(|end| end > segment.len)
        {
            return Err(Error::new(ErrorKind::OutOfRange));
        }
        let (local, remote) = rights(slice.op);
        if region.access.contains(local) && segment.access.contains(remote) {
            Ok(())
        } else {
            Err(Error::new(ErrorKind::AccessDenied))
        }
    }

    /// Counts a slice's region and segment in or out.
    fn count(&mut self, slice: &Slice, by: i32) {
        if let Some(Some(region)) = self.regions.get_mut(slice.local.0.index as usize) {
            region.in_use = region.in_use.wrapping_add_signed(by);
        }
        if let Some(Some(segment)) = self.segments.get_mut(slice.remote.0.index as usize) {
            segment.in_use = segment.in_use.wrapping_add_signed(by);
        }
    }

    /// Ends what was cancelled, however much is queued before it. Gives how many.
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
            self.count(slice, -1);
            written += 1;
            false
        });
        self.queue = queue;
        self.canceled -= written;
        written
    }

    fn copy(&self, slice: &Slice) -> Copied {
        // Both are counted in, so neither can have gone.
        let (region, segment) = match (self.region(slice.local.0), self.segment(slice.remote.0)) {
            (Ok(region), Ok(segment)) => (region, segment),
            (Err(error), _) | (_, Err(error)) => return Copied::Failed(error),
        };
        match region.held.enter() {
            Some(local) => self.reach.copy(&segment.link, &local, slice),
            None => Copied::Failed(Error::new(ErrorKind::NotFound)),
        }
    }
}

/// Copies what a slice asks for; a READ, and a WRITE that is worth it, with its checksum where somebody [asks](sums::wanted).
pub(crate) fn carry_out(slice: &Slice, local: Window<'_>, remote: Window<'_>) -> Copied {
    let len = u64::from(slice.len);
    let (from, to) = match slice.op {
        Op::Read => ((remote, slice.remote.1), (local, slice.local.1)),
        Op::Write => ((local, slice.local.1), (remote, slice.remote.1)),
    };
    let cold = slice.op == Op::Write;
    let copied = if sums::wanted() && (!cold || len >= COLD_BYTES_MIN) {
        let (region, offset) = slice.local;
        copy_summed(from.0, from.1, to.0, to.1, len, cold)
            .map(|crc32c| sums::note(Note { op: slice.op, region, offset, len, crc32c }))
    } else {
        copy(from.0, from.1, to.0, to.1, len)
    };
    copied.map_or_else(Copied::Failed, |()| Copied::Done)
}

/// The rights that an operation needs on the local and on the remote side.
pub(crate) fn rights(op: Op) -> (Access, Access) {
    match op {
        Op::Read => (Access::LOCAL_WRITE, Access::REMOTE_READ),
        Op::Write => (Access::LOCAL_READ, Access::REMOTE_WRITE),
    }
}

impl<R: Reach> Memory for Copier<R> {
    #[allow(unsafe_code, reason = "the trait's method; its promise is passed to `HeldSpan`")]
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        if span.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        let index = id.index as usize;
        if index >= ROWS_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        if self.regions.get(index).is_some_and(Option::is_some) {
            return Err(Error::new(ErrorKind::Busy));
        }
        // SAFETY: the caller's promise lasts until `deregister` returns `Ok`, which it does only after `revoke` was true.
        let held = Arc::new(unsafe { HeldSpan::new(span) });
        let export = if access.is_remote() { self.reach.share(id, &held, access)? } else { None };
        if self.regions.len() <= index {
            self.regions.resize_with(index + 1, || None);
        }
        let generation = id.generation;
        self.regions[index] = Some(Region { generation, access, held, export, in_use: 0, closing: false });
        Ok(())
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        if self.region(id)?.in_use > 0 {
            return Err(Error::new(ErrorKind::Busy));
        }
        let Some(Some(region)) = self.regions.get_mut(id.index as usize) else {
            return Err(Error::new(ErrorKind::NotFound));
        };
        region.closing = true;
        let peers_out = region.export.as_ref().is_none_or(|export| self.reach.unshare(id, export));
        if !region.held.revoke() || !peers_out {
            return Err(Error::new(ErrorKind::Busy));
        }
        self.regions[id.index as usize] = None;
        Ok(())
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        let region = self.region(id)?;
        if !region.access.is_remote() {
            return Err(Error::new(ErrorKind::AccessDenied));
        }
        let export = region.export.as_ref().ok_or(Error::new(ErrorKind::Unsupported))?;
        let mut blob = [0; 128];
        let len = self.reach.export(id, export, region.access, region.held.span().len() as u64, &mut blob);
        out.get_mut(..len).ok_or(Error::new(ErrorKind::OutOfRange))?.copy_from_slice(&blob[..len]);
        Ok(len)
    }

    fn attach(&mut self, id: SegmentId, blob: &[u8]) -> Result<(), Error> {
        let index = id.index as usize;
        if index >= ROWS_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        if self.segments.get(index).is_some_and(Option::is_some) {
            return Err(Error::new(ErrorKind::Busy));
        }
        let (link, len, access) = self.reach.attach(blob)?;
        if self.segments.len() <= index {
            self.segments.resize_with(index + 1, || None);
        }
        self.segments[index] = Some(Segment { generation: id.generation, link, len, access, in_use: 0 });
        Ok(())
    }

    fn detach(&mut self, id: SegmentId) -> Result<(), Error> {
        if self.segment(id)?.in_use > 0 {
            return Err(Error::new(ErrorKind::Busy));
        }
        if let Some(segment) = self.segments[id.index as usize].take() {
            self.reach.detach(segment.link);
        }
        Ok(())
    }
}

impl<R: Reach> Transport for Copier<R> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    fn capabilities(&self) -> Capabilities {
        let progress = if R::OWNER_POLLS { Features::TWO_SIDED_PROGRESS } else { Features::empty() };
        Capabilities {
            features: Features::READ | Features::WRITE | Features::INLINE | progress,
            slice_bytes_max: SLICE_BYTES_MAX,
            slice_bytes_preferred: SLICE_BYTES_PREFERRED,
            inflight_max: INFLIGHT_MAX as u32,
            export_bytes_max: R::EXPORT_BYTES,
        }
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        for (accepted, slice) in batch.iter().enumerate() {
            if let Err(error) = self.check(slice) {
                return if accepted == 0 { Err(error) } else { Ok(accepted) };
            }
            if self.queue.len() == INFLIGHT_MAX {
                return Ok(accepted);
            }
            self.count(slice, 1);
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
                Job::Fence { token, segment } => {
                    if let Some(Some(segment)) = self.segments.get_mut(segment.index as usize) {
                        segment.in_use -= 1;
                    }
                    Completion::applied(token)
                }
                Job::Copy { slice, canceled: true } => {
                    // There was no room for it before.
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
                    self.count(&slice, -1);
                    match copied {
                        Copied::Failed(error) => Completion::not_applied(slice.token, error),
                        Copied::Done | Copied::NotYet => Completion::applied(slice.token),
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

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        for job in &mut self.queue {
            if let Job::Copy { slice, canceled } = job
                && slice.token == token
            {
                // It ends with the next poll, even when it waits for its way.
                self.canceled += usize::from(!*canceled);
                *canceled = true;
                self.stalled = 0;
                return Ok(());
            }
        }
        Err(Error::new(ErrorKind::NotFound))
    }

    fn fence(&mut self, token: Token, segment: SegmentId) -> Result<(), Error> {
        self.segment(segment)?;
        if self.queue.len() == INFLIGHT_MAX {
            return Err(Error::new(ErrorKind::Full));
        }
        if let Some(Some(segment)) = self.segments.get_mut(segment.index as usize) {
            segment.in_use += 1;
        }
        self.queue.push_back(Job::Fence { token, segment });
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        peer != 0 && self.reach.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, force: bool) -> Result<bool, Error> {
        if peer == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        if !force && self.is_connected(peer) {
            return Err(Error::new(ErrorKind::Busy));
        }
        self.reach.expel(peer)
    }
}

impl<R: Reach> Drop for Copier<R> {
    /// Peers stop before the memory goes back to whoever dropped us. A copy takes microseconds; a peer that died in one is
    /// noticed. One that was stopped in the middle of a copy keeps us waiting, but not for ever.
    fn drop(&mut self) {
        let start = std::time::Instant::now();
        for (index, region) in self.regions.iter().enumerate() {
            let Some(region) = region else { continue };
            let id = RegionId::new(index as u32, region.generation);
            loop {
                let peers_out = region.export.as_ref().is_none_or(|export| self.reach.unshare(id, export));
                if region.held.revoke() && peers_out {
                    break;
                }
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

/// Makes a newtype around a [`Copier`] a transport.
macro_rules! forward_transport {
    ($name:ident) => {
        impl Memory for $name {
            #[allow(unsafe_code, reason = "the trait's method; its promise is passed on")]
            unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
                // SAFETY: the caller's promise, passed on.
                unsafe { self.0.register(id, span, access) }
            }
            fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
                self.0.deregister(id)
            }
            fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
                self.0.export(id, out)
            }
            fn attach(&mut self, id: SegmentId, blob: &[u8]) -> Result<(), Error> {
                self.0.attach(id, blob)
            }
            fn detach(&mut self, id: SegmentId) -> Result<(), Error> {
                self.0.detach(id)
            }
        }

        impl Transport for $name {
            fn name(&self) -> &'static str {
                self.0.name()
            }
            fn capabilities(&self) -> Capabilities {
                self.0.capabilities()
            }
            fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
                self.0.submit(batch)
            }
            fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
                self.0.poll(now, out)
            }
            fn poll_at(&self) -> Option<Instant> {
                self.0.poll_at()
            }
            fn event_source(&self) -> Option<EventSource> {
                self.0.event_source()
            }
            fn cancel(&mut self, token: Token) -> Result<(), Error> {
                self.0.cancel(token)
            }
            fn fence(&mut self, token: Token, segment: SegmentId) -> Result<(), Error> {
                self.0.fence(token, segment)
            }
            fn is_connected(&self, peer: u64) -> bool {
                self.0.is_connected(peer)
            }
            fn expel(&mut self, peer: u64, force: bool) -> Result<bool, Error> {
                self.0.expel(peer, force)
            }
        }
    };
}
pub(crate) use forward_transport;

#[cfg(test)]
mod tests {
    use crate::LocalTransport;

    use super::*;

    #[test]
    fn a_cancelled_slice_ends_with_the_next_poll_however_much_is_before_it() {
        let (mut owner, mut peer) = (LocalTransport::new().unwrap(), LocalTransport::new().unwrap());
        let mut memory = [vec![1u8; 2 << 20], vec![2u8; 2 << 20]];
        let id = RegionId::new(0, 0);
        for (side, memory) in [&mut owner, &mut peer].into_iter().zip(&mut memory) {
            let span = MemSpan::new(memory.as_mut_ptr(), memory.len());
            #[allow(unsafe_code, reason = "a test's own memory")]
            // SAFETY: the memory outlives the transports' use of it, and nobody else touches it meanwhile.
            unsafe {
                side.register(id, span, Access::all()).unwrap();
            }
        }
        let (mut blob, segment) = ([0; 128], SegmentId::new(0, 0));
        let len = owner.export(id, &mut blob).unwrap();
        peer.attach(segment, &blob[..len]).unwrap();
        let slice = |token| Slice {
            token: Token(token),
            local: (id, 0),
            remote: (segment, 0),
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
        // The rest of them, and as many copies as one call may do.
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

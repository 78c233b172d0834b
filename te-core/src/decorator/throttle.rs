//! A transport with a bandwidth limit.
#![allow(unsafe_code, reason = "forwards `register`, whose promise the caller made")]

use super::access_inner;
use crate::{
    Access, Capabilities, Completion, Error, EventSource, ExpelMode, Instant, MemSpan, Memory, RegionId,
    RemoteRegionId, Slice, Token, Transport,
};
use alloc::string::String;

/// A token bucket of bytes before `submit`. With an empty bucket the transport looks full: a short count, and
/// `poll_at` says when to come back. A slice may overdraw the bucket, so that slices longer than it pass,
/// too; the following slices pay the debt.
#[derive(Debug)]
pub struct Throttle<T> {
    inner: T,
    bytes_per_s: u64,
    burst_bytes: u64,
    /// Bytes times 10^9, so that no fraction of a byte is lost.
    level: i128,
    turned_away: bool,
    now: Instant,
}

access_inner!(Throttle);

const NANOS: i128 = 1_000_000_000;

impl<T: Transport> Throttle<T> {
    /// A transport around `inner` with `bytes_per_s` (at least 1). The bucket holds up to `burst_bytes` (at
    /// least 1), and is full at first.
    #[must_use]
    pub fn new(inner: T, bytes_per_s: u64, burst_bytes: u64) -> Self {
        let (bytes_per_s, burst_bytes) = (bytes_per_s.max(1), burst_bytes.max(1));
        let level = i128::from(burst_bytes) * NANOS;
        Self { inner, bytes_per_s, burst_bytes, level, turned_away: false, now: Instant::ZERO }
    }

    /// Changes the limit from now on.
    pub fn set_bytes_per_s(&mut self, bytes_per_s: u64) {
        self.bytes_per_s = bytes_per_s.max(1);
    }

    fn refill(&mut self, now: Instant) {
        let gained = i128::from(now.nanos_since(self.now)) * i128::from(self.bytes_per_s);
        self.level = (self.level + gained).min(i128::from(self.burst_bytes) * NANOS);
        self.now = self.now.max(now);
    }
}

impl<T: Transport> Memory for Throttle<T> {
    unsafe fn register(&mut self, id: RegionId, span: MemSpan, access: Access) -> Result<(), Error> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.register(id, span, access) }
    }

    fn deregister(&mut self, id: RegionId) -> Result<(), Error> {
        self.inner.deregister(id)
    }

    fn export(&self, id: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        self.inner.export(id, out)
    }

    fn attach(&mut self, id: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        self.inner.attach(id, blob)
    }

    fn detach(&mut self, id: RemoteRegionId) -> Result<(), Error> {
        self.inner.detach(id)
    }
}

impl<T: Transport> Transport for Throttle<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let mut level = self.level;
        let affordable = batch.iter().take_while(|slice| {
            let pays = level > 0;
            level -= i128::from(slice.len) * NANOS;
            pays
        });
        let count = affordable.count();
        self.turned_away |= count < batch.len();
        if count == 0 {
            return Ok(0);
        }
        let accepted = self.inner.submit(&batch[..count])?;
        self.level -= batch[..accepted].iter().map(|slice| i128::from(slice.len) * NANOS).sum::<i128>();
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.refill(now);
        self.turned_away &= self.level <= 0;
        self.inner.poll(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        let wait = (-self.level).max(0) / i128::from(self.bytes_per_s) + 1;
        let paid = Instant::from_nanos(self.now.as_nanos().saturating_add(wait as u64));
        self.inner.poll_at().into_iter().chain(self.turned_away.then_some(paid)).min()
    }

    fn event_source(&self) -> Option<EventSource> {
        self.inner.event_source()
    }

    fn activity(&self) -> u64 {
        self.inner.activity()
    }

    fn set_checksums(&mut self, wanted: bool) {
        self.inner.set_checksums(wanted);
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        self.inner.cancel(token)
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        self.inner.fence(token, remote_region)
    }

    fn why_not_exported(&self, region: RegionId) -> Option<String> {
        self.inner.why_not_exported(region)
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.inner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.inner.expel(peer, mode)
    }
}

//! A transport whose completions come late.
#![allow(unsafe_code, reason = "forwards `register`, whose promise the caller made")]

use alloc::string::String;
use core::time::Duration;

use super::access_inner;
use super::held::Held;
use crate::{
    Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, RegionId,
    RemoteRegionId, Slice, Token, Transport,
};

/// Holds every completion back for a fixed time.
#[derive(Debug)]
pub struct Delay<T> {
    inner: T,
    hold: Duration,
    held: Held,
    now: Instant,
}

access_inner!(Delay);

impl<T: Transport> Delay<T> {
    /// A transport around `inner` that returns completions `hold` later.
    #[must_use]
    pub fn new(inner: T, hold: Duration) -> Self {
        let held = Held::new(inner.capabilities().inflight_max);
        Self { inner, hold, held, now: Instant::ZERO }
    }

    /// Changes the delay of the completions that come from now on.
    pub fn set_hold(&mut self, hold: Duration) {
        self.hold = hold;
    }
}

super::held_memory!(Delay);

impl<T: Transport> Transport for Delay<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    /// The completion of a cancelled slice is held back like any other.
    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        Capabilities { features: inner.features - Features::CALLER_DRIVEN, ..inner }
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let room = self.held.room().min(batch.len());
        if room == 0 {
            return Ok(0);
        }
        let accepted = self.inner.submit(&batch[..room])?;
        batch[..accepted].iter().for_each(|slice| self.held.accept(slice, self.now, false));
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.now = now;
        let count = self.inner.poll(now, out);
        for completion in &out[..count] {
            if let Some(entry) = self.held.ended(completion.token) {
                self.held.hold(entry, *completion, now + self.hold);
            }
        }
        self.held.release(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.inner.poll_at().into_iter().chain(self.held.next_due()).min()
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
        let inner = self.inner.cancel(token);
        self.held.cancel(token, inner)
    }

    fn fence(&mut self, token: Token, remote_region: RemoteRegionId) -> Result<(), Error> {
        if !self.held.has_room_for_a_fence() {
            return Err(ErrorKind::Full.into());
        }
        self.inner.fence(token, remote_region)?;
        self.held.accept_fence(token, remote_region, self.now);
        Ok(())
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

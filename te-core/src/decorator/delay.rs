//! A transport that answers late.
#![allow(unsafe_code, reason = "forwards `register`, whose promise the caller made")]

use core::time::Duration;

use super::access_inner;
use super::shelf::Shelf;
use crate::{
    Capabilities, Completion, Error, ErrorKind, EventSource, ExpelMode, Features, Instant, RemoteRegionId,
    Slice, Token, Transport,
};

/// Holds every completion back for a while after it has come.
#[derive(Debug)]
pub struct Delay<T> {
    inner: T,
    hold: Duration,
    shelf: Shelf,
    now: Instant,
}

access_inner!(Delay);

impl<T: Transport> Delay<T> {
    /// `inner`, `hold` later.
    #[must_use]
    pub fn new(inner: T, hold: Duration) -> Self {
        let shelf = Shelf::new(inner.capabilities().inflight_max);
        Self { inner, hold, shelf, now: Instant::ZERO }
    }

    /// Changes the delay of completions that come from now on.
    pub fn set_hold(&mut self, hold: Duration) {
        self.hold = hold;
    }
}

super::shelved_memory!(Delay);

impl<T: Transport> Transport for Delay<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    /// A cancelled slice is held back like any other.
    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        Capabilities { features: inner.features - Features::CALLER_DRIVEN, ..inner }
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        let room = self.shelf.room().min(batch.len());
        if room == 0 {
            return Ok(0);
        }
        let accepted = self.inner.submit(&batch[..room])?;
        batch[..accepted].iter().for_each(|slice| self.shelf.accept(slice, self.now, false));
        Ok(accepted)
    }

    fn poll(&mut self, now: Instant, out: &mut [Completion]) -> usize {
        self.now = now;
        let count = self.inner.poll(now, out);
        for completion in &out[..count] {
            if let Some(entry) = self.shelf.ended(completion.token) {
                self.shelf.hold(entry, *completion, now + self.hold);
            }
        }
        self.shelf.release(now, out)
    }

    fn poll_at(&self) -> Option<Instant> {
        self.inner.poll_at().into_iter().chain(self.shelf.next_due()).min()
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
        self.shelf.cancel(token, inner)
    }

    fn fence(&mut self, token: Token, segment: RemoteRegionId) -> Result<(), Error> {
        if !self.shelf.has_room_for_a_fence() {
            return Err(ErrorKind::Full.into());
        }
        self.inner.fence(token, segment)?;
        self.shelf.accept_fence(token, segment, self.now);
        Ok(())
    }

    fn is_connected(&self, peer: u64) -> bool {
        self.inner.is_connected(peer)
    }

    fn expel(&mut self, peer: u64, mode: ExpelMode) -> Result<bool, Error> {
        self.inner.expel(peer, mode)
    }
}

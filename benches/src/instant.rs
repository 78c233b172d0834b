//! A transport that moves nothing: what is left is the cost of everything around it.
#![allow(unsafe_code, reason = "implements `register`, whose promise the caller makes")]

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, Features, Instant, MemSpan, Memory, RegionId,
    RemoteRegionId, Slice, Token, Transport,
};

use crate::TokenRing;

/// Accepts slices and completes them at the next poll, in order, without touching a byte.
#[derive(Debug)]
pub struct InstantRail {
    accepted: TokenRing,
    inflight_max: u32,
}

impl InstantRail {
    /// Room for `inflight_max` slices.
    #[must_use]
    pub fn new(inflight_max: u32) -> Self {
        Self { accepted: TokenRing::new(inflight_max as usize), inflight_max }
    }
}

impl Memory for InstantRail {
    unsafe fn register(&mut self, _: RegionId, _: MemSpan, _: Access) -> Result<(), Error> {
        Ok(())
    }

    fn deregister(&mut self, _: RegionId) -> Result<(), Error> {
        Ok(())
    }

    fn export(&self, _: RegionId, out: &mut [u8]) -> Result<usize, Error> {
        *out.first_mut().ok_or(Error::new(ErrorKind::OutOfRange))? = 1;
        Ok(1)
    }

    fn attach(&mut self, _: RemoteRegionId, _: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    fn detach(&mut self, _: RemoteRegionId) -> Result<(), Error> {
        Ok(())
    }
}

impl Transport for InstantRail {
    fn name(&self) -> &'static str {
        "instant"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ | Features::WRITE)
            .with_slice_bytes(64 << 10, 1 << 30)
            .with_inflight_max(self.inflight_max)
            .with_export_bytes_max(1)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        Ok(batch.iter().take_while(|slice| self.accepted.push(slice.token)).count())
    }

    fn poll(&mut self, _: Instant, out: &mut [Completion]) -> usize {
        let ended = std::iter::from_fn(|| self.accepted.pop());
        out.iter_mut().zip(ended).map(|(out, token)| *out = Completion::applied(token)).count()
    }

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn cancel(&mut self, _: Token) -> Result<(), Error> {
        Err(Error::new(ErrorKind::NotFound))
    }

    fn fence(&mut self, token: Token, _: RemoteRegionId) -> Result<(), Error> {
        if self.accepted.push(token) { Ok(()) } else { Err(Error::new(ErrorKind::Full)) }
    }
}

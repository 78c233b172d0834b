//! A transport that moves nothing: what is left is the cost, or the behaviour, of everything around it.

use alloc::boxed::Box;
use alloc::vec;

use crate::{
    Access, Capabilities, Completion, Error, ErrorKind, Features, Instant, MemSpan, Memory, RegionId,
    RemoteRegionId, Slice, Token, Transport,
};

/// Accepts every slice and completes it as `Applied` at the next poll, in order, without touching a byte.
/// Takes every region and every export that is not empty. Allocates in [`new`](Self::new) alone.
#[derive(Debug)]
pub struct NullTransport {
    name: &'static str,
    /// A ring; its length is a power of two.
    accepted: Box<[Token]>,
    first: usize,
    len: usize,
    slice_bytes: (u32, u32),
    attached: usize,
}

impl NullTransport {
    /// A transport named `null` that holds up to `inflight_max` slices and fences, rounded up to a power of
    /// two.
    #[must_use]
    pub fn new(inflight_max: u32) -> Self {
        let slots = inflight_max.next_power_of_two() as usize;
        Self {
            name: "null",
            accepted: vec![Token(0); slots].into(),
            first: 0,
            len: 0,
            slice_bytes: (64 << 10, 1 << 30),
            attached: 0,
        }
    }

    /// The same with another name, for several in one `MultiTransport`.
    #[must_use]
    pub const fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }

    /// The same with another preferred and another longest slice, bytes.
    #[must_use]
    pub const fn with_slice_bytes(mut self, preferred: u32, max: u32) -> Self {
        self.slice_bytes = (preferred, max);
        self
    }

    /// Remote regions that are attached.
    #[must_use]
    pub const fn attached(&self) -> usize {
        self.attached
    }

    /// Adds a token; false when there is no room.
    fn push(&mut self, token: Token) -> bool {
        if self.len == self.accepted.len() {
            return false;
        }
        let at = (self.first + self.len) & (self.accepted.len() - 1);
        self.accepted[at] = token;
        self.len += 1;
        true
    }

    /// Takes the oldest token.
    fn pop(&mut self) -> Option<Token> {
        if self.len == 0 {
            return None;
        }
        let token = self.accepted[self.first];
        self.first = (self.first + 1) & (self.accepted.len() - 1);
        self.len -= 1;
        Some(token)
    }
}

impl Memory for NullTransport {
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

    fn attach(&mut self, _: RemoteRegionId, blob: &[u8]) -> Result<(), Error> {
        if blob.is_empty() {
            return Err(Error::new(ErrorKind::InvalidArgument));
        }
        self.attached += 1;
        Ok(())
    }

    fn detach(&mut self, _: RemoteRegionId) -> Result<(), Error> {
        self.attached = self.attached.checked_sub(1).ok_or(Error::new(ErrorKind::NotFound))?;
        Ok(())
    }
}

impl Transport for NullTransport {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capabilities(&self) -> Capabilities {
        let (preferred, max) = self.slice_bytes;
        Capabilities::new(Features::READ | Features::WRITE)
            .with_slice_bytes(preferred, max)
            .with_inflight_max(self.accepted.len() as u32)
            .with_export_bytes_max(1)
    }

    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        Ok(batch.iter().take_while(|slice| self.push(slice.token)).count())
    }

    fn poll(&mut self, _: Instant, out: &mut [Completion]) -> usize {
        let ended = core::iter::from_fn(|| self.pop());
        out.iter_mut().zip(ended).map(|(out, token)| *out = Completion::applied(token)).count()
    }

    fn poll_at(&self) -> Option<Instant> {
        None
    }

    fn cancel(&mut self, token: Token) -> Result<(), Error> {
        // A slice in flight ends `Applied` at the next poll, which is an end that L3 allows.
        let mask = self.accepted.len() - 1;
        let mut in_flight = (0..self.len).map(|nth| self.accepted[(self.first + nth) & mask]);
        if in_flight.any(|held| held == token) { Ok(()) } else { Err(Error::new(ErrorKind::NotFound)) }
    }

    fn fence(&mut self, token: Token, _: RemoteRegionId) -> Result<(), Error> {
        if self.push(token) { Ok(()) } else { Err(Error::new(ErrorKind::Full)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Op, RegionOffset, RemoteOffset};
    use alloc::vec::Vec;

    fn slice(token: u64) -> Slice {
        Slice {
            token: Token(token),
            local: RegionOffset::new(RegionId::new(0, 1), 0),
            remote: RemoteOffset::new(RemoteRegionId::new(0, 1), 0),
            len: 1,
            op: Op::Write,
        }
    }

    fn poll(transport: &mut NullTransport, room: usize) -> Vec<u64> {
        let mut out = vec![Completion::applied(Token(0)); room];
        let count = transport.poll(Instant::ZERO, &mut out);
        out[..count].iter().map(|end| end.token.0).collect()
    }

    #[test]
    fn slices_and_fences_complete_in_order_at_the_next_poll() {
        let mut transport = NullTransport::new(3).named("a").with_slice_bytes(4096, 8192);
        assert_eq!(transport.name(), "a");
        let capabilities = transport.capabilities();
        assert_eq!((capabilities.slice_bytes_preferred, capabilities.slice_bytes_max), (4096, 8192));
        assert_eq!(capabilities.inflight_max, 4);

        let slices: Vec<Slice> = (0..5).map(slice).collect();
        assert_eq!(transport.submit(&slices), Ok(4), "a fifth finds no room");
        assert_eq!(transport.fence(Token(9), RemoteRegionId::new(0, 1)), Err(ErrorKind::Full.into()));
        assert_eq!(transport.cancel(Token(3)), Ok(()));
        assert_eq!(transport.cancel(Token(4)), Err(ErrorKind::NotFound.into()));
        assert_eq!(poll(&mut transport, 3), [0, 1, 2]);
        assert_eq!(transport.fence(Token(9), RemoteRegionId::new(0, 1)), Ok(()));
        assert_eq!(poll(&mut transport, 8), [3, 9]);
        assert!(poll(&mut transport, 8).is_empty());
    }

    #[test]
    fn exports_are_attached_and_counted() {
        let mut transport = NullTransport::new(1);
        let mut export = [0; 4];
        assert_eq!(transport.export(RegionId::new(0, 1), &mut export), Ok(1));
        let id = RemoteRegionId::new(0, 1);
        assert_eq!(transport.attach(id, &[]), Err(ErrorKind::InvalidArgument.into()));
        assert_eq!(transport.attach(id, &export[..1]), Ok(()));
        assert_eq!(transport.attached(), 1);
        assert_eq!(transport.detach(id), Ok(()));
        assert_eq!(transport.detach(id), Err(ErrorKind::NotFound.into()));
    }
}

//! The retry queue of `MultiTransport`: a slice that lost its rail always ends.

use std::collections::VecDeque;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, Features, HealthConfig, HealthRoute, Instant,
    MemSpan, Memory, MultiTransport, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Slice, Token,
    Transport,
};

const REGION: RegionId = RegionId::new(0, 1);
const REMOTE_REGION: RemoteRegionId = RemoteRegionId::new(0, 1);

/// How a rail treats slices.
#[derive(Clone, Copy)]
enum Rail {
    /// Accepts slices and fails them.
    Fails,
    /// Accepts none.
    Full,
    /// Refuses them.
    Refuses,
}

struct Stub {
    rail: Rail,
    taken: VecDeque<Token>,
}

// A stub never touches memory.
impl Memory for Stub {
    unsafe fn register(&mut self, _: RegionId, _: MemSpan, _: Access) -> Result<(), Error> {
        Ok(())
    }
    fn deregister(&mut self, _: RegionId) -> Result<(), Error> {
        Ok(())
    }
    fn export(&self, _: RegionId, _: &mut [u8]) -> Result<usize, Error> {
        Ok(0)
    }
    fn attach(&mut self, _: RemoteRegionId, _: &[u8]) -> Result<(), Error> {
        Ok(())
    }
    fn detach(&mut self, _: RemoteRegionId) -> Result<(), Error> {
        Ok(())
    }
}

impl Transport for Stub {
    fn name(&self) -> &'static str {
        "stub"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities::new(Features::READ | Features::WRITE)
            .with_slice_bytes(1 << 16, 1 << 20)
            .with_inflight_max(16)
    }
    fn submit(&mut self, batch: &[Slice]) -> Result<usize, Error> {
        match self.rail {
            Rail::Fails => {
                self.taken.extend(batch.iter().map(|slice| slice.token));
                Ok(batch.len())
            }
            Rail::Full => Ok(0),
            Rail::Refuses => Err(Error::new(ErrorKind::System)),
        }
    }
    fn poll(&mut self, _: Instant, out: &mut [Completion]) -> usize {
        let count = out.len().min(self.taken.len());
        for (room, token) in out.iter_mut().zip(self.taken.drain(..count)) {
            *room = Completion::not_applied(token, Error::new(ErrorKind::Rail));
        }
        count
    }
    fn poll_at(&self) -> Option<Instant> {
        None
    }
    fn cancel(&mut self, _: Token) -> Result<(), Error> {
        Err(Error::new(ErrorKind::NotFound))
    }
    fn fence(&mut self, _: Token, _: RemoteRegionId) -> Result<(), Error> {
        Ok(())
    }
}

/// A slice on a rail that fails it, beside a rail that does `other`.
fn one_slice(other: Rail) -> MultiTransport<Stub, HealthRoute> {
    let rails = [Rail::Fails, other].map(|rail| Stub { rail, taken: VecDeque::new() });
    // The first rail is nearer.
    let route = HealthRoute::new(&[100, 1000], HealthConfig::default());
    let mut multi = MultiTransport::new(rails, route, 16).expect("two rails");
    let mut byte = [0u8];
    // SAFETY: stubs touch no memory.
    unsafe {
        multi.register(REGION, MemSpan::new(byte.as_mut_ptr(), 1), Access::LOCAL | Access::REMOTE_READ)
    }
    .expect("registered");
    let mut blob = [0; 64];
    let len = multi.export(REGION, &mut blob).expect("exported");
    multi.attach(REMOTE_REGION, &blob[..len]).expect("attached");
    let slice = Slice {
        token: Token(7),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len: 1,
        op: Op::Read,
    };
    assert_eq!(multi.submit(&[slice]), Ok(1));
    multi
}

#[test]
fn a_slice_that_waits_for_a_full_rail_ends_at_once_when_cancelled() {
    let mut multi = one_slice(Rail::Full);
    let mut out = [Completion::applied(Token(0)); 4];
    assert_eq!(multi.poll(Instant::from_nanos(1), &mut out), 0, "it waits for the other rail");
    multi.cancel(Token(7)).expect("in flight");
    assert_eq!(
        multi.poll_at(),
        Some(Instant::from_nanos(1)),
        "nothing else would wake a parked polling thread"
    );
    assert_eq!(multi.poll(Instant::from_nanos(2), &mut out), 1);
    assert_eq!(out[0], Completion::not_applied(Token(7), Error::new(ErrorKind::Canceled)));
    assert_eq!(multi.poll_at(), None);
}

#[test]
fn a_slice_that_every_rail_has_failed_twice_ends_in_the_same_poll() {
    let mut multi = one_slice(Rail::Refuses);
    let mut out = [Completion::applied(Token(0)); 4];
    assert_eq!(multi.poll(Instant::from_nanos(1), &mut out), 0, "all rails are tried once more");
    assert_eq!(multi.poll(Instant::from_nanos(2), &mut out), 1);
    assert_eq!(out[0], Completion::not_applied(Token(7), Error::new(ErrorKind::System)));
}

#[test]
fn an_end_that_finds_no_room_is_due_at_once() {
    let mut multi = one_slice(Rail::Full);
    let mut out = [Completion::applied(Token(0)); 4];
    assert_eq!(multi.poll(Instant::from_nanos(1), &mut out), 0);
    multi.cancel_where(|token| token == Token(7)).expect("no rail minds");
    assert_eq!(multi.poll(Instant::from_nanos(2), &mut []), 0);
    assert_eq!(multi.poll_at(), Some(Instant::from_nanos(2)));
    assert_eq!(multi.poll(Instant::from_nanos(3), &mut out), 1);
}

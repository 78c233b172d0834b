//! The retry queue of `MultiTransport`: a slice that lost its rail always ends.

use std::collections::VecDeque;

use te_core::{
    Access, Capabilities, Completion, Error, ErrorKind, Features, HealthConfig, HealthRoute, Instant,
    MemSpan, Memory, MultiTransport, Op, RegionId, RegionOffset, RemoteOffset, RemoteRegionId, Route, Slice,
    Token, Transport,
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
    /// Slices that it accepted.
    seen: usize,
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
                self.seen += batch.len();
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

/// A rail that fails slices, beside one that does `other`, with a region at both ends.
fn two_rails<R: Route>(other: Rail, route: R) -> MultiTransport<Stub, R> {
    let rails = [Rail::Fails, other].map(|rail| Stub { rail, taken: VecDeque::new(), seen: 0 });
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
    multi
}

fn slice(token: u64) -> Slice {
    Slice {
        token: Token(token),
        local: RegionOffset::new(REGION, 0),
        remote: RemoteOffset::new(REMOTE_REGION, 0),
        len: 1,
        op: Op::Read,
    }
}

/// A slice on a rail that fails it, beside a rail that does `other`.
fn one_slice(other: Rail) -> MultiTransport<Stub, HealthRoute> {
    // The first rail is nearer.
    let mut multi = two_rails(other, HealthRoute::new(&[100, 1000], HealthConfig::default()));
    assert_eq!(multi.submit(&[slice(7)]), Ok(1));
    multi
}

/// Slices with an odd token may use the first rail only.
struct OddFirst(HealthRoute);

impl Route for OddFirst {
    fn route(&mut self, slice: &Slice, reachable: u32) -> Option<usize> {
        self.0.route(slice, reachable)
    }
    fn permitted(&self, slice: &Slice) -> u32 {
        if slice.token.0 % 2 == 1 { 0b01 } else { u32::MAX }
    }
    fn accepted(&mut self, rail: usize, slice: &Slice) {
        self.0.accepted(rail, slice);
    }
    fn returned(&mut self, rail: usize, slice: &Slice) {
        self.0.returned(rail, slice);
    }
    fn completed(&mut self, rail: usize, slice: &Slice, end: &Completion, nanos: u64, bytes_ahead: u64) {
        self.0.completed(rail, slice, end, nanos, bytes_ahead);
    }
    fn tick(&mut self, now: Instant) {
        self.0.tick(now);
    }
    fn bytes_in_flight(&self, rail: usize) -> u64 {
        self.0.bytes_in_flight(rail)
    }
}

#[test]
fn a_slice_stays_on_the_rails_that_it_may_use_whatever_they_do() {
    // The second rail is nearer, and slices of one call mostly follow each other on one rail.
    let mut config = HealthConfig::default();
    // No rail is paused.
    config.errors_max = 1000;
    let route = OddFirst(HealthRoute::new(&[1000, 100], config));
    let mut multi = two_rails(Rail::Fails, route);
    assert_eq!(multi.submit(&[2, 4, 7].map(slice)), Ok(3));
    assert_eq!((multi.rails()[0].seen, multi.rails()[1].seen), (1, 2));
    let mut out = [Completion::applied(Token(0)); 4];
    let mut ended = Vec::new();
    for nanos in 1..10 {
        let count = multi.poll(Instant::from_nanos(nanos), &mut out);
        ended.extend(out[..count].iter().map(|end| end.token.0));
    }
    ended.sort_unstable();
    assert_eq!(ended, [2, 4, 7], "each of them ends");
    let tries = multi.rails().iter().map(|rail| rail.seen).sum::<usize>();
    // Each of the others was tried twice on either rail; the odd one on the first rail alone.
    assert_eq!((tries, multi.rails()[1].seen), (9, 4));

    // With no rail that it may use, a slice is refused.
    multi.rails_mut()[0].rail = Rail::Refuses;
    assert_eq!(multi.submit(&[slice(9)]), Err(Error::new(ErrorKind::System)));
    assert_eq!(multi.rails_between(REGION, REMOTE_REGION), 0b11);
    assert_eq!(multi.rails_between(RegionId::new(5, 1), REMOTE_REGION), 0);
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

//! Slices from `accept` to their completion, without a device.

use super::*;
use crate::memory::testing::memory;
use crate::wire::{Chunking, EXPORT_FORMAT};
use te_core::{Access, Outcome, RegionId, RegionOffset, RemoteOffset};

const REGION: RegionId = RegionId::new(1, 1);
const REMOTE: RemoteRegionId = RemoteRegionId::new(2, 1);
const PEER: u32 = 3;
const LATER: Instant = Instant::from_millis(20);

struct Bench {
    slices: Slices,
    memory: LocalMemory,
    timers: Timers,
}

impl Bench {
    /// One attached remote region of 64 KiB. `known`: with its keys.
    fn new(known: bool) -> Self {
        let config = Config {
            inflight_max: 4,
            fences_max: 1,
            replays_max: 1,
            remote_regions_max: 8,
            ..Config::default()
        };
        let export = Export {
            format: EXPORT_FORMAT,
            rights: Access::all().bits(),
            addresses: [[127, 0, 0, 1].into(); 4],
            address_count: 1,
            port: 1,
            incarnation: 7,
            region: 0,
            generation: 1,
            key: 99,
            len: 1 << 16,
            location: te_core::Location::Host,
        };
        let mut slices = Slices::new(&config);
        slices.attach(REMOTE, PEER, &export, &config).expect("an empty table");
        let mut bench = Self { slices, memory: memory(REGION, 1 << 16), timers: Timers::new() };
        if known {
            bench.learn_keys();
        }
        bench
    }

    fn learn_keys(&mut self) {
        let remote = self.slices.remote_regions_mut().get_mut(REMOTE.index).expect("attached");
        remote.ext.chunking = Chunking::new(0x10_0000, 1 << 16, 1 << 12);
        remote.ext.remote_keys = (0..16).collect();
        remote.ext.keys = Keys::Known;
        self.slices.keys_known(REMOTE.index, &mut self.timers);
    }

    fn submit(&mut self, token: u64, at: u64, len: u32) -> Result<(), Error> {
        let (local, remote) = (RegionOffset::new(REGION, at), RemoteOffset::new(REMOTE, at));
        let slice = Slice { token: Token(token), local, remote, len, op: Op::Write };
        self.slices.accept(&slice, 1 << 20, &mut self.memory, &mut self.timers)
    }

    /// Issues all pieces of the first pending slice.
    fn issue(&mut self) -> Vec<Piece> {
        let slot = self.slices.first_pending(PEER).expect("something is pending");
        let mut pieces = Vec::new();
        while self.slices.first_pending(PEER) == Some(slot) {
            let cut = self.slices.cut(slot, &self.memory, 1 << 20).expect("it can be cut");
            self.slices.issue(PEER, slot, cut.sge.len);
            pieces.push(Piece { slot, sequence: 0, bytes: cut.sge.len });
        }
        pieces
    }

    fn done(&mut self, piece: Piece) {
        self.slices.piece_done(piece, &mut self.memory, &mut self.timers);
    }

    /// The piece was flushed because of another slice's failure.
    fn flushed(&mut self, piece: Piece) {
        self.slices.piece_failed(piece, (None, true), &mut self.memory, &mut self.timers);
    }

    fn ended(&mut self) -> Option<Completion> {
        let mut out = [Completion::applied(Token(0)); 1];
        (self.slices.operations_mut().fetch(&mut out) == 1).then_some(out[0])
    }

    fn pins(&self) -> u32 {
        self.memory.get(REGION.index).expect("registered").pins
    }
}

#[test]
fn a_slice_is_cut_where_chunks_end_and_ends_with_its_last_piece() {
    let mut bench = Bench::new(true);
    bench.submit(1, 4_000, 5_000).expect("room");
    assert_eq!(bench.slices.listed(), [PEER]);
    let pieces = bench.issue();
    assert_eq!(pieces.iter().map(|piece| piece.bytes).collect::<Vec<_>>(), [96, 4_096, 808]);
    for piece in pieces {
        assert_eq!((bench.ended(), bench.pins()), (None, 1));
        bench.done(piece);
    }
    assert_eq!((bench.ended(), bench.pins()), (Some(Completion::applied(Token(1))), 0));
    bench.slices.unlist_idle();
    assert!(bench.slices.listed().is_empty() && bench.slices.operations().is_empty());
}

#[test]
fn the_keys_of_a_remote_region_are_requested_once() {
    let mut bench = Bench::new(false);
    bench.submit(1, 0, 10).expect("room");
    bench.submit(2, 10, 10).expect("room");
    assert_eq!(bench.slices.work(PEER).map(|work| work.wanting.clone()), Some(vec![REMOTE.index]));
    assert_eq!(bench.slices.first_pending(PEER), None);
    bench.learn_keys();
    assert!(bench.slices.first_pending(PEER).is_some());
}

#[test]
fn a_flushed_slice_is_sent_again_as_often_as_allowed_and_then_needs_a_fence() {
    let mut bench = Bench::new(true);
    bench.submit(1, 0, 100).expect("room");
    let piece = bench.issue()[0];
    bench.flushed(piece);
    assert_eq!((bench.ended(), bench.slices.replays()), (None, 1));
    let piece = bench.issue()[0];
    bench.done(piece);
    let end = bench.ended().expect("it has ended");
    assert!(end.result.is_ok() && end.fence_needed);

    bench.submit(2, 0, 100).expect("room");
    for _ in 0..2 {
        let piece = bench.issue()[0];
        bench.flushed(piece);
    }
    let end = bench.ended().expect("it was sent again once");
    assert_eq!(
        (end.result.map_err(|error| error.kind), end.outcome),
        (Err(ErrorKind::Rail), Outcome::Unknown)
    );
}

#[test]
fn a_cancelled_slice_ends_at_once_or_with_its_posted_pieces() {
    let mut bench = Bench::new(true);
    bench.submit(1, 0, 100).expect("room");
    bench.submit(2, 0, 100).expect("room");
    let piece = bench.issue()[0];
    let cancel = |bench: &mut Bench, token| bench.slices.cancel(Token(token), LATER, &mut bench.memory);
    assert_eq!(cancel(&mut bench, 2), Canceled::Done);
    assert_eq!(bench.ended().map(|end| end.outcome), Some(Outcome::NotApplied));
    assert_eq!(cancel(&mut bench, 1), Canceled::Drains(LATER));
    assert_eq!((cancel(&mut bench, 1), bench.slices.draining().len()), (Canceled::Done, 1));
    assert_eq!(cancel(&mut bench, 9), Canceled::Unknown);
    bench.flushed(piece);
    let end = bench.ended().expect("none of its pieces is posted");
    assert_eq!(
        (end.result.map_err(|error| error.kind), end.outcome),
        (Err(ErrorKind::Canceled), Outcome::Unknown)
    );
    assert!(bench.slices.draining().is_empty());
}

#[test]
fn a_slice_that_was_not_posted_waits_at_the_front() {
    let mut bench = Bench::new(true);
    bench.submit(1, 0, 100).expect("room");
    bench.submit(2, 0, 100).expect("room");
    let first = bench.slices.first_pending(PEER);
    let piece = bench.issue()[0];
    assert_ne!(bench.slices.first_pending(PEER), first);
    bench.slices.unissue(PEER, piece);
    assert_eq!(bench.slices.first_pending(PEER), first);
}

#[test]
fn slices_that_wait_for_a_lost_peer_end_and_so_do_its_fences() {
    for (harmless, outcome) in [(true, Outcome::Applied), (false, Outcome::Unknown)] {
        let mut bench = Bench::new(false);
        bench.submit(1, 0, 100).expect("room");
        assert_eq!(bench.slices.fence(Token(5), REMOTE, &mut bench.timers), Ok(()));
        let second = bench.slices.fence(Token(6), REMOTE, &mut bench.timers);
        assert_eq!(second.map_err(|error| error.kind), Err(ErrorKind::Full));
        let error = ErrorKind::PeerDead.into();
        bench.slices.fail_waiting(PEER, error, &mut bench.memory);
        assert_eq!(bench.ended().map(|end| (end.token, end.outcome)), Some((Token(1), Outcome::NotApplied)));
        bench.slices.end_fences(PEER, harmless, error);
        assert_eq!(bench.ended().map(|end| (end.token, end.outcome)), Some((Token(5), outcome)));
        assert_eq!(bench.slices.detach(REMOTE), Ok(PEER));
        assert!(bench.slices.work(PEER).is_some_and(Work::is_idle));
    }
}

//! Puts that stay open, and gets of objects that were looked up before, driven by hand.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::chunks::{CHUNK_BYTES, trailer_len};
use store_core::client::{
    Action, ClientConfig, CloseItem, FenceEnd, GetItem, GetOp, OpenPut, PutEnding, PutItem, PutOp, RangeItem,
    Transfer, TransferEnd,
};
use store_core::message::{
    Allocation, Commit, Object, Operation, PutEnd, PutRequest, PutRevoke, PutStart, PutWindow, Replica,
    Replicas, Revocation,
};
use store_core::{ErrorCode, Frame, Kind, SegmentNo, bound};
use te_core::{Instant, Op};

const ADDR: u64 = 4096;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn replicas(segments: &[u32]) -> Replicas {
    let mut replicas = Replicas::new();
    for segment in segments {
        replicas.push(Replica { segment: SegmentNo::new(*segment), addr: ADDR }).unwrap();
    }
    replicas
}

/// Opens puts of these lengths, with a window of 100 ms from 0; their generations are 100, 101, ….
fn opened(op: &mut PutOp, lens: &[u64], segments: &[u32]) -> Vec<OpenPut> {
    op.open(lens.iter().map(|len| PutItem { key: b"key", len: *len, checksum: 0 }), PutRequest::default());
    let mut out = Vec::new();
    assert_eq!(op.poll(at(0), 1, &mut out), Some(Action::Call));
    let (frame, _) = Frame::parse(&out).unwrap().unwrap();
    let (_, items) = PutStart::decode_request(frame.body).unwrap();
    assert_eq!(items.map(|item| item.len).collect::<Vec<_>>(), lens);
    let answers = (0..lens.len()).map(|item| {
        Ok(Allocation { generation: 100 + item as u64, handle: 7, replicas: replicas(segments) })
    });
    let mut answer = Vec::new();
    PutStart::encode_response(&mut answer, 1, &PutWindow { window_ms: 100 }, answers).unwrap();
    op.handle_response(at(1), &Frame::parse(&answer).unwrap().unwrap().0);
    assert_eq!(op.poll(at(1), 2, &mut Vec::new()), None, "nothing is written yet");
    assert!(op.is_done());
    (0..lens.len()).map(|item| op.opened(item).unwrap()).collect()
}

fn op() -> PutOp {
    PutOp::new(ClientConfig::default())
}

fn transfers(op: &mut PutOp, now: Instant) -> Vec<Transfer> {
    let mut transfers = Vec::new();
    while let Some(action) = op.poll(now, 9, &mut Vec::new()) {
        let Action::Transfer(transfer) = action else { panic!("{action:?}") };
        transfers.push(transfer);
    }
    transfers
}

/// Generation and checksum of each commit.
type Commits = Vec<(u64, u32)>;
/// Generation of each revocation, and whether it is quiet.
type Revocations = Vec<(u64, bool)>;

/// Takes the requests that end puts and answers them.
fn ended(op: &mut PutOp, now: Instant) -> (Commits, Revocations) {
    let (mut commits, mut revocations) = (Vec::new(), Vec::new());
    for id in 50.. {
        let mut out = Vec::new();
        match op.poll(now, id, &mut out) {
            Some(Action::Call) => {}
            None => break,
            other => panic!("{other:?}"),
        }
        let (frame, _) = Frame::parse(&out).unwrap().unwrap();
        let mut answer = Vec::new();
        if frame.header.kind == Kind::PutEnd as u8 {
            let (_, items) = PutEnd::decode_request(frame.body).unwrap();
            commits.extend(items.map(|Commit { generation, checksum, .. }| (generation, checksum)));
            PutEnd::encode_response(&mut answer, id, &(), items.map(|_| Ok(()))).unwrap();
        } else {
            let (_, items) = PutRevoke::decode_request(frame.body).unwrap();
            revocations.extend(items.map(|Revocation { generation, quiet, .. }| (generation, quiet)));
            PutRevoke::encode_response(&mut answer, id, &(), items.map(|_| Ok(()))).unwrap();
        }
        op.handle_response(now, &Frame::parse(&answer).unwrap().unwrap().0);
    }
    (commits, revocations)
}

fn commit(put: OpenPut, checksum: u32) -> CloseItem<'static> {
    CloseItem { key: b"key", put, ending: PutEnding::Commit { checksum } }
}

fn revoke(put: OpenPut) -> CloseItem<'static> {
    CloseItem { key: b"key", put, ending: PutEnding::Revoke }
}

#[test]
fn a_put_is_written_in_ranges_of_any_order_and_committed_with_its_trailer() {
    let mut op = op();
    let len = 2 * CHUNK_BYTES;
    let mut put = opened(&mut op, &[len], &[1, 2])[0];
    assert_eq!((put.len(), put.generation(), put.until()), (len, 100, at(100)));
    for (offset, bytes) in [(CHUNK_BYTES, CHUNK_BYTES), (0, CHUNK_BYTES)] {
        op.write([RangeItem { put, offset, len: bytes }]);
        let writes = transfers(&mut op, at(2));
        let places: Vec<_> =
            writes.iter().map(|write| (write.op, write.segment.get(), write.addr, write.len)).collect();
        assert_eq!(
            places,
            [(Op::Write, 1, ADDR + offset, bytes), (Op::Write, 2, ADDR + offset, bytes)],
            "exactly the range, in every replica"
        );
        for write in &writes {
            assert!(!op.is_done());
            op.handle_transfer(write.id, TransferEnd::written());
        }
        assert_eq!((op.is_done(), op.result(0)), (true, Some(Ok(100))));
        op.note_writes(0, &mut put);
        assert!(!put.has_failed());
    }
    op.close([commit(put, 9)]);
    let writes = transfers(&mut op, at(3));
    let places: Vec<_> = writes.iter().map(|write| (write.segment.get(), write.addr, write.len)).collect();
    assert_eq!(places, [(1, ADDR + len, trailer_len(len)), (2, ADDR + len, trailer_len(len))]);
    writes.iter().for_each(|write| op.handle_transfer(write.id, TransferEnd::written()));
    assert_eq!(ended(&mut op, at(4)), (vec![(100, bound(9, b"key", 100))], vec![]));
    assert_eq!((op.is_done(), op.result(0)), (true, Some(Ok(100))));
}

#[test]
fn puts_of_one_batch_end_apart_and_one_without_a_trailer_at_once() {
    let mut op = op();
    let puts = opened(&mut op, &[10, 20, 30], &[1]);
    op.write(puts.iter().map(|put| RangeItem { put: *put, offset: 0, len: put.len() }));
    transfers(&mut op, at(2)).iter().for_each(|write| op.handle_transfer(write.id, TransferEnd::written()));
    op.close([commit(puts[1], 5), revoke(puts[2])]);
    assert_eq!(ended(&mut op, at(3)), (vec![(101, bound(5, b"key", 101))], vec![(102, true)]));
    assert_eq!((op.result(0), op.result(1)), (Some(Ok(101)), Some(Ok(102))), "both ended as they should");
    op.close([revoke(puts[0])]);
    assert_eq!(ended(&mut op, at(4)), (vec![], vec![(100, true)]));
    op.write([]);
    assert!(op.is_done());
    op.close([]);
    assert!(op.is_done());
}

#[test]
fn after_a_write_that_failed_a_put_can_only_be_revoked_and_not_before_what_may_land_is_fenced() {
    for (end, held, quiet) in [
        (TransferEnd::not_applied(), false, true),
        (TransferEnd::unknown(), true, true),
        (TransferEnd::unknown(), false, false),
    ] {
        let mut op = op();
        let mut puts = opened(&mut op, &[64, 64], &[1, 2]);
        op.write(puts.iter().map(|put| RangeItem { put: *put, offset: 0, len: 32 }));
        for (count, write) in transfers(&mut op, at(2)).iter().enumerate() {
            op.handle_transfer(write.id, if count == 1 { end } else { TransferEnd::written() });
        }
        assert_eq!((op.result(0), op.result(1)), (Some(Err(ErrorCode::TransferFail)), Some(Ok(101))));
        for (item, put) in puts.iter_mut().enumerate() {
            op.note_writes(item, put);
        }
        assert_eq!((puts[0].has_failed(), puts[1].has_failed()), (true, false));
        // Even if it is to be committed.
        op.close([commit(puts[0], 9), revoke(puts[1])]);
        if end == TransferEnd::unknown() {
            let fence = Action::Fence { segment: SegmentNo::new(2) };
            assert_eq!(op.poll(at(3), 7, &mut Vec::new()), Some(fence));
            assert_eq!(op.poll(at(3), 7, &mut Vec::new()), None);
            op.handle_fence(SegmentNo::new(2), FenceEnd::of(held));
        }
        assert_eq!(ended(&mut op, at(3)), (vec![], vec![(100, quiet), (101, true)]), "{end:?} {held}");
        assert_eq!((op.result(0), op.result(1)), (Some(Err(ErrorCode::TransferFail)), Some(Ok(101))));
    }
}

#[test]
fn a_trailer_that_cannot_be_written_revokes_the_put() {
    let mut op = op();
    let put = opened(&mut op, &[CHUNK_BYTES + 1], &[1])[0];
    op.close([commit(put, 9)]);
    let writes = transfers(&mut op, at(3));
    op.handle_transfer(writes[0].id, TransferEnd::not_applied());
    assert_eq!(ended(&mut op, at(3)), (vec![], vec![(100, true)]));
    assert_eq!(op.result(0), Some(Err(ErrorCode::TransferFail)), "no other place is requested");
}

#[test]
fn nothing_is_written_after_the_window_and_what_is_under_way_is_cancelled() {
    let mut op = op();
    let late = opened(&mut op, &[CHUNK_BYTES + 1], &[1, 2])[0];
    op.write([RangeItem { put: late, offset: 0, len: 8 }]);
    assert_eq!((transfers(&mut op, at(100)).len(), op.result(0)), (0, Some(Err(ErrorCode::TransferFail))));

    op.write([RangeItem { put: late, offset: 0, len: 8 }]);
    let writes = transfers(&mut op, at(99));
    op.handle_transfer(writes[0].id, TransferEnd::written());
    assert_eq!(op.poll_timeout(), Some(at(100)));
    op.handle_timeout(at(99));
    assert_eq!(op.poll(at(99), 7, &mut Vec::new()), None, "not yet");
    op.handle_timeout(at(100));
    assert_eq!(op.poll(at(100), 7, &mut Vec::new()), Some(Action::Cancel { transfer: writes[1].id }));
    assert!(!op.is_done(), "its end is still to come");
    op.handle_transfer(writes[1].id, TransferEnd::written());
    assert_eq!((op.is_done(), op.result(0)), (true, Some(Err(ErrorCode::TransferFail))));

    // A trailer is not written either; the put is revoked.
    op.close([commit(late, 9)]);
    assert_eq!(ended(&mut op, at(100)), (vec![], vec![(100, true)]));
    // Without a trailer, the master decides.
    let short = opened(&mut op, &[8], &[1])[0];
    op.close([commit(short, 9)]);
    assert_eq!(ended(&mut op, at(200)).0.len(), 1);
}

#[test]
fn a_put_that_is_aborted_while_it_is_opened_or_written_leaves_no_write_behind() {
    let mut op = op();
    op.open([PutItem { key: b"key", len: 8, checksum: 0 }], PutRequest::default());
    assert_eq!(op.poll(at(0), 1, &mut Vec::new()), Some(Action::Call));
    op.abort(ErrorCode::RpcTimeout);
    let allocation = Ok(Allocation { generation: 1, handle: 7, replicas: replicas(&[1]) });
    let mut answer = Vec::new();
    PutStart::encode_response(&mut answer, 1, &PutWindow { window_ms: 100 }, [allocation].into_iter())
        .unwrap();
    op.handle_response(at(1), &Frame::parse(&answer).unwrap().unwrap().0);
    assert_eq!(ended(&mut op, at(1)), (vec![], vec![(1, true)]));
    assert_eq!((op.opened(0).is_none(), op.result(0)), (true, Some(Err(ErrorCode::RpcTimeout))));

    let put = opened(&mut op, &[64], &[1])[0];
    op.write([RangeItem { put, offset: 0, len: 8 }]);
    let writes = transfers(&mut op, at(2));
    op.abort(ErrorCode::TransferFail);
    assert_eq!(op.poll(at(2), 7, &mut Vec::new()), Some(Action::Cancel { transfer: writes[0].id }));
    assert!(!op.is_done());
    op.handle_transfer(writes[0].id, TransferEnd::not_applied());
    assert_eq!((op.is_done(), op.result(0)), (true, Some(Err(ErrorCode::TransferFail))));
}

#[test]
fn a_revocation_that_gets_no_answer_or_comes_too_late_is_an_error() {
    let mut op = op();
    let put = opened(&mut op, &[8], &[1])[0];
    op.close([revoke(put)]);
    for id in 10..13 {
        assert_eq!(op.poll(at(2), id, &mut Vec::new()), Some(Action::Call));
        op.handle_call_failed(id, ErrorCode::RpcTimeout);
    }
    assert_eq!((op.is_done(), op.result(0)), (true, Some(Err(ErrorCode::RpcFail))));
    for (result, expected) in [
        (Ok(()), Ok(100)),
        (Err(ErrorCode::PutIsOver), Ok(100)),
        (Err(ErrorCode::InvalidWrite), Err(ErrorCode::InvalidWrite)),
    ] {
        op.close([revoke(put)]);
        assert_eq!(op.poll(at(2), 20, &mut Vec::new()), Some(Action::Call));
        let mut answer = Vec::new();
        PutRevoke::encode_response(&mut answer, 20, &(), [result].into_iter()).unwrap();
        op.handle_response(at(2), &Frame::parse(&answer).unwrap().unwrap().0);
        assert_eq!(op.result(0), Some(expected), "{result:?}");
    }
}

#[test]
fn an_object_that_was_looked_up_is_read_without_a_request_under_its_lease() {
    let object =
        Object { len: 4096, checksum: bound(7, b"key", 3), generation: 3, replicas: replicas(&[1, 2]) };
    let item = GetItem { key: b"key", capacity: 8192, len_min: 1 };
    let mut get = GetOp::new(ClientConfig::default());
    let short = GetItem { capacity: 9, ..item };
    get.start_leased(
        &[(item, Ok(object)), (item, Err(ErrorCode::ObjectNotFound)), (short, Ok(object))],
        at(50),
        &[],
    );
    let Some(Action::Transfer(read)) = get.poll(at(1), 5, &mut Vec::new()) else { panic!("no read") };
    assert_eq!((read.op, read.len, get.poll(at(1), 5, &mut Vec::new())), (Op::Read, 4096, None));
    assert_eq!(get.poll_timeout(), Some(at(50)));
    get.handle_transfer(at(2), read.id, TransferEnd::read(7));
    assert!(get.is_done());
    assert_eq!(get.result(0).unwrap().unwrap().generation, 3);
    assert_eq!(
        (get.result(1), get.result(2)),
        (Some(Err(ErrorCode::ObjectNotFound)), Some(Err(ErrorCode::BufferOverflow)))
    );
    assert_eq!(get.leases(), None, "the leases are not the operation's");

    // Another replica is tried, and nothing counts after the lease.
    get.start_leased(&[(item, Ok(object))], at(50), &[]);
    let Some(Action::Transfer(read)) = get.poll(at(1), 5, &mut Vec::new()) else { panic!("no read") };
    get.handle_transfer(at(2), read.id, TransferEnd::not_applied());
    let Some(Action::Transfer(other)) = get.poll(at(3), 5, &mut Vec::new()) else { panic!("no read") };
    assert_ne!(read.segment, other.segment);
    get.handle_transfer(at(50), other.id, TransferEnd::read(7));
    assert_eq!(get.result(0), Some(Err(ErrorCode::LeaseExpired)));
    get.start_leased(&[(item, Ok(object))], at(50), &[]);
    assert_eq!(get.poll(at(50), 5, &mut Vec::new()), None);
    assert_eq!(get.result(0), Some(Err(ErrorCode::LeaseExpired)));
}

//! The client's state machines, driven by hand.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::client::{
    Action, ClientConfig, FenceEnd, GetItem, GetOp, PutItem, PutOp, Transfer, TransferEnd,
};
use store_core::message::{
    Allocation, Commit, Get, Lease, Object, Operation, PutEnd, PutRequest, PutRevoke, PutStart, PutWindow,
    Replica, Replicas, Revocation,
};
use store_core::{ErrorCode, Frame, Kind, SegmentNo, bound, unbound};
use te_core::{Instant, Op};

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn replicas(segments: &[u32]) -> Replicas {
    let mut replicas = Replicas::new();
    segments
        .iter()
        .for_each(|segment| replicas.push(Replica { segment: SegmentNo::new(*segment), addr: 64 }).unwrap());
    replicas
}

fn object(segments: &[u32]) -> Object {
    Object { len: 4096, checksum: bound(7, b"key", 0), generation: 0, replicas: replicas(segments) }
}

/// A get of the given objects whose response came at 1 ms, under a lease of 100 ms.
fn get_answered(objects: &[Result<Object, ErrorCode>]) -> (GetOp, Vec<Transfer>) {
    let mut get = GetOp::new(ClientConfig::default());
    get.start(objects.iter().map(|_| GetItem { key: b"key", capacity: 8192, len_min: 1 }), &[]);
    let mut out = Vec::new();
    assert_eq!(get.poll(at(0), 5, &mut out), Some(Action::Call));
    let (frame, _) = Frame::parse(&out).unwrap().unwrap();
    assert_eq!(Get::decode_request(frame.body).unwrap().1.len(), objects.len());
    let mut answer = Vec::new();
    Get::encode_response(&mut answer, 5, &Lease { lease_ms: 100, first: 1 }, objects.iter().copied())
        .unwrap();
    get.handle_response(&Frame::parse(&answer).unwrap().unwrap().0);
    let transfers = transfers(|| get.poll(at(1), 6, &mut Vec::new()));
    (get, transfers)
}

fn transfers(mut poll: impl FnMut() -> Option<Action>) -> Vec<Transfer> {
    let mut transfers = Vec::new();
    while let Some(action) = poll() {
        match action {
            Action::Transfer(transfer) => transfers.push(transfer),
            other => panic!("{other:?}"),
        }
    }
    transfers
}

/// A put of `items` objects with the given replicas whose response came at `now`, with a window of 100 ms
/// from 0.
fn put_answered(items: usize, segments: &[u32], now: Instant) -> (PutOp, Vec<Action>) {
    // A single place: `tests/places.rs` is about further ones.
    let mut put = PutOp::new(ClientConfig { places_max: 1, ..ClientConfig::default() });
    put.start((0..items).map(|_| PutItem { key: b"key", len: 4096, checksum: 9 }), PutRequest::default());
    let mut out = Vec::new();
    assert_eq!(put.poll(at(0), 5, &mut out), Some(Action::Call));
    let answers = (0..items).map(|item| {
        Ok(Allocation { generation: 100 + item as u64, handle: 7, replicas: replicas(segments) })
    });
    let mut answer = Vec::new();
    PutStart::encode_response(&mut answer, 5, &PutWindow { window_ms: 100 }, answers).unwrap();
    put.handle_response(now, &Frame::parse(&answer).unwrap().unwrap().0);
    let mut actions = Vec::new();
    while let Some(action) = put.poll(now, 6, &mut out) {
        actions.push(action);
        if action == Action::Call {
            break;
        }
    }
    (put, actions)
}

/// Commits with their checksums, and revocations with their statement of quiet.
type Endings = (Vec<(u64, u32)>, Vec<(u64, bool)>);

/// Takes the requests that end a put.
fn endings(put: &mut PutOp, now: Instant) -> Endings {
    let (mut commits, mut revocations) = (Vec::new(), Vec::new());
    for request_id in 50.. {
        let mut out = Vec::new();
        match put.poll(now, request_id, &mut out) {
            Some(Action::Call) => {}
            None => break,
            other => panic!("{other:?}"),
        }
        let (frame, _) = Frame::parse(&out).unwrap().unwrap();
        let mut answer = Vec::new();
        if frame.header.kind == Kind::PutEnd as u8 {
            let (_, items) = PutEnd::decode_request(frame.body).unwrap();
            PutEnd::encode_response(&mut answer, request_id, &(), items.map(|_| Ok(()))).unwrap();
            commits.extend(items.map(|Commit { key, generation, handle, checksum }| {
                assert_eq!(handle, 7);
                (generation, unbound(checksum, key.0, generation))
            }));
        } else {
            let (_, items) = PutRevoke::decode_request(frame.body).unwrap();
            PutRevoke::encode_response(&mut answer, request_id, &(), items.map(|_| Ok(()))).unwrap();
            revocations.extend(items.map(|Revocation { generation, quiet, .. }| (generation, quiet)));
        }
        put.handle_response(now, &Frame::parse(&answer).unwrap().unwrap().0);
    }
    (commits, revocations)
}

#[test]
fn a_read_counts_when_checksum_and_lease_agree() {
    let (mut get, reads) = get_answered(&[Ok(object(&[3])), Err(ErrorCode::ObjectNotFound)]);
    assert_eq!(
        (reads.len(), reads[0].segment, reads[0].op, reads[0].len),
        (1, SegmentNo::new(3), Op::Read, 4096)
    );
    assert_eq!(get.poll_timeout(), Some(at(100)));
    assert!(!get.is_done());
    get.handle_transfer(at(99), reads[0].id, TransferEnd::read(7));
    assert!(get.is_done());
    assert_eq!(get.result(0).unwrap().unwrap().len, 4096);
    assert_eq!(get.result(1), Some(Err(ErrorCode::ObjectNotFound)));
}

#[test]
fn a_part_with_a_damaged_block_does_not_count_and_one_beyond_the_end_is_not_read() {
    let (mut get, reads) = get_answered(&[Ok(object(&[1, 2]))]);
    get.handle_transfer(at(2), reads[0].id, TransferEnd { damaged: true, ..TransferEnd::read(7) });
    let second = transfers(|| get.poll(at(2), 6, &mut Vec::new()));
    get.handle_transfer(at(3), second[0].id, TransferEnd { damaged: true, ..TransferEnd::read(7) });
    assert_eq!((get.result(0), get.mismatches()), (Some(Err(ErrorCode::ChecksumMismatch)), 2));

    for (len_min, inside) in [(4096, true), (4097, false)] {
        let mut get = GetOp::new(ClientConfig::default());
        get.start([GetItem { key: b"key", capacity: u64::MAX, len_min }], &[]);
        assert_eq!(get.poll(at(0), 5, &mut Vec::new()), Some(Action::Call));
        let mut answer = Vec::new();
        Get::encode_response(
            &mut answer,
            5,
            &Lease { lease_ms: 100, first: 1 },
            [Ok(object(&[1]))].into_iter(),
        )
        .unwrap();
        get.handle_response(&Frame::parse(&answer).unwrap().unwrap().0);
        assert_eq!(transfers(|| get.poll(at(1), 6, &mut Vec::new())).len(), usize::from(inside));
        assert_eq!(get.result(0), (!inside).then_some(Err(ErrorCode::InvalidParams)));
    }
}

#[test]
fn a_read_that_ends_with_its_lease_does_not_count() {
    let (mut get, reads) = get_answered(&[Ok(object(&[3]))]);
    get.handle_transfer(at(100), reads[0].id, TransferEnd::read(7));
    assert_eq!(get.result(0), Some(Err(ErrorCode::LeaseExpired)));
}

#[test]
fn a_read_under_way_is_cancelled_when_its_lease_ends_and_the_operation_waits_for_it() {
    let (mut get, reads) = get_answered(&[Ok(object(&[3]))]);
    get.handle_timeout(at(100));
    let cancel = Action::Cancel { transfer: reads[0].id };
    assert_eq!(get.poll(at(100), 9, &mut Vec::new()), Some(cancel));
    assert_eq!(
        (get.poll(at(100), 9, &mut Vec::new()), get.poll_timeout(), get.is_done()),
        (None, None, false)
    );
    get.handle_transfer(at(101), reads[0].id, TransferEnd::not_applied());
    assert_eq!(get.result(0), Some(Err(ErrorCode::LeaseExpired)));
    assert!(get.is_done());
}

#[test]
fn damaged_or_unreachable_replicas_are_passed_over() {
    let (mut get, reads) = get_answered(&[Ok(object(&[1, 2, 3]))]);
    assert_eq!(reads[0].segment, SegmentNo::new(1));
    get.handle_transfer(at(2), reads[0].id, TransferEnd::read(8));
    let second = transfers(|| get.poll(at(2), 6, &mut Vec::new()));
    assert_eq!(second[0].segment, SegmentNo::new(2));
    get.handle_transfer(at(3), second[0].id, TransferEnd::not_applied());
    let third = transfers(|| get.poll(at(3), 6, &mut Vec::new()));
    get.handle_transfer(at(4), third[0].id, TransferEnd::read(7));
    assert!(get.result(0).unwrap().is_ok());
    assert_eq!(get.mismatches(), 1);
    let (mut get, reads) = get_answered(&[Ok(object(&[1]))]);
    get.handle_transfer(at(2), reads[0].id, TransferEnd::read(8));
    assert_eq!(get.result(0), Some(Err(ErrorCode::ChecksumMismatch)));
}

#[test]
fn a_near_replica_is_read_first() {
    let mut get = GetOp::new(ClientConfig::default());
    get.start([GetItem { key: b"key", capacity: 8192, len_min: 1 }], &[SegmentNo::new(2)]);
    get.poll(at(0), 5, &mut Vec::new());
    let mut answer = Vec::new();
    Get::encode_response(
        &mut answer,
        5,
        &Lease { lease_ms: 100, first: 1 },
        [Ok(object(&[1, 2]))].into_iter(),
    )
    .unwrap();
    get.handle_response(&Frame::parse(&answer).unwrap().unwrap().0);
    assert_eq!(transfers(|| get.poll(at(1), 6, &mut Vec::new()))[0].segment, SegmentNo::new(2));
}

#[test]
fn an_object_longer_than_the_buffer_is_not_read() {
    let long = Object { len: 8193, ..object(&[1]) };
    let (get, reads) = get_answered(&[Ok(long)]);
    assert_eq!((reads.len(), get.result(0)), (0, Some(Err(ErrorCode::BufferOverflow))));
}

#[test]
fn a_lost_get_is_asked_again_under_a_new_lease_and_answers_to_the_first_are_ignored() {
    let mut get = GetOp::new(ClientConfig { rpc_tries_max: 2, ..ClientConfig::default() });
    get.start([GetItem { key: b"key", capacity: 8192, len_min: 1 }], &[]);
    let mut out = Vec::new();
    assert_eq!(get.poll(at(0), 1, &mut out), Some(Action::Call));
    get.handle_call_failed(1, ErrorCode::RpcTimeout);
    assert_eq!(get.poll(at(500), 2, &mut out), Some(Action::Call));
    let mut late = Vec::new();
    Get::encode_response(&mut late, 1, &Lease { lease_ms: 100, first: 1 }, [Ok(object(&[1]))].into_iter())
        .unwrap();
    get.handle_response(&Frame::parse(&late).unwrap().unwrap().0);
    assert_eq!(get.poll(at(501), 3, &mut out), None);
    get.handle_call_failed(2, ErrorCode::RpcTimeout);
    assert_eq!((get.is_done(), get.result(0)), (true, Some(Err(ErrorCode::RpcTimeout))));
}

#[test]
fn an_answer_of_the_wrong_shape_is_an_error() {
    for answers in [0, 2] {
        let mut get = GetOp::new(ClientConfig::default());
        get.start([GetItem { key: b"key", capacity: 8192, len_min: 1 }], &[]);
        get.poll(at(0), 5, &mut Vec::new());
        let mut answer = Vec::new();
        let objects = (0..answers).map(|_| Ok(object(&[1])));
        Get::encode_response(&mut answer, 5, &Lease { lease_ms: 100, first: 1 }, objects).unwrap();
        get.handle_response(&Frame::parse(&answer).unwrap().unwrap().0);
        assert_eq!((get.is_done(), get.result(0)), (true, Some(Err(ErrorCode::InternalError))));
    }
}

#[test]
fn a_put_commits_when_every_replica_is_written() {
    let (mut put, actions) = put_answered(2, &[1, 2], at(1));
    assert_eq!(actions.len(), 4);
    for (count, action) in actions.into_iter().enumerate() {
        let Action::Transfer(write) = action else { panic!("{action:?}") };
        assert_eq!(
            (write.op, write.segment, write.item),
            (Op::Write, SegmentNo::new(1 + count as u32 % 2), count as u32 / 2)
        );
        assert_eq!(
            put.poll(at(1), 7, &mut Vec::new()),
            None,
            "nothing is committed before everything is written"
        );
        put.handle_transfer(write.id, TransferEnd::written());
    }
    put.set_checksum(1, 10);
    assert_eq!(endings(&mut put, at(2)), (vec![(100, 9), (101, 10)], vec![]));
    assert!(put.is_done());
    assert_eq!((put.result(0), put.result(1)), (Some(Ok(100)), Some(Ok(101))));
}

#[test]
fn one_replica_that_fails_revokes_its_object_and_no_other() {
    let (mut put, actions) = put_answered(2, &[1, 2], at(1));
    for (count, action) in actions.into_iter().enumerate() {
        let Action::Transfer(write) = action else { panic!("{action:?}") };
        let end = if count == 1 { TransferEnd::not_applied() } else { TransferEnd::written() };
        put.handle_transfer(write.id, end);
    }
    assert_eq!(endings(&mut put, at(2)), (vec![(101, 9)], vec![(100, true)]));
    assert_eq!((put.result(0), put.result(1)), (Some(Err(ErrorCode::TransferFail)), Some(Ok(101))));
}

#[test]
fn a_write_that_lost_sight_of_its_bytes_is_fenced_before_anything_is_said_about_it() {
    for (end, held, expected) in [
        (TransferEnd::unknown(), true, (vec![], vec![(100, true)])),
        (TransferEnd::unknown(), false, (vec![], vec![(100, false)])),
        (TransferEnd { fence_needed: true, ..TransferEnd::written() }, true, (vec![(100, 9)], vec![])),
        (TransferEnd { fence_needed: true, ..TransferEnd::written() }, false, (vec![], vec![(100, false)])),
    ] {
        let (mut put, actions) = put_answered(1, &[4], at(1));
        let Action::Transfer(write) = actions[0] else { panic!("{actions:?}") };
        put.handle_transfer(write.id, end);
        assert_eq!(put.poll(at(2), 7, &mut Vec::new()), Some(Action::Fence { segment: SegmentNo::new(4) }));
        assert_eq!(put.poll(at(2), 7, &mut Vec::new()), None);
        put.handle_fence(SegmentNo::new(4), FenceEnd::of(held));
        assert_eq!(endings(&mut put, at(3)), expected, "{end:?} held {held}");
        assert!(put.is_done());
    }
}

#[test]
fn an_answer_after_the_window_leads_to_no_write() {
    let (mut put, actions) = put_answered(1, &[1], at(100));
    assert_eq!(actions, [Action::Call], "the revocation");
    put.handle_call_failed(6, ErrorCode::RpcFail);
    assert_eq!(endings(&mut put, at(101)), (vec![], vec![(100, true)]));
    assert_eq!(put.result(0), Some(Err(ErrorCode::TransferFail)));
}

#[test]
fn when_the_window_ends_writes_are_cancelled_and_revoked_once_they_have_ended() {
    let (mut put, actions) = put_answered(1, &[1, 2], at(1));
    let [Action::Transfer(first), Action::Transfer(second)] = actions[..] else { panic!("{actions:?}") };
    put.handle_transfer(first.id, TransferEnd::written());
    assert_eq!(put.poll_timeout(), Some(at(100)));
    put.handle_timeout(at(100));
    assert_eq!(put.poll(at(100), 7, &mut Vec::new()), Some(Action::Cancel { transfer: second.id }));
    assert_eq!(put.poll(at(100), 7, &mut Vec::new()), None);
    put.handle_transfer(second.id, TransferEnd::unknown());
    assert_eq!(put.poll(at(100), 7, &mut Vec::new()), Some(Action::Fence { segment: SegmentNo::new(2) }));
    put.handle_fence(SegmentNo::new(2), FenceEnd::Held);
    assert_eq!(endings(&mut put, at(101)), (vec![], vec![(100, true)]));
}

#[test]
fn a_put_that_is_aborted_before_its_answer_gives_the_space_back() {
    let mut put = PutOp::new(ClientConfig::default());
    put.start([PutItem { key: b"key", len: 1, checksum: 0 }], PutRequest::default());
    assert_eq!(put.poll(at(0), 5, &mut Vec::new()), Some(Action::Call));
    put.abort(ErrorCode::RpcTimeout);
    assert!(!put.is_done(), "the response may grant space");
    let mut answer = Vec::new();
    let allocation = Ok(Allocation { generation: 1, handle: 7, replicas: replicas(&[1]) });
    PutStart::encode_response(&mut answer, 5, &PutWindow { window_ms: 100 }, [allocation].into_iter())
        .unwrap();
    put.handle_response(at(1), &Frame::parse(&answer).unwrap().unwrap().0);
    assert_eq!(endings(&mut put, at(1)), (vec![], vec![(1, true)]));
    assert_eq!(put.result(0), Some(Err(ErrorCode::RpcTimeout)));
}

#[test]
fn a_commit_that_got_no_answer_is_repeated_and_in_the_end_not_known() {
    let (mut put, actions) = put_answered(1, &[1], at(1));
    let Action::Transfer(write) = actions[0] else { panic!("{actions:?}") };
    put.handle_transfer(write.id, TransferEnd::written());
    for request_id in 10..13 {
        assert_eq!(put.poll(at(2), request_id, &mut Vec::new()), Some(Action::Call));
        assert!(!put.is_done());
        put.handle_call_failed(request_id, ErrorCode::RpcTimeout);
    }
    assert_eq!((put.is_done(), put.result(0)), (true, Some(Err(ErrorCode::RpcTimeout))));
}

//! A put whose segments cannot be written to requests another place within the same operation.
#![allow(clippy::unwrap_used, reason = "tests")]

use store_core::client::{Action, ClientConfig, FenceEnd, PutItem, PutOp, Transfer, TransferEnd};
use store_core::message::{
    Allocation, Operation, PutEnd, PutRequest, PutRevoke, PutStart, PutWindow, Replica, Replicas,
};
use store_core::{ErrorCode, Frame, Kind, SegmentNo};
use te_core::Instant;

/// The segment with this number.
fn no(number: u32) -> SegmentNo {
    SegmentNo::new(number)
}

/// The segments with these numbers.
fn nos<const N: usize>(numbers: [u32; N]) -> Vec<SegmentNo> {
    numbers.map(SegmentNo::new).to_vec()
}

const WINDOW_MS: u32 = 30_000;

fn at(ms: u64) -> Instant {
    Instant::from_millis(ms)
}

fn replicas(segments: &[SegmentNo]) -> Replicas {
    let mut replicas = Replicas::new();
    segments.iter().for_each(|segment| replicas.push(Replica { segment: *segment, addr: 64 }).unwrap());
    replicas
}

/// A put, and a scripted master.
struct Talk {
    put: PutOp,
    now: Instant,
    /// The next generation.
    generation: u64,
    request_id: u64,
    starts: Vec<PutRequest>,
    /// Keys of each start.
    requested: Vec<Vec<Vec<u8>>>,
    /// Generations.
    commits: Vec<u64>,
    /// Generations, and whether the writer reported that it is quiet.
    revocations: Vec<(u64, bool)>,
}

impl Talk {
    fn new(config: ClientConfig, keys: &[&'static [u8]]) -> Self {
        let mut put = PutOp::new(config);
        let items = keys.iter().map(|key| PutItem { key, len: 4096, checksum: 9 });
        put.start(items, PutRequest { nonce: 7, ..PutRequest::default() });
        Self {
            put,
            now: at(0),
            generation: 100,
            request_id: 1,
            starts: Vec::new(),
            requested: Vec::new(),
            commits: Vec::new(),
            revocations: Vec::new(),
        }
    }

    /// Responds to requests until another action is wanted. `place` chooses the segments of each item.
    fn run(&mut self, place: impl Fn(&PutRequest) -> Result<Vec<SegmentNo>, ErrorCode>) -> Vec<Action> {
        let mut actions = Vec::new();
        loop {
            self.request_id += 1;
            let mut out = Vec::new();
            match self.put.poll(self.now, self.request_id, &mut out) {
                None => return actions,
                Some(Action::Call) => self.answer(&out, &place),
                Some(action) => actions.push(action),
            }
        }
    }

    fn answer(&mut self, request: &[u8], place: impl Fn(&PutRequest) -> Result<Vec<SegmentNo>, ErrorCode>) {
        let (frame, _) = Frame::parse(request).unwrap().unwrap();
        let (id, mut answer) = (frame.header.request_id, Vec::new());
        match Kind::from_byte(frame.header.kind).unwrap() {
            Kind::PutStart => {
                let (put, items) = PutStart::decode_request(frame.body).unwrap();
                let window = PutWindow { window_ms: WINDOW_MS };
                let allocations = items.map(|_| {
                    self.generation += 1;
                    let segments = place(&put)?;
                    let (generation, handle) = (self.generation, self.generation ^ 5);
                    Ok(Allocation { generation, handle, replicas: replicas(&segments) })
                });
                PutStart::encode_response(&mut answer, id, &window, allocations).unwrap();
                self.starts.push(put);
                self.requested.push(items.map(|item| item.key.0.to_vec()).collect());
            }
            Kind::PutEnd => {
                let (_, items) = PutEnd::decode_request(frame.body).unwrap();
                self.commits.extend(items.map(|commit| commit.generation));
                PutEnd::encode_response(&mut answer, id, &(), items.map(|_| Ok(()))).unwrap();
            }
            Kind::PutRevoke => {
                let (_, items) = PutRevoke::decode_request(frame.body).unwrap();
                self.revocations.extend(items.map(|revoked| (revoked.generation, revoked.quiet)));
                PutRevoke::encode_response(&mut answer, id, &(), items.map(|_| Ok(()))).unwrap();
            }
            other => panic!("{other:?}"),
        }
        self.put.handle_response(self.now, &Frame::parse(&answer).unwrap().unwrap().0);
    }
}

/// Segment 1 unless it is excluded, else 2, and so on.
fn first_allowed(put: &PutRequest) -> Result<Vec<SegmentNo>, ErrorCode> {
    let segment = (1..=4).map(no).find(|segment| !put.options.placement.excluded.contains(segment));
    segment.map(|segment| vec![segment]).ok_or(ErrorCode::SegmentsExcluded)
}

fn transfers(actions: &[Action]) -> Vec<Transfer> {
    let transfer = |action: &Action| match action {
        Action::Transfer(transfer) => *transfer,
        other => panic!("{other:?}"),
    };
    actions.iter().map(transfer).collect()
}

#[test]
fn a_put_that_a_segment_refuses_is_written_elsewhere_by_the_same_operation() {
    let mut talk = Talk::new(ClientConfig::default(), &[b"a", b"b"]);
    // The master gives both items the same segment, which accepts one of them.
    let writes = transfers(&talk.run(first_allowed));
    assert_eq!(writes.iter().map(|write| write.segment).collect::<Vec<_>>(), nos([1, 1]));
    talk.put.handle_transfer(writes[0].id, TransferEnd::written());
    talk.put.handle_transfer(writes[1].id, TransferEnd::not_applied());
    let again = transfers(&talk.run(first_allowed));
    assert_eq!((talk.commits.as_slice(), talk.revocations.as_slice()), (&[101][..], &[(102, true)][..]));
    assert_eq!(talk.requested, [vec![b"a".to_vec(), b"b".to_vec()], vec![b"b".to_vec()]]);
    assert_eq!(*talk.starts[1].options.placement.excluded, nos([1])[..]);
    assert_ne!(
        talk.starts[0].nonce, talk.starts[1].nonce,
        "the second put must not be mistaken for the first"
    );
    assert_eq!((again.len(), again[0].segment, again[0].item), (1, no(2), 1));
    talk.put.handle_transfer(again[0].id, TransferEnd::written());
    assert!(talk.run(first_allowed).is_empty() && talk.put.is_done());
    assert_eq!((talk.put.result(0), talk.put.result(1)), (Some(Ok(101)), Some(Ok(103))));
}

#[test]
fn a_segment_that_takes_no_byte_is_given_up_and_its_space_is_not_called_quiet() {
    let config = ClientConfig { place_ms_max: 2_000, ..ClientConfig::default() };
    let mut talk = Talk::new(config, &[b"a"]);
    let writes = transfers(&talk.run(first_allowed));
    talk.now = at(1_999);
    talk.put.handle_timeout(talk.now);
    assert!(talk.run(first_allowed).is_empty(), "its time is not over");
    assert_eq!(talk.put.poll_timeout(), Some(at(2_000)));
    talk.now = at(2_000);
    talk.put.handle_timeout(talk.now);
    assert_eq!(talk.run(first_allowed), [Action::Cancel { transfer: writes[0].id }]);
    talk.put.handle_transfer(writes[0].id, TransferEnd::unknown());
    assert_eq!(talk.run(first_allowed), [Action::Fence { segment: SegmentNo::new(1) }]);
    talk.put.handle_fence(SegmentNo::new(1), FenceEnd::Failed);
    let again = transfers(&talk.run(first_allowed));
    assert_eq!((talk.revocations.as_slice(), again[0].segment), (&[(101, false)][..], no(2)));
    talk.put.handle_transfer(again[0].id, TransferEnd::written());
    talk.run(first_allowed);
    assert_eq!((talk.put.is_done(), talk.put.result(0)), (true, Some(Ok(102))));
}

#[test]
fn a_segment_that_has_taken_bytes_is_waited_for() {
    let mut talk = Talk::new(ClientConfig::default(), &[b"a", b"b"]);
    let writes = transfers(&talk.run(first_allowed));
    talk.put.handle_transfer(writes[0].id, TransferEnd::written());
    talk.now = at(5_000);
    talk.put.handle_timeout(talk.now);
    assert!(talk.run(first_allowed).is_empty(), "nothing is cancelled: the segment is slow but not silent");
    assert_eq!(talk.put.poll_timeout(), Some(at(WINDOW_MS.into())));
    talk.put.handle_transfer(writes[1].id, TransferEnd::written());
    talk.run(first_allowed);
    assert_eq!((talk.put.result(0), talk.put.result(1)), (Some(Ok(101)), Some(Ok(102))));
}

#[test]
fn long_objects_have_as_much_more_time_as_their_bytes_take() {
    let mut put = PutOp::new(ClientConfig::default());
    put.start([PutItem { key: b"a", len: 250_000_000, checksum: 9 }], PutRequest::default());
    let mut talk = Talk { put, ..Talk::new(ClientConfig::default(), &[b"a"]) };
    assert_eq!(talk.run(first_allowed).len(), 1);
    assert_eq!(talk.put.poll_timeout(), Some(at(2_000 + 10_000)));
}

#[test]
fn a_write_that_cannot_be_fenced_is_put_elsewhere_too() {
    let mut talk = Talk::new(ClientConfig::default(), &[b"a"]);
    let writes = transfers(&talk.run(first_allowed));
    talk.put.handle_transfer(writes[0].id, TransferEnd { fence_needed: true, ..TransferEnd::written() });
    assert_eq!(talk.run(first_allowed), [Action::Fence { segment: SegmentNo::new(1) }]);
    talk.put.handle_fence(SegmentNo::new(1), FenceEnd::Failed);
    let again = transfers(&talk.run(first_allowed));
    assert_eq!((talk.revocations.as_slice(), again[0].segment), (&[(101, false)][..], no(2)));
}

#[test]
fn a_put_tries_so_many_places_and_no_more() {
    let mut talk = Talk::new(ClientConfig { places_max: 3, ..ClientConfig::default() }, &[b"a"]);
    let mut tried = Vec::new();
    while !talk.put.is_done() {
        let writes = transfers(&talk.run(first_allowed));
        for write in writes {
            tried.push(write.segment);
            talk.put.handle_transfer(write.id, TransferEnd::not_applied());
        }
    }
    assert_eq!(
        (tried.as_slice(), talk.put.result(0)),
        (&nos([1, 2, 3])[..], Some(Err(ErrorCode::TransferFail)))
    );
    assert_eq!((talk.commits.len(), talk.revocations.len()), (0, 3));
}

#[test]
fn where_there_is_no_other_place_the_put_fails_for_its_own_reason() {
    let mut talk = Talk::new(ClientConfig::default(), &[b"a"]);
    let only = |put: &PutRequest| match put.options.placement.excluded.contains(&no(1)) {
        true => Err(ErrorCode::SegmentsExcluded),
        false => Ok(nos([1])),
    };
    let writes = transfers(&talk.run(only));
    talk.put.handle_transfer(writes[0].id, TransferEnd::not_applied());
    assert!(talk.run(only).is_empty());
    assert_eq!((talk.put.is_done(), talk.put.result(0)), (true, Some(Err(ErrorCode::TransferFail))));
}

#[test]
fn an_operation_that_is_given_up_asks_for_no_other_place() {
    for abort_first in [true, false] {
        let mut talk = Talk::new(ClientConfig::default(), &[b"a"]);
        let writes = transfers(&talk.run(first_allowed));
        if abort_first {
            talk.put.abort(ErrorCode::RpcTimeout);
        }
        talk.put.handle_transfer(writes[0].id, TransferEnd::not_applied());
        // Also when it is already being revoked.
        talk.put.abort(ErrorCode::RpcTimeout);
        talk.run(first_allowed);
        assert!(talk.put.is_done() && talk.put.result(0).unwrap().is_err());
        assert_eq!((talk.starts.len(), talk.revocations.as_slice()), (1, &[(101, true)][..]));
    }
}

#[test]
fn one_of_two_replicas_that_fails_moves_the_whole_object() {
    let mut talk = Talk::new(ClientConfig::default(), &[b"a"]);
    let pairs = |put: &PutRequest| {
        let excluded = &put.options.placement.excluded;
        Ok((1..=4).map(no).filter(|segment| !excluded.contains(segment)).take(2).collect())
    };
    let writes = transfers(&talk.run(pairs));
    talk.put.handle_transfer(writes[0].id, TransferEnd::written());
    talk.put.handle_transfer(writes[1].id, TransferEnd::not_applied());
    let again = transfers(&talk.run(pairs));
    assert_eq!(again.iter().map(|write| write.segment).collect::<Vec<_>>(), nos([1, 3]));
    again.iter().for_each(|write| talk.put.handle_transfer(write.id, TransferEnd::written()));
    talk.run(pairs);
    assert_eq!(talk.put.result(0), Some(Ok(102)));
}

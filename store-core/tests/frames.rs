//! The master behind the wire: every operation as frames, and bytes that are not valid frames.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use store_core::message::*;
use store_core::{
    ErrorCode, Frame, FrameWriter, Header, Incarnation, Key, Kind, Master, MasterConfig, NodeId, Placement,
    SegmentNo, Session, wire,
};
use te_core::Instant;

fn master() -> Master {
    let mut master = Master::new(MasterConfig::default()).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "s",
        endpoint: "h:1",
        len: 1 << 20,
        ..MountSegment::default()
    };
    master.mount(Instant::ZERO, &segment).unwrap();
    master
}

fn send(master: &mut Master, request: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let (frame, len) = Frame::parse(request).unwrap().unwrap();
    assert_eq!(len, request.len());
    master.handle(Instant::from_millis(1), &mut Session::default(), &frame, &mut out);
    let (answer, len) = Frame::parse(&out).unwrap().unwrap();
    assert_eq!((len, answer.header.response), (out.len(), true));
    assert_eq!((answer.header.request_id, answer.header.kind), (frame.header.request_id, frame.header.kind));
    out
}

/// Sends one request; returns the response.
macro_rules! call {
    ($master:expr, $operation:ty, $head:expr, $items:expr) => {{
        let mut request = Vec::new();
        <$operation>::encode_request(&mut request, 77, &$head, $items.into_iter()).unwrap();
        send($master, &request)
    }};
}

fn answer<O: Operation>(bytes: &[u8]) -> Result<(O::Response<'_>, Vec<O::ResponseItem<'_>>), ErrorCode> {
    let (frame, _) = Frame::parse(bytes).unwrap().unwrap();
    O::decode_response(&frame).map(|(head, items)| (head, items.collect()))
}

fn second() -> MountSegment<'static> {
    MountSegment {
        node: NodeId::new(2),
        incarnation: Incarnation::new(4),
        name: "t",
        endpoint: "h:2",
        base: 1 << 40,
        len: 1 << 20,
        ..MountSegment::default()
    }
}

#[test]
fn greetings_nodes_and_segments_go_over_the_wire() {
    let mut master = master();
    let master = &mut master;
    let welcome = call!(master, Hello, Greeting::default(), []);
    let welcome = answer::<Hello>(&welcome).unwrap().0;
    assert_eq!((welcome.keys_per_batch_max, welcome.term), (4096, 1));
    master.set_term(3);
    let later = call!(master, Hello, Greeting::default(), []);
    let later = answer::<Hello>(&later).unwrap().0.reign();
    assert_eq!((later.lineage, later.term), (welcome.lineage, 3));
    let newer = call!(master, Hello, Greeting { version: 9, ..Greeting::default() }, []);
    assert_eq!(answer::<Hello>(&newer).unwrap_err(), ErrorCode::InvalidVersion);
    let mounted = call!(master, Mount, second(), []);
    let segment = answer::<Mount>(&mounted).unwrap().0.mounted().unwrap().segment;
    assert_eq!(segment, SegmentNo::new(2));
    let empty = call!(master, Mount, MountSegment { len: 0, ..second() }, []);
    assert_eq!(answer::<Mount>(&empty), Err(ErrorCode::InvalidParams));
    let (node, incarnation) = (second().node, second().incarnation);
    let beat = call!(master, Beat, Heartbeat { node, incarnation, key: 0 }, []);
    assert_eq!(answer::<Beat>(&beat).unwrap().0, NodeStatus::Ok);
    let all = call!(master, Segments, (), []);
    let names: Vec<&str> =
        answer::<Segments>(&all).unwrap().1.into_iter().map(|info| info.unwrap().name).collect();
    assert_eq!(names, ["s", "t"]);
    let some = call!(master, Segments, (), [segment, SegmentNo::new(3)]);
    let some = answer::<Segments>(&some).unwrap().1;
    assert_eq!((some[0].unwrap().endpoint, some[1].unwrap_err()), ("h:2", ErrorCode::SegmentNotFound));
    let unmounted = call!(master, Unmount, UnmountSegment { node, incarnation, segment, key: 0 }, []);
    assert!(answer::<Unmount>(&unmounted).is_ok());
    let stats = call!(master, ReadStats, (), []);
    assert_eq!(answer::<ReadStats>(&stats).unwrap().0, master.stats());
}

#[test]
fn objects_go_over_the_wire() {
    let mut master = master();
    let segment = master.mount(Instant::ZERO, &second()).unwrap().mounted().unwrap().segment;
    let master = &mut master;
    let options = PutOptions { replicas: 2, placement: Placement::on(segment), ..PutOptions::DEFAULT };
    let new = [
        NewObject { key: Key(b"a"), len: 100 },
        NewObject { key: Key(b""), len: 1 },
        NewObject { key: Key(b"b"), len: 5 },
    ];
    let started = call!(master, PutStart, PutRequest { writer: 1, ..PutRequest::once(options) }, new);
    let (window, started) = answer::<PutStart>(&started).unwrap();
    assert_eq!((window.window_ms, started.len()), (30_000, 3));
    assert_eq!(started[1], Err(ErrorCode::InvalidKey));
    let a = started[0].unwrap();
    assert_eq!((a.replicas[0].segment, a.replicas[0].addr), (segment, 1 << 40));
    assert_eq!(a.replicas[1].segment, SegmentNo::new(1));
    let b = started[2].unwrap();
    let commit = Commit { key: Key(b"a"), generation: a.generation, handle: a.handle, checksum: 5 };
    let ended = call!(master, PutEnd, (), [commit]);
    assert_eq!(answer::<PutEnd>(&ended).unwrap().1, [Ok(())]);
    let revocation = Revocation { key: Key(b"b"), generation: b.generation, handle: b.handle, quiet: true };
    let revoked = call!(master, PutRevoke, (), [revocation]);
    assert_eq!(answer::<PutRevoke>(&revoked).unwrap().1, [Ok(())]);
    let found = call!(master, Get, LeaseWanted::Quick, [Key(b"a"), Key(b"b")]);
    let (lease, found) = answer::<Get>(&found).unwrap();
    assert_eq!(
        (lease.lease_ms, found[0].unwrap().checksum, found[1]),
        (5_000, 5, Err(ErrorCode::ObjectNotFound))
    );
    let exists = call!(master, Exists, (), [Key(b"b"), Key(b"a")]);
    assert_eq!(answer::<Exists>(&exists).unwrap().1, [false, true]);
    let listed = call!(master, List, ListQuery { prefix: Key(b""), cursor: 0, limit: 10 }, []);
    let (position, listed) = answer::<List>(&listed).unwrap();
    assert_eq!((position.cursor, listed.len(), listed[0].key, listed[0].leased), (0, 1, Key(b"a"), true));
    let removed = call!(master, Remove, (), [false, true].map(|force| Removal { key: Key(b"a"), force }));
    assert_eq!(answer::<Remove>(&removed).unwrap().1, [Err(ErrorCode::ObjectHasLease), Ok(())]);
}

#[test]
fn batches_have_a_limit_on_both_sides() {
    let mut out = Vec::new();
    let error = Exists::encode_request(&mut out, 1, &(), (0..4097).map(|_| Key(b"k"))).unwrap_err();
    assert_eq!((error, out.len()), (wire::WireError::TooManyKeys { keys: 4097 }, 0));
    let mut writer = FrameWriter::begin(
        &mut out,
        &Header { kind: Kind::Exists as u8, response: false, request_id: 3, status: 0 },
    );
    writer.body().extend_from_slice(&[0x81, 0x20]);
    writer.body().extend_from_slice(&[0; 4097]);
    writer.finish().unwrap();
    let answered = send(&mut master(), &out);
    assert_eq!(answer::<Exists>(&answered).unwrap_err(), ErrorCode::KeysUltraLimit);
    let long = [0u8; 1024];
    let error = Exists::encode_request(&mut out, 1, &(), (0..4096).map(|_| Key(&long))).unwrap_err();
    assert!(matches!(error, wire::WireError::TooLong { .. }));
}

#[test]
fn a_listing_of_the_longest_keys_fits_its_frame() {
    let mut master = Master::new(MasterConfig::default()).unwrap();
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "s",
        endpoint: "h:1",
        len: 1 << 30,
        ..MountSegment::default()
    };
    master.mount(Instant::ZERO, &segment).unwrap();
    for key in 0..4096 {
        let key = format!("{key:01024}");
        master.put_start(Instant::ZERO, key.as_bytes(), 1, &PutOptions::default()).unwrap();
    }
    let (mut cursor, mut seen) = (0, 0);
    loop {
        let page = call!(&mut master, List, ListQuery { prefix: Key(b""), cursor, limit: 4096 }, []);
        let (position, listed) = answer::<List>(&page).unwrap();
        (cursor, seen) = (position.cursor, seen + listed.len());
        if cursor == 0 {
            break;
        }
    }
    assert_eq!(seen, 4096);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_body_is_answered_with_one_frame_unless_its_kind_has_no_answer(kind in any::<u8>(), body in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut master = master();
        let mut request = Vec::new();
        let mut writer = FrameWriter::begin(&mut request, &Header { kind, response: false, request_id: 1, status: 0 });
        writer.body().extend_from_slice(&body);
        writer.finish().unwrap();
        if kind == Kind::ReturnLeases as u8 {
            let (mut session, mut out) = (Session::default(), Vec::new());
            master.handle(Instant::from_millis(1), &mut session, &Frame::parse(&request).unwrap().unwrap().0, &mut out);
            prop_assert!(out.is_empty());
            return Ok(());
        }
        let answered = send(&mut master, &request);
        let (frame, _) = Frame::parse(&answered).unwrap().unwrap();
        if Kind::from_byte(kind).is_none() {
            prop_assert_eq!(frame.header.result(), Err(ErrorCode::NotSupported));
        }
    }

    #[test]
    fn any_bytes_are_a_frame_or_an_error_or_want_more(bytes in prop::collection::vec(any::<u8>(), 0..100), good in any::<bool>()) {
        let mut stream = if good { b"SNWS\x03\0".to_vec() } else { Vec::new() };
        stream.extend(bytes);
        if let Ok(Some((frame, len))) = Frame::parse(&stream) {
            prop_assert_eq!(len, wire::HEADER_BYTES + frame.body.len());
        }
    }

    #[test]
    fn a_damaged_request_changes_nothing_or_is_another_request(at in 0usize..60, bit in 0u8..8) {
        let mut master = master();
        let mut request = Vec::new();
        let new = [NewObject { key: Key(b"some-key"), len: 100 }, NewObject { key: Key(b"another-key"), len: 100 }];
        PutStart::encode_request(&mut request, 1, &PutRequest { writer: 1, ..PutRequest::default() }, new.into_iter()).unwrap();
        let at = at % request.len();
        request[at] ^= 1 << bit;
        if let Ok(Some((frame, _))) = Frame::parse(&request) {
            let mut out = Vec::new();
            master.handle(Instant::ZERO, &mut Session::default(), &frame, &mut out);
            let (answer, _) = Frame::parse(&out).unwrap().unwrap();
            if answer.header.status != 0 {
                prop_assert_eq!(master.stats().used_bytes, 0);
            }
        }
    }
}

//! The wire protocol as pure functions: a written frame parses back to itself, and no bytes make a parser
//! misbehave.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::IpAddr;

use proptest::prelude::*;
use te_tcp::frame::*;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

fn operation() -> impl Strategy<Value = Operation> {
    (any::<(u32, u32, u64, u64, u64, u32)>()).prop_map(|(region, generation, key, offset, len, crc)| {
        Operation {
            region: U32::new(region),
            generation: U32::new(generation),
            key: U64::new(key),
            offset: U64::new(offset),
            len: U64::new(len),
            crc: U32::new(crc),
            reserved: U32::ZERO,
        }
    })
}

/// Checks that a parser needs more bytes until the frame is complete, returns the same frame whatever follows
/// it, and reports the length of its head.
fn check<T: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<Step<T>, FrameError>,
    expected: &T,
) {
    for cut in 0..bytes.len() {
        match parse(&bytes[..cut]) {
            Ok(Step::Need(total)) => assert!(cut < total && total <= bytes.len()),
            other => panic!("{cut} of {} bytes: {other:?}", bytes.len()),
        }
    }
    for tail in [&[][..], &[0xff; 40]] {
        match parse(&[bytes, tail].concat()) {
            Ok(Step::Frame(frame, head)) => assert!(frame == *expected && head == bytes.len()),
            other => panic!("{other:?}"),
        }
    }
}

/// As `check`, for frames that borrow from their bytes.
macro_rules! check_borrowed {
    ($bytes:expr, $parse:path, $expected:pat $(if $guard:expr)?) => {{
        let bytes: Vec<u8> = $bytes;
        let bytes = &bytes[..];
        for cut in 0..bytes.len() {
            match $parse(&bytes[..cut]) {
                Ok(Step::Need(total)) => assert!(cut < total && total <= bytes.len()),
                other => panic!("{cut} of {} bytes: {other:?}", bytes.len()),
            }
        }
        let longer = [bytes, &[0xff; 40]].concat();
        match $parse(&longer) {
            Ok(Step::Frame($expected, head)) $(if $guard)? => assert_eq!(head, bytes.len()),
            other => panic!("{other:?}"),
        }
    }};
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_hello_comes_back(connection: u16, connection_generation: u32, session: u64, initiator: u64, target: u64, identity in 1_u64..) {
        let hello = Hello {
            magic: MAGIC,
            version: U16::new(VERSION),
            connection: U16::new(connection),
            connection_generation: U32::new(connection_generation),
            session: U64::new(session),
            initiator: U64::new(initiator),
            target: U64::new(target),
            identity: U64::new(identity),
        };
        prop_assert_eq!(hello.as_bytes().len(), 48);
        check(hello.as_bytes(), parse_hello, &hello);
    }

    #[test]
    fn a_welcome_comes_back(status in 0_u32..15, incarnation: u64, longest: u64) {
        let welcome = Welcome {
            magic: MAGIC,
            version: U16::new(VERSION),
            reserved: U16::ZERO,
            status: U32::new(status),
            incarnation: U64::new(incarnation),
            detail: U64::new(longest),
        };
        prop_assert_eq!(welcome.as_bytes().len(), 32);
        check(welcome.as_bytes(), parse_welcome, &welcome);
    }

    #[test]
    fn reads_and_writes_come_back(
        wanted in prop::collection::vec(operation(), 1..=ENTRIES_MAX), first: u64, flagged: bool,
    ) {
        let flags = if flagged { FLAG_CHECKSUM } else { 0 };
        let head = |kind| Header::new(kind, flags, wanted.len() as u16, first);
        let bytes = [head(Kind::Read).as_bytes(), wanted.as_bytes()].concat();
        check_borrowed!(bytes, parse_request, Request::Read { seq, checksum, operations }
            if seq == first && checksum == flagged && operations == wanted);
        let bytes = [head(Kind::Write).as_bytes(), wanted.as_bytes()].concat();
        check_borrowed!(bytes, parse_request, Request::Write { seq, checksum, operations }
            if seq == first && checksum == flagged && operations == wanted);
    }

    #[test]
    fn answers_come_back(
        raw in prop::collection::vec(any::<(u32, u32, u64)>(), 1..=ENTRIES_MAX), first: u64,
    ) {
        let data: Vec<DataEntry> = raw
            .iter()
            .map(|&(status, crc, len)| DataEntry { status: status.into(), crc: crc.into(), len: len.into() })
            .collect();
        let bytes = [Header::new(Kind::Data, 0, raw.len() as u16, first).as_bytes(), data.as_bytes()].concat();
        check_borrowed!(bytes, parse_response, Response::Data { seq, checksum: false, entries }
            if seq == first && entries == data);
        let acks: Vec<U32> = raw.iter().map(|&(status, ..)| status.into()).collect();
        let bytes = [Header::new(Kind::Ack, 0, raw.len() as u16, first).as_bytes(), acks.as_bytes()].concat();
        check_borrowed!(bytes, parse_response, Response::Ack { seq, statuses } if seq == first && statuses == acks);
    }

    #[test]
    fn fences_and_pings_come_back(fence: u64, connections in prop::collection::vec(any::<(u16, u32)>(), 1..=ENTRIES_MAX)) {
        let entries: Vec<ConnectionEntry> = connections
            .iter()
            .map(|&(connection, generation)| ConnectionEntry {
                connection: connection.into(),
                reserved: U16::ZERO,
                generation: generation.into(),
            })
            .collect();
        let bytes = [Header::new(Kind::Fence, 0, connections.len() as u16, fence).as_bytes(), entries.as_bytes()].concat();
        check_borrowed!(bytes, parse_request, Request::Fence { id, connections } if id == fence && connections == entries);
        check_borrowed!(Header::new(Kind::Ping, 0, 0, fence).as_bytes().to_vec(), parse_request,
            Request::Ping { id } if id == fence);
        check_borrowed!(Header::new(Kind::FenceAck, 0, 0, fence).as_bytes().to_vec(), parse_response,
            Response::FenceAck { id } if id == fence);
        check_borrowed!(Header::new(Kind::Pong, 0, 0, fence).as_bytes().to_vec(), parse_response,
            Response::Pong { id } if id == fence);
        check_borrowed!(Header::new(Kind::GoAway, 0, 0, fence).as_bytes().to_vec(), parse_response,
            Response::GoAway { next } if next == fence);
    }

    #[test]
    fn an_export_comes_back(
        ips in prop::collection::vec(any::<IpAddr>(), 1..=EXPORT_ADDRESSES_MAX),
        port in 1_u16.., numbers: (u8, u64, u32, u32, u64), len in 1_u64..,
    ) {
        let (rights, incarnation, region, generation, key) = numbers;
        let mut addresses = [IpAddr::from([0; 16]); EXPORT_ADDRESSES_MAX];
        for (to, ip) in addresses.iter_mut().zip(&ips) {
            *to = ip.to_canonical();
        }
        let address_count = ips.len() as u8;
        let format = EXPORT_FORMAT;
        let location = te_core::Location::Numa(rights.into());
        let export =
            Export { format, rights, addresses, address_count, port, incarnation, region, generation, key, len, location };
        let mut bytes = [0; EXPORT_BYTES_MAX];
        let written = export.write(&mut bytes).unwrap();
        prop_assert_eq!(parse_export(&bytes[..written]), Ok(export));
        for cut in 0..written {
            prop_assert!(parse_export(&bytes[..cut]).is_err());
            prop_assert!(export.write(&mut bytes[..cut]).is_none());
        }
    }

    #[test]
    fn no_bytes_break_a_parser(bytes in prop::collection::vec(any::<u8>(), 0..3_000), kind: u8, count in 0_u16..80) {
        let _ = parse_hello(&bytes);
        let _ = parse_welcome(&bytes);
        let _ = parse_export(&bytes);
        // Bytes that begin like a frame reach more of the parser.
        let mut header = Header::read_from_bytes(&[0; 16]).unwrap();
        header.kind = kind;
        header.count = count.into();
        let framed = [header.as_bytes(), &bytes].concat();
        for bytes in [&bytes, &framed] {
            if let Ok(Step::Frame(_, head)) = parse_request(bytes) {
                prop_assert!(head <= HEAD_BYTES_MAX && head <= bytes.len());
            }
            if let Ok(Step::Frame(_, head)) = parse_response(bytes) {
                prop_assert!(head <= HEAD_BYTES_MAX && head <= bytes.len());
            }
        }
    }
}

#[test]
fn wrong_bytes_are_refused_with_the_reason() {
    let header = |kind, flags, count| Header { kind, ..Header::new(Kind::Read, flags, count, 0) };
    assert_eq!(parse_request(header(1, 0, 0).as_bytes()), Err(FrameError::Count(0)));
    assert_eq!(parse_request(header(2, 0, 65).as_bytes()), Err(FrameError::Count(65)));
    assert_eq!(parse_request(header(4, 0, 1).as_bytes()), Err(FrameError::Count(1)));
    assert_eq!(parse_request(header(1, 2, 1).as_bytes()), Err(FrameError::Flags(2)));
    assert_eq!(parse_request(header(129, 0, 1).as_bytes()), Err(FrameError::Kind(129)));
    assert_eq!(parse_response(header(1, 0, 1).as_bytes()), Err(FrameError::Kind(1)));
    assert_eq!(parse_hello(b"snowmen"), Err(FrameError::Magic));
    assert_eq!(parse_hello(b"snowskin\x03\x00"), Err(FrameError::Version(3)));
    let nameless = [&MAGIC[..], &VERSION.to_le_bytes(), &[1; 30], &[0; 8]].concat();
    assert_eq!(parse_hello(&nameless), Err(FrameError::Identity));
}

//! The frames of control connections, and exports: what is written is parsed again, and random bytes are
//! refused.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use te_rdma::wire::*;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

#[test]
fn the_layouts_are_those_of_the_documentation() {
    let sizes = [
        size_of::<Hello>(),
        size_of::<Welcome>(),
        size_of::<Header>(),
        size_of::<PortBody>(),
        size_of::<QpEntry>(),
        size_of::<Resolve>(),
        size_of::<Resolved>(),
        size_of::<Withdrawn>(),
        size_of::<Refusal>(),
    ];
    assert_eq!(sizes, [48, 32, 16, 32, 16, 24, 40, 8, 8]);
    assert_eq!((FRAME_BYTES_MAX, EXPORT_BYTES_MAX), (16 + 40 + 4 * 256, 48 + 64));
}

fn port() -> PortBody {
    PortBody {
        gid: [1; 16],
        lid: U16::new(2),
        gid_kind: 2,
        reads: 16,
        mtu: U32::new(1_024),
        reserved: U64::ZERO,
    }
}

fn entry(generation: u32, number: u32) -> QpEntry {
    QpEntry {
        generation: U32::new(generation),
        number: U32::new(number),
        psn: U32::new(7),
        reserved: U32::ZERO,
    }
}

fn connect(entries: &[QpEntry]) -> Vec<u8> {
    let header = Header::new(Kind::Connect, entries.len() as u16, 9);
    [header.as_bytes(), port().as_bytes(), entries.as_bytes()].concat()
}

#[test]
fn a_truncated_frame_reports_how_many_bytes_it_needs() {
    let whole = connect(&[entry(1, 2), entry(2, 3)]);
    for len in 0..whole.len() {
        match parse_request(&whole[..len]) {
            Ok(Step::Need(needed)) => assert!(needed > len && needed <= whole.len()),
            other => panic!("{len} bytes were parsed as {other:?}"),
        }
    }
    let Ok(Step::Frame(Request::Connect { id: 9, qps, .. }, used)) = parse_request(&whole) else {
        panic!("a good frame was refused")
    };
    assert_eq!((qps.len(), used), (2, whole.len()));
}

#[test]
fn numbers_out_of_their_range_are_refused() {
    for number in [1 << 24, u32::MAX] {
        assert_eq!(parse_request(&connect(&[entry(1, number)])), Err(FrameError::Range));
    }
    for (at, byte) in [(16 + 18, 3), (16 + 20, 1), (16 + 21, 0x20)] {
        let mut frame = connect(&[entry(1, 2)]);
        frame[at] = byte;
        assert_eq!(parse_request(&frame), Err(FrameError::Range), "byte {at}");
    }
    for (at, error) in [(1, FrameError::Reserved), (4, FrameError::Reserved), (16 + 24, FrameError::Reserved)]
    {
        let mut frame = connect(&[entry(1, 2)]);
        frame[at] = 1;
        assert_eq!(parse_request(&frame), Err(error), "byte {at}");
    }
    assert_eq!(parse_request(&connect(&[])), Err(FrameError::Count(0)));
    assert_eq!(parse_request(&connect(&[entry(1, 2); 17])), Err(FrameError::Count(17)));
    // A count is checked before that many entries have arrived.
    let huge = Header::new(Kind::Fence, u16::MAX, 0);
    assert_eq!(parse_request(huge.as_bytes()), Err(FrameError::Count(u16::MAX)));
    assert_eq!(parse_request(Header::new(Kind::Accept, 1, 0).as_bytes()), Err(FrameError::Kind(129)));
}

#[test]
fn chunks_that_do_not_add_up_are_refused() {
    let good = Resolved {
        base: U64::new(0x1234),
        len: U64::new(0x8000),
        chunk_bytes: U64::new(0x1000),
        chunks: U32::new(9),
        first: U32::new(7),
        rights: 12,
        reserved: [0; 7],
    };
    let frame = |of: Resolved, keys: u16| {
        let header = Header::new(Kind::Resolved, keys, 1);
        [header.as_bytes(), of.as_bytes(), &vec![5; 4 * usize::from(keys)]].concat()
    };
    assert!(parse_response(&frame(good, 2)).is_ok());
    let bad = [
        (good, 3),
        (Resolved { chunks: U32::new(8), ..good }, 1),
        (Resolved { chunk_bytes: U64::new(0x1001), ..good }, 1),
        (Resolved { chunk_bytes: U64::ZERO, ..good }, 1),
        (Resolved { len: U64::ZERO, ..good }, 1),
        (Resolved { base: U64::new(u64::MAX - 3), ..good }, 1),
        (Resolved { first: U32::new(u32::MAX), ..good }, 1),
    ];
    for (of, keys) in bad {
        assert_eq!(parse_response(&frame(of, keys)), Err(FrameError::Range), "{of:?}");
    }
}

#[test]
fn a_refusal_that_refuses_nothing_is_refused() {
    let refused = |status: u32| {
        let body = Refusal { status: U32::new(status), reserved: U32::ZERO };
        [Header::new(Kind::Refused, 0, 4).as_bytes(), body.as_bytes()].concat()
    };
    assert_eq!(parse_response(&refused(0)), Err(FrameError::Range));
    let Ok(Step::Frame(Response::Refused { id: 4, status }, 24)) = parse_response(&refused(3)) else {
        panic!("a good refusal was refused")
    };
    assert_eq!(status, Status::AccessDenied);
    for number in 0..20 {
        let status = Status::from_wire(number);
        assert_eq!(status.error().is_none(), status == Status::Ok);
        assert!(status as u32 == number || status == Status::Protocol);
    }
}

#[test]
fn other_versions_are_distinguished_from_other_protocols() {
    let hello = Hello {
        magic: MAGIC,
        version: U16::new(VERSION + 1),
        reserved: U16::ZERO,
        connection: U32::ZERO,
        session: U64::ZERO,
        target: U64::ZERO,
        identity: U64::new(9),
        reserved_end: U64::ZERO,
    };
    assert_eq!(parse_hello(&hello.as_bytes()[..10]), Err(FrameError::Version(VERSION + 1)));
    let nameless = Hello { version: U16::new(VERSION), identity: U64::ZERO, ..hello };
    assert_eq!(parse_hello(nameless.as_bytes()), Err(FrameError::Identity));
    assert_eq!(parse_hello(b"snowskin"), Err(FrameError::Magic));
    assert_eq!(parse_hello(b"snow"), Ok(Step::Need(48)));
    let refusal = Welcome {
        magic: MAGIC,
        version: U16::new(VERSION + 1),
        reserved: U16::ZERO,
        status: U32::new(Status::Version as u32),
        incarnation: U64::ZERO,
        detail: U64::ZERO,
    };
    assert!(matches!(parse_welcome(refusal.as_bytes()), Ok(Step::Frame(_, 32))));
    let welcome = Welcome { status: U32::ZERO, ..refusal };
    assert_eq!(parse_welcome(welcome.as_bytes()), Err(FrameError::Version(VERSION + 1)));
}

fn addresses() -> impl Strategy<Value = Vec<IpAddr>> {
    let one = prop_oneof![
        any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from_bits(bits))),
        any::<u128>().prop_map(|bits| IpAddr::V6(Ipv6Addr::from_bits(bits)).to_canonical()),
    ];
    proptest::collection::vec(one, 1..=EXPORT_ADDRESSES_MAX)
}

proptest! {
    #[test]
    fn a_written_export_is_parsed_again(
        addresses in addresses(),
        (rights, port) in (any::<u8>(), 1..=u16::MAX),
        (incarnation, region, generation) in (any::<u64>(), any::<u32>(), any::<u32>()),
        (key, len) in (any::<u64>(), 1..=u64::MAX),
    ) {
        let mut all = [IpAddr::V6(Ipv6Addr::UNSPECIFIED); EXPORT_ADDRESSES_MAX];
        all[..addresses.len()].copy_from_slice(&addresses);
        let address_count = addresses.len() as u8;
        let location = te_core::Location::Numa(rights.into());
        let export =
            Export { format: EXPORT_FORMAT, rights, addresses: all, address_count, port, incarnation, region, generation, key, len, location };
        let mut blob = [0; EXPORT_BYTES_MAX];
        let written = export.write(&mut blob).unwrap();
        prop_assert_eq!(parse_export(&blob[..written]), Ok(export));
        prop_assert_eq!(u64::from_le_bytes(blob[Export::KEY_AT..][..8].try_into().unwrap()), key);
        prop_assert_eq!(u16::from_le_bytes(blob[Export::ADDRESSES_AT..][..2].try_into().unwrap()), port);
        for short in 0..written {
            prop_assert!(parse_export(&blob[..short]).is_err());
        }
        prop_assert_eq!(export.write(&mut blob[..written - 1]), None);
    }

    #[test]
    fn random_bytes_are_refused_or_parsed_within_bounds(bytes in proptest::collection::vec(any::<u8>(), 0..2_000), kind in 0_u8..140) {
        let mut framed = bytes.clone();
        if let Some(first) = framed.first_mut() {
            *first = kind;
        }
        // Most random bytes fail because some have to be zero; these do not.
        if framed.len() >= 16 {
            framed[1] = 0;
            framed[3..8].fill(0);
        }
        // Random bytes after the beginning of a handshake, and after that of an export.
        let mut greeting = bytes.clone();
        greeting.splice(..greeting.len().min(12), [MAGIC.as_slice(), &VERSION.to_le_bytes(), &[0, 0]].concat());
        let mut export = bytes.clone();
        export.splice(..export.len().min(6), [b"srdm".as_slice(), &[3, 0]].concat());
        for noise in [&bytes, &framed, &greeting, &export] {
            let lens = [
                parse_hello(noise).map(|step| used(&step)),
                parse_welcome(noise).map(|step| used(&step)),
                parse_request(noise).map(|step| used(&step)),
                parse_response(noise).map(|step| used(&step)),
            ];
            for (frame, needed) in lens.into_iter().flatten() {
                prop_assert!(frame <= noise.len() && needed <= FRAME_BYTES_MAX);
                prop_assert!(frame > 0 || needed > noise.len());
            }
            grows(noise, parse_hello)?;
            grows(noise, parse_welcome)?;
            grows(noise, parse_request)?;
            grows(noise, parse_response)?;
            if let Ok(export) = parse_export(noise) {
                let mut again = [0; EXPORT_BYTES_MAX];
                let written = export.write(&mut again).unwrap();
                prop_assert_eq!(parse_export(&again[..written]), Ok(export));
            }
        }
    }

    #[test]
    fn every_byte_lies_in_one_chunk(base in any::<u64>(), len in 1_u64..1 << 20, shift in 12_u32..18, at in any::<u64>()) {
        let base = base >> 2;
        let chunking = Chunking::new(base, len, 1 << shift).unwrap();
        let mut end = 0;
        for index in 0..chunking.count() {
            let (offset, bytes) = chunking.chunk(index);
            prop_assert_eq!(offset, end);
            prop_assert!(bytes > 0 && bytes <= 1 << shift);
            prop_assert!(index == 0 || (base + offset).is_multiple_of(1 << shift));
            end = offset + bytes;
        }
        prop_assert_eq!(end, len);
        let at = at % len;
        let (index, rest) = chunking.locate(at);
        let (offset, bytes) = chunking.chunk(index);
        prop_assert!(offset <= at && at + rest == offset + bytes);
    }
}

/// With fewer bytes, a parser needs more than it has, or returns the same result as for all bytes.
fn grows<'a, T: PartialEq + std::fmt::Debug>(
    bytes: &'a [u8],
    parse: fn(&'a [u8]) -> Result<Step<T>, FrameError>,
) -> Result<(), TestCaseError> {
    let whole = parse(bytes);
    for len in 0..bytes.len().min(128) {
        match parse(&bytes[..len]) {
            Ok(Step::Need(needed)) => prop_assert!(needed > len),
            early => prop_assert!(early == whole, "with {} of {} bytes", len, bytes.len()),
        }
    }
    Ok(())
}

fn used<T>(step: &Step<T>) -> (usize, usize) {
    match step {
        Step::Need(needed) => (0, *needed),
        Step::Frame(_, used) => (*used, 0),
    }
}

#[test]
fn a_region_at_the_end_of_the_address_space_has_chunks_too() {
    let chunking = Chunking::new(u64::MAX - 99, 100, 4_096).unwrap();
    assert_eq!((chunking.count(), chunking.locate(99)), (1, (0, 1)));
    assert_eq!(Chunking::new(u64::MAX - 99, 101, 4_096), None);
    let whole = Chunking::new(0, u64::MAX, 1 << 46).unwrap();
    assert_eq!(whole.count(), 1 << 18);
    assert!(Header::read_from_bytes(&[0; 16]).is_ok());
}

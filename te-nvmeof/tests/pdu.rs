//! The codec: what is written is read back, a prefix never gives another result than the whole, and each
//! field of a header is checked.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use proptest::prelude::*;
use te_nvmeof::command::{CC_ENABLED, Cqe, Place, Sqe, Status, connect_data, io, nqn_of, property};
use te_nvmeof::pdu::{self, Agreed, Data, End, FLAG_LAST, FLAG_SUCCESS, Fatal, Kind, Pdu, Step};
use zerocopy::IntoBytes;

const DATA_BYTES_MAX: u32 = 1 << 20;

fn agreed() -> impl Strategy<Value = Agreed> {
    (any::<bool>(), any::<bool>(), 0_u8..32).prop_map(|(header_digest, data_digest, alignment)| Agreed {
        header_digest,
        data_digest,
        alignment,
    })
}

fn parse(bytes: &[u8], from: End, agreed: Agreed) -> Result<Step<Pdu>, Fatal> {
    pdu::parse(bytes, from, agreed, DATA_BYTES_MAX)
}

/// The PDU at the beginning of a head, which is parsed at no shorter prefix.
fn whole(head: &[u8], from: End, agreed: Agreed) -> Pdu {
    for cut in 0..head.len() {
        match parse(&head[..cut], from, agreed) {
            Ok(Step::Need(needed)) => assert!(needed > cut && needed <= head.len()),
            other => panic!("{cut} of {} bytes gave {other:?}", head.len()),
        }
    }
    match parse(head, from, agreed) {
        Ok(Step::Frame(pdu, used)) => {
            assert_eq!(used, head.len());
            pdu
        }
        other => panic!("{other:?}"),
    }
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(
        agreed in agreed(), cid: u16, nsid: u32, lba: u64, blocks in 1_u32..=65_536, len in 1..=DATA_BYTES_MAX,
        offset: u32, ttag: u16, status in 0_u16..0x800, result: u64, last: bool,
    ) {
        let sqe = Sqe::blocks(io::WRITE, cid, nsid, lba, blocks).with_data(Place::InCapsule(len));
        prop_assert_eq!((sqe.qword(10), sqe.dword(12)), (lba, blocks - 1));
        prop_assert_eq!(sqe.place(), Some(Place::InCapsule(len)));
        let data = Data { len, digest: agreed.data_digest };
        let head = pdu::command(sqe, len, agreed);
        prop_assert_eq!(whole(head.bytes(), End::Host, agreed), Pdu::Command(sqe, data));
        let head = pdu::command(sqe, 0, agreed);
        prop_assert_eq!(whole(head.bytes(), End::Host, agreed), Pdu::Command(sqe, Data::default()));
        let cqe = Cqe::new(cid, Status(status), 7, result);
        prop_assert_eq!(cqe.status(), Status(status));
        let head = pdu::response(cqe, agreed);
        prop_assert_eq!(whole(head.bytes(), End::Controller, agreed), Pdu::Response(cqe));
        let flags = if last { FLAG_LAST } else { 0 };
        for (kind, from) in [(Kind::H2cData, End::Host), (Kind::C2hData, End::Controller), (Kind::R2t, End::Controller)] {
            let flags = if kind == Kind::R2t { 0 } else { flags };
            let head = pdu::transfer(kind, flags, cid, ttag, (offset, len), agreed);
            let (Pdu::H2cData(header, _) | Pdu::C2hData(header, _) | Pdu::R2t(header)) =
                whole(head.bytes(), from, agreed) else { panic!("another PDU") };
            prop_assert_eq!((header.cid.get(), header.ttag.get()), (cid, ttag));
            prop_assert_eq!((header.offset.get(), header.len.get()), (offset, len));
        }
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(agreed in agreed(), host: bool, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let from = if host { End::Host } else { End::Controller };
        let result = parse(&bytes, from, agreed);
        if let Ok(Step::Frame(_, used)) = result {
            prop_assert!(used <= bytes.len());
        }
    }

    #[test]
    fn a_changed_bit_of_a_header_is_found_by_its_digest(at in 0_usize..76, bit in 0_u8..8) {
        let agreed = Agreed { header_digest: true, ..Agreed::default() };
        let sqe = Sqe::blocks(io::READ, 1, 2, 3, 4).with_data(Place::Transport(4 * 512));
        let mut bytes = pdu::command(sqe, 0, agreed).bytes().to_vec();
        bytes[at] ^= 1 << bit;
        prop_assert!(!matches!(parse(&bytes, End::Host, agreed), Ok(Step::Frame(..))));
    }
}

/// Each field of the common header and of the data headers, with a value that must not be.
#[test]
fn each_wrong_field_is_named() {
    let plain = Agreed::default();
    let digests = Agreed { header_digest: true, data_digest: true, alignment: 0 };
    let command = |agreed| {
        let sqe = Sqe::blocks(io::WRITE, 1, 1, 0, 1).with_data(Place::InCapsule(512));
        pdu::command(sqe, 512, agreed).bytes().to_vec()
    };
    let data = |kind, flags| pdu::transfer(kind, flags, 1, 2, (0, 512), plain).bytes().to_vec();
    let changed = |mut bytes: Vec<u8>, at: usize, value: u8| {
        bytes[at] = value;
        bytes
    };
    let cases = [
        (changed(command(plain), 0, 5), End::Host, plain, Fatal::Field(0)),
        (changed(command(plain), 0, 8), End::Host, plain, Fatal::Field(0)),
        (command(plain), End::Controller, plain, Fatal::Field(0)),
        (changed(command(plain), 1, FLAG_LAST), End::Host, plain, Fatal::Field(1)),
        (changed(command(plain), 1, 1), End::Host, plain, Fatal::Field(1)),
        (command(digests), End::Host, plain, Fatal::Field(1)),
        (command(plain), End::Host, digests, Fatal::Field(1)),
        (changed(command(plain), 2, 24), End::Host, plain, Fatal::Field(2)),
        (changed(command(plain), 3, 71), End::Host, plain, Fatal::Field(3)),
        (changed(command(plain), 3, 74), End::Host, plain, Fatal::Field(3)),
        (changed(command(plain), 3, 0), End::Host, plain, Fatal::Field(3)),
        (changed(changed(command(plain), 4, 71), 5, 0), End::Host, plain, Fatal::Field(4)),
        (changed(command(plain), 6, 0xff), End::Host, plain, Fatal::Limit),
        (changed(data(Kind::H2cData, FLAG_LAST), 4, 0), End::Host, plain, Fatal::Field(16)),
        (changed(data(Kind::H2cData, FLAG_LAST), 16, 1), End::Host, plain, Fatal::Field(16)),
        (data(Kind::C2hData, FLAG_SUCCESS), End::Controller, plain, Fatal::Field(1)),
        (data(Kind::H2cData, FLAG_SUCCESS), End::Host, plain, Fatal::Field(1)),
        (changed(data(Kind::R2t, 0), 4, 28), End::Controller, plain, Fatal::Field(4)),
        (pdu::term_req(End::Host, Fatal::Limit, &[]), End::Controller, plain, Fatal::Field(0)),
        (changed(pdu::term_req(End::Host, Fatal::Limit, &[]), 4, 153), End::Host, plain, Fatal::Field(4)),
    ];
    for (at, (bytes, from, agreed, expected)) in cases.into_iter().enumerate() {
        assert_eq!(parse(&bytes, from, agreed), Err(expected), "case {at}");
    }
    let mut damaged = command(digests);
    damaged[20] ^= 1;
    assert_eq!(parse(&damaged, End::Host, digests), Err(Fatal::HeaderDigest));
}

#[test]
fn a_term_req_says_what_was_wrong() {
    for fatal in [
        Fatal::Field(16),
        Fatal::Sequence,
        Fatal::HeaderDigest,
        Fatal::OutOfRange(12),
        Fatal::Limit,
        Fatal::Unsupported(8),
        Fatal::Other(77),
    ] {
        let bytes = pdu::term_req(End::Controller, fatal, &[7; 500]);
        assert_eq!(bytes.len(), pdu::TERM_BYTES_MAX);
        let parsed = parse(&bytes, End::Controller, Agreed::default());
        assert_eq!(parsed, Ok(Step::Frame(Pdu::TermReq(fatal), bytes.len())));
        assert!(!fatal.to_string().is_empty());
    }
}

/// Fields at the places that the specification gives them.
#[test]
fn commands_have_their_fields_where_the_specification_has_them() {
    let connect = Sqe::connect(0x1234, 3, 128, 5_000);
    let bytes = connect.as_bytes();
    assert_eq!((bytes[0], bytes[1], &bytes[2..4], bytes[4]), (0x7f, 0x40, &[0x34, 0x12][..], 1));
    assert_eq!((&bytes[32..36], bytes[39]), (&[0, 4, 0, 0][..], 0x01), "1,024 bytes in the capsule");
    assert_eq!(bytes[40..48], [0, 0, 3, 0, 127, 0, 4, 0], "format, queue, size, no flow control");
    assert_eq!(bytes[48..52], 5_000_u32.to_le_bytes());
    let set = Sqe::property_set(1, property::CC, CC_ENABLED);
    let bytes = set.as_bytes();
    assert_eq!((bytes[4], bytes[40], &bytes[44..48]), (0, 0, &[0x14, 0, 0, 0][..]));
    assert_eq!(bytes[48..52], 0x0046_0001_u32.to_le_bytes());
    let get = Sqe::property_get(1, property::CAP);
    assert_eq!((get.as_bytes()[4], get.as_bytes()[40]), (4, 1));
    let read = Sqe::blocks(io::READ, 1, 9, 0x1_0000_0002, 8).with_data(Place::Transport(4_096));
    assert_eq!(read.as_bytes()[40..52], [2, 0, 0, 0, 1, 0, 0, 0, 7, 0, 0, 0]);
    assert_eq!(read.as_bytes()[39], 0x5a);
    let data = connect_data([7; 16], 0xffff, "nqn.2014-08.org.example:a", "nqn.2014-08.org.example:b");
    let bytes = data.as_bytes();
    assert_eq!((&bytes[..16], &bytes[16..18]), (&[7; 16][..], &[0xff, 0xff][..]));
    assert_eq!(nqn_of(&bytes[256..512]), Some("nqn.2014-08.org.example:a"));
    assert_eq!(nqn_of(&bytes[512..768]), Some("nqn.2014-08.org.example:b"));
    assert_eq!(nqn_of(b"lab\0"), Some("lab"), "the kernel's target has subsystems of any name");
    for wrong in [&b""[..], b"nqn.2014\xff", b"nqn.a b", &[b'n'; 300]] {
        assert_eq!(nqn_of(wrong), None);
    }
    let cqe = Cqe::new(5, Status::LBA_OUT_OF_RANGE, 3, 1);
    assert_eq!(cqe.as_bytes()[8..16], [3, 0, 0, 0, 5, 0, 0, 1]);
}

//! The data port, byte by byte: what a Mooncake initiator sends and expects, and what a hostile one sends.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(unsafe_code, reason = "exports memory")]

mod common;

use std::io::{Read as _, Write as _};
use std::net::Shutdown;

use common::{
    ALL, Exported, Scripted, config, connect, everything, exactly, exchange, request, service, service_with,
};
use te_core::{Access, MemSpan, Op};
use te_fabric::testkit::{Block, eventually, pattern};
use te_mooncake::header::{Status, Version};
use te_mooncake::{Config, ExportError, Mode, Service, WithdrawError};

const DONE: [u8; 8] = [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d];
const REJECTED: [u8; 8] = [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d];

#[test]
fn requests_get_the_answers_of_a_live_peer() {
    let service = service();
    let exported = Exported::new(&service, 4096, ALL);
    exported.block.set(0, &(0..=255).collect::<Vec<u8>>());
    let addr = exported.addr();
    let mut stream = connect(service.data_port());
    // Recorded from 0.3.13.post1: READ and WRITE of version 2 on one connection, padding that is not zero.
    let mut read = request(Op::Read, Version::V2, addr, 16);
    read[17..].fill(0xaa);
    stream.write_all(&read).unwrap();
    assert_eq!(exactly(&mut stream, 24), [&DONE[..], &(0..16).collect::<Vec<u8>>()].concat());
    stream.write_all(&request(Op::Write, Version::V2, addr + 100, 8)).unwrap();
    stream.write_all(b"ABCDEFGH").unwrap();
    assert_eq!(exactly(&mut stream, 8), DONE);
    assert_eq!(exported.block.get(100, 8), b"ABCDEFGH");
    // Version 1 on the same connection.
    stream.write_all(&request(Op::Read, Version::V1, addr + 100, 8)).unwrap();
    assert_eq!(exactly(&mut stream, 8), b"ABCDEFGH");
    stream.write_all(&request(Op::Write, Version::V1, addr + 200, 4)).unwrap();
    stream.write_all(b"wxyz").unwrap();
    eventually("the bytes are in place", || exported.block.get(200, 4) == b"wxyz");
    // Opcodes other than WRITE read.
    for (opcode, answer) in [(0x82, &[&DONE[..], &[0, 1, 2, 3]].concat()), (0x7f, &vec![0, 1, 2, 3])] {
        let mut other = request(Op::Read, Version::V1, addr, 4);
        other[16] = opcode;
        stream.write_all(&other).unwrap();
        assert_eq!(&exactly(&mut stream, answer.len()), answer, "{opcode:#x}");
    }
    eventually("it is counted", || {
        let stats = service.stats().target;
        (stats.reads, stats.writes, stats.bytes, stats.rejected) == (4, 2, 16 + 8 + 8 + 4 + 8, 0)
    });
}

#[test]
fn ranges_that_are_not_exported_are_refused() {
    let service = service();
    let block = Block::new(8192);
    let addr = block.span().as_ptr().addr() as u64;
    // Two exports that touch.
    for at in [0, 4096] {
        // SAFETY: the block outlives both exports, and is read and written through volatile copies alone.
        unsafe { service.export(block.span().part(at, 4096).unwrap(), ALL) }.unwrap();
    }
    for (at, len, what) in [
        (addr, 0, "no bytes"),
        (addr, 1 << 63, "2^63 bytes"),
        (addr, u64::MAX, "2^64 - 1 bytes"),
        (u64::MAX, 2, "an end past the last address"),
        (addr + 4095, 2, "two exports that touch"),
        (addr + 8190, 3, "past the end"),
        (addr - 1, 2, "before the beginning"),
        (1, 16, "no memory at all"),
        (0, 1, "address 0"),
    ] {
        for op in [Op::Read, Op::Write] {
            let mut stream = connect(service.data_port());
            stream.write_all(&request(op, Version::V2, at, len)).unwrap();
            assert_eq!(everything(&mut stream), REJECTED, "{op:?} of {what}");
            let mut stream = connect(service.data_port());
            stream.write_all(&request(op, Version::V1, at, len)).unwrap();
            assert_eq!(everything(&mut stream), b"", "{op:?} of {what}, version 1");
        }
    }
    assert_eq!(service.stats().target.rejected, 36);
    service.withdraw_all(&[addr, addr + 4096]).unwrap();
}

#[test]
fn a_refused_write_has_its_status_even_if_its_bytes_are_still_being_sent() {
    let service = service();
    let mut stream = connect(service.data_port());
    stream.write_all(&request(Op::Write, Version::V2, 4096, 16 << 20)).unwrap();
    std::thread::scope(|scope| {
        let mut sender = stream.try_clone().unwrap();
        // The target may close before everything is sent.
        scope.spawn(move || {
            sender.write_all(&vec![7; 16 << 20]).and_then(|()| sender.shutdown(Shutdown::Write))
        });
        assert_eq!(exactly(&mut stream, 8), REJECTED);
    });
}

#[test]
fn only_what_was_granted_is_possible() {
    let service = service();
    let mut bytes = [0; 16];
    for (access, allowed) in [(Access::REMOTE_READ, Op::Read), (Access::REMOTE_WRITE, Op::Write)] {
        let exported = Exported::new(&service, 64, access);
        for op in [Op::Read, Op::Write] {
            let mut stream = connect(service.data_port());
            let expected = if op == allowed { Status::Done } else { Status::Rejected };
            assert_eq!(
                exchange(&mut stream, op, exported.addr(), &mut bytes),
                Some(expected),
                "{access:?} {op:?}"
            );
        }
    }
}

#[test]
fn exports_are_checked() {
    let service = service();
    let block = Block::new(64);
    let export = |service: &Service, span: MemSpan, access: Access| {
        // SAFETY: the block outlives the service's exports; other spans are refused before they are touched.
        unsafe { service.export(span, access) }
    };
    let addr = block.span().as_ptr().addr() as u64;
    assert_eq!(export(&service, block.span(), Access::LOCAL), Err(ExportError::Access));
    let empty = block.span().part(0, 0).unwrap();
    assert_eq!(export(&service, empty, ALL), Err(ExportError::Range { addr, len: 0 }));
    let null = MemSpan::new(std::ptr::null_mut(), 8);
    assert_eq!(export(&service, null, ALL), Err(ExportError::Range { addr: 0, len: 8 }));
    let end = MemSpan::new(std::ptr::without_provenance_mut(usize::MAX), 8);
    assert!(matches!(export(&service, end, ALL), Err(ExportError::Range { .. })));
    let device = block.span().at("cuda:0".parse().unwrap());
    assert_eq!(export(&service, device, ALL), Err(ExportError::Device));
    export(&service, block.span(), ALL).unwrap();
    assert_eq!(export(&service, block.span(), ALL), Err(ExportError::Overlap { addr, len: 64 }));
    assert_eq!(service.withdraw(addr + 1), Err(WithdrawError::NotFound(addr + 1)));
    assert_eq!(service.withdraw_all(&[addr + 1, addr]), Err(WithdrawError::NotFound(addr + 1)));
    export(&service, block.span(), ALL).unwrap();
    service.withdraw(addr).unwrap();
    assert_eq!(service.withdraw(addr), Err(WithdrawError::NotFound(addr)));
    // All or none.
    let (half, whole) = (block.span().part(0, 32).unwrap(), block.span());
    // SAFETY: as above.
    let both = unsafe { service.export_all(&[(half, ALL), (whole, ALL)]) };
    assert_eq!(both, Err(ExportError::Overlap { addr, len: 32 }));
    assert_eq!(service.withdraw(addr), Err(WithdrawError::NotFound(addr)), "neither is exported");
    let initiator = service_with(Config { mode: Mode::Initiator, ..config() });
    assert_eq!(export(&initiator, block.span(), ALL), Err(ExportError::NotTarget));
    let one = service_with(Config { exports_max: 1, ..config() });
    export(&one, half, ALL).unwrap();
    let second = block.span().part(32, 32).unwrap();
    assert_eq!(export(&one, second, ALL), Err(ExportError::Full { exports_max: 1 }));
    one.stop();
}

#[test]
fn large_operations_arrive_whole_in_both_directions() {
    let service = service();
    let len = 40 << 20;
    let exported = Exported::new(&service, len, ALL);
    let mut bytes = pattern(3, 0, len);
    let mut stream = connect(service.data_port());
    std::thread::scope(|scope| {
        let mut sender = stream.try_clone().unwrap();
        let sent = &bytes;
        let head = request(Op::Write, Version::V2, exported.addr(), len as u64);
        scope.spawn(move || sender.write_all(&head).and_then(|()| sender.write_all(sent)).unwrap());
        assert_eq!(exactly(&mut stream, 8), DONE);
    });
    assert!(exported.block.get(0, len) == bytes);
    bytes.fill(0);
    assert_eq!(exchange(&mut stream, Op::Read, exported.addr(), &mut bytes), Some(Status::Done));
    assert!(bytes == pattern(3, 0, len));
}

/// A target serves others after each mebibyte, also when that is the last one.
#[test]
fn operations_of_whole_mebibytes_are_answered() {
    let service = service();
    let exported = Exported::new(&service, 4 << 20, ALL);
    let mut stream = connect(service.data_port());
    for mebibytes in 1..=4 {
        let mut bytes = pattern(mebibytes, 0, usize::from(mebibytes) << 20);
        for op in [Op::Write, Op::Read] {
            assert_eq!(exchange(&mut stream, op, exported.addr(), &mut bytes), Some(Status::Done));
        }
    }
}

#[test]
fn memory_is_out_of_reach_before_a_directory_that_hangs_has_answered() {
    // Accepts every entry, and never answers to a removal.
    let directory = Scripted::start(|mut stream, _| {
        let mut request = Vec::new();
        let mut part = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut part) {
            request.extend_from_slice(&part[..count]);
            let text = String::from_utf8_lossy(&request);
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let len = head.lines().find_map(|line| {
                let (name, len) = line.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| len.trim().parse().unwrap())
            });
            if body.len() < len.unwrap_or(0_usize) {
                continue;
            }
            if !head.starts_with("DELETE") {
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").unwrap();
            }
            request.clear();
        }
    });
    let metadata = format!("http://{}/metadata", directory.address).parse().unwrap();
    let service = Service::start(Config { name: Some("node".into()), ..config() }, &metadata).unwrap();
    let block = Block::new(4096);
    // SAFETY: the block outlives the service.
    unsafe { service.export(block.span(), ALL) }.unwrap();
    let addr = block.span().as_ptr().addr() as u64;
    let mut stream = connect(service.data_port());
    assert_eq!(exchange(&mut stream, Op::Read, addr, &mut [0; 16]), Some(Status::Done));
    let stopping = std::thread::spawn(move || drop(service));
    eventually("the memory is out of reach", || {
        stream.write_all(&request(Op::Read, Version::V2, addr, 16)).is_err()
            || stream.read_exact(&mut [0; 24]).is_err()
    });
    assert!(!stopping.is_finished(), "it still waits for the directory");
    stopping.join().unwrap();
}

#[test]
fn connections_work_at_the_same_time() {
    let service = service();
    let exported = Exported::new(&service, 1 << 20, ALL);
    let base = exported.addr();
    std::thread::scope(|scope| {
        for number in 0..8_u64 {
            let port = service.data_port();
            scope.spawn(move || {
                let mut stream = connect(port);
                for round in 0..50 {
                    let (at, seed) = (base + number * (128 << 10), (number * 50 + round) as u8);
                    let mut bytes = pattern(seed, 0, 100 << 10);
                    assert_eq!(exchange(&mut stream, Op::Write, at, &mut bytes), Some(Status::Done));
                    bytes.fill(0);
                    assert_eq!(exchange(&mut stream, Op::Read, at, &mut bytes), Some(Status::Done));
                    assert!(bytes == pattern(seed, 0, 100 << 10));
                }
            });
        }
    });
}

#[test]
fn a_connection_that_is_cut_in_any_state_leaves_the_target_serving() {
    let service = service();
    let exported = Exported::new(&service, 8 << 20, ALL);
    let addr = exported.addr();
    let long = 8 << 20;
    let head = |op, version| request(op, version, addr, long).to_vec();
    let states = [
        ("nothing sent", Vec::new(), 0),
        ("a part of a request", head(Op::Read, Version::V2)[..7].to_vec(), 0),
        ("a WRITE without bytes", head(Op::Write, Version::V2), 0),
        ("a WRITE with some bytes", [head(Op::Write, Version::V2), vec![1; 100_000]].concat(), 0),
        (
            "a WRITE of version 1 with some bytes",
            [head(Op::Write, Version::V1), vec![1; 100_000]].concat(),
            0,
        ),
        ("a READ before its status", head(Op::Read, Version::V2), 0),
        ("a READ in the middle", head(Op::Read, Version::V2), 1_000_000),
        ("a READ of version 1 in the middle", head(Op::Read, Version::V1), 1_000_000),
        ("a refusal before its status", request(Op::Write, Version::V2, 1, 9).to_vec(), 0),
        ("a refusal after its status", request(Op::Write, Version::V2, 1, 9).to_vec(), 8),
    ];
    for (what, sent, received) in states {
        for with_reset in [true, false] {
            let mut stream = connect(service.data_port());
            stream.write_all(&sent).unwrap();
            exactly(&mut stream, received);
            if with_reset {
                common::reset(stream);
            } else {
                drop(stream);
            }
            let mut other = connect(service.data_port());
            let mut bytes = [0; 100];
            assert_eq!(exchange(&mut other, Op::Read, addr, &mut bytes), Some(Status::Done), "{what}");
        }
    }
    eventually("every connection has ended", || service.stats().data.open == 0);
}

#[test]
fn when_there_are_too_many_connections_an_idle_one_makes_room_and_a_busy_one_does_not() {
    let service = service_with(Config { target_connections_max: 2, ..config() });
    let exported = Exported::new(&service, 64, ALL);
    let mut bytes = [0; 8];
    // In the middle of a WRITE.
    let mut busy = connect(service.data_port());
    busy.write_all(&request(Op::Write, Version::V2, exported.addr(), 8)).unwrap();
    let mut idle = connect(service.data_port());
    assert_eq!(exchange(&mut idle, Op::Read, exported.addr(), &mut bytes), Some(Status::Done));
    let mut third = connect(service.data_port());
    assert_eq!(exchange(&mut third, Op::Read, exported.addr(), &mut bytes), Some(Status::Done));
    assert_eq!(everything(&mut idle), b"", "it was replaced");
    third.write_all(&request(Op::Write, Version::V2, exported.addr(), 8)).unwrap();
    // The request has arrived when a byte behind it is in place.
    third.write_all(b"x").unwrap();
    eventually("the third is busy", || exported.block.get(0, 1) == b"x");
    assert_eq!(everything(&mut connect(service.data_port())), b"", "none is idle");
    for (stream, rest) in [(&mut busy, &b"busybusy"[..]), (&mut third, b"yyyyyyy")] {
        stream.write_all(rest).unwrap();
        assert_eq!(exactly(stream, 8), DONE);
    }
    let stats = service.stats().data;
    assert_eq!((stats.replaced, stats.refused, stats.open), (1, 1, 2));
}

#[test]
fn one_address_has_a_limited_number_of_connections() {
    let service = service_with(Config { target_connections_per_peer_max: 1, ..config() });
    let exported = Exported::new(&service, 64, ALL);
    let mut first = connect(service.data_port());
    first.write_all(&request(Op::Write, Version::V2, exported.addr(), 8)).unwrap();
    first.write_all(b"x").unwrap();
    eventually("the first is busy", || exported.block.get(0, 1) == b"x");
    assert_eq!(everything(&mut connect(service.data_port())), b"");
    first.write_all(b"yyyyyyy").unwrap();
    assert_eq!(exactly(&mut first, 8), DONE);
    let mut second = connect(service.data_port());
    assert_eq!(exchange(&mut second, Op::Read, exported.addr(), &mut [0; 8]), Some(Status::Done));
    assert_eq!(everything(&mut first), b"", "it was idle and made room");
}

#[test]
fn operations_wait_while_too_many_bytes_are_being_served() {
    let service = service_with(Config { target_inflight_bytes_max: 100, ..config() });
    let exported = Exported::new(&service, 4096, ALL);
    let addr = exported.addr();
    let mut first = connect(service.data_port());
    first.write_all(&request(Op::Write, Version::V2, addr, 80)).unwrap();
    first.write_all(b"x").unwrap();
    eventually("the first is being served", || exported.block.get(0, 1) == b"x");
    // The second waits, the third waits behind it though there is room, the fourth ends while it waits.
    let mut waiting: Vec<_> = [4000, 10, 10]
        .iter()
        .map(|len| {
            let mut stream = connect(service.data_port());
            stream.write_all(&request(Op::Read, Version::V2, addr, *len)).unwrap();
            stream
        })
        .collect();
    for stream in &waiting {
        stream.set_nonblocking(true).unwrap();
    }
    let gone = waiting.pop().unwrap();
    eventually("all are connected", || service.stats().data.open == 4);
    common::reset(gone);
    eventually("the fourth is noticed to have gone", || service.stats().data.open == 3);
    for stream in &mut waiting {
        assert!(stream.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
        stream.set_nonblocking(false).unwrap();
    }
    first.write_all(&[7; 79]).unwrap();
    assert_eq!(exactly(&mut first, 8), DONE);
    assert_eq!(exactly(&mut waiting[0], 4008)[..8], DONE);
    assert_eq!(exactly(&mut waiting[1], 18)[..8], DONE);
    assert_eq!(exchange(&mut first, Op::Read, addr, &mut [0; 100]), Some(Status::Done));
}

#[test]
fn a_withdrawn_range_is_out_of_reach_at_once_whatever_its_peers_do() {
    let service = service();
    let exported = Exported::new(&service, 4 << 20, ALL);
    let other = Exported::new(&service, 64, ALL);
    let (addr, len) = (exported.addr(), 4_u64 << 20);
    // One in the middle of a WRITE, one in the middle of a READ whose peer does not read.
    let mut writer = connect(service.data_port());
    writer.write_all(&request(Op::Write, Version::V2, addr, len)).unwrap();
    writer.write_all(&[7; 1000]).unwrap();
    eventually("bytes are in place", || exported.block.get(999, 1) == [7]);
    let mut reader = connect(service.data_port());
    reader.write_all(&request(Op::Read, Version::V2, addr, len)).unwrap();
    assert_eq!(exactly(&mut reader, 8), DONE);
    let mut bystander = connect(service.data_port());
    assert_eq!(exchange(&mut bystander, Op::Read, other.addr(), &mut [0; 8]), Some(Status::Done));

    service.withdraw(addr).unwrap();
    exported.block.set(0, &vec![9; len as usize]);
    // More bytes do not land, and the connections are closed.
    let _ = writer.write_all(&[7; 100_000]);
    let status = everything(&mut writer);
    assert_eq!(status, b"", "neither success nor a refusal: some bytes were written");
    assert!((everything(&mut reader).len() as u64) < len);
    assert!(exported.block.get(0, len as usize).iter().all(|byte| *byte == 9));
    let mut late = connect(service.data_port());
    assert_eq!(exchange(&mut late, Op::Read, addr, &mut [0; 8]), Some(Status::Rejected));
    assert_eq!(exchange(&mut bystander, Op::Read, other.addr(), &mut [0; 8]), Some(Status::Done));
}

#[test]
fn a_stopped_service_has_no_ports_and_touches_no_memory() {
    let service = service();
    let block = Block::new(4096);
    // SAFETY: the block outlives the service, and is read and written through volatile copies alone.
    unsafe { service.export(block.span(), ALL) }.unwrap();
    let addr = block.span().as_ptr().addr() as u64;
    let mut writer = connect(service.data_port());
    writer.write_all(&request(Op::Write, Version::V2, addr, 4096)).unwrap();
    writer.write_all(&[7; 10]).unwrap();
    eventually("bytes are in place", || block.get(9, 1) == [7]);
    let ports = [service.rpc_port(), service.data_port()];
    service.stop();
    block.set(0, &[0; 4096]);
    let _ = writer.write_all(&[7; 4000]);
    assert_eq!(everything(&mut writer), b"");
    assert!(block.get(0, 4096).iter().all(|byte| *byte == 0));
    for port in ports {
        assert!(std::net::TcpStream::connect((common::HERE, port)).is_err());
    }
}

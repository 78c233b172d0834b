//! Objects from and into memory of GPUs, with the fake driver of te-gpu: no GPU is behind it, and a CPU that
//! touches its memory faults.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unsafe_code, reason = "registers memory that outlives the client")]

mod common;
#[path = "../../te-gpu/tests/common/mod.rs"]
mod fake;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::{MIB, Process, be_node, eventually, master, node_over, pattern, role};
use fake::Fake;
use store_client::{
    AsyncClient, BufferRange, Client, ClientConfig, DeviceError, ErrorCode, Fabrics, Fragment, Get, MemSpan,
    Node, NodeConfig, Put, PutOptions, PutRange, RegionId, RemoveMode, Store as _, StoreError,
};
use te_core::{GpuVendor, Location};
use te_engine::RegisterError;

const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
const FABRICS: [Fabrics; 3] = [Fabrics::LOCAL, Fabrics::SHM, Fabrics::TCP];

/// Where children begin. As a test it does nothing.
#[test]
fn entry() {
    if let Some(role) = role() {
        be_node(&role);
    }
}

/// A client whose engine knows the fake driver. Eight slots, so that long objects wait for them.
fn client_of(fake: &Fake, master: SocketAddr, fabrics: Fabrics) -> Client {
    connect(fake, master, fabrics, |_| {})
}

fn connect(
    fake: &Fake,
    master: SocketAddr,
    fabrics: Fabrics,
    change: impl FnOnce(&mut ClientConfig),
) -> Client {
    let mut config = ClientConfig::new(master.into()).fabrics(fabrics);
    config.engine.gpu = fake.config();
    (config.engine.gpu.slot_bytes, config.engine.gpu.ring_bytes) = (128 << 10, 1 << 20);
    change(&mut config);
    Client::connect(config).unwrap()
}

/// The span as a caller gives it that knows nothing but an address.
fn register(client: &mut Client, span: MemSpan) -> RegionId {
    // SAFETY: memory of the fake driver, which is freed after the client, if at all.
    unsafe { client.register(MemSpan::new(span.as_ptr(), span.len())) }.unwrap()
}

fn range(region: RegionId, offset: usize, len: usize) -> BufferRange {
    BufferRange { region, offset: offset as u64, len: len as u64 }
}

fn at(span: MemSpan, offset: usize, len: usize) -> MemSpan {
    span.part(offset as u64, len as u64).unwrap()
}

fn large_node(master: SocketAddr, fabrics: Fabrics) -> Node {
    Node::start(NodeConfig::new("large", master.into(), 96 * MIB).fabrics(fabrics)).unwrap()
}

#[test]
fn objects_come_from_and_go_into_device_memory_over_every_fabric() {
    let fake = Fake::cuda();
    // Copies end late, so that what is told too early is seen.
    fake.set("delay_us_max", 200);
    for fabrics in FABRICS {
        let master = master();
        let _node = large_node(master.rpc_addr(), fabrics);
        let mut client = client_of(&fake, master.rpc_addr(), fabrics);
        let span = fake.allocate(40 << 20);
        let region = register(&mut client, span);
        for (seed, len) in [1, 4096, 100_000, (1 << 20) + 1, 16 << 20].into_iter().enumerate() {
            let value = pattern(seed as u64, len);
            let (from, into) = (3 + seed, (20 << 20) + 1);
            fake.fill(at(span, from, len), &value);
            assert!(client.put(b"device", range(region, from, len), &ONE).unwrap(), "{fabrics} {len}");
            assert!(client.put(b"host", &value, &ONE).unwrap());
            assert_eq!(client.get(b"device").unwrap().as_ref(), Some(&value), "{fabrics} {len}");
            for key in [b"host".as_slice(), b"device"] {
                fake.fill(at(span, into - 1, len + 9), &vec![0xee; len + 9]);
                let sink = range(region, into, len + 7);
                assert_eq!(client.get_with(Get::new(key, sink)).unwrap(), Some(len as u64), "{fabrics}");
                let found = fake.bytes(at(span, into - 1, len + 9));
                assert_eq!((found[0], &found[len + 1..]), (0xee, &[0xee; 8][..]), "{fabrics} {len}");
                assert!(found[1..=len] == value, "{fabrics} {len}: other bytes");
            }
            for key in [b"host".as_slice(), b"device"] {
                assert!(client.remove(key, RemoveMode::Force).unwrap());
            }
        }
        let counters = client.counters();
        assert_eq!((counters.checksum_mismatches, counters.misses, counters.quarantined_pieces), (0, 0, 0));
        client.unregister(region).unwrap();
        drop(client);
        fake.free(span);
    }
}

#[test]
fn batches_mix_device_and_host_memory_and_items_have_parts_in_both() {
    let fake = Fake::cuda();
    let span = fake.allocate(16 << 20);
    for fabrics in FABRICS {
        let master = master();
        let _node = large_node(master.rpc_addr(), fabrics);
        let mut client = client_of(&fake, master.rpc_addr(), fabrics);
        let region = register(&mut client, span);
        let host = client.alloc(8 << 20).unwrap();
        // 40 short objects of the device, and long ones whose parts alternate.
        let short = pattern(1, 40 * 5003);
        fake.fill(at(span, 11, short.len()), &short);
        let long = pattern(2, 6 * 300_001);
        let parts: Vec<BufferRange> = (0..6)
            .map(|part| {
                let (offset, bytes) = ((1 << 20) + part * 300_001, &long[part * 300_001..][..300_001]);
                if part % 2 == 0 {
                    fake.fill(at(span, offset, 300_001), bytes);
                    range(region, offset, 300_001)
                } else {
                    host.write(offset as u64, bytes).unwrap();
                    BufferRange::part(&host, offset as u64, 300_001)
                }
            })
            .collect();
        let keys: Vec<String> = (0..40).map(|item| format!("short-{item}")).collect();
        let mut puts: Vec<Put<'_>> = keys
            .iter()
            .enumerate()
            .map(|(item, key)| Put::new(key, range(region, 11 + item * 5003, 5003)))
            .collect();
        puts.push(Put::new("long", &parts));
        puts.push(Put::new("plain", &short));
        assert!(client.batch_put(&mut puts, &ONE).is_complete(), "{puts:?}");
        assert_eq!(client.get(b"long").unwrap().as_ref(), Some(&long));

        for part in &parts {
            if part.region == region {
                fake.fill(at(span, part.offset as usize, 300_001), &vec![0; 300_001]);
            } else {
                host.write(part.offset, &vec![0; 300_001]).unwrap();
            }
        }
        fake.fill(at(span, 8 << 20, short.len()), &vec![0; short.len()]);
        let mut plain = vec![0; short.len()];
        let mut gets: Vec<Get<'_>> = keys
            .iter()
            .enumerate()
            .map(|(item, key)| Get::new(key, range(region, (8 << 20) + item * 5003, 5003)))
            .collect();
        gets.push(Get::new("long", &parts));
        gets.push(Get::new("plain", &mut plain[..]));
        gets.push(Get::new("absent", range(region, 0, 10)));
        let tally = client.batch_get(&mut gets);
        assert_eq!((tally.done, tally.missed, tally.failed), (42, 1, 0), "{gets:?}");
        assert!(fake.bytes(at(span, 8 << 20, short.len())) == short, "{fabrics}");
        assert!(plain == short);
        for (part, bytes) in parts.iter().zip(long.chunks(300_001)) {
            if part.region == region {
                assert!(fake.bytes(at(span, part.offset as usize, 300_001)) == bytes, "{fabrics}");
            } else {
                let mut found = vec![0; 300_001];
                host.read(part.offset, &mut found).unwrap();
                assert!(found == bytes, "{fabrics}");
            }
        }
        client.unregister(region).unwrap();
    }
}

#[test]
fn parts_of_objects_go_into_device_memory() {
    let fake = Fake::cuda();
    let span = fake.allocate(4 << 20);
    for fabrics in FABRICS {
        let master = master();
        let _node = node_over("a", master.rpc_addr(), fabrics);
        let mut client = client_of(&fake, master.rpc_addr(), fabrics);
        let region = register(&mut client, span);
        let host = client.alloc(4 << 20).unwrap();
        for (seed, len) in [3_usize, 65_536, 65_537, 1_000_000].into_iter().enumerate() {
            let (key, value) = (format!("k{seed}"), pattern(seed as u64, len));
            assert!(client.put(key.as_bytes(), &value, &ONE).unwrap());
            for (start, end) in [(1, 2), (0, len), (len / 3, len / 3 + len / 2), (len - 1, len)] {
                fake.fill(span, &vec![0; 4 << 20]);
                let sink = range(region, 77, end - start + 5);
                let part = Get::new(&key, sink).range(start as u64..end as u64);
                assert_eq!(client.get_with(part).unwrap(), Some((end - start) as u64));
                let found = fake.bytes(at(span, 77, end - start + 5));
                assert!(found[..end - start] == value[start..end], "{fabrics} {len} {start}..{end}");
                assert_eq!(found[end - start..], [0; 5]);
            }
        }
        // Many parts of one object, the same bytes twice, on the device and on the host.
        let value = pattern(3, 1_000_000);
        let parts: Vec<Fragment> = (0..300)
            .map(|part| {
                let (offset, place, len) = (part * 3_001, part * 4_097, 3_900);
                let into = if part % 5 == 0 {
                    BufferRange::part(&host, place as u64, len as u64)
                } else {
                    range(region, place, len)
                };
                Fragment { offset: offset as u64, into }
            })
            .collect();
        assert_eq!(client.get_with(Get::new("k3", &parts)).unwrap(), Some(300 * 3_900));
        for part in &parts {
            let offset = part.offset as usize;
            let mut found = vec![0; 3_900];
            if part.into.region == region {
                found = fake.bytes(at(span, part.into.offset as usize, 3_900));
            } else {
                host.read(part.into.offset, &mut found).unwrap();
            }
            assert!(found == value[offset..offset + 3_900], "{fabrics} {offset}");
        }
        assert_eq!(client.counters().checksum_mismatches, 0);
        client.unregister(region).unwrap();
    }
}

#[test]
fn open_puts_and_started_gets_take_device_memory_range_by_range() {
    let fake = Fake::cuda();
    let span = fake.allocate(4 << 20);
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::TCP);
    let mut client = client_of(&fake, master.rpc_addr(), Fabrics::TCP);
    let region = register(&mut client, span);
    let value = pattern(5, 1_000_000);
    fake.fill(at(span, 1, value.len()), &value);
    client.start_puts(&[(b"k", 1_000_000)], &ONE).remove(0).unwrap();
    let writes: Vec<PutRange<'_>> = [(700_000, 300_000), (0, 70_001), (70_001, 629_999)]
        .map(|(offset, len)| PutRange::new(b"k", offset, range(region, 1 + offset as usize, len)))
        .into();
    assert!(client.write_puts(&writes).into_iter().all(|written| written.is_ok()));
    client.end_puts(&[b"k"]).remove(0).unwrap();
    assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value));

    assert_eq!(client.start_gets(&[b"k"]).remove(0).unwrap(), 1_000_000);
    let mut gets = [Get::new(b"k", range(region, 2 << 20, 1_000_000))];
    assert_eq!(client.batch_get_started(&mut gets).done, 1);
    assert!(fake.bytes(at(span, 2 << 20, 1_000_000)) == value);
    client.end_gets(&[b"k"]);
}

#[test]
fn a_client_that_threads_share_takes_device_memory() {
    let fake = Fake::cuda();
    let span = fake.allocate(1 << 20);
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::SHM);
    let mut client = client_of(&fake, master.rpc_addr(), Fabrics::SHM);
    let region = register(&mut client, span);
    let value = pattern(6, 200_000);
    fake.fill(at(span, 5, value.len()), &value);
    let client = AsyncClient::start(client).unwrap();
    let threads: Vec<_> = (0..3)
        .map(|thread| {
            let mut shared = client.blocking();
            std::thread::spawn(move || {
                let key = format!("k{thread}");
                assert!(shared.put(key.as_bytes(), range(region, 5, 200_000), &ONE).unwrap());
                let into = range(region, 200_005 + thread * 250_000, 200_000);
                assert_eq!(shared.get_with(Get::new(&key, into)).unwrap(), Some(200_000));
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for thread in 0..3 {
        assert!(fake.bytes(at(span, 200_005 + thread * 250_000, 200_000)) == value);
    }
    client.stop();
}

#[test]
fn a_corrupted_replica_is_skipped_for_a_good_one() {
    let fake = Fake::cuda();
    let span = fake.allocate(1 << 20);
    let master = master();
    let a = node_over("a", master.rpc_addr(), Fabrics::TCP);
    let _b = node_over("b", master.rpc_addr(), Fabrics::TCP);
    let mut client = client_of(&fake, master.rpc_addr(), Fabrics::TCP);
    let region = register(&mut client, span);
    let value = pattern(7, 100_000);
    fake.fill(at(span, 0, value.len()), &value);
    for key in 0..8 {
        assert!(client.put(format!("k{key}").as_bytes(), range(region, 0, value.len()), &TWO).unwrap());
    }
    a.region().unwrap().write(0, &vec![0; 4 << 20]).unwrap();
    for key in 0..8 {
        let key = format!("k{key}");
        fake.fill(at(span, 500_001, value.len()), &vec![1; value.len()]);
        let sink = range(region, 500_001, value.len());
        assert_eq!(client.get_with(Get::new(&key, sink)).unwrap(), Some(100_000));
        assert!(fake.bytes(at(span, 500_001, value.len())) == value);
        // The chunks of a part are verified before any byte goes to the device.
        fake.fill(at(span, 500_001, value.len()), &vec![1; value.len()]);
        assert_eq!(client.get_with(Get::new(&key, sink).range(10..)).unwrap(), Some(99_990));
        assert!(fake.bytes(at(span, 500_001, 99_990)) == value[10..]);
    }
    let counters = client.counters();
    assert!(counters.checksum_mismatches > 0);
    assert_eq!((counters.replica_failovers, counters.misses), (counters.checksum_mismatches, 0));
}

#[test]
fn a_node_that_is_killed_in_the_middle_leaves_right_bytes_or_none() {
    let fake = Fake::cuda();
    // Slow copies, so that the kill comes in the middle.
    fake.set("delay_us_max", 500);
    let span = fake.allocate(40 << 20);
    let value = pattern(8, 16 << 20);
    fake.fill(at(span, 0, value.len()), &value);
    for (round, is_put) in [true, false, true, false].into_iter().enumerate() {
        let master = master();
        let address = master.rpc_addr().to_string();
        let mut victim = Process::start("entry", &["node", "victim", &address, "tcp"]);
        let _other = node_over("other", master.rpc_addr(), Fabrics::TCP);
        let mut client = connect(&fake, master.rpc_addr(), Fabrics::TCP, |config| {
            config.transfer_ms_max = 20_000;
        });
        let region = register(&mut client, span);
        let source = range(region, 0, value.len());
        if !is_put {
            assert!(client.put(b"k", source, &TWO).unwrap());
        }
        let killer = std::thread::spawn(move || {
            // timing: any moment will do; with these, some kills come in the middle of the transfer
            std::thread::sleep(Duration::from_millis(5 + 10 * round as u64));
            victim.kill();
        });
        if is_put {
            // Stored on the other node, or an error.
            let _ = client.put(b"k", source, &ONE);
        }
        fake.fill(at(span, 20 << 20, value.len()), &vec![0; value.len()]);
        let read = client.get_with(Get::new(b"k", range(region, 20 << 20, value.len())));
        if let Ok(Some(len)) = read {
            assert_eq!(len, 16 << 20);
            assert!(fake.bytes(at(span, 20 << 20, value.len())) == value, "round {round}");
        }
        killer.join().unwrap();
        // The client goes on, whatever has happened.
        eventually("objects are stored and read", || {
            let stored = client.put(b"after", range(region, 0, 100_000), &ONE);
            let sink = range(region, 20 << 20, 100_000);
            stored.is_ok() && matches!(client.get_with(Get::new(b"after", sink)), Ok(Some(100_000)))
        });
        assert!(fake.bytes(at(span, 20 << 20, 100_000)) == value[..100_000]);
        assert_eq!(client.counters().checksum_mismatches, 0);
        client.unregister(region).unwrap();
    }
}

#[test]
fn after_a_deadline_nothing_is_written_into_device_memory() {
    let fake = Fake::cuda();
    let span = fake.allocate(20 << 20);
    let master = master();
    let node = Process::start("entry", &["node", "a", &master.rpc_addr().to_string(), "tcp"]);
    let mut client = connect(&fake, master.rpc_addr(), Fabrics::TCP, |config| {
        (config.transfer_ms_max, config.unreachable_ms) = (400, 1);
    });
    let region = register(&mut client, span);
    let value = pattern(9, 8 << 20);
    fake.fill(at(span, 0, value.len()), &value);
    assert!(client.put(b"k", range(region, 0, value.len()), &ONE).unwrap());
    let sink = range(region, 10 << 20, value.len());
    assert_eq!(client.get_with(Get::new(b"k", sink)).unwrap(), Some(8 << 20));
    node.signal("STOP");
    let read = client.get_with(Get::new(b"k", sink));
    assert!(matches!(read, Ok(None) | Err(_)), "{read:?}");
    let mark = vec![0x5a; value.len()];
    fake.fill(at(span, 10 << 20, value.len()), &mark);
    // And a put, whose node may still receive what was sent; from the device nothing is read any more.
    assert!(client.put(b"l", range(region, 0, value.len()), &ONE).is_err());
    client.unregister(region).expect("no copy is under way");
    node.signal("CONT");
    // timing: time in which a late write would come
    std::thread::sleep(Duration::from_millis(300));
    assert!(fake.bytes(at(span, 10 << 20, value.len())) == mark, "written late");
    // The client goes on, with the same memory under another id.
    let again = register(&mut client, span);
    assert_ne!(again, region);
    let sink = range(again, 10 << 20, value.len());
    eventually("the node answers again", || matches!(client.get_with(Get::new(b"k", sink)), Ok(Some(_))));
    assert!(fake.bytes(at(span, 10 << 20, value.len())) == value);
}

#[test]
fn memory_that_a_hanging_device_may_still_write_is_held_until_it_has() {
    let fake = Fake::cuda();
    let span = fake.allocate(4 << 20);
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::SHM);
    let mut client = connect(&fake, master.rpc_addr(), Fabrics::SHM, |config| config.transfer_ms_max = 300);
    let region = register(&mut client, span);
    let value = pattern(10, 300_000);
    fake.fill(at(span, 0, value.len()), &value);
    assert!(client.put(b"k", range(region, 0, value.len()), &ONE).unwrap());
    let into = range(region, 2 << 20, value.len());

    fake.set("stalled", 1);
    // timing: the deadline, the time after which hops are given up, and a slow machine
    let (start, limit) = (Instant::now(), Duration::from_secs(20));
    let put = client.put(b"l", range(region, 0, value.len()), &ONE).unwrap_err();
    assert_eq!(put.code(), ErrorCode::TransferFail);
    let held = client.get_with(Get::new(b"k", into)).unwrap_err();
    assert!(matches!(held, StoreError::Held), "{held}");
    // timing: as above
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    let again = client.get_with(Get::new(b"k", into)).unwrap_err();
    assert!(matches!(again, StoreError::Held), "{again}");
    let busy = client.unregister(region).unwrap_err();
    assert!(matches!(busy, StoreError::Memory(RegisterError::Busy { requests: 1.. })), "{busy}");
    // Other memory of the client is not affected.
    assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value));
    assert!(client.counters().quarantined_pieces > 0);

    fake.set("stalled", 0);
    eventually("the memory is usable", || client.get_with(Get::new(b"k", into)).is_ok());
    assert!(fake.bytes(at(span, 2 << 20, value.len())) == value);
    assert!(client.put(b"m", range(region, 0, value.len()), &ONE).unwrap());
    assert_eq!(client.get(b"m").unwrap(), Some(value));
    client.unregister(region).unwrap();
}

#[test]
fn a_device_that_fails_is_an_error_and_not_a_miss() {
    let fake = Fake::cuda();
    let span = fake.allocate(4 << 20);
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::TCP);
    let mut client = client_of(&fake, master.rpc_addr(), Fabrics::TCP);
    let region = register(&mut client, span);
    assert!(client.put(b"k", &pattern(1, 200_000), &ONE).unwrap());
    // An illegal address, which ends the context.
    fake.set("sticky", 700);
    for error in [
        client.get_with(Get::new(b"k", range(region, 0, 200_000))).map(drop).unwrap_err(),
        client.put(b"l", range(region, 0, 200_000), &ONE).map(drop).unwrap_err(),
    ] {
        assert!(matches!(&error, StoreError::DeviceMemory(_)), "{error}");
        assert!(error.to_string().contains("cuda:0"), "{error}");
    }
    // Host memory works as before.
    assert_eq!(client.get(b"k").unwrap(), Some(pattern(1, 200_000)));
}

#[test]
fn memory_that_cannot_be_used_is_refused_before_a_byte_moves() {
    let fake = Fake::cuda();
    fake.set("devices", 2);
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::TCP);
    let mut client = client_of(&fake, master.rpc_addr(), Fabrics::TCP);
    let device = |error: StoreError| {
        assert_eq!(error.code(), ErrorCode::InvalidParams);
        let text = error.to_string();
        match error {
            StoreError::DeviceMemory(error) => (error, text),
            other => panic!("{other}"),
        }
    };
    let refused = |client: &mut Client, span: MemSpan| {
        // SAFETY: nothing is registered.
        device(unsafe { client.register(span) }.unwrap_err())
    };
    let span = fake.allocate(100_000);
    // Memory of a vendor that has no driver here.
    let (error, text) = refused(&mut client, span.at(Location::Device(GpuVendor::Intel, 1)));
    assert!(matches!(error, DeviceError::Unknown { .. }) && text.contains("xpu:1"), "{text}");
    // Spans that leave their allocation, at either end.
    for (first, len) in [(span.as_ptr(), 100_001 + 8192), (span.as_ptr().wrapping_sub(1), 10)] {
        let (error, text) = refused(&mut client, MemSpan::new(first, len));
        assert!(matches!(error, DeviceError::OutOfRange { .. }) && text.contains("bytes at 0x"), "{text}");
    }
    let region = register(&mut client, span);
    let part = register(&mut client, at(span, 50_000, 10));
    client.unregister(part).unwrap();
    let outside = client.put(b"k", range(region, 99_999, 2), &ONE).unwrap_err();
    assert!(matches!(outside, StoreError::Unregistered { .. }), "{outside}");
    assert!(client.put(b"k", range(region, 0, 100_000), &ONE).unwrap());

    // Parts on two devices.
    let elsewhere = fake.allocate_at(1, 100_000, Location::Device(GpuVendor::Nvidia, 1));
    let other = register(&mut client, elsewhere);
    let both =
        [Fragment { offset: 0, into: range(region, 0, 9) }, Fragment { offset: 9, into: range(other, 0, 9) }];
    let (error, _) = device(client.get_with(Get::new(b"k", &both)).unwrap_err());
    assert_eq!(error, DeviceError::SeveralDevices);
    // A whole object may go to both.
    let whole = [range(region, 0, 50_000), range(other, 0, 50_000)];
    assert_eq!(client.get_with(Get::new(b"k", &whole)).unwrap(), Some(100_000));

    // Freed, and freed and allocated again at the same address.
    fake.free(span);
    for _ in 0..2 {
        let put = client.put(b"l", range(region, 0, 10), &ONE).unwrap_err();
        let get = client.get_with(Get::new(b"k", range(region, 0, 100_000))).unwrap_err();
        for error in [put, get] {
            let (error, text) = device(error);
            assert!(matches!(error, DeviceError::Stale { .. }) && text.contains("freed"), "{text}");
        }
        let new = fake.allocate(100_000);
        assert_eq!(new.as_ptr(), span.as_ptr(), "the fake gives out the address again");
        fake.free(new);
    }
    client.unregister(region).unwrap();
    let unknown = client.unregister(region).unwrap_err();
    assert!(matches!(unknown, StoreError::Memory(RegisterError::NotFound)), "{unknown}");
    assert_eq!(client.counters().checksum_mismatches, 0);
}

#[test]
fn slots_that_hold_no_chunk_are_refused() {
    let fake = Fake::cuda();
    let span = fake.allocate(10);
    let master = master();
    let mut client = connect(&fake, master.rpc_addr(), Fabrics::LOCAL, |config| {
        config.engine.gpu.slot_bytes = 4096;
    });
    // SAFETY: nothing is registered.
    let error = unsafe { client.register(span) }.unwrap_err();
    assert!(error.to_string().contains("slots of 4096 bytes"), "{error}");
}

#[test]
#[cfg(feature = "nvmeof")]
fn objects_of_whole_granules_go_from_device_memory_to_storage_and_any_come_back() {
    let fake = Fake::cuda();
    fake.set("delay_us_max", 200);
    let mut it = common::storage::setup();
    // A slot ends within a granule: what is read there must not reach into the next slot.
    let mut client = connect(&fake, it.master.rpc_addr(), common::storage::nvmeof(), |config| {
        (config.engine.gpu.slot_bytes, config.engine.gpu.ring_bytes) = (100_000, 800_000);
    });
    let span = fake.allocate(8 << 20);
    let region = register(&mut client, span);
    for (seed, len) in [4_096, 65_536, 69_632, 1 << 20, 100_000, 5].into_iter().enumerate() {
        let value = pattern(seed as u64, len);
        fake.fill(at(span, 3, len), &value);
        let put = client.put(b"k", range(region, 3, len), &ONE);
        if len.is_multiple_of(4_096) {
            assert!(put.unwrap(), "{len}");
            it.check_stored(b"k", &value);
        } else {
            assert!(put.is_err(), "{len}: a slot has nothing of the rest of the granule");
            assert!(client.put(b"k", &value, &ONE).unwrap());
        }
        let into = 4 << 20;
        fake.fill(at(span, into, len + 9), &vec![0xee; len + 9]);
        let read = client.get_with(Get::new(b"k", range(region, into + 1, len))).unwrap();
        assert_eq!(read, Some(len as u64));
        let found = fake.bytes(at(span, into, len + 9));
        assert!(found[1..=len] == value && found[0] == 0xee && found[len + 1..] == [0xee; 8], "{len}");
        let from = len / 2 - 1;
        let part = Get::new(b"k", range(region, into, len - from)).range(from as u64..);
        assert_eq!(client.get_with(part).unwrap(), Some((len - from) as u64));
        assert!(fake.bytes(at(span, into, len - from)) == value[from..], "{len}");
        it.remove(b"k");
    }
    assert_eq!(client.counters().checksum_mismatches, 0);
    client.unregister(region).unwrap();
}

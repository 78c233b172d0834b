//! Gets and puts of objects, in one process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{
    MIB, client, client_over, codes, eventually, get_batch, get_range, master, master_with, node, node_over,
    pattern, put_batch,
};
use store_client::{
    BufferRange, Client, ErrorCode, Fabrics, Get, MemSpan, Placement, Put, PutOptions, RemoveMode, RpcConfig,
    RpcConnection, Store as _, StoreError,
};
use store_core::message::{Export, Mount, MountSegment, Segments};
use store_core::{Incarnation, MasterConfig, NodeId};

const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };

fn round_trips(client: &mut Client) {
    for (index, len) in [1, 63, 4096, 65_537, 300_000, 3 << 20].into_iter().enumerate() {
        let key = format!("key-{index}").into_bytes();
        let value = pattern(index as u64, len);
        assert!(!client.exists(&key).unwrap());
        assert_eq!(client.get(&key).unwrap(), None);
        assert!(client.put(&key, &value, &ONE).unwrap());
        assert!(!client.put(&key, b"other", &ONE).unwrap(), "an object was overwritten");
        assert!(client.exists(&key).unwrap());
        assert_eq!(client.get(&key).unwrap().as_ref(), Some(&value), "{len} bytes");
    }
    let page = client.master().list(b"key-", 0, 100).unwrap();
    assert_eq!((page.entries.len(), page.cursor), (6, 0));
    let entry = page.entries.iter().find(|entry| entry.key == b"key-2").unwrap();
    assert_eq!((entry.len, entry.replicas, entry.complete), (4096, 1, true));
    assert!(client.master().list(b"none", 0, 100).unwrap().entries.is_empty());
    assert!(client.remove(b"key-0", RemoveMode::Force).unwrap());
    assert!(!client.remove(b"key-0", RemoveMode::Force).unwrap());
    assert_eq!(client.get(b"key-0").unwrap(), None);
    let counters = client.counters();
    assert_eq!((counters.hits, counters.misses, counters.puts), (6, 7, 6));
    assert_eq!((counters.checksum_mismatches, counters.put_failures, counters.quarantined_pieces), (0, 0, 0));
}

#[test]
fn objects_come_back_as_they_were_put_within_a_process() {
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::LOCAL);
    round_trips(&mut client_over(master.rpc_addr(), Fabrics::LOCAL));
}

#[test]
fn objects_come_back_as_they_were_put_over_tcp() {
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::TCP);
    round_trips(&mut client_over(master.rpc_addr(), Fabrics::TCP));
}

#[test]
fn objects_come_back_as_they_were_put_over_the_fastest_fabric() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    round_trips(&mut client(master.rpc_addr()));
}

#[test]
fn registered_memory_needs_no_copy_and_no_more_room_than_the_object() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let from = client.alloc(2 << 20).unwrap();
    let into = client.alloc(2 << 20).unwrap();
    let value = pattern(1, 1_000_000);
    from.write(77, &value).unwrap();
    let source = BufferRange::part(&from, 77, value.len() as u64);
    assert!(client.put(b"k", source, &ONE).unwrap());
    assert_eq!(
        client.get_with(Get::new(b"k", BufferRange::part(&into, 5, 1_000_003))).unwrap(),
        Some(1_000_000)
    );
    let mut found = vec![0; value.len()];
    into.read(5, &mut found).unwrap();
    assert_eq!(found, value);
    assert_eq!(client.get(b"k").unwrap(), Some(value));

    let short = client.get_with(Get::new(b"k", BufferRange::part(&into, 0, 999_999)));
    assert!(matches!(short, Err(StoreError::TooLong { room: 999_999 })), "{short:?}");
    let outside = client.get_with(Get::new(b"k", BufferRange::part(&into, 2 << 20, 1)));
    assert!(matches!(outside, Err(StoreError::Unregistered { offset: 0x20_0000, len: 1 })), "{outside:?}");
    client.unregister(into.id()).unwrap();
    let gone = client.get_with(Get::new(b"k", BufferRange::part(&into, 0, 10)));
    assert!(matches!(gone, Err(StoreError::Unregistered { .. })), "{gone:?}");
}

#[test]
fn plain_memory_of_the_caller_is_filled_as_far_as_the_object_goes() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    for fabrics in [Fabrics::TCP, Fabrics::SHM] {
        let mut client = client_over(master.rpc_addr(), fabrics);
        let value = pattern(1, 1_000_000);
        let _ = client.put(b"k", &value, &ONE).unwrap();
        let mut bytes = vec![0xaa; 1_000_003];
        assert_eq!(client.get_with(Get::new(b"k", &mut bytes[..])).unwrap(), Some(1_000_000));
        assert_eq!(bytes[..1_000_000], value);
        assert_eq!(bytes[1_000_000..], [0xaa; 3]);
        let short = client.get_with(Get::new(b"k", &mut bytes[..999_999]));
        assert!(matches!(short, Err(StoreError::TooLong { room: 999_999 })), "{short:?}");
        assert_eq!(client.get_with(Get::new(b"absent", &mut bytes[..])).unwrap(), None);
        assert_eq!(client.get_with(Get::new(b"", &mut bytes[..])).unwrap(), None);
    }
}

/// Long values are moved directly from and to plain memory: lengths around the shortest such value, and
/// around checksum chunks.
#[test]
fn plain_memory_is_registered_for_one_operation_and_released_with_it() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    for fabrics in [Fabrics::TCP, Fabrics::SHM] {
        let mut client = client_over(master.rpc_addr(), fabrics);
        let own = (client.engine_stats().regions, client.engine_stats().registered_bytes);
        let lens = [32_767, 32_768, 65_535, 65_536, 65_537, 131_072, 300_001];
        let bytes = pattern(9, 400_000);
        let keys: Vec<Vec<u8>> = lens.iter().map(|len| format!("{fabrics:?}-{len}").into_bytes()).collect();
        // They overlap, so only one of them can be registered.
        let items: Vec<(&[u8], &[u8])> =
            keys.iter().zip(lens).map(|(key, len)| (key.as_slice(), &bytes[3..3 + len])).collect();
        assert_eq!(put_batch(&mut client, &items, &ONE), [Ok(true); 7]);
        for (key, len) in keys.iter().zip(lens) {
            let again = format!("{fabrics:?}-alone-{len}").into_bytes();
            assert!(client.put(&again, &bytes[3..3 + len], &ONE).unwrap());
            for key in [key, &again] {
                let mut found = vec![0xaa; len + 2];
                assert_eq!(client.get_with(Get::new(key, &mut found[1..])).unwrap(), Some(len as u64));
                assert_eq!((found[0], found[len + 1]), (0xaa, 0xaa));
                assert_eq!(found[1..=len], bytes[3..3 + len], "{len}");
                // Verified by the checksums of its chunks.
                let tail = get_range(&mut client, key, len as u64 - 30_000..).unwrap().unwrap();
                assert_eq!(tail, bytes[3 + len - 30_000..3 + len], "{len}");
            }
        }
        // Memory of values that cannot be stored or read is released as well.
        let too_long = vec![0; 2 << 30];
        assert!(client.put(b"too long", &too_long, &ONE).is_err());
        assert_eq!(client.get_with(Get::new(b"absent", &mut vec![0; 100_000][..])).unwrap(), None);
        assert!(!client.put(&keys[6], &bytes, &ONE).unwrap(), "the key exists");
        let now = (client.engine_stats().regions, client.engine_stats().registered_bytes);
        assert_eq!(now, own, "{fabrics:?}");
        assert_eq!(client.counters().checksum_mismatches, 0);
    }
}

#[test]
fn bytes_inside_registered_memory_can_be_put_as_plain_ones() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let memory: &'static mut [u8] = Box::leak(pattern(4, 200_000).into_boxed_slice());
    let span = MemSpan::new(memory.as_mut_ptr(), memory.len());
    #[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
    // SAFETY: leaked, so it stays mapped; nothing writes it, and it is only read from here on.
    let region = unsafe { client.register(span) }.unwrap();
    assert!(client.put(b"k", &memory[100..150_100], &ONE).unwrap());
    client.unregister(region).unwrap();
    assert_eq!(client.get(b"k").unwrap().as_deref(), Some(&memory[100..150_100]));
}

#[test]
#[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
fn the_callers_own_memory_can_be_registered() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let memory: &'static mut [u8] = Box::leak(vec![7; 8192].into_boxed_slice());
    let span = MemSpan::new(memory.as_mut_ptr(), memory.len());
    // SAFETY: leaked, so it stays mapped; it is reached through the span alone from here on.
    let region = unsafe { client.register(span) }.unwrap();
    let half = |offset| BufferRange { region, offset, len: 4096 };
    assert!(client.put(b"k", half(0), &ONE).unwrap());
    assert_eq!(client.get_with(Get::new(b"k", half(4096))).unwrap(), Some(4096));
    client.unregister(region).unwrap();
    assert_eq!(client.get(b"k").unwrap(), Some(vec![7; 4096]));
}

#[test]
fn batches_report_a_result_for_each_key() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let keys: Vec<Vec<u8>> = (0..2500).map(|i| format!("k{i}").into_bytes()).collect();
    let values: Vec<Vec<u8>> = (0..2500).map(|i| pattern(i, 100 + i as usize)).collect();
    let mut items: Vec<(&[u8], &[u8])> =
        keys.iter().zip(&values).map(|(k, v)| (k.as_slice(), v.as_slice())).collect();
    items.push((b"", b"no key"));
    items.push((b"no value", b""));
    items.push((b"k7", b"again"));
    let results = put_batch(&mut client, &items, &ONE);
    assert_eq!(results.len(), 2503);
    assert!(results[..2500].iter().all(|result| *result == Ok(true)));
    assert_eq!(results[2500..], [Err(ErrorCode::InvalidKey), Err(ErrorCode::InvalidParams), Ok(false)]);
    let mut wanted: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    wanted.insert(3, b"absent");
    let found = client.batch_exists(&wanted).unwrap();
    assert_eq!(found.iter().filter(|found| !**found).count(), 1);
    assert!(!found[3]);
    // Room for 2,600 bytes: longer values are refused, and each other value begins at the start of its place.
    let mut room = vec![0xaa; 2600 * wanted.len()];
    let mut places: Vec<&mut [u8]> = room.chunks_mut(2600).collect();
    places[5] = &mut [];
    let mut items: Vec<_> =
        wanted.iter().zip(places.iter_mut()).map(|(key, place)| Get::new(*key, &mut **place)).collect();
    let _ = client.batch_get(&mut items);
    let mut lens = codes(items.into_iter().map(Get::into_result));
    assert_eq!((lens.remove(3), lens[4]), (Ok(None), Err(ErrorCode::BufferOverflow)));
    let read = places.iter().enumerate().filter(|(at, _)| *at != 3).map(|(_, bytes)| &**bytes);
    for ((len, bytes), value) in lens.iter().zip(read).zip(&values) {
        if bytes.is_empty() {
            continue;
        }
        let len = len.unwrap().unwrap() as usize;
        assert_eq!(&bytes[..len], value);
        assert!(bytes[len..].iter().all(|byte| *byte == 0xaa), "bytes after the object were written");
    }
    let mut got = get_batch(&mut client, &wanted);
    assert_eq!(got.remove(3), Ok(None));
    for (got, value) in got.iter().zip(&values) {
        assert_eq!(got.as_ref().unwrap().as_ref(), Some(value));
    }
    let removed = codes(client.batch_remove(&wanted, RemoveMode::Force).unwrap());
    assert_eq!(removed[3], Ok(false));
    assert_eq!(removed.iter().filter(|result| **result == Ok(true)).count(), 2500);
    assert_eq!(client.master().stats().unwrap().objects, 0);
}

#[test]
fn batches_of_registered_memory_fill_their_ranges() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let region = client.alloc(1 << 20).unwrap();
    let value = pattern(3, 1 << 19);
    region.write(0, &value).unwrap();
    let keys: Vec<Vec<u8>> = (0..128).map(|i| format!("block-{i}").into_bytes()).collect();
    let range = |base: u64, i: usize| BufferRange::part(&region, base + i as u64 * 4096, 4096);
    let mut from: Vec<_> = keys.iter().enumerate().map(|(i, key)| Put::new(key, range(0, i))).collect();
    assert!(client.batch_put(&mut from, &ONE).is_complete());
    let mut into: Vec<_> = keys.iter().enumerate().map(|(i, key)| Get::new(key, range(1 << 19, i))).collect();
    into[5] = Get::new(b"absent", range(1 << 19, 5));
    let tally = client.batch_get(&mut into);
    assert_eq!((tally.done, tally.missed, tally.failed), (127, 1, 0));
    let results = codes(into.iter().map(Get::result));
    assert_eq!(results[5], Ok(None));
    assert_eq!(results.iter().filter(|result| **result == Ok(Some(4096))).count(), 127);
    let mut found = vec![0; 1 << 19];
    region.read(1 << 19, &mut found).unwrap();
    assert_eq!(found[6 * 4096..], value[6 * 4096..]);
    assert_eq!(found[..5 * 4096], value[..5 * 4096]);
}

#[test]
fn values_longer_than_the_bounce_buffer_pass_in_pieces() {
    let master = master();
    for (name, fabrics) in [("a", Fabrics::LOCAL), ("b", Fabrics::TCP)] {
        let node = node_over(name, master.rpc_addr(), fabrics);
        let mut config = store_client::ClientConfig::new(master.rpc_addr().into()).fabrics(fabrics);
        config.bounce_bytes = 128 << 10;
        let mut client = Client::connect(config).unwrap();
        let values: Vec<Vec<u8>> = (0..4).map(|seed| pattern(seed, 1_234_567 * seed as usize + 1)).collect();
        let items: Vec<(&[u8], &[u8])> = [b"k0", b"k1", b"k2", b"k3"]
            .iter()
            .zip(&values)
            .map(|(key, value)| (key.as_slice(), value.as_slice()))
            .collect();
        assert_eq!(put_batch(&mut client, &items, &ONE), [Ok(true); 4]);
        let keys: Vec<&[u8]> = items.iter().map(|item| item.0).collect();
        for (got, value) in get_batch(&mut client, &keys).into_iter().zip(&values) {
            assert_eq!(got.unwrap().as_ref(), Some(value));
        }
        client.batch_remove(&keys, RemoveMode::Force).unwrap();
        node.stop();
    }
}

#[test]
fn corrupted_bytes_are_a_miss_and_counted() {
    let master = master();
    let node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let value = pattern(1, 5000);
    assert!(client.put(b"k", &value, &ONE).unwrap());
    // The segment is new and has this one object, which lies somewhere among the first bytes: all of them are
    // changed.
    let region = node.region().unwrap();
    for offset in (0..64 << 10).step_by(4096) {
        let mut byte = [0];
        region.read(offset, &mut byte).unwrap();
        region.write(offset, &[byte[0] ^ 1]).unwrap();
    }
    assert_eq!(client.get(b"k").unwrap(), None);
    let into = client.alloc(8192).unwrap();
    assert_eq!(client.get_with(Get::new(b"k", BufferRange::all(&into))).unwrap(), None);
    let counters = client.counters();
    assert_eq!((counters.checksum_mismatches, counters.misses, counters.hits), (2, 2, 0));
}

#[test]
fn a_corrupted_replica_is_skipped_for_a_good_one() {
    let master = master();
    let a = node("a", master.rpc_addr());
    let _b = node("b", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let keys: Vec<Vec<u8>> = (0..8).map(|i| format!("k{i}").into_bytes()).collect();
    for key in &keys {
        assert!(client.put(key, &pattern(1, 4096), &TWO).unwrap());
    }
    assert_eq!(client.master().list(b"", 0, 10).unwrap().entries[0].replicas, 2);
    let region = a.region().unwrap();
    region.write(0, &vec![0; MIB as usize]).unwrap();
    for key in &keys {
        assert_eq!(client.get(key).unwrap(), Some(pattern(1, 4096)));
    }
    let counters = client.counters();
    assert!(counters.checksum_mismatches > 0);
    assert_eq!((counters.replica_failovers, counters.misses), (counters.checksum_mismatches, 0));
}

#[test]
fn a_read_that_outlives_its_lease_is_a_miss() {
    // A lease this short is over before the answer arrives.
    let master = master_with(MasterConfig { lease_ttl_ms: 1, ..MasterConfig::default() });
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    // Copying this takes more than a millisecond on any machine.
    let value = pattern(1, 16 << 20);
    assert!(client.put(b"k", &value, &ONE).unwrap());
    assert_eq!(client.get(b"k").unwrap(), None);
    let counters = client.counters();
    assert_eq!((counters.lease_misses, counters.misses, counters.checksum_mismatches), (1, 1, 0));
}

#[test]
fn a_full_store_evicts_what_was_not_read_and_reports_when_there_is_no_room() {
    let master = master_with(MasterConfig { lease_ttl_ms: 1, lease_guard_ms: 0, ..MasterConfig::default() });
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let value = pattern(1, 1 << 20);
    for i in 0..64 {
        assert!(client.put(format!("k{i}").as_bytes(), &value, &ONE).unwrap());
    }
    assert!(client.master().stats().unwrap().evictions_total >= 32);
    let larger = client.put(b"too large", &pattern(2, 33 << 20), &ONE);
    assert!(matches!(larger, Err(StoreError::Refused(ErrorCode::ObjectTooLarge))), "{larger:?}");
    // Nothing of the failed put is left.
    assert_eq!(client.master().list(b"too large", 0, 10).unwrap().entries, []);
}

#[test]
fn an_object_under_a_lease_is_not_removed_without_force() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let (mut reader, mut client) = (client(master.rpc_addr()), client(master.rpc_addr()));
    assert!(client.put(b"k", b"value", &ONE).unwrap());
    assert!(reader.get(b"k").unwrap().is_some());
    let refused = client.remove(b"k", RemoveMode::Unused);
    assert!(matches!(refused, Err(StoreError::Refused(ErrorCode::ObjectHasLease))), "{refused:?}");
    assert_eq!(refused.unwrap_err().code().code(), -706);
    assert!(client.remove(b"k", RemoveMode::Force).unwrap());
}

#[test]
fn a_put_prefers_the_requested_segment() {
    let master = master();
    let _a = node("a", master.rpc_addr());
    let b = node("b", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let placement = Placement::on(b.status().segment.unwrap());
    for i in 0..10 {
        let options = PutOptions { placement, ..ONE };
        assert!(client.put(format!("k{i}").as_bytes(), &pattern(i, 4096), &options).unwrap());
    }
    let used = |name: &str, client: &mut Client| {
        client.master().segments().unwrap().iter().find(|segment| segment.name == name).unwrap().used
    };
    assert_eq!(used("a", &mut client), 0);
    let largest = |name: &str, client: &mut Client| {
        client
            .master()
            .segments()
            .unwrap()
            .iter()
            .find(|segment| segment.name == name)
            .unwrap()
            .free_bytes_largest
    };
    assert!(largest("b", &mut client) < largest("a", &mut client));
    assert!(used("b", &mut client) >= 10 * 4096);
}

#[test]
fn bytes_for_a_revoked_export_do_not_land_in_its_successor() {
    let master = master();
    let node = node("a", master.rpc_addr());
    let region = node.region().unwrap();
    let mut rpc = RpcConnection::connect(master.rpc_addr().into(), RpcConfig::default()).unwrap();
    let (_, mut infos) = rpc.call::<Segments>(&(), std::iter::empty()).unwrap();
    let real = infos.next().unwrap().unwrap().export;
    let lineage = rpc.welcome().lineage;
    let mut client = client(master.rpc_addr());
    // The answers to a client that asked just before the node exported anew: same place, same addresses.
    let gone = [
        Export { engine: real.engine - 1, ..real },
        Export { region: real.region ^ (1 << 32), ..real },
        Export { region: real.region ^ 1, ..real },
    ];
    for (node_no, export) in gone.into_iter().chain([real]).enumerate() {
        let segment = MountSegment {
            node: NodeId::new(node_no as u64),
            incarnation: Incarnation::new(1),
            name: &format!("old-{node_no}"),
            endpoint: node.endpoint(),
            // Where the node's own segment has nothing yet.
            base: region.addr() + 16 * MIB,
            len: MIB,
            export,
            lineage,
            ..MountSegment::default()
        };
        let mounted = rpc.call::<Mount>(&segment, std::iter::empty()).unwrap().0.mounted().unwrap();
        let options = PutOptions { placement: Placement::on(mounted.segment), ..ONE };
        let key = format!("k{node_no}");
        assert!(client.put(key.as_bytes(), &[0xa5; 4096], &options).unwrap());
        let mut found = [0; 4096];
        region.read(16 * MIB, &mut found).unwrap();
        let landed = client.master().replicas(key.as_bytes()).unwrap()[0].segment == mounted.segment;
        assert_eq!(
            (landed, found == [0xa5; 4096]),
            (export == real, export == real),
            "it was stored elsewhere"
        );
    }
}

#[test]
fn a_reader_that_is_done_returns_its_leases_with_its_next_request() {
    let master = master_with(MasterConfig { lease_ttl_ms: 600_000, ..MasterConfig::default() });
    let _node = node("a", master.rpc_addr());
    let (mut reader, mut other) = (client(master.rpc_addr()), client(master.rpc_addr()));
    let keys: Vec<Vec<u8>> = (0..50u8).map(|i| vec![b'k', i]).collect();
    for key in &keys {
        assert!(reader.put(key, &pattern(1, 10_000), &ONE).unwrap());
    }
    let wanted: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    assert!(get_batch(&mut reader, &wanted).into_iter().all(|got| got.unwrap().is_some()));
    assert!(reader.get(&keys[7]).unwrap().is_some());
    let held = other.remove(&keys[7], RemoveMode::Unused).unwrap_err();
    assert_eq!(held.code(), ErrorCode::ObjectHasLease, "the reader has sent nothing since");
    assert!(reader.exists(b"another").is_ok());
    for removed in other.batch_remove(&wanted, RemoveMode::Unused).unwrap() {
        assert!(removed.unwrap());
    }
    // A lost connection takes its leases with it: they are not returned on the next one.
    assert!(reader.put(b"k", b"v", &ONE).unwrap());
    assert!(reader.get(b"k").unwrap().is_some());
    assert_eq!(reader.get(b"k").unwrap().as_deref(), Some(b"v".as_slice()));
    // A client that disconnects returns its leases: otherwise this lease would hold the object for minutes.
    drop(reader);
    eventually("the lease is returned", || match other.remove(b"k", RemoveMode::Unused) {
        Err(error) => {
            assert_eq!(error.code(), ErrorCode::ObjectHasLease);
            false
        }
        Ok(removed) => removed,
    });
}

//! Puts and gets that take several calls: written and read range by range.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{client_over, codes, eventually, get_range, master, master_with, node_over, pattern};
use store_client::{
    BufferRange, Client, ErrorCode, Existing, Fabrics, Get, Node, PutOptions, PutRange, RemoveMode,
    Store as _, StoreError,
};
use store_core::MasterConfig;
use store_master::MasterHandle;

const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
const CHUNK: u64 = 64 << 10;

fn store(fabrics: Fabrics) -> (MasterHandle, [Node; 2], Client) {
    let master = master();
    let nodes = ["a", "b"].map(|name| node_over(name, master.rpc_addr(), fabrics));
    let client = client_over(master.rpc_addr(), fabrics);
    (master, nodes, client)
}

fn all_ok(results: Vec<Result<(), StoreError>>) {
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// Cuts a length into ranges, in an order of their own.
fn shuffled(len: u64, step: u64, seed: u64) -> Vec<(u64, u64)> {
    let mut ranges: Vec<_> = (0..len).step_by(step as usize).map(|at| (at, step.min(len - at))).collect();
    ranges.sort_by_key(|(at, _)| (at + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    ranges
}

#[test]
fn an_object_is_written_in_any_order_from_any_memory_and_not_seen_before_its_end() {
    for fabrics in [Fabrics::TCP, Fabrics::SHM] {
        let (master, _nodes, mut client) = store(fabrics);
        let mut other = client_over(master.rpc_addr(), fabrics);
        for (round, (len, step)) in
            [(5 * CHUNK + 77, 30_001), (3 * CHUNK, CHUNK), (CHUNK, 1_000), (200_000, 150_000), (9, 1)]
                .into_iter()
                .enumerate()
        {
            let key = format!("k{round}").into_bytes();
            let value = pattern(round as u64, len as usize);
            let memory = client.alloc(len as usize).unwrap();
            memory.write(0, &value).unwrap();
            all_ok(client.start_puts(&[(&key, len)], &TWO));
            for (at, (offset, bytes)) in shuffled(len, step, round as u64).into_iter().enumerate() {
                let plain = &value[offset as usize..(offset + bytes) as usize];
                let halves = plain.split_at(plain.len() / 2);
                let slices = [halves.0, &[], halves.1];
                let region = BufferRange::part(&memory, offset, bytes);
                let write = match at % 3 {
                    0 => PutRange::new(&key, offset, region),
                    1 => PutRange::new(&key, offset, plain),
                    _ => PutRange::new(&key, offset, &slices),
                };
                all_ok(client.write_puts(&[write]));
                assert!(!other.exists(&key).unwrap());
                assert_eq!(other.get(&key).unwrap(), None, "{fabrics} {round}");
            }
            all_ok(client.end_puts(&[&key]));
            assert_eq!(other.get(&key).unwrap().as_ref(), Some(&value), "{fabrics} {round}");
            // A part is verified by the trailer.
            let part = get_range(&mut other, &key, len / 3..).unwrap();
            assert_eq!(part.as_deref(), Some(&value[(len / 3) as usize..]), "{fabrics} {round}");
            assert_eq!(other.master().replicas(&key).unwrap().len(), 2);
            client.unregister(memory.id()).unwrap();
        }
        assert_eq!(other.counters().checksum_mismatches, 0);
    }
}

#[test]
fn layers_of_many_objects_are_written_together_layer_by_layer() {
    const LAYERS: u64 = 16;
    const LAYER: u64 = 10_000;
    let (_master, _nodes, mut client) = store(Fabrics::SHM);
    let keys: Vec<Vec<u8>> = (0..20).map(|block| format!("block/{block}").into_bytes()).collect();
    let items: Vec<(&[u8], u64)> = keys.iter().map(|key| (key.as_slice(), LAYERS * LAYER)).collect();
    all_ok(client.start_puts(&items, &ONE));
    let value = |block: usize| pattern(block as u64, (LAYERS * LAYER) as usize);
    for layer in (0..LAYERS).rev() {
        let values: Vec<Vec<u8>> = (0..keys.len()).map(value).collect();
        let start = layer * LAYER;
        let writes: Vec<_> = keys
            .iter()
            .zip(&values)
            .map(|(key, value)| PutRange::new(key, start, &value[start as usize..][..LAYER as usize]))
            .collect();
        all_ok(client.write_puts(&writes));
    }
    let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    all_ok(client.end_puts(&names));
    for (block, key) in keys.iter().enumerate() {
        assert_eq!(client.get(key).unwrap(), Some(value(block)));
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_the_values_and_the_put_goes_on() {
    let (_master, _nodes, mut client) = store(Fabrics::TCP);
    let value = pattern(1, 100_000);
    let refused = |results: Vec<Result<(), StoreError>>| {
        let [Err(error)] = &results[..] else { panic!("{results:?}") };
        assert_eq!(error.code(), ErrorCode::InvalidParams);
        error.to_string()
    };
    client.put(b"there", b"x".as_slice(), &ONE).unwrap();
    let started =
        client.start_puts(&[(b"k", 100_000), (b"there", 5), (b"k", 5), (b"", 5), (b"none", 0)], &ONE);
    let taken = Err(ErrorCode::ObjectAlreadyExists);
    assert_eq!(
        codes(started),
        [Ok(()), taken, taken, Err(ErrorCode::InvalidKey), Err(ErrorCode::InvalidParams)]
    );
    assert_eq!(codes(client.start_puts(&[(b"k", 1)], &ONE)), [taken], "it is open");
    assert!(
        refused(client.write_puts(&[PutRange::new("other", 0, &value[..1])])).contains("start one first")
    );
    for (offset, len) in [(0, 0), (100_000, 1), (99_999, 2), (u64::MAX, 1)] {
        let text = refused(client.write_puts(&[PutRange::new("k", offset, &value[..len])]));
        assert!(text.contains(&offset.to_string()), "{text}");
    }
    all_ok(client.write_puts(&[PutRange::new("k", 10, &value[10..70_000])]));
    for (offset, len) in [(10, 1), (69_999, 1), (0, 11), (69_999, 5)] {
        refused(client.write_puts(&[PutRange::new("k", offset, &value[..len])]));
    }
    let foreign = BufferRange { region: te_core::RegionId::new(77, 1), offset: 0, len: 5 };
    refused(client.write_puts(&[PutRange::new("k", 0, foreign)]));
    assert!(refused(client.end_puts(&[b"k"])).contains("30010 bytes"));
    // Twice in one batch: the first counts.
    let halves = [PutRange::new("k", 0, &value[..10]), PutRange::new("k", 5, &value[5..10])];
    let written = codes(client.write_puts(&halves));
    assert_eq!(written, [Ok(()), Err(ErrorCode::InvalidParams)]);
    all_ok(client.write_puts(&[PutRange::new("k", 70_000, &value[70_000..])]));
    assert_eq!(codes(client.end_puts(&[b"k", b"k"])), [Ok(()), Err(ErrorCode::InvalidParams)]);
    assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value));
    refused(client.end_puts(&[b"k"]));
    refused(client.revoke_puts(&[b"k"]));
    refused(client.revoke_puts(&[b"never"]));
    refused(client.write_puts(&[PutRange::new("k", 0, &value[..1])]));
}

#[test]
fn a_revoked_put_never_exists_and_an_open_upsert_leaves_the_old_object_until_its_end() {
    let (_master, _nodes, mut client) = store(Fabrics::TCP);
    let (old, new) = (pattern(1, 150_000), pattern(2, 90_000));
    all_ok(client.start_puts(&[(b"k", 90_000)], &ONE));
    all_ok(client.write_puts(&[PutRange::new("k", 0, &new)]));
    all_ok(client.revoke_puts(&[b"k"]));
    assert_eq!(client.get(b"k").unwrap(), None);
    let stats = client.master().stats().unwrap();
    assert_eq!((stats.used_bytes, stats.quarantined_bytes), (0, 0), "the space is free at once");

    let upsert = PutOptions { existing: Existing::REPLACE, ..ONE };
    client.put(b"k", &old, &ONE).unwrap();
    for ends in [false, true] {
        all_ok(client.start_puts(&[(b"k", 90_000)], &upsert));
        all_ok(client.write_puts(&[PutRange::new("k", 0, &new)]));
        assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&old));
        all_ok(if ends { client.end_puts(&[b"k"]) } else { client.revoke_puts(&[b"k"]) });
        assert_eq!(client.get(b"k").unwrap().as_ref(), Some(if ends { &new } else { &old }));
    }
}

#[test]
fn after_the_node_is_gone_a_put_can_only_be_revoked() {
    let (_master, [one, two], mut client) = store(Fabrics::TCP);
    two.stop();
    let value = pattern(1, 100_000);
    all_ok(client.start_puts(&[(b"k", 100_000), (b"l", 100_000)], &ONE));
    all_ok(client.write_puts(&[PutRange::new("k", 0, &value[..50_000])]));
    one.stop();
    let written = client.write_puts(&[PutRange::new("k", 50_000, &value[50_000..])]);
    assert_eq!(codes(written), [Err(ErrorCode::TransferFail)]);
    assert_eq!(codes(client.end_puts(&[b"k"])), [Err(ErrorCode::TransferFail)]);
    assert_eq!(
        codes(client.write_puts(&[PutRange::new("k", 50_000, &value[50_000..])])),
        [Err(ErrorCode::TransferFail)]
    );
    // The master has dropped the put with its node; that is as wanted.
    all_ok(client.revoke_puts(&[b"k", b"l"]));
    assert_eq!(codes(client.revoke_puts(&[b"k"])), [Err(ErrorCode::InvalidParams)]);
}

#[test]
fn started_gets_are_read_in_ranges_without_the_master() {
    let (master, _nodes, mut client) = store(Fabrics::SHM);
    let mut other = client_over(master.rpc_addr(), Fabrics::SHM);
    let (value, short) = (pattern(1, 300_000), pattern(2, 1_000));
    client.put(b"a", &value, &TWO).unwrap();
    client.put(b"b", &short, &ONE).unwrap();
    let started = codes(client.start_gets(&[b"a", b"none", b"b", b"a"]));
    assert_eq!(started, [Ok(300_000), Err(ErrorCode::ObjectNotFound), Ok(1_000), Ok(300_000)]);
    let gets = client.master().stats().unwrap().gets_total;
    let memory = client.alloc(300_000).unwrap();
    // Removed, its space is held by the lease.
    assert!(other.remove(b"a", RemoveMode::Force).unwrap());
    assert_eq!(other.remove(b"b", RemoveMode::Unused).unwrap_err().code(), ErrorCode::ObjectHasLease);
    for (start, end) in [(0, 300_000), (5, 6), (65_535, 65_537), (131_072, 196_608), (299_999, 300_000)] {
        let (mut plain, mut whole) = (vec![0; (end - start) as usize], Vec::new());
        let mut items = [
            Get::new("a", &mut plain[..]).range(start..end),
            Get::new("a", BufferRange::part(&memory, start, end - start)).range(start..end),
            Get::new("b", &mut whole),
        ];
        assert!(client.batch_get_started(&mut items).is_complete());
        drop(items);
        let wanted = &value[start as usize..end as usize];
        assert_eq!((&plain[..], &whole), (wanted, &short), "{start}..{end}");
        memory.read(start, &mut plain).unwrap();
        assert_eq!(plain, wanted, "{start}..{end}");
    }
    assert_eq!(client.master().stats().unwrap().gets_total, gets, "no further request");

    let mut bytes = Vec::new();
    let mut beyond = [Get::new("b", &mut bytes).range(999..1_001)];
    assert_eq!(client.batch_get_started(&mut beyond).failed, 1);
    assert_eq!(client.end_gets(&[b"a", b"none", b"b"]), [true, false, true]);
    let (mut bytes, mut more) = (Vec::new(), Vec::new());
    let mut items = [Get::new("a", &mut bytes), Get::new("b", &mut more)];
    let tally = client.batch_get_started(&mut items);
    assert_eq!((tally.done, tally.failed), (1, 1), "a was started twice");
    assert_eq!(codes([items[1].result()]), [Err(ErrorCode::InvalidParams)]);
    assert_eq!(client.end_gets(&[b"a"]), [true]);
    assert_eq!(client.end_gets(&[b"a"]), [false]);
    // The leases are returned with the next request.
    assert!(!client.exists(b"a").unwrap());
    let stats = client.master().stats().unwrap();
    assert_eq!((stats.deferred_bytes, stats.objects_leased), (0, 0));
    assert!(other.remove(b"b", RemoveMode::Unused).unwrap());
}

#[test]
fn a_lease_is_renewed_by_reads_as_long_as_the_object_is_the_same() {
    let master = master_with(MasterConfig { lease_ttl_ms: 400, ..MasterConfig::default() });
    let _node = node_over("a", master.rpc_addr(), Fabrics::default());
    let mut client = client_over(master.rpc_addr(), Fabrics::default());
    let (old, new) = (pattern(1, 70_000), pattern(2, 70_000));
    client.put(b"k", &old, &ONE).unwrap();
    assert_eq!(codes(client.start_gets(&[b"k"])), [Ok(70_000)]);
    let read = |client: &mut Client| {
        let mut bytes = Vec::new();
        let mut items = [Get::new("k", &mut bytes)];
        let _ = client.batch_get_started(&mut items);
        let [item] = items;
        item.into_result().unwrap().map(|_| bytes)
    };
    let gets = client.master().stats().unwrap().gets_total;
    eventually("it is renewed several times", || {
        assert_eq!(read(&mut client).as_ref(), Some(&old));
        client.master().stats().unwrap().gets_total >= gets + 3
    });
    // Replaced: it is read under the old lease, or not at all, and never as the other object.
    client.upsert(b"k", &new, &ONE).unwrap();
    eventually("it is gone", || match read(&mut client) {
        None => true,
        Some(bytes) => {
            assert_eq!(bytes, old);
            false
        }
    });
    assert_eq!(read(&mut client), None, "and stays gone");
    assert_eq!(client.end_gets(&[b"k"]), [true]);
    assert_eq!(codes(client.start_gets(&[b"k"])), [Ok(70_000)]);
    assert_eq!(read(&mut client).as_ref(), Some(&new));
    // A master that is gone: what is left of the lease is enough, then it is a miss.
    master.stop().unwrap();
    eventually("it is gone", || match read(&mut client) {
        None => true,
        Some(bytes) => {
            assert_eq!(bytes, new);
            false
        }
    });
    let ended = codes(client.start_puts(&[(b"p", 5)], &ONE));
    assert!(ended[0].is_err(), "{ended:?}");
}

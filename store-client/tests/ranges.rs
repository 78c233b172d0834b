//! Reads of parts of objects, and puts and gets with several buffers, in one process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::ops::Bound;

use common::{client, client_over, codes, get_range, master, node, node_over, pattern, put_batch};
use store_client::{
    BufferRange, Client, ErrorCode, Fabrics, Fragment, Get, MemSpan, Node, PARTS_MAX, Put, PutOptions,
    RemoveMode, SharedRegion, Sink, Source, Store as _, StoreError,
};
use store_core::chunks::{CHUNK_BYTES, stored_len, trailer_len};

const ONE: PutOptions = PutOptions::DEFAULT;
const TWO: PutOptions = PutOptions { replicas: 2, ..PutOptions::DEFAULT };
const B: u64 = CHUNK_BYTES;

fn code<T: std::fmt::Debug>(result: Result<T, StoreError>) -> ErrorCode {
    result.unwrap_err().code()
}

/// Reads as many bytes of an object as the range has, at `offset`.
fn get_range_into(
    client: &mut Client,
    key: &[u8],
    offset: u64,
    into: BufferRange,
) -> Result<Option<u64>, StoreError> {
    let end = offset.checked_add(into.len).map_or(Bound::Included(u64::MAX), Bound::Excluded);
    client.get_with(Get::new(key, into).range((Bound::Included(offset), end)))
}

/// Reads parts of objects in one batch.
fn get_fragments(client: &mut Client, items: &[(&[u8], &[Fragment])]) -> Vec<Result<Option<u64>, ErrorCode>> {
    let mut gets: Vec<_> = items.iter().map(|(key, parts)| Get::new(*key, *parts)).collect();
    let _ = client.batch_get(&mut gets);
    codes(gets.into_iter().map(Get::into_result))
}

fn read(region: &SharedRegion, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    region.read(offset, &mut bytes).unwrap();
    bytes
}

/// Offset of the object in the node's memory: a multiple of 64 bytes.
fn find(node: &Node, value: &[u8]) -> u64 {
    let region = node.region().unwrap();
    let start = &value[..value.len().min(64)];
    (0..region.len() as u64 - 64)
        .step_by(64)
        .find(|offset| read(&region, *offset, start.len() as u64) == start)
        .expect("the object is there")
}

fn spoil(node: &Node, offset: u64) {
    let region = node.region().unwrap();
    let byte = read(&region, offset, 1)[0];
    region.write(offset, &[byte ^ 0x40]).unwrap();
}

/// The ways to cut an object of `len` bytes that make a difference.
fn interesting(len: u64) -> Vec<(u64, u64)> {
    let mut points = vec![0, 1, 100, B - 1, B, B + 1, 2 * B - 1, 2 * B, 3 * B + 7, 4 * B, 5 * B];
    points.extend([len.saturating_sub(1), len, len / B * B, len / 2]);
    points.retain(|point| *point <= len);
    points.sort_unstable();
    points.dedup();
    let pairs = points.iter().flat_map(|start| points.iter().map(move |end| (*start, *end)));
    pairs.filter(|(start, end)| start < end).collect()
}

fn parts_come_back(client: &mut Client) {
    for (index, len) in [1, 64, B - 1, B, B + 1, 2 * B, 5 * B + 1000].into_iter().enumerate() {
        let key = format!("key-{index}").into_bytes();
        let value = pattern(index as u64, len as usize);
        assert!(client.put(&key, &value, &ONE).unwrap());
        let memory = client.alloc(len as usize + 128).unwrap();
        for (start, end) in interesting(len) {
            let wanted = &value[start as usize..end as usize];
            assert_eq!(
                get_range(client, &key, start..end).unwrap().as_deref(),
                Some(wanted),
                "{len}: {start}..{end}"
            );
            let blank = vec![0xee; len as usize + 128];
            memory.write(0, &blank).unwrap();
            let into = BufferRange::part(&memory, 33, end - start);
            assert_eq!(get_range_into(client, &key, start, into).unwrap(), Some(end - start));
            let found = read(&memory, 0, len + 128);
            let after = 33 + wanted.len();
            assert_eq!(found[33..after], *wanted, "{len}: {start}..{end}");
            assert_eq!(found[..33], blank[..33], "bytes before the range were written");
            assert_eq!(found[after..], blank[after..], "bytes after the range were written");
        }
        assert_eq!(get_range(client, &key, 0..).unwrap().as_deref(), Some(&value[..]));
        assert_eq!(get_range(client, &key, ..=len - 1).unwrap().as_deref(), Some(&value[..]));
        assert_eq!(get_range(client, &key, len - 1..).unwrap().as_deref(), Some(&value[len as usize - 1..]));
        client.unregister(memory.id()).unwrap();
    }
    let counters = client.counters();
    assert_eq!((counters.misses, counters.checksum_mismatches, counters.quarantined_pieces), (0, 0, 0));
}

#[test]
fn parts_are_those_of_the_whole_within_a_process() {
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::LOCAL);
    parts_come_back(&mut client_over(master.rpc_addr(), Fabrics::LOCAL));
}

#[test]
fn parts_are_those_of_the_whole_over_tcp() {
    let master = master();
    let _node = node_over("a", master.rpc_addr(), Fabrics::TCP);
    parts_come_back(&mut client_over(master.rpc_addr(), Fabrics::TCP));
}

#[test]
fn parts_that_do_not_exist_are_an_error_and_objects_that_do_not_exist_are_a_miss() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let memory = client.alloc(4 * B as usize).unwrap();
    let len = 2 * B + 10;
    client.put(b"long", &pattern(1, len as usize), &ONE).unwrap();
    client.put(b"short", &pattern(2, 100), &ONE).unwrap();
    let part = |count: u64| BufferRange::part(&memory, 0, count);
    for (key, len) in [(b"long".as_slice(), len), (b"short", 100)] {
        assert_eq!(get_range_into(&mut client, key, len - 1, part(1)).unwrap(), Some(1));
        for (offset, count) in [
            (len, 1),
            (0, len + 1),
            (len - 1, 2),
            (len + B, 1),
            (0, 0),
            (len, 0),
            (u64::MAX, 1),
            (u64::MAX - 1, 2),
        ] {
            assert_eq!(
                code(get_range_into(&mut client, key, offset, part(count))),
                ErrorCode::InvalidParams,
                "{offset}+{count}"
            );
        }
        assert_eq!(code(get_range(&mut client, key, len..)), ErrorCode::InvalidParams);
        assert_eq!(code(get_range(&mut client, key, u64::MAX..)), ErrorCode::InvalidParams);
        assert_eq!(code(get_range(&mut client, key, ..=u64::MAX)), ErrorCode::InvalidParams);
        assert_eq!(code(get_range(&mut client, key, 5..5)), ErrorCode::InvalidParams);
        assert_eq!(code(get_range(&mut client, key, 0..len + 1)), ErrorCode::InvalidParams);
    }
    let outside = BufferRange::part(&memory, 4 * B - 1, 2);
    assert_eq!(code(get_range_into(&mut client, b"long", 0, outside)), ErrorCode::InvalidParams);
    assert_eq!(get_range(&mut client, b"absent", 0..1).unwrap(), None);
    assert_eq!(get_range_into(&mut client, b"absent", u64::MAX - 1, part(1)).unwrap(), None);
    let too_many = vec![Fragment { offset: 0, into: part(1) }; PARTS_MAX + 1];
    assert_eq!(get_fragments(&mut client, &[(b"long", &too_many)]), [Err(ErrorCode::InvalidParams)]);
    assert_eq!(get_fragments(&mut client, &[(b"long", &[])]), [Err(ErrorCode::InvalidParams)]);
}

#[test]
fn a_part_longer_than_the_limit_of_a_client_is_refused_before_it_is_read() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut config = store_client::ClientConfig::new(master.rpc_addr().into());
    config.value_bytes_max = B;
    let mut client = Client::connect(config).unwrap();
    let value = pattern(1, 3 * B as usize);
    client.put(b"k", &value, &ONE).unwrap();
    assert_eq!(code(client.get(b"k")), ErrorCode::BufferOverflow);
    assert_eq!(code(get_range(&mut client, b"k", 0..B + 1)), ErrorCode::BufferOverflow);
    assert_eq!(code(get_range(&mut client, b"k", B..)), ErrorCode::BufferOverflow);
    assert_eq!(get_range(&mut client, b"k", 2 * B..).unwrap().as_deref(), Some(&value[2 * B as usize..]));
    assert_eq!(get_range(&mut client, b"k", 7..B + 7).unwrap().as_deref(), Some(&value[7..B as usize + 7]));
}

#[test]
fn many_parts_of_many_objects_are_read_with_one_request() {
    for fabrics in [Fabrics::LOCAL, Fabrics::TCP] {
        let master = master();
        let _node = node_over("a", master.rpc_addr(), fabrics);
        let mut client = client_over(master.rpc_addr(), fabrics);
        let values: Vec<Vec<u8>> = (0..3).map(|seed| pattern(seed, 6 * B as usize + 321)).collect();
        let keys = [b"k0".as_slice(), b"k1", b"k2"];
        let items: Vec<(&[u8], &[u8])> = keys.iter().copied().zip(values.iter().map(Vec::as_slice)).collect();
        assert!(put_batch(&mut client, &items, &ONE).iter().all(Result::is_ok));
        let memory = client.alloc(32 * B as usize).unwrap();
        let mut at = 0;
        let mut part = |offset: u64, len: u64| {
            let into = BufferRange::part(&memory, at, len);
            at += len + 13;
            Fragment { offset, into }
        };
        // Out of order, overlapping, adjacent, a whole chunk twice, and most of the object.
        let parts = vec![
            part(5 * B, B + 321),
            part(10, 20),
            part(25, 50),
            part(B, B),
            part(B, B),
            part(2 * B, 7),
            part(2 * B + 7, B),
            part(B - 1, 4 * B),
        ];
        let wanted: Vec<(&[u8], &[Fragment])> =
            vec![(keys[1], &parts), (b"absent", &parts[..2]), (keys[2], &parts[..1])];
        let gets = client.master().stats().unwrap().gets_total;
        let bytes: u64 = parts.iter().map(|part| part.into.len).sum();
        // The last one and the first share memory, so they are read one after the other.
        assert_eq!(get_fragments(&mut client, &wanted[..2]), [Ok(Some(bytes)), Ok(None)]);
        assert_eq!(client.master().stats().unwrap().gets_total, gets + 2, "each key is looked up once");
        for Fragment { offset, into } in &parts {
            let found = read(&memory, into.offset, into.len);
            assert_eq!(found, values[1][*offset as usize..][..into.len as usize], "{offset}+{}", into.len);
        }
        assert_eq!(get_fragments(&mut client, &wanted[2..]), [Ok(Some(B + 321))]);
        assert_eq!(read(&memory, 0, B + 321), values[2][5 * B as usize..]);
        let beyond = [Fragment { offset: 6 * B, into: BufferRange::part(&memory, 0, 322) }];
        let mixed: Vec<(&[u8], &[Fragment])> = vec![(keys[0], &beyond), (keys[0], &parts[..3])];
        assert_eq!(get_fragments(&mut client, &mixed), [Err(ErrorCode::InvalidParams), Ok(Some(B + 391))]);
    }
}

#[test]
fn a_damaged_chunk_is_a_miss_for_parts_that_need_it_and_for_no_other() {
    for fabrics in [Fabrics::LOCAL, Fabrics::TCP] {
        let master = master();
        let node = node_over("a", master.rpc_addr(), fabrics);
        let mut client = client_over(master.rpc_addr(), fabrics);
        let value = pattern(1, 4 * B as usize + 50);
        client.put(b"k", &value, &ONE).unwrap();
        let memory = client.alloc(8 * B as usize).unwrap();
        let at = find(&node, &value);
        spoil(&node, at + 2 * B + 5);
        let into = |len: u64| BufferRange::part(&memory, 0, len);
        // Directly into the destination, through the bounce buffer, together with good ones, and into plain
        // memory.
        for (start, end) in [
            (2 * B, 3 * B),
            (2 * B + 100, 2 * B + 101),
            (0, 4 * B),
            (2 * B - 1, 2 * B + 1),
            (3 * B - 1, 3 * B + 1),
        ] {
            assert_eq!(
                get_range_into(&mut client, b"k", start, into(end - start)).unwrap(),
                None,
                "{start}..{end}"
            );
            assert_eq!(get_range(&mut client, b"k", start..end).unwrap(), None, "{start}..{end}");
        }
        assert_eq!(client.counters().checksum_mismatches, 10);
        for (start, end) in [(0, 2 * B), (5, 2 * B), (3 * B, 4 * B + 50), (3 * B + 1, 4 * B + 49)] {
            assert_eq!(
                get_range_into(&mut client, b"k", start, into(end - start)).unwrap(),
                Some(end - start)
            );
            assert_eq!(read(&memory, 0, end - start), value[start as usize..end as usize]);
            let plain = get_range(&mut client, b"k", start..end).unwrap();
            assert_eq!(plain.as_deref(), Some(&value[start as usize..end as usize]));
        }
        assert_eq!(client.counters().checksum_mismatches, 10);
        assert_eq!(client.get(b"k").unwrap(), None);
    }
}

#[test]
fn a_damaged_trailer_is_a_miss_of_every_part_and_does_not_affect_the_whole() {
    let master = master();
    let node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let value = pattern(1, 3 * B as usize + 50);
    client.put(b"k", &value, &ONE).unwrap();
    let trailer = find(&node, &value) + value.len() as u64;
    for byte in 0..trailer_len(value.len() as u64) {
        spoil(&node, trailer + byte);
        assert_eq!(get_range(&mut client, b"k", 5..6).unwrap(), None, "byte {byte}");
        assert_eq!(get_range(&mut client, b"k", 3 * B..).unwrap(), None, "byte {byte}");
        spoil(&node, trailer + byte);
    }
    assert_eq!(get_range(&mut client, b"k", 5..6).unwrap().as_deref(), Some(&value[5..6]));
    assert_eq!(client.counters().checksum_mismatches, 32);
    spoil(&node, trailer);
    assert_eq!(client.get(b"k").unwrap().as_ref(), Some(&value));
    // A chunk and a checksum that match each other, but were not committed.
    let region = node.region().unwrap();
    let other = pattern(2, B as usize);
    spoil(&node, trailer);
    region.write(trailer - 50 - 3 * B, &other).unwrap();
    region.write(trailer, &te_host::crc32c_of(0, &other).to_le_bytes()).unwrap();
    assert_eq!(get_range(&mut client, b"k", 0..B).unwrap(), None, "another chunk");
    assert_eq!(get_range(&mut client, b"k", B..2 * B).unwrap(), None, "another trailer");
}

#[test]
fn a_damaged_part_is_read_from_another_replica() {
    let master = master();
    let nodes = [node("a", master.rpc_addr()), node("b", master.rpc_addr())];
    let mut client = client(master.rpc_addr());
    let memory = client.alloc(2 * B as usize).unwrap();
    let values: Vec<Vec<u8>> = (0..8).map(|seed| pattern(seed, 2 * B as usize + 9)).collect();
    for (i, value) in values.iter().enumerate() {
        client.put(format!("k{i}").as_bytes(), value, &TWO).unwrap();
        spoil(&nodes[0], find(&nodes[0], value) + B + 4);
    }
    for (i, value) in values.iter().enumerate() {
        let key = format!("k{i}").into_bytes();
        assert_eq!(
            get_range(&mut client, &key, B..B + 10).unwrap().as_deref(),
            Some(&value[B as usize..][..10])
        );
        let into = BufferRange::part(&memory, 0, B + 9);
        assert_eq!(get_range_into(&mut client, &key, B, into).unwrap(), Some(B + 9));
        assert_eq!(read(&memory, 0, B + 9), value[B as usize..]);
    }
    let counters = client.counters();
    assert!(counters.checksum_mismatches > 0);
    assert_eq!((counters.misses, counters.replica_failovers), (0, counters.checksum_mismatches));
}

#[test]
fn parts_and_wholes_agree_however_an_object_was_put() {
    let master = master();
    for (name, fabrics) in [("a", Fabrics::LOCAL), ("b", Fabrics::TCP)] {
        let node = node_over(name, master.rpc_addr(), fabrics);
        let mut config = store_client::ClientConfig::new(master.rpc_addr().into()).fabrics(fabrics);
        // So small that one chunk at a time fits.
        config.bounce_bytes = 2 * B as usize;
        let mut client = Client::connect(config).unwrap();
        for len in [B + 1, 4 * B, 20 * B + 17] {
            let value = pattern(len, len as usize);
            let source = client.alloc(len as usize).unwrap();
            source.write(0, &value).unwrap();
            let third = len / 3;
            let slices = [&value[..third as usize], &[], &value[third as usize..]];
            let ranges = [
                BufferRange::part(&source, 0, third),
                BufferRange::part(&source, 9, 0),
                BufferRange::part(&source, third, len - third),
            ];
            assert!(client.put(b"plain", &value, &TWO).unwrap());
            assert!(client.put(b"parts", &slices, &TWO).unwrap());
            assert!(client.put(b"from", BufferRange::all(&source), &TWO).unwrap());
            assert!(client.put(b"buffers", &ranges, &TWO).unwrap());
            for key in [b"plain".as_slice(), b"parts", b"from", b"buffers"] {
                assert_eq!(client.get(key).unwrap().as_ref(), Some(&value));
                for (start, end) in [(0, len), (1, len - 1), (B, len), (B - 1, B + 1)] {
                    let found = get_range(&mut client, key, start..end).unwrap();
                    assert_eq!(found.as_deref(), Some(&value[start as usize..end as usize]));
                }
                assert!(client.remove(key, RemoveMode::Force).unwrap());
            }
        }
        node.stop();
    }
}

#[test]
#[allow(unsafe_code, reason = "only the caller can promise what registration needs")]
fn an_object_goes_from_and_into_buffers_of_different_regions() {
    let master = master();
    for (name, fabrics) in [("a", Fabrics::LOCAL), ("b", Fabrics::TCP)] {
        let node = node_over(name, master.rpc_addr(), fabrics);
        let mut client = client_over(master.rpc_addr(), fabrics);
        let shared = client.alloc(4 * B as usize).unwrap();
        let raw: &'static mut [u8] = Box::leak(vec![0; 4 * B as usize].into_boxed_slice());
        let span = MemSpan::new(raw.as_mut_ptr(), raw.len());
        // SAFETY: leaked, so it stays mapped; it is reached through the span alone from here on.
        let region = unsafe { client.register(span) }.unwrap();
        let value = pattern(7, 2 * B as usize + 100);
        shared.write(0, &value).unwrap();
        assert!(client.put(b"first", BufferRange::all(&shared), &ONE).unwrap());
        // Into the caller's own memory, and then alternately from there and from the engine's.
        let own = |offset, len| BufferRange { region, offset, len };
        assert_eq!(
            client.get_with(Get::new(b"first", &[own(0, 1), own(1, 4 * B - 1)])).unwrap(),
            Some(4 * B)
        );
        let turns = [own(0, 10), BufferRange::part(&shared, 10, B), own(10 + B, B + 90)];
        assert!(client.put(b"second", &turns, &ONE).unwrap());
        assert_eq!(client.get(b"second").unwrap().as_ref(), Some(&value));
        shared.write(0, &vec![0; 4 * B as usize]).unwrap();
        let apart = [
            BufferRange::part(&shared, 3 * B, 50),
            own(2, 0),
            BufferRange::part(&shared, 0, 2 * B),
            own(9, 400),
        ];
        assert_eq!(client.get_with(Get::new(b"second", &apart)).unwrap(), Some(2 * B + 100));
        assert_eq!(read(&shared, 3 * B, 50), value[..50]);
        assert_eq!(read(&shared, 0, 2 * B), value[50..2 * B as usize + 50]);
        // A value that is longer than all of them together does not fit.
        assert_eq!(code(client.get_with(Get::new(b"second", &apart[..3]))), ErrorCode::BufferOverflow);
        let fragments = [
            Fragment { offset: 100, into: own(5, 20) },
            Fragment { offset: B, into: BufferRange::part(&shared, 1, B) },
        ];
        assert_eq!(get_fragments(&mut client, &[(b"second", &fragments)]), [Ok(Some(B + 20))]);
        assert_eq!(read(&shared, 1, B), value[B as usize..2 * B as usize]);
        assert!(client.put(b"third", &[own(5, 20)], &ONE).unwrap());
        assert_eq!(client.get(b"third").unwrap().as_deref(), Some(&value[100..120]));
        for key in [b"first".as_slice(), b"second", b"third"] {
            client.remove(key, RemoveMode::Force).unwrap();
        }
        client.unregister(region).unwrap();
        assert_eq!(code(client.put(b"fourth", &turns, &ONE)), ErrorCode::InvalidParams);
        node.stop();
    }
}

/// Keys and values of 80 layers: 160 buffers, and each object has one page of every buffer.
#[test]
fn pages_of_160_buffers_go_and_come_in_one_batch_with_a_result_each() {
    const BUFFERS: u64 = 160;
    const PAGES: u64 = 24;
    const PAGE: u64 = 1_000;
    let master = master();
    for (name, fabrics) in [("a", Fabrics::LOCAL), ("b", Fabrics::TCP)] {
        let node = node_over(name, master.rpc_addr(), fabrics);
        let mut client = client_over(master.rpc_addr(), fabrics);
        let buffers: Vec<_> = (0..BUFFERS).map(|_| client.alloc((PAGES * PAGE) as usize).unwrap()).collect();
        let bytes: Vec<_> = (0..BUFFERS).map(|no| pattern(no, (PAGES * PAGE) as usize)).collect();
        for (buffer, bytes) in buffers.iter().zip(&bytes) {
            buffer.write(0, bytes).unwrap();
        }
        // Objects are read back into the pages in reverse order.
        let pages = |page: u64| -> Vec<BufferRange> {
            buffers.iter().map(|buffer| BufferRange::part(buffer, page * PAGE, PAGE)).collect()
        };
        let pages: Vec<Vec<BufferRange>> = (0..PAGES).map(pages).collect();
        let keys: Vec<String> = (0..PAGES).map(|page| format!("{name}/{page}")).collect();
        assert!(client.put(keys[3].as_bytes(), b"obstacle".as_slice(), &ONE).unwrap());
        let mut puts: Vec<_> = keys.iter().zip(&pages).map(|(key, pages)| Put::new(key, pages)).collect();
        let tally = client.batch_put(&mut puts, &ONE);
        assert_eq!((tally.done, tally.missed, tally.failed), (23, 1, 0));
        assert_eq!(codes(puts.into_iter().map(Put::into_result))[3], Ok(false));
        client.remove(keys[5].as_bytes(), RemoveMode::Force).unwrap();
        let mut gets: Vec<_> =
            keys.iter().zip(pages.iter().rev()).map(|(key, into)| Get::new(key, into)).collect();
        let tally = client.batch_get(&mut gets);
        assert_eq!((tally.done, tally.missed, tally.failed), (23, 1, 0));
        let results = codes(gets.into_iter().map(Get::into_result));
        for (page, result) in (0..PAGES).zip(results) {
            let expected = match page {
                3 => Ok(Some(b"obstacle".len() as u64)),
                5 => Ok(None),
                _ => Ok(Some(BUFFERS * PAGE)),
            };
            assert_eq!(result, expected, "{page}");
            if page == 3 || page == 5 {
                continue;
            }
            for (buffer, bytes) in buffers.iter().zip(&bytes) {
                let page = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
                assert_eq!(read(buffer, PAGES * PAGE - page.end as u64, PAGE), bytes[page]);
            }
        }
        for key in &keys {
            let _ = client.remove(key.as_bytes(), RemoveMode::Force);
        }
        node.stop();
    }
}

#[test]
fn the_number_of_parts_is_bounded_and_an_object_without_bytes_is_refused() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let memory = client.alloc(1 << 20).unwrap();
    let value = pattern(1, PARTS_MAX * 100);
    memory.write(0, &value).unwrap();
    let slices: Vec<&[u8]> = value.chunks(100).collect();
    let range = |at: usize| BufferRange::part(&memory, at as u64 * 100, 100);
    let ranges: Vec<BufferRange> = (0..PARTS_MAX).map(range).collect();
    assert!(client.put(b"slices", &slices, &ONE).unwrap());
    assert!(client.put(b"ranges", &ranges, &ONE).unwrap());
    assert_eq!(client.get(b"slices").unwrap().as_ref(), Some(&value));
    assert_eq!(client.get(b"ranges").unwrap().as_ref(), Some(&value));
    memory.write(0, &vec![0; value.len()]).unwrap();
    assert_eq!(client.get_with(Get::new(b"slices", &ranges)).unwrap(), Some(value.len() as u64));
    assert_eq!(read(&memory, 0, value.len() as u64), value);
    let fragments: Vec<Fragment> =
        (0..PARTS_MAX).map(|at| Fragment { offset: at as u64 * 100, into: range(PARTS_MAX + at) }).collect();
    assert_eq!(get_fragments(&mut client, &[(b"slices", &fragments)]), [Ok(Some(value.len() as u64))]);
    assert_eq!(read(&memory, value.len() as u64, value.len() as u64), value);

    let more_slices = [slices.as_slice(), &[b"more"]].concat();
    let more_ranges = [ranges.as_slice(), &[range(0)]].concat();
    assert_eq!(code(client.put(b"more", &more_slices, &ONE)), ErrorCode::InvalidParams);
    assert_eq!(code(client.put(b"more", &more_ranges, &ONE)), ErrorCode::InvalidParams);
    assert_eq!(code(client.get_with(Get::new(b"slices", &more_ranges))), ErrorCode::InvalidParams);
    assert_eq!(code(client.put(b"none", Source::Slices(&[]), &ONE)), ErrorCode::InvalidParams);
    assert_eq!(code(client.put(b"none", Source::Slices(&[&[], &[]]), &ONE)), ErrorCode::InvalidParams);
    assert_eq!(code(client.put(b"none", Source::Regions(&[]), &ONE)), ErrorCode::InvalidParams);
    assert_eq!(code(client.get_with(Get::new(b"slices", Sink::Regions(&[])))), ErrorCode::BufferOverflow);
    let mut items = [
        Put::new("x", &slices[..2]),
        Put::new("slices", &slices),
        Put::new("y", &slices[2..3]),
        // Refused items fail alone.
        Put::new("z", &more_slices),
        Put::new("z", &more_ranges),
    ];
    let tally = client.batch_put(&mut items, &ONE);
    assert_eq!((tally.done, tally.missed, tally.failed), (2, 1, 2));
    let wrong = Err(ErrorCode::InvalidParams);
    assert_eq!(codes(items.iter().map(Put::result)), [Ok(true), Ok(false), Ok(true), wrong, wrong]);
}

#[test]
fn the_trailer_is_allocated_and_freed_with_the_object() {
    let master = master();
    let _node = node("a", master.rpc_addr());
    let mut client = client(master.rpc_addr());
    let len = 3 * B;
    client.put(b"k", &pattern(1, len as usize), &ONE).unwrap();
    assert_eq!(client.master().list(b"k", 0, 1).unwrap().entries[0].len, len);
    assert_eq!(client.master().stats().unwrap().used_bytes, stored_len(len).next_multiple_of(64));
    client.remove(b"k", RemoveMode::Force).unwrap();
    assert_eq!(client.master().stats().unwrap().used_bytes, 0);
}

//! Objects on storage: a range of a namespace of another target, which clients read and write past its owner
//! in whole granules. The target is our own, in a thread.
#![cfg(feature = "nvmeof")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::storage::setup;
use common::{client_over, get_range, node_over, pattern};
use store_client::{BufferRange, Fabrics, Fragment, Get, PutOptions, PutRange, RemoveMode, Store as _};
use store_core::Placement;

const ONE: PutOptions = PutOptions::DEFAULT;

/// Lengths around granules, chunks, pieces, and trailers.
const LENGTHS: [usize; 14] = [
    1,
    100,
    4_095,
    4_096,
    4_097,
    65_535,
    65_536,
    65_537,
    262_144,
    262_145,
    300_001,
    1 << 20,
    (1 << 20) + 4_090,
    5_000_000,
];

/// Splits `len` bytes into ranges of these lengths, again and again.
fn split(len: usize, lengths: &[usize]) -> Vec<(usize, usize)> {
    let mut parts = Vec::new();
    let mut at = 0;
    for part in lengths.iter().cycle() {
        if at == len || parts.len() == store_client::PARTS_MAX - 1 {
            break;
        }
        let part = (*part).min(len - at);
        parts.push((at, part));
        at += part;
    }
    if at < len {
        parts.push((at, len - at));
    }
    parts
}

/// How memory is split that is put from and read into.
const SPLITS: [&[usize]; 4] = [&[5_000_000], &[100, 5_000, 65_536, 7], &[70_000, 1], &[4_096, 12_288]];

#[test]
fn objects_of_any_length_are_put_from_and_read_into_memory_of_any_form() {
    let mut it = setup();
    let memory = it.client.alloc(12 << 20).unwrap();
    let (source, sink) = (33, 6 << 20);
    for (seed, len) in LENGTHS.into_iter().enumerate() {
        let value = pattern(seed as u64, len);
        memory.write(source as u64, &value).unwrap();
        for lengths in SPLITS {
            let parts = split(len, lengths);
            let slices: Vec<&[u8]> = parts.iter().map(|(at, len)| &value[*at..][..*len]).collect();
            let ranges = |from: usize| -> Vec<BufferRange> {
                let range =
                    |(at, len): &(usize, usize)| BufferRange::part(&memory, (from + at) as u64, *len as u64);
                parts.iter().map(range).collect()
            };
            let sources = ranges(source);
            for plain in [true, false] {
                let put = match plain {
                    true => it.client.put(b"k", &slices, &ONE),
                    false => it.client.put(b"k", &sources, &ONE),
                };
                assert!(put.unwrap(), "{len} bytes");
                it.check_stored(b"k", &value);
                assert!(it.client.get(b"k").unwrap().as_deref() == Some(&value[..]), "{len} bytes");
                let mut bytes = vec![0; len];
                let cut = parts.iter().scan(&mut bytes[..], |rest, (_, len)| {
                    let (first, next) = std::mem::take(rest).split_at_mut(*len);
                    *rest = next;
                    Some(first)
                });
                let mut slices: Vec<&mut [u8]> = cut.collect();
                let got = it.client.get_with(Get::new(b"k", &mut slices[..])).unwrap();
                assert!(got == Some(len as u64) && bytes == value, "{len} bytes");
                let sinks = ranges(sink);
                memory.write(sink as u64, &vec![7; len + 1]).unwrap();
                assert_eq!(it.client.get_with(Get::new(b"k", &sinks)).unwrap(), Some(len as u64));
                memory.read(sink as u64, &mut bytes).unwrap();
                assert!(bytes == value, "{len} bytes");
                let mut behind = [0];
                memory.read((sink + len) as u64, &mut behind).unwrap();
                assert_eq!(behind, [7], "{len} bytes: no byte behind the destination is written");
                it.remove(b"k");
            }
        }
    }
    let moved: u64 = it
        .client
        .engine_stats()
        .rails
        .iter()
        .filter(|rail| rail.name == "nvmeof")
        .map(|rail| rail.bytes)
        .sum();
    assert!(moved > 100 << 20, "{moved} bytes");
    assert_eq!(it.client.counters().checksum_mismatches, 0);
}

#[test]
fn parts_of_objects_are_read_and_verified() {
    let mut it = setup();
    let memory = it.client.alloc(4 << 20).unwrap();
    for len in [5_000, 65_536, 200_000, (1 << 20) + 11] {
        let value = pattern(len as u64, len);
        assert!(it.client.put(b"k", &value, &ONE).unwrap());
        for (from, to) in [(0, 1), (0, len), (len - 1, len), (len / 3, len / 2), (4_096, 5_000), (1, len - 1)]
        {
            let got = get_range(&mut it.client, b"k", from as u64..to as u64).unwrap();
            assert!(got.as_deref() == Some(&value[from..to]), "{from}..{to} of {len}");
            memory.write(0, &vec![7; to - from + 1]).unwrap();
            let into = BufferRange::part(&memory, 0, (to - from) as u64);
            let read = it.client.get_with(Get::new(b"k", into).range(from as u64..to as u64)).unwrap();
            assert_eq!(read, Some((to - from) as u64));
            let mut bytes = vec![0; to - from + 1];
            memory.read(0, &mut bytes).unwrap();
            assert!(bytes[..to - from] == value[from..to] && bytes[to - from] == 7, "{from}..{to} of {len}");
        }
        let fragments = [
            Fragment { offset: len as u64 - 100, into: BufferRange::part(&memory, 0, 100) },
            Fragment { offset: 3, into: BufferRange::part(&memory, 3 << 20, 4_000) },
        ];
        assert_eq!(it.client.get_with(Get::new(b"k", &fragments)).unwrap(), Some(4_100));
        let (mut last, mut first) = ([0; 100], [0; 4_000]);
        memory.read(0, &mut last).unwrap();
        memory.read(3 << 20, &mut first).unwrap();
        assert!(last == value[len - 100..] && first == value[3..4_003], "{len} bytes");
        it.remove(b"k");
    }
}

#[test]
fn damaged_bytes_are_found() {
    let mut it = setup();
    let value = pattern(1, 100_000);
    for at in [0, 65_536, 99_999, 100_000] {
        assert!(it.client.put(b"k", &value, &ONE).unwrap());
        let place = it.place(b"k") + at as u64;
        let byte = it.target.memory.0.get(place, 1)[0];
        it.target.memory.0.set(place, &[byte ^ 1]);
        let whole = it.client.get(b"k").unwrap();
        let part = get_range(&mut it.client, b"k", 65_000..100_000).unwrap();
        // The trailer is no part of a whole read.
        assert_eq!(whole.is_none(), at < value.len(), "{at}");
        assert!(part.is_none() || at == 0 && part.as_deref() == Some(&value[65_000..]), "{at}");
        // It may have been removed as a bad replica.
        drop(it.client.remove(b"k", RemoveMode::Force));
    }
}

#[test]
fn ranges_of_an_open_put_are_written_at_granules_and_refused_elsewhere() {
    let mut it = setup();
    let value = pattern(5, 300 * 1_024 + 4_096 * 3);
    assert!(it.client.start_puts(&[(b"k", value.len() as u64)], &ONE)[0].is_ok());
    for (from, to) in [(4_096, 200_704), (0, 4_096), (200_704, value.len())] {
        let range = PutRange::new(b"k", from as u64, &value[from..to]);
        it.client.write_puts(&[range]).remove(0).unwrap();
    }
    it.client.end_puts(&[b"k"]).remove(0).unwrap();
    it.check_stored(b"k", &value);
    assert!(it.client.get(b"k").unwrap() == Some(value.clone()));
    // Its neighbour is written at another time, and a granule is written as a whole.
    assert!(it.client.start_puts(&[(b"odd", 100_000)], &ONE)[0].is_ok());
    assert!(it.client.write_puts(&[PutRange::new(b"odd", 0, &value[..5_000])])[0].is_err());
    assert!(it.client.end_puts(&[b"odd"])[0].is_err());
    assert_eq!(it.client.get(b"odd").unwrap(), None);
    assert!(it.client.put(b"next", &value[..5_000], &ONE).unwrap());
    assert!(it.client.get(b"next").unwrap().as_deref() == Some(&value[..5_000]));
}

#[test]
fn places_that_were_used_before_hold_nothing_of_the_former_objects() {
    let mut it = setup();
    for round in 0..200_u64 {
        let len = 1 + (round * 7_919 % 150_000) as usize;
        let value = pattern(round, len);
        let key = format!("k{}", round % 7);
        if round >= 7 {
            it.remove(key.as_bytes());
        }
        assert!(it.client.put(key.as_bytes(), &value, &ONE).unwrap());
        it.check_stored(key.as_bytes(), &value);
        assert!(it.client.get(key.as_bytes()).unwrap() == Some(value));
    }
}

#[test]
fn a_client_that_cannot_reach_storage_uses_other_segments_and_reports_none() {
    let mut it = setup();
    assert!(it.client.put(b"there", &pattern(1, 10_000), &ONE).unwrap());
    let mut plain = client_over(it.master.rpc_addr(), Fabrics::TCP);
    assert_eq!(plain.get(b"there").unwrap(), None);
    let _node = node_over("memory", it.master.rpc_addr(), Fabrics::TCP);
    let options = PutOptions { placement: Placement::on(it.segment), ..ONE };
    assert!(plain.put(b"k", &pattern(2, 10_000), &options).unwrap());
    assert_ne!(it.client.master().replicas(b"k").unwrap()[0].segment, it.segment);
    assert_eq!(plain.get(b"k").unwrap(), Some(pattern(2, 10_000)));
    let stats = it.client.master().stats().unwrap();
    assert_eq!(stats.segments_unreachable, 0);
    assert_eq!(it.client.get(b"there").unwrap(), Some(pattern(1, 10_000)));
}

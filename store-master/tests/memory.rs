//! Memory for a segment with many objects is given back to the system after the segment is unmounted. Alone
//! in its binary, because it measures its own process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod common;

use std::io::Write;

use common::{connect, read_answer, segment, start};
use store_core::message::{
    Commit, Mount, NewObject, Operation, PutEnd, PutRequest, PutStart, Unmount, UnmountSegment,
};
use store_core::{Incarnation, Key, NodeId};
use te_fabric::testkit::eventually;

const MIB: usize = 1 << 20;

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn memory_of_an_unmounted_segment_is_given_back() {
    let master = start();
    let mut stream = connect(master.rpc_addr());
    let segment = segment(1, "n", 1 << 30);
    let mut out = Vec::new();
    Mount::encode_request(&mut out, 1, &segment, std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    let answer = read_answer(&mut stream).unwrap();
    let mounted = Mount::decode_response(&answer.frame()).unwrap().0.mounted().unwrap();
    let before = resident_bytes();
    for round in 0..100 {
        let keys: Vec<String> = (0..2_000).map(|n| format!("{:0>1000}", round * 2_000 + n)).collect();
        let new = keys.iter().map(|key| NewObject { key: Key(key.as_bytes()), len: 1 });
        out.clear();
        PutStart::encode_request(&mut out, 2, &PutRequest { writer: 1, ..PutRequest::default() }, new)
            .unwrap();
        stream.write_all(&out).unwrap();
        let answer = read_answer(&mut stream).unwrap();
        let frame = answer.frame();
        let puts = PutStart::decode_response(&frame).unwrap().1;
        let commits = keys.iter().zip(puts).map(|(key, put)| {
            let put = put.unwrap();
            let key = Key(key.as_bytes());
            Commit { key, generation: put.generation, handle: put.handle, checksum: 0 }
        });
        let commits: Vec<Commit<'_>> = commits.collect();
        out.clear();
        PutEnd::encode_request(&mut out, 2, &(), commits.into_iter()).unwrap();
        stream.write_all(&out).unwrap();
        assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    }
    let during = resident_bytes();
    assert!(during > before + 150 * MIB, "{} MiB for 200,000 long keys", (during - before) / MIB);
    out.clear();
    let unmount = UnmountSegment::new(NodeId::new(1), Incarnation::new(1), mounted.segment);
    Unmount::encode_request(&mut out, 3, &unmount, std::iter::empty()).unwrap();
    stream.write_all(&out).unwrap();
    assert_eq!(read_answer(&mut stream).unwrap().header.status, 0);
    eventually("most of the memory is given back", || resident_bytes() < before + 75 * MIB);
    master.stop().unwrap();
}

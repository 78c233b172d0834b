//! Snapshots: what is restored is what was there, and what is damaged is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::Read;

use crc32c::crc32c;
use store_core::command_log::{BEHAVIOUR, Recorder, Standby};
use store_core::message::{MountSegment, PutOptions};
use store_core::snapshot::{self, CHUNK_BYTES_MAX, Position, SnapshotError};
use store_core::{Incarnation, Instant, Master, MasterConfig, NodeId};

/// A snapshot of a master with objects, and the master's digest.
fn snapshot_of(objects: u64) -> (Vec<u8>, u64) {
    let mut master = Master::new(MasterConfig { epoch: 9, ..MasterConfig::default() }).unwrap();
    let recorder = Recorder::new(&mut master);
    let segment = MountSegment {
        node: NodeId::new(1),
        incarnation: Incarnation::new(1),
        name: "n1",
        endpoint: "host:1",
        len: (objects + 1) * 4_096,
        lineage: 9,
        ..MountSegment::default()
    };
    master.mount(Instant::ZERO, &segment).unwrap();
    for object in 0..objects {
        let key = format!("{object:032}");
        let put = master.put_start(Instant::ZERO, key.as_bytes(), 4_000, &PutOptions::DEFAULT).unwrap();
        master.put_end(Instant::ZERO, key.as_bytes(), put.generation, 1).unwrap();
    }
    let mut bytes = Vec::new();
    let mut sink = |chunk: &[u8]| -> Result<(), ()> {
        assert!(chunk.len() <= CHUNK_BYTES_MAX);
        bytes.extend_from_slice(chunk);
        Ok(())
    };
    let written = recorder.snapshot(&master, std::iter::empty(), 4, crc32c, &mut sink).unwrap();
    assert_eq!(written.bytes, bytes.len() as u64);
    let position = Position { lineage: 9, term: 4, lsn: 0, at_ns: 0, objects };
    assert_eq!(written.position, position);
    (bytes, master.digest())
}

fn restore(mut bytes: &[u8]) -> Result<(Standby, Position), SnapshotError<std::io::Error>> {
    snapshot::restore(crc32c, &mut |to| bytes.read(to))
}

fn refused(bytes: &[u8]) -> SnapshotError<std::io::Error> {
    match restore(bytes) {
        Ok(_) => panic!("it was restored"),
        Err(error) => error,
    }
}

#[test]
fn a_master_with_many_objects_is_restored_from_several_chunks_of_at_most_200_bytes_per_object() {
    let (bytes, digest) = snapshot_of(30_000);
    println!("{} bytes per object", bytes.len() / 30_000);
    assert!(bytes.len() > 2 * CHUNK_BYTES_MAX && bytes.len() < 30_000 * 200);
    let (standby, position) = restore(&bytes).unwrap();
    assert_eq!((position.term, position.objects), (4, 30_000));
    assert_eq!(standby.master().digest(), digest);
    // From a source that gives a few bytes at a time.
    let mut rest = &bytes[..];
    let mut slow = |to: &mut [u8]| {
        let most = to.len().min(777);
        rest.read(&mut to[..most])
    };
    assert_eq!(snapshot::restore(crc32c, &mut slow).unwrap().0.master().digest(), digest);
}

#[test]
fn one_that_is_cut_short_is_refused_wherever_it_is_cut() {
    let (bytes, _) = snapshot_of(3);
    for len in 0..bytes.len() {
        let error = refused(&bytes[..len]);
        assert!(matches!(error, SnapshotError::CutShort), "{len}: {error}");
    }
    let longer = [&bytes[..], &[0; 5]].concat();
    assert!(matches!(refused(&longer), SnapshotError::CutShort), "part of a further chunk");
    let twice = [&bytes[..], &bytes[..]].concat();
    assert!(matches!(refused(&twice), SnapshotError::Damaged { .. }), "further chunks");
}

#[test]
fn one_with_a_wrong_bit_is_refused_whichever_it_is() {
    let (bytes, _) = snapshot_of(3);
    for bit in 0..bytes.len() * 8 {
        let mut wrong = bytes.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        let error = refused(&wrong);
        assert!(matches!(error, SnapshotError::Damaged { .. } | SnapshotError::CutShort), "{bit}: {error}");
    }
}

/// The snapshot with other bytes at its beginning, and the checksum that belongs to them.
fn with_beginning(bytes: &[u8], at: usize, other: &[u8]) -> Vec<u8> {
    const HEAD_BYTES: usize = 12;
    let mut bytes = bytes.to_vec();
    let len = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    let sum = |bytes: &[u8]| crc32c(&bytes[HEAD_BYTES..HEAD_BYTES + len]);
    let before = sum(&bytes);
    bytes[HEAD_BYTES + at..][..other.len()].copy_from_slice(other);
    let change = before ^ sum(&bytes);
    let crc = u32::from_le_bytes(bytes[8..12].try_into().unwrap()) ^ change;
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    bytes
}

#[test]
fn what_another_release_has_written_is_refused_with_the_reason() {
    let (bytes, _) = snapshot_of(1);
    let other = BEHAVIOUR + 1;
    let error = refused(&with_beginning(&bytes, 10, &other.to_le_bytes()));
    assert!(matches!(error, SnapshotError::Behaviour { found } if found == other), "{error}");
    assert!(error.to_string().contains("empty directory"), "{error}");
    let error = refused(&with_beginning(&bytes, 8, &[0xff, 0xff]));
    assert!(matches!(error, SnapshotError::Version { found: 0xffff }), "{error}");
    assert!(matches!(refused(&with_beginning(&bytes, 0, b"SNOWMAN!")), SnapshotError::NoSnapshot));
    assert!(matches!(refused(b""), SnapshotError::CutShort));
}

#[test]
fn bytes_whose_checksum_is_right_and_that_are_no_state_are_an_error_and_allocate_little() {
    let (bytes, _) = snapshot_of(1);
    let state = 14;
    for (at, byte) in (0..2_000).flat_map(|at| [(at, 0xff), (at, 0x7f)]) {
        let other = with_beginning(&bytes, state + at, &[byte; 9]);
        if let Err(error) = restore(&other) {
            assert!(!matches!(error, SnapshotError::Refused), "{at}: {error}");
        }
    }
}

#[test]
fn a_sink_that_fails_ends_the_snapshot_with_its_error() {
    let standby = Standby::new(MasterConfig::default()).unwrap();
    let mut sink = |_: &[u8]| Err("full");
    assert_eq!(standby.snapshot(1, crc32c, &mut sink), Err(SnapshotError::Sink("full")));
    let mut source = |_: &mut [u8]| Err("gone");
    assert!(matches!(snapshot::restore(crc32c, &mut source), Err(SnapshotError::Source("gone"))));
}

/// Changes when commands have another effect, or when the state or its form changes.
#[test]
fn the_behaviour_has_another_number_when_it_is_another_one() {
    const KNOWN: (u32, u64) = (8, 7_259_127_853_892_388_331);
    let (bytes, _) = snapshot_of(100);
    let digest = bytes.chunks(8).fold(0_u64, |sum, word| {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        (sum ^ u64::from_le_bytes(padded)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    assert_eq!(
        (BEHAVIOUR, digest),
        KNOWN,
        "raise command_log::BEHAVIOUR, unless only this branch has the former state, and write both here"
    );
}

//! The reader against our own target, which serves images of disks that are what they should be, or not. One
//! thread drives both, step by step.

use std::sync::mpsc::{Receiver, channel};

use store_core::SegmentNo;
use store_core::disk::format::{Extent, Geometry, Lists, Marks, Stream};
use te_fabric::testkit::{ALL, Node, REGION};
use te_nvmeof::{Config, NvmeofTransport};

use super::*;

type Target = Node<NvmeofTransport>;

const UUID: [u8; 16] = [7; 16];
const EXTENT: u32 = 128 << 10;
const EXTENTS: u32 = 8;
const BYTES: u64 = FIRST_EXTENT_AT + (EXTENTS * EXTENT) as u64;
/// The slot and the sequence of the extent that has objects.
const SLOT: u32 = 3;
const SEQUENCE: u64 = 40;
/// Where its images begin: not all at a multiple of the granule.
const IMAGES: [u64; 2] = [4_096, 4_096 + 40_448];
const IMAGE_BYTES: usize = 40_004;

fn geometry() -> Geometry {
    Geometry::new(BYTES, EXTENT, 512).unwrap()
}

fn superblock(uuid: [u8; 16]) -> Vec<u8> {
    let page = Superblock {
        disk: uuid,
        geometry: geometry(),
        serial: 1,
        sequences_end: 100,
        floor: 0,
        written_bytes: 0,
        object_bytes: 0,
        marks: Marks::default(),
        bad: Default::default(),
    };
    page.encode()
}

fn header(sequence: u64) -> Vec<u8> {
    let extent = Extent { disk: UUID, lineage: 1, slot: SLOT, sequence, stream: Stream::Trial };
    BatchHeader::encode(&extent, 0, 2 * 40_960, &Marks::default(), &Lists::new())
}

/// A target whose namespace has `bytes` bytes, with the image of a disk from `offset` on.
fn target(offset: u64, bytes: u64) -> Target {
    let config = Config { open_to_hosts: true, ..Config::default() };
    let target = Node::with(NvmeofTransport::new(config).unwrap(), bytes as usize, ALL);
    target.memory.paint(1);
    target.memory.set(offset + 4_096, &superblock(UUID));
    let at = geometry().extent_at(SLOT);
    if offset + at + u64::from(EXTENT) <= bytes {
        target.memory.set(offset + at, &header(SEQUENCE));
    }
    target
}

fn exported(target: &Target, offset: u64) -> Exported {
    let namespace = target.transport.namespace(REGION).unwrap();
    Exported {
        uuid: UUID,
        bytes: BYTES,
        extent_bytes: EXTENT,
        address: (namespace.addresses[0], namespace.port).into(),
        nqn: namespace.nqn,
        nsid: namespace.nsid,
        offset,
    }
}

fn name() -> DiskName {
    DiskName { no: SegmentNo::new(9), service: "nowhere:1".into() }
}

/// A reader that knows a disk, and the extent in it.
fn reader(exported: Exported) -> (Reader, Receiver<PackEnd>) {
    let (ended, ends) = channel();
    let mut namespaces = Namespaces::new().unwrap();
    let remote = namespaces.attach(&exported).unwrap();
    let extents = HashMap::from([(SEQUENCE, geometry().extent_at(SLOT))]);
    let disk = Disk { exported, remote, check: Check::Open, extents };
    let shared = Arc::new(Shared { queue: Queue::default().into(), bell: Bell::new().unwrap() });
    let settings = Settings { rpc: Default::default(), identity: Default::default() };
    let reader = Reader {
        settings,
        shared,
        ended,
        namespaces,
        nodes: HashMap::new(),
        disks: HashMap::from([(name(), disk)]),
        waiting: Vec::new(),
        flights: HashMap::new(),
        bytes: 0,
    };
    (reader, ends)
}

fn want(reader: &mut Reader, id: u64, offset: u64, patience: Duration) {
    let locator = geometry().locator(SEQUENCE, offset as u32);
    let deadline = Instant::now() + patience;
    reader.waiting.push(DirectRead { id, disk: name(), locator, bytes: IMAGE_BYTES, deadline });
}

/// One step of the reader: what has ended at the target, and what follows from it.
fn step(reader: &mut Reader) {
    let mut ends = Vec::new();
    reader.begin();
    reader.namespaces.poll(&mut ends);
    ends.drain(..).for_each(|(token, result)| reader.read(token, result));
    reader.expire();
}

const LONG: Duration = Duration::from_secs(20);

/// Drives both to the end of the next read.
fn next(
    reader: &mut Reader,
    ends: &Receiver<PackEnd>,
    mut target: Option<&mut Target>,
) -> (u64, Result<Vec<u8>, NotRead>) {
    let until = Instant::now() + LONG;
    while Instant::now() < until {
        step(reader);
        if let Some(target) = &mut target {
            target.poll();
        }
        if let Ok((id, result)) = ends.try_recv() {
            return (id, result.map(|image| image.to_vec()));
        }
    }
    panic!("a read has not ended");
}

fn why(end: (u64, Result<Vec<u8>, NotRead>)) -> NotDirect {
    match end.1 {
        Err(NotRead::Direct(why)) => why,
        other => panic!("{:?}", other.map(|image| image.len())),
    }
}

#[test]
fn images_are_read_from_where_the_node_says_that_they_are() {
    for offset in [0, 1 << 20] {
        let mut target = target(offset, offset + BYTES + 8_192);
        let (mut reader, ends) = reader(exported(&target, offset));
        for (id, at) in (1..).zip(IMAGES) {
            want(&mut reader, id, at, LONG);
        }
        for _ in IMAGES {
            let (id, image) = next(&mut reader, &ends, Some(&mut target));
            let at = offset + geometry().extent_at(SLOT) + IMAGES[id as usize - 1];
            assert!(image.unwrap()[..IMAGE_BYTES] == target.memory.get(at, IMAGE_BYTES), "{id}");
        }
        assert_eq!((reader.bytes, reader.flights.len()), (0, 0));
    }
}

/// The image is intact, and of the extent that was asked for, but when its last byte was read the node had
/// given the extent up already.
#[test]
fn an_extent_that_is_given_up_while_it_is_read_does_not_count() {
    for after in [vec![0; 4_096], header(SEQUENCE + 8)] {
        let mut target = target(0, BYTES);
        let (mut reader, ends) = reader(exported(&target, 0));
        want(&mut reader, 1, IMAGES[0], LONG);
        let header_of = |flight: &Flight| matches!(flight.what, What::Image { header: true, .. });
        te_fabric::testkit::eventually("the image was read", || {
            step(&mut reader);
            // The header is asked for by the next poll of the reader's transport.
            reader.flights.values().any(header_of) || {
                target.poll();
                false
            }
        });
        target.memory.set(geometry().extent_at(SLOT), &after);
        assert_eq!(why(next(&mut reader, &ends, Some(&mut target))), NotDirect::Moved);
        assert!(reader.disks[&name()].extents.is_empty(), "the node is asked again");
    }
}

#[test]
fn an_extent_with_another_sequence_in_the_same_place_does_not_count() {
    let mut target = target(0, BYTES);
    let (mut reader, ends) = reader(exported(&target, 0));
    target.memory.set(geometry().extent_at(SLOT), &header(SEQUENCE + 1));
    want(&mut reader, 1, IMAGES[0], LONG);
    assert_eq!(why(next(&mut reader, &ends, Some(&mut target))), NotDirect::Moved);
}

#[test]
fn a_namespace_that_is_not_the_disk_is_not_read() {
    let lie = |change: &dyn Fn(&mut Exported), bytes: u64| {
        let mut target = target(0, bytes);
        let mut exported = exported(&target, 0);
        change(&mut exported);
        let (mut reader, ends) = reader(exported);
        want(&mut reader, 1, IMAGES[0], LONG);
        let end = why(next(&mut reader, &ends, Some(&mut target)));
        assert!(reader.disks.is_empty(), "it is learned anew");
        end
    };
    let whole = 4 * BYTES;
    assert_eq!(lie(&|of| of.uuid = [8; 16], whole), NotDirect::Foreign, "another disk");
    assert_eq!(lie(&|of| of.offset = 1 << 20, whole), NotDirect::Foreign, "another offset");
    assert_eq!(lie(&|of| of.bytes += u64::from(EXTENT), whole), NotDirect::Foreign, "another geometry");
    assert_eq!(lie(&|_| {}, BYTES - 4_096), NotDirect::Foreign, "the namespace is shorter than the disk");
    assert_eq!(lie(&|of| of.nsid = 99, whole), NotDirect::Unreachable, "there is no such namespace");
    assert_eq!(lie(&|of| of.nqn.push('x'), whole), NotDirect::Unreachable, "nor such a subsystem");
}

#[test]
fn what_a_node_that_is_wrong_says_leads_out_of_no_disk() {
    let target = target(0, BYTES);
    let (mut reader, _ends) = reader(exported(&target, 0));
    let disk = reader.disks.get_mut(&name()).unwrap();
    let read = |locator| DirectRead { id: 1, disk: name(), locator, bytes: 8_192, deadline: Instant::now() };
    let here = geometry().locator(SEQUENCE, 4_096);
    assert!(matches!(place(disk, &read(here)), Some(Some(_))));
    assert!(matches!(place(disk, &read(here + u64::from(EXTENT))), Some(None)), "an extent not known");
    let last = geometry().locator(SEQUENCE, EXTENT - 4_096);
    assert!(place(disk, &read(last)).is_none(), "it ends behind its extent");
    for at in [0, 512, FIRST_EXTENT_AT + 512, BYTES, u64::MAX - 4_096] {
        disk.extents.insert(SEQUENCE, at);
        assert!(place(disk, &read(here)).is_none(), "{at}");
    }
}

#[test]
fn a_target_that_dies_in_the_middle_of_a_read_ends_it() {
    let mut target = target(0, BYTES);
    let (mut reader, ends) = reader(exported(&target, 0));
    want(&mut reader, 1, IMAGES[0], LONG);
    assert!(next(&mut reader, &ends, Some(&mut target)).1.is_ok());
    want(&mut reader, 2, IMAGES[1], LONG);
    step(&mut reader);
    assert_eq!(reader.flights.len(), 1, "it is under way");
    drop(target);
    assert_eq!(why(next(&mut reader, &ends, None)), NotDirect::Unreachable);
    assert_eq!(reader.bytes, 0);
}

#[test]
fn a_target_that_does_not_answer_costs_no_more_than_the_deadline() {
    let mut target = target(0, BYTES);
    let (mut reader, ends) = reader(exported(&target, 0));
    want(&mut reader, 1, IMAGES[0], LONG);
    assert!(next(&mut reader, &ends, Some(&mut target)).1.is_ok());
    let patience = Duration::from_millis(50);
    want(&mut reader, 2, IMAGES[1], patience);
    assert_eq!(why(next(&mut reader, &ends, None)), NotDirect::Late);
    assert!(reader.flights.is_empty() && reader.bytes == 0, "its buffer is free");
    // It is used again when it answers again.
    want(&mut reader, 3, IMAGES[0], LONG);
    assert!(next(&mut reader, &ends, Some(&mut target)).1.is_ok());
}

#[test]
fn a_node_compares_the_namespace_when_it_starts() {
    let serve = |offset: u64, bytes: u64, change: &dyn Fn(&mut Exported)| {
        let mut target = target(offset, bytes);
        let mut exported = exported(&target, offset);
        change(&mut exported);
        let checking = std::thread::spawn(move || check(&exported, LONG));
        while !checking.is_finished() {
            target.poll();
        }
        checking.join().unwrap()
    };
    assert_eq!(serve(4_096, 2 * BYTES, &|_| {}), Ok(()));
    assert_eq!(serve(4_096, 2 * BYTES, &|of| of.offset = 0), Err(NotDirect::Foreign));
    assert_eq!(serve(0, BYTES, &|of| of.uuid = [1; 16]), Err(NotDirect::Foreign));
    assert_eq!(serve(0, BYTES - 4_096, &|_| {}), Err(NotDirect::Foreign));
    assert_eq!(serve(0, BYTES, &|of| of.nsid += 1), Err(NotDirect::Unreachable));
    let silent = target(0, BYTES);
    assert_eq!(check(&exported(&silent, 0), Duration::from_millis(100)), Err(NotDirect::Late));
}

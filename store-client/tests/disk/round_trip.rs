//! Objects are written and read by their locators.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::{Duration, Instant};

use store_client::disk::{
    AlignedBuffer, Demote, DiskEvent, DiskFile, Lent, NotDone, Sharing, Stage, image_of, inspect, verify,
};
use store_core::disk::format::Stream;
use store_core::disk::{Refused, Removed, State};
use te_core::MemSpan;

use crate::bench_disk::{MIB, Owner, PATIENCE, Placed, caching, directory, format, open};

/// Lengths around blocks, pages and chunks.
const LENGTHS: [u64; 12] =
    [4_096, 4_097, 4_607, 5_000, 8_191, 65_536, 65_537, 131_072, 200_001, 1 << 20, 1_048_577, 3_000_000];

#[test]
fn objects_of_every_length_come_back_and_are_found_again_by_the_next_process() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = Owner::new(format(&path, 128 * MIB, 8 << 20));
    for round in 0..3 {
        for (at, len) in LENGTHS.into_iter().enumerate() {
            owner.demote(&format!("{round}/{at}"), len);
        }
    }
    owner.demoted(3 * LENGTHS.len());
    owner.verify_all();
    let stats = owner.disk.stats();
    assert_eq!((stats.state, stats.counters.short_total), (State::Ready, 0));
    let places = owner.places.clone();
    assert!(owner.disk.close(PATIENCE), "a clean end");

    let mut owner = Owner::new(open(&path));
    assert_eq!(owner.places, places, "every object is announced as it was");
    owner.verify_all();
    assert!(owner.disk.stats().recovery.is_some());
    assert!(owner.disk.close(PATIENCE));

    let file = DiskFile::open_to_read(&path, caching(&path), Sharing::Readers).unwrap();
    let survey = inspect(&file).unwrap();
    assert_eq!((survey.objects, survey.removed, survey.damage), (places.len() as u64, 0, Vec::new()));
    let verified = verify(&file, |_| std::ops::ControlFlow::Continue(())).unwrap();
    assert_eq!((verified.objects, verified.damaged, verified.complete), (places.len() as u64, 0, true));
}

#[test]
fn a_log_that_goes_round_gives_up_the_oldest_and_serves_the_rest() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = Owner::new(format(&path, 17 * MIB, 1 << 20));
    for round in 0..40 {
        for at in 0..8 {
            owner.demote(&format!("{round}/{at}"), 100_000 + at * 7);
        }
        owner.demoted(8);
    }
    crate::common::eventually("extents were given up", || owner.disk.stats().counters.reclaimed_total > 10);
    assert!(owner.places.len() > 40, "{} are left", owner.places.len());
    owner.verify_all();
    let gone = Stage {
        id: 9,
        locator: 4_096 + (1 << 20),
        len: 100_000,
        deadline: Instant::now() + PATIENCE,
        buffer: Lent::buffer(AlignedBuffer::new(1 << 20)),
    };
    owner.disk.stage(gone).unwrap();
    let event = owner.event();
    let DiskEvent::ReadFailed { id: 9, why: NotDone::Refused(Refused::Gone), buffer } = event else {
        panic!("{event:?}")
    };
    assert!(buffer.is_some());
}

#[test]
fn removed_objects_do_not_come_back() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = Owner::new(format(&path, 64 * MIB, 4 << 20));
    for at in 0..50 {
        owner.demote(&format!("{at}"), 20_000);
    }
    owner.demoted(50);
    let mut forgotten = Vec::new();
    for at in (0..50).step_by(2) {
        let key = format!("{at}").into_bytes().into_boxed_slice();
        let placed = owner.places.remove(&key).unwrap();
        let object = Removed { generation: placed.generation, tenant: 1, key };
        owner.disk.forget(object.clone(), Some(placed.locator)).unwrap();
        forgotten.push(object);
    }
    while !forgotten.is_empty() {
        match owner.event() {
            DiskEvent::Forgotten(object) => forgotten.retain(|other| *other != object),
            other => panic!("{other:?}"),
        }
    }
    // Without a close: what is confirmed is durable.
    let places = owner.places.clone();
    drop(owner);
    let mut owner = Owner::new(open(&path));
    assert_eq!(owner.places, places);
    owner.verify_all();
    owner.disk.clear().unwrap();
    assert!(matches!(owner.event(), DiskEvent::Cleared));
    assert!(owner.disk.close(PATIENCE));
    assert_eq!(Owner::new(open(&path)).places.len(), 0);
}

#[test]
fn memory_that_is_not_aligned_is_written_and_read_all_the_same() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = Owner::new(format(&path, 64 * MIB, 4 << 20));
    let data = te_core::testkit::pattern(3, 150_001);
    let (crc32c, image) = image_of(&data);
    let image = image.into_buffer().unwrap();
    // One byte behind an aligned address, for both.
    let shifted = |bytes: &[u8]| {
        let mut memory = vec![0_u8; bytes.len() + 4_097];
        let at = memory.as_ptr().align_offset(4_096) + 1;
        memory[at..at + bytes.len()].copy_from_slice(bytes);
        let span = MemSpan::new(memory.as_mut_ptr().wrapping_add(at), bytes.len());
        // SAFETY: the vector is not moved out of its allocation, and lives as long as the owner.
        (unsafe { Lent::new(span, Box::new(memory)) }, at)
    };
    let (source, _) = shifted(&image);
    let (key, len) = (Box::from(*b"odd"), 150_001);
    let stream = Stream::Trial;
    owner.disk.demote(Demote { id: 1, tenant: 1, key, generation: 1, len, crc32c, stream, source }).unwrap();
    let event = owner.event();
    let DiskEvent::Demoted { id: 1, locator, .. } = event else { panic!("{event:?}") };
    let (buffer, at) = shifted(&vec![0xee; 200_000]);
    let deadline = Instant::now() + PATIENCE;
    owner.disk.stage(Stage { id: 2, locator, len, deadline, buffer }).unwrap();
    let event = owner.event();
    let DiskEvent::Staged { id: 2, buffer } = event else { panic!("{event:?}") };
    let memory = *buffer.into_owner().downcast::<Vec<u8>>().unwrap();
    assert!(memory[at..at + 150_001] == data[..], "the bytes come back");
    assert!(memory[at + 151_000..at + 200_000].iter().all(|byte| *byte == 0xee), "nothing else is touched");

    // Memory that is too short is refused, and comes back.
    let buffer = Lent::buffer(AlignedBuffer::new(150_000));
    owner.disk.stage(Stage { id: 3, locator, len, deadline, buffer }).unwrap();
    let event = owner.event();
    assert!(
        matches!(event, DiskEvent::ReadFailed { why: NotDone::Memory, buffer: Some(_), .. }),
        "{event:?}"
    );
}

#[test]
fn the_descriptor_is_readable_exactly_while_there_are_events() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = Owner::new(format(&path, 64 * MIB, 4 << 20));
    let readable = |owner: &Owner, wait: Duration| {
        let mut fd = libc::pollfd { fd: owner.disk.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd, which outlives the call.
        unsafe { libc::poll(&raw mut fd, 1, wait.as_millis() as libc::c_int) == 1 }
    };
    assert!(!readable(&owner, Duration::ZERO));
    owner.demote("a", 10_000);
    assert!(readable(&owner, PATIENCE));
    owner.demoted(1);
    assert!(!readable(&owner, Duration::ZERO));
}

#[test]
fn a_disk_that_is_dropped_while_it_reads_and_writes_can_be_opened_again() {
    let directory = directory();
    let path = directory.path().join("disk");
    let mut owner = Owner::new(format(&path, 64 * MIB, 4 << 20));
    for at in 0..40 {
        owner.demote(&format!("{at}"), 200_000);
    }
    owner.demoted(40);
    let places = owner.places.clone();
    for (id, placed) in places.values().enumerate() {
        let buffer = Lent::buffer(AlignedBuffer::new(300_000));
        let (id, deadline) = (id as u64, Instant::now() + PATIENCE);
        let Placed { locator, len, .. } = *placed;
        owner.disk.stage(Stage { id, locator, len, deadline, buffer }).unwrap();
    }
    for at in 40..60 {
        owner.demote(&format!("{at}"), 200_000);
    }
    // Its thread ends at once; what the kernel has, ends by itself, and only then the lock is released.
    drop(owner);
    let mut owner = Owner::new(open(&path));
    assert!(places.iter().all(|(key, placed)| owner.places.get(key) == Some(placed)));
    owner.verify_all();
}

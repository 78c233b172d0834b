//! Loss of power. Device-mapper records everything that a disk writes and flushes, in the guest; then, on the
//! host, the disk is opened as it would be found if the power had gone after each of these operations.
//!
//! A write that a later flush covers is there. Of the writes since the last flush any may be missing, and any
//! page of them: a device writes them in whatever order it likes. What must hold at every such moment:
//!
//! * No object comes back whose removal was confirmed.
//! * Every object that is announced has the bytes of its generation.
//! * The youngest objects that a flush has covered are announced.
//! * After the disk was closed nothing is missing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Instant;

use store_client::disk::{
    AlignedBuffer, Caching, DiskEvent, DiskFile, DiskOptions, DiskService, FormatOptions, Lent, NotDone,
    Stage, is_intact,
};
use store_core::disk::{Refused, Removed};
use store_core::unbound;
use te_core::testkit::{Rng, pattern};

use super::bench_disk::{MIB, Owner, PATIENCE, Placed, options};
use super::dm::Mapped;
use super::write_log::{self, Device, Entry};

const BYTES: u64 = 12 * MIB;
const OBJECTS: u64 = 500;
/// Moments at which the power goes, at least.
const MOMENTS_MIN: u32 = 500;
/// And about at most, which bounds the time.
const MOMENTS_MAX: usize = 700;
/// So many of the youngest objects are in extents that are not given up yet.
const YOUNGEST: usize = 24;

/// Objects that are read at a time.
const READS: usize = 64;

/// What the marks in the log say about the time before them.
#[derive(Default)]
struct Known {
    is_formatted: bool,
    is_closed: bool,
    /// Objects that were written, in order, with the number of flushes until then.
    written: Vec<(u64, u32)>,
    /// Objects whose removal was asked for.
    removing: BTreeSet<u64>,
    /// Objects whose removal was confirmed.
    removed: BTreeSet<u64>,
    /// Objects that were there when the disk was closed.
    left: BTreeSet<u64>,
    flushes: u32,
}

impl Known {
    fn note(&mut self, mark: &str) {
        let (what, number) = mark.split_once('-').unwrap_or((mark, ""));
        let generation = || number.parse::<u64>().unwrap();
        match what {
            "formatted" => self.is_formatted = true,
            "closed" => self.is_closed = true,
            "written" => self.written.push((generation(), self.flushes)),
            "removing" => self.removing.extend([generation()]),
            "removed" => self.removed.extend([generation()]),
            "left" => self.left.extend([generation()]),
            // The target's own, when it ends.
            _ => assert_eq!(mark, "dm-log-writes-end"),
        }
    }

    /// Objects that must be found. The first flush that ends after a write may have begun before its end, the
    /// second one did not.
    fn kept(&self) -> impl Iterator<Item = u64> {
        let youngest = self.written.iter().rev().take(YOUNGEST);
        let covered = youngest.filter(|(_, flushes)| flushes + 2 <= self.flushes);
        covered.map(|(generation, _)| *generation).filter(|generation| !self.removing.contains(generation))
    }
}

/// What was seen.
#[derive(Debug, Default)]
struct Seen {
    moments: u32,
    /// Moments at which writes may have been lost.
    with_losses: u32,
    /// Objects that were read.
    read: u64,
    /// Objects that had to be found.
    kept: u64,
    /// Objects that were removed, and not found.
    removed: u64,
}

/// In the guest: a disk is used, and the log of its writes is copied to a file.
pub(crate) fn everything_that_a_disk_writes_and_flushes_is_recorded(devices: &[&str], copy: &Path) {
    let began = Instant::now();
    let (device, log) = (devices[0], devices[1]);
    let disk = Mapped::create("snowskin-logged", &format!("0 {} log-writes {device} {log}", BYTES / 512));
    use_disk(&disk);
    drop(disk);
    let (entries, bytes) = write_log::read(Path::new(log));
    let took = began.elapsed(); // timing: printed only
    println!("{OBJECTS} objects in {took:.0?}: {} entries of {bytes} bytes", entries.len());
    write_log::copy(Path::new(log), copy, bytes);
}

/// On the host, which is much faster: the power goes after each entry of the log.
pub(crate) fn no_removed_object_comes_back_and_no_other_bytes_are_read(log: &Path) {
    let began = Instant::now();
    let (entries, _) = write_log::read(log);
    // In memory, where there is such a directory: nothing here depends on what is durable.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = directory.path().join("found");
    let mut judge = Judge { path, rng: Rng::new(3), patterns: BTreeMap::new(), seen: Seen::default() };
    let (mut device, mut known, mut rng) = (Device::new(BYTES), Known::default(), Rng::new(2));
    let operations = entries.iter().filter(|entry| matches!(entry, Entry::Io(_))).count();
    for entry in &entries {
        match entry {
            Entry::Mark(mark) => known.note(mark),
            Entry::Io(io) => {
                device.carry_out(io);
                known.flushes += u32::from(io.is_flush);
            }
        }
        // The last mark is the last entry but one.
        let chosen = matches!(entry, Entry::Io(_)) && rng.below(operations as u64) < MOMENTS_MAX as u64;
        if chosen || known.is_closed {
            judge.seen.with_losses += u32::from(!device.is_clean());
            judge.look(&device.without_power(), &known);
        }
    }
    let took = began.elapsed(); // timing: printed only
    println!(
        "{} objects, {} removed, {} flushes; in {took:.0?} {:?}",
        known.written.len(),
        known.removed.len(),
        known.flushes,
        judge.seen
    );
    let Seen { moments, with_losses, read, kept, removed } = judge.seen;
    assert!(moments >= MOMENTS_MIN && with_losses >= MOMENTS_MIN / 2 && known.is_closed, "too few moments");
    let of_disk = known.flushes > 20 && known.removed.len() > 50;
    assert!(of_disk && read > 10_000 && kept > 2_000 && removed > 2_000, "too little was seen");
}

/// Opens what is left of the disk, and says whether that is right.
struct Judge {
    path: PathBuf,
    rng: Rng,
    patterns: BTreeMap<u64, Vec<u8>>,
    seen: Seen,
}

impl Judge {
    fn look(&mut self, bytes: &[u8], known: &Known) {
        std::fs::write(&self.path, bytes).unwrap();
        let disk = DiskFile::open(&self.path, Caching::Buffered)
            .and_then(|file| DiskService::open(file, disk_options(), 7));
        let disk = match disk {
            Ok(disk) => disk,
            // Before its first superblock is durable there is no disk.
            Err(error) => return assert!(!known.is_formatted, "{error}"),
        };
        let mut owner = Owner::new(disk);
        self.seen.moments += 1;
        let found: BTreeSet<u64> = owner.places.values().map(|placed| placed.generation).collect();
        let removed: Vec<_> = found.intersection(&known.removed).collect();
        assert!(removed.is_empty(), "removed objects came back: {removed:?}");
        self.seen.removed += known.removed.len() as u64;
        for generation in known.kept() {
            assert!(found.contains(&generation), "{generation} was synced and is lost");
            self.seen.kept += 1;
        }
        if known.is_closed {
            let differing: Vec<_> = found.symmetric_difference(&known.left).collect();
            assert!(
                differing.is_empty(),
                "{differing:?} were there when the disk was closed, or are there now"
            );
        }
        // The youngest are at risk; of the others some each time, because an extent may be used again.
        let young = known.written.iter().rev().take(2 * YOUNGEST).map(|(generation, _)| *generation).min();
        let mut places: Vec<_> = owner.places.clone().into_iter().collect();
        places.retain(|(_, placed)| Some(placed.generation) >= young || self.rng.below(4) == 0);
        for some in places.chunks(READS) {
            self.read(&mut owner, some);
        }
        assert!(owner.disk.close(PATIENCE));
    }

    /// Reads objects, all at a time.
    fn read(&mut self, owner: &mut Owner, places: &[(Box<[u8]>, Placed)]) {
        let geometry = owner.disk.stats().geometry;
        let deadline = Instant::now() + PATIENCE;
        for (id, (_, Placed { locator, len, .. })) in (0..).zip(places) {
            let buffer = Lent::buffer(AlignedBuffer::new(geometry.image_bytes(*len) as usize));
            owner.disk.stage(Stage { id, locator: *locator, len: *len, deadline, buffer }).unwrap();
        }
        for _ in places {
            let (id, buffer) = match owner.event() {
                DiskEvent::Staged { id, buffer } => (id, buffer.into_buffer()),
                // The disk makes room for more meanwhile.
                DiskEvent::ReadFailed { id, why: NotDone::Refused(Refused::Gone), .. } => (id, None),
                other => panic!("{other:?}"),
            };
            let (key, placed) = &places[id as usize];
            let (generation, len) = (placed.generation, placed.len);
            let Some(buffer) = buffer else {
                assert!(!owner.places.contains_key(key), "{generation} was announced and is not there");
                continue;
            };
            let intact = is_intact(&buffer, len, unbound(placed.checksum, key, generation));
            assert!(intact, "{generation} was announced and does not match its checksum");
            let right = self.patterns.entry(generation).or_insert_with(|| pattern(generation, len as usize));
            assert!(buffer[..len as usize] == *right, "{generation} has other bytes");
            self.seen.read += 1;
        }
    }
}

/// Many batches of both streams are in flight at a time.
fn disk_options() -> DiskOptions {
    let mut options = options();
    options.disk.batch_bytes = 64 << 10;
    options
}

/// Objects are written and removed; the extents are not enough for all.
fn use_disk(device: &Mapped) {
    let wanted = FormatOptions {
        bytes: Some(BYTES),
        extent_bytes: Some(MIB as u32),
        force: true,
        caching: Caching::Direct,
    };
    let (file, geometry) = DiskFile::prepare(&device.path(), wanted).unwrap();
    let mut owner = Owner::new(DiskService::format(file, geometry, disk_options(), 7).unwrap());
    device.message("mark formatted");
    let (mut at, mut rng) = (0, Rng::new(4));
    while at < OBJECTS {
        let burst = at..at + 1 + rng.below(8);
        for at in burst.clone() {
            owner.demote(&format!("key-{at}"), 4_096 + (at * 7_919) % 60_000);
        }
        owner.demoted(burst.clone().count());
        at = burst.end;
        for generation in owner.next - burst.count() as u64..owner.next {
            device.message(&format!("mark written-{generation}"));
        }
        // One that was written a while ago, or just now, if it is still there.
        let key = format!("key-{}", at.saturating_sub(1 + rng.below(60)));
        let Some(placed) = owner.places.remove(key.as_bytes()) else { continue };
        let object = Removed { generation: placed.generation, tenant: 1, key: key.as_bytes().into() };
        device.message(&format!("mark removing-{}", placed.generation));
        owner.disk.forget(object, Some(placed.locator)).unwrap();
        match owner.event() {
            DiskEvent::Forgotten(removed) => {
                device.message(&format!("mark removed-{}", removed.generation));
            }
            other => panic!("{other:?}"),
        }
    }
    owner.disk.begin_close(PATIENCE);
    loop {
        match owner.disk.wait_event(PATIENCE) {
            // Nothing in it is announced any more, whatever the answer would be.
            Some(DiskEvent::Reclaim { sequence }) => {
                owner.places.retain(|_, placed| placed.locator / MIB != sequence);
            }
            Some(DiskEvent::Closed { clean: true }) => break,
            other => panic!("{other:?}"),
        }
    }
    for placed in owner.places.values() {
        device.message(&format!("mark left-{}", placed.generation));
    }
    device.message("mark closed");
}

//! Loss of power, on the block devices of the lab. Device-mapper's target `log-writes` records everything that a
//! disk writes and flushes; then the disk is opened as it would be found if the power had gone after each write.
//!
//! A write that a later flush covers is there. Of the writes since the last flush any may be missing, and any
//! page of them: a device writes them in whatever order it likes. What must hold at every such moment:
//!
//! * Every object that is read has its bytes, or does not match its checksum, which readers compare.
//! * No object comes back whose removal was confirmed as durable.
//! * After the disk was closed nothing is missing.
//!
//! `cargo xtask hw-test --lab --profile disk` runs it; elsewhere it is skipped. The format of the log is in the
//! kernel's `Documentation/admin-guide/device-mapper/log-writes.rst` and `drivers/md/dm-log-writes.c`.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it did"
)]

#[allow(dead_code, reason = "other tests use the rest")]
#[path = "disk/bench_disk.rs"]
mod bench_disk;

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use bench_disk::{MIB, Owner, PATIENCE, options};
use libtest_mimic::{Arguments, Completion, Trial};
use store_client::disk::{Caching, DiskEvent, DiskFile, DiskService, FormatOptions};
use store_core::disk::Removed;
use te_core::testkit::{Rng, pattern};

/// The device, and the one that gets the log: `/dev/ram0 /dev/ram1`.
const DEVICES: &str = "SNOWSKIN_LOG_WRITES";
const NAME: &str = "snowskin-logged";
const BYTES: u64 = 16 * MIB;
const OBJECTS: u64 = 400;
/// Moments at which the power goes, at least.
const MOMENTS_MIN: usize = 500;
/// And about at most, which bounds the time.
const MOMENTS_MAX: usize = 700;
/// A device loses or keeps this much of a write.
const PAGE: usize = 4_096;

fn main() -> ExitCode {
    let test = || match std::env::var(DEVICES) {
        Err(_) => {
            let reason = format!("{DEVICES} names no devices: cargo xtask hw-test --lab --profile disk");
            Ok(Completion::ignored_with(reason))
        }
        Ok(devices) => {
            let (device, log) = devices.split_once(' ').ok_or("two devices, with a space between them")?;
            after_a_loss_of_power(device, log);
            Ok(Completion::Completed)
        }
    };
    let name = "after_a_loss_of_power_no_removed_object_comes_back_and_no_other_bytes_are_read";
    libtest_mimic::run(&Arguments::from_args(), vec![Trial::ignorable_test(name, test)]).exit_code()
}

fn dmsetup(words: &[&str]) {
    let status = Command::new("dmsetup").args(words).status().unwrap();
    assert!(status.success(), "dmsetup {words:?}: {status}");
}

/// Writes a mark into the log: what was confirmed until now is before it.
fn mark(text: &str) {
    dmsetup(&["message", NAME, "0", "mark", text]);
}

fn after_a_loss_of_power(device: &str, log: &str) {
    let table = format!("0 {} log-writes {device} {log}", BYTES / 512);
    dmsetup(&["create", NAME, "--table", &table]);
    let at_the_end = use_disk(Path::new(&format!("/dev/mapper/{NAME}")));
    dmsetup(&["remove", "--retry", NAME]);

    let log = Log::read(Path::new(log));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("found");
    let mut moments = Moments::new(&log);
    let (mut count, mut found, mut torn) = (0, 0, 0);
    let step = (log.entries.len() / MOMENTS_MAX).max(1);
    while let Some(moment) = moments.next() {
        if moment.entry % step != 0 && !moment.is_closed {
            continue;
        }
        std::fs::write(&path, &moment.bytes).unwrap();
        let Some(mut owner) = open(&path, moment.is_formatted) else { continue };
        count += 1;
        if moment.is_closed {
            // Before the disk makes room for more.
            let generations: BTreeSet<u64> = owner.places.values().map(|placed| placed.generation).collect();
            assert_eq!(generations, at_the_end);
        }
        for (key, placed) in owner.places.clone() {
            let generation = placed.generation;
            assert!(
                !moment.removed.contains(&generation),
                "after entry {}: {generation} was removed",
                moment.entry
            );
            match owner.read(&key) {
                Some(bytes) => {
                    found += 1;
                    assert_eq!(bytes, pattern(generation, placed.len as usize), "{generation}");
                }
                None => torn += u64::from(owner.places.contains_key(&key)),
            }
        }
        assert!(owner.disk.close(PATIENCE));
    }
    let Log { entries, .. } = &log;
    let flushes = entries.iter().filter(|entry| entry.is_flush()).count();
    println!(
        "{count} losses of power, {} entries with {flushes} flushes in the log; {found} objects were read, \
         {torn} did not match their checksum",
        entries.len()
    );
    assert!(count >= MOMENTS_MIN && found > 1_000 && flushes > 20, "too little was tested");
}

/// Objects are written and removed; the extents are not enough for all. Returns the generations on the disk at
/// the end.
fn use_disk(path: &Path) -> BTreeSet<u64> {
    let wanted = FormatOptions {
        bytes: Some(BYTES),
        extent_bytes: Some(MIB as u32),
        force: true,
        caching: Caching::Direct,
    };
    let (file, geometry) = DiskFile::prepare(path, wanted).unwrap();
    let mut owner = Owner::new(DiskService::format(file, geometry, options(), 7).unwrap());
    mark("formatted");
    for at in 0..OBJECTS {
        owner.demote(&format!("key-{at}"), 4_096 + (at * 7_919) % 60_000);
        owner.demoted(1);
        if at % 3 != 2 {
            continue;
        }
        // One that was written a while ago, if it is still there.
        let key = format!("key-{}", at.saturating_sub(at % 11));
        let Some(placed) = owner.places.remove(key.as_bytes()) else { continue };
        let object = Removed { generation: placed.generation, tenant: 1, key: key.as_bytes().into() };
        owner.disk.forget(object, Some(placed.locator)).unwrap();
        match owner.event() {
            DiskEvent::Forgotten(removed) => mark(&format!("removed-{}", removed.generation)),
            other => panic!("{other:?}"),
        }
    }
    assert!(owner.disk.close(PATIENCE));
    mark("closed");
    owner.places.values().map(|placed| placed.generation).collect()
}

fn open(path: &Path, is_formatted: bool) -> Option<Owner> {
    let opened =
        DiskFile::open(path, Caching::Buffered).and_then(|file| DiskService::open(file, options(), 7));
    match opened {
        Ok(disk) => Some(Owner::new_after_damage(disk)),
        // Before its first superblock is durable, there is no disk.
        Err(error) => {
            assert!(!is_formatted, "{error}");
            None
        }
    }
}

/// One entry of the log.
struct Entry {
    at: u64,
    data: Vec<u8>,
    flags: u64,
}

impl Entry {
    const FLUSH: u64 = 1;
    const FUA: u64 = 2;
    const DISCARD: u64 = 4;
    const MARK: u64 = 8;

    const fn is_flush(&self) -> bool {
        self.flags & Self::FLUSH != 0
    }
}

struct Log {
    entries: Vec<Entry>,
}

impl Log {
    const MAGIC: u64 = 0x006a_7366_7773_6872;

    fn read(path: &Path) -> Self {
        let mut file = File::open(path).unwrap();
        let mut number = |bytes: &mut [u8]| {
            file.read_exact(bytes).unwrap();
        };
        let mut first = vec![0; 512];
        number(&mut first);
        let u64_at = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!((u64_at(&first, 0), u64_at(&first, 8)), (Self::MAGIC, 1), "magic and version of the log");
        let (count, sector) = (u64_at(&first, 16), u32::from_le_bytes(first[24..28].try_into().unwrap()));
        let sector = sector as usize;
        number(&mut vec![0; sector - 512]);
        let mut entries = Vec::new();
        for _ in 0..count {
            let mut head = vec![0; sector];
            number(&mut head);
            let [at, sectors, flags, len] = [0, 8, 16, 24].map(|at| u64_at(&head, at));
            let data = if flags & Entry::MARK != 0 {
                // It follows in the same sector.
                head[32..32 + len as usize].to_vec()
            } else if flags & Entry::DISCARD != 0 {
                vec![0; sectors as usize * sector]
            } else {
                let mut data = vec![0; sectors as usize * sector];
                number(&mut data);
                data
            };
            entries.push(Entry { at: at * sector as u64, data, flags });
        }
        Self { entries }
    }
}

/// What is found when the power has gone.
struct Moment {
    entry: usize,
    bytes: Vec<u8>,
    removed: HashSet<u64>,
    is_formatted: bool,
    is_closed: bool,
}

/// The moments after each entry of the log.
struct Moments<'a> {
    log: &'a Log,
    next: usize,
    /// What is durable, up to this entry.
    durable: (Vec<u8>, usize),
    removed: HashSet<u64>,
    is_formatted: bool,
    is_closed: bool,
    rng: Rng,
}

impl<'a> Moments<'a> {
    fn new(log: &'a Log) -> Self {
        let durable = (vec![0; BYTES as usize], 0);
        let removed = HashSet::new();
        Self { log, next: 0, durable, removed, is_formatted: false, is_closed: false, rng: Rng::new(1) }
    }

    /// The moment after the next entry.
    fn next(&mut self) -> Option<Moment> {
        let entry = self.log.entries.get(self.next)?;
        self.next += 1;
        if entry.flags & Entry::MARK != 0 {
            let text = String::from_utf8_lossy(&entry.data).into_owned();
            let text = text.trim_end_matches('\0');
            self.is_formatted |= text == "formatted";
            self.is_closed |= text == "closed";
            self.removed.extend(text.strip_prefix("removed-").map(|number| number.parse::<u64>().unwrap()));
        }
        let log = self.log;
        if entry.is_flush() {
            // The log has the writes that were complete before a flush in front of it.
            let (bytes, upto) = &mut self.durable;
            for entry in &log.entries[*upto..self.next - 1] {
                write(bytes, entry, || true);
            }
            // The flush itself may carry data, which is durable only with the other flag.
            *upto = self.next - 1;
        }
        if entry.flags & Entry::FUA != 0 {
            write(&mut self.durable.0, entry, || true);
        }
        let mut bytes = self.durable.0.clone();
        for entry in &log.entries[self.durable.1..self.next] {
            // All of it, nothing, or some of its pages.
            let (fate, rng) = (self.rng.below(3), &mut self.rng);
            let is_durable = entry.flags & Entry::FUA != 0;
            write(&mut bytes, entry, || is_durable || fate == 0 || fate == 1 && rng.below(2) == 0);
        }
        let (removed, is_formatted, is_closed) = (self.removed.clone(), self.is_formatted, self.is_closed);
        Some(Moment { entry: self.next - 1, bytes, removed, is_formatted, is_closed })
    }
}

/// Carries a write out, as far as its pages reach the device.
fn write(bytes: &mut [u8], entry: &Entry, mut keeps: impl FnMut() -> bool) {
    if entry.flags & Entry::MARK != 0 {
        return;
    }
    for (number, page) in entry.data.chunks(PAGE).enumerate() {
        let at = entry.at as usize + number * PAGE;
        if keeps() {
            bytes[at..at + page.len()].copy_from_slice(page);
        }
    }
}

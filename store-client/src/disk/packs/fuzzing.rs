//! Parsers of what a directory of packs or a bucket holds, and of what a store answers, for `fuzz/`. Only
//! with `--cfg fuzzing`.
//!
//! Everything that is written has a checksum, which an attacker who may write can compute. So the checksums
//! are put in here, and what is fuzzed is what is behind them.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use store_core::disk::format::{
    BatchHeader, DiskUuid, EXTENT_BYTES_MIN, EXTENTS_MIN, FIRST_EXTENT_AT, Footer, Geometry, Marks,
    PAGE_BYTES, Superblock, TAIL_BYTES,
};

use super::address::BucketAddress;
use super::answers::Refusal;
use super::contents::{Expected, PAGES_BYTES, Renewed, newest_superblock};
use super::layout::{Name, dead_name, pack_name};
use super::names::{file_name, parse};
use super::owner::{BYTES_MAX, Owner};
use crate::disk::error::DiskError;
use crate::disk::inspect::{Volume, inspect, sealed, verify};
use crate::disk::sys::AlignedBuffer;
use crate::packs::below;

const UUID: DiskUuid = [7; 16];
const PAGE: usize = PAGE_BYTES as usize;
/// Where the checksum of the lists is in the tail of a footer.
const BODY_CRC_AT: usize = 100;

/// The record of an owner, or an answer of a store: the first byte says which.
///
/// # Panics
/// As [`owner`] and [`answer`].
pub fn text(bytes: &[u8]) {
    match bytes.split_first() {
        Some((0, rest)) => owner(rest),
        Some((1, rest)) => answer(rest),
        _ => {}
    }
}

/// Superblocks, a pack, or a disk: the first byte says which.
///
/// # Panics
/// As [`superblocks`], [`pack`] and [`disk`].
pub fn contents(bytes: &[u8]) {
    match bytes.split_first() {
        Some((0, rest)) => superblocks(rest),
        Some((1, rest)) => pack(rest),
        Some((2, rest)) => disk(rest),
        _ => {}
    }
}

/// A name in a directory or a bucket, an address of a bucket, and the path of a directory as a master tells
/// it.
///
/// # Panics
/// When what is parsed is not written as the same, or a path leads elsewhere.
pub fn name(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Some((sequence, kind)) = parse(text) {
        assert_eq!(file_name(sequence, kind), text);
    }
    match Name::parse(text) {
        Some(Name::Pack(sequence)) => assert_eq!(pack_name(sequence), text),
        Some(Name::Dead(sequence)) => assert_eq!(dead_name(sequence), text),
        Some(Name::Part(part)) => assert_eq!(part.text(), text),
        None => {}
    }
    if let Ok(address) = BucketAddress::parse(Path::new(text)) {
        let BucketAddress { bucket, prefix } = &address;
        assert!(bucket.len() <= 63 && prefix.len() <= 512 && prefix.split('/').all(|part| part != ".."));
        assert_eq!(BucketAddress::parse(Path::new(&format!("s3://{bucket}/{prefix}"))), Ok(address));
    }
    let root = Path::new("/root");
    if let Some(path) = below(root, text) {
        let inside = path.strip_prefix(root).expect("below the root");
        assert_eq!(inside.components().count(), 2);
        assert!(inside.components().all(|part| matches!(part, std::path::Component::Normal(_))));
    }
}

/// The record of the owner of a directory: with sequences that were found, and the first that was not
/// reserved, in front.
///
/// # Panics
/// When it is not written as the same, or what was reserved and not found is not void.
pub fn owner(bytes: &[u8]) {
    let Some((numbers, text)) = bytes.split_at_checked(24) else { return };
    let mut numbers = numbers.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    let end = numbers.next().unwrap_or_default();
    let found = numbers.collect();
    let text = &text[..text.len().min(BYTES_MAX as usize)];
    let mut owner = Owner::parse(&String::from_utf8_lossy(text));
    assert_eq!(Owner::parse(&owner.text()), owner);
    owner.void_unused(&found, end);
    assert!(owner.void.len() <= 256);
    let reserved = found.range(..end).next_back().map_or(1, |last| last + 1)..end;
    assert!(reserved.is_empty() || owner.is_void(reserved.start) && owner.is_void(reserved.end - 1));
    assert_eq!(Owner::parse(&owner.text()), owner);
}

/// An answer of a store: its status, and its text.
///
/// # Panics
/// When a code has characters that a terminal or a log would interpret.
pub fn answer(bytes: &[u8]) {
    let Some((status, body)) = bytes.split_first_chunk::<2>() else { return };
    let Some(refusal) = Refusal::of(u16::from_le_bytes(*status), body) else { return };
    assert!(refusal.code.len() <= 64 && refusal.code.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    let text = refusal.fault().to_string();
    assert!(!text.is_empty() && !text.contains(char::is_control));
}

/// Superblocks, and what is made of them when a directory is taken.
///
/// # Panics
/// When a superblock is not written as the same, or the renewed ones are not those of the same directory.
pub fn superblocks(bytes: &[u8]) {
    let mut pages = bytes[..bytes.len().min(PAGES_BYTES)].to_vec();
    pages.resize(PAGES_BYTES, 0);
    pages.chunks_mut(PAGE).for_each(seal);
    let path = Path::new("fuzz");
    let renewed = Renewed::of(&pages);
    assert_eq!(renewed.bytes.len(), PAGES_BYTES);
    let Ok((before, _)) = newest_superblock(&pages, path) else { return };
    assert_eq!(Superblock::decode(&before.encode()).as_ref(), Some(&before));
    let (after, _) = newest_superblock(&renewed.bytes, path).expect("it was valid before");
    assert_eq!((after.disk, after.geometry, after.floor), (before.disk, before.geometry, before.floor));
    assert!(after.bad.is_empty() && after.serial >= before.serial && renewed.end >= before.sequences_end);
    assert!(renewed.bad.is_empty() || after.sequences_end == renewed.end);
}

/// The first and the last page of a pack, and its name.
///
/// # Panics
/// When what is accepted does not fit the directory.
pub fn pack(bytes: &[u8]) {
    let Some((numbers, rest)) = bytes.split_first_chunk::<16>() else { return };
    let (sequence, length) = numbers.split_at(8);
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let (geometry, mut page) = (geometry(), rest[..rest.len().min(64 << 10)].to_vec());
    page.resize(page.len().next_multiple_of(PAGE).max(PAGE), 0);
    let expected = Expected { disk: &UUID, geometry: &geometry, sequence: number(sequence) };
    if let Ok(slot) = expected.begun(&page) {
        assert!(slot < geometry.extents());
    }
    let mut head = page.clone();
    seal(&mut head);
    for slot in 0..2 {
        let Some(header) = BatchHeader::decode(&head, &UUID, &geometry, slot, 0) else { continue };
        assert!(header.batch_bytes <= geometry.extent_bytes() && header.header_bytes <= header.batch_bytes);
        for entry in &header.entries {
            let end = u64::from(entry.offset) + u64::from(geometry.image_bytes(entry.len.into()));
            assert!(entry.offset >= header.header_bytes && end <= header.batch_bytes.into());
        }
        // A locator leads back to the place that it was made of.
        let locator = geometry.locator(header.extent.sequence, geometry.extent_bytes() - 1);
        assert_eq!(geometry.place(locator).0, header.extent.sequence);
    }
    seal_footer(&mut page);
    if let Some(Ok(closed)) = expected.closed(&page, number(length)) {
        assert!(closed.slot < geometry.extents());
        assert!(u64::from(closed.end) + u64::from(closed.footer) <= u64::from(geometry.extent_bytes()));
    }
    for slot in 0..2 {
        if let Some(footer) = Footer::decode(&page, &UUID, &geometry, slot) {
            assert!(footer.end <= geometry.extent_bytes() - footer.footer_bytes);
        }
    }
}

/// A disk with these bytes at both ends of its first extent, as tools read it.
///
/// # Panics
/// When more objects are found than were announced.
pub fn disk(bytes: &[u8]) {
    let Some((split, rest)) = bytes.split_first_chunk::<2>() else { return };
    let split = usize::from(u16::from_le_bytes(*split)).min(rest.len());
    let padded = |bytes: &[u8]| {
        let mut bytes = bytes[..bytes.len().min(32 << 10)].to_vec();
        bytes.resize(bytes.len().next_multiple_of(PAGE), 0);
        bytes
    };
    let (mut head, mut tail) = (padded(&rest[..split]), padded(&rest[split..]));
    head.chunks_mut(PAGE).for_each(seal);
    if !tail.is_empty() {
        seal_footer(&mut tail);
    }
    let volume = Sparse { head, tail };
    let survey = inspect(&volume).expect("its superblock is valid");
    let verified = verify(&volume, |so_far| {
        assert!(so_far.objects <= so_far.of);
        ControlFlow::Continue(())
    });
    let verified = verified.expect("its superblock is valid");
    assert_eq!((verified.objects, verified.survey.objects), (survey.objects, survey.objects));
    assert!(verified.complete && verified.damaged <= verified.objects);
}

fn geometry() -> Geometry {
    let extents = u64::from(EXTENTS_MIN) * u64::from(EXTENT_BYTES_MIN);
    Geometry::new(FIRST_EXTENT_AT + extents, EXTENT_BYTES_MIN, 512).expect("the smallest one")
}

fn crc(bytes: &[u8]) -> [u8; 4] {
    te_host::crc32c_of(0, bytes).to_le_bytes()
}

/// Puts the checksum in.
fn seal(page: &mut [u8]) {
    if let Some((body, end)) = page.split_last_chunk_mut::<4>() {
        *end = crc(body);
    }
}

/// Puts the checksums of a footer in.
fn seal_footer(page: &mut [u8]) {
    let Some((lists, tail)) = page.split_last_chunk_mut::<TAIL_BYTES>() else { return };
    tail[BODY_CRC_AT..BODY_CRC_AT + 4].copy_from_slice(&crc(lists));
    seal(tail);
}

/// A disk whose other bytes are zeros.
struct Sparse {
    head: Vec<u8>,
    tail: Vec<u8>,
}

impl sealed::Sealed for Sparse {}

impl Volume for Sparse {
    fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        let superblock = Superblock {
            disk: UUID,
            geometry: geometry(),
            serial: 3,
            sequences_end: 100,
            floor: 1,
            written_bytes: 0,
            object_bytes: 0,
            marks: Marks::default(),
            bad: [5].into(),
        };
        Ok((superblock, 2))
    }

    fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        buffer.fill(0);
        let (begin, end) = (geometry().extent_at(0), geometry().extent_at(1));
        let mut overlay = |at: u64, bytes: &[u8]| {
            let from = at.max(offset);
            let to = (at + bytes.len() as u64).min(offset + buffer.len() as u64);
            if from < to {
                let range = (from - at) as usize..(to - at) as usize;
                buffer[(from - offset) as usize..(to - offset) as usize].copy_from_slice(&bytes[range]);
            }
        };
        overlay(begin, &self.head);
        overlay(end - self.tail.len() as u64, &self.tail);
        Ok(buffer.len())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use te_core::testkit::Rng;

    use super::*;

    /// The initial inputs of a target.
    fn inputs(target: &str) -> Vec<Vec<u8>> {
        let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
        let files = std::fs::read_dir(corpus).unwrap().map(|entry| entry.unwrap().path());
        let inputs: Vec<Vec<u8>> = files.map(|path| std::fs::read(path).unwrap()).collect();
        assert!(inputs.len() >= 3, "{target}");
        inputs
    }

    #[test]
    fn the_initial_inputs_of_the_fuzz_targets_and_what_is_near_to_them_break_nothing() {
        let mut rng = Rng::new(1);
        type Run = fn(&[u8]);
        for (target, run) in [("pack_names", name as Run), ("pack_texts", text), ("pack_contents", contents)]
        {
            for input in inputs(target) {
                run(&input);
                for _ in 0..60 {
                    let mut near = input.clone();
                    for _ in 0..1 + rng.below(3) {
                        let (at, byte) = (rng.index(near.len().min(300)), rng.below(256) as u8);
                        near[at] = byte;
                    }
                    run(&near);
                }
            }
        }
    }

    #[test]
    fn the_initial_inputs_are_what_they_are_meant_to_be() {
        let all = inputs("pack_contents");
        let found = all.iter().filter(|input| input[0] == 2).map(|input| {
            let split = usize::from(u16::from_le_bytes([input[1], input[2]]));
            let (mut head, mut tail) = (input[3..3 + split].to_vec(), input[3 + split..].to_vec());
            head.chunks_mut(PAGE).for_each(seal);
            seal_footer(&mut tail);
            inspect(&Sparse { head, tail }).unwrap().objects
        });
        assert_eq!(found.collect::<Vec<u64>>(), [1, 1, 1], "an object in each");
    }
}

//! Bits of objects on disks are flipped: a read afterwards must be a miss, never the damaged bytes.
//!
//! The image of an object on a disk begins with its bytes, at a multiple of 512 bytes, so its place in the
//! file is found by its first sixteen bytes, which no other object has. Only objects are chosen that are on a
//! disk and nowhere else.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use super::content::HEAD_BYTES;
use super::ledger::{Kind, Read};
use super::shared::say;
use super::writer::Writer;

const BLOCK: usize = 512;
const READ_BYTES: usize = 1 << 20;

/// What is to be flipped.
#[derive(Clone, Debug)]
pub(crate) struct Flips {
    /// Objects, at most.
    pub(crate) count: usize,
    /// The files of the disks.
    pub(crate) paths: Vec<PathBuf>,
}

/// What became of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flipped {
    /// Objects with a flipped bit on every disk that has them.
    pub(crate) flips: u64,
    /// Reads that found nothing.
    pub(crate) detected: u64,
    /// Reads that returned the wrong bytes.
    pub(crate) served: u64,
    /// Reads that found the right bytes: the object was in memory again.
    pub(crate) undetermined: u64,
}

/// Flips one bit of each of some objects, and reads them.
pub(crate) fn flip(writer: &mut Writer, flips: &Flips) -> Flipped {
    match try_flip(writer, flips) {
        Ok(flipped) => flipped,
        Err(error) => {
            say(&format!("note no bits were flipped: {error}"));
            Flipped::default()
        }
    }
}

fn try_flip(writer: &mut Writer, flips: &Flips) -> io::Result<Flipped> {
    let cold = writer.ledger.ids(Kind::Cold);
    let mut chosen = HashMap::new();
    for (id, place) in writer.places(&cold) {
        let acked = writer.ledger.of(id).map_or(0, |(_, acked)| acked);
        if place != Some(true) || chosen.len() == flips.count {
            continue;
        }
        if let Some(value) = writer.value(id, acked) {
            let head: [u8; HEAD_BYTES] = value[..HEAD_BYTES].try_into().unwrap_or_default();
            chosen.insert(head, (id, value.len(), 0_u32));
        }
    }
    for path in &flips.paths {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        for (at, head) in find(&file, |head| chosen.contains_key(head))? {
            let Some((_, len, found)) = chosen.get_mut(&head) else { continue };
            let bit = writer.rng.below(*len as u64 * 8);
            let mut byte = [0];
            file.read_exact_at(&mut byte, at + bit / 8)?;
            byte[0] ^= 1 << (bit % 8);
            file.write_all_at(&byte, at + bit / 8)?;
            *found += 1;
        }
        file.sync_data()?;
    }
    let mut flipped = Flipped::default();
    for (id, _, found) in chosen.into_values() {
        if found == 0 {
            continue;
        }
        flipped.flips += 1;
        match writer.read_once(id) {
            Ok(Read::Miss) => flipped.detected += 1,
            Ok(Read::Value { intact: true, .. }) => flipped.undetermined += 1,
            Ok(Read::Value { intact: false, .. }) => {
                flipped.served += 1;
                writer.shared.complain("wrong", &format!("a flipped bit of object {id} was served"));
            }
            Err(error) => say(&format!("note a read of a damaged object failed: {error}")),
        }
        writer.remove(id);
    }
    Ok(flipped)
}

/// Where in the file a wanted head is.
fn find(file: &File, wanted: impl Fn(&[u8; HEAD_BYTES]) -> bool) -> io::Result<Vec<(u64, [u8; HEAD_BYTES])>> {
    let (mut found, mut bytes, mut at) = (Vec::new(), vec![0; READ_BYTES], 0);
    loop {
        let len = file.read_at(&mut bytes, at)?;
        if len == 0 {
            return Ok(found);
        }
        // A short read ends at a block, except at the end of the file.
        for (block, part) in bytes[..len].chunks(BLOCK).enumerate() {
            let head = part.first_chunk::<HEAD_BYTES>();
            if let Some(head) = head.filter(|head| wanted(head)) {
                found.push((at + (block * BLOCK) as u64, *head));
            }
        }
        at += len as u64;
    }
}

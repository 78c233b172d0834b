//! What device-mapper's target `log-writes` has recorded, and what is found when the power goes.
//!
//! The log has the writes that had ended before a flush in front of that flush; marks are where they were
//! made. Its format is in the kernel's `Documentation/admin-guide/device-mapper/log-writes.rst` and
//! `drivers/md/dm-log-writes.c`.

use std::fs::File;
use std::io::{BufReader, Read as _, Seek as _};
use std::path::Path;

use te_core::testkit::Rng;

/// A device loses or keeps this much of a write.
const PAGE: usize = 4_096;

/// An entry of the log.
pub(crate) enum Entry {
    /// The text of a mark.
    Mark(String),
    /// A write or a flush, or both.
    Io(Io),
}

/// Bytes that are written somewhere.
pub(crate) struct Io {
    at: usize,
    data: Vec<u8>,
    /// What was written before is durable.
    pub(crate) is_flush: bool,
    /// It is durable itself when it ends.
    is_durable: bool,
}

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

const MAGIC: u64 = 0x006a_7366_7773_6872;

/// Copies the first bytes of a device to a file.
pub(crate) fn copy(device: &Path, to: &Path, bytes: u64) {
    let copied = std::io::copy(&mut File::open(device).unwrap().take(bytes), &mut File::create(to).unwrap());
    assert_eq!(copied.unwrap(), bytes);
}

/// Reads a log; returns its bytes, too.
pub(crate) fn read(path: &Path) -> (Vec<Entry>, u64) {
    let mut file = BufReader::new(File::open(path).unwrap());
    let mut next = |bytes: usize| {
        let mut buffer = vec![0; bytes];
        file.read_exact(&mut buffer).unwrap();
        buffer
    };
    let number = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let first = next(512);
    assert_eq!((number(&first, 0), number(&first, 8)), (MAGIC, 1), "magic and version of the log");
    let (count, sector) = (number(&first, 16), number(&first, 24) as u32 as usize);
    next(sector - 512);
    let mut entries = Vec::new();
    for _ in 0..count {
        let head = next(sector);
        let [at, sectors, flags, len] = [0, 8, 16, 24].map(|at| number(&head, at));
        assert_eq!(flags & DISCARD, 0, "nothing is discarded here");
        if flags & MARK != 0 {
            // The text is behind the head, in the same sector.
            let text = String::from_utf8_lossy(&head[32..32 + len as usize]);
            entries.push(Entry::Mark(text.trim_end_matches('\0').to_owned()));
            continue;
        }
        let data = next(sectors as usize * sector);
        let (is_flush, is_durable) = (flags & FLUSH != 0, flags & FUA != 0);
        entries.push(Entry::Io(Io { at: at as usize * sector, data, is_flush, is_durable }));
    }
    (entries, file.stream_position().unwrap())
}

/// A device whose power may go at any time.
pub(crate) struct Device<'a> {
    durable: Vec<u8>,
    /// Writes after the last flush.
    pending: Vec<&'a Io>,
    rng: Rng,
}

impl<'a> Device<'a> {
    pub(crate) fn new(bytes: u64) -> Self {
        Self { durable: vec![0; bytes as usize], pending: Vec::new(), rng: Rng::new(1) }
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.pending.is_empty()
    }

    /// Carries out the next operation.
    pub(crate) fn carry_out(&mut self, io: &'a Io) {
        if io.is_flush {
            for write in self.pending.drain(..) {
                apply(&mut self.durable, write, || true);
            }
        }
        if io.is_durable {
            apply(&mut self.durable, io, || true);
        } else if !io.data.is_empty() {
            self.pending.push(io);
        }
    }

    /// What is found if the power goes now: of each write that no flush has covered all, nothing, or some
    /// pages.
    pub(crate) fn without_power(&mut self) -> Vec<u8> {
        let mut bytes = self.durable.clone();
        let rng = &mut self.rng;
        for write in &self.pending {
            let fate = rng.below(3);
            apply(&mut bytes, write, || fate == 0 || fate == 1 && rng.below(2) == 0);
        }
        bytes
    }
}

fn apply(bytes: &mut [u8], write: &Io, mut keeps: impl FnMut() -> bool) {
    for (number, page) in write.data.chunks(PAGE).enumerate() {
        let at = write.at + number * PAGE;
        if keeps() {
            bytes[at..at + page.len()].copy_from_slice(page);
        }
    }
}

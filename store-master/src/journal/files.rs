//! The files of a journal: their names, what is in them, and how they are read.
//!
//! ```text
//!   journal-0000000000000000.log   ┌────────┬────────┬────────┬───        every command after 0, in records
//!                                  │ header │ record │ record │ …         of what was written at once
//!   journal-00000000000004d2.log   └────────┴────────┴────────┴───        every command after 0x4d2
//!   snapshot-00000000000004d2.snap                                        the state after command 0x4d2
//!   lock                                                                  held by the master that uses them
//! ```
//!
//! A record is written after the one before it is on disk, so a crash leaves at most the last record
//! incomplete. That is cut off. A damaged record that a whole one follows is damage of the disk.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use store_core::command_log::{BEHAVIOUR, Command, Lsn, Standby};

use super::{JournalError, at_path, crc32c};

const MAGIC: [u8; 8] = *b"SNOWJRNL";
const VERSION: u16 = 1;
/// Length of a file's header: magic, version, 2 bytes of zeros, behaviour, lineage, the last command before
/// the file, CRC-32C of all that, 4 bytes of zeros.
pub(super) const HEADER_BYTES: usize = 40;
/// Length of a record's head: mark, length of the commands, the last command before the record, its own last
/// command, CRC-32C of all that and of the commands, 4 bytes of zeros. Records begin at multiples of 8.
const HEAD_BYTES: usize = 32;
const MARK: u32 = 0x4452_4a53;
/// Longest commands of one record, bytes: what is written at once is less, but for one request.
const RECORD_BYTES_MAX: usize = 1 << 30;

pub(super) fn journal_name(after: Lsn) -> String {
    format!("journal-{after:016x}.log")
}

pub(super) fn snapshot_name(lsn: Lsn) -> String {
    format!("snapshot-{lsn:016x}.snap")
}

/// The files of a directory, each list sorted by position.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) journals: Vec<(Lsn, PathBuf)>,
    pub(super) snapshots: Vec<(Lsn, PathBuf)>,
}

impl Listing {
    pub(super) fn of(dir: &Path) -> Result<Self, JournalError> {
        let mut this = Self::default();
        for entry in fs::read_dir(dir).map_err(at_path(dir))? {
            let path = entry.map_err(at_path(dir))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let number = |prefix: &str, suffix: &str| {
                let digits = name.strip_prefix(prefix)?.strip_suffix(suffix)?;
                (digits.len() == 16).then(|| Lsn::from_str_radix(digits, 16).ok())?
            };
            if let Some(after) = number("journal-", ".log") {
                this.journals.push((after, path));
            } else if let Some(lsn) = number("snapshot-", ".snap") {
                this.snapshots.push((lsn, path));
            }
        }
        this.journals.sort_unstable();
        this.snapshots.sort_unstable();
        Ok(this)
    }
}

pub(super) fn header(lineage: u64, after: Lsn) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..10].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&BEHAVIOUR.to_le_bytes());
    header[16..24].copy_from_slice(&lineage.to_le_bytes());
    header[24..32].copy_from_slice(&after.to_le_bytes());
    let crc = crc32c(&header[..32]);
    header[32..36].copy_from_slice(&crc.to_le_bytes());
    header
}

/// Appends a record to a buffer.
pub(super) fn push_record(to: &mut Vec<u8>, after: Lsn, last: Lsn, commands: &[u8]) {
    let start = to.len();
    to.resize(start + HEAD_BYTES, 0);
    to.extend_from_slice(commands);
    let head = &mut to[start..start + HEAD_BYTES];
    head[..4].copy_from_slice(&MARK.to_le_bytes());
    head[4..8].copy_from_slice(&(commands.len() as u32).to_le_bytes());
    head[8..16].copy_from_slice(&after.to_le_bytes());
    head[16..24].copy_from_slice(&last.to_le_bytes());
    let crc = sum_of(head, commands);
    to[start + 24..start + 28].copy_from_slice(&crc.to_le_bytes());
    to.resize(to.len().next_multiple_of(8), 0);
}

fn sum_of(head: &[u8], commands: &[u8]) -> u32 {
    // The commands' sum alone does not know their place.
    crc32c(&head[..24]) ^ crc32c(commands).rotate_left(1)
}

/// A record that was read.
struct Record<'a> {
    after: Lsn,
    last: Lsn,
    commands: &'a [u8],
    /// Where the next one begins.
    next: usize,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}

/// The record at an offset, if there is a whole one.
fn record_at(bytes: &[u8], at: usize) -> Option<Record<'_>> {
    let head = bytes.get(at..at + HEAD_BYTES)?;
    let len = u32::from_le_bytes(number(head, 4)) as usize;
    if u32::from_le_bytes(number(head, 0)) != MARK || len > RECORD_BYTES_MAX {
        return None;
    }
    let commands = bytes.get(at + HEAD_BYTES..at + HEAD_BYTES + len)?;
    let (after, last) = (u64::from_le_bytes(number(head, 8)), u64::from_le_bytes(number(head, 16)));
    if sum_of(head, commands) != u32::from_le_bytes(number(head, 24)) || last <= after {
        return None;
    }
    Some(Record { after, last, commands, next: (at + HEAD_BYTES + len).next_multiple_of(8) })
}

/// Repeats the commands of a file that the standby has not executed yet. The last file may end with a record
/// that is not whole: it is cut off.
///
/// # Errors
/// The file is damaged, lacks commands, is of another store or another release, or cannot be repeated.
pub(super) fn replay(
    path: &Path,
    is_last: bool,
    lineage: u64,
    standby: &mut Standby,
) -> Result<(), JournalError> {
    let bytes = fs::read(path).map_err(at_path(path))?;
    let damaged = |offset: usize| JournalError::Damaged { path: path.into(), offset: offset as u64 };
    let Some(head) = bytes.get(..HEADER_BYTES) else {
        return if is_last { Ok(()) } else { Err(damaged(0)) };
    };
    if crc32c(&head[..32]) != u32::from_le_bytes(number(head, 32)) || head[..8] != MAGIC {
        // A file that was just begun may have any beginning.
        let begun = is_last && next_record(&bytes, HEADER_BYTES).is_none();
        return if begun { cut(path, 0) } else { Err(damaged(0)) };
    }
    let version = u16::from_le_bytes(number(head, 8));
    let behaviour = u32::from_le_bytes(number(head, 12));
    if (version, behaviour) != (VERSION, BEHAVIOUR) {
        return Err(JournalError::Release { path: path.into(), version, behaviour });
    }
    if u64::from_le_bytes(number(head, 16)) != lineage {
        return Err(JournalError::Foreign { path: path.into() });
    }
    let (lsn, after) = (standby.lsn(), u64::from_le_bytes(number(head, 24)));
    if after > lsn {
        return Err(JournalError::Gap { path: path.into(), from: lsn + 1, to: after });
    }
    let mut at = HEADER_BYTES;
    while at < bytes.len() {
        let Some(record) = record_at(&bytes, at) else {
            return match next_record(&bytes, at) {
                None if is_last => cut(path, at),
                _ => Err(damaged(at)),
            };
        };
        repeat(path, &record, standby)?;
        at = record.next;
    }
    Ok(())
}

/// The first whole record after an offset.
fn next_record(bytes: &[u8], at: usize) -> Option<usize> {
    (at.next_multiple_of(8)..bytes.len()).step_by(8).find(|at| record_at(bytes, *at).is_some())
}

fn repeat(path: &Path, record: &Record<'_>, standby: &mut Standby) -> Result<(), JournalError> {
    let lsn = standby.lsn();
    if record.last <= lsn {
        return Ok(());
    }
    if record.after > lsn {
        return Err(JournalError::Gap { path: path.into(), from: lsn + 1, to: record.after });
    }
    let command = |error| JournalError::Command { path: path.into(), after: record.after, error };
    let mut commands = record.commands;
    for _ in record.after..lsn {
        let decoded = Command::decode(commands).map_err(command)?;
        commands = decoded.map_or(&[][..], |(_, rest)| rest);
    }
    standby.apply(commands).map_err(command)
}

/// Cuts the end of a file off.
fn cut(path: &Path, len: usize) -> Result<(), JournalError> {
    let cut = || {
        let file = File::options().write(true).open(path)?;
        file.set_len(len as u64)?;
        file.sync_all()
    };
    let path_shown = path.display();
    tracing::warn!(path = %path_shown, len, "the journal's end was not written completely: it is cut off");
    cut().map_err(at_path(path))
}

/// Makes names in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::MasterConfig;

    use super::*;

    /// A file with timeouts as commands: `counts` per record, after command `after`.
    fn file(after: Lsn, counts: &[u64]) -> Vec<u8> {
        let mut bytes = header(0, after).to_vec();
        let mut lsn = after;
        for count in counts {
            let mut commands = Vec::new();
            (0..*count).for_each(|_| Command::Timeout { after_ns: 1 }.encode(&mut commands));
            push_record(&mut bytes, lsn, lsn + count, &commands);
            lsn += count;
        }
        bytes
    }

    fn replayed(bytes: &[u8], is_last: bool, standby: &mut Standby) -> Result<(), JournalError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, bytes).unwrap();
        replay(&path, is_last, 0, standby)
    }

    fn standby() -> Standby {
        Standby::new(MasterConfig::default()).unwrap()
    }

    #[test]
    fn commands_that_the_snapshot_has_are_skipped_even_within_a_record() {
        let mut standby = standby();
        replayed(&file(0, &[3, 4]), false, &mut standby).unwrap();
        assert_eq!(standby.lsn(), 7);
        // This file repeats some of them, and has more.
        replayed(&file(2, &[2, 10]), true, &mut standby).unwrap();
        assert_eq!(standby.lsn(), 14);
        let gap = replayed(&file(20, &[1]), true, &mut standby);
        assert!(matches!(gap, Err(JournalError::Gap { from: 15, to: 20, .. })), "{gap:?}");
    }

    #[test]
    fn wherever_the_last_file_ends_everything_before_is_there() {
        let whole = file(0, &[1, 2, 3]);
        // A timeout takes 3 bytes. The padding after a record may be missing.
        let one = HEADER_BYTES + HEAD_BYTES + 3..=(HEADER_BYTES + HEAD_BYTES + 3).next_multiple_of(8);
        let two = one.end() + HEAD_BYTES + 6..=(one.end() + HEAD_BYTES + 6).next_multiple_of(8);
        for len in 0..whole.len() {
            let mut standby = standby();
            let found = replayed(&whole[..len], true, &mut standby);
            assert!(found.is_ok(), "{len}: {found:?}");
            let lsn = if len >= *two.start() { 3 } else { u64::from(len >= *one.start()) };
            assert!(standby.lsn() == lsn || standby.lsn() == 6, "{len}: {}", standby.lsn());
            let inner = replayed(&whole[..len], false, &mut self::standby());
            let complete = len == HEADER_BYTES || one.contains(&len) || two.contains(&len) || lsn == 6;
            assert_eq!(inner.is_ok(), complete || standby.lsn() == 6, "{len}: a file that others follow");
        }
    }

    #[test]
    fn a_wrong_bit_is_an_error_unless_it_is_in_the_last_record_or_in_padding() {
        let (one, whole) = (file(0, &[1]).len(), file(0, &[1, 40]));
        for bit in 0..one * 8 {
            let mut wrong = whole.clone();
            wrong[bit / 8] ^= 1 << (bit % 8);
            let mut standby = standby();
            let found = replayed(&wrong, true, &mut standby);
            assert!(found.is_err() || standby.lsn() == 41, "bit {bit}: {} commands", standby.lsn());
        }
    }

    #[test]
    fn files_of_other_releases_and_stores_are_refused() {
        let mut standby = standby();
        let with = |at: usize, byte: u8| {
            let mut bytes = file(0, &[1]);
            bytes[at] ^= byte;
            let crc = crc32c(&bytes[..32]);
            bytes[32..36].copy_from_slice(&crc.to_le_bytes());
            bytes
        };
        let behaviour = replayed(&with(12, 2), true, &mut standby).unwrap_err();
        assert!(matches!(behaviour, JournalError::Release { .. }), "{behaviour}");
        assert!(behaviour.to_string().contains("start that release"), "{behaviour}");
        let version = replayed(&with(8, 4), true, &mut standby).unwrap_err();
        assert!(matches!(version, JournalError::Release { .. }), "{version}");
        let lineage = replayed(&with(16, 1), true, &mut standby).unwrap_err();
        assert!(matches!(lineage, JournalError::Foreign { .. }), "{lineage}");
    }
}

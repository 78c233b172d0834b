//! Names of the files of a directory of packs.

use std::path::{Path, PathBuf};

use store_core::disk::format::DiskUuid;

pub(super) const SUPERBLOCK: &str = "superblock";
pub(super) const OWNER: &str = "owner";
pub(super) const LOCK: &str = "lock";

/// What a file of an extent is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// It is given up: the master drops its places. The file goes when its slot is used again.
    Dead,
    /// It is being written, or its owner ended before it was closed.
    Open,
    /// Closed: it does not change any more.
    Pack,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Pack, Self::Open, Self::Dead];

    const fn suffix(self) -> &'static str {
        match self {
            Self::Dead => "dead",
            Self::Open => "open",
            Self::Pack => "pack",
        }
    }
}

/// `0000000000000042.pack`: names sort as sequences do.
pub(super) fn file_name(sequence: u64, kind: Kind) -> String {
    format!("{sequence:016}.{}", kind.suffix())
}

/// The sequence and kind that a name says.
pub(super) fn parse(name: &str) -> Option<(u64, Kind)> {
    let (sequence, suffix) = name.split_once('.')?;
    let kind = Kind::ALL.into_iter().find(|kind| kind.suffix() == suffix)?;
    let sequence = sequence.parse().ok()?;
    (file_name(sequence, kind) == name).then_some((sequence, kind))
}

/// The name of a directory: the uuid in the usual form.
pub(super) fn uuid_text(uuid: &DiskUuid) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let [a, b, c, d, e] = [&uuid[..4], &uuid[4..6], &uuid[6..8], &uuid[8..10], &uuid[10..]].map(hex);
    format!("{a}-{b}-{c}-{d}-{e}")
}

/// Whether a directory may be one of packs, by its name.
#[cfg(any(feature = "s3", test))]
pub(super) fn is_uuid(name: &str) -> bool {
    let dash = |at: usize| matches!(at, 8 | 13 | 18 | 23);
    let right = |(at, byte): (usize, u8)| match dash(at) {
        true => byte == b'-',
        false => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
    };
    name.len() == 36 && name.bytes().enumerate().all(right)
}

/// Where readers find the bytes of an extent, in the order in which they try.
#[derive(Clone, Copy, Debug)]
pub struct PackNames;

impl PackNames {
    /// The file of the closed pack.
    #[must_use]
    pub fn pack(directory: &Path, sequence: u64) -> PathBuf {
        directory.join(file_name(sequence, Kind::Pack))
    }

    /// The file while its owner appends to it.
    #[must_use]
    pub fn open(directory: &Path, sequence: u64) -> PathBuf {
        directory.join(file_name(sequence, Kind::Open))
    }

    /// The file after it was given up, until its room is used again.
    #[must_use]
    pub fn dead(directory: &Path, sequence: u64) -> PathBuf {
        directory.join(file_name(sequence, Kind::Dead))
    }

    /// The file that every directory of packs has.
    #[must_use]
    pub fn superblock(directory: &Path) -> PathBuf {
        directory.join(SUPERBLOCK)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_others_are_not() {
        for kind in Kind::ALL {
            for sequence in [1, 42, u64::from(u32::MAX), u64::MAX] {
                assert_eq!(parse(&file_name(sequence, kind)), Some((sequence, kind)));
            }
        }
        for other in
            ["superblock", "owner", "1.pack", "0000000000000001.pack.tmp", "000000000000000x.pack", ".pack"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
        assert_eq!(uuid_text(&[0xab; 16]), "abababab-abab-abab-abab-abababababab");
        assert!(is_uuid(&uuid_text(&[0x2f; 16])));
        for other in
            ["default", "", "ABABABAB-abab-abab-abab-abababababab", "abababababab-abab-abab-abababababab"]
        {
            assert!(!is_uuid(other), "{other}");
        }
    }
}

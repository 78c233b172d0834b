//! Names of the objects of a directory in a bucket.
//!
//! ```text
//!   PREFIX/CLUSTER/UUID/superblock                              two pages, and whose they are
//!                       owner                                   who writes here
//!                       0000000000000041.pack                   a closed extent: batches ‖ footer; immutable
//!                       0000000000000042.000003-0000069632-TOKEN.part    a part of an open one, from an offset on
//!                       0000000000000012.dead                   the pack of this sequence does not count
//! ```
//!
//! The token of a part says which owner has put it.

use super::names::{Kind, file_name, parse};

/// What an object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    Pack(u64),
    Dead(u64),
    Part(PartName),
}

/// A part of an open extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartName {
    pub(super) sequence: u64,
    /// Later parts cover earlier ones.
    pub(super) serial: u32,
    /// Where it begins in the extent.
    pub(super) from: u32,
    pub(super) token: String,
}

impl PartName {
    pub(super) fn text(&self) -> String {
        let Self { sequence, serial, from, token } = self;
        format!("{sequence:016}.{serial:06}-{from:010}-{token}.part")
    }

    fn parse(name: &str) -> Option<Self> {
        let (sequence, rest) = name.strip_suffix(".part")?.split_once('.')?;
        let mut rest = rest.split('-');
        let (serial, from, token) = (rest.next()?, rest.next()?, rest.next()?);
        let (sequence, serial, from) = (sequence.parse().ok()?, serial.parse().ok()?, from.parse().ok()?);
        let part = Self { sequence, serial, from, token: token.to_owned() };
        (part.text() == name).then_some(part)
    }
}

impl Name {
    pub(super) fn parse(name: &str) -> Option<Self> {
        match parse(name) {
            Some((sequence, Kind::Pack)) => Some(Self::Pack(sequence)),
            Some((sequence, Kind::Dead)) => Some(Self::Dead(sequence)),
            Some((_, Kind::Open)) => None,
            None => PartName::parse(name).map(Self::Part),
        }
    }
}

pub(crate) fn pack_name(sequence: u64) -> String {
    file_name(sequence, Kind::Pack)
}

pub(super) fn dead_name(sequence: u64) -> String {
    file_name(sequence, Kind::Dead)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_others_are_not() {
        for sequence in [1, 42, u64::MAX] {
            assert_eq!(Name::parse(&pack_name(sequence)), Some(Name::Pack(sequence)));
            assert_eq!(Name::parse(&dead_name(sequence)), Some(Name::Dead(sequence)));
            let part = PartName { sequence, serial: 7, from: u32::MAX, token: "0af1".into() };
            assert_eq!(Name::parse(&part.text()), Some(Name::Part(part)));
        }
        for other in ["superblock", "owner", "1.pack", "0000000000000001.open", "0000000000000001.1-2-a.part"]
        {
            assert_eq!(Name::parse(other), None, "{other}");
        }
    }
}

//! Snapshots: the exact state of a master, as a stream of bytes from which a [`Standby`] continues the
//! [command log](crate::command_log).
//!
//! ```text
//!   chunk 0                                                            chunk n           chunk n + 1
//!   ┌──────────────┬────────────────────────────────────────┐  …  ┌───────────────┐  ┌──────────────────┐
//!   │ len, no, CRC │ magic, version, behaviour, position    │     │ … state       │  │ bytes, digest of │
//!   │              │ settings, state …                      │     │               │  │ all chunks before│
//!   └──────────────┴────────────────────────────────────────┘     └───────────────┘  └──────────────────┘
//! ```
//!
//! A snapshot is not a list of objects, it is the state: the order in which objects will be evicted, the free
//! blocks of each segment in the order in which they will be used, leases, pins, unfinished puts, tasks,
//! space that is pending release. So the commands that follow it have the effect that they had on the master
//! it was taken of, which [`Master::digest`](crate::Master::digest) shows. Not in it: what can be computed
//! (hash tables), caches, events that no log has read, and the counters of the leader that no command
//! changes.
//!
//! Types of state derive `Serialize` and `Deserialize`, so a field that is added is part of the snapshot.
//! Large tables are written in pages, see `packed.rs`. Nothing that is read is trusted: chunks have CRCs, and
//! no length allocates more than what follows it.
//!
//! A snapshot contains the secrets of tenants.
//!
//! # Example
//!
//! ```
//! use store_core::command_log::Standby;
//! use store_core::{MasterConfig, snapshot};
//!
//! fn crc32c(bytes: &[u8]) -> u32 {
//!     // The caller's; a slow one.
//!     !bytes.iter().fold(!0, |crc, byte| {
//!         (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ (crc & 1) * 0x82f6_3b78)
//!     })
//! }
//!
//! let standby = Standby::new(MasterConfig::default())?;
//! let mut file = Vec::new();
//! standby.snapshot(1, crc32c, &mut |chunk| -> Result<(), ()> { Ok(file.extend_from_slice(chunk))
//! }).unwrap();
//!
//! let mut rest = &file[..];
//! let (restored, position) = snapshot::restore(crc32c, &mut |to| std::io::Read::read(&mut rest, to))?;
//! assert_eq!((restored.lsn(), position.term), (0, 1));
//! assert_eq!(restored.master().digest(), standby.master().digest());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod fields;
mod packed;
mod stream;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests;

use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::command_log::{BEHAVIOUR, Lsn, SessionRecord, Standby};
use crate::session::Leases;
use crate::{ConfigError, Instant, Master};

pub(crate) use fields::{array, error, location, secret, words};
pub(crate) use packed::{Packed, packed, take};
pub use stream::{CHUNK_BYTES_MAX, Crc32c};
pub(crate) use stream::{Failed, Put, Take};
use stream::{Input, Output};

const MAGIC: [u8; 8] = *b"SNOWSNAP";
/// The version of the format.
const VERSION: u16 = 1;

/// Where in which log a snapshot was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Which state: the [`MasterConfig::epoch`](crate::MasterConfig::epoch) of the master.
    pub lineage: u64,
    /// Which leader of this state, as the caller counts them.
    pub term: u64,
    /// The last command that the state has.
    pub lsn: Lsn,
    /// The time of that command, ns.
    pub at_ns: u64,
    /// Number of objects, those that are being written included.
    pub objects: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// Where.
    pub position: Position,
    /// Length of the snapshot, bytes.
    pub bytes: u64,
    /// A digest of all of it.
    pub digest: u64,
}

/// The last chunk.
#[derive(Serialize, Deserialize)]
struct Trailer {
    bytes: u64,
    digest: u64,
    objects: u64,
}

/// Writes the state of a master whose last command was `lsn`, at `at`; `sessions` are the connections that
/// the log names, by their numbers less 1.
///
/// # Errors
/// That of `sink`.
pub(crate) fn write<E>(
    master: &Master,
    (term, lsn, at): (u64, Lsn, Instant),
    sessions: &[Option<SessionRecord<&Leases>>],
    crc32c: Crc32c,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), E>,
) -> Result<Written, SnapshotError<E>> {
    let objects = master.objects_in_all();
    let lineage = master.config().epoch.into();
    let position = Position { lineage, term, lsn, at_ns: at.as_nanos(), objects };
    let mut out = Output::new(crc32c, sink);
    match write_to(&mut out, master, &position, sessions) {
        Ok((bytes, digest)) => Ok(Written { position, bytes, digest }),
        // What the types of state serialise is in memory, and only writing it can fail.
        Err(Failed) => Err(out.failure().map_or(SnapshotError::Refused, SnapshotError::Sink)),
    }
}

fn write_to<E>(
    out: &mut Output<'_, E>,
    master: &Master,
    position: &Position,
    sessions: &[Option<SessionRecord<&Leases>>],
) -> Result<(u64, u64), Failed> {
    out.raw(&MAGIC)?;
    out.raw(&VERSION.to_le_bytes())?;
    out.raw(&BEHAVIOUR.to_le_bytes())?;
    out.put(position)?;
    out.put(&sessions)?;
    master.save(out)?;
    let (bytes, digest) = out.sum()?;
    out.put(&Trailer { bytes, digest, objects: position.objects })?;
    out.sum()
}

/// Reads a snapshot; returns a standby that goes on from there.
///
/// `source` fills the beginning of a buffer and returns how much of it, 0 at the end, like
/// [`Read::read`](https://doc.rust-lang.org/std/io/trait.Read.html#tymethod.read).
///
/// # Errors
/// See [`SnapshotError`].
pub fn restore<E>(
    crc32c: Crc32c,
    source: &mut dyn FnMut(&mut [u8]) -> Result<usize, E>,
) -> Result<(Standby, Position), SnapshotError<E>> {
    let mut input = Input::new(crc32c, source);
    match read_from(&mut input) {
        Ok((standby, position)) => Ok((standby, position)),
        Err(Failed) => Err(match input.failure() {
            Some(Damage::Read(error)) => SnapshotError::Source(error),
            Some(Damage::Chunk { chunk }) => SnapshotError::Damaged { chunk },
            Some(Damage::NoSnapshot) => SnapshotError::NoSnapshot,
            Some(Damage::Version { found }) => SnapshotError::Version { found },
            Some(Damage::Behaviour { found }) => SnapshotError::Behaviour { found },
            Some(Damage::Config(error)) => SnapshotError::Config(error),
            Some(Damage::CutShort) | None => SnapshotError::CutShort,
        }),
    }
}

fn read_from<E>(input: &mut Input<'_, E>) -> Result<(Standby, Position), Failed> {
    let (mut magic, mut version, mut behaviour) = ([0; 8], [0; 2], [0; 4]);
    input.raw(&mut magic)?;
    if magic != MAGIC {
        return input.fail(Damage::NoSnapshot);
    }
    input.raw(&mut version)?;
    let found = u16::from_le_bytes(version);
    if found != VERSION {
        return input.fail(Damage::Version { found });
    }
    input.raw(&mut behaviour)?;
    let found = u32::from_le_bytes(behaviour);
    if found != BEHAVIOUR {
        return input.fail(Damage::Behaviour { found });
    }
    let position: Position = input.take()?;
    let sessions: Vec<Option<SessionRecord>> = input.take()?;
    let master = match Master::load(input)? {
        Ok(master) => master,
        Err(error) => return input.fail(Damage::Config(error)),
    };
    let (bytes, digest) = input.sum()?;
    let trailer: Trailer = input.take()?;
    let counted = master.objects_in_all();
    if (trailer.bytes, trailer.digest, trailer.objects) != (bytes, digest, counted) || !input.is_at_end()? {
        return input.damaged();
    }
    let at = Instant::from_nanos(position.at_ns);
    Ok((Standby::restored(master, sessions, position.lsn, at), position))
}

/// Why a stream is no snapshot.
#[derive(Debug)]
pub(crate) enum Damage<E> {
    Read(E),
    CutShort,
    Chunk { chunk: u32 },
    NoSnapshot,
    Version { found: u16 },
    Behaviour { found: u32 },
    Config(ConfigError),
}

/// Why a snapshot was not written, or not read. `E` is the error of what it was written to or read from.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum SnapshotError<E> {
    /// Writing a chunk has failed.
    Sink(E),
    /// Reading has failed.
    Source(E),
    /// The stream is no snapshot.
    NoSnapshot,
    /// The snapshot has another format.
    Version {
        /// Its version.
        found: u16,
    },
    /// The snapshot is of a release that executes commands differently.
    Behaviour {
        /// Its number, see [`BEHAVIOUR`].
        found: u32,
    },
    /// The end is missing.
    CutShort,
    /// A chunk is not as it was written.
    Damaged {
        /// Its number, or that of the one after it.
        chunk: u32,
    },
    /// The settings of the snapshot are not within this release's limits.
    Config(ConfigError),
    /// State that cannot be written: this is a defect of the program.
    Refused,
}

impl<E: fmt::Display> fmt::Display for SnapshotError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sink(error) => write!(f, "the snapshot cannot be written: {error}"),
            Self::Source(error) => write!(f, "the snapshot cannot be read: {error}"),
            Self::NoSnapshot => f.write_str("this is no snapshot of a master"),
            Self::Version { found } => write!(
                f,
                "the snapshot has format {found}, and this release reads format {VERSION}: use the release \
                 that has written it"
            ),
            Self::Behaviour { found } => write!(
                f,
                "the snapshot is of a release with behaviour {found}, and this one has {BEHAVIOUR}: use a \
                 release with behaviour {found}, or begin with an empty directory"
            ),
            Self::CutShort => f.write_str("the snapshot is cut short: use an older one"),
            Self::Damaged { chunk } => {
                write!(f, "the snapshot is damaged at chunk {chunk}: use an older one")
            }
            Self::Config(error) => write!(f, "the snapshot has a setting that is refused: {error}"),
            Self::Refused => f.write_str("the state cannot be written: this is a defect, please report it"),
        }
    }
}

impl<E: fmt::Debug + fmt::Display> core::error::Error for SnapshotError<E> {}

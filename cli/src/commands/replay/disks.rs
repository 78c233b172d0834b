//! The disks of a replay: how large they are, and the files that its nodes have them in.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use store_client::disk::{Caching, DiskError, EXTENT_BYTES, FormatOptions};
use store_core::MasterConfig;
use store_core::chunks::stored_len;
use store_core::disk::format::{
    EXTENT_BYTES_MIN, EXTENTS_MAX, EXTENTS_MIN, FIRST_EXTENT_AT, Geometry, OBJECT_BYTES_MIN,
};

use super::simulate::BLOCK_TOKENS;
use super::store::ClusterStore;
use crate::commands::disk::format_file;
use crate::exit::Failure;
use crate::size::ByteSize;
use crate::{fail, sys};

/// Blocks for which an extent has room, more or less, as one of a large disk has for the blocks of a model.
const EXTENT_BLOCKS: u64 = 64;
/// What images are padded to, bytes. Disks whose logical blocks are longer have room for fewer blocks.
const LOGICAL_BLOCK: u32 = 512;
/// Longest wait for the disks to be mounted.
const DISKS_WAIT: Duration = Duration::from_secs(60);
/// Longest wait of a request for the disks.
const BEHIND_WAIT: Duration = Duration::from_secs(2);
/// Time between two questions while waiting.
const PAUSE: Duration = Duration::from_millis(1);

/// How many bytes the disk of each node has, and in which extents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) bytes: u64,
    pub(super) extent_bytes: u32,
}

impl Shape {
    /// A disk with the extents of so many blocks. What belongs to the format and the extents that are kept
    /// free take their part of them.
    ///
    /// # Errors
    /// The disk would have too few or too many extents, or its blocks are too short for a disk.
    pub(super) fn of_blocks(blocks: u64, block_bytes: u64) -> anyhow::Result<Self> {
        long_enough(block_bytes)?;
        let image_bytes = stored_len(block_bytes).next_multiple_of(LOGICAL_BLOCK.into());
        let extent_bytes = extent_bytes(block_bytes);
        // More than any disk has.
        let bytes = blocks.saturating_mul(image_bytes).min(u64::MAX / 4);
        let bytes = FIRST_EXTENT_AT + bytes.next_multiple_of(extent_bytes.into());
        let least = u64::from(EXTENTS_MIN) * u64::from(extent_bytes);
        Self::checked(bytes, extent_bytes).map_or_else(
            || {
                let len = ByteSize(block_bytes);
                fail(
                    Failure::usage(format!("a disk for {blocks} blocks of {len} per node is not possible"))
                        .hint(format!(
                            "--disk-tokens: at least {} and at most {} blocks of {BLOCK_TOKENS} tokens per node",
                            least.div_ceil(image_bytes),
                            u64::from(EXTENTS_MAX) * u64::from(extent_bytes) / image_bytes
                        )),
                )
            },
            Ok,
        )
    }

    /// A disk of so many bytes for blocks of this length.
    ///
    /// # Errors
    /// As of [`Self::of_blocks`].
    pub(super) fn of_bytes(bytes: u64, block_bytes: u64) -> anyhow::Result<Self> {
        long_enough(block_bytes)?;
        let extent_bytes = extent_bytes(block_bytes);
        let of = |extents: u32| FIRST_EXTENT_AT + u64::from(extents) * u64::from(extent_bytes);
        Self::checked(bytes, extent_bytes).map_or_else(
            || {
                let (size, len) = (ByteSize(bytes).approximate(), ByteSize(block_bytes));
                fail(
                    Failure::usage(format!("a disk of {size} per node is not possible for blocks of {len}"))
                        .hint(format!(
                            "--disk DIR:SIZE: choose {} to {} for each node",
                            ByteSize(of(EXTENTS_MIN)).approximate(),
                            ByteSize(of(EXTENTS_MAX)).approximate()
                        )),
                )
            },
            Ok,
        )
    }

    fn checked(bytes: u64, extent_bytes: u32) -> Option<Self> {
        Geometry::new(bytes, extent_bytes, LOGICAL_BLOCK).ok().map(|_| Self { bytes, extent_bytes })
    }

    /// The geometry, with the logical block of most disks.
    pub(super) fn geometry(self) -> anyhow::Result<Geometry> {
        Ok(Geometry::new(self.bytes, self.extent_bytes, LOGICAL_BLOCK)?)
    }
}

/// Refuses blocks that are not copied to disks.
fn long_enough(block_bytes: u64) -> anyhow::Result<()> {
    if block_bytes >= OBJECT_BYTES_MIN {
        return Ok(());
    }
    let (len, least) = (ByteSize(block_bytes), ByteSize(OBJECT_BYTES_MIN));
    fail(
        Failure::usage(format!("--block-bytes {len}: such short blocks are not copied to disks"))
            .hint(format!("choose at least {least}")),
    )
}

/// Bytes of an extent: as on a large disk, and less where blocks are shorter than those of a model. An image
/// takes at most half of it.
fn extent_bytes(block_bytes: u64) -> u32 {
    let wanted =
        block_bytes.saturating_mul(EXTENT_BLOCKS).clamp(EXTENT_BYTES_MIN.into(), EXTENT_BYTES.into());
    let least = block_bytes.saturating_mul(3).min(1 << 30);
    u32::try_from(wanted.max(least).next_power_of_two()).unwrap_or(EXTENT_BYTES)
}

/// `DIR[:SIZE]`: where the files are, and how large they are together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiskDir {
    pub(super) dir: PathBuf,
    pub(super) bytes: Option<u64>,
}

impl FromStr for DiskDir {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (dir, bytes) = match text.rsplit_once(':') {
            // A path may contain a colon, but not end like a size.
            Some((dir, size)) if size.starts_with(|first: char| first.is_ascii_digit()) => {
                let size: ByteSize =
                    size.parse().map_err(|error: crate::size::SizeError| error.to_string())?;
                (dir, Some(size.bytes()))
            }
            _ => (text, None),
        };
        if dir.is_empty() || bytes == Some(0) {
            return Err(format!("{text:?} is not a directory: write DIR, or DIR:SIZE as /mnt/nvme0:20GiB"));
        }
        Ok(Self { dir: dir.into(), bytes })
    }
}

/// The files of the nodes' disks, formatted. Dropping it removes them unless they are kept.
pub(super) struct DiskFiles {
    paths: Vec<PathBuf>,
    /// A directory that was made for them.
    made: Option<PathBuf>,
    keep: bool,
}

impl DiskFiles {
    /// Makes a disk per node in `dir`, or in a directory of its own among the temporary ones.
    ///
    /// # Errors
    /// There is no such directory, it has too little space or has such files already, or it cannot have
    /// disks.
    pub(super) fn make(dir: Option<&Path>, shape: Shape, nodes: u16, keep: bool) -> anyhow::Result<Self> {
        let made = if dir.is_some() { None } else { Some(temporary_dir()?) };
        // Removes the directory if something fails below.
        let mut this = Self { paths: Vec::new(), made, keep: false };
        let dir = dir.or(this.made.as_deref()).unwrap_or(Path::new(".")).to_path_buf();
        if !dir.is_dir() {
            return fail(
                Failure::failed(format!("--disk {}: there is no such directory", dir.display()))
                    .hint("make it, or name another one"),
            );
        }
        let wanted = shape.bytes.saturating_mul(nodes.into());
        if let Some(available) = dir.to_str().and_then(sys::available_bytes)
            && available < wanted
        {
            return fail(
                Failure::failed(format!(
                    "{} has room for {}, and the disks take {}",
                    dir.display(),
                    ByteSize(available).approximate(),
                    ByteSize(wanted).approximate()
                ))
                .hint("choose a smaller disk or --block-bytes, or a directory with --disk DIR"),
            );
        }
        for node in 0..nodes {
            let path = dir.join(format!("node-{node}.disk"));
            if path.exists() {
                return fail(
                    Failure::failed(format!("{} exists already", path.display()))
                        .hint("remove it, or name another directory: a replay begins with empty disks"),
                );
            }
            let options = FormatOptions {
                bytes: Some(shape.bytes),
                extent_bytes: Some(shape.extent_bytes),
                force: false,
                caching: Caching::Direct,
            };
            this.paths.push(path.clone());
            format_file(&path, options, |error| {
                let failure = Failure::failed(error.to_string());
                match error {
                    DiskError::NoDirectIo(_) | DiskError::NoFallocate(_) => {
                        failure.hint("name a directory on another file system, as ext4 or XFS: --disk DIR")
                    }
                    _ => failure.hint("name another directory with --disk DIR"),
                }
                .into()
            })?;
        }
        this.keep = keep;
        Ok(this)
    }

    /// The file of each node.
    pub(super) fn paths(&self) -> &[PathBuf] {
        &self.paths
    }
}

impl Drop for DiskFiles {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        for path in &self.paths {
            // What cannot be removed is left to the user of the directory.
            let _ = std::fs::remove_file(path);
        }
        if let Some(made) = &self.made {
            let _ = std::fs::remove_dir(made);
        }
    }
}

impl fmt::Debug for DiskFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.paths).finish()
    }
}

/// Keeps a replay from running away from its disks: it has no pauses, and what is evicted before it is copied
/// to a disk is lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    behind_bytes_max: u64,
    waited: Duration,
}

impl Pace {
    /// Waits until all disks are there. `pool`: bytes of memory.
    ///
    /// # Errors
    /// The master does not answer, or the disks are not there in time.
    pub(super) fn new(store: &mut ClusterStore, nodes: u16, pool: u64) -> anyhow::Result<Self> {
        let started = Instant::now();
        while store.stats()?.disks < nodes.into() {
            if let Some(exit) = sys::interrupted() {
                return fail(Failure::silent(exit));
            }
            if started.elapsed() > DISKS_WAIT {
                return fail(
                    Failure::failed(format!("the disks were not mounted within {} s", DISKS_WAIT.as_secs()))
                        .hint("run again with -v to see the logs of the nodes"),
                );
            }
            std::thread::sleep(PAUSE);
        }
        // At least half of what is evicted next is to have its copy.
        let share = MasterConfig::default().demote_ahead / 2.0;
        Ok(Self { behind_bytes_max: (pool as f64 * share) as u64, waited: Duration::ZERO })
    }

    /// Waits while the disks are too far behind, but not for ever.
    pub(super) fn keep(&mut self, store: &mut ClusterStore) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut waits = false;
        while store.stats()?.disk_backlog_bytes > self.behind_bytes_max
            && started.elapsed() < BEHIND_WAIT
            && sys::interrupted().is_none()
        {
            waits = true;
            std::thread::sleep(PAUSE);
        }
        if waits {
            self.waited += started.elapsed();
        }
        Ok(())
    }

    /// How long requests have waited, together.
    pub(super) const fn waited(&self) -> Duration {
        self.waited
    }
}

/// Makes a directory that only this process uses.
fn temporary_dir() -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt as _;
    let base = std::env::temp_dir();
    for number in 0..100 {
        let dir = base.join(format!("snowskin-replay-{}-{number}", std::process::id()));
        match std::fs::DirBuilder::new().mode(0o700).create(&dir) {
            Ok(()) => return Ok(dir),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => {
                return fail(
                    Failure::failed(format!("cannot make {}: {error}", dir.display()))
                        .hint("name a directory for the disks with --disk DIR"),
                );
            }
        }
    }
    fail(
        Failure::failed(format!("{} is full of directories of former replays", base.display()))
            .hint("remove them, or name a directory for the disks with --disk DIR"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_may_be_followed_by_a_size() {
        let parsed = |text: &str| text.parse::<DiskDir>().map(|disk| (disk.dir, disk.bytes));
        assert_eq!(parsed("/mnt/a"), Ok(("/mnt/a".into(), None)));
        assert_eq!(parsed("/mnt/a:20GiB"), Ok(("/mnt/a".into(), Some(20 << 30))));
        assert_eq!(parsed("/mnt/a:b"), Ok(("/mnt/a:b".into(), None)));
        for wrong in ["", ":1GiB", "/mnt/a:0", "/mnt/a:4XB"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_disk_has_extents_for_its_blocks_whatever_their_length() {
        for block_bytes in [4_096, 5_000, 64 << 10, 1 << 20, 64 << 20] {
            let shape = Shape::of_blocks(10_000, block_bytes).unwrap();
            let geometry = shape.geometry().unwrap();
            let image = u64::from(geometry.image_bytes(block_bytes));
            assert!(image > 0, "{block_bytes}: blocks fit into an extent");
            let room = u64::from(geometry.extents()) * u64::from(geometry.extent_bytes()) / image;
            assert!((10_000..10_300).contains(&room), "{block_bytes}: {room}");
        }
        let small = Shape::of_blocks(100, 4_096).unwrap_err().to_string();
        assert!(small.contains("100 blocks"), "{small}");
        let short = Shape::of_bytes(1 << 30, 512).unwrap_err().to_string();
        assert!(short.contains("--block-bytes 512"), "{short}");
        let tiny = Shape::of_bytes(1 << 20, 4_096).unwrap_err().to_string();
        assert!(tiny.contains("1.0 MiB per node"), "{tiny}");
        assert!(Shape::of_bytes(3 << 20, 4_096).is_ok() && Shape::of_bytes((3 << 20) - 1, 4_096).is_err());
    }

    #[test]
    fn files_are_removed_with_their_own_directory_and_named_ones_are_kept_if_wanted() {
        let dir = tempfile::tempdir().unwrap();
        let shape = Shape::of_blocks(1_000, 4_096).unwrap();
        let make = |keep| DiskFiles::make(Some(dir.path()), shape, 2, keep);
        let files = match make(false) {
            Ok(files) => files,
            Err(error) => return println!("not run: {error:#}"),
        };
        let second = make(false).unwrap_err();
        assert!(second.to_string().contains("exists already"), "{second}");
        assert!(files.paths().iter().all(|path| path.exists()), "the files of the first are still there");
        drop(files);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        drop(make(true).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);

        let files = DiskFiles::make(None, shape, 1, false).unwrap();
        let path = files.paths()[0].clone();
        assert!(path.exists());
        drop(files);
        assert!(!path.exists() && !path.parent().unwrap().exists());
    }
}

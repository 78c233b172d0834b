//! What a place for a disk can do, before anything is formatted there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::sys::{self, Kind};

/// Syncs that are timed.
const SYNCS: usize = 64;
/// Bytes written before each sync.
const BYTES: usize = 4 << 10;

/// What a place for a disk can do: a directory for a file or for packs, a file, or a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskProbe {
    /// Alignment of direct I/O, bytes, in memory and on the disk; `None`: it cannot do direct I/O.
    pub direct: Option<(u32, u32)>,
    /// The median and the longest time of a sync after 4 KiB were written; `None` for block devices, to which
    /// nothing is written.
    pub sync: Option<(Duration, Duration)>,
}

impl DiskProbe {
    /// Examines a place. In a directory, or beside a file, a file of 256 KiB without a name is written and
    /// synced 64 times.
    ///
    /// # Errors
    /// The place does not exist, is of another kind, or cannot be read or written.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        let aligned = |file: &File| {
            sys::alignment(file).map(|found| found.map(|alignment| (alignment.memory, alignment.block)))
        };
        let directory = match sys::kind_of(&metadata) {
            Kind::Block => return Ok(Self { direct: aligned(&File::open(path)?)?, sync: None }),
            Kind::Regular { .. } => path.parent().filter(|parent| !parent.as_os_str().is_empty()),
            Kind::Directory => Some(path),
            Kind::Other => return Err(io::Error::other("it is no directory, no file and no block device")),
        };
        let file = nameless(directory.unwrap_or(Path::new(".")))?;
        sys::fallocate(&file, (SYNCS * BYTES) as u64).or_else(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => Ok(()),
            _ => Err(error),
        })?;
        Ok(Self { direct: aligned(&file)?, sync: Some(time_syncs(&file)?) })
    }
}

/// A file that is gone when it is closed.
fn nameless(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    let without = options.clone().custom_flags(libc::O_TMPFILE).open(directory);
    match without {
        // NFS, and others, have no files without names.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            let path = directory.join(format!(".snowskin-probe-{}", std::process::id()));
            let file = options.create_new(true).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        other => other,
    }
}

fn time_syncs(mut file: &File) -> io::Result<(Duration, Duration)> {
    let mut times = Vec::with_capacity(SYNCS);
    for _ in 0..SYNCS {
        let begin = Instant::now();
        file.write_all(&[0x5a; BYTES])?;
        sys::sync_data(file)?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    Ok((times[SYNCS / 2], times[SYNCS - 1]))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_examined_and_left_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let probe = DiskProbe::of(dir.path()).unwrap();
        let (median, longest) = probe.sync.unwrap();
        assert!(median > Duration::ZERO && median <= longest);
        let file = dir.path().join("disk");
        fs::write(&file, b"bytes").unwrap();
        assert_eq!(DiskProbe::of(&file).unwrap().direct, probe.direct);
        assert_eq!(fs::read(&file).unwrap(), b"bytes");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(DiskProbe::of(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(DiskProbe::of(Path::new("/dev/null")).unwrap_err().to_string().contains("no block device"));
    }
}

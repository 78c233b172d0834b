//! [`DiskFile`]: a file or block device that is opened for direct I/O, by one process at a time.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use store_core::disk::format::{
    EXTENTS_MIN, FIRST_EXTENT_AT, Geometry, GeometryError, PAGE_BYTES, Superblock, VERSION,
};

use super::error::DiskError;
use super::sys::{self, AlignedBuffer, Alignment, Kind};

/// Bytes of an extent, where nothing else is said.
pub const EXTENT_BYTES: u32 = 64 << 20;
/// The shortest extent that is chosen for a small disk, bytes.
const EXTENT_BYTES_LEAST: u32 = 1 << 20;
/// Extents that a disk should have, so that giving one up is a small part of it.
const EXTENTS_WANTED: u64 = 64;
/// How often a locked disk is tried again before it is reported as in use, and the time between two tries.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// How a disk is read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// Past the cache of the operating system. What a failed sync has lost cannot be read any more.
    #[default]
    Direct,
    /// Through the cache. After a failed sync the cache has bytes that the disk does not have: for tests on
    /// file systems without direct I/O, never in service.
    Buffered,
}

/// Who else may have the disk open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// No other process. For everything that writes.
    Exclusive,
    /// Others that read.
    Readers,
    /// A node too, which changes what is read meanwhile.
    Anyone,
}

/// A file or block device, opened, locked and measured.
#[derive(Debug)]
pub struct DiskFile {
    file: File,
    path: PathBuf,
    bytes: u64,
    alignment: Alignment,
    caching: Caching,
    in_use: bool,
}

/// What [`DiskFile::prepare`] is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatOptions {
    /// Bytes of the disk. `None`: the whole device, or the length of the file.
    pub bytes: Option<u64>,
    /// Bytes of an extent. `None`: 64 MiB, and less for a disk of less than 4 GiB.
    pub extent_bytes: Option<u32>,
    /// Whether anything that is there may be overwritten.
    pub force: bool,
    /// How it is written.
    pub caching: Caching,
}

impl DiskFile {
    /// Opens a disk that is formatted, to read and write it.
    ///
    /// # Errors
    /// See [`DiskError`]; `InUse` when another process has it open.
    pub fn open(path: &Path, caching: Caching) -> Result<Self, DiskError> {
        let disk = Self::open_as(path, caching, Sharing::Exclusive, true)?;
        disk.superblock()?;
        Ok(disk)
    }

    /// Opens a disk that is formatted, to read it.
    ///
    /// # Errors
    /// See [`DiskError`]; `InUse` unless `sharing` allows the other process.
    pub fn open_to_read(path: &Path, caching: Caching, sharing: Sharing) -> Result<Self, DiskError> {
        Self::open_as(path, caching, sharing, false)
    }

    /// Prepares a file or device for [`DiskService::format`](super::DiskService::format): makes the file, and
    /// allocates all of it, so that a full file system shows now. A file that was made here is removed again
    /// when that fails. Returns it with the geometry that it is to have. Nothing in it is overwritten yet.
    ///
    /// # Errors
    /// See [`DiskError`]; `Foreign` when it contains something else and `force` is not set.
    pub fn prepare(path: &Path, options: FormatOptions) -> Result<(Self, Geometry), DiskError> {
        let before = match std::fs::metadata(path) {
            Ok(metadata) => Some(sys::kind_of(&metadata)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(DiskError::io(path, "open", error)),
        };
        let bytes = match (before, options.bytes) {
            (Some(Kind::Directory | Kind::Other), _) => return Err(DiskError::NotAFile(path.to_owned())),
            (Some(Kind::Regular { bytes, .. }), None) if bytes > 0 => Some(bytes),
            (None | Some(Kind::Regular { .. }), None) => return Err(DiskError::NoSize(path.to_owned())),
            (_, bytes) => bytes,
        };
        if let Some(bytes) = bytes {
            // Before anything is touched; with the logical block that asks for least.
            geometry(bytes, options.extent_bytes, 512)?;
        }
        if before.is_none() {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            made.map_err(|error| DiskError::io(path, "create", error))?;
        }
        let prepared = Self::prepare_existing(path, before, bytes, &options);
        if prepared.is_err() && before.is_none() {
            let _ = std::fs::remove_file(path);
        }
        prepared
    }

    fn prepare_existing(
        path: &Path,
        before: Option<Kind>,
        bytes: Option<u64>,
        options: &FormatOptions,
    ) -> Result<(Self, Geometry), DiskError> {
        // The length decides whether alignment can be probed, so the file is opened again when it has one.
        let plain = Self::open_plain(path, true, false, matches!(before, Some(Kind::Block)))?;
        lock(&plain, path, Sharing::Exclusive)?;
        if !options.force && !is_overwritable(&plain, path)? {
            return Err(DiskError::Foreign(path.to_owned()));
        }
        let bytes = match before {
            Some(Kind::Block) => {
                let available = end_of(&plain, path)?;
                match bytes {
                    Some(bytes) if bytes > available => {
                        return Err(DiskError::TooShort { path: path.to_owned(), bytes, available });
                    }
                    bytes => bytes.unwrap_or(available),
                }
            }
            _ => {
                let length = match before {
                    Some(Kind::Regular { bytes, .. }) => bytes,
                    _ => 0,
                };
                let bytes = bytes.unwrap_or(length);
                allocate(&plain, path, length, bytes)?;
                bytes
            }
        };
        drop(plain);
        let disk = Self::open_as(path, options.caching, Sharing::Exclusive, true)?;
        let geometry = geometry(bytes, options.extent_bytes, disk.alignment.block)?;
        Ok((disk, geometry))
    }

    fn open_as(path: &Path, caching: Caching, sharing: Sharing, write: bool) -> Result<Self, DiskError> {
        let metadata = std::fs::metadata(path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => DiskError::Missing(path.to_owned()),
            _ => DiskError::io(path, "open", error),
        })?;
        let kind = sys::kind_of(&metadata);
        if matches!(kind, Kind::Directory | Kind::Other) {
            return Err(DiskError::NotAFile(path.to_owned()));
        }
        let (direct, device) = (caching == Caching::Direct, kind == Kind::Block);
        let file = Self::open_plain(path, write, direct, device && write)?;
        let in_use = match lock(&file, path, sharing) {
            Err(DiskError::InUse(_)) if sharing == Sharing::Anyone => true,
            result => result.map(|()| false)?,
        };
        let bytes = end_of(&file, path)?;
        let alignment = match caching {
            Caching::Buffered => Alignment { memory: 1, block: 512 },
            Caching::Direct => sys::alignment(&file)
                .map_err(|error| DiskError::io(path, "read", error))?
                .ok_or_else(|| DiskError::NoDirectIo(path.to_owned()))?,
        };
        let block = match alignment.block {
            0..=512 => 512,
            513..=4_096 => 4_096,
            bytes => return Err(DiskError::Block { path: path.to_owned(), bytes }),
        };
        let alignment = Alignment { block, memory: alignment.memory.max(1) };
        Ok(Self { file, path: path.to_owned(), bytes, alignment, caching, in_use })
    }

    fn open_plain(path: &Path, write: bool, direct: bool, exclusive: bool) -> Result<File, DiskError> {
        let direct_flag = if direct { libc::O_DIRECT } else { 0 };
        // On a block device: not while a file system on it is mounted.
        let exclusive_flag = if exclusive { libc::O_EXCL } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(write).custom_flags(direct_flag | exclusive_flag);
        options.open(path).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) if direct => DiskError::NoDirectIo(path.to_owned()),
            Some(libc::EBUSY) if exclusive => DiskError::InUse(path.to_owned()),
            _ => DiskError::io(path, "open", error),
        })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file or device.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a logical block, to which offsets and lengths are aligned.
    #[must_use]
    pub const fn block_bytes(&self) -> u32 {
        self.alignment.block
    }

    /// To what addresses of memory are aligned that is read and written without a copy, bytes.
    #[must_use]
    pub const fn memory_align(&self) -> u32 {
        self.alignment.memory
    }

    /// How it is read and written.
    #[must_use]
    pub const fn caching(&self) -> Caching {
        self.caching
    }

    /// Whether another process had it open for writing when this one opened it.
    #[must_use]
    pub const fn is_in_use(&self) -> bool {
        self.in_use
    }

    pub(super) const fn alignment(&self) -> Alignment {
        self.alignment
    }

    pub(super) const fn file(&self) -> &File {
        &self.file
    }

    /// Reads from `offset` on until the buffer is full, on the calling thread. Offset and length are
    /// multiples of the logical block. Returns how many bytes there were before the end of the file.
    ///
    /// # Errors
    /// The read failed.
    pub fn read_at(&self, buffer: &mut AlignedBuffer, offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if !done.is_multiple_of(self.alignment.block as usize) {
                break;
            }
        }
        Ok(done)
    }

    /// The current superblock.
    ///
    /// # Errors
    /// `NotADisk`, `Version`, `Truncated`, or the read failed.
    pub fn superblock(&self) -> Result<Superblock, DiskError> {
        self.superblocks().map(|(current, _)| current)
    }

    /// The current superblock, and how many of the two are valid.
    pub(super) fn superblocks(&self) -> Result<(Superblock, u32), DiskError> {
        let mut page = AlignedBuffer::new(PAGE_BYTES as usize);
        let (mut found, mut valid, mut version) = (None::<Superblock>, 0, None);
        for at in 0..2 {
            page.fill(0);
            // One that cannot be read is not valid.
            match self.read_at(&mut page, at * u64::from(PAGE_BYTES)) {
                Ok(bytes) if bytes == page.len() => {}
                Ok(_) => continue,
                Err(error) if at == 1 && found.is_none() => {
                    return Err(DiskError::io(&self.path, "read", error));
                }
                Err(_) => continue,
            }
            match Superblock::decode(&page) {
                Some(superblock) => {
                    valid += 1;
                    found = match found {
                        Some(other) if other.serial > superblock.serial => Some(other),
                        _ => Some(superblock),
                    };
                }
                None => version = version.or_else(|| foreign_version(&page)),
            }
        }
        let path = || self.path.clone();
        let superblock = found.ok_or_else(|| match version {
            Some(version) => DiskError::Version { path: path(), version },
            None => DiskError::NotADisk(path()),
        })?;
        let geometry = &superblock.geometry;
        let expected = geometry.extent_at(geometry.extents());
        if self.bytes < expected {
            return Err(DiskError::Truncated { path: path(), expected, bytes: self.bytes });
        }
        Ok((superblock, valid))
    }
}

/// The version of a superblock that this release cannot read.
pub(super) fn foreign_version(page: &[u8]) -> Option<u16> {
    let rest = page.strip_prefix(b"SnowDisk")?;
    let (version, _) = rest.split_first_chunk::<2>()?;
    Some(u16::from_le_bytes(*version)).filter(|version| *version != VERSION)
}

fn lock(file: &File, path: &Path, sharing: Sharing) -> Result<(), DiskError> {
    let result = match sharing {
        Sharing::Exclusive => lock_exclusively(file),
        Sharing::Readers => file.try_lock_shared(),
        // Only to learn whether a node has it: a node that opens the disk now must not find it locked.
        Sharing::Anyone => file.try_lock_shared().and_then(|()| file.unlock().map_err(TryLockError::Error)),
    };
    result.map_err(|error| match error {
        TryLockError::WouldBlock => DiskError::InUse(path.to_owned()),
        TryLockError::Error(error) => DiskError::io(path, "lock", error),
    })
}

/// Tries again for a moment: [`Sharing::Anyone`] holds the lock as long as it takes to look.
fn lock_exclusively(file: &File) -> Result<(), TryLockError> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            result => return result,
        }
    }
    file.try_lock()
}

/// The length of a file or device.
fn end_of(file: &File, path: &Path) -> Result<u64, DiskError> {
    use std::io::Seek as _;
    let mut file = file;
    file.seek(io::SeekFrom::End(0)).map_err(|error| DiskError::io(path, "read", error))
}

/// Whether a file or device is empty, or a disk of Snowskin.
fn is_overwritable(file: &File, path: &Path) -> Result<bool, DiskError> {
    let mut page = AlignedBuffer::new(FIRST_EXTENT_AT as usize);
    let mut bytes = 0;
    while bytes < page.len() {
        match file.read_at(&mut page[bytes..], bytes as u64) {
            Ok(0) => break,
            Ok(more) => bytes += more,
            Err(error) => return Err(DiskError::io(path, "read", error)),
        }
    }
    let is_disk = page.starts_with(b"SnowDisk") || page[PAGE_BYTES as usize..].starts_with(b"SnowDisk");
    Ok(is_disk || page[..bytes].iter().all(|byte| *byte == 0))
}

/// Gives a file of `before` bytes the length `bytes`, all of it allocated.
fn allocate(file: &File, path: &Path, before: u64, bytes: u64) -> Result<(), DiskError> {
    let allocated = sys::fallocate(file, bytes).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => {
            DiskError::NoSpace { path: path.to_owned(), bytes }
        }
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => DiskError::NoFallocate(path.to_owned()),
        _ => DiskError::io(path, "allocate", error),
    });
    let allocated = allocated.and_then(|()| {
        if before > bytes {
            file.set_len(bytes).map_err(|error| DiskError::io(path, "truncate", error))?;
        }
        let metadata = file.metadata().map_err(|error| DiskError::io(path, "measure", error))?;
        match sys::kind_of(&metadata) {
            Kind::Regular { allocated, .. } if allocated < bytes => {
                Err(DiskError::NotAllocated { path: path.to_owned(), bytes, allocated })
            }
            _ => Ok(()),
        }
    });
    if allocated.is_err() && before < bytes {
        sys::punch_back(file, before);
    }
    allocated
}

/// The geometry of a disk of so many bytes.
pub(super) fn geometry(bytes: u64, extent_bytes: Option<u32>, block: u32) -> Result<Geometry, DiskError> {
    let extent_bytes = extent_bytes.unwrap_or_else(|| {
        let wanted = (bytes / EXTENTS_WANTED).clamp(EXTENT_BYTES_LEAST.into(), EXTENT_BYTES.into());
        1 << wanted.ilog2()
    });
    let least = FIRST_EXTENT_AT + u64::from(EXTENTS_MIN) * u64::from(extent_bytes);
    if bytes < least {
        return Err(DiskError::Geometry(GeometryError::Disk { disk_bytes: bytes, extent_bytes }));
    }
    Geometry::new(bytes, extent_bytes, block).map_err(DiskError::Geometry)
}

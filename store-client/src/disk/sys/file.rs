//! What a file or block device is, and how it can be read and written.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use super::AlignedBuffer;

/// What direct I/O requires, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) struct Alignment {
    /// Of addresses.
    pub(in crate::disk) memory: u32,
    /// Of offsets and lengths: the logical block.
    pub(in crate::disk) block: u32,
}

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::disk) enum Kind {
    /// A regular file: its length, and the bytes that are allocated for it.
    Regular {
        bytes: u64,
        allocated: u64,
    },
    /// A block device.
    Block,
    Directory,
    Other,
}

pub(in crate::disk) fn kind_of(metadata: &std::fs::Metadata) -> Kind {
    let kind = metadata.file_type();
    match () {
        () if kind.is_file() => {
            Kind::Regular { bytes: metadata.len(), allocated: metadata.blocks().saturating_mul(512) }
        }
        () if kind.is_block_device() => Kind::Block,
        () if kind.is_dir() => Kind::Directory,
        () => Kind::Other,
    }
}

/// The alignment that direct I/O on this file requires: what `statx` says (Linux 6.1), else the logical
/// block of a block device, else what a read of 512 bytes shows. `Ok(None)`: the file does not support
/// direct I/O.
pub(in crate::disk) fn alignment(file: &File) -> io::Result<Option<Alignment>> {
    if let Some((memory, block)) = by_statx(file) {
        return Ok((memory > 0 && block > 0).then_some(Alignment { memory, block }));
    }
    if let Some(block) = by_ioctl(file) {
        return Ok(Some(Alignment { memory: block, block }));
    }
    let block = if can_read(file, 512)? { 512 } else { 4_096 };
    Ok(Some(Alignment { memory: block, block }))
}

fn by_statx(file: &File) -> Option<(u32, u32)> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is empty and ends with NUL; `found` is large enough, zeroed is a valid value of it,
    // and the call fills it on success.
    let found = unsafe {
        let result = libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            found.as_mut_ptr(),
        );
        if result != 0 {
            return None;
        }
        found.assume_init()
    };
    let known = found.stx_mask & libc::STATX_DIOALIGN != 0;
    known.then_some((found.stx_dio_mem_align, found.stx_dio_offset_align))
}

fn by_ioctl(file: &File) -> Option<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: BLKSSZGET writes one int, which outlives the call; other files than block devices refuse it.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::BLKSSZGET, &raw mut bytes) };
    if result == 0 { u32::try_from(bytes).ok() } else { None }
}

/// Whether `bytes` bytes at an offset of `bytes` can be read.
fn can_read(file: &File, bytes: usize) -> io::Result<bool> {
    let buffer = AlignedBuffer::new(2 * bytes);
    let at = buffer.span().as_ptr().wrapping_add(bytes);
    // SAFETY: the second half of the buffer, which outlives the call and has no references to it.
    let read = unsafe { libc::pread(file.as_raw_fd(), at.cast(), bytes, bytes as libc::off_t) };
    if read >= 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::EINVAL) { Ok(false) } else { Err(error) }
}

/// Allocates the first `bytes` bytes of a file, and makes it that long.
pub(in crate::disk) fn fallocate(file: &File, bytes: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    loop {
        // SAFETY: no memory is involved.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// After a failed [`fallocate`]: makes the file as long as it was, which frees what was allocated behind.
pub(in crate::disk) fn punch_back(file: &File, bytes: u64) {
    if let Err(error) = file.set_len(bytes) {
        log::warn!("a file that could not be allocated could not be cut to {bytes} bytes either: {error}");
    }
}

/// Bytes that are free in the file system of a path. `None`: it does not say.
pub(in crate::disk) fn free_bytes(path: &Path) -> Option<u64> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut found = MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with NUL; `found` is large enough, zeroed is a valid value of it, and the call
    // fills it on success.
    let found = unsafe {
        if libc::statvfs(path.as_ptr(), found.as_mut_ptr()) != 0 {
            return None;
        }
        found.assume_init()
    };
    (found.f_blocks > 0).then(|| found.f_bavail.saturating_mul(found.f_frsize))
}

/// A file in memory, without a name.
#[cfg(feature = "s3")]
pub(in crate::disk) fn memory_file() -> io::Result<File> {
    use std::os::fd::FromRawFd as _;

    // SAFETY: the name ends with NUL.
    let fd = unsafe { libc::memfd_create(c"snowskin-packs".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nothing else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Makes everything durable that was written to the file.
pub(in crate::disk) fn sync_data(file: &File) -> io::Result<()> {
    loop {
        match file.sync_data() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

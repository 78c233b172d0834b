//! A mapped device-DAX node.

use anyhow::{Context as _, Result};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::num::NonZeroUsize;
use std::path::Path;
use std::ptr::NonNull;
use te_core::MemSpan;

/// Device-DAX nodes are mapped in units of 2 MiB on x86-64.
const UNIT: usize = 2 << 20;

/// Memory behind a `/dev/dax*` node. Other processes and hosts may write it at any time, so it is read and
/// written by volatile words.
pub(crate) struct DevDax {
    start: NonNull<c_void>,
    mapped: usize,
}

impl DevDax {
    /// Maps the node's first `bytes`, rounded up to 2 MiB.
    ///
    /// # Errors
    /// When it cannot be opened or mapped.
    pub(crate) fn open(path: &Path, bytes: usize) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let mapped = NonZeroUsize::new(bytes.max(1).next_multiple_of(UNIT)).context("no bytes")?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs no other memory.
        let start = unsafe { mmap(None, mapped, protection, MapFlags::MAP_SHARED, &file, 0) };
        let start = start.with_context(|| format!("cannot map {} bytes of {}", mapped, path.display()))?;
        Ok(Self { start, mapped: mapped.get() })
    }

    /// Copies `bytes` to the start of the memory, cut to its length.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(self.mapped)];
        for (index, word) in bytes.chunks(8).enumerate() {
            let mut whole = [0; 8];
            whole[..word.len()].copy_from_slice(word);
            // SAFETY: the mapping is not shorter than `bytes` rounded up to words, page-aligned, and lives as
            // long as `self`.
            unsafe { self.start.cast::<u64>().add(index).write_volatile(u64::from_ne_bytes(whole)) };
        }
    }

    /// Where the memory is mapped here.
    pub(crate) fn span(&self) -> MemSpan {
        MemSpan::new(self.start.as_ptr().cast(), self.mapped)
    }

    /// The first `len` bytes, or all if the memory is shorter.
    pub(crate) fn read(&self, len: usize) -> Vec<u8> {
        let len = len.min(self.mapped);
        let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
        for index in 0..len.div_ceil(8) {
            // SAFETY: as in `write`.
            let word = unsafe { self.start.cast::<u64>().add(index).read_volatile() };
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

impl Drop for DevDax {
    fn drop(&mut self) {
        // SAFETY: `open` made the mapping, and no reference into it exists.
        let unmapped = unsafe { munmap(self.start, self.mapped) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

//! [`Pool`]: the memory into which gets read, and which leases lend.
//!
//! The pool consists of chunks of anonymous memory, which the client's thread registers with its engine. A
//! [`Block`] is a range of one chunk and gives it back when it is dropped, on any thread. The memory is
//! private: in a forked child the leases of the parent show the bytes of the moment of the fork.
//!
//! Chunks are reserved, not filled: a page takes memory from its first use on. They are unmapped when the
//! store is closed and its last lease is gone.
#![allow(unsafe_code, reason = "maps and unmaps the memory of leases")]

use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use te_core::MemSpan;
use te_host::fork::Mark;

use crate::errors::{Fault, Kind};
use crate::ranges::{self, Ranges};

/// Length of the first chunk, bytes. Each further one is twice as long, up to `CHUNK_BYTES_MAX`.
const CHUNK_BYTES: u64 = 32 << 20;
const CHUNK_BYTES_MAX: u64 = 1 << 30;
/// Chunks are multiples of this, so that the kernel can use huge pages.
const CHUNK_GRAIN: u64 = 2 << 20;

/// The memory of leases of one store.
pub(crate) struct Pool {
    state: Mutex<State>,
    bytes_max: u64,
    mark: Mark,
}

struct State {
    chunks: Vec<Chunk>,
    /// Bytes of all chunks.
    bytes: u64,
}

struct Chunk {
    memory: Mapping,
    ranges: Ranges,
}

/// Anonymous memory, unmapped when it is dropped.
struct Mapping {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: the value only owns the address range; nothing of it is bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: it has no method that touches the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> Result<Self, nix::Error> {
        let bytes = NonZeroUsize::new(len).ok_or(nix::Error::EINVAL)?;
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: the kernel chooses the address, so nothing that exists is replaced.
        let addr = unsafe { mmap_anonymous(None, bytes, rights, flags)? };
        // SAFETY: the range has just been mapped. Where huge pages are off, nothing changes.
        let _ = unsafe { madvise(addr, len, MmapAdvise::MADV_HUGEPAGE) };
        Ok(Self { addr: addr.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and unmapped once. Blocks hold the pool, so no address of it is in use,
        // and the client, with whose engine it was registered, held the pool until it was dropped.
        let unmapped = unsafe { munmap(self.addr.cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a chunk");
    }
}

/// A range of the pool.
pub(crate) struct Block {
    pool: Arc<Pool>,
    chunk: usize,
    offset: u64,
    len: u64,
    addr: usize,
}

impl Pool {
    pub(crate) fn new(bytes_max: u64) -> Arc<Self> {
        let state = Mutex::new(State { chunks: Vec::new(), bytes: 0 });
        Arc::new(Self { state, bytes_max, mark: Mark::new() })
    }

    /// Most bytes that it has.
    pub(crate) const fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Bytes in use, and bytes of the chunks.
    pub(crate) fn used_bytes(&self) -> (u64, u64) {
        let state = self.lock();
        let free: u64 = state.chunks.iter().map(|chunk| chunk.ranges.free_bytes()).sum();
        (state.bytes - free, state.bytes)
    }

    /// Takes a range of the chunks that there are. `None`: none has room.
    pub(crate) fn take(self: &Arc<Self>, len: u64) -> Option<Block> {
        let mut state = self.lock();
        let found = state.chunks.iter_mut().enumerate().find_map(|(at, chunk)| {
            let offset = chunk.ranges.take(len)?;
            Some((at, offset, chunk.memory.addr.as_ptr() as usize + offset as usize))
        });
        let (chunk, offset, addr) = found?;
        drop(state);
        Some(Block { pool: Arc::clone(self), chunk, offset, len, addr })
    }

    /// Adds a chunk with room for `len` bytes. Returns its number and its memory, for the engine to register.
    ///
    /// # Errors
    /// The pool would be larger than allowed; the system has no memory.
    pub(crate) fn grow(&self, len: u64) -> Result<(usize, MemSpan), Fault> {
        let mut state = self.lock();
        let wanted = ranges::rounded(len).and_then(|len| len.checked_next_multiple_of(CHUNK_GRAIN));
        let left = self.bytes_max.saturating_sub(state.bytes);
        let Some(wanted) = wanted.filter(|&wanted| wanted <= left) else {
            return Err(self.full(len, &state));
        };
        let usual = CHUNK_BYTES.checked_shl(state.chunks.len() as u32).unwrap_or(CHUNK_BYTES_MAX);
        let bytes = wanted.max(usual.min(CHUNK_BYTES_MAX)).min(left / CHUNK_GRAIN * CHUNK_GRAIN);
        let memory = Mapping::new(usize::try_from(bytes).unwrap_or(usize::MAX)).map_err(|error| {
            let text = format!("{bytes} bytes of memory for leases could not be mapped: {error}");
            Fault::new(Kind::NoSpace, "out_of_memory", text).retryable()
        })?;
        let span = MemSpan::new(memory.addr.as_ptr(), memory.len);
        let number = state.chunks.len();
        state.chunks.push(Chunk { memory, ranges: Ranges::new(bytes) });
        state.bytes += bytes;
        Ok((number, span))
    }

    /// Takes back the chunk that was added last, because it could not be registered.
    pub(crate) fn shrink(&self) {
        let mut state = self.lock();
        if let Some(chunk) = state.chunks.pop() {
            state.bytes -= chunk.memory.len as u64;
        }
    }

    /// The memory of all chunks, by their numbers.
    pub(crate) fn spans(&self) -> Vec<MemSpan> {
        let span = |chunk: &Chunk| MemSpan::new(chunk.memory.addr.as_ptr(), chunk.memory.len);
        self.lock().chunks.iter().map(span).collect()
    }

    fn full(&self, len: u64, state: &State) -> Fault {
        let free: u64 = state.chunks.iter().map(|chunk| chunk.ranges.free_bytes()).sum();
        let text = format!(
            "{len} bytes do not fit the memory for leases, of which {} of {} bytes are in use: release leases \
             (`with store.get(key) as lease`), read into a buffer of your own (`get_into`), or raise `pool`",
            state.bytes - free,
            self.bytes_max
        );
        Fault::new(Kind::NoSpace, "pool_full", text).retryable()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Block {
    /// Number of its chunk.
    pub(crate) const fn chunk(&self) -> usize {
        self.chunk
    }

    /// Offset in its chunk, bytes.
    pub(crate) const fn offset(&self) -> u64 {
        self.offset
    }

    /// Length, bytes.
    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// Address of the first byte.
    pub(crate) const fn addr(&self) -> usize {
        self.addr
    }

    /// Gives everything behind the first `len` bytes back.
    pub(crate) fn shorten(&mut self, len: u64) {
        if len < self.len && !self.pool.mark.is_forked() {
            let mut state = self.pool.lock();
            if let Some(chunk) = state.chunks.get_mut(self.chunk) {
                chunk.ranges.shorten(self.offset, self.len, len);
            }
            drop(state);
            self.len = len;
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // In a child the lock may be held by a thread that does not exist there.
        if !self.pool.mark.is_forked() {
            let mut state = self.pool.lock();
            if let Some(chunk) = state.chunks.get_mut(self.chunk) {
                chunk.ranges.give(self.offset, self.len);
            }
        }
    }
}

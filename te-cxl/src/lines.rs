//! Copies to and from memory that several hosts cache, written over the five operations that they consist of.
//!
//! The release build carries these operations out with instructions of the processor; the tests carry them
//! out on a model of caches that are not coherent (`te_core::testkit::coldcache`). Both run the code of this
//! module and of the ledger, so that what the model finds is true of the release build.

use te_core::{Error, ErrorKind};

use crate::Coherence;
pub use crate::sys::Local;

/// The bytes of a cache line, which is the unit of coherence.
pub const LINE: u64 = 64;

/// What one host can do to a pool. Places are offsets from the beginning of the pool, in bytes.
pub trait Lines {
    /// Reads bytes of the pool through the cache.
    ///
    /// # Errors
    /// The memory failed, or the range does not lie in the pool.
    fn load(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault>;

    /// As [`load`](Self::load), into whole lines of memory that lies in a pool as well: they are stored past
    /// the cache, and are in memory after the next [`fence`](Self::fence).
    ///
    /// # Errors
    /// As [`load`](Self::load); `Range` when `to` is not made of whole lines.
    fn load_past(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault>;

    /// Writes bytes of the pool into the cache, from which they reach the memory at an unknown time.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault>;

    /// Writes whole lines past the cache. They are in memory after the next [`fence`](Self::fence).
    ///
    /// # Errors
    /// As [`load`](Self::load); `Range` for a range that is not made of whole lines.
    fn nt_store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault>;

    /// Writes the lines of a range back where they are dirty, and drops them from the cache. That is done
    /// after the next [`fence`](Self::fence) of everything.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    fn flush(&mut self, at: u64, len: u64) -> Result<(), Fault>;

    /// Waits until earlier operations are done, before later ones begin.
    fn fence(&mut self, of: Fence);
}

/// What a fence orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// Earlier stores before later stores.
    Stores,
    /// All earlier operations before all later ones.
    All,
}

/// Why an operation on a pool did not reach its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What failed.
    pub cause: Cause,
    /// The number of bytes, from the first one on, that are known to have been copied before it. Others may
    /// have been.
    pub done: u64,
}

/// What failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The range does not lie in the pool, or is not made of whole lines. Nothing was touched.
    Range,
    /// The memory at this offset of the pool is damaged: the hardware has reported a poisoned line.
    Poison {
        /// The offset in the pool, in bytes.
        at: u64,
    },
    /// The pool is not there any more: its file was cut, or its device was removed.
    Gone,
    /// The memory at the other end of the copy, which is not the pool's, failed.
    Local,
    /// This process is a fork of the one that has mapped the pool.
    Forked,
}

impl Fault {
    /// A range that was refused.
    pub const RANGE: Self = Self { cause: Cause::Range, done: 0 };
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault.cause {
            Cause::Range => ErrorKind::OutOfRange.into(),
            Cause::Poison { .. } => Self::with_code(ErrorKind::Corrupt, libc::EHWPOISON),
            Cause::Gone => Self::with_code(ErrorKind::Rail, libc::EFAULT),
            Cause::Forked => ErrorKind::Forked.into(),
            Cause::Local => Self::with_code(ErrorKind::System, libc::EFAULT),
        }
    }
}

/// Writes bytes so that a host which [gets](get) them after this call has returned sees them, and no other
/// byte changes.
///
/// # Errors
/// As [`Lines::store`]. With [`Coherence::Flush`], `Range` for a range that is not made of whole lines: the
/// rest of such a line may be another writer's.
pub fn put<L: Lines>(lines: &mut L, coherence: Coherence, at: u64, from: Local<'_>) -> Result<(), Fault> {
    let put = match coherence {
        Coherence::Flush if !is_whole(at, from.len() as u64) => return Err(Fault::RANGE),
        Coherence::Flush => lines.nt_store(at, from),
        Coherence::Hardware => lines.store(at, from),
    };
    // Also after a fault: the bytes that were written must not land later than this call.
    lines.fence(Fence::Stores);
    put
}

/// As [`put`], where caches are not coherent, for a range that need not be made of whole lines: the rest of
/// its first and last line is read from memory and stored with them. No other host writes a part of these
/// lines meanwhile; otherwise its bytes would be replaced by those that were there before.
///
/// # Errors
/// As [`Lines::store`].
pub fn put_parts<L: Lines>(lines: &mut L, at: u64, from: Local<'_>) -> Result<(), Fault> {
    let len = from.len();
    let to_line = (at.next_multiple_of(LINE) - at) as usize;
    let head = to_line.min(len);
    let body = (len - head) / LINE as usize * LINE as usize;
    let parts = [(0, head, false), (head, body, true), (head + body, len - head - body, false)];
    let mut put = Ok(());
    for (offset, part_len, is_whole) in parts.into_iter().filter(|(_, len, _)| *len > 0) {
        let part = from.part(offset, part_len).ok_or(Fault::RANGE);
        let at = at + offset as u64;
        put = part.and_then(|part| if is_whole { lines.nt_store(at, part) } else { merge(lines, at, part) });
        if let Err(fault) = put {
            put = Err(Fault { done: offset as u64 + fault.done, ..fault });
            break;
        }
    }
    // As in `put`.
    lines.fence(Fence::Stores);
    put
}

/// Stores a part of one line, and the rest of the line as it is in memory.
fn merge<L: Lines>(lines: &mut L, at: u64, from: Local<'_>) -> Result<(), Fault> {
    let (first, skip) = (at - at % LINE, (at % LINE) as usize);
    let mut line = [0; LINE as usize];
    // What this host has stored past the cache is in memory before the line is read.
    lines.fence(Fence::Stores);
    drop_stale(lines, first, LINE)?;
    lines.load(first, Local::of(&mut line))?;
    from.read(&mut line[skip..skip + from.len()]).map_err(|_| Fault { cause: Cause::Local, done: 0 })?;
    lines.nt_store(first, Local::of(&mut line))
}

/// Reads bytes that another host has [put] before this call.
///
/// # Errors
/// As [`Lines::load`].
pub fn get<L: Lines>(lines: &mut L, coherence: Coherence, at: u64, to: Local<'_>) -> Result<(), Fault> {
    if coherence == Coherence::Flush {
        drop_stale(lines, at, to.len() as u64)?;
    }
    lines.load(at, to)
}

/// Which memory of a copy failed, where both ends lie in pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The region of the other process.
    Remote,
    /// The registered memory of this process.
    Own,
}

/// As [`get`], into memory of a pool without hardware coherence: `own` is where it lies. No line of it stays
/// in the cache, also when the copy fails.
///
/// # Errors
/// As [`Lines::load_past`] and [`Lines::flush`], with the side whose pool the fault names.
pub fn get_between<L: Lines, M: Lines>(
    lines: &mut L,
    at: u64,
    to: Local<'_>,
    (own, own_at): (&mut M, u64),
) -> Result<(), (Side, Fault)> {
    let len = to.len() as u64;
    let copied = drop_stale(lines, at, len).and_then(|()| lines.load_past(at, to));
    // This also waits for the stores.
    let dropped = drop_stale(own, own_at, len);
    copied.map_err(|fault| (Side::Remote, fault))?;
    dropped.map_err(|fault| (Side::Own, fault))
}

/// As [`put`], from memory of a pool without hardware coherence: `own` is where it lies.
///
/// # Errors
/// As [`put`] and [`Lines::flush`], with the side whose pool the fault names.
pub fn put_between<L: Lines, M: Lines>(
    lines: &mut L,
    at: u64,
    from: Local<'_>,
    (own, own_at): (&mut M, u64),
) -> Result<(), (Side, Fault)> {
    drop_stale(own, own_at, from.len() as u64).map_err(|fault| (Side::Own, fault))?;
    put(lines, Coherence::Flush, at, from).map_err(|fault| (Side::Remote, fault))
}

/// Drops what the cache holds of a range, so that later loads read the memory. Dirty lines are written back.
///
/// # Errors
/// As [`Lines::flush`].
pub fn drop_stale<L: Lines>(lines: &mut L, at: u64, len: u64) -> Result<(), Fault> {
    let flushed = lines.flush(at, len);
    lines.fence(Fence::All);
    flushed
}

const fn is_whole(at: u64, len: u64) -> bool {
    at.is_multiple_of(LINE) && len.is_multiple_of(LINE)
}

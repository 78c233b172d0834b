//! The operations on a pool by the instructions of the processor.

use super::local::Local;
use super::map::Map;
use crate::lines::{Cause, Fault, Fence, LINE, Lines};

/// The lines of a pool that is mapped here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NativeLines<'a> {
    map: &'a Map,
}

/// Whether this processor can store past its cache and drop lines from it, which the mode `flush` needs.
pub(crate) fn can_flush() -> bool {
    #[cfg(target_arch = "x86_64")]
    return super::copy::can_flush();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

impl<'a> NativeLines<'a> {
    pub(crate) const fn new(map: &'a Map) -> Self {
        Self { map }
    }
}

#[cfg(target_arch = "x86_64")]
impl NativeLines<'_> {
    fn ended(&self, len: usize, ended: super::copy::Ended) -> Result<(), Fault> {
        if ended.cause == 0 {
            return Ok(());
        }
        let (addr, code) = (ended.cause >> 8, ended.cause & 0xff);
        let cause = match self.map.offset_of(addr) {
            None => Cause::Local,
            Some(at) if code == super::signal::BUS_MCEERR_AR => Cause::Poison { at },
            Some(_) => Cause::Gone,
        };
        Err(Fault { cause, done: (len - ended.left) as u64 })
    }
}

#[cfg(target_arch = "x86_64")]
impl Lines for NativeLines<'_> {
    fn load(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault> {
        let from = self.map.range(at, to.len() as u64)?;
        // SAFETY: the range lies in the mapping, whose faults the handler catches (`Map::new` has installed
        // it); `to` is writable over its length. Registered memory that lies in the same pool may overlap:
        // the bytes are then a mix, as they are when a peer writes.
        self.ended(to.len(), unsafe { super::copy::copy(to.as_ptr(), from, to.len()) })
    }

    fn load_past(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault> {
        let from = self.map.range(at, to.len() as u64)?;
        let is_whole = |number: u64| number.is_multiple_of(LINE);
        if !is_whole(to.as_ptr().addr() as u64) || !is_whole(to.len() as u64) {
            return Err(Fault::RANGE);
        }
        // SAFETY: as in `load`; `to` is made of whole lines.
        self.ended(to.len(), unsafe { super::copy::nt_copy(to.as_ptr(), from, to.len()) })
    }

    fn store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault> {
        let to = self.map.range(at, from.len() as u64)?;
        // SAFETY: as in `load`, in the other direction.
        self.ended(from.len(), unsafe { super::copy::copy(to, from.as_ptr(), from.len()) })
    }

    fn nt_store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault> {
        let to = self.map.range(at, from.len() as u64)?;
        if !at.is_multiple_of(LINE) || !(from.len() as u64).is_multiple_of(LINE) {
            return Err(Fault::RANGE);
        }
        // SAFETY: as in `store`; whole lines, and the mapping begins at a page.
        self.ended(from.len(), unsafe { super::copy::nt_copy(to, from.as_ptr(), from.len()) })
    }

    fn flush(&mut self, at: u64, len: u64) -> Result<(), Fault> {
        let whole = len.checked_add(at % LINE).ok_or(Fault::RANGE)?.next_multiple_of(LINE);
        let first = self.map.range(at - at % LINE, whole)?;
        // SAFETY: the lines lie in the mapping, whose faults the handler catches.
        self.ended(whole as usize, unsafe { super::copy::flush(first, whole as usize) })
    }

    fn fence(&mut self, of: Fence) {
        match of {
            // SAFETY: every x86_64 processor has it.
            Fence::Stores => unsafe { std::arch::x86_64::_mm_sfence() },
            // SAFETY: as above.
            Fence::All => unsafe { std::arch::x86_64::_mm_mfence() },
        }
    }
}

/// Without routines that survive a fault: only the mode `hardware` runs here, and memory that fails ends the
/// process.
#[cfg(not(target_arch = "x86_64"))]
impl Lines for NativeLines<'_> {
    fn load(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault> {
        let from = self.map.range(at, to.len() as u64)?;
        // SAFETY: the range lies in the mapping; `to` is writable over its length. `copy` allows overlap.
        unsafe { std::ptr::copy(from, to.as_ptr(), to.len()) };
        // What the caller stores next is seen after these loads.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        Ok(())
    }

    fn load_past(&mut self, at: u64, to: Local<'_>) -> Result<(), Fault> {
        self.load(at, to)
    }

    fn store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault> {
        let to = self.map.range(at, from.len() as u64)?;
        // SAFETY: as in `load`, in the other direction.
        unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    fn nt_store(&mut self, at: u64, from: Local<'_>) -> Result<(), Fault> {
        self.store(at, from)
    }

    fn flush(&mut self, at: u64, len: u64) -> Result<(), Fault> {
        self.map.range(at, len).map(drop)
    }

    fn fence(&mut self, _of: Fence) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

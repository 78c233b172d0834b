//! The ranges that peers may access.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::ExportError;
use crate::sys::ExportedRange;

/// Ranges that do not overlap, by their first address.
#[derive(Debug)]
pub(crate) struct Exports {
    ranges: RwLock<BTreeMap<u64, Arc<ExportedRange>>>,
    max: u32,
}

impl Exports {
    /// None yet, and room for `max`.
    pub(crate) fn new(max: u32) -> Self {
        Self { ranges: RwLock::default(), max }
    }

    /// Adds a range.
    ///
    /// # Errors
    /// `Overlap`, `Full`.
    pub(crate) fn insert(&self, range: ExportedRange) -> Result<(), ExportError> {
        let mut ranges = self.write();
        let (addr, end) = (range.addr(), range.addr() + range.len());
        let before = ranges.range(..end).next_back();
        if let Some((_, other)) = before.filter(|(_, other)| other.addr() + other.len() > addr) {
            return Err(ExportError::Overlap { addr: other.addr(), len: other.len() });
        }
        if ranges.len() >= self.max as usize {
            return Err(ExportError::Full { exports_max: self.max });
        }
        ranges.insert(addr, Arc::new(range));
        Ok(())
    }

    /// Takes out the range that begins at `addr`. Peers that use it still have it.
    pub(crate) fn remove(&self, addr: u64) -> Option<Arc<ExportedRange>> {
        self.write().remove(&addr)
    }

    /// All ranges are taken out.
    pub(crate) fn take_all(&self) -> Vec<Arc<ExportedRange>> {
        std::mem::take(&mut *self.write()).into_values().collect()
    }

    /// The range in which `len` bytes from `addr` on lie, and the offset in it. `None` for no bytes, for
    /// bytes that end past the last address, and for bytes that lie in two ranges.
    pub(crate) fn find(&self, addr: u64, len: u64) -> Option<(Arc<ExportedRange>, u64)> {
        let end = addr.checked_add(len).filter(|_| len > 0)?;
        let ranges = self.read();
        let (_, range) = ranges.range(..=addr).next_back()?;
        (end <= range.addr() + range.len()).then(|| (range.clone(), addr - range.addr()))
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Arc<ExportedRange>>> {
        self.ranges.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u64, Arc<ExportedRange>>> {
        self.ranges.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[path = "exports_tests.rs"]
mod tests;

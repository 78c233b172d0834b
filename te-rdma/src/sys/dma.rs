//! Registered memory of the simulated devices: the key table, and the only code of the simulation that
//! touches bytes.
//!
//! Every copy here goes between memory that was found in a table under the fabric's lock, and buffers of our
//! own. `Registrar::register`'s promise covers it until `deregister` returned, and `deregister` takes the
//! same lock.

use std::collections::VecDeque;

use te_core::MemSpan;

use crate::sys::verbs::{MrAccess, Sge};

/// What a key names.
#[derive(Clone, Copy, Debug)]
struct Entry {
    span: MemSpan,
    /// What the owner and its peers call the first byte.
    address: u64,
    access: MrAccess,
}

/// One slot of a device's table. The tag is the last byte of its keys and changes with each use, as on real
/// devices.
#[derive(Debug)]
struct Slot {
    tag: u8,
    entry: Option<Entry>,
}

/// Keys that peers use have this bit, so that mixing the two kinds up never works.
const REMOTE_KEY: u32 = 1 << 31;

/// A device's registrations.
#[derive(Debug, Default)]
pub(crate) struct MrTable {
    slots: Vec<Slot>,
    free: VecDeque<u32>,
    live: u32,
    pinned_bytes: u64,
}

/// Memory that a key and a range gave. Good while the fabric's lock is held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    at: *mut u8,
    len: usize,
    _lock: std::marker::PhantomData<&'a MrTable>,
}

impl MrTable {
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    pub(crate) fn pinned_bytes(&self) -> u64 {
        self.pinned_bytes
    }

    /// Adds a registration; gives its handle and the local and remote key.
    pub(crate) fn insert(
        &mut self,
        span: MemSpan,
        address: u64,
        access: MrAccess,
        first_tag: u8,
    ) -> (u64, u32, u32) {
        let index = self.free.pop_front().unwrap_or_else(|| {
            self.slots.push(Slot { tag: first_tag, entry: None });
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.tag = slot.tag.wrapping_add(1);
        slot.entry = Some(Entry { span, address, access });
        self.live += 1;
        self.pinned_bytes += span.len() as u64;
        let key = (index + 1) << 8 | u32::from(slot.tag);
        let remote = access.intersects(MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE);
        (u64::from(key), key, if remote { key | REMOTE_KEY } else { 0 })
    }

    /// Takes a registration away; false: there is none of that handle.
    pub(crate) fn remove(&mut self, handle: u64) -> bool {
        let Ok(key) = u32::try_from(handle) else { return false };
        let Some(entry) = self.entry(key) else { return false };
        let (bytes, index) = (entry.span.len() as u64, (key >> 8) - 1);
        self.slots[index as usize].entry = None;
        // Oldest first, so that a stale key finds a live slot late rather than soon.
        self.free.push_back(index);
        self.live -= 1;
        self.pinned_bytes -= bytes;
        true
    }

    /// Ends every registration.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// What a peer reaches with `key`, if it may have `right` to all of the range.
    #[inline]
    pub(crate) fn remote(&self, key: u32, addr: u64, len: u64, right: MrAccess) -> Option<Target<'_>> {
        if key & REMOTE_KEY == 0 {
            return None;
        }
        self.find(key & !REMOTE_KEY, addr, len, right)
    }

    /// A piece of a work request; `right` is `LOCAL_WRITE` or nothing.
    #[inline]
    pub(crate) fn local(&self, sge: &Sge, right: MrAccess) -> Option<Target<'_>> {
        self.find(sge.local_key, sge.addr, u64::from(sge.len), right)
    }

    #[inline]
    fn find(&self, key: u32, addr: u64, len: u64, right: MrAccess) -> Option<Target<'_>> {
        let entry = self.entry(key)?;
        let offset = addr.checked_sub(entry.address)?;
        if !entry.access.contains(right) || !entry.span.contains(offset, len) {
            return None;
        }
        Some(Target {
            at: entry.span.as_ptr().wrapping_add(offset as usize),
            len: len as usize,
            _lock: std::marker::PhantomData,
        })
    }

    #[inline]
    fn entry(&self, key: u32) -> Option<&Entry> {
        let index = (key >> 8).checked_sub(1)?;
        let slot = self.slots.get(index as usize)?;
        if slot.tag == key as u8 { slot.entry.as_ref() } else { None }
    }
}

impl Target<'_> {
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The part from `offset` on, at most `len` bytes.
    pub(crate) fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self { at: self.at.wrapping_add(offset), len: len.min(self.len - offset), ..self }
    }

    /// As many bytes as both have, from `source` to here. They may overlap: a device may write to itself.
    pub(crate) fn copy_from(self, source: Target<'_>) {
        // SAFETY: both came out of `MrTable::find`, so they lie inside registered, mapped memory to which no
        // reference exists (the promise of `Registrar::register`), and the lock that `deregister` needs is
        // held.
        unsafe { std::ptr::copy(source.at, self.at, self.len.min(source.len)) };
    }

    /// As many bytes as both have, out of a packet.
    pub(crate) fn write(self, bytes: &[u8]) {
        // SAFETY: as above for `self`; `bytes` is a buffer of the simulation, never registered, so they do
        // not overlap.
        unsafe { te_core::copy_bytes(bytes.as_ptr(), self.at, self.len.min(bytes.len())) };
    }

    /// As many bytes as both have, into a packet.
    pub(crate) fn read(self, bytes: &mut [u8]) {
        // SAFETY: as in `write`, with the direction turned round.
        unsafe { te_core::copy_bytes(self.at, bytes.as_mut_ptr(), self.len.min(bytes.len())) };
    }
}

/// Copies the bytes of an inline request out.
///
/// # Safety
/// `sge` is readable, as `Verbs::post` demands for inline requests.
pub(crate) unsafe fn copy_inline(sge: &Sge, out: &mut [u8]) {
    let from = std::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
    // SAFETY: the caller's promise; `out` is ours alone.
    unsafe { te_core::copy_bytes(from, out.as_mut_ptr(), out.len().min(sge.len as usize)) };
}

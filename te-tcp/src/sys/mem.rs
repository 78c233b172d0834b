//! Registered memory: an address that stays valid because of the promise given at registration.

use te_core::{Error, Location, MemSpan, copy_bytes};

/// Memory of a region. It is the host's, or a device's; the latter is only an address, and its bytes hop to a
/// staging slot and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory(MemSpan);

/// Memory, by what can touch it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reach {
    Host(Pinned),
    Device(MemSpan),
}

impl Memory {
    /// # Safety
    /// That of [`Pinned::new`].
    pub(crate) const unsafe fn new(span: MemSpan) -> Self {
        Self(span)
    }

    #[cfg(test)]
    pub(crate) const fn of(Pinned(span): Pinned) -> Self {
        Self(span)
    }

    #[inline]
    pub(crate) fn part(self, offset: u64, len: u64) -> Result<Self, Error> {
        self.0.part(offset, len).map(Self)
    }

    /// The memory if the host can touch it: it can then be sent from and received into directly.
    #[inline]
    pub(crate) const fn host(self) -> Option<Pinned> {
        if self.is_device() { None } else { Some(Pinned(self.0)) }
    }

    pub(crate) const fn reach(self) -> Reach {
        if self.is_device() { Reach::Device(self.0) } else { Reach::Host(Pinned(self.0)) }
    }

    #[inline]
    pub(crate) const fn is_device(self) -> bool {
        matches!(self.0.location(), Location::Device(..))
    }
}

/// A span, or part of one, that stays mapped until its region is deregistered.
///
/// The transport keeps two counts for each region, of its own slices and of peers' payloads, and gives up a
/// region only when both are zero; each `Pinned` that it holds is covered by one of the two. Every `SAFETY`
/// comment of this crate relies on that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pinned(MemSpan);

impl Pinned {
    /// # Safety
    /// The promise of [`te_core::Memory::register`] holds for `span`, and the value, its copies and its parts
    /// are not used once `deregister` has returned `Ok`.
    pub(crate) const unsafe fn new(span: MemSpan) -> Self {
        Self(span)
    }

    /// Bytes that are never freed, for tests.
    #[cfg(test)]
    pub(crate) fn leaked(bytes: Vec<u8>) -> Self {
        let (len, memory) = (bytes.len(), Box::into_raw(bytes.into_boxed_slice()));
        // SAFETY: the bytes came out of their box, are never freed, and nothing else refers to them.
        unsafe { Self::new(MemSpan::new(memory.cast(), len)) }
    }

    pub(crate) const fn len(self) -> usize {
        self.0.len()
    }

    pub(crate) fn part(self, offset: u64, len: u64) -> Result<Self, Error> {
        self.0.part(offset, len).map(Self)
    }

    /// The part from `offset` to the end; empty when `offset` lies outside.
    pub(crate) fn tail(self, offset: u64) -> Self {
        let left = (self.0.len() as u64).saturating_sub(offset);
        self.0.part(offset, left).map_or(Self(MemSpan::new(self.0.as_ptr(), 0)), Self)
    }

    pub(super) const fn as_ptr(self) -> *mut u8 {
        self.0.as_ptr()
    }

    /// Copies as many of `bytes` as fit to the beginning of the memory.
    pub(crate) fn fill_from(self, bytes: &[u8]) {
        let len = bytes.len().min(self.len());
        // SAFETY: `new`: the span is mapped and no reference to it exists; `bytes` is a reference, so they
        // cannot overlap.
        unsafe { copy_bytes(bytes.as_ptr(), self.as_ptr(), len) };
    }

    /// Copies the bytes out.
    pub(crate) fn to_vec(self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        // SAFETY: as in `fill_from`, in the other direction.
        unsafe { copy_bytes(self.as_ptr(), out.as_mut_ptr(), out.len()) };
        out
    }

    /// CRC32C of the bytes, appended to `crc`. The bytes are copied to a small buffer first, because a peer
    /// may be writing them and the checksum code needs a reference.
    pub(crate) fn crc32c(self, mut crc: u32) -> u32 {
        let mut chunk = [0; 4_096];
        let mut done = 0;
        while done < self.len() {
            let len = (self.len() - done).min(chunk.len());
            // SAFETY: `new`: mapped; `done + len` stays inside; `chunk` is ours.
            unsafe { copy_bytes(self.as_ptr().wrapping_add(done), chunk.as_mut_ptr(), len) };
            crc = crc32c::crc32c_append(crc, &chunk[..len]);
            done += len;
        }
        crc
    }
}

#[cfg(test)]
mod tests {
    use te_core::{GpuVendor, MemoryKinds};

    use super::*;

    #[test]
    fn memory_that_the_host_cannot_touch_is_a_devices() {
        let vendors = [GpuVendor::Nvidia, GpuVendor::Amd, GpuVendor::Intel];
        let devices = vendors.map(|vendor| Location::Device(vendor, 1));
        for location in [Location::Host, Location::Numa(1)].into_iter().chain(devices) {
            let span = Pinned::leaked(vec![0; 8]).0.at(location);
            let is_host = location.kind().contains(MemoryKinds::HOST);
            assert_eq!(Memory(span).host().is_some(), is_host, "{location}");
            assert_eq!(matches!(Memory(span).reach(), Reach::Host(_)), is_host, "{location}");
        }
    }
}

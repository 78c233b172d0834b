//! Registered memory of a client: the table of regions, and copies and checksums of ranges.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use te_core::device::{Allocation, Devices};
use te_core::{ErrorKind, MemSpan, RegionId};
use te_engine::SharedRegion;

use crate::checksum::Checksum;
use crate::error::{DeviceError, StoreError};
use crate::sys;

/// A range of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// The region.
    pub region: RegionId,
    /// Offset in the region, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl BufferRange {
    /// A whole region.
    #[must_use]
    pub fn all(region: &SharedRegion) -> Self {
        Self { region: region.id(), offset: 0, len: region.len() as u64 }
    }

    /// `len` bytes of a region at `offset`.
    #[must_use]
    pub fn part(region: &SharedRegion, offset: u64, len: u64) -> Self {
        Self { region: region.id(), offset, len }
    }
}

/// A part of an object, and its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Offset in the object, bytes.
    pub offset: u64,
    /// The destination. Its length is that of the part.
    pub into: BufferRange,
}

impl Fragment {
    /// Where the part ends in the object; `None` if it is empty or ends beyond the largest offset.
    pub(crate) fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.into.len).filter(|_| self.into.len > 0)
    }
}

impl BufferRange {
    /// Whether the two ranges have a byte in common.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.region == other.region
            && self.offset < other.offset.saturating_add(other.len)
            && other.offset < self.offset.saturating_add(self.len)
    }
}

/// Set in the index of regions of device memory, whose ids the client gives out: the engine does not know
/// them, and its own indexes are below `regions_max`.
const DEVICE: u32 = 1 << 31;
/// The next number of such an id.
static DEVICE_IDS: AtomicU64 = AtomicU64::new(1);

/// Whether the region is memory of a device, by its id alone.
pub(crate) const fn is_device(region: RegionId) -> bool {
    region.index & DEVICE != 0
}

/// Memory of a device, kept alive by the contract of [`Client::register`](crate::Client::register). The CPU
/// never touches it: its bytes are copied by a stager ([`crate::mover`]).
#[derive(Clone)]
pub(crate) struct OnDevice {
    /// With its location.
    pub(crate) span: MemSpan,
    /// What the driver said when it was registered.
    pub(crate) allocation: Allocation,
    pub(crate) devices: Arc<dyn Devices>,
    /// Number of the stager.
    pub(crate) stager: usize,
}

impl OnDevice {
    /// Checks that the memory is still the allocation that was registered.
    fn check(&self) -> Result<(), DeviceError> {
        let Allocation { location, .. } = self.allocation;
        match self.devices.allocation(self.span) {
            Ok(now) if now == self.allocation => Ok(()),
            Err(error) if error.kind == ErrorKind::System || error.kind == ErrorKind::Rail => {
                Err(DeviceError::Failed { location, error })
            }
            _ => Err(DeviceError::Stale { location, addr: self.span.as_ptr().addr() as u64 }),
        }
    }
}

/// The memory of a region.
#[derive(Clone)]
pub(crate) enum Held {
    /// Memory of the engine, kept alive by this handle.
    Shared(SharedRegion),
    /// Memory of the caller, kept alive by the contract of [`Client::register`](crate::Client::register).
    Raw(MemSpan),
    /// Memory of a device.
    Device(OnDevice),
}

/// The regions that a caller may name.
#[derive(Default)]
pub(crate) struct Memory {
    regions: HashMap<RegionId, Held>,
}

impl Memory {
    pub(crate) fn insert(&mut self, region: RegionId, held: Held) {
        self.regions.insert(region, held);
    }

    /// Adds memory of a device, under an id that no client of this process has given out. Its regions may
    /// overlap: a fabric never addresses them.
    pub(crate) fn insert_device(&mut self, memory: OnDevice) -> RegionId {
        let number = DEVICE_IDS.fetch_add(1, Ordering::Relaxed);
        let region = RegionId::new(DEVICE | number as u32, (number >> 31) as u32);
        self.insert(region, Held::Device(memory));
        region
    }

    /// The memory of a device that is registered under this id.
    pub(crate) fn device(&self, region: RegionId) -> Option<&OnDevice> {
        match is_device(region).then(|| self.regions.get(&region)).flatten() {
            Some(Held::Device(device)) => Some(device),
            _ => None,
        }
    }

    /// A range of device memory.
    pub(crate) fn device_span(&self, range: BufferRange) -> Option<MemSpan> {
        self.device(range.region)?.span.part(range.offset, range.len).ok()
    }

    /// Checks that memory of a device is still there; other memory is.
    ///
    /// # Errors
    /// `DeviceMemory`.
    pub(crate) fn check_device(&self, region: RegionId) -> Result<(), StoreError> {
        self.device(region).map_or(Ok(()), |device| device.check().map_err(StoreError::DeviceMemory))
    }

    pub(crate) fn remove(&mut self, region: RegionId) -> Option<Held> {
        self.regions.remove(&region)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Whether the region is known and consists of this span.
    pub(crate) fn is_at(&self, region: RegionId, span: MemSpan) -> bool {
        self.regions.get(&region).is_some_and(|held| held.span() == span)
    }

    /// Whether the range lies inside a known region.
    pub(crate) fn contains(&self, range: BufferRange) -> bool {
        self.regions.get(&range.region).is_some_and(|held| held.span().contains(range.offset, range.len))
    }

    /// Appends a range to a checksum. An invalid range changes nothing.
    pub(crate) fn checksum(&self, range: BufferRange, checksum: &mut Checksum) {
        if let Some(held) = self.regions.get(&range.region) {
            checksum.update_span(held.span(), range.offset, range.len);
        }
    }

    /// Copies bytes of another registered region to a range. An invalid range stays unchanged.
    pub(crate) fn copy_in(&self, from: MemSpan, offset: u64, into: BufferRange) {
        if let Some(held) = self.regions.get(&into.region) {
            sys::copy_span(from, offset, held.span(), into.offset, into.len);
        }
    }

    /// Copies a range to another registered region. Nothing is copied of an invalid range.
    pub(crate) fn copy_out(&self, range: BufferRange, into: MemSpan, offset: u64) {
        if let Some(held) = self.regions.get(&range.region) {
            sys::copy_span(held.span(), range.offset, into, offset, range.len);
        }
    }
}

impl Held {
    fn span(&self) -> MemSpan {
        match self {
            Self::Shared(shared) => shared.span(),
            Self::Raw(span) => *span,
            Self::Device(device) => device.span,
        }
    }
}

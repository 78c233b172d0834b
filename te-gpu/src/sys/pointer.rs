//! What the driver knows about an address.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use te_core::{Error, ErrorKind};

use super::abi::{
    Api, DevicePtr, INVALID_VALUE, MEMORY_TYPE_DEVICE, Opaque, POINTER_ALLOWED_HANDLE_TYPES,
    POINTER_BUFFER_ID, POINTER_CONTEXT, POINTER_DEVICE_ORDINAL, POINTER_IS_GPU_DIRECT_RDMA_CAPABLE,
    POINTER_IS_LEGACY_IPC_CAPABLE, POINTER_IS_MANAGED, POINTER_MAPPING_BASE, POINTER_MAPPING_SIZE,
    POINTER_MEMORY_BLOCK_ID, POINTER_MEMORY_TYPE, POINTER_RANGE_SIZE, POINTER_RANGE_START, SUCCESS,
};
use super::device::{Device, error_of};
use super::load::Driver;

/// Mappings of one span; a span of more is refused.
const MAPPINGS_MAX: usize = 65_536;

/// What the driver knows about one address of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) ordinal: u16,
    /// The allocation, or the reserved range that the mapping lies in.
    pub(crate) start: DevicePtr,
    pub(crate) bytes: usize,
    /// The part of the allocation that the mapping of the address has; the allocation where the driver does
    /// not tell them apart.
    pub(crate) mapping: DevicePtr,
    pub(crate) mapping_bytes: usize,
    /// The whole mapping, which several small allocations may share.
    pub(crate) whole: (DevicePtr, usize),
    /// The context that it was allocated in; 0: it belongs to none, or the driver does not tell.
    pub(crate) context: usize,
    /// Whether it is memory of `cuMemAlloc`.
    pub(crate) is_legacy: bool,
    pub(crate) handle_types: u32,
    pub(crate) gpu_direct: bool,
    /// Numbers that no two allocations of a process share: of the address range and of the memory block.
    pub(crate) ids: (u64, u64),
}

impl Found {
    fn end(&self) -> DevicePtr {
        self.mapping.saturating_add(self.mapping_bytes as u64)
    }
}

/// One call for all attributes. `None`: not device memory, or managed memory, which is treated as host
/// memory.
///
/// # Errors
/// The driver's.
pub(crate) fn find(driver: &Driver, at: DevicePtr) -> Result<Option<Found>, Error> {
    let (mut kind, mut managed, mut ordinal, mut legacy) = (0_u32, 0_u32, -1_i32, 0_i32);
    let (mut start, mut bytes, mut handle_types, mut gpu_direct) = (0_u64, 0_usize, 0_u32, 0_i32);
    let (mut buffer, mut mapping_bytes, mut mapping, mut block) = (0_u64, 0_usize, 0_u64, 0_u64);
    let mut context: Opaque = std::ptr::null_mut();
    // Those of both interfaces come first, then those of every CUDA driver. HIP has the attribute of the
    // size, but writes 32 bits of it.
    let asked: [(c_int, *mut c_void); 13] = [
        (POINTER_MEMORY_TYPE, (&raw mut kind).cast()),
        (POINTER_IS_MANAGED, (&raw mut managed).cast()),
        (POINTER_DEVICE_ORDINAL, (&raw mut ordinal).cast()),
        (POINTER_BUFFER_ID, (&raw mut buffer).cast()),
        (POINTER_RANGE_START, (&raw mut start).cast()),
        (POINTER_RANGE_SIZE, (&raw mut bytes).cast()),
        (POINTER_CONTEXT, (&raw mut context).cast()),
        (POINTER_IS_LEGACY_IPC_CAPABLE, (&raw mut legacy).cast()),
        (POINTER_ALLOWED_HANDLE_TYPES, (&raw mut handle_types).cast()),
        (POINTER_IS_GPU_DIRECT_RDMA_CAPABLE, (&raw mut gpu_direct).cast()),
        (POINTER_MAPPING_SIZE, (&raw mut mapping_bytes).cast()),
        (POINTER_MAPPING_BASE, (&raw mut mapping).cast()),
        (POINTER_MEMORY_BLOCK_ID, (&raw mut block).cast()),
    ];
    let (names, places) = (asked.map(|(name, _)| name), asked.map(|(_, place)| place));
    let ask = |count: u32| {
        // SAFETY: as many names as places, each of which has the size of its attribute; the address is not
        // accessed.
        unsafe { (driver.pointer_attributes)(count, names.as_ptr(), places.as_ptr(), at) }
    };
    let code = match driver.api {
        Api::Hip => ask(4),
        Api::Cuda => match ask(13) {
            // A driver that does not know one of the attributes refuses all.
            INVALID_VALUE => ask(10),
            code => code,
        },
    };
    if code != SUCCESS {
        return Err(error_of(code));
    }
    let Ok(ordinal) = u16::try_from(ordinal) else { return Ok(None) };
    if kind != MEMORY_TYPE_DEVICE || managed != 0 {
        return Ok(None);
    }
    if driver.api == Api::Hip {
        // SAFETY: writes two numbers; the address is not accessed.
        let code = unsafe { (driver.address_range)(&raw mut start, &raw mut bytes, at) };
        if code != SUCCESS {
            return Err(error_of(code));
        }
    }
    if bytes == 0 {
        return Ok(None);
    }
    if mapping_bytes == 0 {
        (mapping, mapping_bytes) = (start, bytes);
    }
    let whole = (mapping, mapping_bytes);
    let end = mapping.saturating_add(mapping_bytes as u64).min(start.saturating_add(bytes as u64));
    mapping = mapping.max(start);
    let Some(mapping_bytes) = end.checked_sub(mapping) else { return Ok(None) };
    Ok(Some(Found {
        ordinal,
        start,
        bytes,
        mapping,
        mapping_bytes: mapping_bytes as usize,
        whole,
        context: context.addr(),
        // HIP does not report it, and its IPC takes the base of any allocation.
        is_legacy: legacy != 0 || driver.api == Api::Hip,
        handle_types,
        gpu_direct: gpu_direct != 0,
        ids: (buffer, block),
    }))
}

/// The mappings that a span lies in, in their order: one for most memory, several for an address range into
/// which memory was mapped piece by piece.
///
/// # Errors
/// `NotFound` when its first byte is not device memory, `OutOfRange` when the span leaves its allocation or
/// device; the driver's.
pub(crate) fn walk(
    driver: &Driver,
    at: DevicePtr,
    len: usize,
    mut each: impl FnMut(Found),
) -> Result<Found, Error> {
    let end = at.checked_add(len.max(1) as u64).ok_or(ErrorKind::OutOfRange)?;
    let first = find(driver, at)?.ok_or(ErrorKind::NotFound)?;
    let mut found = first;
    for _ in 0..MAPPINGS_MAX {
        each(found);
        if found.end() >= end {
            return Ok(first);
        }
        // Two neighbours of `cuMemAlloc` are two allocations.
        if found.is_legacy {
            break;
        }
        let next = find(driver, found.end())?.ok_or(ErrorKind::OutOfRange)?;
        if next.is_legacy || next.ordinal != first.ordinal || next.end() <= found.end() {
            break;
        }
        found = next;
    }
    Err(ErrorKind::OutOfRange.into())
}

/// The device of a span, from one list of them.
///
/// # Errors
/// As [`walk`].
pub(crate) fn device_of<'a>(
    mut devices: impl Iterator<Item = &'a Arc<Device>> + Clone,
    at: DevicePtr,
    len: usize,
) -> Result<(Arc<Device>, Found), Error> {
    let driver = &devices.clone().next().ok_or(ErrorKind::NotFound)?.driver;
    let found = walk(driver, at, len, |_| {})?;
    let device = devices.find(|device| device.info.ordinal == found.ordinal);
    Ok((Arc::clone(device.ok_or(ErrorKind::NotFound)?), found))
}
